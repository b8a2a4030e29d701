"""Several workers under one roof: started together, ended together, called as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Self

from digen.errors import ConfigError, ProtocolError, WorkerDied, WorkerError, WorkerTimeout
from digen.types import CommitReport, MicroBatch, Payload, Publication, Rollout, Scored, UpdateReport
from digen.workers.handle import to_the_end


class Pool:
    """An async context manager over handles; its calls go to the worker that has been idle longest.

    A call waits until a worker that has the method is idle, first come, first served. ``generate`` and ``score`` go
    to a trainer only if no other worker has them. A worker that died gets no more calls. For anything that concerns
    one worker, such as loading weights, call that worker: ``pool["gen0"]``.

    Args:
        workers: handles with unique names; those with ``start`` and ``aclose`` are started and closed by the pool.

    Raises:
        ConfigError: two workers have the same name.
    """

    def __init__(self, workers: Iterable[Any]) -> None:
        self.workers: tuple[Any, ...] = tuple(workers)
        """All workers, in the order given."""
        self._by_name = {worker.name: worker for worker in self.workers}
        if len(self._by_name) < len(self.workers):
            raise ConfigError(f"worker names must be unique in a pool: {[worker.name for worker in self.workers]}")
        self._idle: deque[Any] = deque(self.workers)
        self._waiting: deque[tuple[str, asyncio.Future[Any]]] = deque()
        self._lost: dict[str, WorkerError] = {}

    @property
    def generators(self) -> tuple[Any, ...]:
        """The workers that generate and do not train. Known once the pool is entered."""
        return tuple(worker for worker in self.workers if hasattr(worker, "generate") and not hasattr(worker, "update"))

    @property
    def trainer(self) -> Any:
        """The worker that trains, or ``None``. Known once the pool is entered."""
        return next((worker for worker in self.workers if hasattr(worker, "update")), None)

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    async def __aenter__(self) -> Self:
        starts = [asyncio.ensure_future(worker.start()) for worker in self.workers if hasattr(worker, "start")]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await to_the_end(self._abandon(starts))
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all workers, at the same time. Not cut short by cancellation."""
        await to_the_end(self._close())

    async def generate(self, micro_batch: MicroBatch, /) -> Rollout:
        """Generate a micro-batch on an idle generator."""
        rollout: Rollout = await self.call("generate", micro_batch)
        return rollout

    async def score(self, rollout: Rollout, /) -> Scored:
        """Score a rollout on an idle worker that can."""
        scored: Scored = await self.call("score", rollout)
        return scored

    async def update(self, rollout: Rollout, advantages: Sequence[float | None], /) -> UpdateReport:
        """Accumulate a gradient on the trainer."""
        report: UpdateReport = await self.call("update", rollout, advantages)
        return report

    async def commit(self, step: int, indices: Sequence[int], /) -> CommitReport:
        """Step the trainer's optimizer."""
        report: CommitReport = await self.call("commit", step, indices)
        return report

    async def publish(self, version: int, /) -> Publication:
        """Publish the trainer's weights."""
        publication: Publication = await self.call("publish", version)
        return publication

    def release(self, payload: Payload) -> None:
        """Give a payload back to the worker that owns it."""
        for worker in self.workers:
            if hasattr(worker, "release"):
                worker.release(payload)

    async def call(self, method: str, /, *args: Any) -> Any:
        """Call ``method`` on an idle worker that has it.

        Raises:
            WorkerError: no worker has it.
            WorkerDied, WorkerTimeout, ProtocolError: the worker that had it was lost; the call is not repeated.
        """
        worker = await self._take(method)
        try:
            result = await getattr(worker, method)(*args)
        except (WorkerDied, WorkerTimeout, ProtocolError) as error:
            self._lose(worker, error)
            raise
        except BaseException:
            self._give(worker)
            raise
        self._give(worker)
        return result

    def _capable(self, method: str) -> list[Any]:
        capable = [w for w in self.workers if w.name not in self._lost and hasattr(w, method)]
        if method in {"generate", "score"}:
            return [worker for worker in capable if not hasattr(worker, "update")] or capable
        return capable

    async def _take(self, method: str) -> Any:
        capable = self._capable(method)
        if not capable:
            raise self._nobody(method)
        for worker in self._idle:
            if worker in capable:
                self._idle.remove(worker)
                return worker
        turn: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = (method, turn)
        self._waiting.append(entry)
        try:
            return await turn
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not turn.exception():  # the turn had come
                self._give(turn.result())
            raise

    def _give(self, worker: Any) -> None:
        """A worker is idle: hand it to the call that has waited longest among those that it can serve."""
        for entry in self._waiting:
            method, turn = entry
            if not turn.done() and worker in self._capable(method):
                self._waiting.remove(entry)
                turn.set_result(worker)
                return
        self._idle.append(worker)

    def _lose(self, worker: Any, error: WorkerError) -> None:
        self._lost[worker.name] = error
        for entry in list(self._waiting):
            method, turn = entry
            if not self._capable(method):
                self._waiting.remove(entry)
                if not turn.done():
                    turn.set_exception(self._nobody(method))

    def _nobody(self, method: str) -> WorkerError:
        lost = f"; lost: {', '.join(map(str, self._lost.values()))}" if self._lost else ""
        return WorkerError(f"no worker of the pool {sorted(self._by_name)} has {method!r}{lost}")

    async def _abandon(self, starts: list[asyncio.Task[None]]) -> None:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        await self._close()

    async def _close(self) -> None:
        while self._waiting:
            method, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(WorkerError(f"the pool was closed while {method!r} waited for a worker"))
        await asyncio.gather(*(worker.aclose() for worker in self.workers if hasattr(worker, "aclose")))
