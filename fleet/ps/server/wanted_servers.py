"""Somebody outside wants the job to have other servers, or to go on without this one: the first worker is told, and
moves it.

The caller holds the server's lock.
"""

from __future__ import annotations

import json

from fleet.base.cluster import Endpoint
from fleet.errors import NotInitializedError, ProtocolError
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival
from fleet.ps.wire import fleet_pb2 as pb

#: So many may be asked for.
_MOST_SERVERS = 4096


class WantedServers:
    def __init__(self, where: str, end: JobEnd, members: Members) -> None:
        self._where = where
        self._end = end
        self._members = members
        #: all that the job is to have, and why they were not made that the last time
        self._wanted: tuple[str, ...] = ()
        self._refusal = ""
        #: whether the job is to go on without this server
        self._drains = False

    def of(self, worker: int) -> tuple[str, ...]:
        """Return the servers that a worker is to move the job to: the first that is there is told. Takes no lock."""
        wanted = self._wanted
        return wanted if wanted and worker == min(self._members.awaited(), default=-1) else ()

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the servers that the job is to move to; none if it is to stay."""
        return self._wanted

    def rearrange(self, job: Job | None, arrival: Arrival) -> None:
        """Note which servers the job is to have, or why it cannot have them, and tell how that stands."""
        asked = arrival.request.rearrange
        if job is None:
            raise NotInitializedError(
                "this server has no job yet", where=self._where, todo="Wait for its first worker."
            )
        if asked.failure:
            self._members.check(arrival.request, parting=False)
            if self._wanted:
                self._wanted, self._refusal = (), asked.failure
        elif asked.endpoints and not job.moves.is_left:
            if len(asked.endpoints) > _MOST_SERVERS:
                raise ProtocolError("a job has no so many servers", expected=_MOST_SERVERS, got=len(asked.endpoints))
            wanted = tuple(str(Endpoint.parse(each)) for each in asked.endpoints)
            if wanted != job.moves.servers:
                self._wanted, self._refusal = wanted, ""
        about = {"servers": job.moves.servers, "wanted": self._wanted, "refusal": self._refusal}
        arrival.answer(pb.Reply(about=json.dumps(about)))

    def are_made(self) -> None:
        """Note that the job has moved."""
        self._wanted, self._refusal = (), ""

    # ---------------------------------------------------------------- without this server

    def drain(self, job: Job | None) -> bool:
        """Have the job go on without this server; return whether it can be asked to."""
        if job is None or self._end.over or not self._others(job):
            return False
        self._drains, self._refusal = True, ""
        return True

    def tick(self, job: Job) -> None:
        """Ask once more, if the job has moved elsewhere meanwhile."""
        if self._drains and not (job.moves.is_left or self._wanted or self._refusal):
            self._wanted = self._others(job)

    def is_drained(self, job: Job | None) -> bool:
        """Say whether the job is about to go on without this server."""
        return self._drains and not (job is not None and job.moves.is_left)

    @property
    def cannot_drain(self) -> str:
        """Return why the job does not go on without this server, which was to be drained; empty if it may."""
        return self._refusal if self._drains else ""

    def _others(self, job: Job) -> tuple[str, ...]:
        return tuple(each for each in job.moves.servers if each != self._where)
