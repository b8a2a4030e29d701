"""What a run lost, one record a loss: workers, micro-batches that were given up, and steps that it went back by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from digen.events import (
    AnyEvent,
    Quarantined,
    RolledBack,
    TaskFailed,
    TaskRetried,
    WorkerJoined,
    WorkerLost,
    WorkerRestarted,
)
from digen.observe.ledger import task_label


@dataclass(slots=True)
class LostWorker:
    """A worker that was lost, or could not be started again."""

    time: float
    """Seconds since the run began, as all times here."""
    worker: str
    role: str
    reason: str
    error: str
    comes_back: bool
    """Whether another one was to be started in its place."""
    task: str = ""
    """The task it had, in a few words; empty if it idled or was being started."""
    task_fate: str = ""
    """What became of the task: repeated, quarantined, or nothing that an event tells."""
    back_s: float | None = None
    """Seconds until it was back; ``None`` if it was not before the run, or its segment, ended."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A micro-batch in quarantine."""

    time: float
    step: int
    index: int
    prompts: list[str]
    attempts: int
    """How often it failed; 0 if it was left out with another one."""
    error: str


@dataclass(frozen=True, slots=True)
class WentBack:
    """A rollback."""

    time: float
    version: int
    """The one from which the run went on."""
    from_version: int
    num_discarded: int
    """Rollouts that were thrown away."""


class Losses:
    """Collects the records. Their number is that of losses, which a run's restart budget bounds."""

    def __init__(self) -> None:
        self.workers: list[LostWorker] = []
        self.rollbacks: list[WentBack] = []
        self._given_up: dict[tuple[int, int], GivenUp] = {}
        self._failed: dict[str, TaskFailed] = {}
        self._away: dict[str, list[LostWorker]] = {}
        self._latest: tuple[LostWorker, TaskFailed] | None = None

    @property
    def quarantined(self) -> list[GivenUp]:
        """In the order in which they were given up; what a resumed run says again is there once."""
        return list(self._given_up.values())

    @property
    def num_quarantined(self) -> int:
        """Micro-batches that failed too often, without those that were left out with them."""
        return sum(record.attempts > 0 for record in self._given_up.values())

    def apply(self, event: AnyEvent, now: float) -> None:
        """Take an event that came ``now``; those that tell of no loss are ignored."""
        match event:
            case TaskFailed():
                self._failed[event.worker] = event
            case WorkerLost():
                self._lose(event, now)
            case WorkerRestarted() | WorkerJoined():
                for record in self._away.pop(event.worker, ()):
                    record.back_s = now - record.time
            case TaskRetried():
                self._follow(event, "repeated")
            case Quarantined():
                self._follow(event, "quarantined")
                prompts = list(dict.fromkeys(piece.prompt.text for piece in event.micro_batch.slices))
                given_up = GivenUp(now, event.step, event.index, prompts, event.attempts, event.error)
                self._given_up.setdefault((event.step, event.index), given_up)
            case RolledBack():
                self.rollbacks.append(WentBack(now, event.version, event.from_version, event.num_discarded))

    def close(self) -> None:
        """The segment is over: who is not back by now does not come back, but joins the next segment."""
        self._away.clear()
        self._failed.clear()

    def as_json(self) -> dict[str, list[dict[str, Any]]]:
        """The records as plain dicts."""
        records: dict[str, Sequence[object]] = {
            "workers": self.workers,
            "quarantined": self.quarantined,
            "rollbacks": self.rollbacks,
        }
        return {name: [msgspec.to_builtins(record) for record in kind] for name, kind in records.items()}

    def _lose(self, event: WorkerLost, now: float) -> None:
        record = LostWorker(now, event.worker, event.role, event.reason, event.error, event.restart_in_s is not None)
        self.workers.append(record)
        self._away.setdefault(event.worker, []).append(record)
        task, self._latest = self._failed.pop(event.worker, None), None
        if task is not None and task.error == event.error:  # else it was lost idle, some time after that failure
            record.task = task_label(task.kind, task.step, task.index, -1)
            self._latest = record, task

    def _follow(self, event: TaskRetried | Quarantined, fate: str) -> None:
        """It is said right after the loss that it follows from; a failure without a loss has another error."""
        if self._latest is None:
            return
        record, task = self._latest
        if (task.kind, task.step, task.index, task.error) == (event.kind, event.step, event.index, event.error):
            record.task_fate, self._latest = fate, None
