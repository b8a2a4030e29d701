from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from digen.diffusion.losses import (
    clipped_policy_loss,
    dpo_loss,
    dpo_margin,
    dppo_loss,
    gaussian_kl,
    guard_log_ratio,
    leaves_region,
    nft_loss,
)
from digen.diffusion.schedule import euler_sigmas
from digen.diffusion.sde import StepDistribution, flow_sde

SD3 = euler_sigmas(10, 3.0)


def _tensor(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("advantage", "difference", "expected"),
    [
        (2.0, 0.0, -2.0),
        (2.0, 5e-4, -2.000200),
        (2.0, -5e-4, -1.999000250),
        (-2.0, 5e-4, 2.001000250),
        (-2.0, -5e-4, 1.999800),
        (6.0, 2e-4, -5.000500),
    ],
)
def test_golden_clip(advantage: float, difference: float, expected: float) -> None:
    loss = clipped_policy_loss(_tensor(difference), _tensor(advantage), clip_range=1e-4, advantage_clip=5.0)
    assert float(loss) == pytest.approx(expected, abs=1e-9)


def test_gradient_is_zero_where_the_clip_binds() -> None:
    difference = torch.tensor([5e-4, 5e-4, -5e-4, -5e-4], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    clipped_policy_loss(difference, advantage, clip_range=1e-4, advantage_clip=5.0).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves backward unannotated
    assert difference.grad is not None
    assert difference.grad.tolist() == pytest.approx([0.0, 2 * math.exp(5e-4), -2 * math.exp(-5e-4), 0.0])


def _toy(i: int, v: float) -> StepDistribution:
    half = torch.full((1, 1), 0.5, dtype=torch.float64)
    return flow_sde(half, half * 2 * v, SD3[i : i + 1], SD3[i + 1 : i + 2], second_level=SD3[1], noise_level=0.7)


@pytest.mark.parametrize(
    ("i", "true", "without_dt"),
    [
        (0, 1.622113e-7, 6.467476e-9),
        (1, 3.072557e-7, 1.437353e-8),
        (5, 6.881687e-6, 7.234575e-7),
        (8, 1.105213e-4, 2.974350e-5),
    ],
)
def test_golden_kl(i: int, true: float, without_dt: float) -> None:
    new, old = _toy(i, -0.24), _toy(i, -0.25)
    divergence = gaussian_kl(new.mean[:, :, None], old.mean[:, :, None], new.std)
    # The goldens were computed in float32.
    assert float(divergence) == pytest.approx(true, rel=2e-3)
    assert float(divergence * (SD3[i] - SD3[i + 1])) == pytest.approx(without_dt, rel=2e-3)
    expected = kl_divergence(Normal(new.mean, new.std), Normal(old.mean, old.std))
    assert float(divergence) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(
    ("i", "difference", "ratio", "plain"),
    [(0, -5.697433e-4, 0.999601372679, 0.999430418928), (1, None, 0.999417754240, 0.999216092359)],
)
def test_golden_guard_ratio(i: int, difference: float | None, ratio: float, plain: float) -> None:
    new, old = _toy(i, -0.24), _toy(i, -0.25)
    following = old.sample(torch.ones(1, 1))
    log_ratio = (new.log_prob(following) - old.log_prob(following))[:, None]
    if difference is not None:
        assert float(log_ratio) == pytest.approx(difference, abs=1e-7)
    assert float(log_ratio.exp()) == pytest.approx(plain, abs=1e-6)
    divergence = gaussian_kl(new.mean[:, :, None], old.mean[:, :, None], new.std)
    guarded = guard_log_ratio(log_ratio, divergence, new.std)
    assert float(guarded.exp()) == pytest.approx(ratio, abs=1e-6)
    error = (new.mean - old.mean).square()
    assert float(guarded) == pytest.approx(float(log_ratio * new.std + error / (2 * new.std)), abs=1e-15)


def test_the_guard_centres_the_log_ratio() -> None:
    """E[log r] of samples of the old policy is minus the KL, so ratios drift below 1; the guarded one's mean is 0."""
    new, old = _toy(8, -0.15), _toy(8, -0.25)
    noise = torch.randn(200_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    following = old.sample(noise)
    log_ratio = new.log_prob(following) - old.log_prob(following)
    divergence = gaussian_kl(new.mean[:, :, None], old.mean[:, :, None], new.std)
    assert float(log_ratio.mean()) == pytest.approx(-float(divergence), abs=5e-4)
    assert abs(float(guard_log_ratio(log_ratio, divergence, new.std).mean())) < 2e-4


def test_dppo_leaves_out_what_would_leave_the_region() -> None:
    log_ratio = _tensor(0.01, 0.01, -0.01, -0.01, 0.01, 0.0).requires_grad_()
    advantage = _tensor(2.0, -2.0, 2.0, -2.0, 2.0, 2.0)
    divergence = _tensor(1e-5, 1e-5, 1e-5, 1e-5, 9e-6, 1.0)
    loss = dppo_loss(log_ratio, advantage, divergence, kl_threshold=1e-5)
    up, down = math.exp(0.01), math.exp(-0.01)
    assert loss[0].tolist() == pytest.approx([0.0, 2 * up, -2 * down, 0.0, -2 * up, -2.0])
    assert leaves_region(log_ratio, advantage, divergence, 1e-5)[0].tolist() == [True, False, False, True, False, False]
    loss.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves backward unannotated
    assert log_ratio.grad is not None
    assert log_ratio.grad[0].tolist() == pytest.approx([0.0, 2 * up, -2 * down, 0.0, -2 * up, -2.0])


CLEAN, NOISE, LEVEL = _tensor(0.5, -0.25)[None], _tensor(1.0, -1.0)[None], _tensor(0.6)
NEW, OLD = _tensor(0.4, -0.7)[None], _tensor(0.45, -0.72)[None]
NOISY = 0.4 * CLEAN + 0.6 * NOISE


def _nft(prediction: Tensor, advantage: float, beta: float = 1.0) -> Tensor:
    return nft_loss(
        prediction,
        OLD,
        noisy=NOISY,
        clean=CLEAN,
        level=LEVEL,
        advantage=_tensor(advantage),
        beta=beta,
        advantage_clip=5.0,
    )


def test_golden_nft() -> None:
    assert float(_nft(NEW, 5.0)) == pytest.approx(5 * 0.05, abs=1e-9), "only L+"
    assert float(_nft(NEW, -5.0)) == pytest.approx(5 * 0.006, abs=1e-9), "only L-"
    assert float(_nft(NEW, 3.0)) == pytest.approx(0.206, abs=1e-9), "r = 0.8"
    divergence = float((NEW - _tensor(0.5, -0.8)[None]).square().mean())
    assert divergence == pytest.approx(0.01)
    assert float(_nft(NEW, 3.0)) + 1e-4 * divergence == pytest.approx(0.206001, abs=1e-9)


@pytest.mark.parametrize(
    ("advantage", "share"), [(-5, 0.0), (-9, 0.0), (-1, 0.4), (0, 0.5), (2.5, 0.75), (5, 1), (7, 1)]
)
def test_golden_share_of_a_good_sample(advantage: float, share: float) -> None:
    assert float(_nft(NEW, advantage)) == pytest.approx(5 * (share * 0.05 + (1 - share) * 0.006), abs=1e-9)


def test_nft_at_the_old_policy_pulls_towards_good_samples_and_away_from_bad_ones() -> None:
    for advantage, sign in ((4.0, 1.0), (-4.0, -1.0), (0.0, 0.0)):
        prediction = OLD.clone().requires_grad_()
        _nft(prediction, advantage).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves backward unannotated
        assert prediction.grad is not None
        towards = ((NOISE - CLEAN - OLD) * -prediction.grad).sum()
        assert math.copysign(1.0, float(towards)) == sign if sign else abs(float(towards)) < 1e-12


def test_the_weight_of_nft_is_a_constant_with_a_floor() -> None:
    exact = (NOISY - CLEAN) / 0.6
    loss = nft_loss(
        exact, exact, noisy=NOISY, clean=CLEAN, level=LEVEL, advantage=_tensor(5.0), beta=1.0, advantage_clip=5.0
    )
    assert float(loss) == pytest.approx(0.0, abs=1e-20)
    prediction = NEW.clone().requires_grad_()
    _nft(prediction, 5.0).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves backward unannotated
    error = NOISY - 0.6 * NEW - CLEAN
    size = error.abs().mean()
    assert prediction.grad is not None
    torch.testing.assert_close(prediction.grad, 5 * -0.6 * error / size, rtol=1e-12, atol=0)


def test_nft_with_another_beta() -> None:
    beta = 0.3
    positive, negative = beta * NEW + (1 - beta) * OLD, (1 + beta) * OLD - beta * NEW
    errors = [NOISY - 0.6 * v - CLEAN for v in (positive, negative)]
    good, bad = (float(error.square().mean() / error.abs().mean()) for error in errors)
    assert float(_nft(NEW, 2.5, beta)) == pytest.approx(5 * (0.75 * good + 0.25 * bad) / beta, abs=1e-12)


def test_dpo() -> None:
    error = torch.tensor([[[0.2], [0.5]], [[0.4], [0.1]]], dtype=torch.float64)
    reference = torch.tensor([[[0.25], [0.45]], [[0.4], [0.1]]], dtype=torch.float64)
    margin = dpo_margin(error, reference, beta=100.0)
    assert margin.flatten().tolist() == pytest.approx([5.0, 0.0])
    assert dpo_loss(margin).flatten().tolist() == pytest.approx([math.log1p(math.exp(-5.0)), math.log(2)])
