"""``fleet.prefetch``: while one batch is computed, the rows of the next ones are fetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from fleet.errors import ArgumentTypeError, ConfigurationError, UnsupportedError
from fleet.nn import EmbeddingGroup, embedding
from fleet.nn.embedding import is_remote
from fleet.nn.handle import Wanted
from fleet.numeric.device_copies import copies_to
from fleet.ps.worker.look_ahead import Coming
from fleet.ps.worker.lookups import Prefetched
from fleet.ps.worker.runtime import WorkerRuntime

Batch = TypeVar("Batch")
LookedUp: TypeAlias = Callable[[Batch], Mapping[Any, Any]]


def prefetch(
    worker: WorkerRuntime,
    batches: Iterable[Batch],
    lookup: LookedUp[Batch],
    depth: int,
    device: object = None,
    staleness: int | None = None,
) -> Iterator[Batch]:
    if device is None and staleness is not None:
        raise ConfigurationError(
            "embedding_staleness= says how long rows may stay on a device, and none is given",
            got=f"embedding_staleness={staleness}",
            todo="Give prefetch() device=, or leave embedding_staleness= out.",
        )
    if device is None:
        return _fetched(worker, batches, lookup, depth)
    if worker.replica is not None:
        raise UnsupportedError(
            "rows cannot be brought to a device ahead in the mode 'geo', whose workers keep them and train them",
            todo="Leave device= out.",
        )
    if staleness is not None:
        _check_staleness(worker, depth, staleness)
    return _brought(worker, batches, lookup, depth, device, staleness)


def _check_staleness(worker: WorkerRuntime, depth: int, staleness: int) -> None:
    if not worker.policy.lets_rows_age:
        raise UnsupportedError(
            f"rows cannot be used again without being asked for in the mode {worker.mode!r}",
            expected="embedding_staleness= in an asynchronous or half-asynchronous job",
            got=f"embedding_staleness={staleness}",
            todo="Leave it out: device= alone changes no number here.",
        )
    if staleness < depth:
        raise ConfigurationError(
            "rows are older than that when their batch comes, as they are asked for so many batches ahead",
            expected=f"embedding_staleness= of at least depth={depth}",
            got=f"embedding_staleness={staleness}",
        )


def _fetched(worker: WorkerRuntime, batches: Iterable[Batch], lookup: LookedUp[Batch], depth: int) -> Iterator[Batch]:
    """Yield batches whose rows are with this worker."""
    coming = iter(batches)
    queue: deque[tuple[Batch, Mapping[int, Prefetched]]] = deque()
    try:
        while True:
            for batch, wanted in _foreseen(worker, coming, lookup, depth, queue):
                queue.append((batch, worker.prefetch(wanted, len(queue))))
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


def _brought(
    worker: WorkerRuntime,
    batches: Iterable[Batch],
    lookup: LookedUp[Batch],
    depth: int,
    device: object,
    staleness: int | None,
) -> Iterator[Batch]:
    """Yield batches whose rows are on the device."""
    look_ahead = worker.look_ahead(copies_to(device), depth, staleness)
    coming = iter(batches)
    queue: deque[tuple[Batch, Coming]] = deque()
    try:
        while True:
            asked_before = len(queue)
            for batch, wanted in _foreseen(worker, coming, lookup, depth, queue):
                queue.append((batch, worker.foresee(look_ahead, wanted, len(queue))))
            if not queue:
                return
            batch, first = queue.popleft()
            # What was asked for a batch ago is there, and is copied while this one is computed.
            worker.bring(look_ahead, first, [each for _, each in queue][: max(0, asked_before - 1)])
            yield batch
    finally:
        if not worker.turns.is_fork:
            worker.offer({})
            for _, each in queue:
                each.abandon()


def _foreseen(
    worker: WorkerRuntime, coming: Iterator[Batch], lookup: LookedUp[Batch], depth: int, queue: deque[Any]
) -> Iterator[tuple[Batch, list[Wanted]]]:
    """Yield batches, with what they will look up, until there are enough in the queue."""
    while len(queue) <= depth:
        try:
            batch = next(coming)
        except StopIteration:
            return
        yield batch, _wanted(worker, lookup(batch))


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
