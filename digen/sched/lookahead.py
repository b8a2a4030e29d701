"""TAG policies that look ahead: they ask the exact model what every choice would come to (paper 4).

At an emerging bubble the live state and the durations measured so far become an instance of the model, Algorithm 2 (or
the scan for the best number of assists before the first update) is run on it, and its first decision is taken. At the
next bubble everything is computed anew from better measurements, so that errors do not add up; a situation that recurs
exactly, as in virtual time, is computed once. Until a generation, an update and an assist have been measured there is
nothing to compute from: the first bubble assists, so that there will be, and the others are skipped.

What the model leaves out, and the plan is therefore only an estimate of: scorers of their own (a score then costs the
generators nothing), groups that span several micro-batches (one that waits for its group counts as not yet scored),
and ``max_generating``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from digen.events import TaskKind
from digen.sched.bubbles import KINDS, LOAD, Running, StepModel, StepState
from digen.sched.model import Instance
from digen.sched.search import search, tag_first
from digen.sched.state import State, Step, Worker, measured_as
from digen.sched.tag import Bubble, Decision, Policy, measuring

if TYPE_CHECKING:
    from collections.abc import Callable

    from digen.sched.profile import Profile

MAX_NODES = 500
"""Moves that one decision may simulate, a quarter of it where there are several generators: their moves take four times
as long. That is up to ten milliseconds for 128 micro-batches; beyond it the best plan so far is used."""

_KINDS: dict[TaskKind, int] = KINDS | {"encode": LOAD, "evaluate": LOAD}
"""What generators do, in the model's terms: who encodes or evaluates is busy for a while, as with a load."""

NUM_REMEMBERED = 1024
"""Situations whose answer a policy remembers."""

_SOON_S = 1e-6
"""What a task that has lasted longer than expected still takes."""


def searching(max_nodes: int = MAX_NODES) -> Policy:
    """The paper's bubble-triggered search (BTS): the first decision of Algorithm 2's best plan."""

    @lru_cache(NUM_REMEMBERED)
    def compute(instance: Instance, state: StepState) -> Decision:
        if not at_bubble(instance, state):
            return Decision(assist=False, reason="the model sees no bubble here")
        plan = search(instance, state, max_nodes=node_limit(instance, max_nodes))
        kind = "best" if plan.exact else f"best of {plan.num_nodes} moves"
        reason = f"{kind}: {sum(plan.decisions)} more assists, last update in {plan.value:.6g} s"
        return Decision(plan.decisions[0], reason, predicted_s=plan.value)

    def decide(bubble: Bubble) -> Decision:
        situation = bubble.situation()
        return measuring(bubble) if situation is None else compute(*situation)

    return Policy("search", decide)


def tag_first_policy() -> Policy:
    """The best number of assists before the step's first update, none after it; computed anew before each."""

    @lru_cache(NUM_REMEMBERED)
    def compute(instance: Instance, state: StepState) -> Decision:
        value, n = tag_first(instance, state)
        reason = f"{n} more assists before the first update, last update in {value:.6g} s"
        return Decision(n > 0, reason, predicted_s=value)

    def decide(bubble: Bubble) -> Decision:
        if bubble.num_updated:
            return Decision(assist=False, reason="updates have begun")
        situation = bubble.situation()
        return measuring(bubble) if situation is None else compute(*situation)

    return Policy("tag_first", decide, assists_before_update=2**31)


