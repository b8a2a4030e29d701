"""Which GPUs should do what, and under which schedule: candidates tried in the virtual-time twin (``digen plan``).

A candidate is a layout (which GPUs train, how the others form generator groups; or one group that does everything), a
micro-batch size, a TSP chunk and a schedule. Durations and memory of each come from :mod:`digen.capacity`. Candidates
that a bound on their rate shows to be of no use are not simulated. Everything that comes out is simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from digen.capacity import Capacity, Group, Layout, Need
from digen.config import ScheduleConfig
from digen.costs import arithmetic, own_chunk, trained_timesteps, update_factor
from digen.errors import ConfigError
from digen.sched.admission import stale_limit
from digen.twin import compare, simulate

if TYPE_CHECKING:
    from digen.config import RunConfig
    from digen.durations import Durations

NUM_STEPS = 12
"""Steps that a candidate is simulated for; its rate leaves out the first and the last."""

POLICIES = ("never", "greedy", "threshold", "search", "tag_first", "horizon")
"""TAG policies tried. ``static(k)`` is not: tag_first is the best of them."""

STALE_FRACTIONS = (Decimal("0.25"), Decimal("0.5"))
"""Shares tried where stale starts are allowed."""

KEEP = (
    "plan.micro_batch_size",
    "algorithm.tsp_chunk",
    "schedule.window",
    "schedule.stale_fraction",
    "schedule.sync",
    "schedule.tag",
)
"""Fields that are varied unless they are to be kept."""

Title = tuple[str, Any]
"""What a candidate can be the best of: ("layout", Layout), ("type", name of a GPU type), or :data:`ON_POLICY`."""

ON_POLICY: Title = ("on policy", None)
"""The title of the fastest candidate whose micro-batches are all fresh."""

_ROUNDING = 1e-9
"""By how much a bound, which is computed in floating point, may be off."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to use the GPUs."""

    layout: Layout
    micro_batch_size: int
    tsp_chunk: int
    schedule: ScheduleConfig
    durations: Durations
    sequential: Durations
    """The same with one timestep in a forward, where the costs tell what that takes."""
    needs: tuple[Need, ...]
    """Memory of the trainer's GPUs and of each generator group's; empty where it is not modelled."""

    @property
    def titles(self) -> list[Title]:
        """What it may be the best of: its layout, its trainer's type (unless mixed), those on policy."""
        types = self.layout.trainer.types
        found: list[Title] = [("layout", self.layout)]
        found += [("type", types[0])] if len(types) == 1 else []
        return found + ([ON_POLICY] if self.schedule.resolved_window == 1 else [])

    @cached_property
    def bound_s(self) -> float:
        """:func:`rate_bound` of it."""
        return rate_bound(self.durations, self.schedule)

    @cached_property
    def twists(self) -> tuple[Any, ...]:
        """What decides between equally fast ones: the one that bends and lends least comes first."""
        schedule = self.schedule
        tag = schedule.resolved_tag
        return (
            schedule.resolved_stale_fraction,
            POLICIES.index(tag) if tag in POLICIES else len(POLICIES),
            schedule.sync,
            -self.micro_batch_size,
        )


@dataclass(frozen=True, eq=False)
class Row:
    """A simulated candidate."""

    candidate: Candidate
    step_s: Decimal
    """Time from commit to commit."""
    idle: dict[str, float]
    """Share of idle time by role."""
    stale: float
    """Share of stale micro-batches."""

    @cached_property
    def naive_s(self) -> Decimal:
        """A step of the same layout and micro-batches without overlap, one timestep in a forward."""
        durations = self.candidate.sequential
        if not self.candidate.layout.generators:
            return _colocated_s(durations)
        return compare(replace(durations, num_steps=1))["naive"]


