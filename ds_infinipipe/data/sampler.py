"""Which sequences each step trains on, and into which chunks they go.

The batches of a run are a pure function of a few numbers, so a sampler's whole state is the number
of steps it has handed out: resuming is exact at every step, also in the middle of an epoch. Nothing
here imports torch; a torch DataLoader takes what `batches` returns as its `batch_sampler`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.errors import ConfigError, DataError
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Setup
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.replicas import idle_plan, split_batch

__all__ = ["ChunkSampler", "SequenceSampler", "Step"]

# what a saved order depends on, and how it is made to fit again
_RESTORE = {
    "num_sequences": "the corpus, infinipipe.data.over_length, context_length or max_documents "
    "has changed since: change it back",
    "batch_size": "set train_batch_size back",
    "seed": "set infinipipe.data.seed back",
    "shuffle": "set infinipipe.data.shuffle back",
    "drop_last": "set infinipipe.data.drop_last back",
}


class SequenceSampler:
    """Endless batches of sequence ids: each epoch is one pass in an order of its own.

    Iterating yields tuples of `batch_size` ids; the last batch of an epoch may be smaller and is
    kept, unless `drop_last`, which leaves out `num_dropped` sequences in each epoch. Raises
    DataError for an empty data set and ConfigError if `drop_last` leaves no batch.
    """

    def __init__(
        self,
        num_sequences: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if num_sequences < 1:
            raise DataError("there is no sequence to draw from: the data set is empty")
        if batch_size < 1:
            raise ConfigError(f"batch size {batch_size} must be at least 1 sequence")
        if drop_last and batch_size > num_sequences:
            raise ConfigError(
                f"drop_last leaves no batch: {num_sequences} sequences are fewer than the batch "
                f"size {batch_size}; lower it or set drop_last to false"
            )
        self.num_sequences = num_sequences
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._next_step = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_sequences, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @property
    def num_dropped(self) -> int:
        """Sequences of each epoch that `drop_last` leaves out."""
        return self.num_sequences % self.batch_size if self.drop_last else 0

    @property
    def next_step(self) -> int:
        """Steps handed out so far, counted from the start of the run."""
        return self._next_step

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        while True:
            yield self.draw()

    def draw(self) -> tuple[int, ...]:
        """The next batch."""
        batch = self.batch(self._next_step)
        self._next_step += 1
        return batch

    def batch(self, step: int) -> tuple[int, ...]:
        """Ids of any step, without moving on."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        return tuple(self._epoch_order(epoch)[start : start + self.batch_size].tolist())

    def batches(self) -> _EpochBatches:
        """Lists of ids up to the end of the current epoch: a torch `batch_sampler`.

        Each new iteration goes on where the last one stopped, so a loop over epochs sees them one
        by one.
        """
        return _EpochBatches(self)

    def state_dict(self, pending: int = 0) -> dict[str, Any]:
        """State as of the steps handed out, less the last `pending` that were not trained yet."""
        if not 0 <= pending <= self._next_step:
            raise ValueError(f"{pending} steps cannot be pending, {self._next_step} were drawn")
        return {"next_step": self._next_step - pending, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; ConfigError if that sampler drew other batches."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"the saved data order has {name} {state.get(name)!r} but this run has "
                    f"{value!r}: batches would repeat or skip sequences; {_RESTORE[name]}, or set "
                    "infinipipe.checkpoint.restore_data to false, which starts the data anew"
                )
        self._next_step = int(state["next_step"])

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _RESTORE}

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self.num_sequences, dtype=np.int64)
            if self.shuffle:
                np.random.default_rng([self.seed, epoch]).shuffle(order)
            self._order = epoch, order
        return self._order[1]


class _EpochBatches:
    """The rest of a sampler's current epoch, as many times as it is iterated."""

    def __init__(self, sampler: SequenceSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return self._sampler.steps_per_epoch - self._sampler.next_step % (
            self._sampler.steps_per_epoch
        )

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield list(self._sampler.draw())


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: `sequences[i]` is a data set id, `lengths[i]` its tokens.

    A plan's slices name sequences by their place i in the step.
    """

    index: int
    epoch: int
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]


class ChunkSampler:
    """The variable-length chunk sampler: from a length column to each step's sequences and chunks.

    Iterating yields a `Step` after the other without end; `plan` and `chunks` solve one, the same
    way on every rank and in every run. Deviation: the paper couples sampling to its engine; here
    it stands alone, for any training loop or a torch DataLoader (`batches`).
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        batch_size: int,
        setup: Setup,
        settings: PlannerSettings | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        unusable = np.flatnonzero(self.lengths < 1)
        if unusable.size:
            raise DataError(
                f"sequence {unusable[0]} has length {self.lengths[unusable[0]]}; "
                "every length must be at least 1 token"
            )
        self.setup = setup
        self.settings = settings if settings is not None else PlannerSettings()
        self.order = SequenceSampler(len(self.lengths), batch_size, seed, shuffle, drop_last)

    def __iter__(self) -> Iterator[Step]:
        while True:
            self.order.draw()
            yield self.step(self.order.next_step - 1)

    def step(self, index: int) -> Step:
        """Any step of the run, without moving on."""
        sequences = self.order.batch(index)
        lengths = tuple(self.lengths[list(sequences)].tolist())
        return Step(index, index // self.order.steps_per_epoch, sequences, lengths)

    def replicas(self, step: Step) -> tuple[Step, ...]:
        """The step's share of each data-parallel replica, of similar predicted time."""
        dp = self.setup.layout.dp
        if dp == 1:
            return (step,)
        return tuple(
            replace(
                step,
                sequences=tuple(step.sequences[i] for i in share),
                lengths=tuple(step.lengths[i] for i in share),
            )
            for share in split_batch(step.lengths, dp, CostModel(self.setup))
        )

    def plan(self, step: Step) -> Plan:
        """The verified plan of a step, with dp > 1 of a replica's share of it.

        Raises InfeasiblePlanError if no plan fits the memory limit.
        """
        if not step.lengths:
            return idle_plan(self.setup, self.settings)
        return plan_batch(step.lengths, self.setup, self.settings)

    def chunks(self, step: Step) -> tuple[Chunk, ...]:
        """The chunks of a step's plan."""
        return self.plan(step).chunks

    def batches(self) -> _EpochBatches:
        """Lists of data set ids for a torch DataLoader's `batch_sampler`, an epoch at a time."""
        return self.order.batches()

    def state_dict(self, pending: int = 0) -> dict[str, Any]:
        """As SequenceSampler.state_dict."""
        return self.order.state_dict(pending)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As SequenceSampler.load_state_dict."""
        self.order.load_state_dict(state)
