"""What every family shares, for each of them on its tiny random pipeline; what differs is in ``test_<family>.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digen.config import LoraSection, ModelSection, SamplingSection, load_config
from digen.diffusion.families import lookup
from digen.diffusion.families.base import Conditioning
from digen.diffusion.roles import GeneratorTarget, TrainerTarget
from digen.diffusion.tiny import TINY
from digen.diffusion.trajectories import conditioning_arrays
from digen.errors import ConfigError
from digen.types import GroupSlice, MicroBatch, Prompt

PROMPTS = (Prompt("a red square"), Prompt("the sea at night"))
LORA = LoraSection(rank=4, alpha=8)
Folder = Callable[[str], Path]
EVERYTHING = frozenset({"denoise", "encode", "decode"})


@pytest.fixture(params=sorted(TINY))
def name(request: pytest.FixtureRequest) -> str:
    """A family."""
    return str(request.param)


def load(name: str, folder: Path, *, parts: Any = EVERYTHING, keep_reference: bool = False, **options: Any) -> Any:
    """The family's model; ``options`` are fields of ``model``."""
    module, _, kind = lookup(name).target.partition(":")
    return getattr(import_module(module), kind)(
        model=ModelSection(family=name, path=folder, **options),
        sampling=SamplingSection(**TINY[name].sampling),
        parts=parts,
        keep_reference=keep_reference,
    )


@pytest.fixture
def whole(name: str, tiny_model: Folder) -> Any:
    """Its model in single precision, with all parts; tests share it and do not change it."""
    return _whole(name, tiny_model(name))


@cache
def _whole(name: str, folder: Path) -> Any:
    return load(name, folder)


def latents_of(family: Any, rows: int = 2) -> torch.Tensor:
    latents = torch.randn(rows, *family.latent_shape, generator=torch.Generator().manual_seed(3))
    return latents.to(family.dtype)


def times_of(family: Any, rows: int = 2) -> torch.Tensor:
    """Another time for every row."""
    times: torch.Tensor = family.schedule(5).times[1 : 1 + rows].float()
    return times


@torch.no_grad()
def shipped(family: Any) -> Conditioning:
    """The prompts as they arrive at a worker that has no encoders."""
    arrays = conditioning_arrays(family.encode(PROMPTS))
    return {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}


@torch.no_grad()
def prediction_of(family: Any, conditioning: Conditioning | None = None) -> torch.Tensor:
    given = family.encode(PROMPTS) if conditioning is None else conditioning
    prediction: torch.Tensor = family.predict(latents_of(family), times_of(family), given)
    return prediction


@torch.no_grad()
def nudge(family: Any) -> None:
    for parameter in family.parameters().values():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def test_rows_of_a_batch_are_single_prompts(whole: Any) -> None:
    latents, times = latents_of(whole), times_of(whole)
    with torch.no_grad():
        together = whole.encode(PROMPTS)
        prediction = whole.predict(latents, times, together)
        for row, prompt in enumerate(PROMPTS):
            alone = whole.encode([prompt])
            assert alone.keys() == together.keys()
            for key, tensor in alone.items():
                assert difference(tensor[0].float(), together[key][row].float()) <= 1e-5
            part = whole.predict(latents[row : row + 1], times[row : row + 1], alone)
            assert difference(part[0], prediction[row]) <= 1e-5 * max(1.0, float(prediction.std()))
    assert difference(prediction[0], prediction[1]) > 0.1


def test_an_adapter_is_all_that_is_trained_and_begins_as_nothing(name: str, whole: Any, tiny_model: Folder) -> None:
    one, other = (load(name, tiny_model(name), lora=LORA) for _ in range(2))
    before = prediction_of(whole)
    assert {key.split(".lora_")[1] for key in one.parameters()} == {"A.default.weight", "B.default.weight"}
    reached = {key.split(".lora_")[0] for key in one.parameters()}
    assert all(any(module.endswith(target) for module in reached) for target in one.lora_targets)
    assert all(torch.equal(one.parameters()[key], tensor) for key, tensor in other.parameters().items())
    assert torch.equal(prediction_of(one), before)
    nudge(one)
    assert difference(prediction_of(one), before) > 1e-3
    with one.reference():
        assert torch.equal(prediction_of(one), before)
    assert difference(prediction_of(one), before) > 1e-3
    assert all(parameter.requires_grad for parameter in one.parameters().values())


def test_all_weights_are_trained_beside_a_frozen_copy(name: str, whole: Any, tiny_model: Folder) -> None:
    family = load(name, tiny_model(name), keep_reference=True)
    before = prediction_of(family)
    assert family.parameters().keys() == dict(family.network.named_parameters()).keys()
    nudge(family)
    after = prediction_of(family)
    assert difference(after, before) > 1e-2
    with family.reference():
        assert torch.equal(prediction_of(family), before)
    assert torch.equal(prediction_of(family), after)
    with pytest.raises(ConfigError, match="loaded without its reference"), whole.reference():
        pass


def test_adapter_targets_that_match_nothing_are_refused(name: str, tiny_model: Folder) -> None:
    nothing = LoraSection(targets=("nowhere",))
    with pytest.raises(ConfigError, match=r"model\.lora\.targets \['nowhere'\]"):
        load(name, tiny_model(name), lora=nothing)


