"""The adapter of vLLM-Omni against a stand-in with its shapes; ``experiments/engines/omni.py`` runs the real one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from digen.config import RunConfig
from digen.diffusion.algorithms.base import build_algorithm
from digen.diffusion.engines.declaration import check
from digen.diffusion.engines.samples import Record, Sample, answer, requests
from digen.diffusion.engines.vllm_omni import Api, VllmOmniGenerator, installed
from digen.diffusion.families.base import Conditioning
from digen.diffusion.families.flux import Flux
from digen.errors import (
    ConfigError,
    DigenError,
    InvariantViolation,
    NumericsError,
    ProtocolError,
    WorkerError,
    WorkerTimeout,
)
from digen.presets import SIZES
from digen.types import GroupSlice, LoadReport, MicroBatch, Payload, Prompt, Publication

PROMPTS = (Prompt("a red square"), Prompt("two blue circles"))


@dataclass
class Params:
    """``OmniDiffusionSamplingParams``."""

    seed: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int = 1
    num_inference_steps: int | None = None
    return_trajectory_latents: bool = False
    lora_request: Any = None
    extra_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoraRequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class Output:
    """``OmniRequestOutput``."""

    trajectory_latents: Any
    error: str | None = None


@dataclass
class Ack:
    """``OmniACK``."""

    status: str
    error_msg: str | None = None


class StandIn:
    """Like ``AsyncOmni``, with the pipelines' own logic and a real network: one batch at a time, the rest queued."""

    family: Flux
    made: list[StandIn]

    def __init__(self, model: str, **arguments: Any) -> None:
        self.arguments = {"model": model, **arguments}
        self.calls: list[str] = []
        self.requests: list[tuple[str, Params]] = []
        self.version = 0
        self.change: Callable[[str, Record], Record | None] = lambda name, record: record
        self.loads: Callable[[Publication], Any] = self._loaded
        self.acks: list[Any] = [Ack("SUCCESS")]
        self._queue: list[tuple[Params, asyncio.Future[Record]]] = []
        self._open = asyncio.Event()
        self._open.set()
        self._busy = False
        type(self).made.append(self)

    async def generate(
        self, prompt: Any, *, request_id: str, sampling_params_list: list[Params]
    ) -> AsyncIterator[Output]:
        assert prompt == {"prompt": ""}
        (params,) = sampling_params_list
        self.requests.append((request_id, params))
        future: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._queue.append((params, future))
        asyncio.get_running_loop().call_soon(self._wake)
        record = self.change(request_id, await future)
        yield Output({})  # what the engine emits before the last one counts for nothing
        yield Output(record) if record is not None else Output(None, error="out of memory")

    def _wake(self) -> None:
        self._worker = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        while self._busy or not self._open.is_set():  # noqa: ASYNC110 - one turn of the loop at a time
            await asyncio.sleep(0)
        size = self.arguments["max_num_seqs"]
        batch, self._queue = self._queue[:size], self._queue[size:]
        if not batch:
            return
        self._busy = True
        self.calls.append(f"batch of {len(batch)}")
        samples = [msgspec.convert(params.extra_args["digen"], Sample) for params, _ in batch]
        version = self.version
        for _ in range(3):
            await asyncio.sleep(0)
        records = answer(self.family, samples, [params.extra_args["conditioning"] for params, _ in batch])
        self._busy = False
        for record, (_, future) in zip(records, batch, strict=True):
            if not future.cancelled():
                future.set_result(record | {"version": version, "version_end": self.version})

    async def pause_generation(self, *, mode: str) -> None:
        self._open.clear()
        while self._busy:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self._open.set()

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Any:
        self.calls.append(method)
        if method == "digen_encode":
            rows = [self.family.encode([Prompt(text)]) for text in args[0]]
            return [[{"conditioning": {name: torch.cat([row[name] for row in rows]) for name in rows[0]}}]]
        assert not self._open.is_set(), "weights were replaced while the engine was not paused"
        answered = self.loads(args[0])
        return await answered if asyncio.iscoroutine(answered) else answered

    def _loaded(self, published: Publication) -> Any:
        self.version = published.version
        report = LoadReport(published.version, published.checksum or 0, published.num_tensors)
        return [[{"report": msgspec.to_builtins(report)}]]

    async def sleep(self, *, level: int) -> list[Any]:
        self.calls.append(f"sleep {level}")
        return self.acks

    async def wake_up(self) -> list[Any]:
        self.calls.append("wake")
        return self.acks


