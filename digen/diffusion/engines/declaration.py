"""What a config must look like for its engines: checked in the driver before anything starts. Imports no torch."""

from __future__ import annotations

from digen.config import RunConfig
from digen.errors import ConfigError

FAMILIES = ("flux", "qwen_image", "sd3", "wan")
"""Families that vLLM-Omni serves with digen's pipelines."""

OWN_ARGUMENTS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_num_seqs": "model.forward_batch",
    "custom_pipeline_args": None,
    "worker_extension_cls": None,
    "step_execution": None,
    "num_gpus": None,
    "tensor_parallel_size": None,
    "parallel_config": None,
    "distributed_executor_backend": None,
    "lora_path": "model.lora",
    "max_cpu_loras": None,
    "quantization_config": None,
    "enable_prompt_embed_cache": None,
}
"""Arguments of the engine that digen sets itself or cannot serve, with the field of the config that stands for each."""


def check(config: RunConfig) -> None:
    """Check the engines of a config's generators.

    Raises:
        ConfigError: names the worker, the field and the mend.
    """
    workers = config.workers
    generators = [f"gen{number}" for number in range(config.num_generators)]
    for name in workers.engines:
        if name not in generators:
            known = ", ".join(generators) or "none: in mode colocated the trainer generates"
            raise ConfigError(f"workers.engines names {name!r}; the generators are {known}")
    served = [name for name, engine in workers.engines.items() if engine == "vllm_omni"]
    if not served:
        if workers.engine_args:
            raise ConfigError("workers.engine_args is set, but no generator of workers.engines has another engine")
        return
    name = served[0]
    if config.model.family not in FAMILIES:
        raise ConfigError(
            f"workers.engines: {name} runs vllm_omni, which serves {', '.join(FAMILIES)}, not the family "
            f"{config.model.family!r}; leave it out"
        )
    if not workers.scorers:
        raise ConfigError(
            f"workers.engines: {name} runs vllm_omni, which neither decodes nor scores; "
            "set workers.scorers to 1 or more"
        )
    section = config.evaluation
    wanted = [field for field in ("at_start", "at_end", "every") if getattr(section, field)]
    if wanted:
        raise ConfigError(
            f"workers.engines: {name} runs vllm_omni, which does not evaluate; switch off "
            f"{' and '.join(f'evaluation.{field}' for field in wanted)} and evaluate checkpoints by digen eval"
        )
    for each in served:
        if workers.num_ranks(each) > 1:
            raise ConfigError(
                f"workers.engines: {each} runs vllm_omni on one GPU, but has {workers.num_ranks(each)} ranks; "
                "use more generators of one GPU each"
            )
    for argument in workers.engine_args:
        if argument in OWN_ARGUMENTS:
            field = OWN_ARGUMENTS[argument]
            mend = f"set {field}" if field else "leave it out"
            raise ConfigError(f"workers.engine_args.{argument} cannot be set for vllm_omni; {mend}")
