"""Plans that state other seconds than their streams take."""

from __future__ import annotations

import random
from dataclasses import replace

from handmade import with_setup
from mutations import mutation

from ds_infinipipe.planner.plan.plan import Plan


def stating(plan: Plan, **figures: float) -> Plan:
    return replace(plan, predicted=replace(plan.predicted, **figures))


@mutation("states a step time of .* but its streams take")
def the_step_time_is_a_millionth_off(plan: Plan, rng: random.Random) -> Plan | None:
    factor = 1.0 + rng.choice([-1e-6, 1e-6])
    return stating(plan, step_time_s=plan.predicted.step_time_s * factor)


@mutation("states a step time of -.* but its streams take")
def the_step_time_is_negative(plan: Plan, rng: random.Random) -> Plan | None:
    return stating(plan, step_time_s=-plan.predicted.step_time_s)


@mutation("states a step time of 0 s, but its streams take")
def the_step_takes_no_time(plan: Plan, rng: random.Random) -> Plan | None:
    return stating(plan, step_time_s=0.0)


@mutation("states a step time of .*, which is no finite number")
def the_step_time_is_not_finite(plan: Plan, rng: random.Random) -> Plan | None:
    return stating(plan, step_time_s=rng.choice([float("nan"), float("inf"), -float("inf")]))


@mutation("states a bubble ratio of .* but its streams have")
def the_bubbles_are_a_millionth_off(plan: Plan, rng: random.Random) -> Plan | None:
    off = rng.choice([-1e-6, 1e-6])
    return stating(plan, bubble_ratio=plan.predicted.bubble_ratio + off)


@mutation("states a bubble ratio of .*, which is no finite number")
def the_bubbles_are_not_finite(plan: Plan, rng: random.Random) -> Plan | None:
    return stating(plan, bubble_ratio=rng.choice([float("nan"), float("inf")]))


@mutation("states a step time of .* but its streams take")
def the_plan_was_made_for_a_faster_cluster(plan: Plan, rng: random.Random) -> Plan | None:
    slower = replace(plan.cluster, peak_flops=plan.cluster.peak_flops / 2)
    return with_setup(plan, cluster=slower)


@mutation("states a step time of .* but its streams take")
def the_plan_was_made_without_a_window(plan: Plan, rng: random.Random) -> Plan | None:
    if max(plan.lengths) < 3:
        return None
    layers = plan.model.num_layers
    windowed = replace(plan.model, sliding_window=1, window_layers=layers)
    return with_setup(plan, model=windowed)
