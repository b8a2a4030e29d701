"""Async calls: the pool alone. Two real worker processes, the embedded model, no scheduler; about 20 seconds.

    python experiments/pool.py

One prompt's 8 samples are drawn as two micro-batches on two generators at once, and scored where they were drawn or on
the other: rollouts stay in shared memory, the driver passes handles.
"""

from __future__ import annotations

import asyncio
import tempfile

import digen


async def main() -> None:
    config = digen.load_config(overrides=["plan.samples_per_prompt=8", "plan.micro_batch_size=4"])
    prompt = digen.Prompt("the digit 3", {"label": 3})
    plan = digen.Plan([prompt], num_steps=1, prompts_per_step=1, samples_per_prompt=8, micro_batch_size=4)
    with tempfile.TemporaryDirectory() as logs:
        workers = [
            digen.ProcessWorker(
                name,
                "digen.diffusion.roles:GeneratorTarget",
                kwargs={"config": config.model_dump(mode="json")},
                log_dir=logs,
            )
            for name in ("gen0", "gen1")
        ]
        async with digen.Pool(workers) as pool:

            async def one(micro_batch: digen.MicroBatch) -> digen.Scored:
                rollout = await pool.generate(micro_batch)
                print(f"micro-batch {micro_batch.index}: version {rollout.version}, {rollout.payload}")
                scored = await pool.score(rollout)
                pool.release(rollout.payload)
                return scored

            for scored in await asyncio.gather(*(one(micro_batch) for micro_batch in plan.step(0))):
                print("rewards", " ".join(f"{reward:.3f}" for reward in scored.rewards))


if __name__ == "__main__":
    asyncio.run(main())
