"""Processor seconds, error and peak memory of output projection and loss on one CPU core.

OMP_NUM_THREADS=1 python benchmarks/loss_backends.py

Ours against torch's `F.linear_cross_entropy` with its default options and against plain autograd
with all logits. Times are medians of interleaved runs, forward and backward; errors are relative to
float64; bytes are what a counting allocator sees on top of the inputs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_infinipipe.ops.cross_entropy import (
    linear_cross_entropy_sum,
    linear_cross_entropy_sum_reference,
)
from ds_infinipipe.runtime.stage.meter import MemoryMeter

RESULT = Path(__file__).parent / "results" / "loss_backends.json"
TOKENS, HIDDEN, VOCAB, BLOCK, REPEATS = 1024, 256, 16384, 256, 7
SCALE = 1 / TOKENS
ERRORS = ("loss_error", "hidden_error", "weight_error")

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy_sum(hidden, weight, labels, SCALE, BLOCK)


def _torchs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return SCALE * F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy_sum_reference(hidden, weight, labels, SCALE)


LOSSES: dict[str, Loss] = {"ours": _ours, "F.linear_cross_entropy": _torchs, "all logits": _plain}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(VOCAB, HIDDEN)).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (TOKENS,))
    labels[::7] = -100
    return hidden, weight, labels


def _run(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs[:2])]


def _measure(dtype: torch.dtype) -> list[dict[str, Any]]:
    inputs = _inputs(dtype)
    wide = [t.detach().double().requires_grad_() for t in inputs[:2]]
    exact = _run(_plain, (wide[0], wide[1], inputs[2]))
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for _ in range(REPEATS):
        for name, loss in LOSSES.items():
            start = time.thread_time()
            _run(loss, inputs)
            seconds[name].append(time.thread_time() - start)
    rows = []
    for name, loss in LOSSES.items():
        with MemoryMeter() as meter:
            got = _run(loss, inputs)
        errors = [
            float((g.double() - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True)
        ]
        row: dict[str, Any] = {"loss": name, "dtype": str(dtype).removeprefix("torch.")}
        row |= {"cpu_s": statistics.median(seconds[name]), "peak_bytes": meter.use.dynamic_bytes}
        rows.append(row | dict(zip(ERRORS, errors, strict=True)))
    return rows


def main() -> None:
    """Print the table and write it."""
    rows = [row for dtype in (torch.float32, torch.bfloat16) for row in _measure(dtype)]
    print("loss                    dtype      cpu s  peak MB  errors of loss, hidden, weight")
    for row in rows:
        errors = " ".join(f"{row[name]:.1e}" for name in ERRORS)
        megabytes = row["peak_bytes"] / 1e6
        print(f"{row['loss']:23} {row['dtype']:9} {row['cpu_s']:6.3f} {megabytes:8.1f}  {errors}")
    setting = {"tokens": TOKENS, "hidden": HIDDEN, "vocabulary": VOCAB, "block_tokens": BLOCK}
    result = {"setting": setting | {"torch": torch.__version__}, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
