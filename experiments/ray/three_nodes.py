"""The digits job on a Ray cluster of three nodes, which are all this machine, and what becomes of it without a node.

Run ``python experiments/ray/three_nodes.py [--steps N]``; it takes about a minute on two cores. Expected: the weights
that come of actors on two nodes are those of child processes, byte for byte; also where the generator's node is lost in
the middle of the run and another takes its place. Without restarts the run ends within seconds, and says which worker
died. The driver stays small.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import secrets
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from digen import DigenError, arun, load_config

NODES: dict[str, dict[str, float]] = {"gen0": {"left": 1}, "trainer": {"right": 1}}
"""What the workers ask for, so that they are on two nodes beside the driver's."""


SIZE = {"num_cpus": 2, "object_store_memory": 150 << 20}
LONG = 60
"""Steps of a run that loses a node: more than it can do until that is noticed."""


def settings(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "run.output": str(folder),
        "run.name": name,
        "plan.prompts_per_step": 2,
        "plan.samples_per_prompt": 4,
        "plan.micro_batch_size": 4,
        "sampling.num_inference_steps": 3,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "observe.preview_every": 0,
        "schedule.mode": "gap",
    }
    return values | more


async def train(values: dict[str, Any]) -> tuple[str, float]:
    """The digest of the weights after the last step, and the seconds that the run took."""
    began = time.perf_counter()
    report = await arun(load_config(None, values), progress=False)
    weights = max(report.folder.glob("checkpoints/*/weights.safetensors"))
    return hashlib.sha256(weights.read_bytes()).hexdigest(), time.perf_counter() - began


async def lose(cluster: Any, node: Any, values: dict[str, Any]) -> asyncio.Task[tuple[str, float]]:
    """Begin a run, and remove the node of its generator after the first step."""
    run = asyncio.ensure_future(train(values))
    metrics = Path(values["run.output"]) / values["run.name"] / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n")):
        await asyncio.wait({run}, timeout=0.05)
        assert not run.done(), "the run ended before its first step"
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    return run


async def survive(cluster: Any, node: Any, values: dict[str, Any]) -> tuple[str, Any]:
    """The digest of the weights of a run whose generator's node was lost and replaced, and the new node."""
    run = await lose(cluster, node, values)
    node = cluster.add_node(resources={"left": 1}, **SIZE)  # it wants the main thread, and the run can wait
    return (await run)[0], node


async def fail(cluster: Any, node: Any, values: dict[str, Any]) -> tuple[str, float]:
    """What a run without restarts says of the loss of its generator's node, and how many seconds after."""
    run = await lose(cluster, node, values)
    began = time.perf_counter()
    try:
        await run
    except DigenError as error:
        return f"{type(error.__cause__).__name__}: {error.__cause__}", time.perf_counter() - began
    return "nothing", time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        on_processes, seconds = asyncio.run(train(settings(folder, "process", **{"run.num_steps": steps})))
        print(f"process workers   {steps} steps, weights {on_processes[:16]}, {seconds:.1f} s with their start")

        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        kind = import_module("ray.cluster_utils").Cluster
        cluster = kind(initialize_head=True, head_node_args={**SIZE, "include_dashboard": False})
        try:
            left, _ = [cluster.add_node(resources={side: 1}, **SIZE) for side in ("left", "right")]
            ray = {"workers.type": "ray", "workers.ray.address": cluster.address, "workers.ray.resources": NODES}
            on_ray, seconds = asyncio.run(train(settings(folder, "ray", **ray, **{"run.num_steps": steps})))
            print(f"actors, two nodes {steps} steps, weights {on_ray[:16]}, {seconds:.1f} s with their start")
            long = {**ray, "run.num_steps": LONG}
            whole, _ = asyncio.run(train(settings(folder, "whole", **long)))
            survived, left = asyncio.run(survive(cluster, left, settings(folder, "replaced", **long)))
            print(f"a node replaced   {LONG} steps, weights {survived[:16]}, without a loss {whole[:16]}")
            said, seconds = asyncio.run(fail(cluster, left, settings(folder, "lost", **long, **{"restarts.budget": 0})))
            print(f"a node lost       {seconds:.1f} s later: {said}")
        finally:
            cluster.shutdown()
    print(f"driver            {psutil.Process().memory_info().rss >> 20} MiB with Ray")
    met = on_ray == on_processes and survived == whole and said.startswith("WorkerDied: worker 'gen0' died")
    print(f"same weights, and the loss is gen0's: {'met' if met else 'NOT MET'}")
    return not met


if __name__ == "__main__":
    sys.exit(main())
