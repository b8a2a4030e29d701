"""CLIP score, PickScore, HPSv2, aesthetic and ImageReward on tiny random networks.

Each is compared with an independent computation: transformers' own ``CLIPModel`` forward, and plain torch operations on
the weights under their original names (open_clip's, BLIP's).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, multi_head_attention_forward, softmax

from digen.diffusion.families.base import Images
from digen.diffusion.rewards.aesthetic import Aesthetic, linear_stack
from digen.diffusion.rewards.clip import PROCESSOR, ClipScore, HPSv2, PickScore, pad
from digen.diffusion.rewards.compute import RewardFunction, build_callable
from digen.diffusion.rewards.image_reward import ImageReward
from digen.errors import ConfigError
from digen.types import Prompt

PROMPTS = [Prompt("a cat"), Prompt("a dog on a mat"), Prompt("a cat"), Prompt("x" * 50)]
WIDTH, LAYERS, HEADS, DIM, LENGTH, SIZE, PATCH = 32, 2, 4, 16, 24, 28, 14


def noise(*shape: int) -> Images:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


IMAGES = noise(4, 3, 40, 32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    alphabet = sorted(ByteLevel.alphabet())
    words = ["<|startoftext|>", *alphabet, *(letter + "</w>" for letter in alphabet), "<|endoftext|>"]
    return transformers.CLIPTokenizer(
        vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=LENGTH
    )


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A tiny random CLIP with tokenizer and image processor, as transformers saves them."""
    size = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    size |= {"num_attention_heads": HEADS}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.CLIPConfig(
        text_config={
            **size,
            **special,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": LENGTH,
            "hidden_act": "gelu",
        },
        vision_config={**size, "image_size": SIZE, "patch_size": PATCH, "hidden_act": "gelu"},
        projection_dim=DIM,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.CLIPModel(config).eval()
        for parameter in model.parameters():  # biases begin at zero, and would hide a lost one
            parameter.data += 0.1 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("rewards") / "clip"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    PROCESSOR(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def logits(clip: Path) -> tuple[Tensor, float]:
    """``logits_per_image`` of each image with its prompt by transformers' own forward, and its scale."""
    model = transformers.CLIPModel.from_pretrained(clip).eval()
    processor, tokenizer = PROCESSOR.from_pretrained(clip), transformers.AutoTokenizer.from_pretrained(clip)
    pictures = [Image.fromarray((image * 255).round().astype(np.uint8).transpose(1, 2, 0)) for image in IMAGES]
    pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
    texts = [prompt.text for prompt in PROMPTS]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        output = model(pixel_values=pixels, **tokens)
    return output.logits_per_image.diagonal(), float(model.logit_scale.detach().exp())


class TestClip:
    def test_the_score_is_the_cosine_of_transformers_own_forward(
        self, clip: Path, logits: tuple[Tensor, float]
    ) -> None:
        expected = (logits[0] / logits[1]).tolist()
        scores = ClipScore(str(clip))(IMAGES, PROMPTS)
        assert scores == pytest.approx(expected, abs=1e-6)
        assert max(scores) - min(scores) > 1e-3, "the pictures and prompts make a difference"

    def test_pickscore_is_scaled_as_flow_grpo_does(self, clip: Path, logits: tuple[Tensor, float]) -> None:
        assert PickScore(str(clip))(IMAGES, PROMPTS) == pytest.approx((logits[0] / 26).tolist(), abs=1e-5)

    def test_the_scale_is_not_rounded_with_the_network(self, clip: Path, logits: tuple[Tensor, float]) -> None:
        reward = PickScore(str(clip), dtype="bfloat16")
        cosines = ClipScore(str(clip), dtype="bfloat16")(IMAGES, PROMPTS)
        assert reward(IMAGES, PROMPTS) == pytest.approx([logits[1] * value / 26 for value in cosines], rel=1e-6)
        assert cosines == pytest.approx((logits[0] / logits[1]).tolist(), abs=0.05)

    def test_a_video_is_the_mean_of_its_frames(self, clip: Path) -> None:
        video = noise(2, 3, 3, 30, 30)
        one = ClipScore(str(clip))
        frames = [one(video[:, frame], PROMPTS[:2]) for frame in range(3)]
        expected = np.mean(frames, axis=0).tolist()
        assert ClipScore(str(clip), frames=3)(video, PROMPTS[:2]) == pytest.approx(expected, abs=1e-6)

    def test_tokenizer_and_processor_may_be_elsewhere(self, clip: Path, tmp_path: Path) -> None:
        transformers.CLIPModel.from_pretrained(clip).save_pretrained(tmp_path / "bare")
        reward = PickScore(str(tmp_path / "bare"), processor=str(clip))
        assert reward(IMAGES, PROMPTS) == PickScore(str(clip))(IMAGES, PROMPTS)
        with pytest.raises(ConfigError, match=r"CLIPImageProcessorPil cannot be read from '.*bare'"):
            PickScore(str(tmp_path / "bare"))

    def test_a_folder_that_lacks_weights_is_refused(self, clip: Path, tmp_path: Path) -> None:
        # transformers itself would go on with random ones
        folder = tmp_path / "torn"
        folder.mkdir()
        for file in clip.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        weights = load_file(folder / "model.safetensors")
        del weights["visual_projection.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"torn' lacks 1 weights of a CLIPModel, for example visual_projection"):
            ClipScore(str(folder))

    def test_a_hub_name_is_passed_on_with_its_revision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []

        def from_pretrained(name: str, **options: Any) -> Any:
            calls.append((name, options))
            raise OSError("there is no hub here")

        monkeypatch.setattr(transformers.CLIPModel, "from_pretrained", from_pretrained)
        with pytest.raises(
            ConfigError, match=r"CLIPModel cannot be read from 'hf:org/name@0123abc': there is no hub here"
        ):
            ClipScore("hf:org/name@0123abc")
        ((name, options),) = calls
        assert name == "org/name"
        assert options["revision"] == "0123abc"
        assert options["use_safetensors"] is True
        assert "trust_remote_code" not in options

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"model": "no/such/folder"}, "folder 'no/such/folder' of a reward's model does not exist"),
            ({"dtype": "float8"}, "dtype 'float8' of a reward; known: float32, bfloat16, float16"),
            ({"device": "quantum"}, "cannot be moved to device 'quantum'"),
            ({"patience": 1}, "does not take reward.kwargs"),
            ({"fit": "pad"}, "does not take reward.kwargs"),
            ({"frames": 0}, "frames must be an integer"),
        ],
    )
    def test_wrong_arguments(self, clip: Path, kwargs: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            build_callable("digen.diffusion.rewards.clip:ClipScore", {"model": str(clip), **kwargs})


def open_clip_weights(clip: Path) -> dict[str, Tensor]:
    """Random weights of a CLIP of the same sizes under open_clip's names and in its shapes."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    vocabulary = len(transformers.AutoTokenizer.from_pretrained(clip))
    weights = {
        "positional_embedding": draw(LENGTH, WIDTH),
        "text_projection": draw(WIDTH, DIM),
        "logit_scale": torch.tensor(4.0),
        "token_embedding.weight": draw(vocabulary, WIDTH),
        "attn_mask": draw(LENGTH, LENGTH),
        "visual.class_embedding": draw(WIDTH),
        "visual.positional_embedding": draw((SIZE // PATCH) ** 2 + 1, WIDTH),
        "visual.proj": draw(WIDTH, DIM),
        "visual.conv1.weight": draw(WIDTH, 3, PATCH, PATCH),
    }
    for name in ("ln_final", "visual.ln_pre", "visual.ln_post"):
        weights |= {f"{name}.weight": 1 + draw(WIDTH), f"{name}.bias": draw(WIDTH)}
    for tower in ("transformer", "visual.transformer"):
        for layer in range(LAYERS):
            block = f"{tower}.resblocks.{layer}"
            for name in ("ln_1", "ln_2"):
                weights |= {f"{block}.{name}.weight": 1 + draw(WIDTH), f"{block}.{name}.bias": draw(WIDTH)}
            for name, rows, columns in (
                ("attn.in_proj_", 3 * WIDTH, WIDTH),
                ("attn.out_proj.", WIDTH, WIDTH),
                ("mlp.c_fc.", 4 * WIDTH, WIDTH),
                ("mlp.c_proj.", WIDTH, 4 * WIDTH),
            ):
                weights |= {f"{block}.{name}weight": draw(rows, columns), f"{block}.{name}bias": draw(rows)}
    return weights


def norm(weights: Mapping[str, Tensor], name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def dense(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def open_clip_tower(weights: Mapping[str, Tensor], tower: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """The residual blocks of an open_clip transformer on ``(n, length, width)``."""
    for layer in range(LAYERS):
        block = f"{tower}.resblocks.{layer}"
        y = norm(weights, f"{block}.ln_1", x).transpose(0, 1)
        attended, _ = multi_head_attention_forward(
            y, y, y, WIDTH, HEADS,
            weights[f"{block}.attn.in_proj_weight"], weights[f"{block}.attn.in_proj_bias"], None, None, False, 0.0,
            weights[f"{block}.attn.out_proj.weight"], weights[f"{block}.attn.out_proj.bias"],
            training=False, need_weights=False, attn_mask=mask,
        )  # fmt: skip
        x = x + attended.transpose(0, 1)
        hidden = gelu(dense(weights, f"{block}.mlp.c_fc", norm(weights, f"{block}.ln_2", x)))
        x = x + dense(weights, f"{block}.mlp.c_proj", hidden)
    return x


def open_clip_cosines(weights: Mapping[str, Tensor], pixels: Tensor, tokens: Tensor) -> Tensor:
    """What open_clip computes: ``(n,)`` cosines of pixels and tokens, the last of which in a row is the end."""
    x = torch.nn.functional.conv2d(pixels, weights["visual.conv1.weight"], stride=PATCH).flatten(2).transpose(1, 2)
    x = torch.cat([weights["visual.class_embedding"].expand(len(x), 1, -1), x], dim=1)
    x = norm(weights, "visual.ln_pre", x + weights["visual.positional_embedding"])
    x = open_clip_tower(weights, "visual.transformer", x, None)
    image = norm(weights, "visual.ln_post", x[:, 0]) @ weights["visual.proj"]
    length = tokens.shape[1]
    y = weights["token_embedding.weight"][tokens] + weights["positional_embedding"][:length]
    y = open_clip_tower(weights, "transformer", y, torch.full((length, length), -math.inf).triu(1))
    text = norm(weights, "ln_final", y)[:, -1] @ weights["text_projection"]
    return torch.nn.functional.cosine_similarity(image, text)


class TestHPSv2:
    def test_open_clip_weights_give_open_clip_scores(self, clip: Path, tokenizer: Any, tmp_path: Path) -> None:
        weights = open_clip_weights(clip)
        save_file(weights, tmp_path / "hps.safetensors")
        scores = HPSv2(str(clip), checkpoint=str(tmp_path / "hps.safetensors"))(IMAGES, PROMPTS)
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
        std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
        for image, prompt, score in zip(IMAGES, PROMPTS, scores, strict=True):
            # 40 x 32 becomes 28 x 22, with 3 black columns on each side
            pixels = torch.from_numpy((image * 255).round() / 255)[None]
            small = torch.nn.functional.interpolate(
                pixels, size=(28, 22), mode="bicubic", align_corners=False, antialias=True
            )
            square = torch.zeros(1, 3, 28, 28)
            square[..., 3:25] = small
            ids = tokenizer(prompt.text, truncation=True, max_length=LENGTH, return_tensors="pt")["input_ids"]
            expected = open_clip_cosines(weights, (square - mean) / std, ids)
            assert score == pytest.approx(float(expected), abs=2e-6)

    def test_the_whole_picture_is_kept(self) -> None:
        for width, height in ((28, 28), (56, 28), (20, 60)):
            padded = pad(Image.new("RGB", (width, height), "white"), 28)
            assert padded.shape == (3, 28, 28)
            seen = round(28 * width / max(width, height)) * round(28 * height / max(width, height))
            assert float(padded.sum()) == pytest.approx(3 * seen, rel=1e-5)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"strange": torch.zeros(1)}, "'strange', which is no weight of an open_clip CLIP"),
            (
                {"visual.proj": torch.zeros(WIDTH, DIM + 1)},
                r"visual_projection.weight is \(17, 32\) there and \(16, 32\)",
            ),
            ({"logit_scale": None}, "does not fit the model: it lacks logit_scale"),
            ({"visual.ln_mid.weight": torch.zeros(1)}, r"'visual.ln_mid.weight', which is no weight"),
            ({"transformer.resblocks.7.ln_1.bias": torch.zeros(WIDTH)}, r"it has text_model.*layers.7.*model has not"),
        ],
    )
    def test_a_checkpoint_that_does_not_fit(
        self, clip: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
    ) -> None:
        weights = {name: value for name, value in (open_clip_weights(clip) | change).items() if value is not None}
        save_file(weights, tmp_path / "hps.safetensors")
        with pytest.raises(ConfigError, match=message):
            HPSv2(str(clip), checkpoint=str(tmp_path / "hps.safetensors"))

    def test_a_pickle_must_be_trusted_and_is_read_without_running_it(self, clip: Path, tmp_path: Path) -> None:
        weights = open_clip_weights(clip)
        torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "hps.pt")
        save_file(weights, tmp_path / "hps.safetensors")
        with pytest.raises(ConfigError, match=r"hps.pt' is not safetensors but a pickle.*trust_checkpoint: true"):
            HPSv2(str(clip), checkpoint=str(tmp_path / "hps.pt"))
        pickled = HPSv2(str(clip), checkpoint=str(tmp_path / "hps.pt"), trust_checkpoint=True)
        safe = HPSv2(str(clip), checkpoint=str(tmp_path / "hps.safetensors"))
        assert pickled(IMAGES, PROMPTS) == safe(IMAGES, PROMPTS)
        torch.save({"state_dict": weights, "function": print}, tmp_path / "bad.pt")
        with pytest.raises(ConfigError, match=r"bad.pt' cannot be read: UnpicklingError"):
            HPSv2(str(clip), checkpoint=str(tmp_path / "bad.pt"), trust_checkpoint=True)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("sparse.pt", {"a": torch.eye(2).to_sparse()}, "must hold dense tensors by name"),
            ("list.pt", [torch.zeros(1)], "must hold dense tensors by name"),
            ("numbers.pt", {"a": 1}, "must hold dense tensors by name"),
        ],
    )
    def test_what_is_no_checkpoint(self, clip: Path, tmp_path: Path, name: str, content: Any, message: str) -> None:
        torch.save(content, tmp_path / name)
        with pytest.raises(ConfigError, match=message):
            HPSv2(str(clip), checkpoint=str(tmp_path / name), trust_checkpoint=True)

    def test_a_file_that_is_cut_or_missing(self, clip: Path, tmp_path: Path) -> None:
        (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 20)
        with pytest.raises(ConfigError, match=r"cut.safetensors' cannot be read"):
            HPSv2(str(clip), checkpoint=str(tmp_path / "cut.safetensors"))
        with pytest.raises(ConfigError, match=r"checkpoint 'nowhere.safetensors' of a reward does not exist"):
            HPSv2(str(clip), checkpoint="nowhere.safetensors")
        with pytest.raises(ConfigError, match="'hf:org/name' is not of the form hf:ORG/NAME/FILE"):
            HPSv2(str(clip), checkpoint="hf:org/name")

    def test_a_file_of_the_hub(self, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_file(open_clip_weights(clip), tmp_path / "hps.safetensors")
        calls: list[Any] = []

        def fetch(*arguments: Any, **options: Any) -> str:
            calls.append((arguments, options))
            if len(calls) > 1:
                raise OSError("there is no hub here")
            return str(tmp_path / "hps.safetensors")

        monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
        HPSv2(str(clip), checkpoint="hf:org/name/folder/hps.safetensors@0123abc")
        assert calls == [(("org/name", "folder/hps.safetensors"), {"revision": "0123abc"})]
        with pytest.raises(ConfigError, match=r"checkpoint 'hf:org/name/x.pt' cannot be fetched: there is no hub here"):
            HPSv2(str(clip), checkpoint="hf:org/name/x.pt")

    def test_torch_must_be_new_enough_for_a_pickle(
        self, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.save(open_clip_weights(clip), tmp_path / "hps.pt")
        monkeypatch.setattr(torch, "__version__", "2.9.1")
        with pytest.raises(ConfigError, match=r"safely takes torch 2\.10 or newer"):
            HPSv2(str(clip), checkpoint=str(tmp_path / "hps.pt"), trust_checkpoint=True)


def rating_weights(
    width: int, prefix: str = "layers.", numbers: tuple[int, ...] = (0, 2, 4, 6, 7)
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    widths = [width, 12, 8, 6, 4, 1]
    weights = {}
    for number, before, after in zip(numbers, widths, widths[1:], strict=False):
        weights[f"{prefix}{number}.weight"] = torch.randn(after, before, generator=generator)
        weights[f"{prefix}{number}.bias"] = torch.randn(after, generator=generator)
    return weights


def rate(weights: Mapping[str, Tensor], x: Tensor, prefix: str = "layers.") -> Tensor:
    for number in (0, 2, 4, 6, 7):
        x = dense(weights, f"{prefix}{number}", x)
    return x[..., 0]


class TestAesthetic:
    def test_it_rates_the_normalised_embedding(self, clip: Path, tmp_path: Path) -> None:
        weights = rating_weights(DIM)
        torch.save(weights, tmp_path / "mlp.pth")
        reward = Aesthetic(str(clip), str(tmp_path / "mlp.pth"), trust_checkpoint=True)
        model = transformers.CLIPModel.from_pretrained(clip).eval()
        pictures = [Image.fromarray((image * 255).round().astype(np.uint8).transpose(1, 2, 0)) for image in IMAGES]
        pixels = PROCESSOR.from_pretrained(clip)(images=pictures, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            tokens = torch.zeros(1, 1, dtype=torch.long)
            embedded = model(pixel_values=pixels, input_ids=tokens).image_embeds  # of length 1
        assert reward(IMAGES, PROMPTS) == pytest.approx(rate(weights, embedded).tolist(), abs=1e-4)

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ({}, r"must hold layers\.N\.weight and layers\.N\.bias"),
            (rating_weights(DIM) | {"extra": torch.zeros(1)}, r"must hold layers\.N\.weight"),
            ({k: v for k, v in rating_weights(DIM).items() if k != "layers.4.bias"}, r"must hold layers\.N\.weight"),
            (
                rating_weights(DIM) | {"layers.4.weight": torch.zeros(6, 9)},
                "layer layers.4 does not fit the one before",
            ),
            (rating_weights(DIM, numbers=(0, 2, 4)), "the last layer gives 6 numbers, a rating is one"),
        ],
    )
    def test_weights_that_are_no_rating(self, weights: dict[str, Tensor], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            linear_stack(weights, "x")

    def test_a_predictor_of_another_width(self, clip: Path, tmp_path: Path) -> None:
        save_file(rating_weights(DIM + 1), tmp_path / "mlp.safetensors")
        with pytest.raises(ConfigError, match=r"rates embeddings of 17 numbers, .* gives 16"):
            Aesthetic(str(clip), str(tmp_path / "mlp.safetensors"))


VISION, TEXT, BLIP_LENGTH = 24, 32, 40
"""Widths of the two BLIP encoders, and positions of the text."""


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config and tokenizer of a tiny BLIP, for another picture size, as the published one is."""
    folder = tmp_path_factory.mktemp("rewards") / "blip"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in words[5:]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary)
    tokenizer.save_pretrained(folder)
    transformers.BlipConfig(
        text_config={
            "vocab_size": len(words), "hidden_size": TEXT, "intermediate_size": 2 * TEXT, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "max_position_embeddings": BLIP_LENGTH, "encoder_hidden_size": 99,
            "bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": VISION, "intermediate_size": 4 * VISION, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "image_size": 64, "patch_size": 8,
        },
    ).save_pretrained(folder)  # fmt: skip
    return folder


