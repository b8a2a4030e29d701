from __future__ import annotations

import math

import pytest
import torch

from digen.diffusion.losses import PolicyMetrics, clipped_policy_loss


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
    old = torch.tensor([-1.0], dtype=torch.float64)
    loss = clipped_policy_loss(
        old + difference, old, torch.tensor([advantage], dtype=torch.float64), clip_range=1e-4, advantage_clip=5.0
    )
    assert float(loss) == pytest.approx(expected, abs=1e-9)


def test_gradient_is_zero_where_the_clip_binds() -> None:
    new = torch.tensor([5e-4, 5e-4, -5e-4, -5e-4], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    clipped_policy_loss(new, torch.zeros(4), advantage, clip_range=1e-4, advantage_clip=5.0).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves backward unannotated
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 2 * math.exp(5e-4), -2 * math.exp(-5e-4), 0.0])


def test_metrics() -> None:
    metrics = PolicyMetrics(clip_range=0.1)
    assert metrics.values() == {}
    old = torch.zeros(4, dtype=torch.float64)
    new = torch.tensor([0.0, 0.05, 0.2, -0.2], dtype=torch.float64)
    metrics.add(torch.tensor([1.0, 2.0]), new[:2], old[:2], old[:2] - 1)
    metrics.add(torch.tensor([3.0, 6.0]), new[2:], old[2:], old[2:])
    values = metrics.values()
    assert values["loss/policy"] == 3.0
    assert values["ratio/mean"] == pytest.approx(sum(math.exp(x) for x in (0, 0.05, 0.2, -0.2)) / 4)
    assert values["ratio/max"] == pytest.approx(math.exp(0.2))
    assert values["ratio/abs_logp_diff_max"] == pytest.approx(1.05)
    assert values["clip_fraction"] == 0.5
    assert values["approx_kl"] == pytest.approx((0.05**2 + 0.2**2 * 2) / 8)
