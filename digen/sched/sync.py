"""Weight sync: which publication is current, who reads which, and when a buffer may be reused (line 29).

The trainer publishes after a commit; a generator loads only between trajectories, so that no trajectory mixes
weights. A publication's buffer goes back to the trainer once it is superseded *and* its last reader is done: a slow
loader never reads a buffer that is being rewritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from digen.errors import ProtocolError
from digen.types import LoadReport, Payload, Publication


class WeightSync:
    """Publications of one trainer.

    Args:
        release: called with the payload of a publication that nobody will read again.
    """

    def __init__(self, release: Callable[[Payload], None]) -> None:
        self._release = release
        self._readers: Counter[int] = Counter()
        self._superseded: dict[int, Publication] = {}
        self._checksums: dict[int, int] = {}  # of versions published without one: what their first load reported
        self.current: Publication | None = None
        """The newest publication."""
        self.loaded: Publication | None = None
        """The newest one that somebody has loaded, which is complete therefore."""

    def published(self, publication: Publication) -> None:
        """A newer publication replaces the current one."""
        if self.current is not None:
            self._superseded[self.current.version] = self.current
        self.current = publication
        self._checksums.pop(publication.version, None)  # of the same version, published before a roll-back
        self._free()

    def load_began(self, publication: Publication) -> None:
        """A worker reads ``publication`` from now on."""
        self._readers[publication.version] += 1

    def load_ended(self, publication: Publication, report: LoadReport, worker: str = "") -> None:
        """``worker`` has loaded ``publication``.

        Raises:
            ProtocolError: what it reports to hold is not what was published, or not what another load of it reported;
                :meth:`load_failed` is still due.
        """
        checksum = publication.checksum
        if checksum is None:
            checksum = self._checksums.setdefault(publication.version, report.checksum)
        wanted = (publication.version, checksum, publication.num_tensors)
        got = (report.version, report.checksum, report.num_tensors)
        if got != wanted:
            raise ProtocolError(
                f"after loading version {wanted[0]} (checksum {wanted[1]:x}, {wanted[2]} tensors) the worker holds "
                f"version {got[0]} (checksum {got[1]:x}, {got[2]} tensors); its next samples would be of other weights",
                worker=worker,
                task="load",
            )
        self.loaded = publication
        self.load_failed(publication)

    def load_failed(self, publication: Publication) -> None:
        """A worker reads ``publication`` no more, whatever it holds now."""
        self._readers[publication.version] -= 1
        self._free()

    def let_go(self) -> None:
        """Nobody reads any publication again, whatever becomes of the loads that run."""
        for publication in (*self._superseded.values(), *((self.current,) if self.current is not None else ())):
            self._release(publication.payload)
        self._superseded.clear()
        self.current = None

    def _free(self) -> None:
        for version in [version for version in self._superseded if not self._readers[version]]:
            del self._readers[version]
            self._checksums.pop(version, None)
            self._release(self._superseded.pop(version).payload)
