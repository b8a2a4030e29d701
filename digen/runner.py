"""One run, from config to report: the only place that wires plan, workers, scheduler and sinks together.

``run`` is for scripts and the command line, ``arun`` for code that is already in an event loop (a notebook). Both
check everything that can be checked first, and start processes only then.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import structlog

from digen import judges, placement
from digen.checkpoint import Checkpoints, completed
from digen.config import RunConfig, dump_yaml
from digen.data import PromptSet, load_prompts
from digen.diffusion import algorithms, families, rewards
from digen.errors import ConfigError, DigenError, InvariantViolation, OutputError
from digen.events import (
    AnyEvent,
    CheckpointSaved,
    Evaluated,
    EventLog,
    Sink,
    StepCommitted,
    fan_out,
    read_events,
    tolerated,
)
from digen.extras import require
from digen.files import refuse_special, unwritable
from digen.fleet import build_workers
from digen.groups import GroupAssembler
from digen.guard import Guard
from digen.machine import look
from digen.observe.fold import Fold
from digen.observe.metrics import MetricsLog
from digen.observe.progress import Progress
from digen.observe.report import text_summary, write_report
from digen.observe.text import escape_text
from digen.observe.trace import write_trace
from digen.plan import Plan
from digen.quarantine import Quarantine
from digen.sched import Scheduler
from digen.signals import NUMBERS, preempted
from digen.types import EvaluationReport, EvaluationRequest, StepReport, derive_seed
from digen.workers import Pool

if TYPE_CHECKING:
    from collections.abc import Sequence

log = structlog.get_logger("digen")

_LOCK = "lock"
_QUARANTINE = "quarantine.jsonl"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A config that was checked as far as that goes without starting anything."""

    config: RunConfig
    prompts: PromptSet
    plan: Plan
    extras: tuple[str, ...]
    """Extras of ``digen-rl`` that the run needs."""
    defer_divisor: bool = False
    """Whether a divisor that all advantages of a step share may wait for its commit: the algorithm says so."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run came to."""

    folder: Path
    outcome: str
    """completed, drained (the first Ctrl-C: the step was finished and a checkpoint saved), preempted (the same, for a
    SIGUSR1) or stopped (the second Ctrl-C)."""
    steps: tuple[StepReport, ...]
    values: dict[str, Any]
    """The content of ``report.json``."""

    def summary(self) -> str:
        """The report as text."""
        return text_summary(self.values)


def prepare(config: RunConfig) -> Prepared:
    """Check a config: model folder, reward, prompts, worker names, and the plan's arithmetic.

    Raises:
        ConfigError: names the field or file and the mend.
    """
    family = families.lookup(config.model.family)
    families.source(config.model)
    placement.check(config)
    prompts = load_prompts(config.prompts, family.prompts, config.run.seed)
    plan = Plan(
        prompts.train,
        num_steps=config.run.num_steps,
        prompts_per_step=config.plan.prompts_per_step,
        samples_per_prompt=config.plan.samples_per_prompt,
        micro_batch_size=config.plan.micro_batch_size,
        axis=config.schedule.resolved_axis,
        seed=config.run.seed,
        shuffle=config.prompts.shuffle,
    )
    settings = algorithms.check(config, plan.step(0))
    _check_metadata(prompts, family.metadata, config.model.family)
    extras = (*family.extras, *rewards.check(config.reward, (*prompts.train, *prompts.held_out)))
    extras += ("video",) * (config.evaluation.video == "mp4")
    build_workers(config)
    defer_divisor = settings is not None and settings.defers_divisor
    advantage = config.algorithm.advantage
    if config.plan.samples_per_prompt == 1 and advantage.kind != "global":
        raise ConfigError(
            f"plan.samples_per_prompt is 1, so that every advantage of kind {advantage.kind} is 0 and nothing is "
            "learnt; draw at least 2, or set algorithm.advantage.kind=global"
        )
    groups = GroupAssembler(plan.step(0), advantage, weights=config.reward.weights, defer_divisor=defer_divisor)
    if groups.waits or groups.defers:
        stream, wait = "advantages stream, divided at commit", "advantages wait for the step's last reward"
        log.info(stream if groups.defers else wait, kind=advantage.kind)
    return Prepared(config, prompts, plan, tuple(dict.fromkeys(extras)), defer_divisor)


