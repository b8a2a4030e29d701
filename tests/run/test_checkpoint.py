"""Checkpoints without a process: what counts as one, which is chosen, and what a crash at any point leaves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digen.checkpoint import Checkpoints, completed, verify
from digen.errors import CheckpointError
from digen.events import StepCommitted


class FakeTrainer:
    """Writes two files, as a trainer's ``save`` does."""

    async def save(self, folder: str) -> dict[str, str]:
        hashes = {}
        for name in ("weights.safetensors", "state.json"):
            content = f"{name} of {Path(folder).name}".encode()
            (Path(folder) / name).write_bytes(content)
            hashes[name] = hashlib.sha256(content).hexdigest()
        return hashes


class WritingTrainer:
    """Trains on while it writes: what it saves is on disk once it is told."""

    def __init__(self) -> None:
        self.written = False
        self.error: Exception | None = None
        self._folder = ""

    async def begin_save(self, folder: str) -> None:
        self._folder = folder
        self.written = False

    async def saved(self) -> dict[str, str] | None:
        if self.error is not None:
            raise self.error
        return await FakeTrainer().save(self._folder) if self.written else None


def checkpoints(folder: Path, **changes: Any) -> Checkpoints:
    options: dict[str, Any] = {"every": 2, "keep": 3, "plan_digest": "plan", "family": "digits", **changes}
    return Checkpoints(folder, **options)


def save(found: Checkpoints, *versions: int) -> None:
    for version in versions:
        asyncio.run(found.save(FakeTrainer(), version))


def names(folder: Path) -> list[str]:
    return [path.name for path in completed(folder)]


def test_due_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    found = checkpoints(tmp_path, every=3)
    assert [version for version in range(1, 8) if found.due(version, last=version == 7)] == [3, 6, 7]


def test_a_saved_checkpoint_verifies_and_holds_both_parts(tmp_path: Path) -> None:
    found = checkpoints(tmp_path)
    path = Path(str(asyncio.run(found.save(FakeTrainer(), 2))))
    assert path == tmp_path / "step-000002"
    state = verify(path)
    assert (state.version, state.first_undone_step, state.plan_digest, state.family) == (2, 2, "plan", "digits")
    assert {file.name for file in path.iterdir()} == {"weights.safetensors", "state.json", "run.json", "manifest.json"}
    assert (path / "state.json").read_text() == "state.json of .step-000002.tmp"
    assert path.stat().st_mode & 0o077 == 0
    assert found.find("latest") == (path, state)
    assert found.find(path) == found.find(str(path)) == (path, state)


@pytest.mark.parametrize("name", ["run.json", "manifest.json", "../weights"])
def test_the_drivers_names_are_reserved(tmp_path: Path, name: str) -> None:
    class Greedy:
        async def save(self, folder: str) -> dict[str, str]:
            return {name: hashlib.sha256(b"mine").hexdigest()}

    with pytest.raises(CheckpointError, match=f"{name}.*another name"):
        asyncio.run(checkpoints(tmp_path).save(Greedy(), 2))
    assert names(tmp_path) == []


def test_the_last_few_stay(tmp_path: Path) -> None:
    save(checkpoints(tmp_path, keep=2), 2, 4, 6, 8)
    assert names(tmp_path) == ["step-000006", "step-000008"]


def test_the_best_stay_too(tmp_path: Path) -> None:
    """Version 4 is the best, 2 the second; what was saved without a reward is none of them."""
    found = checkpoints(tmp_path, keep=1, keep_best=2)
    save(found, 1)
    for version, reward in {2: 0.5, 4: 0.9, 6: 0.4, 8: 0.4, 10: 0.1}.items():
        found.note(StepCommitted(0.0, version - 1, version, {"reward/mean": reward}))
        save(found, version)
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000010"]
    assert [verify(path).reward for path in completed(tmp_path)] == [0.5, 0.9, 0.1]
    found.note(StepCommitted(0.0, 11, 12, {"reward/mean": 0.7}))
    save(found, 12, 14)
    assert names(tmp_path) == ["step-000004", "step-000012", "step-000014"]
    assert verify(tmp_path / "step-000014").reward is None
    save(checkpoints(tmp_path, keep=1), 16)
    assert names(tmp_path) == ["step-000016"]


