"""Targets of ``omni.py``: what it measures inside the workers, since the driver holds no tensor."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from digen.diffusion.engines.samples import requests
from digen.diffusion.engines.vllm_omni import VllmOmniGenerator
from digen.types import MicroBatch, Publication


class QueueingGenerator(VllmOmniGenerator):
    """A generator on vLLM-Omni of which more can be asked at once than it draws at once."""

    def load_between(self, micro_batches: Any, published: Any) -> list[tuple[int, int]]:
        """Load while some samples run and others wait; returns each one's version at its first and last step."""

        async def together() -> list[tuple[int, int]]:
            tasks = []
            for micro_batch in (msgspec.convert(each, MicroBatch) for each in micro_batches):
                encoded = await self._conditioning(micro_batch, None)
                for row, sample in enumerate(requests(self._algorithm, micro_batch, self._schedule, unit=self._unit)):
                    own = {name: tensor[row : row + 1] for name, tensor in encoded.items()}
                    tasks.append(asyncio.create_task(self._request(sample, own)))
            await tasks[0]
            await self._load(Publication(*published))
            records = [await task for task in tasks]
            return [(record["version"], record["version_end"]) for record in records]

        return self._loop.run(together())


def load_comparing() -> type:
    """The class of the other generator; made here because the engine's interpreter need not have all it imports."""
    from digen.diffusion.roles import GeneratorTarget

    class ComparingGenerator(GeneratorTarget):
        """A generator on diffusers that also compares rollouts."""

        def compare(self, one: Any, other: Any) -> dict[str, float]:
            """The largest differences of latents and log-probabilities, and of the prompts' encodings."""
            found = {}
            for name in ("latents", "log_probs"):
                first, second = np.asarray(one[name]), np.asarray(other[name])
                found[name] = float(np.nanmax(np.abs(first - second)))
            return found

        def compare_encoded(self, one: Any, other: Any) -> float:
            """The largest difference of encodings, relative to the largest of them."""
            differences = []
            for name in one:
                first, second = (np.asarray(each[name]).astype(np.float64) for each in (one, other))
                differences.append(float(np.abs(first - second).max() / max(1e-30, np.abs(first).max())))
            return max(differences)

    return ComparingGenerator


def comparing(**kwargs: Any) -> Any:
    """A :class:`ComparingGenerator`."""
    return load_comparing()(**kwargs)
