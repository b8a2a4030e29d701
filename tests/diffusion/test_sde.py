from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributions import Normal

from digen.diffusion.kernels import KERNELS
from digen.diffusion.process import noised, process_of, target
from digen.diffusion.schedule import euler_sigmas, linear_sigmas, static_shift
from digen.diffusion.sde import STEPS, StepDistribution, cps, dance_sde, ddim, euler, flow_sde
from digen.errors import ConfigError, NumericsError

SD3 = euler_sigmas(10, 3.0)
DANCE = static_shift(linear_sigmas(16), 3.0)
# The products of SD 1.5: scaled linear betas from 0.00085 to 0.012 in 1000 timesteps.
PRODUCTS = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2).cumprod(0)


def _at(
    kernel: str,
    levels: torch.Tensor,
    i: int,
    output: float = -0.25,
    *,
    noise_level: float,
    dtype: torch.dtype = torch.float64,
) -> StepDistribution:
    """One transition of the scalar 0.5."""
    levels = levels.to(dtype)
    scalar = torch.full((1, 1), 0.5, dtype=dtype), torch.full((1, 1), output, dtype=dtype)
    return STEPS[kernel](
        *scalar, levels[i : i + 1], levels[i + 1 : i + 2], second_level=levels[1], noise_level=noise_level
    )


def _step(
    i: int, v: float = -0.25, *, noise_level: float = 0.7, dtype: torch.dtype = torch.float64
) -> StepDistribution:
    return _at("flow_sde", SD3, i, v, noise_level=noise_level, dtype=dtype)


PRECISIONS = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 4e-6)])


