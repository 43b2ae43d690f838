"""What attention needs beside its inputs, by a counting allocator."""

from __future__ import annotations

import pytest
import torch

from ds_infinipipe.ops.attention import Segments, varlen_attention
from ds_infinipipe.runtime.stage.meter import MemoryMeter

NEW, HEADS, KV_HEADS, DIM = 64, 4, 2, 16


def _peak_bytes(impl: str, context: int, window: int | None) -> int:
    q = torch.randn(NEW, HEADS, DIM, requires_grad=True)
    k, v = (torch.randn(context + NEW, KV_HEADS, DIM, requires_grad=True) for _ in range(2))
    segments = Segments((0, NEW), (0, context + NEW))
    with MemoryMeter() as meter:
        out = varlen_attention(q, k, v, segments, 0.25, impl=impl, window=window)
        out.backward(torch.ones_like(out))
    return meter.use.dynamic_bytes


@pytest.mark.parametrize("window", [None, 48, 700])
def test_cpu_flash_grows_linearly_with_the_context(window: int | None) -> None:
    at = {context: _peak_bytes("cpu_flash", context, window) for context in (1024, 2048, 4096)}
    assert at[4096] - at[2048] == pytest.approx(2 * (at[2048] - at[1024]), rel=0.01)
    # gradients of K and V, and as much again inside the backward kernel's results
    rows = KV_HEADS * DIM * 4
    assert at[4096] - at[2048] <= 2048 * 2 * (2 * rows) * 1.01


def test_a_context_ten_times_as_long_needs_no_score_matrix() -> None:
    scores = HEADS * NEW * (8192 + NEW) * 4
    assert _peak_bytes("cpu_flash", 8192, None) < scores < _peak_bytes("naive", 8192, None)


def test_the_memory_of_many_queries_is_linear_too() -> None:
    def peak(length: int) -> int:
        q = torch.randn(length, HEADS, DIM, requires_grad=True)
        k, v = (torch.randn(length, KV_HEADS, DIM, requires_grad=True) for _ in range(2))
        with MemoryMeter() as meter:
            out = varlen_attention(q, k, v, Segments((0, length), (0, length)), 0.25)
            out.backward(torch.ones_like(out))
        return meter.use.dynamic_bytes

    small, large = peak(512), peak(2048)
    assert large == pytest.approx(4 * small, rel=0.02)
