"""Plans whose chunks do not cover the batch as they should."""

from __future__ import annotations

import random
from dataclasses import replace

from mutations import cut_chunks, mutation, repacked, slice_pairs, with_chunk

from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.plan import Plan


@mutation("tokens .* are missing")
def a_whole_sequence_is_left_out(plan: Plan, rng: random.Random) -> Plan | None:
    hosts = [(c, i) for c, chunk in enumerate(plan.chunks) for i in range(1, len(chunk.slices))]
    if not hosts:
        return None
    chunk_id, position = rng.choice(hosts)
    slices = plan.chunks[chunk_id].slices
    return repacked(plan, chunk_id, slices[:position] + slices[position + 1 :])


@mutation("planned twice")
def a_whole_sequence_is_planned_twice(plan: Plan, rng: random.Random) -> Plan | None:
    wholes = [s for chunk in plan.chunks for s in chunk.slices if s.is_whole]
    if not wholes:
        return None
    chunk_id = rng.randrange(len(plan.chunks))
    return repacked(plan, chunk_id, (*plan.chunks[chunk_id].slices, rng.choice(wholes)))


@mutation("tokens .* are missing")
def an_aligned_piece_in_the_middle_is_missing(plan: Plan, rng: random.Random) -> Plan | None:
    if not cut_chunks(plan):
        return None
    unit = plan.setup.unit
    for chunk_id in rng.sample(cut_chunks(plan), len(cut_chunks(plan))):
        head, *others = plan.chunks[chunk_id].slices
        if head.length > unit:
            shorter = replace(head, start=head.start + unit, length=head.length - unit)
            return repacked(plan, chunk_id, (shorter, *others))
    return None


@mutation("planned twice")
def two_slices_overlap(plan: Plan, rng: random.Random) -> Plan | None:
    if not slice_pairs(plan):
        return None
    unit = plan.setup.unit
    _, later = rng.choice(slice_pairs(plan))
    head, *others = plan.chunks[later].slices
    longer = replace(head, start=head.start - unit, length=head.length + unit)
    return repacked(plan, later, (longer, *others))


@mutation("out of range or empty")
def a_slice_ends_behind_its_sequence(plan: Plan, rng: random.Random) -> Plan | None:
    chunk_id = rng.randrange(len(plan.chunks))
    *others, end = plan.chunks[chunk_id].slices
    length = plan.lengths[end.sequence] - end.start + 1
    return repacked(plan, chunk_id, (*others, replace(end, length=length)))


@mutation("out of range or empty")
def a_slice_is_empty(plan: Plan, rng: random.Random) -> Plan | None:
    chunk_id = rng.randrange(len(plan.chunks))
    slices = (*plan.chunks[chunk_id].slices, Slice(0, 0, 0, False))
    return repacked(plan, chunk_id, slices)


@mutation("belongs to sequence")
def a_slice_of_no_sequence(plan: Plan, rng: random.Random) -> Plan | None:
    chunk_id = rng.randrange(len(plan.chunks))
    slices = (*plan.chunks[chunk_id].slices, Slice(len(plan.lengths), 0, 1, True))
    return repacked(plan, chunk_id, slices)


@mutation("marked as its tail")
def a_tail_flag_is_wrong(plan: Plan, rng: random.Random) -> Plan | None:
    chunk_id = rng.randrange(len(plan.chunks))
    head, *others = plan.chunks[chunk_id].slices
    return repacked(plan, chunk_id, (replace(head, is_tail=not head.is_tail), *others))


@mutation("multiples of")
def a_boundary_is_not_aligned(plan: Plan, rng: random.Random) -> Plan | None:
    pairs = [p for p in slice_pairs(plan) if plan.chunks[p[0]].slices[0].length > 1]
    if not pairs or plan.setup.unit == 1:
        return None
    earlier, later = rng.choice(pairs)
    first, *beside_first = plan.chunks[earlier].slices
    second, *beside_second = plan.chunks[later].slices
    shorter = replace(first, length=first.length - 1)
    longer = replace(second, start=second.start - 1, length=second.length + 1)
    plan = repacked(plan, earlier, (shorter, *beside_first))
    return repacked(plan, later, (longer, *beside_second))


@mutation("a cut slice at position 1")
def a_cut_slice_does_not_stand_first(plan: Plan, rng: random.Random) -> Plan | None:
    hybrids = [c for c in cut_chunks(plan) if len(plan.chunks[c].slices) > 1]
    if not hybrids:
        return None
    chunk_id = rng.choice(hybrids)
    head, second, *others = plan.chunks[chunk_id].slices
    return repacked(plan, chunk_id, (second, head, *others))


@mutation("a second cut slice")
def two_cut_slices_in_a_chunk(plan: Plan, rng: random.Random) -> Plan | None:
    cut = cut_chunks(plan)
    if len(cut) < 2:
        return None
    host, guest = rng.sample(cut, 2)
    merged = (*plan.chunks[host].slices, plan.chunks[guest].slices[0])
    return repacked(plan, host, merged)


@mutation("holds no slice")
def a_chunk_is_empty(plan: Plan, rng: random.Random) -> Plan | None:
    return with_chunk(plan, rng.randrange(len(plan.chunks)), Chunk(()))


@mutation("needs exactly")
def padding_is_one_token_off(plan: Plan, rng: random.Random) -> Plan | None:
    chunk_id = rng.randrange(len(plan.chunks))
    chunk = plan.chunks[chunk_id]
    return with_chunk(plan, chunk_id, replace(chunk, padding=chunk.padding + 1))


@mutation("needs exactly")
def padding_is_more_than_needed(plan: Plan, rng: random.Random) -> Plan | None:
    chunk_id = rng.randrange(len(plan.chunks))
    chunk = plan.chunks[chunk_id]
    return with_chunk(plan, chunk_id, replace(chunk, padding=chunk.padding + plan.layout.sp))


@mutation("needs exactly")
def padding_is_negative(plan: Plan, rng: random.Random) -> Plan | None:
    chunk_id = rng.randrange(len(plan.chunks))
    chunk = plan.chunks[chunk_id]
    return with_chunk(plan, chunk_id, replace(chunk, padding=chunk.padding - plan.layout.sp))
