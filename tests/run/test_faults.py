"""Rewards that fail, training that diverges, processes that are killed, runs that are interrupted.

Each ends in an exit code and one line, leaves no process behind, and can be continued to the same weights, bit for bit.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from digen.checkpoint import completed, verify
from digen.events import RunFinished, RunStarted, WorkerLost
from digen.sched import check
from tests.run.harness import PAUSE_S, Command, Site


def lines(command: Command) -> list[str]:
    assert "Traceback" not in command.stderr
    return command.stderr.splitlines()


@pytest.mark.parametrize(
    ("reward", "code", "words"),
    [
        ("broken_rewards:f", 2, ["worker 'trainer'", "cannot be imported", "a_module_that_is_not_installed"]),
        ("run_rewards:nan", 1, ["step 0 failed", "is nan for sample s0p0/1", "'the digit "]),
        ("run_rewards:boom", 1, ["step 0 failed", "failed on samples s0p0/0 .. s0p0/1", "no reward for 2 images"]),
    ],
)
def test_a_reward_that_fails_is_one_line(site: Site, reward: str, code: int, words: list[str]) -> None:
    command = site.start(reward__name=reward, schedule__mode="colocated", workers__colocated_threads=1)
    assert command.wait() == code
    said = lines(command)
    assert said[0].startswith("digen: ")
    assert all(word in said[0] for word in [f"reward '{reward}'", *words]), said
    assert (
        said[1:]
        == [
            "the traceback is in the worker's log in ../runs/digits/logs",
            "no checkpoint was saved; delete ../runs/digits to start again",
        ][: 3 - code]
    )
    assert (site.run_folder() / "logs" / "trainer.1.log").read_text(encoding="utf-8").startswith("Traceback")
    if code == 1:
        *_, last = site.events()
        assert isinstance(last, RunFinished)
        assert last.outcome == "failed"
        check(site.events())
        assert (site.run_folder() / "report.html").is_file()


def test_divergence_is_one_line_and_spoils_no_checkpoint(site: Site, undisturbed: Site) -> None:
    """Going back to version 2 with a learning rate that is far too high."""
    shutil.copytree(undisturbed.run_folder(), site.run_folder())
    back = "../runs/digits/checkpoints/step-000002"
    alone: dict[str, Any] = {"schedule__mode": "colocated", "workers__colocated_threads": 1}
    command = site.start("--resume", back, optimizer__lr=1e30, optimizer__max_grad_norm=None, **alone)
    assert command.wait() == 1
    warning, *said = lines(command)
    assert warning.endswith("the config differs from the one before, which is kept kept=config.1.yaml")
    assert said[0].startswith("digen: step 3 failed: ")
    assert "not finite" in said[0]
    assert "optimizer.lr" in said[0]
    assert said[2].endswith("step-000003; continue from it with --resume latest")
    versions = [verify(path).version for path in completed(site.run_folder() / "checkpoints")]
    assert versions == [1, 2, 3], "the last one of the run that was given up is gone"
    assert site.tensors(2) == undisturbed.tensors(2)
    check(site.events())


def kill(command: Command, name: str) -> None:
    """SIGKILL a worker between commits, and see what the command says about it."""
    command.worker(name).kill()
    assert command.wait(30) == 1
    said = lines(command)
    assert f"worker '{name}' died (killed by SIGKILL) during " in said[0]
    assert "; its log is " in said[0]
    assert f"/runs/digits/logs/{name}." in said[0]
    assert not psutil.wait_procs(command.workers(), timeout=5)[1]


def test_killed_workers_and_a_killed_driver_cost_nothing_but_time(site: Site, undisturbed: Site) -> None:
    """gen0 dies in step 1, the trainer in step 2, the driver in step 3; without restarts each time it is resumed."""
    slow: dict[str, Any] = {"reward__kwargs": {"pause_s": PAUSE_S}, "schedule__mode": "tag", "restarts__budget": 0}
    command = site.start(**slow)
    command.wait_for_line("saved v1")
    kill(command, "gen0")
    assert lines(command)[1] == "last lines of gen0's log:"
    assert set(lines(command)[2:-1]) == {"scoring 2 images"}
    assert lines(command)[-1].endswith("step-000001; continue from it with --resume latest")

    command = site.start("--resume", "latest", **slow)
    command.wait_for_line("saved v2")
    kill(command, "trainer")

    command = site.start("--resume", "latest", **slow)
    command.wait_for_line("saved v3")
    orphans = command.workers()
    assert len(orphans) == 2
    command.process.kill()
    assert command.wait(5) == -signal.SIGKILL
    assert not psutil.wait_procs(orphans, timeout=5)[1]
    assert [verify(path).version for path in completed(site.run_folder() / "checkpoints")] == [1, 2, 3]

    command = site.start("--resume", "latest", schedule__mode="colocated", workers__colocated_threads=1)
    assert command.wait() == 0, command.stderr
    assert site.tensors() == undisturbed.tensors()
    events = site.events()
    assert check(events).steps_committed == [0, 1, 2, 3]
    assert [event.start_step for event in events if isinstance(event, RunStarted)] == [0, 1, 2, 3]


def test_killed_and_stopped_workers_come_back_in_the_same_run(site: Site, undisturbed: Site) -> None:
    """gen0 dies in step 1, the trainer in step 2, and gen0 stops answering in step 3."""
    command = site.start(
        reward__kwargs={"pause_s": PAUSE_S},
        schedule__mode="tag",
        restarts__deadline_floor_s=2.0,
        restarts__deadline_factor=3.0,
    )
    command.wait_for_line("saved v1")
    command.worker("gen0").kill()
    command.wait_for_line("back   gen0")
    command.wait_for_line("saved v2")
    command.worker("trainer").kill()
    command.wait_for_line("back   trainer")
    command.wait_for_line("saved v3")
    command.worker("gen0").suspend()
    assert command.wait() == 0, command.stderr
    assert site.tensors() == undisturbed.tensors()
    events = site.events()
    assert check(events).steps_committed == [0, 1, 2, 3]
    lost = [(event.worker, event.reason) for event in events if isinstance(event, WorkerLost)]
    assert lost == [("gen0", "died"), ("trainer", "died"), ("gen0", "hung")]
    assert "3 workers lost, 3 restarted" in command.stdout


def test_interrupts(site: Site, undisturbed: Site) -> None:
    """During the start-up, once in a step, twice in a step; the run goes on to the same weights."""
    slow: dict[str, Any] = {"reward__kwargs": {"pause_s": PAUSE_S}, "schedule__mode": "tag"}
    command = site.start(**slow)
    command.wait_until(lambda: len(command.workers()) == 2)
    command.send(signal.SIGINT)
    assert command.wait(10) == 130
    assert lines(command) == ["digen: interrupted", "nothing was trained; the same command starts again"]
    assert not command.workers()
    refused = site.start("--resume", "latest", **slow)
    assert refused.wait() == 2
    assert (
        "the run ended before its first one; delete ../runs/digits and start again without --resume"
        in lines(refused)[0]
    )

    command = site.start(**slow)  # and so it does
    command.wait_for_line("step  1/4")
    command.send(signal.SIGINT)
    assert command.wait(30) == 130
    newest = completed(site.run_folder() / "checkpoints")[-1]
    assert verify(newest).version in {1, 2}
    assert "finishing the step and saving a checkpoint; once more to stop at once" in lines(command)[0]
    hint = f"the last checkpoint is ../runs/digits/checkpoints/{newest.name}; continue from it with --resume latest"
    assert lines(command)[1:] == [f"digen: interrupted; {hint}"]
    assert "digits: drained, " in command.stdout
    assert not command.workers()

    command = site.start("--resume", "latest", **slow)
    command.wait_for_line("start resume")
    time.sleep(0.2)  # into a score
    command.send(signal.SIGINT)
    command.wait_until(lambda: "once more" in command.stderr)
    command.send(signal.SIGTERM)
    began = time.monotonic()
    assert command.wait(30) == 130
    assert time.monotonic() - began < 10
    assert "stopping now" in lines(command)[1]
    assert completed(site.run_folder() / "checkpoints")[-1] == newest
    assert not command.workers()

    command = site.start("--resume", "latest", schedule__mode="gap")
    assert command.wait() == 0, command.stderr
    assert site.tensors() == undisturbed.tensors()
    events = site.events()
    assert check(events).steps_committed == [0, 1, 2, 3]
    outcomes = [event.outcome for event in events if isinstance(event, RunFinished)]
    assert outcomes == ["drained", "stopped", "completed"]


def test_a_preemption_notice_saves_and_exits_with_0(site: Site, undisturbed: Site) -> None:
    """During the start-up, when it is kept until there is a step to finish, and then in a step."""
    slow: dict[str, Any] = {"reward__kwargs": {"pause_s": PAUSE_S}}
    command = site.start(**slow)
    command.wait_until(lambda: len(command.workers()) == 2)
    command.send(signal.SIGUSR1)
    assert command.wait() == 0
    assert "finishing the step and saving a checkpoint: the run is about to be ended" in lines(command)[0]
    assert completed(site.run_folder() / "checkpoints") == []
    shutil.rmtree(site.run_folder())
    command = site.start(**slow)
    command.wait_for_line("step  1/4")
    command.send(signal.SIGUSR1)
    command.send(signal.SIGTERM)  # a batch system's next word does not stop it at once
    assert command.wait() == 0
    newest = completed(site.run_folder() / "checkpoints")[-1]
    hint = f"the last checkpoint is ../runs/digits/checkpoints/{newest.name}; continue from it with --resume latest"
    assert lines(command)[-1] == f"digen: preempted; {hint}"
    assert not command.workers()
    assert site.tensors(verify(newest).version) == undisturbed.tensors(verify(newest).version)


@pytest.fixture
def small_disk(site: Site) -> Iterator[Path]:
    """A file system with room for one checkpoint, but not for two, in the place of the checkpoints."""
    folder = site.run_folder() / "checkpoints"
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=26m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_ends_the_run_and_spoils_no_checkpoint(site: Site, undisturbed: Site, small_disk: Path) -> None:
    (site.run_folder() / "lock").touch()  # the run's folder is as one that was claimed and not used
    command = site.start(schedule__mode="colocated", workers__colocated_threads=1)
    assert command.wait() == 1
    said = lines(command)
    assert re.match(
        r"digen: step \d failed: .*checkpoint \.\./runs/.*/\.step-000002\.tmp \(\d+\.\d MB\) cannot be written: ",
        said[0],
    )
    assert said[0].endswith("No space left on device; free space there; those before it are intact")
    assert said[-1].endswith("step-000001; continue from it with --resume latest")
    assert [verify(path).version for path in completed(small_disk)] == [1]
    assert site.tensors(1) == undisturbed.tensors(1)


def test_a_record_that_cannot_be_written_ends_the_run(site: Site) -> None:
    folder = site.run_folder()
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "events.jsonl").symlink_to("/dev/full")
    command = site.start(schedule__mode="colocated", workers__colocated_threads=1)
    assert command.wait() == 1
    assert lines(command) == [
        "digen: ../runs/digits/events.jsonl cannot be written: No space left on device; free space there",
        "nothing was trained; the same command starts again",
    ]
    assert not command.workers()


def test_a_step_beyond_its_limits_ends_the_run_unsaved(site: Site) -> None:
    command = site.start(
        schedule__mode="colocated", workers__colocated_threads=1, run__stop_below={"reward/mean": 0.99}
    )
    assert command.wait() == 1
    assert re.match(
        r"digen: step 0: reward/mean is 0\.\d+, below the limit 0\.99 of run\.stop_below; ", lines(command)[0]
    )
    assert completed(site.run_folder() / "checkpoints") == []
    check(site.events())
