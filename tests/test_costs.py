"""Where durations come from: the calibrated models, given numbers, profiles; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from digen import RunConfig, ScheduleConfig, load_config
from digen.config import dump_yaml
from digen.costs import CALIBRATED, durations_for, origin, time_unit, trained_timesteps, update_factor
from digen.durations import Durations, parse_durations
from digen.errors import ConfigError
from digen.twin import simulate, write_folder

CASES = [(steps, fraction) for steps in (20, 30, 40) for fraction in ("0.4", "0.6")]
TEXT = "g=10 r=1 u=5.5 h=12 c_load=1 c_off=2 y_opt=3 y_sync=4"


def config(**overrides: Any) -> RunConfig:
    """A job of 16 micro-batches of whole groups; ``a__b`` stands for a.b."""
    fields: dict[str, Any] = {
        "plan.prompts_per_step": 16,
        "plan.samples_per_prompt": 8,
        "sampling.num_inference_steps": 30,
        "algorithm.timestep_fraction": 0.6,
        "run.num_steps": 7,
    }
    return load_config(None, fields | {name.replace("__", "."): value for name, value in overrides.items()})


# ---- the calibrated models -------------------------------------------------------------------------------------------


def test_durations_of_the_calibrated_models_by_hand() -> None:
    hunyuan = CALIBRATED["hunyuan_video"]
    assert hunyuan.durations(num_inference_steps=30, timestep_fraction=0.6, num_steps=3) == Durations(
        num_micro_batches=16,
        num_steps=3,
        generate_s=(Decimal("52.2"),),  # 30 + 22.2
        score_s=(Decimal(0),),
        update_s=Decimal("19.7568"),  # 0.32 x 3.43 x 18
        assist_s=Decimal("60.03"),  # 1.15 x 52.2
        switch_in_s=Decimal("3.6"),
        switch_out_s=Decimal("3.6"),
        commit_s=Decimal(12),
    )
    wan = CALIBRATED["wan2.1"].durations(num_inference_steps=20, timestep_fraction=Decimal("0.4"), tsp=False)
    assert (wan.generate_s, wan.score_s) == ((Decimal("26.6"),), (Decimal("1.5"),))
    assert (wan.update_s, wan.assist_s) == (Decimal("25.92"), Decimal("24.472"))  # 8 + 2.24 x 8; 0.92 x 26.6
    assert (wan.commit_s, wan.load_s, wan.switch_in_s) == (Decimal("11.1"), Decimal(19), Decimal(0))


def test_more_gpus_cost_more_for_every_task_but_a_score() -> None:
    few, many = (
        CALIBRATED["hunyuan_video"].durations(num_inference_steps=30, timestep_fraction=0.6, gpus=gpus)
        for gpus in (16, 32)
    )
    assert many.generate_s[0] - few.generate_s[0] == Decimal("2.8")
    assert many.update_s - few.update_s == many.assist_s - few.assist_s == Decimal("2.8")
    assert (many.score_s, many.commit_s, many.switch_in_s) == (few.score_s, few.commit_s, few.switch_in_s)


def test_baselines_of_the_calibrated_models_by_hand() -> None:
    case: Any = {"num_inference_steps": 30, "timestep_fraction": 0.6}
    hunyuan = CALIBRATED["hunyuan_video"]
    assert hunyuan.naive_s(**case) == Decimal("1835.04")  # 16 (52.2 + 61.74) + 12
    assert hunyuan.naive_s(**case, gpus=32) == Decimal("1924.64")  # and 16 x 2 x 2.8
    assert float(hunyuan.colocated_s(**case)) == pytest.approx(16 * (52.2 / 2 + 61.74 / 2.2) + 12, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "gap", "tsp", "tag", "colocated"),
    [
        ("hunyuan_video", "1.58-1.85", "1.62-2.25", "2.32-2.96", "1.06-1.41"),
        ("wan2.1", "1.58-1.67", "1.73-2.08", "2.27-2.75", "1.13-1.36"),
    ],
)
def test_the_calibrated_models_give_the_ranges_they_were_fitted_to(
    name: str, gap: str, tsp: str, tag: str, colocated: str
) -> None:
    """Figures of an independent simulator with the same parameters: speed-up over naive, the last over colocated."""
    model = CALIBRATED[name]
    rules = ScheduleConfig(mode="gap", sync="hold")
    search = ScheduleConfig(mode="tag", tag="search", sync="hold")

    def step(case: dict[str, Any], rules: ScheduleConfig, **how: Any) -> Decimal:
        ends = simulate(model.durations(**case, **how, num_steps=3), rules).step_ends
        return ends[-1] - ends[-2]

    def span(values: list[Decimal]) -> str:
        return f"{min(values):.2f}-{max(values):.2f}"

    cases: list[dict[str, Any]] = [
        {"num_inference_steps": steps, "timestep_fraction": Decimal(fraction)} for steps, fraction in CASES
    ]
    assert span([model.naive_s(**case) / step(case, rules, tsp=False) for case in cases]) == gap
    assert span([model.naive_s(**case) / step(case, rules) for case in cases]) == tsp
    assert span([model.naive_s(**case) / step(case, search) for case in cases]) == tag
    both = [model.colocated_s(**case) / step(case, search, gpus=gpus) for case in cases for gpus in (16, 32)]
    assert span(both) == colocated


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gpus": 8}, "gpus=8: .*16 and 32"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"timestep_fraction": 0}, "timestep_fraction=0"),
        ({"timestep_fraction": Decimal("1.1")}, "timestep_fraction=1.1"),
    ],
)
def test_a_calibrated_model_refuses_what_it_is_not_defined_for(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CALIBRATED["wan2.1"].durations(**{"num_inference_steps": 20, "timestep_fraction": 0.4} | how)


# ---- a config's durations --------------------------------------------------------------------------------------------


def test_a_config_takes_its_counts_from_itself_and_its_durations_from_the_model() -> None:
    job = config(costs__model="hunyuan_video")
    expected = CALIBRATED["hunyuan_video"].durations(num_inference_steps=30, timestep_fraction=0.6, num_steps=7)
    assert durations_for(job) == expected
    more = config(costs__model="hunyuan_video", costs__gpus=32, plan__prompts_per_step=5, run__num_steps=2)
    assert durations_for(more) == replace(
        CALIBRATED["hunyuan_video"].durations(num_inference_steps=30, timestep_fraction=0.6, gpus=32),
        num_micro_batches=5,
        num_steps=2,
    )


def test_colocation_of_a_calibrated_model_is_its_own() -> None:
    job = config(costs__model="wan2.1", schedule__mode="colocated", algorithm__tsp_chunk=1, run__num_steps=1)
    twin = simulate(durations_for(job), job.schedule)
    per_micro_batch = CALIBRATED["wan2.1"].colocated_s(num_inference_steps=30, timestep_fraction=0.6) - Decimal("11.1")
    assert float(twin.makespan) == pytest.approx(float(2 * per_micro_batch) + 11.1, rel=1e-6)  # B = 16, fitted with 8


def test_given_durations_are_read_as_simulate_reads_them() -> None:
    job = config(costs__durations=TEXT, workers__generators=2)
    assert durations_for(job) == parse_durations(f"B=16 S=7 G=2 {TEXT}")
    several = config(costs__durations="g=1,2 u=3", workers__generators=2)
    assert durations_for(several).generate_s == (Decimal(1), Decimal(2))


def test_groups_over_several_micro_batches_stay_groups() -> None:
    job = config(costs__durations=TEXT, plan__micro_batch_size=2)
    assert (durations_for(job).num_micro_batches, durations_for(job).micro_batches_per_group) == (64, 4)
    batches = config(costs__durations=TEXT, plan__micro_batch_size=16, schedule__axis="batch")
    assert (durations_for(batches).num_micro_batches, durations_for(batches).micro_batches_per_group) == (8, 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({}, "^costs: nothing says how long tasks take; set costs.profile .* costs.model .* or costs.durations"),
        ({"costs__durations": "g=1"}, "^costs.durations: u .* is missing"),
        ({"costs__durations": "g=1 u=-3"}, "^costs.durations: u=-3 must be finite and not negative"),
        ({"costs__durations": "B=3 g=1 u=1"}, "^costs.durations: leave out B: B comes from plan"),
        ({"costs__durations": "g=1,2 u=1"}, "^costs.durations: g has 2 entries for G=1"),
        ({"costs__durations": "g=1 u=1,2"}, "^costs.durations: u has 2 entries for T=1"),
        ({"costs__model": "wan2.1", "workers__generators": 2}, "^workers.generators=2: .*one generator group"),
        ({"costs__model": "wan2.1", "algorithm__advantage__best_of_n": 4}, "^algorithm.advantage.best_of_n"),
        ({"costs__durations": TEXT, "algorithm__advantage__kind": "global_std"}, "^algorithm.advantage.kind"),
        ({"costs__profile": "nowhere"}, "^costs.profile: nowhere is not a run's folder: it has no config.yaml"),
    ],
)
def test_costs_that_say_nothing_are_refused_by_field(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        durations_for(config(**overrides))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"model": "wan2.1", "durations": "g=1 u=1"}, "costs: model and durations are given"),
        ({"gpus": 16}, "costs: gpus says something only beside costs.model"),
        ({"model": "wan2.1", "gpus": 8}, "costs.gpus: .*16 or 32"),
        ({"model": "wan2.1", "trainer_gpus": 8}, "costs: trainer_gpus says something only beside"),
        ({"durations": "g=1 u=1", "gpus": 16}, "costs: gpus says something only beside costs.model"),
        ({"model": "wan2.1", "note": "mine"}, "costs: note says something only beside costs.durations"),
        ({"scaling": {"update": []}}, "costs.scaling.update: a curve needs at least one point"),
        ({"scaling": {"generate": [[1, 1], [1, 2]]}}, "costs.scaling.generate: .*in the order of their GPUs"),
        ({"scaling": {"generate": [[1, 2], [2, 1]]}}, "costs.scaling.generate: 2 GPUs are slower"),
        ({"memory": {"parameters_b": 1}}, "costs.memory: activation_gib and generation_gib must be given"),
        (
            {"memory": {"parameters_b": 1, "activation_gib": 1, "generation_gib": 1}},
            "costs: types must describe the GPUs",
        ),
        (
            {"types": {"a": {}}, "memory": {"parameters_b": 1, "activation_gib": 1, "generation_gib": 1}},
            "costs: types.a.memory_gib must be given",
        ),
        ({"types": {"a": {"memory_gib": 0}}}, "costs.types.a.memory_gib: Input should be greater than 0"),
        ({"types": {"a": {"memry_gib": 1}}}, "unknown key 'costs.types.a.memry_gib'; did you mean 'memory_gib'"),
    ],
)
def test_contradictory_costs_are_refused_by_field(costs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, {f"costs.{name}": value for name, value in costs.items()})


def test_the_config_survives_its_yaml(tmp_path: Path) -> None:
    job = config(
        costs__durations=TEXT,
        costs__types={"a": {"generate": 1.5, "memory_gib": 48}},
        costs__scaling={"generate": [[1, 1], [8, 5.5]]},
    )
    (tmp_path / "c.yaml").write_text(dump_yaml(job))
    assert load_config(tmp_path / "c.yaml") == job


def test_every_source_says_what_it_is() -> None:
    fit = config(costs__model="hunyuan_video")
    assert origin(fit).startswith("calibrated model hunyuan_video (HunyuanVideo-like, B = 16) for 16 GPUs")
    assert "a fit and not a measurement" in origin(fit)
    assert "extrapolated" not in origin(fit)
    for field, value in (("sampling__num_inference_steps", 50), ("plan__prompts_per_step", 4)):
        assert "extrapolated" in origin(config(costs__model="hunyuan_video", **{field: value}))
    assert origin(config(costs__durations=TEXT, costs__note="from a spreadsheet")).endswith("from a spreadsheet")
    assert "runs/x" in origin(config(costs__profile="runs/x"))
    assert (time_unit(fit), time_unit(config(costs__durations=TEXT))) == ("denoising steps", "seconds")


# ---- timestep parallelism --------------------------------------------------------------------------------------------


def test_trained_timesteps_are_those_of_training() -> None:
    schedule = pytest.importorskip("digen.diffusion.schedule")
    for steps in (2, 3, 8, 20, 100):
        for fraction in (0.01, 0.29, 0.4, 0.6, 0.99, 1.0):
            job = config(sampling__num_inference_steps=steps, algorithm__timestep_fraction=fraction)
            assert trained_timesteps(job) == schedule.trained_steps(steps, fraction, steps - 1)


@pytest.mark.parametrize("name", sorted(CALIBRATED))
def test_chunks_between_one_and_all_lie_between_the_two_fits(name: str) -> None:
    def update(chunk: int | str) -> Decimal:
        return durations_for(config(costs__model=name, algorithm__tsp_chunk=chunk)).update_s

    case: Any = {"num_inference_steps": 30, "timestep_fraction": 0.6}
    assert update(1) == CALIBRATED[name].durations(**case, tsp=False).update_s
    assert update("all") == update(18) == update(99) == CALIBRATED[name].durations(**case).update_s
    divisors = [update(chunk) for chunk in (1, 2, 3, 6, 9, 18)]
    assert divisors == sorted(divisors, reverse=True)
    # A forward of c timesteps takes (1 - s) + s c; the last one of 18 in chunks of 10 is padded to 10, as in training.
    model = CALIBRATED[name]
    s = (Fraction(model.tau) * 18 - 1) / 17
    expected = Fraction(model.u0) + Fraction(model.mu) * 2 * (1 - s + 10 * s)
    assert float(update(10)) == pytest.approx(float(expected), abs=1e-4)


def test_given_durations_need_a_share_to_tell_what_a_chunk_changes() -> None:
    job = config(costs__durations=TEXT, algorithm__tsp_chunk=9)
    assert [update_factor(job, chunk) for chunk in (1, 9, 18)] == [None, 1, None]
    assert update_factor(config(costs__durations=TEXT), 99) == 1  # all of them
    job = config(costs__durations=TEXT, costs__tsp_share=0.25)
    assert [update_factor(job, chunk) for chunk in (1, 18)] == [4, 1]
    sequential = config(costs__durations=TEXT, costs__tsp_share=0.25, algorithm__tsp_chunk=1)
    assert [update_factor(sequential, chunk) for chunk in (1, 18)] == [1, Fraction(1, 4)]
    one = config(costs__durations=TEXT, costs__tsp_share=0.25, sampling__num_inference_steps=2)
    assert update_factor(one, 1) == 1


# ---- profiles --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., Path]:
    """A folder like that of a real run of :func:`config`, whose tasks took :data:`TEXT`."""

    def run_of(**overrides: Any) -> Path:
        job = config(**overrides)
        folder = tmp_path / "run"
        rules = ScheduleConfig(mode="tag", tag="static(2)")
        write_folder(folder, parse_durations(f"B={job.plan.prompts_per_step} S=3 G={job.num_generators} {TEXT}"), rules)
        (folder / "config.yaml").write_text(dump_yaml(job))
        return folder

    return run_of


def test_a_profile_of_the_same_job_under_another_schedule_is_taken(run_of: Callable[..., Path]) -> None:
    job = config(costs__profile=str(run_of(plan__prompts_per_step=4)), schedule__mode="tcss", run__seed=3)
    assert durations_for(job) == parse_durations(f"B=16 S=7 {TEXT}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.family", "digits2"),
        ("model.path", "elsewhere"),
        ("model.dtype", "bfloat16"),
        ("model.device", "cuda"),
        ("model.forward_batch", 4),
        ("sampling.num_inference_steps", 31),
        ("plan.samples_per_prompt", 12),
        ("plan.micro_batch_size", 4),
        ("algorithm.timestep_fraction", 0.5),
        ("algorithm.tsp_chunk", 2),
        ("algorithm.old_logprobs", "recompute"),
        ("algorithm.advantage.best_of_n", 4),
        ("optimizer.name", "sgd"),
        ("optimizer.ema_decay", 0.9),
        ("reward.name", "mine:reward"),
        ("reward.kwargs", {"scale": 2}),
        ("workers.generators", 2),
        ("workers.threads", 2),
        ("workers.gpus", {"trainer": [0, 1]}),
        ("workers.offload", True),
        ("workers.checksums", True),
    ],
)
def test_a_profile_of_another_config_is_refused_by_field(run_of: Callable[..., Path], field: str, value: Any) -> None:
    folder = run_of()
    with pytest.raises(ConfigError, match=rf"^costs.profile: .* is a run of another config: {field} is ") as caught:
        durations_for(config(costs__profile=str(folder), **{field: value}))
    assert str(folder) in str(caught.value)


def test_a_profile_that_cannot_be_read_is_refused(run_of: Callable[..., Path]) -> None:
    folder = run_of()
    with (folder / "events.jsonl").open("a") as events:
        events.write("{broken\n{}\n")
    with pytest.raises(ConfigError, match=r"^costs.profile: "):
        durations_for(config(costs__profile=str(folder)))
    (folder / "events.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"^costs.profile: .* it has no events.jsonl"):
        durations_for(config(costs__profile=str(folder)))
