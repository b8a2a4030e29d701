from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from digen.config import ModelSection, SamplingSection
from digen.diffusion.families import check_model_folder, lookup, source
from digen.diffusion.families.digits import Digits
from digen.errors import ConfigError, MissingExtra
from digen.extras import require
from digen.types import Prompt

DIGITS = Path(source(ModelSection()))


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return Digits(model=ModelSection(path=folder, dtype=str(dtype).removeprefix("torch.")), sampling=SamplingSection())  # type: ignore[arg-type]


def test_the_registries_import_no_torch() -> None:
    code = (
        "import sys, digen.diffusion.families as families, digen.diffusion.rewards as rewards;"
        "families.source(families.ModelSection()); rewards.lookup('classifier');"
        "assert not {'torch', 'numpy', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_families_get_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown model\.family 'digit'; did you mean 'digits'\? known: digits"):
        lookup("digit")


def test_the_embedded_model_is_checked_and_small() -> None:
    assert DIGITS.name == "digits"
    assert sum(path.stat().st_size for path in DIGITS.rglob("*") if path.is_file()) <= 4_000_000
    lines = [json.loads(line) for line in (DIGITS / "prompts.jsonl").read_text().splitlines()]
    assert lines == [{"prompt": f"the digit {n}", "label": n} for n in range(10)]


def test_folders_that_are_no_models_are_named_with_a_mend(tmp_path: Path) -> None:
    mend = "set model.path to a folder written by diffusers' save_pretrained"
    with pytest.raises(ConfigError, match=f"nowhere does not exist or is not a folder; {mend}"):
        source(ModelSection(path=tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=rf"has no model_index\.json; {mend}"):
        check_model_folder(tmp_path)
    index = tmp_path / "model_index.json"
    for text, message in (("{", "not valid JSON"), ("[]", "must hold an object"), ("{}", "names no components")):
        index.write_text(text)
        with pytest.raises(ConfigError, match=message):
            check_model_folder(tmp_path)
    shutil.copytree(DIGITS, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "scheduler")
    with pytest.raises(ConfigError, match="lacks the component folders scheduler"):
        check_model_folder(tmp_path / "copy")


def test_a_model_of_another_family_or_a_torn_file_is_a_config_error(tmp_path: Path) -> None:
    shutil.copytree(DIGITS, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be loaded as family digits"):
        _load(tmp_path)
    shutil.rmtree(tmp_path / "prompt_encoder")
    with pytest.raises(ConfigError, match="lacks the component folders prompt_encoder"):
        _load(tmp_path)


def test_missing_dependencies_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in lookup("digits").extras:
        require(extra)
    monkeypatch.setattr("digen.extras.find_spec", lambda name: None if name == "sklearn" else object())
    with pytest.raises(MissingExtra, match=r"sklearn is not installed.*digen-rl\[demo\]"):
        require("demo")


@pytest.mark.parametrize(
    "sampling", [{"guidance_scale": 3.0}, {"height": 16}, {"width": 8}, {"max_prompt_tokens": 9}, {"num_frames": 2}]
)
def test_options_that_digits_have_no_use_for_are_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"sampling\.{next(iter(sampling))} is"):
        Digits(model=ModelSection(), sampling=SamplingSection(**sampling))


def test_weights_are_aligned_and_on_their_own() -> None:
    model = _load(DIGITS)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters().values())
    assert 900_000 < sum(parameter.numel() for parameter in model.parameters().values()) < 1_000_000
    assert not model.network.training
    assert not model.pipe.requires_grad


def test_sigmas_latents_and_images() -> None:
    model = _load(DIGITS)
    assert model.latent_shape == (1, 8, 8)
    assert model.schedule(8).levels.tolist() == pytest.approx([1, 21 / 22, 0.9, 5 / 6, 0.75, 9 / 14, 0.5, 0.3, 0])
    unshifted = Digits(model=ModelSection(), sampling=SamplingSection(shift=1.0))
    assert unshifted.schedule(4).levels.tolist() == [1, 0.75, 0.5, 0.25, 0]
    images = model.decode(torch.tensor([-3.0, -1.0, 0.0, 1.0]).reshape(4, 1, 1, 1).expand(4, 1, 8, 8))
    assert images.shape == (4, 8, 8)
    assert images[:, 0, 0].tolist() == [0.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_velocity_has_the_models_precision(dtype: torch.dtype) -> None:
    model = _load(DIGITS, dtype)
    conditioning = model.encode([Prompt("the digit 1", {"label": 1}), Prompt("the digit 2", {"label": "2"})])
    with torch.no_grad():
        velocity = model.predict(torch.zeros(2, 1, 8, 8), torch.tensor([1.0, 0.5]), conditioning)
    assert (velocity.dtype, velocity.shape, model.dtype) == (dtype, (2, 1, 8, 8), dtype)


@pytest.mark.parametrize(
    "metadata", [{}, {"label": 10}, {"label": -1}, {"label": "three"}, {"label": 1.5}, {"label": True}]
)
def test_prompts_without_a_class_are_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"prompt 'a cat': the digits family needs a label from 0 to 9"):
        _load(DIGITS).encode([Prompt("a cat", metadata)])
