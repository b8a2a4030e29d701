"""The values that travel between plan, scheduler, handles and workers.

All are frozen and small: tensors never appear here, only a :class:`Payload` that names them. They are
``msgspec`` structs, so that the wire and ``events.jsonl`` need no conversion code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct


class Prompt(Struct, frozen=True):
    """A text prompt and whatever the reward needs to know about it."""

    text: str
    metadata: dict[str, Any] = {}


class GroupSlice(Struct, frozen=True):
    """The samples ``start .. start + count - 1`` of one prompt's group."""

    uid: str
    """The group's id, unique in the run, for example ``"s12p3"``."""
    prompt: Prompt
    start: int
    count: int
    size: int
    """Number of samples in the whole group."""


class MicroBatch(Struct, frozen=True):
    """The scheduling unit: what one generate, one score and one update task work on."""

    run_seed: int
    step: int
    index: int
    """Position in the step; updates are consumed in this order by default."""
    slices: tuple[GroupSlice, ...]

    @property
    def num_samples(self) -> int:
        """Number of samples over all slices."""
        return sum(piece.count for piece in self.slices)

    def samples(self) -> Iterator[tuple[GroupSlice, int]]:
        """Yield ``(slice, sample index within the group)`` in the order of the micro-batch's rows."""
        for piece in self.slices:
            for offset in range(piece.count):
                yield piece, piece.start + offset

    def seeds(self, purpose: str) -> list[int]:
        """One 63-bit seed per sample for a named random stream.

        A seed depends on (run seed, step, uid, sample, purpose) and on nothing else: not on the worker, the
        attempt, the micro-batch's size or the order of execution.
        """
        return [derive_seed(self.run_seed, self.step, piece.uid, sample, purpose) for piece, sample in self.samples()]


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed from a key, stable across processes, platforms and releases (BLAKE2b of the key's parts)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class ArraySpec(Struct, frozen=True):
    """Where one array lies in a shared segment: a C-contiguous buffer of ``struct`` format ``format``."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int


class PayloadRef(Struct, frozen=True):
    """The handle of arrays that live in a worker's shared memory. This is all that the driver ever sees."""

    store: str
    """The worker incarnation that owns the segment, for example ``"gen0#1"``."""
    segment: int
    nbytes: int
    arrays: tuple[ArraySpec, ...]
    checksum: int | None = None
    """xxh3-64 of the bytes, when checksums are on."""


class Payload(Mapping[str, Any]):
    """Named arrays, in one of two forms.

    In the process that made or reads them: a mapping from name to an object with the buffer protocol (a numpy
    array, a ``memoryview``), or at least with ``nbytes`` where they stay in that process (a tensor on a GPU). In the
    driver and on the wire: only ``ref``, a :class:`PayloadRef`; reading an array through it there raises ``TypeError``,
    because the driver never holds a tensor.
    """

    __slots__ = ("_arrays", "ref")

    def __init__(self, arrays: Mapping[str, Any] | None = None, *, ref: PayloadRef | None = None) -> None:
        self._arrays = arrays
        self.ref = ref

    def _mapping(self) -> Mapping[str, Any]:
        if self._arrays is None:
            raise TypeError("this payload is only a reference; its arrays can be read in a worker, not in the driver")
        return self._arrays

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays. Handles in the driver's process may pass other things too; those count nothing."""
        if self.ref is not None:
            return self.ref.nbytes
        return sum(map(_nbytes, self.values()))

    @property
    def lost(self) -> bool:
        """Whether it is known to be gone with the machine that held it: whoever is to read it cannot."""
        return False

    def __getitem__(self, name: str) -> Any:
        return self._mapping()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping())

    def __len__(self) -> int:
        return len(self._mapping())

    def __repr__(self) -> str:
        if self.ref is not None:
            return f"Payload(ref={self.ref.store}/{self.ref.segment}, {self.ref.nbytes} bytes)"
        return f"Payload({sorted(self._mapping())})"


def _nbytes(array: Any) -> int:
    try:
        return int(array.nbytes if hasattr(array, "nbytes") else memoryview(array).nbytes)
    except TypeError:
        return 0


