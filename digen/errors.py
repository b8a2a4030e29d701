"""Every error that digen raises on purpose.

::

    DigenError
    ├── ConfigError            a field, file or option is wrong; raised before any work starts
    │   ├── PlanError          the arithmetic of prompts, samples and micro-batches does not work out
    │   └── MissingExtra       an optional dependency is absent; names the extra to install
    ├── WorkerError            something went wrong on one worker (``.worker``, ``.task``)
    │   ├── WorkerDied         the process ended (``.exit_code`` or ``.signal``, ``.log_tail``)
    │   ├── WorkerTimeout      it did not answer in time
    │   ├── WorkerRaised       its code raised; the remote traceback is attached as a note
    │   ├── RankFailed         another rank of the same worker failed, or was not met
    │   ├── PayloadLost        what a call reads is gone, with the machine that held it; its worker is well
    │   └── ProtocolError      it answered something that is not an answer
    ├── RewardError            a reward could not be computed, or is not a finite number
    ├── NumericsError          a latent, log-probability, loss or gradient is not finite, or a floor is too high
    ├── Diverged               a step's metric has left the limits that the config sets
    ├── StalenessViolation     a micro-batch was consumed outside the staleness bound: a bug in digen
    ├── InvariantViolation     an event contradicts the semantics of the schedule: a bug in digen
    ├── StepFailed             a step cannot be completed
    ├── OutputError            a file of the run cannot be written: a full disk, say
    └── CheckpointError        a checkpoint is missing, corrupt, or of another run

Every message says what happened, where, and what to do about it.
"""

from __future__ import annotations

import signal as _signal


class DigenError(Exception):
    """Base of all errors that digen raises on purpose."""


class ConfigError(DigenError):
    """A configuration value, option or file is wrong. Raised before any worker starts where possible."""


class PlanError(ConfigError):
    """Prompts, samples, ranks and micro-batches do not divide; the message names numbers that would."""


class MissingExtra(ConfigError):
    """An optional dependency is not installed.

    Args:
        module: the import that failed.
        extra: the extra of ``digen-rl`` that provides it.
    """

    def __init__(self, module: str, extra: str) -> None:
        self.module = module
        self.extra = extra
        super().__init__(f"{module} is not installed; install it with: pip install 'digen-rl[{extra}]'")

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return MissingExtra, (self.module, self.extra)


class WorkerError(DigenError):
    """Something went wrong on one worker.

    Args:
        message: what happened and what to do.
        worker: the worker's name.
        task: what it was doing, for example ``"generate step 3 micro-batch 5"``; empty when idle.
    """

    def __init__(self, message: str, *, worker: str = "", task: str = "") -> None:
        self.worker = worker
        self.task = task
        super().__init__(message)


class WorkerDied(WorkerError):
    """A worker process ended while it was needed.

    ``exit_code`` is the exit status, or ``None`` when a signal ended it; ``signal`` the reverse.
    ``log_tail`` holds the last lines that the worker wrote. ``how`` says in words how it ended, where neither a status
    nor a signal tells. ``peak_bytes`` is the most memory that the process had, where that is known: a system that runs
    out of it kills with SIGKILL.
    """

    def __init__(
        self,
        *,
        worker: str,
        task: str = "",
        exit_code: int | None = None,
        signal: int | None = None,
        log_tail: str = "",
        log_path: str = "",
        how: str = "",
        peak_bytes: int = 0,
    ) -> None:
        self.exit_code = exit_code
        self.signal = signal
        self.log_tail = log_tail
        self.peak_bytes = peak_bytes
        how = how or (f"killed by {_signal_name(signal)}" if signal is not None else f"exit code {exit_code}")
        message = f"worker {worker!r} died ({how}) " + (f"during {task}" if task else "while idle")
        if peak_bytes and signal == _signal.SIGKILL:
            message += f"; it had up to {peak_bytes / 2**30:.2f} GiB of memory: if it was not killed by hand, see dmesg"
        if log_path:
            message += f"; its log is {log_path}"
        super().__init__(message, worker=worker, task=task)
        if log_tail:
            self.add_note(f"last lines of {worker}'s log:\n{log_tail}")


class WorkerTimeout(WorkerError):
    """A worker did not answer within its deadline."""


class WorkerRaised(WorkerError):
    """The worker's own code raised an exception; its traceback is attached as a note."""


class RankFailed(WorkerError):
    """A rank of a worker gave up because of another one, whose own error says why."""


class PayloadLost(WorkerError):
    """A payload that a call was to read is gone with the machine that held it, or with who was writing it still.

    ``worker`` made the payload; ``task`` needs it, on a worker that is well. Make it again, and repeat the call.
    """


class ProtocolError(WorkerError):
    """A worker sent bytes that are not a valid answer to a request that was made."""


class RewardError(DigenError):
    """A reward could not be computed or is not a finite number. Never replaced by a default."""


class NumericsError(DigenError):
    """A latent, log-probability, loss or gradient is not finite, or log-prob noise exceeds what the clip allows."""


class Diverged(DigenError):
    """A metric of a step has left the limits of ``run.stop_above`` and ``run.stop_below``."""


class StalenessViolation(DigenError):
    """An update was about to consume a micro-batch outside the staleness bound. A bug in digen, never a user error."""


class InvariantViolation(DigenError):
    """An event contradicts the schedule's semantics (see :mod:`digen.sched.invariants`)."""


class StepFailed(DigenError):
    """A step cannot be completed."""


class OutputError(DigenError):
    """A file of the run cannot be written: the disk is full, was taken away, or refuses."""


class CheckpointError(DigenError):
    """A checkpoint is missing, incomplete, corrupt, belongs to another run, or cannot be written."""


def _signal_name(number: int) -> str:
    try:
        return _signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
