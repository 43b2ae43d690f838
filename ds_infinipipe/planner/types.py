"""What a plan is made of. Frozen, pure data; every other planner module maps between these.

All indices are 0-based. Tokens and bytes are ints, times are float seconds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.specs import ClusterSpec, Layout, ModelSpec

__all__ = [
    "PLAN_VERSION",
    "Chunk",
    "ChunkKind",
    "Instruction",
    "Op",
    "PipelinePlan",
    "Plan",
    "Prediction",
    "SequenceGroup",
    "Slice",
    "SolverStats",
    "Span",
    "Timeline",
]

PLAN_VERSION = 4


class ChunkKind(str, Enum):
    """The paper's three kinds (III-A1); here any slice, not only a tail, may make a hybrid."""

    SPLIT = "split"
    BATCHED = "batched"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Slice:
    """Contiguous tokens `[start, start + length)` of sequence number `sequence` of the batch."""

    sequence: int
    start: int
    length: int
    is_tail: bool

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_whole(self) -> bool:
        """True when the sequence was not cut."""
        return self.start == 0 and self.is_tail


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slices that run together; DeepSpeed's micro-batch.

    Only `slices[0]` may belong to a cut sequence; all others are whole sequences. `padding`
    tokens follow the last slice as a segment of their own, so no real token ever attends to them.
    """

    slices: tuple[Slice, ...]
    padding: int = 0

    @property
    def tokens(self) -> int:
        """Real tokens, without padding."""
        return sum(s.length for s in self.slices)

    @property
    def padded_tokens(self) -> int:
        return self.tokens + self.padding

    @property
    def keeps_kv(self) -> bool:
        """True when `slices[0]` is part of a cut sequence, whose K/V live in an arena.

        Deviation: the paper writes (1 - I_k) for this flag and defines I_k the other way round.
        """
        return not self.slices[0].is_whole

    @property
    def context_len(self) -> int:
        """Tokens of earlier slices that `slices[0]` attends to; the paper's C_k."""
        return self.slices[0].start

    @property
    def split_tokens(self) -> int:
        """Tokens of the cut sequence's slice, 0 for a batched chunk."""
        return self.slices[0].length if self.keeps_kv else 0

    @property
    def longest_segment(self) -> int:
        """Most tokens that attend to each other, padding being a segment too."""
        return max(self.padding, max(s.length for s in self.slices))

    @property
    def kind(self) -> ChunkKind:
        if not self.keeps_kv:
            return ChunkKind.BATCHED
        return ChunkKind.SPLIT if len(self.slices) == 1 else ChunkKind.HYBRID


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Chunks that share one 1F1B pipeline, in forward order (the paper's S_P)."""

    chunks: tuple[int, ...]
    num_split: int


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """One 1F1B pipeline: chunk ids in forward and in backward order.

    `recompute[stage][i]` is the number of decoder layers that stage recomputes for `forward[i]`.
    `num_split` is the largest slice count of a sequence in it (N_split of Eq. 7).
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    recompute: tuple[tuple[int, ...], ...]
    num_split: int


class Op(str, Enum):
    """What a stage can be told to do; the value is the text form.

    B is a whole backward. I is its first half, the gradient of the chunk's input, which another
    stage may wait for; W is the rest, the gradients of the weights, which only STEP waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECV_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECV_GRADIENT = "RECV_B"
    STEP = "STEP"

    @property
    def is_compute(self) -> bool:
        return self in _COMPUTE

    @property
    def makes_gradient(self) -> bool:
        """True for B and I, which take and make the gradients that stages exchange."""
        return self is Op.BACKWARD or self is Op.BACKWARD_INPUT

    @property
    def may_recompute(self) -> bool:
        """True for F, B and I, which state how many layers are recomputed."""
        return self is Op.FORWARD or self.makes_gradient


_COMPUTE = frozenset((Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))

_INSTRUCTION_TEXT = re.compile(r"(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?:r(\d+))?")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a stage's stream; `recompute` counts layers and belongs to F, B and I."""

    op: Op
    chunk: int = -1
    recompute: int = 0

    def __str__(self) -> str:
        if self.op is Op.STEP:
            return str(self.op.value)
        suffix = f"r{self.recompute}" if self.recompute else ""
        return f"{self.op.value}{self.chunk}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Inverse of `str`; raises ScheduleError on anything else."""
        if text == Op.STEP.value:
            return cls(Op.STEP)
        match = _INSTRUCTION_TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"'{text}' is not an instruction: expected forms are F3, F3r2, B3, I3, W3, "
                "SEND_F3, RECV_F3, SEND_B3, RECV_B3 and STEP"
            )
        op = Op(match.group(1))
        recompute = int(match.group(3) or 0)
        if recompute and not op.may_recompute:
            raise ScheduleError(f"'{text}': only F, B and I carry a number of recomputed layers")
        return cls(op, int(match.group(2)), recompute)


