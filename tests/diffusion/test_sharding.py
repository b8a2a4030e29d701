"""A trainer of two real processes under FSDP2 on gloo, against one rank in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from digen.config import load_config
from digen.diffusion.ranks import Ranks
from digen.diffusion.roles import build_family
from digen.diffusion.sharding import Shards
from digen.diffusion.state import load_weights
from digen.errors import CheckpointError, ConfigError
from digen.resources import FsdpSection
from digen.workers import ProcessWorker
from tests.diffusion.sharded import Bench

Everywhere = Callable[..., list[Any]]
LORA = {"model.lora": {"rank": 2, "alpha": 4}}
UNEVEN = ((1.5, None, 0.5, -1.0), (1.0, -2.0, None))
"""Three samples in two forwards, one a rank and one of them padded; and two in one, so that a rank has none."""


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everywhere]:
    """Calls a method of :class:`Bench` on two ranks at the same time; returns both answers or errors."""
    spec = {"num_ranks": 2, "rendezvous": f"file://{tmp_path_factory.mktemp('ranks')}/meet", "timeout_s": 60.0}
    target = "tests.diffusion.sharded:Bench"
    ranks = [ProcessWorker(f"rank{k}", target, kwargs={"ranks": {"rank": k, **spec}}) for k in (0, 1)]

    async def gathered(calls: Any) -> list[Any]:
        return list(await asyncio.gather(*calls, return_exceptions=True))

    with asyncio.Runner() as runner:
        try:
            assert runner.run(gathered(rank.start() for rank in ranks)) == [None, None]
            yield lambda *call: runner.run(gathered(rank.call(*call) for rank in ranks))
        finally:
            runner.run(gathered(rank.aclose() for rank in ranks))


@pytest.fixture(scope="module")
def alone() -> Bench:
    return Bench()


def _apart(ours: Path, theirs: Path, step: int) -> float:
    """The largest difference of a tensor of a step's gradient, in its norm or a millionth of the whole one's."""
    one, two = load_file(theirs), load_file(ours)
    assert one.keys() == two.keys()
    names = [name for name in one if name.startswith(f"{step}/")]
    norms = {name: float(np.linalg.norm(one[name].astype(np.float64))) for name in names}
    least = 1e-6 * float(np.linalg.norm(list(norms.values())))
    assert least > 0
    return max(
        float(np.linalg.norm(one[name] - two[name].astype(np.float64))) / max(norms[name], least) for name in names
    )


@pytest.mark.parametrize(
    "overrides",
    [
        {"algorithm.kl_weight": 0.04, "model.gradient_checkpointing": True, "optimizer.ema_decay": 0.9},
        {"algorithm.kl_weight": 0.04, **LORA},
        {"algorithm.name": "diffusion_nft", "workers.fsdp.reshard_after_forward": False},
        {
            "algorithm.name": "dpo",
            "algorithm.options": {"reference_interval": 1},
            **LORA,
            "workers.fsdp.replicas": 2,
            "workers.fsdp.cpu_offload": True,
        },
    ],
    ids=["full, kl, checkpointing", "lora, kl", "diffusion_nft, kept whole", "dpo, lora, replicas, offload"],
)
def test_gradients_and_reports_are_those_of_one_rank(
    everywhere: Everywhere, alone: Bench, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    job = {"overrides": {"algorithm.tsp_chunk": 1, **overrides}, "advantages": [UNEVEN] * 2}
    ours, other = everywhere("train", {**job, "arrays": str(tmp_path / "two")})
    theirs = alone.train({**job, "arrays": str(tmp_path / "one")})
    assert ours["reports"] == other["reports"]
    assert ours["digest"] == other["digest"], "both gather the same"
    assert ours["held"] == (1.0 if "workers.fsdp.replicas" in overrides else 0.5)
    assert _apart(tmp_path / "two", tmp_path / "one", step=0) <= 1e-6
    assert _apart(tmp_path / "two", tmp_path / "one", step=1) <= 1e-3, "of weights that differ in their last bits"
    assert ours["reports"][:2] == theirs["reports"][:2], "bit for bit, as the weights are"
    for report, expected in zip(ours["reports"], theirs["reports"], strict=True):
        assert report["num_terms"] == expected["num_terms"]
        assert report["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)


def test_two_forwards_under_one_backward(
    everywhere: Everywhere, alone: Bench, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """Classifier-free guidance, in a network whose blocks have parameters of their own beside modules."""
    wan = {"model.family": "wan", "model.path": str(tiny_model("wan")), "sampling.guidance_scale": 3.0}
    wan |= {"sampling.height": 16, "sampling.width": 16, "sampling.num_frames": 5, "sampling.max_prompt_tokens": 16}
    job = {"overrides": {**wan, "algorithm.tsp_chunk": "all"}, "advantages": [UNEVEN]}
    ours, _ = everywhere("train", {**job, "arrays": str(tmp_path / "two")})
    theirs = alone.train({**job, "arrays": str(tmp_path / "one")})
    assert ours["reports"][:2] == theirs["reports"][:2]
    assert _apart(tmp_path / "two", tmp_path / "one", step=0) <= 1e-6


@pytest.mark.parametrize("overrides", [{}, {"algorithm.name": "diffusion_nft", "workers.offload": True}])
def test_an_assist_in_an_open_transaction_changes_no_bit(everywhere: Everywhere, overrides: dict[str, Any]) -> None:
    drawn = set()
    for assist in ("sharded", "replica"):
        found = everywhere("assist", {**overrides, "workers.fsdp.assist": assist})
        for rank in found:
            assert rank["before"] == rank["after"]
            assert rank["ends"][0] == rank["ends"][1], "and the step ends as if there had been none"
        drawn.add(found[0]["drawn"])
    assert len(drawn) == 1, "whole weights draw what shards draw"


def test_a_checkpoint_does_not_know_how_many_ranks_wrote_it(
    everywhere: Everywhere, alone: Bench, tmp_path: Path
) -> None:
    job = {"overrides": {"optimizer.ema_decay": 0.9, "algorithm.name": "diffusion_nft"}}
    two, one, mirrored = (str(tmp_path / name) for name in ("two", "one", "mirrored"))
    written, other = everywhere("train", {**job, "advantages": [UNEVEN] * 2, "save": two})
    assert (set(written["hashes"]), other["hashes"]) == ({path.name for path in Path(two).iterdir()}, {})
    copied = alone.train({**job, "restore": two, "save": one})
    assert copied["hashes"] == written["hashes"], "weights, optimizer, EMA and the old policy, bit for bit"
    replicas = {"overrides": {**job["overrides"], "workers.fsdp.replicas": 2}}
    assert everywhere("train", {**replicas, "restore": one, "save": mirrored})[0]["hashes"] == written["hashes"]
    resumed = everywhere("train", {**job, "restore": one, "advantages": [UNEVEN]})
    straight = everywhere("train", {**job, "advantages": [UNEVEN] * 3})
    assert resumed[0]["digest"] == straight[0]["digest"]
    family = build_family(load_config(None), frozenset({"denoise"}))
    for name in ("weights", "ema"):
        load_weights(Path(two) / f"{name}.safetensors", family.parameters())
    for broken in everywhere("train", {"overrides": LORA, "restore": two}):
        assert isinstance(broken, CheckpointError)
        assert "of another model" in str(broken)
    (Path(one) / "weights.safetensors").write_bytes((Path(one) / "weights.safetensors").read_bytes()[:-1000])
    for broken in everywhere("train", {**job, "restore": one}):
        assert isinstance(broken, CheckpointError)
        assert "weights.safetensors cannot be read" in str(broken)


@pytest.mark.parametrize("overrides", [{}, {"algorithm.name": "diffusion_nft", "workers.fsdp.cpu_offload": True}])
def test_a_snapshot_has_of_a_rank_its_own_rows(everywhere: Everywhere, overrides: dict[str, Any]) -> None:
    one, two = found = everywhere("lives", overrides)
    for rank in found:
        assert rank["at"][0] == rank["at"][1]
        assert rank["whole"][0] == rank["whole"][1], "and the next step is the same, bit for bit"
    assert one["at"] != two["at"], "each has its own rows"
    assert one["whole"] == two["whole"]
    family = build_family(load_config(None), frozenset({"denoise"}))
    num_weights = sum(parameter.numel() for parameter in family.parameters().values())
    copies = 5 if overrides else 4  # weights, two moments, moving average, and the old policy
    assert 4 * num_weights * copies <= one["nbytes"] + two["nbytes"] < 4.5 * num_weights * copies
    assert "RankFailed: rank 0 of 2 gave up" in one["refused"]
    assert "CheckpointError: the snapshot holds nothing that a rank of this trainer has written" in two["refused"]


def test_a_checkpoint_of_an_earlier_release_is_restored_by_two_ranks(everywhere: Everywhere, alone: Bench) -> None:
    """``tests/goldens`` are of one rank."""
    goldens = Path(__file__).parents[1] / "goldens"
    paths = sorted(goldens.glob("*/checkpoints/step-*"))
    assert paths
    for path in paths:
        config = load_config(path.parents[1] / "config.yaml")
        assert config.model.lora is not None
        overrides = {"model.lora": config.model.lora.model_dump(mode="json"), "optimizer.ema_decay": 0.9}
        job = {"overrides": overrides, "restore": str(path)}
        ours, other = everywhere("train", job)
        assert ours["digest"] == other["digest"] == alone.train(job)["digest"]


def test_an_error_of_one_rank_is_every_ranks_and_the_next_update_works(everywhere: Everywhere) -> None:
    failed, waited = everywhere("fail", 0)
    assert failed.startswith("NumericsError: the recorded log-probability of sample s0p0/0 at denoising step 0")
    assert waited.startswith("RankFailed: rank 1 of 2 gave up, because another rank failed")
    assert failed.endswith("then version 1")
    assert waited.endswith("then version 1")


def test_master_weights_keep_steps_that_half_precision_rounds_away(
    everywhere: Everywhere, alone: Bench, tmp_path: Path
) -> None:
    tiny_steps = {"model.dtype": "bfloat16", "optimizer.lr": 1e-6, "algorithm.tsp_chunk": 1}
    base = build_family(load_config(None, tiny_steps), frozenset({"denoise"})).parameters()
    masters = {**tiny_steps, "optimizer.master_weights": True}
    job = {"overrides": masters, "advantages": [UNEVEN], "save": str(tmp_path / "two")}
    ours, _ = everywhere("train", job)
    theirs = alone.train({**job, "save": str(tmp_path / "one")})
    for found in (ours, theirs):
        assert found["reports"][0]["metrics"]["ratio/floor"] == 0.0, "it computes as a generator does"
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    before = {name: parameter.detach().float().numpy() for name, parameter in base.items()}
    moved = np.concatenate([np.abs(two[name] - before[name]).ravel() for name in before])
    assert moved.dtype == np.float32
    assert float((moved > 0).mean()) > 0.95
    assert float(moved.max()) < 2e-6
    assert all(np.allclose(one[name], two[name], rtol=0, atol=1e-6) for name in before)
    alone.train({**job, "overrides": tiny_steps, "save": str(tmp_path / "half")})
    half = build_family(load_config(None, tiny_steps), frozenset({"denoise"})).parameters()
    load_weights(tmp_path / "half" / "weights.safetensors", half)
    still = sum(int((half[name] == base[name]).sum()) for name in base) / sum(p.numel() for p in base.values())
    assert still > 0.95, "without them nearly nothing moves"


def test_what_cannot_be_sharded_is_refused(toy: Any, tiny_model: Any) -> None:
    one = Ranks()
    with pytest.raises(ConfigError, match=r"replicas=3 does not divide the 1 ranks"):
        Shards(build_family(load_config(None), frozenset({"denoise"})), FsdpSection(replicas=3), one)
    with pytest.raises(ConfigError, match=r"Toy is no subclass of .*PipelineFamily"):
        Shards(toy(torch.float32), FsdpSection(), one)
    wan = load_config(None, {"model.family": "wan", "model.path": str(tiny_model("wan")), "model.dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"torch\.bfloat16, torch\.float32 where all must have one precision"):
        Shards(build_family(wan, frozenset({"denoise"})), FsdpSection(), one)
    for overrides in ({}, {"model.dtype": "bfloat16", **LORA}):
        with pytest.raises(ConfigError, match=r"optimizer\.master_weights: with model\."):
            load_config(None, {"optimizer.master_weights": True, **overrides})
