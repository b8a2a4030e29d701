"""DDPO: PPO's clipped loss on the transitions of a DDIM, all of which have noise."""

from digen.diffusion.algorithms.builtin import DDPO as DECLARATION
from digen.diffusion.algorithms.trajectory import TrajectoryAlgorithm


class DDPO(TrajectoryAlgorithm):
    """Trains every transition of a model that predicts the noise."""

    declaration = DECLARATION
