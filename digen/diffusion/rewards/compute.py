"""Building the rewards of a config in a worker, and calling them so that nothing but finite numbers comes out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, cast

import numpy as np

from digen.config import RewardSection
from digen.diffusion.families.base import Images
from digen.diffusion.rewards import lookup
from digen.errors import ConfigError, MissingExtra, RewardError
from digen.types import Prompt

RewardFunction = Callable[[Images, Sequence[Prompt]], Sequence[float | Exception]]
"""Images and their prompts to one number each, or to the exception that says why there is none."""

_MAX_REASONS = 3
"""Failed samples whose reasons an error spells out."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What samples are worth."""

    rewards: tuple[float, ...]
    """The weighted sum of the heads, one a sample."""
    heads: dict[str, tuple[float, ...]]
    """Each head's own values by its label, before weighting."""


@dataclass(frozen=True, slots=True)
class _Head:
    label: str
    weight: float
    function: RewardFunction


class Reward:
    """The rewards of a config, together.

    Args:
        section: the config's section.

    Raises:
        ConfigError: one of them cannot be found, imported or constructed.
        MissingExtra: an optional dependency of one is not installed.
    """

    def __init__(self, section: RewardSection) -> None:
        self._heads = [
            _Head(head.resolved_label, head.weight, build_callable(lookup(head.name).target, head.kwargs))
            for head in section.resolved_heads
        ]

    def score(self, images: Images, prompts: Sequence[Prompt], samples: Sequence[str]) -> Scores:
        """Ask every head; ``samples`` names every image in errors.

        Raises:
            RewardError: a head raised, gave the wrong number of values, or one that is not a finite number.
        """
        heads = {
            head.label: compute_rewards(head.label, head.function, images, prompts, samples) for head in self._heads
        }
        weights = [head.weight for head in self._heads]
        columns = zip(*heads.values(), strict=True)
        rewards = tuple(sum(map(math.prod, zip(weights, column, strict=True))) for column in columns)
        for sample, value in zip(samples, rewards, strict=True):
            if not math.isfinite(value):
                raise RewardError(f"the weighted sum of the rewards is {value} for sample {sample}; lower the weights")
        return Scores(rewards, heads)


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


def compute_rewards(
    name: str, reward: RewardFunction, images: Images, prompts: Sequence[Prompt], samples: Sequence[str]
) -> tuple[float, ...]:
    """Call ``reward`` and check its answer; ``samples`` names every image in errors.

    Raises:
        RewardError: it raised, gave the wrong number of values, or one that is not a finite number.
    """
    where = samples[0] if len(samples) == 1 else f"{samples[0]} .. {samples[-1]}"
    try:
        answer = list(_sequence(reward(images, prompts)))
        failed = {sample: value for sample, value in zip(samples, answer, strict=False) if isinstance(value, Exception)}
        values = tuple(_number(value) for value in answer if not isinstance(value, Exception))
    except Exception as error:
        raise RewardError(f"reward {name!r} failed on samples {where}: {type(error).__name__}: {error}") from error
    if len(answer) != len(samples):
        raise RewardError(
            f"reward {name!r} gave {len(answer)} values for {len(samples)} samples ({where}); it must give one each"
        )
    if failed:
        raise _failure(name, failed, len(samples))
    for sample, prompt, value in zip(samples, prompts, values, strict=True):
        if not math.isfinite(value):
            raise RewardError(f"reward {name!r} is {value} for sample {sample} (prompt {prompt.text!r})")
    return values


def _failure(name: str, failed: Mapping[str, Exception], count: int) -> RewardError:
    reasons = [f"{sample}: {error}" for sample, error in failed.items()]
    named = "; ".join(reasons[:_MAX_REASONS])
    others = ", ".join(list(failed)[_MAX_REASONS:])
    error = RewardError(
        f"reward {name!r} failed on {len(failed)} of {count} samples: {named}" + (f"; also {others}" if others else "")
    )
    error.__cause__ = next(iter(failed.values()))
    return error


def _sequence(answer: Any) -> Any:
    if isinstance(answer, str | bytes | Mapping | Set):
        raise TypeError(f"it returned a {type(answer).__name__}, not a sequence of numbers")
    return answer


def _number(value: Any) -> float:
    if isinstance(value, str | bytes) or np.iscomplexobj(value):
        raise TypeError(f"{value!r} is not a real number")
    return float(value)
