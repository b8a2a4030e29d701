"""Pictures of samples for people: a captioned grid as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from digen.diffusion.families.base import Images

_CELL, _GAP, _LINE, _COLUMNS = 72, 6, 14, 8
_FOREGROUND, _BACKGROUND = 30, 255


@dataclass(frozen=True, slots=True)
class Section:
    """The samples of one prompt: header lines above, a caption below every image."""

    header: tuple[str, ...]
    images: Images
    captions: Sequence[str]


_MAX_HEADER = 200
"""Characters of a header line that are drawn: about as many as fit, whatever the prompt's length."""


def write_grid(path: Path, sections: Sequence[Section]) -> None:
    """Draw the sections below each other, eight images a row, and replace ``path`` in one go."""
    font = ImageFont.load_default(11)
    height = _GAP + sum(_height(section) for section in sections)
    canvas = Image.new("RGB", (_GAP + _COLUMNS * (_CELL + _GAP), height), (_BACKGROUND,) * 3)
    draw = ImageDraw.Draw(canvas)
    top = _GAP
    for section in sections:
        for line in section.header:
            draw.text((_GAP, top), line[:_MAX_HEADER], fill=(_FOREGROUND,) * 3, font=font)
            top += _LINE
        for position, (image, caption) in enumerate(zip(section.images, section.captions, strict=True)):
            row, column = divmod(position, _COLUMNS)
            left = _GAP + column * (_CELL + _GAP)
            y = top + row * (_CELL + _LINE + _GAP)
            canvas.paste(_cell(image), (left, y))
            draw.text((left, y + _CELL), caption, fill=(_FOREGROUND,) * 3, font=font)
        top += _rows(section) * (_CELL + _LINE + _GAP) + _GAP
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    canvas.save(unfinished, format="PNG")
    unfinished.replace(path)


def _rows(section: Section) -> int:
    return -(-len(section.images) // _COLUMNS)


def _height(section: Section) -> int:
    return len(section.header) * _LINE + _rows(section) * (_CELL + _LINE + _GAP) + _GAP


def _cell(image: NDArray[np.float32]) -> Image.Image:
    pixels = (np.clip(image, 0, 1) * 255).round().astype(np.uint8)
    if pixels.ndim == 3:
        pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 else pixels[0]
    picture = Image.fromarray(pixels).convert("RGB")
    enlarged = picture.width < _CELL
    return picture.resize((_CELL, _CELL), Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS)
