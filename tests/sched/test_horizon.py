"""The policy horizon: the optimum of a step that is alone, and the best of the long run where steps overlap."""

from __future__ import annotations

import itertools
import os
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from digen.sched.bubbles import StepModel
from digen.sched.horizon import MAX_TASKS, Plan, Planner, best_of_step, explore, horizon, moved
from digen.sched.lookahead import searching
from digen.sched.model import Instance, simulate
from digen.sched.search import search, tag_first
from digen.sched.steady import rate_bound, steady_rate
from digen.sched.tag import Bubble, Decision, Durations, Policy, StaleStart
from experiments.policies import best_trainer_schedule
from experiments.search_time import seeded
from tests.sched.test_steady import instance as worst_case

NUM_STEPS = int(os.environ.get("DIGEN_HORIZON_STEPS", "700"))
"""Random single steps."""
NUM_RUNS = int(os.environ.get("DIGEN_HORIZON_RUNS", "60"))
"""Random instances of the long run, each under hold and under pull."""
UNLIMITED = 10**9


def one_step(rng: random.Random, *, groups: tuple[int, int] = (1, 1), most: int = 8, wild: bool = False) -> Instance:
    """A single step; groups of a pool are alike."""
    generators, trainers = groups

    def times(count: int, low: int, high: int) -> tuple[int, ...]:
        return (rng.randint(low, high),) * count

    return Instance(
        num_micro_batches=rng.randint(1 if wild else 2, most),
        generate_s=times(generators, 1, 100) if wild else (100,) * generators,
        score_s=times(generators, 0, 20),
        update_s=times(trainers, 0, rng.choice([15, 60, 120])) if wild else times(trainers, 10, 120),
        assist_s=times(trainers, 0, rng.choice([50, 200])) if wild else times(trainers, 50, 200),
        switch_in_s=times(trainers, 0, 20),
        switch_out_s=times(trainers, 0, 20),
        order=rng.choice(["index", "ready"]),
    )


def long_run(rng: random.Random, **changes: Any) -> Instance:
    """Stale work of half a step: u/g from 0.15 to 1, h/g from 1 to 1.2, switches to 0.1 g, commit and load to 1.2 g."""
    size = rng.randint(4, 16)
    fields: dict[str, Any] = {
        "num_micro_batches": size,
        "generate_s": (1000,),
        "score_s": (rng.randint(0, 40),),
        "update_s": (rng.randint(150, 1000),),
        "assist_s": (rng.randint(1000, 1200),),
        "switch_in_s": (rng.randint(0, 50),),
        "switch_out_s": (rng.randint(0, 50),),
        "commit_s": rng.randint(0, 1200),
        "load_s": rng.randint(0, 1200),
        "window": 2,
        "stale_limit": size // 2,
    }
    return Instance(**fields | changes)


# ---- a step that is alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wild", [False, True])
def test_one_generator_and_one_trainer_reach_the_best_trainer_schedule(wild: bool) -> None:
    rng = seeded(f"alone {wild}")
    for number in range(NUM_STEPS):
        drawn = one_step(rng, wild=wild)
        value = simulate(drawn, horizon(max_nodes=5000)).last_update()
        assert value == best_trainer_schedule(drawn), f"run {number}: {drawn}"


