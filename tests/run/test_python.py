"""``digen.run`` and ``digen.arun`` from Python."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

import digen
from digen.checkpoint import verify
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


@pytest.mark.asyncio
async def test_arun_works_in_a_running_loop_and_leaves_nothing_when_cancelled(site: Site, undisturbed: Site) -> None:
    config = site.config(reward__kwargs={"pause_s": 0.1}, schedule__mode="tag")
    task = asyncio.create_task(digen.arun(config, progress=False))
    while not site.checkpoint(1).exists():
        assert not task.done(), task.result()
        await asyncio.sleep(0.05)
    workers = workers_of(os.getpid())
    assert len(workers) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    assert (site.run_folder() / "report.html").is_file()

    report = await digen.arun(config, resume="latest", progress=False)
    assert report.outcome == "completed"
    assert [step.version for step in report.steps][-1] == 4
    assert check(site.events()).steps_committed[-1] == 3
    assert verify(Path(report.values["checkpoint"]["path"])).version == 4
    assert site.tensors() == undisturbed.tensors()
    assert not workers_of(os.getpid())


def test_a_wrong_config_raises_and_starts_nothing(site: Site) -> None:
    with pytest.raises(digen.ConfigError, match="micro_batch_size=3"):
        digen.run(site.config(plan__micro_batch_size=3))
    with pytest.raises(digen.ConfigError, match="no run to resume"):
        digen.run(site.config(), resume="latest")
    assert not site.run_folder().exists()
