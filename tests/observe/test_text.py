"""Untrusted text cannot move the cursor, set a title, hide itself or become markup."""

from __future__ import annotations

import unicodedata

import pytest

from digen.observe.text import escape_html, escape_html_lines, escape_text, format_bytes, format_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a cat, naïve, 猫 🐈", "a cat, naïve, 猫 🐈"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "\\x1b]8;;http://evil\\x1b\\click\\x1b]8;;\\x1b\\"),
        ("\x1b]52;c;YQ==\x07", "\\x1b]52;c;YQ==\\x07"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b2J", "\\x9b2J"),
        ("safe\revil", "safe\\revil"),
        ("two\nlines\tand a tab", "two\\nlines\\tand a tab"),
        ("\x7f\x00\x08", "\\x7f\\x00\\x08"),
        ("exe.\u202egnp", "exe.\\u202egnp"),
        ("\u2066\u2069\u200b\ufeff", "\\u2066\\u2069\\u200b\\ufeff"),
        ("\u2028\u2029\x85", "\\u2028\\u2029\\x85"),
        ("\ud800 alone", "\\ud800 alone"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_escapes(text: str, expected: str) -> None:
    assert escape_text(text) == expected
    escape_text(text).encode("utf-8")


def test_no_character_of_a_dangerous_category_survives() -> None:
    everything = "".join(map(chr, range(0x110000)))
    safe = escape_text(everything, limit=len(everything))
    assert not {unicodedata.category(char) for char in safe} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_a_huge_prompt_is_cut_before_it_is_looked_at() -> None:
    text = escape_text("\x1b" * 10_000_000, limit=100)
    assert text == "\\x1b" * 100 + "… (9999900 more characters)"


def test_html() -> None:
    assert escape_html("<script>alert('\x1b')</script>&\"") == (
        "&lt;script&gt;alert(&#x27;\\x1b&#x27;)&lt;/script&gt;&amp;&quot;"
    )
    assert escape_html_lines("a: <b>\nc: \u202ed") == "a: &lt;b&gt;\nc: \\u202ed"
    assert escape_html_lines("x" * 50, limit=10).endswith("… (40 more characters)")


def test_numbers_for_people() -> None:
    assert [format_duration(value) for value in (0.0, 0.421, 12.34, 59.96, 155, 3840)] == [
        "0.00 s", "0.42 s", "12.3 s", "1 min 00 s", "2 min 35 s", "1 h 04 min",
    ]  # fmt: skip
    assert [format_bytes(value) for value in (0, 1023, 1536, 3.2 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "3.2 GiB"]
