"""Workers: handles to engines in other processes, in this one, and on a virtual clock.

Importing it starts nothing and loads nothing: names are loaded when they are first used, so that a child process,
which needs only :mod:`digen.workers.child`, does not pay for asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digen.workers.group import GroupWorker
    from digen.workers.inproc import InProcessWorker
    from digen.workers.pool import Pool
    from digen.workers.process import ProcessWorker
    from digen.workers.sim import SimWorker

_HOME = {
    "GroupWorker": "group",
    "InProcessWorker": "inproc",
    "Pool": "pool",
    "ProcessWorker": "process",
    "SimWorker": "sim",
}

__all__ = ["GroupWorker", "InProcessWorker", "Pool", "ProcessWorker", "SimWorker"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'digen.workers' has no attribute {name!r}")
    value = getattr(import_module(f"digen.workers.{home}"), name)
    globals()[name] = value
    return value
