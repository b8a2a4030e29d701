"""Stable Diffusion 1.5 against diffusers' ``StableDiffusionPipeline`` with a DDIM, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from torch import Tensor

from digen.errors import ConfigError
from tests.diffusion.family_checks import (
    Drawn,
    draw_with_diffusers,
    draw_with_digen,
    initial_noise,
    load,
    load_pipeline,
)

STEPS = 4
SIZE = {"height": 16, "width": 24}


class Visited(DDIMScheduler):  # type: ignore[misc]  # diffusers has no types
    """A DDIM that tells the levels which it visits."""

    @property
    def sigmas(self) -> Tensor:
        """ᾱ from noise to sample."""
        return torch.cat([self.alphas_cumprod[self.timesteps], self.final_alpha_cumprod[None]])


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("sd15")


def sd15(folder: Path, **sampling: Any) -> Any:
    return load("sd15", folder, SIZE | sampling)


def with_ddim(folder: Path) -> StableDiffusionPipeline:
    """DDPO's pipeline."""
    pipe = load_pipeline("sd15", folder)
    pipe.scheduler = Visited.from_config(pipe.scheduler.config, clip_sample=False)
    return pipe


def draw(folder: Path, family: Any, steps: int = STEPS, **call: Any) -> Drawn:
    return draw_with_diffusers(with_ddim(folder), initial_noise(family), steps, **SIZE | call)


@pytest.mark.parametrize(
    ("steps", "size", "call"),
    [
        (4, {}, {"guidance_scale": 1.0}),
        (7, {}, {"guidance_scale": 3.0, "negative_prompt": "blurry"}),
        (4, {"height": 32, "width": 16}, {"guidance_scale": 2.0}),
    ],
)
def test_samples_are_the_pipelines(folder: Path, steps: int, size: dict[str, int], call: dict[str, Any]) -> None:
    family = sd15(folder, **size, **call)
    ours = draw_with_digen(family, steps)
    ours.assert_close(draw(folder, family, steps, **size, **call))
    _, height, width = family.size
    assert ours.pixels.shape == (2, 3, height, width)


def test_defaults(folder: Path) -> None:
    family = load("sd15", folder, {})
    assert (family.size, family.guidance) == ((1, 512, 512), 5.0)  # DDPO's guidance, not the pipeline's 7.5


def test_the_published_schedule(folder: Path) -> None:
    schedule = sd15(folder).schedule(50)
    assert schedule.times.tolist() == list(range(981, 0, -20))
    expected = {981: 0.005775496, 961: 0.007281722, 21: 0.980380654, 1: 0.998296022}
    levels = dict(zip(schedule.times.tolist(), schedule.levels.tolist(), strict=False))
    assert {time: levels[time] for time in expected} == pytest.approx(expected, abs=1e-9)
    assert float(schedule.levels[-1]) == pytest.approx(0.999149978, abs=1e-9)


@pytest.mark.parametrize("steps", [2, 3, 7, 30, 999])
def test_schedules_are_the_schedulers(folder: Path, steps: int) -> None:
    scheduler = Visited.from_config(load_pipeline("sd15", folder).scheduler.config)
    scheduler.set_timesteps(steps)
    schedule = sd15(folder).schedule(steps)
    assert schedule.times.tolist() == scheduler.timesteps.tolist()
    assert torch.equal(schedule.levels, scheduler.sigmas.double())


def test_old_folders_are_corrected_as_the_pipeline_does(tiny_variant: Callable[..., Path], folder: Path) -> None:
    old = tiny_variant("sd15", "scheduler", _class_name="DDIMScheduler", clip_sample=True, steps_offset=0)
    ours, now = sd15(old).schedule(9), sd15(folder).schedule(9)
    assert torch.equal(ours.times, now.times)
    assert torch.equal(ours.levels, now.levels)


def test_no_safety_checker_blackens_samples(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for component in ("safety_checker", "feature_extractor", "image_encoder"):
        (tmp_path / component).mkdir()
    index = tmp_path / "model_index.json"
    values = {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
        "image_encoder": ["transformers", "CLIPVisionModelWithProjection"],
        "requires_safety_checker": True,
    }
    index.write_text(json.dumps(json.loads(index.read_text()) | values))
    pipe = sd15(tmp_path).pipe
    assert pipe.safety_checker is pipe.feature_extractor is pipe.image_encoder is None
    assert not pipe.config.requires_safety_checker


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"height": 17}, r"sampling\.height is 17, but StableDiffusion15 needs a multiple of 2: 16 or 18"),
        ({"width": 17}, r"sampling\.width is 17, but StableDiffusion15 needs a multiple of 2: 16 or 18"),
        ({"num_frames": 5}, r"sampling\.num_frames is 5, but StableDiffusionPipeline draws images"),
        ({"shift": 3.0}, r"sampling\.shift is set, but a DDIM has no shift"),
        ({"max_prompt_tokens": 24}, r"sampling\.max_prompt_tokens is 24, but the pipeline always reads 77"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sd15(folder, **sampling)


def test_more_steps_than_timesteps_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.num_inference_steps is 1000; the model has timesteps for 999"):
        sd15(folder).schedule(1000)


def test_image_to_image_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    index = tmp_path / "model_index.json"
    other = {"_class_name": "StableDiffusionInpaintPipeline"}
    index.write_text(json.dumps(json.loads(index.read_text()) | other))
    message = r"is a StableDiffusionInpaintPipeline, but .* needs a StableDiffusionPipeline"
    with pytest.raises(ConfigError, match=message):
        sd15(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"prediction_type": "v_prediction"},
            "prediction_type is 'v_prediction'; StableDiffusion15 supports 'epsilon'",
        ),
        ({"timestep_spacing": "trailing"}, "timestep_spacing is 'trailing'"),
        ({"set_alpha_to_one": True}, "set_alpha_to_one is True"),
        ({"_class_name": "DDIMScheduler", "thresholding": True}, "thresholding is True"),
        ({"_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True}, "rescale_betas_zero_snr is True"),
    ],
)
def test_other_schedules_are_refused(tiny_variant: Callable[..., Path], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler option {message}"):
        sd15(tiny_variant("sd15", "scheduler", **values))
