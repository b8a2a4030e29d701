"""Drawing samples: SDE trajectories with log-probabilities for training, ODE samples for everything else."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from digen.diffusion.families.base import Conditioning, Family, Schedule, compute_dtype
from digen.diffusion.sde import STEPS
from digen.diffusion.seeds import INITIAL_NOISE, STEP_NOISE, draw, group_seeds, streams
from digen.diffusion.solvers import SolverName, make_solver
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
    kernel: str = "flow_sde",
    noisy: Collection[int] | None = None,
    solver: SolverName = "euler",
    shared_noise: bool = False,
    keep_means: bool = False,
) -> Trajectories:
    """Draw every sample of a micro-batch as a trajectory, of which some transitions are noisy.

    Args:
        family: the policy.
        micro_batch: its seeds decide every draw.
        conditioning: the encoded prompts, one row per sample.
        schedule: noise levels and times, see :meth:`Family.schedule`.
        noise_level: of the kernel.
        unit: samples in one forward; the last forward is padded.
        kernel: how a noisy transition is drawn, see :data:`digen.diffusion.sde.STEPS`.
        noisy: the transitions with noise and a log-probability; all but the last by default.
        solver: how the others are taken.
        shared_noise: start every sample of a group from the same noise.
        keep_means: record the means of the noisy transitions.

    Raises:
        NumericsError: a latent or log-probability is not finite; names sample and step.
    """
    dtype = compute_dtype(family.dtype)
    levels, times = schedule.levels.to(dtype), schedule.times.to(dtype)
    num_steps = len(times)
    noisy = range(num_steps - 1) if noisy is None else noisy
    initial = streams(_initial_seeds(micro_batch, shared_noise=shared_noise))
    steps = streams(micro_batch.seeds(STEP_NOISE))
    names = [f"{piece.uid}/{sample}" for piece, sample in micro_batch.samples()]
    latents, log_probs, means = [], [], []
    for rows, real in padded_units(range(len(names)), unit):
        padding = [min(position, real - 1) for position in range(unit)]
        start = draw([initial[row] for row in rows[:real]], family.latent_shape)[padding]
        noise = [steps[row] for row in rows[:real]]
        x = start.to(family.device, dtype)
        chain, densities, centres = [x], [], []
        cond = _take(conditioning, rows)
        unit_levels, unit_names = levels.to(x.device), [names[row] for row in rows]
        follow = make_solver(solver, levels)
        for step in range(num_steps):
            output = family.predict(x, times[step].to(x.device).expand(unit), cond)
            if step in noisy:
                level, level_next = (unit_levels[i].expand(unit) for i in (step, step + 1))
                transition = STEPS[kernel](
                    x, output, level, level_next, second_level=unit_levels[1], noise_level=noise_level
                )
                x = transition.sample(draw(noise, family.latent_shape)[padding].to(x))
                density, centre = transition.log_prob(x), transition.mean
                _check_finite(density, "log-probability", step, unit_names)
                follow.restart()
            else:
                x = follow.step(x, output, step)
                density, centre = x.new_full((unit,), torch.nan), torch.full_like(x, torch.nan)
            _check_finite(x, "latent", step, unit_names)
            chain.append(x)
            densities.append(density)
            if keep_means:
                centres.append(centre)
        latents.append(torch.stack(chain, dim=1)[:real].cpu())
        log_probs.append(torch.stack(densities, dim=1)[:real].cpu())
        if keep_means:
            means.append(torch.stack(centres, dim=1)[:real].cpu())
    return Trajectories(
        torch.cat(latents),
        torch.cat(log_probs),
        levels,
        times,
        conditioning,
        means=torch.cat(means) if keep_means else None,
    )


def sample_clean(
    family: Family,
    micro_batch: MicroBatch,
    conditioning: Conditioning,
    schedule: Schedule,
    *,
    unit: int,
    solver: SolverName = "euler",
    shared_noise: bool = False,
) -> Trajectories:
    """Draw every sample of a micro-batch by the ODE, and keep nothing but the samples.

    Args and errors: as :func:`sample_sde`.
    """
    dtype = compute_dtype(family.dtype)
    start = draw(streams(_initial_seeds(micro_batch, shared_noise=shared_noise)), family.latent_shape)
    names = [f"{piece.uid}/{sample}" for piece, sample in micro_batch.samples()]
    clean = sample_ode(family, conditioning, schedule, start, unit=unit, solver=solver, names=names)
    return Trajectories(clean[:, None], None, schedule.levels.to(dtype), schedule.times.to(dtype), conditioning)


@torch.no_grad()
def sample_ode(
    family: Family,
    conditioning: Conditioning,
    schedule: Schedule,
    start: Tensor,
    *,
    unit: int,
    solver: SolverName = "euler",
    names: Sequence[str] | None = None,
) -> Tensor:
    """Follow the probability-flow ODE; returns ``(n, *latent_shape)`` clean latents on the CPU.

    Args:
        family: the policy.
        conditioning: the encoded prompts, one row per sample.
        schedule: noise levels and times.
        start: ``(n, *latent_shape)`` standard normal noise.
        unit: samples in one forward; the last forward is padded.
        solver: how a step is taken.
        names: of the samples, for errors.

    Raises:
        NumericsError: a latent is not finite; names sample and step.
    """
    dtype = compute_dtype(family.dtype)
    levels, times = schedule.levels.to(dtype), schedule.times.to(dtype)
    names = [f"row {row}" for row in range(len(start))] if names is None else names
    clean = []
    for rows, real in padded_units(range(len(start)), unit):
        x = start[rows].to(family.device, dtype)
        cond = _take(conditioning, rows)
        follow = make_solver(solver, levels)
        for step in range(len(times)):
            x = follow.step(x, family.predict(x, times[step].to(x.device).expand(unit), cond), step)
            _check_finite(x, "latent", step, [names[row] for row in rows])
        clean.append(x[:real].cpu())
    return torch.cat(clean)


def _initial_seeds(micro_batch: MicroBatch, *, shared_noise: bool) -> list[int]:
    return group_seeds(micro_batch, INITIAL_NOISE) if shared_noise else micro_batch.seeds(INITIAL_NOISE)


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
