"""The gradient transaction, on a toy network where float64 shows what is equal and what is not."""

from __future__ import annotations

import errno
import json
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch.distributions import Normal

from digen.config import RunConfig
from digen.diffusion.optim import MovingAverage, ema_decay, learning_rate
from digen.diffusion.sampler import sample_sde
from digen.diffusion.state import Draft
from digen.diffusion.trajectories import Trajectories
from digen.diffusion.update import Learner
from digen.errors import CheckpointError, InvariantViolation, NumericsError, StalenessViolation, StepFailed
from digen.types import MicroBatch

Make = Callable[..., MicroBatch]
Config = Callable[..., RunConfig]
ADVANTAGES = (1.5, -0.3, 0.0, -7.0, 0.8, 1.0)
"""Zero, and one beyond the clamp."""


def _sample(model: Any, micro_batch: MicroBatch, num_steps: int = 5) -> Trajectories:
    prompts = [piece.prompt for piece, _ in micro_batch.samples()]
    return sample_sde(
        model,
        micro_batch,
        model.encode(prompts),
        model.schedule(num_steps),
        noise_level=0.7,
        unit=micro_batch.num_samples,
    )


def _recorded(chains: Trajectories) -> torch.Tensor:
    assert chains.log_probs is not None
    return chains.log_probs


def _gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters().values()])


def _flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters().values()])


def _nudge(model: Any, size: float = 1e-3) -> None:
    """Move the weights a little, so that ratios differ from 1."""
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters().values()):
            parameter.add_(
                size
                * torch.arange(parameter.numel(), dtype=parameter.dtype).add(position).cos().reshape(parameter.shape)
            )


def _transcription(model: Any, chains: Trajectories, advantages: Sequence[float | None], clip: float) -> torch.Tensor:
    """The summed loss, written down term by term from the formulas."""
    total = torch.zeros((), dtype=torch.float64)
    sigmas = chains.levels
    for row, given in enumerate(advantages):
        if given is None:
            continue
        advantage = max(-5.0, min(5.0, given))
        for i in range(chains.num_steps - 1):
            x, following = chains.latents[row, i], chains.latents[row, i + 1]
            sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
            v = model.predict(x[None], sigma[None], {k: c[row : row + 1] for k, c in chains.conditioning.items()})[0]
            s = 0.7 * (sigma / (1 - (sigmas[1] if i == 0 else sigma))) ** 0.5
            mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
            density = Normal(mean, s * (-dt) ** 0.5).log_prob(following)  # type: ignore[no-untyped-call]  # torch's gap
            log_prob = density.mean()
            ratio = (log_prob - _recorded(chains)[row, i]).exp()
            total = total + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
    return total


def _accumulated(
    toy: Any,
    config: RunConfig,
    batches: Sequence[MicroBatch],
    advantages: Sequence[float | None],
    dtype: torch.dtype,
    *,
    nudge: bool = True,
) -> tuple[torch.Tensor, Any]:
    model = toy(dtype)
    learner = Learner(model, config)
    chains = [_sample(toy(dtype), batch) for batch in batches]
    if nudge:
        _nudge(model)
    start = 0
    for batch, chain in zip(batches, chains, strict=True):
        learner.update(batch, 0, chain, advantages[start : start + batch.num_samples])
        start += batch.num_samples
    return _gradient(model), model


# The behaviour log-probs are of other weights than those that are trained here, which the start-up check would refuse.
LOOSE: dict[str, Any] = {"algorithm__clip_range": 0.3}


def test_gradient_equals_a_direct_transcription(toy: Any, micro_batch: Make, config: Config) -> None:
    advantages = (1.5, None, 0.0, -7.0, 0.8, 1.0)
    two_prompts = tuple(micro_batch(index=n, count=3, label=label).slices[0] for n, label in enumerate((3, 8)))
    batch = MicroBatch(0, 0, 0, two_prompts)
    gradient, model = _accumulated(toy, config(**LOOSE), [batch], advantages, torch.float64)
    for parameter in model.parameters().values():
        parameter.grad = None
    _transcription(model, _sample(toy(torch.float64), batch), advantages, 0.3).backward()  # type: ignore[no-untyped-call]  # torch leaves backward unannotated
    torch.testing.assert_close(gradient, _gradient(model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, "all"])
