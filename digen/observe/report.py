"""The report of a run: a JSON-able dict, its text and, by :mod:`digen.observe.page`, its web page.

Everything is folded from ``events.jsonl``; a crashed, interrupted or resumed run has a report too.
"""

from __future__ import annotations

import json
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from digen.events import AnyEvent, Evaluated, read_events
from digen.observe.advice import LINEAR_NOTE, advise, balance
from digen.observe.assists import summarize_assists
from digen.observe.fold import ROLES, Fold
from digen.observe.ledger import WORKER_LOST, Outcome, Span, WorkerLedger
from digen.observe.steps import StepSummary, step_time
from digen.observe.text import escape_text, format_bytes, format_duration, format_metrics, format_share, plural

OUTCOMES: tuple[str, ...] = get_args(Outcome)
"""How tasks end."""

TIMELINE_STEPS = 3
"""Steps that the timeline shows, the last ones."""

TIMELINE_SPANS = 3000
"""Most tasks and bubbles in the timeline; with many workers it shows less time instead of growing."""


def build_report(events: Iterable[AnyEvent]) -> dict[str, Any]:
    """Everything worth knowing about a run, as plain dicts, lists, strings and numbers.

    Args:
        events: the stream, complete or not; times of resumed segments are laid end to end.
    """
    spans: deque[Span] = deque(maxlen=TIMELINE_SPANS)
    fold = Fold.of(events, spans.append)
    steps = list(fold.steps.values())
    typical = step_time(steps)
    colocated = bool(fold.workers) and not fold.of_role("generator")
    return {
        "schema": 1,
        "run": _run(fold, colocated),
        "outcome": fold.finished.outcome if fold.finished else "unfinished",
        "error": fold.finished.error if fold.finished else "",
        "num_segments": fold.num_segments,
        "num_steps": steps[-1].version if steps else 0,
        "wall_s": fold.now,
        "reward": _reward(steps),
        "evaluations": _evaluations(fold.evaluations),
        "median_step_s": typical.median_s if typical else None,
        "median_of": typical.describe() if typical else "",
        "steps_per_minute": 60 / typical.median_s if typical and typical.median_s else None,
        "overlap_ratio": fold.overlap_ratio,
        "bubbles": {role: bubble_shares(fold.of_role(role), fold.now) for role in ROLES if fold.of_role(role)},
        "workers": [_worker(ledger, fold.now) for role in ROLES for ledger in fold.of_role(role)],
        "balanced_generators": None if colocated else balance(fold),
        "staleness": {
            "histogram": {str(value): fold.staleness[value] for value in sorted(fold.staleness)},
            "num_stale": sum(count for value, count in fold.staleness.items() if value > 0),
        },
        "counts": _counts(fold),
        "losses": {"lost_s": fold.lost_s, "idle_s": fold.idle_s(WORKER_LOST), **fold.losses.as_json()},
        "tag": summarize_assists(fold),
        "conservation": _conservation(fold),
        "weight_sync": {
            "seconds": fold.seconds("publish", "load"),
            "bytes": fold.sync_bytes,
            "num_publishes": fold.tasks("publish"),
            "num_loads": fold.tasks("load"),
        },
        "checkpoint": {"version": fold.checkpoint.version, "path": fold.checkpoint.path} if fold.checkpoint else None,
        "advice": advise(fold),
        "notes": [LINEAR_NOTE] if colocated else [],
        "steps": [_step(summary) for summary in steps],
        "timeline": _timeline(fold, steps, spans),
    }


def write_report(folder: Path) -> dict[str, Any]:
    """Read a run's ``events.jsonl``, ``config.yaml`` and its pictures (``samples/*.png`` and ``*.gif``); write reports.

    They are ``report.json`` (also returned), ``report.html``, one page that loads nothing from anywhere, and
    ``reward.svg``, its reward curve.

    Raises:
        FileNotFoundError: the folder holds no ``events.jsonl``.
        ValueError: ``events.jsonl`` is damaged before its last line.
    """
    from digen.observe.page import render, reward_plot

    report = build_report(read_events(folder / "events.jsonl"))
    config = folder / "config.yaml"
    config_text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    images = sorted(path for kind in ("png", "gif") for path in (folder / "samples").glob(f"*.{kind}"))
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(render(report, config_text, images), encoding="utf-8")
    (folder / "reward.svg").write_text(reward_plot(report), encoding="utf-8")
    return report


def text_summary(report: dict[str, Any]) -> str:
    """The report in a dozen aligned lines, safe to print to a terminal; one where nothing was recorded."""
    if not report:
        return "nothing was recorded"
    head = f"{escape_text(report['run']['name'])}: {report['outcome']}, "
    head += f"{report['num_steps']} of {report['run']['num_steps']} steps in {format_duration(report['wall_s'])}"
    if report["num_segments"] > 1:
        head += f", resumed {report['num_segments'] - 1}x"
    rows = list(_summary_rows(report))
    width = max(len(name) for name, _ in rows)
    lines = (
        textwrap.fill(text, 110, initial_indent=f"  {name:<{width}}  ", subsequent_indent=" " * (width + 4))
        for name, text in rows
    )
    return "\n".join([head, *lines])


def _summary_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "mode", describe_schedule(report["run"])
    if report["error"]:
        yield "error", escape_text(report["error"])
    if report["steps_per_minute"]:
        step_s = format_duration(report["median_step_s"])
        yield "speed", f"{report['steps_per_minute']:.1f} steps/min, {step_s} a step ({report['median_of']})"
    if reward := report["reward"]:
        yield "reward", f"{reward['first']:.3f} → {reward['last']:.3f} (best {reward['best']:.3f})"
    for item in evaluations_shown(report):
        yield "evaluation", f"v{item['version']}: {format_metrics(item['metrics'])}"
    for role, bubbles in report["bubbles"].items():
        causes = [f"{cause} {format_share(share)}" for cause, share in bubbles["causes"].items() if share >= 0.005]
        yield f"{role} idle", format_share(bubbles["share"]) + (f" ({', '.join(causes)})" if causes else "")
    yield "overlap", f"{format_share(report['overlap_ratio'])} of the time, generation and training at once"
    if histogram := report["staleness"]["histogram"]:
        bars = ", ".join(f"{count} at {value}" for value, count in histogram.items())
        yield "staleness", f"micro-batches: {bars}"
    counts, sync = report["counts"], report["weight_sync"]
    ended_badly = ", ".join(f"{counts[f'num_tasks_{outcome}']} {outcome}" for outcome in _ended_badly(counts))
    assists = plural(counts["num_assists"], "assist")
    yield "tasks", f"{assists}, switch {format_duration(counts['switch_s'])}, {ended_badly}"
    if any_loss(counts):
        yield "losses", losses_shown(counts)
    if counts["num_workers_lost"]:
        yield "lost time", lost_time_shown(report["losses"])
    yield from _tag_rows(report["tag"])
    size = f", {format_bytes(sync['bytes'])}" if sync["bytes"] else ""
    yield "weight sync", f"{plural(sync['num_loads'], 'load')}, {format_duration(sync['seconds'])}{size}"
    if report["checkpoint"]:
        path = escape_text(report["checkpoint"]["path"])
        yield "checkpoint", f"v{report['checkpoint']['version']} {path}{_how_to_continue(report['outcome'])}"
    yield "next", report["advice"]
    for note in report["notes"]:
        yield "note", note


def _how_to_continue(outcome: str) -> str:
    """What to add to the last checkpoint. Of a run that failed, the advice says it."""
    if outcome not in {"unfinished", "drained", "stopped"}:
        return ""
    return f"; {'unless it still runs, ' * (outcome == 'unfinished')}continue from it with --resume latest"


