"""A reward for tests: a sample's mean."""

from __future__ import annotations

from typing import Any


def brightness(images: Any, prompts: Any) -> list[float]:
    """The mean of each picture."""
    return [float(image.mean()) for image in images]
