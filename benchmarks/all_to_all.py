"""Query, key and value in one all-to-all against three: `python benchmarks/all_to_all.py`.

Times both ways of `ops.ulysses` forward and backward on local gloo ranks, in turns, and prints the
ratio of their medians: below 1 the joint one is faster. Writes benchmarks/results/all_to_all.json.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ds_infinipipe.ops.ulysses import join_to_heads, to_heads
from ds_infinipipe.runtime.engine.module import init_distributed
from ds_infinipipe.runtime.ranks.local import run_local_ranks

RESULT = Path(__file__).parent / "results" / "all_to_all.json"
ROUNDS = 40


@dataclass(frozen=True)
class Shape:
    """A chunk's tokens over all ranks, and the model's heads."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = [
    Shape(64, 8, 2, 16),
    Shape(512, 8, 2, 64),
    Shape(512, 8, 8, 64),
    Shape(4096, 8, 2, 64),
    Shape(4096, 8, 8, 64),
]


def _time_once(leaves: list[Tensor], is_joint: bool) -> float:
    """Seconds of one forward and backward; ranks start together."""
    pg = dist.group.WORLD
    dist.barrier()
    started = time.perf_counter()
    outs = join_to_heads(*leaves, pg) if is_joint else [to_heads(t, pg) for t in leaves]
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return time.perf_counter() - started


def _measure(shapes: list[Shape]) -> list[dict[str, float]]:
    """Medians of both ways on this rank, in milliseconds."""
    init_distributed(600.0)
    found = []
    for shape in shapes:
        local = shape.tokens // dist.get_world_size()
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        leaves = [torch.randn(local, n, shape.head_dim, requires_grad=True) for n in heads]
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * ROUNDS + 4):
            seconds = _time_once(leaves, is_joint=turn % 2 == 0)
            if turn >= 4:
                times[turn % 2 == 0].append(1e3 * seconds)
        joint, separate = (statistics.median(times[key]) for key in (True, False))
        found.append({"joint_ms": joint, "separate_ms": separate})
    return found


def main() -> None:
    """Measure at two and four ranks."""
    rows = []
    for ranks in (2, 4):
        by_rank = run_local_ranks(_measure, ranks, SHAPES)
        for index, shape in enumerate(SHAPES):
            joint = max(found[index]["joint_ms"] for found in by_rank)
            separate = max(found[index]["separate_ms"] for found in by_rank)
            row = {"ranks": ranks, **asdict(shape), "joint_ms": joint, "separate_ms": separate}
            rows.append({**row, "ratio": joint / separate})
            print(
                f"{ranks} ranks, {shape.tokens} tokens, {shape.heads}/{shape.kv_heads} heads of "
                f"{shape.head_dim}: joint {joint:.2f} ms, separate {separate:.2f} ms, ratio "
                f"{joint / separate:.2f}"
            )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
