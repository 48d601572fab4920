"""A server gets ready to take over its part of a job that moves: it is filled with rows and parameters, and knows at
last how far the job is.

The caller holds the server's lock.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.base.clock import Clock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import (
    FleetError,
    MissedError,
    PlanMismatchError,
    ProtocolError,
    ServerBusyError,
    StateError,
    UnsupportedError,
)
from fleet.numeric.tensors import WireTensor
from fleet.plan.specs import JobSpec
from fleet.ps.consistency.membership import MemberRecord
from fleet.ps.server.admission import check_fingerprint, check_job_id, check_share
from fleet.ps.server.durability.durability import Durability, is_replaying, note_move
from fleet.ps.server.durability.snapshot import recall, take_up
from fleet.ps.server.durability.state_directory import Kind
from fleet.ps.server.handshake import Handshake
from fleet.ps.server.job import Job, new_job
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival
from fleet.ps.server.refill import UNREADABLE, Refill
from fleet.ps.server.step_requests import contribution_of
from fleet.ps.table.shard import Shard
from fleet.ps.table.stores import NewStore, Stores
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame, read_frame
from fleet.ps.wire.move_names import LACKS

#: So many times memory is given back before others have their turn.
_GIVEN_AT_ONCE = 8
KILLED = "this server was killed, and does not know what has changed since"
#: What travels beside the state of a job, from the first server alone: outcomes of gatherings, states of own objects.
RECORDS = "records"
_CARRIED = (Kind.OUTCOME.name, Kind.STATE.name)
#: And the group of its workers, from the first server as well.
MEETINGS = "meetings"


@dataclass
class Stage:
    """Holds the job as this server is to have it."""

    attempt: str
    job: Job
    shard: Shard
    refill: Refill
    members: Sequence[MemberRecord] = ()
    #: the group of the workers, for the first of the new servers; a journal does not know what has become of it since
    meetings: Mapping[str, Any] = field(default_factory=dict)
    #: pushes that wait to become part of an update
    pushed: list[Frame] = field(default_factory=list)
    filled: int = 0
    #: whether one of the servers that there were may have lost what it had acknowledged
    may_lack_steps: bool = False
    is_whole: bool = False


class Staging:
    def __init__(
        self,
        endpoint: Endpoint,
        settings: ProcessSettings,
        clock: Clock,
        members: Members,
        durability: Durability | None,
        handshake: Handshake,
        stores: Stores,
        *,
        may_begin: bool,
    ) -> None:
        """``may_begin`` says that this process was given nothing to begin with."""
        self._endpoint = endpoint
        self._where = str(endpoint)
        self._settings = settings
        self._clock = clock
        self._members = members
        self._durability = durability
        self._handshake = handshake
        self._stores = stores
        #: what is to keep the rows that come, where there are others that have to make room: and for which move
        self._room: tuple[str, NewStore] | None = None
        self._may_begin = may_begin
        self.stage: Stage | None = None
        #: whether this server has heard of what it is to take over, since it was asked last
        self._was_filled = False

    def get_ready(self, job: Job | None, arrival: Arrival, copied: str) -> None:
        """Make room for what this server is to take over; ``copied`` is the move for which it is copied itself."""
        stage, self._was_filled = arrival.request.stage, True
        if self.stage is not None and self.stage.attempt == stage.attempt:
            if self.stage.shard.server != stage.server:
                raise PlanMismatchError(
                    "one server is in the list under two names",
                    where=self._where,
                    got=f"server {self.stage.shard.server} and server {stage.server} of {', '.join(stage.endpoints)}",
                    todo="Name every server once, as the others know it.",
                )
            arrival.answer(pb.Reply())
            return
        is_copied = copied == stage.attempt
        if job is not None and not (is_copied or is_replaying(self._durability)):
            if self._members.has(arrival.request):
                raise stale(self._where, KILLED)
            raise StateError(
                "this server has a job already",
                where=self._where,
                todo="If it is the one that has just left there, wait until the process ends, and start it anew.",
            )
        if job is None and not self._may_begin:
            raise UnsupportedError(
                "this server was started with a state of its own, and cannot take over another one",
                where=self._where,
                todo="Start it anew, without a checkpoint.",
            )
        spec, server = JobSpec.from_json(stage.spec), stage.server
        self._check_servers(stage, spec, is_new=job is None)
        try:
            told = json.loads(stage.about)
            self._check_keeps(told["is_durable"])
            check_job_id(self._endpoint, self._settings.job_id, told["job_id"])
            most_bytes = self._settings.security.max_message_bytes
            new = new_job(spec, told["job_id"], self._where, most_bytes, self._settings.rpc_deadline_s)
            plan, options = new.plans.current, tuple(told["options"])
            check_fingerprint(self._endpoint, plan, stage.fingerprint)
            check_share(self._endpoint, plan, server, options, most_bytes)
            shard = Shard(plan, server, told["seed"], options, self._store_beside(job, stage.attempt))
        except UNREADABLE as error:
            raise self._unreadable(error) from None
        if job is None and self._durability is not None:
            self._durability.forget_moves()
        note_move(self._durability, job, arrival.frame, arrival.outbox)
        self.stage = Stage(stage.attempt, new, shard, Refill(shard, self._where))
        arrival.answer(pb.Reply())

    def _store_beside(self, job: Job | None, attempt: str) -> NewStore:
        """Return what keeps the rows of another shard, when the one that there is has made room for it."""
        if job is None:
            return self._stores.share()
        if self._room is None or self._room[0] != attempt:
            self._room = attempt, self._stores.share()
        shard = job.held()
        for _ in itertools.count() if is_replaying(self._durability) else range(_GIVEN_AT_ONCE):
            if shard.give_way():
                _, new_store = self._room
                self._room = None
                return new_store
            backlogs = shard.backlogs()
            if backlogs and not is_replaying(self._durability):
                break  # nobody waits for the disk under the lock
            for backlog in backlogs:
                backlog.wait()
        raise ServerBusyError("this server makes room for the rows that it is to have", where=self._where)

    def _check_keeps(self, is_durable: bool) -> None:
        """Refuse what the servers that there are keep and this one would not, or the other way round."""
        if is_durable != (self._durability is not None):
            raise UnsupportedError(
                "of the servers of one job all keep their state on disk, or none",
                where=self._where,
                expected=f"{'a' if is_durable else 'no'} FLEET_DURABLE_DIR, as the servers have that there are",
                got=f"{'no' if is_durable else 'a'} FLEET_DURABLE_DIR",
                todo="Start the new servers as those that there are.",
            )

    def _unreadable(self, error: Exception) -> FleetError:
        if isinstance(error, FleetError):
            return error
        return ProtocolError("the state of a job cannot be read", where=self._where, got=repr(error))

    def _check_servers(self, stage: Any, spec: JobSpec, *, is_new: bool) -> None:
        known, endpoints = [str(each) for each in self._handshake.expected_servers], list(stage.endpoints)
        known = [] if is_replaying(self._durability) else known  # addresses are those of its time
        fits = stage.server < len(endpoints) == spec.settings.server_num
        if not fits or (is_new and known and known != endpoints) or (known and endpoints[stage.server] != self._where):
            raise PlanMismatchError(
                "this server was started with another list of servers than the job is to have",
                where=self._where,
                expected=", ".join(known),
                got=", ".join(endpoints[:100])[:4000],
                todo="Start new servers with the list that the job is to have.",
            )

    def fill(self, job: Job | None, arrival: Arrival) -> None:
        """Take a piece of what this server is to have."""
        fill, stage, self._was_filled = arrival.request.fill, self.stage, True
        if stage is None or stage.attempt != fill.attempt:
            raise MissedError("a server was started again, or has given up, while the job moved", where=self._where)
        if fill.number > stage.filled + 1:
            raise MissedError("a server was started again, or has given up, while the job moved", where=self._where)
        if fill.number > stage.filled:
            note_move(self._durability, job, arrival.frame, arrival.outbox)
            if fill.state:
                self._complete(stage, fill.state, arrival.tensors)
            elif fill.HasField("pushed"):
                message = pb.Request(worker=fill.by, step=fill.at, push=fill.pushed)
                stage.pushed.append(Frame(message, [*arrival.tensors]))
            else:
                stage.refill.add(fill.about, arrival.tensors)
            stage.filled = fill.number
        arrival.answer(pb.Reply())

    def _complete(self, stage: Stage, text: str, records: Sequence[WireTensor]) -> None:
        """Let what this server has been filled with be as far as the job that it comes from."""
        servers = stage.job.plans.current.spec.settings.server_num
        try:
            stage.refill.end()
            state = json.loads(text)
            former = [JobSpec.from_json(each).on_servers(servers) for each in state["former"]]
            state["former"] = [each.to_json() for each in former]
            stage.shard.set_options(state["options"])
            take_up(stage.job, stage.shard, state, self._clock.now())
            stage.shard.resume_past(state["past"], state["now"])
            stage.shard.staleness.resume(state["staleness"], state["late"])
            if stage.shard.server:
                stage.job.rounds.gate.follow_first()
            for frame in stage.pushed:
                push = frame.message
                stage.job.rounds.pushed[push.worker, push.step] = contribution_of(stage.job, push, frame.tensors)
            for kind, tensor in zip(state[RECORDS], records, strict=True):
                if kind not in _CARRIED:
                    raise ValueError(f"{kind!r} does not move with the state")
                recall(stage.job, Kind[kind], read_frame(pb.Reply, [tensor.numpy().tobytes()]))
            stage.members = [_member(record) for record in state["members"]]
            stage.may_lack_steps = bool(state.get(LACKS))
            stage.meetings = {} if is_replaying(self._durability) else state.get(MEETINGS, {})
        except UNREADABLE as error:
            raise self._unreadable(error) from None
        stage.is_whole = True

    def forget(self) -> None:
        """Forget what this server was to have."""
        self.stage = self._room = None

    def was_filled(self) -> bool:
        """Say, once, whether somebody has been filling this server, which has no job yet."""
        was_filled, self._was_filled = self._was_filled, False
        return was_filled


def stale(where: str, why: str) -> FleetError:
    """Return what is wrong with a move whose copy is not of what there is."""
    return MissedError(
        "what was copied is not what there is any more", where=where, got=why, todo="Call resize_servers() again."
    )


def _member(record: Sequence[Any]) -> MemberRecord:
    worker, standing, incarnation, label = record
    return int(worker), standing, int(incarnation), str(label)
