from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from digen.diffusion.sampler import sample_clean, sample_ode, sample_sde
from digen.diffusion.sde import STEPS, euler, flow_sde
from digen.diffusion.seeds import INITIAL_NOISE, STEP_NOISE, draw, streams
from digen.diffusion.trajectories import Trajectories
from digen.diffusion.units import padded_units
from digen.errors import InvariantViolation, NumericsError
from digen.types import MicroBatch

Make = Callable[..., MicroBatch]


def _conditioning(toy: Any, micro_batch: MicroBatch) -> Any:
    return toy.encode([piece.prompt for piece, _ in micro_batch.samples()])


def _sample(toy: Any, micro_batch: MicroBatch, *, unit: int, num_steps: int = 5, **options: Any) -> Trajectories:
    return sample_sde(
        toy,
        micro_batch,
        _conditioning(toy, micro_batch),
        toy.schedule(num_steps),
        unit=unit,
        **{"noise_level": 0.7, **options},
    )


def _log_probs(chains: Trajectories) -> torch.Tensor:
    assert chains.log_probs is not None
    return chains.log_probs


def test_units_are_padded_with_a_real_row() -> None:
    assert list(padded_units(range(5), 2)) == [([0, 1], 2), ([2, 3], 2), ([4, 4], 1)]
    assert list(padded_units([7, 9], 4)) == [([7, 9, 9, 9], 2)]
    assert list(padded_units([], 4)) == []


def test_shapes_and_types(toy: Any, micro_batch: Make) -> None:
    chains = _sample(toy(torch.float32), micro_batch(), unit=4)
    assert chains.latents.shape == (6, 6, 3, 2)
    assert _log_probs(chains).shape == (6, 5)
    assert chains.levels.shape == (6,)
    assert {t.dtype for t in (chains.latents, _log_probs(chains), chains.levels)} == {torch.float32}
    assert bool(torch.isfinite(_log_probs(chains)[:, :-1]).all())


