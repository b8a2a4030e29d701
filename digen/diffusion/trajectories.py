"""The content of a rollout: everything that training needs, sigmas and conditioning included."""

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


@dataclass(frozen=True, slots=True)
class Trajectories:
    """n denoising chains of T steps, float32 (float64 for float64 models), on the CPU."""

    latents: Tensor
    """``(n, T + 1, *latent_shape)``, from noise to sample."""
    log_probs: Tensor
    """``(n, T)`` under the policy that drew them; NaN for the last, noiseless step."""
    levels: Tensor
    """``(T + 1,)`` noise levels, as they were used: see :class:`digen.diffusion.families.base.Schedule`."""
    times: Tensor
    """``(T,)``: what the network was told at each transition."""
    conditioning: Conditioning
    """The encoded prompts, one row per chain."""

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
        tensors = {"latents": self.latents, "log_probs": self.log_probs, "levels": self.levels}
        tensors["times"] = self.times
        for name, tensor in self.conditioning.items():
            tensors[_CONDITIONING + name] = tensor.float() if tensor.dtype.itemsize < 4 else tensor
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> Trajectories:
        """Copy a payload's arrays (anything with the buffer protocol).

        Raises:
            InvariantViolation: an array is missing, or the shapes contradict each other.
        """
        tensors = {name: torch.from_numpy(np.array(arrays[name])) for name in arrays}
        missing = {"latents", "log_probs", "levels", "times"} - set(tensors)
        if missing:
            raise InvariantViolation(f"rollout payload lacks {', '.join(sorted(missing))}; it has {sorted(tensors)}")
        conditioning = {
            name.removeprefix(_CONDITIONING): tensor
            for name, tensor in tensors.items()
            if name.startswith(_CONDITIONING)
        }
        made = cls(tensors["latents"], tensors["log_probs"], tensors["levels"], tensors["times"], conditioning)
        n, steps = made.num_samples, made.num_steps
        rows = {len(tensor) for tensor in conditioning.values()}
        if made.latents.shape[:2] != (n, steps + 1) or made.log_probs.shape != (n, steps) or rows - {n}:
            raise InvariantViolation(
                f"rollout payload is incomplete: {steps} times, but latents {tuple(made.latents.shape)}, "
                f"log_probs {tuple(made.log_probs.shape)} and conditioning rows {sorted(rows)}"
            )
        return made
