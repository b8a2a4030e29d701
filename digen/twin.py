"""The virtual-time twin: the same scheduler on workers that only take time, before a GPU is rented.

Everything here is simulated and labelled so. Durations come from a line of text (:func:`parse_durations`) or from a
real run's events (:func:`profiled_durations`). Times are simulated in whole ticks of the finest decimal given, so that
what is printed is exact.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from digen.errors import ConfigError
from digen.events import (
    AnyEvent,
    EventLog,
    RunStarted,
    StepCommitted,
    TagDecided,
    TaskFinished,
    WorkerJoined,
    read_events,
)
from digen.observe.report import build_report, write_report
from digen.observe.trace import write_trace
from digen.plan import Plan
from digen.sched import Scheduler
from digen.sched.profile import Profile
from digen.workers.clock import run_virtual
from digen.workers.sim import SimWorker

if TYPE_CHECKING:
    from digen.config import ScheduleConfig

_MAX_TICKS = 2**53
"""Whole numbers up to it are exact as floats."""

_MOST = 100_000
"""Most micro-batches in a step, steps, and generators."""

_LETTERS = {
    "B": "num_micro_batches",
    "S": "num_steps",
    "G": "num_generators",
    "T": "num_trainers",
    "g": "generate_s",
    "r": "score_s",
    "u": "update_s",
    "h": "assist_s",
    "c_load": "switch_in_s",
    "c_off": "switch_out_s",
    "y_opt": "commit_s",
    "y_sync": "load_s",
}
"""The paper's letters and what they stand for."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """What a schedule is made of: counts, and seconds by task; one entry per generator where they differ."""

    num_micro_batches: int
    num_steps: int = 1
    generate_s: tuple[Decimal, ...]
    score_s: tuple[Decimal, ...]
    update_s: Decimal
    assist_s: Decimal
    switch_in_s: Decimal = Decimal(0)
    switch_out_s: Decimal = Decimal(0)
    commit_s: Decimal = Decimal(0)
    load_s: Decimal = Decimal(0)

    @property
    def num_generators(self) -> int:
        """Generator groups."""
        return len(self.generate_s)

    @property
    def total_s(self) -> Decimal:
        """The time of everything one after another: no schedule takes longer."""
        per_micro_batch = max(self.generate_s) + max(self.score_s) + self.update_s + self.assist_s
        per_micro_batch += self.switch_in_s + self.switch_out_s
        return self.num_steps * (self.num_micro_batches * per_micro_batch + self.commit_s + self.load_s)

    @property
    def tick(self) -> Decimal:
        """The largest power of ten that every duration is a multiple of."""
        numbers = [value for field in fields(self) for value in _as_tuple(getattr(self, field.name))]
        exponents = [Decimal(value).as_tuple().exponent for value in numbers]
        return Decimal(1).scaleb(min(0, *(exponent for exponent in exponents if isinstance(exponent, int))))


@dataclass(frozen=True)
class Twin:
    """A simulated run. Times are exact decimals in seconds."""

    durations: Durations
    events: tuple[AnyEvent, ...]
    tasks: tuple[dict[str, Any], ...]
    """worker, kind, step, index, version, start, end of every task, in the order of their starts."""
    step_ends: tuple[Decimal, ...]
    makespan: Decimal
    """The end of the last task; the last step's weights are loaded too."""

    @property
    def num_assists(self) -> int:
        """Micro-batches that the trainer generated."""
        return sum(task["kind"] == "assist" for task in self.tasks)

    def as_json(self) -> dict[str, Any]:
        """Plain data for scripts: makespan, step ends, assists and every task."""
        return {
            "simulated": True,
            "makespan": _number(self.makespan),
            "step_ends": [_number(end) for end in self.step_ends],
            "assists": self.num_assists,
            "tasks": [{**task, "start": _number(task["start"]), "end": _number(task["end"])} for task in self.tasks],
        }


