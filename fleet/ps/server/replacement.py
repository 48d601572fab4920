"""Other values for a running job, a checkpoint that is read beside the training or uploads: they come first, and are
taken over when every server has them. Until then they change nothing.
"""

from __future__ import annotations

from fleet.errors import CheckpointError, FleetError, JobAbortedError, ProtocolError, ServerBusyError
from fleet.ps.server.checkpoint_reader import restore_from
from fleet.ps.server.checkpoint_share import BackgroundTask
from fleet.ps.server.context import Floor
from fleet.ps.server.durability import Keeping
from fleet.ps.server.pending import Arrival, Outbox
from fleet.ps.server.uploads import check_upload, write_upload
from fleet.ps.table.shard import Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame


class Replacement:
    def __init__(self, floor: Floor, keeping: Keeping) -> None:
        self._floor = floor
        self._keeping = keeping

    def upload(self, arrival: Arrival) -> None:
        job, upload = self._floor.running(), arrival.request.upload
        check_upload(self._floor.shard(), upload, arrival.tensors)
        job.asked_by = arrival.worker
        job.uploads.append((upload, arrival.tensors))
        arrival.answer(pb.Reply())

    def load(self, arrival: Arrival) -> None:
        """Read a checkpoint beside the training."""
        floor, job, load = self._floor, self._floor.running(), arrival.request.load
        if load.attempt == job.taken:
            arrival.answer(pb.Reply())
            return
        if job.errand is None or job.errand.name != load.attempt:
            job.give_up()
            job.asked_by = arrival.worker
            old = floor.shard()

            def read() -> Frame:
                restore = restore_from(load.url)
                if restore.id != load.id:
                    raise CheckpointError(
                        "this server finds another checkpoint",
                        where=f"{floor.endpoint}, {load.url}",
                        expected=f"checkpoint {load.id}",
                        got=f"checkpoint {restore.id}",
                        todo="Every server has to see the directory that the worker sees.",
                    )
                shard = Shard(job.plan, old.server, restore.seed, old.options)
                restore.fill(shard, old.server)
                states = restore.states() if old.server == 0 else {}
                with floor.lock:
                    if job.errand is errand:
                        job.loaded = (load.attempt, restore, shard, states)
                return Frame(pb.Reply())

            errand = job.errand = BackgroundTask(load.attempt, read, f"loading {load.url} on server {floor.endpoint}")
            errand.start()
        job.errand.answer(arrival.respond)

    def take_over(self, attempt: str, outbox: Outbox) -> None:
        """Every server has the values of this attempt: they replace what there is."""
        floor, job = self._floor, self._floor.running()
        if attempt == job.taken:
            job.give_up()  # asked again
            return
        shard, loaded, uploads = floor.shard(), job.loaded, job.uploads
        is_read = loaded is not None and loaded[0] == attempt and loaded[2].plan is job.plan
        if not is_read and (loaded is not None or not uploads):
            if floor.memory is not None:  # it was killed since, and can read again
                raise ServerBusyError("this server has not read the checkpoint yet", where=str(floor.endpoint))
            what = "the values that were to be taken over are not here"
            raise ProtocolError(what, where=str(floor.endpoint), got=attempt[:80])
        try:
            if is_read:
                assert loaded is not None
                _, restore, job.shard, states = loaded
                job.states.bring(states, restore.workers)
                job.go_on_from(restore)
                # Of a round that is open, what has been pushed counts from here on.
                job.steps = dict.fromkeys((worker for worker, _ in job.pushed), 1)
                job.last = (restore.id, restore.url)
            else:
                for upload, tensors in uploads:
                    write_upload(shard, upload, tensors)
                shard.replaced()
        except FleetError as error:
            # Other servers have taken them over: nobody may go on from here as if nothing had happened.
            what = f"server {floor.endpoint} could not go on from other values"
            floor.fail(JobAbortedError(what, got=str(error)), outbox)
            raise
        job.give_up()
        job.taken, job.loads = attempt, job.loads + 1
        job.forget_values()
        if is_read:
            self._keeping.take(outbox)
