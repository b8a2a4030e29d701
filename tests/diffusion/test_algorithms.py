"""Every algorithm on a toy network in float64, against a transcription of its formula, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from digen.config import RunConfig, load_config
from digen.diffusion import algorithms
from digen.diffusion.algorithms.base import Algorithm, build_algorithm
from digen.diffusion.algorithms.diffusion_nft import old_policy_decay
from digen.diffusion.algorithms.trajectory import TrajectoryAlgorithm
from digen.diffusion.families.base import Schedule
from digen.diffusion.trajectories import Trajectories
from digen.diffusion.update import Learner
from digen.errors import CheckpointError, ConfigError, InvariantViolation, NumericsError
from digen.plan import Plan
from digen.types import GroupSlice, MicroBatch, Prompt, derive_seed
from tests.diffusion.conftest import Toy

Make = Callable[..., MicroBatch]
Config = Callable[..., RunConfig]
ADVANTAGES = (1.5, None, 0.0, -7.0, 0.8, 1.0)
"""One left out, zero, and one beyond the clamp."""
STEPS = 6
PLUGINS = Path(__file__).parent / "plugins"


class NoiseToy(Toy):
    """Predicts the noise, like a DDIM model: levels are products that rise, times are integers."""

    def schedule(self, num_steps: int) -> Schedule:
        times = torch.linspace(901, 1, num_steps, dtype=torch.float64)
        products = (torch.cat([times, times.new_zeros(1)]) / 1000 * math.pi / 2).cos() ** 2
        products[-1] = 0.9999995
        return Schedule(products, times)

    def predict(self, latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        return super().predict(latents, sigma / 1000, conditioning)


def _groups(count: int = 1, size: int = 6, *, step: int = 0, index: int = 0) -> MicroBatch:
    """A micro-batch of whole groups."""
    slices = tuple(
        GroupSlice(f"s{step}p{index}.{n}", Prompt(f"the digit {n}", {"label": n}), 0, size, size) for n in range(count)
    )
    return MicroBatch(0, step, index, slices)


def _draw(model: Any, config: RunConfig, batch: MicroBatch) -> Trajectories:
    conditioning = model.encode([piece.prompt for piece, _ in batch.samples()])
    schedule = model.schedule(config.sampling.num_inference_steps)
    return build_algorithm(config).draw(model, batch, conditioning, schedule, unit=batch.num_samples)


def _nudge(model: Any, size: float) -> None:
    """Move the weights, so that the old policy, the reference and the trained one differ."""
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters().values()):
            wave = torch.arange(parameter.numel(), dtype=parameter.dtype).add(position).cos()
            parameter.add_(size * wave.reshape(parameter.shape))


def _gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters().values()])


class Case:
    """A toy that has drawn samples, then changed, and the learner's gradient on them."""

    def __init__(
        self,
        config: RunConfig,
        *,
        kind: Callable[[torch.dtype], Any] = Toy,
        batch: MicroBatch | None = None,
        advantages: Sequence[float | None] = ADVANTAGES,
        nudge: float = 1e-2,
    ) -> None:
        self.config, self.advantages = config, advantages
        self.batch = _groups() if batch is None else batch
        self.model, self.old = kind(torch.float64), kind(torch.float64)
        self.learner = Learner(self.model, config)
        self.algorithm: Any = self.learner.algorithm
        self.learner._old_log_probs = "behaviour"  # the weights change below, which the start-up check would refuse
        self.chains = _draw(self.model, config, self.batch)
        _nudge(self.model, nudge)
        self.report = self.learner.update(self.batch, 0, self.chains, advantages)
        self.gradient = _gradient(self.model)

    def conditioning(self, row: int) -> dict[str, Tensor]:
        return {name: tensor[row : row + 1] for name, tensor in self.chains.conditioning.items()}

    def predict(self, model: Any, x: Tensor, row: int, step: int) -> Tensor:
        output: Tensor = model.predict(x[None], self.chains.times[step : step + 1], self.conditioning(row))[0]
        return output

    def expect(self, total: Tensor) -> None:
        """``total`` is the sum of the loss over all terms."""
        for parameter in self.model.parameters().values():
            parameter.grad = None
        total.backward()  # type: ignore[no-untyped-call]  # torch leaves backward unannotated
        expected = _gradient(self.model)
        assert float(expected.norm()) > 1e-6
        torch.testing.assert_close(self.gradient, expected, rtol=0, atol=1e-10)

    def terms(self) -> Iterator[tuple[int, float, int]]:
        """(row, advantage, step) of every term of an algorithm with one sample an item."""
        rows = [row for row, advantage in enumerate(self.advantages) if advantage is not None]
        items = [(row,) for row in rows]
        for row, steps in zip(rows, self.algorithm.trained_steps(self.batch, items, STEPS), strict=True):
            for step in steps:
                yield row, float(self.advantages[row] or 0.0), step


def _transition(case: Case, model: Any, row: int, step: int, s: float | None = None) -> tuple[Tensor, Tensor, float]:
    """Mean and std of a flow's transition, and its step; ``s`` is the constant one of Dance-SDE."""
    x, sigmas = case.chains.latents[row, step], case.chains.levels.tolist()
    sigma, dt = sigmas[step], sigmas[step + 1] - sigmas[step]
    v = case.predict(model, x, row, step)
    if s is None:
        s = 0.7 * math.sqrt(sigma / (1 - (sigmas[1] if step == 0 else sigma)))
    score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
    mean = x + dt * v - 0.5 * s**2 * score * dt
    return mean, torch.full_like(mean, s * math.sqrt(-dt)), -dt


