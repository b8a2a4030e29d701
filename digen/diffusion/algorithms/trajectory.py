"""Algorithms that are trained on the log-probabilities of recorded transitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from digen.config import RunConfig
from digen.diffusion.algorithms.base import Algorithm, Forward, Item, Losses, by_term
from digen.diffusion.families.base import Conditioning, Family, Schedule
from digen.diffusion.kernels import KERNELS
from digen.diffusion.losses import clipped_policy_loss, gaussian_kl
from digen.diffusion.sampler import sample_sde
from digen.diffusion.schedule import trained_steps
from digen.diffusion.sde import STEPS, StepDistribution
from digen.diffusion.trajectories import Trajectories
from digen.errors import ConfigError, InvariantViolation
from digen.types import MicroBatch


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a trajectory algorithm, for its :meth:`TrajectoryAlgorithm.policy_loss`."""

    log_prob: Tensor
    """``(n, k)`` under the policy that is trained."""
    old_log_prob: Tensor
    """``(n, k)``, a constant."""
    recorded_log_prob: Tensor
    """``(n, k)`` when the trajectory was drawn; the old one unless that is recomputed."""
    advantage: Tensor
    """``(n, 1)``, not clamped."""
    mean: Tensor
    """``(n, k, ...)`` of the transition under the policy that is trained."""
    old_mean: Tensor | None
    """The same under the old one, where the declaration asks for ``means``."""
    std: Tensor
    """``(n, k)``: the full standard deviation of the transition."""
    step_size: Tensor
    """``(n, k)``: by how much the level falls, -dt of a flow."""

    @property
    def log_ratio(self) -> Tensor:
        """``(n, k)`` of the policy that is trained to the old one."""
        return self.log_prob - self.old_log_prob

    @property
    def divergence(self) -> Tensor:
        """``(n, k)`` KL of the transition from the old one, with a gradient."""
        if self.old_mean is None:
            raise InvariantViolation("the trajectories carry no means: the algorithm must declare that it needs them")
        return gaussian_kl(self.mean, self.old_mean, self.std)


