"""The registry of model families: what the driver needs to know before a worker starts. Imports no torch.

A family is a module with a function ``load`` that returns a :class:`digen.diffusion.families.base.Family`.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from digen.config import ModelSection
from digen.errors import ConfigError

_ASSETS = Path(__file__).resolve().parent.parent / "assets"


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """What is known of a family without importing it."""

    module: str
    """The module whose ``load`` builds it."""
    extras: tuple[str, ...]
    """Extras of ``digen-rl`` that it needs."""
    model: Path | None = None
    """The embedded model's folder, used when ``model.path`` is not set."""
    prompts: Path | None = None
    """The embedded prompts, used when ``prompts.source`` is not set."""
    metadata: tuple[str, ...] = ()
    """What every prompt's metadata must hold."""
    judge: str | None = None
    """``module:attribute`` of an independent judge that evaluation uses, or ``None``."""


FAMILIES: dict[str, FamilyInfo] = {
    "digits": FamilyInfo(
        module="digen.diffusion.families.digits",
        extras=("diffusion", "demo"),
        model=_ASSETS / "digits",
        prompts=_ASSETS / "digits" / "prompts.jsonl",
        metadata=("label",),
        judge="digen.diffusion.rewards.classifier:Judge",
    )
}
"""Every known family by name."""


def lookup(name: str) -> FamilyInfo:
    """The family called ``name``.

    Raises:
        ConfigError: there is none; names the nearest and all known ones.
    """
    try:
        return FAMILIES[name]
    except KeyError:
        close = difflib.get_close_matches(name, FAMILIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown model.family {name!r}; {hint}known: {', '.join(sorted(FAMILIES))}") from None


def model_folder(model: ModelSection) -> Path:
    """The checked folder that holds the model of a config: ``model.path``, else the family's embedded one.

    Raises:
        ConfigError: the family is unknown, needs ``model.path``, or the folder is not a diffusers model.
    """
    path = model.path if model.path is not None else lookup(model.family).model
    if path is None:
        raise ConfigError(f"model.family {model.family!r} has no embedded model; set model.path to a diffusers folder")
    check_model_folder(path)
    return path


def check_model_folder(path: Path) -> None:
    """Check that ``path`` is a folder in diffusers' layout with all of its components; reads no weights.

    Raises:
        ConfigError: it is not; names the path and what would mend it.
    """
    mend = "set model.path to a folder written by diffusers' save_pretrained"
    if not path.is_dir():
        raise ConfigError(f"model folder {path} does not exist or is not a folder; {mend}")
    index = path / "model_index.json"
    if not index.is_file():
        raise ConfigError(f"model folder {path} is not a diffusers model: it has no model_index.json; {mend}")
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{index} is not valid JSON ({error}); {mend}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"{index} must hold an object of components, not {type(entries).__name__}; {mend}")
    components = [name for name, entry in entries.items() if isinstance(entry, list) and entry[:1] != [None]]
    missing = [name for name in components if not (path / name).is_dir()]
    if missing or not components:
        what = f"lacks the component folders {', '.join(missing)}" if missing else "names no components"
        raise ConfigError(f"model folder {path} {what} (see its model_index.json); {mend}")
