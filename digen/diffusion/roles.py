"""The targets that worker processes build: generator, trainer, and both in one.

They are plain blocking classes with the methods of :data:`digen.handles.METHODS`, so they also work in this process,
behind a :class:`digen.InProcessWorker` or called directly. ``config`` is a :class:`digen.RunConfig` as plain JSON data;
``folder`` is the run's folder, where previews are written; ``ranks`` says which rank of a worker this process is, see
:mod:`digen.diffusion.ranks`. Ranks share the samples of a call. Rank 0 has the answer; what the others return is of the
same type, but of their own rows or of none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import msgspec

from digen.errors import InvariantViolation, WorkerError
from digen.extras import explain

try:
    import diffusers  # noqa: F401 - a family needs it; asked for here, so that its absence is one clear error
    import numpy as np
    import PIL  # noqa: F401 - as above
    import safetensors  # noqa: F401 - as above
    import torch
    from numpy.typing import NDArray
except ImportError as error:
    explain(error, "diffusion")
    raise

from digen.config import RunConfig
from digen.diffusion import families
from digen.diffusion.algorithms.base import build_algorithm
from digen.diffusion.channels import Receiver, build_sender
from digen.diffusion.evaluate import evaluate
from digen.diffusion.families.base import Conditioning, Family
from digen.diffusion.families.pipeline import Part
from digen.diffusion.preview import Cell, Section, cells_of, gather_cells, write_grid
from digen.diffusion.ranks import Ranks
from digen.diffusion.rewards.compute import Reward, RewardFunction, build_callable
from digen.diffusion.saving import Saving
from digen.diffusion.seeds import INITIAL_NOISE
from digen.diffusion.sharding import Shards
from digen.diffusion.state import load_weights
from digen.diffusion.trajectories import Trajectories, conditioning_arrays
from digen.diffusion.units import part_of
from digen.diffusion.update import Learner
from digen.handles import Memory
from digen.types import (
    CommitReport,
    Encoded,
    EvaluationReport,
    EvaluationRequest,
    LoadReport,
    MicroBatch,
    Payload,
    Prompt,
    Publication,
    Rollout,
    Scored,
    Snapshot,
    UpdateReport,
)


def build_family(config: RunConfig, parts: frozenset[Part], *, keep_reference: bool = False) -> Family:
    """Load the family of a config in evaluation mode: those ``parts`` of its model that are needed.

    With ``keep_reference`` it can also be what it was before training: :meth:`Family.reference`.

    Raises:
        ConfigError: the family is unknown, or its folder is missing or is no model.
    """
    module, _, name = families.lookup(config.model.family).target.partition(":")
    family: Family = getattr(import_module(module), name)(
        model=config.model, sampling=config.sampling, parts=parts, keep_reference=keep_reference
    )
    return family


class _Host:
    """A loaded family."""

    parts: ClassVar[frozenset[Part]] = frozenset({"denoise", "encode", "decode"})
    """What it loads of the model."""

    def __init__(self, config: dict[str, Any], folder: str | None = None, ranks: dict[str, Any] | None = None) -> None:
        self._config = RunConfig.model_validate(config)
        self._folder = Path(folder) if folder is not None else None
        self._ranks = Ranks(ranks, self._config.model.device)
        with self._ranks.together():
            self._family = self._load()

    def _load(self) -> Family:
        return build_family(self._config, self.parts)


class _Policy(_Host):
    """A family that draws trajectories."""

    trains: ClassVar[bool] = False

    def __init__(self, config: dict[str, Any], folder: str | None = None, ranks: dict[str, Any] | None = None) -> None:
        super().__init__(config, folder, ranks)
        self._schedule = self._family.schedule(self._config.sampling.num_inference_steps)
        self._algorithm.check_schedule(self._schedule)
        self._encode = lru_cache(maxsize=256)(self._encode_one)

    def _load(self) -> Family:
        self._algorithm = build_algorithm(self._config)
        reference = self.trains and self._algorithm.needs_reference
        return build_family(self._config, self.parts, keep_reference=reference)

    @property
    def version(self) -> int:
        """Optimizer steps in the weights held now."""
        raise NotImplementedError

    def generate(self, micro_batch: MicroBatch, encoded: Encoded | None = None) -> Rollout:
        """Draw every sample with the weights held now; leaves gradients, optimizer state and parameters as they are.

        The payload is that of :class:`digen.diffusion.trajectories.Trajectories`. Without ``encoded`` the prompts are
        encoded here.

        Raises:
            NumericsError: a latent or log-probability is not finite.
            ConfigError: without ``encoded``, on a worker that has no encoders.
            RankFailed: on every rank but the one where that happened.
        """
        version = self.version
        began = perf_counter()
        unit = self._unit(micro_batch.num_samples)
        rows, num_own = self._ranks.rows(micro_batch.num_samples, unit)
        drawn = micro_batch if self._ranks.num_ranks == 1 else part_of(micro_batch, rows)
        with self._ranks.together():
            conditioning = self._conditioning(drawn, encoded)
            sampled = perf_counter()
            with self._sampling_weights():
                own = self._algorithm.draw(self._family, drawn, conditioning, self._schedule, unit=unit)
        whole = own if self._ranks.num_ranks == 1 else self._gather(own, num_own, micro_batch, encoded)
        return Rollout(
            micro_batch=micro_batch,
            version=version,
            version_end=self.version,
            payload=Payload({} if whole is None else whole.arrays()),
            stats={"encode_s": sampled - began, "sample_s": perf_counter() - sampled},
        )

    def _gather(
        self, own: Trajectories, count: int, micro_batch: MicroBatch, encoded: Encoded | None
    ) -> Trajectories | None:
        """The first ``count`` rows of every rank on rank 0, which has the conditioning of all without a gather."""
        drawn = {"latents": own.latents, "log_probs": own.log_probs, "means": own.means}
        parts = {name: self._ranks.gather(tensor[:count]) for name, tensor in drawn.items() if tensor is not None}
        rows = {name: tensor for name, tensor in parts.items() if tensor is not None}
        return replace(own, conditioning=self._conditioning(micro_batch, encoded), **rows) if rows else None

    def _sampling_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights of :attr:`version` that generators have."""
        return nullcontext()

    def _unit(self, num_samples: int) -> int:
        return self._config.model.forward_batch or num_samples

    def _conditioning(self, micro_batch: MicroBatch, encoded: Encoded | None) -> Conditioning:
        """One row per sample."""
        prompts = [piece.prompt for piece, _ in micro_batch.samples()]
        if encoded is None:
            rows = [self._encode(msgspec.json.encode(prompt)) for prompt in prompts]
            return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        order = [encoded.prompts.index(prompt) for prompt in prompts]
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in encoded.payload.items()}
        return {name: tensor[order].to(self._family.device) for name, tensor in arrays.items()}

    def _encode_one(self, key: bytes) -> Conditioning:
        # One prompt at a time: an encoder is not batch invariant either.
        with torch.no_grad():
            return self._family.encode([msgspec.json.decode(key, type=Prompt)])


