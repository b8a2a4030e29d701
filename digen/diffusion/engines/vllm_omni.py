"""A generator on vLLM-Omni: a target for a worker whose interpreter has it (``workers.engines``, ``workers.python``).

The engine runs in the worker's own process, in threads, around one ``AsyncOmni``. A micro-batch becomes one request a
sample (:mod:`digen.diffusion.engines.samples`), which digen's pipelines in the engine answer with trajectories
(:mod:`digen.diffusion.engines.omni_pipelines`). Nothing here imports the engine before a target is made.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from time import perf_counter
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from digen import errors
from digen.config import RunConfig
from digen.diffusion import families
from digen.diffusion.algorithms.base import build_algorithm
from digen.diffusion.engines.declaration import check
from digen.diffusion.engines.samples import Record, Sample, adapter_path, assemble, requests
from digen.diffusion.families.base import Conditioning
from digen.diffusion.families.pipeline import PipelineFamily
from digen.diffusion.trajectories import conditioning_arrays
from digen.errors import ConfigError, InvariantViolation, ProtocolError, WorkerError, WorkerTimeout
from digen.types import Encoded, LoadReport, MicroBatch, Payload, Prompt, Publication, Rollout

RELEASE = "0.30"
"""The release of vllm-omni that this module is written for."""
BATCH_TIMEOUT_S = 3600.0
"""Longest time between two finished samples of a micro-batch."""
_COALESCE_MS = 1000.0
"""How long the engine waits for the rest of a forward's samples, which arrive together."""
_PIPELINES = "digen.diffusion.engines.omni_pipelines"

_T = TypeVar("_T")


class Engine(Protocol):
    """What is used of ``vllm_omni.entrypoints.async_omni.AsyncOmni``."""

    def generate(self, prompt: Any, *, request_id: str, sampling_params_list: Sequence[Any]) -> Any:
        """Outputs of one request, as an asynchronous iterator; the last one is the answer."""
        ...

    async def pause_generation(self, *, mode: str) -> None:
        """With mode ``keep``: return when the running batch has ended, and leave what is queued queued."""
        ...

    async def resume_generation(self) -> None:
        """Go on."""
        ...

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of the worker extension."""
        ...

    async def sleep(self, *, level: int) -> list[Any]:
        """Move the weights out of the GPU's memory."""
        ...

    async def wake_up(self) -> list[Any]:
        """Move them back."""
        ...


@dataclass(frozen=True, slots=True)
class Api:
    """The parts of an installed vllm-omni that the adapter and its pipelines use."""

    release: str
    engine: Any
    """``AsyncOmni``."""
    sampling_params: Any
    """``OmniDiffusionSamplingParams``."""
    lora_request: Any
    output: Any
    """``DiffusionOutput``."""
    engine_config: Any
    """``OmniDiffusionConfig``."""
    lora_manager: Any
    pipeline: Any
    """Of the family, with digen's part."""

    def check(self) -> None:
        """Ask for features, not for versions.

        Raises:
            ConfigError: one is missing; names all that are, the release found and the one that is needed.
        """
        missing = []
        for method, parameter in (("pause_generation", "mode"), ("sleep", "level"), ("collective_rpc", "args")):
            if not _takes(getattr(self.engine, method, None), parameter):
                missing.append(f"AsyncOmni.{method}({parameter}=)")
        missing += [
            f"AsyncOmni.{method}" for method in ("resume_generation", "wake_up") if not hasattr(self.engine, method)
        ]
        if not getattr(self.pipeline, "supports_request_batch", False):
            missing.append(f"{self.pipeline.__name__}.supports_request_batch")
        hook = "_load_diffusion_lora_adapter"
        if hook not in _names(getattr(self.lora_manager, "_load_adapter", None)):
            missing.append(f"the hook {hook} of DiffusionLoRAManager")
        for kind, wanted in (
            (self.sampling_params, ("extra_args", "lora_request", "seed")),
            (self.output, ("trajectory_latents",)),
            (self.engine_config, ("custom_pipeline_args", "worker_extension_cls", "request_batch_max_wait_ms")),
        ):
            known = {field.name for field in fields(kind)}
            missing += [f"{kind.__name__}.{name}" for name in wanted if name not in known]
        if missing:
            raise ConfigError(
                f"vllm-omni {self.release} in {sys.executable} lacks {', '.join(missing)}; digen needs vllm-omni "
                f"{RELEASE}: pip install 'vllm-omni=={RELEASE}.*' and vllm of the same release"
            )