@pytest.mark.parametrize("forward_batch", [None, 1, 4, 8])
def test_timestep_chunks_and_padding_do_not_change_the_gradient(
    toy: Any,
    micro_batch: Make,
    config: Config,
    *,
    precision: tuple[torch.dtype, float],
    chunk: int | str,
    forward_batch: int | None,
) -> None:
    dtype, tolerance = precision
    reference, _ = _accumulated(toy, config(**LOOSE, algorithm__tsp_chunk=1), [micro_batch()], ADVANTAGES, dtype)
    overrides = {**LOOSE, "algorithm__tsp_chunk": chunk, "model__forward_batch": forward_batch}
    gradient, model = _accumulated(toy, config(**overrides), [micro_batch()], ADVANTAGES, dtype)
    assert float((gradient - reference).norm() / reference.norm()) <= tolerance
    assert set(model.forward_rows) == {(forward_batch or 6) * (4 if chunk == "all" else int(chunk))}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_cut_into_micro_batches_and_their_order_do_not_change_the_gradient(
    toy: Any, micro_batch: Make, config: Config, dtype: torch.dtype, tolerance: float
) -> None:
    whole = micro_batch(count=6)
    parts = [
        MicroBatch(0, 0, index, (type(whole.slices[0])("s0p0", whole.slices[0].prompt, start, count, 24),))
        for index, (start, count) in enumerate([(0, 1), (1, 3), (4, 2)])
    ]
    reference, _ = _accumulated(toy, config(**LOOSE), [whole], ADVANTAGES, dtype)
    gradient, _ = _accumulated(toy, config(**LOOSE), parts, ADVANTAGES, dtype)
    assert float((gradient - reference).norm() / reference.norm()) <= tolerance
    order = (2, 0, 1)
    shuffled = (*ADVANTAGES[4:], *ADVANTAGES[:1], *ADVANTAGES[1:4])
    gradient, _ = _accumulated(toy, config(**LOOSE), [parts[i] for i in order], shuffled, dtype)
    assert float((gradient - reference).norm() / reference.norm()) <= tolerance


def test_samples_left_out_add_nothing_and_are_not_counted(toy: Any, micro_batch: Make, config: Config) -> None:
    model = toy(torch.float64)
    learner = Learner(model, config())
    batch = micro_batch()
    chains = _sample(model, batch)
    kept = learner.update(batch, 0, chains, (1.5, None, None, -0.7, None, None))
    assert kept.num_terms == 2 * 4
    with_none = _gradient(model)
    zeros = Learner(zero_model := toy(torch.float64), config())
    assert zeros.update(batch, 0, chains, (1.5, 0.0, 0.0, -0.7, 0.0, 0.0)).num_terms == 6 * 4
    torch.testing.assert_close(with_none, _gradient(zero_model), rtol=1e-12, atol=1e-15)
    empty = learner.update(micro_batch(index=1), 0, _sample(model, micro_batch(index=1)), (None,) * 6)
    assert (empty.num_terms, empty.metrics) == (0, {})
    assert torch.equal(_gradient(model), with_none)
    assert learner.commit(0, (1, 0)).num_terms == 8


def test_commit_divides_once_by_the_number_of_terms_and_clips(toy: Any, micro_batch: Make, config: Config) -> None:
    sgd = {"optimizer__name": "sgd", "optimizer__lr": 0.5, "optimizer__betas": [0, 0], "optimizer__weight_decay": 0}
    for limit in (None, 1e-3):
        model = toy(torch.float64)
        learner = Learner(model, config(**sgd, optimizer__max_grad_norm=limit))
        for index in range(2):
            batch = micro_batch(index=index)
            learner.update(batch, 0, _sample(model, batch), ADVANTAGES)
        before, mean = _flat(model), _gradient(model) / (12 * 4)
        report = learner.commit(0, [0, 1])
        scale = 1.0 if limit is None else limit / (float(mean.norm()) + 1e-6)
        torch.testing.assert_close(_flat(model), before - 0.5 * scale * mean, rtol=1e-12, atol=1e-12)
        assert report.metrics["grad_norm"] == pytest.approx(float(mean.norm()))
        assert (report.version, report.num_terms, learner.version) == (1, 48, 1)
        assert all(parameter.grad is None for parameter in model.parameters().values())


