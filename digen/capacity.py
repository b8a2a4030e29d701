"""What GPUs can do: how a group's speed grows with its GPUs, how their types differ, and what fits in their memory.

The inputs stand in a config's ``costs`` section: durations on some reference GPUs, stage scaling (paper 2.2, Fig. 3),
GPU types and a memory model. Whether they were measured or assumed is the user's to say; nothing is found out here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from digen.costs import arithmetic, durations_for, to_millionth, update_factor
from digen.errors import ConfigError

if TYPE_CHECKING:
    from digen.config import CostsSection, RunConfig
    from digen.durations import Durations

Stage = Literal["generate", "update"]

ANONYMOUS = "gpu"
"""The type of GPUs where ``costs.types`` describes none: those that the durations stand for."""

_GIB = 2**30


class Group(NamedTuple):
    """GPUs that work as one: a generator group, or the trainer. It goes at the pace of the slowest type in it."""

    gpus: tuple[tuple[str, int], ...]
    """(type, number)."""

    @property
    def size(self) -> int:
        """Its number of GPUs."""
        return sum(count for _, count in self.gpus)

    @property
    def types(self) -> tuple[str, ...]:
        """The types in it."""
        return tuple(name for name, _ in self.gpus)

    def __str__(self) -> str:
        return " + ".join(f"{count} {name}" for name, count in self.gpus)


class Layout(NamedTuple):
    """Which GPUs do what."""

    generators: tuple[Group, ...]
    """None of them: one group does every stage (mode colocated)."""
    trainer: Group

    def __str__(self) -> str:
        if not self.generators:
            return f"{self.trainer} colocated"
        runs = [(group, len(list(same))) for group, same in itertools.groupby(self.generators)]
        return f"{self.trainer} train, " + ", ".join(f"{n} x {group}" for group, n in runs) + " generate"


class Need(NamedTuple):
    """Memory of one GPU, in GiB."""

    parts: tuple[tuple[str, Fraction], ...]
    """What it is needed for."""
    available: Fraction
    """What the smallest GPU of the group has."""

    @property
    def total(self) -> Fraction:
        """All parts together."""
        return sum((amount for _, amount in self.parts), Fraction(0))

    @property
    def missing(self) -> Fraction:
        """What is needed beyond what is available."""
        return max(Fraction(0), self.total - self.available)

    @property
    def fits(self) -> bool:
        """Whether it is available."""
        return not self.missing

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {float(amount):.1f}" for name, amount in self.parts if amount)
        text = f"{parts} = {float(self.total):.1f} GiB a GPU of {float(self.available):.1f}"
        return text if self.fits else f"{text}, {float(self.missing):.1f} GiB are missing"


def parse_gpus(text: str, costs: CostsSection) -> dict[str, int]:
    """Read ``'16'`` or ``'a=8,c=8'``: how many GPUs there are of each type.

    Raises:
        ConfigError: it is neither, a type is not described, or several types are and it does not say which.
    """
    known = list(costs.types)
    found: dict[str, int] = {}
    for word in text.split(","):
        name, equals, number = word.strip().rpartition("=")
        if not number.strip().isdecimal() or int(number) < 1:
            raise ConfigError(
                f"--gpus {text}: {word.strip()!r} is not a number of GPUs of at least 1; use 16 or a=8,c=8"
            )
        if not equals and len(known) > 1:
            raise ConfigError(f"--gpus {text}: costs.types has {', '.join(known)}; say how many of each: {known[0]}=8")
        name = name.strip() if equals else (known or [ANONYMOUS])[0]
        if equals and name not in known:
            raise ConfigError(
                f"--gpus {text}: {name!r} is not described in costs.types (known: {', '.join(known) or 'none'})"
            )
        if name in found:
            raise ConfigError(f"--gpus {text}: {name} is given twice")
        found[name] = int(number)
    return found


class Capacity:
    """Durations and memory of a config's job on any layout of GPUs, by what its ``costs`` say.

    Raises:
        ConfigError: the config has no source of durations, or one that does not fit it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._costs = costs = config.costs
        self._base = durations_for(config)
        self._size = arithmetic(config).micro_batch_size
        half = (costs.gpus or 16) // 2
        self._generator_gpus = half if costs.model is not None else costs.generator_gpus or 1
        self._trainer_gpus = half if costs.model is not None else costs.trainer_gpus or 1

    def largest(self, stage: Stage) -> int:
        """GPUs of the largest group that the stage's scaling curve covers."""
        return int(getattr(self._costs.scaling, stage)[-1][0])

    def durations(self, layout: Layout, *, micro_batch_size: int, tsp_chunk: int) -> Durations:
        """The durations of a layout with other micro-batches and another TSP chunk, to a millionth.

        Generations, scores and assists scale by the curve ``generate`` and the type's speed in it, updates and the
        optimizer step by ``update``. A share of a generation's and an update's time does not shrink with the
        micro-batch (``costs.fixed_share``); of a score's, all of it does. Loads and switches stay as they are: they
        move weights, which no layout makes smaller.

        Raises:
            ConfigError: a curve does not cover a group, or nothing says what the TSP chunk changes.
        """
        base, trainer = self._base, layout.trainer
        ratio = Fraction(micro_batch_size, self._size)
        fixed = Fraction(self._costs.fixed_share)
        part = fixed + (1 - fixed) * ratio
        factor = update_factor(self._config, tsp_chunk)
        if factor is None:
            raise ConfigError("costs.tsp_share: nothing says what another algorithm.tsp_chunk changes")

        def scaled(value: Decimal | Fraction, factor: Fraction) -> Decimal:
            return value if factor == 1 and isinstance(value, Decimal) else to_millionth(Fraction(value) * factor)

        generate, score = _mean(base.generate_s), _mean(base.score_s)
        paces = [self._pace("generate", group, self._generator_gpus) for group in layout.generators or (trainer,)]
        generating = tuple(scaled(generate, part * pace) for pace in paces)
        assisting = self._pace("generate", trainer, self._trainer_gpus)
        training = self._pace("update", trainer, self._trainer_gpus)
        samples = self._config.plan.prompts_per_step * self._config.plan.samples_per_prompt
        return replace(
            base,
            num_micro_batches=samples // micro_batch_size,
            micro_batches_per_group=max(1, self._config.plan.samples_per_prompt // micro_batch_size),
            generate_s=generating,
            score_s=tuple(scaled(score, ratio * pace) for pace in paces),
            update_s=scaled(base.update_s, part * factor * training),
            assist_s=scaled(base.assist_s, part * assisting) if layout.generators else generating[0],
            commit_s=scaled(base.commit_s, training),
        )

    def _pace(self, stage: Stage, group: Group, reference: int) -> Fraction:
        """How much longer a task takes on ``group`` than on ``reference`` GPUs of speed 1."""
        types = self._costs.types
        speed = min(Fraction(getattr(types[name], stage)) if types else Fraction(1) for name in group.types)
        return self._throughput(stage, reference) / (self._throughput(stage, group.size) * speed)

    def _throughput(self, stage: Stage, size: int) -> Fraction:
        points = getattr(self._costs.scaling, stage)
        for (fewer, slower), (more, faster) in itertools.pairwise(points):
            if fewer <= size <= more:
                return Fraction(slower) + Fraction(size - fewer, more - fewer) * (Fraction(faster) - Fraction(slower))
        if len(points) == 1 and points[0][0] == size:
            return Fraction(points[0][1])
        raise ConfigError(
            f"costs.scaling.{stage}: no point for {size} GPUs; the curve goes from {points[0][0]} to {points[-1][0]}"
        )

    def even(self, group: Group, micro_batch_size: int) -> bool:
        """Whether a forward's samples are shared out evenly: equally many on each GPU, or equally many GPUs for each.

        The scaling curves mean such groups; six GPUs are no faster than four with eight samples.
        """
        samples = self._config.model.forward_batch or micro_batch_size
        return samples % group.size == 0 or group.size % samples == 0

    # ---- memory ------------------------------------------------------------------------------------------------

    def generator_need(self, group: Group, *, micro_batch_size: int) -> Need | None:
        """What a GPU of a generator group must hold: weights, and the samples that it draws and scores at once.

        ``None`` where ``costs.memory`` describes nothing.
        """
        memory = self._costs.memory
        if memory.parameters_b is None:
            return None
        weights = Fraction(memory.parameters_b) * 10**9 * Fraction(memory.weight_bytes) / _GIB
        parts = {
            "weights": weights / (group.size if memory.shard_generators else 1),
            "generation": self._samples(group, micro_batch_size) * Fraction(memory.generation_gib or 0),
            "reserve": Fraction(memory.reserve_gib),
        }
        return self._need(group, parts.items())

    def trainer_need(self, group: Group, *, micro_batch_size: int, tsp_chunk: int, assists: bool) -> Need | None:
        """What a GPU of the trainer must hold at its peak, which is in an update or, with ``assists``, in an assist.

        Weights, gradients and optimizer state are shared out over the group (full sharding); activations grow with
        the samples of a forward on each GPU and the timesteps in it. For an assist ``workers.offload`` moves gradients
        and optimizer state out of the way. ``None`` where ``costs.memory`` describes nothing.
        """
        memory = self._costs.memory
        if memory.parameters_b is None:
            return None
        share = Fraction(memory.parameters_b) * 10**9 / _GIB / group.size
        trained = share * Fraction(memory.trainable_share)
        samples = self._samples(group, micro_batch_size)
        weights = {"weights": share * Fraction(memory.weight_bytes)}
        state = {
            "gradients": trained * Fraction(memory.gradient_bytes),
            "optimizer": trained * Fraction(memory.optimizer_bytes),
        }
        reserve = {"reserve": Fraction(memory.reserve_gib)}
        activations = {"activations": samples * tsp_chunk * Fraction(memory.activation_gib or 0)}
        needs = [self._need(group, (weights | state | activations | reserve).items())]
        if assists:
            generation = {"generation": samples * Fraction(memory.generation_gib or 0)}
            kept = {} if self._config.workers.offload else state
            needs.append(self._need(group, (weights | kept | generation | reserve).items()))
        return max(needs, key=lambda need: need.total)

    def _samples(self, group: Group, micro_batch_size: int) -> int:
        """Samples of a forward on each GPU of a group."""
        return -(-(self._config.model.forward_batch or micro_batch_size) // group.size)

    def _need(self, group: Group, parts: Iterable[tuple[str, Fraction]]) -> Need:
        available = min(Fraction(self._costs.types[name].memory_gib or 0) for name in group.types)
        return Need(tuple(parts), available)


def _mean(values: tuple[Decimal, ...]) -> Decimal | Fraction:
    return values[0] if len(set(values)) == 1 else sum(map(Fraction, values), Fraction(0)) / len(values)
