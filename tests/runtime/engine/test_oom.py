"""A rank that runs out of memory: the step is planned anew on all ranks, and stays exact."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oom_cases import Fault, Outcome, end_with_fault, inject, make_engine, train_with_faults
from ranks import RankFailure, run_ranks

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import FLOAT32_LIMIT, FLOAT64_LIMIT, Case
from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.errors import ConfigError, InfiniPipeError, PeerTimeoutError
from ds_infinipipe.model.weights import init_parameter
from ds_infinipipe.runtime.engine.recovery import is_out_of_memory
from ds_infinipipe.runtime.ranks.store import SideChannel

pytestmark = pytest.mark.ranks

_EXACT = Case(
    "llama", 2, 2, zero_stage=0, float64=True, tied=True, seed=3, max_tokens=90, num_sequences=5
)
_SHARDED = Case("qwen3", 2, 2, seed=4, max_tokens=90, num_sequences=5)
_REPLICATED = Case("llama", 2, 1, dp=2, seed=5, max_tokens=90, num_sequences=5)


def _faulty(rank: int, case: Case, faults: list[Fault | None]) -> list[Outcome]:
    return train_with_faults(case, faults)


def _check(case: Case, faults: list[Fault | None], limit: float) -> None:
    by_rank = run_ranks(_faulty, case.pp * case.sp * case.dp, case, faults, timeout=110.0)
    for number, fault in enumerate(faults):
        outcomes = [outcomes[number] for outcomes in by_rank]
        for rank, outcome in enumerate(outcomes):
            times, ranks = (0, ()) if fault is None else (fault.times, fault.ranks)
            # ranks that are to fail at one place may do so in one attempt or one after another
            assert times <= outcome.repeats <= times * max(1, len(ranks)), (fault, outcome)
            assert outcome.repeats == outcomes[0].repeats
            assert outcome.failures == (times if rank in ranks else 0), (fault, outcome)
            assert outcome.loss_error <= limit, (fault, outcome)
            assert outcome.gradient_error <= limit, (fault, outcome)
            assert outcome.peak_bytes <= outcome.limit_bytes


def test_whatever_runs_out_the_training_is_that_of_a_run_without_faults() -> None:
    faults: list[Fault | None] = [
        Fault((1,), "forward", nth=3),
        Fault((3,), "head", is_after=True),
        Fault((0, 1, 2, 3), "backward", is_after=True),
        Fault((0,), "embedding", times=3),
        Fault((2,), "receive"),
        Fault((0, 3), "sum", is_after=True),
        None,
    ]
    _check(_EXACT, faults, FLOAT64_LIMIT)


def test_sharded_parameters_and_gradients_survive_it() -> None:
    faults: list[Fault | None] = [
        Fault((0,), "gather", nth=4, is_after=True),
        Fault((2,), "reduce", nth=3, is_after=True),
        Fault((1,), "recompute", times=2),
        Fault((3,), "begin"),
        None,
    ]
    _check(_SHARDED, faults, FLOAT32_LIMIT)


def _gather_after_giving_up(rank: int, case: Case) -> list[bool]:
    """Rank 1 has waited for a layer's gather when both give the step up, rank 0 has not."""
    engine = make_engine(case)
    layer = 1
    if rank == 0:
        engine.sharding.prefetch(layer)
    else:
        engine.sharding.fetch(layer)
    torch.distributed.barrier()
    engine.sharding.abandon()
    engine.sharding.fetch(layer)
    equal = []
    for name, parameter in engine.module.hf_parameters():
        if ".layers.0." in name:
            expected = torch.empty(parameter.shape)
            init_parameter(name, expected, seed=case.seed, std=0.1)
            equal.append(torch.equal(parameter.detach(), expected))
    engine.close()
    return equal


def test_ranks_that_gave_up_at_different_points_gather_the_same_parameters_again() -> None:
    case = Case("llama", 1, 2, num_layers=1)
    for equal in run_ranks(_gather_after_giving_up, 2, case, timeout=60.0):
        assert equal == [True] * 9


def test_all_replicas_repeat_the_step_of_one() -> None:
    faults: list[Fault | None] = [
        Fault((2,), "backward", nth=2),
        Fault((0,), "send", is_after=True),
        Fault((0, 2), "sum"),
        None,
    ]
    _check(_REPLICATED, faults, FLOAT32_LIMIT)


