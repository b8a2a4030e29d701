"""digen's pipelines in vLLM-Omni: imported only in the engine's process, by the names that its adapter gives it.

A pipeline of the engine brings the network and the encoders, digen's own family everything else: the noise levels, the
guidance, and with :mod:`digen.diffusion.sampler` the transitions, their noise and their log-probabilities. So a
trajectory differs from one of diffusers only by what the engine's kernels round differently.

Written against vllm-omni 0.30.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline
from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from digen.config import LoraSection, ModelSection, RunConfig
from digen.diffusion.channels import Receiver
from digen.diffusion.engines.samples import Sample, adapter_path, answer
from digen.diffusion.families.base import Conditioning, compute_dtype
from digen.diffusion.families.flux import Flux
from digen.diffusion.families.pipeline import Part, PipelineFamily
from digen.diffusion.families.qwen_image import QwenImage
from digen.diffusion.families.sd3 import StableDiffusion3
from digen.diffusion.families.wan import Wan
from digen.errors import ConfigError, DigenError, ProtocolError
from digen.types import Prompt, Publication

_KEPT_ADAPTERS = 2
"""The one of the last load, and the one before: a request that was queued before the load may still name it."""

_ROUNDING = 1e-2
"""By how much the squared norm of an adapter may change in the engine's precision."""


class _Served(PipelineFamily):
    """A family whose network and encoders are those of the engine's pipeline."""

    def __init__(self, engine: Any, config: RunConfig) -> None:
        self._engine = engine
        super().__init__(model=config.model, sampling=config.sampling, parts=frozenset({"denoise", "encode"}))

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the engine."""
        dtype: torch.dtype = self._engine.od_config.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the engine is."""
        return torch.device(self._engine.device)

    def _load_denoiser(self, model: ModelSection) -> Any:
        return self._engine.transformer

    def _load_pipeline(self, model: ModelSection, parts: frozenset[Part]) -> Any:
        return self._engine

    def _add_adapter(self, lora: LoraSection) -> None:
        """The engine's own manager has it."""


class _ServedFlux(_Served, Flux):
    def encode_texts(self, texts: list[str]) -> Conditioning:
        states, pooled, _ = self.pipe.encode_prompt(texts, texts, max_sequence_length=self.max_tokens)
        return {"encoder_hidden_states": states, "pooled_projections": pooled}


class _ServedQwenImage(_Served, QwenImage):
    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        length = conditioning["encoder_hidden_states"].shape[1]
        output: Tensor = self.network(
            hidden_states=latents,
            timestep=(times * 1000).to(self.dtype) / 1000,
            img_shapes=[[(1, self._rows, self._columns)]] * len(latents),
            txt_seq_lens=[length] * len(latents),
            **conditioning,
        ).sample
        return output


class _ServedStableDiffusion3(_Served, StableDiffusion3):
    def encode_texts(self, texts: list[str]) -> Conditioning:
        states, pooled = self.pipe.encode_prompt(texts, texts, texts, max_sequence_length=self.max_tokens)
        return {"encoder_hidden_states": states, "pooled_projections": pooled}


class _ServedWan(_Served, Wan):
    pass


class _Adapter(msgspec.Struct, frozen=True):
    """Published low-rank weights."""

    version: int
    tensors: dict[str, Any]


