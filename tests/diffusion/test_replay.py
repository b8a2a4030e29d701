"""The log-probabilities that a trainer computes again against those of the rollout, in float32 and in bfloat16.

In a forward of the same shape they are equal. In a forward of another shape float32 is held to 1e-5, and bfloat16 to
5e-4: what others report between two engines with guidance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from digen.config import load_config
from digen.diffusion.families import lookup
from digen.diffusion.roles import GeneratorTarget, TrainerTarget
from digen.diffusion.tiny import TINY
from digen.types import GroupSlice, MicroBatch, Prompt
from tests.diffusion.family_checks import TEXTS

PROMPTS = [Prompt(text) for text in TEXTS]
BATCH = MicroBatch(0, 0, 0, tuple(GroupSlice(f"s0p{number}", prompt, 0, 1, 1) for number, prompt in enumerate(PROMPTS)))


def run_config(name: str, folder: Path, dtype: str, **algorithm: Any) -> dict[str, Any]:
    fields = {
        "model.family": name,
        "model.path": str(folder),
        "model.dtype": dtype,
        "reward.name": "tests.diffusion.plugins.brightness:brightness",
        "sampling.num_inference_steps": 4,
        "algorithm.name": "ddpo" if lookup(name).process == "ddim" else "flow_grpo",
        "algorithm.clip_range": 0.01,
    }
    fields |= {f"sampling.{key}": value for key, value in TINY[name].sampling.items()}
    fields |= {f"algorithm.{key}": value for key, value in algorithm.items()}
    return load_config(None, fields).model_dump(mode="json")


@pytest.mark.parametrize(("dtype", "floor"), [("float32", 1e-5), ("bfloat16", 5e-4)])
@pytest.mark.parametrize("name", sorted(TINY))
def test_a_replay_is_exact_in_the_same_shape_and_close_in_another(
    name: str, dtype: str, floor: float, tiny_model: Callable[[str], Path]
) -> None:
    stepwise, at_once = (run_config(name, tiny_model(name), dtype, tsp_chunk=chunk) for chunk in (1, "all"))
    generator, same, other = GeneratorTarget(stepwise), TrainerTarget(stepwise), TrainerTarget(at_once)
    rollout = generator.generate(BATCH, generator.encode(PROMPTS))
    assert same.update(rollout, (1.0, -1.0)).metrics["ratio/floor"] == 0.0
    assert other.update(rollout, (1.0, -1.0)).metrics["ratio/floor"] <= floor
