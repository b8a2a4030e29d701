"""A run from Python: a config, three overrides, a report. About 30 seconds.

python experiments/from_python.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import digen


def main() -> None:
    with tempfile.TemporaryDirectory() as output:
        config = digen.load_config(
            Path(__file__).parent / "digits.yaml",
            overrides=["run.num_steps=3", f"run.output={output}", "schedule.mode=tcss"],
        )
        report = digen.run(config, progress=False)
        for step in report.steps:
            metrics = step.metrics()
            print(f"step {step.index}: reward {metrics['reward/mean']:.3f}, stale {metrics['staleness/ratio']:.0%}")
        print(report.summary())


if __name__ == "__main__":
    main()
