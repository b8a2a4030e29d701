"""The registry of model families: what the driver needs to know before a worker starts. Imports no torch.

A family is a class that is called with the keywords of
:class:`digen.diffusion.families.pipeline.PipelineFamily` and has the methods of
:class:`digen.diffusion.families.base.Family`. Another package adds one by an entry point of the group
``digen.families`` (``name = "package.module:Class"``), or a config names ``package.module:Class`` itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digen.config import ModelSection
from digen.diffusion.kernels import ProcessName
from digen.diffusion.registry import find
from digen.errors import ConfigError

_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_HUB = "hf:"


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """What is known of a family without importing it."""

    target: str
    """``package.module:Class``."""
    extras: tuple[str, ...] = ("diffusion",)
    """Extras of ``digen-rl`` that it needs."""
    model: Path | None = None
    """The embedded model's folder, used when ``model.path`` is not set."""
    prompts: Path | None = None
    """The embedded prompts, used when ``prompts.source`` is not set."""
    metadata: tuple[str, ...] = ()
    """What every prompt's metadata must hold."""
    judge: str | None = None
    """``module:attribute`` of an independent judge that evaluation uses, or ``None``."""
    pipeline: str | None = None
    """The pipeline's class in ``model_index.json``; ``None``: the worker checks it."""
    process: ProcessName | None = None
    """How its samples become noise, see :mod:`digen.diffusion.process`; ``None``: the worker finds out."""


_HERE = "digen.diffusion.families"

FAMILIES: dict[str, FamilyInfo] = {
    "digits": FamilyInfo(
        target=f"{_HERE}.digits:Digits",
        extras=("diffusion", "demo"),
        model=_ASSETS / "digits",
        prompts=_ASSETS / "digits" / "prompts.jsonl",
        metadata=("label",),
        judge="digen.diffusion.rewards.classifier:Judge",
        pipeline="DigitsPipeline",
        process="flow",
    ),
    "flux": FamilyInfo(f"{_HERE}.flux:Flux", pipeline="FluxPipeline", process="flow"),
    "hunyuan_video": FamilyInfo(f"{_HERE}.hunyuan_video:HunyuanVideo", pipeline="HunyuanVideoPipeline", process="flow"),
    "qwen_image": FamilyInfo(f"{_HERE}.qwen_image:QwenImage", pipeline="QwenImagePipeline", process="flow"),
    "sd15": FamilyInfo(f"{_HERE}.sd15:StableDiffusion15", pipeline="StableDiffusionPipeline", process="ddim"),
    "sd3": FamilyInfo(f"{_HERE}.sd3:StableDiffusion3", pipeline="StableDiffusion3Pipeline", process="flow"),
    "wan": FamilyInfo(f"{_HERE}.wan:Wan", pipeline="WanPipeline", process="flow"),
}
"""Every built-in family by name."""


def lookup(name: str) -> FamilyInfo:
    """The family called ``name``: built in, another package's, or a class ``package.module:Class``.

    Raises:
        ConfigError: there is none; names the nearest and all known ones.
    """
    return find(name, FAMILIES, field="model.family", group="digen.families", wrap=FamilyInfo)


def source(model: ModelSection) -> Path | str:
    """Where the model of a config is: its folder, the family's embedded one, or a name on the hub.

    Raises:
        ConfigError: the family is unknown, needs ``model.path``, or the folder is not a diffusers model or of another
            family.
    """
    info = lookup(model.family)
    path = model.path if model.path is not None else info.model
    if path is None:
        raise ConfigError(
            f"model.family {model.family!r} has no embedded model; set model.path to a diffusers folder, or hf:ORG/NAME"
        )
    if str(path).startswith(_HUB):
        return str(path).removeprefix(_HUB)
    index = check_model_folder(path)
    if info.pipeline is not None:
        check_pipeline(index, info.pipeline, path)
    return path


def check_pipeline(index: Mapping[str, Any], wanted: str, where: Path | str) -> None:
    """Check that a ``model_index.json`` is of the pipeline that a family trains.

    Raises:
        ConfigError: it is of another; names the family that it belongs to, if there is one.
    """
    found = index.get("_class_name")
    if found != wanted:
        family = next((name for name, info in FAMILIES.items() if info.pipeline == found), None)
        hint = (
            f"set model.family to {family}"
            if family is not None
            else "pipelines with other conditions than text (image to image, image to video, editing, control) are not "
            "supported"
        )
        raise ConfigError(f"model {where} is a {found}, but model.family needs a {wanted}; {hint}")


def check_model_folder(path: Path) -> dict[str, Any]:
    """Check that ``path`` is a folder in diffusers' layout with all of its components; reads no weights.

    Returns its ``model_index.json``.

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
    return entries
