"""Evaluation: ODE samples of held-out prompts, their reward, and an independent judge's opinion."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from msgspec import Struct

from digen.config import EvaluationSection
from digen.diffusion.families.base import Conditioning, Family, Images, Schedule
from digen.diffusion.preview import COLUMNS, Cell, Section, cells_of, gather_cells, write_grid
from digen.diffusion.ranks import Ranks
from digen.diffusion.rewards.compute import Reward, RewardFunction, compute_rewards
from digen.diffusion.sampler import sample_ode
from digen.diffusion.seeds import INITIAL_NOISE, draw, streams
from digen.diffusion.solvers import SolverName
from digen.errors import ConfigError
from digen.types import EvaluationReport, EvaluationRequest, Prompt, derive_seed

_Key = tuple[int, int]
"""(position of the prompt, number of the sample)."""


class _Found(Struct):
    """What one rank has found."""

    rewards: list[float] = []
    heads: dict[str, list[float]] = {}
    judged: list[float] = []
    shown: list[tuple[int, str]] = []
    """Position of the prompt and caption of every sample that is shown."""


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
    ranks: Ranks | None = None,
) -> EvaluationReport:
    """Draw ``samples_per_prompt`` ODE samples of every prompt and average.

    The noise depends on (request.seed, position of the prompt, sample) alone, so that two versions are compared on the
    same noise. Metrics: ``reward/mean``, ``reward/std`` (population), ``reward/stderr``, with several heads
    ``reward/LABEL/mean`` of each before weighting, and ``class_accuracy`` when there is a judge. Draws a grid of at
    most eight samples a prompt at ``request.image_path``. No more than ``unit`` samples are held at a time. Several
    ranks share the samples, ``unit`` by ``unit``; rank 0 reports and draws the grid, the others report 0 samples.

    Raises:
        ConfigError: the request has no prompts or samples.
        RewardError, NumericsError: as the reward and the sampler do.
        MissingExtra: as :func:`digen.diffusion.preview.write_grid` does.
        RankFailed: on every rank but the one where that happened.
    """
    if not request.prompts or request.samples_per_prompt < 1:
        raise ConfigError("an evaluation needs at least one prompt and one sample of each")
    ranks = ranks or Ranks()
    found = _Found()
    cells: list[Cell] = []
    with ranks.together():
        for keys, images in _draw(family, request, ranks, schedule=schedule, solver=solver, unit=unit):
            prompts, names = _prompts(request, keys), _names(keys)
            scores = reward.score(images, prompts, names)
            found.rewards += scores.rewards
            for label, values in scores.heads.items():
                found.heads.setdefault(label, []).extend(values)
            if judge is not None:
                found.judged += compute_rewards("judge", judge, images, prompts, names)
            rows = [row for row, (_, sample) in enumerate(keys) if sample < COLUMNS and request.image_path is not None]
            found.shown += [(keys[row][0], f"{scores.rewards[row]:.3f}") for row in rows]
            cells += cells_of(images[rows])
    everything, pictures = ranks.gather_plain(found, _Found), gather_cells(cells, ranks)
    if everything is None or pictures is None:
        return EvaluationReport(version=version, num_samples=0, metrics={})
    if request.image_path is not None:
        captions = [shown for part in everything for shown in part.shown]
        header = f"version {version}   seed {request.seed}"
        sections = _sections(request.prompts, header, list(zip(captions, pictures, strict=True)))
        path, speed = Path(request.image_path), section.frames_per_second
        write_grid(path, sections, video=section.video, frames_per_second=speed)
    metrics = _metrics(everything)
    return EvaluationReport(version=version, num_samples=sum(len(part.rewards) for part in everything), metrics=metrics)


def _sections(prompts: Sequence[Prompt], header: str, shown: Sequence[tuple[tuple[int, str], Cell]]) -> list[Section]:
    of_prompt: defaultdict[int, list[tuple[Cell, str]]] = defaultdict(list)
    for (position, caption), cell in shown:
        of_prompt[position].append((cell, caption))
    return [
        Section((f"{prompt.text}   {header}",), *zip(*of_prompt[position], strict=True))
        for position, prompt in enumerate(prompts)
    ]


def _metrics(everything: Sequence[_Found]) -> dict[str, float]:
    rewards = [value for part in everything for value in part.rewards]
    spread = statistics.pstdev(rewards)
    metrics = {"reward/mean": statistics.fmean(rewards), "reward/std": spread}
    metrics["reward/stderr"] = spread / math.sqrt(len(rewards))
    heads = everything[0].heads
    if len(heads) > 1:
        metrics |= {
            f"reward/{label}/mean": statistics.fmean(
                value for part in everything for value in part.heads.get(label, ())
            )
            for label in heads
        }
    if judged := [value for part in everything for value in part.judged]:
        metrics["class_accuracy"] = statistics.fmean(judged)
    return metrics


def _draw(
    family: Family, request: EvaluationRequest, ranks: Ranks, *, schedule: Schedule, solver: SolverName, unit: int
) -> Iterator[tuple[list[_Key], Images]]:
    """The samples of this rank, ``unit`` after the other."""
    count = request.samples_per_prompt
    everything = [(position, sample) for position in range(len(request.prompts)) for sample in range(count)]
    rows, num_counted = ranks.rows(len(everything), unit)
    for first in range(0, len(rows), unit):
        keys = [everything[row] for row in rows[first : first + unit]]
        seeds = [derive_seed(request.seed, "evaluation", *key, INITIAL_NOISE) for key in keys]
        start, conditioning = draw(streams(seeds), family.latent_shape), _encode(family, _prompts(request, keys))
        clean = sample_ode(family, conditioning, schedule, start, unit=unit, solver=solver, names=_names(keys))
        if (num_own := min(num_counted - first, len(keys))) > 0:
            yield keys[:num_own], family.decode(clean[:num_own])


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
