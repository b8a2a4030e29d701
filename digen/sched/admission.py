"""Admission: the only place where staleness is computed (line 5 of Algorithm 1).

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
