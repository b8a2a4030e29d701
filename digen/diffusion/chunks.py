"""How many terms go into one forward of training: timesteps x samples (TSP, paper 3.2.2).

``algorithm.tsp_chunk: auto`` takes as many as memory allows. It tries a forward and a backward of the largest size
once, and halves the timesteps, then the samples, until they pass; the choice is kept for the whole run and across a
resume, because a forward's shape decides its last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
import torch

from digen.errors import StepFailed


@dataclass(frozen=True, slots=True)
class ForwardSize:
    """Items, and timesteps of each, in one forward."""

    items: int
    steps: int

    def halved(self) -> ForwardSize | None:
        """Half of the timesteps, or of the items where one timestep is left; ``None`` for a single term."""
        if self.steps > 1:
            return ForwardSize(self.items, self.steps // 2)
        return ForwardSize(self.items // 2, 1) if self.items > 1 else None


class ForwardSizes:
    """The sizes that are in use.

    Args:
        chunk: ``algorithm.tsp_chunk``.
        optimizer: of the run; where it has no state yet, its place is kept free while a size is tried.
    """

    def __init__(self, chunk: int | Literal["all", "auto"], optimizer: torch.optim.Optimizer) -> None:
        self._chunk = chunk
        self._optimizer = optimizer
        self._chosen: dict[ForwardSize, ForwardSize] = {}

    def fit(self, whole: ForwardSize, attempt: Callable[[ForwardSize], None]) -> ForwardSize:
        """The size to use where ``whole`` would hold everything.

        Args:
            whole: all items of a forward at all of their timesteps.
            attempt: a forward and a backward of a size. The gradients that it leaves are discarded.

        Raises:
            StepFailed: a single term does not fit in memory.
        """
        if self._chunk != "auto":
            return ForwardSize(whole.items, whole.steps if self._chunk == "all" else self._chunk)
        if whole not in self._chosen:
            self._chosen[whole] = self._try(whole, attempt)
            chosen = self._chosen[whole]
            structlog.get_logger("digen.diffusion").info(
                "size of an update's forwards", items=chosen.items, timesteps=chosen.steps, all_timesteps=whole.steps
            )
        return self._chosen[whole]

    def _try(self, whole: ForwardSize, attempt: Callable[[ForwardSize], None]) -> ForwardSize:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        size: ForwardSize | None = whole
        while size is not None:
            for parameter in parameters:
                parameter.grad = None
            try:
                reserved = self._reserve(parameters)
                attempt(size)
            except torch.OutOfMemoryError:
                fits = False
            else:
                fits = True
            finally:
                reserved = []
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
            del reserved
            if fits:
                return size
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size = size.halved()
        raise StepFailed(
            "a forward and a backward of one sample at one timestep do not fit in memory; "
            "set model.gradient_checkpointing, model.lora or a smaller sample"
        )

    def _reserve(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Memory that the optimizer will take at its first step."""
        if self._optimizer.state:
            return []
        copies = 1 if isinstance(self._optimizer, torch.optim.SGD) else 2
        return [torch.empty_like(parameter) for parameter in parameters for _ in range(copies)]

    def state(self) -> list[tuple[int, int, int, int]]:
        """What :meth:`restore` takes, as plain data."""
        return [(size.items, size.steps, chosen.items, chosen.steps) for size, chosen in self._chosen.items()]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Use the sizes of an earlier run again."""
        self._chosen = {ForwardSize(a, b): ForwardSize(c, d) for a, b, c, d in state}
