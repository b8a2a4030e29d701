"""How much people liked pictures of this kind: LAION's aesthetic predictor on a CLIP embedding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from digen.diffusion.rewards.checkpoints import read_weights, ready
from digen.diffusion.rewards.clip import Clip
from digen.diffusion.rewards.pictures import PictureReward
from digen.errors import ConfigError
from digen.types import Prompt


class Aesthetic(PictureReward):
    """Reward: the predicted rating of a picture, about 1 to 10; the prompt is not looked at.

    Args:
        model: a folder or ``hf:ORG/NAME`` of the CLIP model, for the public predictor
            ``hf:openai/clip-vit-large-patch14``.
        checkpoint: the predictor's weights ``layers.N.weight`` and ``.bias``, a path or ``hf:ORG/NAME/FILE``.
        trust_checkpoint: see :func:`digen.diffusion.rewards.checkpoints.read_weights`.
        frames: see :class:`digen.diffusion.rewards.pictures.PictureReward`.
        device, dtype: of the CLIP model; the predictor runs in float32 on the CPU.
        clip: the other arguments of :class:`digen.diffusion.rewards.clip.Clip`.

    Raises:
        ConfigError: something cannot be read or does not fit.
    """

    def __init__(
        self, model: str, checkpoint: str, trust_checkpoint: bool = False, frames: int = 1, **clip: Any
    ) -> None:
        super().__init__(frames)
        self._clip = Clip(model, **clip)
        self._head = linear_stack(read_weights(checkpoint, trust=trust_checkpoint), checkpoint)
        width, expected = self._head[0].in_features, self._clip.network.config.projection_dim
        if width != expected:
            raise ConfigError(
                f"checkpoint {checkpoint!r} rates embeddings of {width} numbers, {model!r} gives {expected}"
            )

    def score(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> list[float]:
        """One number a picture."""
        del prompts
        with torch.no_grad():
            values: list[float] = self._head(self._clip.embed_pictures(flat)).squeeze(-1).tolist()
        return values


def linear_stack(weights: Mapping[str, Tensor], source: str, prefix: str = "layers.") -> Any:
    """The rating head that LAION's predictor and ImageReward share: linear layers and nothing between (a dropout in
    training), to one number.

    Args:
        weights: ``PREFIX N.weight`` and ``PREFIX N.bias``; the layers follow in the order of N.
        source: named in errors.
        prefix: of their names.

    Returns:
        A frozen float32 ``torch.nn.Sequential`` of ``torch.nn.Linear``.

    Raises:
        ConfigError: other weights, or layers that do not fit each other.
    """
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.(weight|bias)")
    matches = [pattern.fullmatch(name) for name in weights]
    numbers = sorted({int(match[1]) for match in matches if match})
    names = [f"{prefix}{number}.{kind}" for number in numbers for kind in ("weight", "bias")]
    if not numbers or sorted(names) != sorted(weights):
        raise ConfigError(f"checkpoint {source!r} must hold {prefix}N.weight and {prefix}N.bias and nothing else")
    layers, width = [], None
    for number in numbers:
        weight, bias = weights[f"{prefix}{number}.weight"], weights[f"{prefix}{number}.bias"]
        if weight.ndim != 2 or bias.shape != weight.shape[:1] or width not in {None, weight.shape[1]}:
            raise ConfigError(f"checkpoint {source!r}: layer {prefix}{number} does not fit the one before it")
        width = weight.shape[0]
        layer = torch.nn.Linear(weight.shape[1], width)
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers.append(layer)
    if width != 1:
        raise ConfigError(f"checkpoint {source!r}: the last layer gives {width} numbers, a rating is one")
    return ready(torch.nn.Sequential(*layers), "cpu", "float32")
