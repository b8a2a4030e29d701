"""On-policy runs are bit-identical under every schedule and after a resume at any step, on real processes.

The three processes are started once. Each run begins from version 0 (or a checkpoint) by ``restore``, which forgets
everything that the processes did before; what is compared is a checkpoint: weights, optimizer state, moving average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from digen import Plan, Pool, ProcessWorker, ScheduleConfig, Scheduler
from digen.checkpoint import Checkpoints
from digen.config import RunConfig
from digen.events import AnyEvent, EventLog, StepCommitted, TagDecided, TaskFinished, read_events
from digen.runner import prepare
from digen.sched import check

from . import conftest
