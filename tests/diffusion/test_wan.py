"""Wan against diffusers' ``WanPipeline``, its two schedules, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline

from digen.errors import ConfigError
from digen.types import Prompt
from tests.diffusion.family_checks import (
    TEXTS,
    Drawn,
    draw_with_diffusers,
    draw_with_digen,
    initial_noise,
    load,
    load_pipeline,
    told,
)

STEPS = 4
SIZE: dict[str, Any] = {"num_frames": 5, "height": 16, "width": 32}
TOKENS = 24
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0}


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("wan")


def wan(folder: Path, **sampling: Any) -> Any:
    return load("wan", folder, SIZE | {"max_prompt_tokens": TOKENS} | sampling)


def of_first_order(folder: Path) -> WanPipeline:
    """The folder's pipeline and scheduler, but with steps of first order, which are Euler's."""
    pipe = load_pipeline("wan", folder)
    pipe.scheduler = UniPCMultistepScheduler.from_config(
        pipe.scheduler.config, solver_order=1, disable_corrector=list(range(STEPS))
    )
    return pipe


def draw(pipe: WanPipeline, family: Any, **call: Any) -> Drawn:
    return draw_with_diffusers(pipe, initial_noise(family), STEPS, **SIZE, max_sequence_length=TOKENS, **call)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_samples_are_those_of_the_published_scheduler(folder: Path, guidance: float) -> None:
    family = wan(folder, guidance_scale=guidance)
    drawn = draw(of_first_order(folder), family, guidance_scale=guidance)
    assert float(drawn.sigmas[0]) == pytest.approx(1 - 1e-6, abs=1e-7)
    drawn.sigmas[0] = 1.0  # digen starts from noise, where the scheduler stays off a logarithm of 0
    draw_with_digen(family, STEPS).assert_close(drawn)


@pytest.mark.parametrize("size", [{}, {"num_frames": 1}, {"num_frames": 9, "height": 32, "width": 16}])
def test_samples_are_those_of_the_euler_scheduler(
    tiny_variant: Callable[..., Path], folder: Path, size: dict[str, Any]
) -> None:
    family = wan(tiny_variant("wan", "scheduler", **EULER), guidance_scale=4.0, negative_prompt="blurry", **size)
    pipe = load_pipeline("wan", folder, scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0))
    drawn = draw_with_diffusers(
        pipe,
        initial_noise(family),
        STEPS,
        **SIZE | size,
        max_sequence_length=TOKENS,
        guidance_scale=4.0,
        negative_prompt="blurry",
    )
    ours = draw_with_digen(family, STEPS)
    ours.assert_close(drawn)
    frames, height, width = family.size
    assert ours.pixels.shape == (2, frames, 3, height, width)


def test_defaults_are_the_pipelines(folder: Path) -> None:
    family = load("wan", folder, SIZE)
    drawn = draw_with_diffusers(of_first_order(folder), initial_noise(family), STEPS, **SIZE)
    drawn.sigmas[0] = 1.0
    draw_with_digen(family, STEPS).assert_close(drawn)
    assert load("wan", folder, {}).size == (81, 480, 832)


def test_the_network_is_told_what_the_scheduler_tells_it(folder: Path) -> None:
    family, pipe = wan(folder), load_pipeline("wan", folder)
    theirs, ours = told(pipe.transformer, "timestep"), told(family.network, "timestep")
    draw(pipe, family, guidance_scale=1.0)
    draw_with_digen(family, STEPS)
    assert theirs[0] == (999.0,)
    assert [time for (time,) in ours[::2]] == pytest.approx([time for (time,) in theirs[:STEPS]], abs=1e-4)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0])
def test_schedules_are_the_schedulers(tiny_variant: Callable[..., Path], folder: Path, shift: float) -> None:
    published = wan(folder, shift=shift)
    euler = wan(tiny_variant("wan", "scheduler", **EULER), shift=shift)
    for steps in range(2, 60):
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
        scheduler.set_timesteps(steps)
        schedule = published.schedule(steps)
        torch.testing.assert_close(schedule.levels[1:], scheduler.sigmas[1:], atol=1e-7, rtol=0, check_dtype=False)
        assert (schedule.times * 1000).round(decimals=9).tolist() == scheduler.timesteps.tolist()
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(steps)
        schedule = euler.schedule(steps)
        torch.testing.assert_close(schedule.levels, scheduler.sigmas, atol=2e-7, rtol=0, check_dtype=False)
        assert torch.equal(schedule.times, schedule.levels[:-1])
        for levels in (published.schedule(steps).levels, schedule.levels):
            assert (float(levels[0]), float(levels[-1])) == (1, 0)


def test_shifts_come_from_the_folder(tiny_variant: Callable[..., Path], folder: Path) -> None:
    assert torch.equal(wan(folder).schedule(9).levels, wan(folder, shift=3.0).schedule(9).levels)
    euler = tiny_variant("wan", "scheduler", **EULER)
    assert torch.equal(wan(euler).schedule(9).levels, wan(euler, shift=7.0).schedule(9).levels)


def test_text_is_zero_behind_its_end(folder: Path) -> None:
    family = wan(folder)
    states = family.encode([Prompt(text) for text in TEXTS])["encoder_hidden_states"]
    assert states.shape[1] == TOKENS
    lengths = [len(family.pipe.tokenizer(text).input_ids) for text in TEXTS]
    assert (states != 0).any(dim=2).sum(dim=1).tolist() == lengths
    assert max(lengths) < TOKENS
    assert set(wan(folder, guidance_scale=1.0).encode([Prompt(TEXTS[0])])) == {"encoder_hidden_states"}


def test_the_vae_stays_precise_in_half_precision(folder: Path) -> None:
    pipe = load("wan", folder, SIZE, dtype="bfloat16").pipe
    assert (pipe.vae.dtype, pipe.text_encoder.dtype) == (torch.float32, torch.bfloat16)


def test_a_model_of_wan_22_with_one_transformer(folder: Path, tmp_path: Path) -> None:
    """Its pipeline tells every token the same time, and its VAE compresses by 16."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        vae = AutoencoderKLWan(
            base_dim=3,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
        )
    components = load_pipeline("wan", folder).components | {"vae": vae}
    WanPipeline(**components, expand_timesteps=True).save_pretrained(tmp_path)
    size: dict[str, Any] = {"num_frames": 5, "height": 32, "width": 64}
    family = wan(tmp_path, **size)
    assert family.latent_shape == (16, 2, 2, 4)
    pipe = of_first_order(tmp_path)
    shapes = []
    pipe.transformer.register_forward_pre_hook(
        lambda _, __, arguments: shapes.append(arguments["timestep"].shape), with_kwargs=True
    )
    drawn = draw_with_diffusers(pipe, initial_noise(family), STEPS, **size, max_sequence_length=TOKENS)
    assert set(shapes) == {(2, 2 * 1 * 2)}
    drawn.sigmas[0] = 1.0
    draw_with_digen(family, STEPS).assert_close(drawn)


