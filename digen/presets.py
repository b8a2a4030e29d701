"""Presets: a config made to run on a machine without a GPU, on a tiny random model of its family.

``digen train CONFIG --preset tiny`` runs the same code on the same schedule as the config itself: two small steps, on a
model whose weights are random, so that what would fail on the cluster fails at the desk. Nothing is downloaded; rewards
that need a model give way to one that needs none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from digen.config import RunConfig, set_dotted, validate
from digen.errors import ConfigError

SIZES: dict[str, dict[str, int]] = {
    "flux": {"height": 16, "width": 24, "max_prompt_tokens": 24},
    "hunyuan_video": {"num_frames": 5, "height": 16, "width": 32, "max_prompt_tokens": 24},
    "qwen_image": {"height": 16, "width": 24, "max_prompt_tokens": 32},
    "sd15": {"height": 16, "width": 24},
    "sd3": {"height": 16, "width": 24, "max_prompt_tokens": 24},
    "wan": {"num_frames": 5, "height": 16, "width": 32, "max_prompt_tokens": 24},
}
"""The families that have a tiny model, and sizes that suit it."""

_MODELLESS = {"jpeg_compressibility", "jpeg_incompressibility"}
"""Rewards that can be computed anywhere."""


def tiny(config: RunConfig, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """``config`` with two small steps on the CPU, on a tiny model in ``run.output/tiny``; the rest stays as it is.

    What ``overrides`` set by dotted names wins over the preset.

    Raises:
        ConfigError: the family has no tiny model.
    """
    family = config.model.family
    if family not in SIZES:
        raise ConfigError(f"--preset tiny: family {family!r} has no tiny model; these do: {', '.join(SIZES)}")
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    for section in ("run", "model", "plan", "sampling", "algorithm", "workers", "evaluation"):
        data.setdefault(section, {})
    data["run"] |= {"name": f"{config.run.name}-tiny", "num_steps": 2}
    data["model"] |= {"path": str(config.run.output / "tiny" / family), "dtype": "float32", "device": "cpu"}
    data["model"] |= {"attention": None, "gradient_checkpointing": False}
    if config.model.lora is not None:
        data["model"]["lora"] = config.model.lora.model_dump(mode="json") | {"rank": 4}
    data["plan"] |= {"prompts_per_step": 2, "samples_per_prompt": 4, "micro_batch_size": None}
    data["sampling"] |= {"num_inference_steps": 8} | SIZES[family]
    if config.algorithm.advantage.best_of_n is not None:
        data["algorithm"]["advantage"] = config.algorithm.advantage.model_dump(mode="json") | {"best_of_n": 2}
    if any(head.name not in _MODELLESS for head in config.reward.resolved_heads):
        data["reward"] = {"name": "jpeg_incompressibility"}
    data["workers"] |= {"type": "process", "generators": None if config.schedule.mode == "colocated" else 1}
    data["workers"] |= {name: {} for name in ("ranks", "gpus", "engines", "engine_args", "python", "judges", "fsdp")}
    data["evaluation"] |= {"num_prompts": 1, "samples_per_prompt": 2, "num_inference_steps": 4, "every": 0}
    for key, value in (overrides or {}).items():
        set_dotted(data, key, value)
    return validate(data, source="--preset tiny")


def ensure_model(config: RunConfig) -> None:
    """Build the tiny model of a config that :func:`tiny` made, in a process of its own, unless it is there."""
    folder = config.model.path
    assert folder is not None  # noqa: S101 - tiny set it
    if not (folder / "model_index.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _build(config.model.family, folder)


def _build(family: str, folder: Path) -> None:
    command = [sys.executable, "-m", "digen.diffusion.tiny", family, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode:
        raise ConfigError(f"--preset tiny: the tiny model cannot be built: {done.stderr.strip().splitlines()[-1]}")
