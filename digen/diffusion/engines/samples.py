"""What is asked of an engine for one sample, and what it answers: shared by the worker and the engine's pipelines.

A micro-batch becomes one request a sample; the engine's own scheduler puts requests together again, whoever sent them.
So everything that decides a trajectory is in its own request, and is read from there. Imports no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from digen.diffusion.algorithms.base import Algorithm
from digen.diffusion.algorithms.sample import SampleAlgorithm
from digen.diffusion.algorithms.trajectory import TrajectoryAlgorithm
from digen.diffusion.families.base import Conditioning, Family, Schedule, compute_dtype
from digen.diffusion.sampler import sample_clean, sample_sde
from digen.diffusion.seeds import INITIAL_NOISE, STEP_NOISE, draw, group_seeds, streams
from digen.diffusion.solvers import SolverName
from digen.diffusion.trajectories import Trajectories
from digen.errors import ConfigError, NumericsError, ProtocolError
from digen.types import GroupSlice, MicroBatch, Prompt

Record = dict[str, Any]
"""What a sample's request is answered with: tensors and plain values by name."""


class Walk(Struct, frozen=True):
    """How a trajectory is drawn, whatever its sample."""

    run_seed: int
    step: int
    levels: tuple[float, ...]
    """``T + 1``."""
    times: tuple[float, ...]
    """``T``."""
    kernel: str | None
    """How a noisy transition is drawn; ``None``: there is none, and only the sample is kept."""
    noise_level: float
    noisy: tuple[int, ...]
    """The transitions with noise."""
    solver: SolverName
    """How the others are taken."""
    shared_noise: bool
    keep_means: bool
    unit: int
    """Samples in one forward."""

    @property
    def schedule(self) -> Schedule:
        """The transitions."""
        levels, times = (torch.tensor(values, dtype=torch.float64) for values in (self.levels, self.times))
        return Schedule(levels, times)


class Sample(Struct, frozen=True):
    """One sample's request."""

    uid: str
    number: int
    """In its group."""
    group_size: int
    walk: Walk


def requests(algorithm: Algorithm, micro_batch: MicroBatch, schedule: Schedule, *, unit: int) -> list[Sample]:
    """The requests of a micro-batch, in the order of its rows.

    Raises:
        ConfigError: the algorithm draws its samples by a method of its own, of which an engine knows nothing.
    """
    solver, kind = algorithm.config.sampling.solver, type(algorithm)
    if kind.draw not in {TrajectoryAlgorithm.draw, SampleAlgorithm.draw}:
        raise ConfigError(
            f"algorithm {algorithm.config.algorithm.name!r} draws its samples itself ({kind.__name__}.draw), which the "
            "engine vllm_omni cannot do; leave workers.engines out"
        )
    noisy: Sequence[int] = ()
    kernel, shared = None, False
    if isinstance(algorithm, TrajectoryAlgorithm):
        kernel, noisy = algorithm.kernel, algorithm.noisy_steps(micro_batch, schedule.num_steps)
        shared = algorithm.settings.options.shared_noise
    walk = Walk(
        run_seed=micro_batch.run_seed,
        step=micro_batch.step,
        levels=tuple(schedule.levels.tolist()),
        times=tuple(schedule.times.tolist()),
        kernel=kernel,
        noise_level=algorithm.settings.noise_level,
        noisy=tuple(noisy),
        solver=solver,
        shared_noise=shared,
        keep_means=kernel is not None and algorithm.declaration.means,
        unit=unit,
    )
    return [Sample(piece.uid, number, piece.size, walk) for piece, number in micro_batch.samples()]


def adapter_path(number: int) -> str:
    """A name in the place of an adapter's folder; the engine wants an absolute one, and never looks there."""
    return f"/digen/adapter-{number}"


# In the engine


def answer(family: Family, samples: Sequence[Sample], conditioning: Sequence[Conditioning]) -> list[Record]:
    """Draw the samples of a batch that the engine has put together, each as its own request says.

    Samples of one walk share forwards of ``walk.unit`` rows, padded; others have forwards of their own. A sample that
    is not finite spoils its walk's answers, which then say ``error`` and nothing else.

    Args:
        family: the model, with the engine's network.
        samples: the requests.
        conditioning: the encoded prompt of each, one row.
    """
    records: list[Record] = [{} for _ in samples]
    for walk in dict.fromkeys(sample.walk for sample in samples):
        rows = [row for row, sample in enumerate(samples) if sample.walk == walk]
        taken = [conditioning[row] for row in rows]
        together = {name: torch.cat([each[name] for each in taken]) for name in taken[0]}
        micro_batch = _micro_batch(walk, [samples[row] for row in rows])
        try:
            drawn = _draw(family, walk, micro_batch, together)
        except NumericsError as error:
            split: list[Record] = [{"error": str(error)}] * len(rows)
        else:
            split = _split(drawn, walk, micro_batch)
        for row, record in zip(rows, split, strict=True):
            records[row] = record
    return records


