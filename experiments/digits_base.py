"""Make the embedded base model of the digits family from scratch: about 20 s on one core, the same bytes every time.

    python experiments/digits_base.py --output digen/diffusion/assets/digits

It stops early on purpose: an ODE class accuracy of about two thirds leaves reinforcement learning something to do.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, __version__
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from digen.config import ModelSection, SamplingSection
from digen.diffusion.families.digits import ENCODER_WEIGHTS, Digits
from digen.diffusion.rewards.classifier import Judge
from digen.diffusion.sampler import sample_ode
from digen.types import Prompt

WIDTH = 32
NUM_CLASSES = 10


def train(steps: int, seed: int) -> tuple[Any, torch.Tensor, float]:
    """Flow matching on scikit-learn's 1797 digits, batch 128; returns transformer, embeddings and the last loss."""
    torch.manual_seed(seed)
    digits = load_digits()
    pixels = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)
    transformer: Any = SD3Transformer2DModel(  # diffusers has no types
        sample_size=8,
        patch_size=2,
        in_channels=1,
        out_channels=1,
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=3,
        caption_projection_dim=96,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=8,
    )
    table = torch.nn.Embedding(NUM_CLASSES, WIDTH)
    optimizer = torch.optim.AdamW([*transformer.parameters(), *table.parameters()], lr=1e-3, betas=(0.9, 0.99))
    loss = torch.tensor(0.0)
    for _ in range(steps):
        rows = torch.randint(0, len(pixels), (128,))
        clean, noise = pixels[rows], torch.randn(128, 1, 8, 8)
        sigma = torch.sigmoid(torch.randn(128))
        noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
        embedding = table(labels[rows])
        velocity = transformer(
            hidden_states=noisy,
            timestep=sigma * 1000,
            encoder_hidden_states=embedding[:, None],
            pooled_projections=embedding,
            return_dict=False,
        )[0]
        loss = (velocity - (noise - clean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return transformer, table.weight.detach(), loss.item()


def save(output: Path, transformer: Any, embedding: torch.Tensor) -> None:
    """Write diffusers' folder layout, and one prompt per class."""
    for name in ("transformer", "scheduler", "prompt_encoder"):
        shutil.rmtree(output / name, ignore_errors=True)
    transformer.save_pretrained(output / "transformer")
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)  # as above
    scheduler.save_pretrained(output / "scheduler")
    encoder = output / "prompt_encoder"
    encoder.mkdir(parents=True)
    save_file({"weight": embedding.contiguous()}, encoder / ENCODER_WEIGHTS)
    (encoder / "config.json").write_text(json.dumps({"num_classes": NUM_CLASSES, "width": WIDTH}, indent=2) + "\n")
    index = {
        "_class_name": "DigitsPipeline",
        "_diffusers_version": __version__,
        "prompt_encoder": ["digen.diffusion.families.digits", "Digits"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
    }
    (output / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    for weights in output.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes them for the owner alone
    lines = [json.dumps({"prompt": f"the digit {label}", "label": label}) for label in range(NUM_CLASSES)]
    (output / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def accuracy(folder: Path, steps: int = 8, per_class: int = 100) -> float:
    """Class accuracy of ODE samples from the saved folder, by the judge."""
    model = Digits(model=ModelSection(path=folder), sampling=SamplingSection())
    prompts = [Prompt(f"the digit {n}", {"label": n}) for n in range(NUM_CLASSES) for _ in range(per_class)]
    start = torch.randn(len(prompts), *model.latent_shape, generator=torch.Generator().manual_seed(1))
    latents = sample_ode(model, model.encode(prompts), model.schedule(steps), start, unit=100)
    return float(np.mean(Judge()(model.decode(latents), prompts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=190)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformer, embedding, loss = train(arguments.steps, arguments.seed)
    save(arguments.output, transformer, embedding)
    size = sum(file.stat().st_size for file in arguments.output.rglob("*") if file.is_file())
    print(f"steps {arguments.steps}  last loss {loss:.4f}  {size / 2**20:.2f} MiB")
    print(f"ODE class accuracy {accuracy(arguments.output):.3f}")


if __name__ == "__main__":
    main()
