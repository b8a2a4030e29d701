"""What all algorithms share: how samples are drawn for them, and what a term of their loss is.

A *term* is an item at one transition: an item is a sample, or a tuple of samples that are compared. The learner cuts
the terms of a micro-batch into forwards of one shape, asks the algorithm for their losses and adds up gradients. An
algorithm of another package subclasses :class:`~digen.diffusion.algorithms.trajectory.TrajectoryAlgorithm` (it has
log-probabilities) or :class:`~digen.diffusion.algorithms.sample.SampleAlgorithm` (it noises samples itself), sets
``declaration`` and writes what differs.
"""

from __future__ import annotations

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
from digen.diffusion.optim import WeightCopy
from digen.diffusion.process import process_of
from digen.diffusion.trajectories import Trajectories
from digen.errors import ConfigError, NumericsError
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
        """Draw every sample of a micro-batch with the weights that ``family`` holds, ``unit`` of them a forward.

        A rank of several gets what it draws as a micro-batch of its own, in which a sample may come twice. What is
        drawn of a sample must follow from its seeds alone, and the number of forwards from the number of samples.
        """
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


def by_term(values: Tensor, shape: tuple[int, ...]) -> Tensor:
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
