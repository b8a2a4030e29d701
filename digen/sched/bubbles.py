"""One step as Algorithm 2 sees it: a compressed state that goes from one emerging bubble to the next.

The rules are those of :func:`digen.sched.model.simulate`; tests hold the two to the same times. Here nothing is
recorded, times are relative to the state's own instant, and identities that do not matter are left out, so that paths
which lead to the same situation lead to equal states (paper 4: "aggregate counters").
"""

from __future__ import annotations

import math
from typing import NamedTuple

from digen.errors import ConfigError
from digen.events import TaskKind
from digen.sched.model import Instance, Run

IDLE, GENERATE, SCORE, AHEAD, LATER, LOAD, UPDATE, SWITCH_IN, ASSIST, SWITCH_OUT = range(10)
"""What a group does: AHEAD generates and LATER scores a micro-batch of a later step (TCSS)."""

KINDS: dict[TaskKind, int] = {
    "generate": GENERATE,
    "score": SCORE,
    "load": LOAD,
    "update": UPDATE,
    "assist": ASSIST,
    "switch": SWITCH_OUT,
}
"""Tasks of the scheduler and of a run, in these terms."""


class Running(NamedTuple):
    """A task that runs: (its end, from the state's instant; worker; what; micro-batch). Generators count first."""

    end: float
    worker: int
    kind: int
    micro_batch: int = 0


class StepState(NamedTuple):
    """One step in the middle, compressed: relative times, no identities that do not matter (paper 4).

    Two paths that lead to equal states have the same future, so it is the key under which a search remembers.
    """

    pending: int
    """Micro-batches that nobody has started."""
    queue: tuple[int, ...]
    """SQ of this step, first in first out; all 0 where the update order is ready."""
    ready: int
    """UQ, a bit per micro-batch from the next to be updated on: bit 0 is set if the trainer may go on."""
    updates: int
    """Updates that have not started."""
    ahead: int = 0
    """Stale micro-batches of later steps that the generators may still start."""
    later: int = 0
    """Generated ones of later steps in SQ."""
    outdated: int = 0
    """A bit per generator that must load weights before its next task."""
    closed: int = 0
    """A bit per trainer whose bubble was skipped."""
    switched: int = 0
    """A bit per trainer that stayed switched to generation (lazy switch)."""
    running: tuple[Running, ...] = ()
    """In order of start where the update order is index, by worker where it is ready."""


