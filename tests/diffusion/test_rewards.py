"""The registry, several rewards at once, what the driver checks, and answers that are no rewards."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digen.config import RewardSection, RunConfig, dump_yaml, load_config
from digen.diffusion import rewards
from digen.diffusion.families.base import Images
from digen.diffusion.rewards import REWARDS, lookup
from digen.diffusion.rewards.classifier import ClassProbability, Judge
from digen.diffusion.rewards.compute import Reward, RewardFunction, build_callable, compute_rewards
from digen.diffusion.rewards.prompts import target_text
from digen.diffusion.roles import GeneratorTarget
from digen.errors import ConfigError, MissingExtra, RewardError
from digen.fleet import ROLES, build_process
from digen.runner import prepare
from digen.types import EvaluationRequest, MicroBatch, Prompt

PROMPTS = [Prompt("the digit 3", {"label": 3}), Prompt("the digit 4", {"label": 4})]
NAMES = ["s0p0/0", "s0p0/1"]
IMAGES: Images = np.zeros((2, 8, 8), dtype=np.float32)

BRIGHT = (
    "def bright(images, prompts, *, scale=1.0):\n"
    "    return images.reshape(len(prompts), -1).mean(axis=1) * scale\n"
    "class Constant:\n"
    "    def __init__(self, value): self.value = value\n"
    "    def __call__(self, images, prompts): return [self.value] * len(prompts)\n"
    "number = 3\n"
)


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


def only(name: str, **kwargs: Any) -> RewardFunction:
    return build_callable(lookup(name).target, kwargs)


class TestFinding:
    def test_unknown_names_get_a_suggestion_and_the_known_ones(self) -> None:
        with pytest.raises(
            ConfigError, match=r"unknown reward\.name 'clasifier'; did you mean 'classifier'\?"
        ) as caught:
            lookup("clasifier")
        assert all(name in str(caught.value) for name in REWARDS)
        with pytest.raises(ConfigError, match="is not of the form"):
            lookup("some path:function")

    def test_the_registry_and_its_checks_import_no_torch(self) -> None:
        code = (
            "import sys; from digen.diffusion import rewards; from digen.config import RewardSection;"
            "rewards.check(RewardSection(heads=[{'name': name} for name in rewards.REWARDS]), []);"
            "heavy = {'torch', 'numpy', 'transformers', 'PIL'} & set(sys.modules); assert not heavy, heavy"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.parametrize("name", REWARDS)
    def test_every_built_in_target_is_there(self, name: str) -> None:
        module, _, attribute = REWARDS[name].target.partition(":")
        assert isinstance(getattr(__import__(module, fromlist=[attribute]), attribute), type)

    def test_user_code_is_located_but_not_imported(self, plugin: Path) -> None:
        (plugin / "__init__.py").write_text("raise RuntimeError('imported')")
        assert lookup("pluginpkg.mine:reward").target == "pluginpkg.mine:reward"
        assert "pluginpkg" not in sys.modules
        for name in ("pluginpkg.other:f", "pluginpkg.mine.deeper:f", "no_such_package.x:f"):
            with pytest.raises(ConfigError, match="cannot be found"):
                lookup(name)

    def test_user_functions_and_classes(self, plugin: Path) -> None:
        (plugin / "mine.py").write_text(BRIGHT)
        bright = only("pluginpkg.mine:bright", scale=2.0)
        assert compute_rewards("bright", bright, IMAGES + 0.25, PROMPTS, NAMES) == (0.5, 0.5)
        constant = only("pluginpkg.mine:Constant", value=7)
        assert compute_rewards("constant", constant, IMAGES, PROMPTS, NAMES) == (7.0, 7.0)
        for name, kwargs, message in (
            ("bright", {"size": 1}, r"does not take reward\.kwargs \['size'\]"),
            ("Constant", {}, "missing 1 required positional argument"),
            ("number", {}, "cannot be called"),
            ("absent", {}, "cannot be imported: AttributeError"),
        ):
            with pytest.raises(ConfigError, match=message):
                only(f"pluginpkg.mine:{name}", **kwargs)

    def test_a_module_that_fails_to_import_says_why(self, plugin: Path) -> None:
        (plugin / "mine.py").write_text("import no_such_dependency")
        with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'no_such_dependency'"):
            only("pluginpkg.mine:f")


class TestHeads:
    HEADS = (
        {"name": "pluginpkg.mine:bright", "label": "light", "weight": 2.0},
        {"name": "pluginpkg.mine:bright", "label": "glare", "weight": -0.5, "kwargs": {"scale": 10}},
        {"name": "pluginpkg.mine:Constant", "weight": 0, "kwargs": {"value": 7}},
    )

    def section(self, **values: Any) -> RewardSection:
        return RewardSection.model_validate(values)

    def test_the_reward_is_the_weighted_sum_and_every_head_is_kept(self, plugin: Path) -> None:
        (plugin / "mine.py").write_text(BRIGHT)
        section = self.section(heads=self.HEADS)
        images = np.stack([np.full((8, 8), 0.25), np.full((8, 8), 0.5)]).astype(np.float32)
        scores = Reward(section).score(images, PROMPTS, NAMES)
        assert scores.heads == {"light": (0.25, 0.5), "glare": (2.5, 5.0), "pluginpkg.mine:Constant": (7.0, 7.0)}
        assert scores.rewards == (2 * 0.25 - 0.5 * 2.5, 2 * 0.5 - 0.5 * 5)
        assert section.weights == {"light": 2.0, "glare": -0.5, "pluginpkg.mine:Constant": 0.0}
        assert list(section.weights) == list(scores.heads), "whoever weights advantages finds every head"

    def test_one_reward_is_one_head(self) -> None:
        assert self.section().weights == {"classifier": 1.0}
        assert self.section(name="ocr", kwargs={"frames": 2}).resolved_heads[0].kwargs == {"frames": 2}
        scores = Reward(self.section()).score(IMAGES, PROMPTS, NAMES)
        assert scores.heads == {"classifier": scores.rewards}

    def test_a_sum_that_is_too_large_is_no_reward(self, plugin: Path) -> None:
        (plugin / "mine.py").write_text(BRIGHT)
        heads = [{"name": "pluginpkg.mine:Constant", "weight": 1e200, "kwargs": {"value": 1e200}}]
        heads += [{"name": "pluginpkg.mine:Constant", "label": "b", "weight": -1e200, "kwargs": {"value": 1e200}}]
        with pytest.raises(RewardError, match="the weighted sum of the rewards is nan for sample s0p0/0"):
            Reward(self.section(heads=heads)).score(IMAGES, PROMPTS, NAMES)

    def test_a_head_that_fails_is_named(self, plugin: Path) -> None:
        (plugin / "mine.py").write_text("def fail(images, prompts): raise OSError('no connection')\n" + BRIGHT)
        heads = ({"name": "pluginpkg.mine:bright"}, {"name": "pluginpkg.mine:fail", "label": "second"})
        with pytest.raises(RewardError, match=r"reward 'second' failed on samples s0p0/0 \.\. s0p0/1: OSError"):
            Reward(self.section(heads=heads)).score(IMAGES, PROMPTS, NAMES)

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ({"heads": [{"name": "a"}], "name": "b"}, "reward: name and kwargs are those of a single reward"),
            ({"heads": [{"name": "a"}], "kwargs": {"c": 1}}, "reward: name and kwargs are those of a single reward"),
            ({"heads": [{"name": "a"}, {"name": "a"}]}, "reward: two heads are called 'a'"),
            ({"heads": [{"name": "a"}, {"name": "b", "label": "a"}]}, "reward: two heads are called 'a'"),
            ({"heads": [{"name": "a", "weight": 0}]}, "reward: every head has weight 0"),
            ({"heads": [{"name": "a", "weight": math.nan}]}, r"reward\.heads\.0\.weight: .*finite number"),
            (
                {"heads": [{"name": "a", "wieght": 1}]},
                r"unknown key 'reward\.heads\.0\.wieght'; did you mean 'weight'\?",
            ),
            ({"heads": [{"weight": 1}]}, r"reward\.heads\.0\.name: Field required"),
            ({"heads": [{"name": "a", "label": "two words"}]}, r"reward\.heads\.0\.label"),
            ({"heads": {"name": "a"}}, r"reward\.heads: Input should be a valid tuple"),
        ],
    )
    def test_wrong_heads_are_refused_by_name(self, override: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load_config(None, {"reward": override})

    def test_heads_survive_the_round_trip(self, tmp_path: Path) -> None:
        config = load_config(None, {"reward": {"heads": self.HEADS}})
        (tmp_path / "config.yaml").write_text(dump_yaml(config))
        assert load_config(tmp_path / "config.yaml") == config
        assert RunConfig.model_validate(config.model_dump(mode="json")) == config

    def test_heads_reach_the_scheduler_and_the_evaluation(
        self, data: Callable[..., dict[str, Any]], micro_batch: Callable[..., MicroBatch]
    ) -> None:
        heads = [{"name": "classifier", "weight": 2}, {"name": "jpeg_compressibility", "label": "jpeg"}]
        target = GeneratorTarget(data(reward={"heads": heads}))
        scored = target.score(target.generate(micro_batch(count=3)))
        assert list(scored.heads) == ["classifier", "jpeg"]
        for reward, digit, size in zip(scored.rewards, scored.heads["classifier"], scored.heads["jpeg"], strict=True):
            assert reward == 2 * digit + size
            assert -1 < size < -0.1, "kilobytes"
        metrics = target.evaluate(EvaluationRequest(0, (PROMPTS[0],), samples_per_prompt=2)).metrics
        means = metrics["reward/classifier/mean"], metrics["reward/jpeg/mean"]
        assert metrics["reward/mean"] == pytest.approx(2 * means[0] + means[1], abs=1e-12)


class TestBeforeTheRun:
    def check(self, *heads: dict[str, Any], prompts: Sequence[Prompt] = ()) -> tuple[str, ...]:
        return rewards.check(RewardSection.model_validate({"heads": heads}), prompts)

    def test_the_extras_that_are_needed(self) -> None:
        assert self.check({"name": "ocr"}, {"name": "jpeg_compressibility"}, {"name": "classifier"}) == (
            "rewards",
            "demo",
        )

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "clip").mkdir()
        head = {"name": "aesthetic", "kwargs": {"model": str(tmp_path / "clip"), "checkpoint": "hf:org/name/file.pt"}}
        self.check(head)
        head["kwargs"] = {"model": str(tmp_path / "clap")}
        with pytest.raises(ConfigError, match=r"reward 'aesthetic': model '.*clap' does not exist"):
            self.check(head)

    def test_a_prompt_that_lacks_what_the_reward_needs_is_named(self) -> None:
        signs = [Prompt('a sign that says "OPEN"'), Prompt("a cat", {"text": "Miau"})]
        self.check({"name": "ocr"}, prompts=signs)
        with pytest.raises(ConfigError, match="prompt 'a cat' names no text to show"):
            self.check({"name": "ocr"}, prompts=[*signs, Prompt("a cat")])
        with pytest.raises(ConfigError, match="prompt 'a cat' has no integer label"):
            self.check({"name": "classifier"}, prompts=[Prompt("a cat")])

    def test_a_run_is_prepared_with_its_reward(self) -> None:
        with pytest.raises(ConfigError, match="prompt 'the digit 0' names no text to show"):
            prepare(load_config(None, {"reward.name": "ocr"}))
        assert "rewards" not in prepare(load_config(None)).extras

    def test_a_key_that_is_not_set_is_named_and_one_that_is_goes_to_the_workers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kwargs = {"url": "https://judge.example/v1", "model": "m", "api_key_env": "JUDGE_API_KEY"}
        section = RewardSection(name="judge", kwargs=kwargs)
        monkeypatch.delenv("JUDGE_API_KEY", raising=False)
        with pytest.raises(ConfigError, match="environment variable JUDGE_API_KEY, which a reward's api_key_env names"):
            rewards.check(section, [])
        monkeypatch.setenv("JUDGE_API_KEY", "sesame")
        assert rewards.secrets(section) == {"JUDGE_API_KEY": "sesame"}
        config = RunConfig(reward=section)
        assert "sesame" not in dump_yaml(config)
        scorer, trainer = (
            build_process(config, name, f"{ROLES}:{target}", log_dir=None)
            for name, target in (("gen0", "GeneratorTarget"), ("trainer", "TrainerTarget"))
        )
        assert scorer._env["JUDGE_API_KEY"] == "sesame"
        assert "JUDGE_API_KEY" not in trainer._env
        with pytest.raises(ConfigError, match="environment variable 3"):
            rewards.secrets(RewardSection(name="judge", kwargs={"api_key_env": 3}))

    @pytest.mark.parametrize(
        ("text", "metadata", "target"),
        [
            ('a sign "Open 24h" and "no"', {}, "Open 24h"),
            ("ein Schild “Offen”", {}, "Offen"),
            ('a sign "Open"', {"text": "Closed"}, "Closed"),
        ],
    )
    def test_the_text_that_a_prompt_asks_for(self, text: str, metadata: dict[str, Any], target: str) -> None:
        assert target_text(Prompt(text, metadata)) == target

    @pytest.mark.parametrize(
        ("text", "metadata"), [("a cat", {}), ('a "  " sign', {}), ('"a"', {"text": 7}), ('a 3" nail', {})]
    )
    def test_a_prompt_without_such_a_text(self, text: str, metadata: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="names no text to show"):
            target_text(Prompt(text, metadata))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0.5, float("nan")], r"reward 'r' is nan for sample s0p0/1 \(prompt 'the digit 4'\)"),
        ([float("inf"), 0.5], "reward 'r' is inf for sample s0p0/0"),
        ([0.5], r"reward 'r' gave 1 values for 2 samples \(s0p0/0 \.\. s0p0/1\)"),
        ([ValueError("x")] * 3, r"reward 'r' gave 3 values for 2 samples"),
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


def test_samples_that_failed_are_named_and_the_others_are_not() -> None:
    samples = [f"s0p0/{number}" for number in range(8)]

    def some(images: Images, prompts: Sequence[Prompt]) -> list[float | Exception]:
        return [OSError(f"reason {row}") if row % 2 else 0.5 for row in range(8)]

    with pytest.raises(RewardError) as caught:
        compute_rewards("r", some, IMAGES, PROMPTS * 4, samples)
    assert str(caught.value) == (
        "reward 'r' failed on 4 of 8 samples: s0p0/1: reason 1; s0p0/3: reason 3; s0p0/5: reason 5; also s0p0/7"
    )
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
        Reward(RewardSection())


def test_a_prompt_without_a_label_is_named() -> None:
    with pytest.raises(RewardError, match="prompt 'a cat' has no integer label"):
        Reward(RewardSection()).score(IMAGES[:1], [Prompt("a cat")], NAMES[:1])
