"""Prompts are encoded once a step, before it is generated for, and what comes out travels with the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from digen import Plan, ScheduleConfig, Scheduler, SimWorker
from digen.errors import ConfigError, ProtocolError, StepFailed
from digen.events import AnyEvent, BubbleOpened, TaskFinished
from digen.sched import check
from digen.types import Encoded, MicroBatch, Payload, Prompt, Rollout
from digen.workers.clock import run_virtual


class Encoder(SimWorker):
    """A generator that takes 4 to encode, and notes what it was given."""

    def __init__(self, name: str, durations: dict[str, Any]) -> None:
        super().__init__(name, durations)
        self.given: list[tuple[int, int, Encoded | None]] = []
        self.encoded: list[tuple[Prompt, ...]] = []
        self.released: list[Payload] = []

    async def encode(self, prompts: Sequence[Prompt], /) -> Encoded:
        await self._spend("score")
        self.encoded.append(tuple(prompts))
        return Encoded(tuple(prompts), Payload({"rows": len(prompts)}))

    async def generate(self, micro_batch: MicroBatch, encoded: Encoded | None = None, /) -> Rollout:
        self.given.append((micro_batch.step, micro_batch.index, encoded))
        return await super().generate(micro_batch)

    def release(self, payload: Payload) -> None:
        self.released.append(payload)


def play(
    generators: list[Any], trainer: Any, *, num_steps: int = 2, prompts: Sequence[str] = ("a", "b"), **config: Any
) -> list[AnyEvent]:
    """Two micro-batches a step; returns the events, which keep every invariant."""
    events: list[AnyEvent] = []
    plan = Plan(list(prompts), num_steps=num_steps, prompts_per_step=2, samples_per_prompt=1, shuffle=False)

    async def main() -> None:
        async with Scheduler(
            plan, generators=generators, trainer=trainer, config=ScheduleConfig(**config), sinks=[events.append]
        ) as scheduler:
            async for _ in scheduler:
                pass

    run_virtual(main())
    check(events)
    return events


def spans(events: list[AnyEvent], worker: str) -> list[str]:
    return [
        f"{event.kind} {event.step}{f'/{event.index}' if event.index >= 0 else ''} {event.started:g}-{event.time:g}"
        for event in events
        if isinstance(event, TaskFinished) and event.worker == worker
    ]


TIMES = {"generate": 10, "score": 4, "load": 2}
TRAINER = {"update": 3, "commit": 1, "generate": 12}


def test_a_step_is_encoded_once_before_it_and_the_next_one_while_nothing_else_can_be_done() -> None:
    encoder = Encoder("gen0", TIMES)
    events = play([encoder], SimWorker("trainer", TRAINER))
    assert spans(events, "gen0") == [
        "encode 0 0-4",
        "generate 0/0 4-14",
        "score 0/0 14-18",
        "generate 0/1 18-28",
        "score 0/1 28-32",
        "encode 1 32-36",  # while the trainer still updates
        "load 0 36-38",
        "generate 1/0 38-48",
        "score 1/0 48-52",
        "generate 1/1 52-62",
        "score 1/1 62-66",
        "load 1 70-72",
    ]
    assert encoder.encoded == [(Prompt("a"), Prompt("b"))] * 2
    assert [(step, index) for step, index, _ in encoder.given] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(encoded is not None and encoded.prompts == (Prompt("a"), Prompt("b")) for *_, encoded in encoder.given)


def test_an_assist_gets_what_a_generator_encoded() -> None:
    trainer = Encoder("trainer", TRAINER)
    encoder = Encoder("gen0", TIMES)
    events = play([encoder], trainer, num_steps=1, tag="greedy")
    assert spans(events, "trainer")[0] == "switch 0 4-4"  # not before the prompts are encoded
    ((_, _, encoded),) = trainer.given
    assert encoded is not None
    assert encoded == encoder.given[0][2]
    assert not trainer.encoded


def test_every_prompt_of_a_step_is_encoded_once() -> None:
    encoder = Encoder("gen0", TIMES)
    play([encoder], SimWorker("trainer", TRAINER), prompts=["same", "same"], num_steps=1)
    assert encoder.encoded == [(Prompt("same"),)]


def test_stale_work_finds_its_prompts_encoded() -> None:
    encoder = Encoder("gen0", TIMES)
    events = play([encoder], SimWorker("trainer", TRAINER | {"update": 30}), window=2, stale_fraction=1, num_steps=3)
    assert [line.split()[1] for line in spans(events, "gen0") if line.startswith("encode")] == ["0", "1", "2"]
    assert len(encoder.given) == 6


def test_while_one_generator_encodes_the_others_say_that_they_wait_for_it() -> None:
    first, second = Encoder("gen0", TIMES), Encoder("gen1", TIMES)
    events = play([first, second], SimWorker("trainer", TRAINER), num_steps=1)
    causes = [event.cause for event in events if isinstance(event, BubbleOpened) and event.worker == "gen1"]
    assert causes[0] == "wait_encode"
    assert (first.encoded, second.encoded) == ([(Prompt("a"), Prompt("b"))], [])


def test_what_was_encoded_is_given_back_when_its_step_is_committed() -> None:
    encoder = Encoder("gen0", TIMES)
    play([encoder], SimWorker("trainer", TRAINER))
    encoded = [payload for payload in encoder.released if "rows" in payload]
    assert len(encoded) == 2


def test_all_generators_encode_or_none() -> None:
    with pytest.raises(ConfigError, match="gen1 have no method 'encode' but others do"):
        play([Encoder("gen0", TIMES), SimWorker("gen1", TIMES)], SimWorker("trainer", TRAINER))


def test_other_prompts_than_those_given_are_an_error() -> None:
    class Wrong(Encoder):
        async def encode(self, prompts: Sequence[Prompt], /) -> Encoded:
            return Encoded(tuple(prompts[:1]), Payload({}))

    with pytest.raises(StepFailed, match="encode of step 0 on gen0 returned 1 other prompts than the 2") as failure:
        play([Wrong("gen0", TIMES)], SimWorker("trainer", TRAINER))
    assert isinstance(failure.value.__cause__, ProtocolError)
