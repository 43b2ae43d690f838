"""`ds_infinipipe.initialize`: DeepSpeed's entry point, for an InfiniPipeModule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfig

from ds_infinipipe.config.deepspeed import read_deepspeed_json, require_optimizer
from ds_infinipipe.config.section import derive_deepspeed_config, sequences_per_step
from ds_infinipipe.data.sampler import SequenceSampler
from ds_infinipipe.errors import ConfigError, DataError
from ds_infinipipe.model.hf import max_positions
from ds_infinipipe.planner.predict.state_bytes import reduce_bucket_elements
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.engine.module import InfiniPipeModule
from ds_infinipipe.runtime.ranks.agree import raise_together, refusing
from ds_infinipipe.runtime.stage.batch import check_context_length

__all__ = ["initialize"]


def initialize(
    args: Any = None,
    model: InfiniPipeModule | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[torch.nn.Parameter] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[InfiniPipeEngine, Any, Any, Any]:
    """Same arguments and return tuple as `deepspeed.initialize`.

    `training_data` is a dataset whose items have `input_ids`. Of a map-style one, batches of
    `train_batch_size` sequences are drawn as the section's `data` settings say; of an iterable one
    they come in its order, which must be the same on every rank. `collate_fn` makes of a list of
    items a list of samples, for example with `labels` and `loss_weights`. Returns engine,
    optimizer, training data loader and learning-rate scheduler. Raises ConfigError for arguments
    that mean nothing here and for a configuration other than the model's.
    """
    _refuse("mpu", mpu, "the module brings its own process grid")
    _refuse("mesh_param", mesh_param, "set infinipipe.parallel in the configuration")
    if not isinstance(model, InfiniPipeModule):
        raise ConfigError(
            f"model is {type(model).__name__}; ds_infinipipe.initialize takes an InfiniPipeModule: "
            "model = ds_infinipipe.InfiniPipeModule(config)"
        )
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ConfigError("no configuration: pass config=, or args with deepspeed_config")
    whole = read_deepspeed_json(given)
    derived = derive_deepspeed_config(whole, dist.get_world_size())
    if derived != model.deepspeed_config:
        raise ConfigError(
            "the configuration given to initialize differs from the one the InfiniPipeModule was "
            "built with; pass the same to both"
        )
    if optimizer is None:
        require_optimizer(whole)
    with refusing("building the engine"):
        engine = _build_engine(
            model, derived, sequences_per_step(whole), optimizer, model_parameters, lr_scheduler
        )
    loader: Iterable[Any] | None = None
    if training_data is not None:
        loader = _make_loader(training_data, engine, collate_fn)
        engine.training_dataloader = loader
        engine.set_batches(loader)
        engine.check_longest(getattr(training_data, "lengths", ()))
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _build_engine(
    model: InfiniPipeModule,
    derived: Mapping[str, Any],
    num_sequences: int,
    optimizer: Any,
    model_parameters: Iterable[torch.nn.Parameter] | None,
    lr_scheduler: Any,
) -> InfiniPipeEngine:
    mpu = model.mpu()
    parameters = list(model.parameters()) if model_parameters is None else model_parameters
    # DeepSpeed edits what it is given, and would read args.deepspeed_config where there are args
    settings = read_deepspeed_json(derived)
    # what the plan's memory counts
    settings["zero_optimization"].setdefault(
        "reduce_bucket_size", reduce_bucket_elements(model.spec)
    )
    return InfiniPipeEngine(
        model=model,
        sequences_per_step=num_sequences,
        args=None,
        optimizer=optimizer,
        model_parameters=parameters,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        dist_init_required=False,
        config=settings,
        config_class=DeepSpeedConfig(settings, mpu),
    )


class StepLoader:
    """Endless batches of a dataset, the same on every rank; `sampler` keeps the position."""

    def __init__(
        self,
        dataset: Any,
        engine: InfiniPipeEngine,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        data = engine.settings.data
        with raise_together("the training data"):
            size = len(dataset)
            check_lengths(dataset, max_positions(engine.module.hf_config))
            check_context_length(list(getattr(dataset, "lengths", ())), data)
            self.sampler = SequenceSampler(
                size,
                engine.sequences_per_step,
                seed=data.seed,
                shuffle=data.shuffle,
                drop_last=data.drop_last,
            )
        self._dataset = dataset
        self._collate = collate_fn

    def __iter__(self) -> Iterator[Any]:
        return _StepIterator(self)

    def batch(self, ids: Sequence[int]) -> Any:
        """The items of these numbers, collated."""
        return _collate(self._collate, [self._dataset[i] for i in ids])


class _StepIterator(Iterator[Any]):
    """Goes on where the loader's sampler stands; by `loader` the engine knows its own data."""

    def __init__(self, loader: StepLoader) -> None:
        self.loader = loader
        self._ids = iter(loader.sampler)

    def __next__(self) -> Any:
        return self.loader.batch(next(self._ids))


class StreamLoader:
    """Batches of an iterable dataset in its own order, the same on every rank, until it ends.

    It has no position to save, and its sequences' lengths are checked as they come.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        engine: InfiniPipeEngine,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._dataset = dataset
        self._size = engine.sequences_per_step
        self._drops_last = engine.settings.data.drop_last
        self._collate = collate_fn

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._dataset)
        while batch := list(itertools.islice(samples, self._size)):
            if len(batch) == self._size or not self._drops_last:
                yield _collate(self._collate, batch)


def _make_loader(dataset: Any, engine: InfiniPipeEngine, collate_fn: Any) -> Iterable[Any]:
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return StepLoader(dataset, engine, collate_fn)
    if hasattr(dataset, "__iter__"):
        return StreamLoader(dataset, engine, collate_fn)
    raise ConfigError(
        f"training_data is {type(dataset).__name__}; give a dataset with __len__ and __getitem__, "
        "or one with __iter__"
    )


def _collate(collate_fn: Callable[[list[Any]], Any] | None, samples: list[Any]) -> Any:
    batch = samples if collate_fn is None else collate_fn(samples)
    if isinstance(batch, (Mapping, torch.Tensor)):
        raise DataError(
            f"collate_fn returned a {type(batch).__name__}; return a list of samples, each with "
            "its own input_ids: sequences are packed without padding, so do not stack or pad them"
        )
    return batch


def check_lengths(dataset: Any, max_length: int) -> None:
    """Raise DataError for a sequence beyond the model's positions, where lengths are known."""
    lengths = np.asarray(getattr(dataset, "lengths", ()))
    if lengths.size and lengths.max() > max_length:
        worst = int(lengths.argmax())
        name = dataset.name(worst) if hasattr(dataset, "name") else f"sequence {worst}"
        raise DataError(
            f"{name} has {lengths[worst]} tokens, but the model has positions for {max_length} "
            f"({int((lengths > max_length).sum())} sequences are longer): lower "
            "infinipipe.data.context_length, or raise max_position_embeddings"
        )


def _refuse(name: str, value: Any, why: str) -> None:
    if value is not None:
        raise ConfigError(f"{name} is not used: {why}")
