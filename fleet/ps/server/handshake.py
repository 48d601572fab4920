"""Workers say hello: they are let into the job or refused, and hear how far it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import FleetError, IdentityError, PlanMismatchError, ServerBusyError, UnsupportedError
from fleet.plan.plan import Plan
from fleet.plan.specs import JobSpec
from fleet.ps.consistency.membership import Standing
from fleet.ps.server.admission import Expected, check_cluster, check_same_job, check_share
from fleet.ps.server.durability.durability import Durability, is_replaying
from fleet.ps.server.initialization import Initialization
from fleet.ps.server.job import Job, new_job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Arrival
from fleet.ps.server.status import on_one_line
from fleet.ps.server.step_requests import StepRequests
from fleet.ps.wire import fleet_pb2 as pb

_log = logging.getLogger("fleet.server")


class Handshake:
    def __init__(
        self,
        endpoint: Endpoint,
        settings: ProcessSettings,
        end: JobEnd,
        members: Members,
        durability: Durability | None,
        steps: StepRequests,
        initialization: Initialization,
        expected: Expected | None,
        begin: Callable[[Job], None],
    ) -> None:
        """``expected`` is the number of workers and the servers this process was told of, where it was told; ``begin``
        makes a job the server's."""
        self._endpoint = endpoint
        self._where = str(endpoint)
        self._settings = settings
        self._end = end
        self._members = members
        self._durability = durability
        self._steps = steps
        self._initialization = initialization
        self._expected = expected
        self._begin_job = begin

    def hello(self, job: Job | None, arrival: Arrival) -> None:
        """Let a worker in, or refuse it; the first one begins the job."""
        request, worker, is_first = arrival.request, arrival.worker, job is None
        self.refuse_successor(job, request, request.hello)
        self._end.refuse_if_failed(worker)
        label = on_one_line(request.hello.label[:200])
        try:
            job, known = self._job_for(job, request)
        except FleetError as error:
            self._members.refused(worker, f"worker {worker} ({label}) was refused: {error}")
            reason = on_one_line(str(error))
            _log.warning("%s: worker %d (%s) was refused: %s", self._where, worker, label, reason)
            raise
        is_repeated = self._members.has(request)
        settings = job.plans.current.spec.settings
        before = self._members.admit(request, label, settings, surely=is_replaying(self._durability))
        if self._durability is not None:
            if is_first:
                self._durability.note_origin(self._initialization.origin, arrival.outbox)
            # Only now: whether it is let in is a matter of time.
            self._durability.note(None if is_first else job, "hello", arrival.frame, arrival.outbox)
        if before is not None:
            self._take_place(job, before, label, arrival)
        if is_first:
            self._begin(job, request.hello)
        if known is not job.plans.current and not is_repeated:
            job.plans.lags(worker, known)
        if not job.moves.made:
            job.moves.servers = tuple(request.hello.endpoints)
        if worker == 0:
            self._initialization.make_room(job, arrival)
        self._welcome(job, arrival)
        if job.initialized and not job.plans.growing:
            self._steps.release_early(job, arrival.outbox)

    def expect(self, servers: tuple[Endpoint, ...]) -> None:
        """Expect workers from now on that know of these servers, if those they know of are expected to be any."""
        if self._expected is not None:
            self._expected = (self._expected[0], servers)

    @property
    def expected_servers(self) -> tuple[Endpoint, ...]:
        """Return the servers this process was told of; none if it was not told."""
        return () if self._expected is None else self._expected[1]

    def refuse_who_has_left(self, former: int) -> None:
        """Refuse a process of the next job, which may have the same id, if it was in this one as ``former``: it is
        early, as others have not left yet."""
        if self._members.knows(former):
            raise self._is_busy("one that has left it")

    def refuse_successor(self, job: Job | None, request: Any, about: Any) -> None:
        """Refuse a worker of the next job, which may be early: the process that had its place here has left, and others
        have not. ``about`` is what it says of itself."""
        durability, worker, incarnation = self._durability, request.worker, request.incarnation
        before = self._members.succeeds(worker, incarnation)
        is_new = self._members.is_stranger(worker)
        ours = self._settings.job_id or ("" if job is None else job.job_id)
        restarted = bool(ours) and ours == about.job_id
        if before is Standing.LIVE and not restarted and durability is not None and durability.goes_on:
            raise IdentityError(
                "this server goes on with a job whose state it has kept, and this worker was not part of it",
                where=f"{self._where}, {durability.directory}",
                got=f"a new worker {worker}",
                todo="Remove the directory if that job is over. Workers may start again where FLEET_JOB_ID is set.",
            )
        if not restarted and (before is Standing.LEFT or (self._end.over and (is_new or before is not None))):
            how = "one has left" if before is Standing.LEFT else "job is over"
            raise self._is_busy(f"a new worker {worker}; the earlier {how}")

    def _is_busy(self, got: str) -> FleetError:
        return ServerBusyError(
            "this server has not finished an earlier job yet",
            where=self._where,
            got=got,
            todo="Wait until the earlier job has ended, or give this one servers of its own.",
        )

    def _job_for(self, job: Job | None, request: Any) -> tuple[Job, Plan]:
        """Return the job that a hello is for, of which it may be the first, and the plan that the worker knows; refuse
        one that does not fit."""
        hello, most_bytes = request.hello, self._settings.security.max_message_bytes
        spec = JobSpec.from_json(hello.spec)
        replaying = is_replaying(self._durability)
        check_cluster(self._endpoint, self._expected, spec, request.worker, hello, replaying=replaying)
        if job is not None and job.shard is not None and job.shard.server != hello.server and not replaying:
            raise PlanMismatchError(
                "this server has another place in the list of servers than it has had",
                where=self._where,
                expected=f"server {job.shard.server}",
                got=f"server {hello.server} of {', '.join(hello.endpoints)}",
                todo="Give all workers the same list, with every server in it once, under one name.",
            )
        if job is None:
            begins_with = spec.settings.worker_num if self._expected is None else self._expected[0]
            deadline_s = self._settings.rpc_deadline_s
            job = new_job(spec.among(begins_with), hello.job_id, self._where, most_bytes, deadline_s)
        # The journal that is done over may be another job's: that is found out when all of it is known.
        ours = job.job_id if replaying else self._settings.job_id or job.job_id
        known = check_same_job(self._endpoint, ours, job, spec, hello)
        if known is not job.plans.current and spec.settings.has_dense_on_workers and not self._members.has(request):
            raise UnsupportedError(
                f"worker {request.worker} cannot start again where parameters have joined that are on the workers",
                where=self._where,
                todo="Give all parameters to the optimizer before fleet.init_worker(). The others go on without it.",
            )
        check_share(self._endpoint, known, hello.server, hello.options, most_bytes)
        return job, known

    def _take_place(self, job: Job, before: Standing, label: str, arrival: Arrival) -> None:
        """Give a worker the place of another process, which stood so; nobody waits any more for what that one waited
        for."""
        worker = arrival.worker
        if before is Standing.LEFT:
            _log.info("%s: worker %d (%s) has joined", self._where, worker, label)
        else:
            text = "%s: worker %d has started again (%s); its earlier process is fenced off"
            _log.warning(text, self._where, worker, label)
            job.drop(worker, arrival.outbox)
            self._steps.carry_out(job, job.rounds.gate.starts_again(worker), worker, arrival.outbox)
        if before in (Standing.LEFT, Standing.LOST):
            job.rounds.gate.join(worker)
            job.reductions.join(worker)
        job.moves.renewed[worker] = job.rounds.gate.clocks[worker]
        if not job.policy.shares_steps:
            job.claims.joined(worker)

    def _begin(self, job: Job, hello: Any) -> None:
        self._begin_job(job)
        plan = job.plans.current
        _log.info(
            "%s: serving a job of %d workers: %d blocks of %d bytes in all, and a share of %d tables",
            self._where,
            plan.spec.settings.worker_num,
            len(plan.by_server[hello.server]),
            plan.dense_bytes(hello.server),
            len(plan.spec.tables),
        )
        self._initialization.begin(job, hello)

    def _welcome(self, job: Job, arrival: Arrival) -> None:
        worker = arrival.worker
        arrival.answer(
            pb.Reply(
                version=job.rounds.gate.version,
                initialized=job.initialized or self._initialization.is_complete,
                delivered=job.rounds.gate.delivered(worker),
                steps=job.steps_of(worker),
                loads=job.progress.loads,
                moves=len(job.moves.past),
                gathered=job.reductions.decided(worker),  # nothing of one that is about to leave
                about=job.began.id,
                cuts=job.cuts,
            )
        )
