"""The scheduler under faults, in virtual time: nothing lost, nothing twice, and every run ends as its faults deserve.

    python experiments/faults.py [--seeds 10000] [--first 0]      ten thousand random runs; prints times, coverage, and
                                                                  what faults cost (experiments/recovery.py)
    python experiments/faults.py --replay 123 [--only gen0#1.4,trainer#2.3]      one of them, told event by event
    python experiments/faults.py --shrink 123                     leaves out the faults that a failure does not need
    python experiments/faults.py --hash --seeds 1000              a digest of all event logs

Every seed draws a plan, a mode, workers with their durations, a restart policy and a mix of faults; the workers are
:class:`digen.workers.faulty.FaultyWorker`, the checkpoints the real ones on a disk in memory. In some runs the power
fails, and the run is resumed from what the disk has kept. The invariants are checked after every event; what a run
deserves is in ``experiments/verdicts.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec
from pydantic import ByteSize
from structlog.testing import capture_logs

from digen import Plan, ScheduleConfig, Scheduler
from digen.checkpoint import completed, verify
from digen.config import AdvantageSection
from digen.errors import CheckpointError, StepFailed
from digen.events import AnyEvent, CheckpointSaved, Quarantined, RolledBack, RunFinished, WorkerLost, WorkerRestarted
from digen.restarts import RestartsSection
from digen.sched import InvariantChecker, check
from digen.types import EvaluationRequest, Prompt, derive_seed
from digen.workers.clock import run_virtual
from digen.workers.faulty import (
    ANYWHERE,
    FAULTS,
    Fault,
    FaultPlan,
    FaultyEncoder,
    FaultyWorker,
    FaultyWriter,
    Focus,
    Weights,
    read_weights,
    state_of,
)
from experiments import recovery
from experiments.simdisk import SimDisk, at_once, checkpoints_on, mounted
from experiments.verdicts import assert_deserved

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
    "machines": ("node_death", "death"),
    "losses": ("death", "silent_death", "hang", "late", "slow", "garbage", "wrong_checksum", "torn", "duplicate"),
    "everything": (
        *ANYWHERE,
        "node_death",
        "other_micro_batch",
        "wrong_checksum",
        "no_reward",
        "nan",
        "torn",
        "duplicate",
    ),
}
"""Kinds of faults that are drawn together."""
TWICE = (
    *("generate", "assist", "score", "load", "update", "commit", "publish", "switch", "encode", "evaluate", "save"),
    "snapshot",
)
"""Calls whose answer may arrive twice."""
PAIRS = tuple(
    [(state, kind) for state, kinds in FAULTS.items() for kind in kinds]
    + [("assist", kind) for kind in FAULTS["generate"]]
    + [(state, "duplicate") for state in TWICE]
)
"""Every pair of a call and a fault that can occur. :data:`digen.workers.faulty.FAULTS` says why others cannot; only the
answers of tasks can arrive twice."""
WEIGHTS = {
    "commit": 3,
    "publish": 3,
    "encode": 3,
    "disk": 3,
    "load": 3,
    "snapshot": 5,
    "switch": 7,
    "evaluate": 6,
    "begin_save": 5,
    "write": 5,
    "save": 5,
    "assist": 8,
    "recall": 11,
    "restore": 11,
}
"""How often the faults of a call are a run's focus; of other calls 2. The rarer a call is, the more."""
ENOUGH, FULL = 100, 10_000
"""Times that so many runs meet every pair."""
FOCUSED = 0.75
"""Share of the runs with a focus."""
SAVES = {"save", "begin_save", "write", "disk"}
FEWER = (*MIXES, *["none"] * len(MIXES))
"""What is drawn beside a focus."""
TAGS = (None, "never", "greedy", "greedy", "static(1)", "static(3)", "threshold", "tag_first")
ROLLOUT_BYTES = 8
"""Of a micro-batch."""
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
    focuses: tuple[Focus, ...]
    writes_late: bool
    keep: int
    keep_best: int
    power_loss: int | None
    """The change on the disk before which the power fails."""

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
    start_step: int = 0
    events: list[AnyEvent] = field(default_factory=list)
    """Those since the power came back, if it failed."""
    before: list[AnyEvent] = field(default_factory=list)
    """Those before it failed."""
    faults: list[Fault] = field(default_factory=list)
    num_lent: int = 0
    """Publications and snapshots that the trainer had not got back when the run ended."""
    seconds: float = 0.0
    """Virtual."""
    on_disk: dict[int, bool] = field(default_factory=dict)
    """The versions that have a checkpoint in the end, and whether it is intact."""


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
    focuses = tuple(_focus(draw) for _ in range(2)) if draw.random() < FOCUSED else ()
    states = {focus.state for focus in focuses}
    while "write" in states and plan.num_steps < 4:  # so that there is a next step while it is written
        plan = random_plan(draw, seed)
    assists, saves, dies = states & {"assist", "switch"}, states & SAVES, states & {"start", "restore", "recall"}
    mode = draw.choice(["colocated", "naive", "microbatch", "gap", "gap", "tag", "tag", "tcss", "tcss"])
    if states & {"load", "publish", "encode"} and mode == "colocated":
        mode = "gap"
    if assists:
        mode = "tag"
    window = draw.choice([1, 1, 2, 2, 3])
    config = ScheduleConfig(
        mode=mode,  # type: ignore[arg-type]
        window=window,
        stale_fraction=None if window == 1 else draw.choice([Decimal(0), Decimal("0.25"), Decimal("0.5"), Decimal(1)]),
        tag=draw.choice(["greedy", "static(3)", "tag_first"] if assists else TAGS),
        sync=draw.choice(["hold", "pull"]),
        update_order=draw.choice(["index", "index", "ready"]),
        max_generating=draw.choice([None, None, 1, 2]),
        lazy_switch=draw.random() < 0.3,
        max_dropped_groups=draw.choice([Decimal(0), Decimal("0.5"), Decimal(1)]),
        max_rollout_bytes=_max_rollout_bytes(seed, plan),
    )
    restarts = RestartsSection(
        budget=draw.choice([10, 100] if focuses else [0, 1, 3, 3, 10, 100]),
        window_s=draw.choice([50, 3600]),
        backoff_s=draw.choice([0, 1, 5]),
        max_backoff_s=20,
        max_attempts=draw.choice([3, 5] if focuses else [1, 2, 3, 3, 5]),
        deadline_floor_s=draw.choice([30, 60]),
        first_deadline_s=200,
        snapshot_every=_snapshot_every(seed, states),
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
        mix=draw.choice(["deaths", "losses"] if dies else FEWER if focuses else list(MIXES)),
        rate=draw.choice([0.1, 0.25] if dies else [0.01, 0.03, 0.1, 0.25]),
        limit=draw.choice([8, 1000] if dies else [1, 3, 8, 1000]),
        poison=frozenset(poison if draw.random() < 0.1 else []),
        num_generators=0 if mode == "colocated" else draw.randint(1, 4),
        num_scorers=draw.choice([0, 0, 0, 1, 2]),
        encodes=mode != "colocated" and ("encode" in states or draw.random() < 0.3),
        evaluates="evaluate" in states or draw.random() < 0.3,
        save_every=draw.choice([1, 2, 3] if "write" in states else [1, 1, 2] if saves or dies else [None, 1, 1, 2, 3]),
        start_step=draw.randint(0, plan.num_steps - 1) if draw.random() < 0.2 else 0,
        drain_at_s=draw.uniform(0, 100) if draw.random() < 0.1 else None,
        num_values=draw.choice([None, 2, 3]),
        focuses=focuses,
        writes_late=bool(states & {"begin_save", "write"}) or ("save" not in states and draw.random() < 0.5),
        keep=draw.randint(1, 3),
        keep_best=draw.choice([0, 0, 1, 2]),
        power_loss=draw.randint(1, 40) if draw.random() < 0.2 else None,
    )


