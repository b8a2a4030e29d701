"""Publications: who reads which, and when a buffer goes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from digen import LoadReport, Payload, ProtocolError, Publication, SimWorker, StepFailed
from digen.events import TaskFailed, TaskFinished, TaskStarted
from digen.sched.sync import WeightSync


def publication(version: int) -> Publication:
    return Publication(version, Payload({}), checksum=100 + version, num_tensors=2, nbytes=8)


def report(number: int, **fields: Any) -> LoadReport:
    return msgspec.structs.replace(LoadReport(number, 100 + number, 2), **fields)


def test_a_buffer_goes_back_when_it_is_superseded_and_its_last_reader_is_done() -> None:
    released: list[Payload] = []
    sync = WeightSync(released.append)
    first, second, third = (publication(version) for version in (1, 2, 3))
    sync.published(first)
    sync.load_began(first)
    sync.load_began(first)
    sync.load_ended(first, report(1))
    sync.published(second)
    assert released == []  # one reader is still at it
    sync.load_began(second)
    sync.load_ended(second, report(2))
    sync.published(third)
    assert released == [second.payload]  # double buffering goes on meanwhile
    sync.load_ended(first, report(1))
    assert released == [second.payload, first.payload]
    assert sync.current is third


def test_what_nobody_reads_goes_back_at_once() -> None:
    released: list[Payload] = []
    sync = WeightSync(released.append)
    first = publication(1)
    sync.published(first)
    sync.published(publication(2))
    assert released == [first.payload]


@pytest.mark.parametrize("wrong", [{"version": 2}, {"checksum": 7}, {"num_tensors": 1}])
def test_a_load_that_holds_something_else_is_an_error(wrong: dict[str, int]) -> None:
    sync = WeightSync(lambda payload: None)
    sync.published(publication(1))
    sync.load_began(publication(1))
    with pytest.raises(ProtocolError, match=r"after loading version 1 .* of other weights"):
        sync.load_ended(publication(1), report(1, **wrong))


def test_loads_of_weights_without_a_checksum_must_agree() -> None:
    sync = WeightSync(lambda payload: None)
    for version, found in ((1, 11), (2, 12), (1, 13)):
        unknown = msgspec.structs.replace(publication(version), checksum=None)
        sync.published(unknown)
        for _ in range(3):
            sync.load_began(unknown)
        sync.load_ended(unknown, report(version, checksum=found))
        sync.load_ended(unknown, report(version, checksum=found))
        with pytest.raises(ProtocolError, match=f"after loading version {version} .* of other weights"):
            sync.load_ended(unknown, report(version, checksum=7))
        sync.load_failed(unknown)


class Trainer(SimWorker):
    """Knows which of its publications are still lent."""

    def __init__(self, durations: dict[str, Any]) -> None:
        super().__init__("trainer", durations)
        self.lent: dict[int, Payload] = {}
        self.most_lent = 0

    async def publish(self, version: int, /) -> Publication:
        made = await super().publish(version)
        self.lent[version] = made.payload
        self.most_lent = max(self.most_lent, len(self.lent))
        return made

    def release(self, payload: Payload) -> None:
        (version,) = [version for version, lent in self.lent.items() if lent is payload]
        del self.lent[version]


class Loader(SimWorker):
    """Fails if what it reads is taken back meanwhile."""

    trainer: Trainer

    async def load(self, publication: Publication, /) -> LoadReport:
        assert publication.version in self.trainer.lent
        loaded = await super().load(publication)
        assert publication.version in self.trainer.lent
        return loaded


def test_a_slow_loader_keeps_its_buffer_and_skips_versions(simulate: Callable[..., Any]) -> None:
    trainer = Trainer({"update": 1, "publish": 1})
    slow, quick = Loader("slow", {"generate": 1, "load": 50}), Loader("quick", {"generate": 4, "load": 1})
    slow.trainer = quick.trainer = trainer
    run = simulate(num_steps=8, num_micro_batches=2, generators=[slow, quick], trainer=trainer)
    assert [e.version for e in run.of(TaskFinished) if e.kind == "load" and e.worker == "quick"] == list(range(1, 9))
    versions = [event.version for event in run.of(TaskFinished) if event.kind == "load" and event.worker == "slow"]
    assert versions[0] == 1
    assert versions[1] > 2  # the ones in between were never loaded
    assert versions[-1] == 8
    assert trainer.lent == {}  # the last one went back when the run was over
    assert trainer.most_lent == 3  # being read, current, being written


def test_on_a_pull_nobody_waits_for_a_slow_loader(simulate: Callable[..., Any]) -> None:
    def run(sync: str) -> Any:
        workers = [{"generate": 1, "load": 50}, {"generate": 1, "load": 1}]
        return simulate(num_steps=4, num_micro_batches=2, generators=workers, config={"sync": sync})

    assert run("hold").makespan >= 4 * 50
    assert run("pull").makespan < 4 * 50


@pytest.mark.parametrize("wrong", [{"version": 7}, {"checksum": 7}, {"num_tensors": 9}])
def test_a_generator_that_loaded_other_weights_ends_the_run(
    simulate: Callable[..., Any], wrong: dict[str, int]
) -> None:
    class Liar(SimWorker):
        async def load(self, publication: Publication, /) -> LoadReport:
            return msgspec.structs.replace(await super().load(publication), **wrong)

    run = simulate(num_steps=2, generators=[Liar("g0")], catch=StepFailed)
    assert isinstance(run.error.__cause__, ProtocolError)
    assert "load of step 0 on g0" in str(run.error)
    (failed,) = run.of(TaskFailed)
    assert (failed.kind, failed.worker) == ("load", "g0")


def test_a_publication_without_a_tensor_ends_the_run(simulate: Callable[..., Any]) -> None:
    """LoRA that is bound to nothing trains for days and never reaches a generator."""

    class Unbound(SimWorker):
        async def publish(self, version: int, /) -> Publication:
            return msgspec.structs.replace(await super().publish(version), num_tensors=0)

    run = simulate(trainer=Unbound("trainer"), catch=StepFailed)
    assert isinstance(run.error.__cause__, ProtocolError)
    assert "without a single tensor" in str(run.error)


def test_every_generator_gets_the_weights_before_its_next_trajectory(simulate: Callable[..., Any]) -> None:
    run = simulate(num_steps=5, generators=[{"generate": 2}, {"generate": 3}], trainer={"update": 1})
    held = {"g0": 0, "g1": 0}
    for event in run.events:
        if isinstance(event, TaskFinished) and event.kind == "load":
            held[event.worker] = event.version
        elif isinstance(event, TaskStarted) and event.kind == "generate":
            assert held[event.worker] == event.version == event.step
