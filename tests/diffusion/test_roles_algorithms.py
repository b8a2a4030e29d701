"""A whole step of every algorithm in the worker targets, with the real digits model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digen.diffusion.roles import ColocatedTarget, GeneratorTarget
from digen.errors import ConfigError
from digen.types import GroupSlice, MicroBatch, Payload, Prompt, Rollout

Data = Callable[..., dict[str, Any]]


def _micro_batch(step: int = 0, index: int = 0) -> MicroBatch:
    """A whole group."""
    prompt = Prompt("the digit 3", {"label": 3})
    return MicroBatch(0, step, index, (GroupSlice(f"s{step}p{index}", prompt, 0, 6, 6),))


def _as_read_elsewhere(rollout: Rollout) -> Rollout:
    views = {name: np.asarray(array).data.toreadonly() for name, array in rollout.payload.items()}
    return Rollout(rollout.micro_batch, rollout.version, rollout.version_end, Payload(views), rollout.stats)


def _step(target: ColocatedTarget, generator: Any, step: int) -> dict[str, float]:
    """Generate, score and update two groups, and commit."""
    metrics: dict[str, float] = {}
    for index in range(2):
        rollout = _as_read_elsewhere(generator.generate(_micro_batch(step, index)))
        rewards = np.array(target.score(rollout).rewards)
        metrics = target.update(rollout, list((rewards - rewards.mean()) / (rewards.std() + 1e-4))).metrics
    target.commit(step, (0, 1))
    return metrics


LORA = {"model__lora": {"rank": 2, "alpha": 4}}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("flow_grpo", {"algorithm__kl_weight": 0.04}),
        ("flow_grpo", {"algorithm__kl_weight": 0.04, **LORA}),
        ("dance_grpo", {"algorithm__options": {"shared_noise": True}}),
        ("mix_grpo", {"algorithm__options": {"window_size": 2}, "sampling__solver": "dpm++"}),
        ("flow_grpo_fast", {}),
        ("grpo_guard", {}),
        ("flow_dppo", {}),
        ("diffusion_nft", {}),
        ("diffusion_nft", LORA),
        ("dpo", {}),
        ("dpo", LORA),
    ],
)
def test_a_step_trains_and_what_is_published_draws_the_same_samples(
    data: Data, name: str, overrides: dict[str, Any]
) -> None:
    settings = data(algorithm__name=name, algorithm__tsp_chunk=2, optimizer__lr=1e-3, **overrides)
    trainer, generator = ColocatedTarget(settings), GeneratorTarget(settings)
    parameters = trainer._family.parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    first = _step(trainer, generator, 0)
    if "algorithm__kl_weight" in overrides:
        assert first["loss/kl"] == 0.0, "the reference is the model before training, to the last bit"
    assert any(not torch.equal(parameter, before[name]) for name, parameter in parameters.items())
    published = trainer.publish(1)
    report = generator.load(published)
    assert (report.version, report.checksum) == (1, published.checksum)
    ours, theirs = (worker.generate(_micro_batch(1)) for worker in (trainer, generator))
    assert all(np.array_equal(ours.payload[n], theirs.payload[n], equal_nan=True) for n in ours.payload)
    metrics = _step(trainer, generator, 1)
    assert trainer.version == 2
    if "algorithm__kl_weight" in overrides:
        assert metrics["loss/kl"] > 0
    if name == "diffusion_nft":
        assert metrics["old_deviation"] > 0


def test_what_generators_get_of_diffusion_nft_is_not_what_is_trained(data: Data) -> None:
    trainer = ColocatedTarget(data(algorithm__name="diffusion_nft", optimizer__lr=1e-3))
    _step(trainer, trainer, 0)
    published = trainer.publish(1).payload
    differ = [
        name
        for name, parameter in trainer._family.parameters().items()
        if not np.array_equal(published[name], parameter.detach().numpy())
    ]
    assert differ


@pytest.mark.parametrize(("name", "kept"), [("flow_grpo", False), ("diffusion_nft", True), ("dpo", True)])
def test_only_a_trainer_that_needs_it_keeps_the_model_before_training(data: Data, name: str, kept: bool) -> None:
    settings = data(algorithm__name=name)
    for target, expected in ((ColocatedTarget(settings), kept), (GeneratorTarget(settings), False)):
        if expected:
            with target._family.reference():
                pass
        else:
            with pytest.raises(ConfigError, match="without its reference"), target._family.reference():
                pass


def test_samples_alone_travel_where_they_are_all_that_is_needed(data: Data, tmp_path: Path) -> None:
    target = ColocatedTarget(data(algorithm__name="diffusion_nft", observe__preview_every=1), folder=str(tmp_path))
    rollout = target.generate(_micro_batch())
    assert {name: np.shape(array) for name, array in rollout.payload.items()} == {
        "latents": (6, 1, 1, 8, 8),
        "levels": (6,),
        "times": (5,),
        "conditioning.embedding": (6, 32),
    }
    assert len(target.score(rollout).rewards) == 6
    assert len(list((tmp_path / "samples").iterdir())) == 1


def test_a_model_that_the_algorithm_cannot_train_is_refused_before_anything_is_drawn(data: Data) -> None:
    with pytest.raises(ConfigError, match="family 'digits' is a flow model; ddpo as configured trains ddim models"):
        GeneratorTarget(data(algorithm__name="ddpo"))


@pytest.mark.parametrize("name", ["ddpo", "dpo"])
def test_a_model_that_predicts_the_noise(data: Data, tiny_model: Callable[[str], Path], name: str) -> None:
    settings = data(
        algorithm__name=name,
        model__family="sd15",
        model__path=str(tiny_model("sd15")),
        sampling__height=16,
        sampling__width=16,
        optimizer__lr=1e-3,
        reward__name="math:dist",
    )
    target, generator = ColocatedTarget(settings), GeneratorTarget(settings)
    for step in range(2):
        rollout = generator.generate(_micro_batch(step))
        if name == "ddpo":
            assert np.isfinite(rollout.payload["log_probs"]).all(), "the last transition is noisy too"
        report = target.update(_as_read_elsewhere(rollout), (1.0, -1.0, 0.5, 0.0, -2.0, 1.5))
        assert report.num_terms == (6 * 5 if name == "ddpo" else 4)
        if name == "ddpo":
            assert report.metrics["ratio/floor" if step == 0 else "ratio/abs_logp_diff_max"] < 1e-5
        target.commit(step, (0,))
        generator.load(target.publish(step + 1))
