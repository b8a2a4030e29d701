"""Weights by a broadcast of torch.distributed (gloo) from the trainer's rank 0 to every rank of every generator.

It needs ``schedule.sync=hold``: all generators come for a version at the same time. The trainer's rank 0 listens on a
free port of the loopback interface, which travels in the publication; for each version those who come form a process
group of their own, beside whatever groups their process has. A thread sends once all have come.

A sharded trainer's weights are gathered first. Nobody can come later: a generator that is restarted would wait for
others who have the version already, and is told so.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from digen.diffusion.channels.base import Deadline, Outbox, device_of, on_host, whole_pieces
from digen.diffusion.channels.layout import Bytes, Layout, checksum
from digen.diffusion.ranks import Ranks
from digen.errors import ProtocolError, WorkerTimeout
from digen.handles import Memory
from digen.types import Payload, Publication

_HOST = "127.0.0.1"
_c10d: Any = dist  # torch leaves its stores and groups half annotated


class BroadcastSender(Outbox):
    """Publishes by broadcast.

    Args:
        ranks: of the trainer.
        dtypes: of the generators' parameters.
        timeout_s: longest time until all have come, and of every transfer.
        num_receivers: ranks of all generators together.
    """

    def __init__(
        self, ranks: Ranks, dtypes: Mapping[str, torch.dtype], timeout_s: float, *, num_receivers: int
    ) -> None:
        super().__init__(ranks, dtypes, timeout_s)
        self._num_receivers = num_receivers
        self._store: Any = None

    def lend_memory(self, memory: Memory) -> None:
        """As :meth:`digen.diffusion.channels.base.Sender.lend_memory`: not needed."""

    def publish(self, version: int, parameters: Mapping[str, Tensor]) -> Publication:
        """As :meth:`digen.diffusion.channels.base.Sender.publish`.

        Raises:
            ConfigError: a dtype or placement cannot be published.
        """
        self.settle()
        layout = self._plan(parameters, whole=True)
        pieces: Iterable[tuple[int, Tensor]] = whole_pieces(parameters)
        if self._ranks.num_ranks > 1:  # the thread must not meet the other ranks, who go on
            with torch.no_grad():
                pieces = [(index, values.cpu()) for index, values in pieces if self._ranks.rank == 0]
        url = ""
        if self._ranks.rank == 0:
            if self._store is None:
                self._store = _listen(self._timeout_s)
            stamp = f"{version}.{secrets.token_hex(8)}"
            self._store.set(f"{stamp}/size", str(1 + self._num_receivers))
            url = f"tcp://{_HOST}:{self._store.port}#{stamp}"
            self._start(
                version, partial(self._send, self._store, version, stamp, layout, pieces), device_of(parameters)
            )
        return Publication(version, Payload({}), None, len(layout.tensors), layout.nbytes, url)

    def _send(self, store: Any, version: int, stamp: str, layout: Layout, pieces: Iterable[tuple[int, Tensor]]) -> None:
        with _peers(version, self._timeout_s, f"not all {self._num_receivers} ranks of the generators came for them"):
            store.wait([f"{stamp}/all"], timedelta(seconds=self._timeout_s))
            group = _Group(store, stamp, 0, 1 + self._num_receivers, self._timeout_s)
        with _peers(version, self._timeout_s, "a generator did not take them"):
            group.share(np.array([len(layout.encoded)], np.int64).view(np.uint8))
            group.share(np.frombuffer(bytearray(layout.encoded), np.uint8))
            for index, values in pieces:
                data = on_host(values, layout.spec(index).dtype)
                group.share(data)
                group.share(np.array([checksum(data)], np.uint64).view(np.uint8))


class BroadcastSource:
    """Takes part in a broadcast of :class:`BroadcastSender`. A piece arrives when its checksum is asked for.

    Raises:
        WorkerTimeout: the sender, or another generator, did not come in time.
        ProtocolError: the version was sent already.
    """

    def __init__(self, published: Publication, deadline: Deadline) -> None:
        url = urlsplit(published.url)
        stamp, self._version, self._timeout_s = url.fragment, published.version, deadline.timeout_s
        with _peers(self._version, self._timeout_s, "not everybody came"):
            store = _c10d.TCPStore(
                str(url.hostname),
                int(url.port or 0),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._timeout_s),
            )
            size, number = int(store.get(f"{stamp}/size")), int(store.add(f"{stamp}/joined", 1))
            if number >= size:
                raise ProtocolError(
                    f"weights of version {self._version} were sent to all {size - 1} ranks of the generators already; "
                    "where generators are restarted, set workers.weights.channel to memory or files"
                )
            if number == size - 1:
                store.set(f"{stamp}/all", "")
            self._group = _Group(store, stamp, number, size, self._timeout_s)
            length = int(self._receive(8).view(np.int64)[0])
            self.layout = Layout.read(self._receive(length).tobytes())
        self._data = self._receive(0)

    def sum(self, index: int) -> int:
        """As :meth:`digen.diffusion.channels.base.Source.sum`.

        Raises:
            WorkerTimeout: it did not arrive in time.
        """
        window = self.layout.window(index)
        with _peers(self._version, self._timeout_s, "they did not arrive"):
            self._data = self._receive(window.stop - window.start)
            return int(self._receive(8).view(np.uint64)[0])

    def data(self, index: int) -> Bytes:
        """As :meth:`digen.diffusion.channels.base.Source.data`."""
        return self._data

    def close(self) -> None:
        """As :meth:`digen.diffusion.channels.base.Source.close`."""

    def _receive(self, nbytes: int) -> Bytes:
        into = np.empty(nbytes, np.uint8)
        if nbytes:
            self._group.share(into)
        return into


class _Group:
    """Who takes part in the broadcast of one version; rank 0 sends."""

    def __init__(self, store: Any, stamp: str, rank: int, size: int, timeout_s: float) -> None:
        gloo = _c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group = gloo(_c10d.PrefixStore(stamp, store), rank, size, options)
        self._options = _c10d.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0

    def share(self, data: Bytes) -> None:
        """Send, or receive in place."""
        self._group.broadcast([torch.from_numpy(data)], self._options).wait()


@contextmanager
def _peers(version: int, timeout_s: float, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own errors are of this
        raise WorkerTimeout(
            f"weights of version {version}: {what} within {timeout_s} s, or somebody ended; see the other workers' "
            f"logs, or raise workers.weights.timeout_s: {error}"
        ) from error


def _listen(timeout_s: float) -> Any:
    """A store on a free port that only this machine reaches."""
    with socket.socket() as sock:
        sock.bind((_HOST, 0))
        sock.listen()
        port = sock.getsockname()[1]
        return _c10d.TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=sock.detach(),
        )
