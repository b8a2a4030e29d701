"""The server of a vision-language judge: vLLM's, or ``transformers serve``, started, watched and ended by a worker.

Its target is a plain blocking class that runs in a worker process of its own. The server listens on loopback; a
:class:`digen.diffusion.rewards.judge.VisionJudge` asks it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from digen.errors import ConfigError, WorkerDied, WorkerError, WorkerTimeout

MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "transformers": "transformers.cli.transformers"}
"""The module that an interpreter runs as the server, by command."""

_HOST = "127.0.0.1"
_PORT_TAKEN = "address already in use"
_ATTEMPTS = 5
_POLL_S = 0.1
_ANSWER_S = 5.0
"""Longest wait for an answer about the server's health."""
_SLEEP_S = 120.0
"""Longest time to move the weights between the GPU and the host."""
_GRACE_S = 2.0
"""Between asking the server to end and killing it."""
_TAIL_BYTES = 8192
_TAIL_LINES = 20


class JudgeServer:
    """A server of one judge, ready when this is constructed; it ends with this process, however that ends.

    Args:
        model: a folder, or the name of a model on the hub; also the name under which the server knows it.
        log: the file that takes the server's output.
        name: of the worker, for errors.
        command: ``vllm`` or ``transformers``.
        python: interpreter that has it. Default: this one.
        args: further arguments of the server.
        env: environment variables of the server, beside this process's.
        num_gpus: devices that this process sees, all of them the server's.
        sleep: keep it asleep from the start; :meth:`wake` it before it is asked.
        start_timeout_s: longest time until it answers.

    Raises:
        WorkerDied: it ended before it answered; its last output is in ``log_tail``.
        WorkerTimeout: it did not answer in time.
        ConfigError: the interpreter cannot be started, or the server cannot sleep.
    """

    def __init__(
        self,
        model: str,
        log: str,
        *,
        name: str = "judge",
        command: str = "vllm",
        python: str | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        num_gpus: int = 0,
        sleep: bool = False,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._name, self._log = name, Path(log)
        self._env = _environment(env or {}, sleep=sleep)
        deadline = time.monotonic() + start_timeout_s
        for left in reversed(range(_ATTEMPTS)):
            port = _free_port()
            self._url = f"http://{_HOST}:{port}"
            words = _command(command, python or sys.executable, model, port, num_gpus, sleep=sleep)
            self._start([*words, *args])
            try:
                self._wait(deadline, start_timeout_s)
                break
            except WorkerDied as error:
                if not left or _PORT_TAKEN not in error.log_tail.lower():
                    raise
            # Another process took the port after it was found free.
        if sleep:
            try:
                self.sleep()
            except BaseException:
                self.close()
                raise

    def url(self) -> str:
        """The base of its OpenAI-compatible endpoint."""
        return f"{self._url}/v1"

    def check(self) -> None:
        """See whether the server lives and answers.

        Raises:
            WorkerDied: it has ended.
            WorkerTimeout: it does not say that it is well.
        """
        self._check_alive("check")
        if not self._is_healthy():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(_GRACE_S)  # it may be about to end
            self._check_alive("check")
            raise WorkerTimeout(
                f"the server of {self._name!r} lives but does not answer {self._url}/health with 200 within "
                f"{_ANSWER_S:g} s; its log is {self._log}",
                worker=self._name,
            )

    def sleep(self) -> None:
        """Let the GPU memory of the weights go, which the host keeps; until :meth:`wake` nothing is answered.

        Raises:
            ConfigError: the server has no sleep mode.
            WorkerError: it failed.
        """
        put_to_sleep(self._url)

    def wake(self) -> None:
        """Answer again.

        Raises:
            ConfigError, WorkerError: as :meth:`sleep`.
        """
        wake_up(self._url)

    def close(self) -> None:
        """End the server and whatever it has started. Harmless when repeated."""
        self._end()

    def _start(self, command: Sequence[str]) -> None:
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        read_end, write_end = os.pipe()
        guard = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", "digen.diffusion.engines.guard", str(read_end)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(read_end,),
            process_group=0,
        )
        os.close(read_end)
        try:
            with self._log.open("ab") as log:
                self._server = subprocess.Popen(  # noqa: S603 - what the config names; no shell
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, process_group=guard.pid
                )
        except OSError as error:
            _end(guard, None, write_end)
            raise ConfigError(f"{self._name}: {command[0]} cannot be started: {error.strerror}") from None
        # Also when the interpreter ends in its own way; when it does not, the guard sees the pipe's end.
        self._end = weakref.finalize(self, _end, guard, self._server, write_end)

    def _wait(self, deadline: float, timeout_s: float) -> None:
        try:
            while not self._is_healthy():
                self._check_alive("start")
                self._check_time(deadline, timeout_s)
                time.sleep(_POLL_S)
            self._check_alive("start")  # what answered may be another's
        except BaseException:
            self.close()
            raise

    def _check_time(self, deadline: float, timeout_s: float) -> None:
        if time.monotonic() > deadline:
            raise WorkerTimeout(
                f"the server of {self._name!r} did not answer {self._url}/health with 200 within {timeout_s:g} s; "
                f"raise start_timeout_s, or see its log {self._log}",
                worker=self._name,
                task="start",
            )

    def _check_alive(self, task: str) -> None:
        code = self._server.poll()
        if code is not None:
            raise WorkerDied(
                worker=f"server of {self._name}",
                task=task,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                log_tail=self._tail(),
                log_path=str(self._log),
            )

    def _is_healthy(self) -> bool:
        try:
            status, _ = _ask(self._url, "GET", "/health", _ANSWER_S)
        except (OSError, http.client.HTTPException):
            return False
        return status == http.client.OK

    def _tail(self) -> str:
        """The last lines that this server wrote."""
        with self._log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)


