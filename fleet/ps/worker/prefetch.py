"""``fleet.prefetch``: while one batch is computed, the rows of the next ones are fetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from fleet.errors import ArgumentTypeError, ConfigurationError
from fleet.nn import EmbeddingGroup, embedding
from fleet.nn.embedding import is_remote
from fleet.nn.handle import Wanted
from fleet.ps.worker.runtime import WorkerRuntime

Batch = TypeVar("Batch")


def prefetch(
    worker: WorkerRuntime, batches: Iterable[Batch], lookup: Callable[[Batch], Mapping[Any, Any]], depth: int
) -> Iterator[Batch]:
    coming = iter(batches)
    queue: deque[tuple[Batch, Any]] = deque()
    try:
        while True:
            while len(queue) <= depth:
                try:
                    batch = next(coming)
                except StopIteration:
                    break
                queue.append((batch, worker.prefetch(_wanted(worker, lookup(batch)), len(queue))))
            if not queue:
                return
            batch, ahead = queue.popleft()
            worker.offer(ahead)
            yield batch
    finally:
        if not worker.turns.is_fork:  # else all that is under way is the parent's
            worker.offer({})
            for _, ahead in queue:
                worker.rows.abandon(ahead)


def _wanted(worker: WorkerRuntime, asked: object) -> list[Wanted]:
    if not isinstance(asked, Mapping):
        raise ArgumentTypeError("lookup(batch) must return a dict of ids by embedding module", got=type(asked).__name__)
    asking: list[Wanted] = []
    for module, ids in asked.items():
        if isinstance(module, EmbeddingGroup):
            asking += module.asking(ids).values()
        elif is_remote(module):
            asked_of = embedding.asking(module, ids)
            asking += [] if asked_of is None else [asked_of]  # a copy of a model has its rows
        else:
            raise ArgumentTypeError(
                "lookup(batch) names something that is no remote embedding",
                expected="modules of fleet.nn, or torch.nn embeddings that went remote",
                got=type(module).__name__,
            )
    for each in asking:
        if each.handle.running() is not worker:
            raise ConfigurationError(f"lookup(batch) names {each.handle.name!r}, a table of another job")
        each.handle.check_ids(each.ids)
    return asking
