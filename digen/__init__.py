"""digen: an asyncio scheduler that post-trains diffusion and flow models with RL on two pools of GPUs.

Importing it loads neither torch nor ray nor pydantic, starts no loop, sets no signal handler and configures no
logging. Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digen.config import RunConfig, ScheduleConfig, load_config
    from digen.errors import (
        CheckpointError,
        ConfigError,
        DigenError,
        Diverged,
        InvariantViolation,
        MissingExtra,
        NumericsError,
        OutputError,
        PayloadLost,
        PlanError,
        ProtocolError,
        RewardError,
        StalenessViolation,
        StepFailed,
        WorkerDied,
        WorkerError,
        WorkerRaised,
        WorkerTimeout,
    )
    from digen.handles import Generator, Scorer, Trainer
    from digen.plan import Plan
    from digen.runner import RunReport, arun, run
    from digen.sched import Scheduler
    from digen.types import (
        CommitReport,
        GroupSlice,
        LoadReport,
        MicroBatch,
        Payload,
        Prompt,
        Publication,
        Rollout,
        Scored,
        StepReport,
        UpdateReport,
    )
    from digen.workers import InProcessWorker, Pool, ProcessWorker, SimWorker

__version__ = "0.1.0"

_HOME = {
    "CheckpointError": "errors",
    "CommitReport": "types",
    "ConfigError": "errors",
    "DigenError": "errors",
    "Diverged": "errors",
    "Generator": "handles",
    "GroupSlice": "types",
    "InProcessWorker": "workers",
    "InvariantViolation": "errors",
    "LoadReport": "types",
    "MicroBatch": "types",
    "MissingExtra": "errors",
    "NumericsError": "errors",
    "OutputError": "errors",
    "Payload": "types",
    "PayloadLost": "errors",
    "Plan": "plan",
    "PlanError": "errors",
    "Pool": "workers",
    "ProcessWorker": "workers",
    "Prompt": "types",
    "ProtocolError": "errors",
    "Publication": "types",
    "RewardError": "errors",
    "Rollout": "types",
    "RunConfig": "config",
    "RunReport": "runner",
    "ScheduleConfig": "config",
    "Scheduler": "sched",
    "Scored": "types",
    "Scorer": "handles",
    "SimWorker": "workers",
    "StalenessViolation": "errors",
    "StepFailed": "errors",
    "StepReport": "types",
    "Trainer": "handles",
    "UpdateReport": "types",
    "WorkerDied": "errors",
    "WorkerError": "errors",
    "WorkerRaised": "errors",
    "WorkerTimeout": "errors",
    "arun": "runner",
    "load_config": "config",
    "run": "runner",
}

__all__ = [
    "CheckpointError",
    "CommitReport",
    "ConfigError",
    "DigenError",
    "Diverged",
    "Generator",
    "GroupSlice",
    "InProcessWorker",
    "InvariantViolation",
    "LoadReport",
    "MicroBatch",
    "MissingExtra",
    "NumericsError",
    "OutputError",
    "Payload",
    "PayloadLost",
    "Plan",
    "PlanError",
    "Pool",
    "ProcessWorker",
    "Prompt",
    "ProtocolError",
    "Publication",
    "RewardError",
    "Rollout",
    "RunConfig",
    "RunReport",
    "ScheduleConfig",
    "Scheduler",
    "Scored",
    "Scorer",
    "SimWorker",
    "StalenessViolation",
    "StepFailed",
    "StepReport",
    "Trainer",
    "UpdateReport",
    "WorkerDied",
    "WorkerError",
    "WorkerRaised",
    "WorkerTimeout",
    "arun",
    "load_config",
    "run",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'digen' has no attribute {name!r}")
    value = getattr(import_module(f"digen.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
