"""Cancelled at every turn of the event loop: whatever it is in the middle of, the scheduler leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from digen import Plan, ScheduleConfig, Scheduler
from digen.events import AnyEvent, RolledBack, RunFinished, RunStarted, TaskFailed
from digen.restarts import RestartsSection
from digen.sched import InvariantChecker, check
from digen.types import Encoded, EvaluationRequest, MicroBatch, Payload, Prompt, Publication, Rollout
from digen.workers.clock import VirtualLoop
from digen.workers.faulty import Fault, FaultPlan, FaultyEncoder, read_weights
from experiments.simdisk import SimDisk

NUM_STEPS = 3
TIMES: dict[str, Any] = {
    "generate": 4,
    "score": 1,
    "load": 1,
    "update": 2,
    "commit": 1,
    "publish": 1,
    "encode": 1,
    "evaluate": 2,
    "save": 1,
    "restore": 1,
    "start": 1,
    "switch_in": 0.5,
    "switch_out": 0.5,
}


class CutLoop(VirtualLoop):
    """Cancels its first task in one of its turns."""

    def __init__(self, cut: int | None, *, times: int) -> None:
        super().__init__()
        self.num_turns = 0
        self.main: asyncio.Task[None] | None = None
        self._cuts = range(0) if cut is None else range(cut, cut + times)

    def _run_once(self) -> None:
        if self.main is not None and not self.main.done():
            if self.num_turns in self._cuts:
                self.main.cancel("enough")
            self.num_turns += 1
        super()._run_once()


class Scripted(FaultPlan):
    """A generator dies, one hangs, the code of one raises, and the trainer dies in one of its calls."""

    def __init__(self, trainer_dies_at: int) -> None:
        super().__init__(0)
        self._dies_at = f"trainer#1.{trainer_dies_at}"

    def draw(self, where: str, method: str, step: int, index: int) -> Fault | None:
        kind = {"gen0#1.3": "death", "gen1#1.2": "hang", "gen1#2.3": "raise", self._dies_at: "death"}.get(where)
        return self._happens(Fault(where, method, kind)) if kind else None


class Held(FaultyEncoder):
    """Counts its lives, and the payloads that it has lent."""

    def __init__(self, name: str, plan: FaultPlan, disk: SimDisk) -> None:
        super().__init__(name, plan, TIMES, disk=disk)
        self.started = False
        self.lent: dict[int, Payload] = {}
        self.calls: Counter[str] = Counter()

    async def start(self) -> None:
        self.calls["start"] += 1
        await asyncio.sleep(1)
        self.started = True

    async def aclose(self) -> None:
        self.calls["aclose"] += 1
        await asyncio.sleep(1)
        self.started = False

    async def restart(self) -> None:
        self.lent.clear()
        await super().restart()

    async def generate(self, micro_batch: MicroBatch, /, *encoded: Encoded) -> Rollout:
        rollout = await super().generate(micro_batch, *encoded)
        self._lend(rollout.payload)
        return rollout

    async def encode(self, prompts: Sequence[Prompt], /) -> Encoded:
        encoded = await super().encode(prompts)
        self._lend(encoded.payload)
        return encoded

    async def publish(self, version: int, /) -> Publication:
        publication = await super().publish(version)
        self._lend(publication.payload)
        return publication

    def _lend(self, payload: Payload) -> None:
        self.lent[id(payload)] = payload

    def release(self, payload: Payload) -> None:
        """A payload of an earlier life is gone with it; none is given back twice."""
        super().release(payload)
        self.lent.pop(id(payload), None)


class Disk:
    """Checkpoints that are written while the trainer goes on."""

    def __init__(self, files: SimDisk) -> None:
        self._files = files
        self.writing: list[asyncio.Task[str]] = []

    def due(self, version: int, *, last: bool) -> bool:
        return True

    async def save(self, trainer: Any, version: int) -> str | asyncio.Future[str]:
        await trainer.save(f"step-{version}")
        self.writing.append(asyncio.ensure_future(self._write(version)))
        return self.writing[-1]

    async def _write(self, version: int) -> str:
        await asyncio.sleep(3)
        return f"step-{version}"

    async def newest(self) -> tuple[int, str] | None:
        done = [task.result() for task in self.writing if task.done() and not task.cancelled()]
        return max(((read_weights(self._files, path).version, path) for path in done), default=None)


class Run:
    """One run, cancelled in a turn, or not."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        faults: bool,
        cut: int | None = None,
        times: int = 1,
        leave: bool = False,
        saves: bool = True,
    ) -> None:
        plan = Plan(["a", "b"], num_steps=NUM_STEPS, prompts_per_step=3, samples_per_prompt=1)
        files = SimDisk()
        faulty = Scripted(9 if saves else 7) if faults else FaultPlan(0)
        num_generators = 0 if config["mode"] == "colocated" else 2
        names = ["trainer", *(f"gen{number}" for number in range(num_generators))]
        self.workers = [Held(name, faulty, files) for name in names]
        self.disk = Disk(files)
        self.events: list[AnyEvent] = []
        self.error: BaseException | None = None
        self.loop = CutLoop(cut, times=times)

        async def main() -> None:
            self.loop.main = asyncio.current_task()
            self.scheduler = Scheduler(
                plan,
                trainer=self.workers[0],
                generators=self.workers[1:],
                config=ScheduleConfig(**config),
                restarts=RestartsSection(deadline_floor_s=20, first_deadline_s=20, snapshot_every=int(saves)),
                sinks=[self.events.append, InvariantChecker()],
                checkpointer=self.disk if saves else None,
                evaluate=lambda version: EvaluationRequest(1, (Prompt("a"),), 1) if version == 1 else None,
            )
            async with self.scheduler:
                if leave:
                    raise ValueError("the body of the context")
                self.reports = [report async for report in self.scheduler]

        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            try:
                runner.run(main())
            except BaseException as error:
                self.error = error
            self.left = asyncio.all_tasks(self.loop)

    def leaves_nothing(self) -> None:
        assert not self.left
        assert all(task.done() for task in self.disk.writing)
        for worker in self.workers:
            assert worker.calls["start"] <= worker.calls["aclose"] <= 1, worker.name
            assert worker.lent == {}, worker.name
            assert worker.num_lent == 0
        checker = check(self.events)
        assert checker.num_started >= checker.num_finished + checker.num_failed
        if self.events:
            assert isinstance(self.events[0], RunStarted)
            (finished,) = [event for event in self.events if isinstance(event, RunFinished)]
            assert finished is self.events[-1]
            assert finished.outcome == self.scheduler.outcome


CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "colocated": ({"mode": "colocated"}, False),
    "gap, hold": ({"mode": "gap", "sync": "hold"}, False),
    "tcss, assists": ({"mode": "tcss", "tag": "greedy", "sync": "pull"}, False),
    "faults": ({"mode": "tag", "tag": "greedy", "sync": "pull"}, True),
    "faults, hold": ({"mode": "tcss", "tag": "never", "sync": "hold"}, True),
}


@pytest.mark.parametrize("times", [1, 3], ids=["once", "thrice"])
@pytest.mark.parametrize("case", CASES)
def test_cancellation_in_any_turn_of_the_loop_leaves_nothing(case: str, times: int) -> None:
    """``thrice``: it is cancelled again while it cleans up."""
    config, faults = CASES[case]
    with capture_logs():
        whole = Run(config, faults=faults)
        assert whole.error is None
        assert whole.scheduler.outcome == "completed"
        whole.leaves_nothing()
        outcomes: Counter[str] = Counter()
        for cut in range(whole.loop.num_turns):
            run = Run(config, faults=faults, cut=cut, times=times)
            assert type(run.error) is asyncio.CancelledError, (cut, run.error)
            assert run.error.args == ("enough",), cut
            run.leaves_nothing()
            outcomes[run.scheduler.outcome if run.events else "not begun"] += 1
        assert outcomes["stopped"] > 100
        assert set(outcomes) == {"not begun", "stopped", "completed"}


def test_a_run_that_is_left_before_its_first_turn_is_over() -> None:
    """Its task was made but has not begun, and is cancelled as it is."""
    run = Run({"mode": "gap"}, faults=False, leave=True)
    assert str(run.error) == "the body of the context"
    assert run.scheduler.outcome == "stopped"
    run.leaves_nothing()


def test_what_a_run_goes_back_behind_is_given_back_too() -> None:
    """Nothing is saved, so that the death of the trainer takes the run back to its start, with generators at work."""
    run = Run({"mode": "tcss", "tag": "never"}, faults=True, saves=False)
    assert run.error is None
    (back,) = [event for event in run.events if isinstance(event, RolledBack)]
    assert back.version == 0
    void = [event for event in run.events if isinstance(event, TaskFailed) and "went back behind" in event.error]
    assert "generate" in [event.kind for event in void]
    run.leaves_nothing()
