"""Limits of a step's metrics."""

from __future__ import annotations

import pytest

from digen.errors import ConfigError, Diverged
from digen.guard import Guard
from digen.types import StepReport


def report(step: int, **values: float) -> StepReport:
    return StepReport(step, step + 1, values)


def test_a_metric_at_its_limit_is_within() -> None:
    guard = Guard({"grad_norm": 2.0}, {"reward": 0.5})
    guard(report(0, grad_norm=2.0, reward=0.5))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"grad_norm": 2.5, "reward": 0.5}, "step 7: grad_norm is 2.5, above the limit 2 of run.stop_above"),
        ({"grad_norm": 0.0, "reward": -1.0}, "step 7: reward is -1, below the limit 0.5 of run.stop_below"),
    ],
)
def test_one_beyond_it_ends_the_run(values: dict[str, float], words: str) -> None:
    with pytest.raises(Diverged, match=words):
        Guard({"grad_norm": 2.0}, {"reward": 0.5})(report(7, **values))


def test_a_metric_that_no_step_has_is_named() -> None:
    guard = Guard({"kl": 1.0}, {})
    with pytest.raises(ConfigError, match=r"run\.stop_above: a step has no metric 'kl'; it has grad_norm, loss"):
        guard(report(0, loss=1.0, grad_norm=1.0))


def test_a_metric_that_only_some_steps_have_is_checked_there() -> None:
    guard = Guard({"kl": 1.0}, {})
    guard(report(0, kl=0.5))
    guard(report(1, loss=1.0))
    with pytest.raises(Diverged):
        guard(report(2, kl=1.5))