def blip_weights(blip: Path) -> dict[str, Tensor]:
    """Random weights under the names of ImageReward's checkpoint, for pictures of 32 x 32."""
    generator = torch.Generator().manual_seed(3)
    words = len(transformers.AutoTokenizer.from_pretrained(blip))
    weights: dict[str, Tensor] = {}

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        weights[name] = around + 0.3 * torch.randn(shape, generator=generator)

    def layer(name: str, rows: int, columns: int) -> None:
        add(f"{name}.weight", rows, columns)
        add(f"{name}.bias", rows)

    def scale(name: str, width: int) -> None:
        add(f"{name}.weight", width, around=1.0)
        add(f"{name}.bias", width)

    vision, text = "blip.visual_encoder", "blip.text_encoder"
    add(f"{vision}.cls_token", 1, 1, VISION)
    add(f"{vision}.pos_embed", 1, 17, VISION)
    add(f"{vision}.patch_embed.proj.weight", VISION, 3, 8, 8)
    add(f"{vision}.patch_embed.proj.bias", VISION)
    scale(f"{vision}.norm", VISION)
    add(f"{text}.embeddings.word_embeddings.weight", words, TEXT)
    add(f"{text}.embeddings.position_embeddings.weight", BLIP_LENGTH, TEXT)
    scale(f"{text}.embeddings.LayerNorm", TEXT)
    for number in range(LAYERS):
        block = f"{vision}.blocks.{number}"
        scale(f"{block}.norm1", VISION)
        scale(f"{block}.norm2", VISION)
        layer(f"{block}.attn.qkv", 3 * VISION, VISION)
        layer(f"{block}.attn.proj", VISION, VISION)
        layer(f"{block}.mlp.fc1", 4 * VISION, VISION)
        layer(f"{block}.mlp.fc2", VISION, 4 * VISION)
        block = f"{text}.encoder.layer.{number}"
        for attention, width in (("attention", TEXT), ("crossattention", VISION)):
            layer(f"{block}.{attention}.self.query", TEXT, TEXT)
            layer(f"{block}.{attention}.self.key", TEXT, width)
            layer(f"{block}.{attention}.self.value", TEXT, width)
            layer(f"{block}.{attention}.output.dense", TEXT, TEXT)
            scale(f"{block}.{attention}.output.LayerNorm", TEXT)
        layer(f"{block}.intermediate.dense", 2 * TEXT, TEXT)
        layer(f"{block}.output.dense", TEXT, 2 * TEXT)
        scale(f"{block}.output.LayerNorm", TEXT)
    # what the published file holds beside them
    weights[f"{text}.embeddings.position_ids"] = torch.arange(BLIP_LENGTH)[None]
    layer("blip.vision_proj", 8, VISION)
    layer("blip.text_proj", 8, TEXT)
    return weights | rating_weights(TEXT, "mlp.layers.")


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of ``(length, width)`` states in HEADS heads."""
    parts = [x.reshape(len(x), HEADS, -1).transpose(0, 1) for x in (query, key, value)]
    chances = softmax(parts[0] @ parts[1].transpose(1, 2) / math.sqrt(parts[0].shape[-1]), dim=-1)
    return (chances @ parts[2]).transpose(0, 1).reshape(len(query), -1)


def blip_reward(weights: Mapping[str, Tensor], pixels: Tensor, tokens: Tensor) -> float:
    """ImageReward of one picture ``(3, 32, 32)`` and its tokens without padding, as the paper's code computes it."""
    name = "blip.visual_encoder"
    patches = torch.nn.functional.conv2d(
        pixels[None], weights[f"{name}.patch_embed.proj.weight"], weights[f"{name}.patch_embed.proj.bias"], stride=8
    )
    x = torch.cat([weights[f"{name}.cls_token"][0], patches[0].flatten(1).T]) + weights[f"{name}.pos_embed"][0]
    for number in range(LAYERS):
        block = f"{name}.blocks.{number}"
        qkv = dense(weights, f"{block}.attn.qkv", norm(weights, f"{block}.norm1", x, 1e-6))
        x = x + dense(weights, f"{block}.attn.proj", attend(*qkv.chunk(3, dim=-1)))
        hidden = gelu(dense(weights, f"{block}.mlp.fc1", norm(weights, f"{block}.norm2", x, 1e-6)))
        x = x + dense(weights, f"{block}.mlp.fc2", hidden)
    seen = norm(weights, f"{name}.norm", x, 1e-6)
    name = "blip.text_encoder"
    y = weights[f"{name}.embeddings.word_embeddings.weight"][tokens]
    y = y + weights[f"{name}.embeddings.position_embeddings.weight"][: len(tokens)]
    y = norm(weights, f"{name}.embeddings.LayerNorm", y, 1e-12)
    for number in range(LAYERS):
        block = f"{name}.encoder.layer.{number}"
        for attention in ("attention", "crossattention"):
            looked_at = y if attention == "attention" else seen
            part = f"{block}.{attention}"
            attended = attend(
                dense(weights, f"{part}.self.query", y),
                dense(weights, f"{part}.self.key", looked_at),
                dense(weights, f"{part}.self.value", looked_at),
            )
            y = norm(weights, f"{part}.output.LayerNorm", y + dense(weights, f"{part}.output.dense", attended), 1e-12)
        hidden = gelu(dense(weights, f"{block}.intermediate.dense", y))
        y = norm(weights, f"{block}.output.LayerNorm", y + dense(weights, f"{block}.output.dense", hidden), 1e-12)
    return (float(rate(weights, y[0], "mlp.layers.")) - 0.16717362830052426) / 1.0333394966054072


