"""The Flow-SDE transition and its log-probability (Flow-GRPO).

With s = a √(σ / (1 - σ)) and dt = σ' - σ < 0::

    mean = x (1 + s²/(2σ) dt) + v (1 + s² (1 - σ)/(2σ)) dt        std = s √-dt

At σ = 1 the root diverges, so s uses the schedule's second sigma there. Step maths is float32, or float64 when the
latents are. A std is always the *full* standard deviation of the next latent given this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from digen.diffusion.families.base import compute_dtype
from digen.errors import NumericsError

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class StepDistribution:
    """The Gaussian of the next latent given this one, one row per sample."""

    mean: Tensor
    """``(n, ...)``."""
    std: Tensor
    """``(n, 1, ...)``: the full standard deviation, √-dt included."""

    def sample(self, noise: Tensor) -> Tensor:
        """The next latent for standard normal ``noise`` of the mean's shape."""
        return self.mean + self.std * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """``(n,)`` log-densities of ``value``: the *mean* over a sample's elements, normaliser included.

        Raises:
            NumericsError: a std is zero or not finite: a noiseless step has no log-probability.
        """
        if not bool(((self.std > 0) & torch.isfinite(self.std)).all()):
            raise NumericsError(
                "log-probability of a noiseless step: a standard deviation is zero or not finite; "
                "train only steps before the last, with sampling.noise_level > 0"
            )
        deviation = (value - self.mean) / self.std
        density = -0.5 * deviation.square() - self.std.log() - _HALF_LOG_TWO_PI
        return density.flatten(1).mean(dim=1)


def flow_sde(
    latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, *, second_sigma: Tensor, noise_level: float
) -> StepDistribution:
    """The transition from ``sigma`` to ``sigma_next``; every row may be at another step.

    Args:
        latents: ``(n, ...)`` latents at ``sigma``.
        velocity: the model's prediction for them, of any floating dtype.
        sigma: ``(n,)``, in (0, 1].
        sigma_next: ``(n,)``, smaller than ``sigma`` row by row.
        second_sigma: the schedule's second sigma, a scalar; stands in for ``sigma`` = 1 inside the root.
        noise_level: a. With 0 the mean is the Euler step and there is no log-probability.
    """
    dtype = compute_dtype(latents.dtype)
    x, v = latents.to(dtype), velocity.to(dtype)
    sigma, sigma_next, second = (_rows(s.to(dtype), x) for s in (sigma, sigma_next, second_sigma.expand_as(sigma)))
    dt = sigma_next - sigma
    s = noise_level * (sigma / (1 - torch.where(sigma == 1, second, sigma))).sqrt()
    mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return StepDistribution(mean=mean, std=s * (-dt).sqrt())


def euler(latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """The noiseless step of the probability-flow ODE, with arguments as in :func:`flow_sde`."""
    dtype = compute_dtype(latents.dtype)
    x = latents.to(dtype)
    return x + velocity.to(dtype) * _rows((sigma_next - sigma).to(dtype), x)


def _rows(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1))
