"""Whether transfers can hang on a transport without buffers, and what posting receives late costs.

Orders of many kinds, drawn at random (1 to 16 stages, windows that shrink, split backwards, fewer
chunks than stages, training and evaluation), and the planner's own, each with receives where
plan/lower.py posts them and, as earlier versions did, one operation ahead. Judged by the graph of
tests/oracles/deadlocks.py, which is not the verifier's.

The cost is simulated for lean plans of three length laws at pp 4 and 8: a transfer starts when both
ranks have posted it and their channel is free. "ahead" has hosts that run ahead of their devices,
as on GPUs; "in step" has hosts that post a receive when the operation before it is over.

    python benchmarks/transfer_order.py [--plans 2000] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "planner")]

from oracles.deadlocks import deadlocks  # noqa: E402
from stream_orders import lean_streams, posted_ahead  # noqa: E402

from ds_infinipipe.checks.random_plans import random_plan  # noqa: E402
from ds_infinipipe.data.lengths import sample_lengths  # noqa: E402
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS  # noqa: E402
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS  # noqa: E402
from ds_infinipipe.planner.facts.settings import PlannerSettings  # noqa: E402
from ds_infinipipe.planner.facts.setup import Setup, make_layout, make_setup  # noqa: E402
from ds_infinipipe.planner.plan.plan import Plan  # noqa: E402
from ds_infinipipe.planner.plan.stream import Instruction, Op  # noqa: E402
from ds_infinipipe.planner.predict.time import CostModel  # noqa: E402
from ds_infinipipe.planner.search.batch import plan_batch  # noqa: E402

RESULT = Path(__file__).parent / "results" / "transfer_order.json"
MOST_COST = 0.001
LAWS = ("github-a", "github-b", "commoncrawl")
SHORT = ([65536], [65536] + [1500] * 7, [1200] * 8)
FORWARD_ONLY = (Op.FORWARD, Op.SEND_ACTIVATION, Op.RECV_ACTIVATION)
SENDS = {Op.SEND_ACTIVATION: 1, Op.SEND_GRADIENT: -1}
RECEIVES = {Op.RECV_ACTIVATION: -1, Op.RECV_GRADIENT: 1}
Streams = Sequence[Sequence[Instruction]]


def setup_of(model: str, pp: int) -> Setup:
    spec = BUILTIN_MODELS[model]
    layout = make_layout(spec, pp=pp, sp=32 // pp)
    return make_setup(spec, BUILTIN_CLUSTERS["a800-80g-4x8"], layout, memory_limit_gib=72.0)


def drawn(number: int) -> Iterator[tuple[str, Streams]]:
    """Random orders, every fourth a random plan of the executor's tests, and planned batches."""
    for seed in range(number):
        rng = np.random.default_rng(seed)
        if seed % 4:
            yield "random windows", lean_streams(rng)
        else:
            lengths = rng.integers(8, 4000, size=rng.integers(1, 14)).tolist()
            setup = setup_of("llama-7b", int(rng.choice([2, 4, 8, 16])))
            yield "random plans", random_plan(lengths, rng, setup).streams
    rng = np.random.default_rng(11)
    for mode in ("lean", "paper"):
        for pp in (2, 4, 8):
            for lengths in (*SHORT, rng.integers(200, 4000, 64).tolist()):
                settings = PlannerSettings.model_validate({"mode": mode})
                plan = plan_batch(lengths, setup_of("llama-7b", pp), settings)
                yield f"{mode} plans", plan.streams


def count_hangs(number: int) -> dict[str, dict[str, int]]:
    """By kind of order: how many there are, and how many hang, with receives late and early."""
    counts: dict[str, Counter[str]] = {}
    for kind, streams in drawn(number):
        found = counts.setdefault(kind, Counter())
        found["orders"] += 1
        forward = [[i for i in stream if i.op in FORWARD_ONLY] for stream in streams]
        orders = {"now": streams, "evaluation": forward, "early": posted_ahead(streams)}
        for name, order in orders.items():
            found[f"{name} hang where channels connect"] += deadlocks(order, connects_late=True)
            found[f"{name} hang where devices are waited for"] += deadlocks(
                order, waits_for_device=True
            )
    return {kind: dict(found) for kind, found in counts.items()}


