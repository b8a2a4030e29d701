"""The twin and ``digen simulate``: its exact output, the model's tasks, the numbers that are known, and its limits."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from digen import ScheduleConfig, twin
from digen.cli import main
from digen.config import dump_yaml, load_config
from digen.costs import durations_for
from digen.durations import MOST_TRAINERS, Durations, TrainerTimes, parse_durations, profiled_durations
from digen.errors import ConfigError, StepFailed
from digen.events import AnyEvent, Rewarded, StepCommitted, TagDecided, TaskFinished, read_events
from digen.sched import check
from digen.sched.admission import stale_limit
from digen.sched.model import Instance, Trace
from digen.sched.model import simulate as play_model
from digen.sched.search import search, tag_first
from digen.sched.tag import greedy, never, policy_from, static
from digen.twin import Twin, compare, instance_of, simulate, write_folder
from experiments.search_time import seeded

EXAMPLE = "B=8 S=2 g=10 r=1 u=5 h=12 c_load=1 c_off=1 y_opt=2 y_sync=3 G=1 T=1"
RULES = ["--mode", "tag", "--policy", "search", "--window", "1", "--stale-fraction", "0", "--sync", "hold"]
RULES += ["--order", "index"]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """No warnings about windows and shares on the terminal."""
    with capture_logs() as logs:
        yield logs


@pytest.fixture
def digen(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``digen simulate`` on durations, as JSON, in this process."""

    def digen(durations: str, *words: str) -> Any:
        assert main(["simulate", "--durations", durations, *words, "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return json.loads(captured.out)

    return digen


# ---- exactness -------------------------------------------------------------------------------------------------


def test_decimals_stay_decimals(digen: Callable[..., Any]) -> None:
    out = digen("B=3 g=0.1 u=0.2 r=0.001", "--mode", "gap")
    assert [task["end"] for task in out["tasks"] if task["kind"] == "generate"] == [0.1, 0.201, 0.302]
    assert (out["makespan"], out["step_ends"]) == (0.701, [0.701])
    assert [(task["start"], task["end"]) for task in out["tasks"] if task["kind"] == "update"] == [
        (0.101, 0.301),
        (0.301, 0.501),
        (0.501, 0.701),
    ]
    assert json.dumps(digen("B=3 g=0.1 u=0", "--mode", "gap")["makespan"]) == "0.3"
    assert json.dumps(digen("B=3 g=1.0 u=0", "--mode", "gap")["makespan"]) == "3"


@pytest.mark.parametrize("policy", ["never", "greedy", "static(2)", "threshold", "search", "tag_first"])
def test_the_unit_changes_nothing(policy: str, digen: Callable[..., Any]) -> None:
    words = ["--mode", "tcss", "--policy", policy, "--stale-fraction", "0.5"]
    whole = digen("B=6 S=3 g=10,13 r=1 u=5 h=12 c_load=1 c_off=2 y_opt=2 y_sync=3", *words)
    small = digen("B=6 S=3 g=.010,.013 r=.001 u=.005 h=.012 c_load=.001 c_off=.002 y_opt=.002 y_sync=.003", *words)
    assert [task | {"start": task["start"] / 1000, "end": task["end"] / 1000} for task in whole["tasks"]] == small[
        "tasks"
    ]
    assert small["makespan"] == whole["makespan"] / 1000
    assert small["step_ends"] == [end / 1000 for end in whole["step_ends"]]


def test_durations_too_far_apart_for_exact_sums_are_refused() -> None:
    with pytest.raises(ConfigError, match="is too long for steps of 1E-9 s to be exact"):
        simulate(parse_durations("B=4 g=1e9 u=1e-9"), ScheduleConfig(mode="gap"))


# ---- the model -------------------------------------------------------------------------------------------------


def draw(rng: random.Random, mode: str) -> tuple[Durations, ScheduleConfig, Instance]:
    """Random durations and schedule, and the instance of the model that they stand for."""
    tag = rng.choice(["never", "greedy", "static(1)", "static(3)"]) if mode in {"tag", "tcss"} else None
    window = rng.choice([2, 2, 3]) if mode == "tcss" else 1
    fraction = rng.choice(["0.25", "0.34", "0.5", "1"]) if window > 1 else "0"
    size, num_generators = rng.randint(1, 6), rng.choice([1, 1, 2, 3])
    unit = rng.choice([Decimal(1), Decimal("0.1"), Decimal("0.25")])

    def seconds(most: int) -> Decimal:
        return unit * rng.randint(0, most)

    durations = Durations(
        num_micro_batches=size,
        num_steps=rng.randint(1, 4),
        generate_s=tuple(seconds(12) for _ in range(num_generators)),
        score_s=tuple(seconds(3) for _ in range(num_generators)),
        update_s=seconds(12),
        assist_s=seconds(12),
        switch_in_s=seconds(3),
        switch_out_s=seconds(3),
        commit_s=seconds(5),
        load_s=seconds(5),
    )
    config = ScheduleConfig(
        mode=mode,  # type: ignore[arg-type]
        window=window,
        stale_fraction=fraction,  # type: ignore[arg-type]
        tag=tag,
        sync=rng.choice(["hold", "pull"]),
        update_order=rng.choice(["index", "ready"]),
    )
    colocated = mode == "colocated"
    exact: Any = durations
    instance = Instance(
        num_micro_batches=size,
        num_steps=durations.num_steps,
        generate_s=() if colocated else exact.generate_s,
        score_s=exact.score_s[:1] if colocated else exact.score_s,
        update_s=(exact.update_s,),
        assist_s=(exact.assist_s,),
        switch_in_s=(exact.switch_in_s,),
        switch_out_s=(exact.switch_out_s,),
        commit_s=exact.commit_s,
        load_s=exact.load_s,
        window=window,
        stale_limit=stale_limit(Decimal(fraction), size) if window > 1 else 0,
        sync=config.sync,
        order=config.update_order,
        barrier=config.resolved_barrier,
    )
    return durations, config, instance


def same(trace: Trace, twin: Twin) -> None:
    """The same tasks at the same times."""
    shown = twin.as_json()
    expected: Counter[Any] = Counter()
    for task in trace.tasks:
        worker = "trainer" if task.worker == "trainer0" else task.worker
        times = float(task.start), float(task.end)
        expected[worker, task.kind, task.step, task.index, task.version, *times] += 1
    assert Counter(tuple(task.values()) for task in shown["tasks"]) == expected
    assert shown["step_ends"] == [float(end) for end in trace.step_ends]
    assert shown["makespan"] == float(trace.makespan)
    assert shown["assists"] == sum(task.kind == "assist" for task in trace.tasks)
    assert [task["start"] for task in shown["tasks"]] == sorted(task["start"] for task in shown["tasks"])


@pytest.mark.parametrize("mode", ["colocated", "naive", "microbatch", "gap", "tag", "tcss"])
def test_every_task_is_the_models(mode: str) -> None:
    rng = seeded(f"twin {mode}")
    policies = {"never": never(), "greedy": greedy(), "static(1)": static(1), "static(3)": static(3)}
    for number in range(60):
        durations, config, instance = draw(rng, mode)
        try:
            same(play_model(instance, policies[config.resolved_tag]), simulate(durations, config))
        except BaseException as error:
            error.add_note(f"run {number}: {durations} {config}")
            raise


@pytest.mark.parametrize("policy", ["search", "tag_first"])
def test_the_policies_that_look_ahead_know_the_durations_from_the_start(policy: str) -> None:
    rng = seeded(f"twin {policy}")
    for _ in range(60):
        durations, config, instance = draw(rng, "tag")
        config = config.model_copy(update={"tag": policy})
        twin = simulate(durations, config)
        end = max(task["end"] for task in twin.tasks if task["kind"] == "update" and task["step"] == 0)
        times = ("generate_s", "score_s", "update_s", "assist_s", "switch_in_s", "switch_out_s")
        ticks: Any = {name: tuple(int(100 * time) for time in getattr(instance, name)) for name in times}
        whole = replace(instance, **ticks)
        assert 100 * end == (search(whole).value if policy == "search" else tag_first(whole)[0]), instance


@pytest.mark.parametrize("policy", ["never", "greedy", "static(2)", "search", "tag_first", "horizon"])
def test_the_twins_instance_in_the_model_does_the_same_whatever_decides(policy: str) -> None:
    """What several trainer groups are played by, where both can play; the policies that look ahead included."""
    rng = seeded(f"instance {policy}")
    for _ in range(40):
        mode = rng.choice(["tag", "tcss"])
        durations, config, _ = draw(rng, mode)
        config = config.model_copy(update={"tag": policy, "lazy_switch": rng.random() < 0.3})
        trace = play_model(instance_of(durations, config), policy_from(policy))
        found = Counter(
            (task.kind, task.step, task.index, task.version, task.started, task.time)
            for task in simulate(durations, config).finished
        )
        assert found == Counter(
            (task.kind, task.step, task.index, task.version, task.start, task.end) for task in trace.tasks
        )


def test_a_twin_can_be_played_again_and_is_the_same() -> None:
    durations, config = parse_durations(EXAMPLE), ScheduleConfig(mode="tag", tag="search")
    assert simulate(durations, config) == simulate(durations, config)


# ---- known numbers ---------------------------------------------------------------------------------------------


def test_the_documented_command(digen: Callable[..., Any]) -> None:
    out = digen(EXAMPLE, *RULES)
    assert out["simulated"] is True
    assert list(out) == ["simulated", "makespan", "step_ends", "assists", "tasks"]
    assert (out["makespan"], out["step_ends"], out["assists"]) == (156, [75, 153], 4)
    assert list(out["tasks"][0].items()) == [
        ("worker", "gen0"),
        ("kind", "generate"),
        ("step", 0),
        ("index", 0),
        ("version", 0),
        ("start", 0),
        ("end", 10),
    ]


@pytest.mark.parametrize(
    ("durations", "policy", "makespan"),
    [
        ("B=4 g=100 r=20 u=10 h=50 c_off=20", "search", 290),  # only bubbles are filled: the end starves
        ("B=4 g=100 r=20 u=10 h=50 c_off=20", "tag_first", 250),
        ("B=10 g=32 r=1 u=1 h=6", "search", 75),  # the slow generator takes the last micro-batch
        ("B=10 g=32 r=1 u=1 h=6", "tag_first", 75),
        ("B=2 g=100 u=100 h=50", "search", 300),  # the score of an assist waits behind a generation
        ("B=2 g=100 u=100 h=50", "tag_first", 300),
        ("B=2 g=100 r=5 u=40 h=200 c_load=20 c_off=20", "search", 250),  # a first assist by default would be a loss
        ("B=2 g=100 r=5 u=40 h=200 c_load=20 c_off=20", "greedy", 320),
    ],
)
def test_pathologies(durations: str, policy: str, makespan: int, digen: Callable[..., Any]) -> None:
    assert digen(durations, "--mode", "tag", "--policy", policy, "--order", "ready")["makespan"] == makespan


@pytest.mark.parametrize(
    ("sync", "window", "policy", "rate"),
    [("hold", 1, "static(2)", 275), ("hold", 2, "greedy", 330), ("pull", 2, "static(2)", 265)],
)
def test_stale_work_with_hold_can_be_slower_than_none(
    sync: str, window: int, policy: str, rate: int, digen: Callable[..., Any]
) -> None:
    words = ["--mode", "tag" if window == 1 else "tcss", "--policy", policy, "--sync", sync, "--window", str(window)]
    words += ["--stale-fraction", "0.25" if window > 1 else "0", "--order", "ready"]
    ends = digen("B=4 S=60 g=100 r=5 u=15 h=100 y_opt=5 y_sync=10", *words)["step_ends"]
    assert ends[50] - ends[10] == 40 * rate


@pytest.mark.parametrize(("fraction", "makespan"), [("0", 156), ("0.25", 134), ("0.5", 138)])
def test_algorithm_1_with_and_without_stale_work(fraction: str, makespan: int, digen: Callable[..., Any]) -> None:
    """The reference run of the listing's gaps: none, one and two stale micro-batches of four."""
    window = ["--mode", "tag", "--window", "1"] if fraction == "0" else ["--mode", "tcss", "--window", "2"]
    words = [*window, "--policy", "static(2)", "--sync", "hold", "--stale-fraction", fraction]
    out = digen("B=4 S=4 g=10 h=10 u=4 y_sync=3", *words)
    assert out["makespan"] == makespan
    stale = Counter(
        task["step"] for task in out["tasks"] if task["kind"] == "generate" and task["version"] < task["step"]
    )
    assert set(stale.values()) <= {int(4 * float(fraction))}


def test_naive_is_a_step_times_their_number_and_colocated_shares_everything() -> None:
    rng = seeded("compare")
    for _ in range(100):
        durations, config, _ = draw(rng, "naive")
        found = compare(durations)
        assert found["naive"] == simulate(durations, config).makespan
    durations = parse_durations("B=8 S=2 g=10 r=1 u=5 h=12 y_opt=2 y_sync=3")
    assert compare(durations)["colocated"] == 2 * (8 * 8 + 2)
    for unlike in ("g=10,12 u=5", "g=10 u=5 h=9", "g=10 u=5,6"):
        assert "colocated" not in compare(parse_durations(f"B=8 {unlike}"))


# ---- several trainer groups ------------------------------------------------------------------------------------


def test_several_trainers_by_hand(digen: Callable[..., Any]) -> None:
    """Generations end at 10, 20, 30, 40; each update goes to the first trainer that is free."""
    out = digen("B=4 g=10 u=25,14 y_opt=1", "--mode", "gap")
    updates = [(task["worker"], task["start"], task["end"]) for task in out["tasks"] if task["kind"] == "update"]
    assert updates == [("trainer0", 10, 35), ("trainer1", 20, 34), ("trainer1", 34, 48), ("trainer0", 40, 65)]
    assert (out["makespan"], out["step_ends"], out["simulated"]) == (66, [66], True)
    assert list(out) == ["simulated", "makespan", "step_ends", "assists", "tasks"]


def test_assists_of_several_trainers_by_hand(digen: Callable[..., Any]) -> None:
    """Both trainers take a micro-batch at once; the generator scores 2 and 1 before it goes on."""
    out = digen("B=4 g=10 r=1 u=3 h=12,7 c_load=1,2 c_off=0,1", "--mode", "tag", "--policy", "static(2)")
    assert [
        (task["worker"], task["index"], task["start"], task["end"]) for task in out["tasks"] if task["kind"] == "assist"
    ] == [("trainer0", 1, 1, 13), ("trainer1", 2, 2, 9)]
    assert [(task["index"], task["end"]) for task in out["tasks"] if task["kind"] == "score"] == [
        (2, 11),
        (0, 12),
        (1, 23),
        (3, 24),
    ]


def held_to_the_rules(found: Twin, config: ScheduleConfig, instance: Instance) -> None:
    """What must hold of any run, whoever played it."""
    size, ends = instance.num_micro_batches, {}
    by_worker: dict[str, list[TaskFinished]] = {}
    for task in found.finished:
        by_worker.setdefault(task.worker, []).append(task)
        if task.index >= 0:
            kind = "generate" if task.kind == "assist" else task.kind
            assert (kind, task.step, task.index) not in ends
            ends[kind, task.step, task.index] = task
    for tasks in by_worker.values():
        assert all(one.time <= other.started for one, other in pairwise(tasks))
    assert len(ends) == 3 * size * instance.num_steps
    commits = [task for task in found.finished if task.kind == "commit"]
    assert [task.step for task in commits] == list(range(instance.num_steps))
    for step in range(instance.num_steps):
        updates = [ends["update", step, index] for index in range(size)]
        for index, update in enumerate(updates):
            generated, scored = ends["generate", step, index], ends["score", step, index]
            assert generated.time <= scored.started
            assert scored.time <= update.started
            assert 0 <= step - generated.version < instance.window
            assert update.version == scored.version == generated.version
        assert sum(update.version < step for update in updates) <= instance.stale_limit
        if config.update_order == "index":
            assert [update.task for update in updates] == sorted(update.task for update in updates)
        assert max(update.time for update in updates) <= commits[step].started
        if step:
            assert commits[step - 1].time <= min(update.started for update in updates)


@pytest.mark.parametrize("policy", ["never", "greedy", "static(3)", "search", "tag_first", "horizon"])
def test_up_to_eight_trainer_groups_keep_every_rule(policy: str) -> None:
    rng = seeded(f"trainers {policy}")
    most = 0
    for number in range(40):
        durations, config, _ = draw(rng, rng.choice(["tag", "tcss"]))
        num_trainers = rng.randint(2, MOST_TRAINERS)
        extra = [TrainerTimes(*(rng.randint(0, 12) * Decimal(1) for _ in range(4))) for _ in range(num_trainers - 1)]
        durations = replace(durations, num_micro_batches=rng.randint(1, 12), more_trainers=tuple(extra))
        config = config.model_copy(update={"tag": policy, "lazy_switch": rng.random() < 0.3})
        try:
            found = simulate(durations, config)
            held_to_the_rules(found, config, instance_of(durations, config))
        except BaseException as error:
            error.add_note(f"run {number}: {durations} {config}")
            raise
        assert found.engine == "model"
        most = max(most, len({task.worker for task in found.finished if task.worker.startswith("trainer")}))
    assert most >= 6


def test_idle_shares_of_several_trainers_by_hand() -> None:
    found = simulate(parse_durations("B=4 g=10 u=25,14 y_opt=1"), ScheduleConfig(mode="gap"))
    assert found.bubbles["generator"] == {"share": pytest.approx(1 - 40 / 66), "causes": {}}
    assert found.bubbles["trainer"] == {"share": pytest.approx(1 - (25 + 25 + 14 + 14 + 1) / (2 * 66)), "causes": {}}


def test_colocated_trainers_share_every_stage() -> None:
    """Two groups: generations 0 to 20 and 20 to 40, scores to 42 and 44, updates to 49 and 54, twice two of each."""
    found = simulate(parse_durations("B=4 g=99 h=20 r=2 u=5 T=2"), ScheduleConfig(mode="colocated"))
    assert found.makespan == 54
    assert list(found.bubbles) == ["trainer"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "somewhere"], "T=2 is played by the exact model, which makes no events"),
        (["--schedule.max_generating", "1"], "schedule.max_generating: the exact model has no such limit"),
    ],
)
def test_what_the_exact_model_does_not_know_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--durations", "B=4 g=1 u=1,2", *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, message in captured.err) == ("", True)
    assert list(tmp_path.iterdir()) == []


