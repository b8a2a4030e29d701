"""Beginning, failing, being cancelled, draining, stopping, changing workers: nothing hangs and nothing is left.

The fixture asserts after every run that no task is left and that the whole stream obeys the invariants, conservation at
``RunFinished`` included.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from digen import (
    ConfigError,
    LoadReport,
    MicroBatch,
    Plan,
    ProtocolError,
    Publication,
    RewardError,
    Rollout,
    ScheduleConfig,
    Scheduler,
    Scored,
    SimWorker,
    StalenessViolation,
    StepFailed,
    StepReport,
    WorkerError,
)
from digen.config import AdvantageSection
from digen.errors import NumericsError, PlanError
from digen.events import (
    BubbleOpened,
    CheckpointSaved,
    RunFinished,
    RunStarted,
    StepCommitted,
    TaskFailed,
    TaskFinished,
    TaskStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    tolerated,
)
from digen.sched import check, loop
from digen.sched.tag import Bubble, Decision, Policy
from digen.workers.clock import run_virtual

GENERATORS: list[dict[str, Any]] = [{"generate": 10, "score": 1, "load": 2}, {"generate": 7, "score": 2, "load": 3}]
TRAINER: dict[str, Any] = {"generate": 11, "update": 4, "commit": 1, "publish": 1, "switch_in": 1, "switch_out": 1}
BUSY: dict[str, Any] = {
    "num_steps": 3,
    "generators": GENERATORS,
    "trainer": TRAINER,
    "config": {"mode": "tcss", "tag": "greedy"},
}
SYNCS = ["hold", "pull"]


def plan(num_steps: int = 2, num_micro_batches: int = 4) -> Plan:
    return Plan(["a"], num_steps=num_steps, prompts_per_step=num_micro_batches, samples_per_prompt=1)


class Broken(SimWorker):
    """Raises in one method, the second time that it is called."""

    def __init__(self, name: str, method: str, error: BaseException, durations: dict[str, Any]) -> None:
        super().__init__(name, durations)
        good, calls = getattr(self, method), 0

        async def bad(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                await asyncio.sleep(0.5)
                raise error
            return await good(*arguments)

        setattr(self, method, bad)


# ---- failing handles -------------------------------------------------------------------------------------------

METHODS = [
    *((role, method) for role in ["generator"] for method in ("generate", "score", "load")),
    *(("trainer", method) for method in ("update", "commit", "publish", "switch", "generate")),
    ("scorer", "score"),
]


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(("role", "method"), METHODS)
def test_a_failing_handle_ends_the_run_with_its_own_error_as_cause(
    simulate: Callable[..., Any], role: str, method: str, sync: str
) -> None:
    error = ValueError("the engine broke")
    error.add_note("a remote traceback")
    durations = TRAINER if role == "trainer" else GENERATORS[0]
    bad = Broken("bad", method, error, durations)
    run = simulate(
        num_steps=4,
        num_micro_batches=8,
        generators=[bad, *GENERATORS[1:]] if role == "generator" else GENERATORS,
        trainer=bad if role == "trainer" else TRAINER,
        scorers=[bad] if role == "scorer" else [],
        config={"mode": "tcss", "tag": "greedy", "sync": sync},
        catch=StepFailed,
    )
    assert run.error.__cause__ is error
    assert run.error.__notes__ == ["a remote traceback"]
    kind = "assist" if (role, method) == ("trainer", "generate") else method
    assert f"{kind} of step" in str(run.error)
    assert "on bad: the engine broke" in str(run.error)
    failed = [event for event in run.of(TaskFailed) if event.error == "the engine broke"]
    assert [(event.kind, event.worker) for event in failed] == [(kind, "bad")]
    assert run.outcome == "failed"
    assert run.events[-1] == RunFinished(run.events[-1].time, "failed", str(run.error))
    assert {event.error for event in run.of(TaskFailed)} <= {"the engine broke", "cancelled: the run ended"}


def test_an_error_that_nobody_saw_is_raised_when_the_scheduler_is_left(simulate: Callable[..., Any]) -> None:
    async def sleeps(scheduler: Scheduler) -> None:
        await asyncio.sleep(1000)
        raise AssertionError("unreachable") if scheduler.outcome != "failed" else Left

    class Left(Exception):
        pass

    bad = Broken("g0", "generate", ValueError("mine"), {"generate": 1})
    run = simulate(generators=[bad], body=sleeps, catch=Left)
    assert isinstance(run.error, Left)  # the body's own error is not hidden by the scheduler's

    async def main() -> None:
        async with Scheduler(plan(), generators=[bad], trainer=SimWorker("t")):
            await asyncio.sleep(1000)

    bad = Broken("g0", "generate", ValueError("mine"), {"generate": 1})
    with pytest.raises(StepFailed, match="mine") as caught:
        run_virtual(main())
    assert isinstance(caught.value.__cause__, ValueError)


def test_reports_come_before_the_error_and_the_error_once(simulate: Callable[..., Any]) -> None:
    seen: list[Any] = []

    async def body(scheduler: Scheduler) -> None:
        nonlocal seen
        await asyncio.sleep(1000)
        try:
            async for report in scheduler:
                seen += [report.index]
        except StepFailed as error:
            seen.append(error)

    bad = Broken("t", "commit", ValueError("mine"), {"update": 1})
    run = simulate(num_steps=5, trainer=bad, body=body)
    assert seen[0] == 0
    assert isinstance(seen[1], StepFailed)
    assert run.error is None  # it was caught, and leaving does not raise it again


def test_a_call_that_cancels_itself_fails_the_run_instead_of_hanging_it(simulate: Callable[..., Any]) -> None:
    """As when an engine's client was closed under it: its pending futures are cancelled."""
    run = simulate(
        num_steps=2,
        generators=[Broken("g0", "generate", asyncio.CancelledError("closed"), {"generate": 1})],
        catch=StepFailed,
    )
    assert isinstance(run.error.__cause__, WorkerError)
    assert run.error.__cause__.worker == "g0"
    assert "let CancelledError escape: closed" in str(run.error)


