"""A checkpoint's files, written by a thread while the training goes on.

What is written was copied to the host before (:func:`digen.diffusion.state.draft`), so a commit meanwhile does not
tear it. The thread makes no collective call, because those of the training may run at the same time: ranks agree in
:meth:`Saving.poll`, which all of them call between two of their commands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from digen.checkpoint import cannot_write
from digen.diffusion.ranks import Ranks
from digen.diffusion.state import draft, hash_file, write_json


class Saving:
    """Files on their way to disk. All ranks make one, and the same calls of it.

    Args:
        folder: made if it is missing; with several ranks one that all of them see.
        files: tensors by file name; whole ones, the same on all ``ranks``, or sharded ones.
        objects: the JSON files, by name.
        ranks: who writes.
        copies: copy the tensors first, since they will change while they are written; here are the copies of the last
            time, by file name, which are overwritten. ``None``: do not.

    Raises:
        CheckpointError: a file cannot be made.
        RankFailed: on every rank but the one where that happened.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Mapping[str, Tensor]],
        objects: Mapping[str, Mapping[str, Any]],
        ranks: Ranks,
        copies: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        self._folder = folder
        self._objects = objects
        self._ranks = ranks
        self._drafts = {
            name: draft(folder / name, tensors, ranks, None if copies is None else copies.setdefault(name, {}))
            for name, tensors in files.items()
        }
        self._num_bytes = sum(each.num_bytes for each in self._drafts.values())
        self._names = tuple(self._drafts)
        self._error: BaseException | None = None
        self._hashes: dict[str, str] | None = None
        with ranks.together():
            if ranks.rank == 0:
                self._try(self._create)
            self._check()
        self._thread = self._start(self._write)

    def poll(self) -> dict[str, str] | None:
        """SHA-256 by file name once everything is on disk, on rank 0, and nothing on the others; ``None`` before.

        Raises:
            CheckpointError: a file cannot be written.
            RankFailed: on every rank but the one where that happened.
        """
        if self._ranks.largest(float(self._thread.is_alive())):
            return None
        with self._ranks.together():
            self._check()
        if self._drafts:  # every rank has written its own part: the files are whole
            self._drafts.clear()
            self._thread = self._start(self._hash)
            return None
        return self._hashes

    def finish(self) -> dict[str, str]:
        """Wait until :meth:`poll` has an answer."""
        while (hashes := self.poll()) is None:
            self._thread.join()
        return hashes

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._try, args=(work,), name="checkpoint", daemon=True)
        thread.start()
        return thread

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._error = cannot_write(self._folder, error, self._num_bytes)
        except BaseException as error:  # whoever polls raises it
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _create(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for each in self._drafts.values():
            each.create()

    def _write(self) -> None:
        for each in self._drafts.values():
            each.write()

    def _hash(self) -> None:
        if self._ranks.rank:
            self._hashes = {}
            return
        written = {name: write_json(self._folder / name, values) for name, values in self._objects.items()}
        self._hashes = {name: hash_file(self._folder / name) for name in self._names} | written