def _snapshot_every(seed: int, states: set[str]) -> int:
    # A draw of its own, so that all others are as they were before there were snapshots.
    draw = random.Random(derive_seed("snapshots", seed))  # noqa: S311 - not for secrets
    return 0 if "restore" in states else 1 if states & {"snapshot", "recall", "write"} else draw.choice([0, 0, 1, 1, 2])


def _max_rollout_bytes(seed: int, plan: Plan) -> ByteSize | None:
    draw = random.Random(derive_seed("memory", seed))  # noqa: S311 - not for secrets
    of_a_step = ROLLOUT_BYTES * plan.num_micro_batches
    return ByteSize(draw.randint(of_a_step, 3 * of_a_step)) if draw.random() < 0.3 else None


def _focus(draw: random.Random) -> Focus:
    state, kind = draw.choices(PAIRS, [_weight(*pair) for pair in PAIRS])[0]
    return Focus(state, kind, 1.0 if state in WEIGHTS else 0.3, draw.choice([1, 2, 4]))


def _weight(state: str, kind: str) -> int:
    """How often a pair is a run's focus; none after which the run is over happens twice in it."""
    over = kind in {"nan", "no_reward", "disk_full"} or (
        kind == "raise" and state not in {"generate", "score", "encode", "load"}
    )
    often = kind in {"death", "duplicate"} and state not in SAVES | {"recall", "restore", "evaluate"}
    return 1 if often else WEIGHTS.get(state, 2) + 4 * over + (kind == "node_death")


