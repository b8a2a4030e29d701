"""A worker of several ranks: one handle that sends every command to all of them and keeps them in step.

The ranks are handles of any kind, made elsewhere; :func:`process_group` makes those of child processes. They do the
same commands in the same order, each on its own share (:mod:`digen.diffusion.ranks` is their side), rank 0 answers.
Since they wait for each other in the middle of a command, they live and die as one: when a rank is lost, lags too far
behind, or answers something else than the others, all are killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from digen.errors import ConfigError, PayloadLost, ProtocolError, RankFailed, WorkerDied, WorkerError, WorkerTimeout
from digen.types import Payload, Snapshot
from digen.workers.handle import TargetHandle, closed, task_of, to_the_end
from digen.workers.process import ProcessWorker

_GRACE_S = 3.0
"""How long the others may work on once a rank has raised: they may wait for it, and then never return."""
_FACTS = ("version", "num_terms", "checksum", "num_tensors")
"""Fields of results in which the ranks must agree."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The network interface that no other machine reaches."""


class GroupWorker(TargetHandle):
    """A handle to a target of several ranks.

    Every command has a number, which error messages name, and is sent to all ranks in one go, so that they get the
    same commands in the same order. The result of rank 0 is the answer; the others' are compared with it and let go.
    Only a snapshot is of all ranks: each has a payload in it, which it is given when the snapshot is recalled.

    Once a rank has answered, the others must within ``rank_timeout_s``. If a rank dies, breaks the protocol,
    disagrees, or is not heard of in time, all are killed and every later call fails; close the worker, then it can be
    started again. If a rank raises, the others have a few seconds: where they have answered by then the worker lives
    on, else it is killed too. A call that is cancelled is carried out nevertheless, and its result dropped.

    Args:
        name: unique in the run.
        ranks: their handles, not started. They are started and ended by this one alone.
        rendezvous: makes what the ranks need for meeting; entered before they start, left when they have ended.
        rank_timeout_s: longest time that a rank may lag behind the first that has answered a command.

    Raises:
        ConfigError: there are no ranks, or two have the same name.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[TargetHandle],
        *,
        rendezvous: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
        rank_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(name)
        self.ranks = tuple(ranks)
        """Handles of the ranks, in their order."""
        names = [rank.name for rank in self.ranks]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"worker {name!r}: its ranks are {names}; it needs some, with different names")
        self.num_dropped_replies = 0
        """Answers since the start that came after their call was cancelled."""
        self._rendezvous = rendezvous
        self._rank_timeout_s = rank_timeout_s
        self._open = False
        self._end: Callable[[str], WorkerError] | None = partial(_not_started, name)
        """While no call can be answered: the error for a task."""
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        """Held by the command whose answers are awaited: in the order in which they were sent."""
        self._commands: set[asyncio.Task[Any]] = set()
        self._meeting = AsyncExitStack()

    @property
    def lost(self) -> bool:
        """Whether a rank is gone, and so all of them: no call is answered before the worker is closed and started."""
        return self.started and (self._end is not None or any(rank.lost for rank in self.ranks))

    @property
    def num_bytes(self) -> int:
        """Bytes sent to and received from the ranks since the start, as far as their handles count them."""
        return sum(getattr(rank, "num_bytes", 0) for rank in self.ranks)

    async def start(self) -> None:
        """Start all ranks at once and wait until every one is READY. A closed worker may be started again.

        Raises:
            DigenError: a rank could not be started, with its own error; the others were killed.
            ProtocolError: the ranks disagree about their methods or the version of their weights.
        """
        if self._open:
            raise WorkerError(f"worker {self.name!r} is started already; close it first", worker=self.name)
        self._open = True
        self.num_dropped_replies = 0
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        starts: list[asyncio.Task[Any]] = []
        try:
            await self._meeting.enter_async_context(self._rendezvous())
            starts += [asyncio.ensure_future(rank.start()) for rank in self.ranks]
            await self._all_ready(starts)
        except BaseException:
            await to_the_end(self._abandon(starts))
            raise
        self._end = None
        self._offer(self.ranks[0].methods, self.ranks[0].version)

    async def call(self, method: str, /, *args: Any) -> Any:
        """Call any public method of the target, on every rank.

        Raises:
            WorkerRaised: the method raised on a rank; an error of :mod:`digen.errors` is raised as itself. Where
                several ranks raised, the first error that is not :class:`digen.errors.RankFailed`.
            WorkerDied: a rank ended before it answered, or all were killed before.
            WorkerTimeout: a rank hung, did not answer in time after another had, or was killed with a reason.
            ProtocolError: the answer is not one, or the ranks disagree.
        """
        task = task_of(method, args)
        if self._end is not None:
            raise self._end(task)
        # In one go: no other command can come between, on any rank.
        calls = [
            asyncio.ensure_future(rank.call(method, *_own(args, number))) for number, rank in enumerate(self.ranks)
        ]
        command = asyncio.ensure_future(self._answer(next(self._numbers), method, task, calls))
        self._commands.add(command)
        command.add_done_callback(self._commands.discard)
        try:
            return await asyncio.shield(command)
        except asyncio.CancelledError:
            command.add_done_callback(self._drop)
            raise

    def release(self, payload: Payload) -> None:
        """Let the rank that wrote a payload reuse its memory. Ignores payloads of other workers."""
        for rank in self.ranks:
            rank.release(payload)

    async def aclose(self) -> None:
        """End all ranks, at the same time. Not cut short by cancellation; harmless when repeated."""
        if self._open:
            await to_the_end(self._close([rank.aclose for rank in self.ranks]))

    async def kill(self, reason: str = "") -> None:
        """Kill all ranks. Harmless when repeated.

        Args:
            reason: why it is not waited for any longer. With one, the ranks first write the stacks of their threads
                to their logs, as far as they can, and calls that were not answered raise WorkerTimeout.
        """
        if self._open:
            end = partial(_late, self.name, reason) if reason else None
            await to_the_end(self._close([partial(rank.kill, reason) for rank in self.ranks], end))

    def __repr__(self) -> str:
        return f"GroupWorker({self.name!r}, {list(self.ranks)})"

    async def _all_ready(self, starts: Sequence[asyncio.Task[Any]]) -> None:
        # A rank that waits for one that failed can only say so: that one's own error is worth waiting for.
        answers = await _answers(starts, lag_s=None, fatal=lambda _, error: not isinstance(error, RankFailed))
        if answers.errors:
            raise self._failure(answers, "start", "start")
        self._compare("start", "start", [{"methods": rank.methods, "version": rank.version} for rank in self.ranks])
        if not self._open:  # it was closed before the ranks had begun to start
            raise closed(self.name, "start")

    async def _answer(self, number: int, method: str, task: str, calls: Sequence[asyncio.Task[Any]]) -> Any:
        """Wait for the ranks' answers to a command, make one of them, and see to it that the ranks are in step."""
        what = f"command {number}, {task}"
        async with self._turn:
            answers = await _answers(
                calls,
                lag_s=self._rank_timeout_s,
                fatal=lambda rank, error: isinstance(error, WorkerDied | ProtocolError) or self.ranks[rank].lost,
            )
            if self._end is not None:
                error = self._end(task)
                for _, told in answers.errors:
                    if isinstance(told, WorkerTimeout):
                        error.__notes__ = [*getattr(error, "__notes__", ()), *getattr(told, "__notes__", ())]
                raise error
            if answers.errors or answers.missing:
                failure = self._failure(answers, what, task)
                if answers.lost:
                    await self._lose(failure, "another rank waits for it" if answers.missing else "")
                raise failure
            results = [call.result() for call in calls]
            try:
                self._compare(what, task, [_facts(method, result) for result in results])
            except ProtocolError as error:
                await self._lose(error)
                raise
            self._note(method, results[0])
            return _joined(results)  # what else the other ranks wrote is released with their results, here

    def _failure(self, answers: _Answers, what: str, task: str) -> BaseException:
        """What explains that a command was not answered: the first error that does not come of another, a time-out."""
        missing = self._names(answers.missing)
        told = [(rank, error) for rank, error in answers.errors if not isinstance(error, RankFailed)]
        if missing and not told:
            late = WorkerTimeout(
                f"worker {self.name!r}, {what}: {missing} did not answer in time, {self._rank_timeout_s} s after "
                "another, so that all ranks were killed; see their logs, or raise workers.rank_timeout_s",
                worker=self.name,
                task=task,
            )
            for rank, error in answers.errors:
                late.add_note(f"rank {rank}: {error}")
            return late
        rank, error = (told or answers.errors)[0]
        if missing and isinstance(error, PayloadLost):  # which says that the worker is well
            error = WorkerDied(worker=self.name, task=task, how=f"was killed with its ranks: {error}")
        error.args = (f"rank {rank} of {self.name!r}, {what}: {error}",)
        if isinstance(error, WorkerError) and not isinstance(error, PayloadLost):
            error.worker = self.name
        if missing:
            error.add_note(f"{missing} had not answered; all ranks of {self.name!r} were killed")
        return error

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} ({self.ranks[rank].name})" for rank in ranks)

    def _compare(self, what: str, task: str, facts: Sequence[Mapping[str, Any]]) -> None:
        """Raise ProtocolError unless all ranks found the same."""
        if any(found != facts[0] for found in facts):
            said = "; ".join(f"rank {rank} ({self.ranks[rank].name}) has {found}" for rank, found in enumerate(facts))
            message = f"worker {self.name!r}, {what}: its ranks disagree: {said}"
            raise ProtocolError(message, worker=self.name, task=task)

    async def _lose(self, error: BaseException, reason: str = "") -> None:
        """Kill all ranks: from now on no call is answered. With a reason they write their stacks to their logs."""
        self._end = partial(_lost, self.name, str(error))
        await asyncio.gather(*(rank.kill(reason) for rank in self.ranks))

    async def _abandon(self, starts: Sequence[asyncio.Task[Any]]) -> None:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        await self._close([rank.kill for rank in self.ranks])

    async def _close(
        self, ends: Sequence[Callable[[], Coroutine[Any, Any, None]]], end: Callable[[str], WorkerError] | None = None
    ) -> None:
        self._end = end or partial(closed, self.name)
        await asyncio.gather(*(end() for end in ends))
        if self._commands:
            await asyncio.wait(self._commands)
        await self._meeting.aclose()
        self._withdraw()
        self._end = partial(_not_started, self.name)
        self._open = False

    def _drop(self, command: asyncio.Task[Any]) -> None:
        self.num_dropped_replies += 1


