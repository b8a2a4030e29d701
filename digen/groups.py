"""Groups: rewards arrive in any order, advantages leave when they are final (paper 2.1 and Algorithm 1).

A group is complete when the last reward of its samples has arrived; only then are its advantages computed, never from
a part of it. Best-of-N selects after that, from the advantages of the whole group and for each uid on its own. A
micro-batch is ready for its update when all of its groups are complete, so that the micro-batches of a group become
ready together.

Advantages are ``A_i = (r_i - mean) / (std + epsilon)``; whose mean and whose standard deviation is the ``kind`` of
:class:`digen.config.AdvantageSection` (Flow-GRPO, DanceGRPO, Dr.GRPO and others). Where both are the group's,
advantages stream: a group's leave when it is complete. A divisor of the whole step makes them wait for its last reward,
unless the trainer divides the accumulated gradient by it instead (``defer_divisor``), which is the same where the loss
is homogeneous in the advantage. A group whose rewards are all equal gets exactly 0.0 in every variant with the group's
mean. The arithmetic depends on the rewards only, never on their order of arrival.

A group whose reward failed is dropped as a whole: its samples get no advantage and leave the step's denominator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
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
    dropped: tuple[str, ...] = ()
    """Groups that were lost just now."""


class _Group:
    """The rewards of one uid, by sample."""

    def __init__(self, uid: str, size: int) -> None:
        self.uid = uid
        self.rewards = [math.nan] * size
        self.heads: dict[str, list[float]] = {}
        self.advantages: list[float | None] = []
        self.num_missing = size
        self.micro_batches: list[int] = []
        self.dropped = False


class GroupAssembler:
    """Collects the rewards of one step and hands out advantages as groups complete.

    Args:
        micro_batches: all micro-batches of the step.
        advantage: how rewards become advantages.
        weights: of the reward's heads by name, for ``advantage.heads = "advantage"``.
        defer_divisor: hand out advantages without the step's divisor, which :attr:`gradient_scale` then has.

    Raises:
        PlanError: ``best_of_n`` exceeds the group size, or the micro-batches do not hold every sample of every group
            exactly once.
    """

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        advantage: AdvantageSection,
        *,
        weights: Mapping[str, float] | None = None,
        defer_divisor: bool = False,
    ) -> None:
        self._advantage = advantage
        self._weights = dict(weights or {})
        common = advantage.kind in {"global_std", "max_group_std"}
        self.defers = defer_divisor and common and advantage.heads == "reward"
        """Whether advantages leave without the step's divisor, which the trainer's commit gets."""
        self.waits = advantage.kind in {"global_std", "max_group_std", "global"} and not self.defers
        """Whether no advantage leaves before the step's last reward."""
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

    def lost(self, index: int) -> bool:
        """Whether a group of micro-batch ``index`` was dropped."""
        return any(self._groups[piece.uid].dropped for piece in self._micro_batches[index].slices)

    def moot(self, index: int) -> bool:
        """Whether nothing of micro-batch ``index`` can be trained on: all of its groups were dropped."""
        return all(self._groups[piece.uid].dropped for piece in self._micro_batches[index].slices)

    @property
    def num_groups(self) -> int:
        """Groups of the step."""
        return len(self._groups)

    @property
    def num_dropped(self) -> int:
        """Groups that were lost so far."""
        return sum(group.dropped for group in self._groups.values())

    @property
    def gradient_scale(self) -> float | None:
        """What the step's gradient is multiplied by when its divisor was deferred; ``None`` if it was not.

        Known once every reward has arrived.
        """
        if not self.defers:
            return None
        divisor = self._step_divisor()
        return 1 / divisor if divisor else 1.0

    def add(self, index: int, rewards: Sequence[float], heads: Mapping[str, Sequence[float]] | None = None) -> Arrival:
        """Take the rewards of micro-batch ``index``, one per sample in row order, and what each head gave.

        A call that raises changes nothing.

        Raises:
            RewardError: there are too few or too many, or one is not a finite number (of at most 1e150 in size, so
                that no variance overflows), or a head that has a weight is missing.
            InvariantViolation: the step has no such micro-batch, or its rewards were added before.
        """
        micro_batch, where = self._expected(index)
        values = _checked(micro_batch, rewards, where)
        by_head = {
            name: _checked(micro_batch, _head(heads, name, where), f"{where}, head {name}") for name in self._weighted
        }
        self._missing.remove(index)
        for row, (piece, sample) in enumerate(micro_batch.samples()):
            group = self._groups[piece.uid]
            group.rewards[sample] = values[row]
            for name, column in by_head.items():
                group.heads.setdefault(name, [math.nan] * piece.size)[sample] = column[row]
            group.num_missing -= 1
        return self._arrive(micro_batch)

    def drop(self, index: int) -> Arrival:
        """The rewards of micro-batch ``index`` failed: every group that has a sample in it is lost.

        Raises:
            InvariantViolation: the step has no such micro-batch, or its rewards were added before.
        """
        micro_batch, _ = self._expected(index)
        self._missing.remove(index)
        lost = []
        for piece in micro_batch.slices:
            group = self._groups[piece.uid]
            group.num_missing -= piece.count
            if not group.dropped:
                group.dropped = True
                lost.append(group.uid)
        return msgspec.structs.replace(self._arrive(micro_batch), dropped=tuple(lost))

    def forget(self, index: int) -> tuple[int, ...]:
        """The rewards of micro-batch ``index`` count no more: they come again, and its groups are open until then.

        Returns the micro-batches of groups that were complete, in index order: their advantages count no more either.

        Raises:
            InvariantViolation: the step has no such micro-batch, or its rewards were not added.
        """
        micro_batch = self._micro_batches.get(index)
        if micro_batch is None or index in self._missing:
            raise InvariantViolation(f"micro-batch {index} of the step has no rewards that could be forgotten")
        self._missing.add(index)
        for piece in micro_batch.slices:
            self._groups[piece.uid].num_missing += piece.count
        uids = list(self._groups) if self.waits else dict.fromkeys(piece.uid for piece in micro_batch.slices)
        reopened = set()
        for group in [self._groups[uid] for uid in uids if self._groups[uid].advantages]:
            group.advantages = []
            reopened.update(group.micro_batches)
            for other in group.micro_batches:
                self._num_open[other] += 1
        return tuple(sorted(reopened))

    @property
    def _weighted(self) -> list[str]:
        return list(self._weights) if self._advantage.heads == "advantage" else []

    def _expected(self, index: int) -> tuple[MicroBatch, str]:
        micro_batch = self._micro_batches.get(index)
        if micro_batch is None:
            raise InvariantViolation(f"micro-batch {index} is not one of the step's {len(self._micro_batches)}")
        where = f"step {micro_batch.step} micro-batch {index}"
        if index not in self._missing:
            raise InvariantViolation(f"{where}: its rewards were added before")
        return micro_batch, where

    def _arrive(self, micro_batch: MicroBatch) -> Arrival:
        """Close what is complete with ``micro_batch``."""
        if self.waits:
            groups = [] if self._missing else list(self._groups.values())
        else:
            uids = dict.fromkeys(piece.uid for piece in micro_batch.slices)
            groups = [group for uid in uids if (group := self._groups[uid]).num_missing == 0]
        if not groups:
            return Arrival(groups=(), ready=())
        divisor = self._step_divisor() if self.waits else None
        done, ready = [], []
        for group in groups:
            if group.dropped:
                group.advantages = [None] * len(group.rewards)
            else:
                done.append(self._close(group, divisor))
            for index in group.micro_batches:
                self._num_open[index] -= 1
                if self._num_open[index] == 0:
                    ready.append(index)
        return Arrival(groups=tuple(done), ready=tuple(self._ready(index) for index in sorted(ready)))

    def _close(self, group: _Group, divisor: float | None) -> CompletedGroup:
        mean, std = _moments(group.rewards, self._advantage.ddof)
        if self._weighted:
            columns = [
                [weight * value for value in self._advantages(group.heads[name], divisor, name)]
                for name, weight in self._weights.items()
            ]
            advantages = [math.fsum(row) for row in zip(*columns, strict=True)]
        else:
            advantages = self._advantages(group.rewards, divisor, None)
        if self._advantage.kind == "best_worst":
            kept = {sample for sample, value in enumerate(advantages) if value}
        else:
            kept = _select(advantages, self._advantage.best_of_n)
        group.advantages = [value if sample in kept else None for sample, value in enumerate(advantages)]
        return CompletedGroup(
            uid=group.uid,
            reward_mean=mean,
            reward_std=std,
            num_kept=len(kept),
            micro_batches=tuple(group.micro_batches),
        )

    def _advantages(self, rewards: list[float], divisor: float | None, head: str | None) -> list[float]:
        """The advantages of a group; ``divisor`` is the step's, where there is one, of all rewards (not of a head)."""
        kind, section = self._advantage.kind, self._advantage
        mean, std = _moments(rewards, section.ddof)
        if kind == "best_worst":
            return _best_and_worst(rewards)
        if kind == "no_std" or self.defers:
            return [reward - mean for reward in rewards]
        if kind == "per_prompt":
            divisor = std + section.epsilon
        elif head is not None:
            divisor = self._step_divisor(head)
        if kind == "global":
            mean = _moments(self._of_step(head), section.ddof)[0]
        return [(reward - mean) / divisor if divisor else 0.0 for reward in rewards]

    def _of_step(self, head: str | None) -> list[float]:
        groups = [group for group in self._groups.values() if not group.dropped]
        return [value for group in groups for value in (group.rewards if head is None else group.heads[head])]

    def _step_divisor(self, head: str | None = None) -> float:
        section = self._advantage
        groups = [group for group in self._groups.values() if not group.dropped]
        if not groups:
            return 0.0
        if section.kind == "max_group_std":
            columns = [group.rewards if head is None else group.heads[head] for group in groups]
            return max(_moments(column, section.ddof)[1] for column in columns) + section.epsilon
        return _moments(self._of_step(head), section.ddof)[1] + section.epsilon

    def _ready(self, index: int) -> ReadyMicroBatch:
        samples = self._micro_batches[index].samples()
        advantages = tuple(self._groups[piece.uid].advantages[sample] for piece, sample in samples)
        return ReadyMicroBatch(
            index=index, advantages=advantages, num_kept=sum(value is not None for value in advantages)
        )


def _head(heads: Mapping[str, Sequence[float]] | None, name: str, where: str) -> Sequence[float]:
    if heads is None or name not in heads:
        raise RewardError(f"{where}: the reward's head {name!r} has a weight but gave no values")
    return heads[name]


def _best_and_worst(rewards: list[float]) -> list[float]:
    """1 for the highest, -1 for the lowest, 0 for the others; nothing to prefer where all are equal."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
    return [float(sample == best) - float(sample == worst) for sample in range(len(rewards))]


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
