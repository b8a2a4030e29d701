"""The workers of a config as handles: what each of them runs, in how many processes, and where."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from digen import placement
from digen.config import RunConfig
from digen.diffusion import rewards
from digen.workers.group import process_group
from digen.workers.handle import TargetHandle
from digen.workers.process import ProcessWorker

ROLES = "digen.diffusion.roles"
"""Where the targets of the workers are."""
_ENGINES = {"vllm_omni": "digen.diffusion.engines.vllm_omni:VllmOmniGenerator"}
"""Targets of generators that do not run on diffusers."""


def build_workers(config: RunConfig) -> list[TargetHandle]:
    """All workers of a run but the judges' servers, not started: trainer, generators, scorers."""
    folder = config.folder.resolve()
    build = _ray_worker(config) if config.workers.type == "ray" else partial(build_process, log_dir=folder / "logs")
    return [build(config, name, _target(config, name), folder=str(folder)) for name in placement.worker_names(config)]


def build_process(
    config: RunConfig, name: str, target: str, *, log_dir: Path | None, alone: bool = False, **kwargs: Any
) -> TargetHandle:
    """A worker of child processes by its name, with its ranks, GPUs, threads and interpreter.

    The target is called with the config as plain data and with ``kwargs``; if it scores, it gets the keys of the
    rewards. ``alone`` makes it a single process of the driver's interpreter on the first of its GPUs, whatever the
    config says.
    """
    workers = config.workers
    gpus = workers.gpus.get(name, ())
    options = _options(config, target, kwargs) | {
        "gpus": gpus[:1] if alone else gpus,
        "log_dir": log_dir,
        "python": None if alone else workers.python.get(name),
        "heartbeat_timeout_s": workers.heartbeat_timeout_s,
    }
    num_ranks = workers.num_ranks(name)
    if num_ranks > 1 and not alone:
        return process_group(name, target, num_ranks, rank_timeout_s=workers.rank_timeout_s, **options)
    return ProcessWorker(name, target, **options)


def _ray_worker(config: RunConfig) -> Callable[..., TargetHandle]:
    """Makes workers of Ray actors, all on one cluster."""
    from digen.workers.ray import ray_worker
    from digen.workers.raycluster import RayCluster

    workers, section = config.workers, config.workers.ray
    cluster = RayCluster(section.address, allow_no_auth=section.allow_no_auth, start_timeout_s=workers.start_timeout_s)

    def build(config: RunConfig, name: str, target: str, **kwargs: Any) -> TargetHandle:
        return ray_worker(
            name,
            target,
            workers.num_ranks(name),
            cluster=cluster,
            gpus=config.model.device.startswith("cuda"),
            cpus_per_rank=section.cpus_per_rank,
            resources=section.resources.get(name),
            runtime_env=section.runtime_env,
            rank_timeout_s=workers.rank_timeout_s,
            heartbeat_timeout_s=workers.heartbeat_timeout_s,
            **_options(config, target, kwargs),
        )

    return build


def _options(config: RunConfig, target: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What all kinds of workers take."""
    workers = config.workers
    colocated = config.num_generators == 0
    return {
        "kwargs": {"config": config.model_dump(mode="json"), **kwargs},
        "threads": (workers.colocated_threads or _num_cores()) if colocated else workers.threads,
        "env": None if target.endswith(":TrainerTarget") else rewards.secrets(config.reward),
        "checksums": workers.checksums,
        "start_timeout_s": workers.start_timeout_s,
        "stop_grace_s": workers.stop_grace_s,
    }


def _target(config: RunConfig, name: str) -> str:
    if name == "trainer":
        return f"{ROLES}:{'ColocatedTarget' if config.num_generators == 0 else 'TrainerTarget'}"
    if name.startswith("scorer"):
        return f"{ROLES}:ScorerTarget"
    return _ENGINES.get(config.workers.engines.get(name, "diffusers"), f"{ROLES}:GeneratorTarget")


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
