"""Rewards that compare the CLIP embeddings of picture and prompt: CLIP score, PickScore, HPSv2.

The networks are transformers' ``CLIPModel``; weights in open_clip's format are renamed into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import transformers
from PIL import Image
from torch import Tensor

from digen.diffusion.rewards.checkpoints import fill, pretrained, read_weights, ready
from digen.diffusion.rewards.pictures import PictureReward
from digen.errors import ConfigError
from digen.types import Prompt

Fit = Literal["crop", "pad"]
"""How a picture becomes a square: cropped as the image processor says, or padded with black."""

PROCESSOR = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
"""The image processor that needs PIL only, so that scores do not depend on what else is installed."""


class Clip:
    """A CLIP model that embeds pictures and texts.

    Args:
        model: a folder, or ``hf:ORG/NAME[@COMMIT]``: config, weights (not needed with ``checkpoint``).
        processor: where tokenizer and image processor are. Default: ``model``.
        checkpoint: a file of weights in open_clip's format that is used in place of the folder's.
        trust_checkpoint: see :func:`digen.diffusion.rewards.checkpoints.read_weights`.
        fit: how a picture becomes a square.
        device, dtype: where and in what precision the network runs; embeddings are float32.

    Raises:
        ConfigError: something cannot be read or does not fit.
    """

    def __init__(
        self,
        model: str,
        processor: str | None = None,
        *,
        checkpoint: str | None = None,
        trust_checkpoint: bool = False,
        fit: Fit = "crop",
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        if checkpoint is None:
            network = pretrained(transformers.CLIPModel, model)
        else:
            network = transformers.CLIPModel(pretrained(transformers.CLIPConfig, model))
            weights = read_weights(checkpoint, trust=trust_checkpoint)
            fill(network, from_open_clip(weights), checkpoint)
        self.logit_scale = float(network.logit_scale.detach().exp())
        """The model's factor of a cosine: exp of its trained parameter."""
        self.network: Any = ready(network, device, dtype)
        self._processor = pretrained(PROCESSOR, processor or model)
        self._tokenizer = pretrained(transformers.AutoTokenizer, processor or model)
        self._fit = fit

    @torch.no_grad()
    def embed_pictures(self, flat: Sequence[Image.Image]) -> Tensor:
        """``(n, d)`` float32 embeddings of length 1."""
        if self._fit == "crop":
            pixels = self._processor(images=list(flat), return_tensors="pt")["pixel_values"]
        else:
            statistics = (self._processor.image_mean, self._processor.image_std)
            mean, std = (torch.tensor(values)[:, None, None] for values in statistics)
            size = self.network.config.vision_config.image_size
            pixels = torch.stack([(pad(picture, size) - mean) / std for picture in flat])
        pixels = pixels.to(self.network.device, self.network.dtype)
        hidden = self.network.vision_model(pixel_values=pixels).pooler_output
        return torch.nn.functional.normalize(self.network.visual_projection(hidden).float(), dim=-1).cpu()

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """``(n, d)`` float32 embeddings of length 1; texts are cut to what the model takes."""
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}  # a group has one prompt
        length = self.network.config.text_config.max_position_embeddings
        tokens = self._tokenizer(
            list(rows), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self.network.device)
        hidden = self.network.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        projected = self.network.text_projection(hidden.pooler_output).float()
        return torch.nn.functional.normalize(projected, dim=-1).cpu()[[rows[text] for text in texts]]

    def cosines(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> Tensor:
        """``(n,)`` float32 cosines between each picture and its prompt."""
        return (self.embed_pictures(flat) * self.embed_texts([prompt.text for prompt in prompts])).sum(dim=-1)


class ClipScore(PictureReward):
    """Reward: the cosine between picture and prompt, in [-1, 1]; a CLIPScore (arXiv 2104.08718) is 2.5 max(it, 0).

    Args:
        model: a folder or ``hf:ORG/NAME`` of a CLIP model, for example ``hf:openai/clip-vit-large-patch14``.
        frames: see :class:`digen.diffusion.rewards.pictures.PictureReward`.
        clip: the other arguments of :class:`Clip`, but ``fit``.
    """

    _fit: ClassVar[Fit] = "crop"

    def __init__(self, model: str, frames: int = 1, **clip: Any) -> None:
        super().__init__(frames)
        self._clip = Clip(model, fit=self._fit, **clip)

    def score(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> list[float]:
        """One number a picture."""
        values: list[float] = self._clip.cosines(flat, prompts).tolist()
        return values


class PickScore(ClipScore):
    """Reward: ``exp(logit_scale) cosine / 26`` (PickScore, arXiv 2305.01569, on Flow-GRPO's scale).

    Arguments as of :class:`ClipScore`. The published model is ``hf:yuvalkirstain/PickScore_v1`` with the ``processor``
    ``hf:laion/CLIP-ViT-H-14-laion2B-s32B-b79K``.
    """

    def score(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> list[float]:
        """One number a picture, mostly between 0.6 and 1."""
        return [self._clip.logit_scale * value / 26 for value in super().score(flat, prompts)]


class HPSv2(ClipScore):
    """Reward: the cosine of a CLIP model that was trained on preferences (HPS v2, arXiv 2306.09341).

    The whole picture is seen, padded to a square, as HPS was trained. Arguments as of :class:`ClipScore`. The published
    weights are the ``checkpoint`` ``hf:xswu/HPSv2/HPS_v2.1_compressed.pt`` (a pickle: it needs ``trust_checkpoint``) of
    the ``model`` ``hf:laion/CLIP-ViT-H-14-laion2B-s32B-b79K``.
    """

    _fit = "pad"


def pad(picture: Image.Image, size: int) -> Tensor:
    """A picture as ``(3, size, size)`` float32: its longer side scaled to ``size``, the rest black on both sides.

    Scaling is bicubic with antialiasing, as torchvision does it to tensors.
    """
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    image = pixels.reshape(picture.height, picture.width, 3).permute(2, 0, 1).float() / 255
    scale = size / max(picture.height, picture.width)
    if scale != 1:
        shape = [round(picture.height * scale), round(picture.width * scale)]
        image = torch.nn.functional.interpolate(
            image[None], size=shape, mode="bicubic", align_corners=False, antialias=True
        )[0]
    rows, columns = size - image.shape[1], size - image.shape[2]
    return torch.nn.functional.pad(image, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


_PREFIXES = {
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "transformer.resblocks.": "text_model.encoder.layers.",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "token_embedding.": "text_model.embeddings.token_embedding.",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.": "text_model.final_layer_norm.",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
}
_INNER = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
    ".attn.out_proj.": ".self_attn.out_proj.",
}


def from_open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an open_clip CLIP under the names of transformers' ``CLIPModel``.

    Raises:
        ConfigError: a name is not one of open_clip's.
    """
    return dict(pair for name, value in weights.items() for pair in _renamed(name, value))


def _renamed(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name == "attn_mask":  # the causal mask, no weight
        return
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        raise ConfigError(f"the checkpoint has {name!r}, which is no weight of an open_clip CLIP")
    new = _PREFIXES[prefix] + name.removeprefix(prefix)
    for old, renamed in _INNER.items():
        new = new.replace(old, renamed)
    if ".attn.in_proj_" in new:  # queries, keys and values in one
        stem, _, kind = new.partition(".attn.in_proj_")
        for letter, part in zip("qkv", value.chunk(3), strict=True):
            yield f"{stem}.self_attn.{letter}_proj.{kind}", part
    else:
        yield new, value.T if name in {"visual.proj", "text_projection"} else value
