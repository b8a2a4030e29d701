"""A trainer's and a generator's rank that do nothing but move weights; they run in processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from digen.diffusion.channels import Receiver, build_sender, memory
from digen.diffusion.ranks import Ranks
from digen.handles import Memory
from digen.resources import WeightsSection
from digen.types import CommitReport, LoadReport, Publication

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "block.0.weight": ((5, 3), torch.float32),  # uneven among two ranks
    "block.0.bias": ((1,), torch.float32),  # nothing for the second
    "block.1.weight": ((6, 2, 2), torch.bfloat16),
    "norm": ((4, 1000), torch.float64),
}


def values(seed: int) -> dict[str, Tensor]:
    """Weights, the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def cut(tensors: Mapping[str, Tensor], ranks: Ranks, placement: str) -> dict[str, Tensor]:
    """What this rank holds: all, rows (``shard``), or all of two replicas (``replicate``)."""
    if placement == "whole":
        return dict(tensors)
    mesh = init_device_mesh("cpu", (1, ranks.num_ranks) if placement == "shard" else (ranks.num_ranks, 1))
    return {name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)]) for name, tensor in tensors.items()}


def bits(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every byte of the whole tensors, as text."""
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: t.detach().reshape(-1).view(torch.uint8).numpy().tobytes().hex() for name, t in whole.items()}


class Trainer:
    """A rank of a trainer. What it is, says :meth:`become`."""

    def __init__(self, ranks: dict[str, Any] | None = None) -> None:
        self._ranks = Ranks(ranks)
        self._memory: Memory | None = None

    def lend_memory(self, lent: Memory) -> None:
        """Shared memory."""
        self._memory = lent

    def become(self, placement: str, section: dict[str, Any], reach: bool = True) -> None:
        """A new trainer with the first weights."""
        self._weights = cut(values(0), self._ranks, placement)
        dtypes = {name: tensor.dtype for name, tensor in self._weights.items()}
        self._sender = build_sender(WeightsSection.model_validate(section), self._ranks, dtypes, num_receivers=2)
        if reach and self._memory is not None:
            self._sender.lend_memory(self._memory)

    def publish(self, version: int) -> Publication:
        """Of the weights held now."""
        return self._sender.publish(version, self._weights)

    def commit(self, step: int, indices: tuple[int, ...]) -> CommitReport:
        """Other weights, in place."""
        self._sender.settle()
        for name, tensor in values(step + 1).items():
            held = self._weights[name]
            if isinstance(held, DTensor):
                tensor = distribute_tensor(tensor, held.device_mesh, held.placements)  # noqa: PLW2901
            held.copy_(tensor)
        return CommitReport(step + 1, 1)

    def stall(self, after: int) -> None:
        """From now on, write so many pieces and then no more."""
        module: Any = memory
        real, count = module.write, iter(range(after))

        def write(*arguments: Any) -> int:
            if next(count, None) is None:
                threading.Event().wait()
            return int(real(*arguments))

        module.write = write


class Generator:
    """A rank of a generator. What it is, says :meth:`become`."""

    def __init__(self, ranks: dict[str, Any] | None = None) -> None:
        self._ranks = Ranks(ranks)

    def become(self, placement: str, section: dict[str, Any], gate: str | None = None) -> None:
        """A new generator without weights."""
        zeros = {name: torch.zeros_like(tensor) for name, tensor in values(0).items()}
        self._weights = cut(zeros, self._ranks, placement)
        self._receiver = Receiver(WeightsSection.model_validate(section))
        self._gate = gate

    def load(self, published: Publication) -> LoadReport:
        """Of course; slowly, if there is a gate that must open first."""
        if self._gate is not None and self._ranks.rank == 0:
            with Path(self._gate).open("rb", buffering=0) as gate:
                gate.read(1)
        with self._ranks.together():
            return self._receiver.load(published, self._weights)

    def bits(self) -> dict[str, str]:
        """What is held, by every rank the same."""
        held = bits(self._weights)
        everybody = self._ranks.gather_plain(held) or [held]
        assert all(each == held for each in everybody)
        return held
