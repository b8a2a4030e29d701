"""The registry of algorithms: what the driver needs to know before a worker starts. Imports no torch.

An algorithm is a subclass of :class:`digen.diffusion.algorithms.base.Algorithm` with a
:class:`~digen.diffusion.algorithms.declaration.Declaration`. Another package adds one by an entry point of the group
``digen.algorithms`` (``name = "package.module:Class"``), or a config names ``package.module:Class`` itself; its
declaration is read in the worker then, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from digen.config import RunConfig
from digen.diffusion.algorithms import builtin
from digen.diffusion.algorithms.declaration import Declaration, Settings, resolve
from digen.diffusion.families import lookup as lookup_family
from digen.diffusion.kernels import KERNELS
from digen.diffusion.registry import find
from digen.errors import ConfigError
from digen.types import MicroBatch


@dataclass(frozen=True, slots=True)
class AlgorithmInfo:
    """What is known of an algorithm without importing it."""

    target: str
    """``package.module:Class``."""
    declaration: Declaration | None = None
    """``None`` for another package's: only the class knows."""


_HERE = "digen.diffusion.algorithms"

ALGORITHMS: dict[str, AlgorithmInfo] = {
    "dance_grpo": AlgorithmInfo(f"{_HERE}.dance_grpo:DanceGRPO", builtin.DANCE_GRPO),
    "ddpo": AlgorithmInfo(f"{_HERE}.ddpo:DDPO", builtin.DDPO),
    "diffusion_nft": AlgorithmInfo(f"{_HERE}.diffusion_nft:DiffusionNFT", builtin.DIFFUSION_NFT),
    "dpo": AlgorithmInfo(f"{_HERE}.dpo:DPO", builtin.DPO),
    "flow_dppo": AlgorithmInfo(f"{_HERE}.flow_dppo:FlowDPPO", builtin.FLOW_DPPO),
    "flow_grpo": AlgorithmInfo(f"{_HERE}.flow_grpo:FlowGRPO", builtin.FLOW_GRPO),
    "flow_grpo_fast": AlgorithmInfo(f"{_HERE}.flow_grpo_fast:FlowGRPOFast", builtin.FLOW_GRPO_FAST),
    "grpo_guard": AlgorithmInfo(f"{_HERE}.grpo_guard:GRPOGuard", builtin.GRPO_GUARD),
    "mix_grpo": AlgorithmInfo(f"{_HERE}.mix_grpo:MixGRPO", builtin.MIX_GRPO),
}
"""Every built-in algorithm by name."""


def lookup(name: str) -> AlgorithmInfo:
    """The algorithm called ``name``: built in, another package's, or a class ``package.module:Class``.

    Raises:
        ConfigError: there is none; names the nearest and all known ones.
    """
    return find(name, ALGORITHMS, field="algorithm.name", group="digen.algorithms", wrap=AlgorithmInfo)


def check(config: RunConfig, micro_batches: Sequence[MicroBatch]) -> Settings | None:
    """Check the algorithm of a config before a worker starts; ``micro_batches`` are those of a step.

    Returns:
        What the algorithm takes, or ``None`` for another package's, which its workers check.

    Raises:
        ConfigError: it is unknown, an option is wrong, or sampler, model or plan cannot serve it.
    """
    name = config.algorithm.name
    declaration = lookup(name).declaration
    if declaration is None:
        return None
    settings = resolve(name, declaration, config)
    process = lookup_family(config.model.family).process
    wanted = (KERNELS[settings.kernel].process,) if settings.kernel is not None else declaration.processes
    if process is not None and process not in wanted:
        raise ConfigError(
            f"{name} cannot train family {config.model.family!r}, which is a {process} model; "
            f"as configured it trains {' and '.join(wanted)} models"
        )
    if declaration.whole_groups:
        for piece in (piece for micro_batch in micro_batches for piece in micro_batch.slices):
            if piece.count < max(2, piece.size):
                raise ConfigError(
                    f"{name} compares the samples of a group, so a micro-batch must hold all of them and a group at "
                    f"least two; it holds {piece.count} of {piece.size}: set plan.micro_batch_size to "
                    "plan.samples_per_prompt, or leave it out"
                )
    return settings