@dataclass(frozen=True)
class Outcome:
    """What the planner found."""

    config: RunConfig
    """The job, with two pools of workers."""
    gpus: Mapping[str, int]
    """GPUs by type."""
    rows: tuple[Row, ...]
    """The best candidate of each layout, fastest first."""
    by_type: Mapping[str, Row]
    """The best candidate with each GPU type as trainer."""
    on_policy: Row | None
    """The best candidate whose micro-batches are all fresh."""
    num_candidates: int
    num_simulated: int
    misfits: tuple[str, ...]
    """What does not fit in memory, one line for each group of GPUs; first what lacks the least."""
    colocated_s: Decimal | None
    """A step of native colocation: every stage on all GPUs, one timestep in a forward."""


def plan(
    config: RunConfig, gpus: Mapping[str, int], *, keep: Iterable[str] = (), num_rows: int = 5, bounded: bool = True
) -> Outcome:
    """Rank the ways to run ``config`` on these GPUs.

    Args:
        config: the job; its ``costs`` say where durations come from and what GPUs can do. Its own layout and mode do
            not matter.
        gpus: how many there are of each type, from :func:`digen.capacity.parse_gpus`.
        keep: fields of :data:`KEEP` that stay as the config has them.
        num_rows: layouts to rank.
        bounded: leave out what the bound rules out.

    Raises:
        ConfigError: there is no source of durations, nothing fits in memory, or a field to keep is unknown.
    """
    kept = frozenset(keep)
    if unknown := sorted(kept - set(KEEP)):
        raise ConfigError(f"--keep {unknown[0]}: it is not varied; known: {', '.join(KEEP)}")
    if num_rows < 1:
        raise ConfigError(f"--rows {num_rows}: must be at least 1")
    space = _Space(config, gpus, kept)
    candidates = space.candidates()
    if not candidates:
        raise ConfigError(f"--gpus: {space.why_none()}")
    best, num_simulated = _tournament(candidates, num_rows if bounded else None)
    rows = sorted((row for (kind, _), row in best.items() if kind == "layout"), key=_rank)[:num_rows]
    return Outcome(
        config=space.config,
        gpus=gpus,
        rows=tuple(rows),
        by_type={name: best["type", name] for name in gpus if ("type", name) in best},
        on_policy=best.get(ON_POLICY),
        num_candidates=len(candidates),
        num_simulated=num_simulated,
        misfits=tuple(space.misfits),
        colocated_s=space.colocated_s(),
    )


def rate_bound(durations: Durations, schedule: ScheduleConfig) -> float:
    """A lower bound on the time of a step in a long run, whatever the policy decides.

    With n assists a step, n real (the number may differ from step to step): the generators must generate B - n
    micro-batches and score B, shared out ideally, and the trainer must do n assists, B updates and the commit. On
    policy all of it lies between two commits, and after a load; the last update follows the last score, the first one
    the first score. With stale starts only B - L - n generations must, L the most that may be stale. Under ``hold``
    both sides stop for the load; under ``pull`` a load may be skipped, so that it is not counted.
    """
    size, update, commit = durations.num_micro_batches, float(durations.update_s), float(durations.commit_s)
    load = float(durations.load_s)
    if schedule.mode == "colocated":
        return float(_colocated_s(durations))
    times = [(float(g), float(r)) for g, r in zip(durations.generate_s, durations.score_s, strict=True)]
    least_score = min(r for _, r in times)
    if all(g > 0 for g, _ in times):
        generate = 1 / sum(1 / g for g, _ in times)
        score = generate * min(r / g for g, r in times)
    else:
        generate = score = 0.0
    assist = float(durations.assist_s)
    lend = assist if schedule.lazy_switch else assist + float(durations.switch_in_s + durations.switch_out_s)
    if schedule.resolved_window == 1:
        first = least_score + min(load + min(g for g, _ in times), float(durations.switch_in_s) + assist)
        lines = [
            (load + size * (generate + score) + update + commit, -generate),
            (size * update + commit, lend),
            (first + size * update + commit, 0.0),
        ]
    else:
        held = load if schedule.sync == "hold" else 0.0
        fresh = size - stale_limit(schedule.resolved_stale_fraction, size)
        lines = [
            (held + size * (generate + score), -generate),
            (held + size * update + commit, lend),
            (fresh * generate + update + commit, -generate),
        ]
    return _least(lines, 0 if schedule.resolved_tag == "never" else size)


