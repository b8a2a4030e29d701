"""Workers in this process: for debugging, for tests, and for engines that bring their own processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from digen.errors import DigenError, WorkerError, WorkerRaised
from digen.types import Payload
from digen.workers.child import build, public_methods
from digen.workers.handle import TargetHandle, task_of, to_the_end

_T = TypeVar("_T")


class InProcessWorker(TargetHandle):
    """A handle to a target in this process. Payloads are passed as they are, without a copy.

    Args:
        name: unique in the run.
        target: ``"package.module:attribute"``, a class or another callable, or a finished object.
        kwargs: what the target is called with.
        thread: build and call the target in one thread of its own. If false, do so in the event loop, which stands
            still meanwhile: then ``breakpoint()`` in the target stops everything, as one wants it to.
    """

    def __init__(self, name: str, target: Any, *, kwargs: Mapping[str, Any] | None = None, thread: bool = True) -> None:
        super().__init__(name)
        self._target = target
        self._kwargs = dict(kwargs or {})
        self._thread = thread
        self._executor: ThreadPoolExecutor | None = None
        self._object: Any = None

    async def start(self) -> None:
        """Build the target.

        Raises:
            WorkerRaised: its code raised; errors of :mod:`digen.errors` are raised as they are.
        """
        if self._object is not None:
            raise WorkerError(f"worker {self.name!r} is started already; close it first", worker=self.name)
        if self._thread:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=self.name)
        try:
            self._object = await self._run("start", lambda: build(self._target, self._kwargs))
        except BaseException:
            await self.aclose()
            raise
        methods = set(public_methods(self._object)) - {"snapshot", "recall"}  # this process is never lost alone
        self._offer(tuple(sorted(methods)), getattr(self._object, "version", 0))

    async def call(self, method: str, /, *args: Any) -> Any:
        """Call any public method of the target. Calls run one after the other, in the order they were made.

        Raises:
            WorkerRaised: the method raised; errors of :mod:`digen.errors` are raised as they are.
        """
        task = task_of(method, args)
        if self._object is None:
            raise WorkerError(f"worker {self.name!r} is not started", worker=self.name, task=task)

        def run() -> Any:
            target = self._object
            if target is None:
                raise WorkerError(f"worker {self.name!r} was closed, {task} was not run", worker=self.name, task=task)
            result = getattr(target, method)(*args)
            self._note(method, result)
            return result

        return await self._run(task, run)

    def release(self, payload: Payload) -> None:
        """Nothing to do: a payload of this process is freed when nothing refers to it."""

    async def aclose(self) -> None:
        """Wait for the running call, which cannot be interrupted, and let the target go. Harmless when repeated.

        Calls that have not begun fail.
        """
        executor, self._executor = self._executor, None
        self._object = None
        self._withdraw()
        if executor is not None:
            await to_the_end(asyncio.to_thread(executor.shutdown))

    def __repr__(self) -> str:
        return f"InProcessWorker({self.name!r}, {self._target!r})"

    async def _run(self, task: str, function: Callable[[], _T]) -> _T:
        try:
            if self._executor is None:
                return function()
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except DigenError as error:
            error.add_note(f"in worker {self.name!r}, {task}")
            raise
        except Exception as error:
            message = f"worker {self.name!r}, {task}: {type(error).__name__}: {error}"
            raise WorkerRaised(message, worker=self.name, task=task) from error