def _log_prob(case: Case, mean: Tensor, std: Tensor, row: int, step: int) -> Tensor:
    density: Tensor = Normal(mean, std).log_prob(case.chains.latents[row, step + 1])  # type: ignore[no-untyped-call]  # torch's gap
    return density.mean()


def _clipped(ratio: Tensor, advantage: float, clip: float) -> Tensor:
    advantage = max(-5.0, min(5.0, advantage))
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def _settings(config: Config, name: str, **overrides: Any) -> RunConfig:
    return config(algorithm__name=name, sampling__num_inference_steps=STEPS, **overrides)


def _recorded(case: Case, row: int, step: int) -> Tensor:
    assert case.chains.log_probs is not None
    return case.chains.log_probs[row, step]


class TestGradients:
    """The learner's gradient is autograd's through the formula, term by term."""

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("flow_grpo", {}),
            ("dance_grpo", {}),
            ("mix_grpo", {"window_size": 2}),
            ("flow_grpo_fast", {"window_size": 2}),
        ],
    )
    def test_the_clipped_ratio(self, config: Config, name: str, options: dict[str, Any]) -> None:
        case = Case(_settings(config, name, algorithm__options=options, algorithm__clip_range=5e-4))
        total, clipped, num_terms = torch.zeros((), dtype=torch.float64), 0, 0
        for row, advantage, step in case.terms():
            mean, std, _ = _transition(case, case.model, row, step, 0.3 if name == "dance_grpo" else None)
            ratio = (_log_prob(case, mean, std, row, step) - _recorded(case, row, step)).exp()
            total = total + _clipped(ratio, advantage, 5e-4)
            clipped += abs(float(ratio.detach()) - 1) > 5e-4
            num_terms += 1
        case.expect(total)
        assert 0 < clipped < num_terms
        assert case.report.num_terms == num_terms == 5 * {"flow_grpo": 5, "dance_grpo": 3}.get(name, 2)
        assert case.report.metrics["clip_fraction"] == pytest.approx(clipped / num_terms)

    def test_cps(self, config: Config) -> None:
        case = Case(_settings(config, "flow_grpo", sampling__kernel="cps", algorithm__clip_range=5e-4))
        sigmas, total = case.chains.levels.tolist(), torch.zeros((), dtype=torch.float64)
        for row, advantage, step in case.terms():
            x, sigma, following = case.chains.latents[row, step], sigmas[step], sigmas[step + 1]
            v = case.predict(case.model, x, row, step)
            std = following * math.sin(0.8 * math.pi / 2)
            mean = (1 - following) * (x - sigma * v) + math.sqrt(following**2 - std**2) * (x + (1 - sigma) * v)
            log_prob = -(case.chains.latents[row, step + 1] - mean).square().mean()
            total = total + _clipped((log_prob - _recorded(case, row, step)).exp(), advantage, 5e-4)
        case.expect(total)

    @pytest.mark.parametrize("kl", ["gaussian", "flow_grpo"])
    def test_the_kl_to_the_reference(self, config: Config, kl: str) -> None:
        case = Case(_settings(config, "flow_grpo", algorithm__kl_weight=0.04, algorithm__kl=kl))
        total, divergences = torch.zeros((), dtype=torch.float64), []
        for row, advantage, step in case.terms():
            mean, std, size = _transition(case, case.model, row, step)
            with torch.no_grad():
                reference, _, _ = _transition(case, case.old, row, step)
            ratio = (_log_prob(case, mean, std, row, step) - _recorded(case, row, step)).exp()
            divergence = torch.distributions.kl_divergence(Normal(mean, std), Normal(reference, std)).mean()
            divergence = divergence * (size if kl == "flow_grpo" else 1)
            divergences.append(float(divergence.detach()))
            total = total + _clipped(ratio, advantage, 1e-4) + 0.04 * divergence
        case.expect(total)
        assert case.report.metrics["loss/kl"] == pytest.approx(sum(divergences) / len(divergences))

    def test_the_weight_of_the_kl_changes_the_gradient(self, config: Config) -> None:
        gradients = [Case(_settings(config, "flow_grpo", algorithm__kl_weight=w)).gradient for w in (0.0, 0.01, 0.04)]
        torch.testing.assert_close(
            gradients[2] - gradients[0], 4 * (gradients[1] - gradients[0]), rtol=1e-8, atol=1e-12
        )
        assert float((gradients[1] - gradients[0]).norm()) > 1e-6

    def test_grpo_guard(self, config: Config) -> None:
        case = Case(_settings(config, "grpo_guard", algorithm__clip_range=1e-4))
        total, clipped = torch.zeros((), dtype=torch.float64), 0
        for row, advantage, step in case.terms():
            mean, std, size = _transition(case, case.model, row, step)
            with torch.no_grad():
                old, _, _ = _transition(case, case.old, row, step)
            full = float(std.flatten()[0])
            bias = (mean - old).square().mean() / (2 * full**2)
            ratio = ((_log_prob(case, mean, std, row, step) - _recorded(case, row, step) + bias) * full).exp()
            clipped += abs(float(ratio.detach()) - 1) > 1e-4
            total = total + _clipped(ratio, advantage, 1e-4) / size
        case.expect(total)
        assert clipped > 0

    def test_flow_dppo(self, config: Config) -> None:
        case = Case(_settings(config, "flow_dppo", algorithm__options={"kl_threshold": 1e-6}))
        total, left_out = torch.zeros((), dtype=torch.float64), 0
        for row, advantage, step in case.terms():
            mean, std, _ = _transition(case, case.model, row, step)
            with torch.no_grad():
                old, _, _ = _transition(case, case.old, row, step)
            divergence = float(((mean - old).square() / (2 * std**2)).mean().detach())
            ratio = (_log_prob(case, mean, std, row, step) - _recorded(case, row, step)).exp()
            away = (advantage > 0 and float(ratio.detach()) > 1) or (advantage < 0 and float(ratio.detach()) < 1)
            if divergence >= 1e-6 and away:
                left_out += 1
                continue
            total = total - advantage * ratio
        case.expect(total)
        assert 0 < left_out < case.report.num_terms
        assert case.report.metrics["clip_fraction"] == pytest.approx(left_out / case.report.num_terms)

    def test_ddpo(self, config: Config) -> None:
        case = Case(_settings(config, "ddpo", algorithm__clip_range=1e-3), kind=NoiseToy)
        products, total = case.chains.levels.tolist(), torch.zeros((), dtype=torch.float64)
        for row, advantage, step in case.terms():
            x, product, following = case.chains.latents[row, step], products[step], products[step + 1]
            e = case.predict(case.model, x, row, step)
            clean = (x - math.sqrt(1 - product) * e) / math.sqrt(product)
            std = math.sqrt((1 - following) / (1 - product) * (1 - product / following))
            mean = math.sqrt(following) * clean + math.sqrt(max(1 - following - std**2, 0.0)) * e
            log_prob = _log_prob(case, mean, torch.full_like(mean, std), row, step)
            total = total + _clipped((log_prob - _recorded(case, row, step)).exp(), advantage, 1e-3)
        case.expect(total)
        assert case.report.num_terms == 5 * STEPS, "the last transition is noisy too"

    @pytest.mark.parametrize(("beta", "kl"), [(1.0, 1e-4), (0.4, 0.0), (0.1, 0.5)])
    def test_diffusion_nft(self, config: Config, beta: float, kl: float) -> None:
        case = Case(_settings(config, "diffusion_nft", algorithm__options={"beta": beta}, algorithm__kl_weight=kl))
        levels, total = case.chains.levels.tolist(), torch.zeros((), dtype=torch.float64)
        number: dict[int, int] = {}
        for row, advantage, step in case.terms():
            k = number[row] = number.get(row, -1) + 1
            clean, t = case.chains.latents[row, 0], levels[step]
            seed = derive_seed(0, 0, "s0p0.0", row, f"training-noise/{k}")
            noise = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)).double()
            x = (1 - t) * clean + t * noise
            v = case.predict(case.model, x, row, step)
            with torch.no_grad():
                old = case.predict(case.old, x, row, step)
            r = max(0.0, min(1.0, max(-5.0, min(5.0, advantage)) / 5 / 2 + 0.5))
            for share, mixed in ((r, beta * v + (1 - beta) * old), (1 - r, (1 + beta) * old - beta * v)):
                error = x - t * mixed - clean
                weight = max(float(error.detach().abs().mean()), 1e-5)
                total = total + 5 * share * (error.square() / weight).mean() / beta
            total = total + kl * (v - old).square().mean()
        case.expect(total)
        assert case.report.num_terms == 5 * 5
        assert case.report.metrics["old_deviation"] > 0

    @pytest.mark.parametrize("kind", [Toy, NoiseToy])
    def test_dpo(self, config: Config, kind: Any) -> None:
        advantages = (1.5, None, 0.0, -7.0, 0.8, 1.0, -0.5, 0.5, 0.5, -0.5, 0.1, 0.0)
        case = Case(
            _settings(config, "dpo", algorithm__options={"beta": 30.0}, algorithm__timestep_fraction=0.5),
            kind=kind,
            batch=_groups(2),
            advantages=advantages,
        )
        levels, total = case.chains.levels.tolist(), torch.zeros((), dtype=torch.float64)
        pairs = [(0, 3), (7, 6)]
        steps = case.algorithm.trained_steps(case.batch, pairs, STEPS)
        for group, (pair, own) in enumerate(zip(pairs, steps, strict=True)):
            for k, step in enumerate(own):
                seed = derive_seed(0, 0, f"s0p0.{group}", f"training-noise/{k}")
                noise = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)).double()
                gained = []
                for row in pair:
                    clean, level = case.chains.latents[row, 0], levels[step]
                    if kind is Toy:
                        x, wanted = (1 - level) * clean + level * noise, noise - clean
                    else:
                        x, wanted = math.sqrt(level) * clean + math.sqrt(1 - level) * noise, noise
                    with torch.no_grad():
                        before = (case.predict(case.old, x, row, step) - wanted).square().mean()
                    gained.append((case.predict(case.model, x, row, step) - wanted).square().mean() - before)
                total = total - torch.sigmoid(-15.0 * (gained[0] - gained[1])).log()
        case.expect(total)
        assert case.report.num_terms == 2 * 3


