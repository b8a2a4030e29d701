"""Flow-GRPO: PPO's clipped loss on the transitions of Flow-SDE."""

from digen.diffusion.algorithms.base import TrajectoryAlgorithm
from digen.diffusion.algorithms.builtin import FLOW_GRPO


class FlowGRPO(TrajectoryAlgorithm):
    """Trains the first transitions of every trajectory."""

    declaration = FLOW_GRPO
