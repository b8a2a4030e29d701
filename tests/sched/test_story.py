"""What happened to one micro-batch or worker, told in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from digen import Scheduler
from digen.events import TaskStarted
from digen.sched import story
from digen.sched.story import Story


def test_the_story_of_a_micro_batch(simulate: Callable[..., Any]) -> None:
    told: list[str] = []

    async def body(scheduler: Scheduler) -> None:
        async for _ in scheduler:
            pass
        told.extend(scheduler.story(1, 2))

    simulate(num_steps=2, generators=[{"generate": 10}], trainer={"update": 4}, body=body)
    assert [line.split()[:2] for line in told] == [
        ["64.000000", "TaskStarted"],
        ["74.000000", "TaskFinished"],
        ["74.000000", "TaskStarted"],
        ["74.000000", "TaskFinished"],
        ["74.000000", "Rewarded"],
        ["74.000000", "TaskStarted"],
        ["78.000000", "TaskFinished"],
        ["78.000000", "MicroBatchSettled"],
    ]
    assert "kind='generate' worker='g0' step=1 index=2 version=1" in told[0]


def test_the_story_of_a_worker(simulate: Callable[..., Any]) -> None:
    memory = Story()
    simulate(generators=[{"generate": 10}] * 2, sinks=[memory.remember])
    lines = memory.of_worker("g1")
    assert "WorkerJoined" in lines[0]
    assert all("'g1'" in line for line in lines)
    assert sum("kind='generate'" in line and "TaskStarted" in line for line in lines) == 2


def test_only_the_last_events_are_remembered() -> None:
    memory = Story()
    for number in range(story._MEMORY + 10):
        memory.remember(TaskStarted(float(number), number, "generate", "g0", 0, 0, 0))
    assert len(memory.of_micro_batch(0, 0)) == story._MEMORY
    assert memory.of_micro_batch(0, 0)[0].startswith("10.0")
