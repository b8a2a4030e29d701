"""A simulated run in a terminal: the words, the picture, and which part of a long run it shows."""

from __future__ import annotations

from typing import Any

import pytest

from digen import ScheduleConfig
from digen.durations import parse_durations
from digen.timeline import describe, shown_steps
from digen.twin import simulate

EXAMPLE = "B=8 S=2 g=10 r=1 u=5 h=12 c_load=1 c_off=1 y_opt=2 y_sync=3 G=1 T=1"


def lines(text: str, *, width: int = 60, origin: str = "", **config: Any) -> list[str]:
    """What is printed of a run."""
    durations, schedule = parse_durations(text), ScheduleConfig(**config)
    twin = simulate(durations, schedule, keep=shown_steps(durations, width=width))
    return describe(twin, schedule, origin=origin, width=width)


def rows(shown: list[str]) -> dict[str, str]:
    """The picture: marks by worker."""
    picture = shown[shown.index("") + 2 :]
    end = next(number for number, line in enumerate(picture) if not line[:10].strip())
    return {line[:10].strip(): line[11:] for line in picture[:end]}


def test_the_words_give_speed_ups_and_idle_shares() -> None:
    shown = lines(EXAMPLE, mode="tag", tag="search", sync="hold", origin="a guess")
    assert shown[:5] == [
        "simulated: mode tag, window 1, TAG search, sync hold; 2 steps of 8 micro-batches, 1 generator",
        f"durations: {EXAMPLE}; a guess",
        "makespan 156 s, 4 assists",
        "  1.705 x naive (266 s)",
        "  0.846 x colocated, if every stage scaled linearly (132 s)",
    ]
    assert shown[5].startswith("  generator idle 9.0% (")


def test_a_long_run_has_a_time_per_step_without_the_first_and_the_last() -> None:
    shown = lines("B=4 S=10 g=10 r=1 u=5 y_opt=2 y_sync=3", mode="gap")
    twin = simulate(parse_durations("B=4 S=10 g=10 r=1 u=5 y_opt=2 y_sync=3"), ScheduleConfig(mode="gap"))
    ends = twin.step_ends
    assert shown[3] == f"  {(ends[8] - ends[0]) / 8} s a step, the first and the last left out"
    assert "a step, the first" not in "".join(lines("B=4 S=3 g=10 u=5", mode="gap"))


def test_a_run_of_no_length_has_no_speed_up_and_no_marks() -> None:
    shown = lines("B=2 g=0 u=0", mode="tag", tag="search")
    assert shown[2] == "makespan 0 s, 0 assists"
    assert "naive" not in "".join(shown)
    assert set("".join(rows(shown).values())) == {"."}


def test_the_exact_model_is_named() -> None:
    shown = lines("B=4 g=10 u=25,14 y_opt=1", mode="gap")
    assert shown[0].endswith("1 step of 4 micro-batches, 1 generator, 2 trainers")
    assert shown[2].startswith("played by the exact model, which tells no causes of bubbles")
    assert [line for line in shown if "idle" in line and "%" in line] == [
        "  generator idle 39.4%",
        "  trainer idle 40.2%",
    ]
    assert list(rows(shown)) == ["gen0", "trainer0", "trainer1"]


def test_every_worker_has_a_row_and_a_character_is_what_took_most_of_it() -> None:
    """The last character of ``halves``: a generation of 7 and a score of 1, then an update of 8, in 4 s each."""
    shown = lines("B=3 g=16 r=4 u=4 y_opt=0", mode="gap", width=16)
    assert rows(shown) == {"gen0": "ggggsggggsggggs.", "trainer": ".....u....u....u"}
    assert shown[shown.index("") + 1].split() == ["step", "0"]
    assert "a character is 4 s and shows what took most of it:" in shown[-2]
    halves = lines("B=1 g=7 r=1 u=8 y_opt=0", mode="gap", width=4)
    assert rows(halves) == {"gen0": "gg..", "trainer": "..uu"}


def test_workers_that_never_work_have_rows_too() -> None:
    shown = lines("B=1 g=4 u=4 G=3", mode="gap", width=4)
    assert rows(shown) == {"gen0": "gg..", "gen1": "....", "gen2": "....", "trainer": "..uu"}


def test_all_kinds_of_tasks_have_marks() -> None:
    shown = lines("B=4 S=2 g=10 r=3 u=5 h=9 c_load=4 c_off=4 y_opt=6 y_sync=5", mode="tag", tag="greedy", width=90)
    marks = set("".join(rows(shown).values()))
    assert marks == set("gasuCLx.")


@pytest.mark.parametrize(
    ("size", "num_steps", "expected"),
    [(8, 2, range(2)), (8, 3, range(3)), (8, 4, range(1, 4)), (4, 100, range(47, 54)), (128, 1000, range(499, 501))],
)
def test_a_long_run_is_shown_in_its_middle(size: int, num_steps: int, expected: range) -> None:
    assert shown_steps(parse_durations(f"B={size} S={num_steps} g=1 u=1"), width=60) == expected


def test_the_window_of_a_long_run_is_that_part_of_the_whole() -> None:
    text = "B=8 S=40 g=10 r=1 u=5 h=12 c_load=1 c_off=1 y_opt=2 y_sync=3"
    shown = lines(text, mode="tag", tag="search")
    durations, config = parse_durations(text), ScheduleConfig(mode="tag", tag="search")
    ends = simulate(durations, config).step_ends
    assert "steps 19 to 21 of 0 to 39, from" in shown[-3]
    assert shown[-3].endswith(f"from {ends[18]} s")
    assert f"a character is {(ends[21] - ends[18]) / 60:.3g} s" in shown[-2]
    assert ends[21] - ends[18] == 3 * (ends[19] - ends[18])
    ruler = shown[shown.index("") + 1][11:]
    assert [ruler.index(f"step {step}") for step in (19, 20, 21)] == [0, 20, 40]
    marks = rows(shown)
    assert all(row[:20] == row[20:40] == row[40:] for row in marks.values())
    assert marks["trainer"].startswith("aaa")


def test_a_wide_pool_is_shown_in_part() -> None:
    shown = lines("B=40 g=10 u=1 G=40", mode="gap")
    assert list(rows(shown)) == [*(f"gen{number}" for number in range(15)), "trainer"]
    assert shown[-3].strip() == "and 25 more generators"


def test_a_line_of_many_durations_is_cut() -> None:
    several = ",".join(f"{number}.125" for number in range(1, 90))
    assert lines(f"B=4 g={several} u=1", mode="gap")[1] == "durations: B=4 S=1 ..."