@pytest.mark.parametrize("groups", [(2, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_several_groups_come_within_half_a_percent_of_it(groups: tuple[int, int]) -> None:
    rng = seeded(f"groups {groups}")
    ratios = []
    for number in range(40):
        drawn = one_step(rng, groups=groups, most=5, wild=number % 2 == 0)
        best = best_trainer_schedule(drawn)
        if best:
            ratios.append(simulate(drawn, horizon()).last_update() / best)
    assert min(ratios) >= 1
    assert statistics.mean(ratios) <= 1.005


def test_assists_while_micro_batches_are_ready_where_that_is_best() -> None:
    """P1: the paper's search lets the generator do the end of the step alone."""
    drawn = worst_case(score_s=(20,), update_s=(10,), assist_s=(50,), switch_out_s=(20,))
    assert simulate(drawn, searching()).last_update() == 290
    assert simulate(drawn, horizon()).last_update() == 250


def test_may_choose_no_assist() -> None:
    """P4: a first bubble that is filled whatever it costs."""
    drawn = worst_case(num_micro_batches=2, update_s=(40,), assist_s=(200,), switch_in_s=(20,), switch_out_s=(20,))
    trace = simulate(drawn, horizon())
    assert trace.last_update() == 250
    assert not [task for task in trace.tasks if task.kind == "assist"]


def test_reopens_a_bubble_where_waiting_is_best() -> None:
    """Results in index order: assists that come at once are scored before micro-batch 0, and updates wait for it."""
    drawn = worst_case(
        generate_s=(90,), score_s=(18,), update_s=(14,), assist_s=(0,), switch_in_s=(16,), switch_out_s=(4,)
    )
    assert min(search(drawn).value, tag_first(drawn)[0]) == 218
    assert simulate(drawn, horizon()).last_update() == best_trainer_schedule(drawn) == 186


def test_what_it_predicts_of_a_step_comes_true() -> None:
    rng = seeded("predicted")
    for number in range(200):
        drawn = one_step(rng, wild=number % 2 == 0)
        policy, predicted = horizon(), list[float]()

        def decide(bubble: Bubble, inner: Policy = policy, predicted: list[float] = predicted) -> Decision:
            decision = inner.decide(bubble)
            if decision.predicted_s is not None:
                predicted.append(decision.predicted_s)
            return decision

        trace = simulate(drawn, policy._replace(decide=decide))
        if predicted:
            assert predicted[0] == trace.last_update(), f"run {number}: {drawn}"


def test_a_search_that_runs_out_of_moves_still_gives_a_plan_that_holds() -> None:
    rng = seeded("anytime")
    for _ in range(100):
        drawn = one_step(rng, wild=True)
        state = StepModel(drawn).start()
        limited, full = best_of_step(drawn, state, max_nodes=1), best_of_step(drawn, state, max_nodes=5000)
        assert full.value <= limited.value <= tag_first(drawn)[0]
        assert simulate(drawn, horizon(max_nodes=1)).last_update() <= limited.value


# ---- the long run ----------------------------------------------------------------------------------------------


def test_over_steps_it_never_loses_and_comes_close_to_the_bound() -> None:
    rng = seeded("long run")
    times: dict[str, list[float]] = {"hold": [], "pull": []}
    gains: dict[str, list[float]] = {"hold": [], "pull": []}
    for number in range(NUM_RUNS):
        drawn = long_run(rng)
        for sync, ratios in times.items():
            run = replace(drawn, sync=sync)  # type: ignore[arg-type]
            rate = steady_rate(run, horizon(UNLIMITED), period=6).step_s
            on_policy = steady_rate(replace(run, window=1, stale_limit=0), searching()).step_s
            assert rate <= 1.01 * on_policy, f"run {number}: {run}"
            ratios.append(rate / rate_bound(run))
            gains[sync].append(on_policy / rate)
    assert statistics.mean(times["hold"]) <= 1.04
    assert statistics.mean(times["pull"]) <= 1.045
    assert statistics.mean(gains["hold"]) >= 1.07
    assert statistics.mean(gains["pull"]) >= 1.10


def test_stays_on_policy_where_stale_starts_would_delay_the_load() -> None:
    drawn = worst_case(window=2, stale_limit=1)
    assert steady_rate(drawn, horizon(UNLIMITED), period=6) == (275, True)
    assert steady_rate(replace(drawn, sync="pull"), horizon(UNLIMITED), period=6).step_s <= 265


def test_the_last_step_is_alone() -> None:
    """Nothing is left to be stale for, so that the last step is the best single step."""
    drawn = long_run(seeded("last"), num_steps=5, sync="pull")
    ends = simulate(drawn, horizon(UNLIMITED)).step_ends
    patterns = simulate(replace(drawn, num_steps=40), horizon(UNLIMITED)).step_ends
    assert ends[4] - ends[3] <= patterns[4] - patterns[3]


def test_a_plan_is_found_a_little_at_a_time() -> None:
    drawn = long_run(seeded("little"), num_micro_batches=16, stale_limit=8)
    planner, plans = Planner(MAX_TASKS), list[Plan]()
    while not plans or plans[-1] != list(explore(drawn))[-1][0]:
        plans.append(planner.plan(drawn))
        assert len(plans) < 200
    assert len(plans) > 2
    assert all(later.step_s <= plan.step_s for plan, later in itertools.pairwise(plans))


def test_plans_anew_only_when_durations_have_moved() -> None:
    drawn = worst_case()
    assert not moved(drawn, replace(drawn, update_s=(17,), load_s=12))
    assert moved(drawn, replace(drawn, update_s=(19,)))
    assert moved(drawn, replace(drawn, generate_s=(100, 100), score_s=(5, 5)))
    assert moved(drawn, replace(drawn, sync="pull"))


def test_until_durations_are_known_it_measures_and_lets_stale_work_start() -> None:
    bubble = Bubble(0, 4, 3, 1, 0, 0, 0, 0, 1, Durations())
    policy = horizon()
    assert policy.decide(bubble).assist
    assert policy.gate is not None
    assert policy.gate(StaleStart(1, None, lambda: None))
