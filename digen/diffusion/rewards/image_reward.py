"""ImageReward (arXiv 2304.05977): a BLIP text encoder that looks at the picture, and a rating of its first state.

The network is built of transformers' BLIP parts; the published checkpoint has the names of the original BLIP, which are
renamed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.blip.modeling_blip import BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

from digen.diffusion.rewards.aesthetic import linear_stack
from digen.diffusion.rewards.checkpoints import fill, pretrained, read_weights, ready
from digen.diffusion.rewards.clip import PROCESSOR
from digen.diffusion.rewards.pictures import PictureReward
from digen.errors import ConfigError
from digen.types import Prompt

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the raw rating over the authors' data; the reward is (rating - MEAN) / STD."""

_MAX_TOKENS = 35
_VISION = "blip.visual_encoder."
_TEXT = "blip.text_encoder."
_HEAD = "mlp.layers."
_UNUSED = ("blip.vision_proj.", "blip.text_proj.", f"{_TEXT}embeddings.position_ids")


class ImageReward(PictureReward):
    """Reward: the standardised rating of picture and prompt, about -2 to 2.

    Args:
        model: a folder or ``hf:ORG/NAME`` with a BLIP ``config.json`` and tokenizer of the checkpoint's widths, for the
            published checkpoint ``hf:Salesforce/blip-itm-large-coco``; its weights are not read.
        checkpoint: a path or ``hf:ORG/NAME/FILE``, for example ``hf:THUDM/ImageReward/ImageReward.pt``.
        trust_checkpoint: see :func:`digen.diffusion.rewards.checkpoints.read_weights`.
        frames: see :class:`digen.diffusion.rewards.pictures.PictureReward`.
        device, dtype: of the encoders; the rating is float32 on the CPU.

    Raises:
        ConfigError: something cannot be read or does not fit.
    """

    def __init__(
        self,
        model: str,
        checkpoint: str,
        *,
        trust_checkpoint: bool = False,
        frames: int = 1,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        super().__init__(frames)
        weights = read_weights(checkpoint, trust=trust_checkpoint)
        config = pretrained(transformers.BlipConfig, model)
        vision, text = config.vision_config, config.text_config
        vision.image_size = _image_size(weights, vision.patch_size, checkpoint)
        vision.layer_norm_eps = 1e-6  # the original BLIP's; transformers' configs say 1e-5
        self._vision: Any = BlipVisionModel(vision)
        self._text: Any = BlipTextModel(text, add_pooling_layer=False)
        fill(self._vision, {_vision_name(k): v for k, v in _part(weights, _VISION).items()}, checkpoint)
        fill(self._text, _part(weights, _TEXT), checkpoint)
        self._head = linear_stack(_part(weights, _HEAD, keep=True), checkpoint, _HEAD)
        ready(self._vision, device, dtype)
        ready(self._text, device, dtype)
        self._tokenizer = pretrained(transformers.AutoTokenizer, model)
        self._processor = PROCESSOR(size={"shortest_edge": vision.image_size}, crop_size=vision.image_size)

    @torch.no_grad()
    def score(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> list[float]:
        """One number a picture."""
        device = self._vision.device
        pixels = self._processor(images=list(flat), return_tensors="pt")["pixel_values"].to(device, self._vision.dtype)
        seen = self._vision(pixel_values=pixels).last_hidden_state
        tokens = self._tokenizer(
            [prompt.text for prompt in prompts],
            padding="max_length",
            truncation=True,
            max_length=_MAX_TOKENS,
            return_tensors="pt",
        ).to(device)
        states = self._text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=device),
        ).last_hidden_state
        ratings: Tensor = self._head(states[:, 0].float().cpu()).squeeze(-1)
        values: list[float] = ((ratings - MEAN) / STD).tolist()
        return values


def _part(weights: Mapping[str, Tensor], prefix: str, keep: bool = False) -> dict[str, Tensor]:
    chosen = {
        name: value for name, value in weights.items() if name.startswith(prefix) and not name.startswith(_UNUSED)
    }
    return chosen if keep else {name.removeprefix(prefix): value for name, value in chosen.items()}


_VISION_NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.", "encoder.layers."),
    (r"^norm\.", "post_layernorm."),
    (r"\.norm(\d)\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
)


def _vision_name(name: str) -> str:
    for old, new in _VISION_NAMES:
        name = re.sub(old, new, name)
    return name


def _image_size(weights: Mapping[str, Tensor], patch: int, source: str) -> int:
    """Pixels of a side, from the number of positions that the checkpoint knows."""
    known = (_VISION, _TEXT, _HEAD, *_UNUSED)
    strange = sorted(name for name in weights if not name.startswith(known))
    positions = weights.get(f"{_VISION}pos_embed")
    if strange or positions is None or positions.ndim != 3:
        what = f"has {strange[0]!r}" if strange else f"has no {_VISION}pos_embed"
        raise ConfigError(f"checkpoint {source!r} is not ImageReward's: it {what}")
    return math.isqrt(positions.shape[1] - 1) * patch