def test_each_micro_batch_counts_exactly_once(toy: Any, micro_batch: Make, config: Config) -> None:
    model = toy(torch.float32)
    learner = Learner(model, config())

    def update(step: int, index: int) -> None:
        batch = micro_batch(step=step, index=index)
        learner.update(batch, learner.version, _sample(model, batch), ADVANTAGES)

    update(0, 0)
    update(0, 2)
    gradient = _gradient(model)
    with pytest.raises(InvariantViolation, match="exactly once"):
        update(0, 2)
    with pytest.raises(InvariantViolation, match="step 0 is open"):
        update(1, 3)
    for indices, message in (
        ((0,), r"not asked for \[2\]"),
        ((0, 1, 2), r"lacking \[1\]"),
        ((0, 2, 2), r"lacking \[2\]"),
    ):
        with pytest.raises(InvariantViolation, match=message):
            learner.commit(0, indices)
    with pytest.raises(InvariantViolation, match="transaction is of step 0"):
        learner.commit(1, (0, 2))
    assert torch.equal(_gradient(model), gradient)
    learner.commit(0, (2, 0))
    with pytest.raises(InvariantViolation):
        learner.commit(0, (0, 2))
    with pytest.raises(StepFailed, match="nothing to train on"):
        learner.commit(1, ())


class TestTimestepsThatFitInMemory:
    """``tsp_chunk: auto`` on a toy that runs out of memory above a number of rows."""

    @staticmethod
    def _limited(toy: Any, rows: int) -> Any:
        model = toy(torch.float64)
        predict = model.predict
        model.tried = []

        def limited(latents: Any, *arguments: Any) -> Any:
            model.tried.append(len(latents))
            if len(latents) > rows:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return predict(latents, *arguments)

        model.predict = limited
        return model

    @pytest.mark.parametrize(
        ("limit", "tried", "chosen"),
        [
            (24, [24], (6, 4)),
            (23, [24, 12], (6, 2)),
            (6, [24, 12, 6], (6, 1)),
            (5, [24, 12, 6, 3], (3, 1)),
            (1, [24, 12, 6, 3, 1], (1, 1)),
        ],
    )
    def test_the_largest_half_that_fits_is_used_and_the_gradient_stays(
        self, toy: Any, micro_batch: Make, config: Config, *, limit: int, tried: list[int], chosen: tuple[int, int]
    ) -> None:
        settings = config(**LOOSE, algorithm__tsp_chunk="auto")
        model = self._limited(toy, limit)
        learner, chains = Learner(model, settings), _sample(toy(torch.float64), micro_batch())
        _nudge(model)
        with capture_logs() as logs:
            metrics = learner.update(micro_batch(), 0, chains, ADVANTAGES).metrics
            learner.update(micro_batch(index=1), 0, chains, ADVANTAGES)
        assert model.tried[: len(tried)] == tried
        assert set(model.tried[len(tried) :]) == {chosen[0] * chosen[1]}
        assert (metrics["tsp/items"], metrics["tsp/timesteps"]) == chosen
        assert [(log["items"], log["timesteps"]) for log in logs] == [chosen], "once"
        expected, _ = _accumulated(
            toy, config(**LOOSE, algorithm__tsp_chunk=1), [micro_batch()], ADVANTAGES, torch.float64
        )
        torch.testing.assert_close(_gradient(model), 2 * expected, rtol=1e-12, atol=1e-14)

    def test_a_term_that_does_not_fit_is_an_error_and_leaves_nothing(
        self, toy: Any, micro_batch: Make, config: Config
    ) -> None:
        model = self._limited(toy, 0)
        learner = Learner(model, config())
        with pytest.raises(StepFailed, match="one sample at one timestep do not fit in memory"):
            learner.update(micro_batch(), 0, _sample(toy(torch.float64), micro_batch()), ADVANTAGES)
        assert all(parameter.grad is None for parameter in model.parameters().values())

    def test_a_given_size_that_does_not_fit_names_the_options(
        self, toy: Any, micro_batch: Make, config: Config
    ) -> None:
        model = self._limited(toy, 23)
        chains = _sample(toy(torch.float64), micro_batch())
        with pytest.raises(StepFailed, match=r"6 samples at 4 timesteps does not fit.* set algorithm\.tsp_chunk"):
            Learner(model, config(algorithm__tsp_chunk="all")).update(micro_batch(), 0, chains, ADVANTAGES)
        assert all(parameter.grad is None for parameter in model.parameters().values())

    def test_out_of_memory_in_the_backward_is_seen_and_undone(
        self, toy: Any, micro_batch: Make, config: Config
    ) -> None:
        model = toy(torch.float64)
        first = next(iter(model.parameters().values()))
        failures = [torch.OutOfMemoryError("CUDA out of memory")]

        def fail(gradient: torch.Tensor) -> torch.Tensor:
            if failures:
                raise failures.pop()
            return gradient

        first.register_hook(fail)
        chains = _sample(toy(torch.float64), micro_batch())
        learner = Learner(model, config(**LOOSE))
        metrics = learner.update(micro_batch(), 0, chains, ADVANTAGES).metrics
        assert metrics["tsp/timesteps"] == 2
        expected, _ = _accumulated(toy, config(**LOOSE), [micro_batch()], ADVANTAGES, torch.float64, nudge=False)
        torch.testing.assert_close(_gradient(model), expected, rtol=1e-12, atol=1e-14)

    def test_trying_again_in_an_open_transaction_keeps_its_gradient(
        self, toy: Any, micro_batch: Make, config: Config
    ) -> None:
        gradients = []
        for chunk in ("all", "auto"):
            model = toy(torch.float32)
            learner = Learner(model, config(**LOOSE, algorithm__tsp_chunk=chunk))
            for index, count in enumerate((6, 3)):  # the second size has to be tried as well
                batch = micro_batch(index=index, count=count)
                learner.update(batch, 0, _sample(model, batch), ADVANTAGES[:count])
            gradients.append(_gradient(model))
        assert torch.equal(*gradients)

    def test_the_choice_outlives_a_resume(self, toy: Any, micro_batch: Make, config: Config, tmp_path: Any) -> None:
        model = self._limited(toy, 12)
        learner = Learner(model, config())
        learner.update(micro_batch(), 0, _sample(toy(torch.float64), micro_batch()), ADVANTAGES)
        learner.commit(0, (0,))
        learner.save(tmp_path)
        resumed = self._limited(toy, 24)
        again = Learner(resumed, config())
        again.restore(tmp_path)
        batch = micro_batch(step=1)
        again.update(batch, 1, _sample(resumed, batch), ADVANTAGES)
        assert set(resumed.tried[5:]) == {12}, "the same last bits, whatever fits now"


def test_sizes_must_agree(toy: Any, micro_batch: Make, config: Config) -> None:
    model = toy(torch.float32)
    chains = _sample(model, micro_batch())
    with pytest.raises(InvariantViolation, match="6 samples, but 6 trajectories and 5 advantages"):
        Learner(model, config()).update(micro_batch(), 0, chains, ADVANTAGES[:5])
    with pytest.raises(InvariantViolation, match="7 samples, but 6 trajectories"):
        Learner(model, config()).update(micro_batch(count=7), 0, chains, (0.0,) * 7)


