"""What a signal does before a run can act on it: nothing is cut short halfway, and none is lost.

While modules are imported, which takes a second or more, an interruption could only end in a traceback. It is
remembered then, and obeyed when they are there.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""The signals that a run acts on."""


class _Early:
    """A handler: remembers what comes, and from :meth:`obey` on interrupts. SIGUSR1 it only remembers."""

    def __init__(self) -> None:
        self.preempted = False
        self._interrupted = False
        self._obeys = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.preempted = True
            return
        self._interrupted = True
        if self._obeys:
            raise KeyboardInterrupt

    def obey(self) -> None:
        self._obeys = True
        if self._interrupted:
            raise KeyboardInterrupt


@contextmanager
def remembered() -> Iterator[None]:
    """Inside, signals are remembered until :func:`obey`. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    early = _Early()
    before = {number: signal.signal(number, early) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python


def obey() -> None:
    """From now on SIGINT and SIGTERM interrupt, also those that were remembered.

    Raises:
        KeyboardInterrupt: one was.
    """
    early = signal.getsignal(signal.SIGINT)
    if isinstance(early, _Early):
        early.obey()


def preempted(handler: object) -> bool:
    """Whether a SIGUSR1 has come while ``handler``, a signal's, was in place to remember it."""
    return isinstance(handler, _Early) and handler.preempted
