"""The memory meter counts what is there, and the memory model predicts what it counts."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ds_infinipipe.checks.memory_truth import MemoryCase, MemoryDifference, compare_memory
from ds_infinipipe.runtime.stage.meter import MemoryMeter, live_tensor_bytes

_MIB = 2**20


def _mebibytes(count: int) -> torch.Tensor:
    return torch.ones(count * _MIB, dtype=torch.uint8)


def _settled_bytes() -> int:
    """Live bytes once what other tests left in cycles is gone: freeing some may free others."""
    found = live_tensor_bytes()
    while (again := live_tensor_bytes()) < found:
        found = again
    return found


def test_the_meter_counts_storages_from_their_first_tensor_to_their_last() -> None:
    kept = _mebibytes(2)
    before = _settled_bytes()
    with MemoryMeter() as meter:
        first = _mebibytes(8)
        view = first[_MIB:]
        del first  # the view keeps all of it
        _mebibytes(1)  # gone at once, beside the 8
        del view
        second = _mebibytes(4)
    assert before >= kept.nbytes
    assert meter.use.start_bytes == before
    assert meter.use.dynamic_bytes == 9 * _MIB
    assert second.nbytes == 4 * _MIB


def test_the_meter_sees_what_autograd_keeps_and_makes() -> None:
    x = torch.ones(_MIB // 4, requires_grad=True)
    with MemoryMeter() as meter:
        y = (x.exp() * 2.0).exp()  # keeps two results
        forward = meter.use.dynamic_bytes
        y.sum().backward()
    assert forward == 3 * _MIB  # one more is alive in between
    assert 4 * _MIB <= meter.use.dynamic_bytes <= 5 * _MIB
    assert x.grad is not None


def test_tensors_that_the_compiler_traced_with_have_no_memory() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        fake = torch.empty(shapes.create_unbacked_symint(), dtype=torch.uint8)
    before = _settled_bytes()
    wrapped = torch._to_functional_tensor(fake)
    with FunctionalTensorMode():
        functional = FunctionalTensor.to_functional(fake)
    with MemoryMeter() as meter:
        _mebibytes(1)
    assert isinstance(wrapped.untyped_storage().nbytes(), torch.SymInt)
    assert isinstance(functional.untyped_storage().nbytes(), torch.SymInt)
    assert live_tensor_bytes() == meter.use.start_bytes == before
    assert isinstance(meter.use.peak_bytes, int)
    assert meter.use.dynamic_bytes == _MIB


def test_the_meter_agrees_with_the_allocator() -> None:
    layer = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.SiLU(), torch.nn.Linear(1024, 256)
    )
    x = torch.randn(512, 256)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        layer(x).square().mean().backward()

    step()
    layer.zero_grad(set_to_none=True)
    with MemoryMeter() as meter:
        step()
    layer.zero_grad(set_to_none=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
    allocated = int(np.cumsum(changes).max())
    assert meter.use.dynamic_bytes == pytest.approx(allocated, rel=0.02)


def test_nothing_is_hooked_while_no_meter_is_on() -> None:
    with MemoryMeter() as meter:
        _mebibytes(1)
    peak = meter.use
    _mebibytes(64)
    assert meter.use == peak


CASES = {
    (1, 1): [
        MemoryCase("llama", 1, 1, zero_stage=0, num_layers=3, max_tokens=600, seed=1),
        MemoryCase("qwen3", 1, 1, num_kv_heads=4, num_layers=3, max_tokens=600, seed=2),
        MemoryCase("llama", 1, 1, is_bf16=True, num_layers=3, max_tokens=600, seed=3),
        MemoryCase("llama", 1, 1, is_bf16=True, fp8="row", num_layers=3, max_tokens=600, seed=4),
    ],
    (2, 2): [MemoryCase("llama", 2, 2, num_kv_heads=4, max_tokens=900, random_plans=2, seed=6)],
}


def _compare(rank: int, cases: list[MemoryCase]) -> list[list[MemoryDifference]]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    return [compare_memory(case) for case in cases]


def _differences(pp: int, sp: int) -> list[MemoryDifference]:
    by_rank = run_ranks(_compare, pp * sp, CASES[pp, sp], timeout=200.0)
    return [d for rank in by_rank for case in rank for d in case]


@pytest.mark.ranks
def test_peaks_of_a_single_rank_are_predicted_within_5_percent() -> None:
    found = _differences(1, 1)
    errors = np.array([d.step_error for d in found])
    assert len(found) == 16
    assert np.mean(np.abs(errors) <= 0.05) >= 0.95, errors
    assert np.abs([d.states_error for d in found]).max() <= 0.05
    assert max(d.recomputed_share for d in found) > 0.5
    assert any(d.is_planned for d in found)


@pytest.mark.ranks
def test_peaks_of_a_pipeline_are_predicted_within_5_percent_and_hardly_ever_too_low() -> None:
    found = _differences(2, 2)
    errors = np.array([d.step_error for d in found])
    assert np.mean(np.abs(errors) <= 0.05) >= 0.95, errors
    assert errors.min() >= -0.03, errors
    assert {d.stage for d in found} == {0, 1}
