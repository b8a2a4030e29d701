"""The scheduler under faults, in virtual time: nothing lost, nothing twice, and every run ends as its faults deserve.

    python experiments/faults.py [--seeds 10000] [--first 0]      ten thousand random runs; prints times and coverage
    python experiments/faults.py --replay 123 [--only gen0#1.4,trainer#2.3]      one of them, told event by event
    python experiments/faults.py --shrink 123                     leaves out the faults that a failure does not need
    python experiments/faults.py --hash --seeds 1000              a digest of all event logs

Every seed draws a plan, a mode, workers with their durations, a restart policy and a mix of faults; the workers are
:class:`digen.workers.faulty.FaultyWorker`. The trainer's weights are a ledger: after a run that completed, every
micro-batch of every step was trained once, or not at all if it settled so. On-policy in index order the weights are
those of the run without faults. The invariants are checked after every event.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec
from structlog.testing import capture_logs

from digen import Plan, ScheduleConfig, Scheduler
from digen.config import AdvantageSection
from digen.errors import (
    CheckpointError,
    NumericsError,
    ProtocolError,
    RewardError,
    StepFailed,
    WorkerDied,
    WorkerRaised,
    WorkerTimeout,
)
from digen.events import (
    AnyEvent,
    CheckpointSaved,
    MicroBatchSettled,
    Quarantined,
    RolledBack,
    TaskFailed,
    TaskFinished,
    WorkerLost,
    WorkerRestarted,
)
from digen.restarts import RestartsSection
from digen.sched import InvariantChecker, check
from digen.types import EvaluationRequest, Prompt, derive_seed
from digen.workers.clock import run_virtual
from digen.workers.faulty import ANYWHERE, Fault, FaultPlan, FaultyEncoder, FaultyWorker, SimDisk, Weights

MIXES: dict[str, tuple[str, ...]] = {
    "none": (),
    "deaths": ("death", "silent_death"),
    "silent deaths": ("silent_death",),
    "hangs": ("hang", "late", "slow"),
    "answers": ("garbage", "other_micro_batch", "wrong_checksum", "late", "duplicate"),
    "garbage": ("garbage", "other_micro_batch"),
    "weights": ("wrong_checksum", "garbage", "death"),
    "code": ("raise",),
    "rewards": ("no_reward", "death"),
    "numbers": ("nan",),
    "disk": ("disk_full", "torn", "death"),
    "losses": ("death", "silent_death", "hang", "late", "slow", "garbage", "wrong_checksum", "torn", "duplicate"),
    "everything": (*ANYWHERE, "other_micro_batch", "wrong_checksum", "no_reward", "nan", "torn", "duplicate"),
}
"""Kinds of faults that are drawn together."""
LOSSES = {"death", "silent_death", "hang", "late", "slow", "garbage", "other_micro_batch", "wrong_checksum", "raise"}
"""Faults that may cost a worker; slow only where the deadline is short."""
MAX_EVENTS = 20_000
"""No run that makes progress has so many."""
KINDS = ("generate", "score", "load", "update", "commit", "publish", "switch_in", "switch_out", "encode", "evaluate")


@dataclass
class Case:
    """What a seed draws."""

    seed: int
    plan: Plan
    config: ScheduleConfig
    restarts: RestartsSection
    advantage: AdvantageSection
    mix: str
    rate: float
    limit: int
    poison: frozenset[tuple[str, int, int]]
    num_generators: int
    num_scorers: int
    encodes: bool
    evaluates: bool
    save_every: int | None
    start_step: int
    drain_at_s: float | None
    num_values: int | None

    def __str__(self) -> str:
        fields = (f"{name}={value}" for name, value in vars(self).items() if name != "plan")
        return f"{', '.join(fields)}, {self.plan}"

    @property
    def bit_identical(self) -> bool:
        """Whether its weights must be those of the run without faults."""
        return self.config.resolved_window == 1 and self.config.update_order == "index"


@dataclass
class Ending:
    """How a run ended."""

    outcome: str = ""
    error: StepFailed | None = None
    weights: Weights = field(default_factory=Weights)
    events: list[AnyEvent] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    num_lent: int = 0
    """Publications that the trainer did not get back."""
    seconds: float = 0.0
    """Virtual."""


# ---- what a seed draws -----------------------------------------------------------------------------------------


def random_plan(draw: random.Random, seed: int, *, most_steps: int = 5) -> Plan:
    axis = draw.choice(["generation", "batch"])
    group, prompts = draw.choice([1, 2, 4, 6]), draw.randint(1, 4)
    if axis == "generation":
        size = draw.choice([m for m in range(1, group + 1) if group % m == 0 and prompts * group // m <= 12])
    else:
        size = group * draw.choice([q for q in range(1, prompts + 1) if prompts % q == 0])
    return Plan(
        ["a", "b", "c"],
        num_steps=draw.randint(1, most_steps),
        prompts_per_step=prompts,
        samples_per_prompt=group,
        micro_batch_size=size,
        axis=axis,  # type: ignore[arg-type]
        seed=seed,
    )


def case_of(seed: int) -> Case:
    """The case that ``seed`` draws."""
    draw = random.Random(derive_seed("case", seed))  # noqa: S311 - not for secrets
    plan = random_plan(draw, seed)
    mode = draw.choice(["colocated", "naive", "microbatch", "gap", "gap", "tag", "tag", "tcss", "tcss"])
    window = draw.choice([1, 1, 2, 2, 3])
    config = ScheduleConfig(
        mode=mode,  # type: ignore[arg-type]
        window=window,
        stale_fraction=None if window == 1 else draw.choice([Decimal(0), Decimal("0.25"), Decimal("0.5"), Decimal(1)]),
        tag=draw.choice([None, "never", "greedy", "greedy", "static(1)", "static(3)", "threshold", "tag_first"]),
        sync=draw.choice(["hold", "pull"]),
        update_order=draw.choice(["index", "index", "ready"]),
        max_generating=draw.choice([None, None, 1, 2]),
        lazy_switch=draw.random() < 0.3,
        max_dropped_groups=draw.choice([Decimal(0), Decimal("0.5"), Decimal(1)]),
    )
    restarts = RestartsSection(
        budget=draw.choice([0, 1, 3, 3, 10, 100]),
        window_s=draw.choice([50, 3600]),
        backoff_s=draw.choice([0, 1, 5]),
        max_backoff_s=20,
        max_attempts=draw.choice([1, 2, 3, 3, 5]),
        deadline_floor_s=draw.choice([30, 60]),
        first_deadline_s=200,
    )
    methods = ["generate", "score", "update"]
    poison = [(draw.choice(methods), draw.randrange(plan.num_steps), draw.randrange(plan.num_micro_batches))]
    return Case(
        seed=seed,
        plan=plan,
        config=config,
        restarts=restarts,
        advantage=AdvantageSection(
            kind=draw.choice(["per_prompt", "per_prompt", "global_std", "no_std"]),
            best_of_n=2 if plan.samples_per_prompt >= 2 and draw.random() < 0.3 else None,
        ),
        mix=draw.choice(list(MIXES)),
        rate=draw.choice([0.01, 0.03, 0.1, 0.25]),
        limit=draw.choice([1, 3, 8, 1000]),
        poison=frozenset(poison if draw.random() < 0.1 else []),
        num_generators=0 if mode == "colocated" else draw.randint(1, 4),
        num_scorers=draw.choice([0, 0, 0, 1, 2]),
        encodes=mode != "colocated" and draw.random() < 0.3,
        evaluates=draw.random() < 0.3,
        save_every=draw.choice([None, 1, 1, 2, 3]),
        start_step=draw.randint(0, plan.num_steps - 1) if draw.random() < 0.2 else 0,
        drain_at_s=draw.uniform(0, 100) if draw.random() < 0.1 else None,
        num_values=draw.choice([None, 2, 3]),
    )


def _durations(draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        if draw.random() < 0.8:
            found[kind] = draw.choice([0, 0.1, 1, 2, 3, 5])
        else:
            a, b, c = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 9)
            found[kind] = lambda step, index, a=a, b=b, c=c: (a * step + b * index + c) % 6
    return found | {"start": draw.choice([0, 1, 10]), "save": draw.choice([0, 1]), "restore": draw.choice([0, 1])}


# ---- one run ---------------------------------------------------------------------------------------------------


def run_case(
    case: Case, *, only: frozenset[str] | None = None, faultless: bool = False, ending: Ending | None = None
) -> Ending:
    """Run a case on the virtual clock; ``only`` lets just these of its faults happen.

    What an ``ending`` that is given holds is true even if this raises.
    """
    draw = random.Random(derive_seed("workers", case.seed))  # noqa: S311 - not for secrets
    mix = () if faultless else MIXES[case.mix]
    poison: frozenset[tuple[str, int, int]] = frozenset() if faultless else case.poison
    faults = FaultPlan(case.seed, rate=case.rate, kinds=mix, limit=case.limit, only=only, poison=poison)
    done = {(step, index): 1 for step in range(case.start_step) for index in range(case.plan.num_micro_batches)}
    origin = Weights(case.start_step, derive_seed("origin", case.start_step) if case.start_step else 0, done)
    files: dict[str, Weights] = {}
    every, resumed = case.save_every, origin if case.start_step else None
    disk = SimDisk(files, every=every, origin=resumed) if every is not None else None
    values = case.num_values
    reward = None if values is None else (lambda uid, sample: float((len(uid) * 7 + sample * 3) % values))
    make = partial(FaultyEncoder if case.encodes else FaultyWorker, plan=faults, reward=reward, disk=files)
    generators = [make(f"gen{number}", durations=_durations(draw)) for number in range(case.num_generators)]
    scorers = [make(f"scorer{number}", durations=_durations(draw)) for number in range(case.num_scorers)]
    trainer = make("trainer", durations=_durations(draw), weights=origin, switches=bool(generators))
    ending = ending if ending is not None else Ending()
    ending.faults = faults.happened

    async def main() -> None:
        scheduler = Scheduler(
            case.plan,
            generators=generators,
            trainer=trainer,
            scorers=scorers,
            config=case.config,
            restarts=case.restarts,
            advantage=case.advantage,
            sinks=[ending.events.append, InvariantChecker(), partial(_ends, ending)],
            checkpointer=disk,
            evaluate=_evaluation if case.evaluates else None,
            start_step=case.start_step,
        )
        loop = asyncio.get_running_loop()
        try:
            async with scheduler:
                if "duplicate" in mix:
                    _answer_twice(scheduler, case, faults, loop)
                if case.drain_at_s is not None:
                    loop.call_later(case.drain_at_s, _drain, scheduler)
                async for _ in scheduler:
                    pass
        except StepFailed as error:
            ending.error = error
        ending.outcome = scheduler.outcome
        ending.seconds = loop.time()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left behind: {left}"

    with capture_logs():
        run_virtual(main())
    ending.weights, ending.num_lent = trainer.weights, trainer.num_lent
    check(ending.events)
    return ending


def _ends(ending: Ending, event: AnyEvent) -> None:
    assert len(ending.events) < MAX_EVENTS, "the run does not end"


def _evaluation(version: int) -> EvaluationRequest | None:
    return EvaluationRequest(1, (Prompt("a"),), 1) if version % 2 else None


def _drain(scheduler: Scheduler) -> None:
    if scheduler.outcome == "running":
        scheduler.drain()


def _answer_twice(scheduler: Scheduler, case: Case, faults: FaultPlan, loop: asyncio.AbstractEventLoop) -> None:
    """Let some answers arrive a second time."""
    inbox = scheduler._inbox
    put = inbox.put

    def put_twice(task: Any, result: Any, error: Exception | None) -> None:
        put(task, result, error)
        if faults.draws_duplicate(f"{task.worker.name}:{task.id}", task.kind):
            again = random.Random(derive_seed(case.seed, "again", task.id)).choice([0, 0, 0.5, 5, 50])  # noqa: S311
            loop.call_later(again, put, task, result, error)

    inbox.put = put_twice  # type: ignore[method-assign]


# ---- what it deserves ------------------------------------------------------------------------------------------


def judge(case: Case, ending: Ending) -> None:
    """Assert that a run ended as it should."""
    lost = Counter(event.worker for event in ending.events if isinstance(event, WorkerLost))
    faults = Counter(fault.where.partition("#")[0] for fault in ending.faults if fault.kind in LOSSES)
    for worker, number in lost.items():
        assert number <= faults[worker], f"{worker} was lost {number} times by {faults[worker]} faults"
        _within_budget(case, ending.events, worker)
    if ending.outcome == "failed":
        _deserved(case, ending)
    else:
        assert ending.outcome == "completed" or case.drain_at_s is not None, ending.outcome
        assert ending.error is None, ending.error
        _trained_once(case, ending)


def _within_budget(case: Case, events: list[AnyEvent], worker: str) -> None:
    rules = case.restarts
    forgiven = rules.max_attempts * sum(isinstance(event, Quarantined) for event in events)
    lost = [event for event in events if isinstance(event, WorkerLost) and event.worker == worker]
    times = [event.time for event in lost if event.restart_in_s is not None]
    most = max((sum(since <= t < since + rules.window_s for t in times) for since in times), default=0)
    assert most <= rules.budget + forgiven, f"{worker} was started again {most} times in {rules.window_s} s"


def _trained_once(case: Case, ending: Ending) -> None:
    weights, settled = ending.weights, {}
    for event in ending.events:
        if isinstance(event, MicroBatchSettled):
            settled[event.step, event.index] = event.outcome
    if ending.outcome == "completed":
        assert weights.version == case.plan.num_steps, f"ends with version {weights.version}"
        garbage = any(fault.kind == "garbage" and fault.method == "publish" for fault in ending.faults)
        assert garbage or ending.num_lent <= 1, f"{ending.num_lent} publications were not given back"
        _saved_what_was_due(case, ending)
    size = case.plan.num_micro_batches
    wanted = {
        (step, index): 1
        for step in range(weights.version)
        for index in range(size)
        if step < case.start_step or settled[step, index] == "updated"
    }
    assert weights.counts == wanted, f"trained {weights.counts} instead of {wanted}"
    dropped = "dropped" in settled.values()
    if case.bit_identical and ending.outcome == "completed" and not dropped and ending.faults:
        undisturbed = run_case(case_without_drain(case), faultless=True).weights
        assert weights == undisturbed, "the weights are not those of the run without faults"


def _saved_what_was_due(case: Case, ending: Ending) -> None:
    last, every = case.plan.num_steps, case.save_every
    if every is not None:
        due = {version for version in range(case.start_step + 1, last + 1) if version == last or version % every == 0}
        missing = due - {event.version for event in ending.events if isinstance(event, CheckpointSaved)}
        assert not missing, f"no checkpoint of versions {sorted(missing)}"


def case_without_drain(case: Case) -> Case:
    """The same, run to its end."""
    return Case(**{**vars(case), "drain_at_s": None})


def _deserved(case: Case, ending: Ending) -> None:
    error = ending.error
    assert error is not None, "failed without an error"
    cause, kinds = error.__cause__, {fault.kind for fault in ending.faults}
    quarantined = any(isinstance(event, Quarantined) for event in ending.events)
    worker = getattr(cause, "worker", "")
    of_worker = [fault for fault in ending.faults if fault.where.startswith(f"{worker}#")]
    used_up = quarantined or (bool(worker) and _used_up(case, ending.events, worker))
    match cause:
        case WorkerRaised():
            raised = any(fault.kind == "raise" for fault in of_worker)
            deserved = raised and (used_up or worker == "trainer" or any(f.method == "evaluate" for f in of_worker))
        case WorkerDied() | WorkerTimeout() | ProtocolError():
            deserved = used_up
        case RewardError():
            deserved = bool({"no_reward", "nan"} & kinds) or quarantined
        case NumericsError():
            deserved = "nan" in kinds
        case OSError():
            deserved = "disk_full" in kinds
        case CheckpointError():
            lost = any(isinstance(event, WorkerLost) and event.role == "trainer" for event in ending.events)
            deserved = lost and case.start_step > 0 and (case.save_every is None or "torn" in kinds)
        case _:
            deserved = False
    assert deserved, f"{type(cause).__name__} is not what these faults deserve: {error}"


def _used_up(case: Case, events: list[AnyEvent], worker: str) -> bool:
    """Whether a worker's losses at the end of a run were more than its policy allows."""
    # What was cancelled at the end, perhaps long after the failure because a call did not let go, is no part of it.
    events = [event for event in events[:-1] if getattr(event, "error", "") != "cancelled: the run ended"]
    rules, end = case.restarts, events[-1].time
    recent = barren = attempts = 0
    failed = next(event for event in reversed(events) if isinstance(event, TaskFailed) and event.worker == worker)
    for event in events:
        if isinstance(event, WorkerLost) and event.worker == worker:
            recent += event.time > end - rules.window_s
            barren += 1
        elif isinstance(event, TaskFinished | TaskFailed):
            finished = isinstance(event, TaskFinished)
            if finished and event.worker == worker:
                barren = 0
            if (event.step, event.index, event.kind) == (failed.step, failed.index, failed.kind):
                attempts = 0 if finished else attempts + 1
    return recent >= rules.budget or barren >= rules.max_attempts or attempts >= rules.max_attempts


