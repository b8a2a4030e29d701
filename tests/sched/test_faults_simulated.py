"""Random fault schedules in virtual time, and what single faults do. The long form is experiments/faults.py."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from digen import DigenError, Plan, ScheduleConfig, Scheduler, StepFailed, WorkerDied, WorkerTimeout
from digen.events import (
    AnyEvent,
    GroupDropped,
    MicroBatchSettled,
    Quarantined,
    RolledBack,
    StepCommitted,
    TaskFailed,
    TaskRetried,
    TaskStarted,
    WorkerLost,
    WorkerRestarted,
)
from digen.files import sync_folder, write_synced
from digen.observe.fold import Fold
from digen.restarts import RestartsSection
from digen.sched import InvariantChecker, check
from digen.sched.profile import Profile
from digen.sched.recovery import Budget
from digen.sched.state import Task, Worker
from digen.workers.clock import run_virtual
from digen.workers.faulty import Fault, FaultPlan, FaultyWorker
from experiments import recovery
from experiments.faults import PAIRS, coverage_table, failure_of, run_seeds, shrink
from experiments.simdisk import SimDisk, at_once, checkpoints_on, mounted

ROOT = Path(__file__).parent.parent.parent
NUM_SEEDS = 150
TIMES: dict[str, Any] = {"generate": 4, "score": 1, "load": 1, "update": 2, "commit": 1, "publish": 1, "start": 3}


@pytest.mark.parametrize("chunk", range(5))
def test_nothing_is_lost_and_nothing_doubled(chunk: int) -> None:
    tally = run_seeds(range(chunk, NUM_SEEDS, 5))
    commands = [f"python experiments/faults.py --replay {seed}" for seed in tally.failures]
    assert not tally.failures, f"{commands[0]}: {next(iter(tally.failures.values()))}"
    assert tally.counts["WorkerRestarted"] > 10
    assert tally.outcomes["completed"] > NUM_SEEDS / 5 / 4
    assert "generate" in coverage_table(tally.coverage)
    assert {(state, kind) for kind, state in tally.coverage} <= set(PAIRS)


def test_event_logs_do_not_depend_on_the_hash_seed() -> None:
    command = [sys.executable, "experiments/faults.py", "--hash", "--seeds", "30", "--processes", "1"]
    digests = set()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        digests.add(subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True).stdout)
    assert len(digests) == 1


def test_a_failure_shrinks_to_the_faults_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a defect: lost generations are not repeated."""
    monkeypatch.setattr("digen.sched.recovery.Recovery.undo", lambda *_: None)
    seed = next(seed for seed in range(100) if failure_of(seed)[0] and len(failure_of(seed)[1].faults) > 1)
    faults, failure = shrink(seed)
    assert failure
    assert 1 <= len(faults) < len(failure_of(seed)[1].faults)
    assert failure_of(seed, frozenset(fault.where for fault in faults))[0] == failure


# ---- the disk ----------------------------------------------------------------------------------------------------


def test_the_disk_forgets_what_was_not_synced() -> None:
    """A file that was written through, one that was not, and names that were synced, or not."""
    found: list[dict[str, bytes]] = []
    for seed in range(50):
        disk, images = SimDisk(), list[SimDisk]()
        disk.make("folder")
        disk.lose_power(9, random.Random(seed), images.append)  # noqa: S311 - not for secrets
        with mounted():
            write_synced(disk.path("folder", "safe"), b"safe")
            with disk.path("folder", "unsafe").open("wb") as file:
                file.write(b"unsafe")
            sync_folder(disk.path("folder"))
            write_synced(disk.path("folder", "late"), b"late")
            disk.path("folder", "safe").rename(disk.path("folder", "renamed"))
            disk.path("folder", "end").mkdir()
            disk.path("folder", "more").mkdir()
        (image,) = images
        found.append({path.name: path.file().content for path in image.path("folder").glob("[!e]*")})
    assert {frozenset(each) for each in found} == {
        frozenset({"safe", "unsafe"}),
        frozenset({"safe", "unsafe", "late"}),
        frozenset({"renamed", "unsafe", "late"}),
    }
    assert {each["safe"] for each in found if "safe" in each} == {b"safe"}
    assert {each["late"] for each in found if "late" in each} == {b"late"}
    assert {each["unsafe"] for each in found} == {b"", b"uns", bytes(6), b"unsafe"}


def test_nothing_is_lost_that_was_said_to_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a defect: a checkpoint's new name is not synced."""
    monkeypatch.setattr("digen.checkpoint.sync_folder", lambda folder: None)
    failures = (failure_of(seed)[0] for seed in range(300))
    assert any("the checkpoint of version" in failure and "is lost" in failure for failure in failures)


