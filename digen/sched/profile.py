"""Running means of task durations, per role and kind, learnt while the run goes.

The first sample of each is left out as soon as there is a second: it holds cold-start costs.
"""

from __future__ import annotations

from digen.events import Role, TaskKind


class _Mean:
    __slots__ = ("count", "first", "total")

    def __init__(self) -> None:
        self.count = 0
        self.first = 0.0
        self.total = 0.0

    def add(self, duration_s: float) -> None:
        if self.count == 0:
            self.first = duration_s
        else:
            self.total += duration_s
        self.count += 1

    def value(self) -> float:
        return self.total / (self.count - 1) if self.count > 1 else self.first


class Profile:
    """Online durations in seconds, pooled over the workers of a role."""

    def __init__(self) -> None:
        self._means: dict[tuple[Role, TaskKind], _Mean] = {}

    def add(self, role: Role, kind: TaskKind, duration_s: float) -> None:
        """Record one finished task."""
        mean = self._means.get((role, kind))
        if mean is None:
            mean = self._means[role, kind] = _Mean()
        mean.add(duration_s)

    def mean(self, role: Role, kind: TaskKind) -> float | None:
        """Mean duration of ``kind`` on a role's workers; ``None`` before the first sample."""
        mean = self._means.get((role, kind))
        return mean.value() if mean is not None else None
