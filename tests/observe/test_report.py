"""Reports of complete, crashed, interrupted, resumed and empty runs; the page is well formed, self-contained, safe."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from digen.events import AnyEvent, EventLog, RunFinished, RunStarted, StepCommitted, WorkerJoined
from digen.observe.advice import LINEAR_NOTE, advise
from digen.observe.fold import Fold
from digen.observe.page import MAX_IMAGE_BYTES, render
from digen.observe.report import build_report, text_summary, write_report
from digen.observe.svg import nice_ticks

FakeRuns = Callable[..., list[AnyEvent]]
PNG = b"\x89PNG\r\n\x1a\n"


class Structure(HTMLParser):
    """Checks that tags nest, and collects what a browser would act on."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.urls += [value or "" for name, value in attrs if name in {"src", "href"}]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)


def check_page(page: str) -> Structure:
    structure = Structure()
    structure.feed(page)
    structure.close()
    assert structure.open == []
    assert not structure.tags & {"script", "link", "iframe", "object"}
    assert all(url.startswith(("data:image/png;base64,", "data:image/gif;base64,")) for url in structure.urls)
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ET.fromstring(chart)  # noqa: S314 - our own text
        assert root.get("role") == "img"
        assert root.get("aria-label")
    return structure


def test_report_of_a_complete_run(fake_run: FakeRuns) -> None:
    report = build_report(fake_run(20, 3, window=2))
    assert json.loads(json.dumps(report)) == report
    assert (report["outcome"], report["num_steps"], len(report["steps"])) == ("completed", 20, 20)
    assert report["reward"]["first"] == report["steps"][0]["values"]["reward/mean"]
    assert report["evaluations"]["before"]["version"] == 0
    assert report["evaluations"]["after"]["version"] == 20
    middle = sorted(step["duration_s"] for step in report["steps"][1:-1])
    assert report["steps_per_minute"] == pytest.approx(60 / ((middle[8] + middle[9]) / 2))
    for role in ("generator", "trainer"):
        bubbles = report["bubbles"][role]
        assert sum(bubbles["causes"].values()) == pytest.approx(bubbles["share"])
        assert list(bubbles["causes"].values()) == sorted(bubbles["causes"].values(), reverse=True)
    assert report["conservation"]["holds"]
    assert sum(report["staleness"]["histogram"].values()) == report["conservation"]["num_updated"] == 160
    assert report["staleness"]["num_stale"] > 0


@pytest.mark.parametrize("length", [0, 1, 3, 10, 60, 200, 500])
def test_report_of_a_run_that_broke_off(fake_run: FakeRuns, length: int) -> None:
    report = build_report(fake_run(20, 2)[:length])
    assert report["outcome"] == "unfinished"
    assert report["conservation"]["holds"]
    check_page(render(report))
    assert "unfinished" in text_summary(report)


def test_report_of_an_interrupted_run(fake_run: FakeRuns) -> None:
    stream = fake_run(20, 2)[:300]
    report = build_report([*stream, RunFinished(stream[-1].time + 1, "failed", "WorkerDied: gen0\x1b[2J")])
    assert report["outcome"] == "failed"
    assert "error" in text_summary(report)
    assert "\x1b" not in text_summary(report)
    check_page(render(report))


def test_report_of_a_resumed_run(fake_run: FakeRuns) -> None:
    report = build_report([*fake_run(10, 2)[:300], *fake_run(10, 2, start_step=2, seed=1)])
    assert report["num_segments"] == 2
    assert [step["step"] for step in report["steps"]] == list(range(10))
    times = [step["time"] for step in report["steps"]]
    assert times == sorted(times)
    assert report["wall_s"] > times[-1]
    assert "resumed 1x" in text_summary(report)


def test_the_timeline_shows_the_last_steps_and_stays_bounded(fake_run: FakeRuns) -> None:
    report = build_report(fake_run(20, 3))
    timeline = report["timeline"]
    assert [version for _, version in timeline["commits"]] == [18, 19, 20]
    assert {span["step"] for span in timeline["spans"] if span["kind"] == "update"} == {17, 18, 19}


