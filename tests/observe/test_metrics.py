"""``metrics.jsonl``: one whole object per committed step, also after a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from digen.events import AnyEvent, StepCommitted
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
