"""From decoded samples to the pictures that rewards look at: shapes, channels, frames, 8-bit values, in one place."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Sequence

import numpy as np
from PIL import Image

from digen.diffusion.families.base import Images
from digen.errors import ConfigError
from digen.types import Prompt


def pictures(images: Images, frames: int = 1) -> list[list[Image.Image]]:
    """Every sample as ``frames`` RGB pictures of 8 bits a channel, rounded to the nearest value.

    Args:
        images: float in [0, 1]; images ``(n, H, W)`` or ``(n, C, H, W)``, videos ``(n, F, C, H, W)``; C is 1 or 3.
        frames: pictures of each, evenly spread over a video from its first frame to its last; one is the middle frame.

    Raises:
        ValueError: another shape, a value that is not in [0, 1], or a video with too few frames.
    """
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim == 4:
        images = images[:, None]
    if images.ndim != 5 or images.shape[2] not in {1, 3} or 0 in images.shape[1:]:
        raise ValueError(
            f"images of shape {images.shape}; a reward takes (n, H, W), (n, C, H, W) or (n, F, C, H, W) with 1 or 3 "
            "channels"
        )
    if images.size and not (images.min() >= 0 and images.max() <= 1):  # a NaN is neither
        raise ValueError(f"pixels from {images.min()} to {images.max()}; they must be in [0, 1]")
    chosen = images[:, _spread(images.shape[1], frames)]
    pixels = (chosen * 255).round().astype(np.uint8).transpose(0, 1, 3, 4, 2).repeat(3 // images.shape[2], axis=-1)
    return [[Image.fromarray(np.ascontiguousarray(frame)) for frame in sample] for sample in pixels]


def _spread(total: int, count: int) -> list[int]:
    if count > total:
        raise ValueError(f"{count} frames are asked of samples that have {total}")
    if count == 1:
        return [total // 2]
    # Rounded to the nearest in integers: no float decides which frame is looked at.
    return [(2 * position * (total - 1) + count - 1) // (2 * (count - 1)) for position in range(count)]


def checked_frames(frames: int) -> int:
    """``frames`` of a reward's ``kwargs``.

    Raises:
        ConfigError: it is not a positive integer.
    """
    if not isinstance(frames, int) or isinstance(frames, bool) or frames < 1:
        raise ConfigError(f"frames must be an integer of at least 1, got {frames!r}")
    return frames


def png(picture: Image.Image) -> str:
    """A picture as base64 of a PNG file, for JSON."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class PictureReward:
    """A reward that looks at single pictures; a video's is the mean over ``frames`` of it.

    Args:
        frames: pictures of a video that are looked at, see :func:`pictures`.
    """

    def __init__(self, frames: int = 1) -> None:
        self._frames = checked_frames(frames)

    def __call__(self, images: Images, prompts: Sequence[Prompt]) -> list[float]:
        """One number a sample."""
        samples = pictures(images, self._frames)
        flat = [picture for sample in samples for picture in sample]
        values = self.score(flat, [prompt for prompt in prompts for _ in range(self._frames)])
        count = self._frames
        return [statistics.fmean(values[start : start + count]) for start in range(0, len(flat), count)]

    def score(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> Sequence[float]:
        """One number a picture; ``prompts`` has one entry per picture."""
        raise NotImplementedError
