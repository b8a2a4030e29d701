"""Simulated workers that fail: they die, hang, answer late, wrongly or not at all, and can be started again.

Every fault is drawn from one seed by what it hits (worker, life, call), so that a run on the virtual clock repeats
itself and a fault can be left out without moving the others. The weights are a ledger: a counter for each (step,
micro-batch) and a running hash over everything that was trained on, so that they prove what was trained, how often, and
on samples of which weights. A new life begins with the base weights, as a new process does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from digen.errors import DigenError, NumericsError, RewardError, WorkerDied, WorkerError, WorkerRaised
from digen.types import (
    CommitReport,
    Encoded,
    EvaluationReport,
    EvaluationRequest,
    LoadReport,
    MicroBatch,
    Payload,
    Prompt,
    Publication,
    Rollout,
    Scored,
    UpdateReport,
    derive_seed,
)
from digen.workers.sim import Duration

ANYWHERE = ("death", "silent_death", "hang", "late", "slow", "raise", "garbage")
"""Faults of any call. death: the process ends during the call; silent_death: after its work was done, before the
answer; hang: no answer until it is killed; late: an answer long after the deadline, even if nobody waits; slow: several
times the usual time; raise: its code raises; garbage: an answer of another type."""
FAULTS: dict[str, tuple[str, ...]] = {
    "generate": (*ANYWHERE, "other_micro_batch"),
    "score": (*ANYWHERE, "no_reward", "nan"),
    "load": (*ANYWHERE, "wrong_checksum"),
    "update": (*ANYWHERE, "nan"),
    "commit": (*ANYWHERE, "nan"),
    "publish": ANYWHERE,
    "switch": ("death", "hang", "late", "slow", "raise"),
    "encode": ANYWHERE,
    "evaluate": ANYWHERE,
    "save": ("death", "hang", "late", "slow", "raise", "disk_full", "torn"),
    "restore": ("death", "raise", "slow"),
    "start": ("death", "slow"),
}
"""What can go wrong in each method. wrong_checksum: it holds other weights than those that were published, and says so;
torn: the checkpoint is damaged after it was written."""


class Fault(Struct, frozen=True):
    """One thing that went wrong."""

    where: str
    """``worker#life.call``, for example ``"gen0#2.7"``."""
    method: str
    kind: str


class FaultPlan:
    """Decides which calls fail. All draws derive from ``seed``.

    Args:
        seed: of all draws.
        rate: probability that a call fails.
        kinds: faults that may be drawn; others are left out.
        limit: most faults drawn.
        only: places where a drawn fault happens; everywhere by default. What a shrunk run is given.
        poison: (method, step, micro-batch) that kills whoever works on it, whatever the draws.
    """

    def __init__(
        self,
        seed: int,
        *,
        rate: float = 0.0,
        kinds: Sequence[str] = (),
        limit: int = 2**31,
        only: frozenset[str] | None = None,
        poison: frozenset[tuple[str, int, int]] = frozenset(),
    ) -> None:
        self._seed = seed
        self._rate = rate
        self._kinds = frozenset(kinds)
        self._limit = limit
        self._only = only
        self._poison = poison
        self.happened: list[Fault] = []
        """Every fault so far, in order."""

    def draw(self, where: str, method: str, step: int, index: int) -> Fault | None:
        """The fault of one call."""
        if (method, step, index) in self._poison:
            return self._happens(Fault(where, method, "death"))
        kinds = [kind for kind in FAULTS[method] if kind in self._kinds]
        draws = random.Random(derive_seed(self._seed, where))  # noqa: S311 - not for secrets
        if not kinds or draws.random() >= self._rate or len(self.happened) >= self._limit:
            return None
        if self._only is not None and where not in self._only:
            return None
        return self._happens(Fault(where, method, draws.choice(kinds)))

    def fraction(self, fault: Fault) -> float:
        """At which share of the call's time it happens."""
        return random.Random(derive_seed(self._seed, fault.where, "when")).random()  # noqa: S311 - not for secrets

    def draws_duplicate(self, where: str, method: str) -> bool:
        """Whether an answer arrives twice. ``where`` is unlike that of any call."""
        draws = random.Random(derive_seed(self._seed, where))  # noqa: S311 - not for secrets
        if draws.random() >= self._rate or (self._only is not None and where not in self._only):
            return False
        self._happens(Fault(where, method, "duplicate"))
        return True

    def _happens(self, fault: Fault) -> Fault:
        self.happened.append(fault)
        return fault


