"""How much time do faults take from a run? In virtual time, on simulated workers.

    python experiments/recovery.py [--seeds 100] [--days 30]      under a minute; experiments/faults.py prints it too

1. One fault in every ten steps: the time of the run without faults over that of the same run with them.
2. Thirty days on a hundred workers that die now and then: are the weights those of the run without faults?
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from structlog.testing import capture_logs

from digen import Plan, ScheduleConfig, Scheduler
from digen.events import WorkerLost
from digen.restarts import RestartsSection
from digen.types import derive_seed
from digen.workers.clock import run_virtual
from digen.workers.faulty import Fault, FaultPlan, FaultyWorker, FaultyWriter, Weights
from experiments.simdisk import SimDisk, at_once, checkpoints_on, mounted

GOAL = 0.9
"""Share of useful time that a run with a fault in every ten steps shall have."""
TIMES: dict[str, Any] = {
    "generate": lambda step, index: 16 + (7 * step + 3 * index) % 9,
    "score": 2,
    "update": 5,
    "commit": 3,
    "publish": 1,
    "load": 2,
    "start": 30,
    "save": 1,
    "write": 10,
    "restore": 5,
}
"""Seconds. A process that is started again is there after ``start``."""
STEPS, MICRO_BATCHES = 20, 12
RULES = RestartsSection(deadline_factor=5, deadline_floor_s=60, first_deadline_s=120)


@dataclass
class Outcome:
    """A run that has ended."""

    seconds: float
    weights: Weights
    num_lost: int


class EveryTenth(FaultPlan):
    """In one step of every ten, a call of one worker fails; a worker that has none then fails in its next."""

    def __init__(self, seed: int, workers: Sequence[str], kinds: Sequence[str]) -> None:
        super().__init__(seed)
        draw = random.Random(derive_seed("every tenth", seed))  # noqa: S311 - not for secrets
        self._due = [
            (first + draw.randrange(9), draw.choice(workers), draw.randrange(4), draw.choice(kinds))
            for first in range(0, STEPS, 10)
        ]

    def draw(self, where: str, method: str, step: int, index: int) -> Fault | None:
        """The fault of one call."""
        for number, (first, worker, calls, kind) in enumerate(self._due):
            if where.startswith(f"{worker}#") and step >= first and method != "load":
                if calls and step == first:
                    self._due[number] = first, worker, calls - 1, kind
                    return None
                del self._due[number]
                return self._happens(Fault(where, method, kind))
        return None


def run(
    plan: Plan,
    faults: FaultPlan,
    *,
    num_generators: int,
    times: dict[str, Any],
    rules: RestartsSection,
    every_s: float | None = None,
) -> Outcome:
    """One run on-policy in index order; ``every_s``: mean time between two deaths, wherever they hit."""
    disk = SimDisk()
    trainer = FaultyWriter("trainer", faults, times, disk=disk)
    generators = [FaultyWorker(f"gen{number}", faults, times) for number in range(num_generators)]
    lost: list[WorkerLost] = []

    async def main() -> float:
        loop = at_once(asyncio.get_running_loop())
        scheduler = Scheduler(
            plan,
            generators=generators,
            trainer=trainer,
            config=ScheduleConfig(mode="gap"),
            restarts=rules,
            sinks=[lambda event: lost.append(event) if isinstance(event, WorkerLost) else None],
            checkpointer=checkpoints_on(disk, every=1),
        )
        async with scheduler:
            killer = loop.create_task(_kill([trainer, *generators], every_s, plan.seed)) if every_s else None
            async for _ in scheduler:
                pass
            if killer is not None:
                killer.cancel()
            return loop.time()

    with capture_logs(), mounted():
        seconds = run_virtual(main())
    return Outcome(seconds, trainer.weights, len(lost))


async def _kill(workers: Sequence[FaultyWorker], every_s: float, seed: int) -> None:
    draw = random.Random(derive_seed("deaths", seed))  # noqa: S311 - not for secrets
    while True:
        await asyncio.sleep(draw.expovariate(1 / every_s))
        await draw.choice(workers).kill()


# ---- one fault in every ten steps --------------------------------------------------------------------------------


def useful_shares(seed: int) -> list[float]:
    """The time of a run without faults over that of the same run with them, for each of :data:`ROWS`."""
    draw = random.Random(derive_seed("recovery", seed))  # noqa: S311 - not for secrets
    plan = Plan(
        ["a"], num_steps=STEPS, prompts_per_step=MICRO_BATCHES // 4, samples_per_prompt=4, micro_batch_size=1, seed=seed
    )
    num_generators = draw.choice([2, 4, 8])
    names = ["trainer", *(f"gen{number}" for number in range(num_generators))]
    plays = partial(run, plan, num_generators=num_generators, times=TIMES, rules=RULES)
    without, shares = plays(FaultPlan(seed)), []
    for kinds in ROWS.values():
        faults = EveryTenth(seed, names, kinds)
        with_faults = plays(faults)
        assert with_faults.weights == without.weights, "the weights are not those of the run without faults"
        assert len(faults.happened) == STEPS // 10, f"{len(faults.happened)} faults"
        shares.append(without.seconds / with_faults.seconds)
    return shares


ROWS: dict[str, tuple[str, ...]] = {
    "a process dies": ("death", "silent_death"),
    "it answers nonsense": ("garbage",),
    "it hangs": ("hang",),
}


# ---- thirty days -------------------------------------------------------------------------------------------------

WORKERS = 100
LONG_TIMES: dict[str, Any] = {
    "generate": lambda step, index: 2600 + (140 * step + 260 * index) % 1200,
    "score": 120,
    "update": 24,
    "commit": 120,
    "publish": 40,
    "load": 80,
    "start": 300,
    "save": 20,
    "write": 240,
    "restore": 60,
}


def many_days(days: float, every_s: float | None) -> Outcome:
    """A little more than so many days on a hundred workers, in steps of somewhat less than two hours."""
    plan = Plan(
        ["a"], num_steps=round(days * 13), prompts_per_step=33, samples_per_prompt=3, micro_batch_size=1, seed=1
    )
    rules = RestartsSection()
    return run(plan, FaultPlan(0), num_generators=WORKERS - 1, times=LONG_TIMES, rules=rules, every_s=every_s)


def report(num_seeds: int, days: float, num_processes: int) -> bool:
    """Print both; returns whether the goals are met."""
    began, good = time.monotonic(), True
    seconds = ", ".join(f"{kind} {value if isinstance(value, int) else '16 to 24'}" for kind, value in TIMES.items())
    with ProcessPoolExecutor(num_processes) as pool:
        long = [pool.submit(many_days, days, every_s) for every_s in (3600, None)] if days else []
        print(
            f"simulated: {STEPS} steps of {MICRO_BATCHES} micro-batches on 2, 4 or 8 generators and a trainer, "
            f"a checkpoint a step,\none fault in every ten steps, on any worker, in any call but a load; "
            f"seconds: {seconds};\n"
            f"deadline {RULES.deadline_factor:g} x the mean, at least {RULES.deadline_floor_s:g} s, "
            f"{RULES.first_deadline_s:g} s where there is none yet"
        )
        seeds = list(pool.map(useful_shares, range(num_seeds), chunksize=5))
        for name, shares in zip(ROWS, zip(*seeds, strict=True), strict=True):
            mean = statistics.fmean(shares)
            good &= mean >= GOAL
            print(
                f"  {name:22} useful time {100 * mean:.1f} % in the mean of {num_seeds} seeds, "
                f"{100 * min(shares):.1f} % in the worst; goal {100 * GOAL:.0f} %"
            )
        if long:
            faulty, undisturbed = (future.result() for future in long)
            exact = faulty.weights == undisturbed.weights and set(faulty.weights.counts.values()) == {1}
            good &= exact
            print(
                f"simulated: {faulty.seconds / 86400:.1f} days on {WORKERS} workers, one death an hour among them "
                f"({faulty.num_lost} losses), {faulty.weights.version} steps:\n"
                f"  the weights {'are' if exact else 'ARE NOT'} those of the run without faults, "
                f"useful time {100 * undisturbed.seconds / faulty.seconds:.1f} %"
            )
    print(f"  in {time.monotonic() - began:.0f} s")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--days", type=float, default=30)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    return 0 if report(options.seeds, options.days, options.processes) else 1


if __name__ == "__main__":
    sys.exit(main())
