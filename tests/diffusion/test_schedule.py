from __future__ import annotations

from typing import Any

import pytest
import torch

from digen.diffusion.schedule import (
    dynamic_shift,
    euler_sigmas,
    linear_sigmas,
    resolution_mu,
    static_shift,
    stretch_to_terminal,
    trained_steps,
)


def _close(sigmas: torch.Tensor, expected: list[float], tolerance: float = 1e-7) -> None:
    assert sigmas.dtype == torch.float64
    assert sigmas.tolist() == pytest.approx(expected, abs=tolerance)


def test_diffusers_schedule_shifts_its_smallest_sigma_twice() -> None:
    expected = [1, 0.960129321, 0.913348973, 0.857692301, 0.790368259, 0.707278490]
    expected += [0.602150559, 0.464876026, 0.278048784, 0.008928572, 0]
    _close(euler_sigmas(10, 3.0), expected, 1e-7)


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (1.0, [1, 0.889, 0.778, 0.667, 0.556, 0.445, 0.334, 0.223, 0.112, 0.001, 0]),
        (5.0, [1, 0.975743, 0.946273, 0.9097071, 0.8631319, 0.8017857, 0.7173175, 0.5936192, 0.3950954, 0.0244141, 0]),
        (8.0, [1, 0.9847506, 0.9658567, 0.941834, 0.9102668, 0.8669384, 0.8037714, 0.7030951, 0.5173913, 0.060207, 0]),
    ],
)
def test_diffusers_schedule_other_shifts(shift: float, expected: list[float]) -> None:
    _close(euler_sigmas(10, shift), expected, 1e-6)


def test_shifting_the_shifted_schedule_again_is_the_known_mistake() -> None:
    again = static_shift(euler_sigmas(10, 3.0), 3.0)
    assert float(again[1]) == pytest.approx(0.9863469, abs=1e-6)
    assert float(again[-2]) == pytest.approx(0.0263158, abs=1e-6)


def test_diffusers_itself_agrees() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(7)
    _close(euler_sigmas(7, 3.0), scheduler.sigmas.tolist(), 1e-6)


def test_flux_dynamic_shift() -> None:
    mu = resolution_mu(1024)
    assert mu == pytest.approx(0.63)
    _close(dynamic_shift(linear_sigmas(6), mu), [1, 0.9037356, 0.7897048, 0.6524894, 0.4842184, 0.2730033, 0], 1e-6)
    expected = [1, 0.9441293, 0.8824973, 0.8141641, 0.737974, 0.6524894, 0.555899, 0.4458883, 0.3194513, 0.1726124, 0]
    _close(dynamic_shift(linear_sigmas(10), mu), expected, 1e-6)


def test_qwen_dynamic_shift_with_terminal() -> None:
    mu = resolution_mu(1024, max_tokens=8192, base_shift=0.5, max_shift=0.9)
    assert mu == pytest.approx(0.5387097, abs=1e-6)
    expected = [1, 0.9289696, 0.8514848, 0.7666239, 0.6732809, 0.5701172, 0.4554973, 0.3274001, 0.1833005, 0.02, 0]
    _close(stretch_to_terminal(dynamic_shift(linear_sigmas(10), mu), 0.02), expected, 1e-6)


def test_dance_schedule() -> None:
    expected = [1, 0.978260875, 0.954545438, 0.928571403, 0.899999976, 0.868421078, 0.833333313, 0.79411763, 0.75]
    expected += [0.699999988, 0.642857134, 0.576923072, 0.5, 0.409090906, 0.300000012, 0.166666672, 0]
    sigmas = static_shift(linear_sigmas(16), 3.0)
    _close(sigmas, expected, 1e-6)
    times = (1000 * sigmas[:-1].float()).int().tolist()  # in float32: 900, where float64 would say 899
    assert times == [1000, 978, 954, 928, 900, 868, 833, 794, 750, 700, 642, 576, 500, 409, 300, 166]


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 7.0])
def test_ends_are_exact(shift: float) -> None:
    for sigmas in (
        static_shift(linear_sigmas(9), shift),
        euler_sigmas(9, shift),
        dynamic_shift(linear_sigmas(9), shift),
    ):
        assert float(sigmas[0]) == 1.0
        assert float(sigmas[-1]) == 0.0
        assert bool((sigmas.diff() < 0).all())


@pytest.mark.parametrize(
    ("num_steps", "fraction", "expected"),
    [(10, 0.99, 9), (10, 1.0, 9), (10, 0.6, 6), (8, 0.5, 4), (16, 0.6, 9), (2, 0.99, 1), (4, 0.1, 1), (100, 0.29, 29)],
)
def test_the_last_step_is_never_trained(num_steps: int, fraction: float, expected: int) -> None:
    assert trained_steps(num_steps, fraction, num_steps - 1) == expected


def test_every_step_is_trained_where_all_are_noisy() -> None:
    assert trained_steps(50, 1.0, 50) == 50
    assert trained_steps(50, 0.5, 50) == 25
