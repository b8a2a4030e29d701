"""What crosses a worker's socket: frames, messages, and how values become bytes and back.

A frame is a header (u32 little-endian length, u8 number of descriptors) and a msgpack body. Descriptors of new
shared-memory segments travel beside the bytes (``SCM_RIGHTS``) and arrive no later than the frame they belong to.
Every frame is a :class:`Request` or the one :class:`Reply` to it; what the worker should free rides on the next
request, which is the earliest moment at which it can need the room. Nothing here constructs an object of a type that
the schema does not name.
"""

from __future__ import annotations

import array
import contextlib
import os
import resource
import socket
import struct
import sys
import traceback
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.msgpack import Decoder, Encoder, Ext

from digen import errors
from digen.errors import DigenError, ProtocolError, WorkerError, WorkerRaised
from digen.handles import METHODS
from digen.types import Payload, PayloadRef, Ready, WorkerSpec
from digen.workers.payload import Lease, Placed, Segment, Store

MAX_FRAME = 16 << 20
"""Most bytes of one frame's body. A longer one is refused when its header arrives, before memory is taken for it."""

MAX_FDS = 253
"""Most descriptors beside one frame: the kernel's limit for one message."""

MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit of ``ru_maxrss``."""

START = "@start"
"""The first request to a worker: its :class:`digen.types.WorkerSpec`, answered by :class:`digen.types.Ready`."""

_T = TypeVar("_T")
_HEADER = struct.Struct("<IB")
_READ_SIZE = 1 << 16
_ANCILLARY_SIZE = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_PAYLOAD = 1  # msgpack extension type
_ENVELOPE = 1 << 16  # more than a message needs beside its arguments or result
_MAX_NOTICES = 64  # segments released, and segments forgotten, in one request
_MAX_TEXT = 1 << 16
_FIELD = str | int | float | bool

_encode_ref = Encoder().encode
_SCHEMA: dict[str, tuple[tuple[Any, ...], Any]] = {**METHODS, START: ((WorkerSpec,), Ready)}


class Request(Struct, frozen=True, array_like=True, gc=False):
    """A method call, and what the worker may free before it runs."""

    id: int
    method: str
    args: Raw
    segments: list[tuple[str, int]] = []
    """(store, segment) of the descriptors beside this frame, in their order."""
    released: list[int] = []
    """Segments of the worker's own store that nobody reads any more."""
    forgotten: list[tuple[str, int]] = []
    """Segments of other stores that are gone."""


class Reply(Struct, frozen=True, array_like=True, gc=False):
    """The result of a call, or a :class:`Failure`."""

    id: int
    ok: bool
    value: Raw
    segments: list[int] = []
    """Segments of the worker's store whose descriptors are beside this frame, in their order."""


class Failure(Struct, frozen=True):
    """An exception as data."""

    type: str
    """Qualified name; the bare name for errors of :mod:`digen.errors`, which the driver raises as themselves."""
    message: str
    traceback: str
    fields: dict[str, _FIELD | None] = {}
    """Attributes of an error of :mod:`digen.errors`."""


