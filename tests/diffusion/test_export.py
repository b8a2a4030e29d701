"""What is exported loads back in diffusers, and draws what the trained policy draws."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from safetensors.torch import load_file

from digen.config import LoraSection, ModelSection, RunConfig, SamplingSection
from digen.diffusion import families
from digen.diffusion.export import Exporter
from digen.diffusion.families.pipeline import Part
from digen.diffusion.roles import build_family
from digen.diffusion.state import write_tensors
from digen.diffusion.tiny import TINY
from digen.errors import CheckpointError, ConfigError
from digen.types import Prompt

EVERYTHING: frozenset[Part] = frozenset({"denoise", "encode", "decode"})

LORA = LoraSection(rank=4, alpha=8)
ADAPTER = "pytorch_lora_weights.safetensors"


def configure(family: str, folder: Path | None, lora: LoraSection | None, **sampling: Any) -> RunConfig:
    model = ModelSection(family=family, path=folder, lora=lora)
    return RunConfig(model=model, sampling=SamplingSection(**sampling))


@torch.no_grad()
def trained(config: RunConfig, folder: Path) -> tuple[Any, Path]:
    """A model that was moved away from its base, and the file of a checkpoint that holds its weights."""
    family: Any = build_family(config, EVERYTHING)
    for parameter in family.parameters().values():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    path = folder / "weights.safetensors"
    write_tensors(path, family.parameters())
    return family, path


def export(config: RunConfig, weights: Path, out: Path) -> dict[str, Any]:
    return Exporter(config.model_dump(mode="json"), str(weights)).save(str(out))


def draw(pipe: Any, family: str) -> torch.Tensor:
    """Two steps of the pipeline, from the same noise each time."""
    pipe.set_progress_bar_config(disable=True)
    size = {name: value for name, value in TINY[family].sampling.items() if name != "max_prompt_tokens"}
    drawn: torch.Tensor = pipe(
        "a red square",
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="pt",
        return_dict=False,
        **size,
    )[0]
    return drawn


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_diffusers_draws_what_the_trained_policy_draws(
    name: str, lora: LoraSection | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model(name)
    config = configure(name, base, lora, **TINY[name].sampling)
    family, weights = trained(config, tmp_path)
    hashes = export(config, weights, tmp_path / "out")
    pipe = DiffusionPipeline.from_pretrained(base if lora else tmp_path / "out")
    before = draw(pipe, name) if lora else draw(DiffusionPipeline.from_pretrained(base), name)
    if lora:
        assert [path.name for path in (tmp_path / "out").iterdir()] == [ADAPTER]
        pipe.load_lora_weights(tmp_path / "out", weight_name=ADAPTER)
    exported = draw(pipe, name)
    setattr(pipe, family.denoiser, family.network)
    assert difference(exported, draw(pipe, name)) <= 1e-5
    assert difference(exported, before) > 1e-4
    assert type(pipe).__name__ == family.pipeline
    for paths, root in ((hashes["files"], tmp_path / "out"), (hashes["base"], base)):
        assert all(hashlib.sha256((root / path).read_bytes()).hexdigest() == sha for path, sha in paths.items())
    written = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert set(hashes["files"]) == written
    assert {path.split("/")[0] for path in hashes["base"]} == {family.denoiser}


DIGITS = {"num_inference_steps": 3}
PROMPTS = [Prompt("the digit 3", {"label": 3}), Prompt("the digit 8", {"label": 8})]


@torch.no_grad()
def prediction_of(family: Any) -> torch.Tensor:
    latents = torch.randn(2, *family.latent_shape, generator=torch.Generator().manual_seed(3))
    predicted: torch.Tensor = family.predict(latents, torch.tensor([0.9, 0.3]), family.encode(PROMPTS))
    return predicted


def test_an_exported_digits_model_is_a_model_path(tmp_path: Path) -> None:
    config = configure("digits", None, None, **DIGITS)
    family, weights = trained(config, tmp_path)
    export(config, weights, tmp_path / "out")
    loaded = build_family(configure("digits", tmp_path / "out", None, **DIGITS), EVERYTHING)
    assert torch.equal(prediction_of(loaded), prediction_of(family))
    assert np.array_equal(loaded.decode(prediction_of(loaded)), family.decode(prediction_of(family)))
    network = SD3Transformer2DModel.from_pretrained(tmp_path / "out", subfolder="transformer")
    held = dict(network.named_parameters())
    assert all(torch.equal(held[name], parameter) for name, parameter in family.parameters().items())
    assert families.check_model_folder(tmp_path / "out") == families.check_model_folder(Path(family.folder))


def test_an_exported_digits_adapter_loads_into_the_denoiser(tmp_path: Path) -> None:
    config = configure("digits", None, LORA, **DIGITS)
    family, weights = trained(config, tmp_path)
    export(config, weights, tmp_path / "out")
    base: Any = build_family(configure("digits", None, None, **DIGITS), EVERYTHING)
    before = prediction_of(base)
    base.network.load_lora_adapter(tmp_path / "out", prefix=None, weight_name=ADAPTER)
    assert difference(prediction_of(base), prediction_of(family)) <= 1e-5
    assert difference(prediction_of(base), before) > 1e-3


def test_a_float32_average_is_exported_in_the_models_precision(tmp_path: Path) -> None:
    model = ModelSection(dtype="bfloat16")
    config = RunConfig(model=model)
    family, _ = trained(config, tmp_path)
    write_tensors(tmp_path / "ema.safetensors", {key: value.float() for key, value in family.parameters().items()})
    export(config, tmp_path / "ema.safetensors", tmp_path / "out")
    held = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert all(torch.equal(held[name], parameter) for name, parameter in family.parameters().items())


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    _, weights = trained(configure("digits", None, LORA), tmp_path)
    with pytest.raises(CheckpointError, match=r"weights.safetensors is of another model: \d+ tensors differ"):
        export(configure("digits", None, None), weights, tmp_path / "out")


def test_only_the_other_components_of_the_pipeline_are_copied(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    base = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "base"))
    (base / "unet" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"the base model in half precision")
    (base / "v1-5-pruned.ckpt").write_bytes(b"the base model in one file")
    config = configure("sd15", base, None, **TINY["sd15"].sampling)
    _, weights = trained(config, tmp_path)
    export(config, weights, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["safety_checker"] == [None, None]
    components = {name for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None}
    assert {path.name for path in (tmp_path / "out").iterdir()} == components | {"model_index.json"}
    assert {path.name for path in (tmp_path / "out" / "unet").iterdir()} == {
        "config.json",
        "diffusion_pytorch_model.safetensors",
    }


def test_a_model_of_the_hub_is_copied_from_where_the_hub_left_it(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_model("sd3")
    config = configure("sd3", base, None, **TINY["sd3"].sampling)
    _, weights = trained(config, tmp_path)
    exporter = Exporter(config.model_dump(mode="json"), str(weights))
    exporter._family.folder = "org/name"
    monkeypatch.setattr(DiffusionPipeline, "download", {"org/name": str(base)}.__getitem__)
    hashes = exporter.save(str(tmp_path / "out"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in base.iterdir()}
    assert all((base / path).is_file() for path in hashes["base"])


class Bare:
    """A family of another package that is no PipelineFamily."""

    def __init__(self, **options: Any) -> None:
        del options


def test_a_family_that_diffusers_does_not_know_is_refused(tiny_model: Callable[[str], Path]) -> None:
    config = configure(f"{__name__}:Bare", tiny_model("sd3"), None)
    with pytest.raises(ConfigError, match="cannot be exported: it is no subclass of"):
        Exporter(config.model_dump(mode="json"), "nowhere")


def test_every_pipeline_with_a_lora_loader_takes_the_adapter() -> None:
    """The keywords of ``save_lora_weights`` are made of the denoiser's name."""
    for info in families.FAMILIES.values():
        pipeline = getattr(diffusers, str(info.pipeline), None)
        assert pipeline is None or hasattr(pipeline, "save_lora_weights")
