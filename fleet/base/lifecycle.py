"""The order of a job's calls in one process, the same in every kind of job: wrap the optimizer once, start once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from fleet.errors import NotInitializedError, StateError


class Stoppable(Protocol):
    @property
    def stopped(self) -> bool: ...


W = TypeVar("W", bound=Stoppable)
S = TypeVar("S")


class Lifecycle(Generic[W, S]):
    """What a backend derives from: ``W`` is its running worker, ``S`` its strategy."""

    def __init__(self) -> None:
        self._parts: tuple[Sequence[torch.optim.Optimizer], torch.nn.Module | None, S] | None = None
        self._worker: W | None = None
        self._has_resumed = False

    @property
    def running(self) -> bool:
        return self._worker is not None and not self._worker.stopped

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
        """What ``distributed_optimizer`` was given, for ``init_worker``."""
        if self._worker is not None:
            raise StateError("init_worker() was called twice", todo="Call it once; fleet.init() starts anew.")
        if self._parts is None:
            raise NotInitializedError(
                "init_worker() came before distributed_optimizer()",
                todo="Wrap the optimizer with fleet.distributed_optimizer(optimizer, model=model) first.",
            )
        return self._parts
