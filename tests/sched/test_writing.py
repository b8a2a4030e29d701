"""Checkpoints that are written while the trainer goes on: announced when complete, waited for, given up with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from digen import Plan, Scheduler, SimWorker, StepFailed, UpdateReport, WorkerDied
from digen.errors import CheckpointError, NumericsError
from digen.events import BubbleOpened, CheckpointSaved, RunFinished, StepCommitted, TaskFailed, TaskFinished
from digen.restarts import RestartsSection
from digen.workers.clock import run_virtual
from digen.workers.faulty import Fault, FaultPlan, FaultyWorker

WORKERS: dict[str, Any] = {"generators": [{"generate": 1}], "trainer": {"update": 10}}


class Writing:
    """Copies for 1 s, and writes for ``write_s`` while the trainer goes on."""

    def __init__(self, write_s: float, error: Exception | None = None) -> None:
        self.write_s = write_s
        self.error = error
        self.writing: list[asyncio.Task[str]] = []

    def due(self, version: int, *, last: bool) -> bool:
        return True

    async def save(self, trainer: Any, version: int) -> asyncio.Task[str]:
        assert all(writing.done() for writing in self.writing), "the trainer's deadline would include that"
        await asyncio.sleep(1)
        self.writing.append(asyncio.create_task(self._write(version)))
        return self.writing[-1]

    async def _write(self, version: int) -> str:
        await asyncio.sleep(self.write_s)
        if self.error is not None:
            raise self.error
        return f"step-{version}"


def times(run: Any, kind: type) -> list[float]:
    return [event.time for event in run.of(kind)]


def test_the_trainer_goes_on_and_the_run_waits_for_the_last(simulate: Callable[..., Any]) -> None:
    """It stands still for the copy only: 1 s a step, where writing takes 5."""
    run = simulate(num_steps=3, checkpointer=Writing(5), **WORKERS)
    commits, saved = times(run, StepCommitted), times(run, CheckpointSaved)
    assert saved == [time + 1 + 5 for time in commits]
    assert [event.version for event in run.of(CheckpointSaved)] == [1, 2, 3]
    step_s = commits[0] - 1  # the first generation has nothing beside it
    assert [later - earlier for earlier, later in pairwise(commits)] == [step_s + 1] * 2
    assert run.outcome == "completed"
    assert times(run, RunFinished) == [saved[-1]]


def test_one_that_takes_longer_than_a_step_holds_the_next_up(simulate: Callable[..., Any]) -> None:
    run = simulate(num_steps=3, checkpointer=Writing(500), **WORKERS)
    first, second, third = times(run, CheckpointSaved)
    assert (second - first, third - second) == (501, 501)
    assert "wait_checkpoint" in [event.cause for event in run.of(BubbleOpened) if event.worker == "trainer"]


def test_a_drained_run_waits_for_what_is_being_written(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        async for _ in scheduler:
            await asyncio.sleep(2)
            scheduler.drain()

    run = simulate(num_steps=5, checkpointer=Writing(500), body=body, **WORKERS)
    assert run.outcome == "drained"
    assert [event.version for event in run.of(CheckpointSaved)] == [1, 2]
    assert len(run.of(StepCommitted)) == 2, "the step that had begun"


def test_a_stopped_run_does_not(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        async for _ in scheduler:
            await asyncio.sleep(2)
            scheduler.stop()

    checkpointer = Writing(500)
    run = simulate(num_steps=5, checkpointer=checkpointer, body=body, **WORKERS)
    assert run.outcome == "stopped"
    assert run.of(CheckpointSaved) == []
    assert checkpointer.writing[0].cancelled()


def test_one_that_cannot_be_written_ends_the_run(simulate: Callable[..., Any]) -> None:
    error = CheckpointError("checkpoint a/b cannot be written: No space left on device")
    run = simulate(num_steps=3, checkpointer=Writing(5, error), catch=StepFailed, **WORKERS)
    assert run.error.__cause__ is error
    assert "checkpoint of step 1 on trainer: checkpoint a/b cannot be written" in str(run.error)
    assert len(run.reports) == 1


class Mortal(SimWorker):
    """A trainer that fails in the update of one step, once."""

    def __init__(self, step: int, error: Exception) -> None:
        super().__init__("trainer", {"update": 10})
        self.step, self.error = step, error
        self.num_lives = 1

    async def update(self, rollout: Any, advantages: Any, /) -> UpdateReport:
        if rollout.micro_batch.step == self.step and self.num_lives == 1:
            raise self.error
        return await super().update(rollout, advantages)

    async def restart(self) -> None:
        self.num_lives += 1

    async def kill(self, reason: str = "") -> None:
        pass


@pytest.mark.parametrize(("write_s", "saved"), [(5, [1]), (500, [])])
def test_a_run_that_fails_meanwhile_waits_a_while(
    simulate: Callable[..., Any], write_s: float, saved: list[int]
) -> None:
    trainer = Mortal(1, NumericsError("a bug"))
    run = simulate(
        num_steps=3, generators=[{"generate": 1}], trainer=trainer, checkpointer=Writing(write_s), catch=StepFailed
    )
    assert [event.version for event in run.of(CheckpointSaved)] == saved
    assert isinstance(run.events[-1], RunFinished)


def test_one_that_is_lost_with_its_trainer_is_given_up(simulate: Callable[..., Any]) -> None:
    """The trainer dies in step 1 while version 1 is being written; it comes back, and the run goes on."""
    trainer, checkpointer = Mortal(1, WorkerDied(worker="trainer", signal=9)), Writing(500)
    run = simulate(num_steps=3, generators=[{"generate": 1}], trainer=trainer, checkpointer=checkpointer)
    assert run.outcome == "completed"
    assert trainer.num_lives == 2
    assert checkpointer.writing[0].cancelled()
    assert [event.version for event in run.of(CheckpointSaved)] == [1, 2, 3], "version 1 is held, and saved again"


def test_a_loss_that_only_the_writing_has_seen_is_found_by_the_next_save(simulate: Callable[..., Any]) -> None:
    """At the end of the run no other task would tell."""

    class Once(Writing):
        async def _write(self, version: int) -> str:
            if version == 3 and len(self.writing) == 3:
                raise WorkerDied(worker="trainer", signal=9)
            return await super()._write(version)

    run = simulate(num_steps=3, checkpointer=Once(5), **WORKERS)
    assert [event.version for event in run.of(CheckpointSaved)] == [1, 2, 3]
    kinds = [event.kind for event in run.of(TaskFinished) if event.worker == "trainer"]
    assert kinds[-2:] == ["checkpoint", "checkpoint"]


class Unstartable(FaultPlan):
    """The generator dies once, and none can be started in its place."""

    def draw(self, where: str, method: str, step: int, index: int) -> Fault | None:
        return Fault(where, method, "death") if method == "start" and where.startswith("gen0") else None


def test_a_checkpoint_that_is_begun_as_a_restart_fails_for_good_is_waited_for() -> None:
    """The run fails in the instant in which the copy is done: its answer is in the same batch as the restart's end."""
    times = {"generate": 3, "score": 1, "update": 2, "commit": 1, "publish": 1, "load": 1, "start": 0.5}
    checkpointer, events = Writing(write_s=3), list[Any]()
    trainer, generator = (FaultyWorker(name, Unstartable(0), times) for name in ("trainer", "gen0"))

    async def main() -> None:
        scheduler = Scheduler(
            Plan(["a", "b"], num_steps=3, prompts_per_step=2, samples_per_prompt=1),
            trainer=trainer,
            generators=[generator],
            restarts=RestartsSection(budget=1, snapshot_every=0),
            sinks=[events.append],
            checkpointer=checkpointer,
        )
        async with scheduler:
            asyncio.get_running_loop().call_later(12.5, lambda: asyncio.ensure_future(generator.kill("for the test")))
            async for _ in scheduler:
                pass

    with pytest.raises(StepFailed, match="could not be started again"):
        run_virtual(main())
    failed = [event.time for event in events if isinstance(event, TaskFailed) and event.kind == "checkpoint"]
    assert [(event.version, event.time - 3) for event in events if isinstance(event, CheckpointSaved)] == [(1, 13.0)]
    assert failed == [16.0]
