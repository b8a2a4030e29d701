"""TAG policies are pure functions: what they answer to which bubble."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from digen.sched.tag import Bubble, Durations, greedy, never, policy_from, static, threshold

KNOWN = Durations(generate_s=10, score_s=0, update_s=4, assist_s=10, switch_s=2)
BUBBLE = Bubble(
    step=3,
    num_micro_batches=8,
    num_pending=4,
    num_generating=1,
    num_unscored=0,
    num_ready=0,
    num_updated=2,
    num_assists=1,
    num_generators=1,
    durations=KNOWN,
)


def bubble(**fields: Any) -> Bubble:
    durations = {name: fields.pop(name) for name in KNOWN.__struct_fields__ if name in fields}
    return msgspec.structs.replace(BUBBLE, durations=msgspec.structs.replace(KNOWN, **durations), **fields)


def test_never_and_greedy() -> None:
    for pending in range(1, 9):
        assert not never().decide(bubble(num_pending=pending)).assist
        assert greedy().decide(bubble(num_pending=pending)).assist


@pytest.mark.parametrize(
    ("k", "num_assists", "num_updated", "assist", "reason"),
    [
        (0, 0, 0, False, "0 assists done"),
        (2, 0, 0, True, "assist 1 of 2"),
        (2, 1, 0, True, "assist 2 of 2"),
        (2, 2, 0, False, "2 assists done"),
        (2, 1, 1, False, "updates have begun"),
    ],
)
def test_static_assists_k_times_before_the_first_update(
    k: int, num_assists: int, num_updated: int, assist: bool, reason: str
) -> None:
    policy = static(k)
    assert (policy.name, policy.assists_before_update) == (f"static({k})", k)
    decision = policy.decide(bubble(num_assists=num_assists, num_updated=num_updated))
    assert (decision.assist, decision.reason) == (assist, reason)


@pytest.mark.parametrize(
    ("fields", "saving_s", "assist"),
    [
        # Alone: 5 rounds of 10 s and an update, 54; with an assist 4 rounds, 44, against 10 + 6 * 4 = 34 of training.
        ({}, 10, True),
        ({"switch_s": 10}, 10, False),  # a saving must exceed the switch
        ({"switch_s": 9.9}, 10, True),
        ({"switch_s": None}, 10, True),  # no switch method
        # Training is the longer side: 6 updates of 9 s, and the assist delays them by 10 s.
        ({"update_s": 9, "num_pending": 1}, -10, False),
        # The last pending one, and two generators: it takes its turn at once either way.
        ({"num_pending": 1, "num_generating": 1, "num_generators": 2}, -10, False),
        ({"num_pending": 2, "num_generating": 1, "num_generators": 2, "update_s": 1}, 5, True),
        # A slow trainer: the assist takes longer than the generators need for everything.
        ({"assist_s": 60}, -30, False),
        ({"assist_s": 20, "update_s": 2}, 10, True),
    ],
)
def test_threshold_weighs_the_saving_against_the_switch(fields: dict[str, Any], saving_s: float, assist: bool) -> None:
    decision = threshold().decide(bubble(**fields))
    assert decision.saving_s == pytest.approx(saving_s)
    assert decision.assist is assist
    assert ("exceeds" in decision.reason) == assist


@pytest.mark.parametrize("missing", ["generate_s", "update_s", "assist_s"])
def test_threshold_assists_once_a_step_until_the_durations_are_measured(missing: str) -> None:
    unknown = {missing: None, "switch_s": 1000}
    decisions = [threshold().decide(bubble(**unknown, num_assists=number)) for number in (0, 1)]
    assert [decision.assist for decision in decisions] == [True, False]
    assert all(decision.saving_s is None for decision in decisions)


@pytest.mark.parametrize("name", ["never", "greedy", "threshold", "search", "tag_first", "static(3)"])
def test_a_policy_is_named_by_its_config(name: str) -> None:
    assert policy_from(name).name == name
