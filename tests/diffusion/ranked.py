"""A rank that builds the targets that a test asks for, one after the other, and a reward that fails when told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from digen.diffusion import roles
from digen.diffusion.families.base import Images
from digen.diffusion.ranks import Ranks, RankSpec
from digen.types import (
    Encoded,
    EvaluationReport,
    EvaluationRequest,
    MicroBatch,
    Payload,
    Prompt,
    Publication,
    Rollout,
    Scored,
)


class Fussy:
    """Brightness, but an error for prompts of one label."""

    def __init__(self, fails_on: int | None = None) -> None:
        self._fails_on = fails_on

    def __call__(self, images: Images, prompts: Sequence[Prompt]) -> list[float | Exception]:
        return [
            ValueError(f"no {self._fails_on}")
            if self._fails_on is not None and prompt.metadata.get("label") == self._fails_on
            else float(image.mean())
            for image, prompt in zip(images, prompts, strict=True)
        ]


def is_seven(images: Images, prompts: Sequence[Prompt]) -> list[float]:
    """A judge that costs nothing."""
    return [float(prompt.metadata["label"] == 7) for _, prompt in zip(images, prompts, strict=True)]


class Bench:
    """One rank of a worker; the first ``num_ranks`` of them are those of the target, which meet in ``folder``."""

    def __init__(self, ranks: dict[str, Any], folder: str) -> None:
        self._spec = msgspec.convert(ranks, RankSpec)
        self._folder = folder
        self._num_meetings = 0
        self._target: Any = None
        self._kept: Rollout | None = None
        self.num_forwards = 0

    def use(self, target: str, config: dict[str, Any], num_ranks: int, folder: str | None = None) -> None:
        """Build a target of :mod:`digen.diffusion.roles`."""
        self._target = None
        self._num_meetings += 1
        if self._spec.rank < num_ranks:
            self._target = getattr(roles, target)(config, folder, self._meet(num_ranks))
            self._target._judge = is_seven
            self._count_forwards()

    def late(self, timeout_s: float) -> str:
        """What rank 0 finds when the others do not come."""
        self._num_meetings += 1
        if self._spec.rank:
            return ""
        try:
            Ranks(self._meet(2) | {"timeout_s": timeout_s})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "met"

    def spoil(self, label: int) -> None:
        """Let the encoding of a prompt's label be no number."""
        if self._target is not None:
            right = self._target._encode

            def wrong(key: bytes) -> dict[str, torch.Tensor]:
                factor = torch.nan if msgspec.json.decode(key, type=Prompt).metadata["label"] == label else 1.0
                return {name: tensor * factor for name, tensor in right(key).items()}

            self._target._encode = wrong

    def generate(self, micro_batch: MicroBatch, encoded: Encoded | None = None) -> Rollout:
        """The target's."""
        self.num_forwards = 0
        self._kept = Rollout(micro_batch, 0, 0, Payload({}))
        if self._target is not None:
            self._kept = self._target.generate(micro_batch, encoded)
        return self._kept

    def keep(self, path: str) -> int:
        """Write what rank 0 returned last; the forwards that it took."""
        assert self._kept is not None
        if self._spec.rank == 0:
            np.savez(path, **self._kept.payload)
        else:
            assert not self._kept.payload
        return self.num_forwards

    def encode(self, prompts: Sequence[Prompt]) -> Encoded:
        """The target's."""
        return Encoded((), Payload({})) if self._target is None else self._target.encode(prompts)

    def score(self, rollout: Rollout) -> Scored:
        """The target's."""
        return Scored(()) if self._target is None else self._target.score(rollout)

    def evaluate(self, request: EvaluationRequest) -> EvaluationReport:
        """The target's."""
        return EvaluationReport(0, 0, {}) if self._target is None else self._target.evaluate(request)

    def take(self, published: dict[str, Any]) -> None:
        """Load a publication without a payload."""
        self._target.load(Publication(payload=Payload({}), **published))

    def _meet(self, num_ranks: int) -> dict[str, Any]:
        if dist.is_initialized():  # a process can be in one meeting only
            dist.destroy_process_group()
        return msgspec.to_builtins(self._spec) | {  # type: ignore[no-any-return]
            "num_ranks": num_ranks,
            "rendezvous": f"file://{self._folder}/meeting-{self._num_meetings}",
        }

    def _count_forwards(self) -> None:
        family = self._target._family
        if getattr(family, "network", None) is not None:
            family.network.register_forward_pre_hook(self._forward)

    def _forward(self, *_: Any) -> None:
        self.num_forwards += 1


def arrays_of(payload: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Copies of a payload's arrays."""
    return {name: np.array(array) for name, array in payload.items()}
