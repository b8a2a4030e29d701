"""What the loss of a worker means: who comes back and when, and what becomes of the task that it had.

Pure decisions and bookkeeping; :class:`digen.sched.lanes.Restart` does the waiting. A generation or score that is lost
goes back to the front of its queue, with the same seeds. A trainer takes its gradient with it: it gets back the state
that it had, from a snapshot or a checkpoint, and the step's updates are applied again from the rollouts, which are kept
until the commit; or there is only an earlier state, and the run goes back to that. A machine that is lost takes
payloads with it: what they held is made again, though the worker that was to read it is well.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from digen.errors import (
    CheckpointError,
    ConfigError,
    DigenError,
    PayloadLost,
    ProtocolError,
    RankFailed,
    WorkerDied,
    WorkerRaised,
    WorkerTimeout,
)
from digen.events import Loss, Quarantined, RolledBack, RolloutLost, Sink, TaskKind, TaskRetried
from digen.sched.meter import Meter
from digen.sched.results import Results
from digen.sched.state import State, Task, Worker
from digen.sched.story import Story

if TYPE_CHECKING:
    from digen.restarts import RestartsSection
    from digen.sched.profile import Profile
    from digen.types import MicroBatch

_METRICS: dict[Loss, str] = {
    "died": "worker/deaths",
    "hung": "worker/hangs",
    "protocol": "worker/deaths",
    "raised": "worker/deaths",
}
_READERS = {"generate", "assist", "score", "update", "load"}
"""Kinds of tasks that read a payload."""
_MAX_ROBBED = 10
"""So often in a row no machine is lost that holds what a task is to read: something else is wrong."""


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
        return min(rules.max_backoff_s, rules.backoff_s * 2.0 ** min(len(recent) - 2, 64)) if len(recent) > 1 else 0.0

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

        self._num_robbed: Counter[tuple[TaskKind, int, int]] = Counter()
        """How often in a row what a task was to read was lost, which is no fault of the task."""
        self._quarantined: list[tuple[Task, Exception]] = []
        self._poison: set[str | None] = set()
        """Prompts of what was given up."""
        self._unheeded: defaultdict[int, list[Quarantined]] = defaultdict(list)
        """By step, what an earlier run gave up of steps that are not generated for yet."""

    def finished(self, task: Task) -> None:
        """A task has ended well."""
        self._budget.useful(task.worker.name)
        if self._failures:
            self._failures.pop(_key(task), None)
        if self._num_robbed:
            self._num_robbed.pop(_key(task), None)

    def fence(self) -> None:
        """An answer came that nobody waits for: a second one, or one of an earlier life of the worker."""
        self._meter.count("faults/replies_fenced")

    def judge(self, task: Task, error: Exception, *, restartable: bool) -> Lost | None:
        """What the failure of a task means for its worker; ``None`` if the worker is well and the task is tried again.

        Raises:
            Exception: ``error`` itself, if the run cannot go on.
        """
        reason = _reason(task, error)
        if reason is None and restartable and not isinstance(error, DigenError):
            reason = "raised"
        raised = isinstance(error, WorkerRaised) and task.kind in {"generate", "score", "encode"}
        retried = (raised and task.worker.role != "trainer") or _robbed(task, error)
        if self._rules.budget == 0 or not (reason or task.void or retried):
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
        if task.void:
            return
        if _robbed(task, error):
            self._make_again(task, error)
            return
        if task.kind == "load":  # whoever comes back loads what is current then
            return
        failed = self._failures.setdefault(_key(task), [])
        failed.append(task.worker.name)
        if len(failed) >= (1 if self._is_suspect(task) else self._rules.max_attempts):
            self._give_up(task, failed, error)
        elif task.kind != "update" and task.index >= 0 and self._state.ledger(task.step).assembler.moot(task.index):
            self._give_up(task, failed, error)  # nothing would be trained on it
        elif self._requeue(task):
            self._meter.count("faults/retries")
            self._emit(TaskRetried(self._now(), task.kind, task.step, task.index, len(failed) + 1, str(error)))
        else:
            del self._failures[_key(task)]

    def _is_suspect(self, task: Task) -> bool:
        """Whether a micro-batch has the prompt of one that was given up: then it gets one attempt only."""
        return (
            task.kind != "update"
            and task.index >= 0
            and _prompt(self._state.ledger(task.step).micro_batches[task.index]) in self._poison
        )

    def take_stock(self) -> None:
        """A worker or a payload is lost, or a worker is back: rollouts may be lost that nobody has asked for since."""
        self._forget(self._state.lost_rollouts())

    def _make_again(self, task: Task, error: Exception) -> None:
        """What a task was to read is lost: that is made again first. Of several readers, the first has it made."""
        state = self._state
        match task.kind:
            case "load":
                (publication,) = task.argument
                first = state.publication is publication
                state.publication_lost(publication, task.worker)
            case "score" | "update":
                first = True
                self._forget([(task.step, task.index), *state.lost_rollouts()])
            case _:
                step = state.ledger(task.step)
                state.undispatch(step, task)
                first = step.encoded is None or step.encoded is task.argument[-1]
                if step.encoded is not None and first:
                    self._results.forget_encoded(step)
        self._num_robbed[_key(task)] += first
        if self._num_robbed[_key(task)] > _MAX_ROBBED:
            raise error

    def _forget(self, rollouts: Sequence[tuple[int, int]]) -> None:
        for number, index in sorted(rollouts, reverse=True):  # so that the lowest comes first in its queue
            worker, version = self._results.forget(self._state.ledger(number), index)
            self._meter.count("faults/rollouts_lost")
            self._emit(RolloutLost(self._now(), number, index, worker, version))
            self._leave_out_moot(number, "its groups are lost already")

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
                    self._meter.count("faults/evaluations_lost")
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
        self._poison |= {_prompt(micro_batch)} - {None}
        error.add_note(
            f"step {task.step} micro-batch {task.index} ({_in_words(micro_batch)}) is given up after "
            f"{len(failed)} attempt{'s' * (len(failed) > 1)} to {task.kind}; "
            "with schedule.max_dropped_groups above 0 a run goes on without its groups"
        )
        if task.kind == "update" or self._state.rules.max_dropped == 0:
            raise error
        self._results.drop(task, error)
        for worker in failed:
            self._budget.forgive(worker)
        self._results.follow_drop(task, error)
        self._quarantined.append((replace(task, argument=()), error))
        self._failures.pop(_key(task), None)
        self._leave_out_moot(task.step, f"its groups are lost with micro-batch {task.index}")

    def _leave_out_moot(self, number: int, why: str) -> None:
        """What has not begun of groups that are lost is not begun: it might cost as many workers again."""
        step = self._state.ledger(number)
        for index in [index for index in step.pending if step.assembler.moot(index)]:
            self._leave_out(Quarantined(0.0, "generate", number, index, 0, why, step.micro_batches[index], ()), why)

    def _leave_out(self, event: Quarantined, why: str) -> None:
        version = self._state.ledger(event.step).lost_versions.get(event.index, event.step)  # of an attempt, or none
        task, error = Task("generate", self._state.trainer, event.step, event.index, version, ()), DigenError(why)
        self._emit(replace(event, time=self._now()))
        self._results.withhold(task, error)
        self._quarantined.append((task, error))

    def heed(self, quarantined: Iterable[Quarantined]) -> None:
        """Leave out what an earlier run of the plan has given up, or try it again where nothing may be dropped.

        Raises:
            ConfigError: it is of another plan.
        """
        state = self._state
        for event in quarantined:
            if state.rules.max_dropped == 0:
                continue
            self._poison |= {_prompt(event.micro_batch)} - {None}
            if not state.start_step <= event.step < state.plan.num_steps:
                continue
            if event.micro_batch not in state.plan.step(event.step)[event.index : event.index + 1]:
                raise ConfigError(
                    f"step {event.step} micro-batch {event.index} is in quarantine, but of another plan; "
                    "delete quarantine.jsonl in the run's folder"
                )
            self._unheeded[event.step].append(event)

    def leave_out_quarantined(self) -> None:
        """Do so for the steps that may be generated for now: at the beginning, and after every commit.

        Raises:
            RewardError: more groups of a step are lost by that than may be.
        """
        for number in range(self._state.step, self._state.horizon) if self._unheeded else ():
            for event in self._unheeded.pop(number, ()):
                if event.index in self._state.ledger(number).pending:  # else its groups are lost already
                    self._leave_out(event, f"in quarantine since an earlier run: {event.error}")
                    self._leave_out_moot(number, f"its groups are lost with micro-batch {event.index}")

    def trainer_lost(self) -> None:
        """What the trainer was going to do it will not: an assist that was reserved goes back.

        Nor will it complete a publication that it may have been writing still, since nobody has loaded it.
        """
        state = self._state
        if state.publication is not None and not self._results.is_complete(state.publication):
            state.publication = None
        for kind, argument in state.trainer_program:
            if kind == "assist":
                state.undispatch(state.ledger(argument.step), argument)
            elif kind == "checkpoint":
                self._results.unsaved(*argument)
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
                f"snapshot or checkpoint of a version from {state.start_step} to {before} that it could go on from"
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
        self._results.copy_if_due()
        self._results.save_if_due(last=state.step >= state.last_step, owed=True)


def _prompt(micro_batch: MicroBatch) -> str | None:
    """The prompt of a micro-batch that has only one; of several nobody knows which is to blame."""
    texts = {piece.prompt.text for piece in micro_batch.slices}
    return texts.pop() if len(texts) == 1 else None


def _in_words(micro_batch: MicroBatch) -> str:
    """Its prompts in words, the first few."""
    texts = list(dict.fromkeys(piece.prompt.text for piece in micro_batch.slices))
    shown = ", ".join(repr(text[:60]) for text in texts[:3])
    return f"prompt {shown}" if len(texts) == 1 else f"prompts {shown}" + ", ..." * (len(texts) > 3)


def _key(task: Task) -> tuple[TaskKind, int, int]:
    return "generate" if task.kind == "assist" else task.kind, task.step, task.index


def _robbed(task: Task, error: Exception) -> bool:
    """Whether a task failed because what it reads is lost, and its worker is well."""
    return isinstance(error, PayloadLost) and task.kind in _READERS


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