def test_a_trainer_has_neither_encoders_nor_vae(name: str, whole: Any, tiny_model: Folder) -> None:
    trainer = load(name, tiny_model(name), parts=frozenset({"denoise"}))
    assert trainer.pipe is None
    assert trainer.latent_shape == whole.latent_shape
    assert torch.equal(trainer.schedule(5).levels, whole.schedule(5).levels)
    assert torch.equal(prediction_of(trainer, shipped(whole)), prediction_of(whole))
    with pytest.raises(ConfigError, match="loaded without what it needs to encode"):
        trainer.encode(PROMPTS)
    with pytest.raises(ConfigError, match="loaded without what it needs to decode"):
        trainer.decode(latents_of(trainer))


def _held(family: Any) -> set[str]:
    """What its pipeline has loaded for itself."""
    found = {component: loaded for component, loaded in family.pipe.components.items() if loaded is not None}
    return {component for component, loaded in found.items() if loaded is not family.network}


def test_a_worker_loads_only_its_parts(name: str, whole: Any, tiny_model: Folder) -> None:
    encoder, decoder = (load(name, tiny_model(name), parts=frozenset({part})) for part in ("encode", "decode"))
    held = {family: _held(family) for family in (whole, encoder, decoder)}
    assert held[decoder] == {"vae", "scheduler"}
    assert held[encoder] == held[whole] - {"vae"}
    assert held[encoder] > {"text_encoder", "tokenizer"}
    clean = latents_of(whole)
    assert np.array_equal(decoder.decode(clean), whole.decode(clean))


def test_double_precision_is_single_precision_with_more_digits(name: str, whole: Any, tiny_model: Folder) -> None:
    family = load(name, tiny_model(name), dtype="float64")
    prediction, expected = prediction_of(family), prediction_of(whole)
    assert prediction.dtype == family.dtype == torch.float64
    assert difference(prediction.float(), expected) <= 1e-4 * float(expected.std())


def test_half_precision(name: str, whole: Any, tiny_model: Folder) -> None:
    family = load(name, tiny_model(name), dtype="bfloat16")
    prediction, expected = prediction_of(family), prediction_of(whole)
    assert prediction.dtype == family.dtype == torch.bfloat16
    assert torch.equal(prediction_of(family, shipped(family)), prediction)
    assert float(torch.stack([prediction.float().flatten(), expected.flatten()]).corrcoef()[0, 1]) > 0.8
    images = family.decode(latents_of(family))
    assert images.dtype == np.float32
    assert np.isfinite(images).all()


def _data(name: str, folder: Path, **overrides: Any) -> dict[str, Any]:
    sampling = {f"sampling.{key}": value for key, value in TINY[name].sampling.items()}
    plain = {
        "model.family": name,
        "model.path": str(folder),
        "reward.name": "tests.diffusion.plugins.brightness:brightness",
        "sampling.num_inference_steps": 3,
        "plan.prompts_per_step": 2,
        "plan.samples_per_prompt": 2,
        "algorithm.name": "ddpo" if lookup(name).process == "ddim" else "flow_grpo",
        "algorithm.tsp_chunk": 1,
    }
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(None, plain | sampling | dotted).model_dump(mode="json")


MICRO_BATCH = MicroBatch(
    0, 0, 0, tuple(GroupSlice(f"s0p{number}", prompt, 0, 1, 2) for number, prompt in enumerate(PROMPTS))
)


def test_adapters_of_half_precision_models_are_precise(name: str, tiny_model: Folder) -> None:
    family = load(name, tiny_model(name), dtype="bfloat16", lora=LORA)
    assert {parameter.dtype for parameter in family.parameters().values()} == {torch.float32}
    before = prediction_of(family)
    nudge(family)
    assert before.dtype == family.dtype == torch.bfloat16
    assert difference(prediction_of(family), before) > 1e-2


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_step_of_training_replays_exactly_and_moves_the_policy(
    name: str, lora: LoraSection | None, tiny_model: Folder
) -> None:
    adapter = None if lora is None else lora.model_dump(mode="json")
    data = _data(name, tiny_model(name), model__lora=adapter)
    generator, trainer = GeneratorTarget(data), TrainerTarget(data)
    encoded = generator.encode(PROMPTS)
    rollout = generator.generate(MICRO_BATCH, encoded)
    assist = trainer.generate(MICRO_BATCH, encoded)
    assert all(np.array_equal(array, assist.payload[key], equal_nan=True) for key, array in rollout.payload.items())
    assert len(set(generator.score(rollout).rewards)) == 2
    report = trainer.update(rollout, (1.0, -1.0))
    assert report.metrics["ratio/floor"] == 0.0
    together = TrainerTarget(_data(name, tiny_model(name), model__lora=adapter, algorithm__tsp_chunk="all"))
    assert together.update(rollout, (1.0, -1.0)).metrics["ratio/floor"] <= 1e-5
    trainer.commit(0, (0,))
    generator.load(trainer.publish(1))
    assert not np.array_equal(generator.generate(MICRO_BATCH, encoded).payload["latents"], rollout.payload["latents"])
