"""What sampler, update and roles need of a model family, and nothing more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digen.types import Prompt

Conditioning = dict[str, Tensor]
"""What a prompt became: named tensors whose first dimension is the sample."""

Images = NDArray[np.float32]
"""Decoded samples in [0, 1]: ``(n, H, W)`` or ``(n, C, H, W)``."""


class Family(Protocol):
    """A loaded flow model: x at sigma is (1 - sigma) x0 + sigma noise, the network predicts noise - x0."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latent."""
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

    def sigmas(self, num_steps: int) -> Tensor:
        """The ``(num_steps + 1,)`` float64 noise levels of a trajectory, from 1 down to 0."""
        ...

    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Encode prompts, one row each.

        Raises:
            ConfigError: a prompt lacks what the family needs.
        """
        ...

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict noise - x0 for ``(n, *latent_shape)`` latents at ``(n,)`` noise levels, in the model's precision."""
        ...

    def decode(self, latents: Tensor) -> Images:
        """Clean ``(n, *latent_shape)`` latents as images."""
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
