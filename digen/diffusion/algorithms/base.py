"""What all algorithms share: how samples are drawn for them, and what a term of their loss is.

A *term* is an item at one transition: an item is a sample, or a tuple of samples that are compared. The learner cuts
the terms of a micro-batch into forwards of one shape, asks the algorithm for their losses and adds up gradients. An
algorithm of another package subclasses :class:`TrajectoryAlgorithm` (it has log-probabilities) or
:class:`SampleAlgorithm` (it noises samples itself), sets ``declaration`` and writes what differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from digen.config import RunConfig
from digen.diffusion import algorithms
from digen.diffusion.algorithms.declaration import Declaration, resolve
from digen.diffusion.families.base import Conditioning, Family, Schedule
from digen.diffusion.kernels import KERNELS
from digen.diffusion.losses import clipped_policy_loss, element_mean, gaussian_kl
from digen.diffusion.optim import WeightCopy
from digen.diffusion.process import noised, process_of
from digen.diffusion.sampler import sample_clean, sample_sde
from digen.diffusion.schedule import trained_steps
from digen.diffusion.sde import STEPS, StepDistribution
from digen.diffusion.seeds import TRAINED_STEPS, TRAINING_NOISE, draw, streams
from digen.diffusion.trajectories import Trajectories
from digen.errors import ConfigError, InvariantViolation, NumericsError
from digen.types import MicroBatch

Item = tuple[int, ...]
"""Rows of a micro-batch that make terms together; usually one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch on which is trained."""

    micro_batch: MicroBatch
    trajectories: Trajectories
    names: list[str]
    """Of the samples, for errors."""
    advantages: Tensor
    """``(n,)``; 0 for samples that are left out."""
    items: list[Item]
    steps: list[list[int]]
    """The transitions of every item's terms, equally many each."""
    recompute: bool
    """Whether old log-probabilities and means are those of the forward itself."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The terms of one forward: every item at every one of its transitions. The last of both may be padding."""

    batch: Batch
    items: list[Item]
    steps: list[list[int]]
    """``k`` transitions of every item."""
    numbers: list[int]
    """Which of an item's terms they are."""

    @property
    def rows(self) -> list[int]:
        """The rows of the items, one after the other."""
        return [row for item in self.items for row in item]

    def pairs(self) -> tuple[list[int], list[int]]:
        """Row and transition of everything that the network sees, row by row."""
        rows, steps = [], []
        for item, own in zip(self.items, self.steps, strict=True):
            for row in item:
                rows += [row] * len(own)
                steps += own
        return rows, steps

    def conditioning(self, rows: Sequence[int], device: torch.device) -> Conditioning:
        """The encoded prompts of ``rows``."""
        return {name: tensor[list(rows)].to(device) for name, tensor in self.batch.trajectories.conditioning.items()}

    def advantages(self, device: torch.device) -> Tensor:
        """``(rows, 1)``."""
        return self.batch.advantages[self.rows][:, None].to(device)

    def check_finite(self, values: Tensor, what: str) -> None:
        """Check ``(items, k)`` values.

        Raises:
            NumericsError: one is not finite; names its sample and transition.
        """
        finite = torch.isfinite(values.detach())
        if not bool(finite.all()):
            item, term = (int(i) for i in (~finite).nonzero()[0])
            raise NumericsError(
                f"the {what} of sample {self.batch.names[self.items[item][0]]} at denoising step "
                f"{self.steps[item][term]} is not finite; "
                "the policy has diverged: lower optimizer.lr, or go back to an earlier checkpoint"
            )


