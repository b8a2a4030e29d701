"""A model in diffusers' layout: loading, adapters, guidance. What differs between models is in the other files here.

A family subclasses :class:`PipelineFamily`, names its classes and writes ``schedule``, ``encode_texts``, ``denoise``
and ``decode``. The pipeline's own methods encode and decode, so that digen and diffusers agree where they share a
step.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from digen.config import LoraSection, ModelSection, SamplingSection
from digen.diffusion.families import source
from digen.diffusion.families.base import Conditioning, Images, Schedule, align
from digen.errors import ConfigError
from digen.types import Prompt, derive_seed

Part = Literal["encode", "decode"]
"""What a worker needs of a model beside the denoiser. A trainer needs neither."""

NEGATIVE = "negative."
"""Prefix of the conditioning that classifier-free guidance leads away from."""


class PipelineFamily:
    """A loaded diffusers model; see :class:`digen.diffusion.families.base.Family` for the methods.

    Args:
        model: where it is, precision, device, adapter.
        sampling: size of a sample, guidance, negative prompt.
        parts: what is loaded beside the denoiser.
        keep_reference: keep what :meth:`reference` needs: nothing with an adapter, else a frozen copy.

    Raises:
        ConfigError: a component cannot be read, adapter targets match nothing, or a size does not fit the model.
    """

    pipeline: ClassVar[str]
    """The pipeline's class in diffusers; its own methods encode and decode."""
    denoiser: ClassVar[str] = "transformer"
    """The component that is trained."""
    denoiser_class: ClassVar[str]
    """Its class in diffusers."""
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    """Components that encode prompts."""
    decoders: ClassVar[tuple[str, ...]] = ("vae",)
    """Components that decode latents."""
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    """Modules that get an adapter by default."""
    default_guidance: ClassVar[float]
    """``sampling.guidance_scale`` where the config says nothing."""
    default_size: ClassVar[tuple[int, int, int]]
    """(frames, height, width) where the config says nothing; an image has one frame."""
    default_tokens: ClassVar[int]
    """``sampling.max_prompt_tokens`` where the config says nothing."""
    latent_shape: tuple[int, ...]

    def __init__(
        self,
        *,
        model: ModelSection,
        sampling: SamplingSection,
        parts: frozenset[Part] = frozenset({"encode", "decode"}),
        keep_reference: bool = False,
    ) -> None:
        self.folder = source(model)
        self.sampling = sampling
        frames, height, width = self.default_size
        self.size = (sampling.num_frames or frames, sampling.height or height, sampling.width or width)
        """(frames, height, width) of a sample."""
        self.guidance = self.default_guidance if sampling.guidance_scale is None else sampling.guidance_scale
        self.max_tokens = sampling.max_prompt_tokens or self.default_tokens
        self.network = self._load_denoiser(model)
        """The denoiser, in evaluation mode."""
        self._reference: torch.nn.Module | None = None
        self._lora = model.lora
        if model.lora is not None:
            self._add_adapter(model.lora)
        elif keep_reference:
            self._reference = copy.deepcopy(self.network).requires_grad_(requires_grad=False)
        self.pipe: Any = self._load_pipeline(model, parts) if parts else None
        """The pipeline without its denoiser, with the components that ``parts`` asks for, if any."""
        self._parts = parts

    # What a family writes

    def schedule(self, num_steps: int) -> Schedule:
        """The noise levels of a trajectory of ``num_steps`` transitions."""
        raise NotImplementedError

    def encode_texts(self, texts: list[str]) -> Conditioning:
        """Encode texts with the pipeline's own method, padded so that rows of different calls fit together."""
        raise NotImplementedError

    def denoise(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """One forward of :attr:`network`, without classifier-free guidance."""
        raise NotImplementedError

    def decode(self, latents: Tensor) -> Images:
        """Clean latents as images or videos."""
        raise NotImplementedError

    @property
    def classifier_free(self) -> bool:
        """Whether a prediction takes a second forward, with the negative prompt; distilled models are told guidance."""
        return self.guidance > 1

    def combine(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Classifier-free guidance: ``negative + guidance (positive - negative)``."""
        return negative + self.guidance * (positive - negative)

    # What all share

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and forward."""
        return cast("torch.dtype", self.network.dtype)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return cast("torch.device", self.network.device)

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The adapter's parameters, or all of the denoiser's."""
        return {name: parameter for name, parameter in self.network.named_parameters() if parameter.requires_grad}

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Forwards inside are of the model before any training: without the adapter, or of the frozen copy."""
        if self._lora is not None:
            self.network.disable_adapters()
            try:
                yield
            finally:
                self.network.enable_adapters()
            return
        if self._reference is None:
            raise ConfigError("the model was loaded without its reference; a KL weight above 0 keeps it")
        trained, self.network = self.network, self._reference
        try:
            yield
        finally:
            self.network = trained

    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Encode prompts, and the negative prompt beside them where guidance is classifier-free."""
        self._need("encode")
        found = self.encode_texts([prompt.text for prompt in prompts])
        if self.classifier_free:
            negative = self.encode_texts([self.sampling.negative_prompt] * len(prompts))
            found |= {NEGATIVE + name: tensor for name, tensor in negative.items()}
        return found

    def predict(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """The denoiser's prediction in its own precision, guidance included."""
        latents = latents.to(self.dtype)
        own = {name: tensor for name, tensor in conditioning.items() if not name.startswith(NEGATIVE)}
        positive = self.denoise(latents, times, own)
        if not self.classifier_free:
            return positive
        other = {name.removeprefix(NEGATIVE): tensor for name, tensor in conditioning.items() if name not in own}
        return self.combine(positive, self.denoise(latents, times, other))

    def component_config(self, component: str) -> dict[str, Any]:
        """A component's ``config.json``, without loading it: a trainer has no VAE but must know its shape."""
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        try:
            path = Path(self.folder) / component / name
            if not isinstance(self.folder, Path):  # on the hub
                from huggingface_hub import hf_hub_download

                path = Path(hf_hub_download(self.folder, f"{component}/{name}"))
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model folder {self.folder}: {component}/{name} cannot be read: {error}") from error
        return values

    def _need(self, part: Part) -> None:
        if part not in self._parts:
            raise ConfigError(f"this worker was loaded without what it needs to {part}; a generator has it")

    def _load_denoiser(self, model: ModelSection) -> Any:
        import diffusers  # here, because it costs seconds

        dtype = getattr(torch, model.dtype)
        kind = getattr(diffusers, self.denoiser_class)
        try:
            network = kind.from_pretrained(self.folder, subfolder=self.denoiser, torch_dtype=dtype)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model {self.folder} cannot be loaded as family {model.family}: {error}") from error
        network.eval().to(model.device)
        align(network)
        if model.attention is not None:
            try:
                network.set_attention_backend(model.attention)
            except (ValueError, RuntimeError, ImportError) as error:
                raise ConfigError(f"model.attention {model.attention!r} cannot be used: {error}") from error
        if model.gradient_checkpointing:
            network.enable_gradient_checkpointing()
        return network

    def _add_adapter(self, lora: LoraSection) -> None:
        from peft import LoraConfig

        targets = list(lora.targets or self.lora_targets)
        self.network.requires_grad_(requires_grad=False)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(derive_seed("adapter"))  # the same in every worker
                self.network.add_adapter(
                    LoraConfig(
                        r=lora.rank,
                        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft says int and computes with floats
                        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
                        target_modules=targets,
                    )
                )
        except ValueError as error:
            raise ConfigError(f"model.lora.targets {targets}: {error}") from error

    def _load_pipeline(self, model: ModelSection, parts: frozenset[Part]) -> Any:
        import diffusers

        absent = {self.denoiser}
        absent |= set() if "encode" in parts else set(self.encoders)
        absent |= set() if "decode" in parts else set(self.decoders)
        kind = getattr(diffusers, self.pipeline)
        try:
            pipe = kind.from_pretrained(
                self.folder, torch_dtype=getattr(torch, model.dtype), **dict.fromkeys(sorted(absent))
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model {self.folder} cannot be loaded as family {model.family}: {error}") from error
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval().requires_grad_(requires_grad=False).to(model.device)
                align(component)
        return pipe
