"""Handles, sinks and users that do what nobody should, as an outsider found them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from digen import ConfigError, Plan, Scheduler, SimWorker, StepFailed
from digen.errors import NumericsError, RewardError, WorkerError
from digen.events import AnyEvent, EventLog, TaskFinished, WorkerJoined, read_events
from digen.types import Rollout, Scored, UpdateReport
from digen.workers.clock import run_virtual


def failing(simulate: Callable[..., Any], tmp_path: Path, **workers: Any) -> BaseException:
    """The cause of a run's failure; its event log must stay readable."""
    with EventLog(tmp_path / "events.jsonl") as log:
        run = simulate(catch=StepFailed, sinks=[log], **workers)
    assert list(read_events(tmp_path / "events.jsonl"))
    assert run.error.__cause__ is not None
    cause: BaseException = run.error.__cause__
    return cause


class Trainer(SimWorker):
    async def update(self, rollout: Rollout, advantages: Any, /) -> UpdateReport:
        report = await super().update(rollout, advantages)
        return msgspec.structs.replace(report, metrics={"loss/policy": float("nan")})


class Judge(SimWorker):
    async def score(self, rollout: Rollout, /) -> Scored:
        scored = await super().score(rollout)
        return msgspec.structs.replace(scored, heads={"beauty": (float("inf"),) * len(scored.rewards)})


class Escaping(SimWorker):
    async def generate(self, micro_batch: Any, /) -> Rollout:
        raise GeneratorExit("a tale of its own")


def test_a_metric_that_is_no_number_is_an_error_and_the_log_stays_readable(simulate: Any, tmp_path: Path) -> None:
    cause = failing(simulate, tmp_path, trainer=Trainer("trainer"))
    assert isinstance(cause, NumericsError)
    assert "loss/policy is nan" in str(cause)


def test_a_reward_head_that_is_not_finite_is_an_error(simulate: Any, tmp_path: Path) -> None:
    cause = failing(simulate, tmp_path, generators=[Judge("g0")])
    assert isinstance(cause, RewardError)
    assert "'beauty'" in str(cause)


def test_what_a_handle_lets_escape_is_named(simulate: Any, tmp_path: Path) -> None:
    cause = failing(simulate, tmp_path, generators=[Escaping("g0")])
    assert isinstance(cause, WorkerError)
    assert "GeneratorExit escape: a tale of its own" in str(cause)


def test_rewards_of_any_number_type_become_floats(simulate: Any, tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        run = simulate(generators=[SimWorker("g0", reward=lambda uid, sample: sample % 2 == 0)], sinks=[log])
    assert run.outcome == "completed"
    assert list(read_events(tmp_path / "events.jsonl")) == run.events


@pytest.mark.parametrize("when", [TaskFinished, WorkerJoined])
def test_a_sink_may_remove_a_worker_at_any_event_of_its(when: type[AnyEvent]) -> None:
    plan = Plan(["a"], num_steps=3, prompts_per_step=4, samples_per_prompt=1)
    removed: list[str] = []

    def sink(event: AnyEvent) -> None:
        if isinstance(event, when) and getattr(event, "worker", "") == "g1" and not removed:
            removed.append("g1")
            scheduler.remove_worker("g1")

    generators = [SimWorker(f"g{number}", {"generate": 3}) for number in (1, 0)]
    scheduler = Scheduler(plan, generators=generators, trainer=SimWorker("t", {"update": 1}), sinks=[sink])

    async def main() -> int:
        async with scheduler:
            return len([step async for step in scheduler])

    if when is WorkerJoined:  # g1 joins first and is the only generator then
        with pytest.raises(ConfigError, match="last generator"):
            run_virtual(main())
    else:
        assert run_virtual(main()) == 3
        assert removed == ["g1"]


def test_a_worker_that_may_not_join_is_not_started() -> None:
    started: list[str] = []

    class Late(SimWorker):
        async def start(self) -> None:
            started.append(self.name)

    async def main() -> None:
        plan = Plan(["a"], num_steps=1, prompts_per_step=1, samples_per_prompt=1)
        scheduler = Scheduler(plan, generators=[SimWorker("g")], trainer=SimWorker("t"))
        async with scheduler:
            with pytest.raises(ConfigError, match="takes part already"):
                await scheduler.add_generator(Late("g"))
            async for _ in scheduler:
                pass
            with pytest.raises(ConfigError, match="the run is over"):
                await scheduler.add_generator(Late("late"))

    run_virtual(main())
    assert not started


@pytest.mark.parametrize("name", ["drain", "stop", "statistics"])
def test_a_scheduler_that_was_not_entered_says_so(name: str) -> None:
    async def main() -> None:
        plan = Plan(["a"], num_steps=1, prompts_per_step=1, samples_per_prompt=1)
        scheduler = Scheduler(plan, generators=[SimWorker("g")], trainer=SimWorker("t"))
        with pytest.raises(ConfigError, match="enter the scheduler first"):
            getattr(scheduler, name)()
        with pytest.raises(ConfigError, match="enter the scheduler first"):
            await scheduler.add_generator(SimWorker("late"))

    run_virtual(main())
