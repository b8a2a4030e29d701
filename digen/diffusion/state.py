"""Tensors and numbers on disk: safetensors and JSON, written through to the device, with their hashes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from digen.errors import CheckpointError


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write and fsync a safetensors file; returns its SHA-256 in hexadecimal."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    return _sync(path)


def write_json(path: Path, values: Mapping[str, Any]) -> str:
    """Write and fsync a JSON file; returns its SHA-256 in hexadecimal."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return _sync(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into storage of its own.

    Raises:
        CheckpointError: it is missing or corrupt.
    """
    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error}; use an earlier checkpoint") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: it is missing or not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error}; use an earlier checkpoint") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"checkpoint file {path} does not hold an object; use an earlier checkpoint")
    return values


def check_tensors(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Check that the tensors of a file have the names and shapes of ``wanted``.

    Raises:
        CheckpointError: they are of another model.
    """
    wrong = sorted(found.keys() ^ wanted.keys()) or [n for n in wanted if found[n].shape != wanted[n].shape]
    if wrong:
        raise CheckpointError(f"{path} is of another model: {len(wrong)} tensors differ, first {wrong[0]!r}")


@torch.no_grad()
def load_weights(path: Path, parameters: Mapping[str, Tensor]) -> None:
    """Copy the weights in a checkpoint's file into the parameters, in place and in their precision.

    Raises:
        CheckpointError: the file cannot be read, or is of another model; nothing was copied then.
    """
    weights = read_tensors(path)
    check_tensors(path, weights, parameters)
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def _sync(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest
