"""Stable Diffusion 3 and 3.5 text to image.

A flow model on latents ``(C, h, w)``, told its sigma times 1000, the states of two CLIPs and of T5 one after the other,
and one pooled vector of the two CLIPs; guided by a second forward. A folder without T5 works, as it does in diffusers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from digen.config import ModelSection
from digen.diffusion.families.base import Conditioning, Images, Schedule
from digen.diffusion.families.pipeline import JOINT_ATTENTION, SHIFTED_EULER, Part, PipelineFamily
from digen.diffusion.schedule import shift_as_configured, training_ramp
from digen.errors import ConfigError


class StableDiffusion3(PipelineFamily):
    """A loaded Stable Diffusion 3; see :class:`digen.diffusion.families.base.Family` for the methods."""

    pipeline = "StableDiffusion3Pipeline"
    denoiser_class = "SD3Transformer2DModel"
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    lora_targets = JOINT_ATTENTION
    default_guidance = 7.0
    default_size = (1, 1024, 1024)
    default_tokens = 256
    most_tokens = 512

    def configure(self, index: Mapping[str, Any]) -> None:
        """Sizes, which the table of positions limits, and shift."""
        super().configure(index)
        transformer, vae = self.component_config("transformer"), self.component_config("vae")
        factor, patch = 2 ** (len(vae["block_out_channels"]) - 1), transformer["patch_size"]
        most = transformer["pos_embed_max_size"] * patch * factor
        _, height, width = self.size
        for field, size in (("height", height), ("width", width)):
            if size > most:
                raise ConfigError(f"sampling.{field} is {size}, but the model has positions for {most} pixels only")
        rows = self.latent_size("height", height, factor, multiple=patch)
        columns = self.latent_size("width", width, factor, multiple=patch)
        self.latent_shape = (transformer["in_channels"], rows, columns)
        self._tokens = rows * columns // patch**2
        self._shift = self.euler_config(SHIFTED_EULER)

    def schedule(self, num_steps: int) -> Schedule:
        """The scheduler's own ramp, which ends at the smallest sigma of training, shifted as the folder says."""
        own = 1.0 if self._shift["use_dynamic_shifting"] else self._shift["shift"]
        return Schedule.of_flow(shift_as_configured(training_ramp(num_steps, own), self._shift, self._tokens))

    def encode_texts(self, texts: list[str]) -> Conditioning:
        """States ``(n, 77 + max_tokens, D)`` and the pooled vector ``(n, P)``."""
        states, _, pooled, _ = self.pipe.encode_prompt(
            texts, None, None, do_classifier_free_guidance=False, max_sequence_length=self.max_tokens
        )
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of the transformer."""
        output: Tensor = self.network(hidden_states=latents, timestep=times * 1000, **conditioning).sample
        return output

    def decode(self, latents: Tensor) -> Images:
        """Images ``(n, 3, H, W)``."""
        self._need("decode")
        vae = self.pipe.vae.config
        return self.decode_images(latents / vae.scaling_factor + vae.shift_factor)

    def _load_pipeline(self, model: ModelSection, parts: frozenset[Part]) -> Any:
        pipe = super()._load_pipeline(model, parts)
        pipe.transformer = self.network  # without T5 its width is that of the zeros in the states' place
        return pipe
