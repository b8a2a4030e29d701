"""A simulated run in words and a picture, for a terminal."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from textwrap import shorten
from typing import TYPE_CHECKING

from digen.twin import Twin, compare

if TYPE_CHECKING:
    from digen.config import ScheduleConfig
    from digen.durations import Durations

_MARKS = {
    "generate": "g",
    "assist": "a",
    "score": "s",
    "update": "u",
    "commit": "C",
    "publish": "P",
    "load": "L",
    "switch": "x",
    "snapshot": "n",
    "checkpoint": "k",
}

_WIDTH = 96
"""Characters of the picture."""

_MOST_ROWS = 16
"""Workers in the picture."""

_LONGEST = 200
"""Characters of the durations; with many groups that differ they are more."""


def shown_steps(durations: Durations, *, width: int = _WIDTH) -> range:
    """The steps that the picture of a run shows: all, or in a long run so many from its middle as can be told apart."""
    count = max(2, width // (2 * durations.num_micro_batches))
    if durations.num_steps <= count:
        return range(durations.num_steps)
    first = (durations.num_steps - count + 1) // 2
    return range(first, first + count)


def describe(twin: Twin, config: ScheduleConfig, *, origin: str = "", width: int = _WIDTH) -> list[str]:
    """A simulated run in words and a picture: makespan, comparison, bubbles by cause, a row for each worker.

    Args:
        twin: the run, with the tasks of at least :func:`shown_steps`.
        config: how it was scheduled.
        origin: where its durations come from.
        width: characters of the picture.
    """
    durations, makespans = twin.durations, compare(twin.durations)
    trainers = f", {durations.num_trainers} trainers" if durations.num_trainers > 1 else ""
    lines = [
        (
            f"simulated: mode {config.mode}, window {config.resolved_window}, TAG {config.resolved_tag}, "
            f"sync {config.sync}; {_several(durations.num_steps, 'step')} of "
            f"{_several(durations.num_micro_batches, 'micro-batch')}, "
            f"{_several(durations.num_generators, 'generator')}{trainers}"
        ),
        f"durations: {shorten(str(durations), _LONGEST, placeholder=' ...')}" + (f"; {origin}" if origin else ""),
    ]
    if twin.engine == "model":
        lines.append(
            "played by the exact model, which tells no causes of bubbles: the scheduler drives one trainer group"
        )
    lines.append(f"makespan {twin.makespan.normalize():,f} s, {twin.num_assists} assists")
    if durations.num_steps > 3:
        lines.append(f"  {float(twin.step_s):,.6g} s a step, the first and the last left out")
    lines += [
        f"  {makespans[name] / twin.makespan:.3f} x {what} ({float(makespans[name]):,.6g} s)"
        for name, what in (("naive", "naive"), ("colocated", "colocated, if every stage scaled linearly"))
        if twin.makespan and name in makespans and (name, config.mode) != ("colocated", "colocated")
    ]
    for role, bubble in twin.bubbles.items():
        causes = ", ".join(f"{cause} {share:.1%}" for cause, share in bubble["causes"].items() if share >= 0.0005)
        lines.append(f"  {role} idle {bubble['share']:.1%}" + (f" ({causes})" if causes else ""))
    return [*lines, "", *_picture(twin, config, width)]


def _picture(twin: Twin, config: ScheduleConfig, width: int) -> list[str]:
    """A row for each worker; a character shows what took most of its time."""
    durations, steps = twin.durations, shown_steps(twin.durations, width=width)
    starts = [Decimal(0), *twin.step_ends[:-1], twin.makespan]
    begin, end = starts[steps.start], starts[steps.stop]
    generators = [f"gen{number}" for number in range(durations.num_generators * (config.mode != "colocated"))]
    trainers = ["trainer"] if twin.engine == "scheduler" else [f"trainer{i}" for i in range(durations.num_trainers)]
    shown = generators[: _MOST_ROWS - len(trainers)]
    rows = dict.fromkeys([*shown, *trainers], "." * width)
    if end > begin:
        rows |= _rows(twin, [*shown, *trainers], int(begin / durations.tick), int(end / durations.tick), width)
    ruler = ""
    for step in steps if end > begin else ():
        place = int((starts[step] - begin) * width / (end - begin))
        if place >= len(ruler) + bool(ruler):
            ruler = ruler.ljust(place) + f"step {step}"
    lines = [f"{'':>10} {ruler}", *(f"{name:>10} {marks}" for name, marks in rows.items())]
    if len(generators) > len(shown):
        lines.append(f"{'':>10} and {len(generators) - len(shown):,} more generators")
    if len(steps) < durations.num_steps:
        shown_of = f"steps {steps.start} to {steps.stop - 1} of 0 to {durations.num_steps - 1}"
        lines.append(f"{'':>10} {shown_of}, from {begin.normalize():f} s")
    scale = float((end - begin) / width)
    lines.append(f"{'':>10} a character is {scale:.3g} s and shows what took most of it:")
    return [*lines, f"{'':>10} g generate  a assist  s score  u update  C commit  P publish  L load  x switch  . idle"]


def _rows(twin: Twin, names: list[str], begin: int, end: int, width: int) -> dict[str, str]:
    cell = end - begin  # the length of a character, in ticks / width, so that everything is whole
    shares = {name: [Counter[str]() for _ in range(width)] for name in names}
    for task in twin.finished:
        if (row := shares.get(task.worker)) is None:
            continue
        first, last = (int(time - begin) * width for time in (task.started, task.time))
        for place in range(max(0, first // cell), min(width, -(-last // cell))):
            row[place][_MARKS[task.kind]] += min(last, (place + 1) * cell) - max(first, place * cell)
    for row in shares.values():
        for share in row:
            share["."] = cell - share.total()
    return {name: "".join(max(share, key=share.__getitem__) for share in row) for name, row in shares.items()}


def _several(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural * (count > 1)}"
