from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from digen.diffusion.schedule import linear_sigmas, static_shift
from digen.diffusion.solvers import Solver, make_solver
from digen.errors import ConfigError

SIGMAS = static_shift(linear_sigmas(8), 3.0)


def _velocity(x: Tensor, sigma: float) -> Tensor:
    """A flow whose path is known: data N(0, 0.3²), so x at σ is N(0, (1 - σ)² 0.09 + σ²)."""
    variance = (1 - sigma) ** 2 * 0.09 + sigma**2
    return x * (sigma - (1 - sigma) * 0.09) / variance


def _follow(solver: Solver, x: Tensor, sigmas: Tensor, *, restarts: tuple[int, ...] = ()) -> Tensor:
    for index in range(len(sigmas) - 1):
        if index in restarts:
            solver.restart()
        x = solver.step(x, _velocity(x, float(sigmas[index])), index)
    return x


def _dpm(x: Tensor, sigmas: list[float], restarts: tuple[int, ...] = ()) -> Tensor:
    """DPM-Solver++(2M) from its paper, for α = 1 - σ; first order at the ends and after a restart."""
    before: tuple[float, Tensor] | None = None
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        if i in restarts:
            before = None
        clean = x - sigma * _velocity(x, sigma)
        log_snr = math.log(1 - sigma) - math.log(sigma) if sigma < 1 else -math.inf
        if following == 0:
            return clean
        step = math.log(1 - following) - math.log(following) - log_snr
        estimate = clean
        if before is not None and before[0] > -math.inf:
            estimate = clean + step / (log_snr - before[0]) / 2 * (clean - before[1])
        x = following / sigma * x - (1 - following) * math.expm1(-step) * estimate
        before = log_snr, clean
    return x


def test_euler_is_a_straight_line() -> None:
    x = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    expected = x
    for sigma, following in pairwise(SIGMAS.tolist()):
        expected = expected + (following - sigma) * _velocity(expected, sigma)
    torch.testing.assert_close(_follow(make_solver("euler", SIGMAS), x, SIGMAS), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("restarts", [(), (3,), (1, 2, 6)])
def test_dpm_solver_is_its_formula(restarts: tuple[int, ...]) -> None:
    x = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    ours = _follow(make_solver("dpm++", SIGMAS), x, SIGMAS, restarts=restarts)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, _dpm(x, SIGMAS.tolist(), restarts), rtol=0, atol=2e-6)


def test_dpm_solver_is_diffusers_own_run() -> None:
    from diffusers import DPMSolverMultistepScheduler

    scheduler: Any = DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
    )
    scheduler.set_timesteps(8)
    sigmas = scheduler.sigmas.double().clone()
    sigmas[0] = 1.0  # its own first sigma is a little below
    x = theirs = torch.tensor([[1.0], [-2.0]])
    scheduler.sigmas = sigmas.float()
    for index, t in enumerate(scheduler.timesteps):
        theirs = scheduler.step(_velocity(theirs, float(sigmas[index])), t, theirs, return_dict=False)[0]
    torch.testing.assert_close(_follow(make_solver("dpm++", sigmas), x, sigmas), theirs, rtol=0, atol=1e-6)


def test_dpm_solver_is_closer_to_the_solution() -> None:
    x = torch.tensor([[1.0]], dtype=torch.float64)
    exact = x * 0.3  # a flow between two centred Gaussians scales
    sigmas = static_shift(linear_sigmas(40), 3.0)
    errors = {name: float((_follow(make_solver(name, sigmas), x, sigmas) - exact).abs()) for name in ("euler", "dpm++")}
    assert errors["dpm++"] < errors["euler"] / 5


def test_a_ddim_model_takes_the_step_without_noise() -> None:
    from diffusers import DDIMScheduler

    scheduler: Any = DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    scheduler.set_timesteps(5)
    times = [*scheduler.timesteps.tolist(), 0]
    levels = scheduler.alphas_cumprod[times]
    x = theirs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    solver = make_solver("euler", levels)
    for index, t in enumerate(times[:-2]):
        x = solver.step(x, x.cos(), index)
        theirs = scheduler.step(theirs.cos(), t, theirs, return_dict=False)[0]
    torch.testing.assert_close(x, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match=r"'dpm\+\+' is for flow models"):
        make_solver("dpm++", levels)
