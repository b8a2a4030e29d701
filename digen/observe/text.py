"""Untrusted text made safe to show: prompts, worker output, error messages, names.

Such text may hold terminal escape sequences, carriage returns, bidirectional overrides or lone surrogates. Everything
that observe prints or writes into a page passes through here.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Mapping

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that change how *other* text is shown: controls, formats (bidi), surrogates, separators."""

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape_text(text: str, limit: int = 500) -> str:
    """One safe line: C0, C1, DEL, format characters, surrogates and line breaks become visible escapes.

    Args:
        text: anything.
        limit: characters of ``text`` that are kept; how many were left out is said at the end.
    """
    kept = text[:limit]
    safe = kept if kept.isascii() and kept.isprintable() else "".join(map(_escape, kept))
    return safe if len(text) <= limit else f"{safe}… ({len(text) - limit} more characters)"


def escape_html(text: str, limit: int = 500) -> str:
    """:func:`escape_text`, then HTML-escaped, for element content and quoted attributes."""
    return html.escape(escape_text(text, limit))


def escape_html_lines(text: str, limit: int = 100_000) -> str:
    """A whole document for a ``<pre>``: its line feeds stay, each line is escaped by :func:`escape_html`."""
    lines = "\n".join(escape_html(line) for line in text[:limit].split("\n"))
    return lines if len(text) <= limit else f"{lines}\n… ({len(text) - limit} more characters)"


def _escape(char: str) -> str:
    if unicodedata.category(char) not in _UNSAFE:
        return char
    code = ord(char)
    return _SHORT.get(char) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )


def format_duration(seconds: float) -> str:
    """``0.42 s``, ``12.3 s``, ``2 min 35 s`` or ``1 h 04 min``."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_share(share: float) -> str:
    """A ratio from 0 to 1 as a percentage: ``12 %``."""
    return f"{100 * share:.0f} %"


def format_bytes(num_bytes: float) -> str:
    """``512 B``, ``1.5 KiB``, ``3.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def plural(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``2 micro-batches``."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def format_metrics(metrics: Mapping[str, float]) -> str:
    """``accuracy 0.871, reward/mean 0.822``."""
    return ", ".join(f"{escape_text(name)} {value:.3f}" for name, value in metrics.items())
