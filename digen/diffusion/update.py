"""The learner: one gradient transaction per step, the optimizer step, and their state on disk.

Every update adds the *unnormalised* gradient of its (item, timestep) terms; the commit divides once by their number
Z over the whole step. So neither the order of the micro-batches, nor the terms in one forward (TSP, paper 3.2.2), nor
best-of-N, nor the number of ranks that share the forwards changes the gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from digen.checkpoint import WEIGHT_FILES
from digen.config import RunConfig
from digen.diffusion.algorithms.base import Batch, Forward, build_algorithm
from digen.diffusion.chunks import ForwardSize, ForwardSizes
from digen.diffusion.families.base import Family
from digen.diffusion.optim import MovingAverage, WeightCopy, build_optimizer, learning_rate
from digen.diffusion.ranks import Ranks
from digen.diffusion.saving import Saving
from digen.diffusion.sharding import Shards
from digen.diffusion.snapshot import Contents, Taken, TakenTensors, check_room, take
from digen.diffusion.state import TensorFile, open_tensors, read_json
from digen.diffusion.trajectories import Trajectories
from digen.diffusion.units import padded_units
from digen.errors import CheckpointError, InvariantViolation, NumericsError, StalenessViolation, StepFailed
from digen.handles import Memory
from digen.machine import available_memory
from digen.types import CommitReport, MicroBatch, Snapshot, UpdateReport

_WEIGHTS, _EMA = WEIGHT_FILES["raw"], WEIGHT_FILES["ema"]
_OPTIMIZER, _ALGORITHM, _STATE = "optimizer.safetensors", "algorithm.safetensors", "state.json"


_OldLogProbs = Literal["behaviour", "recompute"] | None
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is no tensor."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    old_log_probs: _OldLogProbs
    forwards: list[tuple[_Count, _Count, _Count, _Count]]
    num_skipped: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps in a row that were skipped before it."""


