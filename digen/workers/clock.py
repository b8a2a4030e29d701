"""A virtual clock: an event loop whose time jumps to the next timer whenever nothing is ready.

``run_virtual(main())`` runs a coroutine in which ``asyncio.sleep(3600)`` returns at once and ``loop.time()`` has moved
by exactly 3600. Nothing else changes: the very same scheduler code runs on it and on a real loop. If nothing is ready
and no timer is pending, nothing can ever happen again: :class:`Deadlock` is raised instead of hanging.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_REAL_GRACE_S = 0.2


class Deadlock(RuntimeError):
    """On a virtual clock: every task waits and no timer is pending."""


class _JumpingSelector(selectors.SelectSelector):
    """Asks the operating system for what is ready now, and turns the time it was told to wait into a jump."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:
            return []
        ready = super().select(0)
        if not ready:
            if timeout is None:
                # Only a thread or a process could still wake the loop, and neither lives in virtual time.
                ready = super().select(_REAL_GRACE_S)
                if not ready:
                    raise Deadlock("virtual clock: nothing is ready and no timer is pending")
            else:
                self.now += timeout
        return ready


class _Timer(asyncio.TimerHandle):
    """A timer that goes off after those of the same time that were set before it; a bare heap forgets their order."""

    __slots__ = ("_number",)

    def __init__(
        self, when: float, callback: Callable[..., Any], args: Any, loop: VirtualLoop, context: Context | None
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self._number = next(loop.timers)

    def __lt__(self, other: Any) -> bool:
        when, then = self._when, other._when  # type: ignore[attr-defined]
        return bool(when < then or (when == then and self._number < other._number))


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, starting at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self.timers = count()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Like the base class's, but timers of one time go off in the order in which they were set."""
        self._check_closed()  # type: ignore[attr-defined]
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _run_once(self) -> None:
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        # The jump must land exactly on the timer: `now + (when - now)` can differ from `when` in the last bit.
        if not self._ready and scheduled and not self._stopping:  # type: ignore[attr-defined]
            self._jumping.now = max(self._jumping.now, scheduled[0]._when)
            # asyncio runs the timers that are due before now + resolution: exactly those of this instant.
            self._clock_resolution = math.ulp(self._jumping.now)
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to completion in virtual time, like ``asyncio.run``.

    Raises:
        Deadlock: every task waits and no timer is pending.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
