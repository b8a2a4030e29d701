"""Thousands of random runs: whatever the plan, the workers and the schedule, the semantics hold.

Everything derives from a seed, which a failure names. Invariants are checked after every event by the fixture.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from digen import Plan, SimWorker
from digen.config import AdvantageSection
from digen.events import GroupCompleted, MicroBatchSettled, StepCommitted, TaskFinished
from digen.sched.tag import Bubble, Decision, Policy
from experiments.faults import random_plan

NUM_RUNS = int(os.environ.get("DIGEN_PROPERTY_RUNS", "2000"))
"""``make prove`` runs ten times as many."""
NUM_CHUNKS = 20
KINDS = ("generate", "score", "load", "update", "commit", "publish", "switch_in", "switch_out")


def duration(draw: random.Random) -> Any:
    """A number, often zero, or a function of (step, index)."""
    if draw.random() < 0.8:
        return draw.choice([0, 0.1, 1, 2, 3, 5, 10])
    a, b, c = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 9)
    return lambda step, index: (a * step + b * index + c) % 7


def durations(draw: random.Random) -> dict[str, Any]:
    return {kind: duration(draw) for kind in KINDS}


def random_policy(draw: random.Random) -> Policy:
    """Any answer to a legal question is legal."""
    answers = random.Random(draw.random())  # noqa: S311 - not for secrets

    def decide(bubble: Bubble) -> Decision:
        assert 0 < bubble.num_pending <= bubble.num_micro_batches
        assert bubble.num_generators > 0
        return Decision(assist=answers.random() < 0.5, reason="chance")

    return Policy("random", decide, assists_before_update=draw.choice([0, 0, 1, 3]))


def random_run(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    plan = random_plan(draw, seed, most_steps=4)
    mode = draw.choice(["colocated", "naive", "microbatch", "gap", "tag", "tcss"])
    window = draw.choice([1, 2, 2, 3])
    values = draw.choice([None, 2, 3])  # few different rewards: groups without any spread
    reward = None if values is None else (lambda uid, sample: float((len(uid) * 7 + sample * 3) % values))
    config = {
        "mode": mode,
        "window": window,
        "stale_fraction": None if window == 1 else draw.choice([0, 0.25, 0.5, 1]),
        "tag": draw.choice([None, "never", "greedy", "static(1)", "static(3)", "threshold"]),
        "sync": draw.choice(["hold", "pull"]),
        "update_order": draw.choice(["index", "ready"]),
        "max_generating": draw.choice([None, None, 1, 2]),
    }
    return {
        "plan": plan,
        "generators": []
        if mode == "colocated"
        else [SimWorker(f"g{i}", durations(draw), reward=reward) for i in range(draw.randint(1, 4))],
        "trainer": SimWorker("trainer", durations(draw), reward=reward),
        "scorers": [SimWorker("s0", durations(draw), reward=reward)] if draw.random() < 0.25 else [],
        "advantage": AdvantageSection(
            kind=draw.choice(["per_prompt", "global_std"]),
            best_of_n=2 if plan.samples_per_prompt >= 2 and draw.random() < 0.4 else None,
        ),
        "config": config,
        "policy": random_policy(draw) if draw.random() < 0.2 else None,
    }


@pytest.fixture
def quiet() -> Any:
    """No warnings about windows and shares on the terminal."""
    with capture_logs() as logs:
        yield logs


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_schedule_keeps_the_semantics(simulate: Callable[..., Any], chunk: int) -> None:
    for seed in range(chunk, NUM_RUNS, NUM_CHUNKS):
        options = random_run(seed)
        plan, config = options["plan"], options["config"]
        try:
            run = simulate(**options)
            assert run.outcome == "completed"
            check_steps(run, plan)
            check_accounts(run, plan)
            if config["update_order"] == "index":
                in_order(run)
        except BaseException as error:
            error.add_note(f"seed {seed}: {plan}, {config}")
            raise


def check_steps(run: Any, plan: Plan) -> None:
    """Every step is committed and reported, with each micro-batch trained once."""
    steps = list(range(plan.num_steps))
    assert [event.step for event in run.of(StepCommitted)] == steps
    assert [(report.index, report.version, report.missed) for report in run.reports] == [(s, s + 1, 0) for s in steps]
    assert [step for step, _ in run.trainer.trained] == steps
    assert all(worker.version == plan.num_steps for worker in [run.trainer, *run.generators])
    run.trained_once()
    settled = [(event.step, event.index) for event in run.of(MicroBatchSettled)]
    assert sorted(settled) == [(step, index) for step in steps for index in range(plan.num_micro_batches)]
    groups = [(event.step, event.uid) for event in run.of(GroupCompleted)]
    assert len(groups) == len(set(groups)) == plan.num_steps * plan.prompts_per_step


def check_accounts(run: Any, plan: Plan) -> None:
    """What the reports say is what the events say."""
    busy: dict[str, float] = dict.fromkeys((worker.name for worker in [run.trainer, *run.generators]), 0)
    for event in run.of(TaskFinished):
        busy[event.worker] = busy.get(event.worker, 0) + event.time - event.started
    assert max(busy.values()) <= run.makespan + 1e-9
    for report in run.reports:
        values = report.metrics()
        lags = [event.staleness for event in run.of(MicroBatchSettled) if event.step == report.index]
        assert values["staleness/max"] == max(lags)
        assert values["staleness/ratio"] == sum(lag > 0 for lag in lags) / len(lags)
        for role in ("generator", "scorer", "trainer"):
            assert -1e-9 <= values.get(f"pipeline/bubble_ratio/{role}", 0) <= 1 + 1e-9
    assert sum(report.metrics()["pipeline/makespan_s"] for report in run.reports) <= run.makespan + 1e-9


def in_order(run: Any) -> None:
    """In index order what is trained, and in which order, depends on nothing but the plan and the rewards."""
    for _, indices in run.trainer.trained:
        assert list(indices) == sorted(indices)


@pytest.mark.usefixtures("quiet")
def test_on_policy_runs_train_the_same_under_every_schedule(simulate: Callable[..., Any]) -> None:
    def trained(seed: int, variant: int) -> list[Any]:
        draw = random.Random(1000 * seed + variant)  # noqa: S311 - not for secrets
        given: list[Any] = []

        class Recorder(SimWorker):
            async def update(self, rollout: Any, advantages: Any, /) -> Any:
                report = await super().update(rollout, advantages)
                given.append((rollout.micro_batch, rollout.version, tuple(advantages)))
                return report

        plan = random_plan(random.Random(seed), seed, most_steps=4)  # noqa: S311 - not for secrets
        mode = draw.choice(["colocated", "naive", "gap", "tag"])
        run = simulate(
            plan=plan,
            generators=[durations(draw) for _ in range(0 if mode == "colocated" else draw.randint(1, 4))],
            trainer=Recorder("trainer", durations(draw)),
            scorers=[durations(draw)] if draw.random() < 0.3 else [],
            advantage=AdvantageSection(best_of_n=2 if plan.samples_per_prompt >= 2 else None),
            config={
                "mode": mode,
                "sync": draw.choice(["hold", "pull"]),
                "max_generating": draw.choice([None, 1]),
                "tag": draw.choice(["never", "greedy", "static(2)", "threshold"]),
            },
        )
        assert {event.staleness for event in run.of(MicroBatchSettled)} == {0}
        return [run.trainer.trained, given]

    for seed in range(40):
        first = trained(seed, 0)
        assert all(trained(seed, variant) == first for variant in range(1, 5)), f"seed {seed}"


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("seed", range(0, 2000, 100))
def test_a_run_repeats_itself_event_for_event(simulate: Callable[..., Any], seed: int) -> None:
    assert simulate(**random_run(seed)).events == simulate(**random_run(seed)).events