def _durations(draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        if draw.random() < 0.8:
            found[kind] = draw.choice([0, 0.1, 1, 2, 3, 5])
        else:
            a, b, c = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 9)
            found[kind] = lambda step, index, a=a, b=b, c=c: (a * step + b * index + c) % 6
    return found | {
        "start": draw.choice([0, 1, 10]),
        "save": draw.choice([0, 1]),
        "write": draw.choice([0, 1, 10, 100]),
        "restore": draw.choice([0, 1]),
        "snapshot": draw.choice([0, 1, 3]),
        "recall": draw.choice([0, 1]),
    }


# ---- one run ---------------------------------------------------------------------------------------------------


def run_case(
    case: Case, *, only: frozenset[str] | None = None, faultless: bool = False, ending: Ending | None = None
) -> Ending:
    """Run a case on the virtual clock; ``only`` lets just these of its faults happen.

    What an ``ending`` that is given holds is true even if this raises.
    """
    ending = ending if ending is not None else Ending()
    if faultless:
        case = replace(case, mix="none", poison=frozenset(), focuses=(), power_loss=None)
    faults = FaultPlan(
        case.seed,
        rate=case.rate,
        kinds=MIXES[case.mix],
        limit=case.limit,
        only=only,
        poison=case.poison,
        focuses=case.focuses,
    )
    ending.faults = faults.happened
    with capture_logs(), mounted():
        first = _Leg(case, faults, ending, number=0)
        run_virtual(first.run())
        if first.image is not None:
            _resume(case, faults, ending, first)
    return ending


def _resume(case: Case, faults: FaultPlan, ending: Ending, first: _Leg) -> None:
    """Go on where a run without power was cut off, from the newest checkpoint that the disk has kept."""
    saved = [event.version for event in first.at_power_loss if isinstance(event, CheckpointSaved)]
    torn = any(fault.kind == "torn" for fault in ending.faults)
    newest, found = max(saved, default=case.start_step), 0
    second = _Leg(case, faults, ending, number=1, disk=first.image)
    with contextlib.suppress(CheckpointError):
        found = second.resume()
    assert torn or found >= newest, f"the checkpoint of version {newest} is lost, the newest is of {found}"
    if not found:
        ending.outcome, ending.error = "nothing to resume", None
        return
    ending.before, ending.events, ending.error = ending.events, [], None
    run_virtual(second.run())


