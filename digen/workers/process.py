"""Workers in child processes: started, called, watched and reaped from one asyncio loop.

A worker is a ``python -m digen.workers.child`` in a session of its own, joined by a socketpair that only the two hold.
Calls are frames and futures (no task, lock or scope per call); the process itself is watched, because a closed socket
does not prove a death and an open one, held by a grandchild, does not prove a life. Nor does a process prove that it
still does something: a thread of it beats on a pipe of its own, which the driver looks at now and then.
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

from digen import __version__
from digen.errors import ConfigError, ProtocolError, WorkerDied, WorkerError, WorkerTimeout
from digen.types import Payload, Ready, WorkerSpec
from digen.workers.child import BEAT, STACKS
from digen.workers.handle import TargetHandle, closed, task_of, to_the_end
from digen.workers.payload import Lease, Segment
from digen.workers.wire import MAXRSS_BYTES, START, DriverCodec, FrameReader, Reply, frame, printable, receive, send

TARGET = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
"""What names a target: ``package.module:attribute``."""
SECRET = re.compile(r"AWS_.*|AZURE_.*|GOOGLE_APPLICATION_CREDENTIALS|.*(_API_KEY|_TOKEN|_SECRET|_PASSWORD)")
"""Environment variables that no worker is given."""
_TAIL_BYTES = 8192
_PIPE_BYTES = 1 << 16
_TAIL_LINES = 20
STACK_LINES = 80
"""Of the log's end, where the stacks of a worker's threads are in it."""
_EOF_GRACE_S = 1.0
"""How long a worker that has closed its socket may go on before it is killed."""
_BEAT_S = 0.25
"""Longest time between two beats of a worker."""
_BEATS = 8
"""Beats in the time that a worker may be silent, at least."""
_STACKS_S = 0.5
"""How long a worker has to write down its stacks before it is killed."""

_incarnations: Counter[str] = Counter()
"""Starts per worker name in this process; with the name it identifies a store."""


class ProcessWorker(TargetHandle):
    """A handle to a target that runs in a process of its own.

    Calls are answered in the order in which they were made. The child sees this process's import path, unless it has
    an interpreter of its own, and of its environment everything but secrets. It ends with this process, however that
    ends, and with the thread that started it.

    Args:
        name: unique in the run; letters, digits and ``._-``.
        target: ``"package.module:attribute"``; imported and called with ``kwargs`` in the child.
        kwargs: plain data.
        gpus: devices that the child sees, as indices into those that this process sees. None by default.
        threads: torch, OpenMP and BLAS threads of the child.
        python: interpreter of another virtual environment, in which the same release of digen is installed too. It
            imports what is installed there and what a ``PYTHONPATH`` in ``env`` names, nothing of this process's.
        log_dir: where its output goes, to ``<name>.<attempt>.log``. By default a temporary directory, which is
            removed when the worker is closed, unless it died.
        env: environment variables set in addition, the only way to hand over a secret.
        checksums: checksum every payload that it writes.
        start_timeout_s: longest time until it is READY.
        heartbeat_timeout_s: longest silence of a thread in the process that beats whatever the target computes; after
            it the process counts as hung (stopped, swapped out, or in C code that never lets go of the interpreter)
            and is killed. ``None``: any.
        stop_grace_s: how long :meth:`aclose` waits before it kills.

    Raises:
        ConfigError: a name, target, device, interpreter or time that cannot be.
    """

    def __init__(
        self,
        name: str,
        target: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        gpus: Sequence[int] = (),
        threads: int = 1,
        python: Path | str | None = None,
        log_dir: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        checksums: bool = False,
        start_timeout_s: float = 300.0,
        heartbeat_timeout_s: float | None = 60.0,
        stop_grace_s: float = 5.0,
    ) -> None:
        super().__init__(name)
        if heartbeat_timeout_s is not None and not heartbeat_timeout_s > 0:
            raise ConfigError(f"worker {name!r}: heartbeat_timeout_s is {heartbeat_timeout_s}; give seconds, or None")
        if not TARGET.fullmatch(target):
            raise ConfigError(f"worker {name!r}: target {target!r} is not of the form package.module:attribute")
        self.target = target
        """Where the child finds its target."""
        self.pid: int | None = None
        """The child's process id, once started."""
        self.log_path: Path | None = None
        """The current or last log file."""
        self._kwargs = dict(kwargs or {})
        self._threads = threads
        self._python = None if python is None else _interpreter(name, python)
        self._env = _environment(name, tuple(gpus), threads, env or {}, alike=python is None)
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._checksums = checksums
        self._start_timeout_s = start_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
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

    @property
    def lost(self) -> bool:
        """Whether the process died, hung or broke the protocol: it answers nothing until it is closed and started."""
        return self._child is not None and self._child.ended

    async def start(self) -> None:
        """Start the process and wait until its target is built. A closed worker may be started again.

        Raises:
            WorkerRaised, or an error of :mod:`digen.errors`: the target could not be imported or built.
            ConfigError: its interpreter has another release of digen.
            WorkerDied: the process ended.
            WorkerTimeout: it was not READY in time, or hung.
        """
        if self._child is not None:
            raise WorkerError(f"worker {self.name!r} is started already; close it first", worker=self.name)
        child = self._child = self._spawn()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                ready: Ready = await child.call(START, (self._spec(),))
            self._check_release(ready)
        except TimeoutError:
            await to_the_end(child.write_stacks())
            error = WorkerTimeout(
                f"worker {self.name!r} was not READY within {self._start_timeout_s} s; "
                f"raise start_timeout_s or see its log {self.log_path}",
                worker=self.name,
                task="start",
            )
            error.add_note(f"last lines of {self.name}'s log:\n{last_lines(child.log_path, STACK_LINES)}")
            child.keep_log = True
            await to_the_end(self._close(grace_s=0.0))
            raise error from None
        except BaseException as failure:
            if isinstance(failure, WorkerDied) and self._python is not None:
                failure.add_note(f"is digen installed there? {self._python} -m pip install digen-rl=={__version__}")
            await to_the_end(self._close(grace_s=0.0))
            raise
        self._offer(ready.methods, ready.version)

    async def call(self, method: str, /, *args: Any) -> Any:
        """Call any public method of the target with plain data, structs of :mod:`digen.types` and payloads.

        Raises:
            WorkerRaised: the method raised; an error of :mod:`digen.errors` is raised as itself.
            WorkerDied: the process ended before it answered.
            WorkerTimeout: it hung, or was killed with a reason.
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

    async def aclose(self) -> None:
        """End the process and everything that it started. Not cut short by cancellation; harmless when repeated.

        An idle worker is left to end by itself, a busy one is terminated; what has not ended after the grace is killed.
        """
        if self._child is not None:
            await to_the_end(self._close(self._stop_grace_s))

    async def kill(self, reason: str = "") -> None:
        """Kill the process and everything that it started; its log stays. Harmless when repeated.

        It is killed even where it cannot react, stopped or in a call that never returns.

        Args:
            reason: why it is not waited for any longer, for example ``"no answer in 30.2 s"``. With one, it first has
                half a second to write the stacks of its threads to its log, and calls that were not answered raise
                WorkerTimeout.
        """
        if self._child is not None:
            self._child.keep_log = True
            if reason:
                await to_the_end(self._child.give_up(reason))
            await to_the_end(self._close(grace_s=0.0))

    def __repr__(self) -> str:
        return f"ProcessWorker({self.name!r}, {self.target!r}, pid={self.pid})"

    def _spec(self) -> WorkerSpec:
        return WorkerSpec(
            self.name, _incarnations[self.name], self.target, self._kwargs, self._threads, checksums=self._checksums
        )

    def _check_release(self, ready: Ready) -> None:
        theirs = ready.info.get("digen", "of an unknown release")
        if theirs != __version__:
            python = self._python or sys.executable
            raise ConfigError(
                f"worker {self.name!r}: {python} has digen {theirs}, this process has digen {__version__}; install the "
                f"same release there: {python} -m pip install digen-rl=={__version__}"
            )

    def _spawn(self) -> _Child:
        _incarnations[self.name] += 1
        log_dir = self._log_dir or Path(tempfile.mkdtemp(prefix="digen-"))
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log_path, log_fd = _new_log(log_dir, self.name)
        ours, theirs = socket.socketpair()
        pulse = _Pulse(self._heartbeat_timeout_s)
        try:
            process = subprocess.Popen(  # noqa: S603 - an interpreter that the user names, and our own module
                [
                    self._python or sys.executable,
                    *("-P", "-u", "-m", "digen.workers.child", str(theirs.fileno()), str(os.getpid()), self.name),
                    *pulse.arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(theirs.fileno(), *pulse.theirs),
                start_new_session=True,
                umask=0o077,
                env=self._env,
            )
        except OSError as error:
            ours.close()
            pulse.close()
            message = f"worker {self.name!r}: {self._python or sys.executable} cannot be started: {error}"
            raise WorkerError(message, worker=self.name, task="start") from error
        except BaseException:
            ours.close()
            pulse.close()
            raise
        finally:
            theirs.close()
            pulse.close_theirs()
            os.close(log_fd)
        self.pid = process.pid
        codec = DriverCodec(self.name, f"{self.name}#{_incarnations[self.name]}")
        return _Child(
            self.name,
            process=process,
            sock=ours,
            pulse=pulse,
            codec=codec,
            log_path=self.log_path,
            on_result=self._note,
        )

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


class _Pulse:
    """The pipe on which a process beats: it writes the time there, again and again, and nobody is woken by that.

    The pipe is looked at when the last beat that was seen is as old as one may be, which takes one look in the time
    that a process may be silent. A silence is believed when a second look, an interval later, finds it too. If a look
    comes late, this process was stopped, busy or asleep, perhaps the whole machine was: then all the time is given
    anew. A process that has not beaten yet is being started, for which there is another limit.

    Args:
        timeout_s: longest silence. ``None``: there are no beats and nothing to look at.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.interval_s = 0.0 if timeout_s is None else min(_BEAT_S, timeout_s / _BEATS)
        """Between two beats."""
        self.silence_s = 0.0
        """Time since the last beat at the last look."""
        self.theirs: tuple[int, ...] = ()
        """The process's end, to be passed on."""
        self._ours = -1
        self._has_beaten = False
        self._beaten = 0.0
        self._due = float("inf")
        self._suspected = False
        if timeout_s is not None:
            self._ours, theirs = os.pipe()
            self.theirs = (theirs,)
            os.set_blocking(self._ours, False)
            os.set_blocking(theirs, False)  # a beat that finds no room is lost, and nobody waits

    @property
    def arguments(self) -> tuple[str, ...]:
        """For the process: where to beat, and how often."""
        return (*map(str, self.theirs), str(self.interval_s)) if self.theirs else ()

    def look(self, now: float) -> float | None:
        """Seconds until the next look, at a time of the loop; ``None``: the process is hung."""
        if self.timeout_s is None:
            return float("inf")
        beats = b""
        with contextlib.suppress(BlockingIOError):
            beats = os.read(self._ours, _PIPE_BYTES)
        if len(beats) >= BEAT.size:
            self._has_beaten = True
            self._beaten = min(now, *BEAT.unpack(beats[-BEAT.size :]))
        if not self._has_beaten or now - self._due > self.timeout_s / _BEATS:
            self._beaten = now
        self.silence_s = now - self._beaten
        left = self.timeout_s - self.silence_s
        if left <= 0:
            if self._suspected:
                return None
            left = self.interval_s
            self._suspected = True
        else:
            self._suspected = False
        self._due = now + left
        return left

    def close_theirs(self) -> None:
        """The process has its end."""
        for fd in self.theirs:
            os.close(fd)
        self.theirs = ()

    def close(self) -> None:
        """Close this process's end."""
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1


