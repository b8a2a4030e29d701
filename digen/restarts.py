"""The ``restarts`` section of a config: what a run survives, how often, and when a worker counts as hung."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from digen.schema import Section


class RestartsSection(Section):
    """How a run survives the loss of its workers. A loss changes the time that the run takes, not its result."""

    budget: Annotated[int, Field(ge=0)] = 3
    """Restarts of one worker within ``window_s``. A generator or scorer that has used them up is left out as long as
    there are others; otherwise the run ends. 0: nothing is retried, and the first loss ends the run."""
    window_s: Annotated[float, Field(gt=0)] = 3600.0
    """Time after which a restart no longer counts."""
    backoff_s: Annotated[float, Field(ge=0)] = 1.0
    """Wait before the second restart within ``window_s``, doubled before each further one; the first is at once."""
    max_backoff_s: Annotated[float, Field(ge=0)] = 60.0
    """Longest such wait."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """A micro-batch that fails so often in a row is quarantined: its groups are dropped if
    ``schedule.max_dropped_groups`` allows it, else the run ends."""
    snapshot_every: Annotated[int, Field(ge=0)] = 1
    """Steps between snapshots of the trainer: copies of its whole state (weights, optimizer, EMA) in shared memory that
    survive its process, so that its loss takes back no step that a snapshot holds. They take twice the memory of that
    state on the trainer's machine, which must have it at the first one. 0 takes none."""
    deadline_factor: Annotated[float, Field(gt=1)] = 20.0
    """A worker that can be killed counts as hung when a task takes so many times the mean of its kind."""
    deadline_floor_s: Annotated[float, Field(gt=0)] = 300.0
    """But not before this time."""
    first_deadline_s: Annotated[float, Field(gt=0)] = 3600.0
    """The deadline of a kind of task that has not been measured yet, and of the trainer when it gets its state back."""
