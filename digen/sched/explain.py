"""Algorithm 2's decision tree of one step, drawn as in Fig. 9 of the paper.

:class:`Tree` is the recursion of :func:`digen.sched.search.search` as the paper prints it, which keeps every branch: it
tries the same moves in the same order and prunes them for the same reasons. Tests hold the two to the same value,
decisions and number of moves, and both to brute force.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from digen.errors import ConfigError
from digen.sched.bubbles import StepModel, StepState
from digen.sched.model import Instance
from digen.sched.search import Bound, tag_first

MOST_MICRO_BATCHES = 128
"""The paper's largest step (Fig. 10). The recursion gets deeper with each."""

MAX_NODES = 10_000
"""Moves that are simulated at most: a few seconds."""


@dataclass
class Node:
    """An emerging bubble. Times count from the state that was searched from."""

    number: int
    """In the order in which the bubbles were reached."""
    time: float
    state: StepState
    trainer: int
    """The trainer group whose bubble it is."""
    moves: list[Move] = field(default_factory=list)
    best: Move | None = None
    """``None`` if no plan from here beats what was known when it was reached."""

    @property
    def end(self) -> float:
        """When the step's last update ends under the best plan from here."""
        return math.inf if self.best is None else self.best.end

    @property
    def floor(self) -> float:
        """No plan from here ends before it."""
        return min(move.end for move in self.moves)


@dataclass
class Move:
    """To assist in a bubble, or to skip it."""

    assist: bool
    outcome: Literal["bubble", "end", "cut", "seen", "untried"]
    """Another bubble emerges; the step ends; the bound says that it is no use; what emerges was seen before; the
    search has stopped."""
    end: float
    """When the last update ends under the best plan after it; or, if not ``reached``, a time before which none ends."""
    reached: bool = False
    node: Node | None = None
    """The bubble that emerges, or the one before that is like it."""


class Tree:
    """The decision tree of one step.

    Args:
        instance: durations and rules.
        state: where the step stands; default the start of the run.

    Raises:
        ConfigError: the instance has no bubbles to search, or more micro-batches than ``MOST_MICRO_BATCHES``.
    """

    def __init__(self, instance: Instance, state: StepState | None = None) -> None:
        if instance.num_micro_batches > MOST_MICRO_BATCHES:
            raise ConfigError(
                f"the decision tree of a step of {instance.num_micro_batches} micro-batches would be too deep; "
                f"explain one of at most {MOST_MICRO_BATCHES}"
            )
        self.instance = instance
        self._model = StepModel(instance)
        self._bound = Bound(self._model)
        self._numbers = itertools.count(1)
        self._known: dict[StepState, Node] = {}
        self._lower: dict[StepState, tuple[float, Node]] = {}
        self.num_nodes = 0
        """Moves that were simulated."""
        state = self._model.start() if state is None else state
        self.static_end, self.static_count = tag_first(instance, state)
        """The best plan that assists before the first update only, and the number of its assists."""
        elapsed, bubble = self._model.advance(state)
        self.root = None if bubble is None else self._search(bubble, elapsed, math.inf)
        self.end = elapsed if self.root is None else self.root.end
        """When the step's last update ends under the best plan of Algorithm 2."""

    def _search(self, state: StepState, time: float, limit: float) -> Node:
        """Algorithm 2 from a bubble. Only plans that end before ``limit`` are of use."""
        node = Node(next(self._numbers), time, state, self._model.bubble(state))
        for assist in (True, False):  # 17-24, 12-16
            move = self._try(node, min(node.end, limit), assist=assist)
            node.moves.append(move)
            if move.reached and move.end < node.end:
                node.best = move
        if node.end < limit:
            self._known[state] = node
        else:
            node.best = None
            before = self._lower[state][0] if state in self._lower else 0
            self._lower[state] = max(node.floor - time, before), node
        return node

    def _try(self, node: Node, limit: float, *, assist: bool) -> Move:
        child = self._model.assist(node.state) if assist else self._model.skip(node.state)
        if (least := node.time + self._bound(child)) >= limit:
            return Move(assist, "cut", least)
        if self.num_nodes == MAX_NODES:
            return Move(assist, "untried", least)
        self.num_nodes += 1
        cost, state = self._model.advance(child)  # 6, 10
        time = node.time + cost
        if state is None:  # 7-9
            return Move(assist, "end", time, reached=True)
        if (known := self._known.get(state)) is not None:
            return Move(assist, "seen", time + known.end - known.time, reached=True, node=known)
        if state in self._lower and time + self._lower[state][0] >= limit:
            return Move(assist, "seen", time + self._lower[state][0], node=self._lower[state][1])
        if time >= limit:
            return Move(assist, "cut", time)
        following = self._search(state, time, limit)
        reached = following.best is not None
        return Move(assist, "bubble", following.end if reached else following.floor, reached=reached, node=following)

    @property
    def exact(self) -> bool:
        """Whether every move was tried or cut, so that no decisions are better."""
        return self.num_nodes < MAX_NODES

    @property
    def decisions(self) -> tuple[bool, ...]:
        """Whether to assist, for each bubble that emerges under the best plan."""
        return tuple(move.assist for move in self.path())

    def path(self) -> Iterator[Move]:
        """The moves of the best plan."""
        node = self.root
        while node is not None and node.best is not None:
            yield node.best
            node = node.best.node


