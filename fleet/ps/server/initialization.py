"""A job begins with worker 0's initial values or a checkpoint, and parameters that join it later with theirs.

Pulls that come before them wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

from fleet.base.cluster import Endpoint
from fleet.errors import CheckpointError, FleetError, JobAbortedError, PlanMismatchError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import make_plan
from fleet.plan.specs import JobSpec, differences
from fleet.ps.server.admission import check_fingerprint, check_share
from fleet.ps.server.checkpoint_reader import NOTHING, Origin, Restore, restore_from
from fleet.ps.server.durability.durability import Durability, is_replaying
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.pending import Arrival, Outbox
from fleet.ps.server.replacement import Replacement, check_upload, write_upload
from fleet.ps.server.step_requests import StepRequests
from fleet.ps.table.shard import MakeShard, Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.wire_errors import error_reply

_log = logging.getLogger("fleet.server")


class Initialization:
    def __init__(
        self,
        endpoint: Endpoint,
        lock: AbstractContextManager[object],
        end: JobEnd,
        durability: Durability | None,
        steps: StepRequests,
        replacement: Replacement,
        send: Callable[[Outbox], None],
        restore: Restore | None,
        make_shard: MakeShard,
    ) -> None:
        """``send`` lets replies leave; ``restore`` is the checkpoint to start from, if there is one."""
        self._make_shard = make_shard
        self._endpoint = endpoint
        self._where = str(endpoint)
        self._lock = lock
        self._end = end
        self._durability = durability
        self._steps = steps
        self._replacement = replacement
        self._send = send
        self.restore = self._given = restore
        #: the first hello, which says what this server has of the job
        self._first: Any = None
        #: the thread that is to read it, as long as it may not begin
        self._reader: threading.Thread | None = None
        #: by name what worker 0 brings, as the checkpoint lacks it; None: all there is
        self._lacking: frozenset[str] | None = None
        #: what came from worker 0 while the checkpoint was being read
        self._early: list[tuple[Callable[[Job, Arrival], None], Arrival]] = []

    @property
    def is_complete(self) -> bool:
        """Say whether worker 0 has nothing to add to what a job begins with."""
        return self._lacking is not None and not self._lacking

    # ---------------------------------------------------------------- a checkpoint or none

    @property
    def origin(self) -> Origin:
        """Return what a job begins with here."""
        return NOTHING if self.restore is None else self.restore.origin

    def begin_with(self, origin: Origin) -> None:
        """Let a job that is gone on with begin as it did, whatever there is to begin with by now."""
        if origin.id == self.origin.id:
            return
        self.restore = None
        if origin.id:
            self.restore = _found_again(origin)

    # ---------------------------------------------------------------- room for them

    def make_room(self, job: Job, arrival: Arrival) -> None:
        """Make the shard, as worker 0 has said hello, which is to bring the initial values."""
        hello = arrival.request.hello
        if job.began.id or job.shard is not None:
            return
        try:
            shard = self._make_shard(job.plans.current, hello.server, hello.seed, tuple(hello.options))
            shard.warm()
            job.shard = shard
        except Exception as error:
            raise self._cannot_set_up(job, error, arrival.outbox) from None

    def begin(self, job: Job, hello: Any) -> None:
        """Begin with the first hello."""
        self._first = hello
        if self.restore is not None:
            self._begin_restoring(job, self.restore, hello)

    def start_from(self, job: Job | None, restore: Restore | None) -> None:
        """Take what was chosen to start from, if anything. The job may be known already, if an earlier process of this
        server was killed before it had any values."""
        self.restore = restore
        if restore is not None and job is not None:
            self._begin_restoring(job, restore, self._first)

    def _begin_restoring(self, job: Job, restore: Restore, hello: Any) -> None:
        """Read the checkpoint on a thread of its own, however large it is: hellos are answered meanwhile, with the
        version that its manifest names, and pulls wait as they wait for initial values. A server that does its journal
        over begins to read after that: a snapshot follows, which has to have all of it."""
        spec = job.plans.current.spec
        job.progress.go_on_from(restore)
        # Workers that may be only so far apart are where they were: one that has fewer steps left may be through with
        # them, and wait for one that has more.
        is_bounded = job.policy.waits_for_others and not job.policy.shares_steps
        workers = range(spec.settings.worker_num)
        clocks = {worker: job.steps_of(worker) if is_bounded else restore.version for worker in workers}
        job.rounds.gate.resume(clocks, {}, restore.version)
        job.background.finish_checkpoint(restore.id, restore.url)
        job.began = job.record = self.origin
        self._lacking = restore.lacks(spec)

        def load() -> None:
            outbox: Outbox = []
            try:
                shard = self._make_shard(job.plans.current, hello.server, restore.seed, tuple(hello.options))
                restore.fill(shard, hello.server)
                states = restore.states() if hello.server == 0 else {}
                shard.warm()
                with self._lock:
                    if self._end.begun:
                        return
                    job.shard, job.initialized = shard, self.is_complete
                    job.states.bring(states, restore.workers)
                    if job.initialized:
                        self._take_snapshot(job, outbox)
                        self._steps.release_early(job, outbox)
                    else:
                        self._go_through_early(job, outbox)
            except Exception as error:
                with self._lock:
                    if not self._end.begun:  # else everybody hears of it
                        self._cannot_set_up(job, error, outbox)
            self._send(outbox)

        self._reader = threading.Thread(target=load, name=f"fleet-restore-{self._where}", daemon=True)
        if not is_replaying(self._durability):
            self.go_on(job)

    def go_on(self, job: Job | None) -> None:
        """Read the checkpoint, if there is one, after everything was done over that had to be."""
        durability, given = self._durability, self._given
        if durability is not None and job is not None and given is not None and given.id != job.began.id:
            text = (
                "%s: what this server has kept in %s comes before the checkpoint it was given, %s, which is left alone"
            )
            _log.warning(text, self._where, durability.directory, given.url)
        if self._reader is not None:
            self._reader.start()
            self._reader = None

    def _take_snapshot(self, job: Job, outbox: Outbox) -> None:
        """Keep what the journal does not say: where the job's values came from."""
        if self._durability is not None:
            self._durability.take_now(job, outbox)

    def _go_through_early(self, job: Job, outbox: Outbox) -> None:
        """Take what worker 0 brings beside the checkpoint, which has been read, so that there is a place for it."""
        early, self._early = self._early, []
        for act, arrival in early:
            answered = Arrival(arrival.frame, arrival.respond, outbox)
            try:
                act(job, answered)
            except FleetError as error:
                outbox.append((arrival.respond, error_reply(error)))

    def _cannot_set_up(self, job: Job, error: Exception, outbox: Outbox) -> FleetError:
        """End the job, which cannot run: without its shard this server is of no use to anybody."""
        _log.error("%s: the job cannot be set up", self._where, exc_info=error)
        failure = JobAbortedError(f"server {self._where} could not set up the job", got=str(error) or repr(error))
        self._end.fail(failure, job, outbox)
        return failure

    # ---------------------------------------------------------------- what worker 0 brings

    def upload(self, job: Job, arrival: Arrival) -> None:
        """Take initial values, or others that are to replace those that are there, or are edits of them."""
        upload, plans = arrival.request.upload, job.plans
        if upload.edit:
            self._replacement.edit(job, arrival)
            return
        if upload.anew:
            self._replacement.upload(job, arrival)
            return
        _check_initializer(arrival.worker)
        if self._comes_early(job, self.upload, arrival):
            return
        shard = job.held()
        if plans.growing or not job.initialized:
            check_upload(shard, upload, arrival.tensors)
            # A worker that has started again may bring more than is lacking.
            former = plans.former[-1] if plans.growing else None
            write_upload(shard, *self._lacked(shard, upload, arrival.tensors), former)
        arrival.answer(pb.Reply())

    def _comes_early(self, job: Job, act: Callable[[Job, Arrival], None], arrival: Arrival) -> bool:
        """Say whether a request of worker 0 has to wait until the checkpoint has been read, beside which it brings
        values."""
        if self._lacking and job.shard is None:
            self._early.append((act, arrival))
            return True
        return False

    def _lacked(
        self, shard: Shard, upload: pb.Upload, tensors: Sequence[WireTensor]
    ) -> tuple[pb.Upload, Sequence[WireTensor]]:
        """Return the part of an upload that the checkpoint did not bring."""
        lacking = self._lacking
        if not lacking:
            return upload, tensors
        if upload.rows:
            return (upload, tensors) if shard.table(upload.table).spec.name in lacking else (pb.Upload(), [])
        slots, plan = shard.dense.layout.slots, shard.plan
        there = [plan.param_of(slots[position].block).name in lacking for position in upload.blocks]
        return pb.Upload(blocks=compress(upload.blocks, there)), list(compress(tensors, there))

    def ready(self, job: Job, arrival: Arrival) -> None:
        """Begin with the values, all of which have come, or go on from them."""
        if not arrival.request.ready.anew and self._comes_early(job, self.ready, arrival):
            return
        job.held()
        job.times_brought += 1
        ready = arrival.request.ready
        if ready.anew:
            self._replacement.take_over(job, ready.attempt, arrival.worker, arrival.outbox)
        else:
            _check_initializer(arrival.worker)
            job.initialized = True
            job.plans.complete()
            job.rounds.forget_values()  # a worker that does not know of these may have been given the others meanwhile
            if self._lacking:
                self._take_snapshot(job, arrival.outbox)
            self._lacking = None
        arrival.answer(pb.Reply(initialized=True))
        self._steps.release_early(job, arrival.outbox)

    # ---------------------------------------------------------------- further parameters

    def extend(self, job: Job, arrival: Arrival) -> None:
        """Plan further parameters, at the same step of every worker: the first worker that comes changes the plan. One
        that has started again adds later what joined while it was there before, all at once or one after another."""
        request, extend = arrival.request, arrival.request.extend
        shard, plans, gate = job.held(), job.plans, job.rounds.gate
        spec, ours = JobSpec.from_json(extend.spec), plans.current.spec
        if spec.settings.elastic:
            spec = spec.among(ours.settings.worker_num)
        known = plans.outgrown.get(request.worker)
        if known is not None and spec != ours and ours.continues(spec) and spec.continues(known.spec):
            plan = make_plan(spec)
            check_fingerprint(self._endpoint, plan, extend.fingerprint)
            plans.lags(request.worker, plan)
            arrival.answer(pb.Reply(version=gate.version, initialized=True))
            return
        if spec != ours:
            if not spec.continues(ours):
                raise PlanMismatchError(
                    "this worker added other parameters to its optimizer than the job has",
                    where=f"{self._where}, step {request.step}",
                    got="; ".join(differences(ours, spec)),
                    todo="Call add_param_group alike on every worker.",
                )
            if job.rounds.pushed or gate.version != request.step:
                raise PlanMismatchError(
                    "parameters were added while another worker went on without them",
                    where=f"{self._where}, step {request.step}",
                    todo="Call add_param_group on every worker, after the same step.",
                )
            plan = make_plan(spec)
            check_fingerprint(self._endpoint, plan, extend.fingerprint)
            check_share(self._endpoint, plan, shard.server, extend.options, job.most_bytes)
            try:
                shard.adopt(plan, tuple(extend.options))
                shard.warm()
            except Exception as error:
                raise self._cannot_set_up(job, error, arrival.outbox) from None
            plans.adopt(plan, gate.clocks)
            job.rounds.forget_values()
        plans.catches_up(request.worker)
        arrival.answer(pb.Reply(version=gate.version, initialized=not plans.growing))


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
