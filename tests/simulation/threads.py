"""What the standard library has for threads and time, on the scheduler of the running simulation; and how all of Fleet
comes to use that instead.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pkgutil
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import fleet
from fleet.base import exit_guard
from fleet.numeric import jit
from fleet.numeric.elementary import find_elementary_functions
from fleet.ps.server import runtime as server_runtime
from fleet.ps.table.stores import TieredStores
from fleet.ps.worker import dense_group
from fleet.serving import readers
from fleet.telemetry import cause

from .disk import stands_for_os
from .scheduler import Killed, Scheduler, Thread

#: The running simulation's; there is one at a time.
_running: list[Scheduler] = []


def scheduler() -> Scheduler:
    return _running[-1]


# ---------------------------------------------------------------- threading


class Lock:
    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        here = _running[-1]  # written out: this is done some thousand times in a job
        me = here.current
        if me.process.is_dead:
            raise Killed
        here.until_next -= 1
        if not here.until_next:
            here.give_way()
        if self._owner is None:
            self._owner = me
            return True
        if not blocking:
            return False
        until = None if timeout < 0 else here.now + timeout
        while self._owner is not None:
            if until is not None and here.now >= until:
                return False
            self._waiting.append(me)
            try:
                here.block(None if until is None else until - here.now)
            finally:
                if me in self._waiting:  # nobody has woken it
                    self._waiting.remove(me)
        self._owner = me
        return True

    def release(self) -> None:
        if self._owner is None and not _running[-1].current.process.is_dead:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        if self._waiting:
            scheduler().wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._owner is not None

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    def __init__(self) -> None:
        self._lock = Lock()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock._owner is not scheduler().check() and not self._lock.acquire(blocking, timeout):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def _is_owned(self) -> bool:
        return self._lock._owner is scheduler().check()

    def let_go(self) -> int:
        depth, self._depth = self._depth, 0
        self._lock.release()
        return depth

    def take_again(self, depth: int) -> None:
        self._lock.acquire()
        self._depth = depth

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, lock: Lock | RLock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiting: deque[Thread] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        here = scheduler()
        me = here.check()
        self._waiting.append(me)
        depth = self._lock.let_go() if isinstance(self._lock, RLock) else self._lock.release()
        try:
            was_woken = here.block(timeout)
        finally:
            if me in self._waiting:  # nobody has woken it
                self._waiting.remove(me)
        self._lock.take_again(depth) if isinstance(self._lock, RLock) else self._lock.acquire()
        return was_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else scheduler().now + timeout
        while not (result := predicate()):
            rest = None if until is None else until - scheduler().now
            if rest is not None and rest <= 0:
                break
            self.wait(rest)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            scheduler().wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            scheduler().wake(thread)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        here = scheduler()
        me = here.check()
        until = None if timeout is None else here.now + timeout
        while not self._is_set and (until is None or here.now < until):
            self._waiting.append(me)
            try:
                here.block(None if until is None else until - here.now)
            finally:
                self._waiting.remove(me)
        return self._is_set


class Semaphore:
    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._changed = Condition(Lock())

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            if not blocking:
                timeout = 0.0
            if not self._changed.wait_for(lambda: self._value > 0, timeout):
                return False
            self._value -= 1
            return True

    def release(self) -> None:
        with self._changed:
            self._value += 1
            self._changed.notify()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class ThreadOfFleet(Thread):
    """Is what Fleet starts: it belongs to the process of whoever made it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] = lambda: None,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        here = scheduler()
        super().__init__(here, here.check().process, lambda: target(*args, **(kwargs or {})), name)
        self._was_started = False

    def start(self) -> None:
        self.scheduler.check()
        self._was_started = True
        self.scheduler.start(self)

    def join(self, timeout: float | None = None) -> None:
        self.scheduler.join(self, timeout)

    def is_alive(self) -> bool:
        return self._was_started and not self.has_ended


# ---------------------------------------------------------------- concurrent.futures


class Future(futures.Future):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()
        self._number = next(scheduler().numbers)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


def wait(fs: Iterable[Future], timeout: float | None = None, return_when: str = futures.ALL_COMPLETED) -> Any:
    pending = list(dict.fromkeys(fs))
    until = None if timeout is None else scheduler().now + timeout
    least = len(pending) if return_when == futures.ALL_COMPLETED else 1
    for future in pending:
        if sum(each.done() for each in pending) >= least:
            break
        rest = None if until is None else max(until - scheduler().now, 0.0)
        with contextlib.suppress(futures.TimeoutError, futures.CancelledError):
            future.exception(rest)
    done = {each for each in pending if each.done()}
    return futures._base.DoneAndNotDoneFutures(done, {*pending} - done)


class ThreadPoolExecutor:
    def __init__(
        self,
        max_workers: int = 1,
        thread_name_prefix: str = "pool",
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self._most = max_workers
        self._prefix = thread_name_prefix
        self._begin = (lambda: None) if initializer is None else (lambda: initializer(*initargs))
        self._tasks: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._changed = Condition(Lock())
        self._threads: list[ThreadOfFleet] = []
        self._idle = 0
        self._is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._tasks.append((future, lambda: fn(*args, **kwargs)))
            if self._idle:
                self._changed.notify()
                return future
            if len(self._threads) == self._most:
                return future
            thread = ThreadOfFleet(target=self._run, name=f"{self._prefix}_{len(self._threads)}")
            self._threads.append(thread)
        thread.start()
        return future

    def _run(self) -> None:
        self._begin()
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._tasks or self._is_closed)
                self._idle -= 1
                if not self._tasks:
                    return
                future, work = self._tasks.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        submitted = [self.submit(fn, *each) for each in zip(*iterables, strict=False)]
        return (each.result() for each in submitted)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._is_closed = True
            if cancel_futures:
                while self._tasks:
                    self._tasks.popleft()[0].cancel()
            self._changed.notify_all()
        if wait:
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


