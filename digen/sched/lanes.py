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

    from digen.sched.restart import Restart

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


class Alarm:
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
        self._alarm = Alarm(loop)
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
        self._inbox.put(task, None, overdue(self.worker, task.kind, deadline_s))

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


def overdue(worker: Worker, task: str, deadline_s: float) -> WorkerTimeout:
    """The error of a call that takes too long."""
    what = f"worker {worker.name!r} has not answered {task} for {deadline_s:.6g} s, its deadline; it counts as hung"
    return WorkerTimeout(what, worker=worker.name, task=task)
