"""Durations: what is read from a line of text and from a run's events, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from digen.cli import main
from digen.durations import Durations, TrainerTimes, parse_durations, profiled_durations
from digen.errors import ConfigError
from digen.events import AnyEvent, RunStarted, StepCommitted, TaskFinished, WorkerJoined

EXAMPLE = "B=8 S=2 g=10 r=1 u=5 h=12 c_load=1 c_off=1 y_opt=2 y_sync=3 G=1 T=1"


def decimals(*values: float) -> tuple[Decimal, ...]:
    """Exact decimals."""
    return tuple(Decimal(str(value)) for value in values)


# ---- text ------------------------------------------------------------------------------------------------------


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


def test_the_line_of_durations_is_read_back() -> None:
    for text in (EXAMPLE, "B=4 g=2.5,3 r=.1 u=1 S=3", "B=4 g=10 u=1,2.5 h=7,8 c_load=1,2 c_off=0.5,0.25 T=2"):
        durations = parse_durations(text)
        assert parse_durations(str(durations)) == durations
    assert str(parse_durations(EXAMPLE)) == EXAMPLE


def test_trainer_groups_may_differ() -> None:
    found = parse_durations("B=4 g=10 u=5,6 h=12 c_load=1,2 y_opt=3")
    assert found.num_trainers == 2
    assert found.trainers == (TrainerTimes(*decimals(5, 12, 1, 0)), TrainerTimes(*decimals(6, 12, 2, 0)))
    assert (found.update_s, found.switch_in_s, found.more_trainers) == (*decimals(5, 1), found.trainers[1:])
    assert parse_durations("B=4 g=10,12.5 u=5 T=3").trainers == (TrainerTimes(*decimals(5, 12.5, 0, 0)),) * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches must be between 1 and 100,000, got 0"),
        ({"num_steps": -1}, "num_steps must be between 1"),
        ({"micro_batches_per_group": 3}, "num_micro_batches=8 must be a multiple of micro_batches_per_group=3"),
        ({"score_s": ()}, "one entry per generator group, got 1 and 0"),
        ({"generate_s": (), "score_s": ()}, "one entry per generator group, got 0 and 0"),
        ({"generate_s": (Decimal(-1),)}, "generate_s must be finite and not negative, got -1"),
        ({"update_s": Decimal("nan")}, "update_s must be finite and not negative, got NaN"),
        ({"load_s": Decimal("inf")}, "load_s must be finite"),
        ({"more_trainers": (TrainerTimes(*decimals(1, 2, -3, 4)),)}, "switch_in_s must be finite and not negative"),
        ({"more_trainers": (TrainerTimes(*decimals(1, 2, 3, 4)),) * 8}, "9 trainer groups, but at most 8"),
    ],
)
def test_durations_that_make_no_sense_are_refused_however_they_are_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(parse_durations(EXAMPLE), **changes)


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
        ("B=4 g=1 u=1 y_opt=1,2", "y_opt takes one number, got 2"),
        ("B=4,5 g=1 u=1", "B takes one number, got 2"),
        ("B=0 g=1 u=1", "B=0 must be a whole number of at least 1"),
        ("B=2.5 g=1 u=1", "B=2.5 must be a whole number"),
        ("B=2 S=0 g=1 u=1", "S=0 must be a whole number"),
        ("B=2 G=0 g=1 u=1", "G=0 must be a whole number"),
        ("B=2 g=1,2 u=1 G=3", "g has 2 entries for G=3 generator groups"),
        ("B=2 g=1,2 r=1,2,3 u=1", "g has 2 entries for G=3 generator groups"),
        ("B=2 g=1 u=1,2 T=3", "u has 2 entries for T=3 trainer groups"),
        ("B=2 g=1 u=1,2 c_off=1,2,3", "u has 2 entries for T=3 trainer groups"),
        ("B=2 g=1 u=1 T=9", "T=9 is beyond 8, the most that can be simulated"),
        ("B=2 g=1 u=1,1,1,1,1,1,1,1,1", "T=9 is beyond 8"),
        ("B=200000 g=1 u=1", "B=200000 is beyond 100,000"),
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