@pytest.mark.parametrize(
    "golden",
    [
        (0, 0.699999928, 0.387467682, -1.062263608, -1.062833309, 0.999430461),
        (1, 0.742964089, 0.370830894, -1.121831059, -1.122615218, 0.999216149),
        (5, 0.352797091, 0.488726467, -0.377076149, -0.380793035, 0.996290013),
        (8, 0.225360468, 0.538099587, 0.071115673, 0.056137621, 0.985133562),
    ],
)
@PRECISIONS
def test_golden_flow_sde(
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


@pytest.mark.parametrize(("i", "s"), [(0, 3.505671263), (1, 3.435073853), (5, 1.088092804), (8, 0.434414774)])
def test_golden_flow_sde_without_the_root_of_the_step(i: int, s: float) -> None:
    assert float(_step(i).std / (SD3[i] - SD3[i + 1]).sqrt()) == pytest.approx(s, abs=1e-5)


@pytest.mark.parametrize(
    ("i", "std", "mean", "log_prob"),
    [
        (0, 0.044232582, 0.504945651, 1.699354529),
        (8, 0.067082047, 0.511187503, 1.282900214),
        (15, 0.122474489, 0.528541672, 0.680914044),
    ],
)
@PRECISIONS
def test_golden_dance_sde(
    *, i: int, std: float, mean: float, log_prob: float, dtype: torch.dtype, tolerance: float
) -> None:
    step = _at("dance_sde", DANCE, i, noise_level=0.3, dtype=dtype)
    assert float(step.std) == pytest.approx(std, abs=tolerance)
    assert float(step.mean) == pytest.approx(mean, abs=tolerance)
    assert float(step.log_prob(step.sample(torch.ones(1, 1, dtype=dtype)))) == pytest.approx(log_prob, abs=tolerance)


@pytest.mark.parametrize(("i", "score"), [(0, -0.5), (8, -0.583333333), (15, -1.749999397)])
def test_dance_sde_is_the_step_of_its_score(i: int, score: float) -> None:
    x, v, sigma, following = 0.5, -0.25, float(DANCE[i]), float(DANCE[i + 1])
    clean = x - sigma * v
    own = -(x - (1 - sigma) * clean) / sigma**2
    assert own == pytest.approx(score, abs=2e-6)
    mean = x + (following - sigma) * v - 0.5 * 0.3**2 * own * (following - sigma)
    assert float(_at("dance_sde", DANCE, i, noise_level=0.3).mean) == pytest.approx(mean, abs=1e-14)


@pytest.mark.parametrize(
    ("noise_level", "i", "mean", "std"),
    [
        (0.8, 0, 0.178251132, 0.913137257),
        (0.8, 1, 0.202431440, 0.868646502),
        (0.8, 4, 0.302026421, 0.672661841),
        (0.8, 8, 0.565308809, 0.008491577),
        (0.8, 9, 0.502232134, 0.0),
        (0.7, 0, 0.247847781, 0.855481505),
    ],
)
@PRECISIONS
def test_golden_cps(
    *, noise_level: float, i: int, mean: float, std: float, dtype: torch.dtype, tolerance: float
) -> None:
    step = _at("cps", SD3, i, noise_level=noise_level, dtype=dtype)
    assert float(step.mean) == pytest.approx(mean, abs=tolerance)
    assert float(step.std) == pytest.approx(std, abs=tolerance)


def test_cps_keeps_the_noise_of_its_level_and_ends_in_the_clean_sample() -> None:
    source = torch.Generator().manual_seed(0)
    x, v = (torch.randn(1, 5, dtype=torch.float64, generator=source) for _ in range(2))
    for i in range(10):
        step = cps(x, v, SD3[i : i + 1], SD3[i + 1 : i + 2], second_level=SD3[1], noise_level=0.8)
        clean, noise = x - SD3[i] * v, x + (1 - SD3[i]) * v
        share = (step.mean - (1 - SD3[i + 1]) * clean) / noise
        torch.testing.assert_close(share, share[:, :1].expand_as(share))
        assert float(share[0, 0] ** 2 + step.std**2) == pytest.approx(float(SD3[i + 1]) ** 2, abs=1e-12)
    torch.testing.assert_close(step.mean, clean)
    assert float(step.std) == 0.0


def test_the_log_prob_of_cps_is_minus_the_mean_square_without_a_normaliser() -> None:
    step = _at("cps", SD3, 4, noise_level=0.8)
    assert float(step.log_prob(step.mean + 0.3)) == pytest.approx(-0.09, abs=1e-14)
    value = step.mean + torch.tensor([[0.1, -0.4]], dtype=torch.float64)
    wide = StepDistribution(step.mean.expand(1, 2), step.std, normalised=False)
    assert float(wide.log_prob(value)) == pytest.approx(-(0.01 + 0.16) / 2, abs=1e-14)
    with pytest.raises(NumericsError, match="noiseless step"):
        _at("cps", SD3, 9, noise_level=0.8).log_prob(value)


@pytest.mark.parametrize(
    ("t", "product", "following", "std", "mean", "log_prob"),
    [
        (981, 0.005775496, 0.007281722, 0.454463333, 0.619659816, -1.0598636),
        (21, 0.980380654, 0.998296022, 0.039479610, 0.536869656, -90.148698),
        (1, 0.998296022, 0.999149978, 0.020648219, 0.505392207, -296.58370),
    ],
)
def test_golden_ddim(*, t: int, product: float, following: float, std: float, mean: float, log_prob: float) -> None:
    levels = PRODUCTS[[t, max(t - 20, 0)]]
    assert levels.tolist() == pytest.approx([product, following], abs=1e-7)
    step = _at("ddim", levels, 0, noise_level=1.0)
    assert float(step.std) == pytest.approx(std, abs=2e-6)
    assert float(step.mean) == pytest.approx(mean, abs=2e-6)
    assert float(step.log_prob(torch.zeros(1, 1))) == pytest.approx(log_prob, rel=2e-5)


def test_ddim_is_diffusers_own_step() -> None:
    from diffusers import DDIMScheduler

    scheduler: Any = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    scheduler.set_timesteps(50)
    source = torch.Generator().manual_seed(2)
    x, e, noise = (torch.randn(2, 3, 4, generator=source) for _ in range(3))
    for t in (981, 501, 21):
        for eta in (0.0, 0.5, 1.0):
            expected = scheduler.step(e, t, x, eta=eta, variance_noise=noise, return_dict=False)[0]
            levels = scheduler.alphas_cumprod[[t, t - 20]]
            step = ddim(x, e, levels[:1].expand(2), levels[1:].expand(2), second_level=levels[1], noise_level=eta)
            torch.testing.assert_close(step.sample(noise), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_steps", [2, 10, 20, 40])
@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("make", [euler_sigmas, lambda n, s: static_shift(linear_sigmas(n), s)])
def test_the_first_std_is_the_noise_level(num_steps: int, shift: float, make: object) -> None:
    sigmas = make(num_steps, shift)  # type: ignore[operator]  # a plain function
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = flow_sde(x, x, sigmas[:1].expand(2), sigmas[1:2].expand(2), second_level=sigmas[1], noise_level=0.7)
    assert step.std.flatten().tolist() == pytest.approx([0.7, 0.7], abs=1e-12)


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
def test_without_noise_the_mean_is_the_euler_step(kernel: str) -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sigma, following = SD3[[0, 4, 9]], SD3[[1, 5, 10]]
    step = STEPS[kernel](x, x.cos(), sigma, following, second_level=SD3[1], noise_level=0.0)
    tolerance = 1e-14 if kernel == "cps" else 0
    torch.testing.assert_close(step.mean, euler(x, x.cos(), sigma, following), rtol=0, atol=tolerance)


def test_dance_sde_is_flow_sde_with_a_constant_s() -> None:
    source = torch.Generator().manual_seed(1)
    x, v = (torch.randn(9, 6, dtype=torch.float64, generator=source) for _ in range(2))
    sigma, following = DANCE[1:10], DANCE[2:11]
    dance = dance_sde(x, v, sigma, following, second_level=DANCE[1], noise_level=0.3)
    for i in range(9):
        row, level = slice(i, i + 1), sigma[i : i + 1]
        a = 0.3 / float((level / (1 - level)).sqrt())
        flow = flow_sde(x[row], v[row], level, following[i : i + 1], second_level=DANCE[1], noise_level=a)
        torch.testing.assert_close(dance.mean[row], flow.mean, rtol=0, atol=1e-14)
        torch.testing.assert_close(dance.std[row], flow.std, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde"])
def test_a_reverse_sde_keeps_the_marginals_of_a_point(kernel: str) -> None:
    """For data that are one point x₀ the exact velocity is known, and so are the mean and variance at every level.

    A transition has them up to second order in its step: the mean to the point (1 - σ') x₀ exactly.
    """
    clean, sigma = 0.8, 0.5
    for size in (1e-2, 1e-3):
        levels = torch.tensor([1.0, sigma, sigma - size], dtype=torch.float64)
        slope = []
        for x in (0.0, 1.0):
            v = torch.full((1, 1), (x - clean) / sigma, dtype=torch.float64)
            step = STEPS[kernel](
                torch.full((1, 1), x, dtype=torch.float64),
                v,
                levels[1:2],
                levels[2:],
                second_level=levels[1],
                noise_level=0.7,
            )
            slope.append(float(step.mean))
        gain = slope[1] - slope[0]
        assert slope[0] + gain * (1 - sigma) * clean == pytest.approx((1 - sigma + size) * clean, abs=1e-12)
        variance = gain**2 * sigma**2 + float(step.std) ** 2
        assert variance == pytest.approx((sigma - size) ** 2, abs=4 * size**2)


@pytest.mark.parametrize("k", [0.0, 1.0, 2.5])
def test_log_prob_of_k_standard_deviations(k: float) -> None:
    step = _step(5)
    expected = -(k**2) / 2 - math.log(float(step.std)) - 0.918938533
    assert float(step.log_prob(step.sample(torch.full((1, 1), k)))) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kernel", STEPS)
def test_noise_level_zero_never_gives_a_log_prob(kernel: str) -> None:
    step = _at(kernel, PRODUCTS[[521, 501]] if kernel == "ddim" else SD3[3:], 0, noise_level=0.0)
    with pytest.raises(NumericsError, match="noiseless step"):
        step.log_prob(step.mean)


def test_the_step_to_sigma_zero_has_a_tiny_std() -> None:
    assert float(_step(9).std) < 0.01


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "ddim"])
def test_log_prob_is_the_mean_of_normal_densities(kernel: str) -> None:
    source = torch.Generator().manual_seed(3)
    x, v, value = (torch.randn(4, 3, 5, generator=source) for _ in range(3))
    levels = PRODUCTS.flip(0)[18::20].float() if kernel == "ddim" else SD3.float()
    step = STEPS[kernel](x, v, levels[[0, 1, 4, 8]], levels[[1, 2, 5, 9]], second_level=levels[1], noise_level=0.9)
    densities = Normal(step.mean, step.std.expand_as(x)).log_prob(value)  # type: ignore[no-untyped-call]  # torch's gap
    expected = densities.mean(dim=(1, 2))
    assert step.std.shape == (4, 1, 1)
    torch.testing.assert_close(step.log_prob(value), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
def test_the_gradient_of_the_log_prob_is_that_of_finite_differences(kernel: str) -> None:
    source = torch.Generator().manual_seed(5)
    x, v, value = (torch.randn(2, 3, dtype=torch.float64, generator=source) for _ in range(3))

    def log_prob(v: torch.Tensor) -> torch.Tensor:
        step = STEPS[kernel](x, v, SD3[[0, 4]], SD3[[1, 5]], second_level=SD3[1], noise_level=0.7)
        return step.log_prob(value)

    assert torch.autograd.gradcheck(log_prob, v.requires_grad_(), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
def test_rows_at_different_steps_equal_one_step_at_a_time(kernel: str) -> None:
    source = torch.Generator().manual_seed(4)
    x, v = (torch.randn(9, 6, generator=source) for _ in range(2))
    sigmas, step = SD3.float(), STEPS[kernel]
    together = step(x, v, sigmas[:9], sigmas[1:10], second_level=sigmas[1], noise_level=0.7)
    for i in range(9):
        row = slice(i, i + 1)
        alone = step(x[row], v[row], sigmas[row], sigmas[i + 1 : i + 2], second_level=sigmas[1], noise_level=0.7)
        assert torch.equal(together.mean[row], alone.mean)
        assert torch.equal(together.std[row], alone.std)


@pytest.mark.parametrize("kernel", STEPS)
def test_half_precision_predictions_are_worked_on_in_float32(kernel: str) -> None:
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    levels = PRODUCTS[[521, 501]] if kernel == "ddim" else SD3[1:3]
    step = STEPS[kernel](x, x, levels[:1], levels[1:], second_level=levels[1], noise_level=0.7)
    assert step.mean.dtype == step.std.dtype == torch.float32


def test_every_kernel_has_a_formula_and_facts() -> None:
    assert STEPS.keys() == KERNELS.keys()
    for name, info in KERNELS.items():
        assert process_of(PRODUCTS.flip(0)[18::20] if name == "ddim" else SD3) == info.process


def test_noising_to_the_ends_gives_noise_and_sample() -> None:
    clean, noise = torch.full((2, 3), 0.25), torch.full((2, 3), -1.0)
    assert torch.equal(noised(clean, noise, torch.tensor([1.0, 0.0]), "flow"), torch.stack([noise[0], clean[0]]))
    assert torch.equal(noised(clean, noise, torch.tensor([0.0, 1.0]), "ddim"), torch.stack([noise[0], clean[0]]))
    mixed = noised(clean, noise, torch.tensor([0.6, 0.6]), "flow")
    assert torch.allclose(mixed - 0.6 * target(clean, noise, "flow"), clean), "x - σ v is the clean sample"
    mixed = noised(clean, noise, torch.tensor([0.36, 0.36]), "ddim")
    assert torch.allclose((mixed - 0.8 * target(clean, noise, "ddim")) / 0.6, clean)


@pytest.mark.parametrize(
    "levels",
    [
        [1.0, 0.5, 0.6, 0.0],
        [1.0, 0.5, 0.5, 0.0],
        [0.98, 0.5, 0.0],
        [1.0, 0.5, 0.02],
        [1.0, math.nan, 0.0],
        [1000.0, 500.0, 0.0],
        [0.0, 0.5, 1.0],
        [0.5, 1.5],
        [1.0],
    ],
)
def test_levels_that_are_no_schedule_are_refused(levels: list[float]) -> None:
    with pytest.raises(ConfigError, match="noise levels"):
        process_of(torch.tensor(levels))