class StepModel:
    """Advance, SkipBubble and InsertTAG of Algorithm 2, up to the end of one step's last update.

    ``advance`` returns the time that passed and the state at the next emerging bubble, or ``None`` when the step's
    last update has ended. At a bubble, ``assist`` and ``skip`` give the two states to advance from. With ``reopen``
    every instant at which a trainer is idle counts as a bubble, even if it could update, and a skip closes it for that
    instant only: then the decisions are everything that trainers can do but wait with an update.
    With ``first=n`` the step's first n assists happen before its first update, bubble or not (static, TAG-first);
    with ``ask=False`` every bubble is skipped, so that the step runs to its end.

    Raises:
        ConfigError: the instance has no generators, or a barrier: then there is nothing to search.
    """

    def __init__(self, instance: Instance, *, reopen: bool = False) -> None:
        if instance.num_generators == 0 or instance.barrier:
            raise ConfigError("a step without generators, or with a barrier between stages, has no bubbles to search")
        self.instance = instance
        self.reopen = reopen
        self._indexed = instance.order == "index"
        groups = instance.num_generators, instance.num_trainers
        self._pair = groups == (1, 1) and not (instance.lazy_switch or reopen)
        generators = zip(instance.generate_s, instance.score_s, strict=True)
        trainers = zip(instance.update_s, instance.switch_in_s, instance.assist_s, instance.switch_out_s, strict=True)
        self._times: list[tuple[float, ...]] = [(0, g, r, g, r, instance.load_s) for g, r in generators]
        self._times += [(0, 0, 0, 0, 0, 0, *group) for group in trainers]
        """Durations by worker and what it does."""

    def start(self) -> StepState:
        """The first step of a run: everything is pending and everybody idle."""
        instance = self.instance
        later_steps = min(instance.window, instance.num_steps) - 1
        if instance.stale_limit < instance.num_micro_batches:
            ahead = instance.stale_limit if later_steps else 0
        else:
            ahead = instance.num_micro_batches * later_steps
        return StepState(instance.num_micro_batches, (), 0, instance.num_micro_batches, ahead)

    def bubble(self, state: StepState) -> int:
        """The trainer group whose bubble ``state`` is at: the first that is idle and not skipped.

        Raises:
            ConfigError: ``state`` is at no bubble.
        """
        busy = {task.worker for task in state.running}
        for trainer in range(self.instance.num_trainers) if state.pending else ():
            if trainer + self.instance.num_generators not in busy and not state.closed >> trainer & 1:
                return trainer
        raise ConfigError("the step is at no bubble; advance it to the next one before you assist or skip")

    def skip(self, state: StepState) -> StepState:
        """Leave the bubble as it is; it is not asked about again before the trainer's next task."""
        return state._replace(closed=state.closed | 1 << self.bubble(state))

    def assist(self, state: StepState) -> StepState:
        """Let the trainer generate the next pending micro-batch."""
        trainer = self.bubble(state)
        worker = self.instance.num_generators + trainer
        kind = ASSIST if state.switched >> trainer & 1 else SWITCH_IN
        index = self.instance.num_micro_batches - state.pending if self._indexed else 0
        return state._replace(
            pending=state.pending - 1,
            switched=state.switched | self.instance.lazy_switch << trainer,
            running=(*state.running, Running(self._times[worker][kind], worker, kind, index)),
        )

    def advance(self, state: StepState, *, first: int = 0, ask: bool = True) -> tuple[float, StepState | None]:
        """Run until the next emerging bubble, or the end of the last update."""
        if not state.updates:
            return max((task.end for task in state.running if task.kind == UPDATE), default=0), None
        return (self._advance_pair if self._pair else self._advance_groups)(state, first, ask)

    def _advance_groups(self, state: StepState, first: int, ask: bool) -> tuple[float, StepState | None]:
        """Any number of groups. ``running`` stays in order of start: ties of one instant go by it."""
        pending, waiting, ready, updates, ahead, later, outdated, closed, switched, unfinished = state
        size, num_generators, lazy = (
            self.instance.num_micro_batches,
            self.instance.num_generators,
            self.instance.lazy_switch,
        )
        queue, program, reopen = list(waiting), dict[int, tuple[int, int]](), self.reopen
        running: list[tuple[float, int, int, int]] = list(unfinished)
        busy = {task[1] for task in running}
        now: float = 0

        def start(worker: int, kind: int, micro_batch: int = 0) -> None:
            busy.add(worker)
            running.append((now + self._times[worker][kind], worker, kind, micro_batch))

        while True:
            for worker in range(num_generators):
                if worker in busy:
                    continue
                if outdated >> worker & 1:
                    outdated ^= 1 << worker
                    start(worker, LOAD)
                elif queue:
                    start(worker, SCORE, queue.pop(0))
                elif pending:
                    start(worker, GENERATE, self._indexed * (size - pending))
                    pending -= 1
                elif later:
                    start(worker, LATER)
                    later -= 1
                elif ahead:
                    start(worker, AHEAD)
                    ahead -= 1
            idle = [trainer for trainer in range(self.instance.num_trainers) if num_generators + trainer not in busy]
            every = reopen or (first and updates == size)
            num_available = 0 if every else (~ready & ready + 1).bit_length() - 1
            unasked = [t for t in idle[num_available:] if not closed >> t & 1 and num_generators + t not in program]
            if pending and unasked and any(end == now and worker < num_generators for end, worker, _, _ in running):
                idle = []  # first what takes no time ends
            for trainer in idle:
                if (worker := num_generators + trainer) in program:
                    start(worker, *program.pop(worker))
            for trainer in idle:
                worker, bit = num_generators + trainer, 1 << trainer
                if worker in busy:
                    continue
                eager = first > 0 and updates == size
                if pending and not closed & bit and (eager or reopen or not ready & 1):
                    if not eager and ask:
                        rest = [Running(end - now, *task) for end, *task in running]
                        tasks = tuple(rest if self._indexed else sorted(rest, key=lambda task: task.worker))
                        waiting = tuple(queue)
                        return now, StepState(
                            pending, waiting, ready, updates, ahead, later, outdated, closed, switched, tasks
                        )
                    closed |= bit
                    if eager:
                        start(worker, ASSIST if switched & bit else SWITCH_IN, self._indexed * (size - pending))
                        pending, first, switched = pending - 1, first - 1, switched | lazy << trainer
                        continue
                if switched & bit:
                    start(worker, SWITCH_OUT)
                    switched ^= bit
                elif ready & 1:
                    start(worker, UPDATE)
                    ready, updates = ready >> 1, updates - 1
            if reopen:
                closed = 0
            now = min(running)[0]
            ended = [task for task in running if task[0] == now]
            running = [task for task in running if task[0] > now]
            for _, worker, kind, index in ended:
                busy.remove(worker)
                if kind in {GENERATE, ASSIST}:
                    queue.append(index)
                elif kind == SCORE:
                    ready = ready | 1 << index - (size - updates) if self._indexed else ready << 1 | 1
                elif kind == AHEAD:
                    later += 1
                elif kind == SWITCH_IN:
                    program[worker] = ASSIST, index
                if kind in {UPDATE, ASSIST}:
                    closed &= ~(1 << worker - num_generators)
                if kind == ASSIST and not lazy:
                    program[worker] = SWITCH_OUT, 0
            if not updates and not any(kind == UPDATE for _, _, kind, _ in running):
                return now, None

    def _advance_pair(self, state: StepState, first: int, ask: bool) -> tuple[float, StepState | None]:
        """The same for one generator and one trainer that switches at once: plain variables, five times as fast."""
        pending, waiting, ready, updates, ahead, later, outdated, closed, _, running = state
        size, indexed = self.instance.num_micro_batches, self._indexed
        if updates < size:
            first = 0
        (_, g, r, _, _, load), (*_, u, switch_in, h, switch_out) = self._times
        queue = list(waiting)
        generating = training = IDLE
        generator_end: float = math.inf
        trainer_end: float = math.inf
        made = assisted = 0  # micro-batches
        generator_last = False  # whether the generator's task began after the trainer's
        for end, worker, kind, index in running:
            if worker:
                training, trainer_end, assisted, generator_last = kind, end, index, False
            else:
                generating, generator_end, made, generator_last = kind, end, index, True
        program = IDLE
        now: float = 0
        while True:
            if not generating:
                generator_last = True
                if outdated:
                    outdated, generating, generator_end = 0, LOAD, now + load
                elif queue:
                    generating, generator_end, made = SCORE, now + r, queue.pop(0)
                elif pending:
                    generating, generator_end = GENERATE, now + g
                    made = size - pending if indexed else 0
                    pending -= 1
                elif later:
                    later, generating, generator_end = later - 1, LATER, now + r
                elif ahead:
                    ahead, generating, generator_end = ahead - 1, AHEAD, now + g
            if not training:
                if program:
                    training, program, generator_last = program, IDLE, False
                    trainer_end = now + (h if training == ASSIST else switch_out)
                elif pending and not closed and (first or not ready & 1):
                    if generator_end == now:
                        pass  # first what takes no time ends
                    elif first:
                        training, trainer_end, generator_last = SWITCH_IN, now + switch_in, False
                        assisted = size - pending if indexed else 0
                        pending, first, closed = pending - 1, first - 1, 1
                    elif ask:
                        task = Running(generator_end - now, 0, generating, made if generating <= SCORE else 0)
                        running = (task,) if generating else ()
                        return now, StepState(
                            pending, tuple(queue), ready, updates, ahead, later, outdated, running=running
                        )
                    else:
                        closed = 1
                elif ready & 1:
                    ready, updates, first = ready >> 1, updates - 1, 0
                    if not updates:
                        return now + u, None
                    training, trainer_end, generator_last = UPDATE, now + u, False
            now = min(generator_end, trainer_end)
            place = len(queue)
            if trainer_end == now:
                if training == SWITCH_IN:
                    program = ASSIST
                else:
                    closed = 0
                    if training == ASSIST:
                        program = SWITCH_OUT
                        queue.append(assisted)
                training, trainer_end = IDLE, math.inf
            if generator_end == now:
                if generating == SCORE:
                    ready = ready | 1 << made - (size - updates) if indexed else ready << 1 | 1
                elif generating == GENERATE:
                    queue.insert(len(queue) if generator_last else place, made)
                elif generating == AHEAD:
                    later += 1
                generating, generator_end = IDLE, math.inf


