"""Batches are a function of the step: deterministic, resumable anywhere, nothing lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from ds_infinipipe.data.sampler import ChunkSampler, SequenceSampler
from ds_infinipipe.errors import ConfigError, DataError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Execution, make_layout, make_setup

MODEL = ModelSpec("tiny", 4, 64, 128, 4, 2, 16, 320)


SETUP = make_setup(
    MODEL, BUILTIN_CLUSTERS["cpu-local"], make_layout(MODEL, pp=2, sp=2), Execution(dtype_bytes=4)
)


def make_chunk_sampler(**changes: Any) -> ChunkSampler:
    lengths = np.random.default_rng(0).integers(2, 400, size=23)
    lengths[5] = 3000
    settings: dict[str, Any] = {
        "setup": SETUP,
        "settings": PlannerSettings(solver="greedy"),
    }
    return ChunkSampler(lengths, 6, **{**settings, **changes})


def test_an_epoch_holds_every_sequence_once_and_keeps_the_rest() -> None:
    sampler = SequenceSampler(23, 5, seed=1)
    batches = list(islice(sampler, 10))
    assert [len(b) for b in batches] == [5, 5, 5, 5, 3] * 2
    assert sorted(sum(batches[:5], ())) == sorted(sum(batches[5:], ())) == list(range(23))


def test_epochs_have_orders_of_their_own() -> None:
    batches = list(islice(SequenceSampler(20, 10), 4))
    assert batches[:2] != batches[2:]
    assert sum(batches[:2], ()) != tuple(range(20))


def test_without_shuffling_ids_come_in_order() -> None:
    batches = list(islice(SequenceSampler(5, 2, shuffle=False), 4))
    assert batches == [(0, 1), (2, 3), (4,), (0, 1)]


def test_drop_last_leaves_out_a_counted_rest() -> None:
    sampler = SequenceSampler(23, 5, drop_last=True)
    assert [len(b) for b in islice(sampler, 8)] == [5] * 8
    assert sampler.steps_per_epoch == 4
    assert sampler.num_dropped == 3
    assert SequenceSampler(23, 5).num_dropped == 0


def test_seeds_decide_the_order() -> None:
    orders = [list(islice(SequenceSampler(50, 10, seed=s), 5)) for s in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


@pytest.mark.parametrize("stop", range(11))
def test_resuming_goes_on_exactly_at_every_step(stop: int) -> None:
    whole = list(islice(SequenceSampler(23, 5, seed=9), 15))
    first = SequenceSampler(23, 5, seed=9)
    before = list(islice(first, stop))
    resumed = SequenceSampler(23, 5, seed=9)
    resumed.load_state_dict(first.state_dict())
    assert before + list(islice(resumed, 15 - stop)) == whole


def test_steps_drawn_ahead_but_not_trained_are_drawn_again() -> None:
    sampler = SequenceSampler(23, 5)
    drawn = list(islice(sampler, 4))
    resumed = SequenceSampler(23, 5)
    resumed.load_state_dict(sampler.state_dict(pending=2))
    assert list(islice(resumed, 2)) == drawn[2:]
    with pytest.raises(ValueError, match="5 steps cannot be pending"):
        sampler.state_dict(pending=5)


def test_a_state_of_another_order_is_refused() -> None:
    state = SequenceSampler(23, 5, seed=1).state_dict()
    for other in (SequenceSampler(24, 5, seed=1), SequenceSampler(23, 6, seed=1)):
        with pytest.raises(ConfigError, match="repeat or skip sequences"):
            other.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"num_sequences 23 .* 24: .*data\.over_length.*anew"):
        SequenceSampler(24, 5, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="has seed 1 but this run has 2"):
        SequenceSampler(23, 5, seed=2).load_state_dict(state)


def test_impossible_samplers_are_refused() -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        SequenceSampler(0, 5)
    with pytest.raises(ConfigError, match="batch size 0"):
        SequenceSampler(5, 0)
    with pytest.raises(ConfigError, match="5 sequences are fewer than the batch size 6"):
        SequenceSampler(5, 6, drop_last=True)


def test_batches_end_with_the_epoch_and_go_on_with_the_next() -> None:
    sampler = SequenceSampler(7, 3, seed=2)
    expected = [list(b) for b in islice(SequenceSampler(7, 3, seed=2), 6)]
    batches = sampler.batches()
    assert len(batches) == 3
    assert list(batches) == expected[:3]
    sampler.draw()
    assert len(batches) == 2
    assert list(batches) == expected[4:]


def test_a_torch_dataloader_takes_the_batches() -> None:
    data = pytest.importorskip("torch.utils.data")
    sampler = make_chunk_sampler(seed=4)
    loader = data.DataLoader(list(range(23)), batch_sampler=sampler.batches(), collate_fn=list)
    seen = [sequence for batch in loader for sequence in batch]
    assert sorted(seen) == list(range(23))
    assert tuple(seen[:6]) == make_chunk_sampler(seed=4).step(0).sequences


def test_steps_carry_ids_lengths_and_epochs() -> None:
    sampler = make_chunk_sampler()
    steps = list(islice(sampler, 5))
    assert [s.index for s in steps] == [0, 1, 2, 3, 4]
    assert [s.epoch for s in steps] == [0, 0, 0, 0, 1]
    for step in steps:
        assert step.lengths == tuple(sampler.lengths[list(step.sequences)].tolist())


def test_chunks_cover_each_step_and_repeat_in_another_run() -> None:
    sampler, again = make_chunk_sampler(), make_chunk_sampler()
    for step in islice(sampler, 3):
        chunks = sampler.chunks(step)
        tokens = [0] * len(step.lengths)
        for chunk in chunks:
            for piece in chunk.slices:
                tokens[piece.sequence] += piece.length
        assert tuple(tokens) == step.lengths
        assert again.chunks(again.step(step.index)) == chunks


def test_a_chunk_sampler_resumes_with_the_same_chunks() -> None:
    sampler = make_chunk_sampler()
    list(islice(sampler, 2))
    resumed = make_chunk_sampler()
    resumed.load_state_dict(sampler.state_dict())
    step, expected = next(iter(resumed)), next(iter(sampler))
    assert step == expected
    assert resumed.plan(step).digest() == sampler.plan(expected).digest()


def test_replicas_share_a_step_and_plan_their_part() -> None:
    sampler = make_chunk_sampler(setup=replace(SETUP, layout=replace(SETUP.layout, dp=8)))
    step = sampler.step(0)
    parts = sampler.replicas(step)
    assert len(parts) == 8
    assert sorted(i for part in parts for i in part.sequences) == sorted(step.sequences)
    for part in parts:
        assert part.lengths == tuple(sampler.lengths[list(part.sequences)].tolist())
        assert sampler.plan(part).lengths == part.lengths
    assert () in [part.sequences for part in parts]
    assert make_chunk_sampler().replicas(step) == (step,)


def test_lengths_below_one_are_refused() -> None:
    with pytest.raises(DataError, match="sequence 1 has length 0"):
        ChunkSampler([4, 0], 2, SETUP)
