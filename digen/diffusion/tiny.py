"""Tiny random pipelines, one a family, built by code and saved as diffusers saves them: nothing is downloaded.

Every number that a family reads from its folder (shifts, VAE scaling, guidance) differs from its neutral value, and the
denoiser's weights are large enough that each of its inputs shows in what it predicts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    PNDMScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    LlamaConfig,
    LlamaModel,
    LlamaTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from digen.presets import SIZES

_BYTES = sorted(ByteLevel.alphabet())


@dataclass(frozen=True, slots=True)
class Tiny:
    """How a family's tiny pipeline is built and called."""

    build: Callable[[], DiffusionPipeline]
    sampling: dict[str, Any] = field(default_factory=dict)
    """``sampling`` fields of a config for it: a size that is small, and fits."""


def save(family: str, folder: Path) -> Path:
    """Build the family's pipeline, with the same weights each time, and save it in ``folder``."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        pipe = TINY[family].build()
        denoiser = pipe.components.get("transformer", pipe.components.get("unet"))
        for parameter in denoiser.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.7 * parameter[0].numel() ** -0.5)
    pipe.save_pretrained(folder)
    return folder


def clip_tokenizer() -> CLIPTokenizer:
    """Bytes and one word."""
    words = ["<|startoftext|>", "<|endoftext|>", *_BYTES, *(byte + "</w>" for byte in _BYTES), "th", "the</w>"]
    return CLIPTokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[("t", "h"), ("th", "e</w>")],
        model_max_length=77,
    )


def t5_tokenizer() -> T5TokenizerFast:
    """Letters."""
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words += [(chr(code), -3.0) for code in range(33, 127)] + [("▁" + chr(code), -2.5) for code in range(97, 123)]
    return T5TokenizerFast(vocab=words, extra_ids=0, model_max_length=512)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Bytes, and the words of the pipeline's template, which is 34 tokens to the prompt as it is of the real one."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|image_pad|>", "<|video_pad|>"]
    spaced = "the image by detailing color shape size texture quantity text spatial relationships of objects and"
    template = [*("Ġ" + word for word in spaced.split()), "Ġbackground", "system", "user", "assistant", "Describe"]
    merges = {(word[:end], word[end]): None for word in template for end in range(1, len(word))}
    words = [*_BYTES, *("".join(pair) for pair in merges), *special]
    return Qwen2Tokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=list(merges),
        additional_special_tokens=special,
    )


def clip_config(tokenizer: CLIPTokenizer, width: int = 32) -> CLIPTextConfig:
    """Two layers; a projection of 32."""
    return CLIPTextConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=width,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=len(tokenizer),
        projection_dim=32,
    )


def t5_config(tokenizer: T5TokenizerFast, width: int, kind: Any = T5Config) -> Any:
    """Two layers of the config class ``kind``."""
    return kind(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def image_vae(channels: int, blocks: int = 2) -> AutoencoderKL:
    """Compresses by two for each of its ``blocks`` but one."""
    return AutoencoderKL(
        sample_size=32,
        block_out_channels=(4, 8, 8)[:blocks],
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )


def _flux() -> DiffusionPipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_image_seq_len=16, max_image_seq_len=64, max_shift=1.25
        ),
        vae=image_vae(4, blocks=3),
        text_encoder=CLIPTextModel(clip_config(clip)),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(t5_config(t5, 32)),
        tokenizer_2=t5,
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
    )


def _qwen_image() -> DiffusionPipeline:
    tokenizer = qwen_tokenizer()
    number = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        "rope_theta": 1e6,
        "bos_token_id": number("<|endoftext|>"),
        "eos_token_id": number("<|im_end|>"),
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
    }
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=16, max_image_seq_len=128, max_shift=0.9, shift_terminal=0.02
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, -0.4],
            latents_std=[1.5, 0.5, 2.0, 0.8],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config=text,
                vision_config=vision,
                image_token_id=number("<|image_pad|>"),
                video_token_id=number("<|video_pad|>"),
                vision_start_token_id=number("<|vision_start|>"),
                vision_end_token_id=number("<|vision_end|>"),
            )
        ),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
    )


def _sd3() -> DiffusionPipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(4, blocks=3),
        text_encoder=CLIPTextModelWithProjection(clip_config(clip)),
        tokenizer=clip,
        text_encoder_2=CLIPTextModelWithProjection(clip_config(clip)),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=T5EncoderModel(t5_config(t5, 64)),  # as wide as the two others together
        tokenizer_3=t5,
        transformer=SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            out_channels=4,
            pos_embed_max_size=12,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
    )


def _sd15() -> DiffusionPipeline:
    clip = clip_tokenizer()
    return StableDiffusionPipeline(
        scheduler=PNDMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
        ),
        vae=image_vae(4),
        text_encoder=CLIPTextModel(clip_config(clip)),
        tokenizer=clip,
        unet=UNet2DConditionModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=4,
            norm_num_groups=4,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def llama_tokenizer() -> LlamaTokenizerFast:
    """Bytes and letters; HunyuanVideo's template before a prompt is 95 tokens long, as the pipeline expects it."""
    words = ["<unk>", "<s>", "</s>", "<pad>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [chr(code) for code in range(33, 127)]
    before, after = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")
    rest = 5 * (DEFAULT_PROMPT_TEMPLATE["crop_start"] - 1)  # one token is long, the others have five letters each
    pieces = [before[:-rest], *(before[start : start + 5] for start in range(len(before) - rest, len(before), 5))]
    return LlamaTokenizerFast(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        pad_token="<pad>",  # noqa: S106 - no password
        padding_side="right",
        additional_special_tokens=[*pieces, after],
    )


def _hunyuan_video() -> DiffusionPipeline:
    clip, llama = clip_tokenizer(), llama_tokenizer()
    return HunyuanVideoPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        text_encoder=LlamaModel(
            LlamaConfig(
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=3,
                hidden_size=16,
                intermediate_size=37,
                num_attention_heads=4,
                num_hidden_layers=4,
                vocab_size=len(llama),
            )
        ),
        tokenizer=llama,
        text_encoder_2=CLIPTextModel(clip_config(clip, width=8)),
        tokenizer_2=clip,
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=2,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
    )


def _wan() -> DiffusionPipeline:
    t5 = t5_tokenizer()
    return WanPipeline(
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        vae=AutoencoderKLWan(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        text_encoder=UMT5EncoderModel(t5_config(t5, 32, UMT5Config)),
        tokenizer=t5,
        transformer=WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        ),
    )


TINY: dict[str, Tiny] = {
    family: Tiny(build, SIZES[family])
    for family, build in {
        "flux": _flux,
        "hunyuan_video": _hunyuan_video,
        "qwen_image": _qwen_image,
        "sd15": _sd15,
        "sd3": _sd3,
        "wan": _wan,
    }.items()
}
"""The families that have a tiny pipeline."""


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
