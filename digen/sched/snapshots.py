"""The trainer's state in memory: when it is copied, and which copy is kept.

A snapshot is taken after a commit, once the publication is out, and takes the place of the one before, whose memory the
trainer then writes again. When the trainer is lost, another one goes on from the newest, or from a checkpoint that is
newer than that. So a run goes back behind its snapshot only if that cannot be recalled; then it is dropped, and nothing
of a future that was given up is ever recalled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digen.restarts import RestartsSection
    from digen.types import Payload, Snapshot


class Snapshots:
    """Keeps the newest snapshot of the trainer.

    Args:
        trainer: its handle, started. One that has no ``snapshot``, ``recall`` and ``restart`` has no snapshots.
        rules: the config's numbers.
        release: gives a payload of the trainer back to it.
    """

    def __init__(self, trainer: Any, rules: RestartsSection, release: Callable[[Payload], None]) -> None:
        able = all(hasattr(trainer, method) for method in ("snapshot", "recall", "restart"))
        self._every = rules.snapshot_every if able and rules.budget else 0
        self._release = release
        self.newest: Snapshot | None = None
        """The one that is kept."""
        self._num_deaths = 0

    def due(self, version: int) -> bool:
        """Whether the state of ``version`` shall be copied."""
        if not self._every or version % self._every:
            return False
        return self.newest is None or self.newest.version != version

    def keep(self, snapshot: Snapshot) -> None:
        """Take in a snapshot in place of the one before."""
        self.drop()
        self.newest = snapshot
        self._num_deaths = 0

    def is_blamed(self) -> bool:
        """A trainer died as it recalled the newest: whether one did so before."""
        self._num_deaths += 1
        return self._num_deaths > 1

    def drop(self) -> None:
        """Let go of what is kept."""
        snapshot, self.newest = self.newest, None
        if snapshot is not None:
            for payload in snapshot.payloads:
                self._release(payload)
