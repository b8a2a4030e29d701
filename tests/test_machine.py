"""How much memory there is to take, of the machine and of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from digen import machine


def test_a_container_gives_back_the_files_that_it_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    whole = machine.available_memory()
    assert whole > 0
    files = {"memory.max": "4000000\n", "memory.current": "3000000\n"}
    files["memory.stat"] = "anon 500000\nfile 2500000\nshmem 1000000\nactive_file 700000\ninactive_file 800000\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="ascii")
    assert machine.available_memory() == 4_000_000 - (3_000_000 - 700_000 - 800_000)
    assert machine.look().memory == 4_000_000
    (tmp_path / "memory.current").write_text("9000000\n", encoding="ascii")
    assert machine.available_memory() == 0
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert machine.available_memory() == pytest.approx(whole, rel=0.5), "no limit"
