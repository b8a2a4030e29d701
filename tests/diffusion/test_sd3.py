"""Stable Diffusion 3 against diffusers' ``StableDiffusion3Pipeline``, and its schedules."""

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
    adapted,
    draw_with_diffusers,
    draw_with_digen,
    initial_noise,
    load,
    load_pipeline,
)

SIZES = ((16, 24), (32, 16))
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("sd3")


def sd3(folder: Path, size: tuple[int, int] = SIZES[0], **sampling: Any) -> Any:
    return load("sd3", folder, {"height": size[0], "width": size[1], "max_prompt_tokens": TOKENS} | sampling)


@pytest.mark.parametrize("size", SIZES)
def test_samples_are_the_pipelines(folder: Path, size: tuple[int, int]) -> None:
    family = sd3(folder, size, guidance_scale=4.5, negative_prompt="ugly")
    drawn = draw_with_diffusers(
        load_pipeline("sd3", folder),
        initial_noise(family),
        4,
        height=size[0],
        width=size[1],
        guidance_scale=4.5,
        negative_prompt="ugly",
        max_sequence_length=TOKENS,
    )
    draw_with_digen(family, 4).assert_close(drawn)


def test_samples_without_guidance_are_the_pipelines(folder: Path) -> None:
    family = sd3(folder, guidance_scale=1.0)
    assert set(family.encode([Prompt(TEXTS[0])])) == {"encoder_hidden_states", "pooled_projections"}
    drawn = draw_with_diffusers(
        load_pipeline("sd3", folder),
        initial_noise(family),
        4,
        height=16,
        width=24,
        guidance_scale=1.0,
        max_sequence_length=TOKENS,
    )
    draw_with_digen(family, 4).assert_close(drawn)


def test_defaults_are_the_pipelines(folder: Path) -> None:
    family = load("sd3", folder, {"height": 16, "width": 24})
    drawn = draw_with_diffusers(load_pipeline("sd3", folder), initial_noise(family), 2, height=16, width=24)
    draw_with_digen(family, 2).assert_close(drawn)
    assert family.default_size == (1, 1024, 1024)


def test_a_folder_without_t5_works(folder: Path, tmp_path: Path) -> None:
    pipe = load_pipeline("sd3", folder, text_encoder_3=None, tokenizer_3=None)
    pipe.save_pretrained(tmp_path)
    family = sd3(tmp_path)
    drawn = draw_with_diffusers(pipe, initial_noise(family), 2, height=16, width=24, max_sequence_length=TOKENS)
    draw_with_digen(family, 2).assert_close(drawn)


def test_the_negative_prompt_matters(folder: Path) -> None:
    one, other = (draw_with_digen(sd3(folder, negative_prompt=text), 2).latents for text in ("ugly", "blurry"))
    assert float((one - other).abs().max()) > 0.01


def test_the_negative_prompt_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = sd3(folder, negative_prompt="ugly")
    encoded: list[str] = []
    encode_texts = family.encode_texts

    def recorded(texts: list[str]) -> Any:
        encoded.extend(texts)
        return encode_texts(texts)

    monkeypatch.setattr(family, "encode_texts", recorded)
    forwards: list[None] = []
    family.pipe.text_encoder_3.register_forward_hook(lambda *_: forwards.append(None))
    rows = [family.encode([Prompt(text)]) for text in TEXTS]
    assert encoded == [TEXTS[0], "ugly", TEXTS[1]]
    assert len(forwards) == 3
    for name, tensor in family.encode_texts(["ugly"]).items():
        assert all(torch.equal(row["negative." + name], tensor) for row in rows)


def test_the_published_schedule_is_shifted_twice(folder: Path) -> None:
    first = [1, 0.960129321, 0.913348973, 0.857692301, 0.790368259, 0.707278490]
    last = [0.602150559, 0.464876026, 0.278048784, 0.008928572, 0]
    assert sd3(folder).schedule(10).levels.tolist() == pytest.approx(first + last, abs=1e-7)


def test_a_configured_shift_replaces_the_folders(folder: Path) -> None:
    first = [1, 0.975743, 0.946273, 0.9097071, 0.8631319, 0.8017857]
    last = [0.7173175, 0.5936192, 0.3950954, 0.0244141, 0]
    assert sd3(folder, shift=5.0).schedule(10).levels.tolist() == pytest.approx(first + last, abs=1e-6)


def test_a_folder_may_shift_by_the_resolution(tiny_variant: Callable[..., Path]) -> None:
    dynamic = tiny_variant("sd3", "scheduler", use_dynamic_shifting=True, base_image_seq_len=16, max_image_seq_len=64)
    family = sd3(dynamic, guidance_scale=1.0)
    drawn = draw_with_diffusers(
        load_pipeline("sd3", dynamic),
        initial_noise(family),
        4,
        height=16,
        width=24,
        guidance_scale=1.0,
        max_sequence_length=TOKENS,
    )
    draw_with_digen(family, 4).assert_close(drawn)


def test_adapters_reach_image_and_text(folder: Path) -> None:
    family = load("sd3", folder, {"height": 16, "width": 24}, lora={"rank": 2})
    image, text = {"to_q", "to_k", "to_v", "to_out.0"}, {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    assert adapted(family) == image | text


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"height": 18}, r"sampling\.height is 18, but StableDiffusion3 needs a multiple of 8: 16 or 24"),
        ({"width": 30}, r"sampling\.width is 30, but StableDiffusion3 needs a multiple of 8: 24 or 32"),
        ({"height": 104}, r"sampling\.height is 104, but the model has positions for 96 pixels only"),
        ({"width": 104}, r"sampling\.width is 104, but the model has positions for 96 pixels only"),
        (
            {"max_prompt_tokens": 513},
            r"sampling\.max_prompt_tokens is 513, but StableDiffusion3Pipeline takes at most 512",
        ),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sd3(folder, **sampling)


def test_the_largest_size_fits(folder: Path) -> None:
    family = sd3(folder, (96, 96), guidance_scale=1.0)
    assert draw_with_digen(family, 2).pixels.shape == (2, 3, 96, 96)


def test_schedulers_that_do_more_than_shift_are_refused(tiny_variant: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="scheduler option use_beta_sigmas is True; StableDiffusion3 supports False"):
        sd3(tiny_variant("sd3", "scheduler", use_beta_sigmas=True))
