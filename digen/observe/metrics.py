"""The metrics of every step, one JSON object a line, for whatever plots them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from digen.events import AnyEvent, RolledBack, RunStarted, StepCommitted, remove_cut_line
from digen.files import damaged, refuse_special, unwritable


class _Row(msgspec.Struct):
    """What must be in a line."""

    step: int


class MetricsLog:
    """A sink that appends one object per committed step to ``metrics.jsonl``: step, version, time and all values.

    The file can be followed while the run goes on. A last line that a crash cut short is removed first, so that a
    resumed run leaves a file of whole lines. Use as a context manager or call :meth:`close`.

    Raises:
        ConfigError: the file holds a line that is no such object.
        OutputError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        refuse_special(path)
        try:
            if path.is_file():
                remove_cut_line(path)
                self._lengths()
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from error
        self._encode = msgspec.json.Encoder(order="deterministic").encode

    def __call__(self, event: AnyEvent) -> None:
        """Write a committed step. A run that resumes or rolls back takes back the steps that it will train again."""
        if isinstance(event, RunStarted) and event.start_step < event.num_steps:
            self._keep_before(event.start_step)
        if isinstance(event, RolledBack):
            self._keep_before(event.version)
        if isinstance(event, StepCommitted):
            head = {"step": event.step, "version": event.version, "time": event.time}
            try:
                self._file.write(self._encode(head | event.values) + b"\n")
            except OSError as error:
                raise unwritable(self._path, error) from error

    def _keep_before(self, step: int) -> None:
        try:
            self._file.truncate(sum(length for at, length in self._lengths() if at < step))
        except OSError as error:
            raise unwritable(self._path, error) from error

    def _lengths(self) -> list[tuple[int, int]]:
        """Step and bytes of every line."""
        decode, found = msgspec.json.Decoder(_Row).decode, []
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    found.append((decode(line).step, len(line)))
                except (msgspec.DecodeError, RecursionError) as error:
                    raise damaged(self._path, number, error) from None
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
