"""Whether an actor still does something: it beats, and whoever falls silent is asked where it is.

The beats are the items of one stream that is opened once, since a call of its own for each would wait its turn behind
calls whose payloads are still on their way. A thread of the actor makes them, whatever its target computes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from digen.workers.actor import Node, ask_for_stacks
from digen.workers.raycluster import imported

_BEATS = 8
"""Beats, and looks for them, in the time that an actor may be silent."""
STACKS_S = 10.0
"""Longest time that the stacks of an actor are waited for: a process on its node may have to be started for that."""


class Listener:
    """Looks again and again whether an actor has beaten since the last time.

    If a look comes late, this process was stopped, busy or asleep: then all the time is given anew.

    Args:
        timeout_s: longest silence.
        on_silence: called once, with the seconds of silence.
    """

    def __init__(self, timeout_s: float, on_silence: Callable[[float], None]) -> None:
        self.interval_s = timeout_s / _BEATS
        """Between two beats, and between two looks."""
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._heard = True
        self._num_silent = 0
        self._listening: asyncio.Task[None] | None = None
        self._look_again: asyncio.TimerHandle | None = None

    def listen(self, beats: AsyncIterator[Any]) -> None:
        """Begin. When the beats end, so does this: the actor has ended, or is out of reach, which others notice."""
        self._listening = asyncio.ensure_future(self._hear(beats))
        self._schedule()

    def stop(self) -> None:
        """Look no more. Harmless when repeated."""
        if self._look_again is not None:
            self._look_again.cancel()
        if self._listening is not None:
            self._listening.cancel()

    async def _hear(self, beats: AsyncIterator[Any]) -> None:
        with contextlib.suppress(imported("ray.exceptions").RayError):
            async for _ in beats:
                self._heard = True
        self.stop()

    def _schedule(self) -> None:
        self._due = self._loop.time() + self.interval_s
        self._look_again = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        late = self._loop.time() - self._due > self.interval_s
        self._num_silent = 0 if late or self._heard else self._num_silent + 1
        self._heard = False
        if self._num_silent > _BEATS:
            self.stop()
            self._on_silence(self._num_silent * self.interval_s)
        else:
            self._schedule()


def stacks_of(node: Node, runtime_env: dict[str, Any]) -> None:
    """Have an actor write the stacks of its threads to its log, by a process on its node; blocks.

    Raises:
        Exception: of Ray, whatever it is: nobody there could be asked in time.
    """
    ray, strategies = imported("ray"), imported("ray.util.scheduling_strategies")
    there = strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    ask = ray.remote(num_cpus=0, max_retries=0, runtime_env=runtime_env, scheduling_strategy=there)(ask_for_stacks)
    ray.get(ask.remote(node.pid), timeout=STACKS_S)
