"""The part of the verifier that proves that transfers cannot hang, on a transport without buffers.

Each edge between neighbouring stages has a communicator for each direction, and each rank a stream
for each communicator: a send is over when its receive is, and neither before both ranks have posted
all before it on the same communicator. Beside that the streams must survive, each by itself, what
NCCL and CUDA may do at their worst:

* the first use of a communicator holds up the host of a rank until its peer uses it too;
* any F, B, I, W or STEP may wait for the whole device (a kernel that is loaded, memory that is
  returned), so for all that its rank has posted. No communicator is new then: an engine uses each
  once before its first step.

Streams that end under either end on a transport with buffers as well.
Deviation: the paper assumes that transfers are asynchronous.
"""

from __future__ import annotations

from collections import deque

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op

__all__ = ["check_transfers"]

# by operation: the peer's operation that meets it, and the peer's stage relative to this one
_PARTNERS = {
    Op.SEND_ACTIVATION: (Op.RECV_ACTIVATION, 1),
    Op.RECV_ACTIVATION: (Op.SEND_ACTIVATION, -1),
    Op.SEND_GRADIENT: (Op.RECV_GRADIENT, -1),
    Op.RECV_GRADIENT: (Op.SEND_GRADIENT, 1),
}
_SOURCES = {
    Op.FORWARD: Op.RECV_ACTIVATION,
    Op.BACKWARD: Op.RECV_GRADIENT,
    Op.BACKWARD_INPUT: Op.RECV_GRADIENT,
}
_SHOWN = 8  # stages named in an error


def check_transfers(plan: Plan) -> None:
    """Raise ScheduleError unless both ends of a channel agree and no stage can wait for ever.

    Each stage must hold exactly the instructions that it needs.
    """
    for stage in range(plan.layout.pp - 1):
        _check_channel(plan, stage, stage + 1, Op.SEND_ACTIVATION)
        _check_channel(plan, stage + 1, stage, Op.SEND_GRADIENT)
    for waits_for_device in (False, True):
        _Ranks(plan, waits_for_device).run()


def _check_channel(plan: Plan, sender: int, receiver: int, send: Op) -> None:
    receive, _ = _PARTNERS[send]
    sent = [i.chunk for i in plan.streams[sender] if i.op is send]
    received = [i.chunk for i in plan.streams[receiver] if i.op is receive]
    for number, (out, into) in enumerate(zip(sent, received, strict=True)):
        if out != into:
            raise ScheduleError(
                f"channel from stage {sender} to stage {receiver}: transfer {number} is sent as "
                f"{send.value}{out} but received as {receive.value}{into}; channels are first in, "
                "first out, so both sides need one order"
            )


class _Ranks:
    """One rank of every stage, each as far in its stream as the others let it.

    Either every operation waits for the device, or the first use of a channel for its peer.
    """

    def __init__(self, plan: Plan, waits_for_device: bool) -> None:
        self._streams = plan.streams
        self._waits_for_device = waits_for_device
        self._position = [0] * plan.layout.pp
        self._is_announced = [False] * plan.layout.pp  # the instruction at which a stage stands
        counts = [dict.fromkeys(self._transfers_of(p), 0) for p in range(plan.layout.pp)]
        self._posted: list[dict[Op, int]] = counts
        self._taken: list[dict[Op, int]] = [dict(kinds) for kinds in counts]

    def run(self) -> None:
        """All streams to their ends; raises ScheduleError where some cannot get there."""
        awake = deque(range(len(self._streams)))
        while awake:
            stage = awake.popleft()
            while self._position[stage] < len(self._streams[stage]):
                op = self._streams[stage][self._position[stage]].op
                if op in _PARTNERS and not self._is_announced[stage]:
                    self._is_announced[stage] = True
                    self._posted[stage][op] += 1
                    awake.append(stage + _PARTNERS[op][1])
                if self._obstacle(stage, op) is not None:
                    break
                self._pass(stage, op)
        self._check_ended()

    def _transfers_of(self, stage: int) -> list[Op]:
        return [op for op, (_, step) in _PARTNERS.items() if 0 <= stage + step < len(self._streams)]

    def _pass(self, stage: int, op: Op) -> None:
        self._position[stage] += 1
        self._is_announced[stage] = False
        if _SOURCES.get(op) in self._taken[stage]:
            self._taken[stage][_SOURCES[op]] += 1

    def _obstacle(self, stage: int, op: Op) -> tuple[Op, int] | None:
        """A transfer of this stage, kind and number, that the peer must meet before `op` ends."""
        if op in _PARTNERS:
            is_new = not self._waits_for_device and self._met(stage, op) == 0
            return (op, 0) if is_new else None
        if self._waits_for_device or op is Op.STEP:
            posted = self._posted[stage].items()
            short = [own for own, number in posted if number > self._met(stage, own)]
            return (short[0], self._met(stage, short[0])) if short else None
        source = _SOURCES.get(op)
        if source not in self._taken[stage]:
            return None
        number = self._taken[stage][source]
        return (source, number) if self._met(stage, source) <= number else None

    def _met(self, stage: int, op: Op) -> int:
        """How many of the peer's transfers could meet those of `op`."""
        partner, step = _PARTNERS[op]
        return self._posted[stage + step][partner]

    def _check_ended(self) -> None:
        stuck = [p for p, stream in enumerate(self._streams) if self._position[p] < len(stream)]
        if not stuck:
            return
        rows = "; ".join(self._describe(stage) for stage in stuck[:_SHOWN])
        event = "operations wait for the device" if self._waits_for_device else "channels connect"
        raise ScheduleError(
            f"the streams deadlock where {event} and nothing is buffered, with {len(stuck)} stages "
            f"stuck: {rows}"
        )

    def _describe(self, stage: int) -> str:
        stream, position = self._streams[stage], self._position[stage]
        obstacle = self._obstacle(stage, stream[position].op)
        assert obstacle is not None
        own, number = obstacle
        partner, step = _PARTNERS[own]
        chunk = [i.chunk for i in stream if i.op is own][number]
        return (
            f"stage {stage} waits at {stream[position]} ({position} of {len(stream)} done) for "
            f"{partner.value}{chunk} of stage {stage + step}"
        )
