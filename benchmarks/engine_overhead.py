"""What the engine costs beside a plain torch loop: pp 1, sp 1, one unsplit chunk, one thread.

The same Hugging Face model and data, torch's fused AdamW with clipping in both; steps interleaved,
so that the machine's noise falls on both. DeepSpeed replaces `torch.nn.functional.linear` when it
builds a ZeRO-3 model; the plain loop runs with torch's own. Reports the ratio of median CPU times;
and the engine's cost per instruction, from 16 short chunks of a model that computes next to
nothing.

    OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu python benchmarks/engine_overhead.py [--steps 15] [--meter]

With --meter the engine counts live bytes (`debug.meter_memory`); that result is only printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from ds_infinipipe.launcher import become_only_rank
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.runtime.engine.initialize import initialize
from ds_infinipipe.runtime.engine.module import InfiniPipeModule
from ds_infinipipe.runtime.stage.batch import StepBatch

# torch's own, before any engine is built
_LINEAR = F.linear

RESULT = Path(__file__).parent / "results" / "engine_overhead.json"
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 128}


def main() -> int:
    """Measure both ZeRO stages and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--meter", action="store_true")
    args = parser.parse_args()
    _single_rank()
    rows = []
    for stage in (0, 3):
        row = _measure(MODEL, stage, args.steps, [args.tokens], args.meter)
        small = _measure({**MODEL, **SMALL}, stage, 2 * args.steps, [16] * 16, args.meter)
        row["per_instruction_us"] = small["per_instruction_us"]
        rows.append(row)
        print(
            f"ZeRO-{stage}: engine {row['engine_s']:.3f} s, torch {row['torch_s']:.3f} s, ratio "
            f"{row['ratio']:.3f}; {row['per_instruction_us']:.0f} us an instruction on top"
        )
    if args.meter:
        return 0
    body = {"command": " ".join(sys.argv), "rows": rows}
    RESULT.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


def _single_rank() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    become_only_rank()


def _measure(
    model: dict[str, Any], zero_stage: int, steps: int, lengths: list[int], meter: bool
) -> dict[str, Any]:
    config = {
        "train_batch_size": len(lengths),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 5_000_000},
        "infinipipe": {
            "model": {"config": model},
            "planner": {"max_slices": 1, "token_limit": max(lengths)},
            "planning": {"asynchronous": False},
            "debug": {"meter_memory": meter},
        },
    }
    engine = initialize(model=InfiniPipeModule(config), config=config)[0]
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, model["vocab_size"], size=length) for length in lengths]
    batch = StepBatch.from_samples(samples, max(lengths), model["vocab_size"])
    plan = engine.planning_task.solve(batch.lengths)
    assert len(plan.chunks) == len(lengths) and not any(i.recompute for i in plan.streams[0])
    plain = _plain_step(model, batch)
    times: dict[str, list[float]] = {"engine": [], "torch": []}
    for _ in range(steps):
        times["engine"].append(_cpu_time(lambda: engine.train_plan(plan, batch)))
        with mock.patch.object(F, "linear", _LINEAR):
            times["torch"].append(_cpu_time(plain))
    engine.close()
    engine_s, torch_s = (statistics.median(times[name][2:]) for name in ("engine", "torch"))
    compute = sum(i.op in (Op.FORWARD, Op.BACKWARD, Op.STEP) for i in plan.streams[0])
    return {
        "zero_stage": zero_stage,
        "tokens": sum(lengths),
        "engine_s": engine_s,
        "torch_s": torch_s,
        "ratio": engine_s / torch_s,
        "per_instruction_us": (engine_s - torch_s) / compute * 1e6,
    }


def _plain_step(model: dict[str, Any], batch: StepBatch) -> Callable[[], None]:
    fields = dict(model)
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    plain = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa")
    # fused as in the engine's default; torch's own default takes three times as long here
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    samples = [
        (torch.from_numpy(ids)[None], torch.from_numpy(labels))
        for ids, labels in zip(batch.ids, batch.labels, strict=True)
    ]

    def step() -> None:
        for ids, labels in samples:
            logits = plain(ids).logits[0]
            (F.cross_entropy(logits, labels, ignore_index=-100) / len(samples)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cpu_time(function: Callable[[], Any]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())