def test_replicas_that_share_out_the_optimizers_states_repeat_a_step_together() -> None:
    case = Case("llama", 1, 1, dp=2, seed=6, num_layers=2, max_tokens=90, shards_optimizer=True)
    _check(case, [Fault((1,), "backward", nth=2), Fault((0,), "sum"), None], FLOAT32_LIMIT)


def _batches(case: Case, lengths: tuple[int, ...], number: int) -> list[list[dict[str, Any]]]:
    rng = np.random.default_rng(case.seed)
    return [
        [{"input_ids": rng.integers(0, case.vocab_size, size=n)} for n in lengths]
        for _ in range(number)
    ]


@dataclass(frozen=True)
class _Seen:
    loss: float
    limit_bytes: int
    is_ahead: bool
    repeats: int
    line: str
    evaluation: float


def _plan_ahead(rank: int, case: Case, fails: bool) -> list[_Seen]:
    """Four steps on equal lengths, each after an evaluation; the second step and the second
    evaluation run out of memory."""
    engine = make_engine(case, plans_ahead=True)
    batches = _batches(case, (61, 40, 33, 17, 5), 4)
    stream, seen = iter(batches), []
    for step in range(4):
        repairs = []
        if fails and step == 1:
            repairs = [inject(engine, Fault((rank % 2 + 2,), p)) for p in ("evaluate", "forward")]
        evaluation = float(engine.eval_batch(iter(batches[:1])))
        loss = float(engine.train_batch(stream))
        assert [repair() for repair in repairs] == [int(rank >= 2)] * len(repairs)
        report, plan = engine.report, engine.plan
        assert report is not None and plan is not None
        limit, is_ahead = plan.setup.limit_bytes, report.planning_ahead
        seen.append(_Seen(loss, limit, is_ahead, report.repeats, report.line(), evaluation))
    engine.close()
    return seen


def _plan_ahead_twice(rank: int, case: Case) -> tuple[list[_Seen], list[_Seen]]:
    return _plan_ahead(rank, case, fails=True), _plan_ahead(rank, case, fails=False)


def test_the_plan_made_ahead_keeps_to_the_new_limit_and_evaluations_recover_too() -> None:
    by_rank = run_ranks(_plan_ahead_twice, 4, _SHARDED, timeout=110.0)
    failed, smooth = by_rank[0]
    assert [s.loss for s in failed] == pytest.approx([s.loss for s in smooth], rel=FLOAT32_LIMIT)
    assert [s.evaluation for s in failed] == pytest.approx(
        [s.evaluation for s in smooth], rel=FLOAT32_LIMIT
    )
    assert [s.repeats for s in failed] == [0, 1, 0, 0]
    assert [s.is_ahead for s in failed[1:]] == [True] * 3
    first, second, third, fourth = (s.limit_bytes for s in failed)
    assert first > second == third == fourth
    assert "out of memory once, then planned within" in failed[1].line
    assert all("out of memory" not in s.line for s in (*smooth, failed[2]))


def _find_leftovers(rank: int, case: Case) -> int:
    """Tensors of the failed attempt that are alive when the step is planned anew."""
    engine = make_engine(case)
    tensors: list[weakref.ref[torch.Tensor]] = []
    leftovers = []
    decode, plan_within = engine.executor._decode, engine.recovery._plan_within

    def remember(record: Any, index: int, hidden: torch.Tensor, **kept: Any) -> torch.Tensor:
        output = decode(record, index, hidden, **kept)
        tensors.extend(weakref.ref(t) for t in (hidden, output))
        return output

    def count(*args: Any) -> Any:
        leftovers.append(sum(ref() is not None for ref in tensors))
        return plan_within(*args)

    engine.executor._decode = remember  # type: ignore[method-assign]
    engine.recovery._plan_within = count  # type: ignore[method-assign]
    inject(engine, Fault((0,), "backward", nth=2, is_after=True))
    batch = exactness.random_batch(case, 0)
    engine.train_plan(exactness.draw_plan(engine, case, batch, 0), batch)
    engine.close()
    assert len(tensors) > 4
    return leftovers[0]


def test_nothing_of_the_failed_attempt_stays_in_memory() -> None:
    assert run_ranks(_find_leftovers, 1, Case("llama", 1, 1, max_tokens=90), timeout=60.0) == [0]


_SMALL = Case("llama", 2, 1, num_layers=2, num_sequences=3)