class _Child:
    """One child process and its socket, from spawn to reaping."""

    def __init__(
        self,
        name: str,
        *,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        pulse: _Pulse,
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
        self._pulse = pulse
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
        self._look: asyncio.TimerHandle | None = None
        if pulse.timeout_s is not None:
            self._on_look()

    @property
    def ended(self) -> bool:
        """Whether no call can be answered any more."""
        return self._end is not None

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
            self._finish(partial(closed, self._name))
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            if not busy:
                await asyncio.wait({self._exited}, timeout=grace_s / 2)
            self._signal(signal.SIGTERM)
            await asyncio.wait({self._exited}, timeout=grace_s / 2)
            self._signal(signal.SIGKILL)
            await self._exited

    async def give_up(self, reason: str) -> None:
        """Its calls will not be answered: ask for its stacks, then fail them. Leaves it to be closed."""
        if self._end is None:
            self._stop(partial(_late, self._name, reason, self.log_path))
            await self.write_stacks()
            self._fail()

    async def write_stacks(self) -> None:
        """Have it write the stacks of its threads to its log, if it can, and wait a moment for that."""
        self._ask_for_stacks()
        await asyncio.wait({self._exited}, timeout=_STACKS_S)

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

    def _on_look(self) -> None:
        """Has it beaten? A process that is hung is to say where, is not listened to any more, and is killed."""
        next_s = self._pulse.look(self._loop.time())
        if next_s is not None:
            self._look = self._loop.call_later(next_s, self._on_look)
            return
        self.keep_log = True
        self._stop(partial(_hung, self._name, self._pulse.silence_s, self.log_path))
        self._ask_for_stacks()
        self._loop.call_later(_STACKS_S, self._put_down)

    def _put_down(self) -> None:
        self._fail()
        self._signal(signal.SIGKILL)

    def _condemn(self, reason: str) -> None:
        """Nothing that it sends can be trusted: fail its calls and kill it."""
        if self._end is None:
            self.keep_log = True
            self._finish(partial(_broken, self._name, reason))
            self._signal(signal.SIGKILL)

    def _finish(self, end: Callable[[str], WorkerError]) -> None:
        """From now on no call is answered: fail those that wait with what ``end`` makes of their task."""
        self._stop(end)
        self._fail()

    def _stop(self, end: Callable[[str], WorkerError]) -> None:
        """Neither listen nor speak to it any more. What was ended before keeps its first reason."""
        if self._end is not None:
            return
        self._end = end
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._unsent.clear()
        if self._look is not None:
            self._look.cancel()

    def _fail(self) -> None:
        for call in self._calls.values():
            if not call.future.done() and self._end is not None:
                call.future.set_exception(self._end(call.task))

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
        code, peak_bytes = reap(self._process)
        if self._end is None:
            self.keep_log = True
            self._stop(partial(_died, self._name, code, peak_bytes, self.log_path))
        self._fail()
        for call in self._calls.values():
            for lease in call.leases:
                lease.end_read()
        self._calls.clear()
        self.codec.close()
        self._frames.close()
        self._sock.close()
        self._pulse.close()
        self._exited.set_result(None)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process and its group. The id cannot be another's yet: :meth:`_on_exit` reaps after its signal."""
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _ask_for_stacks(self) -> None:
        """Not its group: what it started may not know this signal, and would end."""
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, STACKS)


