"""Grids of samples: sizes, captions, and files that a viewer opens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from digen.diffusion.preview import COLUMNS, Section, cells_of, write_grid
from digen.errors import MissingExtra


def ramp(*shape: int) -> Any:
    """Samples of which no two pixels or frames are alike."""
    return np.linspace(0, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((2, 8, 8), (72, 72)),  # small ones are enlarged
        ((2, 1, 8, 8), (72, 72)),
        ((2, 3, 16, 32), (72, 36)),
        ((2, 3, 100, 80), (80, 100)),
        ((2, 3, 512, 1024), (256, 128)),  # large ones made smaller
        ((2, 5, 3, 320, 640), (160, 80)),
        ((2, 5, 3, 90, 120), (120, 90)),
    ],
)
def test_a_cell_has_the_samples_shape_and_a_size_to_look_at(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    cells = cells_of(ramp(*shape))
    assert [len(cell) for cell in cells] == [shape[1] if len(shape) == 5 else 1] * 2
    assert {frame.size for cell in cells for frame in cell} == {size}


def test_pixels_are_clipped_and_rounded() -> None:
    image = np.full((1, 3, 80, 80), -1, np.float32)
    image[0, 1], image[0, 2] = 2, 0.5
    ((cell,),) = cells_of(image)
    assert cell.getpixel((10, 10)) == (0, 255, 128)


def section(count: int, *shape: int, header: tuple[str, ...] = ("a prompt",)) -> Section:
    return Section(header, cells_of(ramp(count, *shape)), [str(number) for number in range(count)])


def test_images_become_one_png_with_eight_in_a_row(tmp_path: Path) -> None:
    path = write_grid(tmp_path / "new" / "grid.png", [section(COLUMNS + 1, 8, 8), section(2, 8, 8)])
    assert path == tmp_path / "new" / "grid.png"
    assert [file.name for file in path.parent.iterdir()] == ["grid.png"]
    with Image.open(path) as picture:
        assert (picture.format, picture.size) == ("PNG", (630, 6 + 3 * (72 + 14 + 6) + 2 * (14 + 6)))
        pixels = np.asarray(picture.convert("L"))
    assert np.array_equal(pixels[20:92, 6:78], np.asarray(cells_of(ramp(9, 8, 8))[0][0].convert("L")))
    below = 20 + 92
    assert np.array_equal(pixels[below : below + 72, 6:78], np.asarray(cells_of(ramp(9, 8, 8))[8][0].convert("L")))
    assert (pixels[below : below + 72, 84:] == 255).all()


def test_a_long_prompt_makes_no_wide_picture(tmp_path: Path) -> None:
    with Image.open(write_grid(tmp_path / "a.png", [section(1, 8, 8, header=("word " * 10_000, "seed"))])) as picture:
        assert picture.size == (630, 6 + 2 * 14 + 92 + 6)


def test_videos_become_a_gif_of_all_of_them(tmp_path: Path) -> None:
    path = write_grid(tmp_path / "grid.png", [section(2, 5, 3, 16, 32)], frames_per_second=10)
    assert path == tmp_path / "grid.gif"
    assert [file.name for file in tmp_path.iterdir()] == ["grid.gif"]
    with Image.open(path) as picture:
        assert picture.info["loop"] == 0
        frames = [
            (frame.info["duration"], np.asarray(frame.convert("L"))[20:56, 6:78])
            for frame in ImageSequence.Iterator(picture)
        ]
    assert [duration for duration, _ in frames] == [100] * 5
    means = [float(pixels.mean()) for _, pixels in frames]
    expected = [float(np.asarray(frame.convert("L")).mean()) for frame in cells_of(ramp(2, 5, 3, 16, 32))[0]]
    assert means == pytest.approx(expected, abs=3)
    assert means == sorted(means)


def test_videos_become_an_mp4_with_the_extra(tmp_path: Path) -> None:
    av: Any = pytest.importorskip("av")
    path = write_grid(tmp_path / "grid.png", [section(3, 7, 3, 17, 31)], video="mp4", frames_per_second=12)
    assert [file.name for file in tmp_path.iterdir()] == ["grid.mp4"]
    with av.open(str(path)) as container:
        (stream,) = container.streams.video
        frames = [frame.to_ndarray(format="gray") for frame in container.decode(stream)]
        assert (len(frames), stream.average_rate) == (7, 12)
    means = [float(frame[22:58, 8:76].mean()) for frame in frames]
    assert means == sorted(means)


def test_an_mp4_without_the_extra_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra, match=r"av.*digen-rl\[video\]"):
        write_grid(tmp_path / "grid.png", [section(1, 5, 3, 16, 32)], video="mp4")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_is_replaced_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_grid(tmp_path / "grid.png", [section(1, 8, 8)])
    before = path.read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OSError, match="no space"):
        write_grid(path, [section(2, 8, 8)])
    assert path.read_bytes() == before