@pytest.mark.parametrize("window", [1, 2])
def test_the_staleness_bound_is_asserted_again(toy: Any, micro_batch: Make, config: Config, window: int) -> None:
    model = toy(torch.float32)
    learner = Learner(model, config(schedule__window=window))
    learner.version = 5
    batch = micro_batch(step=5)
    chains = _sample(model, batch)
    for version in (5 - window, 6):
        with pytest.raises(StalenessViolation, match=f"version {version}, the trainer holds version 5"):
            learner.update(batch, version, chains, ADVANTAGES)
    learner.update(batch, 5 - window + 1, chains, ADVANTAGES)


def test_nan_anywhere_is_an_error_and_voids_the_transaction(toy: Any, micro_batch: Make, config: Config) -> None:
    model = toy(torch.float32)
    learner = Learner(model, config())
    good, bad = micro_batch(index=0), micro_batch(index=1)
    chains = _sample(model, bad)
    learner.update(good, 0, _sample(model, good), ADVANTAGES)
    with pytest.raises(NumericsError, match="advantage of sample s0p1/2 is nan"):
        learner.update(bad, 0, chains, (1, 1, float("nan"), 1, 1, 1))
    chains.latents[4, 3] = torch.nan
    with pytest.raises(NumericsError, match="log-probability of sample s0p1/4 at denoising step 2 is not finite"):
        learner.update(bad, 0, chains, ADVANTAGES)
    assert all(parameter.grad is None for parameter in model.parameters().values())
    with pytest.raises(InvariantViolation, match="lacking"):
        learner.commit(0, (0, 1))


def test_a_missing_recorded_log_prob_is_an_error(toy: Any, micro_batch: Make, config: Config) -> None:
    model = toy(torch.float32)
    chains = _sample(model, micro_batch())
    _recorded(chains)[0, 1] = torch.nan
    with pytest.raises(NumericsError, match="recorded log-probability of sample s0p0/0 at denoising step 1"):
        Learner(model, config()).update(micro_batch(), 0, chains, ADVANTAGES)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(toy: Any, micro_batch: Make, config: Config) -> None:
    model = toy(torch.float32)
    learner = Learner(model, config())
    learner.update(micro_batch(), 0, _sample(model, micro_batch()), ADVANTAGES)
    next(iter(model.parameters().values())).grad[0, 0] = torch.inf
    before = _flat(model)
    with pytest.raises(NumericsError, match="gradient's norm at step 0 is"):
        learner.commit(0, (0,))
    assert torch.equal(_flat(model), before)
    assert learner.version == 0


