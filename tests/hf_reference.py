"""transformers' own models as the reference, exact in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_infinipipe.model.hf import hf_class
from ds_infinipipe.model.weights import init_parameter
from ds_infinipipe.planner.facts.models import SUPPORTED_MODEL_TYPES

__all__ = ["document_loss", "exact_norms", "reference_model", "tiny_config"]


def tiny_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json's content for a model of a few thousand weights, with grouped attention."""
    values = {
        "model_type": model_type,
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "sliding_window": None,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**values, **changes}


@contextlib.contextmanager
def exact_norms() -> Iterator[None]:
    """Let RMSNorm compute in float64 where its input is; transformers' own casts to float32.

    That rounding turns differences of 1e-16 between two float64 models into 1e-7. It changes the
    classes, so it covers the reference and our layers alike.
    """

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        y = x.to(exact)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)

    with contextlib.ExitStack() as stack:
        for norm in (hf_class(CONFIG_MAPPING[kind](), "RMSNorm") for kind in SUPPORTED_MODEL_TYPES):
            stack.enter_context(mock.patch.object(norm, "forward", forward))
        yield


def reference_model(
    values: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """transformers' model with our initial weights; sdpa, as eager's softmax casts to float32."""
    config: PreTrainedConfig = CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        init_parameter(name, parameter, seed, config.initializer_range, config.pad_token_id)
    return model


def document_loss(model: nn.Module, documents: list[Tensor], scale: float) -> Tensor:
    """Cross-entropy sum over the documents, each run alone, times `scale`."""
    total = 0.0
    for ids in documents:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        exact = torch.promote_types(logits.dtype, torch.float32)
        loss = torch.nn.functional.cross_entropy(logits.to(exact), ids[1:], reduction="sum")
        total = total + loss
    return total * scale
