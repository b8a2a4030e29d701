"""Workers in real processes: calls, errors, deaths and broken protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from digen import (
    ConfigError,
    Generator,
    MicroBatch,
    NumericsError,
    Payload,
    ProcessWorker,
    ProtocolError,
    RewardError,
    Scorer,
    Trainer,
    WorkerDied,
    WorkerError,
    WorkerRaised,
    WorkerTimeout,
)
from digen.workers.wire import frame

Make = Callable[..., ProcessWorker]
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.asyncio
async def test_a_step_through_two_workers(worker: Make, micro_batch: MicroBatch) -> None:
    async with worker("gen0", "Engine", kwargs={"version": 2}) as gen, worker("trainer", "Engine") as trainer:
        generator: Generator = gen  # for the type checker, too
        scorer: Scorer = gen
        learner: Trainer = trainer
        assert isinstance(generator, Generator)
        assert isinstance(scorer, Scorer)
        assert isinstance(learner, Trainer)
        assert (gen.version, trainer.version) == (2, 0)
        rollout = await gen.generate(micro_batch)
        assert rollout.micro_batch == micro_batch
        expected = float(sum(range(5, 21)))
        assert (await gen.score(rollout)).rewards == (expected, expected)  # its own memory
        report = await trainer.update(rollout, [2.0, None])  # another's
        assert report.metrics == {"loss": 2 * expected}
        gen.release(rollout.payload)
        assert (await trainer.commit(3, [5])).version == trainer.version == 1
        publication = await trainer.publish(1)
        assert (await gen.load(publication)).version == gen.version == 1
        assert await gen.restore("9") == gen.version == 9


@pytest.mark.asyncio
async def test_methods_are_those_of_the_target(worker: Make) -> None:
    handle = worker()
    with pytest.raises(AttributeError, match="none before it is started"):
        _ = handle.generate
    async with handle:
        assert not hasattr(handle, "generate")
        assert not isinstance(handle, Generator)
        assert "echo" in handle.methods
        with pytest.raises(WorkerError, match="started already"):
            await handle.start()
        with pytest.raises(WorkerRaised, match="AttributeError"):
            await handle.call("nothing")
    with pytest.raises(WorkerError, match="not started"):
        await handle.call("echo")


@pytest.mark.asyncio
async def test_a_closed_worker_can_be_started_again(worker: Make) -> None:
    handle = worker("w", "Engine")
    for attempt in (1, 2):
        async with handle:
            assert handle.log_path is not None
            assert handle.log_path.name == f"w.{attempt}.log"
            assert (await handle.publish(1)).version == 1
        await handle.aclose()
        assert not hasattr(handle, "publish")


@pytest.mark.asyncio
async def test_a_finished_object_can_be_a_target(worker: Make) -> None:
    async with worker("w", "ready_made") as handle:
        assert await handle.call("echo", 1, "x", None) == [1, "x", None]
    with pytest.raises(ConfigError, match="takes no kwargs"):
        await worker("w", "ready_made", kwargs={"a": 1}).start()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("targets:broken_constructor", WorkerRaised, "worker 'w', start: RuntimeError: no model here"),
        ("no_such_module:x", WorkerRaised, "ModuleNotFoundError"),
        ("targets:missing", ConfigError, "has no attribute 'missing'"),
        ("targets:dying", WorkerDied, "exit code 7.*during start"),
    ],
)
async def test_a_target_that_cannot_be_built_says_why(
    worker: Make, target: str, error: type[Exception], message: str
) -> None:
    handle = worker("w", target.partition(":")[2], kwargs={})
    handle.target = target
    with pytest.raises(error, match=message) as caught:
        await handle.start()
    if error is not WorkerDied:
        assert "Traceback" in caught.value.__notes__[0]
    assert handle.pid is None


@pytest.mark.asyncio
async def test_a_target_that_takes_too_long_is_ended(worker: Make) -> None:
    with pytest.raises(WorkerTimeout, match=r"not READY within 0\.3 s"):
        await worker("w", "sleepy", start_timeout_s=0.3).start()


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_leaves_nothing(worker: Make) -> None:
    handle = worker("w", "sleepy")
    starting = asyncio.ensure_future(handle.start())
    await asyncio.sleep(0)
    assert handle.pid is not None
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert handle.pid is None


def test_what_cannot_be_a_worker_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "../x", "a b", "-x", "x" * 65):
        with pytest.raises(ConfigError, match="worker name"):
            ProcessWorker(name, "a:b")
    for target in ("module", "module:", ":x", "module:x()", "a/b:c"):
        with pytest.raises(ConfigError, match="target"):
            ProcessWorker("w", target)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match=r"gpus \(2,\)"):
        ProcessWorker("w", "a:b", gpus=(2,))


@pytest.mark.asyncio
async def test_the_environment_holds_no_secrets(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("HARMLESS", "1")
    async with worker("w", gpus=(1,), threads=3, env={"HF_TOKEN": "listed"}) as handle:
        env = await handle.call("environ")
    assert {name: env.get(name) for name in secrets} == dict.fromkeys(secrets) | {"HF_TOKEN": "listed"}
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"], env["HARMLESS"]) == ("5", "3", "1")
    async with worker() as handle:
        assert (await handle.call("environ"))["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.asyncio
async def test_a_bare_child_is_light(worker: Make) -> None:
    async with worker() as handle:
        modules = set(await handle.call("modules"))
    assert not modules & {"torch", "numpy", "pydantic", "asyncio", "anyio", "ray", "digen.workers.process"}


@pytest.mark.asyncio
async def test_output_goes_to_the_log_and_not_into_the_protocol(worker: Make) -> None:
    async with worker() as handle:
        assert await handle.call("say", "hello\n" * 1000) == "hello\n" * 1000
        assert handle.log_path is not None
        text = handle.log_path.read_text()
        assert text.count("hello") == 3000
        assert handle.log_path.stat().st_mode & 0o077 == 0


@pytest.mark.asyncio
async def test_errors_cross_with_class_worker_and_traceback(worker: Make, micro_batch: MicroBatch) -> None:
    async with worker() as handle:
        with pytest.raises(RewardError, match="worker 'w', fail: the judge said nothing") as caught:
            await handle.call("fail", "reward")
        assert "targets.py" in caught.value.__notes__[0]
        with pytest.raises(NumericsError):
            await handle.call("fail", "numerics")
        with pytest.raises(WorkerRaised, match="RuntimeError: outer") as raised:
            await handle.call("fail", "chained")
        assert (raised.value.worker, raised.value.task) == ("w", "fail")
        assert "KeyError: 'inner'" in raised.value.__notes__[0]
        with pytest.raises(WorkerRaised) as rude:
            await handle.call("fail", "rude")
        assert str(rude.value) == r"worker 'w', fail: ValueError: \x1b[2J\ud800\u202e"
        with pytest.raises(WorkerRaised, match="object cannot cross"):
            await handle.call("unencodable")
        with pytest.raises(WorkerError, match="surrogates not allowed"):
            await handle.call("echo", "\ud800")
        with pytest.raises(ProtocolError, match=r"the limit is 16777216; arrays belong in a digen\.Payload"):
            await handle.call("huge")
        with pytest.raises(WorkerError, match="arrays belong in"):
            await handle.call("echo", bytes(20 << 20))
        assert await handle.call("echo", bytes(15 << 20)) == [bytes(15 << 20)]  # many partial writes
    async with worker("w", "wrong_type") as handle:
        with pytest.raises(
            ProtocolError, match="generate step 3 micro-batch 5: the result is not what generate returns"
        ):
            await handle.generate(micro_batch)
        with pytest.raises(WorkerRaised, match="TypeError: generate does not take these arguments"):
            await handle.call("generate")


@pytest.mark.asyncio
@pytest.mark.parametrize(("method", "argument", "expected"), [("kill", signal.SIGKILL, "SIGKILL"), ("exit", 3, "3")])
async def test_a_death_fails_every_call_at_once_and_says_how(
    worker: Make, method: str, argument: int, expected: str
) -> None:
    async with worker() as handle:
        calls = [asyncio.ensure_future(handle.call(method, int(argument)))]
        calls += [asyncio.ensure_future(handle.call("echo", index)) for index in range(5)]
        started = time.perf_counter()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert time.perf_counter() - started < 1
        assert all(isinstance(error, WorkerDied) for error in errors)
        first = errors[0]
        assert isinstance(first, WorkerDied)
        assert expected in str(first)
        assert (first.signal, first.exit_code) == ((9, None) if method == "kill" else (None, 3))
        assert (first.worker, first.task) == ("w", method)
        assert str(handle.log_path) in str(first)
        if method == "exit":
            assert first.log_tail == "going \\x1b[31mdown\\x07"
        with pytest.raises(WorkerDied, match="during echo"):
            await handle.call("echo")


@pytest.mark.asyncio
async def test_who_runs_out_of_memory_says_how_much_it_had_and_lives(worker: Make) -> None:
    said = r"exhaust: MemoryError: out of memory: this process had up to \d\.\d+ GiB"
    async with worker() as handle:
        for _ in range(2):
            with pytest.raises(WorkerRaised, match=said):
                await handle.call("exhaust", 64)
        assert await handle.call("echo", 1) == [1]


@pytest.mark.asyncio
async def test_who_is_killed_for_its_memory_is_told_from_who_raises(worker: Make) -> None:
    async with worker() as handle:
        with pytest.raises(WorkerDied, match=r"SIGKILL.*it had up to \d\.\d\d GiB of memory.*see dmesg") as caught:
            await handle.call("be_killed_with", 200)
    assert 200 << 20 <= caught.value.peak_bytes < 4 << 30


@pytest.mark.asyncio
async def test_a_death_while_idle_is_noticed(worker: Make) -> None:
    async with worker() as handle:
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await handle.call("nap", 60.0)


@pytest.mark.asyncio
async def test_an_interrupt_is_the_drivers_business(worker: Make) -> None:
    async with worker() as handle:
        await handle.call("kill", int(signal.SIGINT))
        assert await handle.call("echo", 1) == [1]


@pytest.mark.asyncio
async def test_a_grandchild_that_holds_the_socket_does_not_hide_a_death(
    worker: Make, tmp_path: Path, gone: Callable[[int], bool]
) -> None:
    note = tmp_path / "grandchild"
    async with worker(env={"GRANDCHILD": str(note)}) as handle:
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await handle.call("leave_grandchild")
        assert gone(int(note.read_text()))


@pytest.mark.asyncio
async def test_a_process_is_watched_without_pidfd_too(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    async with worker() as handle:
        with pytest.raises(WorkerDied, match="exit code 3"):
            await handle.call("exit", 3)
    async with worker() as handle:
        assert await handle.call("echo", 1) == [1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff" * 100, "the limit is"),
        ((1 << 32) - 1, "the limit is"),
        (b"\x03\x00\x00\x00\x00abc", "cannot be decoded"),
        (b"\x00\x00\x00\x00\x00", "cannot be decoded"),
        (b"\x01\x00\x00\x00\x05\xc0", "announced 5 descriptors"),
        (b"\x05\x00\x00\x00\x00\x94\x7f\xc3\xc0\x90", "answers request 127, which was not made"),
    ],
)
async def test_garbage_ends_the_worker_and_nothing_else(worker: Make, data: bytes | int, message: str) -> None:
    raw = data if isinstance(data, bytes) else data.to_bytes(4, "little") + b"\x00"
    async with worker() as handle:
        assert handle.pid is not None
        memory = psutil.Process().memory_info().rss
        with pytest.raises(ProtocolError, match=message):
            await handle.call("write_raw", raw)
        with pytest.raises(ProtocolError, match="was killed"):
            await handle.call("echo")
        assert psutil.Process().memory_info().rss - memory < 32 << 20


@pytest.mark.asyncio
async def test_a_second_answer_to_a_call_ends_the_worker(worker: Make) -> None:
    answer = frame(msgspec.msgpack.encode([2, True, "first", []]))  # the start was request 1
    async with worker() as handle:
        assert await handle.call("write_raw", 2 * answer) == "first"
        with pytest.raises(ProtocolError, match="request 2, which was not made or was answered before"):
            await handle.call("echo")
        assert handle.lost


@pytest.mark.asyncio
async def test_a_frame_that_a_death_cuts_off_is_no_answer(worker: Make) -> None:
    async with worker() as handle:
        before = handle.num_bytes
        call = asyncio.ensure_future(handle.call("write_raw", frame(bytes(1000))[:500]))
        async with asyncio.timeout(10):
            while handle.num_bytes < before + 1000:  # noqa: ASYNC110 - 500 bytes there, 500 back
                await asyncio.sleep(0.001)
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"SIGKILL.* during write_raw"):
            await call


@pytest.mark.parametrize(
    "data", [b"\xff" * 100, b"\xff\xff\xff\xff\x00", b"\x03\x00\x00\x00\x00abc", b"\x01\x00\x00\x00\x09\xc0", b""]
)
def test_a_child_that_is_sent_garbage_ends(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "digen.workers.child", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        _, text = child.communicate(timeout=10)
    assert (child.returncode, b"ProtocolError" in text) == ((1, True) if data else (0, False))


@pytest.mark.asyncio
async def test_a_closed_socket_is_no_death_but_ends_the_worker(worker: Make) -> None:
    async with worker() as handle:
        with pytest.raises(ProtocolError, match="closed its socket, but went on"):
            await handle.call("close_socket")


@pytest.mark.asyncio
async def test_a_late_reply_to_a_cancelled_call_is_dropped_and_its_memory_reused(worker: Make, tmp_path: Path) -> None:
    async with worker() as handle:
        for attempt in range(3):
            go = tmp_path / f"go{attempt}"
            call = asyncio.ensure_future(handle.call("wait_for", str(go)))
            await asyncio.sleep(0)
            call.cancel()
            go.touch()
            assert await handle.call("echo", attempt) == [attempt]
            assert handle.num_dropped_replies == attempt + 1
        assert await handle.call("mappings") == 1
        assert handle.version == 0


@pytest.mark.asyncio
async def test_a_cancelled_load_still_moves_the_version(worker: Make) -> None:
    async with worker("w", "Engine") as handle:
        call = asyncio.ensure_future(handle.commit(0, []))
        await asyncio.sleep(0)
        call.cancel()
        await handle.call("publish", 1)
        assert handle.version == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("release", [True, False])
async def test_two_hundred_rollouts_reuse_their_memory(worker: Make, micro_batch: MicroBatch, release: bool) -> None:
    """One segment serves them all, whether a payload is released or just let go."""
    async with worker("gen0", "Engine", kwargs={"num_floats": 50_000}) as gen, worker("t", "Misc") as reader:
        for index in range(200):
            rollout = await gen.generate(micro_batch)
            seen = await reader.call("read" if index % 50 == 0 else "glance", rollout.payload)
            if index % 50 == 0:
                assert memoryview(seen["latents"][2]).cast("f").tolist() == [float(5 + i) for i in range(50_000)]
            if release:
                gen.release(rollout.payload)
                gen.release(rollout.payload)  # harmless
                reader.release(rollout.payload)  # another's: ignored
            del rollout
        assert await reader.call("mappings") == 1


@pytest.mark.asyncio
async def test_zero_sizes_and_odd_shapes_pass_through_two_workers(worker: Make) -> None:
    async with worker("a") as one, worker("b") as two:
        for size in (0, 1, 63, 64, 65, 4097):
            payload = await one.call("make", size)
            assert await two.call("read", payload) == {"a": ["B", [size], bytes(size)]}
        many = await one.call("make_many", 100)
        assert [(await two.call("read", payload))["a"][2] for payload in many] == [bytes([i]) for i in range(100)]
        assert await two.call("mappings") <= 101  # of 100 held at the same time, and one before


@pytest.mark.asyncio
async def test_what_a_dead_worker_wrote_stays_readable_until_it_is_let_go(worker: Make) -> None:
    async with worker("b") as reader:
        writer = worker("a")
        await writer.start()
        first, second = await writer.call("make", 10), await writer.call("make", 20)
        await reader.call("read", first)
        with pytest.raises(WorkerDied):
            await writer.call("kill", int(signal.SIGKILL))
        assert (await reader.call("read", second))["a"][2] == bytes(20)
        await writer.aclose()
        assert (await reader.call("read", first))["a"][2] == bytes(10)
        assert await reader.call("mappings") == 2
        writer.release(first)
        del first, second
        assert await reader.call("mappings") == 0


@pytest.mark.asyncio
async def test_memory_is_not_rewritten_while_a_call_reads_it(worker: Make, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with worker("a") as writer, worker("b") as reader:
        payload = await writer.call("make", 100)
        blocked = asyncio.ensure_future(reader.call("wait_for", str(go)))
        reading = asyncio.ensure_future(reader.call("read", payload))
        await asyncio.sleep(0)
        writer.release(payload)
        reading.cancel()
        assert (await writer.call("make", 100)).ref.segment != payload.ref.segment
        go.touch()
        await blocked
        await reader.call("echo")
        assert {(await writer.call("make", 100)).ref.segment for _ in range(2)} == {1, 2}
        with pytest.raises(WorkerError, match="was released"):
            await reader.call("read", payload)


@pytest.mark.asyncio
async def test_checksums_find_what_changed_on_the_way(worker: Make) -> None:
    async with worker("a", checksums=True) as writer, worker("b") as reader:
        payload = await writer.call("make", 1000)
        assert (await reader.call("read", payload))["a"][2] == bytes(1000)
        await writer.call("spoil", payload)
        with pytest.raises(ProtocolError, match="checksum"):
            await reader.call("read", payload)
        assert await reader.call("echo", 1) == [1]


@pytest.mark.asyncio
async def test_only_handles_cross_the_driver(worker: Make) -> None:
    async with worker("a") as writer, worker("b") as reader:
        before = writer.num_bytes + reader.num_bytes
        payload: Payload = await writer.call("make", 8 << 20)
        await reader.call("mappings")
        await reader.call("echo", payload)
        assert writer.num_bytes + reader.num_bytes - before < 4096