class Learner:
    """Trains a family with the algorithm of a config.

    Args:
        family: its parameters are trained in place.
        config: algorithm, optimizer, forward size and window are read from it.
        ranks: that train together: each has a learner, and all make the same calls with the same arguments. They shard
            the family (FSDP2) and share the forwards of an update; what they report is the same.

    Raises:
        ConfigError: the algorithm is unknown or does not take its options, or the family cannot be sharded.
    """

    def __init__(self, family: Family, config: RunConfig, ranks: Ranks | None = None) -> None:
        self.version = 0
        """Optimizer steps taken."""
        self.algorithm = build_algorithm(config)
        """What is minimised."""
        self._family = family
        self._config = config
        self._ranks = ranks or Ranks()
        several, master_weights = self._ranks.num_ranks > 1, config.optimizer.master_weights
        self._shards = (
            Shards(family, config.workers.fsdp, self._ranks, master_weights=master_weights)
            if several or master_weights
            else None
        )
        self._parameters = family.parameters()
        self.algorithm.begin(self._parameters)
        section = config.optimizer
        self._optimizer = build_optimizer(list(self._parameters.values()), section)
        self._average = (
            MovingAverage(self._parameters, section.ema_decay, section.ema_interval)
            if section.ema_decay is not None
            else None
        )
        self._num_skipped = 0
        self._step: int | None = None
        self._num_terms: dict[int, int] = {}
        self._old_log_probs: _OldLogProbs = None  # decided by the start-up check
        chunk = config.algorithm.tsp_chunk
        # An attempt that fails on one rank would leave the others waiting in a collective.
        self._forwards = ForwardSizes("all" if several and chunk == "auto" else chunk, self._optimizer)
        self._parked: dict[str, Tensor] | None = None
        self._gathered = False
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._has_room = False

    def published_parameters(self) -> Mapping[str, Tensor]:
        """What generators are to sample with; float32 where the optimizer has master weights."""
        return self.algorithm.published_parameters(self._parameters)

    @property
    def overwrites_published(self) -> bool:
        """Whether an update lends other values to what is published, in its memory."""
        held = self.algorithm.held()
        return self._shards is not None and held is not None and self.published_parameters() is self._parameters

    def sampling_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that generators have; for an assist, and for evaluation."""
        return self.algorithm.sampling_weights(self._parameters)

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
            StepFailed: memory does not suffice.
            RankFailed: another rank's share failed.

        An error while gradients are being added voids the transaction: nothing of it can be committed.
        """
        self._check_update(micro_batch, version, trajectories, advantages)
        batch = self._batch(micro_batch, trajectories, advantages)
        self._step = micro_batch.step
        metrics = {}
        try:
            if batch.items:
                size = self._fit(batch)
                fresh, tolerance = version == self.version, self.algorithm.tolerance()
                if fresh and self._old_log_probs is None and tolerance is not None:
                    metrics["ratio/floor"] = self._start_up_check(batch, size, *tolerance)
                recompute = fresh and self._old_log_probs == "recompute"
                metrics |= self._accumulate(replace(batch, recompute=recompute), size)
        except torch.OutOfMemoryError as error:
            self._give_up()
            raise StepFailed(
                f"a forward of {size.items} samples at {size.steps} timesteps does not fit in memory ({error}); "
                "set algorithm.tsp_chunk to fewer timesteps, or model.forward_batch to fewer samples"
            ) from error
        except BaseException:
            self._give_up()
            raise
        num_terms = sum(map(len, batch.steps))
        self._num_terms[micro_batch.index] = num_terms
        return UpdateReport(step=micro_batch.step, index=micro_batch.index, num_terms=num_terms, metrics=metrics)

    def commit(self, step: int, indices: Sequence[int], scale: float | None = None) -> CommitReport:
        """Divide the accumulated gradient by its number of terms, clip it, and step the optimizer.

        Args:
            step: the open step.
            indices: the micro-batches that the transaction must consist of, in any order.
            scale: what the gradient is multiplied by, where a divisor that all advantages share was left out of them.

        Raises:
            InvariantViolation: the transaction is of another step or consists of other micro-batches.
            StepFailed: no term was accumulated.
            NumericsError: the gradient's norm is not finite, and as many steps as may be were skipped for that before;
                the weights stay as they are.
        """
        self._check_commit(step, indices)
        num_terms = sum(self._num_terms.values())
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        torch._foreach_div_(gradients, num_terms)
        if scale is not None:
            torch._foreach_mul_(gradients, scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        size = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        section = self._config.optimizer
        if not math.isfinite(size):
            return self._skip(step, size, num_terms)
        self._num_skipped = 0
        if section.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), section.max_grad_norm, norm)
        rate = learning_rate(section, self.version, self._config.run.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if self._average is not None:
            self._average.update(self._parameters, self.version)
        return self._committed(num_terms, {"grad_norm": size, "lr": rate})

    def _skip(self, step: int, size: float, num_terms: int) -> CommitReport:
        """A step without a finite gradient: the next version has the same weights."""
        limit = self._config.optimizer.max_skipped_steps
        if self._num_skipped == limit:
            self._abandon()
            before = f" after {limit} skipped steps" if limit else ""
            raise NumericsError(
                f"the gradient's norm at step {step} is {size}{before}; the policy has diverged: "
                "lower optimizer.lr, or go back to an earlier checkpoint"
            )
        self._num_skipped += 1
        return self._committed(num_terms, {"skipped_steps": 1.0})

    def _committed(self, num_terms: int, metrics: dict[str, float]) -> CommitReport:
        self.version += 1
        self.algorithm.committed(self.version, self._parameters)
        self._abandon()
        return CommitReport(version=self.version, num_terms=num_terms, metrics=metrics)

    def _check_update(
        self, micro_batch: MicroBatch, version: int, trajectories: Trajectories, advantages: Sequence[float | None]
    ) -> None:
        what = f"micro-batch {micro_batch.index} of step {micro_batch.step}"
        if self._parked is not None or self._gathered:
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
        if self._parked is not None or self._gathered:
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

    def _give_up(self) -> None:
        self._abandon()
        if self._shards is not None:
            self._shards.reset()

    def _abandon(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._num_terms.clear()
        self._step = None

    # Forwards and gradients

    def _batch(self, micro_batch: MicroBatch, trajectories: Trajectories, advantages: Sequence[float | None]) -> Batch:
        names = [f"{piece.uid}/{sample}" for piece, sample in micro_batch.samples()]
        values = _advantages(advantages, names).to(trajectories.latents.dtype)
        rows = [row for row, advantage in enumerate(advantages) if advantage is not None]
        items = self.algorithm.items(micro_batch, rows, advantages)
        return Batch(
            micro_batch=micro_batch,
            trajectories=trajectories,
            names=names,
            advantages=values,
            items=items,
            steps=self.algorithm.trained_steps(micro_batch, items, trajectories.num_steps),
            recompute=False,
        )

    def _cut(self, batch: Batch, size: ForwardSize) -> Iterator[tuple[Forward, int, int]]:
        """Forwards of one size (TSP, 3.2.2), each with its number of real items and of real terms of each."""
        for places, num_items in padded_units(range(len(batch.items)), size.items):
            for numbers, num_terms in padded_units(range(len(batch.steps[0])), size.steps):
                forward = Forward(
                    batch=batch,
                    items=[batch.items[place] for place in places],
                    steps=[[batch.steps[place][number] for number in numbers] for place in places],
                    numbers=numbers,
                )
                yield forward, num_items, num_terms

    def _share(self, batch: Batch, size: ForwardSize) -> list[tuple[Forward, int, int]]:
        """The forwards of this rank, as many as any rank's: one with fewer runs another, in which nothing counts."""
        forwards = list(self._cut(batch, size))
        own = [forwards[number] for number in self._ranks.share(len(forwards))]
        most = -(-len(forwards) // self._ranks.num_ranks)
        return own + [(forwards[-1][0], 0, 0)] * (most - len(own))

    def _fit(self, batch: Batch) -> ForwardSize:
        unit = self._config.model.forward_batch or batch.micro_batch.num_samples
        whole = ForwardSize(self.algorithm.items_per_forward(unit, batch.micro_batch), len(batch.steps[0]))

        def attempt(size: ForwardSize) -> None:
            forward, _, _ = next(self._cut(batch, size))
            losses = self.algorithm.losses(self._family, forward)
            losses.loss.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated

        return self._forwards.fit(whole, attempt)

    def _accumulate(self, batch: Batch, size: ForwardSize) -> dict[str, float]:
        values: dict[str, list[Tensor]] = {}
        for forward, num_items, num_terms in self._share(batch, size):
            with self._ranks.together():  # what may fail has this forward's collectives behind it
                losses = self.algorithm.losses(self._family, forward)
                forward.check_finite(losses.loss, "loss")
            losses.loss[:num_items, :num_terms].sum().backward()  # type: ignore[no-untyped-call]  # as above
            for name, metric in losses.metrics.items():
                values.setdefault(name, []).append(metric[:num_items, :num_terms].flatten())
        metrics = {"tsp/items": float(size.items), "tsp/timesteps": float(size.steps)}
        for name, parts in values.items():
            joined = self._ranks.everywhere(torch.cat(parts))
            metrics[name] = float(joined.max() if name.endswith("max") else joined.mean())
        return metrics

    @torch.no_grad()
    def _start_up_check(self, batch: Batch, size: ForwardSize, field: str, tolerance: float) -> float:
        """Replay a fresh micro-batch, and decide where fresh samples' old log-probabilities come from."""
        with self._ranks.together():
            floor = max(
                float(self.algorithm.drift(self._family, forward).max()) for forward, _, _ in self._share(batch, size)
            )
        floor = self._ranks.largest(floor)
        limit = tolerance / 3
        stale_possible = self._config.schedule.resolved_window > 1
        choice = self._config.algorithm.old_logprobs
        if floor > limit and (stale_possible or choice == "behaviour"):
            why = (
                "stale samples need the log-probabilities of the generator"
                if stale_possible
                else "algorithm.old_logprobs is 'behaviour'"
            )
            raise NumericsError(
                f"replayed log-probabilities differ from the generator's by up to {floor:.3g}, more than a third of "
                f"{field} ({limit:.3g}), and {why}; raise it, use the same dtype and "
                "forward_batch with tsp_chunk=1, or set schedule.window=1 and old_logprobs=auto"
            )
        self._old_log_probs = "recompute" if choice == "recompute" or floor > limit else "behaviour"
        return floor

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
        self._move_optimizer(None)
        self._parked = None

    def _move_optimizer(self, device: str | None) -> None:
        """Move the optimizer's state to a device, by default its parameter's."""
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":  # torch keeps the step counter on the host
                    state[key] = value.to(device or parameter.device)

    def gather(self) -> None:
        """Hold the weights that generators have whole until :meth:`release`: forwards gather nothing meanwhile."""
        if self._shards is not None and not self._gathered:
            with self.sampling_weights():
                self._shards.gather()
            self._gathered = True

    def release(self) -> None:
        """Undo :meth:`gather`."""
        if self._shards is not None and self._gathered:
            self._shards.release()
        self._gathered = False

    # State on disk

    def save(self, folder: Path) -> dict[str, str]:
        """Write the state after the last commit; open gradients are not part of it. Returns SHA-256 by file name.

        With several ranks ``folder`` must be one that all of them see, and rank 0 alone returns the hashes.
        """
        return self._saving(folder).finish()

    def begin_save(self, folder: Path) -> Saving:
        """As :meth:`save`, but what is saved is copied to the host, and a thread writes it while training goes on.

        The copy's memory is kept for the next time, which must not begin before this one has ended.
        """
        return self._saving(folder, self._copies)

    def _saving(self, folder: Path, copies: dict[str, dict[str, Tensor]] | None = None) -> Saving:
        return Saving(folder, self._files(), {_STATE: self._plain()}, self._ranks, copies)

    def _files(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of the state, by the checkpoint's file that holds them."""
        optimizer = {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        return {_WEIGHTS: self._parameters, _OPTIMIZER: optimizer} | {
            name: held.tensors for name, held in self._held().items()
        }

    def _plain(self) -> dict[str, Any]:
        """The rest of the state, as plain data."""
        state = _State(self.version, self._old_log_probs, self._forwards.state(), self._num_skipped)
        found: dict[str, Any] = msgspec.to_builtins(state)
        return found

    def _held(self) -> dict[str, WeightCopy]:
        """Weights beside the trained ones, by file name."""
        found = {_EMA: self._average, _ALGORITHM: self.algorithm.held()}
        return {name: held for name, held in found.items() if held is not None}

    def restore(self, folder: Path) -> int:
        """Continue bit-identically from what :meth:`save` wrote, with however many ranks. Returns the version.

        Open gradients are dropped. With several ranks each must see ``folder``.

        Raises:
            CheckpointError: a file is missing or corrupt, or is of another model or optimizer.
        """
        with self._ranks.together():
            self._restore(folder)
        return self.version

    def _restore(self, folder: Path) -> None:
        try:
            state = msgspec.convert(read_json(folder / _STATE), _State)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"checkpoint file {folder / _STATE}: {error}; use an earlier checkpoint") from None
        with ExitStack() as stack:
            names = (_WEIGHTS, _OPTIMIZER, *self._held())
            self._take_over(state, {name: stack.enter_context(open_tensors(folder / name)) for name in names})

    def _take_over(self, state: _State, files: Mapping[str, TensorFile | TakenTensors]) -> None:
        wanted = {_WEIGHTS: self._parameters} | {name: held.tensors for name, held in self._held().items()}
        for name, tensors in wanted.items():
            files[name].check(tensors)
        slots = [key.rpartition("/") for key in files[_OPTIMIZER].shapes]
        for name, _, _ in slots:
            if name not in self._parameters:
                where = files[_OPTIMIZER].path
                raise CheckpointError(f"{where} is of another model: it has state for {name!r}")
        self._abandon()
        self._parked = None
        for name, tensors in wanted.items():
            files[name].read(tensors)
        self._optimizer.state.clear()
        for name, _, slot in slots:
            parameter = self._parameters[name]
            self._optimizer.state[parameter][slot] = files[_OPTIMIZER].like(f"{name}/{slot}", parameter)
        self.version = state.version
        self._old_log_probs = state.old_log_probs
        self._forwards.restore(state.forwards)
        self._num_skipped = state.num_skipped

    # State in memory

    def snapshot(self, memory: Memory | None) -> Snapshot:
        """Copy the state that :meth:`save` writes, after the last commit: of several ranks what this one holds.

        Args:
            memory: of the worker, where it is lent; else it is copied into memory of this process.

        Raises:
            ConfigError: before the first one, the machine has not the memory for all that will be held.
            RankFailed: another rank failed.
        """
        files = self._files()
        contents = Contents.of(files, self._plain())
        if not self._has_room:
            available = -self._ranks.largest(-available_memory())  # of all ranks before the first of them takes any
            check_room(int(self._ranks.largest(contents.nbytes)) * self._ranks.num_ranks, int(available))
            self._has_room = True
        with self._ranks.together():
            payload = take(contents, files, memory)
        return Snapshot(self.version, (payload,), contents.nbytes)

    def recall(self, snapshot: Snapshot) -> int:
        """Continue bit-identically from what :meth:`snapshot` copied on this rank. Returns the version.

        Open gradients are dropped.

        Raises:
            CheckpointError: it is damaged, or of another model or number of ranks; nothing was changed then.
            RankFailed: another rank failed.
        """
        with self._ranks.together():
            taken = Taken(snapshot.payloads)
        with self._ranks.together():  # that all have what is theirs is known by now
            self._take_over(msgspec.convert(taken.plain, _State), taken.files)
        self._has_room = True  # it is one of those that are held
        return self.version


def _advantages(advantages: Sequence[float | None], names: Sequence[str]) -> Tensor:
    for name, advantage in zip(names, advantages, strict=True):
        if advantage is not None and not math.isfinite(advantage):
            raise NumericsError(f"the advantage of sample {name} is {advantage}")
    return torch.tensor([0.0 if advantage is None else advantage for advantage in advantages], dtype=torch.float64)