def test_a_vae_that_does_not_say_how_it_compresses(folder: Path, tmp_path: Path) -> None:
    """As those of Wan 2.1."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "vae" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({key: values[key] for key in values if not key.startswith("scale_factor")}))
    assert wan(tmp_path).latent_shape == (16, 2, 2, 4)


def _with_index(folder: Path, copy: Path, **values: Any) -> Path:
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    index = copy / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | values))
    return copy


def test_two_transformers_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "transformer", tmp_path / "transformer_2")
    two = _with_index(folder, tmp_path, transformer_2=["diffusers", "WanTransformer3DModel"], boundary_ratio=0.9)
    with pytest.raises(ConfigError, match="has a transformer_2; two denoisers that share a trajectory are not support"):
        wan(two)


@pytest.mark.parametrize("name", ["wan", "digen.diffusion.families.wan:Wan"])
def test_image_to_video_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    """Of a class that is no built-in family, only the worker can tell."""
    other = _with_index(folder, tmp_path, _class_name="WanImageToVideoPipeline")
    message = r"is a WanImageToVideoPipeline, but .* needs a WanPipeline; .*image to video"
    with pytest.raises(ConfigError, match=message):
        load(name, other, SIZE)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"num_frames": 8}, r"sampling\.num_frames is 8, but Wan needs a multiple of 4 and 1 more: 5 or 9"),
        ({"num_frames": 3}, r"sampling\.num_frames is 3, .*: 1 or 5"),
        ({"height": 24}, r"sampling\.height is 24, but Wan needs a multiple of 16: 16 or 32"),
        ({"width": 40}, r"sampling\.width is 40, but Wan needs a multiple of 16: 32 or 48"),
        (
            {"guidance_scale": 1.0, "negative_prompt": "blurry"},
            r"sampling\.negative_prompt is set, but guidance is not classifier-free",
        ),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wan(folder, **sampling)


@pytest.mark.parametrize(
    "values",
    [
        {"use_flow_sigmas": False},
        {"prediction_type": "epsilon"},
        {"use_karras_sigmas": True},
        {"use_exponential_sigmas": True},
        {"use_beta_sigmas": True},
        {"use_dynamic_shifting": True},
        {"shift_terminal": 0.1},
        {"final_sigmas_type": "sigma_min"},
        {"num_train_timesteps": 500},
        EULER | {"use_dynamic_shifting": True},
        {"_class_name": "DPMSolverMultistepScheduler"},
    ],
    ids=",".join,
)
def test_other_schedules_are_refused(tiny_variant: Callable[..., Path], values: dict[str, Any]) -> None:
    message = "the scheduler is a DPMSolver" if "DPM" in str(values) else f"scheduler option {list(values)[-1]} is"
    with pytest.raises(ConfigError, match=message):
        wan(tiny_variant("wan", "scheduler", **values))
