"""``fleet.prefetch``: while one batch is computed, the rows of the next ones are fetched."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import WeakSet

from fleet.base.interruption import uninterrupted
from fleet.errors import ArgumentTypeError, ConfigurationError, UnsupportedError
from fleet.nn import EmbeddingGroup, embedding
from fleet.nn.embedding import is_remote
from fleet.nn.handle import Wanted
from fleet.numeric.device_copies import copies_to, work_on
from fleet.ps.worker.batch_memory import NONE, BatchesAhead
from fleet.ps.worker.look_ahead import Coming, LookAhead, Prepared
from fleet.ps.worker.lookups import Prefetched
from fleet.ps.worker.runtime import WorkerRuntime

#: While waits for rows are a larger part of the time, they are asked for further ahead, up to so many batches.
_WORTH, _MOST = 0.05, 16
#: It is decided about once in so many batches, and after a change for the worse not again in so many decisions.
_WINDOW, _REST = 16, 64
#: To ask twice as far ahead has to shorten a wait to this part at least.
_SHORTER = 0.8
#: Of rows for a device, some are copied while others are on their way; and so many batches after these are prepared.
_FOR_A_DEVICE, _PREPARED = 2, 1

Batch = TypeVar("Batch")
LookedUp: TypeAlias = Callable[[Batch], Mapping[Any, Any]]


class Depth:
    """Chooses how many batches ahead rows are asked for, by how long training waits for them: as few as keep it from
    waiting. Each makes them a step older, so twice as many stay only if they shorten the wait: where a server or the
    bandwidth of the network is what it waits for, they do not."""

    def __init__(self) -> None:
        self.now = 1
        #: counted from below zero: the first batches wait for much else, and so do the first after a change
        self._batches, self._waited_s, self._whole_s = -_WINDOW, 0.0, 0.0
        #: the wait for a batch with half as many ahead, while twice as many are on trial
        self._before_s: float | None = None
        self._is_less_on_trial = False
        self._rest = 0

    def saw(self, waited_s: float, whole_s: float) -> None:
        """Note how long a batch took, and how much of that was waiting for rows."""
        self._batches += 1
        if self._batches > 0:
            self._waited_s += waited_s
            self._whole_s += whole_s
        if self._batches == _WINDOW:
            before = self.now
            self._decide(self._waited_s / max(self._whole_s, 1e-9), self._waited_s / _WINDOW)
            self._batches = 0 if self.now == before else -self.now
            self._waited_s = self._whole_s = 0.0

    def _decide(self, share: float, waited_s: float) -> None:
        before_s, self._before_s = self._before_s, None
        was_less, self._is_less_on_trial = self._is_less_on_trial, False
        self._rest = max(0, self._rest - 1)
        if before_s is not None and waited_s > _SHORTER * before_s:
            self.now //= 2
            self._rest = _REST
        elif was_less and share > _WORTH:
            self.now += 1
            self._rest = _REST
        elif share > _WORTH:
            if self.now < _MOST and not self._rest:
                self._before_s = waited_s
                self.now *= 2
        elif self.now > 1 and not self._rest:
            self._is_less_on_trial = True
            self.now -= 1


def prefetch(
    worker: WorkerRuntime,
    batches: Iterable[Batch],
    lookup: LookedUp[Batch],
    depth: int | None,
    device: object = None,
    staleness: int | None = None,
) -> Iterator[Batch]:
    if device is None and staleness is not None:
        raise ConfigurationError(
            "embedding_staleness= says how long rows may stay on a device, and none is given",
            got=f"embedding_staleness={staleness}",
            todo="Give prefetch() device=, or leave embedding_staleness= out.",
        )
    # Where rows may not be older, they come with the answer to a push, and to ask earlier gains nothing.
    chooses = depth is None and device is None and worker.policy.lets_rows_age
    if depth is None:
        depth = 1 if device is None else min(_FOR_A_DEVICE, staleness or _FOR_A_DEVICE)
    elif depth > worker.policy.most_steps_ahead and worker.policy.lets_rows_come_ahead:
        raise ConfigurationError(
            "rows that are asked for so far ahead are too old when their batch comes: its gradients would be dropped",
            expected=f"depth= of at most staleness={worker.policy.staleness}",
            got=f"depth={depth} in the mode {worker.mode!r}",
            todo="Leave depth= out, or give the strategy a larger staleness=.",
        )
    depth = min(depth, worker.policy.most_steps_ahead)
    if device is None:
        return _fetched(worker, batches, lookup, depth, Depth() if chooses else None)
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
            expected="embedding_staleness= in an asynchronous or half-asynchronous job without delay compensation",
            got=f"embedding_staleness={staleness}",
            todo="Leave it out: device= alone changes no number here.",
        )
    if staleness < depth:
        raise ConfigurationError(
            "rows are older than that when their batch comes, as they are asked for so many batches ahead",
            expected=f"embedding_staleness= of at least depth={depth}",
            got=f"embedding_staleness={staleness}",
        )


def _fetched(
    worker: WorkerRuntime, batches: Iterable[Batch], lookup: LookedUp[Batch], depth: int, chosen: Depth | None
) -> Iterator[Batch]:
    """Yield batches whose rows are with this worker, asked for ``depth`` batches ahead or as is ``chosen``."""
    coming = _Coming(worker, batches, lookup)
    waits, began_s = worker.figures.pull, worker.clock.now()
    queue: deque[tuple[Batch, Mapping[int, Prefetched]]] = deque()
    me, thread = object(), threading.get_ident()

    def give_up() -> None:
        worker.rows.withdraw(me)
        for _, ahead in queue:
            worker.rows.abandon(ahead)

    try:
        while True:
            worker.turns.refuse_fork("prefetch()")
            depth = depth if chosen is None else chosen.now
            for batch, wanted in coming.until(worker.rows.reach(depth), queue):
                with coming.in_its_turn():
                    queue.append((batch, _asked_for(worker, wanted, len(queue))))
            if not queue:
                coming.end()
                break
            batch, ahead = queue[0]
            with worker.turns.take():
                worker.rows.offer(ahead, me)
            queue.popleft()
            coming.take()
            waited_s = waits.seconds
            yield batch
            thread = threading.get_ident()
            if chosen is not None:
                now_s = worker.clock.now()
                chosen.saw(waits.seconds - waited_s, now_s - began_s)
                began_s = now_s
    finally:
        with uninterrupted():
            if not worker.turns.is_fork:  # else all that is under way is the parent's
                worker.give_up(give_up, is_here=thread == threading.get_ident())


def _brought(
    worker: WorkerRuntime,
    batches: Iterable[Batch],
    lookup: LookedUp[Batch],
    depth: int,
    device: object,
    staleness: int | None,
) -> Iterator[Batch]:
    """Yield batches whose rows are on the device."""
    figures, shares_steps = worker.figures, worker.policy.shares_steps
    look_ahead = LookAhead(
        worker.rows, copies_to(device), depth, staleness, figures.pull, figures.copy, shares_steps=shares_steps
    )
    coming = _Coming(worker, batches, lookup)
    preparing: deque[tuple[Batch, Future[Prepared]]] = deque()
    queue: deque[tuple[Batch, Coming]] = deque()
    preparer = _Preparer(look_ahead)
    me, thread = object(), threading.get_ident()

    def give_up() -> None:
        worker.rows.withdraw(me)
        for _, each in queue:
            each.abandon()
        preparer.join()

    try:
        preparer.start()
        while True:
            worker.turns.refuse_fork("prefetch()")  # which has no thread to prepare anything
            asked_before = len(queue)
            while len(queue) <= worker.rows.reach(depth):
                for batch, wanted in coming.until(_PREPARED, preparing):
                    with coming.in_its_turn():
                        preparing.append((batch, preparer.prepare(_on_the_cpu(wanted))))
                if not preparing:
                    break
                batch, prepared = preparing.popleft()
                with coming.in_its_turn(preparing):
                    queue.append((batch, _foreseen(worker, look_ahead, prepared.result(), len(queue))))
            if not queue:
                coming.end()
                break
            batch, first = queue[0]
            # What was asked for a batch ago is there, and is copied while this one is computed.
            _bring(worker, look_ahead, first, [each for _, each in queue][1 : max(1, asked_before)], me)
            queue.popleft()
            coming.take()
            yield batch
            thread = threading.get_ident()
    finally:
        with uninterrupted():
            if not worker.turns.is_fork:
                preparer.stop()
                worker.give_up(give_up, is_here=thread == threading.get_ident())


def _asked_for(worker: WorkerRuntime, wanted: Sequence[Wanted], steps: int) -> dict[int, Prefetched]:
    """Begin to fetch what a forward will ask for after so many more ``steps``."""
    return worker.read_rows(
        "prefetch()",
        [each.handle for each in wanted],
        lambda: worker.rows.prefetch(wanted, worker.progress.completed, steps, worker.replica),
    )


def _foreseen(worker: WorkerRuntime, look_ahead: LookAhead, prepared: Prepared, steps: int) -> Coming:
    """Begin to bring to a device what a forward will ask for after so many more ``steps``."""
    return worker.read_rows(
        "prefetch()",
        [each.handle for same in prepared.wanted for each in same],
        lambda: look_ahead.foresee(prepared, worker.progress.completed, steps),
    )


def _bring(worker: WorkerRuntime, look_ahead: LookAhead, coming: Coming, later: Iterable[Coming], by: object) -> None:
    """Let forwards use what has come for one batch, and copy what is there of ``later`` ones."""

    def bring() -> None:
        worker.rows.offer(worker.following(lambda: look_ahead.arrive(coming, worker.progress.completed)), by)
        for each in later:
            worker.following(partial(look_ahead.bring, each))

    worker.in_turn("prefetch()", bring)


class _Preparer:
    """Finds out which rows batches look up while the ones before them are computed, mostly by compiled code. Its
    thread is its own: Python's pools take no more work once the main thread has ended, and others may train on."""

    def __init__(self, look_ahead: LookAhead) -> None:
        self._look_ahead = look_ahead
        self._asked: SimpleQueue[tuple[Future[Prepared], Sequence[Wanted]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fleet-look-ahead", daemon=True)

    def start(self) -> None:
        _preparers.add(self)
        self._thread.start()

    def prepare(self, wanted: Sequence[Wanted]) -> Future[Prepared]:
        """Begin to prepare a batch, after those before it."""
        prepared: Future[Prepared] = Future()
        self._asked.put((prepared, wanted))
        return prepared

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            prepared, wanted = asked
            if not self._closed:
                try:
                    work_on(self._look_ahead.device)
                    prepared.set_result(self._look_ahead.prepare(wanted))
                except BaseException as error:
                    prepared.set_exception(error)
            del asked, prepared, wanted  # which hold rows, until the next batch comes

    def stop(self) -> None:
        """Prepare no more."""
        self._closed = True
        self._asked.put(None)

    def join(self) -> None:
        """Wait for what is being prepared, when no more is."""
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()


#: Those at work, which the end of the process waits for: a thread that is in compiled code then would abort it.
_preparers: WeakSet[_Preparer] = WeakSet()


@atexit.register
def _end_preparing() -> None:
    for each in list(_preparers):
        each.stop()
        each.join()


def _on_the_cpu(wanted: Sequence[Wanted]) -> Sequence[Wanted]:
    """Return the same with ids that another thread need not wait for."""
    return [each if each.ids.is_cpu else each._replace(ids=each.ids.cpu()) for each in wanted]


class _Coming(Generic[Batch]):
    """Reads batches ahead of their turn as a loop without that would: once to their end, behind which some iterators
    begin anew, and up to the first that cannot be had, whose error is for its turn."""

    def __init__(self, worker: WorkerRuntime, batches: Iterable[Batch], lookup: LookedUp[Batch]) -> None:
        self._batches = iter(batches)
        self._is_over = False
        self._error: Exception | None = None
        # No method of its own, which would keep it, and the iterator with it, until garbage is collected.
        self._asking = partial(_asked, worker, lookup)
        self._ahead = BatchesAhead(self._asking)

    def until(self, depth: int, queue: deque[Any]) -> Iterator[tuple[Batch, list[Wanted]]]:
        """Yield batches, with what they will look up, until there are enough in the queue."""
        while len(queue) <= depth and not self._is_over:
            batch, wanted = NONE, None
            self._ahead.look()
            with self.in_its_turn():
                batch = next(self._batches, NONE)
                if batch is NONE:
                    self._is_over = True
                else:
                    wanted = self._asking(batch)
            self._ahead.check(batch, wanted or ())
            if wanted is not None:
                self._ahead.add(batch, wanted)
                yield batch, wanted

    def take(self) -> None:
        """Note that the first of the batches that were read is the loop's now."""
        self._ahead.take()

    @contextmanager
    def in_its_turn(self, later: deque[Any] | None = None) -> Iterator[None]:
        """Keep what is wrong with a batch until those before it are done. Of those that were read ``later`` none is."""
        try:
            yield
        except Exception as error:
            self._is_over, self._error = True, error
            if later is not None:
                later.clear()

    def end(self) -> None:
        """Raise what was wrong with the batch behind the last one."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _asked(worker: WorkerRuntime, lookup: LookedUp[Batch], batch: Batch) -> list[Wanted]:
    asked: object = lookup(batch)
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