class FrameReader:
    """Cuts a byte stream, however it is split, into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Iterable[int] = ()) -> Iterator[tuple[bytes, list[int]]]:
        """Add what was read and yield the frames that are complete now, as ``(body, descriptors)``.

        Raises:
            ProtocolError: a header announces more than :data:`MAX_FRAME` bytes, or descriptors that did not come.
        """
        buffer = self._buffer
        buffer += data
        self._fds.extend(fds)
        start = 0
        try:
            while len(buffer) - start >= _HEADER.size:
                length, num_fds = _HEADER.unpack_from(buffer, start)
                if length > MAX_FRAME:
                    raise ProtocolError(f"a frame of {length} bytes was announced; the limit is {MAX_FRAME}")
                body = start + _HEADER.size
                if len(buffer) < body + length:
                    break
                if num_fds > len(self._fds):
                    raise ProtocolError(f"a frame announced {num_fds} descriptors, but {len(self._fds)} came with it")
                start = body + length
                yield bytes(buffer[body:start]), [self._fds.popleft() for _ in range(num_fds)]
        finally:
            del buffer[:start]

    def close(self) -> None:
        """Close descriptors that no frame has claimed."""
        while self._fds:
            os.close(self._fds.popleft())


def frame(body: bytes, num_fds: int = 0) -> bytes:
    """One frame, header included."""
    return _HEADER.pack(len(body), num_fds) + body


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Read what is there, at most 64 KiB, with the descriptors beside it. No bytes mean that the peer has closed."""
    data, ancillary, flags, _ = sock.recvmsg(_READ_SIZE, _ANCILLARY_SIZE, _CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        close_all(fds)
        raise ProtocolError("descriptors were lost on the way: this process has too many files open")
    return data, list(fds)


def send(sock: socket.socket, data: bytes | memoryview, fds: Sequence[int] = ()) -> int:
    """Send the beginning of ``data`` with all of ``fds``; return how many bytes went."""
    if not fds:
        return sock.send(data)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class WorkerCodec:
    """The worker's side: requests in, replies out, payloads as arrays."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._encode = Encoder(enc_hook=self._write).encode
        self._request = Decoder(Request).decode
        self._written: list[int] = []
        self._decoders = _Decoders(self._read, arguments=True)

    def open(self, body: bytes, fds: Sequence[int]) -> Request:
        """Decode a request's envelope, map the segments beside it and free what it says.

        Raises:
            ProtocolError: it is no request.
        """
        request = _decode(self._request, body)
        if len(request.segments) != len(fds):
            close_all(fds)
            raise ProtocolError(f"{len(fds)} descriptors came with a request that names {len(request.segments)}")
        for segment in request.released:
            self.store.release(segment)
        for store, segment in request.forgotten:
            self.store.forget(store, segment)
        for (store, segment), fd in zip(request.segments, fds, strict=True):
            self.store.attach(store, segment, fd)
        return request

    def arguments(self, request: Request) -> Sequence[Any]:
        """The call's arguments, typed after :data:`digen.handles.METHODS`; payloads are views of shared memory.

        Raises:
            TypeError: they are not what the method takes.
            ProtocolError: a payload cannot be read.
        """
        try:
            arguments: list[Any] = list(self._decoders[request.method](request.args))
        except (msgspec.DecodeError, RecursionError) as error:
            raise TypeError(f"{request.method} does not take these arguments: {error}") from error
        while request.method in METHODS and arguments and arguments[-1] is None:  # it was not given
            arguments.pop()
        return arguments

    def reply(self, request_id: int, value: Any) -> tuple[bytes, list[int]]:
        """Encode a result; its payloads' arrays are copied to shared memory, unless they were written there in place.

        Returns ``(body, descriptors)``.

        Raises:
            TypeError: the result holds something that cannot cross a process boundary.
            ProtocolError: it is longer than a frame.
        """
        self._written.clear()
        try:
            encoded = _short(self._encode(value))
        except BaseException:
            for segment in self._written:
                self.store.release(segment)
            raise
        descriptors = {segment: self.store.take_descriptor(segment) for segment in self._written}
        new = {segment: fd for segment, fd in descriptors.items() if fd is not None}
        return self._encode(Reply(request_id, True, Raw(encoded), list(new))), list(new.values())

    def failure(self, request_id: int, error: BaseException) -> bytes:
        """Encode an exception with its traceback."""
        kind = type(error)
        name, fields = f"{kind.__module__}.{kind.__qualname__}", {}
        if isinstance(error, DigenError) and kind.__module__ == errors.__name__:
            name, fields = kind.__name__, {k: v for k, v in vars(error).items() if isinstance(v, _FIELD | None)}
        failure = Failure(
            type=name.removeprefix("builtins."),
            message=_memory(error) + printable(str(error)[:_MAX_TEXT]),
            traceback=printable("".join(traceback.format_exception(error))[-_MAX_TEXT:]),
            fields=fields,
        )
        text = self._encode(failure)
        return self._encode(Reply(request_id, False, Raw(text)))

    def _write(self, value: Any) -> Any:
        if isinstance(value, Payload):
            if len(self._written) == MAX_FDS:
                raise ProtocolError(f"a result holds more than {MAX_FDS} payloads; put more arrays into each")
            ref = value.hand_out() if isinstance(value, Placed) else self.store.write(value)
            self._written.append(ref.segment)
            return reference(ref)
        if getattr(value, "ndim", None) == 0:  # a numpy or torch number
            return value.item()
        raise TypeError(f"a {type(value).__name__} cannot cross a process boundary; {_USE_PAYLOAD}")

    def _read(self, ref: PayloadRef) -> Payload:
        return Payload(self.store.read(ref), ref=ref)


class CallCodec:
    """The driver's side of one worker, whatever carries the messages: arguments out, results and errors in."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._encode = Encoder(enc_hook=self._pass_on).encode
        self._reply = Decoder(Reply).decode
        self._failure = Decoder(Failure).decode
        self._decoders = _Decoders(self._lease, arguments=False)

    def result(self, method: str, reply: Reply) -> Any:
        """The value of a reply, typed after :data:`digen.handles.METHODS`; payloads are leases.

        Raises:
            ProtocolError: it is not what the method returns.
        """
        return _decode(self._decoders[method], reply.value)

    def error(self, reply: Reply, task: str) -> DigenError:
        """The exception of a failed call, to be raised: of its own class if that is one of :mod:`digen.errors`."""
        failure = _decode(self._failure, reply.value)
        where = f"worker {self._worker!r}, {task}: "
        kind = getattr(errors, failure.type, None)
        if isinstance(kind, type) and issubclass(kind, DigenError):
            error = kind.__new__(kind)
            error.args = (where + failure.message,)
            known = {name for name in failure.fields if not (name.startswith("_") or hasattr(kind, name))}
            vars(error).update((name, failure.fields[name]) for name in known)  # and nothing over its methods
        else:
            error = WorkerRaised(f"{where}{failure.type}: {failure.message}")
        if isinstance(error, WorkerError):
            error.worker, error.task = self._worker, task
        if tail := failure.fields.get("log_tail"):
            error.add_note(f"last lines of its log:\n{tail}")
        error.add_note(f"traceback in {self._worker}:\n{failure.traceback}")
        return error

    def _envelope(self, body: bytes) -> Reply:
        return _decode(self._reply, body)

    def _arguments(self, method: str, args: tuple[Any, ...]) -> Raw:
        absent = len(METHODS[method][0]) - len(args) if method in METHODS else 0
        try:
            encoded = self._encode((*args, *[None] * absent))  # the decoder wants a tuple of one length
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WorkerError(f"cannot send {method} to {self._worker!r}: {error}", worker=self._worker) from error
        if len(encoded) > MAX_FRAME - _ENVELOPE:
            raise WorkerError(
                f"cannot send {method} to {self._worker!r}: its arguments take {len(encoded)} bytes, the limit is "
                f"{MAX_FRAME}; {_USE_PAYLOAD}",
                worker=self._worker,
            )
        return Raw(encoded)

    def _pass_on(self, value: Any) -> Any:
        raise NotImplementedError

    def _lease(self, ref: PayloadRef) -> Payload:
        raise NotImplementedError


class DriverCodec(CallCodec):
    """The driver's side of a worker that shares memory with others: payloads are leases of its segments.

    It owns the descriptors of the worker's segments while the worker lives.
    """

    def __init__(self, worker: str, store: str) -> None:
        super().__init__(worker)
        self._store = store
        self._segments: dict[int, Segment] = {}
        self._released: deque[int] = deque()
        self._forgotten: deque[tuple[str, int]] = deque()
        self._leases: list[Lease] = []

    @property
    def num_segments(self) -> int:
        """Number of the worker's segments that the driver holds."""
        return len(self._segments)

    def released(self, segment: int) -> None:
        """Let the worker write one of its segments again."""
        self._released.append(segment)

    def forgotten(self, store: str, segment: int) -> None:
        """Let the worker unmap a segment of another."""
        self._forgotten.append((store, segment))

    def close(self) -> None:
        """The worker is gone: keep only those of its segments that are leased."""
        self._segments.clear()

    def request(self, request_id: int, method: str, args: tuple[Any, ...]) -> tuple[bytes, list[Segment], list[Lease]]:
        """Encode a call.

        Returns:
            The body, the segments whose descriptors must go beside it, and the leases that it reads, already marked
            as being read.

        Raises:
            WorkerError: an argument cannot cross a process boundary, or is longer than a frame.
        """
        try:
            encoded = self._arguments(method, args)
        finally:
            leases, self._leases = self._leases, []
        new = list({id(s): s for lease in leases if self not in (s := lease.segment).readers}.values())
        if len(new) > MAX_FDS:
            raise WorkerError(
                f"cannot send {method} to {self._worker!r}: its arguments are in {len(new)} new segments, the limit is "
                f"{MAX_FDS}; {_USE_PAYLOAD}",
                worker=self._worker,
            )
        for segment in new:
            segment.readers.add(self)
        for lease in leases:
            lease.begin_read()
        message = Request(
            request_id,
            method,
            encoded,
            [(segment.store, segment.index) for segment in new],
            _drain(self._released),
            _drain(self._forgotten),
        )
        return self._encode(message), new, leases

    def open(self, body: bytes, fds: Sequence[int]) -> Reply:
        """Decode a reply's envelope and take over the descriptors beside it.

        Raises:
            ProtocolError: it is no reply.
        """
        try:
            reply = self._envelope(body)
        except ProtocolError:
            close_all(fds)
            raise
        if len(reply.segments) != len(fds):
            close_all(fds)
            raise ProtocolError(f"{len(fds)} descriptors came with a reply that names {len(reply.segments)}")
        for index, fd in zip(reply.segments, fds, strict=True):
            segment = self._segments[index] = Segment(self._store, index, fd)
            segment.readers.add(self)
        return reply

    def _pass_on(self, value: Any) -> Any:
        if isinstance(value, Lease):
            if value.released:
                raise TypeError(f"{value!r} was released; its memory may hold something else by now")
            self._leases.append(value)
            return reference(value.ref)
        if isinstance(value, Payload):
            raise TypeError(f"{value!r} is not held by a worker process, and the driver passes on no arrays")
        raise TypeError(f"a {type(value).__name__} cannot cross a process boundary")

    def _lease(self, ref: PayloadRef) -> Lease:
        segment = self._segments.get(ref.segment)
        if segment is None or ref.store != self._store:
            raise ProtocolError(f"it names the segment {ref.store}/{ref.segment}, of which no descriptor came")
        return Lease(ref, segment, self)


def reference(ref: PayloadRef | None) -> Ext:
    """What stands for a payload in a message."""
    return Ext(_PAYLOAD, _encode_ref(ref))


def _memory(error: BaseException) -> str:
    """For an error of whoever runs out of host memory: how much it had."""
    if not (isinstance(error, MemoryError) or "can't allocate memory" in str(error)):  # the latter is torch's
        return ""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES
    return f"out of memory: this process had up to {peak_bytes / 2**30:.2f} GiB; "


def printable(text: str) -> str:
    """``text`` with characters that could fool a terminal, or that no encoding has, made visible; lines stay."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) not in {"Cc", "Cf", "Cs"}:
        return char
    return char.encode("unicode_escape").decode()


_USE_PAYLOAD = "arrays belong in a digen.Payload, everything else must be plain data"


class _Decoders(dict[str, Any]):
    """One decoder per method, made when it is first needed."""

    def __init__(self, read: Any, *, arguments: bool) -> None:
        super().__init__()
        self._read = read
        self._arguments = arguments
        self._ref = Decoder(PayloadRef).decode

    def __missing__(self, method: str) -> Any:
        types, result = _SCHEMA.get(method, ((Any, ...), Any))
        kind: Any = tuple.__class_getitem__(types) if self._arguments else result
        decode = self[method] = Decoder(kind, ext_hook=self._extension).decode
        return decode

    def _extension(self, code: int, data: memoryview) -> Payload:
        if code != _PAYLOAD:
            raise ProtocolError(f"it holds the unknown msgpack extension {code}")
        return self._read(self._ref(data))  # type: ignore[no-any-return]  # the hook of one of the codecs


def _decode(decode: Callable[[Any], _T], data: bytes | Raw) -> _T:
    try:
        return decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"it cannot be decoded: {error}") from error


def _short(encoded: bytes) -> bytes:
    if len(encoded) > MAX_FRAME - _ENVELOPE:
        raise ProtocolError(f"the result takes {len(encoded)} bytes, the limit is {MAX_FRAME}; {_USE_PAYLOAD}")
    return encoded


def _drain(queue: deque[Any]) -> list[Any]:
    return [queue.popleft() for _ in range(min(len(queue), _MAX_NOTICES))]
