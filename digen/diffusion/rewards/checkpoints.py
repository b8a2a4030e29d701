"""Loading the networks of rewards: folders that transformers reads, and single files of weights in others' formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from digen.diffusion.families.base import align
from digen.diffusion.rewards import HUB
from digen.errors import ConfigError

_Module = TypeVar("_Module", bound=nn.Module)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Precisions of a reward's network by their name in ``kwargs``."""

_SAFE_TORCH = (2, 10)
"""Earlier versions of ``torch.load`` could be made to run code by a file, even with ``weights_only``."""


def dtype_of(name: str) -> torch.dtype:
    """The precision called ``name``.

    Raises:
        ConfigError: there is none; names those that there are.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} of a reward; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def place(model: str) -> tuple[str, str | None]:
    """What ``from_pretrained`` takes for ``model``, and the revision: an existing folder, or ``hf:ORG/NAME[@COMMIT]``.

    Raises:
        ConfigError: there is no such folder.
    """
    if model.startswith(HUB):
        name, _, revision = model.removeprefix(HUB).partition("@")
        return name, revision or None
    if not Path(model).is_dir():
        raise ConfigError(f"the folder {model!r} of a reward's model does not exist; give a folder or {HUB}ORG/NAME")
    return model, None


def pretrained(kind: Any, model: str) -> Any:
    """``kind.from_pretrained`` of a folder or hub name; a network must find every weight in it.

    Args:
        kind: a class of transformers: a network, its config, a tokenizer or an image processor.
        model: a folder, or ``hf:ORG/NAME[@COMMIT]``.

    Raises:
        ConfigError: it cannot be read, or weights of the network are missing (they would be random).
    """
    network = isinstance(kind, type) and issubclass(kind, nn.Module)
    options = {"use_safetensors": True, "output_loading_info": True} if network else {}
    name, revision = place(model)
    try:
        loaded = kind.from_pretrained(name, revision=revision, **options)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{kind.__name__} cannot be read from {model!r}: {reason}") from error
    if not network:
        return loaded
    module, info = loaded
    lost = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if lost:
        raise ConfigError(f"{model!r} lacks {len(lost)} weights of a {kind.__name__}, for example {lost[0]}")
    return module


def read_weights(file: str, *, trust: bool) -> dict[str, Tensor]:
    """The tensors of one file by name.

    Args:
        file: a path, or ``hf:ORG/NAME/FILE[@COMMIT]``: safetensors, or PyTorch's format (.pt, .pth, .bin).
        trust: take PyTorch's format, which is a pickle: it is read with ``weights_only`` all the same.

    Raises:
        ConfigError: there is no such file, it is not what its name says, or it is a pickle and is not trusted.
    """
    path = _fetch(file)
    pickled = path.suffix != ".safetensors"
    if pickled and not trust:
        raise ConfigError(
            f"checkpoint {file!r} is not safetensors but a pickle; convert it, or set trust_checkpoint: true if you "
            "trust where it comes from"
        )
    if pickled and tuple(int(part) for part in torch.__version__.split(".")[:2]) < _SAFE_TORCH:
        raise ConfigError(f"reading {file!r} safely takes torch {'.'.join(map(str, _SAFE_TORCH))} or newer")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True) if pickled else load_file(path)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"checkpoint {file!r} cannot be read: {type(error).__name__}: {reason}") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(_is_plain(value) for value in content.values()):
        raise ConfigError(f"checkpoint {file!r} must hold dense tensors by name and nothing else")
    return {str(name): value for name, value in content.items()}


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


def _fetch(file: str) -> Path:
    if not file.startswith(HUB):
        if not Path(file).is_file():
            raise ConfigError(f"the checkpoint {file!r} of a reward does not exist; give a path or {HUB}ORG/NAME/FILE")
        return Path(file)
    name, _, revision = file.removeprefix(HUB).partition("@")
    parts = name.split("/", 2)
    if len(parts) != 3:
        raise ConfigError(f"checkpoint {file!r} is not of the form {HUB}ORG/NAME/FILE or {HUB}ORG/NAME/FILE@COMMIT")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download("/".join(parts[:2]), parts[2], revision=revision or None))
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {file!r} cannot be fetched: {' '.join(str(error).split())[:300]}") from error


def fill(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load ``weights`` into ``module``, which must fit one to one.

    Raises:
        ConfigError: a weight is missing, left over or of another shape.
    """
    own = module.state_dict()
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or extra:
        what = [f"lacks {missing[0]}"] if missing else []
        what += [f"has {extra[0]}, which the model has not"] if extra else []
        raise ConfigError(f"checkpoint {source!r} does not fit the model: it {' and '.join(what)}")
    for name, value in own.items():
        if weights[name].shape != value.shape:
            raise ConfigError(
                f"checkpoint {source!r} does not fit the model: {name} is {tuple(weights[name].shape)} there and "
                f"{tuple(value.shape)} in the model"
            )
    module.load_state_dict(weights)


def ready(module: _Module, device: str, dtype: str) -> _Module:
    """``module`` frozen, in evaluation mode, on ``device``, in storage of its own.

    Raises:
        ConfigError: there is no such device or precision.
    """
    try:
        module = module.to(device=device, dtype=dtype_of(dtype)).eval().requires_grad_(requires_grad=False)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"a reward's model cannot be moved to device {device!r}: {error}") from error
    align(module)
    return module
