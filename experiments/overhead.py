"""What the driver costs: calls to workers, and the chain generate, score, update with tasks that do nothing.

Run ``python experiments/overhead.py [--json PATH]`` on an idle machine; it takes about 5 s, or 15 s with Ray.
Absolute times depend on the machine; the ratio to Ray is of two measurements in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from digen import GroupSlice, MicroBatch, Payload, ProcessWorker, Prompt, Rollout, Scored, UpdateReport

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
    """What one run of the chain took, per micro-batch."""

    wall_us: float
    cpu_us: float


def micro_batches(number: int) -> list[MicroBatch]:
    """Micro-batches of one sample each."""
    return [MicroBatch(0, 0, index, (GroupSlice(f"s0p{index}", Prompt("a cat"), 0, 1, 1),)) for index in range(number)]


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

    times = sorted(asyncio.run(measure())[num_calls // 10 :])
    return [
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


async def digen_chain(number: int = 1000) -> Chain:
    """The chain on worker processes: the best of three runs."""
    async with (
        ProcessWorker("gen0", "overhead:NoOp") as gen0,
        ProcessWorker("gen1", "overhead:NoOp") as gen1,
        ProcessWorker("trainer", "overhead:NoOp") as trainer,
    ):
        owners = {0: gen0, 1: gen1}

        def produce(key: int) -> Callable[[MicroBatch], Awaitable[tuple[Any, Any]]]:
            async def generate(micro_batch: MicroBatch) -> tuple[Any, Any]:
                rollout = await owners[key].generate(micro_batch)
                return (key, rollout), (await owners[key].score(rollout)).rewards

            return generate

        async def update(owned: tuple[int, Rollout], rewards: Sequence[float]) -> None:
            key, rollout = owned
            await trainer.update(rollout, rewards)
            owners[key].release(rollout.payload)

        await run_chain(number // 10, [produce(0), produce(1)], update)
        runs = [await run_chain(number, [produce(0), produce(1)], update) for _ in range(3)]
    return min(runs, key=lambda run: run.cpu_us)


def ray_chain(number: int = 300) -> Chain:
    """The same chain on Ray actors, awaited from asyncio: the best of three runs."""
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
    """F3, transport alone: driver CPU and wall time of a three-call micro-batch, and the same on Ray."""
    chain = asyncio.run(digen_chain())
    figures = [
        Figure("F3", "chain of 3 calls, driver CPU", chain.cpu_us, "us", 150),
        Figure("F3", "chain of 3 calls, wall", chain.wall_us, "us", 500),
    ]
    if importlib.util.find_spec("ray") is not None:
        other = ray_chain()
        figures += [
            Figure("F3", "the same on Ray, driver CPU", other.cpu_us, "us"),
            Figure("F3", "the same on Ray, wall", other.wall_us, "us"),
            Figure("F3", "driver CPU, digen / Ray", chain.cpu_us / other.cpu_us, "", 0.25),
        ]
    return figures


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


MEASUREMENTS: tuple[Callable[[], list[Figure]], ...] = (
    pipe_call,
    pipelined_calls,
    chain_on_processes,
    bytes_through_driver,
)
"""Each gives some figures; they run one after the other."""


def show(figures: Sequence[Figure]) -> str:
    """A table of figures and targets."""
    lines = [f"{'id':<5}{'what':<42}{'measured':>12}  {'unit':<5}{'target':>10}"]
    for figure in figures:
        target = "" if figure.target is None else f"{'>=' if figure.at_least else '<='} {figure.target:,.10g}"
        missed = "  MISSED" if figure.reached is False else ""
        lines.append(f"{figure.id:<5}{figure.name:<42}{figure.value:>12,.2f}  {figure.unit:<5}{target:>10}{missed}")
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