def simulate(durations: Durations, config: ScheduleConfig) -> Twin:
    """Run the scheduler in virtual time.

    The policies that look ahead know the durations from the start, as they would after some steps of a real run.

    Raises:
        ConfigError: the durations differ by so many digits that their sums would be rounded.
    """
    tick = durations.tick
    if durations.total_s / tick > _MAX_TICKS:
        raise ConfigError(
            f"durations: a run of up to {durations.total_s:g} s is too long for steps of {tick} s to be exact"
        )
    colocated = config.mode == "colocated"
    events: list[AnyEvent] = []
    plan = Plan(
        [f"prompt {number}" for number in range(durations.num_micro_batches)],
        num_steps=durations.num_steps,
        prompts_per_step=durations.num_micro_batches,
        samples_per_prompt=1,
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
            name="simulated",
            generators=[] if colocated else generators,
            trainer=trainer,
            config=config,
            profile=_known(durations, tick),
            sinks=[events.append],
        )
        async with scheduler:
            async for _ in scheduler:
                pass

    run_virtual(main())
    return _twin(durations, events, tick)


def _known(durations: Durations, tick: Decimal) -> Profile:
    """A profile that holds the durations already."""
    profile = Profile()
    profile.expect("generator", "generate", float(_mean(durations.generate_s) / tick))
    profile.expect("generator", "score", float(_mean(durations.score_s) / tick))
    profile.expect("generator", "load", float(durations.load_s / tick))
    for number, (generate, score) in enumerate(zip(durations.generate_s, durations.score_s, strict=True)):
        profile.expect(f"gen{number}", "generate", float(generate / tick))
        profile.expect(f"gen{number}", "score", float(score / tick))
    profile.expect("trainer", "update", float(durations.update_s / tick))
    profile.expect("trainer", "assist", float(durations.assist_s / tick))
    profile.expect("trainer", "switch_in", float(durations.switch_in_s / tick))
    profile.expect("trainer", "switch_out", float(durations.switch_out_s / tick))
    return profile


def _twin(durations: Durations, events: list[AnyEvent], tick: Decimal) -> Twin:
    tasks = sorted((event for event in events if isinstance(event, TaskFinished)), key=lambda event: event.task)
    ends = [Decimal(event.time) * tick for event in events if isinstance(event, TaskFinished)]
    return Twin(
        durations=durations,
        events=tuple(events),
        tasks=tuple(
            {
                "worker": event.worker,
                "kind": event.kind,
                "step": event.step,
                "index": event.index,
                "version": event.version,
                "start": Decimal(event.started) * tick,
                "end": Decimal(event.time) * tick,
            }
            for event in tasks
        ),
        step_ends=tuple(Decimal(event.time) * tick for event in events if isinstance(event, StepCommitted)),
        makespan=max(ends),
    )


def compare(durations: Durations) -> dict[str, Decimal]:
    """Makespans of what a schedule is measured against.

    ``naive`` is one simulated step times their number: every step begins with all workers idle, as the first does.
    ``colocated`` is arithmetic: every stage on all groups at once, if it scaled linearly.
    """
    from digen.config import ScheduleConfig

    step = simulate(replace(durations, num_steps=1), ScheduleConfig(mode="naive"))
    groups = durations.num_generators + 1
    per_micro_batch = (_mean(durations.generate_s) + _mean(durations.score_s) + durations.update_s) / groups
    return {
        "naive": durations.num_steps * step.makespan,
        "colocated": durations.num_steps * (durations.num_micro_batches * per_micro_batch + durations.commit_s),
    }


def parse_durations(text: str) -> Durations:
    """Read ``'B=8 S=2 g=10 r=1 u=5 h=12 c_load=1 c_off=1 y_opt=2 y_sync=3 G=1 T=1'``.

    B, g and u are needed; S, G and T default to 1, h to g, the others to 0. Numbers are integers or decimals; g and r
    may be lists, one entry per generator group: ``g=10,12``.

    Raises:
        ConfigError: a letter is unknown, missing or twice, or a value is not a number or negative.
    """
    given: dict[str, tuple[Decimal, ...]] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or name not in _LETTERS:
            close = difflib.get_close_matches(name, _LETTERS, n=1)
            hint = f"did you mean {close[0]}=?" if close else f"known: {', '.join(_LETTERS)}"
            what = f"unknown letter {name!r}" if equals else f"{word!r} is not of the form letter=number"
            raise ConfigError(f"durations: {what}; {hint}")
        if name in given:
            raise ConfigError(f"durations: {name} is given twice")
        given[name] = tuple(_decimal(name, part) for part in value.split(","))
    for name in ("B", "g", "u"):
        if name not in given:
            raise ConfigError(f"durations: {name} ({_LETTERS[name]}) is missing")

    def one(name: str, default: Decimal) -> Decimal:
        values = given.get(name, (default,))
        if len(values) > 1:
            raise ConfigError(f"durations: {name} takes one number, got {len(values)}")
        return values[0]

    num_generators = _count("G", one("G", Decimal(max(len(given["g"]), len(given.get("r", ()))))))
    if _count("T", one("T", Decimal(1))) != 1:
        raise ConfigError("durations: T must be 1: the scheduler drives one trainer group")
    generate = _by_group("g", given["g"], num_generators)
    return Durations(
        num_micro_batches=_count("B", one("B", Decimal(1))),
        num_steps=_count("S", one("S", Decimal(1))),
        generate_s=generate,
        score_s=_by_group("r", given.get("r", (Decimal(0),)), num_generators),
        update_s=one("u", Decimal(0)),
        assist_s=one("h", max(generate)),
        switch_in_s=one("c_load", Decimal(0)),
        switch_out_s=one("c_off", Decimal(0)),
        commit_s=one("y_opt", Decimal(0)),
        load_s=one("y_sync", Decimal(0)),
    )


