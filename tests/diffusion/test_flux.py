"""FLUX against diffusers' ``FluxPipeline``, its schedule, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from digen.errors import ConfigError
from digen.types import Prompt
from tests.diffusion.family_checks import (
    TEXTS,
    adapted,
    draw_with_diffusers,
    draw_with_digen,
    initial_noise,
    load,
    load_pipeline,
    told,
)

SIZES = ((16, 24), (32, 16))
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("flux")


def flux(folder: Path, size: tuple[int, int] = SIZES[0], **sampling: Any) -> Any:
    return load("flux", folder, {"height": size[0], "width": size[1], "max_prompt_tokens": TOKENS} | sampling)


@pytest.mark.parametrize("size", SIZES)
def test_samples_are_the_pipelines(folder: Path, size: tuple[int, int]) -> None:
    family = flux(folder, size, guidance_scale=4.5)
    drawn = draw_with_diffusers(
        load_pipeline("flux", folder),
        initial_noise(family),
        4,
        height=size[0],
        width=size[1],
        guidance_scale=4.5,
        max_sequence_length=TOKENS,
    )
    draw_with_digen(family, 4).assert_close(drawn)


def test_defaults_are_the_pipelines(folder: Path) -> None:
    family = load("flux", folder, {"height": 16, "width": 24})
    drawn = draw_with_diffusers(load_pipeline("flux", folder), initial_noise(family), 2, height=16, width=24)
    draw_with_digen(family, 2).assert_close(drawn)
    assert load("flux", folder, {}).size == (1, 1024, 1024)


def test_guidance_is_told(folder: Path) -> None:
    weak, strong = (flux(folder, guidance_scale=scale) for scale in (1.0, 4.5))
    for family in (weak, strong):
        assert set(family.encode([Prompt(TEXTS[0])])) == {"encoder_hidden_states", "pooled_projections"}  # one forward
    assert float((draw_with_digen(weak, 2).latents - draw_with_digen(strong, 2).latents).abs().max()) > 0.01


def test_schnell_has_no_guidance(tiny_variant: Callable[..., Path]) -> None:
    schnell = tiny_variant("flux", "transformer", guidance_embeds=False)
    drawn = draw_with_diffusers(
        load_pipeline("flux", schnell), initial_noise(flux(schnell)), 2, height=16, width=24, max_sequence_length=TOKENS
    )
    draw_with_digen(flux(schnell), 2).assert_close(drawn)
    with pytest.raises(ConfigError, match=r"sampling\.guidance_scale is set, but this FLUX \(schnell\) has none"):
        flux(schnell, guidance_scale=3.5)


def test_times_are_rounded_where_the_pipeline_rounds_them(folder: Path) -> None:
    pipe = load_pipeline("flux", folder, torch_dtype=torch.bfloat16)
    family = load("flux", folder, {"height": 16, "width": 24, "max_prompt_tokens": TOKENS}, dtype="bfloat16")
    theirs, ours = told(pipe.transformer, "timestep", "guidance"), told(family.network, "timestep", "guidance")
    draw_with_diffusers(
        pipe, initial_noise(family), 20, height=16, width=24, guidance_scale=3.5, max_sequence_length=TOKENS
    )
    draw_with_digen(family, 20)
    assert theirs[:20] == ours
    assert len({time for time, _ in ours}) == 20
    assert {guidance for _, guidance in ours} == {3.5}


PUBLISHED = {
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}


def test_the_published_schedule_at_512_pixels(tiny_variant: Callable[..., Path]) -> None:
    family = flux(tiny_variant("flux", "scheduler", **PUBLISHED), (256, 256))  # as 512 of the published VAE
    assert family.latent_shape[0] == 1024
    assert family.schedule(6).levels.tolist() == pytest.approx(
        [1, 0.9037356, 0.7897048, 0.6524894, 0.4842184, 0.2730033, 0], abs=1e-7
    )


def test_a_static_shift_replaces_the_dynamic_one(folder: Path) -> None:
    levels = flux(folder, shift=3.0).schedule(16).levels.tolist()  # DanceGRPO's
    assert levels[:4] == pytest.approx([1, 0.978260875, 0.954545438, 0.928571403], abs=1e-7)
    assert levels[-3:] == pytest.approx([0.300000012, 0.166666672, 0], abs=1e-7)


def test_a_static_folder_is_shifted_as_diffusers_does(tiny_variant: Callable[..., Path]) -> None:
    family = flux(tiny_variant("flux", "scheduler", use_dynamic_shifting=False, shift=2.0))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    scheduler.set_timesteps(sigmas=[1.0, 0.8, 0.6, 0.4, 0.2])
    torch.testing.assert_close(family.schedule(5).levels, scheduler.sigmas, atol=2e-7, rtol=0, check_dtype=False)


def test_adapters_reach_image_and_text(folder: Path) -> None:
    family = load("flux", folder, {"height": 16, "width": 24}, lora={"rank": 2})
    image, text = {"to_q", "to_k", "to_v", "to_out.0"}, {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    assert adapted(family) == image | text


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"height": 18}, r"sampling\.height is 18, but Flux needs a multiple of 8: 16 or 24"),
        ({"width": 4}, r"sampling\.width is 4, but Flux needs a multiple of 8: 8"),
        ({"num_frames": 5}, r"sampling\.num_frames is 5, but FluxPipeline draws images"),
        ({"negative_prompt": "blurry"}, r"sampling\.negative_prompt is set, but guidance is not classifier-free"),
        ({"max_prompt_tokens": 513}, r"sampling\.max_prompt_tokens is 513, but FluxPipeline takes at most 512"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flux(folder, **sampling)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_karras_sigmas": True}, "scheduler option use_karras_sigmas is True; Flux supports False only"),
        ({"time_shift_type": "linear"}, "scheduler option time_shift_type is 'linear'; Flux supports 'exponential'"),
        ({"_class_name": "UniPCMultistepScheduler"}, "the scheduler is a UniPCMultistepScheduler; Flux understands"),
    ],
)
def test_schedulers_that_do_more_than_shift_are_refused(
    tiny_variant: Callable[..., Path], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        flux(tiny_variant("flux", "scheduler", **values))
