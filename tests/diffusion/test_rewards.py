from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digen.config import RewardSection
from digen.diffusion.families.base import Images
from digen.diffusion.rewards import lookup
from digen.diffusion.rewards.classifier import ClassProbability, Judge
from digen.diffusion.rewards.compute import build_reward, compute_rewards
from digen.errors import ConfigError, MissingExtra, RewardError
from digen.types import Prompt

PROMPTS = [Prompt("the digit 3", {"label": 3}), Prompt("the digit 4", {"label": 4})]
NAMES = ["s0p0/0", "s0p0/1"]
IMAGES: Images = np.zeros((2, 8, 8), dtype=np.float32)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's package ``pluginpkg`` with an empty module ``mine``; importing the package itself fails."""
    package = tmp_path / "pluginpkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("pluginpkg", "pluginpkg.mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return package


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown reward\.name 'clasifier'; did you mean 'classifier'\?"):
        lookup("clasifier")
    with pytest.raises(ConfigError, match="is not of the form"):
        lookup("some path:function")


def test_user_code_is_located_but_not_imported(plugin: Path) -> None:
    (plugin / "__init__.py").write_text("raise RuntimeError('imported')")
    assert lookup("pluginpkg.mine:reward").target == "pluginpkg.mine:reward"
    assert "pluginpkg" not in sys.modules
    for name in ("pluginpkg.other:f", "pluginpkg.mine.deeper:f", "no_such_package.x:f"):
        with pytest.raises(ConfigError, match="cannot be found"):
            lookup(name)


def test_user_functions_and_classes(plugin: Path) -> None:
    (plugin / "mine.py").write_text(
        "def bright(images, prompts, *, scale=1.0):\n"
        "    return images.reshape(len(prompts), -1).mean(axis=1) * scale\n"
        "class Constant:\n"
        "    def __init__(self, value): self.value = value\n"
        "    def __call__(self, images, prompts): return [self.value] * len(prompts)\n"
        "number = 3\n"
    )
    bright = build_reward(RewardSection(name="pluginpkg.mine:bright", kwargs={"scale": 2.0}))
    assert compute_rewards("bright", bright, IMAGES + 0.25, PROMPTS, NAMES) == (0.5, 0.5)
    constant = build_reward(RewardSection(name="pluginpkg.mine:Constant", kwargs={"value": 7}))
    assert compute_rewards("constant", constant, IMAGES, PROMPTS, NAMES) == (7.0, 7.0)
    for name, kwargs, message in (
        ("bright", {"size": 1}, r"does not take reward\.kwargs \['size'\]"),
        ("Constant", {}, "missing 1 required positional argument"),
        ("number", {}, "cannot be called"),
        ("absent", {}, "cannot be imported: AttributeError"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_reward(RewardSection(name=f"pluginpkg.mine:{name}", kwargs=kwargs))


def test_a_module_that_fails_to_import_says_why(plugin: Path) -> None:
    (plugin / "mine.py").write_text("import no_such_dependency")
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'no_such_dependency'"):
        build_reward(RewardSection(name="pluginpkg.mine:f"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0.5, float("nan")], r"reward 'r' is nan for sample s0p0/1 \(prompt 'the digit 4'\)"),
        ([float("inf"), 0.5], "reward 'r' is inf for sample s0p0/0"),
        ([0.5], r"reward 'r' gave 1 values for 2 samples \(s0p0/0 \.\. s0p0/1\)"),
        (None, r"reward 'r' failed on samples s0p0/0 \.\. s0p0/1: TypeError"),
        (["high", 1], r"reward 'r' failed .* 'high' is not a real number"),
        ("12", "it returned a str, not a sequence of numbers"),
        ({0.1, 0.2}, "it returned a set, not a sequence of numbers"),
        ({"a": 1, "b": 2}, "it returned a dict, not a sequence of numbers"),
        ([1j, 1], "1j is not a real number"),
    ],
)
def test_an_answer_that_is_not_one_finite_number_each_is_an_error(answer: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        compute_rewards("r", lambda images, prompts: answer, IMAGES, PROMPTS, NAMES)


def test_an_exception_keeps_its_cause() -> None:
    def broken(images: Images, prompts: Sequence[Prompt]) -> Sequence[float]:
        raise OSError("no connection")

    with pytest.raises(RewardError, match=r"reward 'r' failed on samples .* OSError: no connection") as caught:
        compute_rewards("r", broken, IMAGES, PROMPTS, NAMES)
    assert isinstance(caught.value.__cause__, OSError)


def test_classifier_and_judge_know_digits_and_are_not_the_same() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    prompts = [Prompt(f"the digit {label}", {"label": int(label)}) for label in digits.target]
    chances = np.array(ClassProbability()(images, prompts))
    named = np.array(Judge()(images, prompts))
    assert 0 <= chances.min() <= chances.max() <= 1
    assert chances.mean() > 0.95
    assert set(named) == {0.0, 1.0}
    assert named.mean() > 0.95
    order = np.random.default_rng(0).permutation(len(images))
    assert chances[order[0::2]].mean() > chances[order[1::2]].mean()
    assert named[order[0::2]].mean() < named[order[1::2]].mean()
    assert ClassProbability()(images[:50], prompts[:50]) == ClassProbability()(images[:50], prompts[:50])


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match=r"digen-rl\[demo\]"):
        build_reward(RewardSection())


def test_a_prompt_without_a_label_is_named() -> None:
    with pytest.raises(RewardError, match="prompt 'a cat' has no integer label"):
        compute_rewards("classifier", build_reward(RewardSection()), IMAGES[:1], [Prompt("a cat")], NAMES[:1])
