"""What sharding costs a trainer of two ranks, and what timestep parallelism saves of it (paper 3.2.2).

Run ``python experiments/sharding.py [--steps N] [--repeats N] [--chunks C ...]`` on an idle machine; two minutes.
Two processes share a FLUX-shaped network of 12 M parameters by FSDP2 over gloo. Printed are:

* of one update of a micro-batch: all-gathers of weights, reduce-scatters of gradients and seconds, against
  ``algorithm.tsp_chunk``. Every forward gathers every block once, and its backward once more; all timesteps in one
  forward need what one timestep needs;
* of one assist: seconds of the generation and of both switches, with the sharded network and with whole weights that
  are gathered once (``workers.fsdp.assist: replica``);
* rewards and gradient norms of the digits job with two ranks and with one, which must agree.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch.utils._python_dispatch import TorchDispatchMode

from digen import ProcessWorker
from digen.config import load_config
from digen.diffusion.ranks import Ranks
from digen.diffusion.rewards.compute import Reward
from digen.diffusion.roles import build_family
from digen.diffusion.tiny import TINY
from digen.diffusion.update import Learner
from digen.types import GroupSlice, MicroBatch, Prompt

NUM_STEPS, NUM_SAMPLES = 9, 4
"""Denoising steps, of which all but the last are trained, and samples of a micro-batch; two in a forward."""
GATHER, SCATTER = "_allgather_base_", "_reduce_scatter_base_"
"""What torch calls FSDP's collectives."""


