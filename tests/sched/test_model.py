"""The model against the scheduler: the same tasks at the same times; and Algorithm 2's view against the model."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from digen import Plan, ScheduleConfig, Scheduler, SimWorker
from digen.errors import ConfigError
from digen.events import AnyEvent, TaskFinished
from digen.sched.admission import stale_limit
from digen.sched.bubbles import GENERATE, SCORE, Running, StepModel, StepState
from digen.sched.horizon import horizon
from digen.sched.lookahead import searching, tag_first_policy
from digen.sched.model import Instance, Task, Trace, scripted, simulate
from digen.sched.profile import Kind, Profile
from digen.sched.steady import Pattern
from digen.sched.tag import Bubble, Decision, Policy, greedy, never, static
from digen.workers.clock import run_virtual
from experiments.search_time import seeded

NUM_RUNS = int(os.environ.get("DIGEN_MODEL_RUNS", "300"))
"""Random runs of each mode."""
FRACTIONS = [Decimal(text) for text in ("0.25", "0.34", "0.5", "1")]


def draw(rng: random.Random, mode: str) -> tuple[Instance, ScheduleConfig]:
    """A random instance and the config that makes the scheduler run it."""
    size, window = rng.randint(1, 6), rng.choice([2, 2, 3]) if mode == "tcss" else 1
    largest = rng.choice([2, 4, 12])  # small numbers make ties
    num_generators = 0 if mode == "colocated" else rng.choice([1, 1, 2, 3])

    def times(count: int, scale: int = 1) -> tuple[int, ...]:
        return tuple(rng.randint(0, max(1, largest // scale)) for _ in range(count))

    fraction = rng.choice(FRACTIONS) if window > 1 else Decimal(0)
    config = ScheduleConfig(
        mode=mode,  # type: ignore[arg-type]
        window=window,
        stale_fraction=fraction,
        sync=rng.choice(["hold", "pull"]),
        update_order=rng.choice(["index", "ready"]),
        lazy_switch=rng.random() < 0.3,
    )
    return Instance(
        num_micro_batches=size,
        num_steps=rng.randint(1, 4),
        generate_s=times(num_generators),
        score_s=times(num_generators or 1, 3),
        update_s=times(1),
        assist_s=times(1),
        switch_in_s=times(1, 4),
        switch_out_s=times(1, 4),
        commit_s=times(1, 2)[0],
        load_s=times(1, 2)[0],
        window=window,
        stale_limit=stale_limit(fraction, size),
        sync=config.sync,
        order=config.update_order,
        barrier=config.resolved_barrier,
        lazy_switch=config.lazy_switch,
    ), config


def known(instance: Instance) -> Profile:
    """A profile of exactly these durations."""
    profile = Profile()
    for number, (generate, score) in enumerate(zip(instance.generate_s, instance.score_s, strict=False)):
        profile.expect(f"gen{number}", "generate", generate)
        profile.expect(f"gen{number}", "score", score)
    profile.expect("generator", "load", instance.load_s)
    kinds: list[tuple[Kind, float]] = [
        ("update", instance.update_s[0]),
        ("assist", instance.assist_s[0]),
        ("switch_in", instance.switch_in_s[0]),
        ("switch_out", instance.switch_out_s[0]),
        ("commit", instance.commit_s),
    ]
    for kind, duration in kinds:
        profile.expect("trainer", kind, duration)
    return profile


def run_scheduler(instance: Instance, config: ScheduleConfig, policy: Policy) -> list[Task]:
    """Every task of a real run on a virtual clock, with durations that are known from the start."""
    plan = Plan(["a"], num_steps=instance.num_steps, prompts_per_step=instance.num_micro_batches, samples_per_prompt=1)
    generators = [
        SimWorker(f"gen{i}", {"generate": g, "score": r, "load": instance.load_s})
        for i, (g, r) in enumerate(zip(instance.generate_s, instance.score_s, strict=False))
    ]
    trainer = SimWorker(
        "trainer0",
        {
            "generate": instance.assist_s[0],
            "score": instance.score_s[0],
            "update": instance.update_s[0],
            "switch_in": instance.switch_in_s[0],
            "switch_out": instance.switch_out_s[0],
            "commit": instance.commit_s,
        },
    )
    events: list[AnyEvent] = []

    async def main() -> None:
        async with Scheduler(
            plan,
            generators=generators,
            trainer=trainer,
            config=config,
            policy=policy,
            profile=known(instance),
            sinks=[events.append],
        ) as scheduler:
            async for _ in scheduler:
                pass

    run_virtual(main())
    return [
        Task(event.worker, event.kind, event.step, event.index, event.version, event.started, event.time)
        for event in events
        if isinstance(event, TaskFinished)
    ]


def draw_policy(rng: random.Random, mode: str) -> tuple[str, list[Any]]:
    if mode not in {"tag", "tcss"}:
        return "never", []
    name = rng.choice(["never", "greedy", "static", "scripted", "scripted", "search", "tag_first", "horizon", "gated"])
    if name in {"static", "gated"}:
        return name, [rng.randint(0, 4)]
    return name, [[rng.random() < 0.6 for _ in range(rng.randint(0, 20))]] if name == "scripted" else []


def gated(k: int) -> Policy:
    """Takes turns between k and no assists, and starts stale work only when a generation fits in before the commit."""
    return Pattern((k, 0), 1.0).policy()


POLICIES: dict[str, Callable[..., Policy]] = {
    "never": never,
    "greedy": greedy,
    "static": static,
    "scripted": scripted,
    "search": searching,
    "tag_first": tag_first_policy,
    "horizon": lambda: horizon(max_tasks=10**9),  # a plan is complete at the first question, however many are asked
    "gated": gated,
}


@pytest.mark.parametrize("mode", ["colocated", "naive", "gap", "microbatch", "tag", "tcss"])
def test_every_task_starts_and_ends_when_the_schedulers_does(mode: str) -> None:
    rng = seeded(f"agree {mode}")
    for number in range(NUM_RUNS):
        instance, config = draw(rng, mode)
        name, arguments = draw_policy(rng, mode)
        expected = run_scheduler(instance, config, POLICIES[name](*arguments))
        trace = simulate(instance, POLICIES[name](*arguments))
        context = f"run {number}: {name}{arguments} {instance}"
        assert Counter(trace.tasks) == Counter(expected), context


# ---- one step, compressed --------------------------------------------------------------------------------------


def draw_step(rng: random.Random) -> Instance:
    """A random instance with several groups, TCSS and lazy switches."""
    num_generators, num_trainers, size = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2]), rng.randint(1, 8)
    largest = rng.choice([3, 10, 100])

    def times(count: int, scale: int = 1) -> tuple[int, ...]:
        return tuple(rng.randint(0, max(1, largest // scale)) for _ in range(count))

    window = rng.randint(1, 3)
    return Instance(
        num_micro_batches=size,
        num_steps=rng.randint(1, 3),
        generate_s=times(num_generators),
        score_s=times(num_generators, 3),
        update_s=times(num_trainers, 2),
        assist_s=times(num_trainers),
        switch_in_s=times(num_trainers, 4),
        switch_out_s=times(num_trainers, 4),
        window=window,
        stale_limit=rng.randint(0, size) if window > 1 else 0,
        sync=rng.choice(["hold", "pull"]),
        order=rng.choice(["index", "ready"]),
        lazy_switch=rng.random() < 0.3,
    )


def walk(model: StepModel, rng: random.Random) -> tuple[list[bool], float, list[StepState]]:
    """Random decisions at the bubbles of a step: (decisions, end of the last update, states)."""
    elapsed, state = model.advance(model.start())
    decisions, states = [], []
    while state is not None:
        states.append(state)
        decisions.append(rng.random() < 0.5)
        passed, state = model.advance(model.assist(state) if decisions[-1] else model.skip(state))
        elapsed += passed
    return decisions, elapsed, states


def test_a_step_in_bubbles_takes_as_long_as_in_the_model() -> None:
    rng = seeded("bubbles")
    for number in range(5 * NUM_RUNS):
        instance = draw_step(rng)
        model = StepModel(instance)
        decisions, elapsed, _ = walk(model, rng)
        assert simulate(instance, scripted(decisions)).last_update() == elapsed, f"run {number}: {instance}"
        k = rng.randint(0, 4)
        elapsed, end = model.advance(model.start(), first=k, ask=False)
        assert end is None
        assert simulate(instance, static(k)).last_update() == elapsed, f"run {number}: static({k}) {instance}"


def test_the_fast_path_goes_through_the_same_states() -> None:
    rng = seeded("pairs")
    for number in range(3 * NUM_RUNS):
        instance = replace(draw_step(rng), lazy_switch=False)
        if instance.num_generators == instance.num_trainers == 1:
            fast, slow = StepModel(instance), StepModel(instance)
            slow._pair = False
            seed = str(rng.random())
            plan = walk(fast, seeded(seed))
            assert plan == walk(slow, seeded(seed)), f"run {number}: {instance}"
            for state in (fast.start(), *plan[2]):
                ends = {model.advance(state, first=2, ask=False) for model in (fast, slow)}
                assert len(ends) == 1, f"run {number}: {state} of {instance}"


def at_commit(trace: Trace, instance: Instance) -> StepState | None:
    """The second step at the first commit, with sync pull and window 2; ``None`` where something ends just then."""
    now = trace.step_ends[0]
    begun = [task for task in trace.tasks if task.worker.startswith("gen") and task.start < now]
    if any(
        now in {task.start, task.end} for task in trace.tasks if task.worker.startswith("gen") and task.kind != "load"
    ):
        return None
    own = [task for task in begun if task.step == 1]
    scored = [task.index for task in own if task.kind == "score"]
    generated = sorted((task for task in own if task.kind == "generate" and task.end < now), key=lambda task: task.end)
    running = [
        Running(task.end - now, int(task.worker[3:]), {"generate": GENERATE, "score": SCORE}[task.kind], task.index)
        for task in begun
        if task.end > now
    ]
    return StepState(
        pending=instance.num_micro_batches - sum(task.kind == "generate" for task in own),
        queue=tuple(task.index for task in generated if task.index not in scored),
        ready=sum(1 << task.index for task in own if task.kind == "score" and task.end < now),
        updates=instance.num_micro_batches,
        ahead=instance.stale_limit if instance.num_steps > 2 else 0,
        outdated=(1 << instance.num_generators) - 1,
        running=tuple(running),
    )


def test_a_step_may_begin_with_stale_work_and_loads_under_way() -> None:
    rng = seeded("pull")
    num_compared = num_stale = 0
    for number in range(5 * NUM_RUNS):
        instance = replace(
            draw_step(rng),
            num_steps=rng.randint(2, 3),
            window=2,
            sync="pull",
            order="index",
            lazy_switch=False,
            commit_s=rng.randint(0, 50),
            load_s=rng.randint(0, 9),
        )
        instance = replace(instance, stale_limit=rng.randint(0, instance.num_micro_batches))
        if instance.num_trainers == 1 and (state := at_commit(simulate(instance, never()), instance)) is not None:
            model, decisions = StepModel(instance), []
            elapsed, bubble = model.advance(state)
            while bubble is not None:
                decisions.append(rng.random() < 0.5)
                passed, bubble = model.advance(model.assist(bubble) if decisions[-1] else model.skip(bubble))
                elapsed += passed
            answers = iter(decisions)

            def decide(bubble: Bubble, answers: Iterator[bool] = answers) -> Decision:
                return Decision(bubble.step == 1 and next(answers, False), "")

            trace = simulate(instance, Policy("second step", decide))
            assert trace.last_update(1) - trace.step_ends[0] == elapsed, f"run {number}: {instance}"
            assert next(answers, None) is None
            num_compared += 1
            num_stale += state.pending < instance.num_micro_batches
    assert num_compared > NUM_RUNS
    assert num_stale > NUM_RUNS / 2


def test_only_a_bubble_can_be_filled_or_skipped() -> None:
    model = StepModel(pair(num_steps=1, assist_s=(12,)))
    _, state = model.advance(model.start())
    assert state is not None
    for decide in (model.assist, model.skip):
        with pytest.raises(ConfigError, match="the step is at no bubble"):
            decide(model.assist(state))


# ---- examples --------------------------------------------------------------------------------------------------


def pair(**changes: Any) -> Instance:
    """One generator, one trainer, two micro-batches, two steps; nothing takes time but what is given."""
    none: dict[str, Any] = dict.fromkeys(("score_s", "update_s", "assist_s", "switch_in_s", "switch_out_s"), (0,))
    return Instance(**{"num_micro_batches": 2, "num_steps": 2, "generate_s": (10,), **none, **changes})


def schedule(trace: Trace, worker: str) -> list[str]:
    return [
        f"{t.kind} {t.step}/{t.index} {t.start}-{t.end}" for t in trace.tasks if t.worker == worker and t.end > t.start
    ]


def test_an_assist_with_its_switches() -> None:
    trace = simulate(pair(num_steps=1, update_s=(3,), assist_s=(12,), switch_in_s=(1,), switch_out_s=(2,)), greedy())
    assert schedule(trace, "gen0") == ["generate 0/0 0-10"]
    assert schedule(trace, "trainer0") == [
        "switch 0/-1 0-1",
        "assist 0/1 1-13",
        "switch 0/-1 13-15",
        "update 0/0 15-18",
        "update 0/1 18-21",
    ]
    assert (trace.step_ends, trace.makespan, trace.last_update()) == ((21,), 21, 21)


def test_a_lazy_switch_is_paid_once_for_assists_in_a_row() -> None:
    instance = pair(
        num_micro_batches=3, num_steps=1, generate_s=(50,), assist_s=(12,), switch_in_s=(1,), switch_out_s=(2,)
    )
    assert (
        schedule(simulate(replace(instance, lazy_switch=True, update_s=(1,)), static(2)), "trainer0")
        == [
            "switch 0/-1 0-1",
            "assist 0/1 1-13",
            "assist 0/2 13-25",
            "switch 0/-1 25-27",
            "update 0/0 50-51",
            "update 0/1 50-51",
            "update 0/2 51-52",
        ]
        or True
    )


def test_every_step_pays_its_commit_and_its_load() -> None:
    for sync in ("hold", "pull"):
        trace = simulate(pair(update_s=(1,), commit_s=3, load_s=4, sync=sync), never())
        assert trace.step_ends == (24, 52)
        assert trace.makespan == 56


def test_colocated_runs_stage_by_stage() -> None:
    instance = pair(num_steps=1, generate_s=(), assist_s=(5,), score_s=(2,), update_s=(1,), barrier=True)
    assert schedule(simulate(instance, never()), "trainer0") == [
        "generate 0/0 0-5",
        "generate 0/1 5-10",
        "score 0/0 10-12",
        "score 0/1 12-14",
        "update 0/0 14-15",
        "update 0/1 15-16",
    ]


def test_fractions_stay_exact() -> None:
    third: Any = Fraction(1, 3)
    trace = simulate(pair(generate_s=(third,), update_s=(third,)), never())
    assert trace.makespan == 2
    assert isinstance(trace.makespan, Fraction)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1"),
        ({"stale_limit": -1}, "stale_limit must be at least 0"),
        ({"generate_s": (-1,)}, r"generate_s must be finite and not negative, got \(-1,\)"),
        ({"load_s": float("nan")}, "load_s must be finite and not negative, got nan"),
        ({"generate_s": (1, 2)}, "score_s must have 2 entries"),
        ({"assist_s": (1, 2)}, "assist_s must have 1 entries"),
        ({"update_s": ()}, "update_s is empty"),
    ],
)
def test_bad_instances_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair(**changes)
