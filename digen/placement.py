"""``workers`` held against the rest of the config and against the machine, before anything starts.

What contradicts itself is an error wherever the config is read. What this machine lacks matters only where the workers
run: ``digen train`` refuses to start, ``digen check`` and ``digen doctor`` say it.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from digen import judges
from digen.config import RunConfig
from digen.diffusion import families
from digen.diffusion.engines import declaration
from digen.errors import ConfigError, MissingExtra
from digen.extras import require as require_extra
from digen.machine import Machine
from digen.observe.text import escape_text, format_bytes
from digen.plan import Plan, even_unit

_DENOISERS = ("transformer", "transformer_2", "unet")
COPIES = 2
"""Segments that published weights go through: one is read while the next is written."""
_FILES = 64
"""Descriptors of a driver beside those of segments and ranks."""
_RANK_FILES = 3
"""Of each rank: its socket, its pulse, and what watches its process."""


def worker_names(config: RunConfig) -> list[str]:
    """The workers of a run, apart from judges' servers: trainer, generators, scorers."""
    generators = [f"gen{number}" for number in range(config.num_generators)]
    return ["trainer", *generators, *(f"scorer{number}" for number in range(config.workers.scorers))]


def check(config: RunConfig) -> None:
    """Find what the config alone shows to be wrong.

    Raises:
        ConfigError: names worker, field and mend.
    """
    _check_names(config)
    _check_gpus(config)
    _check_sharding(config)
    _check_shares(config)
    declaration.check(config)
    _check_ray(config)
    judges.check(config)


def missing(config: RunConfig, machine: Machine, plan: Plan | None = None) -> list[str]:
    """What this machine lacks for a config that is otherwise right: a line each, with its mend."""
    workers, found = config.workers, []
    found += _tried(lambda: judges.require(config))
    if workers.type == "ray":
        return found + _tried(lambda: require_extra("ray"))  # everything else is a matter of its nodes
    found += _missing_gpus(config, machine)
    found += _unwritable("run.output", config.run.output) + _unwritable(
        "workers.weights.folder", workers.weights.folder
    )
    for name in _omni(config):
        if name not in workers.python and find_spec("vllm_omni") is None:
            found.append(
                f"{name} runs on vllm_omni, which {sys.executable} has not; install vllm-omni and digen in a virtual "
                f"environment of their own, and name its interpreter in workers.python.{name}"
            )
    need = COPIES * weight_bytes(config)
    if need > machine.memory:
        found.append(
            f"published weights take {format_bytes(need)} of shared memory ({COPIES} copies), and this machine has "
            f"{format_bytes(machine.memory)} of memory; train an adapter (model.lora), or take a larger machine"
        )
    segments = num_segments(config, plan) if plan is not None else 0
    ranks = sum(map(workers.num_ranks, worker_names(config)))
    if (files := segments + _RANK_FILES * ranks + _FILES) > machine.num_files:
        found.append(
            f"up to {segments} rollouts wait at a time, each with a descriptor in the driver, and {ranks} ranks have "
            f"{_RANK_FILES} each; it may have {machine.num_files}; raise it: ulimit -n {4096 * -(-files // 4096)}"
        )
    return found


def require(config: RunConfig, machine: Machine, plan: Plan) -> None:
    """Refuse to start what this machine cannot run.

    Raises:
        ConfigError: says everything that is missing.
    """
    found = missing(config, machine, plan)
    if found:
        raise ConfigError("; ".join(found))


def remarks(config: RunConfig, machine: Machine | None = None, plan: Plan | None = None) -> list[str]:
    """What is allowed and may still not be meant; a line each."""
    workers, said = config.workers, []
    for gpu, names in sorted(_sharers(config).items()):
        if len(names) > 1:
            said.append(f"GPU {gpu} is shared by {', '.join(names)}: what they hold must fit into it together")
    if not config.model.device.startswith("cuda") and (idle := [name for name, gpus in workers.gpus.items() if gpus]):
        said.append(f"model.device is {config.model.device}, so that the GPUs of {', '.join(idle)} are not used")
    said += _idle_ranks(config)
    if machine is None or workers.type == "ray":
        return said
    need = COPIES * weight_bytes(config) + (rollout_bytes(config, plan) if plan is not None else 0)
    if need > machine.available:
        said.append(
            f"weights and rollouts in shared memory come to roughly {format_bytes(need)}, more than the "
            f"{format_bytes(machine.available)} that are available now"
        )
    return said


