"""The file of what was given up: written at once, read back, said in one line what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from digen import ConfigError, MicroBatch, Plan
from digen.errors import OutputError
from digen.events import Quarantined, RunFinished, read_events
from digen.quarantine import Quarantine


def given_up(step: int, index: int = 0) -> Quarantined:
    plan = Plan(["a\x1b[2J<b>"], num_steps=9, prompts_per_step=2, samples_per_prompt=3)
    return Quarantined(1.0, "score", step, index, 3, "died", plan.step(step)[index], ("it was scored", "it died"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quarantine.jsonl"


def test_what_is_given_up_is_on_disk_at_once_and_known_to_the_next_run(path: Path) -> None:
    quarantine = Quarantine(path)
    quarantine(RunFinished(0.0, "completed"))
    assert not path.exists()
    quarantine(given_up(1))
    assert list(read_events(path)) == [given_up(1)]
    quarantine(given_up(1))
    quarantine(given_up(1, 1))
    assert quarantine.found == ()
    again = Quarantine(path)
    assert again.found == (given_up(1), given_up(1, 1))
    again(given_up(1))
    again(given_up(2))
    assert Quarantine(path).found == (given_up(1), given_up(1, 1), given_up(2))
    assert all(line.isprintable() for line in path.read_text(encoding="utf-8").splitlines())


def test_what_is_left_out_with_another_has_no_line_of_its_own(path: Path) -> None:
    """So that the line of the other one is all there is to delete."""
    quarantine = Quarantine(path)
    quarantine(given_up(1))
    quarantine(replace(given_up(1, 1), attempts=0))
    assert Quarantine(path).found == (given_up(1),)


def test_a_line_holds_what_it_takes_to_repeat_it(path: Path) -> None:
    Quarantine(path)(given_up(1))
    (event,) = Quarantine(path).found
    micro_batch: MicroBatch = event.micro_batch
    assert [piece.prompt.text for piece in micro_batch.slices] == ["a\x1b[2J<b>"]
    assert micro_batch.seeds("initial-noise") == given_up(1).micro_batch.seeds("initial-noise")
    assert (event.error, event.story) == ("died", ("it was scored", "it died"))


def test_a_line_that_a_crash_cut_short_is_removed(path: Path) -> None:
    Quarantine(path)(given_up(1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    quarantine = Quarantine(path)
    assert quarantine.found == (given_up(1),)
    quarantine(given_up(2))
    assert Quarantine(path).found == (given_up(1), given_up(2))


@pytest.mark.parametrize(
    "line", ["{}", "[", '{"event":"run_finished","time":0,"outcome":"failed"}', "\xff", "[" * 9999]
)
def test_a_line_that_is_something_else_is_named(path: Path, line: str) -> None:
    Quarantine(path)(given_up(1))
    with path.open("a", encoding="latin-1") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=r"quarantine\.jsonl line 2: .*; delete the line"):
        Quarantine(path)


def test_an_event_that_holds_another_micro_batch_is_named(path: Path) -> None:
    for wrong in (replace(given_up(1), index=1), replace(given_up(1), step=2)):
        path.unlink(missing_ok=True)
        Quarantine(path)(wrong)
        with pytest.raises(
            ConfigError, match=r"line 1: it names .* but holds micro-batch 0 of step 1; delete the line$"
        ):
            Quarantine(path)


def test_what_is_no_file_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ConfigError, match=r"quarantine\.jsonl is a folder, a pipe or a socket.*; move it away$"):
        Quarantine(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"move it away$"):  # and does not block
        Quarantine(path)


def test_a_full_disk_is_loud(path: Path) -> None:
    path.symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"quarantine\.jsonl cannot be written: No space left on device"):
        Quarantine(path)(given_up(1))
