"""Schedules that were worked out by hand: where every task starts and ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from digen import Plan
from digen.events import (
    BubbleOpened,
    MicroBatchSettled,
    RunStarted,
    StepCommitted,
    TagDecided,
    TaskFinished,
    TaskStarted,
)

GENERATOR = {"generate": 10, "score": 1, "load": 2}
TRAINER = {"generate": 12, "update": 4, "commit": 2, "publish": 1, "switch_in": 1, "switch_out": 1}


# ---- Figure 1 --------------------------------------------------------------------------------------------------


def test_figure_1a_colocated_one_worker_does_stage_after_stage(simulate: Callable[..., Any]) -> None:
    run = simulate(
        num_steps=2,
        num_micro_batches=2,
        generators=[],
        trainer={**GENERATOR, **TRAINER, "generate": 10},
        config={"mode": "colocated"},
    )
    assert run.schedule("trainer") == [
        "generate 0/0 0-10",
        "generate 0/1 10-20",
        "score 0/0 20-21",
        "score 0/1 21-22",
        "update 0/0 22-26",
        "update 0/1 26-30",
        "commit 0 30-32",
        "generate 1/0 32-42",
        "generate 1/1 42-52",
        "score 1/0 52-53",
        "score 1/1 53-54",
        "update 1/0 54-58",
        "update 1/1 58-62",
        "commit 1 62-64",
    ]
    assert run.makespan == 64


def test_figure_1b_naive_disaggregation_lets_one_side_idle_while_the_other_works(simulate: Callable[..., Any]) -> None:
    run = simulate(num_steps=2, num_micro_batches=2, generators=[GENERATOR], trainer=TRAINER, config={"mode": "naive"})
    assert run.schedule("g0") == [
        "generate 0/0 0-10",
        "generate 0/1 10-20",
        "score 0/0 20-21",
        "score 0/1 21-22",
        "load 0 33-35",
        "generate 1/0 35-45",
        "generate 1/1 45-55",
        "score 1/0 55-56",
        "score 1/1 56-57",
        "load 1 68-70",
    ]
    assert run.schedule("trainer") == [
        "update 0/0 22-26",
        "update 0/1 26-30",
        "commit 0 30-32",
        "publish 0 32-33",
        "update 1/0 57-61",
        "update 1/1 61-65",
        "commit 1 65-67",
        "publish 1 67-68",
    ]


def test_figure_1c_micro_batches_overlap_generation_and_training(simulate: Callable[..., Any]) -> None:
    run = simulate(num_steps=2, num_micro_batches=2, generators=[GENERATOR], trainer=TRAINER)
    assert run.schedule("g0") == [
        "generate 0/0 0-10",
        "score 0/0 10-11",
        "generate 0/1 11-21",
        "score 0/1 21-22",
        "load 0 29-31",
        "generate 1/0 31-41",
        "score 1/0 41-42",
        "generate 1/1 42-52",
        "score 1/1 52-53",
        "load 1 60-62",
    ]
    assert run.schedule("trainer") == [
        "update 0/0 11-15",
        "update 0/1 22-26",
        "commit 0 26-28",
        "publish 0 28-29",
        "update 1/0 42-46",
        "update 1/1 53-57",
        "commit 1 57-59",
        "publish 1 59-60",
    ]


def test_figure_1d_an_idle_trainer_assists(simulate: Callable[..., Any]) -> None:
    run = simulate(num_micro_batches=4, generators=[GENERATOR], trainer=TRAINER, config={"tag": "greedy"})
    assert run.schedule("g0") == [
        "generate 0/0 0-10",
        "score 0/0 10-11",
        "generate 0/2 11-21",
        "score 0/1 21-22",  # generated at 13; the generator was in a trajectory
        "score 0/2 22-23",
        "score 0/3 31-32",
        "load 0 47-49",
    ]
    assert run.schedule("trainer") == [
        "switch 0 0-1",
        "assist 0/1 1-13",
        "switch 0 13-14",
        "update 0/0 14-18",
        "switch 0 18-19",
        "assist 0/3 19-31",
        "switch 0 31-32",
        "update 0/1 32-36",
        "update 0/2 36-40",
        "update 0/3 40-44",
        "commit 0 44-46",
        "publish 0 46-47",
    ]
    assert [(event.time, event.assist, event.step) for event in run.of(TagDecided)] == [(0, True, 0), (18, True, 0)]


def test_a_finer_cut_alone_shortens_the_naive_schedule(simulate: Callable[..., Any]) -> None:
    """Fig. 1 in one line each, B = 2: everything in sequence, one barrier less, two workers at once."""
    run = partial(simulate, num_micro_batches=2, generators=[GENERATOR], trainer=TRAINER)
    assert run(config={"mode": "naive"}).makespan == 22 + 8 + 2 + 1 + 2
    assert run(config={"mode": "gap"}).makespan == 22 + 4 + 2 + 1 + 2


# ---- Figure 5 --------------------------------------------------------------------------------------------------


def test_figure_5_the_generation_axis_gives_finer_units_than_the_batch_axis(simulate: Callable[..., Any]) -> None:
    options: dict[str, Any] = {"num_steps": 1, "prompts_per_step": 4, "samples_per_prompt": 2, "generator_ranks": 2}
    batch, generation = Plan(["a"], axis="batch", **options), Plan(["a"], **options)
    assert (batch.num_micro_batches, generation.num_micro_batches) == (2, 4)
    coarse = simulate(plan=batch, generators=[{"generate": 20}], trainer={"update": 8})
    fine = simulate(plan=generation, generators=[{"generate": 10}], trainer={"update": 4})
    assert coarse.schedule("trainer") == ["update 0/0 20-28", "update 0/1 40-48"]
    assert fine.schedule("trainer") == ["update 0/0 10-14", "update 0/1 20-24", "update 0/2 30-34", "update 0/3 40-44"]


# ---- Figure 6 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("assists", "makespan"), [(0, 63), (1, 53), (2, 43), (3, 48), (5, 48)])
def test_figure_6_too_few_assists_starve_the_trainer_and_too_many_make_it_late(
    simulate: Callable[..., Any], assists: int, makespan: int
) -> None:
    run = simulate(
        num_micro_batches=6,
        generators=[{"generate": 10}],
        trainer={"generate": 10, "update": 3},
        config={"tag": f"static({assists})"},
    )
    assert run.makespan == makespan
    assert run.reports[0].metrics()["tag/inserted"] == min(assists, 3)


def test_figure_6_static_assists_come_before_the_first_update_even_when_one_is_ready(
    simulate: Callable[..., Any],
) -> None:
    run = simulate(
        num_micro_batches=6,
        generators=[{"generate": 10}],
        trainer={"generate": 10, "update": 3},
        config={"tag": "static(2)"},
    )
    assert run.schedule("g0") == ["generate 0/0 0-10", "generate 0/2 10-20", "generate 0/4 20-30", "generate 0/5 30-40"]
    assert run.schedule("trainer") == [
        "assist 0/1 0-10",
        "assist 0/3 10-20",  # 0/0 and 0/1 have been ready since 10
        "update 0/0 20-23",
        "update 0/1 23-26",
        "update 0/2 26-29",
        "update 0/3 29-32",
        "update 0/4 32-35",
        "update 0/5 40-43",
    ]


# ---- Figure 8 --------------------------------------------------------------------------------------------------


@pytest.fixture
def tail(simulate: Callable[..., Any]) -> Callable[..., Any]:
    """Two steps of B = 4 with a tail bubble at the boundary."""
    return partial(
        simulate,
        num_steps=2,
        generators=[{"generate": 10, "load": 2}],
        trainer={"generate": 10, "update": 4, "commit": 1, "publish": 1},
    )


FIRST_STEP = [
    "assist 0/1 0-10",
    "update 0/0 10-14",
    "update 0/1 14-18",
    "assist 0/3 18-28",
    "update 0/2 28-32",
    "update 0/3 32-36",
    "commit 0 36-37",
    "publish 0 37-38",
]


def test_figure_8a_on_policy_the_generator_waits_out_the_tail(tail: Callable[..., Any]) -> None:
    run = tail(config={"mode": "tag", "tag": "greedy", "sync": "hold"})
    assert run.schedule("g0") == [
        "generate 0/0 0-10",
        "generate 0/2 10-20",
        "load 0 38-40",
        "generate 1/0 40-50",
        "generate 1/2 50-60",
        "load 1 78-80",
    ]
    assert run.schedule("trainer") == [
        *FIRST_STEP,
        "assist 1/1 40-50",
        "update 1/0 50-54",
        "update 1/1 54-58",
        "assist 1/3 58-68",
        "update 1/2 68-72",
        "update 1/3 72-76",
        "commit 1 76-77",
        "publish 1 77-78",
    ]
    bubbles = [(event.time, event.cause) for event in run.of(BubbleOpened) if event.worker == "g0"]
    assert bubbles[0] == (20, "wait_weights")
    assert (60, "wait_work") in bubbles


def test_figure_8b_tcss_fills_the_tail_with_stale_work(tail: Callable[..., Any]) -> None:
    run = tail(config={"mode": "tcss", "tag": "greedy", "stale_fraction": 0.25, "sync": "hold"})
    assert run.schedule("g0") == [
        "generate 0/0 0-10",
        "generate 0/2 10-20",
        "generate 1/0 20-30",  # stale, and the only one allowed
        "load 0 38-40",
        "generate 1/1 40-50",
        "generate 1/3 50-60",
        "load 1 70-72",
    ]
    assert run.schedule("trainer") == [
        *FIRST_STEP,
        "update 1/0 40-44",
        "assist 1/2 44-54",
        "update 1/1 54-58",
        "update 1/2 60-64",
        "update 1/3 64-68",
        "commit 1 68-69",
        "publish 1 69-70",
    ]
    assert run.reports[1].metrics()["staleness/ratio"] == 0.25


def test_hold_waits_for_a_stale_trajectory_and_pull_does_not(tail: Callable[..., Any]) -> None:
    hold, pull = (
        tail(config={"mode": "tcss", "tag": "greedy", "stale_fraction": 0.5, "sync": sync}) for sync in ("hold", "pull")
    )
    generated = ["generate 0/0 0-10", "generate 0/2 10-20", "generate 1/0 20-30", "generate 1/1 30-40"]
    assert hold.schedule("g0") == [*generated, "load 0 40-42", "generate 1/2 42-52", "load 1 70-72"]
    assert pull.schedule("g0") == [*generated, "load 0 40-42", "generate 1/2 42-52", "load 1 66-68"]
    assert hold.schedule("trainer") == [
        *FIRST_STEP,
        "update 1/0 42-46",  # ready since 30, but the trainer takes no work until all have loaded
        "update 1/1 46-50",
        "assist 1/3 50-60",
        "update 1/2 60-64",
        "update 1/3 64-68",
        "commit 1 68-69",
        "publish 1 69-70",
    ]
    assert pull.schedule("trainer") == [
        *FIRST_STEP,
        "update 1/0 38-42",
        "update 1/1 42-46",
        "assist 1/3 46-56",
        "update 1/2 56-60",
        "update 1/3 60-64",
        "commit 1 64-65",
        "publish 1 65-66",
    ]


def test_hold_loads_everywhere_at_once_and_pull_each_at_its_own_boundary(simulate: Callable[..., Any]) -> None:
    slow: dict[str, Any] = {"num_steps": 3, "num_micro_batches": 2, "trainer": {"update": 1}}
    workers = [{"generate": 4, "load": 1}, {"generate": lambda step, index: 30 if step else 4, "load": 1}]
    config = {"window": 2, "stale_fraction": 1}
    # Step 0 at 0-4 on both; both go on with step 1, g1 for 30 s. The commit of step 0 is at 6.
    hold = simulate(generators=workers, config={**config, "sync": "hold"}, **slow)
    pull = simulate(generators=workers, config={**config, "sync": "pull"}, **slow)
    assert hold.schedule("g0")[:3] == ["generate 0/0 0-4", "generate 1/0 4-8", "load 0 34-35"]
    assert hold.schedule("g1")[:3] == ["generate 0/1 0-4", "generate 1/1 4-34", "load 0 34-35"]
    assert pull.schedule("g0")[:3] == ["generate 0/0 0-4", "generate 1/0 4-8", "load 0 8-9"]
    assert pull.schedule("g1")[:3] == ["generate 0/1 0-4", "generate 1/1 4-34", "load 0 34-35"]


# ---- inside one instant ----------------------------------------------------------------------------------------


def test_a_generator_wins_the_race_for_the_last_pending_micro_batch(simulate: Callable[..., Any]) -> None:
    run = simulate(num_micro_batches=1, trainer={"generate": 1}, config={"tag": "greedy"})
    assert not run.of(TagDecided)
    assert next(event.worker for event in run.of(TaskStarted) if event.index == 0) == "g0"


def test_a_score_of_no_length_makes_no_bubble(simulate: Callable[..., Any]) -> None:
    run = simulate(generators=[{"generate": 10}], trainer={"generate": 10, "update": 4}, config={"tag": "greedy"})
    assert [event.time for event in run.of(TagDecided)] == [0, 18]  # and not at 10, between the rollout and its score
    assert run.schedule("trainer")[1] == "update 0/0 10-14"


def test_a_skipped_bubble_is_asked_about_once_and_stays_closed_until_the_next_update(
    simulate: Callable[..., Any],
) -> None:
    run = simulate(
        num_micro_batches=3,
        generators=[{"generate": 10}],
        trainer={"generate": 10, "update": 4},
        config={"tag": "static(0)"},
    )
    assert [(event.time, event.assist) for event in run.of(TagDecided)] == [(0, False), (14, False)]


def test_scoring_comes_before_generation_and_the_lowest_step_first(simulate: Callable[..., Any]) -> None:
    run = simulate(
        num_steps=2,
        num_micro_batches=2,
        generators=[{"generate": lambda step, index: 6 if (step, index) == (0, 1) else 1}] * 2,
        scorers=[{"score": 10}],
        config={"window": 2, "stale_fraction": 1},
    )
    # SQ holds 1/0 since 2, 1/1 since 3 and 0/1 since 6 when the scorer is free at 11.
    assert run.schedule("s0") == ["score 0/0 1-11", "score 0/1 11-21", "score 1/0 21-31", "score 1/1 31-41"]


def test_weights_that_are_due_are_loaded_before_scoring(simulate: Callable[..., Any]) -> None:
    run = simulate(
        num_steps=2,
        num_micro_batches=1,
        generators=[GENERATOR],
        trainer={"update": 4},
        config={"window": 2, "stale_fraction": 1},
    )
    assert run.schedule("g0")[:5] == [
        "generate 0/0 0-10",
        "score 0/0 10-11",
        "generate 1/0 11-21",  # the weights of step 1 are published at 15
        "load 0 21-23",
        "score 1/0 23-24",
    ]


def test_an_assist_is_scored_before_the_trainer_has_switched_back(simulate: Callable[..., Any]) -> None:
    run = simulate(
        num_micro_batches=2,
        generators=[{"generate": 50}],
        scorers=[{"score": 2}],
        trainer={"generate": 10, "update": 4, "switch_in": 3, "switch_out": 5},
        config={"tag": "static(1)"},
    )
    assert run.schedule("s0")[0] == "score 0/1 13-15"
    assert run.schedule("trainer")[:3] == ["switch 0 0-3", "assist 0/1 3-13", "switch 0 13-18"]
    assert run.reports[0].metrics()["tag/context_switch_s"] == 8


def test_generators_are_served_by_index(simulate: Callable[..., Any]) -> None:
    run = simulate(num_micro_batches=6, generators=[{"generate": 5}] * 3)
    assert [run.schedule(f"g{i}") for i in range(3)] == [
        [f"generate 0/{i} 0-5", f"generate 0/{i + 3} 5-10"] for i in range(3)
    ]


# ---- workers that differ ---------------------------------------------------------------------------------------


def test_a_faster_generator_takes_more_micro_batches(simulate: Callable[..., Any]) -> None:
    run = simulate(num_micro_batches=6, generators=[{"generate": 10}, {"generate": 4}], trainer={"update": 1})
    assert run.schedule("g0") == ["generate 0/0 0-10", "generate 0/4 10-20"]
    assert run.schedule("g1") == ["generate 0/1 0-4", "generate 0/2 4-8", "generate 0/3 8-12", "generate 0/5 12-16"]
    assert run.schedule("trainer") == [
        "update 0/0 10-11",
        "update 0/1 11-12",
        "update 0/2 12-13",
        "update 0/3 13-14",
        "update 0/4 20-21",
        "update 0/5 21-22",
    ]
    ready = simulate(
        num_micro_batches=6,
        generators=[{"generate": 10}, {"generate": 4}],
        trainer={"update": 1},
        config={"update_order": "ready"},
    )
    assert ready.trainer.trained == [(0, (1, 2, 0, 3, 5, 4))]


def test_scorers_of_their_own_leave_the_generators_to_generate(simulate: Callable[..., Any]) -> None:
    run = partial(simulate, num_micro_batches=3, generators=[{"generate": 4, "score": 99}], trainer={"update": 1})
    two, one = run(scorers=[{"score": 7}] * 2), run(scorers=[{"score": 7}])
    assert two.schedule("g0") == ["generate 0/0 0-4", "generate 0/1 4-8", "generate 0/2 8-12"]
    assert two.schedule("s0") == ["score 0/0 4-11", "score 0/2 12-19"]
    assert two.schedule("s1") == ["score 0/1 8-15"]
    assert two.schedule("trainer") == ["update 0/0 11-12", "update 0/1 15-16", "update 0/2 19-20"]
    assert one.schedule("s0") == ["score 0/0 4-11", "score 0/1 11-18", "score 0/2 18-25"]
    assert one.makespan == 26


@pytest.mark.parametrize(("fraction", "limit"), [("0.28", 1), ("0.29", 2), ("0.5", 3), ("0.99", 6), ("1", 7)])
def test_the_stale_share_is_rounded_down(simulate: Callable[..., Any], fraction: str, limit: int) -> None:
    run = simulate(
        num_steps=3,
        num_micro_batches=7,
        generators=[{"generate": 1}],
        trainer={"update": 10},
        config={"window": 2, "stale_fraction": fraction},
    )
    assert run.of(RunStarted)[0].stale_limit == limit
    for step in (1, 2):
        assert sum(e.staleness for e in run.of(MicroBatchSettled) if e.step == step) == limit


def test_max_generating_bounds_the_generations_in_flight(simulate: Callable[..., Any]) -> None:
    run = simulate(
        num_micro_batches=6,
        generators=[{"generate": 5}] * 3,
        trainer={"generate": 5},
        config={"max_generating": 2, "tag": "greedy"},
    )
    assert run.makespan == 15
    assert ("g2", "wait_limit") in [(event.worker, event.cause) for event in run.of(BubbleOpened) if event.time == 0]
    assert not run.of(TagDecided)  # an assist would be one too many


# ---- identities ------------------------------------------------------------------------------------------------


def random_instance(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    return {
        "num_steps": draw.randint(1, 4),
        "num_micro_batches": draw.randint(1, 6),
        "generators": [
            {kind: draw.randint(0, 9) for kind in ("generate", "score", "load")} for _ in range(draw.randint(1, 3))
        ],
        "trainer": {
            kind: draw.randint(0, 9) for kind in ("generate", "update", "commit", "publish", "switch_in", "switch_out")
        },
        "scorers": [{"score": draw.randint(0, 9)}] if draw.random() < 0.3 else [],
        "config": {
            "tag": draw.choice(["never", "greedy", "static(2)", "threshold"]),
            "sync": draw.choice(["hold", "pull"]),
            "update_order": draw.choice(["index", "ready"]),
        },
    }


def trace(run: Any) -> list[Any]:
    return [event for event in run.events if not isinstance(event, RunStarted | StepCommitted)]


@pytest.mark.parametrize("seed", range(40))
def test_without_stale_work_the_trace_is_the_on_policy_one(simulate: Callable[..., Any], seed: int) -> None:
    instance = random_instance(seed)
    config = instance.pop("config")
    on_policy = simulate(config=config, **instance)
    for window, fraction in ((1, None), (2, 0), (3, 0)):
        other = simulate(config={**config, "window": window, "stale_fraction": fraction}, **instance)
        assert trace(other) == trace(on_policy)


@pytest.mark.parametrize("seed", range(40))
def test_scaling_every_duration_scales_every_time(simulate: Callable[..., Any], seed: int) -> None:
    instance = random_instance(seed)
    instance["config"] |= {"window": 2, "stale_fraction": 0.5}

    def scaled(durations: dict[str, int]) -> dict[str, int]:
        return {kind: 7 * seconds for kind, seconds in durations.items()}

    base = simulate(**instance)
    instance |= {role: [scaled(worker) for worker in instance[role]] for role in ("generators", "scorers")}
    slow = simulate(**{**instance, "trainer": scaled(instance["trainer"])})
    tasks = [(e.worker, e.kind, e.step, e.index, 7 * e.started, 7 * e.time) for e in base.of(TaskFinished)]
    assert [(e.worker, e.kind, e.step, e.index, e.started, e.time) for e in slow.of(TaskFinished)] == tasks
    assert slow.makespan == 7 * base.makespan