class Encoded(Struct, frozen=True):
    """What a text encoder made of prompts: it travels with the work, so that an assist needs no text encoder."""

    prompts: tuple[Prompt, ...]
    payload: Payload
    """Arrays with one row per prompt."""


class Rollout(Struct, frozen=True):
    """A generated micro-batch: its trajectories, as a handle."""

    micro_batch: MicroBatch
    version: int
    """Optimizer steps taken by the weights when the first denoising step started."""
    version_end: int
    """The same at the last denoising step; differs only if a trajectory mixed weights, which is an error."""
    payload: Payload
    stats: dict[str, float] = {}


class Scored(Struct, frozen=True):
    """Rewards of a micro-batch, one per sample in row order. Always finite numbers."""

    rewards: tuple[float, ...]
    heads: dict[str, tuple[float, ...]] = {}
    """Each reward model's own value, before weighting."""
    stats: dict[str, float] = {}


class UpdateReport(Struct, frozen=True):
    """What accumulating one micro-batch's gradient gave."""

    step: int
    index: int
    num_terms: int
    """Number of (sample, timestep) pairs accumulated; their sum over the step is the denominator Z (paper 2.1)."""
    metrics: dict[str, float] = {}


class CommitReport(Struct, frozen=True):
    """The result of an optimizer step. ``version`` is the number of optimizer steps taken so far."""

    version: int
    num_terms: int
    metrics: dict[str, float] = {}


class Publication(Struct, frozen=True):
    """Weights of one version, for generators to load. They may still be on their way when this arrives."""

    version: int
    payload: Payload
    """The weights, if they travel in memory."""
    checksum: int | None
    """xxh3-64 over all published tensors; ``None`` where it was not known yet. Then whoever loads checks every tensor
    against the sum beside it, and all loads of a version must report the same."""
    num_tensors: int
    nbytes: int
    url: str = ""
    """Where the weights are, if not in the payload: ``file:`` or ``tcp:``."""


class LoadReport(Struct, frozen=True):
    """What a worker holds after loading a :class:`Publication`; compared with it field by field."""

    version: int
    checksum: int
    num_tensors: int
    num_copied: int | None = None
    """Tensors that were copied, if counted: fewer than all where unchanged ones are left alone. Not compared."""


class Snapshot(Struct, frozen=True):
    """A trainer's whole state after a commit, in memory that outlives its process: what another one goes on from."""

    version: int
    """Optimizer steps in the weights."""
    payloads: tuple[Payload, ...]
    """The state, in the trainer's own form; of a trainer of several ranks one for each, to be read by that rank."""
    nbytes: int
    """Of all payloads."""


class EvaluationRequest(Struct, frozen=True):
    """Deterministic (ODE) samples to draw from held-out prompts; never counted as training."""

    seed: int
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    image_path: str | None = None
    """Where to write a grid of the samples, a PNG, or ``None``. Videos get the suffix of their format instead."""


class EvaluationReport(Struct, frozen=True):
    """Means over the samples of one evaluation, pinned to the version that drew them."""

    version: int
    num_samples: int
    metrics: dict[str, float]


class StepReport(Struct, frozen=True):
    """One committed step, as a user of the scheduler sees it."""

    index: int
    version: int
    values: dict[str, float]
    missed: int = 0
    """Reports before this one that were not delivered because the consumer fell far behind."""

    def metrics(self) -> dict[str, float]:
        """Flat metrics with documented, stable names such as ``reward/mean`` or ``pipeline/bubble_ratio/trainer``."""
        return dict(self.values)


class WorkerSpec(Struct, frozen=True):
    """What a child process is told at start: everything it needs to build its target."""

    name: str
    incarnation: int
    target: str
    """``"package.module:attribute"``, imported in the child."""
    kwargs: dict[str, Any]
    threads: int = 1
    checksums: bool = False


class Ready(Struct, frozen=True):
    """The READY handshake: the target was built; these are its methods and the version of the weights it holds."""

    pid: int
    methods: tuple[str, ...]
    version: int
    info: dict[str, Any] = {}


def to_builtins(value: Any) -> Any:
    """A struct as plain dicts, lists, strings and numbers (payload references included)."""
    return msgspec.to_builtins(value, enc_hook=lambda obj: obj.ref if isinstance(obj, Payload) else repr(obj))
