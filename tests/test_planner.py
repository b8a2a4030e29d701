"""``digen plan``: what it recommends, that nothing it leaves out is better, that what it writes plays as it said."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from digen import RunConfig, ScheduleConfig, load_config
from digen.capacity import Group, Layout
from digen.cli import main
from digen.config import parse_tag
from digen.costs import durations_for
from digen.durations import Durations
from digen.errors import ConfigError
from digen.planned import as_json, as_yaml, describe, planned_config, predict
from digen.planner import POLICIES, Outcome, plan, rate_bound
from digen.runner import prepare
from digen.sched.tag import policy_from
from digen.twin import simulate
from experiments.search_time import seeded

HETEROGENEOUS = Path(__file__).parents[1] / "experiments" / "heterogeneous.yaml"
FEW = ("schedule.sync", "schedule.tag", "schedule.stale_fraction")
"""What the larger jobs here keep, so that they take a second."""

ONE = ["--plan.prompts_per_step", "1", "--plan.samples_per_prompt", "1"]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """No warnings on the terminal."""
    with capture_logs() as logs:
        yield logs


def small(**overrides: Any) -> RunConfig:
    """Four groups of four samples; a generation takes as long as an update."""
    fields: dict[str, Any] = {
        "plan.prompts_per_step": 4,
        "plan.samples_per_prompt": 4,
        "run.num_steps": 9,
        "costs.durations": "'g=10 r=1 u=10 h=11 c_load=1 y_opt=2 y_sync=1.5'",
    }
    return load_config(None, fields | {name.replace("__", "."): value for name, value in overrides.items()})


def heterogeneous(**overrides: Any) -> RunConfig:
    rules = {"schedule.mode": "tcss", "schedule.tag": "horizon", "schedule.stale_fraction": 0.25}
    return load_config(HETEROGENEOUS, rules | {name.replace("__", "."): value for name, value in overrides.items()})


def summary(outcome: Outcome) -> list[tuple[str, Decimal]]:
    return [(str(row.candidate.layout), row.step_s) for row in outcome.rows]


# ---- which type trains -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def testbed() -> Outcome:
    """Eight GPUs of 48 GB and eight of 96 GB (paper, 5.4)."""
    return plan(heterogeneous(), {"a": 8, "c": 8}, keep=FEW)


def test_on_the_paper_s_testbed_the_stronger_gpus_train(testbed: Outcome) -> None:
    best = testbed.rows[0].candidate
    assert best.layout.trainer == Group((("c", 8),))
    assert {group.types for group in best.layout.generators} == {("a",)}
    assert testbed.by_type["c"].step_s == testbed.rows[0].step_s
    assert testbed.by_type["a"].step_s > Decimal("1.1") * testbed.by_type["c"].step_s
    assert "c should train: " in "\n".join(describe(testbed))


def test_it_is_memory_that_decides(testbed: Outcome) -> None:
    """The weaker type has room for fewer timesteps in a forward. With as much room on both it would train."""
    assert testbed.by_type["a"].candidate.tsp_chunk < testbed.by_type["c"].candidate.tsp_chunk == 18
    types = {"a": {"memory_gib": 96}, "c": {"memory_gib": 96, "generate": 1.63, "update": 1.63}}
    roomy = plan(heterogeneous(costs__types=types), {"a": 8, "c": 8}, keep=FEW, num_rows=1)
    assert roomy.by_type["a"].candidate.tsp_chunk == 18
    assert roomy.by_type["a"].step_s < roomy.by_type["c"].step_s
    assert "a should train: " in "\n".join(describe(roomy))


def test_splits_that_do_not_fit_are_named_with_what_is_missing(testbed: Outcome) -> None:
    assert testbed.misfits[0].startswith("the trainer on 4 a: weights 6.1 + gradients 12.1 + optimizer 36.3 + ")
    assert testbed.misfits[0].endswith("= 61.9 GiB a GPU of 48.0, 13.9 GiB are missing")
    assert any(misfit.startswith("the trainer on 1 c: ") for misfit in testbed.misfits)
    trainers = {row.candidate.layout.trainer for row in testbed.rows}
    assert not trainers & {Group((("a", count),)) for count in (1, 2, 4)}
    for row in testbed.rows:
        assert all(need.fits for need in row.candidate.needs)
    with pytest.raises(
        ConfigError, match=r"^--gpus: no layout fits in memory .* for all stages on 4 a: .* are missing"
    ):
        plan(heterogeneous(), {"a": 4}, keep=FEW)


def test_an_assist_that_does_not_fit_leaves_the_trainer_to_train() -> None:
    # Weights, gradients and optimizer take 64 GiB of each of eight GPUs, so that a generation of 40 GiB does not fit.
    memory = {"optimizer_bytes": 36, "generation_gib": 40, "shard_generators": True}
    job = heterogeneous(**{f"costs__memory__{name}": value for name, value in memory.items()})
    free = plan(job, {"a": 8, "c": 8}, keep=("schedule.sync", "schedule.stale_fraction", "plan.micro_batch_size"))
    assert "8 c train, 1 x 8 a generate" in [str(row.candidate.layout) for row in free.rows]
    assert {row.candidate.schedule.resolved_tag for row in free.rows} == {"never"}
    assert any(misfit.startswith("an assist of the trainer on 8 c: ") for misfit in free.misfits)
    with pytest.raises(
        ConfigError, match=r"^--gpus: no layout fits in memory .* lacks it for the trainer on 8 c: .*generation"
    ):
        plan(job, {"a": 8, "c": 8}, keep=FEW)  # keeps horizon, which assists


# ---- the ranking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_what_the_bound_leaves_out_was_not_better(seed: int) -> None:
    rng = seeded(f"pruning {seed}")
    durations = f"g={rng.randint(5, 20)} r={rng.randint(0, 3)} u={rng.randint(3, 30)} h={rng.randint(5, 25)} "
    durations += f"c_load={rng.randint(0, 2)} y_opt={rng.randint(0, 5)} y_sync={rng.randint(0, 5)}"
    job = small(
        costs__durations=f"'{durations}'", costs__tsp_share=0.5, plan__samples_per_prompt=2, schedule__mode="tcss"
    )
    keep = ("schedule.stale_fraction", "plan.micro_batch_size")
    everything = plan(job, {"gpu": 3}, keep=keep, num_rows=3, bounded=False)
    bounded = plan(job, {"gpu": 3}, keep=keep, num_rows=3)
    assert everything.num_simulated == everything.num_candidates > 4 * bounded.num_simulated
    assert summary(bounded) == summary(everything)
    for one, other in zip(bounded.rows, everything.rows, strict=True):
        assert one.candidate.schedule == other.candidate.schedule
    assert bounded.on_policy is not None
    assert everything.on_policy is not None
    assert bounded.on_policy.step_s == everything.on_policy.step_s


@pytest.mark.parametrize("window", [1, 2])
def test_no_schedule_is_faster_than_its_bound(window: int) -> None:
    rng = seeded(f"bound {window}")
    tightest = 9.0
    for _ in range(60):
        per_group = rng.choice((1, 1, 2))
        num_generators = rng.randint(1, 3)

        def some(most: int, rng: Any = rng) -> Decimal:
            return Decimal(rng.randint(0, most))

        durations = Durations(
            num_micro_batches=per_group * rng.randint(1, 5),
            num_steps=20,
            micro_batches_per_group=per_group,
            generate_s=tuple(5 + some(90) for _ in range(num_generators)),
            score_s=tuple(some(15) for _ in range(num_generators)),
            update_s=1 + some(90),
            assist_s=5 + some(120),
            switch_in_s=some(15),
            switch_out_s=some(15),
            commit_s=some(50),
            load_s=some(50),
        )
        stale: dict[str, Any] = (
            {} if window == 1 else {"stale_fraction": rng.choice((Decimal("0.25"), Decimal("0.5"), Decimal(1)))}
        )
        rules = ScheduleConfig(
            mode="tcss" if stale else "tag",
            window=window,
            tag=rng.choice(POLICIES),
            sync=rng.choice(("hold", "pull")),
            lazy_switch=rng.random() < 0.3,
            **stale,
        )
        ends = simulate(durations, rules).step_ends
        ratio = float(ends[-3] - ends[6]) / (len(ends) - 9) / rate_bound(durations, rules)
        assert ratio > 1 - 1e-3, (str(durations), rules)
        tightest = min(tightest, ratio)
    assert tightest < 1.001, "it is attained"


def test_colocation_is_one_of_the_candidates() -> None:
    """Where stages scale linearly, no split of equal GPUs is faster without timestep parallelism to gain."""
    linear = {"generate": [[1, 1], [4, 4]], "update": [[1, 1], [4, 4]]}
    outcome = plan(small(costs__scaling=linear), {"gpu": 2}, num_rows=9)
    best = outcome.rows[0]
    assert best.candidate.layout == Layout((), Group((("gpu", 2),)))
    # Two GPUs, every stage twice as fast: 4 (10 + 1 + 10) / 2 + 2 / 2, which is also the baseline.
    assert best.step_s == outcome.colocated_s == 43
    assert outcome.rows[1].candidate.layout == Layout((Group((("gpu", 1),)),), Group((("gpu", 1),)))
    assert "no split of these GPUs is faster" in "\n".join(describe(outcome))


def test_baselines_are_worked_out_from_the_same_durations() -> None:
    job = small(costs__tsp_share=0.5)
    row = next(row for row in plan(job, {"gpu": 2}, num_rows=9).rows if row.candidate.layout.generators)
    size = row.candidate.micro_batch_size
    assert size == 4
    assert row.naive_s == 4 * (10 + 1 + 20) + Decimal("3.5")  # updates take twice as long one by one


def test_every_policy_there_is_is_tried() -> None:
    for name in POLICIES:
        parse_tag(name)
        assert policy_from(name).name == name
    with pytest.raises(ValueError, match="unknown TAG policy") as caught:
        parse_tag("none")
    known = str(caught.value).partition("known: ")[2].split(", ")
    assert {name for name in known if "(" not in name} == set(POLICIES)


def test_fields_can_be_kept() -> None:
    job = small(plan__micro_batch_size=2, schedule__mode="tag", schedule__tag="static(1)", schedule__sync="hold")
    kept = ("plan.micro_batch_size", "schedule.tag", "schedule.sync", "schedule.window", "algorithm.tsp_chunk")
    outcome = plan(job, {"gpu": 3}, keep=kept, num_rows=9)
    for candidate in (row.candidate for row in outcome.rows):
        assert candidate.micro_batch_size == 2
        if candidate.layout.generators:
            schedule = candidate.schedule
            assert (schedule.resolved_tag, schedule.sync, schedule.resolved_window) == ("static(1)", "hold", 1)


# ---- the planned config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", ["3", "2"])
def test_the_prediction_is_what_simulate_says_of_the_written_config(
    gpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "job.yaml", tmp_path / "plan.yaml"
    source.write_text(as_yaml(small(costs__note="made up")))
    assert main(["plan", str(source), "--gpus", gpus, "--json", "--write", str(target)]) == 0
    planned = json.loads(capsys.readouterr().out)["planned"]
    assert main(["simulate", str(target), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["makespan"] == planned["makespan"]
    assert main(["simulate", str(target)]) == 0
    assert f"  {planned['step']:,.6g} s a step, the first and the last left out" in capsys.readouterr().out
    ends = simulated["step_ends"]
    assert len(ends) == 9
    assert planned["step"] == pytest.approx((ends[-2] - ends[0]) / 7, rel=1e-12)


def test_train_takes_the_written_config(testbed: Outcome, tmp_path: Path) -> None:
    target = tmp_path / "plan.yaml"
    target.write_text(as_yaml(planned_config(testbed)))
    config = load_config(target)
    prepared = prepare(config)
    best = testbed.rows[0].candidate
    assert prepared.plan.num_micro_batches == best.durations.num_micro_batches
    assert config.num_generators == len(best.layout.generators) == 4
    assert config.workers.gpus == {"gen0": (0, 1), "gen1": (2, 3), "gen2": (4, 5), "gen3": (6, 7)} | {
        "trainer": tuple(range(8, 16))  # a is listed first
    }
    assert config.algorithm.tsp_chunk == "all"
    assert str(durations_for(config)) == str(durations_for(planned_config(testbed)))
    assert "a fit and not a measurement" in str(config.costs.note)
    assert predict(config).makespan == Decimal(str(as_json(testbed)["planned"]["makespan"]))


def test_a_plan_can_be_planned_again() -> None:
    """The planned durations say how many GPUs they stand for."""
    first = plan(small(), {"gpu": 3})
    again = plan(planned_config(first), {"gpu": 3}, keep=("plan.micro_batch_size",))
    assert summary(again)[0] == summary(first)[0]


def test_a_colocated_plan_has_no_generators(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = plan(small(), {"gpu": 1})
    config = planned_config(outcome)
    assert (config.schedule.mode, config.num_generators, config.workers.gpus) == ("colocated", 0, {"trainer": (0,)})
    assert predict(config).step_ends[0] == 4 * (10 + 1 + 10) + 2
    assert predict(config).makespan == 9 * outcome.rows[0].step_s


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_table_says_what_it_is_and_how_many_were_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--costs.durations", "g=10 u=10 y_opt=1", "--plan.samples_per_prompt", "2", "--run.num_steps", "5"]
    assert main(["plan", "--gpus", "2", "--rows", "2", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated, not measured: 2 gpu, 10 x 2 samples a step, times in seconds\n")
    assert "durations: given durations" in out
    assert "scaling by costs.scaling, assumed (the default)" in out
    assert "memory: not checked" in out
    assert "pruned by a bound on their rate" in out
    assert len([line for line in out.splitlines() if line[:1].isdigit() and " gpu" in line]) == 2
    assert "digen simulate of the planned config: makespan " in out


def test_json_for_scripts() -> None:
    outcome = plan(small(), {"gpu": 3}, num_rows=2)
    data = json.loads(json.dumps(as_json(outcome)))
    assert data["simulated"] is True
    assert len(data["rows"]) == 2
    row = data["rows"][0]
    assert row["step"] == float(outcome.rows[0].step_s)
    assert row["samples_per_time"] == pytest.approx(16 / row["step"])
    assert row["times_colocated"] == pytest.approx(float(outcome.colocated_s or 0) / row["step"])
    assert sum(row["trainer"].values()) + sum(sum(group.values()) for group in row["generators"]) == 3
    assert RunConfig.model_validate(data["planned"]["config"]) == planned_config(outcome)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "4"], "costs: nothing says how long tasks take; set costs.profile"),
        (["--gpus", "4", "--costs.profile", "nowhere"], "costs.profile: nowhere is not a run's folder"),
        (["--gpus", "x=4", "--costs.model", "wan2.1"], "--gpus x=4: 'x' is not described in costs.types"),
        (["--gpus", "4", "--costs.model", "wan2.1", "--keep", "run.seed"], "--keep run.seed: it is not varied"),
        (["--gpus", "4", "--costs.model", "wan2.1", "--rows", "0"], "--rows 0: must be at least 1"),
        (["--costs.model", "wan2.1"], "the following arguments are required: --gpus"),
        (["--gpus", "4", "--costs.model", "wan2.1", "--write", "taken.yaml"], "--write taken.yaml: the file exists"),
        (
            ["--gpus", "4", "--costs.model", "wan2.1", "--write", "no/plan.yaml"],
            "--write no/plan.yaml: there is no folder",
        ),
        (["--gpus", "80", "--costs.model", "wan2.1", *ONE], "--gpus: no layout shares out micro-batches of 1 samples"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken.yaml").touch()
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"digen: {message}")
    assert err.count("\n") == 1


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; from digen.cli import main; "
        "code = main(['plan', '--gpus', '2', '--costs.durations', 'g=1 u=1', '--plan.samples_per_prompt', '1']); "
        "assert not {'torch', 'digen.workers.process'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
