"""How fast is each mode? The digits job with real processes, all modes in one run.

    python experiments/modes.py [--steps 8] [--repeats 3] [--json PATH]     about 7 minutes on two cores

Generation and update are balanced here (4 of 8 denoising steps are trained), a group fills one micro-batch, B = 10.
Every row does the same work; ``x naive`` is the ratio of its steps per minute to naive's, medians over interleaved
repetitions, first and last step of each run dropped. ``colocated`` has no second process: its one worker uses all
cores for one stage at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import digen
from digen.config import RunConfig
from digen.events import read_events
from digen.observe.advice import LINEAR_NOTE
from digen.sched import check

BALANCED = {
    "algorithm.timestep_fraction": 0.5,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "observe.preview_every": 0,
    "checkpoint.every": 1000,
}

ROWS: dict[str, dict[str, Any]] = {
    "naive": {"schedule.mode": "naive"},
    "colocated": {"schedule.mode": "colocated"},
    "microbatch": {"schedule.mode": "microbatch", "plan.micro_batch_size": 48},
    "gap": {"schedule.mode": "gap"},
    "gap, group over 2": {"schedule.mode": "gap", "plan.micro_batch_size": 12},
    "gap, group over 4": {"schedule.mode": "gap", "plan.micro_batch_size": 6},
    "gap, 2 generators": {"schedule.mode": "gap", "workers.generators": 2},
    "tag, static(1)": {"schedule.mode": "tag", "schedule.tag": "static(1)"},
    "tag, greedy": {"schedule.mode": "tag", "schedule.tag": "greedy", "workers.offload": True},
    "tag, threshold": {"schedule.mode": "tag", "schedule.tag": "threshold"},
    "tcss": {"schedule.mode": "tcss", "schedule.tag": "threshold"},
}


@dataclass
class Measured:
    """What the repetitions of one row came to."""

    steps_per_minute: list[float] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    measured: dict[str, Measured] = defaultdict(Measured)
    with tempfile.TemporaryDirectory() as output:
        for repeat in range(options.repeats):
            for number, row in enumerate(options.only):
                report = digen.run(configure(row, options.steps, output, f"r{repeat}-{number}"), progress=False)
                check(read_events(report.folder / "events.jsonl"))
                measured[row].steps_per_minute.append(report.values["steps_per_minute"])
                measured[row].reports.append(report.values)
                print(f"{row:20} {report.values['steps_per_minute']:6.1f} steps/min", flush=True)

    print()
    lines = table(measured)
    print("\n".join(lines))
    print(f"\n{LINEAR_NOTE}")
    if options.json:
        result = {row: {"steps_per_minute": m.steps_per_minute, "report": m.reports[-1]} for row, m in measured.items()}
        options.json.write_text(json.dumps(result, indent=1))


def configure(row: str, num_steps: int, output: str, name: str) -> RunConfig:
    """The config of one row."""
    overrides = BALANCED | {"run.num_steps": num_steps, "run.output": output, "run.name": name} | ROWS[row]
    return digen.load_config(Path(__file__).parent / "digits.yaml", overrides)


def table(measured: dict[str, Measured]) -> list[str]:
    """The rows, with what each claim rests on: assists, switch time, stale micro-batches, generators, groups."""
    naive = statistics.median(measured["naive"].steps_per_minute) if "naive" in measured else None
    lines = [
        f"{os.cpu_count()} cores; medians; bubbles by cause, share of each role's wall time",
        (
            f"{'mode':20}{'steps/min':>10}{'spread':>14}{'x naive':>9}{'gen idle':>10}{'trainer idle':>14}"
            f"{'assists':>9}{'switch s':>10}{'stale':>7}{'gens':>6}{'split groups':>14}"
        ),
    ]
    for row, result in measured.items():
        speed = statistics.median(result.steps_per_minute)
        report = result.reports[-1]
        counts, bubbles = report["counts"], report["bubbles"]
        lines.append(
            f"{row:20}{speed:>10.1f}{min(result.steps_per_minute):>7.1f}-{max(result.steps_per_minute):<6.1f}"
            f"{speed / naive if naive else float('nan'):>9.2f}"
            f"{share(bubbles, 'generator'):>10}{share(bubbles, 'trainer'):>14}"
            f"{counts['num_assists']:>9}{counts['switch_s']:>10.4f}{counts['num_stale_starts']:>7}"
            f"{len([w for w in report['workers'] if w['role'] == 'generator']):>6}{counts['num_groups_spanning']:>14}"
        )
        for role, bubble in bubbles.items():
            causes = ", ".join(f"{cause} {value:.0%}" for cause, value in bubble["causes"].items() if value >= 0.005)
            if causes:
                lines.append(f"{'':20}  {role}: {causes}")
    return lines


def share(bubbles: dict[str, Any], role: str) -> str:
    """A role's idle share, or a dash where a mode has no such role."""
    return f"{bubbles[role]['share']:.0%}" if role in bubbles else "-"


if __name__ == "__main__":
    main()