# ---- how much time faults take -----------------------------------------------------------------------------------


def test_faults_take_little_time_and_change_nothing() -> None:
    assert min(recovery.useful_shares(0)) > 0.7
    faulty, undisturbed = recovery.many_days(0.25, 600), recovery.many_days(0.25, None)
    assert faulty.num_lost > 10
    assert faulty.weights == undisturbed.weights
    assert faulty.seconds > undisturbed.seconds


# ---- single faults ---------------------------------------------------------------------------------------------


class Scripted(FaultPlan):
    """Faults at named places."""

    def __init__(self, **kinds: str) -> None:
        super().__init__(0)
        self._script = {where.replace("__", "#").replace("_", "."): kind for where, kind in kinds.items()}

    def draw(self, where: str, method: str, step: int, index: int) -> Fault | None:
        kind = self._script.get(where)
        return self._happens(Fault(where, method, kind)) if kind else None


class Run:
    """A run with two generators, four micro-batches a step."""

    def __init__(
        self,
        faults: FaultPlan,
        *,
        num_steps: int = 3,
        num_generators: int = 2,
        num_scorers: int = 0,
        every: int | None = None,
        times: dict[str, Any] = TIMES,
        rules: dict[str, Any] | None = None,
        late_s: float = 1e4,
        body: Callable[[Scheduler], None] | None = None,
        dropped: frozenset[tuple[int, int]] = frozenset(),
        quarantined: Sequence[Quarantined] = (),
        plan: Plan | None = None,
        **config: Any,
    ) -> None:
        disk = SimDisk()
        self.events: list[AnyEvent] = []
        self.fold = Fold()
        self.error: DigenError | None = None
        plan = plan or Plan(["a", "b"], num_steps=num_steps, prompts_per_step=4, samples_per_prompt=1)
        workers = [
            FaultyWorker(name, faults, times, disk=disk, late_s=late_s)
            for name in ("trainer", *(f"gen{number}" for number in range(num_generators)))
        ]
        scorers = [
            FaultyWorker(f"scorer{number}", faults, times, disk=disk, late_s=late_s) for number in range(num_scorers)
        ]
        self.trainer = workers[0]

        async def main() -> None:
            at_once(asyncio.get_running_loop())
            scheduler = Scheduler(
                plan,
                trainer=workers[0],
                generators=workers[1:],
                scorers=scorers,
                config=ScheduleConfig(**config),
                restarts=RestartsSection(**{"deadline_floor_s": 50, **(rules or {})}),
                sinks=[self.events.append, InvariantChecker(), self.fold.apply],
                checkpointer=checkpoints_on(disk, every=every) if every else None,
                quarantined=quarantined,
            )
            try:
                async with scheduler:
                    if body is not None:
                        body(scheduler)
                    self.reports = [report async for report in scheduler]
            except DigenError as error:
                self.error = error
            self.end_s = asyncio.get_running_loop().time()

        with mounted():
            run_virtual(main())
        check(self.events)
        if self.error is None:
            wanted = {(step, index): 1 for step in range(num_steps) for index in range(plan.num_micro_batches)}
            assert self.trainer.weights.counts == {key: 1 for key in wanted if key not in dropped}

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def metric(self, name: str) -> float:
        return sum(report.metrics().get(name, 0) for report in self.reports)


UNDISTURBED = Run(Scripted())
FIRST = frozenset({(0, 2)})


@pytest.mark.parametrize("kind", ["death", "silent_death", "garbage"])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_a_generator_that_is_lost_costs_time_only(kind: str, call: int) -> None:
    run = Run(Scripted(**{f"gen0__1_{call}": kind}))
    (lost,) = run.of(WorkerLost)
    (back,) = run.of(WorkerRestarted)
    assert (lost.worker, lost.restart_in_s, back.worker, back.down_s) == ("gen0", 0, "gen0", 3)
    assert lost.reason == ("protocol" if kind == "garbage" else "died")
    assert run.trainer.weights == UNDISTURBED.trainer.weights
    assert run.metric("worker/deaths") == run.metric("worker/restarts") == 1
    again = next(event for event in run.of(TaskStarted) if event.time >= back.time and event.worker == "gen0")
    assert again.kind == "load" or again.version == back.version
    assert run.fold.counts["num_workers_lost"] == run.fold.counts["num_restarts"] == 1


