"""Building a reward in a worker, and calling it so that nothing but finite numbers comes out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from importlib import import_module
from typing import Any, cast

import numpy as np

from digen.config import RewardSection
from digen.diffusion.families.base import Images
from digen.diffusion.rewards import lookup
from digen.errors import ConfigError, MissingExtra, RewardError
from digen.types import Prompt

RewardFunction = Callable[[Images, Sequence[Prompt]], Sequence[float]]
"""Images and their prompts to one number each."""


def build_reward(section: RewardSection) -> RewardFunction:
    """Import and construct the reward of a config.

    Raises:
        ConfigError: it cannot be found, imported or constructed.
        MissingExtra: its optional dependency is not installed.
    """
    return build_callable(lookup(section.name).target, section.kwargs)


def build_callable(target: str, kwargs: dict[str, Any]) -> RewardFunction:
    """Import ``package.module:attribute`` and bind ``kwargs``: a class is constructed, a function is completed.

    Raises:
        ConfigError: the import fails, the attribute is missing, or the arguments do not fit.
    """
    module_name, _, attribute = target.partition(":")
    try:
        value = getattr(import_module(module_name), attribute)
    except MissingExtra:
        raise
    except Exception as error:
        raise ConfigError(f"reward {target!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(value):
        raise ConfigError(f"reward {target!r} is a {type(value).__name__}, which cannot be called")
    try:
        if inspect.isclass(value):
            return cast("RewardFunction", value(**kwargs))
        bound: RewardFunction = partial(value, **kwargs)
        inspect.signature(bound).bind([], [])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {target!r} does not take reward.kwargs {sorted(kwargs)}: {error}") from error
    return bound


def _sequence(answer: Any) -> Any:
    if isinstance(answer, str | bytes | Mapping | Set):
        raise TypeError(f"it returned a {type(answer).__name__}, not a sequence of numbers")
    return answer


def _number(value: Any) -> float:
    if isinstance(value, str | bytes) or np.iscomplexobj(value):
        raise TypeError(f"{value!r} is not a real number")
    return float(value)


def compute_rewards(
    name: str, reward: RewardFunction, images: Images, prompts: Sequence[Prompt], samples: Sequence[str]
) -> tuple[float, ...]:
    """Call ``reward`` and check its answer; ``samples`` names every image in errors.

    Raises:
        RewardError: it raised, gave the wrong number of values, or one that is not a finite number.
    """
    where = samples[0] if len(samples) == 1 else f"{samples[0]} .. {samples[-1]}"
    try:
        values = tuple(_number(value) for value in _sequence(reward(images, prompts)))
    except Exception as error:
        raise RewardError(f"reward {name!r} failed on samples {where}: {type(error).__name__}: {error}") from error
    if len(values) != len(samples):
        raise RewardError(
            f"reward {name!r} gave {len(values)} values for {len(samples)} samples ({where}); it must give one each"
        )
    for sample, prompt, value in zip(samples, prompts, values, strict=True):
        if not math.isfinite(value):
            raise RewardError(f"reward {name!r} is {value} for sample {sample} (prompt {prompt.text!r})")
    return values
