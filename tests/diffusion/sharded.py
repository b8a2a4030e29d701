"""A rank that trains what a test asks for; runs in a process of its own, and as an oracle alone in the test's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from digen.config import RunConfig, load_config
from digen.diffusion import roles
from digen.diffusion.algorithms.base import build_algorithm
from digen.diffusion.ranks import Ranks
from digen.diffusion.roles import TrainerTarget, build_family
from digen.diffusion.sharding import local
from digen.diffusion.trajectories import conditioning_arrays
from digen.diffusion.update import Learner
from digen.types import Encoded, GroupSlice, MicroBatch, Payload, Prompt, Rollout

PROMPT = Prompt("the digit 3", {"label": 3})
ADVANTAGES = (1.5, None, -0.8)
NUM_STEPS = 3
SMALL = {"sampling.num_inference_steps": NUM_STEPS, "model.forward_batch": 2}


class Job(msgspec.Struct, frozen=True):
    """What is trained."""

    overrides: dict[str, Any] = {}
    """Of the default config."""
    advantages: tuple[tuple[tuple[float | None, ...], ...], ...] = ()
    """Of the samples, by step and micro-batch, each of which is a group."""
    restore: str | None = None
    save: str | None = None
    arrays: str | None = None
    """File for the gradients before every commit, under ``step/name``, and all state in the end, whole."""


class Bench:
    """One rank."""

    def __init__(self, ranks: dict[str, Any] | None = None) -> None:
        self._ranks = Ranks(ranks)

    def train(self, job: dict[str, Any]) -> dict[str, Any]:
        """What it reported, and a digest of the arrays."""
        made = msgspec.convert(job, Job)
        config = load_config(None, {**SMALL, **made.overrides})
        learner, family = self._learner(config)
        if made.restore is not None:
            learner.restore(Path(made.restore))
        reports: list[Any] = []
        gradients: dict[str, Tensor] = {}
        for step, batches in enumerate(made.advantages, start=learner.version):
            drawn = [draw(learner, family, step, index, len(a)) for index, a in enumerate(batches)]
            for (batch, chains), advantages in zip(drawn, batches, strict=True):
                reports.append(learner.update(batch, learner.version, chains, advantages))
            for name, parameter in learner._parameters.items():
                if parameter.grad is not None:
                    gradients[f"{step}/{name}"] = whole(parameter.grad).clone()
            reports.append(learner.commit(step, range(len(batches))))
        hashes = {} if made.save is None else learner.begin_save(Path(made.save)).finish()
        arrays = {name: tensor.contiguous() for name, tensor in (gradients | state(learner)).items()}
        if made.arrays is not None and self._ranks.rank == 0:
            save_file(arrays, made.arrays)
        parameters = list(learner._parameters.values())
        return {
            "reports": [msgspec.to_builtins(report) for report in reports],
            "hashes": hashes,
            "digest": _digest(state(learner)),
            "held": sum(local(p).numel() for p in parameters) / sum(p.numel() for p in parameters),
        }

    def fail(self, rank: int) -> str:
        """One rank's log-probabilities are not finite; what its learner makes of that, and whether it goes on."""
        config = load_config(None, SMALL)
        learner, family = self._learner(config)
        batch, chains = draw(learner, family, 0, 0, 4)
        assert chains.log_probs is not None
        spoilt = chains.log_probs.clone()
        if self._ranks.rank == rank:
            chains.log_probs[:] = torch.nan
        try:
            learner.update(batch, 0, chains, (1.0, -1.0, 0.5, 2.0))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        chains.log_probs[:] = spoilt
        learner.update(batch, 0, chains, (1.0, -1.0, 0.5, 2.0))
        return f"{found}; then version {learner.commit(0, [0]).version}"

    def assist(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """Digests of this rank's state before and after an assist in an open transaction, of what it drew, and of the
        state at the end, with and without it."""
        config = load_config(None, {**SMALL, "optimizer.ema_decay": 0.9, **overrides})
        ends = []
        for assisted in (True, False):
            trainer = self._trainer(config)
            for step in (0, 1):
                first, second = (_generate(trainer, config, step, index) for index in range(2))
                trainer.update(first, ADVANTAGES)
                if step and assisted:
                    before = _bits(trainer)
                    trainer.switch("generate")
                    drawn = _generate(trainer, config, step, 2).payload
                    trainer.switch("train")
                    after = _bits(trainer)
                trainer.update(second, ADVANTAGES)
                trainer.commit(step, [0, 1])
            ends.append(_bits(trainer))
        latents = torch.from_numpy(np.array(drawn["latents"])) if "latents" in drawn else torch.empty(0)
        return {"before": before, "after": after, "ends": ends, "drawn": _digest({"latents": latents})}

    def lives(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """Digests of this rank's state at a snapshot, of another trainer's that recalled it, and of both a step later.

        And what is said of the other rank's snapshot.
        """
        config = load_config(None, {**SMALL, "optimizer.ema_decay": 0.9, **overrides})
        lives = [self._trainer(config), self._trainer(config)]
        _train(lives[0], config, 0)
        snapshot = lives[0].snapshot()
        at = [_bits(lives[0])]
        lives[1].recall(snapshot)
        at.append(_bits(lives[1]))
        for trainer in lives:
            _train(trainer, config, 1)
        try:
            lives[1].recall(msgspec.structs.replace(snapshot, payloads=() if self._ranks.rank else snapshot.payloads))
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
        return {
            "nbytes": snapshot.nbytes,
            "at": at,
            "after": [_bits(trainer) for trainer in lives],
            "whole": [_digest(state(trainer._learner)) for trainer in lives],
            "refused": refused,
        }

    def _trainer(self, config: RunConfig) -> TrainerTarget:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roles, "Ranks", lambda *_: self._ranks)  # a process can meet the others only once
            return TrainerTarget(config.model_dump(mode="json"))

    def _learner(self, config: RunConfig) -> tuple[Learner, Any]:
        algorithm = build_algorithm(config)
        parts: Any = frozenset({"denoise", "encode"})
        family = build_family(config, parts, keep_reference=algorithm.needs_reference)
        return Learner(family, config, self._ranks), family


def draw(learner: Learner, family: Any, step: int, index: int, count: int) -> tuple[MicroBatch, Any]:
    """A group of ``count`` samples, drawn with the weights that generators would have; all ranks draw all of it."""
    batch = MicroBatch(0, step, index, (GroupSlice(f"s{step}p{index}", PROMPT, 0, count, count),))
    conditioning, schedule = family.encode([PROMPT] * count), family.schedule(NUM_STEPS)
    with learner.sampling_weights():
        return batch, learner.algorithm.draw(family, batch, conditioning, schedule, unit=2)


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state(learner: Learner) -> dict[str, Tensor]:
    """Everything that training depends on, whole."""
    found: dict[str, Tensor] = {}
    for name, parameter in learner._parameters.items():
        found[name] = parameter
        found |= {f"{name}.{key}": value for key, value in learner._optimizer.state.get(parameter, {}).items()}
    for file, held in learner._held().items():
        found |= {f"{file}/{name}": tensor for name, tensor in held.tensors.items()}
    return {name: whole(tensor.detach()) for name, tensor in found.items()}


def _generate(trainer: TrainerTarget, config: RunConfig, step: int, index: int) -> Rollout:
    """What the trainer draws; every rank gets all of it, as it would from the driver."""
    encoder: Any = build_family(config, frozenset({"encode"}))
    encoded = Encoded((PROMPT,), Payload(conditioning_arrays(encoder.encode([PROMPT]))))
    batch = MicroBatch(0, step, index, (GroupSlice(f"s{step}p{index}", PROMPT, 0, 3, 3),))
    rollout = trainer.generate(batch, encoded)
    arrays = trainer._ranks.tell({name: _plain(array) for name, array in rollout.payload.items()})
    payload = Payload({name: np.array(values, dtype).reshape(shape) for name, (values, dtype, shape) in arrays.items()})
    return msgspec.structs.replace(rollout, payload=payload)


def _train(trainer: TrainerTarget, config: RunConfig, step: int) -> None:
    trainer.update(_generate(trainer, config, step, 0), ADVANTAGES)
    trainer.commit(step, [0])


def _plain(array: Any) -> tuple[list[Any], str, list[int]]:
    found = np.asarray(array)
    return np.nan_to_num(found, nan=0.0).ravel().tolist(), str(found.dtype), list(found.shape)


def _bits(trainer: TrainerTarget) -> str:
    """All that an assist must leave alone on this rank."""
    learner = trainer._learner
    found = {"rng": torch.get_rng_state()}
    for name, parameter in learner._parameters.items():
        found[name] = local(parameter)
        if parameter.grad is not None:
            found[f"{name}.grad"] = local(parameter.grad)
        found |= {f"{name}.{key}": local(value) for key, value in learner._optimizer.state.get(parameter, {}).items()}
    return _digest(found)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