class _Rewarding(_Host):
    """A host that decodes and scores."""

    @cached_property
    def _reward(self) -> Reward:
        return Reward(self._config.reward)

    def score(self, rollout: Rollout) -> Scored:
        """Decode the last latents and reward them; every ``observe.preview_every`` steps also draw a picture.

        The rows of a rank are rewarded in one call. Times are those of the slowest rank.

        Raises:
            RewardError: the reward failed, or is not one finite number a sample.
            RankFailed: on every rank but the one where that happened.
        """
        micro_batch, every = rollout.micro_batch, self._config.observe.preview_every
        shown = self._folder is not None and bool(every) and micro_batch.step % every == 0
        latents = np.asarray(rollout.payload["latents"])
        if len(latents) != micro_batch.num_samples:
            raise InvariantViolation(
                f"{len(latents)} trajectories for a micro-batch of {micro_batch.num_samples} samples"
            )
        with self._ranks.together():
            own, cells = self._score_own(micro_batch, latents[:, -1], shown=shown)
        began = perf_counter()
        parts = self._ranks.gather_plain(own, Scored)
        pictures = gather_cells(cells, self._ranks) if shown else ()
        if parts is None or pictures is None:
            return own
        rewards = tuple(reward for part in parts for reward in part.rewards)
        heads = {label: tuple(value for part in parts for value in part.heads.get(label, ())) for label in own.heads}
        stats = {name: max(part.stats[name] for part in parts) for name in own.stats}
        if self._folder is not None and shown:
            self._preview(self._folder / "samples", rollout, pictures, rewards)
        return Scored(rewards, heads, stats | {"preview_s": perf_counter() - began})

    def _score_own(
        self, micro_batch: MicroBatch, latents: NDArray[Any], *, shown: bool
    ) -> tuple[Scored, Sequence[Cell]]:
        """Rewards of this rank's rows of ``latents``, and with ``shown`` what they look like."""
        rows = self._ranks.share(len(latents))
        if not rows:
            return Scored((), stats={"decode_s": 0.0, "reward_s": 0.0}), ()
        began = perf_counter()
        images = self._family.decode(torch.from_numpy(latents[rows.start : rows.stop].copy()))
        decoded = perf_counter()
        samples = list(part_of(micro_batch, rows).samples())
        prompts = [piece.prompt for piece, _ in samples]
        scores = self._reward.score(images, prompts, [f"{piece.uid}/{sample}" for piece, sample in samples])
        stats = {"decode_s": decoded - began, "reward_s": perf_counter() - decoded}
        return Scored(scores.rewards, scores.heads, stats), cells_of(images) if shown else ()

    def _preview(self, folder: Path, rollout: Rollout, cells: Sequence[Cell], rewards: Sequence[float]) -> None:
        micro_batch = rollout.micro_batch
        seeds = micro_batch.seeds(INITIAL_NOISE)
        sections, row = [], 0
        for piece in micro_batch.slices:
            rows = slice(row, row + piece.count)
            row += piece.count
            header = (
                f"{piece.prompt.text}   group {piece.uid}   samples {piece.start} to {piece.start + piece.count - 1}",
                f"version {rollout.version}   run seed {micro_batch.run_seed}   first noise seed {seeds[rows.start]}",
            )
            sections.append(Section(header, cells[rows], [f"{value:.3f}" for value in rewards[rows]]))
        path = folder / f"step{micro_batch.step:06d}_mb{micro_batch.index:03d}.png"
        section = self._config.evaluation
        write_grid(path, sections, video=section.video, frames_per_second=section.frames_per_second)