def step_s(plan: Plan, streams: Streams, *, in_step: bool) -> float:
    """Seconds until the last stage is done; see the module."""
    costs = CostModel(plan.setup).chunk_costs(plan.chunks)
    times = {
        Op.FORWARD: costs.forward_s,
        Op.BACKWARD: costs.backward_s,
        Op.BACKWARD_INPUT: costs.input_s,
        Op.BACKWARD_WEIGHT: costs.weight_s,
    }
    clock = [0.0] * len(streams)
    done = [0] * len(streams)
    posted: dict[tuple[int, int, Op, int], float] = {}  # sender, receiver, its receive, chunk
    sent: dict[tuple[int, int, Op, int], float] = {}
    free: Counter[tuple[int, int]] = Counter()
    arrived: dict[tuple[int, Op, int], float] = {}
    has_moved = True
    while has_moved:
        has_moved = False
        for stage, stream in enumerate(streams):
            while done[stage] < len(stream):
                op, chunk = stream[done[stage]].op, stream[done[stage]].chunk
                source = _source(stage, len(streams), op)
                if source is not None and (stage, source, chunk) not in arrived:
                    break
                if op in times:
                    if source is not None:
                        clock[stage] = max(clock[stage], arrived[stage, source, chunk])
                    again = 0 if op is Op.FORWARD else stream[done[stage]].recompute
                    clock[stage] += times[op][stage, chunk] + again * costs.recompute_s[chunk]
                elif op in SENDS:
                    taker = Op.RECV_ACTIVATION if op is Op.SEND_ACTIVATION else Op.RECV_GRADIENT
                    sent[stage, stage + SENDS[op], taker, chunk] = clock[stage]
                elif op in RECEIVES:
                    at = clock[stage] if in_step else 0.0
                    posted[stage + RECEIVES[op], stage, op, chunk] = at
                done[stage] += 1
                has_moved = True
                for key in [k for k in sent if k in posted]:
                    edge = key[:2]
                    start = max(sent.pop(key), posted.pop(key), free[edge])
                    free[edge] = start + costs.p2p_s[key[3]]
                    arrived[key[1], key[2], key[3]] = free[edge]
    assert all(n == len(stream) for n, stream in zip(done, streams, strict=True))
    return max(clock)


def _source(stage: int, stages: int, op: Op) -> Op | None:
    """The receive that an operation waits for."""
    if op is Op.FORWARD and stage > 0:
        return Op.RECV_ACTIVATION
    return Op.RECV_GRADIENT if op.makes_gradient and stage < stages - 1 else None


def measure_cost(law: str, pp: int) -> dict[str, Any]:
    """Late over early posting, minus 1, for both kinds of host."""
    lengths = sample_lengths(law, 512, 65536, np.random.default_rng(0))
    lengths[0] = 65536
    setup = setup_of("llama-13b", pp)
    plan = plan_batch(lengths.tolist(), setup, PlannerSettings(mode="lean"))
    row: dict[str, Any] = {"lengths": law, "pp": pp, "chunks": len(plan.chunks)}
    before = posted_ahead(plan.streams)
    for name, in_step in (("ahead", False), ("in step", True)):
        late_s = step_s(plan, plan.streams, in_step=in_step)
        row[f"cost, hosts {name}"] = float(late_s / step_s(plan, before, in_step=in_step) - 1)
    return row


def main() -> int:
    """Print both tables, write the result; 1 if an order hangs or hosts that run ahead pay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    hangs = count_hangs(args.plans)
    for kind, counts in hangs.items():
        print(kind, counts, flush=True)
    costs = []
    for pp in (4, 8):
        for law in LAWS:
            costs.append(measure_cost(law, pp))
            print(costs[-1], flush=True)
    command = f"python benchmarks/transfer_order.py --plans {args.plans}"
    result = {"command": command, "hangs": hangs, "costs": costs}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    hanging = [
        number
        for counts in hangs.values()
        for name, number in counts.items()
        if name.startswith(("now", "evaluation"))
    ]
    return int(any(hanging) or max(row["cost, hosts ahead"] for row in costs) > MOST_COST)


if __name__ == "__main__":
    raise SystemExit(main())
