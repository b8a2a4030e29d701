"""Weight channels: how published weights travel from the trainer to the generators.

One protocol: a :class:`Sender` in every rank of the trainer, a :class:`Receiver` in every rank of a generator. Which
sender, says ``workers.weights``; a receiver goes by the publication.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from digen.diffusion.channels.base import Sender
from digen.diffusion.channels.broadcast import BroadcastSender
from digen.diffusion.channels.files import FileSender
from digen.diffusion.channels.memory import MemorySender
from digen.diffusion.channels.receive import Receiver
from digen.diffusion.ranks import Ranks
from digen.errors import ConfigError
from digen.resources import WeightsSection

__all__ = ["Receiver", "Sender", "build_sender"]


def build_sender(
    section: WeightsSection,
    ranks: Ranks,
    dtypes: Mapping[str, torch.dtype],
    *,
    num_receivers: int,
    folder: Path | None = None,
) -> Sender:
    """The trainer's end of the channel of a config.

    Args:
        section: ``workers.weights``.
        ranks: of the trainer.
        dtypes: of the generators' parameters by name; what is published is cast to them.
        num_receivers: ranks of all generators together.
        folder: of the run.

    Raises:
        ConfigError: the channel needs a folder, and there is none.
    """
    match section.channel:
        case "files":
            chosen = section.folder or (folder / "weights" if folder is not None else None)
            if chosen is None:
                raise ConfigError(
                    "workers.weights.channel=files needs workers.weights.folder where no run has a folder"
                )
            return FileSender(ranks, dtypes, section.timeout_s, folder=chosen, skip_unchanged=section.skip_unchanged)
        case "broadcast":
            return BroadcastSender(ranks, dtypes, section.timeout_s, num_receivers=num_receivers)
        case "auto" | "memory":
            return MemorySender(ranks, dtypes, section.timeout_s)
