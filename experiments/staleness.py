"""Does bounded staleness cost reward? The digits job on-policy, with stale work, and colocated (paper, Fig. 16).

    python experiments/staleness.py [--seeds 0 1 2] [--steps 50] [--out DIR]     about 14 minutes on two cores

Rows: ``colocated`` (one worker, everything in sequence), ``gap`` (on-policy, pipelined), and ``tcss`` with at most a
quarter and at most half of a step's micro-batches stale by one step. All start from the same weights and see the same
prompts and noise seeds. The final reward is the mean over the last ten steps and over the seeds. Every run's invariants
are checked, so that the stale shares are what they are said to be. Draws the curves. Rewards are compared and not
times, so that ``colocated`` has one thread like the others, and another job on the machine does no harm.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import digen
from digen.events import read_events
from digen.sched import check

TOLERANCE = 0.03
"""Largest distance of a final reward from colocated's."""
LAST = 10
"""Steps over which the final reward is averaged."""

ROWS: dict[str, dict[str, Any]] = {
    "colocated": {"schedule.mode": "colocated", "workers.colocated_threads": 1},
    "gap": {"schedule.mode": "gap"},
    "tcss, 0.25": {"schedule.mode": "tcss", "schedule.stale_fraction": 0.25},
    "tcss, 0.5": {"schedule.mode": "tcss", "schedule.stale_fraction": 0.5},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("runs/figures"))
    options = parser.parse_args()
    curves: dict[str, list[list[float]]] = {row: [] for row in ROWS}
    stale: dict[str, list[float]] = {row: [] for row in ROWS}
    with tempfile.TemporaryDirectory() as output:
        for seed in options.seeds:
            for number, (row, schedule) in enumerate(ROWS.items()):
                overrides = schedule | {
                    "run.seed": seed,
                    "run.num_steps": options.steps,
                    "run.output": output,
                    "run.name": f"s{seed}-{number}",
                    "evaluation.at_start": False,
                    "evaluation.at_end": False,
                    "observe.preview_every": 0,
                }
                config = digen.load_config(Path(__file__).parent / "digits.yaml", overrides)
                report = digen.run(config, progress=False)
                check(read_events(report.folder / "events.jsonl"))
                curves[row].append([step.metrics()["reward/mean"] for step in report.steps])
                stale[row].append(statistics.mean(step.metrics()["staleness/ratio"] for step in report.steps))
                print(f"seed {seed}  {row:12} final reward {final(curves[row][-1]):.3f}", flush=True)
    reference = statistics.mean(map(final, curves["colocated"]))
    print(f"\n{'':12}{'final reward':>14}{'by seed':>22}{'- colocated':>13}{'stale share':>13}")
    met = True
    for row, runs in curves.items():
        finals = [final(run) for run in runs]
        difference = statistics.mean(finals) - reference
        met &= abs(difference) <= TOLERANCE
        by_seed = " ".join(f"{value:.3f}" for value in finals)
        print(
            f"{row:12}{statistics.mean(finals):>14.3f}{by_seed:>22}{difference:>+13.3f}"
            f"{statistics.mean(stale[row]):>13.2f}"
        )
    print(f"\nfinal rewards within {TOLERANCE} of colocated: {'met' if met else 'MISSED'}")
    draw(curves, options.out)
    return 0 if met else 1


def final(rewards: list[float]) -> float:
    """The mean reward of the last steps."""
    return statistics.mean(rewards[-LAST:])


def draw(curves: dict[str, list[list[float]]], folder: Path) -> None:
    """Mean over seeds, with the range between the lowest and the highest seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4))
    for row, runs in curves.items():
        steps = range(len(runs[0]))
        columns = list(zip(*runs, strict=True))
        (line,) = axes.plot(steps, [statistics.mean(column) for column in columns], label=row)
        axes.fill_between(
            steps, [min(column) for column in columns], [max(column) for column in columns], alpha=0.15,
            color=line.get_color(),
        )  # fmt: skip
    axes.set(xlabel="optimizer step", ylabel="mean reward", title="digits: reward with and without stale work")
    axes.legend()
    path = folder / "staleness.svg"
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    print(f"figure: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
