"""The policy ``horizon``: it looks past the end of the step.

On-policy every step is alone, and the better of Algorithm 2 and TAG-first is taken for it, from the live state. With
stale work (TCSS) a step that ends sooner may leave less for the next one, so that the best single step is not the best
run: there the long run of the exact model is computed for every number of assists, the same in all steps or taking
turns, with stale starts always, only early ones, or none, and the best is followed. The last step is alone again.

The search for it goes on for a bounded time at every question and starts anew when the measured durations have moved;
until it is complete the best pattern so far is followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from digen.sched.bubbles import StepModel, StepState
from digen.sched.lookahead import MAX_NODES, NUM_REMEMBERED, at_bubble, node_limit
from digen.sched.model import Instance
from digen.sched.search import Bound, search, tag_first
from digen.sched.steady import Load, Pattern, rates
from digen.sched.tag import Bubble, Decision, Policy, StaleStart, measuring

MAX_TASKS = 800
"""Tasks of the long run that one question may simulate: about four milliseconds."""

_MAX_STEPS = 24
"""Steps after which a pattern that has not repeated itself is judged by its last half."""

_SMALL = 32
"""Micro-batches up to which assists at any instant are searched: in longer steps they gain next to nothing."""

_GATES = (0.5, 1.0)
"""Gates to try besides none, in generations."""

_MOVED = 0.03
"""Durations have moved when one has by more than this share of the longest."""

_TICKS = 10_000
"""Ticks in the longest duration: in whole ticks situations recur."""


class Plan(NamedTuple):
    """What the long run asks for."""

    pattern: Pattern | None
    """``None``: stay on-policy, every step on its own."""
    step_s: float
    """Its time per step."""


def horizon(max_tasks: int = MAX_TASKS, max_nodes: int = MAX_NODES // 2) -> Policy:
    """The better of search and tag_first for a step that is alone; over steps, the best pattern of the long run."""
    planner = Planner(max_tasks)
    path: dict[StepState, bool] = {}

    @lru_cache(NUM_REMEMBERED)
    def alone(instance: Instance, state: StepState) -> StepPlan:
        return best_of_step(instance, state, max_nodes=max_nodes)

    def decide(bubble: Bubble) -> Decision:
        nonlocal path
        if not path and (bubble.reopened or (bubble.can_update and bubble.num_updated)):
            return Decision(assist=False, reason="nothing to reopen")
        situation = bubble.situation()
        if situation is None:
            return measuring(bubble)
        instance, state = situation
        plan = planner.plan(instance) if state.ahead else None
        if plan is None or plan.pattern is None:
            state = state._replace(ahead=0)
            if state in path:
                return Decision(path[state], "on the way of the best trainer schedule")
            found = alone(instance, state)
            path = found.path
            return found.decision
        path = {}
        wanted = plan.pattern.num_assists(bubble.step)
        reason = f"{wanted} assists in this step, {plan.step_s:.6g} s a step in the long run"
        if bubble.num_updated:
            return Decision(assist=False, reason=reason)
        more = max(0, wanted - bubble.num_assists)
        model = StepModel(instance)
        return Decision(more > 0, reason, predicted_s=model.advance(state, first=more, ask=False)[0])

    def gate(start: StaleStart) -> bool:
        instance = start.instance()
        if instance is None:
            return True
        pattern = planner.plan(instance).pattern
        return pattern is not None and pattern.opens(start)

    return Policy("horizon", decide, gate=gate, reopens=True)


class StepPlan(NamedTuple):
    """How to go on with a step that is alone."""

    value: float
    """Time to the end of its last update."""
    decision: Decision
    """The next decision."""
    path: dict[StepState, bool]
    """What to do in the situations to come, where neither Algorithm 2 nor TAG-first gets there."""


def best_of_step(instance: Instance, state: StepState, *, max_nodes: int = MAX_NODES // 2) -> StepPlan:
    """The better of TAG-first and Algorithm 2 for the rest of one step; if neither meets the lower bound, a short step
    is also searched for schedules in which the trainers assist at any instant. ``max_nodes`` limits the searches.
    """
    value, n = tag_first(instance, state)
    assist, reason, path = n > 0, f"{n} more assists before the first update", dict[StepState, bool]()
    model = StepModel(instance, reopen=True)
    least = Bound(model)(state)
    if least < value:
        plan = search(instance, state, max_nodes=node_limit(instance, max_nodes))
        if plan.value < value:
            value, assist = plan.value, at_bubble(instance, state) and plan.decisions[0]
            reason = f"{sum(plan.decisions)} more assists in bubbles"
    if least < value and instance.num_micro_batches <= _SMALL:
        anytime = search(instance, state, max_nodes=max(1, max_nodes // 2), reopen=True)
        if anytime.value < value:
            value, assist, path = anytime.value, anytime.decisions[0], _follow(model, state, anytime.decisions)
            reason = f"{sum(anytime.decisions)} more assists at any instant"
    return StepPlan(value, Decision(assist, f"{reason}, last update in {value:.6g} s", predicted_s=value), path)


def _follow(model: StepModel, start: StepState, decisions: tuple[bool, ...]) -> dict[StepState, bool]:
    """The situations in which ``decisions`` are taken."""
    path: dict[StepState, bool] = {}
    _, state = model.advance(start)
    for assist in decisions:
        assert state is not None  # noqa: S101 - there are as many bubbles as decisions
        path[state] = assist
        _, state = model.advance(model.assist(state) if assist else model.skip(state))
    return path


class Planner:
    """Finds the best pattern for the durations of a run, a little at every question."""

    def __init__(self, max_tasks: int = MAX_TASKS) -> None:
        self._max_tasks = max_tasks
        self._instance: Instance | None = None
        self._progress: Iterator[tuple[Plan, int]] = iter(())
        self._plan: Plan

    def plan(self, instance: Instance) -> Plan:
        """The best plan found so far."""
        if self._instance is None or moved(self._instance, instance):
            self._instance = instance
            self._progress = explore(instance)
        spent = 0
        while spent < self._max_tasks and (step := next(self._progress, None)) is not None:
            self._plan, num_tasks = step
            spent += num_tasks
        return self._plan


def explore(instance: Instance) -> Iterator[tuple[Plan, int]]:
    """Try pattern after pattern: yields the best plan so far and the number of tasks just simulated, often."""
    ticks, tick_s = _in_ticks(instance)
    load = Load.of(ticks)
    best = Plan(None, _on_policy_rate(ticks))
    step_tasks = 3 * instance.num_micro_batches
    yield best._replace(step_s=best.step_s * tick_s), MAX_TASKS

    def attempt(pattern: Pattern) -> Iterator[tuple[Plan, int]]:
        nonlocal best
        mean = sum(pattern.assists) / len(pattern.assists)
        if load.bound(mean) >= best.step_s:
            return
        step_s = math.inf
        for rate in rates(ticks, pattern.policy(), period=len(pattern.assists), max_steps=_MAX_STEPS):
            step_s = rate.step_s
            yield best._replace(step_s=best.step_s * tick_s), step_tasks
        if step_s < best.step_s:
            best = Plan(pattern, step_s)
            yield best._replace(step_s=best.step_s * tick_s), 0

    counts = sorted(range(instance.num_micro_batches + 1), key=lambda n: abs(n - load.balance))
    for n in counts:
        yield from attempt(Pattern((n,), 0.0))
    for n in counts:
        for turns in ((n, n + 1), (n, n, n + 1), (n, n + 1, n + 1)):
            if n < instance.num_micro_batches:
                yield from attempt(Pattern(turns, 0.0))
    assists = best.pattern.assists if best.pattern is not None else (round(load.balance),)
    for gate in _GATES:
        yield from attempt(Pattern(assists, gate))


def moved(old: Instance, new: Instance) -> bool:
    """Whether two instances differ enough to plan anew."""
    longest = max(*old.generate_s, *old.update_s, *old.assist_s)
    for field in fields(Instance):
        before, now = getattr(old, field.name), getattr(new, field.name)
        if before == now:
            continue
        if not field.name.endswith("_s"):
            return True
        pairs = zip(before, now, strict=False) if isinstance(before, tuple) else ((before, now),)
        if isinstance(before, tuple) and len(before) != len(now):
            return True
        if any(abs(one - other) > _MOVED * longest for one, other in pairs):
            return True
    return False


def _in_ticks(instance: Instance) -> tuple[Instance, float]:
    """The instance in whole ticks, and the length of a tick. Whole durations stay as they are."""
    durations = {field.name: getattr(instance, field.name) for field in fields(Instance) if field.name.endswith("_s")}
    flat = [item for value in durations.values() for item in (value if isinstance(value, tuple) else (value,))]
    tick = 1 if all(value == int(value) for value in flat) else max(flat) / _TICKS

    def ticks(value: Any) -> Any:
        return tuple(map(ticks, value)) if isinstance(value, tuple) else round(value / tick)

    return replace(instance, **{name: ticks(value) for name, value in durations.items()}), tick


def _on_policy_rate(instance: Instance) -> float:
    """The time per step if every step is on its own: all of them begin alike, with new weights."""
    alone = replace(instance, window=1, stale_limit=0)
    state = StepModel(alone).start()
    hold = instance.sync == "hold"
    if not hold:
        state = state._replace(outdated=(1 << instance.num_generators) - 1)
    value = best_of_step(alone, state, max_nodes=MAX_NODES // 5).value
    return value + instance.commit_s + (instance.load_s if hold else 0)
