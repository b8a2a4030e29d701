"""Who does what next (SelectWorker and lines 5 to 9, 18 to 22 of Algorithm 1).

Order inside one instant, after every completion of that instant was applied: commit and publish, then generators by
index (load, score, generate; paper 3.3), then the trainer. So a generator never starts on weights that are replaced at
that very instant, and it wins the race for the last pending micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from digen.events import Cause, TaskKind
from digen.sched.state import State, Step, Task, Worker
from digen.sched.tag import Bubble, Decision, Durations

if TYPE_CHECKING:
    from collections.abc import Callable

    from digen.sched.bubbles import StepState
    from digen.sched.model import Instance
    from digen.sched.tag import Policy

    Ask = Callable[[State, Step], Decision]


def select(state: State, gate: Callable[[int], bool] | None = None) -> Task | None:
    """The next task for a generator or scorer, or ``None``. Takes the worker and the micro-batch out of the state.

    ``gate`` says whether a stale start for a later step, whose number it is given, is made.
    """
    if not state.someone_idle:
        return None
    return (
        _load(state)
        or _score(state)
        or _encode(state, ahead=False)
        or _generate(state, gate)
        or _evaluate(state)
        or _encode(state, ahead=True)
    )


def select_sync(state: State) -> Task | None:
    """A publication or a commit that is due, or ``None``: the trainer does them before anything else.

    A commit waits until the weights that it replaces are being evaluated, if they are to be; that task comes then.
    """
    trainer, program = state.trainer, state.trainer_program
    if trainer.busy or (program and program[0][0] not in {"snapshot", "checkpoint"}):
        return None
    if state.publish_due:
        state.publish_due = False
        version = trainer.version
        return _task("publish", trainer, version - 1, argument=(version,), version=version)
    if program or state.holding or state.step >= state.last_step:
        return None
    step = state.current
    if not step.complete:
        return None
    if state.evaluation_due is not None:
        return _evaluate(state)
    indices = tuple(sorted(index for index, outcome in step.settled.items() if outcome == "updated"))
    scale = step.assembler.gradient_scale
    argument = (step.number, indices) if scale is None else (step.number, indices, scale)
    return _task("commit", trainer, step.number, argument=argument, version=step.number + 1)


def select_trainer(state: State, policy: Policy, ask: Ask) -> Task | None:
    """The trainer's next task, or ``None``: a bubble.

    In order: what its program says (an assist that was decided, a snapshot, a checkpoint), an update, and in a bubble
    whatever ``ask`` decides. Without generators (mode colocated) it also evaluates, scores and generates.
    """
    trainer = state.trainer
    if trainer.busy:
        return None
    if state.trainer_program:
        if state.saves_late:
            return None
        kind, argument = state.trainer_program.popleft()
        return _program_task(state, kind, argument)
    alone = state.alone
    if alone and state.evaluation_due is not None:
        return _evaluate_task(state, trainer)
    if state.holding or state.step >= state.last_step:
        return None
    step = state.current
    eager = _eager(policy, step)
    may_ask = bool(state.generators) and not state.bubble_asked
    if eager and may_ask and _can_assist(state, step) and _decide(state, step, ask):
        return select_trainer(state, policy, ask)
    index = next_update(state, step)
    bubble = index is None and may_ask and not eager
    if bubble and _can_assist(state, step) and _decide(state, step, ask):
        return select_trainer(state, policy, ask)
    if state.switched and not step.complete:
        state.switched = False
        return _task("switch", trainer, step.number, argument=("train",), version=trainer.version)
    if index is not None:
        return _update(state, step, index)
    return (_trainer_score(state, step) or _trainer_generate(state, step)) if alone else None


def bubble_emerges(state: State, policy: Policy) -> bool:
    """Whether :func:`select_trainer` would ask the policy now."""
    if not state.rules.assists or state.trainer.busy:
        return False
    if state.trainer_program or state.publish_due or state.holding:
        return False
    if state.step >= state.last_step or state.bubble_asked or not state.generators:
        return False
    step = state.current
    eager = _eager(policy, step)
    return not step.complete and _can_assist(state, step) and (eager or next_update(state, step) is None)


def _eager(policy: Policy, step: Step) -> bool:
    """Whether the policy is asked even if a micro-batch is ready."""
    return policy.reopens or (step.num_assists < policy.assists_before_update and not step.num_updated)


def next_update(state: State, step: Step) -> int | None:
    """The micro-batch that the trainer may update on now, or ``None`` (Pop of line 19, of the current step only)."""
    if state.rules.barrier and step.num_scored < len(step.micro_batches):
        return None
    if not state.rules.index_order:
        return next(iter(step.ready), None)
    return step.next_index if step.next_index in step.ready else None


def describe_bubble(
    state: State, step: Step, durations: Durations, situation: Callable[[], tuple[Instance, StepState] | None]
) -> Bubble:
    """What a policy is told."""
    return Bubble(
        step=step.number,
        num_micro_batches=len(step.micro_batches),
        num_pending=len(step.pending),
        num_generating=step.num_generating,
        num_unscored=step.num_generated - step.num_scored,
        num_ready=len(step.ready),
        num_updated=step.num_updated,
        num_assists=step.num_assists,
        num_generators=len(state.generators),
        durations=durations,
        situation=situation,
        can_update=next_update(state, step) is not None,
        reopened=state.bubble_reopened,
    )


def idle_cause(state: State, worker: Worker) -> Cause:
    """Why a worker that got no task idles."""
    if worker.role == "trainer":
        return _trainer_cause(state)
    if worker.role == "scorer":
        return "wait_rollout" if state.step < state.last_step else "wait_work"
    if state.holding:
        return "wait_hold"
    if (step := state.candidate()) is not None:
        if not state.may_start(step):
            return "wait_encode"
        if not state.has_room(step):
            return "wait_memory"
        return "wait_weights" if state.may_generate else "wait_limit"
    if state.horizon == state.last_step:
        return "wait_work"
    return "wait_barrier" if state.rules.barrier else "wait_weights"


def _trainer_cause(state: State) -> Cause:
    if state.holding:
        return "wait_hold"
    if state.saves_late:
        return "wait_checkpoint"
    if state.step >= state.last_step:
        return "wait_work"
    step = state.current
    if step.complete and state.evaluation_due is not None:
        return "wait_evaluate"
    if state.rules.barrier:
        return "wait_barrier"
    if state.bubble_asked and step.pending:
        return "wait_skip"
    if step.ready:
        return "wait_order"
    if step.num_scored > len(step.settled):
        return "wait_group"
    return "wait_score" if step.num_generated > step.num_scored else "wait_rollout"


# ---- generators and scorers ------------------------------------------------------------------------------------


def _load(state: State) -> Task | None:
    publication = state.publication
    if publication is None:
        return None
    published = publication.version == state.trainer.version
    if state.holding and not (published and state.num_busy_generators == state.num_loading):
        return None  # hold: all load together, once the last running trajectory has ended
    due = [version for version in state.idle_versions() if version != publication.version]
    worker = state.pop_idle(due)
    if worker is None:
        return None
    return _task("load", worker, publication.version - 1, argument=(publication,), version=publication.version)


def _score(state: State) -> Task | None:
    if not state.scoring_queue:
        return None
    number = state.scoring_queue[0][0]
    step = state.ledger(number)
    if state.rules.barrier and step.num_generated < len(step.micro_batches):
        return None
    if state.scores_apart:
        worker = state.pop_idle_scorer()
    elif state.holding:
        return None
    else:
        worker = state.pop_idle(state.idle_versions())
    if worker is None:
        return None
    return _score_task(state, step, worker)


def _encode(state: State, *, ahead: bool) -> Task | None:
    # A step's prompts are encoded once, before its first generation; ahead of time by whoever has nothing else to do.
    step = None if state.holding else state.unencoded(ahead=ahead)
    worker = state.pop_idle(state.idle_versions()) if step is not None else None
    if step is None or worker is None:
        return None
    step.encoder = worker
    return _task("encode", worker, step.number, argument=(step.prompts(),), version=worker.version)


def _generate(state: State, gate: Callable[[int], bool] | None) -> Task | None:
    if state.holding or not state.may_generate:
        return None
    versions = state.idle_versions()
    if not versions:
        return None
    step = state.candidate()
    if step is None or not (state.may_start(step) and state.has_room(step)):
        return None
    admitted = [version for version in versions if state.admitted(step, version)]
    again = step.lost_versions.get(step.pending[0])
    if again in admitted:
        admitted = [again]  # the same samples as those that were lost
    if not admitted or (gate is not None and step.number > state.step and not gate(step.number)):
        return None
    worker = state.pop_idle(admitted)
    return _generate_task(state, step, worker, "generate") if worker is not None else None


def _evaluate(state: State) -> Task | None:
    # By a generator that its version can do nothing else for: mostly in the bubble before the next weights.
    if state.evaluation_due is None or state.holding or state.trainer.version not in state.idle_versions():
        return None
    worker = state.pop_idle([state.trainer.version])
    return _evaluate_task(state, worker) if worker is not None else None


# ---- the trainer -----------------------------------------------------------------------------------------------


def _program_task(state: State, kind: TaskKind, argument: Any) -> Task:
    trainer = state.trainer
    if kind == "assist":
        task: Task = argument
        return task
    return _task(kind, trainer, state.step, argument=argument, version=trainer.version)


def _can_assist(state: State, step: Step) -> bool:
    # Only the current step: its micro-batches are fresh on the trainer, and those of the next would delay this one.
    return bool(step.pending) and state.may_start(step) and state.may_generate and state.rules.assists


def _decide(state: State, step: Step, ask: Ask) -> bool:
    """Ask the policy; on yes, reserve the micro-batch and write the trainer's program."""
    state.bubble_asked = True
    if not ask(state, step).assist:
        return False
    step.num_assists += 1
    rules, program = state.rules, state.trainer_program
    assist = _generate_task(state, step, state.trainer, "assist")
    if rules.switches and not state.switched:
        program.append(("switch", ("generate",)))
    program.append(("assist", assist))
    if rules.switches and not rules.lazy_switch:
        program.append(("switch", ("train",)))
    state.switched = rules.switches and rules.lazy_switch
    return True


