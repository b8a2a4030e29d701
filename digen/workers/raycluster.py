"""A Ray cluster as the workers need it: joined or started once, guarded, and asked for room.

Everything that blocks runs in threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from digen.errors import ConfigError, WorkerTimeout
from digen.extras import explain
from digen.workers.actor import Node
from digen.workers.handle import to_the_end
from digen.workers.wire import printable

_T = TypeVar("_T")
_REACH_S = 10.0
"""Longest time until the address of a cluster must accept a connection."""
_LOOK_S = 3.0
"""Longest time until a node that lives accepts a connection."""
_ASK_S = 60.0
"""Longest time that Ray's own services may take for a request."""
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Read by Ray when it is imported: with 0 a node's address is 127.0.0.1, and its services listen there only."""

_holders = 0  # clusters of this module that use the connection which it has made; 0: there is none
_guard = threading.Lock()
_ended = threading.Event()  # set while there is no connection that this module has made
_ended.set()


class RayCluster:
    """The connection of this process to a Ray cluster, made by the first that needs it and ended by the last.

    A connection that the program has already is used as it is, and left alone. Ray is told to take no signal handler,
    to configure no logging and to serve no dashboard.

    Args:
        address: ``host:port`` of a cluster to join. Default: what ``RAY_ADDRESS`` says, else a cluster of this machine
            alone is started, which listens on loopback only.
        allow_no_auth: join a cluster that lets anybody in. Whoever reaches its ports can run code on all of its nodes:
            clusters without authentication have been taken over for years (CVE-2023-48022, "ShadowRay").
        start_timeout_s: longest time until it is joined or started.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(
        self, address: str | None = None, *, allow_no_auth: bool = False, start_timeout_s: float = 300.0
    ) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or None
        """Of the cluster to join; ``None`` for one of this machine alone."""
        if self.address == "local":
            self.address = None
        if self.address is not None and self.address != "auto":
            _host_and_port(self.address)
        self.allow_no_auth = allow_no_auth
        """Whether nodes may let anybody in."""
        self.is_ours = False
        """Once connected: whether the cluster was started here, so that no other node will ever join it."""
        self._start_timeout_s = start_timeout_s
        self._users = 0
        self._holds = False
        self._turn = asyncio.Lock()

    async def connect(self) -> None:
        """Join or start the cluster, unless that was done before. Goes with one :meth:`shutdown`.

        Raises:
            MissingExtra: Ray is not installed.
            ConfigError: the cluster does not answer or does not let this process in, or would let anybody in.
            WorkerTimeout: it took too long.
        """
        async with self._turn:
            if self._users == 0:
                await self._connect()
            self._users += 1

    async def shutdown(self) -> None:
        """Let go of the cluster; the last one that does ends the connection, and a cluster that was started here."""
        async with self._turn:
            self._users -= 1
            if self._users == 0 and self._holds:
                self._holds = False
                await in_thread(_disconnect, _ASK_S)

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await to_the_end(self.shutdown())

    async def _connect(self) -> None:
        if self.address is not None and not self.allow_no_auth:
            _require_token(self.address)
        if (
            self.address is None
            and not self.allow_no_auth
            and os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"
        ):
            raise ConfigError(
                f"RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']}: any user of this machine could run code on the cluster "
                "that would be started; unset it, or set workers.ray.allow_no_auth"
            )
        if self.address is not None and self.address != "auto":
            await _reach(self.address)
        try:
            self._holds, self.is_ours = await in_thread(
                partial(_connect, self.address), self._start_timeout_s, undo=_disconnect, until=_ended
            )
        except TimeoutError:
            raise WorkerTimeout(
                f"Ray was not ready within {self._start_timeout_s} s ({self.address or 'a cluster of this machine'}); "
                "raise workers.start_timeout_s, or see the logs in /tmp/ray/session_latest/logs"
            ) from None
        if self._holds:
            _retake_sigterm()


class Placement:
    """The resources of a worker's ranks, all on one node: reserved by the first that starts, given back by the last."""

    def __init__(
        self, cluster: RayCluster, worker: str, needs: Mapping[str, float], num_ranks: int, timeout_s: float
    ) -> None:
        self.group: Any = None
        """Ray's placement group, while there is one."""
        self.address: asyncio.Future[str] | None = None
        """Where the ranks meet: told by rank 0."""
        self._cluster = cluster
        self._worker = worker
        self._needs = {name: amount for name, amount in needs.items() if amount}
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._users = 0
        self._turn = asyncio.Lock()

    async def acquire(self) -> None:
        """Connect to the cluster and reserve the resources, unless that was done before.

        Raises:
            ConfigError: no node has them.
            WorkerTimeout: they were not free in time.
        """
        async with self._turn:
            if self._users == 0:
                await self._cluster.connect()
                try:
                    await self._reserve()
                except BaseException:
                    await to_the_end(self._give_back())
                    raise
            self._users += 1

    async def release(self) -> None:
        """Give the resources back, if nobody else needs them."""
        async with self._turn:
            self._users -= 1
            if self._users == 0:
                await self._give_back()

    async def _reserve(self) -> None:
        groups = imported("ray.util.placement_group")
        self.address = asyncio.get_running_loop().create_future()
        if self._cluster.is_ours:
            await self._refuse_what_no_node_has()
        bundles = [dict(self._needs) for _ in range(self._num_ranks)]
        reserve = partial(groups.placement_group, bundles, strategy="STRICT_PACK")
        self.group = await in_thread(reserve, _ASK_S, undo=groups.remove_placement_group)
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        when_done(self.group.ready(), loop, lambda _: None if ready.done() else ready.set_result(None))
        await asyncio.wait({ready}, timeout=self._timeout_s)
        if not ready.done():
            await self._refuse_what_no_node_has()
            free = await in_thread(_free, _ASK_S)
            raise WorkerTimeout(
                f"worker {self._worker!r} waited {self._timeout_s} s for {self._asked()}; the Ray cluster has "
                f"{await self._has()}; free now: {free}. Others hold the rest: ask for less (workers.ray), or end them",
                worker=self._worker,
                task="start",
            )

    async def _refuse_what_no_node_has(self) -> None:
        nodes = await in_thread(_nodes, _ASK_S)
        whole = {name: amount * self._num_ranks for name, amount in self._needs.items()}
        if not any(all(node.get(name, 0) >= amount for name, amount in whole.items()) for _, node in nodes):
            raise ConfigError(
                f"worker {self._worker!r} asks for {self._asked()}, which no node has: the Ray cluster has "
                f"{await self._has()}. Ask for less (workers.ranks, workers.gpus, workers.ray.cpus_per_rank, "
                "workers.ray.resources), or add a node"
            )

    def _asked(self) -> str:
        each = _amounts(self._needs)
        return f"{self._num_ranks} ranks of {each} each on one node" if self._num_ranks > 1 else f"{each} on a node"

    async def _has(self) -> str:
        return ", ".join(f"{ip} ({_amounts(node)})" for ip, node in await in_thread(_nodes, _ASK_S)) or "no node"

    async def _give_back(self) -> None:
        group, self.group, self.address = self.group, None, None
        if group is not None and imported("ray").is_initialized():
            remove = partial(imported("ray.util.placement_group").remove_placement_group, group)
            with contextlib.suppress(Exception):  # the cluster is gone
                await in_thread(remove, _ASK_S)
        await self._cluster.shutdown()