# ---------------------------------------------------------------- modules


class _Stands:
    """Has some names of its own; all others are the module's."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _sleep(seconds: float) -> None:
    scheduler().block(seconds)


#: Seconds since 1970 when every simulation begins.
_EPOCH = 1.7e9

_STANDS_FOR_THREADING = _Stands(
    threading,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Semaphore=Semaphore,
    Thread=ThreadOfFleet,
)
_STANDS_FOR_ATEXIT = _Stands(atexit, register=lambda act: act, unregister=lambda _: None)
_STANDS_FOR_TIME = _Stands(
    time,
    time=lambda: _EPOCH + scheduler().now + scheduler().current.process.wall_offset_s,
    monotonic=lambda: scheduler().now,
    perf_counter=lambda: scheduler().now,
    process_time=lambda: scheduler().now,
    thread_time=lambda: scheduler().now,
    sleep=_sleep,
)

_STANDS_FOR_OS = _Stands(
    os, **stands_for_os(lambda: scheduler().current.process.disk, lambda: scheduler().check(), _sleep)
)


def _compile(work: Callable[[], Any]) -> Any:
    """Compile something, once in this process: no turn of a later run may depend on that."""
    here = scheduler()
    until_next, here.until_next = here.until_next, -1
    try:
        return work()
    finally:
        here.until_next = until_next


@contextlib.contextmanager
def _sigterm_ends(_: Callable[[str], None], end: Callable[[str], None]) -> Iterator[list[int]]:
    """Do what a server does in its main thread, in every simulated one."""
    process, received = scheduler().check().process, list[int]()

    def on_sigterm() -> None:
        received.append(signal.SIGTERM)
        end("signal SIGTERM")

    process.on_sigterm = on_sigterm
    try:
        yield received
    finally:
        process.on_sigterm = None


def _drawn_secrets(seed: int) -> _Stands:
    draw = random.Random(f"secrets {seed}")

    def token_bytes(nbytes: int = 32) -> bytes:
        return draw.randbytes(nbytes)

    return _Stands(
        secrets,
        randbits=draw.getrandbits,
        randbelow=draw.randrange,
        token_bytes=token_bytes,
        token_hex=lambda nbytes=32: token_bytes(nbytes).hex(),
    )


def import_all() -> list[ModuleType]:
    """Import every module that a simulated process may need, so that none comes later with the real thing."""
    left_out = ("fleet.ray", "fleet.lightning", "fleet.__main__", "fleet.launch", "fleet.collective", "fleet.bootstrap")
    for each in pkgutil.walk_packages(fleet.__path__, "fleet."):
        if not each.name.startswith(left_out):
            importlib.import_module(each.name)
    return [module for name, module in sorted(sys.modules.items()) if name == "fleet" or name.startswith("fleet.")]


_LOCKS = (type(threading.Lock()), type(threading.RLock()))
#: Where Fleet's modules name something that is exchanged: the names of a module, one of them, and what it means.
_places: list[tuple[dict[str, Any], str, Any]] = []


@contextlib.contextmanager
def installed(running: Scheduler, seed: int, claims: Callable[..., None] = cause.claim) -> Iterator[None]:
    """Let all of Fleet wait on this scheduler, draw from this seed, and note by ``claims`` who has ended a job, while
    the context is entered."""
    stands: dict[int, Any] = {
        id(atexit): _STANDS_FOR_ATEXIT,
        id(threading): _STANDS_FOR_THREADING,
        id(time): _STANDS_FOR_TIME,
        id(os): _STANDS_FOR_OS,
        id(secrets): _drawn_secrets(seed),
        id(futures.Future): Future,
        id(futures.ThreadPoolExecutor): ThreadPoolExecutor,
        id(futures.wait): wait,
        id(jit._undisturbed): _compile,
        id(server_runtime._signals_end): _sigterm_ends,
        id(cause.claim): claims,
        id(dense_group._own_store): lambda host: running.groups.own_store(host),
        id(dense_group.TCPStore): lambda host, port, **options: running.groups.store(host, port, **options),
        id(dense_group.PrefixStore): lambda prefix, store: running.groups.prefixed(prefix, store),
        id(dense_group._connected): lambda *group: running.groups.connected(*group),
        id(dense_group._keep_until_over): lambda *_: None,
        id(dense_group.done_within): lambda work, slice_s: work.within(slice_s),
    }
    if not _places:
        find_elementary_functions()  # once in this process, as compiling
        with tempfile.TemporaryDirectory(prefix="fleet-simulation-") as folder:
            TieredStores(Path(folder), "compiled", 1 << 30, 1.0).close()
        for names in map(vars, import_all()):
            there = [(name, value) for name, value in names.items() if id(value) in stands or isinstance(value, _LOCKS)]
            _places.extend((names, name, value) for name, value in there)
    _running.append(running)
    try:
        for names, name, value in _places:
            is_lock = isinstance(value, _LOCKS)
            names[name] = (Lock if isinstance(value, _LOCKS[0]) else RLock)() if is_lock else stands[id(value)]
        yield
    finally:
        for names, name, value in _places:
            names[name] = value
        _running.pop()
        # Those of dead processes: nobody has to hear of them when this one ends or forks.
        exit_guard._guarded.clear()
        readers._live.clear()
