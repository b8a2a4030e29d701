"""What a publication holds: its tensors, and the pieces in which they are written, checked and read.

A piece is a run of consecutive elements of one tensor: a whole tensor, or the rows that one rank holds of it. Every
piece has a checksum of its own, so that each rank writes what it has and nobody needs a whole tensor to check a part.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from digen.diffusion.ranks import Ranks
from digen.errors import ConfigError, ProtocolError

Bytes = NDArray[np.uint8]
"""Memory, byte by byte."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that can be published, by their names in safetensors files."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Their names by dtype."""


class TensorSpec(Struct, frozen=True, array_like=True):
    """A tensor as generators hold it."""

    name: str
    dtype: str
    """One of :data:`DTYPES`."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize


class Piece(Struct, frozen=True, array_like=True):
    """Elements ``start .. stop - 1`` of a tensor in C order."""

    tensor: int
    """Position in :attr:`Layout.tensors`."""
    start: int
    stop: int
    rank: int
    """The trainer's rank that writes it."""


class Layout(Struct, frozen=True, dict=True):
    """The tensors of a publication in the order of their names, and their pieces, which cover each exactly once."""

    tensors: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def read(cls, encoded: bytes | memoryview) -> Self:
        """The layout that :attr:`encoded` describes.

        Raises:
            ProtocolError: it describes none.
        """
        try:
            layout = msgspec.json.decode(encoded, type=cls)
            layout.check()
        except (msgspec.DecodeError, KeyError) as error:
            raise ProtocolError(f"published weights have no readable description: {error}") from None
        return layout

    @cached_property
    def encoded(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size * spec.itemsize for spec in self.tensors)

    @cached_property
    def by_tensor(self) -> tuple[tuple[int, ...], ...]:
        """Positions of each tensor's pieces."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for index, piece in enumerate(self.pieces):
            found[piece.tensor].append(index)
        return tuple(map(tuple, found))

    def spec(self, index: int) -> TensorSpec:
        """The tensor of a piece."""
        return self.tensors[self.pieces[index].tensor]

    def window(self, index: int) -> slice:
        """Where a piece's bytes are within its tensor's."""
        piece = self.pieces[index]
        itemsize = self.tensors[piece.tensor].itemsize
        return slice(piece.start * itemsize, piece.stop * itemsize)

    def check(self) -> None:
        """Check that the pieces, in order, are the tensors.

        Raises:
            ProtocolError: an element is in no piece, or in two.
        """
        ends = [0] * len(self.tensors)
        for piece in self.pieces:
            if not 0 <= piece.tensor < len(ends) or piece.start != ends[piece.tensor] or piece.stop <= piece.start:
                raise ProtocolError(f"the published pieces do not fit together at {piece}")
            ends[piece.tensor] = piece.stop
        for spec, end in zip(self.tensors, ends, strict=True):
            if end != spec.size:
                raise ProtocolError(f"{end} of the {spec.size} elements of {spec.name} were published")

    def combine(self, sums: Sequence[int]) -> int:
        """The checksum of the publication: xxh3-64 over the pieces' names, places and own checksums."""
        digest = xxhash.xxh3_64(self.encoded)
        digest.update(np.asarray(sums, "<u8").tobytes())
        return digest.intdigest()

    def check_fit(self, version: int, parameters: Mapping[str, Tensor]) -> None:
        """Check that the tensors are the parameters, one to one.

        Raises:
            ConfigError: a name, shape or dtype differs, or there is nothing at all.
        """
        specs = {spec.name: spec for spec in self.tensors}
        unknown, missing = sorted(set(specs) - set(parameters)), sorted(set(parameters) - set(specs))
        if not specs or unknown or missing:
            raise ConfigError(
                f"weights of version {version} do not fit the model: {len(specs)} tensors, "
                f"{len(unknown)} unknown {unknown[:3]}, {len(missing)} missing {missing[:3]}; "
                "trainer and generator must be built from the same model"
            )
        for name, parameter in parameters.items():
            spec, dtype = specs[name], NAMES.get(parameter.dtype)
            if spec.shape != tuple(parameter.shape) or spec.dtype != dtype:
                raise ConfigError(
                    f"weights of version {version}: {name} is {spec.shape} {spec.dtype}, the model has "
                    f"{tuple(parameter.shape)} {dtype}; trainer and generator must be built from the same model"
                )


class Part:
    """What this process holds of a parameter: the whole, or the rows of one shard.

    Raises:
        ConfigError: it is sharded in a way that gives no rank consecutive rows.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.tensor = parameter.detach()
        """What is held, on its own device."""
        self.start = 0
        """Number of its first element in the parameter."""
        self.primary = True
        """Whether no other rank is to write these elements."""
        distributed = sys.modules.get("torch.distributed.tensor")
        self.sharded = distributed is not None and isinstance(parameter, distributed.DTensor)
        if self.sharded:
            self._find_shard(name, parameter)
        self.stop = self.start + self.tensor.numel()

    def _find_shard(self, name: str, parameter: Any) -> None:
        self.tensor = parameter.to_local().detach()
        rows, num_shards, shard = parameter.shape[0], 1, 0
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_replicate():
                self.primary &= parameter.device_mesh.get_local_rank(dimension) == 0
            elif placement.is_shard(0) and num_shards == 1:
                num_shards = parameter.device_mesh.size(dimension)
                shard = parameter.device_mesh.get_local_rank(dimension)
            else:
                raise ConfigError(
                    f"{name} is placed as {parameter.placements}; weights can be published from, and loaded into, "
                    "shards of the first dimension and their replicas"
                )
        each = -(-rows // num_shards)
        first = min(shard * each, rows)
        if self.tensor.shape[0] != min(each, rows - first):
            raise ConfigError(f"{name}: shard {shard} of {num_shards} holds {self.tensor.shape[0]} of {rows} rows")
        self.start = first * (parameter.numel() // rows if rows else 0)


def plan(parameters: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], ranks: Ranks, *, whole: bool) -> Layout:
    """How all ranks together publish their parameters; the same on every rank.

    Args:
        parameters: what this rank holds.
        dtypes: what generators hold, by name.
        ranks: of the trainer.
        whole: rank 0 writes everything.

    Raises:
        ConfigError: a dtype or placement cannot be published.
    """
    specs, own = [], []
    with ranks.together():
        for index, (name, parameter) in enumerate(sorted(parameters.items())):
            dtype = dtypes[name]
            if dtype not in NAMES:
                raise ConfigError(f"{name} is {dtype}, which cannot be published; known: {', '.join(DTYPES)}")
            specs.append(TensorSpec(name, NAMES[dtype], tuple(parameter.shape)))
            part = Part(name, parameter)
            start, stop = (0, parameter.numel()) if whole else (part.start, part.stop)
            writes = ranks.rank == 0 if whole or not part.sharded else part.primary
            if writes and start < stop:
                own.append(Piece(index, start, stop, ranks.rank))
    everybody = ranks.gather_plain(own, list[Piece]) or []
    pieces = sorted((piece for pieces in everybody for piece in pieces), key=lambda piece: (piece.tensor, piece.start))
    told = msgspec.convert(ranks.tell(msgspec.to_builtins(pieces)), tuple[Piece, ...])
    layout = Layout(tuple(specs), told)
    layout.check()
    return layout


def as_bytes(tensor: Tensor) -> Bytes:
    """The bytes of a contiguous tensor on the host, in place."""
    found: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def checksum(data: Bytes) -> int:
    """xxh3-64 of memory."""
    return xxhash.xxh3_64_intdigest(data.data)
