"""Where durations come from before anything ran: a calibrated cost model, given numbers, or a profile of a real run.

:func:`durations_for` reads them from a config's ``costs`` section. A calibrated model is a fit and no measurement;
:func:`origin` says which of them it was, and belongs beside every number that is computed from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from digen.diffusion import algorithms
from digen.durations import Durations, parse_durations, profiled_durations
from digen.errors import ConfigError
from digen.events import read_events
from digen.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from digen.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A cost model whose parameters were fitted to the speed-up ranges that the paper prints (5.3 and 5.6).

    A fit, not a measurement: 14 free numbers against 12 targets, with several of them on the edge of their box. The
    parameters reproduce ranges and identify nothing; the gain of stale starts was tuned in, not predicted. Fitted for
    20, 30 and 40 denoising steps and timestep fractions of 0.4 and 0.6; elsewhere it is extrapolated.

    The unit of time is one denoising step of one micro-batch on half of 16 GPUs. With n denoising steps, a timestep
    fraction f: g = n + g0, r = r0, u = u0 + mu f n without timestep parallelism and u0 + tau mu f n with it,
    h = hf g, c_load = c_off = cs / 2. On 32 GPUs every generation, update and assist takes ``d32`` more.
    """

    label: str
    """What it resembles."""
    num_micro_batches: int
    """B that it was fitted with."""
    stale_fraction: Decimal
    """Stale share that it was fitted with."""
    g0: Decimal
    """A generation beside its denoising steps."""
    r0: Decimal
    """A score."""
    u0: Decimal
    """An update beside its timesteps."""
    mu: Decimal
    """An update's timestep, in denoising steps."""
    tau: Decimal
    """What timestep parallelism leaves of it."""
    hf: Decimal
    """An assist, in generations."""
    cs: Decimal
    """Both switches of an assist."""
    y_opt: Decimal
    """The optimizer step."""
    y_sync: Decimal
    """The weight sync."""
    sg: Decimal
    """How many times faster generation and scores are on all GPUs than on half of them (colocated)."""
    su: Decimal
    """How many times faster updates are on all GPUs than on half of them (colocated)."""
    d32: Decimal
    """What every task takes more where 32 GPUs are split."""

    def durations(
        self,
        *,
        num_inference_steps: int,
        timestep_fraction: Decimal | float,
        gpus: int = 16,
        tsp: bool = True,
        num_steps: int = 1,
    ) -> Durations:
        """Durations of a run with one generator group on one half of the GPUs and the trainer on the other.

        Raises:
            ConfigError: a number is outside of what the model is defined for.
        """
        if gpus not in {16, 32}:
            raise ConfigError(f"gpus={gpus}: the calibrated models were fitted for 16 and 32 GPUs")
        if num_inference_steps < 1:
            raise ConfigError(f"num_inference_steps={num_inference_steps} must be at least 1")
        fraction = Decimal(str(timestep_fraction))
        if not 0 < fraction <= 1:
            raise ConfigError(f"timestep_fraction={timestep_fraction} must be above 0 and at most 1")
        more = self.d32 if gpus == 32 else Decimal(0)
        generate = num_inference_steps + self.g0
        trained = self.mu * fraction * num_inference_steps
        return Durations(
            num_micro_batches=self.num_micro_batches,
            num_steps=num_steps,
            generate_s=(generate + more,),
            score_s=(self.r0,),
            update_s=self.u0 + (self.tau if tsp else 1) * trained + more,
            assist_s=self.hf * generate + more,
            switch_in_s=self.cs / 2,
            switch_out_s=self.cs / 2,
            commit_s=self.y_opt,
            load_s=self.y_sync,
        )

    def naive_s(self, *, num_inference_steps: int, timestep_fraction: Decimal | float, gpus: int = 16) -> Decimal:
        """A step of naive disaggregation, without timestep parallelism: B (g + r + u) + y_opt + y_sync."""
        one = self.durations(
            num_inference_steps=num_inference_steps, timestep_fraction=timestep_fraction, gpus=gpus, tsp=False
        )
        per_micro_batch = one.generate_s[0] + one.score_s[0] + one.update_s
        return self.num_micro_batches * per_micro_batch + self.y_opt + self.y_sync

    def colocated_s(self, *, num_inference_steps: int, timestep_fraction: Decimal | float) -> Decimal:
        """A step of native colocation, every stage on all GPUs, no TSP: B ((g + r) / sg + u / su) + y_opt.

        It costs no ``d32``: nothing is split. 28 digits, unlike the others it is not exact.
        """
        one = self.durations(num_inference_steps=num_inference_steps, timestep_fraction=timestep_fraction, tsp=False)
        per_micro_batch = (one.generate_s[0] + one.score_s[0]) / self.sg + one.update_s / self.su
        return self.num_micro_batches * per_micro_batch + self.y_opt


