"""What the channels have in common: a sender in the trainer, sources in the generators, work behind the trainer's back.

A publication is handed out at once and written meanwhile by a thread of the trainer, which goes on training: weights
change only when the optimizer steps, and before that the trainer calls :meth:`Sender.settle`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from digen.diffusion.channels.layout import DTYPES, Bytes, Layout, Part, as_bytes, checksum, plan
from digen.diffusion.ranks import Ranks
from digen.errors import InvariantViolation, WorkerTimeout
from digen.handles import Memory
from digen.types import Publication

_FIRST_WAIT_S, _LONGEST_WAIT_S = 100e-6, 5e-3


class Sender(Protocol):
    """The trainer's end. Every rank of the trainer has one and makes the same calls."""

    def lend_memory(self, memory: Memory) -> None:
        """What shared memory there is; called at most once, before anything is published."""
        ...

    def publish(self, version: int, parameters: Mapping[str, Tensor]) -> Publication:
        """Begin to make ``parameters`` available, which may not change before :meth:`settle`.

        Rank 0's result is the answer.
        """
        ...

    def settle(self) -> None:
        """Return once the parameters of the last publication may change.

        Raises:
            WorkerTimeout: that takes too long.
            Exception: whatever kept them from being published.
        """
        ...


class Source(Protocol):
    """Where a generator finds one publication. Pieces are asked for in their order."""

    @property
    def layout(self) -> Layout:
        """What there is."""
        ...

    def sum(self, index: int) -> int:
        """The checksum that a piece was published with."""
        ...

    def data(self, index: int) -> Bytes:
        """A piece's bytes, complete."""
        ...

    def close(self) -> None:
        """No piece will be looked at any more."""
        ...


class Outbox:
    """What every sender does: it plans, and it works in a thread of its own.

    Args:
        ranks: of the trainer.
        dtypes: of the generators' parameters, by name; what is published is cast to them.
        timeout_s: longest time that a publication may take.
    """

    def __init__(self, ranks: Ranks, dtypes: Mapping[str, torch.dtype], timeout_s: float) -> None:
        self._ranks = ranks
        self._dtypes = dtypes
        self._timeout_s = timeout_s
        self._plans: dict[tuple[object, ...], Layout] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._version = 0

    def settle(self) -> None:
        """As :meth:`Sender.settle`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self._timeout_s)
            if thread.is_alive():
                self._thread = thread
                raise WorkerTimeout(
                    f"the weights of version {self._version} were not written within {self._timeout_s} s; "
                    "raise workers.weights.timeout_s, or see what the memory or folder is busy with"
                )
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _plan(self, parameters: Mapping[str, Tensor], *, whole: bool = False) -> Layout:
        key: tuple[object, ...] = (whole, *((name, tensor.shape) for name, tensor in sorted(parameters.items())))
        if key not in self._plans:
            self._plans[key] = plan(parameters, self._dtypes, self._ranks, whole=whole)
        return self._plans[key]

    def _start(self, version: int, work: Callable[[], None], device: torch.device) -> None:
        """Do ``work``, which reads tensors of ``device``, in a thread."""
        if self._thread is not None:
            raise InvariantViolation("a publication was begun while another is being written")
        self._version = version
        stream = None
        if device.type == "cuda":  # not behind the updates to come
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            stream.wait_stream(torch.cuda.current_stream(device))

        def run() -> None:
            try:
                with torch.no_grad(), torch.cuda.stream(stream):
                    work()
            except BaseException as error:  # settle raises it
                self._error = error

        self._thread = threading.Thread(target=run, name=f"publish-{version}", daemon=True)
        self._thread.start()


class Deadline:
    """A time-out of a load.

    Args:
        version: of the weights.
        timeout_s: from now.
    """

    def __init__(self, version: int, timeout_s: float) -> None:
        self._version = version
        self.timeout_s = timeout_s
        """As given."""
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._end - time.monotonic())

    def wait_for(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Return once it is ready; ``what`` says in a message what has not happened.

        Raises:
            WorkerTimeout: not in time.
        """
        pause = _FIRST_WAIT_S
        while not ready():
            if not self.left_s:
                raise self.expired(what())
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)

    def expired(self, what: str) -> WorkerTimeout:
        """The error."""
        return WorkerTimeout(
            f"weights of version {self._version}: {what} within {self.timeout_s} s; see the trainer's log whether it "
            "still runs, or raise workers.weights.timeout_s"
        )


def parts_of(parameters: Mapping[str, Tensor]) -> list[Part]:
    """What this rank holds, in the order of a :class:`Layout`."""
    return [Part(name, parameter) for name, parameter in sorted(parameters.items())]


def own_pieces(layout: Layout, parts: Sequence[Part], rank: int) -> Iterator[tuple[int, Tensor]]:
    """The pieces that a rank publishes, with their elements, flat, on their own device."""
    for index, piece in enumerate(layout.pieces):
        if piece.rank == rank:
            part = parts[piece.tensor]
            yield index, part.tensor.reshape(-1)[piece.start - part.start : piece.stop - part.start]


def whole_pieces(parameters: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Every tensor in turn, gathered where it is sharded, flat; all ranks must take all of them."""
    index = 0
    for _, parameter in sorted(parameters.items()):
        values = parameter.detach()
        if hasattr(values, "full_tensor"):
            values = values.full_tensor()
        if values.numel():
            yield index, values.reshape(-1)
            index += 1


def device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    """Where the parameters are."""
    return next((parameter.device for parameter in parameters.values()), torch.device("cpu"))


def write(values: Tensor, dtype: str, into: Bytes) -> int:
    """Copy flat elements, cast to ``dtype``, to the host; returns the checksum of what is there then."""
    torch.from_numpy(into).view(DTYPES[dtype]).copy_(values)
    return checksum(into)


def on_host(values: Tensor, dtype: str) -> Bytes:
    """Flat elements, cast to ``dtype``, on the host; in place where they are there already."""
    return as_bytes(values.to("cpu", DTYPES[dtype]).contiguous())


@contextmanager
def closing(source: Source) -> Iterator[Source]:
    """Use a source."""
    try:
        yield source
    finally:
        source.close()
