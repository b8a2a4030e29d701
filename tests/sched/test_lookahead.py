"""Policies that look ahead, on the live scheduler: they see the model's states and reach the model's optimum."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from digen import Plan, ScheduleConfig, SimWorker
from digen.config import AdvantageSection
from digen.events import TagDecided, TaskFinished
from digen.sched import lookahead
from digen.sched.bubbles import LOAD, StepModel, StepState
from digen.sched.lookahead import MAX_NODES, searching, tag_first_policy
from digen.sched.model import Instance
from digen.sched.profile import Profile
from digen.sched.search import search, tag_first
from digen.sched.tag import Bubble, Decision, Policy
from experiments.search_time import plausible, seeded

UNLIMITED = 10**9
NUM_RUNS = 500


@dataclass
class Asked:
    """What a policy was told and answered."""

    bubble: Bubble
    now: float
    situation: tuple[Instance, StepState] | None
    decision: Decision


@dataclass
class Watched:
    """A policy, and everything that it was asked."""

    inner: Policy
    asked: list[Asked] = field(default_factory=list)

    @property
    def policy(self) -> Policy:
        def decide(bubble: Bubble) -> Decision:
            decision = self.inner.decide(bubble)
            self.asked.append(Asked(bubble, asyncio.get_running_loop().time(), bubble.situation(), decision))
            return decision

        return self.inner._replace(decide=decide)


def known(instance: Instance) -> Profile:
    """A profile of exactly these durations."""
    profile = Profile()
    for number, (generate, score) in enumerate(zip(instance.generate_s, instance.score_s, strict=True)):
        profile.expect(f"g{number}", "generate", generate)
        profile.expect(f"g{number}", "score", score)
    profile.expect("generator", "load", instance.load_s)
    profile.expect("trainer", "update", instance.update_s[0])
    profile.expect("trainer", "assist", instance.assist_s[0])
    profile.expect("trainer", "switch_in", instance.switch_in_s[0])
    profile.expect("trainer", "switch_out", instance.switch_out_s[0])
    return profile


def play(simulate: Callable[..., Any], instance: Instance, policy: Policy, **options: Any) -> Any:
    """The instance on the live scheduler, one group a micro-batch."""
    window = instance.window
    return simulate(
        num_steps=instance.num_steps,
        num_micro_batches=instance.num_micro_batches,
        generators=[
            {"generate": g, "score": r, "load": instance.load_s}
            for g, r in zip(instance.generate_s, instance.score_s, strict=True)
        ],
        trainer={
            "generate": instance.assist_s[0],
            "update": instance.update_s[0],
            "switch_in": instance.switch_in_s[0],
            "switch_out": instance.switch_out_s[0],
            "commit": instance.commit_s,
        },
        config={
            "mode": "tcss" if window > 1 else "tag",
            "window": window,
            "stale_fraction": f"{min(1, instance.stale_limit / instance.num_micro_batches + 1e-6):.6f}"
            if window > 1
            else 0,
            "sync": instance.sync,
            "update_order": instance.order,
        },
        **{"policy": policy, "profile": known(instance)} | options,
    )


def last_update(run: Any, step: int = 0) -> float:
    """The end of a step's last update."""
    return float(max(e.time for e in run.of(TaskFinished) if e.kind == "update" and e.step == step))


def draw(rng: random.Random, **changes: Any) -> Instance:
    """One step with ties or without, with one to three generators."""
    num_generators, largest = rng.choice([1, 1, 2, 3]), rng.choice([3, 12, 100])

    def times(count: int, share: float) -> tuple[int, ...]:
        return tuple(rng.randint(0, max(1, round(largest * share))) for _ in range(count))

    fields: dict[str, Any] = {
        "num_micro_batches": rng.randint(1, 8),
        "generate_s": times(num_generators, 1),
        "score_s": times(num_generators, 0.3),
        "update_s": times(1, rng.choice([0.15, 0.6])),
        "assist_s": times(1, rng.choice([0.5, 1.3])),
        "switch_in_s": times(1, 0.2),
        "switch_out_s": times(1, 0.2),
        "order": rng.choice(["index", "ready"]),
        "sync": rng.choice(["hold", "pull"]),
    }
    return Instance(**fields | changes)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """No warnings about windows and shares on the terminal."""
    with capture_logs() as logs:
        yield logs


