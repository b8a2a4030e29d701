"""What is said, and with which exit code, when a command line or a config is wrong. Nothing may have been started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from digen.cli import main
from digen.config import LoraSection, load_config
from digen.errors import ConfigError, RewardError, StepFailed


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one line on stderr; nothing is on stdout and nothing was made."""
    before = sorted(Path.cwd().rglob("*"))
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("digen: ")
    assert err.count("\n") == 1, err
    assert sorted(Path.cwd().rglob("*")) == before
    return err


def model(folder: Path, index: Any, *components: str) -> str:
    folder.mkdir()
    (folder / "model_index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    for name in components:
        (folder / name).mkdir()
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule.windw", "2"], ["schedule.windw", "did you mean 'window'?"]),
        (["--shedule.window", "2"], ["shedule", "did you mean 'schedule'?"]),
        (["--run.num_steps", "many"], ["run.num_steps", "integer", "'many'"]),
        (["--run.num_steps", "0"], ["run.num_steps", "greater than or equal to 1"]),
        (["--optimizer.lr", "nan"], ["optimizer.lr", "finite"]),
        (["--schedule.window", "0"], ["schedule.window", "greater than or equal to 1"]),
        (["--schedule.mode=tcss", "--schedule.stale_fraction=1.1"], ["schedule.stale_fraction", "less than or equal"]),
        (["--schedule.mode=tcss", "--schedule.stale_fraction=-0.1"], ["schedule.stale_fraction", "greater than"]),
        (["--schedule.mode", "fast"], ["schedule.mode", "'tcss'", "'fast'"]),
        (["--schedule.tag", "eager"], ["schedule.tag", "static(k)"]),
        (["--plan.micro_batch_size", "5", "--plan.samples_per_prompt", "24"], ["micro_batch_size=5", "4 or 6"]),
        (["--algorithm.advantage.best_of_n", "30"], ["best_of_n"]),
        (["--run.name", "../../x"], ["run.name", "'../../x'"]),
        (["--run.name", "a/b"], ["run.name", "'a/b'"]),
        (["--workers.gpus", "{gen7: [0]}"], ["workers.gpus", "gen7", "gen0, trainer"]),
        (["--model.device", "cuda"], ["model.device is cuda", "workers.gpus", "trainer, gen0"]),
        (["--model.family", "digit"], ["model.family 'digit'", "did you mean 'digits'?"]),
        (["--reward.name", "clasifier"], ["reward.name 'clasifier'", "did you mean 'classifier'?"]),
        (["--reward.name", "no_such_module:f"], ["'no_such_module'", "cannot be found", "PYTHONPATH"]),
        (["--reward.name", "run_rewards.inner:f"], ["'run_rewards.inner'", "cannot be found"]),
        (["--plan.samples_per_prompt", "1"], ["plan.samples_per_prompt is 1", "nothing is learnt"]),
        (["--reward.name", "run rewards:f"], ["not of the form package.module:attribute"]),
        (["--model.path", "no/model"], ["no/model", "does not exist", "model.path"]),
        (["--prompts.source", "no/prompts.txt"], ["no/prompts.txt", "does not exist"]),
        (["--schedule.window"], ["--schedule.window needs a value"]),
        (["--optimizer.lr", "--schedule.window", "2"], ["--optimizer.lr needs a value"]),
        (["--fast"], ["unrecognized arguments: --fast", "--help"]),
        (["one.yaml", "two.yaml"], ["unrecognized arguments: two.yaml"]),
        (["none.yaml"], ["none.yaml", "does not exist"]),
        (["--run.output", "file/runs"], ["file/runs", "is not a folder that you may write", "run.output"]),
        (["--run.name", "empty"], ["runs/empty exists", "delete it"]),
        (["--resume", "latest", "--run.name", "none"], ["no run to resume in runs/none", "run.name"]),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    Path("runs/empty").mkdir(parents=True)
    said = refused(capsys, "train", *arguments)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- run\n- model\n", ["a.yaml", "mapping", "list"]),
        ("run: {num_steps: 3\n", ["a.yaml", "not valid YAML"]),
        ("run:\n\tname: a\n", ["a.yaml", "not valid YAML", "line 2"]),
        ("run: 3\n", ["a.yaml: run:"]),
        ("run: {nam: a}\nschedule: {windw: 2}\n", ["did you mean 'name'?", "did you mean 'window'?"]),
        ("run: {name: !!python/object/apply:os.system [true]}\n", ["a.yaml", "not valid YAML"]),
        ("run: {name: [a\x00b]}\n", ["a.yaml", "not valid YAML"]),
    ],
)
def test_a_bad_file_is_one_line(text: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(text)
    said = refused(capsys, "train", "a.yaml")
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("index", "components", "words"),
    [
        (None, (), ["no model_index.json"]),
        ("{", (), ["not valid JSON"]),
        ([], (), ["must hold an object"]),
        ({"_class_name": "FluxPipeline"}, (), ["names no components"]),
        ({"transformer": ["diffusers", "X"], "vae": ["diffusers", "Y"]}, ("transformer",), ["lacks", "vae"]),
    ],
)
def test_a_folder_that_is_no_model(
    index: Any, components: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = model(Path("a_model"), {} if index is None else index, *components)
    if index is None:
        Path(path, "model_index.json").unlink()
    said = refused(capsys, "train", "--model.path", path)
    assert all(word in said for word in ["a_model", "model.path", *words]), said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["required: COMMAND", "digen --help"]),
        (["trian"], ["invalid choice: 'trian'", "train", "check", "report"]),
        (["report"], ["required: run", "digen report --help"]),
        (["report", "nowhere"], ["nowhere", "no events.jsonl"]),
        (["report", "nowhere", "--run.name", "a"], ["takes no config fields", "--run.name"]),
        (["check", "--schedule.windw", "2"], ["did you mean 'window'?"]),
    ],
)
def test_other_commands(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *arguments)
    assert all(word in said for word in words), said


