"""What a run's TAG policy decided, and how far its predictions were off, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from digen.events import AnyEvent, RunStarted, StepCommitted, TagDecided, TaskFinished, TaskStarted, WorkerJoined
from digen.observe.fold import Fold
from digen.observe.page import render
from digen.observe.report import build_report, text_summary

Started = Callable[..., RunStarted]

STEPS = (  # seconds, predicted, assists, skipped bubbles, ms of deciding
    (9.0, 2.0, 1, 5, 0.1),
    (2.0, 2.2, 2, 0, 3.0),
    (2.0, None, 0, 1, 0.5),
    (4.0, 3.0, 2, 1, 2.4),
)
"""The first step is cold: its prediction is off by 78 %."""


def segment(run: RunStarted, steps: tuple[tuple[float, float | None, int, int, float], ...]) -> list[AnyEvent]:
    """A stream with decisions, assists with their switches (0.25 s in, 0.5 s back) and commits; nothing else."""
    now, events, task = 0.0, list[AnyEvent](), 0
    for number, (seconds, predicted, assists, skipped, search_ms) in enumerate(steps, run.start_step):
        for assist in (True,) * assists + (False,) * skipped:
            events.append(TagDecided(now, "trainer", number, assist, "search", "because"))
        moment = now
        for _ in range(assists):
            for kind, length in (("switch", 0.25), ("assist", 0.125), ("switch", 0.5)):
                events.append(TaskStarted(moment, task, kind, "trainer", number, 0, number))  # type: ignore[arg-type]
                moment += length
                events.append(
                    TaskFinished(moment, task, kind, "trainer", number, 0, number, moment - length)  # type: ignore[arg-type]
                )
                task += 1
        now += seconds
        values: dict[str, float] = {"tag/inserted": assists, "tag/skipped": skipped, "tag/search_ms": search_ms}
        values |= {"pipeline/makespan_predicted_s": predicted} if predicted is not None else {}
        events.append(StepCommitted(now, number, number + 1, values))
    return [run, WorkerJoined(0.0, "trainer", "trainer", run.start_step), *events]


def test_totals_and_rows(started: Started) -> None:
    report = build_report(segment(started(num_steps=4, tag="search"), STEPS))
    assert report["tag"] == {
        "policy": "search",
        "num_inserted": 5,
        "num_skipped": 7,
        "assist_share": 1.0,
        "switch_s_per_assist": pytest.approx(0.75),
        "search_ms_per_decision": pytest.approx(6.0 / 12),
        "prediction": {"num_steps": 2, "mean": pytest.approx((0.1 + 0.25) / 2), "max": pytest.approx(0.25)},
        "by_assists": [
            {"num_assists": 0, "num_steps": 1, "actual_s": pytest.approx(2.0), "predicted_s": None},
            {"num_assists": 2, "num_steps": 2, "actual_s": pytest.approx(3.0), "predicted_s": pytest.approx(2.6)},
        ],
    }


def test_the_text_and_the_page_show_them(started: Started) -> None:
    report = build_report(segment(started(num_steps=4, tag="search"), STEPS))
    text = " ".join(text_summary(report).split())
    assert "TAG search: assisted in 5 bubbles, skipped 7, 0.50 ms a decision" in text
    assert "prediction of step time: off by 17.5 % on average, at most 25.0 %, over 2 steps" in text
    page = render(report)
    assert "<h2>Trainer-assisted generation</h2>" in page
    assert "<dt>switch</dt><dd>750.00 ms an assist</dd>" in page
    assert "<tr><td>2</td><td>2</td><td>3.000</td><td>2.600</td></tr>" in page
    assert '<th scope="col">predicted s</th>' in page


def test_the_first_step_of_a_resumed_run_is_left_out_too(started: Started) -> None:
    whole = segment(started(num_steps=4, tag="search"), STEPS)
    resumed = segment(started(num_steps=5, start_step=3, tag="search"), ((9.0, 1.0, 1, 0, 1.0), (5.0, 4.0, 1, 0, 1.0)))
    report = build_report([*whole, *resumed])
    # Step 3 was repeated, as the first of its segment, so steps 1 and 4 remain.
    assert report["tag"]["prediction"] == {"num_steps": 2, "mean": pytest.approx(0.15), "max": pytest.approx(0.2)}
    assert [summary.cold for summary in Fold.of([*whole, *resumed]).steps.values()] == [True, False, False, True, False]


def test_a_run_whose_policy_was_never_asked_shows_nothing(started: Started) -> None:
    report = build_report(segment(started(num_steps=2), ((1.0, None, 0, 0, 0.0), (1.0, None, 0, 0, 0.0))))
    assert report["tag"] is None
    assert "TAG search" not in text_summary(report)
    assert "prediction" not in text_summary(report)
    assert "Trainer-assisted" not in render(report)


def test_policies_that_predict_nothing_have_decisions_and_no_error(started: Started) -> None:
    greedy = segment(started(num_steps=3, tag="greedy"), tuple((s, None, a, k, ms) for s, _, a, k, ms in STEPS[:3]))
    without = [
        StepCommitted(e.time, e.step, e.version, {k: v for k, v in e.values.items() if k != "tag/search_ms"})
        if isinstance(e, StepCommitted)
        else e
        for e in greedy
    ]
    report = build_report(without)
    assert (report["tag"]["prediction"], report["tag"]["search_ms_per_decision"]) == (None, None)
    assert "TAG greedy: assisted in 3 bubbles, skipped 6" in " ".join(text_summary(report).split())
    assert "prediction" not in text_summary(report)
    assert "<dt>deciding</dt>" not in render(report)
