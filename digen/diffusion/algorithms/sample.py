"""Algorithms that are trained on samples, which they noise themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from digen.diffusion.algorithms.base import Algorithm, Forward, Item, by_term
from digen.diffusion.families.base import Conditioning, Family, Schedule
from digen.diffusion.process import noised, process_of
from digen.diffusion.sampler import sample_clean
from digen.diffusion.schedule import trained_steps
from digen.diffusion.seeds import TRAINED_STEPS, TRAINING_NOISE, draw, random_subsets, streams
from digen.diffusion.trajectories import Trajectories
from digen.types import MicroBatch


@dataclass(frozen=True, slots=True)
class NoisedSamples:
    """Clean samples and what they become at the levels of a forward's terms."""

    clean: Tensor
    """``(rows, k, ...)``."""
    noise: Tensor
    """As they were noised with."""
    noisy: Tensor
    """What the network sees."""
    level: Tensor
    """``(rows, k)``."""
    times: Tensor
    """``(rows * k,)``: what the network is told."""
    conditioning: Conditioning

    def predict(self, family: Family) -> Tensor:
        """The network's prediction, ``(rows, k, ...)``, at least float32."""
        output = family.predict(self.noisy.flatten(0, 1), self.times, self.conditioning)
        return by_term(output.to(self.noisy.dtype), self.level.shape)


class SampleAlgorithm(Algorithm):
    """Trained on samples that it noises itself: any solver may have drawn them, and nothing is replayed."""

    def draw(
        self, family: Family, micro_batch: MicroBatch, conditioning: Conditioning, schedule: Schedule, *, unit: int
    ) -> Trajectories:
        """Samples alone."""
        return sample_clean(family, micro_batch, conditioning, schedule, unit=unit, solver=self.config.sampling.solver)

    def noise_seeds(self, micro_batch: MicroBatch, purpose: str) -> list[int]:
        """One seed a row, for the draws of training."""
        return micro_batch.seeds(purpose)

    def trained_steps(self, micro_batch: MicroBatch, items: Sequence[Item], num_steps: int) -> list[list[int]]:
        """A random subset of the transitions, another one for every item."""
        count = trained_steps(num_steps, self.settings.timestep_fraction, num_steps)
        seeds = self.noise_seeds(micro_batch, TRAINED_STEPS)
        return random_subsets([seeds[item[0]] for item in items], range(num_steps), count)

    def noise_samples(self, family: Family, forward: Forward) -> NoisedSamples:
        """The samples of a forward at the levels of its terms."""
        batch, device = forward.batch, family.device
        shape = (len(forward.rows), len(forward.numbers))
        rows, steps = forward.pairs()
        chains = batch.trajectories
        clean = chains.latents[rows, [-1] * len(rows)].to(device)
        by_number = {
            number: self.noise_seeds(batch.micro_batch, f"{TRAINING_NOISE}/{number}") for number in forward.numbers
        }
        seeds = [by_number[number][row] for row in forward.rows for number in forward.numbers]
        noise = draw(streams(seeds), tuple(clean.shape[1:])).to(clean)
        level = chains.levels.to(device)[steps]
        noisy = noised(clean, noise, level, process_of(chains.levels))
        return NoisedSamples(
            clean=by_term(clean, shape),
            noise=by_term(noise, shape),
            noisy=by_term(noisy, shape),
            level=level.reshape(shape),
            times=chains.times.to(device)[steps],
            conditioning=forward.conditioning(rows, device),
        )