class ScorerTarget(_Rewarding):
    """A scorer: decodes and rewards, so that no generator waits for a slow or a remote reward. Loads no denoiser.

    Args and errors: as :class:`GeneratorTarget`.
    """

    parts = frozenset({"decode"})

    def __init__(self, config: dict[str, Any], folder: str | None = None, ranks: dict[str, Any] | None = None) -> None:
        super().__init__(config, folder, ranks)
        _ = self._reward  # what is wrong with it shows before the run


class _Scorer(_Rewarding, _Policy):
    """A policy's host that also encodes and scores: the paper's colocated reward."""

    def __init__(self, config: dict[str, Any], folder: str | None = None, ranks: dict[str, Any] | None = None) -> None:
        super().__init__(config, folder, ranks)
        if not self._config.workers.scorers:
            _ = self._reward  # what is wrong with it shows before the run; beside scorers only evaluation needs it

    @cached_property
    def _judge(self) -> RewardFunction | None:
        target = families.lookup(self._config.model.family).judge
        return build_callable(target, {}) if target is not None else None

    def encode(self, prompts: Sequence[Prompt]) -> Encoded:
        """Encode the prompts of a step, for every worker that generates for it. Rank 0 does it."""
        if self._ranks.rank:
            return Encoded(tuple(prompts), Payload({}))
        rows = [self._encode(msgspec.json.encode(prompt)) for prompt in prompts]
        tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return Encoded(tuple(prompts), Payload(conditioning_arrays(tensors)))

    def evaluate(self, request: EvaluationRequest) -> EvaluationReport:
        """ODE samples of the weights held now; see :func:`digen.diffusion.evaluate.evaluate`."""
        section, plan = self._config.evaluation, self._config.plan
        num_steps = section.num_inference_steps or self._config.sampling.num_inference_steps
        with self._sampling_weights():
            return evaluate(
                self._family,
                request,
                version=self.version,
                schedule=self._family.schedule(num_steps),
                solver=self._config.sampling.solver,
                unit=self._unit(plan.micro_batch_size or plan.samples_per_prompt),
                reward=self._reward,
                judge=self._judge,
                section=section,
                ranks=self._ranks,
            )


