"""A vision-language model as a judge, over an OpenAI-compatible endpoint (vLLM, SGLang, ``transformers serve``, ...).

The judge is shown the picture, or frames of a video, and asked one question. Its score is a number read from what it
writes, or the expected value over a few answers under the probabilities that it gives their tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from digen.diffusion.families.base import Images
from digen.diffusion.rewards.endpoint import Endpoint
from digen.diffusion.rewards.pictures import checked_frames, pictures, png
from digen.errors import ConfigError, RewardError
from digen.types import Prompt

_RATE = (
    "Rate how well the picture shows the description, from {low} (not at all) to {high} (perfectly). "
    'End your answer with "Score: " and the number.\n\nDescription: {prompt}'
)
_CHOOSE = "Does the picture show the description? Answer with one word: {answers}.\n\nDescription: {prompt}"
_NUMBER = r"Score:\**\s*\**(-?\d+(?:\.\d+)?)(?![.,]?\w)"
_TOP_LOGPROBS = 20
_RESERVED = frozenset({"model", "messages", "stream", "n", "logprobs", "top_logprobs"})


class VisionJudge:
    """Reward: the judge's score, mapped from its range to [0, 1]; or with ``answers`` their expected value.

    Args:
        url: the endpoint's base, for example ``http://127.0.0.1:8000/v1``, or those of several servers of the judge. A
            config may have ``server`` in place of ``url`` and ``model``: the name of one of ``workers.judges``.
        model: the name under which the server knows the judge.
        question: what the judge is asked; ``{prompt}`` is replaced by the prompt's text. Default: how well the picture
            shows it.
        pattern: regular expression with one group, the number; its last match in what the judge writes counts. Default:
            a number after ``Score:``.
        score_range: lowest and highest number that the judge may give, default 0 and 10. Another is an error.
        answers: values of single-token answers, for example ``{"yes": 1, "no": 0}`` (in YAML with quotes: a bare yes is
            a truth value). The score is ``sum(p v) / sum(p)`` over those among the 20 likeliest first tokens, without
            spaces and letter case.
        min_probability: the answers' probabilities must add up to so much.
        request: further fields of a request. Default: temperature 0 and ``max_tokens`` 512, with ``answers`` 1.
        frames: pictures of a video, see :func:`digen.diffusion.rewards.pictures.pictures`.
        sleep: the servers are vLLM's and asleep: wake them to score and put them to sleep again. Only for a judge that
            nobody else asks; ``workers.judges`` sets it.
        endpoint: the other arguments of :class:`digen.diffusion.rewards.endpoint.Endpoint`.

    Raises:
        ConfigError: an argument is wrong, or a key is not set.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        model: str,
        *,
        question: str | None = None,
        pattern: str | None = None,
        score_range: Sequence[float] | None = None,
        answers: Mapping[str, float] | None = None,
        min_probability: float = 0.5,
        request: Mapping[str, Any] | None = None,
        frames: int = 1,
        sleep: bool = False,
        **endpoint: Any,
    ) -> None:
        self._frames = checked_frames(frames)
        bases = [base.rstrip("/") for base in ([url] if isinstance(url, str) else url)]
        self._endpoint = Endpoint([f"{base}/chat/completions" for base in bases], **endpoint)
        self._sleepers = [base.removesuffix("/v1") for base in bases] if sleep else []
        self._low, self._high = _checked_range(score_range)
        self._pattern = _checked_pattern(_NUMBER if pattern is None else pattern)
        self._answers = None if answers is None else _checked_answers(answers)
        if answers is not None and (pattern is not None or score_range is not None):
            raise ConfigError("a judge with answers writes no number: leave out pattern and score_range")
        if not 0 < min_probability <= 1:
            raise ConfigError(f"min_probability of a judge must be above 0 and at most 1, got {min_probability}")
        self._min_probability = min_probability
        default = _RATE if answers is None else _CHOOSE
        self._question = default if question is None else question
        if "{prompt}" not in self._question:
            raise ConfigError("the question of a judge must hold {prompt}, where the prompt's text is put")
        if question is None:
            filled = {"{low}": f"{self._low:g}", "{high}": f"{self._high:g}", "{answers}": ", ".join(answers or ())}
            for name, text in filled.items():
                self._question = self._question.replace(name, text)
        self._request: dict[str, Any] = {"model": model}
        fields = {"temperature": 0, "max_tokens": 512 if answers is None else 1} if request is None else dict(request)
        if taken := sorted(_RESERVED & fields.keys()):
            raise ConfigError(f"request of a judge must not set {', '.join(taken)}")
        self._request |= fields
        if answers is not None:
            self._request |= {"logprobs": True, "top_logprobs": _TOP_LOGPROBS}

    def __call__(self, images: Images, prompts: Sequence[Prompt]) -> list[float | Exception]:
        """One number a sample, or why there is none."""
        samples = list(zip(pictures(images, self._frames), prompts, strict=True))
        if not self._sleepers:
            return self._endpoint.map(self._judge, samples)
        from digen.diffusion.engines.vllm_judge import put_to_sleep, wake_up

        try:
            for server in self._sleepers:
                wake_up(server)
            return self._endpoint.map(self._judge, samples)
        finally:
            for server in self._sleepers:
                put_to_sleep(server)

    def _judge(self, sample: Any) -> float:
        shown, prompt = sample
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(picture)}"}} for picture in shown
        ]
        content.append({"type": "text", "text": self._question.replace("{prompt}", prompt.text)})
        answer = self._endpoint.ask({**self._request, "messages": [{"role": "user", "content": content}]})
        choice = _at(answer, "choices", 0)
        return self._written(choice) if self._answers is None else self._expected(choice, self._answers)

    def _written(self, choice: Any) -> float:
        text = _at(choice, "message", "content")
        if not isinstance(text, str):
            raise RewardError(f"the judge's answer holds no text but {str(text)[:50]!r}")
        matches = list(self._pattern.finditer(text))
        if not matches:
            cut = "; it was cut short: raise max_tokens in request" if choice.get("finish_reason") == "length" else ""
            raise RewardError(f"no score ({self._pattern.pattern}) in the judge's answer {text[-200:]!r}{cut}")
        try:
            score = float(matches[-1][1])
        except (TypeError, ValueError):
            raise RewardError(f"the judge's score {matches[-1][1]!r} is not a number") from None
        if not self._low <= score <= self._high:
            raise RewardError(f"the judge's score {score:g} is not between {self._low:g} and {self._high:g}")
        return (score - self._low) / (self._high - self._low)

    def _expected(self, choice: Any, answers: Mapping[str, float]) -> float:
        tops = _at(choice, "logprobs", "content", 0, "top_logprobs")
        if not isinstance(tops, list):
            raise RewardError("the judge's answer holds no list of top_logprobs")
        total = weighted = 0.0
        for top in tops:
            token, logprob = _at(top, "token"), _at(top, "logprob")
            if not isinstance(token, str) or isinstance(logprob, bool) or not isinstance(logprob, int | float):
                raise RewardError(f"the judge's answer has a log-probability that is none: {str(top)[:100]!r}")
            value = answers.get(_plain(token))
            if value is not None:
                probability = math.exp(min(logprob, 0.0))
                total += probability
                weighted += probability * value
        if not total >= self._min_probability:
            raise RewardError(
                f"the judge gives {', '.join(answers)} a probability of {total:.3g} in all, less than "
                f"{self._min_probability:g}: ask so that its first token is one of them"
            )
        return weighted / total


