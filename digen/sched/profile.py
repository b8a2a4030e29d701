"""Running means of task durations, per worker and kind, learnt while the run goes.

The first sample of each (worker, kind) is left out as soon as there is a second: it holds cold-start costs.
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
    """Online durations in seconds, of each worker and pooled over each role."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, TaskKind], _Mean] = {}

    def add(self, worker: str, role: Role, kind: TaskKind, duration_s: float) -> None:
        """Record one finished task."""
        for key in ((worker, kind), (role, kind)):
            mean = self._means.get(key)
            if mean is None:
                mean = self._means[key] = _Mean()
            mean.add(duration_s)

    def mean(self, worker_or_role: str, kind: TaskKind) -> float | None:
        """Mean duration of ``kind`` on a worker, or over a role; ``None`` before the first sample."""
        mean = self._means.get((worker_or_role, kind))
        return mean.value() if mean is not None else None
