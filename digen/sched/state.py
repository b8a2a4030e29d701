"""What the scheduler knows: the counters and queues of Algorithm 1, and the ledger of every open step.

Pure bookkeeping. :mod:`digen.sched.select` reads it to decide, :mod:`digen.sched.loop` feeds it results. The listing's
names: ``s`` is :attr:`State.step` (optimizer steps finished, also the current step), ``R`` is
:attr:`State.num_generating`, ``U`` the trainer's running update, ``SQ`` :attr:`State.scoring_queue` and ``UQ`` each
step's :attr:`Step.ready`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from digen.events import Role, TaskKind
from digen.groups import Arrival, GroupAssembler
from digen.sched.admission import admits
from digen.sched.memory import Memory
from digen.sched.profile import Kind
from digen.types import Encoded, EvaluationRequest, MicroBatch, Prompt, Publication, Rollout

if TYPE_CHECKING:
    from digen.plan import Plan


NO_VERSION = -1
"""The version of a worker whose weights are of no version of this run. It is admitted to nothing."""


class Rules(Struct, frozen=True):
    """A resolved :class:`digen.ScheduleConfig`: the numbers that Algorithm 1 compares with."""

    window: int
    stale_limit: int
    barrier: bool
    hold: bool
    index_order: bool
    max_generating: int | None
    max_rollout_bytes: int | None
    assists: bool
    """Whether the trainer can generate."""
    switches: bool
    """Whether the trainer must be switched for an assist and back."""
    lazy_switch: bool
    """Whether it stays switched between assists that follow each other."""
    max_dropped: Decimal
    """Largest share of a step's groups that may be dropped."""
    encodes: bool
    """Whether prompts are encoded, by a task of each step, before they are generated for."""


class Worker:
    """A worker as the scheduler sees it."""

    __slots__ = ("joined", "leaving", "lost", "name", "position", "role", "task", "version")

    def __init__(self, name: str, role: Role, position: int, version: int, joined: float) -> None:
        self.name = name
        self.role: Role = role
        self.position = position
        self.version = version
        self.joined = joined
        """Seconds since the run began."""
        self.task: Task | None = None
        self.leaving = False
        self.lost = False
        """Whether it is being started again."""

    @property
    def busy(self) -> bool:
        """Whether it can be given nothing: it has a task, or is being started again."""
        return self.task is not None or self.lost


class Task(Struct):
    """One call on one worker."""

    kind: TaskKind
    worker: Worker
    step: int
    index: int
    """Micro-batch, or -1."""
    version: int
    argument: tuple[Any, ...]
    """What the handle's method is called with."""
    stale: bool = False
    id: int = -1
    started: float = 0.0
    void: bool = False
    """Whether its result no longer counts: the run went back behind it."""

    @property
    def measured_as(self) -> Kind:
        """What its duration is a sample of."""
        return measured_as(self.kind, self.argument)


def measured_as(kind: TaskKind, argument: Any) -> Kind:
    """What the duration of a task of ``kind`` is a sample of: the switches before and after an assist may differ."""
    if kind != "switch":
        return kind
    return "switch_in" if argument == ("generate",) else "switch_out"


