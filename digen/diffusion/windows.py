"""Which transitions of a step's trajectories are noisy, where it is a window of them (MixGRPO, Flow-GRPO-Fast).

A window depends on the step alone, so that every worker, whatever it did before, has the same one. Windows are full:
each start leaves room for all of its transitions. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate


def progressive_start(step: int, *, last: int, stride: int, roll_back: bool, steps_at: Callable[[int], int]) -> int:
    """The first transition of the window at optimizer step ``step``.

    Args:
        step: from 0.
        last: the largest start.
        stride: transitions that it moves by, from start 0.
        roll_back: begin again at 0 once it would pass ``last``; otherwise it ends at ``last`` and stays.
        steps_at: optimizer steps that a window at a start is kept for, at least one.
    """
    starts = list(range(0, last + 1, stride))
    if not roll_back and starts[-1] != last:
        starts.append(last)
    ends = list(accumulate(steps_at(start) for start in starts))
    if roll_back:
        step %= ends[-1]
    return next((start for start, end in zip(starts, ends, strict=True) if step < end), starts[-1])


def random_start(seed: int, *, first: int = 0, last: int) -> int:
    """A start from ``first`` to ``last``, both included, drawn by numpy's default generator."""
    import numpy as np  # here, because the driver reads this module and needs no numpy

    return int(np.random.default_rng(seed).integers(first, last + 1))


def exponential_steps(steps: int, start: int, *, rate: float, threshold: int) -> int:
    """``⌈steps · e^(-rate · max(start - threshold, 0))⌉``: later windows are kept for fewer optimizer steps."""
    return max(1, math.ceil(steps * math.exp(-rate * max(start - threshold, 0))))


def linear_steps(steps: int, start: int, *, end: int) -> int:
    """From ``steps`` at start 0 to a quarter of them (at least one) at ``end``, linearly, rounded down."""
    least = max(1, steps // 4)
    return max(1, int(steps * (1 - start / end) + least * start / end))
