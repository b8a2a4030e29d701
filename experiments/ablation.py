"""What does each technique add (paper, Figs. 17 and 18), and what is won over colocation (Figs. 11 to 15)? Simulated.

    python experiments/ablation.py [--model NAME ...] [--out DIR]     about 20 seconds

Two cost models were fitted to the ranges that the paper prints (digen.costs; a fit, not a measurement). Here the exact
model plays them for 20, 30 and 40 denoising steps and timestep fractions of 0.4 and 0.6. Every number is the time per
step of an endless run, the mean over one cycle of recurring step boundaries, and every step pays its commit and load:

- naive is B (g + r + u) + y_opt + y_sync without timestep parallelism, and what speed-ups of the ablation are over;
- GAP pipelines the same tasks, +TSP shortens updates, +TAG assists by the paper's search, on-policy; +TCSS is the same
  search with window 2 and half of a step stale. All under hold, micro-batches updated as they become ready, 16 GPUs;
- colocated is B ((g + r) / sg + u / su) + y_opt without timestep parallelism: it loads no weights. The comparisons
  with it are +TAG and +TCSS on 16 and on 32 GPUs, where every task of the split system takes d32 more.

Each range is printed beside that of the simulator with which the models were fitted, and beside the paper's. What is
assumed and has no target (FLUX, unequal GPUs, a slow judge) is said where it is printed.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from digen.config import ScheduleConfig
from digen.costs import CALIBRATED, Calibrated
from digen.durations import Durations
from digen.sched.horizon import horizon
from digen.sched.steady import steady_rate
from digen.sched.tag import policy_from
from digen.twin import instance_of

JOBS = tuple(itertools.product((20, 30, 40), (Decimal("0.4"), Decimal("0.6"))))
"""Denoising steps and timestep fractions of the paper's experiments."""

HALF = Decimal("0.5")
"""The stale share that the models were fitted with."""

Range = tuple[float, float]


class System(NamedTuple):
    """A set of techniques."""

    tag: str
    tsp: bool = True
    stale_fraction: Decimal = Decimal(0)
    sync: Literal["hold", "pull"] = "hold"
    lazy_switch: bool = False


PAPER = {
    "GAP": System("never", tsp=False),
    "+TSP": System("never"),
    "+TAG": System("search"),
    "+TCSS": System("search", stale_fraction=HALF),
}
BEYOND = {
    "TAG, tag_first": System("tag_first"),
    "TAG, horizon": System("horizon"),
    "TCSS, horizon": System("horizon", stale_fraction=HALF),
    "TCSS, horizon, pull": System("horizon", stale_fraction=HALF, sync="pull"),
    "TCSS, horizon, pull, lazy": System("horizon", stale_fraction=HALF, sync="pull", lazy_switch=True),
}
OVER_COLOCATED = {"TAG over colocated": "+TAG", "TCSS over colocated": "+TCSS"}

FITTED: dict[str, dict[str, Range]] = {
    "hunyuan_video": {
        "GAP": (1.58, 1.85),
        "+TSP": (1.62, 2.25),
        "+TAG": (2.32, 2.96),
        "+TCSS": (2.43, 3.11),
        "TAG over colocated": (1.06, 1.41),
        "TCSS over colocated": (1.11, 1.49),
    },
    "wan2.1": {
        "GAP": (1.58, 1.67),
        "+TSP": (1.73, 2.08),
        "+TAG": (2.27, 2.75),
        "+TCSS": (2.43, 2.93),
        "TAG over colocated": (1.13, 1.36),
        "TCSS over colocated": (1.20, 1.44),
    },
}
"""What the simulator of the fit gave for these models."""
BOUND_TO = ("GAP", "+TSP", "+TAG", "TAG over colocated")
"""Rows that must be the fit's within the tolerance. Those with stale work tip over at ties: see :func:`rounded`."""
TOLERANCE = 0.02
PRINTED: dict[str, dict[str, Range]] = {
    "hunyuan_video": {
        "GAP": (1.52, 1.84),
        "+TSP": (1.62, 2.14),
        "+TAG": (2.28, 3.05),
        "+TCSS": (2.49, 3.34),
        "TAG over colocated": (1.04, 1.37),
        "TCSS over colocated": (1.13, 1.49),
    },
    "wan2.1": {
        "GAP": (1.58, 1.70),
        "+TSP": (1.71, 2.10),
        "+TAG": (2.27, 2.79),
        "+TCSS": (2.44, 2.85),
        "TAG over colocated": (1.13, 1.34),
        "TCSS over colocated": (1.21, 1.45),
    },
}
"""What the paper prints (5.3 and 5.6)."""
FIGURES = {"hunyuan_video": (17, 12), "wan2.1": (18, 13)}
"""The paper's figures: ablation, comparison with colocated execution."""

