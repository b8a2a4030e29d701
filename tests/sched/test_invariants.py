"""The checker rejects every kind of broken stream, and catches a scheduler that was broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from digen.errors import InvariantViolation
from digen.events import (
    AnyEvent,
    Evaluated,
    GroupCompleted,
    MicroBatchSettled,
    RunFinished,
    StepCommitted,
    TaskFailed,
    TaskFinished,
    TaskStarted,
    WorkerJoined,
    WorkerLeft,
)
from digen.sched import InvariantChecker, check, loop, results, select, state
from digen.sched.state import State, Step, Task

Stream = list[AnyEvent]


@pytest.fixture
def stream(simulate: Callable[..., Any]) -> Stream:
    """A good stream: two generators, assists, stale work."""
    run = simulate(
        num_steps=3,
        generators=[{"generate": 10, "score": 1, "load": 2}, {"generate": 13, "score": 1, "load": 2}],
        trainer={"generate": 11, "update": 9, "commit": 1, "publish": 1},
        config={"mode": "tcss", "tag": "greedy"},
    )
    assert check(run.events).steps_committed == [0, 1, 2]
    return list(run.events)


def find(stream: Stream, event_type: type, /, **fields: Any) -> int:
    """Position of the first event of a type with these fields."""
    return next(
        position
        for position, event in enumerate(stream)
        if isinstance(event, event_type) and all(getattr(event, name) == value for name, value in fields.items())
    )


def change(stream: Stream, position: int, **fields: Any) -> None:
    stream[position] = msgspec.structs.replace(stream[position], **fields)


def change_task(stream: Stream, position: int, **fields: Any) -> None:
    """Change a task's start and its end alike."""
    task = stream[position].task  # type: ignore[union-attr]
    for place, event in enumerate(stream):
        if getattr(event, "task", None) == task:
            change(stream, place, **{name: value for name, value in fields.items() if hasattr(event, name)})


def drop_task(stream: Stream, position: int) -> None:
    task = stream[position].task  # type: ignore[union-attr]
    stream[:] = [event for event in stream if getattr(event, "task", None) != task]


def backwards(stream: Stream) -> None:
    change(stream, len(stream) - 2, time=0.0)


def headless(stream: Stream) -> None:
    del stream[0]


def busy(stream: Stream) -> None:
    position = find(stream, TaskStarted, kind="generate")
    twin = msgspec.structs.replace(stream[position], task=10_000, index=3)
    stream.insert(position + 1, twin)


def load_during_generation(stream: Stream) -> None:
    load = stream[find(stream, TaskStarted, kind="load", worker="g0")]
    position = find(stream, TaskFinished, kind="generate", worker="g0")
    stream.insert(position, msgspec.structs.replace(load, time=stream[position].time, task=10_000))


def stranger(stream: Stream) -> None:
    del stream[find(stream, WorkerJoined, worker="g1")]


def joins_twice(stream: Stream) -> None:
    stream.insert(5, msgspec.structs.replace(stream[find(stream, WorkerJoined, worker="g1")], time=stream[5].time))


def leaves_busy(stream: Stream) -> None:
    position = find(stream, TaskStarted, kind="generate")
    event = stream[position]
    stream.insert(position + 1, WorkerLeft(event.time, event.worker, "removed"))  # type: ignore[union-attr]


def index_of_a_commit(stream: Stream) -> None:
    change(stream, find(stream, TaskStarted, kind="commit"), index=1)


def no_index_of_an_update(stream: Stream) -> None:
    change(stream, find(stream, TaskStarted, kind="update"), index=-1)


def generated_twice(stream: Stream) -> None:
    position = find(stream, TaskStarted, kind="generate", step=1)
    change(stream, position, step=1, index=0)
    later = [p for p, e in enumerate(stream) if isinstance(e, TaskStarted) and e.kind == "generate" and e.step == 1]
    change(stream, later[1], index=0)


def outside_the_step(stream: Stream) -> None:
    change(stream, 0, num_micro_batches=3)


def outside_the_plan(stream: Stream) -> None:
    change(stream, 0, num_steps=2)


def other_version(stream: Stream) -> None:
    change(stream, find(stream, TaskStarted, kind="generate", step=2), version=2)


def too_stale(stream: Stream) -> None:
    change(stream, 0, window=1)