class TestStartUpCheck:
    """Fresh log-probs are replayed once, before the first backward."""

    @staticmethod
    def _learner(
        toy: Any, micro_batch: Make, config: Config, error: float, **overrides: Any
    ) -> tuple[Learner, MicroBatch, Trajectories]:
        model = toy(torch.float64)
        learner = Learner(model, config(**overrides))
        chains = _sample(model, micro_batch())
        _recorded(chains)[2, 1] += error
        return learner, micro_batch(), chains

    def test_below_a_third_of_the_clip_the_recorded_ones_are_used(
        self, toy: Any, micro_batch: Make, config: Config
    ) -> None:
        learner, batch, chains = self._learner(toy, micro_batch, config, 3e-5)
        metrics = learner.update(batch, 0, chains, ADVANTAGES).metrics
        assert metrics["ratio/floor"] == pytest.approx(3e-5)
        assert metrics["ratio/mean"] != 1.0

    @pytest.mark.parametrize("choice", ["auto", "recompute"])
    def test_above_it_fresh_ones_are_recomputed(self, toy: Any, micro_batch: Make, config: Config, choice: str) -> None:
        learner, batch, chains = self._learner(toy, micro_batch, config, 4e-5, algorithm__old_logprobs=choice)
        metrics = learner.update(batch, 0, chains, ADVANTAGES).metrics
        assert metrics["ratio/mean"] == metrics["ratio/max"] == 1.0
        assert metrics["ratio/abs_logp_diff_max"] == pytest.approx(4e-5)
        second = micro_batch(index=1)
        again = learner.update(second, 0, _sample(learner._family, second), ADVANTAGES).metrics
        assert "ratio/floor" not in again

    def test_recompute_as_configured_always_does(self, toy: Any, micro_batch: Make, config: Config) -> None:
        learner, batch, chains = self._learner(toy, micro_batch, config, 1e-6, algorithm__old_logprobs="recompute")
        assert learner.update(batch, 0, chains, ADVANTAGES).metrics["ratio/max"] == 1.0

    def test_behaviour_refuses_and_names_both_numbers(self, toy: Any, micro_batch: Make, config: Config) -> None:
        learner, batch, chains = self._learner(toy, micro_batch, config, 4e-5, algorithm__old_logprobs="behaviour")
        with pytest.raises(NumericsError, match=r"up to 4e-05, .*\(3\.33e-05\), and algorithm\.old_logprobs"):
            learner.update(batch, 0, chains, ADVANTAGES)
        assert all(parameter.grad is None for parameter in learner._family.parameters().values())

    @pytest.mark.parametrize("choice", ["auto", "behaviour", "recompute"])
    def test_a_window_refuses_because_stale_samples_cannot_be_recomputed(
        self, toy: Any, micro_batch: Make, config: Config, choice: str
    ) -> None:
        overrides = {"schedule__window": 2, "algorithm__old_logprobs": choice}
        learner, batch, chains = self._learner(toy, micro_batch, config, 4e-5, **overrides)
        with pytest.raises(NumericsError, match=r"4e-05.*3\.33e-05.*stale samples"):
            learner.update(batch, 0, chains, ADVANTAGES)

    def test_stale_samples_use_the_behaviour_log_probs(self, toy: Any, micro_batch: Make, config: Config) -> None:
        overrides = {"schedule__window": 2, "algorithm__old_logprobs": "recompute"}
        learner, batch, chains = self._learner(toy, micro_batch, config, 0.0, **overrides)
        old = _sample(learner._family, micro_batch(step=1))
        learner.update(batch, 0, chains, ADVANTAGES)
        learner.commit(0, (0,))
        metrics = learner.update(micro_batch(step=1), 0, old, ADVANTAGES).metrics
        assert metrics["ratio/max"] > 1.0
        assert metrics["ratio/abs_logp_diff_max"] > 0


def _run(learner: Learner, micro_batch: Make, steps: range) -> None:
    for step in steps:
        for index in range(2):
            batch = micro_batch(step=step, index=index)
            learner.update(batch, learner.version, _sample(learner._family, batch), ADVANTAGES)
        learner.commit(step, (0, 1))


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_restored_run_continues_bit_for_bit(
    toy: Any, micro_batch: Make, config: Config, tmp_path: Any, name: str
) -> None:
    settings = config(
        optimizer__name=name, optimizer__ema_decay=0.9, optimizer__ema_interval=2, optimizer__schedule="cosine"
    )
    straight = Learner(toy(torch.float32), settings)
    _run(straight, micro_batch, range(3))
    hashes = straight.save(tmp_path / "three")
    assert set(hashes) == {path.name for path in (tmp_path / "three").iterdir()}
    _run(straight, micro_batch, range(3, 6))
    resumed = Learner(toy(torch.float32), settings)
    _run(resumed, micro_batch, range(1))
    assert resumed.restore(tmp_path / "three") == 3
    _run(resumed, micro_batch, range(3, 6))
    assert resumed.save(tmp_path / "resumed") == straight.save(tmp_path / "straight")


