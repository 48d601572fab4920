"""The job moves to other servers: rows are copied while it goes on, those servers that there were stand still for what
has changed meanwhile, those to come take over all they have, and one message to the first of the former decides.

A worker drives it (ps/worker/resizing.py). What changes while rows are copied is known by epochs, as for a delta of a
checkpoint. Halted, a server keeps every request but the driver's until the move is over, so what it has stays as it is.
Until the first server has heard that everything is there, the move may be given
up by anybody's death, and the job goes on as it was. From then on it has been made: whoever asks a former server is
told that the job has moved, goes over, and tells the others, which need not have heard of it from the driver.

Durable servers write down that they stand still, what they are filled with, and that the move is made or given up. One
that is killed stands still again when it is there again, and asks the others what has become of the move; what is
copied beside the training it does not know any more, and the driver begins anew.

A process that goes over gets a new incarnation, its former one and 1, on all servers at once. So whatever was sent for
the former arrangement of blocks and rows is never taken for something of the new one, however late it comes.

The caller holds the server's lock.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet.base.cluster import Endpoint
from fleet.errors import (
    FleetError,
    IdentityError,
    MissedError,
    ProtocolError,
    ServerBusyError,
    ServerLostError,
    ServersMovedError,
    UnsupportedError,
)
from fleet.numeric.tensors import WireTensor
from fleet.ps.consistency.membership import Standing
from fleet.ps.server.durability.durability import Durability, is_replaying, note_move
from fleet.ps.server.durability.snapshot import state_of
from fleet.ps.server.durability.state_directory import Kind
from fleet.ps.server.job import Job, Moves
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival, Outbox
from fleet.ps.server.staging import KILLED, MEETINGS, RECORDS, Staging, stale
from fleet.ps.server.step_requests import StepRequests, push_of
from fleet.ps.server.wanted_servers import WantedServers
from fleet.ps.table.given import NOTHING
from fleet.ps.table.reader import Reader
from fleet.ps.table.shard import Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.move_names import ATTEMPT, GIVEN, LACKS, PUSHED, given_cursor, read_given_cursor
from fleet.ps.wire.transport import Respond
from fleet.ps.wire.wire_errors import error_reply

_log = logging.getLogger("fleet.server")

#: Under this name a copy goes on from the epochs of its rounds.
_BASE = "move"
#: What the state of a server that stands still says of pushes beside what waits there: what is in its buffers, how many
#: updates wait for a norm, what comes again, and how far workers had come here before they started again.
BUFFERS, DUE, AGAIN, RENEWED = "buffers", "due", "again", "renewed"


@dataclass
class _Copying:
    """Holds what is copied to other servers: rows that were changed in the epoch ``since`` or later, in this round;
    those of the epoch ``following`` belong to the next one."""

    attempt: str
    request: Any
    shard: Shard
    fingerprint: str
    loads: int
    round: int = 0
    since: int = 0
    following: int = 0
    reader: Reader = field(default_factory=Reader)


@dataclass
class _Halt:
    """Holds who has asked for the standstill, and what has come since."""

    attempt: str
    request: Any
    #: kept until the move is over
    held: list[tuple[Frame, Respond]] = field(default_factory=list)
    #: how far each worker is on other servers; what that takes is let through
    delivered: Mapping[int, int] = field(default_factory=dict)
    #: whether the driver is gone: what has become of the move is known to the first server
    is_orphaned: bool = False
    #: whether this server was killed since, and may not have been told
    is_recalled: bool = False

    def lets_through(self, request: Any) -> bool:
        """Say whether other servers have a push, or are told of one that they have."""
        kind = request.WhichOneof("kind")
        if kind in ("push", "part"):
            return bool(request.step <= self.delivered.get(request.worker, 0))
        return bool(kind == "clip" and not request.clip.parting)

    @property
    def starting(self) -> set[int]:
        """Return the workers whose places other processes wait to take."""
        asked = (frame.message for frame, _ in self.held)
        return {each.worker for each in asked if each.WhichOneof("kind") == "hello"}

    def let_through(self, delivered: Mapping[int, int]) -> list[tuple[Frame, Respond]]:
        """Return, of what was kept, the pushes that other servers have."""
        self.delivered = delivered
        found = [each for each in self.held if self.lets_through(each[0].message)]
        self.held = [each for each in self.held if not self.lets_through(each[0].message)]
        return found


class Moving:
    def __init__(
        self,
        where: str,
        end: JobEnd,
        members: Members,
        durability: Durability | None,
        staging: Staging,
        wanted: WantedServers,
        steps: StepRequests,
        begin: Callable[[Job], None],
    ) -> None:
        """``begin`` makes a job the server's."""
        self._where = where
        self._end = end
        self._members = members
        self._durability = durability
        self._staging = staging
        self._wanted = wanted
        self._steps = steps
        self._begin = begin
        self._copying: _Copying | None = None
        self._halt: _Halt | None = None
        #: which workers have gone over, since the job is on other servers
        self._gone_over: set[int] = set()
        #: what was kept and is to be handled now
        self._released: list[tuple[Frame, Respond]] = []
        self._kinds: dict[str, Callable[[Job | None, Arrival], None]] = {
            "halt": self._let_go,
            "stage": self._get_ready,
            "fill": staging.fill,
            "switch": self._switch,
            "where": self._tell,
            "rearrange": wanted.rearrange,
        }

    # ---------------------------------------------------------------- what else comes meanwhile

    def takes(self, kind: str, job: Job | None, arrival: Arrival) -> bool:
        """Say whether a request has to do with a move, which is done here, or has to wait for its end."""
        handler, halt = self._kinds.get(kind), self._halt
        if kind == "export" and arrival.request.export.checkpoint.startswith(ATTEMPT):
            handler = self._export
        if handler is not None:
            handler(job, arrival)
            return True
        if halt is None or kind == "abort" or halt.lets_through(arrival.request):
            return False
        if kind == "hello" and arrival.worker == halt.request.worker:
            return False  # the driver was killed, and starts again
        if halt.is_orphaned:
            raise self._moved()
        if job is not None and self._members.has(arrival.request):  # else it waits, and the move for what it lacks
            self._steps.make_up(job, kind, arrival.request, arrival.outbox)
        halt.held.append((arrival.frame, arrival.respond))
        return True

    def refuse_former(self, job: Job | None, request: Any, kind: str) -> None:
        """Refuse what was sent before its worker went over, or comes from one that has not."""
        if job is None or is_replaying(self._durability):
            return
        moves = job.moves
        if moves.is_left and kind in ("abort", "bye") and self._members.has(request):
            self._gone_over.add(request.worker)  # it comes nowhere any more
        is_former = request.incarnation in moves.former.get(request.worker, ())
        is_left = moves.is_left and kind not in ("beat", *self._kinds)
        is_late = kind == "hello" and bool(moves.made) and tuple(request.hello.endpoints) != moves.servers
        if is_former or is_left or is_late:
            raise self._moved()

    def lacks(self, job: Job | None, worker: int) -> int:
        """Return the step of a worker's push for which a move waits here, as other servers have it; 0 if for none."""
        halt = self._halt  # heartbeats come without the lock
        if job is None or halt is None:
            return 0
        step = halt.delivered.get(worker, 0)
        return step if job.rounds.gate.clocks.get(worker, step) < step else 0

    def refuse_left(self, job: Job | None) -> None:
        """Tell who is alive that the job has left this server, which stays until all have gone over."""
        if job is not None and job.moves.is_left:
            raise self._moved()

    def refuse_follower(self, job: Job | None, request: Any) -> None:
        """Send somebody who follows the model to the servers that the job has moved to."""
        kind = request.WhichOneof("kind")
        if kind == "follow" and self._halt is not None:  # another server may have told it of those to come
            raise self._is_under_way()
        if kind == "unfollow" or job is None or not job.moves.made:
            return
        here = (job.held().server, len(job.moves.servers))
        if job.moves.is_left or (kind == "follow" and (request.follow.server, request.follow.servers) != here):
            job.feed.send_away(request.incarnation)
            raise self._moved()

    def released(self) -> list[tuple[Frame, Respond]]:
        """Return, once, what was kept during a move that was given up."""
        released, self._released = self._released, []
        return released

    def tick(self, job: Job | None, now: float, outbox: Outbox) -> bool:
        """Look after a move as time passes; return whether this server has no job any more."""
        halt, copying = self._halt, self._copying
        is_left = job is not None and job.moves.is_left
        if halt is None and copying is not None and not self._members.has(copying.request):
            self._end_in_order(job, outbox)
        if halt is not None and job is not None and not halt.is_orphaned and not self._members.has(halt.request):
            halt.is_orphaned = True
            _log.warning("%s: worker %d is gone, which moved the job", self._where, halt.request.worker)
            if job.held().server == 0:
                self._end_in_order(job, outbox)
            else:
                outbox += [(respond, error_reply(self._moved())) for _, respond in halt.held]
                halt.held.clear()
        if job is not None:
            self._wanted.tick(job)
        if is_left and not self._end.over:
            for effect in self._members.tick(now):
                for worker in getattr(effect, "workers", None) or [effect.worker]:  # type: ignore[union-attr]
                    self._members.lose(worker)
            have_gone = self._gone_over.issuperset(self._members.awaited())
            if have_gone and not (job is not None and job.feed.holds_up_the_end(now)):
                _log.info("%s: the job has moved to other servers", self._where)
                self._end.end()
                self._end.inform(self._members.gone())
        return is_left

    def _is_under_way(self) -> FleetError:
        return ServerBusyError("another move to other servers is under way", where=self._where)

    def _moved(self) -> FleetError:
        return ServersMovedError("the job has moved to other servers", where=self._where)

    # ---------------------------------------------------------------- the servers that there were

    def _let_go(self, job: Job | None, arrival: Arrival) -> None:
        """Let a worker copy what is here while the job goes on; or stand still for the rest."""
        self._members.check(arrival.request, parting=False)
        assert job is not None, "a member exists only with a job"
        self._steps.make_up(job, "halt", arrival.request, arrival.outbox)
        if self._halt is not None and self._halt.attempt != arrival.request.halt.attempt:
            raise self._is_under_way()
        if arrival.request.halt.round:
            self._begin_round(job, arrival)
        else:
            self._stand_still(job, arrival)

    def _begin_round(self, job: Job, arrival: Arrival) -> None:
        """Let a worker copy all rows, or those that have changed since the last round, while the job goes on."""
        halt, shard, copying = arrival.request.halt, job.held(), self._copying
        if copying is None or copying.attempt != halt.attempt:
            if halt.round > 1:
                raise stale(self._where, KILLED)
            self._check_may_move(job, arrival.worker)
            fingerprint = job.plans.current.fingerprint
            if copying is not None:
                copying.reader.leave()
            copying = _Copying(halt.attempt, arrival.request, shard, fingerprint, job.progress.loads)
            self._copying = copying
        self._check_copied(job, copying)
        if halt.round > copying.round:
            copying.reader.leave()
            shard.apply_pending()
            copying.round, copying.since, copying.following = halt.round, copying.following, shard.history.next_epoch()
            self._check_removed(copying, copying.since)
            shard.history.goes_on_from(_BASE, *[each for each in (copying.since, copying.following) if each])
        about = {
            "job_id": job.job_id,
            "seed": shard.seed,
            "options": shard.options,
            "former": [plan.spec.to_json() for plan in job.plans.former],
            "is_durable": self._durability is not None,
        }
        cursor = shard.first_rows(copying.since)
        arrival.answer(pb.Reply(version=job.rounds.gate.version, cursor=cursor, about=json.dumps(about)))

    def _check_removed(self, copying: _Copying, since: int) -> None:
        if since and not copying.shard.history.knows_removed(since):
            raise stale(self._where, "too many rows have left for all of them to be known")

    def _check_copied(self, job: Job, copying: _Copying) -> None:
        found = job.shard, job.plans.current.fingerprint, job.progress.loads
        if found != (copying.shard, copying.fingerprint, copying.loads):
            raise stale(self._where, "values were replaced, or parameters joined")

    def _export(self, job: Job | None, arrival: Arrival) -> None:
        """Answer with a piece of what is copied."""
        self._members.check(arrival.request, parting=False)
        copying = self._copying
        assert job is not None, "a member exists only with a job"
        if copying is None or copying.attempt != arrival.request.export.checkpoint:
            raise stale(self._where, KILLED)
        self._check_copied(job, copying)
        if arrival.request.export.cursor.startswith(PUSHED):
            self._export_pushed(job, arrival)
            return
        if arrival.request.export.cursor.startswith(GIVEN):
            self._export_given(job, arrival)
            return
        piece = copying.shard.export(arrival.request.export.cursor, copying.since, reader=copying.reader)
        about = json.dumps({"tensors": list(piece.tensors), **piece.about})
        reply = pb.Reply(version=job.rounds.gate.version, cursor=piece.next_cursor, about=about)
        arrival.answer(reply, [WireTensor.of(tensor) for tensor in piece.tensors.values()])

    def _export_pushed(self, job: Job, arrival: Arrival) -> None:
        """Answer with the part here of a push that waits to become part of an update; with nothing if there is none, as
        its worker has died on its way between two servers."""
        which = arrival.request.export.cursor.removeprefix(PUSHED)
        contribution = next((each for key, each in job.rounds.pushed.items() if "{}:{}".format(*key) == which), None)
        reply = pb.Reply(version=job.rounds.gate.version, about="{}")
        if contribution is None:
            arrival.answer(reply)
            return
        present, flats = contribution.dense
        weights = contribution.weights or {}
        about = {
            "options": contribution.options,
            "present": present.hex(),
            "tables": [*contribution.rows],
            "weighed": [*weights],
            "used": sorted(contribution.used),
            "read_at": contribution.read_at,
            "rows_read_at": [contribution.rows_read_at[table] for table in contribution.rows],
            "own_s": contribution.own_s,
            "now": contribution.sent_at,
        }
        reply.about = json.dumps(about)
        rows = [WireTensor.of(each) for pair in contribution.rows.values() for each in pair]
        arrival.answer(reply, [*map(WireTensor.of, flats.values()), *rows, *map(WireTensor.of, weights.values())])

    def _export_given(self, job: Job, arrival: Arrival) -> None:
        """Answer with a piece of what a worker was given; with nothing if it has gone meanwhile."""
        worker, table, start = read_given_cursor(arrival.request.export.cursor)
        readers = job.held().readers
        piece = NOTHING if readers is None else readers.piece((worker, table), start)
        cursor = "" if piece.stop is None else given_cursor(worker, table, piece.stop)
        about = json.dumps({GIVEN: [worker, table], "dtypes": [*piece.dtypes]})
        reply = pb.Reply(version=job.rounds.gate.version, cursor=cursor, about=about)
        arrival.answer(reply, [WireTensor.of(each) for each in piece.tensors])

    def _stand_still(self, job: Job, arrival: Arrival) -> None:
        request, copying = arrival.request, self._copying
        if self._halt is None and not is_replaying(self._durability):
            if copying is None or copying.attempt != request.halt.attempt:
                raise stale(self._where, KILLED)
            self._check_may_move(job, request.worker)
            self._check_copied(job, copying)
            self._check_version(job, request)
            self._check_removed(copying, copying.following)
            for endpoint in request.halt.endpoints:  # whom it may have to ask
                Endpoint.parse(endpoint)
        note_move(self._durability, job, arrival.frame, arrival.outbox)
        if self._halt is None:
            job.background.stop()
            self._halt = _Halt(request.halt.attempt, request, is_recalled=is_replaying(self._durability))
            if copying is not None:
                copying.since = copying.following
        self._take_delivered(job, self._halt, arrival)
        if is_replaying(self._durability):
            return
        shard = job.held()
        shard.apply_pending()
        # Who waits for the answer to a push still has what was in it. Other pushes wait in a buffer, and move.
        again = [each for each in job.rounds.pushed if not job.policy.fills_buffers or _is_awaited(job, *each)]
        open_pushes = {
            ("push", worker, step): Frame(pb.Request(worker=worker, step=step, push=pb.Push(steps=1)))
            for worker, step in again
        }
        state = state_of(job, shard, self._members.dump(), open_pushes, anew=True)
        state[BUFFERS], state[DUE] = job.rounds.gate.buffers(0), len(job.rounds.due)
        state[PUSHED], state[AGAIN] = [each for each in job.rounds.pushed if each not in again], again
        state[GIVEN] = [] if shard.readers is None else shard.readers.keys
        state[RENEWED] = job.moves.renewed
        state[LACKS] = self._durability is not None and self._durability.may_lack_steps
        records: list[tuple[str, bytes]] = []
        if shard.server == 0:
            for number, outcome in job.reductions.outcomes():
                outcome.message.version = number
                records.append((Kind.OUTCOME.name, b"".join(outcome.buffers())))
            records += [(Kind.STATE.name, b"".join(frame.buffers())) for frame in job.states.dump()]
            state[MEETINGS] = job.meetings.dump()
        if sum(len(data) for _, data in records) > job.most_bytes // 2:
            raise UnsupportedError(
                "the states of the workers' own objects are too large to move with the job",
                where=self._where,
                expected=f"at most {job.most_bytes >> 21} MiB (half of FLEET_MAX_MESSAGE_MB)",
            )
        about = json.dumps({**state, RECORDS: [kind for kind, _ in records]})
        reply = pb.Reply(version=job.rounds.gate.version, about=about)
        arrival.answer(reply, [_tensor_of(data) for _, data in records])

    def _take_delivered(self, job: Job, halt: _Halt, arrival: Arrival) -> None:
        """Take the pushes that other servers have, into the buffers in which they are there; raise as long as some have
        not come."""
        told = arrival.request.halt
        delivered = dict(told.delivered)
        self._released += halt.let_through(delivered)
        clocks = job.rounds.gate.clocks
        behind = [worker for worker, step in delivered.items() if clocks.get(worker, step) < step]
        if again := sorted(halt.starting.intersection(behind)):
            raise stale(self._where, f"workers start again that had reached other servers alone: {again}")
        if behind or not self._steps.place_all(job, told, arrival.worker, arrival.outbox):
            raise ServerBusyError("pushes that other servers have are on their way", where=self._where, got=behind)

    def _check_may_move(self, job: Job, worker: int) -> None:
        if not job.is_whole or job.plans.outgrown:
            # They have all joined after a step, for which others wait that whoever moves the job has not taken.
            raise MissedError(
                "parameters join the job, which cannot move meanwhile",
                where=self._where,
                todo="Call resize_servers() after the next step.",
            )
        if others := [name for name, writer in job.claims.dump()["begun"].items() if writer != worker]:
            raise ServerBusyError(
                "the job does something that has to end before it moves", where=self._where, got=", ".join(others)
            )

    def _check_version(self, job: Job, request: Any) -> None:
        is_elsewhere = job.policy.shares_steps and request.halt.version != job.rounds.gate.version
        if is_elsewhere or (job.rounds.due and not job.policy.fills_buffers):
            raise ProtocolError(
                "the job went on while it was to stand still",
                where=self._where,
                expected=f"version {request.halt.version}",
                got=f"version {job.rounds.gate.version}",
            )

    def _get_ready(self, job: Job | None, arrival: Arrival) -> None:
        self._staging.get_ready(job, arrival, "" if self._copying is None else self._copying.attempt)

    # ---------------------------------------------------------------- the end of a move

    def _switch(self, job: Job | None, arrival: Arrival) -> None:
        """Make the move, or give it up."""
        switch, worker, halt, stage = arrival.request.switch, arrival.worker, self._halt, self._staging.stage
        is_begun = any(each is not None and each.attempt == switch.attempt for each in (self._copying, halt, stage))
        is_ready = is_begun and (job is None or halt is not None) and (stage is None or stage.is_whole)
        is_first = job is not None and halt is not None and job.held().server == 0
        is_driver = halt is not None and self._members.has(arrival.request) and halt.request.worker == worker
        if switch.given_up:
            if is_begun and (is_driver or not is_first or is_replaying(self._durability)):
                self._give_up(job, arrival.outbox)
        elif job is not None and switch.attempt == job.moves.made:
            if job.moves.is_left:
                note_move(self._durability, job, arrival.frame, arrival.outbox)
            self._gone_over.add(worker)
        elif job is not None and job.moves.has_made(switch.attempt):
            pass  # somebody comes late, who hears of the others here
        elif not is_ready:
            raise ServerLostError(
                "this server does not know what it was to take over: it was started again, or has given up",
                where=self._where,
            )
        elif is_first and not is_driver:
            raise IdentityError("only the worker that moves a job decides that it has moved", where=self._where)
        else:
            note_move(self._durability, job, arrival.frame, arrival.outbox)
            has_come = self._members.has(arrival.request)  # by this one: a server that has asked has nobody's word
            self._make(job, switch, arrival.outbox)
            if has_come:
                self._gone_over.add(worker)
        arrival.answer(pb.Reply())

    def doubts(self, job: Job | None) -> list[Endpoint]:
        """Return whom this server is to ask whether the job has moved, the first server before the others: it was
        killed while it stood still."""
        halt = self._halt
        if halt is None or not halt.is_recalled or job is None or job.held().server == 0:
            return []
        return [Endpoint.parse(each) for each in dict.fromkeys(halt.request.halt.endpoints) if each != self._where]

    def learn(self, job: Job | None, answer: Mapping[str, Any], outbox: Outbox, *, is_first: bool) -> None:
        """Take in what another server says of a move, which the first one decides."""
        halt = self._halt
        if halt is None:
            return
        if any(halt.attempt == made for made, _ in answer["past"]):
            switch = pb.Switch(attempt=halt.attempt, endpoints=answer["servers"])
            note_move(self._durability, job, Frame(pb.Request(switch=switch)), outbox)
            self._make(job, switch, outbox)
        elif is_first and answer["halted"] != halt.attempt:
            self._give_up(job, outbox)

    def _make(self, job: Job | None, switch: Any, outbox: Outbox) -> None:
        halt, stage = self._halt, self._staging.stage
        if job is not None:
            job.feed.fail(self._moved())
        waiting = [each.respond for each in job.abandon()] if job is not None else []
        waiting += [respond for _, respond in halt.held] if halt is not None else []
        outbox += [(respond, error_reply(self._moved())) for respond in waiting]
        self._forget()
        self._gone_over = set()
        self._wanted.are_made()
        servers = tuple(switch.endpoints)
        if stage is None:
            assert job is not None, "a server takes over a job, or is left by one"
            job.moves.note(switch.attempt, servers)
            job.moves.is_left = True
            return
        records, moves, went_over = [], stage.job.moves, set()
        moves.note(switch.attempt, servers)
        for record in stage.members:
            number, standing, incarnation, label = record
            if Standing(standing) is Standing.LIVE:
                moves.former.setdefault(number, set()).add(incarnation)
                record = (number, standing, incarnation + 1, label)
                went_over.add(number)
            records.append(record)
        incarnations = {number: incarnation for number, _, incarnation, _ in records}
        for frame in stage.pushed:
            frame.message.incarnation = incarnations.get(frame.message.worker, 0)
            if self._durability is not None:
                self._durability.takes_over(frame)
        self._members.restore(stage.job.plans.current.spec.settings, records)
        if stage.meetings:
            stage.job.meetings.restore(stage.meetings, went_over)
        stage.shard.take_over()
        self._begin(stage.job)
        if self._durability is not None:
            self._durability.has_moved(stage.job, may_lack_steps=stage.may_lack_steps)
        _log.info("%s: the job has moved, and this is server %d of %d", self._where, stage.shard.server, len(servers))

    def _give_up(self, job: Job | None, outbox: Outbox) -> None:
        """Go on as if nothing had happened."""
        halt, stage = self._halt, self._staging.stage
        if job is None and self._durability is not None:
            self._durability.forget_moves()
        elif (under_way := halt or stage) is not None:
            switch = pb.Switch(attempt=under_way.attempt, given_up=True)
            note_move(self._durability, job, Frame(pb.Request(switch=switch)), outbox)
        self._forget()
        if job is not None:
            job.moves.is_noted = False
        if halt is not None:
            self._released += halt.held

    def _end_in_order(self, job: Job | None, outbox: Outbox) -> None:
        with suppress(FleetError):  # that it cannot be written down has ended the job
            self._give_up(job, outbox)

    def forget_unfinished(self, job: Job | None) -> None:
        """Forget what a journal had of a copy that this server does not go on with, as it was killed."""
        if job is not None and self._halt is None:
            self._staging.forget()
            job.moves.is_noted = False

    def _forget(self) -> None:
        if self._copying is not None:
            self._copying.shard.history.leave(_BASE)
            self._copying.reader.leave()
        self._copying = self._halt = None
        self._staging.forget()

    # ---------------------------------------------------------------- what is told of it

    def errand(self, job: Job | None) -> str:
        """Say what this server does for a move, if anything."""
        if self._halt is not None:
            return "standing still, as the job moves to other servers"
        if self._copying is not None:
            return f"copied to other servers, round {self._copying.round}"
        if self._staging.stage is not None:
            return f"taking over rows, {sum(map(len, self._staging.stage.shard.tables)):,} so far"
        return "to be drained" if self._wanted.is_drained(job) else ""

    def _tell(self, job: Job | None, arrival: Arrival) -> None:
        """Say where the job is, whether it is about to move, and who starts again meanwhile."""
        is_of_another = self._members.knows(arrival.request.where.former)
        moves = Moves() if job is None or is_of_another else job.moves
        about = {
            "servers": moves.servers if moves.made else (),
            "past": moves.past,
            "halted": "" if self._halt is None else self._halt.attempt,
            "starting": () if self._halt is None else sorted(self._halt.starting),
        }
        arrival.answer(pb.Reply(about=json.dumps(about)))


def _is_awaited(job: Job, worker: int, step: int) -> bool:
    """Say whether a worker waits for the answer to a push."""
    return any(each.worker == worker and each.what == push_of(step) for each in job.rounds.parked.values())


def _tensor_of(data: bytes) -> WireTensor:
    return WireTensor.of(np.frombuffer(data, np.uint8))
