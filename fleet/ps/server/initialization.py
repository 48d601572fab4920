"""What a job begins with: worker 0's initial values or a checkpoint, and those of parameters that join it later.

Pulls that come before them wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from fleet.errors import CheckpointError, FleetError, JobAbortedError, PlanMismatchError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import make_plan
from fleet.plan.specs import JobSpec, differences
from fleet.ps.consistency import gate_of
from fleet.ps.server.admission import check_fingerprint, check_share
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.server.context import Floor
from fleet.ps.server.durability import Keeping
from fleet.ps.server.job import NOTHING, Job, Origin, Restore
from fleet.ps.server.pending import Arrival, Outbox
from fleet.ps.server.replacement import Replacement
from fleet.ps.server.uploads import check_upload, write_upload
from fleet.ps.table.shard import Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.wire_errors import error_reply

_log = logging.getLogger("fleet.server")


class Initialization:
    def __init__(self, floor: Floor, keeping: Keeping, replacing: Replacement, restore: Restore | None) -> None:
        """``restore`` is the checkpoint to start from, if there is one."""
        self._floor = floor
        self._keeping = keeping
        self._replacing = replacing
        self.restore = self._given = restore
        #: the first hello, which says what this server has of the job
        self._first: Any = None
        #: whoever is to read it, as long as it may not begin
        self._reader: threading.Thread | None = None
        #: by name what worker 0 brings, as the checkpoint lacks it; None: all there is
        self._lacking: frozenset[str] | None = None
        #: what came from worker 0 while the checkpoint was being read
        self._early: list[tuple[Callable[[Arrival], None], Arrival]] = []

    @property
    def is_complete(self) -> bool:
        """Whether worker 0 has nothing to bring to what a job begins with."""
        return self._lacking is not None and not self._lacking

    # ---------------------------------------------------------------- a checkpoint or none

    @property
    def origin(self) -> Origin:
        """What a job begins with here."""
        return NOTHING if self.restore is None else Origin(self.restore.id, self.restore.url, self.restore.strict)

    def begin_with(self, origin: Origin) -> None:
        """Have a job that is gone on with begin as it did, whatever there is to begin with by now."""
        if origin.id == self.origin.id:
            return
        self.restore = None
        if origin.id:
            self.restore = _found_again(origin)

    # ---------------------------------------------------------------- room for them

    def make_room(self, arrival: Arrival) -> None:
        """Worker 0 has said hello, which is to bring the initial values."""
        hello, job = arrival.request.hello, self._floor.running()
        if job.began.id or job.shard is not None:
            return
        try:
            shard = Shard(job.plan, hello.server, hello.seed, tuple(hello.options))
            shard.warm()
            job.shard = shard
        except Exception as error:
            raise self._cannot_set_up(error, arrival.outbox) from None

    def begin(self, job: Job, hello: Any) -> None:
        """The first hello has come."""
        self._first = hello
        if self.restore is not None:
            self._begin_restoring(job, self.restore, hello)

    def start_from(self, restore: Restore | None) -> None:
        """It has been found out what to start from, if from anything. The job may be known already, where an earlier
        process of this server was killed before it had any values."""
        self.restore = restore
        if restore is not None and self._floor.job is not None:
            self._begin_restoring(self._floor.job, restore, self._first)

    def _begin_restoring(self, job: Job, restore: Restore, hello: Any) -> None:
        """Read the checkpoint on a thread of its own, however large it is: hellos are answered meanwhile, with the
        version that its manifest names, and pulls wait as they wait for initial values. A server that does over what
        its journal has begins after that: a snapshot follows, which has to have all of it."""
        job.gate = gate_of(job.plan.spec.settings, job.plan.spec.settings.worker_num, restore.version)
        job.go_on_from(restore)
        job.began, job.last = self.origin, (restore.id, restore.url)
        self._lacking = restore.lacks(job.plan.spec)

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
                    job.shard, job.initialized = shard, self.is_complete
                    job.states.bring(states, restore.workers)
                    with contextlib.suppress(JobAbortedError):  # everybody is told
                        if job.initialized:
                            self._keeping.take(outbox)
                            floor.release_early(outbox)
                        else:
                            self._go_through_early(outbox)
            floor.send(outbox)

        self._reader = threading.Thread(target=load, name=f"fleet-restore-{self._floor.endpoint}", daemon=True)
        if self._floor.memory is None or not self._floor.memory.replaying:
            self.go_on()

    def go_on(self) -> None:
        """Everything was done over that had to be."""
        floor, given = self._floor, self._given
        if floor.memory is not None and floor.job is not None and given is not None and given.id != floor.job.began.id:
            told = (
                "%s: what this server has kept in %s comes before the checkpoint it was given, %s, which is left alone"
            )
            _log.warning(told, floor.endpoint, floor.memory.directory, given.url)
        if self._reader is not None:
            self._reader.start()
            self._reader = None

    def _go_through_early(self, outbox: Outbox) -> None:
        """The checkpoint has been read, and what worker 0 brings beside it has a place to go to."""
        early, self._early = self._early, []
        for act, arrival in early:
            answered = Arrival(arrival.frame, arrival.respond, outbox)
            try:
                act(answered)
            except FleetError as error:
                outbox.append((arrival.respond, error_reply(error)))

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
        _check_initializer(arrival.worker)
        if self._comes_early(self.upload, arrival):
            return
        job, shard = self._floor.running(), self._floor.shard()
        if job.growing or not job.initialized:
            check_upload(shard, upload, arrival.tensors)
            # Whoever has started again may bring more than is lacking.
            former = job.former[-1] if job.growing else None
            write_upload(shard, *self._lacked(shard, upload, arrival.tensors), former)
        arrival.answer(pb.Reply())

    def _comes_early(self, act: Callable[[Arrival], None], arrival: Arrival) -> bool:
        """Whether a request of worker 0 has to wait until the checkpoint has been read, beside which it brings
        values."""
        if self._lacking and self._floor.running().shard is None:
            self._early.append((act, arrival))
            return True
        return False

    def _lacked(
        self, shard: Shard, upload: pb.Upload, tensors: Sequence[WireTensor]
    ) -> tuple[pb.Upload, Sequence[WireTensor]]:
        """What of an upload the checkpoint did not bring."""
        lacking = self._lacking
        if not lacking:
            return upload, tensors
        if upload.rows:
            return (upload, tensors) if shard.table(upload.table).spec.name in lacking else (pb.Upload(), [])
        slots, plan = shard.dense.layout.slots, shard.plan
        there = [plan.param_of(slots[position].block).name in lacking for position in upload.blocks]
        return pb.Upload(blocks=compress(upload.blocks, there)), list(compress(tensors, there))

    def ready(self, arrival: Arrival) -> None:
        """All values have come."""
        if not arrival.request.ready.anew and self._comes_early(self.ready, arrival):
            return
        self._floor.shard()
        ready = arrival.request.ready
        if ready.anew:
            self._replacing.take_over(ready.attempt, arrival.outbox)
        else:
            _check_initializer(arrival.worker)
            job = self._floor.running()
            job.initialized, job.growing = True, False
            job.forget_values()  # a worker that does not know of these may have been told the others meanwhile
            if self._lacking:
                self._keeping.take(arrival.outbox)
            self._lacking = None
        arrival.answer(pb.Reply(initialized=True))
        self._floor.release_early(arrival.outbox)

    # ---------------------------------------------------------------- further parameters

    def extend(self, arrival: Arrival) -> None:
        """Further parameters, at the same step of every worker: the first that comes has the plan changed. One that has
        started again adds later what joined while it was there before, all at once or one after another."""
        floor, request, extend = self._floor, arrival.request, arrival.request.extend
        job, shard = floor.running(), floor.shard()
        spec = JobSpec.from_json(extend.spec)
        if spec.settings.elastic:
            spec = spec.among(job.plan.spec.settings.worker_num)
        known = job.outgrown.get(request.worker)
        if known is not None and spec != job.plan.spec and job.plan.spec.continues(spec) and spec.continues(known.spec):
            plan = make_plan(spec)
            check_fingerprint(floor.endpoint, plan, extend.fingerprint)
            job.outgrown[request.worker] = plan
            arrival.answer(pb.Reply(version=job.gate.version, initialized=True))
            return
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
            plan = make_plan(spec)
            check_fingerprint(floor.endpoint, plan, extend.fingerprint)
            check_share(floor.endpoint, plan, shard.server, extend.options, floor.most_bytes)
            try:
                shard.adopt(plan, tuple(extend.options))
                shard.warm()
            except Exception as error:
                raise self._cannot_set_up(error, arrival.outbox) from None
            job.adopt(plan)
        job.outgrown.pop(request.worker, None)
        arrival.answer(pb.Reply(version=job.gate.version, initialized=not job.growing))


def _found_again(origin: Origin) -> Restore:
    expected = f"checkpoint {origin.id}"
    todo = "Start the whole job again, from another checkpoint if there is one, with this server's directory removed."
    try:
        restore = restore_from(origin.url, strict=origin.strict)
    except CheckpointError as error:
        raise CheckpointError(
            "the checkpoint that the job began with cannot be read again",
            where=origin.url,
            expected=expected,
            got=str(error),
            todo=todo,
        ) from None
    if restore.id != origin.id:
        raise CheckpointError(
            "the checkpoint that the job began with has been replaced",
            where=origin.url,
            expected=expected,
            got=f"checkpoint {restore.id}",
            todo=todo,
        )
    return restore


def _check_initializer(worker: int) -> None:
    if worker != 0:
        raise ProtocolError("initial values come from worker 0", got=f"worker {worker}")
