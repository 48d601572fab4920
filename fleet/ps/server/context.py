"""What every kind of request stands on: the server's lock, its job, the requests that wait, the replies that leave.

Whoever calls holds the lock, but to send: replies that became possible under it are collected in an outbox and leave
after it is released. A request that cannot be answered yet is remembered as a ticket in the gate or the hall, and holds
no thread.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint
from fleet.base.settings import Knobs
from fleet.errors import FleetError, IdentityError, JobAbortedError, ProtocolError
from fleet.ps.consistency.gate import Apply, Effect
from fleet.ps.server.deferring_lock import DeferringLock
from fleet.ps.server.durable_state import Memory
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Outbox, Waiting, nobody
from fleet.ps.server.state_directory import StateDirectory
from fleet.ps.server.statistics import Statistics
from fleet.ps.table.shard import Shard
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Respond
from fleet.ps.wire.wire_errors import error_reply
from fleet.telemetry.cause import claim

_log = logging.getLogger("fleet.server")

#: So many requests of one worker may wait. More is no worker of ours: it would be a prefetch of as many batches.
MAX_WAITING = 512


class Floor:
    def __init__(
        self, endpoint: Endpoint, knobs: Knobs, clock: Clock, durable: StateDirectory | None, name: str
    ) -> None:
        """``name`` is what this process is called ("server 0")."""
        self._name = name
        self.endpoint = endpoint
        self.knobs = knobs
        self.clock = clock
        self.most_bytes = knobs.security.max_message_bytes
        self.lock = DeferringLock(self._catch_up)
        self.roll = Members(endpoint, knobs, clock)
        self.ending = JobEnd(self.roll, clock, knobs.beat_s)
        self.ledger = Statistics(clock)
        self.memory = None if durable is None else Memory(durable)
        #: from the first hello on
        self.job: Job | None = None
        self._tickets = itertools.count()
        #: replies that became possible while somebody caught up
        self._late: deque[tuple[Respond, Frame]] = deque()

    def running(self) -> Job:
        assert self.job is not None, "a member exists only with a job"
        return self.job

    def shard(self) -> Shard:
        shard = self.running().shard
        if shard is None:
            raise ProtocolError("worker 0 has not said hello here yet", where=str(self.endpoint))
        return shard

    # ---------------------------------------------------------------- requests that wait

    def ticket(self) -> Hashable:
        return next(self._tickets)

    def check_patience(self, newcomer: Waiting) -> None:
        """What one worker has waiting here is bounded in number and in memory."""
        waiting = [each.nbytes for each in self.running().all_waiting() if each.worker == newcomer.worker]
        if len(waiting) >= MAX_WAITING or (waiting and sum(waiting) + newcomer.nbytes > self.most_bytes):
            raise ProtocolError(
                f"worker {newcomer.worker} has too many requests waiting",
                where=str(self.endpoint),
                expected=f"at most {MAX_WAITING}, and {self.most_bytes >> 20} MiB in them (FLEET_MAX_MESSAGE_MB)",
                got=f"{len(waiting)} with {sum(waiting) >> 20} MiB, and one more",
            )

    def park(self, version: int, waiting: Waiting, effects: list[Effect], outbox: Outbox) -> None:
        """Carry out what a request caused and let it wait for its version, which may be there at once."""
        job, ticket = self.running(), self.ticket()
        job.parked[ticket] = waiting
        self.carry_out(effects + job.gate.wait(ticket, waiting.worker, version), waiting.worker, outbox)

    def release_early(self, outbox: Outbox) -> None:
        """What came before the initial values waits for its version now."""
        job = self.running()
        early, job.early = job.early, []
        for version, waiting in early:
            self.park(version, waiting, [], outbox)

    def carry_out(self, effects: Sequence[Effect], by: int, outbox: Outbox) -> None:
        """What worker ``by`` has brought about."""
        job = self.running()
        try:
            for effect in effects:
                if isinstance(effect, Apply):
                    job.apply(effect.step, effect.contributors)
                    self.ledger.updated()
                else:
                    self.answer([effect.ticket], by, outbox)
        except Exception as error:
            self._fail_halfway(error, outbox)

    def _catch_up(self) -> None:
        """Do what is left of a round whose answers did not wait for it."""
        if not self._is_unsettled:
            return
        failed: Outbox = []
        try:
            with self.ledger.busy():
                self.shard().apply_pending()
        except Exception as error:
            self._fail_halfway(error, failed)
        self._late += failed

    @property
    def _is_unsettled(self) -> bool:
        return self.job is not None and self.job.shard is not None and self.job.shard.has_pending

    def _fail_halfway(self, error: Exception, outbox: Outbox) -> None:
        # Half a round is applied: nobody may go on from here as if nothing had happened.
        _log.exception("%s: the server failed", self.endpoint)
        failure = JobAbortedError(f"server {self.endpoint} failed", got=repr(error), todo=_way_out(error))
        self.fail(failure, outbox)

    def settle(self) -> None:
        """Do now, as answers are on their way, what they did not wait for."""
        if self._is_unsettled:
            with self.lock:
                pass
            self.send([])

    def answer(self, tickets: Sequence[Hashable], by: int, outbox: Outbox) -> None:
        """Worker ``by`` has let these be answered. One is not there any more if the job has failed, or if it was a
        process's whose worker has started again."""
        parked = self.running().parked
        there = [ticket for ticket in tickets if ticket in parked]
        if any(parked[ticket].has_rows for ticket in there):
            self.shard().apply_pending()  # while all are still there to be told, should it fail
        for waiting in map(parked.pop, there):
            self.ledger.released(waiting, by)
            if self.memory is None or not self.memory.replaying:  # else nobody would read it
                outbox.append((waiting.respond, self._answer_to(waiting, outbox)))

    def _answer_to(self, waiting: Waiting, outbox: Outbox) -> Frame:
        if self.memory is not None and waiting.handing_out is not None:
            try:
                self.memory.hand_out(waiting.handing_out)
            except OSError as error:
                return error_reply(self.cannot_keep(error, outbox))
        return _answer_of(waiting)

    def drop_requests(self, worker: int, outbox: Outbox) -> None:
        """Nobody waits for them any more."""
        job = self.running()
        job.claims.left(worker, outbox)
        job.parts.forget(worker)
        job.states.left(worker)
        job.outgrown.pop(worker, None)
        if job.asked_by == worker:
            job.give_up()
        gone = IdentityError(f"worker {worker} is no longer part of this job", where=str(self.endpoint))
        for ticket in [ticket for ticket, waiting in job.parked.items() if waiting.worker == worker]:
            outbox.append((job.parked.pop(ticket).respond, error_reply(gone)))
        if job.shard is not None:
            job.shard.forget(worker)

    # ---------------------------------------------------------------- the end, and what leaves

    def fail(self, error: FleetError, outbox: Outbox, *, by_worker: bool = False) -> None:
        """The job is over: tell everybody who waits now, and everybody who will ask. A failed worker has said itself
        that it is the cause."""
        if self.ending.over:
            return
        if not by_worker:
            claim(self.knobs.observing.record_dir, self.knobs.job_id, self._name, str(error))
        self.ending.end(error)
        if self.job is not None:
            waiting = self.job.all_waiting()
            self.ending.tell(each.worker for each in waiting if each.respond is not nobody)
            outbox += [(each.respond, error_reply(error)) for each in waiting]
            self.job.parked.clear()
            self.job.early.clear()
            self.job.claims.clear()
            self.job.states.clear()

    def cannot_keep(self, error: OSError, outbox: Outbox) -> FleetError:
        """What cannot be kept may not be acknowledged either: the job cannot go on."""
        failure = JobAbortedError(f"server {self.endpoint} cannot keep what it does", got=str(error))
        self.fail(failure, outbox)
        return failure

    def sync(self, sync: Callable[[Memory], None]) -> FleetError | None:
        """Have things on the disk, on a thread that holds no lock; if they cannot be, the job is over."""
        if self.memory is None:
            return None
        try:
            sync(self.memory)
        except OSError as error:
            outbox: Outbox = []
            with self.lock:
                failure = self.cannot_keep(error, outbox)
            self.send(outbox, secure=False)
            return failure
        return None

    def send(self, outbox: Outbox, *, secure: bool = True) -> None:
        """Let replies leave, ``secure`` ones when what they tell of is as safe as it has to be. Mere questions need not
        wait for what others have asked for: these ask again, should it be lost."""
        while self._late:
            outbox.append(self._late.popleft())
        failure = self.sync(Memory.secure) if secure and outbox else None
        for respond, frame in outbox:
            respond(frame if failure is None else error_reply(failure))
        self.ending.end_if_all_told()


def _answer_of(waiting: Waiting) -> Frame:
    """An answer that cannot be made, for lack of memory perhaps, is the misfortune of who asked and of nobody else."""
    try:
        return waiting.answer()
    except Exception as error:
        _log.exception("an answer for worker %d could not be made", waiting.worker)
        return error_reply(FleetError("the server could not make an answer", got=repr(error), todo=_way_out(error)))


def _way_out(error: Exception) -> str | None:
    return "Give the job more servers, or this one more memory." if isinstance(error, MemoryError) else None
