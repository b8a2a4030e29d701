"""Every field of the configuration: help, bounds, types, presets, overrides and the YAML round trip."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import annotated_types
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from digen.config import (
    PRESETS,
    AdvantageSection,
    PromptSection,
    RunConfig,
    ScheduleConfig,
    dump_yaml,
    load_config,
    parse_tag,
    validate,
)
from digen.errors import ConfigError

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.yaml"))


def fields(model: type[BaseModel] = RunConfig, path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf field of the configuration with its dotted name."""
    for name, info in model.model_fields.items():
        dotted = f"{path}.{name}".lstrip(".")
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields(info.annotation, dotted)
        else:
            yield dotted, info


def sections(model: type[BaseModel] = RunConfig, path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from sections(info.annotation, f"{path}.{name}".lstrip("."))


def constraints(info: FieldInfo) -> list[Any]:
    """The bounds of a field, also those of ``Annotated[...] | None``."""
    found = list(info.metadata)
    for option in getattr(info.annotation, "__args__", ()):
        for item in getattr(option, "__metadata__", ()):
            found += getattr(item, "metadata", [item])
    return found


def just_outside() -> Iterator[tuple[str, Any]]:
    for name, info in fields():
        for bound in constraints(info):
            if isinstance(bound, annotated_types.Ge) and isinstance(bound.ge, int):
                yield name, bound.ge - 1
            elif isinstance(bound, annotated_types.Le) and isinstance(bound.le, int):
                yield name, bound.le + 1
            elif isinstance(bound, annotated_types.Gt):
                yield name, bound.gt
            elif isinstance(bound, annotated_types.Lt):
                yield name, bound.lt


FIELDS = dict(fields())
OUTSIDE = list(just_outside())


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_help(name: str) -> None:
    description = FIELDS[name].description
    assert description
    assert description.endswith(".")


@pytest.mark.parametrize(("name", "value"), OUTSIDE, ids=[f"{name}={value}" for name, value in OUTSIDE])
def test_a_value_just_outside_its_bounds_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config: {name}\b.*{value}") as caught:
        load_config(None, {name: value})
    assert "\n" not in str(caught.value)


def test_the_bounds_above_cover_what_they_should() -> None:
    assert len(OUTSIDE) >= 40
    expected = {
        ("schedule.window", 0),
        ("schedule.stale_fraction", -1),
        ("schedule.stale_fraction", 2),
        ("schedule.max_generating", 0),
        ("run.num_steps", 0),
        ("run.seed", -1),
        ("run.seed", 2**63),
        ("algorithm.clip_range", 0),
        ("algorithm.clip_range", 1),
        ("algorithm.advantage.ddof", 2),
        ("algorithm.advantage.best_of_n", 1),
        ("sampling.num_inference_steps", 1),
        ("optimizer.ema_decay", 1),
    }
    assert expected <= set(OUTSIDE)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in FIELDS
        if name
        not in {
            "algorithm.options",
            "model.lora",
            "reward.kwargs",
            "workers.engine_args",
            "workers.python",
            "workers.ray.runtime_env",
            "workers.gpus",
        }
    ],
)
def test_the_wrong_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}\b.*a mapping"):
        load_config(None, {name: {"this is": "a mapping"}})


@pytest.mark.parametrize(("name", "value"), [("reward.kwargs", 3), ("workers.gpus", {"gen0": ["first"]})])
def test_the_wrong_type_of_a_mapping_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(None, {name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["optimizer.lr", "schedule.stale_fraction", "algorithm.advantage.epsilon"])
def test_numbers_are_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}: Input should be a finite number"):
        load_config(None, {name: value})


@pytest.mark.parametrize(("path", "model"), list(sections()), ids=[path or "top" for path, _ in sections()])
def test_an_unknown_key_names_the_nearest_known_one(path: str, model: type[BaseModel]) -> None:
    for known in model.model_fields:
        misspelt = f"{path}.{known}x".lstrip(".")
        with pytest.raises(ConfigError, match=rf"unknown key '{misspelt}'; did you mean '{known}'\?"):
            load_config(None, {misspelt: 1})
    far = f"{path}.zzzzzzzz".lstrip(".")
    with pytest.raises(ConfigError, match=f"unknown key '{far}'; known: {', '.join(model.model_fields)}"):
        load_config(None, {far: 1})


