"""What rewards read from a prompt. Imports nothing heavy: the driver checks every prompt before a run."""

from __future__ import annotations

import re

from digen.errors import ConfigError
from digen.types import Prompt

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')


def class_label(prompt: Prompt) -> int:
    """The class that a prompt asks for: ``label`` of its metadata.

    Raises:
        ConfigError: there is none, or it is no integer.
    """
    try:
        return int(prompt.metadata["label"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"prompt {prompt.text!r} has no integer label in its metadata") from None


def target_text(prompt: Prompt) -> str:
    """The text that an image should show: ``text`` of the metadata, else what first stands in double quotes.

    Raises:
        ConfigError: there is neither, or it is blank.
    """
    target = prompt.metadata.get("text")
    if target is None and (quoted := _QUOTED.search(prompt.text)):
        target = quoted[1] or quoted[2] or ""
    if not isinstance(target, str) or not target.strip():
        raise ConfigError(
            f"prompt {prompt.text!r} names no text to show: put it in double quotes, or in the metadata as 'text'"
        )
    return target
