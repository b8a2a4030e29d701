"""Tensors and numbers on disk: safetensors and JSON, written through to the device, with their hashes.

A file does not tell how many ranks wrote it. The rows that a rank has of a sharded tensor lie together in it, so all
ranks write into one file at the same time, and any number of ranks reads its own rows back. torch's distributed
checkpoints would do the same, but their metadata is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from digen.diffusion.ranks import Ranks
from digen.diffusion.sharding import is_first_replica, local, own_rows
from digen.errors import CheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of safetensors."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A safetensors file that is to be written, and what this rank writes into it. Every rank has one."""

    path: Path
    """With several ranks in a folder that all of them see."""
    header: bytes
    num_bytes: int
    """Of the whole file."""
    pieces: tuple[tuple[int, Tensor], ...]
    """Where this rank writes what, by the number of the first byte."""

    def create(self) -> None:
        """Make the file, with room for everybody's pieces; one rank does so before any writes."""
        with self.path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.num_bytes)

    def write(self) -> None:
        """Write this rank's pieces, and fsync."""
        with self.path.open("r+b") as file:
            for place, tensor in self.pieces:
                file.seek(place)
                file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())


def draft(path: Path, tensors: Mapping[str, Tensor], ranks: Ranks, copies: dict[str, Tensor] | None = None) -> Draft:
    """What is to be written of ``tensors``: whole ones, the same on all ``ranks``, or sharded ones.

    With ``copies`` it is copied to the host now, so that the tensors may change before it is written: into those of the
    last time, since new memory costs several times the copy. The first time there are none.
    """
    header, places = _layout(tensors)
    pieces = []
    for name, tensor in tensors.items():
        rows = own_rows(tensor)
        if is_first_replica(tensor) if rows is not None else ranks.rank == 0:
            before = 0 if rows is None else rows.start * math.prod(tensor.shape[1:])
            own = local(tensor)
            if copies is not None:
                if name not in copies:
                    copies[name] = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
                own = copies[name].copy_(own)
            pieces.append((len(header) + places[name] + before * tensor.itemsize, own))
    size = len(header) + sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    return Draft(path, header, size, tuple(pieces))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write and fsync a safetensors file of whole tensors; returns its SHA-256 in hexadecimal."""
    found = draft(path, tensors, Ranks())
    found.create()
    found.write()
    return hash_file(path)


def write_json(path: Path, values: Mapping[str, Any]) -> str:
    """Write and fsync a JSON file; returns its SHA-256 in hexadecimal."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return hash_file(path)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open safetensors file."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Of its tensors."""
    _file: Any

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Check that it has tensors of the names and shapes of ``wanted``, and no others.

        Raises:
            CheckpointError: it is of another model.
        """
        wrong = sorted(self.shapes.keys() ^ wanted.keys())
        wrong = wrong or [name for name, tensor in wanted.items() if self.shapes[name] != tuple(tensor.shape)]
        if wrong:
            raise CheckpointError(f"{self.path} is of another model: {len(wrong)} tensors differ, first {wrong[0]!r}")

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """A tensor, sharded and on the device as ``parameter`` is if it has its shape; in its own precision."""
        if self.shapes[name] != tuple(parameter.shape):
            whole: Tensor = self._file.get_tensor(name)
            return whole.clone()
        text = self._file.get_slice(name).get_dtype()
        dtype = next((dtype for dtype, known in _DTYPES.items() if known == text), None)
        if dtype is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is of type {text}, which digen does not write")
        made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        self.read({name: made})
        return made

    @torch.no_grad()
    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy tensors into others of the same name, in place and in their precision; of sharded ones the own rows."""
        for name, tensor in into.items():
            rows, target = own_rows(tensor), local(tensor)
            if target.numel():
                found = self._file.get_slice(name)[rows] if rows is not None else self._file.get_tensor(name)
                target.copy_(found)


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file.

    Raises:
        CheckpointError: it is missing or corrupt.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield TensorFile(path, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}, file)  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error}; use an earlier checkpoint") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: it is missing or not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error}; use an earlier checkpoint") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"checkpoint file {path} does not hold an object; use an earlier checkpoint")
    return values


def load_weights(path: Path, parameters: Mapping[str, Tensor]) -> None:
    """Copy the weights in a checkpoint's file into the parameters, in place and in their precision.

    Raises:
        CheckpointError: the file cannot be read, or is of another model; nothing was copied then.
    """
    with open_tensors(path) as file:
        file.check(parameters)
        file.read(parameters)


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """A file's beginning, and where each tensor begins after it: the widest elements first, so that all are aligned."""
    entries: dict[str, Any] = {}
    places, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        places[name], end = end, end + math.prod(tensor.shape) * tensor.itemsize
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [places[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def hash_file(path: Path) -> str:
    """Fsync a file; returns its SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest
