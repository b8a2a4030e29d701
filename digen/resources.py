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
    torch.distributed (gloo) on one machine, needs schedule.sync=hold. auto: memory."""
    folder: Path | None = None
    """Of the channel files, of this run alone. Default: weights in the run's folder."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest time that weights take to be complete, for those who load them and for the trainer's next commit."""
    skip_unchanged: bool = False
    """Leave tensors alone that have not changed: they are not loaded, and by the channel files not written again."""

    @model_validator(mode="after")
    def _of_use(self) -> Self:
        if self.folder is not None and self.channel != "files":
            raise ValueError(f"folder is of the channel files, but channel is {self.channel}; leave it out")
        if self.skip_unchanged and self.channel == "broadcast":
            raise ValueError("skip_unchanged: the channel broadcast sends everything; leave it out")
        return self


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


class JudgeSection(Section):
    """A server of a vision-language judge that the run starts, watches and ends, for rewards ``judge`` that name it."""

    model: str
    """A folder, or hf:ORG/NAME on the hub. No token is handed to the server: what needs one must be there already."""
    command: Literal["vllm", "transformers"] = "vllm"
    """The server: vLLM's, or transformers serve."""
    python: Path | None = None
    """Interpreter that has it, for example of a virtual environment of its own. Default: the driver's."""
    gpus: tuple[int, ...] = ()
    """CUDA devices, shared out evenly among the replicas; those of one replica hold its model together."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Servers of this judge. A request goes to the one that has the fewest."""
    args: tuple[str, ...] = ()
    """Further arguments of the server, for example [--max-model-len, "8192"]."""
    env: dict[str, str] = {}
    """Environment variables of the server."""
    sleep: bool = False
    """Let its GPU memory go between scores (vLLM's sleep level 1), for a judge on a generator's GPU. One worker may
    score then. It opens vLLM's development endpoints to whoever is on this machine."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time until it answers."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.gpus) % self.replicas:
            raise ValueError(f"{len(self.gpus)} GPUs cannot be shared out evenly among {self.replicas} replicas")
        if len(set(self.gpus)) < len(self.gpus) or min(self.gpus, default=0) < 0:
            raise ValueError(f"gpus are {list(self.gpus)}; they must be different, and not negative")
        if self.sleep and self.command != "vllm":
            raise ValueError(f"sleep needs command vllm: {self.command} has no sleep mode")
        own = ("--host", "--port", "--model", "--tensor-parallel-size", "-tp", "--enable-sleep-mode")
        for word in self.args:
            if word.partition("=")[0] in own:
                raise ValueError(f"args must not hold {word.partition('=')[0]}: it follows from the other fields")
        return self

    def gpus_of(self, replica: int) -> tuple[int, ...]:
        """The devices of one replica."""
        each = len(self.gpus) // self.replicas
        return self.gpus[replica * each : (replica + 1) * each]


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
    """CUDA devices by worker name, one for each rank, for example {gen0: [0], trainer: [1, 2]}. Not for type ray: there
    every rank is given a GPU of its node where model.device is cuda."""
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
    judges: dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")], JudgeSection] = {}
    """Servers of vision-language judges by name, each with model, and where needed command, python, gpus, replicas,
    args, env, sleep and start_timeout_s. A reward ``judge`` refers to one by ``server: NAME``."""
    offload: bool = False
    """Move gradients and optimizer state out of the way for an assist and back after it."""
    checksums: bool = False
    """Checksum every payload in shared memory (weights are always checked)."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest time until a worker is READY."""
    heartbeat_timeout_s: Annotated[float, Field(ge=1)] | None = 60.0
    """Longest silence of a thread of a worker process that beats whatever is computed. After it the process is hung
    and is killed. null: any, for example to stop a worker in a debugger. Not of workers of type ray."""
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
