"""Everything that only a GPU can prove, in one script: at most five minutes on one device.

Attention (alignment, numerics, speed), cross-entropy (numerics, bandwidth, memory), a layer with
Liger's kernels, in FP8 and compiled, training of a model of 1.3 billion parameters sliced, whole
and in plain transformers, the memory model against the allocator, the time model's fit, and two
pipeline stages on the one device. Prints a table at the end and writes JSON. `--dry-run` runs the
same code in small on a CPU.

    python benchmarks/gpu_check.py [--budget-s 280] [--only attention,loss] [--output FILE]
    python benchmarks/gpu_check.py --dry-run
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_checks.attention import check_attention
from gpu_checks.cost_model import check_cost_model
from gpu_checks.layers import check_layers
from gpu_checks.loss import check_loss
from gpu_checks.measure import Budget, Row, Sizes, make_sizes, table
from gpu_checks.training import check_training
from gpu_checks.two_ranks import check_two_ranks

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the checks; returns 1 when a target was missed or a check broke."""
    args = _arguments()
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    sizes, budget = make_sizes(args.dry_run, args.peak_flops), Budget(args.budget_s)
    checks = _checks(sizes, budget)
    wanted = args.only.split(",") if args.only else list(checks)
    unknown = sorted(set(wanted) - set(checks))
    if unknown:
        raise SystemExit(f"--only names {unknown}; there are {', '.join(checks)}")
    rows: list[Row] = []
    for name in wanted:
        started = time.monotonic()
        rows += _run(name, checks[name], sizes)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        _write(args.output or _default_output(sizes), rows, sizes)
    print(table(rows))
    return int(any(row.is_met is False for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="the same code in small, on a CPU")
    parser.add_argument("--budget-s", type=float, default=280.0, help="seconds in all")
    parser.add_argument("--only", default="", help="names of checks, separated by commas")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/")
    parser.add_argument("--peak-flops", type=float, help="of the device, for utilisation")
    return parser.parse_args()


def _checks(sizes: Sizes, budget: Budget) -> dict[str, Callable[[], Iterator[Row]]]:
    return {
        "attention": lambda: check_attention(sizes),
        "loss": lambda: check_loss(sizes),
        "cost-model": lambda: check_cost_model(sizes, 4.0 if sizes.is_dry else 30.0),
        "two-ranks": check_two_ranks,
        "training": lambda: check_training(sizes, budget),
        "layers": lambda: check_layers(sizes, budget),
    }


def _run(name: str, check: Callable[[], Iterator[Row]], sizes: Sizes) -> Iterator[Row]:
    """The rows of one check. One that breaks must not cost the others their turn on the device."""
    try:
        yield from check()
    except Exception as error:
        traceback.print_exc()
        yield Row(name, "ran to its end", 0.0, "", "yes", False, repr(error)[:200])
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()


def _default_output(sizes: Sizes) -> Path:
    return RESULTS / ("gpu_check_dry.json" if sizes.is_dry else "gpu_check.json")


def _write(path: Path, rows: list[Row], sizes: Sizes) -> None:
    device = "cpu" if sizes.is_dry else torch.cuda.get_device_name(0)
    body = {
        "command": " ".join(sys.argv),
        "device": device,
        "torch": torch.__version__,
        "rows": [row.to_json() for row in rows],
    }
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
