"""DanceGRPO: PPO's clipped loss on the transitions of Dance-SDE; every sample is trained at steps of its own."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from digen.diffusion.algorithms.base import Item
from digen.diffusion.algorithms.builtin import DANCE_GRPO
from digen.diffusion.algorithms.trajectory import TrajectoryAlgorithm
from digen.diffusion.seeds import TRAINED_STEPS, random_subsets
from digen.types import MicroBatch


class DanceGRPO(TrajectoryAlgorithm):
    """Trains a random share of the noisy transitions, another one for every sample."""

    declaration = DANCE_GRPO

    def trained_steps(self, micro_batch: MicroBatch, items: Sequence[Item], num_steps: int) -> list[list[int]]:
        """``int(timestep_fraction * number of noisy transitions)``, at least one, drawn by (step, uid, sample)."""
        noisy = self.noisy_steps(micro_batch, num_steps)
        count = max(1, int(Decimal(repr(self.settings.timestep_fraction)) * len(noisy)))
        seeds = micro_batch.seeds(TRAINED_STEPS)
        return random_subsets([seeds[row] for (row,) in items], noisy, count)
