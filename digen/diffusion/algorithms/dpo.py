"""Online DPO (Diffusion-DPO): the best sample of a group is preferred to its worst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from digen.config import RunConfig
from digen.diffusion.algorithms.base import Forward, Item, Losses
from digen.diffusion.algorithms.builtin import DPO as DECLARATION
from digen.diffusion.algorithms.builtin import DpoOptions
from digen.diffusion.algorithms.sample import SampleAlgorithm
from digen.diffusion.families.base import Family
from digen.diffusion.losses import dpo_loss, dpo_margin, mean_squared_error
from digen.diffusion.optim import WeightCopy
from digen.diffusion.process import process_of, target
from digen.diffusion.seeds import group_seeds
from digen.errors import InvariantViolation
from digen.types import MicroBatch


class DPO(SampleAlgorithm):
    """A term is a pair at one level, with the same noise. A group whose samples are equally good adds nothing."""

    declaration = DECLARATION

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        options: DpoOptions = self.settings.options
        self._interval = options.reference_interval
        self._reference: WeightCopy | None = None

    @property
    def needs_reference(self) -> bool:
        """Unless it moves."""
        return self._interval is None

    def begin(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """A reference that moves starts as the policy."""
        if self._interval is not None:
            self._reference = WeightCopy(parameters)

    def noise_seeds(self, micro_batch: MicroBatch, purpose: str) -> list[int]:
        """One seed a group: both of a pair see the same noise at the same level."""
        return group_seeds(micro_batch, purpose)

    def items(self, micro_batch: MicroBatch, rows: Sequence[int], advantages: Sequence[float | None]) -> list[Item]:
        """(best, worst) of every group, by advantage; of equal ones the first."""
        pairs: list[Item] = []
        kept, first = set(rows), 0
        for piece in micro_batch.slices:
            if piece.count != piece.size:
                raise InvariantViolation(
                    f"DPO needs whole groups, but {piece.uid} is cut: {piece.count} of {piece.size}"
                )
            group = [row for row in range(first, first + piece.count) if row in kept]
            first += piece.count
            if len(group) > 1:
                value = {row: advantages[row] or 0.0 for row in group}
                best = max(group, key=value.__getitem__)
                worst = min((row for row in group if row != best), key=value.__getitem__)
                pairs.append((best, worst))
        return pairs

    def items_per_forward(self, unit: int, micro_batch: MicroBatch) -> int:
        """A pair is two samples, and a group gives one pair."""
        return max(1, min(unit // 2, len(micro_batch.slices)))

    def losses(self, family: Family, forward: Forward) -> Losses:
        """-log sigmoid of the pair's margin; exactly 0 where both have the same advantage."""
        options: DpoOptions = self.settings.options
        samples = self.noise_samples(family, forward)
        wanted = target(samples.clean, samples.noise, process_of(forward.batch.trajectories.levels))
        with torch.no_grad(), self._reference_weights(family):
            reference = _by_pair(mean_squared_error(samples.predict(family), wanted))
        error = _by_pair(mean_squared_error(samples.predict(family), wanted))
        margin = dpo_margin(error, reference, beta=options.beta)
        advantage = _by_pair(forward.advantages(family.device))
        differs = (advantage[:, 0] > advantage[:, 1]).to(error.dtype)
        loss = dpo_loss(margin) * differs
        metrics = {
            "loss/policy": loss.detach(),
            "dpo/margin": margin.detach(),
            "dpo/accuracy": (margin.detach() > 0).double(),
        }
        return Losses(loss, metrics)

    def held(self) -> WeightCopy | None:
        """The reference, if it moves."""
        return self._reference

    def committed(self, version: int, parameters: Mapping[str, Tensor]) -> None:
        """Every ``reference_interval`` optimizer steps the reference becomes the policy."""
        if self._reference is not None and self._interval is not None and version % self._interval == 0:
            self._reference.copy(parameters)

    def _reference_weights(self, family: Family) -> AbstractContextManager[None]:
        return family.reference() if self._reference is None else self._reference.lent(family.parameters())


def _by_pair(values: Tensor) -> Tensor:
    """``(rows, k)`` as ``(pairs, 2, k)``."""
    return values.reshape(-1, 2, values.shape[1])
