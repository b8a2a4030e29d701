"""What the driver costs: decisions, calls to workers, and micro-batches whose tasks do nothing.

    python experiments/overhead.py [--json PATH]     about 1 minute on an idle machine

F1 is virtual time: the CPU of a whole task, from its completion through choice, record and dispatch to the next. F3
runs the real scheduler with its event log on real worker processes. Absolute times depend on the machine (a call's on
where the kernel wakes the other process, which is why a bare echo stands beside it); ratios are of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from digen import (
    CommitReport,
    GroupSlice,
    LoadReport,
    MicroBatch,
    Payload,
    Plan,
    ProcessWorker,
    Prompt,
    Publication,
    Rollout,
    ScheduleConfig,
    Scheduler,
    Scored,
    SimWorker,
    StepReport,
    UpdateReport,
)
from digen.events import AnyEvent, EventLog, Sink, StepCommitted, TaskFinished
from digen.workers.clock import run_virtual

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Figure:
    """One measured number and what it has to reach."""

    id: str
    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False
    """Whether the target is a lower bound."""

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; ``None`` without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


class NoOp:
    """A worker target whose tasks do nothing but make and read a payload of ``num_bytes``."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.version = 0
        self._latents = bytes(num_bytes)

    def echo(self, value: Any) -> Any:
        """Give back what came."""
        return value

    def generate(self, micro_batch: MicroBatch) -> Rollout:
        """A rollout of zeros."""
        return Rollout(micro_batch, 0, 0, Payload({"latents": self._latents}))

    def score(self, rollout: Rollout) -> Scored:
        """A reward without looking."""
        return Scored((float(len(rollout.payload)),) * rollout.micro_batch.num_samples)

    def update(self, rollout: Rollout, advantages: Sequence[float | None]) -> UpdateReport:
        """Count the advantages."""
        return UpdateReport(rollout.micro_batch.step, rollout.micro_batch.index, len(advantages))


@dataclass
class Chain:
    """What one run of micro-batches took, per micro-batch."""

    wall_us: float
    cpu_us: float


def micro_batches(number: int) -> list[MicroBatch]:
    """Micro-batches of one sample each."""
    return [MicroBatch(0, 0, index, (GroupSlice(f"s0p{index}", Prompt("a cat"), 0, 1, 1),)) for index in range(number)]


# ---- F1: a decision --------------------------------------------------------------------------------------------


def decision_us(num_generators: int, num_micro_batches: int, num_steps: int = 6) -> float:
    """CPU of one task in virtual time, median over steps; the first step, which opens the ledgers, is left out."""
    prompts = [f"cat {number}" for number in range(num_micro_batches)]
    plan = Plan(prompts, num_steps=num_steps, prompts_per_step=len(prompts), samples_per_prompt=1, shuffle=False)
    durations: dict[str, Any] = {"generate": lambda _, index: 10 + index * 7919 % 13, "score": 1, "load": 1}
    generators = [SimWorker(f"gen{number}", durations, reward=lambda *_: 0.5) for number in range(num_generators)]
    trainer = SimWorker("trainer", {"update": 0.01, "commit": 1})
    counted: list[tuple[float, int]] = []
    num_tasks = 0

    def count(event: AnyEvent) -> None:
        nonlocal num_tasks
        num_tasks += isinstance(event, TaskFinished)

    async def main() -> None:
        scheduler = Scheduler(
            plan,
            generators=generators,
            trainer=trainer,
            config=ScheduleConfig(mode="gap"),
            sinks=[count],
            on_commit=lambda _: counted.append((time.process_time(), num_tasks)),
        )
        async with scheduler:
            async for _ in scheduler:
                pass

    run_virtual(main())
    steps = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(counted)]
    return 1e6 * statistics.median(steps)


def decisions() -> list[Figure]:
    """F1: a decision at 10 and at 10,000 workers."""
    few = min(decision_us(10, 2000) for _ in range(3))
    many = decision_us(10_000, 20_000)
    return [
        Figure("F1", "decision, 10 workers, CPU", few, "us", 30),
        Figure("F1", "decision, 10,000 workers, CPU", many, "us"),
        Figure("F1", "decision, 10,000 / 10 workers", many / few, "", 2.5),
    ]


# ---- F2: a call ------------------------------------------------------------------------------------------------


