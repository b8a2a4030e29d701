"""The staleness arithmetic, as tables."""

from __future__ import annotations

from decimal import Decimal

import pytest

from digen.sched.admission import admits, stale_limit, within_bound


@pytest.mark.parametrize(
    ("fraction", "num_micro_batches", "limit"),
    [
        ("0", 8, 0),
        ("0.1", 8, 0),
        ("0.124", 8, 0),
        ("0.125", 8, 1),
        ("0.25", 4, 1),
        ("0.29", 100, 29),  # 28.999999999999996 in binary floating point
        ("0.57", 100, 57),
        ("0.58", 50, 29),
        ("0.999", 1000, 999),
        ("0.9999999999999999", 10**16, 9_999_999_999_999_999),
        ("1", 7, 7),
    ],
)
def test_the_limit_is_the_exact_floor(fraction: str, num_micro_batches: int, limit: int) -> None:
    assert stale_limit(Decimal(fraction), num_micro_batches) == limit


def test_every_percentage_of_every_size_is_exact() -> None:
    for percent in range(101):
        for num_micro_batches in range(1, 130):
            assert stale_limit(Decimal(percent) / 100, num_micro_batches) == percent * num_micro_batches // 100


@pytest.mark.parametrize(
    ("step", "version", "bounds", "admitted"),
    [
        (0, 0, (1, 0, 0), True),  # fresh, always
        (5, 5, (1, 9, 0), True),
        (5, 5, (2, 4, 4), True),
        (1, 0, (1, 0, 4), False),  # on-policy
        (1, 0, (2, 0, 4), True),  # one step stale, within the share
        (1, 0, (2, 3, 4), True),
        (1, 0, (2, 4, 4), False),  # the share is used up
        (1, 0, (2, 0, 0), False),
        (2, 0, (2, 0, 4), False),  # two steps stale
        (2, 0, (3, 0, 4), True),
        (3, 0, (3, 0, 4), False),
        (4, 5, (3, 0, 4), False),  # the weights are newer than the step: its ratio would not be 1
    ],
)
def test_the_gate(step: int, version: int, bounds: tuple[int, int, int], admitted: bool) -> None:
    window, num_stale, limit = bounds
    assert admits(step, version, window=window, num_stale=num_stale, limit=limit) is admitted


def test_what_is_admitted_is_within_the_bound_and_no_more() -> None:
    for window in (1, 2, 3):
        for step in range(6):
            for version in range(8):
                admitted = admits(step, version, window=window, num_stale=0, limit=1)
                assert admitted == within_bound(step, version, window=window) == (step - window < version <= step)
