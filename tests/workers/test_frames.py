"""Frames and messages, without processes."""

from __future__ import annotations

import contextlib
import os
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digen.errors import DigenError, MissingExtra, ProtocolError, RewardError, WorkerDied, WorkerError, WorkerRaised
from digen.handles import METHODS
from digen.types import (
    CommitReport,
    Encoded,
    EvaluationReport,
    EvaluationRequest,
    GroupSlice,
    LoadReport,
    MicroBatch,
    Payload,
    Prompt,
    Publication,
    Rollout,
    Scored,
    Snapshot,
    UpdateReport,
)
from digen.workers.payload import Store
from digen.workers.wire import MAX_FRAME, DriverCodec, FrameReader, WorkerCodec, frame, receive, send

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=30)
    | st.binary(max_size=30),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


class Pair:
    """Both ends of a worker's wire, in one process; descriptors are duplicated as the kernel would."""

    def __init__(self, name: str = "w") -> None:
        self.driver = DriverCodec(name, f"{name}#1")
        self.worker = WorkerCodec(Store(f"{name}#1"))

    def call(self, method: str, *args: Any) -> Any:
        """Send arguments to the worker and give back what it sees."""
        body, segments, leases = self.driver.request(1, method, args)
        for lease in leases:
            lease.end_read()
        return self.worker.arguments(self.worker.open(body, [os.dup(segment.fd) for segment in segments]))

    def answer(self, method: str, value: Any) -> Any:
        """Send a result to the driver and give back what it sees."""
        return self.driver.result(method, self.driver.open(*self.worker.reply(1, value)))


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_any_split_of_the_stream_gives_the_same_frames(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, bodies))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = FrameReader()
    seen = [
        body
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for body, _ in reader.feed(stream[start:end])
    ]
    assert seen == bodies


def test_a_frame_of_the_largest_size_passes_and_one_byte_more_does_not() -> None:
    body = bytes(MAX_FRAME)
    assert [got for got, _ in FrameReader().feed(frame(body))] == [body]
    with pytest.raises(ProtocolError, match="limit"):
        next(FrameReader().feed((MAX_FRAME + 1).to_bytes(4, "little") + b"\x00"))


def test_descriptors_arrive_with_their_frame() -> None:
    left, right = socket.socketpair()
    with left, right, Path(os.devnull).open() as one, Path(os.devnull).open() as two:
        reader = FrameReader()
        for fds in ([], [one.fileno()], [one.fileno(), two.fileno()], []):
            data = frame(b"x" * 10, len(fds))
            left.sendall(data[send(left, data, fds) :])
        left.close()
        counts = []
        while (chunk := receive(right))[0]:
            for body, fds in reader.feed(*chunk):
                assert body == b"x" * 10
                assert not any(map(os.get_inheritable, fds))
                counts.append(len(fds))
                for fd in fds:
                    os.close(fd)
        assert counts == [0, 1, 2, 0]


def test_announced_descriptors_must_come_and_unclaimed_ones_are_closed() -> None:
    with pytest.raises(ProtocolError, match="descriptors"):
        next(FrameReader().feed(frame(b"", 2)))
    reader = FrameReader()
    fd = os.open(os.devnull, os.O_RDONLY)
    assert list(reader.feed(b"", [fd])) == []
    reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@given(st.lists(PLAIN, max_size=4), PLAIN)
def test_plain_data_passes_both_ways(args: list[Any], result: Any) -> None:
    pair = Pair()
    assert list(pair.call("anything", *args)) == args
    assert pair.answer("anything", result) == result


