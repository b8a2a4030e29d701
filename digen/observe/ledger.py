"""Where one worker's time goes.

From joining to leaving, a worker is either busy with a task or in a bubble, so busy + bubbles = wall. A bubble opens
when a task ends and ends at the worker's next task, its leaving or the end of the run; ``BubbleOpened`` tells its
cause.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from digen.events import Role, TaskStarted

HANDOVER = "handover"
"""Cause of a bubble that no ``BubbleOpened`` explains: the driver's own time between two tasks."""

Outcome = Literal["done", "failed", "lost"]
"""How a task ended. ``lost``: the stream, or the run, ended before the task did."""


class Span(Struct, frozen=True):
    """A stretch of one worker's time: a task, or a bubble (``kind="bubble"``). Seconds since the run began."""

    worker: str
    kind: str
    start: float
    end: float
    step: int = -1
    index: int = -1
    version: int = -1
    stale: bool = False
    outcome: Outcome = "done"
    cause: str = ""

    @property
    def duration_s(self) -> float:
        """Length."""
        return self.end - self.start

    @property
    def label(self) -> str:
        """``generate s3 mb5 v2``, or a bubble's cause."""
        return self.cause or task_label(self.kind, self.step, self.index, self.version)


def task_label(kind: str, step: int, index: int, version: int) -> str:
    """A task in a few words: ``generate s3 mb5 v2``; -1 leaves a part out."""
    parts = ((" s", step), (" mb", index), (" v", version))
    return kind + "".join(f"{prefix}{value}" for prefix, value in parts if value >= 0)


@dataclass(slots=True)
class WorkerLedger:
    """One worker's tasks and bubbles, closed ones summed up. ``on_span`` gets each of them when it closes."""

    name: str
    role: Role
    on_span: Callable[[Span], None] | None = None
    version: int = 0
    """Version of the weights that it holds."""
    present: bool = False
    joined: float = 0.0
    since: float = 0.0
    """When the present busy stretch or bubble began."""
    cause: str = HANDOVER
    """Why it idles, while it does."""
    running: dict[int, tuple[TaskStarted, float]] = field(default_factory=dict)
    """Tasks under way and when they began; one at a time unless the worker takes more."""
    wall_s: float = 0.0
    """From joining to leaving, over all its stays that have ended."""
    busy_s: float = 0.0
    bubble_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Idle seconds by cause."""
    kind_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Busy seconds by kind of task, however the task ended."""
    num_tasks: Counter[str] = field(default_factory=Counter)
    """Tasks done, by kind."""

    def totals(self, now: float) -> tuple[float, float]:
        """(busy seconds, idle seconds) up to now, the open stretch included."""
        open_s = now - self.since if self.present else 0.0
        idle_s = sum(self.bubble_s.values(), 0.0)
        return (self.busy_s + open_s, idle_s) if self.running else (self.busy_s, idle_s + open_s)

    def idle_share(self, now: float) -> float:
        """Idle share of its time up to now."""
        busy_s, idle_s = self.totals(now)
        return idle_s / (busy_s + idle_s) if busy_s + idle_s > 0 else 0.0

    def join(self, version: int, now: float) -> None:
        """Take part from now on."""
        self.version, self.present, self.cause = version, True, HANDOVER
        self.joined = self.since = now

    def leave(self, outcome: Outcome, now: float) -> None:
        """Take part no more; ``outcome`` is that of the tasks that still run."""
        for task in list(self.running):
            self.finish(task, outcome, now)
        self._close_bubble(now)
        self.wall_s += now - self.joined
        self.present = False

    def start(self, event: TaskStarted, now: float) -> None:
        """Begin a task, which ends the bubble."""
        if not self.running:
            self._close_bubble(now)
        self.running[event.task] = event, now

    def finish(self, task: int, outcome: Outcome, now: float) -> None:
        """End a task; a bubble opens when it was the last one."""
        event, start = self.running.pop(task)
        self.kind_s[event.kind] += now - start
        self.num_tasks[event.kind] += outcome == "done"
        if not self.running:
            self.busy_s += now - self.since
            self.since, self.cause = now, HANDOVER
        if self.on_span is not None:
            where = event.step, event.index, event.version, event.stale
            self.on_span(Span(self.name, event.kind, start, now, *where, outcome))

    def explain(self, cause: str, now: float) -> None:
        """Give the bubble's cause. The first one covers it from its beginning; another one begins a new bubble."""
        if self.running or self.cause == cause:
            return
        if self.cause != HANDOVER:
            self._close_bubble(now)
        self.cause = cause

    def _close_bubble(self, now: float) -> None:
        if now > self.since:
            self.bubble_s[self.cause] += now - self.since
            if self.on_span is not None:
                self.on_span(Span(self.name, "bubble", self.since, now, cause=self.cause))
        self.since, self.cause = now, HANDOVER
