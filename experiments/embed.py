"""Embedding: your engines, your loop, your logger. No process, no torch; runs in a second.

    python experiments/embed.py

The "model" is one number, the mean of a Gaussian; the reward says how near a sample is to 3. What matters is the shape:
any object with these methods is a handle. The schedule is the one that trains real models: TCSS with assists, a scorer
of its own, a generator that joins while the run goes on, and a drain.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Any

import digen

TARGET = 3.0


class Policy:
    """The weights: one number, and how many optimizer steps made it."""

    def __init__(self) -> None:
        self.mean = 0.0
        self.version = 0


class Generator:
    """Draws samples. A real one would call its inference engine here."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self._seconds = seconds
        self._policy = Policy()

    @property
    def version(self) -> int:
        """Optimizer steps in the weights held now."""
        return self._policy.version

    async def generate(self, micro_batch: digen.MicroBatch) -> digen.Rollout:
        """Draw every sample from its own seeded stream, so that any worker draws the same ones."""
        policy = self._policy
        samples = [random.Random(seed).gauss(policy.mean, 1.0) for seed in micro_batch.seeds("noise")]  # noqa: S311
        version = policy.version
        await asyncio.sleep(self._seconds)
        return digen.Rollout(micro_batch, version, policy.version, digen.Payload({"samples": samples}))

    async def load(self, publication: digen.Publication) -> digen.LoadReport:
        """Take over published weights."""
        self._policy.mean = publication.payload["mean"]
        self._policy.version = publication.version
        return digen.LoadReport(publication.version, hash(self._policy.mean), num_tensors=1)


class Scorer:
    """Judges samples; a real one might be an HTTP endpoint."""

    name = "judge"

    async def score(self, rollout: digen.Rollout) -> digen.Scored:
        """One finite reward per sample."""
        return digen.Scored(tuple(-abs(sample - TARGET) for sample in rollout.payload["samples"]))


class Trainer(Generator):
    """Trains, and assists because it can generate."""

    def __init__(self) -> None:
        super().__init__("trainer", seconds=0.004)
        self._gradient: dict[int, tuple[float, int]] = {}

    async def update(self, rollout: digen.Rollout, advantages: Sequence[float | None]) -> digen.UpdateReport:
        """Accumulate the policy gradient of a Gaussian's mean, unnormalised."""
        terms = [
            advantage * (sample - self._policy.mean)
            for advantage, sample in zip(advantages, rollout.payload["samples"], strict=True)
            if advantage is not None
        ]
        await asyncio.sleep(0.002)
        self._gradient[rollout.micro_batch.index] = (sum(terms), len(terms))
        return digen.UpdateReport(rollout.micro_batch.step, rollout.micro_batch.index, len(terms))

    async def commit(self, step: int, indices: Sequence[int]) -> digen.CommitReport:
        """Divide once by the step's denominator and step."""
        gradient, num_terms = (sum(column) for column in zip(*(self._gradient.pop(i) for i in indices), strict=True))
        self._policy.mean += 0.5 * gradient / num_terms
        self._policy.version = step + 1
        return digen.CommitReport(step + 1, int(num_terms))

    async def publish(self, version: int) -> digen.Publication:
        """Hand out the weights."""
        payload = digen.Payload({"mean": self._policy.mean})
        return digen.Publication(version, payload, checksum=hash(self._policy.mean), num_tensors=1, nbytes=8)


async def main() -> None:
    plan = digen.Plan(["a number"], num_steps=40, prompts_per_step=4, samples_per_prompt=16, seed=1)
    config = digen.ScheduleConfig(mode="tcss", window=2, stale_fraction=0.5, tag="threshold")
    published: list[int] = []
    seen: list[Any] = []
    async with digen.Scheduler(
        plan,
        generators=[Generator("gen0", seconds=0.003)],
        scorers=[Scorer()],
        trainer=Trainer(),
        config=config,
        sinks=[seen.append],
        on_publish=lambda publication: published.append(publication.version),
    ) as scheduler:
        async for step in scheduler:
            metrics = step.metrics()
            if step.index == 5:
                await scheduler.add_generator(Generator("gen1", seconds=0.003))
            if step.index % 5 == 0:
                print(
                    f"step {step.index:2}  reward {metrics['reward/mean']:+.3f}  "
                    f"stale {metrics['staleness/ratio']:.0%}  assists {metrics['tag/inserted']}"
                )
            if metrics["reward/mean"] > -0.85:
                scheduler.drain()  # good enough: finish the step that has begun and end
    print(f"{scheduler.outcome} after step {scheduler.step}: {len(seen)} events, published {len(published)} versions")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
