"""Algorithm 1 of the paper, as one asyncio task.

::

    plan ──candidate──▶ generate / assist ──▶ SQ ──▶ score ──▶ groups ──▶ UQ ──▶ update ──▶ commit ──▶ publish ──▶ load
             ▲                                                                                │                     │
             └──────────────── admission: step − version < W, stale quota ◀───────────────────┴─────────────────────┘

    queue            waits for                                   is unblocked by
    plan             an idle worker whose version is admitted    a finished task, a load, a commit
    SQ               an idle generator (or scorer)               any task of theirs that ends
    groups           the last reward of the group                a score
    UQ               the trainer, and its turn in index order    an update, an assist
    commit           all B micro-batches settled                 the last update
    load             the end of the worker's own trajectory      pull: its task; hold: everybody's

Where the printed listing is silent or cannot be executed, ``tests/sched/test_listing.py`` holds one test for each gap.
The loop sleeps only on its inbox. A completion costs the same with ten workers and with ten thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import msgspec

from digen.errors import (
    ConfigError,
    DigenError,
    PayloadLost,
    ProtocolError,
    RankFailed,
    StalenessViolation,
    StepFailed,
    WorkerDied,
    WorkerTimeout,
)
from digen.events import (
    AnyEvent,
    BubbleOpened,
    CheckpointSaved,
    Loss,
    Quarantined,
    Role,
    RunFinished,
    RunStarted,
    Sink,
    TagDecided,
    TaskFailed,
    TaskFinished,
    TaskStarted,
    fan_out,
)
from digen.groups import GroupAssembler
from digen.handles import Generator, Scorer, Trainer
from digen.sched.admission import within_bound
from digen.sched.checks import check_handles, needed_methods, rules_from
from digen.sched.lanes import Checkpointer, Inbox
from digen.sched.lookahead import measured, situation, until_commit
from digen.sched.meter import Meter
from digen.sched.profile import Profile
from digen.sched.recovery import Budget, Recovery
from digen.sched.results import Results, describe
from digen.sched.roster import Roster
from digen.sched.select import bubble_emerges, describe_bubble, idle_cause, select, select_sync, select_trainer
from digen.sched.snapshots import Snapshots
from digen.sched.state import State, Step, Task
from digen.sched.story import Story
from digen.sched.tag import Decision, Durations, Policy, StaleStart, policy_from
from digen.types import EvaluationRequest, Publication, StepReport

if TYPE_CHECKING:
    from digen.config import AdvantageSection, ScheduleConfig
    from digen.plan import Plan
    from digen.restarts import RestartsSection

_MAX_UNREAD_REPORTS = 10_000
_WRITING_GRACE_S = 20.0
"""How long a run that has failed waits for a checkpoint that is being written."""


class Scheduler:
    """Runs a plan on handles. Use as an async context manager and iterate over it: one StepReport per commit.

    ::

        async with Scheduler(plan, generators=[...], trainer=trainer, config=ScheduleConfig(window=2)) as scheduler:
            async for step in scheduler:
                print(step.index, step.metrics()["reward/mean"])

    The schedule runs in a task of its own; a slow consumer never delays a dispatch. Leaving the ``async with``
    cancels, awaits and reaps everything it began. A worker that is lost is started again if its handle has ``restart``,
    and what it was doing is repeated; a loss that the run cannot survive, and any other failure, ends it: iteration
    raises :class:`digen.errors.StepFailed` with the handle's exception as its cause.

    Args:
        plan: what to generate.
        name: the run's name in events and reports.
        generators: handles that generate and load; with ``score`` they also score.
        trainer: the handle that trains; with ``generate`` it may assist (TAG).
        scorers: handles that only score; with any, generators never score.
        config: how to schedule; default :class:`digen.ScheduleConfig`.
        restarts: what is started again and how often; default :class:`digen.restarts.RestartsSection`.
        advantage: how rewards become advantages; default per prompt.
        weights: of the reward's heads by name, where ``advantage`` combines them.
        defer_divisor: hand out advantages without a divisor of the whole step, and give it to the trainer's commit as
            a third argument. Exact where the loss is homogeneous in the advantage and does not clamp it.
        policy: a TAG policy of your own, in place of ``config.tag``.
        sinks: called with every event, in order, and must not block. One that raises ends the run, because somebody
            may rely on it; put those that only show it, such as trackers, into :func:`digen.events.tolerated`.
        on_commit: called with every StepReport as it is made; must not block.
        on_publish: called with every Publication; must not block.
        checkpointer: when and how to save.
        evaluate: asked after every commit what its version is to be evaluated on, by a generator that holds it; with
            ``None`` it is not.
        profile: durations that are known already, for policies that compute with them.
        start_step: first step, for a resumed run; equals the optimizer steps in the trainer's weights.
        quarantined: micro-batches that an earlier run of the plan gave up. Where groups may be dropped these are not
            tried again.

    Raises:
        ConfigError: the handles do not fit the config, or the plan and ``advantage`` not each other.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        name: str = "run",
        generators: Sequence[Generator] = (),
        trainer: Trainer,
        scorers: Sequence[Scorer] = (),
        config: ScheduleConfig | None = None,
        restarts: RestartsSection | None = None,
        advantage: AdvantageSection | None = None,
        weights: Mapping[str, float] | None = None,
        defer_divisor: bool = False,
        policy: Policy | None = None,
        sinks: Iterable[Sink] = (),
        on_commit: Callable[[StepReport], None] | None = None,
        on_publish: Callable[[Publication], None] | None = None,
        checkpointer: Checkpointer | None = None,
        evaluate: Callable[[int], EvaluationRequest | None] | None = None,
        profile: Profile | None = None,
        start_step: int = 0,
        quarantined: Iterable[Quarantined] = (),
    ) -> None:
        from digen.config import AdvantageSection, ScheduleConfig
        from digen.restarts import RestartsSection

        self._rules = restarts if restarts is not None else RestartsSection()
        self._budget = Budget(self._rules)
        self._config = config if config is not None else ScheduleConfig()
        self._assemble = partial(
            GroupAssembler,
            advantage=advantage if advantage is not None else AdvantageSection(),
            weights=weights,
            defer_divisor=defer_divisor,
        )
        self._plan = plan
        self._name = name
        self._trainer = trainer
        self._generators = generators
        self._scorers = scorers
        names = [handle.name for handle in (trainer, *generators, *scorers)]
        if len(set(names)) < len(names):
            raise ConfigError(f"worker names must be unique, got {', '.join(names)}")
        if not 0 <= start_step <= plan.num_steps:
            raise ConfigError(f"start_step={start_step} is outside the plan's steps, 0 to {plan.num_steps}")
        if start_step < plan.num_steps:
            self._assemble(plan.step(start_step))
        self._policy = policy if policy is not None else policy_from(self._config.resolved_tag)
        self._gate = self._ask_gate if self._policy.gate is not None else None
        self._story = Story()
        self._sinks: tuple[Sink, ...] = (self._story.remember, *sinks)
        self._emit = fan_out(self._sinks)
        self._on_commit = on_commit
        self._on_publish = on_publish
        self._checkpointer = checkpointer
        self._evaluate = evaluate
        self._start_step = start_step
        self._quarantined = tuple(quarantined)
        self._profile = profile if profile is not None else Profile()
        self._owned: list[Any] = []
        self._reports: deque[StepReport] = deque()
        self._missed = 0
        self._report_ready = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._error_seen = False
        self._stopped = False
        self.outcome = "running"
        """running, completed, drained, stopped or failed."""
        self._num_tasks = 0
        self._taken: Iterator[tuple[Task, Any, Exception | None]] = iter(())
        """Completions out of the inbox that are being applied."""
        self._writing: tuple[Task, asyncio.Future[str]] | None = None
        """The checkpoint that is being written while the trainer goes on."""
        self._state: State
        self._roster: Roster
        self._results: Results
        self._recovery: Recovery

    # ---- for users ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._loop)
        try:
            await self._start_handles([self._trainer, *self._generators, *self._scorers])
            self._prepare()
        except BaseException:
            await self._reap()
            raise
        self._runner = self._loop.create_task(self._run(), name="digen-scheduler")
        self._runner.add_done_callback(self._ran)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None  # noqa: S101 - __aenter__ set it
        if self.outcome == "running":
            self._runner.cancel()
        await self._reap()
        if error is None and self._error is not None and not self._error_seen:
            self._error_seen = True
            raise self._error

    def __aiter__(self) -> AsyncIterator[StepReport]:
        return self

    async def __anext__(self) -> StepReport:
        self._entered()
        while not self._reports:
            if self._runner is not None and self._runner.done():
                if self._error is not None and not self._error_seen:
                    self._error_seen = True
                    raise self._error
                raise StopAsyncIteration
            self._report_ready.clear()
            await self._report_ready.wait()
        report = self._reports.popleft()
        return msgspec.structs.replace(report, missed=self._missed) if self._missed else report

    def _entered(self) -> None:
        if not hasattr(self, "_state"):
            raise ConfigError("enter the scheduler first: async with Scheduler(...) as scheduler")

    def drain(self) -> None:
        """Stop admitting, finish the step that has begun, save a checkpoint, end. Iteration then ends.

        An evaluation that has not begun is left out.
        """
        self._entered()
        state = self._state
        state.evaluation_due = None
        step = state.steps.get(state.step)
        begun = step is not None and bool(step.num_generating or step.rollouts)
        state.last_step = min(state.last_step, state.step + begun)
        if state.step == state.last_step:
            self._results.save_if_due(last=True)
        self._inbox.wake()

    def stop(self) -> None:
        """End now. What runs is abandoned; iteration ends."""
        self._entered()
        self._stopped = True
        self._inbox.wake()

    async def add_generator(self, handle: Generator) -> None:
        """Let another generator take part; it gets the current weights before its first task."""
        await self._add(handle, "generator")

    async def add_scorer(self, handle: Scorer) -> None:
        """Let another scorer take part."""
        await self._add(handle, "scorer")

    def remove_worker(self, name: str) -> None:
        """Give a generator or scorer no more work; it leaves when its task ends.

        Raises:
            ConfigError: there is no such worker, it is the trainer, or it is the last of its role.
        """
        self._entered()
        state = self._state
        worker = state.generators.get(name) or state.scorers.get(name)
        if worker is None:
            raise ConfigError(f"no generator or scorer is called {name!r}; there are {', '.join(self._roster.lanes)}")
        team = state.generators if worker.role == "generator" else state.scorers
        if all(other.leaving for other in team.values() if other is not worker):
            raise ConfigError(f"{name!r} is the last {worker.role} and cannot be removed")
        worker.leaving = True
        if worker.task is None:
            state.withdraw(worker)
            self._roster.leave(worker)

    @property
    def step(self) -> int:
        """Optimizer steps finished so far; also the step being trained."""
        self._entered()
        return self._state.step

    def statistics(self) -> dict[str, Any]:
        """A snapshot for debugging: step, queue depths, and what every worker does."""
        self._entered()
        state = self._state
        return {
            "step": state.step,
            "scoring_queue": len(state.scoring_queue),
            "update_queue": len(state.current.ready) if state.step < state.last_step else 0,
            "num_generating": state.num_generating,
            "workers": {
                name: lane.worker.task.kind if lane.worker.task else "idle" for name, lane in self._roster.lanes.items()
            }
            | {worker.name: "restarting" for worker in self._roster.restarts},
        }

    def story(self, step: int, index: int) -> list[str]:
        """What happened to one micro-batch lately, a line an event."""
        return self._story.of_micro_batch(step, index)

    # ---- the loop ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        state = self._state
        try:
            self._recovery.heed(self._quarantined)
            self._recovery.leave_out_quarantined()
            while not state.finished and not self._stopped:  # 4
                if (task := select_sync(state)) is not None:  # 27-29
                    while task is not None:
                        self._launch(task)
                        task = select_sync(state)
                    await asyncio.sleep(0)  # let the lane run: what takes no time is over before others are asked
                    if self._inbox:
                        self._apply(self._inbox.take())
                        continue
                while (task := select(state, self._gate)) is not None:  # 5-9
                    self._launch(task)
                if bubble_emerges(state, self._policy):
                    await asyncio.sleep(0)  # let lanes run: a task of no length makes no bubble
                if self._inbox:
                    self._apply(self._inbox.take())
                    continue
                while (task := select_trainer(state, self._policy, self._ask)) is not None:  # 18-22, BTS
                    self._launch(task)
                self._open_bubbles()
                if not state.finished:
                    self._apply(await self._inbox.drain())  # 11, 23: every completion of this instant, then decide
        except BaseException as error:
            await self._end("failed" if isinstance(error, Exception) else "stopped", error)
            if isinstance(error, Exception) and not isinstance(error, DigenError):
                raise StepFailed(
                    f"step {state.step} failed: a sink, hook or policy raised {type(error).__name__}: {error}"
                ) from error
            raise
        drained = state.last_step < self._plan.num_steps
        await self._end("stopped" if self._stopped else "drained" if drained else "completed")

    def _launch(self, task: Task) -> None:
        worker = task.worker
        task.id = self._num_tasks
        self._num_tasks += 1
        task.started = self._now()
        worker.task = task
        if worker.role == "generator":
            self._state.num_busy_generators += 1
            self._state.num_loading += task.kind == "load"
        self._results.began(task)
        self._emit(
            TaskStarted(task.started, task.id, task.kind, worker.name, task.step, task.index, task.version, task.stale)
        )
        if task.kind == "update":
            self._assert_bound(task)
        lane = self._roster.lanes[worker.name]
        lane.give(task, self._budget.deadline_s(self._profile, task) if lane.killable else None)

    def _apply(self, completions: Iterable[tuple[Task, Any, Exception | None]]) -> None:
        self._taken = iter(completions)  # first: whatever fails now, none of them is forgotten
        self._readmit()
        self._look_at_writing()
        for task, result, error in self._taken:
            now = self._now()  # each time: what follows a completion emits events with later times
            if task.worker.task is not task:
                self._recovery.fence()
                continue
            if task.void or (error is not None and not self._results.may_drop(task, error)):
                self._results.discard(task, result)
                self._fail(task, error if error is not None else DigenError("the run went back behind it"))
                continue
            try:
                stats = self._results.take(task, result) if error is None else self._results.drop(task, error)
            except Exception as problem:
                self._fail(task, problem)
                continue
            self._profile.add(task.worker.name, task.worker.role, task.measured_as, now - task.started)
            self._meter.finished(task, now)
            self._idle(task)
            if error is None:
                self._recovery.finished(task)
                self._emit(
                    TaskFinished(
                        now,
                        task.id,
                        task.kind,
                        task.worker.name,
                        task.step,
                        task.index,
                        task.version,
                        task.started,
                        stats,
                    )
                )
                self._results.follow(task, result)
                if task.kind == "commit":
                    self._recovery.leave_out_quarantined()
            else:
                self._emit(_task_failed(task, now, str(error)))
                self._results.follow_drop(task, error)
            if task.worker.leaving:
                self._roster.leave(task.worker)
        if self._policy.reopens and self._state.bubble_asked:
            self._state.bubble_asked, self._state.bubble_reopened = False, True

    def _idle(self, task: Task) -> None:
        worker, state = task.worker, self._state
        state.ended(task)
        if worker.role == "trainer" and task.kind not in {"switch", "publish", "snapshot", "checkpoint"}:
            state.bubble_asked = state.bubble_reopened = False
        if not worker.leaving:
            self._roster.set_idle(worker)

    # ---- losses ------------------------------------------------------------------------------------------------

    def _fail(self, task: Task, error: Exception) -> None:
        """A task failed: go on without its worker, or with it, or end the run."""
        worker = task.worker
        try:
            lost = self._recovery.judge(task, error, restartable=self._roster.restartable(worker))
        except Exception:
            raise self._failed(task, error) from error
        self._emit(_task_failed(task, self._now(), str(error)))
        if lost is not None:
            self._state.ended(task)
            self._roster.lose(worker, lost, str(error))
            if worker.role == "trainer":
                self._recovery.trainer_lost()
                self._give_up_writing()
        else:
            self._idle(task)
        try:
            self._recovery.undo(task, error)
        except Exception as problem:
            raise self._failure(task, problem) from error
        if lost is not None or isinstance(error, PayloadLost):
            self._recovery.take_stock()
        if lost is None and worker.leaving:
            self._roster.leave(worker)

    def _readmit(self) -> None:
        """Let those take part again who are back; try again with those who could not be started."""
        while self._inbox.restarted:
            restart = self._inbox.restarted.popleft()
            worker, error = restart.worker, restart.error
            self._roster.restarted(restart)
            try:
                if error is None:
                    if worker.role == "trainer":
                        self._recovery.trainer_back(restart.version)
                    self._meter.count("worker/restarts")
                    self._roster.rejoin(worker, restart.version)
                    self._recovery.take_stock()
                else:
                    reason: Loss = "hung" if isinstance(error, WorkerTimeout) else "died"
                    lost = self._recovery.lose(worker, reason, error, restartable=True)
                    self._roster.lose_again(worker, lost, str(error))
            except Exception as problem:
                what = f"worker {worker.name!r} was lost and could not be started again: {problem}"
                raise StepFailed(f"step {self._state.step} failed: {what}") from problem

    # ---- checkpoints that are written while the trainer goes on --------------------------------------------------

    def _follow_writing(self, task: Task, path: asyncio.Future[str]) -> None:
        self._writing, self._state.writing = (task, path), True
        path.add_done_callback(lambda _: self._inbox.wake())

    def _look_at_writing(self) -> None:
        """Say that the checkpoint is complete, if it is by now, or why it is none."""
        if self._writing is None or not self._writing[1].done():
            return
        (task, path), self._writing, self._state.writing = self._writing, None, False
        error = None if path.cancelled() else path.exception()
        if error is None and not path.cancelled():
            self._results.saved(task, path.result())
        elif error is None or isinstance(error, WorkerDied | WorkerTimeout | ProtocolError | RankFailed):
            # The trainer is lost, as its next task will find out; at the end of the run that is another save.
            self._results.unsaved(task.version)
            self._results.save_if_due(last=self._state.step >= self._state.last_step)
        elif isinstance(error, Exception):
            raise self._failure(task, error) from error
        else:
            raise error

    def _give_up_writing(self) -> None:
        """It was lost with the trainer, unless it is complete by now."""
        if self._writing is not None and not self._writing[1].cancel():
            self._look_at_writing()
        elif self._writing is not None:
            self._results.unsaved(self._writing[0].version)
            self._writing, self._state.writing = None, False

    def _open_bubbles(self) -> None:
        for worker in self._roster.take_idle():
            self._emit(BubbleOpened(self._now(), worker.name, idle_cause(self._state, worker)))

    def _ask(self, state: State, step: Step) -> Decision:
        """Ask the TAG policy about the bubble that emerged."""
        now = self._now()
        bubble = describe_bubble(state, step, self._durations(), lambda: situation(state, step, self._profile, now))
        decision = self._policy.decide(bubble)
        if not decision.assist and self._policy.reopens and (bubble.reopened or bubble.can_update):
            return decision  # no bubble, or one that is known
        self._meter.decided(decision, now, self._now() - now, self._profile.mean("trainer", "commit"))
        self._emit(
            TagDecided(
                self._now(),
                state.trainer.name,
                step.number,
                decision.assist,
                self._policy.name,
                decision.reason,
                decision.saving_s,
            )
        )
        return decision

    def _ask_gate(self, step: int) -> bool:
        """Ask the TAG policy about a stale start."""
        assert self._policy.gate is not None  # noqa: S101 - the caller checked
        state, profile = self._state, self._profile
        until_commit_s = until_commit(state, profile, self._now())
        return self._policy.gate(StaleStart(step, until_commit_s, lambda: measured(state, profile)))

    # ---- bookkeeping -------------------------------------------------------------------------------------------

    def _assert_bound(self, task: Task) -> None:
        if not within_bound(task.step, task.version, window=self._state.rules.window):
            story = "\n".join(self._story.of_micro_batch(task.step, task.index))
            raise StalenessViolation(
                f"update of step {task.step} micro-batch {task.index} would consume version {task.version} with "
                f"window {self._state.rules.window}; this is a bug in digen. Its story:\n{story}"
            )

    def _report(self, report: StepReport) -> None:
        if len(self._reports) >= _MAX_UNREAD_REPORTS:
            self._reports.popleft()
            self._missed += 1
        self._reports.append(report)
        self._report_ready.set()
        if self._on_commit is not None:
            self._on_commit(report)

    def _durations(self) -> Durations:
        mean = self._profile.mean
        switch_in_s, switch_out_s = mean("trainer", "switch_in"), mean("trainer", "switch_out")
        return Durations(
            generate_s=mean("generator", "generate"),
            score_s=mean("scorer" if self._state.scorers else "generator", "score"),
            update_s=mean("trainer", "update"),
            assist_s=mean("trainer", "assist"),
            switch_s=switch_in_s + switch_out_s if switch_in_s is not None and switch_out_s is not None else None,
        )

    def _failed(self, task: Task, error: Exception) -> StepFailed:
        self._emit_despite(_task_failed(task, self._now(), str(error)))
        task.worker.task = None
        return self._failure(task, error)

    def _failure(self, task: Task, error: Exception) -> StepFailed:
        # A worker's own error names worker and task already.
        named = repr(task.worker.name) in str(error) or describe(task) in str(error)
        what = str(error) if named else f"{describe(task)}: {error}"
        failure = StepFailed(f"step {self._state.step} failed: {what}")
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        return failure

    def _now(self) -> float:
        return self._loop.time() - self._origin

    # ---- beginning and end -------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Check the started handles against the config and set up the state."""
        config, plan = self._config, self._plan
        trainer, generators, scorers = self._trainer, self._generators, self._scorers
        check_handles(trainer, generators, scorers, start_step=self._start_step, evaluate=self._evaluate is not None)
        rules = rules_from(config, plan, self._policy, trainer, generators)
        self._state = State(plan, self._assemble, rules, start_step=self._start_step)
        self._origin = self._loop.time()
        self._meter = Meter(0.0)
        snapshots = Snapshots(trainer, self._rules, lambda payload: self._roster.release(self._state.trainer, payload))
        self._roster = Roster(
            self._state,
            self._meter,
            emit=self._emit,
            now=self._now,
            inbox=self._inbox,
            checkpointer=self._checkpointer,
            snapshots=snapshots,
            rules=self._rules,
            loop=self._loop,
        )
        self._results = Results(
            self._state,
            self._meter,
            emit=self._emit,
            now=self._now,
            workers=self._roster.workers,
            release=self._roster.release,
            report=self._report,
            on_publish=self._on_publish,
            checkpointer=self._checkpointer,
            writing=self._follow_writing,
            snapshots=snapshots,
            evaluate=self._evaluate,
        )
        self._recovery = Recovery(
            self._state,
            self._results,
            self._meter,
            budget=self._budget,
            rules=self._rules,
            emit=self._emit,
            now=self._now,
            story=self._story,
        )
        self._emit(
            RunStarted(
                0.0,
                num_steps=plan.num_steps,
                start_step=self._start_step,
                num_micro_batches=plan.num_micro_batches,
                window=rules.window,
                stale_limit=rules.stale_limit,
                sync=config.sync,
                update_order=config.update_order,
                tag=self._policy.name,
                barrier=rules.barrier,
                info={"name": self._name, "mode": config.mode, "axis": plan.axis},
            )
        )
        self._roster.join(trainer, "trainer")
        for handle in generators:
            self._roster.join(handle, "generator")
        for scorer in scorers:
            self._roster.join(scorer, "scorer")
        self._state.recount_outdated()

    async def _add(self, handle: Any, role: Role) -> None:
        self._entered()
        self._check_may_join(handle)
        await self._start_handles([handle])
        self._check_may_join(handle)
        if role == "generator" and not hasattr(self._trainer, "publish"):
            raise ConfigError(f"trainer {self._trainer.name!r} has no method 'publish', which generators need")
        for method in needed_methods(role, scorers=bool(self._state.scorers), evaluate=self._evaluate is not None):
            if not hasattr(handle, method):
                raise ConfigError(f"worker {handle.name!r} has no method {method!r}")
        if role == "generator" and hasattr(handle, "encode") != self._state.rules.encodes:
            raise ConfigError(f"worker {handle.name!r}: all generators must have the method 'encode', or none")
        self._roster.join(handle, role)
        self._state.recount_outdated()
        self._inbox.wake()

    def _check_may_join(self, handle: Any) -> None:
        if self.outcome != "running":
            raise ConfigError(f"the run is over ({self.outcome}); worker {handle.name!r} cannot join it")
        if handle.name in self._roster.lanes or handle.name in self._state.absent:
            raise ConfigError(f"a worker called {handle.name!r} takes part already; names are unique in a run")

    async def _end(self, outcome: Any, error: BaseException | None = None) -> None:
        """Cancel what runs, account for it, say so."""
        self.outcome = outcome
        await self._cancel_lanes()
        for task, result, _ in (*self._taken, *self._inbox.take()):  # what nobody has looked at yet
            if isinstance(result, asyncio.Future) and not result.done():
                self._writing = task, result
            if task.worker.task is task:  # and no answer that came twice, or of an earlier life
                self._results.discard(task, result)
        if self._writing is not None:
            await self._end_writing(outcome == "failed")
        emit = self._emit if error is None else self._emit_despite
        for worker in self._roster.workers():
            if worker.task is not None:
                emit(_task_failed(worker.task, self._now(), "cancelled: the run ended"))
        emit(RunFinished(self._now(), outcome, str(error) if error is not None else ""))

    async def _end_writing(self, wait: bool) -> None:
        """Leave no checkpoint half-written that may yet be complete, though the run has failed for another reason."""
        assert self._writing is not None  # noqa: S101 - the caller looked
        task, path = self._writing
        if wait:
            await asyncio.wait([path], timeout=_WRITING_GRACE_S)
        if path.cancel():
            await asyncio.wait([path])
        self._writing = None
        if not path.cancelled() and path.exception() is None:
            self._emit_despite(CheckpointSaved(self._now(), task.version, path.result()))

    def _emit_despite(self, event: AnyEvent) -> None:
        """Emit although the run has failed: a sink that raises now must not hide why."""
        for sink in self._sinks:
            with contextlib.suppress(Exception):
                sink(event)

    def _ran(self, runner: asyncio.Task[None]) -> None:
        if not runner.cancelled():
            self._error = runner.exception()
        self._report_ready.set()

    async def _start_handles(self, handles: Sequence[Any]) -> None:
        """Start the handles that can be started and are not; those are ours to close."""
        startable = [handle for handle in handles if hasattr(handle, "start") and not getattr(handle, "started", False)]
        self._owned += startable
        results = await asyncio.gather(*(handle.start() for handle in startable), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _reap(self) -> None:
        """Leave nothing behind, whatever cancellation comes meanwhile; that is raised afterwards."""
        closing = self._loop.create_task(self._close(), name="digen-closing")
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not closing.done():
                try:
                    await asyncio.wait([closing])
                except asyncio.CancelledError as error:
                    cancelled = error
        closing.result()
        if cancelled is not None:
            raise cancelled

    async def _cancel_lanes(self) -> None:
        if hasattr(self, "_roster") and (ending := self._roster.cancel()):
            await asyncio.wait(ending)

    async def _close(self) -> None:
        try:
            if self._runner is not None:
                await asyncio.wait([self._runner])
                if self.outcome == "running":  # it was cancelled before its first turn
                    await self._end("stopped")
            await self._cancel_lanes()
            if self._runner is not None:
                self._results.let_go()
        finally:
            owned, self._owned = self._owned, []
            closers = [handle.aclose() for handle in owned if hasattr(handle, "aclose")]
            await asyncio.gather(*closers, return_exceptions=True)


def _task_failed(task: Task, now: float, error: str) -> TaskFailed:
    return TaskFailed(now, task.id, task.kind, task.worker.name, task.step, task.index, task.started, error)
