"""The layers of a stage: embedding, decoder layers, and the head with its loss.

Shapes: T tokens of this rank (a chunk's tokens over sp), E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.compiling import compile_block
from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.model.hf import ATTENTION_NAME, hf_class
from ds_infinipipe.model.projection import EarlyGradient, Projection, WeightWork
from ds_infinipipe.model.protocol import Decoder, Embedding, Head, StageLayer
from ds_infinipipe.ops.cross_entropy import linear_cross_entropy_sum, linear_cross_entropy_tokens
from ds_infinipipe.ops.fp8 import RECIPES, Fp8Linear

__all__ = [
    "EMBEDDING_NAME",
    "DecoderLayer",
    "EmbeddingLayer",
    "HeadLayer",
    "StageLayer",
    "build_stage_layers",
    "hf_names",
]

EMBEDDING_NAME = "model.embed_tokens.weight"
"""Name of the token embedding in Hugging Face checkpoints, and of a head tied to it."""


class EmbeddingLayer(Embedding):
    """Token ids [T] to hidden states [1, T, E]."""

    def __init__(self, hf_config: PreTrainedConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(
            hf_config.vocab_size, hf_config.hidden_size, hf_config.pad_token_id
        )

    def forward(self, ids_T: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(ids_T)[None]
        return hidden

    def weight_gradient(self, ids_T: Tensor, output_gradient: Tensor) -> Tensor:
        """Gradient [V, E] of the weight, which need not be there, from that of the output."""
        embedding = self.embed_tokens
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx
        return torch.ops.aten.embedding_dense_backward(
            output_gradient[0], ids_T, embedding.num_embeddings, padding, False
        )

    def hf_name(self, parameter: str) -> str:
        return f"model.{parameter}"


class DecoderLayer(Decoder):
    """One of the model's own decoder layers, [1, T, E] to [1, T, E].

    `layer_index` counts over the whole model; it names the weights and the arena's buffers. `fp8`
    is a recipe for the projections, one of `ops.fp8.RECIPES`, or "off"; `compiled` runs the layer
    through torch.compile.
    """

    def __init__(
        self,
        hf_config: PreTrainedConfig,
        layer_index: int,
        *,
        fp8: str = "off",
        compiled: bool = False,
    ) -> None:
        super().__init__(layer_index)
        if hf_config._attn_implementation != ATTENTION_NAME:
            raise ConfigError("the config of a DecoderLayer comes from load_hf_config")
        self.block = hf_class(hf_config, "DecoderLayer")(hf_config, layer_index)
        for module in self.block.modules():
            if type(module) is nn.Linear:
                if fp8 != "off":
                    Fp8Linear.adopt(module, RECIPES[fp8])
                elif not compiled:  # what is left for later is no part of a graph
                    module.__class__ = Projection
        if compiled:
            compile_block(self.block)

    def forward(self, x: Tensor, context: ChunkContext) -> Tensor:
        hidden: Tensor = self.block(
            x, position_embeddings=context.cos_sin, infinipipe_context=context
        )
        return hidden

    @contextmanager
    def leaving_weights(
        self, sets_aside: bool = True
    ) -> Iterator[list[WeightWork | EarlyGradient]]:
        """Backwards inside leave the weights' gradients to the list's work.

        Of projections they are still to be made then. Those of norms are made and set aside, or
        left in `.grad` where a step's gradients are added up there.
        """
        work: list[WeightWork | EarlyGradient] = []
        projections = [m for m in self.block.modules() if isinstance(m, Projection)]
        for projection in projections:
            projection.left = work
        try:
            yield work
        finally:
            for projection in projections:
                projection.left = None
        for module in self.block.modules() if sets_aside else ():
            if not isinstance(module, Projection):
                for parameter in module.parameters(recurse=False):
                    if parameter.grad is not None:
                        work.append(EarlyGradient(parameter, parameter.grad))
                        parameter.grad = None

    def hf_name(self, parameter: str) -> str:
        return f"model.layers.{self.layer_index}.{parameter.removeprefix('block.')}"


class HeadLayer(Head):
    """Final norm, output projection and cross-entropy by backend `cross_entropy`."""

    def __init__(self, hf_config: PreTrainedConfig, cross_entropy: str = "auto") -> None:
        super().__init__()
        self.cross_entropy = cross_entropy
        self.is_tied = bool(hf_config.tie_word_embeddings)
        self.norm = hf_class(hf_config, "RMSNorm")(hf_config.hidden_size, hf_config.rms_norm_eps)
        self.lm_head = nn.Linear(hf_config.hidden_size, hf_config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [1, T, V]; training uses `loss`, which never holds them all."""
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def loss(
        self,
        hidden: Tensor,
        labels_T: Tensor,
        scale: float,
        block_tokens: int,
        token_weights_T: Tensor | None = None,
    ) -> Tensor:
        """Sum of the tokens' cross-entropies times `scale`, a scalar; label -100 does not count.

        `hidden` is [1, T, E]; logits exist for `block_tokens` tokens at a time.
        """
        return linear_cross_entropy_sum(
            self.norm(hidden)[0],
            self.lm_head.weight,
            labels_T,
            scale,
            block_tokens,
            token_weights_T=token_weights_T,
            impl=self.cross_entropy,
        )

    def token_losses(self, hidden: Tensor, labels_T: Tensor, block_tokens: int) -> Tensor:
        """Each token's cross-entropy, [T], without gradients; 0 for label -100."""
        return linear_cross_entropy_tokens(
            self.norm(hidden)[0],
            self.lm_head.weight,
            labels_T,
            block_tokens,
            impl=self.cross_entropy,
        )

    def hf_name(self, parameter: str) -> str:
        if parameter == "lm_head.weight":
            return EMBEDDING_NAME if self.is_tied else parameter
        return f"model.{parameter}"


def hf_names(layer: StageLayer) -> Mapping[str, str]:
    """Checkpoint name of each parameter of a layer, by the layer's own name."""
    return {name: layer.hf_name(name) for name, _ in layer.named_parameters()}


def build_stage_layers(
    hf_config: PreTrainedConfig, first_layer: int, last_layer: int, *, is_first: bool, is_last: bool
) -> list[StageLayer]:
    """Decoder layers [first_layer, last_layer), embedding before the first stage's, head after the
    last stage's."""
    layers: list[StageLayer] = [
        DecoderLayer(hf_config, index) for index in range(first_layer, last_layer)
    ]
    before = [EmbeddingLayer(hf_config)] if is_first else []
    after = [HeadLayer(hf_config)] if is_last else []
    return [*before, *layers, *after]
