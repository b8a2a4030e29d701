"""Small charts as SVG text: no script, no external resource, colours by CSS class, a title for screen readers.

Charts are ``WIDTH`` units wide and scale with the page. Every text that comes from outside is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from digen.observe.ledger import Span
from digen.observe.text import escape_html, format_duration, format_share

WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 38
_LABEL = 110
"""Room for the names of workers, left of bars and timelines."""

_STALE_PATTERN = (
    '<defs><pattern id="stale" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2.4" height="6" class="hatch"/></pattern></defs>'
)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that span ``[low, high]``, its ends included."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def line_chart(title: str, x_name: str, points: Sequence[tuple[float, float, float]]) -> str:
    """A curve with a band.

    Args:
        title: what is shown, for screen readers.
        x_name: label of the x axis.
        points: (x, y, half height of the band), x ascending.
    """
    height = 300
    low, high = points[0][0], points[-1][0]
    x_ticks = [tick for tick in nice_ticks(low, high, 10) if tick == int(tick) and low <= tick <= high]
    y_ticks = nice_ticks(min(y - half for _, y, half in points), max(y + half for _, y, half in points))
    at_x = _scale(low, max(high, low + 1), _LEFT, WIDTH - _RIGHT)
    at_y = _scale(y_ticks[0], y_ticks[-1], height - _BOTTOM, _TOP)
    upper = [f"{at_x(x):.1f},{at_y(y + half):.1f}" for x, y, half in points]
    lower = [f"{at_x(x):.1f},{at_y(y - half):.1f}" for x, y, half in reversed(points)]
    curve = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y, _ in points)
    parts = [_grid_y(y_ticks, at_y), *_labels_x(((at_x(tick), f"{tick:g}") for tick in x_ticks), height, x_name)]
    parts.append(
        f'<polygon class="band" points="{" ".join(upper + lower)}"/><polyline class="curve" points="{curve}"/>'
    )
    radius = 3 if len(points) <= 60 else 1.5
    parts += [
        f'<circle class="dot" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="{radius}">'
        f"<title>{escape_html(x_name)} {x:g}: {y:.4g} ± {half:.2g}</title></circle>"
        for x, y, half in points
    ]
    return _svg(title, height, parts)


def histogram(title: str, x_name: str, counts: Mapping[int, int]) -> str:
    """One bar a whole number, with its count above it."""
    height = 170
    values = range(min(counts), max(counts) + 1)
    ticks = nice_ticks(0, max(counts.values()) * 1.1, 3)
    at_y = _scale(0, ticks[-1], height - _BOTTOM, _TOP)
    slot = (WIDTH - _LEFT - _RIGHT) / len(values)
    bar = min(90.0, slot * 0.7)
    total = sum(counts.values())
    parts = [_grid_y(ticks, at_y)]
    centres = [_LEFT + slot * (number + 0.5) for number in range(len(values))]
    for value, centre in zip(values, centres, strict=True):
        count, top = counts.get(value, 0), at_y(counts.get(value, 0))
        kind = "fresh" if value == 0 else "old"
        parts.append(
            f'<rect class="{kind}" x="{centre - bar / 2:.1f}" y="{top:.1f}" width="{bar:.1f}" '
            f'height="{at_y(0) - top:.1f}" rx="3">'
            f"<title>{value}: {count} ({format_share(count / total)})</title></rect>"
            f'<text class="strong" x="{centre:.1f}" y="{top - 5:.1f}" text-anchor="middle">{count}</text>'
        )
    parts += _labels_x(((centre, str(value)) for value, centre in zip(values, centres, strict=True)), height, x_name)
    return _svg(title, height, parts)


def stacked_bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """One horizontal bar a row, 0 to 100 %.

    Args:
        title: what is shown, for screen readers.
        rows: (label, [(class name, share from 0 to 1), ...]), left to right.
    """
    pitch, bar = 34, 22
    height = pitch * len(rows) + 26
    at_x = _scale(0, 1, _LABEL, WIDTH - _RIGHT)
    parts: list[str] = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        anchor = "end" if share == 1 else "middle"
        parts.append(
            f'<line class="grid" x1="{at_x(share):.1f}" x2="{at_x(share):.1f}" y1="0" y2="{height - 22}"/>'
            f'<text x="{at_x(share):.1f}" y="{height - 6}" text-anchor="{anchor}">{format_share(share)}</text>'
        )
    for number, (label, shares) in enumerate(rows):
        y, left = number * pitch + 4, 0.0
        parts.append(_row_label(label, y + bar / 2))
        for name, share in shares:
            width = at_x(left + share) - at_x(left)
            parts.append(
                f'<rect class="{name}" x="{at_x(left):.1f}" y="{y}" width="{width:.2f}" height="{bar}">'
                f"<title>{escape_html(label)}: {name} {100 * share:.1f} %</title></rect>"
            )
            if width > 42:
                parts.append(
                    f'<text class="on-{name} inside" x="{at_x(left) + width / 2:.1f}" y="{y + bar / 2 + 4:.1f}" '
                    f'text-anchor="middle">{format_share(share)}</text>'
                )
            left += share
    return _svg(title, height, parts)


def gantt(
    title: str,
    workers: Sequence[str],
    spans: Iterable[Span],
    commits: Sequence[tuple[float, int]],
    window: tuple[float, float],
) -> str:
    """What every worker did over time.

    Args:
        title: what is shown, for screen readers.
        workers: rows, top to bottom.
        spans: tasks and bubbles; what lies outside of ``window`` is cut off. Stale micro-batches are hatched.
        commits: (time, version) of optimizer steps, drawn as lines.
        window: first and last second shown.
    """
    pitch, bar, top = 36, 26, 22
    height = top + pitch * len(workers) + 36
    start, end = window
    at_x = _scale(start, end, _LABEL, WIDTH - _RIGHT)
    bottom = top + pitch * len(workers) - (pitch - bar)
    rows = {worker: top + number * pitch for number, worker in enumerate(workers)}
    parts = [_STALE_PATTERN]
    for worker, y in rows.items():
        parts.append(_row_label(worker, y + bar / 2))
        parts.append(
            f'<rect class="track" x="{_LABEL}" y="{y}" width="{WIDTH - _RIGHT - _LABEL}" height="{bar}" rx="3"/>'
        )
    for span in spans:
        if span.end > start and span.start < end and span.worker in rows:
            left, right = at_x(max(span.start, start)), at_x(min(span.end, end))
            parts.append(_bar(span, left, right - left, rows[span.worker], bar))
    for time, version in commits:
        if start <= time <= end:
            x = at_x(time)
            parts.append(
                f'<line class="commit-line" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{bottom + 6}"/>'
                f'<text x="{x:.1f}" y="{top - 9}" text-anchor="middle">v{version}</text>'
            )
    ticks = [tick for tick in nice_ticks(start, end, 8) if start <= tick <= end]
    parts += _labels_x(((at_x(tick), f"{tick:g}") for tick in ticks), height, "seconds since the run began")
    return _svg(title, height, parts)


def _bar(span: Span, left: float, width: float, y: float, height: float) -> str:
    place = f'x="{left:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{height}"'
    title = f"<title>{escape_html(span.worker)}: {escape_html(span.label)}, {format_duration(span.duration_s)}"
    title += ", stale" * span.stale + f", {span.outcome}" * (span.outcome != "done") + "</title>"
    if span.kind == "bubble":
        return f'<rect class="bubble" {place}>{title}</rect>'
    text = f"<g>{title}" + f'<rect class="{span.kind} {span.outcome}" {place} rx="2"/>'
    if span.stale:
        text += f'<rect fill="url(#stale)" {place} rx="2"/>'
    if span.index >= 0 and width > 16:
        text += f'<text class="inside" x="{left + width / 2:.1f}" y="{y + height / 2 + 4}" text-anchor="middle">'
        text += f"{span.index}</text>"
    return text + "</g>"


class _scale:  # noqa: N801 - used like a function: a linear map
    def __init__(self, low: float, high: float, to_low: float, to_high: float) -> None:
        self._low, self._to_low = low, to_low
        self._factor = (to_high - to_low) / (high - low)

    def __call__(self, value: float) -> float:
        return self._to_low + (value - self._low) * self._factor


def _grid_y(ticks: Sequence[float], at_y: _scale) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
    )


def _labels_x(labels: Iterable[tuple[float, str]], height: float, name: str) -> list[str]:
    middle = (WIDTH + _LEFT - _RIGHT) / 2
    return [
        *(f'<text x="{x:.1f}" y="{height - 22}" text-anchor="middle">{text}</text>' for x, text in labels),
        f'<text class="axis" x="{middle:.1f}" y="{height - 4}" text-anchor="middle">{escape_html(name)}</text>',
    ]


def _row_label(label: str, middle: float) -> str:
    short = label if len(label) <= 14 else label[:13] + "…"
    return (
        f'<text class="row" x="{_LABEL - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape_html(short)}'
        f"<title>{escape_html(label)}</title></text>"
    )


def _svg(title: str, height: float, parts: Iterable[str]) -> str:
    name = escape_html(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{name}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{name}</title>{''.join(parts)}</svg>"
    )