def bare_echo_us(num_calls: int = 5000) -> float:
    """Median round trip of 100 bytes between two blocking processes over a socketpair: what the kernel takes."""
    ours, theirs = socket.socketpair()
    code = "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\nwhile b := s.recv(200): s.sendall(b)"
    with ours, subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=(theirs.fileno(),)):
        theirs.close()
        times = []
        for _ in range(num_calls):
            start = time.perf_counter()
            ours.sendall(b"x" * 100)
            ours.recv(200)
            times.append(1e6 * (time.perf_counter() - start))
        ours.shutdown(socket.SHUT_RDWR)
    return statistics.median(times[num_calls // 10 :])


def pipe_call(num_calls: int = 5000) -> list[Figure]:
    """F2: one call with about 100 bytes, awaited before the next."""

    async def measure() -> list[float]:
        times = []
        async with ProcessWorker("echo", "overhead:NoOp") as worker:
            for _ in range(num_calls):
                start = time.perf_counter()
                await worker.call("echo", "x" * 80)
                times.append(1e6 * (time.perf_counter() - start))
        return times

    bare = bare_echo_us()
    times = sorted(asyncio.run(measure())[num_calls // 10 :])
    return [
        Figure("F2", "bare echo of two blocking processes, median", bare, "us"),
        Figure("F2", "call, median", statistics.median(times), "us", 60),
        Figure("F2", "call, p99", times[int(0.99 * len(times))], "us", 300),
    ]


def pipelined_calls(num_calls: int = 1000, in_flight: int = 16) -> list[Figure]:
    """F2: calls per second to two workers, each with ``in_flight`` lanes of ``num_calls`` calls."""

    async def measure() -> float:
        async with ProcessWorker("one", "overhead:NoOp") as one, ProcessWorker("two", "overhead:NoOp") as two:

            async def lane(worker: ProcessWorker) -> None:
                for _ in range(num_calls):
                    await worker.call("echo", "x" * 80)

            start = time.perf_counter()
            await asyncio.gather(*(lane(worker) for worker in (one, two) for _ in range(in_flight)))
            return 2 * in_flight * num_calls / (time.perf_counter() - start)

    return [Figure("F2", "calls, 2 workers, 16 in flight each", asyncio.run(measure()), "1/s", 20_000, at_least=True)]


# ---- F3, F4: a micro-batch -------------------------------------------------------------------------------------


class Timed(NoOp):
    """A generator and trainer whose tasks take the given milliseconds and do nothing else."""

    def __init__(self, milliseconds: dict[str, float] | None = None) -> None:
        super().__init__()
        self._milliseconds = milliseconds or {}

    def _spend(self, kind: str) -> None:
        if kind in self._milliseconds:
            time.sleep(self._milliseconds[kind] / 1e3)

    def generate(self, micro_batch: MicroBatch) -> Rollout:
        """A rollout without content."""
        self._spend("generate")
        return Rollout(micro_batch, self.version, self.version, Payload({}))

    def score(self, rollout: Rollout) -> Scored:
        """A reward without looking."""
        self._spend("score")
        return Scored((1.0,) * rollout.micro_batch.num_samples)

    def update(self, rollout: Rollout, advantages: Sequence[float | None]) -> UpdateReport:
        """Count the advantages."""
        self._spend("update")
        return super().update(rollout, advantages)

    def commit(self, step: int, indices: Sequence[int]) -> CommitReport:
        """Count the step."""
        self.version = step + 1
        return CommitReport(self.version, len(indices))

    def publish(self, version: int) -> Publication:
        """Weights of no size."""
        return Publication(version, Payload({}), checksum=version, num_tensors=1, nbytes=0)

    def load(self, publication: Publication) -> LoadReport:
        """Follow the version."""
        self.version = publication.version
        return LoadReport(publication.version, publication.checksum or 0, publication.num_tensors)


async def scheduled(
    plan: Plan, generators: Sequence[Any], trainer: Any, sinks: Sequence[Sink] = ()
) -> list[StepReport]:
    """The reports of a plan, run by the scheduler in mode gap."""
    scheduler = Scheduler(
        plan, generators=generators, trainer=trainer, config=ScheduleConfig(mode="gap"), sinks=list(sinks)
    )
    async with scheduler:
        return [report async for report in scheduler]


def timed_workers(milliseconds: dict[str, float] | None = None) -> tuple[list[ProcessWorker], ProcessWorker]:
    """Two generators and a trainer in processes."""
    workers = [
        ProcessWorker(name, "overhead:Timed", kwargs={"milliseconds": milliseconds})
        for name in ("gen0", "gen1", "trainer")
    ]
    return workers[:2], workers[2]


def digen_chain(number: int = 300, num_steps: int = 5) -> Chain:
    """The chain under the scheduler, with its event log on disk: the best step."""
    plan = Plan(["a cat"], num_steps=num_steps, prompts_per_step=number, samples_per_prompt=1)
    marks: list[tuple[float, float]] = []

    def mark(event: AnyEvent) -> None:
        if isinstance(event, StepCommitted):
            marks.append((time.perf_counter(), time.process_time()))

    with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder) / "events.jsonl") as log:
        generators, trainer = timed_workers()
        asyncio.run(scheduled(plan, generators, trainer, [log, mark]))
    spent = [((b[0] - a[0]) / number, (b[1] - a[1]) / number) for a, b in pairwise(marks)]
    wall, cpu = min(spent, key=lambda item: item[1])
    return Chain(wall_us=1e6 * wall, cpu_us=1e6 * cpu)


def over_ideal(number: int = 60, num_steps: int = 3) -> list[Figure]:
    """F4: micro-batches of 20/4/8 ms in real time against the same schedule in virtual time, which costs nothing."""
    milliseconds = {"generate": 20.0, "score": 4.0, "update": 8.0}
    plan = Plan(["a cat"], num_steps=num_steps, prompts_per_step=number, samples_per_prompt=1)
    generators, trainer = timed_workers(milliseconds)
    real = asyncio.run(scheduled(plan, generators, trainer))
    seconds = {kind: value / 1e3 for kind, value in milliseconds.items()}
    simulated = [SimWorker(f"gen{index}", seconds) for index in range(2)]
    ideal = run_virtual(scheduled(plan, simulated, SimWorker("trainer", seconds)))
    spent = min(report.metrics()["pipeline/makespan_s"] for report in real[1:])
    perfect = ideal[-1].metrics()["pipeline/makespan_s"]
    # Two generators end 30 rounds of 2.4 s together; the trainer then updates on the last two micro-batches.
    exact = run_virtual(
        scheduled(
            plan,
            [SimWorker(f"gen{index}", {"generate": 2, "score": 0.4}) for index in range(2)],
            SimWorker("trainer", {"update": 0.8}),
        )
    )[0].metrics()["pipeline/makespan_s"]
    return [
        Figure("F4", "60 x 20/4/8 ms: over the ideal makespan", 100 * (spent / perfect - 1), "%", 6),
        Figure("F4", "60 x 2/0.4/0.8 s, virtual: over 73.6 s", 100 * (exact / 73.6 - 1), "%", 0.1),
    ]


async def run_chain(
    number: int,
    generators: Sequence[Callable[[MicroBatch], Awaitable[tuple[Any, Any]]]],
    update: Callable[[Any, Any], Awaitable[Any]],
) -> Chain:
    """Generate and score on two workers, update on a third, all at the same time, from a plain asyncio loop."""
    pending = iter(micro_batches(number))
    scored: asyncio.Queue[tuple[Any, Any]] = asyncio.Queue()

    async def produce(generate: Callable[[MicroBatch], Awaitable[tuple[Any, Any]]]) -> None:
        for micro_batch in pending:
            scored.put_nowait(await generate(micro_batch))

    async def consume() -> None:
        for _ in range(number):
            await update(*await scored.get())

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(consume(), *map(produce, generators))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Chain(wall_us=1e6 * wall / number, cpu_us=1e6 * cpu / number)


def ray_chain(number: int = 300) -> Chain:
    """The same calls on Ray actors from a bare asyncio loop, without scheduling or record: the best of three runs."""
    import ray

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        actor: Any = ray.remote(num_cpus=1)(RayNoOp)
        gen0, gen1, trainer = actor.remote(), actor.remote(), actor.remote()

        def produce(generator: Any) -> Callable[[MicroBatch], Awaitable[tuple[Any, Any]]]:
            async def generate(micro_batch: MicroBatch) -> tuple[Any, Any]:
                rollout = await generator.generate.remote(micro_batch.index)
                return rollout, await generator.score.remote(rollout)

            return generate

        async def update(rollout: Any, rewards: Any) -> None:
            await trainer.update.remote(rollout, rewards)

        async def measure() -> Chain:
            await run_chain(number // 10, [produce(gen0), produce(gen1)], update)
            runs = [await run_chain(number, [produce(gen0), produce(gen1)], update) for _ in range(3)]
            return min(runs, key=lambda run: run.cpu_us)

        return asyncio.run(measure())
    finally:
        ray.shutdown()


class RayNoOp:
    """The least that Ray has to carry: an index, no payload."""

    def generate(self, index: int) -> dict[str, int]:
        """A rollout in name only."""
        return {"index": index, "version": 0}

    def score(self, rollout: dict[str, int]) -> list[float]:
        """A reward without looking."""
        return [float(len(rollout))]

    def update(self, rollout: dict[str, int], advantages: list[float]) -> dict[str, int]:
        """Count the advantages."""
        return {"index": rollout["index"], "num_terms": len(advantages)}


def chain_on_processes() -> list[Figure]:
    """F3: driver CPU and wall time of a micro-batch under the scheduler, and of its three calls on Ray."""
    chain = digen_chain()
    figures = [
        Figure("F3", "micro-batch of 3 tasks, driver CPU", chain.cpu_us, "us", 300),
        Figure("F3", "micro-batch of 3 tasks, wall", chain.wall_us, "us", 500),
    ]
    if importlib.util.find_spec("ray") is not None:
        other = ray_chain()
        figures += [
            Figure("F3", "its 3 calls on Ray, driver CPU", other.cpu_us, "us"),
            Figure("F3", "its 3 calls on Ray, wall", other.wall_us, "us"),
            Figure("F3", "driver CPU, digen / Ray", chain.cpu_us / other.cpu_us, "", 0.25),
        ]
    return figures


# ---- F6: bytes -------------------------------------------------------------------------------------------------


def bytes_through_driver(number: int = 20) -> list[Figure]:
    """F6: bytes on all worker sockets per micro-batch, whatever the size of the trajectories."""

    async def measure(size: int) -> float:
        async with (
            ProcessWorker("gen", "overhead:NoOp", kwargs={"num_bytes": size}) as generator,
            ProcessWorker("trainer", "overhead:NoOp") as trainer,
        ):
            before = generator.num_bytes + trainer.num_bytes
            for micro_batch in micro_batches(number):
                rollout = await generator.generate(micro_batch)
                scored = await generator.score(rollout)
                await trainer.update(rollout, scored.rewards)
                generator.release(rollout.payload)
            return (generator.num_bytes + trainer.num_bytes - before) / number

    return [
        Figure("F6", f"bytes through the driver, {label} rollouts", asyncio.run(measure(size)), "B", 4 * KIB)
        for label, size in (("1 KiB", KIB), ("64 MiB", 64 * MIB))
    ]


# ---- F10: imports ----------------------------------------------------------------------------------------------


def imports() -> list[Figure]:
    """F10: the time of a fresh interpreter, less that of an empty one."""

    def run(*arguments: str) -> float:
        times = []
        for _ in range(9):
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    empty = run("-c", "pass")
    return [
        Figure("F10", "import digen.sched", run("-c", "import digen.sched") - empty, "ms", 150),
        Figure("F10", "digen --help", run("-m", "digen.cli", "--help"), "ms", 300),
    ]


MEASUREMENTS: tuple[Callable[[], list[Figure]], ...] = (
    decisions,
    pipe_call,
    pipelined_calls,
    chain_on_processes,
    over_ideal,
    bytes_through_driver,
    imports,
)
"""Each gives some figures; they run one after the other."""


def show(figures: Sequence[Figure]) -> str:
    """A table of figures and targets."""
    lines = [f"{'id':<5}{'what':<46}{'measured':>12}  {'unit':<5}{'target':>10}"]
    for figure in figures:
        target = "" if figure.target is None else f"{'>=' if figure.at_least else '<='} {figure.target:,.10g}"
        missed = "  MISSED" if figure.reached is False else ""
        lines.append(f"{figure.id:<5}{figure.name:<46}{figure.value:>12,.2f}  {figure.unit:<5}{target:>10}{missed}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    figures = [figure for measure in MEASUREMENTS for figure in measure()]
    print(show(figures))
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
