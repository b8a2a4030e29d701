"""Shared memory: what is written is what is read, bounds hold, memory is reused and freed."""

from __future__ import annotations

import array
import gc
import mmap
import os
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from digen.errors import ProtocolError
from digen.types import ArraySpec, Payload, PayloadRef
from digen.workers.payload import ALIGNMENT, Lease, Segment, Store
from digen.workers.wire import WorkerCodec

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


def connect(writer: Store, reader: Store, ref: PayloadRef) -> None:
    fd = writer.take_descriptor(ref.segment)
    if fd is not None:
        reader.attach(writer.name, ref.segment, fd)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=8), ARRAYS, max_size=5), st.booleans())
def test_arrays_pass_bit_exactly_whatever_their_shape(arrays: dict[str, np.ndarray[Any, Any]], checksums: bool) -> None:
    writer, reader = Store("a#1", checksums=checksums), Store("b#1")
    ref = writer.write(arrays)
    connect(writer, reader, ref)
    seen = reader.read(ref)
    assert list(seen) == list(arrays)
    assert (ref.checksum is not None) == checksums
    for name, view in seen.items():
        got = np.asarray(view)
        assert (got.dtype, got.shape, got.tobytes()) == (arrays[name].dtype, arrays[name].shape, arrays[name].tobytes())
        assert view.readonly
    assert all(view.readonly for view in writer.read(ref).values())  # its own memory, which it can write
    assert all(spec.offset % ALIGNMENT == 0 for spec in ref.arrays)


def test_what_was_read_can_be_written_again() -> None:
    first, second = Store("a#1"), Store("b#1")
    arrays = {"empty": np.zeros((2, 0, 3), "i8"), "scalar": np.array(2.5), "bytes": b"abc"}
    again = second.write(first.read(first.write(arrays)))
    assert {name: np.asarray(view).tolist() for name, view in second.read(again).items()} == {
        "empty": [[], []],
        "scalar": 2.5,
        "bytes": [97, 98, 99],
    }


def test_objects_that_give_an_array_are_taken() -> None:
    class Tensor:
        def numpy(self) -> np.ndarray[Any, Any]:
            return np.arange(3)

    class Arraylike:
        def __array__(self) -> np.ndarray[Any, Any]:
            return np.arange(2)

    store = Store("a#1")
    seen = store.read(store.write({"t": Tensor(), "a": Arraylike(), "s": array.array("d", [1.5])}))
    assert {name: view.tolist() for name, view in seen.items()} == {"t": [0, 1, 2], "a": [0, 1], "s": [1.5]}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.zeros((4, 4)).T[1:], ValueError, "not C-contiguous"),
        (np.zeros(3, "f2"), TypeError, "half precision"),
        (np.zeros(3, "c8"), TypeError, "buffer format"),
        (np.zeros(3, ">f4"), TypeError, "buffer format"),
        (3.5, TypeError, "is a float, not an array"),
        ([1, 2], TypeError, "is a list, not an array"),
    ],
)
def test_what_is_no_plain_array_is_refused_by_name(value: Any, error: type[Exception], message: str) -> None:
    store = Store("a#1")
    with pytest.raises(error, match=f"'x'.*{message}"):
        store.write({"x": value})
    assert store.num_segments == 0


def test_segments_are_reused_and_their_number_stays_flat() -> None:
    store = Store("a#1")
    for index in range(200):
        ref = store.write({"x": bytes(100_000 + 50 * index)})  # sizes of one class
        store.release(ref.segment)
        store.release(ref.segment)  # harmless
    assert store.num_segments <= 2
    held = [store.write({"x": bytes(100_000)}).segment for _ in range(3)]
    assert len(set(held)) == 3


def test_a_payload_written_in_place_is_read_where_it_was_written() -> None:
    writer, reader = Store("a#1"), Store("b#1")
    codec = WorkerCodec(writer)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"x": ("f", (2, 3)), "empty": ("d", (2, 0)), "flag": ("B", (1,))}
    placed = writer.place(shapes, lambda views: views["flag"][0] == 1)
    placed.views["flag"][0] = 0
    body, fds = codec.reply(1, placed)
    reply = msgspec.msgpack.decode(body)
    ref = msgspec.msgpack.decode(reply[2].data, type=PayloadRef)
    reader.attach("a#1", ref.segment, *fds)
    seen = reader.read(ref)
    np.asarray(placed.views["x"])[1, 2] = 2.5  # after it was handed out
    assert np.asarray(seen["x"])[1, 2] == 2.5
    assert [np.asarray(seen[name]).shape for name in shapes] == [(2, 3), (2, 0), (1,)]
    assert {name: spec.offset for name, spec in zip(shapes, ref.arrays, strict=True)} == placed.offsets
    with mmap.mmap(placed.descriptor, 0) as memory:
        assert memory[placed.offsets["x"] + 20 :][:4] == np.float32(2.5).tobytes()
    assert placed["x"].readonly
    with pytest.raises(TypeError, match="handed out before"):
        codec.reply(2, placed)


