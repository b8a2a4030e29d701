"""On-policy runs are bit-identical under every schedule and after a resume at any step, on real processes.

The processes are started once. Each run begins from version 0 (or a checkpoint) by ``restore``, which forgets
everything that the processes did before; what is compared is a checkpoint: weights, optimizer state, moving average.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from digen import MicroBatch, Pool, ProcessWorker, Rollout, Scheduler, StepReport
from digen.checkpoint import Checkpoints
from digen.events import AnyEvent, EventLog, StepCommitted, TaskFinished, WorkerJoined, read_events
from digen.runner import prepare
from digen.sched import check
from digen.sched.tag import Bubble, Decision, Policy
from digen.types import Encoded
from tests.run.harness import Site, tensors_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
AFTER_A_COMMIT = {"publish", "snapshot", "checkpoint"}


@dataclass
class Trained:
    """One run on the shared processes."""

    outcome: str
    folder: Path
    events: list[AnyEvent]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def tensors(self, version: int = 4) -> dict[str, bytes]:
        return tensors_of(self.checkpoints / f"step-{version:06d}")

    def tasks(self, kind: str) -> list[TaskFinished]:
        return [event for event in self.events if isinstance(event, TaskFinished) and event.kind == kind]

    @property
    def generators(self) -> Counter[str]:
        """Micro-batches that each worker generated."""
        return Counter(event.worker for event in self.tasks("generate") + self.tasks("assist"))

    @property
    def switch_s(self) -> float:
        steps = [event.values for event in self.events if isinstance(event, StepCommitted)]
        return sum(values["tag/context_switch_s"] for values in steps)


class Held:
    """A generator that holds back the third micro-batch of a step until the trainer has assisted in that step."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._assisted: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    async def generate(self, micro_batch: MicroBatch, encoded: Encoded | None = None) -> Rollout:
        if micro_batch.index == 2:
            await self._assisted[micro_batch.step].wait()
        rollout: Rollout = await self._handle.generate(micro_batch, encoded)
        return rollout

    def note(self, event: AnyEvent) -> None:
        if isinstance(event, TaskFinished) and event.kind == "assist":
            self._assisted[event.step].set()


def after_an_update() -> Policy:
    """Assist once in every step, in the first bubble after its first update."""

    def decide(bubble: Bubble) -> Decision:
        return Decision(bubble.num_updated > 0 and bubble.num_assists == 0, "forced")

    return Policy("after an update", decide)


