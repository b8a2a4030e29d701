"""What the algorithms minimise, one value per term; nothing here is reduced over terms.

Tensors are ``(n, k, ...)``: n samples at k transitions each, and the elements of a latent behind them. Means over
elements keep the first two dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def clipped_policy_loss(log_ratio: Tensor, advantage: Tensor, *, clip_range: float, advantage_clip: float) -> Tensor:
    """PPO's: ``max(-A r, -A clip(r, 1 - ε, 1 + ε))`` with ``r = exp(log_ratio)``.

    Args:
        log_ratio: of the new policy to the old one; the only argument with a gradient.
        advantage: broadcastable to it; clamped to ± ``advantage_clip`` first.
        clip_range: ε.
        advantage_clip: bound of |A|.
    """
    advantage = advantage.clamp(-advantage_clip, advantage_clip)
    ratio = log_ratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range))


def gaussian_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """KL divergence of two Gaussians of one ``std`` ``(n, k)``, the mean over elements: ``(μ - μ')² / (2 std²)``."""
    return element_mean((mean - other_mean).square()) / (2 * std.square())


def guard_log_ratio(log_ratio: Tensor, divergence: Tensor, std: Tensor) -> Tensor:
    """GRPO-Guard's ``(log_ratio + divergence) std``, whose mean is 0 and whose scale is that of all transitions.

    The expectation of ``log_ratio`` is minus the divergence from the old policy, so ratios drift below 1 without it.

    Args:
        log_ratio: ``(n, k)``.
        divergence: :func:`gaussian_kl` of new and old means.
        std: the full standard deviation of the transition.
    """
    return (log_ratio + divergence) * std


def dppo_loss(log_ratio: Tensor, advantage: Tensor, divergence: Tensor, *, kl_threshold: float) -> Tensor:
    """Flow-DPPO's ``-A r``; 0 where the transition has left the trust region and would go farther.

    Args:
        log_ratio: of the new policy to the old one.
        advantage: broadcastable to it.
        divergence: :func:`gaussian_kl` of new and old means.
        kl_threshold: where the trust region ends.
    """
    ratio = log_ratio.exp()
    return torch.where(leaves_region(log_ratio, advantage, divergence, kl_threshold), 0.0, -advantage * ratio)


def leaves_region(log_ratio: Tensor, advantage: Tensor, divergence: Tensor, kl_threshold: float) -> Tensor:
    """Whether :func:`dppo_loss` leaves a term out."""
    return (divergence >= kl_threshold) & (((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0)))


def nft_loss(
    prediction: Tensor,
    old_prediction: Tensor,
    *,
    noisy: Tensor,
    clean: Tensor,
    level: Tensor,
    advantage: Tensor,
    beta: float,
    advantage_clip: float,
) -> Tensor:
    """DiffusionNFT's loss: the positive policy's error where a sample is good, the negative one's where it is bad.

    v⁺ = β v + (1 - β) v_old and v⁻ = (1 + β) v_old - β v predict x̂₀ = x - σ v. Errors are squared, divided by the mean
    absolute error of their own prediction (at least 1e-5, a constant of the gradient), and weighed by
    r = ½ + A / (2 advantage_clip)::

        L = advantage_clip (r L⁺ + (1 - r) L⁻) / β

    Args:
        prediction: v ``(n, k, ...)``, the only argument with a gradient.
        old_prediction: of the old policy.
        noisy: x.
        clean: x₀.
        level: σ ``(n, k)``.
        advantage: ``(n, 1)``; clamped to ± ``advantage_clip``.
        beta: β.
        advantage_clip: the advantage of a sample that is only good.
    """
    level = level.reshape(*level.shape, *[1] * (clean.dim() - 2))
    positive = noisy - level * (beta * prediction + (1 - beta) * old_prediction)
    negative = noisy - level * ((1 + beta) * old_prediction - beta * prediction)
    share = (advantage.clamp(-advantage_clip, advantage_clip) / advantage_clip / 2 + 0.5).clamp(0, 1)
    errors = share * _relative_error(positive, clean) + (1 - share) * _relative_error(negative, clean)
    return advantage_clip * errors / beta


def _relative_error(estimate: Tensor, clean: Tensor) -> Tensor:
    size = element_mean((estimate.detach().double() - clean.double()).abs()).clamp(min=1e-5).to(estimate.dtype)
    return element_mean((estimate - clean).square()) / size


def dpo_margin(error: Tensor, reference_error: Tensor, *, beta: float) -> Tensor:
    """Diffusion-DPO's margin of every pair, ``-β/2 ((e_w - e_w,ref) - (e_l - e_l,ref))``.

    Args:
        error: ``(pairs, 2, k)`` mean squared errors of the prediction, of the preferred and of the other sample.
        reference_error: of the reference.
        beta: β.
    """
    gained = error - reference_error
    return -0.5 * beta * (gained[:, 0] - gained[:, 1])


def dpo_loss(margin: Tensor) -> Tensor:
    """``-log sigmoid(margin)``."""
    return -logsigmoid(margin)


def element_mean(values: Tensor) -> Tensor:
    """``(n, k)`` means of ``(n, k, ...)`` over the elements of a latent."""
    return values.flatten(2).mean(dim=2)


def mean_squared_error(values: Tensor, target: Tensor) -> Tensor:
    """``(n, k)`` of ``(n, k, ...)``, over the elements of a latent."""
    return element_mean((values - target).square())
