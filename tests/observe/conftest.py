"""Fabricated event streams: hand-written schedules, and a small stand-in for the scheduler that makes long ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from digen.events import (
    AnyEvent,
    BubbleOpened,
    CheckpointSaved,
    Evaluated,
    GroupCompleted,
    MicroBatchSettled,
    Rewarded,
    RunFinished,
    RunStarted,
    StepCommitted,
    TagDecided,
    TaskFailed,
    TaskFinished,
    TaskStarted,
    WorkerJoined,
)

Task = tuple[str, str, float, float, int, int]
"""worker, kind, start, end, step, micro-batch."""


def run_started(num_steps: int = 1, start_step: int = 0, **changes: Any) -> RunStarted:
    fields: dict[str, Any] = {
        "time": 0.0,
        "num_steps": num_steps,
        "start_step": start_step,
        "num_micro_batches": 4,
        "window": 1,
        "stale_limit": 0,
        "sync": "pull",
        "update_order": "index",
        "tag": "never",
        "barrier": False,
    }
    return RunStarted(**(fields | changes))


def schedule(tasks: list[Task], end: float, causes: dict[str, str]) -> list[AnyEvent]:
    """The stream of a hand-written schedule; a worker named ``trainer`` trains, all others generate.

    A worker that is idle after a task, or from the beginning, opens a bubble with its cause in ``causes``.
    """
    workers = dict.fromkeys([*causes, *(task[0] for task in tasks)])
    starts = {(worker, start) for worker, _, start, *_ in tasks}
    timed: list[tuple[float, int, AnyEvent]] = []
    for worker in workers:
        timed.append((0.0, 0, WorkerJoined(0.0, worker, "trainer" if worker == "trainer" else "generator", 0)))
        if (worker, 0.0) not in starts:
            timed.append((0.0, 2, BubbleOpened(0.0, worker, causes[worker])))  # type: ignore[arg-type]  # a test's own
    for number, (worker, kind, start, stop, step, index) in enumerate(tasks):
        timed.append((start, 3, TaskStarted(start, number, kind, worker, step, index, 0)))  # type: ignore[arg-type]
        timed.append((stop, 1, TaskFinished(stop, number, kind, worker, step, index, 0, start)))  # type: ignore[arg-type]
        if (worker, stop) not in starts and stop < end:
            timed.append((stop, 2, BubbleOpened(stop, worker, causes[worker])))  # type: ignore[arg-type]
    timed.sort(key=lambda item: item[:2])
    return [run_started(), *(event for *_, event in timed), RunFinished(end, "completed")]


class FakeRun:
    """A stand-in for the scheduler: plausible streams of any length. Not a model of Algorithm 1."""

    def __init__(
        self, num_steps: int, generators: int, *, start_step: int = 0, window: int = 1, tag: bool = True, seed: int = 0
    ) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a test's own numbers
        self.events: list[AnyEvent] = []
        self.now = 0.0
        self.window, self.tag, self.num_steps, self.micro_batches = window, tag, num_steps, 8
        self.step = self.published = start_step
        self.workers = [f"gen{number}" for number in range(generators)] + ["trainer"]
        self.held = dict.fromkeys(self.workers, start_step)
        self.jobs: dict[str, tuple[float, int, str, int, int, float]] = {}
        self.causes: dict[str, str] = {}
        self.pending = {step: list(range(self.micro_batches)) for step in range(start_step, num_steps)}
        self.made: dict[tuple[int, int], int] = {}
        self.to_score: list[tuple[int, int]] = []
        self.scored: set[tuple[int, int]] = set()
        self.updated = 0
        self.commit_state = ""
        self.num_tasks = self.assists = 0
        self.began = 0.0
        self.start_step = start_step

    def emit(self, event: AnyEvent) -> None:
        self.events.append(event)

    def stream(self) -> list[AnyEvent]:
        mode = "tcss" if self.window > 1 else "tag" if self.tag else "gap"
        self.emit(
            run_started(
                self.num_steps, self.start_step, num_micro_batches=8, window=self.window,
                stale_limit=4 if self.window > 1 else 0, tag="greedy" if self.tag else "never",
                info={"name": "digits", "mode": mode},
            )
        )  # fmt: skip
        for worker in self.workers:
            role = "trainer" if worker == "trainer" else "generator"
            self.emit(WorkerJoined(0.0, worker, role, self.start_step))  # type: ignore[arg-type]
        if self.start_step == 0:
            self.emit(Evaluated(0.0, 0, 400, {"accuracy": 0.352, "reward/mean": 0.311}))
        while self.step < self.num_steps or self.jobs:
            for worker in self.workers:
                if worker not in self.jobs:
                    self.dispatch(worker)
            self.now, _, worker = min(
                (job[0], number, worker) for number, (worker, job) in enumerate(self.jobs.items())
            )
            self.complete(worker)
        self.emit(Evaluated(self.now, self.num_steps, 400, {"accuracy": 0.871, "reward/mean": 0.822}))
        self.emit(RunFinished(self.now, "completed"))
        return self.events

    def launch(self, worker: str, kind: str, step: int, index: int, seconds: float, *, stale: bool = False) -> None:
        self.num_tasks += 1
        end = self.now + seconds * self.random.uniform(0.93, 1.09)
        self.jobs[worker] = (end, self.num_tasks, kind, step, index, self.now)
        self.causes.pop(worker, None)
        version = self.published if kind == "load" else self.held[worker]
        self.emit(TaskStarted(self.now, self.num_tasks, kind, worker, step, index, version, stale))  # type: ignore[arg-type]

    def idle(self, worker: str, cause: str) -> None:
        if self.causes.get(worker) != cause:
            self.causes[worker] = cause
            self.emit(BubbleOpened(self.now, worker, cause))  # type: ignore[arg-type]

    def dispatch(self, worker: str) -> None:
        if worker == "trainer":
            return self.dispatch_trainer()
        if self.held[worker] < self.published:
            return self.launch(worker, "load", self.published, -1, 0.08)
        if self.to_score:
            return self.launch(worker, "score", *self.to_score.pop(0), 0.12)
        for step in range(self.held[worker], min(self.held[worker] + self.window, self.num_steps)):
            stale = step > self.held[worker]
            if self.pending[step] and not (stale and len(self.pending[step]) <= 4):
                return self.launch(worker, "generate", step, self.pending[step].pop(0), 1.0, stale=stale)
        return self.idle(worker, "wait_work" if self.step >= self.num_steps - 1 else "wait_weights")

    def dispatch_trainer(self) -> None:
        if self.commit_state:
            kind = self.commit_state
            return self.launch(
                "trainer", kind, self.step, -1, {"commit": 0.1, "publish": 0.15, "checkpoint": 0.2}[kind]
            )
        if (self.step, self.updated) in self.scored:
            return self.launch("trainer", "update", self.step, self.updated, 0.3)
        if self.step >= self.num_steps:
            return self.idle("trainer", "wait_work")
        if self.tag and self.assists < 1 and self.pending.get(self.step) and self.published == self.step:
            self.emit(TagDecided(self.now, "trainer", self.step, True, "greedy", "3 pending, saves 0.4 s", 0.4))
            self.assists += 1
            index = self.pending[self.step].pop(0)
            return self.launch("trainer", "assist", self.step, index, 1.4)
        if "trainer" not in self.causes and self.tag:
            self.emit(TagDecided(self.now, "trainer", self.step, False, "greedy", "nothing pending"))
        return self.idle("trainer", "wait_rollout" if not self.to_score else "wait_score")

    def complete(self, worker: str) -> None:
        _, task, kind, step, index, started = self.jobs.pop(worker)
        version = self.published if kind == "load" else self.step + 1 if kind == "commit" else self.held[worker]
        if kind == "generate" and self.random.random() < 0.01:
            self.emit(
                TaskFailed(self.now, task, "generate", worker, step, index, started, "WorkerRaised: out of memory")
            )
            self.pending[step].insert(0, index)
            return
        self.emit(TaskFinished(self.now, task, kind, worker, step, index, version, started))  # type: ignore[arg-type]
        if kind in ("generate", "assist"):
            self.made[step, index] = version
            self.to_score.append((step, index))
        elif kind == "load":
            self.held[worker] = version
        elif kind == "score":
            self.score(step, index)
        elif kind == "update":
            made = self.made[step, index]
            self.emit(MicroBatchSettled(self.now, step, index, "updated", made, step - made))
            self.updated += 1
            self.commit_state = "commit" if self.updated == self.micro_batches else ""
        elif kind == "commit":
            self.commit(step)
        elif kind == "publish":
            self.published = self.step = step + 1
            self.updated = self.assists = 0
            self.commit_state = "checkpoint" if self.step % 10 == 0 else ""
        elif kind == "checkpoint":
            self.emit(CheckpointSaved(self.now, self.step, f"runs/digits/checkpoints/{self.step}"))
            self.commit_state = ""

    def score(self, step: int, index: int) -> None:
        mean = 0.3 + 0.55 / (1 + math.exp(-(step - 18) / 6)) + self.random.gauss(0, 0.015)
        rewards = tuple(min(1.0, max(0.0, self.random.gauss(mean, 0.22))) for _ in range(12))
        self.emit(Rewarded(self.now, step, index, rewards))
        self.scored.add((step, index))
        if index % 2 == 1:
            pair = tuple(self.made.get((step, number), step) for number in (index - 1, index))
            self.emit(GroupCompleted(self.now, step, f"s{step}p{index // 2}", mean, 0.21, 24, 2, pair))

    def commit(self, step: int) -> None:
        self.held["trainer"] = step + 1
        values = {
            "loss/policy": -0.0004 * self.random.random(), "ratio/max": 1 + 0.002 * self.random.random(),
            "clip_fraction": 0.2 * self.random.random(), "grad_norm": 0.4 + 0.2 * self.random.random(), "lr": 6e-5,
            "perf/samples_per_s": 96 / (self.now - self.began), "weight_sync/bytes": 3.1e6, "weight_sync/seconds": 0.23,
        }  # fmt: skip
        self.began = self.now
        self.emit(StepCommitted(self.now, step, step + 1, values))
        self.commit_state = "publish"


@pytest.fixture
def fake_run() -> Callable[..., list[AnyEvent]]:
    """``fake_run(num_steps, generators, ...)`` gives the stream of a :class:`FakeRun`."""
    return lambda *args, **kwargs: FakeRun(*args, **kwargs).stream()


@pytest.fixture
def hand_made() -> Callable[[list[Task], float, dict[str, str]], list[AnyEvent]]:
    """:func:`schedule`."""
    return schedule


@pytest.fixture
def started() -> Callable[..., RunStarted]:
    """:func:`run_started`."""
    return run_started
