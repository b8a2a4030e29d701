"""The semantics as a checker: what every run must satisfy, event by event.

:class:`InvariantChecker` is a sink. Tests attach it to every run on the virtual clock; :func:`check` runs the same
code over the ``events.jsonl`` of a real one. It knows nothing of the scheduler's state, only of its events.
"""

from __future__ import annotations

from collections.abc import Iterable

from digen.errors import InvariantViolation
from digen.events import (
    AnyEvent,
    Evaluated,
    GroupCompleted,
    MicroBatchSettled,
    Quarantined,
    RolledBack,
    RolloutLost,
    RunFinished,
    RunStarted,
    StepCommitted,
    TaskFailed,
    TaskFinished,
    TaskRetried,
    TaskStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRestarted,
)

NO_VERSION = -1
"""What a worker holds whose weights are of no version that counts."""
_WHOLE_STEP = {"encode", "load", "switch", "commit", "publish", "snapshot", "checkpoint", "evaluate"}


def check(events: Iterable[AnyEvent]) -> InvariantChecker:
    """Check a whole stream, which may hold several runs of one folder (a resume); returns the checker.

    Raises:
        InvariantViolation: with the number of the event, the event and the rule it breaks.
    """
    checker = InvariantChecker()
    for event in events:
        checker(event)
    return checker