def test_a_call_that_swallows_its_cancellation_is_waited_for(simulate: Callable[..., Any]) -> None:
    ended: list[float] = []

    class Stubborn(SimWorker):
        async def generate(self, micro_batch: MicroBatch, /) -> Rollout:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                await asyncio.sleep(5)
            ended.append(asyncio.get_running_loop().time())
            return Rollout(micro_batch, 0, 0, msgspec.UNSET)  # type: ignore[arg-type]

    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(3)
        scheduler.stop()

    simulate(generators=[Stubborn("g0")], body=body)
    assert ended == [8]


# ---- answers that are no answers -------------------------------------------------------------------------------


class Lying(SimWorker):
    """Answers one method with something else."""

    def __init__(self, name: str, method: str, lie: Callable[[Any], Any]) -> None:
        super().__init__(name, {"generate": 2, "update": 1})
        good = getattr(self, method)

        async def bad(*arguments: Any) -> Any:
            return lie(await good(*arguments))

        setattr(self, method, bad)


def other(**fields: Any) -> Callable[[Any], Any]:
    return lambda answer: msgspec.structs.replace(answer, **fields)


def other_micro_batch(rollout: Rollout) -> Rollout:
    return other(micro_batch=other(index=rollout.micro_batch.index + 1)(rollout.micro_batch))(rollout)  # type: ignore[no-any-return]


LIES: list[tuple[str, str, Callable[[Any], Any], type[Exception], str]] = [
    ("g0", "generate", lambda _: None, ProtocolError, "NoneType where a Rollout is due"),
    ("g0", "generate", other_micro_batch, ProtocolError, "micro-batch 0/1"),
    ("g0", "generate", other(version=9), StalenessViolation, "pinned to version 0"),
    ("g0", "generate", other(version_end=1), StalenessViolation, "ran on 0 to 1"),
    ("g0", "score", lambda _: 1.0, ProtocolError, "float where a Scored is due"),
    ("g0", "score", other(rewards=()), RewardError, "1 samples but 0 rewards"),
    ("g0", "score", other(rewards=(1.0, 2.0)), RewardError, "1 samples but 2 rewards"),
    ("g0", "score", other(rewards=(float("nan"),)), RewardError, "not a finite number"),
    ("g0", "score", other(rewards=("good",)), RewardError, "not a finite number"),
    ("g0", "score", other(rewards=None), TypeError, "NoneType"),
    ("g0", "load", lambda _: Scored(()), ProtocolError, "Scored where a LoadReport is due"),
    ("t", "update", lambda _: {}, ProtocolError, "dict where a UpdateReport is due"),
    ("t", "update", other(index=3), ProtocolError, "an update of 0/3"),
    ("t", "update", other(step=1), ProtocolError, "an update of 1/0"),
    ("t", "commit", lambda _: None, ProtocolError, "NoneType where a CommitReport is due"),
    ("t", "commit", other(version=0), ProtocolError, "version 0 after the commit of step 0"),
    ("t", "publish", lambda _: None, ProtocolError, "NoneType where a Publication is due"),
    ("t", "publish", other(version=5), ProtocolError, "a publication of version 5"),
]


@pytest.mark.parametrize("case", LIES, ids=[f"{case[1]}-{case[4]}" for case in LIES])
def test_a_wrong_answer_ends_the_run(simulate: Callable[..., Any], case: tuple[str, str, Any, type, str]) -> None:
    worker, method, lie, kind, message = case
    liar = Lying(worker, method, lie)
    run = simulate(
        generators=[liar] if worker == "g0" else [{"generate": 2}],
        trainer=liar if worker == "t" else {"update": 1},
        catch=StepFailed,
    )
    assert isinstance(run.error.__cause__, kind)
    assert message in str(run.error)
    failed = run.of(TaskFailed)[0]
    assert (failed.kind, failed.worker) == (method, worker)
    assert message in failed.error
    assert not any(event.task == failed.task for event in run.of(TaskFinished))  # it did not finish as well


def test_a_metric_that_is_not_finite_ends_the_run(simulate: Callable[..., Any]) -> None:
    liar = Lying("t", "commit", other(metrics={"loss": float("nan")}))
    run = simulate(trainer=liar, catch=StepFailed)
    assert isinstance(run.error.__cause__, NumericsError)
    assert "loss is nan" in str(run.error)


# ---- sinks and hooks -------------------------------------------------------------------------------------------

EVENTS = [RunStarted, WorkerJoined, TaskStarted, TaskFinished, BubbleOpened, StepCommitted, RunFinished]