def too_many_stale(stream: Stream) -> None:
    change(stream, 0, stale_limit=1)


def unmarked(stream: Stream) -> None:
    change(stream, find(stream, TaskStarted, kind="generate", stale=True), stale=False)


def assist_elsewhere(stream: Stream) -> None:
    change(stream, find(stream, TaskStarted, kind="generate"), kind="assist")


def generates_first(stream: Stream) -> None:
    position = find(stream, TaskStarted, kind="score")
    event = stream[position]
    assert isinstance(event, TaskStarted)
    stream[position] = TaskStarted(event.time, event.task, "generate", event.worker, 0, 3, 0)


def scored_twice(stream: Stream) -> None:
    scores = [p for p, e in enumerate(stream) if isinstance(e, TaskStarted) and e.kind == "score"]
    first = stream[scores[0]]
    change(stream, scores[1], step=first.step, index=first.index)  # type: ignore[union-attr]


def updated_unscored(stream: Stream) -> None:
    drop_task(stream, find(stream, TaskStarted, kind="score", index=0))


def out_of_order(stream: Stream) -> None:
    scored: list[int] = []
    for position, event in enumerate(stream):
        if isinstance(event, TaskFinished) and event.kind == "score" and event.step == 0:
            scored.append(event.index)
        elif isinstance(event, TaskStarted) and event.kind == "update" and event.index < max(scored):
            change(stream, position, index=max(scored))
            return


def update_elsewhere(stream: Stream) -> None:
    position = find(stream, TaskStarted, kind="update")
    change(stream, find(stream, WorkerJoined, worker="trainer"), worker="t")
    stream.insert(position, WorkerJoined(stream[position].time, "trainer", "generator", 0))
    stream[:] = [
        msgspec.structs.replace(event, worker="t")
        if isinstance(event, TaskStarted | TaskFinished) and event.worker == "trainer" and place < position
        else event
        for place, event in enumerate(stream)
    ]


def update_of_the_next_step(stream: Stream) -> None:
    change(stream, find(stream, TaskStarted, kind="update"), step=1)


def update_of_another_version(stream: Stream) -> None:
    change(stream, find(stream, TaskStarted, kind="update", step=1), version=1)


def before_the_barrier(stream: Stream) -> None:
    change(stream, 0, barrier=True)


def unknown_end(stream: Stream) -> None:
    del stream[find(stream, TaskStarted, kind="update")]


def ends_as_another(stream: Stream) -> None:
    change(stream, find(stream, TaskFinished, kind="generate"), version=7)


def not_settled(stream: Stream) -> None:
    del stream[find(stream, MicroBatchSettled, index=3)]


def settled_twice(stream: Stream) -> None:
    position = find(stream, MicroBatchSettled)
    stream.insert(position, stream[position])


def settled_as_empty(stream: Stream) -> None:
    change(stream, find(stream, MicroBatchSettled), outcome="empty")


def settled_otherwise(stream: Stream) -> None:
    change(stream, find(stream, MicroBatchSettled, step=1), version=1)


def settled_fresher(stream: Stream) -> None:
    change(stream, find(stream, MicroBatchSettled, staleness=1), staleness=0)


def commit_of_another_step(stream: Stream) -> None:
    change(stream, find(stream, TaskStarted, kind="commit"), step=1)


def committed_another(stream: Stream) -> None:
    change(stream, find(stream, StepCommitted), step=1)


def committed_another_version(stream: Stream) -> None:
    change(stream, find(stream, StepCommitted), version=2)


def published_another(stream: Stream) -> None:
    change(stream, find(stream, TaskStarted, kind="publish"), version=2)


def not_published(stream: Stream) -> None:
    drop_task(stream, find(stream, TaskStarted, kind="publish"))


def loaded_again(stream: Stream) -> None:
    load = find(stream, TaskStarted, kind="load", version=2)
    change_task(stream, load, version=1)


def group_out_of_bound(stream: Stream) -> None:
    change(stream, find(stream, GroupCompleted, step=2), versions=(0, 2))


def ends_too_early(stream: Stream) -> None:
    del stream[find(stream, StepCommitted, step=2)]


def old_weights(stream: Stream) -> None:
    drop_task(stream, find(stream, TaskStarted, kind="load", version=3))


