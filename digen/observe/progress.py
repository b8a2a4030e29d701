"""The run as it goes: a live view on a terminal, one plain line a step anywhere else.

Both are folds of the event stream. A plain line is written when its event comes; the live view is drawn four times a
second by rich's own thread, so that an event costs no more than folding it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, TextIO

from digen.events import (
    AnyEvent,
    CheckpointSaved,
    Evaluated,
    Quarantined,
    RolledBack,
    RunFinished,
    RunStarted,
    StepCommitted,
    WorkerLost,
    WorkerRestarted,
)
from digen.observe.fold import ROLES, Fold
from digen.observe.ledger import WorkerLedger, task_label
from digen.observe.steps import StepSummary, step_time
from digen.observe.text import escape_text, format_duration, format_metrics, format_share, plural

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live

_KEEP_STEPS = 60
"""Steps that the sparkline and the remaining time look at."""


class Progress:
    """A sink that shows the run. Use as a context manager or call :meth:`close`.

    Args:
        stream: where to write; default: standard output as it is now.
        live: the live view instead of lines; default: if ``stream`` is a terminal that can redraw.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._fold = Fold(keep_steps=_KEEP_STEPS)
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._console: Console | None = None
        self._updated = time.monotonic()
        if live if live is not None else self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._start_live()

    def __call__(self, event: AnyEvent) -> None:
        """Take one event."""
        with self._lock:
            self._fold.apply(event)
            self._updated = time.monotonic()
        if line := self._line(event):
            self._print(line)
        if isinstance(event, RunFinished):
            self.close()

    def close(self) -> None:
        """Take the live view away. Lines stay. Harmless when the terminal is gone."""
        with suppress(OSError):
            self._stack.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def render(self) -> Group:
        """The live view of this moment, a rich renderable."""
        with self._lock:
            return _view(self._fold, time.monotonic() - self._updated)

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self._stream)
        live: Live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4, transient=True)
        self._stack.enter_context(live)

    def _print(self, line: str) -> None:
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self._stream, flush=True)

    def _line(self, event: AnyEvent) -> str:
        match event:
            case StepCommitted():
                live = self._console is not None
                return "" if live else step_line(self._fold.steps[event.step], self._num_steps)
            case RunStarted():
                return _start_line(event)
            case Evaluated():
                return f"eval  v{event.version}  {plural(event.num_samples, 'sample')}  {format_metrics(event.metrics)}"
            case CheckpointSaved():
                return f"saved v{event.version}  {escape_text(event.path)}"
            case RunFinished():
                return _end_line(self._fold, event)
            case WorkerLost():
                then = "out for good" if event.restart_in_s is None else "starting another"
                return f"lost   {escape_text(event.worker)}  {then}: {escape_text(event.error)}"
            case WorkerRestarted():
                return f"back   {escape_text(event.worker)}  v{event.version} after {format_duration(event.down_s)}"
            case RolledBack():
                return f"back   to v{event.version} from v{event.from_version}: no later checkpoint of the trainer"
            case Quarantined():
                where = f"step {event.step} micro-batch {event.index}"
                after = f" after {plural(event.attempts, 'failure')}" if event.attempts else ""
                return f"quarantined  {where}{after}: {escape_text(event.error)}"
        return ""

    @property
    def _num_steps(self) -> int:
        return self._fold.run.num_steps if self._fold.run is not None else 0


def step_line(summary: StepSummary, num_steps: int) -> str:
    """``step  12/50  reward 0.734 ±0.21  3.1 s  gen idle 12 %  trainer idle 31 %  stale 0``."""
    values, width = summary.values, len(str(num_steps))
    parts = [f"step {summary.version:>{width + 1}}/{num_steps}"]
    if "reward/mean" in values:
        parts.append(f"reward {values['reward/mean']:.3f} ±{_spread(values):.2f}")
    parts.append(format_duration(summary.duration_s))
    for role, short in (("generator", "gen"), ("trainer", "trainer")):
        if (share := values.get(f"pipeline/bubble_ratio/{role}")) is not None:
            parts.append(f"{short} idle {format_share(share):>4}")
    if "staleness/ratio" in values:
        parts.append(f"stale {format_share(values['staleness/ratio']) if values['staleness/ratio'] else 0}")
    return "  ".join(parts)


