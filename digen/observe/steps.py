"""What is known about each committed step: the scheduler's metrics, completed by what the events themselves tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

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


@dataclass(slots=True)
class StepTally:
    """What has been seen of a step that is not committed yet."""

    rewards: list[float] = field(default_factory=list)
    group_stds: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
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
            result |= {"staleness/mean": fmean(self.staleness), "staleness/max": float(max(self.staleness))}
            result["staleness/ratio"] = fmean(value > 0 for value in self.staleness)
        return result


def median_step_s(steps: list[StepSummary]) -> float | None:
    """Median time of a step, the first and the last left out when there are at least three; ``None`` without steps."""
    durations = [summary.duration_s for summary in steps]
    return median(durations[1:-1] or durations) if durations else None
