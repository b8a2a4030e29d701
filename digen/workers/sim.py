"""A worker that only takes time: the public test double, and what the virtual-time twin runs on.

A :class:`SimWorker` has every method of a generator, a scorer and a trainer. It sleeps for the duration of each task
and returns plausible results. Its weights are a ledger: which micro-batches every optimizer step consisted of, so that
a test can prove that each was trained exactly once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from digen.errors import ConfigError, DigenError
from digen.types import (
    CommitReport,
    LoadReport,
    MicroBatch,
    Payload,
    Publication,
    Rollout,
    Scored,
    UpdateReport,
    derive_seed,
)

Duration = float | Callable[[int, int], float]
"""Seconds, or a function of (step, micro-batch index; -1 for whole steps)."""


_KINDS = ("generate", "score", "load", "update", "commit", "publish", "switch_in", "switch_out")


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():  # it was cancelled meanwhile
        sleeper.set_result(None)


class SimWorker:
    """A generator, scorer and trainer in one, whose work is ``asyncio.sleep``.

    Args:
        name: unique name.
        durations: seconds of ``generate``, ``score``, ``load``, ``update``, ``commit``, ``publish``, ``switch_in``
            (before an assist) and ``switch_out`` (after it); those that are absent take no time.
        reward: a sample's reward from (uid, sample index); the default is a fixed pseudo-random number in [0, 1).
        version: optimizer steps in the weights it holds at first.

    Raises:
        ConfigError: ``durations`` has an unknown key, or a number that is negative or not finite.
    """

    def __init__(
        self,
        name: str,
        durations: Mapping[str, Duration] | None = None,
        *,
        reward: Callable[[str, int], float] | None = None,
        version: int = 0,
    ) -> None:
        self.name = name
        self.version = version
        self.durations = dict(durations or {})
        if unknown := sorted(self.durations.keys() - _KINDS):
            raise ConfigError(
                f"SimWorker {name!r}: no duration is called {', '.join(unknown)}; known: {', '.join(_KINDS)}"
            )
        for kind, duration in self.durations.items():
            if not callable(duration) and not 0 <= duration < math.inf:
                raise ConfigError(f"SimWorker {name!r}: {kind} must be finite and not negative, got {duration}")
        self._reward = reward or (lambda uid, sample: derive_seed(uid, sample) / 2**63)
        self._open: dict[int, None] = {}
        self.trained: list[tuple[int, tuple[int, ...]]] = []
        """(step, micro-batches in the order of their updates) for every commit."""

    async def _spend(self, kind: str, step: int = -1, index: int = -1) -> None:
        duration = self.durations.get(kind, 0)
        seconds = duration(step, index) if callable(duration) else duration
        if seconds > 0:
            # What asyncio.sleep does, in less time: a simulated run sleeps for every task.
            loop = asyncio.get_running_loop()
            awake = loop.create_future()
            loop.call_at(loop.time() + seconds, _wake, awake)
            await awake

    async def generate(self, micro_batch: MicroBatch, /) -> Rollout:
        """Spend ``generate`` seconds."""
        version = self.version
        await self._spend("generate", micro_batch.step, micro_batch.index)
        return Rollout(micro_batch, version, self.version, Payload({}))

    async def score(self, rollout: Rollout, /) -> Scored:
        """Spend ``score`` seconds."""
        micro_batch = rollout.micro_batch
        await self._spend("score", micro_batch.step, micro_batch.index)
        return Scored(tuple(self._reward(piece.uid, sample) for piece, sample in micro_batch.samples()))

    async def load(self, publication: Publication, /) -> LoadReport:
        """Spend ``load`` seconds and take over the version."""
        await self._spend("load", publication.version)
        self.version = publication.version
        return LoadReport(publication.version, publication.checksum or 0, publication.num_tensors)

    async def update(self, rollout: Rollout, advantages: Sequence[float | None], /) -> UpdateReport:
        """Spend ``update`` seconds and note the micro-batch."""
        step, index = rollout.micro_batch.step, rollout.micro_batch.index
        await self._spend("update", step, index)
        if index in self._open:
            raise DigenError(f"step {step} micro-batch {index} was updated twice")
        self._open[index] = None
        return UpdateReport(step, index, sum(value is not None for value in advantages))

    async def commit(self, step: int, indices: Sequence[int], scale: float | None = None, /) -> CommitReport:
        """Spend ``commit`` seconds and write the step into the ledger."""
        await self._spend("commit", step)
        if sorted(self._open) != sorted(indices):
            raise DigenError(f"commit of step {step} wants {sorted(indices)} but holds {sorted(self._open)}")
        self.trained.append((step, tuple(self._open)))
        self._open = {}
        self.version = step + 1
        return CommitReport(self.version, len(indices))

    async def publish(self, version: int, /) -> Publication:
        """Spend ``publish`` seconds."""
        await self._spend("publish", version)
        return Publication(version, Payload({}), checksum=derive_seed("weights", version), num_tensors=1, nbytes=8)

    async def switch(self, to: str, /) -> None:
        """Spend ``switch_in`` or ``switch_out`` seconds."""
        await self._spend("switch_in" if to == "generate" else "switch_out")
