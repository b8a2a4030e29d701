"""The decision tree that is printed is the one that was searched, and its best value is the true one."""

from __future__ import annotations

from collections import Counter

import pytest

from digen.errors import ConfigError
from digen.sched import explain
from digen.sched.bubbles import StepModel
from digen.sched.explain import Node, Tree, draw
from digen.sched.model import Instance
from digen.sched.search import search, tag_first
from experiments.search_time import best_by_force, plausible, seeded
from experiments.search_time import draw as draw_instance


def simple(size: int, **durations: float) -> Instance:
    """One generator, one trainer; the paper's letters."""
    return Instance(
        num_micro_batches=size,
        generate_s=(durations["g"],),
        score_s=(durations["r"],),
        update_s=(durations["u"],),
        assist_s=(durations["h"],),
        switch_in_s=(durations.get("c", 0),),
        switch_out_s=(durations.get("c", 0),),
    )


def nodes_of(node: Node | None) -> list[Node]:
    """Every bubble of a tree, in the order in which they were reached."""
    found = [node] if node is not None else []
    for move in node.moves if node is not None else []:
        if move.outcome == "bubble":
            found += nodes_of(move.node)
    return found


def test_the_tree_is_the_searchs() -> None:
    rng = seeded("explain")
    outcomes: Counter[tuple[str, bool]] = Counter()
    for number in range(1000):
        instance = draw_instance(rng)
        tree, found = Tree(instance), search(instance)
        got = tree.end, tree.decisions, tree.num_nodes, tree.exact
        assert got == (found.value, found.decisions, found.num_nodes, found.exact), f"{number}: {instance}"
        assert (tree.static_end, tree.static_count) == tag_first(instance)
        outcomes.update((move.outcome, move.reached) for node in nodes_of(tree.root) for move in node.moves)
    assert {*outcomes} == {
        ("end", True),
        ("cut", False),
        *((kind, reached) for kind in ("bubble", "seen") for reached in (True, False)),
    }


def test_its_best_end_is_that_of_brute_force() -> None:
    rng = seeded("explain by force")
    for number in range(120):
        instance = draw_instance(rng, largest_step=6)
        assert Tree(instance).end == best_by_force(instance)[0], f"{number}: {instance}"


def test_large_steps_are_searched_as_fast_and_drawn_in_part() -> None:
    for ratio in (0.1, 0.5, 1.0):
        instance = plausible(seeded(f"explain {ratio}"), 128, ratio)
        tree, found = Tree(instance), search(instance)
        assert (tree.end, tree.decisions, tree.num_nodes) == (found.value, found.decisions, found.num_nodes)
        assert len(draw(tree)) <= 1 + 60 + 1 + 3


def test_every_bubble_is_told_from_the_others_and_no_move_is_left_out() -> None:
    rng = seeded("bubbles")
    for _ in range(100):
        nodes = nodes_of(Tree(draw_instance(rng)).root)
        assert [node.number for node in nodes] == list(range(1, len(nodes) + 1))
        assert all([move.assist for move in node.moves] == [True, False] for node in nodes)


def test_the_drawing() -> None:
    """The third assist would end too late; skipped, it leaves a micro-batch for a bubble that fits it."""
    tree = Tree(simple(8, g=100, r=10, u=12, h=130, c=10))
    assert draw(tree, per_s=10) == [
        "bubble 1 at 0 s (7 to start, 0 scored, 8 to update):",
        "├─ * assist → bubble 2 at 16.2 s (5 to start, 0 scored, 7 to update): ends at 59.4 s",
        "│  ├─ * assist → bubble 3 at 33.6 s (3 to start, 0 scored, 5 to update): ends at 59.4 s",
        "│  │  ├─   assist → ends at 60.6 s",
        "│  │  └─ * skip   → bubble 4 at 36.4 s (2 to start, 0 scored, 3 to update): ends at 59.4 s",
        "│  │     ├─ * assist → ends at 59.4 s",
        "│  │     └─   skip   → cut, not before 64.6 s",
        "│  └─   skip   → cut, not before 60.4 s",
        "└─   skip   → cut, not before 65.6 s",
        "* best: assist x 2, skip, assist; the last update ends at 59.4 s",
        "5 moves simulated, 3 cut by the bound, 0 seen before",
        "tag_first: 3 assists before the first update; the last one ends at 59.2 s",
    ]


