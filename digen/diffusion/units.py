"""Fixed-size forwards: rows are worked on in units of one size, the last one padded.

A forward is not batch invariant: the bits of a row depend on the number of rows beside it. So sampling and training use
one shape whatever the size of a micro-batch. Padding repeats a real row, is never looked at and adds exactly zero to
every gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def padded_units(items: Sequence[int], size: int) -> Iterator[tuple[list[int], int]]:
    """Cut ``items`` into lists of exactly ``size``; yields each with its number of real items, which come first."""
    for start in range(0, len(items), size):
        real = list(items[start : start + size])
        yield real + real[-1:] * (size - len(real)), len(real)
