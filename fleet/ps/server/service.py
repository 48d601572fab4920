"""Every request of every worker arrives in ``Service.handle``, and goes from there to the part that does its kind of
work.

One lock guards the job (gate, shard, waiting requests). Under it a request is decided and carried out; the replies
that became possible are collected in an outbox and leave after it is released. Heartbeats and status requests change
nothing, and take no part in it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.checkpoint.places import Place
from fleet.checkpoint.resume_choice import Choice
from fleet.errors import FleetError, JobAbortedError, ProtocolError
from fleet.ps.server.admission import Expected
from fleet.ps.server.barrier import Barrier
from fleet.ps.server.checkpoint_reader import Restore
from fleet.ps.server.checkpoint_requests import CheckpointRequests
from fleet.ps.server.deferring_lock import DeferringLock
from fleet.ps.server.departure import Departure
from fleet.ps.server.disk_waits import DiskWaits
from fleet.ps.server.durability.durability import NOTED, Durability, decides
from fleet.ps.server.durability.state_directory import StateDirectory
from fleet.ps.server.feed_requests import FeedRequests
from fleet.ps.server.handshake import Handshake
from fleet.ps.server.initialization import Initialization
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.meeting_requests import MeetingRequests
from fleet.ps.server.members import Members
from fleet.ps.server.moving import Moving
from fleet.ps.server.pending import Arrival, Outbox, nobody
from fleet.ps.server.replacement import Replacement
from fleet.ps.server.resumption import Resumption
from fleet.ps.server.row_requests import RowRequests
from fleet.ps.server.staging import Staging
from fleet.ps.server.standstill import Standstill
from fleet.ps.server.state_requests import StateRequests
from fleet.ps.server.statistics import Statistics
from fleet.ps.server.status import Status
from fleet.ps.server.step_requests import BeforeUpdate, StepRequests
from fleet.ps.server.wanted_servers import WantedServers
from fleet.ps.table.shard import make_shard_in
from fleet.ps.table.stores import MemoryStores, Stores
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Respond
from fleet.ps.wire.wire_errors import error_reply, failure_reply


class Service:
    def __init__(
        self,
        endpoint: Endpoint,
        settings: ProcessSettings,
        clock: Clock,
        *,
        expected: Expected | None = None,
        restore: Restore | None = None,
        directory: StateDirectory | None = None,
        resumes: Place | None = None,
        name: str = "",
        stores: Stores | None = None,
        before_update: BeforeUpdate | None = None,
    ) -> None:
        """``name`` is what this process is called; ``expected`` is the number of workers and the servers this process
        was told of, where it was told; ``restore`` the checkpoint to start from; ``directory`` where acknowledged
        requests are kept, and may be kept from before; ``resumes`` where the checkpoints are, if the job goes on from
        one; ``stores`` where tables keep their rows. With ``before_update``, which is told of each, this is no server
        but what one was: whoever asked for it does the journal over by ``redo``, as far as they want."""
        where = str(endpoint)
        self._where = where
        self._clock = clock
        self._lock = lock = DeferringLock(self._catch_up)
        #: from the first hello on
        self.job: Job | None = None
        #: replies that became possible while somebody caught up
        self._late: deque[tuple[Respond, Frame]] = deque()
        self._members = members = Members(endpoint, settings, clock)
        self._statistics = statistics = Statistics(clock)
        stores = stores or MemoryStores()
        self.end = end = JobEnd(
            members, clock, settings, name or f"server {endpoint}", where, stores.failure, is_kept=directory is not None
        )
        self.ended = end.ended
        durability = None
        if directory is not None:
            durability = Durability(directory, lock, end, members, clock, settings, where, self._cannot_sync)
        self.durability = durability
        self._steps = steps = StepRequests(clock, end, statistics, durability, before_update)
        self._disk_waits = DiskWaits(lock, end, stores, self._found_job, self._send)
        make_shard = partial(make_shard_in, stores)
        replacement = Replacement(lock, end, durability, self._disk_waits.make_beside)
        initialization = Initialization(
            endpoint, lock, end, durability, steps, replacement, self._send, restore, make_shard
        )
        self._handshake = handshake = Handshake(
            endpoint, settings, end, members, durability, steps, initialization, expected, self._begin
        )
        may_begin = restore is None and resumes is None
        self._staging = staging = Staging(
            endpoint, settings, clock, members, durability, handshake, stores, may_begin=may_begin
        )
        self._wanted = wanted = WantedServers(where, end, members)
        self._moving = Moving(where, end, members, durability, staging, wanted, steps, self._begin)
        barrier = Barrier(clock, steps)
        self._standstill = Standstill(end, members)
        self._meetings = meetings = MeetingRequests(clock, members, steps)
        self._following = FeedRequests(clock, end, self._late.extend)
        self._states = states = StateRequests(clock, members, settings.rpc_deadline_s)
        self._departure = departure = Departure(where, settings, clock, end, members, durability, steps)
        worker_num = None if expected is None else expected[0]
        move = self._moving.errand
        self._status = Status(
            where, lock, clock, end, members, statistics, self._found_job, move, lambda: wanted.wanted, worker_num
        )
        self._resumption = Resumption(
            endpoint, settings.job_id, lock, end, members, initialization, handshake, self._found_job, resumes
        )
        rows = RowRequests(steps)
        checkpoints = CheckpointRequests(lock, clock, end, members, durability is not None)
        self._handlers: dict[str, Callable[[Job, Arrival], None]] = {
            "upload": initialization.upload,
            "ready": initialization.ready,
            "extend": initialization.extend,
            "part": steps.part,
            "push": steps.push,
            "place": steps.place,
            "clip": steps.clip,
            "pull": steps.pull,
            "gather": barrier.gather,
            "claim": checkpoints.claim,
            "release": checkpoints.release,
            "export": checkpoints.export,
            "save": checkpoints.save,
            "settle": checkpoints.finish,
            "load": replacement.load,
            "give": states.give,
            "recall": states.recall,
            "meet": meetings.meet,
            "survey": self._status.survey,
            "shrink": rows.shrink,
            "rank": rows.rank,
            "cut": rows.cut,
            "bye": departure.bye,
            "abort": departure.abort,
        }
        #: does the journal over, a record at a time
        self.redo: Iterator[None] = iter(())
        if durability is not None:
            self.redo = durability.redo(
                self._found_job,
                begin=self._begin,
                make_shard=make_shard,
                begin_with=initialization.begin_with,
                ask=lambda frame: self.handle(frame, nobody),
                hand_out=steps.hand_out_again,
                lose=lambda job, worker: departure.lose(job, worker, []),
            )
            if before_update is not None:
                return
            durability.recover(self.redo, self._found_job)
            self._moving.forget_unfinished(self.job)
            if end.suspended_by is not None:
                raise end.suspended_by
        initialization.go_on(self.job)
        self._resumption.begin()

    def handle(self, frame: Frame, respond: Respond) -> Callable[[], None] | None:
        """Answer a request, now or later; return what is left to do when its answer is on its way."""
        request = frame.message
        kind = request.WhichOneof("kind")
        if kind == "beat":
            respond(self._answer_to_beat(request))
            return None
        if kind == "status":
            respond(Frame(pb.Reply(about=json.dumps(self.status()))))
            return None
        if kind in ("look", "choose") and not self.end.suspended:
            answer = self._resumption.look if kind == "look" else self._resumption.choose
            respond(Frame(answer(request)))
            return None
        outbox: Outbox = []
        if kind in self._following.handlers:
            with self._lock:
                if self.end.suspended:
                    return None
                self._moving.refuse_follower(self.job, request)
                self._following.handlers[kind](self.job, Arrival(frame, respond, outbox))
            self._send(outbox)  # a version that is told of must not go back
            return self._apply_pending
        durability = self.durability
        try:
            self._disk_waits.before(frame)
            with self._lock, self._statistics.request(frame, outbox):
                self.end.end_if_rows_are_lost(self.job, outbox)
                if self.end.suspended:
                    return None  # unanswered, it is asked again when the server is there again
                if kind == "hello":
                    self._handshake.refuse_who_has_left(request.hello.former)  # and has gone over before, perhaps
                    self._moving.refuse_former(self.job, request, kind)
                if self._moving.takes(kind, self.job, Arrival(frame, respond, outbox)):
                    job = self.job
                elif kind == "hello":
                    self._resumption.refuse_early()
                    self._handshake.hello(self.job, Arrival(frame, respond, outbox))
                    job = self.job
                else:
                    handler = self._handlers.get(kind)
                    if handler is None:
                        raise ProtocolError("a request of an unknown kind", where=self._where)
                    self._check_member(request, kind, parting=kind == "bye")
                    job = self.job
                    assert job is not None, "a member exists only with a job"
                    self._steps.make_up(job, kind, request, outbox)
                    if durability is not None:
                        durability.note(job, kind, frame, outbox)
                    handler(job, Arrival(frame, respond, outbox))
                if job is not None:
                    self._answer_ready(job, outbox)
                    if durability is not None:
                        durability.begin_if_due(job)
                self.end.end_if_rows_are_lost(job, outbox)
        except FleetError:
            with self._lock:
                self.end.end_if_rows_are_lost(self.job, outbox)
            if not self.end.suspended:  # else whatever has come of lost rows is nobody's concern
                raise
        finally:
            # A refusal of this request travels as the exception; what became possible before it still leaves.
            self._send(outbox, secure=kind in NOTED or self._reads_are_secure, surely=decides(kind, request))
            self._handle_released()
        return self._apply_pending

    def _answer_to_beat(self, request: Any) -> Frame:
        # One that overtakes nothing may come after the goodbye, whose answer is still on its way.
        self._check_member(request, "beat", parting=True)
        self._statistics.heard(request.worker, request.beat.figures)
        if self.durability is not None:
            self.durability.hear(request)
        self._moving.refuse_left(self.job)
        meeting, broken = (0, 0) if self.job is None else self._meetings.heard(self.job, request)
        wanted = self._wanted.of(request.worker)
        lacks = self._moving.lacks(self.job, request.worker)
        return Frame(pb.Reply(about=self.absent(), meeting=meeting, broken=broken, wanted_servers=wanted, lacks=lacks))

    def _answer_ready(self, job: Job, outbox: Outbox) -> None:
        """Answer what has waited for others, now that this is possible, or refuse it if it never will be."""
        self._standstill.refuse(job, outbox)
        self._states.answer_ready(job, outbox)
        self._meetings.answer_ready(job, outbox)

    def _check_member(self, request: Any, kind: str, *, parting: bool) -> None:
        self._moving.refuse_former(self.job, request, kind)
        self.end.refuse_if_failed(request.worker)
        self._members.check(request, parting=parting)

    def _begin(self, job: Job) -> None:
        self.job = job
        if job.moves.made:
            self._handshake.expect(tuple(map(Endpoint.parse, job.moves.servers)))

    def _found_job(self) -> Job | None:
        return self.job

    # ---------------------------------------------------------------- after a request

    def _handle_released(self) -> None:
        """Handle what had to wait for a move of the job that was given up."""
        for frame, respond in self._moving.released():
            try:
                after = self.handle(frame, respond)
            except Exception as error:
                respond(failure_reply(error))
            else:
                if after is not None:
                    after()

    def _apply_pending(self) -> None:
        """Do, as answers are on their way, what they did not wait for."""
        if self._has_pending or self._is_followed_up:
            with self._lock:
                pass
        if self._late:
            self._send([])
        self._disk_waits.after()

    def _catch_up(self) -> None:
        """Do what is pending before anything else is done under the lock."""
        if self._has_pending:
            assert self.job is not None
            possible: Outbox = []
            self._steps.apply_pending(self.job, possible)
            self._late += possible
        if self.job is not None and self._is_followed_up:
            self._following.attend(self.job)

    @property
    def _has_pending(self) -> bool:
        job = self.job
        return job is not None and job.shard is not None and (job.shard.has_pending or bool(job.rounds.awaiting_rows))

    @property
    def _is_followed_up(self) -> bool:
        """Say whether somebody who follows has waited for what is there."""
        return self.job is not None and self._following.is_due(self.job)

    @property
    def _reads_are_secure(self) -> bool:
        """Say whether replies to questions wait until what was asked for before is safe."""
        job = self.job
        return job is not None and (job.policy.remembers_reads or job.times_kept < job.times_brought)

    def _send(self, outbox: Outbox, *, secure: bool = True, surely: bool = False) -> None:
        """Let replies leave. ``secure`` ones wait until what they acknowledge is as safe as it has to be. Replies to
        mere questions need not wait for what others have asked for: should that be lost, the questions are asked again.
        """
        while self._late:
            outbox.append(self._late.popleft())
        durability, job = self.durability, self.job
        failure = None
        if durability is not None and (secure or surely) and outbox:
            brought = 0 if job is None else job.times_brought
            failure = durability.secure(surely=surely)
            if job is not None and failure is None:
                job.times_kept = max(job.times_kept, brought)
        for respond, frame in outbox:
            respond(frame if failure is None else error_reply(failure))
        if not (self.end.over and self._is_followed_to_the_end):
            self.end.end_if_all_informed()

    @property
    def _is_followed_to_the_end(self) -> bool:
        """Say whether somebody who follows is to have the last version before this process ends."""
        job = self.job
        return job is not None and self.end.failure is None and job.feed.holds_up_the_end(self._clock.now())

    def _cannot_sync(self, failure: FleetError) -> None:
        outbox: Outbox = []
        with self._lock:
            self.end.fail(failure, self.job, outbox)
        self._send(outbox, secure=False)

    # ---------------------------------------------------------------- from outside

    def await_the_first(self) -> None:
        """Expect workers from now on: time passes."""
        self._departure.await_the_first()

    def not_taken_in(self, reason: str) -> None:
        """Note why a job that this server asked for a share has not given it one; empty: it may yet."""
        self._departure.not_taken_in = reason

    def tick(self) -> None:
        """Let time pass."""
        now = self._clock.now()
        outbox: Outbox = []
        with self._lock:
            self.end.end_if_rows_are_lost(self.job, outbox)
            is_left = self._moving.tick(self.job, now, outbox)
            if self._staging.was_filled():
                self._departure.await_the_first()
            if not is_left:
                self._departure.tick(self.job, now, outbox)
            if self.job is not None and not is_left:
                self._steps.make_up_by_heartbeats(self.job, outbox)
                self._answer_ready(self.job, outbox)
                self.job.claims.tick(now, outbox)
                self._following.tick(self.job, now)
        self._send(outbox)
        self._handle_released()
        if self._wanted.cannot_drain:
            self.stop(f"it was to be drained, and the job stays: {self._wanted.cannot_drain}")
        if self.durability is not None:
            self.durability.sync_if_due(now)

    def stop(self, reason: str) -> None:
        """End the job from outside, as a signal does; a job that is kept on disk goes on when its server does."""
        outbox: Outbox = []
        with self._lock:
            if self.durability is not None and not self.end.over:
                self.end.suspend()
                return
            self.end.fail(JobAbortedError(f"server {self._where} was stopped", got=reason), self.job, outbox)
        self._send(outbox)

    def drain(self, reason: str) -> None:
        """Have the job go on without this server, which ends then; or end it, if it cannot."""
        with self._lock:
            is_asked = self._wanted.drain(self.job)
        if not is_asked:
            self.stop(reason)

    def doubts(self) -> list[Endpoint]:
        """Return whom to ask whether the job has moved to other servers, where this one may not have been told."""
        with self._lock:
            return self._moving.doubts(self.job)

    def learn(self, answer: Mapping[str, Any], *, is_first: bool) -> None:
        """Take in what one of those has answered."""
        outbox: Outbox = []
        try:
            with self._lock:
                self._moving.learn(self.job, answer, outbox, is_first=is_first)
        finally:
            self._send(outbox, surely=True)
        self._handle_released()

    def close(self) -> None:
        """Keep what has to be kept, after the last request."""
        if self.durability is not None:
            self.durability.close()

    @property
    def one_that_was_here(self) -> int:
        """Return the incarnation of a worker of the job; 0 if none came."""
        return self._members.one_that_was_here

    @property
    def chosen(self) -> Choice | None:
        """Return what the job goes on from, if this server has been told."""
        return self._resumption.chosen

    @property
    def failure(self) -> FleetError | None:
        """Return why the job ended, or this process does before it, if not well."""
        return self.end.failure or self.end.suspended_by

    def absent(self) -> str:
        """Return which workers have not come yet, in words."""
        return self._status.absent()

    def explain(self) -> str:
        """Return what this server is waiting for, in words."""
        return self._status.explain()

    def status(self) -> dict[str, Any]:
        """Return how the job does, as far as this server sees it, to be shown."""
        return self._status.status()