@pytest.mark.parametrize("call", range(1, 17))
def test_a_trainer_that_dies_mid_step_replays_its_updates(call: int) -> None:
    run = Run(Scripted(**{f"trainer__1_{call}": "death"}), every=1)
    undisturbed = Run(Scripted(), every=1)
    assert run.trainer.weights == undisturbed.trainer.weights
    generated = [event for event in run.of(TaskStarted) if event.kind == "generate"]
    if not run.of(RolledBack):
        assert len(generated) == 12, "no generation is repeated"
    committed = [event.step for event in run.of(StepCommitted)]
    assert list(dict.fromkeys(committed)) == [0, 1, 2]
    assert len(committed) == 3 + len(run.of(RolledBack))
    assert run.fold.counts["num_updated"] == 12 or run.of(RolledBack)
    assert [summary.step for summary in run.fold.steps.values()] == [0, 1, 2]


def test_without_a_checkpoint_the_run_goes_back_to_the_last_one() -> None:
    run = Run(Scripted(trainer__1_23="death"), num_steps=5, every=2, rules={"snapshot_every": 0})
    (back,) = run.of(RolledBack)
    assert (back.version, back.from_version) == (2, 3)
    assert run.trainer.weights == Run(Scripted(), num_steps=5, every=2).trainer.weights
    assert [event.step for event in run.of(StepCommitted)] == [0, 1, 2, 2, 3, 4]
    assert run.metric("faults/rollbacks") == 1


def test_hung_workers_are_killed_at_their_deadline() -> None:
    run = Run(Scripted(gen0__1_3="hang"), rules={"deadline_floor_s": 50, "deadline_factor": 20})
    (lost,) = run.of(WorkerLost)
    (failed,) = run.of(TaskFailed)
    assert (lost.reason, failed.time - failed.started) == ("hung", 20 * 4)
    assert "has not answered generate for 80 s" in lost.error
    assert run.trainer.weights == UNDISTURBED.trainer.weights
    assert (run.metric("worker/hangs"), run.metric("worker/lost_work_s")) == (1, 80)


def test_late_answers_are_fenced() -> None:
    run = Run(Scripted(gen0__1_1="late"), late_s=52, rules={"first_deadline_s": 50})
    assert run.metric("faults/replies_fenced") == 1
    assert run.trainer.weights == UNDISTURBED.trainer.weights


def test_nobody_is_judged_by_the_time_that_the_driver_stood_still() -> None:
    def stand_still(_: Scheduler) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.call_later(2, lambda: setattr(loop, "_now", loop.time() + 10_000))

    run = Run(Scripted(), body=stand_still)
    assert run.end_s > 10_000
    assert run.of(WorkerLost) == []


def test_the_run_goes_on_with_fewer_generators_and_ends_with_none() -> None:
    deaths = {f"gen0__{life}_1": "death" for life in range(1, 9)}
    run = Run(Scripted(**deaths), rules={"max_attempts": 9})
    assert [event.restart_in_s for event in run.of(WorkerLost)] == [0, 1, 2, None]
    assert run.error is None
    run = Run(Scripted(**deaths), num_generators=1, rules={"max_attempts": 9})
    assert isinstance(run.error, StepFailed)
    assert isinstance(run.error.__cause__, WorkerDied)
    assert "gen0" in str(run.error)


def test_the_run_waits_while_there_is_no_generator_and_goes_on_when_they_are_back() -> None:
    run = Run(Scripted(gen0__1_2="death", gen1__1_2="death"))
    lost, back = [event.time for event in run.of(WorkerLost)], [event.time for event in run.of(WorkerRestarted)]
    assert max(lost) < min(back), "for a while there is none"
    begun = [event for event in run.of(TaskStarted) if max(lost) < event.time < min(back)]
    assert {event.kind for event in begun} <= {"update"}
    assert run.trainer.weights == UNDISTURBED.trainer.weights


def test_without_a_budget_the_first_loss_ends_the_run() -> None:
    for kind, error in (("death", WorkerDied), ("hang", WorkerTimeout)):
        run = Run(Scripted(gen0__1_1=kind), rules={"budget": 0, "first_deadline_s": 50})
        assert isinstance(run.error, StepFailed)
        assert isinstance(run.error.__cause__, error)
        assert run.of(WorkerLost) == []