def test_a_crowded_timeline_shows_less_time(fake_run: FakeRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_report(fake_run(20, 3))["timeline"]
    monkeypatch.setattr("digen.observe.report.TIMELINE_SPANS", 50)
    crowded = build_report(fake_run(20, 3))["timeline"]
    assert len(crowded["spans"]) <= 50 < len(whole["spans"])
    assert whole["from_s"] < crowded["from_s"] < crowded["to_s"] == whole["to_s"]


def test_colocation_carries_the_honest_note(fake_run: FakeRuns, hand_made: Callable[..., list[AnyEvent]]) -> None:
    assert build_report(fake_run(3, 2))["notes"] == []
    colocated = build_report(hand_made([("trainer", "update", 0.0, 1.0, 0, 0)], 1.0, {"trainer": "wait_rollout"}))
    assert colocated["run"]["mode"] == "colocated"
    assert colocated["notes"] == [LINEAR_NOTE]
    assert " ".join(text_summary(colocated).split()).endswith(LINEAR_NOTE)


def test_advice_names_the_largest_bubble(fake_run: FakeRuns) -> None:
    assert "Too few steps" in advise(Fold.of(fake_run(2, 2)))
    assert re.search(r"^Generators idle \d+ % .* new weights: try schedule.mode=tcss", advise(Fold.of(fake_run(9, 4))))
    assert re.search(
        r"^The trainer idles \d+ % .* generations: try schedule.mode=tag", advise(Fold.of(fake_run(9, 1, tag=False)))
    )


def test_write_report(fake_run: FakeRuns, tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in fake_run(6, 2, window=2):
            log(event)
    (tmp_path / "config.yaml").write_text("run:\n  name: <script>alert(1)</script>\n")
    samples = tmp_path / "samples"
    samples.mkdir()
    for number in range(3):
        (samples / f"v{number}.png").write_bytes(PNG + bytes([number]))
    (samples / "film.gif").write_bytes(b"GIF89a")
    (samples / "broken.png").write_bytes(b"<html>")
    (samples / "link.png").symlink_to(samples / "v0.png")
    (samples / "huge.png").write_bytes(PNG + bytes(MAX_IMAGE_BYTES))

    report = write_report(tmp_path)

    assert json.loads((tmp_path / "report.json").read_text()) == report
    page = (tmp_path / "report.html").read_text()
    assert sorted(url[:14] for url in check_page(page).urls) == ["data:image/gif", *["data:image/png"] * 3]
    assert "3 more in the run" in page
    assert "name: &lt;script&gt;" in page
    assert page.count("<svg") == 4


def test_write_report_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path)


def test_hostile_names_stay_text(fake_run: FakeRuns) -> None:
    evil = "</title><script>alert(1)</script>\x1b]0;x\x07\u202e\ud800"

    def poisoned(event: AnyEvent) -> AnyEvent:
        if isinstance(event, RunStarted):
            return msgspec.structs.replace(event, tag=evil, info={"name": evil, "mode": evil})
        if getattr(event, "worker", "") == "gen0":
            return msgspec.structs.replace(event, worker=evil)
        return event

    stream = [poisoned(event) for event in fake_run(4, 1)]
    stream[-1] = RunFinished(stream[-1].time, "failed", evil + "x" * 10_000_000)
    report = build_report(stream)
    page, summary = render(report, config_text=evil), text_summary(report)
    check_page(page)
    for text in (page, summary):
        assert len(text) < 200_000
        assert not set(text) & set("\x1b\x07\u202e\ud800")
    assert "<script" not in page


def test_report_keys_are_frozen(fake_run: FakeRuns) -> None:
    assert sorted(build_report(fake_run(2, 1))) == [
        "advice", "balanced_generators", "bubbles", "checkpoint", "conservation", "counts", "error", "evaluations",
        "losses", "median_of", "median_step_s", "notes", "num_segments", "num_steps", "outcome", "overlap_ratio",
        "reward", "run", "schema", "staleness", "steps", "steps_per_minute", "tag", "timeline", "wall_s", "weight_sync",
        "workers",
    ]  # fmt: skip


def test_metrics_that_are_missing_or_constant_do_not_break_charts(started: Callable[..., RunStarted]) -> None:
    bare: list[Any] = [started(), WorkerJoined(0.0, "trainer", "trainer", 0)]
    check_page(render(build_report([*bare, StepCommitted(1.0, 0, 1, {})])))
    check_page(render(build_report([*bare, StepCommitted(1.0, 0, 1, {"reward/mean": 0.5})])))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (3, 3, [2.6, 3, 3.4]), (-0.03, 0.02, [-0.03, -0.02, -0.01, 0, 0.01, 0.02])],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert set(expected) <= set(ticks)


def test_the_summary_of_nothing_is_a_line() -> None:
    assert text_summary({}) == "nothing was recorded"