def test_steps_without_a_finite_gradient_are_skipped_up_to_a_limit(
    toy: Any, micro_batch: Make, config: Config, tmp_path: Any
) -> None:
    """A good step in between begins the count anew, and a checkpoint has it."""
    learner = Learner(toy(torch.float32), config(optimizer__max_skipped_steps=2, optimizer__ema_decay=0.9))

    def step(learner: Learner, *, finite: bool) -> dict[str, float]:
        number, before = learner.version, _flat(learner._family).clone()
        batch = micro_batch(step=number)
        learner.update(batch, number, _sample(learner._family, batch), ADVANTAGES)
        if not finite:
            next(p.grad for p in learner._family.parameters().values() if p.grad is not None).fill_(math.inf)
        metrics = dict(learner.commit(number, (0,)).metrics)
        assert learner.version == number + 1
        assert torch.equal(_flat(learner._family), before) is not finite
        return metrics

    for finite in (False, False, True, False, False):
        assert ("skipped_steps" in step(learner, finite=finite)) is not finite
    learner.save(tmp_path)
    again = Learner(toy(torch.float32), config(optimizer__max_skipped_steps=2, optimizer__ema_decay=0.9))
    again.restore(tmp_path)
    for found in (learner, again):
        with pytest.raises(NumericsError, match="at step 5 is inf after 2 skipped steps"):
            step(found, finite=False)


