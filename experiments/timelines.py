"""How do the execution modes use the workers (paper, Figs. 1, 6 and 8)? Timelines and their bubbles, simulated.

    python experiments/timelines.py [--out DIR]     about 5 seconds

The exact model plays one set of durations, printed with the tables:

- Fig. 1, one step: colocated (every stage on all groups, if it scaled linearly), naive disaggregation, micro-batch
  pipeline (GAP), and DigenRL, whose trainer assists by the paper's search.
- Fig. 6, one step: a fixed number of assists before the first update, too few, the best, too many.
- Fig. 8, the long run: assists alone, and with up to half of a step's micro-batches started on weights one step old
  (TCSS), as in the paper and with digen's policy. Times per step are means over a cycle of recurring step boundaries.

A bubble is the share of the time shown in which a worker does nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec

from digen.config import Mode, ScheduleConfig
from digen.durations import Durations, parse_durations
from digen.sched.horizon import horizon
from digen.sched.model import Task, simulate
from digen.sched.steady import steady_rate
from digen.sched.tag import Policy, policy_from
from digen.twin import instance_of

DURATIONS = parse_durations("B=8 g=20 r=2 u=8 h=22 c_load=1 c_off=1 y_opt=4 y_sync=6")
"""The paper's letters (digen simulate --help); the same updates in all modes, so without what TSP gains."""
ROWS = ("gen0", "trainer0")
COLORS = {
    "generate": "#4c78a8",
    "assist": "#f58518",
    "score": "#72b7b2",
    "update": "#54a24b",
    "commit": "#b279a2",
    "load": "#9d755d",
    "switch": "#bab0ac",
}


@dataclass(frozen=True)
class Timeline:
    """What the workers do from ``start`` to ``end``."""

    title: str
    tasks: tuple[Task, ...]
    start: float
    end: float
    num_steps: int = 1
    """Steps from ``start`` to ``end``."""
    shared: bool = False
    """Whether both groups do every task together (colocated)."""

    @property
    def step_s(self) -> float:
        """Time per step, with commit and load."""
        return (self.end - self.start) / self.num_steps

    @property
    def assists(self) -> float:
        """Assists per step."""
        begun = sum(task.kind == "assist" and self.start <= task.start < self.end for task in self.tasks)
        return begun / self.num_steps

    def of(self, worker: str) -> list[Task]:
        """A worker's tasks that take time, as far as they are in the window."""
        return [
            msgspec.structs.replace(task, start=max(task.start, self.start), end=min(task.end, self.end))
            for task in self.tasks
            if (self.shared or task.worker == worker) and self.start < task.end > task.start < self.end
        ]

    def bubble(self, worker: str) -> float:
        """The share of the time in which a worker does nothing."""
        return 1 - sum(task.end - task.start for task in self.of(worker)) / (self.end - self.start)


def one_step(title: str, durations: Durations, mode: Mode, tag: str = "never") -> Timeline:
    """A single step of a mode, until its weights are loaded."""
    config = ScheduleConfig(mode=mode, sync="hold", update_order="ready")
    trace = simulate(instance_of(durations, config), policy_from(tag))
    return Timeline(title, trace.tasks, 0, trace.makespan, shared=mode == "colocated")


def long_run(title: str, tag: str, *, stale_fraction: str = "0", sync: Literal["hold", "pull"] = "hold") -> Timeline:
    """Six steps from the middle of a run: a whole number of cycles of one, two or three."""
    config = ScheduleConfig(
        mode="tcss", window=2, stale_fraction=Decimal(stale_fraction), sync=sync, update_order="ready"
    )
    instance = replace(instance_of(DURATIONS, config), num_steps=24)

    def policy() -> Policy:
        return (
            horizon(max_tasks=10**9) if tag == "horizon" else policy_from(tag)
        )  # the whole plan at the first question

    trace, first, last = simulate(instance, policy()), 9, 15
    timeline = Timeline(title, trace.tasks, trace.step_ends[first - 1], trace.step_ends[last - 1], last - first)
    assert timeline.step_s == steady_rate(instance, policy(), period=6).step_s, "six steps are whole cycles"
    return timeline


