"""Arrays in shared memory: written once by a worker, read in place by another, never seen by the driver.

A worker process has one :class:`Store`. It writes a payload's arrays into a *segment*, an anonymous memory file that
has no name and so cannot be left behind, and gives it back to be written again once the driver has released the
payload. Segments are reused because the first write to new pages costs ten times the copy itself.

The driver passes descriptors on and counts who needs them: :class:`Segment` is its end of a segment and
:class:`Lease` a payload in it. What a worker wrote stays readable after its death, as long as a lease is held.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from digen.errors import ProtocolError
from digen.types import ArraySpec, Payload, PayloadRef

ALIGNMENT = 64
"""Every array starts at a multiple of this many bytes: a cache line, and what vector kernels want."""

_MIN_SEGMENT = 1 << 16
_MAX_WASTE = 2
"""A free segment serves only payloads of at least half its size, so that small ones leave large ones free: published
weights do not take the segment of a snapshot, which holds them and the optimizer's moments."""

_CTYPES: dict[str, Any] = {
    "?": ctypes.c_bool,
    "b": ctypes.c_byte,
    "B": ctypes.c_ubyte,
    "h": ctypes.c_short,
    "H": ctypes.c_ushort,
    "i": ctypes.c_int,
    "I": ctypes.c_uint,
    "l": ctypes.c_long,
    "L": ctypes.c_ulong,
    "q": ctypes.c_longlong,
    "Q": ctypes.c_ulonglong,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
"""The formats that a ``memoryview`` can be cast to. It has none for half precision or bfloat16."""

_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux only; elsewhere pages are faulted in at first use


class Store:
    """A worker process's end of shared memory: the segments it writes and those of others that it reads.

    Args:
        name: the worker incarnation, for example ``"gen0#1"``.
        checksums: add the xxh3-64 of its bytes to every payload written. Payloads that carry one are always verified.
    """

    def __init__(self, name: str, *, checksums: bool = False) -> None:
        self.name = name
        self._checksums = checksums
        self._memory: dict[tuple[str, int], mmap.mmap] = {}
        self._free: dict[int, int] = {}  # segment -> size
        self._descriptors: dict[int, int] = {}  # of this store's segments; a mapping keeps one open anyway
        self._unsent: set[int] = set()
        self._writing: dict[int, Callable[[], bool]] = {}  # segments written in place -> whether that has ended
        self._num_made = 0

    @property
    def num_segments(self) -> int:
        """Number of segments made so far; flat once the largest number of payloads in flight has been seen."""
        return self._num_made

    def acquire(self, nbytes: int, *, populate: bool = True) -> int:
        """Take the smallest free segment that holds ``nbytes``, or make one, with ``populate`` of pages in place."""
        fitting = [
            (size, segment)
            for segment, size in self._free.items()
            if nbytes <= size <= _waste_limit(nbytes) and self._is_written(segment)
        ]
        if fitting:
            _, segment = min(fitting)
            del self._free[segment]
            return segment
        self._num_made += 1
        size = _size_class(nbytes)
        fd = _memory_file(f"digen:{self.name}:{self._num_made}", size)
        flags = mmap.MAP_SHARED | (_MAP_POPULATE if populate else 0)
        try:
            self._memory[self.name, self._num_made] = mmap.mmap(fd, size, flags=flags)
        except BaseException:
            os.close(fd)
            raise
        self._descriptors[self._num_made] = fd
        self._unsent.add(self._num_made)
        return self._num_made

    def release(self, segment: int) -> None:
        """Make a segment of this store free to be written again. Harmless when it is free already."""
        memory = self._memory.get((self.name, segment))
        if memory is not None:
            self._free[segment] = len(memory)

    def take_descriptor(self, segment: int) -> int | None:
        """A descriptor of a segment that the driver was not given yet, else ``None``. The caller closes it."""
        if segment not in self._unsent:
            return None
        self._unsent.remove(segment)
        return os.dup(self._descriptors[segment])

    def write(self, arrays: Mapping[str, Any]) -> PayloadRef:
        """Copy arrays into one segment.

        Args:
            arrays: name to a C-contiguous array: any object with the buffer protocol, or with a ``numpy()`` or
                ``__array__()`` method that gives one, such as a CPU tensor.

        Raises:
            TypeError: an array is of a format that a ``memoryview`` cannot be cast to (half precision, complex,
                structured, foreign byte order).
            ValueError: an array is not C-contiguous.
        """
        specs, sources, end = [], [], 0
        for name, array in arrays.items():
            source, spec = describe(name, array, offset=-(-end // ALIGNMENT) * ALIGNMENT)
            specs.append(spec)
            sources.append(source)
            end = spec.offset + source.nbytes
        segment = self.acquire(end)
        memory = memoryview(self._memory[self.name, segment])
        for source, spec in zip(sources, specs, strict=True):
            if source.nbytes:  # memoryview.cast refuses shapes with a zero
                memory[spec.offset : spec.offset + source.nbytes] = source.cast("B")
        checksum = checksum_of(memory[:end]) if self._checksums else None
        return PayloadRef(self.name, segment, end, tuple(specs), checksum)

    def place(
        self, arrays: Mapping[str, tuple[str, tuple[int, ...]]], written: Callable[[Mapping[str, memoryview]], bool]
    ) -> Placed:
        """As :meth:`digen.handles.Memory.place`. Pages of a new segment are made when they are first written."""
        specs, end = [], 0
        for name, (code, shape) in arrays.items():
            spec = ArraySpec(name, code, shape, offset=-(-end // ALIGNMENT) * ALIGNMENT)
            specs.append(spec)
            end = spec.offset + _nbytes(spec)
        segment = self.acquire(end, populate=False)
        whole = memoryview(self._memory[self.name, segment])[:end]
        views = {spec.name: view_of(whole, spec) for spec in specs}
        self._writing[segment] = partial(written, views)
        return Placed(self, PayloadRef(self.name, segment, end, tuple(specs)), views, self._descriptors[segment])

    def attach(self, store: str, segment: int, fd: int) -> None:
        """Map another store's segment for reading and close the descriptor."""
        try:
            memory = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | _MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._memory[store, segment] = memory

    def forget(self, store: str, segment: int) -> None:
        """Unmap a segment, as soon as no view of it is left."""
        self._memory.pop((store, segment), None)

    def read(self, ref: PayloadRef) -> dict[str, memoryview]:
        """Read-only views of a payload's arrays, without a copy; valid until the payload is released.

        Raises:
            ProtocolError: the segment is not mapped here, an array lies outside it, or the checksum differs.
        """
        memory = self._memory.get((ref.store, ref.segment))
        where = f"payload {ref.store}/{ref.segment}"
        if memory is None:
            raise ProtocolError(f"{where} is in no segment that this worker was given")
        if not 0 <= ref.nbytes <= len(memory):
            raise ProtocolError(f"{where} claims {ref.nbytes} bytes; its segment has {len(memory)}")
        whole = memoryview(memory)[: ref.nbytes].toreadonly()
        if ref.checksum is not None and checksum_of(whole) != ref.checksum:
            raise ProtocolError(f"{where} fails its checksum: it was changed after it was written")
        try:
            return {spec.name: view_of(whole, spec) for spec in ref.arrays}
        except (ValueError, OverflowError) as error:
            raise ProtocolError(f"{where}: {error}") from None

    def __del__(self) -> None:
        for fd in self._descriptors.values():
            with contextlib.suppress(OSError):
                os.close(fd)

    def _is_written(self, segment: int) -> bool:
        if segment in self._writing and self._writing[segment]():
            del self._writing[segment]
        return segment not in self._writing


class Placed(Payload):
    """A payload that is written in place; see :class:`digen.handles.PlacedPayload`."""

    __slots__ = ("_ref", "_store", "descriptor", "offsets", "segment", "views")

    def __init__(self, store: Store, ref: PayloadRef, views: dict[str, memoryview], descriptor: int) -> None:
        super().__init__({name: view.toreadonly() for name, view in views.items()})
        self._store: Store | None = store
        self._ref = ref
        self.views = views
        self.offsets = {spec.name: spec.offset for spec in ref.arrays}
        self.segment = ref.segment
        self.descriptor = descriptor

    @property
    def payload(self) -> Payload:
        """Itself."""
        return self

    def hand_out(self) -> PayloadRef:
        """The driver gets it now, and says when the segment is free again. Once."""
        if self._store is None:
            raise TypeError(f"{self!r} was handed out before; its memory is the driver's to give back")
        self._store = None
        return self._ref

    def __del__(self) -> None:
        if self._store is not None:
            self._store.release(self.segment)


class Reader(Protocol):
    """A connection to a worker that maps segments of other workers."""

    def forgotten(self, store: str, segment: int) -> None:
        """A segment that this worker maps will be read no more. May be called from any thread, at any time."""
        ...


class Owner(Protocol):
    """A connection to the worker that writes a segment."""

    def released(self, segment: int) -> None:
        """The payload in this segment will be read no more. May be called from any thread, at any time."""
        ...


class Segment:
    """The driver's descriptor of one segment. It never maps it.

    It is held by the connection to the living owner and by each lease; when the last of them lets go, the descriptor
    is closed and every worker that maps the segment is told to unmap it.
    """

    __slots__ = ("fd", "index", "readers", "store")

    def __init__(self, store: str, index: int, fd: int) -> None:
        self.store = store
        self.index = index
        self.fd = fd
        self.readers: WeakSet[Reader] = WeakSet()
        """The workers that were given the descriptor."""

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)
        for reader in self.readers:
            reader.forgotten(self.store, self.index)


class Lease(Payload):
    """A payload as the driver holds it: a reference, and the promise that its segment is not written meanwhile.

    It ends with :meth:`release`, or when nothing in the driver refers to it any more; in either case not before the
    calls that read it have ended. A lease is equal to itself only: the driver cannot compare arrays.
    """

    __slots__ = ("_num_readers", "_released", "owner", "segment")

    def __init__(self, ref: PayloadRef, segment: Segment, owner: Owner) -> None:
        super().__init__(ref=ref)
        self.segment = segment
        self.owner = owner
        self._released = False
        self._num_readers = 0

    @property
    def released(self) -> bool:
        """Whether it was given back; then it can be read no more."""
        return self._released

    def release(self) -> None:
        """Give the memory back to its owner. Harmless when done twice."""
        if not self._released:
            self._released = True
            if not self._num_readers:
                self.owner.released(self.segment.index)

    def begin_read(self) -> None:
        """A call that reads this payload was sent."""
        self._num_readers += 1

    def end_read(self) -> None:
        """A call that read this payload has ended."""
        self._num_readers -= 1
        if self._released and not self._num_readers:
            self.owner.released(self.segment.index)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __del__(self) -> None:
        self.release()


def _size_class(nbytes: int) -> int:
    """The next of four sizes per power of two: few distinct sizes, at most a quarter of the memory unused."""
    nbytes = max(nbytes, _MIN_SEGMENT)
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def _waste_limit(nbytes: int) -> int:
    return _MAX_WASTE * max(nbytes, _MIN_SEGMENT)


def _memory_file(name: str, size: int) -> int:
    """A descriptor of ``size`` bytes of anonymous shared memory that cannot shrink under a reader."""
    if hasattr(os, "memfd_create"):
        import fcntl

        fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return os.dup(file.fileno())


def describe(name: str, array: Any, offset: int) -> tuple[memoryview, ArraySpec]:
    """An array's memory, and what says how to read it at ``offset``. Errors: as :meth:`Store.write`."""
    source = _buffer(name, array)
    if not source.c_contiguous:
        raise ValueError(f"array {name!r} is not C-contiguous; make it so (numpy.ascontiguousarray, Tensor.contiguous)")
    code = source.format.lstrip("@")
    if not source.nbytes:
        code = code.lstrip("<=")  # the byte order of nothing; empty views made by view_of carry one
    if code not in _CTYPES:
        raise TypeError(
            f"array {name!r} has the buffer format {source.format!r}, which a memoryview cannot be cast to; "
            f"it can be one of {' '.join(_CTYPES)}: convert it, or view half precision as int16"
        )
    return source, ArraySpec(name, code, source.shape or (), offset)


def _buffer(name: str, array: Any) -> memoryview:
    try:
        return memoryview(array)
    except TypeError:
        for method in ("numpy", "__array__"):
            if hasattr(array, method):
                return memoryview(getattr(array, method)())
        kind = type(array).__name__
        raise TypeError(
            f"{name!r} is a {kind}, not an array: a payload takes objects with the buffer protocol"
        ) from None


def view_of(whole: memoryview, spec: ArraySpec) -> memoryview:
    """The array at its place in ``whole``, bytes.

    Raises:
        ValueError: it lies outside, or its format or shape is impossible.
    """
    nbytes, kind = _nbytes(spec), _CTYPES[spec.format]
    if spec.offset < 0 or spec.offset + nbytes > len(whole):
        raise ValueError(f"array {spec.name!r} lies outside the payload's {len(whole)} bytes")
    code: Any = spec.format  # typeshed wants a literal
    data = whole[spec.offset : spec.offset + nbytes]
    if not nbytes and len(spec.shape) > 1:  # as above; an array type of ctypes has any shape
        for length in reversed(spec.shape):
            kind *= length
        return memoryview(kind()).toreadonly()
    view: memoryview = data.cast(code, spec.shape) if nbytes else data.cast(code)
    return view


def _nbytes(spec: ArraySpec) -> int:
    kind = _CTYPES.get(spec.format)
    if kind is None or min(spec.shape, default=0) < 0:
        raise ValueError(f"array {spec.name!r} has the impossible format {spec.format!r} or shape {spec.shape}")
    return ctypes.sizeof(kind) * math.prod(spec.shape)


def checksum_of(data: memoryview) -> int:
    """xxh3-64 of bytes."""
    import xxhash

    return xxhash.xxh3_64_intdigest(data)
