"""Snapshots of the trainer on the virtual clock: when they are taken, what is gone back to, and what is let go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from structlog.testing import capture_logs

from digen import DigenError, Plan, ScheduleConfig, Scheduler, StepFailed, WorkerRaised, WorkerTimeout
from digen.events import (
    AnyEvent,
    CheckpointSaved,
    RolledBack,
    StepCommitted,
    TaskFinished,
    TaskRetried,
    TaskStarted,
    WorkerLost,
    WorkerRestarted,
)
from digen.restarts import RestartsSection
from digen.sched import InvariantChecker, check
from digen.types import Payload, Snapshot
from digen.workers.clock import run_virtual
from digen.workers.faulty import Fault, FaultPlan, FaultyWorker, FaultyWriter, Weights
from experiments.simdisk import SimDisk, at_once, checkpoints_on, mounted

TIMES: dict[str, Any] = {"generate": 4, "score": 1, "load": 1, "update": 2, "commit": 1, "publish": 1, "start": 3}
TIMES |= {"snapshot": 1, "recall": 1, "save": 1, "write": 25, "restore": 1}


class Scripted(FaultPlan):
    """Faults at calls of a method, counted over all lives of the trainer."""

    def __init__(self, *faults: tuple[str, int, str]) -> None:
        super().__init__(0)
        self._script = {(method, number): kind for method, number, kind in faults}
        self._counts: dict[str, int] = {}

    def draw(self, where: str, method: str, step: int, index: int) -> Fault | None:
        if not where.startswith("trainer"):
            return None
        number = self._counts[method] = self._counts.get(method, 0) + 1
        kind = self._script.get((method, number))
        return self._happens(Fault(where, method, kind)) if kind else None


class Run:
    """A run with two generators and four micro-batches a step, that must end as one without faults."""

    def __init__(
        self,
        *faults: tuple[str, int, str],
        every: int | None = None,
        rules: dict[str, Any] | None = None,
        trainer: type[FaultyWorker] = FaultyWorker,
        num_steps: int = 4,
        times: dict[str, Any] = TIMES,
        **config: Any,
    ) -> None:
        disk, plan = SimDisk(), Scripted(*faults)
        self.events: list[AnyEvent] = []
        self.error: DigenError | None = None
        self.trainer = trainer("trainer", plan, times, disk=disk)
        generators = [FaultyWorker(f"gen{number}", plan, times) for number in range(2)]

        async def main() -> None:
            at_once(asyncio.get_running_loop())
            scheduler = Scheduler(
                Plan(["a", "b"], num_steps=num_steps, prompts_per_step=4, samples_per_prompt=1),
                trainer=self.trainer,
                generators=generators,
                config=ScheduleConfig(**config),
                restarts=RestartsSection(**{"deadline_floor_s": 50, "first_deadline_s": 50, **(rules or {})}),
                sinks=[self.events.append, InvariantChecker()],
                checkpointer=checkpoints_on(disk, every=every) if every else None,
            )
            try:
                async with scheduler:
                    async for _ in scheduler:
                        pass
            except DigenError as error:
                self.error = error
            assert scheduler._results._snapshots.newest is None, "it is let go"

        with mounted(), capture_logs() as self.logs:
            run_virtual(main())
        check(self.events)
        if self.error is None:
            assert set(self.trainer.weights.counts.values()) == {1}
            assert len(self.trainer.weights.counts) == 4 * num_steps
            assert self.trainer.num_lent <= 1, "only the last publication is held, and no snapshot"

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def versions(self, kind: str) -> list[int]:
        return [event.version for event in self.of(TaskFinished) if event.kind == kind]


UNDISTURBED = Run()
NO_SNAPSHOTS = {"snapshot_every": 0}
METHODS = ("update", "commit", "publish", "snapshot")


def test_one_is_taken_after_each_commit_once_the_weights_are_out() -> None:
    assert UNDISTURBED.versions("snapshot") == [1, 2, 3, 4]
    tasks = [event.kind for event in UNDISTURBED.of(TaskStarted) if event.worker == "trainer"]
    assert "".join(kind[0] for kind in tasks) == "uuuucps" * 4
    stats = [event.stats for event in UNDISTURBED.of(TaskFinished) if event.kind == "snapshot"]
    assert stats == [{"bytes": 8.0}] * 4
    loads = [event.time for event in UNDISTURBED.of(TaskStarted) if event.kind == "load"]
    taken = [event.time for event in UNDISTURBED.of(TaskStarted) if event.kind == "snapshot"]
    assert loads[0] == taken[0], "generators load meanwhile"


@pytest.mark.parametrize("sync", ["hold", "pull"])
@pytest.mark.parametrize(("every", "taken"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), (0, [])])
def test_every_so_many_steps(every: int, taken: list[int], sync: str) -> None:
    run = Run(rules={"snapshot_every": every}, sync=sync, every=2)
    assert run.versions("snapshot") == taken
    assert run.versions("checkpoint") == [2, 4]
    assert run.trainer.weights == UNDISTURBED.trainer.weights


class NoRecall(FaultyWorker):
    """A trainer of somebody else's, without the methods."""

    def __getattribute__(self, name: str) -> Any:
        if name in {"snapshot", "recall"}:
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_none_without_the_methods_or_a_budget() -> None:
    assert Run(trainer=NoRecall).versions("snapshot") == []
    assert Run(rules={"budget": 0}).versions("snapshot") == []


