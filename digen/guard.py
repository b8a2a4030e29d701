"""Stops a run whose metrics have left their limits, before its weights are saved over good ones."""

from __future__ import annotations

from collections.abc import Mapping

from digen.errors import ConfigError, Diverged
from digen.types import StepReport


class Guard:
    """Looks at every step that is committed. A scheduler's ``on_commit``.

    A step that leaves a limit ends the run there: its weights are not saved, the checkpoint before stays the newest.

    Args:
        above: metrics of a step and the most that they may be (``run.stop_above``).
        below: and the least (``run.stop_below``).
    """

    def __init__(self, above: Mapping[str, float], below: Mapping[str, float]) -> None:
        self._above = above
        self._below = below
        self._seen: set[str] = set()

    def __call__(self, report: StepReport) -> None:
        """Check one step. A metric that only some steps have is checked in those; the first step looked at has all.

        Raises:
            Diverged: names the metric, the limit and the step.
            ConfigError: there is no such metric.
        """
        values = report.metrics()
        for field, limits, sign in (("stop_above", self._above, 1), ("stop_below", self._below, -1)):
            for name, limit in limits.items():
                if name not in values:
                    if name not in self._seen:
                        known = ", ".join(sorted(values))
                        raise ConfigError(f"run.{field}: a step has no metric {name!r}; it has {known}")
                    continue
                self._seen.add(name)
                if sign * values[name] > sign * limit:
                    raise Diverged(
                        f"step {report.index}: {name} is {values[name]:.6g}, {'above' if sign > 0 else 'below'} the "
                        f"limit {limit:g} of run.{field}; its weights are not saved: lower optimizer.lr and go on from "
                        "the last checkpoint, or change the limit"
                    )
