"""Groups: rewards arrive in any order, advantages leave when they are final (paper 2.1 and Algorithm 1).

A group is complete when the last reward of its samples has arrived; only then are its advantages computed, never from
a part of it. Best-of-N selects after that, from the advantages of the whole group and for each uid on its own. A
micro-batch is ready for its update when all of its groups are complete, so that the micro-batches of a group become
ready together.

Advantages follow Flow-GRPO: ``A_i = (r_i - mean) / (std + epsilon)`` with the group's mean and either the
group's own standard deviation (``per_prompt``) or that of all rewards of the step (``global_std``). A group whose
rewards are all equal gets exactly 0.0. The arithmetic depends on the rewards only, never on their order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from digen.errors import InvariantViolation, PlanError, RewardError
from digen.types import MicroBatch

if TYPE_CHECKING:
    from digen.config import AdvantageSection


_LARGEST = 1e150


class CompletedGroup(Struct, frozen=True):
    """A group whose advantages are known."""

    uid: str
    reward_mean: float
    reward_std: float
    """The group's own standard deviation, with the configured ``ddof``; exactly 0.0 when all rewards are equal."""
    num_kept: int
    """Samples that best-of-N kept; the group size without it."""
    micro_batches: tuple[int, ...]
    """Indices of the micro-batches that hold its samples, ascending."""


class ReadyMicroBatch(Struct, frozen=True):
    """A micro-batch that can be updated on."""

    index: int
    advantages: tuple[float | None, ...]
    """One per sample in row order; ``None`` for a sample that best-of-N dropped."""
    num_kept: int
    """Advantages that are not ``None``; with 0 there is nothing to update on."""


class Arrival(Struct, frozen=True):
    """What one micro-batch's rewards completed: often nothing."""

    groups: tuple[CompletedGroup, ...]
    """In the order of the plan."""
    ready: tuple[ReadyMicroBatch, ...]
    """In index order."""


class _Group:
    """The rewards of one uid, by sample."""

    def __init__(self, uid: str, size: int) -> None:
        self.uid = uid
        self.rewards = [math.nan] * size
        self.advantages: list[float | None] = []
        self.num_missing = size
        self.micro_batches: list[int] = []


