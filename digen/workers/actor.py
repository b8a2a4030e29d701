"""What runs in a Ray actor: what :mod:`digen.workers.child` is to a process.

The messages are the same bytes. Beside them travel the payloads, as plain buffers: Ray writes those of a reply to the
object store of this node, and maps those of a request from there, fetched from another node where need be.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from msgspec import Struct

from digen import __version__
from digen.errors import ProtocolError
from digen.types import PayloadRef, Ready, WorkerSpec
from digen.workers.child import STACKS, answer, build, public_methods
from digen.workers.payload import Store, describe, view_of
from digen.workers.process import SECRET
from digen.workers.wire import START, Request, WorkerCodec

_STDERR = 2
_STACKS_S = 0.5
"""How long an actor may take to write its stacks."""
Buffers = dict[int, list[Any]]
"""Payloads beside a message: segment to its arrays' bytes, each a one-dimensional numpy array of uint8."""


class Node(Struct, frozen=True):
    """What an actor says of itself and of where it runs."""

    id: str
    """Of the node, as Ray calls it."""
    ip: str
    pid: int
    log: str
    """The file that its errors go to."""
    token_auth: bool
    """Whether the processes of its node ask for a token."""
    digen: str
    """Release of digen."""
    rendezvous: str
    """Where ranks on this node can meet; empty if not asked for."""


class TargetActor:
    """Builds a target and answers calls, one after the other, in a thread of its own.

    Only bytes and buffers go in and out. What a target raises is data; an error of Ray means that the actor is gone.
    """

    def __init__(self) -> None:
        self._codec = WorkerCodec(_Objects(""))
        self._target: Any = None
        self._meeting: Path | None = None
        self._left = threading.Event()

    def enter(self, environment: bytes, meet: bool) -> bytes:
        """Take over the environment, a JSON object of strings, and say where this is: a :class:`Node` as JSON.

        Secrets of whoever started the node go, apart from Ray's own; ``PYTHONPATH`` counts at once. With ``meet`` it
        makes a directory for ranks.
        """
        ray = import_module("ray")
        for name in list(os.environ):
            if SECRET.fullmatch(name) and not name.startswith("RAY_"):
                del os.environ[name]
        variables = msgspec.json.decode(environment, type=dict[str, str])
        os.environ.update(variables)
        paths = variables.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        os.umask(0o077)
        faulthandler.register(STACKS, file=_STDERR)
        log = _log()
        if meet:
            # Beside the logs: what an actor that was killed leaves there is Ray's to clear away. No port is opened.
            parent = Path(log).parents[1] if log else Path(tempfile.gettempdir())
            self._meeting = Path(tempfile.mkdtemp(prefix="digen-", dir=parent))
        return msgspec.json.encode(
            Node(
                ray.get_runtime_context().get_node_id(),
                ray.util.get_node_ip_address(),
                os.getpid(),
                log,
                os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
                __version__,
                f"file://{self._meeting}/store" if self._meeting else "",
            )
        )

    def call(self, body: bytes, *beside: Buffers) -> tuple[bytes, Buffers]:
        """Answer one request, the first of which is the worker's spec."""
        request = msgspec.msgpack.decode(body, type=Request)
        if request.method == START:
            reply = self._start(request)
        else:
            self._store.take_in(request.segments, beside)
            reply, _ = answer(self._codec, self._target, request)
            self._store.take_in((), ())
        return reply, self._store.hand_out()

    def watch(self) -> None:
        """Return when the actor has been told to go: a driver that waits for this learns of its end at once."""
        self._left.wait()

    def beat(self, interval_s: float) -> Iterator[None]:
        """An item now and at every interval, for as long as threads of this process run."""
        while True:
            yield
            if self._left.wait(interval_s):
                return

    def leave(self) -> None:
        """End the process, once the calls before have been answered, as a program ends: with its exit handlers."""
        self._left.set()
        if self._meeting is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)
        import_module("ray").actor.exit_actor()

    @property
    def _store(self) -> _Objects:
        store = self._codec.store
        assert isinstance(store, _Objects)  # noqa: S101 - for the type checker
        return store

    def _start(self, request: Request) -> bytes:
        codec = self._codec
        try:
            spec: WorkerSpec = codec.arguments(request)[0]
            codec = self._codec = WorkerCodec(_Objects(f"{spec.name}#{spec.incarnation}", checksums=spec.checksums))
            target = build(spec.target, spec.kwargs)
            torch = sys.modules.get("torch")
            if torch is not None:
                torch.set_num_threads(spec.threads)
            self._target = target
            ready = Ready(os.getpid(), public_methods(target), getattr(target, "version", 0))
            return codec.reply(request.id, ready)[0]
        except Exception as error:  # whatever it is belongs to the driver
            traceback.print_exception(error)
            return codec.failure(request.id, error)


