"""The two ways from a clean sample to noise, and what a model predicts on them.

=======  ===========================  ===========================  ==================
process  levels of a schedule         x at a level                 the model predicts
=======  ===========================  ===========================  ==================
flow     sigmas, falling from 1 to 0  (1 - σ) x₀ + σ noise         noise - x₀
ddim     products ᾱ, rising           √ᾱ x₀ + √(1 - ᾱ) noise       noise
=======  ===========================  ===========================  ==================
"""

from __future__ import annotations

import torch
from torch import Tensor

from digen.diffusion.kernels import ProcessName
from digen.errors import ConfigError


def process_of(levels: Tensor) -> ProcessName:
    """Which process a schedule's levels are of.

    Raises:
        ConfigError: they are neither sigmas that fall from 1 to 0 nor products that rise below 1.
    """
    shown = ", ".join(f"{level:.4g}" for level in levels.flatten().tolist()[:12])
    if levels.dim() != 1 or len(levels) < 2 or not bool(torch.isfinite(levels).all()):
        raise ConfigError(f"a schedule needs at least two noise levels, all of them finite, got [{shown}]")
    steps = levels.diff()
    if bool((steps < 0).all()) and float(levels[0]) == 1 and float(levels[-1]) == 0:
        return "flow"
    if bool((steps > 0).all()) and float(levels[0]) > 0 and float(levels[-1]) <= 1:
        return "ddim"
    raise ConfigError(
        "noise levels must be sigmas that fall from 1 to 0, or products that rise towards 1, at every step; "
        f"got [{shown}]"
    )


def noised(clean: Tensor, noise: Tensor, level: Tensor, process: ProcessName) -> Tensor:
    """``clean`` at a level, with ``noise`` of its shape; ``level`` has one entry a row."""
    level = rows(level, clean)
    if process == "flow":
        return (1 - level) * clean + level * noise
    return level.sqrt() * clean + (1 - level).sqrt() * noise


def target(clean: Tensor, noise: Tensor, process: ProcessName) -> Tensor:
    """What a perfect model would predict for :func:`noised`, were it told both."""
    return noise - clean if process == "flow" else noise


def rows(values: Tensor, like: Tensor) -> Tensor:
    """``(n,)`` values with the number of dimensions of ``like``, to be combined with its rows."""
    return values.reshape(-1, *[1] * (like.dim() - 1))