def test_commits_do_not_tear_what_is_being_written(
    toy: Any, micro_batch: Make, config: Config, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is held up until two more steps are trained."""
    learner = Learner(toy(torch.float32), config(optimizer__ema_decay=0.9))
    _run(learner, micro_batch, range(1))
    wanted = learner.save(tmp_path / "at once")
    trained, write = threading.Event(), Draft.write

    def held_up(draft: Draft) -> None:
        assert trained.wait(30)
        write(draft)

    monkeypatch.setattr(Draft, "write", held_up)
    saving = learner.begin_save(tmp_path / "beside")
    _run(learner, micro_batch, range(1, 3))
    assert saving.poll() is None
    trained.set()
    assert saving.finish() == wanted
    assert saving.poll() == wanted
    assert learner.restore(tmp_path / "beside") == 1


def test_a_disk_that_is_full_is_named(
    toy: Any, micro_batch: Make, config: Config, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(toy(torch.float32), config())
    _run(learner, micro_batch, range(1))
    blocked = tmp_path / "a file"
    blocked.touch()
    with pytest.raises(CheckpointError, match=rf"checkpoint {blocked} \(0\.0 MB\) cannot be written: File exists"):
        learner.begin_save(blocked)

    def full(draft: Draft) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Draft, "write", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; free space there"):
        learner.save(tmp_path / "full")
    monkeypatch.undo()
    assert learner.save(tmp_path / "free") == learner.save(tmp_path / "again")


DAMAGED = st.sampled_from(["state.json", "weights.safetensors", "optimizer.safetensors", "ema.safetensors"])
HEADERS = st.sampled_from(
    [b"\xff" * 8, (2**40).to_bytes(8, "little"), (8).to_bytes(8, "little") + b'{"a":{}}', b"[" * 99_999]
)
VALUES = (
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text("a[1", max_size=3) | st.just([[1, 2]])
)


@hypothesis.settings(
    max_examples=80, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    DAMAGED,
    st.integers(0, 4000),
    st.none() | HEADERS | st.binary(max_size=12),
    st.dictionaries(st.sampled_from(["version", "old_log_probs", "forwards", "more"]), VALUES, min_size=1),
)
def test_whatever_was_damaged_is_a_checkpoint_error(
    saved: tuple[Learner, Path], name: str, place: int, content: bytes | None, values: dict[str, Any]
) -> None:
    """A bit flips, the end is lost, bytes are others, or values have another type; or nothing is wrong with it."""
    learner, folder = saved
    file = folder / name
    before = file.read_bytes()
    at = place % len(before)
    if name == "state.json" and content is None:
        damaged = json.dumps(json.loads(before) | values).encode()
    elif content is None:
        damaged = before[:at] + bytes([before[at] ^ (1 << place % 8)]) + before[at + 1 :]
    else:
        damaged = content + before[len(content) :] if place % 2 else before[:at] + content
    try:
        file.write_bytes(damaged)
        with suppress(CheckpointError):
            learner.restore(folder)
    finally:
        file.write_bytes(before)
    assert learner.restore(folder) == 1


@pytest.fixture
def saved(toy: Any, micro_batch: Make, config: Config, tmp_path: Path) -> tuple[Learner, Path]:
    learner = Learner(toy(torch.float32), config(optimizer__ema_decay=0.9))
    _run(learner, micro_batch, range(1))
    learner.save(tmp_path)
    return learner, tmp_path


def test_an_untrained_learner_can_be_saved(toy: Any, micro_batch: Make, config: Config, tmp_path: Any) -> None:
    learner = Learner(toy(torch.float32), config())
    fresh = learner.save(tmp_path / "zero")
    _run(learner, micro_batch, range(1))
    assert learner.restore(tmp_path / "zero") == 0
    assert learner.save(tmp_path / "again") == fresh


def test_open_gradients_are_not_part_of_the_saved_state(
    toy: Any, micro_batch: Make, config: Config, tmp_path: Any
) -> None:
    learner = Learner(toy(torch.float32), config())
    _run(learner, micro_batch, range(1))
    before = learner.save(tmp_path / "closed")
    batch = micro_batch(step=1)
    learner.update(batch, 1, _sample(learner._family, batch), ADVANTAGES)
    assert learner.save(tmp_path / "open") == before
    learner.restore(tmp_path / "open")
    assert all(parameter.grad is None for parameter in learner._family.parameters().values())
    learner.update(batch, 1, _sample(learner._family, batch), ADVANTAGES)


def test_broken_checkpoints_are_named(toy: Any, config: Config, tmp_path: Any) -> None:
    learner = Learner(toy(torch.float32), config())
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        learner.restore(tmp_path)
    learner.save(tmp_path)
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"weights\.safetensors cannot be read"):
        learner.restore(tmp_path)
    other = toy(torch.float32)
    other.network = torch.nn.Sequential(torch.nn.Linear(9, 6))
    Learner(other, config()).save(tmp_path)
    with pytest.raises(CheckpointError, match="of another model"):
        learner.restore(tmp_path)


def test_parked_state_comes_back_bit_for_bit(toy: Any, micro_batch: Make, config: Config) -> None:
    model = toy(torch.float32)
    learner = Learner(model, config())
    _run(learner, micro_batch, range(1))
    batch = micro_batch(step=1)
    chains = _sample(model, batch)
    learner.update(batch, 1, chains, ADVANTAGES)
    gradient = _gradient(model)
    moments = {key: value.clone() for state in learner._optimizer.state.values() for key, value in state.items()}
    learner.park()
    learner.park()
    assert all(parameter.grad is None for parameter in model.parameters().values())
    with pytest.raises(InvariantViolation, match="during an assist"):
        learner.update(micro_batch(step=1, index=1), 1, chains, ADVANTAGES)
    with pytest.raises(InvariantViolation, match="during an assist"):
        learner.commit(1, (0,))
    learner.unpark()
    learner.unpark()
    assert torch.equal(_gradient(model), gradient)
    after = {key: value for state in learner._optimizer.state.values() for key, value in state.items()}
    assert all(torch.equal(after[key], moments[key]) for key in moments)
    learner.commit(1, (0,))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.25]), ("cosine", [0.5, 1, 1, 0.853553, 0.146447])],
)
def test_learning_rate_schedules(config: Config, schedule: str, expected: list[float]) -> None:
    section = config(optimizer__lr=1.0 - 1e-16, optimizer__warmup_steps=2, optimizer__schedule=schedule).optimizer
    rates = [learning_rate(section, step, 10) for step in (0, 1, 2, 4, 8)]
    assert rates == pytest.approx(expected, abs=1e-5)


def test_moving_average() -> None:
    assert [ema_decay(k, 0.9) for k in (0, 7, 80, 1000)] == pytest.approx([0.1, 8 / 17, 0.9, 0.9])
    weights = {"w": torch.tensor([0.0], dtype=torch.float64)}
    average = MovingAverage(weights, decay=0.9, interval=2)
    weights["w"].fill_(1.0)
    average.update(weights, 0)
    assert float(average.tensors["w"]) == 0.0
    average.update(weights, 1)
    assert float(average.tensors["w"]) == pytest.approx(1 - 2 / 11)