def draw(tree: Tree, *, per_s: int = 1, max_lines: int = 60, max_depth: int = 12) -> list[str]:
    """The tree as text, ``*`` before every move of the best plan.

    Args:
        tree: what to draw.
        per_s: units of the tree's times in a second.
        max_lines: moves to show at most.
        max_depth: moves on a path to show at most.
    """
    root = tree.root

    def seconds(time: float) -> str:
        return f"{time / per_s:,.10g} s"

    def situation(node: Node) -> str:
        state = node.state
        whose = f" of trainer{node.trainer}" if tree.instance.num_trainers > 1 else ""
        left = f"{state.pending} to start, {state.ready.bit_count()} scored, {state.updates} to update"
        return f"bubble {node.number}{whose} at {seconds(node.time)} ({left})"

    def outcome(move: Move) -> str:
        end = f"ends at {seconds(move.end)}" if move.reached else f"not before {seconds(move.end)}"
        if move.outcome == "bubble" and move.node is not None:
            return f"{situation(move.node)}: {end}"
        if move.outcome == "seen" and move.node is not None:
            return f"like bubble {move.node.number}: {end}"
        return {"end": end, "cut": f"cut, {end}", "untried": "not tried"}[move.outcome]

    best = {id(move) for move in tree.path()}
    lines, num_hidden = [f"{situation(root)}:" if root is not None else "no bubble emerges"], 0
    for move, bars in _walk(root):
        if len(lines) > max_lines or len(bars) > max_depth:
            num_hidden += 1
            continue
        drawn = "".join("│  " if more else "   " for more in bars[:-1]) + ("├─ " if bars[-1] else "└─ ")
        mark, name = "*" if id(move) in best else " ", "assist" if move.assist else "skip  "
        lines.append(f"{drawn}{mark} {name} → {outcome(move)}")
    if num_hidden:
        lines.append(f"... and {num_hidden:,} more moves, beyond {max_lines} lines or {max_depth} moves on a path")
    counts = Counter(move.outcome for move, _ in _walk(root))
    runs = [(assist, len(list(group))) for assist, group in itertools.groupby(tree.decisions)]
    words = [("assist" if assist else "skip") + (f" x {count}" if count > 1 else "") for assist, count in runs]
    static = f"{tree.static_count} assists before the first update; the last one ends at {seconds(tree.static_end)}"
    kind = "* best" if tree.exact else f"* best of {MAX_NODES:,} moves, more were not tried"
    return [
        *lines,
        f"{kind}: {', '.join(words) or 'no decision'}; the last update ends at {seconds(tree.end)}",
        f"{tree.num_nodes:,} moves simulated, {counts['cut']:,} cut by the bound, {counts['seen']:,} seen before",
        f"tag_first: {static}",
    ]


def _walk(root: Node | None) -> Iterator[tuple[Move, tuple[bool, ...]]]:
    """All moves as they are drawn: each with, for every move on its path, whether another one follows below it."""
    stack: list[tuple[Node, tuple[bool, ...], int]] = [] if root is None else [(root, (), 0)]
    while stack:
        node, bars, number = stack.pop()
        more = number + 1 < len(node.moves)
        if more:
            stack.append((node, bars, number + 1))
        move = node.moves[number]
        yield move, (*bars, more)
        if move.outcome == "bubble" and move.node is not None:
            stack.append((move.node, (*bars, more), 0))
