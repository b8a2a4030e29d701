"""The judge against a real server: ``transformers serve`` with a tiny vision-language model, alive, hung and dead.

The model is a LLaVA of half a million random parameters, whose last norm is zero: every token is equally likely, and
the first of the vocabulary, which is "7", is chosen each time.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from digen.diffusion.families.base import Images
from digen.diffusion.rewards.compute import compute_rewards
from digen.diffusion.rewards.judge import VisionJudge
from digen.errors import RewardError
from digen.types import Prompt

MISSING = [module for module in ("fastapi", "uvicorn", "openai") if find_spec(module) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"transformers[serving] is not installed ({', '.join(MISSING)})")

PROMPTS = [Prompt("a cat"), Prompt("a dog")]
NAMES = ["s0p0/0", "s0p1/0"]
COMMAND = (sys.executable, "-m", "transformers.cli.transformers", "serve")
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<image>{% endif %}{% endfor %}{% endfor %}"
)


def images(*shape: int) -> Images:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


def save_model(folder: Path) -> None:
    words = ["7", *(letter for letter in sorted(ByteLevel.alphabet()) if letter != "7"), "<|end|>", "<image>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=[], additional_special_tokens=["<|end|>", "<image>"]
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",  # noqa: S106 - a token of text
        chat_template=TEMPLATE,
    )
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config={**size, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        text_config={
            **size, "model_type": "qwen2", "vocab_size": len(words), "num_key_value_heads": 2,
            "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": vocabulary["<|end|>"],
        },
        image_token_id=vocabulary["<image>"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config)
    torch.nn.init.zeros_(model.model.language_model.norm.weight)
    for part in (model, processor, tokenizer):
        part.save_pretrained(folder)


class Server:
    def __init__(self, folder: Path) -> None:
        self.model = str(folder)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [*COMMAND, self.model, "--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 120
        while not self.is_up():
            assert self.process.poll() is None, Path(self.log.name).read_text()
            assert time.monotonic() < deadline, Path(self.log.name).read_text()
            time.sleep(0.1)

    def is_up(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def judge(self, **options: object) -> VisionJudge:
        settings = {"pattern": r"^(\d)\d*$", "request": {"max_tokens": 3, "temperature": 0}, "timeout_s": 60.0}
        return VisionJudge(f"http://127.0.0.1:{self.port}/v1", self.model, **{**settings, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("judge")
    save_model(folder)
    server = Server(folder)
    yield server
    server.close()


def score(judge: VisionJudge, shown: Images) -> Sequence[float]:
    return compute_rewards("judge", judge, shown, PROMPTS, NAMES)


def test_pictures_and_videos_are_judged(server: Server) -> None:
    assert score(server.judge(), images(2, 3, 40, 32)) == (0.7, 0.7)
    assert score(server.judge(frames=3), images(2, 5, 3, 32, 32)) == (0.7, 0.7)


def test_an_answer_without_a_score_is_an_error(server: Server) -> None:
    with pytest.raises(RewardError, match=r"s0p0/0: no score .* in the judge's answer '777'; it was cut short"):
        score(server.judge(pattern=None), images(2, 3, 32, 32))


def test_probabilities_that_this_server_does_not_give(server: Server) -> None:
    with pytest.raises(RewardError, match=r"the judge's answer has no logprobs\.content\.0\.top_logprobs"):
        score(server.judge(pattern=None, request=None, answers={"7": 1, "3": 0}), images(2, 3, 32, 32))


def test_hung_then_dead(server: Server) -> None:
    judge = server.judge(timeout_s=0.5, retries=0)
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(RewardError, match=r"failed on 2 of 2 samples: s0p0/0: .*did not answer in time"):
            score(judge, images(2, 3, 32, 32))
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert score(server.judge(), images(2, 3, 32, 32)) == (0.7, 0.7)
    server.process.kill()
    server.process.wait()
    with pytest.raises(RewardError, match=r"failed on 2 of 2 samples: s0p0/0: .*ConnectionRefusedError"):
        score(judge, images(2, 3, 32, 32))
