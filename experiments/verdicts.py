"""How a run under faults must end: judged by its events, by the ledger in its weights, and by what is on its disk.

After a run that completed, every micro-batch of every step was trained once, or not at all if it settled so, and every
checkpoint that was due is there. On-policy in index order the weights are those of the run without faults. A run that
failed must have been given faults that its policy does not survive, and say so by the right error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from digen.errors import (
    CheckpointError,
    NumericsError,
    PayloadLost,
    ProtocolError,
    RewardError,
    WorkerDied,
    WorkerRaised,
    WorkerTimeout,
)
from digen.events import (
    AnyEvent,
    CheckpointSaved,
    MicroBatchSettled,
    Quarantined,
    RolledBack,
    StepCommitted,
    TaskFailed,
    TaskFinished,
    TaskStarted,
    WorkerLost,
    WorkerRestarted,
)
from digen.workers.faulty import TRAINED, Weights

if TYPE_CHECKING:
    from experiments.faults import Case, Ending

LOSSES = {"death", "silent_death", "node_death", "hang", "late", "slow", "garbage", "other_micro_batch"}
LOSSES |= {"wrong_checksum", "raise"}
"""Faults that may cost a worker; slow only where the deadline is short."""


def assert_deserved(case: Case, ending: Ending, undisturbed: Callable[[], Weights]) -> None:
    """Assert that a run ended as it should; ``undisturbed`` gives the weights of the same run without faults."""
    if ending.outcome == "nothing to resume":
        return
    lost = Counter(event.worker for event in ending.events if isinstance(event, WorkerLost))
    faults = Counter(fault.where.partition("#")[0] for fault in ending.faults if fault.kind in LOSSES)
    for worker, number in lost.items():
        assert number <= faults[worker], f"{worker} was lost {number} times by {faults[worker]} faults"
        _within_budget(case, ending.events, worker)
    _none_for_ever(case, ending.events)
    _after_a_while(case, ending.events)
    _fenced_if_any(ending)
    _metrics_of_what_was_trained(ending.before)
    _metrics_of_what_was_trained(ending.events)
    _back_to_the_newest(ending)
    _written_one_by_one(ending)
    if ending.outcome == "failed":
        _deserved(case, ending)
    else:
        assert ending.outcome == "completed" or case.drain_at_s is not None, ending.outcome
        assert ending.error is None, ending.error
        _trained_once(case, ending, undisturbed)


def _torn(ending: Ending) -> bool:
    return any(fault.kind == "torn" for fault in ending.faults)


def _within_budget(case: Case, events: list[AnyEvent], worker: str) -> None:
    rules = case.restarts
    forgiven = rules.max_attempts * sum(isinstance(event, Quarantined) for event in events)
    lost = [event for event in events if isinstance(event, WorkerLost) and event.worker == worker]
    times = [event.time for event in lost if event.restart_in_s is not None]
    most = max((sum(since <= t < since + rules.window_s for t in times) for since in times), default=0)
    assert most <= rules.budget + forgiven, f"{worker} was started again {most} times in {rules.window_s} s"


def _none_for_ever(case: Case, events: list[AnyEvent]) -> None:
    """No worker comes back again and again without finishing a task. A quarantine acquits some."""
    barren: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Quarantined):
            barren.clear()
        elif isinstance(event, TaskFinished):
            del barren[event.worker]
        elif isinstance(event, WorkerLost):
            barren[event.worker] += 1
            back = event.restart_in_s is not None
            assert not back or barren[event.worker] <= case.restarts.max_attempts, f"{event.worker} comes back for ever"


def _after_a_while(case: Case, events: list[AnyEvent]) -> None:
    """The first restart of a worker in its window is at once, each other one after twice the time."""
    rules, restarts = case.restarts, dict[str, list[float]]()
    due: dict[str, float] = {}
    if any(isinstance(event, Quarantined) for event in events):
        return  # which forgives restarts
    for event in events:
        if isinstance(event, WorkerRestarted):
            assert event.time >= due[event.worker], f"{event.worker} is back at {event.time}, before its back-off ended"
        elif isinstance(event, WorkerLost) and event.restart_in_s is not None:
            recent = [time for time in restarts.get(event.worker, []) if time > event.time - rules.window_s]
            wait_s = min(rules.max_backoff_s, rules.backoff_s * 2 ** (len(recent) - 1)) if recent else 0
            assert event.restart_in_s == wait_s, f"{event.worker} waits {event.restart_in_s} s instead of {wait_s}"
            restarts[event.worker], due[event.worker] = [*recent, event.time], event.time + wait_s


def _fenced_if_any(ending: Ending) -> None:
    """Only what is late or comes twice is fenced."""
    late = any(fault.kind in {"hang", "late", "slow", "duplicate"} for fault in ending.faults)
    fenced = sum(e.values.get("faults/replies_fenced", 0) for e in ending.events if isinstance(e, StepCommitted))
    assert late or not fenced, f"{fenced} answers are fenced"


def _metrics_of_what_was_trained(events: list[AnyEvent]) -> None:
    """A step's metrics are of one update of each micro-batch: the last one."""
    trained: dict[int, float] = {}
    for event in events:
        match event:
            case TaskFinished(kind="update"):
                trained[event.index] = event.stats[TRAINED]
            case StepCommitted():
                mean = math.fsum(trained.values()) / len(trained) if trained else None
                found = event.values.get(TRAINED)
                assert found == mean, f"step {event.step} reports {found} of its updates instead of {mean}"
                trained.clear()
            case RolledBack():
                trained.clear()


