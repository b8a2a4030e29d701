"""Groups, advantages and best-of-N: goldens, order independence, and what is refused."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digen.config import AdvantageSection
from digen.errors import DigenError, InvariantViolation, PlanError, RewardError
from digen.groups import Arrival, CompletedGroup, GroupAssembler, ReadyMicroBatch
from digen.plan import Plan
from digen.types import MicroBatch

A = (0.1, 0.4, 0.4, 0.9)
B = (1.0, 1.0, 1.0, 1.0)
C = (0.2, 0.3, 0.5, 0.6)
ZERO = (0.0, 0.0, 0.0, 0.0)


def step_of(
    num_prompts: int, group: int, size: int | None = None, axis: Literal["generation", "batch"] = "generation"
) -> tuple[MicroBatch, ...]:
    plan = Plan(
        [f"p{i}" for i in range(num_prompts)],
        num_steps=5,
        prompts_per_step=num_prompts,
        samples_per_prompt=group,
        micro_batch_size=size,
        axis=axis,
    )
    return plan.step(4)


def assemble(
    step: tuple[MicroBatch, ...], rewards: dict[int, tuple[float, ...]], order: Sequence[int], **advantage: Any
) -> tuple[dict[int, tuple[float | None, ...]], dict[str, CompletedGroup], list[Arrival]]:
    assembler = GroupAssembler(step, AdvantageSection(**advantage))
    arrivals = [assembler.add(index, rewards[index]) for index in order]
    ready = {one.index: one.advantages for arrival in arrivals for one in arrival.ready}
    groups = {group.uid: group for arrival in arrivals for group in arrival.groups}
    return ready, groups, arrivals


def spread(step: tuple[MicroBatch, ...], groups: Sequence[Sequence[float]]) -> dict[int, tuple[float, ...]]:
    """Rewards by micro-batch from rewards by group (prompt position) and sample."""
    return {
        micro_batch.index: tuple(
            groups[int(piece.uid.split("p")[1])][sample] for piece, sample in micro_batch.samples()
        )
        for micro_batch in step
    }


GOLDENS = [
    (
        "Flow-GRPO per prompt",
        {"kind": "per_prompt", "ddof": 0, "epsilon": 1e-4},
        [(-1.218119, -0.174017, -0.174017, 1.566154), ZERO, (-1.264112, -0.632056, 0.632056, 1.264112)],
    ),
    (
        "Flow-GRPO global_std",
        {"kind": "global_std", "ddof": 0, "epsilon": 1e-4},
        [(-1.056306, -0.150901, -0.150901, 1.358107), ZERO, (-0.603603, -0.301802, 0.301802, 0.603603)],
    ),
    (
        "verl-omni group",
        {"kind": "per_prompt", "ddof": 1, "epsilon": 1e-4},
        [(-1.054972, -0.150710, -0.150710, 1.356392), ZERO, (-1.094845, -0.547423, 0.547423, 1.094845)],
    ),
    (
        "DanceGRPO group",
        {"kind": "per_prompt", "ddof": 1, "epsilon": 1e-8},
        [(-1.055290, -0.150756, -0.150756, 1.356801), ZERO, (-1.095445, -0.547722, 0.547722, 1.095445)],
    ),
]


@pytest.mark.parametrize(("section", "expected"), [golden[1:] for golden in GOLDENS], ids=[g[0] for g in GOLDENS])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_goldens(section: dict[str, Any], expected: list[tuple[float, ...]], size: int) -> None:
    step = step_of(3, 4, size)
    ready, groups, _ = assemble(step, spread(step, [A, B, C]), range(len(step)), **section)
    flat = [value for index in range(len(step)) for value in ready[index]]
    assert flat == pytest.approx([value for group in expected for value in group], abs=1e-6)
    assert flat[4:8] == [0.0] * 4, "a group without spread is exactly zero"
    assert groups["s4p1"].reward_std == 0.0
    assert groups["s4p0"].reward_mean == pytest.approx(0.45)
    spread_of = statistics.pstdev if section["ddof"] == 0 else statistics.stdev
    assert [groups[f"s4p{i}"].reward_std for i in range(3)] == pytest.approx([spread_of(g) for g in (A, B, C)])


def test_global_std_with_ddof_1_divides_by_the_sample_deviation_of_the_step() -> None:
    step = step_of(3, 4)
    ready, _, _ = assemble(step, spread(step, [A, B, C]), range(3), kind="global_std", ddof=1)
    divisor = statistics.stdev([*A, *B, *C]) + 1e-4
    for index, group in enumerate([A, B, C]):
        mean = statistics.fmean(group)
        assert ready[index] == pytest.approx([(reward - mean) / divisor for reward in group], rel=1e-12)


def test_best_of_n_golden() -> None:
    rewards = (0.1, 0.9, 0.4, 0.6, 0.2, 0.8, 0.3, 0.7)
    step = step_of(1, 8, 2)
    ready, groups, arrivals = assemble(step, spread(step, [rewards]), range(4), ddof=1, epsilon=1e-8, best_of_n=4)
    flat = [value for index in range(4) for value in ready[index]]
    kept = {sample: value for sample, value in enumerate(flat) if value is not None}
    assert kept == pytest.approx({0: -1.366260, 4: -1.024695, 5: 1.024695, 1: 1.366260}, abs=5e-7)
    assert math.fsum(kept.values()) == pytest.approx(0, abs=1e-12)
    assert groups["s4p0"].num_kept == 4
    assert [one.num_kept for one in arrivals[-1].ready] == [2, 0, 2, 0], "micro-batches 1 and 3 keep nothing"


def test_best_of_n_selects_per_uid_not_over_the_micro_batch() -> None:
    step = step_of(2, 4, 8, axis="batch")
    ready, groups, _ = assemble(step, {0: (1.0, 2.0, 3.0, 4.0, 101.0, 102.0, 103.0, 104.0)}, [0], best_of_n=2)
    assert [value is not None for value in ready[0]] == [True, False, False, True] * 2
    assert [groups[uid].num_kept for uid in ("s4p0", "s4p1")] == [2, 2]


def test_best_of_the_whole_group_keeps_all_and_changes_nothing() -> None:
    step = step_of(1, 4)
    plain, _, _ = assemble(step, {0: A}, [0])
    chosen, groups, _ = assemble(step, {0: A}, [0], best_of_n=4)
    assert chosen == plain
    assert groups["s4p0"].num_kept == 4


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((0.0, 0.0, 0.0, 0.0, 0.0, 0.0), {0, 5}),
        ((1.0, 0.0, 0.0, 1.0, 1.0, 0.0), {1, 4}),
        ((2.0, 2.0, 1.0, 2.0, 2.0, 2.0), {2, 5}),
    ],
)
def test_equal_advantages_are_ranked_by_sample(rewards: tuple[float, ...], kept: set[int]) -> None:
    step = step_of(1, 6, 1)
    for order in itertools.islice(itertools.permutations(range(6)), 0, None, 37):
        ready, _, _ = assemble(step, spread(step, [rewards]), order, best_of_n=2)
        assert {index for index, (value,) in ready.items() if value is not None} == kept


def test_best_of_more_than_the_group_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match=r"best_of_n=8 exceeds the group size 5 .* at most 4"):
        GroupAssembler(step_of(2, 5), AdvantageSection(best_of_n=8))


def test_a_group_completes_with_its_last_reward_and_its_micro_batches_become_ready_together() -> None:
    step = step_of(2, 4, 2)
    rewards = spread(step, [A, C])
    assembler = GroupAssembler(step, AdvantageSection())
    nothing = Arrival(groups=(), ready=())
    assert assembler.add(3, rewards[3]) == nothing
    assert assembler.add(1, rewards[1]) == nothing
    second = assembler.add(2, rewards[2])
    assert [(group.uid, group.micro_batches) for group in second.groups] == [("s4p1", (2, 3))]
    assert [one.index for one in second.ready] == [2, 3]
    first = assembler.add(0, rewards[0])
    assert [(group.uid, group.micro_batches) for group in first.groups] == [("s4p0", (0, 1))]
    assert [one.index for one in first.ready] == [0, 1]


def test_a_micro_batch_of_several_groups_is_ready_when_all_are_complete() -> None:
    """The groups 0 and 1 are spread over two micro-batches that share group 1."""
    (_, p0), (_, p1), (_, p2) = [(m, m.slices[0]) for m in step_of(3, 4)]
    head = msgspec.structs.replace(p1, start=0, count=2)
    tail = msgspec.structs.replace(p1, start=2, count=2)
    step = (
        MicroBatch(run_seed=0, step=4, index=0, slices=(p0, head)),
        MicroBatch(run_seed=0, step=4, index=1, slices=(tail, p2)),
    )
    assembler = GroupAssembler(step, AdvantageSection())
    early = assembler.add(0, (*A, *C[:2]))
    assert [group.uid for group in early.groups] == ["s4p0"]
    assert early.ready == (), "its other group still misses two rewards"
    late = assembler.add(1, (*C[2:], *B))
    assert [(group.uid, group.micro_batches) for group in late.groups] == [("s4p1", (0, 1)), ("s4p2", (1,))]
    assert [one.index for one in late.ready] == [0, 1]
    assert late.ready[0].advantages[4:] + late.ready[1].advantages[:2] == pytest.approx(
        (-1.264112, -0.632056, 0.632056, 1.264112), abs=5e-7
    )


def test_micro_batches_that_become_ready_together_come_in_index_order() -> None:
    """The last reward completes group 0 first, and with it micro-batch 2, then group 1 and micro-batches 0 and 1."""
    p0, p1 = (micro_batch.slices[0] for micro_batch in step_of(2, 4))
    halves = [[msgspec.structs.replace(piece, start=start, count=2) for start in (0, 2)] for piece in (p0, p1)]
    contents = [(halves[1][0],), (halves[0][0], halves[1][1]), (halves[0][1],)]
    step = tuple(MicroBatch(run_seed=0, step=4, index=i, slices=pieces) for i, pieces in enumerate(contents))
    assembler = GroupAssembler(step, AdvantageSection())
    assembler.add(2, A[2:])
    assembler.add(0, C[:2])
    arrival = assembler.add(1, (*A[:2], *C[2:]))
    assert [one.index for one in arrival.ready] == [0, 1, 2]


def test_global_std_waits_for_the_last_reward_of_the_step() -> None:
    step = step_of(3, 4, 2)
    rewards = spread(step, [A, B, C])
    assembler = GroupAssembler(step, AdvantageSection(kind="global_std"))
    order = [4, 5, 0, 3, 1]
    for index in order:
        assert assembler.add(index, rewards[index]) == Arrival(groups=(), ready=())
    last = assembler.add(2, rewards[2])
    assert [group.uid for group in last.groups] == ["s4p0", "s4p1", "s4p2"]
    assert [one.index for one in last.ready] == [0, 1, 2, 3, 4, 5]


def one_shot(groups: Sequence[Sequence[float]], kind: str, best_of_n: int | None) -> list[list[float | None]]:
    """Advantages computed at once from all rewards, written independently of the assembler."""

    def std(values: Sequence[float]) -> float:
        if len(set(values)) == 1:
            return 0.0
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))

    whole = std([reward for group in groups for reward in group])
    result: list[list[float | None]] = []
    for group in groups:
        mean = group[0] if len(set(group)) == 1 else math.fsum(group) / len(group)
        if kind == "global":
            every = [reward for other in groups for reward in other]
            mean = math.fsum(every) / len(every)
        divisor = (
            1e-4
            + {
                "per_prompt": std(group),
                "global_std": whole,
                "global": whole,
                "max_group_std": max(map(std, groups)),
                "no_std": 0,
            }[kind]
        )
        advantages = [reward - mean if kind == "no_std" else (reward - mean) / divisor for reward in group]
        ranked = sorted(range(len(group)), key=lambda i, a=advantages: (a[i], i))  # type: ignore[misc] # bound now
        half = len(group) if best_of_n is None else best_of_n // 2
        kept = {*ranked[:half], *ranked[-half:]}
        result.append([value if i in kept else None for i, value in enumerate(advantages)])
    return result


@pytest.mark.parametrize("kind", ["per_prompt", "global_std", "no_std", "max_group_std", "global"])
@pytest.mark.parametrize("best_of_n", [None, 4])
@pytest.mark.parametrize("axis", ["generation", "batch"])
def test_any_order_of_arrival_equals_the_one_shot_computation_bit_for_bit(
    kind: str, best_of_n: int | None, axis: Literal["generation", "batch"]
) -> None:
    """1,250 random orders for each of the 20 combinations: 25,000 in all."""
    stream = random.Random(f"{kind} {best_of_n} {axis}")  # noqa: S311 - not for secrets
    step = step_of(4, 6, 2 if axis == "generation" else 6, axis)
    kinds = (lambda: 0.1, lambda: 0.3, lambda: stream.gauss(0, 3), lambda: stream.lognormvariate(0, 9))
    groups = [[stream.choice(kinds)() for _ in range(6)] for _ in range(3)]
    groups.append([0.1] * 6)
    rewards = spread(step, groups)
    whole = one_shot(groups, kind, best_of_n)
    expected = {
        micro_batch.index: tuple(whole[int(piece.uid.split("p")[1])][sample] for piece, sample in micro_batch.samples())
        for micro_batch in step
    }
    order = list(range(len(step)))
    begin = time.perf_counter()
    for _ in range(1250):
        stream.shuffle(order)
        ready, _, arrivals = assemble(step, rewards, order, kind=kind, best_of_n=best_of_n)
        assert ready == expected
        for arrival in arrivals:
            assert [one.index for one in arrival.ready] == sorted(one.index for one in arrival.ready)
    assert time.perf_counter() - begin < 5


@settings(deadline=None, max_examples=200)
@given(
    rewards=st.lists(st.floats(-1e150, 1e150), min_size=2, max_size=9),
    kind=st.sampled_from(["per_prompt", "global_std", "no_std", "max_group_std", "global"]),
    ddof=st.integers(0, 1),
    epsilon=st.sampled_from([0.0, 1e-8, 1e-4]),
)
def test_advantages_are_always_finite(rewards: list[float], kind: str, ddof: int, epsilon: float) -> None:
    step = step_of(1, len(rewards))
    ready, groups, _ = assemble(step, {0: tuple(rewards)}, [0], kind=kind, ddof=ddof, epsilon=epsilon)
    assert all(value is not None and math.isfinite(value) for value in ready[0])
    assert math.isfinite(groups["s4p0"].reward_std)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, -7.3, 1e100])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_group_without_spread_is_exactly_zero(value: float, epsilon: float, ddof: int) -> None:
    """The mean of 0.1 three times is not 0.1 in floating point; the advantages are zero all the same."""
    step = step_of(1, 3)
    ready, groups, _ = assemble(step, {0: (value,) * 3}, [0], ddof=ddof, epsilon=epsilon)
    assert ready[0] == (0.0, 0.0, 0.0)
    assert (groups["s4p0"].reward_mean, groups["s4p0"].reward_std) == (value, 0.0)


def test_a_group_of_one_sample_is_zero_even_with_ddof_1() -> None:
    step = step_of(2, 1)
    ready, _, _ = assemble(step, {0: (3.0,), 1: (5.0,)}, [1, 0], ddof=1)
    assert ready == {0: (0.0,), 1: (0.0,)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e151, None, "0.5", 10**400])
def test_a_reward_that_is_no_finite_number_is_named(bad: Any) -> None:
    step = step_of(2, 4, 2)
    assembler = GroupAssembler(step, AdvantageSection())
    with pytest.raises(RewardError, match=r"step 4 micro-batch 3: the reward of s4p1 sample 2 is .* not a finite"):
        assembler.add(3, (bad, 0.5))


@pytest.mark.parametrize("rewards", [(), (0.1,), (0.1, 0.2, 0.3)])
def test_the_wrong_number_of_rewards_is_named(rewards: tuple[float, ...]) -> None:
    assembler = GroupAssembler(step_of(2, 4, 2), AdvantageSection())
    with pytest.raises(RewardError, match=f"step 4 micro-batch 1: 2 samples but {len(rewards)} rewards"):
        assembler.add(1, rewards)


def test_a_refused_call_changes_nothing() -> None:
    step = step_of(1, 4, 2)
    assembler = GroupAssembler(step, AdvantageSection())
    with pytest.raises(RewardError):
        assembler.add(0, (0.1, math.nan))
    assembler.add(0, A[:2])
    with pytest.raises(InvariantViolation, match="step 4 micro-batch 0: its rewards were added before"):
        assembler.add(0, (9.0, 9.0))
    with pytest.raises(DigenError, match="micro-batch 7 is not one of the step's 2"):
        assembler.add(7, (9.0, 9.0))
    arrival = assembler.add(1, A[2:])
    assert [value for one in arrival.ready for value in one.advantages] == pytest.approx(GOLDENS[0][2][0], abs=5e-7)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_step_that_lacks_part_of_a_group_is_refused(missing: int) -> None:
    step = [micro_batch for micro_batch in step_of(2, 4, 2) if micro_batch.index != missing]
    with pytest.raises(PlanError, match="samples 0 to 3 of group s4p0 once each"):
        GroupAssembler(step, AdvantageSection())


def test_results_are_plain_floats() -> None:
    step = step_of(1, 2)
    ready, _, _ = assemble(step, {0: (True, 3)}, [0])
    assert {type(value) for value in ready[0]} == {float}
    one = ReadyMicroBatch(index=0, advantages=(None, 1.0), num_kept=1)
    assert msgspec.json.decode(msgspec.json.encode(one), type=ReadyMicroBatch) == one