def process_group(
    name: str,
    target: str,
    num_ranks: int,
    *,
    kwargs: Mapping[str, Any] | None = None,
    gpus: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    rank_timeout_s: float = 120.0,
    **options: Any,
) -> GroupWorker:
    """A worker whose ranks are child processes of this one, named ``<name>.<rank>``.

    They meet in a file without a name, which no other user can open and which goes with this process at the latest;
    gloo, where they use it, listens on the loopback interface only.

    Args:
        name: unique in the run.
        target: called on each rank with ``kwargs`` and ``ranks``, a :class:`digen.diffusion.ranks.RankSpec` as plain
            data.
        num_ranks: at least two.
        kwargs: plain data.
        gpus: the devices, one for each rank, as indices into those that this process sees. None by default.
        env: environment variables set in addition.
        rank_timeout_s: longest time that one rank may lag behind another, in a command or a collective.
        options: of :class:`digen.ProcessWorker`, the same for all ranks.

    Raises:
        ConfigError: there are not as many devices as ranks; or a name, target, device or interpreter that cannot be.
    """
    if num_ranks < 2:
        raise ConfigError(f"worker {name!r}: {num_ranks} ranks are no group; a worker of one is a ProcessWorker")
    if gpus and len(gpus) != num_ranks:
        raise ConfigError(f"worker {name!r}: {num_ranks} ranks need as many GPUs, one each, not {tuple(gpus)}")
    # The ranks' arguments hold these; where to meet is added whenever they start.
    specs: list[dict[str, Any]] = [
        {"rank": rank, "num_ranks": num_ranks, "timeout_s": rank_timeout_s} for rank in range(num_ranks)
    ]
    ranks = [
        ProcessWorker(
            f"{name}.{rank}",
            target,
            kwargs={**(kwargs or {}), "ranks": specs[rank]},
            gpus=gpus[rank : rank + 1],
            env={"GLOO_SOCKET_IFNAME": LOOPBACK, **(env or {})},
            **options,
        )
        for rank in range(num_ranks)
    ]
    return GroupWorker(name, ranks, rendezvous=partial(_meeting, specs), rank_timeout_s=rank_timeout_s)


