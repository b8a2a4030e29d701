"""Lanes and the inbox: how the loop hands tasks to handles and hears of their ends.

One long-lived coroutine per worker, futures as mailboxes, one ordered deque: a task costs two wake-ups, whatever the
number of workers. An anyio task group or ``asyncio.wait`` per call would cost several times as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from digen.errors import WorkerError, WorkerTimeout
from digen.events import TaskKind
from digen.sched.state import Task, Worker

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
        self._alarm: asyncio.TimerHandle | None = None
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
            self._watch(task, deadline_s)

    def _watch(self, task: Task, deadline_s: float) -> None:
        self._alarm = self._loop.call_later(deadline_s, self._overdue, task, deadline_s, self._loop.time() + deadline_s)

    def _overdue(self, task: Task, deadline_s: float, due: float) -> None:
        if self._loop.time() - due > _STANDSTILL_S:  # it was this process that stood still: answers may be waiting
            self._watch(task, deadline_s)
            return
        name = self.worker.name
        what = f"worker {name!r} has not answered {task.kind} for {deadline_s:.6g} s, its deadline; it counts as hung"
        self._inbox.put(task, None, WorkerTimeout(what, worker=name, task=task.kind))

    def cancel(self) -> None:
        """Abandon the running call. If that swallows its cancellation, the lane ends after it all the same."""
        self._cancelled = True
        if self._alarm is not None:
            self._alarm.cancel()
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
                    if self._alarm is not None:
                        self._alarm.cancel()
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
    """A lost worker on its way back: wait, start it again, have a trainer restore its weights; then tell the inbox.

    Args:
        handle: has a method ``restart``, which ends what is left of the worker and starts another in its place.
        worker: whose handle it is.
        wait_s: back-off.
        hung: why it has to be killed first, if it hangs.
        wanted: the version that a trainer had; another one that holds it needs no checkpoint.
        inbox: is told of the end.
        checkpointer: finds the checkpoint that a trainer restores.
        loop: the event loop.
    """

    def __init__(
        self,
        handle: Any,
        worker: Worker,
        wait_s: float,
        *,
        hung: str,
        wanted: int,
        inbox: Inbox,
        checkpointer: Checkpointer | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.worker = worker
        self.error: Exception | None = None
        """Why it failed, once it has ended."""
        self.version = 0
        """The version that the worker holds, once it is back."""
        self._handle = handle
        self._hung = hung
        self._wanted = wanted
        self._inbox = inbox
        self._checkpointer = checkpointer
        self._loop = loop
        self.coroutine: asyncio.Task[None] = loop.create_task(self._run(wait_s), name=f"digen-restart-{worker.name}")

    async def _run(self, wait_s: float) -> None:
        try:
            if self._hung:
                await self._handle.kill(self._hung)
            if wait_s > 0:
                awake = self._loop.create_future()
                self._loop.call_later(wait_s, _wake, awake)
                await awake
            await self._handle.restart()
            self.version = int(getattr(self._handle, "version", 0))
            if self.worker.role == "trainer" and self.version != self._wanted:
                await self._restore()
        except Exception as error:
            self.error = error
        self._inbox.restarted.append(self)
        self._inbox.wake()

    async def _restore(self) -> None:
        newest = getattr(self._checkpointer, "newest", None)
        found = await newest() if newest is not None else None
        if found is not None:
            version, path = found
            await self._handle.restore(path)
            self.version = version


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():  # it was cancelled meanwhile
        sleeper.set_result(None)
