"""A platform of vllm-omni for machines without an accelerator: an entry point of its group of platform plugins."""

from __future__ import annotations


def platform() -> str:
    """Where the platform's class is; called once in every process of the engine."""
    return "digen_cpu_platform.cpu.CpuOmniPlatform"
