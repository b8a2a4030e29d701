"""The metrics of a step, counted while it runs: the values of its :class:`digen.types.StepReport`.

Names are stable; ``/`` separates a family from a quantity. Shares are between 0 and 1, times in seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from digen.events import Role, TaskKind

if TYPE_CHECKING:
    from digen.groups import CompletedGroup
    from digen.sched.state import Step, Task, Worker
    from digen.sched.tag import Decision


class Meter:
    """Accumulates from one commit to the next."""

    def __init__(self, start: float) -> None:
        self._reset(start)

    def _reset(self, start: float) -> None:
        self._start = start
        self._kind_s: dict[TaskKind, float] = defaultdict(float)
        self._busy_s: dict[Role, float] = defaultdict(float)
        self._present_s: dict[Role, float] = defaultdict(float)
        self._faults: dict[str, float] = defaultdict(float)
        self._tag = {"inserted": 0, "skipped": 0}
        self._published_bytes = 0
        self._search_s = 0.0
        self._predicted_s: float | None = None

    def finished(self, task: Task, now: float) -> None:
        """A task ended."""
        self._kind_s[task.kind] += now - task.started
        self._busy_s[task.worker.role] += now - max(task.started, self._start)

    def left(self, worker: Worker, now: float) -> None:
        """A worker takes part no more."""
        self._present_s[worker.role] += now - max(worker.joined, self._start)

    def decided(self, decision: Decision, now: float, search_s: float, commit_s: float | None) -> None:
        """A TAG policy was asked and took ``search_s`` to answer; the next commit is expected to take ``commit_s``."""
        self._tag["inserted" if decision.assist else "skipped"] += 1
        self._search_s += search_s
        if self._predicted_s is None and decision.predicted_s is not None and commit_s is not None:
            self._predicted_s = now - self._start + decision.predicted_s + commit_s

    def lost(self, task: Task, now: float) -> None:
        """A task ended without a result."""
        self._busy_s[task.worker.role] += now - max(task.started, self._start)
        self.count("worker/lost_work_s", now - task.started)

    def count(self, name: str, number: float = 1) -> None:
        """Something went wrong; named in the step's values only if it did."""
        self._faults[name] += number

    def published(self, nbytes: int) -> None:
        """Weights were published."""
        self._published_bytes += nbytes

    def close(
        self,
        step: Step,
        now: float,
        *,
        groups: list[CompletedGroup],
        workers: Iterable[Worker],
        trained: list[dict[str, float]],
        committed: dict[str, float],
        rollout_bytes: int,
    ) -> dict[str, float]:
        """The values of the step that was just committed; starts the next one."""
        wall_s = now - self._start
        for worker in workers:
            self._present_s[worker.role] += now - max(worker.joined, self._start)
            if worker.task is not None:
                self._busy_s[worker.role] += now - max(worker.task.started, self._start)
        rewards = [reward for index in sorted(step.rewards) for reward in step.rewards[index]]
        staleness = [step.number - step.version_of(index) for index in range(len(step.micro_batches))]
        mean = math.fsum(rewards) / len(rewards)
        values: dict[str, float] = {
            "reward/mean": mean,
            "reward/std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
            "reward/zero_std_ratio": sum(group.reward_std == 0 for group in groups) / len(groups),
            "reward/dropped_groups": step.assembler.num_dropped,
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": max(staleness),
            "staleness/ratio": sum(lag > 0 for lag in staleness) / len(staleness),
            "staleness/kept_ratio": _kept_stale_ratio(step, staleness),
            "version/trainer": step.number + 1,
            "pipeline/makespan_s": wall_s,
            "tag/inserted": self._tag["inserted"],
            "tag/skipped": self._tag["skipped"],
            "tag/context_switch_s": self._kind_s["switch"],
            "tag/search_ms": 1000 * self._search_s,
            "memory/rollout_bytes": rollout_bytes,
            "weight_sync/bytes": self._published_bytes,
            "weight_sync/seconds": self._kind_s["publish"] + self._kind_s["load"],
        }
        if self._predicted_s is not None:
            values["pipeline/makespan_predicted_s"] = self._predicted_s
        values |= _means_by_head(step)
        for role, present_s in self._present_s.items():
            if present_s > 0:
                values[f"pipeline/bubble_ratio/{role}"] = 1 - self._busy_s[role] / present_s
        values |= {f"time/{kind}_s": seconds for kind, seconds in sorted(self._kind_s.items())}
        if wall_s > 0:
            values["perf/samples_per_s"] = len(rewards) / wall_s
        values |= self._faults
        values |= _merged(trained)
        values |= committed
        self._reset(now)
        return values


def _means_by_head(step: Step) -> dict[str, float]:
    """The mean of each head of the reward, where there are several."""
    columns: dict[str, list[float]] = defaultdict(list)
    for _, heads in sorted(step.heads.items()):
        for name, column in heads.items():
            columns[name] += map(float, column)
    return {f"reward/{name}/mean": math.fsum(c) / len(c) for name, c in columns.items()} if len(columns) > 1 else {}


def _kept_stale_ratio(step: Step, staleness: list[int]) -> float:
    """The stale share again, over the samples that best-of-N kept."""
    total = sum(step.kept.values())
    return sum(number for index, number in step.kept.items() if staleness[index]) / total if total else 0.0


def _merged(reports: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step's updates: the largest where the name ends in max, else the mean."""
    collected: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, value in report.items():
            collected[name].append(value)
    return {
        name: max(values) if name.endswith("max") else math.fsum(values) / len(values)
        for name, values in sorted(collected.items())
    }
