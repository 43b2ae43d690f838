"""What 200 fixed batches are planned as, for comparing the planner before and after a change.

All layouts, both modes, models with and without windows, FP8, replicas, tight and ample memory. No
deadline, and lengths from whole numbers only, so that a machine gives the digests of any other.
Of each batch: `digest` is that of its plans; `decided` leaves out all but chunks, pipelines,
streams, and step time and peaks to nine digits, so it outlives a new format of plans.

    python benchmarks/plan_digests.py [--out FILE] [--against FILE] [--only SUBSTRING]

With --against it lists the batches that differ from those of FILE and exits with 1 if any do.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ds_infinipipe.errors import InfiniPipeError
from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.facts.models import ModelSpec, load_model
from ds_infinipipe.planner.facts.settings import PlannerSection
from ds_infinipipe.planner.facts.setup import Execution, make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.search.layouts import plan_replicas

NUM_BATCHES = 200
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # with fields of the model or its execution
    "7b": ("llama-7b", {}),
    "13b": ("llama-13b", {}),
    "7b-window": ("llama-7b", {"sliding_window": 4096, "window_layers": 32}),
    "7b-half-window": ("llama-7b", {"sliding_window": 1024, "window_layers": 16}),
    "13b-gqa": ("llama-13b", {"num_kv_heads": 8, "vocab_size": 128256, "joins_qkv": False}),
    "7b-fp8": ("llama-7b", {"fp8": True}),
    "7b-plain": ("llama-7b", {"fused_kernels": False, "has_head_norms": True}),
    "7b-host": ("llama-7b", {"offloads_optimizer": True, "tied_embeddings": True}),
    "7b-cut": ("llama-7b", {"shards_optimizer_over_dp": True}),
    "7b-fp32": ("llama-7b", {"dtype_bytes": 4}),
}
LAYOUTS = (
    *((1, 8, 1), (2, 8, 1), (4, 8, 1), (8, 4, 1), (4, 4, 2), (2, 8, 2), (1, 8, 4)),
    *((16, 2, 1), (2, 4, 4), (3, 8, 1), (1, 32, 1)),
)
LIMITS_GIB = ("auto", "auto", 60.0, 44.0, 34.0, 27.0)
SETTINGS: tuple[dict[str, Any], ...] = (
    *({}, {}, {}, {"gather": "chunk"}, {"gather": "step"}, {"split_backward": "never"}),
    *({"solver": "greedy"}, {"recompute": "full"}, {"recompute": "none"}, {"max_slices": 3}),
    *({"lean_solver": "stage"}, {"alignment": 48}, {"loss_block_tokens": 256}, {"seed": 7}),
    {"token_limit": 40000},
)


@dataclass(frozen=True)
class Batch:
    """A batch and what it is planned for."""

    name: str
    lengths: list[int]
    model: str
    cluster: str
    degrees: tuple[int, int, int]
    is_uneven: bool
    zero_stage: int
    settings: PlannerSection


def batches() -> Iterator[Batch]:
    """The fixed batches; two of three in lean mode."""
    for number in range(NUM_BATCHES):
        rng = random.Random(number)
        mode = "paper" if number % 3 == 2 else "lean"
        model, degrees = list(MODELS)[number % len(MODELS)], rng.choice(LAYOUTS)
        limit, changes = rng.choice(LIMITS_GIB), rng.choice(SETTINGS)
        zero_stage = 0 if rng.randrange(5) == 0 else 3
        yield Batch(
            name=f"{number:03d} {mode} {model} {degrees} {limit} zero {zero_stage} {changes}",
            lengths=draw_lengths(rng, rng.choice((1, 6, 24, 64, 64, 128))),
            model=model,
            cluster=rng.choice(("a800-80g-4x8", "h100-80g-4x8")),
            degrees=degrees,
            is_uneven=degrees[0] > 1 and rng.randrange(6) == 0,
            zero_stage=zero_stage,
            settings=PlannerSection(mode=mode, memory_limit_gib=limit, **changes),
        )


def draw_lengths(rng: random.Random, count: int) -> list[int]:
    """Mostly short ones, few of up to 64K; whole numbers all the way."""
    exponents = (5, 7, 8, 9, 9, 10, 10, 10, 11, 11, 11, 11, 12, 12, 12, 13, 13, 14, 15)
    lows = [2 ** rng.choice(exponents) for _ in range(count)]
    return [low + rng.randrange(low) for low in lows]


def plans_of(batch: Batch) -> list[Plan]:
    """One plan of each replica. All that depends on the planner's signatures is here."""
    name, changes = MODELS[batch.model]
    names = {field.name for field in fields(ModelSpec)}
    model = replace(load_model(name), **{k: v for k, v in changes.items() if k in names})
    run = {k: v for k, v in changes.items() if k not in names}
    layout = make_layout(model, *batch.degrees)
    if batch.is_uneven:
        first, *others = layout.stage_layers
        layers = (first + 1, *others[:-1], others[-1] - 1)
        layout = replace(layout, stage_layers=layers)
    execution = Execution(zero_stage=batch.zero_stage, **run)
    setup = batch.settings.setup(model, load_cluster(batch.cluster), layout, execution)
    return list(plan_replicas(batch.lengths, setup, batch.settings.settings))


