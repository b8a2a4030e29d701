"""What a run leaves in its folder, in every mode, and who may go on in it."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from digen.checkpoint import verify
from digen.config import load_config
from digen.events import Evaluated, StepCommitted, TaskFinished, TaskStarted
from digen.sched import check
from tests.run.harness import Site, tensors_of

PNG = b"\x89PNG\r\n\x1a\n"


def expect(site: Site, *arguments: str, code: int = 0, **values: Any) -> str:
    """Run to the end; returns stdout."""
    command = site.start(*arguments, **values)
    assert command.wait() == code, command.stderr
    if code == 0:
        assert command.stderr == ""
    return command.stdout


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Mode tcss with the default reward, two generators, evaluations and pictures; few checkpoints are kept."""
    site = Site(tmp_path_factory.mktemp("tcss"))
    stdout = expect(
        site,
        run__name="stale",
        run__num_steps=6,
        schedule__mode="tcss",
        schedule__window=2,
        schedule__stale_fraction=0.5,
        workers__generators=2,
        reward__name="classifier",
        checkpoint__every=2,
        checkpoint__keep=2,
        evaluation__at_start=True,
        evaluation__at_end=True,
        evaluation__num_prompts=2,
        evaluation__samples_per_prompt=2,
        observe__preview_every=3,
    )
    (site.folder / "stdout").write_text(stdout, encoding="utf-8")
    yield site
    site.close()


def test_some_micro_batches_are_stale_and_their_bound_is_kept(stale: Site) -> None:
    events = stale.events("stale")
    checker = check(events)
    assert checker.steps_committed == [0, 1, 2, 3, 4, 5]
    generated = [event for event in events if isinstance(event, TaskStarted) and event.kind in {"generate", "assist"}]
    num_stale = Counter(event.step for event in generated if event.stale)
    assert sum(num_stale.values()) >= 1
    assert max(num_stale.values()) <= 3
    assert all(event.step - event.version <= 1 for event in generated)
    assert {event.worker for event in generated} >= {"gen0", "gen1"}


def test_the_folder_holds_everything_and_is_private(stale: Site) -> None:
    folder = stale.run_folder("stale")
    assert {path.name for path in folder.iterdir()} == {
        *("config.yaml", "events.jsonl", "metrics.jsonl", "trace.json", "report.json", "report.html", "reward.svg"),
        *("checkpoints", "logs", "samples", "lock"),
    }
    assert folder.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["gen0.1.log", "gen1.1.log", "trainer.1.log"]


def test_the_config_reads_back_equal(stale: Site) -> None:
    given = load_config(stale.folder / "command0" / "config.yaml")
    assert load_config(stale.run_folder("stale") / "config.yaml") == given
    assert given.schedule.mode == "tcss"


def test_the_last_checkpoints_are_kept_and_verify(stale: Site) -> None:
    folders = sorted((stale.run_folder("stale") / "checkpoints").iterdir())
    assert [path.name for path in folders] == ["step-000004", "step-000006"]
    assert [verify(path).version for path in folders] == [4, 6]


