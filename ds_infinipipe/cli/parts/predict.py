"""What the first steps of a configuration would take, by the planner's own simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.cli.parts.sources import load_lengths
from ds_infinipipe.config.deepspeed import (
    check_deepspeed_settings,
    read_deepspeed_json,
    sequences_per_step,
)
from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.data.dataset import DocumentDataset
from ds_infinipipe.data.lengths import fit_to_context
from ds_infinipipe.data.sampler import ChunkSampler
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.viz.tables import kernels_note

__all__ = ["predict_point"]


def predict_point(config: Mapping[str, Any], source: str, num_steps: int) -> dict[str, Any]:
    """Predicted seconds, bubble ratio and peak bytes over the first batches of a length source."""
    config = read_deepspeed_json(config)
    check_deepspeed_settings(config)
    section = InfiniPipeConfig.from_deepspeed(config)
    sampler = _make_sampler(config, section, source)
    plans: list[Plan] = []
    seconds = 0.0
    for index in range(num_steps):
        replicas = [sampler.plan(part) for part in sampler.replicas(sampler.step(index))]
        seconds += max(plan.predicted.step_time_s for plan in replicas)
        plans += replicas
    tokens = sum(plan.num_tokens for plan in plans)
    return {
        "status": "planned",
        "sequences": sum(len(plan.lengths) for plan in plans),
        "tokens": tokens,
        "step_time_s": seconds / num_steps,
        "tokens_per_s": tokens / seconds,
        "bubble_ratio": sum(p.predicted.bubble_ratio for p in plans) / len(plans),
        "peak_bytes": max(max(p.predicted.peak_bytes) for p in plans),
        "memory": kernels_note(sampler.setup.execution),
        "chunks": sum(len(p.chunks) for p in plans),
        "recomputed_layers": sum(
            sum(map(sum, pipeline.recompute)) for p in plans for pipeline in p.pipelines
        ),
    }


def _make_sampler(
    config: Mapping[str, Any], section: InfiniPipeConfig, source: str
) -> ChunkSampler:
    model = section.model.load_spec()
    sp = section.parallel.sp
    if sp == "auto":
        raise ConfigError('infinipipe.parallel.sp is "auto"; a prediction needs a number')
    planner, data = section.planner, section.data
    if section.model.fp8 != "off" or section.model.compile:
        planner = planner.model_copy(update={"split_backward": "never"})  # as training does
    lengths: NDArray[np.int64]
    if source == "corpus":
        lengths = DocumentDataset.from_settings(data, model.vocab_size).lengths
    else:
        given = load_lengths(source, data.context_length)
        lengths, _ = fit_to_context(given, data.context_length, data.over_length)
    return ChunkSampler(
        lengths,
        sequences_per_step(config),
        setup=planner.setup(
            model,
            section.load_cluster(),
            make_layout(model, section.parallel.pp, sp, section.parallel.dp),
            section.execution(config, _dtype_bytes(config)),
        ),
        settings=planner.settings,
        seed=data.seed,
        shuffle=data.shuffle,
        drop_last=data.drop_last,
    )


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    return 2 if any(config.get(n, {}).get("enabled") for n in ("bf16", "fp16")) else 4
