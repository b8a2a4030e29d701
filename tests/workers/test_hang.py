"""Workers that live and do nothing: noticed, asked where they are, killed. And those that only seem to."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from digen import ConfigError, ProcessWorker, WorkerDied, WorkerError, WorkerTimeout
from digen.config import RunConfig
from digen.fleet import build_workers
from digen.workers.child import BEAT, STACKS
from digen.workers.group import GroupWorker, process_group
from digen.workers.handle import TargetHandle
from digen.workers.process import _Pulse

Make = Callable[..., ProcessWorker]
pytestmark = pytest.mark.usefixtures("nothing_left")
SILENT_S = 0.5
"""Silence after which a worker is hung, where one is to be found."""
ALIVE_S = 0.8
"""And where none is: a machine that is busy with other things delays beats, too."""


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def tell(worker: TargetHandle, number: int) -> None:
    assert isinstance(worker, ProcessWorker)
    assert worker.pid is not None
    os.kill(worker.pid, number)


async def begun(worker: TargetHandle, method: str, *args: Any) -> asyncio.Future[Any]:
    """A call that was sent and has begun to run."""
    call = asyncio.ensure_future(worker.call(method, *args))
    for _ in range(3):
        await asyncio.sleep(0)
    return call


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)


async def dozing(worker: TargetHandle, path: Path, seconds: float, num_ranks: int = 1) -> asyncio.Future[Any]:
    """A call of ``doze`` that every rank is in the middle of."""
    call = await begun(worker, "doze", str(path), seconds)
    await until(lambda: path.exists() and path.stat().st_size == num_ranks)
    return call


# ---- found -----------------------------------------------------------------------------------------------------


async def stopped_in_a_call(worker: Make) -> None:
    async with worker("a", heartbeat_timeout_s=SILENT_S) as handle:
        call = await begun(handle, "nap", 60.0)
        tell(handle, signal.SIGSTOP)
        with pytest.raises(WorkerTimeout) as caught:
            await call
        error = caught.value
        assert (error.worker, error.task) == ("a", "nap")
        assert str(error).startswith("worker 'a' hung: no heartbeat for 0.")
        assert f"it was killed, nap was not answered; see its log {handle.log_path}; if its" in str(error)
        assert str(error).endswith("raise workers.heartbeat_timeout_s")
        assert handle.lost


async def stopped_while_idle_and_started_again(worker: Make) -> None:
    handle = worker("b", heartbeat_timeout_s=SILENT_S)
    async with handle:
        assert not handle.lost
        tell(handle, signal.SIGSTOP)
        await until(lambda: handle.lost)
        with pytest.raises(WorkerTimeout, match=r"hung.* echo was not answered"):
            await handle.call("echo", 1)
    async with handle:
        assert not handle.lost
        assert await handle.call("echo", 1) == [1]


async def in_c_code_that_holds_the_interpreter(worker: Make) -> None:
    async with worker("c", heartbeat_timeout_s=SILENT_S) as handle:
        calls = [await begun(handle, "hold_interpreter", 60), await begun(handle, "echo", 1)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [WorkerTimeout, WorkerTimeout]
        assert [getattr(error, "task", None) for error in errors] == ["hold_interpreter", "echo"]
        assert isinstance(errors[0], WorkerTimeout)
        assert "in hold_interpreter" in notes(errors[0])
        assert handle.log_path is not None
        assert "most recent call first" in handle.log_path.read_text()


async def while_it_is_built(worker: Make) -> None:
    handle = worker("d", "holding", heartbeat_timeout_s=SILENT_S, start_timeout_s=60.0)
    with pytest.raises(WorkerTimeout, match=r"hung.* start was not answered") as caught:
        await handle.start()
    assert "in holding" in notes(caught.value)


@pytest.mark.asyncio
async def test_a_process_that_does_nothing_any_more_is_hung(worker: Make) -> None:
    """Four at once, since each takes its time."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for hung in (
            stopped_in_a_call,
            stopped_while_idle_and_started_again,
            in_c_code_that_holds_the_interpreter,
            while_it_is_built,
        ):
            group.create_task(hung(worker))


@pytest.mark.asyncio
async def test_a_start_that_takes_too_long_says_where_it_is(worker: Make) -> None:
    with pytest.raises(WorkerTimeout, match="not READY") as caught:
        await worker("w", "sleepy", start_timeout_s=1.0, heartbeat_timeout_s=None).start()
    assert "in sleepy" in notes(caught.value)