FLUX = replace(
    CALIBRATED["wan2.1"],
    label="FLUX-like, B = 8",
    g0=Decimal(4),
    r0=Decimal("0.5"),
    u0=Decimal(4),
    mu=Decimal(2),
    tau=Decimal("0.4"),
    hf=Decimal(1),
    cs=Decimal(2),
    y_opt=Decimal(6),
    y_sync=Decimal(8),
    sg=Decimal("1.9"),
    su=Decimal(2),
    d32=Decimal(2),
)
"""Assumed: an image model, whose tasks are short beside what they cost on 32 GPUs."""
JUDGED = replace(
    FLUX, label="Qwen-Image-like, B = 8", tau=Decimal("0.2"), sg=Decimal("1.8"), cs=Decimal(0), d32=Decimal(0)
)
"""Assumed: an image model with much timestep parallelism; a judge scores, which takes a share of a generation."""
JUDGE_SHARES = tuple(map(Decimal, ("0.05", "0.2", "0.4", "0.8")))
FASTER = tuple(map(Decimal, ("1.3", "1.63", "2")))
"""Assumed: how much faster the better half of the GPUs is; 1.63 is the ratio of the peaks that the paper prints."""


def step_s(durations: Durations, system: System) -> Decimal:
    """Time per step in the long run."""
    config = ScheduleConfig(
        mode="tcss",
        window=2 if system.stale_fraction else 1,
        stale_fraction=system.stale_fraction,
        tag=system.tag,
        sync=system.sync,
        lazy_switch=system.lazy_switch,
        update_order="ready",
    )
    policy = horizon(max_tasks=10**9) if system.tag == "horizon" else policy_from(system.tag)
    rate = steady_rate(instance_of(durations, config), policy, period=6)
    return Decimal(rate.step_s) * durations.tick


class Speedups(NamedTuple):
    """Speed-ups by system, in the order of JOBS."""

    over_naive: dict[str, list[float]]
    over_colocated: dict[str, list[float]]


def speedups(
    model: Callable[[int], Calibrated],
    systems: Mapping[str, System],
    *,
    gpus: int = 16,
    change: Callable[[Durations], Durations] = lambda durations: durations,
) -> Speedups:
    """What systems gain on a model, which may depend on the denoising steps, after a change of the durations.

    The baselines are not changed: naive is that of 16 GPUs, colocated every stage on all GPUs.
    """
    found = Speedups({name: [] for name in systems}, {name: [] for name in systems})
    for n, f in JOBS:
        chosen = model(n)
        naive = chosen.naive_s(num_inference_steps=n, timestep_fraction=f)
        colocated = chosen.colocated_s(num_inference_steps=n, timestep_fraction=f)
        for name, system in systems.items():
            durations = chosen.durations(num_inference_steps=n, timestep_fraction=f, gpus=gpus, tsp=system.tsp)
            seconds = step_s(change(durations), system)
            found.over_naive[name].append(float(naive / seconds))
            found.over_colocated[name].append(float(colocated / seconds))
    return found


def span(values: Sequence[float]) -> Range:
    """Least and largest."""
    return min(values), max(values)


def always(model: Calibrated, _: int) -> Calibrated:
    """The same model whatever the number of denoising steps."""
    return model


def ranges(small: Speedups, large: Speedups) -> dict[str, Range]:
    """The rows that the paper has ranges of, from 16 and 32 GPUs."""
    rows = {name: span(small.over_naive[name]) for name in PAPER}
    for row, name in OVER_COLOCATED.items():
        rows[row] = span(small.over_colocated[name] + large.over_colocated[name])
    return rows


def rounded(model: Calibrated, *, draws: int = 40) -> Range:
    """The largest +TCSS speed-up, if the parameters differ from those printed by up to half of their last digit.

    With stale work a plan for one step is often as good as another, and the long run is not.
    """
    rng = random.Random("rounded")  # noqa: S311 - not a secret
    n, f = JOBS[-1]
    found = []
    for _ in range(draws):
        changes: dict[str, Any] = {}
        for name in ("g0", "r0", "u0", "mu", "tau", "hf", "cs", "y_opt", "y_sync"):
            value: Decimal = getattr(model, name)
            last = Decimal(1).scaleb(int(value.as_tuple().exponent))
            changes[name] = max(Decimal(0), value + last * rng.randint(-5, 5) / 10)
        other = replace(model, **changes)
        naive = other.naive_s(num_inference_steps=n, timestep_fraction=f)
        found.append(float(naive / step_s(other.durations(num_inference_steps=n, timestep_fraction=f), PAPER["+TCSS"])))
    return span(found)