class Weights(Struct):
    """Weights as a ledger."""

    version: int = 0
    hash: int = 0
    counts: dict[tuple[int, int], int] = {}
    """How often each (step, micro-batch) was trained."""

    def copy(self) -> Weights:
        """Independent of the original."""
        return Weights(self.version, self.hash, dict(self.counts))


class _Life:
    """One process: what is lost with it."""

    def __init__(self, number: int, weights: Weights) -> None:
        self.number = number
        self.weights = weights
        self.gradient: dict[tuple[int, int], int] = {}
        self.calls = 0
        self.dead = False
        self.lent: list[Payload] = []
        self.mode = "train"
        self.waiting: list[asyncio.Future[None]] = []


class FaultyWorker:
    """A generator, scorer and trainer in one that works as :class:`digen.SimWorker` does, when it does.

    Args:
        name: unique name.
        plan: what goes wrong.
        durations: as of :class:`digen.SimWorker`, and ``start``, ``save``, ``restore``, ``encode``, ``evaluate``.
        reward: a sample's reward from (uid, sample index).
        weights: those of its first life. Later ones begin with the base weights.
        disk: where checkpoints lie, by path.
        late_s: how long a late answer takes.
        switches: whether it must be switched before it generates and before it updates.
    """

    def __init__(
        self,
        name: str,
        plan: FaultPlan,
        durations: Mapping[str, Duration] | None = None,
        *,
        reward: Callable[[str, int], float] | None = None,
        weights: Weights | None = None,
        disk: dict[str, Weights] | None = None,
        late_s: float = 1e4,
        switches: bool = False,
    ) -> None:
        self.name = name
        self.plan = plan
        self.durations = dict(durations or {})
        self._reward = reward or (lambda uid, sample: derive_seed(uid, sample) / 2**63)
        self._disk = disk if disk is not None else {}
        self._late_s = late_s
        self._switches = switches
        self._life = _Life(1, weights.copy() if weights is not None else Weights())

    @property
    def version(self) -> int:
        """Optimizer steps in the weights it holds now."""
        return self._life.weights.version

    @property
    def num_lent(self) -> int:
        """Publications of this life that were not given back."""
        return len(self._life.lent)

    def release(self, payload: Payload) -> None:
        """A payload is read no more. What belongs to an earlier life is gone anyway."""
        self._life.lent = [lent for lent in self._life.lent if lent is not payload]

    @property
    def weights(self) -> Weights:
        """The weights it holds now."""
        return self._life.weights

    # ---- its lives ---------------------------------------------------------------------------------------------

    async def kill(self, reason: str = "") -> None:
        """End its process: what waits for an answer hears of the death."""
        self._kill()

    def _kill(self) -> None:
        life = self._life
        life.dead = True
        for waiter in life.waiting:
            if not waiter.done():
                waiter.set_exception(self._death("while it was killed"))
        life.waiting.clear()

    async def restart(self) -> None:
        """Begin another life, with the base weights."""
        self._kill()
        life = self._life = _Life(self._life.number + 1, Weights())
        fault = self.plan.draw(f"{self.name}#{life.number}.0", "start", -1, -1)
        await asyncio.sleep(self._seconds("start", -1, -1) * (5 if fault and fault.kind == "slow" else 1))
        if fault and fault.kind == "death":
            life.dead = True
            raise self._death("start")

    def _death(self, task: str) -> WorkerDied:
        return WorkerDied(worker=self.name, task=task, signal=9)

    # ---- its work ----------------------------------------------------------------------------------------------

    def _seconds(self, kind: str, step: int, index: int) -> float:
        duration = self.durations.get(kind, 0)
        return duration(step, index) if callable(duration) else duration

    async def _spend(self, life: _Life, seconds: float | None) -> None:
        """Wait, for ever if ``seconds`` is ``None``; ends at once when the process is killed."""
        if seconds == 0:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        life.waiting.append(waiter)
        if seconds is not None:
            loop.call_later(seconds, lambda: None if waiter.done() else waiter.set_result(None))
        try:
            await waiter
        finally:
            if waiter in life.waiting:
                life.waiting.remove(waiter)

    async def _do(
        self, method: str, work: Callable[[_Life], Any], step: int = -1, index: int = -1, *, duration: str = ""
    ) -> Any:
        life = self._life
        if life.dead:
            raise self._death(method)
        life.calls += 1
        fault = self.plan.draw(f"{self.name}#{life.number}.{life.calls}", method, step, index)
        seconds = self._seconds(duration or method, step, index)
        if fault is None:
            await self._spend(life, seconds)
            return work(life)
        return await self._misdo(fault, life, seconds, work)

    async def _misdo(self, fault: Fault, life: _Life, seconds: float, work: Callable[[_Life], Any]) -> Any:
        match fault.kind:
            case "death":
                await self._spend(life, seconds * self.plan.fraction(fault))
                life.dead = True
                raise self._death(fault.method)
            case "hang":
                await self._spend(life, None)
            case "late":
                return await self._answer_late(life, work)
            case "slow":
                await self._spend(life, 5 * seconds)
                return work(life)
            case "raise":
                await self._spend(life, seconds * self.plan.fraction(fault))
                raise WorkerRaised(f"worker {self.name!r}, {fault.method}: broken", worker=self.name, task=fault.method)
            case "no_reward":
                await self._spend(life, seconds)
                raise RewardError(f"worker {self.name!r} got no reward")
        await self._spend(life, seconds)
        result = work(life)
        match fault.kind, result:
            case "silent_death", _:
                life.dead = True
                raise self._death(fault.method)
            case "other_micro_batch", Rollout(micro_batch=micro_batch):
                return replace(result, micro_batch=replace(micro_batch, index=micro_batch.index + 1))
            case "wrong_checksum", LoadReport():
                life.weights.hash ^= 1
                return replace(result, checksum=derive_seed(life.weights.hash))
            case "nan", Scored():
                return replace(result, rewards=(float("nan"), *result.rewards[1:]))
            case "nan", _:
                raise NumericsError(f"worker {self.name!r}: the gradient is not finite")
            case "disk_full", _:
                raise OSError(28, "No space left on device")
            case "torn", str() as path:
                self._disk.pop(path)
                return path
        return ["garbage"]

    async def _answer_late(self, life: _Life, work: Callable[[_Life], Any]) -> Any:
        """As a peer behind a slow network: it cannot be interrupted, nor killed from here."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._late_s
        while (left := end - loop.time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                continue
        return work(life)

    async def generate(self, micro_batch: MicroBatch, /, *encoded: Encoded) -> Rollout:
        """Samples that depend on the seeds and the weights."""
        before = self._life.weights

        def work(life: _Life) -> Rollout:
            self._in_mode(life, "generate")
            content = derive_seed(
                before.hash, *micro_batch.seeds("initial-noise"), *(e.payload["hash"] for e in encoded)
            )
            return Rollout(micro_batch, before.version, life.weights.version, Payload({"content": content}))

        rollout: Rollout = await self._do("generate", work, micro_batch.step, micro_batch.index)
        return rollout

    async def score(self, rollout: Rollout, /) -> Scored:
        """Rewards of the samples."""
        micro_batch = rollout.micro_batch
        rewards = tuple(self._reward(piece.uid, sample) for piece, sample in micro_batch.samples())
        scored: Scored = await self._do("score", lambda _: Scored(rewards), micro_batch.step, micro_batch.index)
        return scored

    async def load(self, publication: Publication, /) -> LoadReport:
        """Hold other weights."""

        def work(life: _Life) -> LoadReport:
            life.weights = Weights(publication.version, publication.payload["hash"])
            return LoadReport(publication.version, derive_seed(life.weights.hash), 1)

        report: LoadReport = await self._do("load", work, publication.version)
        return report

    async def update(self, rollout: Rollout, advantages: Sequence[float | None], /) -> UpdateReport:
        """Add to the gradient."""
        step, index = rollout.micro_batch.step, rollout.micro_batch.index

        def work(life: _Life) -> UpdateReport:
            self._in_mode(life, "train")
            if (step, index) in life.gradient:
                raise DigenError(f"step {step} micro-batch {index} was updated twice")
            life.gradient[step, index] = derive_seed(rollout.payload["content"], *map(repr, advantages))
            return UpdateReport(step, index, len(advantages))

        report: UpdateReport = await self._do("update", work, step, index)
        return report

    async def commit(self, step: int, indices: Sequence[int], scale: float | None = None, /) -> CommitReport:
        """Write the gradient into the ledger."""

        def work(life: _Life) -> CommitReport:
            if sorted(life.gradient) != [(step, index) for index in sorted(indices)]:
                raise DigenError(f"commit of step {step} wants {sorted(indices)} but holds {sorted(life.gradient)}")
            if life.weights.version != step:
                raise DigenError(f"commit of step {step} on weights of version {life.weights.version}")
            weights = life.weights.copy()
            for key, content in life.gradient.items():
                weights.counts[key] = weights.counts.get(key, 0) + 1
                weights.hash = derive_seed(weights.hash, *key, content)
            weights.version, weights.hash = step + 1, derive_seed(weights.hash, repr(scale))
            life.weights, life.gradient = weights, {}
            return CommitReport(weights.version, len(indices))

        report: CommitReport = await self._do("commit", work, step)
        return report

    async def publish(self, version: int, /) -> Publication:
        """Make the weights known."""

        def work(life: _Life) -> Publication:
            if life.weights.version != version:
                raise DigenError(f"version {version} shall be published, but version {life.weights.version} is held")
            value = life.weights.hash
            life.lent.append(Payload({"hash": value}))
            return Publication(version, life.lent[-1], checksum=derive_seed(value), num_tensors=1, nbytes=8)

        publication: Publication = await self._do("publish", work, version)
        return publication

    async def switch(self, to: str, /) -> None:
        """Load or offload for an assist."""

        def work(life: _Life) -> None:
            life.mode = to

        await self._do("switch", work, duration="switch_in" if to == "generate" else "switch_out")

    def _in_mode(self, life: _Life, mode: str) -> None:
        if self._switches and life.mode != mode:
            raise DigenError(f"worker {self.name!r} is switched to {life.mode}, not to {mode}")

    async def evaluate(self, request: EvaluationRequest, /) -> EvaluationReport:
        """A number of the weights."""

        def work(life: _Life) -> EvaluationReport:
            return EvaluationReport(life.weights.version, len(request.prompts), {"hash": life.weights.hash / 2**63})

        report: EvaluationReport = await self._do("evaluate", work)
        return report

    async def save(self, path: str, /) -> str:
        """Write a checkpoint."""

        def work(life: _Life) -> str:
            if life.gradient:
                raise DigenError("a checkpoint in the middle of a step")
            self._disk[path] = life.weights.copy()
            return path

        written: str = await self._do("save", work)
        return written

    async def restore(self, path: str, /) -> int:
        """Go on from a checkpoint."""

        def work(life: _Life) -> int:
            if path not in self._disk:
                raise WorkerError(f"there is no checkpoint {path}", worker=self.name)
            life.weights = self._disk[path].copy()
            return life.weights.version

        version: int = await self._do("restore", work)
        return version


class FaultyEncoder(FaultyWorker):
    """A :class:`FaultyWorker` that encodes prompts too."""

    async def encode(self, prompts: Sequence[Prompt], /) -> Encoded:
        """Embeddings of prompts."""

        def work(_: _Life) -> Encoded:
            return Encoded(tuple(prompts), Payload({"hash": derive_seed(*(prompt.text for prompt in prompts))}))

        encoded: Encoded = await self._do("encode", work)
        return encoded


class SimDisk:
    """Checkpoints of simulated trainers: a :class:`digen.sched.lanes.Checkpointer` without a file.

    Args:
        files: weights by path, which the trainers write and read.
        every: steps between checkpoints; 0 takes none.
        origin: the version that the run was resumed from, whose checkpoint is there already.
    """

    def __init__(self, files: dict[str, Weights], *, every: int, origin: Weights | None = None) -> None:
        self.files = files
        self._every = every
        self._written: list[tuple[int, str]] = []
        if origin is not None:
            files["origin"] = origin.copy()
            self._written.append((origin.version, "origin"))

    def due(self, version: int, *, last: bool) -> bool:
        """Every so many steps and at the end."""
        return bool(self._every) and (last or version % self._every == 0)

    async def save(self, trainer: Any, version: int) -> str:
        """Have the trainer write."""
        path = f"step-{version}"
        await trainer.save(path)
        self._written.append((version, path))
        return path

    async def newest(self) -> tuple[int, str] | None:
        """The newest intact checkpoint."""
        return next((item for item in reversed(self._written) if item[1] in self.files), None)
