"""Our best layout against every tuned baseline, over models, contexts and length laws.

All in one simulator under the constants of 4 x 8 A800; nothing here was measured on a device. Ours
and the pipeline baselines may take any layout, DeepSpeed, FlexSP and Megatron-LM any degrees.

    python benchmarks/auto_layout.py [--models llama-7b ...] [--contexts 48 ...] [--laws ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.planner.baselines import Workload, compare
from ds_infinipipe.planner.layouts import possible_layouts
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.specs import BUILTIN_MODELS, load_cluster, make_layout

RESULT = Path(__file__).parent / "results" / "auto_layout.json"
CLUSTER = "a800-80g-4x8"
SYSTEMS = ("ours", "seq1f1b", "dapple", "deepspeed", "flexsp", "megatron")


def one_setting(
    model_name: str, law: str, context_k: int, seed: int, num: int, mode: str
) -> dict[str, Any]:
    """Step times of every system in its tuned configuration; None where nothing fits."""
    rng = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in sample_lengths(law, num, 1024 * context_k, rng))
    model, cluster = BUILTIN_MODELS[model_name], load_cluster(CLUSTER)
    workload = Workload(
        lengths,
        model,
        cluster,
        make_layout(model, 4, 8),
        PlannerSettings.model_validate({"mode": mode}),
        other_layouts=possible_layouts(model, cluster.num_devices),
    )
    started_s = time.perf_counter()
    results = compare(workload, SYSTEMS)
    ours = results[0]
    tuned = {
        result.name: {"step_time_s": result.step_time_s, "note": result.note}
        for result in results
        if result.feasible and result.configuration == "tuned" and not result.name.startswith("our")
    }
    best = min(tuned, key=lambda name: tuned[name]["step_time_s"], default=None)
    return {
        "model": model_name,
        "law": law,
        "context_k": context_k,
        "seed": seed,
        "tokens": workload.num_tokens,
        "ours_s": ours.step_time_s if ours.feasible else None,
        "ours": ours.note,
        "ours_mode": ours.name,
        "bubble_ratio": ours.bubble_ratio,
        "best_baseline": best,
        "baseline_over_ours": tuned[best]["step_time_s"] / ours.step_time_s
        if best and ours.feasible
        else None,
        "tuned": tuned,
        "took_s": time.perf_counter() - started_s,
    }


def _line(row: dict[str, Any]) -> str:
    ours = "-" if row["ours_s"] is None else f"{row['ours_s']:.2f} s"
    ratio = row["baseline_over_ours"]
    return (
        f"{row['law']:<12} {row['model']:<10} {row['context_k']:>4}K  ours {ours:>9} "
        f"({row['ours']})  best baseline {row['best_baseline']} "
        f"{'-' if ratio is None else f'{ratio:.3f}'}  [{row['took_s']:.0f} s]"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["llama-7b", "llama-13b", "llama-30b"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[48, 96, 192], metavar="K")
    parser.add_argument("--laws", nargs="+", default=["github-a", "github-b", "commoncrawl"])
    parser.add_argument("--mode", default=PlannerSettings().mode)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-sequences", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    rows = []
    for law in args.laws:
        for model in args.models:
            for context in args.contexts:
                rows.append(
                    one_setting(model, law, context, args.seed, args.num_sequences, args.mode)
                )
                print(_line(rows[-1]), flush=True)
                args.out.parent.mkdir(exist_ok=True)
                content = {"command": " ".join(["python", *sys.argv]), "rows": rows}
                args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    slower = [row for row in rows if (row["baseline_over_ours"] or 0.0) < 1.0]
    print(f"{len(rows)} settings, ours slower than the best tuned baseline in {len(slower)}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