def _tag_rows(tag: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if tag is None:
        return
    assisted = plural(tag["num_inserted"], "bubble")
    text = f"{escape_text(tag['policy'])}: assisted in {assisted}, skipped {tag['num_skipped']}"
    if tag["search_ms_per_decision"] is not None:
        text += f", {tag['search_ms_per_decision']:.2f} ms a decision"
    yield "TAG", text
    if prediction := tag["prediction"]:
        yield "prediction", describe_prediction(prediction)


def describe_prediction(prediction: dict[str, float]) -> str:
    """How far predicted step times were from the actual ones."""
    return (
        f"of step time: off by {100 * prediction['mean']:.1f} % on average, at most {100 * prediction['max']:.1f} %, "
        f"over {plural(int(prediction['num_steps']), 'step')}"
    )


def describe_schedule(run: dict[str, Any]) -> str:
    """``tag: TAG greedy, window 1, sync pull, 8 micro-batches a step``."""
    mode = f"{escape_text(run['mode'])}: " if run["mode"] else ""
    stale = f" (at most {run['stale_limit']} stale)" if run["window"] > 1 else ""
    barrier = ", stage barrier" if run["barrier"] else ""
    sync = f"sync {escape_text(run['sync'])}{barrier}, {plural(run['num_micro_batches'], 'micro-batch')} a step"
    return f"{mode}TAG {escape_text(run['tag'])}, window {run['window']}{stale}, {sync}"


def evaluations_shown(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The evaluations before and after training; one of them, or none, where there are no more."""
    evaluations = report["evaluations"]
    return [item for item in (evaluations["before"], evaluations["after"]) if item is not None]


def _run(fold: Fold, colocated: bool) -> dict[str, Any]:
    if fold.run is None:
        return {
            "name": "run", "mode": "", "num_steps": 0, "num_micro_batches": 0, "window": 1, "stale_limit": 0,
            "sync": "", "update_order": "", "tag": "", "barrier": False,
        }  # fmt: skip
    fields = msgspec.structs.asdict(fold.run)
    info = fields.pop("info")
    mode = info.get("mode", "colocated" if colocated else "")
    del fields["time"], fields["start_step"]
    return {"name": str(info.get("name", "run")), "mode": str(mode), **fields}


def _reward(steps: list[StepSummary]) -> dict[str, float]:
    means = [step.values["reward/mean"] for step in steps if "reward/mean" in step.values]
    return {"first": means[0], "last": means[-1], "best": max(means)} if means else {}


def _evaluations(evaluations: list[Evaluated]) -> dict[str, Any]:
    plain = [
        {"version": item.version, "num_samples": item.num_samples, "metrics": item.metrics} for item in evaluations
    ]
    plain.sort(key=lambda item: item["version"])  # type: ignore[arg-type,return-value]  # versions are ints
    return {"all": plain, "before": plain[0] if plain else None, "after": plain[-1] if len(plain) > 1 else None}


def bubble_shares(ledgers: list[WorkerLedger], now: float) -> dict[str, Any]:
    """``share``, the idle share of a role's worker-seconds, and ``causes``, its parts by cause, the largest first."""
    seconds: dict[str, float] = {}
    for ledger in ledgers:
        for cause, value in ledger.bubble_s.items():
            seconds[cause] = seconds.get(cause, 0.0) + value
    wall = sum(sum(ledger.totals(now)) for ledger in ledgers) or 1.0
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return {"share": sum(seconds.values()) / wall, "causes": {cause: value / wall for cause, value in ordered}}


def _worker(ledger: WorkerLedger, now: float) -> dict[str, Any]:
    return {
        "worker": ledger.name,
        "role": ledger.role,
        "version": ledger.version,
        "wall_s": ledger.wall_s,
        "lost_s": ledger.lost_s,
        "busy_s": ledger.busy_s,
        "bubble_s": dict(sorted(ledger.bubble_s.items())),
        "bubble_share": ledger.idle_share(now),
        "seconds": dict(sorted(ledger.kind_s.items())),
        "num_tasks": dict(sorted(ledger.num_tasks.items())),
    }


def _counts(fold: Fold) -> dict[str, Any]:
    counts = {f"num_{name}": fold.counts[f"num_{name}"] for name in (
        "tasks_started", *(f"tasks_{outcome}" for outcome in OUTCOMES), "stale_starts", "groups", "groups_spanning",
        "groups_mixed", "tag_inserted", "tag_skipped", "commits", "workers_lost", "restarts", "retries", "quarantined",
        "rollbacks", "rollouts_lost",
    )}  # fmt: skip
    return counts | {"num_assists": fold.tasks("assist"), "switch_s": fold.seconds("switch")}


def _ended_badly(counts: dict[str, Any]) -> list[str]:
    """Outcomes to name: how many tasks failed is always said."""
    return [each for each in OUTCOMES[1:] if counts[f"num_tasks_{each}"] or each == "failed"]


def any_loss(counts: dict[str, Any]) -> bool:
    """Whether anything was lost or given up."""
    return any(
        counts[f"num_{name}"] for name in ("workers_lost", "retries", "rollouts_lost", "quarantined", "rollbacks")
    )


def losses_shown(counts: dict[str, Any]) -> str:
    """What was lost and what became of it, in words."""
    parts = []
    if counts["num_workers_lost"]:
        parts += [f"{plural(counts['num_workers_lost'], 'worker')} lost", f"{counts['num_restarts']} restarted"]
    if counts["num_retries"]:
        parts.append(f"{plural(counts['num_retries'], 'task')} repeated")
    if counts["num_rollouts_lost"]:
        parts.append(f"{plural(counts['num_rollouts_lost'], 'rollout')} lost")
    if counts["num_quarantined"]:
        parts.append(f"{counts['num_quarantined']} quarantined")
    if counts["num_rollbacks"]:
        parts.append(plural(counts["num_rollbacks"], "rollback"))
    return ", ".join(parts)


def lost_time_shown(losses: dict[str, Any]) -> str:
    """How long workers were lost, in words."""
    lost, idle = format_duration(losses["lost_s"]), format_duration(losses["idle_s"])
    return f"workers were lost for {lost} in all; others idled {idle} meanwhile"


def _conservation(fold: Fold) -> dict[str, Any]:
    """Nothing vanishes: what was started has ended somehow, and what was settled had been generated."""
    counts = fold.counts
    settled = counts["num_updated"] + counts["num_empty"]
    ended = sum(counts[f"num_tasks_{outcome}"] for outcome in OUTCOMES)
    generated = fold.tasks("generate", "assist")
    return {
        "num_generated": generated,
        "num_scored": fold.tasks("score"),
        "num_updated": counts["num_updated"],
        "num_empty": counts["num_empty"],
        "num_unsettled": generated - settled,
        "holds": counts["num_tasks_started"] == ended and settled <= generated,
    }


def _step(summary: StepSummary) -> dict[str, Any]:
    return {
        "step": summary.step,
        "version": summary.version,
        "time": summary.time,
        "duration_s": summary.duration_s,
        "values": dict(sorted(summary.values.items())),
    }


def _timeline(fold: Fold, steps: list[StepSummary], spans: deque[Span]) -> dict[str, Any]:
    """Tasks and bubbles of the last few steps; of a run that broke off, up to where it did."""
    begin = steps[-TIMELINE_STEPS - 1].time if len(steps) > TIMELINE_STEPS else 0.0
    if len(spans) == TIMELINE_SPANS:
        begin = max(begin, min(span.start for span in spans))
    end = fold.now
    if steps and fold.finished and fold.finished.outcome == "completed":
        end = min(end, steps[-1].time + 0.05 * (steps[-1].time - begin))
    shown = [span for span in spans if span.end > begin and span.start < end]
    return {
        "from_s": begin,
        "to_s": end,
        "commits": [[step.time, step.version] for step in steps if begin < step.time <= end],
        "spans": [msgspec.structs.asdict(span) for span in shown],
    }
