"""The twin and ``digen simulate``: its input, its exact output, the model's tasks, and the numbers that are known."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from digen import ScheduleConfig
from digen.cli import main
from digen.errors import ConfigError
from digen.events import AnyEvent, RunStarted, StepCommitted, TagDecided, TaskFinished, WorkerJoined, read_events
from digen.sched import check
from digen.sched.admission import stale_limit
from digen.sched.model import Instance, Trace
from digen.sched.model import simulate as play_model
from digen.sched.search import search, tag_first
from digen.sched.tag import greedy, never, static
from digen.twin import Durations, Twin, compare, describe, parse_durations, profiled_durations, simulate, write_folder
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


def decimals(*values: float) -> tuple[Decimal, ...]:
    """Exact decimals."""
    return tuple(Decimal(str(value)) for value in values)


# ---- durations -------------------------------------------------------------------------------------------------


def test_every_letter_is_read_and_the_rest_has_defaults() -> None:
    assert parse_durations(EXAMPLE) == Durations(
        num_micro_batches=8,
        num_steps=2,
        generate_s=(Decimal(10),),
        score_s=(Decimal(1),),
        update_s=Decimal(5),
        assist_s=Decimal(12),
        switch_in_s=Decimal(1),
        switch_out_s=Decimal(1),
        commit_s=Decimal(2),
        load_s=Decimal(3),
    )
    few = parse_durations("B=4 g=2.5 u=1")
    assert (few.num_steps, few.num_generators) == (1, 1)
    assert (*few.generate_s, few.assist_s, *few.score_s) == decimals(2.5, 2.5, 0)
    assert (few.switch_in_s, few.switch_out_s, few.commit_s, few.load_s) == decimals(0, 0, 0, 0)


def test_lists_have_an_entry_for_each_group() -> None:
    several = parse_durations("B=4 g=10,12.5 u=1")
    assert (several.generate_s, several.score_s) == (decimals(10, 12.5), decimals(0, 0))
    assert several.assist_s == Decimal("12.5")
    assert parse_durations("B=4 g=10 r=1,2,3 u=1").generate_s == decimals(10, 10, 10)
    assert parse_durations("B=4 g=10 u=1 G=3").generate_s == decimals(10, 10, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"B \(num_micro_batches\) is missing"),
        ("B=4 u=1", r"g \(generate_s\) is missing"),
        ("B=4 g=1", r"u \(update_s\) is missing"),
        ("B=4 g=1 u=1 y_op=1", r"unknown letter 'y_op'; did you mean y_opt=\?"),
        ("B=4 g=1 u=1 q=1", "unknown letter 'q'; known: B, S, G, T, g, r, u, h, c_load"),
        ("B=4 g 1 u=1", "'g' is not of the form"),
        ("B=4 g=1 u=1 g=2", "g is given twice"),
        ("B=4 g=ten u=1", "g='ten' is not a number"),
        ("B=4 g=1,,2 u=1", "g='' is not a number"),
        ("B=4 g= u=1", "g='' is not a number"),
        ("B=4 g=-1 u=1", "g=-1 must be finite and not negative"),
        ("B=4 g=nan u=1", "g=nan must be finite and not negative"),
        ("B=4 g=1 u=inf", "u=inf must be finite and not negative"),
        ("B=4 g=1 u=1,2", "u takes one number, got 2"),
        ("B=4,5 g=1 u=1", "B takes one number, got 2"),
        ("B=0 g=1 u=1", "B=0 must be a whole number of at least 1"),
        ("B=2.5 g=1 u=1", "B=2.5 must be a whole number"),
        ("B=2 S=0 g=1 u=1", "S=0 must be a whole number"),
        ("B=2 G=0 g=1 u=1", "G=0 must be a whole number"),
        ("B=2 g=1,2 u=1 G=3", "g has 2 entries for G=3 generator groups"),
        ("B=2 g=1,2 r=1,2,3 u=1", "g has 2 entries for G=3 generator groups"),
        ("B=2 g=1 u=1 T=2", "T must be 1: the scheduler drives one trainer group"),
    ],
)
def test_bad_durations_are_refused_and_the_command_says_so(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_durations(text)
    assert main(["simulate", "--durations", text]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("digen: durations: ")
    assert captured.err.count("\n") == 1


def test_durations_too_far_apart_for_exact_sums_are_refused() -> None:
    with pytest.raises(ConfigError, match="is too long for steps of 1E-9 s to be exact"):
        simulate(parse_durations("B=4 g=1e9 u=1e-9"), ScheduleConfig(mode="gap"))


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
    durations = parse_durations("B=8 S=2 g=10,12 r=1 u=5 y_opt=2 y_sync=3")
    assert compare(durations)["colocated"] == pytest.approx(2 * (8 * Decimal(17) / 3 + 2))


# ---- profiles --------------------------------------------------------------------------------------------------


def recorded(*tasks: tuple[str, str, float], roles: dict[str, str] | None = None) -> list[AnyEvent]:
    """A run that did these tasks: (worker, kind, seconds)."""
    roles = roles if roles is not None else {"a": "generator", "b": "generator", "t": "trainer"}
    start = RunStarted(
        0.0,
        num_steps=9,
        start_step=0,
        num_micro_batches=7,
        window=1,
        stale_limit=0,
        sync="pull",
        update_order="index",
        tag="never",
        barrier=False,
    )
    joined = [WorkerJoined(0.0, name, role, 0) for name, role in roles.items()]  # type: ignore[arg-type]
    done = [TaskFinished(5 + seconds, 0, kind, worker, 0, 0, 0, 5.0) for worker, kind, seconds in tasks]  # type: ignore[arg-type]
    committed = [StepCommitted(9.0, step, step + 1, {}) for step in range(2)]
    return [start, *joined, *done, *committed]


def test_a_profile_leaves_first_samples_out() -> None:
    tasks = [("a", "generate", 90.0), ("a", "generate", 1.0), ("a", "generate", 2.0), ("b", "generate", 5.0)]
    tasks += [("a", "score", 0.25), ("t", "update", 8.0), ("t", "update", 0.1), ("t", "commit", 0.5)]
    tasks += [("t", "publish", 0.125), ("a", "load", 7.0), ("a", "load", 1.0), ("b", "load", 2.0)]
    for _ in range(2):
        tasks += [("t", "switch", 0.5), ("t", "assist", 4.0), ("t", "switch", 0.25)]
    assert profiled_durations(recorded(*tasks)) == Durations(
        num_micro_batches=7,
        num_steps=2,
        generate_s=(Decimal("1.5"), Decimal(5)),
        score_s=(Decimal("0.25"), Decimal("0.25")),  # b has scored nothing
        update_s=Decimal("0.1"),
        assist_s=Decimal(4),
        switch_in_s=Decimal("0.5"),
        switch_out_s=Decimal("0.25"),
        commit_s=Decimal("0.625"),
        load_s=Decimal("1.5"),
    )


def test_a_profile_without_assists_and_loads_has_defaults() -> None:
    found = profiled_durations(recorded(("a", "generate", 2.0), ("b", "score", 1.0), ("t", "update", 1.0)))
    assert found.num_steps == 2
    assert (*found.generate_s, found.assist_s) == decimals(2, 2, 2)
    assert (found.commit_s, found.load_s, found.switch_in_s, found.switch_out_s) == decimals(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "no run with generators"),
        (recorded(("t", "generate", 1.0), roles={"t": "trainer"}), "another mode than colocated"),
        (recorded(("a", "generate", 1.0), ("t", "update", 1.0)), "no score on a to learn from"),
        (recorded(("a", "generate", 1.0), ("a", "score", 1.0)), "no update on trainer to learn from"),
        (recorded(("a", "score", 1.0), ("t", "update", 1.0)), "no generate on a to learn from"),
        (recorded(roles={"a": "generator", "s": "scorer"}), r"scorer of its own \(s\)"),
    ],
)
def test_a_profile_that_teaches_nothing_is_refused(events: list[AnyEvent], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profiled_durations(events)


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


# ---- folders, pictures, the command ----------------------------------------------------------------------------


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
    assert told.reason.endswith("last update in 73 s, in units of 0.1 s")
    assert main(["report", str(folder)]) == 0
    assert main(["simulate", "--durations", text, "--out", str(folder)]) == 2
    assert "holds the events of a run already" in capsys.readouterr().err


def test_a_threshold_saving_is_written_in_seconds(tmp_path: Path) -> None:
    config = ScheduleConfig(mode="tag", tag="threshold")
    savings = []
    for name, text in (("one", "B=8 g=10 r=1 u=5 h=12"), ("tenth", "B=8 g=1.0 r=.1 u=.5 h=1.2")):
        write_folder(simulate(parse_durations(text), config), tmp_path / name)
        events = read_events(tmp_path / name / "events.jsonl")
        savings.append([event.saving_s for event in events if isinstance(event, TagDecided)])
    assert savings[0]
    assert savings[1] == pytest.approx([saving / 10 for saving in savings[0] if saving is not None])


def test_the_picture_has_a_row_for_each_worker() -> None:
    config = ScheduleConfig(mode="tag", tag="search")
    lines = describe(simulate(parse_durations("B=8 S=2 g=10,11,12 r=1 u=5"), config), config, width=60)
    rows = lines[lines.index("") + 1 : -1]
    assert [row.split()[0] for row in rows] == ["gen0", "gen1", "gen2", "trainer"]
    assert {len(row) for row in rows} == {11 + 60}
    assert all(set(row[11:]) <= set(".gasuCPLxk") for row in rows)
    assert rows[0][11:].startswith("ggg")
    assert "u" in rows[3]
    assert lines[0].startswith("simulated: ")


def test_the_words_give_speed_ups_and_idle_shares() -> None:
    config = ScheduleConfig(mode="tag", tag="search", sync="hold")
    lines = describe(simulate(parse_durations(EXAMPLE), config), config)
    assert lines[0] == ("simulated: mode tag, window 1, TAG search, sync hold; 2 steps of 8 micro-batches, 1 generator")
    assert lines[1:4] == [
        "makespan 156 s, 4 assists",
        "  1.705 x naive (266 s)",
        "  0.846 x colocated, if every stage scaled linearly (132 s)",
    ]
    assert lines[4].startswith("  generator idle 9.0%")


def test_a_run_of_no_length_has_no_speed_up() -> None:
    config = ScheduleConfig(mode="tag", tag="search")
    lines = describe(simulate(parse_durations("B=2 g=0 u=0"), config), config)
    assert lines[1] == "makespan 0 s, 0 assists"
    assert "naive" not in "".join(lines)


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --durations --profile is required"),
        (["--durations", EXAMPLE, "--profile", "x"], "not allowed with argument"),
        (["--profile", "/nowhere"], "is not a run's folder"),
        (["--durations", EXAMPLE, "--policy", "gredy"], "tag"),
        (["--durations", EXAMPLE, "--mode", "tga"], "mode"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, message in captured.err) == ("", True), captured.err
