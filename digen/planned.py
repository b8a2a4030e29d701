"""What comes out of the planner: a ranked table, advice, and the config to use. All of it is simulated and says so."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import yaml

from digen.config import RunConfig, ScalingSection, dump_yaml, validate
from digen.costs import durations_for, origin, time_unit, trained_timesteps
from digen.errors import ConfigError
from digen.plan import even_unit
from digen.planner import NUM_STEPS, Outcome, Row
from digen.twin import simulate

if TYPE_CHECKING:
    from decimal import Decimal

    from digen.capacity import Group
    from digen.twin import Twin

_MOST_MISFITS = 4
"""Misfits that are printed one by one."""


def planned_config(outcome: Outcome, row: Row | None = None) -> RunConfig:
    """A config that ``digen train`` takes and ``digen simulate`` plays as the candidate was played.

    Its costs are the candidate's durations. ``workers.gpus`` numbers the GPUs as ``--gpus`` lists them, type by type,
    generators first.

    Args:
        outcome: from :func:`digen.planner.plan`.
        row: which one; default the fastest.
    """
    config, candidate = outcome.config, (row or outcome.rows[0]).candidate
    layout = candidate.layout
    free = dict(zip(outcome.gpus, accumulate(outcome.gpus.values(), initial=0), strict=False))

    def devices(group: Group) -> list[int]:
        taken: list[int] = []
        for name, count in group.gpus:
            taken += range(free[name], free[name] + count)
            free[name] += count
        return taken

    workers = {f"gen{number}": devices(group) for number, group in enumerate(layout.generators)}
    workers["trainer"] = devices(layout.trainer)
    whole = candidate.tsp_chunk == trained_timesteps(config)
    data = config.model_dump(mode="json")
    data["plan"]["micro_batch_size"] = candidate.micro_batch_size
    if (
        config.model.forward_batch is None
        and (ranks := max(group.size for group in (*layout.generators, layout.trainer))) > 1
    ):
        data["model"]["forward_batch"] = even_unit(candidate.micro_batch_size, ranks, candidate.micro_batch_size) or 1
    data["algorithm"]["tsp_chunk"] = "all" if whole else candidate.tsp_chunk
    data["schedule"] = candidate.schedule.model_dump(mode="json")
    data["workers"] |= {"generators": len(layout.generators), "gpus": workers}
    data["costs"] = {
        "durations": " ".join(word for word in str(candidate.durations).split() if word[0] not in "BSGT"),
        "note": f"scaled to {layout} by digen plan; from {origin(config)}",
        "generator_gpus": (layout.generators or (layout.trainer,))[0].size,
        "trainer_gpus": layout.trainer.size,
    }
    return validate(data, source="the planned config")


def predict(config: RunConfig) -> Twin:
    """What ``digen simulate`` plays for a config."""
    return simulate(durations_for(config), config.schedule)


def as_yaml(config: RunConfig) -> str:
    """The file that ``digen plan --write`` writes; it reads back as the same config."""
    text = f"# Written by digen plan. {config.costs.note}\n{dump_yaml(config)}"
    if validate(yaml.safe_load(text), source="the planned config") != config:
        raise ConfigError("the planned config reads back as another one; this is a bug in digen")
    return text


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Plain data for scripts."""
    config = planned_config(outcome)
    twin = predict(config)
    return {
        "simulated": True,
        "durations": origin(outcome.config),
        "time_unit": time_unit(outcome.config),
        "gpus": dict(outcome.gpus),
        "num_candidates": outcome.num_candidates,
        "num_simulated": outcome.num_simulated,
        "misfits": list(outcome.misfits),
        "rows": [_plain(outcome, row) for row in outcome.rows],
        "by_trainer_type": {name: _plain(outcome, row) for name, row in outcome.by_type.items()},
        "on_policy": None if outcome.on_policy is None else _plain(outcome, outcome.on_policy),
        "planned": {
            "config": config.model_dump(mode="json"),
            "makespan": float(twin.makespan),
            "step": float(twin.step_s),
        },
    }


def _plain(outcome: Outcome, row: Row) -> dict[str, Any]:
    candidate, schedule = row.candidate, row.candidate.schedule
    return {
        "layout": str(candidate.layout),
        "trainer": dict(candidate.layout.trainer.gpus),
        "generators": [dict(group.gpus) for group in candidate.layout.generators],
        "micro_batch_size": candidate.micro_batch_size,
        "tsp_chunk": candidate.tsp_chunk,
        "window": schedule.resolved_window,
        "stale_fraction": float(schedule.resolved_stale_fraction),
        "sync": schedule.sync,
        "tag": schedule.resolved_tag,
        "mode": schedule.mode,
        "step": float(row.step_s),
        "samples_per_time": _samples(outcome.config) / float(row.step_s) if row.step_s else None,
        "times_naive": _times(row.naive_s, row.step_s),
        "times_colocated": _times(outcome.colocated_s, row.step_s),
        "idle": row.idle,
        "stale": row.stale,
        "memory_gib": [{"needed": float(need.total), "available": float(need.available)} for need in candidate.needs],
    }