class GeneratorTarget(_Scorer):
    """A generator: draws, scores, and loads what the trainer publishes.

    Several ranks share the forwards of a micro-batch, of ``model.forward_batch`` samples each, so that no bit of a
    trajectory depends on their number. Each holds the whole model, or with ``workers.fsdp.generators`` a part of it.

    Args:
        config: a :class:`digen.RunConfig` as plain JSON data.
        folder: the run's folder; ``None`` draws no previews.
        ranks: a :class:`digen.diffusion.ranks.RankSpec` as plain data; ``None`` for a worker of one.

    Raises:
        ConfigError: model, family or reward cannot be built, or the family cannot be sharded.
        RankFailed: another rank could not be built, or was not met.
    """

    def __init__(self, config: dict[str, Any], folder: str | None = None, ranks: dict[str, Any] | None = None) -> None:
        super().__init__(config, folder, ranks)
        fsdp = self._config.workers.fsdp
        if fsdp.generators and self._ranks.num_ranks > 1:
            Shards(self._family, fsdp, self._ranks)
        self._version = 0
        self._receiver = Receiver(self._config.workers.weights)

    @property
    def version(self) -> int:
        """Version of the last load; 0 is the model's folder."""
        return self._version

    def load(self, published: Publication) -> LoadReport:
        """Replace the weights in place, and report the checksum of what the parameters then hold.

        Raises:
            ConfigError: the tensors do not fit the model one to one; nothing was replaced.
            WorkerTimeout, ProtocolError: they were not complete in time, or are damaged; the version is -1 then.
        """
        with self._ranks.together():
            try:
                report = self._receiver.load(published, self._family.parameters())
            except WorkerError:
                self._version = -1  # some of the weights are of one version and some of another
                raise
        self._version = published.version
        return report


class EvaluatorTarget(_Scorer):
    """Evaluates the weights of a checkpoint, or of the model's folder, in a process of its own. Trains nothing.

    Args:
        config: a :class:`digen.RunConfig` as plain JSON data.
        weights: the file of a checkpoint that holds them; ``None`` for the model's folder.
        version: optimizer steps in them.

    Raises:
        ConfigError: model, family or reward cannot be built.
        CheckpointError: the weights cannot be read, or are of another model.
    """

    def __init__(self, config: dict[str, Any], weights: str | None = None, version: int = 0) -> None:
        super().__init__(config)
        self._version = version
        if weights is not None:
            load_weights(Path(weights), self._family.parameters())

    @property
    def version(self) -> int:
        """Optimizer steps in the weights."""
        return self._version


