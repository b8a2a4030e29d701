"""The metrics of a step against values worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from digen import Plan, Scheduler, SimWorker
from digen.config import AdvantageSection
from digen.events import StepCommitted, TaskFinished
from digen.types import CommitReport, Rollout, UpdateReport

exactly = pytest.approx


def test_bubbles_of_a_pipelined_step(simulate: Callable[..., Any]) -> None:
    run = simulate(
        num_steps=2,
        num_micro_batches=2,
        generators=[{"generate": 10, "score": 1, "load": 2}],
        trainer={"update": 4, "commit": 2, "publish": 1},
    )
    # Step 0 lasts until the commit at 28: g0 works 0-22, the trainer 11-15 and 22-28.
    first, second = (report.metrics() for report in run.reports)
    assert first["pipeline/makespan_s"] == 28
    assert first["pipeline/bubble_ratio/generator"] == exactly(6 / 28, abs=1e-9)
    assert first["pipeline/bubble_ratio/trainer"] == exactly(18 / 28, abs=1e-9)
    # Step 1 lasts from 28 to 59: g0 works 29-53, the trainer 28-29, 42-46 and 53-59.
    assert second["pipeline/makespan_s"] == 31
    assert second["pipeline/bubble_ratio/generator"] == exactly(7 / 31, abs=1e-9)
    assert second["pipeline/bubble_ratio/trainer"] == exactly(20 / 31, abs=1e-9)
    times = {name: value for name, value in second.items() if name.startswith("time/") and value}
    assert times == {
        "time/commit_s": 2,
        "time/generate_s": 20,
        "time/load_s": 2,
        "time/publish_s": 1,
        "time/score_s": 2,
        "time/update_s": 8,
    }
    assert (first["weight_sync/seconds"], second["weight_sync/seconds"]) == (0, 3)
    assert (first["weight_sync/bytes"], second["weight_sync/bytes"]) == (0, 8)
    assert second["perf/samples_per_s"] == exactly(2 / 31, abs=1e-9)


def test_a_task_that_runs_across_the_commit_counts_on_both_sides_of_it(simulate: Callable[..., Any]) -> None:
    run = simulate(
        num_steps=2,
        generators=[{"generate": 10, "load": 2}],
        trainer={"generate": 10, "update": 4, "commit": 1, "publish": 1},
        config={"mode": "tcss", "tag": "greedy", "sync": "hold"},
    )
    # g0 generates without a pause from 0 to 40, across the commit at 37; then load 40-42, 42-52; next commit at 69.
    first, second = (report.metrics() for report in run.reports)
    assert first["pipeline/bubble_ratio/generator"] == exactly(0, abs=1e-9)
    assert second["pipeline/bubble_ratio/generator"] == exactly(1 - 15 / 32, abs=1e-9)
    assert first["pipeline/bubble_ratio/trainer"] == exactly(0, abs=1e-9)
    assert second["pipeline/bubble_ratio/trainer"] == exactly(1 - (1 + 8 + 10 + 9) / 32, abs=1e-9)
    assert (first["time/generate_s"], second["time/generate_s"]) == (30, 20)
    assert (first["tag/inserted"], second["tag/inserted"]) == (2, 1)


@pytest.mark.parametrize("load_s", [1, 200])
def test_bubbles_are_what_the_events_say(simulate: Callable[..., Any], load_s: float) -> None:
    run = simulate(
        num_steps=5,
        num_micro_batches=6,
        generators=[{"generate": 7, "score": 1, "load": 2}, {"generate": 5, "score": 3, "load": load_s}],
        trainer={"generate": 9, "update": 3, "commit": 2, "publish": 1, "switch_in": 1},
        config={"mode": "tcss", "tag": "greedy"},
    )
    roles = {"g0": "generator", "g1": "generator", "trainer": "trainer"}
    start = 0.0
    for commit in run.of(StepCommitted):
        busy = {"generator": 0.0, "trainer": 0.0}
        for task in run.of(TaskFinished):
            busy[roles[task.worker]] += max(0, min(task.time, commit.time) - max(task.started, start))
        wall = commit.time - start
        for role, count in (("generator", 2), ("trainer", 1)):
            assert commit.values[f"pipeline/bubble_ratio/{role}"] == exactly(1 - busy[role] / wall / count, abs=1e-9)
        start = commit.time


def test_a_worker_counts_only_while_it_takes_part(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(5)
        scheduler.remove_worker("g1")  # it leaves at 10, with its task
        await asyncio.sleep(10)
        await scheduler.add_generator(SimWorker("g2", {"generate": 10}))

    run = simulate(num_micro_batches=6, generators=[{"generate": 10}] * 2, body=body)
    assert run.schedule("g0") == ["generate 0/0 0-10", "generate 0/2 10-20", "generate 0/4 20-30"]
    assert run.schedule("g1") == ["generate 0/1 0-10"]
    assert run.schedule("g2") == ["generate 0/3 15-25", "generate 0/5 25-35"]
    (report,) = run.reports
    busy, present = 30 + 10 + 20, 35 + 10 + 20
    assert report.metrics()["pipeline/bubble_ratio/generator"] == exactly(1 - busy / present, abs=1e-9)


def test_staleness_is_reported_and_again_over_what_best_of_n_kept(simulate: Callable[..., Any]) -> None:
    plan = Plan(["a"], num_steps=2, prompts_per_step=2, samples_per_prompt=4, micro_batch_size=2)
    run = simulate(
        plan=plan,
        generators=[SimWorker("g0", {"generate": 1}, reward=lambda uid, sample: [0.0, 1.0, 2.0, 9.0][sample])],
        trainer={"update": 10},
        advantage=AdvantageSection(best_of_n=2),
        config={"window": 2, "stale_fraction": 0.25},
    )
    values = run.reports[1].metrics()
    # Micro-batch 0 of step 1 is stale: samples 0 and 1 of its group, of which best-of-N keeps sample 0 of 0 and 3.
    assert values["staleness/mean"] == 0.25
    assert values["staleness/max"] == 1
    assert values["staleness/ratio"] == 0.25
    assert values["staleness/kept_ratio"] == 0.25
    assert run.reports[0].metrics()["staleness/max"] == 0


def test_rewards_and_groups_without_spread(simulate: Callable[..., Any]) -> None:
    plan = Plan(["a"], num_steps=1, prompts_per_step=2, samples_per_prompt=2)
    run = simulate(
        plan=plan, generators=[SimWorker("g0", reward=lambda uid, sample: 3.0 if uid == "s0p0" else float(sample))]
    )
    values = run.reports[0].metrics()
    assert values["reward/mean"] == 7 / 4
    assert values["reward/std"] == exactly((sum((x - 1.75) ** 2 for x in (3, 3, 0, 1)) / 4) ** 0.5)
    assert values["reward/zero_std_ratio"] == 0.5
    assert values["version/trainer"] == 1


def test_metrics_of_updates_are_averaged_and_maxima_kept(simulate: Callable[..., Any]) -> None:
    class Talkative(SimWorker):
        async def update(self, rollout: Rollout, advantages: Any, /) -> UpdateReport:
            await super().update(rollout, advantages)
            index = rollout.micro_batch.index
            metrics = {"ratio/mean": float(index), "ratio/max": float(index)}
            return UpdateReport(rollout.micro_batch.step, index, 1, metrics)

        async def commit(self, step: int, indices: Any, scale: float | None = None, /) -> CommitReport:
            report = await super().commit(step, indices, scale)
            return CommitReport(report.version, report.num_terms, {"grad_norm": 0.5})

    values = simulate(trainer=Talkative("trainer")).reports[0].metrics()
    assert (values["ratio/mean"], values["ratio/max"], values["grad_norm"]) == (1.5, 3, 0.5)


def test_a_step_of_no_length_has_no_shares_of_it(simulate: Callable[..., Any]) -> None:
    values = simulate().reports[0].metrics()
    assert values["pipeline/makespan_s"] == 0
    assert not [name for name in values if name.startswith(("pipeline/bubble_ratio", "perf/"))]