def failure_of(seed: int, only: frozenset[str] | None = None) -> tuple[str, Ending]:
    """What is wrong with the run of a seed, or an empty string; and its ending, as far as it came."""
    case, ending = case_of(seed), Ending()
    try:
        run_case(case, only=only, ending=ending)
        judge(case, ending)
    except Exception as error:
        return f"{type(error).__name__}: {error}", ending
    return "", ending


def shrink(seed: int) -> tuple[list[Fault], str]:
    """The fewest faults found that still make the run of ``seed`` fail, and how it fails."""
    failure, ending = failure_of(seed)
    faults = ending.faults
    for fault in list(faults):
        fewer = frozenset(other.where for other in faults if other is not fault)
        found, ending = failure_of(seed, fewer)
        if found:
            faults, failure = ending.faults, found
    return faults, failure


# ---- many runs -------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Sums over runs."""

    num_runs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Take another's sums in."""
        self.num_runs += other.num_runs
        self.outcomes += other.outcomes
        self.coverage += other.coverage
        self.counts += other.counts
        self.failures |= other.failures
        self.digests |= other.digests


def digest_of(events: Iterable[AnyEvent]) -> str:
    """A hash of an event log."""
    return hashlib.sha256(b"\n".join(map(msgspec.json.encode, events))).hexdigest()


