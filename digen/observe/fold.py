"""The fold of the event stream that everything in observe is made of.

:class:`Fold` takes events one by one and keeps totals whose size depends on the number of workers and losses, not on
the length of the run; whoever wants each task and bubble asks for them by ``on_span``.

A resumed run appends to the same stream, and its clock starts again: each ``RunStarted`` begins a *segment*, and
segments are laid end to end. Steps that a resume or a rollback repeats replace the ones that were lost, and what was
counted of those is taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Self

from digen.errors import InvariantViolation
from digen.events import (
    AnyEvent,
    BubbleOpened,
    CheckpointSaved,
    Evaluated,
    GroupCompleted,
    MicroBatchSettled,
    Quarantined,
    Rewarded,
    RolledBack,
    RolloutLost,
    RunFinished,
    RunStarted,
    StepCommitted,
    TagDecided,
    TaskFailed,
    TaskFinished,
    TaskRetried,
    TaskStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRestarted,
)
from digen.observe.ledger import Outcome, Span, WorkerLedger
from digen.observe.losses import Losses
from digen.observe.steps import StepSummary, StepTally

ROLES = ("generator", "scorer", "trainer")
"""Roles in the order in which they are shown."""

CANCELLED = "cancelled:"
"""How the error of a task begins that the end of the run cut short."""


class Fold:
    """Totals of an event stream.

    Args:
        on_span: called with every task and bubble when it ends; ``None`` when only totals are wanted.
        keep_steps: how many :class:`StepSummary` to keep, the newest; ``None`` keeps all.

    Raises:
        InvariantViolation: from :meth:`apply`, when an event names a worker that never joined.
    """

    def __init__(self, on_span: Callable[[Span], None] | None = None, keep_steps: int | None = None) -> None:
        self.run: RunStarted | None = None
        self.finished: RunFinished | None = None
        self.now = 0.0
        """Seconds since the first segment began, time between segments left out."""
        self.num_segments = 0
        self.workers: dict[str, WorkerLedger] = {}
        self.steps: dict[int, StepSummary] = {}
        self.evaluations: list[Evaluated] = []
        self.checkpoint: CheckpointSaved | None = None
        self.counts: Counter[str] = Counter()
        """Numbers of things, keys ``num_*``."""
        self.losses = Losses()
        self.staleness: Counter[int] = Counter()
        """Updated micro-batches by staleness."""
        self.overlap_s = 0.0
        """Time in which a generator and the trainer were busy at once."""
        self.sync_bytes = 0.0
        """Bytes published, as the scheduler's ``weight_sync/bytes`` says."""
        self.score_queue: set[tuple[int, int]] = set()
        """(step, index) generated and not yet being scored: SQ."""
        self.update_queue: set[tuple[int, int]] = set()
        """(step, index) scored and not yet being updated: UQ, and what waits for its group."""
        self._awaited: dict[str, bool] = {}
        """Workers that are lost, and whether they are to come back."""
        self._disturbed = False
        self._on_span = on_span
        self._keep_steps = keep_steps
        self._offset = 0.0
        self._open = False
        self._step_began = 0.0
        self._cold = True
        self._num_busy: Counter[str] = Counter()
        self._tallies: dict[int, StepTally] = {}
        self._marks: dict[str, tuple[float, float]] = {}

    @classmethod
    def of(cls, events: Iterable[AnyEvent], on_span: Callable[[Span], None] | None = None) -> Self:
        """The fold of a whole stream, closed."""
        fold = cls(on_span)
        for event in events:
            fold.apply(event)
        fold.close()
        return fold

    @property
    def overlap_ratio(self) -> float:
        """Share of the run's time in which at least one generator and the trainer were both busy."""
        return self.overlap_s / self.now if self.now > 0 else 0.0

    def of_role(self, role: str) -> list[WorkerLedger]:
        """The workers of a role, in the order in which they joined."""
        return [ledger for ledger in self.workers.values() if ledger.role == role]

    def seconds(self, *kinds: str) -> float:
        """Worker-seconds spent on tasks of these kinds."""
        return sum((ledger.kind_s.get(kind, 0.0) for ledger in self.workers.values() for kind in kinds), 0.0)

    def idle_s(self, cause: str) -> float:
        """Worker-seconds idled for this cause."""
        return sum((ledger.bubble_s.get(cause, 0.0) for ledger in self.workers.values()), 0.0)

    @property
    def lost_s(self) -> float:
        """Worker-seconds from being lost to being back, or to the end of the run, of losses that have ended."""
        return sum((ledger.lost_s for ledger in self.workers.values()), 0.0)

    def tasks(self, *kinds: str) -> int:
        """Number of tasks of these kinds that were done."""
        return sum(ledger.num_tasks[kind] for ledger in self.workers.values() for kind in kinds)

    def apply(self, event: AnyEvent) -> None:
        """Take the next event of the stream."""
        if self._open and not isinstance(event, RunStarted):
            self._advance(self._offset + event.time)
        match event:
            case TaskStarted():
                self._start(event)
            case TaskFinished():
                self._end(event, "done")
            case TaskFailed():
                self._end(event, "cancelled" if event.error.startswith(CANCELLED) else "failed")
            case BubbleOpened():
                if (ledger := self._ledger(event.worker)).present:
                    ledger.explain(event.cause, self.now)
            case Rewarded():
                self._tally(event.step).rewards += event.rewards
            case GroupCompleted():
                self._tally(event.step).group_stds.append(event.reward_std)
                self._count(event.step, "num_groups")
                self._count(event.step, "num_groups_spanning", event.num_micro_batches > 1)
                self._count(event.step, "num_groups_mixed", len(set(event.versions)) > 1)
            case MicroBatchSettled():
                self._settle(event)
            case TagDecided():
                self.counts["num_tag_inserted" if event.assist else "num_tag_skipped"] += 1
            case StepCommitted():
                self._commit(event)
            case WorkerJoined():
                ledger = self.workers.setdefault(event.worker, WorkerLedger(event.worker, event.role, self._on_span))
                self._leave(ledger, "failed")
                ledger.join(event.version, self.now)
                self._awaited.pop(event.worker, None)
                self._look_who_is_lost()
            case WorkerLeft():
                self._leave(self._ledger(event.worker), "failed")
            case WorkerLost():
                self.counts["num_workers_lost"] += 1
                self._leave(ledger := self._ledger(event.worker), "failed")
                ledger.lose(event.reason, self.now)
                self._awaited[event.worker] = event.restart_in_s is not None
                self._disturbed = True
                self._look_who_is_lost()
            case WorkerRestarted():
                self.counts["num_restarts"] += 1
                self._ledger(event.worker).join(event.version, self.now)
                self._awaited.pop(event.worker, None)
                self._look_who_is_lost()
                if event.role == "trainer":
                    self._lose_gradient()
            case TaskRetried():
                self.counts["num_retries"] += 1
            case RolloutLost():
                self.counts["num_rollouts_lost"] += 1
                self.score_queue.discard((event.step, event.index))
                self.update_queue.discard((event.step, event.index))
            case RolledBack():
                self.counts["num_rollbacks"] += 1
                self._forget_from(event.version)
            case CheckpointSaved():
                self.checkpoint = event
            case Evaluated():
                self.evaluations.append(event)
            case RunStarted():
                self._begin(event)
            case RunFinished():
                self.finished = event
                self.close()
        self.losses.apply(event, self.now)
        if isinstance(event, Quarantined) and event.attempts:
            self.counts["num_quarantined"] = self.losses.num_quarantined

    def close(self) -> None:
        """End the present segment: workers leave, tasks that run stay unfinished. After ``RunFinished`` a no-op."""
        for ledger in self.workers.values():
            self._leave(ledger, "unfinished")
            ledger.end_loss(self.now)
        self._awaited.clear()
        self._look_who_is_lost()
        self.losses.close()
        self._open = False

    def _begin(self, event: RunStarted) -> None:
        if self._open:
            self.close()
        self.run, self.finished, self._open = event, None, True
        self.num_segments += 1
        self._offset = self.now - event.time
        self._step_began = self.now
        self._cold = True
        self._disturbed = False
        self._forget_from(event.start_step)

    def _forget_from(self, version: int) -> None:
        """The run goes on from an earlier version: what came after it comes again, and is counted then."""
        undone: list[StepSummary | StepTally] = [self.steps[step] for step in self.steps if step >= version]
        for each in [*undone, *self._tallies.values()]:
            self.counts.subtract(each.counts)
            self.staleness.subtract(each.staleness)
        self.staleness = +self.staleness  # without zeros
        self.steps = {step: summary for step, summary in self.steps.items() if step < version}
        self._tallies.clear()
        self.score_queue.clear()
        self.update_queue.clear()

    def _lose_gradient(self) -> None:
        """The trainer was lost: what was updated on waits for its update again."""
        for step, tally in self._tallies.items():
            self._count(step, "num_updated", -len(tally.updated))
            self.staleness.subtract(tally.staleness)
            self.update_queue |= {(step, index) for index in tally.updated}
            tally.updated.clear()
            tally.staleness.clear()
        self.staleness = +self.staleness  # without zeros

    def _advance(self, now: float) -> None:
        if now > self.now:
            if self._num_busy["generator"] and self._num_busy["trainer"]:
                self.overlap_s += now - self.now
            self.now = now

    def _ledger(self, worker: str) -> WorkerLedger:
        try:
            return self.workers[worker]
        except KeyError:
            known = ", ".join(self.workers) or "none"
            raise InvariantViolation(f"an event names worker {worker!r}, which never joined (known: {known})") from None

    def _tally(self, step: int) -> StepTally:
        return self._tallies.setdefault(step, StepTally())

    def _count(self, step: int, name: str, number: int = 1) -> None:
        """Count something that is counted again if the step is trained again."""
        self.counts[name] += number
        self._tally(step).counts[name] += number

    def _look_who_is_lost(self) -> None:
        for ledger in self.workers.values():
            ledger.set_others_lost(bool(self._awaited), self.now)

    def _leave(self, ledger: WorkerLedger, outcome: Outcome) -> None:
        if ledger.present:
            self.counts[f"num_tasks_{outcome}"] += len(ledger.running)
            self._num_busy[ledger.role] -= bool(ledger.running)
            ledger.leave(outcome, self.now)

    def _start(self, event: TaskStarted) -> None:
        ledger = self._ledger(event.worker)
        if not ledger.present:
            return
        self.counts["num_tasks_started"] += 1
        self._num_busy[ledger.role] += not ledger.running
        ledger.start(event, self.now)
        if event.kind in {"generate", "assist"}:
            ledger.version = event.version
            self.counts["num_stale_starts"] += event.stale
        # What is worked on waits in no queue; that includes a lost attempt that is repeated from its beginning.
        self.score_queue.discard((event.step, event.index))
        self.update_queue.discard((event.step, event.index))

    def _end(self, event: TaskFinished | TaskFailed, outcome: Outcome) -> None:
        ledger = self._ledger(event.worker)
        if event.task not in ledger.running:  # Its worker has left, and the task was booked then.
            return
        self.counts[f"num_tasks_{outcome}"] += 1
        ledger.finish(event.task, outcome, self.now)
        self._num_busy[ledger.role] -= not ledger.running
        key, done = (event.step, event.index), outcome == "done"
        if (event.kind in {"generate", "assist"} and done) or (event.kind == "score" and not done):
            self.score_queue.add(key)
        elif event.kind == "score" or (event.kind == "update" and not done):
            self.update_queue.add(key)
        elif isinstance(event, TaskFinished) and event.kind in {"load", "commit"}:
            ledger.version = event.version

    def _settle(self, event: MicroBatchSettled) -> None:
        self._count(event.step, f"num_{event.outcome}")
        self.update_queue.discard((event.step, event.index))
        if event.outcome == "updated":
            self.staleness[event.staleness] += 1
            self._tally(event.step).staleness[event.staleness] += 1
            self._tally(event.step).updated.append(event.index)

    def _commit(self, event: StepCommitted) -> None:
        duration_s, self._step_began = self.now - self._step_began, self.now
        derived = {"pipeline/makespan_s": duration_s, **self._idle_since_commit()}
        tally = self._tallies.pop(event.step, StepTally())
        derived |= tally.values()
        self.sync_bytes += event.values.get("weight_sync/bytes", 0.0)
        self.counts["num_commits"] += 1
        values = derived | event.values
        self.steps[event.step] = StepSummary(
            event.step,
            event.version,
            self.now,
            duration_s,
            values,
            cold=self._cold,
            disturbed=self._disturbed,
            counts=tally.counts,
            staleness=tally.staleness,
        )
        self._cold = False
        self._disturbed = any(self._awaited.values())  # with one less for good, the others are the run's measure
        if self._keep_steps is not None and len(self.steps) > self._keep_steps:
            del self.steps[next(iter(self.steps))]

    def _idle_since_commit(self) -> dict[str, float]:
        ratios: dict[str, float] = {}
        for role in ROLES:
            totals = [ledger.totals(self.now) for ledger in self.of_role(role)]
            idle = sum(idle_s for _, idle_s in totals)
            wall = sum(busy_s for busy_s, _ in totals) + idle
            idle_before, wall_before = self._marks.get(role, (0.0, 0.0))
            if wall > wall_before:
                ratios[f"pipeline/bubble_ratio/{role}"] = (idle - idle_before) / (wall - wall_before)
            self._marks[role] = idle, wall
        return ratios
