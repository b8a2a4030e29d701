"""Evaluation: ODE samples of held-out prompts, their reward, and an independent judge's opinion."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from digen.diffusion.families.base import Family, Schedule
from digen.diffusion.preview import Section, write_grid
from digen.diffusion.rewards.compute import RewardFunction, compute_rewards
from digen.diffusion.sampler import sample_ode
from digen.diffusion.seeds import INITIAL_NOISE, draw, streams
from digen.errors import ConfigError
from digen.types import EvaluationReport, EvaluationRequest, derive_seed


def evaluate(
    family: Family,
    request: EvaluationRequest,
    *,
    version: int,
    schedule: Schedule,
    unit: int,
    reward: tuple[str, RewardFunction],
    judge: RewardFunction | None,
) -> EvaluationReport:
    """Draw ``samples_per_prompt`` ODE samples of every prompt and average.

    The noise depends on (request.seed, position of the prompt, sample) alone, so that two versions are compared on the
    same noise. Metrics: ``reward/mean``, ``reward/std`` (population), ``reward/stderr``, and ``class_accuracy`` when
    there is a judge. Writes a grid of at most eight samples a prompt to ``request.image_path``.

    Raises:
        ConfigError: the request has no prompts or samples.
        RewardError, NumericsError: as the reward and the sampler do.
    """
    count = request.samples_per_prompt
    if not request.prompts or count < 1:
        raise ConfigError("an evaluation needs at least one prompt and one sample of each")
    prompts = [prompt for prompt in request.prompts for _ in range(count)]
    seeds = [
        derive_seed(request.seed, "evaluation", position, sample, INITIAL_NOISE)
        for position in range(len(request.prompts))
        for sample in range(count)
    ]
    start = draw(streams(seeds), family.latent_shape)
    images = family.decode(sample_ode(family, family.encode(prompts), schedule, start, unit=unit))
    names = [f"evaluation{position}/{sample}" for position in range(len(request.prompts)) for sample in range(count)]
    name, function = reward
    rewards = compute_rewards(name, function, images, prompts, names)
    metrics = {"reward/mean": statistics.fmean(rewards), "reward/std": statistics.pstdev(rewards)}
    metrics["reward/stderr"] = metrics["reward/std"] / math.sqrt(len(rewards))
    if judge is not None:
        metrics["class_accuracy"] = statistics.fmean(compute_rewards("judge", judge, images, prompts, names))
    if request.image_path is not None:
        sections = []
        for position, prompt in enumerate(request.prompts):
            shown = slice(position * count, position * count + min(count, 8))
            header = (f"{prompt.text}   version {version}   seed {request.seed}",)
            sections.append(Section(header, images[shown], [f"{value:.3f}" for value in rewards[shown]]))
        write_grid(Path(request.image_path), sections)
    return EvaluationReport(version=version, num_samples=len(prompts), metrics=metrics)
