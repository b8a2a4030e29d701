"""Files of a run: written through to the device, and what to say when they cannot be or are damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from digen.errors import ConfigError, OutputError
from digen.observe.text import escape_text

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def unwritable(path: Path, error: OSError) -> OutputError:
    """The error to raise in place of ``error``: it names the file and the mend."""
    return OutputError(f"{path} cannot be written: {reason(error)}")


def reason(error: OSError) -> str:
    """Why something cannot be written, and what to do about it."""
    mend = "free space there" if error.errno in _FULL else "check the disk, and who may write there"
    return f"{error.strerror or error}; {mend}"


def damaged(path: Path, number: int, error: Exception) -> ConfigError:
    """The error to raise where line ``number`` of a file, counted from 1, is not what it should be."""
    return ConfigError(f"{path} line {number}: {escape_text(str(error))}; delete the line")


def refuse_special(path: Path) -> None:
    """Check that lines can be kept at ``path``, where there may be nothing yet. A device will do.

    Raises:
        ConfigError: it is a folder, a pipe or a socket.
    """
    if path.is_dir() or path.is_fifo() or path.is_socket():
        raise ConfigError(f"{path} is a folder, a pipe or a socket, not a file; move it away")


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and fsync it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folders(folder: Path) -> None:
    """Make a folder and those that it stands in, so that they stay. Those that exist are left as they are."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    if made:
        folder.mkdir(parents=True)
    for each in made:
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that what was made or renamed in it stays."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
