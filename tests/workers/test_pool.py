"""The pool: fairness, loss, and lives that begin and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from digen import ConfigError, InProcessWorker, MicroBatch, Pool, ProcessWorker, WorkerDied, WorkerError, WorkerRaised
from digen.errors import WorkerTimeout

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("nothing_left")]


class Handle:
    """A worker whose calls end when the test says so."""

    def __init__(self, name: str, log: list[tuple[str, Any]]) -> None:
        self.name = name
        self.log = log
        self.gates: list[asyncio.Future[Any]] = []

    async def work(self, item: Any) -> Any:
        self.log.append((self.name, item))
        gate = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        return await gate


class Special(Handle):
    async def rare(self, item: Any) -> Any:
        return await self.work(item)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_go_to_idle_workers_first_come_first_served() -> None:
    log: list[tuple[str, Any]] = []
    one, two = Handle("one", log), Handle("two", log)
    async with Pool([one, two]) as pool:
        calls = [asyncio.ensure_future(pool.call("work", item)) for item in range(5)]
        await settle()
        assert log == [("one", 0), ("two", 1)]
        two.gates[-1].set_result("b")
        await settle()
        assert log[2:] == [("two", 2)]
        calls[3].cancel()
        await settle()
        one.gates[-1].set_result("a")
        await settle()
        assert log[3:] == [("one", 4)]
        one.gates[-1].set_result("e")
        two.gates[-1].set_result("c")
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [r for r in results if isinstance(r, str)] == ["a", "b", "c", "e"]


async def test_a_call_that_few_can_serve_does_not_hold_up_the_others() -> None:
    log: list[tuple[str, Any]] = []
    plain, special = Handle("plain", log), Special("special", log)
    async with Pool([special, plain]) as pool:
        first = asyncio.ensure_future(pool.call("work", 0))  # takes the special one
        await settle()
        rare = [asyncio.ensure_future(pool.call("rare", item)) for item in (1, 2)]
        second = asyncio.ensure_future(pool.call("work", 3))
        await settle()
        assert log == [("special", 0), ("plain", 3)]
        third = asyncio.ensure_future(pool.call("work", 4))
        await settle()
        special.gates[-1].set_result(None)
        await settle()
        assert log[2:] == [("special", 1)]
        plain.gates[-1].set_result(None)
        await settle()
        assert log[3:] == [("plain", 4)]
        special.gates[-1].set_result(None)
        await settle()
        assert log[4:] == [("special", 2)]
        special.gates[-1].set_result(None)
        plain.gates[-1].set_result(None)
        await asyncio.gather(first, *rare, second, third)


async def test_a_cancelled_turn_that_had_come_is_passed_on() -> None:
    log: list[tuple[str, Any]] = []
    one = Handle("one", log)
    async with Pool([one]) as pool:
        first, second, third = (asyncio.ensure_future(pool.call("work", item)) for item in range(3))
        await settle()
        gate = one.gates[-1]
        gate.add_done_callback(lambda _: second.cancel())  # after first woke and gave second its turn
        gate.set_result(None)
        await first
        await settle()
        assert log == [("one", 0), ("one", 2)]
        one.gates[-1].set_result(None)
        await third


@pytest.mark.parametrize("lost", [WorkerDied(worker="one", signal=9), WorkerTimeout("late", worker="one")])
async def test_a_lost_worker_gets_no_more_calls_and_nobody_waits_for_it(lost: WorkerError) -> None:
    log: list[tuple[str, Any]] = []
    one, two = Handle("one", log), Handle("two", log)
    async with Pool([one, two]) as pool:
        calls = [asyncio.ensure_future(pool.call("work", item)) for item in range(4)]
        await settle()
        one.gates[-1].set_exception(lost)
        await settle()
        assert log == [("one", 0), ("two", 1)]
        two.gates[-1].set_exception(ValueError("just this once"))
        await settle()
        assert log[2:] == [("two", 2)]
        two.gates[-1].set_exception(WorkerDied(worker="two", exit_code=1))
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [type(lost), ValueError, WorkerDied, WorkerError]
        assert "exit code 1" in str(errors[3])
        with pytest.raises(WorkerError, match="no worker of the pool"):
            await pool.call("work", 9)


async def test_names_are_unique_and_unknown_methods_are_errors() -> None:
    with pytest.raises(ConfigError, match="unique"):
        Pool([Handle("a", []), Handle("a", [])])
    async with Pool([Handle("a", [])]) as pool:
        assert pool["a"].name == "a"
        assert pool.trainer is None
        with pytest.raises(WorkerError, match="'generate'"):
            await pool.call("generate")


async def test_a_pool_of_processes(worker: Callable[..., ProcessWorker], micro_batch: MicroBatch) -> None:
    async with Pool([worker(name, "Engine") for name in ("trainer", "gen1")]) as pool:
        assert pool.generators == ()  # both train
        assert pool.trainer.name == "trainer"
        rollout = await pool.generate(micro_batch)
        scored = await pool.score(rollout)
        assert len(scored.rewards) == micro_batch.num_samples
        await pool.update(rollout, [1.0, 1.0])
        pool.release(rollout.payload)
        await pool.commit(3, [5])
        assert (await pool.publish(1)).version == 1


async def test_if_one_cannot_start_none_is_left(worker: Callable[..., ProcessWorker]) -> None:
    good = worker("good")
    with pytest.raises(WorkerRaised, match="no model here"):
        async with Pool([good, worker("bad", "broken_constructor"), worker("slow", "sleepy", stop_grace_s=0.1)]):
            pytest.fail("the pool was entered")
    assert good.pid is None


async def test_generation_spares_the_trainer(micro_batch: MicroBatch) -> None:
    class Both:
        def generate(self, micro_batch: MicroBatch) -> str:
            return type(self).__name__

        def update(self) -> None: ...

    class Gen:
        def generate(self, micro_batch: MicroBatch) -> str:
            return type(self).__name__

    async with Pool([InProcessWorker("t", Both), InProcessWorker("g", Gen)]) as pool:
        assert [generator.name for generator in pool.generators] == ["g"]
        assert [await pool.call("generate", micro_batch) for _ in range(3)] == ["Gen"] * 3
