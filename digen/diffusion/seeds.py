"""Named random streams: one CPU generator per (run seed, step, uid, sample, purpose).

Nothing draws from a global generator. A sample's draws depend on its own key only, never on the rows beside it, the
worker or the order of execution, so the same micro-batch gives the same noise anywhere and at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from digen.types import MicroBatch, derive_seed

INITIAL_NOISE = "initial-noise"
"""Purpose of the stream that draws x at sigma 1."""
STEP_NOISE = "step-noise"
"""Purpose of the stream that draws the noise of every SDE step, in the order of the steps."""
TRAINED_STEPS = "trained-steps"
"""Purpose of the stream that draws which steps of a sample are trained."""
TRAINING_NOISE = "training-noise"
"""Purpose of the stream that noises a clean sample for training; the term's number follows it."""
SDE_WINDOW = "sde-window"
"""Purpose of the draw of a step's window of SDE transitions, keyed by (run seed, step) alone."""


def streams(seeds: Sequence[int]) -> list[Generator]:
    """One CPU generator per seed, as :meth:`digen.types.MicroBatch.seeds` gives them."""
    return [Generator().manual_seed(seed) for seed in seeds]


def draw(generators: Sequence[Generator], shape: tuple[int, ...]) -> Tensor:
    """The next ``(n, *shape)`` float32 standard normal numbers, row i from generator i alone."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def group_seeds(micro_batch: MicroBatch, purpose: str) -> list[int]:
    """One seed per sample that all samples of a group share: of the key (run seed, step, uid, purpose)."""
    return [
        derive_seed(micro_batch.run_seed, micro_batch.step, piece.uid, purpose) for piece, _ in micro_batch.samples()
    ]


def random_subsets(seeds: Sequence[int], of: Sequence[int], count: int) -> list[list[int]]:
    """``count`` of the numbers ``of`` for every seed, each subset in rising order."""
    permutations = [torch.randperm(len(of), generator=stream).tolist() for stream in streams(seeds)]
    return [sorted(of[place] for place in permutation[:count]) for permutation in permutations]
