"""A virtual clock: an event loop whose time jumps to the next timer whenever nothing is ready.

``run_virtual(main())`` runs a coroutine in which ``asyncio.sleep(3600)`` returns at once and ``loop.time()`` has moved
by exactly 3600. Nothing else changes: the very same scheduler code runs on it and on a real loop. If nothing is ready
and no timer is pending, nothing can ever happen again: :class:`Deadlock` is raised instead of hanging.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_REAL_GRACE_S = 0.2

_FEW = 100
"""Cancelled timers that are not worth sweeping."""


class Deadlock(RuntimeError):
    """On a virtual clock: every task waits and no timer is pending."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, starting at 0.

    Threads may wake it at any time. Files and sockets, which do not live in virtual time, are looked at only when no
    timer is pending.
    """

    _ready: deque[Any]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = count()
        super().__init__()
        self._scheduled: list[tuple[float, int, Any]] = []
        """Timers, the next one first. A bare heap of timers, as asyncio's, forgets in which order they were set."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """The base class's, without its checks of debug mode: it is called several times for every task of a run."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Like the base class's, but timers of one time go off in the order in which they were set."""
        self._check_closed()  # type: ignore[attr-defined]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._scheduled, (when, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        """One turn: run what is ready; what that makes ready waits for the next turn."""
        ready, timers = self._ready, self._scheduled
        if not ready and not self._stopping:
            self._jump()
        while timers and timers[0][0] <= self._now:
            ready.append(self._pop_timer())
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _jump(self) -> None:
        timers = self._scheduled
        if self._timer_cancelled_count > max(_FEW, len(timers) // 2):
            timers[:] = [item for item in timers if not item[2]._cancelled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        if timers:
            self._now = max(self._now, timers[0][0])
            return
        # Only a thread or a process could still wake the loop, and neither lives in virtual time.
        events = self._selector.select(_REAL_GRACE_S)  # type: ignore[attr-defined]
        if not events:
            raise Deadlock("virtual clock: nothing is ready and no timer is pending")
        self._process_events(events)  # type: ignore[attr-defined]

    def _pop_timer(self) -> asyncio.TimerHandle:
        timer: Any = heapq.heappop(self._scheduled)[2]
        timer._scheduled = False
        self._timer_cancelled_count -= timer._cancelled
        return timer  # type: ignore[no-any-return]


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to completion in virtual time, like ``asyncio.run``.

    Raises:
        Deadlock: every task waits and no timer is pending.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