def require_machine(prepared: Prepared) -> None:
    """Refuse to start workers that this machine cannot run, and log what may not be meant.

    Raises:
        ConfigError: names everything that is missing, with its mend.
        MissingExtra: an extra is not installed.
    """
    for extra in prepared.extras:
        require(extra)
    machine = look()
    placement.require(prepared.config, machine, prepared.plan)
    for remark in placement.remarks(prepared.config, machine, prepared.plan):
        log.warning(remark)


def _check_metadata(prompts: PromptSet, keys: tuple[str, ...], family: str) -> None:
    for prompt in (*prompts.train, *prompts.held_out):
        for key in keys:
            if key not in prompt.metadata:
                raise ConfigError(
                    f"prompts.source: prompt {escape_text(prompt.text, limit=60)!r} has no {key!r}, which the {family} "
                    "family needs beside every prompt: use a jsonl or csv file, or a data set, with such a column"
                )


def run(config: RunConfig, *, resume: str | Path | None = None, progress: bool = True) -> RunReport:
    """Run a config to its end.

    In the main thread the first Ctrl-C (or SIGTERM) finishes the step and saves a checkpoint, the second stops at
    once. Before the first step and during an evaluation there is nothing to finish: the first one ends the run.
    SIGUSR1 is a batch system's notice that the run is about to be ended: the step is finished and a checkpoint saved.

    Args:
        config: from :func:`digen.load_config`.
        resume: ``"latest"`` or a checkpoint's path: continue the run in its folder.
        progress: show a live view on a terminal, else a line a step.

    Raises:
        ConfigError: before anything was trained.
        CheckpointError: there is nothing to resume from.
        DigenError: the run failed; the cause is chained.
        KeyboardInterrupt: interrupted outside of the steps.
        RuntimeError: called in a running event loop.
    """
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("digen.run starts an event loop of its own; in a running one: await digen.arun(config)")
    signals = threading.current_thread() is threading.main_thread()
    try:
        return asyncio.run(_arun(config, resume=resume, progress=progress, signals=signals))
    except asyncio.CancelledError:  # by a signal
        raise KeyboardInterrupt from None


async def arun(config: RunConfig, *, resume: str | Path | None = None, progress: bool = True) -> RunReport:
    """:func:`run` inside a running event loop; installs no signal handler. Cancel it to stop at once."""
    return await _arun(config, resume=resume, progress=progress, signals=False)


def how_to_continue(folder: Path) -> str:
    """What to do after a run in ``folder`` has ended early, in one line."""
    if saved := completed(folder / "checkpoints"):
        left_out = ""
        if (folder / _QUARANTINE).is_file():
            left_out = f"; with schedule.max_dropped_groups above 0 it leaves out what is in {folder / _QUARANTINE}"
        return f"the last checkpoint is {saved[-1]}; continue from it with --resume latest{left_out}"
    if _is_untouched(folder):
        return "nothing was trained; the same command starts again"
    if not folder.exists():
        return f"there is no {folder} any more; the same command without --resume starts again"
    if (folder / _QUARANTINE).is_file():
        return (
            f"no checkpoint was saved; delete all in {folder} but {_QUARANTINE} to start again, and set "
            "schedule.max_dropped_groups above 0 to leave out what that lists"
        )
    return f"no checkpoint was saved; delete {folder} to start again"


