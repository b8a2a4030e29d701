"""Micro-batches that were given up, kept beside the run in ``quarantine.jsonl``: an event a line.

A line has all that it takes to look into it: prompts, what the seeds derive from, the error, and what happened to it.
Where groups may be dropped, a resumed run leaves these micro-batches out from the start, at the price of no worker.
Delete a line, or the file, to have them tried again.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from digen.events import AnyEvent, Quarantined, remove_cut_line
from digen.files import damaged, refuse_special, unwritable


class Quarantine:
    """A sink that appends every :class:`digen.events.Quarantined` to a file, written through to the device.

    There is no file before there is something to write.

    Args:
        path: the file.

    Raises:
        ConfigError: it is no file, or holds a line that is no such event.
        OutputError: it cannot be written. The run ends then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found = self._read()
        """What the file held at first: what earlier runs in the folder gave up."""
        self._known = {(event.step, event.index) for event in self.found}

    def __call__(self, event: AnyEvent) -> None:
        """Append what is given up for the first time; what goes with it is left out again by itself."""
        if not isinstance(event, Quarantined) or not event.attempts or (event.step, event.index) in self._known:
            return
        self._known.add((event.step, event.index))
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(event) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self._path, error) from error

    def _read(self) -> tuple[Quarantined, ...]:
        refuse_special(self._path)
        if not self._path.is_file():
            return ()
        try:
            remove_cut_line(self._path)
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            raise unwritable(self._path, error) from error
        found = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(_decoded(line))
            except (msgspec.DecodeError, RecursionError) as error:
                raise damaged(self._path, number, error) from None
        return tuple(found)


def _decoded(line: bytes) -> Quarantined:
    event = msgspec.json.decode(line, type=Quarantined)
    held = event.micro_batch
    if (event.step, event.index) != (held.step, held.index):
        raise msgspec.DecodeError(
            f"it names micro-batch {event.index} of step {event.step}, but holds micro-batch {held.index} of step "
            f"{held.step}"
        )
    return event