# ---- spared ----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_process_that_computes_beats_all_the_while(worker: Make) -> None:
    async with worker(heartbeat_timeout_s=ALIVE_S) as handle:
        assert await handle.call("spin", 2 * ALIVE_S) == "spun"
        assert not handle.lost


@pytest.mark.asyncio
async def test_a_driver_that_was_busy_or_stopped_judges_nobody_by_that_time(worker: Make) -> None:
    """Also not one that was stopped with it, as when a machine sleeps: it has not had its time yet."""
    async with worker("a", heartbeat_timeout_s=ALIVE_S) as one, worker("b", heartbeat_timeout_s=ALIVE_S) as other:
        tell(other, signal.SIGSTOP)
        time.sleep(1.5 * ALIVE_S)  # noqa: ASYNC251 - this is the point
        await asyncio.sleep(0.25 * ALIVE_S)  # time for more than one look
        tell(other, signal.SIGCONT)
        assert (one.lost, other.lost) == (False, False)
        assert await one.call("echo", 1) == await other.call("echo", 1) == [1]


def test_a_silence_is_believed_when_two_looks_in_time_find_it() -> None:
    """The looks are as many as are needed: one in the time that a process may be silent, as long as it beats."""
    pulse = _Pulse(8.0)
    assert pulse.interval_s == 0.25
    (theirs,) = pulse.theirs
    assert pulse.arguments == (str(theirs), "0.25")

    def beat(*times: float) -> None:
        os.write(theirs, b"".join(map(BEAT.pack, times)))

    assert [pulse.look(now) for now in (1000.0, 1008.0, 1016.0)] == [8.0] * 3, "it is being started"
    beat(1019.0, 1020.0, 1023.5)
    assert pulse.look(1024.0) == 7.5
    beat(1031.5)
    assert pulse.look(1031.5) == 8.0
    assert pulse.look(1039.5) == 0.25
    beat(1039.5)
    assert pulse.look(1039.75) == 7.75, "there it is"
    assert pulse.look(1047.5) == 0.25
    assert pulse.look(1047.75) is None
    assert pulse.silence_s == 8.25

    beat(1048.0)
    assert pulse.look(1048.0) == 8.0
    assert pulse.look(1056.9) == 0.25, "a little late"
    assert pulse.look(5000.0) == 8.0, "nobody looked for an hour, or the machine slept: all the time anew"
    assert (pulse.look(5008.0), pulse.look(5009.3)) == (0.25, 8.0), "again, before the second look"
    assert (pulse.look(5017.3), pulse.look(5017.55)) == (0.25, None)

    beat(*[6000.0] * (1 << 13))
    with pytest.raises(BlockingIOError):
        beat(6001.0)
    assert pulse.look(6010.0) == 8.0
    beat(6010.125)  # a full pipe is made empty
    assert pulse.look(6010.25) == 7.875
    pulse.close_theirs()
    pulse.close()
    pulse.close()


@pytest.mark.asyncio
async def test_whoever_asks_for_stacks_does_no_harm(worker: Make, tmp_path: Path) -> None:
    async with worker() as handle:
        call = await dozing(handle, tmp_path / "doze", 0.3)
        tell(handle, STACKS)
        assert await call == "rested"
        assert handle.log_path is not None
        assert "in doze" in handle.log_path.read_text()
        assert await handle.call("threads") == ["MainThread", "beat"]


@pytest.mark.asyncio
async def test_beats_can_be_left_out(worker: Make) -> None:
    async with worker(heartbeat_timeout_s=None) as handle:
        assert await handle.call("threads") == ["MainThread"]
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="heartbeat_timeout_s"):
            worker(heartbeat_timeout_s=seconds)


def test_a_config_says_how_long_a_worker_may_be_silent() -> None:
    for silence, expected in ((None, None), (12.5, 12.5)):
        config = RunConfig.model_validate({"workers": {"heartbeat_timeout_s": silence}})
        silences = [getattr(worker, "_heartbeat_timeout_s", -1) for worker in build_workers(config)]
        assert silences == [expected, expected]
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        RunConfig.model_validate({"workers": {"heartbeat_timeout_s": 0}})


