"""Weights through shared memory: written once by the trainer's ranks, in place, and read by every generator.

A segment holds the tensors and five arrays beside them: the layout as JSON, the checksum of every piece, whether it is
complete, who writes it, and a token. A thread fills it while the trainer goes on, and generators copy piece by piece
behind it; when the trainer dies they notice at once. The driver lends the segment to them and gives it back when nobody
reads it, so two or three segments serve a whole run.

Ranks of a sharded trainer all write into rank 0's segment, each its own rows. They open it by rank 0's descriptor,
which only processes of the same user can, and know it by the token. Where one cannot, on another host, rank 0 gathers.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from digen.diffusion.channels.base import Deadline, Outbox, device_of, own_pieces, parts_of, whole_pieces, write
from digen.diffusion.channels.layout import Bytes, Layout
from digen.diffusion.ranks import Ranks
from digen.errors import ConfigError, PayloadLost, ProtocolError
from digen.handles import Memory
from digen.types import Payload, Publication

LAYOUT, SUMS, DONE, WRITERS, TOKEN = "@layout", "@sums", "@done", "@writers", "@token"
"""Arrays of the payload that are no tensors."""

_FORMATS = {
    "F64": "d",
    "F32": "f",
    "F16": "h",
    "BF16": "h",
    "I64": "q",
    "I32": "i",
    "I16": "h",
    "I8": "b",
    "U8": "B",
    "BOOL": "?",
}
"""What a tensor looks like to a reader; half precision travels as 16-bit integers, bit for bit."""
_DONE, _FAILED = 1, 255  # states of a piece; 0 while it is awaited


class MemorySender(Outbox):
    """Publishes in the payload.

    Args: as :class:`digen.diffusion.channels.base.Outbox`.
    """

    def __init__(self, ranks: Ranks, dtypes: Mapping[str, torch.dtype], timeout_s: float) -> None:
        super().__init__(ranks, dtypes, timeout_s)
        self._memory: Memory | None = None
        self._mapped: dict[int, mmap.mmap] = {}  # segments of rank 0, on the others
        self._shares = True  # until some rank cannot reach rank 0's memory

    def lend_memory(self, memory: Memory) -> None:
        """As :meth:`digen.diffusion.channels.base.Sender.lend_memory`."""
        self._memory = memory

    def publish(self, version: int, parameters: Mapping[str, Tensor]) -> Publication:
        """As :meth:`digen.diffusion.channels.base.Sender.publish`.

        Without shared memory that every rank reaches, the copy is complete on return.

        Raises:
            ConfigError: a dtype or placement cannot be published.
        """
        self.settle()
        if self._shares:
            layout = self._plan(parameters)
            shared = self._share(layout)
            if shared is not None:
                slots, payload = shared
                pieces = own_pieces(layout, parts_of(parameters), self._ranks.rank)
                self._start(version, partial(slots.fill, layout, pieces, self._ranks.rank), device_of(parameters))
                return Publication(version, payload, None, len(layout.tensors), layout.nbytes)
            self._shares = False
        layout = self._plan(parameters, whole=True)
        arrays: dict[str, Any] = {}
        checksum = None
        if self._ranks.rank:
            for _ in whole_pieces(parameters):
                pass
        else:
            arrays, checksum = _copied(layout, parameters)
        return Publication(version, Payload(arrays), self._ranks.tell(checksum), len(layout.tensors), layout.nbytes)

    def _share(self, layout: Layout) -> tuple[_Slots, Payload] | None:
        """A view of a segment that all ranks have, and what to answer; ``None`` if some rank has none."""
        slots, placed, address = None, None, None
        with self._ranks.together():
            if self._ranks.rank == 0 and self._memory is not None:
                placed = self._memory.place(_shapes(layout), _is_written)
                slots = _Slots.of(layout, placed.views)
                slots.done[:] = 0
                placed.views[LAYOUT][:] = layout.encoded
                token = placed.views[TOKEN][0] = secrets.randbits(63)
                address = _Address(os.getpid(), placed.descriptor, placed.segment, token, placed.offsets[TOKEN])
        told = self._ranks.tell(msgspec.to_builtins((address, placed and list(placed.offsets.values()))))
        address, offsets = msgspec.convert(told, tuple[_Address | None, list[int] | None])
        if address is None or offsets is None:
            return None
        if self._ranks.rank:
            slots = self._reach(layout, address, offsets)
        if slots is not None and self._ranks.rank < len(slots.writers):
            slots.writers[self._ranks.rank] = os.getpid(), _birth(os.getpid()) or 0
        somebody_cannot = self._ranks.largest(slots is None)
        if slots is None:
            return None
        if somebody_cannot:
            slots.done[:] = _FAILED  # nobody writes it
            return None
        return slots, placed.payload if placed is not None else Payload({})

    def _reach(self, layout: Layout, address: _Address, offsets: list[int]) -> _Slots | None:
        try:
            memory = self._mapped.get(address.segment) or _map(Path(f"/proc/{address.pid}/fd/{address.descriptor}"))
            if int.from_bytes(memory[address.offset : address.offset + 8], sys.byteorder) != address.token:
                return None
            arrays = {
                name: np.frombuffer(memory, code, math.prod(shape), offset)
                for (name, (code, shape)), offset in zip(_shapes(layout).items(), offsets, strict=True)
            }
        except (OSError, ValueError):
            return None
        self._mapped[address.segment] = memory
        return _Slots.of(layout, arrays)


class MemorySource:
    """Reads a payload of :class:`MemorySender`, piece by piece as they become complete.

    Raises:
        ProtocolError: it is none.
    """

    def __init__(self, published: Publication, deadline: Deadline) -> None:
        payload = published.payload
        if not len(payload):
            raise ConfigError(f"weights of version {published.version} do not fit the model: 0 tensors")
        try:
            self.layout = _read_layout(bytes(payload[LAYOUT]))
            self._slots = _Slots.of(self.layout, payload)
        except KeyError as error:
            raise ProtocolError(f"weights of version {published.version} lack the array {error}") from None
        self._deadline = deadline

    def sum(self, index: int) -> int:
        """As :meth:`digen.diffusion.channels.base.Source.sum`.

        Raises:
            WorkerTimeout: the piece is not complete in time.
            PayloadLost: whoever was to write it has died.
            ProtocolError: it never will be.
        """
        done = self._slots.done
        if not done[index]:
            self._deadline.wait_for(partial(self._is_settled, index), self._awaited)
        if done[index] == _FAILED:
            raise ProtocolError("the trainer gave up writing these weights; its next commit says why")
        return int(self._slots.sums[index])

    def data(self, index: int) -> Bytes:
        """As :meth:`digen.diffusion.channels.base.Source.data`."""
        return self._slots.tensors[self.layout.pieces[index].tensor][self.layout.window(index)]

    def close(self) -> None:
        """As :meth:`digen.diffusion.channels.base.Source.close`."""

    def _is_settled(self, index: int) -> bool:
        pid, born = self._slots.writers[self.layout.pieces[index].rank].tolist()
        lives = not born or _birth(pid) == born
        if self._slots.done[index]:
            return True
        if not lives:
            raise PayloadLost(f"the trainer died while it wrote the weights: {self._awaited()}", task="load")
        return False

    def _awaited(self) -> str:
        return f"{np.count_nonzero(self._slots.done == 0)} of {len(self._slots.done)} pieces were not written"


class _Address(Struct, frozen=True, array_like=True):
    """Where a segment of rank 0 is."""

    pid: int
    descriptor: int
    segment: int
    token: int
    """What it holds at ``offset``, and nothing else does."""
    offset: int


class _Slots:
    """The arrays of a payload: tensors as bytes, in the layout's order, the pieces' sums and states, their writers."""

    def __init__(
        self, tensors: list[Bytes], sums: NDArray[np.uint64], done: Bytes, writers: NDArray[np.uint64]
    ) -> None:
        self.tensors = tensors
        self.sums = sums
        self.done = done
        self.writers = writers
        """By rank of the trainer: process id, and when it was started."""

    @classmethod
    def of(cls, layout: Layout, arrays: Mapping[str, Any]) -> _Slots:
        tensors = [np.asarray(arrays[spec.name]).reshape(-1).view(np.uint8) for spec in layout.tensors]
        sums, done = np.asarray(arrays[SUMS]), np.asarray(arrays[DONE])
        for spec, found in zip(layout.tensors, tensors, strict=True):
            if len(found) != spec.size * spec.itemsize:
                raise ProtocolError(
                    f"{spec.name} was published as {spec.shape} {spec.dtype}, but has {len(found)} bytes"
                )
        if not len(sums) == len(done) == len(layout.pieces):
            raise ProtocolError(f"{len(layout.pieces)} pieces were published with {len(sums)} checksums")
        return cls(tensors, sums, done, np.asarray(arrays[WRITERS]).reshape(-1, 2))

    def fill(self, layout: Layout, pieces: Iterable[tuple[int, Tensor]], rank: int) -> None:
        """Write the pieces of one rank, each with its checksum and then its state."""
        try:
            for index, values in pieces:
                piece = layout.pieces[index]
                into = self.tensors[piece.tensor][layout.window(index)]
                self.sums[index] = write(values, layout.spec(index).dtype, into)
                self.done[index] = _DONE
        except BaseException:
            for index, piece in enumerate(layout.pieces):
                if piece.rank == rank and not self.done[index]:
                    self.done[index] = _FAILED
            raise


@torch.no_grad()
def _copied(layout: Layout, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Any], int]:
    """Arrays of this process, complete, and the checksum of all."""
    arrays: dict[str, Any] = {name: np.zeros(shape, code) for name, (code, shape) in _shapes(layout).items()}
    arrays[LAYOUT][:] = np.frombuffer(layout.encoded, np.uint8)
    slots = _Slots.of(layout, arrays)
    slots.fill(layout, whole_pieces(parameters), 0)
    return arrays, layout.combine(slots.sums.tolist())


@lru_cache(maxsize=2)
def _read_layout(encoded: bytes) -> Layout:
    return Layout.read(encoded)


def _shapes(layout: Layout) -> dict[str, tuple[str, tuple[int, ...]]]:
    count = len(layout.pieces)
    num_ranks = 1 + max((piece.rank for piece in layout.pieces), default=0)
    own = {
        LAYOUT: ("B", (len(layout.encoded),)),
        SUMS: ("L", (count,)),
        DONE: ("B", (count,)),
        WRITERS: ("L", (num_ranks, 2)),
        TOKEN: ("L", (1,)),
    }
    return {spec.name: (_FORMATS[spec.dtype], spec.shape) for spec in layout.tensors} | own


def _is_written(views: Mapping[str, memoryview]) -> bool:
    return bool(np.all(np.asarray(views[DONE])))


def _birth(pid: int) -> int | None:
    """When a process of this machine was started, in ticks since it booted; ``None`` if it runs no more."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(numbers[18])


def _map(path: Path) -> mmap.mmap:
    """Map the memory file of a process on this machine."""
    if not str(path.readlink()).startswith("/memfd:digen:"):
        raise OSError(f"{path} is no segment")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no file")
        return mmap.mmap(descriptor, found.st_size)
    finally:
        os.close(descriptor)
