"""What runs in a worker process: ``python -m digen.workers.child FD PARENT NAME [BEAT_FD SECONDS]``.

It imports a target by name, builds it, says READY, and then answers one call after the other on its socket until the
driver closes it. Meanwhile a thread of it beats, whatever the target does. It imports no torch, no numpy and no asyncio
of its own accord.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from digen import __version__
from digen.errors import ConfigError
from digen.types import Ready, WorkerSpec
from digen.workers.payload import Store
from digen.workers.wire import FrameReader, Request, WorkerCodec, close_all, frame, receive, send

STACKS = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to its log, also where one holds the interpreter. Does no other harm,
so that a batch system that sends it to all processes of a job ends none of them."""
BEAT = struct.Struct("<d")
"""A beat: the time of the clock that all processes of a machine share."""
_LEND = "lend_memory"
"""Method of a target that writes payloads in place, for a :class:`digen.handles.Memory`. Drivers do not see it."""
_PR_SET_PDEATHSIG = 1
_ORPHAN_CHECK_S = 1.0
_POLL_S = 50e-6
"""How long to look for the next request before sleeping: to be woken on a core that sleeps takes longer than a call."""


def main() -> None:
    """Serve one driver."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    faulthandler.enable()
    faulthandler.register(STACKS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt means
    die_with(parent)
    os.set_inheritable(fd, False)
    if len(sys.argv) > 4:
        beat(int(sys.argv[4]), float(sys.argv[5]))
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):
        serve(sock)


def serve(sock: socket.socket) -> None:
    """Answer the requests that arrive on ``sock``, the first of which is the worker's spec."""
    requests = _frames(sock)
    body, _ = next(requests, (b"", []))
    if not body:
        return
    spec_codec = WorkerCodec(Store(""))
    request = spec_codec.open(body, [])
    (spec,) = spec_codec.arguments(request)
    codec = WorkerCodec(Store(f"{spec.name}#{spec.incarnation}", checksums=spec.checksums))
    target, ready = _start(codec, request, spec)
    _send(sock, *ready)
    if target is None:
        return
    del request, spec, ready
    for body, fds in requests:
        _send(sock, *answer(codec, target, codec.open(body, fds)))


def build(target: Any, kwargs: Mapping[str, Any]) -> Any:
    """Make a worker's target.

    Args:
        target: ``"package.module:attribute"``, a class or another callable, or a finished object.
        kwargs: what to call it with; a finished object takes none.

    Raises:
        ConfigError: the name does not lead to anything.
    """
    if isinstance(target, str):
        module_name, _, path = target.partition(":")
        found: Any = import_module(module_name)
        for name in path.split("."):
            if not hasattr(found, name):
                raise ConfigError(f"target {target!r}: {found!r} has no attribute {name!r}")
            found = getattr(found, name)
        target = found
    if callable(target):
        return target(**kwargs)
    if kwargs:
        raise ConfigError(f"target {target!r} is an object already; it takes no kwargs {sorted(kwargs)}")
    return target


def public_methods(target: Any) -> tuple[str, ...]:
    """Names of everything on ``target`` that a driver can call: what has no leading underscore."""
    names = (name for name in dir(target) if not name.startswith("_") and name != _LEND)
    return tuple(name for name in names if callable(getattr(target, name, None)))


def die_with(parent: int) -> None:
    """End this process as soon as process ``parent``, which started it, has ended."""
    with contextlib.suppress(AttributeError, OSError):
        if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
            if os.getppid() != parent:  # it ended before the call
                os.kill(os.getpid(), signal.SIGKILL)
            return
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def beat(fd: int, interval_s: float) -> None:
    """Write the time to ``fd`` now, and then at every interval, for as long as threads of this process run."""
    os.set_inheritable(fd, False)
    os.write(fd, BEAT.pack(time.monotonic()))
    threading.Thread(target=_beat, args=(fd, interval_s), name="beat", daemon=True).start()


def _beat(fd: int, interval_s: float) -> None:
    with contextlib.suppress(OSError):  # the driver has closed its end: it is done with this process
        while True:
            time.sleep(interval_s)
            with contextlib.suppress(BlockingIOError):  # it has not looked for hours
                os.write(fd, BEAT.pack(time.monotonic()))


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _frames(sock: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    reader = FrameReader()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        until = time.perf_counter() + _POLL_S
        while not poll.poll(0) and time.perf_counter() < until:
            pass
        data, fds = receive(sock)
        if not data:
            return
        yield from reader.feed(data, fds)


def _start(codec: WorkerCodec, request: Request, spec: WorkerSpec) -> tuple[Any, tuple[bytes, list[int]]]:
    """The target, or ``None`` if it cannot be built, and the reply to the driver."""
    try:
        _import(spec.target)
        target = build(spec.target, spec.kwargs)
        if hasattr(target, _LEND):
            getattr(target, _LEND)(codec.store)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(spec.threads)
        ready = Ready(os.getpid(), public_methods(target), getattr(target, "version", 0), {"digen": __version__})
        return target, codec.reply(request.id, ready)
    except Exception as error:  # whatever it is belongs to the driver
        traceback.print_exception(error)
        return None, (codec.failure(request.id, error), [])


def _import(target: Any) -> None:
    """Import a target's module ahead of :func:`build`, and spare it the garbage collections.

    The hundreds of thousands of objects that torch and diffusers make on import live as long as the process. Not to
    look at them again and again saves a quarter of a worker's start, and most of its end.
    """
    if isinstance(target, str):
        gc.disable()
        try:
            import_module(target.partition(":")[0])
        finally:
            gc.freeze()
            gc.enable()


def answer(codec: WorkerCodec, target: Any, request: Request) -> tuple[bytes, list[int]]:
    """Call the target's method; whatever comes of it is the reply: ``(body, descriptors)``."""
    try:
        method: Callable[..., Any] = getattr(target, request.method)
        return codec.reply(request.id, method(*codec.arguments(request)))
    except BaseException as error:  # whatever it is belongs to the driver, even a call of sys.exit
        traceback.print_exception(error)
        return codec.failure(request.id, error), []


def _send(sock: socket.socket, body: bytes, fds: list[int]) -> None:
    data = memoryview(frame(body, len(fds)))
    try:
        sent = send(sock, data, fds)
    finally:
        close_all(fds)
    sock.sendall(data[sent:])


if __name__ == "__main__":
    main()
