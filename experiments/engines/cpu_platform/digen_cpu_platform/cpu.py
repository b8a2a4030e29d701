"""What vllm-omni asks of a platform, answered for a CPU. Only what its diffusion engine with one worker needs."""

# ruff: noqa: D102 - the methods are those of the base class

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Keep a layer's weights as they are. vllm packs them on a CPU, and packed weights cannot be loaded again."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # as vllm does


layer_utils.dispatch_cpu_unquantized_gemm = _plain_linear


def _attend(self: Any, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
    """Attention by torch's own function, whose code for CUDA holds for any device."""
    return self.forward_cuda(query, key, value, attn_metadata)


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """One device, the host; memory is the host's."""

    _omni_enum = OmniPlatformEnum.OOT
    device_type = "cpu"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        from vllm_omni.diffusion.attention.backends import sdpa  # it imports the platform, so not at the top
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

        sdpa.SDPAImpl.forward = _attend
        return str(DiffusionAttentionBackendEnum.TORCH_SDPA.get_path())

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        return None

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def record_device_event(cls) -> None:
        return None

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    @classmethod
    def memory_reserved(cls, device: torch.device | int | None = None) -> int:
        return 0

    @classmethod
    def memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        return None
