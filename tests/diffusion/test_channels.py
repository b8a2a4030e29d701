"""Weight channels: what is published is what is held, whoever writes and whoever reads, or it is an error."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from digen import LoadReport, Publication
from digen.diffusion.channels import Receiver, Sender, build_sender
from digen.diffusion.channels.base import Deadline
from digen.diffusion.channels.broadcast import BroadcastSource
from digen.diffusion.channels.files import FileSource
from digen.diffusion.channels.memory import DONE, MemorySender
from digen.diffusion.ranks import Ranks
from digen.errors import ConfigError, PayloadLost, ProtocolError, WorkerTimeout
from digen.resources import WeightsSection
from digen.types import Payload
from digen.workers.group import process_group
from digen.workers.payload import Store
from tests.diffusion.weight_targets import bits, values

_T = TypeVar("_T")
NAMES: dict[str, Any] = {"segment": "memory", "arrays": "auto", "files": "files", "broadcast": "broadcast"}
CHANNELS = [*NAMES]
Channel = Callable[..., tuple[Sender, Receiver]]


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    """Both ends of a channel in this process."""

    def make(kind: str, weights: dict[str, Tensor], **options: Any) -> tuple[Sender, Receiver]:
        options.setdefault("timeout_s", 20.0)
        section = WeightsSection(
            channel=NAMES[kind], folder=tmp_path / "weights" if kind == "files" else None, **options
        )
        dtypes = {name: tensor.dtype for name, tensor in weights.items()}
        sender = build_sender(section, Ranks(), dtypes, num_receivers=1)
        if kind == "segment":
            sender.lend_memory(Store("trainer#1"))
        return sender, Receiver(section)

    return make


def empty(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


@pytest.mark.parametrize("kind", CHANNELS)
def test_what_is_published_is_what_is_held_bit_for_bit(channel: Channel, kind: str) -> None:
    weights = values(0) | {
        "number": torch.tensor(3.5),
        "nothing": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "half": torch.tensor([[1.0, float("nan")], [float("-inf"), -0.0]], dtype=torch.float16),
        "turned": torch.arange(6, dtype=torch.int32).reshape(2, 3).t(),
    }
    sender, receiver = channel(kind, weights)
    held = empty(weights)
    held["turned"] = torch.zeros(2, 3, dtype=torch.int32).t()
    addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
    for version in range(3):
        published = sender.publish(version, weights)
        report = receiver.load(published, held)
        assert bits(held) == bits(weights)
        assert (report.version, report.num_tensors, report.num_copied) == (version, 9, 8)  # nothing to copy of one
        assert published.checksum in {None, report.checksum}
        assert (published.num_tensors, published.nbytes) == (9, sum(t.nbytes for t in weights.values()))
        sender.settle()
        weights["block.0.weight"].add_(1)
    assert {name: tensor.data_ptr() for name, tensor in held.items()} == addresses


@pytest.mark.parametrize("kind", CHANNELS)
def test_weights_are_cast_where_they_come_from(channel: Channel, kind: str) -> None:
    masters = {"a": torch.randn(50, 3)}
    sender, receiver = channel(kind, {"a": torch.zeros(50, 3, dtype=torch.bfloat16)})
    held = {"a": torch.zeros(50, 3, dtype=torch.bfloat16)}
    published = sender.publish(4, masters)
    receiver.load(published, held)
    assert torch.equal(held["a"], masters["a"].to(torch.bfloat16))
    assert published.nbytes == 50 * 3 * 2


@pytest.mark.parametrize("kind", CHANNELS[:3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": None}, r"1 unknown \['norm'\], 0 missing"),
        ({"lora.up": torch.zeros(2)}, r"0 unknown \[\], 1 missing \['lora\.up'\]"),
        (
            {"norm": torch.zeros(1000, 4, dtype=torch.float64)},
            r"norm is \(4, 1000\) F64, the model has \(1000, 4\) F64",
        ),
        ({"block.1.weight": torch.zeros(6, 2, 2, dtype=torch.float16)}, r"BF16, the model has \(6, 2, 2\) F16"),
    ],
)
def test_weights_that_fit_only_in_part_are_not_copied_at_all(
    channel: Channel, kind: str, change: dict[str, Any], message: str
) -> None:
    weights = values(0)
    sender, receiver = channel(kind, weights)
    held = {name: tensor for name, tensor in (empty(weights) | change).items() if tensor is not None}
    with pytest.raises(ConfigError, match=message):
        receiver.load(sender.publish(1, weights), held)
    sender.settle()
    assert not any(tensor.any() for tensor in held.values())


@pytest.mark.parametrize("kind", CHANNELS)
def test_a_publication_without_a_tensor_is_an_error(channel: Channel, kind: str) -> None:
    sender, receiver = channel(kind, {})
    with pytest.raises(ConfigError, match="0 tensors"):
        receiver.load(sender.publish(1, {}), {})


def test_a_dtype_that_nobody_can_read_is_refused(channel: Channel) -> None:
    weights = {"a": torch.zeros(3, dtype=torch.complex64)}
    sender, _ = channel("segment", weights)
    with pytest.raises(ConfigError, match=r"a is torch\.complex64, which cannot be published"):
        sender.publish(0, weights)


@pytest.mark.parametrize("kind", CHANNELS)
def test_one_byte_that_differs_is_found(channel: Channel, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = values(0)
    sender, receiver = channel(kind, weights)
    published = sender.publish(1, weights)
    if kind != "broadcast":
        sender.settle()
    held = empty(weights)
    if kind == "files":
        (file,) = Path(published.url.removeprefix("file://").partition("#")[0]).glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    elif kind == "segment":
        placed: Any = published.payload
        with mmap.mmap(placed.descriptor, 0) as memory:
            memory[placed.offsets["norm"] + 7] ^= 1
    elif kind == "broadcast":
        real = BroadcastSource.data
        monkeypatch.setattr(BroadcastSource, "data", lambda source, index: real(source, index) ^ np.uint8(index == 3))
    else:
        published.payload["norm"].view(np.uint8)[0, 7] ^= 1
    with pytest.raises(ProtocolError, match="norm: elements 0 to 3999 fail their checksum"):
        receiver.load(published, held)


@pytest.mark.parametrize("kind", CHANNELS[:3])
def test_unchanged_tensors_are_left_alone(channel: Channel, kind: str) -> None:
    weights = values(0)
    sender, receiver = channel(kind, weights, skip_unchanged=True)
    held, copied = empty(weights), []
    for version, changed in enumerate([[], ["norm"], ["norm", "block.0.bias"], []]):
        sender.settle()
        for name in changed:
            weights[name].add_(1)
        copied.append(receiver.load(sender.publish(version, weights), held).num_copied)
        assert bits(held) == bits(weights)
    assert copied == [4, 1, 2, 0]
    fresh = empty(weights)  # another generator needs everything
    assert Receiver(WeightsSection()).load(sender.publish(4, weights), fresh).num_copied == 4
    assert bits(fresh) == bits(weights)


def test_after_a_load_that_failed_everything_is_copied_again(channel: Channel) -> None:
    weights = values(0)
    sender, receiver = channel("arrays", weights, skip_unchanged=True)
    held = empty(weights)
    receiver.load(sender.publish(0, weights), held)
    weights["norm"].add_(1)
    damaged = sender.publish(1, weights)
    damaged.payload["norm"][0, 0] = 7
    with pytest.raises(ProtocolError):
        receiver.load(damaged, held)
    assert receiver.load(sender.publish(1, weights), held).num_copied == 4
    assert bits(held) == bits(weights)


# Shared memory


def test_a_segment_that_is_read_or_written_is_never_used_again() -> None:
    store, weights = Store("trainer#1"), values(0)
    sender = MemorySender(Ranks(), {name: tensor.dtype for name, tensor in weights.items()}, 20.0)
    sender.lend_memory(store)
    receiver = Receiver(WeightsSection())
    published = []
    for version in range(3):  # a slow loader still has the first
        sender.settle()
        for name, tensor in values(version).items():
            weights[name].copy_(tensor)
        published.append(sender.publish(version, weights))
        if version == 1:
            sender.settle()
            released: Any = published.pop().payload
            store.release(released.hand_out().segment)
    sender.settle()
    assert store.num_segments == 2
    for version, which in ((0, 0), (2, 1)):
        held = empty(weights)
        receiver.load(published[which], held)
        assert bits(held) == bits(values(version))
    placed: Any = published[0].payload
    placed.views[DONE][0] = 0  # as if a thread were writing it
    store.release(placed.hand_out().segment)
    assert store.acquire(100) != placed.segment
    placed.views[DONE][0] = 1
    assert store.acquire(100) == placed.segment


def test_a_segment_that_is_not_handed_out_is_free_again() -> None:
    store, weights = Store("trainer#1"), values(0)
    sender = MemorySender(Ranks(), {name: tensor.dtype for name, tensor in weights.items()}, 20.0)
    sender.lend_memory(store)
    for version in range(5):
        sender.publish(version, weights)  # an error came between
        sender.settle()
    assert store.num_segments == 1


def test_a_trainer_that_cannot_write_says_so(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> int:
        raise OSError("out of memory")

    monkeypatch.setattr("digen.diffusion.channels.memory.write", broken)
    weights = values(0)
    sender, receiver = channel("segment", weights)
    published = sender.publish(3, weights)
    with pytest.raises(ProtocolError, match="the trainer gave up"):
        receiver.load(published, empty(weights))
    with pytest.raises(OSError, match="out of memory"):
        sender.settle()


# Files


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "weights").iterdir())


def test_files_are_plain_safetensors(channel: Channel, tmp_path: Path) -> None:
    weights = values(0)
    sender, _ = channel("files", weights)
    sender.publish(12, weights)
    sender.settle()
    assert folders(tmp_path) == ["v000012"]
    assert sorted(path.name for path in (tmp_path / "weights/v000012").iterdir()) == [
        "manifest.json",
        "rank0.safetensors",
    ]
    assert bits(load_file(tmp_path / "weights/v000012/rank0.safetensors")) == bits(weights)


def test_only_what_changed_is_written(channel: Channel, tmp_path: Path) -> None:
    weights = values(0)
    sender, _ = channel("files", weights, skip_unchanged=True)
    for version, changed in enumerate([[], ["norm"], []]):
        sender.settle()
        for name in changed:
            weights[name].add_(1)
        sender.publish(version, weights)
    sender.settle()
    kept = {path.parent.name: set(load_file(path)) for path in tmp_path.rglob("*.safetensors")}
    assert kept == {"v000000": set(weights), "v000001": {"norm"}}  # version 2 points to both


def test_old_versions_go_when_nobody_reads_them(channel: Channel, tmp_path: Path) -> None:
    weights = values(0)
    sender, receiver = channel("files", weights)
    first = sender.publish(0, weights)
    reader = FileSource(first, Deadline(0, 20.0))
    for version in range(1, 5):
        sender.publish(version, weights)
    sender.settle()
    (mark,) = [name for name in folders(tmp_path) if name.startswith("reading-")]
    assert folders(tmp_path) == [mark, "v000000", "v000003", "v000004"]
    reader.close()
    (tmp_path / "weights/v000099").mkdir()  # an earlier run got further
    (tmp_path / "weights/.v000005.0123456789abcdef.tmp").mkdir()  # and was killed in the middle
    (tmp_path / "weights/videos").mkdir()
    sender.publish(5, weights)
    sender.settle()
    assert folders(tmp_path) == ["v000004", "v000005", "videos"]
    with pytest.raises(WorkerTimeout, match="weights of version 0"):
        Receiver(WeightsSection(timeout_s=0.05)).load(first, empty(weights))
    awaited = Publication(5, Payload({}), None, 4, 10, f"file://{tmp_path}/weights/v000005#0123")  # by a resumed run
    with pytest.raises(WorkerTimeout, match="v000005 was not complete"):
        Receiver(WeightsSection(timeout_s=0.05)).load(awaited, empty(weights))
    assert receiver.load(sender.publish(5, weights), empty(weights)).version == 5


def test_a_mark_that_nobody_keeps_fresh_is_not_believed(channel: Channel, tmp_path: Path) -> None:
    weights = values(0)
    sender, _ = channel("files", weights)
    reader = FileSource(sender.publish(0, weights), Deadline(0, 20.0))
    (mark,) = (tmp_path / "weights").glob("reading-*")
    os.utime(mark, (0, 0))  # its process was killed
    for version in (1, 2):
        sender.publish(version, weights)
    sender.settle()
    assert folders(tmp_path) == ["v000001", "v000002"]
    reader.close()


def test_a_folder_that_cannot_be_written_or_seen_is_named(channel: Channel, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    weights = values(0)
    sender, receiver = channel("files", weights)
    with pytest.raises(ConfigError, match=r"cannot be written to .*weights.*workers\.weights\.folder"):
        sender.publish(0, weights)
    published = Publication(1, Payload({}), None, 4, 10, f"file://{tmp_path}/elsewhere/v000001#0")
    with pytest.raises(ConfigError, match=r"cannot be read from .*elsewhere.*workers\.weights\.folder"):
        receiver.load(published, empty(weights))


@pytest.mark.parametrize(
    ("file", "message"),
    [("../../secret", "names '../../secret', which is no file of weights"), ("v000000/rank7.safetensors", "cannot be")],
)
def test_a_manifest_that_leads_elsewhere_is_refused(channel: Channel, tmp_path: Path, file: str, message: str) -> None:
    weights = values(0)
    sender, receiver = channel("files", weights)
    published = sender.publish(0, weights)
    sender.settle()
    manifest = tmp_path / "weights/v000000/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"v000000/rank0.safetensors", file.encode()))
    with pytest.raises(ProtocolError, match=message):
        receiver.load(published, empty(weights))
    manifest.write_text("{")
    with pytest.raises(ProtocolError, match=r"manifest\.json cannot be read"):
        receiver.load(published, empty(weights))


# Broadcast


def test_generators_that_do_not_come_or_come_twice_are_named() -> None:
    weights = values(0)
    dtypes = {name: tensor.dtype for name, tensor in weights.items()}
    section = WeightsSection(channel="broadcast", timeout_s=1.0)
    sender = build_sender(section, Ranks(), dtypes, num_receivers=2)
    published = sender.publish(3, weights)
    with pytest.raises(WorkerTimeout, match="weights of version 3: not everybody came within 1"):
        Receiver(section).load(published, empty(weights))
    with pytest.raises(WorkerTimeout, match="weights of version 3: not all 2 ranks of the generators came"):
        sender.settle()
    sender = build_sender(section, Ranks(), dtypes, num_receivers=1)
    published = sender.publish(4, weights)
    held = empty(weights)
    Receiver(section).load(published, held)
    assert bits(held) == bits(weights)
    with pytest.raises(ProtocolError, match="version 4 were sent to all 1 ranks of the generators already"):
        Receiver(section).load(published, held)


def test_the_broadcast_is_heard_on_this_machine_only(channel: Channel) -> None:
    weights = values(0)
    sender, receiver = channel("broadcast", weights)
    published = sender.publish(0, weights)
    listening = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert urlsplit(published.url).port in {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}
    receiver.load(published, empty(weights))


# Processes and ranks


class Pair:
    """A trainer and a generator of two ranks each, which every test makes into what it needs."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        path = "tests.diffusion.weight_targets"
        self.trainer = process_group("trainer", f"{path}:Trainer", 2, rank_timeout_s=30, log_dir=folder)
        self.generator = process_group("generator", f"{path}:Generator", 2, rank_timeout_s=30, log_dir=folder)
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do something with them."""
        return self._runner.run(work)

    async def _start(self) -> None:
        await asyncio.gather(*map(self._stack.enter_async_context, (self.trainer, self.generator)))

    async def sync(self, version: int) -> tuple[Publication, LoadReport, dict[str, str]]:
        """Train, publish, load; the last is what every rank of the generator holds."""
        await self.trainer.call("commit", version - 1, (0,))
        published = await self.trainer.publish(version)
        report = await self.generator.load(published)
        self.trainer.release(published.payload)
        return published, report, await self.generator.call("bits")

    def close(self) -> None:
        """End them."""

        async def close() -> None:
            await asyncio.gather(self.trainer.aclose(), self.generator.aclose())

        self.run(close())
        self._runner.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("logs"))
    yield made
    made.close()


@pytest.mark.parametrize("channel", ["memory", "gathered", "files", "broadcast"])
def test_ranks_publish_and_load_what_one_does(pair: Pair, tmp_path: Path, channel: str) -> None:
    """Uneven shards of two ranks, into generators that are whole and sharded: the bits that one rank has."""
    section = {"channel": "memory" if channel == "gathered" else channel}
    if channel == "files":
        section["folder"] = str(tmp_path)

    async def run() -> None:
        await pair.trainer.call("become", "shard", section, channel != "gathered")
        for version, placement in enumerate(["whole", "shard", "whole"], start=1):
            await pair.generator.call("become", placement, {})
            published, report, held = await pair.sync(version)
            assert held == bits(values(version))
            assert (published.num_tensors, published.nbytes) == (4, sum(t.nbytes for t in values(0).values()))
            assert (report.num_tensors, report.num_copied) == (4, 4)
            assert (published.checksum == report.checksum) if channel == "gathered" else published.checksum is None

    pair.run(run())
    if channel == "files":
        files = {path.name: load_file(path) for path in (tmp_path / "v000003").glob("*.safetensors")}
        assert {name: len(tensors) for name, tensors in files.items()} == {
            "rank0.safetensors": 4,
            "rank1.safetensors": 3,
        }
        rows = [files[f"rank{rank}.safetensors"]["block.0.weight"] for rank in range(2)]
        assert [len(part) for part in rows] == [3, 2]


def test_of_two_replicas_one_writes(pair: Pair) -> None:
    async def run() -> None:
        await pair.trainer.call("become", "replicate", {})
        await pair.generator.call("become", "whole", {})
        _, report, held = await pair.sync(1)
        assert held == bits(values(1))
        assert report.num_copied == 4

    pair.run(run())


def test_a_slow_loader_never_sees_a_buffer_that_is_written_again(pair: Pair, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    opener = os.open(gate, os.O_RDWR)

    async def run() -> None:
        await pair.trainer.call("become", "shard", {})
        await pair.generator.call("become", "whole", {}, str(gate))
        await pair.trainer.call("commit", 0, (0,))
        first = await pair.trainer.publish(1)
        load = asyncio.ensure_future(pair.generator.load(first))
        for version in range(2, 6):
            await pair.trainer.call("commit", version - 1, (0,))
            pair.trainer.release(first.payload)  # the load is on its way
            pair.trainer.release((await pair.trainer.publish(version)).payload)
        os.write(opener, b"!")
        assert (await load).version == 1
        assert await pair.generator.call("bits") == bits(values(1))

    try:
        pair.run(run())
    finally:
        os.close(opener)


def test_a_trainer_killed_in_the_middle_is_noticed_at_once(pair: Pair) -> None:  # the last: it ends the trainer
    async def run() -> None:
        await pair.trainer.call("become", "shard", {})
        await pair.generator.call("become", "whole", {"timeout_s": 60})
        await pair.trainer.call("stall", 2)
        published = await pair.trainer.publish(1)
        for rank in pair.trainer.ranks:
            os.kill(rank.pid, signal.SIGKILL)
        await pair.generator.load(published)

    with pytest.raises(PayloadLost, match=r"the trainer died while it wrote the weights: [3-7] of 7 pieces were not"):
        pair.run(run())
