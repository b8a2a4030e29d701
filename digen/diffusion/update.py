"""The learner: one gradient transaction per step, the optimizer step, and their state on disk.

Every update adds the *unnormalised* gradient of its (sample, timestep) terms; the commit divides once by their number
Z over the whole step. So neither the order of the micro-batches, nor the timesteps in one forward (TSP, paper 3.2.2),
nor best-of-N changes the gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from digen.config import RunConfig
from digen.diffusion.families.base import Family
from digen.diffusion.losses import PolicyMetrics, clipped_policy_loss
from digen.diffusion.optim import MovingAverage, build_optimizer, learning_rate
from digen.diffusion.schedule import trained_steps
from digen.diffusion.sde import flow_sde
from digen.diffusion.state import read_json, read_tensors, write_json, write_tensors
from digen.diffusion.trajectories import Trajectories
from digen.diffusion.units import padded_units
from digen.errors import CheckpointError, InvariantViolation, NumericsError, StalenessViolation, StepFailed
from digen.types import CommitReport, MicroBatch, UpdateReport

_WEIGHTS, _OPTIMIZER, _EMA, _STATE = "weights.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json"


class Learner:
    """Trains a family with Flow-GRPO.

    Args:
        family: its parameters are trained in place.
        config: algorithm, optimizer, noise level, forward size and window are read from it.
    """

    def __init__(self, family: Family, config: RunConfig) -> None:
        self.version = 0
        """Optimizer steps taken."""
        self._family = family
        self._config = config
        self._parameters = family.parameters()
        section = config.optimizer
        self._optimizer = build_optimizer(list(self._parameters.values()), section)
        self._average = (
            MovingAverage(self._parameters, section.ema_decay, section.ema_interval)
            if section.ema_decay is not None
            else None
        )
        self._step: int | None = None
        self._num_terms: dict[int, int] = {}
        self._old_log_probs: str | None = None  # decided by the start-up check
        self._parked: dict[str, Tensor] | None = None

    # The gradient transaction

    def update(
        self, micro_batch: MicroBatch, version: int, trajectories: Trajectories, advantages: Sequence[float | None]
    ) -> UpdateReport:
        """Add one micro-batch's gradient to the step's transaction; the first update of a step opens it.

        Args:
            micro_batch: its step must be the open one, its index not yet added.
            version: of the weights that drew the trajectories.
            trajectories: in the micro-batch's row order.
            advantages: one per row; ``None`` leaves the row out.

        Raises:
            NumericsError: an advantage, log-probability or loss is not finite, or the start-up check fails.
            InvariantViolation: the micro-batch was added before, is of another step, or does not fit its arrays.
            StalenessViolation: ``version`` is outside the window.

        An error while gradients are being added voids the transaction: nothing of it can be committed.
        """
        self._check_update(micro_batch, version, trajectories, advantages)
        names = [f"{piece.uid}/{sample}" for piece, sample in micro_batch.samples()]
        batch = _Batch(
            trajectories=trajectories,
            names=names,
            rows=[row for row, advantage in enumerate(advantages) if advantage is not None],
            advantages=_advantages(advantages, names).to(trajectories.latents.dtype),
            unit=self._config.model.forward_batch or micro_batch.num_samples,
        )
        self._step = micro_batch.step
        metrics = {}
        try:
            fresh = version == self.version
            if fresh and batch.rows and self._old_log_probs is None:
                metrics["ratio/floor"] = self._start_up_check(batch)
            recompute = fresh and self._old_log_probs == "recompute"
            metrics |= self._accumulate(batch, recompute=recompute)
        except BaseException:
            self._abandon()
            raise
        num_terms = len(batch.rows) * self._trained_steps(trajectories)
        self._num_terms[micro_batch.index] = num_terms
        return UpdateReport(step=micro_batch.step, index=micro_batch.index, num_terms=num_terms, metrics=metrics)

    def commit(self, step: int, indices: Sequence[int]) -> CommitReport:
        """Divide the accumulated gradient by its number of terms, clip it, and step the optimizer.

        Args:
            step: the open step.
            indices: the micro-batches that the transaction must consist of, in any order.

        Raises:
            InvariantViolation: the transaction is of another step or consists of other micro-batches.
            StepFailed: no term was accumulated.
            NumericsError: the gradient's norm is not finite; the weights stay as they are.
        """
        self._check_commit(step, indices)
        num_terms = sum(self._num_terms.values())
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        torch._foreach_div_(gradients, num_terms)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):
            self._abandon()
            raise NumericsError(
                f"the gradient's norm at step {step} is {float(norm)}; the policy has diverged: "
                "lower optimizer.lr, or go back to an earlier checkpoint"
            )
        section = self._config.optimizer
        if section.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), section.max_grad_norm, norm)
        rate = learning_rate(section, self.version, self._config.run.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if self._average is not None:
            self._average.update(self._parameters, self.version)
        self.version += 1
        self._abandon()
        return CommitReport(version=self.version, num_terms=num_terms, metrics={"grad_norm": float(norm), "lr": rate})

    def _check_update(
        self, micro_batch: MicroBatch, version: int, trajectories: Trajectories, advantages: Sequence[float | None]
    ) -> None:
        what = f"micro-batch {micro_batch.index} of step {micro_batch.step}"
        if self._parked is not None:
            raise InvariantViolation(f"update of {what} during an assist; switch('train') first")
        if self._step is not None and micro_batch.step != self._step:
            raise InvariantViolation(f"update of {what} while step {self._step} is open; commit that step first")
        if micro_batch.index in self._num_terms:
            raise InvariantViolation(f"{what} was updated before; each micro-batch counts exactly once in a step")
        sizes = {len(advantages), trajectories.num_samples, micro_batch.num_samples}
        if len(sizes) != 1:
            raise InvariantViolation(
                f"{what} has {micro_batch.num_samples} samples, but {trajectories.num_samples} trajectories and "
                f"{len(advantages)} advantages"
            )
        window = self._config.schedule.resolved_window
        if not 0 <= self.version - version < window:
            raise StalenessViolation(
                f"{what} was generated with version {version}, the trainer holds version {self.version}, "
                f"and the window is {window}"
            )

    def _check_commit(self, step: int, indices: Sequence[int]) -> None:
        if self._parked is not None:
            raise InvariantViolation(f"commit of step {step} during an assist; switch('train') first")
        if self._step is not None and self._step != step:
            raise InvariantViolation(f"commit of step {step}, but the open transaction is of step {self._step}")
        wanted, held = Counter(indices), Counter(list(self._num_terms))  # a mapping would count its values
        if wanted != held:
            lacking, extra = sorted((wanted - held).elements()), sorted((held - wanted).elements())
            raise InvariantViolation(
                f"commit of step {step}: the transaction holds micro-batches {sorted(held)}; "
                f"lacking {lacking}, not asked for {extra}"
            )
        if not sum(self._num_terms.values()):
            raise StepFailed(f"step {step} has nothing to train on: every sample was left out")

    def _abandon(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._num_terms.clear()
        self._step = None

    # Log-probabilities and gradients

    def _trained_steps(self, trajectories: Trajectories) -> int:
        return trained_steps(trajectories.num_steps, self._config.algorithm.timestep_fraction)

    def _accumulate(self, batch: _Batch, *, recompute: bool) -> dict[str, float]:
        algorithm = self._config.algorithm
        metrics = PolicyMetrics(algorithm.clip_range)
        for terms in self._forwards(batch):
            old = terms.log_prob.detach() if recompute else terms.behaviour
            loss = clipped_policy_loss(
                terms.log_prob,
                old,
                terms.advantage,
                clip_range=algorithm.clip_range,
                advantage_clip=algorithm.advantage_clip,
            )
            terms.check_finite(loss, "policy loss")
            loss.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            metrics.add(loss, terms.log_prob, old, terms.behaviour)
        return metrics.values()

    @torch.no_grad()
    def _start_up_check(self, batch: _Batch) -> float:
        """Replay a fresh micro-batch, and decide where fresh samples' old log-probabilities come from."""
        floor = max(float((terms.log_prob - terms.behaviour).abs().max()) for terms in self._forwards(batch))
        algorithm = self._config.algorithm
        limit = algorithm.clip_range / 3
        stale_possible = self._config.schedule.resolved_window > 1
        if floor > limit and (stale_possible or algorithm.old_logprobs == "behaviour"):
            why = (
                "stale samples need the log-probabilities of the generator"
                if stale_possible
                else "algorithm.old_logprobs is 'behaviour'"
            )
            raise NumericsError(
                f"replayed log-probabilities differ from the generator's by up to {floor:.3g}, more than a third of "
                f"algorithm.clip_range ({limit:.3g}), and {why}; raise the clip range, use the same dtype and "
                "forward_batch with tsp_chunk=1, or set schedule.window=1 and old_logprobs=auto"
            )
        self._old_log_probs = "recompute" if algorithm.old_logprobs == "recompute" or floor > limit else "behaviour"
        return floor

    def _forwards(self, batch: _Batch) -> Iterator[_Terms]:
        """Log-probabilities of every (kept row, trained step), one fixed-size forward at a time (TSP, 3.2.2)."""
        num_steps = self._trained_steps(batch.trajectories)
        chunk = self._config.algorithm.tsp_chunk
        device = self._family.device
        for rows, real_rows in padded_units(batch.rows, batch.unit):
            for steps, real_steps in padded_units(range(num_steps), num_steps if chunk == "all" else chunk):
                log_prob = self._log_prob(batch.trajectories, rows, steps)[:real_rows, :real_steps]
                rows_kept, steps_kept = rows[:real_rows], steps[:real_steps]
                terms = _Terms(
                    log_prob=log_prob,
                    behaviour=batch.trajectories.log_probs[rows_kept][:, steps_kept].to(device),
                    advantage=batch.advantages[rows_kept][:, None].to(device),
                    names=[batch.names[row] for row in rows_kept],
                    steps=steps_kept,
                )
                terms.check_finite(log_prob, "log-probability")
                terms.check_finite(terms.behaviour, "recorded log-probability")
                yield terms

    def _log_prob(self, trajectories: Trajectories, rows: list[int], steps: list[int]) -> Tensor:
        """``(len(rows), len(steps))`` log-probabilities from one forward of all pairs."""
        device = self._family.device
        chains = trajectories.latents[rows]
        following = [step + 1 for step in steps]
        latents = chains[:, steps].flatten(0, 1).to(device)
        targets = chains[:, following].flatten(0, 1).to(device)
        sigmas = trajectories.levels.to(device)
        times = trajectories.times.to(device)[steps].repeat(len(rows))
        sigma, sigma_next = sigmas[steps].repeat(len(rows)), sigmas[following].repeat(len(rows))
        conditioning = {
            name: tensor[rows].repeat_interleave(len(steps), dim=0).to(device)
            for name, tensor in trajectories.conditioning.items()
        }
        transition = flow_sde(
            latents,
            self._family.predict(latents, times, conditioning),
            sigma,
            sigma_next,
            second_sigma=sigmas[1],
            noise_level=self._config.sampling.noise_level,
        )
        return transition.log_prob(targets).reshape(len(rows), len(steps))

    # Assists

    def park(self) -> None:
        """Move gradients and optimizer state to host memory, for an assist. They come back by :meth:`unpark`."""
        if self._parked is not None:
            return
        self._parked = {name: p.grad.cpu() for name, p in self._parameters.items() if p.grad is not None}
        for parameter in self._parameters.values():
            parameter.grad = None
        self._move_optimizer("cpu")

    def unpark(self) -> None:
        """Undo :meth:`park`, bit for bit."""
        if self._parked is None:
            return
        for name, gradient in self._parked.items():
            self._parameters[name].grad = gradient.to(self._parameters[name].device)
        self._move_optimizer(self._family.device)
        self._parked = None

    def _move_optimizer(self, device: torch.device | str) -> None:
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":  # torch keeps the step counter on the host
                    state[key] = value.to(device)

    # State on disk

    def save(self, folder: Path) -> dict[str, str]:
        """Write the state after the last commit; open gradients are not part of it. Returns SHA-256 by file name."""
        folder.mkdir(parents=True, exist_ok=True)
        optimizer = {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        hashes = {
            _WEIGHTS: write_tensors(folder / _WEIGHTS, self._parameters),
            _OPTIMIZER: write_tensors(folder / _OPTIMIZER, optimizer),
            _STATE: write_json(folder / _STATE, {"version": self.version, "old_log_probs": self._old_log_probs}),
        }
        if self._average is not None:
            hashes[_EMA] = write_tensors(folder / _EMA, self._average.tensors)
        return hashes

    @torch.no_grad()
    def restore(self, folder: Path) -> int:
        """Continue bit-identically from what :meth:`save` wrote; drops open gradients. Returns the version.

        Raises:
            CheckpointError: a file is missing or corrupt, or is of another model or optimizer.
        """
        state = read_json(folder / _STATE)
        weights = read_tensors(folder / _WEIGHTS)
        optimizer = read_tensors(folder / _OPTIMIZER)
        _check_tensors(folder / _WEIGHTS, weights, self._parameters)
        if self._average is not None:
            average = read_tensors(folder / _EMA)
            _check_tensors(folder / _EMA, average, self._average.tensors)
            for name, tensor in self._average.tensors.items():
                tensor.copy_(average[name])
        self._abandon()
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        self._parked = None
        self._optimizer.state.clear()
        for key, tensor in optimizer.items():
            name, _, slot = key.rpartition("/")
            if name not in self._parameters:
                raise CheckpointError(f"{folder / _OPTIMIZER} is of another model: it has state for {name!r}")
            parameter = self._parameters[name]
            self._optimizer.state[parameter][slot] = tensor if slot == "step" else tensor.to(parameter.device)
        self.version = int(state["version"])
        self._old_log_probs = state["old_log_probs"]
        return self.version


@dataclass(frozen=True, slots=True)
class _Batch:
    """A micro-batch as the forwards see it."""

    trajectories: Trajectories
    names: list[str]
    rows: list[int]
    advantages: Tensor
    unit: int


@dataclass(frozen=True, slots=True)
class _Terms:
    """The real (row, step) pairs of one forward; all tensors are (rows, steps) or broadcast to it."""

    log_prob: Tensor
    behaviour: Tensor
    advantage: Tensor
    names: list[str]
    steps: list[int]

    def check_finite(self, values: Tensor, what: str) -> None:
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            row, step = (int(i) for i in (~finite).nonzero()[0])
            raise NumericsError(
                f"the {what} of sample {self.names[row]} at denoising step {self.steps[step]} is not finite; "
                "the policy has diverged: lower optimizer.lr, or go back to an earlier checkpoint"
            )


def _advantages(advantages: Sequence[float | None], names: Sequence[str]) -> Tensor:
    for name, advantage in zip(names, advantages, strict=True):
        if advantage is not None and not math.isfinite(advantage):
            raise NumericsError(f"the advantage of sample {name} is {advantage}")
    return torch.tensor([0.0 if advantage is None else advantage for advantage in advantages], dtype=torch.float64)


def _check_tensors(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    wrong = sorted(found.keys() ^ wanted.keys()) or [n for n in wanted if found[n].shape != wanted[n].shape]
    if wrong:
        raise CheckpointError(f"{path} is of another model: {len(wrong)} tensors differ, first {wrong[0]!r}")
