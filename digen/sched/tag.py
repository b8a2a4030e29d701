"""TAG policies: whether an idle trainer should generate (paper 3.3 and 4).

A policy is a pure function from a :class:`Bubble`, what is known when a bubble emerges, to a :class:`Decision`. It is
asked once per emerging bubble; a skipped bubble stays closed until the trainer's next task. It may be asked only when
an assist is legal, so every answer keeps the schedule correct and only its speed is at stake.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from digen.sched.bubbles import StepState
    from digen.sched.model import Instance


class Durations(Struct, frozen=True):
    """Mean durations in seconds that the run has measured so far; ``None`` where it has not."""

    generate_s: float | None = None
    score_s: float | None = None
    update_s: float | None = None
    assist_s: float | None = None
    switch_s: float | None = None
    """Load and offload together."""


class Bubble(Struct, frozen=True):
    """An emerging bubble of a trainer, and the state of the current step around it."""

    step: int
    num_micro_batches: int
    num_pending: int
    """Micro-batches of the step that nobody has started."""
    num_generating: int
    """Generations of the step in flight."""
    num_unscored: int
    """Generated, not yet scored."""
    num_ready: int
    """Scored and waiting for the trainer; 0 unless the policy asks before the first update."""
    num_updated: int
    num_assists: int
    """Assists of the step so far."""
    num_generators: int
    durations: Durations
    situation: Callable[[], tuple[Instance, StepState] | None] = lambda: None
    """Computes the live state in the exact model's terms, or ``None`` while durations are unknown."""
    can_update: bool = False
    """Whether the trainer could update instead, so that this is no bubble yet; never unless the policy asks early."""
    reopened: bool = False
    """Whether the bubble was skipped before."""


class Decision(NamedTuple):
    """A policy's answer."""

    assist: bool
    reason: str
    saving_s: float | None = None
    """Predicted saving, where the policy predicts one."""
    predicted_s: float | None = None
    """Predicted time to the end of the step's last update, where the policy predicts it."""


class StaleStart(Struct, frozen=True):
    """An idle generator that may start a micro-batch of a later step with the weights that it holds (TCSS)."""

    step: int
    """The micro-batch's."""
    until_commit_s: float | None
    """Predicted time until the current step is committed; ``None`` while durations are unknown."""
    instance: Callable[[], Instance | None]
    """Computes the durations and rules in the exact model's terms, or ``None`` while durations are unknown."""


class Policy(NamedTuple):
    """A named TAG policy."""

    name: str
    decide: Callable[[Bubble], Decision]
    assists_before_update: int = 0
    """How often it may assist before the step's first update even when micro-batches are ready for it (static,
    tag_first): then no gradient is open and the switch is cheapest."""
    reopens: bool = False
    """Whether it is asked at every instant at which the trainer is free and could assist: even if micro-batches are
    ready, and again after a skip whenever something ends (horizon)."""
    gate: Callable[[StaleStart], bool] | None = None
    """Whether a stale start that admission allows is made. ``None``: always. What is refused is asked again whenever
    something ends; fresh work is never refused."""


def never() -> Policy:
    """No assists: plain GAP."""
    return Policy("never", lambda bubble: Decision(assist=False, reason="policy never"))


def greedy() -> Policy:
    """Assist in every bubble."""
    return Policy("greedy", lambda bubble: Decision(assist=True, reason="policy greedy"))


def static(k: int) -> Policy:
    """Assist exactly ``k`` times, before the step's first update (the paper's Static TAG)."""

    def decide(bubble: Bubble) -> Decision:
        if bubble.num_updated:
            return Decision(assist=False, reason="updates have begun")
        if bubble.num_assists >= k:
            return Decision(assist=False, reason=f"{k} assists done")
        return Decision(assist=True, reason=f"assist {bubble.num_assists + 1} of {k}")

    return Policy(f"static({k})", decide, assists_before_update=k)


def threshold() -> Policy:
    """Assist when the predicted saving exceeds the measured cost of the switch.

    Both sides are estimates from running means. The generators alone finish the pending micro-batches in
    ``ceil(pending / G)`` rounds; an assist takes one of them away but keeps the trainer from updating meanwhile. The
    first bubble assists until the durations are measured (paper 4).
    """

    def decide(bubble: Bubble) -> Decision:
        known = bubble.durations
        if known.assist_s is None or known.update_s is None or known.generate_s is None or bubble.num_generators == 0:
            return measuring(bubble)
        switch_s = known.switch_s or 0.0
        saving_s = _finish(bubble, assist=False) - _finish(bubble, assist=True)
        lend = saving_s > switch_s
        comparison = "exceeds" if lend else "does not exceed"
        return Decision(lend, f"saving {saving_s:.3g} s {comparison} switch {switch_s:.3g} s", saving_s)

    return Policy("threshold", decide)


def measuring(bubble: Bubble) -> Decision:
    """What policies that compute do until there is something to compute with: a step's first bubble assists."""
    return Decision(assist=bubble.num_assists == 0, reason="durations are not measured yet")


def _finish(bubble: Bubble, *, assist: bool) -> float:
    """Predicted time until the step's last update ends, without the cost of a switch."""
    known = bubble.durations
    assert known.generate_s is not None  # noqa: S101 - the caller checked
    assert known.update_s is not None  # noqa: S101
    pending = bubble.num_pending - assist
    rounds = math.ceil((pending + bubble.num_generating) / bubble.num_generators)
    num_updates = bubble.num_micro_batches - bubble.num_updated
    generated = rounds * known.generate_s + (known.score_s or 0.0) + known.update_s
    trained = ((known.assist_s or 0.0) if assist else 0.0) + num_updates * known.update_s
    return max(generated, trained)


def policy_from(text: str) -> Policy:
    """The policy that ``schedule.tag`` names; see :func:`digen.config.parse_tag`."""
    from digen.config import parse_tag
    from digen.sched.horizon import horizon
    from digen.sched.lookahead import searching, tag_first_policy

    name, argument = parse_tag(text)
    if name == "static":
        return static(argument or 0)
    if name == "search" and argument is not None:
        return searching(argument)
    policies = {
        "never": never,
        "greedy": greedy,
        "threshold": threshold,
        "search": searching,
        "tag_first": tag_first_policy,
        "horizon": horizon,
    }
    return policies[name]()
