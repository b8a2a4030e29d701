"""Bytes of rollouts: a limit that admission keeps, and a run whose memory does not grow with its length."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from digen import Payload, Plan, Scheduler, SimWorker, StepReport
from digen.errors import ConfigError, StepFailed
from digen.events import BubbleOpened, StepCommitted, TaskFinished, TaskStarted, WorkerLost
from digen.restarts import RestartsSection
from digen.types import MicroBatch, PayloadRef, Rollout
from digen.workers.clock import run_virtual


class Heavy(SimWorker):
    """Its rollouts have arrays, of so many bytes a micro-batch."""

    def __init__(self, name: str, durations: Any, nbytes: Callable[[int, int], int]) -> None:
        super().__init__(name, durations)
        self._nbytes = nbytes

    async def generate(self, micro_batch: MicroBatch, /) -> Rollout:
        rollout = await super().generate(micro_batch)
        payload = Payload({"latents": bytes(self._nbytes(micro_batch.step, micro_batch.index)), "rewards": b""})
        return msgspec.structs.replace(rollout, payload=payload)


def peaks(run: Any) -> list[float]:
    """The most bytes at a time, by step."""
    return [report.metrics()["memory/rollout_bytes"] for report in run.reports]


def slow_trainer(simulate: Callable[..., Any], limit: int | str | None, **options: Any) -> Any:
    """One generator that is far ahead of the trainer: 4 micro-batches of 100 bytes a step."""
    return simulate(
        num_steps=4,
        generators=[Heavy("g0", {"generate": 1}, lambda step, index: 100)],
        trainer={"update": 10},
        config={"window": 2, "stale_fraction": 1, "max_rollout_bytes": limit},
        **options,
    )


@pytest.mark.parametrize(
    ("limit", "most"), [(None, 800), ("1KiB", 800), (800, 800), (799, 700), (600, 600), (450, 400), (400, 400)]
)
def test_later_steps_are_generated_only_while_they_fit(
    simulate: Callable[..., Any], limit: int | str | None, most: int
) -> None:
    run = slow_trainer(simulate, limit)
    run.trained_once()
    assert peaks(run) == [most, most, most, 400]  # nothing comes after the last step
    waits = [event for event in run.of(BubbleOpened) if event.cause == "wait_memory"]
    assert bool(waits) == (most < 800)
    assert run.makespan == (161 if most > 400 else 164)  # with no lookahead every step begins with a wait


def test_a_limit_that_a_step_exceeds_ends_the_run(simulate: Callable[..., Any]) -> None:
    run = slow_trainer(simulate, 399, catch=StepFailed)
    assert isinstance(run.error.__cause__, ConfigError)
    assert "4 of the 4 micro-batches of step 0 take 400 bytes, more than schedule.max_rollout_bytes=399" in str(
        run.error
    )


def test_bytes_of_arrays_of_any_kind() -> None:
    payload = Payload({"numpy": np.zeros((2, 3), np.float32), "bytes": b"12345", "list": [1, 2]})
    assert payload.nbytes == 24 + 5
    assert Payload(ref=PayloadRef("gen0#1", 0, 100, ())).nbytes == 100


def test_an_assist_is_of_the_current_step_and_always_fits(simulate: Callable[..., Any]) -> None:
    run = simulate(
        num_steps=2,
        generators=[Heavy("g0", {"generate": 10}, lambda step, index: 100)],
        trainer=Heavy("t", {"generate": 1}, lambda step, index: 100),
        config={"mode": "tag", "tag": "greedy", "max_rollout_bytes": 400},
    )
    assert peaks(run) == [400, 400]


def current(run: Any, event: TaskStarted) -> int:
    """The step that is trained when ``event`` happens."""
    return sum(commit.time <= event.time for commit in run.of(StepCommitted))


@pytest.mark.parametrize("seed", range(30))
def test_no_run_passes_its_limit_by_more_than_what_those_in_flight_take_beyond_the_largest_so_far(
    simulate: Callable[..., Any], seed: int
) -> None:
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    num_micro_batches, num_steps = draw.randint(1, 6), draw.randint(2, 5)
    size = {(k, i): draw.randint(10, 100) for k in range(num_steps) for i in range(num_micro_batches)}
    steps = [sum(size[k, i] for i in range(num_micro_batches)) for k in range(num_steps)]
    limit = draw.randint(max(steps), 3 * max(steps))
    window = draw.randint(1, 4)
    run = simulate(
        num_steps=num_steps,
        num_micro_batches=num_micro_batches,
        generators=[Heavy(f"g{i}", {"generate": draw.randint(1, 9)}, lambda k, i: size[k, i]) for i in range(3)],
        trainer={"update": draw.randint(1, 9), "generate": 5},
        config={
            "window": window,
            "stale_fraction": draw.choice([0, "0.5", 1]) if window > 1 else 0,
            "sync": draw.choice(["hold", "pull"]),
            "max_rollout_bytes": limit,
        },
    )
    run.trained_once()
    largest = held = num_generating = 0
    for event in run.events:
        if isinstance(event, TaskStarted) and event.kind in {"generate", "assist"}:
            num_generating += 1
            assert event.step == current(run, event) or held + num_generating * largest <= limit
        elif isinstance(event, TaskFinished) and event.kind in {"generate", "assist"}:
            num_generating -= 1
            held += size[event.step, event.index]
            largest = max(largest, size[event.step, event.index])
        elif isinstance(event, StepCommitted):
            held -= steps[event.step]
    assert held == 0


def test_a_run_of_ten_thousand_steps_does_not_grow() -> None:
    plan = Plan(["a", "b"], num_steps=10_000, prompts_per_step=2, samples_per_prompt=1)
    seen: dict[int, tuple[int, int]] = {}

    def look(report: StepReport) -> None:
        if report.index in {3_000, 6_000, 9_000}:
            gc.collect()
            seen[report.index] = len(gc.get_objects()), psutil.Process().memory_info().rss

    class Forgetful(SimWorker):
        """Does not write the ledger, which grows with the run."""

        async def commit(self, *arguments: Any) -> Any:
            report = await super().commit(*arguments)
            self.trained.clear()
            return report

    async def main() -> None:
        durations = {"generate": 2, "score": 1, "update": 2, "load": 1}
        scheduler = Scheduler(
            plan,
            generators=[SimWorker("g0", durations), SimWorker("g1", durations)],
            trainer=Forgetful("t", durations),
            on_commit=look,
        )
        async with scheduler:
            async for _ in scheduler:
                pass

    run_virtual(main())
    (early, small), (_, _), (late, large) = seen[3_000], seen[6_000], seen[9_000]
    assert late - early < 200
    assert large - small < 2e6


def test_what_a_lost_worker_read_goes_with_it(simulate: Callable[..., Any]) -> None:
    """At once, not when the interpreter happens to look for cycles: it holds descriptors of shared memory."""

    class Mortal(Heavy):
        def __init__(self) -> None:
            super().__init__("g0", {"generate": 1, "score": 1}, lambda step, index: 100)
            self.num_lives = 1

        async def generate(self, micro_batch: MicroBatch, /) -> Rollout:
            rollout = await super().generate(micro_batch)
            array = np.zeros(100, np.uint8)
            watched.append(weakref.ref(array))
            return msgspec.structs.replace(rollout, payload=Payload({"latents": array}))

        async def score(self, rollout: Rollout, /) -> Any:
            if self.num_lives == 1 and rollout.micro_batch.step == 1:
                await asyncio.get_running_loop().create_future()
            return await super().score(rollout)

        async def kill(self, reason: str = "") -> None:
            pass

        async def restart(self) -> None:
            self.num_lives, self.version = 2, 0

    watched: list[weakref.ref[Any]] = []
    gc.disable()
    try:
        run = simulate(num_steps=3, generators=[Mortal()], restarts=RestartsSection(first_deadline_s=50))
        assert [event.reason for event in run.of(WorkerLost)] == ["hung"]
        alive = [ref for ref in watched if ref() is not None]
    finally:
        gc.enable()
    assert alive == []
