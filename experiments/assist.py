"""What assists gain on the real digits job, where generation dominates, and how well that was foreseen.

    python experiments/assist.py [--steps 14] [--repeats 3] [--json PATH]     about 5 minutes on two cores

Two processes, one generator and one trainer. A sample takes 24 denoising steps of which 4 are trained, in groups of 12,
B = 6, so that an update takes a third of the time of a generation and the trainer would mostly wait. Every row adds
one thing to the row before it; ``naive`` and ``gap`` train the timesteps one after another, all others in one forward
(TSP). The rows of one repetition follow each other, so that a busy machine disturbs all of them alike. The first and
the last step of each run are dropped, the rate is that of the steps between.

``bubbles`` is the idle share of both workers' time, ``(open)`` counts the assists that came between two updates of a
step, ``switch ms`` is what one assist pays, there and back. ``foreseen`` sets the same schedule, simulated with the
mean durations of the very run (``digen.twin``), against the time that its steps took; ``by policy`` is the policy's own
prediction at its first decision in each step. On the CPU ``workers.offload`` has nowhere to move gradients and
optimizer state to, so the last row shows what its bookkeeping costs.

Runs that are on-policy and train in the same forward shape must end with the same weights bit for bit, with assists
between updates or without: that is checked too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import digen
from digen.config import RunConfig
from digen.events import AnyEvent, StepCommitted, TaskFinished, read_events
from digen.sched import check
from digen.twin import profiled_durations, simulate

GENERATION_HEAVY = {
    "plan.prompts_per_step": 6,
    "plan.samples_per_prompt": 12,
    "sampling.num_inference_steps": 24,
    "algorithm.timestep_fraction": 0.17,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "observe.preview_every": 0,
    "checkpoint.every": 1000,
}

SEQUENTIAL = {"algorithm.tsp_chunk": 1}

ROWS: dict[str, dict[str, Any]] = {
    "naive": SEQUENTIAL | {"schedule.mode": "naive"},
    "gap": SEQUENTIAL | {"schedule.mode": "gap"},
    "+tsp": {"schedule.mode": "gap"},
    "+tag(search)": {"schedule.mode": "tag", "schedule.tag": "search"},
    "+tag(horizon)": {"schedule.mode": "tag", "schedule.tag": "horizon"},
    "+tcss": {"schedule.mode": "tcss", "schedule.tag": "horizon"},
    "search, offload": {"schedule.mode": "tag", "schedule.tag": "search", "workers.offload": True},
}

SAME_WEIGHTS = (("naive", "gap"), ("+tsp", "+tag(search)", "+tag(horizon)", "search, offload"))
"""Rows that must train the same weights."""

EXPECTED_S = {"startup": 5.0, "step": 0.65}
"""Of one run on two cores, for the announcement only."""

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, without its first and last step. Times in seconds."""

    steps_per_minute: float
    foreseen: float
    """Simulated over actual time of these steps."""
    policy_error: float | None
    """Mean of \\|predicted / actual - 1\\| of the policy's own predictions."""
    bubble_share: float
    """Share of the two workers' time that was idle."""
    generate_s: float
    update_s: float
    assists_per_step: float
    open_assists_per_step: float
    """Of them, begun after the step's first update, while its gradient was accumulating."""
    stale_per_step: float
    switch_ms: float
    """Of one assist, there and back."""
    decision_ms: float
    weights: str
    """Digest of the final weights."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.steps < 4:
        parser.error("--steps must be at least 4: the first and the last step are dropped")

    run_s = EXPECTED_S["startup"] + EXPECTED_S["step"] * options.steps
    minutes = options.repeats * len(options.only) * run_s / 60
    print(
        f"{options.repeats} repetitions of {len(options.only)} runs: about {minutes:.0f} min on two cores", flush=True
    )
    measured: dict[str, list[Measured]] = defaultdict(list)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as output:
        for repeat in range(options.repeats):
            for number, row in enumerate(options.only):
                result = measure(configure(row, options.steps, output, f"r{repeat}-{number}"))
                measured[row].append(result)
                print(
                    f"{row:16}{result.steps_per_minute:7.1f} steps/min, g {1000 * result.generate_s:.0f} ms, "
                    f"t/g {result.update_s / result.generate_s:.2f}, foreseen x{result.foreseen:.3f}",
                    flush=True,
                )
    print(f"\n{os.cpu_count()} cores, {time.monotonic() - began:.0f} s; medians of {options.repeats}")
    print("\n".join(table(measured)))
    print()
    print("\n".join(verdicts(measured)))
    if options.json:
        data = {row: [asdict(result) for result in results] for row, results in measured.items()}
        options.json.write_text(json.dumps(data, indent=1))
    return 0 if same_weights(measured) else 1


def configure(row: str, num_steps: int, output: str, name: str) -> RunConfig:
    """The config of one row."""
    overrides = GENERATION_HEAVY | {"run.num_steps": num_steps, "run.output": output, "run.name": name} | ROWS[row]
    return digen.load_config(Path(__file__).parent / "digits.yaml", overrides)


def measure(config: RunConfig) -> Measured:
    """Train, check every invariant, and set what happened beside what the twin says."""
    report = digen.run(config, progress=False)
    events = list(read_events(report.folder / "events.jsonl"))
    check(events)
    commits = [event.time for event in events if isinstance(event, StepCommitted)]
    durations = profiled_durations(events)
    twin = simulate(durations, config.schedule)
    middle = [event.values for event in events if isinstance(event, StepCommitted)][1:-1]
    tag, counts = report.values["tag"], report.values["counts"]
    num_assists, open_assists = count_assists(events)
    num_steps = len(commits)
    return Measured(
        steps_per_minute=60 * (num_steps - 2) / (commits[-2] - commits[0]),
        foreseen=float(twin.step_ends[-2] - twin.step_ends[0]) / (commits[-2] - commits[0]),
        policy_error=tag["prediction"]["mean"] if tag and tag["prediction"] else None,
        bubble_share=bubble_share(middle),
        generate_s=float(durations.generate_s[0]),
        update_s=float(durations.update_s),
        assists_per_step=num_assists / num_steps,
        open_assists_per_step=open_assists / num_steps,
        stale_per_step=counts["num_stale_starts"] / num_steps,
        switch_ms=1000 * counts["switch_s"] / num_assists if num_assists else NAN,
        decision_ms=(tag["search_ms_per_decision"] if tag else None) or NAN,
        weights=digest(report.folder / "checkpoints" / f"step-{num_steps:06d}"),
    )


def bubble_share(steps: Sequence[dict[str, float]]) -> float:
    """Idle share of the time of both workers over some steps."""
    wall = sum(step["pipeline/makespan_s"] for step in steps)
    idle = sum(
        step["pipeline/makespan_s"] * step[f"pipeline/bubble_ratio/{role}"]
        for step in steps
        for role in ("generator", "trainer")
    )
    return idle / (2 * wall)


def count_assists(events: Sequence[AnyEvent]) -> tuple[int, int]:
    """All assists, and those in an open gradient transaction: after the first update of their step."""
    begun: set[int] = set()
    num_assists = num_open = 0
    for event in events:
        if isinstance(event, TaskFinished) and event.kind == "update":
            begun.add(event.step)
        elif isinstance(event, TaskFinished) and event.kind == "assist":
            num_assists += 1
            num_open += event.step in begun
    return num_assists, num_open


def digest(checkpoint: Path) -> str:
    """Of all weights and optimizer state, bit for bit."""
    return sha256(b"".join(path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors")))).hexdigest()[:12]


def table(measured: dict[str, list[Measured]]) -> list[str]:
    """A line a row."""
    base = {name: rate(measured[name]) if name in measured else NAN for name in ("naive", "gap")}
    head = f"{'':16}{'steps/min':>10}{'spread':>13}{'x naive':>9}{'x gap':>7}{'t/g':>6}{'bubbles':>9}{'assists':>9}"
    head += f"{'(open)':>8}{'stale':>7}{'switch ms':>11}{'deciding ms':>13}{'foreseen':>10}{'by policy':>11}"
    lines = [head]
    for row, results in measured.items():
        speeds = [result.steps_per_minute for result in results]
        errors = [result.policy_error for result in results if result.policy_error is not None]
        lines.append(
            f"{row:16}{rate(results):>10.1f}{f'{min(speeds):.1f}-{max(speeds):.1f}':>13}"
            f"{rate(results) / base['naive']:>9.2f}{rate(results) / base['gap']:>7.2f}"
            f"{median(results, 'update_s') / median(results, 'generate_s'):>6.2f}"
            f"{median(results, 'bubble_share'):>9.0%}{median(results, 'assists_per_step'):>9.1f}"
            f"{median(results, 'open_assists_per_step'):>8.1f}{median(results, 'stale_per_step'):>7.1f}"
            f"{median(results, 'switch_ms'):>11.2f}{median(results, 'decision_ms'):>13.2f}"
            f"{f'x{statistics.median(result.foreseen for result in results):.3f}':>10}"
            f"{f'{statistics.median(errors):.1%} off' if errors else '-':>11}"
        )
    return [line.replace("nan", "  -") for line in lines]


def verdicts(measured: dict[str, list[Measured]]) -> list[str]:
    """What was to be shown, and whether it was seen."""
    lines = []
    tags = [row for row in ("+tag(search)", "+tag(horizon)") if row in measured]
    for row in tags if "gap" in measured else []:
        ratio = rate(measured[row]) / rate(measured["gap"])
        beside = f", {rate(measured[row]) / rate(measured['+tsp']):.2f} x +tsp" if "+tsp" in measured else ""
        lines.append(f"{row} is {ratio:.2f} x gap{beside} (target 1.2 x gap): {_met(ratio >= 1.2)}")
    if "+tcss" in measured and tags:
        best = max(rate(measured[row]) for row in tags)
        ratio = rate(measured["+tcss"]) / best
        lines.append(f"+tcss is {ratio:.2f} x the best on-policy row (target 1): {_met(ratio >= 1)}")
    off = {row: abs(statistics.median(result.foreseen for result in results) - 1) for row, results in measured.items()}
    worst = max(off, key=lambda row: off[row])
    lines.append(
        f"simulated time of a run is off by at most {off[worst]:.1%}, {worst} (target 10 %): {_met(off[worst] <= 0.1)}"
    )
    lines.append(
        f"same weights within {' and within '.join(map(', '.join, SAME_WEIGHTS))}: {_met(same_weights(measured))}"
    )
    return lines


def same_weights(measured: dict[str, list[Measured]]) -> bool:
    """Whether all runs that must train the same weights did."""
    return all(len({result.weights for row in rows for result in measured.get(row, ())}) <= 1 for rows in SAME_WEIGHTS)


def rate(results: Sequence[Measured]) -> float:
    """Median steps per minute."""
    return median(results, "steps_per_minute")


def median(results: Sequence[Measured], name: str) -> float:
    """Median of one number over the repetitions."""
    return float(statistics.median(getattr(result, name) for result in results))


def _met(condition: bool) -> str:
    return "met" if condition else "MISSED"


if __name__ == "__main__":
    raise SystemExit(main())