# ---- the model's state, the model's optimum --------------------------------------------------------------------


def test_search_reaches_the_optimum_through_the_models_own_states(simulate: Callable[..., Any]) -> None:
    rng = seeded("live search")
    num_bubbles = 0
    for number in range(NUM_RUNS):
        instance = draw(rng)
        watched = Watched(searching(UNLIMITED))
        run = play(simulate, instance, watched.policy)
        context = f"run {number}: {instance}"
        assert last_update(run) == search(instance).value, context
        model = StepModel(instance)
        now, state = model.advance(model.start())
        for asked in watched.asked:
            assert state is not None, context
            assert (asked.now, asked.situation) == (now, (instance, state)), context
            passed, state = model.advance(model.assist(state) if asked.decision.assist else model.skip(state))
            now += passed
        assert (now, state) == (last_update(run), None), context
        num_bubbles += len(watched.asked)
    assert num_bubbles > NUM_RUNS


def test_tag_first_reaches_the_best_number_of_assists(simulate: Callable[..., Any]) -> None:
    rng = seeded("live tag first")
    num_assists = 0
    for number in range(NUM_RUNS):
        instance = draw(rng)
        run = play(simulate, instance, tag_first_policy())
        value, n = tag_first(instance)
        assert last_update(run) == value, f"run {number}: {instance}"
        num_assists += n
    assert num_assists > NUM_RUNS


def test_with_stale_work_and_loads_every_prediction_of_a_step_is_the_same_and_comes_true(
    simulate: Callable[..., Any],
) -> None:
    """Nothing is random, and the rest of an optimal plan is an optimal plan of the rest."""
    rng = seeded("live steps")
    seen = dict.fromkeys(("ahead", "outdated", "loading", "stale in flight"), 0)
    for number in range(NUM_RUNS):
        window = rng.choice([1, 2, 2, 3])
        instance = draw(rng, num_steps=rng.randint(2, 4), window=window, commit_s=rng.randint(0, 9))
        limit = rng.randint(1, instance.num_micro_batches) if window > 1 else 0
        instance = replace(instance, load_s=rng.randint(0, 20), stale_limit=limit)
        watched = Watched(searching(UNLIMITED))
        run = play(simulate, instance, watched.policy)
        for asked in watched.asked:
            assert asked.situation is not None
            live, state = asked.situation
            assert replace(live, commit_s=instance.commit_s, num_steps=instance.num_steps) == instance
            StepModel(live).bubble(state)  # an error where there is none
            value = search(live, state).value
            step = asked.bubble.step
            assert asked.now + value == last_update(run, step), f"run {number}, step {step}: {state} of {instance}"
            seen["ahead"] += state.ahead > 0
            seen["outdated"] += state.outdated > 0
            seen["loading"] += any(task.kind == LOAD for task in state.running)
            seen["stale in flight"] += any(state.outdated >> task.worker & 1 for task in state.running)
    assert min(seen.values()) > 10, seen


def test_a_generator_that_loads_is_not_loaded_again(simulate: Callable[..., Any]) -> None:
    """With pull the step begins with loads of 5 under way; the plan counts them once."""
    instance = Instance(
        num_micro_batches=2,
        num_steps=2,
        generate_s=(10,),
        score_s=(1,),
        update_s=(3,),
        assist_s=(50,),
        switch_in_s=(0,),
        switch_out_s=(0,),
        load_s=5,
    )
    watched = Watched(searching())
    run = play(simulate, instance, watched.policy)
    second = next(asked for asked in watched.asked if asked.bubble.step == 1)
    assert second.situation is not None
    assert (second.situation[1].outdated, second.situation[1].running[0][:3]) == (0, (5, 0, LOAD))
    assert second.now + search(*second.situation).value == last_update(run, 1) == second.now + 5 + 2 * 11 + 3


# ---- what the model leaves out ---------------------------------------------------------------------------------


