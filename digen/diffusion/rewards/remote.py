"""A reward that another server computes, over HTTP with JSON and PNG.

A request is ``POST url`` with ``{"samples": [{"prompt": text, "metadata": {...}, "images": [base64 of a PNG, ...]}]}``,
one image for a picture and ``frames`` of a video. The answer is ``{"scores": [number, ...]}``, one for each sample;
``null`` says that a sample could not be scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from digen.diffusion.families.base import Images
from digen.diffusion.rewards.endpoint import Endpoint
from digen.diffusion.rewards.pictures import checked_frames, pictures, png
from digen.errors import ConfigError, RewardError
from digen.types import Prompt


class RemoteScorer:
    """Reward: what the server answers.

    Args:
        url: where to post.
        batch_size: samples in one request at most.
        frames: pictures of a video, see :func:`digen.diffusion.rewards.pictures.pictures`.
        endpoint: the other arguments of :class:`digen.diffusion.rewards.endpoint.Endpoint`.

    Raises:
        ConfigError: an argument is wrong, or a key is not set.
    """

    def __init__(self, url: str, batch_size: int = 1, frames: int = 1, **endpoint: Any) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size of a remote reward must be at least 1, got {batch_size}")
        self._frames, self._batch_size = checked_frames(frames), batch_size
        self._endpoint = Endpoint(url, **endpoint)

    def __call__(self, images: Images, prompts: Sequence[Prompt]) -> list[float | Exception]:
        """One number a sample, or why there is none."""
        samples = list(zip(pictures(images, self._frames), prompts, strict=True))
        batches = [samples[start : start + self._batch_size] for start in range(0, len(samples), self._batch_size)]
        answers: list[float | Exception] = []
        for batch, answer in zip(batches, self._endpoint.map(self._ask, batches), strict=True):
            answers += [answer] * len(batch) if isinstance(answer, Exception) else answer
        return answers

    def _ask(self, batch: Sequence[Any]) -> list[float | Exception]:
        question = [
            {"prompt": prompt.text, "metadata": prompt.metadata, "images": [png(picture) for picture in shown]}
            for shown, prompt in batch
        ]
        answer = self._endpoint.ask({"samples": question})
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != len(batch):
            raise RewardError(f'the server must answer {{"scores": [...]}} with {len(batch)} numbers')
        return [_number(score) for score in scores]


def _number(score: Any) -> float | Exception:
    if isinstance(score, bool) or not isinstance(score, int | float):
        return RewardError(f"the server scored it {str(score)[:50]!r}, which is not a number")
    return float(score)
