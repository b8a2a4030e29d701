"""Checkpoints without a process: what counts as one, which is chosen, and what a crash at any point leaves."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from digen.checkpoint import Checkpoints, completed, verify
from digen.errors import CheckpointError


class FakeTrainer:
    """Writes two files, as a trainer's ``save`` does."""

    async def save(self, folder: str) -> dict[str, str]:
        hashes = {}
        for name in ("weights.safetensors", "state.json"):
            content = f"{name} of {Path(folder).name}".encode()
            (Path(folder) / name).write_bytes(content)
            hashes[name] = hashlib.sha256(content).hexdigest()
        return hashes


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
    path = Path(asyncio.run(found.save(FakeTrainer(), 2)))
    assert path == tmp_path / "step-000002"
    state = verify(path)
    assert (state.version, state.first_undone_step, state.plan_digest, state.family) == (2, 2, "plan", "digits")
    assert {file.name for file in path.iterdir()} == {"weights.safetensors", "state.json", "run.json", "manifest.json"}
    assert (path / "state.json").read_text() == "state.json of .step-000002.tmp"
    assert path.stat().st_mode & 0o077 == 0
    assert found.find("latest") == (path, state)
    assert found.find(path) == found.find(str(path)) == (path, state)


@pytest.mark.parametrize("name", ["run.json", "manifest.json"])
def test_the_drivers_names_are_reserved(tmp_path: Path, name: str) -> None:
    class Greedy:
        async def save(self, folder: str) -> dict[str, str]:
            (Path(folder) / name).write_text("mine")
            return {name: hashlib.sha256(b"mine").hexdigest()}

    with pytest.raises(CheckpointError, match=f"{name}.*another name"):
        asyncio.run(checkpoints(tmp_path).save(Greedy(), 2))
    assert names(tmp_path) == []


def test_the_last_few_stay(tmp_path: Path) -> None:
    save(checkpoints(tmp_path, keep=2), 2, 4, 6, 8)
    assert names(tmp_path) == ["step-000006", "step-000008"]


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
    save(checkpoints(tmp_path / "checkpoints"), 2)
    assert done == ["run.json", "manifest.json", ".step-000002.tmp", "rename", "checkpoints"]


class Crash(BaseException):
    """The process ends here."""


_crash_after: list[int] = []


def _crash(event: str, args: tuple[Any, ...]) -> None:
    """Count down what changes the disk below ``checkpoints``, and crash in place of the last."""
    if not _crash_after or event not in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}:
        return
    if event == "open" and ("crash-here" not in str(args[0]) or str(args[1]).startswith("r")):
        return
    _crash_after[0] -= 1
    if _crash_after[0] < 0:
        raise Crash


sys.addaudithook(_crash)  # cannot be taken back; without a count it does nothing


def test_a_crash_at_any_point_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    """Every file opened for writing, made, renamed or removed is once the last thing that happens."""
    outcomes = []
    for point in range(100):
        folder = tmp_path / f"crash-here-{point}"
        found = checkpoints(folder, keep=1)
        save(found, 2)
        _crash_after[:] = [point]
        try:
            save(found, 4)
            crashed = False
        except Crash:
            crashed = True
        finally:
            _crash_after.clear()
        version = found.find("latest")[1].version
        outcomes.append(version)
        save(found, 6)  # the next attempt does not stumble over what was left
        assert names(folder) == ["step-000006"]
        assert not list(folder.glob(".*"))
        if not crashed:
            break
    assert not crashed
    assert outcomes == sorted(outcomes)
    assert outcomes.count(2) >= 5, "before the rename the old one is the latest"
    assert outcomes.count(4) >= 4, "after it the new one, while the old one is being removed"
