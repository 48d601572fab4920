"""Decides who may call into a running job: the threads of the process that joined it, one at a time, and no fork of it.

One thread trains: the one that took the last step. A call of another thread, such as an evaluation beside the training,
takes its turn between two calls of that one. A forked child has the parent's connections and a copy of everything known
of the job; what it sent would count as the parent's. So it may look at the job and not act in it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

from fleet.errors import StateError

T = TypeVar("T")


class Turns:
    """``with turns.take():`` is one call's turn. It may contain further ones of the same thread."""

    def __init__(self) -> None:
        self._turn = threading.RLock()
        # Not the turn of all calls: while one thread waits for the other workers, another may have to train for them.
        self._meeting = threading.RLock()
        self._process = os.getpid()
        self._trainer = threading.current_thread()

    def take(self) -> AbstractContextManager[bool]:
        """Return what is one call's turn. It is the lock itself: a signal whose handler raises may come as a method of
        ours begins, also as one that gives a turn back, and other threads would wait for that turn for ever."""
        self.refuse_fork("this call")  # a thread that the fork does not have may have the turn for good
        return self._turn

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Take a turn if no call is under way, this thread's own included; tell whether it was taken."""
        if _is_mine(self._turn):
            yield False
        else:
            with _taken_if_free(self._turn) as is_free:
                yield is_free

    def train(self) -> None:
        """Note that the calling thread takes a step."""
        self._trainer = threading.current_thread()

    @contextmanager
    def meeting(self, call: str) -> Iterator[None]:
        """Surround a ``call`` in which all workers meet; only one can be under way."""
        with self.meeting_if_free() as is_free:
            if not is_free:
                raise StateError(
                    f"{call} was called while another thread of this worker waits for the other workers",
                    expected="one such call at a time, in the same order on every worker",
                    todo="Call barrier_worker, all_reduce_worker and metrics from one thread.",
                )
            yield

    @contextmanager
    def meeting_if_free(self) -> Iterator[bool]:
        """Tell whether no other thread is in a call in which all workers meet; none can begin one meanwhile."""
        if _is_mine(self._meeting):
            yield True
        else:
            with _taken_if_free(self._meeting) as is_free:
                yield is_free

    def refuse_other_thread(self, call: str) -> None:
        """Refuse a call that needs the whole state of a training to stand still, if another thread goes on with it."""
        if self.is_other_thread:
            raise StateError(
                f"{call} was called in another thread than the one that trains",
                expected=f"a call by the thread {self._trainer.name!r}, between two of its steps",
                got=f"one by the thread {threading.current_thread().name!r}",
            )

    @property
    def is_other_thread(self) -> bool:
        """Say whether the calling thread is another one than the one that trains."""
        return threading.current_thread() is not self._trainer and self._trainer.is_alive()

    @property
    def is_fork(self) -> bool:
        """Say whether the calling process is a fork of the one that joined the job."""
        return os.getpid() != self._process

    def refuse_fork(self, call: str) -> None:
        if self.is_fork:
            raise StateError(
                f"{call} was called in a forked child of a worker, which is no member of the job",
                where=f"process {os.getpid()}",
                expected=f"the process that called init_worker(), {self._process}",
                todo="Call it there. A forked child may look rows up; who is to train needs a place in the job.",
            )


def _is_mine(lock: threading.RLock) -> bool:
    """Say whether the calling thread has the lock."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]


@contextmanager
def _taken_if_free(lock: threading.RLock) -> Iterator[bool]:
    """Take a lock that the calling thread does not have, unless another one has it; tell whether it was taken."""
    try:
        yield lock.acquire(blocking=False)
    finally:
        if _is_mine(lock):  # also where a signal's handler raised just as it was taken
            lock.release()


class PerThread(threading.local, Generic[T]):
    """Holds a list of which every thread has its own."""

    def __init__(self) -> None:
        self.list: list[T] = []
