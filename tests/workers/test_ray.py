"""Workers in real Ray actors, on a cluster of three nodes on this machine."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from digen import Plan, Scheduler
from digen.config import load_config
from digen.errors import (
    ConfigError,
    NumericsError,
    PayloadLost,
    ProtocolError,
    RewardError,
    WorkerDied,
    WorkerError,
    WorkerRaised,
    WorkerTimeout,
)
from digen.events import AnyEvent, Rewarded, RolloutLost, WorkerLost
from digen.runner import arun
from digen.sched import InvariantChecker
from digen.types import MicroBatch, Payload
from digen.workers import raycluster
from digen.workers.group import GroupWorker
from digen.workers.ray import RayWorker, ray_worker
from digen.workers.raycluster import RayCluster
from tests.run.harness import tensors_of

HERE = str(Path(__file__).parent)
Make = Callable[..., Any]
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),  # of Ray's own files
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Three nodes; on the two beside the head there is one of ``left`` and ``right`` each. This process has joined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("WANDB_API_KEY", "of whoever started the node")
        kind = raycluster.imported("ray.cluster_utils").Cluster
        memory = 150 << 20
        cluster = kind(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "object_store_memory": memory, "include_dashboard": False},
        )
        try:
            for side in ("left", "right"):
                cluster.add_node(wait=False, num_cpus=3, resources={side: 1}, object_store_memory=memory)
            cluster.wait_for_nodes()
            joined = RayCluster(cluster.address)
            asyncio.run(joined.connect())
            yield cluster
            asyncio.run(joined.shutdown())
        finally:
            cluster.shutdown()


@pytest.fixture
def worker(nodes: Any) -> Make:
    """Make a worker whose target is in ``targets.py``."""

    def make(name: str = "w", target: str = "Misc", side: str = "", **options: Any) -> RayWorker:
        resources = {side: 0.1} if side else {}
        options["env"] = {"PYTHONPATH": HERE, **options.get("env", {})}
        options = {"cluster": RayCluster(nodes.address), "resources": resources, "num_cpus": 0.5, **options}
        return RayWorker(name, f"targets:{target}", **options)

    return make


@pytest.fixture
def all_free(nodes: Any) -> Iterator[None]:
    """Fail the test if it leaves an actor, or anything that is reserved."""
    yield
    ray = raycluster.imported("ray")
    until = time.monotonic() + 10
    while (free := _counted(ray.available_resources())) != (has := _counted(ray.cluster_resources())):
        assert time.monotonic() < until, (free, has)
        time.sleep(0.05)


def _counted(resources: dict[str, float]) -> dict[str, float]:
    return {name: round(amount, 3) for name, amount in resources.items() if name in {"CPU", "left", "right"}}


@pytest.mark.asyncio
@pytest.mark.usefixtures("all_free")
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_snapshot_outlives_its_actors_and_goes_back_to_the_same_rank(nodes: Any, num_ranks: int) -> None:
    options: dict[str, Any] = {"cluster": RayCluster(nodes.address), "env": {"PYTHONPATH": HERE}, "cpus_per_rank": 0.5}
    async with ray_worker("trainer", "targets:Keeper", num_ranks, **options) as trainer:
        await trainer.commit(0, [])
        snapshot = await trainer.snapshot()
        assert (snapshot.version, len(snapshot.payloads), snapshot.nbytes) == (1, num_ranks, 400_000 * num_ranks)
        await trainer.kill()
        await trainer.restart()
        assert trainer.version == 0
        assert await trainer.recall(snapshot) == trainer.version == 1


@pytest.mark.asyncio
@pytest.mark.usefixtures("all_free")
async def test_a_step_through_two_workers_on_two_nodes(
    worker: Make, micro_batch: MicroBatch, gone: Callable[[int], bool]
) -> None:
    count = 1 << 20
    gen = worker("gen0", "Engine", "left", kwargs={"version": 2, "num_floats": count})
    trainer = worker("trainer", "Engine", "right", checksums=True)
    async with gen, trainer:
        assert (gen.version, trainer.version) == (2, 0)
        pids = [gen.node.pid, trainer.node.pid]
        rollout = await gen.generate(micro_batch)
        assert rollout.micro_batch == micro_batch
        assert rollout.payload.ref.nbytes == 4 * count
        with pytest.raises(TypeError, match="not in the driver"):
            rollout.payload["latents"]
        expected = (await gen.score(rollout)).rewards[0]
        report = await trainer.update(rollout, [2.0, None])  # fetched from the other node
        assert report.metrics == {"loss": 2 * expected}
        gen.release(rollout.payload)
        with pytest.raises(WorkerError, match=r"cannot send score to 'gen0': .* was released"):
            await gen.score(rollout)
        assert (await trainer.commit(3, [5])).version == trainer.version == 1
        publication = await trainer.publish(1)
        trainer.release(rollout.payload)  # not its own
        assert (await gen.load(publication)).version == gen.version == 1
        assert gen.num_bytes + trainer.num_bytes < 20_000
        with pytest.raises(AttributeError, match="no method 'encode'"):
            _ = gen.encode
        with pytest.raises(WorkerError, match="started already"):
            await gen.start()
    assert all(map(gone, pids))
    with pytest.raises(WorkerError, match="not started"):
        await gen.call("publish", 1)
    async with gen:  # again
        assert (await gen.publish(1)).version == 1


@pytest.mark.asyncio
async def test_the_driver_holds_no_arrays(worker: Make) -> None:
    async with worker("a", side="left") as one, worker("b", side="right") as other:
        await one.call("make", 1 << 10)
        before = psutil.Process().memory_info().rss
        payloads = [await one.call("make", 30 << 20) for _ in range(3)]
        assert await asyncio.gather(*(other.call("glance", payload) for payload in payloads)) == [1, 1, 1]
        assert psutil.Process().memory_info().rss - before < 15 << 20
        for payload in payloads:
            one.release(payload)
        for _ in range(8):  # more than the store holds at a time
            await other.call("glance", await one.call("make", 30 << 20))
        assert one.num_bytes + other.num_bytes < 20_000


@pytest.mark.asyncio
async def test_calls_stay_in_order_and_keep_what_they_read(worker: Make) -> None:
    async with worker() as handle:
        calls = [asyncio.ensure_future(handle.call("echo", index)) for index in range(50)]
        done: list[int] = []
        for index, call in enumerate(calls):
            call.add_done_callback(lambda _, index=index: done.append(index))
        assert [value for [value] in await asyncio.gather(*calls)] == list(range(50)) == done
        parts = await handle.call("make_many", 3)  # in one object
        assert [await handle.call("glance", part) for part in parts] == [1, 1, 1]
        assert [(await handle.call("read", part))["a"][2] for part in reversed(parts)] == [b"\2", b"\1", b"\0"]
        nap = asyncio.ensure_future(handle.call("nap", 0.2))
        payload = await _payload(handle)
        reading = asyncio.ensure_future(handle.call("read", payload))
        await asyncio.sleep(0)
        handle.release(payload)
        assert (await reading)["a"] == ["B", [5], bytes(5)]
        nap.cancel()
        slow = asyncio.ensure_future(handle.call("nap", 0.1))
        await asyncio.sleep(0)
        slow.cancel()
        assert await handle.call("echo", "on") == ["on"]
        assert handle.num_dropped_replies == 1


async def _payload(handle: RayWorker) -> Payload:
    payload: Payload = await handle.call("make", 5)
    return payload


@pytest.mark.asyncio
@pytest.mark.usefixtures("all_free")
async def test_errors_cross_as_data(worker: Make, micro_batch: MicroBatch) -> None:
    async with worker() as handle, worker("v", "wrong_type") as wrong:
        with pytest.raises(RewardError, match="worker 'w', fail: the judge said nothing") as caught:
            await handle.call("fail", "reward")
        assert "targets.py" in caught.value.__notes__[0]
        with pytest.raises(NumericsError):
            await handle.call("fail", "numerics")
        with pytest.raises(WorkerRaised, match="RuntimeError: outer") as raised:
            await handle.call("fail", "chained")
        assert (raised.value.worker, raised.value.task) == ("w", "fail")
        with pytest.raises(WorkerRaised, match="object cannot cross"):
            await handle.call("unencodable")
        with pytest.raises(WorkerError, match="arrays belong in"):
            await handle.call("echo", bytes(20 << 20))
        with pytest.raises(WorkerError, match="not in Ray's object store"):
            await handle.call("echo", Payload({"a": b"x"}))
        with pytest.raises(ProtocolError, match="generate step 3 micro-batch 5: the result is not what generate"):
            await wrong.generate(micro_batch)
        assert await handle.call("echo", "alive") == ["alive"]
    for target, error, message in [
        ("broken_constructor", WorkerRaised, "worker 'x', start: RuntimeError: no model here"),
        ("dying", WorkerDied, "during start"),
    ]:
        with pytest.raises(error, match=message):
            await worker("x", target).start()
    with pytest.raises(WorkerTimeout, match=r"not READY within 1\.5 s; raise start_timeout_s or see its log"):
        await worker("x", "sleepy", start_timeout_s=1.5).start()


@pytest.mark.asyncio
async def test_the_environment_holds_no_secrets(worker: Make) -> None:
    options = {"threads": 3, "env": {"HF_TOKEN": "listed"}, "runtime_env": {"env_vars": {"COLOUR": "red"}}}
    async with worker("w", **options) as handle:
        env = await handle.call("environ")
    assert "WANDB_API_KEY" not in env
    names = ("HF_TOKEN", "COLOUR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    assert [env[name] for name in names] == ["listed", "red", "3", ""]


@pytest.mark.asyncio
@pytest.mark.usefixtures("all_free")
async def test_a_death_fails_every_call_and_leaves_the_payloads(worker: Make) -> None:
    async with worker("a") as handle, worker("b") as other:
        payload = await handle.call("make", 1 << 20)
        calls = [asyncio.ensure_future(handle.call("exit", 3))]
        calls += [asyncio.ensure_future(handle.call("echo", index)) for index in range(3)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, WorkerDied) for error in errors)
        first = errors[0]
        assert isinstance(first, WorkerDied)
        assert (first.worker, first.task) == ("a", "exit")
        assert "Ray says: Worker exit type: SYSTEM_ERROR" in str(first)
        assert first.log_tail.endswith("going \\x1b[31mdown\\x07")
        with pytest.raises(WorkerDied, match=r"during echo; its log is /.*\.err on "):
            await handle.call("echo")
        assert await other.call("glance", payload) == 1
        # One that dies while it is idle.
        ended = asyncio.ensure_future(asyncio.shield(other._actor._gone))
        os.kill(other.node.pid, signal.SIGKILL)
        await asyncio.wait_for(ended, 5)
        with pytest.raises(WorkerDied, match="worker 'b' died"):
            await other.call("echo")


@pytest.mark.asyncio
@pytest.mark.usefixtures("all_free")
async def test_resources_that_are_not_there_are_named(worker: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"'w' asks for CPU 64, GPU 2 on a node, which no node has: .*CPU 3, left 1\).*Ask for less"
    ):
        await worker(num_cpus=64.0, num_gpus=2, start_timeout_s=0.3).start()
    async with worker("a", side="left", num_cpus=3):
        with pytest.raises(WorkerTimeout, match=r"'b' waited 0\.3 s for CPU 1, left 0\.1 on a node; .*free now: CPU"):
            await worker("b", side="left", num_cpus=1.0, start_timeout_s=0.3).start()


@pytest.mark.asyncio
@pytest.mark.usefixtures("all_free")
async def test_ranks_share_a_node_and_meet(nodes: Any) -> None:
    cluster, path = RayCluster(nodes.address), {"PYTHONPATH": HERE}
    group = ray_worker("t", "targets:Collective", 2, cluster=cluster, resources={"left": 0.1}, env=path)
    assert isinstance(group, GroupWorker)
    async with group:
        first, second = group.ranks
        assert isinstance(first, RayWorker)
        assert isinstance(second, RayWorker)
        assert await group.call("total", 2.0) == 2.0 + 4.0
        began = time.monotonic()
        with pytest.raises(WorkerDied, match=r"rank 1 of 't'"):
            await group.call("total", 1.0, 1)
        assert time.monotonic() - began < 10
    with pytest.raises(ConfigError, match="asks for 2 ranks of CPU 2 each on one node, which no node has"):
        await ray_worker("t", "targets:Collective", 2, cluster=cluster, cpus_per_rank=2.0, start_timeout_s=0.3).start()


@pytest.mark.asyncio
async def test_a_cluster_that_lets_anybody_in_is_refused(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE is not set, .*workers\.ray\.allow_no_auth"):
        await RayCluster(nodes.address).connect()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="any user of this machine"):
        await RayCluster().connect()
    async with RayCluster(nodes.address, allow_no_auth=True):
        pass


@pytest.mark.asyncio
async def test_addresses_that_are_none(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, message in [("ray://x:1", "that of a Ray client"), ("x", "host:port"), ("x:y", "host:port")]:
        with pytest.raises(ConfigError, match=message):
            RayCluster(address)
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 "):
        await RayCluster("127.0.0.1:1").connect()
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    assert RayCluster().address == "somewhere:6379"
    assert RayCluster("local").address is None


@pytest.mark.asyncio
async def test_a_connection_of_the_program_is_left_alone(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raycluster, "_holders", 0)  # as if somebody else had made it
    async with RayCluster(nodes.address):
        pass
    assert raycluster.imported("ray").is_initialized()


@pytest.mark.asyncio
async def test_a_lost_node_takes_its_workers_and_payloads(worker: Make, nodes: Any) -> None:
    node = nodes.add_node(num_cpus=1, resources={"doomed": 1}, object_store_memory=100 << 20)
    async with worker("gone", side="doomed") as gone, worker("stays") as stays:
        small, payload, copied = [await gone.call("make", size) for size in (1 << 10, 1 << 20, 1 << 20)]
        assert await stays.call("glance", copied) == 1
        nap = asyncio.ensure_future(gone.call("nap", 60.0))
        await gone_is_busy(gone)
        await asyncio.to_thread(nodes.remove_node, node, allow_graceful=False)
        with pytest.raises(WorkerDied, match="worker 'gone' died"):
            await asyncio.wait_for(nap, 30)
        assert [found.lost for found in (small, payload, copied)] == [False, True, False]
        with pytest.raises(PayloadLost, match=r"glance reads Payload.*lost with the node of worker 'gone'") as lost:
            await asyncio.wait_for(stays.call("glance", payload), 15)  # Ray takes 30 s
        assert lost.value.worker == "gone"
        assert [await asyncio.wait_for(stays.call("glance", other), 5) for other in (small, copied)] == [1, 1]
        assert await stays.call("echo", 1) == [1]


@pytest.mark.asyncio
async def test_rollouts_that_a_lost_node_had_are_drawn_again(worker: Make, nodes: Any, tmp_path: Path) -> None:
    node = nodes.add_node(num_cpus=1, resources={"doomed": 1}, object_store_memory=100 << 20)
    noticed, size, events, scored = tmp_path / "noticed", 1 << 16, list[AnyEvent](), asyncio.Event()

    def note(event: AnyEvent) -> None:
        events.append(event)
        if len([event for event in events if isinstance(event, Rewarded)]) == 6:
            scored.set()

    sides = {"gen0": "doomed", "gen1": ""}
    generators = [worker(name, "Engine", side, kwargs={"num_floats": size}) for name, side in sides.items()]
    trainer = worker("trainer", "Ledger", "right", kwargs={"path": str(noticed)})
    plan = Plan(["a", "b"], num_steps=2, prompts_per_step=6, samples_per_prompt=1)
    async with Scheduler(plan, trainer=trainer, generators=generators, sinks=[note, InvariantChecker()]) as scheduler:
        await asyncio.wait_for(scored.wait(), 10)
        for pid in (node.all_processes["raylet"][0].process.pid, generators[0].node.pid):  # as a machine dies
            os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: generators[0]._actor is not None and generators[0]._actor.ended)
        noticed.touch()  # until now the trainer had one of six in its gradient, and was at the second
        steps = [step async for step in scheduler]
        trained = await trainer.call("remembered")
    await asyncio.to_thread(nodes.remove_node, node, allow_graceful=False)
    lost = [event for event in events if isinstance(event, RolloutLost)]
    assert {(event.step, event.worker) for event in lost} == {(0, "gen0")}
    assert steps[0].metrics()["faults/rollouts_lost"] == len(lost)
    assert [event.worker for event in events if isinstance(event, WorkerLost)] == ["gen0"]
    totals = [float(sum(range(index, index + size))) for index in range(6)]
    assert trained == [[step, index, totals[index]] for step in range(2) for index in range(6)]


@pytest.mark.asyncio
async def test_who_falls_silent_is_hung(worker: Make, gone: Callable[[int], bool]) -> None:
    stopped, holding, busy = [worker(name, heartbeat_timeout_s=1.5) for name in ("stopped", "holding", "busy")]
    async with stopped, holding, busy:
        pids = [stopped.node.pid, holding.node.pid]
        calls = [stopped.call("nap", 60.0), holding.call("hold_interpreter", 60), busy.call("spin", 3.0)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
        os.kill(stopped.node.pid, signal.SIGSTOP)
        errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 40)
        assert errors[2] == "spun", "whoever computes is not hung"
        for error, name, task in zip(errors, ("stopped", "holding"), ("nap", "hold_interpreter"), strict=False):
            assert isinstance(error, WorkerTimeout)
            assert str(error).startswith(f"worker {name!r} hung: no heartbeat for 1.")
            assert (error.worker, error.task) == (name, task)
        assert any("in hold_interpreter" in note for note in errors[1].__notes__)
        assert stopped.lost
        with pytest.raises(WorkerTimeout, match=r"worker 'stopped' hung.*echo was not answered"):
            await stopped.call("echo", 1)
        await wait_until(lambda: all(map(gone, pids)))
        await stopped.restart()
        assert await stopped.call("echo", 1) == [1]
    with pytest.raises(ConfigError, match="heartbeat_timeout_s is 0"):
        worker(heartbeat_timeout_s=0)


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)


async def gone_is_busy(handle: RayWorker) -> None:
    await asyncio.sleep(0)
    assert handle._actor is not None
    assert handle._actor._calls


@pytest.mark.asyncio
@pytest.mark.usefixtures("all_free")
async def test_the_digits_job_ends_with_the_weights_that_process_workers_give(nodes: Any, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "run.output": str(tmp_path),
        "run.num_steps": 3,
        "plan.prompts_per_step": 2,
        "plan.samples_per_prompt": 4,
        "plan.micro_batch_size": 4,
        "sampling.num_inference_steps": 3,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "observe.preview_every": 0,
        "schedule.mode": "gap",
    }
    apart = {"gen0": {"left": 0.1}, "trainer": {"right": 0.1}}
    kinds: dict[str, dict[str, Any]] = {
        "process": {},
        "ray": {"workers.ray.address": nodes.address, "workers.ray.resources": apart},
    }
    reports = [
        await arun(load_config(None, {**values, **more, "workers.type": kind, "run.name": kind}), progress=False)
        for kind, more in kinds.items()
    ]
    assert [report.outcome for report in reports] == ["completed", "completed"]
    on_processes, on_ray = [tensors_of(report.folder / "checkpoints" / "step-000003") for report in reports]
    assert len(on_ray) > 10
    assert on_ray == on_processes


SCRIPT = """
import asyncio, os, signal, sys
import psutil
import digen.workers.ray
from digen import Pool, ProcessWorker, load_config
from digen.runner import prepare
from digen.workers.ray import RayCluster, ray_worker

