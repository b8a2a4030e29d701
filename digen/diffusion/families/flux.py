"""FLUX.1 text to image.

A flow model on packed latents ``(h/2 · w/2, 4 C)``, each token a patch of 2x2, told its sigma, T5 states, one pooled
CLIP vector and positions of both. FLUX.1-dev is distilled and told its guidance scale; FLUX.1-schnell has no guidance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from digen.diffusion.families.base import Conditioning, Images, Schedule
from digen.diffusion.families.pipeline import JOINT_ATTENTION, SHIFTED_EULER, PipelineFamily
from digen.diffusion.schedule import linear_sigmas, shift_as_configured
from digen.errors import ConfigError


class Flux(PipelineFamily):
    """A loaded FLUX.1 model; see :class:`digen.diffusion.families.base.Family` for the methods."""

    pipeline = "FluxPipeline"
    denoiser_class = "FluxTransformer2DModel"
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    lora_targets = JOINT_ATTENTION
    default_guidance = 3.5
    default_size = (1, 1024, 1024)
    default_tokens = 512
    most_tokens = 512
    classifier_free = False

    def configure(self, index: Mapping[str, Any]) -> None:
        """Sizes, shift, and whether the model is told its guidance."""
        super().configure(index)
        transformer, vae = self.component_config("transformer"), self.component_config("vae")
        self._distilled = transformer["guidance_embeds"]
        if self.sampling.guidance_scale is not None and not self._distilled:
            raise ConfigError("sampling.guidance_scale is set, but this FLUX (schnell) has none; leave it out")
        factor = 2 * 2 ** (len(vae["block_out_channels"]) - 1)  # a token is 2x2 latents
        _, height, width = self.size
        self._rows = self.latent_size("height", height, factor)
        self._columns = self.latent_size("width", width, factor)
        self.latent_shape = (self._rows * self._columns, transformer["in_channels"])
        self._shift = self.euler_config(SHIFTED_EULER)

    def schedule(self, num_steps: int) -> Schedule:
        """A linear ramp, shifted by the resolution."""
        return Schedule.of_flow(shift_as_configured(linear_sigmas(num_steps), self._shift, self.latent_shape[0]))

    def encode_texts(self, texts: list[str]) -> Conditioning:
        """T5 states ``(n, max_tokens, D)`` and the pooled CLIP vector ``(n, P)``."""
        states, pooled, _ = self.pipe.encode_prompt(texts, max_sequence_length=self.max_tokens)
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of the transformer."""
        rows, columns = (torch.arange(size, device=self.device) for size in (self._rows, self._columns))
        output: Tensor = self.network(
            hidden_states=latents,
            timestep=(times * 1000).to(self.dtype) / 1000,  # rounded where the pipeline rounds
            guidance=torch.full_like(times, self.guidance) if self._distilled else None,
            img_ids=torch.cartesian_prod(rows.new_zeros(1), rows, columns),
            txt_ids=rows.new_zeros(self.max_tokens, 3),
            **conditioning,
        ).sample
        return output

    def decode(self, latents: Tensor) -> Images:
        """Images ``(n, 3, H, W)``."""
        self._need("decode")
        _, height, width = self.size
        grid = self.pipe._unpack_latents(latents, height, width, self.pipe.vae_scale_factor)
        vae = self.pipe.vae.config
        return self.decode_images(grid / vae.scaling_factor + vae.shift_factor)
