"""Targets that the tests run in child processes. Plain Python: a bare worker needs no numpy."""

from __future__ import annotations

import array
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from digen.errors import CheckpointError, NumericsError, RankFailed, RewardError
from digen.types import (
    CommitReport,
    LoadReport,
    MicroBatch,
    Payload,
    Publication,
    Rollout,
    Scored,
    Snapshot,
    UpdateReport,
)

# The worker's socket, for targets that misuse it.
_FD = int(sys.argv[1]) if len(sys.argv) > 2 and sys.argv[1].isdigit() else -1


class Engine:
    """Generator, scorer and trainer in one; its weights are a number."""

    def __init__(self, version: int = 0, num_floats: int = 16) -> None:
        self.version = version
        self.num_floats = num_floats
        self.steps = 0

    def generate(self, micro_batch: MicroBatch) -> Rollout:
        latents = array.array("f", range(micro_batch.index, micro_batch.index + self.num_floats))
        return Rollout(micro_batch, self.version, self.version, Payload({"latents": latents}))

    def score(self, rollout: Rollout) -> Scored:
        return Scored((float(sum(rollout.payload["latents"])),) * rollout.micro_batch.num_samples)

    def update(self, rollout: Rollout, advantages: tuple[float | None, ...]) -> UpdateReport:
        total = sum(rollout.payload["latents"]) * sum(a for a in advantages if a is not None)
        return UpdateReport(rollout.micro_batch.step, rollout.micro_batch.index, 1, {"loss": total})

    def commit(self, step: int, indices: tuple[int, ...]) -> CommitReport:
        self.version += 1
        return CommitReport(self.version, len(indices))

    def publish(self, version: int) -> Publication:
        return Publication(version, Payload({"w": array.array("d", [float(version)])}), 7, 1, 8)

    def load(self, publication: Publication) -> LoadReport:
        self.version = int(publication.payload["w"][0])
        return LoadReport(self.version, 7, 1)

    def restore(self, path: str) -> int:
        self.version = int(path)
        return self.version


class Ledger(Engine):
    """An engine that remembers what it was trained on, and waits for a file before its second update."""

    def __init__(self, path: str, **kwargs: int) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.trained: list[tuple[int, int, float]] = []

    def update(self, rollout: Rollout, advantages: tuple[float | None, ...]) -> UpdateReport:
        while self.trained and not Path(self.path).exists():
            time.sleep(0.005)
        report = super().update(rollout, advantages)
        self.trained.append((report.step, report.index, float(sum(rollout.payload["latents"]))))
        return report

    def remembered(self) -> list[tuple[int, int, float]]:
        return self.trained


class Keeper(Engine):
    """A trainer whose state is a few numbers, of which it takes snapshots; alone or one of several ranks."""

    def __init__(self, num_floats: int = 50_000, ranks: dict[str, Any] | None = None) -> None:
        super().__init__(num_floats=num_floats)
        self.rank = int(ranks["rank"]) if ranks else 0
        self.state = array.array("d", [float(self.rank)]) * num_floats

    def commit(self, step: int, indices: tuple[int, ...]) -> CommitReport:
        self.state[0] += 1
        return super().commit(step, indices)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.version, (Payload({"state": self.state}),), 8 * len(self.state))

    def recall(self, snapshot: Snapshot) -> int:
        (payload,) = snapshot.payloads
        if payload["state"][1] != self.rank:
            raise CheckpointError(f"rank {self.rank} was given what rank {payload['state'][1]} wrote")
        self.state = array.array("d", payload["state"])
        self.version = int(self.state[0]) - self.rank
        return self.version