async def _arun(config: RunConfig, *, resume: str | Path | None, progress: bool, signals: bool) -> RunReport:
    prepared = prepare(config)
    require_machine(prepared)
    folder = config.folder
    checkpoints = checkpoints_of(prepared)
    with _claimed(folder, resume is not None) as claim, contextlib.ExitStack() as stack:
        await asyncio.to_thread(_check_record, folder / "events.jsonl")
        checkpoint = None if resume is None else await asyncio.to_thread(_find, checkpoints, resume, config)
        _make_weights_folder(config)
        _write_config(config, folder)
        quarantine = Quarantine(folder / _QUARANTINE)
        if quarantine.found and config.schedule.max_dropped_groups == 0:
            log.warning(
                "schedule.max_dropped_groups is 0, so that what is in quarantine is tried again",
                quarantine=str(folder / _QUARANTINE),
            )
        sinks: list[Sink] = [
            claim,
            checkpoints.note,
            stack.enter_context(EventLog(folder / "events.jsonl")),
            quarantine,
            stack.enter_context(MetricsLog(folder / "metrics.jsonl")),
        ]
        if progress:
            count = config.num_generators + config.workers.scorers + 1 + sum(map(len, judges.names(config).values()))
            logs = "Ray's session folder on their nodes" if config.workers.type == "ray" else folder / "logs"
            print(f"starting {count} worker{'s' * (count > 1)}, logs in {logs}", flush=True)
            sinks.append(tolerated(stack.enter_context(Progress())))
        try:
            steps, outcome = await _train(prepared, checkpoints, checkpoint, quarantine, sinks, signals=signals)
            claim.check()
        except BaseException:
            with contextlib.suppress(OSError, ValueError, DigenError):  # none of them explains why the run failed
                claim.check()
                _write_reports(folder)
            raise
        values = _write_reports(folder)
    return RunReport(folder, outcome, steps, values)


def checkpoints_of(prepared: Prepared) -> Checkpoints:
    """The checkpoints in a run's folder, and what one of them must fit."""
    config = prepared.config
    return Checkpoints(
        config.folder / "checkpoints",
        every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        plan_digest=prepared.plan.digest,
        family=config.model.family,
        settings={
            "model.dtype": config.model.dtype,
            "optimizer.name": config.optimizer.name,
            "optimizer.master_weights": str(config.optimizer.master_weights).lower(),
            "algorithm.name": config.algorithm.name,
        },
    )


def _evaluations(prepared: Prepared, version: int) -> EvaluationRequest | None:
    """What the weights of ``version`` are evaluated on during the run; the last ones may be evaluated after it."""
    section, last = prepared.config.evaluation, version == prepared.config.run.num_steps
    if not section.every or version % section.every or (last and section.at_end):
        return None
    return evaluation_request(prepared, prepared.config.folder / "samples" / f"evaluation_v{version:06d}.png")


def _check_record(path: Path) -> None:
    """Find out before anything is trained whether the report at its end could be made."""
    refuse_special(path)
    if path.is_file():
        try:
            Fold.of(read_events(path))
        except ValueError as error:
            raise ConfigError(f"{escape_text(str(error))}; delete the line") from None
        except InvariantViolation as error:
            raise ConfigError(f"{path}: {escape_text(str(error))}; move it away, no checkpoint needs it") from None


def _write_reports(folder: Path) -> dict[str, Any]:
    try:
        if not (folder / "events.jsonl").stat().st_size:
            return {}
        write_trace(read_events(folder / "events.jsonl"), folder / "trace.json")
        return write_report(folder)
    except OSError as error:
        raise unwritable(folder / "report.html", error) from error
    except ValueError as error:  # somebody wrote to the file meanwhile
        raise OutputError(f"{folder / 'report.html'} cannot be written: {escape_text(str(error))}") from None


def _find(checkpoints: Checkpoints, resume: str | Path, config: RunConfig) -> Path:
    path, state = checkpoints.find(resume)
    if state.version >= config.run.num_steps:
        raise ConfigError(
            f"checkpoint {path} has {state.version} steps, so run.num_steps={config.run.num_steps} leaves nothing to "
            "train; raise it to train longer"
        )
    return path


