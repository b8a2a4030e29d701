"""Asking a server for scores: several requests at a time, a deadline for each, retries, and a circuit breaker.

Standard library only. Redirects are not followed and proxies are not used, so that what is sent, a key above all, goes
to the configured server and nowhere else. Whatever a server answers is data: JSON of bounded size.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from digen.errors import ConfigError, RewardError
from digen.types import derive_seed

Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_ANSWER = 16 * 2**20
_MAX_EXCERPT = 200
_PASSING = frozenset({408, 425, 429})
"""Statuses below 500 that may pass by themselves."""


class Endpoint:
    """A URL, or several of one service, that takes JSON by POST and answers JSON. Safe to use from several threads.

    Of several, a request goes to the one that has the fewest requests of this endpoint, and a retry to another one;
    one that fails again and again is left out for a while.

    Args:
        url: ``http://`` or ``https://``, without user name or password; or several.
        api_key_env: the environment variable that holds a key, sent as ``Authorization: Bearer``. The key is never
            logged, and only sent over https, or http to this machine itself.
        concurrency: requests at a time.
        timeout_s: longest time for one request, from connecting to the last byte.
        deadline_s: longest time for one score, with all its retries and the waits between them.
        retries: further requests after one that failed in a way that may pass (no connection, no answer in time, an
            answer 408, 425, 429 or 5xx).
        backoff_s: wait before the first retry; doubled for each further one, and shortened by up to half, at random but
            by ``seed``. A server's ``Retry-After`` in seconds counts if it is longer.
        breaker_failures: so many requests to a server that failed in a row, whosever they were, open its circuit: it
            is not asked for ``breaker_s``; where no other is left, every score fails at once. Then a single request
            tries whether it is back.
        breaker_s: see there.
        seed: see there.

    Raises:
        ConfigError: an argument is wrong, or the key is not set.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        api_key_env: str | None = None,
        concurrency: int = 8,
        timeout_s: float = 60.0,
        deadline_s: float = 180.0,
        retries: int = 3,
        backoff_s: float = 0.5,
        breaker_failures: int = 8,
        breaker_s: float = 30.0,
        seed: int = 0,
    ) -> None:
        for name, value in {
            "concurrency": concurrency,
            "breaker_failures": breaker_failures,
            "retries": retries + 1,
        }.items():
            if value < 1:
                raise ConfigError(f"{name} of a remote reward is too small")
        for name, seconds in {"timeout_s": timeout_s, "deadline_s": deadline_s, "breaker_s": breaker_s}.items():
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{name} of a remote reward must be a positive number of seconds, got {seconds}")
        if not 0 <= backoff_s < float("inf"):
            raise ConfigError(f"backoff_s of a remote reward must be at least 0 seconds, got {backoff_s}")
        urls = [url] if isinstance(url, str) else list(url)
        if not urls or len(set(urls)) < len(urls):
            raise ConfigError(f"a remote reward needs a URL, or several different ones, got {urls}")
        key = _key(api_key_env)
        self._replicas = [_Replica(_Server(one, key), Breaker(breaker_failures, breaker_s)) for one in urls]
        self._lock = threading.Lock()
        self._concurrency = concurrency
        self._timeout_s, self._deadline_s = timeout_s, deadline_s
        self._retries, self._backoff_s, self._seed = retries, backoff_s, seed

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result | Exception]:
        """``function`` of every item, which may :meth:`ask`, on at most ``concurrency`` threads; failures as values."""

        def attempt(item: Item) -> Result | Exception:
            try:
                return function(item)
            except Exception as error:
                return error

        with ThreadPoolExecutor(max_workers=self._concurrency) as pool:
            return list(pool.map(attempt, items))

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Post ``question`` and return the decoded answer.

        Raises:
            RewardError: there was none in time, or it is not JSON; says what happened last.
        """
        body = json.dumps(question, ensure_ascii=False, allow_nan=False).encode()
        deadline = time.monotonic() + self._deadline_s
        tried: list[_Replica] = []
        for attempt in range(self._retries + 1):
            replica = self._take(tried)
            server, breaker = replica.server, replica.breaker
            try:
                answer = server.post(body, min(deadline, time.monotonic() + self._timeout_s))
            except _Passing as failure:
                breaker.failed(str(failure))
                digest = hashlib.blake2b(body, digest_size=16).hexdigest()
                share = 1 - derive_seed(self._seed, "reward-retry", digest, attempt) / 2**64  # from 1/2 to 1
                wait = max(self._backoff_s * 2**attempt * share, failure.wait_s)
                reason = f"{server.name} {failure}"
                if attempt == self._retries:
                    raise RewardError(f"{reason}; given up after {attempt + 1} requests") from failure
                if time.monotonic() + wait >= deadline:
                    raise RewardError(
                        f"{reason}; no time for another request within {self._deadline_s:g} s"
                    ) from failure
                tried.append(replica)
            except RewardError:
                breaker.succeeded()
                raise
            else:
                breaker.succeeded()
                return answer
            finally:
                with self._lock:
                    replica.num_requests -= 1
            time.sleep(wait)
        raise AssertionError  # unreachable: the last attempt returns or raises

    def _take(self, tried: Sequence[_Replica]) -> _Replica:
        """The replica to ask: best one that has not failed on this question, then one that has little to do.

        Raises:
            RewardError: the circuits of all are open; says why the first one's is.
        """
        with self._lock:
            refusal: RewardError | None = None
            for replica in sorted(self._replicas, key=lambda one: (tried.count(one), one.num_requests)):
                try:
                    replica.breaker.check(replica.server.name)
                except RewardError as error:
                    refusal = refusal or error
                else:
                    replica.num_requests += 1
                    return replica
            raise refusal or AssertionError  # unreachable: there is at least one


class Breaker:
    """Stops asking a server that fails again and again.

    Args:
        failures: in a row, that open the circuit.
        pause_s: how long it stays open before one request may try again.
        clock: seconds that only grow.
    """

    def __init__(self, failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._pause_s, self._clock = failures, pause_s, clock
        self._lock = threading.Lock()
        self._failures, self._last = 0, ""
        self._open_until: float | None = None

    def check(self, name: str) -> None:
        """Let a request pass, or not.

        Raises:
            RewardError: the circuit is open.
        """
        with self._lock:
            if self._open_until is None:
                return
            left = self._open_until - self._clock()
            if left > 0:
                raise RewardError(
                    f"{name} failed {self._failures} times in a row and is not asked for another {left:.1f} s; last: "
                    f"it {self._last}"
                )
            self._open_until = self._clock() + self._pause_s  # the others wait while this one tries

    def succeeded(self) -> None:
        """The server answered."""
        with self._lock:
            self._failures, self._open_until = 0, None

    def failed(self, reason: str) -> None:
        """It did not."""
        with self._lock:
            self._failures, self._last = self._failures + 1, reason
            if self._failures >= self._limit:
                self._open_until = self._clock() + self._pause_s


class _Passing(Exception):
    """A request failed in a way that may pass; the message continues the server's name."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        super().__init__(message)


