"""Simulated workers that fail: they die, hang, answer late, wrongly or not at all, and can be started again.

Every fault is drawn from one seed by what it hits (worker, life, call), so that a run on the virtual clock repeats
itself and a fault can be left out without moving the others. The weights are a ledger: a counter for each (step,
micro-batch) and a running hash over everything that was trained on, so that they prove what was trained, how often, and
on samples of which weights. A new life begins with the base weights, as a new process does.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, msgpack
from msgspec.structs import replace

from digen.checkpoint import cannot_write
from digen.errors import DigenError, NumericsError, PayloadLost, RewardError, WorkerDied, WorkerError, WorkerRaised
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
    Snapshot,
    UpdateReport,
    derive_seed,
)
from digen.workers.sim import Duration

DEATHS = ("death", "silent_death", "node_death")
ANYWHERE = ("death", "silent_death", "hang", "late", "slow", "raise", "garbage")
"""Faults of any call. death: the process ends during the call; silent_death: after its work was done, before the
answer; hang: no answer until it is killed; late: an answer long after the deadline, even if nobody waits; slow: several
times the usual time; raise: its code raises; garbage: an answer of another type."""
FAULTS: dict[str, tuple[str, ...]] = {
    "generate": (*ANYWHERE, "node_death", "other_micro_batch"),
    "score": (*ANYWHERE, "node_death", "no_reward", "nan"),
    "load": (*ANYWHERE, "node_death", "wrong_checksum"),
    "update": (*ANYWHERE, "node_death", "nan"),
    "commit": (*ANYWHERE, "node_death", "nan"),
    "publish": (*ANYWHERE, "node_death"),
    "switch": (*DEATHS, "hang", "late", "slow", "raise"),
    "encode": (*ANYWHERE, "node_death"),
    "evaluate": (*ANYWHERE, "node_death"),
    "save": (*DEATHS, "hang", "late", "slow", "raise", "disk_full", "torn"),
    "begin_save": (*DEATHS, "hang", "late", "slow", "raise", "disk_full"),
    "write": (*DEATHS, "slow", "raise", "disk_full", "torn"),
    "disk": ("disk_full",),
    "restore": (*DEATHS, "hang", "late", "slow", "raise"),
    "snapshot": (*ANYWHERE, "node_death"),
    "recall": (*DEATHS, "hang", "late", "slow", "raise", "garbage"),
    "start": ("death", "slow", "raise"),
}
"""What can go wrong in each method; write is what a trainer does for a checkpoint while it trains on, disk what the
driver does. node_death: the process ends, and every payload that it made is lost with its machine; wrong_checksum: it
holds other weights than those that were published, and says so; torn: the checkpoint is damaged after it was written.

Nothing else can occur: what returns no number has none that is not finite, only files can be torn or find the disk
full, a process that starts has made nothing yet, the answers of switch, restore, saves and start are not looked at, and
what the scheduler gives no deadline (write, start, disk) is not waited for as late or hung."""
TRAINED = "trained"
"""A metric of each update, which differs from that of the same update in another life."""
_WEIGHTS = "weights"
"""The file of a checkpoint that a simulated trainer writes."""


class Fault(Struct, frozen=True):
    """One thing that went wrong."""

    where: str
    """``worker#life.call``, for example ``"gen0#2.7"``."""
    method: str
    kind: str


class Focus(Struct, frozen=True):
    """A fault that a run shall meet more often than by chance."""

    state: str
    """Which calls it hits, as of :func:`state_of`."""
    kind: str
    rate: float
    """Probability that such a call fails."""
    limit: int
    """Most of them that do."""


def state_of(where: str, method: str) -> str:
    """What a call is doing: its method; a generation of the trainer is an assist, a checkpoint twice a save."""
    if method == "generate" and where.startswith("trainer"):
        return "assist"
    return "save" if method == "checkpoint" else method


