"""The report as one web page: no script, nothing loaded from anywhere, light and dark."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from digen.observe import svg
from digen.observe.ledger import Span
from digen.observe.report import (
    OUTCOMES,
    any_loss,
    describe_prediction,
    describe_schedule,
    evaluations_shown,
    losses_shown,
    lost_time_shown,
)
from digen.observe.text import (
    escape_html,
    escape_html_lines,
    format_bytes,
    format_duration,
    format_metrics,
    format_share,
    plural,
)

MAX_IMAGE_BYTES = 8 * 1024 * 1024
"""Most bytes of sample grids that a page embeds."""

MAX_LOSSES = 100
"""Most rows of a table of losses, the last ones; ``report.json`` has all."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the page may do: nothing but show itself."""

_PICTURES = {"png": b"\x89PNG\r\n\x1a\n", "gif": b"GIF89a"}
"""What a page embeds, by how it begins."""

_KINDS = (
    *("encode", "generate", "assist", "score", "update", "commit", "publish", "load", "switch", "snapshot"),
    *("checkpoint", "evaluate"),
)

_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("± group", "reward/group_std", "{:.3f}"),
    ("generators idle", "pipeline/bubble_ratio/generator", "{:.0%}"),
    ("trainer idle", "pipeline/bubble_ratio/trainer", "{:.0%}"),
    ("stale", "staleness/ratio", "{:.0%}"),
    ("assists", "tag/inserted", "{:.0f}"),
    ("predicted s", "pipeline/makespan_predicted_s", "{:.2f}"),
    ("deciding ms", "tag/search_ms", "{:.1f}"),
    ("policy loss", "loss/policy", "{:.2e}"),
    ("max ratio", "ratio/max", "{:.4f}"),
    ("clipped", "clip_fraction", "{:.1%}"),
    ("gradient", "grad_norm", "{:.3f}"),
    ("learning rate", "lr", "{:.1e}"),
    ("samples/s", "perf/samples_per_s", "{:.1f}"),
)
"""Columns of the step table: heading, metric, format. A metric that no step has gets no column."""