class _Rollouts:
    """What digen adds to a pipeline of the engine."""

    transformer: Any
    od_config: Any

    supports_request_batch: ClassVar[bool] = True
    family_class: ClassVar[type[_Served]]
    frames: ClassVar[bool] = False
    """Whether a sample is a video."""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]  # of the engine's pipeline
        self.digen_version = 0
        """Optimizer steps in the weights; 0 is the model's folder."""
        self.digen_adapters: dict[int, _Adapter] = {}
        self.digen_num_bound = 0
        """Modules that the last activated adapter was bound to."""
        self.digen_bound: dict[str, Tensor] = {}
        """Every tensor of the folder's network by its name there, as a view of where the engine keeps it."""
        self.digen_config = RunConfig.model_validate(od_config.custom_pipeline_args["digen"])
        """Of the run."""

    @cached_property
    def digen_family(self) -> _Served:
        """The family with this pipeline's network; made when the weights are there."""
        return self.family_class(self, self.digen_config)

    @cached_property
    def digen_parameters(self) -> dict[str, Tensor]:
        """What is published, by the names that the trainer has for it: all of the network, or an adapter.

        The engine's network is written in place; an adapter's tensors are for the engine's own manager to take.
        """
        lora = self.digen_config.model.lora
        if lora is None:
            network = self.transformer
            parameters, buffers = (_storages(each) for each in (network.parameters(), network.buffers()))
            trained = {
                name: view
                for name, view in self.digen_bound.items()
                if view.untyped_storage().data_ptr() not in buffers - parameters
            }
            lost = [name for name, view in trained.items() if view.untyped_storage().data_ptr() not in parameters]
            if lost or not trained:
                raise ConfigError(
                    f"{len(lost)} of {len(trained)} tensors of the network are not where the engine loaded them "
                    f"{lost[:3]}: it has packed or quantized them, and they cannot be replaced"
                )
            return trained
        targets, dtype = lora.targets or self.family_class.lora_targets, compute_dtype(self.od_config.dtype)
        adapter = {}
        for name, view in self.digen_bound.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and any(f".{module}".endswith(f".{target}") for target in targets):
                num_out, num_in = view.shape
                adapter[f"{module}.lora_A.default.weight"] = torch.zeros(lora.rank, num_in, dtype=dtype)
                adapter[f"{module}.lora_B.default.weight"] = torch.zeros(num_out, lora.rank, dtype=dtype)
        return adapter

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the folder's weights by the engine's own loaders, and note where each tensor went."""
        places = _Places()

        def seen() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                places.begin(name.removeprefix("transformer.") if name.startswith("transformer.") else "", tensor)
                yield name, tensor

        with places:
            loaded: set[str] = super().load_weights(seen())  # type: ignore[misc]  # of the engine's pipeline
        self.digen_bound |= places.found
        return loaded

    @torch.no_grad()
    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Draw what the batch's requests ask for; a warm-up of the engine is one forward of one sample."""
        if req.is_dummy_run():
            self._warm_up()
            return [self._output({})]
        begin = self._versions(req)
        arguments = [params.extra_args for params in req.sampling_params_list]
        samples = [msgspec.convert(each["digen"], Sample) for each in arguments]
        records = answer(self.digen_family, samples, [each["conditioning"] for each in arguments])
        end = self._versions(req)
        return [
            self._output(record | {"version": first, "version_end": last})
            for record, first, last in zip(records, begin, end, strict=True)
        ]

    def _versions(self, req: DiffusionRequestBatch) -> list[int]:
        """Of the weights that each request of a batch is drawn with at this moment."""
        adapters = [params.lora_request for params in req.sampling_params_list]
        return [
            self.digen_version if adapter is None else self.digen_adapters[adapter.lora_int_id].version
            for adapter in adapters
        ]

    def _warm_up(self) -> None:
        family = self.digen_family
        conditioning = family.encode([Prompt("warm-up")])
        latents = torch.zeros(1, *family.latent_shape, device=family.device)
        family.predict(latents, latents.new_ones(1), conditioning)

    def _output(self, record: dict[str, Any]) -> DiffusionOutput:
        """An answer of the engine: its fields for trajectories may be dictionaries, which it passes on as they are.

        Without a picture it would drop them, so there is a blank one.
        """
        return DiffusionOutput(output=torch.zeros(1, 3, *(1,) * self.frames, 8, 8), trajectory_latents=record)

    def _load_diffusion_lora_adapter(
        self, *, lora_request: LoRARequest, lora_path: str, dtype: torch.dtype
    ) -> tuple[LoRAModel, PEFTHelper]:
        """The engine's hook: the adapter comes from memory, not from ``lora_path``."""
        number, lora = lora_request.lora_int_id, self.digen_config.model.lora
        if number not in self.digen_adapters or lora is None:
            raise ConfigError(f"adapter {number} ({lora_path}) is not here; these are: {sorted(self.digen_adapters)}")
        modules = dict(self.transformer.named_modules())
        named, targets = {}, set()
        for name, tensor in self.digen_adapters[number].tensors.items():
            module, _, half = name.rpartition(".lora_")
            if module not in modules and module.endswith(".to_out.0"):
                module = module.removesuffix(".0")  # some of the engine's networks have no dropout beside it
            named[f"base_model.model.transformer.{module}.lora_{half[0]}.weight"] = tensor
            targets.add(f"transformer.{module}")
        helper = PEFTHelper.from_dict({"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(targets)})
        return LoRAModel.from_lora_tensors(number, named, helper, device="cpu", dtype=dtype), helper

    def _validate_diffusion_lora_binding(self, *, lora_model: LoRAModel, bound_lora_names: frozenset[str]) -> None:
        """The engine's hook: called with the names of what was bound, after it has checked that all were."""
        self.digen_num_bound = len(bound_lora_names)


class DigenFluxPipeline(_Rollouts, FluxPipeline):
    """FLUX.1."""

    family_class = _ServedFlux

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        # The engine reads this from its other networks to find adapters of fused projections; this one keeps it local.
        self.transformer.stacked_params_mapping = [
            *((".to_qkv", f".to_{half}", half) for half in "qkv"),
            *((".add_kv_proj", f".add_{half}_proj", half) for half in "qkv"),
        ]


class DigenQwenImagePipeline(_Rollouts, QwenImagePipeline):
    """Qwen-Image."""

    family_class = _ServedQwenImage


class DigenStableDiffusion3Pipeline(_Rollouts, StableDiffusion3Pipeline):
    """Stable Diffusion 3 and 3.5."""

    family_class = _ServedStableDiffusion3


class DigenWanPipeline(_Rollouts, Wan22Pipeline):
    """Wan 2.1, and those of Wan 2.2 that have one transformer."""

    family_class = _ServedWan
    frames = True


PIPELINES: dict[str, type] = {
    "flux": DigenFluxPipeline,
    "qwen_image": DigenQwenImagePipeline,
    "sd3": DigenStableDiffusion3Pipeline,
    "wan": DigenWanPipeline,
}
"""The pipeline of every family that is served."""


class _Places(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where the engine's loaders copy each tensor to: they fuse, rename and cut."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Tensor] = {}
        """Of every tensor that was copied as a whole, a view of what it was copied to."""
        self._name = ""
        self._shape = torch.Size()

    def begin(self, name: str, tensor: Tensor) -> None:
        """The copies that follow are of this tensor; without a name they are of no interest."""
        self._name, self._shape = name, tensor.shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._name and func in _COPIES and args[0].numel() == self._shape.numel():
            self.found[self._name] = args[0].view(self._shape)
        return func(*args, **(kwargs or {}))


_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar}


class DigenWorkerExtension(CustomPipelineWorkerExtension):
    """Calls of digen to the engine's worker, by ``collective_rpc``."""

    def digen_encode(self, texts: Sequence[str]) -> dict[str, Any]:
        """Encode prompts, one after the other: an encoder is not batch invariant."""
        family = self._digen_pipeline.digen_family
        with self._digen_context():
            rows = [family.encode([Prompt(text)]) for text in texts]
        return {"conditioning": {name: torch.cat([row[name].cpu() for row in rows]) for name in rows[0]}}

    def digen_load(self, published: Publication, number: int) -> dict[str, Any]:
        """Copy published weights into the network and read them back; an adapter becomes the new one ``number``.

        An error of digen is returned by its type's name: the engine keeps no more of an exception than its text.
        """
        pipeline = self._digen_pipeline
        try:
            with self._digen_context():
                report = self._digen_receiver.load(published, pipeline.digen_parameters)
                lora = pipeline.digen_config.model.lora
                if lora is None:
                    pipeline.digen_version = published.version
                else:
                    self._digen_activate(published.version, number, lora.alpha / lora.rank)
        except DigenError as error:
            return {"error": str(error), "type": type(error).__name__}
        return {"report": msgspec.to_builtins(report)}

    def _digen_activate(self, version: int, number: int, scale: float) -> None:
        """Register and activate the adapter, and read back what is bound."""
        pipeline, manager = self._digen_pipeline, self.lora_manager
        tensors = {name: tensor.clone() for name, tensor in pipeline.digen_parameters.items()}
        pipeline.digen_adapters[number] = _Adapter(version, tensors)
        for old in sorted(pipeline.digen_adapters)[:-_KEPT_ADAPTERS]:
            del pipeline.digen_adapters[old]
        pipeline.digen_num_bound = 0
        manager.set_active_adapter(LoRARequest(f"digen-{version}", number, adapter_path(number)), 1.0)
        layers = manager._lora_modules.values()
        stacks = [stack for layer in layers for stack in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
        held, wanted = sum(map(_energy, stacks)), 0.0
        for name, tensor in tensors.items():
            wanted += _energy(tensor.to(manager.dtype) * (1.0 if ".lora_A." in name else scale))
        if pipeline.digen_num_bound * 2 != len(tensors) or abs(held - wanted) > _ROUNDING * wanted:
            raise ProtocolError(
                f"adapter of version {version}: {pipeline.digen_num_bound} of {len(tensors) // 2} modules are bound, "
                f"and the squared norm of their weights is {held}, not {wanted}"
            )

    @cached_property
    def _digen_receiver(self) -> Receiver:
        return Receiver(self._digen_pipeline.digen_config.workers.weights)

    @property
    def _digen_pipeline(self) -> Any:
        return self.model_runner.pipeline

    @contextmanager
    def _digen_context(self) -> Iterator[None]:
        with (
            torch.no_grad(),
            set_forward_context(vllm_config=self.vllm_config, omni_diffusion_config=self.od_config),
            set_current_vllm_config(self.vllm_config),
        ):
            yield


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _energy(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