def figures() -> dict[str, list[Timeline]]:
    """The timelines by figure; the second of Fig. 1 and the first of the others are what speed-ups are over."""
    half = replace(
        DURATIONS,
        assist_s=DURATIONS.generate_s[0] / 2,
        score_s=(DURATIONS.score_s[0] / 2,),
        update_s=DURATIONS.update_s / 2,
    )
    counts = DURATIONS.num_micro_batches + 1
    assisted = [one_step(f"{k} assist{'s' * (k != 1)}", DURATIONS, "tag", f"static({k})") for k in range(counts)]
    return {
        "Fig. 1": [
            one_step("(a) colocated, if stages scaled linearly", half, "colocated"),
            one_step("(b) naive disaggregation", DURATIONS, "naive"),
            one_step("(c) micro-batch pipeline (GAP)", DURATIONS, "gap"),
            one_step("(d) DigenRL: search assists (TAG)", DURATIONS, "tag", "search"),
        ],
        "Fig. 6": [one for k, one in enumerate(assisted) if one.assists == k],  # the generator takes the rest
        "Fig. 8": [
            long_run("(a) TAG: search, on-policy", "search"),
            long_run("(b) TCSS: search, hold", "search", stale_fraction="0.5"),
            long_run("TCSS: horizon, hold", "horizon", stale_fraction="0.5"),
            long_run("TCSS: horizon, pull", "horizon", stale_fraction="0.5", sync="pull"),
        ],
    }


def show(name: str, timelines: Sequence[Timeline], baseline: Timeline) -> None:
    """A row per timeline."""
    print(
        f"\n{name + ', time per step':42}{'time':>8}{'assists':>9}"
        f"{'bubbles: generator':>20}{'trainer':>9}{'speed-up':>10}"
    )
    for one in timelines:
        generator, trainer = map(one.bubble, ROWS)
        print(
            f"{one.title:42}{one.step_s:8.1f}{one.assists:9.2f}{generator:20.1%}{trainer:9.1%}"
            f"{baseline.step_s / one.step_s:9.3f}x"
        )


def draw(name: str, timelines: Sequence[Timeline], path: Path) -> None:
    """A panel per timeline, a row per worker, a bar per task with its micro-batch; what is stale is hatched."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = name
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(len(timelines), 1, figsize=(12, 1.7 * len(timelines) + 0.8), sharex=True)
    for axis, one in zip(axes, timelines, strict=True):
        for place, worker in enumerate(ROWS):
            for task in one.of(worker):
                stale = task.kind in {"generate", "assist"} and task.version < task.step
                axis.barh(
                    place,
                    task.end - task.start,
                    left=task.start - one.start,
                    color=COLORS[task.kind],
                    edgecolor="white",
                    linewidth=0.5,
                    hatch="///" if stale else None,
                )
                if task.index >= 0 and task.kind != "score":
                    axis.text(
                        (task.start + task.end) / 2 - one.start,
                        place,
                        task.index,
                        ha="center",
                        va="center",
                        clip_on=True,
                    )
        axis.set(
            yticks=range(len(ROWS)), yticklabels=["generator", "trainer"], title=f"{one.title}: {one.step_s:g} per step"
        )
        axis.invert_yaxis()
    axes[0].set_xlim(0, max(min(2.2 * one.step_s, one.end - one.start) for one in timelines))
    figure.suptitle(f"{name}, simulated: {DURATIONS}", fontsize="medium")
    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()], loc="lower center", ncols=7
    )
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1 - 0.1 / figure.get_figheight()))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/figures"), metavar="DIR", help="where the figures go")
    options = parser.parse_args()
    print(f"simulated, about 5 seconds; {DURATIONS}")
    found = figures()
    for name, timelines in found.items():
        show(name, timelines, timelines[name == "Fig. 1"])
    best = min(range(len(found["Fig. 6"])), key=lambda k: found["Fig. 6"][k].step_s)
    print(f"\nFig. 6: fewer than {best} assists leave bubbles to the trainer, more make the generator wait for it")
    chosen = {"(a) too few": best - 2, "(b) the best": best, "(c) too many": best + 1}
    found["Fig. 6"] = [
        replace(found["Fig. 6"][k], title=f"{what}: {found['Fig. 6'][k].title}") for what, k in chosen.items()
    ]
    for name, timelines in found.items():
        path = options.out / f"timelines_{name[5:]}.svg"
        draw(name, timelines, path)
        print(f"figure: {path}")


if __name__ == "__main__":
    main()
