"""Checkpoints: what is true after a crash.

A checkpoint is a folder ``checkpoints/step-000010`` that the trainer and the driver wrote together under a temporary
name and that was renamed once every file in it was complete and synced. ``run.json`` is the driver's part, all other
files are the trainer's. ``manifest.json`` is written last and holds the SHA-256 of every other file; a folder without
it, or with a file that differs from it, is not a checkpoint.

Checkpoints are taken between a commit and the next update only, so the ledger of undone work is short: every
micro-batch of the steps from ``first_undone_step`` on. No cursor into the data is stored; the plan computes the steps.

A trainer with ``begin_save`` only copies its state then, and writes it while it trains on. The checkpoint is complete
when all of it is on disk, a little later, and until then it is none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import structlog
from msgspec import Struct

from digen.errors import CheckpointError
from digen.events import AnyEvent, StepCommitted
from digen.files import make_folders, reason, sync_folder, write_synced

SCHEMA = 1
_MANIFEST = "manifest.json"
_STATE = "run.json"
_VERSION = re.compile(r"step-\d+")
_FILE = re.compile(r"\w[\w.-]*", re.ASCII)
"""Names of files in a checkpoint, which has no folders."""
_MOST_BYTES = 1 << 24
"""Of a JSON file in a checkpoint; what is longer is none of digen's."""
_POLL_S = 0.05
"""Between two questions whether a trainer has written its part; each waits for what the trainer does just then."""

Weights = Literal["raw", "ema"]
"""Which weights of a checkpoint: those that are trained, or their exponential moving average."""
WEIGHT_FILES: dict[Weights, str] = {"raw": "weights.safetensors", "ema": "ema.safetensors"}
"""The files of a checkpoint that hold them."""

_T = TypeVar("_T")

log = structlog.get_logger("digen.checkpoint")


class RunState(Struct, frozen=True):
    """The driver's part of a checkpoint, ``run.json``."""

    schema: int
    version: int
    """Optimizer steps in the weights."""
    first_undone_step: int
    """Every micro-batch of this and later steps is undone; every one of earlier steps was trained exactly once."""
    plan_digest: str
    """Of the plan whose steps were trained; another plan is refused."""
    family: str
    settings: dict[str, str] = {}
    """Fields of the config that the files depend on; others may change in a resumed run."""
    reward: float | None = None
    """``reward/mean`` of the step that made these weights, whose samples are of weights before; ``None``: not known."""