def render(report: dict[str, Any], config_text: str = "", images: Sequence[Path] = ()) -> str:
    """The page of a report made by :func:`digen.observe.report.build_report`.

    Args:
        report: the report.
        config_text: the resolved config, shown as it is.
        images: PNG files to embed, up to ``MAX_IMAGE_BYTES`` in all; the newest and the oldest first.
    """
    name = escape_html(report["run"]["name"])
    style = _style()
    sections = [
        _header(report),
        _cards(report),
        _section("Advice", f'<p class="advice">{escape_html(report["advice"])}</p>' + _notes(report)),
        _section("Reward", _reward(report)),
        _section("Where the time went", _bubbles(report)),
        _section("Timeline of the last steps", _timeline(report)),
        _section("Losses", _losses(report)),
        _section("Trainer-assisted generation", _assists(report["tag"])),
        _section("Staleness", _staleness(report)),
        _section("Samples", _samples(images)),
        _section("Workers", _workers(report)),
        _section("Counts", _counts(report)),
        _section("Steps", _steps(report)),
        _section("Configuration", _config(config_text)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{name} · digen</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>" if body else ""


def _header(report: dict[str, Any]) -> str:
    outcome = report["outcome"]
    error = f'<p class="error">{escape_html(report["error"], 2000)}</p>' if report["error"] else ""
    resumed = f" · resumed {report['num_segments'] - 1}×" if report["num_segments"] > 1 else ""
    return (
        f'<header>\n<h1>{escape_html(report["run"]["name"])} <span class="badge {outcome}">{outcome}</span></h1>\n'
        f"<p>{escape_html(describe_schedule(report['run']))}{resumed}</p>{error}\n</header>"
    )


def _cards(report: dict[str, Any]) -> str:
    cards = [("steps", f"{report['num_steps']} / {report['run']['num_steps']}", format_duration(report["wall_s"]))]
    if report["steps_per_minute"]:
        step_s = format_duration(report["median_step_s"])
        cards.append(("steps a minute", f"{report['steps_per_minute']:.1f}", f"{step_s} a step, {report['median_of']}"))
    if reward := report["reward"]:
        cards.append(("reward", f"{reward['first']:.3f} → {reward['last']:.3f}", f"best {reward['best']:.3f}"))
    for item in evaluations_shown(report):
        metric, value = next(iter(item["metrics"].items()), ("", float("nan")))
        cards.append(
            (f"evaluation of v{item['version']}", f"{value:.3f}", f"{metric}, {plural(item['num_samples'], 'sample')}")
        )
    for role, bubbles in report["bubbles"].items():
        cause = next(iter(bubbles["causes"]), "")
        who = "trainer" if role == "trainer" else f"{role}s"
        cards.append((f"{who} idle", format_share(bubbles["share"]), f"mostly {cause}" if cause else "never"))
    cards.append(("overlap", format_share(report["overlap_ratio"]), "generation and training at once"))
    items = "".join(
        f'<div><dt>{escape_html(name)}</dt><dd>{escape_html(value)}</dd><dd class="sub">{escape_html(sub)}</dd></div>'
        for name, value, sub in cards
    )
    return f'<dl class="cards">{items}</dl>'


def _notes(report: dict[str, Any]) -> str:
    return "".join(f'<p class="note">{escape_html(note)}</p>' for note in report["notes"])


def _style() -> str:
    return Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def reward_plot(report: dict[str, Any]) -> str:
    """The reward curve as an SVG file of its own; empty without a step."""
    chart = _reward_chart(report)
    return chart.replace("<title>", f"<style>{_style()}</style><title>", 1)


def _reward_chart(report: dict[str, Any]) -> str:
    points = []
    for step in report["steps"]:
        values = step["values"]
        if "reward/mean" in values:
            points.append(
                (step["step"], values["reward/mean"], values.get("reward/group_std", values.get("reward/std", 0.0)))
            )
    return svg.line_chart("Mean reward by step", "step", points) if points else ""


def _reward(report: dict[str, Any]) -> str:
    chart = _reward_chart(report)
    if not chart:
        return ""
    return _figure(
        chart,
        "Mean reward of each step's samples; the band is the mean over groups of a group's own standard deviation.",
    )


def _bubbles(report: dict[str, Any]) -> str:
    rows, causes = [], dict[str, None]()
    for worker in report["workers"]:
        idle_s = worker["bubble_s"] | ({"lost": worker["lost_s"]} if worker["lost_s"] else {})
        wall = worker["wall_s"] + worker["lost_s"] or 1.0
        shares = [("busy", worker["busy_s"] / wall)]
        shares += [(cause, seconds / wall) for cause, seconds in idle_s.items()]
        causes |= dict.fromkeys(idle_s)
        rows.append((worker["worker"], shares))
    if not rows:
        return ""
    return _figure(
        svg.stacked_bars("Share of each worker's time, busy and idle by cause", rows) + _legend(["busy", *causes]),
        "Share of each worker's time. Everything that is not busy is a bubble, by cause, or the time that the worker "
        "was lost.",
    )


def _timeline(report: dict[str, Any]) -> str:
    timeline = report["timeline"]
    spans = [Span(**span) for span in timeline["spans"]]
    if not spans or timeline["to_s"] <= timeline["from_s"]:
        return ""
    workers = [worker["worker"] for worker in report["workers"]]
    window = timeline["from_s"], timeline["to_s"]
    chart = svg.gantt("What each worker did", workers, spans, [tuple(item) for item in timeline["commits"]], window)
    kinds = {span.kind for span in spans}
    extra = ["stale"] * any(span.stale for span in spans)
    outcomes = {span.outcome for span in spans}
    extra += [outcome for outcome in ("failed", "cancelled", "unfinished") if outcome in outcomes]
    extra += ["lost"] * ("lost" in kinds)
    return _figure(
        chart + _legend([*(kind for kind in _KINDS if kind in kinds), *extra]),
        "Numbers are micro-batches; vertical lines are optimizer steps. Point at a bar for its task.",
    )


def _losses(report: dict[str, Any]) -> str:
    losses, counts = report["losses"], report["counts"]
    if not any_loss(counts):
        return ""
    parts = [f"<p>{losses_shown(counts)}{f': {lost_time_shown(losses)}' if losses['workers'] else ''}.</p>"]
    if losses["workers"]:
        head = ["second", "worker", "role", "reason", "task it had", "it was", "seconds until back", "error"]
        parts.append(_losses_table(head, [_lost_worker(item) for item in losses["workers"]]))
    if losses["quarantined"]:
        parts.append("<h3>Micro-batches in quarantine</h3>")
        head = ["second", "step", "micro-batch", "prompts", "attempts", "error"]
        parts.append(_losses_table(head, [_given_up(item) for item in losses["quarantined"]]))
    if losses["rollbacks"]:
        parts.append("<h3>Rollbacks</h3>")
        head = ["second", "from", "back to", "steps trained again", "rollouts thrown away"]
        parts.append(_losses_table(head, [_went_back(item) for item in losses["rollbacks"]]))
    return "\n".join(parts)


def _losses_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    omitted = f'<p class="note">{len(rows) - MAX_LOSSES} earlier ones are in report.json.</p>'
    return f'<div class="left losses">{_table(head, rows[-MAX_LOSSES:])}</div>' + omitted * (len(rows) > MAX_LOSSES)


def _lost_worker(item: dict[str, Any]) -> list[str]:
    back = "not before the run ended" if item["comes_back"] else "out for good"
    if item["back_s"] is not None:
        back = f"{item['back_s']:.2f}"
    who = [f"{item['time']:.1f}", item["worker"], item["role"], item["reason"]]
    return [*who, item["task"] or "–", item["task_fate"] or "–", back, item["error"]]


def _given_up(item: dict[str, Any]) -> list[str]:
    prompts = " · ".join(item["prompts"])
    attempts = str(item["attempts"]) if item["attempts"] else "left out"
    return [f"{item['time']:.1f}", str(item["step"]), str(item["index"]), prompts, attempts, item["error"]]


def _went_back(item: dict[str, Any]) -> list[str]:
    before, after = item["from_version"], item["version"]
    return [f"{item['time']:.1f}", f"v{before}", f"v{after}", str(before - after), str(item["num_discarded"])]


def _assists(tag: dict[str, Any] | None) -> str:
    if tag is None:
        return ""
    facts = [
        ("policy", tag["policy"]),
        ("bubbles", f"assisted in {tag['num_inserted']}, skipped {tag['num_skipped']}"),
        ("assists", f"{format_share(tag['assist_share'])} of all generations"),
        ("switch", f"{1000 * tag['switch_s_per_assist']:.2f} ms an assist"),
    ]
    if tag["search_ms_per_decision"] is not None:
        facts.append(("deciding", f"{tag['search_ms_per_decision']:.2f} ms a bubble"))
    if prediction := tag["prediction"]:
        facts.append(("prediction", describe_prediction(prediction)))
    rows = [
        [
            str(row["num_assists"]),
            str(row["num_steps"]),
            f"{row['actual_s']:.3f}",
            f"{row['predicted_s']:.3f}" if row["predicted_s"] is not None else "–",
        ]
        for row in tag["by_assists"]
    ]
    head = ["assists in a step", "steps", "seconds, median", "predicted"]
    return _facts(facts) + (_table(head, rows) if rows else "")


def _staleness(report: dict[str, Any]) -> str:
    counts = {int(value): count for value, count in report["staleness"]["histogram"].items()}
    if not counts:
        return ""
    total, stale = sum(counts.values()), report["staleness"]["num_stale"]
    if not stale:
        what = "The only micro-batch was" if total == 1 else f"All {total} micro-batches were"
        return f"<p>{what} fresh: generated by the weights that they updated.</p>"
    return _figure(
        svg.histogram("Micro-batches by staleness", "staleness: step − version", counts),
        f"{stale} of {total} updated micro-batches ({format_share(stale / total)}) were generated by earlier weights.",
    )


def _samples(images: Sequence[Path]) -> str:
    embedded: dict[Path, str] = {}
    room = MAX_IMAGE_BYTES
    for path in [*images[-1:], *images[:1], *reversed(images[1:-1])]:
        if path in embedded or path.is_symlink() or not path.is_file() or path.stat().st_size > room:
            continue
        data = path.read_bytes()
        for kind, magic in _PICTURES.items():
            if data.startswith(magic):
                room -= len(data)
                embedded[path] = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    figures = "".join(
        f'<figure><img alt="Samples {escape_html(path.stem)}" src="{embedded[path]}">'
        f"<figcaption>{escape_html(path.stem)}</figcaption></figure>"
        for path in images
        if path in embedded
    )
    omitted = len(images) - len(embedded)
    note = f'<p class="note">{omitted} more in the run\'s folder.</p>' if omitted else ""
    return f'<div class="grids">{figures}</div>{note}' if images else ""


def _workers(report: dict[str, Any]) -> str:
    rows = [
        [
            worker["worker"],
            worker["role"],
            f"v{worker['version']}",
            format_duration(worker["wall_s"]),
            format_duration(worker["lost_s"]) if worker["lost_s"] else "–",
            format_share(worker["bubble_share"]),
            ", ".join(
                f"{worker['num_tasks'].get(kind, 0)} {kind} ({format_duration(worker['seconds'][kind])})"
                for kind in _KINDS
                if kind in worker["seconds"]
            ),
        ]
        for worker in report["workers"]
    ]
    table = _table(["worker", "role", "weights", "time", "lost for", "idle", "tasks done"], rows)
    return f'<div class="left">{table}</div>' if rows else ""


def _counts(report: dict[str, Any]) -> str:
    counts, kept, sync = report["counts"], report["conservation"], report["weight_sync"]
    verdict = "adds up" if kept["holds"] else "does not add up: a bug in digen"
    ended = " + ".join(f"{counts[f'num_tasks_{outcome}']} {outcome}" for outcome in OUTCOMES)
    stages = f"{kept['num_generated']} generated, {kept['num_scored']} scored, {kept['num_updated']} updated"
    decided = f"{counts['num_tag_inserted']} decided, {counts['num_tag_skipped']} bubbles skipped"
    spread = (
        f"{counts['num_groups_spanning']} over several micro-batches, {counts['num_groups_mixed']} of several versions"
    )
    synced = f"{sync['num_publishes']} published, {sync['num_loads']} loaded"
    facts = [
        ("tasks", f"{counts['num_tasks_started']} started = {ended} ({verdict})"),
        ("micro-batches", f"{stages}, {kept['num_empty']} empty, {kept['num_unsettled']} generated in vain"),
        ("assists", f"{counts['num_assists']} ({decided}), switch {format_duration(counts['switch_s'])}"),
        ("groups", f"{counts['num_groups']}, {spread}"),
        ("weight sync", f"{synced}, {format_duration(sync['seconds'])} worker time, {format_bytes(sync['bytes'])}"),
    ]
    if any_loss(counts):
        facts.append(("losses", losses_shown(counts)))
    if report["balanced_generators"]:
        facts.append(("balance", f"{report['balanced_generators']:.1f} such generators keep one such trainer busy"))
    if report["checkpoint"]:
        facts.append(("checkpoint", f"v{report['checkpoint']['version']}, {report['checkpoint']['path']}"))
    return _facts(facts)


def _steps(report: dict[str, Any]) -> str:
    steps = report["steps"]
    columns = [column for column in _COLUMNS if any(column[1] in step["values"] for step in steps)]
    head = ["step", "seconds", *(name for name, _, _ in columns)]
    rows = [
        [
            str(step["step"]),
            f"{step['duration_s']:.2f}",
            *(form.format(step["values"][key]) if key in step["values"] else "–" for _, key, form in columns),
        ]
        for step in steps
    ]
    evaluations = "".join(
        f"<p>Evaluation of v{item['version']}, {plural(item['num_samples'], 'sample')}: "
        f"{escape_html(format_metrics(item['metrics']))}</p>"
        for item in report["evaluations"]["all"]
    )
    all_steps = "All " * (len(rows) > 1) + plural(len(rows), "step")
    table = f"<details><summary>{all_steps}</summary>{_table(head, rows)}</details>" if rows else ""
    return evaluations + table


def _config(text: str) -> str:
    if not text:
        return ""
    return f"<details><summary>Resolved configuration</summary><pre>{escape_html_lines(text)}</pre></details>"


def _figure(chart: str, caption: str) -> str:
    return f"<figure>{chart}<figcaption>{escape_html(caption)}</figcaption></figure>"


def _legend(names: Iterable[str]) -> str:
    return '<ul class="legend">' + "".join(f'<li><i class="{name}"></i>{name}</li>' for name in names) + "</ul>"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{name}</dt><dd>{escape_html(text)}</dd>" for name, text in facts)
    return f'<dl class="facts">{rows}</dl>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{escape_html(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape_html(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