def test_without_recovery_all_ranks_end_with_the_cause_and_the_repair() -> None:
    fault = Fault((0,), "backward", error=MemoryError)
    answers = run_ranks(end_with_fault, 2, _SMALL, fault, {"enabled": False}, timeout=60.0)
    for answer in answers:
        assert answer.startswith("OutOfMemoryError: step 1: rank 0 (stage 0) ran out of memory at ")
        assert "(chunk" in answer and "plan predicts a peak of" in answer
        assert "memory_limit_gib" in answer and "infinipipe.recovery.enabled to true" in answer


def test_running_out_while_the_weights_change_ends_the_run_on_all_ranks() -> None:
    answers = run_ranks(end_with_fault, 2, _SMALL, Fault((1,), "optimizer"), {}, timeout=60.0)
    for answer in answers:
        assert answer.startswith("OutOfMemoryError: step 1: rank 1 (stage 1)")
        assert "cannot be repeated, as the ranks had agreed to change the weights" in answer


def _give_up(rank: int) -> list[str]:
    case = Case("llama", 1, 1, num_layers=2, num_sequences=3)
    often = Fault((0,), "forward", times=100)
    return [
        end_with_fault(rank, case, often, {"max_repeats": 2, "reduction": 0.999}),
        end_with_fault(rank, case, often, {"reduction": 0.5}),
    ]


def test_it_ends_after_so_many_repeats_or_where_no_smaller_plan_exists() -> None:
    [[repeats, infeasible]] = run_ranks(_give_up, 1, timeout=60.0)
    assert repeats.startswith("OutOfMemoryError") and "repeated 2 times" in repeats
    assert infeasible.startswith("InfeasiblePlanError: step 1: rank 0 (stage 0) ran out of memory")
    assert "Planned anew within" in infeasible and "is enough for this batch" in infeasible


def _die_while_others_wait(rank: int, folder: str) -> None:
    engine = make_engine(_SMALL, timeout_s=5.0)
    inject(engine, Fault((0,), "forward"))
    if rank == 1:
        engine.recovery._groups.abort = (  # type: ignore[method-assign]
            lambda _: os.kill(os.getpid(), signal.SIGKILL)
        )
    batch = exactness.random_batch(_SMALL, 0)
    started = time.monotonic()
    try:
        engine.train_plan(exactness.draw_plan(engine, _SMALL, batch, 0), batch)
    except InfiniPipeError as error:
        seconds = time.monotonic() - started
        Path(folder, str(rank)).write_text(f"{seconds:.1f} {type(error).__name__}: {error}")


@pytest.mark.waits
def test_a_rank_that_dies_during_recovery_is_named_after_the_timeout(tmp_path: Path) -> None:
    with contextlib.suppress(RankFailure):
        run_ranks(_die_while_others_wait, 2, str(tmp_path), timeout=40.0, grace_s=30.0)
    text = (tmp_path / "0").read_text()
    assert "PeerTimeoutError: ranks [1] did not come within 6.25 s" in text


def _listen(rank: int) -> tuple[list[int], str | None, str]:
    heard: list[int] = []
    channel = SideChannel(10.0, heard.append)
    if rank == 0:
        channel.announce("a cause")
    while not heard:
        time.sleep(0.01)
    announced = channel.announced()
    channel.meet("here")
    channel.next_round()
    message = ""
    if rank == 1:
        channel.fail("no data")
    else:
        try:
            channel.meet("here")
        except PeerTimeoutError as error:
            message = str(error)
    channel.close()
    return heard, announced, message


def test_ranks_hear_announcements_and_failures_without_a_collective() -> None:
    answers = run_ranks(_listen, 3, timeout=40.0)
    assert [heard for heard, *_ in answers] == [[0]] * 3
    assert [announced for _, announced, _ in answers] == ["a cause"] * 3
    assert "rank 1: no data" in answers[0][2] and "rank 1: no data" in answers[2][2]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (MemoryError(), True),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_failed_allocations_are_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_recovery_is_on_for_cuda_and_can_be_chosen() -> None:
    default = InfiniPipeConfig().recovery
    assert default.is_enabled("cuda") and not default.is_enabled("cpu")
    chosen = InfiniPipeConfig.from_section({"recovery": {"enabled": True}}).recovery
    assert chosen.is_enabled("cpu")
    with pytest.raises(ConfigError, match=r"recovery\.reduction is 1\.5"):
        InfiniPipeConfig.from_section({"recovery": {"reduction": 1.5}})
