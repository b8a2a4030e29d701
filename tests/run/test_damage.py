"""A run's folder that is damaged, or goes while the run goes on: one line, and nothing of another run is touched.

Workers are left out: only what becomes of the folder is looked at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import digen
from digen import ConfigError, Plan, StepFailed, StepReport
from digen.cli import main
from digen.errors import OutputError
from digen.events import AnyEvent, CheckpointSaved, Quarantined, RunFinished, RunStarted, Sink, StepCommitted, fan_out
from digen.quarantine import Quarantine
from digen.runner import how_to_continue
from tests.run.harness import Site

BEGUN = RunStarted(0.0, 5, 4, 1, 1, 0, "pull", "index", "never", barrier=False)
FINISHED = RunFinished(9.0, "completed")
Train = Callable[[Sink], None]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[[Train], None]:
    """Put a function that is given the sinks in the place of the training."""

    def replace(function: Train) -> None:
        async def stand_in(*arguments: Any, signals: bool) -> tuple[tuple[StepReport, ...], str]:
            function(fan_out(arguments[-1]))
            return (), "completed"

        monkeypatch.setattr("digen.runner._train", stand_in)

    return replace


@pytest.fixture
def old(site: Site, undisturbed: Site) -> Path:
    """The folder of a finished run of four steps."""
    shutil.copytree(undisturbed.run_folder(), site.run_folder())
    return site.run_folder()


def append(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(content)

    return damage


def special(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def without_workers(folder: Path) -> None:
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"worker_joined"' not in line]
    assert len(kept) < len(lines)
    (folder / "events.jsonl").write_bytes(b"".join(kept))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (append("metrics.jsonl", b"xx\n"), r"metrics\.jsonl line 5: .*; delete the line"),
        (append("events.jsonl", b"xx\n"), r"events\.jsonl line \d+: .*; delete the line"),
        (append("events.jsonl", b"\xff\xfe\n"), r"events\.jsonl line \d+: .*; delete the line"),
        (append("events.jsonl", b'{"event":"\\u001b[31m"}\n'), r"events\.jsonl line \d+: [ -~]*; delete the line"),
        (append("events.jsonl", b"[" * 9999 + b"\n"), r"events\.jsonl line \d+: .*; delete the line"),
        (without_workers, r"events\.jsonl: .*; move it away, no checkpoint needs it"),
        (special("events.jsonl", os.mkfifo), r"events\.jsonl is a folder, a pipe or a socket, .*; move it away"),
        (special("metrics.jsonl", Path.mkdir), r"metrics\.jsonl is a folder, a pipe or a socket, .*; move it away"),
        (special("quarantine.jsonl", Path.mkdir), r"quarantine\.jsonl is a folder, a pipe .*; move it away"),
    ],
)
def test_damage_is_one_line_before_anything_is_trained(
    site: Site, old: Path, train: Callable[[Train], None], damage: Callable[[Path], None], said: str
) -> None:
    train(lambda emit: pytest.fail("it was trained"))
    damage(old)
    with pytest.raises(ConfigError, match=rf"^[^\n]*{said}$"):
        digen.run(site.config(run__num_steps=5), resume="latest", progress=False)


def test_a_config_that_is_no_text_is_kept_aside(site: Site, old: Path, train: Callable[[Train], None]) -> None:
    train(lambda emit: emit(FINISHED))
    (old / "config.yaml").write_bytes(b"\xff\xfe")
    digen.run(site.config(run__num_steps=5), resume="latest", progress=False)
    assert (old / "config.1.yaml").read_bytes() == b"\xff\xfe"
    assert digen.load_config(old / "config.yaml").run.num_steps == 5


def test_a_record_that_is_damaged_meanwhile_is_one_line_at_the_end(
    site: Site, old: Path, train: Callable[[Train], None]
) -> None:
    def training(emit: Sink) -> None:
        append("events.jsonl", b"xx\n")(old)
        emit(FINISHED)

    train(training)
    with pytest.raises(OutputError, match=r"report\.html cannot be written: [^\n]*events\.jsonl line \d+: [^\n]*$"):
        digen.run(site.config(run__num_steps=5), resume="latest", progress=False)


def claim_anew(folder: Path) -> None:
    """As another run does that finds no folder there."""
    shutil.rmtree(folder)
    folder.mkdir()
    for name in ("lock", "events.jsonl"):
        (folder / name).write_text("another's")


MISSING: list[Callable[[Path], Any]] = [
    shutil.rmtree,
    claim_anew,
    lambda folder: folder.rename(folder.with_name("moved")),
    lambda folder: (folder / "lock").unlink(),
]


@pytest.mark.parametrize("take", MISSING, ids=["removed", "claimed", "moved", "unlocked"])
@pytest.mark.parametrize("after", [StepCommitted(3.0, 1, 2, {}), CheckpointSaved(3.0, 2, "a/step-000002"), FINISHED])
def test_a_run_whose_folder_goes_ends_and_writes_no_more(
    site: Site, train: Callable[[Train], None], take: Callable[[Path], Any], after: AnyEvent
) -> None:
    folder = site.run_folder()
    found: list[Path] = []

    def training(emit: Sink) -> None:
        emit(BEGUN)
        emit(StepCommitted(1.0, 0, 1, {}))
        emit(CheckpointSaved(2.0, 1, "a/step-000001"))
        take(folder)
        found.extend(folder.rglob("*"))
        emit(after)

    train(training)
    with pytest.raises(
        OutputError,
        match=r"digits was removed, moved or replaced while it ran, .*; the checkpoint step-000001, its last one, went",
    ):
        digen.run(site.config(), progress=False)
    assert list(folder.rglob("*")) == found
    if (folder / "events.jsonl").exists() and take is claim_anew:
        assert (folder / "events.jsonl").read_text() == "another's"


def test_where_nothing_is_left_it_says_so(
    site: Site, train: Callable[[Train], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def training(emit: Sink) -> None:
        emit(BEGUN)
        shutil.rmtree(site.run_folder())

    train(training)
    assert main(["train", "--run.output", str(site.folder / "runs"), "--no-progress"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("so that nothing more is written there")
    assert second == how_to_continue(site.run_folder())
    assert second.endswith("any more; the same command without --resume starts again")


def test_a_quarantine_outlives_a_start_without_a_checkpoint(
    site: Site, train: Callable[[Train], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(["a"], num_steps=1, prompts_per_step=1, samples_per_prompt=1)
    given_up = Quarantined(1.0, "score", 0, 0, 3, "died", plan.step(0)[0], ())

    def training(emit: Sink) -> None:
        emit(BEGUN)
        emit(given_up)
        raise StepFailed("step 0 failed")

    train(training)
    arguments = ["train", "--run.output", str(site.folder / "runs"), "--no-progress"]
    assert main(arguments) == 1
    folder = site.run_folder()
    assert f"delete all in {folder} but quarantine.jsonl to start again" in capsys.readouterr().err
    for path in folder.iterdir():
        if path.name != "quarantine.jsonl":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    train(lambda emit: emit(FINISHED))
    assert main(arguments) == 0
    assert "max_dropped_groups is 0, so that what is in quarantine is tried again" in capsys.readouterr().err
    assert Quarantine(folder / "quarantine.jsonl").found == (given_up,)