def profiled_durations(events: Iterable[AnyEvent]) -> Durations:
    """Mean durations of a real run by worker and task, the first sample of each left out, to the millisecond.

    A generator that never did a task gets the others' mean. Weights are loaded in the mean time of all generators.

    Raises:
        ConfigError: the run has no generators, scorers of its own, or no generation, score or update to learn from.
    """
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    generators: list[str] = []
    last_kind = ""
    run: RunStarted | None = None
    committed = 0
    for event in events:
        if isinstance(event, RunStarted):
            run = event
        elif isinstance(event, WorkerJoined) and event.role == "generator" and event.worker not in generators:
            generators.append(event.worker)
        elif isinstance(event, WorkerJoined) and event.role == "scorer":
            raise ConfigError(f"the profile has a scorer of its own ({event.worker}), which the twin does not play")
        elif isinstance(event, StepCommitted):
            committed += 1
        elif isinstance(event, TaskFinished) and event.worker in generators:
            samples[event.worker, event.kind].append(event.time - event.started)
        elif isinstance(event, TaskFinished):
            back = event.kind == "switch" and last_kind == "assist"
            samples["trainer", "switch back" if back else event.kind].append(event.time - event.started)
            last_kind = event.kind
    if run is None or not generators:
        raise ConfigError("the profile has no run with generators; profile a run of another mode than colocated")

    def means(workers: Iterable[str], kind: str) -> list[Decimal]:
        found = [times[1:] or times for worker in workers if (times := samples.get((worker, kind)))]
        return [Decimal(sum(warm) / len(warm)).quantize(Decimal("0.001")) for warm in found]

    def mean(worker: str, kind: str, default: Decimal | None = None) -> Decimal:
        found = means([worker], kind) or means(generators, kind)
        if not found and default is None:
            raise ConfigError(f"the profile has no {kind} on {worker} to learn from; let the run finish a step")
        return _mean(tuple(found)).quantize(Decimal("0.001")) if found else default or Decimal(0)

    none = Decimal(0)
    generate = tuple(mean(name, "generate") for name in generators)
    return Durations(
        num_micro_batches=run.num_micro_batches,
        num_steps=max(1, committed),
        generate_s=generate,
        score_s=tuple(mean(name, "score") for name in generators),
        update_s=mean("trainer", "update"),
        assist_s=mean("trainer", "assist", max(generate)),
        switch_in_s=mean("trainer", "switch", none),
        switch_out_s=mean("trainer", "switch back", none),
        commit_s=mean("trainer", "commit", none) + mean("trainer", "publish", none),
        load_s=_mean(tuple(means(generators, "load")) or (none,)).quantize(Decimal("0.001")),
    )


_MARKS = {
    "generate": "g",
    "assist": "a",
    "score": "s",
    "update": "u",
    "commit": "C",
    "publish": "P",
    "load": "L",
    "switch": "x",
    "checkpoint": "k",
}


