"""How well a picture compresses: the size of its JPEG file (DDPO, arXiv 2305.13301, section 5.1)."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image

from digen.diffusion.rewards.pictures import PictureReward
from digen.errors import ConfigError
from digen.types import Prompt


class JpegIncompressibility(PictureReward):
    """Reward: the size of the picture as a JPEG, in kilobytes of 1000 bytes.

    Args:
        quality: of the JPEG, 1 to 95; DDPO's is 95.
        frames: see :class:`digen.diffusion.rewards.pictures.PictureReward`.
    """

    def __init__(self, quality: int = 95, frames: int = 1) -> None:
        super().__init__(frames)
        if not isinstance(quality, int) or not 1 <= quality <= 95:
            raise ConfigError(f"quality of a JPEG is an integer from 1 to 95, got {quality!r}")
        self._quality = quality

    def score(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> list[float]:
        """Kilobytes of each picture; prompts are not looked at."""
        del prompts
        return [self._kilobytes(picture) for picture in flat]

    def _kilobytes(self, picture: Image.Image) -> float:
        buffer = io.BytesIO()
        picture.save(buffer, format="JPEG", quality=self._quality)
        return buffer.tell() / 1000


class JpegCompressibility(JpegIncompressibility):
    """Reward: minus the size of the picture as a JPEG, in kilobytes. Arguments as :class:`JpegIncompressibility`."""

    def score(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> list[float]:
        """Minus the kilobytes of each picture."""
        return [-size for size in super().score(flat, prompts)]
