"""One frozen event per fact, and the bus that hands them to sinks.

The scheduler emits every decision it takes and every result it gets. Reports, traces, metrics, progress and the
invariant checker are folds over this stream: none of them keeps a timer of its own. ``events.jsonl`` is the stream,
one JSON object a line.

``time`` is in seconds of the loop's monotonic clock since the run began.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from digen.errors import OutputError
from digen.files import unwritable
from digen.types import MicroBatch

TaskKind = Literal[
    "encode",
    "load",
    "score",
    "generate",
    "assist",
    "switch",
    "update",
    "commit",
    "publish",
    "snapshot",
    "checkpoint",
    "evaluate",
]
"""What a worker can be busy with. ``encode`` is of a whole step's prompts, ``assist`` a generation on the trainer,
``switch`` its load and offload, ``snapshot`` the copy of its state that is kept in memory, ``checkpoint`` the one on
disk, ``evaluate`` held-out samples of the version that the worker holds."""

Role = Literal["generator", "scorer", "trainer"]

Loss = Literal["died", "hung", "protocol", "raised"]
"""How a worker was lost: its process ended, it did not answer in time, what it answered is no answer, or its code
raised while it loaded weights, so that nobody knows what it holds. ``raised`` is also whatever a handle raises that is
no :class:`digen.errors.DigenError`."""

Cause = Literal[
    "wait_weights",
    "wait_rollout",
    "wait_score",
    "wait_group",
    "wait_order",
    "wait_barrier",
    "wait_hold",
    "wait_limit",
    "wait_memory",
    "wait_encode",
    "wait_evaluate",
    "wait_checkpoint",
    "wait_work",
    "wait_skip",
]
"""Why a worker idles.

