"""Handwritten digits: an SD3 transformer of 0.95 M parameters on 8x8 pixels, conditioned on the class.

A real ``SD3Transformer2DModel`` with a frozen table of class embeddings in the place of text encoders and no VAE:
small enough to learn on one CPU core in minutes. The folder has diffusers' layout: ``transformer/``, ``scheduler/``
(a ``FlowMatchEulerDiscreteScheduler`` config) and ``prompt_encoder/`` (the table).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from digen.diffusion.families.base import Conditioning, Images, align
from digen.diffusion.schedule import linear_sigmas, static_shift
from digen.errors import ConfigError
from digen.types import Prompt

ENCODER_WEIGHTS = "model.safetensors"
"""The table's file in ``prompt_encoder/``: one tensor ``weight`` of (num_classes, width)."""


class Digits:
    """A loaded digits model; see :class:`digen.diffusion.families.base.Family` for the methods."""

    def __init__(self, transformer: Any, embedding: Tensor, shift: float) -> None:
        self._transformer = transformer
        self._embedding = embedding
        self._shift = shift
        size = transformer.config.sample_size
        self.latent_shape = (int(transformer.config.in_channels), int(size), int(size))

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and forward."""
        dtype: torch.dtype = self._transformer.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self._transformer.device
        return device

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The transformer's parameters; the class embeddings are frozen, as a text encoder is."""
        return dict(self._transformer.named_parameters())

    def sigmas(self, num_steps: int) -> Tensor:
        """A linear ramp, shifted once: its last non-zero sigma is large enough for the last step to clean up."""
        return static_shift(linear_sigmas(num_steps), self._shift)

    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        """One row ``embedding`` of the class table per prompt."""
        return {"embedding": self._embedding[[self._label(prompt) for prompt in prompts]]}

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of the transformer; the class embedding serves as the only text token and as pooled text."""
        embedding = conditioning["embedding"].to(self.dtype)
        output: Tensor = self._transformer(
            hidden_states=latents.to(self.dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=embedding[:, None],
            pooled_projections=embedding,
            return_dict=False,
        )[0]
        return output

    def decode(self, latents: Tensor) -> Images:
        """Pixels: [-1, 1] becomes [0, 1], clipped; ``(n, 8, 8)``."""
        pixels = (latents.float().clamp(-1, 1) + 1) / 2
        return np.ascontiguousarray(pixels[:, 0].cpu().numpy())

    def _label(self, prompt: Prompt) -> int:
        classes = len(self._embedding)
        label = prompt.metadata.get("label")
        if isinstance(label, str) and label.strip().isdecimal():
            label = int(label)
        if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < classes:
            raise ConfigError(
                f"prompt {prompt.text!r}: the digits family needs a label from 0 to {classes - 1} in its metadata, "
                f'got {label!r}; write it as {{"prompt": "the digit 3", "label": 3}}'
            )
        return label


def load(folder: Path, *, device: str, dtype: torch.dtype, shift: float | None) -> Digits:
    """Load a digits model from a folder in diffusers' layout.

    Args:
        folder: checked by :func:`digen.diffusion.families.check_model_folder`.
        device: torch device.
        dtype: precision of weights and forward.
        shift: static shift of the sigmas; ``None`` takes the scheduler config's.

    Raises:
        ConfigError: a component cannot be read.
    """
    from diffusers import SD3Transformer2DModel  # here, because it costs seconds

    try:
        scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
        embedding = load_file(folder / "prompt_encoder" / ENCODER_WEIGHTS)["weight"]
        transformer = SD3Transformer2DModel.from_pretrained(  # type: ignore[no-untyped-call]  # diffusers has no types
            folder, subfolder="transformer", torch_dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"model folder {folder} cannot be loaded as family digits: {error}") from error
    transformer.eval().to(device)
    align(transformer)
    return Digits(
        transformer,
        embedding.to(device=device, dtype=dtype, copy=True),
        shift=float(scheduler["shift"] if shift is None else shift),
    )
