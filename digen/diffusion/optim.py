"""The optimizer, its learning-rate schedule, and weights that are held beside the trained ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from digen.config import OptimizerSection
from digen.diffusion.families.base import compute_dtype
from digen.diffusion.sharding import is_sharded, local


def build_optimizer(parameters: Sequence[torch.nn.Parameter], section: OptimizerSection) -> torch.optim.Optimizer:
    """The ``torch.optim`` optimizer of a config; one parameter group, in the order given."""
    match section.name:
        case "sgd":
            return torch.optim.SGD(
                parameters, lr=section.lr, momentum=section.betas[0], weight_decay=section.weight_decay
            )
        case "adam" | "adamw":
            kind = torch.optim.Adam if section.name == "adam" else torch.optim.AdamW
            return kind(
                parameters, lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
            )


def learning_rate(section: OptimizerSection, step: int, num_steps: int) -> float:
    """The rate at optimizer step ``step`` (from 0) of ``num_steps``: linear warm-up, then constant or decay to zero."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    progress = (step - section.warmup_steps) / max(1, num_steps - section.warmup_steps)
    match section.schedule:
        case "constant":
            return section.lr
        case "linear":
            return section.lr * max(0.0, 1 - progress)
        case "cosine":
            return section.lr * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def ema_decay(step: int, limit: float) -> float:
    """Decay of the moving average at optimizer step ``step`` (from 0): ``min((1 + k) / (10 + k), limit)``."""
    return min((1 + step) / (10 + step), limit)


class WeightCopy:
    """Values of named parameters beside their own, float32 or better; sharded where the parameters are.

    Args:
        parameters: what is copied.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.tensors = {
            name: parameter.detach().to(compute_dtype(parameter.dtype), copy=True)
            for name, parameter in parameters.items()
        }
        """The copies by parameter name."""

    @torch.no_grad()
    def blend(self, parameters: Mapping[str, Tensor], weight: float) -> None:
        """Move by ``weight`` of the way to ``parameters``; 1 makes it their copy, exactly."""
        for name, held in self.tensors.items():
            held.lerp_(parameters[name].detach().to(held), weight)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over ``tensors`` in place."""
        for name, held in self.tensors.items():
            held.copy_(tensors[name])

    def like(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The copies in the parameters' own precision."""
        return {name: self.tensors[name].to(parameter.dtype) for name, parameter in parameters.items()}

    @contextmanager
    def lent(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, ``parameters`` have these values. Gradients stay; afterwards all is as it was, bit for bit.

        Sharded ones are overwritten in their own memory, from which FSDP gathers.
        """
        own = {name: local(p).clone() if is_sharded(p) else p.data for name, p in parameters.items()}
        try:
            for name, tensor in self.like(parameters).items():
                _set(parameters[name], local(tensor))
            yield
        finally:
            for name, data in own.items():
                _set(parameters[name], data)


def _set(parameter: Tensor, data: Tensor) -> None:
    if is_sharded(parameter):
        local(parameter).copy_(data)
    else:
        parameter.data = data


class MovingAverage(WeightCopy):
    """An exponential moving average of named parameters.

    Args:
        parameters: where it starts.
        decay: its limit; see :func:`ema_decay`.
        interval: optimizer steps between its updates.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float, interval: int) -> None:
        super().__init__(parameters)
        self._decay = decay
        self._interval = interval

    def update(self, parameters: Mapping[str, Tensor], step: int) -> None:
        """Take in the parameters after optimizer step ``step`` (from 0), if it is time."""
        if (step + 1) % self._interval == 0:
            self.blend(parameters, 1 - ema_decay(step, self._decay))