@pytest.mark.asyncio
async def test_a_checkpoint_is_complete_when_it_is_written_and_not_before(tmp_path: Path) -> None:
    found, trainer = checkpoints(tmp_path), WritingTrainer()
    first = await found.save(trainer, 2)
    assert isinstance(first, asyncio.Task)
    second = asyncio.create_task(found.save(trainer, 4))
    await asyncio.wait([first, second], timeout=0.2)
    assert not first.done()
    assert not second.done(), "it waits for the first"
    assert names(tmp_path) == []
    trainer.written = True
    assert Path(await first) == tmp_path / "step-000002"
    writing = await second
    assert isinstance(writing, asyncio.Task)
    assert verify(tmp_path / "step-000002").version == 2
    trainer.written = True
    await writing
    assert found.find("latest")[1].version == 4


@pytest.mark.asyncio
async def test_one_that_is_given_up_leaves_nothing_that_matters(tmp_path: Path) -> None:
    """Its trainer is lost: the scheduler cancels it. Or it cannot be written: it says so itself."""
    found, trainer = checkpoints(tmp_path), WritingTrainer()
    lost = await found.save(trainer, 2)
    assert isinstance(lost, asyncio.Task)
    lost.cancel()
    failed = await found.save(trainer, 3)
    assert isinstance(failed, asyncio.Task)
    assert lost.cancelled()
    trainer.error = CheckpointError("no space")
    with pytest.raises(CheckpointError, match="no space"):
        await failed
    assert await found.newest() is None
    assert await found.save(FakeTrainer(), 4) == str(tmp_path / "step-000004")
    assert os.listdir(tmp_path) == ["step-000004"]  # noqa: PTH208 - pathlib's is a blocking call to the linter


class DeafTrainer(WritingTrainer):
    """Its calls swallow their cancellation, and answer when they are let go."""

    def __init__(self, deaf: str) -> None:
        super().__init__()
        self.answer = asyncio.Event()
        self._deaf = deaf

    async def _wait(self, method: str) -> None:
        while method == self._deaf and not self.answer.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.answer.wait()

    async def begin_save(self, folder: str) -> None:
        await self._wait("begin_save")
        await super().begin_save(folder)

    async def saved(self) -> dict[str, str] | None:
        await self._wait("saved")
        return await super().saved()


