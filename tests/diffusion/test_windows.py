from __future__ import annotations

from digen.diffusion.windows import exponential_steps, linear_steps, progressive_start, random_start


def test_golden_progressive_with_overlap_and_roll_back() -> None:
    starts = [
        progressive_start(step, last=23, stride=1, roll_back=True, steps_at=lambda start: 2) for step in range(52)
    ]
    assert starts == [start for start in (*range(24), 0, 1) for _ in range(2)]


def test_golden_progressive_without_overlap_or_roll_back() -> None:
    starts = [
        progressive_start(step, last=23, stride=4, roll_back=False, steps_at=lambda start: 2) for step in range(20)
    ]
    assert starts == [0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 23, 23, 23, 23, 23, 23, 23, 23]


def test_progressive_with_steps_that_get_fewer() -> None:
    starts = [
        progressive_start(step, last=8, stride=4, roll_back=True, steps_at=lambda start: 3 - start // 4)
        for step in range(9)
    ]
    assert starts == [0, 0, 0, 4, 4, 8, 0, 0, 0]


def test_golden_random_starts() -> None:
    assert [random_start(seed, last=19) for seed in range(10)] == [17, 9, 16, 16, 14, 13, 8, 18, 14, 8]
    drawn = {random_start(seed, first=3, last=5) for seed in range(50)}
    assert drawn == {3, 4, 5}


def test_golden_exponential_decay() -> None:
    steps = [exponential_steps(25, start, rate=0.1, threshold=13) for start in (0, 13, 14, 18, 22)]
    assert steps == [25, 25, 23, 16, 11]
    assert exponential_steps(1, 22, rate=5.0, threshold=0) == 1


def test_linear_decay_goes_to_a_quarter() -> None:
    assert [linear_steps(25, start, end=23) for start in (0, 12, 23)] == [25, int(25 * 11 / 23 + 6 * 12 / 23), 6]
    assert linear_steps(2, 23, end=23) == 1
