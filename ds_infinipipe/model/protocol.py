"""What a layer needs to be in a stage: for our layers around Hugging Face's, and for own ones.

A model is one `Embedding`, the `Decoder`s and one `Head`; derive from these and hand them over as
`InfiniPipeModule(config, layers=OwnLayers(embedding, decoder, head))`. `infinipipe.model` still
gives the sizes, in the form of a Llama config: the planner takes times and memory from them.

Rules that training with slices, recomputation and sharding sets:

* A layer runs many times a step, on any number of tokens, in any order of chunks: it keeps nothing
  between calls and draws no random numbers (no dropout). A recomputed layer runs twice.
* Tokens only meet in `chunk_attention`, which sees a whole sequence whatever is in the chunk. What
  else mixes tokens would not see the other slices. Positions are `context.cos_sin`, not 0, 1, 2.
* All parameters of a layer are used in every call, through plain modules such as `nn.Linear`, and
  belong to one layer. Each has a name in checkpoints that no other layer's has.

Shapes: T tokens of this rank (a chunk's tokens over sp), E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.context import ChunkContext

__all__ = ["Decoder", "Embedding", "Head", "OwnLayers", "StageLayer"]


class StageLayer(nn.Module):
    """A layer whose parameters have names in checkpoints."""

    def hf_name(self, parameter: str) -> str:
        """Checkpoint name of this layer's parameter `parameter` (as `named_parameters` has it).

        Where these are the names, and the shapes, of the model in transformers that the
        configuration names, `model.path` loads its weights and `export-hf` writes them.
        """
        raise NotImplementedError


class Embedding(StageLayer):
    """Token ids [T] to hidden states [1, T, E] in the dtype of the weights."""

    def forward(self, ids_T: Tensor) -> Tensor:
        raise NotImplementedError

    def hf_name(self, parameter: str) -> str:
        return f"embedding.{parameter}"


class Decoder(StageLayer):
    """Hidden states [1, T, E] to hidden states [1, T, E].

    `layer_index` counts over the whole model. Attention is `model.context.chunk_attention(q, k, v,
    context, layer_index, scale)` with q [T, H, D] and k, v [T, K, D] after any rotation; it returns
    [T, H, D] and is called exactly once, on every rank of the stage.
    """

    def __init__(self, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index

    def forward(self, x: Tensor, context: ChunkContext) -> Tensor:
        raise NotImplementedError

    def hf_name(self, parameter: str) -> str:
        return f"layers.{self.layer_index}.{parameter}"


class Head(StageLayer):
    """Hidden states to losses; label -100 counts nothing. Logits need not exist as a whole.

    `ops.cross_entropy` has `linear_cross_entropy_sum` and `linear_cross_entropy_tokens` for both.
    """

    def loss(
        self,
        hidden: Tensor,
        labels_T: Tensor,
        scale: float,
        block_tokens: int,
        token_weights_T: Tensor | None = None,
    ) -> Tensor:
        """Sum over tokens of loss times weight (1 without weights) times `scale`, a scalar.

        `hidden` is [1, T, E]; `block_tokens` is how many tokens' logits the planner counts with.
        """
        raise NotImplementedError

    def token_losses(self, hidden: Tensor, labels_T: Tensor, block_tokens: int) -> Tensor:
        """Each token's loss, [T], without gradients; 0 for label -100. Evaluation uses it."""
        raise NotImplementedError

    def hf_name(self, parameter: str) -> str:
        return f"head.{parameter}"


# what each role has to define itself
_REQUIRED: tuple[tuple[type[StageLayer], tuple[str, ...]], ...] = (
    (Embedding, ("forward",)),
    (Decoder, ("forward",)),
    (Head, ("loss", "token_losses")),
)


@dataclass(frozen=True)
class OwnLayers:
    """How to make the layers: functions, or the classes themselves."""

    embedding: Callable[[PreTrainedConfig], nn.Module]
    decoder: Callable[[PreTrainedConfig, int], nn.Module]
    head: Callable[[PreTrainedConfig], nn.Module]

    def make_embedding(self, hf_config: PreTrainedConfig) -> nn.Module:
        """The checked embedding; raises ConfigError where it does not follow the protocol."""
        return _check(self.embedding(hf_config), Embedding, "embedding")

    def make_decoder(self, hf_config: PreTrainedConfig, layer_index: int) -> nn.Module:
        """The checked decoder layer, likewise."""
        layer = _check(self.decoder(hf_config, layer_index), Decoder, "decoder")
        if layer.layer_index != layer_index:
            raise ConfigError(
                f"decoder layer {layer_index} ({type(layer).__name__}) has layer_index "
                f"{layer.layer_index}: call super().__init__(layer_index) with what it was given"
            )
        return layer

    def make_head(self, hf_config: PreTrainedConfig) -> nn.Module:
        """The checked head, likewise; ConfigError for a model with tied embeddings too."""
        if hf_config.tie_word_embeddings:
            raise ConfigError(
                "tie_word_embeddings is true, but own layers are not tied: set it to false in "
                "infinipipe.model"
            )
        return _check(self.head(hf_config), Head, "head")


def _check(layer: nn.Module, role: type[StageLayer], what: str) -> nn.Module:
    place = f"the {what} layer {type(layer).__name__}"
    if not isinstance(layer, role):
        raise ConfigError(
            f"{place} is no ds_infinipipe.model.protocol.{role.__name__}: derive it from that class"
        )
    required = next(names for kind, names in _REQUIRED if kind is role)
    missing = [name for name in required if getattr(type(layer), name) is getattr(role, name)]
    if missing:
        raise ConfigError(
            f"{place} does not define {' and '.join(missing)}: see "
            f"ds_infinipipe.model.protocol.{role.__name__}"
        )
    dropouts = [n for n, m in layer.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    if dropouts:
        raise ConfigError(
            f"{place} has dropout in {', '.join(dropouts)}: a recomputed layer would drop other "
            "elements than the first time; set it to 0"
        )
    names: dict[str, str] = {}
    for parameter, _ in layer.named_parameters():
        name = layer.hf_name(parameter)
        if name in names:
            raise ConfigError(
                f"{place}: hf_name gives {name!r} to both {names[name]} and {parameter}; every "
                "parameter needs a name of its own"
            )
        names[name] = parameter
    return layer