class _Leg:
    """A run, or its continuation after the power had failed, with new workers."""

    def __init__(
        self, case: Case, faults: FaultPlan, ending: Ending, *, number: int, disk: SimDisk | None = None
    ) -> None:
        self.case = case
        self.faults = faults
        self.ending = ending
        self.start_step = case.start_step
        self.image: SimDisk | None = None
        """What is left of the disk, once the power has failed."""
        self.at_power_loss: list[AnyEvent] = []
        self._number = number
        self.disk = disk if disk is not None else SimDisk()
        done = {(step, index): 1 for step in range(case.start_step) for index in range(case.plan.num_micro_batches)}
        self.weights = Weights(case.start_step, derive_seed("origin", case.start_step) if case.start_step else 0, done)
        self._checkpoints = checkpoints_on(
            self.disk, every=case.save_every or 1, keep=case.keep, keep_best=case.keep_best, digest=case.plan.digest
        )

    def resume(self) -> int:
        """Begin with the newest checkpoint on the disk; returns its version."""
        path, state = self._checkpoints.find("latest")
        self.start_step, self.weights = state.version, read_weights(self.disk, str(path))
        return state.version

    async def run(self) -> None:
        case, ending = self.case, self.ending
        ending.start_step = self.start_step
        loop = at_once(asyncio.get_running_loop())
        if self._number == 0 and case.start_step and case.save_every is not None:
            await self._checkpoints.save(
                FaultyWorker("origin", FaultPlan(0), weights=self.weights, disk=self.disk), case.start_step
            )
            self.resume()
        self.disk.fails = self._full
        trainer, generators, scorers = self._workers()
        scheduler = Scheduler(
            case.plan,
            generators=generators,
            trainer=trainer,
            scorers=scorers,
            config=case.config,
            restarts=case.restarts,
            advantage=case.advantage,
            sinks=[
                ending.events.append,
                InvariantChecker(),
                partial(_ends, ending, trainer),
                self._checkpoints.note,
                self._is_saved,
                lambda _: _fits(scheduler),
                lambda event: _forgets_the_future(scheduler, event),
            ],
            checkpointer=self._checkpoints if case.save_every is not None else None,
            evaluate=_evaluation if case.evaluates else None,
            start_step=self.start_step,
        )
        if self._number == 0 and case.power_loss is not None:
            draw = random.Random(derive_seed("power", case.seed))  # noqa: S311 - not for secrets
            self.disk.lose_power(case.power_loss, draw, partial(self._power_fails, scheduler))
        try:
            async with scheduler:
                _answer_twice(scheduler, case, self.faults, loop, self._number)
                if case.drain_at_s is not None:
                    loop.call_later(case.drain_at_s, _drain, scheduler)
                async for _ in scheduler:
                    pass
        except StepFailed as error:
            ending.error = error
        ending.outcome = scheduler.outcome
        ending.seconds += loop.time()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left behind: {left}"
        ending.weights = trainer.weights
        ending.on_disk = intact_on(self.disk)
        check(ending.events)

    def _workers(self) -> tuple[FaultyWorker, list[FaultyWorker], list[FaultyWorker]]:
        case = self.case
        draw = random.Random(derive_seed("workers", case.seed))  # noqa: S311 - not for secrets
        values = case.num_values
        reward = None if values is None else (lambda uid, sample: float((len(uid) * 7 + sample * 3) % values))
        late_s = random.Random(derive_seed("late", case.seed)).choice([250, 1e4])  # noqa: S311 - not for secrets
        life = 1 + 1000 * self._number

        def make(kind: type[FaultyWorker], name: str, **options: Any) -> FaultyWorker:
            options |= {"reward": reward, "disk": self.disk, "first_life": life, "late_s": late_s}
            durations = _durations(draw)
            if any(focus.state == "write" for focus in case.focuses):
                durations["write"] = 100  # so that the next step ends before
            return kind(name, self.faults, durations, **options)

        kind = FaultyEncoder if case.encodes else FaultyWorker
        generators = [make(kind, f"gen{number}") for number in range(case.num_generators)]
        scorers = [make(FaultyWorker, f"scorer{number}") for number in range(case.num_scorers)]
        kind = FaultyWriter if case.writes_late else FaultyWorker
        trainer = make(kind, "trainer", weights=self.weights, switches=bool(generators))
        return trainer, generators, scorers

    def _is_saved(self, event: AnyEvent) -> None:
        if isinstance(event, CheckpointSaved) and all(fault.kind != "torn" for fault in self.ending.faults):
            assert intact_on(self.disk).get(event.version), f"the checkpoint of version {event.version} is none"

    def _full(self, change: int) -> None:
        if self.faults.draw(f"disk#{self._number}.{change}", "disk", -1, -1) is not None:
            raise OSError(28, "No space left on device")

    def _power_fails(self, scheduler: Scheduler, image: SimDisk) -> None:
        self.image, self.at_power_loss = image, list(self.ending.events)
        scheduler.stop()