async def _train(
    prepared: Prepared,
    checkpoints: Checkpoints,
    checkpoint: Path | None,
    quarantine: Quarantine,
    sinks: Sequence[Sink],
    *,
    signals: bool,
) -> tuple[tuple[StepReport, ...], str]:
    config, plan = prepared.config, prepared.plan
    async with (
        _interruptible(signals) as interrupt,
        judges.judged(config, config.folder.resolve() / "logs") as served,
        Pool(build_workers(served)) as pool,
    ):
        trainer = pool["trainer"]
        start_step = 0 if checkpoint is None else await trainer.restore(str(checkpoint))
        evaluator = trainer if config.num_generators == 0 else pool["gen0"]
        if config.evaluation.at_start and checkpoint is None:
            await _evaluate(evaluator, prepared, sinks, "before")
        scheduler = Scheduler(
            plan,
            name=config.run.name,
            generators=[pool[name] for name in _names("gen", config.num_generators)],
            scorers=[pool[name] for name in _names("scorer", config.workers.scorers)],
            trainer=trainer,
            config=config.schedule,
            restarts=config.restarts,
            advantage=config.algorithm.advantage,
            weights=config.reward.weights,
            defer_divisor=prepared.defer_divisor,
            sinks=sinks,
            on_commit=Guard(config.run.stop_above, config.run.stop_below),
            checkpointer=checkpoints,
            evaluate=partial(_evaluations, prepared) if config.evaluation.every else None,
            start_step=start_step,
            quarantined=quarantine.found,
        )
        async with scheduler:
            interrupt.begin(scheduler)
            steps = [report async for report in scheduler]
        if scheduler.outcome == "completed" and config.evaluation.at_end:
            await _evaluate(evaluator, prepared, sinks, "after")
    outcome = scheduler.outcome
    return tuple(steps), "preempted" if interrupt.preempted and outcome == "drained" else outcome


def _names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def evaluation_request(prepared: Prepared, image: Path) -> EvaluationRequest:
    """Samples of the config's held-out prompts, the same noise each time, with a grid of them at ``image``."""
    section = prepared.config.evaluation
    return EvaluationRequest(
        seed=derive_seed(prepared.config.run.seed, "evaluation"),
        prompts=prepared.prompts.held_out[: section.num_prompts],
        samples_per_prompt=section.samples_per_prompt,
        image_path=str(image.resolve()),
    )


async def _evaluate(worker: Any, prepared: Prepared, sinks: Sequence[Sink], when: str) -> None:
    request = evaluation_request(prepared, prepared.config.folder / "samples" / f"evaluation_{when}.png")
    report: EvaluationReport = await worker.evaluate(request)
    fan_out(sinks)(Evaluated(0.0, report.version, report.num_samples, report.metrics))


class _Claim:
    """The lock on a run's folder. A sink that ends the run once another folder is in its place, or none.

    Whoever finds no lock there may claim the folder, and two runs would write into it.
    """

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self._folder = folder
        self._lock = lock
        self._saved = ""

    def __call__(self, event: AnyEvent) -> None:
        """Look before a step is saved, and after."""
        if isinstance(event, StepCommitted | CheckpointSaved):
            self.check()
        if isinstance(event, CheckpointSaved):
            self._saved = f"; the checkpoint {Path(event.path).name}, its last one, went with it"

    def check(self) -> None:
        """Nothing more is written into a folder that is not this run's.

        Raises:
            OutputError: it was removed, moved or replaced.
        """
        path = self._folder / _LOCK
        try:
            held = os.path.samestat(os.fstat(self._lock.fileno()), path.stat())
        except (FileNotFoundError, NotADirectoryError):
            held = False
        except OSError as error:
            raise unwritable(path, error) from error
        if not held:
            raise OutputError(
                f"the run's folder {self._folder} was removed, moved or replaced while it ran, so that nothing more "
                f"is written there{self._saved}"
            )


