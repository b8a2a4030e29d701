"""What is done with a run's weights beside training: evaluation and export, each in one worker process.

Neither touches the run's folder. What they write appears under its name only when it is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from digen import __version__, judges
from digen.checkpoint import RunState, Weights, find, weights_of
from digen.config import RunConfig, dump_yaml, load_config
from digen.diffusion import families
from digen.errors import CheckpointError, ConfigError
from digen.events import Evaluated, read_events
from digen.extras import require
from digen.fleet import ROLES, build_process
from digen.runner import evaluation_request, prepare
from digen.types import EvaluationReport, EvaluationRequest
from digen.workers.handle import TargetHandle

EVALUATION, PROVENANCE = "evaluation.json", "provenance.json"
"""What says which weights were evaluated, or exported, beside the result."""
_EXPORTER = "digen.diffusion.export:Exporter"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights of a run."""

    path: Path
    state: RunState
    weights: Weights
    file: Path
    """What holds them."""

    @classmethod
    def find(cls, folder: Path, which: str | Path, weights: Weights, family: str) -> Checkpoint:
        """The checkpoint at a path, or the ``latest`` in a run's ``checkpoints`` folder.

        Raises:
            CheckpointError: there is none, it is broken, of another family, or has no moving average.
        """
        path, state = find(folder, which)
        if state.family != family:
            raise CheckpointError(f"checkpoint {path} is of family {state.family!r}, the config of {family!r}")
        return cls(path, state, weights, weights_of(path, weights))

    @property
    def label(self) -> str:
        """A name for a folder: ``step-000050`` or ``step-000050-ema``."""
        return f"step-{self.state.version:06d}" + ("-ema" if self.weights == "ema" else "")

    def facts(self) -> dict[str, Any]:
        """What identifies the weights."""
        digest = hashlib.sha256((self.path / "manifest.json").read_bytes()).hexdigest()
        facts = {"path": str(self.path.resolve()), "manifest_sha256": digest}
        return {"version": self.state.version, "weights": self.weights, "checkpoint": facts}


