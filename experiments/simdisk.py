"""A disk in memory that forgets what was not synced, for the real :class:`digen.checkpoint.Checkpoints`.

A file's content is safe after its fsync, a name after the fsync of the folder that it stands in. When the power fails,
an unsynced file holds all, some or none of what was written, and of the names in a folder that were made, renamed or
removed since its last fsync the first few have taken effect. Paths look like :class:`pathlib.Path`; inside
:func:`mounted` ``os.fsync`` and ``shutil.rmtree`` know them too.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any
from unittest.mock import patch

from digen import files
from digen.checkpoint import Checkpoints


class _File:
    """A file that many names may have had."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content
        self.synced = content

    def after_power_loss(self, draw: random.Random) -> _File:
        whole = self.content
        if whole == self.synced:
            return _File(whole)
        return _File(draw.choice([self.synced, whole, whole[: len(whole) // 2], bytes(len(whole))]))


class _Folder:
    """Names, and what happened to them since the last fsync."""

    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}
        self.changes: list[dict[str, _File | _Folder | None]] = []

    def change(self, names: dict[str, _File | _Folder | None]) -> None:
        self.changes.append(names)
        _apply(self.entries, names)

    def sync(self) -> None:
        self.synced = dict(self.entries)
        self.changes.clear()

    def after_power_loss(self, draw: random.Random) -> _Folder:
        kept = dict(self.synced)
        for names in self.changes[: draw.randint(0, len(self.changes))]:
            _apply(kept, names)
        image = _Folder()
        image.entries = {name: node.after_power_loss(draw) for name, node in kept.items()}
        image.sync()
        return image


def _apply(entries: dict[str, _File | _Folder], names: dict[str, _File | _Folder | None]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class SimDisk:
    """A disk.

    Args:
        fails: asked before each change that the driver makes, with its number; raises OSError if it cannot be made.
    """

    def __init__(self, fails: Callable[[int], None] | None = None) -> None:
        self.fails = fails
        self._root = _Folder()
        self._num_changes = 0
        self._power_loss: tuple[int, random.Random, Callable[[SimDisk], None]] | None = None

    def lose_power(self, after: int, draw: random.Random, then: Callable[[SimDisk], None]) -> None:
        """After so many changes, give ``then`` the disk as the next start will find it."""
        self._power_loss = (after, draw, then)

    def make(self, *names: str) -> None:
        """Make a folder, with those that it stands in; all of them are safe."""
        folder = self._root
        for name in names:
            inner = _Folder()
            folder.change({name: inner})
            folder.sync()
            folder = inner

    def path(self, *names: str) -> Any:
        """A path on it, to be given where a :class:`pathlib.Path` is due."""
        return SimPath(self, names)

    def read(self, path: str) -> bytes:
        """The content of a file."""
        content: bytes = SimPath(self, tuple(path.split("/"))).file().content
        return content

    def write(self, path: str, content: bytes) -> None:
        """Write a file through, as another process does, and make its folder."""
        place = SimPath(self, tuple(path.split("/")))
        if not place.parent.exists():
            place.parent.mkdir(parents=True)
        place.parent.folder().change({place.name: _File(content)})

    def changes(self, *, fails: bool = True) -> None:
        """Something is about to change."""
        self._num_changes += 1
        if self._power_loss is not None and self._num_changes == self._power_loss[0]:
            _, draw, then = self._power_loss
            image = SimDisk()
            image._root = self._root.after_power_loss(draw)
            then(image)
        if fails and self.fails is not None:
            self.fails(self._num_changes)


class SimPath:
    """A path on a :class:`SimDisk`; the part of :class:`pathlib.Path` that checkpoints need."""

    __slots__ = ("_disk", "_names")

    def __init__(self, disk: SimDisk, names: tuple[str, ...]) -> None:
        self._disk = disk
        self._names = names

    def __truediv__(self, name: str) -> SimPath:
        return SimPath(self._disk, (*self._names, name))

    def __str__(self) -> str:
        return "/".join(self._names)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimPath) and self._names == other._names

    def __hash__(self) -> int:
        return hash(self._names)

    @property
    def name(self) -> str:
        """Its last part."""
        return self._names[-1]

    @property
    def parent(self) -> SimPath:
        """The folder that it stands in."""
        return SimPath(self._disk, self._names[:-1])

    @property
    def parents(self) -> list[SimPath]:
        """The folders that it stands in, from the inside out."""
        return [SimPath(self._disk, self._names[:number]) for number in reversed(range(len(self._names)))]

    def _node(self) -> _File | _Folder:
        node: _File | _Folder = self._disk._root
        for name in self._names:
            if not isinstance(node, _Folder):
                raise NotADirectoryError(20, "Not a directory", str(self))
            if name not in node.entries:
                raise FileNotFoundError(2, "No such file or directory", str(self))
            node = node.entries[name]
        return node

    def folder(self) -> _Folder:
        """The folder there."""
        node = self._node()
        if not isinstance(node, _Folder):
            raise NotADirectoryError(20, "Not a directory", str(self))
        return node

    def file(self) -> _File:
        """The file there."""
        node = self._node()
        if not isinstance(node, _File):
            raise IsADirectoryError(21, "Is a directory", str(self))
        return node

    def exists(self) -> bool:
        """As of a Path."""
        try:
            self._node()
        except OSError:
            return False
        return True

    def is_dir(self) -> bool:
        """As of a Path."""
        return self.exists() and isinstance(self._node(), _Folder)

    def glob(self, pattern: str) -> list[SimPath]:
        """As of a Path, for the names in this folder."""
        names = sorted(self.folder().entries) if self.is_dir() else []
        return [self / name for name in names if fnmatch(name, pattern)]

    def mkdir(self, mode: int = 0o777, parents: bool = False) -> None:
        """As of a Path."""
        if parents and not self.parent.exists():
            self.parent.mkdir(mode, parents)
        if self.exists():
            raise FileExistsError(17, "File exists", str(self))
        self._disk.changes()
        self.parent.folder().change({self.name: _Folder()})

    def rename(self, target: SimPath) -> SimPath:
        """As of a Path; within one folder."""
        assert self.parent == target.parent, "a rename to another folder"
        if target.is_dir() and target.folder().entries:
            raise OSError(39, "Directory not empty", str(target))
        node = self._node()
        self._disk.changes()
        self.parent.folder().change({self.name: None, target.name: node})
        return target

    def open(self, mode: str) -> Any:
        """As of a Path."""
        if mode == "rb":
            return io.BytesIO(self.file().content)
        self._disk.changes()
        file = _File()
        self.parent.folder().change({self.name: file})
        return _Writer(self._disk, file)

    def remove(self) -> None:
        """Remove the file or folder and all that is in it."""
        for path in self.glob("*"):
            path.remove()
        self._disk.changes(fails=False)
        self.parent.folder().change({self.name: None})


class _Writer(io.BytesIO):
    """A file that is open for writing. Its descriptor is the object itself."""

    def __init__(self, disk: SimDisk, file: _File) -> None:
        super().__init__()
        self._disk = disk
        self._file = file

    def fileno(self) -> Any:
        return self

    def flush(self) -> None:
        self._file.content = self.getvalue()

    def close(self) -> None:
        if not self.closed:
            self.flush()
        super().close()

    def sync(self) -> None:
        self._disk.changes()
        self._file.synced = self._file.content


class _Os:
    """The part of :mod:`os` that :mod:`digen.files` uses, for both kinds of paths."""

    O_RDONLY = os.O_RDONLY

    @staticmethod
    def open(path: Any, flags: int) -> Any:
        return path if isinstance(path, SimPath) else os.open(path, flags)

    @staticmethod
    def fsync(descriptor: Any) -> None:
        match descriptor:
            case SimPath():
                descriptor._disk.changes()
                descriptor.folder().sync()
            case _Writer():
                descriptor.sync()
            case _:
                os.fsync(descriptor)

    @staticmethod
    def close(descriptor: Any) -> None:
        if not isinstance(descriptor, SimPath):
            os.close(descriptor)


_rmtree = shutil.rmtree


def _remove(path: Any, *args: Any, **options: Any) -> None:
    if isinstance(path, SimPath):
        path.remove()
    else:
        _rmtree(path, *args, **options)


@contextmanager
def mounted() -> Iterator[None]:
    """Inside, the functions that sync and remove files take paths of a :class:`SimDisk`."""
    with patch.object(files, "os", _Os), patch.object(shutil, "rmtree", _remove):
        yield


def checkpoints_on(disk: SimDisk, *, every: int, keep: int = 3, keep_best: int = 0, digest: str = "") -> Checkpoints:
    """The checkpoints of a run on a simulated disk."""
    folder = disk.path("run", "checkpoints")
    return Checkpoints(folder, every=every, keep=keep, keep_best=keep_best, plan_digest=digest, family="simulated")


def at_once(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """Let what is given to threads happen here and now: a simulated disk takes no time."""

    def run_in_executor(_: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = loop.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    loop.run_in_executor = run_in_executor  # type: ignore[method-assign,assignment]
    return loop
