"""Ranks that share the samples of a generator: in real processes, against one rank in this process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from digen import placement
from digen.config import load_config
from digen.diffusion.ranks import Ranks
from digen.diffusion.roles import GeneratorTarget, TrainerTarget
from digen.diffusion.tiny import TINY
from digen.diffusion.units import part_of
from digen.errors import ConfigError, NumericsError, RewardError
from digen.types import Encoded, EvaluationRequest, GroupSlice, MicroBatch, Prompt, Rollout
from digen.workers.group import process_group
from tests.diffusion.ranked import arrays_of, is_seven

_T = TypeVar("_T")
Arrays = dict[str, NDArray[Any]]
Data = Callable[..., dict[str, Any]]

PROMPTS = {label: Prompt(f"the digit {label}", {"label": label}) for label in (1, 3, 7)}
REWARD = "tests.diffusion.ranked:Fussy"
MOST = 3


def batch(*labels_and_counts: tuple[int, int], step: int = 10) -> MicroBatch:
    """A micro-batch of some samples of each label."""
    return MicroBatch(
        5, step, 2, tuple(GroupSlice(f"s{step}p{label}", PROMPTS[label], 2, n, 24) for label, n in labels_and_counts)
    )


class Group:
    """A worker of three ranks, in which the targets are built of as many as a test wants."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self._folder = folder
        self.worker = process_group(
            "gen0",
            "tests.diffusion.ranked:Bench",
            MOST,
            kwargs={"folder": str(folder)},
            rank_timeout_s=30,
            log_dir=folder,
        )
        self.run(self.worker.start())

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do something with it."""
        return self._runner.run(work)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of every rank."""
        return self.run(self.worker.call(method, *args))

    def draw(self, micro_batch: MicroBatch, encoded: Encoded | None = None) -> tuple[Rollout, Arrays, int]:
        """A rollout, its content, and how many forwards of the network rank 0 did for it."""
        rollout: Rollout = self.run(self.worker.generate(micro_batch, encoded))
        path = self._folder / "rollout.npz"
        num_forwards = self.call("keep", str(path))
        with np.load(path) as file:
            return rollout, dict(file), num_forwards

    def close(self) -> None:
        """End it."""
        self.run(self.worker.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(data: Data) -> Data:
    """The config of a generator whose reward is brightness."""
    return lambda **changes: data(**{"reward__name": REWARD, "model__forward_batch": 4, **changes})


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether arrays are equal bit for bit."""
    return {n: (a.shape, a.dtype, a.tobytes()) for n, a in found.items()} == {
        n: (a.shape, a.dtype, a.tobytes()) for n, a in expected.items()
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("unit", [1, 3, 4])
def test_ranks_share_whole_forwards_in_order_and_run_equally_many(num_ranks: int, unit: int) -> None:
    for count in range(1, 20):
        shares = []
        for rank in range(num_ranks):
            ranks = Ranks()
            ranks.rank, ranks.num_ranks = rank, num_ranks
            shares.append(ranks.rows(count, unit))
        assert [row for rows, own in shares for row in rows[:own]] == list(range(count))
        assert len({-(-len(rows) // unit) for rows, _ in shares}) == 1
        assert all(not own or rows[0] % unit == 0 for rows, own in shares)
        assert all(0 <= row < count for rows, _ in shares for row in rows)


def test_a_part_of_a_micro_batch_keeps_its_seeds() -> None:
    whole = batch((3, 4), (7, 2))
    part = part_of(whole, [3, 4, 4])
    seeds = whole.seeds("noise")
    assert part.seeds("noise") == [seeds[3], seeds[4], seeds[4]]
    assert (part.step, part.index) == (whole.step, whole.index)
    assert [piece.prompt for piece, _ in part.samples()] == [PROMPTS[3], PROMPTS[7], PROMPTS[7]]


ALGORITHMS: dict[str, dict[str, Any]] = {
    "flow_grpo": {},
    "mix_grpo": {"sampling__solver": "dpm++", "algorithm__options": {"window_size": 2}},
    "diffusion_nft": {"sampling__solver": "dpm++"},
    "grpo_guard": {},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_number_of_ranks_changes_no_bit(group: Group, alone: Data, name: str) -> None:
    changes = {"algorithm__name": name, "sampling__num_inference_steps": 5, **ALGORITHMS[name]}
    settings = alone(**changes)
    micro_batch = batch((3, 7), (7, 3))  # forwards of 4, 4 and 2 samples
    oracle = arrays_of(GeneratorTarget(settings).generate(micro_batch).payload)
    assert ("means" in oracle) == (name == "grpo_guard")
    for num_ranks, forwards in ((2, 2), (3, 1)):
        group.call("use", "GeneratorTarget", settings, num_ranks)
        rollout, found, num_forwards = group.draw(micro_batch)
        assert same(found, oracle)
        assert num_forwards == forwards * 5
        assert (rollout.micro_batch, rollout.version, rollout.version_end) == (micro_batch, 0, 0)
        assert set(rollout.stats) == {"encode_s", "sample_s"}
    other = arrays_of(GeneratorTarget(alone(**changes, model__forward_batch=5)).generate(micro_batch).payload)
    for array, expected in zip(other.values(), oracle.values(), strict=True):
        assert np.allclose(array, expected, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_fewer_forwards_than_ranks(group: Group, alone: Data, sharded: bool) -> None:
    settings = alone(workers__fsdp={"generators": sharded})
    oracle = GeneratorTarget(alone())
    group.call("use", "GeneratorTarget", settings, 3)
    for micro_batch in (batch((3, 3)), batch((3, 2), (1, 4)), batch((3, 13))):  # 1, 2 and 4 forwards
        _, found, _ = group.draw(micro_batch)
        assert same(found, arrays_of(oracle.generate(micro_batch).payload))


@pytest.mark.parametrize("sharded", [False, True])
def test_an_image_model_with_guidance(
    group: Group, alone: Data, tiny_model: Callable[[str], Path], sharded: bool
) -> None:
    settings = alone(
        model={"family": "sd3", "path": str(tiny_model("sd3")), "forward_batch": 2},
        sampling={"num_inference_steps": 3, **TINY["sd3"].sampling},
        workers__fsdp={"generators": sharded},
    )
    oracle = GeneratorTarget(settings | {"workers": alone()["workers"]})
    micro_batch = batch((3, 3), (7, 2))
    expected = oracle.generate(micro_batch)
    group.call("use", "GeneratorTarget", settings, 2)
    rollout, found, num_forwards = group.draw(micro_batch)
    assert same(found, arrays_of(expected.payload))
    assert num_forwards == 2 * 3 * 2  # forwards of this rank, steps, with and without the prompt
    assert group.run(group.worker.score(rollout)).rewards == oracle.score(expected).rewards


@pytest.mark.parametrize("sharded", [False, True])
def test_published_weights_reach_every_rank(group: Group, alone: Data, tmp_path: Path, sharded: bool) -> None:
    settings = alone(
        workers__fsdp={"generators": sharded}, workers__weights={"channel": "files"}, run__output=str(tmp_path)
    )
    trainer, oracle = TrainerTarget(settings, str(tmp_path)), GeneratorTarget(settings, str(tmp_path))
    with torch.no_grad():
        for parameter in trainer._family.parameters().values():
            parameter.mul_(1.01)
    published = trainer.publish(0)
    oracle.load(published)
    group.call("use", "GeneratorTarget", settings, MOST, str(tmp_path))
    before = group.draw(batch((3, 9)))[1]
    group.call("take", {name: getattr(published, name) for name in published.__struct_fields__ if name != "payload"})
    after = group.draw(batch((3, 9)))[1]
    assert same(after, arrays_of(oracle.generate(batch((3, 9))).payload))
    assert not same(after, before)


def test_prompts_that_were_encoded_before(group: Group, alone: Data) -> None:
    group.call("use", "GeneratorTarget", alone(), 2)
    encoded = group.run(group.worker.encode((PROMPTS[7], PROMPTS[3])))
    group.call("spoil", 3)  # nothing is encoded again
    micro_batch = batch((3, 4), (7, 4))
    _, found, _ = group.draw(micro_batch, encoded)
    assert same(found, arrays_of(GeneratorTarget(alone()).generate(micro_batch).payload))


def test_scores_and_previews_are_those_of_one_rank(group: Group, alone: Data, tmp_path: Path) -> None:
    heads = [{"name": REWARD, "label": "a"}, {"name": REWARD, "label": "b", "weight": 0.5}]
    settings = alone(reward={"heads": heads}, observe__preview_every=10)
    micro_batch = batch((3, 5), (7, 2))
    oracle = GeneratorTarget(settings, str(tmp_path / "1"))
    expected = oracle.score(oracle.generate(micro_batch))
    (picture,) = (tmp_path / "1" / "samples").iterdir()
    for num_ranks in (2, 3):
        folder = tmp_path / str(num_ranks)
        group.call("use", "GeneratorTarget", settings, num_ranks, str(folder))
        rollout, _, _ = group.draw(micro_batch)
        for target in ("GeneratorTarget", "ScorerTarget"):
            group.call("use", target, settings, num_ranks, str(folder))
            scored = group.run(group.worker.score(rollout))
            assert (scored.rewards, scored.heads) == (expected.rewards, expected.heads)
            assert set(scored.stats) == set(expected.stats)
            (drawn,) = (folder / "samples").iterdir()
            assert (drawn.name, drawn.read_bytes()) == (picture.name, picture.read_bytes())
            drawn.unlink()
    group.call("use", "GeneratorTarget", settings, 3)
    few, _, _ = group.draw(batch((3, 1)))
    assert len(group.run(group.worker.score(few)).rewards) == 1


def test_evaluations_are_those_of_one_rank(group: Group, alone: Data, tmp_path: Path) -> None:
    settings = alone()
    for samples, count in ((3, 9), (1, 3)):  # forwards of 4, 4 and 1 sample; of 3 samples
        paths = [tmp_path / f"{number}x{count}.png" for number in (1, 2, 3)]
        requests = [EvaluationRequest(5, tuple(PROMPTS.values()), samples, str(path)) for path in paths]
        oracle: Any = GeneratorTarget(settings)
        oracle._judge = is_seven
        expected = oracle.evaluate(requests[0])
        assert expected.num_samples == count
        assert 0 < expected.metrics["class_accuracy"] < 1
        for num_ranks in (2, 3):
            group.call("use", "GeneratorTarget", settings, num_ranks)
            assert group.run(group.worker.evaluate(requests[num_ranks - 1])) == expected
        assert len({path.read_bytes() for path in paths}) == 1


def test_a_reward_that_fails_on_one_rank_fails_on_all_and_the_worker_lives(group: Group, alone: Data) -> None:
    settings = alone(reward__kwargs={"fails_on": 7})
    group.call("use", "GeneratorTarget", settings, 2)
    rollout, _, _ = group.draw(batch((3, 4), (7, 4)))
    with pytest.raises(RewardError, match=r"rank 1 of 'gen0', .* failed on 4 of 4 samples: s10p7/2: no 7"):
        group.run(group.worker.score(rollout))
    good, _, _ = group.draw(batch((3, 4), (1, 4)))
    assert len(group.run(group.worker.score(good)).rewards) == 8


@pytest.mark.parametrize("sharded", [False, True])
def test_numbers_that_are_none_on_one_rank_stop_all_and_the_worker_lives(
    group: Group, alone: Data, sharded: bool
) -> None:
    group.call("use", "GeneratorTarget", alone(workers__fsdp={"generators": sharded}), 2)
    good = group.draw(batch((3, 8)))[1]
    group.call("spoil", 7)
    with pytest.raises(NumericsError, match=r"rank 1 of 'gen0', .* sample s10p7/2 is not finite after .* step 0"):
        group.draw(batch((3, 4), (7, 4)))
    assert same(group.draw(batch((3, 8)))[1], good)
    request = EvaluationRequest(5, (PROMPTS[3], PROMPTS[7]), 4)
    assert group.run(group.worker.evaluate(request)).num_samples == 8


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_said(group: Group) -> None:
    assert "RankFailed: rank 0 of 2 did not meet the others" in group.call("late", 1.0)


FORWARDS: list[tuple[dict[str, Any], str]] = [
    ({"plan.micro_batch_size": 12}, r"gen1 has 2 ranks.* 12 samples are one forward; set model.forward_batch=6"),
    ({"plan.micro_batch_size": 8, "workers.ranks": {"gen0": 3}}, r"gen0 has 3 ranks.* set model.forward_batch=3"),
    ({"plan.micro_batch_size": 2, "workers.ranks": {"gen0": 3}}, r"gen0 has 3 ranks.* set model.forward_batch=1"),
    (
        {"schedule.mode": "colocated", "workers.generators": None, "workers.ranks": {"trainer": 2}},
        "mode colocated does every stage in one process, but the trainer has 2 ranks; leave workers.ranks",
    ),
]


@pytest.mark.parametrize(("changes", "message"), FORWARDS)
def test_ranks_that_have_nothing_to_share_are_refused(changes: dict[str, Any], message: str) -> None:
    config = load_config(None, {"workers.generators": 2, "workers.ranks": {"gen1": 2}, **changes})
    with pytest.raises(ConfigError, match=message):
        placement.check(config)


@pytest.mark.parametrize(
    ("ranks", "unit", "remarks"),
    [
        ({"gen0": 2}, 6, []),
        ({"gen0": 2}, 8, ["gen0: 2 ranks cannot share the 3 forwards.*; with model.forward_batch=6 none does"]),
        ({"gen0": 2, "gen1": 3}, 24, ["gen0: 2 .* the only forward of .*: 1 of .*=12 none", "gen1: 3 .*=8 none"]),
        ({"gen0": 25}, 1, ["gen0: 25 ranks cannot share the 24 forwards of .* evenly: 1 of them never have work$"]),
        ({"trainer": 2}, None, ["trainer: 2 ranks .* may be a single one; set .*=12, or algorithm.tsp_chunk=1"]),
    ],
)
def test_ranks_that_wait_are_remarked(ranks: dict[str, int], unit: int | None, remarks: list[str]) -> None:
    config = load_config(None, {"workers.generators": 2, "workers.ranks": ranks, "model.forward_batch": unit})
    placement.check(config)
    found = [line for line in placement.remarks(config) if "share" in line]
    assert len(found) == len(remarks)
    assert all(re.match(wanted, line) for wanted, line in zip(remarks, found, strict=True)), found


def test_a_rank_alone_has_the_answer() -> None:
    ranks = Ranks()
    assert ranks.rows(5, 2) == ([0, 1, 2, 3, 4], 5)
    assert ranks.gather_plain({"a": 1}) == [{"a": 1}]
    with pytest.raises(ValueError, match="mine"), ranks.together():
        raise ValueError("mine")
