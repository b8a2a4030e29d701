"""Snapshots of real processes: they outlive whoever wrote them, are read by another, and their memory is reused."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from digen import CheckpointError, InProcessWorker, Plan, ProcessWorker, ScheduleConfig, Scheduler
from digen.events import AnyEvent, RolledBack, TaskFinished, TaskStarted, WorkerLost, WorkerRestarted
from digen.restarts import RestartsSection
from digen.sched import check
from digen.types import Snapshot
from digen.workers.group import process_group
from tests.workers.conftest import HERE
from tests.workers.targets import Keeper

Make = Callable[..., ProcessWorker]
pytestmark = pytest.mark.usefixtures("nothing_left")
NUM_STEPS = 12


_others: set[Path] = set()


@pytest.fixture(autouse=True)
def _those_of_other_tests() -> None:
    _others.clear()
    _others.update(Path("/proc/self/fd").iterdir())


def segments() -> list[str]:
    """The memory files that this process has got descriptors of since the test began, by name."""
    found = []
    for path in set(Path("/proc/self/fd").iterdir()) - _others:
        try:
            name = str(path.readlink())
        except OSError:  # the descriptor of the listing itself
            continue
        if name.startswith("/memfd:digen:"):
            found.append(name.removeprefix("/memfd:digen:").removesuffix(" (deleted)"))
    return sorted(found)


@pytest.mark.asyncio
async def test_a_snapshot_outlives_its_process_and_goes_when_it_is_let_go(worker: Make) -> None:
    async with worker("trainer", "Keeper") as trainer:
        await trainer.commit(0, [])
        snapshot: Snapshot | None = await trainer.snapshot()
        assert isinstance(snapshot, Snapshot)
        assert (snapshot.version, snapshot.nbytes) == (1, 400_000)
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        await trainer.restart()
        assert trainer.version == 0
        (held,) = segments()
        assert await trainer.recall(snapshot) == trainer.version == 1
        assert segments() == [held], "it is read where it is"
        snapshot = None
        assert segments() == []


@pytest.mark.asyncio
async def test_each_rank_recalls_what_the_same_rank_wrote(tmp_path: Path) -> None:
    options: dict[str, Any] = {"log_dir": tmp_path, "env": {"PYTHONPATH": HERE}}
    async with process_group("trainer", "targets:Keeper", 2, **options) as trainer:
        await trainer.commit(0, [])
        snapshot = await trainer.snapshot()
        assert (snapshot.version, len(snapshot.payloads), snapshot.nbytes) == (1, 2, 800_000)
        await trainer.restart()
        assert await trainer.recall(snapshot) == trainer.version == 1
        swapped = Snapshot(1, snapshot.payloads[::-1], 0)
        with pytest.raises(CheckpointError, match="was given what rank"):
            await trainer.recall(swapped)
        newer = await trainer.snapshot()
        assert len(segments()) == 4
        del snapshot, swapped
        gc.collect()  # the error's frames
        assert len(segments()) == 2
        for payload in newer.payloads:
            trainer.release(payload)
        await trainer.snapshot()
        assert len(segments()) == 2, "the same again"
        del newer, payload
    assert segments() == []


@pytest.mark.asyncio
async def test_workers_of_this_process_have_none() -> None:
    async with InProcessWorker("trainer", Keeper) as trainer:
        assert not {"snapshot", "recall"} & set(trainer.methods)
        assert not hasattr(trainer, "snapshot")


@pytest.mark.asyncio
async def test_a_trainer_that_is_killed_goes_on_and_memory_stays_flat(worker: Make) -> None:
    trainer, generator = worker("trainer", "Keeper"), worker("gen0", "Engine")
    events: list[AnyEvent] = []
    held: dict[int, list[str]] = {}

    def look(event: AnyEvent) -> None:
        events.append(event)
        if isinstance(event, TaskFinished) and event.kind == "snapshot":
            held[event.version] = [name for name in segments() if name.startswith("trainer#")]
        if isinstance(event, TaskStarted) and (event.kind, event.step, event.index) == ("update", 6, 1):
            assert trainer.pid is not None
            if not any(isinstance(e, WorkerLost) for e in events):
                os.kill(trainer.pid, signal.SIGKILL)

    scheduler = Scheduler(
        Plan(["a"], num_steps=NUM_STEPS, prompts_per_step=3, samples_per_prompt=1),
        trainer=trainer,
        generators=[generator],
        config=ScheduleConfig(mode="gap"),
        restarts=RestartsSection(),
        sinks=[look],
    )
    async with asyncio.timeout(60), scheduler:
        steps = [step.index async for step in scheduler]
        (back,) = [event for event in events if isinstance(event, WorkerRestarted)]
        assert (back.worker, back.version) == ("trainer", 6)
        assert steps == list(range(NUM_STEPS))
        assert not any(isinstance(event, RolledBack) for event in events)
        assert check(events).steps_committed == steps
        assert await trainer.recall(await trainer.snapshot()) == NUM_STEPS
    assert {len(held[version]) for version in range(3, 7)} == {len(held[6])}, held
    assert {tuple(held[version]) for version in range(9, NUM_STEPS + 1)} == {tuple(held[NUM_STEPS])}, held
    assert len(held[NUM_STEPS]) == len(held[6]), held
    assert len({name.partition(":")[0] for name in held[8]}) == 1, "nothing is left of the trainer that was killed"
