"""The clipped policy loss of Flow-GRPO (Dance-GRPO, DDPO), one value per (sample, timestep) term."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def clipped_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, *, clip_range: float, advantage_clip: float
) -> Tensor:
    """``max(-A r, -A clip(r, 1 - ε, 1 + ε))`` with ``r = exp(log_prob - old_log_prob)``, not reduced.

    Args:
        log_prob: under the policy that is trained; the only argument with a gradient.
        old_log_prob: of the same shape.
        advantage: broadcastable to it; clamped to ± ``advantage_clip`` first.
        clip_range: ε.
        advantage_clip: bound of |A|.
    """
    advantage = advantage.clamp(-advantage_clip, advantage_clip)
    ratio = (log_prob - old_log_prob).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range))


@dataclass(slots=True)
class PolicyMetrics:
    """Running statistics of the terms of one micro-batch."""

    clip_range: float
    _losses: list[Tensor] = field(default_factory=list)
    _differences: list[Tensor] = field(default_factory=list)
    _behaviour: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor, log_prob: Tensor, old_log_prob: Tensor, behaviour_log_prob: Tensor) -> None:
        """Take in some terms; ``behaviour_log_prob`` was recorded when the trajectory was drawn."""
        self._losses.append(loss.detach().flatten())
        self._differences.append((log_prob.detach() - old_log_prob).flatten())
        self._behaviour.append((log_prob.detach() - behaviour_log_prob).flatten())

    def values(self) -> dict[str, float]:
        """Flat metrics; empty when no term was added.

        ``ratio/*`` and ``clip_fraction`` are of the ratio that the loss used, ``approx_kl`` is half the mean square of
        its logarithm, ``ratio/abs_logp_diff_max`` compares with the behaviour policy whatever the loss used.
        """
        if not self._losses:
            return {}
        difference = torch.cat(self._differences)
        ratio = difference.exp()
        return {
            "loss/policy": float(torch.cat(self._losses).mean()),
            "ratio/mean": float(ratio.mean()),
            "ratio/max": float(ratio.max()),
            "ratio/abs_logp_diff_max": float(torch.cat(self._behaviour).abs().max()),
            "clip_fraction": float(((ratio - 1).abs() > self.clip_range).double().mean()),
            "approx_kl": float(difference.square().mean() / 2),
        }
