"""What a result means (lines 11 to 16 and 24 to 30 of Algorithm 1): check it, book it, say what follows from it.

Pure bookkeeping: no result is awaited here. Each kind of task has a method that checks and books its result before the
task's end is announced, and some have one that announces what the end brought about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from digen.errors import ConfigError, NumericsError, ProtocolError, RewardError, StalenessViolation
from digen.events import (
    CheckpointSaved,
    Evaluated,
    GroupCompleted,
    GroupDropped,
    MicroBatchSettled,
    Rewarded,
    Sink,
    StepCommitted,
    TaskKind,
)
from digen.groups import Arrival, CompletedGroup
from digen.sched.lanes import Checkpointer
from digen.sched.meter import Meter
from digen.sched.snapshots import Snapshots
from digen.sched.state import NO_VERSION, State, Step, Task, Worker
from digen.sched.sync import WeightSync
from digen.types import (
    CommitReport,
    Encoded,
    EvaluationReport,
    EvaluationRequest,
    LoadReport,
    Payload,
    Publication,
    Rollout,
    Scored,
    Snapshot,
    StepReport,
    UpdateReport,
)

if TYPE_CHECKING:
    import asyncio


class Results:
    """Takes the results of tasks into the state.

    Args:
        state: the scheduler's state.
        meter: counts for the step reports.
        emit: gets the events.
        now: seconds since the run began.
        workers: everybody who takes part.
        release: gives a worker's payload back to it.
        report: gets the StepReport of every commit.
        on_publish: gets every publication.
        checkpointer: says when to save.
        writing: gets a checkpoint that is still being written.
        snapshots: says when to copy the trainer's state, and keeps the copy.
        evaluate: says what a version is evaluated on.
    """

    def __init__(
        self,
        state: State,
        meter: Meter,
        *,
        emit: Sink,
        now: Callable[[], float],
        workers: Callable[[], Iterable[Worker]],
        release: Callable[[Worker, Payload], None],
        report: Callable[[StepReport], None],
        on_publish: Callable[[Publication], None] | None,
        checkpointer: Checkpointer | None,
        writing: Callable[[Task, asyncio.Future[str]], None],
        snapshots: Snapshots,
        evaluate: Callable[[int], EvaluationRequest | None] | None,
    ) -> None:
        self.state = state
        self._meter = meter
        self._emit = emit
        self._now = now
        self._workers = workers
        self._release = release
        self._report = report
        self._on_publish = on_publish
        self._checkpointer = checkpointer
        self._writing = writing
        self._snapshots = snapshots
        self._evaluate = evaluate
        self._saved_version = self._on_disk = state.step
        self._owed_version: int | None = None
        self._evaluated_version = state.step
        self._sync = WeightSync(lambda payload: release(state.trainer, payload))
        self._arrival: Arrival
        self._groups: dict[int, dict[str, CompletedGroup]] = {}
        self._trained: list[dict[str, float]] = []
        self._takers: dict[TaskKind, Callable[[Task, Any], dict[str, float]]] = {
            "encode": self._encoded,
            "generate": self._generated,
            "assist": self._generated,
            "score": self._scored,
            "update": self._updated,
            "commit": self._committed,
            "publish": self._published,
            "load": self._loaded,
            "switch": self._nothing,
            "checkpoint": self._nothing,
            "snapshot": self._copied,
            "evaluate": self._evaluated,
        }
        self._followers: dict[TaskKind, Callable[[Task, Any], None]] = {
            "score": self._after_score,
            "update": self._after_update,
            "commit": self._after_commit,
            "checkpoint": self._after_save,
            "evaluate": self._after_evaluation,
        }

    def began(self, task: Task) -> None:
        """A task is about to run."""
        if task.kind == "load":
            self._sync.load_began(*task.argument)

    def take(self, task: Task, result: Any) -> dict[str, float]:
        """Check and book what ``task`` returned; returns its statistics.

        Raises:
            ProtocolError, StalenessViolation, RewardError: it is not what the task asked for.
        """
        stats = self._takers[task.kind](task, result)
        for name, value in stats.items():
            if not math.isfinite(value):
                raise NumericsError(f"{describe(task)}: {name} is {value}; a worker must not let it pass")
        return stats

    def follow(self, task: Task, result: Any) -> None:
        """Say what the end of ``task`` brought about."""
        follower = self._followers.get(task.kind)
        if follower is not None:
            follower(task, result)

    def _encoded(self, task: Task, encoded: Encoded) -> dict[str, float]:
        self._expect(task, encoded, Encoded)
        (prompts,) = task.argument
        if encoded.prompts != prompts:
            raise self._protocol(task, f"{len(encoded.prompts)} other prompts than the {len(prompts)} it was given")
        self.state.ledger(task.step).encoded = encoded
        return {}

    def _generated(self, task: Task, rollout: Rollout) -> dict[str, float]:  # 11, 12, 16
        self._expect(task, rollout, Rollout)
        if rollout.version != task.version or rollout.version_end != task.version:
            raise StalenessViolation(
                f"{describe(task)} was pinned to version {task.version} but its trajectories ran on "
                f"{rollout.version} to {rollout.version_end}; the handle must load only between trajectories"
            )
        if (rollout.micro_batch.step, rollout.micro_batch.index) != (task.step, task.index):
            raise self._protocol(task, f"micro-batch {rollout.micro_batch.step}/{rollout.micro_batch.index}")
        step, limit = self.state.ledger(task.step), self.state.rules.max_rollout_bytes
        if step.lost_versions.get(task.index, task.version) != task.version:
            self._meter.count("faults/fresh_samples")  # the version that was lost is gone
        self.state.generated(step, task.index, rollout, task.worker)
        if limit is not None and step.num_bytes > limit:
            raise ConfigError(
                f"{len(step.rollouts)} of the {len(step.micro_batches)} micro-batches of step {step.number} take "
                f"{step.num_bytes} bytes, more than schedule.max_rollout_bytes={limit}: a step's rollouts are all kept "
                f"until its commit, about {step.num_bytes * len(step.micro_batches) // len(step.rollouts)} bytes here; "
                "raise the limit, or take fewer or smaller samples a step"
            )
        return rollout.stats

    def _scored(self, task: Task, scored: Scored) -> dict[str, float]:
        self._expect(task, scored, Scored)
        for name, values in scored.heads.items():
            if not all(map(math.isfinite, values)):
                raise RewardError(f"{describe(task)}: reward head {name!r} is not finite: {values}")
        step = self.state.ledger(task.step)
        self._arrival = self.state.scored(step, task.index, tuple(scored.rewards), scored.heads)
        return scored.stats

    def may_drop(self, task: Task, error: Exception) -> bool:
        """Whether the failure of a task costs its groups only, and not the run."""
        return task.kind == "score" and isinstance(error, RewardError) and self.state.rules.max_dropped > 0

    def drop(self, task: Task, error: Exception) -> dict[str, float]:
        """A score or a generation failed for good: give its groups up.

        Raises:
            RewardError: too many of the step's groups are lost by now.
        """
        step = self.state.ledger(task.step)
        self._arrival = (self.state.dropped if task.kind == "score" else self.state.never_generated)(step, task)
        self._check_dropped(step, error)
        return {}

    def withhold(self, task: Task, error: Exception) -> None:
        """What ``task`` gave up before the run went back stays given up."""
        step = self.state.ledger(task.step)
        self._arrival = self.state.withhold(step, task)
        self._check_dropped(step, error)
        self.follow_drop(task, error)

    def _check_dropped(self, step: Step, error: Exception) -> None:
        lost, total = step.assembler.num_dropped, step.assembler.num_groups
        if lost == total:
            raise RewardError(f"no group of step {step.number} has a reward, so nothing is left to train on: {error}")
        if lost > self.state.rules.max_dropped * total:
            raise RewardError(
                f"{lost} of the {total} groups of step {step.number} have no reward, more than "
                f"schedule.max_dropped_groups={self.state.rules.max_dropped} allows; the last: {error}"
            )

    def follow_drop(self, task: Task, error: Exception) -> None:
        """Say which groups are lost, and what that completes."""
        for uid in self._arrival.dropped:
            self._groups.get(task.step, {}).pop(uid, None)  # it was complete before a rollout of it was lost
            self._emit(GroupDropped(self._now(), task.step, uid, task.index, str(error)))
        self._arrived(task)

    def abandon(self, task: Task) -> None:
        """A task ended without a result that counts: let go of what it held."""
        if task.kind == "load":
            self._sync.load_failed(*task.argument)
        elif task.kind == "checkpoint":
            self.unsaved(task.version)
        elif task.kind == "evaluate" and not task.void:
            self.state.num_evaluating -= 1

    def unsaved(self, version: int) -> None:
        """The checkpoint of ``version``, which was due, was not taken."""
        self._saved_version = NO_VERSION
        self._owed_version = version if self._owed_version is None else min(self._owed_version, version)

    def reopen(self) -> None:
        """The trainer's gradient is lost: the current step is updated on once more."""
        self._trained = []
        if self.state.step in self.state.steps:
            self.state.current.reopen()

    def roll_back(self, version: int) -> int:
        """The trainer holds an earlier ``version``: forget what was built on later ones.

        Returns the number of rollouts that are thrown away.
        """
        num_discarded = sum(len(step.rollouts) for step in self.state.steps.values())
        for owner, payload in self.state.roll_back(version):
            self._release(owner, payload)
        self._trained = []
        self._groups.clear()
        if version <= self._on_disk:
            self._on_disk = self._saved_version = version
        if self._owed_version is not None and self._owed_version > version:
            self._owed_version = None  # it will be due again
        if self._evaluate is not None and self._evaluated_version < version and not self.state.draining:
            self.state.evaluation_due = self._evaluate(version)  # it was lost with what ran
        return num_discarded

    def discard(self, task: Task, result: Any) -> None:
        """What a task returned counts no more."""
        if isinstance(result, Rollout | Encoded | Publication):
            self._release(task.worker, result.payload)
        elif isinstance(result, Snapshot):
            for payload in result.payloads:
                self._release(task.worker, payload)

    def let_go(self) -> None:
        """The run is over: nobody reads its payloads any more."""
        for owner, payload in self.state.payloads():
            self._release(owner, payload)
        self._sync.let_go()
        self._snapshots.drop()

    def is_complete(self, publication: Publication) -> bool:
        """Whether all of it is known to be written."""
        return publication is self._sync.loaded

    def forget_encoded(self, step: Step) -> None:
        """A step's encoded prompts are lost: they are encoded again."""
        if step.encoder is not None and step.encoded is not None:
            self._release(step.encoder, step.encoded.payload)
        step.encoder = step.encoded = None

    def forget(self, step: Step, index: int) -> tuple[str, int]:
        """A rollout is lost: it is generated again. Returns who had made it, and of which version."""
        owner, rollout = self.state.forget(step, index)
        self._release(owner, rollout.payload)
        return owner.name, rollout.version

    def _after_score(self, task: Task, scored: Scored) -> None:  # 13-15
        step, now = self.state.ledger(task.step), self._now()
        self._emit(Rewarded(now, task.step, task.index, step.rewards[task.index], scored.heads))
        self._arrived(task)

    def _arrived(self, task: Task) -> None:
        step, arrival, now = self.state.ledger(task.step), self._arrival, self._now()
        for group in arrival.groups:
            self._groups.setdefault(task.step, {})[group.uid] = group
            versions = tuple(sorted({step.rollouts[index].version for index in group.micro_batches}))
            self._emit(
                GroupCompleted(
                    now,
                    task.step,
                    group.uid,
                    group.reward_mean,
                    group.reward_std,
                    group.num_kept,
                    len(group.micro_batches),
                    versions,
                )
            )
        for ready in arrival.ready:
            if not ready.num_kept:
                self._settled(step, ready.index, step.settled[ready.index])

    def _updated(self, task: Task, report: UpdateReport) -> dict[str, float]:  # 24, 25
        self._expect(task, report, UpdateReport)
        if (report.step, report.index) != (task.step, task.index):
            raise self._protocol(task, f"an update of {report.step}/{report.index}")
        self._trained.append(report.metrics)
        return report.metrics

    def _after_update(self, task: Task, _: UpdateReport) -> None:
        step = self.state.current
        step.num_updated += 1
        step.settle(task.index, "updated")
        self._settled(step, task.index, "updated")

    def _committed(self, task: Task, report: CommitReport) -> dict[str, float]:  # 27, 28, 30
        self._expect(task, report, CommitReport)
        if report.version != task.step + 1:
            raise self._protocol(task, f"version {report.version} after the commit of step {task.step}")
        return report.metrics

    def _after_commit(self, task: Task, report: CommitReport) -> None:
        state, now = self.state, self._now()
        step = state.close_step()
        state.trainer.version = report.version
        state.recount_outdated()
        state.holding = state.rules.hold and state.num_outdated > 0
        self.copy_if_due()
        self.save_if_due(last=state.step >= state.last_step, owed=True)
        if self._evaluate is not None and not state.draining:
            state.evaluation_due = self._evaluate(report.version)
        values = self._meter.close(
            step,
            now,
            groups=list(self._groups.pop(task.step).values()),
            workers=self._workers(),
            trained=self._trained,
            committed=report.metrics,
            rollout_bytes=state.memory.close_step(),
        )
        self._trained = []
        for index, rollout in step.rollouts.items():
            self._release(step.owners[index], rollout.payload)
        if step.encoder is not None and step.encoded is not None:
            self._release(step.encoder, step.encoded.payload)
        self._emit(StepCommitted(now, task.step, report.version, values))
        self._report(StepReport(task.step, report.version, values))

    def _published(self, task: Task, publication: Publication) -> dict[str, float]:  # 29
        self._expect(task, publication, Publication)
        if publication.version != task.version:
            raise self._protocol(task, f"a publication of version {publication.version}")
        if publication.num_tensors == 0:
            raise self._protocol(task, "a publication without a single tensor")
        self._sync.published(publication)
        self.state.publication = publication
        self.state.publish_due = False
        self._meter.published(publication.nbytes)
        if self._on_publish is not None:
            self._on_publish(publication)
        return {"bytes": float(publication.nbytes)}

    def _loaded(self, task: Task, report: LoadReport) -> dict[str, float]:  # 29
        self._expect(task, report, LoadReport)
        (publication,) = task.argument
        self._sync.load_ended(publication, report, task.worker.name)
        self.state.loaded(task.worker, report.version)
        return {"bytes": float(publication.nbytes)}

    def _nothing(self, task: Task, result: Any) -> dict[str, float]:
        return {}

    def _evaluated(self, task: Task, report: EvaluationReport) -> dict[str, float]:
        self._expect(task, report, EvaluationReport)
        if report.version != task.version:
            raise StalenessViolation(
                f"{describe(task)} was pinned to version {task.version} but its samples are of version {report.version}"
            )
        self.state.num_evaluating -= 1
        self._evaluated_version = report.version
        return report.metrics

    def _after_evaluation(self, task: Task, report: EvaluationReport) -> None:
        self._emit(Evaluated(self._now(), report.version, report.num_samples, report.metrics))

    def _after_save(self, task: Task, path: str | asyncio.Future[str]) -> None:
        if isinstance(path, str):
            self.saved(task, path)
        else:
            self._writing(task, path)

    def _copied(self, task: Task, snapshot: Snapshot) -> dict[str, float]:
        self._expect(task, snapshot, Snapshot)
        if snapshot.version != task.version:
            raise self._protocol(task, f"a snapshot of version {snapshot.version}")
        self._snapshots.keep(snapshot)
        return {"bytes": float(snapshot.nbytes)}

    def copy_if_due(self) -> None:
        """Let the trainer copy its state, after the publication of its weights; not that which the run began with."""
        version = self.state.step
        if version > self.state.start_step and self._snapshots.due(version):
            self.state.trainer_program.append(("snapshot", ()))

    def saved(self, task: Task, path: str) -> None:
        """A checkpoint is complete."""
        self._on_disk, self._owed_version = task.version, None
        self._emit(CheckpointSaved(self._now(), task.version, path))

    def save_if_due(self, *, last: bool, owed: bool = False) -> None:
        """Let the trainer save its weights, once for each version and after their publication.

        ``owed``: also in place of an earlier version, whose checkpoint was lost with a trainer that has gone on from a
        snapshot; only where no step has begun.
        """
        state, version = self.state, self.state.step
        if self._checkpointer is None or version == self._saved_version:
            return
        if self._checkpointer.due(version, last=last) or (owed and self._owed_version is not None):
            self._saved_version = version
            state.trainer_program.append(("checkpoint", (version,)))

    def _settled(self, step: Step, index: int, outcome: Any) -> None:
        version = step.version_of(index)
        self._emit(MicroBatchSettled(self._now(), step.number, index, outcome, version, step.number - version))

    def _expect(self, task: Task, result: Any, kind: type) -> None:
        if not isinstance(result, kind):
            raise self._protocol(task, f"{type(result).__name__} where a {kind.__name__} is due")

    def _protocol(self, task: Task, got: str) -> ProtocolError:
        return ProtocolError(f"{describe(task)} returned {got}", worker=task.worker.name, task=task.kind)


def describe(task: Task) -> str:
    """A task in words, for messages."""
    what = f"{task.kind} of step {task.step}" + (f" micro-batch {task.index}" if task.index >= 0 else "")
    return f"{what} on {task.worker.name}"
