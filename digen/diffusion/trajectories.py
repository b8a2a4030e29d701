"""The content of a rollout: everything that training needs, noise levels and conditioning included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from digen.diffusion.families.base import Conditioning
from digen.errors import InvariantViolation

_CONDITIONING = "conditioning."
_ALWAYS = ("latents", "levels", "times")
_WITH_CHAINS = ("log_probs", "means")


def conditioning_arrays(conditioning: Conditioning) -> dict[str, Any]:
    """Encoded prompts as a payload carries them: half precision becomes float32, which holds it exactly."""
    return {
        name: (tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor).cpu().numpy()
        for name, tensor in conditioning.items()
    }


@dataclass(frozen=True, slots=True)
class Trajectories:
    """n denoising chains of T steps, or only what they ended in; float32 (float64 for float64 models), on the CPU."""

    latents: Tensor
    """``(n, T + 1, *latent_shape)``, from noise to sample; ``(n, 1, *latent_shape)`` where only the sample is kept."""
    log_probs: Tensor | None
    """``(n, T)`` under the policy that drew them, NaN for noiseless steps; ``None`` where only the sample is kept."""
    levels: Tensor
    """``(T + 1,)`` noise levels, as they were used: see :class:`digen.diffusion.families.base.Schedule`."""
    times: Tensor
    """``(T,)``: what the network was told at each transition."""
    conditioning: Conditioning
    """The encoded prompts, one row per chain."""
    means: Tensor | None = None
    """``(n, T, *latent_shape)`` means of the transitions, NaN for noiseless steps, where the algorithm needs them."""

    @property
    def num_samples(self) -> int:
        """Number of chains."""
        return len(self.latents)

    @property
    def num_steps(self) -> int:
        """Transitions T of a chain."""
        return len(self.times)

    def arrays(self) -> dict[str, Any]:
        """Numpy arrays by name, as a payload carries them. Conditioning is at least float32 there."""
        tensors = {name: getattr(self, name) for name in (*_ALWAYS, *_WITH_CHAINS)}
        rows = {_CONDITIONING + name: array for name, array in conditioning_arrays(self.conditioning).items()}
        return rows | {name: tensor.cpu().numpy() for name, tensor in tensors.items() if tensor is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> Trajectories:
        """Copy a payload's arrays (anything with the buffer protocol).

        Raises:
            InvariantViolation: an array is missing, or the shapes contradict each other.
        """
        tensors = {name: torch.from_numpy(np.array(arrays[name])) for name in arrays}
        missing = set(_ALWAYS) - set(tensors)
        if missing:
            raise InvariantViolation(f"rollout payload lacks {', '.join(sorted(missing))}; it has {sorted(tensors)}")
        conditioning = {
            name.removeprefix(_CONDITIONING): tensor
            for name, tensor in tensors.items()
            if name.startswith(_CONDITIONING)
        }
        made = cls(
            latents=tensors["latents"],
            log_probs=tensors.get("log_probs"),
            levels=tensors["levels"],
            times=tensors["times"],
            conditioning=conditioning,
            means=tensors.get("means"),
        )
        made._check()
        return made

    def _check(self) -> None:
        n, steps = self.num_samples, self.num_steps
        length = 1 if self.log_probs is None else steps + 1
        rows = {len(tensor) for tensor in self.conditioning.values()}
        fits = self.latents.shape[:2] == (n, length) and len(self.levels) == steps + 1 and not rows - {n}
        fits &= self.log_probs is None or self.log_probs.shape == (n, steps)
        fits &= self.means is None or self.means.shape == (n, steps, *self.latents.shape[2:])
        if not fits:
            tensors = {name: getattr(self, name) for name in (*_ALWAYS, *_WITH_CHAINS)}
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
            raise InvariantViolation(
                f"rollout payload is incomplete: {steps} times, but {shapes} and conditioning rows {sorted(rows)}"
            )
