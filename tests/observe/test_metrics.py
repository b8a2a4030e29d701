"""``metrics.jsonl``: one whole object per committed step, also after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from digen.errors import ConfigError, OutputError
from digen.events import AnyEvent, RolledBack, RunStarted, StepCommitted
from digen.observe.metrics import MetricsLog

FakeRuns = Callable[..., list[AnyEvent]]


def test_one_line_per_step_readable_at_once(fake_run: FakeRuns, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    commits = []
    with MetricsLog(path) as log:
        for event in fake_run(4, 2):
            log(event)
            if isinstance(event, StepCommitted):
                commits.append(event)
                assert len(path.read_text().splitlines()) == len(commits)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {"step": event.step, "version": event.version, "time": event.time, **event.values} for event in commits
    ]


def test_a_resumed_run_appends_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0}\n{"step":1,"rew')
    with MetricsLog(path) as log:
        log(StepCommitted(1.0, 1, 2, {"reward/mean": float("nan")}))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0},
        {"reward/mean": None, "step": 1, "time": 1.0, "version": 2},
    ]


def test_a_run_that_goes_back_takes_its_later_steps_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step":{step}}}\n' for step in range(6)))
    with MetricsLog(path) as log:
        log(
            RunStarted(
                0.0, num_steps=8, start_step=4, num_micro_batches=2, window=1, stale_limit=0, sync="pull",
                update_order="index", tag="never", barrier=False,
            )
        )  # fmt: skip
        log(StepCommitted(1.0, 4, 5, {}))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("line", [b"xx", b"{}", b"[1]", b'{"step":null}', b"\xff\xfe", b"", b"[" * 9999])
def test_a_damaged_line_is_named_before_anything_is_written(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":0}\n' + line + b'\n{"step":2}\n')
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl line 2: [^\n]*; delete the line$"):
        MetricsLog(path)
    assert path.read_bytes() == before


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is a folder, a pipe or a socket"):  # and does not block
        MetricsLog(path)


def test_a_file_that_is_gone_when_the_run_goes_back_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        path.unlink()
        with pytest.raises(OutputError, match=r"metrics\.jsonl cannot be written: No such file"):
            log(RolledBack(1.0, 0, 0, 0))
