"""The worker that starts and owns a judge's server: with a stand-in for vLLM that needs no model.

The real ``transformers serve`` is in test_rewards_serve.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from digen import judges
from digen.config import RunConfig, load_config
from digen.diffusion.engines import vllm_judge
from digen.diffusion.engines.vllm_judge import JudgeServer
from digen.diffusion.families.base import Images
from digen.diffusion.rewards.compute import compute_rewards
from digen.diffusion.rewards.judge import VisionJudge
from digen.errors import ConfigError, DigenError, MissingExtra, RewardError, WorkerDied, WorkerError, WorkerTimeout
from digen.types import Prompt

FAKE = Path(__file__).with_name("fake_vllm.py")
PROMPTS = [Prompt(f"prompt {number}") for number in range(4)]
FAST: dict[str, Any] = {"timeout_s": 5.0, "retries": 1, "backoff_s": 0.01}


class Site:
    """A folder with a model and an interpreter that has the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").touch()
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} -u {FAKE} "$@"\n')
        self.python.chmod(0o755)
        self.record = folder / "record"
        self.log = folder / "logs" / "judge0.server.log"
        self.logs = self.log.parent

    def server(self, how: str = "", **options: Any) -> JudgeServer:
        env = {"FAKE": how, "FAKE_RECORD": str(self.record)}
        return JudgeServer(str(self.model), str(self.log), name="judge0", python=str(self.python), env=env, **options)

    def config(self, how: str = "", **judge: Any) -> RunConfig:
        env = {"FAKE": how, "FAKE_RECORD": str(self.record)}
        section = {"model": str(self.model), "python": str(self.python), "env": env, **judge}
        reward = {"reward.name": "judge", "reward.kwargs": {"server": "judge", **FAST}}
        return load_config(None, {"workers.judges": {"judge": section}, **reward})

    def noted(self) -> list[str]:
        return self.record.read_text(encoding="utf-8").splitlines()

    def started(self) -> list[psutil.Process]:
        """The processes that servers started and that live."""
        pids = [int(line.split()[1]) for line in self.noted() if line.startswith("started")]
        return [process for pid in pids if (process := alive(pid)) is not None]

    def wait_until_gone(self) -> None:
        """Nothing that a server started outlives it; what was killed needs a moment to end."""
        wait_until(lambda: not self.started())


def alive(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


def wait_until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def shades(count: int = 4) -> Images:
    return np.random.default_rng(0).random((count, 3, 8, 8), dtype=np.float32)


def judge_of(config: RunConfig) -> VisionJudge:
    return VisionJudge(**config.reward.kwargs)


def scores(judge: VisionJudge) -> tuple[float, ...]:
    return compute_rewards("judge", judge, shades(), PROMPTS, [f"s0p{number}/0" for number in range(4)])


@pytest.mark.asyncio
async def test_replicas_share_the_requests_and_end_with_the_run(site: Site) -> None:
    """Started as the runner starts them; the slower they are, the more evenly they must be used."""
    async with judges.judged(site.config("slow", replicas=2, args=["--max-model-len", "64"]), site.logs) as served:
        assert served.reward.kwargs["model"] == str(site.model)
        first, second = served.reward.kwargs["url"]
        assert scores(judge_of(served)) == (0.7, 0.7, 0.7, 0.7)
        arguments = [json.loads(line.removeprefix("arguments ")) for line in site.noted() if "arguments" in line]
        ports = sorted(words[words.index("--port") + 1] for words in arguments)
        assert sorted(url.split(":")[2] for url in (first, second)) == [f"{port}/v1" for port in ports]
        assert all(words[-2:] == ["--max-model-len", "64"] for words in arguments)
        asked = [(site.logs / f"judge{number}.server.log").read_text().count("POST /v1/chat") for number in (0, 1)]
        assert asked == [2, 2]
        assert len(site.started()) == 2
    site.wait_until_gone()


@pytest.mark.asyncio
async def test_a_replica_that_dies_is_left_out(site: Site) -> None:
    async with judges.judged(site.config(replicas=2), site.logs) as served:
        judge = judge_of(served)
        psutil.Process(site.started()[0].ppid()).kill()
        assert scores(judge) == (0.7, 0.7, 0.7, 0.7), "a retry goes to the other one"


@pytest.mark.asyncio
async def test_what_became_of_the_server_is_said_when_the_run_fails(site: Site) -> None:
    async def run() -> None:
        async with judges.judged(site.config(), site.logs):
            psutil.Process(site.started()[0].ppid()).kill()
            raise RewardError("no score")

    with pytest.raises(RewardError) as raised:
        await run()
    assert "worker 'server of judge0' died (killed by SIGKILL) during check; its log is" in raised.value.__notes__[0]
    site.wait_until_gone()


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["worker", "driver"])
async def test_nothing_is_left_when_a_process_is_killed(site: Site, how: str) -> None:
    (worker,) = judges.judge_workers(site.config(), site.logs)
    if how == "worker":
        await worker.start()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
    else:
        driver = psutil.Popen([sys.executable, "-c", DRIVER, site.config().model_dump_json(), str(site.logs)])
        wait_until((site.logs / "up").exists)
        driver.kill()
        driver.wait()
    site.wait_until_gone()
    await worker.aclose()


