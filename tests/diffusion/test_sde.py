from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from digen.diffusion.schedule import euler_sigmas, linear_sigmas, static_shift
from digen.diffusion.sde import StepDistribution, euler, flow_sde
from digen.errors import NumericsError

SD3 = euler_sigmas(10, 3.0)


def _step(
    i: int, v: float = -0.25, *, noise_level: float = 0.7, dtype: torch.dtype = torch.float64
) -> StepDistribution:
    sigmas = SD3.to(dtype)
    x = torch.full((1, 1), 0.5, dtype=dtype)
    return flow_sde(
        x,
        torch.full((1, 1), v, dtype=dtype),
        sigmas[i : i + 1],
        sigmas[i + 1 : i + 2],
        second_sigma=sigmas[1],
        noise_level=noise_level,
    )


@pytest.mark.parametrize(
    "golden",
    [
        (0, 0.699999928, 0.387467682, -1.062263608, -1.062833309, 0.999430461),
        (1, 0.742964089, 0.370830894, -1.121831059, -1.122615218, 0.999216149),
        (5, 0.352797091, 0.488726467, -0.377076149, -0.380793035, 0.996290013),
        (8, 0.225360468, 0.538099587, 0.071115673, 0.056137621, 0.985133562),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 4e-6)])
def test_golden_steps(
    golden: tuple[int, float, float, float, float, float], dtype: torch.dtype, tolerance: float
) -> None:
    i, std, mean, log_prob, moved, ratio = golden
    step = _step(i, dtype=dtype)
    assert float(step.std) == pytest.approx(std, abs=tolerance)
    assert float(step.mean) == pytest.approx(mean, abs=tolerance)
    following = step.sample(torch.ones(1, 1, dtype=dtype))
    before, after = step.log_prob(following), _step(i, -0.24, dtype=dtype).log_prob(following)
    assert float(before) == pytest.approx(log_prob, abs=tolerance)
    assert float(after) == pytest.approx(moved, abs=tolerance)
    assert float((after - before).exp()) == pytest.approx(ratio, abs=tolerance)


@pytest.mark.parametrize("num_steps", [2, 10, 20, 40])
@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("make", [euler_sigmas, lambda n, s: static_shift(linear_sigmas(n), s)])
def test_the_first_std_is_the_noise_level(num_steps: int, shift: float, make: object) -> None:
    sigmas = make(num_steps, shift)  # type: ignore[operator]  # a plain function
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = flow_sde(x, x, sigmas[:1].expand(2), sigmas[1:2].expand(2), second_sigma=sigmas[1], noise_level=0.7)
    assert step.std.flatten().tolist() == pytest.approx([0.7, 0.7], abs=1e-12)


def test_without_noise_the_mean_is_the_euler_step() -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sigma, following = SD3[[0, 4, 9]], SD3[[1, 5, 10]]
    step = flow_sde(x, x.cos(), sigma, following, second_sigma=SD3[1], noise_level=0.0)
    torch.testing.assert_close(step.mean, euler(x, x.cos(), sigma, following), rtol=0, atol=0)


@pytest.mark.parametrize("k", [0.0, 1.0, 2.5])
def test_log_prob_of_k_standard_deviations(k: float) -> None:
    step = _step(5)
    expected = -(k**2) / 2 - math.log(float(step.std)) - 0.918938533
    assert float(step.log_prob(step.sample(torch.full((1, 1), k)))) == pytest.approx(expected, abs=1e-9)


def test_noise_level_zero_never_gives_a_log_prob() -> None:
    step = _step(3, noise_level=0.0)
    with pytest.raises(NumericsError, match="noiseless step"):
        step.log_prob(step.mean)


def test_the_step_to_sigma_zero_has_a_tiny_std() -> None:
    assert float(_step(9).std) < 0.01


def test_log_prob_is_the_mean_of_normal_densities() -> None:
    source = torch.Generator().manual_seed(3)
    x, v, value = (torch.randn(4, 3, 5, generator=source) for _ in range(3))
    sigmas = SD3.float()
    step = flow_sde(x, v, sigmas[[0, 1, 4, 8]], sigmas[[1, 2, 5, 9]], second_sigma=sigmas[1], noise_level=0.9)
    densities = Normal(step.mean, step.std.expand_as(x)).log_prob(value)  # type: ignore[no-untyped-call]  # torch's gap
    expected = densities.mean(dim=(1, 2))
    assert step.std.shape == (4, 1, 1)
    torch.testing.assert_close(step.log_prob(value), expected, rtol=1e-6, atol=1e-6)


def test_rows_at_different_steps_equal_one_step_at_a_time() -> None:
    source = torch.Generator().manual_seed(4)
    x, v = (torch.randn(9, 6, generator=source) for _ in range(2))
    sigmas = SD3.float()
    together = flow_sde(x, v, sigmas[:9], sigmas[1:10], second_sigma=sigmas[1], noise_level=0.7)
    for i in range(9):
        row = slice(i, i + 1)
        alone = flow_sde(x[row], v[row], sigmas[row], sigmas[i + 1 : i + 2], second_sigma=sigmas[1], noise_level=0.7)
        assert torch.equal(together.mean[row], alone.mean)
        assert torch.equal(together.std[row], alone.std)


def test_half_precision_velocities_are_worked_on_in_float32() -> None:
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    step = flow_sde(x, x, SD3[1:2], SD3[2:3], second_sigma=SD3[1], noise_level=0.7)
    assert step.mean.dtype == step.std.dtype == torch.float32