def run_seeds(seeds: Sequence[int]) -> Tally:
    """Run and judge the cases of some seeds."""
    tally = Tally()
    for seed in seeds:
        failure, ending = failure_of(seed)
        tally.num_runs += 1
        if failure:
            tally.failures[seed] = failure
        cause = ending.error.__cause__ if ending.error else None
        tally.outcomes[ending.outcome if cause is None else f"failed: {type(cause).__name__}"] += 1
        tally.digests[seed] = digest_of(ending.events)
        for fault in ending.faults:
            assist = fault.method == "generate" and fault.where.startswith("trainer")
            tally.coverage[fault.kind, "assist" if assist else fault.method] += 1
        for kind in (WorkerLost, WorkerRestarted, RolledBack, Quarantined):
            tally.counts[kind.__name__] += sum(isinstance(event, kind) for event in ending.events)
        tally.counts["events"] += len(ending.events)
        tally.counts["virtual seconds"] += int(ending.seconds)
    return tally


def run_many(first: int, num_seeds: int, num_processes: int) -> Tally:
    """Run the cases of ``num_seeds`` seeds in several processes."""
    chunks = [range(start, min(start + 50, first + num_seeds)) for start in range(first, first + num_seeds, 50)]
    total = Tally()
    with ProcessPoolExecutor(num_processes) as pool:
        for tally in pool.map(run_seeds, chunks):
            total.add(tally)
    return total


