"""A machine that is lost takes payloads with it: what they held is made again, whoever was to read it is well."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from digen import PayloadLost, Plan, ScheduleConfig, Scheduler, StepFailed
from digen.config import AdvantageSection
from digen.errors import InvariantViolation
from digen.events import (
    GroupCompleted,
    GroupDropped,
    MicroBatchSettled,
    Quarantined,
    RolloutLost,
    TaskFailed,
    TaskFinished,
    TaskStarted,
    WorkerLeft,
    WorkerLost,
    WorkerRestarted,
)
from digen.groups import GroupAssembler
from digen.restarts import RestartsSection
from digen.sched import InvariantChecker
from digen.sched.checks import rules_from
from digen.sched.state import State, Step, Task, Worker
from digen.sched.tag import policy_from
from digen.types import Payload, Rollout, UpdateReport
from digen.workers.clock import run_virtual
from digen.workers.faulty import Fault, FaultPlan, FaultyWorker
from experiments import faults
from tests.sched.test_faults_simulated import TIMES, UNDISTURBED, Run, Scripted

QUICK: dict[str, Any] = {**TIMES, "update": 0.5}
"""The trainer is done with every micro-batch before the next: whatever is lost, others are in its gradient."""


@pytest.mark.parametrize("times", [TIMES, QUICK], ids=["rollouts wait", "rollouts are trained on"])
@pytest.mark.parametrize("call", range(1, 9))
def test_a_node_takes_rollouts_and_they_are_drawn_again(call: int, times: dict[str, Any]) -> None:
    run = Run(Scripted(**{f"gen0__1_{call}": "node_death"}), times=times)
    assert run.error is None
    assert [event.worker for event in run.of(WorkerLost)] == ["gen0"], "who was to read them is well"
    assert run.trainer.weights == UNDISTURBED.trainer.weights
    lost = run.of(RolloutLost)
    assert {event.worker for event in lost} <= {"gen0"}
    assert run.metric("faults/rollouts_lost") == run.fold.counts["num_rollouts_lost"] == len(lost)
    assert run.metric("faults/fresh_samples") == 0
    done = [(event.step, event.index) for event in run.of(TaskFinished) if event.kind == "generate"]
    again = {(step, index) for step, index in done if done.count((step, index)) > 1}
    assert again == {(event.step, event.index) for event in lost}, "nothing else is generated twice"


def test_those_that_are_in_the_gradient_stay_there() -> None:
    times = {**TIMES, "generate": lambda _, index: 6 if index == 3 else 4, "score": 0, "update": 5}
    run = Run(Scripted(gen0__1_5="node_death"), times=times, num_steps=1)
    (lost,) = run.of(RolloutLost)
    updates = [event for event in run.of(TaskStarted) if event.kind == "update"]
    assert lost.index == 2
    assert [event.index for event in updates] == [0, 1, 2, 3], "no update comes twice"
    assert updates[0].time < lost.time < updates[2].time


def test_all_that_is_lost_is_found_with_the_first() -> None:
    def lose(scheduler: Scheduler) -> None:
        asyncio.get_running_loop().call_later(30, lose_all, scheduler)

    def lose_all(scheduler: Scheduler) -> None:
        (generator,) = scheduler._generators
        for payload in generator._made:  # type: ignore[attr-defined]
            payload.gone = True

    slow = {**TIMES, "update": 40}
    run = Run(Scripted(), num_steps=1, num_generators=1, times=slow, body=lose)
    assert [event.index for event in run.of(RolloutLost)] == [3, 2, 1]
    assert [(event.kind, event.index) for event in run.of(TaskFailed)] == [("update", 1)]
    assert run.of(WorkerLost) == []
    assert [event.index for event in run.of(TaskStarted) if event.kind == "generate"] == [0, 1, 2, 3, 1, 2, 3]
    assert run.trainer.weights == Run(Scripted(), num_steps=1).trainer.weights


def test_a_lost_trainer_finds_rollouts_lost_that_it_had_trained_on() -> None:
    """Its gradient had them; without it they are needed again."""
    kinds = {"gen0__1_5": "node_death", "trainer__1_4": "death"}
    times = {**TIMES, "update": 1, "generate": lambda _, index: 20 if index == 3 else 3}
    run = Run(Scripted(**kinds), times=times, num_steps=2, every=1)
    assert [event.worker for event in run.of(WorkerLost)] == ["gen0", "trainer"]
    assert [event.index for event in run.of(RolloutLost)] == [2, 0]
    assert run.of(RolloutLost)[0].time >= run.of(WorkerRestarted)[1].time
    assert run.trainer.weights == Run(Scripted(), num_steps=2, every=1).trainer.weights


@pytest.mark.parametrize("sync", ["pull", "hold"])
@pytest.mark.parametrize("call", range(5, 9))
def test_lost_weights_are_published_again(call: int, sync: str) -> None:
    times = {**TIMES, "load": lambda version, _: 3 * version}
    run = Run(Scripted(**{f"trainer__1_{call}": "node_death"}), times=times, every=1, sync=sync, num_generators=3)
    assert run.error is None
    assert [event.worker for event in run.of(WorkerLost)] == ["trainer"]
    assert run.trainer.weights == Run(Scripted(), every=1).trainer.weights


class Thief(FaultyWorker):
    """Its first loads and updates find nothing."""

    stolen: dict[str, int]

    async def load(self, publication: Any, /) -> Any:
        if self.stolen.get("load", 0) > 0:
            self.stolen["load"] -= 1
            raise PayloadLost("gone", worker="trainer", task="load")
        return await super().load(publication)

    async def update(self, rollout: Rollout, advantages: Any, /) -> UpdateReport:
        if self.stolen.get("update", 0) > 0 and rollout.micro_batch.index == 1:
            self.stolen["update"] -= 1
            raise PayloadLost("gone", worker="gen0", task="update")
        return await super().update(rollout, advantages)


def _steal(num_generators: int, rules: dict[str, Any], **stolen: int) -> tuple[Any, list[Any]]:
    plan = Plan(["a", "b"], num_steps=2, prompts_per_step=4, samples_per_prompt=1)
    workers = [Thief(name, FaultPlan(0), TIMES) for name in ("trainer", *(f"gen{n}" for n in range(num_generators)))]
    for worker in workers:
        worker.stolen = dict(stolen)
    events: list[Any] = []

    async def main() -> Any:
        async with Scheduler(
            plan,
            trainer=workers[0],
            generators=workers[1:],
            config=ScheduleConfig(),
            restarts=RestartsSection(**rules),
            sinks=[events.append, InvariantChecker()],
        ) as scheduler:
            async for _ in scheduler:
                pass
        return workers[0].weights

    return run_virtual(main()), events


def test_many_generators_that_cannot_load_are_one_failure() -> None:
    weights, events = _steal(15, {}, load=1)
    assert set(weights.counts.values()) == {1}
    published = [event.version for event in events if isinstance(event, TaskStarted) and event.kind == "publish"]
    assert published == [1, 1, 2]
    assert len([event for event in events if isinstance(event, TaskFailed)]) == 15
    assert not [event for event in events if isinstance(event, WorkerLost)]


@pytest.mark.parametrize("kind", ["update", "load"])
def test_it_does_not_go_on_for_ever(kind: str) -> None:
    assert _steal(1, {}, **{kind: 10})[0].version == 2
    _fails({}, **{kind: 11})
    _fails({"budget": 0}, **{kind: 1})


def _fails(rules: dict[str, Any], **stolen: int) -> None:
    with pytest.raises(StepFailed) as failed:
        _steal(1, rules, **stolen)
    assert isinstance(failed.value.__cause__, PayloadLost)


def test_a_stale_one_whose_version_is_gone_is_drawn_afresh() -> None:
    times = {**TIMES, "generate": 1, "score": 0, "update": 4, "load": 0}
    stale: dict[str, Any] = {"mode": "tcss", "stale_fraction": Decimal(1), "tag": "never", "update_order": "index"}
    found = [Run(Scripted(**{f"gen0__1_{call}": "node_death"}), times=times, **stale) for call in range(6, 16)]
    assert all(run.error is None for run in found)
    fresh = [run for run in found if run.metric("faults/fresh_samples")]
    assert fresh
    for run in fresh:
        assert any(event.version < event.step for event in run.of(RolloutLost))


@pytest.mark.parametrize("chunk", range(4))
def test_random_nodes_are_lost(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(faults.MIXES, "nodes", ("node_death", "death", "hang"))
    num_lost = num_regrouped = 0
    for seed in range(chunk, 160, 4):
        case = replace(faults.case_of(seed), mix="nodes", rate=0.1, limit=1000, focuses=())
        ending = faults.run_case(case)
        faults.judge(case, ending)
        num_lost += sum(isinstance(event, RolloutLost) for event in ending.events)
        groups = [(event.step, event.uid) for event in ending.events if isinstance(event, GroupCompleted)]
        num_regrouped += len(groups) - len(set(groups))
    assert num_lost > 10
    assert num_regrouped


# ---- what the state makes of it --------------------------------------------------------------------------------


def _state(number: int = 0) -> tuple[State, Step, Worker]:
    """A step of one group, a sample a micro-batch, all of them scored."""
    plan = Plan(["a"], num_steps=2, prompts_per_step=1, samples_per_prompt=4, micro_batch_size=1)
    scheduler = ScheduleConfig(window=2, stale_fraction=Decimal(1))
    rules = rules_from(scheduler, plan, policy_from("never"), FaultyWorker("trainer", FaultPlan(0)), [])
    state = State(plan, lambda batches: GroupAssembler(batches, AdvantageSection()), rules, start_step=0)
    worker, step = Worker("gen0", "generator", 0, 0, 0.0), state.ledger(number)
    for index in range(4):
        _score(state, step, worker, float(index))
        assert not step.ready or index == 3
    return state, step, worker


def _score(state: State, step: Step, worker: Worker, reward: float) -> None:
    index, _ = state.dispatch(step, worker)
    rollout = Rollout(step.micro_batches[index], worker.version, worker.version, Payload({"x": bytes(3)}))
    state.generated(step, index, rollout, worker)
    state.pop_unscored()
    state.scored(step, index, (reward,), {})


def test_what_is_trained_on_stays_and_what_waits_leaves_until_the_group_is_complete() -> None:
    state, step, worker = _state()
    before = dict(step.ready)
    step.taken = {index: step.ready.pop(index) for index in (0, 1)}
    step.settle(0, "updated")  # and 1 is being trained on
    held = state.memory.held
    owner, rollout = state.forget(step, 2)
    assert (owner, rollout.micro_batch.index) == (worker, 2)
    assert (list(step.pending), step.ready, step.num_generated, step.num_scored) == ([2], {}, 3, 3)
    assert (state.memory.held, step.num_bytes) == (held - 3, 9)
    _score(state, step, worker, 9.0)
    assert step.ready.keys() == {2, 3}
    assert step.ready[3] != before[3], "of the new rewards"
    assert step.taken == {index: before[index] for index in (0, 1)}
    assert step.settled == {0: "updated"}


def test_a_group_that_is_given_up_takes_those_that_a_lost_trainer_brought_back() -> None:
    state, step, worker = _state()
    step.taken = {0: step.ready.pop(0)}
    step.settle(0, "updated")
    state.forget(step, 2)
    step.reopen()
    assert step.ready.keys() == {0}
    index, stale = state.dispatch(step, worker)
    state.never_generated(step, Task("generate", worker, 0, index, 0, (), stale))
    assert step.ready == {}
    assert set(step.settled.values()) == {"dropped"}


def test_a_stale_one_that_is_lost_gives_its_share_back() -> None:
    state, step, _ = _state(number=1)
    assert step.num_stale == 4
    state.forget(step, 3)
    assert (step.num_stale, step.lost_versions) == (3, {3: 0})


def test_unscored_ones_leave_their_queue_and_the_lowest_comes_first() -> None:
    state, _, worker = _state()
    other = state.ledger(1)
    for index in range(3):
        state.dispatch(other, worker)
        state.generated(other, index, Rollout(other.micro_batches[index], 0, 0, Payload({"x": b""})), worker)
    for index in (2, 0):
        state.forget(other, index)
    assert list(other.pending) == [0, 2, 3]
    assert [(number, index) for number, _, index in state.scoring_queue] == [(1, 1)]
    assert state.lost_rollouts() == []


# ---- groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["per_prompt", "global_std", "best_worst"])
def test_a_group_that_lost_rewards_is_open_until_they_come_again(kind: Any) -> None:
    plan = Plan(["a", "b"], num_steps=1, prompts_per_step=2, samples_per_prompt=4, micro_batch_size=2)
    rewards = {0: (1.0, 2.0), 1: (4.0, 3.0), 2: (5.0, 6.0), 3: (9.0, 7.0)}

    def collect(groups: GroupAssembler, *indices: int) -> dict[int, Any]:
        return {ready.index: ready.advantages for index in indices for ready in groups.add(index, rewards[index]).ready}

    section = AdvantageSection(kind=kind)
    whole = collect(GroupAssembler(plan.step(0), section), 0, 1, 2, 3)
    groups = GroupAssembler(plan.step(0), section)
    groups.add(0, (8.0, 8.0))
    assert groups.forget(0) == (), "its group was not complete"
    assert collect(groups, 1, 2, 0, 3) == whole
    assert groups.forget(1) == ((0, 1, 2, 3) if kind == "global_std" else (0, 1))
    with pytest.raises(InvariantViolation, match="no rewards that could be forgotten"):
        groups.forget(1)
    again = collect(groups, 1)
    assert again == (whole if kind == "global_std" else {index: whole[index] for index in (0, 1)})


def test_a_generator_that_leaves_as_its_weights_are_lost() -> None:
    class Leaver(Thief):
        async def load(self, publication: Any, /) -> Any:
            if self.name == "gen0" and not leaving:
                leaving.append(self.name)
                schedulers[0].remove_worker(self.name)
                await asyncio.sleep(1)
                raise PayloadLost("gone", worker="trainer", task="load")
            return await super().load(publication)

    leaving: list[str] = []
    schedulers: list[Scheduler] = []
    events: list[Any] = []
    workers = [Leaver(name, FaultPlan(0), TIMES) for name in ("trainer", "gen0", "gen1")]
    for worker in workers:
        worker.stolen = {}

    async def main() -> None:
        plan = Plan(["a", "b"], num_steps=3, prompts_per_step=4, samples_per_prompt=1)
        async with Scheduler(
            plan, trainer=workers[0], generators=workers[1:], sinks=[events.append, InvariantChecker()]
        ) as scheduler:
            schedulers.append(scheduler)
            async for _ in scheduler:
                pass

    run_virtual(main())
    assert workers[0].weights.version == 3
    assert [event.worker for event in events if isinstance(event, WorkerLeft)] == ["gen0"]


class Frail(FaultPlan):
    """Micro-batch 1 cannot be generated a second time."""

    num_generated = 0

    def draw(self, where: str, method: str, step: int, index: int) -> Fault | None:
        if method != "generate" or index != 1:
            return None
        self.num_generated += 1
        return self._happens(Fault(where, method, "death")) if self.num_generated > 1 else None


@pytest.mark.parametrize("dies", [False, True])
def test_what_is_trained_on_stays_though_its_group_is_lost_meanwhile(dies: bool) -> None:
    """Also when the trainer dies then: the loss is the trainer's, and nobody's poison."""

    def script(scheduler: Scheduler) -> None:
        def lose() -> None:
            (rollout,) = (step.rollouts[1] for step in scheduler._state.steps.values())
            rollout.payload.gone = True  # type: ignore[attr-defined]
            scheduler._recovery.take_stock()
            scheduler._inbox.wake()

        loop = asyncio.get_running_loop()
        loop.call_later(30, lose)
        if dies:
            loop.call_later(150, lambda: asyncio.ensure_future(scheduler._trainer.kill("for the test")))  # type: ignore[attr-defined]

    run = Run(
        Frail(0),
        plan=Plan(["a", "b"], num_steps=1, prompts_per_step=2, samples_per_prompt=2, micro_batch_size=1),
        num_steps=1,
        times={**TIMES, "update": 200},
        rules={"budget": 10, "deadline_floor_s": 1e6, "first_deadline_s": 1e6},
        body=script,
        dropped=frozenset({(0, 1)}),
        max_dropped_groups=0.5,
        update_order="ready",
    )
    assert run.error is None
    assert len([event for event in run.of(WorkerLost) if event.role == "trainer"]) == dies
    assert [(event.kind, event.index) for event in run.of(Quarantined)] == [("generate", 1)]
    assert [event.uid for event in run.of(GroupDropped)] == ["s0p0"]
    settled = {event.index: event.outcome for event in run.of(MicroBatchSettled)}
    assert settled == {0: "updated", 1: "dropped", 2: "updated", 3: "updated"}
    (report,) = run.reports
    assert report.metrics()["reward/zero_std_ratio"] == 0
    assert report.metrics()["reward/dropped_groups"] == 1
