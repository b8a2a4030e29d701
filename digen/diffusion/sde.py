"""The transitions of a trajectory and their log-probabilities: Flow-SDE, Dance-SDE, Flow-CPS, DDIM.

A latent x at ``level`` (a sigma σ of a flow, a product ᾱ of a DDIM, see :mod:`digen.diffusion.process`) and the model's
output give the Gaussian of the latent at ``level_next``. Step maths is float32, or float64 when the latents are. A std
is always the *full* standard deviation of the next latent given this one, √-dt included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from digen.diffusion.families.base import compute_dtype
from digen.diffusion.process import rows
from digen.errors import NumericsError

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class StepDistribution:
    """The Gaussian of the next latent given this one, one row per sample."""

    mean: Tensor
    """``(n, ...)``."""
    std: Tensor
    """``(n, 1, ...)``: the full standard deviation, √-dt included."""
    normalised: bool = True
    """Whether :meth:`log_prob` is the Gaussian's; Flow-CPS takes ``-(x' - mean)²`` in its place."""

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
        if not self.normalised:
            return -(value - self.mean).square().flatten(1).mean(dim=1)
        deviation = (value - self.mean) / self.std
        density = -0.5 * deviation.square() - self.std.log() - _HALF_LOG_TWO_PI
        return density.flatten(1).mean(dim=1)


class Kernel(Protocol):
    """A transition; every row may be at another step."""

    def __call__(
        self,
        latents: Tensor,
        output: Tensor,
        level: Tensor,
        level_next: Tensor,
        /,
        *,
        second_level: Tensor,
        noise_level: float,
    ) -> StepDistribution:
        """The distribution of the next latents.

        Args:
            latents: ``(n, ...)`` latents at ``level``.
            output: the model's prediction for them, of any floating dtype.
            level: ``(n,)``.
            level_next: ``(n,)``.
            second_level: the schedule's second level, a scalar; Flow-SDE needs it.
            noise_level: a or η of the formulas. With 0 the mean is the noiseless step and there is no log-probability.
        """
        ...


def flow_sde(
    latents: Tensor, output: Tensor, level: Tensor, level_next: Tensor, /, *, second_level: Tensor, noise_level: float
) -> StepDistribution:
    """Flow-GRPO's transition.

    With s = a √(σ / (1 - σ)) and dt = σ' - σ < 0::

        mean = x (1 + s²/(2σ) dt) + v (1 + s² (1 - σ)/(2σ)) dt        std = s √-dt

    At σ = 1 the root diverges, so s uses the schedule's second sigma there, and the first std is a for every schedule.
    """
    x, v, sigma, sigma_next = _step_inputs(latents, output, level, level_next)
    second = rows(second_level.expand_as(level).to(x.dtype), x)
    s = noise_level * (sigma / (1 - torch.where(sigma == 1, second, sigma))).sqrt()
    return _reverse_sde(x, v, sigma, sigma_next - sigma, s)


def dance_sde(
    latents: Tensor, output: Tensor, level: Tensor, level_next: Tensor, /, *, second_level: Tensor, noise_level: float
) -> StepDistribution:
    """DanceGRPO's transition, of constant s = η: the ODE's step less ½ η² score dt, std = η √-dt.

    Its score, -(x - (1 - σ) x̂₀) / σ² with x̂₀ = x - σ v, is -(x + (1 - σ) v) / σ, which makes it Flow-SDE's mean.
    """
    del second_level
    x, v, sigma, sigma_next = _step_inputs(latents, output, level, level_next)
    return _reverse_sde(x, v, sigma, sigma_next - sigma, torch.full_like(sigma, noise_level))


def _reverse_sde(x: Tensor, v: Tensor, sigma: Tensor, dt: Tensor, s: Tensor) -> StepDistribution:
    mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return StepDistribution(mean=mean, std=s * (-dt).sqrt())


def cps(
    latents: Tensor, output: Tensor, level: Tensor, level_next: Tensor, /, *, second_level: Tensor, noise_level: float
) -> StepDistribution:
    """Flow-CPS: the noise of x' is σ' whatever a is, of which std = σ' sin(a π/2) is drawn anew.

    mean = (1 - σ') x̂₀ + √(σ'² - std²) ε̂ with x̂₀ = x - σ v and ε̂ = x + (1 - σ) v.
    """
    del second_level
    x, v, sigma, sigma_next = _step_inputs(latents, output, level, level_next)
    share = torch.tensor(noise_level * math.pi / 2, dtype=x.dtype, device=x.device)
    mean = (1 - sigma_next) * (x - sigma * v) + sigma_next * share.cos() * (x + (1 - sigma) * v)
    return StepDistribution(mean=mean, std=sigma_next * share.sin(), normalised=False)


def ddim(
    latents: Tensor, output: Tensor, level: Tensor, level_next: Tensor, /, *, second_level: Tensor, noise_level: float
) -> StepDistribution:
    """DDIM with η, the transition of DDPO, for a model that predicts the noise e, from ᾱ to ᾱ'.

    std = η √((1 - ᾱ')/(1 - ᾱ) (1 - ᾱ/ᾱ')), mean = √ᾱ' x̂₀ + √(1 - ᾱ' - std²) e with x̂₀ = (x - √(1 - ᾱ) e)/√ᾱ.
    """
    del second_level
    x, e, product, product_next = _step_inputs(latents, output, level, level_next)
    clean = (x - (1 - product).sqrt() * e) / product.sqrt()
    std = noise_level * ((1 - product_next) / (1 - product) * (1 - product / product_next)).sqrt()
    kept = (1 - product_next - std**2).clamp(min=0)  # rounding may leave less than nothing where η is 1
    return StepDistribution(mean=product_next.sqrt() * clean + kept.sqrt() * e, std=std)


STEPS: dict[str, Kernel] = {"flow_sde": flow_sde, "dance_sde": dance_sde, "cps": cps, "ddim": ddim}
"""Every kernel of :data:`digen.diffusion.kernels.KERNELS`."""


def euler(latents: Tensor, output: Tensor, level: Tensor, level_next: Tensor, /) -> Tensor:
    """The noiseless step of a flow's ODE, with arguments as in :class:`Kernel`."""
    dtype = compute_dtype(latents.dtype)
    x = latents.to(dtype)
    return x + output.to(dtype) * rows((level_next - level).to(dtype), x)


def _step_inputs(
    latents: Tensor, output: Tensor, level: Tensor, level_next: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(latents.dtype)
    x = latents.to(dtype)
    return x, output.to(dtype), rows(level.to(dtype), x), rows(level_next.to(dtype), x)
