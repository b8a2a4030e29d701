"""The declarations and options of the built-in algorithms. Imports no torch."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from digen.diffusion.algorithms.declaration import Declaration, Options, TrajectoryOptions

# Clip ranges, shares of the steps and noise levels are those of the algorithms' own code.
FLOW_GRPO = Declaration()
DANCE_GRPO = Declaration(kernels=("dance_sde", "flow_sde", "cps"), timestep_fraction=0.6)


class MixOptions(TrajectoryOptions):
    """Where the window of noisy transitions is at each optimizer step (MixGRPO)."""

    window_size: Annotated[int, Field(ge=1)] = 4
    """Transitions in the window; all others follow the ODE and are not trained."""
    strategy: Literal["progressive", "random"] = "progressive"
    """Move the window from noise to sample, or draw its place at every step."""
    steps_per_window: Annotated[int, Field(ge=1)] = 25
    """Optimizer steps that a window is kept for (progressive)."""
    stride: Annotated[int, Field(ge=1)] | None = None
    """Transitions that it moves by (progressive). Default: its size, so that windows do not overlap."""
    roll_back: bool = True
    """Begin again after the last window; otherwise stay there (progressive)."""
    decay: Literal["none", "linear", "exponential"] = "none"
    """Keep later windows for fewer steps: down to a quarter, or exponentially (progressive)."""
    decay_rate: Annotated[float, Field(gt=0)] = 0.1
    """k of the exponential decay."""
    decay_from: Annotated[int, Field(ge=0)] = 13
    """The transition at which the exponential decay begins."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        given = self.model_fields_set
        progressive = {"steps_per_window", "stride", "roll_back", "decay", "decay_rate", "decay_from"} & given
        if self.strategy == "random" and progressive:
            raise ValueError(f"{', '.join(sorted(progressive))} say something only with strategy 'progressive'")
        exponential = {"decay_rate", "decay_from"} & given
        if self.decay != "exponential" and exponential:
            raise ValueError(f"{', '.join(sorted(exponential))} say something only with decay 'exponential'")
        return self

    def check(self, num_steps: int) -> None:
        """The window must leave the last two transitions alone."""
        if self.window_size > num_steps - 2:
            raise ValueError(
                f"window_size {self.window_size} does not fit in the first {num_steps - 2} of {num_steps} transitions "
                "(the last two stay noiseless); lower it or raise sampling.num_inference_steps"
            )


MIX_GRPO = Declaration(options=MixOptions, timestep_fraction=None)


class FastOptions(TrajectoryOptions):
    """Where the few noisy transitions of Flow-GRPO-Fast are; their place is drawn at every optimizer step."""

    window_size: Annotated[int, Field(ge=1)] = 2
    """Noisy transitions, one after the other; only they are trained."""
    window_range: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]] | None = None
    """They lie in [first, end). Default: the first half of the transitions."""

    def range_of(self, num_steps: int) -> tuple[int, int]:
        """``window_range`` for trajectories of ``num_steps`` transitions."""
        return self.window_range or (0, num_steps // 2)

    def check(self, num_steps: int) -> None:
        """The window must lie in its range, and the range in the steps."""
        first, end = self.range_of(num_steps)
        if end > num_steps - 1:
            raise ValueError(
                f"window_range [{first}, {end}) goes beyond the {num_steps - 1} transitions that may be noisy "
                f"(of {num_steps}; the last never is)"
            )
        if self.window_size > end - first:
            raise ValueError(
                f"window_size {self.window_size} does not fit in window_range [{first}, {end}); "
                "lower it, widen the range, or raise sampling.num_inference_steps"
            )


FLOW_GRPO_FAST = Declaration(options=FastOptions, clip_range=1e-5, timestep_fraction=None)
GRPO_GUARD = Declaration(kernels=("flow_sde", "dance_sde"), clip_range=2e-6, means=True)


class DppoOptions(TrajectoryOptions):
    """Flow-DPPO's trust region."""

    kl_threshold: Annotated[float, Field(gt=0)] = 1e-5
    """A term whose transition is this far from the old one, and would go farther, is left out."""


FLOW_DPPO = Declaration(
    options=DppoOptions, kernels=("flow_sde", "dance_sde"), clip_range=None, advantage_clip=math.inf, means=True
)
DDPO = Declaration(kernels=("ddim",), timestep_fraction=1.0)


class NftOptions(Options):
    """DiffusionNFT."""

    beta: Annotated[float, Field(gt=0)] = 1.0
    """How far the positive and the negative prediction are from the old one, in steps of the new one."""
    old_decay: Literal[1, 2] = 1
    """How the old policy follows: 1 from the first step on, 2 after 75 steps in which it is the new one."""


DIFFUSION_NFT = Declaration(
    options=NftOptions, kernels=(), clip_range=None, kl_weight=1e-4, needs_advantage_clip=True, homogeneous=False
)


class DpoOptions(Options):
    """Online DPO."""

    beta: Annotated[float, Field(gt=0)] = 100.0
    """How strongly a preference pulls away from the reference."""
    reference_interval: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps after which the reference becomes the policy. Default: it stays the model before training."""


DPO = Declaration(
    options=DpoOptions,
    kernels=(),
    processes=("flow", "ddim"),
    clip_range=None,
    advantage_clip=None,
    kl_weight=None,
    whole_groups=True,
    homogeneous=False,
)
