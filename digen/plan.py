"""The plan: prompts -> steps -> groups -> micro-batches, with every id and seed (paper 3.2.1, GAP).

A step takes P prompts (``prompts_per_step``) and draws K samples of each (``samples_per_prompt``). It is cut into B
micro-batches of m samples (``micro_batch_size``) along one of two axes; a generator has r ranks
(``generator_ranks``), each of which draws m / r of a micro-batch's samples:

===========  =======================================  ===========================  ==============  =================
axis         a micro-batch is                         m must satisfy               B               default m
===========  =======================================  ===========================  ==============  =================
generation   m samples of one prompt (GAP)            m divides K, r divides m     P * (K / m)     K
batch        the whole groups of m / K prompts        K divides m, m / K divides   P / (m / K)     r * K
                                                      P, r divides m
===========  =======================================  ===========================  ==============  =================

Figure 5 of the paper: r = 2, P = 4 and K = 2. Along the batch axis each rank samples a prompt of its own, so m = 4
and B = 2; along the generation axis both ranks sample the same prompt, so m = 2 and B = 4. The samples, their seeds
and the gradient are the same; only the units are finer, and a group's rewards are complete earlier.

A plan is arithmetic, not data: :meth:`Plan.step` computes a step from the plan's arguments when it is asked for, so
that a plan of a million steps costs no more than one of ten, and a resumed run sees the steps it would have seen.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal

import msgspec

from digen.errors import PlanError
from digen.types import GroupSlice, MicroBatch, Prompt, derive_seed

_CACHED_STEPS = 8
_MOST_SAMPLES = 1_000_000
"""Samples in a step, so that its arithmetic stays instant."""
_CACHED_EPOCHS = 4


class Plan:
    """Which samples every step draws, and how they are cut into micro-batches. Immutable.

    Prompts are walked in epochs, each a permutation of its own when ``shuffle`` is on. A step that crosses the end of
    an epoch goes on into the next one; it repeats a prompt only if ``prompts_per_step`` exceeds the number of
    prompts, and then under another uid.

    Args:
        prompts: what to sample from; a string is a prompt without metadata.
        num_steps: optimizer steps.
        prompts_per_step: P, groups in a step.
        samples_per_prompt: K, samples in a group.
        micro_batch_size: m, samples in a micro-batch; the default depends on the axis (see the module).
        axis: what a step is cut along.
        generator_ranks: r, processes that share one micro-batch; they get equally many samples.
        seed: the run's seed; decides the order of the prompts and every sample's random streams.
        shuffle: permute each epoch; otherwise prompts keep their order.

    Raises:
        PlanError: a number is below its minimum, there are no prompts, or the numbers do not divide; the message
            names the nearest numbers that work.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt | str],
        *,
        num_steps: int,
        prompts_per_step: int,
        samples_per_prompt: int,
        micro_batch_size: int | None = None,
        axis: Literal["generation", "batch"] = "generation",
        generator_ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        counts = {
            "num_steps": num_steps,
            "prompts_per_step": prompts_per_step,
            "samples_per_prompt": samples_per_prompt,
            "generator_ranks": generator_ranks,
        }
        for name, value in counts.items():
            if value < 1:
                raise PlanError(f"{name} must be at least 1, got {value}")
        if prompts_per_step * samples_per_prompt > _MOST_SAMPLES:
            raise PlanError(
                f"a step of {prompts_per_step} x {samples_per_prompt} samples is beyond {_MOST_SAMPLES:,}; "
                "lower prompts_per_step or samples_per_prompt"
            )
        if axis not in {"generation", "batch"}:
            raise PlanError(f"axis must be 'generation' or 'batch', got {axis!r}")
        if isinstance(prompts, str):
            raise PlanError("prompts must be a sequence of prompts, not one string; use [prompt]")
        if not prompts:
            raise PlanError("a plan needs at least one prompt, got none")
        self.prompts = tuple(Prompt(text=item) if isinstance(item, str) else item for item in prompts)
        self.num_steps = num_steps
        self.prompts_per_step = prompts_per_step
        self.samples_per_prompt = samples_per_prompt
        self.axis: Literal["generation", "batch"] = axis
        self.generator_ranks = generator_ranks
        self.seed = seed
        self.shuffle = shuffle
        self.micro_batch_size = self._checked_size(micro_batch_size)
        self.num_micro_batches = prompts_per_step * samples_per_prompt // self.micro_batch_size
        self._cached_step = lru_cache(maxsize=_CACHED_STEPS)(self._build_step)
        self._epochs: dict[int, list[int]] = {}

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.prompts)} prompts, num_steps={self.num_steps}, prompts_per_step={self.prompts_per_step}, "
            f"samples_per_prompt={self.samples_per_prompt}, micro_batch_size={self.micro_batch_size}, "
            f"axis={self.axis!r}, seed={self.seed})"
        )

    def step(self, index: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of step ``index``, in the order in which updates consume them.

        Groups come in order; on the generation axis a group's micro-batches are adjacent, so that it completes early.

        Raises:
            IndexError: the plan has no such step.
        """
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index} is outside the plan's steps 0 to {self.num_steps - 1}")
        return self._cached_step(index)

    @cached_property
    def digest(self) -> str:
        """64 hex digits over everything that decides the steps; a checkpoint of another digest is not resumed.

        Left out are ``num_steps`` and ``generator_ranks``, which change no step: a run may be resumed to go on for
        longer, or on other hardware.

        Raises:
            PlanError: a prompt's metadata is not plain data (numbers, strings, lists, mappings).
        """
        decisive = {
            "prompts": self.prompts,
            "prompts_per_step": self.prompts_per_step,
            "samples_per_prompt": self.samples_per_prompt,
            "micro_batch_size": self.micro_batch_size,
            "axis": self.axis,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        try:
            encoded = msgspec.json.encode(decisive, order="deterministic")
        except TypeError as error:
            raise PlanError(f"the metadata of a prompt is not plain data: {error}") from None
        return hashlib.sha256(encoded).hexdigest()

    def describe(self) -> list[str]:
        """The plan's arithmetic, a fact a line."""
        samples = self.prompts_per_step * self.samples_per_prompt
        epochs = self.num_steps * self.prompts_per_step / len(self.prompts)
        if self.axis == "generation":
            unit = f"{self.micro_batch_size} samples of one prompt"
        else:
            unit = f"{self.micro_batch_size // self.samples_per_prompt} prompts x {self.samples_per_prompt} samples"
        return [
            f"prompts: {len(self.prompts)}, {'shuffled' if self.shuffle else 'in order'}, {epochs:.2f} epochs",
            f"step: {self.prompts_per_step} prompts x {self.samples_per_prompt} samples = {samples} samples",
            f"micro-batch: {unit} ({self.axis} axis), {self.micro_batch_size // self.generator_ranks} per rank",
            f"micro-batches: B = {samples} / {self.micro_batch_size} = {self.num_micro_batches} in a step",
            f"run: {self.num_steps} steps, {self.num_steps * samples} samples, seed {self.seed}",
        ]

    def _checked_size(self, requested: int | None) -> int:
        prompts, group, ranks = self.prompts_per_step, self.samples_per_prompt, self.generator_ranks
        if self.axis == "generation":
            size = group if requested is None else requested
            valid = [m for m in range(ranks, group + 1, ranks) if group % m == 0]
            rule = f"on the generation axis it must divide samples_per_prompt={group}"
            no_size = f"samples_per_prompt={group} is not a multiple of generator_ranks={ranks}"
            remedy = f"set samples_per_prompt to {_nearest_multiples(group, ranks)}"
        else:
            size = group * ranks if requested is None else requested
            valid = [m for q in range(1, prompts + 1) if prompts % q == 0 and (m := q * group) % ranks == 0]
            rule = (
                f"on the batch axis it must be samples_per_prompt={group} times a divisor of prompts_per_step={prompts}"
            )
            no_size = f"{prompts} prompts x {group} samples do not split over generator_ranks={ranks}"
            remedy = f"set prompts_per_step to {_nearest_multiples(prompts, ranks)}"
        if not valid:
            raise PlanError(f"{no_size}; {remedy}")
        if size not in valid:
            which = f"micro_batch_size={size}" + (" (the default)" if requested is None else "")
            shared = f" and a multiple of generator_ranks={ranks}" if ranks > 1 else ""
            hint = f"set micro_batch_size to {_nearest(size, valid)}"
            if requested is None:
                hint += f", or {remedy.removeprefix('set ')}"
            raise PlanError(f"{which} does not work: {rule}{shared}; {hint}")
        return size

    def _build_step(self, step: int) -> tuple[MicroBatch, ...]:
        group = self.samples_per_prompt
        prompts = [self.prompts[i] for i in self._prompt_indices(step)]
        per_slice = min(group, self.micro_batch_size)
        slices = [
            GroupSlice(uid=f"s{step}p{position}", prompt=prompt, start=start, count=per_slice, size=group)
            for position, prompt in enumerate(prompts)
            for start in range(0, group, per_slice)
        ]
        num_slices = self.micro_batch_size // per_slice
        return tuple(
            MicroBatch(
                run_seed=self.seed,
                step=step,
                index=index,
                slices=tuple(slices[index * num_slices : (index + 1) * num_slices]),
            )
            for index in range(self.num_micro_batches)
        )

    def _prompt_indices(self, step: int) -> list[int]:
        num_prompts = len(self.prompts)
        position, missing = step * self.prompts_per_step, self.prompts_per_step
        chosen: list[int] = []
        while missing:
            epoch, offset = divmod(position, num_prompts)
            piece = self._epoch(epoch)[offset : offset + missing]
            chosen += piece
            position += len(piece)
            missing -= len(piece)
        return chosen

    def _epoch(self, epoch: int) -> list[int]:
        """The order of one epoch: a permutation whose head repeats nothing of the step it completes.

        What it must not repeat is the previous epoch's end, which may in turn have been rearranged. That chain is
        short: it breaks wherever an epoch starts with a step (so it has fewer than P links), and has one link when an
        epoch holds two steps, because rearranging moves nothing beyond the first P prompts.
        """
        num_prompts, per_step = len(self.prompts), self.prompts_per_step
        first = epoch
        while first not in self._epochs and first * num_prompts % per_step and per_step <= num_prompts:
            first -= 1
            if num_prompts >= 2 * per_step:
                break
        order = self._epochs.get(first) or self._permutation(first)
        for following in range(first + 1, epoch + 1):
            num_head = -following * num_prompts % per_step
            begun = set(order[num_head - per_step :]) if num_head else set()
            order = self._permutation(following)
            head = [i for i in order if i not in begun][:num_head]
            placed = set(head)
            order = head + [i for i in order if i not in placed]
        self._epochs[epoch] = order
        if len(self._epochs) > _CACHED_EPOCHS:
            del self._epochs[next(iter(self._epochs))]
        return order

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(derive_seed(self.seed, "epoch", epoch)).shuffle(order)  # noqa: S311 - not for secrets
        return order


def _nearest(value: int, valid: list[int]) -> str:
    """The valid numbers (ascending) on either side of ``value``."""
    at = bisect_left(valid, value)
    return " or ".join(str(number) for number in valid[max(at - 1, 0) : at + 1])


def _nearest_multiples(value: int, factor: int) -> str:
    below = value // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def even_unit(size: int, ranks: int, most: int) -> int | None:
    """A ``forward_batch`` up to ``most`` with which ranks share ``size`` samples evenly, with the least padding."""
    even = [unit for unit in range(1, most + 1) if -(-size // unit) % ranks == 0]
    return min(even, key=lambda unit: (-(-size // unit) * unit, -unit), default=None)