def still_running(stream: Stream) -> None:
    del stream[find(stream, TaskFinished, kind="load", version=3)]


def starts_beyond(stream: Stream) -> None:
    change(stream, 0, start_step=9)


BROKEN: list[tuple[Callable[[Stream], None], str]] = [
    (backwards, "time runs backwards"),
    (headless, "before run_started"),
    (busy, "the worker is busy"),
    (load_during_generation, "the worker is busy"),
    (stranger, "does not take part"),
    (joins_twice, "takes part already"),
    (leaves_busy, "leaves during a task"),
    (index_of_a_commit, "index where none belongs"),
    (no_index_of_an_update, "index where none belongs"),
    (generated_twice, "generated again"),
    (outside_the_step, "outside the step"),
    (outside_the_plan, "outside the plan"),
    (other_version, "other than the worker's own"),
    (too_stale, "staleness outside the window"),
    (too_many_stale, "more stale micro-batches"),
    (unmarked, "stale mark"),
    (assist_elsewhere, "assist away from the trainer"),
    (generates_first, "generates while scores wait"),
    (scored_twice, "scored while"),
    (updated_unscored, "updated while generated"),
    (out_of_order, "index order wants"),
    (update_elsewhere, "update away from the trainer"),
    (update_of_the_next_step, "update of a step other than 0"),
    (update_of_another_version, "not the version that generated it"),
    (before_the_barrier, "before the barrier"),
    (unknown_end, "does not run there"),
    (ends_as_another, "ends as another task"),
    (not_settled, "3 of 4 micro-batches settled"),
    (settled_twice, "settles as updated while settled"),
    (settled_as_empty, "settles as empty while updated"),
    (settled_otherwise, "settles with another version"),
    (settled_fresher, "settles with another staleness"),
    (commit_of_another_step, "commit of a step other than 0"),
    (committed_another, "commits a step other than 0"),
    (committed_another_version, "a version other than step"),
    (published_another, "publishes a version other than 1"),
    (not_published, "was not published"),
    (loaded_again, "loads the version it holds"),
    (group_out_of_bound, "version out of bound"),
    (ends_too_early, "completed after 2 of 3 steps"),
    (old_weights, "without the final weights"),
    (still_running, "tasks still run on g"),
    (starts_beyond, "start_step is outside"),
]


@pytest.mark.parametrize(("damage", "rule"), BROKEN, ids=[damage.__name__ for damage, _ in BROKEN])
def test_a_broken_stream_is_rejected(stream: Stream, damage: Callable[[Stream], None], rule: str) -> None:
    damage(stream)
    with pytest.raises(InvariantViolation, match=rule):
        check(stream)


def test_the_message_names_the_event(stream: Stream) -> None:
    change(stream, len(stream) - 1, time=0.0)
    with pytest.raises(InvariantViolation, match=rf"event {len(stream)}: time runs backwards .*RunFinished"):
        check(stream)


def test_several_runs_of_one_folder_are_one_stream(stream: Stream) -> None:
    """A run that was killed in the middle, and one that began again."""
    cut = find(stream, StepCommitted, step=1)
    first = stream[: cut + 1]
    evaluated = Evaluated(0.0, 0, 1, {})
    checker = check([evaluated, *first, *stream])
    assert checker.steps_committed == [0, 1, 0, 1, 2]
    assert checker.num_events == 1 + len(first) + len(stream)


def test_a_failed_task_counts(stream: Stream) -> None:
    position = find(stream, TaskFinished, kind="update", index=2)
    ended = stream[position]
    assert isinstance(ended, TaskFinished)
    failed = TaskFailed(ended.time, ended.task, "update", "trainer", 0, 2, ended.started, "it broke")
    running = {}
    for event in stream[:position]:
        if isinstance(event, TaskStarted):
            running[event.worker] = event
        elif isinstance(event, TaskFinished):
            del running[event.worker]
    del running["trainer"]
    others = [
        TaskFailed(ended.time, e.task, e.kind, e.worker, e.step, e.index, e.time, "cancelled") for e in running.values()
    ]
    checker = check([*stream[:position], failed, *others, RunFinished(ended.time, "failed", "it broke")])
    assert checker.num_failed == 1 + len(others)
    assert checker.num_started == checker.num_finished + checker.num_failed


# ---- a scheduler that was broken on purpose --------------------------------------------------------------------