class InvariantChecker:
    """Raises :class:`digen.errors.InvariantViolation` at the first event that breaks a rule.

    Rules: time never runs backwards; a worker does one task at a time and only while it takes part; a micro-batch is
    generated once, scored once, updated once, in this order, and settles once per committed step; its version is its
    worker's when its generation starts and does not change during it; staleness is within [0, W) at dispatch and at
    consumption, and a step's stale micro-batches within their limit; no load while the worker generates; updates are of
    the current step, in index order if so configured; no commit before all B have settled; a generator never starts
    to generate while scores wait for it; an evaluation is of the version that its worker holds; tasks started =
    finished + failed + running.

    A task whose worker is lost may be repeated, one attempt after the other, until its micro-batch is quarantined; a
    worker that is lost does nothing until it is back; a rollout that is lost while no task reads it, and was not
    trained on, is generated and scored again; a trainer that is back has no gradient, so that the step's
    updates come again; a run that rolls back commits its steps again, and nothing that was under way counts.
    """

    def __init__(self) -> None:
        self.num_events = 0
        self.num_started = 0
        self.num_finished = 0
        self.num_failed = 0
        self.steps_committed: list[int] = []
        self._run: RunStarted | None = None
        self._time = 0.0

    def __call__(self, event: AnyEvent) -> None:
        """Check one event."""
        self.num_events += 1
        if isinstance(event, RunStarted):
            self._begin(event)
            return
        self._event: AnyEvent = event
        if isinstance(event, Evaluated):
            return
        if self._run is None:
            self._fail("an event comes before run_started")
        self._require(event.time >= self._time, f"time runs backwards from {self._time}")
        self._time = event.time
        match event:
            case TaskStarted():
                self._started(event)
            case TaskFinished() | TaskFailed():
                self._ended(event)
            case WorkerJoined():
                self._require(event.worker not in self._versions, "the worker takes part already")
                self._versions[event.worker] = event.version
                self._roles[event.worker] = event.role
            case WorkerLeft():
                self._require(event.worker not in self._running, "the worker leaves during a task")
                del self._versions[event.worker]
                del self._roles[event.worker]
            case WorkerLost():
                self._lost(event)
            case WorkerRestarted():
                self._restarted(event)
            case TaskRetried():
                self._retried(event)
            case Quarantined():
                self._require((event.step, event.index) not in self._quarantined, "quarantined twice")
                version = self._mb_version.setdefault((event.step, event.index), event.step)  # or never begun
                self._quarantined[event.step, event.index] = version
                self._stage[event.step, event.index] = "scored"
            case RolloutLost():
                self._rollout_lost(event)
            case RolledBack():
                self._rolled_back(event)
            case GroupCompleted():
                self._require(all(self._in_window(event.step, v) for v in event.versions), "a version out of bound")
            case MicroBatchSettled():
                self._settled(event)
            case StepCommitted():
                self._committed(event)
            case RunFinished():
                self._finished(event)
        self._conserve()

    # ---- beginning and end -------------------------------------------------------------------------------------

    def _begin(self, event: RunStarted) -> None:
        self._event = event
        self._run = event
        self._time = event.time
        self._step = event.start_step
        self._version = event.start_step
        self._versions: dict[str, int] = {}
        self._roles: dict[str, str] = {}
        self._running: dict[str, TaskStarted] = {}
        self._stage: dict[tuple[int, int], str] = {}
        self._mb_version: dict[tuple[int, int], int] = {}
        self._stale: dict[int, int] = {}
        self._num_settled: dict[int, int] = {}
        self._next_index = 0
        self._num_unscored = 0
        self._num_lost = self.num_started - self.num_finished - self.num_failed
        self._published: set[int] = set()
        self._absent: dict[str, str] = {}
        self._updated: set[tuple[int, int]] = set()
        self._attempts: dict[tuple[str, int, int], int] = {}
        self._quarantined: dict[tuple[int, int], int] = {}
        self._void: set[int] = set()
        self._require(0 <= event.start_step <= event.num_steps, "start_step is outside the plan")

    def _finished(self, event: RunFinished) -> None:
        run = self._the_run
        self._require(not self._running, f"tasks still run on {', '.join(self._running)}")
        if event.outcome == "completed":
            self._require(self._step == run.num_steps, f"completed after {self._step} of {run.num_steps} steps")
            stale = [name for name, role in self._roles.items() if role == "generator" and self._behind(name)]
            self._require(not stale, f"generators without the final weights: {', '.join(stale)}")

    def _behind(self, worker: str) -> bool:
        return self._versions[worker] != self._version

    def _conserve(self) -> None:
        running = self.num_started - self.num_finished - self.num_failed - self._num_lost
        self._require(running == len(self._running), "tasks started differ from finished + failed + running")

    # ---- tasks -------------------------------------------------------------------------------------------------

    def _started(self, event: TaskStarted) -> None:
        self.num_started += 1
        worker, key = event.worker, (event.step, event.index)
        self._require(worker in self._versions, "the worker does not take part")
        self._require(worker not in self._running, f"the worker is busy with {self._running.get(worker)}")
        self._require((event.index < 0) == (event.kind in _WHOLE_STEP), "a micro-batch index where none belongs")
        self._running[worker] = event
        stage = self._stage.get(key)
        match event.kind:
            case "generate" | "assist":
                self._generation(event)
            case "score":
                self._require(stage == "generated", f"scored while {stage or 'not generated'}")
                generates = self._roles[worker] == "generator"
                self._require(self._scores_here or not generates, "a generator scores although there are scorers")
                self._stage[key] = "scoring"
                self._num_unscored -= 1
            case "update":
                self._update(event)
            case "commit":
                self._require(self._roles[worker] == "trainer", "a commit away from the trainer")
                self._require(event.step == self._step, f"a commit of a step other than {self._step}")
                self._all_settled(event.step)
            case "publish":
                self._require(event.version == self._version, f"publishes a version other than {self._version}")
            case "snapshot":
                self._require(self._roles[worker] == "trainer", "a snapshot away from the trainer")
                self._require(event.version == self._version, f"a snapshot of a version other than {self._version}")
                self._require(not self._updated, "a snapshot in the middle of a step")
            case "load":
                self._require(event.version in self._published, "loads a version that was not published")
                self._require(event.version != self._versions[worker], "loads the version it holds")
            case "evaluate":
                self._require(event.version == self._versions[worker], "evaluates a version that it does not hold")
            case _:
                pass

    def _generation(self, event: TaskStarted) -> None:
        run, key = self._the_run, (event.step, event.index)
        self._require(key not in self._stage, f"generated again while {self._stage.get(key)}")
        self._require(0 <= event.index < run.num_micro_batches, "a micro-batch outside the step")
        self._require(self._step <= event.step < run.num_steps, "a step that is over or outside the plan")
        self._require(event.version == self._versions[event.worker], "a version other than the worker's own")
        self._require(self._in_window(event.step, event.version), "staleness outside the window")
        self._require(event.stale == (event.step > event.version), "the stale mark is wrong")
        if event.stale:
            self._stale[event.step] = self._stale.get(event.step, 0) + 1
            self._require(self._stale[event.step] <= run.stale_limit, "more stale micro-batches than allowed")
        if event.kind == "assist":
            self._require(self._roles[event.worker] == "trainer", "an assist away from the trainer")
        elif not run.barrier and self._roles[event.worker] == "generator":
            self._require(not (self._scores_here and self._num_unscored), "generates while scores wait")
        self._stage[key] = "generating"
        self._mb_version[key] = event.version

    def _update(self, event: TaskStarted) -> None:
        run, key = self._the_run, (event.step, event.index)
        self._require(self._roles[event.worker] == "trainer", "an update away from the trainer")
        self._require(event.step == self._step, f"an update of a step other than {self._step}")
        self._require(self._stage.get(key) == "scored", f"updated while {self._stage.get(key) or 'not generated'}")
        self._require(event.version == self._mb_version[key], "not the version that generated it")
        self._require(self._in_window(event.step, event.version), "staleness outside the window at consumption")
        if run.update_order == "index":
            self._require(event.index == self._next_index, f"index order wants {self._next_index}")
        if run.barrier:
            scored = sum(
                stage in {"scored", "settled"} for (step, _), stage in self._stage.items() if step == event.step
            )
            self._require(scored == run.num_micro_batches, "updates before the barrier")
        self._stage[key] = "updating"

    def _ended(self, event: TaskFinished | TaskFailed) -> None:
        started = self._running.pop(event.worker, None)
        self._require(started is not None and started.task == event.task, "ends a task that does not run there")
        assert started is not None  # noqa: S101 - required above
        if isinstance(event, TaskFailed):
            self.num_failed += 1
            if event.task in self._void:
                self._void.discard(event.task)
            elif event.kind == "score":  # its groups are dropped, it is tried again, or the run ends
                self._stage[event.step, event.index] = "scored"
            elif event.kind in {"generate", "assist"}:
                del self._stage[event.step, event.index]
                self._stale[event.step] = self._stale.get(event.step, 0) - started.stale
            elif event.kind == "load":
                self._versions[event.worker] = NO_VERSION
            return
        self.num_finished += 1
        self._require(event.task not in self._void, "a task from before the run went back counts")
        self._require(event.version == started.version and event.kind == started.kind, "ends as another task")
        key = (event.step, event.index)
        self._attempts.pop((event.kind.replace("assist", "generate"), *key), None)
        match event.kind:
            case "generate" | "assist":
                self._require(self._versions[event.worker] == event.version, "the worker's version changed meanwhile")
                self._stage[key] = "generated"
                self._num_unscored += 1
            case "score":
                self._stage[key] = "scored"
            case "update":
                self._stage[key] = "updated"
            case "commit":
                self._version = event.version
                self._versions[event.worker] = event.version
            case "publish":
                self._published.add(event.version)
            case "load":
                self._versions[event.worker] = event.version
            case _:
                pass

    # ---- steps -------------------------------------------------------------------------------------------------

    def _settled(self, event: MicroBatchSettled) -> None:
        key = (event.step, event.index)
        wanted = "updated" if event.outcome == "updated" else "scored"
        self._require(self._stage.get(key) == wanted, f"settles as {event.outcome} while {self._stage.get(key)}")
        self._require(event.version == self._mb_version[key], "settles with another version")
        self._require(event.staleness == event.step - event.version, "settles with another staleness")
        self._require(event.outcome != "updated" or key not in self._quarantined, "trains what is in quarantine")
        self._stage[key] = "settled"
        if event.outcome == "updated":
            self._updated.add(key)
        self._num_settled[event.step] = self._num_settled.get(event.step, 0) + 1
        self._advance()

    def _all_settled(self, step: int) -> None:
        run = self._the_run
        settled = self._num_settled.get(step, 0)
        self._require(settled == run.num_micro_batches, f"{settled} of {run.num_micro_batches} micro-batches settled")

    def _committed(self, event: StepCommitted) -> None:
        self._require(event.step == self._step, f"commits a step other than {self._step}")
        self._require(event.version == event.step + 1 == self._version, "a version other than step + 1")
        self._all_settled(event.step)
        self.steps_committed.append(event.step)
        for key in [key for key in self._stage if key[0] == event.step]:
            del self._stage[key]
            del self._mb_version[key]
        self._stale.pop(event.step, None)
        self._num_settled.pop(event.step)
        self._updated.clear()
        self._step += 1
        self._next_index = 0
        self._advance()

    def _advance(self) -> None:
        while self._stage.get((self._step, self._next_index)) == "settled":
            self._next_index += 1

    # ---- losses ------------------------------------------------------------------------------------------------

    def _lost(self, event: WorkerLost) -> None:
        worker = event.worker
        self._require(worker not in self._running, "the worker is lost during a task that did not fail")
        self._require(worker in self._versions or worker in self._absent, "the worker does not take part")
        self._versions.pop(worker, None)
        self._roles.pop(worker, None)
        self._absent.pop(worker, None)
        if event.restart_in_s is not None:
            self._absent[worker] = event.role

    def _restarted(self, event: WorkerRestarted) -> None:
        self._require(self._absent.pop(event.worker, None) == event.role, "the worker was not lost")
        self._versions[event.worker] = event.version
        self._roles[event.worker] = event.role
        if event.role != "trainer":
            return
        self._require(event.version == self._version, f"a trainer comes back that does not hold {self._version}")
        for key in [
            key for key, stage in self._stage.items() if key in self._updated or stage in {"updating", "updated"}
        ]:
            if self._stage[key] == "settled":
                self._num_settled[self._step] -= 1
            self._stage[key] = "scored"
        self._updated.clear()
        self._next_index = 0
        self._advance()

    def _retried(self, event: TaskRetried) -> None:
        key = (event.step, event.index)
        attempt = (event.kind.replace("assist", "generate"), *key)
        anew = event.kind == "evaluate" and event.attempt == 2  # it was given up with its weights, which came back
        self._require(anew or event.attempt == self._attempts.get(attempt, 1) + 1, "skips an attempt")
        self._attempts[attempt] = event.attempt
        if event.kind == "score":
            self._stage[key] = "generated"
            self._num_unscored += 1

    def _rollout_lost(self, event: RolloutLost) -> None:
        key = (event.step, event.index)
        stage = self._stage.pop(key, "not generated")
        self._require(stage in {"generated", "scored", "updating"}, f"a rollout is lost while {stage}")
        reading = [task for task in self._running.values() if task.task not in self._void]
        self._require(all(key != (task.step, task.index) for task in reading), "while a task reads it")
        self._require(event.version == self._mb_version[key], "not the version that generated it")
        self._num_unscored -= stage == "generated"
        self._stale[event.step] = self._stale.get(event.step, 0) - (event.step > event.version)

    def _rolled_back(self, event: RolledBack) -> None:
        run = self._the_run
        self._require(event.from_version == self._version == self._step, "goes back from another version")
        self._require(run.start_step <= event.version < event.from_version, "goes back to what is not before")
        self._step = self._version = event.version
        for task in self._running.values():
            if task.kind != "load" or task.version > event.version:
                self._void.add(task.task)
        for worker, version in self._versions.items():
            running = self._running.get(worker)
            if version > event.version or (
                running is not None and running.task in self._void and running.kind == "load"
            ):
                self._versions[worker] = NO_VERSION
        for ledger in (self._stage, self._stale, self._num_settled):
            ledger.clear()
        self._updated.clear()
        for key, version in self._quarantined.items():
            if key[0] >= event.version:
                self._stage[key], self._mb_version[key] = "scored", version
        self._published = {version for version in self._published if version <= event.version}
        self._num_unscored = self._next_index = 0
        self.steps_committed = [step for step in self.steps_committed if step < event.version]

    # ---- what the rules are made of --------------------------------------------------------------------------------

    @property
    def _the_run(self) -> RunStarted:
        assert self._run is not None  # noqa: S101 - __call__ checked
        return self._run

    @property
    def _scores_here(self) -> bool:
        """Whether generators score: there are no scorers, nor will any come back."""
        return "scorer" not in self._roles.values() and "scorer" not in self._absent.values()

    def _in_window(self, step: int, version: int) -> bool:
        return 0 <= step - version < self._the_run.window

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            self._fail(rule)

    def _fail(self, rule: str) -> None:
        raise InvariantViolation(f"event {self.num_events}: {rule}: {self._event!r}")
