"""Keys and values of a cut sequence on one stage, and the gradients that flow back into them.

Shapes: N rows (tokens) of the sequence, K local key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_infinipipe.errors import ScheduleError

__all__ = ["SequenceArena", "exchange"]


@dataclass(slots=True)
class _LayerBuffers:
    key_NKD: Tensor
    value_NKD: Tensor
    written: int = 0
    key_grad: Tensor | None = None
    value_grad: Tensor | None = None
    pending: int | None = None
    """Rows whose gradient later slices have already added to; None before the first backward."""

    def nbytes(self) -> int:
        tensors = (self.key_NKD, self.value_NKD, self.key_grad, self.value_grad)
        return sum(t.nbytes for t in tensors if t is not None)


class SequenceArena:
    """K/V rows of one cut sequence, for every decoder layer of one stage.

    A layer's two buffers of [num_rows, K, D] are allocated when its first rows are written. Slices
    run forward in order and backward in reverse order. The tail's backward allocates gradients for
    the rows before the tail; earlier slices add to them; the first slice's backward frees the
    layer. Gradients are summed in `grad_dtype`, by default float32 for half-precision rows and the
    rows' own dtype otherwise.

    Deviation: the paper frees the K/V of a slice with that slice's backward; here one allocation
    per layer lives until the first slice's backward, which saves copying the context.
    """

    def __init__(self, num_rows: int, *, grad_dtype: torch.dtype | None = None) -> None:
        self.num_rows = num_rows
        self.grad_dtype = grad_dtype
        self._layers: dict[int, _LayerBuffers] = {}

    @property
    def is_empty(self) -> bool:
        """True before the first write and after the first slice's backward."""
        return not self._layers

    @property
    def live_bytes(self) -> int:
        """Bytes of K, V and their gradients held now."""
        return sum(buffers.nbytes() for buffers in self._layers.values())

    def clear(self) -> None:
        """Free everything; for evaluation, where no backward does."""
        self._layers.clear()

    def write(
        self, key_TKD: Tensor, value_TKD: Tensor, layer: int, start: int
    ) -> tuple[Tensor, Tensor]:
        """Write rows [start, start + T) and return views of rows [0, start + T).

        Writing rows again, as recompute does, must write the same values. Raises ScheduleError
        when the rows do not fit or would leave a gap.
        """
        end = start + key_TKD.shape[0]
        if end > self.num_rows:
            raise ScheduleError(
                f"layer {layer}: a slice of rows [{start}, {end}) does not fit the "
                f"{self.num_rows} tokens of its sequence"
            )
        buffers = self._layers.get(layer)
        written = buffers.written if buffers else 0
        if start > written:
            raise ScheduleError(
                f"layer {layer}: the slice of rows [{start}, {end}) ran before the one that "
                f"starts at row {written}; slices of a sequence run forward in order"
            )
        if buffers is None:
            shape = (self.num_rows, *key_TKD.shape[1:])
            buffers = _LayerBuffers(key_TKD.new_empty(shape), value_TKD.new_empty(shape))
            self._layers[layer] = buffers
        # `.data` has a version counter of its own: later slices write other rows of the storage
        # without invalidating the views that earlier slices saved for their backward.
        key, value = buffers.key_NKD.data[:end], buffers.value_NKD.data[:end]
        key[start:].copy_(key_TKD)
        value[start:].copy_(value_TKD)
        buffers.written = max(written, end)
        return key, value

    def collect_grads(
        self, key_grad: Tensor, value_grad: Tensor, layer: int, start: int
    ) -> tuple[Tensor, Tensor]:
        """Take dK, dV of rows [0, end) from one slice's attention, return those of [start, end).

        Raises ScheduleError unless slices come in reverse order.
        """
        end = key_grad.shape[0]
        buffers = self._layers.get(layer)
        expected = buffers.pending if buffers else None
        if buffers and expected is None:
            expected = buffers.written
        if buffers is None or end != expected:
            raise ScheduleError(
                f"layer {layer}: the backward of rows [{start}, {end}) came out of order, the one "
                f"due ends at row {expected}; slices run backward in reverse order"
            )
        own = key_grad[start:], value_grad[start:]
        if buffers.key_grad is not None and buffers.value_grad is not None:
            own = (
                self._add(buffers.key_grad, key_grad, start),
                self._add(buffers.value_grad, value_grad, start),
            )
        elif start > 0:
            dtype = self.grad_dtype or _accumulation_dtype(key_grad.dtype)
            buffers.key_grad = key_grad[:start].to(dtype, copy=True)
            buffers.value_grad = value_grad[:start].to(dtype, copy=True)
        buffers.pending = start
        if start == 0:
            del self._layers[layer]
        return own

    @staticmethod
    def _add(total: Tensor, grad: Tensor, start: int) -> Tensor:
        end = grad.shape[0]
        total[:end].add_(grad)
        return total[start:end].to(grad.dtype)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, arena: SequenceArena, layer: int, start: int
    ) -> tuple[Tensor, Tensor]:
        ctx.arena, ctx.layer, ctx.start = arena, layer, start
        return arena.write(key, value, layer, start)

    @staticmethod
    def backward(
        ctx: Any, key_grad: Tensor, value_grad: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        key_own, value_own = ctx.arena.collect_grads(key_grad, value_grad, ctx.layer, ctx.start)
        return key_own, value_own, None, None, None


def exchange(
    key_TKD: Tensor, value_TKD: Tensor, arena: SequenceArena, layer: int, start: int
) -> tuple[Tensor, Tensor]:
    """Put a slice's K and V into the arena and get those of the whole sequence so far.

    `key_TKD`, `value_TKD` are rows [start, start + T) of the sequence; the results are [start + T,
    K, D]. Backward sends the gradient of earlier rows through the arena to their own slices.
    """
    key, value = _Exchange.apply(key_TKD, value_TKD, arena, layer, start)
    return key, value