def describe(twin: Twin, config: ScheduleConfig, *, width: int = 96) -> list[str]:
    """A simulated run in words and a picture: makespan, comparison, bubbles by cause, a row for each worker."""
    durations, makespans = twin.durations, compare(twin.durations)
    report = build_report(twin.events)
    lines = [
        (
            f"simulated: mode {config.mode}, window {config.resolved_window}, TAG {config.resolved_tag}, "
            f"sync {config.sync}; {durations.num_steps} steps of {durations.num_micro_batches} micro-batches, "
            f"{durations.num_generators} generator{'s' * (durations.num_generators > 1)}"
        ),
        f"makespan {twin.makespan.normalize():,f} s, {twin.num_assists} assists",
    ]
    lines += [
        f"  {makespans[name] / twin.makespan:.3f} x {what} ({float(makespans[name]):,.6g} s)"
        for name, what in (("naive", "naive"), ("colocated", "colocated, if every stage scaled linearly"))
        if twin.makespan
    ]
    for role, bubble in report["bubbles"].items():
        causes = ", ".join(f"{cause} {share:.1%}" for cause, share in bubble["causes"].items() if share >= 0.0005)
        lines.append(f"  {role} idle {bubble['share']:.1%}" + (f" ({causes})" if causes else ""))
    return [*lines, "", *_picture(twin, width)]


def write_folder(twin: Twin, folder: Path) -> None:
    """Write ``events.jsonl``, the reports and ``trace.json`` of a simulated run.

    Raises:
        ConfigError: the folder holds a run already.
    """
    if (folder / "events.jsonl").exists():
        raise ConfigError(f"{folder} holds the events of a run already; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    tick = twin.durations.tick
    with EventLog(folder / "events.jsonl") as log:
        for event in twin.events:
            log(_in_seconds(event, tick))
    write_report(folder)
    write_trace(read_events(folder / "events.jsonl"), folder / "trace.json")


def _in_seconds(event: AnyEvent, tick: Decimal) -> AnyEvent:
    def scaled(ticks: float) -> float:
        return float(Decimal(ticks) * tick)

    changes: dict[str, Any] = {"time": scaled(event.time)}
    if isinstance(event, TaskFinished):
        changes["started"] = scaled(event.started)
    elif isinstance(event, StepCommitted):
        changes["values"] = {
            name: value / float(tick) if name.endswith("per_s") else scaled(value) if name.endswith(_TIMES) else value
            for name, value in event.values.items()
        }
    elif isinstance(event, TagDecided) and tick != 1:
        changes["reason"] = f"{event.reason}, in units of {tick} s"
        changes["saving_s"] = scaled(event.saving_s) if event.saving_s is not None else None
    return msgspec.structs.replace(event, **changes)


_TIMES = ("_s", "/seconds")
"""How metrics end that are times."""


def _picture(twin: Twin, width: int) -> list[str]:
    """The timeline, a character for ``makespan / width`` seconds, the task that begins last in it."""
    names = list(dict.fromkeys(task["worker"] for task in twin.tasks))
    rows = {name: ["."] * width for name in sorted(names, key=lambda name: (name == "trainer", len(name), name))}
    scale = width / twin.makespan if twin.makespan else Decimal(0)
    for task in twin.tasks:
        first, last = int(task["start"] * scale), int(task["end"] * scale)
        for place in range(first, max(last, first + (task["end"] > task["start"]))):
            rows[task["worker"]][min(place, width - 1)] = _MARKS[task["kind"]]
    legend = "g generate  a assist  s score  u update  C commit  P publish  L load  x switch  . idle"
    return [*(f"{name:>10} {''.join(marks)}" for name, marks in rows.items()), f"{'':>10} {legend}"]


def _mean(values: tuple[Decimal, ...]) -> Decimal:
    return sum(values, Decimal(0)) / len(values)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _decimal(name: str, text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ConfigError(f"durations: {name}={text!r} is not a number") from None
    if not value.is_finite() or value < 0:
        raise ConfigError(f"durations: {name}={text} must be finite and not negative")
    return value


def _count(name: str, value: Decimal) -> int:
    if value > _MOST:
        raise ConfigError(f"durations: {name}={value} is beyond {_MOST:,}")
    if value != value.to_integral_value() or value < 1:
        raise ConfigError(f"durations: {name}={value} must be a whole number of at least 1")
    return int(value)


def _by_group(name: str, values: tuple[Decimal, ...], count: int) -> tuple[Decimal, ...]:
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ConfigError(f"durations: {name} has {len(values)} entries for G={count} generator groups")
    return values


def _number(value: Decimal) -> int | float:
    """A JSON number: an integer where it is one."""
    return int(value) if value == value.to_integral_value() else float(value)