@contextmanager
def _claimed(folder: Path, resume: bool) -> Iterator[_Claim]:
    """Hold the run's folder: a new one, or with ``resume`` an old one; never one that another run holds."""
    if resume and not folder.is_dir():
        raise ConfigError(f"there is no run to resume in {folder}; check run.name and run.output")
    if not resume and folder.exists() and not _is_untouched(folder):
        mend = "continue it with --resume latest, " if completed(folder / "checkpoints") else ""
        raise ConfigError(f"the run folder {folder} exists; {mend}choose another run.name, or delete it")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("checkpoints", "logs", "samples"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"the run folder {folder} cannot be made: {error.strerror}; check run.output") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another process is running in {folder}; wait for it or choose another name") from None
        yield _Claim(folder, lock)


def _make_weights_folder(config: RunConfig) -> None:
    """Find out before anything is trained."""
    section = config.workers.weights
    if section.folder is not None and config.workers.type == "process":
        try:
            section.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"workers.weights.folder: {section.folder} cannot be made: {error.strerror}") from None


def _write_config(config: RunConfig, folder: Path) -> None:
    """Write ``config.yaml``; one that a resume replaces with another is kept as ``config.1.yaml`` and so on."""
    path, text = folder / "config.yaml", dump_yaml(config)
    try:
        if path.exists() and path.read_bytes() != text.encode():
            number = next(number for number in itertools.count(1) if not (folder / f"config.{number}.yaml").exists())
            path.rename(folder / f"config.{number}.yaml")
            log.warning("the config differs from the one before, which is kept", kept=f"config.{number}.yaml")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error


def _is_untouched(folder: Path) -> bool:
    """Whether a run claimed ``folder`` but ended before its first event, so that nothing is lost by another start.

    Or whether nothing but a quarantine was left in it, for another start to heed.
    """
    events = folder / "events.jsonl"
    if (folder / _LOCK).is_file():
        return not (events.is_file() and events.stat().st_size)
    return [path.name for path in folder.glob("*")] == [_QUARANTINE]


class _Interrupt:
    """What a signal does: nothing to interrupt yet, drain, then stop. SIGUSR1 drains, if need be once steps begin."""

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self.scheduler: Scheduler | None = None
        self.preempted = False
        """Whether a SIGUSR1 came."""
        self._task = task
        self._count = 0

    def begin(self, scheduler: Scheduler) -> None:
        """From now on there are steps to finish."""
        self.scheduler = scheduler
        if self.preempted:
            scheduler.drain()

    def __call__(self, number: int) -> None:
        name = signal.Signals(number).name
        over = self.scheduler is not None and self.scheduler.outcome != "running"
        if number == signal.SIGUSR1:
            if over:
                return
            self.preempted = True
            log.warning("finishing the step and saving a checkpoint: the run is about to be ended", signal=name)
            if self.scheduler is not None:
                self.scheduler.drain()
            return
        self._count += 1
        if self.scheduler is None or over:
            if self._task is not None:
                self._task.cancel(f"interrupted by {name}")
        elif self._count == 1:
            log.warning("finishing the step and saving a checkpoint; once more to stop at once", signal=name)
            self.scheduler.drain()
        else:
            log.warning("stopping now", signal=name)
            self.scheduler.stop()


@asynccontextmanager
async def _interruptible(signals: bool) -> AsyncIterator[_Interrupt]:
    interrupt = _Interrupt(asyncio.current_task())
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in NUMBERS} if signals else {}
    for number in before:
        loop.add_signal_handler(number, interrupt, number)
    if preempted(before.get(signal.SIGUSR1)):  # not sooner: none may come between
        interrupt(signal.SIGUSR1)
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python
