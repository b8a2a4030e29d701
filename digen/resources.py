"""The ``workers`` section of a config: which processes run, where, of how many ranks, and how weights reach them.

Whatever stands here, the scheduler, the worker classes and the results are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from digen.schema import Section


class FsdpSection(Section):
    """How a trainer of several ranks holds its model: FSDP2, every parameter cut along its first dimension."""

    generators: bool = False
    """Shard generators of several ranks too, for a model too large for one GPU. Default: each rank has it all."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Copies of the sharded model: the ranks form a mesh of replicas x shards. Must divide the ranks."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and on the GPU only what a layer needs now."""
    reshard_after_forward: bool = True
    """Let go of a layer's full weights after its forward and gather them again for its backward: less memory, more
    communication."""
    assist: Literal["sharded", "replica"] = "sharded"
    """How the trainer generates for an assist: layer by layer from its shards, or from full weights that it gathers
    once when it switches."""


class WeightsSection(Section):
    """How weights travel from the trainer to the generators."""

    channel: Literal["auto", "memory", "files", "broadcast"] = "auto"
    """memory: shared memory, or Ray's object store. files: safetensors in a folder that all workers see. broadcast:
    torch.distributed, needs schedule.sync=hold. auto: memory."""
    folder: Path | None = None
    """Of the channel files. Default: weights in the run's folder."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest time that a load waits for its weights to be complete."""
    skip_unchanged: bool = False
    """Neither write nor read tensors that have not changed."""


class RaySection(Section):
    """Ray, for workers of type ray."""

    address: str | None = None
    """Of the cluster. Default: what RAY_ADDRESS says, else a cluster of this machine alone, on loopback."""
    cpus_per_rank: Annotated[float, Field(gt=0)] = 1.0
    """CPUs that a rank reserves."""
    resources: dict[str, dict[str, float]] = {}
    """Further resources that the ranks of a worker reserve, by worker name, for example {trainer: {a100: 1}}."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment of the workers: packages, working directory, environment variables."""
    allow_no_auth: bool = False
    """Join a cluster that lets anybody in who reaches it. Whoever reaches it can run code on it."""


class WorkersSection(Section):
    """Which processes run and where."""

    type: Literal["process", "ray"] = "process"
    """process: child processes of the driver, on this machine. ray: actors of a Ray cluster."""
    generators: Annotated[int, Field(ge=0)] | None = None
    """Generators. Default: 1; mode colocated has none, its one worker does every stage."""
    scorers: Annotated[int, Field(ge=0)] = 0
    """Workers that only decode and score. Default: generators score; with a slow or remote reward they would wait."""
    ranks: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Processes that a worker consists of, by worker name, for example {trainer: 2}. Default: one for each of its
    GPUs. A generator's ranks share its samples, a trainer's also its weights (FSDP2)."""
    rank_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest time that one rank may lag behind another in a command or a collective; then the worker is killed."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Torch threads of a rank. More than the free cores makes everything slower."""
    colocated_threads: Annotated[int, Field(ge=1)] | None = None
    """Torch threads of the single worker of mode colocated. Default: all cores. Where others use the cores too, set
    OMP_WAIT_POLICY=PASSIVE in the environment: OpenMP threads that spin on a shared core are many times slower."""
    gpus: dict[str, tuple[int, ...]] = {}
    """CUDA devices by worker name, one for each rank, for example {gen0: [0], trainer: [1, 2]}. Workers of type ray are
    given whatever devices of that number their node has free."""
    engines: dict[str, Literal["diffusers", "vllm_omni"]] = {}
    """What a generator runs on, by worker name. Default: diffusers."""
    engine_args: dict[str, Any] = {}
    """Arguments of the engines other than diffusers."""
    python: dict[str, Path] = {}
    """Interpreter of a worker by its name: of another virtual environment, in which digen is installed too. Default:
    the driver's."""
    fsdp: FsdpSection = FsdpSection()
    """Sharding."""
    weights: WeightsSection = WeightsSection()
    """Weight sync."""
    ray: RaySection = RaySection()
    """Ray."""
    offload: bool = False
    """Move gradients and optimizer state out of the way for an assist and back after it."""
    checksums: bool = False
    """Checksum every payload in shared memory (weights are always checked)."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest time until a worker is READY."""
    stop_grace_s: Annotated[float, Field(ge=0)] = 5.0
    """Time between asking a worker to end and killing it."""

    @model_validator(mode="after")
    def _one_gpu_for_each_rank(self) -> Self:
        for name, count in self.ranks.items():
            gpus = self.gpus.get(name)
            if gpus and len(gpus) != count:
                raise ValueError(f"{name} has {count} ranks but {len(gpus)} GPUs; a rank has one: leave ranks out")
        for name, gpus in self.gpus.items():
            if len(set(gpus)) < len(gpus) or min(gpus, default=0) < 0:
                raise ValueError(f"gpus of {name} are {list(gpus)}; they must be different, and not negative")
        return self

    def num_ranks(self, worker: str) -> int:
        """Processes that a worker consists of."""
        return self.ranks.get(worker) or len(self.gpus.get(worker, ())) or 1