def _colocated_s(durations: Durations) -> Decimal:
    """A step of mode colocated: one stage after the other."""
    per_micro_batch = durations.assist_s + durations.score_s[0] + durations.update_s
    return durations.num_micro_batches * per_micro_batch + durations.commit_s


def _least(lines: list[tuple[float, float]], most: float) -> float:
    """The least over n in [0, most] of the highest of lines a + b n: it lies at an end or where two of them cross."""
    crossings = [(c - a) / (b - d) for (a, b), (c, d) in itertools.combinations(lines, 2) if b != d]
    places = [0.0, most, *(n for n in crossings if 0 < n < most)]
    return min(max(a + b * n for a, b in lines) for n in places)


def _reference(config: RunConfig) -> RunConfig:
    """The config with two pools of workers, one generator group where its durations are of one."""
    schedule = config.schedule
    gap = ScheduleConfig(
        mode="gap",
        axis=schedule.resolved_axis,
        lazy_switch=schedule.lazy_switch,
        update_order=schedule.update_order,
        max_generating=schedule.max_generating,
        max_rollout_bytes=schedule.max_rollout_bytes,
    )
    generators = None if config.costs.model is not None else config.workers.generators or None
    workers = config.workers.model_copy(update={"generators": generators})
    return config.model_copy(update={"schedule": gap, "workers": workers})


def _rank(row: Row) -> tuple[Any, ...]:
    """Fastest first."""
    return row.step_s, row.candidate.twists


def _tournament(candidates: list[Candidate], num_rows: int | None) -> tuple[dict[Title, Row], int]:
    """The best row by title, and how many candidates were simulated.

    The candidate with the lowest bound goes first. One is left out if its bound shows that it can win no title that
    counts; that of a layout which comes after ``num_rows`` others does not. With ``None`` nothing is left out.
    """
    best: dict[Title, Row] = {}
    num_simulated = 0

    def beaten(candidate: Candidate, title: Title) -> bool:
        row = best.get(title)
        if row is None or candidate.bound_s < float(row.step_s) * (1 - _ROUNDING):
            return False
        return candidate.bound_s > float(row.step_s) * (1 + _ROUNDING) or candidate.twists >= row.candidate.twists

    def unranked(candidate: Candidate, title: Title) -> bool:
        ranked = sorted(row.step_s for (kind, _), row in best.items() if kind == "layout")
        last = ranked[num_rows - 1] if num_rows and len(ranked) >= num_rows else None
        return title[0] == "layout" and last is not None and candidate.bound_s > last

    for candidate in sorted(candidates, key=lambda candidate: (candidate.bound_s, candidate.twists)):
        titles = candidate.titles
        if num_rows and all(beaten(candidate, title) or unranked(candidate, title) for title in titles):
            continue
        row = _play(candidate)
        num_simulated += 1
        for title in titles:
            if title not in best or _rank(row) < _rank(best[title]):
                best[title] = row
    return best, num_simulated


def _play(candidate: Candidate) -> Row:
    twin = simulate(replace(candidate.durations, num_steps=NUM_STEPS), candidate.schedule)
    updates = [task for task in twin.finished if task.kind == "update"]
    return Row(
        candidate=candidate,
        step_s=twin.step_s,
        idle={role: float(bubble["share"]) for role, bubble in twin.bubbles.items()},
        stale=sum(task.version < task.step for task in updates) / len(updates),
    )


def _trainer_sizes(count: int) -> list[int]:
    """Powers of two, and what they leave of ``count``."""
    powers = [2**n for n in range(count.bit_length()) if 2**n <= count]
    return sorted({*powers, *(count - size for size in powers if size < count), count})