class TrainerTarget(_Policy):
    """A trainer; its ``generate`` makes it eligible for assists. It has neither text encoders nor VAE.

    Several ranks hold a part of the weights each, see :class:`digen.diffusion.update.Learner`. Args and errors: as
    :class:`GeneratorTarget`, and

    Raises:
        ConfigError: the family cannot be sharded.
    """

    parts = frozenset({"denoise"})
    trains = True

    def __init__(self, config: dict[str, Any], folder: str | None = None, ranks: dict[str, Any] | None = None) -> None:
        super().__init__(config, folder, ranks)
        dtypes = {name: parameter.dtype for name, parameter in self._family.parameters().items()}
        workers, generators = self._config.workers, range(self._config.num_generators)
        self._sender = build_sender(
            workers.weights,
            self._ranks,
            dtypes,
            num_receivers=sum(workers.num_ranks(f"gen{number}") for number in generators),
            folder=self._folder,
        )
        self._learner = Learner(self._family, self._config, self._ranks)
        self._saving: Saving | None = None
        self._memory: Memory | None = None

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self._learner.version

    def update(self, rollout: Rollout, advantages: Sequence[float | None]) -> UpdateReport:
        """Accumulate one micro-batch's gradient; see :meth:`digen.diffusion.update.Learner.update`."""
        if rollout.version != rollout.version_end:
            raise InvariantViolation(
                f"micro-batch {rollout.micro_batch.index} of step {rollout.micro_batch.step} mixes the weights of "
                f"versions {rollout.version} and {rollout.version_end}"
            )
        trajectories = Trajectories.from_arrays(rollout.payload)
        if self._learner.overwrites_published:
            self._sender.settle()
        return self._learner.update(rollout.micro_batch, rollout.version, trajectories, advantages)

    def commit(self, step: int, indices: Sequence[int], scale: float | None = None) -> CommitReport:
        """Step the optimizer; see :meth:`digen.diffusion.update.Learner.commit`.

        Waits until the last publication is written, because it reads the weights.
        """
        self._sender.settle()
        return self._learner.commit(step, indices, scale)

    def publish(self, version: int) -> Publication:
        """Make the weights of ``version``, which must be the current one, available; they may be written meanwhile."""
        if version != self.version:
            raise InvariantViolation(f"asked to publish version {version}, but the trainer holds {self.version}")
        return self._sender.publish(version, self._learner.published_parameters())

    def lend_memory(self, memory: Memory) -> None:
        """Publish and take snapshots in this shared memory; see :class:`digen.handles.Memory`."""
        self._memory = memory
        self._sender.lend_memory(memory)

    def _sampling_weights(self) -> AbstractContextManager[None]:
        return self._learner.sampling_weights()

    def switch(self, to: str) -> None:
        """Begin (``"generate"``) or end (``"train"``) an assist.

        For the time between gradients and optimizer state leave the device with ``workers.offload``, and with
        ``workers.fsdp.assist: replica`` every rank of several holds whole weights.
        """
        if to not in {"generate", "train"}:
            raise InvariantViolation(f"switch to {to!r}; known: 'generate', 'train'")
        learner, workers = self._learner, self._config.workers
        if to == "generate":
            if workers.offload:
                learner.park()
            if workers.fsdp.assist == "replica":
                learner.gather()
        else:
            learner.release()
            learner.unpark()

    def save(self, folder: str) -> dict[str, str]:
        """Write weights, optimizer, EMA and version after the last commit; returns SHA-256 by file name.

        Several ranks write into the same files, whose hashes rank 0 returns.
        """
        return self._learner.save(Path(folder))

    def begin_save(self, folder: str) -> None:
        """As :meth:`save`, but only copy what is to be written; it is written while other calls are answered.

        Raises:
            InvariantViolation: what was begun before has not ended.
        """
        if self._saving is not None:
            raise InvariantViolation(f"asked to save to {folder} before saved() has ended the one before")
        self._saving = self._learner.begin_save(Path(folder))

    def saved(self) -> dict[str, str] | None:
        """What :meth:`begin_save` has written, as :meth:`save` returns it; ``None`` while it is being written.

        Raises:
            CheckpointError: it cannot be written.
            InvariantViolation: nothing is being saved.
        """
        if self._saving is None:
            raise InvariantViolation("saved() without begin_save() before it")
        try:
            hashes = self._saving.poll()
        except BaseException:
            self._saving = None
            raise
        if hashes is not None:
            self._saving = None
        return hashes

    def restore(self, folder: str) -> int:
        """Continue from what :meth:`save` wrote, bit for bit; returns the version."""
        self._sender.settle()
        return self._learner.restore(Path(folder))

    def snapshot(self) -> Snapshot:
        """Copy what :meth:`save` would write; see :meth:`digen.diffusion.update.Learner.snapshot`."""
        return self._learner.snapshot(self._memory)

    def recall(self, snapshot: Snapshot) -> int:
        """Continue from what :meth:`snapshot` copied, bit for bit; returns the version."""
        self._sender.settle()
        return self._learner.recall(snapshot)


class ColocatedTarget(_Scorer, TrainerTarget):
    """Every stage in one process: a trainer that also encodes, scores and evaluates."""

    parts = frozenset({"denoise", "encode", "decode"})