class GroupAssembler:
    """Collects the rewards of one step and hands out advantages as groups complete.

    Args:
        micro_batches: all micro-batches of the step.
        advantage: how rewards become advantages.

    Raises:
        PlanError: ``best_of_n`` exceeds the group size, or the micro-batches do not hold every sample of every group
            exactly once.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], advantage: AdvantageSection) -> None:
        self._advantage = advantage
        self._micro_batches = {micro_batch.index: micro_batch for micro_batch in micro_batches}
        self._missing = set(self._micro_batches)
        self._groups: dict[str, _Group] = {}
        samples: dict[str, list[int]] = {}
        for index in sorted(self._micro_batches):
            for piece in self._micro_batches[index].slices:
                group = self._groups.setdefault(piece.uid, _Group(piece.uid, piece.size))
                if index not in group.micro_batches:
                    group.micro_batches.append(index)
                samples.setdefault(piece.uid, []).extend(range(piece.start, piece.start + piece.count))
        for group in self._groups.values():
            size = len(group.rewards)
            if sorted(samples[group.uid]) != list(range(size)):
                raise PlanError(f"the step must hold the samples 0 to {size - 1} of group {group.uid} once each")
            if advantage.best_of_n is not None and advantage.best_of_n > size:
                raise PlanError(
                    f"best_of_n={advantage.best_of_n} exceeds the group size {size} of {group.uid}; "
                    f"set algorithm.advantage.best_of_n to at most {size - size % 2} or raise plan.samples_per_prompt"
                )
        self._num_open = {
            index: len({piece.uid for piece in micro_batch.slices})
            for index, micro_batch in self._micro_batches.items()
        }

    def add(self, index: int, rewards: Sequence[float]) -> Arrival:
        """Take the rewards of micro-batch ``index``, one per sample in row order.

        A call that raises changes nothing.

        Raises:
            RewardError: there are too few or too many, or one is not a finite number (of at most 1e150 in size, so
                that no variance overflows).
            InvariantViolation: the step has no such micro-batch, or its rewards were added before.
        """
        micro_batch = self._micro_batches.get(index)
        if micro_batch is None:
            raise InvariantViolation(f"micro-batch {index} is not one of the step's {len(self._micro_batches)}")
        where = f"step {micro_batch.step} micro-batch {index}"
        if index not in self._missing:
            raise InvariantViolation(f"{where}: its rewards were added before")
        values = _checked(micro_batch, rewards, where)

        self._missing.remove(index)
        completed = []
        for (piece, sample), value in zip(micro_batch.samples(), values, strict=True):
            group = self._groups[piece.uid]
            group.rewards[sample] = value
            group.num_missing -= 1
            if group.num_missing == 0:
                completed.append(group)
        if self._advantage.kind == "global_std":
            completed = [] if self._missing else list(self._groups.values())
        return self._complete(completed)

    def _complete(self, groups: list[_Group]) -> Arrival:
        if not groups:
            return Arrival(groups=(), ready=())
        step_std = self._step_std() if self._advantage.kind == "global_std" else None
        done = tuple(self._close(group, step_std) for group in groups)
        ready = []
        for group in groups:
            for index in group.micro_batches:
                self._num_open[index] -= 1
                if self._num_open[index] == 0:
                    ready.append(index)
        return Arrival(groups=done, ready=tuple(self._ready(index) for index in sorted(ready)))

    def _close(self, group: _Group, step_std: float | None) -> CompletedGroup:
        mean, std = _moments(group.rewards, self._advantage.ddof)
        divisor = (std if step_std is None else step_std) + self._advantage.epsilon
        advantages = [(reward - mean) / divisor if divisor else 0.0 for reward in group.rewards]
        kept = _select(advantages, self._advantage.best_of_n)
        group.advantages = [value if sample in kept else None for sample, value in enumerate(advantages)]
        return CompletedGroup(
            uid=group.uid,
            reward_mean=mean,
            reward_std=std,
            num_kept=len(kept),
            micro_batches=tuple(group.micro_batches),
        )

    def _step_std(self) -> float:
        rewards = [reward for group in self._groups.values() for reward in group.rewards]
        return _moments(rewards, self._advantage.ddof)[1]

    def _ready(self, index: int) -> ReadyMicroBatch:
        samples = self._micro_batches[index].samples()
        advantages = tuple(self._groups[piece.uid].advantages[sample] for piece, sample in samples)
        return ReadyMicroBatch(
            index=index, advantages=advantages, num_kept=sum(value is not None for value in advantages)
        )


def _checked(micro_batch: MicroBatch, rewards: Sequence[float], where: str) -> list[float]:
    if len(rewards) != micro_batch.num_samples:
        raise RewardError(f"{where}: {micro_batch.num_samples} samples but {len(rewards)} rewards; return one each")
    for (piece, sample), reward in zip(micro_batch.samples(), rewards, strict=True):
        try:
            usable = bool(abs(reward) <= _LARGEST)  # false for NaN too
        except TypeError:
            usable = False
        if not usable:
            raise RewardError(f"{where}: the reward of {piece.uid} sample {sample} is {reward!r}, not a finite number")
    return [float(reward) for reward in rewards]


def _moments(rewards: Sequence[float], ddof: int) -> tuple[float, float]:
    """Mean and standard deviation; the latter exactly 0.0 when all rewards are equal, whatever rounding does."""
    if min(rewards) == max(rewards):
        return rewards[0], 0.0
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof)
    return mean, math.sqrt(variance)


def _select(advantages: list[float], best_of_n: int | None) -> set[int]:
    """The samples to keep: the n/2 lowest and n/2 highest advantages. Equal ones are ranked by sample."""
    ranked = sorted(range(len(advantages)), key=lambda sample: (advantages[sample], sample))
    if best_of_n is None or best_of_n == len(ranked):
        return set(ranked)
    half = best_of_n // 2
    return set(ranked[:half] + ranked[-half:])
