"""Causal attention over packed segments, with and without context."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_infinipipe.errors import ConfigError, ScheduleError
from ds_infinipipe.ops import attention
from ds_infinipipe.ops.attention import (
    IMPLEMENTATIONS,
    Segments,
    check_alignment,
    resolve_attention,
    varlen_attention,
)
from ds_infinipipe.ops.kv_arena import SequenceArena, exchange

CPU = torch.device("cpu")
DIM = 8
SCALE = DIM**-0.5
HEADS = [(8, 2), (12, 4), (28, 4), (3, 3)]
ON_CPU = [n for n in IMPLEMENTATIONS if attention._obstacle(n, "cpu", torch.float64) is None]
FAST_ON_CPU = [n for n in ON_CPU if n != "naive"]


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _qkv(segments: Segments, heads: tuple[int, int], dtype: torch.dtype = torch.float64) -> tuple:
    q = _random(segments.num_q, heads[0], DIM, seed=1, dtype=dtype)
    k = _random(segments.num_k, heads[1], DIM, seed=2, dtype=dtype)
    v = _random(segments.num_k, heads[1], DIM, seed=3, dtype=dtype)
    return tuple(t.requires_grad_() for t in (q, k, v))


def _run(
    impl: str, segments: Segments, qkv: tuple[Tensor, ...], window: int | None = None
) -> list[Tensor]:
    """Output, dQ, dK and dV for a random gradient of the output."""
    q, k, v = (t.detach().clone().requires_grad_() for t in qkv)
    out = varlen_attention(q, k, v, segments, SCALE, impl=impl, window=window)
    out.backward(_random(*out.shape, seed=4, dtype=out.dtype))
    return [out.detach(), q.grad, k.grad, v.grad]


def _relative(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def test_one_query_over_hand_made_keys() -> None:
    # scores 0 and ln 3 give weights 1/4 and 3/4
    q = torch.tensor([[[1.0]]], dtype=torch.float64)
    k = torch.tensor([[[1.0]], [[3.0]]], dtype=torch.float64).log()
    v = torch.tensor([[[4.0]], [[8.0]]], dtype=torch.float64)
    out = varlen_attention(q, k, v, Segments((0, 1), (0, 2)), 1.0, impl="naive")
    assert out.item() == pytest.approx(7.0, abs=1e-12)


@pytest.mark.parametrize("impl", FAST_ON_CPU)
@pytest.mark.parametrize("heads", HEADS)
def test_packed_segments_with_context_match_the_definition(
    impl: str, heads: tuple[int, int]
) -> None:
    segments = Segments((0, 7, 8, 37, 42), (0, 7, 14, 50, 55))
    qkv = _qkv(segments, heads)
    for got, expected in zip(_run(impl, segments, qkv), _run("naive", segments, qkv), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 3e-15), (torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)],
)
def test_cpu_flash_is_as_exact_as_its_dtype(dtype: torch.dtype, tolerance: float) -> None:
    segments = Segments((0, 65, 66, 129), (0, 301, 400, 463))
    qkv = _qkv(segments, (4, 2), dtype)
    exact = _run("naive", segments, tuple(t.detach().double() for t in qkv))
    for got, expected in zip(_run("cpu_flash", segments, qkv), exact, strict=True):
        assert _relative(got, expected) < tolerance


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 2, 4, 12, 13])
def test_every_split_equals_the_whole_sequence(
    impl: str, heads: tuple[int, int], window: int | None
) -> None:
    length = 13
    whole = Segments((0, length), (0, length))
    qkv = _qkv(whole, heads)
    expected = _run("naive", whole, qkv, window)
    for cut in range(1, length):
        got_all = _run_slices(impl, qkv, (0, cut, length), window)
        for got, want in zip(got_all, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_window_hides_all_but_the_last_keys_by_hand() -> None:
    # equal scores: each query averages the keys it sees
    zeros = torch.zeros(5, 1, 1, dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)[:, None, None]
    segments = Segments((0, 5), (0, 5))
    out = varlen_attention(zeros, zeros, v, segments, 1.0, impl="naive", window=2)
    assert out.flatten().tolist() == [1.0, 1.5, 3.0, 6.0, 12.0]


@pytest.mark.parametrize("impl", FAST_ON_CPU)
@pytest.mark.parametrize("window", [1, 3, 10, 64])
def test_packed_segments_with_a_window_match_the_definition(impl: str, window: int) -> None:
    segments = Segments((0, 7, 8, 37, 42), (0, 7, 14, 90, 95))
    qkv = _qkv(segments, (4, 2))
    expected = _run("naive", segments, qkv, window)
    for got, want in zip(_run(impl, segments, qkv, window), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@examples(60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 110),
    heads=st.sampled_from(HEADS),
)
def test_any_segments_and_window_match_the_definition(
    lengths: list[tuple[int, int]], window: int | None, heads: tuple[int, int]
) -> None:
    cu_q = (0, *itertools.accumulate(own for own, _ in lengths))
    cu_k = (0, *itertools.accumulate(own + context for own, context in lengths))
    segments = Segments(cu_q, cu_k)
    qkv = _qkv(segments, heads)
    expected = _run("naive", segments, qkv, window)
    for got, want in zip(_run("cpu_flash", segments, qkv, window), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 9])
def test_head_dimensions_up_to_256(head_dim: int, window: int | None) -> None:
    segments = Segments((0, 3, 4, 21), (0, 19, 20, 37))
    q, k, v = (
        _random(n, heads, head_dim, seed=n + heads)
        for n, heads in ((segments.num_q, 4), (segments.num_k, 2), (segments.num_k, 2))
    )
    expected = _run("naive", segments, (q, k, v), window)
    for impl in FAST_ON_CPU:
        for got, want in zip(_run(impl, segments, (q, k, v), window), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bounds", [(0, 1, 2, 3, 21), (0, 5, 10, 15, 21), (0, 18, 19, 21)])
def test_many_slices_equal_the_whole_sequence(bounds: tuple[int, ...]) -> None:
    whole = Segments((0, 21), (0, 21))
    qkv = _qkv(whole, (4, 2))
    expected = _run("naive", whole, qkv)
    for got, want in zip(_run_slices("auto", qkv, bounds), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _run_slices(
    impl: str, qkv: tuple[Tensor, ...], bounds: tuple[int, ...], window: int | None = None
) -> list[Tensor]:
    """As `_run`, slice by slice forward and in reverse backward, through an arena."""
    q, k, v = (t.detach().clone().requires_grad_() for t in qkv)
    arena, outs = SequenceArena(bounds[-1]), []
    for start, end in itertools.pairwise(bounds):
        keys, values = exchange(k[start:end], v[start:end], arena, 0, start)
        segments = Segments((0, end - start), (0, end))
        outs.append(
            varlen_attention(q[start:end], keys, values, segments, SCALE, impl=impl, window=window)
        )
    grads = _random(*q.shape, seed=4).split([len(o) for o in outs])
    for out, grad in zip(reversed(outs), reversed(grads), strict=True):
        out.backward(grad)
    assert arena.is_empty
    return [torch.cat(outs).detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("impl", ON_CPU)
def test_another_document_does_not_change_a_bit(impl: str) -> None:
    segments = Segments((0, 9, 22), (0, 9, 22))
    q, k, v = (t.detach() for t in _qkv(segments, (4, 2)))
    before = varlen_attention(q, k, v, segments, SCALE, impl=impl)
    for t in (q, k, v):
        t[:9] = _random(*t[:9].shape, seed=9)
    after = varlen_attention(q, k, v, segments, SCALE, impl=impl)
    assert not torch.equal(before[:9], after[:9])
    assert torch.equal(before[9:], after[9:])


@pytest.mark.parametrize("impl", ON_CPU)
def test_a_token_does_not_see_the_future(impl: str) -> None:
    segments = Segments((0, 6), (0, 10))
    q, k, v = (t.detach() for t in _qkv(segments, (4, 2)))
    before = varlen_attention(q, k, v, segments, SCALE, impl=impl)
    k[7:], v[7:] = 0.0, 0.0  # the keys of queries 3, 4 and 5
    after = varlen_attention(q, k, v, segments, SCALE, impl=impl)
    torch.testing.assert_close(before[:3], after[:3], rtol=0, atol=1e-15)
    assert (before[3:] - after[3:]).abs().amin() > 0


def test_strided_inputs_give_the_same_result() -> None:
    segments = Segments((0, 5, 12), (0, 8, 15))
    qkv = _qkv(segments, (4, 2))
    strided = tuple(t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in qkv)
    for got, want in zip(
        _run("cpu_flash", segments, strided), _run("cpu_flash", segments, qkv), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


def test_cpu_flash_memory_grows_with_tokens_only() -> None:
    saved: list[Tensor] = []
    segments = Segments((0, 64), (0, 1024))
    q, k, v = _qkv(segments, (4, 2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        varlen_attention(q, k, v, segments, SCALE, impl="cpu_flash")
    assert sorted(tuple(t.shape) for t in saved) == sorted(
        [(64, 4, DIM), (1024, 2, DIM), (1024, 2, DIM), (64, 4, DIM), (64, 4)]
    )


@pytest.mark.parametrize("impl", ["auto", *ON_CPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_alignment_check_accepts_bottom_right(impl: str, dtype: torch.dtype) -> None:
    check_alignment(CPU, dtype, impl, windowed=True)


def test_the_alignment_check_refuses_top_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def top_left(  # type: ignore[no-untyped-def]
        q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window=None
    ) -> Tensor:
        n = segments.num_q
        return IMPLEMENTATIONS["naive"](q, k[:n], v[:n], Segments((0, n), (0, n)), scale)

    monkeypatch.setattr(
        "ds_infinipipe.ops.attention.IMPLEMENTATIONS", {**IMPLEMENTATIONS, "naive": top_left}
    )
    with pytest.raises(ConfigError, match="aligns the mask with the first key"):
        check_alignment(CPU, torch.float64, "naive")


def test_the_alignment_check_refuses_another_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_short(*arguments: Any) -> Tensor:
        *others, window = arguments
        return naive(*others, window and window - 1)

    naive = IMPLEMENTATIONS["naive"]
    check_alignment(CPU, torch.float64, "naive", windowed=True)
    monkeypatch.setattr(
        "ds_infinipipe.ops.attention.IMPLEMENTATIONS", {**IMPLEMENTATIONS, "naive": one_short}
    )
    check_alignment(CPU, torch.float64, "naive")
    with pytest.raises(ConfigError, match=r"gives \[6.0, 7.5\]: it has another window"):
        check_alignment(CPU, torch.float64, "naive", windowed=True)


def test_auto_takes_cpu_flash_on_a_cpu() -> None:
    assert resolve_attention("auto", CPU, torch.float32) == "cpu_flash"


def test_auto_falls_back_to_sdpa_in_float32_on_cuda() -> None:
    assert resolve_attention("auto", torch.device("cuda"), torch.float32) == "sdpa"


@pytest.mark.parametrize(
    ("impl", "reason"),
    [
        ("flash_attn", "needs a CUDA device"),
        ("torch_varlen", "needs a CUDA device"),
        ("flash4", "not known: use auto or one of flash_attn, torch_varlen"),
    ],
)
def test_an_implementation_that_cannot_run_is_refused(impl: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve_attention(impl, CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10')", "cannot be imported .*undefined symbol"),
        ("raise OSError('libcudart.so.12: no such file')", "cannot be imported .*libcudart"),
        ("cute = None", "has no flash_attn_varlen_func"),
    ],
)
def test_flash_attn_that_cannot_be_used_makes_way_and_the_log_says_why(
    source: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Built for another torch, or of another version: nothing else may fall with it."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    for cached in (attention._missing, attention._resolve):
        cached.cache_clear()
    try:
        with caplog.at_level("INFO", logger="ds_infinipipe"):
            chosen = resolve_attention("auto", torch.device("cuda"), torch.bfloat16)
        assert chosen == "torch_varlen"
        assert re.search(f"attention by flash_attn is left out: .*{reason}", caplog.text)
        with pytest.raises(ConfigError, match=reason):
            resolve_attention("flash_attn", torch.device("cuda"), torch.bfloat16)
    finally:
        sys.modules.pop("flash_attn", None)
        for cached in (attention._missing, attention._resolve):
            cached.cache_clear()


def _check_kernel_call(impl: str) -> None:
    segments = Segments((0, 5, 12), (0, 8, 15))
    qkv = tuple(t.detach() for t in _qkv(segments, (4, 2)))
    for window in (None, 3):
        got = IMPLEMENTATIONS[impl](*qkv, segments, SCALE, window)
        assert torch.equal(got, IMPLEMENTATIONS["naive"](*qkv, segments, SCALE, window))


def test_flash_attn_is_called_causal_with_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_varlen_func(  # type: ignore[no-untyped-def]
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        asked.append(deterministic)
        assert causal and dropout_p == 0.0 and (max_seqlen_q, max_seqlen_k) == (7, 8)
        bounds = Segments(tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()))
        window = None if window_size == (-1, -1) else window_size[0] + 1
        assert window is None or window_size[1] == 0
        return IMPLEMENTATIONS["naive"](q, k, v, bounds, softmax_scale, window)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    asked: list[bool] = []
    _check_kernel_call("flash_attn")
    assert not any(asked)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        _check_kernel_call("flash_attn")
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked[-1] and asked.count(True) == asked.count(False)


def _varlen_211(  # type: ignore[no-untyped-def]
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1),
):  # fmt: skip
    assert window_size[1] == 0 and (max_q, max_k) == (7, 8)
    window = None if window_size[0] == -1 else window_size[0] + 1
    bounds = Segments(tuple(cu_seq_q.tolist()), tuple(cu_seq_k.tolist()))
    return IMPLEMENTATIONS["naive"](query, key, value, bounds, scale, window)


def _varlen_213(query, key, value, *args, enable_gqa=False, **kwargs):  # type: ignore[no-untyped-def]
    assert enable_gqa or query.shape[1] == key.shape[1]
    return _varlen_211(query, key, value, *args, **kwargs)


@pytest.mark.parametrize("kernel", [_varlen_211, _varlen_213])
def test_torch_varlen_is_called_causal_with_both_signatures(
    kernel: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_infinipipe.ops import attention

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    attention._varlen_knows_gqa.cache_clear()
    try:
        _check_kernel_call("torch_varlen")
    finally:
        attention._varlen_knows_gqa.cache_clear()


def test_the_installed_varlen_attn_takes_our_arguments() -> None:
    from torch.nn.attention.varlen import varlen_attn

    call = inspect.signature(varlen_attn).bind(*"qkvab", 7, 8, scale=1.0, window_size=(-1, 0))
    assert call.arguments["max_k"] == 8


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    from ds_infinipipe.ops import attention

    attention._resolve.cache_clear()
    with caplog.at_level("INFO", logger="ds_infinipipe.ops.attention"):
        resolve_attention("auto", CPU, torch.float32)
        resolve_attention("auto", CPU, torch.float32)
    assert caplog.messages == ["attention on cpu in torch.float32: cpu_flash"]


@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [((0, 3), (0, 2)), ((0, 2, 2), (0, 2, 4)), ((0, 3), (0, 3, 4)), ((1, 3), (1, 3)), ((), ())],
)
def test_boundaries_that_are_no_segments_are_refused(
    cu_q: tuple[int, ...], cu_k: tuple[int, ...]
) -> None:
    with pytest.raises(ScheduleError):
        Segments(cu_q, cu_k)


def test_tensors_of_another_length_are_refused() -> None:
    q, k, v = _qkv(Segments((0, 4), (0, 4)), (2, 2))
    with pytest.raises(ScheduleError, match="4 queries and 4 keys for segments of 5 and 5"):
        varlen_attention(q, k, v, Segments((0, 5), (0, 5)), SCALE)


def test_boundary_tensors_are_made_once() -> None:
    segments = Segments((0, 2, 5), (0, 4, 7))
    cu_q, cu_k = segments.on(CPU)
    assert cu_q.dtype == torch.int32 and cu_k.tolist() == [0, 4, 7]
    assert segments.on(CPU)[0] is cu_q
    assert (segments.max_q, segments.max_k) == (3, 4)