def decisions(plan: Plan) -> dict[str, Any]:
    """What was decided, in lists, numbers and text."""
    return {
        "chunks": [
            [[(s.sequence, s.start, s.length) for s in chunk.slices], chunk.padding]
            for chunk in plan.chunks
        ],
        "pipelines": [(p.forward, p.backward, p.recompute, p.num_split) for p in plan.pipelines],
        "streams": [" ".join(map(str, stream)) for stream in plan.streams],
        "step_time_s": f"{plan.predicted.step_time_s:.9g}",
        "peak_bytes": [f"{peak:.9g}" for peak in plan.predicted.peak_bytes],
    }


def outcome(batch: Batch) -> dict[str, Any]:
    """The digests of a batch, with a few figures to read; of an error its kind is decided."""
    try:
        plans = plans_of(batch)
    except InfiniPipeError as error:
        kind = type(error).__name__
        # what would fit is sought for a limited time, so that half depends on the machine
        text = str(error).split(" The largest context")[0]
        return {"name": batch.name, "digest": _sha(text), "decided": _sha(kind), "is": kind}
    instructions = [i for plan in plans for stream in plan.streams for i in stream]
    return {
        "name": batch.name,
        "digest": _sha([plan.digest() for plan in plans]),
        "decided": _sha([decisions(plan) for plan in plans]),
        "is": "plan",
        "chunks": sum(len(plan.chunks) for plan in plans),
        "pipelines": sum(len(plan.pipelines) for plan in plans),
        "recomputed_layers": sum(i.recompute for i in instructions if str(i)[0] == "F"),
        "split_backwards": sum(str(i)[0] == "W" for i in instructions),
        "kept_gathered": sum(plan.setup.execution.keeps_gathered for plan in plans),
        "step_time_s": max(plan.predicted.step_time_s for plan in plans),
    }


def _sha(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differences(found: Sequence[dict[str, Any]], stated: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each batch of which decisions or plans differ, or that `stated` lacks."""
    known = {row["name"]: row for row in stated}
    lines = []
    for row in found:
        other = known.get(row["name"], {})
        odd = [key for key in ("decided", "digest") if row[key] != other.get(key)]
        if odd:
            times = " -> ".join(str(r.get("step_time_s", r.get("is"))) for r in (other, row))
            lines.append(f"{row['name']}: {' and '.join(odd)} differ, {times}")
    return lines


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How much of what occurs among the batches."""
    kinds = collections.Counter(row["is"] for row in rows)
    names = ("recomputed_layers", "split_backwards", "kept_gathered")
    some = {name: sum(row.get(name, 0) > 0 for row in rows) for name in names}
    many = sum(row.get("pipelines", 0) > 1 for row in rows)
    return f"{dict(kinds)}, with {some}, with more than one pipeline {many}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the outcomes there, as JSON")
    parser.add_argument("--against", type=Path, help="compare with outcomes written before")
    parser.add_argument("--only", default="", help="batches whose name has this in it")
    args = parser.parse_args(argv)
    started_s = time.perf_counter()
    rows = [outcome(batch) for batch in batches() if args.only in batch.name]
    print(f"{len(rows)} batches in {time.perf_counter() - started_s:.0f} s: {summary(rows)}")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    if args.against is None:
        return 0
    lines = differences(rows, json.loads(args.against.read_text()))
    print("\n".join([*lines, f"{len(lines)} of {len(rows)} differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
