"""Signed GRPO, an algorithm that another package adds: Flow-GRPO whose advantages are only good or bad.

The package's ``pyproject.toml`` offers it under ``[project.entry-points."digen.algorithms"]`` by the line
``signed_grpo = "signed_grpo_digen:SignedGRPO"``; a config then says ``algorithm.name: signed_grpo``.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from digen.diffusion.algorithms.declaration import Declaration, TrajectoryOptions
from digen.diffusion.algorithms.trajectory import Terms, TrajectoryAlgorithm
from digen.diffusion.losses import clipped_policy_loss


class SignedOptions(TrajectoryOptions):
    """``algorithm.options`` in a config."""

    margin: Annotated[float, Field(ge=0)] = 0.5
    """Advantages closer to 0 than this count as 0."""


class SignedGRPO(TrajectoryAlgorithm):
    """Every sample pulls equally hard, or not at all."""

    declaration = Declaration(options=SignedOptions, kernels=("flow_sde", "cps"), clip_range=1e-4, homogeneous=False)

    def policy_loss(self, terms: Terms) -> Tensor:
        """PPO's clipped loss of the sign of the advantage; ``(samples, timesteps)``."""
        sign = terms.advantage.sign() * (terms.advantage.abs() > self.settings.options.margin)
        return clipped_policy_loss(terms.log_ratio, sign, clip_range=self.settings.clip_range, advantage_clip=1.0)
