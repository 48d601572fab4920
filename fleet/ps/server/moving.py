"""The job moves to other servers: rows are copied while it goes on, those servers that there were stand still for what
has changed meanwhile, those to come take over all they have, and one message to the first of the former decides.

A worker drives it (ps/worker/resizing.py). What changes while rows are copied is known by epochs, as for a delta of a
checkpoint. Halted, a server keeps every request but the driver's until the move is over, so what it has stays as it is.
Until the first server has heard that everything is there, the move may be given
up by anybody's death, and the job goes on as it was. From then on it has been made: whoever asks a former server is
told that the job has moved, goes over, and tells the others, which need not have heard of it from the driver.

A process that goes over gets a new incarnation, its former one and 1, on all servers at once. So whatever was sent for
the former arrangement of blocks and rows is never taken for something of the new one, however late it comes.

The caller holds the server's lock.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import (
    FleetError,
    IdentityError,
    MissedError,
    NotInitializedError,
    PlanMismatchError,
    ProtocolError,
    ServerBusyError,
    ServerLostError,
    ServersMovedError,
    UnsupportedError,
)
from fleet.numeric.tensors import WireTensor
from fleet.plan.specs import JobSpec
from fleet.ps.consistency.membership import MemberRecord, Standing
from fleet.ps.consistency.movable import refuse_unmovable
from fleet.ps.server.admission import check_fingerprint, check_job_id, check_share
from fleet.ps.server.durability.snapshot import recall, state_of, take_up
from fleet.ps.server.durability.state_directory import Kind
from fleet.ps.server.handshake import Handshake
from fleet.ps.server.job import Job, new_job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival, Outbox
from fleet.ps.server.refill import Refill
from fleet.ps.table.shard import MakeShard, Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame, read_frame
from fleet.ps.wire.transport import Respond
from fleet.ps.wire.wire_errors import error_reply

_log = logging.getLogger("fleet.server")

#: So many may be asked for.
_MOST_SERVERS = 4096
#: What travels beside the state of a job, from the first server alone: outcomes of gatherings, states of own objects.
_RECORDS = "records"


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

    def lets_through(self, request: Any) -> bool:
        """Say whether other servers have a push."""
        is_push = request.WhichOneof("kind") in ("push", "part")
        return is_push and request.step <= self.delivered.get(request.worker, 0)

    def let_through(self, delivered: Mapping[int, int]) -> list[tuple[Frame, Respond]]:
        """Return, of what was kept, the pushes that other servers have."""
        self.delivered = delivered
        found = [each for each in self.held if self.lets_through(each[0].message)]
        self.held = [each for each in self.held if not self.lets_through(each[0].message)]
        return found


@dataclass
class _Stage:
    """Holds the job as this server is to have it."""

    attempt: str
    job: Job
    shard: Shard
    refill: Refill
    members: Sequence[MemberRecord] = ()
    filled: int = 0
    is_whole: bool = False


class Moving:
    def __init__(
        self,
        endpoint: Endpoint,
        settings: ProcessSettings,
        clock: Clock,
        end: JobEnd,
        members: Members,
        handshake: Handshake,
        make_shard: MakeShard,
        begin: Callable[[Job], None],
        *,
        may_begin: bool,
        is_durable: bool,
    ) -> None:
        """``begin`` makes a job the server's; ``may_begin`` says that this process was given nothing to begin with."""
        self._endpoint = endpoint
        self._where = str(endpoint)
        self._settings = settings
        self._clock = clock
        self._end = end
        self._members = members
        self._handshake = handshake
        self._make_shard = make_shard
        self._begin = begin
        self._may_begin = may_begin
        self._is_durable = is_durable
        self._copying: _Copying | None = None
        self._halt: _Halt | None = None
        self._stage: _Stage | None = None
        #: whether this server has heard of what it is to take over, since it was asked last
        self._was_filled = False
        #: the last move that was made, and all servers since
        self._made = ""
        self._servers: tuple[str, ...] = ()
        #: which servers somebody outside wants the job to have, and why they were not made that the last time
        self._wanted: tuple[str, ...] = ()
        self._refusal = ""
        #: whether the job is to go on without this server
        self._drains = False
        #: whether the job is on other servers now, and which workers have gone over
        self._is_left = False
        self._gone_over: set[int] = set()
        #: worker -> the incarnations that it had before it went over
        self._former: dict[int, set[int]] = {}
        #: what was kept and is to be handled now
        self._released: list[tuple[Frame, Respond]] = []
        self._kinds: dict[str, Callable[[Job | None, Arrival], None]] = {
            "halt": self._let_go,
            "stage": self._get_ready,
            "fill": self._fill,
            "switch": self._switch,
            "where": self._tell,
            "rearrange": self._rearrange,
        }

    # ---------------------------------------------------------------- what else comes meanwhile

    def takes(self, kind: str, job: Job | None, arrival: Arrival) -> bool:
        """Say whether a request has to do with a move, which is done here, or has to wait for its end."""
        handler, halt, copying = self._kinds.get(kind), self._halt, self._copying
        if kind == "export" and copying is not None and arrival.request.export.checkpoint == copying.attempt:
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
        halt.held.append((arrival.frame, arrival.respond))
        return True

    def refuse_former(self, request: Any, kind: str) -> None:
        """Refuse what was sent before its worker went over, or comes from one that has not."""
        is_former = request.incarnation in self._former.get(request.worker, ())
        is_left = self._is_left and kind not in ("beat", *self._kinds)
        is_late = kind == "hello" and bool(self._servers) and tuple(request.hello.endpoints) != self._servers
        if is_former or is_left or is_late:
            raise self._moved()

    def refuse_follower(self, job: Job | None, request: Any) -> None:
        """Send somebody who follows the model to the servers that the job has moved to."""
        kind = request.WhichOneof("kind")
        if kind == "unfollow" or job is None or not self._servers:
            return
        here = (job.held().server, len(self._servers))
        if self._is_left or (kind == "follow" and (request.follow.server, request.follow.servers) != here):
            job.feed.send_away(request.incarnation)
            raise self._moved()

    def released(self) -> list[tuple[Frame, Respond]]:
        """Return, once, what was kept during a move that was given up."""
        released, self._released = self._released, []
        return released

    def tick(self, job: Job | None, now: float, outbox: Outbox) -> bool:
        """Look after a move as time passes; return whether this server has no job any more."""
        halt, copying = self._halt, self._copying
        if halt is None and copying is not None and not self._members.has(copying.request):
            self._give_up()
        if halt is not None and job is not None and not halt.is_orphaned and not self._members.has(halt.request):
            halt.is_orphaned = True
            _log.warning("%s: worker %d is gone, which moved the job", self._where, halt.request.worker)
            if job.held().server == 0:
                self._give_up()
            else:
                outbox += [(respond, error_reply(self._moved())) for _, respond in halt.held]
                halt.held.clear()
        if self._drains and job is not None and not (self._is_left or self._wanted or self._refusal):
            self._wanted = self._others()  # again, if the job has moved elsewhere meanwhile
        if self._is_left and not self._end.over:
            for effect in self._members.tick(now):
                for worker in getattr(effect, "workers", None) or [effect.worker]:  # type: ignore[union-attr]
                    self._members.lose(worker)
            has_followers = job is not None and job.feed.holds_up_the_end(now)
            if self._gone_over.issuperset(self._members.awaited()) and not has_followers:
                _log.info("%s: the job has moved to other servers", self._where)
                self._end.end()
                self._end.inform(self._members.gone())
        return self._is_left

    def _moved(self) -> FleetError:
        return ServersMovedError("the job has moved to other servers", where=self._where)

    # ---------------------------------------------------------------- the servers that there were

    def _let_go(self, job: Job | None, arrival: Arrival) -> None:
        """Let a worker copy what is here while the job goes on; or stand still for the rest."""
        self._members.check(arrival.request, parting=False)
        assert job is not None, "a member exists only with a job"
        if self._halt is not None and self._halt.attempt != arrival.request.halt.attempt:
            raise ServerBusyError("another move to other servers is under way", where=self._where)
        if arrival.request.halt.round:
            self._begin_round(job, arrival)
        else:
            self._stand_still(job, arrival)

    def _begin_round(self, job: Job, arrival: Arrival) -> None:
        """Let a worker copy all rows, or those that have changed since the last round, while the job goes on."""
        halt, shard, copying = arrival.request.halt, job.held(), self._copying
        if copying is None or copying.attempt != halt.attempt:
            if halt.round > 1:
                raise self._is_stale()
            self._check_may_move(job, arrival.worker)
            fingerprint = job.plans.current.fingerprint
            copying = _Copying(halt.attempt, arrival.request, shard, fingerprint, job.progress.loads)
            self._copying = copying
        self._check_copied(job, copying)
        if halt.round > copying.round:
            shard.apply_pending()
            copying.round, copying.since, copying.following = halt.round, copying.following, shard.history.next_epoch()
        about = {
            "job_id": job.job_id,
            "seed": shard.seed,
            "options": shard.options,
            "former": [plan.spec.to_json() for plan in job.plans.former],
        }
        cursor = shard.first_rows(copying.since)
        arrival.answer(pb.Reply(version=job.rounds.gate.version, cursor=cursor, about=json.dumps(about)))

    def _check_copied(self, job: Job, copying: _Copying) -> None:
        found = job.shard, job.plans.current.fingerprint, job.progress.loads
        if found != (copying.shard, copying.fingerprint, copying.loads):
            raise self._is_stale()

    def _is_stale(self) -> FleetError:
        return MissedError("values were replaced, or parameters joined, while the job was copied", where=self._where)

    def _export(self, job: Job | None, arrival: Arrival) -> None:
        """Answer with a piece of what is copied."""
        self._members.check(arrival.request, parting=False)
        copying = self._copying
        assert job is not None, "a member exists only with a job"
        assert copying is not None, "it is asked for by its name"
        self._check_copied(job, copying)
        piece = copying.shard.export(arrival.request.export.cursor, copying.since)
        about = json.dumps({"tensors": list(piece.tensors), **piece.about})
        reply = pb.Reply(version=job.rounds.gate.version, cursor=piece.next_cursor, about=about)
        arrival.answer(reply, [WireTensor.of(tensor) for tensor in piece.tensors.values()])

    def _stand_still(self, job: Job, arrival: Arrival) -> None:
        request, copying = arrival.request, self._copying
        if self._halt is None:
            if copying is None or copying.attempt != request.halt.attempt:
                raise self._is_stale()
            self._check_may_move(job, request.worker)
            self._check_copied(job, copying)
            self._check_version(job, request)
            job.background.give_up()
            self._halt = _Halt(copying.attempt, request)
            copying.since = copying.following
        self._take_delivered(job, self._halt, dict(request.halt.delivered))
        shard = job.held()
        shard.apply_pending()
        open_pushes = {
            ("push", worker, step): Frame(pb.Request(worker=worker, step=step, push=pb.Push(steps=1)))
            for worker, step in job.rounds.pushed
        }
        state = state_of(job, shard, self._members.dump(), open_pushes)
        records: list[tuple[str, bytes]] = []
        if shard.server == 0:
            for number, outcome in job.reductions.outcomes():
                outcome.message.version = number
                records.append((Kind.OUTCOME.name, b"".join(outcome.buffers())))
            records += [(Kind.STATE.name, b"".join(frame.buffers())) for frame in job.states.dump()]
        if sum(len(data) for _, data in records) > job.most_bytes // 2:
            raise UnsupportedError(
                "the states of the workers' own objects are too large to move with the job",
                where=self._where,
                expected=f"at most {job.most_bytes >> 21} MiB (half of FLEET_MAX_MESSAGE_MB)",
            )
        about = json.dumps({**state, _RECORDS: [kind for kind, _ in records]})
        reply = pb.Reply(version=job.rounds.gate.version, about=about)
        arrival.answer(reply, [_tensor_of(data) for _, data in records])

    def _take_delivered(self, job: Job, halt: _Halt, delivered: Mapping[int, int]) -> None:
        """Take the pushes that other servers have; raise as long as some have not come."""
        self._released += halt.let_through(delivered)
        clocks = job.rounds.gate.clocks
        behind = [worker for worker, step in delivered.items() if clocks.get(worker, step) < step]
        if behind:
            raise ServerBusyError("pushes that other servers have are on their way", where=self._where, got=behind)

    def _check_may_move(self, job: Job, worker: int) -> None:
        refuse_unmovable(job.plans.current.spec, is_durable=self._is_durable)
        others = [name for name, writer in job.claims.dump()["begun"].items() if writer != worker]
        if not job.is_whole or job.plans.outgrown or others:
            doing = ", ".join(others) or "parameters join the job"
            raise ServerBusyError(
                "the job does something that has to end before it moves", where=self._where, got=doing
            )

    def _check_version(self, job: Job, request: Any) -> None:
        is_elsewhere = job.policy.shares_steps and request.halt.version != job.rounds.gate.version
        if is_elsewhere or job.rounds.due or job.cuts:
            raise ProtocolError(
                "the job went on while it was to stand still",
                where=self._where,
                expected=f"version {request.halt.version}",
                got=f"version {job.rounds.gate.version}",
            )

    # ---------------------------------------------------------------- the servers to come

    def _get_ready(self, job: Job | None, arrival: Arrival) -> None:
        stage, self._was_filled = arrival.request.stage, True
        if self._stage is not None and self._stage.attempt == stage.attempt:
            arrival.answer(pb.Reply())
            return
        if job is not None and (self._copying is None or self._copying.attempt != stage.attempt):
            raise ServerBusyError("this server has a job already", where=self._where)
        if self._is_left or (job is None and (self._is_durable or not self._may_begin)):
            raise UnsupportedError(
                "this server was started with a state of its own, and cannot take over another one",
                where=self._where,
                todo="Start it anew, without a checkpoint and without FLEET_DURABLE_DIR.",
            )
        spec, server = JobSpec.from_json(stage.spec), stage.server
        refuse_unmovable(spec, is_durable=self._is_durable)
        self._check_servers(stage, spec, is_new=job is None)
        try:
            told = json.loads(stage.about)
            check_job_id(self._endpoint, self._settings.job_id, told["job_id"])
            most_bytes = self._settings.security.max_message_bytes
            new = new_job(spec, told["job_id"], self._where, most_bytes, self._settings.rpc_deadline_s)
            plan, options = new.plans.current, tuple(told["options"])
            check_fingerprint(self._endpoint, plan, stage.fingerprint)
            check_share(self._endpoint, plan, server, options, most_bytes)
            shard = self._make_shard(plan, server, told["seed"], options)
        except (LookupError, TypeError, ValueError) as error:
            raise self._unreadable(error) from None
        self._stage = _Stage(stage.attempt, new, shard, Refill(shard, self._where))
        arrival.answer(pb.Reply())

    def _unreadable(self, error: Exception) -> FleetError:
        if isinstance(error, FleetError):
            return error
        return ProtocolError("the state of a job cannot be read", where=self._where, got=repr(error))

    def _check_servers(self, stage: Any, spec: JobSpec, *, is_new: bool) -> None:
        known, endpoints = [str(each) for each in self._handshake.expected_servers], list(stage.endpoints)
        fits = stage.server < len(endpoints) == spec.settings.server_num
        if not fits or (is_new and known and known != endpoints) or (known and endpoints[stage.server] != self._where):
            raise PlanMismatchError(
                "this server was started with another list of servers than the job is to have",
                where=self._where,
                expected=", ".join(known),
                got=", ".join(endpoints[:100])[:4000],
                todo="Start new servers with the list that the job is to have.",
            )

    def _fill(self, job: Job | None, arrival: Arrival) -> None:
        del job
        fill, stage, self._was_filled = arrival.request.fill, self._stage, True
        if stage is None or stage.attempt != fill.attempt:
            raise MissedError("a server was started again, or has given up, while the job moved", where=self._where)
        if fill.number > stage.filled:
            if fill.state:
                self._complete(stage, fill.state, arrival.tensors)
            else:
                stage.refill.add(json.loads(fill.about), arrival.tensors)
            stage.filled = fill.number
        arrival.answer(pb.Reply())

    def _complete(self, stage: _Stage, text: str, records: Sequence[WireTensor]) -> None:
        """Let what this server has been filled with be as far as the job that it comes from."""
        servers = stage.job.plans.current.spec.settings.server_num
        try:
            stage.refill.end()
            state = json.loads(text)
            former = [JobSpec.from_json(each).on_servers(servers) for each in state["former"]]
            state["former"] = [each.to_json() for each in former]
            stage.shard.set_options(state["options"])
            take_up(stage.job, stage.shard, state, self._clock.now())
            for kind, tensor in zip(state[_RECORDS], records, strict=True):
                recall(stage.job, Kind[kind], read_frame(pb.Reply, [tensor.numpy().tobytes()]))
            stage.members = [_member(record) for record in state["members"]]
        except (LookupError, TypeError, ValueError) as error:
            raise self._unreadable(error) from None
        stage.is_whole = True

    def was_filled(self) -> bool:
        """Say, once, whether somebody has been filling this server, which has no job yet."""
        was_filled, self._was_filled = self._was_filled, False
        return was_filled

    # ---------------------------------------------------------------- the end of a move

    def _switch(self, job: Job | None, arrival: Arrival) -> None:
        """Make the move, or give it up."""
        switch, worker, halt, stage = arrival.request.switch, arrival.worker, self._halt, self._stage
        copying = self._copying
        is_begun = switch.attempt in (copying and copying.attempt, stage and stage.attempt)
        is_ready = is_begun and (job is None or halt is not None) and (stage is None or stage.is_whole)
        is_first = job is not None and halt is not None and job.held().server == 0
        is_driver = halt is not None and self._members.has(arrival.request) and halt.request.worker == worker
        if switch.given_up:
            if is_begun and (is_driver or not is_first):
                self._give_up()
        elif switch.attempt == self._made:
            self._gone_over.add(worker)
        elif not is_ready:
            raise ServerLostError(
                "this server does not know what it was to take over: it was started again, or has given up",
                where=self._where,
            )
        elif is_first and not is_driver:
            raise IdentityError("only the worker that moves a job decides that it has moved", where=self._where)
        else:
            self._make(job, switch, arrival.outbox)
            self._gone_over.add(worker)
        arrival.answer(pb.Reply())

    def _make(self, job: Job | None, switch: Any, outbox: Outbox) -> None:
        halt, stage = self._halt, self._stage
        waiting = [each.respond for each in job.abandon()] if job is not None else []
        waiting += [respond for _, respond in halt.held] if halt is not None else []
        outbox += [(respond, error_reply(self._moved())) for respond in waiting]
        self._copying = self._halt = self._stage = None
        self._made, self._servers, self._gone_over = switch.attempt, tuple(switch.endpoints), set()
        self._wanted, self._refusal = (), ""
        if stage is None:
            self._is_left = True
            return
        records = []
        for record in stage.members:
            number, standing, incarnation, label = record
            if Standing(standing) is Standing.LIVE:
                self._former.setdefault(number, set()).add(incarnation)
                record = (number, standing, incarnation + 1, label)
            records.append(record)
        self._members.restore(stage.job.plans.current.spec.settings, records)
        self._handshake.expect(tuple(map(Endpoint.parse, self._servers)))
        self._begin(stage.job)
        _log.info(
            "%s: the job has moved, and this is server %d of %d", self._where, stage.shard.server, len(self._servers)
        )

    def _give_up(self) -> None:
        """Go on as if nothing had happened."""
        halt = self._halt
        self._copying = self._halt = self._stage = None
        if halt is not None:
            self._released += halt.held

    def drain(self, job: Job | None) -> bool:
        """Have the job go on without this server; return whether it can be asked to."""
        if job is None or self._end.over or not self._others():
            return False
        try:
            refuse_unmovable(job.plans.current.spec, is_durable=self._is_durable)
        except UnsupportedError as error:
            _log.warning("%s: the job cannot go on without this server: %s", self._where, error)
            return False
        self._drains, self._refusal = True, ""
        return True

    @property
    def cannot_drain(self) -> str:
        """Return why the job does not go on without this server, which was to be drained; empty if it may."""
        return self._refusal if self._drains else ""

    def _others(self) -> tuple[str, ...]:
        servers = self._servers or tuple(str(each) for each in self._handshake.expected_servers)
        return tuple(each for each in servers if each != self._where)

    def errand(self) -> str:
        """Say what this server does for a move, if anything."""
        if self._halt is not None:
            return "standing still, as the job moves to other servers"
        if self._copying is not None:
            return f"copied to other servers, round {self._copying.round}"
        if self._stage is not None:
            return f"taking over rows, {sum(map(len, self._stage.shard.tables)):,} so far"
        return "to be drained" if self._drains and not self._is_left else ""

    def wanted_of(self, worker: int) -> tuple[str, ...]:
        """Return the servers that a worker is to move the job to: the first that is there is told. Takes no lock."""
        wanted = self._wanted
        return wanted if wanted and worker == min(self._members.awaited(), default=-1) else ()

    def _rearrange(self, job: Job | None, arrival: Arrival) -> None:
        """Note which servers the job is to have, or why it cannot have them, and tell how that stands."""
        asked, servers = arrival.request.rearrange, self._servers
        servers = servers or tuple(str(each) for each in self._handshake.expected_servers)
        if job is None and not self._is_left:
            raise NotInitializedError(
                "this server has no job yet", where=self._where, todo="Wait for its first worker."
            )
        if asked.failure:
            self._members.check(arrival.request, parting=False)
            if self._wanted:
                self._wanted, self._refusal = (), asked.failure
        elif asked.endpoints and not self._is_left:
            assert job is not None
            refuse_unmovable(job.plans.current.spec, is_durable=self._is_durable)
            if len(asked.endpoints) > _MOST_SERVERS:
                raise ProtocolError("a job has no so many servers", expected=_MOST_SERVERS, got=len(asked.endpoints))
            wanted = tuple(str(Endpoint.parse(each)) for each in asked.endpoints)
            if wanted != servers:
                self._wanted, self._refusal = wanted, ""
        about = {"servers": servers, "wanted": self._wanted, "refusal": self._refusal}
        arrival.answer(pb.Reply(about=json.dumps(about)))

    def _tell(self, job: Job | None, arrival: Arrival) -> None:
        """Say where the job is, and whether it is about to move."""
        del job
        about = {
            "servers": self._servers,
            "made": self._made,
            "halted": "" if self._halt is None else self._halt.attempt,
        }
        arrival.answer(pb.Reply(about=json.dumps(about)))


def _member(record: Sequence[Any]) -> MemberRecord:
    worker, standing, incarnation, label = record
    return int(worker), standing, int(incarnation), str(label)


def _tensor_of(data: bytes) -> WireTensor:
    return WireTensor.of(np.frombuffer(data, np.uint8))
