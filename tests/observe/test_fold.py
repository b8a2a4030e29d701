"""The fold against schedules computed by hand, and its conservation laws on long, broken and resumed streams."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from digen.errors import InvariantViolation
from digen.events import (
    AnyEvent,
    BubbleOpened,
    GroupCompleted,
    MicroBatchSettled,
    Rewarded,
    RunFinished,
    RunStarted,
    StepCommitted,
    TagDecided,
    TaskFailed,
    TaskFinished,
    TaskStarted,
    WorkerJoined,
    WorkerLeft,
)
from digen.observe.fold import Fold
from digen.observe.ledger import HANDOVER, Span
from digen.observe.steps import DERIVED, StepSummary, StepTime, step_time

HandMade = Callable[..., list[AnyEvent]]
FakeRuns = Callable[..., list[AnyEvent]]

CAUSES = {"gen0": "wait_weights", "trainer": "wait_rollout"}

NAIVE = [
    *[("gen0", "generate", float(i), i + 1.0, 0, i) for i in range(4)],
    *[("trainer", "update", 4.0 + i / 2, 4.5 + i / 2, 0, i) for i in range(4)],
]
"""Fig. 1 (b): four generations of 1 s, then four updates of 0.5 s."""

PIPELINED = [
    *[("gen0", "generate", float(i), i + 1.0, 0, i) for i in range(4)],
    *[("trainer", "update", i + 1.0, i + 1.5, 0, i) for i in range(4)],
]
"""Fig. 1 (c): every update as soon as its generation is done."""

ASSISTED = [
    *[("gen0", "generate", float(i), i + 1.0, 0, i) for i in range(3)],
    ("trainer", "assist", 0.0, 1.0, 0, 3),
    ("trainer", "update", 1.0, 1.5, 0, 0),
    ("trainer", "update", 2.0, 2.5, 0, 1),
    ("trainer", "update", 3.0, 3.5, 0, 2),
    ("trainer", "update", 3.5, 4.0, 0, 3),
]
"""Fig. 1 (d): the trainer generates micro-batch 3 while it would wait for the first one."""


@pytest.mark.parametrize(
    ("tasks", "end", "expected"),
    [
        (NAIVE, 6.0, (2 / 6, 4 / 6, 0.0)),
        (PIPELINED, 4.5, (0.5 / 4.5, 2.5 / 4.5, 1.5 / 4.5)),
        (ASSISTED, 4.0, (1 / 4, 1 / 4, 2 / 4)),
    ],
    ids=["naive", "pipelined", "assisted"],
)
def test_bubble_ratios_equal_hand_computed_values(
    hand_made: HandMade, tasks: list[Any], end: float, expected: tuple[float, float, float]
) -> None:
    generator, trainer, overlap = expected
    fold = Fold.of(hand_made(tasks, end, CAUSES))

    assert fold.workers["gen0"].idle_share(fold.now) == pytest.approx(generator, abs=1e-9)
    assert fold.workers["trainer"].idle_share(fold.now) == pytest.approx(trainer, abs=1e-9)
    assert fold.overlap_ratio == pytest.approx(overlap, abs=1e-9)
    assert dict(fold.workers["trainer"].bubble_s) == {"wait_rollout": pytest.approx(trainer * end, abs=1e-9)}


def test_colocated_execution_has_no_bubbles(hand_made: HandMade) -> None:
    tasks = [("trainer", "generate", 0.0, 4.0, 0, 0), ("trainer", "update", 4.0, 6.0, 0, 0)]
    fold = Fold.of(hand_made(tasks, 6.0, {"trainer": "wait_rollout"}))
    assert fold.workers["trainer"].idle_share(fold.now) == 0.0
    assert fold.overlap_ratio == 0.0


def test_shares_while_the_run_goes_on_include_the_open_stretch(hand_made: HandMade) -> None:
    fold = Fold()
    for event in hand_made(PIPELINED, 4.5, CAUSES):
        if event.time <= 2.0:
            fold.apply(event)
    assert fold.workers["trainer"].idle_share(2.25) == pytest.approx(1.5 / 2.25)
    assert fold.workers["gen0"].idle_share(2.25) == 0.0


def test_a_bubble_whose_cause_changes_is_two_bubbles(started: Callable[..., RunStarted]) -> None:
    spans: list[Span] = []
    fold = Fold(spans.append)
    for event in (
        started(),
        WorkerJoined(0.0, "trainer", "trainer", 0),
        BubbleOpened(0.0, "trainer", "wait_rollout"),
        BubbleOpened(2.0, "trainer", "wait_score"),
        BubbleOpened(2.5, "trainer", "wait_score"),
        TaskStarted(3.0, 1, "update", "trainer", 0, 0, 0),
        TaskFinished(4.0, 1, "update", "trainer", 0, 0, 0, 3.0),
        TaskStarted(4.25, 2, "commit", "trainer", 0, -1, 1),
        RunFinished(5.0, "stopped"),
    ):
        fold.apply(event)
    assert [(span.label, span.start, span.end, span.outcome) for span in spans] == [
        ("wait_rollout", 0.0, 2.0, "done"),
        ("wait_score", 2.0, 3.0, "done"),
        ("update s0 mb0 v0", 3.0, 4.0, "done"),
        (HANDOVER, 4.0, 4.25, "done"),
        ("commit s0 v1", 4.25, 5.0, "unfinished"),
    ]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("length", [1, 5, 50, 333, 700, None])
def test_every_workers_time_is_partitioned(fake_run: FakeRuns, window: int, length: int | None) -> None:
    spans: list[Span] = []
    fold = Fold.of(fake_run(12, 3, window=window)[:length], spans.append)
    for name, ledger in fold.workers.items():
        own = [span for span in spans if span.worker == name]
        assert ledger.busy_s + sum(ledger.bubble_s.values()) == pytest.approx(ledger.wall_s, abs=1e-9)
        assert ledger.wall_s == pytest.approx(fold.now, abs=1e-9)
        assert sum(ledger.kind_s.values()) == pytest.approx(ledger.busy_s, abs=1e-9)
        assert all(one.end == other.start for one, other in pairwise(own))
    ended = sum(fold.counts[f"num_tasks_{outcome}"] for outcome in ("done", "failed", "unfinished"))
    assert fold.counts["num_tasks_started"] == ended == sum(span.kind != "bubble" for span in spans)


def test_totals_alone_take_no_memory_that_grows_with_the_run(fake_run: FakeRuns) -> None:
    fold = Fold(keep_steps=5)
    for event in fake_run(60, 2):
        fold.apply(event)
    assert [*fold.steps] == [55, 56, 57, 58, 59]
    assert not fold._tallies
    assert not fold.score_queue
    assert not fold.update_queue


def test_segments_of_a_resumed_run_are_laid_end_to_end(fake_run: FakeRuns) -> None:
    crashed = fake_run(12, 2, window=2)
    crashed = crashed[: next(i for i, e in enumerate(crashed) if isinstance(e, StepCommitted) and e.step == 7)]
    resumed = fake_run(12, 2, start_step=5, seed=1)
    spans: list[Span] = []
    fold = Fold.of([*crashed, *resumed], spans.append)

    assert fold.num_segments == 2
    assert [*fold.steps] == list(range(12))
    assert fold.now == pytest.approx(crashed[-1].time + resumed[-1].time)
    assert fold.steps[5].time > crashed[-1].time > fold.steps[4].time
    for ledger in fold.workers.values():
        own = [span for span in spans if span.worker == ledger.name]
        assert ledger.wall_s == pytest.approx(fold.now)
        assert ledger.busy_s + sum(ledger.bubble_s.values()) == pytest.approx(fold.now)
        assert all(one.end <= other.start for one, other in pairwise(own))
    assert fold.counts["num_tasks_unfinished"] > 0
    assert fold.counts["num_commits"] == 7 + 7


def test_steps_that_a_resume_will_repeat_are_forgotten(fake_run: FakeRuns, started: Callable[..., RunStarted]) -> None:
    fold = Fold.of([*fake_run(12, 2), started(12, start_step=5)])
    assert [*fold.steps] == [0, 1, 2, 3, 4]


def test_two_tasks_at_once_count_as_one_busy_stretch(started: Callable[..., RunStarted]) -> None:
    fold = Fold.of(
        [
            started(),
            WorkerJoined(0.0, "gen0", "generator", 0),
            TaskStarted(1.0, 1, "generate", "gen0", 0, 0, 0),
            TaskStarted(2.0, 2, "score", "gen0", 0, 1, 0),
            TaskFinished(3.0, 1, "generate", "gen0", 0, 0, 0, 1.0),
            TaskFinished(4.0, 2, "score", "gen0", 0, 1, 0, 2.0),
            RunFinished(5.0, "completed"),
        ]
    )
    ledger = fold.workers["gen0"]
    assert (ledger.busy_s, sum(ledger.bubble_s.values()), ledger.wall_s) == (3.0, 2.0, 5.0)
    assert dict(ledger.kind_s) == {"generate": 2.0, "score": 2.0}


def test_what_is_counted(started: Callable[..., RunStarted]) -> None:
    fold = Fold()
    for event in (
        started(window=2),
        WorkerJoined(0.0, "gen0", "generator", 0),
        WorkerJoined(0.0, "trainer", "trainer", 0),
        TagDecided(0.0, "trainer", 0, True, "greedy", ""),
        TagDecided(0.0, "trainer", 0, False, "greedy", ""),
        TaskStarted(0.0, 1, "switch", "trainer", 0, -1, 0),
        TaskFinished(0.25, 1, "switch", "trainer", 0, -1, 0, 0.0),
        TaskStarted(0.25, 2, "assist", "trainer", 1, 0, 0, stale=True),
        TaskFinished(1.25, 2, "assist", "trainer", 1, 0, 0, 0.25),
        Rewarded(1.5, 1, 0, (0.0, 1.0)),
        GroupCompleted(1.5, 1, "a", 0.5, 0.5, 2, 2, (0, 1)),
        GroupCompleted(1.5, 1, "b", 0.5, 0.0, 2, 1, (1,)),
        MicroBatchSettled(2.0, 1, 0, "updated", 0, 1),
        MicroBatchSettled(2.0, 1, 1, "updated", 1, 0),
        MicroBatchSettled(2.0, 1, 2, "empty", 1, 0),
        TaskStarted(2.0, 3, "publish", "trainer", 1, -1, 2),
        TaskFinished(2.5, 3, "publish", "trainer", 1, -1, 2, 2.0),
        TaskStarted(2.5, 4, "load", "gen0", 1, -1, 2),
        TaskFinished(2.75, 4, "load", "gen0", 1, -1, 2, 2.5),
        StepCommitted(3.0, 1, 2, {"weight_sync/bytes": 100.0, "reward/mean": 0.75}),
        RunFinished(4.0, "completed"),
    ):
        fold.apply(event)
    assert fold.counts == {
        "num_tasks_started": 4, "num_tasks_done": 4, "num_tasks_unfinished": 0, "num_tag_inserted": 1,
        "num_tag_skipped": 1, "num_groups": 2, "num_groups_spanning": 1, "num_groups_mixed": 1, "num_updated": 2,
        "num_empty": 1, "num_commits": 1, "num_stale_starts": 1,
    }  # fmt: skip
    assert fold.tasks("assist") == 1
    assert fold.seconds("switch") == 0.25
    assert fold.seconds("publish", "load") == 0.75
    assert fold.sync_bytes == 100.0
    assert fold.staleness == {0: 1, 1: 1}
    assert fold.workers["gen0"].version == 2
    assert fold.steps[1].values == {
        "pipeline/makespan_s": 3.0,
        "pipeline/bubble_ratio/generator": pytest.approx(2.75 / 3),
        "pipeline/bubble_ratio/trainer": pytest.approx(1.25 / 3),
        "reward/mean": 0.75,  # the scheduler's own value wins over the derived one
        "reward/std": 0.5,
        "reward/group_std": 0.25,
        "reward/zero_std_ratio": 0.5,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "staleness/ratio": 0.5,
        "weight_sync/bytes": 100.0,
    }


def test_derived_metric_names_are_frozen(fake_run: FakeRuns) -> None:
    given = {key for event in fake_run(2, 1) if isinstance(event, StepCommitted) for key in event.values}
    derived = set(Fold.of(fake_run(2, 1)).steps[1].values) - given
    assert (
        sorted(derived | {"pipeline/bubble_ratio/scorer"})
        == list(DERIVED)
        == [
            "pipeline/bubble_ratio/generator",
            "pipeline/bubble_ratio/scorer",
            "pipeline/bubble_ratio/trainer",
            "pipeline/makespan_s",
            "reward/group_std",
            "reward/mean",
            "reward/std",
            "reward/zero_std_ratio",
            "staleness/max",
            "staleness/mean",
            "staleness/ratio",
        ]
    )


def test_queues_follow_lost_attempts(started: Callable[..., RunStarted]) -> None:
    fold = Fold()
    fold.apply(started())
    fold.apply(WorkerJoined(0.0, "gen0", "generator", 0))
    depths = []
    for event in (
        TaskStarted(0.0, 1, "generate", "gen0", 0, 0, 0),
        TaskFinished(1.0, 1, "generate", "gen0", 0, 0, 0, 0.0),
        TaskStarted(1.0, 2, "score", "gen0", 0, 0, 0),
        TaskFailed(2.0, 2, "score", "gen0", 0, 0, 1.0, "RewardError"),
        TaskStarted(2.0, 3, "generate", "gen0", 0, 0, 0),
        TaskFinished(3.0, 3, "generate", "gen0", 0, 0, 0, 2.0),
        TaskStarted(3.0, 4, "score", "gen0", 0, 0, 0),
        TaskFinished(4.0, 4, "score", "gen0", 0, 0, 0, 3.0),
        MicroBatchSettled(4.0, 0, 0, "empty", 0, 0),
    ):
        fold.apply(event)
        depths.append((len(fold.score_queue), len(fold.update_queue)))
    assert depths == [(0, 0), (1, 0), (0, 0), (1, 0), (0, 0), (1, 0), (0, 0), (0, 1), (0, 0)]


def test_a_worker_that_leaves_and_comes_back(started: Callable[..., RunStarted]) -> None:
    spans: list[Span] = []
    fold = Fold(spans.append)
    for event in (
        started(),
        WorkerJoined(0.0, "gen0", "generator", 0),
        TaskStarted(0.0, 1, "generate", "gen0", 0, 0, 0),
        WorkerLeft(1.0, "gen0", "killed by SIGKILL"),
        TaskFailed(1.0, 1, "generate", "gen0", 0, 0, 0.0, "WorkerDied"),
        BubbleOpened(1.0, "gen0", "wait_work"),
        WorkerJoined(3.0, "gen0", "generator", 0),
        TaskStarted(3.5, 2, "generate", "gen0", 0, 0, 0),
        TaskFinished(5.0, 2, "generate", "gen0", 0, 0, 0, 3.5),
        RunFinished(5.0, "completed"),
    ):
        fold.apply(event)
    ledger = fold.workers["gen0"]
    assert (ledger.wall_s, ledger.busy_s, dict(ledger.bubble_s)) == (3.0, 2.5, {HANDOVER: 0.5})
    assert fold.counts["num_tasks_failed"] == 1
    assert [span.outcome for span in spans] == ["failed", "done", "done"]


def test_an_unknown_worker_is_a_bug(started: Callable[..., RunStarted]) -> None:
    fold = Fold()
    fold.apply(started())
    with pytest.raises(InvariantViolation, match="'ghost', which never joined"):
        fold.apply(TaskStarted(0.0, 1, "generate", "ghost", 0, 0, 0))


def test_the_median_step_leaves_out_the_first_and_the_last() -> None:
    steps = [StepSummary(i, i + 1, 0.0, seconds, {}) for i, seconds in enumerate([100.0, 2.0, 3.0, 4.0, 50.0])]
    assert step_time(steps) == StepTime(3.0, 3, 0)
    assert step_time(steps[:2]) == StepTime(51.0, 2, 0)
    assert step_time([]) is None
    assert StepTime(3.0, 3, 0).describe() == "median of 3 steps"


@pytest.mark.parametrize(
    ("disturbed", "expected"),
    [
        ({2}, StepTime(3.0, 2, 1)),  # 2 and 4 of the inner ones
        ({1, 2, 3}, StepTime(75.0, 2, 3)),  # no inner one is left: the first and the last
        ({0, 1, 2, 3, 4}, StepTime(4.0, 3, 0)),  # there is none without a loss
    ],
)
def test_the_median_step_leaves_out_those_with_a_loss(disturbed: set[int], expected: StepTime) -> None:
    seconds = [100.0, 2.0, 7.0, 4.0, 50.0]
    steps = [StepSummary(i, i + 1, 0.0, s, {}, disturbed=i in disturbed) for i, s in enumerate(seconds)]
    assert step_time(steps) == expected


def test_a_median_says_what_it_leaves_out() -> None:
    assert StepTime(3.0, 1, 2).describe() == "median of 1 step, 2 with a lost worker left out"