@dataclass(frozen=True, slots=True)
class Losses:
    """What a forward gave."""

    loss: Tensor
    """``(items, k)``, with a gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """``(items, k)`` by name; the mean over a micro-batch is reported, the largest if the name ends in ``max``."""


class Algorithm:
    """How samples are drawn and what is minimised on them.

    Args:
        config: the run's.

    Raises:
        ConfigError: an option is unknown or wrong, or the sampler cannot serve the algorithm.
    """

    declaration: ClassVar[Declaration]

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.settings = resolve(config.algorithm.name, self.declaration, config)

    @property
    def needs_reference(self) -> bool:
        """Whether training needs the model as it was before: :meth:`Family.reference`."""
        return self.settings.kl_weight > 0

    def check_schedule(self, schedule: Schedule) -> None:
        """Check that it can train models with this schedule.

        Raises:
            ConfigError: it cannot, or the levels are not those of a schedule.
        """
        process, kernel = process_of(schedule.levels), self.settings.kernel
        wanted = self.declaration.processes if kernel is None else (KERNELS[kernel].process,)
        if process not in wanted:
            raise ConfigError(
                f"family {self.config.model.family!r} is a {process} model; {self.config.algorithm.name} as "
                f"configured trains {' and '.join(wanted)} models"
            )

    # Drawing

    def draw(
        self, family: Family, micro_batch: MicroBatch, conditioning: Conditioning, schedule: Schedule, *, unit: int
    ) -> Trajectories:
        """Draw every sample of a micro-batch with the weights that ``family`` holds, ``unit`` of them a forward."""
        raise NotImplementedError

    # Training

    def begin(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Called once in a trainer, before anything else of this part."""

    def items(self, micro_batch: MicroBatch, rows: Sequence[int], advantages: Sequence[float | None]) -> list[Item]:
        """What is trained on of the ``rows`` that have an advantage."""
        return [(row,) for row in rows]

    def items_per_forward(self, unit: int, micro_batch: MicroBatch) -> int:
        """Items of a forward of ``unit`` samples; depends on the plan alone, so that all forwards have one shape."""
        return unit

    def trained_steps(self, micro_batch: MicroBatch, items: Sequence[Item], num_steps: int) -> list[list[int]]:
        """The transitions of every item's terms, equally many each."""
        raise NotImplementedError

    def losses(self, family: Family, forward: Forward) -> Losses:
        """The losses of a forward's terms."""
        raise NotImplementedError

    def tolerance(self) -> tuple[str, float] | None:
        """Name and size of what :meth:`drift` must stay far below; ``None`` where nothing is replayed."""
        return None

    def drift(self, family: Family, forward: Forward) -> Tensor:
        """``(items, k)``: how far the replay of a fresh trajectory seems to have moved, although nothing has."""
        raise NotImplementedError

    # Weights beside the trained ones

    def held(self) -> WeightCopy | None:
        """Weights that belong to the state of training; a checkpoint holds them."""
        return None

    def committed(self, version: int, parameters: Mapping[str, Tensor]) -> None:
        """The optimizer made ``version`` of the parameters."""

    def published_parameters(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What generators sample with; the trained parameters unless the algorithm says otherwise."""
        return parameters

    def sampling_weights(self, parameters: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Inside, the trainer's model has the weights that generators have."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a trajectory algorithm, for its :meth:`TrajectoryAlgorithm.policy_loss`."""

    log_prob: Tensor
    """``(n, k)`` under the policy that is trained."""
    old_log_prob: Tensor
    """``(n, k)``, a constant."""
    recorded_log_prob: Tensor
    """``(n, k)`` when the trajectory was drawn; the old one unless that is recomputed."""
    advantage: Tensor
    """``(n, 1)``, not clamped."""
    mean: Tensor
    """``(n, k, ...)`` of the transition under the policy that is trained."""
    old_mean: Tensor | None
    """The same under the old one, where the declaration asks for ``means``."""
    std: Tensor
    """``(n, k)``: the full standard deviation of the transition."""
    step_size: Tensor
    """``(n, k)``: by how much the level falls, -dt of a flow."""

    @property
    def log_ratio(self) -> Tensor:
        """``(n, k)`` of the policy that is trained to the old one."""
        return self.log_prob - self.old_log_prob

    @property
    def divergence(self) -> Tensor:
        """``(n, k)`` KL of the transition from the old one, with a gradient."""
        if self.old_mean is None:
            raise InvariantViolation("the trajectories carry no means: the algorithm must declare that it needs them")
        return gaussian_kl(self.mean, self.old_mean, self.std)


class TrajectoryAlgorithm(Algorithm):
    """Trained on the log-probabilities of noisy transitions; as it stands PPO's clipped loss."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        if self.settings.kernel is None:
            raise ConfigError(f"algorithm {config.algorithm.name!r} is trained on trajectories but declares no kernel")
        self.kernel = self.settings.kernel
        """How a noisy transition is drawn."""

    def noisy_steps(self, micro_batch: MicroBatch, num_steps: int) -> Sequence[int]:
        """The transitions with noise, of all of a step's samples alike."""
        return range(num_steps if KERNELS[self.kernel].ends_noisy else num_steps - 1)

    def draw(
        self, family: Family, micro_batch: MicroBatch, conditioning: Conditioning, schedule: Schedule, *, unit: int
    ) -> Trajectories:
        """Trajectories with log-probabilities."""
        return sample_sde(
            family,
            micro_batch,
            conditioning,
            schedule,
            noise_level=self.settings.noise_level,
            unit=unit,
            kernel=self.kernel,
            noisy=self.noisy_steps(micro_batch, schedule.num_steps),
            solver=self.config.sampling.solver,
            shared_noise=self.settings.options.shared_noise,
            keep_means=self.declaration.means,
        )

    def trained_steps(self, micro_batch: MicroBatch, items: Sequence[Item], num_steps: int) -> list[list[int]]:
        """The first noisy transitions, as many as ``algorithm.timestep_fraction`` says."""
        noisy = self.noisy_steps(micro_batch, num_steps)
        count = trained_steps(num_steps, self.settings.timestep_fraction, len(noisy))
        return [list(noisy[:count])] * len(items)

    def policy_loss(self, terms: Terms) -> Tensor:
        """``(n, k)``: what is minimised beside the KL."""
        settings = self.settings
        return clipped_policy_loss(
            self.log_ratio(terms),
            terms.advantage,
            clip_range=settings.clip_range,
            advantage_clip=settings.advantage_clip,
        )

    def log_ratio(self, terms: Terms) -> Tensor:
        """``(n, k)``: the logarithm of the ratio that the loss takes."""
        return terms.log_ratio

    def clipped(self, terms: Terms) -> Tensor:
        """``(n, k)``: whether the ratio has left its bounds."""
        return (self.log_ratio(terms).exp() - 1).abs() > self.settings.clip_range

    def losses(self, family: Family, forward: Forward) -> Losses:
        """The policy loss, and the KL to the model before training where it has a weight."""
        weight = self.settings.kl_weight
        reference = self._reference_means(family, forward) if weight else None
        terms = self._terms(family, forward)
        loss = self.policy_loss(terms)
        with torch.no_grad():
            log_ratio = self.log_ratio(terms)
            metrics = {
                "loss/policy": loss.detach(),
                "ratio/mean": log_ratio.exp(),
                "ratio/max": log_ratio.exp(),
                "ratio/abs_logp_diff_max": (terms.log_prob - terms.recorded_log_prob).abs(),
                "clip_fraction": self.clipped(terms).double(),
                "approx_kl": log_ratio.square() / 2,
            }
        if reference is not None:
            divergence = gaussian_kl(terms.mean, reference, terms.std)
            if self.config.algorithm.kl == "flow_grpo":
                divergence = divergence * terms.step_size
            loss = loss + weight * divergence
            metrics["loss/kl"] = divergence.detach()
        return Losses(loss, metrics)

    def tolerance(self) -> tuple[str, float] | None:
        """The clip range."""
        clip = self.settings.clip_range
        return ("algorithm.clip_range", clip) if math.isfinite(clip) else None

    def drift(self, family: Family, forward: Forward) -> Tensor:
        """How far the logarithm of the ratio is from 0."""
        return self.log_ratio(self._terms(family, forward)).abs()

    def _terms(self, family: Family, forward: Forward) -> Terms:
        batch, device = forward.batch, family.device
        shape = (len(forward.rows), len(forward.numbers))
        rows, steps = forward.pairs()
        chains, recorded = batch.trajectories, batch.trajectories.log_probs
        if recorded is None:
            raise InvariantViolation("the rollout carries samples alone, but the algorithm is trained on trajectories")
        following = [step + 1 for step in steps]
        transition = self._transition(family, forward)
        log_prob = transition.log_prob(chains.latents[rows, following].to(device)).reshape(shape)
        recorded = recorded[rows, steps].reshape(shape).to(device)
        forward.check_finite(log_prob, "log-probability")
        forward.check_finite(recorded, "recorded log-probability")
        mean = _by_term(transition.mean, shape)
        old_mean = None
        if chains.means is not None:
            old_mean = mean.detach() if batch.recompute else _by_term(chains.means[rows, steps].to(device), shape)
        return Terms(
            log_prob=log_prob,
            old_log_prob=log_prob.detach() if batch.recompute else recorded,
            recorded_log_prob=recorded,
            advantage=forward.advantages(device),
            mean=mean,
            old_mean=old_mean,
            std=transition.std.reshape(shape),
            step_size=(chains.levels[steps] - chains.levels[following]).reshape(shape).to(device),
        )

    @torch.no_grad()
    def _reference_means(self, family: Family, forward: Forward) -> Tensor:
        with family.reference():
            mean = self._transition(family, forward).mean
        return _by_term(mean, (len(forward.rows), len(forward.numbers)))

    def _transition(self, family: Family, forward: Forward) -> StepDistribution:
        """Of all of a forward's terms, from one call of the network."""
        device, chains = family.device, forward.batch.trajectories
        rows, steps = forward.pairs()
        latents = chains.latents[rows, steps].to(device)
        levels, times = chains.levels.to(device), chains.times.to(device)
        output = family.predict(latents, times[steps], forward.conditioning(rows, device))
        return STEPS[self.kernel](
            latents,
            output,
            levels[steps],
            levels[[step + 1 for step in steps]],
            second_level=levels[1],
            noise_level=self.settings.noise_level,
        )


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
        return _by_term(output.to(self.noisy.dtype), self.level.shape)


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
            clean=_by_term(clean, shape),
            noise=_by_term(noise, shape),
            noisy=_by_term(noisy, shape),
            level=level.reshape(shape),
            times=chains.times.to(device)[steps],
            conditioning=forward.conditioning(rows, device),
        )


def random_subsets(seeds: Sequence[int], of: Sequence[int], count: int) -> list[list[int]]:
    """``count`` of the numbers ``of`` for every seed, each subset in rising order."""
    permutations = [torch.randperm(len(of), generator=stream).tolist() for stream in streams(seeds)]
    return [sorted(of[place] for place in permutation[:count]) for permutation in permutations]


def mean_squared_error(values: Tensor, target: Tensor) -> Tensor:
    """``(n, k)`` of ``(n, k, ...)``."""
    return element_mean((values - target).square())


def _by_term(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What belongs to the pairs of a forward, as ``(rows, k, ...)``."""
    return values.reshape(*shape, *values.shape[1:])


def build_algorithm(config: RunConfig) -> Algorithm:
    """Import and construct the algorithm of a config.

    Raises:
        ConfigError: there is none of that name, it cannot be imported or is no algorithm, or its options are wrong.
    """
    target = algorithms.lookup(config.algorithm.name).target
    module, _, attribute = target.partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except Exception as error:
        raise ConfigError(f"algorithm {target!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Algorithm) and hasattr(kind, "declaration")):
        raise ConfigError(f"algorithm {target!r} is not a subclass of Algorithm with a declaration")
    return kind(config)
