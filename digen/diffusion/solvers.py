"""Noiseless steps: Euler (of a DDIM model its η = 0 step), and DPM-Solver++ of second order.

They draw samples for evaluation, for algorithms that need no trajectory, and between the noisy steps of the others.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from digen.diffusion.families.base import compute_dtype
from digen.diffusion.process import process_of
from digen.diffusion.sde import ddim, euler
from digen.errors import ConfigError

SolverName = Literal["euler", "dpm++"]


class Solver(Protocol):
    """Follows the ODE of one unit of rows; asked for its transitions in their order."""

    def step(self, latents: Tensor, output: Tensor, index: int) -> Tensor:
        """The latents after transition ``index``."""
        ...

    def restart(self) -> None:
        """The next latents are not those of the last step: noise was added. Forget what was seen."""
        ...


def make_solver(name: SolverName, levels: Tensor) -> Solver:
    """A solver for one pass through the transitions of ``levels``.

    Raises:
        ConfigError: DPM-Solver++ for a DDIM model.
    """
    process = process_of(levels)
    if name == "euler":
        return _OneStep(levels, ddim=process == "ddim")
    if process == "ddim":
        raise ConfigError("sampling.solver 'dpm++' is for flow models; this one is sampled by DDIM: leave it out")
    return _DPMSolver(levels)


class _OneStep:
    """Needs nothing but the last prediction."""

    def __init__(self, levels: Tensor, *, ddim: bool) -> None:
        self._levels = levels
        self._ddim = ddim

    def step(self, latents: Tensor, output: Tensor, index: int) -> Tensor:
        level, following = (self._levels[i].to(latents.device).expand(len(latents)) for i in (index, index + 1))
        if self._ddim:
            return ddim(latents, output, level, following, second_level=level[0], noise_level=0.0).mean
        return euler(latents, output, level, following)

    def restart(self) -> None:
        pass


class _DPMSolver:
    """Diffusers' multistep scheduler on our sigmas. It computes in float32."""

    def __init__(self, levels: Tensor) -> None:
        self._levels = levels
        self._scheduler: Any = None

    def step(self, latents: Tensor, output: Tensor, index: int) -> Tensor:
        if self._scheduler is None:
            self._scheduler = self._begin(index)
        dtype = compute_dtype(latents.dtype)
        after: Tensor = self._scheduler.step(
            output.float(), self._scheduler.timesteps[index], latents.float(), return_dict=False
        )[0]
        return after.to(dtype)

    def restart(self) -> None:
        self._scheduler = None

    def _begin(self, index: int) -> Any:
        from diffusers import DPMSolverMultistepScheduler  # here, because it costs seconds

        scheduler: Any = DPMSolverMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", algorithm_type="dpmsolver++", solver_order=2
        )
        scheduler.set_timesteps(len(self._levels) - 1)
        scheduler.sigmas = self._levels.to("cpu", torch.float32)
        scheduler.set_begin_index(index)
        return scheduler
