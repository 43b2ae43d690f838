"""The engine: DeepSpeed's PipelineEngine with a new instruction stream every step.

Two of the base class's rules do not hold here, on purpose:

* It refuses ZeRO-2/3 with pipelines, because its hooks would gather and reduce per micro-batch in
  an order it does not control. `runtime.shards` removes the hooks and places every collective.
* It insists on train_batch = micro * accumulation * data-parallel size. A step has as many chunks
  as its plan says, so DeepSpeed is told 1 * 1 * shards and `sequences_per_step` is the user's
  `train_batch_size`. Chunks are scaled by the step's valid tokens, never by their number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine

from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.hf import make_rotary, max_positions
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Timeline
from ds_infinipipe.runtime.checkpoint.checkpointer import Checkpointer, Counters, Trained
from ds_infinipipe.runtime.engine.evaluate import EvaluationReport, batches_of, forward_only
from ds_infinipipe.runtime.engine.finite import FiniteCheck
from ds_infinipipe.runtime.engine.module import InfiniPipeModule, choose_kernels
from ds_infinipipe.runtime.engine.out_of_memory import MemoryGuard
from ds_infinipipe.runtime.engine.planning import PlanningReport, PlanningTask, PlanService
from ds_infinipipe.runtime.engine.report import (
    RankFigures,
    StageMemory,
    StepReport,
    StepTotals,
    TimeCalibration,
    step_events,
)
from ds_infinipipe.runtime.engine.watchdog import Activity, Watchdog, Whereabouts
from ds_infinipipe.runtime.ranks.clock import Wait, WaitTimes
from ds_infinipipe.runtime.ranks.connections import connect_nccl, note_connections
from ds_infinipipe.runtime.ranks.rank import Rank
from ds_infinipipe.runtime.ranks.surface import lifted_refusals
from ds_infinipipe.runtime.shards.loss_scale import adopt_loss_scaler
from ds_infinipipe.runtime.shards.masters import MasterOptimizer
from ds_infinipipe.runtime.shards.sharding import ReplicatedSharding, Sharding
from ds_infinipipe.runtime.shards.zero3 import Zero3Sharding
from ds_infinipipe.runtime.stage.batch import StepBatch, check_context_length
from ds_infinipipe.runtime.stage.channels import Channels
from ds_infinipipe.runtime.stage.executor import StageExecutor
from ds_infinipipe.runtime.stage.feed import Feeds
from ds_infinipipe.runtime.stage.meter import MemoryMeter
from ds_infinipipe.runtime.stage.step import (
    Attention,
    EvaluationRun,
    PlanInstruction,
    StepParts,
    StepRun,
)

__all__ = ["InfiniPipeEngine"]

# a whole batch and this replica's share of it
_Shared: TypeAlias = tuple[StepBatch, StepBatch]


class InfiniPipeEngine(PipelineEngine):
    """Trains an InfiniPipeModule; `train_batch` owns the whole step.

    `report` describes the last step, `plan` and `batch` are what it ran, `timeline` what this rank
    measured. Functions in `before_step_hooks` are called with the engine when a step's gradients
    are complete and not yet clipped.
    """

    module: InfiniPipeModule

    def __init__(self, *, model: InfiniPipeModule, sequences_per_step: int, **kwargs: Any) -> None:
        with lifted_refusals():
            super().__init__(model=model, **kwargs)
        self.settings: InfiniPipeConfig = model.settings
        self.sequences_per_step = sequences_per_step
        self.rank = Rank.on_grid(self.grid, self.device, model.dtype)
        self.loss_scaler = adopt_loss_scaler(
            self.optimizer,
            model.dtype,
            model.zero_stage,
            self.loss_scale(),
            self.dynamic_loss_scale_args(),
        )
        self.sharding = self._make_sharding()
        self.sharding.is_synchronous = self.settings.debug.synchronous
        self.waits = WaitTimes(self.device)
        self.executor = StageExecutor(model.forward_funcs, self.sharding, self.waits)
        self.rotary = make_rotary(model.hf_config, self.device)
        self.channels = Channels.between_stages(
            self.grid,
            self.rank,
            timedelta(seconds=self.settings.runtime.timeout_s),
            verify=self.settings.debug.verify_p2p,
            is_synchronous=self.settings.debug.synchronous,
        )
        connect_nccl(self.device)
        self.channels.connect(self.rank)
        self._parts = self._make_parts()
        self._finite = FiniteCheck(
            self.rank, self.executor, self.sharding, self.loss_scaler, self.settings.training
        )
        self._plans = self._make_plan_service()
        self._feeds: Feeds[_Shared] = Feeds(self._parse_shared)
        self.checkpointer = self._make_checkpointer()
        self._run: StepRun | None = None
        self._calibration = TimeCalibration()
        self._wants_stop = False
        self.stop_requested = False
        self._watchdog = Watchdog(self._activity, self.settings.runtime.watchdog_s)
        self.before_step_hooks: list[Callable[[InfiniPipeEngine], None]] = []
        self.gradient_norm = 0.0
        self.report: StepReport | None = None
        self.plan: Plan | None = None
        self.batch: StepBatch | None = None
        self.evaluation: EvaluationReport | None = None
        self.timeline: Timeline | None = None
        self.memory_guard = self._make_memory_guard()

    # ---- one step

    def train_batch(self, data_iter: Iterable[Any] | None = None) -> torch.Tensor:
        """Train one optimizer step and return its loss, the mean over all labels of the batch.

        `data_iter` yields batches: lists of samples (a mapping with `input_ids` and optionally
        `labels`), the same on every rank. Without it the data given to `initialize` is used.
        Raises DataEndError, a StopIteration, behind the last batch, and another InfiniPipeError
        where batch, plan or peers make the step impossible.
        """
        feed = self._feeds.of(data_iter)
        batch, share = feed.next()
        plan, planning = self._plans.plan_for(share.lengths)
        upcoming = feed.peek()
        if upcoming is not None:
            self._plans.submit(upcoming[1].lengths)
        return self.train_plan(plan, share, planning, whole=batch)

    def check_longest(self, lengths: Sequence[int]) -> None:
        """Plan the longest sequence alone, so that one that can never fit is known now.

        A collective; raises InfeasiblePlanError on every rank.
        """
        if len(lengths):
            self._plans.plan_for((int(max(lengths)),), aside=True)

    def train_plan(
        self,
        plan: Plan,
        batch: StepBatch,
        planning: PlanningReport | None = None,
        whole: StepBatch | None = None,
    ) -> torch.Tensor:
        """Execute a given plan on a given batch, for example one read back from a file.

        With replicas `batch` is this replica's share and `whole` the step's whole batch, over whose
        labels the loss is averaged. Where a rank runs out of memory, all raise OutOfMemoryError.
        """
        self.plan, self.batch = plan, batch
        self._whole_batch = batch if whole is None else whole
        started = time.perf_counter()
        try:
            with self.memory_guard.watching(plan):
                loss: torch.Tensor = super().train_batch()
        except Exception:
            self.timers(TRAIN_BATCH_TIMER).reset()  # left running, it would refuse the next step
            raise
        self.report = self._make_report(planning, time.perf_counter() - started)
        if self.rank.is_first and self.monitor.enabled:
            counters = {"skipped_steps": float(self.skipped_steps)}
            if self.loss_scaler is not None:
                counters["loss_scale"] = float(self.loss_scaler.cur_scale)
            events = step_events(self.report, self.plan, self.global_samples, counters)
            self.monitor.write_events(events)
        self._run = None
        return loss

    def eval_batch(self, data_iter: Iterable[Any], *_: Any, **__: Any) -> torch.Tensor:
        """Loss without training, the mean over the labels of the next batch of an iterator.

        Of a list of batches, or another iterable with a length, all are taken, one after the other.
        `evaluation` then holds the losses by sequence. May stand between any two training steps.
        Raises DataEndError where there is no batch.
        """
        reports = [self._evaluate(self._parse(samples)) for samples in batches_of(data_iter)]
        self.evaluation = EvaluationReport.joined(reports)
        return torch.tensor(self.evaluation.loss, dtype=torch.float64)

    def _evaluate(self, batch: StepBatch) -> EvaluationReport:
        members = self.replica_members(batch)
        share = batch.select(members)
        plan, _planning = self._plans.plan_for(share.lengths, aside=True)
        with self.memory_guard.watching(plan):
            return self.evaluate_plan(plan, share, batch, members)

    def evaluate_plan(
        self, plan: Plan, share: StepBatch, whole: StepBatch, members: Sequence[int]
    ) -> EvaluationReport:
        """Evaluate this replica's share of `whole` under a plan; a collective over all ranks.

        `members` are the numbers of the share's sequences in `whole`. Weights and gradients stay as
        they are, so it may stand between any two training steps.
        """
        run = self._run = EvaluationRun(self.rank, forward_only(plan), share, self._parts)
        run.begin()
        self.module.eval()
        super()._exec_schedule(run)
        run.end()
        self.module.train()
        self._run = None
        return EvaluationReport.gather(self.rank, run.sequence_losses, whole, members)

    def replica_share(self, batch: StepBatch) -> StepBatch:
        """This replica's sequences; every rank shares a batch out alike."""
        return batch if self.rank.dp_size == 1 else batch.select(self.replica_members(batch))

    def replica_members(self, batch: StepBatch) -> tuple[int, ...]:
        """Numbers of this replica's sequences in the batch."""
        if self.rank.dp_size == 1:
            return tuple(range(len(batch.ids)))
        return self.planning_task.share(batch.lengths)[self.rank.replica]

    def _train_schedule(self) -> None:
        """Each step has a stream of its own, see `_exec_schedule`."""

    def _exec_schedule(self, _: Any) -> None:
        """The batch under its plan, up to and with the optimizer's step."""
        assert self.plan is not None and self.batch is not None
        run = self._run = StepRun(self.rank, self.plan, self.batch, self._parts)
        run.begin(self._whole_batch.label_weight)
        counts = self.device.type == "cuda" or self.settings.debug.meter_memory
        meter = MemoryMeter(self.device, self.before_step_hooks) if counts else None
        with meter or nullcontext():
            super()._exec_schedule(run)
        self._measured_bytes = 0 if meter is None else meter.use.peak_bytes

    def _execute(self, instruction: Instruction, position: int) -> None:
        assert self._run is not None
        self._run.do(instruction, position)

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        PlanInstruction: _execute,
    }

    def _aggregate_total_loss(self) -> torch.Tensor:
        """Sum of the last stage's token losses, and what the ranks measured, in one all-reduce."""
        assert self._run is not None and self.plan is not None
        self.timeline = self._run.timeline()
        predicted = self.plan.predicted.peak_bytes[self.rank.stage]
        mine = RankFigures(
            loss=self.executor.loss_sum,
            busy_s=self.timeline.busy_s[0],
            waits_s=self.waits.seconds(),
            recomputed_layers=self.executor.recomputed_layers,
            wants_stop=self._wants_stop,
            memory=StageMemory(self._measured_bytes, predicted),
        )
        self._totals = StepTotals.gather(self.rank, mine, self.global_steps)
        self.stop_requested = self._totals.wants_stop
        return torch.tensor(self._totals.loss, dtype=torch.float64, device=self.device)

    def request_stop(self) -> None:
        """Ask all ranks to stop after the step under way; they see it in `stop_requested`."""
        self._wants_stop = True

    # ---- the end of a step

    def _finish_step(self, run: StepRun) -> None:
        """Complete the step's gradients, then DeepSpeed's own optimizer and scheduler."""
        with self.waits.during(Wait.REDUCTIONS):
            self.sharding.finish_gradients(self.module.tied_parameter, self.grid.tied_pg)
        for hook in self.before_step_hooks:
            hook(self)
        norm = self._finite.norm(run, self.global_steps + 1)
        if norm is None:
            self._skip_step()
        else:
            self.gradient_norm = norm
            self.step_optimizer()

    def step_optimizer(self) -> None:
        """Clip, step and schedule as DeepSpeed does, counting the sequences that were trained.

        `gradient_norm` is over all stages, a weight tied across stages counted once.
        """
        limit = self.gradient_clipping()
        factor = limit / (self.gradient_norm + 1e-6) if limit > 0 else 1.0
        if factor < 1.0:
            self.sharding.scale_gradients(factor)
        self._exec_optimizer_step()
        if self.loss_scaler is not None:
            self.loss_scaler.update_scale(self.optimizer.overflow)
        self._global_grad_norm = self.gradient_norm
        self._count_samples()

    def _skip_step(self) -> None:
        """Leave the weights as they are and go on with the next batch."""
        self._global_grad_norm = float("nan")
        self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._count_samples()

    def clip_fp32_gradients(self) -> None:
        """They are clipped already."""

    def _count_samples(self) -> None:
        # DeepSpeed counted its own train_batch_size, which is not the number of sequences
        self.global_samples += len(self._whole_batch.ids) - self.train_batch_size()

    def _get_optimizer_loss_scale(self) -> float | None:
        """What DeepSpeed's monitor shows; its optimizers have been told 1."""
        return None if self.loss_scaler is None else float(self.loss_scaler.cur_scale)

    # ---- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save under `save_dir/tag` (default "global_step<N>"), a collective; returns True.

        Any layout can load it. `client_state` is rank 0's: numbers, strings, tensors, lists and
        dictionaries. With `infinipipe.checkpoint.asynchronous` a copy is taken and written beside
        training, and what fails is raised by the next call here or by `close`. Raises
        CheckpointError on every rank where it cannot be written; older checkpoints stay untouched.
        """
        if exclude_frozen_parameters:
            raise ConfigError("exclude_frozen_parameters is not supported: loading needs them all")
        self.checkpointer.save(save_dir, tag, client_state, is_latest=save_latest)
        if self.settings.checkpoint.save_dir is None:
            self.memory_guard.keep_in(save_dir)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load `load_dir/tag` (default: what `latest` names), saved at any layout; a collective.

        Restores weights, optimizer and its hyperparameters, schedule, loss scale, counters and the
        position in the data. `load_module_only` takes the weights alone, and like
        `load_optimizer_states=False` lets the optimizer start afresh. Returns the folder and the
        saved `client_state`. Raises CheckpointError where there is nothing to load (DeepSpeed
        returns None), and for a damaged, foreign or other model's checkpoint, before anything has
        changed; the sampler's ConfigError where it would draw other batches.
        """
        if custom_load_fn is not None or not load_module_strict:
            raise ConfigError("checkpoints are loaded whole: drop custom_load_fn and strict=False")
        place, client_state = self.checkpointer.load(
            load_dir,
            tag,
            with_optimizer=load_optimizer_states and not load_module_only,
            with_schedule=load_lr_scheduler_states and not load_module_only,
            with_progress=not load_module_only,
        )
        if self.settings.checkpoint.save_dir is None and not load_module_only:
            self.memory_guard.adopt(Path(place).parent)
        return place, client_state

    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous save is complete, a collective; raises what failed."""
        self.checkpointer.wait()

    def _set_counters(self, counters: Counters) -> None:
        self.global_steps = counters.global_steps
        self.global_samples = counters.global_samples
        self.skipped_steps = counters.skipped_steps

    # ---- construction

    def _configure_fp16_optimizer(self, optimizer: Any, low_precision_dtype: Any) -> Any:
        return MasterOptimizer(optimizer)

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        return MasterOptimizer(optimizer)

    def _make_sharding(self) -> Sharding:
        layers = [list(layer.parameters()) for layer in self.module.forward_funcs]
        if self.module.zero_stage == 3:
            replica_pg = self.grid.replica_pg if self.rank.dp_size > 1 else None
            return Zero3Sharding(
                self.optimizer,
                layers,
                self.rank.sp_size,
                replica_pg,
                self.loss_scaler,
                self.settings.parallel.shard_optimizer_over_dp,
                self.module.tied_parameter,
            )
        is_alone = self.rank.sp_size * self.rank.dp_size == 1
        pg = None if is_alone else self.grid.gradient_pg
        return ReplicatedSharding(layers, pg, self.loss_scaler)

    def _make_parts(self) -> StepParts:
        attention = Attention(
            kernel=choose_kernels(self.module, self.device),
            rotary=self.rotary,
            sequence_pg=self.grid.sequence_pg if self.rank.sp_size > 1 else None,
            joins_qkv=self.settings.runtime.all_to_all == "fused",
        )
        return StepParts(
            executor=self.executor,
            channels=self.channels,
            sharding=self.sharding,
            waits=self.waits,
            attention=attention,
            finish=self._finish_step,
            hidden_size=self.module.spec.hidden_size,
            is_synchronous=self.settings.debug.synchronous,
        )

    def _make_memory_guard(self) -> MemoryGuard:
        """Once all groups are there, whose connections it may have to cut."""
        note_connections()
        guard = MemoryGuard(
            self.rank,
            self.settings.recovery,
            timeout_s=self.settings.runtime.timeout_s,
            plans=self._plans,
            whereabouts=self._whereabouts,
            abandon=self._abandon_step,
        )
        if self.settings.checkpoint.save_dir is not None:
            guard.adopt(self.settings.checkpoint.save_dir)
        return guard

    def _make_checkpointer(self) -> Checkpointer:
        trained = Trained(
            module=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            loss_scaler=self.loss_scaler,
            cut=getattr(self.sharding, "cut", None),
            data=self._feeds,
        )
        return Checkpointer(
            self.rank,
            self.settings.checkpoint,
            trained,
            lambda: Counters(self.global_steps, self.global_samples, self.skipped_steps),
            self._set_counters,
        )

    def _make_plan_service(self) -> PlanService:
        task = self.planning_task = PlanningTask(
            setup=self.module.setup,
            settings=self.module.planner_settings.settings,
            deadline_s=self.settings.planning.deadline_s,
        )
        return PlanService(
            task,
            pg=self.grid.plan_pg,
            solver=self.grid.plan_rank,
            control_pg=self.grid.control_pg if self.rank.dp_size > 1 else None,
            asynchronous=self.settings.planning.asynchronous,
            deadline_s=self.settings.planning.deadline_s,
        )

    def set_batches(self, batches: Iterable[Any]) -> None:
        """Where `train_batch()` without an argument reads its batches."""
        self._feeds.set_training(batches)

    def _parse_shared(self, samples: Any) -> _Shared:
        batch = self._parse(samples)
        check_context_length(batch.lengths, self.settings.data)
        return batch, self.replica_share(batch)

    def _parse(self, samples: Any) -> StepBatch:
        hf_config = self.module.hf_config
        return StepBatch.from_samples(samples, max_positions(hf_config), hf_config.vocab_size)

    # ---- numbers

    def _make_report(self, planning: PlanningReport | None, elapsed_s: float) -> StepReport:
        assert self.plan is not None
        report = StepReport.build(
            step=self.global_steps,
            totals=self._totals,
            grad_norm=float(self.get_global_grad_norm() or 0.0),
            plan=self.plan,
            batch=self._whole_batch,
            planning=planning,
            elapsed_s=elapsed_s,
            calibration=self._calibration.factor,
        )
        self._calibration.add(self.plan.predicted.step_time_s, elapsed_s)
        return report

    # ---- errors and the end

    def _abandon_step(self) -> None:
        """Drop the tensors of the step under way."""
        self._run = None
        self._parts.abandon()

    def _whereabouts(self) -> Whereabouts:
        return Whereabouts(self.rank, self.global_steps + 1, self._run)

    def _activity(self) -> Activity | None:
        """The instruction that this rank is at."""
        here = self._whereabouts()
        return None if here.run is None else Activity(str(here), here.run.entered_s)

    def close(self) -> None:
        """End the planning worker and the threads that watch."""
        self._watchdog.stop()
        self.memory_guard.close()
        self._plans.close()
        self.checkpointer.close()
