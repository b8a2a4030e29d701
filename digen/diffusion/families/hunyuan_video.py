"""HunyuanVideo text to video.

A flow model on latents ``(C, T, h, w)``, told its sigma times 1000, the text as Llama states with a mask and one
pooled CLIP vector, and its guidance scale times 1000. A model that was not distilled (``guidance_embeds`` is false) is
guided by a second forward instead. Prompts are put into the pipeline's own template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from digen.diffusion.families.base import Conditioning, Images, Schedule
from digen.diffusion.families.pipeline import JOINT_ATTENTION, STATIC_EULER, PipelineFamily
from digen.diffusion.schedule import linear_sigmas, static_shift


class HunyuanVideo(PipelineFamily):
    """A loaded HunyuanVideo model; see :class:`digen.diffusion.families.base.Family` for the methods."""

    pipeline = "HunyuanVideoPipeline"
    denoiser_class = "HunyuanVideoTransformer3DModel"
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    lora_targets = JOINT_ATTENTION
    default_guidance = 6.0
    default_size = (129, 720, 1280)
    default_tokens = 256

    def configure(self, index: Mapping[str, Any]) -> None:
        """Sizes, and whether the model is distilled."""
        transformer, vae = self.component_config("transformer"), self.component_config("vae")
        self._distilled = bool(transformer["guidance_embeds"])
        super().configure(index)
        frames, height, width = self.size
        time, space = vae["temporal_compression_ratio"], vae["spatial_compression_ratio"]
        self.latent_shape = (
            transformer["in_channels"],
            self.latent_size("num_frames", frames, time, extra=1),
            self.latent_size("height", height, space, multiple=transformer["patch_size"]),
            self.latent_size("width", width, space, multiple=transformer["patch_size"]),
        )
        self._shift = self.euler_config(STATIC_EULER)["shift"]

    @property
    def classifier_free(self) -> bool:
        """Whether a prediction takes a second forward: not of a distilled model."""
        return not self._distilled and super().classifier_free

    def schedule(self, num_steps: int) -> Schedule:
        """A linear ramp, shifted once."""
        return Schedule.of_flow(static_shift(linear_sigmas(num_steps), self._shift))

    def encode_texts(self, texts: list[str]) -> Conditioning:
        """Llama states ``(n, max_tokens, D)`` and their mask, and the pooled CLIP vector ``(n, P)``."""
        states, pooled, mask = self.pipe.encode_prompt(texts, max_sequence_length=self.max_tokens, device=self.device)
        return {"encoder_hidden_states": states, "pooled_projections": pooled, "encoder_attention_mask": mask}

    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of the transformer."""
        output: Tensor = self.network(
            hidden_states=latents,
            timestep=times * 1000,
            guidance=latents.new_full((len(latents),), self.guidance) * 1000,
            return_dict=False,
            **conditioning,
        )[0]
        return output

    def decode(self, latents: Tensor) -> Images:
        """Videos ``(n, F, 3, H, W)``."""
        self._need("decode")
        return self.decode_videos(latents / self.pipe.vae.config.scaling_factor)