def _broken(worker: str, reason: str, task: str) -> WorkerError:
    message = f"worker {worker!r} broke the protocol during {task} and was killed: {reason}"
    return ProtocolError(message, worker=worker, task=task)


def reap(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Wait for a process; returns its exit code and the most memory in bytes that it had, 0 where nobody knows."""
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except ChildProcessError:  # the thread that watched it has waited for it
        return process.wait(), 0
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * MAXRSS_BYTES


def _died(worker: str, code: int, peak_bytes: int, log_path: Path, task: str) -> WorkerError:
    return WorkerDied(
        worker=worker,
        task=task,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        log_tail=last_lines(log_path),
        log_path=str(log_path),
        peak_bytes=peak_bytes,
    )


def _hung(worker: str, silence_s: float, log_path: Path, task: str) -> WorkerError:
    return _given_up(
        worker,
        f"hung: no heartbeat for {silence_s:.1f} s",
        log_path,
        task,
        "; if its code may hold the interpreter that long, raise workers.heartbeat_timeout_s",
    )


def _late(worker: str, reason: str, log_path: Path, task: str) -> WorkerError:
    return _given_up(worker, f"was given up: {reason}", log_path, task)


def _given_up(worker: str, what: str, log_path: Path, task: str, mend: str = "") -> WorkerError:
    message = f"worker {worker!r} {what}; it was killed, {task} was not answered; see its log {log_path}{mend}"
    error = WorkerTimeout(message, worker=worker, task=task)
    error.add_note(f"last lines of {worker}'s log:\n{last_lines(log_path, STACK_LINES)}")
    return error


def _interpreter(name: str, python: Path | str) -> str:
    path = Path(python).expanduser().absolute()  # not resolved: what it is the interpreter of depends on the link
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(
            f"worker {name!r}: its interpreter {path} is {'not executable' if path.exists() else 'missing'}; python "
            "must be that of a virtual environment in which digen-rl is installed, for example .venv/bin/python"
        )
    return str(path)


def _environment(
    name: str, gpus: tuple[int, ...], threads: int, extra: Mapping[str, str], *, alike: bool
) -> dict[str, str]:
    """Variables of a child: this process's but secrets; ``alike``: it has the same interpreter and import path."""
    env = {key: value for key, value in os.environ.items() if not SECRET.fullmatch(key)}
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
    if not alike:
        return {key: value for key, value in env.items() if key not in {"PYTHONPATH", "PYTHONHOME"}} | dict(extra)
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


def last_lines(path: Path, number: int = _TAIL_LINES) -> str:
    """The last lines of a log, with control and format characters made visible."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-number:]
    except OSError:
        return ""
    return printable("\n".join(lines))