class FaultPlan:
    """Decides which calls fail. All draws derive from ``seed``.

    Args:
        seed: of all draws.
        rate: probability that a call fails.
        kinds: faults that may be drawn; others are left out.
        limit: most faults drawn.
        only: places where a drawn fault happens; everywhere by default. What a shrunk run is given.
        poison: (method, step, micro-batch) that kills whoever works on it, whatever the draws.
        focuses: faults that are drawn besides.
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
        focuses: Sequence[Focus] = (),
    ) -> None:
        self._seed = seed
        self._rate = rate
        self._kinds = frozenset(kinds)
        self._limit = limit
        self._only = only
        self._poison = poison
        self._focuses = tuple(focuses)
        self._num_focused = [0] * len(focuses)
        self.happened: list[Fault] = []
        """Every fault so far, in order."""

    def draw(self, where: str, method: str, step: int, index: int) -> Fault | None:
        """The fault of one call."""
        if (method, step, index) in self._poison:
            return self._happens(Fault(where, method, "death"))
        focus = self._focus(where, method, FAULTS[method])
        if focus is not None:
            return self._happens(Fault(where, method, focus.kind))
        kinds = [kind for kind in FAULTS[method] if kind in self._kinds]
        draws = random.Random(derive_seed(self._seed, where))  # noqa: S311 - not for secrets
        if not kinds or draws.random() >= self._rate or len(self.happened) >= self._limit:
            return None
        if self._only is not None and where not in self._only:
            return None
        return self._happens(Fault(where, method, draws.choice(kinds)))

    def _focus(self, where: str, method: str, kinds: Sequence[str]) -> Focus | None:
        """The focus, of one of ``kinds``, that a call meets."""
        for number, focus in enumerate(self._focuses):
            if focus.kind not in kinds or state_of(where, method) != focus.state:
                continue
            draws = random.Random(derive_seed(self._seed, where, "focus", number))  # noqa: S311 - not for secrets
            left = self._num_focused[number] < focus.limit and (self._only is None or where in self._only)
            if left and draws.random() < focus.rate:
                self._num_focused[number] += 1
                return focus
        return None

    def fraction(self, fault: Fault) -> float:
        """At which share of the call's time it happens."""
        return random.Random(derive_seed(self._seed, fault.where, "when")).random()  # noqa: S311 - not for secrets

    def draws_duplicate(self, where: str, method: str) -> bool:
        """Whether an answer arrives twice. ``where`` is unlike that of any call."""
        draws = random.Random(derive_seed(self._seed, where))  # noqa: S311 - not for secrets
        drawn = "duplicate" in self._kinds and draws.random() < self._rate
        if self._only is not None and where not in self._only:
            return False
        if not drawn and self._focus(where, method, ("duplicate",)) is None:
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


class Disk(Protocol):
    """Where checkpoints lie."""

    def write(self, path: str, content: bytes) -> None:
        """Write a file through."""
        ...

    def read(self, path: str) -> bytes:
        """The content of a file."""
        ...


class _SimPayload(Payload):
    """A payload that can be lost."""

    __slots__ = ("gone",)

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.gone = False

    @property
    def lost(self) -> bool:
        """Whether its machine is gone."""
        return self.gone


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
        self.draft: tuple[str, Weights] | None = None
        """What is being written while the training goes on, and in which folder."""
        self.polled = False
        self.folder = ""
        """That of its last checkpoint."""


