"""Pictures of samples for people: captioned grids, a PNG of images, a GIF or MP4 of videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from digen.diffusion.families.base import Images
from digen.diffusion.ranks import Ranks
from digen.extras import explain

VideoFormat = Literal["gif", "mp4"]

COLUMNS = 8
"""Samples in a row of a grid, and the most of one prompt that is worth showing."""
_GAP, _LINE = 6, 14
_SMALLEST, _LARGEST_IMAGE, _LARGEST_VIDEO = 72, 256, 160
"""Pixels of a cell's longer side: a sample is enlarged to the first, and made smaller than the others."""
_FOREGROUND, _BACKGROUND = 30, 255
_MAX_HEADER = 200
"""Characters of a header line that are drawn: about as many as fit, whatever the prompt's length."""

Cell = tuple[Image.Image, ...]
"""One sample, small: the frames of a video, or one image."""


def cells_of(images: Images) -> list[Cell]:
    """Every sample as it is shown: a few kilobytes, so that whoever draws many need not keep them."""
    video = images.ndim == 5
    height, width = images.shape[-2:]
    longer = max(height, width)
    scale = min(max(longer, _SMALLEST), _LARGEST_VIDEO if video else _LARGEST_IMAGE) / longer
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    resample = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    return [
        tuple(_picture(frame).resize(size, resample) for frame in (sample if video else [sample])) for sample in images
    ]


def gather_cells(cells: Sequence[Cell], ranks: Ranks) -> Sequence[Cell] | None:
    """Every rank's cells on rank 0, which must have one if another has; ``None`` on the others."""
    if ranks.num_ranks == 1:
        return cells
    found = ranks.gather(torch.from_numpy(np.array([[np.asarray(frame) for frame in cell] for cell in cells])))
    return None if found is None else [tuple(map(Image.fromarray, cell)) for cell in found.numpy()]


@dataclass(frozen=True, slots=True)
class Section:
    """The samples of one prompt: header lines above, a caption below each."""

    header: tuple[str, ...]
    cells: Sequence[Cell]
    captions: Sequence[str]


def write_grid(
    path: Path, sections: Sequence[Section], *, video: VideoFormat = "gif", frames_per_second: int = 16
) -> Path:
    """Draw the sections below each other, eight samples a row, and replace the file in one go.

    Args:
        path: a ``.png``; a grid of videos gets the suffix of its format instead.
        sections: with cells of one size and one number of frames.
        video: the format of videos.
        frames_per_second: of videos.

    Returns:
        The path that was written.

    Raises:
        MissingExtra: an MP4 is wanted, and the extra ``video`` is not installed.
    """
    grid = _Grid.of(sections)
    frames = [grid.draw(sections, index) for index in range(grid.num_frames)]
    write: Callable[[Path], None]
    if grid.num_frames == 1:
        write = frames[0].save
    elif video == "gif":
        path, write = path.with_suffix(".gif"), _gif(frames, frames_per_second)
    else:
        path, write = path.with_suffix(".mp4"), _mp4(frames, frames_per_second)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.tmp{path.suffix}")
    write(unfinished)
    unfinished.replace(path)
    return path


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where everything goes."""

    cell: tuple[int, int]
    size: tuple[int, int]
    num_frames: int

    @classmethod
    def of(cls, sections: Sequence[Section]) -> Self:
        """The grid that holds ``sections``."""
        first = sections[0].cells[0]
        width, height = first[0].size
        pitch = height + _LINE + _GAP
        whole = (
            max(_GAP + COLUMNS * (_SMALLEST + _GAP), _GAP + _columns(sections) * (width + _GAP)),
            _GAP + sum(len(section.header) * _LINE + _rows(section) * pitch + _GAP for section in sections),
        )
        even = whole[0] + whole[0] % 2, whole[1] + whole[1] % 2  # as video encoders want it
        return cls(cell=(width, height), size=even, num_frames=len(first))

    def draw(self, sections: Sequence[Section], frame: int) -> Image.Image:
        """The whole grid at one frame."""
        font = ImageFont.load_default(11)
        canvas = Image.new("RGB", self.size, (_BACKGROUND,) * 3)
        draw = ImageDraw.Draw(canvas)
        width, height = self.cell
        top = _GAP
        for section in sections:
            for line in section.header:
                draw.text((_GAP, top), line[:_MAX_HEADER], fill=(_FOREGROUND,) * 3, font=font)
                top += _LINE
            for position, (cell, caption) in enumerate(zip(section.cells, section.captions, strict=True)):
                row, column = divmod(position, COLUMNS)
                left = _GAP + column * (width + _GAP)
                y = top + row * (height + _LINE + _GAP)
                canvas.paste(cell[frame], (left, y))
                draw.text((left, y + height), caption, fill=(_FOREGROUND,) * 3, font=font)
            top += _rows(section) * (height + _LINE + _GAP) + _GAP
        return canvas


def _columns(sections: Sequence[Section]) -> int:
    return min(COLUMNS, max(len(section.cells) for section in sections))


def _rows(section: Section) -> int:
    return -(-len(section.cells) // COLUMNS)


def _gif(frames: Sequence[Image.Image], frames_per_second: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        duration_ms = 1000 / frames_per_second
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration_ms, loop=0)

    return write


def _mp4(frames: Sequence[Image.Image], frames_per_second: int) -> Callable[[Path], None]:
    try:
        import av
    except ImportError as error:
        explain(error, "video")
        raise

    def write(path: Path) -> None:
        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream("libx264", rate=frames_per_second)
            stream.width, stream.height = frames[0].size
            stream.pix_fmt = "yuv420p"
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_image(frame)))
            container.mux(stream.encode(None))

    return write


def _picture(image: NDArray[np.float32]) -> Image.Image:
    pixels = (np.clip(image, 0, 1) * 255).round().astype(np.uint8)
    if pixels.ndim == 3:
        pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 else pixels[0]
    return Image.fromarray(pixels).convert("RGB")
