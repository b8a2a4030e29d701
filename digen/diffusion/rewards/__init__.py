"""The registry of rewards, and what the driver checks of them. Imports no torch and no user code.

A reward is called as ``reward(images, prompts)``: float32 images in [0, 1], ``(n, H, W)`` or ``(n, C, H, W)``, or
videos ``(n, F, C, H, W)``, and one :class:`digen.types.Prompt` per sample. It returns one finite number per sample,
higher is better; in place of a number may stand an exception that says why there is none. A built-in one is a class
whose constructor takes the reward's ``kwargs``; a user's may be such a class, or a function
``f(images, prompts, **kwargs)``. Another package offers one by an entry point of the group ``digen.rewards``
(``name = "package.module:attribute"``), or a config names ``package.module:attribute`` itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from digen.config import RewardSection
from digen.diffusion.registry import find
from digen.diffusion.rewards.prompts import class_label, target_text
from digen.errors import ConfigError
from digen.types import Prompt

HUB = "hf:"
"""How a name on the Hugging Face hub begins where a path may stand; ``@COMMIT`` at its end pins a revision."""


@dataclass(frozen=True, slots=True)
class RewardInfo:
    """What is known of a reward without importing it."""

    target: str
    """``package.module:attribute``."""
    extra: str | None = None
    """The extra of ``digen-rl`` that it needs, or ``None``."""
    check_prompt: Callable[[Prompt], object] | None = None
    """Raises :class:`ConfigError` for a prompt that lacks what the reward needs."""
    paths: tuple[str, ...] = ()
    """The keyword arguments that name a file or folder, or something on the hub."""


_HERE = "digen.diffusion.rewards"

REWARDS: dict[str, RewardInfo] = {
    "aesthetic": RewardInfo(f"{_HERE}.aesthetic:Aesthetic", paths=("model", "checkpoint")),
    "classifier": RewardInfo(f"{_HERE}.classifier:ClassProbability", extra="demo", check_prompt=class_label),
    "clip_score": RewardInfo(f"{_HERE}.clip:ClipScore", paths=("model", "processor")),
    "hps_v2": RewardInfo(f"{_HERE}.clip:HPSv2", paths=("model", "processor", "checkpoint")),
    "http": RewardInfo(f"{_HERE}.remote:RemoteScorer"),
    "image_reward": RewardInfo(f"{_HERE}.image_reward:ImageReward", paths=("model", "checkpoint")),
    "jpeg_compressibility": RewardInfo(f"{_HERE}.jpeg:JpegCompressibility"),
    "jpeg_incompressibility": RewardInfo(f"{_HERE}.jpeg:JpegIncompressibility"),
    "judge": RewardInfo(f"{_HERE}.judge:VisionJudge"),
    "ocr": RewardInfo(f"{_HERE}.ocr:TextMatch", extra="rewards", check_prompt=target_text),
    "pickscore": RewardInfo(f"{_HERE}.clip:PickScore", paths=("model", "processor")),
}
"""Every built-in reward by name."""


def lookup(name: str) -> RewardInfo:
    """The reward called ``name``: built in, another package's (entry points ``digen.rewards``), or a user's
    ``package.module:attribute``, located but not imported.

    Raises:
        ConfigError: there is no such reward, or the module cannot be found.
    """
    return find(name, REWARDS, field="reward.name", group="digen.rewards", wrap=RewardInfo)


def check(section: RewardSection, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """Check all of a reward that can be checked before a worker starts; returns the extras that it needs.

    Raises:
        ConfigError: a reward is unknown, a file or folder is missing, a key is not set, or a prompt lacks what a
            reward needs.
    """
    extras = []
    for head in section.resolved_heads:
        info = lookup(head.name)
        for name in info.paths:
            path = head.kwargs.get(name)
            if isinstance(path, str) and not path.startswith(HUB) and not Path(path).exists():
                raise ConfigError(
                    f"reward {head.name!r}: {name} {path!r} does not exist; give a path, or {HUB}ORG/NAME for one on "
                    "the hub"
                )
        if info.check_prompt is not None:
            for prompt in prompts:
                info.check_prompt(prompt)
        if info.extra is not None:
            extras.append(info.extra)
    secrets(section)
    return tuple(dict.fromkeys(extras))


def secrets(section: RewardSection) -> dict[str, str]:
    """The environment variables that hold the rewards' keys (``api_key_env``), for the workers that score.

    Raises:
        ConfigError: one is not set.
    """
    names = [head.kwargs["api_key_env"] for head in section.resolved_heads if head.kwargs.get("api_key_env")]
    for name in names:
        if not isinstance(name, str) or not os.environ.get(name):
            raise ConfigError(f"the environment variable {name}, which a reward's api_key_env names, is not set")
    return {name: os.environ[name] for name in names}