@asynccontextmanager
async def _meeting(specs: Sequence[dict[str, Any]]) -> AsyncIterator[None]:
    """A new place, which the ranks are told: what a store held for ranks that have ended would mislead new ones."""
    with _place() as path:
        for spec in specs:
            spec["rendezvous"] = f"file://{path}"
        yield


@contextmanager
def _place() -> Iterator[Path]:
    """Of a file that other processes of this user can open by its path, and nobody else."""
    if hasattr(os, "memfd_create"):  # it goes with this process, however that ends
        descriptor = os.memfd_create("digen-meeting", os.MFD_CLOEXEC)
        try:
            yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="digen-") as directory:
            yield Path(directory) / "store"


class _Answers:
    """What is known of the ranks' answers to one command."""

    def __init__(self, errors: list[tuple[int, BaseException]], missing: list[int], *, fatal: bool) -> None:
        self.errors = errors
        """(rank, error) of those that failed, in the order of time."""
        self.missing = missing
        """Ranks that were not waited for any longer."""
        self.lost = fatal or bool(missing)
        """Whether the ranks cannot be in step any more."""


async def _answers(
    calls: Sequence[asyncio.Task[Any]], *, lag_s: float | None, fatal: Callable[[int, BaseException], bool]
) -> _Answers:
    """Wait until all ranks have answered, one has failed fatally, or the others have not followed in time.

    Args:
        calls: one for each rank.
        lag_s: longest time after the first answer. ``None``: any.
        fatal: whether an error of a rank cannot be followed by anything.
    """
    time = asyncio.get_running_loop().time
    rank_of = {call: rank for rank, call in enumerate(calls)}
    for call in calls:
        call.add_done_callback(_retrieve)
    waiting, errors, ends, until = set(calls), [], False, float("inf")
    while waiting and not ends:
        timeout = None if until == float("inf") else max(0.0, until - time())
        done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        if lag_s is not None:
            until = min(until, time() + lag_s)
        for call in sorted(done, key=rank_of.__getitem__):
            error = call.exception()
            if error is not None:
                errors.append((rank_of[call], error))
                until = min(until, time() + _GRACE_S)
                ends = ends or fatal(rank_of[call], error)
    return _Answers(errors, sorted(rank_of[call] for call in waiting), fatal=ends)