class _Space:
    """What there is to try."""

    def __init__(self, asked: RunConfig, gpus: Mapping[str, int], keep: frozenset[str]) -> None:
        self.config = config = _reference(asked)
        self._asked, self._gpus, self._keep = asked.schedule, gpus, keep
        self._capacity = Capacity(config)
        self._timesteps = trained_timesteps(config)
        own = own_chunk(config)
        self._own_chunk = self._timesteps if own == "all" else min(own, self._timesteps)
        self._sequential = 1 if update_factor(config, 1) is not None else self._own_chunk
        self._tags = (asked.schedule.resolved_tag,) if "schedule.tag" in keep else POLICIES
        self.misfits: list[str] = []

    def candidates(self) -> list[Candidate]:
        """Everything that fits. ``misfits`` then says what does not, however small: first what lacks the least."""
        found: list[Candidate] = []
        misfits: dict[tuple[str, Group], Need] = {}
        size, chunk = min(self._sizes()), min(self._chunks())
        for layout in self._layouts():
            found += itertools.chain.from_iterable(self._fitting(layout, size) for size in self._sizes())
            for assists in (False, True):
                for role, group, need in self._needs(layout, size, chunk, assists=assists):
                    if not need.fits and (role, group) not in misfits:
                        misfits["an assist of " * assists + role, group] = need
        closest = sorted(misfits.items(), key=lambda item: item[1].missing)
        self.misfits = [f"{role} on {group}: {need}" for (role, group), need in closest]
        return found

    def why_none(self) -> str:
        """Why there are no candidates."""
        size, chunk, assists = min(self._sizes()), min(self._chunks()), "never" not in self._tags
        layouts = [self._needs(layout, size, chunk, assists=assists) for layout in self._layouts()]
        worst = [max(needs, key=lambda item: item[2].missing) for needs in layouts if needs]
        if worst and all(need.missing for _, _, need in worst):
            role, group, need = min(worst, key=lambda item: item[2].missing)
            return f"no layout fits in memory (costs.memory); the closest lacks it for {role} on {group}: {need}"
        sizes = ", ".join(map(str, reversed(self._sizes())))
        return (
            f"no layout shares out micro-batches of {sizes} samples evenly within costs.scaling and costs.memory; "
            "change the number of GPUs, or plan.samples_per_prompt"
        )

    def colocated_s(self) -> Decimal | None:
        """A step on all GPUs at once, stage by stage, or ``None`` where the curves do not go so far."""
        everything = self._everything()
        if everything is None:
            return None
        size = arithmetic(self.config).micro_batch_size
        return _colocated_s(self._capacity.durations(everything, micro_batch_size=size, tsp_chunk=self._sequential))

    # ---- layouts -----------------------------------------------------------------------------------------------

    def _everything(self) -> Layout | None:
        group = Group(tuple(self._gpus.items()))
        largest = min(self._capacity.largest("generate"), self._capacity.largest("update"))
        return Layout((), group) if group.size <= largest else None

    def _layouts(self) -> Iterator[Layout]:
        """The trainer has a power of two of one type, or leaves one; the rest form groups of one size for each type."""
        if (everything := self._everything()) is not None:
            yield everything
        for name, count in self._gpus.items():
            for size in _trainer_sizes(count):
                if size > min(self._capacity.largest("update"), self._capacity.largest("generate")):
                    continue
                rest = {**self._gpus, name: count - size}
                ways = [self._groups(other, left) for other, left in rest.items() if left]
                for groups in itertools.product(*ways) if ways else ():
                    yield Layout(tuple(itertools.chain.from_iterable(groups)), Group(((name, size),)))

    def _groups(self, name: str, count: int) -> list[list[Group]]:
        sizes = [size for size in range(1, count + 1) if count % size == 0]
        largest = self._capacity.largest("generate")
        return [[Group(((name, size),))] * (count // size) for size in sizes if size <= largest]

    # ---- micro-batches, chunks, schedules --------------------------------------------------------------------------

    def _sizes(self) -> list[int]:
        """Micro-batch sizes, largest first."""
        plan = arithmetic(self.config)
        if "plan.micro_batch_size" in self._keep:
            return [plan.micro_batch_size]
        group, prompts = plan.samples_per_prompt, plan.prompts_per_step
        if plan.axis == "generation":
            return [size for size in range(group, 0, -1) if group % size == 0]
        return [group * many for many in range(prompts, 0, -1) if prompts % many == 0]

    def _chunks(self) -> list[int]:
        """TSP chunks, the one with the shortest updates first."""
        if "algorithm.tsp_chunk" in self._keep:
            return [self._own_chunk]
        factors = {chunk: update_factor(self.config, chunk) for chunk in range(1, self._timesteps + 1)}
        known = {chunk: factor for chunk, factor in factors.items() if factor is not None}
        return sorted(known, key=lambda chunk: (known[chunk], chunk))

    def _needs(self, layout: Layout, size: int, chunk: int, *, assists: bool) -> list[tuple[str, Group, Need]]:
        """What each distinct group needs, the trainer first; nothing where memory is not modelled."""
        capacity, role = self._capacity, "the trainer" if layout.generators else "all stages"
        generates = assists or not layout.generators
        trainer = capacity.trainer_need(layout.trainer, micro_batch_size=size, tsp_chunk=chunk, assists=generates)
        needs = [(role, layout.trainer, trainer)]
        needs += [
            ("a generator", group, capacity.generator_need(group, micro_batch_size=size))
            for group in dict.fromkeys(layout.generators)
        ]
        return [(role, group, need) for role, group, need in needs if need is not None]

    def _fitting(self, layout: Layout, size: int) -> Iterator[Candidate]:
        """Every schedule that fits, with the chunk of the shortest updates that do: a smaller one is never faster."""
        if len(layout.generators) > arithmetic(self.config, size).num_micro_batches:
            return
        if not all(self._capacity.even(group, size) for group in (layout.trainer, *layout.generators)):
            return
        for tags, chunk in itertools.product((self._tags, ("never",)), self._chunks()):
            needs = self._needs(layout, size, chunk, assists=tags != ("never",))
            if tags[0] in self._tags and all(need.fits for _, _, need in needs):
                durations, sequential = (
                    self._capacity.durations(layout, micro_batch_size=size, tsp_chunk=each)
                    for each in (chunk, self._sequential)
                )
                memory = tuple(need for _, _, need in needs)
                for schedule in self._schedules(layout, durations.num_micro_batches, tags):
                    yield Candidate(layout, size, chunk, schedule, durations, sequential, memory)
                return

    def _schedules(self, layout: Layout, num_micro_batches: int, tags: tuple[str, ...]) -> Iterator[ScheduleConfig]:
        own, asked = self.config.schedule, self._asked
        rules: dict[str, Any] = {
            "axis": own.axis,
            "lazy_switch": own.lazy_switch,
            "update_order": own.update_order,
            "max_generating": own.max_generating,
            "max_rollout_bytes": own.max_rollout_bytes,
        }
        if not layout.generators:
            yield ScheduleConfig(mode="colocated", **rules)
            return
        windows = (asked.resolved_window,) if "schedule.window" in self._keep else (1, 2)
        syncs: tuple[Any, ...] = (asked.sync,) if "schedule.sync" in self._keep else ("hold", "pull")
        shares = (asked.resolved_stale_fraction,) if "schedule.stale_fraction" in self._keep else STALE_FRACTIONS
        for window, sync, tag in itertools.product(windows, syncs, tags):
            if window == 1:
                yield ScheduleConfig(mode="gap" if tag == "never" else "tag", window=1, sync=sync, tag=tag, **rules)
                continue
            for share in shares:
                if stale_limit(share, num_micro_batches):
                    yield ScheduleConfig(mode="tcss", window=window, stale_fraction=share, sync=sync, tag=tag, **rules)
