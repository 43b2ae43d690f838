"""The executable specification of a plan, independent of everything that makes plans.

`verify_plan` judges a finished Plan from its data alone: what the chunks cover, what the pipelines
promise, what each stream does (streams.py), that no two wait for each other for ever
(transfers.py), what a stream needs in memory (memory.py) and how long it takes (time.py). Nothing
here uses the orders, windows, rows or simulators of the planner; only the formulas of MemoryModel
and CostModel are shared. Everything is 0-based.
"""

from __future__ import annotations

from itertools import pairwise

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.plan import PLAN_VERSION, PipelinePlan, Plan
from ds_infinipipe.planner.verify.memory import check_memory, peak_bytes_by_stage
from ds_infinipipe.planner.verify.streams import check_streams
from ds_infinipipe.planner.verify.time import check_time
from ds_infinipipe.planner.verify.transfers import check_transfers

__all__ = ["peak_bytes_by_stage", "verify_plan"]


def verify_plan(plan: Plan, digest: str | None = None) -> None:
    """Raise ScheduleError, one paragraph that names the place, unless the plan keeps every rule.

    Each token once, slices in order and aligned, padding only where needed; each chunk in one
    pipeline, forward and backward orders that respect the slices; each stream with its F, B, sends,
    receives and STEP, within the window of Eq. 7; channels first in first out, without deadlock
    even where nothing is buffered; the peak of each stage within the limit and equal to the
    prediction, step time and bubbles as predicted. With `digest` the plan must also be the one that
    the digest was taken from.
    """
    _check_frame(plan, digest)
    for chunk_id, chunk in enumerate(plan.chunks):
        _check_chunk(plan, chunk_id, chunk)
    _check_coverage(plan)
    _check_membership(plan)
    chains = _chains(plan)
    for number, pipeline in enumerate(plan.pipelines):
        _check_pipeline(plan, number, pipeline, chains)
    check_streams(plan, chains)
    check_transfers(plan)
    check_memory(plan)
    check_time(plan)


def _check_frame(plan: Plan, digest: str | None) -> None:
    layout, model = plan.layout, plan.model
    if plan.version != PLAN_VERSION:
        raise ScheduleError(f"the plan has version {plan.version}, this code reads {PLAN_VERSION}")
    if len(layout.stage_layers) != layout.pp or min(layout.stage_layers, default=0) < 1:
        raise ScheduleError(
            f"layout: pp is {layout.pp}, but stage_layers {layout.stage_layers} do not give each "
            "of these stages at least one layer"
        )
    if sum(layout.stage_layers) != model.num_layers:
        raise ScheduleError(
            f"layout: the stages hold {sum(layout.stage_layers)} layers in all, but {model.name} "
            f"has {model.num_layers}"
        )
    if layout.sp < 1 or layout.dp < 1:
        raise ScheduleError(f"layout: sp {layout.sp} and dp {layout.dp} must both be at least 1")
    execution = plan.setup.execution
    if execution.keeps_gathered and not plan.setup.gathers_parameters:
        raise ScheduleError(
            f"the plan keeps parameters gathered, but with ZeRO stage {execution.zero_stage} and "
            f"sp {layout.sp} none are gathered"
        )
    if len(plan.predicted.peak_bytes) != layout.pp:
        raise ScheduleError(
            f"the plan predicts peak bytes of {len(plan.predicted.peak_bytes)} stages, but the "
            f"layout has {layout.pp}"
        )
    for sequence, length in enumerate(plan.lengths):
        if length < 1:
            raise ScheduleError(f"sequence {sequence} has {length} tokens, it needs at least 1")
    _check_digest(plan, digest)


def _check_digest(plan: Plan, digest: str | None) -> None:
    try:
        own = plan.digest()
    except TypeError as error:
        raise ScheduleError(f"the plan cannot be written as JSON: {error}") from error
    if digest is not None and digest != own:
        raise ScheduleError(
            f"the plan has digest {own[:12]}, expected was {digest[:12]}: it is another plan or "
            "was changed on its way"
        )


def _check_chunk(plan: Plan, chunk_id: int, chunk: Chunk) -> None:
    if not chunk.slices:
        raise ScheduleError(f"chunk {chunk_id} holds no slice")
    for position, piece in enumerate(chunk.slices):
        _check_slice(plan, f"chunk {chunk_id}, slice {position}", piece)
        if position > 0 and not piece.is_whole:
            kind = "a second cut slice" if not chunk.slices[0].is_whole else "a cut slice"
            raise ScheduleError(
                f"chunk {chunk_id} has {kind} at position {position} (sequence {piece.sequence}, "
                f"tokens {piece.start} to {piece.end}): a chunk carries at most one, as slices[0]"
            )
    sp = plan.layout.sp
    needed = -chunk.tokens % sp
    if chunk.padding != needed:
        raise ScheduleError(
            f"chunk {chunk_id} has {chunk.tokens} tokens and {chunk.padding} of padding; "
            f"to be a multiple of sp {sp} it needs exactly {needed}"
        )


def _check_slice(plan: Plan, place: str, piece: Slice) -> None:
    if not 0 <= piece.sequence < len(plan.lengths):
        raise ScheduleError(
            f"{place} belongs to sequence {piece.sequence}, but the batch has {len(plan.lengths)}"
        )
    length = plan.lengths[piece.sequence]
    what = f"{place} covers tokens {piece.start} to {piece.end} of sequence {piece.sequence}"
    if piece.length < 1 or piece.start < 0 or piece.end > length:
        raise ScheduleError(f"{what}, which has tokens 0 to {length}: out of range or empty")
    if piece.is_tail != (piece.end == length):
        raise ScheduleError(
            f"{what} of {length} tokens and is {'' if piece.is_tail else 'not '}marked as its tail"
        )
    unit = plan.setup.unit
    if piece.start % unit or (not piece.is_tail and piece.end % unit):
        raise ScheduleError(
            f"{what}: boundaries inside a sequence must be multiples of {unit}, the least common "
            f"multiple of sp {plan.layout.sp} and alignment {plan.setup.alignment}"
        )


