"""The scheduler: Algorithm 1 as pure asyncio. It knows no torch, no process and no pipe.

Read :mod:`digen.sched.loop` beside the listing in the paper; then :mod:`digen.sched.admission` (the only staleness
arithmetic), :mod:`digen.sched.select` (who does what next) and :mod:`digen.sched.state` (the counters and queues).
"""

from __future__ import annotations

from digen.sched.invariants import InvariantChecker, check
from digen.sched.loop import Scheduler

__all__ = ["InvariantChecker", "Scheduler", "check"]
