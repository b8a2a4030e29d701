"""Where one worker's time goes.

From joining to leaving, a worker is either busy with a task or in a bubble, so busy + bubbles = wall. A bubble opens
when a task ends and ends at the worker's next task, its leaving or the end of the run; ``BubbleOpened`` tells its
cause. The time from being lost to being back is none of these: the worker is not there.
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

WORKER_LOST = "worker_lost"
"""Cause of what a worker idles while another one is lost: it says nothing about the schedule."""

Outcome = Literal["done", "failed", "cancelled", "unfinished"]
"""How a task ended. ``cancelled``: by the end of the run. ``unfinished``: the stream ended before the task did."""


class Span(Struct, frozen=True):
    """A stretch of one worker's time: a task, a bubble (``kind="bubble"``), or the time that it was lost
    (``kind="lost"``). Seconds since the run began.
    """

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
        """``generate s3 mb5 v2``, or the cause of a bubble or a loss."""
        return self.cause or task_label(self.kind, self.step, self.index, self.version)


def task_label(kind: str, step: int, index: int, version: int) -> str:
    """A task in a few words: ``generate s3 mb5 v2``; -1 leaves a part out."""
    parts = ((" s", step), (" mb", index), (" v", version))
    return kind + "".join(f"{prefix}{value}" for prefix, value in parts if value >= 0)


@dataclass(slots=True)
class WorkerLedger:
    """One worker's tasks, bubbles and losses, closed ones summed up. ``on_span`` gets each of them when it closes."""

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
    """Why it idles, while it does and nobody is lost."""
    others_lost: bool = False
    """Whether another worker is lost now."""
    lost_since: float | None = None
    """When it was lost, while it is."""
    lost_s: float = 0.0
    """From being lost to being back, or to the end of the run, over all losses that have ended."""
    lost_reason: str = ""
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

    @property
    def idle_cause(self) -> str:
        """Why it idles now."""
        return WORKER_LOST if self.others_lost else self.cause

    def idle_share(self, now: float) -> float:
        """Idle share of its time up to now."""
        busy_s, idle_s = self.totals(now)
        return idle_s / (busy_s + idle_s) if busy_s + idle_s > 0 else 0.0

    def join(self, version: int, now: float) -> None:
        """Take part from now on."""
        self.end_loss(now)
        self.version, self.present, self.cause = version, True, HANDOVER
        self.joined = self.since = now

    def leave(self, outcome: Outcome, now: float) -> None:
        """Take part no more; ``outcome`` is that of the tasks that still run."""
        for task in list(self.running):
            self.finish(task, outcome, now)
        self._close_bubble(now)
        self.wall_s += now - self.joined
        self.present = False

    def lose(self, reason: str, now: float) -> None:
        """Be lost, after leaving; one that is lost already could not be started again."""
        if self.lost_since is None:
            self.lost_since, self.lost_reason = now, reason

    def end_loss(self, now: float) -> None:
        """The worker is back, or the run is over."""
        if self.lost_since is None:
            return
        self.lost_s += now - self.lost_since
        if self.on_span is not None and now > self.lost_since:
            self.on_span(Span(self.name, "lost", self.lost_since, now, cause=f"lost: {self.lost_reason}"))
        self.lost_since = None

    def set_others_lost(self, others_lost: bool, now: float) -> None:
        """Another worker is lost, or all are back: a bubble that is open is two, of which each has its own cause."""
        if others_lost != self.others_lost:
            if self.present and not self.running:
                cause = self.cause
                self._close_bubble(now)
                self.cause = cause
            self.others_lost = others_lost

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
            cause = self.idle_cause
            self.bubble_s[cause] += now - self.since
            if self.on_span is not None:
                self.on_span(Span(self.name, "bubble", self.since, now, cause=cause))
        self.since, self.cause = now, HANDOVER
