"""Makes the golden run of this release, ``tests/goldens/<version>/``, once before it is published:

    python tests/goldens/make.py

Two steps of the embedded model with an adapter of rank 1 and a moving average, one evaluation, one checkpoint. What is
kept is the config, the events, the metrics and the checkpoint: every later release must read them, or refuse them and
name the field (``tests/diffusion/test_goldens.py``). A golden is never made again or changed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import digen

OVERRIDES = {
    "run.name": "golden",
    "run.num_steps": 2,
    "run.seed": 1,
    "plan.prompts_per_step": 2,
    "plan.samples_per_prompt": 4,
    "plan.micro_batch_size": 2,
    "sampling.num_inference_steps": 3,
    "model.lora": {"rank": 1, "alpha": 2, "targets": ["to_q"]},
    "optimizer.ema_decay": 0.9,
    "reward.name": "jpeg_compressibility",
    "checkpoint.every": 2,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "evaluation.every": 1,
    "evaluation.num_prompts": 1,
    "evaluation.samples_per_prompt": 1,
    "observe.preview_every": 0,
    "schedule.mode": "tcss",
}
KEPT = ("config.yaml", "events.jsonl", "metrics.jsonl", "checkpoints")


def main() -> None:
    golden = Path(__file__).parent / digen.__version__
    if golden.exists():
        sys.exit(f"{golden} exists; a golden is never changed")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that no path of this machine is in what is kept
        report = digen.run(digen.load_config(None, OVERRIDES))
        golden.mkdir()
        for name in KEPT:
            source = report.folder / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, golden / name)
    print(f"made {golden}")


if __name__ == "__main__":
    main()
