"""The registry of rewards, and where a user's own reward lives. Imports no torch and no user code.

A reward is called as ``reward(images, prompts)``: float32 images in [0, 1], ``(n, H, W)`` or ``(n, C, H, W)``, and one
:class:`digen.types.Prompt` per image; it returns one finite number per image, higher is better. A built-in one is a
class whose constructor takes ``reward.kwargs``; a user's may be such a class, or a function
``f(images, prompts, **kwargs)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from digen.diffusion.registry import find


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
    """The reward called ``name``: built in, another package's (entry points ``digen.rewards``), or a user's
    ``package.module:attribute``, located but not imported.

    Raises:
        ConfigError: there is no such reward, or the module cannot be found.
    """
    return find(name, REWARDS, field="reward.name", group="digen.rewards", wrap=RewardInfo)
