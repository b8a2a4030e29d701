"""What to say when a file of a run cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path

from digen.errors import OutputError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def unwritable(path: Path, error: OSError) -> OutputError:
    """The error to raise in place of ``error``: it names the file and the mend."""
    return OutputError(f"{path} cannot be written: {reason(error)}")


def reason(error: OSError) -> str:
    """Why something cannot be written, and what to do about it."""
    mend = "free space there" if error.errno in _FULL else "check the disk, and who may write there"
    return f"{error.strerror or error}; {mend}"
