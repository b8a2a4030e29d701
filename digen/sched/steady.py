"""The long run: the time per step once a run repeats itself, and the pattern of assists that makes it least.

A run of many steps is not the sum of its steps: stale work that a step finds done was done during the one before. A
finite run starts without any and ends without any, so that its mean is no rate. Durations that do not change make the
situation at the step boundaries recur; the mean over one cycle of them is the rate, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace
from operator import add
from typing import NamedTuple

from digen.errors import ConfigError
from digen.sched.model import Instance, Run
from digen.sched.tag import Bubble, Decision, Policy, StaleStart

_ENDLESS = 2**62


class Rate(NamedTuple):
    """How fast a run is in the long run."""

    step_s: float
    """Time per step."""
    exact: bool
    """Whether it is the mean over a cycle; otherwise that of the last half of the steps that were simulated."""


class Pattern(NamedTuple):
    """What to do in every step of the long run."""

    assists: tuple[int, ...]
    """Assists before the first update of a step: one entry for all steps, or several that take turns."""
    gate: float | None
    """A stale start is made if the step's commit is at least so many generations away; ``None``: none is made."""

    def policy(self) -> Policy:
        """The pattern as a TAG policy."""
        name = f"assists {self.assists}, gate {self.gate}"
        return Policy(name, self._decide, assists_before_update=max(self.assists), gate=self.opens)

    def num_assists(self, step: int) -> int:
        """Assists of a step."""
        return self.assists[step % len(self.assists)]

    def _decide(self, bubble: Bubble) -> Decision:
        wanted = self.num_assists(bubble.step)
        return Decision(not bubble.num_updated and bubble.num_assists < wanted, f"{wanted} assists a step")

    def opens(self, start: StaleStart) -> bool:
        """Whether a stale start is made."""
        instance = start.instance()
        if self.gate is None or start.until_commit_s is None or instance is None:
            return False
        return start.until_commit_s >= self.gate * math.fsum(instance.generate_s) / instance.num_generators


def steady_rate(instance: Instance, policy: Policy, *, period: int = 1, max_steps: int = 400) -> Rate:
    """The time per step of an endless run.

    Args:
        instance: durations and rules; its number of steps does not matter.
        policy: what to do; a pure function of what it is asked and of ``step % period``.
        period: steps after which the policy repeats itself.
        max_steps: steps to simulate while no situation recurs.

    Raises:
        ConfigError: ``max_steps`` is below 2.
    """
    if max_steps < 2:
        raise ConfigError(f"max_steps must be at least 2, got {max_steps}: a rate needs two step ends")
    *_, rate = rates(instance, policy, period=period, max_steps=max_steps)
    return rate


def rates(instance: Instance, policy: Policy, *, period: int = 1, max_steps: int = 400) -> Iterator[Rate]:
    """The rate as far as it is known after every simulated step: infinite after the first, exact after the last."""
    run = Run(replace(instance, num_steps=_ENDLESS), policy)
    seen: dict[Hashable, int] = {}
    while run.step < max_steps:
        before = run.step
        while run.step == before:
            run.play_instant()
        key = run.boundary(), run.step % period
        ends, first = run.step_ends, seen.setdefault(key, run.step)
        if first < run.step:
            yield Rate(_mean(ends, first - 1), exact=True)
            return
        yield Rate(_mean(ends, run.step // 2 - 1) if run.step > 1 else math.inf, exact=False)


def _mean(ends: list[float], first: int) -> float:
    """Mean time of the steps after ``first``."""
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


class Load(NamedTuple):
    """The least that the groups of a pool have to do per step, shared out evenly over them."""

    generators_s: float
    """Generators, if the trainers never assist: B generations, B scores and a load."""
    saved_s: float
    """What an assist takes off the generators."""
    trainers_s: float
    """Trainers, if they never assist: B updates and a commit; under hold they wait for the load too."""
    added_s: float
    """What an assist adds to the trainers."""

    @classmethod
    def of(cls, instance: Instance) -> Load:
        """The load of an instance with generators."""
        size, generators, trainers = instance.num_micro_batches, instance.num_generators, instance.num_trainers
        # Work that is shared out ideally takes 1 / (sum of the speeds).
        saved = 0 if 0 in instance.generate_s else 1 / math.fsum(1 / duration for duration in instance.generate_s)
        score = min(instance.score_s) / generators
        update = min(instance.update_s) / trainers
        switches = (0,) * trainers if instance.lazy_switch else map(add, instance.switch_in_s, instance.switch_out_s)
        added = min(map(add, instance.assist_s, switches)) / trainers
        waits = instance.load_s if instance.sync == "hold" else 0
        return cls(size * (saved + score) + instance.load_s, saved, size * update + instance.commit_s + waits, added)

    def bound(self, num_assists: float) -> float:
        """No step with so many assists takes less in the long run."""
        return max(self.generators_s - num_assists * self.saved_s, self.trainers_s + num_assists * self.added_s)

    @property
    def balance(self) -> float:
        """The number of assists, not whole, at which both sides take equally long; 0 if the trainers have enough."""
        both = self.saved_s + self.added_s
        return max(0.0, (self.generators_s - self.trainers_s) / both) if both else 0.0


def rate_bound(instance: Instance) -> float:
    """A lower bound on the time per step, whatever is decided. The number of assists may alternate, hence is not whole.

    A generator that is busy while two versions are published skips one load, which the bound counts.
    """
    load = Load.of(instance)
    return load.bound(min(load.balance, instance.num_micro_batches))