def test_metrics_have_a_line_a_step(stale: Site) -> None:
    lines = (stale.run_folder("stale") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    committed = [event for event in stale.events("stale") if isinstance(event, StepCommitted)]
    assert all(event.values.items() <= row.items() for event, row in zip(committed, rows, strict=True))


def test_the_trace_has_a_track_a_worker(stale: Site) -> None:
    trace = json.loads((stale.run_folder("stale") / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    tracks = {item["args"]["name"]: item["tid"] for item in trace if item["name"] == "thread_name"}
    assert sorted(tracks) == ["gen0", "gen1", "trainer"]
    assert len(set(tracks.values())) == 3
    used = {item["tid"] for item in trace if item["ph"] == "X" and item["cat"] == "task"}
    assert used == set(tracks.values())


def test_the_report_is_complete_and_loads_nothing(stale: Site) -> None:
    folder = stale.run_folder("stale")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert (report["outcome"], report["num_steps"]) == ("completed", 6)
    assert report["staleness"]["num_stale"] >= 1
    page = (folder / "report.html").read_text(encoding="utf-8")
    loads = re.findall(r"""(?:src|href|action|data)\s*=\s*["']([^"']*)|url\(([^)]*)\)|@import""", page)
    assert all(first.startswith(("data:", "#")) for first, second in loads if not second)
    assert not [second for _, second in loads if second and not second.strip("'\"").startswith(("data:", "#"))]
    assert "data:image/png;base64," in page


def test_pictures_are_drawn(stale: Site) -> None:
    pictures = sorted((stale.run_folder("stale") / "samples").iterdir())
    names = [path.name for path in pictures]
    steps = [f"step{step:06d}_mb{index:03d}.png" for step in (0, 3) for index in range(6)]
    assert names == ["evaluation_after.png", "evaluation_before.png", *steps]
    assert all(path.read_bytes().startswith(PNG) for path in pictures)


def test_evaluations_are_recorded_and_count_as_no_training(stale: Site) -> None:
    evaluated = [event for event in stale.events("stale") if isinstance(event, Evaluated)]
    assert [(event.version, event.num_samples) for event in evaluated] == [(0, 4), (6, 4)]
    assert all({"reward/mean", "class_accuracy"} <= event.metrics.keys() for event in evaluated)
    assert sum(len(event.metrics) for event in evaluated) == 2 * len(evaluated[0].metrics)


def test_what_the_terminal_says(stale: Site) -> None:
    lines = (stale.folder / "stdout").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "starting 3 workers, logs in ../runs/stale/logs"
    assert lines[1].startswith("eval  v0  4 samples  ")
    assert lines[2] == "start 6 steps of 6 micro-batches, TAG horizon, window 2 (at most 3 stale), sync pull"
    assert [line[:9] for line in lines if line.startswith("step ")] == [f"step  {number}/6" for number in range(1, 7)]
    assert any(line.startswith("stale: completed, 6 of 6 steps in ") for line in lines)
    assert lines[-1] == "report: ../runs/stale/report.html"
    assert max(map(len, lines)) <= 120


def test_report_rewrites_what_a_crash_prevented(stale: Site) -> None:
    folder = stale.run_folder("stale")
    for name in ("report.json", "report.html", "trace.json"):
        (folder / name).unlink()
    command = stale.call("report", "../runs/stale")
    assert command.process.returncode == 0, command.stderr
    assert "stale: completed, 6 of 6 steps in " in command.stdout
    test_the_trace_has_a_track_a_worker(stale)
    test_the_report_is_complete_and_loads_nothing(stale)


def test_a_second_run_in_the_folder_is_refused(stale: Site) -> None:
    folder = stale.run_folder("stale")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    command = stale.start(run__name="stale")
    assert command.wait() == 2
    assert command.stderr == (
        "digen: the run folder ../runs/stale exists; continue it with --resume latest, choose another run.name, "
        "or delete it\n"
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_two_processes_in_one_folder_are_refused(stale: Site) -> None:
    with (stale.run_folder("stale") / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = stale.start("--resume", "latest", run__name="stale", run__num_steps=8)
        assert command.wait() == 2
    assert command.stderr == (
        "digen: another process is running in ../runs/stale; wait for it or choose another name\n"
    )


@pytest.mark.parametrize(
    ("arguments", "values", "words"),
    [
        (["latest"], {"run__num_steps": 6}, ["has 6 steps", "run.num_steps=6", "raise it"]),
        (["latest"], {"run__seed": 2}, ["another plan", "config.yaml"]),
        (["latest"], {"plan__prompts_per_step": 2}, ["another plan"]),
        (["../runs/stale/checkpoints"], {}, ["not a complete checkpoint"]),
        (["../runs/stale/checkpoints/step-000003"], {}, ["step-000003", "no such folder"]),
    ],
)
def test_what_cannot_be_resumed_is_one_line(
    stale: Site, arguments: list[str], values: dict[str, Any], words: list[str]
) -> None:
    command = stale.start("--resume", *arguments, **{"run__name": "stale", "run__num_steps": 8, **values})
    assert command.wait() == 2
    assert command.stderr.count("\n") == 1, command.stderr
    assert all(word in command.stderr for word in words), command.stderr
    assert len(list((stale.run_folder("stale") / "logs").iterdir())) == 3, "no worker was started"


def test_gap_keeps_the_rules(undisturbed: Site) -> None:
    """The other modes with generators are in ``test_schedules.py``."""
    assert check(undisturbed.events()).steps_committed == [0, 1, 2, 3]


def test_colocated_keeps_the_rules_and_the_weights(site: Site, undisturbed: Site) -> None:
    expect(site, schedule__mode="colocated", workers__colocated_threads=1)
    events = site.events()
    assert check(events).steps_committed == [0, 1, 2, 3]
    assert {event.worker for event in events if isinstance(event, TaskFinished)} == {"trainer"}
    assert site.tensors() == undisturbed.tensors()


def test_a_broken_latest_is_passed_over_with_a_warning(site: Site, undisturbed: Site) -> None:
    """A bit flips in the newest checkpoint of a run of four steps; it goes on from the one before, to five."""
    shutil.copytree(undisturbed.run_folder(), site.run_folder())
    weights = site.checkpoint(4) / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    broken = site.start("--resume", f"../runs/digits/checkpoints/{site.checkpoint(4).name}", run__num_steps=5)
    assert broken.wait() == 2
    assert "step-000004 is corrupt: weights.safetensors differs" in broken.stderr
    assert broken.stderr.count("\n") == 1
    alone: dict[str, Any] = {"schedule__mode": "colocated", "workers__colocated_threads": 1}
    command = site.start("--resume", "latest", run__num_steps=5, **alone)
    assert command.wait() == 0, command.stderr
    assert "passing over a broken checkpoint" in command.stderr
    assert "step-000004 is corrupt" in command.stderr
    assert command.stdout.splitlines()[1].startswith("start resume at step 3, 5 steps")
    assert tensors_of(site.checkpoint(4)) == undisturbed.tensors(4), "step 3 was trained again, with the same result"
    checker = check(site.events())
    assert checker.steps_committed == [0, 1, 2, 3, 3, 4]
    assert (site.run_folder() / "logs" / "trainer.2.log").exists()