def messy(seed: int) -> dict[str, Any]:
    """Groups over several micro-batches, best-of-N, scorers, limits, durations that vary."""
    rng = seeded(f"messy {seed}")

    def durations() -> dict[str, Any]:
        a, b, c = rng.randint(0, 9), rng.randint(1, 9), rng.randint(1, 5)
        kinds = ("generate", "score", "load", "update", "commit", "publish", "switch_in", "switch_out")
        return {
            kind: (lambda s, i, k=k: (a * s + b * i + k) % 7) if rng.random() < 0.3 else rng.choice([0, 0.1, c, 5, 10])
            for k, kind in enumerate(kinds)
        }

    group = rng.choice([1, 2, 4])
    values = rng.choice([2, 3])
    window = rng.choice([1, 2, 2, 3])
    return {
        "plan": Plan(
            ["a", "b"],
            num_steps=rng.randint(1, 4),
            prompts_per_step=rng.randint(1, 4),
            samples_per_prompt=group,
            micro_batch_size=rng.choice([m for m in (1, 2, 4) if group % m == 0]),
            seed=seed,
        ),
        "generators": [
            SimWorker(f"g{i}", durations(), reward=lambda uid, sample: float((len(uid) + sample) % values))
            for i in range(rng.randint(1, 3))
        ],
        "trainer": durations(),
        "scorers": [SimWorker("s0", durations())] if rng.random() < 0.3 else [],
        "advantage": AdvantageSection(
            kind=rng.choice(["per_prompt", "global_std"]), best_of_n=2 if group > 1 and rng.random() < 0.5 else None
        ),
        "config": {
            "mode": "tag" if window == 1 else "tcss",
            "window": window,
            "stale_fraction": 0 if window == 1 else rng.choice(["0.25", "0.5", "1"]),
            "tag": rng.choice(["search", "tag_first"]),
            "sync": rng.choice(["hold", "pull"]),
            "update_order": rng.choice(["index", "ready"]),
            "max_generating": rng.choice([None, None, 1, 2]),
        },
    }


@pytest.mark.parametrize("chunk", range(4))
def test_whatever_the_plan_the_schedule_stays_legal(simulate: Callable[..., Any], chunk: int) -> None:
    """The invariants are checked after every event, and the model sees a bubble wherever there is one."""
    for seed in range(chunk, 400, 4):
        options = messy(seed)
        run = simulate(**options)
        assert run.outcome == "completed"
        run.trained_once()
        told = [event for event in run.of(TagDecided) if "no bubble" in event.reason]
        assert not told, f"seed {seed}: {told[0]} of {options['config']}"


@pytest.mark.parametrize("tag", ["search", "tag_first"])
def test_workers_come_and_go_while_it_looks_ahead(simulate: Callable[..., Any], tag: str) -> None:
    for seed in range(40):
        rng = seeded(f"come and go {seed}")
        durations = {"generate": rng.randint(1, 9), "score": rng.choice([0, 1]), "load": rng.randint(0, 3)}

        async def body(scheduler: Any, rng: random.Random = rng, durations: dict[str, Any] = durations) -> None:
            await asyncio.sleep(rng.randint(0, 20))
            await scheduler.add_generator(SimWorker("late", {"generate": 2, "score": 1, "load": 1}))
            await asyncio.sleep(rng.randint(0, 20))
            scheduler.remove_worker("g0")
            await asyncio.sleep(rng.randint(0, 5))
            await scheduler.add_generator(SimWorker("g0-again", durations))

        run = simulate(
            num_steps=6,
            num_micro_batches=6,
            generators=[durations, durations],
            trainer={"generate": rng.randint(1, 9), "update": rng.randint(1, 4), "switch_in": 1, "switch_out": 1},
            config={"mode": "tcss", "tag": tag, "sync": rng.choice(["hold", "pull"])},
            body=body,
        )
        assert run.outcome == "completed"
        assert not [event for event in run.of(TagDecided) if "no bubble" in event.reason]
        run.trained_once()