def put_to_sleep(url: str) -> None:
    """Level 1 of vLLM's sleep mode for the server at ``url``, a base without path.

    Raises:
        ConfigError: it has none.
        WorkerError: it failed, or did not within two minutes.
    """
    _control(url, "/sleep?level=1", asleep=True)


def wake_up(url: str) -> None:
    """The end of :func:`put_to_sleep`; raises the same."""
    _control(url, "/wake_up", asleep=False)


def _control(url: str, path: str, *, asleep: bool) -> None:
    try:
        status, content = _ask(url, "POST", path, _SLEEP_S)
        if status == http.client.OK:
            status, content = _ask(url, "GET", "/is_sleeping", _ANSWER_S)
    except (OSError, http.client.HTTPException) as error:
        raise WorkerError(f"{url}{path} cannot be asked: {type(error).__name__}: {error}") from error
    if status == http.client.NOT_FOUND:
        raise ConfigError(
            f"the server at {url} has no {path.partition('?')[0]}: sleep needs vLLM with VLLM_SERVER_DEV_MODE=1 and "
            "--enable-sleep-mode"
        )
    said = content.decode(errors="replace")
    if status != http.client.OK or _json(said) != {"is_sleeping": asleep}:
        raise WorkerError(f"{url}{path} failed: the server answered {status}: {said[:200]!r}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _ask(url: str, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(url)
    assert parts.hostname is not None  # noqa: S101 - ours, or checked by the client
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request(method, path)
        with connection.getresponse() as response:
            return response.status, response.read(_TAIL_BYTES)
    finally:
        connection.close()


def _command(command: str, python: str, model: str, port: int, num_gpus: int, *, sleep: bool) -> list[str]:
    where = ["--host", _HOST, "--port", str(port)]
    if command == "transformers":
        device = "cuda" if num_gpus else "cpu"
        return [python, "-m", MODULES[command], "serve", model, *where, "--device", device]
    words = [python, "-m", MODULES[command], "--model", model, *where]
    words += ["--tensor-parallel-size", str(num_gpus)] if num_gpus > 1 else []
    return words + ["--enable-sleep-mode"] * sleep


def _environment(extra: Mapping[str, str], *, sleep: bool) -> dict[str, str]:
    # The import path is that of this interpreter; the server's may be another.
    env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    env |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    return env | ({"VLLM_SERVER_DEV_MODE": "1"} if sleep else {}) | dict(extra)


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _end(guard: subprocess.Popen[bytes], server: subprocess.Popen[bytes] | None, write_end: int) -> None:
    """End the group, of which the guard is the first process, and reap both."""
    if server is not None:
        os.killpg(guard.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE_S)
    os.killpg(guard.pid, signal.SIGKILL)  # the guard is not reaped yet, so that the number is still its own
    for process in (server, guard):
        if process is not None:
            process.wait()
    os.close(write_end)
