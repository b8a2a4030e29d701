"""The ranks of one worker: processes that do the same commands together, each on its own share.

The driver starts every rank with the same arguments, apart from ``ranks``, a :class:`RankSpec` as plain data, and sends
every command to all of them in the same order. Rank 0 gives the answer: what the others have found is brought to it
here. No Python object travels between ranks, only tensors and JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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

    What they tell each other travels in a process group of its own, so that it never meets a collective of a sharded
    model.

    Args:
        spec: a :class:`RankSpec` as plain data.
        device: of the model: with ``cuda`` its tensors travel by NCCL, those on the host always by gloo.

    Raises:
        RankFailed: the others were not met in time. So does every method that waits for them.
    """

    def __init__(self, spec: Mapping[str, Any] | None = None, device: str = "cpu") -> None:
        made = msgspec.convert(spec or {}, RankSpec)
        self.rank, self.num_ranks = made.rank, made.num_ranks
        self.timeout_s = made.timeout_s
        """Longest time that a rank waits for another."""
        if self.num_ranks == 1:
            return
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        timeout = timedelta(seconds=made.timeout_s)
        try:
            dist.init_process_group(
                backend, init_method=made.rendezvous, rank=made.rank, world_size=made.num_ranks, timeout=timeout
            )
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:  # torch's own errors are of these
            raise RankFailed(f"rank {self.rank} of {self.num_ranks} did not meet the others: {error}") from error

    def share(self, count: int) -> range:
        """Which of ``count`` units are this rank's: consecutive ones; earlier ranks have at most one more."""
        each, more = divmod(count, self.num_ranks)
        start = self.rank * each + min(self.rank, more)
        return range(start, start + each + (self.rank < more))

    def rows(self, count: int, unit: int) -> tuple[list[int], int]:
        """Which of ``count`` rows this rank draws, ``unit`` in a forward, and how many of them, the first, count.

        Ranks share whole forwards, so that a row's bits do not depend on the number of ranks. All have equally many,
        because a sharded model needs every rank in each: a rank with fewer repeats a row, which does not count.
        """
        num_forwards = -(-count // unit)
        mine = self.share(num_forwards)
        rows = list(range(count)[mine.start * unit : mine.stop * unit])
        num_missing = -(-num_forwards // self.num_ranks) - len(mine)
        return rows + (rows or [0])[-1:] * (num_missing * unit), len(rows)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that counts only if it succeeds on every rank.

        A collective may be inside if :meth:`agree` comes before it on every rank, equally often: then a rank that has
        failed is not waited for.

        Raises:
            RankFailed: this rank's work went well, another's did not, and that one raises what happened.
        """
        try:
            yield
        except RankFailed:  # every rank knows
            raise
        except Exception:
            with suppress(RankFailed):  # what happened here says more
                self._all_well(well=False)
            raise
        self.agree()

    def agree(self) -> None:
        """Go on only if all ranks do.

        Raises:
            RankFailed: work of another one that was to be done :meth:`together` has failed.
        """
        if not self._all_well(well=True):
            raise RankFailed(f"rank {self.rank} of {self.num_ranks} gave up, because another rank failed")

    def gather(self, rows: Tensor) -> Tensor | None:
        """Every rank's rows on rank 0, in the order of the ranks, on the host; ``None`` on the others.

        Ranks may have different numbers of rows, all but rank 0 also none, but the same shape and dtype beyond the
        first dimension.
        """
        if self.num_ranks == 1:
            return rows
        counts = self._each(len(rows))
        if self.rank:
            if len(rows):
                with self._peers():
                    dist.send(rows.detach().cpu().contiguous(), 0, group=self._group)
            return None
        whole = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype)
        whole[: counts[0]] = rows
        for rank, part in enumerate(torch.split(whole, counts)):
            if rank and counts[rank]:
                with self._peers():
                    dist.recv(part, rank, group=self._group)
        return whole

    def everywhere(self, rows: Tensor) -> Tensor:
        """Every rank's rows on every rank, in the order of the ranks, on the host; as :meth:`gather`, one dimension."""
        if self.num_ranks == 1:
            return rows
        counts = self._each(len(rows))
        padded = torch.zeros(max(counts), dtype=rows.dtype)
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in counts]
        with self._peers():
            dist.all_gather(found, padded, group=self._group)
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    def gather_plain(self, value: Any, kind: Any = Any) -> list[Any] | None:
        """Every rank's ``value``, plain data of type ``kind``, on rank 0 in the order of the ranks; else ``None``."""
        if self.num_ranks == 1:
            return [value]
        text = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        lengths = self._each(len(text))
        found = self.gather(text)
        if found is None:
            return None
        return [msgspec.json.decode(part.numpy().tobytes(), type=kind) for part in torch.split(found, lengths)]

    def tell(self, value: Any) -> Any:
        """Rank 0's ``value``, plain data, on every rank."""
        if self.num_ranks == 1:
            return value
        text = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        length = self._each(len(text))[0]
        if self.rank:
            text = torch.empty(length, dtype=torch.uint8)
        with self._peers():
            dist.broadcast(text, 0, group=self._group)
        return msgspec.json.decode(text.numpy().tobytes())

    def largest(self, value: float) -> float:
        """The largest of every rank's ``value``."""
        return float(max(self._each(value, torch.float64)))

    def _all_well(self, *, well: bool) -> bool:
        return self.num_ranks == 1 or all(self._each(int(well)))

    def _each(self, value: float, dtype: torch.dtype = torch.int64) -> list[Any]:
        if self.num_ranks == 1:
            return [value]
        found = [torch.zeros(1, dtype=dtype) for _ in range(self.num_ranks)]
        with self._peers():
            dist.all_gather(found, torch.tensor([value], dtype=dtype), group=self._group)
        return [tensor.item() for tensor in found]

    @contextmanager
    def _peers(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's, whether the peer has ended or is late
            raise RankFailed(
                f"rank {self.rank} of {self.num_ranks} has lost another rank, which has ended or did not answer within "
                f"{self.timeout_s} s; see the ranks' logs: {error}"
            ) from error
