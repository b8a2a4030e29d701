"""The trace is what Perfetto can draw: slices that never overlap, partitioned tracks, arrows that bind to slices."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from digen.events import AnyEvent, TagDecided
from digen.observe.fold import Fold
from digen.observe.trace import build_trace, write_trace

FakeRuns = Callable[..., list[AnyEvent]]


def by_phase(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    phases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for item in trace["traceEvents"]:
        phases[item["ph"]].append(item)
    return phases


@pytest.fixture(params=["complete", "crashed", "resumed"])
def stream(request: pytest.FixtureRequest, fake_run: FakeRuns) -> list[AnyEvent]:
    if request.param == "complete":
        return fake_run(8, 3, window=2)
    if request.param == "crashed":
        return fake_run(8, 3)[:250]
    return [*fake_run(8, 3)[:250], *fake_run(8, 3, start_step=2, seed=1)]


def test_slices_partition_every_track(stream: list[AnyEvent]) -> None:
    fold = Fold.of(stream)
    slices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for item in by_phase(build_trace(stream))["X"]:
        slices[item["tid"]].append(item)
    assert len(slices) == len(fold.workers) == 4
    for tid, ledger in enumerate(fold.workers.values(), 1):
        items = slices[tid]
        items.sort(key=lambda item: (item["ts"], item["dur"]))
        for one, other in pairwise(items):
            assert one["ts"] + one["dur"] == other["ts"]
        assert sum(item["dur"] for item in items) == round(ledger.wall_s * 1e6)
        bubbles = sum(item["dur"] for item in items if item["cat"] == "bubble")
        assert bubbles == pytest.approx(1e6 * sum(ledger.bubble_s.values()), abs=len(items))


def test_tracks_are_named_and_ordered_by_role(fake_run: FakeRuns) -> None:
    meta = by_phase(build_trace(fake_run(2, 2)))["M"]
    names = {item["tid"]: item["args"]["name"] for item in meta if item["name"] == "thread_name"}
    order = {item["tid"]: item["args"]["sort_index"] for item in meta if item["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(order, key=lambda tid: order[tid])] == ["gen0", "gen1", "trainer"]


def test_slices_say_what_they_are(fake_run: FakeRuns) -> None:
    names = {item["name"] for item in by_phase(build_trace(fake_run(3, 2)))["X"]}
    assert {"generate s0 mb0 v0", "update s1 mb5 v1", "commit s0 v0", "load s1 v1", "wait_weights"} <= names


def test_arrows_lead_from_generation_over_score_to_update(stream: list[AnyEvent]) -> None:
    phases = by_phase(build_trace(stream))
    chains: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for phase in "stf":
        for item in phases[phase]:
            chains[item["id"]].append(item)
    assert chains
    for chain in chains.values():
        assert [item["ph"] for item in chain] == ["s", "t", "f"]
        kinds = []
        for item in chain:
            inside = [
                other
                for other in phases["X"]
                if other["tid"] == item["tid"] and other["ts"] <= item["ts"] < other["ts"] + other["dur"]
            ]
            assert len(inside) == 1
            kinds.append(inside[0]["name"].split()[0])
        assert kinds[0] in {"generate", "assist"}
        assert kinds[1:] == ["score", "update"]


def test_counters_and_decisions(fake_run: FakeRuns) -> None:
    stream = fake_run(4, 2)
    phases = by_phase(build_trace(stream))
    assert {item["name"] for item in phases["C"]} == {"SQ", "UQ"}
    assert all(item["args"]["micro-batches"] >= 0 for item in phases["C"])
    assert phases["C"][-1]["args"]["micro-batches"] == 0
    decided = [event for event in stream if isinstance(event, TagDecided)]
    assert [item["name"] for item in phases["i"]] == ["assist" if event.assist else "skip" for event in decided]


def test_the_file_is_the_same_trace(fake_run: FakeRuns, tmp_path: Path) -> None:
    stream = fake_run(3, 2)
    write_trace(stream, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == build_trace(stream)