def save_model(folder: Path) -> None:
    """A tiny FLUX pipeline with a larger transformer: 8 blocks of width 256."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe: Any = TINY["flux"].build()
        config = dict(pipe.transformer.config)
        config |= {"num_layers": 3, "num_single_layers": 5, "num_attention_heads": 8, "attention_head_dim": 32}
        config["axes_dims_rope"] = [8, 12, 12]
        pipe.transformer = FluxTransformer2DModel.from_config(config)
        for parameter in pipe.transformer.parameters():
            torch.nn.init.normal_(parameter, 0, 0.02)
    pipe.save_pretrained(folder)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's gap
    """Counts those of FSDP."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's gap
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Bench:
    """A rank that trains, or one alone."""

    def __init__(self, ranks: dict[str, Any] | None = None) -> None:
        self._ranks = Ranks(ranks)

    def time_update(self, overrides: dict[str, Any], repeats: int) -> dict[str, float]:
        """Collectives and seconds of an update; the first, with the start-up check, is not counted."""
        learner, family = self._learner(overrides)
        batch, chains = self._draw(learner, family)
        advantages = [1.0, -1.0] * (NUM_SAMPLES // 2)
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            learner.update(batch, 0, chains, advantages)
            seconds.append(time.perf_counter() - began)
            learner._abandon()
        with Collectives() as collectives:
            learner.update(batch, 0, chains, advantages)
        return {"seconds": statistics.median(seconds[1:]), **collectives.counts}

    def time_assist(self, overrides: dict[str, Any], repeats: int, replica: bool) -> dict[str, float]:
        """Seconds of a generation and of the switches around it; the first of each is not counted."""
        learner, family = self._learner(overrides)
        times: dict[str, list[float]] = {"gather": [], "generate": [], "release": []}
        nothing = {"gather": lambda: None, "release": lambda: None}
        switches = {"gather": learner.gather, "release": learner.release} if replica else nothing
        calls: dict[str, Any] = {
            "gather": switches["gather"],
            "generate": lambda: self._draw(learner, family),
            "release": switches["release"],
        }
        for _ in range(repeats + 1):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
        with Collectives() as collectives:
            for call in calls.values():
                call()
        seconds = {name: statistics.median(values[1:]) for name, values in times.items()}
        return {**seconds, GATHER: collectives.counts[GATHER]}

    def curve(self, steps: int) -> dict[str, list[float]]:
        """Mean rewards and gradient norms of the digits job, two groups a step."""
        config = load_config(None, {"model.forward_batch": 4, "optimizer.lr": 6e-5})
        family: Any = build_family(config, frozenset({"denoise", "encode"}))
        learner, reward = Learner(family, config, self._ranks), Reward(config.reward)
        schedule = family.schedule(config.sampling.num_inference_steps)
        found: dict[str, list[float]] = {"reward": [], "grad_norm": []}
        for step in range(steps):
            means = []
            for index in range(2):
                prompt = Prompt(f"the digit {index}", {"label": index})
                batch = MicroBatch(0, step, index, (GroupSlice(f"s{step}p{index}", prompt, 0, 12, 12),))
                chains = learner.algorithm.draw(family, batch, family.encode([prompt] * 12), schedule, unit=4)
                names = [f"{number}" for number in range(12)]
                rewards = torch.tensor(reward.score(family.decode(chains.latents[:, -1]), [prompt] * 12, names).rewards)
                learner.update(batch, step, chains, ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist())
                means.append(float(rewards.mean()))
            found["reward"].append(statistics.fmean(means))
            found["grad_norm"].append(learner.commit(step, [0, 1]).metrics["grad_norm"])
        return found

    def _learner(self, overrides: dict[str, Any]) -> tuple[Learner, Any]:
        config = load_config(None, {"sampling.num_inference_steps": NUM_STEPS, "model.forward_batch": 2, **overrides})
        family: Any = build_family(config, frozenset({"denoise", "encode"}))
        return Learner(family, config, self._ranks), family

    def _draw(self, learner: Learner, family: Any) -> tuple[MicroBatch, Any]:
        prompt = Prompt("a bench")
        batch = MicroBatch(0, 0, 0, (GroupSlice("p", prompt, 0, NUM_SAMPLES, NUM_SAMPLES),))
        conditioning = family.encode([prompt] * NUM_SAMPLES)
        return batch, learner.algorithm.draw(family, batch, conditioning, family.schedule(NUM_STEPS), unit=2)


async def measure(chunks: list[str], repeats: int, steps: int) -> bool:
    """Print everything; whether two ranks learn what one learns."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "flux")
        flux = {"model.family": "flux", "model.path": f"{folder}/flux"}
        flux |= {f"sampling.{name}": value for name, value in TINY["flux"].sampling.items()}
        spec = {"num_ranks": 2, "rendezvous": f"file://{folder}/meet", "timeout_s": 120.0}
        ranks = [
            ProcessWorker(f"rank{rank}", "sharding:Bench", kwargs={"ranks": {"rank": rank, **spec}}) for rank in (0, 1)
        ]
        try:
            await asyncio.gather(*(rank.start() for rank in ranks))

            async def both(method: str, *arguments: Any) -> Any:
                return (await asyncio.gather(*(rank.call(method, *arguments) for rank in ranks)))[0]

            print(f"{'one update of 2 ranks':<24}{'tsp_chunk':>10}{'all-gathers':>13}{'reduce-scatters':>17}", end="")
            print(f"{'seconds':>10}{'of chunk 1':>12}")
            for name, overrides in (("full", {}), ("lora, rank 4", {"model.lora": {"rank": 4, "alpha": 8}})):
                first = None
                for chunk in chunks:
                    found = await both("time_update", {**flux, **overrides, "algorithm.tsp_chunk": chunk}, repeats)
                    first = first or found["seconds"]
                    print(f"{name:<24}{chunk:>10}{found[GATHER]:>13}{found[SCATTER]:>17}", end="")
                    print(f"{found['seconds']:>10.3f}{found['seconds'] / first:>12.2f}")
            print(f"\n{'one assist':<24}{'all-gathers':>13}{'gather s':>10}{'generate s':>12}{'release s':>11}")
            for name, replica in (("sharded", False), ("replica", True)):
                found = await both("time_assist", flux, repeats, replica)
                print(f"{name:<24}{found[GATHER]:>13}{found['gather']:>10.3f}", end="")
                print(f"{found['generate']:>12.3f}{found['release']:>11.3f}")
            two, one = await both("curve", steps), Bench().curve(steps)
        finally:
            await asyncio.gather(*(rank.aclose() for rank in ranks))
    print(f"\n{'digits, step':<16}{'reward, 1 rank':>16}{'2 ranks':>10}{'gradient norm, 1 rank':>24}{'2 ranks':>10}")
    for step in range(steps):
        print(f"{step:<16}{one['reward'][step]:>16.5f}{two['reward'][step]:>10.5f}", end="")
        print(f"{one['grad_norm'][step]:>24.6f}{two['grad_norm'][step]:>10.6f}")
    apart: float = max(abs(a - b) for a, b in zip(one["reward"], two["reward"], strict=True))
    norms = zip(one["grad_norm"], two["grad_norm"], strict=True)
    print(f"largest difference: reward {apart:.2g}, gradient norm {max(abs(a - b) / a for a, b in norms):.2g} of it")
    print(f"the same curve up to 1e-3: {'met' if apart < 1e-3 else 'MISSED'}")
    return apart < 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of the digits job")
    parser.add_argument("--repeats", type=int, default=5, help="of which the median is printed")
    parser.add_argument("--chunks", nargs="+", default=["1", "2", "4", "all"], help="values of algorithm.tsp_chunk")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return not asyncio.run(measure(options.chunks, options.repeats, options.steps))


if __name__ == "__main__":
    sys.exit(main())