class Step:
    """The ledger of one step: where each of its B micro-batches stands."""

    def __init__(self, number: int, micro_batches: Sequence[MicroBatch], assembler: GroupAssembler) -> None:
        self.number = number
        self.micro_batches = micro_batches
        self.assembler = assembler
        self.pending = deque(range(len(micro_batches)))
        self.encoder: Worker | None = None
        """Who encodes, or has encoded, its prompts."""
        self.encoded: Encoded | None = None
        self.num_stale = 0
        self.num_generating = 0
        self.num_generated = 0
        self.num_scored = 0
        self.num_assists = 0
        self.num_updated = 0
        self.rollouts: dict[int, Rollout] = {}
        self.num_bytes = 0
        """Of the rollouts."""
        self.owners: dict[int, Worker] = {}
        self.rewards: dict[int, tuple[float, ...]] = {}
        self.heads: dict[int, Mapping[str, Sequence[float]]] = {}
        self.kept: dict[int, int] = {}
        """Samples of each scored micro-batch that best-of-N kept."""
        self.ready: dict[int, tuple[float | None, ...]] = {}
        """UQ of this step: advantages by micro-batch, in order of arrival; :attr:`next_index` keeps index order."""
        self.taken: dict[int, tuple[float | None, ...]] = {}
        """What was taken out of UQ, kept until the commit: a trainer that dies needs it again."""
        self.lost_versions: dict[int, int] = {}
        """The version of a generation that was lost, until it is repeated."""
        self.settled: dict[int, str] = {}
        self.next_index = 0
        """Lowest micro-batch that has not settled."""

    @property
    def complete(self) -> bool:
        """Line 27: all B micro-batches have settled."""
        return len(self.settled) == len(self.micro_batches)

    def prompts(self) -> tuple[Prompt, ...]:
        """Its prompts, each once, in the order of the plan."""
        unique = {piece.uid: piece.prompt for micro_batch in self.micro_batches for piece in micro_batch.slices}
        prompts: list[Prompt] = []
        for prompt in unique.values():
            if prompt not in prompts:
                prompts.append(prompt)
        return tuple(prompts)

    def version_of(self, index: int) -> int:
        """The version of a micro-batch: that of its rollout, or of the last attempt if it has none."""
        rollout = self.rollouts.get(index)
        return rollout.version if rollout is not None else self.lost_versions[index]

    def reopen(self) -> None:
        """The gradient is lost: every micro-batch that was updated on, or was about to be, waits in UQ again."""
        for index in self.taken:
            self.settled.pop(index, None)
        self.ready = {**self.taken, **self.ready}
        self.taken = {}
        self.num_updated = 0
        self.next_index = 0
        while self.next_index in self.settled:
            self.next_index += 1

    def settle(self, index: int, outcome: str) -> None:
        """Micro-batch ``index`` is done with."""
        self.settled[index] = outcome
        while self.next_index in self.settled:
            self.next_index += 1


