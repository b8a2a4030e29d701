"""What must hold before a run begins: the handles fit the config, and the config becomes rules."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from digen.errors import ConfigError
from digen.events import Role
from digen.sched.admission import stale_limit
from digen.sched.state import Rules
from digen.sched.tag import Policy

if TYPE_CHECKING:
    from digen.config import ScheduleConfig
    from digen.plan import Plan


def needed_methods(role: Role, *, scorers: bool, evaluate: bool) -> list[str]:
    """Methods that a generator or scorer must have."""
    if role == "scorer":
        return ["score"]
    return ["generate", "load", *["score"] * (not scorers), *["evaluate"] * evaluate]


def check_handles(
    trainer: Any, generators: Sequence[Any], scorers: Sequence[Any], *, start_step: int, evaluate: bool
) -> None:
    """Check that the handles have the methods that their roles need.

    Raises:
        ConfigError: one lacks a method, or the trainer's weights are not those of ``start_step``.
    """
    needs = [(trainer, ["update", "commit"])]
    if generators:
        needs += [(trainer, ["publish"])]
    else:
        needs += [(trainer, ["generate", *["score"] * (not scorers), *["evaluate"] * evaluate])]
    needs += [(handle, needed_methods("generator", scorers=bool(scorers), evaluate=evaluate)) for handle in generators]
    needs += [(handle, needed_methods("scorer", scorers=True, evaluate=evaluate)) for handle in scorers]
    for handle, methods in needs:
        for method in methods:
            if not hasattr(handle, method):
                raise ConfigError(
                    f"worker {handle.name!r} has no method {method!r}; without scorers every generator must score, "
                    "and without generators the trainer must generate and score"
                )
    without = [handle.name for handle in generators if not hasattr(handle, "encode")]
    if 0 < len(without) < len(generators):
        raise ConfigError(
            f"generators {', '.join(without)} have no method 'encode' but others do; all of them must, or none"
        )
    version = getattr(trainer, "version", start_step)
    if version != start_step:
        raise ConfigError(
            f"the trainer holds version {version} but the run starts at step {start_step}; "
            "a resumed run starts at the step of its checkpoint"
        )


def rules_from(config: ScheduleConfig, plan: Plan, policy: Policy, trainer: Any, generators: Sequence[Any]) -> Rules:
    """The numbers that Algorithm 1 compares with; warns of those that do not do what they seem to."""
    limit = stale_limit(config.resolved_stale_fraction, plan.num_micro_batches) if config.resolved_window > 1 else 0
    if config.resolved_window > 1 and limit == 0:
        warn(
            "stale_fraction rounds down to no stale micro-batch; the run is on-policy",
            stale_fraction=str(config.resolved_stale_fraction),
            micro_batches=plan.num_micro_batches,
        )
    if config.resolved_window > 2:
        warn("window above 2 goes beyond the one-step staleness that the paper tests", window=config.window)
    if policy.name != "never" and config.mode != "colocated" and not hasattr(trainer, "generate"):
        warn("the trainer cannot generate, so it will not assist", policy=policy.name)
    return Rules(
        window=config.resolved_window,
        stale_limit=limit,
        barrier=config.resolved_barrier,
        hold=config.sync == "hold",
        index_order=config.update_order == "index",
        max_generating=config.max_generating,
        max_rollout_bytes=config.max_rollout_bytes,
        max_dropped=Decimal(config.max_dropped_groups),
        assists=hasattr(trainer, "generate") and policy.name != "never",
        switches=hasattr(trainer, "switch"),
        lazy_switch=config.lazy_switch,
        encodes=any(hasattr(handle, "encode") for handle in generators),
    )


def warn(message: str, **facts: Any) -> None:
    """Log a warning."""
    import structlog  # by then something is worth 50 ms; importing digen.sched is not

    structlog.get_logger("digen.sched").warning(message, **facts)
