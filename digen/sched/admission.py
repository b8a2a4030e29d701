"""Admission: the only place where staleness is computed (line 5 of Algorithm 1), and what rollouts may take in memory.

The listing tests the last *dispatched* step, whose counters it never initialises. Read literally it deadlocks at
W = 1 (``s_upd`` = last completed step) or leaks one stale micro-batch past every boundary (``s_upd`` = step being
updated). Here the test is on the *candidate*: a micro-batch of step k may go to a worker that holds version v iff it
is fresh (k = v), or it is stale by at most W - 1 and the step's stale quota is not used up.
"""

from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal


def stale_limit(stale_fraction: Decimal, num_micro_batches: int) -> int:
    """Most stale micro-batches in a step: floor(stale_fraction * B), exact (0.29 * 100 is 29)."""
    return int((stale_fraction * num_micro_batches).to_integral_value(rounding=ROUND_FLOOR))


def admits(step: int, version: int, *, window: int, num_stale: int, limit: int) -> bool:
    """Whether a micro-batch of ``step`` may be generated with weights of ``version``.

    Args:
        step: the candidate's step k.
        version: v, the version that the worker holds.
        window: W >= 1; 1 is on-policy.
        num_stale: stale micro-batches of step k that were dispatched before.
        limit: :func:`stale_limit` of the step.
    """
    staleness = step - version
    if staleness == 0:
        return True
    return 0 < staleness < window and num_stale < limit


def within_bound(step: int, version: int, *, window: int) -> bool:
    """Whether an update of ``step`` may consume a micro-batch of ``version``: checked again at consumption."""
    return 0 <= step - version < window


class Memory:
    """Bytes of the rollouts that exist: from their generation to the commit of their step.

    The current step's rollouts are all needed before any is let go of, so those are always generated. Those of later
    steps are, as long as all that exist and all that are being generated fit into the limit: a generation is expected
    to take what the largest so far took. A micro-batch that turns out larger is the most by which the limit is passed.

    Args:
        limit: bytes; ``None`` is no limit.
    """

    __slots__ = ("_largest", "held", "limit", "most")

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.held = 0
        """Bytes now."""
        self.most = 0
        """The most at a time since :meth:`close_step`."""
        self._largest: int | None = None

    def has_room(self, num_generating: int) -> bool:
        """Whether one more rollout fits beside those that are being generated. Nobody knows before there was one."""
        if self.limit is None:
            return True
        return self._largest is not None and self.held + (num_generating + 1) * self._largest <= self.limit

    def take(self, nbytes: int) -> None:
        """A rollout exists."""
        self.held += nbytes
        self.most = max(self.most, self.held)
        self._largest = max(self._largest or 0, nbytes)

    def let_go(self, nbytes: int) -> None:
        """Rollouts are no longer needed."""
        self.held -= nbytes

    def close_step(self) -> int:
        """The most bytes at a time since the last call."""
        most, self.most = self.most, self.held
        return most
