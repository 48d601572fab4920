"""Connects a worker to the job's store, beside the process group, on a thread of its own.

A request to a store whose host has stopped answering never returns, and a collective of which one member has died may
not either. So the user's thread asks neither directly. Only the monitor's thread speaks to the store: it counts a
heartbeat up, looks whether the next worker's heartbeat still grows and whether a failure has been reported, and between
two beats does what it is asked to. The user's thread waits in slices (``ask``, ``wait``), and looks between them
whether the job has failed.

Each worker watches its successor. The first to find a failure writes it down; everybody reads the same sentence.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from fleet.base.clock import Clock
from fleet.base.settings import ProcessSettings
from fleet.collective.liveness import Liveness, stopped
from fleet.errors import DeadlineError, FleetError, JobAbortedError, StateError
from fleet.telemetry.cause import claim

T = TypeVar("T")

#: How long the user's thread waits before it looks whether the job has failed.
SLICE_S = 0.25
#: By how many beats a living worker may be late when the others find out who has died.
LATE_BEATS = 3
#: After how many slices a wait is long enough to be told of.
_LONG = 4

_FAILURE, _OVER = "failure", "over"
#: Keys that only the store of a job that has ended holds.
ENDED = (_FAILURE, _OVER)


class StoreMonitor:
    """``host`` says in words who keeps the store, ``hosts_store`` whether it ends with this process."""

    def __init__(
        self, store: Store, rank: int, size: int, host: str, hosts_store: bool, settings: ProcessSettings, clock: Clock
    ) -> None:
        self.rank = rank
        self.size = size
        self.deadline_s = settings.rpc_deadline_s
        self.clock = clock
        #: How many times all workers have met in the process group.
        self.rounds = 0
        #: How often the workers have compared what they are about to do.
        self.checks = 0
        self._store = store
        self._host = host
        self._hosts_store = hosts_store
        self._heartbeat_s = settings.heartbeat_s
        self._record_dir = settings.observing.record_dir
        self._job = settings.job_id
        self._requests: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._failure: FleetError | None = None
        self._answered_at = clock.now()
        self._watching = size > 1
        self._liveness = Liveness()
        self._thread = threading.Thread(target=self._run, name=f"fleet-store-monitor-{rank}", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the user's thread

    def ask(self, work: Callable[[Store], T]) -> T:
        """Return what ``work`` does with the store, done by the monitor."""
        future: Future[T] = Future()
        self._requests.put((work, future))
        while True:
            try:
                return future.result(SLICE_S)
            except NotYet:
                self._check_host()  # and nothing else: a failure is told through here as well
            except RuntimeError as error:
                self._failure = self._failure or self._lost_host(error)
                raise self._failure.again() from error

    def until(self, ready: Callable[[Store], T | None], within_s: float | None = None) -> T | None:
        """Return what ``ready`` finds once it finds anything, asked again and again; None if the time is over first."""
        began, pause_s = self.clock.now(), 0.0005
        while True:
            found = self.ask(ready)
            if found is not None:
                return found
            self.check()
            if within_s is not None and self.clock.now() - began > within_s:
                return None
            self.clock.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    def wait(self, is_done: Callable[[float], bool], needs_all: str = "") -> None:
        """Return when ``is_done`` says so, which is given a slice to wait for and raises if a peer is gone.

        ``needs_all`` names what nobody will complete for a worker that has stopped.
        """
        slices = 0
        while True:
            try:
                if is_done(SLICE_S):
                    return
            except RuntimeError as error:
                raise self.blame(error) from error
            self.check()
            slices += 1
            if needs_all and slices % _LONG == 0:
                self.refuse_left(f"{needs_all} needs every worker in every forward", range(self.size))
            elif slices == _LONG:
                self.ask(lambda store: store.set(f"waits/{self.rank}", str(self.rounds + 1)))

    def leave(self) -> None:
        """Say that this worker makes no more calls."""
        self.ask(lambda store: store.set(f"left/{self.rank}", "1"))

    def refuse_left(self, what: str, of: Iterable[int]) -> None:
        """Raise if one ``of`` these workers has stopped, without which ``what`` cannot go on."""
        left = self.ask(lambda store: [other for other in of if store.check([f"left/{other}"])])
        if left:
            error = StateError(
                f"{what}, and worker {left[0]} has stopped",
                where=f"worker {self.rank}",
                todo="Give all workers the same number of batches.",
            )
            self.fail(str(error))
            raise error

    def compares(self, check: int, rank: int) -> str:
        """Return the key under which a worker says in a comparison what it is about to do."""
        return f"alike/{check}/{rank}"

    def refuse_standstill(self, absent: Iterable[int], where: str) -> None:
        """Raise if this worker and one of the ``absent`` ones wait for each other, the other one in a round or in the
        next comparison."""

        def find(store: Store) -> list[tuple[int, str]]:
            compare = [other for other in absent if store.check([self.compares(self.checks + 1, other)])]
            waiting = [other for other in absent if store.check([f"waits/{other}"])]
            meet = [other for other in waiting if int(store.get(f"waits/{other}")) == self.rounds + 1]
            return [*((other, "a step") for other in meet), *((other, "another call") for other in compare)]

        stuck = self.ask(find)
        if stuck:
            (other, of_other), *_ = stuck
            error = StateError(
                f"worker {self.rank} waits in {where} for worker {other}, which waits in {of_other} for it",
                todo="Let every worker make the same calls after the same step.",
            )
            self.fail(str(error))
            raise error

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        """Raise if the job has failed."""
        if self._failure is not None:
            raise self._failure.again()
        self._check_host()

    def _check_host(self) -> None:
        silent_s = self.clock.now() - self._answered_at
        if silent_s > self.deadline_s:
            self._failure = self._failure or DeadlineError(
                f"{self._host} has not answered for {silent_s:.1f} s, and keeps the job's store",
                where=f"worker {self.rank}",
                todo="See its output; FLAGS_rpc_deadline says how long a silence may be.",
            )
            raise self._failure.again()

    def fail(self, what: str) -> None:
        """Tell all workers that the job ends, if nobody has done so, and what for."""
        if self._failure is None:  # else it follows another one's
            claim(self._record_dir, self._job, f"worker {self.rank}", what)
        report = {"worker": self.rank, "kind": "failed", "what": what}
        self._conclude(report)

    def part(self) -> None:
        """Say goodbye, and return when all others have: nobody needs anybody any more.

        The store's host stays until each of them has seen so.
        """
        self._watching = False
        byes, parted = ([f"{word}/{other}" for other in range(self.size)] for word in ("bye", "parted"))
        self.ask(lambda store: store.set(byes[self.rank], "1"))
        self.until(lambda store: store.check(byes) or None, self.deadline_s)
        self.ask(lambda store: store.set(_OVER, "1"))
        self.ask(lambda store: store.set(parted[self.rank], "1"))
        if self._hosts_store:
            self.until(lambda store: store.check(parted) or None, self.deadline_s)

    def linger(self) -> None:
        """Stay for a few beats after a failure, if this is the store's host, until all others have read what failed."""
        heard = [f"heard/{other}" for other in range(self.size)]
        with contextlib.suppress(FleetError):
            if self._hosts_store:
                until = self.clock.now() + (LATE_BEATS + 1) * self._heartbeat_s
                while self.clock.now() < until and not self.ask(lambda store: store.check(heard)):
                    self.clock.sleep(self._heartbeat_s / 10)

    def end(self) -> None:
        """End the thread, and with it the hold on the store."""
        self._requests.put(None)
        self._thread.join(SLICE_S)

    def blame(self, error: RuntimeError) -> FleetError:
        """Find out which worker has gone, after a connection broke, and return the error that says so. The living keep
        counting while everybody looks."""
        try:
            before = self.ask(self._counts)
            limit_s = LATE_BEATS * self._heartbeat_s
            self.until(lambda store: store.check([_FAILURE]) or None, limit_s)
            self.check()
            gone = [worker for worker in stopped(before, self.ask(self._counts)) if worker != self.rank]
        except FleetError as known:
            return known
        what = f"the connection to a worker broke: {str(error).partition(chr(10))[0]}"
        if gone:
            what = f"worker {gone[0]} is gone: its connection broke, and it has been silent for {limit_s:.1f} s since"
        report = {"worker": gone[0] if gone else -1, "kind": "gone", "what": what}
        self._conclude(report)
        assert self._failure is not None
        return self._failure.again()

    def _counts(self, store: Store) -> dict[int, int]:
        return {other: store.add(f"beat/{other}", 0) for other in range(self.size)}

    def _conclude(self, report: dict[str, Any]) -> None:
        try:
            self.ask(lambda store: self._report(store, report))
        except FleetError as known:
            self._failure = self._failure or known

    # ---------------------------------------------------------------- the monitor's thread

    def _run(self) -> None:
        beat_at = self.clock.now()
        while True:
            if self.clock.now() >= beat_at:  # looked at first: requests must not hold it up
                beat_at = self.clock.now() + self._heartbeat_s
                try:
                    self._beat()
                except RuntimeError as error:
                    self._failure = self._failure or self._lost_host(error)
            try:
                request = self._requests.get(timeout=max(0.0, beat_at - self.clock.now()))
            except queue.Empty:
                continue
            if request is None:
                del self._store
                return
            work, future = request
            try:
                future.set_result(work(self._store))
                self._answered_at = self.clock.now()
            except BaseException as error:
                future.set_exception(error)

    def _beat(self) -> None:
        store, now = self._store, self.clock.now()
        store.add(f"beat/{self.rank}", 1)
        self._answered_at = self.clock.now()
        if self._failure is None and store.check([_FAILURE]):
            self._adopt(json.loads(store.get(_FAILURE)))
            store.set(f"heard/{self.rank}", "1")
        successor = (self.rank + 1) % self.size
        if not self._watching or self._failure is not None:
            return
        count = store.add(f"beat/{successor}", 0)
        silent_s = self._liveness.still_for(successor, count, now) if count else 0.0  # it has not come yet
        if silent_s > self.deadline_s and not store.check([f"bye/{successor}"]):
            what = f"worker {successor} has been silent for {silent_s:.1f} s"
            self._report(store, {"worker": successor, "kind": "silent", "what": what})

    def _report(self, store: Store, report: dict[str, Any]) -> None:
        """Write the failure down unless somebody was quicker; either way it is this worker's from now on."""
        written = store.compare_set(_FAILURE, "", json.dumps(report))
        self._adopt(json.loads(written))
        store.set(f"heard/{self.rank}", "1")

    def _adopt(self, report: dict[str, Any]) -> None:
        worker, what = report["worker"], report["what"]
        if report["kind"] == "failed":
            self._failure = JobAbortedError(f"worker {worker} failed and ended the job", got=what)
        else:
            self._failure = DeadlineError(
                what,
                where=f"worker {self.rank}",
                todo=f"See the output of worker {worker}; the job ends, and may be started again from a checkpoint."
                if worker >= 0
                else "See the output of the others; the job ends, and may be started again from a checkpoint.",
            )

    def _lost_host(self, error: BaseException) -> FleetError:
        return DeadlineError(
            f"{self._host} is gone, and kept the job's store",
            where=f"worker {self.rank}",
            got=str(error).partition("\n")[0][:200],
            todo="See its output; the job ends, and may be started again from a checkpoint.",
        )
