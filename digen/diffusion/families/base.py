"""What sampler, update and roles need of a model family, and nothing more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digen.types import Prompt

Conditioning = dict[str, Tensor]
"""What a prompt became: named tensors whose first dimension is the sample."""

Images = NDArray[np.float32]
"""Decoded samples in [0, 1]: images ``(n, H, W)`` or ``(n, C, H, W)``, videos ``(n, F, C, H, W)``."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The T transitions of a trajectory, in float64."""

    levels: Tensor
    """``(T + 1,)`` noise levels, from noise to sample: sigmas from 1 to 0 of a flow model, the products ᾱ of a DDIM."""
    times: Tensor
    """``(T,)``: what the network is told at each transition. A flow's are its sigmas unless the family rounds them."""

    @classmethod
    def of_flow(cls, sigmas: Tensor) -> Schedule:
        """A flow model that is told its sigmas."""
        return cls(sigmas, sigmas[:-1])

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.times)


class Family(Protocol):
    """A loaded model.

    A flow model has x at sigma = (1 - sigma) x0 + sigma noise and predicts noise - x0; a DDIM model predicts the noise.
    """

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latent, as the denoiser takes it."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and forward."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The trained parameters by name. They are what is published, and they are replaced in place only."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Forwards inside are of the model as it was before any training (KL to the reference).

        Raises:
            ConfigError: at the first use, if the family was not told to keep it.
        """
        ...

    def schedule(self, num_steps: int) -> Schedule:
        """The noise levels of a trajectory of ``num_steps`` transitions."""
        ...

    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Encode prompts, one row each; what classifier-free guidance needs is in it.

        Raises:
            ConfigError: a prompt lacks what the family needs, or the family was loaded without its encoders.
        """
        ...

    def predict(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """The network's prediction for ``(n, *latent_shape)`` latents at ``(n,)`` times, guidance included."""
        ...

    def decode(self, latents: Tensor) -> Images:
        """Clean ``(n, *latent_shape)`` latents as images or videos."""
        ...


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of step maths, latents and log-probabilities for a model of ``dtype``: never below float32."""
    return torch.promote_types(dtype, torch.float32)


def align(module: torch.nn.Module) -> None:
    """Move the weights to storage of their own.

    Weights read from safetensors are memory-mapped at an offset that is no multiple of 64 bytes, and CPU kernels then
    take another path: the same weights would give other bits than after a load or an optimizer step.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