@pytest.mark.parametrize("name", ["grpo_guard", "flow_dppo"])
def test_old_means_are_recomputed_with_the_log_probs(config: Config, name: str) -> None:
    settings = _settings(config, name, algorithm__old_logprobs="recompute")
    model = Toy(torch.float64)
    chains = _draw(model, settings, _groups())
    assert chains.log_probs is not None
    assert chains.means is not None
    chains.log_probs.add_(1e-3)
    chains.means.add_(0.1)
    metrics = Learner(model, settings).update(_groups(), 0, chains, ADVANTAGES).metrics
    assert metrics["ratio/floor"] > 1e-4
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1.0
    with pytest.raises(NumericsError, match=r"algorithm\.(clip_range|options\.kl_threshold)"):
        Learner(model, _settings(config, name, schedule__window=2)).update(_groups(), 0, chains, ADVANTAGES)


@pytest.mark.parametrize("forward_batch", [None, 2, 4])
@pytest.mark.parametrize("name", ["dance_grpo", "grpo_guard", "diffusion_nft", "dpo"])
def test_chunks_and_padding_do_not_change_the_gradient(config: Config, name: str, forward_batch: int | None) -> None:
    batch, advantages = _groups(3), (*ADVANTAGES, *ADVANTAGES[::-1], *ADVANTAGES)
    chunks = [
        Case(
            _settings(config, name, algorithm__tsp_chunk=chunk, model__forward_batch=forward_batch),
            batch=batch,
            advantages=advantages,
        ).gradient
        for chunk in (1, 2, "all", "auto")
    ]
    for gradient in chunks[1:]:
        assert float((gradient - chunks[0]).norm() / chunks[0].norm()) < 1e-12


