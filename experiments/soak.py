"""A run of the digits job under constant losses: nothing grows, and it learns what an undisturbed run learns.

    python experiments/soak.py [--minutes 20]     twice that, on an idle machine: an undisturbed run follows

Every 10 to 20 seconds the generator or the trainer is killed. Once a second the memory and descriptors of the driver
and its workers are looked at, and the shared memory that any of them holds. At the end the run gets a preemption
notice, and the undisturbed run is trained to the same step. Exit code 1 if anything grew, or a reward differs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from kills import Job, Tally, finish, left, workers_of  # type: ignore[import-not-found]  # the script beside this one

STEPS = 10_000
"""More than any soak trains."""
_GROWTH = 1.1
"""What the last third of the time may have more than the middle one; the first is start-up."""
_FEW = 30
"""How many samples it takes to tell growth from start-up."""
_START_S = 300.0


def sample(pid: int) -> dict[str, float] | None:
    """What the driver and its workers hold; ``None`` while one of them is away."""
    try:
        driver, workers = psutil.Process(pid), workers_of(pid)
        if len(workers) < 2:
            return None
        segments: dict[int, int] = {}
        for process in (driver, *workers):
            for path in Path(f"/proc/{process.pid}/fd").iterdir():
                if str(path.readlink()).startswith("/memfd:"):
                    found = path.stat()
                    segments[found.st_ino] = found.st_size
        return {
            "driver, MB": driver.memory_info().rss / 1e6,
            "driver, descriptors": driver.num_fds(),
            "workers, MB": sum(worker.memory_info().rss for worker in workers) / 1e6,
            "workers, descriptors": sum(worker.num_fds() for worker in workers),
            "shared memory, MB": sum(segments.values()) / 1e6,
            "shared memory, segments": len(segments),
        }
    except (OSError, psutil.Error):  # one has ended meanwhile
        return None


def rewards(job: Job) -> list[float]:
    """The mean reward of every step so far."""
    path = job.run_folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line)["reward/mean"] for line in lines if line.endswith(b"\n")]


def soak(
    job: Job, minutes: float, every_s: float, draw: random.Random
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Run it under losses; what was seen once a second, and how often who was killed."""
    process = job.start()
    wait_for(job, 1)
    samples, kills = [], dict.fromkeys(("gen0", "trainer"), 0)
    end, kill_at = time.monotonic() + 60 * minutes, time.monotonic() + draw.uniform(every_s, 2 * every_s)
    while time.monotonic() < end and process.poll() is None:
        time.sleep(1)
        if (found := sample(process.pid)) is not None:
            samples.append(found)
        if time.monotonic() >= kill_at:
            name = draw.choice(list(kills))
            if (worker := job.worker(name)) is not None:
                worker.kill()
                kills[name] += 1
            kill_at = time.monotonic() + draw.uniform(every_s, 2 * every_s)
    process.send_signal(signal.SIGUSR1)
    finish(process)
    if process.returncode:
        raise RuntimeError(job.output())
    return samples, kills


def wait_for(job: Job, num_steps: int) -> None:
    """Until so many steps are trained."""
    deadline, seen = time.monotonic() + _START_S, 0
    while (now := len(rewards(job))) < num_steps:
        if job.process is None or job.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(job.output())
        if now > seen:
            deadline, seen = time.monotonic() + _START_S, now
        time.sleep(0.1)


def grew(name: str, values: Sequence[float]) -> tuple[str, bool]:
    """A row: medians of the middle and of the last third, the most, and whether that is growth."""
    third = len(values) // 3
    middle, last = statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :])
    much = last > max(_GROWTH * middle, middle + 2)
    return f"{name:<26}{middle:>10.1f}{last:>10.1f}{max(values):>10.1f}   {'GROWS' if much else 'flat'}", much


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=10.0, help="shortest time from one kill to the next, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    jobs = [Job(folder / name, STEPS) for name in ("killed", "undisturbed")]
    for job in jobs:
        job.folder.mkdir()
    tally = Tally("soak")
    draw = random.Random(options.seed)  # noqa: S311 - it only chooses instants
    samples, kills = soak(jobs[0], options.minutes, options.every, draw)
    killed = rewards(jobs[0])
    print(f"{len(killed)} steps in {options.minutes:g} minutes; killed: {kills}; looked at {len(samples)} times")
    rows = []
    if len(samples) < _FEW:
        print(f"whether anything grows is not to be told from fewer than {_FEW}", flush=True)
    else:
        print(f"{'median of the':<26}{'2nd third':>10}{'3rd third':>10}{'most':>10}")
        rows = [grew(name, [found[name] for found in samples]) for name in samples[0]]
        print("\n".join(row for row, _ in rows), flush=True)
    process = jobs[1].start()
    wait_for(jobs[1], len(killed))
    process.send_signal(signal.SIGUSR1)
    finish(process)
    alone = rewards(jobs[1])[: len(killed)]
    same = sum(one == other for one, other in zip(killed, alone, strict=True))
    print(
        f"rewards {killed[0]:.3f} -> {killed[-1]:.3f}, {same} of {len(killed)} as in the undisturbed run, bit for bit"
    )
    for job in jobs:
        left(tally, job.process.pid if job.process else 0)
    well = same == len(killed) and not any(much for _, much in rows) and not tally.orphans and not tally.leaks
    if well:
        shutil.rmtree(folder)
    said = f"{'flat, ' if rows else ''}the same curve, {tally.orphans} orphans, {tally.leaks} leaks"
    print(f"{said}: {'met' if well else 'MISSED'}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
