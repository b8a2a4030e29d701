"""What is known about each committed step: the scheduler's metrics, completed by what the events themselves tell."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

from digen.observe.text import plural

DERIVED = (
    "pipeline/bubble_ratio/generator",
    "pipeline/bubble_ratio/scorer",
    "pipeline/bubble_ratio/trainer",
    "pipeline/makespan_s",
    "reward/group_std",
    "reward/mean",
    "reward/std",
    "reward/zero_std_ratio",
    "staleness/max",
    "staleness/mean",
    "staleness/ratio",
)
"""Metrics that are derived from events where the scheduler gave none.

``reward/group_std`` is the mean over groups of the group's own standard deviation; a ``bubble_ratio`` is idle
worker-seconds over worker-seconds of a role since the commit before; the makespan is the time since then.
"""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One committed step."""

    step: int
    version: int
    time: float
    """When it was committed, in seconds since the run began."""
    duration_s: float
    """Since the commit before, or since the segment began."""
    values: dict[str, float]
    """The scheduler's metrics over the derived ones (:data:`DERIVED`)."""
    cold: bool = False
    """Whether it was the first since a run began or was resumed: no duration was known when it began."""
    disturbed: bool = False
    """Whether a worker was lost in it, or on its way back."""
    counts: Counter[str] = field(default_factory=Counter)
    """What it added to the run's counts, keys ``num_*``: taken back if the step is trained again."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Its updated micro-batches by staleness."""


@dataclass(slots=True)
class StepTally:
    """What has been seen of a step that is not committed yet."""

    rewards: list[float] = field(default_factory=list)
    group_stds: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    updated: list[int] = field(default_factory=list)
    """Micro-batches in the gradient."""

    def values(self) -> dict[str, float]:
        """The derived metrics for which there is data."""
        result: dict[str, float] = {}
        if self.rewards:
            result |= {"reward/mean": fmean(self.rewards), "reward/std": pstdev(self.rewards)}
        if self.group_stds:
            result["reward/group_std"] = fmean(self.group_stds)
            result["reward/zero_std_ratio"] = fmean(std < 1e-9 for std in self.group_stds)
        if self.staleness:
            lags = list(self.staleness.elements())
            result |= {"staleness/mean": fmean(lags), "staleness/max": float(max(lags))}
            result["staleness/ratio"] = fmean(lag > 0 for lag in lags)
        return result


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes when nothing goes wrong, and what that was measured on."""

    median_s: float
    num_steps: int
    """Over which the median is taken."""
    num_disturbed: int
    """Steps that were left out because a worker was lost in them."""

    def describe(self) -> str:
        """``median of 8 steps, 2 with a lost worker left out``."""
        over = f"median of {plural(self.num_steps, 'step')}"
        return over + (f", {self.num_disturbed} with a lost worker left out" if self.num_disturbed else "")


def step_time(steps: list[StepSummary]) -> StepTime | None:
    """The median time of a step; ``None`` without steps.

    The first and the last are left out when there are at least three, and so are those in which a worker was lost
    when there are others.
    """
    if not steps:
        return None
    inner = steps[1:-1] or steps
    pools = (pool for steps_of in (inner, steps) if (pool := [step for step in steps_of if not step.disturbed]))
    chosen = next(pools, inner)
    disturbed = 0 if any(step.disturbed for step in chosen) else sum(step.disturbed for step in inner)
    return StepTime(median(step.duration_s for step in chosen), len(chosen), disturbed)
