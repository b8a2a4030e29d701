"""What checkpoints cost a run: written while the trainer goes on, against written at once.

    python experiments/saving.py [--steps 30] [--every 1 10]     about 3 minutes on an idle machine

The digits job runs with both, and is to come to the same weights, bit for bit. A stall is the time for which the
trainer does nothing else; the share is that of the run, from its first task to its last commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import digen
from digen import runner
from digen.checkpoint import Checkpoints, completed
from digen.events import StepCommitted, TaskFinished, TaskStarted, read_events

LIMIT = 0.05
"""Largest share of a run for which its trainer may stand still, saving every 10 steps."""


class AtOnce(Checkpoints):
    """Has the trainer write before it goes on."""

    async def save(self, trainer: Any, version: int) -> Any:
        """As :meth:`Checkpoints.save`, of a handle that cannot write later."""
        return await super().save(_Waits(trainer), version)


class _Waits:
    def __init__(self, trainer: Any) -> None:
        self.save = trainer.save


def train(every: int, num_steps: int, kind: type[Checkpoints], output: str) -> tuple[float, float, dict[str, str]]:
    """Median stall in seconds, share of the run, and SHA-256 of the last checkpoint's files."""
    overrides = {
        "run.output": output,
        "run.name": f"{kind.__name__}{every}",
        "run.num_steps": num_steps,
        "checkpoint.every": every,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "observe.preview_every": 0,
    }
    vars(runner)["Checkpoints"] = kind
    folder = digen.run(digen.load_config(Path(__file__).parent / "digits.yaml", overrides), progress=False).folder
    events = list(read_events(folder / "events.jsonl"))
    begin = next(event.time for event in events if isinstance(event, TaskStarted))
    end = max(event.time for event in events if isinstance(event, StepCommitted))
    stalls = [
        event.time - event.started for event in events if isinstance(event, TaskFinished) if event.kind == "checkpoint"
    ]
    manifest = json.loads((completed(folder / "checkpoints")[-1] / "manifest.json").read_text())
    return statistics.median(stalls), sum(stalls) / (end - begin), manifest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, nargs="*", default=[1, 10])
    options = parser.parse_args()
    print(f"{'saves':<28}{'median stall, ms':>18}{'share of the run':>18}")
    weights, share = [], 0.0
    with tempfile.TemporaryDirectory() as output:
        for every in options.every:
            for kind, words in ((AtOnce, "at once"), (Checkpoints, "while it goes on")):
                stall, share, manifest = train(every, options.steps, kind, output)
                weights.append(manifest)
                print(f"{f'every {every} steps, {words}':<28}{1e3 * stall:>18.1f}{share:>18.2%}", flush=True)
    same = all(manifest == weights[0] for manifest in weights)
    print(f"the same checkpoint, bit for bit: {'met' if same else 'MISSED'}")
    print(f"every {options.every[-1]} steps the trainer stands still for less than {LIMIT:.0%}: ", end="")
    print("met" if share < LIMIT else "MISSED")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