def _retrieve(call: asyncio.Task[Any]) -> None:
    """Nobody may look at the error of a rank that was given up on; asyncio would complain."""
    if not call.cancelled():
        call.exception()


def _facts(method: str, result: Any) -> dict[str, Any]:
    """What every rank must have found."""
    if method in {"restore", "recall"}:
        return {"version": result}
    return {name: getattr(result, name) for name in _FACTS if hasattr(result, name)}


def _own(args: Sequence[Any], rank: int) -> list[Any]:
    """What a rank is called with: of a snapshot its own part."""
    return [replace(a, payloads=a.payloads[rank : rank + 1]) if isinstance(a, Snapshot) else a for a in args]


def _joined(results: Sequence[Any]) -> Any:
    """The answer: rank 0's, or the snapshot of all."""
    if not all(isinstance(result, Snapshot) for result in results):
        return results[0]
    payloads = tuple(payload for result in results for payload in result.payloads)
    return replace(results[0], payloads=payloads, nbytes=sum(result.nbytes for result in results))


def _not_started(worker: str, task: str) -> WorkerError:
    return WorkerError(f"worker {worker!r} is not started", worker=worker, task=task)


def _late(worker: str, reason: str, task: str) -> WorkerError:
    message = f"worker {worker!r} was given up: {reason}; it was killed, {task} was not answered; see its ranks' logs"
    return WorkerTimeout(message, worker=worker, task=task)


def _lost(worker: str, reason: str, task: str) -> WorkerError:
    return WorkerDied(worker=worker, task=task, how=f"its ranks were killed: {reason}")
