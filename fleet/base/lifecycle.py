"""Keeps the order of a job's calls in one process, the same in every kind of job: wrap the optimizer once, start once,
stop last. It also makes the calls that a worker answers in the same way in every kind of job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from fleet.base import exit_guard
from fleet.base.clock import Clock
from fleet.base.cluster import Assignment
from fleet.base.settings import ProcessSettings
from fleet.base.turns import Turns
from fleet.errors import NotInitializedError, StateError


class Worker(exit_guard.Guarded, Protocol):
    """Names what a worker can do between ``init_worker`` and ``stop_worker``."""

    @property
    def turns(self) -> Turns: ...

    @property
    def figures(self) -> Any: ...

    def summary(self) -> dict[str, Any]: ...

    def stop(self) -> None: ...


W = TypeVar("W", bound=Worker)
S = TypeVar("S")


class Lifecycle(Generic[W, S]):
    """Keeps the order of a job's calls; backends derive from it. ``W`` is a backend's running worker, ``S`` its
    strategy."""

    def __init__(self, assignment: Assignment, settings: ProcessSettings, clock: Clock) -> None:
        self._assignment = assignment
        self._settings = settings
        self._clock = clock
        self._parts: tuple[Sequence[torch.optim.Optimizer], torch.nn.Module | None, S] | None = None
        self._worker: W | None = None
        self._has_resumed = False
        #: the incarnation by which servers know who has left the job that this process was in last; 0 if there is none
        self.former = 0

    @property
    def assignment(self) -> Assignment:
        """Return what this process is in its job, as it is now."""
        return self._assignment

    @property
    def running(self) -> bool:
        return self._worker is not None and not self._worker.stopped

    # ---------------------------------------------------------------- the order of calls

    def _refuse_second_optimizer(self) -> None:
        if self._parts is not None:
            raise StateError(
                "fleet.distributed_optimizer was called twice",
                todo="Give it all optimizers as a list, or start anew with fleet.init().",
            )

    def _refuse_late_resuming(self) -> None:
        if self._has_resumed:
            raise StateError("resume_from() was called twice", todo="Call it once; fleet.init() starts anew.")
        if self._worker is not None:
            raise StateError(
                "resume_from() came after init_worker()",
                todo="Call it before: a job that runs has begun. fleet.load_persistables(dirname) changes its values.",
            )

    def _parts_to_start(self) -> tuple[Sequence[torch.optim.Optimizer], torch.nn.Module | None, S]:
        """Return what ``distributed_optimizer`` was given, for ``init_worker``."""
        if self._worker is not None:
            raise StateError("init_worker() was called twice", todo="Call it once; fleet.init() starts anew.")
        if self._parts is None:
            raise NotInitializedError(
                "init_worker() came before distributed_optimizer()",
                todo="Wrap the optimizer with fleet.distributed_optimizer(optimizer, model=model) first.",
            )
        return self._parts

    def _started(self, worker: W) -> None:
        """Take over the running worker, and let the job hear of it if the process ends without a goodbye."""
        self._worker = worker
        exit_guard.guard(worker)

    def _running_worker(self, call: str) -> W:
        """Return the worker that does what this call asks for; refuse a fork of the process that joined the job."""
        worker = self._joined_worker(call)
        worker.turns.refuse_fork(call)
        return worker

    def _joined_worker(self, call: str) -> W:
        worker = self._worker
        if worker is None and self._assignment.is_server:
            raise StateError(
                f"{call} was called on a server",
                where=str(self._assignment),
                todo="Guard it with fleet.is_worker().",
            )
        if worker is None:
            raise NotInitializedError(
                f"{call} came before fleet.init_worker()",
                where=str(self._assignment),
                todo="Call fleet.init_worker() first.",
            )
        if worker.stopped:
            raise StateError(
                f"{call} came after the job ended for this worker (fleet.stop_worker)",
                where=str(self._assignment),
                todo="Call it before fleet.stop_worker(), which is the last call of all.",
            )
        return worker

    # ---------------------------------------------------------------- the end

    def stop_worker(self) -> None:
        worker = self._worker
        if worker is None:
            if self._assignment.is_worker:
                raise NotInitializedError("stop_worker() came before init_worker()", todo="Call it after the training.")
            raise StateError(f"stop_worker() was called on {self._assignment}", todo="Guard it with fleet.is_worker().")
        worker.turns.refuse_fork("stop_worker()")
        exit_guard.release(worker)
        try:
            worker.stop()
        finally:
            self._after_worker()
        self._done()

    def abort(self, reason: str) -> None:
        """End the job for all, because this worker failed."""
        if self._worker is not None:
            exit_guard.release(self._worker)
            self._worker.abort(reason)
            self._after_worker()

    def _after_worker(self) -> None:
        """Do what is due when the worker has ended, well or not."""

    def _done(self) -> None:
        if self._assignment.when_done is not None:
            self._assignment.when_done()

    # ---------------------------------------------------------------- what happened

    def summary(self) -> dict[str, Any]:
        return self._running_worker("summary()").summary()

    def report(self, examples: object, loss: object, others: Mapping[str, object]) -> None:
        self._running_worker("report()").figures.report(examples, loss, others)
