"""Who takes part in a run: every worker with its handle and lane, and those who are lost and on their way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from digen.events import Role, Sink, WorkerJoined, WorkerLeft, WorkerLost, WorkerRestarted
from digen.sched.lanes import Checkpointer, Inbox, Lane
from digen.sched.meter import Meter
from digen.sched.recovery import Lost
from digen.sched.restart import Restart
from digen.sched.snapshots import Snapshots
from digen.sched.state import State, Worker
from digen.types import Payload

if TYPE_CHECKING:
    import asyncio

    from digen.restarts import RestartsSection


class Roster:
    """Lets workers join, leave, be lost and come back.

    Args:
        state: the scheduler's state.
        meter: counts the time that they are present.
        emit: gets the events.
        now: seconds since the run began.
        inbox: where their lanes put what they return.
        checkpointer: saves on the trainer's lane, and finds what a lost trainer is restored from.
        snapshots: of the trainer, which it goes on from.
        rules: the config's numbers.
        loop: the event loop.
    """

    def __init__(
        self,
        state: State,
        meter: Meter,
        *,
        emit: Sink,
        now: Callable[[], float],
        inbox: Inbox,
        checkpointer: Checkpointer | None,
        snapshots: Snapshots,
        rules: RestartsSection,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._state = state
        self._meter = meter
        self._emit = emit
        self._now = now
        self._inbox = inbox
        self._checkpointer = checkpointer
        self._snapshots = snapshots
        self._rules = rules
        self._loop = loop
        self.lanes: dict[str, Lane] = {}
        """By name, of those who are there."""
        self.restarts: dict[Worker, Restart] = {}
        """Of those who are being started again."""
        self._handles: dict[Worker, Any] = {}
        self._lost_at: dict[Worker, float] = {}
        self._abandoned: set[asyncio.Task[None]] = set()
        self._just_idle: list[Worker] = []

    def workers(self) -> Iterable[Worker]:
        """Those who are there."""
        return (lane.worker for lane in self.lanes.values())

    def restartable(self, worker: Worker) -> bool:
        """Whether another can be started in its place."""
        return hasattr(self._handles[worker], "restart")

    def release(self, owner: Worker, payload: Payload) -> None:
        """Give a payload back to the worker that made it."""
        release = getattr(self._handles[owner], "release", None)
        if release is not None:
            release(payload)

    def set_idle(self, worker: Worker) -> None:
        """A worker has no task, and waits for one."""
        self._state.set_idle(worker)
        self._just_idle.append(worker)

    def take_idle(self) -> Iterable[Worker]:
        """Who has become idle since the last call, and still is when it is asked for."""
        if not self._just_idle:
            return ()
        idle, self._just_idle = self._just_idle, []
        return (worker for worker in idle if worker.task is None and worker.name in self.lanes)

    def join(self, handle: Any, role: Role) -> None:
        """A worker takes part from now on."""
        state = self._state
        version = getattr(handle, "version", state.start_step if role == "trainer" else 0)
        worker = Worker(handle.name, role, len(self._handles), int(version), self._now())
        self._handles[worker] = handle
        if role == "trainer":
            state.trainer = worker
        else:
            state.team(role)[handle.name] = worker
        self._open_lane(worker)
        self._emit(WorkerJoined(self._now(), handle.name, role, worker.version))

    def leave(self, worker: Worker) -> None:
        """A generator or scorer takes part no more."""
        state, lane = self._state, self.lanes.get(worker.name)
        if lane is None or lane.worker is not worker:  # a sink removed it a moment ago
            return
        self.lanes.pop(worker.name).cancel()
        state.depart(worker)
        self._meter.left(worker, self._now())
        self._emit(WorkerLeft(self._now(), worker.name, "removed"))
        self._inbox.wake()

    def lose(self, worker: Worker, lost: Lost, error: str) -> None:
        """Take a worker out, and have another started in its place."""
        now = self._now()
        lane = self.lanes.pop(worker.name)
        lane.cancel()
        self._abandon(lane.coroutine)
        del lane.coroutine  # which refers to the lane: what the call held would stay until cycles are looked for
        worker.lost = True
        self._meter.left(worker, now)
        self._emit(WorkerLost(now, worker.name, worker.role, lost.reason, error, lost.wait_s))
        hung = error if lost.reason == "hung" else ""
        if lost.wait_s is not None:
            self._lost_at[worker] = now
            self._restart(worker, lost.wait_s, hung)
        elif hung:
            self._abandon(self._loop.create_task(self._handles[worker].kill(hung), name=f"digen-kill-{worker.name}"))
        if worker.role != "trainer":
            self._state.depart(worker)

    def lose_again(self, worker: Worker, lost: Lost, error: str) -> None:
        """It could not be started."""
        self._emit(WorkerLost(self._now(), worker.name, worker.role, lost.reason, error, lost.wait_s))
        if lost.wait_s is not None:
            self._restart(worker, lost.wait_s, error if lost.reason == "hung" else "")

    def restarted(self, restart: Restart) -> None:
        """An attempt to start a worker again has ended, well or not."""
        del self.restarts[restart.worker]
        restart.error = None  # whose frames refer to the restart
        self._state.absent.pop(restart.worker.name, None)
        self._abandon(restart.coroutine)

    def rejoin(self, worker: Worker, version: int) -> None:
        """A worker that was lost is back, with weights of ``version``."""
        now = self._now()
        if worker.role != "trainer":
            self._state.team(worker.role)[worker.name] = worker
        worker.lost, worker.version, worker.joined = False, version, now
        self._open_lane(worker)
        self._emit(WorkerRestarted(now, worker.name, worker.role, version, now - self._lost_at.pop(worker)))
        self._state.recount_outdated()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel what runs on lanes; returns all that has to be waited for, also of those who are lost."""
        ending = list(self._abandoned)
        for lane in self.lanes.values():
            lane.cancel()
            ending.append(lane.coroutine)
        for restart in self.restarts.values():
            restart.coroutine.cancel()
            ending.append(restart.coroutine)
        return ending

    def _open_lane(self, worker: Worker) -> None:
        self.lanes[worker.name] = Lane(
            self._handles[worker], worker, inbox=self._inbox, checkpointer=self._checkpointer, loop=self._loop
        )
        self.set_idle(worker)

    def _restart(self, worker: Worker, wait_s: float, hung: str) -> None:
        if worker.role != "trainer":
            self._state.absent[worker.name] = worker
        self.restarts[worker] = Restart(
            self._handles[worker],
            worker,
            wait_s,
            hung=hung,
            deadline_s=self._rules.first_deadline_s,
            wanted=self._state.step,
            inbox=self._inbox,
            checkpointer=self._checkpointer,
            snapshots=self._snapshots,
            loop=self._loop,
        )

    def _abandon(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for what it does, but :meth:`cancel` for its end."""
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