class Checkpoints:
    """The checkpoints of one run's folder. Also the scheduler's :class:`digen.sched.lanes.Checkpointer`.

    Args:
        folder: the run's ``checkpoints`` folder.
        every: steps between checkpoints.
        keep: how many stay on disk, the newest.
        keep_best: how many stay beside them, those of the highest :attr:`RunState.reward`.
        plan_digest: :attr:`digen.Plan.digest` of the run.
        family: model family of the run.
        settings: fields of the config that a checkpoint depends on, with their values.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        keep: int,
        keep_best: int = 0,
        plan_digest: str,
        family: str,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._every = every
        self._keep = keep
        self._keep_best = keep_best
        self._plan_digest = plan_digest
        self._family = family
        self._settings = dict(settings or {})
        self._line: list[Path] = []
        """What was resumed from and what was saved since, oldest first. The folder may hold other checkpoints too."""
        self._writing: asyncio.Task[str] | None = None
        self._rewards: dict[int, float] = {}

    def note(self, event: AnyEvent) -> None:
        """A sink: remember the steps' mean rewards, by which the best are known."""
        if isinstance(event, StepCommitted) and "reward/mean" in event.values:
            self._rewards[event.version] = event.values["reward/mean"]

    def due(self, version: int, *, last: bool) -> bool:
        """Every ``every`` steps, and whenever the run ends with these weights."""
        return last or version % self._every == 0

    async def save(self, trainer: Any, version: int) -> str | asyncio.Task[str]:
        """Have the trainer write its part, add the driver's, make it durable, rename, prune.

        Returns the checkpoint's path; or, of a trainer that trains on while it writes, a task that returns it. One that
        is being written is waited for before the next is begun.

        Checkpoints of later versions are deleted: they belong to a continuation that was given up when the run was
        resumed from an earlier one.

        Raises:
            CheckpointError: the trainer wrote a file under a name that is the driver's, or nothing can be written.
        """
        if self._writing is not None:
            await asyncio.wait([self._writing])
        temporary = self._folder / f".{_name(version)}.tmp"
        await asyncio.to_thread(self._make, temporary)
        if not hasattr(trainer, "begin_save"):
            return await self._finish(version, temporary, await _awaited(trainer.save(str(temporary))))
        await _awaited(trainer.begin_save(str(temporary)))
        self._writing = asyncio.create_task(self._follow(trainer, version, temporary), name="digen-checkpoint")
        self._writing.add_done_callback(_heard)
        return self._writing

    async def _follow(self, trainer: Any, version: int, temporary: Path) -> str:
        while (files := await _awaited(trainer.saved())) is None:  # noqa: ASYNC110 - another process writes
            await asyncio.sleep(_POLL_S)
        return await self._finish(version, temporary, files)

    async def _finish(self, version: int, temporary: Path, files: dict[str, str]) -> str:
        """Add the driver's part to a trainer's; not cut short, because another save may follow a cancellation."""
        bad = [name for name in files if name in {_STATE, _MANIFEST} or not _FILE.fullmatch(name)]
        if bad:
            raise CheckpointError(f"{', '.join(map(ascii, bad))} in {temporary}: the trainer must use another name")
        final = self._folder / _name(version)
        reward = self._rewards.get(version)
        state = RunState(SCHEMA, version, version, self._plan_digest, self._family, self._settings, reward)
        completion = asyncio.ensure_future(asyncio.to_thread(self._complete, temporary, final, files, state))
        try:
            await asyncio.shield(completion)
        except asyncio.CancelledError:
            await asyncio.wait([completion])
            raise
        self._line = [path for path in self._line if path != final and path.exists()] + [final]
        return str(final)

    def _complete(self, temporary: Path, final: Path, files: dict[str, str], state: RunState) -> None:
        try:
            _complete(temporary, final, files, state)
            self._prune(state.version)
        except OSError as error:
            raise cannot_write(temporary, error) from error

    async def newest(self) -> tuple[int, str] | None:
        """Version and path of the newest intact checkpoint that led to the present weights, if there is one."""
        return await asyncio.to_thread(self._newest)

    def _newest(self) -> tuple[int, str] | None:
        for path in reversed(self._line):
            try:
                return verify(path).version, str(path)
            except CheckpointError as error:
                log.warning("passing over a broken checkpoint", reason=str(error))
        return None

    def find(self, which: str | Path) -> tuple[Path, RunState]:
        """The checkpoint to resume from: ``"latest"`` or a path.

        ``"latest"`` is the newest one that is intact; broken ones are named in a warning and passed over.

        Raises:
            CheckpointError: there is none, or the one named is broken or of another plan or family.
        """
        if str(which) == "latest" and not completed(self._folder):
            raise CheckpointError(
                f"no checkpoint in {self._folder}: the run ended before its first one; "
                f"delete {self._folder.parent} and start again without --resume"
            )
        path, state = find(self._folder, which)
        self._line = [path]
        return path, self._fitting(path, state)

    def _fitting(self, path: Path, state: RunState) -> RunState:
        if state.plan_digest != self._plan_digest:
            raise CheckpointError(
                f"checkpoint {path} is of another plan (prompts, group size, micro-batches or seed differ); "
                "resume with the config.yaml in the run's folder"
            )
        if state.family != self._family:
            raise CheckpointError(f"checkpoint {path} is of family {state.family!r}, the config of {self._family!r}")
        for field, value in self._settings.items():
            if state.settings.get(field, value) != value:
                raise CheckpointError(
                    f"checkpoint {path} was written with {field}={state.settings[field]}, the config has {value}; "
                    "such a change needs a new run"
                )
        return state

    def _make(self, temporary: Path) -> None:
        try:
            for unfinished in self._folder.glob(".step-*.tmp"):  # a crash left it
                shutil.rmtree(unfinished)
            make_folders(self._folder)
            temporary.mkdir(mode=0o700)
        except OSError as error:
            raise cannot_write(temporary, error) from error

    def _prune(self, newest: int) -> None:
        folders = [path for path in completed(self._folder) if _version(path) <= newest]
        kept = {*folders[-self._keep :], *self._best(folders)}
        for path in completed(self._folder):
            if path not in kept:
                shutil.rmtree(path)

    def _best(self, folders: list[Path]) -> list[Path]:
        """Of the highest reward, the newer ones first where it is the same."""
        if not self._keep_best:
            return []
        rewards = {path: reward for path in reversed(folders) if (reward := _reward(path)) is not None}
        return sorted(rewards, key=rewards.__getitem__, reverse=True)[: self._keep_best]


