"""How long a 64 MiB rollout takes from a generator to a trainer, against a plain copy of the same array.

Run ``python experiments/transport.py [--json PATH]`` on an idle machine; it takes about 10 s. Expected: about one
memcpy with reused segments, about two with checksums, and from ten to over sixty with a new segment each time, because
its pages have to be made.

The generator stamps the monotonic clock, which processes share, before it hands out the finished array; the trainer
stamps it when it holds the view. The clock covers the copy into shared memory, both messages and the driver.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from digen import Payload, ProcessWorker

NUM_FLOATS = 16 << 20
"""64 MiB of float32."""


class Source:
    """Hands out the same finished array again and again, and times a plain copy of it."""

    def __init__(self) -> None:
        self._array = np.arange(NUM_FLOATS, dtype=np.float32)
        self._copy = np.zeros_like(self._array)

    def memcpy(self) -> float:
        """Seconds that a plain copy takes."""
        start = time.monotonic()
        np.copyto(self._copy, self._array)
        return time.monotonic() - start

    def hand_out(self) -> list[Any]:
        """The time, and the array."""
        return [time.monotonic(), Payload({"latents": self._array})]


class Sink:
    """Takes a view of what it is given."""

    def take(self, payload: Payload) -> float:
        """The time at which the array can be read."""
        view = np.asarray(payload["latents"])
        now = time.monotonic()
        if view.shape != (NUM_FLOATS,) or view[0] != 0 or view[-1] != NUM_FLOATS - 1:
            raise ValueError("the array did not arrive as it was sent")
        return now


async def measure(*, checksums: bool = False, reuse: bool = True, rounds: int = 25, warm_up: int = 3) -> list[float]:
    """Ratios of hand-over to memcpy, measured side by side.

    Args:
        checksums: verify each payload.
        reuse: release each payload before the next; else every one needs a new segment.
        rounds: number of ratios.
        warm_up: rounds before them.
    """
    ratios = []
    held = []
    async with (
        ProcessWorker("source", "transport:Source", checksums=checksums) as source,
        ProcessWorker("sink", "transport:Sink") as sink,
    ):
        for index in range(warm_up + rounds):
            memcpy_s = await source.call("memcpy")
            sent, payload = await source.call("hand_out")
            arrived = await sink.call("take", payload)
            if reuse:
                source.release(payload)
            else:
                held.append(payload)
            if index >= warm_up:
                ratios.append((arrived - sent) / memcpy_s)
    return ratios


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the ratios here")
    options = parser.parse_args()
    cases: dict[str, dict[str, Any]] = {
        "reused segment": {},
        "reused segment, checksums": {"checksums": True},
        "new segment each time": {"reuse": False, "rounds": 15, "warm_up": 1},
    }
    results = {name: quartiles(asyncio.run(measure(**case))) for name, case in cases.items()}
    print(f"{'64 MiB, generator to trainer':<32}{'x memcpy':>10}   quartiles")
    for name, (low, middle, high) in results.items():
        print(f"{name:<32}{middle:>10.2f}   {low:.2f} to {high:.2f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
