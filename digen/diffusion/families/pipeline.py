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
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from digen.config import LoraSection, ModelSection, SamplingSection
from digen.diffusion.families import check_pipeline, source
from digen.diffusion.families.base import Conditioning, Images, Schedule, align, compute_dtype
from digen.errors import ConfigError
from digen.types import Prompt, derive_seed

Part = Literal["denoise", "encode", "decode"]
"""What a worker needs of a model beside the denoiser. A trainer needs neither."""

NEGATIVE = "negative."
"""Prefix of the conditioning that classifier-free guidance leads away from."""

SHIFTED_EULER = {
    "time_shift_type": "exponential",
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "invert_sigmas": False,
    "stochastic_sampling": False,
    "num_train_timesteps": 1000,
}
"""Options of a ``FlowMatchEulerDiscreteScheduler`` that does nothing to the sigmas but shift and stretch them."""
STATIC_EULER = SHIFTED_EULER | {"use_dynamic_shifting": False, "shift_terminal": None}
"""Options of one that only shifts them, by a fixed number."""

JOINT_ATTENTION = (*("to_q", "to_k", "to_v", "to_out.0"), *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"))
"""Modules that get an adapter in transformers where image and text attend to each other: of both streams."""


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
    most_tokens: ClassVar[int | None] = None
    """The most that the pipeline takes, if it has a limit."""
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    """Further keywords of the pipeline's ``from_pretrained``; a component that is never needed is ``None``."""
    precise: ClassVar[tuple[str, ...]] = ()
    """Components that are at least float32, whatever ``model.dtype`` is."""
    latent_shape: tuple[int, ...]

    def __init__(
        self,
        *,
        model: ModelSection,
        sampling: SamplingSection,
        parts: frozenset[Part] = frozenset({"denoise", "encode", "decode"}),
        keep_reference: bool = False,
    ) -> None:
        self.folder = source(model)
        self.sampling = sampling
        frames, height, width = self.default_size
        self.size = (sampling.num_frames or frames, sampling.height or height, sampling.width or width)
        """(frames, height, width) of a sample."""
        self.guidance = self.default_guidance if sampling.guidance_scale is None else sampling.guidance_scale
        self.max_tokens = sampling.max_prompt_tokens or self.default_tokens
        try:
            self.configure(self.config_file("model_index.json"))
        except KeyError as error:
            raise ConfigError(
                f"model {self.folder} cannot be loaded as family {model.family}: a component's config lacks {error}"
            ) from error
        self._parts = parts
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._device = torch.device(model.device)
        self.network: Any = self._load_denoiser(model) if "denoise" in parts else None
        """The denoiser, in evaluation mode; ``None`` if ``parts`` does not ask for it."""
        self._reference: torch.nn.Module | None = None
        self._lora = model.lora
        if self.network is not None and model.lora is not None:
            self._add_adapter(model.lora)
        elif self.network is not None and keep_reference:
            self._reference = copy.deepcopy(self.network)  # kernels, and so last bits, depend on requires_grad
        self.pipe: Any = self._load_pipeline(model, parts) if parts - {"denoise"} else None
        """The pipeline without its denoiser, with the components that ``parts`` asks for, if any."""

    # What a family writes

    def configure(self, index: Mapping[str, Any]) -> None:
        """Read and check the folder's configs, before any weights; a family sets ``latent_shape`` here or after.

        Args:
            index: the folder's ``model_index.json``.

        Raises:
            ConfigError: it is the folder of another pipeline, for example image to video, or a size does not fit.
        """
        check_pipeline(index, self.pipeline, self.folder)
        if self.default_size[0] == 1 and self.size[0] != 1:
            raise ConfigError(f"sampling.num_frames is {self.size[0]}, but {self.pipeline} draws images; leave it out")
        if self.most_tokens is not None and self.max_tokens > self.most_tokens:
            raise ConfigError(
                f"sampling.max_prompt_tokens is {self.max_tokens}, but {self.pipeline} takes at most {self.most_tokens}"
            )
        if self.sampling.negative_prompt and not self.classifier_free:
            raise ConfigError(
                "sampling.negative_prompt is set, but guidance is not classifier-free: leave it out"
                ", or set sampling.guidance_scale above 1 if the model is not distilled"
            )

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
        """Precision of the forward, and of the weights unless the optimizer has others."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where forwards run."""
        return self._device

    def networks(self) -> list[torch.nn.Module]:
        """The denoiser, and its frozen copy where there is one."""
        return [network for network in (self.network, self._reference) if network is not None]

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

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Encode prompts, and the negative prompt beside them where guidance is classifier-free."""
        self._need("encode")
        found = self.encode_texts([prompt.text for prompt in prompts])
        if self.classifier_free:
            for name, tensor in self._negative.items():
                found[NEGATIVE + name] = tensor.repeat(len(prompts), *[1] * (tensor.dim() - 1))
        return found

    def predict(self, latents: Tensor, times: Tensor, conditioning: Conditioning) -> Tensor:
        """The denoiser's prediction in its own precision, guidance included."""
        self._need("denoise")
        latents = latents.to(self.dtype)
        conditioning = {name: self._cast(tensor) for name, tensor in conditioning.items()}
        own = {name: tensor for name, tensor in conditioning.items() if not name.startswith(NEGATIVE)}
        positive = self.denoise(latents, times, own)
        if not self.classifier_free:
            return positive
        other = {name.removeprefix(NEGATIVE): tensor for name, tensor in conditioning.items() if name not in own}
        return self.combine(positive, self.denoise(latents, times, other))

    def component_config(self, component: str) -> dict[str, Any]:
        """A component's ``config.json``, without loading it: a trainer has no VAE but must know its shape."""
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        return self.config_file(f"{component}/{name}")

    def config_file(self, name: str) -> dict[str, Any]:
        """A JSON file of the model's folder.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            path = Path(self.folder) / name
            if not isinstance(self.folder, Path):  # on the hub
                from huggingface_hub import hf_hub_download

                path = Path(hf_hub_download(self.folder, name))
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model folder {self.folder}: {name} cannot be read: {error}") from error
        return values

    def scheduler(self, kinds: Mapping[str, Mapping[str, Any]]) -> Any:
        """The folder's scheduler, for its numbers; digen steps by itself.

        Args:
            kinds: the classes in diffusers that the family understands, each with the options that it relies on.

        Raises:
            ConfigError: it is of another class, or an option has another value.
        """
        import diffusers

        config = self.component_config("scheduler")
        kind = str(config.get("_class_name"))
        if kind not in kinds:
            raise ConfigError(
                f"model folder {self.folder}: the scheduler is a {kind}; {type(self).__name__} understands "
                f"{' and '.join(kinds)}"
            )
        made = getattr(diffusers, kind).from_config(config)
        self.check_options(made.config, kinds[kind])
        return made

    def check_options(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Check that a scheduler's ``config`` has ``options``.

        Raises:
            ConfigError: an option has another value; names it and both values.
        """
        for option, value in options.items():
            if config[option] != value:
                raise ConfigError(
                    f"model folder {self.folder}: scheduler option {option} is {config[option]!r}; "
                    f"{type(self).__name__} supports {value!r} only"
                )

    def euler_config(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the folder's ``FlowMatchEulerDiscreteScheduler``; ``sampling.shift`` replaces its own shift.

        Args:
            options: what the family relies on, see :meth:`scheduler`.

        Raises:
            ConfigError: the scheduler is another one, or an option has another value.
        """
        config = dict(self.scheduler({"FlowMatchEulerDiscreteScheduler": options}).config)
        if self.sampling.shift is not None:
            config |= {"use_dynamic_shifting": False, "shift_terminal": None, "shift": self.sampling.shift}
        return config

    def latent_size(self, field: str, size: int, factor: int, *, multiple: int = 1, extra: int = 0) -> int:
        """``size`` of ``sampling.<field>`` in latents, of which each stands for ``factor`` pixels or frames.

        Args:
            field: named in the error.
            size: pixels or frames.
            factor: compression of the VAE.
            multiple: the latent size must be a multiple of it (patches of the denoiser).
            extra: pixels or frames, with a latent of their own, beside the multiple of ``factor``: the first frame.

        Raises:
            ConfigError: it does not fit; names the nearest sizes that do.
        """
        grid = factor * multiple
        if (size - extra) % grid:
            below = size - (size - extra) % grid
            near = " or ".join(str(value) for value in (below, below + grid) if value > 0)
            raise ConfigError(
                f"sampling.{field} is {size}, but {type(self).__name__} needs a multiple of {grid}"
                f"{f' and {extra} more' if extra else ''}: {near}"
            )
        return (size - extra) // factor + extra

    def decode_images(self, latents: Tensor) -> Images:
        """``(n, 3, H, W)`` images of latents that are scaled as the VAE takes them; one at a time, to save memory."""
        vae, (_, height, width) = self.pipe.vae, self.size
        rows = [vae.decode(row[None].to(vae.device, vae.dtype), return_dict=False)[0] for row in latents]
        images = torch.cat(rows).reshape(len(latents), -1, height, width)  # a VAE for videos gives one frame
        pixels: Tensor = self.pipe.image_processor.postprocess(images, output_type="pt")
        return pixels.float().cpu().numpy()

    def decode_videos(self, latents: Tensor) -> Images:
        """``(n, F, 3, H, W)`` videos of latents that are scaled as the VAE takes them, one at a time."""
        vae = self.pipe.vae
        videos = [vae.decode(row[None].to(vae.device, vae.dtype), return_dict=False)[0] for row in latents]
        frames: Tensor = self.pipe.video_processor.postprocess_video(torch.cat(videos), output_type="pt")
        return frames.float().cpu().numpy()

    @cached_property
    def _negative(self) -> Conditioning:
        """The negative prompt's single row: it is the same for every prompt."""
        return self.encode_texts([self.sampling.negative_prompt])

    def _cast(self, tensor: Tensor) -> Tensor:
        """Conditioning travels on the host in at least float32; here it is what the encoder gave."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

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
        for parameter in self.parameters().values():  # half precision would round an optimizer's small steps away
            parameter.data = parameter.data.to(compute_dtype(parameter.dtype))

    def _load_pipeline(self, model: ModelSection, parts: frozenset[Part]) -> Any:
        import diffusers

        dtype = getattr(torch, model.dtype)
        absent = {self.denoiser}
        absent |= set() if "encode" in parts else set(self.encoders)
        absent |= set() if "decode" in parts else set(self.decoders)
        index = self.config_file("model_index.json")
        absent |= {name for name in self.encoders if index[name][0] is None}  # diffusers wants to be told again
        kind = getattr(diffusers, self.pipeline)
        try:
            pipe = kind.from_pretrained(
                self.folder,
                torch_dtype={"default": dtype, **dict.fromkeys(self.precise, compute_dtype(dtype))},
                **dict.fromkeys(sorted(absent)),
                **self.pipeline_options,
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model {self.folder} cannot be loaded as family {model.family}: {error}") from error
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval().requires_grad_(requires_grad=False).to(model.device)
                align(component)
        return pipe