@dataclass(frozen=True, slots=True)
class Span:
    """One F, B, I or W on one stage, simulated or measured."""

    stage: int
    op: Op
    chunk: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of one step; `bubble_ratio` is idle time over makespan, averaged over stages."""

    spans: tuple[Span, ...]
    makespan_s: float
    bubble_ratio: float
    busy_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator and the memory model say about a plan."""

    step_time_s: float
    bubble_ratio: float
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SolverStats:
    """How a plan was found. `status`: "optimal" (within the gap), "feasible", "fallback"."""

    mode: str
    k: int
    status: str
    gap: float
    time_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the executor needs for one optimizer step, the same on every rank.

    `zero_stage` and `loss_block_tokens` are what `predicted.peak_bytes` was counted for. With
    `keeps_gathered` a stage gathers each layer's parameters once and releases them at STEP.
    """

    model: ModelSpec
    cluster: ClusterSpec
    layout: Layout
    lengths: tuple[int, ...]
    alignment: int
    memory_limit_bytes: int
    chunks: tuple[Chunk, ...]
    pipelines: tuple[PipelinePlan, ...]
    streams: tuple[tuple[Instruction, ...], ...]
    predicted: Prediction
    solver: SolverStats
    zero_stage: int = 3
    loss_block_tokens: int = 1024
    keeps_gathered: bool = False
    version: int = PLAN_VERSION

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def padding_tokens(self) -> int:
        return sum(c.padding for c in self.chunks)

    def for_stage(self, stage: int) -> tuple[Instruction, ...]:
        return self.streams[stage]

    def digest(self) -> str:
        """sha256 of the canonical JSON without the solving time; equal plans, equal digests."""
        body = self._body()
        del body["solver"]["time_s"]
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _body(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "model": asdict(self.model),
            "cluster": asdict(self.cluster),
            "layout": asdict(self.layout),
            "lengths": list(self.lengths),
            "alignment": self.alignment,
            "memory_limit_bytes": self.memory_limit_bytes,
            "zero_stage": self.zero_stage,
            "loss_block_tokens": self.loss_block_tokens,
            "keeps_gathered": self.keeps_gathered,
            "chunks": [_chunk_to_json(c) for c in self.chunks],
            "pipelines": [asdict(p) for p in self.pipelines],
            "streams": [[str(i) for i in stream] for stream in self.streams],
            "predicted": asdict(self.predicted),
            "solver": asdict(self.solver),
        }

    def to_json(self, indent: int | None = None) -> str:
        """JSON text; `digest` stands in it, so that an edited file is noticed."""
        return json.dumps({"digest": self.digest(), **self._body()}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of `to_json`; raises ScheduleError on a foreign version or a wrong digest."""
        try:
            data = json.loads(text)
            plan, stated = cls._from_mapping(data), data["digest"]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ScheduleError(
                f"not a plan file of version {PLAN_VERSION} ({error!r}): it is another file, or "
                "cut off or edited; plan the batch again"
            ) from error
        if stated != plan.digest():
            raise ScheduleError(
                f"the plan file states digest {str(stated)[:12]} but its content has "
                f"{plan.digest()[:12]}: it was edited or damaged; plan the batch again"
            )
        return plan

    @classmethod
    def _from_mapping(cls, data: Mapping[str, Any]) -> Plan:
        if data["version"] != PLAN_VERSION:
            raise ValueError(f"version {data['version']}")
        lengths = tuple(data["lengths"])
        layout = {**data["layout"], "stage_layers": _ints(data["layout"]["stage_layers"])}
        predicted, solver = data["predicted"], data["solver"]
        # the digest leaves it out
        solver["time_s"] = float(solver["time_s"])
        return cls(
            model=ModelSpec(**data["model"]),
            cluster=ClusterSpec(**data["cluster"]),
            layout=Layout(**layout),
            lengths=lengths,
            alignment=data["alignment"],
            memory_limit_bytes=data["memory_limit_bytes"],
            chunks=tuple(_chunk_from_json(c, lengths) for c in data["chunks"]),
            pipelines=tuple(_pipeline_from_json(p) for p in data["pipelines"]),
            streams=tuple(tuple(map(Instruction.parse, s)) for s in data["streams"]),
            predicted=Prediction(
                predicted["step_time_s"], predicted["bubble_ratio"], _ints(predicted["peak_bytes"])
            ),
            solver=SolverStats(**solver),
            zero_stage=data["zero_stage"],
            loss_block_tokens=data["loss_block_tokens"],
            keeps_gathered=data["keeps_gathered"],
        )


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _chunk_to_json(chunk: Chunk) -> dict[str, Any]:
    slices = [{"sequence": s.sequence, "start": s.start, "length": s.length} for s in chunk.slices]
    return {"slices": slices, "padding": chunk.padding}


def _chunk_from_json(data: Mapping[str, Any], lengths: tuple[int, ...]) -> Chunk:
    slices = tuple(
        Slice(
            s["sequence"],
            s["start"],
            s["length"],
            s["start"] + s["length"] == lengths[s["sequence"]],
        )
        for s in data["slices"]
    )
    return Chunk(slices, data["padding"])


def _pipeline_from_json(data: Mapping[str, Any]) -> PipelinePlan:
    return PipelinePlan(
        forward=_ints(data["forward"]),
        backward=_ints(data["backward"]),
        recompute=tuple(_ints(row) for row in data["recompute"]),
        num_split=int(data["num_split"]),
    )