@pytest.mark.parametrize("name", ["dance_grpo", "diffusion_nft", "dpo"])
def test_the_cut_into_micro_batches_does_not_change_the_gradient(config: Config, name: str) -> None:
    advantages = (1.0, -1.0, 0.3, 0.2, -2.0, 0.9)
    whole = _groups(3, 2)
    reference = Case(_settings(config, name), batch=whole, advantages=advantages)
    model = Toy(torch.float64)
    learner = Learner(model, _settings(config, name))
    learner._old_log_probs = "behaviour"
    parts = [MicroBatch(0, 0, index, (piece,)) for index, piece in enumerate(whole.slices)]
    chains = [_draw(model, reference.config, part) for part in parts]
    _nudge(model, 1e-2)
    for part, chain, start in reversed(list(zip(parts, chains, (0, 2, 4), strict=True))):
        learner.update(part, 0, chain, advantages[start : start + 2])
    torch.testing.assert_close(_gradient(model), reference.gradient, rtol=0, atol=1e-12)


class TestNoisySteps:
    @staticmethod
    def _noisy(chains: Trajectories) -> list[int]:
        assert chains.log_probs is not None
        pattern = torch.isfinite(chains.log_probs)
        assert bool((pattern == pattern[0]).all())
        return [int(step) for step in pattern[0].nonzero()]

    @pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo", "grpo_guard", "flow_dppo"])
    def test_all_but_the_last(self, config: Config, name: str) -> None:
        chains = _draw(Toy(torch.float32), _settings(config, name), _groups())
        assert self._noisy(chains) == [0, 1, 2, 3, 4]
        assert (chains.means is not None) == (name in {"grpo_guard", "flow_dppo"})

    def test_all_of_a_ddim(self, config: Config) -> None:
        assert self._noisy(_draw(NoiseToy(torch.float32), _settings(config, "ddpo"), _groups())) == [0, 1, 2, 3, 4, 5]

    def test_the_window_of_mix_grpo_moves_with_the_steps(self, config: Config) -> None:
        options = {"window_size": 2, "steps_per_window": 2, "stride": 1}
        settings = _settings(config, "mix_grpo", algorithm__options=options)
        windows = [
            self._noisy(_draw(Toy(torch.float32), settings, _groups(step=step, index=step))) for step in range(8)
        ]
        assert windows == [[0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [2, 3], [0, 1], [0, 1]]

    @pytest.mark.parametrize(
        ("name", "options", "starts"),
        [
            ("mix_grpo", {"window_size": 2, "strategy": "random"}, {0, 1, 2}),
            ("flow_grpo_fast", {"window_size": 1}, {0, 1, 2}),
            ("flow_grpo_fast", {"window_size": 2, "window_range": [2, 5]}, {2, 3}),
        ],
    )
    def test_a_drawn_window_depends_on_the_step_alone(
        self, config: Config, name: str, options: dict[str, Any], starts: set[int]
    ) -> None:
        algorithm: Any = build_algorithm(_settings(config, name, algorithm__options=options))
        drawn = [algorithm.noisy_steps(_groups(step=step), STEPS) for step in range(60)]
        assert {window[0] for window in drawn} == starts
        assert {len(window) for window in drawn} == {options["window_size"]}
        assert [algorithm.noisy_steps(_groups(2, step=step, index=4), STEPS) for step in range(60)] == drawn

    @pytest.mark.parametrize(
        ("decay", "kept"), [("none", [8, 8, 8]), ("linear", [8, 6, 4]), ("exponential", [8, 5, 3])]
    )
    def test_later_windows_may_be_kept_for_fewer_steps(self, config: Config, decay: str, kept: list[int]) -> None:
        options = {"window_size": 2, "steps_per_window": 8, "stride": 2, "decay": decay}
        if decay == "exponential":
            options |= {"decay_rate": 0.25, "decay_from": 0}
        algorithm: Any = build_algorithm(
            config(algorithm__name="mix_grpo", sampling__num_inference_steps=8, algorithm__options=options)
        )
        starts = [algorithm.noisy_steps(_groups(step=step), 8)[0] for step in range(sum(kept))]
        assert starts == [start for start, count in zip((0, 2, 4), kept, strict=True) for _ in range(count)]

    def test_every_sample_of_dance_grpo_has_steps_of_its_own(self, config: Config) -> None:
        algorithm: Any = build_algorithm(config(algorithm__name="dance_grpo", sampling__num_inference_steps=16))
        batch = _groups(2, 24)
        items = [(row,) for row in range(48)]
        steps = algorithm.trained_steps(batch, items, 16)
        assert {len(own) for own in steps} == {9}, "int(0.6 * 15)"
        assert all(own == sorted(set(own)) for own in steps)
        assert {step for own in steps for step in own} == set(range(15)), "all of them but the noiseless last"
        assert len({tuple(own) for own in steps}) > 40
        assert algorithm.trained_steps(batch, items[30:40], 16) == steps[30:40], "whatever is beside a sample"
        part = MicroBatch(0, 0, 7, (batch.slices[1],))
        assert algorithm.trained_steps(part, items[:24], 16) == steps[24:]

    def test_shared_noise(self, config: Config) -> None:
        settings = _settings(config, "dance_grpo", algorithm__options={"shared_noise": True})
        chains = _draw(Toy(torch.float32), settings, _groups(2))
        assert len(torch.unique(chains.latents[:, 0], dim=0)) == 2
        assert len(torch.unique(chains.latents[:, 1], dim=0)) == 12

    @pytest.mark.parametrize("name", ["diffusion_nft", "dpo"])
    def test_samples_alone(self, config: Config, name: str) -> None:
        chains = _draw(Toy(torch.float32), _settings(config, name), _groups())
        assert (chains.log_probs, chains.means, chains.latents.shape) == (None, None, (6, 1, 3, 2))


class TestDiffusionNFT:
    def test_golden_decay(self) -> None:
        assert [old_policy_decay(1, version) for version in (100, 1000)] == pytest.approx([0.1, 0.5])
        decays = [old_policy_decay(2, version) for version in (1, 75, 76, 208, 209, 500)]
        assert decays == pytest.approx([0.0, 0.0, 0.0075, 0.9975, 0.999, 0.999])

    @staticmethod
    def _learner(config: Config, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> tuple[Any, Learner]:
        model = Toy(dtype)
        return model, Learner(model, _settings(config, "diffusion_nft", **overrides))

    @staticmethod
    def _step(model: Any, learner: Learner, config: RunConfig, step: int) -> None:
        batch = _groups(step=step)
        with learner.sampling_weights():
            chains = _draw(model, config, batch)
        learner.update(batch, step, chains, ADVANTAGES)
        learner.commit(step, (0,))

    @pytest.mark.parametrize(("kind", "first"), [(1, 0.001), (2, 0.0)])
    def test_the_old_policy_follows_and_is_published(self, config: Config, kind: int, first: float) -> None:
        model, learner = self._learner(config, algorithm__options={"old_decay": kind}, optimizer__lr=0.01)
        old = {name: p.detach().clone() for name, p in model.parameters().items()}
        for step in range(3):
            self._step(model, learner, learner._config, step)
            decay = first * (step + 1)
            for name, parameter in model.parameters().items():
                old[name] = decay * old[name] + (1 - decay) * parameter.detach()
            published = learner.published_parameters()
            for name, tensor in published.items():
                torch.testing.assert_close(tensor, old[name], rtol=0, atol=1e-7)
                assert torch.equal(tensor, model.parameters()[name]) == (kind == 2)

    def test_the_sampling_weights_are_the_published_ones_and_leave_no_trace(self, config: Config) -> None:
        model, learner = self._learner(config, optimizer__lr=0.01)
        self._step(model, learner, learner._config, 0)
        batch = _groups(step=1)
        with learner.sampling_weights():
            chains = _draw(model, learner._config, batch)
        learner.update(batch, 1, chains, ADVANTAGES)
        before = {name: (p.data_ptr(), p.detach().clone(), p.grad.clone()) for name, p in model.parameters().items()}
        generator = Toy(torch.float32)
        with torch.no_grad():
            for name, parameter in generator.parameters().items():
                parameter.copy_(learner.published_parameters()[name])
        with learner.sampling_weights():
            assist = _draw(model, learner._config, batch)
        assert torch.equal(assist.latents, _draw(generator, learner._config, batch).latents)
        assert not torch.equal(assist.latents, _draw(model, learner._config, batch).latents)
        for name, parameter in model.parameters().items():
            address, values, gradient = before[name]
            assert parameter.data_ptr() == address
            assert torch.equal(parameter, values)
            assert torch.equal(parameter.grad, gradient)
        with pytest.raises(RuntimeError, match="inside"), learner.sampling_weights():
            raise RuntimeError("inside")
        assert all(torch.equal(parameter, before[name][1]) for name, parameter in model.parameters().items())

    def test_half_precision_weights_are_published_in_their_own(self, config: Config) -> None:
        model, learner = self._learner(config, dtype=torch.bfloat16)
        self._step(model, learner, learner._config, 0)
        assert {tensor.dtype for tensor in learner.published_parameters().values()} == {torch.bfloat16}
        held = learner.algorithm.held()
        assert held is not None
        assert {tensor.dtype for tensor in held.tensors.values()} == {torch.float32}

    def test_a_restored_run_continues_bit_for_bit(self, config: Config, tmp_path: Path) -> None:
        settings: dict[str, Any] = {"optimizer__lr": 0.01, "optimizer__ema_decay": 0.9}
        straight_model, straight = self._learner(config, **settings)
        for step in range(2):
            self._step(straight_model, straight, straight._config, step)
        assert "algorithm.safetensors" in straight.save(tmp_path / "two")
        resumed_model, resumed = self._learner(config, **settings)
        assert resumed.restore(tmp_path / "two") == 2
        for model, learner in ((straight_model, straight), (resumed_model, resumed)):
            self._step(model, learner, learner._config, 2)
        assert resumed.save(tmp_path / "resumed") == straight.save(tmp_path / "straight")
        (tmp_path / "two" / "algorithm.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"algorithm\.safetensors"):
            resumed.restore(tmp_path / "two")

    def test_the_deviation_from_the_old_policy_is_seen_once_they_differ(self, config: Config) -> None:
        model, learner = self._learner(config, optimizer__lr=0.01)
        deviations = []
        for step in range(2):
            batch = _groups(step=step)
            report = learner.update(batch, step, _draw(model, learner._config, batch), ADVANTAGES)
            deviations.append(report.metrics["old_deviation"])
            learner.commit(step, (0,))
        assert deviations[0] == 0.0
        assert deviations[1] > 0.0

    def test_trajectories_are_not_asked_of_it_and_samples_do_not_do_for_others(self, config: Config) -> None:
        samples = _draw(Toy(torch.float32), _settings(config, "diffusion_nft"), _groups())
        with pytest.raises(InvariantViolation, match="samples alone"):
            Learner(Toy(torch.float32), _settings(config, "flow_grpo")).update(_groups(), 0, samples, ADVANTAGES)


class TestDPO:
    def test_a_group_without_a_best_adds_exactly_nothing_and_counts(self, config: Config) -> None:
        settings = _settings(config, "dpo")
        equal = Case(settings, advantages=(0.0,) * 6)
        assert equal.report.num_terms == 5
        assert float(equal.gradient.abs().max()) == 0.0

    def test_pairs_of_what_was_kept(self, config: Config) -> None:
        algorithm = build_algorithm(_settings(config, "dpo"))
        batch = _groups(4, 3)
        advantages = (0.5, -1.0, 2.0, None, None, None, 1.0, None, -1.0, None, 0.0, None)
        rows = [row for row, advantage in enumerate(advantages) if advantage is not None]
        assert algorithm.items(batch, rows, advantages) == [(2, 1), (6, 8)]

    def test_both_of_a_pair_see_the_same_noise_at_the_same_levels(self, config: Config) -> None:
        algorithm: Any = build_algorithm(_settings(config, "dpo"))
        seeds = algorithm.noise_seeds(_groups(2, 3), "x")
        assert (len(set(seeds)), len(set(seeds[:3])), len(set(seeds[3:]))) == (2, 1, 1)

    def test_a_forward_holds_as_many_pairs_as_there_can_be(self, config: Config) -> None:
        algorithm = build_algorithm(_settings(config, "dpo"))
        assert [algorithm.items_per_forward(unit, _groups(3)) for unit in (1, 2, 4, 18)] == [1, 1, 2, 3]

    def test_a_cut_group_is_an_error(self, config: Config, micro_batch: Make) -> None:
        case = _draw(Toy(torch.float32), _settings(config, "dpo"), micro_batch())
        with pytest.raises(InvariantViolation, match="whole groups, but s0p0 is cut: 6 of 24"):
            Learner(Toy(torch.float32), _settings(config, "dpo")).update(micro_batch(), 0, case, ADVANTAGES)

    def test_a_reference_that_moves(self, config: Config, tmp_path: Path) -> None:
        settings = _settings(config, "dpo", algorithm__options={"reference_interval": 2}, optimizer__lr=0.01)
        model = Toy(torch.float32)
        learner = Learner(model, settings)
        assert not learner.algorithm.needs_reference
        start = {name: p.detach().clone() for name, p in model.parameters().items()}
        for step in range(2):
            held = learner.algorithm.held()
            assert held is not None
            assert all(torch.equal(held.tensors[name], start[name]) for name in start)
            batch = _groups(step=step)
            report = learner.update(batch, step, _draw(model, settings, batch), ADVANTAGES)
            assert (report.metrics["dpo/margin"] == 0.0) == (step == 0)
            learner.commit(step, (0,))
        held = learner.algorithm.held()
        assert held is not None
        assert all(torch.equal(held.tensors[name], p) for name, p in model.parameters().items())
        assert "algorithm.safetensors" in learner.save(tmp_path)


class TestChecks:
    """What is refused before a worker starts."""

    @staticmethod
    def _check(**overrides: Any) -> Any:
        config = load_config(None, {key.replace("__", "."): value for key, value in overrides.items()})
        plan = Plan(
            ["a"],
            num_steps=1,
            prompts_per_step=2,
            samples_per_prompt=config.plan.samples_per_prompt,
            micro_batch_size=config.plan.micro_batch_size,
        )
        return algorithms.check(config, plan.step(0))

    @pytest.mark.parametrize("name", algorithms.ALGORITHMS)
    def test_every_built_in_algorithm_passes_with_its_defaults(self, name: str, tmp_path: Path) -> None:
        family = {"model__family": "sd15", "model__path": str(tmp_path)} if name == "ddpo" else {}
        settings = self._check(algorithm__name=name, **family)
        built = build_algorithm(load_config(None, {"algorithm.name": name}))
        assert built.settings == settings
        assert type(built).declaration is algorithms.ALGORITHMS[name].declaration
        assert isinstance(built, TrajectoryAlgorithm) == (settings.kernel is not None)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (
                {"algorithm__name": "flow_gppo"},
                r"unknown algorithm\.name 'flow_gppo'; did you mean 'flow_grpo'\?.*ddpo",
            ),
            ({"algorithm__name": "no_such_package:X"}, "module 'no_such_package' cannot be found"),
            (
                {"algorithm__name": "mix_grpo", "algorithm__options": {"window_sizes": 2}},
                r"unknown key 'algorithm\.options\.window_sizes'; did you mean 'window_size'\?",
            ),
            ({"algorithm__options": {"x": 1}}, r"'algorithm\.options\.x'; flow_grpo takes shared_noise"),
            (
                {"algorithm__name": "diffusion_nft", "algorithm__options": {"beta": 0}},
                r"algorithm\.options\.beta: .*greater than 0 \(got 0\)",
            ),
            ({"sampling__noise_level": 0}, r"noise_level is 0, but flow_grpo needs log-probabilities"),
            ({"sampling__noise_level": 1.2, "sampling__kernel": "cps"}, "kernel cps allows at most 1"),
            ({"sampling__kernel": "ddim"}, "kernel 'ddim' cannot serve flow_grpo; it takes flow_sde, dance_sde, cps"),
            ({"algorithm__name": "grpo_guard", "sampling__kernel": "cps"}, "cannot serve grpo_guard"),
            ({"algorithm__name": "ddpo"}, "ddpo cannot train family 'digits', which is a flow model"),
            (
                {"algorithm__name": "mix_grpo", "algorithm__options": {"window_size": 7}},
                r"window_size 7 does not fit in the first 6 of 8 transitions",
            ),
            (
                {"algorithm__name": "mix_grpo", "algorithm__options": {"strategy": "random", "stride": 2}},
                "stride say something only with strategy 'progressive'",
            ),
            (
                {"algorithm__name": "mix_grpo", "algorithm__options": {"decay_rate": 0.2}},
                "decay_rate say something only with decay 'exponential'",
            ),
            (
                {"algorithm__name": "flow_grpo_fast", "algorithm__options": {"window_range": [4, 8]}},
                r"window_range \[4, 8\) goes beyond the 7 transitions",
            ),
            (
                {"algorithm__name": "flow_grpo_fast", "algorithm__options": {"window_size": 5}},
                r"window_size 5 does not fit in window_range \[0, 4\)",
            ),
            (
                {"algorithm__name": "dpo", "plan__micro_batch_size": 12},
                "must hold all of them .* it holds 12 of 24: set plan.micro_batch_size",
            ),
            ({"algorithm__name": "dpo", "plan__samples_per_prompt": 1}, "a group at least two; it holds 1 of 1"),
            ({"algorithm__name": "dpo", "algorithm__advantage_clip": 3.0}, "advantage_clip is set, but dpo has none"),
            ({"algorithm__name": "dpo", "algorithm__kl_weight": 0.1}, "kl_weight is set, but dpo has none"),
            ({"algorithm__name": "flow_dppo", "algorithm__clip_range": 0.1}, "clip_range is set, but flow_dppo has"),
            (
                {"algorithm__name": "mix_grpo", "algorithm__timestep_fraction": 0.5},
                "timestep_fraction is set, but mix_grpo has none",
            ),
            (
                {"algorithm__name": "diffusion_nft", "algorithm__advantage_clip": "none"},
                "diffusion_nft measures advantages by it",
            ),
            (
                {"algorithm__name": "diffusion_nft", "algorithm__old_logprobs": "recompute"},
                "diffusion_nft needs no log-probabilities",
            ),
            (
                {"algorithm__name": "diffusion_nft", "sampling__noise_level": 0.7},
                r"sampling\.noise_level is set, but diffusion_nft draws",
            ),
            ({"algorithm__name": "dpo", "sampling__kernel": "cps"}, r"sampling\.kernel is set, but dpo draws"),
            ({"algorithm__kl": "flow_grpo"}, "compares transitions of a flow, but algorithm.kl_weight is 0"),
            (
                {"algorithm__name": "diffusion_nft", "algorithm__kl": "flow_grpo"},
                "diffusion_nft has no transitions of a flow",
            ),
        ],
    )
    def test_what_is_refused(self, overrides: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self._check(**overrides)

    def test_a_divisor_can_wait_for_the_commit_only_where_that_is_exact(self) -> None:
        assert not self._check().defers_divisor, "advantages are clamped"
        assert self._check(algorithm__advantage_clip="none").defers_divisor
        assert not self._check(algorithm__advantage_clip="none", algorithm__kl_weight=0.1).defers_divisor
        assert self._check(algorithm__name="flow_dppo").defers_divisor
        assert not self._check(algorithm__name="dpo").defers_divisor
        assert not self._check(algorithm__name="diffusion_nft").defers_divisor

    def test_the_gradient_without_a_common_divisor_is_divided_at_commit(self, config: Config) -> None:
        weights = []
        for factor, scale in ((1.0, None), (8.0, 0.125)):
            model = Toy(torch.float64)
            settings = _settings(
                config, "flow_grpo", algorithm__advantage_clip="none", optimizer__name="sgd", optimizer__lr=0.1
            )
            learner = Learner(model, settings)
            chains = _draw(model, settings, _groups())
            advantages = [None if value is None else factor * value for value in ADVANTAGES]
            learner.update(_groups(), 0, chains, advantages)
            learner.commit(0, (0,), scale)
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters().values()]))
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-14)

    def test_a_family_of_the_wrong_kind_is_refused_by_the_worker_too(self, config: Config) -> None:
        flow, noise = Toy(torch.float32).schedule(5), NoiseToy(torch.float32).schedule(5)
        build_algorithm(config()).check_schedule(flow)
        build_algorithm(config(algorithm__name="ddpo")).check_schedule(noise)
        build_algorithm(config(algorithm__name="dpo")).check_schedule(noise)
        for name, schedule in (("flow_grpo", noise), ("ddpo", flow), ("diffusion_nft", noise)):
            with pytest.raises(ConfigError, match=r"is a (flow|ddim) model"):
                build_algorithm(config(algorithm__name=name)).check_schedule(schedule)

    def test_the_driver_needs_no_torch(self) -> None:
        script = (
            "import sys; from digen.config import load_config; from digen.diffusion import algorithms\n"
            "for name in algorithms.ALGORITHMS:\n"
            "    family = {'model.family': 'sd15'} if name == 'ddpo' else {}\n"
            "    algorithms.check(load_config(None, {'algorithm.name': name, **family}), [])\n"
            "assert not {'torch', 'numpy', 'diffusers'} & set(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)


class TestOfAnotherPackage:
    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The plug-in's folder is on the path, and a distribution offers it by an entry point."""
        info = tmp_path / "signed_grpo_digen-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: signed-grpo-digen\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[digen.algorithms]\nsigned_grpo = signed_grpo_digen:SignedGRPO\n")
        monkeypatch.syspath_prepend(PLUGINS)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "signed_grpo_digen", raising=False)

    def test_it_is_short(self) -> None:
        assert len((PLUGINS / "signed_grpo_digen.py").read_text().splitlines()) <= 60

    @pytest.mark.parametrize("name", ["signed_grpo", "signed_grpo_digen:SignedGRPO"])
    def test_it_is_found_without_being_imported_and_trains(self, config: Config, name: str) -> None:
        settings = _settings(config, name, algorithm__options={"margin": 0.9}, algorithm__clip_range=0.3)
        assert algorithms.check(settings, []) is None
        assert "signed_grpo_digen" not in sys.modules
        case = Case(settings)
        signs = (1.0, None, 0.0, -1.0, 0.0, 1.0)
        torch.testing.assert_close(
            case.gradient, Case(_settings(config, "flow_grpo", algorithm__clip_range=0.3), advantages=signs).gradient
        )

    def test_its_mistakes_are_named_by_the_worker(self, config: Config) -> None:
        for overrides, message in (
            ({"algorithm__options": {"margins": 1}}, "did you mean 'margin'"),
            ({"sampling__kernel": "dance_sde"}, "cannot serve signed_grpo_digen:SignedGRPO; it takes flow_sde, cps"),
        ):
            with pytest.raises(ConfigError, match=message):
                build_algorithm(_settings(config, "signed_grpo_digen:SignedGRPO", **overrides))
        for target, message in (
            ("signed_grpo_digen:Signed", "cannot be imported: AttributeError"),
            ("signed_grpo_digen:SignedOptions", "is not a subclass of Algorithm"),
        ):
            with pytest.raises(ConfigError, match=message):
                build_algorithm(_settings(config, target))

    def test_an_unknown_name_lists_it(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'signed_grpo'"):
            algorithms.lookup("signed_grop")


def test_trajectories_need_a_kernel(config: Config) -> None:
    from digen.diffusion.algorithms.declaration import Declaration

    class Broken(TrajectoryAlgorithm):
        declaration = Declaration(kernels=())

    with pytest.raises(ConfigError, match="declares no kernel"):
        Broken(config())


def test_the_base_has_nothing_beside_the_weights(config: Config) -> None:
    algorithm: Algorithm = build_algorithm(config())
    parameters: Mapping[str, Tensor] = {"w": torch.zeros(1)}
    assert algorithm.published_parameters(parameters) is parameters
    assert algorithm.held() is None