def test_groups_over_several_micro_batches_wait_for_their_last_score_and_are_not_for_the_model() -> None:
    durations = replace(parse_durations("B=4 g=10 r=1 u=2"), micro_batches_per_group=2)
    updates = [
        task.started for task in simulate(durations, ScheduleConfig(mode="gap")).finished if task.kind == "update"
    ]
    assert updates == [22, 24, 44, 46]
    with pytest.raises(ConfigError, match="no groups that span several micro-batches"):
        instance_of(durations, ScheduleConfig(mode="gap"))


# ---- long and wide runs ----------------------------------------------------------------------------------------


def test_only_the_tasks_of_the_steps_asked_for_are_kept() -> None:
    durations, config = parse_durations(EXAMPLE.replace("S=2", "S=9")), ScheduleConfig(mode="tcss", tag="greedy")
    whole = simulate(durations, config)
    for keep in (range(9), range(3), range(3, 5), range(8, 9), range(0), range(9, 9)):
        part = simulate(durations, config, keep=keep)
        assert replace(part, finished=()) == replace(whole, finished=())
        ends = [-1, *(int(end) for end in whole.step_ends[:-1]), int(whole.makespan)]
        begin, end = ends[keep.start], ends[keep.stop]
        assert part.finished == tuple(
            task for task in whole.finished if keep and task.time > begin and (task.started < end or keep.stop == 9)
        )
    assert sum(task.kind == "assist" for task in whole.finished) == whole.num_assists > 0