class Seat:
    """One rank's part of a placement."""

    def __init__(self, placement: Placement, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.placement = placement
        self.rank = rank
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s

    async def meet(self, node: Node) -> dict[str, Any]:
        """The argument that tells a rank where it meets the others; none where it is alone."""
        address = self.placement.address
        if self.num_ranks == 1 or address is None:
            return {}
        if self.rank == 0 and not address.done():
            address.set_result(node.rendezvous)
        # Not awaited itself, since that would cancel it for all with the first that is cancelled.
        await asyncio.wait({address})
        return {
            "ranks": {
                "rank": self.rank,
                "num_ranks": self.num_ranks,
                "rendezvous": address.result(),
                "timeout_s": self._timeout_s,
            }
        }


def _require_token(address: str) -> None:
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode.lower() != "token":
        raise ConfigError(
            f"Ray cluster {address}: RAY_AUTH_MODE is {mode or 'not set'}, so that nothing keeps others out of it; set "
            "RAY_AUTH_MODE=token and a token (ray get-auth-token --generate) here and on all nodes, or "
            "workers.ray.allow_no_auth if its network is closed"
        )


def _host_and_port(address: str) -> tuple[str, int]:
    if "://" in address:
        raise ConfigError(
            f"Ray address {address!r} is that of a Ray client, through which the driver would be no part of the "
            "cluster; run it on a node, for example by ray job submit, and give host:port"
        )
    parts = urlsplit(f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ConfigError(f"Ray address {address!r} is not of the form host:port")
    return host, port


async def _reach(address: str) -> None:
    """Find out whether anything listens there, since Ray would try for minutes."""
    host, port = _host_and_port(address)
    try:
        async with asyncio.timeout(_REACH_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error or 'no answer'}); start it with ray start --head, or correct "
            "workers.ray.address or RAY_ADDRESS"
        ) from None
    writer.close()


