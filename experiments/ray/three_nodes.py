"""The digits job on a Ray cluster of three nodes, which are all this machine, and what becomes of it without a node.

Run ``python experiments/ray/three_nodes.py [--steps N]``; it takes about a minute on two cores. Expected: the weights
that come of actors on two nodes are those of child processes, byte for byte; a node that is lost in the middle of a run
is reported as the death of the worker that was there, within seconds; and the driver stays small.
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
from digen.workers import raycluster

NODES: dict[str, dict[str, float]] = {"gen0": {"left": 1}, "trainer": {"right": 1}}
"""What the workers ask for, so that they are on two nodes beside the driver's."""


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


async def lose(cluster: Any, node: Any, values: dict[str, Any]) -> tuple[str, float]:
    """What a run ends with whose generator's node is lost after its first step, and how long after."""
    config = load_config(None, values)
    run = asyncio.ensure_future(arun(config, progress=False))
    metrics = config.folder / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n")):
        await asyncio.wait({run}, timeout=0.05)
        assert not run.done(), "the run ended before it had begun"
    began = time.perf_counter()
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    try:
        await run
    except DigenError as error:
        seconds = time.perf_counter() - began
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        return " <- ".join(f"{type(cause).__name__}: {cause}" for cause in causes), seconds
    return "nothing: the run ended well", time.perf_counter() - began


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
        size = {"num_cpus": 2, "object_store_memory": 150 << 20}
        cluster = kind(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        try:
            left, _ = [cluster.add_node(resources={side: 1}, **size) for side in ("left", "right")]
            ray = {"workers.type": "ray", "workers.ray.address": cluster.address, "workers.ray.resources": NODES}
            on_ray, seconds = asyncio.run(train(settings(folder, "ray", **ray, **{"run.num_steps": steps})))
            print(f"actors, two nodes {steps} steps, weights {on_ray[:16]}, {seconds:.1f} s with their start")
            said, seconds = asyncio.run(lose(cluster, left, settings(folder, "lost", **ray, **{"run.num_steps": 1000})))
            print(f"a node lost       after {seconds:.1f} s: {said}")
        finally:
            cluster.shutdown()
    print(f"driver            {psutil.Process().memory_info().rss >> 20} MiB, Ray and three nodes' handles included")
    assert not raycluster.imported("ray").is_initialized()
    met = on_ray == on_processes and "worker 'gen0' died" in said
    print(f"same weights, and the loss is gen0's: {'met' if met else 'NOT MET'}")
    return not met


if __name__ == "__main__":
    sys.exit(main())