Train = Callable[..., Coroutine[Any, Any, Trained]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def train(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Train]:
    """Run a schedule on the shared processes; returns what came of it."""
    home = tmp_path_factory.mktemp("schedules")
    config = Site(home).config()
    parking = Site(home).config(workers__offload=True)
    targets = {
        "trainer": ("TrainerTarget", config),
        "parking": ("TrainerTarget", parking),
        "gen0": ("GeneratorTarget", config),
        "gen1": ("GeneratorTarget", config),
    }
    workers = [
        ProcessWorker(
            name,
            f"digen.diffusion.roles:{target}",
            kwargs={"config": settings.model_dump(mode="json")},
            log_dir=home / "logs",
        )
        for name, (target, settings) in targets.items()
    ]
    async with Pool(workers) as pool:
        origin = home / "origin"
        origin.mkdir()
        await pool["trainer"].save(str(origin))
        num_runs = 0

        async def train(
            *,
            generators: int = 1,
            start: Path | None = None,
            drain_in: int | None = None,
            micro_batch_size: int = 2,
            trainer_name: str = "trainer",
            policy: Policy | None = None,
            hold: bool = False,
            **schedule: Any,
        ) -> Trained:
            nonlocal num_runs
            num_runs += 1
            folder = home / f"run{num_runs}"
            values = {f"schedule.{name}": value for name, value in schedule.items()}
            run = prepare(Site(home).config(plan__micro_batch_size=micro_batch_size, **values))
            trainer, first = pool[trainer_name], pool["gen0"]
            held = Held(first)
            start_step = await trainer.restore(str(start or origin))
            checkpoints = Checkpoints(
                folder / "checkpoints", every=1, keep=10, plan_digest=run.plan.digest, family="digits"
            )
            folder.mkdir()
            with EventLog(folder / "events.jsonl") as log:

                def note(report: StepReport) -> None:
                    if report.index == drain_in:
                        scheduler.drain()

                async with Scheduler(
                    run.plan,
                    generators=[held if hold else first, *(pool[f"gen{n}"] for n in range(1, generators))],
                    trainer=trainer,
                    config=run.config.schedule,
                    policy=policy,
                    sinks=[log, held.note],
                    checkpointer=checkpoints,
                    start_step=start_step,
                    on_commit=note,
                ) as scheduler:
                    async for _ in scheduler:
                        pass
            events = list(read_events(folder / "events.jsonl"))
            check(events)
            return Trained(scheduler.outcome, folder, events)

        yield train


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(train: Train) -> Trained:
    """The plain loop: a barrier between the stages, one generator."""
    trained = await train(mode="naive")
    assert trained.outcome == "completed"
    return trained


async def test_the_plain_loop_trains(plain: Trained) -> None:
    assert plain.generators == {"gen0": 24}
    assert not plain.tasks("assist")
    first, last = plain.tensors(1), plain.tensors(4)
    assert {name.partition("/")[0] for name in last} == {"weights", "optimizer", "ema"}
    changed = [name for name in last if last[name] != first[name]]
    assert len(changed) > 50, "the weights moved, so equal ones prove something"


async def test_the_command_trains_the_same_weights(plain: Trained, undisturbed: Site) -> None:
    assert undisturbed.tensors() == plain.tensors()


@pytest.mark.parametrize(
    "schedule",
    [
        {"mode": "naive", "generators": 2},
        {"mode": "gap"},
        {"mode": "gap", "generators": 2},
        {"mode": "gap", "generators": 2, "sync": "hold"},
        {"mode": "gap", "generators": 2, "max_generating": 1},
        {"mode": "tag", "tag": "static(1)"},
        {"mode": "tag", "tag": "static(1)", "generators": 2, "sync": "hold"},
        {"mode": "tag", "tag": "static(2)", "generators": 2},
        {"mode": "tag", "tag": "greedy"},
        {"mode": "tag", "tag": "greedy", "generators": 2},
        {"mode": "tag", "tag": "greedy", "sync": "hold"},
        {"mode": "tag", "tag": "threshold", "generators": 2},
    ],
    ids=lambda schedule: " ".join(f"{value}" for value in schedule.values()),
)
async def test_every_schedule_gives_the_same_bits(train: Train, plain: Trained, schedule: dict[str, Any]) -> None:
    trained = await train(**schedule)
    assert trained.outcome == "completed"
    for version in (1, 4):
        assert trained.tensors(version) == plain.tensors(version)
    assert sum(trained.generators.values()) == 24
    num_generators = schedule.get("generators", 1)
    if schedule.get("max_generating") != 1:
        assert all(trained.generators[f"gen{number}"] for number in range(num_generators))
    if schedule.get("tag", "threshold") != "threshold":
        assert trained.generators["trainer"] == len(trained.tasks("assist")) >= 1
        assert trained.switch_s > 0


@pytest.mark.parametrize("trainer", ["trainer", "parking"])
async def test_an_assist_between_updates_preserves_the_gradient(train: Train, plain: Trained, trainer: str) -> None:
    """With half of the gradient accumulated, in the same process; ``parking`` offloads gradient and optimizer state."""
    trained = await train(mode="tag", policy=after_an_update(), hold=True, trainer_name=trainer)
    tasks = [event for event in trained.events if isinstance(event, TaskFinished) and event.worker == trainer]
    for step in range(4):
        of_step = [task.kind for task in tasks if task.step == step and task.kind not in AFTER_A_COMMIT]
        assert of_step == [*["update"] * 2, "switch", "assist", "switch", *["update"] * 4, "commit"]
    for version in (1, 4):
        assert trained.tensors(version) == plain.tensors(version)


async def test_the_batch_axis_is_as_good_with_the_same_micro_batches(train: Train, plain: Trained) -> None:
    """Another axis is another forward shape, hence another numerics class; under it too, workers change no bit."""
    alone = await train(mode="microbatch", micro_batch_size=4)
    shared = await train(mode="microbatch", micro_batch_size=4, generators=2, tag="greedy")
    assert alone.tensors() == shared.tensors()
    assert shared.generators["gen1"]
    assert alone.tensors() != plain.tensors()


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_a_resume_at_any_step_gives_the_same_bits(train: Train, plain: Trained, version: int) -> None:
    resumed = await train(
        mode="tag", tag="static(1)", generators=2, start=plain.checkpoints / f"step-{version:06d}", sync="hold"
    )
    assert resumed.outcome == "completed"
    assert resumed.tensors() == plain.tensors()
    assert sum(resumed.generators.values()) == 6 * (4 - version)


@pytest.mark.parametrize("step", [0, 1, 2])
async def test_a_drain_and_a_resume_give_the_same_bits(train: Train, plain: Trained, step: int) -> None:
    drained = await train(mode="tag", tag="greedy", generators=2, drain_in=step)
    assert drained.outcome == "drained"
    last = max(drained.checkpoints.iterdir())
    assert 1 <= step + 1 <= int(last.name[-1]) <= step + 2
    assert tensors_of(last) == plain.tensors(int(last.name[-1]))
    resumed = await train(mode="gap", start=last)
    assert resumed.outcome == "completed"
    assert resumed.tensors() == plain.tensors()


async def test_a_worker_starts_with_the_weights_of_the_checkpoint(train: Train, plain: Trained) -> None:
    """Before its first generation: the version that a generator happened to hold is never taken on trust."""
    resumed = await train(mode="gap", start=plain.checkpoints / "step-000002")
    first = resumed.tasks("generate")[0]
    assert first.version == 2
    joined = [event for event in resumed.events if isinstance(event, WorkerJoined)]
    loads = resumed.tasks("load")
    assert joined[1].version != 2
    assert loads[0].version == 2
    assert loads[0].time <= first.started


async def test_stale_samples_change_the_bits_and_keep_their_bound(train: Train, plain: Trained) -> None:
    """What the comparisons above can see: one micro-batch of the version before."""
    config = {"mode": "tcss", "window": 2, "stale_fraction": 0.5, "generators": 2}
    with pytest.raises(Exception, match="window"):  # the trainer's own window is 1: it refuses
        await train(**config)
    again = await train(mode="gap")
    assert again.tensors() == plain.tensors(), "an aborted run leaves nothing behind"