class TestImageReward:
    PROMPTS = (Prompt("a cat"), Prompt("dogs on a mat"), Prompt("b" * 60))

    def test_the_original_weights_give_the_original_rewards(self, blip: Path, tmp_path: Path) -> None:
        weights = blip_weights(blip)
        torch.save(weights, tmp_path / "ImageReward.pt")
        reward = ImageReward(str(blip), str(tmp_path / "ImageReward.pt"), trust_checkpoint=True)
        images = noise(3, 3, 32, 32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(blip)
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
        std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
        for image, prompt, value in zip(images, self.PROMPTS, reward(images, self.PROMPTS), strict=True):
            pixels = (torch.from_numpy((image * 255).round() / 255) - mean) / std
            tokens = tokenizer(prompt.text, truncation=True, max_length=35, return_tensors="pt")["input_ids"][0]
            assert value == pytest.approx(blip_reward(weights, pixels, tokens), abs=2e-4)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"other": torch.zeros(1)}, "is not ImageReward's: it has 'other'"),
            ({"blip.visual_encoder.pos_embed": None}, "is not ImageReward's: it has no blip.visual_encoder.pos_embed"),
            ({"blip.visual_encoder.norm.bias": None}, "does not fit the model: it lacks post_layernorm.bias"),
            ({"mlp.layers.4.bias": None}, r"must hold mlp\.layers\.N\.weight"),
        ],
    )
    def test_a_checkpoint_that_does_not_fit(
        self, blip: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
    ) -> None:
        weights = {name: value for name, value in (blip_weights(blip) | change).items() if value is not None}
        save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "other.safetensors")
        with pytest.raises(ConfigError, match=message):
            ImageReward(str(blip), str(tmp_path / "other.safetensors"))


def test_built_in_rewards_are_built_from_kwargs(clip: Path) -> None:
    reward: RewardFunction = build_callable("digen.diffusion.rewards.clip:PickScore", {"model": str(clip), "frames": 1})
    assert len(reward(IMAGES, PROMPTS)) == 4
