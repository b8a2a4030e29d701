"""Wan text to video: Wan 2.1, and those of Wan 2.2 that have one transformer.

A flow model on latents ``(C, T, h, w)``, told its sigma times 1000, the text as UMT5 states that are zero behind the
prompt's end (there is no mask), and guided by a second forward.

Two schedulers are known. ``FlowMatchEulerDiscreteScheduler`` gives the sigmas of
:func:`digen.diffusion.schedule.euler_sigmas`, and the network is told them. The published folders have
``UniPCMultistepScheduler`` with flow sigmas: ``linspace(1, 0.001, T + 1)`` without its end, shifted once by
``flow_shift``, and the network is told ``int(1000 sigma)``, which is 999 at the start. digen visits the same sigmas
with the same times by steps of first order; the multistep solver itself has no transition to take a log-probability
of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from digen.diffusion.families.base import Conditioning, Images, Schedule
from digen.diffusion.families.pipeline import STATIC_EULER, PipelineFamily
from digen.diffusion.schedule import euler_sigmas, static_shift
from digen.errors import ConfigError

_EULER, _MULTISTEP = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
_FLOW_SIGMAS = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "final_sigmas_type": "zero",
    "num_train_timesteps": 1000,
}


class Wan(PipelineFamily):
    """A loaded Wan model; see :class:`digen.diffusion.families.base.Family` for the methods."""

    pipeline = "WanPipeline"
    denoiser_class = "WanTransformer3DModel"
    default_guidance = 5.0
    default_size = (81, 480, 832)
    default_tokens = 512
    precise = ("vae",)

    def configure(self, index: Mapping[str, Any]) -> None:
        """Sizes of Wan 2.1's and 2.2's VAE; one transformer only."""
        super().configure(index)
        if (index.get("transformer_2") or [None])[0] is not None:
            raise ConfigError(
                f"model folder {self.folder} has a transformer_2; two denoisers that share a trajectory are not "
                "supported: take Wan 2.1, or a Wan 2.2 with one transformer"
            )
        transformer, vae = self.component_config("transformer"), self.component_config("vae")
        time, space = vae.get("scale_factor_temporal", 4), vae.get("scale_factor_spatial", 8)  # Wan 2.1 does not say
        frames, height, width = self.size
        _, rows, columns = transformer["patch_size"]
        self.latent_shape = (
            transformer["in_channels"],
            self.latent_size("num_frames", frames, time, extra=1),
            self.latent_size("height", height, space, multiple=rows),
            self.latent_size("width", width, space, multiple=columns),
        )
        scheduler = self.scheduler({_EULER: STATIC_EULER, _MULTISTEP: _FLOW_SIGMAS})
        self._multistep = type(scheduler).__name__ == _MULTISTEP
        own = scheduler.config["flow_shift" if self._multistep else "shift"]
        self._shift = own if self.sampling.shift is None else self.sampling.shift

    def schedule(self, num_steps: int) -> Schedule:
        """The sigmas and times of the folder's scheduler, see above."""
        if not self._multistep:
            return Schedule.of_flow(euler_sigmas(num_steps, self._shift))
        ramp = torch.from_numpy(np.linspace(1, 1 / 1000, num_steps + 1)[:-1])
        sigmas = static_shift(ramp, self._shift)
        told = (1000 * sigmas).floor().clamp(max=999) / 1000
        return Schedule(torch.cat([sigmas, sigmas.new_zeros(1)]), told)

    def encode_texts(self, texts: list[str]) -> Conditioning:
        """UMT5 states ``(n, max_tokens, D)``, zero behind a prompt's end."""
        states, _ = self.pipe.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=self.max_tokens, device=self.device
        )
        return {"encoder_hidden_states": states}

    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of the transformer."""
        timestep = times * 1000
        output: Tensor = self.network(hidden_states=latents, timestep=timestep, return_dict=False, **conditioning)[0]
        return output

    def decode(self, latents: Tensor) -> Images:
        """Videos ``(n, F, 3, H, W)``; a latent's channels are scaled by the VAE's own means and standard deviations."""
        self._need("decode")
        mean, std = (
            torch.tensor(self.pipe.vae.config[name]).reshape(-1, 1, 1, 1).to(latents)
            for name in ("latents_mean", "latents_std")
        )
        return self.decode_videos(latents * std + mean)
