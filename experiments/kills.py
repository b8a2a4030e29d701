"""SIGKILL of any process of a run, at random instants: its last weights are those of an undisturbed run, bit for bit.

    python experiments/kills.py [--kills 200] [--roles generator,trainer,driver]     about 1 hour on an idle machine

A small job of the digits family runs again and again as ``digen train``. A generator or trainer that is killed is
started again by the run; a killed driver takes its workers along, and the run is resumed. Instants are drawn: every
other one after a process was started, the rest after it has begun to work, so that start-ups, loads, commits and
half-written checkpoints are hit; what was hit is counted. Exit code 1 if anything of a run outlived it, or if a weight,
an optimizer's state or a moving average differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from digen.checkpoint import completed, verify
from digen.events import WorkerLost, read_events

ROLES = {"generator": "gen0", "trainer": "trainer", "driver": ""}
"""Who can be killed, and its worker's name."""
JOB: dict[str, Any] = {
    "run": {"name": "kills", "seed": 1},
    "plan": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "sampling": {"num_inference_steps": 4},
    "algorithm": {"tsp_chunk": "all"},
    "optimizer": {"ema_decay": 0.9},
    "checkpoint": {"every": 1, "keep": 2, "keep_best": 1},
    "evaluation": {"at_start": False, "at_end": False},
    "observe": {"preview_every": 0},
    "schedule": {"mode": "tag"},
    # Far more losses than any run would have, without a wait.
    "restarts": {"budget": 100_000, "backoff_s": 0, "max_attempts": 1_000},
}
GONE_S = 5.0
"""How long children may live on after their driver."""
_CHILD = "digen.workers.child"
_LIMIT_S = 900.0
"""Of one run that is left alone. A run that hangs is a failure."""


@dataclass
class Job:
    """A run in a folder of its own, which can be started, killed and resumed."""

    folder: Path
    num_steps: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def run_folder(self) -> Path:
        """Where the run writes."""
        return self.folder / str(JOB["run"]["name"])

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, or continue it from its last checkpoint; a run that was killed before its first one begins anew."""
        resume = bool(completed(self.run_folder / "checkpoints"))
        if not resume:
            shutil.rmtree(self.run_folder, ignore_errors=True)
        config = {**JOB, "run": {**JOB["run"], "output": str(self.folder), "num_steps": self.num_steps}}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        arguments = ["train", str(self.folder / "config.yaml"), *(("--resume", "latest") if resume else ())]
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "digen.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self.process

    def worker(self, name: str) -> psutil.Process | None:
        """The living process of a worker, known by the log that it writes to."""
        for worker in workers_of(self.process.pid if self.process else 0):
            try:
                log = Path(f"/proc/{worker.pid}/fd/1").readlink()
            except OSError:  # it has ended meanwhile
                continue
            if log.name.startswith(f"{name}."):
                return worker
        return None

    @property
    def done(self) -> bool:
        """Whether the last step is saved, so that nothing is left to resume."""
        found = completed(self.run_folder / "checkpoints")
        return bool(found) and verify(found[-1]).version == self.num_steps

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file that the trainer wrote into the last checkpoint, which is checked."""
        last = completed(self.run_folder / "checkpoints")[-1]
        if verify(last).version != self.num_steps:
            raise RuntimeError(f"{last} is not the last step's")
        return {
            name: sha for name, sha in json.loads((last / "manifest.json").read_text()).items() if name != "run.json"
        }

    def output(self) -> str:
        """The end of what it printed."""
        return (self.folder / "output").read_text(errors="replace")[-3000:]


@dataclass
class Tally:
    """What came of the kills of one role."""

    role: str
    num_kills: int = 0
    num_runs: int = 0
    lost_s: float = 0.0
    gone_s: float = 0.0
    orphans: int = 0
    leaks: int = 0
    during: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether nothing was lost and nothing left."""
        return not (self.failures or self.orphans or self.leaks)

    def __str__(self) -> str:
        lost = self.lost_s / self.num_kills if self.num_kills else 0.0
        gone = f"{self.gone_s:.2f}" if self.role == "driver" else "-"
        same = f"{self.num_runs - len(self.failures)} of {self.num_runs}"
        return f"{self.role:<12}{self.num_kills:>6}{lost:>12.2f}{gone:>10}{self.orphans:>9}{self.leaks:>7}   {same}"


HEAD = f"{'killed':<12}{'kills':>6}{'s lost/kill':>12}{'gone s':>10}{'orphans':>9}{'leaks':>7}   same weights"


def workers_of(pid: int) -> list[psutil.Process]:
    """Every worker process that process ``pid`` started and that lives, whoever its parent is now."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        after = words[words.index(_CHILD) + 1 :] if _CHILD in words else []
        if len(after) > 1 and after[1] == str(pid) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def shared() -> set[str]:
    """Named shared memory of digen on this machine: there is never any, its memory has no name."""
    return {path.name for path in Path("/dev/shm").glob("*digen*")}  # noqa: S108 - to see that nothing is there


def left(tally: Tally, pid: int, limit_s: float = GONE_S) -> None:
    """After the end of a driver: nothing that it started lives on, and no shared memory is left."""
    began = time.monotonic()
    while workers_of(pid) and time.monotonic() - began < limit_s:
        time.sleep(0.01)
    tally.gone_s = max(tally.gone_s, time.monotonic() - began)
    orphans = workers_of(pid)
    tally.orphans += len(orphans)
    tally.leaks += len(shared())
    for orphan in orphans:
        orphan.kill()


