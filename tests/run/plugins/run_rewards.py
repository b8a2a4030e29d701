"""Rewards that the tests name in a config; workers find them because this folder is on their PYTHONPATH."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def brightness(images: Any, prompts: Sequence[Any], pause_s: float = 0.0) -> list[float]:
    """The mean of each image: cheap and deterministic. With ``pause_s`` a score takes long enough to be hit in it."""
    if pause_s:
        print(f"scoring {len(prompts)} images")
    time.sleep(pause_s)
    return [float(image.mean()) for image in images]


def brightness_unless(images: Any, prompts: Sequence[Any], hang: str, pause_s: float) -> list[float]:
    """Never returns, once, when there is a file ``hang``, which it removes."""
    if Path(hang).exists():
        Path(hang).unlink()
        while True:
            time.sleep(1)
    return brightness(images, prompts, pause_s)


def nan(images: Any, prompts: Sequence[Any]) -> list[float]:
    del prompts
    return [0.5] * (len(images) - 1) + [float("nan")]


def boom(images: Any, prompts: Sequence[Any]) -> list[float]:
    raise ValueError(f"no reward for {len(images)} images of {len(prompts)} prompts")


def poison(images: Any, prompts: Sequence[Any], label: int) -> list[float]:
    """Images of one digit end the process."""
    if any(prompt.metadata["label"] == label for prompt in prompts):
        os.abort()
    return [float(image.mean()) for image in images]
