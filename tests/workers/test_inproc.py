"""Workers in this process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from digen import (
    Generator,
    InProcessWorker,
    LoadReport,
    MicroBatch,
    Payload,
    Publication,
    RewardError,
    Rollout,
    WorkerError,
    WorkerRaised,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("nothing_left")]


class Engine:
    def __init__(self, version: int = 4) -> None:
        self.version = version
        self.threads = {threading.current_thread()}
        self.started = threading.Event()
        self.blocked = threading.Event()

    def generate(self, micro_batch: MicroBatch) -> Rollout:
        self.threads.add(threading.current_thread())
        return Rollout(micro_batch, self.version, self.version, Payload({"x": b"abc"}))

    def load(self, publication: Publication) -> LoadReport:
        return LoadReport(publication.version, 0, 0)

    def fail(self, error: Exception) -> None:
        raise error

    def block(self) -> bool:
        self.started.set()
        return self.blocked.wait(5)

    def same(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize("thread", [True, False])
async def test_methods_version_and_payloads_as_they_are(thread: bool, micro_batch: MicroBatch) -> None:
    async with InProcessWorker("e", Engine, kwargs={"version": 2}, thread=thread) as worker:
        assert isinstance(worker, Generator)
        assert not hasattr(worker, "score")
        assert worker.version == 2
        rollout = await worker.generate(micro_batch)
        assert rollout.payload["x"] == b"abc"
        worker.release(rollout.payload)
        assert await worker.call("same", rollout) is rollout
        await worker.load(Publication(7, Payload({}), 0, 0, 0))
        assert worker.version == 7
    assert not hasattr(worker, "generate")


async def test_all_calls_run_in_one_thread_of_their_own(micro_batch: MicroBatch) -> None:
    async with InProcessWorker("e", Engine) as worker:
        await asyncio.gather(*(worker.generate(micro_batch) for _ in range(20)))
        threads = (await worker.call("same", worker))._object.threads
    assert len(threads) == 1
    assert threads != {threading.current_thread()}


async def test_without_a_thread_calls_run_in_the_loop(micro_batch: MicroBatch) -> None:
    engine = Engine()
    async with InProcessWorker("e", engine, thread=False) as worker:
        await worker.generate(micro_batch)
    assert engine.threads == {threading.current_thread()}


async def test_errors_are_those_of_a_process_worker() -> None:
    async with InProcessWorker("e", Engine) as worker:
        with pytest.raises(WorkerRaised, match="worker 'e', fail: ValueError: bad") as caught:
            await worker.call("fail", ValueError("bad"))
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(RewardError, match="no") as known:
            await worker.call("fail", RewardError("no"))
        assert known.value.__notes__ == ["in worker 'e', fail"]
        with pytest.raises(WorkerRaised, match="AttributeError"):
            await worker.call("nothing")
        with pytest.raises(WorkerError, match="started already"):
            await worker.start()
    with pytest.raises(WorkerError, match="not started"):
        await worker.call("same", 1)
    with pytest.raises(WorkerRaised, match="start: TypeError"):
        await InProcessWorker("e", Engine, kwargs={"colour": 1}).start()
    with pytest.raises(WorkerRaised, match="ModuleNotFoundError"):
        await InProcessWorker("e", "no_such_module:x").start()


async def test_closing_waits_for_the_running_call() -> None:
    engine = Engine()
    worker = InProcessWorker("e", engine)
    await worker.start()
    call, queued = asyncio.ensure_future(worker.call("block")), asyncio.ensure_future(worker.call("same", 1))
    assert await asyncio.to_thread(engine.started.wait, 5)
    closing = asyncio.ensure_future(worker.aclose())
    await asyncio.sleep(0)
    engine.blocked.set()
    await closing
    assert await call is True
    with pytest.raises(WorkerError, match="was closed, same was not run"):
        await queued
