"""A run whose reward is a judge that the run itself starts: the scoring worker asks it, and it ends with the run."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from digen.events import Rewarded
from tests.run.harness import Site

FAKE = Path(__file__).parents[1] / "diffusion" / "fake_vllm.py"


def test_a_judge_is_started_asked_and_missed(site: Site) -> None:
    model, python, record = (site.folder / name for name in ("model", "python", "record"))
    model.mkdir()
    (model / "config.json").touch()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -u {FAKE} "$@"\n')
    python.chmod(0o755)
    judge = {"model": str(model), "python": str(python), "env": {"FAKE_RECORD": str(record)}}
    command = site.start(
        reward__name="judge",
        reward__kwargs={"server": "judge", "retries": 1, "backoff_s": 0.01},
        workers__judges={"judge": judge},
        workers__colocated_threads=1,
        run__num_steps=500,
        checkpoint__every=500,
        schedule__mode="colocated",
    )
    command.wait_for_line("step ")
    lines = record.read_text(encoding="utf-8").splitlines()
    child = psutil.Process(int(next(line for line in lines if line.startswith("started")).split()[1]))
    child.parent().kill()
    assert command.wait(60) == 1
    rewards = [reward for event in site.events() if isinstance(event, Rewarded) for reward in event.rewards]
    assert set(rewards) == {0.7}
    said = command.stderr.splitlines()
    assert "ConnectionRefusedError" in said[0]
    assert any("'server of judge0' died (killed by SIGKILL)" in line for line in said), said
    assert "starting 2 workers" in command.stdout
    assert 'POST /v1/chat/completions HTTP/1.1" 200' in (site.run_folder() / "logs" / "judge0.server.log").read_text(
        encoding="utf-8"
    )
    assert psutil.wait_procs([child], timeout=5)[1] == [] or child.status() == psutil.STATUS_ZOMBIE
