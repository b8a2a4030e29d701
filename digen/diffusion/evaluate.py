"""Evaluation: ODE samples of held-out prompts, their reward, and an independent judge's opinion."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from digen.config import EvaluationSection
from digen.diffusion.families.base import Conditioning, Family, Images, Schedule
from digen.diffusion.preview import COLUMNS, Cell, Section, cells_of, write_grid
from digen.diffusion.rewards.compute import Reward, RewardFunction, compute_rewards
from digen.diffusion.sampler import sample_ode
from digen.diffusion.seeds import INITIAL_NOISE, draw, streams
from digen.diffusion.solvers import SolverName
from digen.errors import ConfigError
from digen.types import EvaluationReport, EvaluationRequest, Prompt, derive_seed

_Key = tuple[int, int]
"""(position of the prompt, number of the sample)."""


def evaluate(
    family: Family,
    request: EvaluationRequest,
    *,
    version: int,
    schedule: Schedule,
    solver: SolverName,
    unit: int,
    reward: Reward,
    judge: RewardFunction | None,
    section: EvaluationSection,
) -> EvaluationReport:
    """Draw ``samples_per_prompt`` ODE samples of every prompt and average.

    The noise depends on (request.seed, position of the prompt, sample) alone, so that two versions are compared on the
    same noise. Metrics: ``reward/mean``, ``reward/std`` (population), ``reward/stderr``, with several heads
    ``reward/LABEL/mean`` of each before weighting, and ``class_accuracy`` when there is a judge. Draws a grid of at
    most eight samples a prompt at ``request.image_path``. No more than ``unit`` samples are held at a time.

    Raises:
        ConfigError: the request has no prompts or samples.
        RewardError, NumericsError: as the reward and the sampler do.
        MissingExtra: as :func:`digen.diffusion.preview.write_grid` does.
    """
    if not request.prompts or request.samples_per_prompt < 1:
        raise ConfigError("an evaluation needs at least one prompt and one sample of each")
    rewards: list[float] = []
    heads: defaultdict[str, list[float]] = defaultdict(list)
    judged: list[float] = []
    shown: defaultdict[int, list[tuple[Cell, str]]] = defaultdict(list)
    for keys, images in _draw(family, request, schedule, solver, unit):
        prompts, names = _prompts(request, keys), _names(keys)
        scores = reward.score(images, prompts, names)
        rewards += scores.rewards
        for label, values in scores.heads.items():
            heads[label] += values
        if judge is not None:
            judged += compute_rewards("judge", judge, images, prompts, names)
        rows = [row for row, (_, sample) in enumerate(keys) if sample < COLUMNS and request.image_path is not None]
        for row, cell in zip(rows, cells_of(images[rows]), strict=True):
            shown[keys[row][0]].append((cell, f"{scores.rewards[row]:.3f}"))
    if request.image_path is not None:
        sections = [
            Section((f"{prompt.text}   version {version}   seed {request.seed}",), *zip(*shown[position], strict=True))
            for position, prompt in enumerate(request.prompts)
        ]
        path, speed = Path(request.image_path), section.frames_per_second
        write_grid(path, sections, video=section.video, frames_per_second=speed)
    spread = statistics.pstdev(rewards)
    metrics = {"reward/mean": statistics.fmean(rewards), "reward/std": spread}
    metrics["reward/stderr"] = spread / math.sqrt(len(rewards))
    if len(heads) > 1:
        metrics |= {f"reward/{label}/mean": statistics.fmean(values) for label, values in heads.items()}
    if judged:
        metrics["class_accuracy"] = statistics.fmean(judged)
    return EvaluationReport(version=version, num_samples=len(rewards), metrics=metrics)


def _draw(
    family: Family, request: EvaluationRequest, schedule: Schedule, solver: SolverName, unit: int
) -> Iterator[tuple[list[_Key], Images]]:
    """``unit`` samples after the other."""
    count = request.samples_per_prompt
    everything = [(position, sample) for position in range(len(request.prompts)) for sample in range(count)]
    for first in range(0, len(everything), unit):
        keys = everything[first : first + unit]
        seeds = [derive_seed(request.seed, "evaluation", *key, INITIAL_NOISE) for key in keys]
        start, conditioning = draw(streams(seeds), family.latent_shape), _encode(family, _prompts(request, keys))
        clean = sample_ode(family, conditioning, schedule, start, unit=unit, solver=solver, names=_names(keys))
        yield keys, family.decode(clean)


@torch.no_grad()
def _encode(family: Family, prompts: Sequence[Prompt]) -> Conditioning:
    """One row a prompt; equal neighbours are encoded once, and each alone, as in training."""
    rows: list[Conditioning] = []
    for position, prompt in enumerate(prompts):
        same = position > 0 and prompt == prompts[position - 1]
        rows.append(rows[-1] if same else family.encode([prompt]))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _prompts(request: EvaluationRequest, keys: Sequence[_Key]) -> list[Prompt]:
    return [request.prompts[position] for position, _ in keys]


def _names(keys: Sequence[_Key]) -> list[str]:
    return [f"evaluation{position}/{sample}" for position, sample in keys]
