"""What is known of the transition kernels without torch: their names, their process and their noise level.

The formulas are in :mod:`digen.diffusion.sde`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ProcessName = Literal["flow", "ddim"]
"""How a clean sample becomes noise: see :mod:`digen.diffusion.process`."""


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What is known of a kernel without importing it."""

    process: ProcessName
    """The models that it samples from."""
    noise_level: float
    """``sampling.noise_level`` where the config says nothing."""
    max_noise_level: float = math.inf
    """The largest one that its formula allows."""
    ends_noisy: bool = False
    """Whether the last transition has noise too. A flow's ends at sigma 0, without any."""


KERNELS: dict[str, KernelInfo] = {
    "flow_sde": KernelInfo("flow", 0.7),
    "dance_sde": KernelInfo("flow", 0.3),
    "cps": KernelInfo("flow", 0.8, max_noise_level=1.0),
    "ddim": KernelInfo("ddim", 1.0, max_noise_level=1.0, ends_noisy=True),
}
"""Every kernel by name, as ``sampling.kernel`` takes it."""