def test_all_errors_come_at_once() -> None:
    with pytest.raises(ConfigError, match=r"run\.num_steps.*; plan\.prompts_per_step.*; unknown key 'seed'"):
        load_config(None, ["run.num_steps=0", "plan.prompts_per_step=many", "seed=1"])


class TestSchedule:
    @pytest.mark.parametrize(
        ("mode", "axis", "barrier", "tag", "window", "stale_fraction"),
        [
            ("colocated", "generation", True, "never", 1, "0"),
            ("naive", "generation", True, "never", 1, "0"),
            ("microbatch", "batch", False, "never", 1, "0"),
            ("gap", "generation", False, "never", 1, "0"),
            ("tag", "generation", False, "horizon", 1, "0"),
            ("tcss", "generation", False, "horizon", 2, "0.5"),
        ],
    )
    def test_presets(self, mode: Any, axis: str, *, barrier: bool, tag: str, window: int, stale_fraction: str) -> None:
        schedule = ScheduleConfig(mode=mode)
        assert schedule.resolved_axis == axis
        assert schedule.resolved_barrier is barrier
        assert schedule.resolved_tag == tag
        assert schedule.resolved_window == window
        assert schedule.resolved_stale_fraction == Decimal(stale_fraction)

    @pytest.mark.parametrize("mode", PRESETS)
    def test_an_explicit_field_beats_every_preset(self, mode: Any) -> None:
        schedule = ScheduleConfig(
            mode=mode, axis="batch", barrier=False, window=3, stale_fraction=Decimal("0.25"), tag="static(2)"
        )
        assert schedule.resolved_axis == "batch"
        assert schedule.resolved_barrier is False
        assert schedule.resolved_window == 3
        assert schedule.resolved_stale_fraction == Decimal("0.25")
        assert schedule.resolved_tag == "static(2)"
        assert ScheduleConfig(mode=mode, axis="generation", barrier=True).resolved_axis == "generation"
        assert ScheduleConfig(mode=mode, barrier=True).resolved_barrier is True
        assert ScheduleConfig(mode=mode, window=1).resolved_window == 1
        assert ScheduleConfig(mode=mode, window=2, stale_fraction=Decimal(0)).resolved_stale_fraction == 0

    def test_raising_only_the_window_admits_half_a_step(self) -> None:
        assert ScheduleConfig(mode="tag", window=2).resolved_stale_fraction == Decimal("0.5")

    @pytest.mark.parametrize("percent", range(101))
    def test_stale_fractions_are_exact_decimals(self, percent: int) -> None:
        """``int(0.29 * 100)`` is 28 in binary floating point."""
        for value in (percent / 100, f"{percent / 100}", Decimal(percent) / 100):
            schedule = load_config(None, {"schedule.window": 2, "schedule.stale_fraction": value}).schedule
            assert math.floor(schedule.resolved_stale_fraction * 100) == percent

    @pytest.mark.parametrize("value", ["-0.01", "1.01"])
    def test_a_stale_fraction_outside_0_to_1_is_refused(self, value: str) -> None:
        with pytest.raises(ConfigError, match=rf"schedule\.stale_fraction: .*\(got '?{value}'?\)"):
            load_config(None, ["schedule.window=2", f"schedule.stale_fraction={value}"])

    def test_stale_samples_need_a_window(self) -> None:
        with pytest.raises(ConfigError, match=r"schedule: stale_fraction > 0 needs window >= 2"):
            load_config(None, ["schedule.stale_fraction=0.5"])
        load_config(None, ["schedule.stale_fraction=0"])

    @pytest.mark.parametrize(
        ("text", "policy"),
        [
            ("never", ("never", None)),
            ("greedy", ("greedy", None)),
            ("horizon", ("horizon", None)),
            ("search(50)", ("search", 50)),
            ("threshold", ("threshold", None)),
            ("static(0)", ("static", 0)),
            (" static(12) ", ("static", 12)),
        ],
    )
    def test_tag_policies(self, text: str, policy: tuple[str, int | None]) -> None:
        assert parse_tag(text) == policy
        assert load_config(None, {"schedule.tag": text}).schedule.resolved_tag == text.strip()

    @pytest.mark.parametrize(
        "text", ["always", "static", "static()", "static(-1)", "static(1.5)", "never(1)", "Greedy"]
    )
    def test_an_unknown_tag_policy_names_the_known_ones(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"schedule\.tag: unknown TAG policy .*never, static\(k\).*greedy"):
            load_config(None, {"schedule.tag": text})

    @pytest.mark.parametrize("name", ["mode", "axis", "sync", "update_order"])
    def test_choices_are_listed(self, name: str) -> None:
        with pytest.raises(ConfigError, match=rf"schedule\.{name}: Input should be '.*got 'sideways'"):
            load_config(None, {f"schedule.{name}": "sideways"})


