"""Workers as actors of a Ray cluster: the same targets, the same calls, on any node.

The driver sends and receives the messages of :mod:`digen.workers.wire`. Payloads, rollouts and weights alike, are
written to the object store of the node where they arise and read from that of the node where they are needed; the
driver holds references. (What is below Ray's limit for inlined objects, 100 KiB, rides on the messages instead.) They
belong to the driver, so that they outlive the process that wrote them, though not its node: whoever then reads one that
was nowhere else gets :class:`digen.errors.PayloadLost`.

``ray`` is imported when a worker starts, not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from digen import __version__
from digen.errors import ConfigError, PayloadLost, ProtocolError, WorkerDied, WorkerError, WorkerTimeout
from digen.types import Payload, PayloadRef, Ready, WorkerSpec
from digen.workers.actor import Node, TargetActor
from digen.workers.group import LOOPBACK, GroupWorker
from digen.workers.handle import TargetHandle, closed, task_of, to_the_end
from digen.workers.process import STACK_LINES, TARGET, last_lines
from digen.workers.raybeat import STACKS_S, Listener, stacks_of
from digen.workers.raycluster import (
    Placement,
    RayCluster,
    Seat,
    imported,
    in_one_line,
    in_thread,
    node_answers,
    when_done,
)
from digen.workers.wire import START, CallCodec, Reply, Request, printable, reference

_ASK_S = 60.0
"""Longest time that Ray's own services may take for a request."""
_GONE_S = 10.0
"""Longest time until the end of an actor that was killed is known."""
_NODE_DIED = "its node has died"  # words of Ray
_INLINED_BYTES = 100 * 1024
"""Ray's limit: an object that is larger is in a store, or nowhere."""

_incarnations: Counter[str] = Counter()


