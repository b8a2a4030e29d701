"""HunyuanVideo against diffusers' ``HunyuanVideoPipeline``, its schedule, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

from digen.config import LoraSection
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


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("hunyuan_video")


def hunyuan(folder: Path, **sampling: Any) -> Any:
    return load("hunyuan_video", folder, SIZE | {"max_prompt_tokens": TOKENS} | sampling)


def draw(folder: Path, family: Any, **call: Any) -> Drawn:
    pipe = load_pipeline("hunyuan_video", folder)
    return draw_with_diffusers(pipe, initial_noise(family), STEPS, **SIZE | {"max_sequence_length": TOKENS} | call)


def tokens_of(pipe: Any, text: str) -> list[int]:
    """Of the text in its template."""
    found: list[int] = pipe.tokenizer(DEFAULT_PROMPT_TEMPLATE["template"].format(text)).input_ids
    return found


@pytest.mark.parametrize("size", [{}, {"num_frames": 1}, {"num_frames": 9, "height": 32, "width": 16}])
def test_samples_are_the_pipelines(folder: Path, size: dict[str, Any]) -> None:
    family = hunyuan(folder, guidance_scale=3.0, **size)
    ours = draw_with_digen(family, STEPS)
    ours.assert_close(draw(folder, family, guidance_scale=3.0, **size))
    frames, height, width = family.size
    assert ours.pixels.shape == (2, frames, 3, height, width)


def test_defaults_are_the_pipelines(folder: Path) -> None:
    family = load("hunyuan_video", folder, SIZE)
    drawn = draw_with_diffusers(load_pipeline("hunyuan_video", folder), initial_noise(family), STEPS, **SIZE)
    draw_with_digen(family, STEPS).assert_close(drawn)
    assert family.max_tokens == 256  # padding is masked, so samples do not show it
    assert load("hunyuan_video", folder, {}).size == (129, 720, 1280)


def test_prompts_are_in_the_pipelines_template(folder: Path) -> None:
    """Else the tiny tokenizer would cut the prompts off, and no test here would see a prompt."""
    pipe = load_pipeline("hunyuan_video", folder)
    tokens = tokens_of(pipe, TEXTS[0])
    begin = DEFAULT_PROMPT_TEMPLATE["crop_start"]
    assert pipe.tokenizer.decode(tokens[begin:]).replace(" ", "") == TEXTS[0].replace(" ", "") + "<|eot_id|>"
    assert len(tokens) < begin + TOKENS


def test_rows_are_padded_and_masked(folder: Path) -> None:
    family = hunyuan(folder)
    found = family.encode([Prompt(text) for text in TEXTS])
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "encoder_hidden_states": (2, TOKENS, 16),
        "encoder_attention_mask": (2, TOKENS),
        "pooled_projections": (2, 8),
    }
    lengths = [len(tokens_of(family.pipe, text)) - DEFAULT_PROMPT_TEMPLATE["crop_start"] for text in TEXTS]
    assert found["encoder_attention_mask"].sum(dim=1).tolist() == lengths
    found["encoder_hidden_states"][0, lengths[0] :] = 100.0  # behind the mask
    with torch.no_grad():
        times, latents = family.schedule(STEPS).times[1:3].float(), initial_noise(family)
        before = family.predict(latents, times, family.encode([Prompt(text) for text in TEXTS]))
        assert float((family.predict(latents, times, found) - before).abs().max()) <= 1e-5


def test_guidance_is_told_a_distilled_model(folder: Path) -> None:
    family, pipe = hunyuan(folder, guidance_scale=3.5), load_pipeline("hunyuan_video", folder)
    theirs, ours = told(pipe.transformer, "timestep", "guidance"), told(family.network, "timestep", "guidance")
    draw_with_diffusers(pipe, initial_noise(family), STEPS, **SIZE, max_sequence_length=TOKENS, guidance_scale=3.5)
    draw_with_digen(family, STEPS)
    assert len(ours) == STEPS
    assert sum(ours, ()) == pytest.approx(sum(theirs[:STEPS], ()), abs=1e-3)
    assert {guidance for _, guidance in ours} == {3500.0}
    with pytest.raises(ConfigError, match=r"sampling\.negative_prompt is set, but guidance is not classifier-free"):
        hunyuan(folder, negative_prompt="blurry")


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_model_that_was_not_distilled_is_guided_by_two_forwards(
    tiny_variant: Callable[..., Path], guidance: float
) -> None:
    plain = tiny_variant("hunyuan_video", "transformer", guidance_embeds=False)
    negative = {"negative_prompt": "blurry"} if guidance > 1 else {}
    family = hunyuan(plain, guidance_scale=guidance, **negative)
    drawn = draw(plain, family, true_cfg_scale=guidance, **negative)
    draw_with_digen(family, STEPS).assert_close(drawn)


def test_adapters_are_in_both_streams(folder: Path) -> None:
    family = load("hunyuan_video", folder, SIZE, lora=LoraSection(rank=4))
    assert {key.split(".lora_")[0] for key in family.parameters()} >= {
        f"transformer_blocks.0.attn.{projection}"
        for projection in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    }


@pytest.mark.parametrize("shift", [None, 1.0, 5.0])
def test_schedules_are_the_schedulers(folder: Path, shift: float | None) -> None:
    family = hunyuan(folder, shift=shift)
    for steps in range(2, 60):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0 if shift is None else shift)
        scheduler.set_timesteps(sigmas=torch.linspace(1, 0, steps + 1)[:-1].tolist())
        schedule = family.schedule(steps)
        torch.testing.assert_close(schedule.levels, scheduler.sigmas, atol=2e-7, rtol=0, check_dtype=False)
        assert torch.equal(schedule.times, schedule.levels[:-1])


@pytest.mark.parametrize("kind", ["HunyuanVideoImageToVideoPipeline", "HunyuanSkyreelsImageToVideoPipeline"])
def test_image_to_video_is_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": kind}))
    with pytest.raises(ConfigError, match=rf"is a {kind}, but .* needs a HunyuanVideoPipeline; .*image to video"):
        hunyuan(tmp_path)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"num_frames": 8}, r"sampling\.num_frames is 8, but HunyuanVideo needs a multiple of 4 and 1 more: 5 or 9"),
        ({"height": 24}, r"sampling\.height is 24, but HunyuanVideo needs a multiple of 16: 16 or 32"),
        ({"width": 40}, r"sampling\.width is 40, but HunyuanVideo needs a multiple of 16: 32 or 48"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hunyuan(folder, **sampling)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dynamic_shifting": True}, "scheduler option use_dynamic_shifting is True"),
        ({"shift_terminal": 0.1}, r"scheduler option shift_terminal is 0\.1"),
        ({"_class_name": "UniPCMultistepScheduler"}, "the scheduler is a UniPCMultistepScheduler"),
    ],
)
def test_schedulers_that_do_more_than_shift_are_refused(
    tiny_variant: Callable[..., Path], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        hunyuan(tiny_variant("hunyuan_video", "scheduler", **values))
