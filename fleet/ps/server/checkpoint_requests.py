"""A job's state on its way out: who may write a checkpoint, this server's share of it, and the end it comes to.

What only one worker does for all, as writing a model to serve, is claimed here too.
"""

from __future__ import annotations

import json

from fleet.errors import CheckpointError, MissedError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.checkpoint_share import BackgroundTask, write_share
from fleet.ps.server.context import Floor
from fleet.ps.server.job import Job
from fleet.ps.server.pending import Arrival, Waiting
from fleet.ps.server.status import on_one_line
from fleet.ps.table.frozen_view import HandOn
from fleet.ps.table.shard import Piece, is_of_rows
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame


class CheckpointRequests:
    def __init__(self, floor: Floor) -> None:
        self._floor = floor

    # ---------------------------------------------------------------- one worker for all

    def claim(self, arrival: Arrival) -> None:
        floor, job, claim = self._floor, self._floor.running(), arrival.request.claim
        first_is_gone, now = 0 not in floor.roll.awaited(), floor.clock.now()
        what = on_one_line(claim.name[:80])
        waiting = Waiting(arrival.worker, what, now, arrival.respond, lambda: Frame(pb.Reply(loads=job.loads)))
        floor.check_patience(waiting)
        job.claims.claim(claim.name, claim.by_anyone, waiting, now, first_is_gone, arrival.outbox)

    def release(self, arrival: Arrival) -> None:
        release = arrival.request.release
        self._floor.running().claims.release(release.name, arrival.worker, release.failure, arrival.outbox)
        arrival.answer(pb.Reply())

    # ---------------------------------------------------------------- state

    def export(self, arrival: Arrival) -> None:
        """One piece of the state, for the worker to keep."""
        job, export = self._floor.running(), arrival.request.export
        # A server that has been killed meanwhile goes on with all rows, of which it no longer knows when they changed.
        forgotten = self._floor.memory is not None and not job.begun[0]
        if export.checkpoint not in ("", job.begun[0]) and not forgotten:
            raise ProtocolError("another checkpoint was begun meanwhile", where=str(self._floor.endpoint))
        since = job.begun[1] if export.checkpoint else 0  # 0 as well if it is forgotten
        _check_standstill(job, export.version)
        dense_state = job.policy.has_dense_state_on_servers or not export.checkpoint
        piece = self._floor.shard().export(export.cursor, since, dense_state=dense_state)
        about = json.dumps({"tensors": list(piece.tensors), **piece.about})
        reply = pb.Reply(version=job.gate.version, cursor=piece.next_cursor, about=about)
        arrival.answer(reply, [WireTensor.of(tensor) for tensor in piece.tensors.values()])

    def save(self, arrival: Arrival) -> None:
        """Begin a checkpoint, and write this server's share of it beside the training."""
        job, save = self._floor.running(), arrival.request.save
        if job.errand is None or job.errand.name != save.id:
            job.errand = self._begin(job, arrival)
        if save.begin:
            job.errand.answer_early(arrival.respond)
        else:
            job.errand.answer(arrival.respond)

    def _begin(self, job: Job, arrival: Arrival) -> BackgroundTask:
        floor, shard, save = self._floor, self._floor.shard(), arrival.request.save
        server = shard.server
        if floor.memory is not None and job.policy.shares_steps and save.version != job.gate.version:
            raise MissedError("a server was killed while it wrote its share", where=str(floor.endpoint))
        _check_standstill(job, save.version)
        job.give_up()
        job.asked_by = arrival.worker
        shard.prepare()
        job.begun = (save.id, shard.history.begin(save.id, save.after))

        def export(cursor: str, hand_on: HandOn) -> Piece:
            with floor.lock:
                if floor.ending.over or job.begun[0] != save.id:
                    raise CheckpointError("the checkpoint was given up", where=str(floor.endpoint))
                if job.frozen is None:
                    _check_standstill(job, save.version)
                if job.frozen is None and job.policy.shares_steps and is_of_rows(cursor):
                    job.frozen = shard.freeze(job.begun[1], hand_on)
                    errand.let_go_on()
                dense_state = job.policy.has_dense_state_on_servers
                return shard.export(cursor, job.begun[1], dense_state=dense_state, frozen=job.frozen)

        def write() -> Frame:
            return write_share(save.folder, save.proof, server, export, floor.clock, behind=save.begin)

        what = f"writing the share of server {floor.endpoint} into {save.folder}"
        errand = BackgroundTask(save.id, write, what)
        if not job.policy.shares_steps:
            errand.let_go_on()
        errand.start()
        return errand

    def settle(self, arrival: Arrival) -> None:
        """The end of what a worker began: a checkpoint is there, or what it was is given up."""
        job, settle = self._floor.running(), arrival.request.settle
        if not settle.url and (job.errand is None or job.errand.name == settle.id):
            job.give_up()
        elif settle.url and settle.id == job.begun[0]:
            self._floor.shard().history.exists(settle.id)
            job.last = (settle.id, settle.url)
        arrival.answer(pb.Reply())


def _check_standstill(job: Job, version: int) -> None:
    if job.policy.shares_steps and version != job.gate.version:
        raise ProtocolError(
            "the job went on while its state was being read",
            expected=f"version {version}",
            got=f"version {job.gate.version}",
        )
