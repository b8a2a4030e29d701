"""The ranks of one worker: processes that do the same commands together, each on its own share.

The driver starts every rank with the same arguments, apart from ``ranks``, a :class:`RankSpec` as plain data, and sends
every command to all of them in the same order. Rank 0 gives the answer: what the others have found is brought to it
here. No Python object travels between ranks, only tensors and JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from digen.errors import RankFailed


class RankSpec(Struct, frozen=True):
    """Which rank a process is, and where it meets the others."""

    rank: int = 0
    num_ranks: int = 1
    rendezvous: str = ""
    """What ``torch.distributed.init_process_group`` takes as ``init_method``: ``file:///...`` or ``tcp://host:port``."""
    timeout_s: float = 120.0
    """Longest time that a rank waits for another."""


class Ranks:
    """The ranks of this process's worker; alone by default.

    Args:
        spec: a :class:`RankSpec` as plain data.
        device: of the model: with ``cuda`` its tensors travel by NCCL, those on the host always by gloo.

    Raises:
        RankFailed: the others were not met in time.
    """

    def __init__(self, spec: Mapping[str, Any] | None = None, device: str = "cpu") -> None:
        made = msgspec.convert(spec or {}, RankSpec)
        self.rank, self.num_ranks = made.rank, made.num_ranks
        if self.num_ranks == 1:
            return
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        try:
            dist.init_process_group(
                backend,
                init_method=made.rendezvous,
                rank=made.rank,
                world_size=made.num_ranks,
                timeout=timedelta(seconds=made.timeout_s),
            )
        except (RuntimeError, ValueError) as error:  # torch's own errors are of these
            raise RankFailed(f"rank {self.rank} of {self.num_ranks} did not meet the others: {error}") from error

    def share(self, count: int) -> range:
        """Which of ``count`` units are this rank's: consecutive ones; earlier ranks have at most one more."""
        each, more = divmod(count, self.num_ranks)
        start = self.rank * each + min(self.rank, more)
        return range(start, start + each + (self.rank < more))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work of this rank alone, which counts only if every rank's succeeds. No collective may be inside.

        Raises:
            RankFailed: this rank's work went well, another's did not, and that one raises what happened.
        """
        try:
            yield
        except Exception:
            self._all_well(well=False)
            raise
        if not self._all_well(well=True):
            raise RankFailed(f"rank {self.rank} had to give up, because another rank failed")

    def gather(self, rows: Tensor) -> Tensor | None:
        """Every rank's rows on rank 0, in the order of the ranks, on the host; ``None`` on the others.

        Ranks may have different numbers of rows, also none, but the same shape and dtype beyond the first dimension.
        """
        if self.num_ranks == 1:
            return rows
        counts = self._each(len(rows))
        if self.rank:
            if len(rows):
                dist.send(rows.contiguous().cpu(), 0)
            return None
        parts = [rows.cpu()]
        for rank in range(1, self.num_ranks):
            if counts[rank]:
                part = torch.empty((counts[rank], *rows.shape[1:]), dtype=rows.dtype)
                dist.recv(part, rank)
                parts.append(part)
        return torch.cat(parts)

    def gather_plain(self, value: Any) -> list[Any] | None:
        """Every rank's ``value``, plain data, on rank 0 in the order of the ranks; ``None`` on the others."""
        if self.num_ranks == 1:
            return [value]
        text = torch.frombuffer(bytearray(msgspec.json.encode(value) or b" "), dtype=torch.uint8)
        lengths = self._each(len(text))
        found = self.gather(text)
        if found is None:
            return None
        parts = torch.split(found, lengths)
        return [msgspec.json.decode(part.numpy().tobytes()) for part in parts]

    def largest(self, value: float) -> float:
        """The largest of every rank's ``value``."""
        return float(max(self._each(value, torch.float64)))

    def _all_well(self, *, well: bool) -> bool:
        return self.num_ranks == 1 or all(self._each(int(well)))

    def _each(self, value: float, dtype: torch.dtype = torch.int64) -> list[Any]:
        found = [torch.zeros(1, dtype=dtype) for _ in range(self.num_ranks)]
        dist.all_gather(found, torch.tensor([value], dtype=dtype))
        return [tensor.item() for tensor in found]
