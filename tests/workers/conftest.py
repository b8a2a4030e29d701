"""Real worker processes, and proof that a test left nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from digen import GroupSlice, MicroBatch, ProcessWorker, Prompt

HERE = str(Path(__file__).parent)


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., ProcessWorker]:
    """Make a worker whose target is in ``targets.py``, with its log in the test's directory."""

    def make(name: str = "w", target: str = "Misc", **options: Any) -> ProcessWorker:
        env = {"PYTHONPATH": HERE, **options.pop("env", {})}
        options.setdefault("log_dir", tmp_path)
        return ProcessWorker(name, f"targets:{target}", env=env, **options)

    return make


@pytest.fixture
def micro_batch() -> MicroBatch:
    piece = GroupSlice("s3p0", Prompt("a red cube", {"colour": "red"}), 0, 2, 4)
    return MicroBatch(run_seed=1, step=3, index=5, slices=(piece,))


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_left_alone() -> Iterator[None]:
    """The collections below take no time: they look at nothing that other tests have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail the test if it leaves descriptors, threads or child processes."""
    gc.collect()
    before = _resources()
    yield
    gc.collect()
    assert _resources() == before


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Wait until a process has ended. A zombie that it is not ours to reap has ended."""

    def check(pid: int) -> bool:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    return True
            except psutil.NoSuchProcess:
                return True
            time.sleep(0.01)
        return False

    return check


def _resources() -> dict[str, Any]:
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": sorted(t.name for t in threading.enumerate() if not t.name.startswith("asyncio_")),
        "children": psutil.Process(os.getpid()).children(recursive=True),
    }