def _draw(family: Family, walk: Walk, micro_batch: MicroBatch, conditioning: Conditioning) -> Trajectories:
    schedule, solver = walk.schedule, walk.solver
    if walk.kernel is None:
        return sample_clean(family, micro_batch, conditioning, schedule, unit=walk.unit, solver=solver)
    return sample_sde(
        family,
        micro_batch,
        conditioning,
        schedule,
        noise_level=walk.noise_level,
        unit=walk.unit,
        kernel=walk.kernel,
        noisy=walk.noisy,
        solver=solver,
        shared_noise=walk.shared_noise,
        keep_means=walk.keep_means,
    )


def _split(drawn: Trajectories, walk: Walk, micro_batch: MicroBatch) -> list[Record]:
    """One record a sample. The engine's own splitter drops trajectories."""
    echo = msgspec.to_builtins(walk)
    initial, noise = _seeds(walk, micro_batch)
    records = []
    for row, (piece, number) in enumerate(micro_batch.samples()):
        record: Record = {"sample": [piece.uid, number], "seeds": [initial[row], noise[row]], "walk": echo}
        record |= {"levels": drawn.levels, "times": drawn.times, "latents": drawn.latents[row].clone()}
        if drawn.log_probs is not None:
            record["log_probs"] = drawn.log_probs[row].clone()
        if drawn.means is not None:
            record["means"] = drawn.means[row].clone()
        records.append(record)
    return records


def _micro_batch(walk: Walk, samples: Sequence[Sample]) -> MicroBatch:
    slices = tuple(GroupSlice(each.uid, Prompt(""), each.number, 1, each.group_size) for each in samples)
    return MicroBatch(walk.run_seed, walk.step, 0, slices)


def _seeds(walk: Walk, micro_batch: MicroBatch) -> tuple[list[int], list[int]]:
    """Of the initial noise and of the steps."""
    shared = walk.shared_noise
    initial = group_seeds(micro_batch, INITIAL_NOISE) if shared else micro_batch.seeds(INITIAL_NOISE)
    return initial, micro_batch.seeds(STEP_NOISE)


# In the worker


def assemble(
    records: Sequence[Record],
    samples: Sequence[Sample],
    conditioning: Conditioning,
    *,
    latent_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Trajectories:
    """The trajectories of a micro-batch, after a check that each was drawn as it was asked for.

    Names, seeds, noise levels, times, window and kernel must be those of the request, shapes those of the model, and
    the first latent the very noise of its seed.

    Args:
        records: the answers, in the order of the requests.
        samples: the requests.
        conditioning: the encoded prompts, one row a sample.
        latent_shape: of one sample.
        dtype: of the model.

    Raises:
        NumericsError: the engine found a latent or log-probability that is not finite.
        ProtocolError: an answer lacks something, or was drawn otherwise; names the sample and both values.
    """
    precision = compute_dtype(dtype)
    for record, sample in zip(records, samples, strict=True):
        if "error" in record:
            raise NumericsError(record["error"])
        _check(record, sample, latent_shape, precision)
    first = records[0]
    return Trajectories(
        _stack(records, "latents"),
        _stack(records, "log_probs") if "log_probs" in first else None,
        first["levels"],
        first["times"],
        conditioning,
        means=_stack(records, "means") if "means" in first else None,
    )


def _stack(records: Sequence[Record], name: str) -> Tensor:
    return torch.stack([record[name] for record in records])


def _check(record: Record, sample: Sample, latent_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    walk, name = sample.walk, f"{sample.uid}/{sample.number}"
    initial, noise = _seeds(walk, _micro_batch(walk, [sample]))
    schedule = walk.schedule
    num_steps = schedule.num_steps
    wanted: Record = {"sample": [sample.uid, sample.number], "seeds": [initial[0], noise[0]]}
    wanted |= {"walk": msgspec.to_builtins(walk)}
    for field, value in wanted.items():
        if field not in record:
            raise ProtocolError(f"the engine's answer for sample {name} lacks {field!r}; it has {sorted(record)}")
        found = msgspec.to_builtins(record[field])
        if found != value:
            raise ProtocolError(f"the engine drew sample {name} with another {field} than asked: {found}, not {value}")
    tensors = {"levels": schedule.levels.to(dtype), "times": schedule.times.to(dtype)}
    for field, tensor in tensors.items():
        used = record.get(field)
        if not isinstance(used, Tensor) or not torch.equal(used, tensor):
            raise ProtocolError(
                f"the engine drew sample {name} with other {field} than asked: {used}, not {tensor}; a scheduler in "
                "the engine has shifted them"
            )
    trajectory = walk.kernel is not None
    shapes: dict[str, tuple[int, ...]] = {"latents": ((num_steps if trajectory else 0) + 1, *latent_shape)}
    shapes |= {"log_probs": (num_steps,)} if trajectory else {}
    shapes |= {"means": (num_steps, *latent_shape)} if walk.keep_means else {}
    for field, shape in shapes.items():
        values = record.get(field)
        if not isinstance(values, Tensor) or values.shape != shape or values.dtype != dtype:
            found = (tuple(values.shape), values.dtype) if isinstance(values, Tensor) else values
            raise ProtocolError(f"the engine's {field} of sample {name} are {found}, not {(shape, dtype)}")
    if trajectory:
        start = draw(streams(initial), latent_shape)[0].to(dtype)
        if not torch.equal(record["latents"][0], start):
            raise ProtocolError(f"the engine drew sample {name} from another noise than that of its seed {initial[0]}")
