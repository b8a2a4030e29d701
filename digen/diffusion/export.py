"""A trained policy in the form that diffusers loads: a whole pipeline's folder, or a LoRA in safetensors."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from digen.config import RunConfig
from digen.diffusion.families import check_model_folder
from digen.diffusion.families.pipeline import PipelineFamily
from digen.diffusion.roles import build_family
from digen.diffusion.state import load_weights
from digen.errors import ConfigError


class Exporter:
    """A model with a checkpoint's weights, in a process of its own.

    Args:
        config: a :class:`digen.RunConfig` as plain JSON data.
        weights: the file of a checkpoint that holds them.

    Raises:
        ConfigError: the model cannot be loaded, or its family is no :class:`PipelineFamily`.
        CheckpointError: the weights cannot be read, or are of another model.
    """

    def __init__(self, config: dict[str, Any], weights: str) -> None:
        self._config = RunConfig.model_validate(config)
        family = build_family(self._config, frozenset({"denoise"}))
        if not isinstance(family, PipelineFamily):
            raise ConfigError(
                f"model.family {self._config.model.family!r} cannot be exported: it is no subclass of "
                "digen.diffusion.families.pipeline.PipelineFamily"
            )
        load_weights(Path(weights), family.parameters())
        self._family = family

    def save(self, folder: str) -> dict[str, Any]:
        """Write into ``folder``: with ``model.lora`` the adapter, else the pipeline with the trained denoiser.

        Returns:
            ``files`` and ``base``: SHA-256 by relative path of what was written, and of the denoiser that training
            began with, which a LoRA belongs to.

        Raises:
            ConfigError: a component of the model's folder cannot be copied.
        """
        target, source = Path(folder), self._source()
        target.mkdir(parents=True, exist_ok=True)
        if self._config.model.lora is not None:
            self._save_adapter(target)
        else:
            self._save_pipeline(target, source)
        return {"files": _hashes(target, target), "base": _hashes(source / self._family.denoiser, source)}

    def _save_adapter(self, target: Path) -> None:
        import diffusers
        from peft import get_peft_model_state_dict

        family = self._family
        pipeline = getattr(diffusers, family.pipeline, None)
        if pipeline is None:  # a family without a pipeline in diffusers: what the denoiser itself takes
            family.network.save_lora_adapter(target)
            return
        pipeline.save_lora_weights(
            target,
            **{
                f"{family.denoiser}_lora_layers": get_peft_model_state_dict(family.network),
                f"{family.denoiser}_lora_adapter_metadata": family.network.peft_config["default"].to_dict(),
            },
        )

    def _save_pipeline(self, target: Path, source: Path) -> None:
        index = check_model_folder(source)
        components = [name for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None]
        try:
            shutil.copy(source / "model_index.json", target)
            for component in components:
                if component != self._family.denoiser:
                    shutil.copytree(source / component, target / component)
        except OSError as error:
            raise ConfigError(f"model {source} cannot be copied: {error}") from error
        self._family.network.save_pretrained(target / self._family.denoiser)

    def _source(self) -> Path:
        """The model's folder, or the hub's copy of it on this machine."""
        if isinstance(self._family.folder, Path):
            return self._family.folder
        from diffusers import DiffusionPipeline

        return Path(DiffusionPipeline.download(self._family.folder))


def _hashes(folder: Path, root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(root).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