def intact_on(disk: SimDisk) -> dict[int, bool]:
    """The versions whose checkpoints are on a disk, and whether they are intact."""
    found = {}
    for path in completed(disk.path("run", "checkpoints")):
        try:
            verify(path)
        except CheckpointError:
            found[int(path.name.removeprefix("step-"))] = False
        else:
            found[int(path.name.removeprefix("step-"))] = True
    return found


def _ends(ending: Ending, trainer: FaultyWorker, event: AnyEvent) -> None:
    if isinstance(event, RunFinished):
        ending.num_lent = trainer.num_lent
    assert len(ending.events) < MAX_EVENTS, "the run does not end"


def _fits(scheduler: Scheduler) -> None:
    """The rollouts that exist are those that are counted, and pass their limit by one micro-batch at most."""
    state = scheduler._state
    limit, held = state.rules.max_rollout_bytes, state.memory.held
    if limit is not None:
        exist = ROLLOUT_BYTES * sum(len(step.rollouts) for step in state.steps.values())
        assert held == exist, f"{held} bytes of rollouts are counted where there are {exist}"
        assert held <= limit + ROLLOUT_BYTES, f"{held} bytes of rollouts, with a limit of {limit}"


def _forgets_the_future(scheduler: Scheduler, event: AnyEvent) -> None:
    """No snapshot is kept of what a run has gone back behind."""
    if isinstance(event, RolledBack):
        kept = scheduler._results._snapshots.newest
        assert kept is None or kept.version <= event.version, f"a snapshot of version {kept.version} is kept"


def _evaluation(version: int) -> EvaluationRequest | None:
    return EvaluationRequest(1, (Prompt("a"),), 1) if version % 2 else None


def _drain(scheduler: Scheduler) -> None:
    if scheduler.outcome == "running":
        scheduler.drain()


def _answer_twice(
    scheduler: Scheduler, case: Case, faults: FaultPlan, loop: asyncio.AbstractEventLoop, leg: int
) -> None:
    """Let some answers arrive a second time."""
    if "duplicate" not in MIXES[case.mix] and all(f.kind != "duplicate" for f in case.focuses):
        return
    inbox = scheduler._inbox
    put = inbox.put

    def put_twice(task: Any, result: Any, error: Exception | None) -> None:
        put(task, result, error)
        if faults.draws_duplicate(f"{task.worker.name}:{leg}.{task.id}", task.kind):
            again = random.Random(derive_seed(case.seed, "again", task.id)).choice([0, 0, 0.5, 5, 50])  # noqa: S311
            loop.call_later(again, put, task, result, error)

    inbox.put = put_twice  # type: ignore[method-assign]


# ---- is it as it should be -------------------------------------------------------------------------------------


def judge(case: Case, ending: Ending) -> None:
    """Assert that a run ended as it should."""
    assert_deserved(case, ending, lambda: run_case(replace(case, drain_at_s=None), faultless=True).weights)


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
        tally.digests[seed] = digest_of(ending.before + ending.events)
        for fault in ending.faults:
            tally.coverage[fault.kind, state_of(fault.where, fault.method)] += 1
        for kind in (WorkerLost, WorkerRestarted, RolledBack, Quarantined):
            tally.counts[kind.__name__] += sum(isinstance(event, kind) for event in ending.events)
        tally.counts["power failures"] += bool(ending.before)
        tally.counts["events"] += len(ending.before + ending.events)
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


def too_few(tally: Tally) -> dict[tuple[str, str], int]:
    """The pairs that a run of ten thousand seeds met too rarely; of fewer seeds nothing is asked."""
    met = {(state, kind): tally.coverage[kind, state] for state, kind in PAIRS}
    return {pair: number for pair, number in met.items() if number < ENOUGH and tally.num_runs >= FULL}


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
    few = too_few(tally)
    for (state, kind), number in few.items():
        print(f"{kind} in {state} was met only {number} times, not {ENOUGH}")
    for seed, failure in sorted(tally.failures.items())[:20]:
        print(f"seed {seed}: {failure.splitlines()[0][:300]}\n    python experiments/faults.py --replay {seed}")
    good = not (tally.failures or few)
    if options.seeds >= FULL:
        good &= recovery.report(100, 30, options.processes)
    return 0 if good else 1


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
