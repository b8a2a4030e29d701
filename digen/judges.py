"""The servers of vision-language judges that a config has the run start: their workers, and who asks them.

They run before the other workers and end after them. What a scorer is told of a judge is where it listens.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from digen.config import RewardSection, RunConfig
from digen.diffusion.rewards import HUB
from digen.errors import ConfigError, MissingExtra, WorkerError
from digen.resources import JudgeSection
from digen.workers import Pool, ProcessWorker

REWARD = "judge"
"""The built-in reward that takes ``server``."""
_TARGET = "digen.diffusion.engines.vllm_judge:JudgeServer"
_START_GRACE_S = 30.0
"""For the worker's own start, and for it to end a server that was not ready in time."""


def names(config: RunConfig) -> dict[str, list[str]]:
    """The names of the workers of each judge: ``judge0``, ``judge1`` for two replicas of ``judge``."""
    return {
        name: [f"{name}{number}" for number in range(judge.replicas)] for name, judge in config.workers.judges.items()
    }


def check(config: RunConfig) -> None:
    """Check the judges of a config, and the rewards that name them.

    Raises:
        ConfigError: a name is unknown or taken, no reward asks a judge, its folder is missing, or ``sleep`` does not
            fit.
    """
    judges, asked = config.workers.judges, set()
    for kwargs in _served(config.reward):
        name = kwargs["server"]
        if name not in judges:
            close = difflib.get_close_matches(str(name), list(judges), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(judges) or 'none'}"
            raise ConfigError(f"the reward judge names the server {name!r}, which workers.judges has not; {hint}")
        if given := sorted({"url", "model", "sleep"} & kwargs.keys()):
            raise ConfigError(f"the reward judge names a server, from which {', '.join(given)} follows; leave it out")
        asked.add(name)
    for name, judge in judges.items():
        if name not in asked:
            raise ConfigError(f"workers.judges.{name}: no reward judge names it; set its kwargs to server: {name}")
        if name in {"gen", "scorer", "trainer"}:
            raise ConfigError(f"workers.judges.{name}: a judge cannot be called as other workers are; rename it")
        if not judge.model.startswith(HUB) and not (Path(judge.model) / "config.json").is_file():
            raise ConfigError(
                f"workers.judges.{name}.model: {judge.model} is not a folder that holds a model (there is no "
                f"config.json); give one, or {HUB}ORG/NAME for one on the hub"
            )
        if not judge.gpus and config.model.device.startswith("cuda"):
            raise ConfigError(f"model.device is {config.model.device}, but workers.judges.{name}.gpus names no GPU")
        if judge.sleep and not judge.gpus:
            raise ConfigError(f"workers.judges.{name}: sleep lets GPU memory go, but its gpus are none")
        if judge.sleep and (others := _several_score(config)):
            raise ConfigError(
                f"workers.judges.{name}: sleep needs a single process that scores, which would put the judge to sleep "
                f"under another one, but {others}; set sleep to false"
            )


def require(config: RunConfig) -> None:
    """Check that what the servers need is on this machine, as far as that shows without starting anything.

    Raises:
        ConfigError: an interpreter is missing.
        MissingExtra: the driver's own interpreter lacks the server.
    """
    for name, judge in config.workers.judges.items():
        if judge.python is None:
            extra = {"vllm": "vllm", "transformers": "diffusion"}[judge.command]
            if find_spec(judge.command) is None:
                raise MissingExtra(judge.command, extra)
        elif not os.access(judge.python, os.X_OK) or judge.python.is_dir():
            raise ConfigError(f"workers.judges.{name}.python: {judge.python} is not an interpreter; give its path")


