"""The public test double keeps a ledger and refuses what a real trainer would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from digen import CommitReport, ConfigError, LoadReport, MicroBatch, Plan, Rollout, SimWorker, UpdateReport
from digen.errors import DigenError
from digen.handles import Generator, Scorer, Trainer
from digen.workers.clock import run_virtual


@pytest.fixture
def micro_batches() -> tuple[MicroBatch, ...]:
    return Plan(["a"], num_steps=1, prompts_per_step=2, samples_per_prompt=3).step(0)


def test_it_is_a_generator_a_scorer_and_a_trainer() -> None:
    worker = SimWorker("w")
    assert isinstance(worker, Generator)
    assert isinstance(worker, Scorer)
    assert isinstance(worker, Trainer)


def test_its_answers_have_the_public_types(micro_batches: tuple[MicroBatch, ...]) -> None:
    async def main() -> None:
        worker = SimWorker("w", reward=lambda uid, sample: float(sample))
        rollout = await worker.generate(micro_batches[1])
        assert rollout == Rollout(micro_batches[1], 0, 0, rollout.payload)
        assert (await worker.score(rollout)).rewards == (0, 1, 2)
        assert await worker.update(rollout, (1.0, None, -1.0)) == UpdateReport(0, 1, 2)
        assert await worker.commit(0, (1,)) == CommitReport(1, 1)
        publication = await worker.publish(1)
        other = SimWorker("o")
        assert await other.load(publication) == LoadReport(1, publication.checksum or 0, 1)
        assert (worker.version, other.version, worker.trained) == (1, 1, [(0, (1,))])

    run_virtual(main())


def test_default_rewards_are_fixed_and_between_zero_and_one(micro_batches: tuple[MicroBatch, ...]) -> None:
    async def main() -> None:
        rollout = await SimWorker("a").generate(micro_batches[0])
        rewards = (await SimWorker("a").score(rollout)).rewards
        assert rewards == (await SimWorker("b").score(rollout)).rewards
        assert len(set(rewards)) == 3
        assert all(0 <= reward < 1 for reward in rewards)

    run_virtual(main())


@pytest.mark.parametrize(
    ("updates", "indices", "message"),
    [
        ((0, 0), (0,), "updated twice"),
        ((0,), (0, 1), r"wants \[0, 1\] but holds \[0\]"),
        ((0, 1), (0,), r"wants \[0\] but holds \[0, 1\]"),
    ],
)
def test_the_ledger_refuses_what_is_not_exactly_once(
    micro_batches: tuple[MicroBatch, ...], updates: tuple[int, ...], indices: tuple[int, ...], message: str
) -> None:
    async def main() -> None:
        worker = SimWorker("w")
        for index in updates:
            await worker.update(await worker.generate(micro_batches[index]), (1.0,) * 3)
        await worker.commit(0, indices)

    with pytest.raises(DigenError, match=message):
        run_virtual(main())


def test_a_misspelt_duration_is_refused() -> None:
    with pytest.raises(ConfigError, match="no duration is called generat; known: generate, score"):
        SimWorker("w", {"generat": 1})


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_duration_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"SimWorker 'w': update must be finite and not negative, got {seconds}"):
        SimWorker("w", {"generate": 1, "update": seconds})


def test_durations_may_depend_on_step_and_micro_batch(simulate: Callable[..., Any]) -> None:
    run = simulate(num_micro_batches=3, generators=[{"generate": lambda step, index: index + 1}])
    assert run.schedule("g0") == ["generate 0/0 0-1", "generate 0/1 1-3", "generate 0/2 3-6"]