def test_a_damaged_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a_run").mkdir()
    Path("a_run/events.jsonl").write_text('{"event":"unheard_of"}\n')
    assert "events.jsonl line 1" in refused(capsys, "report", "a_run")


def test_check_prints_the_config_and_what_it_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--schedule.mode", "tcss", "--plan.prompts_per_step=5", "--workers.generators", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    Path("again.yaml").write_text(out)
    assert load_config("again.yaml") == load_config(
        None, ["schedule.mode=tcss", "plan.prompts_per_step=5", "workers.generators=2"]
    )
    facts = [line for line in out.splitlines() if line.startswith("# ")]
    assert "# step: 5 prompts x 24 samples = 120 samples" in facts
    assert any("window 2, at most 2 of 5 micro-batches stale, TAG horizon" in line for line in facts)
    assert "# workers: 2 generators, 1 trainer" in facts
    assert not Path("runs").exists()


WITHOUT_TORCH = """
import sys
for name in ("torch", "sklearn"):
    sys.modules[name] = None
from digen.cli import main
code = main(sys.argv[1:])
print("loaded:", *(name for name in ("torch", "ray", "numpy", "diffusers") if sys.modules.get(name)))
sys.exit(code)
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_check_needs_no_torch_and_says_what_train_will_need() -> None:
    done = without_torch("check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "# micro-batches: B = " in done.stdout
    assert "# not here yet: torch is not installed; install it with: pip install 'digen-rl[diffusion]'" in done.stdout
    assert "# not here yet: sklearn is not installed; install it with: pip install 'digen-rl[demo]'" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert not Path("runs").exists()


def test_train_without_an_extra_is_one_line() -> None:
    done = without_torch("train")
    assert done.returncode == 2
    assert done.stderr == "digen: torch is not installed; install it with: pip install 'digen-rl[diffusion]'\n"
    assert not Path("runs").exists()


def test_help_is_quick_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in {
        ("--help",): ["train", "check", "report", "Post-train"],
        ("train", "--help"): ["--resume", "latest", "--section.field VALUE", "--fields"],
        ("check", "--help"): ["start nothing", "--section.field VALUE"],
        ("report", "--help"): ["report and trace", "a run's folder"],
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert all(word in out for word in words), out
        assert max(map(len, out.splitlines())) <= 120


def test_fields_lists_every_field_once_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--fields"]) == 0
    out = capsys.readouterr().out
    listed = [line.split()[0].removeprefix("--") for line in out.splitlines() if line.startswith("--")]

    def leaves(data: dict[str, Any], prefix: str = "") -> list[str]:
        found = []
        for name, value in data.items():
            found += leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]
            if f"{prefix}{name}" == "model.lora":  # a section that is absent by default
                found += leaves(LoraSection().model_dump(), "model.lora.")
        return found

    assert listed == leaves(load_config().model_dump())
    helps = [line for line in out.splitlines() if line.startswith("    ")]
    assert len(helps) == len(listed)
    assert all(line.strip() != "None" for line in helps)
    assert "None" not in out
    assert "--optimizer.betas  (default: [0.9, 0.999])" in out
    assert "--run.name  (default: digits)" in out


def test_values_after_an_equals_sign_and_after_a_space_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for arguments in (["--run.name=a.b", "--optimizer.lr=1e-4"], ["--run.name", "a.b", "--optimizer.lr", "1e-4"]):
        assert main(["check", *arguments]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "name: a.b" in outputs[0]


@pytest.mark.parametrize(("cause", "code"), [(ConfigError("less than a step takes"), 2), (RewardError("is nan"), 1)])
def test_a_config_that_a_step_shows_to_be_wrong_is_a_wrong_config(
    cause: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StepFailed(f"step 0 failed: {cause}") from cause

    monkeypatch.setattr("digen.runner.run", fail)
    assert main(["train"]) == code
    assert capsys.readouterr().err.startswith(f"digen: step 0 failed: {cause}\n")


SIGNALLED = """
import os
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "digen.runner":
            os.kill(os.getpid(), int(sys.argv[1]))
sys.meta_path.insert(0, Finder())
from digen.cli import main
sys.exit(main(["train", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_while_modules_are_imported_is_one_line(number: signal.Signals) -> None:
    words = [sys.executable, "-c", SIGNALLED, str(int(number)), "--resume", "latest"]  # of nothing, which is an error
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "digen: interrupted\n")
    assert not Path("runs").exists()


def test_a_preemption_notice_while_modules_are_imported_ends_nothing() -> None:
    words = [sys.executable, "-c", SIGNALLED, str(int(signal.SIGUSR1)), "--resume", "latest"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr[:38]) == (2, "digen: there is no run to resume in ru")
