"""The best trainer schedule, which policies are measured against, is one: held to brute force, tick by tick."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from digen.errors import ConfigError
from digen.sched.model import Instance, simulate
from digen.sched.tag import policy_from
from experiments.policies import best_trainer_schedule, lower_bound
from experiments.search_time import draw, seeded

Task = tuple[float, int, str, int, tuple[tuple[str, float], ...]]
"""Ticks left, worker, kind, micro-batch, what follows without a choice."""
Ledger = tuple[int, tuple[int, ...], frozenset[int], int, tuple[Task, ...]]
"""Pending, queue, ready, updates that have not begun, tasks in order of start."""


class BruteForce:
    """All choices at every event, or at every tick, simulated a tick at a time; nothing is estimated or cut off."""

    def __init__(self, instance: Instance, *, every_tick: bool = False, free_generators: bool = False) -> None:
        self.instance, self.every_tick, self.free_generators = instance, every_tick, free_generators
        self.num_generators = instance.num_generators
        self.least = cache(self.least)  # type: ignore[method-assign]

    def best(self) -> float:
        size = self.instance.num_micro_batches
        return self.least((size, (), frozenset(), size, ()))

    def least(self, ledger: Ledger) -> float:
        """Ticks to the end of the last update, from an instant at which somebody may begin something."""
        if not ledger[3] and not any(kind == "update" for _, _, kind, _, _ in ledger[4]):
            return 0
        return self.choose(ledger, 0)

    def choose(self, ledger: Ledger, worker: int) -> float:
        pending, queue, ready, updates, tasks = ledger
        instance, place = self.instance, worker - self.num_generators
        if worker == self.num_generators and any(left == 0 and who < worker for left, who, *_ in tasks):
            return self.end(ledger)  # first what takes no time ends
        if place == instance.num_trainers:
            return self.tick(ledger)
        if worker in {task[1] for task in tasks}:
            return self.choose(ledger, worker + 1)
        following: list[Ledger] = []
        if place >= 0:
            if pending:
                program = (("assist", instance.assist_s[place]), ("back", instance.switch_out_s[place]))
                assist = (instance.switch_in_s[place], worker, "switch", instance.num_micro_batches - pending, program)
                following.append((pending - 1, queue, ready, updates, (*tasks, assist)))
            next_index = instance.num_micro_batches - updates if instance.order == "index" else min(ready, default=-1)
            if next_index in ready:
                update = (instance.update_s[place], worker, "update", next_index, ())
                following.append((pending, queue, ready - {next_index}, updates - 1, (*tasks, update)))
        else:
            if queue:
                score = (instance.score_s[worker], worker, "score", queue[0], ())
                following.append((pending, queue[1:], ready, updates, (*tasks, score)))
            if pending and (self.free_generators or not queue):
                index = instance.num_micro_batches - pending
                generate = (instance.generate_s[worker], worker, "generate", index, ())
                following.append((pending - 1, queue, ready, updates, (*tasks, generate)))
        if place >= 0 or self.free_generators or not following:
            following.append(ledger)
        return min(self.choose(one, worker + 1) for one in following)

    def tick(self, ledger: Ledger) -> float:
        *rest, tasks = ledger
        passed = 0
        while tasks and all(left for left, *_ in tasks):
            tasks = tuple((left - 1, *task) for left, *task in tasks)  # type: ignore[misc]
            passed += 1
            if self.every_tick:
                break
        if not tasks:
            return math.inf
        return passed + self.end((*rest, tasks))  # type: ignore[arg-type]

    def end(self, ledger: Ledger) -> float:
        pending, queue, ready, updates, tasks = ledger
        running: list[Task] = []
        begun: list[Task] = []
        for left, worker, kind, index, program in tasks:
            if left:
                running.append((left, worker, kind, index, program))
            elif kind in {"generate", "assist"}:
                queue = (*queue, index)
            elif kind == "score":
                ready |= {index}
            if not left and program:
                (name, duration), *more = program
                begun.append((duration, worker, name, index, tuple(more)))
        return self.least((pending, queue, ready, updates, (*running, *begun)))


def tiny(rng: random.Random, groups: tuple[int, int]) -> Instance:
    """A step of a few ticks; groups differ."""
    generators, trainers = groups

    def ticks(count: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randint(0, most) for _ in range(count))

    return Instance(
        num_micro_batches=rng.randint(1, 4 if groups == (1, 1) else 3),
        generate_s=ticks(generators, 6),
        score_s=ticks(generators, 2),
        update_s=ticks(trainers, 6),
        assist_s=ticks(trainers, 6),
        switch_in_s=ticks(trainers, 1),
        switch_out_s=ticks(trainers, 1),
        order=rng.choice(["index", "ready"]),
    )


def pair(size: int, *times: int) -> Instance:
    """One generator and one trainer: g, r, u, h, and what it takes to switch there and back."""
    names = ("generate_s", "score_s", "update_s", "assist_s", "switch_in_s", "switch_out_s")
    given: dict[str, Any] = dict.fromkeys(names, (0,)) | {
        name: (time,) for name, time in zip(names, times, strict=False)
    }
    return Instance(num_micro_batches=size, order="ready", **given)


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_it_is_that_of_brute_force(groups: tuple[int, int]) -> None:
    rng = seeded(f"brute force {groups}")
    for number in range(500):
        drawn = tiny(rng, groups)
        assert best_trainer_schedule(drawn) == BruteForce(drawn).best(), f"run {number}: {drawn}"


def test_generators_that_are_free_too() -> None:
    rng = seeded("free generators")
    gained = 0
    for number in range(150):
        drawn = tiny(rng, rng.choice([(1, 1), (1, 1), (2, 1), (1, 2)]))
        best = best_trainer_schedule(drawn, free_generators=True)
        assert best == BruteForce(drawn, free_generators=True).best(), f"run {number}: {drawn}"
        gained += best < best_trainer_schedule(drawn)
    assert gained > 5


def test_beginning_between_two_events_pays_only_where_the_order_is_index() -> None:
    rng = seeded("every tick")
    gained = {"index": 0, "ready": 0}
    for _ in range(250):
        drawn = tiny(rng, (1, 1))
        best = BruteForce(drawn, every_tick=True).best()
        assert best <= best_trainer_schedule(drawn)
        gained[drawn.order] += best < best_trainer_schedule(drawn)
    assert gained["ready"] == 0
    assert gained["index"] > 0


def test_no_policy_is_better() -> None:
    rng = seeded("no policy")
    names = ["never", "greedy", "threshold", "static(1)", "static(2)", "search", "tag_first", "horizon"]
    for number in range(250):
        drawn = replace(draw(rng, largest_step=5), window=1, num_steps=1, stale_limit=0)
        best = best_trainer_schedule(drawn)
        values = {name: simulate(drawn, policy_from(name)).last_update() for name in names}
        assert best <= min(values.values()), f"run {number}: {values} of {drawn}"


def test_bound_and_optima_are_in_order() -> None:
    rng = seeded("order")
    for _ in range(300):
        drawn = pair(rng.randint(1, 7), *(rng.randint(0, most) for most in (30, 6, 30, 30, 6, 6)))
        free, best = best_trainer_schedule(drawn, free_generators=True), best_trainer_schedule(drawn)
        assert lower_bound(drawn) <= free <= best, drawn
        assert best == simulate(drawn, policy_from("tag_first")).last_update(), drawn


@pytest.mark.parametrize(
    ("drawn", "best", "free"),
    [
        (pair(4, 100, 20, 10, 50, 0, 20), 250, 250),  # assists while updates are ready
        (pair(10, 32, 1, 1, 6), 75, 64),  # the slow generator takes the last micro-batch unless it waits
        (pair(2, 100, 0, 100, 50), 300, 250),  # a result waits for its score behind a whole generation
        (pair(2, 100, 5, 40, 200, 20, 20), 250, 250),  # no assist pays
    ],
)
def test_known_steps(drawn: Instance, best: int, free: int) -> None:
    assert best_trainer_schedule(drawn) == best
    assert best_trainer_schedule(drawn, free_generators=True) == free


@pytest.mark.parametrize("changes", [{"num_steps": 2}, {"barrier": True}, {"generate_s": ()}])
def test_other_runs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one step of a run with generators and without a barrier"):
        best_trainer_schedule(replace(pair(2, 1, 1, 1, 1), **changes))