def _back_to_the_newest(ending: Ending) -> None:
    """A run goes back no further than to its newest checkpoint, or to its newest snapshot if that can be recalled."""
    if _torn(ending):
        return
    saved, copied = ending.start_step, 0
    lost = any(fault.method == "recall" or fault.kind == "node_death" for fault in ending.faults)
    for event in ending.events:
        match event:
            case CheckpointSaved():
                saved = event.version
            case TaskFinished(kind="snapshot"):
                copied = event.version
            case RolledBack():
                wanted = {max(saved, copied), saved if lost else max(saved, copied)}
                assert event.version in wanted, f"the run goes back to {event.version}, not to {wanted}"
                copied = min(copied, event.version)


def _written_one_by_one(ending: Ending) -> None:
    """No checkpoint is begun while another is written: the trainer would count as hung while it waits."""
    if any(fault.method == "write" for fault in ending.faults):
        return  # which no event tells, if nobody asks for the trainer any more
    writing = False
    for event in ending.events:
        match event:
            case TaskStarted(kind="checkpoint"):
                assert not writing, f"the checkpoint of version {event.version} is begun while another is written"
            case TaskFinished(kind="checkpoint"):
                writing = True
            case CheckpointSaved() | WorkerLost(role="trainer"):
                writing = False


def _trained_once(case: Case, ending: Ending, undisturbed: Callable[[], Weights]) -> None:
    weights, settled = ending.weights, {}
    for event in ending.before + ending.events:
        if isinstance(event, MicroBatchSettled):
            settled[event.step, event.index] = event.outcome
    if ending.outcome == "completed":
        assert weights.version == case.plan.num_steps, f"ends with version {weights.version}"
        garbage = any(fault.kind == "garbage" and fault.method == "publish" for fault in ending.faults)
        kept = 1 + any(isinstance(event, TaskFinished) and event.kind == "snapshot" for event in ending.events)
        assert garbage or ending.num_lent <= kept, f"{ending.num_lent} publications were not given back"
        _saved_what_was_due(case, ending)
        _copied_what_was_due(case, ending)
    size = case.plan.num_micro_batches
    wanted = {
        (step, index): 1
        for step in range(weights.version)
        for index in range(size)
        if step < case.start_step or settled[step, index] == "updated"
    }
    assert weights.counts == wanted, f"trained {weights.counts} instead of {wanted}"
    dropped = "dropped" in settled.values()
    disturbed = ending.faults or ending.before
    if case.bit_identical and ending.outcome == "completed" and not dropped and disturbed:
        assert weights == undisturbed(), "the weights are not those of the run without faults"


def _saved_what_was_due(case: Case, ending: Ending) -> None:
    first, last, every = ending.start_step + 1, case.plan.num_steps, case.save_every
    if every is None:
        return
    due = {version for version in range(first, last + 1) if version == last or version % every == 0}
    saved = {event.version for event in ending.events if isinstance(event, CheckpointSaved)} | {ending.start_step}
    lost, instead = _cut_short(ending)
    missing = ((due | instead) - saved - lost) | ({last} - saved)
    assert not missing, f"no checkpoint of versions {sorted(missing)}"
    if not ending.before:  # what an unsynced disk has kept beside the newest may be broken
        kept = _kept(case, ending)
        assert set(ending.on_disk) == kept, (
            f"checkpoints of {sorted(ending.on_disk)} are kept instead of {sorted(kept)}"
        )
    broken = [version for version, intact in ending.on_disk.items() if version in due and not intact]
    assert _torn(ending) or not broken, f"checkpoints of versions {broken} are broken"