def _check_coverage(plan: Plan) -> None:
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in plan.lengths]
    for chunk_id, chunk in enumerate(plan.chunks):
        for piece in chunk.slices:
            pieces[piece.sequence].append((piece.start, piece.end, chunk_id))
    for sequence, length in enumerate(plan.lengths):
        covered = 0
        for start, end, chunk_id in sorted(pieces[sequence]):
            if start > covered:
                raise ScheduleError(f"sequence {sequence}: tokens {covered} to {start} are missing")
            if start < covered:
                raise ScheduleError(
                    f"sequence {sequence}: tokens {start} to {min(end, covered)} of chunk "
                    f"{chunk_id} are planned twice"
                )
            covered = end
        if covered < length:
            raise ScheduleError(f"sequence {sequence}: tokens {covered} to {length} are missing")


def _check_membership(plan: Plan) -> None:
    owner: dict[int, int] = {}
    for number, pipeline in enumerate(plan.pipelines):
        if not pipeline.forward:
            raise ScheduleError(f"pipeline {number} is empty")
        for chunk in pipeline.forward:
            if not 0 <= chunk < len(plan.chunks):
                raise ScheduleError(
                    f"pipeline {number} names chunk {chunk}, but the plan has {len(plan.chunks)}"
                )
            if chunk in owner:
                raise ScheduleError(
                    f"chunk {chunk} is planned twice, in pipelines {owner[chunk]} and {number}"
                )
            owner[chunk] = number
    missing = sorted(set(range(len(plan.chunks))) - set(owner))
    if missing:
        raise ScheduleError(f"chunks {missing[:8]} ({len(missing)} in all) are in no pipeline")


def _chains(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Chunk ids of every cut sequence, its slices in order."""
    starts: dict[int, list[tuple[int, int]]] = {}
    for chunk_id, chunk in enumerate(plan.chunks):
        if chunk.keeps_kv:
            starts.setdefault(chunk.slices[0].sequence, []).append(
                (chunk.slices[0].start, chunk_id)
            )
    return tuple(tuple(chunk for _, chunk in sorted(starts[key])) for key in sorted(starts))


def _check_pipeline(
    plan: Plan, number: int, pipeline: PipelinePlan, chains: tuple[tuple[int, ...], ...]
) -> None:
    if sorted(pipeline.backward) != sorted(pipeline.forward):
        odd = sorted(set(pipeline.forward) ^ set(pipeline.backward))
        raise ScheduleError(
            f"pipeline {number}: forward order ({len(pipeline.forward)} chunks) and backward order "
            f"({len(pipeline.backward)}) must hold the same chunks, once each; differing: {odd[:8]}"
        )
    members = set(pipeline.forward)
    own_chains = [chain for chain in chains if members.intersection(chain)]
    for chain in own_chains:
        _check_chain(plan, number, pipeline, chain)
    longest = max((len(chain) for chain in own_chains), default=1)
    if pipeline.num_split != longest:
        raise ScheduleError(
            f"pipeline {number} states num_split {pipeline.num_split}, but its longest sequence "
            f"has {longest} slices"
        )
    _check_recompute_table(plan, number, pipeline)


def _check_chain(plan: Plan, number: int, pipeline: PipelinePlan, chain: tuple[int, ...]) -> None:
    """Slices of one sequence: in one pipeline, forward in order, backward in reverse."""
    sequence = plan.chunks[chain[0]].slices[0].sequence
    elsewhere = sorted(set(chain) - set(pipeline.forward))
    if elsewhere:
        raise ScheduleError(
            f"sequence {sequence} is spread over pipelines: its slices are chunks {chain}, of "
            f"which pipeline {number} lacks {elsewhere}"
        )
    forward_at = {chunk: position for position, chunk in enumerate(pipeline.forward)}
    backward_at = {chunk: position for position, chunk in enumerate(pipeline.backward)}
    for earlier, later in pairwise(chain):
        if forward_at[earlier] > forward_at[later]:
            raise ScheduleError(
                f"pipeline {number} runs F{later} before F{earlier}, but chunk {earlier} holds the "
                f"earlier slice of sequence {sequence}"
            )
        if backward_at[earlier] < backward_at[later]:
            raise ScheduleError(
                f"pipeline {number} runs B{earlier} before B{later}, but chunk {later} holds the "
                f"next slice of sequence {sequence}, whose gradients B{earlier} needs"
            )


def _check_recompute_table(plan: Plan, number: int, pipeline: PipelinePlan) -> None:
    layout = plan.layout
    widths = [len(row) for row in pipeline.recompute]
    if widths != [len(pipeline.forward)] * layout.pp:
        raise ScheduleError(
            f"pipeline {number}: the recompute table must have {layout.pp} rows (stages) of "
            f"{len(pipeline.forward)} entries (chunks), not rows of {widths}"
        )
    for stage, row in enumerate(pipeline.recompute):
        for chunk, count in zip(pipeline.forward, row, strict=True):
            if not 0 <= count <= layout.stage_layers[stage]:
                raise ScheduleError(
                    f"pipeline {number} recomputes {count} layers of chunk {chunk} on stage "
                    f"{stage}, which has {layout.stage_layers[stage]}"
                )
