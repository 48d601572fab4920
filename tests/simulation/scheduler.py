"""Runs many threads one at a time, on a clock of its own: who goes on is drawn from a seed.

Threads are the system's. Each waits for a lock of its own, its baton, which whoever gives way hands over. Nothing else
runs meanwhile, so a program whose threads wait here alone does the same whenever the seed is the same.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """Unwinds a thread whose process was killed. Nothing that it does on its way out reaches anybody."""


class Process:
    """Is what is killed, paused or started again as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_paused = False
        self.threads: list[Thread] = []
        #: those whose turn came while the process was paused
        self.held: list[Thread] = []
        #: what its wall clock shows beyond the simulation's
        self.wall_offset_s = 0.0
        #: what its machine keeps, if it keeps anything
        self.disk: Any = None
        #: what it does when it is told to end, if it does not just die
        self.on_sigterm: Callable[[], object] | None = None


class Thread(threading.Thread):
    """Has its turns from the scheduler. Otherwise it is any thread of Python's."""

    def __init__(self, scheduler: Scheduler, process: Process, work: Callable[[], Any], name: str) -> None:
        self._number = next(scheduler.numbers)
        super().__init__(name=name, daemon=True)
        self.scheduler = scheduler
        self.process = process
        self.has_ended = False
        self.is_blocked = False
        #: grows with each wait, so that what was to end an earlier one is known to be late
        self.waits = 0
        self.error: BaseException | None = None
        #: who wait for its end
        self.waiters: list[Thread] = []
        #: who has killed its process, and goes on when it has ended
        self.killer: Thread | None = None
        self._work = work
        self._baton = threading.Lock()
        self._baton.acquire()

    def __hash__(self) -> int:  # by address, sets of threads would have another order in each run
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    def take_over(self) -> None:
        self._baton.release()

    def wait_for_turn(self) -> None:
        self._baton.acquire()

    def run(self) -> None:
        self.wait_for_turn()
        try:
            if not self.process.is_dead:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.scheduler.end(self)


class Scheduler:
    def __init__(self, seed: int, *, preemption: float = 0.0) -> None:
        """``preemption`` is how likely a thread gives way where it takes a lock that is free."""
        self.now = 0.0
        self.turns = 0
        self.numbers = itertools.count()
        #: where workers meet that average gradients
        self.groups: Any = None
        self._draw = random.Random(seed)
        self._preemption = preemption
        #: so many locks are taken before a thread gives way at one; never, if it is below zero
        self.until_next = self._draw_next()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ready: list[Thread] = []
        #: Whoever runs the simulation has turns as well. This thread is never started: it is there already.
        self._driver = Thread(self, Process("outside"), lambda: None, "driver")
        #: does what is due, and never waits
        self._system = Thread(self, Process("system"), lambda: None, "system")
        self.current = self._driver

    # ---------------------------------------------------------------- processes

    def start(self, thread: Thread) -> None:
        thread.process.threads.append(thread)
        threading.Thread.start(thread)
        self._ready.append(thread)

    def end(self, thread: Thread) -> None:
        """Note that a thread has run out; somebody else goes on."""
        thread.has_ended = True
        thread.process.threads.remove(thread)
        for waiter in thread.waiters:
            self.wake(waiter)
        if thread.killer is None:
            self._next().take_over()
        else:
            self.current = thread.killer
            thread.killer.take_over()

    def unwind(self, process: Process) -> None:
        """End a process as SIGKILL does: what it has not done by now is never done. Its threads unwind, one by one and
        before anybody else goes on, but for the one that calls this: ``leave`` is its own end."""
        me = self.current
        process.is_dead = True
        process.is_paused = False
        process.held.clear()
        self._ready = [each for each in self._ready if each.process is not process]
        for thread in [each for each in process.threads if each is not me]:
            thread.killer = me
            thread.is_blocked = False
            self.current = thread
            thread.take_over()
            me.wait_for_turn()

    def leave(self, process: Process) -> None:
        """End the calling thread, if it is of this process, which is dead."""
        if self.current.process is process:
            raise Killed

    def pause(self, process: Process) -> None:
        """Stop a process as SIGSTOP does."""
        process.is_paused = True

    def resume(self, process: Process) -> None:
        process.is_paused = False
        self._ready += process.held
        process.held.clear()

    # ---------------------------------------------------------------- waiting

    def check(self) -> Thread:
        """Return the thread that runs; in a dead process none goes on."""
        thread = self.current
        if thread.process.is_dead:
            raise Killed
        return thread

    def at(self, after_s: float, act: Callable[[], None]) -> None:
        """Have something done later that does not wait itself."""
        heapq.heappush(self._due, (self.now + after_s, next(self._order), act))

    def block(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody wakes the calling thread, or for so long; say whether somebody did."""
        thread = self.check()
        assert thread is not self._system, "what is due must not wait"
        thread.waits += 1
        thread.is_blocked = True
        is_late = False
        if timeout_s is not None:
            wait = thread.waits

            def time_is_up() -> None:
                nonlocal is_late
                if thread.is_blocked and thread.waits == wait:
                    is_late = True
                    self.wake(thread)

            self.at(max(timeout_s, 0.0), time_is_up)
        self._give_way()
        return not is_late

    def wake(self, thread: Thread) -> None:
        if thread.is_blocked and not thread.process.is_dead:  # whose threads unwind, and have no more turns
            thread.is_blocked = False
            self._ready.append(thread)

    def give_way(self) -> None:
        """Let others go on here, as is drawn from time to time."""
        self.until_next = self._draw_next()
        if self.current is not self._system:
            self._ready.append(self.current)
            self._give_way()

    def _draw_next(self) -> int:
        return int(self._draw.expovariate(self._preemption)) + 1 if self._preemption else -1

    def join(self, thread: Thread, timeout_s: float | None = None) -> None:
        me, until = self.check(), None if timeout_s is None else self.now + timeout_s
        while not thread.has_ended and (until is None or self.now < until):
            thread.waiters.append(me)
            self.block(None if until is None else until - self.now)
            thread.waiters.remove(me)

    def _give_way(self) -> None:
        me = self.current
        other = self._next()
        if other is not me:
            other.take_over()
            me.wait_for_turn()
        if me.process.is_dead:
            raise Killed

    def _next(self) -> Thread:
        """Draw who goes on. If nobody can, time does."""
        while True:
            ready = self._ready
            while ready:
                at = int(self._draw.random() * len(ready)) if len(ready) > 1 else 0
                ready[at], ready[-1] = ready[-1], ready[at]
                thread = ready.pop()
                if thread.process.is_paused:
                    thread.process.held.append(thread)
                    continue
                self.turns += 1
                self.current = thread
                return thread
            when, _, act = heapq.heappop(self._due)
            self.now = max(self.now, when)
            self.current = self._system
            act()
