"""Lanes and the inbox: how the loop hands tasks to handles and hears of their ends.

One long-lived coroutine per worker, futures as mailboxes, one ordered deque: a task costs two wake-ups, whatever the
number of workers. An anyio task group or ``asyncio.wait`` per call would cost several times as much.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from digen.errors import DigenError, ProtocolError, WorkerError, WorkerTimeout
from digen.events import TaskKind
from digen.sched.checks import warn
from digen.sched.snapshots import Snapshots
from digen.sched.state import Task, Worker
from digen.types import Snapshot

if TYPE_CHECKING:
    import asyncio

_METHOD: dict[TaskKind, str] = {"assist": "generate"}
_STANDSTILL_S = 1.0
"""A timer that goes off so late was kept waiting by this process, which may have been stopped for a while."""


class Checkpointer(Protocol):
    """Decides when to save and saves. Runs on the trainer's lane, between its tasks.

    A method ``async newest() -> tuple[int, str] | None``, where it has one, gives version and path of the newest intact
    checkpoint, from which a trainer that was lost is restored.
    """

    def due(self, version: int, *, last: bool) -> bool:
        """Whether the weights of ``version`` shall be saved; ``last`` when the run ends with them."""
        ...

    async def save(self, trainer: Any, version: int) -> str | asyncio.Future[str]:
        """Save and return the path, complete and durable.

        Or return a future of it once the trainer may go on, whose state is copied by then and still being written. It
        is cancelled when the trainer is lost meanwhile.
        """
        ...


class Inbox:
    """Completions in the order in which they happened. The only thing the loop sleeps on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Task, Any, Exception | None]] = deque()
        self.restarted: deque[Restart] = deque()
        """Restarts that have ended, in this order."""
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False

    def __bool__(self) -> bool:
        return bool(self._items or self.restarted)

    def put(self, task: Task, result: Any, error: Exception | None) -> None:
        """Append a completion."""
        self._items.append((task, result, error))
        self.wake()

    def wake(self) -> None:
        """Let the loop look around even though nothing ended."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self) -> Iterable[tuple[Task, Any, Exception | None]]:
        """Wait until something happened or somebody woke us; return every completion so far."""
        if not self._woken:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def take(self) -> Iterable[tuple[Task, Any, Exception | None]]:
        """Every completion so far, without waiting."""
        self._woken = False
        items, self._items = self._items, deque()
        return items


class _Alarm:
    """Goes off after a while, but not because this process stood still meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def set(self, after_s: float, then: Callable[..., None], *arguments: Any) -> None:
        """Call ``then`` after ``after_s``."""
        due = self._loop.time() + after_s
        self._timer = self._loop.call_later(after_s, self._ring, due, after_s, then, arguments)

    def _ring(self, due: float, after_s: float, then: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self._loop.time() - due > _STANDSTILL_S:  # answers may be waiting
            self.set(after_s, then, *arguments)
        else:
            then(*arguments)

    def off(self) -> None:
        """Do not go off."""
        if self._timer is not None:
            self._timer.cancel()


class Lane:
    """One long-lived coroutine per worker: take a task, call the handle, put the result into the inbox."""

    def __init__(
        self,
        handle: Any,
        worker: Worker,
        *,
        inbox: Inbox,
        checkpointer: Checkpointer | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.worker = worker
        self.killable = hasattr(handle, "kill") and hasattr(handle, "restart")
        """Whether a call that takes too long can be ended, and another worker started."""
        self._handle = handle
        self._alarm = _Alarm(loop)
        self._inbox = inbox
        self._calls: dict[TaskKind, Callable[..., Awaitable[Any]]] = {}
        if checkpointer is not None:
            self._calls["checkpoint"] = partial(checkpointer.save, handle)
        self._loop = loop
        self._mail: asyncio.Future[Task] = loop.create_future()
        self._cancelled = False
        self.coroutine: asyncio.Task[None] = loop.create_task(self._serve(), name=f"digen-lane-{worker.name}")

    def give(self, task: Task, deadline_s: float | None = None) -> None:
        """Hand over a task; the worker must be idle. After ``deadline_s`` it counts as failed."""
        self._mail.set_result(task)
        if deadline_s is not None:
            self._alarm.set(deadline_s, self._overdue, task, deadline_s)

    def _overdue(self, task: Task, deadline_s: float) -> None:
        self._inbox.put(task, None, _timeout(self.worker, task.kind, deadline_s))

    def cancel(self) -> None:
        """Abandon the running call. If that swallows its cancellation, the lane ends after it all the same."""
        self._cancelled = True
        self._alarm.off()
        self.coroutine.cancel()
        self._mail.cancel()

    async def _serve(self) -> None:
        calls, put = self._calls, self._inbox.put
        while True:
            task = await self._mail
            self._mail = self._loop.create_future()
            try:
                call = calls.get(task.kind)
                if call is None:
                    call = calls[task.kind] = getattr(self._handle, _METHOD.get(task.kind, task.kind))
                try:
                    result = await call(*task.argument)
                finally:
                    self._alarm.off()
            except Exception as error:
                put(task, None, error)
            except BaseException as error:
                if not self._cancelled:  # a cancellation of the handle's own, or something that is no Exception
                    name = self.worker.name
                    what = f"worker {name!r} let {type(error).__name__} escape: {error}"
                    failure = WorkerError(what, worker=name, task=task.kind)
                    failure.__cause__ = error
                    put(task, None, failure)
                raise
            else:
                put(task, result, None)


class Restart:
    """A lost worker on its way back: wait, start it again, have a trainer get its state back; then tell the inbox.

    A trainer recalls the newest snapshot, or restores the newest checkpoint if that is newer. A snapshot that it cannot
    recall is dropped with a warning, and a trainer that is started once more restores the checkpoint. One that hangs in
    either is a restart that failed.

    Args:
        handle: has a method ``restart``, which ends what is left of the worker and starts another in its place; it
            bounds the time of that itself.
        worker: whose handle it is.
        wait_s: back-off.
        hung: why it has to be killed first, if it hangs.
        deadline_s: longest time that a trainer may take to restore or recall, if it can be killed.
        wanted: the version that a trainer had; another one that holds it needs nothing.
        inbox: is told of the end.
        checkpointer: finds the checkpoint that a trainer restores.
        snapshots: keeps the snapshot that a trainer recalls.
        loop: the event loop.
    """

    def __init__(
        self,
        handle: Any,
        worker: Worker,
        wait_s: float,
        *,
        hung: str,
        deadline_s: float,
        wanted: int,
        inbox: Inbox,
        checkpointer: Checkpointer | None,
        snapshots: Snapshots,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.worker = worker
        self.error: Exception | None = None
        """Why it failed, once it has ended."""
        self.version = 0
        """The version that the worker holds, once it is back."""
        self._handle = handle
        self._killable = hasattr(handle, "kill")
        self._hung = hung
        self._deadline_s = deadline_s
        self._alarm = _Alarm(loop)
        self._wanted = wanted
        self._inbox = inbox
        self._checkpointer = checkpointer
        self._snapshots = snapshots
        self._loop = loop
        self.coroutine: asyncio.Task[None] = loop.create_task(self._run(wait_s), name=f"digen-restart-{worker.name}")

    async def _run(self, wait_s: float) -> None:
        try:
            if self._hung and self._killable:
                await self._handle.kill(self._hung)
            if wait_s > 0:
                awake = self._loop.create_future()
                self._loop.call_later(wait_s, _wake, awake)
                await awake
            await self._start()
            if self.worker.role == "trainer" and self.version != self._wanted:
                await self._restore()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self._inbox.restarted.append(self)
        self._inbox.wake()

    async def _call(self, method: str, argument: Any) -> Any:
        if self._killable:
            self._alarm.set(self._deadline_s, self._overdue, method)
        try:
            return await getattr(self._handle, method)(argument)
        finally:
            self._alarm.off()
            if self.coroutine.cancelling():  # perhaps it swallowed that, and answers now that nobody waits any more
                over = self._loop.create_future()
                over.cancel()
                await over

    def _overdue(self, method: str) -> None:
        error = _timeout(self.worker, method, self._deadline_s)
        if method == "recall":
            self._drop_snapshot(error)
        self._end(error)
        self.coroutine.cancel()

    async def _start(self) -> None:
        await self._handle.restart()
        self.version = int(getattr(self._handle, "version", 0))

    async def _restore(self) -> None:
        snapshot, found = self._snapshots.newest, None
        if snapshot is None or snapshot.version != self._wanted:
            found = await self._newest()
        if snapshot is not None and (found is None or snapshot.version > found[0]):
            if await self._recalls(snapshot):
                return
            del snapshot
            gc.collect()  # its memory goes with the last reference, of which the error's frames hold some
            await self._start()  # nobody knows what it holds now
            found = found or await self._newest()
        if found is not None:
            version, path = found
            await self._call("restore", path)
            self.version = version

    async def _recalls(self, snapshot: Snapshot) -> bool:
        name, wanted = self.worker.name, snapshot.version
        try:
            version = await self._call("recall", snapshot)
            if version != wanted:
                what = f"worker {name!r} says that it holds {version!r} after it recalled version {wanted}"
                raise ProtocolError(what, worker=name, task="recall")
        except DigenError as error:
            self._drop_snapshot(error)
            return False
        self.version = wanted
        return True

    def _drop_snapshot(self, error: DigenError) -> None:
        warn("a snapshot cannot be recalled; what counts is the newest checkpoint", reason=str(error))
        self._snapshots.drop()

    async def _newest(self) -> tuple[int, str] | None:
        newest = getattr(self._checkpointer, "newest", None)
        found: tuple[int, str] | None = await newest() if newest is not None else None
        return found


def _timeout(worker: Worker, task: str, deadline_s: float) -> WorkerTimeout:
    what = f"worker {worker.name!r} has not answered {task} for {deadline_s:.6g} s, its deadline; it counts as hung"
    return WorkerTimeout(what, worker=worker.name, task=task)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():  # it was cancelled meanwhile
        sleeper.set_result(None)
