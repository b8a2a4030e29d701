"""Algorithm 2: which bubbles of a step to fill with assists.

The listing of the paper beside what stands here::

     1-4   (T*, Ω*) ← Search(S0, ∅)           search(): the root frame; returns a Strategy
     6     S ← Advance(S)                     StepModel.advance, once per move
     7-9   if Finished(S)                     advance returned no state: the time is exact
    10     b ← EmergingBubble(S)              the state that advance returned is at b
    11     (T*, Ω*) ← (+∞, ∅)                 _Frame.best, _Frame.choice
    17-24  InsertTAG, Search, compare         the first move of a frame: True
    12-16  SkipBubble, Search, compare        the second move: False
    25     return (T*, Ω*)                    the frame is done: its value goes to the frame below

What is ours: an explicit stack instead of recursion, so that the depth has no limit; the assist is tried *first*, so
that the first plan found is good and the bound of :class:`Bound` cuts early (as printed, the first plan is the worst
one); remaining times under compressed states are remembered, exact values and lower bounds apart. A child is explored
only as far as it can beat what its ancestors have: that budget may be negative.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from digen.errors import ConfigError
from digen.sched.bubbles import ASSIST, GENERATE, SCORE, SWITCH_IN, StepModel, StepState
from digen.sched.model import Instance


class Strategy(NamedTuple):
    """What a search found: T* and Ω* of Algorithm 2."""

    value: float
    """Time from the state searched from to the end of the step's last update."""
    decisions: tuple[bool, ...]
    """Whether to assist, for each bubble that emerges under the earlier decisions."""
    exact: bool
    """Whether no decisions are better; False when the search stopped at ``max_nodes``."""
    num_nodes: int
    """Moves that were simulated."""


