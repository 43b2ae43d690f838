"""Datasets and collate functions of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import checkpoint_cases
import numpy as np
import pytest
import torch
from ranks import run_strict

import ds_infinipipe
from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.errors import ConfigError, DataError

pytestmark = pytest.mark.ranks

_CASE = Case("llama", 2, 1, num_layers=2, num_sequences=3)


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Eight sequences, of 4, 5, ... tokens."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng(2)
        for length in range(4, 12):
            yield {"text": rng.integers(0, _CASE.vocab_size, size=length)}


def _mask_first_half(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    samples = []
    for item in items:
        labels = item["text"].copy()
        labels[: len(labels) // 2] = -100
        samples.append({"input_ids": item["text"], "labels": labels})
    return samples


def _train(rank: int) -> tuple[list[tuple[int, ...]], list[int], str, str]:
    checkpoint_cases.quiet()
    config = exactness.make_config(_CASE)
    module = ds_infinipipe.InfiniPipeModule(config)
    try:
        ds_infinipipe.initialize(model=module, config=config, training_data=5)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    module = ds_infinipipe.InfiniPipeModule(config)
    engine, _, loader, _ = ds_infinipipe.initialize(
        model=module, config=config, training_data=_Stream(), collate_fn=_mask_first_half
    )
    lengths, labels = [], []
    assert engine.training_dataloader is loader
    try:
        while True:
            engine.train_batch()
            lengths.append(engine.batch.lengths)
            labels.append(engine.batch.num_labels)
    except StopIteration:
        pass
    stacked = ""
    try:
        engine.set_batches([])
        engine.train_batch(_stacking_loader(engine))
    except DataError as error:
        stacked = str(error)
    engine.close()
    return lengths, labels, refused, stacked


def _stacking_loader(engine: Any) -> Any:
    from ds_infinipipe.runtime.engine.initialize import StreamLoader

    return StreamLoader(_Stream(), engine, lambda items: {"input_ids": [i["text"] for i in items]})


def test_an_iterable_dataset_is_read_once_in_its_order_through_the_collate_function() -> None:
    for lengths, labels, refused, stacked in run_strict(_train, 2, timeout=90.0):
        assert lengths == [(4, 5, 6), (7, 8, 9), (10, 11)]
        # half of each is masked, odd lengths rounded down: the labels are those of the rest
        assert labels == [2 + 3 + 3, 4 + 4 + 5, 5 + 6]
        assert "training_data is int; give a dataset with __len__" in refused
        assert "collate_fn returned a dict; return a list of samples" in stacked
