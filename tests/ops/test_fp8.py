"""FP8 projections, with the rounding emulated in float64."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.ops.fp8 import RECIPES, Fp8Linear, check_fp8, fp8_product, quantise
from ds_infinipipe.runtime.stage.meter import MemoryMeter

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Largest relative error of rounding to three and to two bits of mantissa."""


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _round(x: Tensor, dtype: torch.dtype, per_row: bool) -> Tensor:
    """What is left of a tensor after quantising and back, by the format's own numbers."""
    largest = x.double().abs().amax(dim=1 if per_row else (0, 1), keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / torch.finfo(dtype).max).float().double()
    return (x.double() / scale).float().to(dtype).double() * scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("per_row", [True, False])
def test_rounding_is_off_by_half_a_step_of_the_mantissa(dtype: torch.dtype, per_row: bool) -> None:
    x = _random(40, 64).exp()
    before = x.clone()
    rounded, scale = quantise(x, dtype, per_row)
    assert torch.equal(x, before)
    error = (rounded.float() * scale - x).abs() / x
    assert 0.5 * HALF_STEP[dtype] < error.max() <= HALF_STEP[dtype] * (1 + 1e-6)
    assert scale.shape == ((40, 1) if per_row else (1, 1)) and scale.dtype == torch.float32


def test_the_largest_number_of_a_row_becomes_the_largest_of_the_format() -> None:
    rounded, scale = quantise(torch.tensor([[3.0, -6.0], [0.5, 0.25]]), E4M3, True)
    assert rounded.float().tolist() == [[224.0, -448.0], [448.0, 224.0]]
    assert scale.flatten().tolist() == pytest.approx([6 / 448, 0.5 / 448])


@pytest.mark.parametrize("per_row", [True, False])
def test_rounding_needs_a_few_rows_in_float32_beside_the_result(
    per_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _random(64, 4000).bfloat16()
    whole = quantise(x.t(), E4M3, per_row)
    monkeypatch.setattr("ds_infinipipe.ops.fp8.FP8_SCRATCH_ELEMENTS", 2 * 4000)
    with MemoryMeter() as meter:
        by_rows = quantise(x.t(), E4M3, per_row)
    assert meter.use.dynamic_bytes < 64 * 4000 + 2 * (2 * 4000 * 4) + 20 * 4000
    for got, want in zip(by_rows, whole, strict=True):
        assert torch.equal(got.float(), want.float()) and got.is_contiguous()


def test_zeros_stay_zeros() -> None:
    for per_row in (True, False):
        rounded, scale = quantise(torch.zeros(3, 16), E4M3, per_row)
        assert not rounded.float().any() and (scale == 1).all()


def test_what_is_not_finite_stays_so() -> None:
    x = _random(3, 16)
    x[1, 4] = float("inf")
    assert not torch.isfinite(quantise(x, E4M3, True)[0].float()[1]).all()


@examples(30)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 4),
    depth=st.integers(1, 4),
    name=st.sampled_from([*RECIPES]),
    is_gradient=st.booleans(),
)
def test_a_product_is_that_of_the_rounded_operands(
    rows: int, columns: int, depth: int, name: str, is_gradient: bool
) -> None:
    recipe = RECIPES[name]
    a = _random(rows, 16 * depth, seed=rows).bfloat16()
    b = _random(16 * columns, 16 * depth, seed=1).bfloat16()
    a_dtype = recipe.gradient_dtype if is_gradient else E4M3
    exact = _round(a, a_dtype, recipe.per_row) @ _round(b, E4M3, recipe.per_row).T
    got = fp8_product(a, b, recipe, a_dtype)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8, atol=2e-3)


def _linear(has_bias: bool) -> nn.Linear:
    linear = nn.Linear(48, 32, bias=has_bias, dtype=torch.bfloat16)
    linear.weight.data = _random(32, 48, seed=2).bfloat16()
    return linear


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_a_projection_rounds_two_of_its_three_products(
    name: str, has_bias: bool, num_tokens: int
) -> None:
    linear, recipe = _linear(has_bias), RECIPES[name]
    Fp8Linear.adopt(linear, recipe)
    x = _random(1, num_tokens, 48, seed=3).bfloat16().requires_grad_()
    gradient = _random(1, num_tokens, 32, seed=4).bfloat16()
    out = linear(x)
    out.backward(gradient)
    weight, per_row = linear.weight, recipe.per_row
    want = _round(x[0], E4M3, per_row) @ _round(weight, E4M3, per_row).T
    want = want if linear.bias is None else want + linear.bias.double()
    rounded = _round(gradient[0], recipe.gradient_dtype, per_row)
    want_source = rounded @ _round(weight.t(), E4M3, per_row).T
    want_weight = gradient[0].double().T @ x[0].double()
    pairs = [(out[0], want), (x.grad[0], want_source), (weight.grad, want_weight)]
    if linear.bias is not None:
        pairs.append((linear.bias.grad, gradient[0].double().sum(0)))
    for got, exact in pairs:
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), exact.detach(), rtol=2.0**-7, atol=4e-2)
        assert (got.double() - exact).norm() / exact.norm() < 4e-3


@pytest.mark.parametrize("name", RECIPES)
def test_a_projection_stays_close_to_the_exact_one(name: str) -> None:
    linear = _linear(True)
    x, gradient = _random(200, 48, seed=3).bfloat16(), _random(200, 32, seed=4).bfloat16()
    results = []
    for _ in range(2):
        source = x.clone().requires_grad_()
        out = linear(source)
        grads = torch.autograd.grad(out, [source, *linear.parameters()], gradient)
        results.append([out.detach(), *grads])
        Fp8Linear.adopt(linear, RECIPES[name])
    for exact, got in zip(*results, strict=True):
        assert (got.double() - exact.double()).norm() / exact.double().norm() < 0.06


def test_parameters_stay_the_same_objects_with_the_same_names() -> None:
    linear = _linear(True)
    before = dict(linear.named_parameters())
    Fp8Linear.adopt(linear, RECIPES["row"])
    assert all(dict(linear.named_parameters())[n] is p for n, p in before.items())


@pytest.mark.parametrize("name", RECIPES)
def test_the_trial_at_the_start_accepts_what_works(name: str) -> None:
    check_fp8(name, CPU, torch.bfloat16, {"hidden_size": 64})


def test_other_precisions_and_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs bf16 training"):
        check_fp8("row", CPU, torch.float32, {})
    with pytest.raises(ConfigError, match="intermediate_size 100 is no multiple of 16"):
        check_fp8("row", CPU, torch.bfloat16, {"hidden_size": 64, "intermediate_size": 100})


def test_a_device_without_fp8_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with 8.9\nmore")

    monkeypatch.setattr("torch._scaled_mm", refuse)
    with pytest.raises(ConfigError, match=r"cannot run on cpu: .* with 8.9; set fp8 to off"):
        check_fp8("tensor", CPU, torch.bfloat16, {})


def test_wrong_products_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._scaled_mm", lambda a, b, *rest, **kw: torch.zeros(16, 32))
    with pytest.raises(ConfigError, match="wrong products"):
        check_fp8("tensor", CPU, torch.bfloat16, {})