class DeafSaver:
    """The same for one that does not train on."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    async def save(self, folder: str) -> dict[str, str]:
        while not self.answer.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.answer.wait()
        return {}


@pytest.mark.asyncio
@pytest.mark.parametrize("deaf", ["begin_save", "saved", "save"])
async def test_an_answer_of_a_life_that_is_over_changes_nothing(tmp_path: Path, deaf: str) -> None:
    """The trainer hangs in a save and is lost; another has saved the same version by the time that the answer comes."""
    found = checkpoints(tmp_path)
    trainer: Any = DeafSaver() if deaf == "save" else DeafTrainer(deaf)
    lost: asyncio.Task[Any] = asyncio.create_task(found.save(trainer, 2))
    await asyncio.wait([lost], timeout=0.1)
    if deaf == "saved":
        lost = lost.result()
        trainer.written = True
        await asyncio.sleep(0)
    lost.cancel()
    again = asyncio.create_task(found.save(FakeTrainer(), 2))
    if deaf == "saved":  # it waits for what was being written
        trainer.answer.set()
    assert await again == str(tmp_path / "step-000002")
    before = (tmp_path / "step-000002").stat().st_ino
    trainer.answer.set()
    with pytest.raises(asyncio.CancelledError):
        await lost
    assert (tmp_path / "step-000002").stat().st_ino == before
    assert verify(tmp_path / "step-000002").version == 2
    assert names(tmp_path) == ["step-000002"]


def test_versions_are_ordered_as_numbers(tmp_path: Path) -> None:
    found = checkpoints(tmp_path, keep=2)
    save(found, 999_998, 1_000_000, 1_000_002)
    assert names(tmp_path) == ["step-1000000", "step-1000002"]
    assert found.find("latest")[1].version == 1_000_002


def test_going_back_ends_the_continuation_that_was_given_up(tmp_path: Path) -> None:
    found = checkpoints(tmp_path, keep=2)
    save(found, 6, 8)
    save(found, 2)  # resumed from a copy of version 0, say
    assert names(tmp_path) == ["step-000002"]
    assert found.find("latest")[1].version == 2


def test_the_same_step_is_saved_again(tmp_path: Path) -> None:
    found = checkpoints(tmp_path)
    save(found, 2, 4)
    (tmp_path / "step-000004" / "weights.safetensors").write_text("of a disk that lies")
    save(found, 4)
    assert found.find("latest")[1].version == 4


def test_unfinished_ones_are_no_checkpoints_and_are_reclaimed(tmp_path: Path) -> None:
    (tmp_path / ".step-000002.tmp").mkdir(parents=True)
    (tmp_path / ".step-000002.tmp" / "weights.safetensors").touch()
    found = checkpoints(tmp_path)
    assert names(tmp_path) == []
    save(found, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004"]


def flip(path: Path) -> None:
    content = bytearray((path / "weights.safetensors").read_bytes())
    content[3] ^= 1
    (path / "weights.safetensors").write_bytes(content)


def truncate(path: Path) -> None:
    content = (path / "state.json").read_bytes()
    (path / "state.json").write_bytes(content[:-1])


def edit_state(path: Path, **changes: Any) -> None:
    content = json.dumps({**json.loads((path / "run.json").read_text()), **changes}).encode()
    (path / "run.json").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["run.json"] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def forget_state(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["run.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def name_another(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"../secret": ""}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip, "is corrupt: weights.safetensors differs from the manifest"),
    "a short file": (truncate, "is corrupt: state.json differs from the manifest"),
    "a missing file": (lambda path: (path / "weights.safetensors").unlink(), "weights.safetensors cannot be read"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "not a complete checkpoint: it has no manifest"),
    "an empty manifest": (lambda path: (path / "manifest.json").write_bytes(b""), "manifest.json cannot be read"),
    "a manifest of something else": (
        lambda path: (path / "manifest.json").write_text('["weights"]'),
        "manifest.json cannot be read",
    ),
    "a manifest without the driver's part": (forget_state, "does not name run.json"),
    "a driver's part of another shape": (lambda path: edit_state(path, version="two"), "run.json is not valid"),
    "a file outside of it": (name_another, r"names '\.\./secret', which is no file of it"),
    "another schema": (lambda path: edit_state(path, schema=2), "has schema 2; this release reads 1"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_latest_takes_the_one_before(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = checkpoints(tmp_path)
    save(found, 2, 4)
    broken = tmp_path / "step-000004"
    spoil, message = DAMAGE[damage]
    spoil(broken)
    with pytest.raises(CheckpointError, match=message) as caught:
        found.find(broken)
    assert str(broken) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert found.find("latest")[1].version == 2
    said = capsys.readouterr().out
    assert "passing over a broken checkpoint" in said
    assert str(broken) in said


def test_no_checkpoint_no_usable_one_no_such_one(tmp_path: Path) -> None:
    found = checkpoints(tmp_path / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"ended before its first one; delete .*/run and start again"):
        found.find("latest")
    save(found, 2)
    flip(tmp_path / "run" / "checkpoints" / "step-000002")
    with pytest.raises(CheckpointError, match=r"no usable checkpoint .*weights.safetensors"):
        found.find("latest")
    with pytest.raises(CheckpointError, match="there is no such folder"):
        found.find(tmp_path / "step-000009")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"plan_digest": "other"}, "is of another plan"), ({"family": "flux"}, "is of family 'digits', the config of")],
)
def test_another_run_is_refused_and_not_passed_over(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    save(checkpoints(tmp_path), 2, 4)
    for which in ("latest", tmp_path / "step-000002"):
        with pytest.raises(CheckpointError, match=message) as caught:
            checkpoints(tmp_path, **changes).find(which)
        assert "no usable" not in str(caught.value)


def test_another_optimizer_or_precision_is_refused(tmp_path: Path) -> None:
    settings = {"optimizer.name": "adamw", "model.dtype": "float32"}
    asyncio.run(checkpoints(tmp_path, settings=settings).save(FakeTrainer(), 1))
    assert checkpoints(tmp_path, settings=settings).find("latest")[1].settings == settings
    with pytest.raises(CheckpointError, match=r"written with optimizer\.name=adamw, the config has sgd"):
        checkpoints(tmp_path, settings=settings | {"optimizer.name": "sgd"}).find("latest")


def test_everything_is_on_the_device_before_the_name_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    rename = Path.rename

    def noted(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr("os.fsync", lambda fd: done.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    monkeypatch.setattr("digen.checkpoint.Path.rename", noted)
    save(checkpoints(tmp_path / "run" / "checkpoints"), 2)
    made = ["run", tmp_path.name]
    assert done == [*made, "run.json", "manifest.json", ".step-000002.tmp", "rename", "checkpoints"]


class Crash(BaseException):
    """The process ends here."""


_fail_after: list[tuple[int, BaseException]] = []


def _fail(event: str, args: tuple[Any, ...]) -> None:
    """Count down what changes the disk below ``checkpoints``, and fail in place of the last."""
    if not _fail_after or event not in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}:
        return
    if event == "open" and ("crash-here" not in str(args[0]) or str(args[1]).startswith("r")):
        return
    (count, error), *_ = _fail_after
    _fail_after[:] = [(count - 1, error)]
    if not count:
        raise error


sys.addaudithook(_fail)  # cannot be taken back; without a count it does nothing


@pytest.mark.parametrize("fault", [Crash(), OSError(errno.ENOSPC, "No space left on device")], ids=["crash", "full"])
def test_a_fault_at_any_point_leaves_an_intact_checkpoint(tmp_path: Path, fault: BaseException) -> None:
    """Every file opened for writing, made, renamed or removed is once the last thing that happens, or that fails."""
    outcomes, num_raw = [], 0
    for point in range(100):
        folder = tmp_path / f"crash-here-{point}"
        found = checkpoints(folder, keep=1)
        save(found, 2)
        _fail_after[:] = [(point, fault)]
        failure: BaseException | None = None
        try:
            save(found, 4)
        except (Crash, CheckpointError, OSError) as error:
            failure = error
        finally:
            _fail_after.clear()
        version = found.find("latest")[1].version
        outcomes.append(version)
        if isinstance(failure, OSError):
            num_raw += 1
        if isinstance(failure, CheckpointError):
            told = f"checkpoint {folder}/.step-000004.tmp cannot be written: No space left on device; free space there"
            assert told in str(failure)
        save(found, 6)  # the next attempt does not stumble over what was left
        assert names(folder) == ["step-000006"]
        assert not list(folder.glob(".*"))
        if failure is None:
            break
    assert failure is None
    assert num_raw == (2 if isinstance(fault, OSError) else 0), (
        "those of the two files that are the trainer's to explain"
    )
    assert outcomes == sorted(outcomes)
    assert outcomes.count(2) >= 4, "before the rename the old one is the latest"
    assert outcomes.count(4) >= 4, "after it the new one, while the old one is being removed"


@pytest.mark.parametrize("fault", [Crash(), OSError(errno.ENOSPC, "No space left on device")], ids=["crash", "full"])
def test_the_same_step_is_never_without_a_checkpoint(tmp_path: Path, fault: BaseException) -> None:
    """The run has reached it again; twice in a row something happens at the same point."""
    for point in range(100):
        folder = tmp_path / f"crash-here-{point}"
        found = checkpoints(folder, keep=1)
        save(found, 4)
        failed = False
        for _ in range(2):
            _fail_after[:] = [(point, fault)]
            try:
                save(found, 4)
            except (Crash, CheckpointError, OSError):
                failed = True
            finally:
                _fail_after.clear()
            assert found.find("latest")[1].version == 4, f"point {point}"
        save(found, 4)
        assert names(folder) == ["step-000004"]
        if not failed:
            break
    assert point > 10
    assert not failed


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text("a./\0\n\ud800", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("a./\0\n\ud800", max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
"""What may stand where something else is due."""


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What may happen to a file: bits flip, its end is lost, bytes come in between, it is something else altogether."""
    kind, place = draw(st.sampled_from(["flip", "cut", "insert", "replace"])), draw(st.integers(0, 1 << 16))
    content = draw(st.binary(max_size=16) | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"\xff" * 8]))

    def mutate(old: bytes) -> bytes:
        at = place % (len(old) + 1)
        match kind:
            case "flip":
                return old[:at] + bytes([old[at] ^ (1 << place % 8)]) + old[at + 1 :] if at < len(old) else old
            case "cut":
                return old[:at]
            case "insert":
                return old[:at] + content + old[at:]
        return content

    return mutate


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed")
    return Path(str(asyncio.run(checkpoints(folder).save(FakeTrainer(), 2))))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["run.json", "manifest.json", "weights.safetensors"]),
    mutations() | JSON.map(lambda value: lambda _: json.dumps(value).encode("utf-8", "surrogatepass")),
    st.booleans(),
)
def test_whatever_was_damaged_is_a_checkpoint_error(
    intact: Path, name: str, mutate: Callable[[bytes], bytes], resigned: bool
) -> None:
    """``resigned``: by somebody who knows how the manifest is made."""
    file, manifest = intact / name, intact / "manifest.json"
    before, signed = file.read_bytes(), manifest.read_bytes()
    try:
        file.write_bytes(mutate(before))
        if resigned and file != manifest:
            sums = json.loads(signed) | {name: hashlib.sha256(file.read_bytes()).hexdigest()}
            manifest.write_text(json.dumps(sums))
        with contextlib.suppress(CheckpointError):
            verify(intact)
            assert resigned or file == manifest or file.read_bytes() == before, "it was not noticed"
    finally:
        file.write_bytes(before)
        manifest.write_bytes(signed)
