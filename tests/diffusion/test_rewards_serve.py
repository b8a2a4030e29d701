"""The judge against a real server that its worker owns: ``transformers serve`` with a tiny model, alive, hung and dead.

The model is that of experiments/engines/judge.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from digen import judges
from digen.config import RunConfig, load_config
from digen.diffusion.engines.vllm_judge import JudgeServer
from digen.diffusion.families.base import Images
from digen.diffusion.rewards.compute import compute_rewards
from digen.diffusion.rewards.judge import VisionJudge
from digen.errors import RewardError, WorkerDied
from digen.types import Prompt
from experiments.engines.judge import save_model

MISSING = [module for module in ("fastapi", "uvicorn", "openai") if find_spec(module) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"transformers[serving] is not installed ({', '.join(MISSING)})")

PROMPTS = [Prompt("a cat"), Prompt("a dog")]
NAMES = ["s0p0/0", "s0p1/0"]


def images(*shape: int) -> Images:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


class Server:
    """The server, as the worker of a judge starts and owns it, and as the config's reward reaches it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "judge0.server.log"
        self.section = {
            "model": str(folder / "model"),
            "command": "transformers",
            "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            "start_timeout_s": 120.0,
        }
        (worker,) = judges.judge_workers(self.config(), folder)
        self.target = JudgeServer(**worker._kwargs)

    def config(self, **options: object) -> RunConfig:
        kwargs = {"pattern": r"^(\d)\d*$", "request": {"max_tokens": 3, "temperature": 0}, "timeout_s": 60.0, **options}
        reward = {"reward.name": "judge", "reward.kwargs": {"server": "judge", **kwargs}}
        return load_config(None, {"workers.judges": {"judge": self.section}, **reward})

    def judge(self, **options: object) -> VisionJudge:
        config = self.config(**options)
        judges.check(config)
        judges.require(config)
        return VisionJudge(**judges.with_judges(config, {"judge": [self.target.url()]}).reward.kwargs)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.target._server.pid)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("judge")
    save_model(folder / "model")
    server = Server(folder)
    yield server
    server.target.close()


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
    group = os.getpgid(server.process.pid)
    before = [process for process in psutil.process_iter() if os.getpgid(process.pid) == group]
    server.process.suspend()
    try:
        with pytest.raises(RewardError, match=r"failed on 2 of 2 samples: s0p0/0: .*did not answer in time"):
            score(judge, images(2, 3, 32, 32))
    finally:
        server.process.resume()
    assert score(server.judge(), images(2, 3, 32, 32)) == (0.7, 0.7)
    server.target.check()
    server.process.kill()
    with pytest.raises(WorkerDied, match=r"'server of judge0' died \(killed by SIGKILL\) during check;") as died:
        server.target.check()
    assert "POST /v1/chat/completions" in died.value.log_tail
    with pytest.raises(RewardError, match=r"failed on 2 of 2 samples: s0p0/0: .*ConnectionRefusedError"):
        score(judge, images(2, 3, 32, 32))
    server.target.close()
    left = [process for process in before if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert psutil.wait_procs(left, timeout=5)[1] == []