def test_every_method_keeps_the_types_of_its_arguments_and_result() -> None:
    micro_batch = MicroBatch(1, 2, 3, (GroupSlice("u", Prompt("p", {"k": [1, "x"]}), 0, 2, 4),))
    args: dict[str, tuple[Any, ...]] = {
        "encode": ((Prompt("p"), Prompt("q", {"label": 1})),),
        "generate": (micro_batch,),
        "score": (),
        "load": (),
        "update": (),
        "commit": (4, (0, 1, 2)),
        "publish": (5,),
        "switch": ("generate",),
        "save": ("a/path",),
        "begin_save": ("a/path",),
        "saved": (),
        "restore": ("a/path",),
        "snapshot": (),
        "recall": (),
        "evaluate": (EvaluationRequest(1, (Prompt("p"),), 2),),
    }
    results = {
        "score": Scored((1.0, 2.0), {"ocr": (0.5, 1.0)}),
        "load": LoadReport(1, 2**64 - 1, 3),
        "update": UpdateReport(1, 2, 3, {"loss": 0.5}),
        "commit": CommitReport(1, 2),
        "switch": None,
        "save": {"file": "x"},
        "begin_save": None,
        "saved": {"file": "x"},
        "restore": 3,
        "recall": 4,
        "evaluate": EvaluationReport(1, 2, {"reward": 0.5}),
    }
    pair = Pair()
    rollout = pair.answer("generate", Rollout(micro_batch, 1, 1, Payload({"a": b"abc"})))
    assert rollout.micro_batch == micro_batch
    (seen,) = pair.call("score", rollout)
    assert (type(seen), bytes(seen.payload["a"])) == (Rollout, b"abc")
    encoded = pair.answer("encode", Encoded((Prompt("p"),), Payload({"e": b"def"})))
    micro_batch_again, seen = pair.call("generate", micro_batch, encoded)
    assert (micro_batch_again, seen.prompts, bytes(seen.payload["e"])) == (micro_batch, (Prompt("p"),), b"def")
    seen, advantages = pair.call("update", rollout, [1.0, None])
    assert (bytes(seen.payload["a"]), advantages) == (b"abc", (1.0, None))
    publication = pair.answer("publish", Publication(1, Payload({"w": b"xyz"}), 2, 3, 4))
    (seen,) = pair.call("load", publication)
    assert (type(seen), seen.version, bytes(seen.payload["w"])) == (Publication, 1, b"xyz")
    snapshot = pair.answer("snapshot", Snapshot(4, (Payload({"s": b"state"}),), 5))
    (seen,) = pair.call("recall", snapshot)
    assert (type(seen), seen.version, bytes(seen.payloads[0]["s"])) == (Snapshot, 4, b"state")
    for method, values in args.items():
        if values:
            assert tuple(pair.call(method, *values)) == values
    for method, value in results.items():
        assert pair.answer(method, value) == value
    assert args.keys() == METHODS.keys()
    assert results.keys() | {"encode", "generate", "publish", "snapshot"} == METHODS.keys()


@settings(max_examples=500)
@given(st.binary(max_size=200) | PLAIN.map(msgspec.msgpack.encode))
def test_garbage_is_a_protocol_error_and_nothing_else(body: bytes) -> None:
    pair = Pair()
    with contextlib.suppress(ProtocolError, TypeError):  # TypeError: arguments of a method, but not of this one
        pair.worker.arguments(pair.worker.open(body, []))
    with contextlib.suppress(ProtocolError):
        pair.driver.result("generate", pair.driver.open(body, []))
    with contextlib.suppress(ProtocolError):
        pair.driver.error(pair.driver.open(body, []), "task")


