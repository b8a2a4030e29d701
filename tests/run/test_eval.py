"""``digen eval``, ``digen export``, and evaluations while a run goes on.

That these change no bit of what is trained is shown wherever a run is compared with ``undisturbed``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from digen import offline
from digen.checkpoint import verify
from digen.cli import main
from digen.config import ModelSection, RunConfig, load_config
from digen.diffusion import families
from digen.errors import DigenError
from digen.events import Evaluated, TaskFinished
from digen.sched import check
from tests.run.harness import PLUGINS, Site


@pytest.fixture
def config(undisturbed: Site, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """That of the run, for this process."""
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    return load_config(undisturbed.run_folder() / "config.yaml", {"run.output": str(undisturbed.folder / "runs")})


def evaluated(site: Site) -> list[Evaluated]:
    return [event for event in site.events() if isinstance(event, Evaluated)]


def test_every_version_is_evaluated_once_by_a_generator(undisturbed: Site) -> None:
    assert [(event.version, event.num_samples) for event in evaluated(undisturbed)] == [(n, 6) for n in range(1, 5)]
    assert check(undisturbed.events()).steps_committed == [0, 1, 2, 3]
    tasks = [event for event in undisturbed.events() if isinstance(event, TaskFinished) and event.kind == "evaluate"]
    assert {event.worker for event in tasks} == {"gen0"}
    pictures = sorted(path.name for path in (undisturbed.run_folder() / "samples").iterdir())
    assert pictures == [f"evaluation_v{version:06d}.png" for version in range(1, 5)]
    report = json.loads((undisturbed.run_folder() / "report.json").read_text(encoding="utf-8"))
    assert [item["version"] for item in report["evaluations"]["all"]] == [1, 2, 3, 4]


def test_a_checkpoint_evaluates_as_its_version_did_in_the_run(
    undisturbed: Site, config: RunConfig, tmp_path: Path
) -> None:
    before = sorted(undisturbed.run_folder().rglob("*"))
    report, folder = offline.evaluate(config, checkpoint=undisturbed.checkpoint(2), out=tmp_path / "out")
    (in_run,) = [event for event in evaluated(undisturbed) if event.version == 2]
    assert (report.version, report.metrics) == (2, in_run.metrics)
    with (
        Image.open(folder / "samples.png") as one,
        Image.open(undisturbed.run_folder() / "samples" / "evaluation_v000002.png") as other,
    ):
        assert list(one.get_flattened_data()) == list(other.get_flattened_data())
    assert sorted(undisturbed.run_folder().rglob("*")) == before
    said = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert (said["version"], said["weights"], said["metrics"]) == (2, "raw", in_run.metrics)
    assert said["checkpoint"]["path"] == str(undisturbed.checkpoint(2))
    assert load_config(folder / "config.yaml") == config
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "evaluation.json", "samples.png", "logs"}
    assert folder.stat().st_mode & 0o077 == 0


def test_the_command_line_evaluates_the_average_and_says_where(undisturbed: Site) -> None:
    arguments = ["../runs/digits/config.yaml", "--checkpoint", "latest", "--weights", "ema"]
    command = undisturbed.call("eval", *arguments)
    assert command.process.returncode == 0, command.stderr
    first, *_, last = command.stdout.splitlines()
    assert first.startswith("eval  v4  6 samples  reward/mean 0.")
    assert last == "samples and report: ../runs/digits-eval/step-000004-ema"
    said = json.loads(
        (undisturbed.folder / "runs/digits-eval/step-000004-ema/evaluation.json").read_text(encoding="utf-8")
    )
    raw = next(event for event in evaluated(undisturbed) if event.version == 4)
    assert (said["version"], said["weights"]) == (4, "ema")
    assert said["metrics"]["reward/mean"] != raw.metrics["reward/mean"]
    assert said["metrics"]["reward/mean"] == pytest.approx(raw.metrics["reward/mean"], abs=0.05)


def test_a_failed_evaluation_leaves_its_log_and_may_be_repeated(config: RunConfig, tmp_path: Path) -> None:
    broken = config.model_copy(update={"reward": config.reward.model_copy(update={"name": "run_rewards:boom"})})
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "of the last attempt").touch()
    with pytest.raises(DigenError, match="no reward for 2 images") as failure:
        offline.evaluate(broken, out=tmp_path / "out")
    logs = tmp_path / ".out.tmp" / "logs"
    assert f"the worker's log is in {logs}" in failure.value.__notes__
    assert "no reward for 2 images" in (logs / "gen0.1.log").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["gen0.1.log"]


def test_an_export_is_a_model_that_says_where_it_comes_from(undisturbed: Site, tmp_path: Path) -> None:
    folder = offline.export(undisturbed.checkpoint(3), tmp_path / "out")
    held = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    trained = load_file(undisturbed.checkpoint(3) / "weights.safetensors")
    assert all(np.array_equal(held[name], tensor) for name, tensor in trained.items())
    assert families.source(ModelSection(path=folder)) == folder
    said = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    (in_run,) = [event for event in evaluated(undisturbed) if event.version == 3]
    assert (said["version"], said["weights"], said["base_model"]) == (3, "raw", "embedded in digen: digits")
    assert said["evaluated_in_run"] == [{"num_samples": 6, "metrics": in_run.metrics}]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps == [0, 1, 2]
    assert (folder / "config.yaml").read_bytes() == (undisturbed.run_folder() / "config.yaml").read_bytes()
    beside = {"config.yaml", "metrics.jsonl", "provenance.json"}
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files - beside == set(said["sha256"])
    assert beside < files
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---- what is refused, before any work --------------------------------------------------------------------------


@pytest.fixture
def half(undisturbed: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run ``runs/digits`` of two checkpoints, of which the newer has no moving average."""
    monkeypatch.chdir(tmp_path)
    for version in (3, 4):
        shutil.copytree(undisturbed.checkpoint(version), Path("runs/digits/checkpoints") / f"step-{version:06d}")
    shutil.copy(undisturbed.run_folder() / "config.yaml", "runs/digits")
    newest = Path("runs/digits/checkpoints/step-000004")
    manifest = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))
    del manifest["ema.safetensors"]
    (newest / "ema.safetensors").unlink()
    (newest / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert verify(newest).version == 4
    Path("exists").mkdir()
    Path("file").touch()
    return tmp_path


EVAL = ["eval", "--reward.name", "run_rewards:brightness"]
EXPORT = ["export", "runs/digits", "--out", "new"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*EVAL, "--checkpoint", "runs/digits/checkpoints/step-000009"], ["step-000009", "there is no such folder"]),
        ([*EVAL, "--checkpoint", "latest", "--run.name", "none"], ["no checkpoint in runs/none", "run.name"]),
        ([*EVAL, "--checkpoint", "latest", "--weights", "ema"], ["step-000004 has no ema weights", "--weights raw"]),
        ([*EVAL, "--weights", "ema"], ["--weights ema needs a --checkpoint"]),
        ([*EVAL, "--weights", "best"], ["invalid choice: 'best'", "raw", "ema"]),
        ([*EVAL, "--out", "exists"], ["the folder exists exists", "--out"]),
        ([*EVAL, "--out", "file/new"], ["the folder file/new cannot be made", "--out"]),
        ([*EVAL, "--evaluation.video", "mp4"], ["av", "digen-rl[video]"]),
        ([*EVAL, "--evaluation.evry", "1"], ["did you mean 'every'?"]),
        ([*EVAL, "--evaluation.every", "-1"], ["evaluation.every", "greater than or equal to 0"]),
        ([*EVAL, "--prompts.source", "none.txt"], ["none.txt", "does not exist"]),
        (["eval", "none.yaml"], ["none.yaml", "does not exist"]),
        (["export", "runs", "--out", "new"], ["runs is neither a run's folder nor a checkpoint"]),
        (["export", "nowhere", "--out", "new"], ["nowhere is neither a run's folder nor a checkpoint"]),
        (["export", "runs/digits/checkpoints/step-000009", "--out", "new"], ["step-000009", "no such folder"]),
        (["export", "runs/digits", "--out", "exists"], ["the folder exists exists", "--out"]),
        (["export", "runs/digits"], ["required: --out", "digen export --help"]),
        ([*EXPORT, "--weights", "ema"], ["step-000004 has no ema weights", "--weights raw"]),
        ([*EXPORT, "--model.path", "moved"], ["moved", "does not exist"]),
        ([*EXPORT, "--model.family", "sd3", "--model.path", "none"], ["none", "does not exist"]),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(
    half: Path,
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "mp4" in arguments:
        monkeypatch.setattr("digen.extras.find_spec", lambda module: None if module == "av" else module)
    before = sorted(half.rglob("*"))
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("digen: ")
    assert err.count("\n") == 1, err
    assert all(word in err for word in words), err
    assert sorted(half.rglob("*")) == before


def test_a_checkpoint_of_another_family_is_refused(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = half / "runs/digits/checkpoints/step-000004"
    state = json.loads((newest / "run.json").read_text(encoding="utf-8")) | {"family": "flux"}
    (newest / "run.json").write_text(json.dumps(state), encoding="utf-8")
    manifest = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))
    manifest["run.json"] = hashlib.sha256((newest / "run.json").read_bytes()).hexdigest()
    (newest / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert main(["eval", "--reward.name", "run_rewards:brightness", "--checkpoint", str(newest)]) == 2
    assert "is of family 'flux', the config of 'digits'" in capsys.readouterr().err


def test_check_says_when_evaluations_are(capsys: pytest.CaptureFixture[str]) -> None:
    words: list[Any] = ["check", "--evaluation.every", "5", "--evaluation.at_start", "false"]
    assert main(words) == 0
    assert "# evaluation: 10 prompts x 40 samples every 5 steps, at the end" in capsys.readouterr().out