def test_a_drawing_is_cut_at_so_many_lines_and_moves() -> None:
    tree = Tree(simple(8, g=100, r=10, u=12, h=130, c=10))
    whole = draw(tree)
    by_lines, by_depth = draw(tree, max_lines=3), draw(tree, max_depth=1)
    assert by_lines == [*whole[:4], "... and 5 more moves, beyond 3 lines or 12 moves on a path", *whole[-3:]]
    assert by_depth == [
        *(whole[line] for line in (0, 1, 8)),
        "... and 6 more moves, beyond 60 lines or 1 moves on a path",
        *whole[-3:],
    ]


def test_what_a_move_leads_to_is_what_the_best_plan_after_it_takes() -> None:
    """Every number in a drawing: exact where a plan is shown, else a lower bound, and seen bubbles are like theirs."""
    rng = seeded("explain")  # among the first 600 are states that recur at another time
    outcomes: Counter[tuple[str, bool]] = Counter()
    for number in range(600):
        instance = draw_instance(rng)
        tree, model = Tree(instance), StepModel(instance)
        drawn = "\n".join(draw(tree, max_lines=10_000, max_depth=1000))
        for node in nodes_of(tree.root):
            for move in node.moves:
                cost, state = model.advance(model.assist(node.state) if move.assist else model.skip(node.state))
                best = node.time + cost + (0 if state is None else search(instance, state).value)
                assert move.end == best if move.reached else node.time <= move.end <= best, f"{number}: {instance}"
                outcomes[move.outcome, move.reached] += 1
                if move.outcome == "seen":
                    assert move.node is not None
                    assert move.node.state == state
                    assert f"→ like bubble {move.node.number}: " in drawn
    assert outcomes["seen", True]
    assert outcomes["seen", False]


def test_several_trainers_are_named() -> None:
    instance = Instance(
        num_micro_batches=3,
        generate_s=(10,),
        score_s=(1,),
        update_s=(5, 6),
        assist_s=(12, 12),
        switch_in_s=(1, 1),
        switch_out_s=(1, 1),
    )
    assert draw(Tree(instance))[:2] == [
        "bubble 1 of trainer0 at 0 s (2 to start, 0 scored, 3 to update):",
        "├─ * assist → bubble 2 of trainer1 at 0 s (1 to start, 0 scored, 3 to update): ends at 24 s",
    ]


def test_a_step_without_a_bubble_has_no_tree() -> None:
    tree = Tree(simple(1, g=10, r=1, u=5, h=12))
    assert draw(tree) == [
        "no bubble emerges",
        "* best: no decision; the last update ends at 16 s",
        "0 moves simulated, 0 cut by the bound, 0 seen before",
        "tag_first: 0 assists before the first update; the last one ends at 16 s",
    ]


def test_a_search_that_stops_says_so_and_keeps_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = simple(8, g=100, r=10, u=12, h=130, c=10)
    monkeypatch.setattr(explain, "MAX_NODES", 3)
    tree = Tree(instance)
    assert not tree.exact
    assert (tree.end, tree.decisions) == (606, (True, True, True))
    lines = draw(tree)
    assert "* best of 3 moves, more were not tried: assist x 3; the last update ends at 606 s" in lines
    assert any(line.endswith("skip   → not tried") for line in lines)


def test_what_cannot_be_explained_is_refused() -> None:
    with pytest.raises(ConfigError, match="a step of 129 micro-batches would be too deep; explain one of at most 128"):
        Tree(simple(129, g=1, r=0, u=1, h=1))
    with pytest.raises(ConfigError, match="has no bubbles to search"):
        Tree(
            Instance(
                num_micro_batches=2, score_s=(1,), update_s=(1,), assist_s=(1,), switch_in_s=(0,), switch_out_s=(0,)
            )
        )
