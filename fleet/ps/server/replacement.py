"""Other values for a running job, a checkpoint that is read beside the training or uploads: they come first, and are
taken over when every server has them. Until then they change nothing. What a worker's script has changed by itself,
some elements of parameters and some rows, holds at once; rows that belong to a step wait for its round, as until then
other workers look rows up.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from fleet.errors import CheckpointError, FleetError, JobAbortedError, ProtocolError, ServerBusyError
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import Plan
from fleet.ps.server.background import BackgroundTask, Loaded
from fleet.ps.server.checkpoint_reader import NOTHING, restore_from
from fleet.ps.server.durability.durability import Durability
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.pending import Arrival, Outbox
from fleet.ps.table.shard import MakeShard, Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame


class Replacement:
    def __init__(
        self,
        lock: AbstractContextManager[object],
        end: JobEnd,
        durability: Durability | None,
        make_beside: MakeShard,
    ) -> None:
        """``make_beside`` makes a shard while there is another, on a thread that may wait for that."""
        self._make_beside = make_beside
        self._lock = lock
        self._end = end
        self._durability = durability

    def upload(self, job: Job, arrival: Arrival) -> None:
        """Keep some of the values until all are there."""
        upload = arrival.request.upload
        check_upload(job.held(), upload, arrival.tensors)
        job.background.upload(arrival.worker, upload, arrival.tensors)
        arrival.answer(pb.Reply())

    def edit(self, job: Job, arrival: Arrival) -> None:
        """Take over what worker 0's script has changed by itself."""
        upload, tensors, shard = arrival.request.upload, arrival.tensors, job.held()
        if arrival.worker != 0:
            raise ProtocolError("edits come from worker 0", where=job.where, got=f"worker {arrival.worker}")
        if not job.is_whole:
            raise ProtocolError("an edit came before the initial values", where=job.where)
        # A worker that starts again takes a step once more where another server lacks it. Here it is over, and so is
        # what was changed before it.
        is_over = job.policy.shares_steps and arrival.request.step < job.rounds.gate.version
        if upload.rows:
            check_upload(shard, upload, tensors)

            def write() -> None:
                write_upload(job.held(), upload, tensors)
                job.rounds.forget_values()

            if not is_over:
                job.rounds.edits.append(write)
            if not (upload.with_step and job.policy.shares_steps):
                job.rounds.write_edits()  # of a step that was refused there may be earlier ones
        elif len(upload.blocks) != 1 or len(tensors) != 2:
            raise ProtocolError("an edit of parameters is of one block, and has marks and values", where=job.where)
        elif not is_over:
            shard.dense.edit(upload.blocks[0], tensors[0].numpy(), tensors[1].torch())
            job.rounds.forget_values()
        arrival.answer(pb.Reply())

    def load(self, job: Job, arrival: Arrival) -> None:
        """Read a checkpoint beside the training."""
        background, load = job.background, arrival.request.load
        if load.attempt == background.taken:
            arrival.answer(pb.Reply())
            return
        if not background.is_at(load.attempt):
            background.begin_anew(arrival.worker)
            old = job.held()

            def read() -> Frame:
                restore = restore_from(load.url)
                if restore.id != load.id:
                    raise CheckpointError(
                        "this server finds another checkpoint",
                        where=f"{job.where}, {load.url}",
                        expected=f"checkpoint {load.id}",
                        got=f"checkpoint {restore.id}",
                        todo="Every server has to see the directory that the worker sees.",
                    )
                shard = self._make_beside(job.plans.current, old.server, restore.seed, old.options)
                restore.fill(shard, old.server)
                states = restore.states() if old.server == 0 else {}
                with self._lock:
                    if background.task is task:
                        background.load(Loaded(load.attempt, restore, shard, states))
                return Frame(pb.Reply())

            what = f"loading {load.url} on server {job.where}"
            task = BackgroundTask(load.attempt, read, what, is_kept=self._durability is not None)
            background.begin(task, arrival.worker)
            task.start()
        assert background.task is not None
        background.task.answer(arrival.respond)

    def take_over(self, job: Job, attempt: str, worker: int, outbox: Outbox) -> None:
        """Replace the values by those of this attempt of this worker, which every server has."""
        background = job.background
        if attempt == background.taken:
            background.stop()  # asked again
            return
        shard, loaded, uploads = job.held(), background.loaded, background.uploads.get(worker, ())
        is_read = loaded is not None and loaded.attempt == attempt and loaded.shard.plan is job.plans.current
        if not is_read and (loaded is not None or not uploads):
            if self._durability is not None:  # it was killed since, and can read again
                raise ServerBusyError("this server has not read the checkpoint yet", where=job.where)
            what = "the values that were to be taken over are not here"
            raise ProtocolError(what, where=job.where, got=attempt[:80])
        try:
            if is_read:
                assert loaded is not None
                restore, job.shard = loaded.restore, loaded.shard
                job.shard.take_over()
                job.states.bring(loaded.states, restore.workers)
                job.progress.go_on_from(restore, (worker for worker, _ in job.rounds.pushed))
                background.finish_checkpoint(restore.id, restore.url)
                job.record = restore.origin
            else:
                for upload, tensors in uploads:
                    write_upload(shard, upload, tensors)
                shard.replaced()
                job.record = NOTHING
        except FleetError as error:
            # Other servers have taken them over: nobody may go on from here as if nothing had happened.
            what = f"server {job.where} could not go on from other values"
            self._end.fail(JobAbortedError(what, got=str(error)), job, outbox)
            raise
        job.rounds.edits.clear()
        background.take(attempt)
        job.progress.replaced()
        job.rounds.forget_values()
        if is_read and self._durability is not None:
            self._durability.take_now(job, outbox)


def check_upload(shard: Shard, upload: pb.Upload, tensors: Sequence[WireTensor]) -> None:
    """Refuse what does not fit when it comes: later it would be everybody's problem."""
    if upload.rows:
        if len(tensors) != 2:
            raise ProtocolError("an upload of rows needs ids and values", got=len(tensors))
        shard.check_rows(upload.table, tensors[0].numpy(), tensors[1].numpy())
    else:
        if len(tensors) != len(upload.blocks):
            raise ProtocolError("an upload's blocks and tensors differ in number")
        for position, tensor in zip(upload.blocks, tensors, strict=True):
            shard.dense.check_values(position, tensor.torch())


def write_upload(shard: Shard, upload: pb.Upload, tensors: Sequence[WireTensor], after: Plan | None = None) -> None:
    """Write an upload into the shard. What the plan ``after`` has stays as it is."""
    first_block, first_table = (0, 0) if after is None else (len(after.by_server[shard.server]), len(after.spec.tables))
    if upload.rows and upload.table >= first_table:
        shard.upload_rows(upload.table, tensors[0].numpy(), tensors[1].numpy())
    elif not upload.rows:
        for position, tensor in zip(upload.blocks, tensors, strict=True):
            if position >= first_block:
                shard.dense.write(position, tensor.torch())