class TrajectoryAlgorithm(Algorithm):
    """Trained on the log-probabilities of noisy transitions; as it stands PPO's clipped loss."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        if self.settings.kernel is None:
            raise ConfigError(f"algorithm {config.algorithm.name!r} is trained on trajectories but declares no kernel")
        self.kernel = self.settings.kernel
        """How a noisy transition is drawn."""

    def noisy_steps(self, micro_batch: MicroBatch, num_steps: int) -> Sequence[int]:
        """The transitions with noise, of all of a step's samples alike."""
        return range(num_steps if KERNELS[self.kernel].ends_noisy else num_steps - 1)

    def draw(
        self, family: Family, micro_batch: MicroBatch, conditioning: Conditioning, schedule: Schedule, *, unit: int
    ) -> Trajectories:
        """Trajectories with log-probabilities."""
        return sample_sde(
            family,
            micro_batch,
            conditioning,
            schedule,
            noise_level=self.settings.noise_level,
            unit=unit,
            kernel=self.kernel,
            noisy=self.noisy_steps(micro_batch, schedule.num_steps),
            solver=self.config.sampling.solver,
            shared_noise=self.settings.options.shared_noise,
            keep_means=self.declaration.means,
        )

    def trained_steps(self, micro_batch: MicroBatch, items: Sequence[Item], num_steps: int) -> list[list[int]]:
        """The first noisy transitions, as many as ``algorithm.timestep_fraction`` says."""
        noisy = self.noisy_steps(micro_batch, num_steps)
        count = trained_steps(num_steps, self.settings.timestep_fraction, len(noisy))
        return [list(noisy[:count])] * len(items)

    def policy_loss(self, terms: Terms) -> Tensor:
        """``(n, k)``: what is minimised beside the KL."""
        settings = self.settings
        return clipped_policy_loss(
            self.log_ratio(terms),
            terms.advantage,
            clip_range=settings.clip_range,
            advantage_clip=settings.advantage_clip,
        )

    def log_ratio(self, terms: Terms) -> Tensor:
        """``(n, k)``: the logarithm of the ratio that the loss takes."""
        return terms.log_ratio

    def clipped(self, terms: Terms) -> Tensor:
        """``(n, k)``: whether the ratio has left its bounds."""
        return (self.log_ratio(terms).exp() - 1).abs() > self.settings.clip_range

    def losses(self, family: Family, forward: Forward) -> Losses:
        """The policy loss, and the KL to the model before training where it has a weight."""
        weight = self.settings.kl_weight
        reference = self._reference_means(family, forward) if weight else None
        terms = self._terms(family, forward)
        loss = self.policy_loss(terms)
        with torch.no_grad():
            log_ratio = self.log_ratio(terms)
            metrics = {
                "loss/policy": loss.detach(),
                "ratio/mean": log_ratio.exp(),
                "ratio/max": log_ratio.exp(),
                "ratio/abs_logp_diff_max": (terms.log_prob - terms.recorded_log_prob).abs(),
                "clip_fraction": self.clipped(terms).double(),
                "approx_kl": log_ratio.square() / 2,
            }
        if reference is not None:
            divergence = gaussian_kl(terms.mean, reference, terms.std)
            if self.config.algorithm.kl == "flow_grpo":
                divergence = divergence * terms.step_size
            loss = loss + weight * divergence
            metrics["loss/kl"] = divergence.detach()
        return Losses(loss, metrics)

    def tolerance(self) -> tuple[str, float] | None:
        """The clip range."""
        clip = self.settings.clip_range
        return ("algorithm.clip_range", clip) if math.isfinite(clip) else None

    def drift(self, family: Family, forward: Forward) -> Tensor:
        """How far the logarithm of the ratio is from 0."""
        return self.log_ratio(self._terms(family, forward)).abs()

    def _terms(self, family: Family, forward: Forward) -> Terms:
        batch, device = forward.batch, family.device
        shape = (len(forward.rows), len(forward.numbers))
        rows, steps = forward.pairs()
        chains, recorded = batch.trajectories, batch.trajectories.log_probs
        if recorded is None:
            raise InvariantViolation("the rollout carries samples alone, but the algorithm is trained on trajectories")
        following = [step + 1 for step in steps]
        transition = self._transition(family, forward)
        log_prob = transition.log_prob(chains.latents[rows, following].to(device)).reshape(shape)
        recorded = recorded[rows, steps].reshape(shape).to(device)
        forward.check_finite(log_prob, "log-probability")
        forward.check_finite(recorded, "recorded log-probability")
        mean = by_term(transition.mean, shape)
        old_mean = None
        if chains.means is not None:
            old_mean = mean.detach() if batch.recompute else by_term(chains.means[rows, steps].to(device), shape)
        return Terms(
            log_prob=log_prob,
            old_log_prob=log_prob.detach() if batch.recompute else recorded,
            recorded_log_prob=recorded,
            advantage=forward.advantages(device),
            mean=mean,
            old_mean=old_mean,
            std=transition.std.reshape(shape),
            step_size=(chains.levels[steps] - chains.levels[following]).reshape(shape).to(device),
        )

    @torch.no_grad()
    def _reference_means(self, family: Family, forward: Forward) -> Tensor:
        with family.reference():
            mean = self._transition(family, forward).mean
        return by_term(mean, (len(forward.rows), len(forward.numbers)))

    def _transition(self, family: Family, forward: Forward) -> StepDistribution:
        """Of all of a forward's terms, from one call of the network."""
        device, chains = family.device, forward.batch.trajectories
        rows, steps = forward.pairs()
        latents = chains.latents[rows, steps].to(device)
        levels, times = chains.levels.to(device), chains.times.to(device)
        output = family.predict(latents, times[steps], forward.conditioning(rows, device))
        return STEPS[self.kernel](
            latents,
            output,
            levels[steps],
            levels[[step + 1 for step in steps]],
            second_level=levels[1],
            noise_level=self.settings.noise_level,
        )
