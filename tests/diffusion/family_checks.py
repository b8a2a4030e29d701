"""A family against diffusers' own pipeline: the same folder, prompts and initial noise give the same samples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from digen.config import ModelSection, SamplingSection
from digen.diffusion.families import lookup
from digen.diffusion.families.pipeline import Part, PipelineFamily
from digen.diffusion.sampler import sample_ode
from digen.types import Prompt

TEXTS = ("a red square", "the cat sat on the mat")
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples of one prompt each."""

    sigmas: Tensor
    """``(T + 1,)``."""
    latents: Tensor
    """``(n, *latent_shape)``, clean."""
    pixels: Tensor
    """In [0, 1]."""

    def assert_close(self, other: Drawn) -> None:
        """Equal but for the rounding of float32, which a guidance of 7 multiplies."""
        torch.testing.assert_close(self.sigmas, other.sigmas, atol=2e-7, rtol=0, check_dtype=False)
        torch.testing.assert_close(self.latents, other.latents, atol=TOLERANCE, rtol=1e-6)
        torch.testing.assert_close(self.pixels, other.pixels, atol=TOLERANCE, rtol=0)
        assert float(other.latents.std()) > 0.5
        assert float(other.pixels.std()) > 0.01


def load(
    name: str,
    where: Path | str,
    sampling: Mapping[str, Any],
    parts: frozenset[Part] = frozenset({"denoise", "encode", "decode"}),
    **options: Any,
) -> Any:
    """The family ``name`` of a folder; ``options`` are fields of ``model``."""
    module, _, kind = lookup(name).target.partition(":")
    model = ModelSection(path=Path(where), family=name, **options)
    return getattr(import_module(module), kind)(model=model, sampling=SamplingSection(**sampling), parts=parts)


def load_pipeline(name: str, folder: Path, **options: Any) -> Any:
    """diffusers' pipeline of the same folder."""
    pipe = getattr(diffusers, str(lookup(name).pipeline)).from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def initial_noise(family: PipelineFamily, count: int = len(TEXTS)) -> Tensor:
    """The same for both."""
    return torch.randn(count, *family.latent_shape, generator=torch.Generator().manual_seed(5))


def draw_with_digen(family: PipelineFamily, num_steps: int, texts: Sequence[str] = TEXTS) -> Drawn:
    """Euler samples."""
    schedule = family.schedule(num_steps)
    conditioning = family.encode([Prompt(text) for text in texts])
    latents = sample_ode(family, conditioning, schedule, initial_noise(family, len(texts)), unit=len(texts))
    return Drawn(schedule.levels, latents, torch.from_numpy(family.decode(latents)))


def draw_with_diffusers(pipe: Any, start: Tensor, num_steps: int, texts: Sequence[str] = TEXTS, **call: Any) -> Drawn:
    """What the pipeline draws from ``start``; a negative prompt in ``call`` is every row's."""
    if "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * len(texts)
    call |= {"prompt": list(texts), "latents": start, "num_inference_steps": num_steps, "return_dict": False}
    latents = pipe(**call, output_type="latent")[0]
    pixels = pipe(**call, output_type="pt")[0]
    return Drawn(pipe.scheduler.sigmas, latents, pixels)


def told(network: torch.nn.Module, *names: str) -> list[tuple[float, ...]]:
    """A list that is filled with the named arguments of every forward from here on, of its first row."""
    found: list[tuple[float, ...]] = []

    def record(_: torch.nn.Module, __: Any, arguments: Mapping[str, Tensor]) -> None:
        found.append(tuple(float(arguments[name][0]) for name in names))

    network.register_forward_pre_hook(record, with_kwargs=True)
    return found


def adapted(family: Any) -> set[str]:
    """The names, inside their attention, of the modules that an adapter reaches."""
    return {re.sub(r".*\.attn2?\.", "", name.split(".lora_")[0]) for name in family.parameters()}