def cannot_write(path: Path, error: OSError, num_bytes: int | None = None) -> CheckpointError:
    """What to raise, and what to do, when a checkpoint of ``num_bytes`` cannot be written."""
    size = f" ({num_bytes / 1e6:.1f} MB)" if num_bytes else ""
    return CheckpointError(f"checkpoint {path}{size} cannot be written: {reason(error)}; those before it are intact")


def completed(folder: Path) -> list[Path]:
    """The checkpoints in a run's ``checkpoints`` folder, oldest first; what they hold is not looked at."""
    return sorted((path for path in folder.glob("step-*") if _VERSION.fullmatch(path.name)), key=_age)


def find(folder: Path, which: str | Path) -> tuple[Path, RunState]:
    """An intact checkpoint: one by its path, or ``"latest"``, the newest in a run's ``checkpoints`` folder.

    Broken ones that are newer are named in a warning and passed over.

    Raises:
        CheckpointError: there is none, or the one named is broken.
    """
    if str(which) != "latest":
        return Path(which), verify(Path(which))
    reasons = []
    for path in reversed(completed(folder)):
        try:
            return path, verify(path)
        except CheckpointError as error:
            reasons.append(str(error))
            log.warning("passing over a broken checkpoint", reason=str(error))
    if reasons:
        raise CheckpointError(f"no usable checkpoint in {folder}: {'; '.join(reasons)}")
    raise CheckpointError(f"no checkpoint in {folder}; check run.name and run.output, or give a checkpoint's path")


def weights_of(path: Path, weights: Weights) -> Path:
    """The file of an intact checkpoint that holds ``weights``.

    Raises:
        CheckpointError: it has no moving average.
    """
    file = path / WEIGHT_FILES[weights]
    if not file.is_file():
        raise CheckpointError(
            f"checkpoint {path} has no {weights} weights: its run kept no moving average (optimizer.ema_decay); "
            "use --weights raw"
        )
    return file


def verify(path: Path) -> RunState:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: names the first file that is missing or differs.
    """
    manifest = path / _MANIFEST
    try:
        digests = _decoded(manifest, dict[str, str])
    except (FileNotFoundError, NotADirectoryError):
        what = f"it has no {_MANIFEST}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path} is not a complete checkpoint: {what}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint {path} is broken: {_MANIFEST} cannot be read: {error}") from None
    for name, digest in digests.items():
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"checkpoint {path} is broken: its manifest names {name!r}, which is no file of it")
        try:
            found = _sha256(path / name)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} is broken: {name} cannot be read: {error.strerror}") from None
        if found != digest:
            raise CheckpointError(f"checkpoint {path} is corrupt: {name} differs from the manifest; use another one")
    if _STATE not in digests:
        raise CheckpointError(f"checkpoint {path} is broken: its manifest does not name {_STATE}")
    try:
        state = _decoded(path / _STATE, RunState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint {path}: {_STATE} is not valid: {error}") from None
    if state.schema != SCHEMA:
        raise CheckpointError(f"checkpoint {path} has schema {state.schema}; this release reads {SCHEMA}")
    return state


def _decoded(path: Path, kind: type[_T]) -> _T:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES)
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError(str(error)) from None


def _reward(folder: Path) -> float | None:
    """Of an intact ``run.json``; a broken checkpoint is not among the best."""
    try:
        return _decoded(folder / _STATE, RunState).reward
    except (OSError, msgspec.DecodeError):
        return None


def _heard(writing: asyncio.Task[str]) -> None:
    """Nobody may look at its error any more, when the run has ended meanwhile; asyncio would complain."""
    if not writing.cancelled():
        writing.exception()


async def _awaited(call: Awaitable[_T]) -> _T:
    """What a trainer answers. One that answers though the call was cancelled is of a life that is over."""
    answer = await call
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return answer


def _name(version: int) -> str:
    return f"step-{version:06d}"


def _version(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _age(folder: Path) -> tuple[int, bool]:
    """For sorting: what was moved aside is older than what takes its place."""
    version = _version(folder)
    return version, folder.name == _name(version)


def _complete(temporary: Path, final: Path, files: dict[str, str], state: RunState) -> None:
    content = msgspec.json.encode(state)
    write_synced(temporary / _STATE, content)
    digests = {**files, _STATE: hashlib.sha256(content).hexdigest()}
    write_synced(temporary / _MANIFEST, json.dumps(digests, indent=1, sort_keys=True).encode())
    sync_folder(temporary)
    aside = final.parent / final.name.replace("-", "-0")  # of this version too: one of them always counts
    if final.exists():  # the run reached the same step again
        if aside.exists():  # a crash left it
            shutil.rmtree(aside)
        final.rename(aside)
    temporary.rename(final)
    sync_folder(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
