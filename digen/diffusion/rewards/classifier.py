"""Rewards of the digits job: how surely a classifier sees the class that the prompt asks for.

The reward's classifier and the judge are fitted on different halves of scikit-learn's digits with different seeds, so
the judge is not what was optimised. Fitting takes about half a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from digen.diffusion.families.base import Images
from digen.diffusion.rewards.prompts import class_label
from digen.extras import explain
from digen.types import Prompt


class ClassProbability:
    """Reward: the classifier's probability of the prompt's ``label``.

    Args:
        seed: of the classifier's initial weights.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """

    def __init__(self, seed: int = 0) -> None:
        self._classifier = _Classifier(half=0, seed=seed)

    def __call__(self, images: Images, prompts: Sequence[Prompt]) -> list[float]:
        """One probability in [0, 1] per image."""
        chances = self._classifier.probabilities(images)
        return [float(row[class_label(prompt)]) for row, prompt in zip(chances, prompts, strict=True)]


class Judge:
    """Evaluation only: 1 where an independent classifier names the prompt's ``label``, else 0.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """

    def __init__(self) -> None:
        self._classifier = _Classifier(half=1, seed=1)

    def __call__(self, images: Images, prompts: Sequence[Prompt]) -> list[float]:
        """Whether each image was recognised; the mean is the class accuracy."""
        named = self._classifier.probabilities(images).argmax(axis=1)
        return [float(guess == class_label(prompt)) for guess, prompt in zip(named, prompts, strict=True)]


class _Classifier:
    """A small network fitted on half of the digits, on one BLAS thread: the same bits in every process, and faster."""

    def __init__(self, half: int, seed: int) -> None:
        try:
            from sklearn.datasets import load_digits
            from sklearn.neural_network import MLPClassifier
            from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # it has no types
        except ImportError as error:
            explain(error, "demo")
            raise
        self._threads = ThreadpoolController()
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))[half::2]
        with self._threads.limit(limits=1):
            self._network = MLPClassifier((64,), learning_rate_init=3e-3, tol=1e-3, max_iter=500, random_state=seed)
            self._network.fit(digits.data[order] / 16, digits.target[order])

    def probabilities(self, images: Images) -> NDArray[np.float64]:
        """``(n, 10)`` class probabilities."""
        pixels = images.reshape(len(images), -1).astype(np.float64)
        with self._threads.limit(limits=1):
            chances: NDArray[np.float64] = self._network.predict_proba(pixels)
        return chances
