"""Drawing samples: SDE trajectories with log-probabilities for training, ODE samples for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from digen.diffusion.families.base import Conditioning, Family, Schedule, compute_dtype
from digen.diffusion.sde import euler, flow_sde
from digen.diffusion.seeds import INITIAL_NOISE, STEP_NOISE, draw, streams
from digen.diffusion.trajectories import Trajectories
from digen.diffusion.units import padded_units
from digen.errors import NumericsError
from digen.types import MicroBatch


@torch.no_grad()
def sample_sde(
    family: Family,
    micro_batch: MicroBatch,
    conditioning: Conditioning,
    schedule: Schedule,
    *,
    noise_level: float,
    unit: int,
) -> Trajectories:
    """Draw every sample of a micro-batch with Flow-SDE steps; the last step, to sigma 0, is the noiseless Euler step.

    Args:
        family: the policy.
        micro_batch: its seeds decide every draw.
        conditioning: the encoded prompts, one row per sample.
        schedule: noise levels and times, see :meth:`Family.schedule`.
        noise_level: a of the Flow-SDE step.
        unit: samples in one forward; the last forward is padded.

    Raises:
        NumericsError: a latent or log-probability is not finite; names sample and step.
    """
    dtype = compute_dtype(family.dtype)
    sigmas, times = schedule.levels.to(dtype), schedule.times.to(dtype)
    initial = streams(micro_batch.seeds(INITIAL_NOISE))
    steps = streams(micro_batch.seeds(STEP_NOISE))
    names = [f"{piece.uid}/{sample}" for piece, sample in micro_batch.samples()]
    latents, log_probs = [], []
    for rows, real in padded_units(range(len(names)), unit):
        padding = [min(position, real - 1) for position in range(unit)]
        start = draw([initial[row] for row in rows[:real]], family.latent_shape)[padding]
        noise = [steps[row] for row in rows[:real]]
        x = start.to(family.device, dtype)
        chain, densities = [x], []
        cond = _take(conditioning, rows)
        for step, (sigma, sigma_next) in enumerate(_transitions(sigmas, unit, family.device)):
            velocity = family.predict(x, times[step].to(family.device).expand(unit), cond)
            if step == len(sigmas) - 2:
                x = euler(x, velocity, sigma, sigma_next)
                density = x.new_full((unit,), torch.nan)
            else:
                transition = flow_sde(
                    x, velocity, sigma, sigma_next, second_sigma=sigmas[1].to(x.device), noise_level=noise_level
                )
                x = transition.sample(draw(noise, family.latent_shape)[padding].to(x))
                density = transition.log_prob(x)
                _check_finite(density, "log-probability", step, [names[row] for row in rows])
            _check_finite(x, "latent", step, [names[row] for row in rows])
            chain.append(x)
            densities.append(density)
        latents.append(torch.stack(chain, dim=1)[:real].cpu())
        log_probs.append(torch.stack(densities, dim=1)[:real].cpu())
    return Trajectories(torch.cat(latents), torch.cat(log_probs), sigmas, times, conditioning)


@torch.no_grad()
def sample_ode(family: Family, conditioning: Conditioning, schedule: Schedule, start: Tensor, *, unit: int) -> Tensor:
    """Integrate the probability-flow ODE with Euler steps; returns ``(n, *latent_shape)`` clean latents on the CPU.

    Args:
        family: the policy.
        conditioning: the encoded prompts, one row per sample.
        schedule: noise levels and times.
        start: ``(n, *latent_shape)`` standard normal noise.
        unit: samples in one forward; the last forward is padded.

    Raises:
        NumericsError: a latent is not finite; names row and step.
    """
    dtype = compute_dtype(family.dtype)
    sigmas, times = schedule.levels.to(dtype), schedule.times.to(dtype)
    clean = []
    for rows, real in padded_units(range(len(start)), unit):
        x = start[rows].to(family.device, dtype)
        cond = _take(conditioning, rows)
        for step, (sigma, sigma_next) in enumerate(_transitions(sigmas, unit, family.device)):
            x = euler(x, family.predict(x, times[step].to(family.device).expand(unit), cond), sigma, sigma_next)
            _check_finite(x, "latent", step, [f"row {row}" for row in rows])
        clean.append(x[:real].cpu())
    return torch.cat(clean)


def _transitions(sigmas: Tensor, rows: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    columns = [sigma.expand(rows) for sigma in sigmas.to(device)]
    return list(pairwise(columns))


def _take(conditioning: Conditioning, rows: Sequence[int]) -> Conditioning:
    return {name: tensor[list(rows)] for name, tensor in conditioning.items()}


def _check_finite(values: Tensor, what: str, step: int, names: Sequence[str]) -> None:
    finite = torch.isfinite(values).reshape(len(names), -1).all(dim=1)
    if not bool(finite.all()):
        sample = names[int((~finite).nonzero()[0])]
        raise NumericsError(
            f"{what} of sample {sample} is not finite after denoising step {step}; "
            "the policy has diverged: lower optimizer.lr, or go back to an earlier checkpoint"
        )
