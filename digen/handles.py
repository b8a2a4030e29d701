"""What the scheduler needs from an engine: protocols that are satisfied by shape, not by inheritance.

The same methods appear twice in digen. A *handle* has them as coroutines and lives in the driver; a worker
*target* has them as plain blocking functions and lives in a child process (or in this one, behind an
:class:`digen.InProcessWorker`). Nothing else is asked of either.

Optional methods are looked up by name and used when they exist:

========================  ==========================================================================
``generate`` on a trainer  makes it eligible for assists (TAG, paper 3.3)
``encode(prompts)`` on all generators  called once a step, before its first generation; what it returns goes with
                           every ``generate(micro_batch, encoded)`` of the step, on the trainer too
``evaluate(request)`` on all generators  held-out samples of the weights held now, for a scheduler with ``evaluate``
``switch(to)`` on a trainer  called with ``"generate"`` before an assist and ``"train"`` after it; timed
``release(payload)``       the scheduler will not read this payload again; not a coroutine
``restart()``              end what is left of a worker and start another in its place, after it raised WorkerDied,
                           WorkerTimeout, ProtocolError or anything that is no DigenError; ``version`` must be true
                           then, and a trainer hold no gradient
``kill(reason)``           end a worker that hangs, at once; with ``restart`` its tasks get deadlines
``restore(path)`` on a trainer  hold the weights of a checkpoint that ``Checkpointer.newest`` names, after a restart
``snapshot()``, ``recall(snapshot)`` on a trainer  copy the whole state into memory that outlives its process, after a
                           commit; hold that state, after a restart, and return its version
``start()``, ``aclose()``  begin and end a handle's life; the scheduler ends only what it began
``version``                attribute: optimizer steps in the weights it holds now (default 0)
========================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from digen.types import (
    CommitReport,
    Encoded,
    EvaluationReport,
    EvaluationRequest,
    LoadReport,
    MicroBatch,
    Payload,
    Prompt,
    Publication,
    Rollout,
    Scored,
    Snapshot,
    UpdateReport,
)


@runtime_checkable
class Handle(Protocol):
    """Anything with a name that is unique in the run."""

    @property
    def name(self) -> str:
        """Unique name, used in events, reports and errors."""
        ...


@runtime_checkable
class Generator(Handle, Protocol):
    """Draws trajectories and loads published weights. With ``score`` it also scores (the paper's colocated reward)."""

    async def generate(self, micro_batch: MicroBatch, /) -> Rollout:
        """Generate every sample of ``micro_batch`` with the weights held now."""
        ...

    async def load(self, publication: Publication, /) -> LoadReport:
        """Replace the weights. Called only between trajectories."""
        ...


@runtime_checkable
class Scorer(Handle, Protocol):
    """Computes rewards. A generator may be one; a pool of its own or an endpoint may be another."""

    async def score(self, rollout: Rollout, /) -> Scored:
        """One finite reward per sample, or raise :class:`digen.errors.RewardError`."""
        ...


@runtime_checkable
class Trainer(Handle, Protocol):
    """Accumulates gradients, steps the optimizer and publishes weights."""

    async def update(self, rollout: Rollout, advantages: Sequence[float | None], /) -> UpdateReport:
        """Accumulate the unnormalised gradient of one micro-batch.

        ``advantages`` has one entry per sample in row order; ``None`` leaves the sample out (best-of-N).
        """
        ...

    async def commit(self, step: int, indices: Sequence[int], /) -> CommitReport:
        """Divide by the step's denominator and step the optimizer.

        ``indices`` are the micro-batches whose updates the step must consist of, no more and no fewer. Where the
        divisor of the advantages was deferred, a third argument is what the gradient is multiplied by.
        """
        ...

    async def publish(self, version: int, /) -> Publication:
        """Make the weights of ``version``, the current one, available to generators."""
        ...


class PlacedPayload(Protocol):
    """A payload that its maker writes in place, also after it was handed out."""

    @property
    def views(self) -> Mapping[str, memoryview]:
        """The arrays, writable."""
        ...

    @property
    def offsets(self) -> Mapping[str, int]:
        """Where they lie in the segment, in bytes."""
        ...

    @property
    def segment(self) -> int:
        """Number of the segment; the same memory each time that it occurs."""
        ...

    @property
    def descriptor(self) -> int:
        """Of the segment, for other processes of this user; open as long as this process lives."""
        ...

    @property
    def payload(self) -> Payload:
        """What to return to the driver."""
        ...


class Memory(Protocol):
    """Shared memory of a worker process. A target with a method ``lend_memory(memory)`` is lent it once it is built."""

    def place(
        self, arrays: Mapping[str, tuple[str, tuple[int, ...]]], written: Callable[[Mapping[str, memoryview]], bool]
    ) -> PlacedPayload:
        """Take a segment for arrays of these ``struct`` formats and shapes; their content is arbitrary.

        It is lent as any payload, and given back if it is never returned to the driver. It is not used again before
        ``written(views)`` says that nobody writes it any more.
        """
        ...


METHODS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "encode": ((tuple[Prompt, ...],), Encoded),
    "generate": ((MicroBatch, Encoded | None), Rollout),
    "score": ((Rollout,), Scored),
    "load": ((Publication,), LoadReport),
    "update": ((Rollout, tuple[float | None, ...]), UpdateReport),
    "commit": ((int, tuple[int, ...], float | None), CommitReport),
    "publish": ((int,), Publication),
    "switch": ((str,), None),
    "save": ((str,), dict[str, Any]),
    "begin_save": ((str,), None),
    "saved": ((), dict[str, Any] | None),
    "restore": ((str,), int),
    "snapshot": ((), Snapshot),
    "recall": ((Snapshot,), int),
    "evaluate": ((EvaluationRequest,), EvaluationReport),
}
"""Argument types and result type of every method that crosses a process boundary. A last argument may be absent where
its type allows ``None``."""