def installed(family: str) -> Api:
    """What this interpreter has of vllm-omni.

    Raises:
        ConfigError: it has none, or another release; names the interpreter and the release that is needed.
    """
    mend = (
        f"set workers.python to the interpreter of an environment with vllm-omni {RELEASE} and vllm of the same "
        "release (experiments/engines/make_environment.sh makes one)"
    )
    try:
        release = version("vllm-omni")
    except PackageNotFoundError:
        raise ConfigError(f"{sys.executable} has no vllm-omni; {mend}") from None
    try:
        pipeline = import_module(_PIPELINES).PIPELINES[family]
        data = import_module("vllm_omni.diffusion.data")
        return Api(
            release=release,
            engine=import_module("vllm_omni.entrypoints.async_omni").AsyncOmni,
            sampling_params=import_module("vllm_omni.inputs.data").OmniDiffusionSamplingParams,
            lora_request=import_module("vllm_omni.lora.request").LoRARequest,
            output=data.DiffusionOutput,
            engine_config=data.OmniDiffusionConfig,
            lora_manager=import_module("vllm_omni.diffusion.lora.manager").DiffusionLoRAManager,
            pipeline=pipeline,
        )
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"vllm-omni {release} in {sys.executable} cannot be used ({error}); {mend}") from error


class VllmOmniGenerator:
    """A generator that draws trajectories on vLLM-Omni, encodes prompts there, and loads what the trainer publishes.

    It neither decodes nor scores nor evaluates: see :func:`digen.diffusion.engines.declaration.check`. With
    ``workers.engine_args: {enable_sleep_mode: true}`` it can make room on its GPU: :meth:`switch`.

    Args:
        config: a :class:`digen.RunConfig` as plain JSON data.
        folder: the run's folder, in which it writes nothing.
        api: the engine's classes; by default those that are installed.

    Raises:
        ConfigError: the config is not for this engine, or the engine is absent, of another release, or does not start.
        WorkerTimeout: a call of the engine took too long; likewise in all methods.
    """

    def __init__(self, config: dict[str, Any], folder: str | None = None, api: Api | None = None) -> None:
        del folder
        self._config = RunConfig.model_validate(config)
        check(self._config)
        model, plan, self._waits = self._config.model, self._config.plan, self._config.workers
        self._api = api or installed(model.family)
        self._api.check()
        self._algorithm = build_algorithm(self._config)
        self._family = _plain_family(self._config)
        self._schedule = self._family.schedule(self._config.sampling.num_inference_steps)
        self._algorithm.check_schedule(self._schedule)
        self._unit = model.forward_batch or plan.micro_batch_size or plan.samples_per_prompt
        self._version = 0
        self._damage = ""
        self._asleep = False
        self._numbers = count(1)
        self._adapter: Any = None
        self._loop = asyncio.Runner()
        try:
            self._engine: Engine = self._loop.run(self._start())
        except BaseException:
            self._loop.close()
            raise

    @property
    def version(self) -> int:
        """Version of the last load; 0 is the model's folder."""
        return self._version

    def encode(self, prompts: Sequence[Prompt]) -> Encoded:
        """Encode the prompts of a step with the engine's encoders, for every worker that generates for it."""
        return Encoded(tuple(prompts), Payload(conditioning_arrays(self._loop.run(self._encode(prompts)))))

    def generate(self, micro_batch: MicroBatch, encoded: Encoded | None = None) -> Rollout:
        """Draw every sample with the weights held now; the payload is as a generator on diffusers makes it.

        Raises:
            NumericsError: a latent or log-probability is not finite.
            ProtocolError: the engine drew a sample otherwise than it was asked to.
            InvariantViolation: the samples have the weights of several versions.
        """
        return self._loop.run(self._generate(micro_batch, encoded))

    def load(self, published: Publication) -> LoadReport:
        """Pause after the running batch, replace the weights, read them back, and go on, also after an error.

        Raises:
            ConfigError: the tensors do not fit the model one to one. Nothing is generated any more until a load
                succeeds.
        """
        return self._loop.run(self._load(published))

    def switch(self, to: str) -> None:
        """Wake the engine (``"generate"``) or put it to sleep, its weights in host memory (``"train"``)."""
        if to not in {"generate", "train"}:
            raise InvariantViolation(f"switch to {to!r}; known: 'generate', 'train'")
        if not self._waits.engine_args.get("enable_sleep_mode"):
            raise ConfigError("the engine cannot sleep; set workers.engine_args.enable_sleep_mode")
        self._loop.run(self._sleep() if to == "train" else self._wake())

    # Inside the loop

    async def _start(self) -> Engine:
        model, workers = self._config.model, self._waits
        arguments = {
            "dtype": model.dtype,
            "max_num_seqs": self._unit,
            "request_batch_max_wait_ms": _COALESCE_MS,
            "enforce_eager": True,
            "worker_extension_cls": f"{_PIPELINES}.DigenWorkerExtension",
            "custom_pipeline_args": {
                "pipeline_class": f"{_PIPELINES}.{self._api.pipeline.__name__}",
                "digen": self._config.model_dump(mode="json"),
            },
        }
        try:
            engine: Engine = self._api.engine(model=str(families.source(model)), **(arguments | workers.engine_args))
        except Exception as error:
            raise ConfigError(f"vllm-omni {self._api.release} does not start: {error}") from error
        return engine

    async def _encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        answer = await self._call("digen_encode", [prompt.text for prompt in prompts], limit_s=BATCH_TIMEOUT_S)
        conditioning: Conditioning = _field(answer, "conditioning", "digen_encode")
        return conditioning

    async def _generate(self, micro_batch: MicroBatch, encoded: Encoded | None) -> Rollout:
        if self._damage or self._asleep:
            raise InvariantViolation(self._damage or "the engine sleeps; switch to 'generate' first")
        began = perf_counter()
        conditioning = await self._conditioning(micro_batch, encoded)
        sampled = perf_counter()
        samples = requests(self._algorithm, micro_batch, self._schedule, unit=self._unit)
        rows = [{name: tensor[row : row + 1] for name, tensor in conditioning.items()} for row in range(len(samples))]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._request(sample, row)) for sample, row in zip(samples, rows, strict=True)
                ]
        except BaseExceptionGroup as failures:  # one is enough to say, and its type is what callers know
            raise failures.exceptions[0] from None
        records = [task.result() for task in tasks]
        trajectories = assemble(
            records, samples, conditioning, latent_shape=self._family.latent_shape, dtype=self._family.dtype
        )
        first, last = _versions(records)
        return Rollout(
            micro_batch=micro_batch,
            version=first,
            version_end=last,
            payload=Payload(trajectories.arrays()),
            stats={"encode_s": sampled - began, "sample_s": perf_counter() - sampled},
        )

    async def _conditioning(self, micro_batch: MicroBatch, encoded: Encoded | None) -> Conditioning:
        """One row per sample."""
        prompts = [piece.prompt for piece, _ in micro_batch.samples()]
        if encoded is None:
            distinct = tuple(piece.prompt for piece in micro_batch.slices)
            encoded = Encoded(distinct, Payload(conditioning_arrays(await self._encode(distinct))))
        order = [encoded.prompts.index(prompt) for prompt in prompts]
        return {name: torch.from_numpy(np.array(array))[order] for name, array in encoded.payload.items()}

    async def _request(self, sample: Sample, conditioning: Conditioning) -> Record:
        frames, height, width = self._family.size
        name = f"{sample.uid}-{sample.number}"
        params = self._api.sampling_params(
            seed=0,  # without any the engine draws one; the noise is of the seeds in the sample
            height=height,
            width=width,
            num_frames=frames,
            num_inference_steps=len(sample.walk.times),
            return_trajectory_latents=True,
            lora_request=self._adapter,
            extra_args={"digen": msgspec.to_builtins(sample), "conditioning": conditioning},
        )
        output: Any = None
        async with _limit(BATCH_TIMEOUT_S, f"sample {name}"):
            stream = self._engine.generate({"prompt": ""}, request_id=name, sampling_params_list=[params])
            async for each in stream:
                output = each
        if output is None or getattr(output, "error", None):
            why = "no answer" if output is None else output.error
            raise WorkerError(f"the engine failed on sample {name}: {why}")
        record = output.trajectory_latents
        if not isinstance(record, Mapping):
            raise ProtocolError(f"the engine answered sample {name} without a trajectory: {type(record).__name__}")
        return dict(record)

    async def _load(self, published: Publication) -> LoadReport:
        if self._asleep:
            raise InvariantViolation("the engine sleeps; switch to 'generate' before a load")
        if not published.num_tensors:
            raise ConfigError(f"weights of version {published.version} hold no tensors")
        number = next(self._numbers)
        self._damage = f"the weights of version {published.version} were not loaded, so the engine holds none for sure"
        try:
            await self._within(self._engine.pause_generation(mode="keep"), "pause_generation", BATCH_TIMEOUT_S)
            limit_s = self._waits.weights.timeout_s + self._waits.rank_timeout_s
            answer = await self._call("digen_load", published, number, limit_s=limit_s)
        finally:
            await self._within(self._engine.resume_generation(), "resume_generation", self._waits.rank_timeout_s)
        try:
            report = msgspec.convert(_field(answer, "report", "digen_load"), LoadReport)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the engine's report of a load cannot be read: {error}") from error
        differs = published.checksum not in {None, report.checksum}  # None: each tensor was checked by its own
        if differs or (report.version, report.num_tensors) != (published.version, published.num_tensors):
            raise ProtocolError(f"the engine reports {report} after the load of {published}")
        if self._config.model.lora is not None:
            self._adapter = self._api.lora_request(f"digen-{report.version}", number, adapter_path(number))
        self._version, self._damage = report.version, ""
        return report

    async def _sleep(self) -> None:
        self._asleep = True
        _check_acks(
            await self._within(self._engine.sleep(level=1), "sleep", self._waits.rank_timeout_s), "sleep"
        )  # level 2 cannot be woken

    async def _wake(self) -> None:
        if self._asleep:
            _check_acks(await self._within(self._engine.wake_up(), "wake_up", self._waits.rank_timeout_s), "wake_up")
            self._asleep = False

    async def _call(self, method: str, *args: Any, limit_s: float) -> Mapping[str, Any]:
        """Call the worker extension; the engine reports what goes wrong as a value."""
        async with _limit(limit_s, method):
            results = await self._engine.collective_rpc(method, args=args)
        return _only(results, method)

    async def _within(self, work: Awaitable[_T], what: str, limit_s: float) -> _T:
        async with _limit(limit_s, what):
            return await work