===============  =====================================================================================
wait_weights     every micro-batch it may take is dispatched; the next step waits for new weights
wait_rollout     the trainer waits for a generation to finish
wait_score       the trainer waits for a score to finish
wait_group       samples are scored, but their groups are not complete
wait_order       scored micro-batches wait, but not the next one in index order
wait_barrier     a stage barrier (modes colocated and naive) holds it back
wait_hold        ``sync="hold"``: waits until all generators have stopped and loaded
wait_limit       ``max_generating`` generations are running
wait_memory      the next step's rollouts wait until those that exist leave room in ``max_rollout_bytes``
wait_encode      the step's prompts are being encoded
wait_evaluate    the commit waits until a generator has begun to evaluate the weights that it replaces
wait_checkpoint  a checkpoint is due, and the one before is still being written
wait_work        nothing is left to do in this run
wait_skip        the TAG policy skipped this bubble
===============  =====================================================================================
"""


class Event(Struct, frozen=True, tag_field="event", gc=False):
    """Base of all events. Not tracked by the garbage collector: an event is no part of a cycle."""

    time: float


class RunStarted(Event, frozen=True, tag="run_started"):
    """The schedule that is about to run."""

    num_steps: int
    start_step: int
    num_micro_batches: int
    window: int
    stale_limit: int
    """Most stale micro-batches in one step: floor(stale_fraction * B)."""
    sync: str
    update_order: str
    tag: str
    barrier: bool
    info: dict[str, Any] = {}


class WorkerJoined(Event, frozen=True, tag="worker_joined"):
    """A worker takes part from now on."""

    worker: str
    role: Role
    version: int


class WorkerLeft(Event, frozen=True, tag="worker_left"):
    """A worker takes part no more."""

    worker: str
    reason: str


class WorkerLost(Event, frozen=True, tag="worker_lost"):
    """A worker died, hung, or answered what is no answer. It takes part no more until it is started again."""

    worker: str
    role: Role
    reason: Loss
    error: str
    restart_in_s: float | None
    """When another one is started in its place; ``None``: its restart budget is spent, it does not come back."""


class WorkerRestarted(Event, frozen=True, tag="worker_restarted"):
    """A worker that was lost takes part again.

    A trainer's gradient went with it: the current step's updates are applied again.
    """

    worker: str
    role: Role
    version: int
    down_s: float
    """Since it was lost."""


class TaskRetried(Event, frozen=True, tag="task_retried"):
    """A task that failed with its worker went back to the front of its queue."""

    kind: TaskKind
    step: int
    index: int
    attempt: int
    """Number of the attempt that is to come; 2 after the first loss."""
    error: str


class Quarantined(Event, frozen=True, tag="quarantined"):
    """A micro-batch failed so often in a row that it is not tried again; its groups are dropped, or the run ends.

    What else there was to generate of these groups is left out with it, by such an event each.
    """

    kind: TaskKind
    step: int
    index: int
    attempts: int
    """How often it failed; 0 if it was left out with another one."""
    error: str
    micro_batch: MicroBatch
    """Its prompts and what its seeds derive from: all that it takes to repeat it."""
    story: tuple[str, ...]
    """What happened to it, a line an event."""


class RolloutLost(Event, frozen=True, tag="rollout_lost"):
    """A rollout that was not trained on yet is gone with the machine that held it, and its rewards no longer count.

    Its micro-batch is generated again, before others of its step, with the same seeds.
    """

    step: int
    index: int
    worker: str
    """Which had generated it."""
    version: int
    """Of the weights that it was drawn from: the same samples come again if a worker still holds them."""


class RolledBack(Event, frozen=True, tag="rolled_back"):
    """The trainer could only be restored at an earlier version: the steps from there on are trained again."""

    version: int
    from_version: int
    num_discarded: int
    """Rollouts that were thrown away with the steps."""


class TaskStarted(Event, frozen=True, tag="task_started"):
    """A task was given to a worker."""

    task: int
    kind: TaskKind
    worker: str
    step: int
    index: int
    """Micro-batch, or -1 for tasks of a whole step."""
    version: int
    """Version of the weights that the worker holds (generate, assist) or is about to make or load."""
    stale: bool = False


class TaskFinished(Event, frozen=True, tag="task_finished"):
    """A task returned."""

    task: int
    kind: TaskKind
    worker: str
    step: int
    index: int
    version: int
    started: float
    stats: dict[str, float] = {}


class TaskFailed(Event, frozen=True, tag="task_failed"):
    """A task raised, or its worker died, or it was cancelled."""

    task: int
    kind: TaskKind
    worker: str
    step: int
    index: int
    started: float
    error: str


class BubbleOpened(Event, frozen=True, tag="bubble_opened"):
    """A worker became idle. Its next task ends the bubble."""

    worker: str
    cause: Cause


class TagDecided(Event, frozen=True, tag="tag_decided"):
    """A TAG policy was asked about one emerging bubble."""

    worker: str
    step: int
    assist: bool
    policy: str
    reason: str
    saving_s: float | None = None


class Rewarded(Event, frozen=True, tag="rewarded"):
    """A micro-batch's rewards arrived."""

    step: int
    index: int
    rewards: tuple[float, ...]
    heads: dict[str, tuple[float, ...]] = {}


class GroupCompleted(Event, frozen=True, tag="group_completed"):
    """All rewards of a prompt's group are known and its advantages computed."""

    step: int
    uid: str
    reward_mean: float
    reward_std: float
    num_kept: int
    num_micro_batches: int
    versions: tuple[int, ...]


class GroupDropped(Event, frozen=True, tag="group_dropped"):
    """The reward of a group's samples failed; none of them is trained on, and they leave the step's denominator."""

    step: int
    uid: str
    index: int
    """The micro-batch whose score failed."""
    error: str


class MicroBatchSettled(Event, frozen=True, tag="micro_batch_settled"):
    """A micro-batch is done with in its step: its gradient is accumulated, best-of-N kept none of it, or its group is
    lost.
    """

    step: int
    index: int
    outcome: Literal["updated", "empty", "dropped"]
    version: int
    staleness: int


