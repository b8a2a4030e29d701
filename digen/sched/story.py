"""Everything that happened lately to one micro-batch or one worker, told in order."""

from __future__ import annotations

from collections import deque

from digen.events import AnyEvent, Sink

_MEMORY = 20_000
_UNTOLD = {"time", "story"}
"""Fields that are left out: the time stands in front, and a story is not told within a story."""


class Story:
    """Remembers the last events, for error messages and debugging. Its sink is :attr:`remember`."""

    def __init__(self) -> None:
        self._events: deque[AnyEvent] = deque(maxlen=_MEMORY)
        self.remember: Sink = self._events.append

    def of_micro_batch(self, step: int, index: int) -> list[str]:
        """A line for each event that names micro-batch ``index`` of ``step``."""
        return [
            _line(event)
            for event in self._events
            if getattr(event, "step", None) == step and getattr(event, "index", None) == index
        ]

    def of_worker(self, name: str) -> list[str]:
        """A line for each event that names the worker."""
        return [_line(event) for event in self._events if getattr(event, "worker", None) == name]


def _line(event: AnyEvent) -> str:
    fields = (f"{name}={getattr(event, name)!r}" for name in event.__struct_fields__ if name not in _UNTOLD)
    return f"{event.time:.6f} {type(event).__name__} {' '.join(fields)}"
