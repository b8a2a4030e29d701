"""MixGRPO: only the transitions in a window are noisy and trained, and the window moves with the optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

from digen.diffusion.algorithms.builtin import MIX_GRPO, MixOptions
from digen.diffusion.algorithms.trajectory import TrajectoryAlgorithm
from digen.diffusion.seeds import SDE_WINDOW
from digen.diffusion.windows import exponential_steps, linear_steps, progressive_start, random_start
from digen.types import MicroBatch, derive_seed


class MixGRPO(TrajectoryAlgorithm):
    """A sliding window over all transitions but the last two."""

    declaration = MIX_GRPO

    def noisy_steps(self, micro_batch: MicroBatch, num_steps: int) -> Sequence[int]:
        """The window of the micro-batch's step."""
        options: MixOptions = self.settings.options
        last = num_steps - 2 - options.window_size
        if options.strategy == "random":
            start = random_start(derive_seed(micro_batch.run_seed, micro_batch.step, SDE_WINDOW), last=last)
        else:
            start = progressive_start(
                micro_batch.step,
                last=last,
                stride=options.stride or options.window_size,
                roll_back=options.roll_back,
                steps_at=lambda start: self._steps_at(start, num_steps - 2),
            )
        return range(start, start + options.window_size)

    def _steps_at(self, start: int, end: int) -> int:
        options: MixOptions = self.settings.options
        match options.decay:
            case "none":
                return options.steps_per_window
            case "linear":
                return linear_steps(options.steps_per_window, start, end=end)
            case "exponential":
                return exponential_steps(
                    options.steps_per_window, start, rate=options.decay_rate, threshold=options.decay_from
                )
