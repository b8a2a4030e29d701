"""The generators' end of every channel: pieces into parameters, in place, each checked where it has arrived."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from digen.diffusion.channels.base import Deadline, Source, closing
from digen.diffusion.channels.broadcast import BroadcastSource
from digen.diffusion.channels.files import FileSource
from digen.diffusion.channels.layout import Bytes, Part, as_bytes, checksum
from digen.diffusion.channels.memory import MemorySource
from digen.errors import ConfigError, ProtocolError
from digen.resources import WeightsSection
from digen.types import LoadReport, Publication


class Receiver:
    """Loads what any :class:`digen.diffusion.channels.base.Sender` has published. Every rank of a generator has one.

    Args:
        section: ``workers.weights``.
    """

    def __init__(self, section: WeightsSection) -> None:
        self._section = section
        self._held: tuple[bytes, list[int]] | None = None  # layout and sums of what the parameters hold

    @torch.no_grad()
    def load(self, published: Publication, parameters: Mapping[str, Tensor]) -> LoadReport:
        """Copy a publication into the parameters, in place, and report what they hold *afterwards*.

        Waits for what is still being written. Of a sharded parameter this rank's rows are copied, and the pieces that
        they are part of are checked as a whole.

        Raises:
            ConfigError: names, shapes or dtypes do not match the parameters one to one; nothing was copied then.
            WorkerTimeout: it was not complete in time.
            ProtocolError: it is damaged. Then, and after a time-out, the parameters hold no version at all.
        """
        with closing(self._open(published)) as source:
            layout = source.layout
            layout.check_fit(published.version, parameters)
            held = self._held[1] if self._held and self._held[0] == layout.encoded else None
            self._held = None
            sums, num_copied = [0] * len(layout.pieces), 0
            for tensor, spec in enumerate(layout.tensors):
                target = _Target(published.version, spec.name, Part(spec.name, parameters[spec.name]))
                for index in layout.by_tensor[tensor]:
                    piece = layout.pieces[index]
                    sums[index] = source.sum(index)
                    if target.overlaps(piece.start, piece.stop) and not (held and held[index] == sums[index]):
                        target.take(piece.start, source.data(index), sums[index])
                num_copied += target.complete()
            if self._section.skip_unchanged:
                self._held = layout.encoded, sums
            return LoadReport(published.version, layout.combine(sums), len(layout.tensors), num_copied)

    def _open(self, published: Publication) -> Source:
        deadline = Deadline(published.version, self._section.timeout_s)
        scheme = published.url.partition(":")[0]
        match scheme:
            case "":
                return MemorySource(published, deadline)
            case "file":
                return FileSource(published, deadline)
            case "tcp":
                return BroadcastSource(published, deadline)
        raise ConfigError(f"weights of version {published.version} are at {published.url}, which no channel reads")


class _Target:
    """A parameter, or this rank's part of it, that pieces are copied to."""

    def __init__(self, version: int, name: str, part: Part) -> None:
        self._what = f"weights of version {version}: {name}"
        self._part = part
        self._flat = part.tensor.reshape(-1)  # of its own where the parameter is not contiguous
        self._expected: list[tuple[int, int, int]] = []

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any of these elements is here."""
        return max(start, self._part.start) < min(stop, self._part.stop)

    def take(self, start: int, data: Bytes, wanted: int) -> None:
        """Copy what belongs here of a piece that begins at element ``start`` and has the checksum ``wanted``."""
        itemsize = self._flat.element_size()
        stop = start + len(data) // itemsize
        first, last = max(start, self._part.start), min(stop, self._part.stop)
        if (first, last) != (start, stop):
            if checksum(data) != wanted:
                raise self._damaged(start, stop)
            data = data[(first - start) * itemsize : (last - start) * itemsize]
            wanted = checksum(data)
        into = self._flat[first - self._part.start : last - self._part.start]
        if into.device.type == "cpu":
            np.copyto(as_bytes(into), data)
        else:
            into.copy_(torch.from_numpy(data.copy()).view(into.dtype))  # torch takes no read-only memory
        self._expected.append((first, last, wanted))

    def complete(self) -> bool:
        """Check what is here now; false if nothing was copied."""
        if self._expected and not self._part.tensor.is_contiguous():
            self._part.tensor.copy_(self._flat.view(self._part.tensor.shape))
            self._flat = self._part.tensor.reshape(-1)
        for first, last, wanted in self._expected:
            here = self._flat[first - self._part.start : last - self._part.start].cpu()
            if checksum(as_bytes(here)) != wanted:
                raise self._damaged(first, last)
        return bool(self._expected)

    def _damaged(self, start: int, stop: int) -> ProtocolError:
        return ProtocolError(f"{self._what}: elements {start} to {stop - 1} fail their checksum, they were damaged")
