"""How long every task takes: what a twin is made of, read from a line of text or from a real run's events."""

from __future__ import annotations

import difflib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from digen.errors import ConfigError
from digen.events import AnyEvent, RunStarted, StepCommitted, TaskFinished, WorkerJoined

MOST = 100_000
"""Most micro-batches in a step, steps, and generator groups."""

MOST_TRAINERS = 8
"""Most trainer groups: the exact model is held to its invariants for so many (tests/test_twin.py)."""

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


class TrainerTimes(NamedTuple):
    """Seconds by task of one trainer group."""

    update_s: Decimal
    assist_s: Decimal
    switch_in_s: Decimal
    switch_out_s: Decimal


@dataclass(frozen=True, kw_only=True)
class Durations:
    """What a schedule is made of: counts, and seconds by task; one entry per generator where they differ.

    Raises:
        ConfigError: a count or a duration makes no sense; the message names it.
    """

    num_micro_batches: int
    num_steps: int = 1
    micro_batches_per_group: int = 1
    """Micro-batches that hold one prompt's samples: their updates wait for the last score of them all."""
    generate_s: tuple[Decimal, ...]
    score_s: tuple[Decimal, ...]
    update_s: Decimal
    assist_s: Decimal
    switch_in_s: Decimal = Decimal(0)
    switch_out_s: Decimal = Decimal(0)
    commit_s: Decimal = Decimal(0)
    load_s: Decimal = Decimal(0)
    more_trainers: tuple[TrainerTimes, ...] = ()
    """Trainer groups beside the first one, which is all that the scheduler drives."""

    def __post_init__(self) -> None:
        for name in ("num_micro_batches", "num_steps", "micro_batches_per_group"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ConfigError(f"durations: {name} must be between 1 and {MOST:,}, got {getattr(self, name)}")
        if self.num_micro_batches % self.micro_batches_per_group:
            raise ConfigError(
                f"durations: num_micro_batches={self.num_micro_batches} must be a multiple of "
                f"micro_batches_per_group={self.micro_batches_per_group}"
            )
        if not 1 <= len(self.generate_s) == len(self.score_s) <= MOST:
            raise ConfigError(
                "durations: generate_s and score_s must have one entry per generator group, got "
                f"{len(self.generate_s)} and {len(self.score_s)}"
            )
        if self.num_trainers > MOST_TRAINERS:
            raise ConfigError(
                f"durations: {self.num_trainers} trainer groups, but at most {MOST_TRAINERS} are simulated"
            )
        for name, value in self._seconds():
            if not (value.is_finite() and value >= 0):
                raise ConfigError(f"durations: {name} must be finite and not negative, got {value}")

    def _seconds(self) -> Iterator[tuple[str, Decimal]]:
        for name in ("generate_s", "score_s"):
            yield from ((name, value) for value in getattr(self, name))
        for times in self.trainers:
            yield from times._asdict().items()
        yield from (("commit_s", self.commit_s), ("load_s", self.load_s))

    @property
    def num_generators(self) -> int:
        """Generator groups (G)."""
        return len(self.generate_s)

    @property
    def num_trainers(self) -> int:
        """Trainer groups (T)."""
        return 1 + len(self.more_trainers)

    @property
    def trainers(self) -> tuple[TrainerTimes, ...]:
        """What tasks take on every trainer group."""
        first = TrainerTimes(self.update_s, self.assist_s, self.switch_in_s, self.switch_out_s)
        return first, *self.more_trainers

    @property
    def total_s(self) -> Decimal:
        """The time of everything one after another: no schedule takes longer."""
        per_micro_batch = max(self.generate_s) + max(self.score_s) + max(map(sum, self.trainers))
        return self.num_steps * (self.num_micro_batches * per_micro_batch + self.commit_s + self.load_s)

    @property
    def tick(self) -> Decimal:
        """The largest power of ten, at most 1, that divides every duration."""
        exponents = [value.as_tuple().exponent for _, value in self._seconds()]
        return Decimal(1).scaleb(min(0, *(exponent for exponent in exponents if isinstance(exponent, int))))

    def __str__(self) -> str:
        """The line that :func:`parse_durations` reads, but for ``micro_batches_per_group``."""
        by_group = {"g": self.generate_s, "r": self.score_s}
        by_group |= dict(zip(("u", "h", "c_load", "c_off"), zip(*self.trainers, strict=True), strict=True))
        by_group |= {"y_opt": (self.commit_s,), "y_sync": (self.load_s,)}
        words = [f"B={self.num_micro_batches}", f"S={self.num_steps}"]
        for letter, values in by_group.items():
            shown = values if len(set(values)) > 1 else values[:1]
            words.append(f"{letter}={','.join(f'{value.normalize():f}' for value in shown)}")
        return " ".join([*words, f"G={self.num_generators}", f"T={self.num_trainers}"])


def parse_durations(text: str) -> Durations:
    """Read ``'B=8 S=2 g=10 r=1 u=5 h=12 c_load=1 c_off=1 y_opt=2 y_sync=3 G=1 T=1'``.

    B, g and u are needed; S, G and T default to 1, h to g, the others to 0. Numbers are integers or decimals; g and r
    may be lists, one entry per generator group, and u, h, c_load and c_off, one per trainer group: ``g=10,12``.

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

    def groups(letter: str, names: Iterable[str], most: int) -> int:
        return _count(letter, one(letter, Decimal(max(len(given.get(name, ())) for name in names))), most)

    num_generators = groups("G", "gr", MOST)
    num_trainers = groups("T", ("u", "h", "c_load", "c_off"), MOST_TRAINERS)

    def by_generator(name: str) -> tuple[Decimal, ...]:
        return _by_group(name, given.get(name, (Decimal(0),)), num_generators, "G", "generator")

    def by_trainer(name: str, default: Decimal = Decimal(0)) -> tuple[Decimal, ...]:
        return _by_group(name, given.get(name, (default,)), num_trainers, "T", "trainer")

    generate = by_generator("g")
    columns = by_trainer("u"), by_trainer("h", max(generate)), by_trainer("c_load"), by_trainer("c_off")
    first, *more = itertools.starmap(TrainerTimes, zip(*columns, strict=True))
    return Durations(
        num_micro_batches=_count("B", one("B", Decimal(1)), MOST),
        num_steps=_count("S", one("S", Decimal(1)), MOST),
        generate_s=generate,
        score_s=by_generator("r"),
        **first._asdict(),
        commit_s=one("y_opt", Decimal(0)),
        load_s=one("y_sync", Decimal(0)),
        more_trainers=tuple(more),
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
        return average(found).quantize(Decimal("0.001")) if found else default or Decimal(0)

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
        load_s=average(means(generators, "load") or [none]).quantize(Decimal("0.001")),
    )


def average(values: Iterable[Decimal]) -> Decimal:
    """The mean of at least one number."""
    numbers = tuple(values)
    return sum(numbers, Decimal(0)) / len(numbers)


def _decimal(name: str, text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ConfigError(f"durations: {name}={text!r} is not a number") from None
    if not value.is_finite() or value < 0:
        raise ConfigError(f"durations: {name}={text} must be finite and not negative")
    return value


def _count(name: str, value: Decimal, most: int) -> int:
    if value > most:
        raise ConfigError(f"durations: {name}={value} is beyond {most:,}, the most that can be simulated")
    if value != value.to_integral_value() or value < 1:
        raise ConfigError(f"durations: {name}={value} must be a whole number of at least 1")
    return int(value)


def _by_group(name: str, values: tuple[Decimal, ...], count: int, letter: str, kind: str) -> tuple[Decimal, ...]:
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ConfigError(f"durations: {name} has {len(values)} entries for {letter}={count} {kind} groups")
    return values