@asynccontextmanager
async def _limit(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise WorkerTimeout(f"the engine did not finish {what} within {seconds:g} s") from error


def _only(results: Any, method: str) -> Mapping[str, Any]:
    """The answer of the one worker of the one stage.

    Raises:
        WorkerError: it is an error, or that the call is not supported, both of which the engine returns as values.
        ProtocolError: there is none, or more than one.
    """
    while isinstance(results, list | tuple) and len(results) == 1:
        (results,) = results
    if not isinstance(results, Mapping):
        raise ProtocolError(f"the engine answered {method} with {results!r}, not with one value of one worker")
    if results.get("error") or results.get("todo") or results.get("supported") is False:
        kind = getattr(errors, str(results.get("type")), WorkerError)
        raise kind(f"the engine failed on {method}: {results.get('error') or dict(results)}")
    return results


def _field(answer: Mapping[str, Any], field: str, method: str) -> Any:
    if field not in answer:
        raise ProtocolError(f"the engine's answer to {method} lacks {field!r}: {sorted(answer)}")
    return answer[field]


def _check_acks(acks: Any, what: str) -> None:
    """Check what sleep and wake return: a list of acknowledgements, failures among them."""
    failed = [ack for ack in acks if getattr(ack, "status", None) != "SUCCESS"]
    if failed or not acks:
        why = getattr(failed[0], "error_msg", failed[0]) if failed else "no worker answered"
        raise WorkerError(f"the engine failed on {what}: {why}")


def _versions(records: Sequence[Record]) -> tuple[int, int]:
    """Of the weights at the first and the last denoising step of a micro-batch's samples."""
    found = {(record.get("version"), record.get("version_end")) for record in records}
    if len(found) > 1 or None in next(iter(found)):
        raise InvariantViolation(f"the samples of one micro-batch have the weights of different versions: {found}")
    ((first, last),) = found
    return int(first or 0), int(last or 0)


def _plain_family(config: RunConfig) -> PipelineFamily:
    """The family without any part of its model: its sizes and its noise levels."""
    module, _, name = families.lookup(config.model.family).target.partition(":")
    family: PipelineFamily = getattr(import_module(module), name)(
        model=config.model, sampling=config.sampling, parts=frozenset()
    )
    return family


def _takes(function: Any, parameter: str) -> bool:
    return callable(function) and parameter in inspect.signature(function).parameters


def _names(function: Any) -> tuple[str, ...]:
    """The names and strings in a function's code."""
    code = getattr(function, "__code__", None)
    return () if code is None else (*code.co_names, *(each for each in code.co_consts if isinstance(each, str)))
