"""A reward of another package: found by its entry point, built from a config, and asked by a generator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digen.config import load_config
from digen.diffusion.families.base import Images
from digen.diffusion.rewards import check, lookup
from digen.diffusion.rewards.compute import Reward
from digen.diffusion.roles import GeneratorTarget
from digen.errors import ConfigError
from digen.types import MicroBatch, Prompt

PLUGINS = Path(__file__).parent / "plugins"
PROMPTS = [Prompt("a cat")] * 3


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "sharpness_digen-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sharpness-digen\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[digen.rewards]\nsharpness = sharpness_digen:Sharpness\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.delitem(sys.modules, "sharpness_digen", raising=False)


def test_it_is_short() -> None:
    assert len((PLUGINS / "sharpness_digen.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", ["sharpness", "sharpness_digen:Sharpness"])
def test_it_is_found_and_asked(name: str) -> None:
    assert lookup(name).target == "sharpness_digen:Sharpness"
    section = load_config(None, {"reward": {"name": name, "kwargs": {"target": 2.0}}}).reward
    assert check(section, PROMPTS) == ()
    assert "sharpness_digen" not in sys.modules, "the driver does not import it"
    images: Images = np.zeros((3, 1, 6, 6), dtype=np.float32)
    images[1, 0, ::2] = 1  # stripes: the Laplacian is 2 or -2
    images[2, 0, :, :3] = 0.5
    plain, stripes, edge = Reward(section).score(images, PROMPTS, ["a", "b", "c"]).rewards
    assert (plain, stripes) == (0.0, 1.0)
    assert 0 < edge < 0.2


def test_its_own_errors_come_before_the_run() -> None:
    with pytest.raises(ConfigError, match="target of the sharpness reward must be above 0"):
        Reward(load_config(None, {"reward": {"name": "sharpness", "kwargs": {"target": 0}}}).reward)
    with pytest.raises(ConfigError, match=r"unknown reward\.name 'sharpnes'; did you mean 'sharpness'\?"):
        lookup("sharpnes")


def test_a_generator_asks_it_beside_another(
    data: Callable[..., dict[str, Any]], micro_batch: Callable[..., MicroBatch]
) -> None:
    heads = [{"name": "classifier"}, {"name": "sharpness", "weight": 0.5, "kwargs": {"target": 10.0}}]
    target = GeneratorTarget(data(reward={"heads": heads}))
    scored = target.score(target.generate(micro_batch(count=2)))
    assert list(scored.heads) == ["classifier", "sharpness"]
    assert all(0 < value < 1 for value in scored.heads["sharpness"])
