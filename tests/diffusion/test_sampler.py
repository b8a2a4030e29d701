from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from digen.diffusion.sampler import sample_ode, sample_sde
from digen.diffusion.sde import flow_sde
from digen.diffusion.seeds import INITIAL_NOISE, STEP_NOISE, draw, streams
from digen.diffusion.trajectories import Trajectories
from digen.diffusion.units import padded_units
from digen.errors import InvariantViolation, NumericsError
from digen.types import MicroBatch

Make = Callable[..., MicroBatch]


def _sample(toy: Any, micro_batch: MicroBatch, *, unit: int, num_steps: int = 5) -> Trajectories:
    prompts = [piece.prompt for piece, _ in micro_batch.samples()]
    return sample_sde(toy, micro_batch, toy.encode(prompts), toy.schedule(num_steps), noise_level=0.7, unit=unit)


def test_units_are_padded_with_a_real_row() -> None:
    assert list(padded_units(range(5), 2)) == [([0, 1], 2), ([2, 3], 2), ([4, 4], 1)]
    assert list(padded_units([7, 9], 4)) == [([7, 9, 9, 9], 2)]
    assert list(padded_units([], 4)) == []


def test_shapes_and_types(toy: Any, micro_batch: Make) -> None:
    chains = _sample(toy(torch.float32), micro_batch(), unit=4)
    assert chains.latents.shape == (6, 6, 3, 2)
    assert chains.log_probs.shape == (6, 5)
    assert chains.levels.shape == (6,)
    assert {t.dtype for t in (chains.latents, chains.log_probs, chains.levels)} == {torch.float32}
    assert bool(torch.isfinite(chains.log_probs[:, :-1]).all())


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
        step = flow_sde(x, v, sigma, following, second_sigma=sigmas[1], noise_level=0.7)
        x = step.mean + step.std * draw(noise, (3, 2))
        torch.testing.assert_close(chains.log_probs[:, i], step.log_prob(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(chains.latents[:, 5], x, rtol=0, atol=1e-12)


def test_the_noiseless_last_step_records_no_usable_log_prob(toy: Any, micro_batch: Make) -> None:
    assert bool(torch.isnan(_sample(toy(torch.float32), micro_batch(), unit=6).log_probs[:, -1]).all())


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
    assert torch.equal(whole.log_probs[:, :-1], torch.cat([part.log_probs[:, :-1] for part in parts]))


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
    for broken in ({"latents": arrays["latents"][:, :-1]}, {"conditioning.label": arrays["conditioning.label"][:-1]}):
        with pytest.raises(InvariantViolation, match="incomplete"):
            Trajectories.from_arrays({**arrays, **broken})
