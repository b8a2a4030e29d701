"""How workers end: politely, by force, with their driver, and without leaving anything."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from digen import ProcessWorker, WorkerDied, WorkerError, WorkerTimeout

Make = Callable[..., ProcessWorker]
HERE = Path(__file__).parent

DRIVER = """
import asyncio, sys
from digen import ProcessWorker

async def main():
    options = {"env": {"PYTHONPATH": sys.argv[1]}, "log_dir": sys.argv[2]}
    workers = [ProcessWorker(name, "targets:Misc", **options) for name in ("w0", "w1")]
    await asyncio.gather(*(worker.start() for worker in workers))
    busy = asyncio.ensure_future(workers[0].call("nap", 60.0))
    print(*(worker.pid for worker in workers), flush=True)
    await busy

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_driver_however_it_ends(
    number: int, tmp_path: Path, gone: Callable[[int], bool]
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(HERE), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert driver.stdout is not None
    with driver.stdout as output:
        pids = [int(pid) for pid in output.readline().split()]
        assert len(pids) == 2
        driver.send_signal(number)
        driver.wait()
    assert all(map(gone, pids))


def test_an_orphan_ends_without_pdeathsig_too(gone: Callable[[int], bool]) -> None:
    code = (
        "import ctypes, os, sys, time\n"
        "def missing(name): raise OSError\n"
        "ctypes.CDLL = missing\n"
        "from digen.workers import child\n"
        "child._ORPHAN_CHECK_S = 0.01\n"
        "child.die_with(int(sys.argv[1]))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    starter = f"import subprocess, sys, os; subprocess.Popen([sys.executable, '-c', {code!r}, str(os.getpid())]).wait()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        parent.kill()
        assert gone(orphan)


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_left")
async def test_an_idle_worker_ends_by_itself(worker: Make) -> None:
    handle = worker(stop_grace_s=60.0)
    await handle.start()
    started = time.perf_counter()
    await handle.aclose()
    await handle.aclose()
    assert time.perf_counter() - started < 5


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_left")
async def test_a_busy_worker_is_terminated_and_its_call_fails(worker: Make) -> None:
    async with worker(stop_grace_s=60.0) as handle:
        call = asyncio.ensure_future(handle.call("nap", 60.0))
        await asyncio.sleep(0)
    with pytest.raises(WorkerError, match="worker 'w' was closed, nap was not answered"):
        await call


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_left")
async def test_a_worker_that_ignores_sigterm_is_killed_within_the_grace(worker: Make) -> None:
    handle = worker(target="Deaf", stop_grace_s=0.4)
    await handle.start()
    call = asyncio.ensure_future(handle.call("nap", 60.0))
    await asyncio.sleep(0)
    started = time.perf_counter()
    await handle.aclose()
    assert time.perf_counter() - started < 1.5
    with pytest.raises(WorkerError, match="closed"):
        await call


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_left")
async def test_closing_is_not_cut_short_by_cancellation(worker: Make) -> None:
    handle = worker(target="Deaf", stop_grace_s=0.3)
    await handle.start()
    process = psutil.Process(handle.pid)
    call = asyncio.ensure_future(handle.call("nap", 60.0))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(handle.aclose())
    for _ in range(3):
        await asyncio.sleep(0.01)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not process.is_running()
    with pytest.raises(WorkerError, match="closed"):
        await call


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_left")
async def test_the_temporary_log_directory_goes_unless_the_worker_died(
    worker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with worker(log_dir=None) as handle:
        assert handle.log_path is not None
        assert handle.log_path.is_relative_to(tmp_path)
        assert handle.log_path.exists()
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - pathlib's is a blocking call in the eyes of the linter
    async with worker(log_dir=None) as handle:
        with pytest.raises(WorkerDied) as caught:
            await handle.call("exit", 1)
    assert handle.log_path is not None
    assert str(handle.log_path) in str(caught.value)
    assert handle.log_path.exists()
    with pytest.raises(WorkerTimeout):
        await worker(target="sleepy", log_dir=None, start_timeout_s=0.2).start()


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_left")
async def test_fifty_lives_leave_nothing(worker: Make) -> None:
    """Starts, payloads that cross, deaths and closes; the fixture compares descriptors, threads and processes."""
    async with worker("reader") as reader:
        num_fds = await reader.call("num_fds")
        for index in range(0, 50, 5):
            batch = [worker(f"w{index + offset}") for offset in range(5)]
            await asyncio.gather(*(handle.start() for handle in batch))
            payloads = [await handle.call("make", 1000) for handle in batch]
            for payload in payloads:
                await reader.call("read", payload)
            with pytest.raises(WorkerDied):
                await batch[0].call("kill", int(signal.SIGKILL))
            await asyncio.gather(*(handle.aclose() for handle in batch))
            del payload, payloads, batch
        assert await reader.call("mappings") == 0
        assert await reader.call("num_fds") == num_fds
