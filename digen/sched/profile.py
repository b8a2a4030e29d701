"""Running means of task durations, per worker and kind, learnt while the run goes.

The first sample of each is left out as soon as there is a second: it holds cold-start costs.
"""

from __future__ import annotations

from typing import Literal

from digen.events import Role, TaskKind

Kind = TaskKind | Literal["switch_in", "switch_out"]
"""What durations are told apart by. The switch before an assist and the one after it may differ."""


class Mean:
    """A running mean that forgets its first sample."""

    __slots__ = ("count", "first", "total")

    def __init__(self) -> None:
        self.count = 0
        self.first = 0.0
        self.total = 0.0

    def value(self) -> float:
        """The mean, in seconds."""
        return self.total / (self.count - 1) if self.count > 1 else self.first


class Profile:
    """Online durations in seconds: of each worker, and pooled over the workers of a role."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, Kind], Mean] = {}

    def add(self, worker: str, role: Role, kind: Kind, duration_s: float) -> None:
        """Record one finished task."""
        means = self._means
        for key in ((worker, kind), (role, kind)) if worker != role else ((role, kind),):
            mean = means.get(key)
            if mean is None:
                mean = means[key] = Mean()
            if mean.count:
                mean.total += duration_s
            else:
                mean.first = duration_s
            mean.count += 1

    def expect(self, worker_or_role: str, kind: Kind, duration_s: float) -> None:
        """Take ``duration_s`` as the mean of a worker or a role until it is measured."""
        mean = self._means[worker_or_role, kind] = Mean()
        mean.first, mean.count = duration_s, 1

    def mean(self, worker_or_role: str, kind: Kind) -> float | None:
        """Mean duration of ``kind`` on a worker, or over a role's workers; ``None`` before the first sample."""
        mean = self._means.get((worker_or_role, kind))
        return mean.value() if mean is not None else None