def undisturbed(folder: Path, num_steps: int) -> tuple[dict[str, str], float]:
    """What a run without kills comes to, and how long it takes."""
    job = Job(folder, num_steps)
    began = time.monotonic()
    if job.start().wait(_LIMIT_S):
        raise RuntimeError(job.output())
    return job.digests(), time.monotonic() - began


@dataclass
class Instant:
    """When to kill: so long after a process was started, or after it has begun to work."""

    at_work: bool
    wait_s: float

    @classmethod
    def drawn(cls, draw: random.Random, gaps_s: tuple[float, float]) -> Instant:
        """One of either kind; ``gaps_s`` are the longest times of the two."""
        at_work = draw.random() < 0.5
        return cls(at_work, draw.uniform(0, gaps_s[at_work]))


def kill_workers(tally: Tally, job: Job, draw: random.Random, most: int, gaps_s: tuple[float, float]) -> None:
    """One run in which a worker is killed again and again, up to ``most`` times."""
    process, events = job.start(), job.run_folder / "events.jsonl"
    deadline, instant, killed = time.monotonic() + _LIMIT_S, Instant.drawn(draw, gaps_s), set[int]()
    while process.poll() is None and len(killed) < most and time.monotonic() < deadline:
        worker = job.worker(ROLES[tally.role])
        log = events.read_bytes() if events.is_file() else b""
        # Before the run has begun a worker that cannot be started ends it.
        back = not instant.at_work or log.count(b'"worker_restarted"') == len(killed)
        if worker is None or worker.pid in killed or not log or not back:
            time.sleep(0.01)
            continue
        time.sleep(instant.wait_s)
        if process.poll() is None and worker.is_running():
            worker.kill()
            killed.add(worker.pid)
            instant = Instant.drawn(draw, gaps_s)
    finish(process)
    tally.num_kills += len(killed)
    for event in read_events(events) if events.is_file() else ():
        if isinstance(event, WorkerLost):
            hit = re.search(r"during (\w+)", event.error)
            tally.during[hit[1] if hit else "idle"] += 1


def kill_drivers(tally: Tally, job: Job, draw: random.Random, most: int, gaps_s: tuple[float, float]) -> None:
    """One run whose driver is killed again and again, up to ``most`` times, and resumed."""
    metrics = job.run_folder / "metrics.jsonl"
    for _ in range(most):
        process, instant = job.start(), Instant.drawn(draw, gaps_s)
        before = size(metrics)
        while instant.at_work and process.poll() is None and size(metrics) <= before:
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(instant.wait_s)
            return  # it is done
        children = len(workers_of(process.pid))
        process.kill()
        process.wait()
        tally.num_kills += 1
        tally.during["at work" if instant.at_work else f"start, {children} workers"] += 1
        left(tally, process.pid)
        if job.done:
            return
    finish(job.start())


def size(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def finish(process: subprocess.Popen[bytes]) -> None:
    """Let it come to its end."""
    try:
        process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(role: str, options: argparse.Namespace, folder: Path, wanted: dict[str, str], alone_s: float) -> Tally:
    """Kill one role again and again, in as many runs as that takes, and compare each with the undisturbed one."""
    kills, num_steps, gaps_s = options.kills, options.steps, (options.start_gap, options.work_gap)
    tally, draw = Tally(role), random.Random(f"{options.seed} {role}")  # noqa: S311 - it only chooses instants
    while tally.num_kills < kills and len(tally.failures) < 3:
        job = Job(make(folder / role / str(tally.num_runs)), num_steps)
        began = time.monotonic()
        before = tally.num_kills
        (kill_drivers if role == "driver" else kill_workers)(tally, job, draw, kills - tally.num_kills, gaps_s)
        if tally.num_kills > before:
            tally.lost_s += time.monotonic() - began - alone_s
        tally.num_runs += 1
        process = job.process
        assert process is not None
        left(tally, process.pid)
        if process.returncode and not job.done:
            tally.failures.append(f"{job.folder}: exit code {process.returncode}\n{job.output()}")
        elif job.digests() != wanted:
            tally.failures.append(f"{job.folder}: other weights")
        else:
            shutil.rmtree(job.folder)
    return tally


def make(folder: Path) -> Path:
    """A new folder."""
    folder.mkdir(parents=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of each role")
    parser.add_argument("--roles", default=",".join(ROLES), help=f"some of {', '.join(ROLES)}")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--start-gap", type=float, default=6.0, help="longest time from a start to a kill, in seconds")
    parser.add_argument("--work-gap", type=float, default=3.0, help="longest time from the beginning of work to a kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    print(
        f"{options.steps} steps a run, kills up to {options.start_gap:g} s after a start or {options.work_gap:g} s "
        f"after the beginning of work, seed {options.seed}\n{HEAD}"
    )
    alone = undisturbed(make(folder / "undisturbed"), options.steps)
    tallies = []
    for role in options.roles.split(","):
        tally = measure(role, options, folder, *alone)
        print(tally, flush=True)
        print("    hit: " + ", ".join(f"{what} {count}" for what, count in tally.during.most_common()), flush=True)
        print("".join(f"    FAILED {failure}\n" for failure in tally.failures), end="", flush=True)
        tallies.append(tally)
    well = all(tally.well for tally in tallies)
    if well:
        shutil.rmtree(folder)
    print(f"weights bit for bit those of an undisturbed run, no orphan, no leak: {'met' if well else 'MISSED'}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
