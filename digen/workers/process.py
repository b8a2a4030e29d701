"""Workers in child processes: started, called, watched and reaped from one asyncio loop.

A worker is a ``python -m digen.workers.child`` in a session of its own, joined by a socketpair that only the two hold.
Calls are frames and futures (no task, lock or scope per call); the process itself is watched, because a closed socket
does not prove a death and an open one, held by a grandchild, does not prove a life.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from digen.errors import ConfigError, ProtocolError, WorkerDied, WorkerError, WorkerTimeout
from digen.types import Payload, Ready, WorkerSpec
from digen.workers.handle import TargetHandle, task_of, to_the_end
from digen.workers.payload import Lease, Segment
from digen.workers.wire import START, DriverCodec, FrameReader, Reply, frame, printable, receive, send

_TARGET = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_SECRET = re.compile(r"AWS_.*|AZURE_.*|GOOGLE_APPLICATION_CREDENTIALS|.*(_API_KEY|_TOKEN|_SECRET|_PASSWORD)")
_TAIL_BYTES = 8192
_TAIL_LINES = 20
_EOF_GRACE_S = 1.0
"""How long a worker that has closed its socket may go on before it is killed."""

_incarnations: Counter[str] = Counter()
"""Starts per worker name in this process; with the name it identifies a store."""


class ProcessWorker(TargetHandle):
    """A handle to a target that runs in a process of its own.

    Calls are answered in the order in which they were made. The child sees this process's import path, and of its
    environment everything but secrets. It ends with this process, however that ends, and with the thread that
    started it.

    Args:
        name: unique in the run; letters, digits and ``._-``.
        target: ``"package.module:attribute"``; imported and called with ``kwargs`` in the child.
        kwargs: plain data.
        gpus: devices that the child sees, as indices into those that this process sees. None by default.
        threads: torch, OpenMP and BLAS threads of the child.
        log_dir: where its output goes, to ``<name>.<attempt>.log``. By default a temporary directory, which is
            removed when the worker is closed, unless it died.
        env: environment variables set in addition, the only way to hand over a secret.
        checksums: checksum every payload that it writes.
        start_timeout_s: longest time until it is READY.
        stop_grace_s: how long :meth:`aclose` waits before it kills.

    Raises:
        ConfigError: a name, target or device that cannot be.
    """

    def __init__(
        self,
        name: str,
        target: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        gpus: Sequence[int] = (),
        threads: int = 1,
        log_dir: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        checksums: bool = False,
        start_timeout_s: float = 300.0,
        stop_grace_s: float = 5.0,
    ) -> None:
        super().__init__(name)
        if not _TARGET.fullmatch(target):
            raise ConfigError(f"worker {name!r}: target {target!r} is not of the form package.module:attribute")
        self.target = target
        """Where the child finds its target."""
        self.pid: int | None = None
        """The child's process id, once started."""
        self.log_path: Path | None = None
        """The current or last log file."""
        self._kwargs = dict(kwargs or {})
        self._threads = threads
        self._env = _environment(name, tuple(gpus), threads, env or {})
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._checksums = checksums
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._child: _Child | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes sent to and received from the worker since it was started."""
        return self._child.num_bytes if self._child else 0

    @property
    def num_dropped_replies(self) -> int:
        """Replies since the start that came after their call was cancelled."""
        return self._child.num_dropped_replies if self._child else 0

    async def start(self) -> None:
        """Start the process and wait until its target is built. A closed worker may be started again.

        Raises:
            WorkerRaised, or an error of :mod:`digen.errors`: the target could not be imported or built.
            WorkerDied: the process ended.
            WorkerTimeout: it was not READY in time.
        """
        if self._child is not None:
            raise WorkerError(f"worker {self.name!r} is started already; close it first", worker=self.name)
        child = self._child = self._spawn()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                ready: Ready = await child.call(START, (self._spec(),))
        except TimeoutError:
            error = WorkerTimeout(
                f"worker {self.name!r} was not READY within {self._start_timeout_s} s; "
                f"raise start_timeout_s or see its log {self.log_path}",
                worker=self.name,
                task="start",
            )
            error.add_note(f"last lines of {self.name}'s log:\n{_tail(child.log_path)}")
            child.keep_log = True
            await to_the_end(self._close(grace_s=0.0))
            raise error from None
        except BaseException:
            await to_the_end(self._close(grace_s=0.0))
            raise
        self._offer(ready.methods, ready.version)

    async def call(self, method: str, /, *args: Any) -> Any:
        """Call any public method of the target with plain data, structs of :mod:`digen.types` and payloads.

        Raises:
            WorkerRaised: the method raised; an error of :mod:`digen.errors` is raised as itself.
            WorkerDied: the process ended before it answered.
            ProtocolError: the answer is not one.
        """
        if self._child is None:
            raise WorkerError(f"worker {self.name!r} is not started", worker=self.name, task=task_of(method, args))
        return await self._child.call(method, args)

    def release(self, payload: Payload) -> None:
        """Let the worker reuse a payload's memory, once the calls that read it have ended.

        Ignores payloads of other workers and those that were released before.
        """
        if isinstance(payload, Lease) and self._child is not None and payload.owner is self._child.codec:
            payload.release()

    def kill(self) -> None:
        """End the process at once: calls that wait for an answer fail."""
        if self._child is not None:
            self._child.kill()

    async def aclose(self) -> None:
        """End the process and everything that it started. Not cut short by cancellation; harmless when repeated.

        An idle worker is left to end by itself, a busy one is terminated; what has not ended after the grace is killed.
        """
        if self._child is not None:
            await to_the_end(self._close(self._stop_grace_s))

    def __repr__(self) -> str:
        return f"ProcessWorker({self.name!r}, {self.target!r}, pid={self.pid})"

    def _spec(self) -> WorkerSpec:
        return WorkerSpec(
            self.name, _incarnations[self.name], self.target, self._kwargs, self._threads, checksums=self._checksums
        )

    def _spawn(self) -> _Child:
        _incarnations[self.name] += 1
        log_dir = self._log_dir or Path(tempfile.mkdtemp(prefix="digen-"))
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log_path, log_fd = _new_log(log_dir, self.name)
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-P", "-u", "-m", "digen.workers.child", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                umask=0o077,
                env=self._env,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(log_fd)
        self.pid = process.pid
        codec = DriverCodec(self.name, f"{self.name}#{_incarnations[self.name]}")
        return _Child(self.name, process=process, sock=ours, codec=codec, log_path=self.log_path, on_result=self._note)

    async def _close(self, grace_s: float) -> None:
        child = self._child
        if child is None:
            return
        await child.close(grace_s)
        if self._child is not child:  # closed twice at the same time
            return
        self._child = None
        self.pid = None
        self._withdraw()
        if self._log_dir is None and not child.keep_log:
            shutil.rmtree(child.log_path.parent, ignore_errors=True)


class _Call:
    """A request that was sent and not answered yet."""

    __slots__ = ("args", "future", "leases", "method")

    def __init__(self, future: asyncio.Future[Any], method: str, args: tuple[Any, ...], leases: list[Lease]) -> None:
        self.future = future
        self.method = method
        self.args = args
        self.leases = leases

    @property
    def task(self) -> str:
        return task_of(self.method, self.args)


class _Child:
    """One child process and its socket, from spawn to reaping."""

    def __init__(
        self,
        name: str,
        *,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        codec: DriverCodec,
        log_path: Path,
        on_result: Callable[[str, Any], None],
    ) -> None:
        self.codec = codec
        self.log_path = log_path
        self.keep_log = False
        self.num_bytes = 0
        self.num_dropped_replies = 0
        self._name = name
        self._process = process
        self._sock = sock
        self._on_result = on_result
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._frames = FrameReader()
        self._unsent: deque[tuple[memoryview, list[Segment]]] = deque()
        self._end: Callable[[str], WorkerError] | None = None
        """Once no call can be answered any more: the error for a task."""
        sock.setblocking(False)
        self._loop.add_reader(sock, self._on_readable)
        self._watch_process()

    def call(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Send a request; the future is its reply. Cancelling it leaves the worker alone and drops the reply."""
        if self._end is not None:
            raise self._end(task_of(method, args))
        request_id = next(self._ids)
        body, segments, leases = self.codec.request(request_id, method, args)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls[request_id] = _Call(future, method, args, leases)
        data = frame(body, len(segments))
        self.num_bytes += len(data)
        self._unsent.append((memoryview(data), segments))
        if len(self._unsent) == 1:
            self._on_writable()
        return future

    async def close(self, grace_s: float) -> None:
        """End the process: let it, then terminate, then kill its group. Returns when it is reaped."""
        if not self._exited.done():
            busy = bool(self._calls)
            self._finish(partial(_closed, self._name))
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            if not busy:
                await asyncio.wait({self._exited}, timeout=grace_s / 2)
            self._signal(signal.SIGTERM)
            await asyncio.wait({self._exited}, timeout=grace_s / 2)
            self._signal(signal.SIGKILL)
            await self._exited

    def kill(self) -> None:
        """End the process and what it started, without a word."""
        self._signal(signal.SIGKILL)

    def _on_writable(self) -> None:
        """Send what waits; ask to be called again if the socket takes no more."""
        while self._unsent:
            data, segments = self._unsent[0]
            try:
                sent = send(self._sock, data, [segment.fd for segment in segments])
            except (BlockingIOError, InterruptedError):
                sent = 0
            except ConnectionError:  # it closed its end; what can be read and the process's end tell why
                self._unsent.clear()
                break
            except OSError as error:
                self._condemn(f"nothing can be sent to it: {error}")
                return
            if sent < len(data):
                self._unsent[0] = (data[sent:], [] if sent else segments)
                self._loop.add_writer(self._sock, self._on_writable)
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._sock)

    def _on_readable(self) -> None:
        if not self._read():
            self._loop.remove_reader(self._sock)
            self._loop.call_later(_EOF_GRACE_S, self._condemn, "it closed its socket, but went on")

    def _read(self) -> bool:
        """Take in what has arrived; false at the end of the stream."""
        try:
            data, fds = receive(self._sock)
            self.num_bytes += len(data)
            for body, body_fds in self._frames.feed(data, fds):
                self._on_reply(self.codec.open(body, body_fds))
        except (BlockingIOError, InterruptedError):
            return True
        except ConnectionError:
            return False
        except ProtocolError as error:
            self._condemn(str(error))
            return True
        return bool(data)

    def _on_reply(self, reply: Reply) -> None:
        call = self._calls.pop(reply.id, None)
        if call is None:
            raise ProtocolError(f"it answers request {reply.id}, which was not made or was answered before")
        for lease in call.leases:
            lease.end_read()
        future, method = call.future, call.method
        try:
            if not reply.ok:
                error = self.codec.error(reply, call.task)
            else:
                result = self.codec.result(method, reply)
                self._on_result(method, result)
                if not future.done():
                    future.set_result(result)
                else:
                    self.num_dropped_replies += 1
                return
        except ProtocolError as invalid:
            error = ProtocolError(
                f"worker {self._name!r}, {call.task}: the result is not what {method} returns: {invalid}",
                worker=self._name,
                task=call.task,
            )
        if not future.done():
            future.set_exception(error)
        else:
            self.num_dropped_replies += 1

    def _condemn(self, reason: str) -> None:
        """Nothing that it sends can be trusted: fail its calls and kill it."""
        if self._end is None:
            self.keep_log = True
            self._finish(partial(_broken, self._name, reason))
            self._signal(signal.SIGKILL)

    def _finish(self, end: Callable[[str], WorkerError]) -> None:
        """From now on no call is answered: fail those that wait with what ``end`` makes of their task."""
        if self._end is not None:
            return
        self._end = end
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._unsent.clear()
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(end(call.task))

    def _watch_process(self) -> None:
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self._process.pid)
            self._loop.add_reader(self._pidfd, self._on_exit)
        else:
            self._pidfd = -1
            threading.Thread(target=self._wait, name=f"{self._name} waiter", daemon=True).start()

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS before Python 3.13
            self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        """Take in what the process said last, end what it started, reap it and let go of everything."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._end is None:
            received = -1
            while received != self.num_bytes and self._end is None:
                received = self.num_bytes
                self._read()
        self._signal(signal.SIGKILL)
        code = self._process.wait()
        if self._end is None:
            self.keep_log = True
            self._finish(partial(_died, self._name, code, self.log_path))
        for call in self._calls.values():
            for lease in call.leases:
                lease.end_read()
        self._calls.clear()
        self.codec.close()
        self._frames.close()
        self._sock.close()
        self._exited.set_result(None)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process and its group. The id cannot be another's yet: :meth:`_on_exit` reaps after its signal."""
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