@pytest.mark.parametrize("method", ["generate", "score"])
def test_poison_is_quarantined_and_costs_its_group_only(method: str) -> None:
    poison = FaultPlan(0, poison=frozenset({(method, 1, 2)}))
    run = Run(poison, max_dropped_groups=0.5, dropped=frozenset({(1, 2)}))
    (quarantined,) = run.of(Quarantined)
    assert (quarantined.step, quarantined.index, quarantined.attempts) == (1, 2, 3)
    assert quarantined.micro_batch.index == 2
    assert any("TaskFailed" in line for line in quarantined.story)
    assert [(event.step, event.uid) for event in run.of(GroupDropped)] == [(1, "s1p2")]
    assert [event.index for event in run.of(MicroBatchSettled) if event.outcome == "dropped"] == [2]
    assert len(run.of(WorkerLost)) == 3, "no more workers than that are lost to it"


@pytest.mark.parametrize("method", ["generate", "score", "update"])
@pytest.mark.parametrize("rolls_back", [False, True])
def test_a_resumed_run_leaves_poison_out_at_the_price_of_no_worker(method: str, rolls_back: bool) -> None:
    poison = FaultPlan(0, poison=frozenset({(method, 1, 2)}))
    rules = {"budget": 9}
    first = Run(poison, max_dropped_groups=0.5, dropped=frozenset({(1, 2)}), rules=rules)
    assert (first.error is None) == (method != "update"), "whoever updates on it dies; only a resumed run can go on"
    found = first.of(Quarantined)
    faults = Scripted(trainer__1_9="death") if rolls_back else poison
    again = Run(
        faults,
        max_dropped_groups=0.5,
        dropped=frozenset({(1, 2)}),
        quarantined=found * 2,  # a file may say so twice
        rules={"snapshot_every": 0},  # so that a trainer that is lost holds the base weights
    )
    assert [event.worker for event in again.of(WorkerLost)] == (["trainer"] if rolls_back else [])
    assert bool(again.of(RolledBack)) == rolls_back
    assert {(event.step, event.uid) for event in again.of(GroupDropped)} == {(1, "s1p2")}
    assert "in quarantine since an earlier run: " in again.of(GroupDropped)[0].error
    assert not any(event.kind == "generate" and (event.step, event.index) == (1, 2) for event in again.of(TaskStarted))
    assert again.fold.counts["num_quarantined"] == 1
    if first.error is None:
        assert again.trainer.weights == first.trainer.weights


@pytest.mark.parametrize("method", ["generate", "score"])
def test_a_poisoned_prompt_that_is_cut_costs_little_more_than_one_that_is_not(method: str) -> None:
    """Its group is four micro-batches, each of which kills. Three workers are lost to the first, whoever is at another
    one then is lost too, and what has not begun is left alone."""
    plan = Plan(["a", "b"], num_steps=3, prompts_per_step=2, samples_per_prompt=4, micro_batch_size=1)
    cut = frozenset((1, index) for index in range(4))
    poison = FaultPlan(0, poison=frozenset((method, *where) for where in cut))
    alone = Run(poison, plan=plan, max_dropped_groups=0.5, dropped=cut, num_generators=1)
    assert (alone.error, len(alone.of(WorkerLost))) == (None, 3)
    run = Run(poison, plan=plan, max_dropped_groups=0.5, dropped=cut)
    assert run.error is None
    assert 3 <= len(run.of(WorkerLost)) <= 6
    if method == "score":  # what is generated is tried once, since nothing would be trained on it
        slow = Run(poison, plan=plan, max_dropped_groups=0.5, dropped=cut, num_scorers=1, times={**TIMES, "score": 9})
        assert (slow.error, len(slow.of(WorkerLost))) == (None, 3 + 3)
    assert [event.uid for event in run.of(GroupDropped)] == ["s1p0"]
    assert {event.index for event in run.of(MicroBatchSettled) if event.outcome == "dropped"} == {0, 1, 2, 3}
    found = run.of(Quarantined)
    again = Run(poison, plan=plan, max_dropped_groups=0.5, dropped=cut, quarantined=found[:1])
    assert again.of(WorkerLost) == []
    assert {event.index for event in again.of(Quarantined)} == {0, 1, 2, 3}
    assert again.trainer.weights == run.trainer.weights


def test_a_prompt_that_was_given_up_gets_one_attempt_in_later_steps() -> None:
    plan = Plan(["a", "b"], num_steps=3, prompts_per_step=4, samples_per_prompt=1)
    first, second = (
        next((step, m.index) for m in plan.step(step) if m.slices[0].prompt.text == "a") for step in range(2)
    )
    poison = FaultPlan(0, poison=frozenset({("generate", *first), ("generate", *second)}))
    dropped = frozenset({first, second})
    run = Run(poison, max_dropped_groups=0.5, dropped=dropped)
    assert [(event.step, event.attempts) for event in run.of(Quarantined)] == [(0, 3), (1, 1)]
    assert len(run.of(WorkerLost)) == 4
    again = Run(poison, max_dropped_groups=0.5, dropped=dropped, quarantined=run.of(Quarantined)[:1])
    assert len(again.of(WorkerLost)) == 1, "a resumed run knows the prompt too"


