"""A whole run of the scheduler on a virtual clock, with the invariants checked after every event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from digen import Plan, ScheduleConfig, Scheduler, SimWorker, StepReport
from digen.config import AdvantageSection
from digen.events import AnyEvent, MicroBatchSettled, RunStarted, TaskFinished
from digen.sched import InvariantChecker, check
from digen.workers.clock import run_virtual

Body = Callable[[Scheduler], Coroutine[Any, Any, None]]


@dataclass
class Run:
    """What a run did."""

    trainer: Any
    generators: list[Any]
    scorers: list[Any]
    events: list[AnyEvent] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    makespan: float = 0.0
    outcome: str = ""
    error: BaseException | None = None

    def of(self, kind: type) -> list[Any]:
        """The events of a type."""
        return [event for event in self.events if isinstance(event, kind)]

    def schedule(self, worker: str, *, empty: bool = False) -> list[str]:
        """``"generate 0/1 0-10"``: kind, step/micro-batch, start-end of the worker's tasks that took time (or all)."""
        return [
            f"{event.kind} {event.step}{f'/{event.index}' if event.index >= 0 else ''} {event.started:g}-{event.time:g}"
            for event in self.events
            if isinstance(event, TaskFinished) and event.worker == worker and (empty or event.time > event.started)
        ]

    def trained_once(self) -> None:
        """Every committed step consisted of each of its micro-batches once, but for those that best-of-N emptied."""
        (start,) = self.of(RunStarted)
        for step, indices in self.trainer.trained:
            settled = [event for event in self.of(MicroBatchSettled) if event.step == step]
            empty = [event.index for event in settled if event.outcome == "empty"]
            assert sorted([*indices, *empty]) == list(range(start.num_micro_batches)), f"step {step}: {indices}"


def _workers(prefix: str, given: Sequence[Any]) -> list[Any]:
    return [
        SimWorker(f"{prefix}{number}", item) if isinstance(item, Mapping) else item for number, item in enumerate(given)
    ]


@pytest.fixture
def simulate() -> Callable[..., Run]:
    """Run a plan. Workers are given as mappings of durations or as handles; ``body`` replaces the plain iteration."""

    def simulate(
        *,
        num_steps: int = 1,
        num_micro_batches: int = 4,
        plan: Plan | None = None,
        generators: Sequence[Any] = ({},),
        trainer: Any = None,
        scorers: Sequence[Any] = (),
        advantage: AdvantageSection | None = None,
        body: Body | None = None,
        sinks: Sequence[Callable[[AnyEvent], None]] = (),
        catch: type[BaseException] | tuple[type[BaseException], ...] = (),
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Run:
        if plan is None:
            plan = Plan(["a"], num_steps=num_steps, prompts_per_step=num_micro_batches, samples_per_prompt=1)
        trainer = {} if trainer is None else trainer
        run = Run(
            trainer=SimWorker("trainer", trainer) if isinstance(trainer, Mapping) else trainer,
            generators=_workers("g", generators),
            scorers=_workers("s", scorers),
        )

        async def main() -> None:
            scheduler = Scheduler(
                plan,
                generators=run.generators,
                trainer=run.trainer,
                scorers=run.scorers,
                config=ScheduleConfig(**{"mode": "gap", **(config or {})}),
                advantage=advantage,
                sinks=[run.events.append, InvariantChecker(), *sinks],
                **options,
            )
            try:
                async with scheduler:
                    if body is not None:
                        await body(scheduler)
                    async for report in scheduler:
                        run.reports.append(report)
            except catch as error:
                run.error = error
            finally:
                run.outcome = scheduler.outcome
                run.makespan = asyncio.get_running_loop().time()
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert not left, f"left behind: {left}"

        run_virtual(main())
        check(run.events)
        return run

    return simulate