def coverage_table(coverage: Counter[tuple[str, str]]) -> str:
    """Faults by kind and by the call they hit."""
    methods = sorted({method for _, method in coverage})
    kinds = sorted({kind for kind, _ in coverage})
    rows = [f"{'':18}" + "".join(f"{method:>11}" for method in methods)]
    for kind in kinds:
        cells = (coverage[kind, method] or "-" for method in methods)
        rows.append(f"{kind:18}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int)
    parser.add_argument("--only", help="with --replay: let just these faults happen, comma-separated")
    parser.add_argument("--shrink", type=int)
    parser.add_argument("--hash", action="store_true")
    options = parser.parse_args()
    if options.replay is not None:
        return _replay(options.replay, None if options.only is None else frozenset(options.only.split(",")))
    if options.shrink is not None:
        faults, failure = shrink(options.shrink)
        print(
            f"{failure}\nwith {len(faults)} faults: {', '.join(f'{f.kind} in {f.method} at {f.where}' for f in faults)}"
        )
        print(f"python experiments/faults.py --replay {options.shrink} --only {','.join(f.where for f in faults)}")
        return 1 if failure else 0
    started = time.monotonic()
    tally = run_many(options.first, options.seeds, options.processes)
    if options.hash:
        print(hashlib.sha256("".join(tally.digests[seed] for seed in sorted(tally.digests)).encode()).hexdigest())
        return 1 if tally.failures else 0
    print(f"{tally.num_runs} runs in {time.monotonic() - started:.0f} s, {len(tally.failures)} failures")
    print(", ".join(f"{count} {name}" for name, count in tally.counts.most_common()))
    print("\n".join(f"{count:7} {outcome}" for outcome, count in tally.outcomes.most_common()))
    print(coverage_table(tally.coverage))
    for seed, failure in sorted(tally.failures.items())[:20]:
        print(f"seed {seed}: {failure.splitlines()[0][:300]}\n    python experiments/faults.py --replay {seed}")
    return 1 if tally.failures else 0


def _replay(seed: int, only: frozenset[str] | None) -> int:
    print(case_of(seed))
    failure, ending = failure_of(seed, only)
    for event in ending.events:
        print(f"{event.time:10.3f} {event}")
    for fault in ending.faults:
        print(fault)
    print(ending.outcome, ending.error or "", ending.weights)
    print(failure or "as it should be")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
