"""Whether a picture shows the text that its prompt asks for, read by rapidocr (Flow-GRPO's text task)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from digen.diffusion.rewards.pictures import PictureReward
from digen.diffusion.rewards.prompts import target_text
from digen.extras import explain
from digen.types import Prompt


class TextMatch(PictureReward):
    """Reward: ``1 - min(d, L) / L``, where d is the Levenshtein distance between what is read and the text asked for.

    L is the length of the text asked for; both are compared without spaces and in lower case, and d is 0 where the
    text is contained in what is read. The text is that of :func:`digen.diffusion.rewards.prompts.target_text`.

    Args:
        threads: threads of the recogniser.
        frames: see :class:`digen.diffusion.rewards.pictures.PictureReward`.

    Raises:
        MissingExtra: rapidocr or its ONNX runtime is not installed.
    """

    def __init__(self, threads: int = 1, frames: int = 1) -> None:
        super().__init__(frames)
        try:
            import onnxruntime  # noqa: F401 - rapidocr needs it and says so only when it reads
            from rapidocr import RapidOCR
        except ImportError as error:
            explain(error, "rewards")
            raise
        self._read: Any = RapidOCR(
            params={
                "Global.use_cls": False,
                "Global.text_score": 0.0,
                "Global.log_level": "error",
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": threads,
            }
        )

    def score(self, flat: Sequence[Image.Image], prompts: Sequence[Prompt]) -> list[float]:
        """One number in [0, 1] a picture."""
        return [
            text_match(self.read(picture), target_text(prompt)) for picture, prompt in zip(flat, prompts, strict=True)
        ]

    def read(self, picture: Image.Image) -> str:
        """Everything that stands in a picture, its pieces in the order in which they are found; may be empty."""
        return "".join(self._read(picture).txts or ())


def text_match(read: str, target: str) -> float:
    """Flow-GRPO's agreement of two texts, in [0, 1]: see :class:`TextMatch`.

    Raises:
        ZeroDivisionError: ``target`` holds nothing but spaces.
    """
    read, target = (text.replace(" ", "").lower() for text in (read, target))
    distance = 0 if target in read else min(levenshtein(read, target), len(target))
    return 1 - distance / len(target)


def levenshtein(one: str, other: str) -> int:
    """The least number of insertions, deletions and substitutions of characters that turn one text into the other."""
    costs = list(range(len(other) + 1))
    for row, left in enumerate(one, start=1):
        diagonal, costs[0] = costs[0], row
        for column, right in enumerate(other, start=1):
            diagonal, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, diagonal + (left != right)),
            )
    return costs[-1]
