"""Tensors of a decoder layer that outlive the operation that makes them."""

from __future__ import annotations

from dataclasses import dataclass

from ds_infinipipe.planner.heads import local_heads, local_kv_heads
from ds_infinipipe.planner.specs import ModelSpec

__all__ = ["SavedTensor", "saved_tensors", "stashed_token_bytes"]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a decoder layer keeps from its forward to its backward."""

    name: str
    width: int
    """Elements per token, summed over the sp ranks."""
    element_bytes: int
    is_kv: bool = False
    """K or V: those of a cut sequence are in the arena instead."""
    is_late: bool = False
    """Made after attention, so gone when attention's backward runs."""

    @property
    def token_bytes(self) -> int:
        return self.width * self.element_bytes


def saved_tensors(model: ModelSpec, sp: int) -> tuple[SavedTensor, ...]:
    """What one decoder layer keeps when it is not recomputed.

    With fused kernels: e (7 D + 2 D_kv + 3 F) bytes per token, the paper's M_token / L. Plain
    Hugging Face layers also keep the normalised norm inputs, silu(gate), the statistics of norms
    and attention, and, below four bytes an element, a float32 copy of either norm input (instead
    of the second one itself). Head-sharded tensors are as wide as the padded or replicated heads.
    Without an all-to-all (sp 1) the attention output is o_proj's input; the paper's figure counts
    two tensors, so fused kernels do too.
    """
    size, hidden, ffn = model.dtype_bytes, model.hidden_size, model.ffn_size
    query = sp * local_heads(model, sp) * model.head_dim
    kv = sp * local_kv_heads(model, sp) * model.head_dim
    is_half, is_plain = size < 4, not model.fused_kernels
    tensors = [
        SavedTensor("layer input", hidden, size),
        SavedTensor("norm1 output", hidden, size),
        SavedTensor("query", query, size),
        SavedTensor("key", kv, size, is_kv=True),
        SavedTensor("value", kv, size, is_kv=True),
        SavedTensor("attention output", query, size),
        SavedTensor("o_proj input", model.query_size, size),
        SavedTensor("norm2 input", hidden, size, is_late=True),
        SavedTensor("norm2 output", hidden, size, is_late=True),
        SavedTensor("gate", ffn, size, is_late=True),
        SavedTensor("up", ffn, size, is_late=True),
        SavedTensor("product", ffn, size, is_late=True),
    ]
    if is_plain:
        unkept = {"o_proj input"} if sp == 1 else set()
        unkept |= {"norm2 input"} if is_half else set()
        tensors = [t for t in tensors if t.name not in unkept]
        tensors += [
            SavedTensor("norm1 normalised", hidden, size),
            SavedTensor("norm2 normalised", hidden, size, is_late=True),
            SavedTensor("silu(gate)", ffn, size, is_late=True),
            SavedTensor("norm statistics", 2, 4),
            SavedTensor("log-sum-exp", sp * local_heads(model, sp), 4),
        ]
    if is_plain and is_half:
        tensors += [
            SavedTensor("norm1 input in float32", hidden, 4),
            SavedTensor("norm2 input in float32", hidden, 4, is_late=True),
        ]
    return tuple(tensors) + _head_norm_tensors(model)


def _head_norm_tensors(model: ModelSpec) -> tuple[SavedTensor, ...]:
    """Norms of every query and key head (Qwen3), which run before the all-to-all."""
    if not model.has_head_norms:
        return ()
    width, size = model.query_size + model.kv_size, model.dtype_bytes
    if model.fused_kernels:
        return (SavedTensor("head norm inputs", width, size),)
    return (
        SavedTensor("head norm inputs", width, max(4, size)),
        SavedTensor("head norm normalised", width, size),
        SavedTensor("head norm statistics", model.num_heads + model.num_kv_heads, 4),
    )


def stashed_token_bytes(model: ModelSpec) -> int:
    """What a layer keeps per token between the two halves of a backward, summed over the sp ranks.

    Inputs of the seven projections: both norms' outputs, the attention output, the product. Their
    output gradients: query, key, value, gate, up, and twice the hidden size, as the gradient of a
    sum is that of both of its parts. Key and value are as wide as the projections, not replicated.
    """
    hidden, ffn, query = model.hidden_size, model.ffn_size, model.query_size
    inputs = 2 * hidden + query + ffn
    gradients = query + 2 * model.kv_size + 2 * ffn + 2 * hidden
    return model.dtype_bytes * (inputs + gradients)
