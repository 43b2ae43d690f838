"""Output projection and cross-entropy over token blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ds_infinipipe.ops.cross_entropy import (
    linear_cross_entropy_sum,
    linear_cross_entropy_sum_reference,
)

HIDDEN, VOCAB = 6, 37


def _inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(VOCAB, (num_tokens,), generator=generator)
    labels[::4] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _reference(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> list[Tensor]:
    """Loss and gradients in float64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    loss = linear_cross_entropy_sum_reference(hidden, weight, labels, scale)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def test_one_token_over_two_words_by_hand() -> None:
    # logits ln 1 and ln 3: probabilities 1/4 and 3/4
    hidden = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0], [3.0]], dtype=torch.float64).log().requires_grad_()
    loss = linear_cross_entropy_sum(hidden, weight, torch.tensor([0]), 0.5, 8)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * math.log(4), abs=1e-12)
    assert hidden.grad.item() == pytest.approx(0.5 * 0.75 * math.log(3), abs=1e-12)
    assert weight.grad.flatten().tolist() == pytest.approx([-0.375, 0.375], abs=1e-12)


@pytest.mark.parametrize("block_tokens", [1, 3, 13, 1024])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_blocks_give_the_loss_and_gradients_of_all_logits(
    num_tokens: int, block_tokens: int
) -> None:
    hidden, weight, labels = _inputs(num_tokens)
    expected = _reference(hidden, weight, labels, 1 / 7)
    loss = linear_cross_entropy_sum(hidden, weight, labels, 1 / 7, block_tokens)
    loss.backward()
    for got, want in zip((loss, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_the_loss_multiplies_both_gradients() -> None:
    hidden, weight, labels = _inputs(9)
    expected = _reference(hidden, weight, labels, 0.25)
    (3 * linear_cross_entropy_sum(hidden, weight, labels, 0.25, 4)).backward()
    torch.testing.assert_close(hidden.grad, 3 * expected[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight.grad, 3 * expected[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "loss_error", "grad_error"),
    [(torch.float32, 1e-6, 1e-6), (torch.bfloat16, 2e-3, 4e-3), (torch.float16, 3e-4, 1e-3)],
)
def test_lower_precision_stays_close_to_float64(
    dtype: torch.dtype, loss_error: float, grad_error: float
) -> None:
    hidden, weight, labels = _inputs(201, dtype)
    expected = _reference(hidden, weight, labels, 1 / 150)
    loss = linear_cross_entropy_sum(hidden, weight, labels, 1 / 150, 32)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected[0].item(), rel=loss_error)
    for got, want in ((hidden.grad, expected[1]), (weight.grad, expected[2])):
        assert got.dtype == dtype
        assert (got.double() - want).norm() / want.norm() < grad_error


def test_float16_gradients_of_many_tokens_do_not_underflow() -> None:
    # a token's share is 2e-9 of the loss: below float16's smallest number before loss scaling
    hidden, weight, labels = _inputs(64, torch.float16)
    expected = _reference(hidden, weight, labels, 2e-9)
    loss = linear_cross_entropy_sum(hidden, weight, labels, 2e-9, 16) * 2.0**24
    loss.backward()
    for got, want in ((hidden.grad, expected[1]), (weight.grad, expected[2])):
        assert (got.double() / 2**24 - want).norm() / want.norm() < 5e-3


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = linear_cross_entropy_sum(hidden, weight, torch.tensor([0, 0]), 1.0, 2)
    loss.backward()
    assert loss.item() == 2e4
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_a_chunk_without_labels_costs_nothing() -> None:
    hidden, weight, labels = _inputs(7)
    loss = linear_cross_entropy_sum(hidden, weight, torch.full_like(labels, -100), 1.0, 3)
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any() and not weight.grad.any()


def test_ignored_rows_get_a_gradient_of_exactly_zero() -> None:
    hidden, weight, labels = _inputs(13)
    linear_cross_entropy_sum(hidden, weight, labels, 1.0, 4).backward()
    assert not hidden.grad[labels == -100].any()
    assert hidden.grad[labels != -100].any(dim=1).all()


def test_the_weight_may_be_released_after_forward() -> None:
    hidden, weight, labels = _inputs(5)
    expected = _reference(hidden, weight, labels, 1.0)
    loss = linear_cross_entropy_sum(hidden, weight, labels, 1.0, 2)
    weight.data.fill_(float("nan"))
    loss.backward()
    torch.testing.assert_close(hidden.grad, expected[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight.grad, expected[2], rtol=1e-12, atol=1e-12)


def test_evaluation_computes_the_loss_alone() -> None:
    hidden, weight, labels = _inputs(13)
    expected = _reference(hidden, weight, labels, 0.1)[0]
    with torch.no_grad():
        loss = linear_cross_entropy_sum(hidden, weight, labels, 0.1, 4)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


def test_no_tensor_is_larger_than_a_block_of_logits() -> None:
    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.largest = max(self.largest, out.numel())
            return out

    hidden, weight, labels = _inputs(64)
    with Sizes() as sizes:
        linear_cross_entropy_sum(hidden, weight, labels, 1.0, 16).backward()
    assert sizes.largest == 16 * VOCAB


def test_a_second_backward_is_refused() -> None:
    hidden, weight, labels = _inputs(5)
    loss = linear_cross_entropy_sum(hidden, weight, labels, 1.0, 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        loss.backward()
