"""Sharpness, a reward that another package adds. The package's ``pyproject.toml`` says::

    [project.entry-points."digen.rewards"]
    sharpness = "sharpness_digen:Sharpness"

A config then says ``reward: {name: sharpness, kwargs: {target: 0.2}}``, or has it among several ``heads``.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from digen.diffusion.rewards.pictures import PictureReward
from digen.errors import ConfigError
from digen.types import Prompt


class Sharpness(PictureReward):
    """Reward: how sharp a picture is, up to ``target``: the standard deviation of its Laplacian over ``target``.

    Args:
        target: sharpness that is enough, so that noise is not worth more than a photograph.
        frames: pictures of a video that are looked at.

    Raises:
        ConfigError: ``target`` is not positive.
    """

    def __init__(self, target: float = 0.2, frames: int = 1) -> None:
        super().__init__(frames)
        if not target > 0:
            raise ConfigError(f"target of the sharpness reward must be above 0, got {target}")
        self._target = target

    def score(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> list[float]:
        """One number in [0, 1] a picture."""
        return [min(laplacian(picture) / self._target, 1.0) for picture in flat]


def laplacian(picture: Image.Image) -> float:
    """Standard deviation of the discrete Laplacian of a picture's brightness in [0, 1]."""
    x = np.asarray(picture.convert("L"), dtype=np.float64) / 255
    return float((x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]).std())
