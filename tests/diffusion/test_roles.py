"""The worker targets with the real digits model, in this process."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from digen.config import load_config
from digen.diffusion.chunks import ForwardSize
from digen.diffusion.roles import ColocatedTarget, GeneratorTarget, TrainerTarget
from digen.diffusion.trajectories import Trajectories
from digen.errors import ConfigError, InvariantViolation, ProtocolError, RewardError
from digen.handles import METHODS
from digen.types import EvaluationRequest, GroupSlice, MicroBatch, Payload, Prompt, Publication, Rollout

Make = Callable[..., MicroBatch]
Data = Callable[..., dict[str, Any]]
ADVANTAGES = (1.5, -0.3, 0.0, -2.0, 0.8, None)
PROMPTS = tuple(Prompt(f"the digit {n}", {"label": n}) for n in range(10))


def _as_read_elsewhere(rollout: Rollout) -> Rollout:
    """The rollout as another process sees it: read-only memoryviews."""
    views = {name: np.asarray(array).data.toreadonly() for name, array in rollout.payload.items()}
    return Rollout(rollout.micro_batch, rollout.version, rollout.version_end, Payload(views), rollout.stats)


@lru_cache(maxsize=1)
def _encoder() -> GeneratorTarget:
    return GeneratorTarget(load_config(None).model_dump(mode="json"))


def _draw(trainer: TrainerTarget, micro_batch: MicroBatch) -> Rollout:
    """An assist: the trainer has no encoder and gets what a generator encoded."""
    prompts = [piece.prompt for piece in micro_batch.slices]
    return trainer.generate(micro_batch, _encoder().encode(prompts))


def _republish(publication: Publication, arrays: dict[str, Any]) -> Publication:
    return msgspec.structs.replace(publication, payload=Payload(arrays))


def _bits(trainer: TrainerTarget) -> dict[str, bytes]:
    """Everything that an assist must leave alone."""
    learner, parameters = trainer._learner, trainer._family.parameters()
    tensors = {name: parameter.detach() for name, parameter in parameters.items()}
    tensors |= {f"{name}.grad": p.grad for name, p in parameters.items() if p.grad is not None}
    for name, parameter in parameters.items():
        for key, value in learner._optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def _step(trainer: TrainerTarget, micro_batch: Make, step: int) -> None:
    rollout = _draw(trainer, micro_batch(step=step))
    trainer.update(rollout, ADVANTAGES)
    trainer.commit(step, (0,))


TRAINS = {"update", "commit", "publish", "switch", "save", "begin_save", "saved", "restore", "snapshot", "recall"}


@pytest.mark.parametrize(
    ("target", "methods"),
    [
        (GeneratorTarget, {"encode", "generate", "score", "load", "evaluate"}),
        (TrainerTarget, {"generate", *TRAINS}),
        (ColocatedTarget, {"encode", "generate", "score", "evaluate", *TRAINS}),
    ],
)
def test_targets_have_the_methods_of_their_role(target: type, methods: set[str]) -> None:
    assert {name for name in METHODS if callable(getattr(target, name, None))} == methods
    for name in methods:
        assert len(inspect.signature(getattr(target, name)).parameters) == 1 + len(METHODS[name][0])


def test_a_rollout_carries_what_training_needs(generator: GeneratorTarget, micro_batch: Make) -> None:
    rollout = generator.generate(micro_batch())
    shapes = {name: (array.shape, str(array.dtype)) for name, array in rollout.payload.items()}
    assert shapes == {
        "latents": ((6, 6, 1, 8, 8), "float32"),
        "log_probs": ((6, 5), "float32"),
        "levels": ((6,), "float32"),
        "times": ((5,), "float32"),
        "conditioning.embedding": ((6, 32), "float32"),
    }
    assert (rollout.version, rollout.version_end) == (0, 0)
    assert set(rollout.stats) == {"encode_s", "sample_s"}


def test_the_same_micro_batch_gives_the_same_bits_on_any_worker(
    generator: GeneratorTarget, trainer: TrainerTarget, micro_batch: Make
) -> None:
    first = generator.generate(micro_batch())
    generator.generate(micro_batch(index=1))
    for again in (generator.generate(micro_batch()), _draw(trainer, micro_batch())):
        assert all(np.array_equal(first.payload[n], again.payload[n], equal_nan=True) for n in first.payload)


def test_group_members_differ_in_first_noise_and_later(generator: GeneratorTarget, micro_batch: Make) -> None:
    latents = np.asarray(generator.generate(micro_batch()).payload["latents"])
    steps = latents.transpose(1, 0, 2, 3, 4).reshape(6, 6, -1)
    for step in (0, 1, 5):
        assert len(np.unique(steps[step], axis=0)) == 6


@pytest.mark.parametrize("forward_batch", [None, 4])
def test_replayed_ratios_are_exactly_one_in_the_same_shape(
    data: Data, micro_batch: Make, forward_batch: int | None
) -> None:
    settings = data(model__forward_batch=forward_batch, algorithm__tsp_chunk=1)
    rollout = GeneratorTarget(settings).generate(micro_batch())
    metrics = TrainerTarget(settings).update(_as_read_elsewhere(rollout), (1.0, -1.0, 2.0, 0.5, -2.0, 1.0)).metrics
    assert metrics["ratio/floor"] == metrics["ratio/abs_logp_diff_max"] == 0.0
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    assert "loss/policy" in metrics


def test_replay_in_one_forward_is_far_below_the_clip(trainer: TrainerTarget, micro_batch: Make) -> None:
    report = trainer.update(_draw(trainer, micro_batch()), ADVANTAGES)
    assert report.num_terms == 5 * 4
    assert report.metrics["ratio/floor"] < 1e-5


def test_chunks_give_the_same_gradient(data: Data, micro_batch: Make) -> None:
    gradients = []
    for chunk, forward_batch in ((1, None), (3, 4), ("all", None)):
        trainer = TrainerTarget(data(algorithm__tsp_chunk=chunk, model__forward_batch=forward_batch))
        _step(trainer, micro_batch, 0)  # so that the second step's ratios are of trained weights
        rollout = _draw(trainer, micro_batch(step=1))
        trainer.update(rollout, ADVANTAGES)
        parameters = trainer._family.parameters().values()
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double())
    for gradient in gradients[1:]:
        assert float((gradient - gradients[0]).norm() / gradients[0].norm()) < 1e-4


def test_a_training_step_favours_what_was_rewarded(trainer: TrainerTarget, micro_batch: Make) -> None:
    batch = micro_batch()
    rollout = _draw(trainer, batch)
    advantages = (1.0, -1.0, 1.0, -1.0, 1.0, -1.0)
    trainer.update(rollout, advantages)
    trainer.commit(0, (0,))
    learner: Any = trainer._learner
    replayed = learner._batch(batch, Trajectories.from_arrays(rollout.payload), advantages)
    forward, _, _ = next(learner._cut(replayed, ForwardSize(6, 4)))
    with torch.no_grad():
        terms = learner.algorithm._terms(trainer._family, forward)
    gained = (terms.log_prob - terms.recorded_log_prob).mean(dim=1)
    assert float(gained[::2].mean()) > float(gained[1::2].mean())


@pytest.mark.parametrize("offload", [False, True])
def test_an_assist_in_an_open_transaction_changes_no_bit(data: Data, micro_batch: Make, offload: bool) -> None:
    trainer = TrainerTarget(data(workers__offload=offload, optimizer__ema_decay=0.9))
    _step(trainer, micro_batch, 0)
    first, second = (_draw(trainer, micro_batch(step=1, index=index)) for index in range(2))
    trainer.update(first, ADVANTAGES)
    before = _bits(trainer)
    assert any(name.endswith(".grad") for name in before)
    trainer.switch("generate")
    assist = _draw(trainer, micro_batch(step=1, index=2))
    trainer.switch("train")
    assert _bits(trainer) == before
    assert assist.version == 1
    trainer.update(second, ADVANTAGES)
    trainer.commit(1, (0, 1))

    undisturbed = TrainerTarget(data(optimizer__ema_decay=0.9))
    _step(undisturbed, micro_batch, 0)
    for rollout in (first, second):
        undisturbed.update(rollout, ADVANTAGES)
    undisturbed.commit(1, (0, 1))
    assert _bits(trainer) == _bits(undisturbed)


def test_switch_refuses_other_words(trainer: TrainerTarget) -> None:
    with pytest.raises(InvariantViolation, match="switch to 'sleep'"):
        trainer.switch("sleep")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_arrive_bit_for_bit(data: Data, micro_batch: Make, dtype: str) -> None:
    settings = data(model__dtype=dtype, optimizer__lr=0.05, algorithm__old_logprobs="recompute")
    trainer, generator = TrainerTarget(settings), GeneratorTarget(settings)
    base = trainer.publish(0)
    _step(trainer, micro_batch, 0)
    publication = trainer.publish(1)
    assert publication.checksum != base.checksum
    views = {name: memoryview(array).toreadonly() for name, array in publication.payload.items()}
    assert publication.nbytes == sum(view.nbytes for name, view in views.items() if not name.startswith("@"))
    addresses = {name: parameter.data_ptr() for name, parameter in generator._family.parameters().items()}
    report = generator.load(_republish(publication, views))
    assert (report.version, report.checksum, report.num_tensors) == (1, publication.checksum, publication.num_tensors)
    assert generator.version == trainer.version == 1
    for name, parameter in generator._family.parameters().items():
        assert torch.equal(parameter, trainer._family.parameters()[name])
        assert parameter.data_ptr() == addresses[name]
    ours, theirs = _draw(trainer, micro_batch(step=1)), generator.generate(micro_batch(step=1))
    assert np.array_equal(ours.payload["latents"], theirs.payload["latents"])


def test_a_publication_does_not_change_with_the_trainer(trainer: TrainerTarget, micro_batch: Make) -> None:
    publication = trainer.publish(0)
    name = next(iter(publication.payload))
    before = publication.payload[name].tobytes()
    _step(trainer, micro_batch, 0)
    assert publication.payload[name].tobytes() == before
    with pytest.raises(InvariantViolation, match="publish version 0, but the trainer holds 1"):
        trainer.publish(0)


def test_weights_that_do_not_fit_are_refused_untouched(data: Data) -> None:
    generator, trainer = GeneratorTarget(data()), TrainerTarget(data(model__dtype="bfloat16"))
    before = {name: parameter.clone() for name, parameter in generator._family.parameters().items()}
    with pytest.raises(ConfigError, match=r"the model has \(.*\) F32"):
        generator.load(trainer.publish(0))
    assert generator.version == 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in generator._family.parameters().items())


def test_after_damaged_weights_a_generator_holds_no_version(data: Data, trainer: TrainerTarget) -> None:
    generator, publication = GeneratorTarget(data()), trainer.publish(0)
    name = next(iter(publication.payload))
    damaged = {**publication.payload, name: publication.payload[name] + 1}
    with pytest.raises(ProtocolError, match=f"{name}: elements 0 to .* fail their checksum"):
        generator.load(_republish(publication, damaged))
    assert generator.version == -1
    assert generator.load(publication).version == generator.version == 0


def test_a_mixed_trajectory_is_never_trained_on(trainer: TrainerTarget, micro_batch: Make) -> None:
    rollout = _draw(trainer, micro_batch())
    with pytest.raises(InvariantViolation, match="mixes the weights of versions 0 and 1"):
        trainer.update(Rollout(rollout.micro_batch, 0, 1, rollout.payload), ADVANTAGES)


def test_a_restored_trainer_continues_bit_for_bit(data: Data, micro_batch: Make, tmp_path: Path) -> None:
    straight = TrainerTarget(data())
    _step(straight, micro_batch, 0)
    hashes = straight.save(str(tmp_path / "one"))
    assert set(hashes) == {path.name for path in (tmp_path / "one").iterdir()}
    _step(straight, micro_batch, 1)
    resumed = TrainerTarget(data())
    assert resumed.restore(str(tmp_path / "one")) == 1 == resumed.version
    _step(resumed, micro_batch, 1)
    assert _bits(resumed) == _bits(straight)


def test_a_trainer_writes_while_it_trains_on(data: Data, micro_batch: Make, tmp_path: Path) -> None:
    trainer = TrainerTarget(data())
    _step(trainer, micro_batch, 0)
    hashes = trainer.save(str(tmp_path / "one"))
    with pytest.raises(InvariantViolation, match="without begin_save"):
        trainer.saved()
    trainer.begin_save(str(tmp_path / "two"))
    with pytest.raises(InvariantViolation, match="has ended the one before"):
        trainer.begin_save(str(tmp_path / "three"))
    _step(trainer, micro_batch, 1)
    deadline = time.monotonic() + 30
    while (found := trainer.saved()) is None:
        assert time.monotonic() < deadline
    assert found == hashes


def test_scores_are_rewards_of_the_last_latents(generator: GeneratorTarget, micro_batch: Make) -> None:
    scored = generator.score(_as_read_elsewhere(generator.generate(micro_batch(count=24))))
    assert len(scored.rewards) == 24
    assert all(0 <= reward <= 1 for reward in scored.rewards)
    assert 0.2 < sum(scored.rewards) / 24 < 1.0
    assert set(scored.stats) == {"decode_s", "reward_s", "preview_s"}


def test_rewards_that_fail_name_the_reward(data: Data, micro_batch: Make) -> None:
    generator = GeneratorTarget(data(reward__name="math:dist"))
    with pytest.raises(RewardError, match=r"reward 'math:dist' failed on samples s0p0/0 \.\. s0p0/5"):
        generator.score(generator.generate(micro_batch()))


def test_scores_and_trajectories_must_agree(generator: GeneratorTarget, micro_batch: Make) -> None:
    rollout = generator.generate(micro_batch())
    with pytest.raises(InvariantViolation, match="6 trajectories for a micro-batch of 5 samples"):
        generator.score(Rollout(micro_batch(count=5), 0, 0, rollout.payload))


def test_previews_are_drawn_every_so_many_steps(data: Data, tmp_path: Path) -> None:
    generator = GeneratorTarget(data(observe__preview_every=10), folder=str(tmp_path))
    for step in (9, 10):
        slices = tuple(GroupSlice(f"s{step}p{n}", PROMPTS[n], 0, 9, 24) for n in range(2))
        generator.score(generator.generate(MicroBatch(0, step, 3, slices)))
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step000010_mb003.png"]
    with Image.open(tmp_path / "samples" / "step000010_mb003.png") as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("L"))
    assert pixels.std() > 10


def test_evaluation_is_deterministic_and_pinned_to_its_version(data: Data, tmp_path: Path) -> None:
    path = tmp_path / "pictures" / "grid.png"
    target = ColocatedTarget(data())
    request = EvaluationRequest(5, PROMPTS, 12, image_path=str(path))
    report = target.evaluate(request)
    assert (report.version, report.num_samples) == (0, 120)
    assert set(report.metrics) == {"reward/mean", "reward/std", "reward/stderr", "class_accuracy"}
    assert 0.5 < report.metrics["class_accuracy"] < 0.85
    assert path.is_file()
    assert target.evaluate(request).metrics == report.metrics
    assert target.evaluate(EvaluationRequest(6, PROMPTS, 12)).metrics != report.metrics
    with pytest.raises(ConfigError, match="at least one prompt"):
        target.evaluate(EvaluationRequest(5, (), 12))


def test_the_colocated_target_does_every_stage(data: Data, micro_batch: Make) -> None:
    target = ColocatedTarget(data())
    rollout = target.generate(micro_batch())
    rewards = target.score(rollout).rewards
    target.update(rollout, [reward - sum(rewards) / 6 for reward in rewards])
    assert target.commit(0, (0,)).version == target.version == 1


def test_a_wrong_model_or_reward_fails_at_construction(data: Data, tmp_path: Path) -> None:
    for overrides in (
        {"model__path": str(tmp_path)},
        {"model__family": "digit"},
        {"reward__name": "clasifier"},
        {"reward__name": "no_such_package:f"},
    ):
        with pytest.raises(ConfigError):
            GeneratorTarget(data(**overrides))