class StepCommitted(Event, frozen=True, tag="step_committed"):
    """The optimizer stepped. ``values`` are the metrics of the step's :class:`digen.types.StepReport`."""

    step: int
    version: int
    values: dict[str, float]


class CheckpointSaved(Event, frozen=True, tag="checkpoint_saved"):
    """A complete checkpoint is on disk."""

    version: int
    path: str


class Evaluated(Event, frozen=True, tag="evaluated"):
    """Held-out samples were drawn and judged; never counted as training."""

    version: int
    num_samples: int
    metrics: dict[str, float]


class RunFinished(Event, frozen=True, tag="run_finished"):
    """The scheduler ended."""

    outcome: Literal["completed", "drained", "stopped", "failed"]
    error: str = ""


AnyEvent = (
    RunStarted
    | WorkerJoined
    | WorkerLeft
    | WorkerLost
    | WorkerRestarted
    | TaskStarted
    | TaskFinished
    | TaskFailed
    | BubbleOpened
    | TagDecided
    | Rewarded
    | GroupCompleted
    | GroupDropped
    | TaskRetried
    | Quarantined
    | RolloutLost
    | RolledBack
    | MicroBatchSettled
    | StepCommitted
    | CheckpointSaved
    | Evaluated
    | RunFinished
)

Sink = Callable[[AnyEvent], None]
"""A sink is a callable that takes one event. It must not block."""


_FLUSHED = (
    StepCommitted,
    RunFinished,
    CheckpointSaved,
    Evaluated,
    WorkerLost,
    WorkerRestarted,
    Quarantined,
    RolledBack,
)


class EventLog:
    """A sink that appends events to ``events.jsonl``.

    Lines are buffered and flushed at every commit, loss and end, so that the cost per event stays at an encode and an
    append. Use as a context manager or call :meth:`close`. A last line that a crash cut short is removed before
    anything is appended.

    Raises:
        OutputError: it cannot be written. The run ends then, because nobody could say what it did.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if path.is_file():
                remove_cut_line(path)
            self._file = path.open("ab", buffering=1 << 16)
        except OSError as error:
            raise unwritable(path, error) from error
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, event: AnyEvent) -> None:
        """Append one event."""
        try:
            self._file.write(self._encode(event) + b"\n")
            if isinstance(event, _FLUSHED):
                self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self._file.close()
        except OSError as error:
            raise unwritable(self._path, error) from error

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close()
        except OutputError:  # a full disk: the error under way was there first
            if kind is None:
                raise


def remove_cut_line(path: Path) -> None:
    """Remove the last line of a file if it has no end: a crash cut it short."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Yield the events of an ``events.jsonl``.

    A last line that a crash cut short (it has no newline) is left out; any other broken line raises ``ValueError``
    with its number.
    """
    decode = msgspec.json.Decoder(AnyEvent).decode
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ValueError(f"{path} line {number}: {error}") from error


def tolerated(sink: Sink) -> Sink:
    """A sink that ends no run, for what only shows one: trackers, views.

    When ``sink`` raises it is called no more, and one warning says why. Without this a sink that raises ends the run.
    """
    well = True

    def emit(event: AnyEvent) -> None:
        nonlocal well
        if not well:
            return
        try:
            sink(event)
        except Exception as error:
            well = False
            import structlog

            structlog.get_logger("digen").warning(
                "a sink failed and is left out from now on; the run goes on",
                sink=getattr(sink, "__qualname__", type(sink).__qualname__),
                error=f"{type(error).__name__}: {error}",
            )

    return emit


def fan_out(sinks: Iterable[Sink]) -> Sink:
    """One sink that hands every event to all of ``sinks`` in order."""
    targets = tuple(sinks)
    if len(targets) == 1:
        return targets[0]

    def emit(event: AnyEvent) -> None:
        for sink in targets:
            sink(event)

    return emit