@pytest.mark.parametrize("kind", ["death", "silent_death", "hang", "garbage"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_lost_trainer_takes_back_no_step_that_a_snapshot_holds(method: str, number: int, kind: str) -> None:
    run = Run((method, number * 4 - 1 if method == "update" else number, kind), every=1000)
    (lost,) = run.of(WorkerLost)
    assert run.error is None
    assert run.trainer.weights == UNDISTURBED.trainer.weights
    held = [event.version for event in run.of(TaskFinished) if event.kind == "snapshot" and event.time < lost.time]
    (back,) = run.of(WorkerRestarted)
    assert back.version == max(held, default=0)
    committed = method in {"publish", "snapshot"}
    rolled = [(event.version, event.from_version) for event in run.of(RolledBack)]
    assert rolled == ([(number - 1, number)] if committed else [])
    generated = [event for event in run.of(TaskStarted) if event.kind == "generate"]
    assert len(generated) == 16 or rolled
    assert run.logs == []


def test_a_step_that_no_snapshot_holds_is_done_again() -> None:
    run = Run(("update", 14, "death"), rules={"snapshot_every": 2})
    ((back, before),) = [(event.version, event.from_version) for event in run.of(RolledBack)]
    assert (back, before) == (2, 3)
    assert run.trainer.weights == UNDISTURBED.trainer.weights
    assert [event.step for event in run.of(StepCommitted)] == [0, 1, 2, 2, 3]
    assert run.versions("snapshot") == [2, 4]


def test_a_newer_checkpoint_is_preferred_and_what_is_older_than_it_is_replaced() -> None:
    run = Run(("update", 14, "death"), rules={"snapshot_every": 2}, every=3)
    assert run.of(RolledBack) == []
    (back,) = run.of(WorkerRestarted)
    assert back.version == 3
    assert run.trainer.weights == UNDISTURBED.trainer.weights


@pytest.mark.parametrize("kind", ["death", "raise", "garbage"])
@pytest.mark.parametrize(("every", "back_at"), [(2, 2), (None, 0)])
def test_one_that_cannot_be_recalled_leaves_the_checkpoint(kind: str, every: int | None, back_at: int) -> None:
    """One that a trainer dies of is tried once more."""
    twice = [("recall", 2, kind)] if kind == "death" else []
    run = Run(("update", 14, "death"), ("recall", 1, kind), *twice, every=every)
    (warning,) = run.logs
    assert warning["event"] == "a snapshot cannot be recalled; what counts is the newest checkpoint"
    assert "trainer" in warning["reason"]
    ((back, before),) = [(event.version, event.from_version) for event in run.of(RolledBack)]
    assert (back, before) == (back_at, 3)
    assert run.trainer.weights == UNDISTURBED.trainer.weights
    again = range(back_at or 1, 5)
    assert run.versions("snapshot") == [1, 2, 3, *again], "and one is taken of the state that was gone back to"


def test_one_that_a_trainer_dies_of_once_is_recalled_by_the_next() -> None:
    run = Run(("update", 14, "death"), ("recall", 1, "death"))
    assert (run.logs, run.of(RolledBack), len(run.of(WorkerLost))) == ([], [], 2)
    (back,) = run.of(WorkerRestarted)
    assert back.version == 3
    assert run.trainer.weights == UNDISTURBED.trainer.weights


def test_after_going_back_nothing_of_the_future_that_was_given_up_is_recalled() -> None:
    """The recall of version 3 fails, the run goes back to 2, and the trainer dies again before version 3 is made."""
    run = Run(("update", 14, "death"), ("recall", 1, "raise"), ("update", 17, "death"), every=2)
    assert [event.version for event in run.of(WorkerRestarted)] == [2, 2]
    assert [(event.version, event.from_version) for event in run.of(RolledBack)] == [(2, 3)]
    assert run.trainer.weights == UNDISTURBED.trainer.weights


def test_a_checkpoint_that_is_lost_with_a_trainer_is_made_up_for_at_once() -> None:
    """Version 2 is being written when the trainer dies in the step after version 3."""
    run = Run(("update", 14, "death"), every=2, trainer=FaultyWriter, num_steps=6)
    assert run.of(RolledBack) == []
    assert [event.version for event in run.of(CheckpointSaved)] == [3, 4, 6]
    run = Run(("publish", 4, "death"), every=2, trainer=FaultyWriter, num_steps=6)
    assert [(event.version, event.from_version) for event in run.of(RolledBack)] == [(3, 4)]
    assert [event.version for event in run.of(CheckpointSaved)] == [2, 4, 6], "what comes again is not made up for"


@pytest.mark.parametrize("write", [31, 32])
def test_a_checkpoint_that_was_lost_is_owed_until_another_is_saved(write: int) -> None:
    """That of version 2 is lost, and so is the version whose checkpoint was to follow it at once."""
    times = TIMES | {"write": write}
    run = Run(("write", 1, "silent_death"), every=2, trainer=FaultyWriter, times=times)
    assert [(event.version, event.from_version) for event in run.of(RolledBack)] == [(3, 4)]
    assert [event.version for event in run.of(CheckpointSaved)] == [3, 4]


def test_a_death_while_the_checkpoint_is_restored_is_a_loss_like_any_other() -> None:
    run = Run(("update", 14, "death"), ("recall", 1, "raise"), ("restore", 1, "death"), every=2)
    assert len(run.of(WorkerLost)) == 2
    assert [event.version for event in run.of(WorkerRestarted)] == [2], "what failed once is not recalled again"
    assert run.trainer.weights == UNDISTURBED.trainer.weights


@pytest.mark.parametrize("kind", ["hang", "late"])
@pytest.mark.parametrize(("method", "every", "back_at"), [("restore", 3, 3), ("recall", 2, 2), ("recall", None, 0)])
def test_a_hang_while_the_state_is_got_back_is_a_loss_like_any_other(
    method: str, every: int | None, back_at: int, kind: str
) -> None:
    """It is killed at its deadline, started once more, and a snapshot that it hung in is not tried again."""
    run = Run(("update", 14, "death"), (method, 1, kind), every=every, rules={"snapshot_every": 1 + (every == 3)})
    died, hung = run.of(WorkerLost)
    assert (died.reason, hung.reason) == ("died", "hung")
    assert hung.time - died.time == pytest.approx(TIMES["start"] + 50)
    assert hung.error == f"worker 'trainer' has not answered {method} for 50 s, its deadline; it counts as hung"
    (back,) = run.of(WorkerRestarted)
    assert back.version == back_at
    backoff_s = hung.restart_in_s
    assert back.down_s == pytest.approx(2 * TIMES["start"] + 50 + backoff_s + (back_at > 0) * TIMES["restore"])
    assert bool(run.logs) == (method == "recall")
    assert run.trainer.weights == UNDISTURBED.trainer.weights


def test_one_that_always_hangs_while_it_gets_its_state_back_ends_the_run() -> None:
    run = Run(("update", 14, "death"), *(("restore", n, "hang") for n in range(1, 9)), every=3, rules=NO_SNAPSHOTS)
    assert isinstance(run.error, StepFailed)
    assert isinstance(run.error.__cause__, WorkerTimeout)
    assert [event.reason for event in run.of(WorkerLost)] == ["died", "hung", "hung"]


def test_what_a_trainer_is_late_with_does_not_end_the_run_of_another() -> None:
    """Its process is killed, and the call that was given up says so: that is no word on the one that came after it."""
    run = Run(("update", 14, "death"), ("restore", 1, "hang"), ("restore", 2, "death"), every=3, rules=NO_SNAPSHOTS)
    assert [event.reason for event in run.of(WorkerLost)] == ["died", "hung", "died"]
    assert run.trainer.weights == UNDISTURBED.trainer.weights


def test_code_that_raises_ends_the_run_and_so_does_one_that_always_kills() -> None:
    run = Run(("snapshot", 2, "raise"))
    assert isinstance(run.error, StepFailed)
    assert isinstance(run.error.__cause__, WorkerRaised)
    run = Run(*(("snapshot", number, "death") for number in (2, 3, 4)), rules={"budget": 9})
    assert isinstance(run.error, StepFailed)
    assert [event.attempt for event in run.of(TaskRetried) if event.kind == "snapshot"] == [2, 3]


class Odd(FaultyWorker):
    """Its snapshots are of another version than it holds, or its recalls say so."""

    wrong = ("snapshot",)

    async def snapshot(self) -> Snapshot:
        found = await super().snapshot()
        return Snapshot(found.version + ("snapshot" in self.wrong), found.payloads, found.nbytes)

    async def recall(self, snapshot: Snapshot, /) -> int:
        return await super().recall(snapshot) + ("recall" in self.wrong)


class OddRecall(Odd):
    """Its recalls say that it holds another version."""

    wrong = ("recall",)


def test_versions_are_checked() -> None:
    run = Run(trainer=Odd, rules={"budget": 9})
    assert isinstance(run.error, StepFailed)
    assert "snapshot of step 1 on trainer returned a snapshot of version 2" in str(run.error)
    run = Run(("update", 14, "death"), trainer=OddRecall)
    assert "says that it holds 4 after it recalled version 3" in run.logs[0]["reason"]
    assert run.trainer.weights == UNDISTURBED.trainer.weights


def test_memory_is_let_go_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than two are held: the newest, and the one that is being taken."""
    held: list[int] = []
    made, released = FaultyWorker.snapshot, FaultyWorker.release
    payloads: list[Payload] = []

    async def snapshot(self: FaultyWorker) -> Snapshot:
        found = await made(self)
        payloads.extend(found.payloads)
        held.append(len(payloads))
        return found

    def release(self: FaultyWorker, payload: Payload) -> None:
        released(self, payload)
        payloads[:] = _others(payloads, payload)

    monkeypatch.setattr(FaultyWorker, "snapshot", snapshot)
    monkeypatch.setattr(FaultyWorker, "release", release)
    run = Run(("update", 14, "death"), num_steps=6)
    assert run.versions("snapshot") == [1, 2, 3, 4, 5, 6]
    assert held == [1, 2, 2, 2, 2, 2]
    assert payloads == []


def _others(payloads: Iterable[Payload], payload: Payload) -> list[Payload]:
    return [other for other in payloads if other is not payload]


def test_ledgers_are_copied() -> None:
    """What a snapshot holds does not change with the trainer."""
    worker = FaultyWorker("trainer", Scripted(), weights=Weights(1, 5, {(0, 0): 1}))

    async def main() -> None:
        taken = await worker.snapshot()
        worker.weights.hash = 6
        await worker.restart()
        assert await worker.recall(taken) == 1
        assert worker.weights == Weights(1, 5, {(0, 0): 1})

    run_virtual(main())