class TestWorkers:
    def test_colocated_has_no_generators(self) -> None:
        assert load_config(None, ["schedule.mode=colocated"]).num_generators == 0
        assert load_config(None, ["schedule.mode=colocated", "workers.generators=0"]).num_generators == 0
        with pytest.raises(ConfigError, match=r"workers\.generators must be 0 in mode colocated"):
            load_config(None, ["schedule.mode=colocated", "workers.generators=1"])

    @pytest.mark.parametrize("mode", [mode for mode in PRESETS if mode != "colocated"])
    def test_every_other_mode_needs_one(self, mode: str) -> None:
        assert load_config(None, [f"schedule.mode={mode}", "workers.generators=3"]).num_generators == 3
        with pytest.raises(ConfigError, match=r"workers\.generators must be at least 1 in mode"):
            load_config(None, [f"schedule.mode={mode}", "workers.generators=0"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {num_steps: 7}\nrun: {name: x}\n", "'run' is given twice"),
        ("run: {num_steps: 7, num_steps: 8}\n", "'num_steps' is given twice"),
        ("reward: {kwargs: &a {b: *a}}\n", "aliases are not supported"),
        ("reward: {kwargs: {x: 2020-99-99}}\n", "month must be in 1..12"),
    ],
)
def test_yaml_that_hides_a_value_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_an_override_that_is_no_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"override reward\.kwargs\.x: month must be in 1\.\.12"):
        load_config(None, ["reward.kwargs.x=2020-99-99"])


def test_best_of_n_is_even() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage\.best_of_n: best_of_n must be even .* got 3"):
        load_config(None, ["algorithm.advantage.best_of_n=3"])
    assert AdvantageSection(best_of_n=4).best_of_n == 4


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../up",
        "../../x",
        "..",
        ".",
        "a/b",
        "a/../b",
        "/a",
        "\\a",
        "-x",
        ".hidden",
        "a b",
        "a\0",
        "%2e%2e",
        "é",
        "x" * 65,
    ],
)
def test_a_run_name_is_a_plain_file_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        load_config(None, {"run.name": name})


def test_the_folder_of_a_run() -> None:
    assert load_config(None, ["run.name=a", "run.output=b/c"]).folder == Path("b/c/a")


def test_a_config_is_frozen() -> None:
    config = RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1


