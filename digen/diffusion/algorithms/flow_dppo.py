"""Flow-DPPO: a trust region in place of the clip; terms that would leave it are left out."""

from __future__ import annotations

from torch import Tensor

from digen.diffusion.algorithms.base import Forward
from digen.diffusion.algorithms.builtin import FLOW_DPPO
from digen.diffusion.algorithms.trajectory import Terms, TrajectoryAlgorithm
from digen.diffusion.families.base import Family
from digen.diffusion.losses import dppo_loss, leaves_region


class FlowDPPO(TrajectoryAlgorithm):
    """The region is measured by the KL of the transition from the old one."""

    declaration = FLOW_DPPO

    def policy_loss(self, terms: Terms) -> Tensor:
        """``-A r`` inside the region."""
        return dppo_loss(
            terms.log_ratio, self._advantage(terms), terms.divergence.detach(), kl_threshold=self._threshold
        )

    def clipped(self, terms: Terms) -> Tensor:
        """Whether a term is left out."""
        return leaves_region(terms.log_ratio, self._advantage(terms), terms.divergence, self._threshold)

    def tolerance(self) -> tuple[str, float]:
        """The region's threshold."""
        return "algorithm.options.kl_threshold", self._threshold

    def drift(self, family: Family, forward: Forward) -> Tensor:
        """The KL that the replay alone makes."""
        return self._terms(family, forward).divergence

    def _advantage(self, terms: Terms) -> Tensor:
        limit = self.settings.advantage_clip
        return terms.advantage.clamp(-limit, limit)

    @property
    def _threshold(self) -> float:
        return float(self.settings.options.kl_threshold)
