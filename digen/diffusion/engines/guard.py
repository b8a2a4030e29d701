"""Ends a group of processes when another process has ended, however it ended: ``python -m ...guard FD``.

It is the first process of the group, so that whatever is started into the group cannot outlive it, and the group's
number cannot become another's. ``FD`` is the reading end of a pipe whose writing end only the other process holds.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Wait for the end of the pipe, then kill the group, this process included."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the others of the group
        signal.signal(number, signal.SIG_IGN)
    os.read(int(sys.argv[1]), 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