def _at(value: Any, *path: str | int) -> Any:
    """What stands at a path in decoded JSON."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            where = ".".join(map(str, path))
            raise RewardError(f"the judge's answer has no {where}: {str(value)[:200]!r}") from None
    return value


def _plain(token: str) -> str:
    return token.strip().casefold()


def _checked_range(given: Sequence[float] | None) -> tuple[float, float]:
    try:
        low, high = (0.0, 10.0) if given is None else map(float, given)
    except (TypeError, ValueError):
        raise ConfigError(f"score_range of a judge must be two numbers, got {given!r}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"score_range of a judge must rise from its lowest to its highest number, got {given!r}")
    return low, high


def _checked_pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"pattern of a judge is no regular expression: {error}") from None
    if pattern.groups != 1:
        raise ConfigError(f"pattern of a judge must have one group, the number; {text!r} has {pattern.groups}")
    return pattern


def _checked_answers(answers: Mapping[str, float]) -> dict[str, float]:
    for answer, value in answers.items():
        if not isinstance(answer, str) or not _plain(answer):
            raise ConfigError(
                f"answers of a judge: {answer!r} is no text; in YAML put quotes around yes, no and numbers"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"answers of a judge: the value of {answer!r} is {value!r}, not a finite number")
    plain = {_plain(answer): float(value) for answer, value in answers.items()}
    if len(plain) < 2 or len(plain) < len(answers):
        raise ConfigError("answers of a judge must be at least two, different apart from letter case and spaces")
    return plain