class State:
    """Everything the scheduler decides from."""

    def __init__(
        self, plan: Plan, assemble: Callable[[Sequence[MicroBatch]], GroupAssembler], rules: Rules, *, start_step: int
    ) -> None:
        self.plan = plan
        self._assemble = assemble
        self.rules = rules
        self.start_step = start_step
        self.step = start_step
        self.last_step = plan.num_steps
        """The run ends before this step: S, or an earlier one when draining."""
        self.steps: dict[int, Step] = {}
        self.scoring_queue: list[tuple[int, int, int]] = []
        """SQ: (step, order of arrival, micro-batch); the lowest step is scored first."""
        self._arrivals = 0
        self._comebacks = 0
        self.num_generating = 0
        self.memory = Memory(rules.max_rollout_bytes)
        self.generators: dict[str, Worker] = {}
        self.scorers: dict[str, Worker] = {}
        self.absent: dict[str, Worker] = {}
        """Generators and scorers that are lost and are being started again."""
        self.trainer: Worker
        self._idle: dict[int, list[tuple[int, Worker]]] = {}
        self._idle_scorers: list[tuple[int, Worker]] = []
        self.num_busy_generators = 0
        self.num_loading = 0
        self.publication: Publication | None = None
        self.num_outdated = 0
        """Generators that do not hold the trainer's weights."""
        self.publish_due = False
        """Whether the trainer holds weights that some generator lacks and that are not published yet."""
        self.holding = False
        """sync="hold": from the commit until every generator has loaded."""
        self.evaluation_due: EvaluationRequest | None = None
        """An evaluation of the trainer's present weights that nobody has begun. Their successor waits for it."""
        self.num_evaluating = 0
        self.trainer_program: deque[tuple[TaskKind, Any]] = deque()
        """What the trainer does next whatever happens: snapshot, checkpoint, an assist with its switches."""
        self.writing = False
        """Whether a checkpoint is being written while the trainer goes on."""
        self.bubble_asked = False
        """Whether the policy was asked about the trainer's present bubble."""
        self.bubble_reopened = False
        """Whether that bubble was skipped and is asked about again."""
        self.switched = False
        """Whether the trainer stayed switched after an assist (lazy switch)."""

    # ---- the plan's supply -------------------------------------------------------------------------------------

    def ledger(self, number: int) -> Step:
        """The ledger of a step, opened when it is first looked at."""
        step = self.steps.get(number)
        if step is None:
            micro_batches = self.plan.step(number)
            step = self.steps[number] = Step(number, micro_batches, self._assemble(micro_batches))
        return step

    @property
    def current(self) -> Step:
        """The ledger of the step being trained."""
        return self.ledger(self.step)

    @property
    def horizon(self) -> int:
        """The first step that may not be generated for yet, whatever the workers hold."""
        return min(self.step + self.rules.window, self.last_step)

    def candidate(self) -> Step | None:
        """NextMicroBatch (line 6): the first step from the current one on that has undispatched micro-batches."""
        for number in range(self.step, self.horizon):
            step = self.ledger(number)
            if step.pending:
                return step
        return None

    def may_start(self, step: Step) -> bool:
        """Whether the prompts of a step are encoded, if they are at all."""
        return step.encoded is not None or not self.rules.encodes

    def unencoded(self, *, ahead: bool) -> Step | None:
        """The step whose prompts are to be encoded next: that of the candidate, with ``ahead`` also the one after."""
        if not self.rules.encodes:
            return None
        for number in range(self.step, min(self.horizon + ahead, self.last_step)):
            step = self.ledger(number)
            if step.encoder is None:
                return step
            if step.pending and not ahead:
                return None
        return None

    def admitted(self, step: Step, version: int) -> bool:
        """Line 5, on the candidate. Weights from before the run generate nothing: newer ones are loaded first."""
        rules = self.rules
        return version >= self.start_step and admits(
            step.number, version, window=rules.window, num_stale=step.num_stale, limit=rules.stale_limit
        )

    @property
    def may_generate(self) -> bool:
        """C_gen: whether one more generation may be in flight."""
        limit = self.rules.max_generating
        return limit is None or self.num_generating < limit

    def has_room(self, step: Step) -> bool:
        """Whether one more rollout of ``step`` may take memory."""
        return step.number == self.step or self.memory.has_room(self.num_generating)

    # ---- idle workers ------------------------------------------------------------------------------------------

    def set_idle(self, worker: Worker) -> None:
        """``worker`` has no task. Generators are kept by version, so that no decision scans them all."""
        worker.task = None
        if worker.role == "generator":
            heapq.heappush(self._idle.setdefault(worker.version, []), (worker.position, worker))
        elif worker.role == "scorer":
            heapq.heappush(self._idle_scorers, (worker.position, worker))

    @property
    def someone_idle(self) -> bool:
        """Whether a generator or scorer has no task."""
        return bool(self._idle or self._idle_scorers)

    def idle_versions(self) -> list[int]:
        """Versions that idle generators hold: at most a few."""
        return list(self._idle)

    def pop_idle(self, versions: Sequence[int]) -> Worker | None:
        """Take the idle generator with the lowest index among those that hold one of ``versions``."""
        if not versions:
            return None
        heaps = self._idle
        heap = heaps[versions[0]] if len(versions) == 1 else min(heaps[version] for version in versions)
        worker = heapq.heappop(heap)[1]
        if not heap:
            del self._idle[worker.version]
        return worker

    def pop_idle_scorer(self) -> Worker | None:
        """Take the idle scorer with the lowest index."""
        return heapq.heappop(self._idle_scorers)[1] if self._idle_scorers else None

    def withdraw(self, worker: Worker) -> None:
        """Take an idle worker out, so that it gets no more work."""
        if worker.role == "generator":
            heap = self._idle[worker.version]
            heap.remove((worker.position, worker))
            heapq.heapify(heap)
            if not heap:
                del self._idle[worker.version]
        else:
            self._idle_scorers.remove((worker.position, worker))
            heapq.heapify(self._idle_scorers)

    # ---- who takes part ----------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether the trainer does every stage: there are no generators, nor will any come back."""
        return not self.generators and not self._expects("generator")

    @property
    def scores_apart(self) -> bool:
        """Whether scorers of their own score, be it when they are back."""
        return bool(self.scorers) or self._expects("scorer")

    def _expects(self, role: Role) -> bool:
        return bool(self.absent) and any(worker.role == role for worker in self.absent.values())

    def team(self, role: Role) -> dict[str, Worker]:
        """The generators, or the scorers, by name."""
        return self.generators if role == "generator" else self.scorers

    def depart(self, worker: Worker) -> None:
        """A generator or scorer takes part no more."""
        self.team(worker.role).pop(worker.name)
        self.recount_outdated()
        if self.num_outdated == 0:
            self.holding = False

    def ended(self, task: Task) -> None:
        """A worker's task is over."""
        if task.worker.role == "generator":
            self.num_busy_generators -= 1
            self.num_loading -= task.kind == "load"
        task.worker.task = None

    # ---- transitions -------------------------------------------------------------------------------------------

    def dispatch(self, step: Step, worker: Worker) -> tuple[int, bool]:
        """Take the next micro-batch of ``step`` for ``worker``; returns (index, stale)."""
        index = step.pending.popleft()
        stale = step.number != worker.version
        step.num_stale += stale
        step.num_generating += 1
        self.num_generating += 1
        return index, stale

    def undispatch(self, step: Step, task: Task) -> None:
        """A generation was lost, or never began: its micro-batch is the first of its step to be dispatched again."""
        step.pending.appendleft(task.index)
        self._not_generated(step, task)

    def _not_generated(self, step: Step, task: Task) -> None:
        step.num_stale -= task.stale
        step.num_generating -= 1
        self.num_generating -= 1
        step.lost_versions[task.index] = task.version

    def unpop_unscored(self, step: Step, index: int) -> None:
        """A score was lost: its micro-batch is the first of its step in SQ again."""
        self._comebacks -= 1
        heapq.heappush(self.scoring_queue, (step.number, self._comebacks, index))

    def lost_rollouts(self) -> list[tuple[int, int]]:
        """Step and micro-batch of every rollout that is known to be lost, and that no task reads or has trained on."""
        waiting = {(number, index) for number, _, index in self.scoring_queue}
        return [
            (step.number, index)
            for step in self.steps.values()
            for index, rollout in step.rollouts.items()
            if ((step.number, index) in waiting or index in step.rewards)
            and index not in step.settled
            and index not in step.taken
            and rollout.payload.lost
        ]

    def forget(self, step: Step, index: int) -> tuple[Worker, Rollout]:
        """A rollout is lost: its micro-batch is the first of its step to be dispatched again, and then scored again.

        The groups that it was a part of are open until then; those of their micro-batches that wait in UQ leave it, and
        those that were trained on keep the advantages that they had. Returns the rollout, with its owner.
        """
        owner, rollout = step.owners.pop(index), step.rollouts.pop(index)
        step.num_bytes -= rollout.payload.nbytes
        self.memory.let_go(rollout.payload.nbytes)
        step.pending.appendleft(index)
        step.num_generated -= 1
        step.num_stale -= rollout.version != step.number
        step.lost_versions[index] = rollout.version
        if index in step.rewards:
            del step.rewards[index], step.heads[index]
            step.num_scored -= 1
            step.taken.pop(index, None)
            for reopened in (index, *step.assembler.forget(index)):
                step.ready.pop(reopened, None)
        else:
            self.scoring_queue = [item for item in self.scoring_queue if (item[0], item[2]) != (step.number, index)]
            heapq.heapify(self.scoring_queue)
        return owner, rollout

    def publication_lost(self, publication: Publication, worker: Worker) -> None:
        """What ``worker``, idle by now, was to load is gone: the weights are published again, and it loads those."""
        if self.publication is publication:
            self.publication = None
        self._outlived(worker)
        self.recount_outdated()

    def never_generated(self, step: Step, task: Task) -> Arrival:
        """A generation is given up: its groups are lost."""
        self._not_generated(step, task)
        step.num_generated += 1
        return self.dropped(step, task)

    def withhold(self, step: Step, task: Task) -> Arrival:
        """A micro-batch that was given up before the run went back, by ``task``, is not generated again."""
        step.pending.remove(task.index)
        step.num_generated += 1
        step.lost_versions[task.index] = task.version
        return self.dropped(step, task)

    def payloads(self) -> list[tuple[Worker, Any]]:
        """The payloads of all open steps, with their owners."""
        payloads: list[tuple[Worker, Any]] = []
        for step in self.steps.values():
            payloads += [(step.owners[index], rollout.payload) for index, rollout in step.rollouts.items()]
            if step.encoder is not None and step.encoded is not None:
                payloads.append((step.encoder, step.encoded.payload))
        return payloads

    def roll_back(self, version: int) -> list[tuple[Worker, Any]]:
        """The trainer holds an earlier ``version``: open steps are forgotten, and whatever still runs is void.

        Returns the payloads that nobody will read again, with their owners.
        """
        payloads = self.payloads()
        for step in self.steps.values():
            self.memory.let_go(step.num_bytes)
        self.steps.clear()
        self.scoring_queue.clear()
        self.trainer_program.clear()
        self.num_generating = self.num_evaluating = 0
        self.evaluation_due = None
        self.step = version
        self.trainer.version = version
        for worker in (*self.generators.values(), *self.scorers.values()):
            task = worker.task
            if task is not None:
                task.void = task.kind != "load" or task.version > version
            if worker.version > version or (task is not None and task.void and task.kind == "load"):
                self._outlived(worker)
        if self.publication is not None and self.publication.version > version:
            self.publication = None
        return payloads

    def _outlived(self, worker: Worker) -> None:
        """A worker's weights are of a future that was given up, or nobody knows what they are: no version at all."""
        idle = worker.role == "generator" and worker.task is None and not worker.leaving
        if idle:
            self.withdraw(worker)
        worker.version = NO_VERSION
        if idle:
            self.set_idle(worker)

    def generated(self, step: Step, index: int, rollout: Rollout, worker: Worker) -> None:
        """Lines 11, 12, 16: a generation returned; its rollout waits in SQ."""
        step.num_generating -= 1
        self.num_generating -= 1
        step.num_generated += 1
        step.rollouts[index] = rollout
        step.owners[index] = worker
        nbytes = rollout.payload.nbytes
        step.num_bytes += nbytes
        self.memory.take(nbytes)
        self._arrivals += 1
        heapq.heappush(self.scoring_queue, (step.number, self._arrivals, index))

    def pop_unscored(self) -> tuple[int, int, int]:
        """Take the head of SQ: (step, order of arrival, micro-batch)."""
        return heapq.heappop(self.scoring_queue)

    def scored(
        self, step: Step, index: int, rewards: tuple[float, ...], heads: Mapping[str, Sequence[float]]
    ) -> Arrival:
        """Lines 13 to 15: rewards arrived; whole groups get advantages and their micro-batches enter UQ."""
        arrival = step.assembler.add(index, rewards, heads)
        step.rewards[index] = tuple(map(float, rewards))  # checked above; numbers of any kind become floats
        step.heads[index] = heads
        return self._arrived(step, arrival)

    def dropped(self, step: Step, task: Task) -> Arrival:
        """A score failed: its groups are lost, which may complete micro-batches that waited for them."""
        return self._arrived(step, step.assembler.drop(task.index))

    def _arrived(self, step: Step, arrival: Arrival) -> Arrival:
        step.num_scored += 1
        # Of a group that is complete once more, what is settled or in the gradient already stays as it is.
        done = step.settled.keys() | step.taken.keys()
        arrival = replace(arrival, ready=tuple(ready for ready in arrival.ready if ready.index not in done))
        for ready in arrival.ready:
            step.kept[ready.index] = ready.num_kept
            if ready.num_kept:
                step.ready[ready.index] = ready.advantages
            else:
                step.ready.pop(ready.index, None)  # a trainer that was lost had brought it back
                step.settle(ready.index, "dropped" if step.assembler.lost(ready.index) else "empty")
        return arrival

    def close_step(self) -> Step:
        """Lines 28 and 30: the optimizer stepped; the next step is the current one."""
        step = self.steps.pop(self.step)
        self.memory.let_go(step.num_bytes)
        self.step += 1
        return step

    def recount_outdated(self) -> None:
        """Called when the trainer's version or the set of generators changed: the only scan over workers."""
        version = self.trainer.version
        self.num_outdated = sum(worker.version != version for worker in self.generators.values())
        published = self.publication is not None and self.publication.version == version
        self.publish_due = not published and self.num_outdated > 0

    def loaded(self, worker: Worker, version: int) -> None:
        """A generator holds ``version`` now; with the last of them a hold ends."""
        worker.version = version
        self.num_outdated -= version == self.trainer.version
        if self.num_outdated == 0:
            self.holding = False

    @property
    def saves_late(self) -> bool:
        """Whether the trainer waits for the checkpoint before, to save the next one."""
        return self.writing and bool(self.trainer_program) and self.trainer_program[0][0] == "checkpoint"

    @property
    def finished(self) -> bool:
        """Line 4, nothing left to sync, no checkpoint being written: the run is over, or drained."""
        if self.step < self.last_step or self.trainer.busy or self.trainer_program or self.publish_due or self.writing:
            return False
        evaluated = self.evaluation_due is None and self.num_evaluating == 0
        return self.draining or (self.num_outdated == 0 and evaluated)

    @property
    def draining(self) -> bool:
        """Whether the run ends before its plan does."""
        return self.last_step < self.plan.num_steps
