"""The event log: what is written is what is read, also after a crash."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from digen.errors import OutputError
from digen.events import (
    AnyEvent,
    BubbleOpened,
    Cause,
    CheckpointSaved,
    Evaluated,
    EventLog,
    GroupCompleted,
    GroupDropped,
    MicroBatchSettled,
    Quarantined,
    Rewarded,
    RolledBack,
    RolloutLost,
    RunFinished,
    RunStarted,
    StepCommitted,
    TagDecided,
    TaskFailed,
    TaskFinished,
    TaskRetried,
    TaskStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRestarted,
    fan_out,
    read_events,
)
from digen.types import GroupSlice, MicroBatch, Prompt

ROOT = Path(__file__).parents[1]

EVENTS: list[AnyEvent] = [
    RunStarted(
        time=0.0,
        num_steps=2,
        start_step=0,
        num_micro_batches=4,
        window=2,
        stale_limit=2,
        sync="pull",
        update_order="index",
        tag="static(1)",
        barrier=False,
        info={"seed": 1, "nested": {"a": [1, "ü"]}},
    ),
    WorkerJoined(time=0.1, worker="gen0", role="generator", version=0),
    TaskStarted(time=0.2, task=1, kind="generate", worker="gen0", step=0, index=3, version=0, stale=True),
    TaskFinished(
        time=1.2, task=1, kind="generate", worker="gen0", step=0, index=3, version=0, started=0.2, stats={"a": 0.1}
    ),
    TaskFailed(time=1.3, task=2, kind="score", worker="gen0", step=0, index=3, started=1.2, error='died:\n"x"'),
    BubbleOpened(time=1.4, worker="trainer", cause="wait_rollout"),
    TagDecided(time=1.4, worker="trainer", step=0, assist=True, policy="greedy", reason="saves", saving_s=0.5),
    Rewarded(time=1.5, step=0, index=3, rewards=(0.1, 1 / 3), heads={"clip": (1e-300, 2.0)}),
    GroupCompleted(
        time=1.5, step=0, uid="s0p0", reward_mean=0.5, reward_std=0.0, num_kept=2, num_micro_batches=1, versions=(0, 1)
    ),
    GroupDropped(time=1.55, step=0, uid="s0p1", index=1, error="RewardError: no answer"),
    MicroBatchSettled(time=1.6, step=0, index=3, outcome="updated", version=0, staleness=0),
    StepCommitted(time=1.7, step=0, version=1, values={"reward/mean": 0.25}),
    CheckpointSaved(time=1.8, version=1, path="runs/a/1"),
    Evaluated(time=1.9, version=1, num_samples=10, metrics={"reward": 1.0}),
    WorkerLeft(time=2.0, worker="gen0", reason="removed"),
    WorkerLost(time=2.01, worker="gen0", role="generator", reason="hung", error="no heartbeat", restart_in_s=None),
    WorkerRestarted(time=2.02, worker="trainer", role="trainer", version=1, down_s=2.5),
    TaskRetried(time=2.03, kind="score", step=0, index=3, attempt=2, error="died"),
    Quarantined(
        time=2.04,
        kind="generate",
        step=0,
        index=3,
        attempts=3,
        error="died",
        micro_batch=MicroBatch(1, 0, 3, (GroupSlice("s0p0", Prompt("a", {"label": 1}), 0, 2, 4),)),
        story=("generated on gen0",),
    ),
    RolloutLost(time=2.045, step=0, index=3, worker="gen0", version=0),
    RolledBack(time=2.05, version=1, from_version=3, num_discarded=4),
    RunFinished(time=2.1, outcome="failed", error="WorkerDied: gen0"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_the_examples_cover_every_event() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(AnyEvent))


def test_round_trip(path: Path) -> None:
    with EventLog(path) as log:
        for event in EVENTS:
            log(event)
    assert list(read_events(path)) == EVENTS
    lines = path.read_bytes().splitlines()
    assert len(lines) == len(EVENTS)
    assert msgspec.json.decode(lines[1]) == {
        "event": "worker_joined",
        "time": 0.1,
        "worker": "gen0",
        "role": "generator",
        "version": 0,
    }


def test_an_empty_log_has_no_events(path: Path) -> None:
    EventLog(path).close()
    assert list(read_events(path)) == []


def test_a_second_log_appends(path: Path) -> None:
    for event in EVENTS[:2]:
        with EventLog(path) as log:
            log(event)
    assert list(read_events(path)) == EVENTS[:2]


@pytest.mark.parametrize("event", [e for e in EVENTS if isinstance(e, StepCommitted | CheckpointSaved | Evaluated)])
def test_a_commit_puts_everything_before_it_on_disk(path: Path, event: AnyEvent) -> None:
    with EventLog(path) as log:
        log(EVENTS[0])
        log(event)
        assert list(read_events(path)) == [EVENTS[0], event]


def test_a_killed_writer_leaves_a_readable_log(path: Path) -> None:
    code = (
        "import os, signal, sys, pathlib; from digen.events import *\n"
        f"log = EventLog(pathlib.Path({str(path)!r}))\n"
        "log(StepCommitted(time=1.0, step=0, version=1, values={}))\n"
        "for i in range(5000): log(WorkerJoined(time=float(i), worker='w' * 50, role='trainer', version=i))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    events = list(read_events(path))
    assert isinstance(events[0], StepCommitted)
    assert [event.time for event in events[1:]] == [float(i) for i in range(len(events) - 1)]
    assert 1000 < len(events) <= 5001


def test_a_last_line_cut_anywhere_is_left_out(path: Path) -> None:
    lines = [msgspec.json.encode(event) + b"\n" for event in EVENTS[:3]]
    whole = b"".join(lines)
    for cut in range(len(lines[0]) + len(lines[1]) + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert list(read_events(path)) == EVENTS[:2]
    path.write_bytes(whole[:-1])
    assert list(read_events(path)) == EVENTS[:2], "a line without its end counts as cut, as it does for EventLog"


def test_a_log_that_goes_on_after_a_cut_line_stays_readable(path: Path) -> None:
    """A run that was killed in the middle of a line resumes into the same file."""
    lines = [msgspec.json.encode(event) + b"\n" for event in EVENTS[:3]]
    path.write_bytes(b"".join(lines)[:-10])
    with EventLog(path) as log:
        log(EVENTS[3])
        log(EVENTS[4])
    assert list(read_events(path)) == [*EVENTS[:2], *EVENTS[3:5]]


@pytest.mark.parametrize("size", [10, 1 << 16, 3 * (1 << 16)])
def test_a_cut_line_of_any_length_is_removed(path: Path, size: int) -> None:
    good = msgspec.json.encode(EVENTS[0]) + b"\n"
    for whole in (good, b""):
        path.write_bytes(whole + b"x" * size)
        EventLog(path).close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "broken",
    [
        b'{"event":"worker_left","time":2.0,"worker":"ge',
        b'{"event":"worker_left","time":2.0}',
        b'{"event":"never_heard_of","time":2.0}',
        b'{"event":"worker_left","time":"x","worker":"a","reason":"b"}',
        b"\xff\xfe",
        b"",
    ],
)
def test_a_broken_line_in_the_middle_is_named(path: Path, broken: bytes) -> None:
    good = msgspec.json.encode(EVENTS[0])
    path.write_bytes(good + b"\n" + broken + b"\n" + good + b"\n")
    events = read_events(path)
    assert next(events) == EVENTS[0]
    with pytest.raises(ValueError, match=r"events\.jsonl line 2: "):
        list(events)


def test_fan_out_keeps_the_order_of_sinks() -> None:
    seen: list[tuple[str, AnyEvent]] = []
    emit = fan_out([lambda event: seen.append(("first", event)), lambda event: seen.append(("second", event))])
    emit(EVENTS[0])
    emit(EVENTS[1])
    assert seen == [("first", EVENTS[0]), ("second", EVENTS[0]), ("first", EVENTS[1]), ("second", EVENTS[1])]


def test_fan_out_to_one_or_none() -> None:
    seen: list[AnyEvent] = []
    assert fan_out([seen.append]) == seen.append
    fan_out([])(EVENTS[0])
    assert seen == []


def test_a_failing_sink_is_not_hidden() -> None:
    def fail(event: AnyEvent) -> None:
        raise OSError("disk full")

    seen: list[AnyEvent] = []
    with pytest.raises(OSError, match="disk full"):
        fan_out([fail, seen.append])(EVENTS[0])


def test_a_full_disk_is_an_error_not_a_silent_loss() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full is a Linux device")
    log = EventLog(Path("/dev/full"))
    told = "/dev/full cannot be written: No space left on device; free space there"
    with pytest.raises(OutputError, match=told):
        log(StepCommitted(time=1.0, step=0, version=1, values={}))
    with pytest.raises(OutputError, match=told):
        log.close()


def test_every_cause_of_idleness_is_explained() -> None:
    text = (ROOT / "digen" / "events.py").read_text(encoding="utf-8")
    for cause in get_args(Cause):
        assert text.count(cause) >= 2, f"{cause} is declared and explained"
