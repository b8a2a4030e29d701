"""Handwritten digits: an SD3 transformer of 0.95 M parameters on 8x8 pixels, conditioned on the class.

A real ``SD3Transformer2DModel`` with a frozen table of class embeddings in the place of text encoders and no VAE:
small enough to learn on one CPU core in minutes. The folder has diffusers' layout: ``transformer/``, ``scheduler/``
(a ``FlowMatchEulerDiscreteScheduler`` config) and ``prompt_encoder/`` (the table).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from digen.config import ModelSection
from digen.diffusion.families.base import Conditioning, Images, Schedule
from digen.diffusion.families.pipeline import Part, PipelineFamily
from digen.diffusion.schedule import linear_sigmas, static_shift
from digen.errors import ConfigError
from digen.types import Prompt

ENCODER_WEIGHTS = "model.safetensors"
"""The table's file in ``prompt_encoder/``: one tensor ``weight`` of (num_classes, width)."""


class Digits(PipelineFamily):
    """A loaded digits model; see :class:`digen.diffusion.families.base.Family` for the methods."""

    pipeline = "DigitsPipeline"
    denoiser_class = "SD3Transformer2DModel"
    default_guidance = 1.0
    default_size = (1, 8, 8)
    default_tokens = 1

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        network = self.component_config("transformer")
        self.latent_shape = (int(network["in_channels"]), int(network["sample_size"]), int(network["sample_size"]))
        shift = self.sampling.shift
        self._shift = float(self.component_config("scheduler")["shift"] if shift is None else shift)

    def configure(self, index: Mapping[str, Any]) -> None:
        """Refuse what this model has no use for."""
        super().configure(index)
        for field in ("guidance_scale", "height", "width", "max_prompt_tokens"):
            if getattr(self.sampling, field) is not None:
                raise ConfigError(
                    f"sampling.{field} is set, but the digits family has 8x8 pixels, no guidance and no text"
                )

    def schedule(self, num_steps: int) -> Schedule:
        """A linear ramp, shifted once: its last non-zero sigma is large enough for the last step to clean up."""
        return Schedule.of_flow(static_shift(linear_sigmas(num_steps), self._shift))

    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        """One row ``embedding`` of the class table per prompt."""
        self._need("encode")
        table: Tensor = self.pipe
        return {"embedding": table[[self._label(prompt, len(table)) for prompt in prompts]]}

    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of the transformer; the class embedding serves as the only text token and as pooled text."""
        embedding = conditioning["embedding"]
        output: Tensor = self.network(
            hidden_states=latents,
            timestep=times * 1000,
            encoder_hidden_states=embedding[:, None],
            pooled_projections=embedding,
            return_dict=False,
        )[0]
        return output

    def decode(self, latents: Tensor) -> Images:
        """Pixels: [-1, 1] becomes [0, 1], clipped; ``(n, 8, 8)``."""
        pixels = (latents.float().clamp(-1, 1) + 1) / 2
        return np.ascontiguousarray(pixels[:, 0].cpu().numpy())

    def _load_pipeline(self, model: ModelSection, parts: frozenset[Part]) -> Tensor:
        """The class table is all that there is beside the denoiser."""
        try:
            table = load_file(Path(self.folder) / "prompt_encoder" / ENCODER_WEIGHTS)["weight"]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(f"model {self.folder} cannot be loaded as family {model.family}: {error}") from error
        return table.to(device=self.device, dtype=self.dtype, copy=True)

    @staticmethod
    def _label(prompt: Prompt, classes: int) -> int:
        label = prompt.metadata.get("label")
        if isinstance(label, str) and label.strip().isdecimal():
            label = int(label)
        if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < classes:
            raise ConfigError(
                f"prompt {prompt.text!r}: the digits family needs a label from 0 to {classes - 1} in its metadata, "
                f'got {label!r}; write it as {{"prompt": "the digit 3", "label": 3}}'
            )
        return label
