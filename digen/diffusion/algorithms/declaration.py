"""What an algorithm says of itself before it runs, and what becomes of the config's ``algorithm`` section by it.

Imports no torch: the driver checks a config against it.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from digen.config import RunConfig
from digen.diffusion.kernels import KERNELS, ProcessName
from digen.errors import ConfigError


class Options(BaseModel):
    """``algorithm.options`` of one algorithm: unknown keys are refused. This one has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def check(self, num_steps: int) -> None:
        """Whether the options suit trajectories of ``num_steps`` transitions.

        Raises:
            ValueError: they do not; says why and what would.
        """


class TrajectoryOptions(Options):
    """Options of every algorithm that is trained on trajectories."""

    shared_noise: bool = False
    """Start all samples of a group from the same noise; they part at the first noisy transition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What an algorithm needs and takes. A field of the section whose default here is ``None`` cannot be set."""

    options: type[Options] = TrajectoryOptions
    """The model of ``algorithm.options``."""
    kernels: tuple[str, ...] = ("flow_sde", "dance_sde", "cps")
    """Kernels whose log-probabilities it can train on, its default first. Empty: it needs samples alone, which the ODE
    draws; no trajectory travels and nothing is replayed."""
    processes: tuple[ProcessName, ...] = ("flow",)
    """Models that it trains if it has no kernel, which says so itself; see :mod:`digen.diffusion.process`."""
    clip_range: float | None = 1e-4
    """Default of ``algorithm.clip_range``."""
    advantage_clip: float | None = 5.0
    """Default of ``algorithm.advantage_clip``; infinite: no clamp unless the config sets one."""
    needs_advantage_clip: bool = False
    """Whether advantages are measured by ``advantage_clip``, so that there must be one (DiffusionNFT)."""
    timestep_fraction: float | None = 0.99
    """Default of ``algorithm.timestep_fraction``."""
    kl_weight: float | None = 0.0
    """Default of ``algorithm.kl_weight``."""
    means: bool = False
    """Whether trajectories must carry the means of their transitions (Guard, DPPO)."""
    whole_groups: bool = False
    """Whether a micro-batch must hold all samples of its groups, because a term is of several samples (DPO)."""
    homogeneous: bool = True
    """Whether the loss of c A is c times that of A for every c > 0, apart from clamp and KL."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The sections ``algorithm`` and ``sampling`` of a config as an algorithm takes them, defaults filled in.

    What the algorithm does not take is infinite (a clip), 1 (the fraction) or 0 (the weight).
    """

    options: Any
    """An instance of the declaration's options."""
    kernel: str | None
    """``None`` where samples alone are needed."""
    noise_level: float
    """Of the kernel; 0 without one."""
    clip_range: float
    advantage_clip: float
    timestep_fraction: float
    kl_weight: float
    defers_divisor: bool
    """Whether the gradient with a common divisor of all advantages is the gradient without it, divided at commit: then
    advantages stream although the divisor is known last. True where the loss is homogeneous, nothing clamps the
    advantages and no KL stands beside them."""


def resolve(name: str, declaration: Declaration, config: RunConfig) -> Settings:
    """Check a config against ``declaration`` of the algorithm ``name``.

    Raises:
        ConfigError: an option is unknown or wrong, a field is set that the algorithm does not take, or the sampler
            cannot serve it.
    """
    section = config.algorithm
    values = {}
    for field, absent in (("clip_range", math.inf), ("timestep_fraction", 1.0), ("kl_weight", 0.0)):
        values[field] = _value(name, field, getattr(section, field), getattr(declaration, field), absent)
    clip = section.advantage_clip
    values["advantage_clip"] = _value(
        name, "advantage_clip", math.inf if clip == "none" else clip, declaration.advantage_clip, math.inf
    )
    if clip == "none" and declaration.needs_advantage_clip:
        raise ConfigError(f"algorithm.advantage_clip is none, but {name} measures advantages by it; give a number")
    if section.old_logprobs != "auto" and not declaration.kernels:
        raise ConfigError(f"algorithm.old_logprobs is set, but {name} needs no log-probabilities; leave it out")
    kernel, noise_level = _kernel(name, declaration, config)
    if section.kl != "gaussian":
        why = "algorithm.kl_weight is 0" if not values["kl_weight"] else None
        if kernel is None or KERNELS[kernel].process != "flow":
            why = f"{name} has no transitions of a flow"
        if why is not None:
            raise ConfigError(f"algorithm.kl {section.kl!r} compares transitions of a flow, but {why}; leave it out")
    return Settings(
        options=_options(name, declaration, config),
        kernel=kernel,
        noise_level=noise_level,
        defers_divisor=declaration.homogeneous and values["advantage_clip"] == math.inf and values["kl_weight"] == 0,
        **values,
    )


def _value(name: str, field: str, value: float | None, default: float | None, absent: float) -> float:
    if default is None and value is not None:
        raise ConfigError(f"algorithm.{field} is set, but {name} has none; leave it out")
    if default is None:
        return absent
    return default if value is None else value


def _kernel(name: str, declaration: Declaration, config: RunConfig) -> tuple[str | None, float]:
    sampling = config.sampling
    if not declaration.kernels:
        for field in ("kernel", "noise_level"):
            if getattr(sampling, field) is not None:
                raise ConfigError(f"sampling.{field} is set, but {name} draws its samples without noise; leave it out")
        return None, 0.0
    kernel = sampling.kernel or declaration.kernels[0]
    if kernel not in declaration.kernels:
        raise ConfigError(f"sampling.kernel {kernel!r} cannot serve {name}; it takes {', '.join(declaration.kernels)}")
    info = KERNELS[kernel]
    noise_level = info.noise_level if sampling.noise_level is None else sampling.noise_level
    if noise_level == 0:
        raise ConfigError(
            f"sampling.noise_level is 0, but {name} needs log-probabilities, and a transition without noise has none; "
            f"raise it (usual for {kernel}: {info.noise_level}), or take an algorithm that needs samples alone"
        )
    if noise_level > info.max_noise_level:
        raise ConfigError(
            f"sampling.noise_level is {noise_level}, but kernel {kernel} allows at most {info.max_noise_level:g}"
        )
    return kernel, noise_level


def _options(name: str, declaration: Declaration, config: RunConfig) -> Options:
    try:
        options = declaration.options.model_validate(config.algorithm.options)
    except ValidationError as error:
        known = list(declaration.options.model_fields)
        raise ConfigError("; ".join(_explain(name, item, known) for item in error.errors())) from None
    try:
        options.check(config.sampling.num_inference_steps)
    except ValueError as error:
        raise ConfigError(f"algorithm.options of {name}: {error}") from None
    return options


def _explain(name: str, item: Any, known: list[str]) -> str:
    field = ".".join(("algorithm", "options", *map(str, item["loc"])))
    if item["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"{name} takes {', '.join(known) or 'no options'}"
        return f"unknown key {field!r}; {hint}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{field}: {message}" if item["type"] == "value_error" else f"{field}: {message} (got {item['input']!r})"