class RayWorker(TargetHandle):
    """A handle to a target that runs in a Ray actor, reserved for it by a placement group.

    Calls are answered in the order in which they were made. The actor is never restarted and no call is repeated: when
    its process or its node is lost, every call fails. It ends with this process, however that ends. Payloads that it
    wrote can be read after the death of its process, but after the loss of its node only if they were read elsewhere.

    Its output is in Ray's logs, where error messages point.

    Args:
        name: unique in the run; letters, digits and ``._-``.
        target: ``"package.module:attribute"``; imported and called with ``kwargs`` in the actor.
        cluster: where it runs.
        kwargs: plain data.
        num_gpus: GPUs that are reserved for it; it sees those that its node has free, or none.
        num_cpus: CPUs that are reserved for it.
        resources: further resources that are reserved for it.
        threads: torch, OpenMP and BLAS threads.
        env: environment variables. They are sent to the actor alone, so that they may be secrets; Ray's runtime
            environment is no place for those.
        runtime_env: Ray's runtime environment.
        checksums: checksum every payload that it writes.
        heartbeat_timeout_s: longest silence of a thread in the actor that beats whatever the target computes; after it
            the actor counts as hung (stopped, swapped out, or in C code that never lets go of the interpreter) and is
            killed. ``None``: it is waited for.
        start_timeout_s: longest time until its resources are free, and then until it is READY.
        stop_grace_s: how long :meth:`aclose` lets an idle actor end by itself before it kills.

    Raises:
        ConfigError: a name, target or time-out that cannot be.
    """

    def __init__(
        self,
        name: str,
        target: str,
        *,
        cluster: RayCluster,
        kwargs: Mapping[str, Any] | None = None,
        num_gpus: float = 0,
        num_cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        checksums: bool = False,
        heartbeat_timeout_s: float | None = 60.0,
        start_timeout_s: float = 300.0,
        stop_grace_s: float = 5.0,
        _seat: Seat | None = None,
    ) -> None:
        super().__init__(name)
        if not TARGET.fullmatch(target):
            raise ConfigError(f"worker {name!r}: target {target!r} is not of the form package.module:attribute")
        if heartbeat_timeout_s is not None and not heartbeat_timeout_s > 0:
            raise ConfigError(f"worker {name!r}: heartbeat_timeout_s is {heartbeat_timeout_s}; give seconds, or None")
        self.target = target
        """Where the actor finds its target."""
        self.node: Node | None = None
        """Where the actor runs, once started."""
        self._cluster = cluster
        self._kwargs = dict(kwargs or {})
        self._needs = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
        self._env = _environment(threads, num_gpus, env or {})
        self._runtime_env = dict(runtime_env or {})
        self._threads = threads
        self._checksums = checksums
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._seat = _seat or Seat(Placement(cluster, name, self._needs, 1, start_timeout_s), 0, 1, 0.0)
        self._actor: _Actor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the messages to and from the actor since it was started; payloads are not in them."""
        return self._actor.num_bytes if self._actor else 0

    @property
    def num_dropped_replies(self) -> int:
        """Replies since the start that came after their call was cancelled."""
        return self._actor.num_dropped_replies if self._actor else 0

    async def start(self) -> None:
        """Connect to the cluster, wait for the resources, start the actor and wait until its target is built.

        Raises:
            WorkerRaised, or an error of :mod:`digen.errors`: the target could not be imported or built.
            ConfigError: the cluster cannot be used, has no node with what is asked for, or another release of digen.
            MissingExtra: Ray is not installed.
            WorkerDied: the actor ended.
            WorkerTimeout: the resources were not free, or the target not READY in time; or it hung.
        """
        if self._actor is not None:
            raise WorkerError(f"worker {self.name!r} is started already; close it first", worker=self.name)
        _incarnations[self.name] += 1
        actor = self._actor = _Actor(self.name, f"{self.name}#{_incarnations[self.name]}", on_result=self._note)
        try:
            await self._seat.placement.acquire()
            actor.seated = True
            async with asyncio.timeout(self._start_timeout_s):
                ready = await self._build(actor)
        except TimeoutError:
            error = WorkerTimeout(
                f"worker {self.name!r} was not READY within {self._start_timeout_s} s; raise start_timeout_s or see "
                f"its log{actor.log or ' in those of Ray'}",
                worker=self.name,
                task="start",
            )
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
            WorkerDied: the actor ended before it answered.
            WorkerTimeout: it hung, or was killed with a reason.
            PayloadLost: a payload that the call reads was lost with its node. The error names the worker that wrote it.
            ProtocolError: the answer is not one.
        """
        if self._actor is None:
            raise WorkerError(f"worker {self.name!r} is not started", worker=self.name, task=task_of(method, args))
        return await self._actor.call(method, args)

    def release(self, payload: Payload) -> None:
        """Let a payload of this worker go, once the calls that read it have ended. Ignores those of other workers."""
        if isinstance(payload, ObjectLease) and self._actor is not None and payload.owner is self._actor.codec:
            payload.release()

    async def aclose(self) -> None:
        """End the actor and give its resources back. Not cut short by cancellation; harmless when repeated.

        An idle actor is left to end by itself, within the grace; a busy one is killed.
        """
        if self._actor is not None:
            await to_the_end(self._close(self._stop_grace_s))

    @property
    def lost(self) -> bool:
        """Whether the actor is gone, though nobody closed it."""
        return self._actor is not None and self._actor.ended

    async def kill(self, reason: str = "") -> None:
        """Kill the actor, whatever it does. Harmless when repeated.

        ``reason`` says why it is not waited for any longer: it first writes the stacks of its threads to its log, if it
        can, and calls that were not answered then raise WorkerTimeout.
        """
        if self._actor is not None:
            if reason:
                await to_the_end(self._actor.give_up(partial(_late, reason)))
            await to_the_end(self._close(grace_s=0.0))

    def __repr__(self) -> str:
        return f"RayWorker({self.name!r}, {self.target!r}, node={self.node.ip if self.node else None})"

    async def _build(self, actor: _Actor) -> Ready:
        seat, env = self._seat, self._env
        if self._cluster.is_ours:  # on this machine alone
            paths = [env.get("PYTHONPATH", ""), *(path or str(Path.cwd()) for path in sys.path)]
            env = {"GLOO_SOCKET_IFNAME": LOOPBACK, **env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        await in_thread(partial(actor.create, seat, self._needs, self._runtime_env), _ASK_S)
        self.node = node = await actor.enter(env, meet=seat.num_ranks > 1 and seat.rank == 0)
        if self._heartbeat_timeout_s is not None:
            actor.listen(self._heartbeat_timeout_s)
        if not (node.token_auth or self._cluster.allow_no_auth):
            raise ConfigError(
                f"worker {self.name!r}: node {node.ip} of the Ray cluster lets anybody in who reaches it; start its "
                "nodes with RAY_AUTH_MODE=token, or set workers.ray.allow_no_auth"
            )
        if node.digen != __version__:
            raise ConfigError(
                f"worker {self.name!r}: node {node.ip} has digen {node.digen}, this process has digen {__version__}; "
                f"install digen-rl=={__version__} there, or name it in workers.ray.runtime_env"
            )
        kwargs = {**self._kwargs, **await seat.meet(node)}
        spec = WorkerSpec(
            self.name, _incarnations[self.name], self.target, kwargs, self._threads, checksums=self._checksums
        )
        ready: Ready = await actor.call(START, (spec,))
        return ready

    async def _close(self, grace_s: float) -> None:
        actor = self._actor
        if actor is None:
            return
        await actor.close(grace_s)
        if self._actor is not actor:  # closed twice at the same time
            return
        self._actor = None
        self.node = None
        self._withdraw()
        if actor.seated:
            await self._seat.placement.release()


def ray_worker(
    name: str,
    target: str,
    num_ranks: int = 1,
    *,
    cluster: RayCluster,
    kwargs: Mapping[str, Any] | None = None,
    gpus: bool = False,
    cpus_per_rank: float = 1.0,
    resources: Mapping[str, float] | None = None,
    start_timeout_s: float = 300.0,
    rank_timeout_s: float = 120.0,
    **options: Any,
) -> RayWorker | GroupWorker:
    """A worker of one or more ranks, each an actor, all of them on one node.

    Args:
        name: unique in the run. The ranks of several are named ``<name>.<rank>``.
        target: called with ``kwargs``, and on each of several ranks with ``ranks``, a
            :class:`digen.diffusion.ranks.RankSpec` as plain data.
        num_ranks: at least one.
        cluster: where it runs.
        kwargs: plain data.
        gpus: reserve a GPU for each rank.
        cpus_per_rank: CPUs that each rank reserves.
        resources: further resources that each rank reserves.
        start_timeout_s: longest time until the resources are free, and then until the ranks are READY.
        rank_timeout_s: longest time that one rank may lag behind another, in a command or a collective.
        options: of :class:`RayWorker`, the same for all ranks.

    Raises:
        ConfigError: a name or target that cannot be.
    """
    options |= {
        "cluster": cluster,
        "kwargs": kwargs,
        "num_gpus": int(gpus),
        "num_cpus": cpus_per_rank,
        "resources": resources,
        "start_timeout_s": start_timeout_s,
    }
    if num_ranks == 1:
        return RayWorker(name, target, **options)
    needs = {"CPU": cpus_per_rank, "GPU": int(gpus), **(resources or {})}
    placement = Placement(cluster, name, needs, num_ranks, start_timeout_s)
    ranks = [
        RayWorker(f"{name}.{rank}", target, **options, _seat=Seat(placement, rank, num_ranks, rank_timeout_s))
        for rank in range(num_ranks)
    ]
    return GroupWorker(name, ranks, rank_timeout_s=rank_timeout_s)


class ObjectLease(Payload):
    """A payload as the driver holds it: a reference to an object in Ray's stores, never its bytes.

    The object goes with :meth:`release`, or when nothing in the driver refers to the payload any more; in either case
    not before the calls that read it have ended. A lease is equal to itself only.
    """

    __slots__ = ("_beside", "_lost", "owner")

    def __init__(self, ref: PayloadRef, beside: Any, owner: ObjectCodec) -> None:
        super().__init__(ref=ref)
        self._beside = beside
        self._lost = False
        self.owner = owner

    @property
    def lost(self) -> bool:
        """Whether it went with the node of its worker; not so if it was inlined, or read on another node."""
        if not self._lost and self._beside is not None and self.owner.lost_node:
            self._lost = _is_gone(self._beside, self.owner.lost_node)
        return self._lost

    def lose(self) -> None:
        """Ray says that it is gone."""
        self._lost = True

    @property
    def released(self) -> bool:
        """Whether it was given back; then it can be read no more."""
        return self._beside is None

    @property
    def beside(self) -> Any:
        """Ray's reference to what came beside the reply that named this payload; ``None`` once released."""
        return self._beside

    def release(self) -> None:
        """Let it go. Harmless when done twice."""
        self._beside = None

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class ObjectCodec(CallCodec):
    """The driver's side of one actor: payloads are references to objects."""

    def __init__(self, worker: str, store: str) -> None:
        super().__init__(worker)
        self.worker = worker
        """Name of the worker."""
        self.lost_node = ""
        """Its node, once that is lost."""
        self._store = store
        self._beside: Any = None
        self._leases: list[ObjectLease] = []

    def request(self, request_id: int, method: str, args: tuple[Any, ...]) -> tuple[bytes, list[ObjectLease]]:
        """Encode a call; returns the body and one lease for each object that must go beside it.

        Raises:
            WorkerError: an argument cannot cross a process boundary, or is too long.
            PayloadLost: a payload was lost with the node of the worker that wrote it.
        """
        try:
            encoded = self._arguments(method, args)
        finally:
            leases, self._leases = self._leases, []
        for lease in leases:
            if lease.lost:
                raise _lost_payload(lease, task_of(method, args))
        objects = list({lease.beside: lease for lease in leases}.values())
        segments = [(ref.store, ref.segment) for lease in objects if (ref := lease.ref) is not None]
        return self._encode(Request(request_id, method, encoded, segments)), objects

    def open(self, body: bytes, beside: Any) -> Reply:
        """Decode a reply's envelope; the payloads of its result are in the object ``beside``.

        Raises:
            ProtocolError: it is no reply.
        """
        self._beside = beside
        return self._envelope(body)

    def _pass_on(self, value: Any) -> Any:
        if isinstance(value, ObjectLease) and value.ref is not None:
            if value.released:
                raise TypeError(f"{value!r} was released")
            self._leases.append(value)
            return reference(value.ref)
        if isinstance(value, Payload):
            raise TypeError(f"{value!r} is not in Ray's object store, and the driver passes on no arrays")
        raise TypeError(f"a {type(value).__name__} cannot cross a process boundary")

    def _lease(self, ref: PayloadRef) -> ObjectLease:
        if ref.store != self._store:
            raise ProtocolError(f"it names the payload {ref.store}/{ref.segment} of another worker")
        return ObjectLease(ref, self._beside, self)


class _Call:
    """A request that was sent and not answered yet. Holding the leases keeps what it reads."""

    __slots__ = ("beside", "future", "leases", "method", "task")

    def __init__(self, method: str, task: str, leases: list[ObjectLease], future: asyncio.Future[Any]) -> None:
        self.method = method
        self.task = task
        self.leases = leases
        self.future = future
        self.beside: Any = None


class _Actor:
    """One actor, from its creation to its end."""

    def __init__(self, name: str, store: str, *, on_result: Callable[[str, Any], None]) -> None:
        self.codec = ObjectCodec(name, store)
        self.log = ""
        self.seated = False
        self.num_bytes = 0
        self.num_dropped_replies = 0
        self.name = name
        self._on_result = on_result
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._node: Node | None = None
        self._handle: Any = None
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._looking: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._ending: asyncio.Task[None] | None = None
        self._runtime_env: dict[str, Any] = {}
        self._end: Callable[[str], WorkerError] | None = None
        """Once no call can be answered any more: the error for a task."""

    def create(self, seat: Seat, needs: Mapping[str, float], runtime_env: Mapping[str, Any]) -> None:
        """Ask Ray for the actor and watch it; blocks."""
        ray, strategies = imported("ray"), imported("ray.util.scheduling_strategies")
        self._runtime_env = dict(runtime_env)
        kind = ray.remote(
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            resources={name: amount for name, amount in needs.items() if name not in {"CPU", "GPU"}},
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"watch": 1, "beat": 1},  # calls stay in order: in the one thread beside these two
            runtime_env=self._runtime_env,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(seat.placement.group, seat.rank),
        )(TargetActor)
        self._handle = kind.remote()
        self._watch()

    async def enter(self, env: Mapping[str, str], *, meet: bool) -> Node:
        """Let it take over its environment."""
        reply = self._handle.enter.remote(msgspec.json.encode(env), meet)
        future: asyncio.Future[Node] = self._loop.create_future()
        call = self._calls[0] = _Call("enter", "start", [], future)
        when_done(reply, self._loop, partial(self._on_answer, 0, call))
        self._node = await future
        self.log = f" {self._node.log} on {self._node.ip}"
        return self._node

    def call(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Send a request; the future is its reply. Cancelling it leaves the actor alone and drops the reply."""
        task = task_of(method, args)
        if self._end is not None:
            raise self._end(task)
        request_id = next(self._ids)
        body, leases = self.codec.request(request_id, method, args)
        future: asyncio.Future[Any] = self._loop.create_future()
        call = _Call(method, task, leases, future)
        reply, call.beside = self._handle.call.options(num_returns=2).remote(body, *(lease.beside for lease in leases))
        self._calls[request_id] = call
        self.num_bytes += len(body)
        when_done(reply, self._loop, partial(self._on_answer, request_id, call))
        return future

    @property
    def ended(self) -> bool:
        """Whether no call can be answered any more."""
        return self._end is not None

    @property
    def log_tail(self) -> str:
        """The last lines of its log, if its node is this machine."""
        return last_lines(Path(self._node.log), STACK_LINES) if self._node is not None and self._node.log else ""

    def listen(self, timeout_s: float) -> None:
        """From now on it is hung when it has not beaten for so long."""
        self._listener = Listener(timeout_s, self._on_silence)
        beat = self._handle.beat.options(concurrency_group="beat", num_returns="streaming")
        self._listener.listen(beat.remote(self._listener.interval_s))

    async def give_up(self, end: Callable[[_Actor, str], WorkerError]) -> None:
        """It is not waited for any longer: have it say where it is, and fail its calls. Leaves it to be closed."""
        if self._end is not None:
            return
        self._end = partial(end, self)
        if self._node is not None:
            with contextlib.suppress(Exception):  # whatever it is, nobody there can be asked
                await in_thread(partial(stacks_of, self._node, self._runtime_env), STACKS_S)
        self._finish(self._end)

    async def close(self, grace_s: float) -> None:
        """End the actor: let it, then kill. Returns when it is gone, as far as that is known within seconds."""
        idle = not self._calls and self._end is None
        if self._listener is not None:
            self._listener.stop()
        self._finish(partial(closed, self.name))
        if self._handle is None or self._gone.done():
            return
        if idle and grace_s:
            when_done(self._handle.leave.remote(), self._loop, self._on_end)
            await asyncio.wait({self._gone}, timeout=grace_s)
        with contextlib.suppress(Exception):  # whatever it is, the actor cannot be reached
            await in_thread(partial(_kill, self._handle), _ASK_S)
        await asyncio.wait({self._looking or self._gone}, timeout=_GONE_S)

    def _watch(self) -> None:
        # Pending for as long as the actor lives: its end is told to whoever waits for a result, and to nobody else.
        when_done(self._handle.watch.options(concurrency_group="watch").remote(), self._loop, self._on_end)

    def _on_answer(self, request_id: int, call: _Call, answer: Any) -> None:
        beside, call.beside, failure = call.beside, None, answer.exception()
        if failure is not None and self._is_out_of_reach(failure):
            return  # answered with the others, once it is known whether the node is lost
        self._calls.pop(request_id, None)
        if failure is not None and beside is not None:
            beside.future()  # it is as lost as the reply; Ray prints errors that nobody has asked for
        if self._end is not None:
            if not call.future.done():
                call.future.set_exception(self._end(call.task))
            return
        if failure is not None:
            self._on_failure(call, failure)
            return
        body = answer.result()
        self.num_bytes += len(body)
        if call.method == "enter":
            self._settle(call, msgspec.json.decode(body, type=Node), None)
        else:
            self._on_reply(call, body, beside)

    def _on_reply(self, call: _Call, body: bytes, beside: Any) -> None:
        try:
            reply = self.codec.open(body, beside)
            if reply.ok:
                result = self.codec.result(call.method, reply)
                self._on_result(call.method, result)
                self._settle(call, result, None)
                return
            error: BaseException = self.codec.error(reply, call.task)
        except ProtocolError as invalid:
            error = ProtocolError(
                f"worker {self.name!r}, {call.task}: the result is not what {call.method} returns: {invalid}",
                worker=self.name,
                task=call.task,
            )
        self._settle(call, None, error)

    def _settle(self, call: _Call, result: Any, error: BaseException | None) -> None:
        if call.future.done():
            self.num_dropped_replies += 1
        elif error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)

    def _on_failure(self, call: _Call, failure: BaseException) -> None:
        """Ray has no answer: the actor is gone, or what it was to read."""
        errors = imported("ray.exceptions")
        if isinstance(failure, errors.RayActorError):
            self._die(failure)
            error: WorkerError = _died(self.name, _cause(failure), self._node, call.task)
        elif isinstance(failure, errors.ObjectLostError) and call.leases:
            lease = _which(call.leases, failure)
            lease.lose()
            error = _lost_payload(lease, call.task)
        else:
            message = f"worker {self.name!r}, {call.task}: Ray failed: {in_one_line(failure)}"
            error = WorkerError(message, worker=self.name, task=call.task)
        self._settle(call, None, error)

    def _on_end(self, watch: Any) -> None:
        """The actor has ended, unless it only is about to: then it was told to go, and there is no failure."""
        failure = watch.exception()
        if failure is None or self._is_out_of_reach(failure):
            return
        self._die(failure)
        if not self._gone.done():
            self._gone.set_result(None)

    def _on_silence(self, silence_s: float) -> None:
        self._ending = asyncio.ensure_future(self._put_down(silence_s))

    async def _put_down(self, silence_s: float) -> None:
        await self.give_up(partial(_hung, silence_s))
        with contextlib.suppress(Exception):  # whatever it is, whoever closes the worker tries again
            await in_thread(partial(_kill, self._handle), _ASK_S)

    def _is_out_of_reach(self, failure: BaseException) -> bool:
        """Whether that is all that Ray knows: it may take it half a minute to find out what became of a node."""
        if not isinstance(failure, imported("ray.exceptions").ActorUnavailableError):
            return False
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look_for_the_node(failure))
        return True

    async def _look_for_the_node(self, failure: BaseException) -> None:
        # Meanwhile whoever is to read a payload on that node would wait, so its loss must be known before the death.
        self._watch()
        if self._node is not None and not await in_thread(partial(node_answers, self._node.id), _ASK_S):
            self.codec.lost_node = self._node.id
        self._die(failure)

    def _die(self, failure: BaseException) -> None:
        cause = _cause(failure)
        if _NODE_DIED in cause and self._node is not None:
            self.codec.lost_node = self._node.id
        self._finish(partial(_died, self.name, cause, self._node))

    def _finish(self, end: Callable[[str], WorkerError]) -> None:
        """From now on no call is answered: fail those that wait with what ``end`` makes of their task."""
        end = self._end = self._end or end
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(end(call.task))
        self._calls.clear()


def _environment(threads: int, num_gpus: float, env: Mapping[str, str]) -> dict[str, str]:
    found = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    if not num_gpus:
        found["CUDA_VISIBLE_DEVICES"] = ""
    return {**found, **env}


def _kill(handle: Any) -> None:
    ray = imported("ray")
    if ray.is_initialized():
        ray.kill(handle, no_restart=True)


def _which(leases: Sequence[ObjectLease], failure: BaseException) -> ObjectLease:
    lost = getattr(failure, "object_ref_hex", None)
    return next((lease for lease in leases if lease.beside is not None and lease.beside.hex() == lost), leases[0])


def _is_gone(object_ref: Any, lost_node: str) -> bool:
    """Whether an object was in the store of a lost node alone: it may be inlined, or have been read on another node."""
    ray = imported("ray")
    found = imported("ray.experimental").get_object_locations([object_ref]).get(object_ref)
    if found is None:  # Ray does not know; whoever reads it will
        return False
    nodes = set(found["node_ids"])
    elsewhere = nodes - {lost_node}
    if elsewhere == {ray.get_runtime_context().get_node_id()}:  # or is that Ray's word, kept here, that it is lost?
        try:
            ray.get(object_ref, timeout=0)
        except ray.exceptions.ObjectLostError:
            return True
        except ray.exceptions.GetTimeoutError:
            return False
    return not elsewhere and (bool(nodes) or (found["object_size"] or 0) > _INLINED_BYTES)


def _lost_payload(lease: ObjectLease, task: str) -> PayloadLost:
    """The error of a call that reads a payload which is gone: it names the worker that wrote it."""
    worker = lease.owner.worker
    message = f"{task} reads {lease!r}, which was lost with the node of worker {worker!r}; it must be made again"
    return PayloadLost(message, worker=worker, task=task)


def _cause(failure: BaseException) -> str:
    """What Ray says of an actor's end, without the actor's address and without advice."""
    lines = [line for line in str(failure).splitlines() if line.strip() and not line.startswith("\t")]
    said = " ".join(lines[1:] or lines)
    said = said.partition(" Some common causes include")[0].removeprefix("The actor is dead because ")
    return printable(said.removeprefix("its worker process has died. "))[:300].rstrip(". ")


def _died(worker: str, cause: str, node: Node | None, task: str) -> WorkerError:
    return WorkerDied(
        worker=worker,
        task=task,
        how=f"Ray says: {cause}",
        log_path=f"{node.log} on {node.ip}" if node is not None else "",
        log_tail=last_lines(Path(node.log)) if node is not None and node.log else "",
    )


def _late(reason: str, actor: _Actor, task: str) -> WorkerError:
    return _given_up(actor, f"was given up: {reason}", task)


def _hung(silence_s: float, actor: _Actor, task: str) -> WorkerError:
    mend = "; if its code may hold the interpreter that long, raise workers.heartbeat_timeout_s"
    return _given_up(actor, f"hung: no heartbeat for {silence_s:.1f} s", task, mend)


def _given_up(actor: _Actor, what: str, task: str, mend: str = "") -> WorkerError:
    message = f"worker {actor.name!r} {what}; it was killed, {task} was not answered; see its log{actor.log}{mend}"
    error = WorkerTimeout(message, worker=actor.name, task=task)
    if tail := actor.log_tail:
        error.add_note(f"last lines of {actor.name}'s log:\n{tail}")
    return error
