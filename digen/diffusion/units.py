"""Fixed-size forwards: rows are worked on in units of one size, the last one padded.

A forward is not batch invariant: the bits of a row depend on the number of rows beside it. So sampling and training use
one shape whatever the size of a micro-batch. Padding repeats a real row, is never looked at and adds exactly zero to
every gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from digen.types import GroupSlice, MicroBatch


def padded_units(items: Sequence[int], size: int) -> Iterator[tuple[list[int], int]]:
    """Cut ``items`` into lists of exactly ``size``; yields each with its number of real items, which come first."""
    for start in range(0, len(items), size):
        real = list(items[start : start + size])
        yield real + real[-1:] * (size - len(real)), len(real)


def part_of(micro_batch: MicroBatch, rows: Sequence[int]) -> MicroBatch:
    """Some rows of a micro-batch as one of their own; their seeds, and so what is drawn for them, stay the same."""
    samples = list(micro_batch.samples())
    slices = tuple(
        GroupSlice(piece.uid, piece.prompt, start=sample, count=1, size=piece.size)
        for piece, sample in (samples[row] for row in rows)
    )
    return msgspec.structs.replace(micro_batch, slices=slices)
