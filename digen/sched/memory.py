"""What rollouts take in memory, and whether there is room for more."""

from __future__ import annotations


class Memory:
    """Bytes of the rollouts that exist: from their generation to the commit of their step.

    The current step's rollouts are all needed before any is let go of, so those are always generated. Those of later
    steps are, as long as all that exist and all that are being generated fit into the limit: a generation is expected
    to take what the largest so far took. The limit is passed by no more than what those in flight take beyond that.

    Args:
        limit: bytes; ``None`` is no limit.
    """

    __slots__ = ("_largest", "held", "limit", "most")

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.held = 0
        """Bytes now."""
        self.most = 0
        """The most at a time since :meth:`close_step`."""
        self._largest: int | None = None

    def has_room(self, num_generating: int) -> bool:
        """Whether one more rollout fits beside those that are being generated. Nobody knows before there was one."""
        if self.limit is None:
            return True
        return self._largest is not None and self.held + (num_generating + 1) * self._largest <= self.limit

    def take(self, nbytes: int) -> None:
        """A rollout exists."""
        self.held += nbytes
        self.most = max(self.most, self.held)
        self._largest = max(self._largest or 0, nbytes)

    def let_go(self, nbytes: int) -> None:
        """Rollouts are no longer needed."""
        self.held -= nbytes

    def close_step(self) -> int:
        """The most bytes at a time since the last call."""
        most, self.most = self.most, self.held
        return most
