"""What the loss of a worker means: who comes back and when, and what becomes of the task that it had.

Pure decisions and bookkeeping; :class:`digen.sched.lanes.Restart` does the waiting. A generation or score that is lost
goes back to the front of its queue, with the same seeds. A trainer takes its gradient with it: it is restored at the
version that it had and the step's updates are applied again from the rollouts, which are kept until the commit; or it
can only be restored at an earlier version, and the run goes back to that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from digen.errors import CheckpointError, ProtocolError, RankFailed, WorkerDied, WorkerRaised, WorkerTimeout
from digen.events import Loss, Quarantined, RolledBack, Sink, TaskKind, TaskRetried
from digen.sched.meter import Meter
from digen.sched.results import Results
from digen.sched.state import State, Task, Worker
from digen.sched.story import Story

if TYPE_CHECKING:
    from digen.restarts import RestartsSection
    from digen.sched.profile import Profile

_METRICS: dict[Loss, str] = {
    "died": "worker/deaths",
    "hung": "worker/hangs",
    "protocol": "worker/deaths",
    "raised": "worker/deaths",
}


class Lost(Struct, frozen=True):
    """A worker is lost."""

    reason: Loss
    wait_s: float | None
    """Until another one is started in its place; ``None``: it does not come back."""


class Budget:
    """How often and how soon workers are started again, and how long a task may take.

    Args:
        rules: the config's numbers.
    """

    def __init__(self, rules: RestartsSection) -> None:
        self._rules = rules
        self._restarts: dict[str, deque[float]] = {}
        self._barren: dict[str, int] = {}

    def wait_s(self, worker: str, now: float) -> float | None:
        """Back-off before ``worker`` is started again, which is counted; ``None`` if it may not be.

        A worker that has been lost ``max_attempts`` times in a row without finishing one task would go on so for ever.
        """
        rules, recent = self._rules, self._restarts.setdefault(worker, deque())
        while recent and recent[0] <= now - rules.window_s:
            recent.popleft()
        barren = self._barren[worker] = self._barren.get(worker, 0) + 1
        if len(recent) >= rules.budget or barren > rules.max_attempts:
            return None
        recent.append(now)
        return min(rules.max_backoff_s, rules.backoff_s * 2 ** (len(recent) - 2)) if len(recent) > 1 else 0.0

    def useful(self, worker: str) -> None:
        """``worker`` has finished a task."""
        if self._barren:
            self._barren.pop(worker, None)

    def forgive(self, worker: str) -> None:
        """The last restart of ``worker`` was not its own fault."""
        if self._restarts.get(worker):
            self._restarts[worker].pop()
            self.useful(worker)

    def deadline_s(self, profile: Profile, task: Task) -> float:
        """Longest time that a task may take."""
        worker, kind, rules = task.worker, task.measured_as, self._rules
        mean = profile.mean(worker.name, kind)
        if mean is None:
            mean = profile.mean(worker.role, kind)
        return rules.first_deadline_s if mean is None else max(rules.deadline_floor_s, rules.deadline_factor * mean)


class Recovery:
    """Takes failures into the state.

    Args:
        state: the scheduler's state.
        results: undoes what a task had begun.
        meter: counts.
        budget: what may be started again.
        rules: the config's numbers.
        emit: gets the events.
        now: seconds since the run began.
        story: what a quarantined micro-batch went through.
    """

    def __init__(
        self,
        state: State,
        results: Results,
        meter: Meter,
        *,
        budget: Budget,
        rules: RestartsSection,
        emit: Sink,
        now: Callable[[], float],
        story: Story,
    ) -> None:
        self._state = state
        self._results = results
        self._meter = meter
        self._budget = budget
        self._rules = rules
        self._emit = emit
        self._now = now
        self._story = story
        self._failures: dict[tuple[TaskKind, int, int], list[str]] = {}
        """The workers that failed in a row, by kind of task, step and micro-batch. A rollback does not undo them."""

        self._quarantined: list[tuple[Task, Exception]] = []

    def finished(self, task: Task) -> None:
        """A task has ended well."""
        self._budget.useful(task.worker.name)
        if self._failures:
            self._failures.pop(_key(task), None)

    def fence(self) -> None:
        """An answer came that nobody waits for: a second one, or one of an earlier life of the worker."""
        self._meter.count("faults/replies_fenced")

    def judge(self, task: Task, error: Exception, *, restartable: bool) -> Lost | None:
        """What the failure of a task means for its worker; ``None`` if the worker is well and the task is tried again.

        Raises:
            Exception: ``error`` itself, if the run cannot go on.
        """
        reason = _reason(task, error)
        retried = isinstance(error, WorkerRaised) and task.kind in {"generate", "score", "encode"}
        if self._rules.budget == 0 or not (reason or task.void or (retried and task.worker.role != "trainer")):
            raise error
        if reason is None:
            return None
        return self.lose(task.worker, reason, error, restartable=restartable)

    def lose(self, worker: Worker, reason: Loss, error: Exception, *, restartable: bool) -> Lost:
        """A worker is lost: when it comes back.

        Raises:
            Exception: ``error`` itself, if it does not and nobody else can do its work.
        """
        wait_s = self._budget.wait_s(worker.name, self._now()) if restartable and not worker.leaving else None
        if wait_s is None and not self._others(worker):
            raise error
        self._meter.count(_METRICS[reason])
        return Lost(reason, wait_s)

    def _others(self, worker: Worker) -> bool:
        """Whether a worker's work can be done by others, now or when they are back."""
        state = self._state
        everybody = (*state.generators.values(), *state.scorers.values(), *state.absent.values())
        return any(other.role == worker.role for other in everybody if other is not worker)

    def undo(self, task: Task, error: Exception) -> None:
        """A task has failed: return it to its queue, or give its micro-batch up.

        Raises:
            Exception: the micro-batch cannot be given up.
        """
        self._meter.lost(task, self._now())
        self._results.abandon(task)
        if task.void or task.kind == "load":  # whoever comes back loads what is current then
            return
        failed = self._failures.setdefault(_key(task), [])
        failed.append(task.worker.name)
        if len(failed) >= self._rules.max_attempts:
            self._give_up(task, failed, error)
        elif self._requeue(task):
            self._meter.count("faults/retries")
            self._emit(TaskRetried(self._now(), task.kind, task.step, task.index, len(failed) + 1, str(error)))
        else:
            del self._failures[_key(task)]

    def _requeue(self, task: Task) -> bool:
        """Whether a task is done again; what a trainer did for a whole step is, if it still has to be."""
        state = self._state
        match task.kind:
            case "generate" | "assist":
                state.undispatch(state.ledger(task.step), task)
            case "score":
                state.unpop_unscored(state.ledger(task.step), task.index)
            case "encode":
                state.ledger(task.step).encoder = None
            case "evaluate":
                if state.evaluation_due is not None or task.version != state.trainer.version:
                    return False  # its weights are gone
                (state.evaluation_due,) = task.argument
        return True

    def _give_up(self, task: Task, failed: list[str], error: Exception) -> None:
        if task.index < 0:
            raise error
        self._meter.count("faults/quarantined")
        story = tuple(self._story.of_micro_batch(task.step, task.index))
        micro_batch = self._state.ledger(task.step).micro_batches[task.index]
        self._emit(
            Quarantined(self._now(), task.kind, task.step, task.index, len(failed), str(error), micro_batch, story)
        )
        if task.kind == "update" or self._state.rules.max_dropped == 0:
            raise error
        self._results.drop(task, error)
        for worker in failed:
            self._budget.forgive(worker)
        self._results.follow_drop(task, error)
        self._quarantined.append((task, error))

    def trainer_lost(self) -> None:
        """What the trainer was going to do it will not: an assist that was reserved goes back."""
        state = self._state
        for kind, argument in state.trainer_program:
            if kind == "assist":
                state.undispatch(state.ledger(argument.step), argument)
            elif kind == "checkpoint":
                self._results.unsaved()
        state.trainer_program.clear()
        state.switched = state.bubble_asked = state.bubble_reopened = False

    def trainer_back(self, version: int) -> None:
        """The trainer holds ``version`` and no gradient.

        Raises:
            CheckpointError: it is no version that the run can go on from.
        """
        state, before = self._state, self._state.step
        if not state.start_step <= version <= before:
            raise CheckpointError(
                f"trainer {state.trainer.name!r} was started again but holds version {version}, and there is no "
                f"checkpoint of a version from {state.start_step} to {before} that it could be restored from"
            )
        if version == before:
            self._results.reopen()
            state.recount_outdated()
        else:
            num_discarded = self._results.roll_back(version)
            state.recount_outdated()
            state.holding = state.rules.hold and state.num_outdated > 0
            self._meter.count("faults/rollbacks")
            self._emit(RolledBack(self._now(), version, before, num_discarded))
            for task, error in self._quarantined:
                if task.step >= version:
                    self._results.withhold(task, error)
        self._results.save_if_due(last=state.step >= state.last_step)


def _key(task: Task) -> tuple[TaskKind, int, int]:
    return "generate" if task.kind == "assist" else task.kind, task.step, task.index


def _reason(task: Task, error: Exception) -> Loss | None:
    match error:
        case WorkerTimeout():
            return "hung"
        case WorkerDied():
            return "died"
        case ProtocolError() | RankFailed():
            return "protocol"
        case WorkerRaised() if task.kind == "load":
            return "raised"
    return None