def compress(run: Run, trainer: int) -> StepState:
    """The current step of a run at a bubble of trainer group ``trainer``.

    Micro-batches of the step are pending then, so that nothing of a later step has begun.
    """
    instance, number = run.instance, run.step
    step, size = run.ledger(number), instance.num_micro_batches
    indexed = instance.order == "index"
    tasks = []
    for end, _, worker in sorted(run.running, key=lambda item: item[1]):
        task = run.busy[worker]
        assert task is not None  # noqa: S101 - it runs
        kind, index = KINDS[task.kind], task.index if indexed and task.index >= 0 else 0
        if kind == SWITCH_OUT and (program := run.trainers[worker - run.num_generators].program):
            kind, index = SWITCH_IN, program[0][1] * indexed
        tasks.append(Running(end - run.now, worker, kind, index))
    if not indexed:
        tasks.sort(key=lambda task: task.worker)
    held = [
        task.version if task is not None and task.kind == "load" else version
        for task, version in zip(run.busy, run.versions, strict=False)
    ]
    later_steps = min(instance.window, instance.num_steps - number) - 1
    limit = instance.stale_limit
    return StepState(
        pending=len(step.pending),
        queue=tuple(index * indexed for owner, _, index in sorted(run.queue) if owner == number),
        ready=sum(1 << (index - step.num_started if indexed else place) for place, index in enumerate(step.ready)),
        updates=size - step.num_started,
        ahead=size * later_steps if limit >= size else limit * (later_steps > 0),
        outdated=sum(1 << worker for worker, version in enumerate(held) if version != number),
        closed=sum(1 << other for other, one in enumerate(run.trainers) if one.asked and other != trainer),
        switched=sum(1 << other for other, one in enumerate(run.trainers) if one.switched),
        running=tuple(tasks),
    )
