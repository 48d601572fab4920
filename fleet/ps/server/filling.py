"""What a job begins with: worker 0's initial values or a checkpoint, and those of parameters that join it later.

Pulls that come before them wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from fleet.errors import FleetError, JobAbortedError, PlanMismatchError, ProtocolError
from fleet.ps.server.floor import Floor
from fleet.ps.server.job import Job, Restore
from fleet.ps.server.keeping import Keeping
from fleet.ps.server.reception import check_fingerprint, check_share
from fleet.ps.server.replacing import Replacing
from fleet.ps.server.uploads import check_upload, write_upload
from fleet.ps.server.waiting import Arrival, Outbox
from fleet.ps.table.shard import Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.transpiler.plan import make_plan
from fleet.transpiler.specs import JobSpec, differences

_log = logging.getLogger("fleet.server")


class Filling:
    def __init__(self, floor: Floor, keeping: Keeping, replacing: Replacing, restore: Restore | None) -> None:
        """``restore`` is the checkpoint to start from, if there is one."""
        self._floor = floor
        self._keeping = keeping
        self._replacing = replacing
        self.restore = restore
        #: whoever is to read it, as long as it may not begin
        self._reader: threading.Thread | None = None

    # ---------------------------------------------------------------- room for them

    def make_room(self, arrival: Arrival) -> None:
        """Worker 0 has said hello, which is to bring the initial values."""
        hello, job = arrival.request.hello, self._floor.running()
        if self.restore is not None or job.shard is not None:
            return
        try:
            shard = Shard(job.plan, hello.server, hello.seed, tuple(hello.options))
            shard.warm()
            job.shard = shard
        except Exception as error:
            raise self._cannot_set_up(error, arrival.outbox) from None

    def begin_restoring(self, job: Job, restore: Restore, hello: Any) -> None:
        """Read the checkpoint on a thread of its own, however large it is: hellos are answered meanwhile, with the
        version that its manifest names, and pulls wait as they wait for initial values. A server that does over what
        its journal has begins after that: a snapshot follows, which has to have all of it."""
        job.gate = job.mode.gate(range(job.plan.spec.settings.worker_num), restore.version)
        job.steps_before = restore.version
        job.last = (restore.id, restore.url)

        def load() -> None:
            floor = self._floor
            outbox: Outbox = []
            try:
                shard = Shard(job.plan, hello.server, restore.seed, tuple(hello.options))
                restore.fill(shard, hello.server)
                states = restore.states() if hello.server == 0 else {}
                shard.warm()
            except Exception as error:
                with floor.lock:
                    if not floor.ending.begun:
                        self._cannot_set_up(error, outbox)
            else:
                with floor.lock:
                    if floor.ending.begun:
                        return
                    job.shard, job.initialized = shard, True
                    job.states.bring(states, restore.workers)
                    with contextlib.suppress(JobAbortedError):  # everybody is told
                        self._keeping.take(outbox)
                        floor.release_early(outbox)
            floor.send(outbox)

        self._reader = threading.Thread(target=load, name=f"fleet-restore-{self._floor.endpoint}", daemon=True)
        if self._floor.memory is None or not self._floor.memory.replaying:
            self.go_on()

    def go_on(self) -> None:
        """Everything was done over that had to be."""
        if self._reader is not None:
            self._reader.start()
            self._reader = None

    def _cannot_set_up(self, error: Exception, outbox: Outbox) -> FleetError:
        """Without its shard this server is of no use to anybody: the job cannot run."""
        _log.error("%s: the job cannot be set up", self._floor.endpoint, exc_info=error)
        failure = JobAbortedError(f"server {self._floor.endpoint} could not set up the job", got=str(error))
        self._floor.fail(failure, outbox)
        return failure

    # ---------------------------------------------------------------- what worker 0 brings

    def upload(self, arrival: Arrival) -> None:
        upload = arrival.request.upload
        if upload.anew:
            self._replacing.upload(arrival)
            return
        job, shard = self._floor.running(), self._floor.shard()
        _check_initializer(arrival.worker)
        if job.growing or not job.initialized:
            check_upload(shard, upload, arrival.tensors)
            write_upload(shard, upload, arrival.tensors)
        arrival.answer(pb.Reply())

    def ready(self, arrival: Arrival) -> None:
        """All values have come."""
        self._floor.shard()
        ready = arrival.request.ready
        if ready.anew:
            self._replacing.take_over(ready.attempt, arrival.outbox)
        else:
            _check_initializer(arrival.worker)
            job = self._floor.running()
            job.initialized, job.growing = True, False
        arrival.answer(pb.Reply(initialized=True))
        self._floor.release_early(arrival.outbox)

    # ---------------------------------------------------------------- further parameters

    def extend(self, arrival: Arrival) -> None:
        """Further parameters, at the same step of every worker: the first that comes has the plan changed."""
        floor, request, extend = self._floor, arrival.request, arrival.request.extend
        job, shard = floor.running(), floor.shard()
        spec = JobSpec.from_json(extend.spec)
        if spec != job.plan.spec:
            if not spec.continues(job.plan.spec):
                raise PlanMismatchError(
                    "this worker added other parameters to its optimizer than the job has",
                    where=f"{floor.endpoint}, step {request.step}",
                    got="; ".join(differences(job.plan.spec, spec)),
                    todo="Call add_param_group alike on every worker.",
                )
            if job.pushed or job.gate.version != request.step:
                raise PlanMismatchError(
                    "parameters were added while another worker went on without them",
                    where=f"{floor.endpoint}, step {request.step}",
                    todo="Call add_param_group on every worker, after the same step.",
                )
            plan, outgrown = make_plan(spec), job.dense_at(job.gate.version)
            check_fingerprint(floor.endpoint, plan, extend.fingerprint)
            check_share(floor.endpoint, plan, shard.server, extend.options, floor.most_bytes)
            try:
                shard.adopt(plan, tuple(extend.options))
                shard.warm()
            except Exception as error:
                raise self._cannot_set_up(error, arrival.outbox) from None
            job.plan, job.growing = plan, True
            job.outgrown = dict.fromkeys(job.gate.clocks, outgrown)
            job.forget_values()
        job.outgrown.pop(request.worker, None)
        arrival.answer(pb.Reply(version=job.gate.version, initialized=not job.growing))


def _check_initializer(worker: int) -> None:
    if worker != 0:
        raise ProtocolError("initial values come from worker 0", got=f"worker {worker}")
