"""A plain PipelineModule trains through our entry point as it does through DeepSpeed's."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from ranks import run_ranks
from torch import nn

import ds_infinipipe
from ds_infinipipe.errors import ConfigError

pytestmark = pytest.mark.ranks

_MICRO_BATCHES, _ROWS, _STEPS = 4, 3, 3


def _layers() -> list[LayerSpec]:
    sizes = [6, 8, 8, 5]
    specs = []
    for a, b in itertools.pairwise(sizes):
        specs += [LayerSpec(nn.Linear, a, b), LayerSpec(nn.Tanh)]
    return specs


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def _data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield (
            torch.randn(_ROWS, 6, generator=generator),
            torch.randn(_ROWS, 5, generator=generator),
        )


def _config(**more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": _MICRO_BATCHES * _ROWS,
        "train_micro_batch_size_per_gpu": _ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 1_000_000,
        **more,
    }


def _fill(layer: nn.Module, place: int) -> None:
    for index, parameter in enumerate(layer.parameters()):
        generator = torch.Generator().manual_seed(10 * place + index)
        parameter.data.normal_(generator=generator)


def _train(rank: int) -> tuple[bool, list[float], list[torch.Tensor], str]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    module = PipelineModule(_layers(), num_stages=2, loss_fn=_loss, partition_method="uniform")
    for offset, layer in enumerate(module.forward_funcs):
        _fill(layer, module._local_start + offset)
    message = ""
    try:
        ds_infinipipe.initialize(model=module, config=_config(infinipipe={}))
    except ConfigError as error:
        message = str(error)
    engine, _, _, _ = ds_infinipipe.initialize(
        model=module, model_parameters=list(module.parameters()), config=_config()
    )
    data = _data()
    losses = [float(engine.train_batch(data)) for _ in range(_STEPS)]
    weights = [p.detach().clone() for p in module.parameters()]
    return type(engine) is PipelineEngine, losses, weights, message


def test_a_plain_pipeline_module_trains_as_its_layers_do_alone() -> None:
    layers = [spec.build() for spec in _layers()]
    for place, layer in enumerate(layers):
        _fill(layer, place)
    model = nn.Sequential(*layers)
    optimizer, data, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), _data(), []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        parts = [_loss(model(x), y) / _MICRO_BATCHES for x, y in (next(data) for _ in range(4))]
        for part in parts:
            part.backward()
        optimizer.step()
        losses.append(float(sum(part.detach() for part in parts)))
    found = run_ranks(_train, 2, timeout=90.0)
    for is_stock, mine, _, message in found:
        assert is_stock
        assert mine == pytest.approx(losses, rel=1e-5)
        assert 'has a section "infinipipe"' in message
    weights = [weight for _, _, stage, _ in found for weight in stage]
    for mine, theirs in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)