@pytest.mark.parametrize("kind", EVENTS)
def test_a_sink_that_raises_fails_the_run_with_its_error_as_cause(simulate: Callable[..., Any], kind: type) -> None:
    error, before, after = OSError("disk full"), [], []  # type: ignore[var-annotated]

    def sink(event: Any) -> None:
        if isinstance(event, kind):
            raise error

    run = simulate(num_steps=2, sinks=[before.append, sink, after.append], catch=(StepFailed, OSError))
    assert run.error is error or run.error.__cause__ is error
    if kind in {TaskStarted, TaskFinished, BubbleOpened, StepCommitted}:
        assert isinstance(run.error, StepFailed)
        assert "a sink, hook or policy raised OSError: disk full" in str(run.error)
        assert isinstance(before[-1], RunFinished)
        assert isinstance(after[-1], RunFinished)  # the others still hear of the end
        assert before[-1].outcome == "failed"


def test_a_tracker_that_raises_is_left_out_and_changes_nothing(simulate: Callable[..., Any]) -> None:
    seen: list[Any] = []

    def tracker(event: Any) -> None:
        seen.append(event)
        if len(seen) == 5:
            raise ConnectionError("the server is down")

    with capture_logs() as logs:
        run = simulate(**BUSY, sinks=[tolerated(tracker)])
    undisturbed = simulate(**BUSY)
    assert run.events == undisturbed.events
    assert seen == run.events[:5]
    assert run.trainer.trained == undisturbed.trainer.trained
    (warning,) = logs
    assert warning["log_level"] == "warning"
    assert "tracker" in warning["sink"]
    assert warning["error"] == "ConnectionError: the server is down"


@pytest.mark.parametrize("hook", ["on_commit", "on_publish"])
def test_a_hook_that_raises_fails_the_run(simulate: Callable[..., Any], hook: str) -> None:
    error = KeyError("mine")

    def raises(_: Any) -> None:
        raise error

    run = simulate(num_steps=2, catch=StepFailed, **{hook: raises})
    assert run.error.__cause__ is error
    assert run.outcome == "failed"


def test_hooks_hear_of_every_commit_and_publication(simulate: Callable[..., Any]) -> None:
    commits: list[StepReport] = []
    publications: list[Publication] = []
    run = simulate(num_steps=3, on_commit=commits.append, on_publish=publications.append)
    assert commits == run.reports
    assert [publication.version for publication in publications] == [1, 2, 3]


def test_a_hook_may_stop_or_drain_at_once(simulate: Callable[..., Any]) -> None:
    for method, outcome in (("stop", "stopped"), ("drain", "drained")):
        box: list[Scheduler] = []

        async def body(scheduler: Scheduler, box: list[Scheduler] = box) -> None:
            box.append(scheduler)

        def hook(report: StepReport, box: list[Scheduler] = box, method: str = method) -> None:
            if report.index == 1:
                getattr(box[0], method)()

        run = simulate(num_steps=5, generators=[{"generate": 3}], body=body, on_commit=hook)
        assert (run.outcome, len(run.reports)) == (outcome, 2)


def test_a_sink_may_stop_in_the_middle_of_a_dispatch(simulate: Callable[..., Any]) -> None:
    box: list[Scheduler] = []

    async def body(scheduler: Scheduler) -> None:
        box.append(scheduler)

    def sink(event: Any) -> None:
        if isinstance(event, TaskStarted) and event.kind == "generate" and event.index == 2:
            box[0].stop()

    run = simulate(generators=[{"generate": 10}], body=body, sinks=[sink])
    assert run.outcome == "stopped"
    assert run.makespan == 20  # not at 30, when that task would have ended


# ---- cancellation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_cancellation_after_any_event_leaves_nothing(simulate: Callable[..., Any], sync: str) -> None:
    num_events = len(simulate(**{**BUSY, "config": {"mode": "tcss", "tag": "greedy", "sync": sync}}).events)
    for number in range(0, num_events - 1, 3):
        run = simulate(
            **{**BUSY, "config": {"mode": "tcss", "tag": "greedy", "sync": sync}},
            **cancelled_after(number),
            catch=asyncio.CancelledError,
        )
        assert isinstance(run.error, asyncio.CancelledError), number
        assert run.error.args == ("enough",)
        assert run.outcome in {"stopped", "completed"}
        checker = check(run.events)
        assert checker.num_started == checker.num_finished + checker.num_failed
        assert isinstance(run.events[-1], RunFinished)


def cancelled_after(number: int) -> dict[str, Any]:
    """A body that cancels its own task as soon as a sink has seen so many events."""
    reached = asyncio.Event()
    seen: list[Any] = []

    async def body(_: Scheduler) -> None:
        task = asyncio.current_task()
        assert task is not None
        await reached.wait()
        task.cancel("enough")
        await asyncio.sleep(1000)

    def sink(event: Any) -> None:
        seen.append(event)
        if len(seen) > number:
            reached.set()

    return {"body": body, "sinks": [sink]}


def slow_to_end(name: str, durations: dict[str, Any]) -> SimWorker:
    """A handle whose calls need 3 s to clean up after a cancellation."""

    class Slow(SimWorker):
        async def generate(self, micro_batch: MicroBatch, /) -> Rollout:
            try:
                return await super().generate(micro_batch)
            except asyncio.CancelledError:
                await asyncio.sleep(3)
                raise

    return Slow(name, durations)