def test_a_payload_written_in_place_is_reused_when_it_is_released_and_written() -> None:
    store = Store("a#1")
    done: list[int] = []
    placed = store.place({"x": ("B", (10,))}, lambda views: bool(done))
    segment = placed.hand_out().segment
    store.release(segment)
    assert store.write({"x": b"abc"}).segment != segment
    done.append(1)
    assert store.write({"x": b"abc"}).segment == segment
    unused = store.place({"x": ("B", (10,))}, lambda views: True)
    segment = unused.segment
    del unused
    gc.collect()
    assert store.write({"x": b"abc"}).segment == segment


@pytest.mark.parametrize("shape", [("e", (2,)), ("f", (-2,))])
def test_an_array_that_cannot_be_is_not_placed(shape: tuple[str, tuple[int, ...]]) -> None:
    store = Store("a#1")
    with pytest.raises(ValueError, match="'x' has the impossible format"):
        store.place({"x": shape}, lambda views: True)
    assert store.num_segments == 0


def test_a_small_payload_leaves_a_large_segment_free() -> None:
    store = Store("a#1")
    large = store.write({"x": bytes(10 << 20)}).segment
    store.release(large)
    assert store.write({"x": b"small"}).segment != large
    assert store.write({"x": bytes(9 << 20)}).segment == large


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 1 << 40},
        {"nbytes": -1},
        {"segment": 99},
        {"store": "c#1"},
        {"arrays": (ArraySpec("x", "d", (1 << 20,), 0),)},
        {"arrays": (ArraySpec("x", "d", (2,), -8),)},
        {"arrays": (ArraySpec("x", "d", (2,), 64),)},
        {"arrays": (ArraySpec("x", "d", (-1, -2), 0),)},
        {"arrays": (ArraySpec("x", "P", (1,), 0),)},
        {"arrays": (ArraySpec("x", "dd", (1,), 0),)},
        {"arrays": (ArraySpec("x", "d", (1,) * 65, 0),)},
        {"checksum": 1},
    ],
)
def test_a_reference_is_checked_before_memory_is_read(change: dict[str, Any]) -> None:
    store = Store("a#1")
    ref = store.write({"x": bytes(16)})
    with pytest.raises(ProtocolError, match=r"payload .#1/"):
        store.read(msgspec.structs.replace(ref, **change))


def test_a_changed_byte_fails_the_checksum() -> None:
    writer = Store("a#1", checksums=True)
    ref = writer.write({"x": bytes(1000), "y": b"abc"})
    assert bytes(writer.read(ref)["y"]) == b"abc"
    fd = writer.take_descriptor(ref.segment)
    assert fd is not None
    with mmap.mmap(fd, 0) as memory:
        memory[500] ^= 1
    os.close(fd)
    with pytest.raises(ProtocolError, match="checksum"):
        writer.read(ref)


@pytest.mark.skipif(sys.platform != "linux", reason="memfd seals are Linux's")
def test_a_segment_cannot_shrink_under_its_readers() -> None:
    store = Store("a#1")
    fd = store.take_descriptor(store.write({"x": b"abc"}).segment)
    assert fd is not None
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


def test_memory_is_shared_without_memfd_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    writer, reader = Store("a#1"), Store("b#1")
    ref = writer.write({"x": b"abc"})
    connect(writer, reader, ref)
    assert bytes(reader.read(ref)["x"]) == b"abc"


class Connection:
    """A stand-in for both ends that the driver talks to."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def released(self, segment: int) -> None:
        self.told.append(segment)

    def forgotten(self, store: str, segment: int) -> None:
        self.told.append((store, segment))


def lease() -> tuple[Lease, Connection]:
    owner = Connection()
    fd = os.open(os.devnull, os.O_RDONLY)
    return Lease(PayloadRef("a#1", 4, 0, ()), Segment("a#1", 4, fd), owner), owner


def test_a_lease_ends_once_however_often_it_is_released() -> None:
    payload, owner = lease()
    payload.release()
    payload.release()
    del payload
    gc.collect()
    assert owner.told == [4]


def test_a_lease_ends_when_nothing_holds_it() -> None:
    payload, owner = lease()
    assert owner.told == []
    del payload
    assert owner.told == [4]


def test_memory_that_is_being_read_is_not_given_back() -> None:
    payload, owner = lease()
    payload.begin_read()
    payload.begin_read()
    payload.release()
    payload.end_read()
    assert owner.told == []
    payload.end_read()
    assert owner.told == [4]


def test_the_last_holder_of_a_segment_closes_it_and_tells_its_readers() -> None:
    payload, _ = lease()
    segment, reader = payload.segment, Connection()
    segment.readers.add(reader)
    fd = segment.fd
    del segment
    os.fstat(fd)
    del payload
    assert reader.told == [("a#1", 4)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_the_driver_cannot_read_a_lease() -> None:
    payload, _ = lease()
    assert isinstance(payload, Payload)
    with pytest.raises(TypeError, match="not in the driver"):
        payload["x"]
    other, _ = lease()
    assert payload != other
    assert {payload, other} == {other, payload}
