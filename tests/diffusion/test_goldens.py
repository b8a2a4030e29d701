"""Runs of earlier releases: this one reads their config, record and checkpoint, or names the field that it refuses.

``tests/goldens/make.py`` says how they were made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import digen
from digen.checkpoint import SCHEMA, verify
from digen.config import RunConfig, load_config
from digen.errors import CheckpointError
from digen.events import RunFinished, StepCommitted, read_events
from digen.observe.report import write_report
from digen.observe.trace import write_trace
from digen.runner import checkpoints_of, prepare
from digen.sched import check
from tests.diffusion.sharded import Bench

ROOT = Path(__file__).parents[1] / "goldens"
GOLDENS = sorted(path.name for path in ROOT.iterdir() if (path / "config.yaml").is_file())


@pytest.fixture(params=GOLDENS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one."""
    return Path(shutil.copytree(ROOT / request.param, tmp_path / "golden"))


def config_of(golden: Path) -> RunConfig:
    return load_config(golden / "config.yaml", {"run.output": str(golden.parent)})


def checkpoint_of(golden: Path) -> Path:
    return golden / "checkpoints" / "step-000002"


def test_this_release_has_one() -> None:
    assert digen.__version__ in GOLDENS, "python tests/goldens/make.py"
    size = sum(file.stat().st_size for file in (ROOT / digen.__version__).rglob("*"))
    assert size < 200_000


def test_a_run_of_an_earlier_release_can_be_resumed(golden: Path) -> None:
    """Its config is valid, its plan the same, and its checkpoint fits both."""
    path, state = checkpoints_of(prepare(config_of(golden))).find("latest")
    assert path == checkpoint_of(golden)
    assert (state.schema, state.version, state.first_undone_step, state.family) == (SCHEMA, 2, 2, "digits")
    assert state.settings["algorithm.name"] == "flow_grpo"
    assert state.reward == pytest.approx(-0.69, abs=0.02)


def test_its_checkpoint_is_restored_bit_for_bit(golden: Path, tmp_path: Path) -> None:
    """The weights, the optimizer's state and the moving average, of which training goes on."""
    config, path = config_of(golden), checkpoint_of(golden)
    assert config.model.lora is not None
    overrides = {"model.lora": config.model.lora.model_dump(mode="json"), "optimizer.ema_decay": 0.9}
    job = {"overrides": overrides, "restore": str(path)}
    Bench().train({**job, "arrays": str(tmp_path / "arrays")})
    arrays = load_file(tmp_path / "arrays")
    wanted = load_file(path / "weights.safetensors")
    wanted |= {f"ema.safetensors/{name}": value for name, value in load_file(path / "ema.safetensors").items()}
    for key, value in load_file(path / "optimizer.safetensors").items():
        name, _, slot = key.rpartition("/")
        wanted[f"{name}.{slot}"] = value
    assert arrays.keys() == wanted.keys()
    assert len(wanted) > 20
    assert all(arrays[name].tobytes() == wanted[name].tobytes() for name in wanted)
    *_, report = Bench().train({**job, "advantages": [((1.0, -1.0),)]})["reports"]
    assert report["version"] == 3


def test_its_record_is_read_checked_and_reported(golden: Path) -> None:
    events = list(read_events(golden / "events.jsonl"))
    checker = check(events)
    assert checker.steps_committed == [0, 1]
    assert checker.num_started == checker.num_finished
    assert isinstance(events[-1], RunFinished)
    values = write_report(golden)
    assert values["outcome"] == "completed"
    assert values["counts"]["num_commits"] == 2
    write_trace(events, golden / "trace.json")
    assert json.loads((golden / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    lines = [json.loads(line) for line in (golden / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    commits = [event for event in events if isinstance(event, StepCommitted)]
    assert [(line["step"], line["version"], line["reward/mean"]) for line in lines] == [
        (event.step, event.version, event.values["reward/mean"]) for event in commits
    ]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("schema", SCHEMA + 1, f"has schema {SCHEMA + 1}; this release reads {SCHEMA}"),
        ("schema", "1", r"run\.json is not valid: .*`\$\.schema`"),
        ("version", None, r"run\.json is not valid: .*`\$\.version`"),
    ],
)
def test_what_another_release_wrote_otherwise_is_refused_by_field(
    golden: Path, field: str, value: object, words: str
) -> None:
    path = checkpoint_of(golden)
    state = json.loads((path / "run.json").read_text(encoding="utf-8")) | {field: value}
    (path / "run.json").write_text(json.dumps(state), encoding="utf-8")
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    manifest["run.json"] = hashlib.sha256((path / "run.json").read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        verify(path)
