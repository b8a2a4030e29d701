"""What this machine has, as far as it shows without loading torch: GPUs, cores, memory, shared memory, descriptors."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.used", "--format=csv,noheader,nounits")
_QUERY_S = 10.0
_TORCH = """
import torch
for index in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(index)
    print(index, "-", found.name, found.total_memory >> 20, 0, sep=", ")
"""
_TORCH_S = 60.0
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""Of the drivers of NVIDIA and AMD."""
SHM = Path("/dev/shm")  # noqa: S108 - it is only measured
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that a worker can be given."""

    name: str
    memory_mib: int
    used_mib: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use."""

    gpus: tuple[Gpu, ...]
    """In the order in which ``workers.gpus`` numbers them."""
    gpus_from: str
    """Who said so, or why there are none."""
    num_cores: int
    memory: int
    """Bytes in all, of the machine or the container."""
    available: int
    """Bytes that new processes can have, shared memory of the workers included."""
    shm_total: int
    """Bytes of ``/dev/shm``, which NCCL and vLLM use; the workers' own segments are not in it. 0: there is none."""
    shm_free: int
    num_files: int
    """Descriptors that a process may have open."""


def look() -> Machine:
    """What there is now. Takes as long as ``nvidia-smi``; where only torch knows the GPUs, seconds."""
    gpus, gpus_from = _gpus()
    memory, available = _memory()
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        gpus=gpus,
        gpus_from=gpus_from,
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=memory,
        available=available,
        shm_total=shm.total if shm is not None else 0,
        shm_free=shm.free if shm is not None else 0,
        num_files=files,
    )


def visible(gpus: Mapping[str, Gpu], uuids: Mapping[str, str], devices: str) -> tuple[Gpu, ...]:
    """What CUDA shows of ``gpus``, by index, under ``CUDA_VISIBLE_DEVICES``: it ends at the first that is none.

    ``uuids`` has the index of each UUID, by the beginning of which a device may be named, too.
    """
    shown = []
    for device in (word.strip() for word in devices.split(",")):
        named = [index for uuid, index in uuids.items() if device and uuid.startswith(device)]
        index = device if device in gpus else named[0] if len(named) == 1 else None
        if index is None:
            break
        shown.append(gpus[index])
    return tuple(shown)


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    if shutil.which(_QUERY[0]) is not None:
        lines = _lines(_QUERY, _QUERY_S)
        if lines is None:
            return (), "nvidia-smi failed: the NVIDIA driver does not work"
        rows = [[part.strip() for part in line.split(",")] for line in lines]
        gpus = {row[0]: Gpu(row[2], _number(row[3]), _number(row[4])) for row in rows if len(row) == 5}
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        if devices is None:
            return tuple(gpus.values()), "nvidia-smi"
        shown = visible(gpus, {row[1]: row[0] for row in rows if len(row) == 5}, devices)
        return shown, f"nvidia-smi, of whose {len(gpus)} CUDA_VISIBLE_DEVICES={devices} shows {len(shown)}"
    if not any(map(Path.exists, _DEVICES)):
        return (), "there is no driver: neither nvidia-smi nor /dev/kfd"
    lines = _lines((sys.executable, "-c", _TORCH), _TORCH_S)
    if lines is None:
        return (), "there is a driver, but neither nvidia-smi nor torch tells what of"
    rows = [[part.strip() for part in line.split(",")] for line in lines]
    return tuple(Gpu(row[2], _number(row[3]), _number(row[4])) for row in rows if len(row) == 5), "torch"


def _lines(command: tuple[str, ...], timeout_s: float) -> list[str] | None:
    try:
        done = subprocess.run(  # noqa: S603 - constant commands
            command, capture_output=True, text=True, errors="replace", check=False, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0  # "[N/A]" where memory is the host's


def available_memory() -> int:
    """Bytes of memory that are left; a container's limit counts."""
    return _memory()[1]


def _memory() -> tuple[int, int]:
    """Memory in all and what is available, in bytes; a container's limits count."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        total, available = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # no cgroup of version 2, or "max"
        return total, available
    counts = dict(line.split() for line in lines)
    used -= sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))  # it gives back what it read
    return min(total, limit), min(available, max(limit - used, 0))
