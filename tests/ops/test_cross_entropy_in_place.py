"""Cross-entropy that overwrites its logits: torch's backend, its memory, and who is chosen."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from planner_cases import setup_of
from torch import Tensor

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.ops import cross_entropy
from ds_infinipipe.ops.cross_entropy import (
    cross_entropy_,
    linear_cross_entropy_sum,
    linear_cross_entropy_tokens,
    resolve_cross_entropy,
)
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.predict.layer_bytes import logits_bytes
from ds_infinipipe.runtime.stage.meter import MemoryMeter

CPU = torch.device("cpu")
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _logits(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    wide = 3.0 * torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64)
    return wide.to(dtype)


def _labels(num_rows: int, vocab_size: int) -> Tensor:
    labels = torch.randint(vocab_size, (num_rows,), generator=torch.Generator().manual_seed(5))
    labels[1::3] = -100
    return labels


@pytest.mark.parametrize("dtype", [torch.float64, *ROUNDING])
@pytest.mark.parametrize("shape", [(1, 1), (1, 257_000), (7, 37), (13, 2)])
@pytest.mark.parametrize("scratch", [64, 2**20])
def test_losses_and_gradients_match_float64(
    dtype: torch.dtype, shape: tuple[int, int], scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "LOSS_SCRATCH_ELEMENTS", scratch)
    padded = _logits(shape[0], shape[1] + 3, dtype)
    logits, labels = padded[:, : shape[1]], _labels(*shape)
    weights = torch.arange(1.0, shape[0] + 1)
    exact = logits.double().detach().requires_grad_()
    want = F.cross_entropy(exact, labels, reduction="none") * weights
    (0.125 * want.sum()).backward()
    got = cross_entropy_(logits, labels, token_weights_B=weights, grad_scale=0.125, impl="torch")
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(got.double(), want.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        logits.double(), exact.grad, rtol=ROUNDING.get(dtype, 1e-13), atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_logits_are_the_only_tensor_of_their_size(dtype: torch.dtype) -> None:
    logits, labels = _logits(50, 4000, dtype), _labels(50, 4000)
    with MemoryMeter() as meter:
        cross_entropy_(logits, labels, token_weights_B=torch.ones(50), impl="torch")
    assert 0 < meter.use.dynamic_bytes < logits.nbytes / 100


def test_half_precision_logits_need_a_few_widened_rows_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_entropy, "LOSS_SCRATCH_ELEMENTS", 2 * 4000)
    logits, labels = _logits(50, 4000, torch.bfloat16), _labels(50, 4000)
    with MemoryMeter() as meter:
        cross_entropy_(logits, labels, impl="torch")
    assert 2 * 4000 * 4 <= meter.use.dynamic_bytes <= 2 * 4000 * 4 + 50 * 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [16, 256])
def test_the_loss_needs_the_bytes_the_memory_model_counts(
    dtype: torch.dtype, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, hidden_size, vocab_size = 256, 32, 8000
    for module in ("ds_infinipipe.ops.cross_entropy", "ds_infinipipe.planner.predict.layer_bytes"):
        monkeypatch.setattr(f"{module}.LOSS_SCRATCH_ELEMENTS", 4 * vocab_size)
    hidden = torch.randn(num_tokens, hidden_size).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, hidden_size).to(dtype).requires_grad_()
    labels = _labels(num_tokens, vocab_size)
    with MemoryMeter() as meter:
        linear_cross_entropy_sum(hidden, weight, labels, 1.0, block_tokens)
    gradients = hidden.nbytes + weight.numel() * 4
    model = ModelSpec("m", 1, hidden_size, 64, 2, 2, 16, vocab_size)
    setup = setup_of(model, make_layout(model, 1, 1), dtype_bytes=dtype.itemsize)
    predicted = logits_bytes(setup, block_tokens)
    measured = meter.use.dynamic_bytes - gradients
    assert block_tokens * vocab_size * dtype.itemsize <= measured
    assert measured == pytest.approx(predicted, rel=0.05, abs=10_000)


def test_evaluation_holds_one_block_of_logits() -> None:
    hidden, weight = torch.randn(64, 8), torch.randn(4000, 8)
    with MemoryMeter() as meter:
        linear_cross_entropy_tokens(hidden, weight, _labels(64, 4000), 8)
    assert meter.use.dynamic_bytes < 1.1 * 8 * 4000 * 4


def test_rows_apart_leave_what_is_between_them_alone() -> None:
    padded = _logits(4, 11)
    before = padded.clone()
    cross_entropy_(padded[:, :9], _labels(4, 9), impl="torch")
    assert torch.equal(padded[:, 9:], before[:, 9:])
    assert not torch.equal(padded[:, :9], before[:, :9])


def test_logits_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="beside each other"):
        cross_entropy_(_logits(4, 6)[:, ::2], _labels(4, 3))


def test_auto_takes_torch_on_a_cpu_and_triton_on_cuda() -> None:
    assert resolve_cross_entropy("auto", CPU, torch.float32) == "torch"
    pytest.importorskip("triton", reason="Triton's wheels exist for Linux only")
    assert resolve_cross_entropy("auto", torch.device("cuda"), torch.bfloat16) == "triton"


def test_auto_falls_back_to_torch_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    cross_entropy._resolve.cache_clear()
    try:
        cuda = torch.device("cuda")
        assert resolve_cross_entropy("auto", cuda, torch.bfloat16) == "torch"
        with pytest.raises(ConfigError, match="triton is not installed"):
            resolve_cross_entropy("triton", cuda, torch.bfloat16)
    finally:
        cross_entropy._resolve.cache_clear()


@pytest.mark.parametrize(
    ("impl", "reason"),
    [("triton", "cannot run on cpu"), ("liger", "not known: use auto or one of torch, triton")],
)
def test_a_backend_that_cannot_run_is_refused(impl: str, reason: str) -> None:
    pytest.importorskip("triton", reason="Triton's wheels exist for Linux only")
    with pytest.raises(ConfigError, match=reason):
        resolve_cross_entropy(impl, CPU, torch.float32)


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    cross_entropy._resolve.cache_clear()
    with caplog.at_level("INFO", logger="ds_infinipipe.ops.cross_entropy"):
        for _ in range(2):
            resolve_cross_entropy("auto", CPU, torch.bfloat16)
    assert caplog.messages == ["cross-entropy on cpu in torch.bfloat16: torch"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_off_the_cpu_the_weights_gradient_is_summed_in_place_in_float32(dtype: torch.dtype) -> None:
    # on the meta device torch checks the call, its dtypes and shapes, and computes nothing
    total = torch.zeros(40, 6, device="meta")
    logits, hidden = (torch.empty(9, n, device="meta", dtype=dtype) for n in (40, 6))
    given = {t.untyped_storage()._cdata for t in (total, logits, hidden)}
    made: list[str] = []

    class Made(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if out.untyped_storage()._cdata not in given:
                made.append(str(func))
            return out

    with Made():
        cross_entropy._add_outer(total, logits, hidden)
    assert made == []
