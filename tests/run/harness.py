"""Runs of the embedded digits model as small as they get, as a user starts them: ``python -m digen.cli``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml
from safetensors.numpy import load_file

from digen.config import RunConfig, load_config
from digen.events import AnyEvent, read_events

PLUGINS = Path(__file__).parent / "plugins"

TINY: dict[str, Any] = {
    "run.num_steps": 4,
    "run.seed": 1,
    "plan.prompts_per_step": 3,
    "plan.samples_per_prompt": 4,
    "plan.micro_batch_size": 2,  # a group is two micro-batches
    "sampling.num_inference_steps": 3,
    "optimizer.ema_decay": 0.9,
    "reward.name": "run_rewards:brightness",
    "checkpoint.every": 1,
    "checkpoint.keep": 10,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "observe.preview_every": 0,
    "schedule.mode": "gap",
}
PAUSE_S = 0.15
"""Of a slow reward: a step then takes a second, so that a signal lands in the middle of one."""


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint (weights, optimizer state, moving average), bit for bit."""
    found: dict[str, bytes] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        found |= {f"{path.stem}/{name}": array.tobytes() for name, array in load_file(path).items()}
    return found


def workers_of(pid: int) -> list[psutil.Process]:
    """Every worker process that process ``pid`` started and that lives, whoever its parent is now."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if "digen.workers.child" in (words := process.info["cmdline"] or [])
        and words[words.index("digen.workers.child") + 2] == str(pid)
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


class Command:
    """One ``digen`` process."""

    def __init__(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._out = (folder / "stdout").open("w+", encoding="utf-8")
        self._err = (folder / "stderr").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "digen.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    @property
    def stdout(self) -> str:
        return Path(self._out.name).read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return Path(self._err.name).read_text(encoding="utf-8")

    def wait(self, timeout_s: float = 90.0) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, (self.stdout, self.stderr)
            assert self.process.poll() is None, (self.stdout, self.stderr)
            time.sleep(0.01)

    def wait_for_line(self, start: str) -> None:
        """Wait until a line that begins with ``start`` is on stdout."""
        self.wait_until(lambda: any(line.startswith(start) for line in self.stdout.splitlines()))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def worker(self, name: str) -> psutil.Process:
        """The process of a worker, known by the log that it writes to."""
        for process in self.workers():
            log = Path(f"/proc/{process.pid}/fd/1").readlink()
            if log.name.startswith(f"{name}."):
                return process
        raise AssertionError(f"no worker {name}: {self.workers()}")

    def workers(self) -> list[psutil.Process]:
        """Every worker process that this command started and that lives, whoever its parent is now."""
        return workers_of(self.process.pid)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._out.close()
        self._err.close()


class Site:
    """A folder in which ``digen`` is run, and what it leaves there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commands: list[Command] = []

    def config(self, **values: Any) -> RunConfig:
        """:data:`TINY` with changes, for use in this process; ``run__name="a"`` stands for ``run.name``."""
        dotted = {name.replace("__", "."): value for name, value in values.items()}
        return load_config(None, {"run.output": str(self.folder / "runs"), **TINY, **dotted})

    def start(self, *arguments: str, environment: dict[str, str] | None = None, **values: Any) -> Command:
        """Start ``digen train`` on :data:`TINY` with changes; ``arguments`` follow the config."""
        dotted = {**TINY, **{name.replace("__", "."): value for name, value in values.items()}}
        data: dict[str, Any] = {}
        for name, value in dotted.items():
            section, field = name.split(".")
            data.setdefault(section, {})[field] = value
        folder = self.folder / f"command{len(self._commands)}"
        folder.mkdir()
        (self.folder / "tmp").mkdir(exist_ok=True)
        data["run"]["output"] = "../runs"
        (folder / "config.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
        return self._run(["train", "config.yaml", *arguments], folder, environment or {})

    def call(self, *arguments: str, environment: dict[str, str] | None = None) -> Command:
        """Run any ``digen`` command to its end."""
        folder = self.folder / f"command{len(self._commands)}"
        folder.mkdir()
        command = self._run(list(arguments), folder, environment or {})
        command.wait()
        return command

    def _run(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> Command:
        paths = os.pathsep.join([str(PLUGINS), str(Path(__file__).parents[2])])
        temporary = {"TMPDIR": str(self.folder / "tmp")}
        command = Command(arguments, folder, {"PYTHONPATH": paths, **temporary, **environment})
        self._commands.append(command)
        return command

    def run_folder(self, name: str = "digits") -> Path:
        return self.folder / "runs" / name

    def events(self, name: str = "digits") -> list[AnyEvent]:
        return list(read_events(self.run_folder(name) / "events.jsonl"))

    def checkpoint(self, version: int, name: str = "digits") -> Path:
        return self.run_folder(name) / "checkpoints" / f"step-{version:06d}"

    def tensors(self, version: int = 4, name: str = "digits") -> dict[str, bytes]:
        return tensors_of(self.checkpoint(version, name))

    def close(self) -> None:
        """Nothing that a command started may outlive it, on disk, in shared memory or as a process."""
        for command in self._commands:
            command.close()
            assert not psutil.wait_procs(command.workers(), timeout=5)[1]
        left = {path.name for path in (self.folder / "tmp").glob("*")}
        assert {name for name in left if not name.startswith("torchinductor_")} == set()
        assert not list(Path("/dev/shm").glob("*digen*"))  # noqa: S108 - that nothing is there is the point