class FaultyWorker:
    """A generator, scorer and trainer in one that works as :class:`digen.SimWorker` does, when it does.

    Args:
        name: unique name.
        plan: what goes wrong.
        durations: as of :class:`digen.SimWorker`, and ``start``, ``save``, ``write``, ``restore``, ``snapshot``,
            ``recall``, ``encode``, ``evaluate``.
        reward: a sample's reward from (uid, sample index).
        weights: those of its first life. Later ones begin with the base weights.
        disk: where it writes checkpoints, and reads them.
        late_s: how long a late answer takes.
        switches: whether it must be switched before it generates and before it updates.
        first_life: number of its first life.
    """

    def __init__(
        self,
        name: str,
        plan: FaultPlan,
        durations: Mapping[str, Duration] | None = None,
        *,
        reward: Callable[[str, int], float] | None = None,
        weights: Weights | None = None,
        disk: Disk | None = None,
        late_s: float = 1e4,
        switches: bool = False,
        first_life: int = 1,
    ) -> None:
        self.name = name
        self.plan = plan
        self.durations = dict(durations or {})
        self._reward = reward or (lambda uid, sample: derive_seed(uid, sample) / 2**63)
        self._disk = disk
        self._late_s = late_s
        self._switches = switches
        self._made: list[_SimPayload] = []
        self._life = _Life(first_life, weights.copy() if weights is not None else Weights())

    @property
    def version(self) -> int:
        """Optimizer steps in the weights it holds now."""
        return self._life.weights.version

    @property
    def num_lent(self) -> int:
        """Publications and snapshots of this life that were not given back."""
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
        self._end(self._life)

    def _end(self, life: _Life) -> None:
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
        if fault and fault.kind != "slow":
            life.dead = True
            raise self._death("start") if fault.kind == "death" else self._raised("start")

    def _payload(self, **arrays: Any) -> Payload:
        self._made.append(_SimPayload(arrays))
        return self._made[-1]

    def _raised(self, task: str) -> WorkerRaised:
        return WorkerRaised(f"worker {self.name!r}, {task}: broken", worker=self.name, task=task)

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
        self,
        method: str,
        work: Callable[[_Life], Any],
        step: int = -1,
        index: int = -1,
        *,
        duration: str = "",
        reads: Sequence[Payload] = (),
    ) -> Any:
        life = self._life
        if life.dead:
            raise self._death(method)
        if any(payload.lost for payload in reads):
            raise PayloadLost(f"{method} on {self.name!r} reads a payload that is lost", task=method)
        life.calls += 1
        fault = self.plan.draw(f"{self.name}#{life.number}.{life.calls}", method, step, index)
        seconds = self._seconds(duration or method, step, index)
        if fault is None:
            await self._spend(life, seconds)
            return work(life)
        return await self._misdo(fault, life, seconds, work)

    async def _misdo(self, fault: Fault, life: _Life, seconds: float, work: Callable[[_Life], Any]) -> Any:
        match fault.kind:
            case "death" | "node_death":
                await self._spend(life, seconds * self.plan.fraction(fault))
                self._end(life)
                for payload in self._made:
                    payload.gone |= fault.kind == "node_death"
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
                raise self._raised(fault.method)
            case "no_reward":
                await self._spend(life, seconds)
                raise RewardError(f"worker {self.name!r} got no reward")
        await self._spend(life, seconds)
        result = work(life)
        match fault.kind, result:
            case "silent_death", _:
                self._end(life)
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
                raise cannot_write(Path(self.name), OSError(28, "No space left on device"))
            case "torn", dict():
                self._the_disk.write(f"{life.folder}/{_WEIGHTS}", b"torn")
                return result
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
            return Rollout(
                micro_batch, before.version, life.weights.version, self._payload(content=array("q", [content]))
            )

        reads = [e.payload for e in encoded]
        rollout: Rollout = await self._do("generate", work, micro_batch.step, micro_batch.index, reads=reads)
        return rollout

    async def score(self, rollout: Rollout, /) -> Scored:
        """Rewards of the samples."""
        micro_batch = rollout.micro_batch
        rewards = tuple(self._reward(piece.uid, sample) for piece, sample in micro_batch.samples())
        step, index, reads = micro_batch.step, micro_batch.index, [rollout.payload]
        scored: Scored = await self._do("score", lambda _: Scored(rewards), step, index, reads=reads)
        return scored

    async def load(self, publication: Publication, /) -> LoadReport:
        """Hold other weights."""

        def work(life: _Life) -> LoadReport:
            life.weights = Weights(publication.version, publication.payload["hash"])
            return LoadReport(publication.version, derive_seed(life.weights.hash), 1)

        report: LoadReport = await self._do("load", work, publication.version, reads=[publication.payload])
        return report

    async def update(self, rollout: Rollout, advantages: Sequence[float | None], /) -> UpdateReport:
        """Add to the gradient."""
        step, index = rollout.micro_batch.step, rollout.micro_batch.index

        def work(life: _Life) -> UpdateReport:
            self._in_mode(life, "train")
            if (step, index) in life.gradient:
                raise DigenError(f"step {step} micro-batch {index} was updated twice")
            life.gradient[step, index] = derive_seed(rollout.payload["content"][0], *map(repr, advantages))
            return UpdateReport(step, index, len(advantages), {TRAINED: derive_seed(life.number, step, index) / 2**63})

        report: UpdateReport = await self._do("update", work, step, index, reads=[rollout.payload])
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
            life.lent.append(self._payload(hash=value))
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

    async def save(self, path: str, /) -> dict[str, str]:
        """Write a checkpoint's weights into the folder ``path``; returns the SHA-256 of its file."""
        written: dict[str, str] = await self._do("save", lambda life: self._write(life, path, self._draft(life)))
        return written

    def _draft(self, life: _Life) -> Weights:
        if life.gradient:
            raise DigenError("a checkpoint or snapshot in the middle of a step")
        return life.weights.copy()

    def _write(self, life: _Life, path: str, weights: Weights) -> dict[str, str]:
        if life.dead:  # only its answer would have been late
            raise self._death("save")
        content = msgpack.encode(weights)
        life.folder = path
        self._the_disk.write(f"{path}/{_WEIGHTS}", content)
        return {_WEIGHTS: hashlib.sha256(content).hexdigest()}

    @property
    def _the_disk(self) -> Disk:
        if self._disk is None:
            raise WorkerError("it was given no disk", worker=self.name)
        return self._disk

    async def restore(self, path: str, /) -> int:
        """Go on from the checkpoint in the folder ``path``; returns its version."""

        def work(life: _Life) -> int:
            life.weights = read_weights(self._the_disk, path)
            return life.weights.version

        version: int = await self._do("restore", work)
        return version

    async def snapshot(self) -> Snapshot:
        """Copy the weights."""

        def work(life: _Life) -> Snapshot:
            life.lent.append(self._payload(weights=self._draft(life)))
            return Snapshot(life.weights.version, (life.lent[-1],), nbytes=8)

        snapshot: Snapshot = await self._do("snapshot", work)
        return snapshot

    async def recall(self, snapshot: Snapshot, /) -> int:
        """Go on from a snapshot; returns its version."""

        def work(life: _Life) -> int:
            life.weights = snapshot.payloads[0]["weights"].copy()
            return life.weights.version

        version: int = await self._do("recall", work, reads=snapshot.payloads)
        return version


