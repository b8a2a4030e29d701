"""How long one search of Algorithm 2 takes (Fig. 10 of the paper), and that it finds the optimum.

Run ``python experiments/search_time.py [--instances N]`` for the table: B micro-batches against t/g, the ratio of an
update to a generation; median and largest time of one search from the start of a step, in pure Python on one core.
Durations are drawn without a common divisor, scores and switches take time. It takes 2 s.
``--verify N`` compares N random small instances with brute force over all decisions instead (5,000: half a minute).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from digen.sched.model import Instance, scripted, simulate
from digen.sched.search import search
from digen.sched.tag import Bubble, Decision, Policy

SIZES = (16, 32, 64, 128)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TARGET_MS = {0.1: 3.0}
"""Median at B = 128 by t/g; 6 ms elsewhere."""


def seeded(name: str) -> random.Random:
    """The same draws every time."""
    return random.Random(name)  # noqa: S311 - not a secret


def plausible(rng: random.Random, size: int, ratio: float) -> Instance:
    """One generator and one trainer with t = ratio g."""
    g = rng.randint(90_000, 110_000)
    return Instance(
        num_micro_batches=size,
        generate_s=(g,),
        score_s=(rng.randint(0, g // 10),),
        update_s=(round(ratio * g) + rng.randint(-99, 99),),
        assist_s=(rng.randint(4 * g // 5, 3 * g // 2),),
        switch_in_s=(rng.randint(0, g // 10),),
        switch_out_s=(rng.randint(0, g // 10),),
        order=rng.choice(["index", "ready"]),
    )


def draw(rng: random.Random, *, largest_step: int = 8) -> Instance:
    """A small instance of any kind: one or two groups, ties or none, stale work, lazy switches."""
    num_generators, num_trainers = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
    largest = rng.choice([3, 12, 100, 9973])
    size, window = rng.randint(1, largest_step), rng.choice([1, 1, 1, 2])

    def times(count: int, share: float) -> tuple[int, ...]:
        top = max(1, round(largest * share))
        return tuple(rng.randint(0, top) if rng.random() < 0.9 else 0 for _ in range(count))

    return Instance(
        num_micro_batches=size,
        num_steps=window,
        generate_s=times(num_generators, 1),
        score_s=times(num_generators, 0.2),
        update_s=times(num_trainers, rng.choice([0.1, 1])),
        assist_s=times(num_trainers, rng.choice([0.5, 2])),
        switch_in_s=times(num_trainers, 0.2),
        switch_out_s=times(num_trainers, 0.2),
        window=window,
        stale_limit=rng.randint(0, size) if window > 1 else 0,
        order=rng.choice(["index", "ready"]),
        lazy_switch=rng.random() < 0.2,
    )


def best_by_force(instance: Instance) -> tuple[float, int]:
    """The least time of the first step over all decisions, each simulated as a whole; and their number."""
    best, num_plans = float("inf"), 0
    script: list[bool] = []
    while True:
        asked: list[bool] = []

        def decide(bubble: Bubble, asked: list[bool] = asked, script: list[bool] = script) -> Decision:
            if bubble.step > 0:
                return Decision(assist=False, reason="another step")
            asked.append(len(asked) < len(script) and script[len(asked)])
            return Decision(asked[-1], "by force")

        best = min(best, simulate(instance, Policy("by force", decide)).last_update())
        num_plans += 1
        while asked and asked[-1]:
            asked.pop()
        if not asked:
            return best, num_plans
        script = [*asked[:-1], True]


def verify(num_instances: int) -> int:
    """Compare the search with brute force; returns the number of plans that brute force tried."""
    rng = seeded("verify")
    num_plans = 0
    for number in range(num_instances):
        instance = draw(rng)
        found, (best, tried) = search(instance), best_by_force(instance)
        replayed = simulate(instance, scripted(found.decisions)).last_update()
        assert found.exact, instance
        assert found.value == best == replayed, f"{number}: {found}, {best}, {replayed}, {instance}"
        num_plans += tried
    return num_plans


def table(num_instances: int) -> bool:
    """Print the table; returns whether the targets are met."""
    rng = seeded("figure 10")
    met = True
    print("search time in ms, median / largest (nodes, median)")
    print("   B " + "".join(f"{f't/g={ratio}':>20}" for ratio in RATIOS))
    for size in SIZES:
        cells = []
        for ratio in RATIOS:
            times, nodes = [], []
            for _ in range(num_instances):
                instance = plausible(rng, size, ratio)
                start = time.perf_counter()
                found = search(instance)
                times.append(1000 * (time.perf_counter() - start))
                nodes.append(found.num_nodes)
            median = statistics.median(times)
            met &= size < 128 or median <= TARGET_MS.get(ratio, 6.0)
            cells.append(f"{f'{median:.2f} / {max(times):.1f} ({statistics.median(nodes):.0f})':>20}")
        print(f"{size:4} " + "".join(cells))
    return met


def same_without_bound(num_instances: int, size: int) -> None:
    """The bound changes the time only: compared with the memoised search alone."""
    rng = seeded("without bound")
    slow = quick = 0.0
    for ratio in RATIOS:
        for _ in range(num_instances):
            instance = plausible(rng, size, ratio)
            start = time.perf_counter()
            plain = search(instance, bounded=False)
            middle = time.perf_counter()
            assert search(instance).value == plain.value, instance
            slow, quick = slow + middle - start, quick + time.perf_counter() - middle
    print(f"B = {size}: the same optimum without the bound, which takes {slow / quick:.0f} times as long")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--instances", type=int, default=50, metavar="N", help="instances in each cell")
    parser.add_argument("--verify", type=int, metavar="N", help="compare N instances with brute force")
    options = parser.parse_args()
    if options.verify is not None:
        num_plans = verify(options.verify)
        print(f"{options.verify} instances, {num_plans} plans: the search equals brute force on every one")
        return 0
    met = table(options.instances)
    same_without_bound(2, 128)
    print("targets at B = 128 (median 3 ms at t/g = 0.1, else 6 ms): " + ("met" if met else "MISSED"))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
