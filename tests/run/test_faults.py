"""Rewards that fail, training that diverges, processes that are killed, runs that are interrupted.

Each ends in an exit code and one line, leaves no process behind, and can be continued to the same weights, bit for bit.
"""

from __future__ import annotations

import json
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
from digen.events import (
    GroupDropped,
    MicroBatchSettled,
    RolledBack,
    RunFinished,
    RunStarted,
    TaskFinished,
    WorkerLost,
    WorkerRestarted,
)
from digen.quarantine import Quarantine
from digen.sched import check
from tests.run.harness import PAUSE_S, Command, Site

HOSTILE = "\x1b]0;owned\x07\u202e<script>alert(1)</script>"


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
    """Also where prompts would write to the terminal or into the report's page; and no key gets into any file."""
    prompts = [{"prompt": f"the digit {label} {HOSTILE}", "label": label} for label in range(10)]
    (site.folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    command = site.start(
        reward__name=reward,
        prompts__source="../prompts.jsonl",
        schedule__mode="colocated",
        workers__colocated_threads=1,
        environment={"WANDB_API_KEY": "sesame-9134"},
    )
    assert command.wait() == code
    files = [path for path in site.run_folder().rglob("*") if path.is_file()]
    assert not any(b"sesame-9134" in path.read_bytes() for path in files)
    written = [command.stdout, command.stderr]
    written += [path.read_text(encoding="utf-8") for path in site.run_folder().glob("logs/*")]
    written += [path.read_text(encoding="utf-8") for path in site.run_folder().glob("report.html")]
    for text in written:
        assert not set(text) & set("\x1b\x07\u202e")
    assert all("<script" not in page for page in written[3:])
    if reward == "run_rewards:nan":
        assert r"\x1b]0;owned\x07\u202e<script>" in command.stderr
        assert "&lt;script&gt;" in written[-1]
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


def test_a_trainer_that_is_killed_in_the_middle_of_a_step_takes_back_no_step(site: Site, undisturbed: Site) -> None:
    """In step 2, once it has trained on some of it; there is no checkpoint."""
    command = site.start(reward__kwargs={"pause_s": PAUSE_S}, checkpoint__every=1000)
    command.wait_for_line("step  2/4")
    log = site.run_folder() / "logs" / "gen0.1.log"
    command.wait_until(lambda: log.read_text(encoding="utf-8").count("scoring") >= 2 * 6 + 4)
    command.worker("trainer").kill()
    assert command.wait() == 0, command.stderr
    assert site.tensors() == undisturbed.tensors()
    events = site.events()
    assert check(events).steps_committed == [0, 1, 2, 3]
    assert [event.version for event in events if isinstance(event, WorkerRestarted)] == [2]
    assert not any(isinstance(event, RolledBack) for event in events)
    tasks = [event for event in events if isinstance(event, TaskFinished)]
    assert [task.version for task in tasks if task.kind == "snapshot"] == [1, 2, 3, 4]
    assert len({task.stats["bytes"] for task in tasks if task.kind == "snapshot"}) == 1
    assert sum(task.kind == "generate" for task in tasks) == 4 * 6, "no sample is drawn again"
    assert sum(task.kind == "update" for task in tasks) > 4 * 6, "but updates are applied again"


def test_a_prompt_that_kills_whoever_scores_it_is_left_out_by_the_next_run(site: Site) -> None:
    """The digit 9, in both micro-batches of its group in step 1. Nothing may be dropped at first: that ends the run."""
    poison: dict[str, Any] = {
        "run__num_steps": 2,
        "reward__name": "run_rewards:poison",
        "reward__kwargs": {"label": 9},
        "restarts__backoff_s": 0.0,
    }
    command = site.start(**poison)
    assert command.wait() == 1
    assert "worker 'gen0' died (killed by SIGABRT) during score step 1 micro-batch " in lines(command)[0]
    *_, hint = lines(command)
    assert hint.endswith(
        "continue from it with --resume latest; with schedule.max_dropped_groups above 0 it leaves out what is in "
        "../runs/digits/quarantine.jsonl"
    )
    (found,) = Quarantine(site.run_folder() / "quarantine.jsonl").found
    assert (found.kind, found.step, found.attempts) == ("score", 1, 3)
    assert [piece.prompt.metadata["label"] for piece in found.micro_batch.slices] == [9]
    assert sum("WorkerLost" in line for line in found.story) <= 3

    command = site.start("--resume", "latest", **poison, schedule__max_dropped_groups=0.5)
    assert command.wait() == 0, command.stderr
    events = site.events()
    assert check(events).steps_committed == [0, 1]
    again = events[max(place for place, event in enumerate(events) if isinstance(event, RunStarted)) :]
    assert not any(isinstance(event, WorkerLost) for event in again)
    (dropped,) = [event for event in again if isinstance(event, GroupDropped)]
    assert dropped.step == 1
    outcomes = [event.outcome for event in again if isinstance(event, MicroBatchSettled) and event.step == 1]
    assert sorted(outcomes) == ["dropped"] * 2 + ["updated"] * 4


def test_a_reward_that_hangs_is_found_and_nobody_is_judged_by_the_time_of_a_stopped_driver(
    site: Site, undisturbed: Site
) -> None:
    """The driver sleeps for longer than a worker may be silent, or take for a task; later a reward never returns."""
    hang = site.folder / "hang"
    command = site.start(
        reward__name="run_rewards:brightness_unless",
        reward__kwargs={"hang": str(hang), "pause_s": PAUSE_S},
        workers__heartbeat_timeout_s=2.0,
        restarts__deadline_floor_s=4.0,
        restarts__deadline_factor=1.5,
    )
    command.wait_for_line("saved v1")
    command.send(signal.SIGSTOP)
    time.sleep(5)
    command.send(signal.SIGCONT)
    command.wait_for_line("saved v2")
    assert "lost" not in command.stdout
    hang.touch()
    assert command.wait() == 0, command.stderr
    (lost,) = [event for event in site.events() if isinstance(event, WorkerLost)]
    assert (lost.worker, lost.reason) == ("gen0", "hung")
    assert "has not answered score for " in lost.error
    assert "in brightness_unless" in "".join(path.read_text() for path in site.run_folder().glob("logs/gen0.*"))
    assert site.tensors() == undisturbed.tensors()


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

    command = site.start("--resume", "latest", schedule__mode="colocated", workers__colocated_threads=1)
    assert command.wait() == 0, command.stderr
    assert site.tensors() == undisturbed.tensors()
    events = site.events()
    assert check(events).steps_committed == [0, 1, 2, 3]
    outcomes = [event.outcome for event in events if isinstance(event, RunFinished)]
    assert outcomes == ["drained", "stopped", "completed"]


def test_a_preemption_notice_saves_and_exits_with_0(site: Site, undisturbed: Site) -> None:
    """During the start-up, when it is kept until there is a step to finish, and then in a step."""
    slow: dict[str, Any] = {"reward__kwargs": {"pause_s": PAUSE_S}}
    command = site.start(schedule__mode="colocated", workers__colocated_threads=1)
    command.wait_until(lambda: len(command.workers()) == 1)
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