def _update(state: State, step: Step, index: int) -> Task:
    step.taken[index] = advantages = step.ready.pop(index)
    argument = (step.rollouts[index], advantages)
    return _task("update", state.trainer, step.number, index, argument=argument, version=step.rollouts[index].version)


def _trainer_score(state: State, step: Step) -> Task | None:
    if not state.scoring_queue or (state.rules.barrier and step.num_generated < len(step.micro_batches)):
        return None
    return _score_task(state, step, state.trainer)


def _trainer_generate(state: State, step: Step) -> Task | None:
    return _generate_task(state, step, state.trainer, "generate") if step.pending else None


# ---- tasks -----------------------------------------------------------------------------------------------------


def _score_task(state: State, step: Step, worker: Worker) -> Task:
    _, _, index = state.pop_unscored()
    rollout = step.rollouts[index]
    return _task("score", worker, step.number, index, argument=(rollout,), version=rollout.version)


def _generate_task(state: State, step: Step, worker: Worker, kind: TaskKind) -> Task:
    index, stale = state.dispatch(step, worker)
    micro_batch = step.micro_batches[index]
    argument = (micro_batch, step.encoded) if step.encoded is not None else (micro_batch,)
    task = _task(kind, worker, step.number, index, argument=argument, version=worker.version)
    task.stale = stale
    return task


def _evaluate_task(state: State, worker: Worker) -> Task:
    request, state.evaluation_due = state.evaluation_due, None
    state.num_evaluating += 1
    return _task("evaluate", worker, worker.version - 1, argument=(request,), version=worker.version)


def _task(
    kind: TaskKind, worker: Worker, step: int, index: int = -1, *, argument: tuple[Any, ...], version: int
) -> Task:
    return Task(kind=kind, worker=worker, step=step, index=index, argument=argument, version=version)
