"""Algorithm 2 against brute force on the model, its bound, its limits, and the examples that a schedule must know."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from digen.errors import ConfigError
from digen.sched.bubbles import StepModel, StepState
from digen.sched.model import Instance, scripted, simulate
from digen.sched.search import Bound, Strategy, search, tag_first
from digen.sched.tag import Policy, greedy, never, static
from experiments.search_time import draw, plausible, seeded, verify

SEARCH_RUNS = 1500


def make(**given: Any) -> Instance:
    """One group of each kind, from single numbers."""
    names = ("generate_s", "score_s", "update_s", "assist_s", "switch_in_s", "switch_out_s")
    fields: dict[str, Any] = {"order": "ready", **dict.fromkeys(names, 0), **given}
    return Instance(**fields | {name: (fields[name],) for name in names})


def states_below(model: StepModel, state: StepState | None) -> set[StepState]:
    """Every bubble that can be reached from one."""
    seen: set[StepState] = set()
    stack = [state]
    while stack:
        state = stack.pop()
        if state is not None and state not in seen:
            seen.add(state)
            stack += [model.advance(child)[1] for child in (model.assist(state), model.skip(state))]
    return seen


def test_the_search_equals_brute_force_over_all_decisions() -> None:
    assert verify(SEARCH_RUNS) > 3 * SEARCH_RUNS  # leaves


def test_bound_and_memory_change_the_time_only() -> None:
    rng = seeded("variants")
    for _ in range(300):
        instance = draw(rng)
        plain = search(instance, bounded=False, remember=False)
        for bounded, remember in ((True, False), (False, True), (True, True)):
            variant = search(instance, bounded=bounded, remember=remember)
            assert (variant.value, variant.exact) == (plain.value, True), instance
            assert variant.num_nodes <= plain.num_nodes


def test_a_value_above_its_budget_is_not_remembered_as_exact() -> None:
    """Found among 14,000 random steps: a state is met again here with a larger budget than the first time."""
    instance = Instance(
        num_micro_batches=12,
        generate_s=(1,),
        score_s=(0,),
        update_s=(0, 2),
        assist_s=(5, 0),
        switch_in_s=(0, 1),
        switch_out_s=(1, 0),
        order="ready",
    )
    assert search(instance).value == search(instance, bounded=False).value == 6


def test_bound_and_memory_agree_on_long_steps_of_many_bubbles() -> None:
    rng = seeded("long")
    for _ in range(150):
        instance = plausible(rng, rng.randint(12, 28), rng.choice([0.1, 0.15, 0.2, 0.3]))
        instance = replace(instance, assist_s=(rng.randint(20_000, 200_000),))
        assert search(instance).value == search(instance, bounded=False).value, instance


def test_the_bound_is_never_above_the_optimum() -> None:
    rng = seeded("bound")
    met = total = 0
    for _ in range(250):
        instance = draw(rng)
        model, bound = StepModel(instance), Bound(StepModel(instance))
        _, root = model.advance(model.start())
        assert bound(model.start()) <= search(instance).value
        for state in states_below(model, root):
            children = [model.assist(state), model.skip(state)]
            for here in (state, *children):
                best = min(search(instance, child).value for child in (children if here is state else [here]))
                assert bound(here) <= best, f"{here} of {instance}"
                met += bound(here) == best
                total += 1
    assert met > total / 5, f"the bound is met in only {met} of {total} states"


def test_no_simple_policy_is_better_and_tag_first_never_worse_with_one_pair() -> None:
    rng = seeded("policies")
    for _ in range(300):
        instance = draw(rng)
        value = search(instance).value
        prefixes = [scripted([True] * k) for k in range(instance.num_micro_batches)]
        assert value <= min(simulate(instance, policy).last_update() for policy in [never(), greedy(), *prefixes])
        if instance.num_generators == instance.num_trainers == 1 and not instance.lazy_switch and instance.window == 1:
            assert tag_first(instance)[0] <= value, instance


def test_tag_first_finds_the_best_of_all_n() -> None:
    rng = seeded("tag first")
    for _ in range(600):
        instance = draw(rng, largest_step=14)
        times = [simulate(instance, static(n)).last_update() for n in range(instance.num_micro_batches + 1)]
        assert tag_first(instance) == (min(times), times.index(min(times))), instance


def test_tag_first_has_no_choice_once_updates_have_begun() -> None:
    instance = make(num_micro_batches=4, generate_s=100, update_s=10, assist_s=150)
    model = StepModel(instance)
    _, state = model.advance(model.start())
    assert state is not None
    _, state = model.advance(model.skip(state))
    assert state is not None
    assert state.updates < 4
    assert tag_first(instance, state) == (model.advance(state, ask=False)[0], 0)


def test_scaled_durations_scale_the_value_and_keep_the_decisions() -> None:
    rng = seeded("scale")
    names = ("generate_s", "score_s", "update_s", "assist_s", "switch_in_s", "switch_out_s")
    for _ in range(200):
        instance = draw(rng)
        for factor in (7, Fraction(1, 3)):
            changes: dict[str, Any] = {n: tuple(factor * time for time in getattr(instance, n)) for n in names}
            scaled, plain = search(replace(instance, **changes)), search(instance)
            assert scaled == plain._replace(value=factor * plain.value)


def test_a_search_may_begin_in_the_middle_of_a_step() -> None:
    """The rest of an optimal plan is an optimal plan of the rest (Bellman)."""
    rng = seeded("middle")
    for _ in range(200):
        instance = draw(rng)
        model, plan = StepModel(instance), search(instance)
        elapsed, state = model.advance(model.start())
        for decision in plan.decisions:
            assert state is not None
            assert search(instance, state).value == plan.value - elapsed
            passed, state = model.advance(model.assist(state) if decision else model.skip(state))
            elapsed += passed
        assert state is None


@pytest.mark.parametrize("order", ["index", "ready"])
def test_a_step_of_1024_micro_batches_is_not_too_deep(order: Any) -> None:
    instance = make(
        num_micro_batches=1024, generate_s=1000, score_s=37, update_s=100, assist_s=1103, switch_in_s=53, order=order
    )
    plan = search(instance, max_nodes=5000)
    assert len(plan.decisions) > 400
    assert simulate(instance, scripted(plan.decisions)).last_update() == plan.value


def test_a_search_that_must_stop_returns_a_valid_plan() -> None:
    rng = seeded("anytime")
    for _ in range(200):
        instance = draw(rng, largest_step=20)
        optimum = search(instance)
        for max_nodes in range(1, 12):
            plan = search(instance, max_nodes=max_nodes)
            assert plan.num_nodes <= max_nodes
            assert simulate(instance, scripted(plan.decisions)).last_update() == plan.value >= optimum.value
            assert plan.exact or optimum.num_nodes > max_nodes
            if plan.exact:
                assert plan == optimum


def test_a_search_of_no_moves_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_nodes must be at least 1, got 0"):
        search(make(num_micro_batches=2, generate_s=1, update_s=1, assist_s=1), max_nodes=0)


@pytest.mark.parametrize("change", [{"barrier": True}, {"generate_s": ()}])
def test_a_step_without_bubbles_is_refused(change: dict[str, Any]) -> None:
    instance = make(num_micro_batches=2, generate_s=1, update_s=1, assist_s=1)
    with pytest.raises(ConfigError, match="no bubbles to search"):
        search(replace(instance, **change))


# ---- examples --------------------------------------------------------------------------------------------------


def test_an_assist_is_worth_its_switch_or_not() -> None:
    cheap = make(num_micro_batches=2, generate_s=100, update_s=10, assist_s=100)
    dear = replace(cheap, switch_in_s=(60,), switch_out_s=(60,))
    assert search(cheap) == Strategy(120, (True,), exact=True, num_nodes=1)
    assert search(dear)[:2] == (210, (False,))


def test_bubbles_only_starve_the_end_of_a_step() -> None:
    """No assist while UQ is not empty: the best n of assists first is better than any decisions at bubbles."""
    instance = make(num_micro_batches=4, generate_s=100, score_s=20, update_s=10, assist_s=50, switch_out_s=20)
    assert search(instance).value == 290
    assert tag_first(instance) == (250, 3)


def test_a_slow_generator_takes_the_last_micro_batch() -> None:
    instance = make(num_micro_batches=10, generate_s=32, score_s=1, update_s=1, assist_s=6)
    assert search(instance).value == tag_first(instance)[0] == 75
    assert Bound(StepModel(instance))(StepModel(instance).start()) == 64


def test_the_score_of_an_assist_waits_behind_a_generation() -> None:
    instance = make(num_micro_batches=2, generate_s=100, update_s=100, assist_s=50)
    assert search(instance).value == tag_first(instance)[0] == 300


def test_a_first_assist_by_default_can_be_a_loss() -> None:
    instance = make(
        num_micro_batches=2, generate_s=100, score_s=5, update_s=40, assist_s=200, switch_in_s=20, switch_out_s=20
    )
    assert search(instance).value == 250
    assert simulate(instance, greedy()).last_update() == 320


@pytest.mark.parametrize(
    ("sync", "window", "policy", "rate"),
    [("hold", 1, static(2), 275), ("hold", 2, greedy(), 330), ("pull", 2, static(2), 265)],
)
def test_stale_work_with_hold_can_be_slower_than_none(sync: Any, window: int, policy: Policy, rate: int) -> None:
    """Time per step in the steady state, without the first and the last steps."""
    instance = make(
        num_micro_batches=4,
        num_steps=60,
        generate_s=100,
        score_s=5,
        update_s=15,
        assist_s=100,
        commit_s=5,
        load_s=10,
        window=window,
        stale_limit=window - 1,
        sync=sync,
    )
    ends = simulate(instance, policy).step_ends
    assert ends[50] - ends[10] == 40 * rate
