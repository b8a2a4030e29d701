"""The virtual clock: exact, ordered, never hanging."""

from __future__ import annotations

import asyncio
import random
import socket

import anyio
import pytest

from digen.workers.clock import Deadlock, VirtualLoop, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_hours_pass_at_once_and_exactly() -> None:
    async def main() -> list[float]:
        times = []
        for seconds in (3600.0, 0.1, 1e-9, 86400.0 * 400):
            await asyncio.sleep(seconds)
            times.append(now())
        return times

    assert run_virtual(main()) == [3600, 3600 + 0.1, 3600 + 0.1 + 1e-9, 3600 + 0.1 + 1e-9 + 86400.0 * 400]


@pytest.mark.parametrize("seed", range(20))
def test_every_timer_goes_off_exactly_at_its_time_in_order(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    whens = [draw.random() * 3.0**exponent for exponent in range(-10, 13)]

    async def main() -> list[tuple[float, float]]:
        loop, fired = asyncio.get_running_loop(), []
        for when in whens:
            loop.call_at(when, lambda when=when: fired.append((when, loop.time())))  # type: ignore[misc]
        cancelled = [loop.call_at(when * draw.random(), fired.append, (-1.0, 0.0)) for when in whens]
        for timer in cancelled:
            timer.cancel()
        await asyncio.sleep(2e6)
        return fired

    assert run_virtual(main()) == [(when, when) for when in sorted(whens)]


def test_timers_of_one_time_go_off_together_and_in_the_order_in_which_they_were_set() -> None:
    async def main() -> tuple[list[int], set[float]]:
        order: list[int] = []
        times: set[float] = set()

        async def wait(number: int) -> None:
            await asyncio.sleep(0.3)
            order.append(number)
            times.add(now())

        await asyncio.gather(*(wait(number) for number in range(50)))
        return order, times

    assert run_virtual(main()) == (list(range(50)), {0.3})


def test_timers_that_differ_in_the_last_bit_are_two_instants() -> None:
    async def main() -> list[float]:
        loop, times = asyncio.get_running_loop(), []
        for when in (0.3, 0.1 + 0.2):
            loop.call_at(when, lambda: times.append(loop.time()))
        await asyncio.sleep(1)
        return times

    assert run_virtual(main()) == [0.3, 0.1 + 0.2]


def test_cancelled_timers_do_not_bend_the_time() -> None:
    async def main() -> float:
        for _ in range(100):
            async with asyncio.timeout(0.7):
                await asyncio.sleep(0.1)
        return now()

    expected = 0.0
    for _ in range(100):
        expected += 0.1
    assert run_virtual(main()) == expected


def test_a_deadlock_is_an_error_instead_of_a_hang() -> None:
    async def main() -> None:
        await asyncio.sleep(5)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="no timer is pending"):
        run_virtual(main())


def test_cancellation_and_time_outs_work() -> None:
    async def main() -> list[float]:
        times = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(10)
        times.append(now())
        with anyio.move_on_after(1.25):
            await anyio.sleep(100)
        times.append(now())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 4)
        times.append(now())
        sleeper = asyncio.create_task(asyncio.sleep(50))
        await anyio.sleep(1)
        sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper
        times.append(now())
        return times

    assert run_virtual(main()) == [2.5, 3.75, 7.75, 8.75]


def test_anyio_task_groups_run_on_it() -> None:
    async def main() -> float:
        async with anyio.create_task_group() as group:
            for seconds in (3, 1, 2):
                group.start_soon(anyio.sleep, seconds)
        return now()

    assert run_virtual(main()) == 3


def test_a_thread_may_still_wake_it() -> None:
    async def main() -> int:
        return await asyncio.to_thread(sum, [1, 2])

    assert run_virtual(main()) == 3


def test_a_socket_may_wake_it_and_a_deadlock_is_found_after_that() -> None:
    async def main(ours: socket.socket, theirs: socket.socket) -> bytes:
        await asyncio.sleep(1)
        theirs.send(b"late")
        return await asyncio.get_running_loop().sock_recv(ours, 10)

    async def stuck() -> None:
        await asyncio.to_thread(sum, [1, 2])
        await asyncio.get_running_loop().create_future()

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        assert run_virtual(main(ours, theirs)) == b"late"
    with pytest.raises(Deadlock):
        run_virtual(stuck())


def test_the_result_and_the_error_of_main_come_through() -> None:
    async def broken() -> None:
        await asyncio.sleep(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_virtual(broken())


def test_many_cancelled_timers_are_swept() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        keep = loop.call_later(1000, lambda: None)
        for _ in range(1000):
            loop.call_later(500, lambda: None).cancel()
        await asyncio.sleep(1)
        keep.cancel()
        return len(loop._scheduled)

    assert run_virtual(main()) < 10