def crowding(config: RunConfig, machine: Machine) -> list[str]:
    """Whether ranks that compute on the CPU have more threads than it has cores; a line, or none."""
    workers = config.workers
    threads = sum(map(workers.num_ranks, worker_names(config))) * workers.threads
    if not config.num_generators or threads <= machine.num_cores or config.model.device.startswith("cuda"):
        return []
    return [f"the ranks have {threads} threads in all, and this machine {machine.num_cores} cores"]


def weight_bytes(config: RunConfig) -> int:
    """Bytes of one copy of the published weights, from the files of the denoiser; 0 for an adapter, or if unknown."""
    path = config.model.path or families.lookup(config.model.family).model
    if config.model.lora is not None or path is None or not config.num_generators:
        return 0
    files = [file for part in _DENOISERS for file in (path / part).glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


def num_segments(config: RunConfig, plan: Plan) -> int:
    """Rollouts that may wait at a time: those of the steps that the window spans."""
    return plan.num_micro_batches * config.schedule.resolved_window


def rollout_bytes(config: RunConfig, plan: Plan) -> int:
    """Roughly the bytes of all rollouts that may wait at a time: their latents. 0 where the size is the family's own.

    A latent pixel of the usual models stands for 8x8 pixels (and 4 frames) and has 16 channels of float32.
    """
    sampling = config.sampling
    if sampling.height is None or sampling.width is None:
        return 0
    frames = 1 + ((sampling.num_frames or 1) - 1) // 4
    latent = 16 * 4 * frames * -(-sampling.height // 8) * -(-sampling.width // 8)
    samples = config.plan.prompts_per_step * config.plan.samples_per_prompt * config.schedule.resolved_window
    need = samples * (sampling.num_inference_steps + 1) * latent
    return min(need, config.schedule.max_rollout_bytes or need)


def _check_names(config: RunConfig) -> None:
    workers, known = config.workers, worker_names(config)
    fields: dict[str, Iterable[str]] = {
        "gpus": workers.gpus,
        "ranks": workers.ranks,
        "python": workers.python,
        "engines": workers.engines,
        "ray.resources": workers.ray.resources,
    }
    for field, names in fields.items():
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ConfigError(
                    f"workers.{field} names {escape_text(name, 64)!r}, which is no worker; {hint}the workers are "
                    f"{', '.join(sorted(known))}"
                )


def _check_gpus(config: RunConfig) -> None:
    if config.workers.type == "ray":
        if config.workers.gpus:
            raise ConfigError(
                "workers.gpus numbers the GPUs of this machine, but workers of type ray run on any node: leave it out, "
                "every rank is given one where model.device is cuda; say how many ranks in workers.ranks"
            )
        return
    without = [name for name in worker_names(config) if not config.workers.gpus.get(name)]
    if without and config.model.device.startswith("cuda"):
        raise ConfigError(f"model.device is {config.model.device}, but workers.gpus gives {', '.join(without)} no GPU")


def _check_sharding(config: RunConfig) -> None:
    workers, fsdp = config.workers, config.workers.fsdp
    generators = worker_names(config)[1 : 1 + config.num_generators]
    sharded = [name for name in generators if fsdp.generators and workers.num_ranks(name) > 1]
    if fsdp.generators and not sharded:
        raise ConfigError(
            "workers.fsdp.generators shards nothing: every generator has one rank; set workers.ranks or workers.gpus"
        )
    sharded = ["trainer"] * (workers.num_ranks("trainer") > 1) + sharded
    for name in sharded:
        ranks = workers.num_ranks(name)
        if ranks % fsdp.replicas:
            divisors = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
            raise ConfigError(
                f"workers.fsdp.replicas={fsdp.replicas} does not divide the {ranks} ranks of {name}; take one of "
                f"{', '.join(divisors)}"
            )
    for field in sorted(fsdp.model_fields_set - {"generators"}):
        needs_trainer = field == "assist"
        if getattr(fsdp, field) != type(fsdp).model_fields[field].default and (
            not sharded or (needs_trainer and "trainer" not in sharded)
        ):
            raise ConfigError(
                f"workers.fsdp.{field} shards nothing: the trainer has one rank; set workers.ranks or workers.gpus, or "
                "leave it out"
            )


def _check_shares(config: RunConfig) -> None:
    workers, size = config.workers, _micro_batch_size(config)
    if config.num_generators == 0 and (ranks := workers.num_ranks("trainer")) > 1:
        raise ConfigError(
            f"mode colocated does every stage in one process, but the trainer has {ranks} ranks; leave workers.ranks "
            "and all but one of its GPUs out, or choose another schedule.mode"
        )
    for name, ranks in _sharing(config).items():
        if config.model.forward_batch is None:
            raise ConfigError(
                f"{name} has {ranks} ranks, which share the forwards of a micro-batch, but model.forward_batch is not "
                f"set, so that its {size} samples are one forward; set model.forward_batch="
                f"{even_unit(size, ranks, size) or 1}"
            )


def _idle_ranks(config: RunConfig) -> list[str]:
    unit, size, said = config.model.forward_batch, _micro_batch_size(config), []
    for name, ranks in _sharing(config).items():
        if unit is not None and (count := -(-size // unit)) % ranks:
            even = even_unit(size, ranks, min(unit, size))
            idle = f"{ranks - count} of them never have work" if count < ranks else "some wait"
            mend = f"; with model.forward_batch={even} none does" if even else ""
            forwards = f"the {count} forwards of" if count > 1 else "the only forward of"
            said.append(f"{name}: {ranks} ranks cannot share {forwards} a micro-batch evenly: {idle}{mend}")
    if unit is None and (ranks := config.workers.num_ranks("trainer")) > 1 and config.algorithm.tsp_chunk != 1:
        said.append(
            f"trainer: {ranks} ranks share the forwards of a micro-batch, which may be a single one; set "
            f"model.forward_batch={even_unit(size, ranks, size) or 1}, or algorithm.tsp_chunk=1"
        )
    return said


def _sharing(config: RunConfig) -> dict[str, int]:
    """Generators whose ranks share forwards, with the number of their ranks."""
    workers, names = config.workers, worker_names(config)[1 : 1 + config.num_generators]
    own = [name for name in names if workers.engines.get(name, "diffusers") == "diffusers"]
    return {name: ranks for name in own if (ranks := workers.num_ranks(name)) > 1}


def _micro_batch_size(config: RunConfig) -> int:
    return config.plan.micro_batch_size or config.plan.samples_per_prompt


def _check_ray(config: RunConfig) -> None:
    section = config.workers.ray
    if config.workers.type != "ray":
        default = type(section)()
        for field in sorted(section.model_fields_set):
            if getattr(section, field) != getattr(default, field):
                raise ConfigError(f"workers.ray.{field} says something only with workers.type=ray; leave it out")


def _missing_gpus(config: RunConfig, machine: Machine) -> list[str]:
    count = len(machine.gpus)
    wanted = {name: gpus for name, gpus in config.workers.gpus.items() if gpus}
    wanted |= {name: judge.gpus for name, judge in config.workers.judges.items() if judge.gpus}
    over = {name: max(gpus) for name, gpus in wanted.items() if max(gpus) >= count}
    if not over:
        return []
    who = ", ".join(f"{name} {number}" for name, number in over.items())
    have = f"shows {count}, numbered from 0" if count else "shows none"
    mend = "change workers.gpus" if count else "go where there are some, or take model.device=cpu without workers.gpus"
    return [f"GPUs that this machine has not: {who}; it {have} ({machine.gpus_from}): {mend}"]


def _unwritable(field: str, folder: Path | None) -> list[str]:
    """Whether a folder can neither be written nor made, as far as permissions tell."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None) if folder else None
    if there is None or (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return []
    return [
        f"{field}: nothing can be written in {folder}, because {there} is not a folder that you may write; change it"
    ]


def _sharers(config: RunConfig) -> dict[int, list[str]]:
    """Workers by GPU, where they are on this machine."""
    shared: dict[int, list[str]] = defaultdict(list)
    if config.workers.type == "process":
        for name, gpus in config.workers.gpus.items():
            for gpu in gpus:
                shared[gpu].append(name)
        for name, judge in config.workers.judges.items():
            for gpu in judge.gpus:
                shared[gpu].append(name)
    return shared


def _omni(config: RunConfig) -> list[str]:
    return [name for name, engine in config.workers.engines.items() if engine == "vllm_omni"]


def _tried(function: Any) -> list[str]:
    try:
        function()
    except (ConfigError, MissingExtra) as error:
        return [str(error)]
    return []
