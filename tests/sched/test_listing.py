"""Algorithm 1 as printed is not executable. One test for each gap: digen does not suffer its consequence.

The reference instance is B = 4, S = 4, g = h = 10, u = 4, y = 3, with one generator, an assisting trainer and a
scorer that takes no time (the listing computes advantages in the driver). y is the duration of a *load* under
``sync="hold"``, when the trainer waits for it as well; the commit and the publication take no time. Executed literally
the listing gives other totals or none; on-policy it is t = 156.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from digen import Plan, SimWorker
from digen.config import AdvantageSection
from digen.events import GroupCompleted, MicroBatchSettled, TagDecided, TaskFinished, TaskStarted

B, S = 4, 4


@pytest.fixture
def reference(simulate: Callable[..., Any]) -> Callable[..., Any]:
    """Run the reference instance with a schedule of the caller's."""

    def run(**config: Any) -> Any:
        return simulate(
            num_steps=S,
            num_micro_batches=B,
            generators=[{"generate": 10, "load": 3}],
            scorers=[{}],
            trainer={"generate": 10, "update": 4},
            config={"tag": "greedy", "sync": "hold", **config},
        )

    return run


def stale_by_step(run: Any) -> dict[int, int]:
    return dict(Counter(event.step for event in run.of(MicroBatchSettled) if event.staleness))


def test_gap_01_counters_are_initialised_so_that_nothing_deadlocks(reference: Callable[..., Any]) -> None:
    run = reference(window=1)
    assert run.outcome == "completed"
    assert run.makespan == 156
    assert reference(window=2, stale_fraction=1).makespan == 138  # and W=2 is neither on-policy nor bound to 1 stale


def test_gap_02_the_gate_is_on_the_candidate_so_that_window_1_never_goes_stale(reference: Callable[..., Any]) -> None:
    run = reference(window=1)
    assert stale_by_step(run) == {}  # the literal gate: one stale micro-batch a step, t=134
    assert run.makespan == 156


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_gap_03_window_is_one_more_than_the_largest_lag(simulate: Callable[..., Any], window: int) -> None:
    run = simulate(
        num_steps=8,
        num_micro_batches=2,
        generators=[{"generate": 1}],
        trainer={"update": 100},  # so slow that every lag that is allowed happens
        config={"window": window, "stale_fraction": None if window == 1 else 1},
    )
    assert max(event.staleness for event in run.of(MicroBatchSettled)) == window - 1


def test_gap_04_the_next_micro_batch_comes_from_the_first_step_that_has_one(reference: Callable[..., Any]) -> None:
    run = reference(window=2, stale_fraction=0.25)
    began = next(event.time for event in run.of(TaskStarted) if event.step == 1)
    committed = next(event.time for event in run.of(TaskFinished) if event.kind == "commit")
    assert began < committed  # literally never: t=156, TCSS does nothing
    assert run.makespan == 134


@pytest.mark.parametrize(("fraction", "makespan", "stale"), [("0.25", 134, 1), ("0.5", 138, 2), ("1", 138, 2)])
def test_gap_05_the_stale_share_is_bounded_in_every_step(
    reference: Callable[..., Any], fraction: str, makespan: int, stale: int
) -> None:
    run = reference(window=2, stale_fraction=fraction)
    assert stale_by_step(run) == dict.fromkeys(range(1, S), stale)
    assert run.makespan == makespan


def test_gap_06_nothing_is_dispatched_beyond_the_last_step(reference: Callable[..., Any]) -> None:
    run = reference(window=2, stale_fraction=1)
    assert max(event.step for event in run.of(TaskStarted) if event.kind in {"generate", "assist"}) == S - 1
    assert run.makespan == 138  # 142 without the guard


