"""GRPO-Guard: ratios of mean 1 and of one scale at every transition, so that the clip binds on both sides."""

from __future__ import annotations

from torch import Tensor

from digen.diffusion.algorithms.builtin import GRPO_GUARD
from digen.diffusion.algorithms.trajectory import Terms, TrajectoryAlgorithm
from digen.diffusion.losses import guard_log_ratio


class GRPOGuard(TrajectoryAlgorithm):
    """PPO's clipped loss on the regulated ratio, divided by -dt, so that no transition outweighs the others."""

    declaration = GRPO_GUARD

    def log_ratio(self, terms: Terms) -> Tensor:
        """The regulated one."""
        return guard_log_ratio(terms.log_ratio, terms.divergence, terms.std)

    def policy_loss(self, terms: Terms) -> Tensor:
        """The clipped loss of the regulated ratio, over -dt."""
        return super().policy_loss(terms) / terms.step_size