def test_chains_are_a_transcription_of_the_algorithm(toy: Any, micro_batch: Make) -> None:
    model, batch = toy(torch.float64), micro_batch(count=3)
    chains = _sample(model, batch, unit=3)
    noise, x = streams(batch.seeds(STEP_NOISE)), draw(streams(batch.seeds(INITIAL_NOISE)), (3, 2)).double()
    sigmas = model.schedule(5).levels
    for i in range(5):
        assert torch.equal(chains.latents[:, i], x)
        sigma, following = sigmas[i].expand(3), sigmas[i + 1].expand(3)
        with torch.no_grad():
            v = model.predict(x, sigma, chains.conditioning)
        if i == 4:
            x = x - sigmas[4] * v
            break
        step = flow_sde(x, v, sigma, following, second_level=sigmas[1], noise_level=0.7)
        x = step.mean + step.std * draw(noise, (3, 2))
        torch.testing.assert_close(_log_probs(chains)[:, i], step.log_prob(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(chains.latents[:, 5], x, rtol=0, atol=1e-12)


def test_the_noiseless_last_step_records_no_usable_log_prob(toy: Any, micro_batch: Make) -> None:
    assert bool(torch.isnan(_log_probs(_sample(toy(torch.float32), micro_batch(), unit=6))[:, -1]).all())


@pytest.mark.parametrize("unit", [1, 4, 6, 11])
def test_every_forward_has_the_unit_size_and_padding_changes_no_sample(toy: Any, micro_batch: Make, unit: int) -> None:
    model = toy(torch.float64)
    chains = _sample(model, micro_batch(), unit=unit)
    assert set(model.forward_rows) == {unit}
    reference = _sample(toy(torch.float64), micro_batch(), unit=6)
    torch.testing.assert_close(chains.latents, reference.latents, rtol=1e-12, atol=1e-12)


def test_the_cut_of_a_group_does_not_change_its_samples(toy: Any, micro_batch: Make) -> None:
    whole = _sample(toy(torch.float32), micro_batch(count=8), unit=4)
    parts = [_sample(toy(torch.float32), micro_batch(start=start, count=4), unit=4) for start in (0, 4)]
    assert torch.equal(whole.latents, torch.cat([part.latents for part in parts]))
    assert torch.equal(_log_probs(whole)[:, :-1], torch.cat([_log_probs(part)[:, :-1] for part in parts]))


def test_a_diverged_policy_names_sample_and_step(toy: Any, micro_batch: Make) -> None:
    model = toy(torch.float32)
    velocity = model.predict
    calls: list[int] = []

    def broken(latents: Any, sigma: Any, conditioning: Any) -> Any:
        calls.append(1)
        output = velocity(latents, sigma, conditioning)
        if len(calls) == 3:
            output[1, 0, 0] = torch.nan
        return output

    model.predict = broken
    with pytest.raises(NumericsError, match=r"sample s0p0/1 is not finite after denoising step 2"):
        _sample(model, micro_batch(), unit=6)


def test_ode_samples_follow_euler_and_name_a_broken_row(toy: Any) -> None:
    model = toy(torch.float64)
    start = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    conditioning = {"label": torch.ones(5, 2, dtype=torch.float64)}
    sigmas = model.schedule(4).levels
    x = start.double()
    with torch.no_grad():
        for i in range(4):
            x = x + (sigmas[i + 1] - sigmas[i]) * model.predict(x, sigmas[i].expand(5), conditioning)
    torch.testing.assert_close(
        sample_ode(model, conditioning, model.schedule(4), start, unit=2), x, rtol=1e-12, atol=1e-12
    )
    start[3] = torch.inf
    with pytest.raises(NumericsError, match="row 3"):
        sample_ode(model, conditioning, model.schedule(4), start, unit=2)


@pytest.mark.parametrize("kernel", ["dance_sde", "cps"])
def test_noisy_steps_in_the_middle_and_ode_steps_around_them(toy: Any, micro_batch: Make, kernel: str) -> None:
    model, batch, noisy = toy(torch.float64), micro_batch(count=3), (1, 2)
    chains = _sample(model, batch, unit=3, kernel=kernel, noisy=noisy, keep_means=True)
    assert chains.means is not None
    noise, sigmas = streams(batch.seeds(STEP_NOISE)), model.schedule(5).levels
    for i in range(5):
        x, following = chains.latents[:, i], chains.latents[:, i + 1]
        sigma, sigma_next = sigmas[i].expand(3), sigmas[i + 1].expand(3)
        with torch.no_grad():
            v = model.predict(x, sigma, chains.conditioning)
        if i not in noisy:
            torch.testing.assert_close(following, euler(x, v, sigma, sigma_next), rtol=0, atol=1e-12)
            assert bool(torch.isnan(_log_probs(chains)[:, i]).all())
            assert bool(torch.isnan(chains.means[:, i]).all())
            continue
        step = STEPS[kernel](x, v, sigma, sigma_next, second_level=sigmas[1], noise_level=0.7)
        torch.testing.assert_close(following, step.sample(draw(noise, (3, 2)).double()), rtol=0, atol=1e-12)
        torch.testing.assert_close(_log_probs(chains)[:, i], step.log_prob(following), rtol=0, atol=1e-12)
        torch.testing.assert_close(chains.means[:, i], step.mean, rtol=0, atol=1e-12)


def test_noiseless_steps_are_the_solvers(toy: Any, micro_batch: Make) -> None:
    model, batch = toy(torch.float64), micro_batch(count=3)
    conditioning, schedule = _conditioning(model, batch), model.schedule(6)
    start = draw(streams(batch.seeds(INITIAL_NOISE)), (3, 2))
    clean = sample_clean(model, batch, conditioning, schedule, unit=2, solver="dpm++")
    expected = sample_ode(model, conditioning, schedule, start, unit=3, solver="dpm++")
    torch.testing.assert_close(clean.latents[:, 0], expected, rtol=0, atol=1e-6)
    chains = _sample(model, batch, unit=3, num_steps=6, noisy=(), solver="dpm++")
    torch.testing.assert_close(chains.latents[:, -1], expected, rtol=0, atol=1e-6)
    by_euler = sample_clean(model, batch, conditioning, schedule, unit=3)
    assert float((by_euler.latents[:, 0] - expected).abs().max()) > 1e-3
    mixed = _sample(model, batch, unit=3, num_steps=6, noisy=(2,), solver="dpm++")
    again = mixed.latents[:, 3]  # after noise the solver starts anew: its first step is Euler's
    with torch.no_grad():
        v = model.predict(again, schedule.levels[3].expand(3), conditioning)
    torch.testing.assert_close(
        mixed.latents[:, 4],
        euler(again, v, schedule.levels[3].expand(3), schedule.levels[4].expand(3)),
        rtol=0,
        atol=1e-6,
    )


def test_clean_samples_are_all_that_is_kept(toy: Any, micro_batch: Make) -> None:
    model, batch = toy(torch.float32), micro_batch()
    drawn = sample_clean(model, batch, _conditioning(model, batch), model.schedule(5), unit=4)
    assert drawn.latents.shape == (6, 1, 3, 2)
    assert set(drawn.arrays()) == {"latents", "levels", "times", "conditioning.label"}
    again = Trajectories.from_arrays(drawn.arrays())
    assert again.log_probs is None
    assert torch.equal(again.latents, drawn.latents)
    broken = model.predict
    model.predict = lambda *arguments: broken(*arguments) * torch.nan
    with pytest.raises(NumericsError, match="sample s0p0/0 is not finite after denoising step 0"):
        sample_clean(model, batch, _conditioning(model, batch), model.schedule(5), unit=4)


def test_shared_noise_is_the_groups_and_its_samples_part_at_the_first_noisy_step(toy: Any, micro_batch: Make) -> None:
    two = tuple(micro_batch(index=n, count=3).slices[0] for n in range(2))
    chains = _sample(toy(torch.float32), MicroBatch(0, 0, 0, two), unit=6, shared_noise=True)
    assert len(torch.unique(chains.latents[:, 0], dim=0)) == 2
    assert len(torch.unique(chains.latents[:, 1], dim=0)) == 6
    cut = _sample(toy(torch.float32), micro_batch(count=2, start=1), unit=6, shared_noise=True)
    assert torch.equal(cut.latents[:, 0], chains.latents[1:3, 0]), "whatever the cut"


def test_trajectories_survive_the_way_through_buffers(toy: Any, micro_batch: Make) -> None:
    chains = _sample(toy(torch.float32), micro_batch(), unit=6)
    again = Trajectories.from_arrays({name: memoryview(array) for name, array in chains.arrays().items()})
    assert torch.equal(again.latents, chains.latents)
    assert torch.equal(again.levels, chains.levels)
    assert torch.equal(again.conditioning["label"], chains.conditioning["label"])
    assert again.latents.data_ptr() != chains.latents.data_ptr()


def test_short_or_missing_trajectories_are_errors(toy: Any, micro_batch: Make) -> None:
    arrays = _sample(toy(torch.float32), micro_batch(), unit=6).arrays()
    with pytest.raises(InvariantViolation, match="lacks levels"):
        Trajectories.from_arrays({name: array for name, array in arrays.items() if name != "levels"})
    for broken in (
        {"latents": arrays["latents"][:, :-1]},
        {"conditioning.label": arrays["conditioning.label"][:-1]},
        {"levels": arrays["levels"][:-1]},
        {"log_probs": arrays["log_probs"][:, :-1]},
        {"means": arrays["latents"]},
    ):
        with pytest.raises(InvariantViolation, match="incomplete"):
            Trajectories.from_arrays({**arrays, **broken})
    with pytest.raises(InvariantViolation, match="incomplete"):
        Trajectories.from_arrays({name: array for name, array in arrays.items() if name != "log_probs"})