def judge_workers(config: RunConfig, log_dir: Path) -> list[ProcessWorker]:
    """The workers that start and own the servers, not started. A server's output goes to ``NAME.server.log``."""
    section = config.workers
    workers = []
    for name, judge in section.judges.items():
        for number, worker in enumerate(names(config)[name]):
            gpus = judge.gpus_of(number)
            workers.append(
                ProcessWorker(
                    worker,
                    _TARGET,
                    kwargs={
                        "model": _model(judge),
                        "log": str(log_dir / f"{worker}.server.log"),
                        "name": worker,
                        "command": judge.command,
                        "python": None if judge.python is None else str(judge.python.absolute()),
                        "args": list(judge.args),
                        "env": judge.env,
                        "num_gpus": len(gpus),
                        "sleep": judge.sleep,
                        "start_timeout_s": judge.start_timeout_s,
                    },
                    gpus=gpus,
                    threads=section.threads,
                    log_dir=log_dir,
                    start_timeout_s=judge.start_timeout_s + _START_GRACE_S,
                    heartbeat_timeout_s=section.heartbeat_timeout_s,
                    stop_grace_s=max(section.stop_grace_s, 5.0),
                )
            )
    return workers


def with_judges(config: RunConfig, urls: Mapping[str, Sequence[str]]) -> RunConfig:
    """``config`` for the workers that score: each ``server: NAME`` gives way to the URLs of its servers.

    Args:
        config: checked by :func:`check`.
        urls: of every judge that a reward names.
    """
    if not config.workers.judges:
        return config
    section = config.reward
    heads = tuple(
        head.model_copy(update={"kwargs": _resolved(config, head.kwargs, urls)}) if _names_server(head) else head
        for head in section.resolved_heads
    )
    if section.heads:
        return config.model_copy(update={"reward": section.model_copy(update={"heads": heads})})
    return config.model_copy(update={"reward": section.model_copy(update={"kwargs": heads[0].kwargs})})


@asynccontextmanager
async def judged(config: RunConfig, log_dir: Path) -> AsyncIterator[RunConfig]:
    """Run the servers of a config; inside, the config for the workers that score.

    An error inside gets a note about each server that is not well.

    Raises:
        WorkerError: a server did not start.
        ConfigError: it cannot be started, or has no sleep mode.
    """
    workers = judge_workers(config, log_dir)
    if not workers:
        yield config
        return
    async with Pool(workers) as pool:
        urls = {name: [await pool[worker].call("url") for worker in group] for name, group in names(config).items()}
        try:
            yield with_judges(config, urls)
        except Exception as error:
            for worker in workers:
                await _add_note(error, worker)
            raise


async def _add_note(error: Exception, worker: ProcessWorker) -> None:
    try:
        await worker.call("check")
    except WorkerError as why:
        error.add_note(str(why))


def _several_score(config: RunConfig) -> str:
    """Which processes may score at the same time, or the empty string if it is a single one."""
    section = config.workers
    prefix, count = ("scorer", section.scorers) if section.scorers else ("gen", config.num_generators)
    scoring = [f"{prefix}{number}" for number in range(count)] or ["trainer"]
    processes = sum(map(section.num_ranks, scoring))
    if processes > 1:
        return f"{', '.join(scoring)} have {processes}"
    return "evaluation.every has gen0 score beside scorer0" if section.scorers and config.evaluation.every else ""


def _served(section: RewardSection) -> list[dict[str, Any]]:
    return [head.kwargs for head in section.resolved_heads if _names_server(head)]


def _names_server(head: Any) -> bool:
    return head.name == REWARD and "server" in head.kwargs


def _resolved(config: RunConfig, kwargs: Mapping[str, Any], urls: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    judge = config.workers.judges[kwargs["server"]]
    rest = {key: value for key, value in kwargs.items() if key != "server"}
    sleep = {"sleep": True} if judge.sleep else {}
    return rest | {"url": list(urls[kwargs["server"]]), "model": _model(judge)} | sleep


def _model(judge: JudgeSection) -> str:
    """What the server calls it."""
    hub = judge.model.removeprefix(HUB)
    return hub if hub != judge.model else str(Path(judge.model).absolute())
