"""How does each stage scale (paper, Fig. 3)? From the stage model, simulated, and on this machine's cores, for real.

    python experiments/scaling.py [--model-only] [--repeats 5] [--out DIR]     about 1 minute on two cores

The model is ``costs.scaling`` of the config: its defaults are assumed, in the shape that the paper describes, and not
measured. The real part runs the digits job's own worker processes: generation, an update with its timesteps one after
another, and an update with all of them in one forward (TSP), with one core, and with two cores as two threads of one
process and as two processes. Two trainer processes share no gradient here, so theirs is the bound that data
parallelism has. At the end the measured points are printed as the ``costs`` section that ``digen plan`` takes.
Where others use the cores too, set OMP_WAIT_POLICY=PASSIVE: threads that spin on a shared core are many times slower.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import digen
from digen.config import CostsSection, RunConfig, ScalingSection
from digen.runner import prepare

HERE = Path(__file__).parent

JOB = {
    "plan.prompts_per_step": 6,
    "plan.samples_per_prompt": 12,
    "sampling.num_inference_steps": 24,
    "algorithm.timestep_fraction": 0.17,
}
"""The job of assist.py; its 6 micro-batches are one measurement of each stage."""

STAGES = ("generate", "update, sequential", "update, TSP")

ARRANGEMENTS = {"1 core": (1, 1), "2 threads": (1, 2), "2 processes": (2, 1)}
"""Name: processes, and torch threads of each."""

Rates = dict[tuple[str, str], float]
"""Samples a second, by stage and arrangement."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-only", action="store_true", help="measure nothing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/figures"), metavar="DIR", help="where the figure goes")
    options = parser.parse_args()
    print("\n".join(model_table(ScalingSection())))
    rates: Rates = {}
    if not options.model_only:
        config = digen.load_config(HERE / "digits.yaml", JOB)
        print("\nmeasuring: about 1 minute on two cores", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as logs:
            rates = asyncio.run(measure(config, options.repeats, logs))
        print(f"measured in {time.monotonic() - began:.0f} s, medians of {options.repeats}")
        print("\n".join(measured_table(rates)))
        print(f"\n{costs_yaml(config, rates)}", end="")
    draw(ScalingSection(), rates, options.out / "scaling.svg")
    print(f"\nfigure: {options.out / 'scaling.svg'}")


def model_table(scaling: ScalingSection) -> list[str]:
    """Throughput of each stage's group by its GPUs, as multiples of one GPU's."""
    lines = [
        "simulated: stage model, assumed parameters (the defaults of costs.scaling)",
        f"{'GPUs':>6}{'generate':>10}{'of linear':>11}{'update':>10}{'of linear':>11}",
    ]
    for gpus, generate in scaling.generate:
        update = dict(scaling.update)[gpus]
        lines.append(f"{gpus:>6}{generate:>10.2f}{generate / gpus:>11.0%}{update:>10.2f}{update / gpus:>11.0%}")
    return lines


async def measure(config: RunConfig, repeats: int, logs: str) -> Rates:
    """Samples a second of every stage in every arrangement, medians of interleaved repetitions, a first one dropped."""
    plan = prepare(config).plan
    workers: dict[tuple[str, str], list[digen.ProcessWorker]] = {}
    for arrangement, (num_processes, threads) in ARRANGEMENTS.items():
        for tsp, chunk in (("sequential", 1), ("TSP", "all")):
            data = config.model_dump(mode="json")
            data["algorithm"]["tsp_chunk"] = chunk
            workers[arrangement, tsp] = [
                digen.ProcessWorker(
                    f"{arrangement}-{tsp}-{number}".replace(" ", "-").lower(),
                    "digen.diffusion.roles:TrainerTarget",
                    kwargs={"config": data},
                    threads=threads,
                    log_dir=logs,
                )
                for number in range(num_processes)
            ]
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    async with digen.Pool([worker for team in workers.values() for worker in team]):
        for repeat in range(repeats + 1):
            for (arrangement, tsp), team in workers.items():
                generate, update = await one_step(team, plan.step(repeat))
                if repeat:
                    rates[f"update, {tsp}", arrangement].append(update)
                    rates["generate", arrangement].append(generate)
    return {key: statistics.median(values) for key, values in rates.items()}


async def one_step(team: Sequence[Any], micro_batches: Sequence[digen.MicroBatch]) -> tuple[float, float]:
    """Every process of the team generates and trains a whole step; samples a second of both stages, of all together."""
    num_samples = len(team) * sum(micro_batch.num_samples for micro_batch in micro_batches)
    rollouts: dict[str, list[digen.Rollout]] = defaultdict(list)

    async def generate(worker: Any) -> None:
        for micro_batch in micro_batches:
            rollouts[worker.name].append(await worker.generate(micro_batch))

    async def update(worker: Any) -> None:
        for rollout in rollouts[worker.name]:
            half = rollout.micro_batch.num_samples // 2
            await worker.update(rollout, [1.0] * half + [-1.0] * (rollout.micro_batch.num_samples - half))

    times = [time.perf_counter()]
    for stage in (generate, update):
        await asyncio.gather(*(stage(worker) for worker in team))
        times.append(time.perf_counter())
    for worker in team:
        await worker.commit(micro_batches[0].step, tuple(range(len(micro_batches))))
        for rollout in rollouts[worker.name]:
            worker.release(rollout.payload)
    return num_samples / (times[1] - times[0]), num_samples / (times[2] - times[1])


def measured_table(rates: Rates) -> list[str]:
    """Samples a second, and as multiples of one core's."""
    lines = [f"{'samples/s':20}" + "".join(f"{name:>18}" for name in ARRANGEMENTS)]
    for stage in STAGES:
        values = [rates[stage, name] for name in ARRANGEMENTS]
        lines.append(f"{stage:20}" + "".join(f"{f'{value:.0f} (x{value / values[0]:.2f})':>18}" for value in values))
    return lines


def costs_yaml(config: RunConfig, rates: Rates) -> str:
    """The measured points as a ``costs`` section; a core takes the place of a GPU, threads that of a group."""
    size = config.plan.samples_per_prompt
    sequential = config.algorithm.tsp_chunk == 1
    update = STAGES[1 if sequential else 2]
    one = {stage: rates[stage, "1 core"] for stage in STAGES}
    section = {
        "durations": f"g={size / one['generate']:.4f} u={size / one[update]:.4f}",
        "note": "measured by experiments/scaling.py, one thread",
        "tsp_share": round(min(1.0, one["update, sequential"] / one["update, TSP"]), 3),
        "scaling": {
            stage: _curve(rates[name, "2 threads"] / one[name])
            for stage, name in (("generate", "generate"), ("update", update))
        },
    }
    CostsSection.model_validate(section)
    return yaml.safe_dump({"costs": section}, sort_keys=False, default_flow_style=None)


def _curve(two: float) -> list[list[float]]:
    """Points of a curve that must not fall: a second thread that slows things down is left out."""
    return [[1, 1.0], [2, round(two, 3)]] if two >= 1 else [[1, 1.0]]


def draw(scaling: ScalingSection, rates: Rates, path: Path) -> None:
    """The model, and beside it what was measured."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 1 + bool(rates), figsize=(5 + 5 * bool(rates), 4), squeeze=False)
    left = axes[0][0]
    for stage, curve in (("generate", scaling.generate), ("update", scaling.update)):
        left.plot([gpus for gpus, _ in curve], [float(value) for _, value in curve], marker="o", label=stage)
    gpus = [gpus for gpus, _ in scaling.update]
    left.plot(gpus, gpus, color="grey", linestyle=":", label="linear")
    left.set(title="simulated: stage model, assumed", xlabel="GPUs", ylabel="throughput, of one GPU's")
    left.set(xscale="log", yscale="log", xticks=gpus, xticklabels=gpus, yticks=gpus, yticklabels=gpus)
    left.minorticks_off()
    left.legend()
    if rates:
        right = axes[0][1]
        for place, arrangement in enumerate(ARRANGEMENTS):
            heights = [rates[stage, arrangement] / rates[stage, "1 core"] for stage in STAGES]
            right.bar([x + 0.27 * (place - 1) for x in range(len(STAGES))], heights, 0.25, label=arrangement)
        right.axhline(2, color="grey", linestyle=":")
        right.set(title="measured: digits job", ylabel="throughput, of one core's")
        right.set(xticks=range(len(STAGES)), xticklabels=[stage.replace(", ", "\n") for stage in STAGES])
        right.set_ylim(0, 2.6)
        right.legend(loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
