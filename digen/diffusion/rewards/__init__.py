"""The registry of rewards, and where a user's own reward lives. Imports no torch and no user code.

A reward is called as ``reward(images, prompts)``: float32 images in [0, 1], ``(n, H, W)`` or ``(n, C, H, W)``, and one
:class:`digen.types.Prompt` per image; it returns one finite number per image, higher is better. A built-in one is a
class whose constructor takes ``reward.kwargs``; a user's may be such a class, or a function
``f(images, prompts, **kwargs)``.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from digen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RewardInfo:
    """What is known of a reward without importing it."""

    target: str
    """``package.module:attribute``."""
    extra: str | None = None
    """The extra of ``digen-rl`` that it needs, or ``None``."""


REWARDS: dict[str, RewardInfo] = {
    "classifier": RewardInfo("digen.diffusion.rewards.classifier:ClassProbability", extra="demo")
}
"""Every built-in reward by name."""


def lookup(name: str) -> RewardInfo:
    """The built-in reward called ``name``, or a user's ``package.module:attribute``, located but not imported.

    Raises:
        ConfigError: there is no such reward, or the module cannot be found.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"unknown reward.name {name!r}; {hint}built in: {', '.join(sorted(REWARDS))}; "
            "your own is written package.module:function"
        )
    if not all(part.isidentifier() for part in module.split(".")) or not attribute.isidentifier():
        raise ConfigError(f"reward.name {name!r} is not of the form package.module:function")
    _locate(module, name)
    return RewardInfo(name)


def _locate(module: str, reward: str) -> None:
    # importlib.util.find_spec("a.b") imports a; the path finder takes a's search path instead of a itself.
    top, *rest = module.split(".")
    path: Sequence[str] | None = None
    found = importlib.util.find_spec(top)
    name = top
    for part in rest:
        path = found.submodule_search_locations if found is not None else None
        if path is None:
            break
        name = f"{name}.{part}"
        found = importlib.machinery.PathFinder.find_spec(name, path)
    if found is None or name != module:
        missing = name if found is None else f"{name}.{module.removeprefix(name + '.').split('.')[0]}"
        raise ConfigError(
            f"reward.name {reward!r}: module {missing!r} cannot be found; "
            "install it, or add its folder to PYTHONPATH of the process that starts the run"
        )
