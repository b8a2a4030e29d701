"""``digen.run`` and ``digen.arun`` from Python."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import psutil
import pytest
from structlog.testing import capture_logs

import digen
from digen import StepReport, signals
from digen.checkpoint import verify
from digen.events import AnyEvent, CheckpointSaved, RunFinished, RunStarted, fan_out
from digen.runner import _Interrupt, _interruptible
from digen.sched import check
from tests.run.harness import Site, workers_of


def test_run_returns_a_report(site: Site, undisturbed: Site, capsys: pytest.CaptureFixture[str]) -> None:
    num_fds = psutil.Process().num_fds()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupt = signal.getsignal(signal.SIGINT)
    report = digen.run(site.config(schedule__mode="colocated", workers__colocated_threads=1), progress=False)
    assert capsys.readouterr() == ("", "")
    assert isinstance(report, digen.RunReport)
    assert (report.folder, report.outcome) == (site.run_folder(), "completed")
    assert [step.version for step in report.steps] == [1, 2, 3, 4]
    assert report.steps[-1].metrics()["version/trainer"] == 4
    assert report.values == json.loads((report.folder / "report.json").read_text(encoding="utf-8"))
    assert report.summary().startswith("digits: completed, 4 of 4 steps in ")
    assert site.tensors() == undisturbed.tensors()
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is interrupt
    assert psutil.Process().num_fds() <= num_fds
    assert not workers_of(os.getpid())


@pytest.mark.asyncio
async def test_run_in_a_running_loop_says_what_to_call(site: Site) -> None:
    with pytest.raises(RuntimeError, match=r"await digen\.arun"):
        digen.run(site.config())
    assert not site.run_folder().exists()


def _listening(process: psutil.Process) -> set[Any]:
    return {each for each in process.net_connections() if each.status == psutil.CONN_LISTEN}


@pytest.mark.asyncio
async def test_arun_works_in_a_running_loop_and_leaves_nothing_when_cancelled(site: Site, undisturbed: Site) -> None:
    config = site.config(reward__kwargs={"pause_s": 0.1}, schedule__mode="tag")
    workers: list[psutil.Process] = []
    listening: list[Any] = []
    before = _listening(psutil.Process())  # of other tests

    async def cancel(scope: anyio.CancelScope) -> None:
        while not site.checkpoint(1).exists():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.05)
        workers.extend(workers_of(os.getpid()))
        for process in (psutil.Process(), *workers):
            listening.extend(_listening(process) - before)
        scope.cancel()

    with anyio.CancelScope() as scope:  # which cancels again whatever is awaited until it is left
        cancelling = asyncio.create_task(cancel(scope))
        await digen.arun(config, progress=False)
    assert scope.cancelled_caught
    await cancelling
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(workers) == 2
    assert listening == [], "a run on one machine is not to be reached from anywhere"
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    assert (site.run_folder() / "report.html").is_file()

    alone = site.config(schedule__mode="colocated", workers__colocated_threads=1)
    report = await digen.arun(alone, resume="latest", progress=False)
    assert report.outcome == "completed"
    assert [step.version for step in report.steps][-1] == 4
    assert check(site.events()).steps_committed[-1] == 3
    assert verify(Path(report.values["checkpoint"]["path"])).version == 4
    assert site.tensors() == undisturbed.tensors()
    assert not workers_of(os.getpid())


def test_a_terminal_that_goes_away_ends_no_run(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers are left out: only what becomes of the events is looked at."""
    begun = RunStarted(0.0, 2, 0, 1, 1, 0, "pull", "index", "never", barrier=False)
    events: list[AnyEvent] = [
        begun,
        CheckpointSaved(1.0, 1, "a"),
        CheckpointSaved(2.0, 2, "b"),
        RunFinished(3.0, "completed"),
    ]

    async def train(*arguments: Any, signals: bool) -> tuple[tuple[StepReport, ...], str]:
        monkeypatch.setattr("digen.observe.progress.print", hang_up, raising=False)
        for event in events:
            fan_out(arguments[-1])(event)
        return (), "completed"

    def hang_up(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("digen.runner._train", train)
    with capture_logs() as logs:
        assert digen.run(site.config()).outcome == "completed"
    assert site.events() == events
    assert [entry["sink"] for entry in logs if entry["log_level"] == "warning"] == ["Progress"]


@pytest.mark.asyncio
async def test_an_interruption_after_the_last_step_is_not_swallowed() -> None:
    """While workers are closed there is no step left to finish."""
    task = asyncio.current_task()
    assert task is not None
    over: Any = SimpleNamespace(outcome="completed")  # which could not be drained
    interrupt = _Interrupt(task)
    interrupt.begin(over)
    interrupt(signal.SIGUSR1)
    assert not interrupt.preempted
    interrupt(signal.SIGINT)
    with pytest.raises(asyncio.CancelledError, match="interrupted by SIGINT"):
        await asyncio.sleep(0)
    task.uncancel()


def test_a_preemption_notice_before_the_run_is_kept_for_it() -> None:
    async def noticed() -> bool:
        async with _interruptible(signals=True) as interrupt:
            return interrupt.preempted

    before = signal.getsignal(signal.SIGUSR1)
    with signals.remembered():
        assert not asyncio.run(noticed())
        os.kill(os.getpid(), signal.SIGUSR1)
        signals.obey()
        assert asyncio.run(noticed())
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_wrong_config_raises_and_starts_nothing(site: Site) -> None:
    with pytest.raises(digen.ConfigError, match="micro_batch_size=3"):
        digen.run(site.config(plan__micro_batch_size=3))
    with pytest.raises(digen.ConfigError, match="no run to resume"):
        digen.run(site.config(), resume="latest")
    assert not site.run_folder().exists()
