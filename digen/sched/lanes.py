"""Lanes and the inbox: how the loop hands tasks to handles and hears of their ends.

One long-lived coroutine per worker, futures as mailboxes, one ordered deque: a task costs two wake-ups, whatever the
number of workers. An anyio task group or ``asyncio.wait`` per call would cost several times as much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Protocol

from digen.events import TaskKind
from digen.sched.state import Task, Worker

_METHOD: dict[TaskKind, str] = {"assist": "generate"}


class Checkpointer(Protocol):
    """Decides when to save and saves. Runs on the trainer's lane, between its tasks."""

    def due(self, version: int, *, last: bool) -> bool:
        """Whether the weights of ``version`` shall be saved; ``last`` when the run ends with them."""
        ...

    async def save(self, trainer: Any, version: int) -> str:
        """Save and return the path, complete and durable."""
        ...


class Inbox:
    """Completions in the order in which they happened. The only thing the loop sleeps on."""

    def __init__(self) -> None:
        self._items: deque[tuple[Task, Any, Exception | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, task: Task, result: Any, error: Exception | None) -> None:
        """Append a completion."""
        self._items.append((task, result, error))
        self.wake()

    def wake(self) -> None:
        """Let the loop look around even though nothing ended."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def settle(self) -> None:
        """Let lanes run that were just given a task: what ends at once ends now."""
        await asyncio.sleep(0)

    async def drain(self) -> Iterable[tuple[Task, Any, Exception | None]]:
        """Wait until something happened or somebody woke us; return every completion so far."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def take(self) -> Iterable[tuple[Task, Any, Exception | None]]:
        """Every completion so far, without waiting."""
        items, self._items = self._items, deque()
        return items


class Lane:
    """One long-lived coroutine per worker: take a task, call the handle, put the result into the inbox."""

    def __init__(self, handle: Any, worker: Worker, inbox: Inbox, checkpointer: Checkpointer | None) -> None:
        self.worker = worker
        self._handle = handle
        self._inbox = inbox
        self._calls: dict[TaskKind, Callable[..., Awaitable[Any]]] = {}
        if checkpointer is not None:
            self._calls["checkpoint"] = partial(checkpointer.save, handle)
        self._mail: asyncio.Future[Task]
        self._coroutine: asyncio.Task[None]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to serve."""
        self._loop = loop
        self._mail = loop.create_future()
        self._coroutine = loop.create_task(self._serve(), name=f"digen-lane-{self.worker.name}")

    def give(self, task: Task) -> None:
        """Hand over a task; the worker must be idle."""
        self._mail.set_result(task)

    def cancel(self) -> None:
        """Abandon the running call."""
        self._coroutine.cancel()

    async def ended(self) -> None:
        """Wait until the coroutine is gone."""
        await asyncio.wait([self._coroutine])

    async def _serve(self) -> None:
        calls, put = self._calls, self._inbox.put
        while True:
            task = await self._mail
            self._mail = self._loop.create_future()
            try:
                call = calls.get(task.kind)
                if call is None:
                    call = calls[task.kind] = getattr(self._handle, _METHOD.get(task.kind, task.kind))
                result = await call(*task.argument)
            except Exception as error:
                put(task, None, error)
            else:
                put(task, result, None)
