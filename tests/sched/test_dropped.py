"""A reward that fails costs its group, as far as that is allowed, and never becomes a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from digen import Plan, ScheduleConfig, Scheduler, SimWorker
from digen.config import AdvantageSection
from digen.errors import RewardError, StepFailed
from digen.events import AnyEvent, GroupDropped, MicroBatchSettled, StepCommitted, TaskFailed
from digen.groups import GroupAssembler
from digen.sched import check
from digen.types import CommitReport, Rollout, Scored, UpdateReport
from digen.workers.clock import run_virtual


class Flaky(SimWorker):
    """Its reward fails for some micro-batches."""

    def __init__(self, name: str, fails: set[tuple[int, int]]) -> None:
        super().__init__(name, {"generate": 5, "score": 1, "load": 1})
        self.fails = fails

    async def score(self, rollout: Rollout, /) -> Scored:
        scored = await super().score(rollout)
        if (rollout.micro_batch.step, rollout.micro_batch.index) in self.fails:
            raise RewardError(f"the endpoint is down for micro-batch {rollout.micro_batch.index}")
        return scored


class Recorder(SimWorker):
    """A trainer that notes advantages and what the gradient is scaled by."""

    def __init__(self) -> None:
        super().__init__("trainer", {"update": 2, "commit": 1})
        self.advantages: dict[tuple[int, int], tuple[float | None, ...]] = {}
        self.scales: list[float | None] = []

    async def update(self, rollout: Rollout, advantages: Sequence[float | None], /) -> UpdateReport:
        self.advantages[rollout.micro_batch.step, rollout.micro_batch.index] = tuple(advantages)
        return await super().update(rollout, advantages)

    async def commit(self, step: int, indices: Sequence[int], scale: float | None = None, /) -> CommitReport:
        self.scales.append(scale)
        return await super().commit(step, indices)


def play(
    fails: set[tuple[int, int]], *, share: float = 0.5, micro_batch_size: int | None = None, **options: Any
) -> tuple[list[AnyEvent], Recorder]:
    """Two steps of four groups of two samples; the events keep every invariant."""
    events: list[AnyEvent] = []
    plan = Plan(
        ["a", "b", "c", "d"],
        num_steps=2,
        prompts_per_step=4,
        samples_per_prompt=2,
        micro_batch_size=micro_batch_size,
        axis="batch" if micro_batch_size == 4 else "generation",
    )
    trainer = Recorder()
    config = ScheduleConfig(max_dropped_groups=share, **options.pop("schedule", {}))

    async def main() -> None:
        async with Scheduler(
            plan, generators=[Flaky("gen0", fails)], trainer=trainer, config=config, sinks=[events.append], **options
        ) as scheduler:
            async for _ in scheduler:
                pass

    run_virtual(main())
    check(events)
    return events, trainer


def test_the_step_goes_on_without_the_group() -> None:
    events, trainer = play({(0, 1)})
    ((step, uid, index, error),) = [
        (event.step, event.uid, event.index, event.error) for event in events if isinstance(event, GroupDropped)
    ]
    assert (step, uid, index) == (0, "s0p1", 1)
    assert error == "the endpoint is down for micro-batch 1"
    assert [event.kind for event in events if isinstance(event, TaskFailed)] == ["score"]
    outcomes = {(e.step, e.index): e.outcome for e in events if isinstance(e, MicroBatchSettled)}
    assert outcomes[0, 1] == "dropped"
    assert sorted(index for index, outcome in outcomes.items() if outcome == "updated") == [
        (0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3),
    ]  # fmt: skip
    assert [e.values["reward/dropped_groups"] for e in events if isinstance(e, StepCommitted)] == [1, 0]
    assert trainer.trained[0] == (0, (0, 2, 3))


def test_all_samples_of_a_group_in_several_micro_batches_are_lost() -> None:
    """Four groups in eight micro-batches; the second half of group 1 fails after its first was scored."""
    events, trainer = play({(0, 3)}, micro_batch_size=1)
    outcomes = {e.index: e.outcome for e in events if isinstance(e, MicroBatchSettled) and e.step == 0}
    assert [index for index, outcome in sorted(outcomes.items()) if outcome == "dropped"] == [2, 3]
    assert trainer.trained[0] == (0, (0, 1, 4, 5, 6, 7))


def test_a_micro_batch_of_two_groups_loses_both() -> None:
    events, trainer = play({(1, 0)}, micro_batch_size=4, schedule={"mode": "microbatch"})
    assert [event.uid for event in events if isinstance(event, GroupDropped)] == ["s1p0", "s1p1"]
    assert trainer.trained == [(0, (0, 1)), (1, (1,))]


@pytest.mark.parametrize(
    ("fails", "share"), [({(0, 1)}, 0), ({(0, 1), (0, 2)}, 0.25), ({(0, 0), (0, 1), (0, 2), (0, 3)}, 1)]
)
def test_too_many_end_the_run(fails: set[tuple[int, int]], share: float) -> None:
    with pytest.raises(StepFailed) as failure:
        play(fails, share=share)
    message = str(failure.value)
    assert "the endpoint is down" in message  # whatever else is said
    if share == 0.25:
        assert "2 of the 4 groups of step 0 have no reward, more than schedule.max_dropped_groups=0.25" in message
    if share == 1:
        assert "no group of step 0 has a reward" in message
    assert isinstance(failure.value.__cause__, RewardError)


def test_statistics_of_the_step_leave_lost_groups_out() -> None:
    plan = Plan(["a", "b", "c"], num_steps=1, prompts_per_step=3, samples_per_prompt=2, shuffle=False)
    step = plan.step(0)
    for kind in ("global_std", "max_group_std", "global"):
        whole = GroupAssembler(step, AdvantageSection(kind=kind))
        whole.add(0, (0.0, 1.0))
        assert whole.add(2, (0.2, 0.6)).ready == ()  # the step's statistics are not known yet
        arrival = whole.drop(1)
        assert arrival.dropped == ("s0p1",)
        values = {ready.index: ready.advantages for ready in arrival.ready}
        without = GroupAssembler((step[0], step[2]), AdvantageSection(kind=kind))
        without.add(0, (0.0, 1.0))
        expected = {ready.index: ready.advantages for ready in without.add(2, (0.2, 0.6)).ready}
        assert values == expected | {1: (None, None)}


def test_a_deferred_divisor_streams_and_scales_the_gradient() -> None:
    """The same products of advantage and scale as with a barrier, but updates begin with the first group."""
    section = AdvantageSection(kind="global_std")
    barrier_events, barrier = play(set(), advantage=section)
    events, deferred = play(set(), advantage=section, defer_divisor=True)
    assert barrier.scales == [None, None]
    for step, scale in enumerate(deferred.scales):
        assert scale is not None
        for index in range(4):
            products = [value * scale for value in deferred.advantages[step, index] if value is not None]
            assert products == pytest.approx(barrier.advantages[step, index], rel=1e-12)

    def first_update(events: list[AnyEvent]) -> float:
        return next(event.time for event in events if getattr(event, "kind", "") == "update")

    assert first_update(events) < first_update(barrier_events)


def test_heads_are_normalised_each_and_then_weighed() -> None:
    plan = Plan(["a"], num_steps=1, prompts_per_step=1, samples_per_prompt=4, shuffle=False)
    section = AdvantageSection(heads="advantage", epsilon=0)
    assembler = GroupAssembler(plan.step(0), section, weights={"ocr": 2.0, "clip": 1.0})
    heads = {"ocr": (0.0, 0.0, 1.0, 1.0), "clip": (10.0, 30.0, 10.0, 30.0)}
    (ready,) = assembler.add(0, (0.0, 0.0, 0.0, 0.0), heads).ready
    assert ready.advantages == (-3.0, -1.0, 1.0, 3.0)
    again = GroupAssembler(plan.step(0), section, weights={"ocr": 2.0, "clip": 1.0})
    with pytest.raises(RewardError, match="head 'clip' has a weight but gave no values"):
        again.add(0, (0.0, 0.0, 0.0, 0.0), {"ocr": heads["ocr"]})
    assert again.add(0, (0.0, 0.0, 0.0, 0.0), heads).ready  # the refused call changed nothing


def test_goldens_of_the_other_variants() -> None:
    """formulas.md 4.7, rewards (.1,.4,.4,.9), (1,1,1,1), (.2,.3,.5,.6)."""
    groups = [(0.1, 0.4, 0.4, 0.9), (1.0, 1.0, 1.0, 1.0), (0.2, 0.3, 0.5, 0.6)]
    plan = Plan(["a", "b", "c"], num_steps=1, prompts_per_step=3, samples_per_prompt=4, shuffle=False)

    def advantages(**section: Any) -> list[tuple[float | None, ...]]:
        assembler = GroupAssembler(plan.step(0), AdvantageSection(**section))
        ready = [one for index, rewards in enumerate(groups) for one in assembler.add(index, rewards).ready]
        return [one.advantages for one in sorted(ready, key=lambda one: one.index)]

    assert advantages(kind="no_std")[0] == pytest.approx((-0.35, -0.05, -0.05, 0.45))
    assert advantages(kind="no_std")[1:] == [(0, 0, 0, 0), pytest.approx((-0.2, -0.1, 0.1, 0.2))]
    # The largest group deviation is that of the first.
    deviation = (sum((value - 0.45) ** 2 for value in groups[0]) / 4) ** 0.5
    largest = advantages(kind="max_group_std", epsilon=0)
    assert largest[2] == pytest.approx([(value - 0.4) / deviation for value in groups[2]])
    assert largest[1] == (0, 0, 0, 0)
    every = [value for group in groups for value in group]
    mean = sum(every) / 12
    deviation = (sum((value - mean) ** 2 for value in every) / 12) ** 0.5
    assert advantages(kind="global", epsilon=0)[1] == pytest.approx([(1 - mean) / deviation] * 4)
    assert advantages(kind="best_worst") == [(-1, None, None, 1), (None,) * 4, (-1, None, None, 1)]
    sample = advantages(kind="per_prompt", ddof=1, epsilon=1e-4)  # VO group
    assert sample[0] == pytest.approx((-1.054972, -0.150710, -0.150710, 1.356392), abs=1e-6)
