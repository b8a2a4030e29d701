"""The arithmetic of a plan, the order of its prompts, and its seeds."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import digen.plan
from digen.errors import PlanError
from digen.plan import Plan
from digen.types import MicroBatch, Prompt

ROOT = Path(__file__).parents[1]

Axis = Literal["generation", "batch"]

GOLDEN_ORDER = ["ade", "gbc", "fba", "fde", "cga"]
GOLDEN_DIGEST = "79964d4ffad899c75006dcddebda5e3ccafe3d11ccb3c7979f82e3cf56139ff7"


def make(num_prompts: int = 4, **kwargs: Any) -> Plan:
    arguments: dict[str, Any] = {"num_steps": 1000, "prompts_per_step": 4, "samples_per_prompt": 2} | kwargs
    return Plan([f"prompt {i}" for i in range(num_prompts)], **arguments)


def texts(step: tuple[MicroBatch, ...]) -> list[str]:
    """The prompt of every group of a step, in order of the groups."""
    return list({piece.uid: piece.prompt.text for micro_batch in step for piece in micro_batch.slices}.values())


def rows(step: tuple[MicroBatch, ...]) -> list[tuple[str, int]]:
    return [(piece.uid, sample) for micro_batch in step for piece, sample in micro_batch.samples()]


def test_a_step_beyond_all_bounds_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match=r"10000000000 samples is beyond 1,000,000"):
        Plan(["a"], num_steps=1, prompts_per_step=1, samples_per_prompt=10**10)


def test_figure_5_of_the_paper() -> None:
    """Two generator ranks, four prompts, each sampled twice: 2 micro-batches by batch, 4 by generation."""
    batch = make(axis="batch", generator_ranks=2)
    generation = make(axis="generation", generator_ranks=2)

    assert (batch.num_micro_batches, batch.micro_batch_size) == (2, 4)
    assert (generation.num_micro_batches, generation.micro_batch_size) == (4, 2)
    assert [[piece.uid for piece in micro_batch.slices] for micro_batch in batch.step(0)] == [
        ["s0p0", "s0p1"],
        ["s0p2", "s0p3"],
    ]
    assert [[piece.uid for piece in micro_batch.slices] for micro_batch in generation.step(0)] == [
        ["s0p0"],
        ["s0p1"],
        ["s0p2"],
        ["s0p3"],
    ]
    assert rows(batch.step(0)) == rows(generation.step(0))


def test_the_module_docstring_holds_figure_5_and_both_formulas() -> None:
    documentation = " ".join((digen.plan.__doc__ or "").split())
    for words in ("P * (K / m)", "P / (m / K)", "r = 2, P = 4 and K = 2", "B = 2;", "B = 4."):
        assert words in documentation


def test_generation_axis_cuts_a_group_into_adjacent_micro_batches() -> None:
    plan = make(prompts_per_step=2, samples_per_prompt=6, micro_batch_size=2, generator_ranks=2)
    step = plan.step(3)
    assert plan.num_micro_batches == 6
    assert [micro_batch.index for micro_batch in step] == list(range(6))
    assert [[(s.uid, s.start, s.count, s.size) for s in micro_batch.slices] for micro_batch in step] == [
        [("s3p0", 0, 2, 6)],
        [("s3p0", 2, 2, 6)],
        [("s3p0", 4, 2, 6)],
        [("s3p1", 0, 2, 6)],
        [("s3p1", 2, 2, 6)],
        [("s3p1", 4, 2, 6)],
    ]


@pytest.mark.parametrize(
    ("arguments", "size", "count"),
    [
        ({"axis": "generation", "samples_per_prompt": 24, "prompts_per_step": 10}, 24, 10),
        ({"axis": "generation", "samples_per_prompt": 24, "prompts_per_step": 10, "micro_batch_size": 8}, 8, 30),
        ({"axis": "generation", "samples_per_prompt": 1}, 1, 4),
        ({"axis": "batch", "samples_per_prompt": 24, "prompts_per_step": 10}, 24, 10),
        ({"axis": "batch", "samples_per_prompt": 24, "prompts_per_step": 10, "generator_ranks": 5}, 120, 2),
        ({"axis": "batch", "samples_per_prompt": 4, "prompts_per_step": 6, "micro_batch_size": 12}, 12, 2),
        ({"axis": "batch", "samples_per_prompt": 4, "micro_batch_size": 4, "generator_ranks": 2}, 4, 4),
    ],
)
def test_micro_batch_size_and_count(arguments: dict[str, Any], size: int, count: int) -> None:
    plan = make(**arguments)
    assert (plan.micro_batch_size, plan.num_micro_batches) == (size, count)
    step = plan.step(0)
    assert len(step) == count
    assert {micro_batch.num_samples for micro_batch in step} == {size}


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({"samples_per_prompt": 24, "micro_batch_size": 5}, {4, 6}),
        ({"samples_per_prompt": 24, "micro_batch_size": 25}, {24}),
        ({"samples_per_prompt": 24, "micro_batch_size": 0}, {1}),
        ({"samples_per_prompt": 24, "micro_batch_size": 3, "generator_ranks": 4}, {4}),
        ({"samples_per_prompt": 24, "micro_batch_size": 6, "generator_ranks": 4}, {4, 8}),
        ({"samples_per_prompt": 4, "micro_batch_size": 6, "axis": "batch"}, {4, 8}),
        ({"samples_per_prompt": 4, "prompts_per_step": 9, "micro_batch_size": 16, "axis": "batch"}, {12, 36}),
        (
            {
                "samples_per_prompt": 3,
                "prompts_per_step": 4,
                "micro_batch_size": 3,
                "axis": "batch",
                "generator_ranks": 2,
            },
            {6},
        ),
    ],
)
def test_a_size_that_does_not_divide_names_the_nearest_that_work(arguments: dict[str, Any], numbers: set[int]) -> None:
    with pytest.raises(PlanError, match=f"micro_batch_size={arguments['micro_batch_size']} does not work") as caught:
        make(**arguments)
    hint = str(caught.value).rpartition("set micro_batch_size to ")[2]
    assert {int(number) for number in re.findall(r"\d+", hint)} == numbers
    for number in numbers:
        make(**(arguments | {"micro_batch_size": number}))


@pytest.mark.parametrize(
    ("arguments", "field", "numbers"),
    [
        ({"samples_per_prompt": 6, "generator_ranks": 4}, "samples_per_prompt", {4, 8}),
        ({"samples_per_prompt": 2, "generator_ranks": 4}, "samples_per_prompt", {4}),
        (
            {"samples_per_prompt": 3, "prompts_per_step": 5, "generator_ranks": 2, "axis": "batch"},
            "prompts_per_step",
            {4, 6},
        ),
        (
            {"samples_per_prompt": 2, "prompts_per_step": 5, "generator_ranks": 2, "axis": "batch"},
            "prompts_per_step",
            {4, 6},
        ),
    ],
)
def test_ranks_that_do_not_divide_name_the_nearest_that_work(
    arguments: dict[str, Any], field: str, numbers: set[int]
) -> None:
    with pytest.raises(PlanError) as caught:
        make(**arguments)
    hint = str(caught.value).rpartition(f"{field} to ")[2]
    assert {int(number) for number in re.findall(r"\d+", hint)} == numbers
    for number in numbers:
        make(**(arguments | {field: number}))


@pytest.mark.parametrize("field", ["num_steps", "prompts_per_step", "samples_per_prompt", "generator_ranks"])
def test_counts_start_at_one(field: str) -> None:
    with pytest.raises(PlanError, match=f"{field} must be at least 1, got 0"):
        make(**{field: 0})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make(num_prompts=0), "at least one prompt"),
        (lambda: make(axis="time"), "axis must be 'generation' or 'batch', got 'time'"),
        (lambda: Plan("a cat", num_steps=1, prompts_per_step=1, samples_per_prompt=1), "not one string"),
    ],
)
def test_what_is_no_plan(build: Callable[[], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build()


def test_prompts_may_be_strings_or_carry_metadata() -> None:
    plan = Plan(["a", Prompt("b", {"n": 1})], num_steps=1, prompts_per_step=2, samples_per_prompt=1, shuffle=False)
    assert plan.prompts == (Prompt("a"), Prompt("b", {"n": 1}))
    assert [micro_batch.slices[0].prompt for micro_batch in plan.step(0)] == [Prompt("a"), Prompt("b", {"n": 1})]


def test_steps_outside_the_plan() -> None:
    plan = make(num_steps=3)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"step {index} is outside the plan's steps 0 to 2"):
            plan.step(index)


def test_unshuffled_prompts_keep_their_order_across_epochs() -> None:
    plan = make(num_prompts=5, prompts_per_step=3, shuffle=False)
    assert [texts(plan.step(s)) for s in range(4)] == [
        ["prompt 0", "prompt 1", "prompt 2"],
        ["prompt 3", "prompt 4", "prompt 0"],
        ["prompt 1", "prompt 2", "prompt 3"],
        ["prompt 4", "prompt 0", "prompt 1"],
    ]


@settings(deadline=None, max_examples=150)
@given(num_prompts=st.integers(1, 13), per_step=st.integers(1, 13), seed=st.integers(0, 2**63 - 1))
def test_epochs_are_complete_and_steps_repeat_nothing_they_need_not(num_prompts: int, per_step: int, seed: int) -> None:
    plan = make(num_prompts=num_prompts, prompts_per_step=per_step, samples_per_prompt=1, seed=seed)
    steps = [texts(plan.step(s)) for s in range(3 * num_prompts)]
    walk = [text for step in steps for text in step]
    for start in range(0, len(walk) - num_prompts + 1, num_prompts):
        assert len(set(walk[start : start + num_prompts])) == num_prompts, "an epoch holds every prompt once"
    for step in steps:
        least = -(-per_step // num_prompts)
        # A step that spans epochs from the middle of one may see a prompt once more than a step that starts one.
        assert max(Counter(step).values()) <= least + (least > 1)


@settings(deadline=None, max_examples=50)
@given(num_prompts=st.integers(1, 12), per_step=st.integers(1, 12), order=st.permutations(range(24)))
def test_a_step_does_not_depend_on_which_steps_were_asked_before(
    num_prompts: int, per_step: int, order: list[int]
) -> None:
    arguments: dict[str, Any] = {"num_prompts": num_prompts, "prompts_per_step": per_step, "samples_per_prompt": 1}
    walked, jumping = make(**arguments), make(**arguments)
    expected = [walked.step(s) for s in range(24)]
    assert {s: jumping.step(s) for s in order} == dict(enumerate(expected))
    assert make(**arguments).step(23) == expected[23]


def test_epochs_differ_and_follow_the_seed() -> None:
    plan = make(num_prompts=50, prompts_per_step=50)
    first, second = texts(plan.step(0)), texts(plan.step(1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert first != sorted(first)
    assert texts(make(num_prompts=50, prompts_per_step=50, seed=1).step(0)) != first


def test_a_prompt_that_must_repeat_has_another_uid_and_other_seeds() -> None:
    plan = make(num_prompts=1, prompts_per_step=3, samples_per_prompt=2)
    step = plan.step(7)
    assert texts(step) == ["prompt 0"] * 3
    assert [micro_batch.slices[0].uid for micro_batch in step] == ["s7p0", "s7p1", "s7p2"]
    seeds = [seed for micro_batch in step for seed in micro_batch.seeds("noise")]
    assert len(set(seeds)) == 6


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.integers(1, 6),
    group=st.integers(1, 8),
    ranks=st.integers(1, 3),
    size=st.integers(1, 48),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("axis", ["generation", "batch"])
def test_every_sample_once_with_a_seed_of_its_own_however_it_is_cut(
    *, axis: Axis, prompts: int, group: int, ranks: int, size: int, seed: int
) -> None:
    arguments: dict[str, Any] = {"prompts_per_step": prompts, "samples_per_prompt": group, "seed": seed}
    whole = make(**arguments)
    try:
        plan = make(**arguments, axis=axis, generator_ranks=ranks, micro_batch_size=size)
    except PlanError:
        if axis == "generation":
            assert group % size or size % ranks
        else:
            assert size % group or prompts % (size // group) or size % ranks
        return
    assert plan.num_micro_batches * plan.micro_batch_size == prompts * group
    for index in range(3):
        step = plan.step(index)
        assert len(step) == plan.num_micro_batches
        if axis == "generation":
            assert all(len(micro_batch.slices) == 1 for micro_batch in step)
        assert rows(step) == [(f"s{index}p{p}", sample) for p in range(prompts) for sample in range(group)]
        seeds = [seed for micro_batch in step for seed in micro_batch.seeds("noise")]
        assert len(set(seeds)) == prompts * group
        assert seeds == [seed for micro_batch in whole.step(index) for seed in micro_batch.seeds("noise")]


def test_seeds_differ_across_steps_and_purposes() -> None:
    plan = make()
    draws = [
        seed
        for index in range(20)
        for purpose in ("noise", "step")
        for micro_batch in plan.step(index)
        for seed in micro_batch.seeds(purpose)
    ]
    assert len(set(draws)) == len(draws) == 20 * 2 * 8


def test_the_digest_covers_what_decides_the_steps() -> None:
    base = make()
    others = {
        "prompts": make(num_prompts=5),
        "prompts_per_step": make(prompts_per_step=2),
        "samples_per_prompt": make(samples_per_prompt=4),
        "micro_batch_size": make(micro_batch_size=1),
        "axis": make(axis="batch"),
        "seed": make(seed=1),
        "shuffle": make(shuffle=False),
        "metadata": Plan(
            [Prompt(f"prompt {i}", {"n": i}) for i in range(4)],
            num_steps=1000,
            prompts_per_step=4,
            samples_per_prompt=2,
        ),
    }
    assert len({base.digest, *(plan.digest for plan in others.values())}) == 1 + len(others)
    assert make().digest == base.digest
    assert make(num_steps=7).digest == base.digest
    assert make(generator_ranks=2).digest == base.digest


def test_the_digest_and_the_steps_are_the_same_in_another_process() -> None:
    code = (
        "from digen.plan import Plan; p = Plan(['a', 'b', 'c'], num_steps=9, prompts_per_step=2, samples_per_prompt=2);"
        "print(p.digest, [m.seeds('noise') for m in p.step(8)], [s.prompt.text for m in p.step(8) for s in m.slices])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_the_order_of_prompts_and_the_digest_stay_the_same_between_releases() -> None:
    """Golden: a change here makes every checkpoint of a release before unusable."""
    plan = Plan([*"abcdefg"], num_steps=9, prompts_per_step=3, samples_per_prompt=1, seed=5)
    assert ["".join(texts(plan.step(s))) for s in range(5)] == GOLDEN_ORDER
    assert plan.digest == GOLDEN_DIGEST


def test_metadata_that_is_not_plain_data_is_named() -> None:
    plan = Plan([Prompt("a", {"image": object()})], num_steps=1, prompts_per_step=1, samples_per_prompt=1)
    with pytest.raises(PlanError, match="not plain data"):
        _ = plan.digest


def test_a_million_steps_cost_nothing_until_they_are_asked_for() -> None:
    begin = time.perf_counter()
    plan = make(num_prompts=101, prompts_per_step=60, num_steps=1_000_000)
    last = plan.step(999_999)
    elapsed_s = time.perf_counter() - begin
    assert last[0].step == 999_999
    assert elapsed_s < 0.5
    assert plan.step(999_999) is last


def test_describe_shows_the_arithmetic() -> None:
    lines = make(axis="batch", generator_ranks=2).describe()
    assert any("B = 8 / 4 = 2" in line for line in lines)
    assert any("2 prompts x 2 samples (batch axis), 2 per rank" in line for line in lines)
    assert "4 prompts" in repr(make())
