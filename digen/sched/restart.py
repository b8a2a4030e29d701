"""The way back of a worker that is lost, which the roster begins; the inbox hears of its end."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from digen.errors import WorkerDied
from digen.sched.checks import warn
from digen.sched.lanes import Alarm, Checkpointer, Inbox, overdue
from digen.sched.snapshots import Snapshots
from digen.sched.state import Worker
from digen.types import Snapshot

if TYPE_CHECKING:
    import asyncio


class Restart:
    """A lost worker on its way back: wait, start it again, have a trainer get its state back; then tell the inbox.

    A trainer recalls the newest snapshot, or restores the newest checkpoint if that is newer. A snapshot that it cannot
    recall, or that two die of, is dropped with a warning; a trainer that is started again restores the checkpoint. One
    that dies or hangs in either is a restart that failed.

    Args:
        handle: has a method ``restart``, which ends what is left of the worker and starts another in its place; it
            bounds the time of that itself.
        worker: whose handle it is.
        wait_s: back-off.
        hung: why it has to be killed first, if it hangs.
        deadline_s: longest time that a trainer may take to restore or recall, if it can be killed.
        wanted: the version that a trainer had; another one that holds it needs nothing.
        inbox: is told of the end.
        checkpointer: finds the checkpoint that a trainer restores.
        snapshots: keeps the snapshot that a trainer recalls.
        loop: the event loop.
    """

    def __init__(
        self,
        handle: Any,
        worker: Worker,
        wait_s: float,
        *,
        hung: str,
        deadline_s: float,
        wanted: int,
        inbox: Inbox,
        checkpointer: Checkpointer | None,
        snapshots: Snapshots,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.worker = worker
        self.error: Exception | None = None
        """Why it failed, once it has ended."""
        self.version = 0
        """The version that the worker holds, once it is back."""
        self._handle = handle
        self._killable = hasattr(handle, "kill")
        self._hung = hung
        self._deadline_s = deadline_s
        self._alarm = Alarm(loop)
        self._wanted = wanted
        self._inbox = inbox
        self._checkpointer = checkpointer
        self._snapshots = snapshots
        self._loop = loop
        self.coroutine: asyncio.Task[None] = loop.create_task(self._run(wait_s), name=f"digen-restart-{worker.name}")

    async def _run(self, wait_s: float) -> None:
        try:
            if self._hung and self._killable:
                await self._handle.kill(self._hung)
            if wait_s > 0:
                awake = self._loop.create_future()
                self._loop.call_later(wait_s, _wake, awake)
                await awake
            await self._start()
            if self.worker.role == "trainer" and self.version != self._wanted:
                await self._restore()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self._inbox.restarted.append(self)
        self._inbox.wake()

    async def _call(self, method: str, argument: Any) -> Any:
        if self._killable:
            self._alarm.set(self._deadline_s, self._overdue, method)
        try:
            return await getattr(self._handle, method)(argument)
        finally:
            self._alarm.off()
            if self.coroutine.cancelling():  # perhaps it swallowed that, and answers now that nobody waits any more
                over = self._loop.create_future()
                over.cancel()
                await over

    def _overdue(self, method: str) -> None:
        error = overdue(self.worker, method, self._deadline_s)
        if method == "recall":
            self._drop_snapshot(str(error))
        self._end(error)
        self.coroutine.cancel()

    async def _start(self) -> None:
        await self._handle.restart()
        self.version = int(getattr(self._handle, "version", 0))

    async def _restore(self) -> None:
        snapshot, found = self._snapshots.newest, None
        if snapshot is None or snapshot.version != self._wanted:
            found = await self._newest()
        if snapshot is not None and (found is None or snapshot.version > found[0]):
            if await self._recalls(snapshot):
                return
            del snapshot
            gc.collect()  # its memory goes with the last reference, of which the error's frames hold some
            await self._start()  # nobody knows what it holds now
            found = found or await self._newest()
        if found is not None:
            version, path = found
            await self._call("restore", path)
            self.version = version

    async def _recalls(self, snapshot: Snapshot) -> bool:
        name, wanted = self.worker.name, snapshot.version
        try:
            version = await self._call("recall", snapshot)
        except WorkerDied:
            if self._snapshots.is_blamed():
                self._drop_snapshot(f"worker {name!r} died of it twice")
            raise  # a loss like any other
        except Exception as error:
            self._drop_snapshot(str(error))
            return False
        if version != wanted:
            self._drop_snapshot(f"worker {name!r} says that it holds {version!r} after it recalled version {wanted}")
            return False
        self.version = wanted
        return True

    def _drop_snapshot(self, reason: str) -> None:
        warn("a snapshot cannot be recalled; what counts is the newest checkpoint", reason=reason)
        self._snapshots.drop()

    async def _newest(self) -> tuple[int, str] | None:
        newest = getattr(self._checkpointer, "newest", None)
        found: tuple[int, str] | None = await newest() if newest is not None else None
        return found


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():  # it was cancelled meanwhile
        sleeper.set_result(None)
