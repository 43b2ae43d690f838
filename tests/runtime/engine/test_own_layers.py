"""Layers written by hand, with nothing of Hugging Face in them, train exactly."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import checkpoint_cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_strict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ds_infinipipe
from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import FLOAT32_LIMIT, FLOAT64_LIMIT, Case
from ds_infinipipe.cli import main
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.context import chunk_attention
from ds_infinipipe.model.protocol import Decoder, Embedding, Head, OwnLayers
from ds_infinipipe.ops.cross_entropy import linear_cross_entropy_sum, linear_cross_entropy_tokens
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.stage.batch import IGNORE_INDEX, StepBatch


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
        q, k = (_turn(t, *context.cos_sin) for t in (q, k))
        mixed = self.attend(q, k, v, context, self.layer_index, self.dim**-0.5)
        x = x + self.out(mixed.flatten(1))[None]
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def _turn(t_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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
    mine = {n: exactness.full_weight(engine, p) for n, p in module.hf_parameters()}
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


_LAYERS = OwnLayers(_Words, _Block, _Scores)


def _own(case: Case, layers: OwnLayers = _LAYERS) -> InfiniPipeEngine:
    checkpoint_cases.quiet()
    config = exactness.make_config(case)
    module = ds_infinipipe.InfiniPipeModule(config, dtype=case.dtype, layers=layers)
    return ds_infinipipe.initialize(model=module, config=config)[0]


def _differences(rank: int, case: Case) -> list[tuple[float, float, float]]:
    """Per step: error of the loss, of the worst gradient, of an evaluation's loss."""
    engine, found = _own(case), []
    for step in range(case.steps):
        batch = exactness.random_batch(case, step)
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
        loss = float(engine.train_plan(exactness.draw_plan(engine, case, batch, step), batch))
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
    for steps in run_strict(_differences, case.pp * case.sp, case, timeout=120.0):
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


_BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class _LlamaWords(Embedding):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.table(ids_T)[None]

    def hf_name(self, parameter: str) -> str:
        return "model.embed_tokens.weight"


class _LlamaBlock(Decoder):
    """Llama's layer, written by hand under names of its own."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(layer_index)
        width, inner, self.dim = config.hidden_size, config.intermediate_size, config.head_dim
        norms = [nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in range(2)]
        self.attention_norm, self.mlp_norm = norms
        self.q = nn.Linear(width, config.num_attention_heads * self.dim, bias=False)
        self.k = nn.Linear(width, config.num_key_value_heads * self.dim, bias=False)
        self.v = nn.Linear(width, config.num_key_value_heads * self.dim, bias=False)
        self.out = nn.Linear(config.num_attention_heads * self.dim, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (p(normed)[0].unflatten(-1, (-1, self.dim)) for p in (self.q, self.k, self.v))
        q, k = (_turn(t, *context.cos_sin) for t in (q, k))
        mixed = chunk_attention(q, k, v, context, self.layer_index, self.dim**-0.5)
        x = x + self.out(mixed.flatten(1))[None]
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def hf_name(self, parameter: str) -> str:
        module, kind = parameter.rsplit(".", 1)
        return f"model.layers.{self.layer_index}.{_BLOCK_NAMES[module]}.{kind}"


class _LlamaScores(_Scores):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def hf_name(self, parameter: str) -> str:
        return {"norm.weight": "model.norm.weight", "scores.weight": "lm_head.weight"}[parameter]


def _train_and_save(rank: int, case: Case, layers: OwnLayers, folder: str) -> float:
    """The loss of one document after two steps, whose checkpoint is in `folder`."""
    engine = _own(case, layers)
    for step in range(2):
        batch = exactness.random_batch(case, step)
        engine.train_plan(exactness.draw_plan(engine, case, batch, step), batch)
    loss = float(engine.eval_batch(iter([[{"input_ids": _IDS}]])))
    engine.save_checkpoint(folder)
    engine.close()
    return loss


_IDS = np.arange(40) % 97
_SAVED = Case("llama", 2, 1, num_layers=2, tied=False)


@pytest.mark.ranks
def test_own_layers_with_transformers_names_are_exported_and_others_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs, out = tmp_path / "ours", tmp_path / "theirs", tmp_path / "out"
    layers = OwnLayers(_LlamaWords, _LlamaBlock, _LlamaScores)
    losses = run_strict(_train_and_save, 2, _SAVED, layers, str(theirs), timeout=120.0)
    assert main(["export-hf", str(theirs), str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.from_numpy(_IDS)[None]
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert losses == [pytest.approx(loss, abs=1e-5)] * 2

    run_strict(_train_and_save, 2, _SAVED, _LAYERS, str(ours), timeout=120.0)
    capsys.readouterr()
    assert main(["export-hf", str(ours), str(tmp_path / "not")]) == 2
    said = capsys.readouterr().err
    assert "embedding.table.weight is not in LlamaForCausalLM" in said and "hf_name" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "out", "theirs"]


def _whole_backwards(rank: int, planner: dict[str, Any], own: bool) -> tuple[str, list[Any]]:
    """The setting the plans are made with, and what was logged about it."""
    records: list[Any] = []
    handler = logging.Handler()
    handler.emit = lambda r: records.append((r.levelname, r.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("ds_infinipipe.runtime.engine.module")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    config = exactness.make_config(_SAVED)
    config["infinipipe"]["planner"] = {"mode": "lean", **planner}
    module = ds_infinipipe.InfiniPipeModule(config, layers=_LAYERS if own else None)
    about = [r for r in records if "split" in r[1]]
    return module.planner_settings.split_backward, about


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("planner", "own", "setting", "level"),
    [
        ({}, True, "never", "INFO"),
        ({"split_backward": "auto"}, True, "never", "WARNING"),
        ({"split_backward": "never"}, True, "never", None),
        ({"split_backward": "auto"}, False, "auto", None),
    ],
)
def test_layers_whose_backward_stays_whole_are_told_once(
    planner: dict[str, Any], own: bool, setting: str, level: str | None
) -> None:
    first, other = run_strict(_whole_backwards, 2, planner, own, timeout=60.0)
    assert (first[0], other) == (setting, (setting, []))
    assert [found for found, _ in first[1]] == ([] if level is None else [level])
    if level is not None:
        (text,) = [said for _, said in first[1]]
        assert text.startswith("the layers are the caller's own, so no plan splits backwards")
        assert "infinipipe.planner.split_backward is 'auto'" in text