@pytest.fixture
def broken(simulate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run, replace parts of the scheduler, run again, and expect a rule to be broken."""

    def run(*replacements: tuple[Any, str, Any], rule: str, **options: Any) -> None:
        options.setdefault("config", {"mode": "tcss", "tag": "greedy", "stale_fraction": 0.25})
        options.setdefault("generators", [{"generate": 10, "score": 1, "load": 2}, {"generate": 3, "load": 5}])
        options.setdefault("trainer", {"generate": 11, "update": 9, "commit": 1, "publish": 1})
        simulate(num_steps=4, **options)
        for target, name, replacement in replacements:
            monkeypatch.setattr(target, name, replacement)
        with pytest.raises(InvariantViolation, match=rule):
            simulate(num_steps=4, **options)

    return run


def test_a_window_that_is_too_large_by_one_is_caught(broken: Callable[..., None]) -> None:
    def admits(step: int, version: int, *, window: int, num_stale: int, limit: int) -> bool:
        return 0 <= step - version <= window

    def horizon(self: State) -> int:
        return min(self.step + self.rules.window + 1, self.last_step)

    replacements = (state, "admits", admits), (State, "horizon", property(horizon))
    broken(*replacements, rule="staleness outside the window", config={"window": 1})


def test_a_stale_quota_that_is_too_large_by_one_is_caught(broken: Callable[..., None]) -> None:
    def admits(step: int, version: int, *, window: int, num_stale: int, limit: int) -> bool:
        return step == version or (0 < step - version < window and num_stale <= limit)

    broken((state, "admits", admits), rule="more stale micro-batches")


def test_ignoring_index_order_is_caught(broken: Callable[..., None]) -> None:
    def next_update(_: State, step: Step) -> int | None:
        return next(iter(step.ready), None)

    broken((select, "next_update", next_update), rule="index order wants")


def test_generating_before_scoring_is_caught(broken: Callable[..., None]) -> None:
    def eager(now: State, gate: None) -> Task | None:
        return select._load(now) or select._generate(now, gate) or select._score(now)

    broken((loop, "select", eager), rule="generates while scores wait")


def test_settling_twice_is_caught(broken: Callable[..., None]) -> None:
    settled = results.Results._settled

    def twice(self: results.Results, *arguments: Any) -> None:
        settled(self, *arguments)
        settled(self, *arguments)

    broken((results.Results, "_settled", twice), rule="settles as updated while settled")


def test_committing_one_update_early_is_caught(broken: Callable[..., None]) -> None:
    def complete(self: Step) -> bool:
        return len(self.settled) >= len(self.micro_batches) - 1

    broken((Step, "complete", property(complete)), rule="3 of 4 micro-batches settled")


def test_loading_during_a_generation_is_caught(broken: Callable[..., None]) -> None:
    def hasty(now: State, gate: None) -> Task | None:
        publication = now.publication
        for worker in now.generators.values():
            busy = worker.task is not None and worker.task.kind == "generate"
            if publication is not None and busy and worker.version < publication.version:
                version = publication.version
                return Task("load", worker, version - 1, -1, version, (publication,))
        return select.select(now, gate)

    slow = [{"generate": lambda step, index: 40 if step == 1 else 5}]
    broken((loop, "select", hasty), rule="the worker is busy with .*generate", generators=slow)


def test_weights_that_change_behind_the_back_are_caught(broken: Callable[..., None]) -> None:
    loaded = State.loaded

    def forgetful(self: State, worker: Any, version: int) -> None:
        loaded(self, worker, version)
        worker.version = version + 1

    broken((State, "loaded", forgetful), rule="other than the worker's own|loads the version it holds")


def test_generating_again_is_caught(broken: Callable[..., None]) -> None:
    def dispatch(self: State, step: Step, worker: Any) -> tuple[int, bool]:
        index, stale = original(self, step, worker)
        if index == 2:
            step.pending.append(1)
        return index, stale

    original = State.dispatch
    broken((State, "dispatch", dispatch), rule="generated again while")


def test_the_checker_knows_nothing_of_the_scheduler(stream: Stream) -> None:
    checker = InvariantChecker()
    for event in stream:
        checker(event)
    assert checker.num_started == checker.num_finished
    assert checker.num_failed == 0