class _Objects(Store):
    """Payloads that Ray carries: nothing stays here between two calls."""

    def __init__(self, name: str, *, checksums: bool = False) -> None:
        super().__init__(name, checksums=checksums)
        self._sums = checksums
        self._num_written = 0
        self._written: Buffers = {}
        self._given: dict[tuple[str, int], list[Any]] = {}

    def take_in(self, segments: Sequence[tuple[str, int]], beside: Sequence[Buffers]) -> None:
        """The payloads beside a request, which says whose they are; those before are let go."""
        self._given = {
            (store, segment): arrays
            for (store, _), buffers in zip(segments, beside, strict=True)
            for segment, arrays in buffers.items()
        }

    def hand_out(self) -> Buffers:
        """The payloads written since the last time."""
        written, self._written = self._written, {}
        return written

    def write(self, arrays: Mapping[str, Any]) -> PayloadRef:
        """As :meth:`Store.write`, but the one copy is left to Ray: each array is a buffer of its own."""
        import numpy as np

        specs, buffers = [], []
        for name, array in arrays.items():
            source, spec = describe(name, array, offset=0)
            specs.append(spec)
            buffers.append(np.frombuffer(source.cast("B"), np.uint8) if source.nbytes else np.empty(0, np.uint8))
        self._num_written += 1
        self._written[self._num_written] = buffers
        nbytes = sum(buffer.nbytes for buffer in buffers)
        checksum = _checksum(buffers) if self._sums else None
        return PayloadRef(self.name, self._num_written, nbytes, tuple(specs), checksum)

    def release(self, segment: int) -> None:
        """Do not hand it out after all."""
        self._written.pop(segment, None)

    def read(self, ref: PayloadRef) -> dict[str, memoryview]:
        """As :meth:`Store.read`; the views stay valid for as long as they are held."""
        buffers = self._given.get((ref.store, ref.segment))
        where = f"payload {ref.store}/{ref.segment}"
        if buffers is None or len(buffers) != len(ref.arrays):
            raise ProtocolError(f"{where} did not come with the request")
        if ref.checksum is not None and _checksum(buffers) != ref.checksum:
            raise ProtocolError(f"{where} fails its checksum: it was changed after it was written")
        try:
            return {
                spec.name: view_of(memoryview(buffer).toreadonly(), spec)
                for spec, buffer in zip(ref.arrays, buffers, strict=True)
            }
        except (ValueError, OverflowError) as error:
            raise ProtocolError(f"{where}: {error}") from None


def ask_for_stacks(pid: int) -> None:
    """Have an actor on this machine write the stacks of its threads to its log. One that is stopped cannot."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS)
    time.sleep(_STACKS_S)


def _checksum(buffers: Sequence[Any]) -> int:
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


def _log() -> str:
    """The file that stderr goes to, if it is one."""
    try:
        path = Path("/proc/self/fd/2").readlink()
    except OSError:
        return ""
    return str(path) if path.is_file() and len(path.parents) > 2 else ""
