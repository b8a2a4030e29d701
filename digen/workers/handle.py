"""What handles to a target have in common, wherever the target runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Self

from digen.errors import ConfigError, WorkerError
from digen.handles import METHODS
from digen.types import (
    CommitReport,
    Encoded,
    EvaluationReport,
    EvaluationRequest,
    LoadReport,
    MicroBatch,
    Prompt,
    Publication,
    Rollout,
    Scored,
    Snapshot,
    UpdateReport,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class TargetHandle:
    """Base of the handles that start a target and call its methods.

    Once started, it has a coroutine method for each of :data:`digen.handles.METHODS` that the target has, and only
    for those; any other public method is reached by :meth:`call`. It is an async context manager.

    Args:
        name: unique in the run; up to 64 letters, digits and ``._-``.

    Raises:
        ConfigError: the name cannot be a name.
    """

    encode: Callable[[Sequence[Prompt]], Coroutine[Any, Any, Encoded]]
    generate: Callable[..., Coroutine[Any, Any, Rollout]]
    score: Callable[[Rollout], Coroutine[Any, Any, Scored]]
    load: Callable[[Publication], Coroutine[Any, Any, LoadReport]]
    update: Callable[[Rollout, Sequence[float | None]], Coroutine[Any, Any, UpdateReport]]
    commit: Callable[[int, Sequence[int]], Coroutine[Any, Any, CommitReport]]
    publish: Callable[[int], Coroutine[Any, Any, Publication]]
    switch: Callable[[str], Coroutine[Any, Any, None]]
    save: Callable[[str], Coroutine[Any, Any, dict[str, Any]]]
    restore: Callable[[str], Coroutine[Any, Any, int]]
    snapshot: Callable[[], Coroutine[Any, Any, Snapshot]]
    recall: Callable[[Snapshot], Coroutine[Any, Any, int]]
    evaluate: Callable[[EvaluationRequest], Coroutine[Any, Any, EvaluationReport]]

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"worker name {name!r}: use up to 64 letters, digits and ._- after a letter or digit")
        self.name = name
        self.version = 0
        """Optimizer steps in the weights that the target holds; follows its start, load, commit, restore, recall."""
        self.methods: tuple[str, ...] = ()
        """The target's public methods, once started."""

    @property
    def started(self) -> bool:
        """Whether the target is built and answers calls."""
        return bool(self.methods)

    @property
    def lost(self) -> bool:
        """Whether the target is gone, though nobody closed it: no call is answered before it is closed and started."""
        return False

    async def start(self) -> None:
        """Build the target."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Let the target go. Harmless when repeated."""
        raise NotImplementedError

    async def kill(self, reason: str = "") -> None:
        """Let the target go at once, whatever it does now, where it can be forced to. Harmless when repeated.

        ``reason`` says why it is not waited for any longer: calls that were not answered then raise WorkerTimeout.
        """
        await self.aclose()

    async def restart(self) -> None:
        """End what is left of the target, which may have died, and build another one."""
        await self.aclose()
        await self.start()

    async def call(self, method: str, /, *args: Any) -> Any:
        """Call any public method of the target."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            has = ", ".join(self.methods) or "none before it is started"
            raise AttributeError(f"worker {self.name!r} has no method {name!r}; its target's methods: {has}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _offer(self, methods: tuple[str, ...], version: int) -> None:
        """The target is built: have its methods."""
        self.methods = methods
        self.version = version
        for method in METHODS.keys() & set(methods):
            setattr(self, method, partial(self.call, method))

    def _withdraw(self) -> None:
        """The target is gone: have no methods."""
        self.methods = ()
        for method in METHODS:
            vars(self).pop(method, None)

    def _note(self, method: str, result: Any) -> None:
        """A call returned: follow the version."""
        if method in {"load", "commit"}:
            self.version = result.version
        elif method in {"restore", "recall"}:
            self.version = result


def task_of(method: str, args: Sequence[Any]) -> str:
    """What a call does, for messages: for example ``"generate step 3 micro-batch 5"``."""
    match method, args:
        case _, [MicroBatch() as micro_batch, *_]:
            return f"{method} step {micro_batch.step} micro-batch {micro_batch.index}"
        case _, [Rollout(micro_batch=micro_batch), *_]:
            return f"{method} step {micro_batch.step} micro-batch {micro_batch.index}"
        case _, [Publication(version=version) | Snapshot(version=version), *_]:
            return f"{method} version {version}"
        case "publish", [version]:
            return f"publish version {version}"
        case "encode", [prompts]:
            return f"encode {len(prompts)} prompts"
        case "commit", [step, *_]:
            return f"commit step {step}"
    return method.lstrip("@")


def closed(worker: str, task: str) -> WorkerError:
    """What a call raises that a worker had not answered when it was closed."""
    return WorkerError(f"worker {worker!r} was closed, {task} was not answered", worker=worker, task=task)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` to its end, whatever cancellation comes meanwhile; that is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
