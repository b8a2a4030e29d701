"""AuraFlow, a family that another package adds.

The package's ``pyproject.toml`` offers it under ``[project.entry-points."digen.families"]`` by the line
``aura_flow = "aura_flow_digen:AuraFlow"``; a config then says ``model.family: aura_flow``.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from digen.diffusion.families.base import Conditioning, Images, Schedule
from digen.diffusion.families.pipeline import STATIC_EULER, PipelineFamily
from digen.diffusion.schedule import euler_sigmas


class AuraFlow(PipelineFamily):
    """A flow model on latents ``(C, h, w)``, told its sigma and T5 states, guided by a second forward."""

    pipeline = "AuraFlowPipeline"
    denoiser_class = "AuraFlowTransformer2DModel"
    default_guidance = 3.5
    default_size = (1, 1024, 1024)
    default_tokens = 256

    def configure(self, index: Mapping[str, Any]) -> None:
        """Sizes and shift."""
        super().configure(index)
        transformer, vae = self.component_config("transformer"), self.component_config("vae")
        factor, patch = 2 ** (len(vae["block_out_channels"]) - 1), transformer["patch_size"]
        _, height, width = self.size
        rows = self.latent_size("height", height, factor, multiple=patch)
        columns = self.latent_size("width", width, factor, multiple=patch)
        self.latent_shape = (transformer["in_channels"], rows, columns)
        self._shift = self.euler_config(STATIC_EULER)["shift"]

    def schedule(self, num_steps: int) -> Schedule:
        """The sigmas of diffusers' Euler scheduler."""
        return Schedule.of_flow(euler_sigmas(num_steps, self._shift))

    def encode_texts(self, texts: list[str]) -> Conditioning:
        """T5 states, zero behind a prompt's end."""
        states, *_ = self.pipe.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=self.max_tokens
        )
        return {"encoder_hidden_states": states}

    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of the transformer."""
        velocity: Tensor = self.network(latents, timestep=times.to(self.dtype), **conditioning).sample
        return velocity

    def decode(self, latents: Tensor) -> Images:
        """Images ``(n, 3, H, W)``."""
        self._need("decode")
        return self.decode_images(latents / self.pipe.vae.config.scaling_factor)
