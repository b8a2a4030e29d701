"""Noise schedules: which sigmas a trajectory visits and which of its transitions are trained.

Sigmas fall from 1 to 0; T transitions have T + 1 of them. They are computed in float64 and travel with the trajectory,
so that nobody has to reconstruct them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor


def linear_sigmas(num_steps: int) -> Tensor:
    """``1, (T-1)/T, ..., 1/T, 0``, before any shift. The basis of FLUX's, Qwen-Image's and DanceGRPO's schedules."""
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


def static_shift(sigmas: Tensor, shift: float) -> Tensor:
    """``s σ / (1 + (s - 1) σ)``: more time at high noise for ``shift`` s > 1; 0 and 1 stay exactly where they are."""
    return shift * sigmas / (1 - sigmas + shift * sigmas)


def dynamic_shift(sigmas: Tensor, mu: float) -> Tensor:
    """``e^μ / (e^μ + 1/σ - 1)``, the static shift by ``e^μ``; ``mu`` comes from :func:`resolution_mu`."""
    return static_shift(sigmas, math.exp(mu))


def resolution_mu(
    image_tokens: int,
    *,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """μ of the dynamic shift, linear in the number of image tokens; the defaults are FLUX's."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return base_shift + slope * (image_tokens - base_tokens)


def stretch_to_terminal(sigmas: Tensor, terminal: float) -> Tensor:
    """Scale ``1 - σ`` so that the last non-zero sigma is ``terminal`` (Qwen-Image: 0.02)."""
    falling = sigmas[:-1]
    scale = (1 - falling[-1]) / (1 - terminal)
    return torch.cat([1 - (1 - falling) / scale, sigmas[-1:]])


def euler_sigmas(num_steps: int, shift: float, num_train_timesteps: int = 1000) -> Tensor:
    """What diffusers' ``FlowMatchEulerDiscreteScheduler(shift=shift).set_timesteps(num_steps)`` gives (SD3, Wan).

    It shifts twice: the linear ramp ends at the *shifted* smallest training sigma, and is then shifted itself. So the
    last non-zero sigma is 0.0089 for shift 3, not 1/T shifted.
    """
    return static_shift(training_ramp(num_steps, shift, num_train_timesteps), shift)


def training_ramp(num_steps: int, shift: float, num_train_timesteps: int = 1000) -> Tensor:
    """That scheduler's ramp before its shift: from 1 to the smallest training sigma, shifted by ``shift``, and 0."""
    smallest = static_shift(torch.tensor(1 / num_train_timesteps, dtype=torch.float64), shift)
    ramp = torch.linspace(1, float(smallest), num_steps, dtype=torch.float64)
    return torch.cat([ramp, ramp.new_zeros(1)])


def shift_as_configured(ramp: Tensor, config: Mapping[str, Any], image_tokens: int) -> Tensor:
    """Shift a ramp as a ``FlowMatchEulerDiscreteScheduler`` with ``config`` does: by resolution or statically."""
    if config["use_dynamic_shifting"]:
        mu = resolution_mu(
            image_tokens,
            base_tokens=config["base_image_seq_len"],
            max_tokens=config["max_image_seq_len"],
            base_shift=config["base_shift"],
            max_shift=config["max_shift"],
        )
        sigmas = dynamic_shift(ramp, mu)
    else:
        sigmas = static_shift(ramp, config["shift"])
    terminal = config["shift_terminal"]
    return stretch_to_terminal(sigmas, terminal) if terminal else sigmas


def trained_steps(num_steps: int, timestep_fraction: float, trainable: int) -> int:
    """How many transitions are trained: ``int(fraction · T)``, at least one and at most ``trainable``.

    Args:
        num_steps: T.
        timestep_fraction: share of them, in exact decimal arithmetic.
        trainable: transitions that have a log-probability. A flow's last one, to sigma 0, has none.
    """
    exact = Decimal(repr(timestep_fraction)) * num_steps  # 0.29 of 100 is 29, not 28.999...
    return max(1, min(int(exact), trainable))
