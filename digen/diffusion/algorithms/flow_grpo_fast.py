"""Flow-GRPO-Fast: a few noisy transitions, whose place is drawn at every optimizer step; only they are trained."""

from __future__ import annotations

from collections.abc import Sequence

from digen.diffusion.algorithms.builtin import FLOW_GRPO_FAST, FastOptions
from digen.diffusion.algorithms.trajectory import TrajectoryAlgorithm
from digen.diffusion.seeds import SDE_WINDOW
from digen.diffusion.windows import random_start
from digen.types import MicroBatch, derive_seed


class FlowGRPOFast(TrajectoryAlgorithm):
    """One window a step, keyed by the step alone: all samples of a step are noisy at the same transitions."""

    declaration = FLOW_GRPO_FAST

    def noisy_steps(self, micro_batch: MicroBatch, num_steps: int) -> Sequence[int]:
        """The window of the micro-batch's step."""
        options: FastOptions = self.settings.options
        first, end = options.range_of(num_steps)
        seed = derive_seed(micro_batch.run_seed, micro_batch.step, SDE_WINDOW)
        start = random_start(seed, first=first, last=end - options.window_size)
        return range(start, start + options.window_size)
