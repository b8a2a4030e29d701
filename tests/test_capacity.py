"""What GPUs can do: scaling, types and memory, against figures worked out by hand."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from digen import RunConfig, load_config
from digen.capacity import Capacity, Group, Layout, parse_gpus
from digen.costs import durations_for
from digen.errors import ConfigError

TYPES = {"a": {"memory_gib": 48}, "c": {"memory_gib": 96, "generate": 2, "update": 4}}
MEMORY = {"parameters_b": 1.073741824, "activation_gib": 3, "generation_gib": 5, "reserve_gib": 1}
"""2^30 parameters, so that a byte of each is a GiB."""


def config(**overrides: Any) -> RunConfig:
    """B = 4 micro-batches of 8 samples; durations on 2 + 4 GPUs of type a."""
    fields: dict[str, Any] = {
        "plan.prompts_per_step": 4,
        "plan.samples_per_prompt": 8,
        "costs.durations": "'g=100 r=10 u=40 h=120 c_load=1 c_off=2 y_opt=6 y_sync=7'",
        "costs.generator_gpus": 2,
        "costs.trainer_gpus": 4,
        "costs.types": TYPES,
        "costs.scaling": {"generate": [[1, 1], [2, 1.5], [8, 3]], "update": [[1, 1], [8, 8]]},
        "costs.fixed_share": 0,
        "costs.memory": MEMORY,
    }
    return load_config(None, fields | {name.replace("__", "."): value for name, value in overrides.items()})


def layout(trainer: str, *generators: str) -> Layout:
    """``layout("4c", "2a", "2a")``."""
    groups = [Group(tuple((word[-1], int(word[:-1])) for word in text.split("+"))) for text in (trainer, *generators)]
    return Layout(tuple(groups[1:]), groups[0])


def scaled(place: Layout, size: int = 8, chunk: int = 7, **overrides: Any) -> dict[str, Any]:
    """Durations as floats."""
    found = Capacity(config(**overrides)).durations(place, micro_batch_size=size, tsp_chunk=chunk)
    return {
        "g": [float(value) for value in found.generate_s],
        "r": [float(value) for value in found.score_s],
        **{letter: float(getattr(found, name)) for letter, name in (("u", "update_s"), ("h", "assist_s"))},
        **{letter: float(getattr(found, name)) for letter, name in (("y_opt", "commit_s"), ("y_sync", "load_s"))},
        "switch": float(found.switch_in_s + found.switch_out_s),
        "B": found.num_micro_batches,
        "per group": found.micro_batches_per_group,
    }


# ---- scaling ---------------------------------------------------------------------------------------------------------


def test_the_layout_that_was_measured_keeps_its_durations() -> None:
    job = config()
    same = Capacity(job).durations(layout("4a", "2a"), micro_batch_size=8, tsp_chunk=7)
    assert same == durations_for(job)


def test_groups_follow_their_stage_s_curve_between_its_points() -> None:
    # generate: 1, 1.5, 2 at 1, 2, 4 GPUs (half a point for two more); update: linear.
    found = scaled(layout("8a", "1a", "4a"))
    assert found["g"] == pytest.approx([150, 75])
    assert found["r"] == pytest.approx([15, 7.5])
    assert (found["u"], found["y_opt"]) == pytest.approx((20, 3))
    assert found["h"] == pytest.approx(120 * 2 / 3)  # an assist is a generation: 2 on four GPUs, 3 on eight
    assert (found["y_sync"], found["switch"]) == (7, 3)


def test_types_have_a_speed_for_each_stage() -> None:
    found = scaled(layout("4c", "2c"))
    assert (found["g"], found["h"], found["u"], found["y_opt"]) == ([50], 60, 10, 1.5)


def test_a_mixed_group_goes_at_the_pace_of_its_slowest() -> None:
    mixed, slow = (scaled(layout(text))["u"] for text in ("2a+2c", "4a"))
    assert mixed == slow


def test_colocation_has_every_stage_on_all_gpus() -> None:
    found = scaled(layout("8a"))
    assert (found["g"], found["h"], found["u"]) == ([50], 50, 20)


def test_smaller_micro_batches_keep_a_share_of_their_time() -> None:
    half = scaled(layout("4a", "2a"), size=4, costs__fixed_share=0.2)
    assert half["g"] == pytest.approx([60])  # 0.2 + 0.8 / 2
    assert (half["u"], half["h"]) == pytest.approx((24, 72))
    assert half["r"] == [5]
    assert (half["y_opt"], half["B"], half["per group"]) == (6, 8, 2)
    linear = scaled(layout("4a", "2a"), size=2)
    assert (linear["g"], linear["u"], linear["B"], linear["per group"]) == ([25], 10, 16, 4)


def test_several_measured_groups_count_as_their_mean() -> None:
    job = config(costs__durations="g=100,50 r=1,2 u=40", workers__generators=2)
    found = Capacity(job).durations(layout("4a", "2a"), micro_batch_size=8, tsp_chunk=7)
    assert (found.generate_s, found.score_s) == ((Decimal(75),), (Decimal("1.5"),))


def test_a_chunk_changes_updates_where_the_costs_tell_how() -> None:
    assert scaled(layout("4a", "2a"), chunk=1, costs__tsp_share=0.25)["u"] == 160
    with pytest.raises(ConfigError, match=r"costs.tsp_share: nothing says"):
        scaled(layout("4a", "2a"), chunk=1)


@pytest.mark.parametrize("gpus", [9, 16])
def test_no_group_is_beyond_its_curve(gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"costs.scaling.generate: no point for {gpus} GPUs; .* from 1 to 8"):
        scaled(layout("4a", f"{gpus}a"))


def test_a_calibrated_model_stands_for_half_of_its_gpus_each() -> None:
    for gpus, half in ((16, "8a"), (32, "16a")):
        job = load_config(None, {"costs.model": "wan2.1", "costs.gpus": gpus, "costs.types": {"a": {}}})
        same = Capacity(job).durations(layout(half, half), micro_batch_size=24, tsp_chunk=7)
        assert same == durations_for(job)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_trainer_shares_out_everything_but_activations() -> None:
    need = Capacity(config()).trainer_need(layout("4a").trainer, micro_batch_size=8, tsp_chunk=6, assists=False)
    assert need is not None
    # 2 + 4 + 12 bytes over 4 GPUs; 2 samples of 6 timesteps on each
    assert {name: float(amount) for name, amount in need.parts} == {
        "weights": 0.5,
        "gradients": 1,
        "optimizer": 3,
        "activations": 36,
        "reserve": 1,
    }
    assert (float(need.total), float(need.available), need.fits) == (41.5, 48, True)
    assert str(need) == (
        "weights 0.5 + gradients 1.0 + optimizer 3.0 + activations 36.0 + reserve 1.0 = 41.5 GiB a GPU of 48.0"
    )


def test_what_is_missing_is_said() -> None:
    need = Capacity(config()).trainer_need(layout("4a").trainer, micro_batch_size=8, tsp_chunk=8, assists=False)
    assert need is not None
    assert (need.fits, float(need.missing)) == (False, 5.5)
    assert str(need).endswith("= 53.5 GiB a GPU of 48.0, 5.5 GiB are missing")


@pytest.mark.parametrize(
    ("overrides", "total"),
    [
        ({}, 0.5 + 4 + 10 + 1),  # an assist holds everything, and two samples of 5 GiB instead of 3 GiB
        ({"workers.offload": True}, 0.5 + 10 + 1),  # less gradients and optimizer
        ({"costs.memory": MEMORY | {"generation_gib": 0.5}}, 0.5 + 4 + 6 + 1),  # the update is the peak
        ({"costs.memory": MEMORY | {"trainable_share": 0.25}}, 0.5 + 1 + 10 + 1),
        ({"model.forward_batch": 4}, 0.5 + 4 + 5 + 1),  # one sample on each GPU at a time
    ],
)
def test_the_peak_may_be_an_assist(overrides: dict[str, Any], total: float) -> None:
    capacity = Capacity(config(**overrides))
    need = capacity.trainer_need(layout("4a").trainer, micro_batch_size=8, tsp_chunk=1, assists=True)
    assert need is not None
    assert float(need.total) == total


def test_a_generator_holds_all_weights_unless_they_are_sharded() -> None:
    group = layout("1c", "4a").generators[0]
    whole = Capacity(config()).generator_need(group, micro_batch_size=8)
    shared = Capacity(config(costs__memory=MEMORY | {"shard_generators": True})).generator_need(
        group, micro_batch_size=8
    )
    assert whole is not None
    assert shared is not None
    assert [float(need.total) for need in (whole, shared)] == [2 + 10 + 1, 0.5 + 10 + 1]


def test_a_mixed_group_has_the_memory_of_its_smallest() -> None:
    need = Capacity(config()).trainer_need(layout("4a+4c").trainer, micro_batch_size=8, tsp_chunk=1, assists=False)
    assert need is not None
    assert need.available == 48


def test_nothing_is_checked_without_a_memory_model() -> None:
    capacity = Capacity(config(costs__memory={}))
    group = layout("4a").trainer
    assert capacity.trainer_need(group, micro_batch_size=8, tsp_chunk=1, assists=True) is None
    assert capacity.generator_need(group, micro_batch_size=8) is None


@pytest.mark.parametrize(("size", "even"), [(1, True), (2, True), (3, False), (4, True), (6, False), (8, True)])
def test_samples_are_shared_out_evenly(size: int, even: bool) -> None:
    group = layout(f"{size}a").trainer
    assert Capacity(config()).even(group, 8) is even
    assert Capacity(config()).even(layout("8a").trainer, 4)


# ---- which GPUs there are --------------------------------------------------------------------------------------------


def test_gpus_are_read_by_type() -> None:
    costs = config().costs
    assert parse_gpus("a=8, c=4", costs) == {"a": 8, "c": 4}
    assert parse_gpus("16", load_config().costs) == {"gpu": 16}
    assert parse_gpus("16", load_config(None, {"costs.types": {"mine": {}}}).costs) == {"mine": 16}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16", "--gpus 16: costs.types has a, c; say how many of each: a=8"),
        ("b=3", r"--gpus b=3: 'b' is not described in costs.types \(known: a, c\)"),
        ("a=0", "--gpus a=0: 'a=0' is not a number of GPUs"),
        ("a=-1", "not a number of GPUs"),
        ("a=1.5", "not a number of GPUs"),
        ("", "not a number of GPUs"),
        ("a=8,", "not a number of GPUs"),
        ("a=8,a=8", "--gpus a=8,a=8: a is given twice"),
    ],
)
def test_gpus_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gpus(text, config().costs)