class TestFiles:
    def test_a_file_and_overrides(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("run: {seed: 7, name: first}\nschedule:\n  mode: tcss\n  stale_fraction: 0.29\n")
        config = load_config(path, ["run.name=second", "optimizer.betas=[0.8, 0.9]", "algorithm.advantage.ddof=1"])
        assert (config.run.seed, config.run.name) == (7, "second")
        assert config.optimizer.betas == (0.8, 0.9)
        assert config.algorithm.advantage.ddof == 1
        assert config.schedule.resolved_stale_fraction == Decimal("0.29")
        assert load_config(str(path), {"run.seed": 8}).run.seed == 8

    def test_values_of_overrides_are_yaml(self) -> None:
        overrides = ["schedule.barrier=true", "optimizer.lr=1e-3", "reward.kwargs={a: [1, x]}", "model.path=null"]
        config = load_config(None, overrides)
        assert config.schedule.barrier is True
        assert config.optimizer.lr == pytest.approx(1e-3, rel=0)
        assert config.reward.kwargs == {"a": [1, "x"]}
        assert config.model.path is None

    def test_a_later_override_wins(self) -> None:
        assert load_config(None, ["run.seed=1", "run.seed=2"]).run.seed == 2

    def test_the_empty_file_is_the_defaults(self, tmp_path: Path) -> None:
        (tmp_path / "empty.yaml").write_text("# nothing\n")
        assert load_config(tmp_path / "empty.yaml") == load_config() == RunConfig()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"run: [1", r"bad\.yaml is not valid YAML: .*line 1"),
            (b"- run\n", r"bad\.yaml must hold a mapping of sections, not list"),
            (b"\xff\xfe\xff", r"bad\.yaml cannot be read"),
            (b"run: !!python/object/apply:os.getcwd []\n", r"bad\.yaml is not valid YAML: .*constructor"),
            (b"run: 3\n", r"bad\.yaml: run: "),
            (b"3: 4\n", r"bad\.yaml: 3: Keys should be strings"),
            (b"schedule: {windw: 2}\n", r"bad\.yaml: unknown key 'schedule\.windw'; did you mean 'window'\?"),
        ],
    )
    def test_a_bad_file_is_named_in_one_line(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "bad.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(path)
        assert "\n" not in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"config file .*absent\.yaml does not exist"):
            load_config(tmp_path / "absent.yaml")

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("schedule.window", r"override 'schedule\.window' is not of the form section\.field=value"),
            ("=3", "is not of the form"),
            ("run.name=[1", r"override run\.name: while parsing"),
            ("plan.prompts_per_step.more=1", r"plan\.prompts_per_step: "),
        ],
    )
    def test_a_bad_override_is_named(self, override: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(None, [override])
        assert "\n" not in str(caught.value)

    def test_an_override_below_a_value_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text("run: {seed: 1}\n")
        with pytest.raises(ConfigError, match=r"override run\.seed\.x: seed is not a section"):
            load_config(tmp_path / "run.yaml", ["run.seed.x=1"])

    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            *([f"schedule.mode={mode}"] for mode in PRESETS),
            ["schedule.window=2", "schedule.stale_fraction=0.29", "schedule.tag=static(3)"],
            ["prompts.source=hf:a/b", "model.path=weights", "workers.gpus={gen0: [0, 1], trainer: [2]}"],
            ["algorithm.tsp_chunk=2", "algorithm.advantage.best_of_n=8"],
        ],
        ids=lambda overrides: " ".join(overrides) or "defaults",
    )
    def test_yaml_round_trip(self, tmp_path: Path, overrides: list[str]) -> None:
        config = load_config(None, overrides)
        path = tmp_path / "config.yaml"
        path.write_text(dump_yaml(config), encoding="utf-8")
        assert load_config(path) == config
        assert dump_yaml(load_config(path)) == dump_yaml(config)

    def test_a_dump_is_plain_yaml_with_every_field(self) -> None:
        data = yaml.safe_load(dump_yaml(RunConfig(prompts=PromptSection(source="p.txt"))))
        for name in FIELDS:
            node = data
            for part in name.split("."):
                node = node[part]
        assert data["prompts"]["source"] == "p.txt"
        assert validate(data, "the dump").schedule == RunConfig().schedule


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    assert load_config(path).run.num_steps >= 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward.kwargs", {"trust_remote_code": True}),
        ("workers.engine_args", {"model": [{"trust_remote_code": False}]}),
    ],
)
def test_running_code_of_a_model_is_refused_wherever_it_is_asked_for(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{key}\..*trust_remote_code: code from a model's folder .* is never run"):
        load_config(None, {key: value})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"workers.weights.channel": "broadcast"}, r"workers\.weights\.channel=broadcast needs schedule\.sync=hold"),
        (
            {"workers.weights.channel": "broadcast", "schedule.sync": "hold", "workers.type": "ray"},
            r"broadcast is for one machine; with workers\.type=ray: memory",
        ),
        (
            {"workers.weights.channel": "broadcast", "schedule.sync": "hold"},
            r"a worker that is started again could not join; set restarts\.budget=0",
        ),
        ({"workers.weights.folder": "x"}, r"workers\.weights: folder is of the channel files, but channel is auto"),
        (
            {"workers.weights.channel": "broadcast", "workers.weights.skip_unchanged": True},
            r"workers\.weights: skip_unchanged: the channel broadcast sends everything",
        ),
        ({"workers.weights.channel": "cuda_ipc"}, r"workers\.weights\.channel"),
    ],
)
def test_weight_channels_that_cannot_be(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("schedule.max_rollout_bytes", True, "schedule.max_rollout_bytes"),
        ("restarts.budget", True, "restarts.budget"),
        ("optimizer.lr", True, "optimizer.lr"),
        ("schedule.stale_fraction", False, "schedule.stale_fraction"),
        ("workers.gpus", {"gen0": [True]}, "workers.gpus"),
        ("run.stop_above", {"grad_norm": True}, "run.stop_above"),
        ("workers.judges", {"a": {"model": "/m", "replicas": True}}, "workers.judges.a.replicas"),
    ],
)
def test_true_is_not_taken_for_one(field: str, value: Any, named: str) -> None:
    said = rf"{re.escape(named)}: {'false' if value is False else 'true'} is not a number$"
    with pytest.raises(ConfigError, match=said):
        load_config(None, {field: value})
    with pytest.raises(ConfigError, match=said):
        load_config(None, {field: json.dumps(value)})  # as a file or a command line has it


