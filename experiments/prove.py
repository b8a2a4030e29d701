"""Run every long proof and benchmark and write what they print to ``experiments/results/``, dated, with versions.

python experiments/prove.py [NAME ...]      all of them, or some; about an hour on two cores
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PACKAGES = ("digen-rl", "torch", "diffusers", "transformers", "numpy", "msgspec", "ray")

PROOFS: dict[str, tuple[list[str], dict[str, str]]] = {
    "overhead": (["experiments/overhead.py"], {}),
    "transport": (["experiments/transport.py"], {}),
    "weights": (["experiments/weights.py"], {}),
    "detection": (["experiments/detection.py"], {}),
    "saving": (["experiments/saving.py"], {}),
    "faults": (["experiments/faults.py"], {}),
    "mutations": (["experiments/mutations.py"], {}),
    "kills": (["experiments/kills.py", "--kills", "30"], {}),
    "soak": (["experiments/soak.py", "--minutes", "5"], {}),
    "fuzz": (
        [
            *("-m", "pytest", "-q", "--hypothesis-profile=fuzz", "-k", "garbage_is or tampered or any_type or damaged"),
            *("tests/workers/test_frames.py", "tests/test_config.py", "tests/run/test_checkpoint.py"),
        ],
        {},
    ),
    "invariants": (["-m", "pytest", "-q", "tests/sched/test_properties.py"], {"DIGEN_PROPERTY_RUNS": "20000"}),
    "timelines": (["experiments/timelines.py"], {}),
    "ablation": (["experiments/ablation.py"], {}),
    "policies": (["experiments/policies.py"], {}),
    "search": (["experiments/search_time.py"], {}),
    "search-verified": (["experiments/search_time.py", "--verify", "5000"], {}),
    "demo": (["experiments/demo.py"], {}),
    "demo-nft": (["experiments/demo.py", "--algorithm", "diffusion_nft"], {}),
    "modes": (["experiments/modes.py"], {}),
    "assist": (["experiments/assist.py"], {}),
    "scaling": (["experiments/scaling.py"], {}),
    "staleness": (["experiments/staleness.py"], {}),
    "sharding": (["experiments/sharding.py"], {}),
    "ray": (["experiments/ray/three_nodes.py"], {}),
}
"""Name: (arguments of the interpreter, environment)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PROOFS], metavar="NAME", help=", ".join(PROOFS))
    names = parser.parse_args().names or list(PROOFS)
    RESULTS.mkdir(exist_ok=True)
    failed = []
    for name in names:
        arguments, environment = PROOFS[name]
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=HERE.parent,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
        if process.returncode:
            failed.append(name)
            print(process.stderr, file=sys.stderr)
        command = " ".join([*(f"{key}={value}" for key, value in environment.items()), "python", *arguments])
        text = f"{header(command, seconds, process.returncode)}\n{process.stdout}"
        (RESULTS / f"{name}.txt").write_text(text)
        print(f"{name}: {'failed' if process.returncode else 'done'} in {seconds:.0f} s", flush=True)
    return bool(failed)


def header(command: str, seconds: float, code: int) -> str:
    """When, on what, and with which versions."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    versions = ", ".join(f"{package} {found}" for package in PACKAGES if (found := _version(package)))
    return (
        f"# {command}\n# {now}, {seconds:.0f} s, exit {code}\n"
        f"# {platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n"
        f"# {versions}\n"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