@dataclass(slots=True, eq=False)
class _Replica:
    """One of an endpoint's servers."""

    server: _Server
    breaker: Breaker
    num_requests: int = 0
    """Under way now."""


class _Server:
    """One POST, and what can become of it."""

    def __init__(self, url: str, key: str | None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"the URL of a remote reward is wrong: {error}") from None
        if parts.username is not None or parts.password is not None:
            raise ConfigError("the URL of a remote reward holds a user name or password; use api_key_env")
        if parts.scheme not in {"http", "https"} or not parts.hostname or not url.isascii() or re.search(r"\s", url):
            raise ConfigError(f"the URL of a remote reward must be http://... or https://..., got {url!r}")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._secure else 80)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if key is not None and not self._secure and self._host not in {"localhost", "127.0.0.1", "::1"}:
            raise ConfigError(f"a key would be sent to {self._host} in the clear; use https")
        self._key = key
        self._tls = ssl.create_default_context() if self._secure else None
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path}"

    def post(self, body: bytes, deadline: float) -> Any:
        """The decoded JSON of the answer to one request.

        Raises:
            _Passing: no connection, no whole answer before ``deadline`` (monotonic), or an answer that may pass.
            RewardError: any other answer.
        """
        late = threading.Event()
        try:
            with self._connect(deadline) as sock:
                # A socket's own timeout starts again with every byte that drips in.
                timer = threading.Timer(max(deadline - time.monotonic(), 0), _cut, (sock, late))
                timer.daemon = True
                timer.start()
                try:
                    response, content = self._exchange(sock, body)
                finally:
                    timer.cancel()
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise _Passing("did not answer in time") from error
            raise _Passing(f"cannot be asked: {type(error).__name__}: {_excerpt(str(error))}") from error
        if late.is_set():  # an answer that ends with the connection looks whole when it is cut
            raise _Passing("did not answer in time")
        return self._decoded(response, content)

    def _connect(self, deadline: float) -> socket.socket:
        failure: OSError = OSError(f"{self._host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(max(deadline - time.monotonic(), 1e-3))
                sock.connect(address)
                if self._tls is None:
                    return sock
                return self._tls.wrap_socket(sock, server_hostname=self._host, do_handshake_on_connect=False)
            except OSError as error:
                sock.close()
                failure = error
        raise failure

    def _exchange(self, sock: socket.socket, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port)
        connection.sock = sock  # connected already: it opens none of its own
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        connection.request("POST", self._target, body, headers)
        with connection.getresponse() as response:
            content = response.read(_MAX_ANSWER + 1)
            if response.length and len(content) <= _MAX_ANSWER:  # what was announced and did not come
                raise http.client.IncompleteRead(content, response.length)
            return response, content

    def _decoded(self, response: http.client.HTTPResponse, content: bytes) -> Any:
        text = content.decode("utf-8", errors="replace")
        if self._key is not None:
            text = text.replace(self._key, "***")
        if response.status != http.client.OK:
            said = f"answered {response.status}: {_excerpt(text)}"
            if response.status >= http.client.INTERNAL_SERVER_ERROR or response.status in _PASSING:
                after = response.getheader("Retry-After", "")
                raise _Passing(said, float(after) if re.fullmatch(r"\d{1,6}", after) else 0.0)
            raise RewardError(f"{self.name} {said}")
        if len(content) > _MAX_ANSWER:
            raise RewardError(f"{self.name} answered more than {_MAX_ANSWER >> 20} MiB")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise RewardError(f"{self.name} answered no JSON: {_excerpt(text)}") from None


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"the environment variable {variable}, which api_key_env names, is not set")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"the key in the environment variable {variable} has characters that no header may hold")
    return key


def _cut(sock: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):  # closed already
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own, which is no business of another thread


def _excerpt(text: str) -> str:
    """The beginning of what a server said, in one line; escape sequences and the like are spelt out."""
    line = " ".join(text.split())
    return repr(line if len(line) <= _MAX_EXCERPT else f"{line[:_MAX_EXCERPT]}...")
