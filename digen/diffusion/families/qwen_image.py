"""Qwen-Image text to image.

A flow model on packed latents ``(h/2 · w/2, 4 C)``, each token a patch of 2x2, told its sigma and the Qwen2.5-VL states
of the prompt in the pipeline's own template, with a mask. It is guided by a second forward; the result is scaled, token
by token, to the norm of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from digen.diffusion.families.base import Conditioning, Images, Schedule
from digen.diffusion.families.pipeline import JOINT_ATTENTION, SHIFTED_EULER, PipelineFamily
from digen.diffusion.schedule import linear_sigmas, shift_as_configured


class QwenImage(PipelineFamily):
    """A loaded Qwen-Image model; see :class:`digen.diffusion.families.base.Family` for the methods."""

    pipeline = "QwenImagePipeline"
    denoiser_class = "QwenImageTransformer2DModel"
    lora_targets = JOINT_ATTENTION
    default_guidance = 4.0
    default_size = (1, 1024, 1024)
    default_tokens = 512
    most_tokens = 1024

    def configure(self, index: Mapping[str, Any]) -> None:
        """Sizes and shift."""
        super().configure(index)
        vae = self.component_config("vae")
        factor = 2 * 2 ** len(vae["temperal_downsample"])  # a token is 2x2 latents
        _, height, width = self.size
        self._rows = self.latent_size("height", height, factor)
        self._columns = self.latent_size("width", width, factor)
        self.latent_shape = (self._rows * self._columns, self.component_config("transformer")["in_channels"])
        self._shift = self.euler_config(SHIFTED_EULER)

    def schedule(self, num_steps: int) -> Schedule:
        """A linear ramp, shifted by the resolution and stretched to end at the configured sigma."""
        return Schedule.of_flow(shift_as_configured(linear_sigmas(num_steps), self._shift, self.latent_shape[0]))

    def encode_texts(self, texts: list[str]) -> Conditioning:
        """States ``(n, max_tokens, D)`` and their mask, zero behind a prompt's end."""
        states, mask = self.pipe.encode_prompt(texts)
        if mask is None:  # none is padded
            mask = states.new_ones(states.shape[:2])
        behind = self.max_tokens - states.shape[1]  # a negative padding cuts
        return {
            "encoder_hidden_states": pad(states, (0, 0, 0, behind)),
            "encoder_hidden_states_mask": pad(mask.bool(), (0, behind)),
        }

    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of the transformer."""
        output: Tensor = self.network(
            hidden_states=latents,
            timestep=(times * 1000).to(self.dtype) / 1000,  # rounded where the pipeline rounds
            img_shapes=[[(1, self._rows, self._columns)]] * len(latents),
            **conditioning,
        ).sample
        return output

    def combine(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Classifier-free guidance with every token's norm as it is without."""
        combined = super().combine(positive, negative)
        wanted, found = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (positive, combined))
        scaled: Tensor = combined * (wanted / found)
        return scaled

    def decode(self, latents: Tensor) -> Images:
        """Images ``(n, 3, H, W)``; a latent's channels are scaled by the VAE's own means and standard deviations."""
        self._need("decode")
        _, height, width = self.size
        grid = self.pipe._unpack_latents(latents, height, width, self.pipe.vae_scale_factor)
        mean, std = (
            torch.tensor(self.pipe.vae.config[name]).reshape(-1, 1, 1, 1).to(grid)
            for name in ("latents_mean", "latents_std")
        )
        return self.decode_images(grid * std + mean)
