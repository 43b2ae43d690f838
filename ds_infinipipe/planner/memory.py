"""Bytes of stages and chunks on one rank: what the executor allocates (Eq. 5-10, corrected).

Every rank of a stage holds padded_tokens / sp tokens of a chunk. The K/V of a cut sequence live in
an arena of the whole sequence, apart from the activations; see `MemoryModel.arena_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.heads import local_heads, local_kv_heads
from ds_infinipipe.planner.specs import Layout, ModelSpec
from ds_infinipipe.planner.types import Chunk, Op

__all__ = ["MemoryModel", "RecomputeCounts", "SavedTensor", "saved_tensors"]

RecomputeCounts = Mapping[int, int] | Sequence[int] | NDArray[np.int64]
"""Recomputed layers by chunk id."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a decoder layer keeps from its forward to its backward."""

    name: str
    width: int
    """Elements per token, summed over the sp ranks."""
    element_bytes: int
    is_kv: bool = False
    """K or V: those of a cut sequence are in the arena instead."""

    @property
    def token_bytes(self) -> int:
        return self.width * self.element_bytes


def saved_tensors(model: ModelSpec, sp: int) -> tuple[SavedTensor, ...]:
    """What one decoder layer keeps when it is not recomputed.

    With fused kernels: e (7 D + 2 D_kv + 3 F) bytes per token, the paper's M_token / L. Plain
    Hugging Face layers also keep the normalised norm inputs, silu(gate) and, below four bytes an
    element, float32 copies of both norm inputs. Head-sharded tensors are as wide as the padded or
    replicated heads.
    """
    size, hidden, ffn = model.dtype_bytes, model.hidden_size, model.ffn_size
    query = sp * local_heads(model, sp) * model.head_dim
    kv = sp * local_kv_heads(model, sp) * model.head_dim
    fused = (
        SavedTensor("layer input", hidden, size),
        SavedTensor("norm1 output", hidden, size),
        SavedTensor("query", query, size),
        SavedTensor("key", kv, size, is_kv=True),
        SavedTensor("value", kv, size, is_kv=True),
        SavedTensor("attention output", query, size),
        SavedTensor("o_proj input", model.query_size, size),
        SavedTensor("norm2 input", hidden, size),
        SavedTensor("norm2 output", hidden, size),
        SavedTensor("gate", ffn, size),
        SavedTensor("up", ffn, size),
        SavedTensor("product", ffn, size),
    )
    if model.fused_kernels:
        return fused
    plain = (
        SavedTensor("norm1 normalised", hidden, size),
        SavedTensor("norm2 normalised", hidden, size),
        SavedTensor("silu(gate)", ffn, size),
    )
    copies = (
        SavedTensor("norm1 input in float32", hidden, 4),
        SavedTensor("norm2 input in float32", hidden, 4),
    )
    return fused + plain + (copies if size < 4 else ())


