"""Hellos: who is let into the job, and what a worker is told that joins it, or comes back to it."""

from __future__ import annotations

import logging
from typing import Any

from fleet.errors import FleetError, IdentityError, ServerBusyError
from fleet.plan.plan import Plan
from fleet.plan.specs import JobSpec
from fleet.ps.consistency.membership import Standing
from fleet.ps.server.admission import Expected, check_cluster, check_same_job, check_share
from fleet.ps.server.context import Floor
from fleet.ps.server.durability import Keeping
from fleet.ps.server.initialization import Initialization
from fleet.ps.server.job import Job, new_job
from fleet.ps.server.pending import Arrival
from fleet.ps.server.status import on_one_line
from fleet.ps.wire import fleet_pb2 as pb

_log = logging.getLogger("fleet.server")


class Handshake:
    def __init__(self, floor: Floor, keeping: Keeping, filling: Initialization, expected: Expected | None) -> None:
        """``expected`` is the number of workers and the servers this process was told of, where it was told."""
        self._floor = floor
        self._keeping = keeping
        self._filling = filling
        self._expected = expected

    def hello(self, arrival: Arrival) -> None:
        floor, request, worker = self._floor, arrival.request, arrival.worker
        self.refuse_successor(worker, request.incarnation, request.hello.job_id)
        floor.ending.refuse_if_failed(worker)
        label = on_one_line(request.hello.label[:200])
        try:
            job, known = self._job_for(request)
        except FleetError as error:
            floor.roll.refused(worker, f"worker {worker} ({label}) was refused: {error}")
            told = on_one_line(str(error))
            _log.warning("%s: worker %d (%s) was refused: %s", floor.endpoint, worker, label, told)
            raise
        is_repeated = floor.roll.has(request)
        before = floor.roll.admit(request, label, job.plan.spec.settings, surely=self._replaying)
        if floor.job is None:
            self._keeping.note_origin(self._filling.origin, arrival.outbox)
        self._keeping.note("hello", arrival.frame, arrival.outbox)  # only now: whether it is let in is a matter of time
        if before is not None:
            self._take_place(job, before, label, arrival)
        if floor.job is None:
            self._begin(job, request.hello)
        if known is not job.plan and not is_repeated:
            job.outgrown[worker] = known
        if worker == 0:
            self._filling.make_room(arrival)
        self._welcome(job, arrival)
        if job.initialized and not job.growing:
            floor.release_early(arrival.outbox)

    def refuse_successor(self, worker: int, incarnation: int, job_id: str) -> None:
        """A worker of the next job may be early: the process that had its place here has left, others have not."""
        floor, memory = self._floor, self._floor.memory
        before = floor.roll.succeeds(worker, incarnation)
        is_new = floor.roll.is_stranger(worker)
        ours = floor.knobs.job_id or ("" if floor.job is None else floor.job.job_id)
        restarted = bool(ours) and ours == job_id
        if before is Standing.LIVE and not restarted and memory is not None and memory.goes_on:
            raise IdentityError(
                "this server goes on with a job whose state it has kept, and this worker was not part of it",
                where=f"{floor.endpoint}, {memory.directory}",
                got=f"a new worker {worker}",
                todo="Remove the directory if that job is over. Workers may start again where FLEET_JOB_ID is set.",
            )
        if not restarted and (before is Standing.LEFT or (floor.ending.over and (is_new or before is not None))):
            raise ServerBusyError(
                "this server has not finished an earlier job yet",
                where=str(floor.endpoint),
                got=f"a new worker {worker}; the earlier "
                + ("one has left" if before is Standing.LEFT else "job is over"),
                todo="Wait until the earlier job has ended, or give this one servers of its own.",
            )

    @property
    def _replaying(self) -> bool:
        return self._floor.memory is not None and self._floor.memory.replaying

    def _job_for(self, request: Any) -> tuple[Job, Plan]:
        """The job that a hello is for, which it may be the first of, and the plan that the worker knows; it fits, or is
        refused."""
        floor, hello = self._floor, request.hello
        spec = JobSpec.from_json(hello.spec)
        check_cluster(floor.endpoint, self._expected, spec, request.worker, hello)
        job = floor.job
        if job is None:
            begins_with = spec.settings.worker_num if self._expected is None else self._expected[0]
            job = new_job(spec.among(begins_with), hello.job_id, str(floor.endpoint), floor.knobs.rpc_deadline_s)
        # What is done over was another job's, perhaps: that is told of when all of it is known.
        ours = job.job_id if self._replaying else floor.knobs.job_id or job.job_id
        known = check_same_job(floor.endpoint, ours, job, spec, hello)
        check_share(floor.endpoint, known, hello.server, hello.options, floor.most_bytes)
        return job, known

    def _take_place(self, job: Job, before: Standing, label: str, arrival: Arrival) -> None:
        """A worker comes to a place that another process had, which stood so: what that one waited for nobody waits for
        now."""
        worker = arrival.worker
        if before is Standing.LEFT:
            _log.info("%s: worker %d (%s) has joined", self._floor.endpoint, worker, label)
        else:
            told = "%s: worker %d has started again (%s); its earlier process is fenced off"
            _log.warning(told, self._floor.endpoint, worker, label)
            self._floor.drop_requests(worker, arrival.outbox)
        if before in (Standing.LEFT, Standing.LOST):
            job.gate.join(worker)
            job.hall.join(worker)
        if not job.policy.shares_steps:
            job.claims.joined(worker)

    def _begin(self, job: Job, hello: Any) -> None:
        self._floor.job = job
        _log.info(
            "%s: serving a job of %d workers: %d blocks of %d bytes in all, and a share of %d tables",
            self._floor.endpoint,
            job.plan.spec.settings.worker_num,
            len(job.plan.by_server[hello.server]),
            job.plan.dense_bytes(hello.server),
            len(job.plan.spec.tables),
        )
        self._filling.begin(job, hello)

    def _welcome(self, job: Job, arrival: Arrival) -> None:
        worker = arrival.worker
        arrival.answer(
            pb.Reply(
                version=job.gate.version,
                initialized=job.initialized or self._filling.is_complete,
                delivered=job.gate.delivered(worker),
                steps=job.steps_of(worker),
                loads=job.loads,
                gathered=job.hall.told()[worker],
                about=job.began.id,
            )
        )
