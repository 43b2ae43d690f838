"""Layers written by hand, with nothing of Hugging Face in them, train exactly."""

from __future__ import annotations

from typing import Any

import checkpoint_cases
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

import ds_infinipipe
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.context import chunk_attention
from ds_infinipipe.model.protocol import Decoder, Embedding, Head, OwnLayers
from ds_infinipipe.ops.cross_entropy import linear_cross_entropy_sum, linear_cross_entropy_tokens
from ds_infinipipe.runtime import selftest
from ds_infinipipe.runtime.batch import IGNORE_INDEX, StepBatch
from ds_infinipipe.runtime.engine import InfiniPipeEngine
from ds_infinipipe.runtime.selftest import FLOAT32_LIMIT, FLOAT64_LIMIT, Case


class _Words(Embedding):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, ids_T: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.table(ids_T)))[None]


class _Block(Decoder):
    """Pre-norm attention and a GELU MLP, with biases."""

    attend = staticmethod(chunk_attention)

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(layer_index)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, width = config.head_dim, config.hidden_size
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.dim)
        self.out = nn.Linear(self.heads * self.dim, width)
        self.up = nn.Linear(width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, width)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        heads = self.qkv(self.attention_norm(x))[0].unflatten(-1, (-1, self.dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = (self._turn(t, *context.cos_sin) for t in (q, k))
        mixed = self.attend(q, k, v, context, self.layer_index, self.dim**-0.5)
        x = x + self.out(mixed.flatten(1))[None]
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _turn(self, t_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = t_THD.chunk(2, dim=-1)
        return t_THD * cos[0][:, None] + torch.cat((-high, low), dim=-1) * sin[0][:, None]


class _Scores(Head):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.scores = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def loss(
        self,
        hidden: Tensor,
        labels_T: Tensor,
        scale: float,
        block_tokens: int,
        token_weights_T: Tensor | None = None,
    ) -> Tensor:
        return linear_cross_entropy_sum(
            self.norm(hidden)[0],
            self.scores.weight,
            labels_T,
            scale,
            block_tokens,
            token_weights_T=token_weights_T,
        )

    def token_losses(self, hidden: Tensor, labels_T: Tensor, block_tokens: int) -> Tensor:
        rows = self.norm(hidden)[0]
        return linear_cross_entropy_tokens(rows, self.scores.weight, labels_T, block_tokens)


class _Plain:
    """What a layer sees of a context in the reference."""

    def __init__(self, cos_sin: tuple[Tensor, Tensor]) -> None:
        self.cos_sin = cos_sin


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, context: Any, layer: int, s: float) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=s, enable_gqa=True)
    return out[0].transpose(0, 1)


def _reference(engine: InfiniPipeEngine, batch: StepBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by checkpoint name, sequence by sequence at the engine's weights."""
    module = engine.module
    config, count = module.hf_config, module.spec.num_layers
    blocks = [_Block(config, i) for i in range(count)]
    for block in blocks:
        block.attend = _plain_attention  # type: ignore[method-assign]
    layers = [_Words(config), *blocks, _Scores(config)]
    named = {layer.hf_name(n): p for layer in layers for n, p in layer.named_parameters()}
    mine = {n: selftest.full_weight(engine, p) for n, p in module.hf_parameters()}
    everyone: list[dict[str, Tensor]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    for layer in layers:
        layer.to(module.dtype)
    for weights in everyone:
        for name, tensor in weights.items():
            named[name].data.copy_(tensor)
    total = 0.0
    for ids, labels in zip(batch.ids, batch.labels, strict=True):
        hidden = layers[0](torch.from_numpy(ids))
        tables = engine.rotary(hidden, torch.arange(len(ids))[None])
        for block in blocks:
            hidden = block(hidden, _Plain(tables))
        logits = layers[-1].scores(layers[-1].norm(hidden))[0]
        losses = F.cross_entropy(
            logits, torch.from_numpy(labels), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        loss = losses / batch.label_weight
        loss.backward()
        total += float(loss)
    return total, {name: p.grad for name, p in named.items() if p.grad is not None}


def _own(case: Case) -> InfiniPipeEngine:
    checkpoint_cases.quiet()
    config = selftest.make_config(case)
    layers = OwnLayers(_Words, _Block, _Scores)
    module = ds_infinipipe.InfiniPipeModule(config, dtype=case.dtype, layers=layers)
    return ds_infinipipe.initialize(model=module, config=config)[0]


def _differences(rank: int, case: Case) -> list[tuple[float, float, float]]:
    """Per step: error of the loss, of the worst gradient, of an evaluation's loss."""
    engine, found = _own(case), []
    for step in range(case.steps):
        batch = selftest.random_batch(case, step)
        wanted, gradients = _reference(engine, batch)
        errors: list[float] = []

        def compare(
            engine: InfiniPipeEngine,
            gradients: dict[str, Tensor] = gradients,
            errors: list[float] = errors,
        ) -> None:
            for name, parameter in engine.module.hf_parameters():
                difference = engine.sharding.full_gradient(parameter) - gradients[name]
                errors.append(float(difference.abs().max() / gradients[name].abs().max()))

        engine.before_step_hooks[:] = [compare]
        samples = [{"input_ids": i} for i in batch.ids]
        evaluated = float(engine.eval_batch(iter([samples])))
        unmasked = StepBatch.from_samples(samples, 4 * case.max_tokens, case.vocab_size)
        wanted_too, _ = _reference(engine, unmasked)
        loss = float(engine.train_plan(selftest.draw_plan(engine, case, batch, step), batch))
        found.append((abs(loss - wanted), max(errors), abs(evaluated - wanted_too)))
    engine.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "limit"),
    [
        (Case("llama", 2, 2, zero_stage=0, float64=True, num_layers=3, steps=3), FLOAT64_LIMIT),
        (Case("llama", 2, 1, num_layers=3, steps=3, seed=3), FLOAT32_LIMIT),
    ],
    ids=["float64 2x2", "ZeRO-3 2x1"],
)
def test_a_hand_written_stack_is_exact_in_any_plan(case: Case, limit: float) -> None:
    for steps in run_ranks(_differences, case.pp * case.sp, case, timeout=120.0):
        for errors in steps:
            assert max(errors) <= limit, errors


class _Config:
    vocab_size, hidden_size, intermediate_size = 11, 8, 16
    num_attention_heads, num_key_value_heads, head_dim = 2, 1, 4
    tie_word_embeddings = False


class _Silent(Head):
    def loss(self, *args: Any) -> Tensor:  # type: ignore[override]
        return torch.zeros(())


class _Misnumbered(_Block):
    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(config, 0)


class _Dropping(_Words):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.drop = nn.Dropout(0.1)


class _Nameless(_Words):
    def hf_name(self, parameter: str) -> str:
        return "words"


@pytest.mark.parametrize(
    ("kind", "layer", "expected"),
    [
        ("embedding", nn.Embedding, "embedding layer Embedding is no .*protocol.Embedding: derive"),
        ("embedding", _Dropping, "has dropout in drop: a recomputed layer"),
        ("embedding", _Nameless, "gives 'words' to both table.weight and mix.weight"),
        ("decoder", _Misnumbered, "decoder layer 1 .* has layer_index 0: call super"),
        ("decoder", lambda c, i: _Words(c), "layer _Words is no .*protocol.Decoder"),
        ("head", lambda c: _Silent(), "_Silent does not define token_losses: see"),
    ],
)
def test_a_layer_that_breaks_the_protocol_is_named(kind: str, layer: Any, expected: str) -> None:
    if layer is nn.Embedding:
        layer = lambda c: nn.Embedding(c.vocab_size, c.hidden_size)  # noqa: E731
    good = {"embedding": _Words, "decoder": _Block, "head": _Scores}
    layers = OwnLayers(**{**good, kind: layer})
    config: Any = _Config
    with pytest.raises(ConfigError, match=expected):
        layers.make_embedding(config)
        layers.make_decoder(config, 1)
        layers.make_head(config)
