"""The seed invariants: distinct across steps and samples, and independent of everything that is not in the key."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch

from digen.diffusion.seeds import INITIAL_NOISE, STEP_NOISE, draw, streams
from digen.types import MicroBatch

Make = Callable[..., MicroBatch]


def _noise(micro_batch: MicroBatch, purpose: str = INITIAL_NOISE) -> torch.Tensor:
    return draw(streams(micro_batch.seeds(purpose)), (1, 8, 8))


def test_samples_steps_groups_and_purposes_differ(micro_batch: Make) -> None:
    rows = [
        *_noise(micro_batch(count=24)),
        *_noise(micro_batch(count=24), STEP_NOISE),
        *_noise(micro_batch(step=1, count=24)),
        *_noise(micro_batch(index=1, count=24)),
        *_noise(micro_batch(run_seed=1, count=24)),
    ]
    assert not any(torch.equal(a, b) for a, b in combinations(rows, 2))


def test_the_cut_into_micro_batches_does_not_matter(micro_batch: Make) -> None:
    whole = _noise(micro_batch(count=24))
    pieces = [_noise(micro_batch(start=start, count=count)) for start, count in ((0, 5), (5, 1), (6, 18))]
    assert torch.equal(whole, torch.cat(pieces))


def test_the_global_generator_is_neither_used_nor_touched(micro_batch: Make) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = _noise(micro_batch())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(_noise(micro_batch()), first)


def test_a_stream_goes_on_and_rows_do_not_share_it(micro_batch: Make) -> None:
    generators = streams(micro_batch(count=2).seeds(STEP_NOISE))
    first, second = draw(generators, (4,)), draw(generators, (4,))
    assert not torch.equal(first, second)
    alone = streams(micro_batch(count=2).seeds(STEP_NOISE))[1:]
    assert torch.equal(draw(alone, (4,))[0], first[1])
    assert torch.equal(draw(alone, (4,))[0], second[1])


def test_noise_is_standard_normal(micro_batch: Make) -> None:
    noise = torch.cat([_noise(micro_batch(step=step, count=24)) for step in range(20)])
    assert noise.dtype == torch.float32
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02
