"""Workers of several ranks, in real processes: in step, out of step, and gone as one. And interpreters of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
import venv
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import digen
from digen import (
    ConfigError,
    Generator,
    MicroBatch,
    NumericsError,
    Pool,
    ProcessWorker,
    ProtocolError,
    WorkerDied,
    WorkerError,
    WorkerRaised,
    WorkerTimeout,
)
from digen.errors import RankFailed
from digen.workers import group as group_module
from digen.workers.group import GroupWorker, process_group

Make = Callable[..., GroupWorker]
pytestmark = pytest.mark.usefixtures("nothing_left", "no_directory_left")
HERE = str(Path(__file__).parent)


@pytest.fixture
def no_directory_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    directory = tmp_path_factory.mktemp("rendezvous")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert entries(directory) == []


@pytest.fixture
def group(tmp_path: Path) -> Make:
    """Make a worker of two ranks, named ``g``, whose target is in ``targets.py``."""

    def make(target: str = "Rank", num_ranks: int = 2, **options: Any) -> GroupWorker:
        options = {"log_dir": tmp_path, "env": {"PYTHONPATH": HERE}, **options}
        return process_group("g", f"targets:{target}", num_ranks, **options)

    return make


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_GRACE_S", 0.5)


def pids(worker: GroupWorker) -> list[int]:
    return [rank.pid for rank in worker.ranks if isinstance(rank, ProcessWorker) and rank.pid is not None]


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def target(link: Path) -> str:
    return str(link.readlink())


async def begun(worker: GroupWorker, method: str, *args: Any) -> asyncio.Future[Any]:
    """A call that was sent to the ranks."""
    call = asyncio.ensure_future(worker.call(method, *args))
    for _ in range(3):  # the call, then one task for each rank
        await asyncio.sleep(0)
    return call


@pytest.mark.asyncio
async def test_every_rank_gets_the_same_commands_in_the_same_order_and_rank_0_answers(group: Make) -> None:
    async with group(num_ranks=3) as worker:
        assert [rank.name for rank in worker.ranks] == ["g.0", "g.1", "g.2"]
        calls = [asyncio.ensure_future(worker.call("note", value)) for value in range(50)]
        assert await asyncio.gather(*calls) == [0] * 50
        for rank in worker.ranks:
            assert await rank.call("notes") == list(range(50))
        assert worker.num_bytes == sum(rank.num_bytes for rank in worker.ranks) > 0


@pytest.mark.asyncio
async def test_every_rank_is_told_which_it_is_and_where_it_meets_the_others(
    group: Make, no_directory_left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file without a name, so that nothing is left of it where this process is killed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    async with group(gpus=[2, 0], rank_timeout_s=7.0) as worker:
        specs = [await rank.call("ranks") for rank in worker.ranks]
        assert [spec.pop("rank") for spec in specs] == [0, 1]
        assert specs[0] == specs[1]
        path = Path(specs[0]["rendezvous"].removeprefix("file://"))
        assert specs[0] == {"num_ranks": 2, "rendezvous": f"file://{path}", "timeout_s": 7.0}
        assert path.parent == Path(f"/proc/{os.getpid()}/fd")
        assert target(path).startswith("/memfd:digen-meeting")
        assert entries(no_directory_left) == []
        envs = [await rank.call("environ") for rank in worker.ranks]
        assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["6", "4"]
        assert {env["GLOO_SOCKET_IFNAME"] for env in envs} == {"lo"}


def test_what_cannot_be_a_group_is_refused_before_it_starts(group: Make) -> None:
    with pytest.raises(ConfigError, match=r"worker 'g': 2 ranks need as many GPUs, one each, not \(0,\)"):
        group(gpus=[0])
    with pytest.raises(ConfigError, match="1 ranks are no group"):
        group(num_ranks=1)
    for ranks in ([], [ProcessWorker("r", "a:b"), ProcessWorker("r", "a:b")]):
        with pytest.raises(ConfigError, match="its ranks are"):
            GroupWorker("g", ranks)


@pytest.mark.asyncio
async def test_it_is_a_worker_like_any_other(group: Make, micro_batch: MicroBatch) -> None:
    """It is started, called, and ended by a pool; its version follows its calls, also those that are cancelled."""
    worker = group()
    with pytest.raises(WorkerError, match="worker 'g' is not started"):
        await worker.call("note", 1)
    async with Pool([worker]) as pool:
        assert not isinstance(worker, Generator)
        assert (await pool.commit(3, [5])).version == worker.version == 1
        assert await worker.restore("7") == worker.version == 7
        (await begun(worker, "commit", 4, (5,))).cancel()
        assert await worker.call("note", 1) == 0
        assert worker.version == 8
        with pytest.raises(WorkerError, match="started already"):
            await worker.start()
    assert not hasattr(worker, "commit")


@pytest.mark.asyncio
async def test_a_cancelled_call_is_carried_out_and_its_answer_dropped(group: Make, tmp_path: Path) -> None:
    async with group() as worker:
        for attempt in range(3):
            go = tmp_path / f"go{attempt}"
            call = await begun(worker, "wait_for", str(go))
            call.cancel()
            late = await begun(worker, "note", attempt)
            go.touch()
            assert await late == 0
            with pytest.raises(asyncio.CancelledError):
                await call
            assert worker.num_dropped_replies == attempt + 1
        for rank in worker.ranks:
            assert await rank.call("notes") == [0, 1, 2]
            assert await rank.call("mappings") == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("commit", (3, (5,)), r"command 2, commit step 3: its ranks disagree: rank 0 \(g.0\) has {.*'num_terms': 1}; "),
        ("restore", ("4",), r"command 2, restore: .*rank 0 \(g.0\) has {'version': 4}; rank 1 \(g.1\) has .* 5}"),
    ],
)
async def test_ranks_that_disagree_are_killed(group: Make, method: str, args: tuple[Any, ...], message: str) -> None:
    async with group(kwargs={"drift": 1}) as worker:
        await worker.call("note", 1)
        alive = pids(worker)
        with pytest.raises(ProtocolError, match=message) as caught:
            await worker.call(method, *args)
        assert caught.value.task == ("commit step 3" if method == "commit" else method)
        assert worker.version == 0
        assert not any(map(psutil.pid_exists, alive))
        with pytest.raises(WorkerDied, match=r"its ranks were killed: .* disagree.* during note"):
            await worker.call("note", 2)


@pytest.mark.asyncio
async def test_ranks_that_disagree_at_the_start_do_not_start(group: Make) -> None:
    worker = group(kwargs={"first": 1})
    with pytest.raises(ProtocolError, match="worker 'g', start: its ranks disagree"):
        await worker.start()
    assert pids(worker) == []


@pytest.mark.asyncio
async def test_a_rank_that_lags_is_named_with_the_command_and_all_are_killed(group: Make) -> None:
    async with group(num_ranks=3, rank_timeout_s=0.8) as worker:
        alive = pids(worker)
        await worker.call("nap", 1.0)  # all of them: nobody lags
        slow = await begun(worker, "on", 1, "nap", 60.0)
        queued = await begun(worker, "note", 1)
        started = time.perf_counter()
        with pytest.raises(WorkerTimeout, match=r"'g', command 2, on: rank 1 \(g\.1\) did not .* 0\.8 s") as caught:
            await slow
        assert time.perf_counter() - started < 5
        assert (caught.value.worker, caught.value.task) == ("g", "on")
        assert not any(map(psutil.pid_exists, alive))
        with pytest.raises(WorkerDied, match=r"its ranks were killed: .*command 2.* during note"):
            await queued
        started = time.perf_counter()
        with pytest.raises(WorkerDied):
            await worker.call("note", 2)
        assert time.perf_counter() - started < 0.5


@pytest.mark.asyncio
async def test_a_rank_that_is_stopped_is_a_rank_that_lags(group: Make) -> None:
    async with group(rank_timeout_s=0.3, stop_grace_s=60.0) as worker:
        os.kill(pids(worker)[1], signal.SIGSTOP)
        started = time.perf_counter()
        with pytest.raises(WorkerTimeout, match=r"command 1, note: rank 1 \(g\.1\) did not"):
            await worker.call("note", 1)
        assert time.perf_counter() - started < 5


@pytest.mark.asyncio
async def test_a_group_with_a_stopped_rank_can_be_closed(group: Make) -> None:
    async with group(stop_grace_s=0.4) as worker:
        os.kill(pids(worker)[1], signal.SIGSTOP)


@pytest.mark.asyncio
async def test_a_rank_that_dies_in_a_call_takes_the_others_with_it(group: Make) -> None:
    async with group(num_ranks=3, stop_grace_s=60.0) as worker:
        alive = pids(worker)
        started = time.perf_counter()
        with pytest.raises(WorkerDied, match=r"rank 1 of 'g', command 1, meet: .*died \(killed by SIGKILL\)") as caught:
            await worker.call("meet", 1, "kill", int(signal.SIGKILL))
        assert time.perf_counter() - started < 5
        assert (caught.value.worker, caught.value.task, caught.value.signal) == ("g", "meet", signal.SIGKILL)
        assert "g.1.1.log" in str(caught.value)
        assert caught.value.__notes__[-1] == "rank 0 (g.0), rank 2 (g.2) had not answered; all ranks of 'g' were killed"
        assert not any(map(psutil.pid_exists, alive))


@pytest.mark.asyncio
async def test_a_rank_that_dies_while_idle_is_noticed(group: Make) -> None:
    async with group() as worker:
        alive = pids(worker)
        os.kill(alive[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"rank 1 of 'g', command 1, nap: .*SIGKILL"):
            await worker.call("nap", 60.0)
        assert not any(map(psutil.pid_exists, alive))


@pytest.mark.asyncio
@pytest.mark.usefixtures("short_grace")
async def test_a_rank_that_raises_while_the_others_wait_for_it_ends_all(group: Make) -> None:
    async with group() as worker:
        alive = pids(worker)
        started = time.perf_counter()
        with pytest.raises(NumericsError, match=r"rank 1 of 'g', command 1, meet: .*loss is nan") as caught:
            await worker.call("meet", 1, "fail", "numerics")
        assert time.perf_counter() - started < 5
        assert "targets.py" in caught.value.__notes__[0]
        assert caught.value.__notes__[-1] == "rank 0 (g.0) had not answered; all ranks of 'g' were killed"
        assert not any(map(psutil.pid_exists, alive))
        with pytest.raises(WorkerDied, match=r"killed: rank 1 of 'g', command 1, meet: .*loss is nan"):
            await worker.call("note", 2)


@pytest.mark.asyncio
async def test_an_error_of_a_call_leaves_the_group_alive_if_every_rank_has_answered(group: Make) -> None:
    async with group() as worker:
        with pytest.raises(NumericsError, match=r"rank 1 of 'g', command 1, together: .*loss is nan"):
            await worker.call("together", 1, "fail", "numerics")  # the other failed with it, and was first
        with pytest.raises(NumericsError, match="rank 1 of 'g', command 2"):
            await worker.call("on", 1, "fail", "numerics")
        with pytest.raises(WorkerRaised, match=r"of 'g', command 3, fail: .*ValueError: all") as caught:
            await worker.call("fail", "all")
        assert caught.value.worker == "g"
        with pytest.raises(RankFailed, match="had to give up"):
            await worker.call("together", 1, "echo")
        with pytest.raises(WorkerError, match="cannot send echo"):
            await worker.call("echo", object())
        assert await worker.call("note", "alive") == 0
        assert [await rank.call("notes") for rank in worker.ranks] == [["alive"]] * 2


@pytest.mark.asyncio
@pytest.mark.usefixtures("short_grace")
async def test_a_rank_is_not_late_for_a_command_while_it_may_work_on_the_one_before(group: Make) -> None:
    async with group() as worker:
        slow = await begun(worker, "on", 0, "nap", 1.0)
        with pytest.raises(NumericsError, match="rank 1 of 'g', command 2"):
            await worker.call("on", 1, "fail", "numerics")
        assert await slow == "well"
        assert await worker.call("note", 1) == 0


@pytest.mark.asyncio
@pytest.mark.usefixtures("short_grace")
async def test_a_rank_that_gave_up_does_not_hide_the_one_that_it_waited_for(group: Make) -> None:
    async with group() as worker:
        with pytest.raises(WorkerTimeout, match=r"command 1, meet: rank 0 \(g\.0\) did not answer") as caught:
            await worker.call("meet", 1, "together", 0, "echo")
        assert "rank 1 had to give up" in caught.value.__notes__[-1]


@pytest.mark.asyncio
async def test_a_rank_that_cannot_be_built_ends_the_start_of_all(group: Make, tmp_path: Path) -> None:
    worker = group(kwargs={"birth": ["meet", 1, "fail", "numerics"]})
    for _ in range(2):
        started = time.perf_counter()
        with pytest.raises(NumericsError, match=r"rank 1 of 'g', start: worker 'g.1', .*loss is nan") as caught:
            await worker.start()
        assert time.perf_counter() - started < 5
        assert "rank 0 (g.0) had not answered" in caught.value.__notes__[-1]
        assert pids(worker) == []
    with pytest.raises(NumericsError, match="rank 1 of 'g', start"):  # the other failed with it, and was first
        await group(kwargs={"birth": ["together", 1, "fail", "numerics"]}).start()
    with pytest.raises(WorkerRaised, match=r"rank \d of 'g', start: .*ModuleNotFoundError"):
        await process_group("g", "no_such_module:x", 2, log_dir=tmp_path).start()  # the log of a killed one would stay


@pytest.mark.asyncio
@pytest.mark.usefixtures("short_grace")
async def test_a_rank_that_does_not_come_to_the_start_is_named(group: Make) -> None:
    worker = group(kwargs={"birth": ["meet", 1, "together", 0, "echo"]})
    with pytest.raises(WorkerTimeout, match=r"worker 'g', start: rank 0 \(g\.0\) did not answer in time"):
        await worker.start()
    assert pids(worker) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["cancel", "aclose", "kill"])
async def test_a_start_that_is_broken_off_leaves_nothing(group: Make, end: str) -> None:
    for turns in (1, 2, 5, 50):
        worker = group("sleepy_rank", stop_grace_s=0.0)
        starting = asyncio.ensure_future(worker.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        if end == "cancel":
            starting.cancel()
        else:
            await getattr(worker, end)()
        with pytest.raises(asyncio.CancelledError if end == "cancel" else WorkerError):
            await asyncio.wait_for(starting, 10)
        assert pids(worker) == []
        await worker.aclose()


@pytest.mark.asyncio
async def test_a_group_can_be_started_again_whatever_became_of_it(group: Make, tmp_path: Path) -> None:
    worker = group()
    for attempt in range(1, 4):
        async with worker:
            assert await worker.call("note", attempt) == 0
            assert await worker.call("notes") == [attempt]
            if attempt == 2:
                with pytest.raises(WorkerDied, match="command 3"):
                    await worker.call("on", 1, "exit", 3)
        await worker.aclose()
        with pytest.raises(WorkerError, match="not started"):
            await worker.call("note", 1)
    assert {path.name for path in entries(tmp_path)} == {f"g.{r}.{n}.log" for r in (0, 1) for n in (1, 2, 3)}


@pytest.mark.asyncio
async def test_closing_ends_busy_ranks_and_is_not_cut_short(group: Make) -> None:
    worker = group(stop_grace_s=0.4)
    await worker.start()
    alive = pids(worker)
    calls = [await begun(worker, "nap", 60.0), await begun(worker, "note", 1)]
    closing = asyncio.ensure_future(worker.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert asyncio.all_tasks() <= {asyncio.current_task(), *calls}
    assert not any(map(psutil.pid_exists, alive))
    for call in calls:
        with pytest.raises(WorkerError, match="worker 'g' was closed"):
            await call
    await worker.aclose()
    await worker.kill()


@pytest.mark.asyncio
async def test_two_hundred_payloads_reuse_their_memory(group: Make, tmp_path: Path) -> None:
    """On every rank that writes, on every rank that reads, and in the driver, whether released or just let go."""
    env = {"PYTHONPATH": HERE}
    async with group() as writer, process_group("r", "targets:Rank", 2, log_dir=tmp_path, env=env) as reader:
        num_fds = 0
        for index in range(200):
            payload = await writer.call("make", 100_000)
            assert payload.ref.store.startswith("g.0#")
            assert await reader.call("glance", payload) == 1
            reader.release(payload)  # another's: ignored
            if index % 2:
                writer.release(payload)
                assert (await writer.call("make", 100_000)).ref.segment == payload.ref.segment
            del payload
            if index == 20:
                num_fds = len(entries(Path("/proc/self/fd")))
        assert len(entries(Path("/proc/self/fd"))) == num_fds
        for rank in (*writer.ranks, *reader.ranks):
            assert await rank.call("mappings") <= 2


@pytest.mark.asyncio
async def test_what_the_ranks_need_for_meeting_is_there_before_and_after_them() -> None:
    """Ranks may be handles of any kind, and their rendezvous anything that is entered and left."""
    said: list[str] = []

    class Fake(digen.InProcessWorker):
        async def start(self) -> None:
            said.append(f"start {self.name}")
            await super().start()

        async def aclose(self) -> None:
            said.append(f"end {self.name}")
            await super().aclose()

    @asynccontextmanager
    async def rendezvous() -> AsyncIterator[None]:
        said.append("open")
        await asyncio.sleep(0.01)
        yield
        said.append("close")

    class Target:
        def double(self, value: int) -> int:
            return 2 * value

    worker = GroupWorker("g", [Fake(name, Target, thread=False) for name in "ab"], rendezvous=rendezvous)
    async with worker:
        assert await worker.call("double", 4) == 8
    assert said == ["open", "start a", "start b", "end a", "end b", "close"]
    starting = asyncio.ensure_future(worker.start())
    await asyncio.sleep(0)
    await worker.aclose()  # the ranks have not begun to start
    with pytest.raises(WorkerError, match="worker 'g' was closed, start"):
        await starting
    assert not any(rank.started for rank in worker.ranks)
    assert said[-1] == "close"


@pytest.mark.asyncio
async def test_ranks_meet_in_torch_distributed_on_loopback_and_die_in_a_collective(group: Make) -> None:
    async with group("Collective", rank_timeout_s=20.0) as worker:
        assert await worker.call("total", 2.0) == 2.0 + 4.0
        listening = [c for pid in pids(worker) for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"]
        assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
        alive = pids(worker)
        with pytest.raises(WorkerDied, match=r"rank 1 of 'g', command 2, total: .*SIGKILL"):
            await worker.call("total", 2.0, 1)
        assert not any(map(psutil.pid_exists, alive))


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[[str], Path]:
    """Make the interpreter of a virtual environment that has msgspec and a digen: this one, another one, or none."""

    def make(release: str = "this") -> Path:
        root = tmp_path / f"venv-{release}"
        venv.create(root, with_pip=False, symlinks=True)
        (site,) = root.glob("lib/python*/site-packages")
        for package in (msgspec, *([digen] if release != "none" else [])):
            assert package.__file__ is not None
            (site / package.__name__).symlink_to(Path(package.__file__).parent)
        if release == "another":
            (site / "sitecustomize.py").write_text("import digen\ndigen.__version__ = '0.0.9'\n")
        return root / "bin" / "python"

    return make


@pytest.mark.asyncio
async def test_a_worker_may_have_an_interpreter_of_its_own(
    worker: Callable[..., ProcessWorker], interpreter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    python = interpreter()
    async with worker("w", "Rank", kwargs={"ranks": {"rank": 0}}, python=str(python)) as handle:
        assert await handle.call("echo", 1) == [1]
        assert (await handle.call("environ"))["PYTHONPATH"] == HERE
        prefix, paths = await handle.call("interpreter")
        assert prefix == str(python.parents[1])
        assert not {path for path in sys.path if path.endswith("site-packages")} & set(paths)
    async with worker() as handle:
        assert (await handle.call("interpreter"))[0] == sys.prefix


@pytest.mark.asyncio
async def test_an_interpreter_that_cannot_serve_is_refused_with_the_mend(
    worker: Callable[..., ProcessWorker], interpreter: Callable[..., Path], group: Make, tmp_path: Path
) -> None:
    plain = tmp_path / "python"
    with pytest.raises(ConfigError, match=r"worker 'w': its interpreter /.*python is missing; python must be"):
        worker(python=plain)
    plain.write_text("no program")
    with pytest.raises(ConfigError, match="is not executable"):
        worker(python=plain)
    with pytest.raises(ConfigError, match=r"worker 'g\.0': its interpreter"):
        group(python=plain)
    plain.chmod(0o755)
    with pytest.raises(WorkerError, match=r"worker 'w': .*python cannot be started: .*Exec format error"):
        await worker(python=plain).start()
    other = interpreter("another")
    with pytest.raises(ConfigError, match=rf"{other} has digen 0\.0\.9, this process has digen {digen.__version__};"):
        await worker(python=other).start()
    with pytest.raises(WorkerDied, match="exit code 1") as caught:
        await worker(python=interpreter("none")).start()
    assert "No module named 'digen'" in caught.value.log_tail
    assert caught.value.__notes__[-1].startswith("is digen installed there? ")