# ---- given up --------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_worker_that_is_given_up_says_why_and_where_it_was(worker: Make, tmp_path: Path) -> None:
    handle = worker()
    async with handle:
        calls = [await dozing(handle, tmp_path / "doze", 60.0), await begun(handle, "echo", 1)]
        await handle.kill("no answer in 0.1 s, its deadline")
        with pytest.raises(WorkerTimeout, match=r"given up: no answer in 0\.1 s, its deadline; it was") as caught:
            await calls[0]
        assert caught.value.task == "doze"
        assert "in doze" in notes(caught.value)
        with pytest.raises(WorkerTimeout, match="echo was not answered"):
            await calls[1]
        await handle.kill("again")
    async with handle:
        assert await handle.call("echo", 1) == [1]


@pytest.mark.asyncio
@pytest.mark.parametrize(("reason", "kind"), [("it is late", WorkerTimeout), ("", WorkerError)])
async def test_a_worker_that_cannot_react_is_killed_as_well(worker: Make, reason: str, kind: type[Exception]) -> None:
    """One is stopped; the other's call returns early, as the signal for the stacks cuts its sleep in C short."""
    async with worker("a") as stopped, worker("b") as holding:
        calls = [await begun(stopped, "nap", 60.0), await begun(holding, "hold_interpreter", 60)]
        tell(stopped, signal.SIGSTOP)
        await asyncio.gather(stopped.kill(reason), holding.kill(reason))
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [kind, kind]


@pytest.mark.asyncio
async def test_an_interpreter_that_cannot_be_run_leaves_nothing(worker: Make, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_bytes(b"\0")
    python.chmod(0o700)
    with pytest.raises(WorkerError, match="cannot be started"):
        await worker(python=python).start()


# ---- groups ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def ranks(tmp_path: Path, **options: Any) -> AsyncIterator[GroupWorker]:
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    async with process_group("g", "targets:Rank", 2, log_dir=tmp_path, env=env, **options) as group:
        yield group


def logs(tmp_path: Path) -> Iterator[str]:
    return (path.read_text() for path in sorted(tmp_path.glob("g.*.log")))


@pytest.mark.asyncio
async def test_a_rank_that_is_stopped_takes_the_others_with_it(tmp_path: Path) -> None:
    async with ranks(tmp_path, heartbeat_timeout_s=SILENT_S) as group:
        call = await begun(group, "on", 1, "nap", 60.0)  # the other has answered, and waits for nobody
        tell(group.ranks[1], signal.SIGSTOP)
        with pytest.raises(WorkerTimeout, match=r"^rank 1 of 'g', command 1, on: worker 'g\.1' hung") as caught:
            await call
        assert caught.value.worker == "g"
        assert group.lost
        assert all(getattr(rank, "pid", 0) is None for rank in group.ranks)
        with pytest.raises(WorkerDied, match="hung"):
            await group.call("note", 1)


@pytest.mark.asyncio
async def test_a_rank_that_is_stopped_while_idle_is_found_out(tmp_path: Path) -> None:
    async with ranks(tmp_path, heartbeat_timeout_s=SILENT_S) as group:
        assert not group.lost
        tell(group.ranks[0], signal.SIGSTOP)
        await until(lambda: group.lost)
        with pytest.raises(WorkerTimeout, match=r"rank 0 of 'g'.*hung"):
            await group.call("note", 1)


@pytest.mark.asyncio
async def test_ranks_that_are_given_up_say_where_each_was(tmp_path: Path) -> None:
    async with ranks(tmp_path) as group:
        calls = [await dozing(group, tmp_path / "doze", 60.0, num_ranks=2), await begun(group, "note", 1)]
        await group.kill("no answer in 0.2 s")
        with pytest.raises(WorkerTimeout, match=r"'g' was given up: no answer in 0\.2 s; it was") as caught:
            await calls[0]
        assert "in doze" in notes(caught.value)
        with pytest.raises(WorkerTimeout, match="note was not answered"):
            await calls[1]
    assert all("in doze" in log for log in logs(tmp_path))


@pytest.mark.asyncio
async def test_the_stacks_of_a_rank_that_lags_are_in_its_log(tmp_path: Path) -> None:
    async with ranks(tmp_path, rank_timeout_s=0.3) as group:
        with pytest.raises(WorkerTimeout, match=r"rank 1 \(g\.1\) did not answer in time"):
            await group.call("on", 1, "nap", 60.0)
    assert "in nap" in list(logs(tmp_path))[1]
