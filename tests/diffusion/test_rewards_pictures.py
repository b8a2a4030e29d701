"""From samples to pictures, and the rewards that need no network: JPEG size and reading text."""

from __future__ import annotations

import base64
import io
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from digen.diffusion.families.base import Images
from digen.diffusion.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from digen.diffusion.rewards.ocr import TextMatch, levenshtein, text_match
from digen.diffusion.rewards.pictures import pictures, png
from digen.errors import ConfigError, MissingExtra
from digen.types import Prompt

PROMPT = Prompt('a sign that says "HELLO 2026"')


def noise(*shape: int) -> Images:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


def array(picture: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(picture)


class TestPictures:
    def test_grey_images_colour_images_and_videos_become_rgb(self) -> None:
        grey = noise(2, 5, 7)
        expected = (grey * 255).round()
        for images in (grey, grey[:, None], grey[:, None, None]):
            (first,), (second,) = pictures(images)
            assert first.mode == "RGB"
            assert first.size == (7, 5)
            for channel in range(3):
                assert (array(second)[..., channel] == expected[1]).all()
        colour = noise(2, 3, 5, 7)
        ((first,), _) = pictures(colour)
        assert (array(first) == (colour[0] * 255).round().transpose(1, 2, 0)).all()

    def test_values_are_rounded_to_the_nearest(self) -> None:
        ((picture,),) = pictures(np.array([[[0, 0.001, 0.002, 0.999, 1]]], dtype=np.float32))
        assert array(picture)[0, :, 0].tolist() == [0, 0, 1, 255, 255]

    @pytest.mark.parametrize(
        ("total", "count", "chosen"),
        [(1, 1, [0]), (9, 1, [4]), (9, 2, [0, 8]), (9, 3, [0, 4, 8]), (9, 4, [0, 3, 5, 8]), (4, 4, [0, 1, 2, 3])],
    )
    def test_frames_are_spread_over_the_video(self, total: int, count: int, chosen: list[int]) -> None:
        video: Images = np.zeros((1, total, 3, 2, 2), dtype=np.float32)
        for frame in range(total):
            video[:, frame] = frame / 255
        (frames,) = pictures(video, count)
        assert [int(array(frame)[0, 0, 0]) for frame in frames] == chosen

    @pytest.mark.parametrize(
        ("images", "frames", "message"),
        [
            (noise(2, 4, 5, 5), 1, r"images of shape \(2, 4, 5, 5\)|images of shape"),
            (noise(2, 5), 1, r"images of shape \(2, 5\)"),
            (noise(2, 0, 3, 5, 5), 1, "images of shape"),
            (noise(2, 3, 5, 5) + 0.5, 1, r"pixels from .* must be in \[0, 1\]"),
            (noise(2, 3, 5, 5) - 0.5, 1, "pixels from"),
            (np.full((2, 5, 5), np.nan, dtype=np.float32), 1, "pixels from nan to nan"),
            (noise(2, 3, 5, 5), 2, "2 frames are asked of samples that have 1"),
            (noise(2, 4, 3, 5, 5), 5, "5 frames are asked of samples that have 4"),
        ],
    )
    def test_what_is_no_picture_is_refused(self, images: Images, frames: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            pictures(images, frames)

    @pytest.mark.parametrize("frames", [0, -1, 1.5, True, "2"])
    def test_a_number_of_frames_that_is_none_is_refused(self, frames: Any) -> None:
        with pytest.raises(ConfigError, match="frames must be an integer of at least 1"):
            JpegCompressibility(frames=frames)

    def test_a_png_holds_the_picture(self) -> None:
        ((picture,),) = pictures(noise(1, 3, 5, 7))
        read = Image.open(io.BytesIO(base64.b64decode(png(picture))))
        assert (array(read) == array(picture)).all()


class TestJpeg:
    def test_the_size_is_that_of_the_file(self, tmp_path: Any) -> None:
        images = noise(2, 3, 32, 32)
        images[1] = 0.5
        sizes = JpegIncompressibility()(images, [PROMPT] * 2)
        for image, size in zip(images, sizes, strict=True):
            file = tmp_path / "picture.jpg"
            Image.fromarray((image * 255).round().astype(np.uint8).transpose(1, 2, 0)).save(file, quality=95)
            assert size == file.stat().st_size / 1000
        assert sizes[0] > 2 * sizes[1], "noise is larger than a plain picture"
        assert JpegCompressibility()(images, [PROMPT] * 2) == [-size for size in sizes]
        assert JpegIncompressibility(quality=30)(images, [PROMPT] * 2)[0] < sizes[0]

    def test_a_video_is_the_mean_of_its_frames(self) -> None:
        video = noise(2, 5, 3, 16, 16)
        video[:, 0] = 0.5
        reward = JpegIncompressibility()
        first, last = reward(video[:, 0], [PROMPT] * 2), reward(video[:, 4], [PROMPT] * 2)
        assert JpegIncompressibility(frames=2)(video, [PROMPT] * 2) == pytest.approx(
            [(one + other) / 2 for one, other in zip(first, last, strict=True)], abs=1e-12
        )

    @pytest.mark.parametrize("quality", [0, 96, 50.0])
    def test_a_quality_that_is_none_is_refused(self, quality: Any) -> None:
        with pytest.raises(ConfigError, match="quality of a JPEG"):
            JpegIncompressibility(quality=quality)


class TestLevenshtein:
    @pytest.mark.parametrize(
        ("one", "other", "distance"),
        [
            ("", "", 0),
            ("abc", "abc", 0),
            ("", "abc", 3),
            ("kitten", "sitting", 3),
            ("flaw", "lawn", 2),
            ("ab", "ba", 2),
        ],
    )
    def test_known_distances(self, one: str, other: str, distance: int) -> None:
        assert levenshtein(one, other) == levenshtein(other, one) == distance

    @given(st.text("ab", max_size=6), st.text("ab", max_size=6))
    def test_it_is_the_definition(self, one: str, other: str) -> None:
        def by_definition(one: str, other: str) -> int:
            if not one or not other:
                return len(one) + len(other)
            replaced = by_definition(one[1:], other[1:]) + (one[0] != other[0])
            return min(replaced, by_definition(one[1:], other) + 1, by_definition(one, other[1:]) + 1)

        assert levenshtein(one, other) == by_definition(one, other)


class TestTextMatch:
    @pytest.mark.parametrize(
        ("read", "target", "reward"),
        [
            ("Hello World", "hello world", 1.0),
            ("xx HELLO world yy", "Hello World", 1.0),  # contained
            ("", "Hello", 0.0),
            ("Helo", "Hello", 0.8),
            ("Jello", "Hello", 0.8),
            ("completely other words", "Hello", 0.0),  # at most the text's length
            ("New Yrok", "New York", 1 - 2 / 7),
        ],
    )
    def test_the_formula_of_flow_grpo(self, read: str, target: str, reward: float) -> None:
        assert text_match(read, target) == pytest.approx(reward, abs=1e-15)

    def test_what_is_read_is_joined_and_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []

        class RapidOCR:
            def __init__(self, params: dict[str, Any]) -> None:
                assert params["EngineConfig.onnxruntime.intra_op_num_threads"] == 2

            def __call__(self, picture: Image.Image) -> SimpleNamespace:
                seen.append(picture)
                return SimpleNamespace(txts=[("HELLO", "2025"), None][len(seen) - 1])

        module = ModuleType("rapidocr")
        module.RapidOCR = RapidOCR  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "rapidocr", module)
        monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
        assert TextMatch(threads=2)(noise(2, 3, 8, 8), [PROMPT] * 2) == [1 - 1 / 9, 0.0]
        assert [picture.size for picture in seen] == [(8, 8)] * 2

    @pytest.mark.parametrize("module", ["rapidocr", "onnxruntime"])
    def test_without_the_extra_it_is_named(self, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("rapidocr", "onnxruntime"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtra, match=rf"{module} is not installed.*digen-rl\[rewards\]"):
            TextMatch()

    @pytest.mark.skipif(
        find_spec("rapidocr") is None or find_spec("onnxruntime") is None, reason="needs the extra 'rewards'"
    )
    def test_real_text_is_read(self) -> None:
        def sign(text: str) -> Images:
            picture = Image.new("RGB", (320, 96), "white")
            ImageDraw.Draw(picture).text((10, 20), text, fill="black", font=ImageFont.load_default(48))
            pixels: Images = (array(picture).transpose(2, 0, 1) / 255).astype(np.float32)
            return pixels

        reward = TextMatch()
        texts = ["HELLO 2026", "HELLO 2020", "", "7"]
        values = reward(np.stack([sign(text) for text in texts]), [PROMPT] * 4)
        assert values == pytest.approx([1.0, 8 / 9, 0.0, 0.0], abs=1e-12)
        assert reward.read(pictures(sign("HELLO 2026")[None])[0][0]).replace(" ", "") == "HELLO2026"
