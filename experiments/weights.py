"""How long weights take from a trainer to a generator, against a plain copy of the same bytes.

Run ``python experiments/weights.py [--small] [--rounds N] [--ranks N ...]`` on an idle machine; it takes about two
minutes. The model is FLUX-shaped, 70 M parameters in float32 with random weights; the trainer is one process, or two
ranks under FSDP2 (gloo). Expected: publish and load together take at most 4 times a memcpy of the bytes, whether one
rank writes or two; gathering on rank 0 first costs several times as much; and a trainer that goes on with its next
update is stalled by a small part of the time that the weights take.

The clock runs in the driver, from before ``publish`` to after ``load``, which checks every byte. The memcpy is one
``numpy.copyto`` in the generator's process, between two rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from digen import LoadReport, ProcessWorker, Publication
from digen.diffusion.channels import Receiver, Sender, build_sender
from digen.diffusion.ranks import Ranks
from digen.handles import Memory
from digen.resources import WeightsSection
from digen.workers.group import GroupWorker, process_group
from digen.workers.handle import TargetHandle

TARGET = 4.0
"""Most memcpys that publish and load may take."""


def build(*, small: bool) -> Any:
    """A FLUX-shaped transformer, the same everywhere."""
    from diffusers import FluxTransformer2DModel

    size: dict[str, Any] = {"num_layers": 4, "num_single_layers": 8, "attention_head_dim": 64, "num_attention_heads": 8}
    axes = [16, 24, 24]
    if small:
        size = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
        axes = [4, 4, 8]
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=16, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=axes, **size
    )


class Trainer:
    """A rank of a trainer."""

    def __init__(self, *, small: bool, sharded: bool, ranks: dict[str, Any] | None = None) -> None:
        self._ranks = Ranks(ranks)
        self._model = build(small=small)
        if sharded:
            mesh = init_device_mesh("cpu", (self._ranks.num_ranks,))
            for block in [*self._model.transformer_blocks, *self._model.single_transformer_blocks, self._model]:
                fully_shard(block, mesh=mesh)
        self._memory: Memory | None = None
        self._senders: dict[str, Sender] = {}

    def lend_memory(self, memory: Memory) -> None:
        """Shared memory."""
        self._memory = memory

    def send_by(self, channel: str, folder: str) -> None:
        """Publish by this channel from now on; ``gather`` is that of memory without memory that ranks share."""
        if channel not in self._senders:
            name = "memory" if channel == "gather" else channel
            section = WeightsSection.model_validate({"channel": name, "folder": folder if name == "files" else None})
            dtypes = {name: parameter.dtype for name, parameter in self._model.named_parameters()}
            sender = self._senders[channel] = build_sender(section, self._ranks, dtypes, num_receivers=1)
            if self._memory is not None and channel != "gather":
                sender.lend_memory(self._memory)
        self._sender = self._senders[channel]

    def publish(self, version: int) -> Publication:
        """Of the weights held now."""
        return self._sender.publish(version, self._parameters())

    def settle(self) -> float:
        """Seconds until the optimizer could step."""
        began = time.perf_counter()
        self._sender.settle()
        return time.perf_counter() - began

    def change(self) -> None:
        """Other weights."""
        self._sender.settle()
        with torch.no_grad():
            for parameter in self._parameters().values():
                parameter.add_(1e-3)

    def backward(self) -> float:
        """Seconds of a forward and a backward."""
        began = time.perf_counter()
        tokens, text = 16, 8
        prediction = self._model(
            hidden_states=torch.ones(2, tokens, 16),
            encoder_hidden_states=torch.ones(2, text, 32),
            pooled_projections=torch.ones(2, 32),
            timestep=torch.full((2,), 0.5),
            img_ids=torch.zeros(tokens, 3),
            txt_ids=torch.zeros(text, 3),
            return_dict=False,
        )[0]
        prediction.square().mean().backward()
        self._model.zero_grad()
        return time.perf_counter() - began

    def _parameters(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters())


class Generator:
    """Holds the weights, and times a plain copy of as many bytes."""

    def __init__(self, *, small: bool) -> None:
        self._parameters = {name: torch.zeros_like(p) for name, p in build(small=small).named_parameters()}
        self._receiver = Receiver(WeightsSection())
        size = sum(parameter.nbytes for parameter in self._parameters.values())
        self._source, self._copy = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def load(self, published: Publication) -> LoadReport:
        """Of course."""
        return self._receiver.load(published, self._parameters)

    def memcpy(self) -> float:
        """Seconds that a plain copy takes."""
        began = time.perf_counter()
        np.copyto(self._copy, self._source)
        return time.perf_counter() - began


class Bench:
    """A trainer and a generator.

    Args:
        trainer: a handle to a :class:`Trainer`, of one rank or several.
        generator: a handle to a :class:`Generator`.
        folder: for the channel files.
        rounds: of each measurement, after two to warm up.
    """

    def __init__(self, trainer: Any, generator: Any, folder: str, rounds: int) -> None:
        self._trainer = trainer
        self._generator = generator
        self._folder = folder
        self._rounds = rounds
        self._version = 0

    async def sync(self, channel: str) -> tuple[list[float], list[float], int]:
        """Seconds of publish and load together, and of the memcpys between them; bytes."""
        await self._trainer.call("send_by", channel, self._folder)
        sync_s, memcpy_s, nbytes = [], [], 0
        for _ in range(2 + self._rounds):
            memcpy_s.append(await self._generator.call("memcpy"))
            began = time.perf_counter()
            published = await self._publish()
            await self._generator.load(published)
            sync_s.append(time.perf_counter() - began)
            nbytes = published.nbytes
            await self._let_go(published)
        return sync_s[2:], memcpy_s[2:], nbytes

    async def stall(self) -> tuple[list[float], list[float], list[float]]:
        """Pull mode: seconds that a publication keeps the trainer, of an update meanwhile, and of one without."""
        await self._trainer.call("send_by", "memory", self._folder)
        stalls, during, alone = [], [], []
        for _ in range(2 + self._rounds):
            alone.append(await self._trainer.call("backward"))
            began = time.perf_counter()
            published = await self._publish()
            stall_s = time.perf_counter() - began
            load = asyncio.ensure_future(self._generator.load(published))
            during.append(await self._trainer.call("backward"))
            stalls.append(stall_s + await self._trainer.call("settle"))
            await load
            await self._let_go(published)
        return stalls[2:], during[2:], alone[2:]

    async def _publish(self) -> Publication:
        self._version += 1
        published: Publication = await self._trainer.publish(self._version)
        return published

    async def _let_go(self, published: Publication) -> None:
        await self._trainer.call("change")
        self._trainer.release(published.payload)


async def measure(num_ranks: int, *, small: bool, rounds: int) -> bool:
    """Print a table for one trainer; whether it meets the target."""
    kwargs = {"small": small, "sharded": num_ranks > 1}
    trainer: GroupWorker | ProcessWorker
    if num_ranks > 1:
        trainer = process_group("trainer", "experiments.weights:Trainer", num_ranks, kwargs=kwargs)
    else:
        trainer = ProcessWorker("trainer", "experiments.weights:Trainer", kwargs=kwargs)
    generator: TargetHandle = ProcessWorker("generator", "experiments.weights:Generator", kwargs={"small": small})
    met = True
    with tempfile.TemporaryDirectory() as folder:
        async with trainer, generator:
            bench = Bench(trainer, generator, folder, rounds)
            for channel in ("memory", "files", "broadcast", *(["gather"] if num_ranks > 1 else [])):
                sync_s, memcpy_s, nbytes = await bench.sync(channel)
                ratios = [sync / copy for sync, copy in zip(sync_s, memcpy_s, strict=True)]
                middle = statistics.median(ratios)
                print(
                    f"{num_ranks:<7}{channel:<11}{nbytes / 1e6:>8.1f}{1e3 * statistics.median(sync_s):>9.1f}"
                    f"{nbytes / statistics.median(sync_s) / 1e9:>8.2f}{1e3 * statistics.median(memcpy_s):>9.1f}"
                    f"{middle:>8.2f}   {min(ratios):.2f} to {max(ratios):.2f}"
                )
                met &= channel != "memory" or middle <= TARGET
            stall_ms, during_ms, alone_ms = (1e3 * statistics.median(times) for times in await bench.stall())
            print(
                f"{num_ranks:<7}pull mode: the trainer stalls for {stall_ms:.1f} ms; its next update takes "
                f"{during_ms:.0f} ms meanwhile, {alone_ms:.0f} ms otherwise"
            )
    return met


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of 70 thousand parameters")
    parser.add_argument("--rounds", type=int, default=9, help="of each measurement")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of the trainer")
    options = parser.parse_args(arguments)
    print("ranks  channel          MB       ms    GB/s   memcpy       x   range of x")
    done = [asyncio.run(measure(ranks, small=options.small, rounds=options.rounds)) for ranks in options.ranks]
    print(f"publish + load through memory at most {TARGET:g} x a memcpy: {'met' if all(done) else 'not met'}")


if __name__ == "__main__":
    main()