def describe(outcome: Outcome) -> list[str]:
    """The table and what follows from it, in words."""
    config, costs = outcome.config, outcome.config.costs
    machine = " + ".join(f"{count} {name}" for name, count in outcome.gpus.items())
    groups = f"{config.plan.prompts_per_step} x {config.plan.samples_per_prompt}"
    left_out = outcome.num_candidates - outcome.num_simulated
    lines = [f"simulated, not measured: {machine}, {groups} samples a step, times in {time_unit(config)}"]
    lines.append(f"durations: {origin(config)}")
    curve = "assumed (the default)" if costs.scaling == ScalingSection() else "as given"
    lines.append(f"scaling by costs.scaling, {curve}; {costs.fixed_share:%} of a task stays with smaller micro-batches")
    if costs.memory.parameters_b is None:
        lines.append("memory: not checked, costs.memory.parameters_b is not given")
    if outcome.misfits:
        lines.append("memory: these do not fit, even with the smallest micro-batch and TSP chunk")
        lines += [f"  {misfit}" for misfit in outcome.misfits[:_MOST_MISFITS]]
        lines += ["  ..."] if len(outcome.misfits) > _MOST_MISFITS else []
    lines.append(
        f"{outcome.num_candidates:,} candidates: {outcome.num_simulated:,} simulated for {NUM_STEPS} steps (less the "
        f"first and the last), {left_out:,} pruned by a bound on their rate"
    )
    lines += ["", *_table(outcome), *_baselines(outcome), "", *_advice(outcome)]
    planned = planned_config(outcome)
    twin = predict(planned)
    lines.append(
        f"digen simulate of the planned config: makespan {float(twin.makespan):,.6g} in {planned.run.num_steps} steps, "
        f"{float(twin.step_s):,.6g} a step"
    )
    return lines


def _baselines(outcome: Outcome) -> list[str]:
    if outcome.colocated_s is None:
        colocated = "unknown, costs.scaling does not reach so many GPUs"
    else:
        colocated = f"{float(outcome.colocated_s):,.5g} a step"
    return [
        "x naive: the same layout without overlap, one timestep in a forward",
        "x coloc.: every stage on all GPUs at once, at the pace of the slowest, one timestep in a forward: "
        + colocated,
    ]


def _table(outcome: Outcome) -> list[str]:
    per_unit = "samples/s" if time_unit(outcome.config) == "seconds" else "samples/unit"
    head = ("#", "step", per_unit, "x naive", "x coloc.", "idle g/t", "stale", "m", "TSP", "W", "sync", "TAG")
    cells = [(*head, "GiB train", "layout")]
    cells += [
        (
            str(number),
            f"{float(row.step_s):,.5g}",
            f"{_samples(outcome.config) / float(row.step_s):.4g}" if row.step_s else "-",
            _factor(row.naive_s, row.step_s),
            _factor(outcome.colocated_s, row.step_s),
            "/".join(f"{row.idle[role]:.0%}" for role in ("generator", "trainer") if role in row.idle),
            f"{row.stale:.0%}",
            str(row.candidate.micro_batch_size),
            str(row.candidate.tsp_chunk),
            str(row.candidate.schedule.resolved_window),
            row.candidate.schedule.sync if row.candidate.layout.generators else "-",
            row.candidate.schedule.resolved_tag,
            "{:.0f} of {:.0f}".format(*_gib(row)) if row.candidate.needs else "-",
            str(row.candidate.layout),
        )
        for number, row in enumerate(outcome.rows, 1)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _advice(outcome: Outcome) -> list[str]:
    """Which layout, which GPU type should train, what being on policy costs."""
    best = outcome.rows[0]
    layout = best.candidate.layout
    lines = [f"use {layout}"] if layout.generators else [f"use {layout}: no split of these GPUs is faster"]
    by_type = sorted(outcome.by_type.items(), key=lambda item: item[1].step_s)
    if len(outcome.gpus) > 1 and by_type:
        winner, first = by_type[0]
        lines.append(f"{winner} should train: {_how(outcome, first)}")
        lines += [f"  with {name} as trainer {_how(outcome, row, first)}" for name, row in by_type[1:]]
        lines += [f"  {name} cannot train" for name in outcome.gpus if name not in outcome.by_type]
    if outcome.on_policy is not None and outcome.on_policy is not best:
        lines.append(f"on policy {_how(outcome, outcome.on_policy, best)}: {outcome.on_policy.candidate.layout}")
    return lines


def _how(outcome: Outcome, row: Row, other: Row | None = None) -> str:
    more = "" if other is None or not other.step_s else f" ({float(row.step_s / other.step_s) - 1:+.1%})"
    chunk, timesteps = row.candidate.tsp_chunk, trained_timesteps(outcome.config)
    memory = "; its GPUs need {:.0f} of {:.0f} GiB".format(*_gib(row)) if row.candidate.needs else ""
    return f"{float(row.step_s):,.5g} a step{more}, {chunk} of {timesteps} timesteps in a forward{memory}"


def _gib(row: Row) -> tuple[float, float]:
    trainer = row.candidate.needs[0]
    return float(trainer.total), float(trainer.available)


def _samples(config: RunConfig) -> int:
    return config.plan.prompts_per_step * config.plan.samples_per_prompt


def _times(baseline: Decimal | None, value: Decimal) -> float | None:
    return None if baseline is None or not value else float(baseline / value)


def _factor(baseline: Decimal | None, value: Decimal) -> str:
    times = _times(baseline, value)
    return "-" if times is None else f"{times:.2f}"
