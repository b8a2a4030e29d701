"""``digen doctor``: what it finds, says and returns. One interpreter and one server are real, the rest is made up."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from digen import doctor
from digen.cli import main
from digen.config import load_config
from digen.doctor import WIDTH, describe, diagnose
from digen.machine import SHM, Gpu, Machine, look


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def interpreter(folder: Path, name: str, versions: Any) -> Path:
    """Something that is asked for its versions and answers so."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{versions if isinstance(versions, str) else json.dumps(versions)}\nEND\n")
    path.chmod(0o755)
    return path


def test_nothing_is_missing_for_the_embedded_job(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert main(["doctor"]) == 0
    assert time.monotonic() - began < 10
    out = capsys.readouterr().out
    assert out.splitlines()[-2:] == ["missing:", "  nothing"]
    for words in ("GPUs:", "cores", "open files", str(SHM), "python 3.", "torch ", "installed: diffusion", "weights"):
        assert words in out
    assert max(map(len, out.splitlines())) <= WIDTH
    assert not any(Path().iterdir()), "nothing is made"


def test_all_that_is_missing_is_said_with_its_mend(
    tmp_path: Path, listening: str, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "2.0\x1b[31m\u202e"
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").touch()
    old = interpreter(tmp_path, "old", {"python": "3.12.0", "digen-rl": "0.0.1", "vllm-omni": evil})
    no_vllm = interpreter(tmp_path, "no_vllm", {"python": "3.12.0", "torch": "2.9"})
    no_server = interpreter(tmp_path, "no_server", {"transformers": "5.0"})
    broken = interpreter(tmp_path, "broken", "no JSON")
    (tmp_path / "failing_reward.py").write_text("import a_module_that_is_not_there\n")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    config = load_config(
        None,
        {
            "workers.python": {"gen0": str(old), "trainer": str(broken)},
            "workers.judges": {
                "a": {"model": str(judge), "python": str(no_vllm)},
                "b": {"model": str(judge), "python": str(no_server), "command": "transformers"},
            },
            "workers.gpus": {"gen0": [97]},
            "reward.heads": [
                {"name": "judge", "label": "a", "kwargs": {"server": "a"}},
                {"name": "judge", "label": "b", "kwargs": {"server": "b"}},
                {"name": "judge", "label": "c", "kwargs": {"url": [listening, dead], "model": "m"}},
                {"name": "failing_reward:f"},
            ],
        },
    )
    sys.path.append("")
    try:
        found = diagnose(config)
    finally:
        sys.path.remove("")
    assert found.endpoints == {listening: "reachable", dead: "Connection refused"}
    assert found.interpreters[str(old)]["digen-rl"] == "0.0.1"
    for words in [
        ["GPUs that this machine has not: gen0 97"],
        [f"{old}, the interpreter of gen0, has digen 0.0.1", "-m pip install digen-rl=="],
        [f"{broken}, the interpreter of trainer, does not answer"],
        [f"{no_vllm}, the interpreter of judge a, has no vllm; install it there"],
        [f"{no_server} -m pip install 'transformers[serving]'"],
        [f"{dead} is not reachable: Connection refused", "start it"],
        ["the reward failing_reward:f cannot be imported", "a_module_that_is_not_there", "mend its module"],
    ]:
        assert [line for line in found.missing if all(word in line for word in words)], (words, found.missing)
    assert len(found.missing) == 7
    lines = describe(found)
    assert max(map(len, lines)) <= WIDTH
    assert not {"\x1b", "\u202e"} & set("".join(lines))
    assert any("GPUs of gen0 are not used" in line for line in lines)


def test_what_prepare_finds_is_missing_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model.path", "no/model", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (line,) = found["missing"]
    assert line.startswith("model folder no/model does not exist")
    assert set(found) == set(doctor.Diagnosis.__dataclass_fields__)
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_gpus_and_extras_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = look()
    monkeypatch.setattr(doctor, "look", lambda: _with_gpus(machine))
    monkeypatch.setattr(doctor, "EXTRAS", {"one": ("json",), "two": ("json", "no_such_module")})
    lines = describe(diagnose(load_config()))
    assert "  0: NVIDIA H200, 140.4 GiB, 139.9 GiB free" in lines
    assert "  installed: one" in lines
    assert "  not installed: two (no no_such_module)" in lines


def _with_gpus(machine: Machine) -> Machine:
    return replace(machine, gpus=(Gpu("NVIDIA H200", 143771, 500),), gpus_from="nvidia-smi")


def test_ray_is_looked_for(monkeypatch: pytest.MonkeyPatch, listening: str) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    found = diagnose(load_config(None, {"workers.type": "ray"}))
    assert found.ray == {"address": "a cluster of this machine alone, on loopback", "authentication": "token"}
    port = listening.split(":")[2].removesuffix("/v1")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    found = diagnose(load_config(None, {"workers.type": "ray"}))
    assert found.ray["state"] == "reachable"
    assert any("without authentication" in line and "workers.ray.allow_no_auth" in line for line in found.missing)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    found = diagnose(load_config(None, {"workers.type": "ray", "workers.ray": {"address": "127.0.0.1:1"}}))
    assert any("no Ray at 127.0.0.1:1: Connection refused; start it" in line for line in found.missing)
    assert not any("without authentication" in line for line in found.missing)


def test_a_server_that_says_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CONNECT_S", 0.2)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        address = deaf.getsockname()
        crowd = [socket.socket() for _ in range(4)]
        for one in crowd:  # its queue is full: a further connection is not answered
            one.setblocking(False)
            one.connect_ex(address)
        try:
            began = time.monotonic()
            assert doctor._connect(*address) == "no answer within 0.2 s"
            assert time.monotonic() - began < 2
        finally:
            for one in crowd:
                one.close()
    assert doctor._at_once(lambda item: time.sleep(5) if item else "done", [1, 0], 0.1) == [None, "done"]
