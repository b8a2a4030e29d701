"""The virtual-time twin: the same scheduler on workers that only take time, before a GPU is rented.

Everything here is simulated and labelled so. The scheduler drives one trainer group; a run with several is played by
the exact model instead (:mod:`digen.sched.model`), which does the same tasks at the same times wherever both can play;
only ``threshold`` may differ over unequal generators: its means are over groups there, over tasks in the scheduler.
Times are simulated in whole ticks of the finest decimal given, so that what is printed is exact.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from digen.durations import Durations, TrainerTimes, average, parse_durations, profiled_durations
from digen.errors import ConfigError
from digen.events import (
    AnyEvent,
    BubbleOpened,
    EventLog,
    GroupCompleted,
    Rewarded,
    RunFinished,
    RunStarted,
    Sink,
    StepCommitted,
    TagDecided,
    TaskFinished,
    TaskStarted,
    WorkerJoined,
)
from digen.observe.fold import ROLES, Fold
from digen.observe.report import bubble_shares, write_report
from digen.observe.trace import write_trace
from digen.plan import Plan
from digen.sched import Scheduler
from digen.sched.admission import stale_limit
from digen.sched.model import Instance
from digen.sched.model import simulate as play_model
from digen.sched.profile import Profile
from digen.sched.tag import policy_from
from digen.workers.clock import run_virtual
from digen.workers.sim import SimWorker

if TYPE_CHECKING:
    from digen.config import ScheduleConfig

__all__ = [
    "Durations",
    "Twin",
    "compare",
    "instance_of",
    "parse_durations",
    "profiled_durations",
    "simulate",
    "write_folder",
]

_MAX_TICKS = 2**53
"""Whole numbers up to it are exact as floats."""

_TRACED_TASKS = 20_000
"""Tasks in the trace of a simulated run, so that it stays at a few megabytes."""

_LONGEST_NAME = 300
"""Letters in a simulated run's name, which holds its durations."""


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A simulated run."""

    durations: Durations
    engine: Literal["scheduler", "model"]
    """What played it: digen's own scheduler or, with several trainer groups, the exact model."""
    finished: tuple[TaskFinished, ...]
    """Every task in the order of their starts, or those of the steps that were asked for. Times are in ticks."""
    step_ends: tuple[Decimal, ...]
    """Seconds after which the steps were committed."""
    makespan: Decimal
    """The end of the last task; the last step's weights are loaded too."""
    num_assists: int
    """Micro-batches that the trainers generated."""
    bubbles: dict[str, dict[str, Any]]
    """By role: ``share``, the idle share of its time, and ``causes``, its parts. The exact model tells no causes."""

    @property
    def step_s(self) -> Decimal:
        """Mean time of a step, the first and the last left out: there is no stale work before the one, or in the other.

        Of a run of up to three steps the mean of all.
        """
        ends = self.step_ends
        return (ends[-2] - ends[0]) / (len(ends) - 2) if len(ends) > 3 else ends[-1] / len(ends)

    @property
    def tasks(self) -> tuple[dict[str, Any], ...]:
        """worker, kind, step, index, version, start, end of ``finished``; times are exact decimals in seconds."""
        tick = self.durations.tick
        return tuple(
            {**_what(task), "start": Decimal(task.started) * tick, "end": Decimal(task.time) * tick}
            for task in self.finished
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data for scripts: makespan, step ends, assists and every task."""
        per_s = _ticks_per_second(self.durations)
        return {
            "simulated": True,
            "makespan": _number(self.makespan),
            "step_ends": [_number(end) for end in self.step_ends],
            "assists": self.num_assists,
            "tasks": [
                {**_what(task), "start": _seconds(task.started, per_s), "end": _seconds(task.time, per_s)}
                for task in self.finished
            ],
        }


def simulate(
    durations: Durations, config: ScheduleConfig, *, keep: range | None = None, sinks: Iterable[Sink] = ()
) -> Twin:
    """Run the scheduler in virtual time or, with several trainer groups, the exact model.

    The policies that look ahead know the durations from the start, as they would after some steps of a real run.

    Args:
        durations: what every task takes.
        config: how to schedule.
        keep: steps; tasks outside of their time are counted and forgotten. The last step's time lasts to the end of
            the run. Default: all.
        sinks: get the scheduler's events as they happen, with times in seconds. The exact model makes none.

    Raises:
        ConfigError: the durations differ by so many digits that their sums would be rounded, or several trainer groups
            meet something that the exact model does not know.
    """
    per_s = _ticks_per_second(durations)
    steps = range(durations.num_steps)
    record = _Record(keep if keep is not None else steps, last=steps.stop)
    if durations.num_trainers == 1:
        bubbles = _play_scheduler(durations, config, record, [_in_seconds(sink, per_s) for sink in sinks])
    elif sinks:
        raise ConfigError(f"durations: T={durations.num_trainers} is played by the exact model, which makes no events")
    else:
        bubbles = _play_model(durations, config, record)
    tick = durations.tick
    return Twin(
        durations=durations,
        engine="scheduler" if durations.num_trainers == 1 else "model",
        finished=tuple(sorted(record.finished, key=lambda task: task.task)),
        step_ends=tuple(Decimal(end) * tick for end in record.commits),
        makespan=Decimal(record.end) * tick,
        num_assists=record.num_assists,
        bubbles=bubbles,
    )


class _Record:
    """What a twin keeps of a run. Gets the events, or only the tasks, in the order of their ends."""

    def __init__(self, keep: range, *, last: int) -> None:
        self.fold = Fold()
        self._first, self._stop = keep.start, keep.stop if keep.stop < last else -1
        self._from = -1.0 if keep.start == 0 else math.inf
        self._until = math.inf if keep else -1.0
        self.finished: list[TaskFinished] = []
        self.commits: list[float] = []
        self.num_assists = 0
        self.end = 0.0

    def __call__(self, event: AnyEvent) -> None:
        if type(event) in _BUSY_OR_IDLE:
            self.fold.apply(event)
        if isinstance(event, TaskFinished):
            self.take(event)

    def take(self, event: TaskFinished) -> None:
        self.end = event.time
        self.num_assists += event.kind == "assist"
        if event.time > self._from and event.started < self._until:
            self.finished.append(event)
        if event.kind == "commit":
            self.commits.append(event.time)
            if len(self.commits) == self._first:
                self._from = event.time
            if len(self.commits) == self._stop:
                self._until = event.time


_BUSY_OR_IDLE = {RunStarted, WorkerJoined, TaskStarted, TaskFinished, BubbleOpened, RunFinished}
"""The events that say when workers are busy and why they idle; a third of all say something else."""


def _play_scheduler(
    durations: Durations, config: ScheduleConfig, record: _Record, sinks: Iterable[Sink]
) -> dict[str, dict[str, Any]]:
    """``record`` and the sinks get the events, with times in ticks; returns the bubbles by role."""
    tick = durations.tick
    colocated = config.mode == "colocated"
    num_groups = durations.num_micro_batches // durations.micro_batches_per_group
    plan = Plan(
        [f"prompt {number}" for number in range(num_groups)],
        num_steps=durations.num_steps,
        prompts_per_step=num_groups,
        samples_per_prompt=durations.micro_batches_per_group,
        micro_batch_size=1,
        shuffle=False,
    )

    def ticks(value: Decimal) -> int:
        return int(value / tick)

    trainer = SimWorker(
        "trainer",
        {
            "generate": ticks(durations.assist_s),
            "score": ticks(durations.score_s[0]),
            "update": ticks(durations.update_s),
            "commit": ticks(durations.commit_s),
            "switch_in": ticks(durations.switch_in_s),
            "switch_out": ticks(durations.switch_out_s),
        },
        reward=lambda *_: 0.0,
    )
    generators = [
        SimWorker(
            f"gen{number}",
            {"generate": ticks(generate), "score": ticks(score), "load": ticks(durations.load_s)},
            reward=lambda *_: 0.0,
        )
        for number, (generate, score) in enumerate(zip(durations.generate_s, durations.score_s, strict=True))
    ]

    async def main() -> None:
        scheduler = Scheduler(
            plan,
            name=f"simulated {durations}"[:_LONGEST_NAME],
            generators=[] if colocated else generators,
            trainer=trainer,
            config=config,
            profile=_known(durations, tick),
            sinks=[record, *sinks],
        )
        async with scheduler:
            async for _ in scheduler:
                pass

    with _no_collections():
        run_virtual(main())
    fold = record.fold
    return {role: bubble_shares(fold.of_role(role), fold.now) for role in ROLES if fold.of_role(role)}


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collections meanwhile: a run makes no cycles, but with thousands of tasks in flight it gets half as
    fast by the search for them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _known(durations: Durations, tick: Decimal) -> Profile:
    """A profile that holds the durations already."""
    profile = Profile()
    profile.expect("generator", "generate", float(average(durations.generate_s) / tick))
    profile.expect("generator", "score", float(average(durations.score_s) / tick))
    profile.expect("generator", "load", float(durations.load_s / tick))
    for number, (generate, score) in enumerate(zip(durations.generate_s, durations.score_s, strict=True)):
        profile.expect(f"gen{number}", "generate", float(generate / tick))
        profile.expect(f"gen{number}", "score", float(score / tick))
    profile.expect("trainer", "update", float(durations.update_s / tick))
    profile.expect("trainer", "assist", float(durations.assist_s / tick))
    profile.expect("trainer", "commit", float(durations.commit_s / tick))
    profile.expect("trainer", "switch_in", float(durations.switch_in_s / tick))
    profile.expect("trainer", "switch_out", float(durations.switch_out_s / tick))
    return profile


def _play_model(durations: Durations, config: ScheduleConfig, record: _Record) -> dict[str, dict[str, Any]]:
    """``record`` gets the tasks, with times in ticks; returns the bubbles by role, without causes."""
    trace = play_model(instance_of(durations, config), policy_from(config.resolved_tag))
    busy: Counter[str] = Counter()
    finished = [
        TaskFinished(task.end, number, task.kind, task.worker, task.step, task.index, task.version, task.start)
        for number, task in enumerate(trace.tasks)
    ]
    for task in sorted(finished, key=lambda task: task.time):
        record.take(task)
        busy["trainer" if task.worker.startswith("trainer") else "generator"] += int(task.time - task.started)
    counts = {"generator": durations.num_generators, "trainer": durations.num_trainers}
    return {
        role: {"share": 1 - busy[role] / (counts[role] * trace.makespan) if trace.makespan else 0.0, "causes": {}}
        for role in ("generator", "trainer")
        if role == "trainer" or config.mode != "colocated"
    }


def instance_of(durations: Durations, config: ScheduleConfig) -> Instance:
    """The same run for the exact model and the search, in whole ticks.

    Raises:
        ConfigError: the model does not know ``max_generating`` and groups that span several micro-batches.
    """
    if config.max_generating is not None:
        raise ConfigError("schedule.max_generating: the exact model has no such limit; leave it out")
    if durations.micro_batches_per_group > 1:
        raise ConfigError("durations: the exact model has no groups that span several micro-batches")
    colocated, tick = config.mode == "colocated", durations.tick

    def ticks(values: Iterable[Decimal]) -> tuple[int, ...]:
        return tuple(int(value / tick) for value in values)

    return Instance(
        num_micro_batches=durations.num_micro_batches,
        num_steps=durations.num_steps,
        generate_s=() if colocated else ticks(durations.generate_s),
        score_s=ticks(durations.score_s[:1] * durations.num_trainers if colocated else durations.score_s),
        **{name: ticks(getattr(times, name) for times in durations.trainers) for name in TrainerTimes._fields},
        commit_s=int(durations.commit_s / tick),
        load_s=int(durations.load_s / tick),
        window=config.resolved_window,
        stale_limit=stale_limit(config.resolved_stale_fraction, durations.num_micro_batches),
        sync=config.sync,
        order=config.update_order,
        barrier=config.resolved_barrier,
        lazy_switch=config.lazy_switch,
    )


def compare(durations: Durations) -> dict[str, Decimal]:
    """Makespans of what a schedule is measured against.

    ``naive`` is one simulated step times their number: every step begins with all workers idle, as the first does.
    ``colocated`` is arithmetic: every stage on both groups at once, if it scaled linearly. It is there only for one
    generator and a trainer that generates no faster: of groups that differ in number or kind nobody knows how a stage
    would run on all of them (``digen plan`` does, from the curves that it is given).
    """
    from digen.config import ScheduleConfig

    step = simulate(replace(durations, num_steps=1), ScheduleConfig(mode="naive"), keep=range(0))
    found = {"naive": durations.num_steps * step.makespan}
    if durations.num_generators == durations.num_trainers == 1 and durations.assist_s >= durations.generate_s[0]:
        per_micro_batch = (durations.generate_s[0] + durations.score_s[0] + durations.update_s) / 2
        found["colocated"] = durations.num_steps * (durations.num_micro_batches * per_micro_batch + durations.commit_s)
    return found


def write_folder(
    folder: Path, durations: Durations, config: ScheduleConfig, *, keep: range | None = None
) -> tuple[Twin, int]:
    """Simulate into a folder like a run's: ``events.jsonl``, the reports and ``trace.json``.

    Returns:
        The twin, as :func:`simulate` does, and how many steps the trace shows: the first ones of a long run.

    Raises:
        ConfigError: the folder holds a run already, or as :func:`simulate`.
    """
    if (folder / "events.jsonl").exists():
        raise ConfigError(f"{folder} holds the events of a run already; choose another folder")
    if durations.num_trainers > 1:
        raise ConfigError(f"durations: T={durations.num_trainers} is played by the exact model, which makes no events")
    _ticks_per_second(durations)
    folder.mkdir(parents=True, exist_ok=True)
    head = _Head()
    with EventLog(folder / "events.jsonl") as log:
        twin = simulate(durations, config, keep=keep, sinks=[log, head])
    write_report(folder)
    write_trace(head.events(), folder / "trace.json")
    return twin, head.num_steps


class _Head:
    """The events up to the last commit within the first tasks."""

    def __init__(self) -> None:
        self._events: list[AnyEvent] = []
        self._num_tasks = 0
        self._num_whole = 0
        self.num_steps = 0

    def __call__(self, event: AnyEvent) -> None:
        if self._num_tasks == _TRACED_TASKS:
            return
        self._events.append(event)
        self._num_tasks += isinstance(event, TaskFinished)
        if isinstance(event, StepCommitted):
            self._num_whole, self.num_steps = len(self._events), self.num_steps + 1

    def events(self) -> list[AnyEvent]:
        """Without the starts of tasks whose ends are left out."""
        complete = self._num_tasks < _TRACED_TASKS or not self.num_steps
        shown = self._events if complete else self._events[: self._num_whole]
        ended = {event.task for event in shown if isinstance(event, TaskFinished)}
        return [event for event in shown if not isinstance(event, TaskStarted) or event.task in ended]


def _in_seconds(sink: Sink, per_s: int) -> Sink:
    """Hands events on with their times in seconds, and without rewards and bytes, which nobody gave or moved."""

    def take(event: AnyEvent) -> None:
        if isinstance(event, Rewarded | GroupCompleted):
            return
        changes: dict[str, Any] = {"time": event.time / per_s}
        if isinstance(event, TaskFinished):
            changes |= {"started": event.started / per_s, "stats": {}}
        elif isinstance(event, StepCommitted):
            changes["values"] = {
                name: value * per_s if name.endswith("per_s") else value / per_s if name.endswith(_TIMES) else value
                for name, value in event.values.items()
                if not name.startswith(_UNREAL)
            }
        elif isinstance(event, TagDecided):
            changes["reason"] = _A_TIME.sub(lambda found: f"{float(found[1]) / per_s:.6g} s", event.reason)
            changes["saving_s"] = event.saving_s / per_s if event.saving_s is not None else None
        sink(msgspec.structs.replace(event, **changes))

    return take


_TIMES = ("_s", "/seconds")
"""How metrics end that are times."""

_UNREAL = ("reward/", "memory/", "weight_sync/bytes", "tag/search_ms")
"""How metrics begin that a simulated run has none of; deciding takes no virtual time."""

_A_TIME = re.compile(r"(-?\d[\d.e+-]*) s\b")
"""A time in the reason of a decision."""


def _ticks_per_second(durations: Durations) -> int:
    """A power of ten, so that dividing whole ticks by it gives the float that the decimal stands for."""
    if durations.total_s / durations.tick > _MAX_TICKS:
        raise ConfigError(
            f"durations: a run of up to {durations.total_s:g} s is too long for steps of {durations.tick} s to be exact"
        )
    return int(1 / durations.tick)


def _what(task: TaskFinished) -> dict[str, Any]:
    return {name: getattr(task, name) for name in ("worker", "kind", "step", "index", "version")}


def _seconds(ticks: float, per_s: int) -> int | float:
    return int(ticks) // per_s if ticks % per_s == 0 else ticks / per_s


def _number(value: Decimal) -> int | float:
    """A JSON number: an integer where it is one."""
    return int(value) if value == value.to_integral_value() else float(value)
