"""Every so many versions a generator that holds one evaluates it, in its bubble and without a trace in the training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from digen import SimWorker
from digen.errors import ConfigError, InvariantViolation, NumericsError, StalenessViolation, StepFailed
from digen.events import BubbleOpened, Evaluated, TaskFailed, TaskFinished, TaskStarted
from digen.sched import check
from digen.types import EvaluationReport, EvaluationRequest, Prompt
from tests.sched.conftest import Run

Simulate = Callable[..., Run]
PROMPTS = (Prompt("held out"),)


class Judged(SimWorker):
    """A generator or trainer whose evaluation takes ``evaluation_s``."""

    def __init__(self, name: str, durations: dict[str, Any], evaluation_s: float = 7, **report: Any) -> None:
        super().__init__(name, durations)
        self.evaluation_s = evaluation_s
        self.report = report
        self.requests: list[EvaluationRequest] = []

    async def evaluate(self, request: EvaluationRequest, /) -> EvaluationReport:
        self.requests.append(request)
        version = self.version
        await asyncio.sleep(self.evaluation_s)
        return EvaluationReport(
            **{"version": version, "num_samples": 1, "metrics": {"reward/mean": 0.5}, **self.report}
        )


def every(count: int) -> Callable[[int], EvaluationRequest | None]:
    """Seeds are the versions, to be told apart."""
    return lambda version: None if version % count else EvaluationRequest(version, PROMPTS, 1)


TIMES = {"generate": 10, "score": 1, "load": 2}
TRAINER = {"update": 6, "commit": 1}


def test_an_evaluation_fills_the_bubble_of_the_step_whose_weights_it_judges(simulate: Simulate) -> None:
    generator = Judged("g0", TIMES)
    run = simulate(
        num_steps=3,
        num_micro_batches=2,
        generators=[generator],
        trainer=TRAINER,
        config={"tag": "never"},
        evaluate=every(2),
    )
    assert run.schedule("g0") == [
        *("generate 0/0 0-10", "score 0/0 10-11", "generate 0/1 11-21", "score 0/1 21-22", "load 0 29-31"),
        *("generate 1/0 31-41", "score 1/0 41-42", "generate 1/1 42-52", "score 1/1 52-53", "load 1 60-62"),
        *("generate 2/0 62-72", "score 2/0 72-73", "generate 2/1 73-83", "score 2/1 83-84", "evaluate 1 84-91"),
        "load 2 91-93",
    ]
    assert run.schedule("trainer")[-1] == "commit 2 90-91"
    assert [(event.time, event.version, event.metrics) for event in run.of(Evaluated)] == [
        (91, 2, {"reward/mean": 0.5})
    ]
    assert [request.seed for request in generator.requests] == [2]
    assert run.outcome == "completed"


def test_it_delays_no_commit_once_it_has_begun(simulate: Simulate) -> None:
    run = simulate(
        num_steps=2,
        num_micro_batches=1,
        generators=[Judged("g0", TIMES, evaluation_s=40)],
        trainer=TRAINER,
        config={"tag": "never"},
        evaluate=every(1),
    )
    assert run.schedule("trainer") == ["update 0/0 11-17", "commit 0 17-18", "update 1/0 31-37", "commit 1 37-38"]
    assert run.schedule("g0")[4:] == ["score 1/0 30-31", "evaluate 0 31-71", "load 1 71-73", "evaluate 1 73-113"]
    assert [event.version for event in run.of(Evaluated)] == [1, 2]


def test_a_commit_waits_until_the_weights_that_it_replaces_are_being_evaluated(simulate: Simulate) -> None:
    """The generator is busy with stale work from 40 to 70 when the trainer could commit at 46."""
    run = simulate(
        num_steps=3,
        num_micro_batches=2,
        generators=[Judged("g0", {"generate": lambda step, _: 30 if step == 2 else 10})],
        trainer=TRAINER,
        config={"tag": "never", "window": 2, "stale_fraction": 0.5},
        evaluate=lambda version: EvaluationRequest(version, PROMPTS, 1) if version == 1 else None,
    )
    generator, trainer = run.schedule("g0"), run.schedule("trainer")
    assert generator[2:] == ["generate 1/0 20-30", *generator[3:]]
    evaluation = next(event for event in run.of(TaskStarted) if event.kind == "evaluate")
    commit = next(event for event in run.of(TaskStarted) if event.kind == "commit" and event.step == 1)
    last_update = next(
        event for event in run.of(TaskFinished) if event.kind == "update" and (event.step, event.index) == (1, 1)
    )
    assert evaluation.version == 1
    assert (last_update.time, evaluation.time, commit.time) == (46, 70, 70), (generator, trainer)
    assert "wait_evaluate" in [event.cause for event in run.of(BubbleOpened) if event.worker == "trainer"]


def test_with_hold_it_begins_after_the_loads_and_the_next_loads_wait_for_it(simulate: Simulate) -> None:
    slow = TIMES | {"load": 5}
    run = simulate(
        num_steps=2,
        num_micro_batches=1,
        generators=[Judged("g0", TIMES, evaluation_s=50), Judged("g1", slow, evaluation_s=50)],
        trainer=TRAINER,
        config={"tag": "never", "sync": "hold"},
        evaluate=every(1),
    )
    assert run.schedule("trainer") == ["update 0/0 11-17", "commit 0 17-18", "update 1/0 34-40", "commit 1 40-41"]
    assert run.schedule("g0")[2:6] == ["load 0 18-20", "generate 1/0 23-33", "score 1/0 33-34", "load 1 73-75"]
    assert run.schedule("g1") == ["load 0 18-23", "evaluate 0 23-73", "load 1 73-78"]


def test_one_worker_for_every_stage_evaluates_too(simulate: Simulate) -> None:
    trainer = Judged("trainer", {"generate": 10, "score": 1, "update": 6, "commit": 1})
    run = simulate(
        num_steps=3,
        num_micro_batches=1,
        generators=(),
        trainer=trainer,
        config={"mode": "colocated"},
        evaluate=every(2),
    )
    assert run.schedule("trainer")[7:10] == ["commit 1 35-36", "evaluate 1 36-43", "generate 2/0 43-53"]
    assert [event.version for event in run.of(Evaluated)] == [2]


def test_the_last_version_is_evaluated_before_the_run_ends(simulate: Simulate) -> None:
    run = simulate(
        num_steps=1, num_micro_batches=1, generators=[Judged("g0", TIMES)], trainer=TRAINER, evaluate=every(1)
    )
    assert run.schedule("g0")[-2:] == ["load 0 18-20", "evaluate 0 20-27"]
    assert run.makespan == 27


class Slow:
    """A checkpointer that takes 30."""

    def due(self, version: int, *, last: bool) -> bool:
        del version
        return last

    async def save(self, trainer: Any, version: int) -> str:
        del trainer
        await asyncio.sleep(30)
        return f"v{version}"


@pytest.mark.parametrize("drain_s", [0, 19, 35, 70])
def test_a_drained_run_leaves_out_what_has_not_begun(simulate: Simulate, drain_s: float) -> None:
    async def drain(scheduler: Any) -> None:
        await asyncio.sleep(drain_s)
        scheduler.drain()

    generator = Judged("g0", TIMES)
    run = simulate(
        num_steps=9,
        num_micro_batches=2,
        generators=[generator],
        trainer=TRAINER,
        config={"tag": "never"},
        evaluate=every(1),
        checkpointer=Slow(),
        body=drain,
    )
    assert run.outcome == "drained"
    versions = [event.version for event in run.of(Evaluated)]
    assert versions == [request.seed for request in generator.requests] == [1] * (drain_s == 70)


@pytest.mark.parametrize(
    ("report", "error", "message"),
    [
        ({"version": 0}, StalenessViolation, "pinned to version 1 but its samples are of version 0"),
        ({"metrics": {"reward/mean": float("nan")}}, NumericsError, "reward/mean is nan"),
    ],
)
def test_what_is_not_of_its_version_or_no_number_ends_the_run(
    simulate: Simulate, report: dict[str, Any], error: type, message: str
) -> None:
    run = simulate(
        num_steps=2,
        num_micro_batches=1,
        generators=[Judged("g0", TIMES, **report)],
        trainer=TRAINER,
        evaluate=every(1),
        catch=StepFailed,
    )
    assert message in str(run.error)
    assert isinstance(run.error.__cause__, error) if run.error else False
    assert next(event.kind for event in run.of(TaskFailed)) == "evaluate"


@pytest.mark.parametrize("alone", [False, True])
def test_whoever_is_to_evaluate_must_be_able_to(simulate: Simulate, alone: bool) -> None:
    workers = () if alone else (SimWorker("g0"), SimWorker("g1"))
    with pytest.raises(ConfigError, match="has no method 'evaluate'"):
        simulate(generators=workers, config={"mode": "colocated" if alone else "gap"}, evaluate=every(1))


def test_the_checker_refuses_an_evaluation_of_other_weights(simulate: Simulate) -> None:
    run = simulate(num_steps=1, generators=[Judged("g0", TIMES)], trainer=TRAINER, evaluate=every(1))
    wrong = [
        TaskStarted(e.time, e.task, e.kind, e.worker, e.step, e.index, 0)
        if isinstance(e, TaskStarted) and e.kind == "evaluate"
        else e
        for e in run.events
    ]
    with pytest.raises(InvariantViolation, match="evaluates a version that it does not hold"):
        check(wrong)


MODES: list[dict[str, Any]] = [
    {"mode": "naive"},
    {"mode": "gap", "sync": "hold"},
    {"mode": "tag"},
    {"mode": "tag", "tag": "search"},
    {"mode": "tcss", "tag": "threshold"},
    {"mode": "tcss", "stale_fraction": 1, "sync": "hold"},
    {"mode": "tcss", "window": 3, "stale_fraction": 1, "tag": "horizon"},
]


@pytest.mark.parametrize("config", MODES, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_every_due_version_is_evaluated_once_in_every_mode(
    simulate: Simulate, config: dict[str, Any], count: int
) -> None:
    for seed in range(12):
        random = Random(seed)  # noqa: S311 - no cryptography

        def spans(*kinds: str, random: Random = random) -> dict[str, float]:
            return {kind: random.choice((0, 1, 2, 5, 11)) for kind in kinds}

        run = simulate(
            num_steps=6,
            num_micro_batches=random.choice((1, 2, 5)),
            generators=[
                Judged(f"g{number}", spans("generate", "score", "load"), evaluation_s=random.choice((0, 3, 40)))
                for number in range(random.choice((1, 2, 3)))
            ],
            trainer=spans("generate", "update", "commit", "publish", "switch_in", "switch_out"),
            config=config,
            evaluate=every(count),
        )
        assert run.outcome == "completed"
        assert sorted(event.version for event in run.of(Evaluated)) == list(range(count, 7, count))
        run.trained_once()