class Bound:
    """A lower bound on the time that a step still takes, whatever is decided (branch and bound of paper 4).

    With n more assists the generators must still generate ``pending - n`` and score everything that is not scored, and
    the trainers must still do n assists and the updates. Both are shared out ideally, over the groups that are free
    soonest, at the speed of the fastest; the least over n of the longer of the two is the bound. Besides, no update
    starts before the next score has ended.
    """

    def __init__(self, model: StepModel) -> None:
        instance = model.instance
        self._groups = instance.num_generators, instance.num_trainers
        self._generate, self._score = min(instance.generate_s), min(instance.score_s)
        self._update, self._assist = min(instance.update_s), min(instance.assist_s)
        self._alone, self._reopen = instance.num_trainers == 1, model.reopen
        self._assisted = self._assist + (0 if instance.lazy_switch else min(instance.switch_in_s))
        # With several trainers the last switch back of each may outlast the step; a lazy one may not come at all.
        self._back = min(instance.switch_out_s) if self._alone and not instance.lazy_switch else 0
        self._lend = self._assist + self._back + (0 if instance.lazy_switch else min(instance.switch_in_s))

    def __call__(self, state: StepState) -> float:
        """The bound from ``state``, which may be at a bubble or just behind a decision."""
        num_generators, num_trainers = self._groups
        score, update = self._score, self._update
        pending, queue, ready, updates, _, _, _, closed, _, running = state
        unscored = pending + len(queue)
        supply: float = 0 if queue else self._generate if pending else math.inf  # until there is something to score
        free: list[float] = [0] * (num_generators + num_trainers)
        next_score: float = math.inf
        last_score: float = 0
        for end, worker, kind, _ in running:
            made = end + self._assist if kind == SWITCH_IN else end
            free[worker] = made + self._back if kind in {SWITCH_IN, ASSIST} else made
            if kind in {GENERATE, SWITCH_IN, ASSIST}:
                unscored += 1
                next_score = min(next_score, made + score)
            elif kind == SCORE:
                next_score, last_score = min(next_score, end), max(last_score, end)
        soonest = min(free[:num_generators])
        if self._reopen and pending:  # an assist that begins later may give the next result
            next_score = min(next_score, max(soonest, self._assisted) + score)
        next_score = min(next_score, soonest + supply + score)
        first_update = 0 if ready & 1 else next_score
        least = max(first_update + -(-updates // num_trainers) * update, last_score + update)
        if not unscored:
            return least
        if self._alone and closed and not self._reopen:  # nothing begins on the trainer before the next score ends
            free[-1] = first_update
        generated, trained = unscored * score + pending * self._generate, updates * update
        best: float = math.inf
        for i, ends in enumerate(accumulate(sorted(free[:num_generators])), 1):
            for j, others in enumerate(accumulate(sorted(free[num_generators:])), 1):
                best = min(best, self._balance(pending, ends + generated, i, others + trained, j))
        return max(least, best)

    def trained(self, state: StepState, n: int) -> float:
        """The trainers' part alone: n more assists and all updates."""
        return (n * self._lend + state.updates * self._update) / self._groups[1]

    def _balance(self, pending: int, generated: float, i: int, trained: float, j: int) -> float:
        """The least over n of the longer of the generators' and the trainers' time."""
        per_generate, per_assist = self._generate, self._lend
        if i > 1 or j > 1:
            generated, per_generate = generated / i, per_generate / i
            trained, per_assist = trained / j, per_assist / j
        generated += self._update
        if generated <= trained or per_generate + per_assist == 0:
            return max(generated, trained)
        n = min(pending, int((generated - trained) // (per_generate + per_assist)))
        one_less = generated - n * per_generate
        return one_less if n == pending else min(one_less, trained + (n + 1) * per_assist)


class _Frame:
    """One call of Search that has not returned."""

    __slots__ = ("best", "budget", "choice", "cost", "floor", "move", "moves", "state")

    def __init__(self, state: StepState, budget: float) -> None:
        self.state = state
        self.budget = budget
        """A value is of use only below it."""
        self.best: float = math.inf
        self.choice: _Move | None = None
        """The move that gives the best value so far."""
        self.floor: float = math.inf
        """No move gives less: the least of their values and lower bounds."""
        self.moves = [False, True]
        """Moves not tried yet, the last one first. An assist is always possible at a bubble."""
        self.move: _Move | None = None
        """The move under way."""

    def learn(self, value: float, *, reached: bool) -> None:
        """The move under way gives ``value``, or at least that."""
        self.floor = min(self.floor, value)
        if reached and value < self.best:
            self.best, self.choice = value, self.move


class _Move(NamedTuple):
    assist: bool
    cost: float
    """Time to the next bubble, or to the end."""
    state: StepState | None
    """The next bubble."""


def search(
    instance: Instance,
    state: StepState | None = None,
    *,
    max_nodes: int | None = None,
    bounded: bool = True,
    remember: bool = True,
    reopen: bool = False,
) -> Strategy:
    """The decisions at the bubbles of one step that end its last update soonest (Algorithm 2).

    Args:
        instance: durations and rules.
        state: where the step stands, at a bubble or not; default the start of the run.
        max_nodes: moves to simulate at most. Beyond it the best plan found so far is returned, with ``exact=False``.
        bounded: cut branches by :class:`Bound`.
        remember: recognise states that were reached before (the paper's memoisation).
        reopen: decide at every instant at which a trainer is idle, as :class:`StepModel` says: beyond Algorithm 2.

    Raises:
        ConfigError: ``max_nodes`` is below 1, or the instance has no bubbles to search.
    """
    if max_nodes is not None and max_nodes < 1:
        raise ConfigError(f"max_nodes must be at least 1, got {max_nodes}: without a move there is nothing to compare")
    model = StepModel(instance, reopen=reopen)
    elapsed, root = model.advance(model.start() if state is None else state)
    if root is None:
        return Strategy(elapsed, (), exact=True, num_nodes=0)
    bound = Bound(model)
    known: dict[StepState, tuple[float, _Move]] = {}
    lower: dict[StepState, float] = {}
    num_nodes, stopped = 0, False
    frames = [_Frame(root, math.inf)]
    while frames:
        frame = frames[-1]
        if stopped or not frame.moves:  # 25
            frames.pop()
            reached = frame.best < frame.budget
            if reached and frame.choice is not None:
                known[frame.state] = frame.best, frame.choice
            elif not reached:
                lower[frame.state] = max(frame.floor, lower.get(frame.state, 0))
            if frames and frames[-1].move is not None:
                frames[-1].learn(frames[-1].move.cost + (frame.best if reached else frame.floor), reached=reached)
            continue
        assist = frame.moves.pop()
        budget = min(frame.best, frame.budget) if bounded else math.inf
        child = model.assist(frame.state) if assist else model.skip(frame.state)  # 17, 19, 12
        if bounded and (least := bound(child)) >= budget:
            frame.learn(least, reached=False)
            continue
        if num_nodes == max_nodes:
            stopped = True
            if frame.best == frame.budget == math.inf:  # nobody on the stack has a complete plan yet
                frame.learn(model.advance(frame.state, ask=False)[0], reached=True)
            continue
        num_nodes += 1
        cost, bubble = model.advance(child)  # 6, 10
        frame.move = _Move(assist, cost, bubble)
        if bubble is None:  # 7-9
            frame.learn(cost, reached=True)
        elif remember and bubble in known:
            frame.learn(cost + known[bubble][0], reached=True)
        elif remember and (least := cost + lower.get(bubble, 0)) >= budget:
            frame.learn(least, reached=False)
        else:
            frames.append(_Frame(bubble, budget - cost))  # 13, 20
    decisions: list[bool] = []
    state = root
    while state is not None:
        move = known[state][1] if state in known else _Move(False, *model.advance(model.skip(state)))
        decisions.append(move.assist)
        elapsed, state = elapsed + move.cost, move.state
    return Strategy(elapsed, tuple(decisions), not stopped, num_nodes)


def tag_first(instance: Instance, state: StepState | None = None) -> tuple[float, int]:
    """Assist n times before the step's first update and never again, with the best n (the paper's Static TAG).

    With one generator and one trainer the time falls strictly with n up to the best n and never falls after it
    (observed on every instance tried, not proven), so that n is found by halving. With more groups it does not, and
    every n is tried up to the one whose assists and updates alone would take the trainers too long.

    Returns:
        (time from ``state`` to the end of the step's last update, n). n is 0 where updates have begun.
    """
    model = StepModel(instance)
    state = model.start() if state is None else state
    most = state.pending if state.updates == instance.num_micro_batches else 0

    @cache
    def time(n: int) -> float:
        return model.advance(state, first=n, ask=False)[0]

    if instance.num_generators == instance.num_trainers == 1:
        n = bisect_left(range(most), True, key=lambda n: time(n) <= time(n + 1))
        return time(n), n
    bound, best = Bound(model), 0
    for n in range(1, most + 1):
        if bound.trained(state, n) >= time(best):
            break
        best = min(best, n, key=time)
    return time(best), best