def sparkline(values: list[float]) -> str:
    """``values`` as a row of block characters from their least to their greatest."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / (high - low)) if high > low else 3] for value in values)


def _spread(values: dict[str, float]) -> float:
    return values.get("reward/group_std", values.get("reward/std", 0.0))


def _start_line(event: RunStarted) -> str:
    begin = f"resume at step {event.start_step}, " if event.start_step else ""
    stale = f" (at most {event.stale_limit} stale)" if event.window > 1 else ""
    how = f"TAG {escape_text(event.tag)}, window {event.window}{stale}, sync {escape_text(event.sync)}"
    steps, micro_batches = plural(event.num_steps, "step"), plural(event.num_micro_batches, "micro-batch")
    return f"start {begin}{steps} of {micro_batches}, {how}"


def _end_line(fold: Fold, event: RunFinished) -> str:
    typical = step_time(list(fold.steps.values()))
    speed = f", {60 / typical.median_s:.1f} steps/min ({typical.describe()})" if typical and typical.median_s else ""
    error = f": {escape_text(event.error)}" if event.error else ""
    return f"{event.outcome} after {plural(_num_done(fold), 'step')} in {format_duration(fold.now)}{speed}{error}"


def _num_done(fold: Fold) -> int:
    if fold.steps:
        return next(reversed(fold.steps.values())).version
    return fold.run.start_step if fold.run is not None else 0


def _view(fold: Fold, since_s: float) -> Group:
    """Everything in a few lines; ``since_s`` is how long ago the last event came."""
    from rich.console import Group

    now = fold.now + since_s
    parts: list[RenderableType] = [_bar(fold, now)]
    if fold.steps:
        parts.append(_rewards(fold))
    parts.append(_workers(fold, now))
    return Group(*parts)


def _bar(fold: Fold, now: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done, total = _num_done(fold), fold.run.num_steps if fold.run is not None else 0
    typical = step_time(list(fold.steps.values()))
    left = f", {format_duration(typical.median_s * (total - done))} left" if typical and done < total else ""
    grid = Table.grid(padding=(0, 1))
    name = str(fold.run.info.get("name", "run")) if fold.run is not None else "run"
    grid.add_row(
        Text(escape_text(name, 32), "bold"),
        Text(f"step {done}/{total}"),
        ProgressBar(total=max(total, 1), completed=done, width=32),
        Text(f"{format_duration(now)}{left}", "dim"),
    )
    return grid


def _rewards(fold: Fold) -> RenderableType:
    from rich.text import Text

    last = next(reversed(fold.steps.values()))
    rewards = [step.values["reward/mean"] for step in fold.steps.values() if "reward/mean" in step.values]
    text = Text()
    if rewards:
        text.append(f"reward {rewards[-1]:.3f} ±{_spread(last.values):.2f} ")
        text.append(sparkline(rewards[-40:]), "cyan")
        text.append("   ")
    text.append(
        f"{format_duration(last.duration_s)} a step   stale {format_share(last.values.get('staleness/ratio', 0.0))}   "
    )
    text.append(f"to score {len(fold.score_queue)}   to update {len(fold.update_queue)}")
    return text


def _workers(fold: Fold, now: float) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading, width in (("worker", 12), ("weights", 7), ("idle", 5), ("now", 44)):
        table.add_column(heading, min_width=width, no_wrap=True, justify="right" if heading == "idle" else "left")
    ledgers = [ledger for role in ROLES for ledger in fold.of_role(role)]
    shown = ledgers if len(ledgers) <= 16 else [*ledgers[:12], *fold.of_role("trainer")]
    for ledger in shown:
        share = ledger.idle_share(now)
        style = "green" if share < 0.15 else "yellow" if share < 0.4 else "red"
        doing, doing_style = _doing(ledger, now)
        table.add_row(
            Text(escape_text(ledger.name, 32)),
            f"v{ledger.version}",
            Text(format_share(share), style),
            Text(doing, doing_style),
        )
    if len(shown) < len(ledgers):
        table.add_row(Text(f"and {len(ledgers) - len(shown)} more", "dim"))
    return table


def _doing(ledger: WorkerLedger, now: float) -> tuple[str, str]:
    if ledger.lost_since is not None:
        return f"lost  {format_duration(now - ledger.lost_since)}", "red"
    if not ledger.present:
        return "left", "red"
    if not ledger.running:
        return f"idle: {ledger.idle_cause}", "dim"
    event, start = next(iter(ledger.running.values()))
    stale = " stale" if event.stale else ""
    return (
        f"{task_label(event.kind, event.step, event.index, event.version)}{stale}  {format_duration(now - start)}",
        "",
    )