class MemoryModel:
    """Bytes per rank for one model and layout.

    Deviation: the paper keeps a chunk's logits from F to B on the last stage; here the loss runs
    forward and backward inside F over blocks of tokens, so logits are a transient of F and the
    gradient of the last hidden state is kept instead.
    """

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        *,
        zero_stage: int = 3,
        loss_block_tokens: int = 1024,
    ) -> None:
        """Raises ConfigError for a ZeRO stage other than 0 and 3, or an empty loss block."""
        if zero_stage not in (0, 3):
            raise ConfigError(
                f"ZeRO stage {zero_stage} is not supported inside a stage: use 0 or 3"
            )
        if loss_block_tokens < 1:
            raise ConfigError(f"loss_block_tokens is {loss_block_tokens}; it must be at least 1")
        self.model = model
        self.layout = layout
        self._loss_block_tokens = loss_block_tokens
        tensors = saved_tensors(model, layout.sp)
        self._saved_token_bytes = sum(t.token_bytes for t in tensors if not t.is_kv)
        self._hidden_token_bytes = model.dtype_bytes * model.hidden_size
        query_width = layout.sp * local_heads(model, layout.sp) * model.head_dim
        self._query_token_bytes = model.dtype_bytes * query_width
        self._kv_row_elements = 2 * local_kv_heads(model, layout.sp) * model.head_dim
        self._kv_row_bytes = self._kv_row_elements * model.dtype_bytes
        self.static_bytes = tuple(
            _static_bytes(model, layout, stage, zero_stage) for stage in range(layout.pp)
        )

    def saved_bytes(self, chunk: Chunk) -> int:
        """A: what one layer keeps of the chunk when not recomputed, without the arena's rows."""
        own_kv_rows = chunk.padded_tokens - chunk.split_tokens
        return (
            self._local_tokens(chunk) * self._saved_token_bytes + own_kv_rows * self._kv_row_bytes
        )

    def input_bytes(self, chunk: Chunk) -> int:
        """R: what one recomputed layer keeps, its input.

        Deviation: the paper adds 2 (1 - I_k) D_kv per token for a split chunk (Eq. 9); those K/V
        are in the arena, whether the layer is recomputed or not.
        """
        return self._local_tokens(chunk) * self._hidden_token_bytes

    def output_bytes(self, chunk: Chunk) -> int:
        """What a stage keeps from F to B besides its layers: its output.

        On the last stage that is the gradient of the last hidden state, of equal size.
        """
        return self._local_tokens(chunk) * self._hidden_token_bytes

    def arena_bytes(self, sequence_len: int) -> int:
        """K and V of a whole cut sequence in one layer, [length, local kv heads, head_dim] each.

        Allocated in the first slice's F and freed at the end of its B.
        """
        return sequence_len * self._kv_row_bytes

    def kv_grad_bytes(self, context_len: int) -> int:
        """dK and dV of the slices before the tail in one layer, in float32 or wider.

        Allocated in the tail's B and freed at the end of the first slice's B.
        Deviation: the paper charges M_dkv for every split chunk in the window (Eq. 5, 10); the
        tail's own gradients are never accumulated, and none exist before its backward.
        """
        return context_len * self._kv_row_elements * max(4, self.model.dtype_bytes)

    def held_bytes(self, stage: int, chunk: Chunk, recompute: int) -> int:
        """What F(chunk) adds to a stage and B(chunk) removes, the arena apart (Eq. 10)."""
        kept = self.layout.stage_layers[stage] - recompute
        layers = kept * self.saved_bytes(chunk) + recompute * self.input_bytes(chunk)
        return layers + self.output_bytes(chunk)

    def forward_transient(self, stage: int, chunk: Chunk, recompute: int) -> int:
        """Bytes that live only during F(chunk): a recomputed layer's activations, the logits.

        The two never coincide, so the larger counts.
        Deviation: the paper ignores the recomputed layer ("other activations can be ignored").
        """
        layer = self._rebuilt_bytes(chunk) if recompute else 0
        return max(layer, self._loss_bytes(chunk) if stage == self.layout.pp - 1 else 0)

    def backward_transient(self, stage: int, chunk: Chunk, recompute: int) -> int:
        """Bytes that live only during B(chunk): a recomputed layer and one layer's gradients."""
        layer = self._rebuilt_bytes(chunk) if recompute else 0
        return layer + self._gradient_workspace(stage, chunk)

    def token_capacity(self, k: int, limit: int) -> int:
        """Most tokens of a chunk that fit every stage with all layers recomputed; at least 0.

        A window of pp - 1 - stage + k chunks of that size, the dK/dV of k - 1 of them, and the
        transients of one. An estimate to size chunks by; `peak_bytes` judges.
        """
        return max(0, min(self._stage_capacity(stage, k, limit) for stage in range(self.layout.pp)))

    def peak_bytes(
        self,
        stage: int,
        operations: Sequence[tuple[Op, int]],
        chunks: Sequence[Chunk],
        recompute: RecomputeCounts,
    ) -> int:
        """Peak of a stage that runs these F and B in order, static bytes included (Eq. 8).

        `recompute[chunk id]` layers of the stage are recomputed. Depends on the order only.
        """
        layers = self.layout.stage_layers[stage]
        tails = {c.slices[0].sequence: c.slices[0] for c in chunks if c.keeps_kv and _is_tail(c)}
        current = peak = 0
        for op, chunk_id in operations:
            chunk, count = chunks[chunk_id], int(recompute[chunk_id])
            is_first = chunk.keeps_kv and chunk.context_len == 0
            if op is Op.FORWARD:
                if is_first:
                    current += layers * self.arena_bytes(tails[chunk.slices[0].sequence].end)
                current += self.held_bytes(stage, chunk, count)
                peak = max(peak, current + self.forward_transient(stage, chunk, count))
            elif op is Op.BACKWARD:
                if _is_tail(chunk):
                    current += layers * self.kv_grad_bytes(chunk.context_len)
                peak = max(peak, current + self.backward_transient(stage, chunk, count))
                current -= self.held_bytes(stage, chunk, count)
                if is_first:
                    tail = tails[chunk.slices[0].sequence]
                    current -= layers * self.arena_bytes(tail.end)
                    current -= layers * self.kv_grad_bytes(tail.start)
        return self.static_bytes[stage] + peak

    def _local_tokens(self, chunk: Chunk) -> int:
        return -(-chunk.padded_tokens // self.layout.sp)

    def _rebuilt_bytes(self, chunk: Chunk) -> int:
        """A - R: what one recomputed layer has while it runs, beside its input."""
        return self.saved_bytes(chunk) - self.input_bytes(chunk)

    def _loss_bytes(self, chunk: Chunk) -> int:
        """Logits of one block in model dtype, and their float32 copy or gradient."""
        block = min(self._loss_block_tokens, self._local_tokens(chunk))
        return block * self.model.vocab_size * (self.model.dtype_bytes + 4)

    def _gradient_workspace(self, stage: int, chunk: Chunk) -> int:
        """Gradients alive at once in one layer's backward: of its output, and of MLP or attention.

        On the last stage the output's gradient is the kept one. dK and dV come from the kernel for
        all rows the slice attends to.
        """
        tokens, size = self._local_tokens(chunk), self.model.dtype_bytes
        query_bytes = tokens * self._query_token_bytes
        mlp = tokens * 3 * self.model.ffn_size * size
        kv_rows = chunk.context_len + chunk.padded_tokens
        attention = 2 * query_bytes + kv_rows * self._kv_row_bytes
        hidden_gradients = 1 if stage == self.layout.pp - 1 else 2
        return hidden_gradients * tokens * self._hidden_token_bytes + max(mlp, attention)

    def _stage_capacity(self, stage: int, k: int, limit: int) -> int:
        """Solves static + loss + tokens * (window + dK/dV + transient) <= limit for tokens."""
        sp, layers = self.layout.sp, self.layout.stage_layers[stage]
        is_last = stage == self.layout.pp - 1
        kv_token = self._kv_row_bytes
        arena = layers * kv_token if k > 1 else 0
        window = self.layout.pp - 1 - stage + k
        held = (layers + 1) * self._hidden_token_bytes / sp + arena
        gradients = (k - 1) * layers * self.kv_grad_bytes(1)
        layer = (self._saved_token_bytes - self._hidden_token_bytes) / sp + kv_token
        mlp = 3 * self.model.ffn_size * self.model.dtype_bytes / sp
        attention = 2 * self._query_token_bytes / sp + k * kv_token
        backward = layer + 2 * self._hidden_token_bytes / sp + max(mlp, attention)
        logits = self.model.vocab_size * (self.model.dtype_bytes + 4)
        loss = self._loss_block_tokens * logits if is_last else 0
        free = limit - self.static_bytes[stage] - loss
        return int(free / (window * held + gradients + backward))


def _is_tail(chunk: Chunk) -> bool:
    return chunk.keeps_kv and chunk.slices[0].is_tail


def _static_bytes(model: ModelSpec, layout: Layout, stage: int, zero_stage: int) -> int:
    """Model states of a stage (M_ms): parameters, gradients, masters, Adam's moments.

    ZeRO-3 shards them over sp; two layers at a time are gathered and have whole gradients. The
    first stage has the embedding, the last one the head; tied weights are two copies.
    """
    size = model.dtype_bytes
    wide = max(4, size)
    units = [model.layer_params] * layout.stage_layers[stage]
    if stage == 0:
        units.insert(0, model.embedding_params)
    if stage == layout.pp - 1:
        units.append(model.embedding_params)
    if zero_stage == 0:
        master = 4 if size == 2 else 0
        return sum(units) * (size + wide + 2 * wide + master)
    shards = -(-sum(units) * (size + 4 + 8 + 4) // layout.sp)
    neighbours = max((a + b for a, b in pairwise(units)), default=units[0])
    return shards + 2 * size * neighbours
