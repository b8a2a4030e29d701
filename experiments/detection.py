"""How soon the driver knows that a worker is dead or hung, and has another: digen's processes and Ray's actors.

    python experiments/detection.py [--repeats N] [--no-ray]     about 1 minute on an idle machine

Times are from the signal to the error of the call that waits for the worker, whose loop does nothing else meanwhile.
The replacement is asked for when the error is seen; beside it stands the start of a worker that replaces none. Ray is
treated the same way, in the same run, if it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from digen import ProcessWorker, WorkerDied, WorkerTimeout

DEATH_MS, REPLACED_S, HUNG_S = 50.0, 1.0, 1.0
"""Targets: a death is seen; a replacement is ready, beyond its own start; a hang is seen, beyond its deadline."""
_BUSY_S = 600.0


class Napper:
    """A worker that waits."""

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def nap(self, seconds: float) -> None:
        """Keep the caller waiting."""
        time.sleep(seconds)


async def deaths(repeats: int, logs: str) -> tuple[list[float], list[float], list[float]]:
    """Seconds until a SIGKILL in a call is seen, until a replacement is ready, and of a start that replaces none."""
    seen, replaced, own = [], [], []
    worker = ProcessWorker("napper", "detection:Napper", log_dir=logs)
    for _ in range(repeats):
        began = time.perf_counter()
        await worker.start()
        own.append(time.perf_counter() - began)
        call = await begun(worker)
        began = time.perf_counter()
        os.kill(pid_of(worker), signal.SIGKILL)
        with contextlib.suppress(WorkerDied):
            await call
        seen.append(time.perf_counter() - began)
        await worker.aclose()
        await worker.start()
        replaced.append(time.perf_counter() - began)
        await worker.aclose()
    return seen, replaced, own


async def hangs(repeats: int, deadline_s: float, logs: str) -> list[float]:
    """Seconds until a SIGSTOP in a call is seen by a driver that allows ``deadline_s`` of silence."""
    seen = []
    for _ in range(repeats):
        napper = ProcessWorker("napper", "detection:Napper", heartbeat_timeout_s=deadline_s, log_dir=logs)
        async with napper as worker:
            call = await begun(worker)
            began = time.perf_counter()
            os.kill(pid_of(worker), signal.SIGSTOP)
            with contextlib.suppress(WorkerTimeout):
                await call
            seen.append(time.perf_counter() - began)
    return seen


def pid_of(worker: ProcessWorker) -> int:
    """The process of a worker that was started."""
    if worker.pid is None:
        raise RuntimeError("it has no process")
    return worker.pid


async def begun(worker: ProcessWorker) -> asyncio.Future[Any]:
    """A call that was sent and has begun to run."""
    await worker.call("pid")
    call = asyncio.ensure_future(worker.call("nap", _BUSY_S))
    await asyncio.sleep(0.05)
    return call


def ray_deaths(repeats: int) -> tuple[list[float], list[float], list[float]]:
    """The same of Ray's actors."""
    import ray

    async def measure() -> tuple[list[float], list[float], list[float]]:
        kind: Any = ray.remote(num_cpus=1)(Napper)
        seen, replaced, own = [], [], []
        for _ in range(repeats):
            began = time.perf_counter()
            actor = kind.remote()
            pid = await actor.pid.remote()
            own.append(time.perf_counter() - began)
            call = asyncio.ensure_future(awaited(actor.nap.remote(_BUSY_S)))
            await asyncio.sleep(0.05)
            began = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ray.exceptions.RayError):
                await call
            seen.append(time.perf_counter() - began)
            other = kind.remote()
            await other.pid.remote()
            replaced.append(time.perf_counter() - began)
            ray.kill(other)
        return seen, replaced, own

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        return asyncio.run(measure())
    finally:
        ray.shutdown()


async def awaited(reference: Any) -> Any:
    """What Ray has for a reference."""
    return await reference


def row(what: str, seconds: Sequence[float]) -> str:
    """Median and 99th percentile (of up to 100, the longest) in milliseconds."""
    ordered = sorted(1e3 * value for value in seconds)
    return f"{what:<46}{len(ordered):>5}{statistics.median(ordered):>10.1f}{ordered[int(0.99 * len(ordered))]:>10.1f}"


def verdict(what: str, reached: bool) -> str:
    """One target."""
    return f"{what}: {'met' if reached else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="workers killed")
    parser.add_argument("--hangs", type=int, default=10, help="workers stopped")
    parser.add_argument("--deadline", type=float, default=1.0, help="heartbeat_timeout_s of those, in seconds")
    parser.add_argument("--no-ray", action="store_true", help="leave Ray out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        seen, replaced, own = asyncio.run(deaths(options.repeats, logs))
        hung = asyncio.run(hangs(options.hangs, options.deadline, logs))
    print(f"{'':<46}{'n':>5}{'median':>10}{'p99':>10}  ms")
    print(row("digen: SIGKILL to the error of the call", seen))
    print(row("digen: SIGKILL to a replacement that is READY", replaced))
    print(row("digen: start of a worker", own))
    print(row(f"digen: SIGSTOP to the error, {options.deadline:g} s allowed", hung))
    if options.no_ray or importlib.util.find_spec("ray") is None:
        print("Ray: left out" if options.no_ray else "Ray: not installed, so left out")
    else:
        with contextlib.redirect_stdout(sys.stderr):  # Ray tells of every death there
            theirs = ray_deaths(options.repeats)
        for what, seconds in zip(
            ("SIGKILL to the error of the call", "SIGKILL to another", "start"), theirs, strict=True
        ):
            print(row(f"Ray actor: {what}", seconds))
        print(f"median death, Ray / digen: {statistics.median(theirs[0]) / statistics.median(seen):.1f}")
    beyond = statistics.median(replaced) - statistics.median(own)
    late = max(hung) - options.deadline
    print(
        verdict(
            f"a death is seen within {DEATH_MS:g} ms, at p99", sorted(seen)[int(0.99 * len(seen))] <= DEATH_MS / 1e3
        )
    )
    print(
        verdict(
            f"a replacement takes {beyond:.2f} s beyond its own start, at most {REPLACED_S:g} s", beyond <= REPLACED_S
        )
    )
    print(verdict(f"a hang is seen {late:.2f} s beyond its deadline, at most {HUNG_S:g} s", late <= HUNG_S))


if __name__ == "__main__":
    main()
