"""Run every long proof and benchmark and write what they print to ``experiments/results/``, dated, with versions.

python experiments/prove.py [NAME ...]      all of them, or some; about 20 minutes on two cores
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

PROOFS: dict[str, list[str]] = {
    "overhead": ["overhead.py"],
    "transport": ["transport.py"],
    "invariants": ["invariants.py", "--runs", "20000"],
    "demo": ["demo.py"],
    "modes": ["modes.py"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PROOFS], metavar="NAME", help=", ".join(PROOFS))
    names = parser.parse_args().names or list(PROOFS)
    RESULTS.mkdir(exist_ok=True)
    failed = []
    for name in names:
        script, *arguments = PROOFS[name]
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        process = subprocess.run(
            [sys.executable, str(HERE / script), *arguments], capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - began
        if process.returncode:
            failed.append(name)
            print(process.stderr, file=sys.stderr)
        text = f"{header(name, arguments, seconds, process.returncode)}\n{process.stdout}"
        (RESULTS / f"{name}.txt").write_text(text)
        print(f"{name}: {'failed' if process.returncode else 'done'} in {seconds:.0f} s", flush=True)
    return bool(failed)


def header(name: str, arguments: list[str], seconds: float, code: int) -> str:
    """When, on what, and with which versions."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    versions = ", ".join(f"{package} {found}" for package in PACKAGES if (found := _version(package)))
    return (
        f"# {name} {' '.join(arguments)}\n# {now}, {seconds:.0f} s, exit {code}\n"
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