def node_limit(instance: Instance, max_nodes: int) -> int:
    """Moves that a decision may simulate: fewer where each of them takes longer."""
    return max_nodes if instance.num_generators == instance.num_trainers == 1 else max(1, max_nodes // 4)


def situation(state: State, step: Step, profile: Profile, now: float) -> tuple[Instance, StepState] | None:
    """The live state as the model sees it, or ``None`` while a duration that it needs is unknown.

    Nor does the model know of losses: of micro-batches that come again after later ones (of this step or the next) or
    were given up, of tasks that are void, and of generators that all wait for weights.
    """
    instance, generators = measured(state, profile), _in_order(state)
    size, num_pending = len(step.micro_batches), len(step.pending)
    later = [other for other in state.steps.values() if other.number > step.number]
    again = (num_pending and step.pending[0] + num_pending != size) or any(
        other.num_generating or other.rollouts for other in later
    )
    given_up = num_pending + step.num_generating + len(step.rollouts) != size
    if (
        instance is None
        or again
        or given_up
        or any(worker.task is not None and worker.task.void for worker in generators)
    ):
        return None
    found = _compress(state, step, generators, lambda worker, kind: _mean(profile, worker, kind) or 0.0, now)
    return (instance, found) if found.running else None


def measured(state: State, profile: Profile) -> Instance | None:
    """The durations measured so far and the rules of the run, or ``None`` while a duration is unknown."""
    generators = _in_order(state)
    generate = [_mean(profile, worker, "generate") for worker in generators]
    score = [0.0 if state.scores_apart else _mean(profile, worker, "score") for worker in generators]
    update, assist = profile.mean("trainer", "update"), profile.mean("trainer", "assist")
    if update is None or assist is None or None in generate or None in score:
        return None
    rules = state.rules
    return Instance(
        num_micro_batches=state.plan.num_micro_batches,
        generate_s=tuple(value for value in generate if value is not None),
        score_s=tuple(value for value in score if value is not None),
        update_s=(update,),
        assist_s=(assist,),
        switch_in_s=(profile.mean("trainer", "switch_in") or 0.0,),
        switch_out_s=(profile.mean("trainer", "switch_out") or 0.0,),
        commit_s=(profile.mean("trainer", "commit") or 0.0) + (profile.mean("trainer", "publish") or 0.0),
        load_s=profile.mean("generator", "load") or 0.0,
        window=rules.window,
        stale_limit=rules.stale_limit,
        sync="hold" if rules.hold else "pull",
        order="index" if rules.index_order else "ready",
        lazy_switch=rules.lazy_switch,
    )


def _in_order(state: State) -> list[Worker]:
    return sorted(state.generators.values(), key=lambda worker: worker.position)


def _mean(profile: Profile, worker: Worker, kind: TaskKind) -> float | None:
    """The worker's own mean, or else its role's."""
    own = profile.mean(worker.name, kind)
    return own if own is not None else profile.mean(worker.role, kind)


def until_commit(state: State, profile: Profile, now: float) -> float | None:
    """Predicted time until the trainer has committed the current step; ``None`` while no update has been measured."""
    update, task = profile.mean("trainer", "update"), state.trainer.task
    if update is None:
        return None
    left: float = 0
    if task is not None:
        left = max(0, task.started + (profile.mean("trainer", task.measured_as) or 0) - now)
        if task.kind == "commit":
            return left
    for kind, argument in state.trainer_program:
        left += profile.mean("trainer", measured_as(kind, argument)) or 0
    step = state.current
    num_updates = len(step.micro_batches) - len(step.settled) - (task is not None and task.kind == "update")
    return left + num_updates * update + (profile.mean("trainer", "commit") or 0)


def _compress(
    state: State, step: Step, generators: list[Worker], mean: Callable[[Worker, TaskKind], float], now: float
) -> StepState:
    """The state of ``step`` at a bubble of its trainer, in the model's terms.

    Micro-batches of the step are pending then, so that nothing of a later step has begun.
    """
    indexed = state.rules.index_order
    first = step.next_index if indexed else 0
    running, busy, outdated = [], set(), 0
    for number, worker in enumerate(generators):
        task = worker.task
        version = task.version if task is not None and task.kind == "load" else worker.version
        outdated |= (version != state.trainer.version) << number
        if task is not None:
            kind = LOAD if task.void else _KINDS[task.kind]
            left = max(_SOON_S, task.started + mean(worker, task.kind) - now)
            running.append((task.id, Running(left, number, kind, 0 if kind == LOAD else task.index * indexed)))
            if not task.void:
                busy.add(task.index)
    running.sort(key=lambda item: item[0] if indexed else item[1].worker)
    # Everything of this step that is generated, not being scored, and not yet ready waits for a score.
    unscored = [
        index for index in step.rollouts if index not in step.ready and index not in step.settled and index not in busy
    ]
    empty = [index for index in step.settled if index >= first] if indexed else []
    available = [index - first for index in (*step.ready, *empty)] if indexed else range(len(step.ready))
    size, limit, later_steps = len(step.micro_batches), state.rules.stale_limit, state.horizon - step.number - 1
    return StepState(
        pending=len(step.pending),
        queue=tuple(index * indexed for index in unscored),
        ready=sum(1 << place for place in available),
        updates=size - (first if indexed else len(step.settled)),
        ahead=size * later_steps if limit >= size else limit * (later_steps > 0),
        outdated=outdated,
        switched=int(state.switched),
        running=tuple(task for _, task in running),
    )


def at_bubble(instance: Instance, state: StepState) -> bool:
    """Whether the model sees a bubble where the scheduler does."""
    elapsed, bubble = StepModel(instance).advance(state)
    return elapsed == 0 and bubble is not None