def _copied_what_was_due(case: Case, ending: Ending) -> None:
    every = case.restarts.snapshot_every if case.restarts.budget else 0
    versions = range(ending.start_step + 1, case.plan.num_steps + 1)
    due = {version for version in versions if every and version % every == 0}
    copied = {event.version for event in ending.events if isinstance(event, TaskFinished) and event.kind == "snapshot"}
    assert copied == due, f"snapshots of versions {sorted(copied)} instead of {sorted(due)}"


def _cut_short(ending: Ending) -> tuple[set[int], set[int]]:
    """The versions whose checkpoints were being written when the trainer was lost, and those that it went on from."""
    begun, lost, instead, committed = set[int](), set[int](), set[int](), ending.start_step
    owed = False
    for event in ending.events:
        match event:
            case TaskFinished(kind="checkpoint"):
                begun.add(event.version)
            case CheckpointSaved():
                begun.discard(event.version)
            case StepCommitted():
                committed = event.version
            case WorkerLost(role="trainer"):
                cut = {version for version in begun if version < committed}
                lost, owed = lost | cut, owed or bool(cut)
                begun.clear()
            case RolledBack():
                committed = event.version
                instead = {version for version in instead if version <= event.version}
            case WorkerRestarted(role="trainer"):
                if owed:
                    instead.add(event.version)
                owed = False
    return lost, instead


def _kept(case: Case, ending: Ending) -> set[int]:
    """The newest versions that were saved, and beside them those of the highest reward, the newer of equals first."""
    kept: dict[int, float | None] = {case.start_step: None} if case.start_step else {}
    rewards: dict[int, float] = {}
    for event in ending.events:
        if isinstance(event, StepCommitted):
            rewards[event.version] = event.values["reward/mean"]
        elif isinstance(event, CheckpointSaved):
            kept = {version: reward for version, reward in kept.items() if version < event.version}
            kept[event.version] = rewards[event.version]
            known = [(reward, version) for version, reward in kept.items() if reward is not None]
            best = [version for _, version in sorted(known, reverse=True)[: case.keep_best]]
            kept = {version: kept[version] for version in sorted({*sorted(kept)[-case.keep :], *best})}
    return set(kept)


def _deserved(case: Case, ending: Ending) -> None:
    error = ending.error
    assert error is not None, "failed without an error"
    cause, kinds = error.__cause__, {fault.kind for fault in ending.faults}
    quarantined = any(isinstance(event, Quarantined) for event in ending.events)
    worker = getattr(cause, "worker", "")
    of_worker = [fault for fault in ending.faults if fault.where.startswith(f"{worker}#")]
    used_up = quarantined or (bool(worker) and _used_up(case, ending.events, worker))
    match cause:
        case WorkerRaised():
            raised = any(fault.kind == "raise" for fault in of_worker)
            deserved = raised and (used_up or worker == "trainer" or any(f.method == "evaluate" for f in of_worker))
        case WorkerDied() | WorkerTimeout() | ProtocolError():
            deserved = used_up
        case PayloadLost():
            deserved = "node_death" in kinds and (quarantined or case.restarts.budget == 0)
        case RewardError():
            deserved = bool({"no_reward", "nan"} & kinds) or quarantined
        case NumericsError():
            deserved = "nan" in kinds
        case CheckpointError():
            lost = any(isinstance(event, WorkerLost) and event.role == "trainer" for event in ending.events)
            without = lost and ending.start_step > 0 and (case.save_every is None or "torn" in kinds)
            deserved = "disk_full" in kinds or without
        case _:
            deserved = False
    assert deserved, f"{type(cause).__name__} is not what these faults deserve: {error}"


def _used_up(case: Case, events: list[AnyEvent], worker: str) -> bool:
    """Whether a worker's losses at the end of a run were more than its policy allows."""
    # What came at the end, perhaps long after the failure because a call did not let go, is no part of it.
    cancelled = "cancelled: the run ended"
    last = len(events) - 1
    while isinstance(events[last - 1], CheckpointSaved) or getattr(events[last - 1], "error", "") == cancelled:
        last -= 1
    events = events[:last]
    rules, end = case.restarts, events[-1].time
    recent = barren = attempts = 0
    own = [event for event in events if isinstance(event, TaskFailed) and event.worker == worker]
    failed = (own[-1].step, own[-1].index, own[-1].kind) if own else None  # None: it was writing while it trained on
    for event in events:
        if isinstance(event, WorkerLost) and event.worker == worker:
            recent += event.time > end - rules.window_s
            barren += 1
        elif isinstance(event, TaskFinished | TaskFailed):
            finished = isinstance(event, TaskFinished)
            if finished and event.worker == worker:
                barren = 0
            if (event.step, event.index, event.kind) == failed:
                attempts = 0 if finished else attempts + 1
    return recent >= rules.budget or barren >= rules.max_attempts or attempts >= rules.max_attempts