# ---- tables ----------------------------------------------------------------------------------------------------


def show_ranges(name: str, found: Mapping[str, Range]) -> bool:
    """The paper's rows beside the fit's and the paper's ranges; returns whether those that must agree do."""
    print(f"{'':22}{'here':>11}{'the fit':>11}{'off by':>16}{'paper':>11}")
    met, misses = True, []
    for row, span in found.items():
        fitted, printed = FITTED[name][row], PRINTED[name][row]
        off = [here / there - 1 for here, there in zip(span, fitted, strict=True)]
        within = all(abs(value) <= TOLERANCE for value in off)
        met &= within or row not in BOUND_TO
        cells = f"{_range(span):>11}{_range(fitted):>11}{f'{off[0]:+.1%} {off[1]:+.1%}':>16}{_range(printed):>11}"
        print(
            f"{row:22}{cells}" + ("" if within else "  tips over at ties" if row not in BOUND_TO else "  NOT the fit's")
        )
        for end, here, there in zip(("low", "high"), span, printed, strict=True):
            if abs(here / there - 1) > TOLERANCE:
                misses.append(f"{row} {end} end {here:.2f} against {there:.2f} ({here / there - 1:+.1%})")
    print("misses the paper by more than 2 %:" + "".join(f"\n  {miss}" for miss in misses or ["nowhere"]))
    return met


def show_jobs(found: Mapping[str, Sequence[float]]) -> None:
    """A row per system, a column per job."""
    print(f"{'':34}" + "".join(f"{f'n={n} f={f}':>12}" for n, f in JOBS) + f"{'range':>13}")
    for name, values in found.items():
        print(f"{name:34}" + "".join(f"{value:12.3f}" for value in values) + f"{_range(span(values)):>13}")


def _range(found: Range) -> str:
    return f"{found[0]:.2f}-{found[1]:.2f}"


def letters(model: Calibrated) -> str:
    """The parameters of a model, as digen.costs defines them."""
    names = ("g0", "r0", "u0", "mu", "tau", "hf", "cs", "y_opt", "y_sync", "sg", "su", "d32")
    return f"B={model.num_micro_batches} " + " ".join(f"{name}={getattr(model, name)}" for name in names)


# ---- assumptions -----------------------------------------------------------------------------------------------


def unequal(durations: Durations, kappa: Decimal, *, trainer: bool) -> Durations:
    """One half of the GPUs is ``kappa`` times faster: the trainer's or the generator's. Switches only move weights."""

    def faster(seconds: Decimal) -> Decimal:
        return (seconds / kappa).quantize(Decimal("0.0001"))

    names = ("update_s", "assist_s", "commit_s") if trainer else ("generate_s", "score_s")
    changes: dict[str, Any] = {}
    for name in names:
        value = getattr(durations, name)
        changes[name] = tuple(map(faster, value)) if isinstance(value, tuple) else faster(value)
    return replace(durations, **changes)


def judged(n: int, share: Decimal) -> Calibrated:
    """The model with a judge whose score takes a share of a generation."""
    return replace(JUDGED, r0=share * (n + JUDGED.g0))


