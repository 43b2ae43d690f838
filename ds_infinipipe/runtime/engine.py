"""The engine: DeepSpeed's PipelineEngine with a new instruction stream every step.

Two of the base class's rules do not hold here, on purpose:

* It refuses ZeRO-2/3 with pipelines, because its hooks would gather and reduce per micro-batch in
  an order it does not control. `runtime.sharding` removes the hooks and places every collective.
* It insists on train_batch = micro * accumulation * data-parallel size. A step has as many chunks
  as its plan says, so DeepSpeed is told 1 * 1 * shards and `sequences_per_step` is the user's
  `train_batch_size`. Chunks are scaled by the step's valid tokens, never by their number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine

from ds_infinipipe.config import InfiniPipeConfig
from ds_infinipipe.model.hf import make_rotary, max_positions
from ds_infinipipe.planner.types import Instruction, Plan, Timeline
from ds_infinipipe.runtime import handlers, schedule
from ds_infinipipe.runtime.batch import StepBatch, check_context_length
from ds_infinipipe.runtime.checkpoint.mixin import CheckpointMixin
from ds_infinipipe.runtime.evaluate import EvaluationReport, batches_of, run_evaluation
from ds_infinipipe.runtime.executor import StageExecutor
from ds_infinipipe.runtime.feed import Feeds
from ds_infinipipe.runtime.kernels import choose_kernels
from ds_infinipipe.runtime.loss_scale import adopt_loss_scaler
from ds_infinipipe.runtime.masters import MasterOptimizer
from ds_infinipipe.runtime.memory_meter import MemoryMeter
from ds_infinipipe.runtime.module import InfiniPipeModule
from ds_infinipipe.runtime.monitoring import step_events
from ds_infinipipe.runtime.optimizer_step import OptimizerStepMixin
from ds_infinipipe.runtime.p2p import Channels
from ds_infinipipe.runtime.planning import PlanningReport, PlanningTask, PlanService
from ds_infinipipe.runtime.recovery import Recovery
from ds_infinipipe.runtime.report import StepReport, TimeCalibration
from ds_infinipipe.runtime.sharding import ReplicatedSharding, Sharding
from ds_infinipipe.runtime.step import StepState
from ds_infinipipe.runtime.surface import lifted_refusals
from ds_infinipipe.runtime.totals import StepTotals
from ds_infinipipe.runtime.waits import WaitTimes
from ds_infinipipe.runtime.watchdog import Watchdog, current_activity
from ds_infinipipe.runtime.zero3 import Zero3Sharding

__all__ = ["InfiniPipeEngine"]

logger = logging.getLogger(__name__)

# a whole batch and this replica's share of it
_Shared: TypeAlias = tuple[StepBatch, StepBatch]


class InfiniPipeEngine(CheckpointMixin, OptimizerStepMixin, PipelineEngine):
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
        self.sp_size = self.grid.get_sequence_parallel_world_size()
        self.sp_rank = self.grid.get_sequence_parallel_rank()
        self.sequence_pg = self.grid.get_sequence_parallel_group() if self.sp_size > 1 else None
        self.loss_scaler = adopt_loss_scaler(self)
        self.sharding = self._make_sharding()
        self.sharding.is_synchronous = self.settings.debug.synchronous
        self.waits = WaitTimes(self.device)
        self.executor = StageExecutor(model.forward_funcs, self.sharding, self.waits)
        self.rotary = make_rotary(model.hf_config, self.device)
        self.attention_impl = choose_kernels(model, self.device)
        self.channels = Channels.between_stages(
            self.grid,
            self.stage_id,
            self.num_stages,
            timedelta(seconds=self.settings.runtime.timeout_s),
            verify=self.settings.debug.verify_p2p,
            is_synchronous=self.settings.debug.synchronous,
        )
        self._plans = self._make_plan_service()
        self.recovery = Recovery(self)
        self._feeds: Feeds[_Shared] = Feeds(self._parse_shared)
        self._step: StepState | None = None
        self._calibration = TimeCalibration()
        self._wants_stop = False
        self.stop_requested = False
        self._watchdog = Watchdog(lambda: current_activity(self), self.settings.runtime.watchdog_s)
        self.before_step_hooks: list[Callable[[InfiniPipeEngine], None]] = []
        self.gradient_norm = 0.0
        self.report: StepReport | None = None
        self.plan: Plan | None = None
        self.batch: StepBatch | None = None
        self.evaluation: EvaluationReport | None = None
        self.timeline: Timeline | None = None

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
        labels the loss is averaged. A step that runs out of memory is planned anew, see `recovery`.
        """
        self.plan, self.batch = plan, batch
        self._whole_batch = batch if whole is None else whole
        started = time.perf_counter()
        try:
            with self.recovery.explaining():
                loss: torch.Tensor = super().train_batch()
        except Exception:
            self.timers(TRAIN_BATCH_TIMER).reset()  # left running, it would refuse the next step
            raise
        self.report = self._make_report(planning, time.perf_counter() - started)
        if self.global_rank == 0 and self.monitor.enabled:
            counters = {"skipped_steps": float(self.skipped_steps)}
            if self.loss_scaler is not None:
                counters["loss_scale"] = float(self.loss_scaler.cur_scale)
            events = step_events(self.report, self.plan, self.global_samples, counters)
            self.monitor.write_events(events)
        self._step = None
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
        return self.recovery.run(
            plan, share.lengths, lambda plan: run_evaluation(self, plan, share, batch, members)
        )

    def execute_evaluation(self, step: StepState) -> None:
        """Run the forward-only streams of `step`."""
        self._step = step
        self.waits.begin_step()
        self.sharding.keeps_gathered = step.plan.keeps_gathered
        self.module.eval()
        forward = schedule.EvaluateChunk
        super()._exec_schedule(schedule.PlanSchedule(step.plan, self.stage_id, forward))
        self.channels.drain()
        step.check_complete()
        self.sharding.release_all()
        self.module.train()
        self._step = None

    def replica_share(self, batch: StepBatch) -> StepBatch:
        """This replica's sequences; every rank shares a batch out alike."""
        return batch if self.module.layout.dp == 1 else batch.select(self.replica_members(batch))

    def replica_members(self, batch: StepBatch) -> tuple[int, ...]:
        """Numbers of this replica's sequences in the batch."""
        if self.module.layout.dp == 1:
            return tuple(range(len(batch.ids)))
        return self.planning_task.share(batch.lengths)[self.grid.replica]

    def _train_schedule(self) -> schedule.PlanSchedule:
        assert self.plan is not None
        return schedule.PlanSchedule(self.plan, self.stage_id)

    def _exec_schedule(self, _: Any) -> None:
        assert self.plan is not None and self.batch is not None
        self.recovery.run(self.plan, self.batch.lengths, self._attempt)

    def _attempt(self, plan: Plan) -> None:
        """The batch under a plan, up to and with the optimizer's step."""
        assert self.batch is not None
        self.plan = plan
        self.waits.begin_step()
        self._step = StepState(self, plan, self.batch)
        self.sharding.keeps_gathered = plan.keeps_gathered
        self.executor.begin_step(1.0 / self._whole_batch.label_weight, plan.loss_block_tokens)
        counts = self.device.type == "cuda" or self.settings.debug.meter_memory
        with MemoryMeter(self) if counts else nullcontext() as meter:
            super()._exec_schedule(self._train_schedule())
        self._measured_bytes = 0 if meter is None else meter.use.peak_bytes

    def _aggregate_total_loss(self) -> torch.Tensor:
        """Sum of the last stage's token losses, and what the ranks measured, in one all-reduce."""
        assert self._step is not None
        self.timeline = self._step.timeline()
        self._totals = StepTotals.gather(
            self, self.timeline, self._measured_bytes, self._wants_stop
        )
        self.stop_requested = self._totals.wants_stop
        return torch.tensor(self._totals.loss, dtype=torch.float64, device=self.device)

    def request_stop(self) -> None:
        """Ask all ranks to stop after the step under way; they see it in `stop_requested`."""
        self._wants_stop = True

    # ---- called by the handlers

    def enter(self, instruction: Instruction, position: int) -> StepState:
        """Note where this rank is, for errors and the watchdog, and return the step's state."""
        assert self._step is not None
        self._step.position, self._step.instruction = position, instruction
        self._step.entered_s = time.monotonic()
        return self._step

    def upcoming_layer(self, position: int) -> int | None:
        """The layer that the next compute instruction of the stream starts with."""
        assert self._step is not None
        stream = self._step.plan.streams[self.stage_id]
        ops = (stream[place].op for place in range(position + 1, len(stream)))
        layers = (self.executor.entry_layer(op) for op in ops)
        return next((layer for layer in layers if layer is not None), None)

    @property
    def step_state(self) -> StepState | None:
        """The step or evaluation under way."""
        return self._step

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardChunk: handlers.forward_chunk,
        schedule.EvaluateChunk: handlers.evaluate_chunk,
        schedule.BackwardChunk: handlers.backward_chunk,
        schedule.BackwardChunkInput: handlers.backward_chunk_input,
        schedule.BackwardChunkWeights: handlers.backward_chunk_weights,
        schedule.SendChunkActivation: handlers.send_chunk_activation,
        schedule.RecvChunkActivation: handlers.recv_chunk_activation,
        schedule.SendChunkGradient: handlers.send_chunk_gradient,
        schedule.RecvChunkGradient: handlers.recv_chunk_gradient,
        schedule.StepPlan: handlers.step_plan,
    }

    # ---- construction

    def _configure_fp16_optimizer(self, optimizer: Any, low_precision_dtype: Any) -> Any:
        return MasterOptimizer(optimizer)

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        return MasterOptimizer(optimizer)

    def _make_sharding(self) -> Sharding:
        layers = [list(layer.parameters()) for layer in self.module.forward_funcs]
        if self.module.zero_stage == 3:
            replica_pg = self.grid.replica_pg if self.module.layout.dp > 1 else None
            return Zero3Sharding(
                self.optimizer,
                layers,
                self.sp_size,
                replica_pg,
                self.loss_scaler,
                self.settings.parallel.shard_optimizer_over_dp,
                self.module.tied_parameter,
            )
        is_alone = self.sp_size * self.module.layout.dp == 1
        pg = None if is_alone else self.grid.gradient_pg
        return ReplicatedSharding(layers, pg, self.loss_scaler)

    def _make_plan_service(self) -> PlanService:
        task = self.planning_task = PlanningTask(
            model=self.module.spec,
            cluster=self.settings.load_cluster(),
            layout=self.module.layout,
            settings=self.module.planner_settings,
            zero_stage=self.module.zero_stage,
            deadline_s=self.settings.planning.deadline_s,
        )
        return PlanService(
            task,
            pg=self.grid.plan_pg,
            solver=self.grid.plan_rank,
            control_pg=self.grid.control_pg if self.module.layout.dp > 1 else None,
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
            rank_s=dist.get_world_size() * elapsed_s,
            calibration=self._calibration.factor,
            repeats=self.recovery.repeats,
        )
        if not report.repeats:
            self._calibration.add(self.plan.predicted.step_time_s, elapsed_s)
        return report

    # ---- errors and the end

    def abandon_step(self) -> None:
        """Drop the tensors of the step under way."""
        self._step = None
        self.executor.abandon()
        self.channels.abandon()

    def plan_within(
        self, limit_bytes: int, lengths: Sequence[int], at_most_bytes: int | None
    ) -> Plan:
        """Plan within a smaller limit from now on, this batch at once; a collective.

        What does not fit in it may take `at_most_bytes`, or the configured limit.
        """
        self._plans.tighten(limit_bytes)
        return self._plans.plan_for(lengths, aside=True, at_most_bytes=at_most_bytes)[0]

    def close(self) -> None:
        """End the planning worker and the threads that watch."""
        self._watchdog.stop()
        self.recovery.close()
        self._plans.close()
        self._saver.close()