def _closed(worker: str, task: str) -> WorkerError:
    return WorkerError(f"worker {worker!r} was closed, {task} was not answered", worker=worker, task=task)


def _broken(worker: str, reason: str, task: str) -> WorkerError:
    message = f"worker {worker!r} broke the protocol during {task} and was killed: {reason}"
    return ProtocolError(message, worker=worker, task=task)


def _died(worker: str, code: int, log_path: Path, task: str) -> WorkerError:
    return WorkerDied(
        worker=worker,
        task=task,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        log_tail=_tail(log_path),
        log_path=str(log_path),
    )


def _environment(name: str, gpus: tuple[int, ...], threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not _SECRET.fullmatch(key)}
    visible = env.get("CUDA_VISIBLE_DEVICES")
    devices = [str(gpu) for gpu in gpus]
    if visible is not None and gpus:
        seen = [device.strip() for device in visible.split(",") if device.strip()]
        if max(gpus) >= len(seen):
            raise ConfigError(f"worker {name!r}: gpus {gpus}, but CUDA_VISIBLE_DEVICES={visible!r} shows {len(seen)}")
        devices = [seen[gpu] for gpu in gpus]
    env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        env[variable] = str(threads)
    paths = [path or str(Path.cwd()) for path in sys.path]
    if "PYTHONPATH" in extra:
        paths.insert(0, extra["PYTHONPATH"])
    return {**env, **extra, "PYTHONPATH": os.pathsep.join(paths)}


def _new_log(directory: Path, name: str) -> tuple[Path, int]:
    """The log of the next attempt: its path and a descriptor to write to."""
    for attempt in itertools.count(1):
        path = directory / f"{name}.{attempt}.log"
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    raise AssertionError  # unreachable: the count has no end


def _tail(path: Path) -> str:
    """The last lines of a log, with control and format characters made visible."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return ""
    return printable("\n".join(lines))