def test_a_second_cancellation_waits_for_the_cleaning_up_as_well(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(4)
        asyncio.get_running_loop().call_later(1, task.cancel)
        asyncio.get_running_loop().call_later(2, task.cancel)
        task.cancel()
        await asyncio.sleep(1000)

    run = simulate(generators=[slow_to_end("g0", {"generate": 10})], body=body, catch=asyncio.CancelledError)
    assert run.makespan == 7
    assert run.outcome == "stopped"


def test_a_cancel_scope_of_anyio_may_end_it() -> None:
    async def main() -> float:
        with anyio.move_on_after(4) as scope:
            async with Scheduler(
                plan(), generators=[slow_to_end("g0", {"generate": 10})], trainer=SimWorker("t")
            ) as scheduler:
                async for _ in scheduler:
                    pass
        assert scope.cancelled_caught
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 7


def test_leaving_early_ends_the_run(simulate: Callable[..., Any]) -> None:
    class Enough(Exception):
        pass

    async def body(scheduler: Scheduler) -> None:
        async for _ in scheduler:
            raise Enough

    run = simulate(**BUSY, body=body, catch=Enough)
    assert run.outcome == "stopped"
    assert run.of(RunFinished) == [run.events[-1]]


def test_a_run_that_ended_keeps_its_outcome_when_it_is_left(simulate: Callable[..., Any]) -> None:
    """The runner fails at 0.5 s and its slow handle needs until 3.5 s; the body is left at 1 s."""

    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(2.6)
        raise KeyError

    bad = Broken("bad", "generate", ValueError("mine"), {"generate": 1})
    run = simulate(generators=[bad, slow_to_end("g1", {"generate": 10})], body=body, catch=KeyError)
    assert run.outcome == "failed"
    assert run.events[-1].outcome == "failed"
    assert run.makespan == 1.5 + 3


# ---- drain and stop --------------------------------------------------------------------------------------------


class Checkpoints:
    """A checkpointer that remembers."""

    def __init__(self, every: int = 2, save_s: float = 1) -> None:
        self.every, self.save_s = every, save_s
        self.saved: list[int] = []
        self.asked: list[tuple[int, bool]] = []

    def due(self, version: int, *, last: bool) -> bool:
        self.asked.append((version, last))
        return last or version % self.every == 0

    async def save(self, trainer: Any, version: int) -> str:
        assert trainer.version == version
        await asyncio.sleep(self.save_s)
        assert trainer.version == version
        self.saved.append(version)
        return f"step-{version}"


@pytest.mark.parametrize(
    "config", [{"mode": "tag"}, *({"mode": "tcss", "tag": "greedy", "sync": sync} for sync in SYNCS)]
)
def test_drain_after_any_event_finishes_the_step_that_has_begun(
    simulate: Callable[..., Any], config: dict[str, Any]
) -> None:
    options = {**BUSY, "config": config}
    num_events = len(simulate(**options, checkpointer=Checkpoints()).events)
    for number in range(0, num_events, 2):
        checkpoints, box, num_begun, num_seen = Checkpoints(every=100), [], [], 0  # type: ignore[var-annotated]

        async def body(scheduler: Scheduler, box: list[Scheduler] = box) -> None:
            box.append(scheduler)

        def sink(
            event: Any, number: int = number, box: list[Scheduler] = box, num_begun: list[int] = num_begun
        ) -> None:
            nonlocal num_seen
            num_seen += 1
            if num_seen > number and box and not num_begun:
                num_begun.append(box[0].step)
                box[0].drain()

        run = simulate(**options, body=body, sinks=[sink], checkpointer=checkpoints)
        assert run.outcome in {"drained", "completed"}, number
        num_before = num_begun[0] if num_begun else len(run.reports)
        assert num_before <= len(run.reports) <= num_before + 1, number
        run.trained_once()
        assert run.trainer.version == len(run.reports)
        assert checkpoints.saved == ([len(run.reports)] if run.reports else []), number
        assert run.events[-1].outcome == run.outcome


def test_drain_between_two_steps_saves_what_was_trained(simulate: Callable[..., Any]) -> None:
    """After the commit of step 0 at 44, before anything of step 1 has begun."""

    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(45)
        assert scheduler.step == 1
        scheduler.drain()

    checkpoints = Checkpoints(every=100)
    run = simulate(
        num_steps=5,
        generators=[{"generate": 10, "load": 20}],
        trainer={"update": 4, "publish": 5},
        body=body,
        checkpointer=checkpoints,
    )
    assert run.outcome == "drained"
    assert checkpoints.saved == [1]
    assert run.makespan == 44 + 5 + 1


def test_drain_before_the_first_step_trains_nothing(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.drain()

    checkpoints = Checkpoints()
    run = simulate(**BUSY, body=body, checkpointer=checkpoints)
    assert (run.outcome, run.reports, run.makespan, checkpoints.saved) == ("drained", [], 0, [])


def test_drain_twice_is_drain(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        for _ in range(60):
            await asyncio.sleep(1)
            if scheduler.outcome == "running":
                scheduler.drain()

    run = simulate(**BUSY, body=body)
    assert (run.outcome, len(run.reports)) == ("drained", 1)


@pytest.mark.parametrize("seconds", [0, 1, 9.5, 17, 40])
def test_stop_ends_now(simulate: Callable[..., Any], seconds: float) -> None:
    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(seconds)
        scheduler.stop()

    run = simulate(**BUSY, body=body)
    assert run.outcome == "stopped"
    assert run.makespan == seconds


# ---- checkpoints and resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_checkpoints_are_taken_between_a_commit_and_the_next_update(simulate: Callable[..., Any], sync: str) -> None:
    checkpoints = Checkpoints(every=2, save_s=30)
    run = simulate(
        num_steps=5,
        generators=GENERATORS,
        trainer=TRAINER,
        config={"mode": "tcss", "tag": "greedy", "sync": sync},
        checkpointer=checkpoints,
    )
    assert checkpoints.saved == [2, 4, 5]
    assert checkpoints.asked == [(1, False), (2, False), (3, False), (4, False), (5, True)]
    assert [(event.version, event.path) for event in run.of(CheckpointSaved)] == [
        (2, "step-2"),
        (4, "step-4"),
        (5, "step-5"),
    ]
    kinds = [event.kind for event in run.of(TaskFinished) if event.worker == "trainer"]
    for position, kind in enumerate(kinds):
        if kind == "checkpoint":
            assert kinds[position - 2 : position] == ["commit", "publish"]  # generators need not wait for the disk


def test_a_checkpoint_that_cannot_be_saved_ends_the_run(simulate: Callable[..., Any]) -> None:
    class Full(Checkpoints):
        async def save(self, trainer: Any, version: int) -> str:
            raise OSError("disk full")

    run = simulate(num_steps=2, checkpointer=Full(), catch=StepFailed)
    assert isinstance(run.error.__cause__, OSError)
    assert "checkpoint of step" in str(run.error)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_resumed_run_loads_the_weights_before_its_first_generation(simulate: Callable[..., Any], window: int) -> None:
    run = simulate(
        num_steps=4,
        generators=[SimWorker("g0", {"generate": 1, "load": 2}), SimWorker("g1", {"generate": 1}, version=1)],
        trainer=SimWorker("trainer", {"generate": 1, "update": 1, "publish": 3}, version=2),
        config={"window": window, "stale_fraction": None if window == 1 else 1, "tag": "greedy"},
        start_step=2,
    )
    for name in ("g0", "g1"):
        first = next(event for event in run.of(TaskStarted) if event.worker == name)
        assert (first.kind, first.version) == ("load", 2)
    assert [report.index for report in run.reports] == [2, 3]
    assert min(event.version for event in run.of(TaskStarted) if event.kind in {"generate", "assist"}) == 2


def test_a_handle_without_a_version_is_taken_to_hold_the_base_weights(simulate: Callable[..., Any]) -> None:
    class Plain(SimWorker):
        def __getattribute__(self, name: str) -> Any:
            if name == "version" and not vars(self).get("loaded"):
                raise AttributeError(name)
            return super().__getattribute__(name)

        async def load(self, publication: Publication, /) -> LoadReport:
            self.loaded = True
            return await super().load(publication)

    trainer = SimWorker("trainer", version=1)
    run = simulate(num_steps=2, generators=[Plain("g0")], trainer=trainer, start_step=1)
    assert next(event.kind for event in run.of(TaskStarted) if event.worker == "g0") == "load"


def test_the_trainer_must_hold_the_weights_of_the_first_step(simulate: Callable[..., Any]) -> None:
    run = simulate(num_steps=4, trainer=SimWorker("t", version=3), start_step=2, catch=ConfigError)
    assert "holds version 3 but the run starts at step 2" in str(run.error)


# ---- workers that come and go ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_workers_may_come_and_go_at_any_time(simulate: Callable[..., Any], sync: str) -> None:
    for seed in range(60):
        draw = random.Random(seed)  # noqa: S311 - not for secrets

        async def body(scheduler: Scheduler, draw: random.Random = draw) -> None:
            names = ["g0", "g1"]
            for number in range(draw.randint(1, 8)):
                await asyncio.sleep(draw.choice([0, 1, 2.5, 7, 11]))
                if scheduler.outcome != "running":
                    return
                if draw.random() < 0.5:
                    durations = {kind: draw.randint(0, 9) for kind in ("generate", "score", "load")}
                    await scheduler.add_generator(
                        SimWorker(f"n{number}", durations, version=min(draw.choice([0, 0, 1]), scheduler.step))
                    )
                    names.append(f"n{number}")
                elif len(names) > 1:
                    name = names.pop(draw.randrange(len(names)))
                    scheduler.remove_worker(name)
                    if draw.random() < 0.3 and name not in scheduler.statistics()["workers"]:
                        await scheduler.add_generator(SimWorker(name, {"generate": 3}))
                        names.append(name)

        run = simulate(
            num_steps=draw.randint(1, 5),
            generators=GENERATORS,
            trainer=TRAINER,
            config={
                "window": 2,
                "stale_fraction": draw.choice([0, 0.5, 1]),
                "sync": sync,
                "tag": draw.choice(["never", "greedy"]),
            },
            body=body,
        )
        assert run.outcome == "completed", seed
        run.trained_once()
        joined = {event.worker: event.version for event in run.of(WorkerJoined)}
        assert joined.keys() >= {"g0", "g1", "trainer"}
        publications = [event.version for event in run.of(TaskFinished) if event.kind == "publish"]
        assert publications == sorted(set(publications)), seed  # no version is published twice
        for values in (report.metrics() for report in run.reports):
            assert -1e-9 <= values.get("pipeline/bubble_ratio/generator", 0) <= 1 + 1e-9, seed


def test_an_added_generator_loads_the_weights_first(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        async for report in scheduler:
            if report.index == 1:
                await scheduler.add_generator(SimWorker("new", {"generate": 1, "load": 1}))
                return

    run = simulate(num_steps=5, generators=[{"generate": 10}], body=body, config={"mode": "tcss", "tag": "greedy"})
    tasks = [event for event in run.of(TaskStarted) if event.worker == "new"]
    assert tasks[0].kind == "load"
    assert tasks[0].version == 2
    assert {event.kind for event in tasks} == {"load", "generate", "score"}


def test_joining_while_weights_are_published_does_not_publish_them_twice(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(45)
        assert scheduler.statistics()["workers"]["trainer"] == "publish"
        await scheduler.add_generator(SimWorker("new", {"generate": 10}))

    run = simulate(num_steps=2, generators=[{"generate": 10}], trainer={"update": 4, "publish": 5}, body=body)
    assert [event.version for event in run.of(TaskFinished) if event.kind == "publish"] == [1, 2]


def test_a_removed_generator_finishes_its_task_and_leaves(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(12)
        scheduler.remove_worker("g1")
        scheduler.remove_worker("g1")
        await asyncio.sleep(20)
        with pytest.raises(ConfigError, match="no generator or scorer is called 'g1'"):
            scheduler.remove_worker("g1")
        with pytest.raises(ConfigError, match="'g0' is the last generator"):
            scheduler.remove_worker("g0")
        with pytest.raises(ConfigError, match="no generator or scorer is called 'trainer'"):
            scheduler.remove_worker("trainer")

    run = simulate(num_steps=2, generators=[{"generate": 10}] * 2, body=body)
    (left,) = run.of(WorkerLeft)
    assert (left.worker, left.time) == ("g1", 20)
    assert run.schedule("g1") == ["generate 0/1 0-10", "generate 0/3 10-20"]


def test_an_idle_worker_leaves_at_once_and_its_name_may_come_back(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(42)  # all of step 0 is generated; the trainer updates for long
        scheduler.remove_worker("g1")
        with pytest.raises(ConfigError, match="'g0' takes part already"):
            await scheduler.add_generator(SimWorker("g0"))
        await asyncio.sleep(1)
        for name in ("g1", "g2", "g3"):
            await scheduler.add_generator(SimWorker(name, {"generate": 10}))

    run = simulate(num_steps=3, generators=[{"generate": 10}] * 2, trainer={"update": 50}, body=body)
    assert [event.time for event in run.of(WorkerLeft)] == [42]
    assert [event.time for event in run.of(WorkerJoined) if event.worker == "g1"] == [0, 43]
    assert any(line.startswith("generate 1/") for line in run.schedule("g1"))
    run.trained_once()


def test_scorers_may_come_and_go_but_for_the_last(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(5)
        with pytest.raises(ConfigError, match="'s0' is the last scorer"):
            scheduler.remove_worker("s0")
        await scheduler.add_scorer(SimWorker("s1", {"score": 2}))
        await asyncio.sleep(20)
        scheduler.remove_worker("s0")

    run = simulate(num_steps=3, generators=[{"generate": 3}], scorers=[{"score": 9}], body=body)
    assert run.schedule("s1")
    assert [event.worker for event in run.of(WorkerLeft)] == ["s0"]
    run.trained_once()


def test_who_cannot_do_the_work_may_not_join(simulate: Callable[..., Any]) -> None:
    class Mute:
        def __init__(self, name: str) -> None:
            self.name = name

        generate = load = SimWorker.generate

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(ConfigError, match="worker 'm' has no method 'score'"):
            await scheduler.add_generator(Mute("m"))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="worker 'm' has no method 'score'"):
            await scheduler.add_scorer(Mute("m"))  # type: ignore[arg-type]

    simulate(body=body)


def test_nobody_joins_a_run_that_is_over(simulate: Callable[..., Any]) -> None:
    class Starting(SimWorker):
        started = False

        async def start(self) -> None:
            await asyncio.sleep(1000)

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(ConfigError, match=r"the run is over \(completed\)"):
            await scheduler.add_generator(Starting("late"))

    simulate(generators=[{"generate": 1}], body=body)


# ---- consumers -------------------------------------------------------------------------------------------------


def test_a_slow_consumer_never_delays_the_schedule(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        async for _ in scheduler:
            await asyncio.sleep(500)

    slow, quick = simulate(**BUSY, body=body), simulate(**BUSY)
    assert slow.events == quick.events
    assert slow.makespan > quick.makespan


def test_a_consumer_that_falls_far_behind_is_told_what_it_missed(
    simulate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_MAX_UNREAD_REPORTS", 3)
    seen: list[tuple[int, int]] = []

    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(1e6)
        seen.extend([(report.index, report.missed) async for report in scheduler])

    run = simulate(num_steps=8, generators=[{"generate": 1}], body=body)
    assert seen == [(5, 5), (6, 5), (7, 5)]
    assert len(run.of(StepCommitted)) == 8


def test_iterating_outside_of_the_context_is_an_error() -> None:
    async def main() -> None:
        async for _ in Scheduler(plan(), generators=[SimWorker("g")], trainer=SimWorker("t")):
            pass

    with pytest.raises(ConfigError, match="async with Scheduler"):
        run_virtual(main())


def test_breaking_off_the_iteration_and_going_on(simulate: Callable[..., Any]) -> None:
    seen: list[int] = []

    async def body(scheduler: Scheduler) -> None:
        async for report in scheduler:
            seen.append(report.index)
            break

    run = simulate(num_steps=3, body=body)
    assert [*seen, *(report.index for report in run.reports)] == [0, 1, 2]


# ---- handles' lives --------------------------------------------------------------------------------------------


class Living(SimWorker):
    """Has to be started and closed."""

    def __init__(self, name: str, *, started: bool = False, fails: bool = False) -> None:
        super().__init__(name, {"generate": 1})
        self.started, self.fails = started, fails
        self.calls: list[str] = []

    async def start(self) -> None:
        self.calls.append("start")
        await asyncio.sleep(1)
        if self.fails:
            raise OSError("no such device")
        self.started = True

    async def aclose(self) -> None:
        await asyncio.sleep(1)
        self.calls.append("aclose")


def test_the_scheduler_ends_what_it_began_and_nothing_else(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        await scheduler.add_generator(third)

    ours, theirs, third = Living("ours"), Living("theirs", started=True), Living("third")
    simulate(generators=[ours, theirs], body=body)
    assert (ours.calls, theirs.calls, third.calls) == (["start", "aclose"], [], ["start", "aclose"])


def test_a_handle_that_does_not_start_closes_the_others(simulate: Callable[..., Any]) -> None:
    good, bad = Living("good"), Living("bad", fails=True)
    run = simulate(generators=[good, bad], catch=OSError)
    assert str(run.error) == "no such device"
    assert good.calls == ["start", "aclose"]


def test_cancellation_during_the_start_closes_what_was_started() -> None:
    good = Living("good")

    async def main() -> None:
        with anyio.move_on_after(0.5):
            async with Scheduler(plan(), generators=[good], trainer=SimWorker("t")):
                raise AssertionError("unreachable")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
    assert good.calls == ["start", "aclose"]


def test_payloads_are_released_to_their_owner_at_the_commit(simulate: Callable[..., Any]) -> None:
    class Owner(SimWorker):
        def __init__(self, name: str) -> None:
            super().__init__(name, {"generate": 2})
            self.lent: dict[int, tuple[int, int]] = {}

        async def generate(self, micro_batch: MicroBatch, /) -> Rollout:
            rollout = await super().generate(micro_batch)
            self.lent[id(rollout.payload)] = (micro_batch.step, micro_batch.index)
            return rollout

        def release(self, payload: Any) -> None:
            del self.lent[id(payload)]

    async def body(scheduler: Scheduler) -> None:
        async for report in scheduler:
            assert all(step > report.index for owner in owners for step, _ in owner.lent.values())

    owners = [Owner("g0"), Owner("g1")]
    simulate(num_steps=3, generators=owners, config={"mode": "tcss", "tag": "greedy"}, body=body)
    assert [owner.lent for owner in owners] == [{}, {}]


# ---- the rest of the interface ---------------------------------------------------------------------------------


def test_two_schedulers_share_a_loop() -> None:
    async def one(seconds: float, name: str) -> list[int]:
        async with Scheduler(
            plan(3),
            name=name,
            generators=[SimWorker("g", {"generate": seconds})],
            trainer=SimWorker("t", {"update": 1}),
        ) as scheduler:
            return [report.index async for report in scheduler]

    async def main() -> list[list[int]]:
        return list(await asyncio.gather(one(2, "a"), one(3, "b")))

    assert run_virtual(main()) == [[0, 1, 2], [0, 1, 2]]


def test_statistics_say_what_everybody_does(simulate: Callable[..., Any]) -> None:
    seen: list[dict[str, Any]] = []

    async def body(scheduler: Scheduler) -> None:
        seen.append(scheduler.statistics())
        await asyncio.sleep(15)
        seen.append(scheduler.statistics())
        async for _ in scheduler:
            pass
        seen.append(scheduler.statistics())

    simulate(num_micro_batches=3, generators=[{"generate": 10, "score": 7}], trainer={"update": 4}, body=body)
    assert seen[0]["step"] == 0
    assert seen[1] == {
        "step": 0,
        "scoring_queue": 0,
        "update_queue": 0,
        "num_generating": 0,
        "workers": {"trainer": "idle", "g0": "score"},
    }
    assert seen[2] == {
        "step": 1,
        "scoring_queue": 0,
        "update_queue": 0,
        "num_generating": 0,
        "workers": {"trainer": "idle", "g0": "idle"},
    }


class Half:
    """Has only the methods it is given."""

    def __init__(self, name: str, *methods: str) -> None:
        self.name = name
        self.version = 0
        for method in methods:
            setattr(self, method, None)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"generators": [Half("g0", "generate", "load")]}, "'g0' has no method 'score'"),
    ({"generators": [Half("g0", "load", "score")]}, "'g0' has no method 'generate'"),
    ({"generators": [Half("g0", "generate", "score")]}, "'g0' has no method 'load'"),
    ({"trainer": Half("t", "commit", "publish")}, "'t' has no method 'update'"),
    ({"trainer": Half("t", "update", "commit")}, "'t' has no method 'publish'"),
    ({"generators": [], "trainer": Half("t", "update", "commit")}, "'t' has no method 'generate'"),
    ({"generators": [], "trainer": Half("t", "update", "commit", "generate")}, "'t' has no method 'score'"),
    ({"scorers": [Half("s0", "generate")]}, "'s0' has no method 'score'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_handles_that_do_not_fit_are_refused(
    simulate: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    run = simulate(**options, catch=ConfigError)
    assert message in str(run.error)


def test_names_must_be_unique() -> None:
    with pytest.raises(ConfigError, match="names must be unique, got x, x"):
        Scheduler(plan(), generators=[SimWorker("x")], trainer=SimWorker("x"))


def test_a_trainer_without_publish_may_be_alone(simulate: Callable[..., Any]) -> None:
    class Alone(SimWorker):
        publish = None  # type: ignore[assignment]

    run = simulate(num_steps=2, generators=[], trainer=Alone("t", {"generate": 1}), config={"mode": "colocated"})
    assert run.trainer.version == 2


def test_what_is_legal_but_odd_is_said() -> None:
    async def main(config: ScheduleConfig, trainer: Any) -> None:
        async with Scheduler(plan(), generators=[SimWorker("g")], trainer=trainer, config=config) as scheduler:
            async for _ in scheduler:
                pass

    class NoAssist(SimWorker):
        def __getattribute__(self, name: str) -> Any:
            if name == "generate":
                raise AttributeError(name)
            return super().__getattribute__(name)

    with capture_logs() as logs:
        run_virtual(main(ScheduleConfig(window=2, stale_fraction=0.1), SimWorker("t")))
        run_virtual(main(ScheduleConfig(window=3), SimWorker("t")))
        run_virtual(main(ScheduleConfig(tag="greedy"), NoAssist("t")))
    assert [entry["event"] for entry in logs] == [
        "stale_fraction rounds down to no stale micro-batch; the run is on-policy",
        "window above 2 goes beyond the one-step staleness that the paper tests",
        "the trainer cannot generate, so it will not assist",
    ]


def test_a_policy_of_your_own_that_skips_is_asked_once_a_bubble(simulate: Callable[..., Any]) -> None:
    asked: list[int] = []

    def decide(bubble: Bubble) -> Decision:
        asked.append(bubble.num_updated)
        return Decision(assist=False, reason="no")

    policy = Policy("mine", decide, assists_before_update=3)
    simulate(generators=[{"generate": 10}] * 2, trainer={"update": 1}, policy=policy)
    assert asked == [0]  # with two generators nothing is pending any more when an update has ended
    asked.clear()
    simulate(num_micro_batches=3, generators=[{"generate": 10}], trainer={"update": 1}, policy=policy)
    assert asked == [0, 1]


def test_a_policy_that_raises_fails_the_run(simulate: Callable[..., Any]) -> None:
    def decide(_: Any) -> Any:
        raise ZeroDivisionError("mine")

    run = simulate(generators=[{"generate": 10}], policy=Policy("mine", decide), catch=StepFailed)
    assert isinstance(run.error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("start_step", [-1, 3])
def test_a_first_step_outside_the_plan_is_refused(start_step: int) -> None:
    with pytest.raises(ConfigError, match=f"start_step={start_step} is outside the plan's steps, 0 to 2"):
        Scheduler(plan(2), generators=[SimWorker("g")], trainer=SimWorker("t", version=3), start_step=start_step)


def test_a_run_that_was_complete_ends_at_once(simulate: Callable[..., Any]) -> None:
    trainer = SimWorker("t", version=2)
    run = simulate(num_steps=2, generators=[SimWorker("g", version=2)], trainer=trainer, start_step=2)
    assert (run.outcome, run.reports, run.makespan) == ("completed", [], 0)


def test_advantages_that_do_not_fit_the_plan_are_refused_before_anything_starts() -> None:
    with pytest.raises(PlanError, match="best_of_n=2 exceeds the group size 1"):
        Scheduler(plan(), generators=[SimWorker("g")], trainer=SimWorker("t"), advantage=AdvantageSection(best_of_n=2))


def test_a_skipped_bubble_is_not_reopened_by_a_publication(simulate: Callable[..., Any]) -> None:
    asked: list[float] = []

    def decide(bubble: Bubble) -> Decision:
        asked.append(bubble.num_updated)
        return Decision(assist=False, reason="no")

    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(5)
        await scheduler.add_generator(SimWorker("new", {"generate": 10}))

    run = simulate(
        num_steps=2,
        num_micro_batches=8,
        generators=[SimWorker("g0", {"generate": 10}, version=1)],
        trainer=SimWorker("trainer", {"publish": 1, "update": 20}, version=1),
        policy=Policy("mine", decide),
        start_step=1,
        body=body,
    )
    assert run.schedule("trainer")[:2] == ["publish 0 5-6", "update 1/0 10-30"]
    assert asked.count(0) == 1


def test_a_hold_ends_when_the_last_generator_with_old_weights_leaves(simulate: Callable[..., Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        await asyncio.sleep(45)  # the commit was at 44, the publication ends at 49
        await scheduler.add_generator(SimWorker("new", {"generate": 10}, version=1))
        scheduler.remove_worker("g0")

    run = simulate(
        num_steps=2,
        generators=[{"generate": 10}],
        trainer={"update": 4, "publish": 5},
        config={"sync": "hold"},
        body=body,
    )
    assert run.schedule("new")[0] == "generate 1/0 45-55"
    assert run.outcome == "completed"


class Fragile(SimWorker):
    """Its engine falls over once, with an error of its own."""

    num_lives = 1

    async def generate(self, micro_batch: MicroBatch, /) -> Rollout:
        if self.num_lives == 1 and micro_batch.step == 1:
            raise ConnectionError("engine fell over")
        return await super().generate(micro_batch)

    async def restart(self) -> None:
        self.num_lives += 1
        self.version = 0


def test_a_handle_that_can_restart_does_so_whatever_it_raises(simulate: Callable[..., Any]) -> None:
    fragile = Fragile("g0", {"generate": 1})
    run = simulate(num_steps=3, generators=[fragile], trainer={"update": 1})
    (lost,) = run.of(WorkerLost)
    assert (lost.reason, lost.error) == ("raised", "engine fell over")
    assert fragile.num_lives == 2
    run.trained_once()


def test_one_that_cannot_ends_the_run(simulate: Callable[..., Any]) -> None:
    class Whole(Fragile):
        restart = None  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> Any:
            if name == "restart":
                raise AttributeError(name)
            return super().__getattribute__(name)

    run = simulate(num_steps=3, generators=[Whole("g0", {"generate": 1})], catch=StepFailed)
    assert "engine fell over" in str(run.error)
