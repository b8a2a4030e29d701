"""Snapshots of a trainer: its state in shared memory, and what is made of that by another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from digen.diffusion import update
from digen.diffusion.roles import TrainerTarget
from digen.errors import CheckpointError, ConfigError
from digen.types import Payload, Snapshot
from digen.workers.payload import Store
from digen.workers.wire import WorkerCodec
from tests.diffusion.sharded import _generate, state

ADVANTAGES = (1.5, -0.3, 0.0)


class Life:
    """A trainer as in a process of its own, of which the driver holds what it has returned."""

    def __init__(self, config: Any, store: Store | None) -> None:
        self.config = config
        self.store = store
        self.target = TrainerTarget(config.model_dump(mode="json"))
        if store is not None:
            self.target.lend_memory(store)

    def train(self, *steps: int) -> dict[str, bytes]:
        """Train steps; returns everything that training depends on, bit for bit."""
        for step in steps:
            self.target.update(_generate(self.target, self.config, step, 0), ADVANTAGES)
            self.target.commit(step, (0,))
        return self.bits()

    def bits(self) -> dict[str, bytes]:
        tensors = state(self.target._learner)
        return {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}

    def snapshot(self) -> Snapshot:
        """As another process sees it."""
        taken = self.target.snapshot()
        if self.store is None:
            views = {name: memoryview(array).toreadonly() for name, array in taken.payloads[0].items()}
            return Snapshot(taken.version, (Payload(views),), taken.nbytes)
        codec = WorkerCodec(self.store)
        codec.reply(1, taken)
        (segment,) = codec._written
        self.segment = segment
        return Snapshot(taken.version, (Payload(dict(taken.payloads[0])),), taken.nbytes)


@pytest.mark.parametrize(
    "overrides",
    [
        {"optimizer__ema_decay": 0.9},
        {"algorithm__name": "diffusion_nft", "optimizer__name": "sgd"},
        {"model__dtype": "bfloat16", "optimizer__master_weights": True, "algorithm__old_logprobs": "recompute"},
        {"model__lora": {"rank": 2, "alpha": 4}},
    ],
    ids=["ema", "old policy, sgd", "master weights", "lora"],
)
@pytest.mark.parametrize("lent", [True, False])
def test_another_trainer_goes_on_bit_for_bit(config: Any, overrides: dict[str, Any], lent: bool) -> None:
    made = config(sampling__num_inference_steps=3, **overrides)
    first = Life(made, Store("trainer#1") if lent else None)
    before = first.train(0, 1)
    snapshot = first.snapshot()
    assert snapshot.version == 2
    assert snapshot.nbytes >= sum(map(len, before.values()))
    straight = first.train(2, 3)  # the copy does not follow
    second = Life(made, Store("trainer#2") if lent else None)
    second.target.update(_generate(second.target, made, 0, 0), ADVANTAGES)  # an open gradient is dropped
    assert second.target.recall(snapshot) == second.target.version == 2
    assert second.bits() == before
    assert second.train(2, 3) == straight


def test_a_snapshot_has_what_a_checkpoint_has(config: Any, tmp_path: Any) -> None:
    made = config(sampling__num_inference_steps=3, optimizer__ema_decay=0.9)
    first, second = Life(made, Store("trainer#1")), Life(made, Store("trainer#2"))
    first.train(0)
    second.target.recall(first.snapshot())
    assert second.target.save(str(tmp_path / "a")) == first.target.save(str(tmp_path / "b"))


def test_two_segments_serve_a_whole_run(config: Any) -> None:
    store = Store("trainer#1")
    life = Life(config(sampling__num_inference_steps=3), store)
    before = None
    for step in range(5):
        life.train(step)
        life.snapshot()
        if before is not None:
            store.release(before)  # the driver has the next one
        before = life.segment
    assert store.num_segments == 2


def test_what_is_damaged_or_foreign_is_refused_and_changes_nothing(config: Any) -> None:
    made = config(sampling__num_inference_steps=3)
    first, second = Life(made, Store("trainer#1")), Life(made, Store("trainer#2"))
    first.train(0)
    snapshot = first.snapshot()
    fresh = second.bits()
    (payload,) = snapshot.payloads
    for name in payload:
        spoilt = {key: np.array(array) for key, array in payload.items()}
        spoilt[name].view(np.uint8)[-1] ^= 1
        with pytest.raises(CheckpointError, match="fails its checksum"):
            second.target.recall(Snapshot(1, (Payload(spoilt),), snapshot.nbytes))
    for payloads in ((), (payload, payload), (Payload({"w": b""}),)):
        with pytest.raises(CheckpointError, match="nothing that a rank of this trainer has written"):
            second.target.recall(Snapshot(1, payloads, 0))
    other = Life(config(sampling__num_inference_steps=3, model__lora={"rank": 2, "alpha": 4}), None)
    with pytest.raises(CheckpointError, match=r"weights.safetensors of the snapshot is of another model: \d+ tensors"):
        other.target.recall(snapshot)
    assert second.bits() == fresh
    assert (second.target.version, other.target.version) == (0, 0)
    assert second.target.recall(snapshot) == 1


def test_the_machine_must_have_the_memory(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(sampling__num_inference_steps=3)
    life = Life(made, Store("trainer#1"))
    monkeypatch.setattr(update, "available_memory", lambda: 10**6)
    with pytest.raises(
        ConfigError, match=r"take \d+ bytes .*has 1000000 left; set restarts.snapshot_every, 0 for none"
    ):
        life.snapshot()
    assert life.store is not None
    assert life.store.num_segments == 0, "nothing was taken"
    nbytes = sum(map(len, life.train(0).values()))
    monkeypatch.setattr(update, "available_memory", lambda: 2 * nbytes + 10**5)
    snapshot = life.snapshot()
    monkeypatch.setattr(update, "available_memory", lambda: 0)
    life.snapshot()  # that was looked at once
    again = Life(made, Store("trainer#2"))
    again.target.recall(snapshot)
    again.snapshot()  # and where it is recalled it was there
