"""The event stream as a Chrome trace, to be opened in Perfetto (https://ui.perfetto.dev).

One track a worker (generators, scorers, trainer), slices for tasks and, in categories of their own, for bubbles and
for the time that a worker was lost; arrows from a micro-batch's generation over its score to its update; instants for
TAG decisions; counters for the two queues. Made from the events alone, so it costs a run nothing and works after a
crash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from digen.events import AnyEvent, RunStarted, TagDecided, WorkerJoined, WorkerLeft, WorkerLost
from digen.observe.fold import ROLES, Fold
from digen.observe.ledger import Span
from digen.observe.text import escape_text

_PID = 1
_COLOURS = {
    "generate": "thread_state_running",
    "assist": "rail_animation",
    "score": "rail_response",
    "update": "rail_load",
    "bubble": "grey",
    "lost": "terrible",
}
"""Reserved colour names of the trace format, where it has a fitting one."""


def build_trace(events: Iterable[AnyEvent]) -> dict[str, Any]:
    """The whole trace as one JSON-able object."""
    return {"displayTimeUnit": "ms", "traceEvents": list(trace_events(events))}


def write_trace(events: Iterable[AnyEvent], path: Path) -> None:
    """Write the trace to ``path``, one trace event a line, without holding it in memory."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, item in enumerate(trace_events(events)):
            file.write((",\n" if number else "") + json.dumps(item, separators=(",", ":")))
        file.write("\n]}\n")


def trace_events(events: Iterable[AnyEvent]) -> Iterator[dict[str, Any]]:
    """Yield trace events; ``ts`` and ``dur`` are in microseconds, a task is on the track of its worker."""
    spans: list[Span] = []
    fold = Fold(spans.append)
    tracks: dict[str, int] = {}
    flows = _Flows()
    depths: dict[str, int] = {}
    yield {"ph": "M", "pid": _PID, "name": "process_name", "args": {"name": "digen"}}
    for event in events:
        fold.apply(event)
        if isinstance(event, RunStarted):
            labels = escape_text(str(event.info.get("name", "run")))
            yield {"ph": "M", "pid": _PID, "name": "process_labels", "args": {"labels": labels}}
        if isinstance(event, WorkerJoined) and event.worker not in tracks:
            tracks[event.worker] = len(tracks) + 1
            yield from _track(event, tracks[event.worker])
        for span in spans:
            yield _slice(span, tracks[span.worker])
            yield from flows.follow(span, tracks[span.worker])
        spans.clear()
        if isinstance(event, TagDecided | WorkerLeft | WorkerLost):
            yield _instant(event, fold.now, tracks[event.worker])
        for name, queue in (("SQ", fold.score_queue), ("UQ", fold.update_queue)):
            if depths.get(name) != len(queue):
                depths[name] = len(queue)
                yield {"ph": "C", "pid": _PID, "name": name, "ts": _us(fold.now), "args": {"micro-batches": len(queue)}}
    fold.close()
    for span in spans:
        yield _slice(span, tracks[span.worker])


class _Flows:
    """Joins the tasks of one micro-batch. An arrow's end binds to the slice that encloses it, so ends lie mid-slice."""

    def __init__(self) -> None:
        self._chains: dict[tuple[int, int], list[tuple[Span, int]]] = {}
        self._num_flows = 0

    def follow(self, span: Span, track: int) -> Iterator[dict[str, Any]]:
        key = span.step, span.index
        if span.outcome != "done" or span.kind not in {"generate", "assist", "score", "update"}:
            return
        if span.kind != "update":
            earlier = self._chains.get(key, []) if span.kind == "score" else []
            self._chains[key] = [*earlier, (span, track)]
            return
        self._num_flows += 1
        chain = [*self._chains.pop(key, []), (span, track)]
        for position, (member, tid) in enumerate(chain):
            phase = "s" if position == 0 else "f" if member is span else "t"
            yield {
                "ph": phase,
                "pid": _PID,
                "tid": tid,
                "ts": _us((member.start + member.end) / 2),
                "id": self._num_flows,
                "cat": "micro-batch",
                "name": f"s{span.step} mb{span.index}",
                "bp": "e",
            }


def _track(event: WorkerJoined, tid: int) -> Iterator[dict[str, Any]]:
    common = {"ph": "M", "pid": _PID, "tid": tid}
    yield common | {"name": "thread_name", "args": {"name": escape_text(event.worker)}}
    yield common | {"name": "thread_sort_index", "args": {"sort_index": ROLES.index(event.role) * 100_000 + tid}}


def _slice(span: Span, tid: int) -> dict[str, Any]:
    task = span.kind not in {"bubble", "lost"}
    start = _us(span.start)
    item: dict[str, Any] = {
        "ph": "X",
        "pid": _PID,
        "tid": tid,
        "ts": start,
        "dur": _us(span.end) - start,
        "cat": "task" if task else span.kind,
        "name": span.label,
        "args": {
            "step": span.step,
            "micro_batch": span.index,
            "version": span.version,
            "stale": span.stale,
            "outcome": span.outcome,
        }
        if task
        else {},
    }
    if colour := _COLOURS.get(span.kind):
        item["cname"] = colour
    return item


def _instant(event: TagDecided | WorkerLeft | WorkerLost, now: float, tid: int) -> dict[str, Any]:
    common = {"ph": "i", "s": "t", "pid": _PID, "tid": tid, "ts": _us(now)}
    if isinstance(event, WorkerLeft):
        return common | {"cat": "worker", "name": "left", "args": {"reason": escape_text(event.reason)}}
    if isinstance(event, WorkerLost):
        why = {"reason": event.reason, "error": escape_text(event.error)}
        return common | {"cat": "worker", "name": "lost", "args": why}
    args = {"step": event.step, "policy": event.policy, "reason": escape_text(event.reason), "saving_s": event.saving_s}
    return common | {"cat": "tag", "name": "assist" if event.assist else "skip", "args": args}


def _us(seconds: float) -> int:
    """Whole microseconds: equal instants round alike, so that neighbouring slices touch and never overlap."""
    return round(seconds * 1e6)