def _connect(address: str | None) -> tuple[bool, bool]:
    """Connect this process to Ray; blocks. Returns whether this module made the connection, and the cluster too."""
    global _holders  # noqa: PLW0603 - Ray's connection is the process's
    with _guard, _loopback_only(address is None):
        ray = imported("ray")
        if _holders:
            _holders += 1
            return True, address is None
        if ray.is_initialized():
            return False, False
        with _quiet():
            _init(ray, address)
        _holders = 1
        _ended.clear()
        if address is None and not ray.util.get_node_ip_address().startswith("127."):
            _holders = 0
            ray.shutdown()
            _ended.set()
            raise ConfigError(
                "Ray was imported before digen could keep its cluster on loopback; set "
                f"{_LOOPBACK_ONLY}=0 in the environment, or connect to a cluster with ray.init yourself"
            )
        return True, address is None


def _init(ray: Any, address: str | None) -> None:
    try:
        ray.init(
            address="local" if address is None else address,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        what = "no Ray cluster could be started here" if address is None else f"cannot join the Ray cluster {address}"
        raise ConfigError(f"{what}: {in_one_line(error)}") from error


def _retake_sigterm() -> None:
    """Take the signal back from Ray's native code, which prints stack traces before it calls who had it before."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _disconnect(*_: Any) -> None:
    """Undo one :func:`_connect`; blocks."""
    global _holders  # noqa: PLW0603 - Ray's connection is the process's
    ray = imported("ray")
    with _guard:
        if _holders:
            _holders -= 1
            if not _holders:
                ray.shutdown(wait_for_processes=True)
                _ended.set()


@contextlib.contextmanager
def _loopback_only(wanted: bool) -> Iterator[None]:
    before = os.environ.get(_LOOPBACK_ONLY)
    if wanted:
        os.environ[_LOOPBACK_ONLY] = "0"
    try:
        yield
    finally:
        if wanted:
            del os.environ[_LOOPBACK_ONLY]
            if before is not None:
                os.environ[_LOOPBACK_ONLY] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Ray says of being started in a thread, which is what keeps it from taking SIGTERM."""

    def wanted(record: logging.LogRecord) -> bool:
        return "SIGTERM handler is not set" not in record.getMessage()

    logger = logging.getLogger("ray._private.worker")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def _nodes() -> list[tuple[str, dict[str, float]]]:
    """Addresses of the nodes that live, and what they have in all."""
    ray = imported("ray")
    return [(node["NodeManagerAddress"], _counted(node["Resources"])) for node in ray.nodes() if node["Alive"]]


def node_answers(node_id: str) -> bool:
    """Whether a node's raylet lives, as far as a connection can tell; blocks for a few seconds at most."""
    for node in imported("ray").nodes():
        if node["NodeID"] == node_id and node["Alive"]:
            with contextlib.suppress(OSError):
                socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _LOOK_S).close()
                return True
    return False


def _free() -> str:
    ray = imported("ray")
    return _amounts(_counted(ray.available_resources())) or "nothing"


def _counted(resources: Mapping[str, float]) -> dict[str, float]:
    """Without those that name a node or a placement group, and without memory."""
    return {
        name: amount
        for name, amount in resources.items()
        if ":" not in name and "_group_" not in name and name not in {"memory", "object_store_memory"}
    }


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items()))


def in_one_line(error: BaseException) -> str:
    """The beginning of an error's text."""
    return printable(" ".join(str(error).split()))[:300]


def imported(module: str) -> Any:
    """Ray, or a module of it.

    Raises:
        MissingExtra: Ray is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        explain(error, "ray")
        raise


def when_done(ref: Any, loop: asyncio.AbstractEventLoop, callback: Callable[[Any], None]) -> None:
    """Call ``callback`` in the loop with a finished future of Ray's reference."""

    def done(future: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(callback, future)

    ref.future().add_done_callback(done)


async def in_thread(
    function: Callable[[], _T],
    timeout_s: float,
    *,
    undo: Callable[[_T], Any] | None = None,
    until: threading.Event | None = None,
) -> _T:
    """Run what blocks. When it is given up on, at the time-out or by cancellation, ``undo`` follows once it returns.

    In a thread of its own, for which, unlike one of an executor, nothing waits at exit. It lives ``until`` that is set:
    the processes of a cluster that Ray starts end with the thread that started them.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            if error is None and undo is not None:
                threading.Thread(target=undo, args=(result,), daemon=True).start()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)
        if until is not None:
            until.wait()

    threading.Thread(target=work, name="ray caller", daemon=True).start()
    async with asyncio.timeout(timeout_s):
        return await future