@pytest.mark.parametrize("sync", ["hold", "pull"])
def test_gap_07_no_weights_change_inside_a_trajectory(reference: Callable[..., Any], sync: str) -> None:
    run = reference(window=2, stale_fraction=1, sync=sync)
    spans = [event for event in run.of(TaskFinished) if event.worker == "g0"]
    commits = [event.time for event in run.of(TaskFinished) if event.kind == "commit"]
    across = [e for e in spans if e.kind == "generate" and any(e.started < commit < e.time for commit in commits)]
    assert across  # trajectories do run across commits: literally their weights were swapped, t=126
    for event in across:
        load = next(other for other in spans if other.kind == "load" and other.started >= event.time)
        assert load.version > event.version
    for event in run.of(MicroBatchSettled):
        assert event.step - event.version == event.staleness


@pytest.mark.parametrize("order", ["index", "ready"])
def test_gap_08_an_update_is_always_of_the_current_step(simulate: Callable[..., Any], order: str) -> None:
    run = simulate(
        num_steps=3,
        num_micro_batches=4,
        generators=[{"generate": 1}] * 2,
        trainer={"update": 4, "commit": 2},
        config={"window": 2, "stale_fraction": 1, "update_order": order},
    )
    commits = {event.step: event for event in run.of(TaskFinished) if event.kind == "commit"}
    scored = [event for event in run.of(TaskFinished) if event.kind == "score" and event.step == 1]
    assert any(event.time < commits[0].started for event in scored)  # they waited in UQ, next to those of step 0
    for event in run.of(TaskStarted):
        if event.kind == "update":
            assert event.step == 0 or event.time >= commits[event.step - 1].time
    run.trained_once()


def test_gap_09_the_optimizer_steps_once_a_step_after_the_last_update(reference: Callable[..., Any]) -> None:
    run = reference()
    own = {"update", "commit", "publish"}
    kinds = [event.kind for event in run.of(TaskFinished) if event.kind in own]
    assert kinds == [*["update"] * B, "commit", "publish"] * S
    assert run.trainer.version == run.generators[0].version == S


def test_gap_10_a_step_is_complete_after_all_its_micro_batches_not_the_dispatched_ones(
    reference: Callable[..., Any],
) -> None:
    run = reference()
    assert Counter(event.kind for event in run.of(TaskFinished) if event.kind != "switch") == {
        "generate": 8,
        "assist": 8,
        "score": 16,
        "update": 16,
        "commit": 4,
        "publish": 4,
        "load": 4,
    }  # literally: four steps "complete" at t=12 without any work
    assert [report.metrics()["pipeline/makespan_s"] for report in run.reports] == [36, 39, 39, 39]
    run.trained_once()


def test_gap_11_a_micro_batch_that_best_of_n_empties_counts_as_done(simulate: Callable[..., Any]) -> None:
    plan = Plan(["a"], num_steps=2, prompts_per_step=2, samples_per_prompt=8, micro_batch_size=2)
    run = simulate(
        plan=plan,
        generators=[SimWorker("g0", {"generate": 10}, reward=lambda uid, sample: float(sample))],
        trainer={"update": 4},
        advantage=AdvantageSection(best_of_n=2),
    )
    outcomes = [(event.step, event.index, event.outcome) for event in run.of(MicroBatchSettled)]
    assert len(outcomes) == 2 * plan.num_micro_batches
    assert sum(outcome == "empty" for _, _, outcome in outcomes) == 8  # of each group, samples 0 and 7 are kept
    assert run.trainer.trained == [(step, (0, 3, 4, 7)) for step in range(2)]
    assert run.makespan == 2 * (80 + 4 + 4)  # an empty one costs the trainer nothing


def test_gap_12_nothing_blocks_on_an_empty_queue_and_dispatch_fills_every_worker(simulate: Callable[..., Any]) -> None:
    run = simulate(num_steps=3, num_micro_batches=4, generators=[{"generate": 10}] * 4, trainer={"update": 4})
    assert run.makespan == 3 * (10 + 4 * 4)
    starts = [event.time for event in run.of(TaskStarted) if event.kind == "generate" and event.step == 0]
    assert starts == [0, 0, 0, 0]


