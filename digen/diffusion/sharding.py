"""FSDP2: the ranks of a worker hold a part of every weight each, and gather whole ones block by block for a forward.

A block is an element of one of the network's outermost lists of modules; what belongs to none, embeddings for example,
is gathered at the beginning of a forward. Every parameter is cut along its first dimension, as ``torch.chunk`` cuts it.
A forward of a sharded network is a collective: all ranks must run equally many.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from digen.diffusion.families.base import Family
from digen.diffusion.families.pipeline import PipelineFamily
from digen.diffusion.ranks import Ranks
from digen.errors import ConfigError
from digen.resources import FsdpSection


class Shards:
    """Shards a family's networks in place: the denoiser, and its frozen copy where there is one.

    Its parameters keep their names and become ``DTensor``. A gradient becomes the *sum* of what the ranks add, at the
    end of every backward: held back, it would be whole on every rank. Fewer and larger forwards (TSP) make this rare.

    Args:
        family: loaded, the same on every rank.
        section: ``workers.fsdp``.
        ranks: of the worker.
        master_weights: hold trained parameters in float32 and gather them in the precision that they had.

    Raises:
        ConfigError: the replicas do not divide the ranks, the family has no networks that can be sharded, or torch is
            too old.
    """

    def __init__(self, family: Family, section: FsdpSection, ranks: Ranks, *, master_weights: bool = False) -> None:
        if not isinstance(family, PipelineFamily):
            raise ConfigError(
                f"{type(family).__name__} is no subclass of digen.diffusion.families.pipeline.PipelineFamily, so it "
                "cannot be sharded; give its worker one rank"
            )
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise ConfigError(f"sharding needs torch 2.13 or newer, this is {torch.__version__}")
        if ranks.num_ranks % section.replicas:
            raise ConfigError(
                f"workers.fsdp.replicas={section.replicas} does not divide the {ranks.num_ranks} ranks of the worker"
            )
        self._family = family
        self._section = section
        self._ranks = ranks
        self._master_weights = master_weights
        self._blocks: list[FSDPModule] = []  # of the denoiser
        self._ready: list[FSDPModule] = []  # networks that have run
        self._whole = False
        # Nothing is done in place with what a block returns.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        mesh = _mesh(family.device.type, ranks, section.replicas)
        for network in family.networks():
            self._shard(network, mesh)

    @property
    def _denoiser(self) -> FSDPModule:
        module: FSDPModule = self._family.network
        return module

    def _shard(self, network: torch.nn.Module, mesh: DeviceMesh) -> None:
        dtype, cuda = self._family.dtype, self._family.device.type == "cuda"
        trained = {parameter.dtype for parameter in network.parameters() if parameter.requires_grad}
        if len(trained) > 1 or (self._master_weights and trained != {dtype}):
            raise ConfigError(
                f"the model has trained parameters of {', '.join(sorted(map(str, trained)))} where all must have one "
                "precision for gradients to be summed over ranks; set model.dtype=float32, or train an adapter"
            )
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if self._master_weights else None,
            reduce_dtype=torch.promote_types(dtype, torch.float32),
            cast_forward_inputs=False,  # the model casts them itself, here as on a generator
        )
        offload = CPUOffloadPolicy(pin_memory=cuda) if self._section.cpu_offload else OffloadPolicy()
        parts = [*_blocks(network), network]
        for part in parts:
            if self._master_weights:
                for parameter in part.parameters():  # block by block: there may be no room for all
                    if not isinstance(parameter, DTensor):
                        parameter.data = parameter.data.to(torch.float32)
            again = self._section.reshard_after_forward and part is not network  # the backward begins with its end
            made = fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=again)
            made.set_gradient_divide_factor(1.0)
            made.set_force_sum_reduction_for_comms(enable=True)
            if network is self._family.network and part is not network:
                self._blocks.append(made)
        network.register_forward_pre_hook(self._begin, prepend=True)
        network.register_forward_hook(self._end)

    # A forward without gradient begins and ends with shards: what one left gathered would be out of date once an
    # optimizer step or other weights (WeightCopy.lent) come between.

    def _begin(self, network: Any, inputs: Any) -> None:
        self._ranks.agree()  # nobody waits in a forward's collectives for a rank that has failed before it
        if network in self._ready:
            self._end(network, inputs, None)
        else:
            self._ready.append(network)

    def _end(self, network: Any, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() and not (self._whole and network is self._denoiser):
            network.reset_iter_state()

    def reset(self) -> None:
        """Forget a forward or backward that an error ended."""
        for network in self._ready:
            network.reset_iter_state()

    def gather(self) -> None:
        """Hold the denoiser's weights, as they are now, whole until :meth:`release`; for forwards without gradient."""
        self._whole = True
        for module in (*self._blocks, self._denoiser):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    def release(self) -> None:
        """Undo :meth:`gather`."""
        if not self._whole:
            return
        self._whole = False
        for module in self._blocks:
            module.set_reshard_after_forward(self._section.reshard_after_forward, recurse=False)
        for module in (*self._blocks, self._denoiser):
            module.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has rows of it."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory: its rows of a sharded one, else the tensor itself."""
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def own_rows(tensor: Tensor) -> slice | None:
    """Which rows of a sharded tensor :func:`local` has; ``None`` where it is all of it."""
    if not isinstance(tensor, DTensor):
        return None
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            mesh, count = tensor.device_mesh, tensor.shape[0]
            each = -(-count // mesh.size(dimension))
            rank = mesh.get_local_rank(dimension)
            return slice(min(rank * each, count), min((rank + 1) * each, count))
    return None


def is_first_replica(tensor: Tensor) -> bool:
    """Whether no rank before this one holds the same rows of a sharded tensor."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    return mesh is None or mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from (block for block in child if next(block.parameters(), None) is not None)
        else:
            yield from _blocks(child)


def _mesh(device: str, ranks: Ranks, replicas: int) -> DeviceMesh:
    if ranks.num_ranks == 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)  # FSDP asks for a group
    if replicas == 1:
        return init_device_mesh(device, (ranks.num_ranks,), mesh_dim_names=("shard",))
    grid = torch.arange(ranks.num_ranks).view(replicas, -1)
    timeout = timedelta(seconds=ranks.timeout_s)  # torch's own would be half an hour
    groups = []
    for lists in (grid.T.tolist(), grid.tolist()):
        own, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout)  # type: ignore[no-untyped-call]  # torch's gap
        groups.append(own)
    return DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=("replicate", "shard"))