def test_true_is_taken_where_it_is_due() -> None:
    values = {"algorithm.options": {"a": True}, "workers.engine_args": {"b": [True]}, "prompts.shuffle": True}
    config = load_config(None, values)
    assert (config.algorithm.options, config.workers.engine_args) == ({"a": True}, {"b": [True]})
    assert config.prompts.shuffle
    assert load_config(None, {"restarts.budget": "2"}).restarts.budget == 2


@pytest.mark.parametrize("value", [-1, "1.5 parsecs", "lots", ".nan"])
def test_what_is_no_number_of_bytes_is_told_what_would_be(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"schedule\.max_rollout_bytes: must be a number of bytes above 0, such as 64GiB \(got .*\)$"
    ):
        load_config(None, {"schedule.max_rollout_bytes": value})


LETTERS = "ab.:[]{}&*!?-'\"\0\x85\n é1"
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(LETTERS, max_size=6) | st.just("1e400"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=6) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)
"""What may stand where something else is due."""
DEFAULTS: dict[str, Any] = yaml.safe_load(dump_yaml(RunConfig()))
NAMES = [f"{section}.{field}" for section, fields in DEFAULTS.items() for field in fields]


@contextlib.contextmanager
def refused_in_one_line() -> Iterator[None]:
    """Nothing is raised, or a ConfigError of one line."""
    said = ""
    try:
        yield
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), VALUE), min_size=1, max_size=3), st.booleans())
def test_a_value_of_any_type_is_taken_or_refused_in_one_line(values: list[tuple[str, Any]], whole: bool) -> None:
    """``whole``: in place of the section."""
    data = copy.deepcopy(DEFAULTS)
    for name, value in values:
        section, field = name.split(".")
        if whole or not isinstance(data[section], dict):
            data[section] = value
        else:
            data[section][field] = value
    with refused_in_one_line():
        dump_yaml(validate(data, "here"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "config.yaml"


TEXT = dump_yaml(RunConfig()).encode()
GIANTS = [
    b"[" * 5_000,
    b"a: " * 3_000,
    b"a: &a [*a]",
    b"run: !!python/object:os.system {}",
    b"9" * 5_000,
    b"? " * 2_000,
]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, len(TEXT)), st.binary(max_size=6) | st.sampled_from(GIANTS), st.booleans())
def test_a_damaged_file_is_taken_or_refused_in_one_line(file: Path, at: int, content: bytes, cut: bool) -> None:
    file.write_bytes(TEXT[:at] + content + (b"" if cut else TEXT[at + len(content) :]))
    with refused_in_one_line():
        load_config(file)


@settings(max_examples=60, deadline=None)
@given(
    st.text(LETTERS, max_size=12) | st.sampled_from(NAMES),
    st.text(LETTERS, max_size=12) | st.sampled_from(["[" * 400, "a: &a [*a]", "!!python/object:os.system {}"]),
)
def test_an_override_of_any_text_is_taken_or_refused_in_one_line(key: str, value: str) -> None:
    with refused_in_one_line():
        load_config(None, {key: value})