@pytest.mark.parametrize("order", ["index", "ready"])
def test_gap_13_no_assist_while_an_update_is_due(reference: Callable[..., Any], order: str) -> None:
    run = reference(update_order=order)
    due: set[tuple[int, int]] = set()
    for event in run.events:
        if isinstance(event, TaskFinished) and event.kind == "score":
            due.add((event.step, event.index))
        elif isinstance(event, TaskStarted) and event.kind == "update":
            due.discard((event.step, event.index))
        elif isinstance(event, TagDecided):
            assert not due
    # Both idle at 0 and at 39: the generator takes the first micro-batch.
    first = [(e.time, e.kind, e.index) for e in run.of(TaskStarted) if e.kind in {"generate", "assist"}]
    assert first[:4] == [(0, "generate", 0), (0, "assist", 1), (10, "generate", 2), (18, "assist", 3)]


def test_gap_14_scoring_has_a_queue_and_priority_and_the_limit_defaults_to_the_workers(
    simulate: Callable[..., Any], reference: Callable[..., Any]
) -> None:
    assert reference().makespan == 156
    assert reference(max_generating=1).makespan == 188  # what C_gen = 1 costs with two workers
    run = simulate(generators=[{"generate": 10, "score": 1}], trainer={})
    kinds = [event.kind for event in run.of(TaskFinished) if event.worker == "g0" and event.kind != "load"]
    assert kinds == ["generate", "score"] * 4


def test_gap_15_advantages_come_from_whole_groups_only(simulate: Callable[..., Any]) -> None:
    given: dict[int, list[float | None]] = {}

    class Recorder(SimWorker):
        async def update(self, rollout: Any, advantages: Any, /) -> Any:
            given[rollout.micro_batch.index] = list(advantages)
            return await super().update(rollout, advantages)

    plan = Plan(["a"], num_steps=1, prompts_per_step=1, samples_per_prompt=4, micro_batch_size=1)
    run = simulate(
        plan=plan,
        generators=[SimWorker("g0", {"generate": 10}, reward=lambda uid, sample: float(sample))],
        trainer=Recorder("trainer", {"update": 4}),
        advantage=AdvantageSection(epsilon=0),
    )
    std = 1.25**0.5
    assert [given[index] for index in range(4)] == [[pytest.approx((reward - 1.5) / std)] for reward in range(4)]
    assert run.schedule("trainer")[0] == "update 0/0 40-44"  # not at 10: then the group was a fourth of itself
    (group,) = run.of(GroupCompleted)
    assert (group.num_micro_batches, group.versions) == (4, (0,))


def test_gap_15_the_versions_of_a_group_are_reported(
    reference: Callable[..., Any], simulate: Callable[..., Any]
) -> None:
    plan = Plan(["a"], num_steps=2, prompts_per_step=1, samples_per_prompt=4, micro_batch_size=1)
    run = simulate(
        plan=plan, generators=[{"generate": 10}], trainer={"update": 4}, config={"window": 2, "stale_fraction": 0.5}
    )
    assert [event.versions for event in run.of(GroupCompleted)] == [(0,), (0, 1)]


def test_gap_16_updates_are_accumulated_in_index_order_and_the_commit_names_them(simulate: Callable[..., Any]) -> None:
    committed: list[tuple[int, tuple[int, ...]]] = []

    class Recorder(SimWorker):
        async def commit(self, step: int, indices: Any, scale: float | None = None, /) -> Any:
            committed.append((step, tuple(indices)))
            return await super().commit(step, indices, scale)

    run = partial(
        simulate,
        num_steps=2,
        num_micro_batches=6,
        generators=[{"generate": lambda step, index: (7 * index + 3 * step) % 5 + 1}] * 3,
        config={"tag": "greedy"},
    )
    trainer = Recorder("trainer", {"update": 1, "generate": 3})
    run(trainer=trainer)
    in_order = [(step, tuple(range(6))) for step in range(2)]
    assert trainer.trained == committed == in_order  # Z is known when the commit is given its micro-batches
    other = SimWorker("trainer", {"update": 1, "generate": 3})
    run(trainer=other, config={"tag": "greedy", "update_order": "ready"})
    assert other.trained != in_order
    assert [(step, tuple(sorted(indices))) for step, indices in other.trained] == in_order