class Manager:
    """``DiffusionLoRAManager``."""

    pipeline: Any = None

    def _load_adapter(self, request: Any) -> Any:
        hook = getattr(self.pipeline, "_load_diffusion_lora_adapter", None)
        return hook(request) if hook else None


class Batching:
    supports_request_batch = True


def fields(*names: str) -> Any:
    return make_dataclass("Fields", [(name, Any, None) for name in names])


API = Api(
    release="0.30.0",
    engine=StandIn,
    sampling_params=Params,
    lora_request=LoraRequest,
    output=fields("trajectory_latents"),
    engine_config=fields("custom_pipeline_args", "worker_extension_cls", "request_batch_max_wait_ms"),
    lora_manager=Manager,
    pipeline=Batching,
)


@pytest.fixture(scope="module")
def data(tiny_model: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    folder = tiny_model("flux")

    def make(**sections: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, dict[str, Any]] = {
            "model": {"family": "flux", "path": str(folder), "forward_batch": 3},
            "plan": {"samples_per_prompt": 4},
            "sampling": {"num_inference_steps": 4} | SIZES["flux"],
            "algorithm": {"name": "flow_grpo"},
            "reward": {"name": "jpeg_incompressibility"},
            "workers": {"scorers": 1, "engines": {"gen0": "vllm_omni"}, "python": {"gen0": "/opt/omni/bin/python"}},
            "evaluation": {"at_start": False, "at_end": False},
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section
        return values

    return make


@pytest.fixture(scope="module", autouse=True)
def _network(data: Callable[..., dict[str, Any]]) -> None:
    config = RunConfig.model_validate(data())
    StandIn.family = Flux(model=config.model, sampling=config.sampling)
    StandIn.made = []


@pytest.fixture
def make(data: Callable[..., dict[str, Any]]) -> Iterator[Callable[..., tuple[VllmOmniGenerator, StandIn]]]:
    made = []

    def build(**sections: dict[str, Any]) -> tuple[VllmOmniGenerator, StandIn]:
        config = RunConfig.model_validate(data(**sections))
        made.append(VllmOmniGenerator(config.model_dump(mode="json"), api=API))
        return made[-1], StandIn.made[-1]

    yield build
    for generator in made:
        generator._loop.close()


def micro_batch(step: int = 0, index: int = 0, counts: tuple[int, int] = (3, 1)) -> MicroBatch:
    pieces = [
        GroupSlice(f"s{step}p{index}{number}", PROMPTS[number], 0, count, 4)
        for number, count in enumerate(counts)
        if count
    ]
    return MicroBatch(7, step, index, tuple(pieces))


def published(version: int = 1, **changed: Any) -> Publication:
    values: dict[str, Any] = {"payload": Payload({}), "checksum": 99, "num_tensors": 5, "nbytes": 40}
    return Publication(version=version, **values | changed)


@pytest.mark.parametrize(
    ("algorithm", "sampling"),
    [
        ("flow_grpo", {}),
        ("mix_grpo", {"num_inference_steps": 6}),
        ("grpo_guard", {"noise_level": 0.5}),
        ("diffusion_nft", {"solver": "dpm++"}),
    ],
)
def test_a_rollout_is_that_of_a_generator_on_diffusers(
    make: Callable[..., Any], data: Callable[..., dict[str, Any]], algorithm: str, sampling: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {"algorithm": {"name": algorithm}, "sampling": {"num_inference_steps": 4} | sampling}
    sections["sampling"] |= SIZES["flux"]
    generator, engine = make(**sections)
    encoded = generator.encode(PROMPTS)
    assert encoded.prompts == PROMPTS
    batch, other = micro_batch(step=2), build_algorithm(RunConfig.model_validate(data(**sections)))
    rows = {prompt.text: StandIn.family.encode([prompt]) for prompt in PROMPTS}
    taken = [rows[piece.prompt.text] for piece, _ in batch.samples()]
    conditioning = {name: torch.cat([row[name] for row in taken]) for name in taken[0]}
    schedule = StandIn.family.schedule(sections["sampling"]["num_inference_steps"])
    expected = other.draw(StandIn.family, batch, conditioning, schedule, unit=3).arrays()
    for encoding in (encoded, None):
        rollout = generator.generate(batch, encoding)
        assert (rollout.version, rollout.version_end) == (0, 0)
        assert rollout.payload.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(rollout.payload[name], array, err_msg=name)
    assert engine.calls[1:3] == ["batch of 3", "batch of 1"], "forward_batch is the engine's batch"


def test_a_request_carries_all_that_decides_its_trajectory(make: Callable[..., Any]) -> None:
    generator, engine = make(workers={"engine_args": {"request_batch_max_wait_ms": 20.0}})
    generator.generate(micro_batch())
    assert [name for name, _ in engine.requests] == ["s0p00-0", "s0p00-1", "s0p00-2", "s0p01-0"]
    params = engine.requests[3][1]
    assert params.seed is not None, "without a seed the engine draws one"
    assert (params.height, params.width, params.num_inference_steps) == (16, 24, 4)
    sample = msgspec.convert(params.extra_args["digen"], Sample)
    assert (sample.uid, sample.number, sample.group_size) == ("s0p01", 0, 4)
    assert (sample.walk.run_seed, sample.walk.step, sample.walk.unit) == (7, 0, 3)
    assert (sample.walk.kernel, sample.walk.noise_level, sample.walk.noisy) == ("flow_sde", 0.7, (0, 1, 2))
    assert {len(tensor) for tensor in params.extra_args["conditioning"].values()} == {1}
    assert engine.arguments["max_num_seqs"] == 3
    assert engine.arguments["dtype"] == "float32"
    assert engine.arguments["request_batch_max_wait_ms"] == 20.0, "workers.engine_args"
    assert Path(engine.arguments["model"]).is_dir()
    assert engine.arguments["custom_pipeline_args"]["pipeline_class"].endswith(".omni_pipelines.Batching")


def test_samples_of_different_walks_in_one_batch_are_drawn_apart(data: Callable[..., dict[str, Any]]) -> None:
    """The engine puts requests together whatever their noise level, window and step."""
    family = StandIn.family
    samples: list[Sample] = []
    for noise_level, step in ((0.7, 0), (0.3, 0), (0.7, 5)):
        algorithm = build_algorithm(RunConfig.model_validate(data(sampling={"noise_level": noise_level})))
        samples += requests(algorithm, micro_batch(step), family.schedule(4), unit=3)
    order = sorted(range(len(samples)), key=lambda row: row % 5)
    mixed = [samples[row] for row in order]
    encodings = [family.encode([PROMPTS[sample.uid.endswith("1")]]) for sample in mixed]
    together = answer(family, mixed, encodings)
    for walk in dict.fromkeys(sample.walk for sample in mixed):
        rows = [row for row, sample in enumerate(mixed) if sample.walk == walk]
        alone = answer(family, [mixed[row] for row in rows], [encodings[row] for row in rows])
        for row, record in zip(rows, alone, strict=True):
            assert torch.equal(record["latents"], together[row]["latents"])
            assert record["sample"] == [mixed[row].uid, mixed[row].number]
    assert not torch.equal(together[order.index(0)]["log_probs"], together[order.index(4)]["log_probs"])


def altered(record: Record, name: str, change: Callable[[Any], Any]) -> Record:
    return record | {name: change(record[name])}


WRONG: dict[str, tuple[Callable[[Record], Any], type[DigenError], str]] = {
    "seeds": (lambda r: altered(r, "seeds", lambda s: [s[0] + 1, s[1]]), ProtocolError, r"s0p00/1 with another seeds"),
    "sample": (lambda r: altered(r, "sample", lambda s: [s[0], 3]), ProtocolError, r"another sample than asked"),
    "window": (lambda r: altered(r, "walk", lambda w: w | {"noisy": (0,)}), ProtocolError, r"another walk than asked"),
    "levels": (lambda r: altered(r, "levels", lambda t: t * 0.9), ProtocolError, r"other levels than asked.*shifted"),
    "times": (lambda r: altered(r, "times", lambda t: t.flip(0)), ProtocolError, r"other times than asked"),
    "noise": (lambda r: altered(r, "latents", lambda t: t.roll(1, 1)), ProtocolError, r"from another noise than that"),
    "short": (lambda r: altered(r, "latents", lambda t: t[:-1]), ProtocolError, r"latents of sample s0p00/1 are"),
    "half": (lambda r: altered(r, "log_probs", lambda t: t.half()), ProtocolError, r"log_probs of sample s0p00/1"),
    "lacking": (lambda r: {k: v for k, v in r.items() if k != "walk"}, ProtocolError, r"lacks 'walk'"),
    "stale": (lambda r: altered(r, "version", lambda v: v - 1), InvariantViolation, r"different versions"),
    "unstamped": (lambda r: altered(r, "version_end", lambda v: None), InvariantViolation, r"different versions"),
    "infinite": (
        lambda r: {"error": "latent of sample s0p00/1 is not finite"},
        NumericsError,
        r"s0p00/1 is not finite",
    ),
    "plain": (lambda r: torch.zeros(3), ProtocolError, r"without a trajectory: Tensor"),
    "failed": (lambda r: None, WorkerError, r"failed on sample s0p00-1: out of memory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_engine_used_must_be_what_it_was_asked_for(make: Callable[..., Any], case: str) -> None:
    change, kind, message = WRONG[case]
    generator, engine = make()
    engine.change = lambda name, record: change(record) if name == "s0p00-1" else record
    with pytest.raises(kind, match=message):
        generator.generate(micro_batch())
    engine.change = lambda name, record: record
    assert generator.generate(micro_batch()).version == 0, "it goes on"


def test_a_sample_that_is_not_finite_is_an_error_that_names_it() -> None:
    family = StandIn.family
    encodings = [family.encode([PROMPTS[0]])] * 2
    broken: Conditioning = {name: tensor * torch.inf for name, tensor in encodings[0].items()}
    config = build_algorithm(RunConfig.model_validate({"algorithm": {"name": "flow_grpo"}}))
    samples = requests(config, micro_batch(counts=(2, 0)), family.schedule(4), unit=2)
    records = answer(family, samples, [encodings[0], broken])
    assert all("not finite" in record["error"] and "s0p00/1" in record["error"] for record in records)


def test_a_load_pauses_loads_and_resumes(make: Callable[..., Any]) -> None:
    generator, engine = make()
    assert generator.load(published(3)) == LoadReport(3, 99, 5)
    assert engine.calls == ["pause keep", "digen_load", "resume"]
    assert generator.version == 3
    assert generator.generate(micro_batch()).version == 3


def test_no_load_while_a_batch_runs_and_what_is_queued_gets_the_new_weights(make: Callable[..., Any]) -> None:
    generator, engine = make(model={"forward_batch": 4})
    encoded = generator.encode(PROMPTS)

    async def together() -> list[int]:
        drawn = [asyncio.create_task(generator._generate(micro_batch(0, index), encoded)) for index in range(3)]
        while "batch of 4" not in engine.calls:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        await generator._load(published(1))
        return [(await each).version for each in drawn]

    assert generator._loop.run(together()) == [0, 1, 1]
    assert engine.calls[1:5] == ["batch of 4", "pause keep", "digen_load", "resume"]


def hangs(_: Publication) -> Any:
    return asyncio.sleep(60)


def raises(_: Publication) -> Any:
    raise RuntimeError("connection lost")


FAILURES: dict[str, tuple[Callable[[Publication], Any], type[Exception], str]] = {
    "error": (lambda p: [{"error": "no such method"}], WorkerError, "digen_load: no such method"),
    "typed": (lambda p: [[{"error": "2 unknown", "type": "ConfigError"}]], ConfigError, "digen_load: 2 unknown"),
    "todo": (lambda p: [{"todo": True, "stage_id": 0}], WorkerError, "failed on digen_load"),
    "unsupported": (lambda p: [{"supported": False}], WorkerError, "failed on digen_load"),
    "nobody": (lambda p: [[]], ProtocolError, "not with one value of one worker"),
    "several": (lambda p: [[{"report": {}}, {"report": {}}]], ProtocolError, "not with one value of one worker"),
    "empty": (lambda p: [[{"ok": True}]], ProtocolError, "lacks 'report'"),
    "unreadable": (lambda p: [[{"report": {"version": "1"}}]], ProtocolError, "cannot be read"),
    "version": (lambda p: report(version=0), ProtocolError, "reports LoadReport"),
    "checksum": (lambda p: report(checksum=98), ProtocolError, "reports LoadReport"),
    "fewer": (lambda p: report(num_tensors=4), ProtocolError, "reports LoadReport"),
    "raised": (raises, RuntimeError, "connection lost"),
    "hung": (hangs, WorkerTimeout, r"did not finish digen_load within 0\.02 s"),
}


def report(**changed: int) -> Any:
    return [[{"report": {"version": 1, "checksum": 99, "num_tensors": 5} | changed}]]


@pytest.mark.parametrize("case", FAILURES)
def test_a_load_that_fails_resumes_and_nothing_is_drawn_until_one_succeeds(make: Callable[..., Any], case: str) -> None:
    loads, kind, message = FAILURES[case]
    generator, engine = make(workers={"rank_timeout_s": 0.01, "weights": {"timeout_s": 0.01}})
    engine.loads = loads
    with pytest.raises(kind, match=message):
        generator.load(published(1))
    assert engine.calls == ["pause keep", "digen_load", "resume"]
    assert generator.version == 0
    with pytest.raises(InvariantViolation, match="weights of version 1 were not loaded"):
        generator.generate(micro_batch())
    engine.loads = engine._loaded
    generator.load(published(2))
    assert generator.generate(micro_batch()).version == 2


def test_a_checksum_that_was_not_known_is_not_compared_and_no_tensors_are_an_error(make: Callable[..., Any]) -> None:
    generator, engine = make()
    assert generator.load(published(1, checksum=None)).version == 1
    with pytest.raises(ConfigError, match="version 2 hold no tensors"):
        generator.load(published(2, num_tensors=0))
    assert engine.calls.count("digen_load") == 1


def test_every_load_of_an_adapter_has_an_id_of_its_own(make: Callable[..., Any]) -> None:
    generator, engine = make(model={"lora": {"rank": 4}, "forward_batch": 4})
    generator.generate(micro_batch())
    for version in (1, 2, 2):  # a resumed run publishes a version again
        generator.load(published(version))
        generator.generate(micro_batch())
    requests = [params.lora_request for _, params in engine.requests[::4]]
    assert requests[0] is None, "the model's folder"
    assert [request.lora_int_id for request in requests[1:]] == [1, 2, 3]
    assert all(Path(request.lora_path).is_absolute() for request in requests[1:]), "else the engine asks the hub"


def test_asleep_between_assists(make: Callable[..., Any]) -> None:
    generator, engine = make(workers={"engine_args": {"enable_sleep_mode": True}})
    generator.switch("train")
    with pytest.raises(InvariantViolation, match="sleeps"):
        generator.generate(micro_batch())
    with pytest.raises(InvariantViolation, match="sleeps"):
        generator.load(published())
    generator.switch("generate")
    assert engine.calls == ["sleep 1", "wake"], "level 2 cannot be woken"
    assert generator.generate(micro_batch()).version == 0
    engine.acks = [Ack("ERROR", "cumem allocator is not available")]
    with pytest.raises(WorkerError, match="failed on sleep: cumem allocator is not available"):
        generator.switch("train")
    with pytest.raises(InvariantViolation, match="'sideways'"):
        generator.switch("sideways")
    plain, _ = make()
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        plain.switch("train")


def test_an_engine_that_does_not_start(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, model: str, **arguments: Any) -> None:
        raise ValueError("out of memory")

    monkeypatch.setattr(StandIn, "__init__", refuse)
    with pytest.raises(ConfigError, match=r"vllm-omni 0\.30\.0 does not start: out of memory"):
        make()


def without(kind: type, *names: str) -> type:
    return type(kind.__name__, (kind,), dict.fromkeys(names))


MISSING: dict[str, tuple[Mapping[str, Any], str]] = {
    "no pause": ({"engine": without(StandIn, "pause_generation")}, r"AsyncOmni\.pause_generation\(mode=\)"),
    "old pause": (
        {"engine": type("Old", (StandIn,), {"pause_generation": lambda self: None})},
        r"AsyncOmni\.pause_generation\(mode=\)",
    ),
    "no level": ({"engine": type("Old", (StandIn,), {"sleep": lambda self: None})}, r"AsyncOmni\.sleep\(level=\)"),
    "one by one": ({"pipeline": type("Single", (), {})}, r"Single\.supports_request_batch"),
    "no hook": (
        {"lora_manager": type("Old", (), {"_load_adapter": lambda self, request: request.lora_path})},
        "hook _load_diffusion_lora_adapter",
    ),
    "no field": ({"sampling_params": fields("seed", "lora_request")}, r"Fields\.extra_args"),
    "no wait": ({"engine_config": fields("custom_pipeline_args", "worker_extension_cls")}, "request_batch_max_wait_ms"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_release_without_a_feature_is_refused_by_what_it_lacks(case: str) -> None:
    changed, message = MISSING[case]
    API.check()
    with pytest.raises(ConfigError, match=f"vllm-omni 0.27.1 in .*{message}.*needs vllm-omni 0.30") as caught:
        replace(API, release="0.27.1", **changed).check()
    assert sys.executable in str(caught.value)


def test_an_interpreter_without_the_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"has no vllm-omni; set workers\.python.*0\.30") as caught:
        installed("flux")
    assert sys.executable in str(caught.value)


CONFIGS: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "unknown": ({"workers": {"engines": {"gen7": "vllm_omni"}}}, r"names 'gen7'; the generators are gen0"),
    "trainer": ({"workers": {"engines": {"trainer": "vllm_omni"}}}, r"names 'trainer'"),
    "colocated": ({"schedule": {"mode": "colocated"}}, r"in mode colocated the trainer generates"),
    "family": ({"model": {"family": "digits", "path": None}}, r"serves flux, qwen_image, sd3, wan, not .* 'digits'"),
    "scorers": (
        {"workers": {"scorers": 0}},
        r"gen0 runs vllm_omni, which neither decodes nor scores.*workers\.scorers",
    ),
    "evaluation": ({"evaluation": {"every": 5}}, r"switch off evaluation\.every and evaluate checkpoints"),
    "ranks": ({"workers": {"ranks": {"gen0": 2}}}, r"gen0 runs vllm_omni on one GPU, but has 2 ranks"),
    "argument": ({"workers": {"engine_args": {"dtype": "float16"}}}, r"engine_args\.dtype cannot be set.*model\.dtype"),
    "in vain": ({"workers": {"engines": {}, "engine_args": {"seed": 1}}}, r"engine_args is set, but no generator"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_cannot_work_are_refused_by_field(data: Callable[..., dict[str, Any]], case: str) -> None:
    sections, message = CONFIGS[case]
    check(RunConfig.model_validate(data()))
    with pytest.raises(ConfigError, match=message):
        check(RunConfig.model_validate(data(**sections)))


def test_an_algorithm_that_draws_by_itself_is_refused(data: Callable[..., dict[str, Any]]) -> None:
    algorithm = build_algorithm(RunConfig.model_validate(data()))
    algorithm.__class__ = type("Own", (type(algorithm),), {"draw": lambda self, *args, **kwargs: None})
    with pytest.raises(ConfigError, match=r"draws its samples itself \(Own\.draw\)"):
        requests(algorithm, micro_batch(), StandIn.family.schedule(4), unit=1)


def test_the_driver_checks_engines_without_importing_one() -> None:
    code = (
        "import sys, digen.diffusion.engines.declaration\n"
        "print([name for name in ('torch', 'vllm', 'vllm_omni', 'diffusers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