def _parameters(label: str, num_micro_batches: int, **parameters: str) -> Calibrated:
    return Calibrated(
        label=label,
        num_micro_batches=num_micro_batches,
        stale_fraction=Decimal("0.5"),
        **{name: Decimal(text) for name, text in parameters.items()},
    )


CALIBRATED = {
    "hunyuan_video": _parameters(
        "HunyuanVideo-like, B = 16",
        16,
        g0="22.2",
        r0="0",
        u0="0",
        mu="3.43",
        tau="0.32",
        hf="1.15",
        cs="7.2",
        y_opt="12",
        y_sync="0",
        sg="2.0",
        su="2.2",
        d32="2.8",
    ),
    "wan2.1": _parameters(
        "Wan2.1-like, B = 8",
        8,
        g0="6.6",
        r0="1.5",
        u0="8",
        mu="2.24",
        tau="0.25",
        hf="0.92",
        cs="0",
        y_opt="11.1",
        y_sync="19.0",
        sg="1.81",
        su="2.2",
        d32="0",
    ),
}
"""The calibrated models by name: each the best of its kind among 26 fits, by the residuals."""


def durations_for(config: RunConfig) -> Durations:
    """The durations of ``config`` from the source that its ``costs`` section names, with its own B, S and G.

    They stand for its micro-batch, its ``algorithm.tsp_chunk`` and its workers, whatever the source.

    Raises:
        ConfigError: ``costs`` names no source, or one that says nothing about this config; the message names the field.
    """
    costs = config.costs
    if config.algorithm.advantage.kind == "global_std":
        raise ConfigError("algorithm.advantage.kind: updates that wait for all rewards of a step are not simulated")
    plan = arithmetic(config)
    if costs.model is not None:
        durations = _calibrated_durations(config, costs.model)
    elif costs.durations is not None:
        durations = _given_durations(config, costs.durations)
    elif costs.profile is not None:
        durations = _profiled_durations(config, costs.profile)
    else:
        raise ConfigError(
            "costs: nothing says how long tasks take; set costs.profile to the folder of a run, costs.model to "
            f"{' or '.join(CALIBRATED)}, or costs.durations to text such as 'g=10 r=1 u=5'"
        )
    return replace(
        durations,
        num_micro_batches=plan.num_micro_batches,
        num_steps=config.run.num_steps,
        micro_batches_per_group=max(1, plan.samples_per_prompt // plan.micro_batch_size),
    )


def origin(config: RunConfig) -> str:
    """What the durations of ``config`` are, in words: a fit, given numbers, or measured means."""
    costs, steps = config.costs, config.sampling.num_inference_steps
    if costs.model is not None:
        fraction = _fraction(config)
        fitted = CALIBRATED[costs.model].num_micro_batches == arithmetic(config).num_micro_batches
        inside = fitted and 20 <= steps <= 40 and Decimal("0.4") <= fraction <= Decimal("0.6")
        return (
            f"calibrated model {costs.model} ({CALIBRATED[costs.model].label}) for {costs.gpus or 16} GPUs, a fit and "
            "not a measurement; the unit of time is one denoising step"
            + ("" if inside else "; extrapolated beyond what it was fitted to")
        )
    if costs.profile is not None:
        return f"mean durations of the run in {costs.profile}"
    return "given durations" + (f": {costs.note}" if costs.note is not None else "")


def time_unit(config: RunConfig) -> str:
    """What the durations of ``config`` count."""
    return "seconds" if config.costs.model is None else "denoising steps"


def arithmetic(config: RunConfig, micro_batch_size: int | None = None) -> Plan:
    """The plan of ``config`` on a prompt that stands for its own: B, and the size of a micro-batch."""
    return Plan(
        ["any prompt"],
        num_steps=config.run.num_steps,
        prompts_per_step=config.plan.prompts_per_step,
        samples_per_prompt=config.plan.samples_per_prompt,
        micro_batch_size=config.plan.micro_batch_size if micro_batch_size is None else micro_batch_size,
        axis=config.schedule.resolved_axis,
    )


def trained_timesteps(config: RunConfig) -> int:
    """Timesteps of a trajectory that are trained: int(fraction T), at least one, never the last."""
    num_steps = config.sampling.num_inference_steps
    return max(1, min(int(_fraction(config) * num_steps), num_steps - 1))


def update_factor(config: RunConfig, chunk: int) -> Fraction | None:
    """How much longer an update takes with ``chunk`` timesteps in a forward than with the config's own chunk.

    ``None`` where nothing tells: given or profiled durations without ``costs.tsp_share``.
    """
    own, total = own_chunk(config), trained_timesteps(config)
    if min(chunk, total) == (total if own == "all" else min(own, total)):
        return Fraction(1)
    if config.costs.model is not None:
        model = CALIBRATED[config.costs.model]
        return Fraction(_calibrated_update(model, config, chunk)) / Fraction(_calibrated_update(model, config, own))
    if config.costs.tsp_share is None:
        return None
    share = Fraction(config.costs.tsp_share)
    return _sequential_share(config, chunk, share) / _sequential_share(config, own, share)


def to_millionth(value: Fraction) -> Decimal:
    """The nearest decimal with at most six digits behind the point."""
    return Decimal(round(value * 10**6)) / 10**6


def _sequential_share(config: RunConfig, chunk: int | Literal["all"], share: Fraction) -> Fraction:
    """An update's time with timestep parallelism, as a share of its time without.

    A forward of c timesteps takes (1 - s) + s c times as long as one of a single timestep, with s such that all of
    them in one forward take ``share`` of the time of all one by one. The last forward is padded to c, as in training.
    """
    total = trained_timesteps(config)
    if total == 1 or chunk == 1:
        return Fraction(1)
    size = total if chunk == "all" else min(chunk, total)
    more = (share * total - 1) / (total - 1)
    return -(-total // size) * (1 - more + more * size) / total


def _fraction(config: RunConfig) -> Decimal:
    """The share of the timesteps that is trained: the config's, or its algorithm's own."""
    given = config.algorithm.timestep_fraction
    if given is None:
        declaration = algorithms.lookup(config.algorithm.name).declaration
        given = declaration.timestep_fraction if declaration is not None else None
    return Decimal(str(1.0 if given is None else given))


def own_chunk(config: RunConfig) -> int | Literal["all"]:
    """The config's TSP chunk. ``auto`` is taken as all timesteps: what fits in memory is another question."""
    chunk = config.algorithm.tsp_chunk
    return "all" if chunk == "auto" else chunk


def _calibrated_update(model: Calibrated, config: RunConfig, chunk: int | Literal["all"]) -> Decimal:
    """An update of a calibrated model, which was fitted with none and all timesteps in one forward."""
    timesteps = model.mu * _fraction(config) * config.sampling.num_inference_steps
    saved = 1 - to_millionth(_sequential_share(config, chunk, Fraction(model.tau)))
    return _calibrated(model, config, tsp=False).update_s - timesteps * saved


def _calibrated(model: Calibrated, config: RunConfig, *, tsp: bool) -> Durations:
    return model.durations(
        num_inference_steps=config.sampling.num_inference_steps,
        timestep_fraction=_fraction(config),
        gpus=16 if config.num_generators == 0 else config.costs.gpus or 16,
        tsp=tsp,
    )


def _calibrated_durations(config: RunConfig, name: str) -> Durations:
    model, colocated = CALIBRATED[name], config.num_generators == 0
    if config.num_generators > 1:
        raise ConfigError(
            f"workers.generators={config.num_generators}: the calibrated models were fitted with one generator group; "
            "set it to 1, or let digen plan scale them"
        )
    if config.algorithm.advantage.best_of_n is not None:
        raise ConfigError(
            "algorithm.advantage.best_of_n: the calibrated models were fitted without it; give costs.durations"
        )
    durations = _calibrated(model, config, tsp=True)
    update = _calibrated_update(model, config, own_chunk(config))
    if not colocated:
        return replace(durations, update_s=update)
    generate = to_millionth(Fraction(durations.generate_s[0]) / Fraction(model.sg))
    return replace(
        durations,
        generate_s=(generate,),
        score_s=(to_millionth(Fraction(durations.score_s[0]) / Fraction(model.sg)),),
        update_s=to_millionth(Fraction(update) / Fraction(model.su)),
        assist_s=generate,
    )


def _given_durations(config: RunConfig, text: str) -> Durations:
    own = {word.partition("=")[0] for word in text.split()} & {"B", "S", "G", "T"}
    if own:
        raise ConfigError(
            f"costs.durations: leave out {', '.join(sorted(own))}: B comes from plan, S from run.num_steps, "
            "G from workers.generators, and T is 1"
        )
    try:
        return parse_durations(f"B=1 G={max(1, config.num_generators)} T=1 {text}")
    except ConfigError as error:
        raise ConfigError(f"costs.{error}") from None


_DECISIVE = (
    "model.family",
    "model.path",
    "model.dtype",
    "model.device",
    "model.forward_batch",
    "sampling.num_inference_steps",
    "plan.samples_per_prompt",
    "algorithm.name",
    "algorithm.timestep_fraction",
    "algorithm.tsp_chunk",
    "algorithm.old_logprobs",
    "algorithm.advantage.best_of_n",
    "optimizer.name",
    "optimizer.ema_decay",
    "reward.name",
    "reward.kwargs",
    "workers.threads",
    "workers.gpus",
    "workers.offload",
    "workers.checksums",
)
"""What decides how long a task takes; a profile must have all of it in common with the config, besides the size of a
micro-batch and the number of generators. How many micro-batches a step has and how they are scheduled may differ."""


def _profiled_durations(config: RunConfig, folder: Path) -> Durations:
    from digen.config import load_config

    for name in ("config.yaml", "events.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"costs.profile: {folder} is not a run's folder: it has no {name}")
    profiled = load_config(folder / "config.yaml")

    def facts(config: RunConfig) -> dict[str, Any]:
        values = {name: attrgetter(name)(config) for name in _DECISIVE}
        values["plan.micro_batch_size"] = arithmetic(config).micro_batch_size
        return values | {"workers.generators": config.num_generators}

    theirs = facts(profiled)
    for name, value in facts(config).items():
        if value != theirs[name]:
            raise ConfigError(
                f"costs.profile: {folder} is a run of another config: {name} is {theirs[name]} there and {value} here; "
                f"profile a run with {name}={value}, or set it to {theirs[name]}"
            )
    try:
        return profiled_durations(read_events(folder / "events.jsonl"))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"costs.profile: {folder}: {error}") from None
