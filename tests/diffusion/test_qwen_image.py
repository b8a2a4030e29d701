"""Qwen-Image against diffusers' ``QwenImagePipeline``, its guidance and masks, and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from digen.errors import ConfigError
from digen.types import Prompt
from tests.diffusion.family_checks import (
    TEXTS,
    TOLERANCE,
    adapted,
    draw_with_diffusers,
    draw_with_digen,
    initial_noise,
    load,
    load_pipeline,
    told,
)

SIZES = ((16, 24), (32, 16))
TOKENS = 32
STATES, MASK = "encoder_hidden_states", "encoder_hidden_states_mask"


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen_image")


def qwen(folder: Path, size: tuple[int, int] = SIZES[0], **sampling: Any) -> Any:
    return load("qwen_image", folder, {"height": size[0], "width": size[1], "max_prompt_tokens": TOKENS} | sampling)


@pytest.mark.parametrize("size", SIZES)
def test_samples_are_the_pipelines(folder: Path, size: tuple[int, int]) -> None:
    family = qwen(folder, size, guidance_scale=3.0, negative_prompt="ugly")
    drawn = draw_with_diffusers(
        load_pipeline("qwen_image", folder),
        initial_noise(family),
        4,
        height=size[0],
        width=size[1],
        true_cfg_scale=3.0,
        negative_prompt="ugly",
        max_sequence_length=TOKENS,
    )
    draw_with_digen(family, 4).assert_close(drawn)


def test_samples_without_guidance_are_the_pipelines(folder: Path) -> None:
    family = qwen(folder, guidance_scale=1.0)
    assert set(family.encode([Prompt(TEXTS[0])])) == {STATES, MASK}
    drawn = draw_with_diffusers(
        load_pipeline("qwen_image", folder),
        initial_noise(family),
        4,
        height=16,
        width=24,
        true_cfg_scale=1.0,
        max_sequence_length=TOKENS,
    )
    draw_with_digen(family, 4).assert_close(drawn)


def test_defaults_are_the_pipelines(folder: Path) -> None:
    family = load("qwen_image", folder, {"height": 16, "width": 24})
    drawn = draw_with_diffusers(
        load_pipeline("qwen_image", folder), initial_noise(family), 2, height=16, width=24, negative_prompt=""
    )
    draw_with_digen(family, 2).assert_close(drawn)
    assert family.encode([Prompt(TEXTS[0])])[STATES].shape[1] == 512
    assert load("qwen_image", folder, {}).size == (1, 1024, 1024)


def test_long_prompts_are_cut_where_the_pipeline_cuts_them(folder: Path) -> None:
    family = qwen(folder, guidance_scale=1.0, max_prompt_tokens=40)
    texts = ("a very " * 8 + "red square", TEXTS[1])
    drawn = draw_with_diffusers(
        load_pipeline("qwen_image", folder),
        initial_noise(family),
        2,
        texts,
        height=16,
        width=24,
        true_cfg_scale=1.0,
        max_sequence_length=40,
    )
    draw_with_digen(family, 2, texts).assert_close(drawn)
    lengths = family.encode([Prompt(text) for text in texts])[MASK].sum(dim=1).tolist()
    assert lengths[0] == 40
    assert lengths[1] < 40


def test_the_negative_prompt_matters(folder: Path) -> None:
    one, other = (draw_with_digen(qwen(folder, negative_prompt=text), 2).latents for text in ("ugly", "blurry"))
    assert float((one - other).abs().max()) > 0.01


def test_guidance_keeps_every_tokens_norm(folder: Path) -> None:
    family = qwen(folder, guidance_scale=3.0)
    positive, negative = torch.randn(2, 2, 6, 16, generator=torch.Generator().manual_seed(0)).unbind()
    combined = family.combine(positive, negative)
    torch.testing.assert_close(combined.norm(dim=-1), positive.norm(dim=-1))
    direction = negative + 3 * (positive - negative)
    torch.testing.assert_close(torch.cosine_similarity(combined, direction, dim=-1), torch.ones(2, 6))


def test_what_is_behind_a_prompts_end_does_not_count(folder: Path) -> None:
    family = qwen(folder, guidance_scale=1.0)
    rows = family.encode([Prompt(text) for text in TEXTS])
    latents, times = initial_noise(family), torch.tensor([0.9, 0.4])
    mask = rows[MASK]
    assert not bool(mask[:, -1].any())
    changed = rows | {STATES: torch.where(mask[..., None], rows[STATES], torch.full_like(rows[STATES], 7.0))}
    with torch.no_grad():
        before, after = (family.predict(latents, times, conditioning) for conditioning in (rows, changed))
    torch.testing.assert_close(before, after, atol=TOLERANCE, rtol=0)


def test_times_are_rounded_where_the_pipeline_rounds_them(folder: Path) -> None:
    pipe = load_pipeline("qwen_image", folder, torch_dtype=torch.bfloat16)
    sampling = {"height": 16, "width": 24, "max_prompt_tokens": TOKENS, "guidance_scale": 1.0}
    family = load("qwen_image", folder, sampling, dtype="bfloat16")
    theirs, ours = told(pipe.transformer, "timestep"), told(family.network, "timestep")
    draw_with_diffusers(pipe, initial_noise(family), 20, height=16, width=24, true_cfg_scale=1.0)
    draw_with_digen(family, 20)
    assert theirs[:20] == ours
    assert len(set(ours)) == 20


PUBLISHED = {
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}


def test_the_published_schedule_at_512_pixels(tiny_variant: Callable[..., Path]) -> None:
    family = qwen(tiny_variant("qwen_image", "scheduler", **PUBLISHED), (256, 256))  # as 512 of the published VAE
    assert family.latent_shape[0] == 1024
    expected = [1, 0.9289696, 0.8514848, 0.7666239, 0.6732809, 0.5701172, 0.4554973, 0.3274001, 0.1833005, 0.02, 0]
    assert family.schedule(10).levels.tolist() == pytest.approx(expected, abs=1e-7)


def test_a_static_shift_replaces_the_folders(folder: Path) -> None:
    levels = qwen(folder, shift=3.0).schedule(16).levels.tolist()
    assert levels[-3:] == pytest.approx([0.300000012, 0.166666672, 0], abs=1e-7)  # DanceGRPO's, not stretched


def test_adapters_reach_image_and_text(folder: Path) -> None:
    family = load("qwen_image", folder, {"height": 16, "width": 24}, lora={"rank": 2})
    image, text = {"to_q", "to_k", "to_v", "to_out.0"}, {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    assert adapted(family) == image | text


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"height": 18}, r"sampling\.height is 18, but QwenImage needs a multiple of 8: 16 or 24"),
        ({"width": 30}, r"sampling\.width is 30, but QwenImage needs a multiple of 8: 24 or 32"),
        ({"guidance_scale": 1.0, "negative_prompt": "ugly"}, r"negative_prompt is set, but guidance is not classifier"),
        ({"max_prompt_tokens": 1025}, r"sampling\.max_prompt_tokens is 1025, but QwenImagePipeline takes at most 1024"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        qwen(folder, **sampling)


def test_schedulers_that_do_more_than_shift_are_refused(tiny_variant: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="scheduler option use_exponential_sigmas is True; QwenImage supports False"):
        qwen(tiny_variant("qwen_image", "scheduler", use_exponential_sigmas=True))