def test_a_task_costs_the_same_work_however_many_workers_there_are() -> None:
    """Counted in calls of functions: no clock, and what it costs to make a worker cancels out."""

    def calls(num_generators: int, num_steps: int) -> tuple[int, int]:
        durations = parse_durations(f"B=1000 S={num_steps} g={num_generators} r=1 u=2 h=9 y_sync=1 G={num_generators}")
        config, count = ScheduleConfig(mode="tcss", tag="greedy"), 0

        def profiler(_: Any, event: str, __: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(profiler)
        try:
            num_tasks = len(simulate(durations, config).finished)
        finally:
            sys.setprofile(None)
        return count, num_tasks

    per_task = []
    for num_generators in (10, 500):
        (less, few), (more, many) = calls(num_generators, 1), calls(num_generators, 3)
        per_task.append((more - less) / (many - few))
    assert per_task[1] == pytest.approx(per_task[0], rel=0.15)


def test_garbage_is_collected_again_after_a_run_that_fails_too() -> None:
    seen: list[bool] = []

    def full(event: AnyEvent) -> None:
        seen.append(gc.isenabled())
        if isinstance(event, StepCommitted):
            raise OSError("no room")

    with pytest.raises(StepFailed, match="no room"):
        simulate(parse_durations(EXAMPLE), ScheduleConfig(mode="gap"), sinks=[full])
    assert seen
    assert not any(seen)
    assert gc.isenabled()


# ---- folders and the command -----------------------------------------------------------------------------------


def test_the_profile_of_a_twin_is_the_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "B=5 S=4 g=.1,.13 r=.01 u=.05 h=.12 c_load=.01 c_off=.02 y_opt=.02 y_sync=.03"
    folder = tmp_path / "twin"
    rules = ["--mode", "tag", "--policy", "greedy"]
    assert main(["simulate", "--durations", text, *rules, "--out", str(folder)]) == 0
    assert profiled_durations(read_events(folder / "events.jsonl")) == parse_durations(text)
    capsys.readouterr()
    shown = []
    for source in (["--durations", text], ["--profile", str(folder)]):
        assert main(["simulate", *source, *rules, "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[1]


def test_a_simulated_run_is_a_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "twin"
    text = "B=8 S=2 g=1.0 r=.1 u=.5 h=1.2 c_load=.1 c_off=.1 y_opt=.2 y_sync=.3"
    assert main(["simulate", "--durations", text, *RULES, "--out", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert {"events.jsonl", "report.html", "report.json", "trace.json"} <= {path.name for path in folder.iterdir()}
    events = list(read_events(folder / "events.jsonl"))
    check(events)
    times = sorted({event.time for event in events})
    assert times == [round(time, 1) for time in times]  # tenths, to the last bit
    committed = [event for event in events if isinstance(event, StepCommitted)]
    assert [event.time for event in committed] == [7.5, 15.3]
    assert committed[0].values["pipeline/makespan_s"] == 7.5
    assert committed[0].values["time/update_s"] == 4
    assert committed[0].values["perf/samples_per_s"] == pytest.approx(8 / 7.5)
    assert committed[0].values["tag/inserted"] == 2
    told = next(event for event in events if isinstance(event, TagDecided))
    assert told.reason.endswith("last update in 7.3 s")
    names = set(committed[0].values)
    assert not {name for name in names if name.startswith(("reward/", "weight_sync/bytes", "tag/search_ms"))}
    assert not any(isinstance(event, Rewarded) or getattr(event, "stats", None) for event in events)
    assert main(["report", str(folder)]) == 0
    assert main(["simulate", "--durations", text, "--out", str(folder)]) == 2
    assert "holds the events of a run already" in capsys.readouterr().err


def test_a_simulated_run_says_so_wherever_it_is_shown(tmp_path: Path) -> None:
    label = f"simulated {EXAMPLE}"
    write_folder(tmp_path, parse_durations(EXAMPLE), ScheduleConfig(mode="tag"))
    assert json.loads((tmp_path / "report.json").read_text())["run"]["name"] == label
    page = (tmp_path / "report.html").read_text()
    assert f"<title>{label} · digen</title>" in page
    assert "reward" not in page.partition("</style>")[2].lower()
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [item["args"]["labels"] for item in trace if item["name"] == "process_labels"] == [label]


def test_the_trace_of_a_long_run_is_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(twin, "_TRACED_TASKS", 100)
    text = EXAMPLE.replace("S=2", "S=40")
    found, num_traced = write_folder(tmp_path / "a", parse_durations(text), ScheduleConfig(mode="gap"))
    assert (len(found.finished), num_traced) == (40 * 27, 3)  # 8 x 3, commit, publish and load: 27 a step
    trace = json.loads((tmp_path / "a" / "trace.json").read_text())["traceEvents"]
    tasks = [item for item in trace if item.get("cat") == "task"]
    assert {item["args"]["outcome"] for item in tasks} == {"done"}
    assert {item["args"]["step"] for item in tasks} == {0, 1, 2}
    assert max(item["ts"] + item["dur"] for item in tasks) == 10**6 * found.step_ends[2]
    write_folder(tmp_path / "stale", parse_durations(text), ScheduleConfig(mode="tcss"))  # tasks run at every commit
    trace = json.loads((tmp_path / "stale" / "trace.json").read_text())["traceEvents"]
    assert {item["args"]["outcome"] for item in trace if item.get("cat") == "task"} == {"done"}
    assert len(list(read_events(tmp_path / "a" / "events.jsonl"))) > 40 * 27 * 2
    assert main(["simulate", "--durations", text, "--out", str(tmp_path / "b")]) == 0
    assert "trace.json holds the first 3 whole steps" in capsys.readouterr().out
    assert main(["simulate", "--durations", "B=90 g=1 u=1", "--out", str(tmp_path / "c")]) == 0
    assert "trace.json holds the first 0 whole steps" in capsys.readouterr().out
    assert json.loads((tmp_path / "c" / "trace.json").read_text())["traceEvents"]


def test_a_folder_is_not_begun_for_what_cannot_be_simulated(tmp_path: Path) -> None:
    for text in ("B=4 g=1e9 u=1e-9", "B=4 g=1 u=1 T=2"):
        with pytest.raises(ConfigError, match="durations: "):
            write_folder(tmp_path / "new", parse_durations(text), ScheduleConfig(mode="gap"))
    assert not (tmp_path / "new").exists()


def test_a_threshold_saving_is_written_in_seconds(tmp_path: Path) -> None:
    config = ScheduleConfig(mode="tag", tag="threshold")
    savings = []
    for name, text in (("one", "B=8 g=10 r=1 u=5 h=12"), ("tenth", "B=8 g=1.0 r=.1 u=.5 h=1.2")):
        write_folder(tmp_path / name, parse_durations(text), config)
        events = read_events(tmp_path / name / "events.jsonl")
        savings.append([event.saving_s for event in events if isinstance(event, TagDecided)])
    assert savings[0]
    assert savings[1] == pytest.approx([saving / 10 for saving in savings[0] if saving is not None])


def test_a_closed_pipe_and_no_torch() -> None:
    script = (
        "import sys; from digen.cli import main; "
        f"code = main(['simulate', '--durations', {EXAMPLE!r}, '--mode', 'tag', '--policy', 'search', *sys.argv[1:]]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["makespan"] == 156
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) in {0, 1}


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """A config file whose costs say this."""

    def job(costs: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(
            f"plan: {{prompts_per_step: 8, samples_per_prompt: 2}}\nrun: {{num_steps: 2}}\ncosts: {costs}\n"
        )
        return path

    return job


def test_without_flags_durations_come_from_the_config(
    job: Callable[..., Path], digen: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = job("{durations: g=10 r=1 u=5 h=12 c_load=1 c_off=1 y_opt=2 y_sync=3, note: a guess}")
    assert main(["simulate", str(path), *RULES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == digen(EXAMPLE, *RULES)
    assert main(["simulate", str(path), *RULES]) == 0
    assert f"durations: {EXAMPLE}; given durations: a guess" in capsys.readouterr().out.splitlines()
    words = ["--plan.prompts_per_step", "4", "--run.num_steps", "3", "--workers.generators", "2", "--json"]
    assert main(["simulate", str(path), *RULES, *words]) == 0
    smaller = json.loads(capsys.readouterr().out)
    assert smaller == digen(EXAMPLE.replace("B=8 S=2", "B=4 S=3").replace("G=1", "G=2"), *RULES)


def test_calibrated_durations_say_that_they_are_a_fit(
    job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = job("{model: wan2.1}")
    words = ["--sampling.num_inference_steps", "30", "--algorithm.timestep_fraction", "0.6", "--mode", "tag"]
    assert main(["simulate", str(path), *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated: mode tag")
    assert "a fit and not a measurement; the unit of time is one denoising step" in out
    overrides = {"sampling.num_inference_steps": 30, "algorithm.timestep_fraction": 0.6}
    assert f"durations: {durations_for(load_config(path, overrides))};" in out


def test_a_profile_beside_a_config_must_be_of_the_same_job(
    tmp_path: Path, job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(job("{}"))
    folder = tmp_path / "run"
    write_folder(folder, parse_durations("B=8 S=9 g=.1 r=.01 u=.05"), ScheduleConfig(mode="gap"))
    (folder / "config.yaml").write_text(dump_yaml(config))
    capsys.readouterr()
    assert main(["simulate", str(job("{}")), "--profile", str(folder), "--run.num_steps", "5", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["step_ends"]) == 5
    assert main(["simulate", str(job("{}")), "--profile", str(folder), "--plan.samples_per_prompt", "4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"costs.profile: {folder} is a run of another config: plan.samples_per_prompt is 2 there" in captured.err
    assert main(["simulate", "--profile", str(folder), "--json"]) == 0  # its own config
    assert len(json.loads(capsys.readouterr().out)["step_ends"]) == 9


def test_the_tree_of_the_documented_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--durations", EXAMPLE, *RULES, "--explain"]) == 0
    assert capsys.readouterr().out == (
        f"simulated: what Algorithm 2 decides in the first step of {EXAMPLE}; given durations\n"
        "bubble 1 at 0 s (7 to start, 0 scored, 8 to update):\n"
        "├─ * assist → bubble 2 at 19 s (5 to start, 0 scored, 7 to update): ends at 73 s\n"
        "│  ├─ * assist → ends at 73 s\n"
        "│  └─   skip   → cut, not before 73 s\n"
        "└─   skip   → cut, not before 79 s\n"
        "* best: assist x 2; the last update ends at 73 s\n"
        "2 moves simulated, 2 cut by the bound, 0 seen before\n"
        "tag_first: 2 assists before the first update; the last one ends at 73 s\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "costs: the config does not say how long tasks take; set costs.model, costs.durations or costs.profile, or",
        ),
        ([], "or give --durations or --profile"),
        (["--durations", EXAMPLE, "--profile", "x"], "not allowed with argument"),
        (["--profile", "/nowhere"], "is not a run's folder"),
        (["--durations", EXAMPLE, "--policy", "gredy"], "tag"),
        (["--durations", EXAMPLE, "--mode", "tga"], "mode"),
        (["--durations", EXAMPLE, "--plan.prompts_per_step", "3"], "--plan.prompts_per_step changes nothing here"),
        (["--durations", EXAMPLE, "--explain", "--json"], "not allowed with argument"),
        (["--durations", EXAMPLE, "--explain", "--out", "x"], "--explain plays nothing that --out could write"),
        (
            ["--durations", EXAMPLE, "--explain", "--mode", "naive"],
            "a barrier between stages, has no bubbles to search",
        ),
        (["--durations", "B=129 g=1 u=1", "--explain"], "a step of 129 micro-batches would be too deep"),
        (["--costs.durations", "g=-1 u=1"], "costs.durations: g=-1 must be finite and not negative"),
        (["--costs.durations", "g=1"], "costs.durations: u (update_s) is missing"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, message in captured.err, captured.err.count("\n")) == ("", True, 1), captured.err
