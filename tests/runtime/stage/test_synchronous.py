"""`debug.synchronous`: nothing runs ahead or beside, and nothing else changes."""

from __future__ import annotations

import checkpoint_cases
import pytest
import torch
from ranks import run_strict

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.stage.channels import Channel

pytestmark = pytest.mark.ranks


def _build(case: Case, synchronous: bool) -> InfiniPipeEngine:
    checkpoint_cases.quiet()
    config = exactness.make_config(case)
    config["infinipipe"]["debug"] = {"synchronous": synchronous}
    return exactness.engine_from_config(config, case.dtype)


def _early(engine: InfiniPipeEngine) -> list[str]:
    """What was started before it was due, or is still under way, in the next step."""
    found: list[str] = []
    fetch, wait = engine.sharding.fetch, Channel.wait

    def watched_fetch(layer: int) -> None:
        found.extend(f"gather {n}" for n in getattr(engine.sharding, "_in_flight", ()))
        fetch(layer)

    def watched_wait(channel: Channel, chunk: int) -> torch.Tensor:
        found.extend(f"receive {n}" for n in channel._posted)
        return wait(channel, chunk)

    engine.sharding.fetch = watched_fetch  # type: ignore[method-assign]
    Channel.wait = watched_wait  # type: ignore[method-assign]
    return found


def _both(rank: int, case: Case) -> tuple[list[list[float]], list[bool], list[bool]]:
    """Losses of both modes, whether anything ran early in each, which tensors are equal."""
    losses, early, states = [], [], []
    wait = Channel.wait
    for synchronous in (False, True):
        engine = _build(case, synchronous)
        seen = _early(engine)
        losses.append(checkpoint_cases.train(engine, case, 4))
        Channel.wait = wait  # type: ignore[method-assign]
        early.append(bool(seen))
        states.append(checkpoint_cases.snapshot(engine))
        engine.close()
    equal = [torch.equal(tensor, states[1][key]) for key, tensor in states[0].items()]
    return losses, early, equal


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", 2, 2, tied=True),
        Case("qwen3", 2, 1, 2),
        Case("llama", 2, 1, 2, zero_stage=0, num_sequences=3),
    ],
    ids=["2x2", "two replicas", "two replicas, ZeRO-0"],
)
def test_both_modes_are_equal_bit_for_bit_and_only_one_runs_ahead(case: Case) -> None:
    for losses, early, equal in run_strict(_both, 4, case, timeout=150.0):
        assert losses[0] == losses[1]
        assert all(equal) and len(equal) > 10
        assert early == [True, False]