def test_quarantine_is_heeded_only_where_it_can_be() -> None:
    found = Run(FaultPlan(0, poison=frozenset({("generate", 1, 2)}))).of(Quarantined)
    assert Run(Scripted(), quarantined=found).of(Quarantined) == [], "nothing may be dropped: it is tried again"
    (event,) = found
    other = Run(Scripted(), quarantined=[msgspec.structs.replace(event, step=2)], max_dropped_groups=0.5)
    assert "step 2 micro-batch 2 is in quarantine, but of another plan" in str(other.error)
    assert other.of(TaskStarted) == []
    few = Run(Scripted(), quarantined=found, max_dropped_groups=0.1)
    assert "1 of the 4 groups of step 1 have no reward, more than schedule.max_dropped_groups=0.1" in str(few.error)
    assert few.trainer.weights.version == 1, "what comes before is trained"


def test_a_drain_before_anything_is_generated_trains_nothing() -> None:
    (event,) = Run(FaultPlan(0, poison=frozenset({("generate", 0, 2)})), max_dropped_groups=0.5, dropped=FIRST).of(
        Quarantined
    )

    def drain_then(scheduler: Scheduler) -> None:
        leave_out = scheduler._recovery.leave_out_quarantined

        def leave_out_and_drain() -> None:
            leave_out()
            scheduler.drain()

        scheduler._recovery.leave_out_quarantined = leave_out_and_drain  # type: ignore[method-assign]

    plan = Plan(["a", "b"], num_steps=3, prompts_per_step=4, samples_per_prompt=1)
    run = Run(Scripted(), quarantined=[event], max_dropped_groups=0.5, num_steps=0, plan=plan, body=drain_then)
    assert run.of(TaskStarted) == []


@pytest.mark.parametrize("method", ["generate", "score", "update"])
def test_poison_ends_the_run_where_nothing_may_be_dropped(method: str) -> None:
    run = Run(FaultPlan(0, poison=frozenset({(method, 1, 2)})), rules={"budget": 9}, every=1)
    assert isinstance(run.error, StepFailed)
    assert isinstance(run.error.__cause__, WorkerDied)
    (quarantined,) = run.of(Quarantined)
    assert (quarantined.kind, quarantined.attempts) == (method, 3)
    assert [event.attempt for event in run.of(TaskRetried)] == [2, 3]
    note = run.error.__notes__[-1]
    assert re.match(rf"step 1 micro-batch 2 \(prompt '[ab]'\) is given up after 3 attempts to {method}; with", note)


def test_code_that_raises_is_tried_again_without_a_restart() -> None:
    run = Run(Scripted(gen0__1_1="raise", gen1__1_2="raise"))
    assert run.of(WorkerLost) == []
    assert len(run.of(TaskRetried)) == 2
    assert run.trainer.weights == UNDISTURBED.trainer.weights


# ---- the policy ------------------------------------------------------------------------------------------------


def test_the_budget_counts_restarts_in_a_window() -> None:
    budget = Budget(RestartsSection(budget=3, window_s=100, backoff_s=2, max_backoff_s=3, max_attempts=9))
    assert [budget.wait_s("a", now) for now in (0, 1, 2, 3)] == [0, 2, 3, None]
    assert budget.wait_s("b", 3) == 0
    assert budget.wait_s("a", 100) == 3
    budget.forgive("a")
    assert budget.wait_s("a", 100) == 3
    assert budget.wait_s("a", 1000) == 0


def test_a_worker_that_never_finishes_anything_does_not_come_back_for_ever() -> None:
    budget = Budget(RestartsSection(budget=3, window_s=10, max_attempts=2))
    assert [budget.wait_s("a", now) for now in (0, 100, 200)] == [0, 0, None]
    budget.useful("a")
    assert budget.wait_s("a", 300) == 0


def test_deadlines_are_learnt() -> None:
    budget, profile = Budget(RestartsSection(deadline_factor=10, deadline_floor_s=30, first_deadline_s=99)), Profile()
    worker = Worker("gen0", "generator", 0, 0, 0.0)
    task = Task("generate", worker, 0, 0, 0, ())
    assert budget.deadline_s(profile, task) == 99
    profile.add("gen1", "generator", "generate", 7)
    assert budget.deadline_s(profile, task) == 70
    profile.add("gen0", "generator", "generate", 1)
    assert budget.deadline_s(profile, task) == 30
