"""The exact discrete-event model of the schedule, shared by search, planner and tests.

:func:`simulate` plays a whole run and returns every task. It follows :mod:`digen.sched.select` rule by rule, and the
scheduler on :class:`digen.SimWorker` does the same tasks at the same times. :mod:`digen.sched.bubbles` holds the same
rules for one step in a compressed form that can be searched.

The order inside one instant: every completion, then commit and publish, then generators by index (load, score,
generate), then whatever of theirs takes no time (it makes no bubble), then trainers by index. Times may be of any kind
that adds and compares; they are annotated ``float``, and ints and Fractions stay exact.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from digen.errors import ConfigError
from digen.events import TaskKind
from digen.sched.admission import admits
from digen.sched.tag import Bubble, Decision, Durations, Policy, StaleStart

if TYPE_CHECKING:
    from digen.sched.bubbles import StepState


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What is to be scheduled: durations by worker group, counts and rules. The paper's letters are in brackets.

    There are as many generator groups as ``generate_s`` has entries (G) and as many trainer groups as ``update_s`` has
    (T). With no generator group the run is colocated: the trainers also score and generate (stage by stage: barrier).

    Raises:
        ConfigError: a count, duration or rule makes no sense; the message names it.
    """

    num_micro_batches: int
    """Micro-batches in a step (B)."""
    num_steps: int = 1
    """Steps (S)."""
    generate_s: tuple[float, ...] = ()
    """A generation, by generator group (g)."""
    score_s: tuple[float, ...]
    """A score, by generator group (r); by trainer group if there is no generator."""
    update_s: tuple[float, ...]
    """An update, by trainer group (u)."""
    assist_s: tuple[float, ...]
    """A generation on the trainer, by trainer group (h)."""
    switch_in_s: tuple[float, ...]
    """From training to generation, by trainer group (c_load)."""
    switch_out_s: tuple[float, ...]
    """Back to training, by trainer group (c_off)."""
    commit_s: float = 0
    """The optimizer step (y_opt)."""
    load_s: float = 0
    """A generator takes over new weights (y_sync)."""
    window: int = 1
    """Staleness stays below it (W)."""
    stale_limit: int = 0
    """Most stale micro-batches in a step: :func:`digen.sched.admission.stale_limit`."""
    sync: Literal["hold", "pull"] = "pull"
    """Weight sync, as in :class:`digen.ScheduleConfig`."""
    order: Literal["index", "ready"] = "index"
    """Update order, as in :class:`digen.ScheduleConfig`."""
    barrier: bool = False
    """Whether a stage waits for the whole one before it (mode naive)."""
    lazy_switch: bool = False
    """Whether a trainer stays switched between assists that follow each other."""

    def __post_init__(self) -> None:
        if not self.update_s:
            raise ConfigError("update_s is empty: there must be at least one trainer group")
        trainers = ("update_s", "assist_s", "switch_in_s", "switch_out_s")
        wanted = dict.fromkeys(trainers, self.num_trainers) | {"score_s": self.num_generators or self.num_trainers}
        for name, count in wanted.items():
            if len(getattr(self, name)) != count:
                raise ConfigError(f"{name} must have {count} entries, one per group, got {getattr(self, name)}")
        for name in ("generate_s", *wanted, "commit_s", "load_s"):
            value = getattr(self, name)
            if not all(0 <= item < math.inf for item in (value if isinstance(value, tuple) else (value,))):
                raise ConfigError(f"{name} must be finite and not negative, got {value}")
        for name, least in (("num_micro_batches", 1), ("num_steps", 1), ("window", 1), ("stale_limit", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def num_generators(self) -> int:
        """Generator groups (G)."""
        return len(self.generate_s)

    @property
    def num_trainers(self) -> int:
        """Trainer groups (T)."""
        return len(self.update_s)

    @property
    def durations(self) -> Durations:
        """Means over groups: what a policy is told."""
        mean = {name: sum(getattr(self, name)) / max(1, len(getattr(self, name))) for name in _BY_GROUP}
        switch_s = mean.pop("switch_in_s") + mean.pop("switch_out_s")
        return Durations(**mean, switch_s=switch_s)


_BY_GROUP = ("generate_s", "score_s", "update_s", "assist_s", "switch_in_s", "switch_out_s")


class Task(Struct, frozen=True):
    """One task of a simulated run. ``index`` is -1 for tasks of a whole step, as in the scheduler's events."""

    worker: str
    kind: TaskKind
    step: int
    index: int
    version: int
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """A simulated run: every task in the order of their starts, and the times at which the steps were committed."""

    tasks: tuple[Task, ...]
    step_ends: tuple[float, ...]
    makespan: float
    """The end of the last task; the last step's weights are loaded too."""

    def last_update(self, step: int = 0) -> float:
        """The end of a step's last update: what Algorithm 2 minimises."""
        return max(task.end for task in self.tasks if task.step == step and task.kind == "update")


def scripted(decisions: Iterable[bool]) -> Policy:
    """Answer the bubbles of a run one by one: True assists. After the last decision never assist."""
    answers = iter(tuple(decisions))

    def decide(_: Bubble) -> Decision:
        return Decision(next(answers, False), "scripted")

    return Policy("scripted", decide)


def simulate(instance: Instance, policy: Policy) -> Trace:
    """Play a whole run. ``policy`` is asked once per emerging bubble, as by the scheduler."""
    run = Run(instance, policy)
    while not run.finished:
        run.play_instant()
    return Trace(tuple(run.tasks), tuple(run.step_ends), max(task.end for task in run.tasks))


@dataclass
class _Step:
    """The ledger of one step."""

    number: int
    pending: deque[int]
    num_stale: int = 0
    num_generating: int = 0
    num_generated: int = 0
    num_scored: int = 0
    num_assists: int = 0
    num_started: int = 0
    num_updated: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)


class _Trainer:
    def __init__(self) -> None:
        self.program: deque[tuple[TaskKind, int, float]] = deque()
        """What it does next whatever happens: (kind, micro-batch or -1, duration)."""
        self.asked = self.reopened = False
        """Whether the policy was asked about its bubble, and whether before this instant."""
        self.switched = False


class Run:
    """A run under way. :func:`simulate` plays it to its end, :mod:`digen.sched.steady` until it repeats itself."""

    def __init__(self, instance: Instance, policy: Policy) -> None:
        self.instance, self.policy = instance, policy
        self.num_generators, self.num_trainers = instance.num_generators, instance.num_trainers
        self.durations = instance.durations
        self.now: float = 0
        self.step = 0
        self.steps: dict[int, _Step] = {}
        self.queue: list[tuple[int, int, int]] = []
        """SQ: (step, order of arrival, micro-batch)."""
        self.count = itertools.count()
        self.versions = [0] * self.num_generators
        self.published = 0
        self.publish_due = self.holding = False
        self.trainers = [_Trainer() for _ in instance.update_s]
        names = [f"gen{i}" for i in range(self.num_generators)]
        self.names = names + [f"trainer{i}" for i in range(self.num_trainers)]
        self.busy: list[Task | None] = [None] * len(self.names)
        self.running: list[tuple[float, int, int]] = []
        """(end, order of start, worker): the next to end first."""
        self.tasks: list[Task] = []
        self.step_ends: list[float] = []

    def play_instant(self) -> None:
        """Give work to everybody idle, go to the next time at which something ends, and let it end."""
        if not self._sync():
            self._serve_generators()
            if not (self._instant and self._bubble_emerges):
                self._serve_trainers()
        self.now = self.running[0][0]
        ended = []
        while self.running and self.running[0][0] == self.now:
            ended.append(heapq.heappop(self.running)[2])
        for worker in ended:
            self._complete(worker)
        if self.policy.reopens:
            for trainer in self.trainers:
                trainer.reopened = trainer.reopened or trainer.asked
                trainer.asked = False

    def boundary(self) -> Hashable:
        """Everything that decides the future, relative to now and to the current step: equal ones have equal futures.

        Meant for the instant at which a step was committed.
        """
        step, now = self.step, self.now
        busy = tuple(
            None if task is None else (task.kind, task.step - step, task.index, task.version - step, task.end - now)
            for task in self.busy
        )
        steps = tuple(
            (
                number - step,
                tuple(one.pending),
                tuple(one.ready),
                one.num_stale,
                tuple((index, version - step) for index, version in sorted(one.versions.items())),
            )
            for number, one in sorted(self.steps.items())
        )
        queue = tuple((number - step, index) for number, _, index in sorted(self.queue))
        order = tuple(worker for _, _, worker in sorted(self.running))
        return busy, steps, queue, order, tuple(version - step for version in self.versions), self.published - step

    def _sync(self) -> bool:
        """Start a publication or commit that is due; whether it is over at once."""
        trainers = range(self.num_generators, len(self.names))
        if self.publish_due:
            self.publish_due = False
            self._start(trainers[0], "publish", 0, step=self.step - 1, version=self.step)
            return True
        engaged = any(self.busy[worker] for worker in trainers) or any(one.program for one in self.trainers)
        if self.holding or self.step == self.instance.num_steps or engaged:
            return False
        if self.ledger(self.step).num_updated < self.instance.num_micro_batches:
            return False
        self._start(trainers[0], "commit", self.instance.commit_s, step=self.step, version=self.step + 1)
        return not self.instance.commit_s

    @property
    def finished(self) -> bool:
        """Whether the last step is committed and its weights are loaded."""
        idle = not any(self.busy[self.num_generators :]) and not any(one.program for one in self.trainers)
        return self.step == self.instance.num_steps and idle and all(version == self.step for version in self.versions)

    @property
    def _instant(self) -> bool:
        """Whether a generator is busy with something that takes no time."""
        return any(task is not None and task.end == self.now for task in self.busy[: self.num_generators])

    def ledger(self, number: int) -> _Step:
        """The ledger of a step."""
        if number not in self.steps:
            self.steps[number] = _Step(number, deque(range(self.instance.num_micro_batches)))
        return self.steps[number]

    def _start(self, worker: int, kind: TaskKind, duration: float, *, step: int, index: int = -1, version: int) -> None:
        task = Task(self.names[worker], kind, step, index, version, self.now, self.now + duration)
        self.busy[worker] = task
        self.tasks.append(task)
        heapq.heappush(self.running, (task.end, next(self.count), worker))

    # ---- generators --------------------------------------------------------------------------------------------

    def _idle_generators(self) -> list[int]:
        return [worker for worker in range(self.num_generators) if self.busy[worker] is None]

    def _serve_generators(self) -> None:
        if not self._idle_generators():
            return
        if self.holding:
            running = [task.kind for task in self.busy[: self.num_generators] if task is not None]
            if self.published < self.step or any(kind != "load" for kind in running):
                return
        for worker in self._idle_generators():
            if self.versions[worker] != self.published:
                self._start(worker, "load", self.instance.load_s, step=self.published - 1, version=self.published)
        if self.holding:
            return
        for worker in self._idle_generators():
            if self._may_score():
                self._score(worker, self.instance.score_s[worker])
        while (step := self._candidate()) is not None:
            idle = [worker for worker in self._idle_generators() if self._admitted(step, self.versions[worker])]
            if not idle or (step.number > self.step and self.policy.gate and not self._gate(step)):
                break
            self._generate(step, idle[0], "generate", self.instance.generate_s[idle[0]], self.versions[idle[0]])

    def _may_score(self) -> bool:
        if not self.queue:
            return False
        step = self.ledger(self.queue[0][0])
        return not self.instance.barrier or step.num_generated == self.instance.num_micro_batches

    def _score(self, worker: int, duration: float) -> None:
        number, _, index = heapq.heappop(self.queue)
        self._start(worker, "score", duration, step=number, index=index, version=self.ledger(number).versions[index])

    def _candidate(self) -> _Step | None:
        steps = range(self.step, min(self.step + self.instance.window, self.instance.num_steps))
        return next((step for step in map(self.ledger, steps) if step.pending), None)

    def _admitted(self, step: _Step, version: int) -> bool:
        return admits(
            step.number, version, window=self.instance.window, num_stale=step.num_stale, limit=self.instance.stale_limit
        )

    def _gate(self, step: _Step) -> bool:
        assert self.policy.gate is not None  # noqa: S101 - the caller checked
        return self.policy.gate(StaleStart(step.number, self._until_commit(), lambda: self.instance))

    def _until_commit(self) -> float:
        """What the trainers still have to do for the current step, shared out evenly."""
        step = self.ledger(self.step)
        busy = [task for task in self.busy[self.num_generators :] if task is not None]
        left: float = sum(task.end - self.now for task in busy)
        if any(task.kind == "commit" for task in busy):
            return left
        left += sum(duration for trainer in self.trainers for _, _, duration in trainer.program)
        left += (self.instance.num_micro_batches - step.num_started) * sum(self.instance.update_s) / self.num_trainers
        return left / self.num_trainers + self.instance.commit_s

    def _dispatch(self, step: _Step, version: int) -> int:
        index = step.pending.popleft()
        step.versions[index] = version
        step.num_stale += version != step.number
        step.num_generating += 1
        return index

    def _generate(self, step: _Step, worker: int, kind: TaskKind, duration: float, version: int) -> None:
        self._start(worker, kind, duration, step=step.number, index=self._dispatch(step, version), version=version)

    # ---- trainers ----------------------------------------------------------------------------------------------

    def _available(self, step: _Step) -> list[int]:
        """Micro-batches that may be updated now, in the order in which they must be."""
        if self.instance.barrier and step.num_scored < self.instance.num_micro_batches:
            return []
        if self.instance.order == "ready":
            return step.ready
        return [index for place, index in enumerate(sorted(step.ready)) if index == step.num_started + place]

    def _eager(self, step: _Step) -> bool:
        return self.policy.reopens or (step.num_assists < self.policy.assists_before_update and not step.num_started)

    @property
    def _bubble_emerges(self) -> bool:
        """Whether a trainer would ask the policy now."""
        step = self._candidate()
        if self.publish_due or self.holding or step is None or step.number != self.step:
            return False
        idle = [one for one, task in zip(self.trainers, self.busy[-len(self.trainers) :], strict=True) if task is None]
        num_available = 0 if self._eager(step) else len(self._available(step))
        return any(not (one.asked or one.program) for one in idle[num_available:])

    def _serve_trainers(self) -> None:
        for number, trainer in enumerate(self.trainers):
            worker = self.num_generators + number
            if self.busy[worker] is None and trainer.program:
                kind, index, duration = trainer.program.popleft()
                self._start(worker, kind, duration, step=self.step, index=index, version=self.step)
        for number in range(self.num_trainers):
            if self.busy[self.num_generators + number] is None:
                if self.holding or self.step == self.instance.num_steps:
                    return
                self._serve_trainer(number, self.ledger(self.step))

    def _serve_trainer(self, number: int, step: _Step) -> None:
        instance, trainer, worker = self.instance, self.trainers[number], self.num_generators + number
        if step.num_updated == instance.num_micro_batches:
            return
        available, colocated = self._available(step), self.num_generators == 0
        bubble = step.pending and not colocated and not trainer.asked and (self._eager(step) or not available)
        if bubble and self._ask(number, step):
            self._assist(number, step)
        elif trainer.switched:
            trainer.switched = False
            self._start(worker, "switch", instance.switch_out_s[number], step=self.step, version=self.step)
        elif available:
            index = available[0]
            step.ready.remove(index)
            step.num_started += 1
            self._start(
                worker, "update", instance.update_s[number], step=self.step, index=index, version=step.versions[index]
            )
        elif colocated and self._may_score():
            self._score(worker, instance.score_s[number])
        elif colocated and step.pending:
            self._generate(step, worker, "generate", instance.assist_s[number], self.step)

    def _ask(self, number: int, step: _Step) -> bool:
        self.trainers[number].asked = True
        bubble = Bubble(
            step=step.number,
            num_micro_batches=self.instance.num_micro_batches,
            num_pending=len(step.pending),
            num_generating=step.num_generating,
            num_unscored=step.num_generated - step.num_scored,
            num_ready=len(step.ready),
            num_updated=step.num_updated,
            num_assists=step.num_assists,
            num_generators=self.num_generators,
            durations=self.durations,
            situation=lambda: self._situation(number),
            can_update=bool(self._available(step)),
            reopened=self.trainers[number].reopened,
        )
        return self.policy.decide(bubble).assist

    def _situation(self, number: int) -> tuple[Instance, StepState]:
        from digen.sched.bubbles import compress

        return self.instance, compress(self, number)

    def _assist(self, number: int, step: _Step) -> None:
        instance, trainer = self.instance, self.trainers[number]
        step.num_assists += 1
        if not trainer.switched:
            trainer.program.append(("switch", -1, instance.switch_in_s[number]))
        trainer.program.append(("assist", self._dispatch(step, step.number), instance.assist_s[number]))
        trainer.switched = instance.lazy_switch
        if not instance.lazy_switch:
            trainer.program.append(("switch", -1, instance.switch_out_s[number]))
        kind, index, duration = trainer.program.popleft()
        self._start(self.num_generators + number, kind, duration, step=self.step, index=index, version=self.step)

    # ---- what an end means -------------------------------------------------------------------------------------

    def _complete(self, worker: int) -> None:
        task, instance = self.busy[worker], self.instance
        assert task is not None  # noqa: S101 - it ran until now
        self.busy[worker] = None
        if worker >= self.num_generators and task.kind not in {"switch", "publish"}:
            trainer = self.trainers[worker - self.num_generators]
            trainer.asked = trainer.reopened = False
        if task.index >= 0:
            step = self.ledger(task.step)
        if task.kind in {"generate", "assist"}:
            step.num_generating -= 1
            step.num_generated += 1
            heapq.heappush(self.queue, (task.step, next(self.count), task.index))
        elif task.kind == "score":
            step.num_scored += 1
            step.ready.append(task.index)
        elif task.kind == "update":
            step.num_updated += 1
        elif task.kind == "commit":
            del self.steps[self.step]
            self.step += 1
            self.step_ends.append(self.now)
            self.publish_due = self.num_generators > 0
            self.holding = instance.sync == "hold" and self.publish_due
        elif task.kind == "publish":
            self.published = self.step
        elif task.kind == "load":
            self.versions[worker] = task.version
            self.holding = self.holding and any(version != self.step for version in self.versions)