prepare(load_config(None, {"workers.type": "ray"}))

async def eight():
    async with Pool([ProcessWorker(f"w{number}", "targets:Misc") for number in range(8)]):
        return psutil.Process().memory_info().rss

size = asyncio.run(eight())
assert size < 150 << 20, size
cluster = RayCluster()
worker = ray_worker("w", "targets:Misc", cluster=cluster)
unwanted = {"ray", "vllm", "torch", "numpy"} & set(sys.modules)
assert not unwanted, unwanted
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

async def main():
    async with cluster, worker:
        assert cluster.is_ours
        os.kill(os.getpid(), signal.SIGTERM)  # it is the program's alone
        assert await worker.call("echo", 1) == [1]
        environ = await worker.call("environ")
        assert "HF_TOKEN" not in environ
        ours = psutil.Process().children(recursive=True)
        assert len(ours) > 3
        for process in ours:
            for connection in process.net_connections():
                if connection.status == "LISTEN":
                    assert connection.laddr.ip.removeprefix("::ffff:") == "127.0.0.1", (process, connection)
    return ours

ours = asyncio.run(main())
assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
assert received == ["SIGTERM"]
assert psutil.wait_procs(ours, timeout=10)[1] == []
assert not sys.modules["ray"].is_initialized()
print("fine")
"""


def test_a_cluster_of_its_own_is_on_loopback_and_ends(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": os.pathsep.join([HERE, str(Path(__file__).parents[2])]), "HF_TOKEN": "hush"}
    environment |= {"HOME": str(tmp_path)}  # where Ray makes a token
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.endswith("fine\n"), done.stderr
    assert "SIGTERM" not in done.stderr
