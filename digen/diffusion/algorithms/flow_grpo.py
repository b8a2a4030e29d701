"""Flow-GRPO: PPO's clipped loss on the transitions of Flow-SDE."""

from digen.diffusion.algorithms.builtin import FLOW_GRPO
from digen.diffusion.algorithms.trajectory import TrajectoryAlgorithm


class FlowGRPO(TrajectoryAlgorithm):
    """Trains the first transitions of every trajectory."""

    declaration = FLOW_GRPO
