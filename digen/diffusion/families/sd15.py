"""Stable Diffusion 1.5, the model of DDPO: a UNet that predicts the noise, sampled by DDIM.

The UNet is told integer timesteps, the text as CLIP states, and is guided by a second forward. Whatever scheduler the
folder has, its betas are sampled as DDPO does it: T timesteps ``1 + k · (1000 // T)``, and a transition goes from t to
``max(t - 1000 // T, 0)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from digen.diffusion.families.base import Conditioning, Images, Schedule
from digen.diffusion.families.pipeline import PipelineFamily
from digen.errors import ConfigError

_NO_SAFETY_CHECKER = {
    "safety_checker": None,  # it blackens samples, and a reward would judge the black
    "feature_extractor": None,
    "image_encoder": None,
    "requires_safety_checker": False,
}
_DDIM = {
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "set_alpha_to_one": False,
    "thresholding": False,
    "rescale_betas_zero_snr": False,
}


class StableDiffusion15(PipelineFamily):
    """A loaded Stable Diffusion 1.x; see :class:`digen.diffusion.families.base.Family` for the methods."""

    pipeline = "StableDiffusionPipeline"
    denoiser = "unet"
    denoiser_class = "UNet2DConditionModel"
    pipeline_options = _NO_SAFETY_CHECKER
    default_guidance = 5.0
    default_size = (1, 512, 512)
    default_tokens = 77

    def configure(self, index: Mapping[str, Any]) -> None:
        """Sizes and betas."""
        import diffusers

        super().configure(index)
        if self.sampling.shift is not None:
            raise ConfigError("sampling.shift is set, but a DDIM has no shift; leave it out")
        if self.max_tokens != self.default_tokens:
            raise ConfigError(
                f"sampling.max_prompt_tokens is {self.max_tokens}, but the pipeline always reads "
                f"{self.default_tokens} tokens; leave it out"
            )
        factor = 2 ** (len(self.component_config("vae")["block_out_channels"]) - 1)
        _, height, width = self.size
        self.latent_shape = (
            self.component_config("unet")["in_channels"],
            self.latent_size("height", height, factor),
            self.latent_size("width", width, factor),
        )
        config = self.component_config("scheduler")
        # Old folders lack the offset; the pipeline corrects them too.
        self._scheduler = diffusers.DDIMScheduler.from_config(config, steps_offset=1)
        self.check_options(self._scheduler.config, _DDIM)

    def schedule(self, num_steps: int) -> Schedule:
        """ᾱ at the visited timesteps and the one after, rising, and the timesteps.

        Raises:
            ConfigError: there are not enough timesteps.
        """
        train = self._scheduler.config.num_train_timesteps
        if num_steps >= train:
            raise ConfigError(f"sampling.num_inference_steps is {num_steps}; the model has timesteps for {train - 1}")
        self._scheduler.set_timesteps(num_steps)
        times = self._scheduler.timesteps
        last = (times[-1:] - train // num_steps).clamp(min=0)
        levels = self._scheduler.alphas_cumprod[torch.cat([times, last])]
        return Schedule(levels.double(), times.double())

    def encode_texts(self, texts: list[str]) -> Conditioning:
        """CLIP states ``(n, 77, D)``."""
        states, _ = self.pipe.encode_prompt(
            texts, device=self.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"encoder_hidden_states": states}

    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of the UNet."""
        output: Tensor = self.network(latents, times, return_dict=False, **conditioning)[0]
        return output

    def decode(self, latents: Tensor) -> Images:
        """Images ``(n, 3, H, W)``."""
        self._need("decode")
        return self.decode_images(latents / self.pipe.vae.config.scaling_factor)