def corpus() -> list[tuple[str, bytes]]:
    """Real messages of every kind, with the method that they belong to."""
    pair = Pair()
    micro_batch = MicroBatch(1, 2, 3, (GroupSlice("u", Prompt("p", {"k": [1, "x"]}), 0, 2, 4),))
    found = []
    for method, value in {
        "generate": Rollout(micro_batch, 1, 1, Payload({"a": b"abc", "b": memoryview(bytes(8)).cast("f")})),
        "score": Scored((1.0, 2.0), {"ocr": (0.5, 1.0)}),
        "update": UpdateReport(1, 2, 3, {"loss": 0.5}),
        "save": {"file": ["x", None, 1.5]},
        "restore": 3,
    }.items():
        body, fds = pair.worker.reply(1, value)
        found.append((method, body))
        result = pair.driver.result(method, pair.driver.open(body, fds))
        if method == "generate":
            sent = pair.driver.request(1, "update", (result, [1.0, None]))
            found.append(("update", sent[0]))
    for method, args in {"generate": (micro_batch,), "commit": (4, (0, 1)), "anything": ([1, {"a": b"b"}],)}.items():
        found.append((method, pair.driver.request(2, method, args)[0]))
    found.append(("score", pair.worker.failure(1, RewardError("no \ud800 reward"))))
    found.append(("score", pair.worker.failure(1, WorkerDied(worker="v", exit_code=3, log_tail="tail"))))
    return found


