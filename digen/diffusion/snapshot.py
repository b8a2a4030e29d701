"""A trainer's state as one payload in memory: what a snapshot holds of one rank.

It has the content of a checkpoint, but of a rank only what that holds itself, so that no rank waits for another. All
tensors lie in one array, byte by byte, beside a JSON text that says which and where, and a checksum of both: the memory
was writable by a process that died, perhaps because it wrote where it must not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Struct
from torch import Tensor

from digen.diffusion.channels.layout import DTYPES, NAMES, Bytes
from digen.diffusion.sharding import local
from digen.errors import CheckpointError, ConfigError
from digen.handles import Memory
from digen.types import Payload

TEXT, TENSORS, SUM = "text", "tensors", "sum"
"""Arrays of the payload."""

_COPIES = 2
"""Snapshots that are held at the same time: the newest, and the one that is being taken."""

_ALIGNMENT = 64


class Place(Struct, frozen=True, array_like=True):
    """Where a tensor is."""

    dtype: str
    """One of :data:`digen.diffusion.channels.layout.DTYPES`."""
    shape: tuple[int, ...]
    start: int
    """Its first byte."""

    @property
    def stop(self) -> int:
        """After its last byte."""
        return self.start + int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


class Contents(Struct, frozen=True):
    """What a payload holds."""

    plain: dict[str, Any]
    """What is no tensor."""
    files: dict[str, dict[str, Place]]
    """Tensors by their names, in the groups that are a checkpoint's files."""

    @classmethod
    def of(cls, files: Mapping[str, Mapping[str, Tensor]], plain: dict[str, Any]) -> Self:
        """What this rank holds of ``files``."""
        places: dict[str, dict[str, Place]] = {}
        end = 0
        for file, tensors in files.items():
            places[file] = {}
            for name, tensor in tensors.items():
                place = places[file][name] = Place(NAMES[tensor.dtype], tuple(local(tensor).shape), end)
                end = -(-place.stop // _ALIGNMENT) * _ALIGNMENT
        return cls(plain, places)

    @property
    def nbytes(self) -> int:
        """Bytes of the array that holds the tensors."""
        return max((place.stop for tensors in self.files.values() for place in tensors.values()), default=0)


def check_room(nbytes: int, available: int) -> None:
    """Refuse the first snapshot where there is no memory for all that will be held, beside what is used already.

    Args:
        nbytes: of one snapshot of all ranks on this machine.
        available: bytes of memory that this machine has left.

    Raises:
        ConfigError: there is not.
    """
    if _COPIES * nbytes > available:
        raise ConfigError(
            f"snapshots of the trainer take {_COPIES * nbytes} bytes of memory ({_COPIES} copies of {nbytes}), and its "
            f"machine has {available} left; set restarts.snapshot_every, 0 for none, or give it more memory"
        )


@torch.no_grad()
def take(contents: Contents, files: Mapping[str, Mapping[str, Tensor]], memory: Memory | None) -> Payload:
    """Copy ``files``, which ``contents`` describes, into ``memory`` if it is lent, else into memory of this process."""
    text = msgspec.json.encode(contents)
    shapes = {TENSORS: ("B", (contents.nbytes,)), TEXT: ("B", (len(text),)), SUM: ("Q", (1,))}
    placed = memory.place(shapes, lambda _: True) if memory is not None else None
    if placed is not None:
        arrays = {name: np.asarray(view) for name, view in placed.views.items()}
    else:
        arrays = {name: np.zeros(shape, code) for name, (code, shape) in shapes.items()}
    arrays[TEXT][:] = np.frombuffer(text, np.uint8)
    into = torch.from_numpy(arrays[TENSORS])
    for file, places in contents.files.items():
        for name, place in places.items():
            own = into[place.start : place.stop].view(DTYPES[place.dtype]).reshape(place.shape)
            own.copy_(local(files[file][name]))
    arrays[SUM][0] = _checksum(arrays)
    return placed.payload if placed is not None else Payload(arrays)


class Taken:
    """A payload that :func:`take` made, to be read.

    Args:
        payloads: of a snapshot, as this rank is given them.

    Raises:
        CheckpointError: it is not one of a rank's, or damaged.
    """

    def __init__(self, payloads: Sequence[Payload]) -> None:
        if len(payloads) != 1 or payloads[0].keys() != {TEXT, TENSORS, SUM}:
            raise CheckpointError("the snapshot holds nothing that a rank of this trainer has written")
        arrays = {name: np.asarray(array) for name, array in payloads[0].items()}
        if int(arrays[SUM][0]) != _checksum(arrays):
            raise CheckpointError("the snapshot fails its checksum: its memory was changed after it was written")
        contents = msgspec.json.decode(arrays[TEXT].tobytes(), type=Contents)
        self.plain = contents.plain
        """What is no tensor."""
        self.files = {name: TakenTensors(name, places, arrays[TENSORS]) for name, places in contents.files.items()}
        """Tensors by the checkpoint's file that would hold them."""


class TakenTensors:
    """Tensors of a snapshot; as :class:`digen.diffusion.state.TensorFile`, but of a rank's own rows.

    Args:
        name: of the checkpoint's file that would hold them.
        places: where they are.
        memory: the array that holds them.
    """

    def __init__(self, name: str, places: Mapping[str, Place], memory: Bytes) -> None:
        self.path = f"{name} of the snapshot"
        """What it is called in messages."""
        self.shapes = {name: place.shape for name, place in places.items()}
        """Of this rank's rows."""
        self._places = places
        self._memory = memory

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Check that it has tensors as this rank holds of ``wanted``, and no others.

        Raises:
            CheckpointError: it is of another model.
        """
        wrong = sorted(self.shapes.keys() ^ wanted.keys())
        wrong = wrong or [name for name, tensor in wanted.items() if self.shapes[name] != tuple(local(tensor).shape)]
        if wrong:
            raise CheckpointError(f"{self.path} is of another model: {len(wrong)} tensors differ, first {wrong[0]!r}")

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """A tensor, sharded and on the device as ``parameter`` is if it has its shape; in its own precision."""
        if self.shapes[name] != tuple(local(parameter).shape):
            return self._copy(name)
        made = torch.empty_like(parameter, dtype=DTYPES[self._places[name].dtype], requires_grad=False)
        self.read({name: made})
        return made

    @torch.no_grad()
    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy tensors into others of the same name, in place and in their precision."""
        for name, tensor in into.items():
            local(tensor).copy_(self._copy(name))

    def _copy(self, name: str) -> Tensor:
        place = self._places[name]
        own = torch.from_numpy(self._memory[place.start : place.stop].copy())  # torch takes no read-only memory
        return own.view(DTYPES[place.dtype]).reshape(place.shape)


def _checksum(arrays: Mapping[str, Any]) -> int:
    digest = xxhash.xxh3_64()
    for name in (TEXT, TENSORS):
        digest.update(arrays[name])
    return digest.intdigest()
