"""Fixtures: a toy family in float64 or float32, micro-batches, and the real digits targets on one thread."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from digen.config import RunConfig, load_config
from digen.diffusion.families.base import Conditioning, Images, Schedule
from digen.diffusion.roles import GeneratorTarget, TrainerTarget
from digen.diffusion.schedule import linear_sigmas, static_shift
from digen.types import GroupSlice, MicroBatch, Prompt


class Toy:
    """A two-layer network on latents of shape (3, 2); batch invariant enough for float64 comparisons."""

    latent_shape = (3, 2)
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.forward_rows: list[int] = []
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.network = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6)).to(
                dtype
            )

        self._frozen = copy.deepcopy(self.network)

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return dict(self.network.named_parameters())

    @contextmanager
    def reference(self) -> Iterator[None]:
        trained, self.network = self.network, self._frozen
        try:
            yield
        finally:
            self.network = trained

    def schedule(self, num_steps: int) -> Schedule:
        return Schedule.of_flow(static_shift(linear_sigmas(num_steps), 3.0))

    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        return {"label": torch.tensor([[p.metadata["label"] / 10, 1.0] for p in prompts], dtype=self.dtype)}

    def predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        self.forward_rows.append(len(latents))
        inputs = torch.cat([latents.flatten(1), sigma[:, None], conditioning["label"]], dim=1)
        output: Tensor = self.network(inputs.to(self.dtype)).reshape(latents.shape)
        return output

    def decode(self, latents: Tensor) -> Images:
        return np.ascontiguousarray(latents.float().clamp(0, 1).numpy())


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny random pipeline, see ``digen/diffusion/tiny.py``; not to be written to."""
    root = tmp_path_factory.mktemp("tiny")

    @cache
    def folder(family: str) -> Path:
        from digen.diffusion.tiny import save  # here, because it imports every pipeline

        return save(family, root / family)

    return folder


@pytest.fixture
def tiny_variant(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a family's tiny pipeline with other values in one component's config."""

    def change(family: str, component: str, **values: Any) -> Path:
        shutil.copytree(tiny_model(family), tmp_path, dirs_exist_ok=True)
        path = tmp_path / component / ("scheduler_config.json" if component == "scheduler" else "config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return tmp_path

    return change


@pytest.fixture
def toy() -> Callable[[torch.dtype], Toy]:
    return Toy


@pytest.fixture(scope="session")
def micro_batch() -> Callable[..., MicroBatch]:
    def make(
        step: int = 0, index: int = 0, count: int = 6, *, start: int = 0, run_seed: int = 0, label: int = 3
    ) -> MicroBatch:
        prompt = Prompt(f"the digit {label}", {"label": label})
        return MicroBatch(run_seed, step, index, (GroupSlice(f"s{step}p{index}", prompt, start, count, 24),))

    return make


@pytest.fixture(scope="session")
def config() -> Callable[..., RunConfig]:
    def make(**overrides: Any) -> RunConfig:
        dotted = {key.replace("__", "."): value for key, value in overrides.items()}
        return load_config(None, {"sampling.num_inference_steps": 5, **dotted})

    return make


@pytest.fixture(scope="session")
def data(config: Callable[..., RunConfig]) -> Callable[..., dict[str, Any]]:
    return lambda **overrides: config(**overrides).model_dump(mode="json")


@pytest.fixture(scope="session")
def generator(data: Callable[..., dict[str, Any]]) -> GeneratorTarget:
    """The digits generator with the base weights; a test that loads others must use its own."""
    return GeneratorTarget(data())


@pytest.fixture
def trainer(data: Callable[..., dict[str, Any]]) -> TrainerTarget:
    return TrainerTarget(data())
