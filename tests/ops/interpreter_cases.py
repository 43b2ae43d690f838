"""What `test_triton_kernels.py` runs in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_infinipipe.ops.cross_entropy import (
    cross_entropy_,
    linear_cross_entropy_sum,
    linear_cross_entropy_sum_reference,
    linear_cross_entropy_tokens,
)

# what storing a gradient costs; the interpreter cuts float32 off to bfloat16 where a GPU rounds
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}


def _logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = 3.0 * torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64)
    return wide.to(dtype)


def _labels(num_rows: int, vocab_size: int) -> Tensor:
    labels = torch.randint(vocab_size, (num_rows,), generator=torch.Generator().manual_seed(5))
    labels[-1] = vocab_size - 1
    return labels


def _exact(logits: Tensor, labels: Tensor, weights: Tensor | None, scale: float) -> list[Tensor]:
    """Losses and the logits' gradient in float64."""
    wide = logits.double().detach().requires_grad_()
    losses = F.cross_entropy(wide, labels, reduction="none")
    losses = losses if weights is None else losses * weights
    (scale * losses.sum()).backward()
    return [losses.detach(), wide.grad]


def _check(logits: Tensor, labels: Tensor, weights: Tensor | None, scale: float) -> None:
    want_losses, want_grad = _exact(logits, labels, weights, scale)
    losses = cross_entropy_(
        logits, labels, token_weights_B=weights, grad_scale=scale, impl="triton"
    )
    torch.testing.assert_close(losses.double(), want_losses, rtol=1e-6, atol=1e-6)
    # beside the rounding its float32 value is off by 1e-6 of the largest
    largest = want_grad.abs().amax().clamp(min=1e-30).item()
    torch.testing.assert_close(
        logits.double(), want_grad, rtol=ROUNDING.get(logits.dtype, 1e-15), atol=1e-6 * largest
    )


def test_the_kernels_really_run_in_the_interpreter() -> None:
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("dtype", [*ROUNDING, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 37, 8193, 50257])
def test_losses_and_gradients_match_float64(dtype: torch.dtype, vocab_size: int) -> None:
    logits = _logits(3, vocab_size, dtype)
    _check(logits, _labels(3, vocab_size), torch.tensor([1.0, 0.0, 2.5]), 0.125)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_257k_words_is_no_special_case(dtype: torch.dtype) -> None:
    _check(_logits(1, 257_000, dtype), _labels(1, 257_000), None, 1.0)


def test_float64_is_exact() -> None:
    logits = _logits(5, 901, torch.float64)
    want_losses, want_grad = _exact(logits, _labels(5, 901), None, 1.0)
    losses = cross_entropy_(logits, _labels(5, 901), impl="triton")
    torch.testing.assert_close(losses, want_losses, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(logits, want_grad, rtol=1e-14, atol=1e-14)


@examples(30)
@given(
    num_rows=st.integers(1, 9),
    vocab_size=st.integers(1, 600),
    dtype=st.sampled_from([*ROUNDING]),
    weighted=st.booleans(),
    ignored=st.sets(st.integers(0, 8)),
    gap=st.integers(0, 5),
)
def test_any_shape_any_stride_any_ignored_rows(
    num_rows: int,
    vocab_size: int,
    dtype: torch.dtype,
    weighted: bool,
    ignored: set[int],
    gap: int,
) -> None:
    wide = _logits(num_rows, vocab_size + gap, dtype, seed=vocab_size)
    before = wide.clone()
    logits, labels = wide[:, :vocab_size], _labels(num_rows, vocab_size)
    rows = [i for i in ignored if i < num_rows]
    labels[rows] = -100
    weights = torch.arange(1.0, num_rows + 1) if weighted else None
    want_losses, want_grad = _exact(logits, labels, weights, 1.0)
    losses = cross_entropy_(logits, labels, token_weights_B=weights, impl="triton")
    torch.testing.assert_close(losses.double(), want_losses, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logits.double(), want_grad, rtol=ROUNDING[dtype], atol=1e-5)
    assert not losses[rows].any() and not logits[rows].any()
    assert torch.equal(wide[:, vocab_size:], before[:, vocab_size:])


def test_a_confident_row_keeps_its_small_loss() -> None:
    logits = torch.tensor([[1000.0, 985.0, -1e4]])
    losses = cross_entropy_(logits, torch.tensor([0]), impl="triton")
    # the exact loss is log(1 + e^-15)
    assert losses.item() == pytest.approx(3.059e-7, rel=0.2)
    assert torch.isfinite(logits).all()


def test_logits_that_are_not_finite_give_a_loss_that_is_not() -> None:
    for bad in (float("nan"), float("inf")):
        logits = _logits(1, 40, torch.float32)
        logits[0, 20] = bad
        assert not torch.isfinite(cross_entropy_(logits, torch.tensor([3]), impl="triton")).any()


def test_blocks_with_the_kernel_give_the_loss_and_gradients_of_all_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(13, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = _labels(13, 37)
    labels[::4] = -100
    want = linear_cross_entropy_sum_reference(hidden, weight, labels, 1 / 7)
    got = linear_cross_entropy_sum(hidden, weight, labels, 1 / 7, 5, impl="triton")
    grads = [torch.autograd.grad(loss, (hidden, weight)) for loss in (want, got)]
    for a, b in zip((want, *grads[0]), (got, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    tokens = linear_cross_entropy_tokens(hidden, weight, labels, 5, impl="triton")
    torch.testing.assert_close(tokens.sum() / 7, want.detach(), rtol=1e-12, atol=1e-12)
    assert not tokens[labels == -100].any()
