"""What README and experiments/ show runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, f"experiments/{script}", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_embedding_with_engines_of_your_own() -> None:
    out = run("embed.py")
    rewards = [float(value) for value in re.findall(r"reward ([+-][\d.]+)", out)]
    assert rewards[-1] > rewards[0] + 1, "it learns"
    assert re.search(r"stale [1-9]\d*%", out), "one step of staleness was used"
    assert re.search(r"drained after step \d+", out)


def test_the_pool_alone() -> None:
    out = run("pool.py")
    assert out.count("Payload(ref=gen") == 2, "the driver holds references"
    assert len(re.findall(r"rewards( 0\.\d{3}){4}", out)) == 2


def test_a_run_from_python() -> None:
    out = run("from_python.py")
    assert len(re.findall(r"^step \d: reward 0\.\d{3}, stale (?:0|50)%$", out, re.MULTILINE)) == 3
    assert "completed, 3 of 3 steps" in out


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.py")), ids=lambda path: str(path.name))
def test_every_script_says_what_it_is_for(path: Path) -> None:
    assert f"| `{path.name}` |" in (ROOT / "experiments/README.md").read_text()
    docstring = path.read_text().split('"""')[1]
    assert f"python experiments/{path.name}" in docstring, "the command"


@pytest.mark.parametrize("page", ["README.md", "experiments/README.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert not missing
