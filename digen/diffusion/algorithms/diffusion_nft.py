"""DiffusionNFT: learns from good and from bad samples on the way from sample to noise; needs samples alone.

Samples are drawn by an old policy that follows the trained one, and it is the old policy that generators get.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from digen.config import RunConfig
from digen.diffusion.algorithms.base import Forward, Losses
from digen.diffusion.algorithms.builtin import DIFFUSION_NFT, NftOptions
from digen.diffusion.algorithms.sample import SampleAlgorithm
from digen.diffusion.families.base import Family
from digen.diffusion.losses import mean_squared_error, nft_loss
from digen.diffusion.optim import WeightCopy
from digen.errors import InvariantViolation

_DECAYS = {1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}
"""(steps without one, growth a step, limit) of :func:`old_policy_decay` by type."""


def old_policy_decay(kind: int, version: int) -> float:
    """Share of the old policy that stays after the optimizer step that made ``version``, (version - flat) rate."""
    flat, rate, limit = _DECAYS[kind]
    return min(max(version - flat, 0) * rate, limit)


class DiffusionNFT(SampleAlgorithm):
    """Every sample is noised to the levels of a random share of the transitions."""

    declaration = DIFFUSION_NFT

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._old: WeightCopy | None = None

    def begin(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """The old policy is the one that training starts from."""
        self._old = WeightCopy(parameters)

    def losses(self, family: Family, forward: Forward) -> Losses:
        """The loss of the positive and negative policy, and the squared distance from the reference's prediction."""
        options: NftOptions = self.settings.options
        weight, parameters = self.settings.kl_weight, family.parameters()
        samples = self.noise_samples(family, forward)
        with torch.no_grad():
            with self.sampling_weights(parameters):
                old = samples.predict(family)
            reference = None
            if weight:
                with family.reference():
                    reference = samples.predict(family)
        prediction = samples.predict(family)
        loss = nft_loss(
            prediction,
            old,
            noisy=samples.noisy,
            clean=samples.clean,
            level=samples.level,
            advantage=forward.advantages(family.device),
            beta=options.beta,
            advantage_clip=self.settings.advantage_clip,
        )
        metrics = {"loss/policy": loss.detach(), "old_deviation": mean_squared_error(prediction.detach(), old)}
        if reference is not None:
            divergence = mean_squared_error(prediction, reference)
            loss = loss + weight * divergence
            metrics["loss/kl"] = divergence.detach()
        return Losses(loss, metrics)

    def held(self) -> WeightCopy:
        """The old policy."""
        if self._old is None:
            raise InvariantViolation("the old policy exists only in a trainer that has begun")
        return self._old

    def committed(self, version: int, parameters: Mapping[str, Tensor]) -> None:
        """The old policy becomes decay old + (1 - decay) new."""
        self.held().blend(parameters, 1 - old_policy_decay(self.settings.options.old_decay, version))

    def published_parameters(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The old policy."""
        return self.held().like(parameters)

    def sampling_weights(self, parameters: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """The old policy."""
        return self.held().lent(parameters)
