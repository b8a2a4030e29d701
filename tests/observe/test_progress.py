"""Lines and live view of a run, as a reader sees them."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from rich.console import Console

from digen.events import AnyEvent, CheckpointSaved, Evaluated, RunFinished
from digen.observe.progress import Progress, sparkline, step_line
from digen.observe.steps import StepSummary

FakeRuns = Callable[..., list[AnyEvent]]


def test_plain_lines(fake_run: FakeRuns) -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        for event in fake_run(12, 2, window=2):
            progress(event)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "start 12 steps of 8 micro-batches, TAG greedy, window 2 (at most 4 stale), sync pull"
    assert lines[1] == "eval  v0  400 samples  accuracy 0.352, reward/mean 0.311"
    assert [line for line in lines if line.startswith("step")][-1].startswith("step  12/12  reward 0.")
    assert "saved v10  runs/digits/checkpoints/10" in lines
    assert lines[-1].startswith("completed after 12 steps in ")
    assert len(lines) == 12 + 5


def test_a_step_in_one_line() -> None:
    values = {
        "reward/mean": 0.734,
        "reward/std": 0.21,
        "pipeline/bubble_ratio/generator": 0.12,
        "pipeline/bubble_ratio/trainer": 0.31,
        "staleness/ratio": 0.0,
    }
    line = step_line(StepSummary(11, 12, 0.0, 3.1, values), 50)
    assert line == "step  12/50  reward 0.734 ±0.21  3.1 s  gen idle 12 %  trainer idle 31 %  stale 0"
    assert step_line(StepSummary(0, 1, 0.0, 3.1, {}), 50) == "step   1/50  3.1 s"


def test_untrusted_text_is_escaped() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress(Evaluated(0.0, 0, 1, {"\x1b[2J": 1.0}))
    progress(CheckpointSaved(0.0, 0, "a\rb"))
    progress(RunFinished(0.0, "failed", "boom\n\x1b]0;x\x07"))
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 3


def test_a_terminal_that_is_gone_lets_the_view_close() -> None:
    class Terminal(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone and threading.current_thread() is threading.main_thread():
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    with Terminal() as terminal, Progress(terminal, live=True) as progress:
        terminal.gone = True
        with pytest.raises(OSError, match="Input/output"):
            progress(CheckpointSaved(0.0, 0, "a"))
        progress.close()


def test_the_live_view_shows_every_worker(fake_run: FakeRuns) -> None:
    progress = Progress(io.StringIO(), live=False)
    for event in fake_run(12, 3, window=2)[:600]:
        progress(event)
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(progress.render())
    text = console.export_text()
    assert "digits step" in text
    assert "left" in text
    for worker in ("gen0", "gen1", "gen2", "trainer"):
        assert worker in text
    assert "█" in text
    assert "to score" in text


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_the_live_view_of_a_run_that_just_began(fake_run: FakeRuns, length: int) -> None:
    progress = Progress(io.StringIO(), live=False)
    for event in fake_run(3, 2)[:length]:
        progress(event)
    Console(file=io.StringIO()).print(progress.render())


def test_the_live_view_of_many_workers_fits_a_screen(fake_run: FakeRuns) -> None:
    progress = Progress(io.StringIO(), live=False)
    for event in fake_run(3, 200)[:500]:
        progress(event)
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(progress.render())
    lines = console.export_text().splitlines()
    assert len(lines) < 24
    assert "and 188 more" in "\n".join(lines)


def test_the_live_view_ends_with_the_run(fake_run: FakeRuns) -> None:
    stream = io.StringIO()
    with Progress(stream, live=True) as progress:
        for event in fake_run(12, 2):
            progress(event)
    text = stream.getvalue()
    assert "saved v10" in text
    assert "completed after 12 steps" in text
    assert "step  12/12" not in text


def test_plain_lines_need_no_rich() -> None:
    code = (
        "import io, sys; from digen.observe.progress import Progress; Progress(io.StringIO());"
        "import digen.observe.report, digen.observe.page, digen.observe.trace, digen.observe.metrics;"
        "heavy = {'rich', 'torch', 'matplotlib', 'digen.sched', 'digen.workers'}; print(sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([]) == ""
