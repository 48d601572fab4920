"""One thread of a pool, its leader, waits for work and does what comes.

Handing every piece of work to a thread of its own costs several switches, on many cores from one core to another, which
is more than most requests take. So the thread that waits for work does it. When the work holds it up, whatever the
reason, another thread takes the lead and waits for the next piece: work may take long and even get stuck, as if it had
a thread of its own.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("fleet.wire")

Work = Callable[[], None]

#: The leader is held up when a piece of work takes longer than this. It is noticed before twice this time has passed.
#: To look every 5 ms cost a server with one worker, on two cores, 2 % of its speed.
PATIENCE_S = 0.02
#: Or than this while others are held up already: perhaps all wait for the same.
HURRY_S = 0.005

#: After so many looks at somebody who had nothing to do, nobody looks until there is something.
_QUIET_LOOKS = 20

#: Between attempts to find out what there is to do.
PAUSE_S = 0.2

#: So many threads at most stand by; others end.
SPARE = 8

_numbers = itertools.count()


class LeaderPool:
    """Does the work that ``wait`` returns, until it returns none."""

    def __init__(self, name: str, wait: Callable[[], Work | None]) -> None:
        self._name = name
        self._wait = wait
        self._lock = threading.Lock()
        self._called = threading.Condition(self._lock)
        self._threads: set[threading.Thread] = set()
        self._standing = 0  #: threads that stand by
        self._watched = False  #: whether one of them looks at the clock
        self._asleep = False  #: or sleeps until there is something to do
        self._quiet = 0
        self._vacant = True  #: whether somebody else has to lead
        self._term = 0
        self._turn = 0  #: odd while the leader is at work
        self._over = False
        self._is_short = False
        with self._lock:
            self._hire()

    def relieve(self) -> bool:
        """Let another thread lead if the leader is at work, so that something else need not wait for it; return whether
        it is."""
        with self._lock:
            if not self._turn % 2:
                return False
            if not self._vacant:
                self._vacant = True
                self._called.notify()
            return True

    def dismiss(self) -> None:
        """Let all threads go home; the caller has to wake those that wait for work."""
        with self._lock:
            self._over = True
            self._called.notify_all()

    def join(self, timeout_s: float) -> None:
        with self._lock:
            left = list(self._threads)
        for thread in left:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _hire(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{next(_numbers)}", daemon=True)
        thread.start()
        self._threads.add(thread)

    # ---------------------------------------------------------------- on its threads

    def _run(self) -> None:
        while (term := self._stand_by()) is not None:
            self._lead(term)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _lead(self, term: int) -> None:
        while (work := self._next()) is not None:
            self._turn += 1
            if self._asleep:
                with self._lock:
                    self._called.notify_all()
            try:
                work()
            except Exception:
                _log.exception("%s: a piece of work failed", self._name)
            with self._lock:
                if self._term != term:
                    return
                self._vacant = False
                self._turn += 1

    def _next(self) -> Work | None:
        while True:
            try:
                return self._wait()
            except Exception:  # for want of memory, perhaps, which others may let go
                _log.exception("%s: nobody knows what there is to do", self._name)
                with self._lock:
                    self._called.wait(PAUSE_S)

    def _stand_by(self) -> int | None:
        """Wait until this thread has to lead; return None when it can go home."""
        with self._lock:
            self._standing += 1
            try:
                while not self._over and self._standing <= SPARE:
                    # Nobody leads but with somebody behind who watches.
                    if self._vacant and self._has_follower():
                        self._vacant = False
                        self._turn += self._turn % 2
                        self._term += 1
                        self._called.notify_all()
                        return self._term
                    self._rest()
            finally:
                self._standing -= 1
        return None

    def _has_follower(self) -> bool:
        if self._standing == 1:
            try:
                self._hire()
            except (RuntimeError, MemoryError) as error:
                if not self._is_short:
                    self._is_short = True
                    _log.warning("%s: what takes long holds up the rest, for want of a thread (%s)", self._name, error)
                return False
        return True

    def _rest(self) -> None:
        """Watch the leader for a while; if another thread does, wait to be called."""
        if self._watched:
            self._called.wait()
            return
        self._watched = True
        try:
            turn = self._turn
            self._quiet = 0 if turn % 2 else self._quiet + 1
            # First this, and then another look: the leader does it the other way round, and so nothing is missed.
            self._asleep = self._quiet > _QUIET_LOOKS and not self._vacant
            if self._asleep and self._turn == turn:
                self._called.wait()
                self._quiet = 0
            elif not self._called.wait(self._patience_s()) and self._turn == turn and turn % 2:
                self._vacant = True
            elif self._turn != turn:
                self._quiet = 0
        finally:
            self._watched = self._asleep = False

    def _patience_s(self) -> float:
        held_up = len(self._threads) - self._standing - 1
        return HURRY_S if held_up > 0 else PATIENCE_S
