"""The shipped configs: each is checked as ``digen check`` does, and made tiny; one is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from digen.config import RunConfig, load_config
from digen.errors import ConfigError
from digen.placement import worker_names
from digen.presets import SIZES, ensure_model, tiny
from digen.runner import prepare

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "experiments" / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # prompts are named relative to it


def test_every_family_has_one() -> None:
    assert {load_config(path).model.family for path in CONFIGS} == set(SIZES)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_is_valid_as_it_is(path: Path) -> None:
    config = load_config(path)
    prepared = prepare(config)
    assert config.run.name.replace("-", "_") == path.stem
    split = config.plan.samples_per_prompt // (config.plan.micro_batch_size or config.plan.samples_per_prompt)
    assert prepared.plan.num_micro_batches == split * config.plan.prompts_per_step
    names = worker_names(config)
    (gpus,) = re.findall(r"on (\d+) GPUs", path.read_text().replace("\n# ", " "))
    assert sum(map(config.workers.num_ranks, names)) == int(gpus)
    if config.workers.type == "process":
        assert sorted(gpu for name in names for gpu in config.workers.gpus[name]) == list(range(int(gpus)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_tiny_keeps_algorithm_and_schedule(path: Path, tmp_path: Path) -> None:
    config = load_config(path, {"run.output": str(tmp_path)})
    small = tiny(config)
    assert small.schedule == config.schedule
    assert small.algorithm.name == config.algorithm.name
    assert small.algorithm.options == config.algorithm.options
    assert (small.model.device, small.run.num_steps, small.num_generators) == ("cpu", 2, 1)
    assert small.model.path == tmp_path / "tiny" / config.model.family
    assert (small.model.lora is None) == (config.model.lora is None)


def test_what_is_said_on_the_command_line_wins_over_the_preset(tmp_path: Path) -> None:
    overrides = {"run.num_steps": "9", "run.output": str(tmp_path), "sampling.num_inference_steps": "12"}
    small = tiny(load_config(CONFIGS[0], overrides), overrides)
    assert (small.run.num_steps, small.sampling.num_inference_steps) == (9, 12)
    assert small.plan.prompts_per_step == 2


def test_a_family_without_a_tiny_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="family 'digits' has no tiny model; these do: flux, "):
        tiny(RunConfig())


def test_a_tiny_video_model_is_trained_by_the_shipped_config(tmp_path: Path) -> None:
    import digen

    config = tiny(load_config(ROOT / "experiments" / "configs" / "wan_flow_grpo.yaml", {"run.output": str(tmp_path)}))
    ensure_model(config)
    prepare(config)
    report = digen.run(config, progress=False)
    assert report.outcome == "completed"
    assert [step.version for step in report.steps] == [1, 2]
    assert report.values["counts"]["num_assists"] >= 1
    assert list((report.folder / "samples").glob("*.gif"))
