"""Weights through a folder that all workers see: safetensors files, complete or not there.

Version 12 is ``FOLDER/v000012``: each rank of the trainer writes ``rank0.safetensors`` with its own pieces, and
``manifest.json`` says what lies where, with a checksum of every piece. The folder is written under another name,
synced, and renamed when the manifest, the last file, is complete. With ``skip_unchanged`` a manifest points to an
earlier version's file for every piece that has not changed.

A reader leaves a mark, ``FOLDER/reading-v000012-...``, before it looks, keeps it fresh, and takes it away. Once a
version is complete, earlier ones are deleted, except: the one before, which somebody may have been sent to a moment
ago; those with a mark that is fresh; and files that a manifest that stays points to.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from digen.diffusion.channels.base import Deadline, Outbox, device_of, on_host, own_pieces, parts_of
from digen.diffusion.channels.layout import Bytes, Layout, Part, checksum
from digen.diffusion.ranks import Ranks
from digen.errors import ConfigError, ProtocolError
from digen.files import sync_folder, write_synced
from digen.handles import Memory
from digen.types import Payload, Publication

MANIFEST = "manifest.json"
"""Written last."""

_VERSION, _UNFINISHED = re.compile(r"v\d{6,}"), re.compile(r"\.v\d{6,}\.[0-9a-f]{16}\.tmp")
_FILE = re.compile(r"v\d{6,}/rank\d+\.safetensors")
_MARK_TOUCH, _MARK_STALE = 0.25, 2.0  # of the time-out: when a reader renews its mark, when nobody believes it


class Place(Struct, frozen=True, array_like=True):
    """Where a piece is."""

    file: str
    """Below the folder of all versions."""
    offset: int
    """In bytes."""
    sum: int
    """xxh3-64 of the piece."""


class Manifest(Struct, frozen=True):
    """A complete version."""

    stamp: str
    """Of this publication; a version that is published again, by a resumed run, has another."""
    layout: Layout
    places: tuple[Place, ...]
    """Of the layout's pieces."""


class FileSender(Outbox):
    """Publishes in a folder.

    Args:
        ranks: of the trainer.
        dtypes: of the generators' parameters.
        timeout_s: longest time that writing a version may take.
        folder: of this run's versions alone.
        skip_unchanged: write only what has changed.
    """

    def __init__(
        self, ranks: Ranks, dtypes: Mapping[str, torch.dtype], timeout_s: float, *, folder: Path, skip_unchanged: bool
    ) -> None:
        super().__init__(ranks, dtypes, timeout_s)
        self._folder = folder.resolve()
        self._skip = skip_unchanged
        self._written: tuple[Layout, dict[int, Place]] | None = None  # this rank's pieces of the last version
        self._manifests: dict[str, Manifest] = {}  # on rank 0: of what is in the folder, oldest first

    def lend_memory(self, memory: Memory) -> None:
        """As :meth:`digen.diffusion.channels.base.Sender.lend_memory`: not needed."""

    def publish(self, version: int, parameters: Mapping[str, Tensor]) -> Publication:
        """As :meth:`digen.diffusion.channels.base.Sender.publish`.

        Raises:
            ConfigError: the folder cannot be written, or a dtype or placement not published.
        """
        self.settle()
        layout = self._plan(parameters)
        stamp = str(self._ranks.tell(secrets.token_hex(8)))
        name = f"v{version:06d}"
        temporary = self._folder / f".{name}.{stamp}.tmp"
        with self._ranks.together():
            if self._ranks.rank == 0:
                try:
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    temporary.mkdir(mode=0o700)
                except OSError as error:
                    raise ConfigError(
                        f"weights cannot be written to {self._folder}: {error.strerror}; set workers.weights.folder"
                    ) from error
        with self._ranks.together():
            if not temporary.is_dir():
                raise ConfigError(
                    f"rank {self._ranks.rank} does not see {self._folder}; workers.weights.folder must be a folder "
                    "that every worker sees under the same name"
                )
        job = _Job(version, name, stamp, temporary, layout)
        self._start(version, partial(self._write, job, parts_of(parameters)), device_of(parameters))
        url = f"file://{quote(str(self._folder / name))}#{stamp}"
        return Publication(version, Payload({}), None, len(layout.tensors), layout.nbytes, url)

    def _write(self, job: _Job, parts: Sequence[Part]) -> None:
        layout, rank = job.layout, self._ranks.rank
        before = self._written[1] if self._skip and self._written and self._written[0] == layout else {}
        self._written = None
        places, changed = {}, []
        for index, values in own_pieces(layout, parts, rank):
            old = before.get(index)
            if old is not None and checksum(on_host(values, layout.spec(index).dtype)) == old.sum:
                places[index] = old
            else:
                changed.append((index, values))
        if changed:
            file = f"rank{rank}.safetensors"
            for index, offset, found in _write_pieces(job.temporary / file, layout, changed):
                places[index] = Place(f"{job.name}/{file}", offset, found)
        unnamed = job.temporary / f"rank{rank}.tmp"
        write_synced(unnamed, msgspec.json.encode(places))
        unnamed.rename(_ready(job.temporary, rank))
        self._written = layout, places
        if rank == 0:
            self._complete(job)

    def _complete(self, job: _Job) -> None:
        """Rank 0: once every rank has written its pieces, let the version be seen."""
        ready = [_ready(job.temporary, rank) for rank in range(self._ranks.num_ranks)]
        deadline = Deadline(job.version, self._timeout_s)
        deadline.wait_for(lambda: all(map(Path.exists, ready)), lambda: "not every rank of the trainer wrote its part")
        places: dict[int, Place] = {}
        for path in ready:
            places |= msgspec.json.decode(path.read_bytes(), type=dict[int, Place])
            path.unlink()
        manifest = Manifest(job.stamp, job.layout, tuple(places[index] for index in range(len(job.layout.pieces))))
        write_synced(job.temporary / MANIFEST, msgspec.json.encode(manifest))
        sync_folder(job.temporary)
        final = self._folder / job.name
        if final.exists():  # a run that was resumed from an earlier version makes this one again
            shutil.rmtree(final)
        job.temporary.rename(final)
        sync_folder(self._folder)
        self._manifests.pop(job.name, None)
        self._manifests[job.name] = manifest
        self._prune((final / MANIFEST).stat().st_mtime)

    def _prune(self, now: float) -> None:
        """Delete what nobody needs any more; ``now`` by the clock of the folder's host."""
        stale = now - _MARK_STALE * self._timeout_s
        kept = set(list(self._manifests)[-2:])
        for mark in self._folder.glob("reading-*"):
            with contextlib.suppress(FileNotFoundError):  # just done
                if mark.stat().st_mtime > stale:
                    kept.add(mark.name.split("-")[1])
                else:
                    mark.unlink()
        self._manifests = {name: manifest for name, manifest in self._manifests.items() if name in kept}
        needed = {place.file for manifest in self._manifests.values() for place in manifest.places}
        for path in list(self._folder.iterdir()):
            if _UNFINISHED.fullmatch(path.name):  # a crash left it
                shutil.rmtree(path)
            elif _VERSION.fullmatch(path.name) and path.name not in self._manifests:
                (path / MANIFEST).unlink(missing_ok=True)
                for file in list(path.iterdir()):
                    if f"{path.name}/{file.name}" not in needed:
                        file.unlink()
                if not any(path.iterdir()):
                    path.rmdir()