def read_weights(disk: Disk, path: str) -> Weights:
    """The weights in the checkpoint ``path``."""
    return msgpack.decode(disk.read(f"{path}/{_WEIGHTS}"), type=Weights)


class FaultyWriter(FaultyWorker):
    """A :class:`FaultyWorker` that trains on while it writes a checkpoint."""

    async def begin_save(self, path: str, /) -> None:
        """Copy the weights; what follows is :meth:`saved`."""

        def work(life: _Life) -> None:
            life.draft, life.polled = (path, self._draft(life)), False

        await self._do("begin_save", work, duration="save")

    async def saved(self) -> dict[str, str] | None:
        """The SHA-256 of the file, once it is written; nothing when it is asked for the first time."""
        life = self._life
        if life.draft is None:  # it was begun in another life
            raise self._death("save")
        if not life.polled:
            life.polled = True
            return None
        path, weights = life.draft
        written: dict[str, str] = await self._do("write", lambda life: self._write(life, path, weights))
        return written


class FaultyEncoder(FaultyWorker):
    """A :class:`FaultyWorker` that encodes prompts too."""

    async def encode(self, prompts: Sequence[Prompt], /) -> Encoded:
        """Embeddings of prompts."""

        def work(_: _Life) -> Encoded:
            return Encoded(tuple(prompts), self._payload(hash=derive_seed(*(prompt.text for prompt in prompts))))

        encoded: Encoded = await self._do("encode", work)
        return encoded