DRIVER = """
import asyncio, sys
from pathlib import Path
from digen import judges
from digen.config import RunConfig
async def main():
    async with judges.judged(RunConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])):
        Path(sys.argv[2], "up").touch()
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_one_that_dies_at_start_says_why(site: Site) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"'server of judge0' died \(exit code 1\) during start; its log is") as raised:
        async with judges.judged(site.config("die"), site.logs):
            raise AssertionError
    assert time.monotonic() - began < 10
    assert raised.value.worker == "judge0"
    assert any("RuntimeError: no room for the weights" in note for note in raised.value.__notes__)
    assert "\x1b" not in str(raised.value.__notes__)


def test_one_that_hangs_at_start_is_given_up(site: Site) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"did not answer http://127.0.0.1:\d+/health with 200 within 1 s; raise"):
        site.server("hang", start_timeout_s=1.0)
    assert time.monotonic() - began < 8
    site.wait_until_gone()


def test_another_port_when_one_is_taken_meanwhile(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    free = vllm_judge._free_port
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = iter([taken, taken])
        monkeypatch.setattr(vllm_judge, "_ANSWER_S", 0.2)  # the other one accepts, and says nothing
        monkeypatch.setattr(vllm_judge, "_free_port", lambda: next(ports, None) or free())
        server = site.server()
    try:
        assert server.url() != f"http://127.0.0.1:{taken}/v1"
        server.check()
        assert site.log.read_text().lower().count("address already in use") == 2
    finally:
        server.close()
        server.close()
    with pytest.raises(WorkerDied, match="killed by SIGTERM"):
        server.check()


@pytest.mark.asyncio
async def test_a_judge_that_sleeps_is_woken_to_score(site: Site) -> None:
    config = site.config(sleep=True, gpus=(0, 1))
    async with judges.judged(config, site.logs) as served:
        assert site.noted()[-1] == "/sleep?level=1"
        kwargs = {key: value for key, value in served.reward.kwargs.items() if key != "sleep"}
        with pytest.raises(RewardError, match="answered 404"):
            scores(VisionJudge(**kwargs))
        before = len(site.noted())
        assert scores(judge_of(served)) == (0.7, 0.7, 0.7, 0.7)
        assert site.noted()[before:] == ["/wake_up", *["/chat/completions"] * 4, "/sleep?level=1"]
    arguments = next(line for line in site.noted() if line.startswith("arguments"))
    assert '"--tensor-parallel-size", "2", "--enable-sleep-mode"' in arguments


def test_a_server_without_a_sleep_mode(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"has no /sleep: sleep needs vLLM with VLLM_SERVER_DEV_MODE=1"):
        site.server("awake", sleep=True)
    site.wait_until_gone()
    server = site.server("")
    server.sleep()
    server.wake()
    os.kill(server._server.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="cannot be asked"):
        server.wake()
    server.close()


@pytest.mark.parametrize(
    ("judge", "values", "words"),
    [
        ({"model": "no/model"}, {}, ["workers.judges.judge.model", "no/model", "config.json", "hf:ORG/NAME"]),
        ({}, {"reward.kwargs": {"server": "juge"}}, ["'juge'", "did you mean 'judge'?"]),
        ({}, {"reward.kwargs": {"server": 3}}, ["server 3", "it has judge"]),
        ({}, {"reward.kwargs": {"server": "judge", "url": "http://a/v1"}}, ["from which url follows", "leave it out"]),
        ({}, {"reward.name": "classifier", "reward.kwargs": {}}, ["judges.judge", "no reward judge names it"]),
        ({}, {"model.device": "cuda"}, ["model.device is cuda", "workers.judges.judge.gpus"]),
        ({"sleep": True}, {}, ["sleep", "gpus are none"]),
        (
            {"sleep": True, "gpus": [0]},
            {"workers.generators": 2},
            ["sleep needs a single process that scores", "gen0, gen1 have 2"],
        ),
        (
            {"sleep": True, "gpus": [0]},
            {"workers.scorers": 1, "evaluation.every": 2},
            ["evaluation.every has gen0 score beside scorer0"],
        ),
    ],
)
def test_what_does_not_fit_is_found_before_anything_starts(
    site: Site, judge: dict[str, Any], values: dict[str, Any], words: list[str]
) -> None:
    data = site.config(**judge)
    config = load_config(None, {**_dotted(data), **values})
    with pytest.raises(ConfigError) as raised:
        judges.check(config)
    assert all(word in str(raised.value) for word in words), raised.value


def _dotted(config: RunConfig) -> dict[str, Any]:
    return {
        "workers.judges": config.model_dump()["workers"]["judges"],
        "reward.name": config.reward.name,
        "reward.kwargs": config.reward.kwargs,
    }


def test_what_the_machine_lacks(site: Site) -> None:
    judges.require(site.config())
    with pytest.raises(ConfigError, match=r"judges\.judge\.python: /no/python is not an interpreter"):
        judges.require(site.config(python="/no/python"))
    if find_spec("vllm") is None:
        with pytest.raises(MissingExtra, match=r"digen-rl\[vllm\]"):
            judges.require(site.config(python=None))
    with pytest.raises(DigenError, match="cannot be started"):
        JudgeServer("model", str(site.log), python="/no/python")


def test_several_heads_keep_what_is_not_the_judges(site: Site) -> None:
    data = _dotted(site.config())
    judge = {"name": "judge", "label": "a", "kwargs": {"server": "judge", "frames": 2}}
    heads = [{"name": "jpeg_compressibility"}, judge]
    config = load_config(None, {"workers.judges": data["workers.judges"], "reward.heads": heads})
    judges.check(config)
    served = judges.with_judges(config, {"judge": ["http://127.0.0.1:1/v1"]})
    assert served.reward.heads[0] == config.reward.heads[0]
    assert served.reward.heads[1].kwargs == {"frames": 2, "url": ["http://127.0.0.1:1/v1"], "model": str(site.model)}
    assert judges.with_judges(load_config(), {}) == load_config()