def evaluate(
    config: RunConfig, *, checkpoint: str | Path | None = None, weights: Weights = "raw", out: Path | None = None
) -> tuple[EvaluationReport, Path]:
    """Evaluate a checkpoint, or the model's folder, as the config's ``evaluation`` says.

    Args:
        config: of the run; its ``optimizer`` and ``schedule`` do not matter here.
        checkpoint: ``"latest"`` in the run's folder, or a path; ``None`` for the model before any training.
        weights: of the checkpoint.
        out: the folder to be made; by default ``NAME-eval/step-000050``, beside the run's folder.

    Returns:
        The report, and the folder: ``evaluation.json``, a grid of samples, ``config.yaml``.

    Raises:
        ConfigError, CheckpointError: before anything was started.
        DigenError: the evaluation failed.
        KeyboardInterrupt: interrupted.
    """
    prepared = prepare(config)
    found = None
    if checkpoint is not None:
        found = Checkpoint.find(config.folder / "checkpoints", checkpoint, weights, config.model.family)
    elif weights == "ema":
        raise ConfigError("--weights ema needs a --checkpoint: the model before training has no moving average")
    for extra in prepared.extras:
        require(extra)
    judges.require(config)
    label = found.label if found is not None else "base"
    folder = out if out is not None else config.folder.with_name(f"{config.run.name}-eval") / label
    with _made(folder) as unfinished:
        request = evaluation_request(prepared, unfinished / "samples.png")
        report = asyncio.run(
            _evaluate(
                config,
                request,
                log_dir=unfinished.resolve() / "logs",
                weights=str(found.file.resolve()) if found is not None else None,
                version=found.state.version if found is not None else 0,
            )
        )
        facts = found.facts() if found is not None else {"version": 0, "weights": "base", "checkpoint": None}
        facts |= {"num_samples": report.num_samples, "seed": request.seed, "metrics": report.metrics}
        _write_json(unfinished / EVALUATION, _about(config) | facts)
        (unfinished / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    return report, folder


def export(source: Path, out: Path, *, weights: Weights = "raw", overrides: dict[str, Any] | None = None) -> Path:
    """Write a run's policy as diffusers takes it: a pipeline's folder, or with ``model.lora`` an adapter.

    Beside it lie the run's ``config.yaml``, its ``metrics.jsonl`` up to the exported version, and ``provenance.json``:
    version, checkpoint, base model, evaluations of that version in the run, and the SHA-256 of every file.

    Args:
        source: a run's folder, whose newest intact checkpoint is taken, or a checkpoint in it.
        out: the folder to be made.
        weights: of the checkpoint.
        overrides: fields of the run's config, for example ``model.path`` where the base model has moved.

    Returns:
        ``out``.

    Raises:
        ConfigError, CheckpointError: before anything was started.
        DigenError: the export failed.
        KeyboardInterrupt: interrupted.
    """
    is_run = (source / "checkpoints").is_dir()
    run = source if is_run else source.resolve().parent.parent
    which = "latest" if is_run else source
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{source} is neither a run's folder nor a checkpoint in one: there is no {run / 'config.yaml'}"
        )
    config = load_config(run / "config.yaml", overrides or {})
    family = families.lookup(config.model.family)
    families.source(config.model)
    found = Checkpoint.find(run / "checkpoints", which, weights, config.model.family)
    for extra in family.extras:
        require(extra)
    with _made(out) as unfinished:
        worker = _worker(config, _EXPORTER, log_dir=None, weights=str(found.file.resolve()))
        hashes = asyncio.run(_call(worker, "save", str(unfinished.resolve())))
        shutil.copy(run / "config.yaml", unfinished)
        _copy_metrics(run, unfinished, found.state.version)
        facts = found.facts() | {"base_sha256": hashes["base"], "sha256": hashes["files"]}
        facts["evaluated_in_run"] = _evaluations(run / "events.jsonl", found.state.version)
        _write_json(unfinished / PROVENANCE, _about(config) | facts)
    return out


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder``, which becomes it in the end; on an error it stays if it holds logs.

    Raises:
        ConfigError: ``folder`` exists or cannot be made.
    """
    if folder.exists():
        raise ConfigError(f"the folder {folder} exists; choose another one with --out, or delete it")
    unfinished = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made: {error.strerror}; check --out") from None
    try:
        yield unfinished
        unfinished.rename(folder)
    except BaseException as error:
        if (unfinished / "logs").is_dir():
            error.add_note(f"the worker's log is in {unfinished / 'logs'}")
        else:
            shutil.rmtree(unfinished)
        raise


def _worker(config: RunConfig, target: str, *, log_dir: Path | None, **kwargs: Any) -> TargetHandle:
    name = "gen0" if config.num_generators else "trainer"  # whose GPU and threads it has
    return build_process(config, name, target, log_dir=log_dir, alone=True, **kwargs)


async def _evaluate(
    config: RunConfig, request: EvaluationRequest, *, log_dir: Path, weights: str | None, version: int
) -> EvaluationReport:
    async with judges.judged(config, log_dir) as served:
        target = f"{ROLES}:EvaluatorTarget"
        worker = _worker(served, target, log_dir=log_dir, weights=weights, version=version)
        report: EvaluationReport = await _call(worker, "evaluate", request)
    return report


async def _call(worker: TargetHandle, method: str, argument: Any) -> Any:
    async with worker:
        return await worker.call(method, argument)


def _about(config: RunConfig) -> dict[str, Any]:
    model = config.model
    base = str(families.source(model)) if model.path is not None else f"embedded in digen: {model.family}"
    return {"digen": __version__, "run": config.run.name, "family": model.family, "base_model": base}


def _copy_metrics(run: Path, folder: Path, version: int) -> None:
    """The steps that led to ``version``."""
    source = run / "metrics.jsonl"
    if source.is_file():
        lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < version]
        (folder / "metrics.jsonl").write_text("".join(kept), encoding="utf-8")


def _evaluations(events: Path, version: int) -> list[dict[str, Any]]:
    """Of the weights that generators held at ``version``."""
    if not events.is_file():
        return []
    return [
        {"num_samples": event.num_samples, "metrics": event.metrics}
        for event in read_events(events)
        if isinstance(event, Evaluated) and event.version == version
    ]


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n")
