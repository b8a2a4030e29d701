"""The long run: exact rates, and the bound that they never pass."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from digen.errors import ConfigError
from digen.sched.lookahead import searching
from digen.sched.model import Instance, simulate
from digen.sched.steady import Load, Pattern, rate_bound, steady_rate
from digen.sched.tag import StaleStart, never, static
from experiments.search_time import seeded


def instance(**changes: Any) -> Instance:
    """B = 4 g = h = 100 r = 5 u = 15 y = 5 + 10: the worst case of stale starts under hold that was found by search."""
    fields: dict[str, Any] = {
        "num_micro_batches": 4,
        "generate_s": (100,),
        "score_s": (5,),
        "update_s": (15,),
        "assist_s": (100,),
        "switch_in_s": (0,),
        "switch_out_s": (0,),
        "commit_s": 5,
        "load_s": 10,
        "sync": "hold",
    }
    return Instance(**fields | changes)


def draw(rng: random.Random, **changes: Any) -> Instance:
    """An instance with stale work; small numbers make ties."""
    g, size = rng.choice([4, 100]), rng.randint(2, 8)
    fields: dict[str, Any] = {
        "num_micro_batches": size,
        "generate_s": (g,),
        "score_s": (rng.randint(0, g // 4),),
        "update_s": (rng.randint(1, g),),
        "assist_s": (rng.randint(g // 2, 2 * g),),
        "switch_in_s": (rng.randint(0, g // 4),),
        "switch_out_s": (rng.randint(0, g // 4),),
        "commit_s": rng.randint(0, g),
        "load_s": rng.randint(0, g),
        "window": 2,
        "stale_limit": rng.randint(1, size),
        "sync": rng.choice(["hold", "pull"]),
        "order": rng.choice(["index", "ready"]),
    }
    return Instance(**fields | changes)


def test_on_policy_steps_are_alike_and_the_rate_is_one_of_them() -> None:
    rate = steady_rate(instance(), never())
    assert rate.exact
    assert rate.step_s == 4 * 105 + 15 + 5 + 10


def test_the_worst_case_of_stale_starts_under_hold() -> None:
    """On-policy search takes 275 a step; stale starts delay the load until 330; without hold they help: 265."""
    stale = instance(window=2, stale_limit=1)
    assert steady_rate(instance(), searching()).step_s == 275
    assert steady_rate(stale, searching()).step_s == 330
    pull = replace(stale, sync="pull")
    assert min(steady_rate(pull, static(k)).step_s for k in range(5)) == 265


def test_a_rate_equals_the_mean_of_a_thousand_steps() -> None:
    rng = seeded("long windows")
    num_exact = 0
    for number in range(16):
        drawn, k = draw(rng), rng.randint(0, 3)
        rate = steady_rate(drawn, static(k))
        ends = simulate(replace(drawn, num_steps=620), static(k)).step_ends
        mean = (ends[600] - ends[100]) / 500
        longest = max(*drawn.generate_s, *drawn.assist_s)
        assert abs(rate.step_s - mean) <= 2 * longest / 500, f"run {number}: {drawn}"
        num_exact += rate.exact
    assert num_exact > 10


def test_a_pattern_that_takes_turns_is_followed_over_its_whole_period() -> None:
    """Steps of one and of no assist: a cycle of one step would give the rate of one kind."""
    drawn = instance(sync="pull")
    one, none = (steady_rate(drawn, Pattern((k,), None).policy()).step_s for k in (1, 0))
    both = steady_rate(drawn, Pattern((1, 0), None).policy(), period=2)
    assert both == ((one + none) / 2, True)
    assert one != none


def test_a_finite_run_is_no_rate() -> None:
    """It starts without a stock of stale work and ends without one."""
    drawn = instance(window=2, stale_limit=4, sync="pull", commit_s=400)
    rate = steady_rate(drawn, never())
    ends = simulate(replace(drawn, num_steps=4), never()).step_ends
    assert rate.exact
    assert ends[-1] / 4 > 1.02 * rate.step_s


def test_no_rate_under_hold_is_below_the_bound() -> None:
    rng = seeded("bound")
    attained = 0
    for number in range(150):
        drawn, k = draw(rng, sync="hold"), rng.randint(0, 4)
        rate = steady_rate(drawn, static(k))
        if rate.exact:
            bound = rate_bound(drawn)
            assert rate.step_s >= bound * (1 - 1e-12), f"run {number}: k = {k} of {drawn}"
            attained += rate.step_s < 1.01 * bound
    assert attained > 5


def test_the_bound_by_hand() -> None:
    # Generator: 4 * 105 + 10 - 100 n; trainer: 4 * 15 + 5 + 10 + 100 n; equal at n = 1.775.
    assert Load.of(instance()) == (430, 100, 75, 100)
    assert rate_bound(instance()) == pytest.approx(430 - 177.5)
    # Under pull the trainer does not wait for the load.
    assert rate_bound(instance(sync="pull")) == pytest.approx(430 - (430 - 65) / 2)
    # The trainer is the slower side: no assist.
    assert rate_bound(instance(update_s=(200,))) == 4 * 200 + 5 + 10
    # An assist takes the switches with it, unless the trainer stays switched.
    assert Load.of(instance(switch_in_s=(7,), switch_out_s=(3,))).added_s == 110
    assert Load.of(instance(switch_in_s=(7,), switch_out_s=(3,), lazy_switch=True)).added_s == 100
    # Two generators of speed 1/100 and 1/50, two trainers.
    pools = instance(
        generate_s=(100, 50), score_s=(5, 5), update_s=(15, 15), assist_s=(100, 80), switch_in_s=(0, 0),
        switch_out_s=(0, 0),
    )  # fmt: skip
    assert Load.of(pools) == pytest.approx((4 * (100 / 3 + 2.5) + 10, 100 / 3, 4 * 7.5 + 15, 40))


def test_gates_open_as_long_as_the_commit_is_far() -> None:
    def start(until: float | None) -> StaleStart:
        return StaleStart(1, until, lambda: instance(generate_s=(80, 120), score_s=(5, 5)))

    assert not Pattern((0,), None).opens(start(1000))
    assert Pattern((0,), 0.0).opens(start(0))
    half = Pattern((0,), 0.5)
    assert (half.opens(start(50)), half.opens(start(49)), half.opens(start(None))) == (True, False, False)


def test_a_rate_needs_two_steps() -> None:
    with pytest.raises(ConfigError, match="max_steps must be at least 2"):
        steady_rate(instance(), never(), max_steps=1)