CORPUS = corpus()
HEADS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xa2\xff\xfe",
]
"""An array, a map, bytes and a text of 4 GiB, and a text that is not UTF-8."""


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A real message in which something was overwritten, put in, left out, or cut off."""
    method, body = draw(st.sampled_from(CORPUS))
    piece = st.sampled_from(HEADS) | st.binary(min_size=1, max_size=4) | PLAIN.map(msgspec.msgpack.encode)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(body)))
        end = min(len(body), start + draw(st.sampled_from((0, 1, 4, 1 << 20))))
        body = body[:start] + draw(piece | st.just(b"")) + body[end:]
    return method, body


@settings(max_examples=500, derandomize=True, deadline=None)
@given(mutated())
def test_a_message_that_was_tampered_with_is_an_error_that_says_so(message: tuple[str, bytes]) -> None:
    method, body = message
    pair = Pair()
    with contextlib.suppress(ProtocolError, TypeError):
        pair.worker.arguments(pair.worker.open(body, []))
    with contextlib.suppress(ProtocolError):
        pair.driver.result(method, pair.driver.open(body, []))
    with contextlib.suppress(ProtocolError):
        assert isinstance(pair.driver.error(pair.driver.open(body, []), "task"), DigenError)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(CORPUS), min_size=1, max_size=4), st.data())
def test_a_stream_that_was_tampered_with_gives_frames_or_an_error(
    messages: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    """It never holds more than what came, whatever its headers announce."""
    stream = bytearray(b"".join(frame(body) for _, body in messages))
    for _ in range(data.draw(st.integers(0, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader, taken = FrameReader(), 0
    with contextlib.suppress(ProtocolError):
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            for body, fds in reader.feed(bytes(stream[start:end])):
                assert not fds
                taken += 5 + len(body)
        assert taken <= len(stream)
        assert len(reader._buffer) == len(stream) - taken


@pytest.mark.parametrize("head", HEADS)
def test_a_length_that_nothing_follows_takes_no_memory(head: bytes) -> None:
    pair = Pair()
    tracemalloc.start()
    try:
        for start in (b"", b"\x94\x01\xc3", b"\x94\x01\xc3\xc0"):
            for method in ("x", "save", "score", "generate"):
                with pytest.raises(ProtocolError, match="cannot be decoded"):
                    pair.driver.result(method, pair.driver.open(start + head + bytes(100), []))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_reply_that_is_no_reply_closes_the_descriptors_that_came_with_it() -> None:
    for body in (b"\xc1", b"\x94\x01\xc3\xc0\x90"):
        fd = os.open(os.devnull, os.O_RDONLY)
        with pytest.raises(ProtocolError):
            Pair().driver.open(body, [fd])
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_fields_of_an_error_do_not_replace_its_methods() -> None:
    pair = Pair()
    fields = {"add_note": "x", "__notes__": "x", "args": "x", "exit_code": 3}
    body = msgspec.msgpack.encode(
        [1, False, {"type": "WorkerDied", "message": "m", "traceback": "t", "fields": fields}]
    )
    error = pair.driver.error(pair.driver.open(body, []), "task")
    assert isinstance(error, WorkerDied)
    assert (str(error), error.exit_code, error.__notes__) == ("worker 'w', task: m", 3, ["traceback in w:\nt"])


def test_deep_nesting_is_a_protocol_error() -> None:
    deep = b"\x91" * 1_000_000
    with pytest.raises(ProtocolError, match="recursion"):
        Pair().driver.open(b"\x93\x01\xc3" + deep, [])
    with pytest.raises(ProtocolError, match="recursion"):
        Pair().worker.open(b"\x93\x01\xa1x" + deep, [])


def test_what_cannot_cross_is_refused_with_advice() -> None:
    pair = Pair()
    with pytest.raises(WorkerError, match="object cannot cross"):
        pair.call("echo", object())
    with pytest.raises(WorkerError, match="Payload"):
        pair.call("echo", bytes(MAX_FRAME))
    with pytest.raises(WorkerError, match="the driver passes on no arrays"):
        pair.call("echo", Payload({"a": b""}))
    with pytest.raises(TypeError, match=r"object cannot cross.*Payload"):
        pair.worker.reply(1, object())
    with pytest.raises(ProtocolError, match="Payload"):
        pair.worker.reply(1, bytes(MAX_FRAME))


def test_a_reply_that_fails_to_encode_gives_its_memory_back() -> None:
    pair = Pair()
    for _ in range(5):
        with pytest.raises(TypeError):
            pair.worker.reply(1, [Payload({"a": bytes(100)}), object()])
    assert pair.worker.store.num_segments == 1


def test_references_without_memory_and_unknown_extensions_are_protocol_errors() -> None:
    sender, receiver = Pair(), Pair()
    sender.answer("make", Payload({"a": b"abc"}))
    body, fds = sender.worker.reply(2, Payload({"a": b"abc"}))
    receiver.driver.open(body, fds)  # knows segment 2, as it should
    body, fds = sender.worker.reply(3, Payload({"a": b"abc"}))
    message = msgspec.msgpack.decode(body)
    message[3] = []
    with pytest.raises(ProtocolError, match="of which no descriptor came"):
        receiver.driver.result("make", receiver.driver.open(msgspec.msgpack.encode(message), []))
    with pytest.raises(ProtocolError, match="1 descriptors came with a reply that names 0"):
        receiver.driver.open(msgspec.msgpack.encode(message), fds)
    strange = msgspec.msgpack.encode([1, True, msgspec.msgpack.Ext(9, b"x"), []])
    with pytest.raises(ProtocolError, match="extension 9"):
        receiver.driver.result("make", receiver.driver.open(strange, []))


def test_errors_keep_their_class_fields_and_traceback() -> None:
    pair = Pair()
    body = pair.worker.failure(1, RewardError("no reward"))
    error = pair.driver.error(pair.driver.open(body, []), "score step 1")
    assert type(error) is RewardError
    assert str(error) == "worker 'w', score step 1: no reward"
    assert "RewardError: no reward" in error.__notes__[0]

    error = pair.driver.error(pair.driver.open(pair.worker.failure(1, MissingExtra("peft", "diffusion")), []), "start")
    assert isinstance(error, MissingExtra)
    assert (error.module, error.extra) == ("peft", "diffusion")

    error = pair.driver.error(pair.driver.open(pair.worker.failure(1, ZeroDivisionError("1/0")), []), "generate")
    assert isinstance(error, WorkerRaised)
    assert (error.worker, error.task, str(error)) == ("w", "generate", "worker 'w', generate: ZeroDivisionError: 1/0")


def test_a_class_that_only_looks_like_one_of_ours_is_not_constructed() -> None:
    pair = Pair()
    for name in ("_signal", "annotations", "_signal_name", "Exception", "DigenError.__init__"):
        failure = {"type": name, "message": "m", "traceback": "t"}
        body = msgspec.msgpack.encode([1, False, failure])
        assert type(pair.driver.error(pair.driver.open(body, []), "x")) is WorkerRaised
