"""TAG policies that look ahead: they ask the exact model what every choice would come to (paper 4).

At an emerging bubble the live state and the durations measured so far become an instance of the model, Algorithm 2 (or
the scan for the best number of assists before the first update) is run on it, and its first decision is taken. At the
next bubble everything is computed anew from better measurements, so that errors do not add up. Until a generation, an
update and an assist have been measured there is nothing to compute from: the first bubble of a run assists.

What the model leaves out, and the plan is therefore only an estimate of: scorers of their own (a score then costs the
generators nothing), groups that span several micro-batches (one that waits for its group counts as not yet scored),
and ``max_generating``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from digen.events import TaskKind
from digen.sched.bubbles import AHEAD, GENERATE, LATER, LOAD, SCORE, Running, StepModel, StepState
from digen.sched.model import Instance
from digen.sched.search import search, tag_first
from digen.sched.state import State, Step, Task, Worker
from digen.sched.tag import Bubble, Decision, Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from digen.sched.profile import Profile

MAX_NODES = 2000
"""Moves that one decision may simulate; some ten milliseconds. Beyond them the best plan so far is used."""

_UNKNOWN = Decision(assist=True, reason="durations are not measured yet")


def searching(max_nodes: int = MAX_NODES) -> Policy:
    """The paper's bubble-triggered search (BTS): the first decision of Algorithm 2's best plan."""

    def decide(bubble: Bubble) -> Decision:
        situation = bubble.situation()
        if situation is None:
            return _UNKNOWN
        instance, state = situation
        if not _at_bubble(instance, state):
            return Decision(assist=False, reason="the model sees no bubble here")
        strategy = search(instance, state, max_nodes=max_nodes)
        assists = sum(strategy.decisions)
        kind = "best" if strategy.exact else f"best of {strategy.num_nodes} moves"
        return Decision(strategy.decisions[0], f"{kind}: {assists} more assists, last update in {strategy.value:.3g} s")

    return Policy("search", decide)


def tag_first_policy() -> Policy:
    """The best number of assists before the step's first update, none after it; computed anew before each."""

    def decide(bubble: Bubble) -> Decision:
        if bubble.num_updated:
            return Decision(assist=False, reason="updates have begun")
        situation = bubble.situation()
        if situation is None:
            return _UNKNOWN
        value, n = tag_first(*situation)
        return Decision(n > 0, f"{n} more assists before the first update, last update in {value:.3g} s")

    return Policy("tag_first", decide, assists_before_update=2**31)


def situation(state: State, step: Step, profile: Profile, now: float) -> tuple[Instance, StepState] | None:
    """The live state as the model sees it, or ``None`` while a duration that it needs is unknown."""
    generators = sorted(state.generators.values(), key=lambda worker: worker.position)

    def mean(worker: Worker, kind: TaskKind) -> float | None:
        own = profile.mean(worker.name, kind)
        return own if own is not None else profile.mean(worker.role, kind)

    generate = [mean(worker, "generate") for worker in generators]
    score = [0.0 if state.scorers else mean(worker, "score") for worker in generators]
    update, assist = profile.mean("trainer", "update"), profile.mean("trainer", "assist")
    if update is None or assist is None or None in generate or None in score:
        return None
    switch = profile.mean("trainer", "switch") or 0.0
    size, rules = len(step.micro_batches), state.rules
    instance = Instance(
        num_micro_batches=size,
        generate_s=tuple(value for value in generate if value is not None),
        score_s=tuple(value for value in score if value is not None),
        update_s=(update,),
        assist_s=(assist,),
        switch_in_s=(switch,),
        switch_out_s=(switch,),
        load_s=profile.mean("generator", "load") or 0.0,
        window=rules.window,
        stale_limit=rules.stale_limit,
        sync="hold" if rules.hold else "pull",
        order="index" if rules.index_order else "ready",
    )
    return instance, _compress(state, step, generators, lambda worker, kind: mean(worker, kind) or 0.0, now)


def _compress(
    state: State, step: Step, generators: list[Worker], mean: Callable[[Worker, TaskKind], float], now: float
) -> StepState:
    """The state of ``step`` at a bubble of its trainer, in the model's terms."""
    indexed = state.rules.index_order
    first = step.next_index if indexed else 0
    running = []
    busy = set()
    for number, worker in enumerate(generators):
        if (task := worker.task) is not None:
            kind = _kind(task, step)
            left = max(0.0, task.started + mean(worker, task.kind) - now)
            running.append((task.id, Running(left, number, kind, task.index * indexed if kind <= SCORE else 0)))
            busy.add((task.step, task.index))
    running.sort(key=lambda item: item[0] if indexed else item[1].worker)
    # Everything of this step that is generated, not being scored, and not yet ready waits for a score.
    unscored = [
        index
        for index in step.rollouts
        if index not in step.ready and index not in step.settled and (step.number, index) not in busy
    ]
    empty = [index for index in step.settled if index >= first] if indexed else []
    available = [index - first for index in (*step.ready, *empty)] if indexed else range(len(step.ready))
    following = step.number + 1
    ahead = 0
    if following < state.horizon:
        next_step = state.ledger(following)
        ahead = min(state.rules.stale_limit - next_step.num_stale, len(next_step.pending))
    return StepState(
        pending=len(step.pending),
        queue=tuple(index * indexed for index in unscored),
        ready=sum(1 << place for place in available),
        updates=len(step.micro_batches) - (first if indexed else len(step.settled)),
        ahead=max(0, ahead),
        later=sum(number > step.number for number, _, _ in state.scoring_queue),
        outdated=sum(1 << i for i, worker in enumerate(generators) if worker.version != state.trainer.version),
        running=tuple(task for _, task in running),
    )


def _kind(task: Task, step: Step) -> int:
    if task.kind == "load":
        return LOAD
    if task.kind == "score":
        return SCORE if task.step == step.number else LATER
    return GENERATE if task.step == step.number else AHEAD


def _at_bubble(instance: Instance, state: StepState) -> bool:
    elapsed, bubble = StepModel(instance).advance(state)
    return elapsed == 0 and bubble is not None