class Misc:
    """Whatever else a target may do."""

    def echo(self, *values: Any) -> list[Any]:
        return list(values)

    def environ(self) -> dict[str, str]:
        return dict(os.environ)

    def interpreter(self) -> tuple[str, list[str]]:
        return sys.prefix, sys.path

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def say(self, text: str) -> str:
        print(text)
        print(text, file=sys.stderr)
        os.write(1, text.encode())
        return text

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    def doze(self, path: str, seconds: float) -> str:
        """Leave a byte in a file and nap."""
        with Path(path).open("a") as file:
            file.write(".")
        return self.nap(seconds)

    def hold_interpreter(self, seconds: int) -> None:
        """C code that no other thread of Python can run beside."""
        ctypes.PyDLL(None).sleep(seconds)

    def spin(self, seconds: float) -> str:
        """Python code that never waits."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return "spun"

    def exhaust(self, limit_mib: int) -> None:
        """Take more memory than this process may have from now on."""
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + (limit_mib << 20), before[1]))
        try:
            held = [bytes(1 << 20)]
            while True:
                held.append(b"x" * (1 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    def be_killed_with(self, mib: int) -> None:
        """What a system does to a process that has taken too much."""
        held = b"x" * (mib << 20)
        os.kill(os.getpid(), signal.SIGKILL)
        del held

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    def wait_for(self, path: str) -> Payload:
        """Block until ``path`` exists."""
        while not Path(path).exists():
            time.sleep(0.005)
        return Payload({"late": b"payload"})

    def exit(self, code: int) -> None:
        sys.stderr.write("going \x1b[31mdown\x07\n")
        sys.stderr.flush()
        os._exit(code)

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def fail(self, kind: str) -> None:
        match kind:
            case "reward":
                raise RewardError("the judge said nothing")
            case "rude":
                raise ValueError("\x1b[2J\ud800\u202e")
            case "numerics":
                raise NumericsError("loss is nan")
            case "chained":
                try:
                    dict[str, str]()["inner"]
                except KeyError as error:
                    raise RuntimeError("outer") from error
        raise ValueError(kind)

    def leave_grandchild(self) -> int:
        """Die and leave a process behind that holds the worker's socket open."""
        os.set_inheritable(_FD, True)
        code = "import sys, time; sys.stdout.write('.'); sys.stdout.flush(); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-S", "-c", code], close_fds=False, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.read(1)
        Path(os.environ["GRANDCHILD"]).write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def write_raw(self, data: bytes) -> str:
        os.write(_FD, data)
        time.sleep(60)
        return "never"

    def close_socket(self) -> None:
        os.close(_FD)
        time.sleep(60)

    def make(self, num_bytes: int) -> Payload:
        return Payload({"a": bytes(num_bytes)})

    def make_many(self, number: int) -> list[Payload]:
        return [Payload({"a": bytes([index])}) for index in range(number)]

    def read(self, payload: Payload) -> dict[str, list[Any]]:
        return {name: [view.format, list(view.shape), bytes(view)] for name, view in payload.items()}

    def glance(self, payload: Payload) -> int:
        return len(payload)

    def spoil(self, payload: Payload) -> None:
        """Write to a segment of this worker after it was given away, as a bug might."""
        assert payload.ref is not None
        import gc
        import mmap

        for memory in gc.get_objects():
            if isinstance(memory, mmap.mmap) and len(memory) >= payload.ref.nbytes:
                memory[payload.ref.nbytes - 1] ^= 1

    def mappings(self) -> int:
        """Number of shared-memory segments that this process maps."""
        maps = Path("/proc/self/maps").read_text()
        return sum("memfd:digen" in line for line in maps.splitlines())

    def num_fds(self) -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def unencodable(self) -> object:
        return object()

    def huge(self) -> bytes:
        return bytes(20 << 20)


class Rank(Misc):
    """One of several processes that do the same commands. Its weights are a number."""

    def __init__(self, ranks: dict[str, Any], drift: int = 0, first: int = 0, birth: tuple[Any, ...] = ()) -> None:
        self.rank = int(ranks["rank"])
        self.spec = ranks
        self.drift = drift
        self.version = first * self.rank
        self.noted: list[Any] = []
        if birth:
            getattr(self, birth[0])(*birth[1:])

    def ranks(self) -> dict[str, Any]:
        return self.spec

    def note(self, value: Any) -> int:
        self.noted.append(value)
        return self.rank

    def notes(self) -> list[Any]:
        return self.noted

    def on(self, rank: int, method: str, *args: Any) -> str:
        """One rank does something, the others nothing."""
        if rank == self.rank:
            getattr(self, method)(*args)
        return "well"

    def meet(self, rank: int, method: str, *args: Any) -> str:
        """One rank does something while the others wait for it, as in a collective."""
        self.on(rank, method, *args)
        time.sleep(60)
        return "never"

    def together(self, rank: int, method: str, *args: Any) -> str:
        """One rank does something; the others fail with it, and earlier."""
        if rank == self.rank:
            time.sleep(0.1)
            getattr(self, method)(*args)
        raise RankFailed(f"rank {self.rank} had to give up")

    def commit(self, step: int, indices: tuple[int, ...]) -> CommitReport:
        self.version += 1
        return CommitReport(self.version, len(indices) + self.drift * self.rank)

    def restore(self, path: str) -> int:
        self.version = int(path) + self.drift * self.rank
        return self.version


class Collective:
    """Ranks that meet in torch.distributed."""

    def __init__(self, ranks: dict[str, Any]) -> None:
        from digen.diffusion.ranks import Ranks

        self.ranks = Ranks(ranks)

    def total(self, value: float, but: int = -1) -> float:
        """The sum of ``value`` over ranks, weighted by rank + 1; rank ``but`` does not come."""
        import torch

        if but == self.ranks.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        rows = self.ranks.gather(torch.tensor([value * (self.ranks.rank + 1)]))
        return 0.0 if rows is None else float(rows.sum())


class Deaf(Misc):
    """Does not care to be terminated."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def broken_constructor() -> None:
    raise RuntimeError("no model here")


def wrong_type() -> object:
    class Wrong:
        def generate(self, micro_batch: MicroBatch) -> dict[str, int]:
            return {"rollout": micro_batch.index}

    return Wrong()


def sleepy() -> None:
    time.sleep(60)


def holding() -> None:
    Misc().hold_interpreter(60)


def sleepy_rank(ranks: dict[str, Any]) -> None:
    time.sleep(60)


def dying() -> None:
    os._exit(7)


ready_made = Misc()
