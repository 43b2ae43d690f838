"""Plans with a wrong frame: version, layout, lengths, memory."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from handmade import with_setup
from mutations import mutation

from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.verify.frame import peak_bytes_by_stage


@mutation("the limit is")
def the_limit_is_one_byte_below_the_peak(plan: Plan, rng: random.Random) -> Plan | None:
    return with_setup(plan, limit_bytes=max(plan.predicted.peak_bytes) - 1)


@mutation("predicts a peak of")
def a_predicted_peak_is_one_byte_off(plan: Plan, rng: random.Random) -> Plan | None:
    peaks = list(plan.predicted.peak_bytes)
    peaks[rng.randrange(len(peaks))] += rng.choice([-1, 1])
    return replace(plan, predicted=replace(plan.predicted, peak_bytes=tuple(peaks)))


@mutation("predicts peak bytes of")
def a_predicted_peak_is_missing(plan: Plan, rng: random.Random) -> Plan | None:
    peaks = plan.predicted.peak_bytes[:-1]
    return replace(plan, predicted=replace(plan.predicted, peak_bytes=peaks))


@mutation("the limit is|predicts a peak of")
def the_plan_was_made_for_another_zero_stage(plan: Plan, rng: random.Random) -> Plan | None:
    return with_setup(plan, zero_stage=0)


@mutation("the limit is|predicts a peak of|none are gathered")
def parameters_are_kept_gathered_or_not(plan: Plan, rng: random.Random) -> Plan | None:
    other = with_setup(plan, keeps_gathered=not plan.setup.execution.keeps_gathered)
    needs_as_much = peak_bytes_by_stage(other) == plan.predicted.peak_bytes
    return None if needs_as_much and plan.setup.gathers_parameters else other


@mutation("has version")
def the_version_is_foreign(plan: Plan, rng: random.Random) -> Plan | None:
    return replace(plan, version=plan.version + 1)


@mutation("do not give each")
def a_stage_has_no_layer(plan: Plan, rng: random.Random) -> Plan | None:
    layers = (0, *plan.layout.stage_layers[1:])
    return with_setup(plan, layout=replace(plan.layout, stage_layers=layers))


@mutation("layers in all")
def the_stages_hold_another_number_of_layers(plan: Plan, rng: random.Random) -> Plan | None:
    first, *others = plan.layout.stage_layers
    return with_setup(plan, layout=replace(plan.layout, stage_layers=(first + 1, *others)))


@mutation("must both be at least 1")
def there_is_no_replica(plan: Plan, rng: random.Random) -> Plan | None:
    return with_setup(plan, layout=replace(plan.layout, dp=0))


@mutation("it needs at least 1")
def a_sequence_is_empty(plan: Plan, rng: random.Random) -> Plan | None:
    return replace(plan, lengths=(*plan.lengths, 0))


@mutation("marked as its tail|out of range")
def a_sequence_has_another_length(plan: Plan, rng: random.Random) -> Plan | None:
    lengths = list(plan.lengths)
    lengths[rng.randrange(len(lengths))] += 1
    return replace(plan, lengths=tuple(lengths))


@mutation("cannot be written as JSON")
def a_number_is_not_plain(plan: Plan, rng: random.Random) -> Plan | None:
    lengths = (np.int64(plan.lengths[0]), *plan.lengths[1:])
    return replace(plan, lengths=lengths)