def assumed() -> dict[str, dict[str, list[float]]]:
    """Speed-ups over colocated execution with assumed parameters, by figure and row; prints them."""
    both = {"+TAG": PAPER["+TAG"], "+TCSS": PAPER["+TCSS"]} | {name: BEYOND[name] for name in list(BEYOND)[1:4]}
    print(f"\nassumed, no target: {FLUX.label} (Fig. 14, paper 1.06-1.21), 32 GPUs, over colocated; {letters(FLUX)}")
    flux = speedups(partial(always, FLUX), both, gpus=32).over_colocated
    show_jobs(flux)
    slow = CALIBRATED["hunyuan_video"]
    print(
        f"\nassumed, no target: unequal GPUs (Fig. 15, paper 1.46-1.85), {slow.label}, +TAG, over colocated at the\n"
        "slower speed; the better half is so many times faster and trains, as in the paper, or generates"
    )
    halves: dict[str, list[float]] = {}
    for kappa, trainer in itertools.product(FASTER, (True, False)):
        found = speedups(
            partial(always, slow), {"": PAPER["+TAG"]}, change=partial(unequal, kappa=kappa, trainer=trainer)
        )
        halves[f"{kappa} x, {'trains' if trainer else 'generates'}"] = found.over_colocated[""]
    show_jobs(halves)
    print(
        f"\nassumed, no target: {JUDGED.label}, a judge scores on the generator's GPUs (Fig. 11, where the paper\n"
        f"compares with veRL-Omni, which no model here describes), on-policy, over colocated; {letters(JUDGED)},\n"
        "but r0 is such a share of a generation"
    )
    judges: dict[str, list[float]] = {}
    for share in JUDGE_SHARES:
        systems = {"+TSP": PAPER["+TSP"], "+TAG": PAPER["+TAG"], "horizon": BEYOND["TAG, horizon"]}
        for name, values in speedups(partial(judged, share=share), systems).over_colocated.items():
            judges[f"r = {share} g, {name}"] = values
    show_jobs(judges)
    return {
        "Fig. 14: FLUX-like, assumed": flux,
        "Fig. 15: unequal GPUs, assumed": halves,
        "Fig. 11: a judge, assumed": judges,
    }


# ---- all of it -------------------------------------------------------------------------------------------------


def draw(
    panels: Mapping[str, Mapping[str, Sequence[float]]], paper: Mapping[str, Mapping[str, Range]], path: Path
) -> None:
    """A panel per figure, a group of bars per row with a bar per job, and the paper's range over it."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "ablation"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 2, figsize=(15, 17))
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        for job, (n, f) in enumerate(JOBS):
            places = [row + 0.13 * (job - 2.5) for row in range(len(rows))]
            shade = plt.cm.viridis(job / len(JOBS))
            axis.bar(places, [values[job] for values in rows.values()], 0.12, color=shade, label=f"n={n}, f={f}")
        for row, name in enumerate(rows):
            if name in paper.get(title, {}):
                least, most = paper[title][name]
                axis.plot([row, row], [least, most], color="black", marker="_", label="paper" if row == 0 else None)
        axis.set(title=title, xticks=range(len(rows)))
        axis.set_xticklabels(rows, rotation=20, ha="right")
        axis.axhline(1, color="grey", linestyle=":")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower right", bbox_to_anchor=(0.8, 0.12))
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.supylabel("speed-up, simulated")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=CALIBRATED, default=list(CALIBRATED), help="only these models")
    parser.add_argument("--out", type=Path, default=Path("runs/figures"), metavar="DIR", help="where the figure goes")
    options = parser.parse_args()
    print("simulated throughout; takes about 20 seconds")
    met = True
    panels: dict[str, dict[str, list[float]]] = {}
    paper: dict[str, dict[str, Range]] = {}
    for key in options.model:
        model, (ablated, compared) = CALIBRATED[key], FIGURES[key]
        small, large = (speedups(partial(always, model), PAPER | BEYOND, gpus=gpus) for gpus in (16, 32))
        print(f"\n{key}: {model.label}, a fit and not a measurement; {letters(model)}")
        met &= show_ranges(key, ranges(small, large))
        least, most = rounded(model)
        print(f"parameters within the rounding of what is printed: high end of +TCSS {least:.2f} to {most:.2f}")
        print(f"\nFig. {ablated}, over naive, 16 GPUs; below the paper's systems what digen adds")
        show_jobs(small.over_naive)
        over: dict[str, list[float]] = {}
        for gpus, found in ((16, small), (32, large)):
            over |= {
                f"{name}, {gpus} GPUs": found.over_colocated[name] for name in ("+TAG", "+TCSS", *list(BEYOND)[2:])
            }
        print(f"\nFig. {compared}, over colocated")
        show_jobs(over)
        panels[f"Fig. {ablated}: {model.label}, over naive"] = small.over_naive
        paper[f"Fig. {ablated}: {model.label}, over naive"] = PRINTED[key]
        panels[f"Fig. {compared}: {model.label}, over colocated"] = over
    panels |= assumed()
    draw(panels, paper, options.out / "ablation.svg")
    print(f"\n{', '.join(BOUND_TO)} within 2 % of the fit's ranges: {'met' if met else 'MISSED'}")
    print(f"figure: {options.out / 'ablation.svg'}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
