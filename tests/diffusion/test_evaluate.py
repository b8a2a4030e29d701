"""Held-out samples: the ODE's, from noise that nothing but the request decides, and what is told of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from digen.config import EvaluationSection, RewardHead, RewardSection, RunConfig
from digen.diffusion import families
from digen.diffusion.evaluate import evaluate
from digen.diffusion.families.base import Images
from digen.diffusion.rewards.compute import Reward
from digen.diffusion.roles import EvaluatorTarget, GeneratorTarget, TrainerTarget
from digen.diffusion.sampler import sample_ode
from digen.diffusion.seeds import INITIAL_NOISE, draw, streams
from digen.diffusion.tiny import TINY
from digen.errors import CheckpointError, ConfigError, NumericsError, RewardError
from digen.types import EvaluationReport, EvaluationRequest, GroupSlice, MicroBatch, Prompt, derive_seed

PROMPTS = tuple(Prompt(f"the digit {label}", {"label": label}) for label in (1, 2, 7))
SEEN: list[Images] = []
"""What the reward :func:`brightness` was called with."""


def brightness(images: Images, prompts: Sequence[Prompt]) -> list[float]:
    assert len(images) == len(prompts)
    SEEN.append(images.copy())
    return [float(image.mean()) for image in images]


def label(images: Images, prompts: Sequence[Prompt]) -> list[float]:
    del images
    return [float(prompt.metadata["label"]) for prompt in prompts]


def nothing(images: Images, prompts: Sequence[Prompt]) -> list[float]:
    del prompts
    return [float("nan")] * len(images)


def toy_reward(*names: str, weights: Sequence[float] = (1.0, 1.0)) -> Reward:
    heads = tuple(
        RewardHead(name=f"{__name__}:{name}", weight=weight, label=name)
        for name, weight in zip(names, weights, strict=False)
    )
    return Reward(RewardSection(heads=heads))


@pytest.fixture(autouse=True)
def _seen() -> None:
    SEEN.clear()


def judge(family: Any, request: EvaluationRequest, **changes: Any) -> EvaluationReport:
    options: dict[str, Any] = {
        "version": 3,
        "schedule": family.schedule(4),
        "solver": "euler",
        "unit": 4,
        "reward": toy_reward("brightness"),
        "judge": None,
        "section": EvaluationSection(),
    }
    return evaluate(family, request, **options | changes)


def test_samples_are_the_odes_from_noise_of_seed_prompt_and_sample(toy: Callable[..., Any]) -> None:
    family = toy(torch.float64)
    report = judge(family, EvaluationRequest(5, PROMPTS, 2))
    keys = [(position, sample) for position in range(3) for sample in range(2)]
    start = draw(streams([derive_seed(5, "evaluation", *key, INITIAL_NOISE) for key in keys]), family.latent_shape)
    prompts = [PROMPTS[position] for position, _ in keys]
    expected = family.decode(sample_ode(family, family.encode(prompts), family.schedule(4), start, unit=6))
    assert np.allclose(np.concatenate(SEEN), expected, atol=1e-12, rtol=0)
    values = [float(image.mean()) for image in expected]
    assert (report.version, report.num_samples) == (3, 6)
    assert report.metrics == pytest.approx(
        {
            "reward/mean": statistics.fmean(values),
            "reward/std": statistics.pstdev(values),
            "reward/stderr": statistics.pstdev(values) / 6**0.5,
        }
    )


def test_the_noise_of_a_sample_does_not_depend_on_how_many_there_are(toy: Callable[..., Any]) -> None:
    judge(toy(torch.float64), EvaluationRequest(5, PROMPTS, 3))
    many = np.concatenate(SEEN)
    SEEN.clear()
    judge(toy(torch.float64), EvaluationRequest(5, PROMPTS[:2], 2))
    assert np.array_equal(np.concatenate(SEEN), many[[0, 1, 3, 4]])
    SEEN.clear()
    judge(toy(torch.float64), EvaluationRequest(6, PROMPTS[:2], 2))
    assert not np.array_equal(np.concatenate(SEEN), many[[0, 1, 3, 4]])


def test_no_more_than_a_unit_is_held_and_every_forward_has_its_size(toy: Callable[..., Any]) -> None:
    family = toy(torch.float64)
    judge(family, EvaluationRequest(5, PROMPTS, 3), unit=4)
    assert [len(images) for images in SEEN] == [4, 4, 1]
    assert set(family.forward_rows) == {4}


def test_a_prompt_is_encoded_alone_and_not_for_each_of_its_samples(
    toy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = toy(torch.float64)
    encoded: list[list[str]] = []
    plain = family.encode

    def encode(prompts: Sequence[Prompt]) -> Any:
        encoded.append([prompt.text for prompt in prompts])
        return plain(prompts)

    monkeypatch.setattr(family, "encode", encode)
    judge(family, EvaluationRequest(5, PROMPTS, 3), unit=9)
    assert encoded == [[prompt.text] for prompt in PROMPTS]


def test_every_head_and_the_judge_are_told(toy: Callable[..., Any]) -> None:
    report = judge(
        toy(torch.float64),
        EvaluationRequest(5, PROMPTS, 2),
        reward=toy_reward("brightness", "label", weights=(2.0, -1.0)),
        judge=lambda _, prompts: [float(prompt.metadata["label"] > 1) for prompt in prompts],
    )
    metrics = report.metrics
    assert metrics["reward/label/mean"] == pytest.approx(10 / 3)
    assert metrics["reward/mean"] == pytest.approx(2 * metrics["reward/brightness/mean"] - 10 / 3)
    assert metrics["class_accuracy"] == pytest.approx(2 / 3)


def test_what_is_no_number_is_an_error_that_names_the_sample(toy: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r"'nothing' is nan for sample evaluation0/0"):
        judge(toy(torch.float64), EvaluationRequest(5, PROMPTS, 2), reward=toy_reward("nothing"))
    family = toy(torch.float64)
    with torch.no_grad():
        next(iter(family.parameters().values())).fill_(torch.nan)
    with pytest.raises(NumericsError, match="sample evaluation0/0 is not finite"):
        judge(family, EvaluationRequest(5, PROMPTS, 2))


def test_a_grid_shows_eight_of_each_prompt(toy: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    judge(toy(torch.float64), EvaluationRequest(5, PROMPTS, 11, image_path=str(path)), unit=5)
    header, row = 14, 72 + 14 + 6  # a sample of 3 x 2 pixels is enlarged to 72 x 48
    with Image.open(path) as picture:
        assert picture.size == (630, 6 + 3 * (header + row + 6))
        pixels = np.asarray(picture.convert("L"))
    assert (pixels[:, 6 + 7 * 54 : 6 + 8 * 54] < 255).any()
    assert (pixels[:, 6 + 8 * 54 :] == 255).all()


class Film:
    """A toy whose samples are videos."""

    def __init__(self, toy: Any) -> None:
        self._toy = toy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._toy, name)

    def decode(self, latents: torch.Tensor) -> Images:
        still = self._toy.decode(latents)[:, None, None].repeat(3, axis=2)
        return np.concatenate([still * share for share in (0.2, 0.6, 1.0)], axis=1).astype(np.float32)


def test_videos_are_shown_moving(toy: Callable[..., Any], tmp_path: Path) -> None:
    request = EvaluationRequest(5, PROMPTS, 2, image_path=str(tmp_path / "grid.png"))
    judge(Film(toy(torch.float64)), request, section=EvaluationSection(frames_per_second=20))
    assert [path.name for path in tmp_path.iterdir()] == ["grid.gif"]
    with Image.open(tmp_path / "grid.gif") as picture:
        assert [frame.info["duration"] for frame in ImageSequence.Iterator(picture)] == [50] * 3


# ---- in the workers --------------------------------------------------------------------------------------------


def test_an_evaluation_may_take_more_steps_than_training(data: Callable[..., dict[str, Any]]) -> None:
    reward = {"reward__name": f"{__name__}:brightness"}
    request = EvaluationRequest(5, PROMPTS[:1], 2)
    more = GeneratorTarget(data(evaluation__num_inference_steps=9, **reward))
    more.evaluate(request)
    GeneratorTarget(data(sampling__num_inference_steps=9, **reward)).evaluate(request)
    GeneratorTarget(data(**reward)).evaluate(request)
    nine, as_trained, fewer = SEEN
    assert np.array_equal(nine, as_trained)
    assert not np.array_equal(nine, fewer)


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_family_is_evaluated_and_shown(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"family": name, "path": tiny_model(name)},
            "sampling": {"num_inference_steps": 2, **TINY[name].sampling},
            "algorithm": {"name": "ddpo" if families.lookup(name).process == "ddim" else "flow_grpo"},
            "reward": {"name": f"{__name__}:brightness"},
        }
    )
    target = EvaluatorTarget(config.model_dump(mode="json"))
    texts = (Prompt("a red square"), Prompt("the sea at night"))
    report = target.evaluate(EvaluationRequest(5, texts, 2, image_path=str(tmp_path / "grid.png")))
    assert report.num_samples == 4
    (samples,) = SEEN
    assert len({sample.tobytes() for sample in samples}) == 4
    assert [path.suffix for path in tmp_path.iterdir()] == [".gif" if samples.ndim == 5 else ".png"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, TrainerTarget]:
    """A trainer after two steps, with a moving average, and what it saved."""
    config = RunConfig.model_validate(
        {
            "sampling": {"num_inference_steps": 4},
            "optimizer": {"ema_decay": 0.9, "lr": 0.01},
            "reward": {"name": f"{__name__}:brightness"},
        }
    )
    plain = config.model_dump(mode="json")
    trainer, generator = TrainerTarget(plain), GeneratorTarget(plain)
    for step in range(2):
        micro_batch = MicroBatch(0, step, 0, (GroupSlice(f"s{step}p0", PROMPTS[0], 0, 4, 4),))
        rollout = generator.generate(micro_batch)
        trainer.update(rollout, (1.0, -1.0, 1.0, -1.0))
        trainer.commit(step, (0,))
        generator.load(trainer.publish(step + 1))
    folder = tmp_path_factory.mktemp("saved")
    trainer.save(str(folder))
    return plain, folder, trainer


def test_a_checkpoint_is_evaluated_as_the_generator_that_held_its_weights(
    saved: tuple[dict[str, Any], Path, TrainerTarget],
) -> None:
    plain, folder, trainer = saved
    request = EvaluationRequest(5, PROMPTS, 4)
    generator = GeneratorTarget(plain)
    base = generator.evaluate(request).metrics
    generator.load(trainer.publish(2))
    held = generator.evaluate(request)
    raw = EvaluatorTarget(plain, str(folder / "weights.safetensors"), 2).evaluate(request)
    assert raw == held
    ema = EvaluatorTarget(plain, str(folder / "ema.safetensors"), 2)
    assert all(torch.equal(ema._family.parameters()[k], v) for k, v in trainer._learner._average.tensors.items())  # type: ignore[union-attr]
    average = ema.evaluate(request)
    assert average.version == 2
    assert EvaluatorTarget(plain).evaluate(request) == EvaluationReport(0, 12, base)
    assert len({report["reward/mean"] for report in (base, raw.metrics, average.metrics)}) == 3


def test_weights_that_are_not_the_models_are_refused(
    saved: tuple[dict[str, Any], Path, TrainerTarget], tmp_path: Path
) -> None:
    plain, folder, _ = saved
    adapter = RunConfig.model_validate(plain | {"model": plain["model"] | {"lora": {"rank": 2}}}).model_dump(
        mode="json"
    )
    with pytest.raises(CheckpointError, match=r"is of another model: \d+ tensors differ"):
        EvaluatorTarget(adapter, str(folder / "weights.safetensors"), 2)
    (tmp_path / "cut.safetensors").write_bytes((folder / "weights.safetensors").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors cannot be read"):
        EvaluatorTarget(plain, str(tmp_path / "cut.safetensors"), 2)


def test_an_evaluation_of_nothing_is_refused(toy: Callable[..., Any]) -> None:
    for request in (EvaluationRequest(5, (), 2), EvaluationRequest(5, PROMPTS, 0)):
        with pytest.raises(ConfigError, match="at least one prompt and one sample"):
            judge(toy(torch.float64), request)
