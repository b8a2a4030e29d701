"""What README and experiments/ show runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from digen.config import load_config, validate
from experiments.scaling import costs_yaml

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
    stale = re.findall(r"^step \d: reward 0\.\d{3}, stale (\d+)%$", out, re.MULTILINE)
    assert len(stale) == 3, out
    assert stale[0] == "0"
    assert all(int(share) <= 50 for share in stale)
    assert "completed, 3 of 3 steps" in out


def test_assists_on_the_real_job() -> None:
    out = run("assist.py", "--steps", "4", "--repeats", "1", "--only", "+tsp", "search, offload")
    assert re.search(r"^\+tsp +\d+\.\d .* 0\.0 +0\.0 +0\.0 +- +- +x\d\.\d{3} +-$", out, re.MULTILINE), "no assists"
    assert re.search(r"^search, offload +\d+\.\d .* [123]\.\d +\d\.\d +0\.0 +\d+\.\d\d .* off$", out, re.MULTILINE)
    assert re.search(r"^same weights .*: met$", out, re.MULTILINE)
    assert "simulated time of a run is off by at most" in out


def test_weights_of_two_ranks() -> None:
    out = run("weights.py", "--small", "--rounds", "1", "--ranks", "2")
    for channel in ("memory", "files", "broadcast", "gather"):
        assert re.search(rf"^2 +{channel} +0\.3 ", out, re.MULTILINE)
    assert re.search(r"^2 +pull mode: the trainer stalls for \d", out, re.MULTILINE)


def test_detection() -> None:
    out = run("detection.py", "--repeats", "3", "--hangs", "1", "--deadline", "0.5", "--no-ray")
    assert re.search(r"^digen: SIGKILL to the error of the call +3 +\d+\.\d +\d+\.\d$", out, re.MULTILINE)
    assert len(re.findall(r"(?:met|MISSED)$", out, re.MULTILINE)) == 3, "how fast is for the benchmark to say"


def test_stage_scaling(tmp_path: Path) -> None:
    out = run("scaling.py", "--model-only", "--out", str(tmp_path))
    assert "simulated: stage model, assumed parameters" in out
    assert "<svg" in (tmp_path / "scaling.svg").read_text()


def test_measured_scaling_is_a_costs_section() -> None:
    config = load_config(None, {"plan.samples_per_prompt": 12})
    rates = {("generate", "1 core"): 120.0, ("update, sequential", "1 core"): 200.0, ("update, TSP", "1 core"): 400.0}
    rates |= {("generate", "2 threads"): 90.0, ("update, TSP", "2 threads"): 600.0}
    costs = validate(yaml.safe_load(costs_yaml(config, rates)), "printed").costs
    assert costs.durations == "g=0.1000 u=0.0300"
    assert costs.tsp_share == Decimal("0.5")
    assert costs.scaling.update == ((1, Decimal(1)), (2, Decimal("1.5")))
    assert costs.scaling.generate == ((1, Decimal(1)),), "two threads are slower, so that point is left out"


def test_timelines(tmp_path: Path) -> None:
    out = run("timelines.py", "--out", str(tmp_path))
    # Naive 8 (20 + 2 + 8) + 4 + 6; colocated half of it without the load; GAP 8 (20 + 2) + 8 + 10, of it 12 idle.
    assert re.search(r"^\(a\) colocated.* 124\.0 +0\.00 +0\.0% +0\.0%", out, re.MULTILINE)
    assert re.search(r"^\(b\) naive.* 250\.0 ", out, re.MULTILINE)
    assert re.search(r"^\(c\) micro-batch.* 194\.0 +0\.00 +6\.2% +64\.9%", out, re.MULTILINE)
    assert "fewer than 3 assists leave bubbles to the trainer" in out
    for number in (1, 6, 8):
        assert "<svg" in (tmp_path / f"timelines_{number}.svg").read_text()


def test_ablation(tmp_path: Path) -> None:
    out = run("ablation.py", "--model", "wan2.1", "--out", str(tmp_path))
    assert "within 2 % of the fit's ranges: met" in out
    assert re.search(r"^\+TAG +2\.27-2\.75  2\.27-2\.75", out, re.MULTILINE)
    assert out.count("assumed, no target") == 3
    assert "<svg" in (tmp_path / "ablation.svg").read_text()


def test_policies(tmp_path: Path) -> None:
    out = run("policies.py", "--single", "60", "--runs", "10", "--out", str(tmp_path))
    assert re.search(r"^horizon +1\.0000 +1\.0000 +1\.0000 +1\.0000 +100\.0%$", out, re.MULTILINE)
    assert len(re.findall(r"^0\.5 +(?:hold|pull) +horizon", out, re.MULTILINE)) == 4
    assert out.rstrip().splitlines()[-2].endswith("met")
    assert "<svg" in (tmp_path / "policies.svg").read_text()


def test_sharding() -> None:
    out = run("sharding.py", "--chunks", "all", "--repeats", "1", "--steps", "2")
    # Eight blocks are gathered twice, for the forward and for its backward, and the rest of the network once.
    assert re.search(r"^full +all +17 +9 ", out, re.MULTILINE)
    assert re.search(r"^replica +9 ", out, re.MULTILINE), "every weight is gathered once"
    assert out.rstrip().endswith("the same curve up to 1e-3: met")


def test_kills() -> None:
    """One of a generator and one of a driver, soon after they have started."""
    soon = ("--start-gap", "2", "--seed", "190")
    out = run("kills.py", "--roles", "generator,driver", "--kills", "1", "--steps", "6", *soon)
    assert re.search(r"^generator +1 .* - +0 +0   1 of 1$", out, re.MULTILINE)
    assert re.search(r"^driver +1 .* \d\.\d\d +0 +0   1 of 1$", out, re.MULTILINE)
    assert out.rstrip().endswith("no orphan, no leak: met")


def test_a_short_soak() -> None:
    out = run("soak.py", "--minutes", "0.05", "--every", "2", "--seed", "1")
    assert re.search(r"^\d+ steps in 0\.05 minutes; killed: {'gen0': [1-9], 'trainer': \d}", out)
    (counts,) = re.findall(r", (\d+) of (\d+) as in the undisturbed run, bit for bit$", out, re.MULTILINE)
    assert counts[0] == counts[1]
    assert out.rstrip().endswith("the same curve, 0 orphans, 0 leaks: met")


SCRIPTS = [path for path in sorted((ROOT / "experiments").glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.name))
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