class FileSource:
    """Reads a version that :class:`FileSender` wrote, once it is complete.

    Raises:
        ConfigError: its folder is not seen here.
        WorkerTimeout: it is not complete in time.
        ProtocolError: its manifest cannot be read.
    """

    def __init__(self, published: Publication, deadline: Deadline) -> None:
        url = urlsplit(published.url)
        self._path, self._stamp = Path(unquote(url.path)), url.fragment
        self._root = self._path.parent
        self._files: dict[str, Bytes] = {}
        self._deadline = deadline
        self._mark = self._root / f"reading-{self._path.name}-{secrets.token_hex(8)}"
        try:
            self._mark.touch(mode=0o600)
        except OSError as error:
            raise ConfigError(
                f"weights of version {published.version} cannot be read from {self._root}: {error.strerror}; "
                "workers.weights.folder must be a folder that every worker sees under the same name"
            ) from error
        self._touched = time.monotonic()
        try:
            deadline.wait_for(self._is_complete, lambda: f"{self._path} was not complete")
            self._manifest = _read_manifest(self._path / MANIFEST)
        except BaseException:
            self.close()
            raise
        self.layout = self._manifest.layout

    def sum(self, index: int) -> int:
        """As :meth:`digen.diffusion.channels.base.Source.sum`."""
        self._touch()
        return self._manifest.places[index].sum

    def data(self, index: int) -> Bytes:
        """As :meth:`digen.diffusion.channels.base.Source.data`.

        Raises:
            ProtocolError: the file is missing or too short.
        """
        place, window = self._manifest.places[index], self.layout.window(index)
        whole = self._files.get(place.file)
        if whole is None:
            whole = self._files[place.file] = self._open(place.file)
        stop = place.offset + window.stop - window.start
        if not 0 <= place.offset <= stop <= len(whole):
            raise ProtocolError(f"{self._root / place.file} has {len(whole)} bytes, its manifest says {stop} or more")
        return whole[place.offset : stop]

    def close(self) -> None:
        """As :meth:`digen.diffusion.channels.base.Source.close`."""
        self._mark.unlink(missing_ok=True)

    def _open(self, name: str) -> Bytes:
        if not _FILE.fullmatch(name):
            raise ProtocolError(f"the manifest in {self._path} names {name!r}, which is no file of weights")
        try:
            with (self._root / name).open("rb") as file:
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"weights {self._root / name} cannot be read: {error}") from error

    def _is_complete(self) -> bool:
        self._touch()
        path = self._path / MANIFEST
        return path.exists() and _read_manifest(path).stamp == self._stamp

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self._touched > _MARK_TOUCH * self._deadline.timeout_s:
            self._touched = now
            self._mark.touch(mode=0o600)


class _Job(Struct, frozen=True):
    """A version to be written."""

    version: int
    name: str
    stamp: str
    temporary: Path
    layout: Layout


def _write_pieces(path: Path, layout: Layout, pieces: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, int, int]]:
    """Write a safetensors file of (position, elements); yields position, offset and checksum of each."""
    header: dict[str, Any] = {}
    end = 0
    for index, _ in pieces:
        piece, spec, window = layout.pieces[index], layout.spec(index), layout.window(index)
        row = math.prod(spec.shape[1:])
        shape = ((piece.stop - piece.start) // row, *spec.shape[1:]) if spec.shape else ()
        begin, end = end, end + window.stop - window.start
        header[spec.name] = {"dtype": spec.dtype, "shape": shape, "data_offsets": (begin, end)}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, values in pieces:
            data, offset = on_host(values, layout.spec(index).dtype), file.tell()
            file.write(data.data)
            yield index, offset, checksum(data)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        manifest.layout.check()
    except (OSError, msgspec.DecodeError) as error:
        raise ProtocolError(f"{path} cannot be read: {error}") from error
    if len(manifest.places) != len(manifest.layout.pieces):
        raise ProtocolError(f"{path} has {len(manifest.places)} places of {len(manifest.layout.pieces)} pieces")
    return manifest


def _ready(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"