def test_a_task_that_takes_longer_than_expected_leaves_the_bubble_a_bubble(simulate: Callable[..., Any]) -> None:
    """A score expected to take no time lasts 30: its end is due at any moment, and the trainer may still assist."""
    profile = Profile()
    expected = {"g0": {"generate": 10, "score": 0}, "trainer": {"update": 1, "assist": 2}}
    for worker, kinds in expected.items():
        for kind, seconds in kinds.items():
            profile.expect(worker, kind, seconds)  # type: ignore[arg-type]
    run = simulate(
        num_micro_batches=4,
        generators=[{"generate": 10, "score": 30}],
        trainer={"update": 1, "generate": 14},
        config={"mode": "tag", "tag": "search"},
        profile=profile,
    )
    assert len(run.of(TagDecided)) > 1
    assert not [event for event in run.of(TagDecided) if "no bubble" in event.reason]


# ---- measuring -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["search", "tag_first"])
def test_the_first_bubble_assists_and_the_rest_wait_until_durations_are_measured(
    simulate: Callable[..., Any], tag: str
) -> None:
    run = simulate(
        num_steps=2,
        num_micro_batches=5,
        generators=[{"generate": 10, "score": 1}],
        trainer={"update": 5, "generate": 2, "switch_in": 1, "switch_out": 1},
        config={"mode": "tag", "tag": tag},
    )
    told = run.of(TagDecided)
    first = [event for event in told if event.step == 0]
    assert [(event.time, event.assist, event.reason) for event in first[:2]] == [
        (0, True, "durations are not measured yet"),
        (4, False, "durations are not measured yet"),
    ]
    second = [event for event in told if event.step == 1]
    assert second
    assert all("last update in" in event.reason for event in second if event.reason != "updates have begun")


def test_the_switches_before_and_after_an_assist_are_measured_apart(simulate: Callable[..., Any]) -> None:
    instance = draw(seeded("switches"), switch_in_s=(3,), switch_out_s=(8,), num_steps=3, assist_s=(1,), load_s=0)
    watched = Watched(searching(UNLIMITED))
    play(simulate, instance, watched.policy, profile=None)
    assert watched.asked[0].situation is None
    last = watched.asked[-1].situation
    assert last is not None
    assert (last[0].switch_in_s, last[0].switch_out_s) == ((3,), (8,))
    assert watched.asked[-1].bubble.durations.switch_s == 11


def test_a_policy_that_looks_ahead_needs_nothing_of_a_mode_without_assists() -> None:
    assert ScheduleConfig(mode="tag", tag="search").resolved_tag == "search"
    assert ScheduleConfig(mode="tag", tag="tag_first").resolved_tag == "tag_first"


# ---- the cost of a decision ------------------------------------------------------------------------------------


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every strategy that a policy's searches found."""
    found: list[Any] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        found.append(search(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(lookahead, "search", counting)
    return found


@pytest.mark.parametrize("num_generators", [1, 3])
def test_a_decision_simulates_a_bounded_number_of_moves(
    simulate: Callable[..., Any], searches: list[Any], num_generators: int
) -> None:
    one = plausible(seeded("128"), 128, 0.15)
    spread = [0.97 + 0.03 * i for i in range(num_generators)]
    instance = replace(
        one,
        generate_s=tuple(round(num_generators * share * one.generate_s[0]) for share in spread),
        score_s=one.score_s * num_generators,
    )
    play(simulate, instance, searching())
    most = max(strategy.num_nodes for strategy in searches)
    assert most <= (MAX_NODES if num_generators == 1 else MAX_NODES // 4)
    assert most > 20


def test_a_situation_that_recurs_is_searched_once(simulate: Callable[..., Any], searches: list[Any]) -> None:
    """On-policy steps are the same from the second on (the first begins without loads)."""
    instance = replace(plausible(seeded("recurs"), 12, 0.3), num_steps=10, load_s=7)
    watched = Watched(searching())
    play(simulate, instance, watched.policy)
    per_step = [sum(asked.bubble.step == step for asked in watched.asked) for step in range(10)]
    assert len(set(per_step[1:])) == 1
    assert len(searches) == per_step[0] + per_step[1]
