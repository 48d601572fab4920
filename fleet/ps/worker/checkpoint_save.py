"""``save_persistables``: one worker claims a folder, every server writes its share into it, the worker adds the
manifest.

One worker calls it, or all do, and it is done once (lease.py). In GEO the first worker does it, since its optimizer's
state is the job's. In a synchronous job no round closes without the worker that waits; it may go on when the servers
have written the parameters, and they keep the rows as they are until those are written too. In the other modes workers
go on, and each block and row is saved as it is when its turn comes. A server that does not see the folder sends its
share instead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.checkpoint.entries import names, split
from fleet.checkpoint.manifest import Saved
from fleet.checkpoint.pieces import PieceFile, PieceWriter
from fleet.checkpoint.places import place_at
from fleet.checkpoint.state import Bytes, write_states
from fleet.checkpoint.writer import CheckpointWriter, can_go_on_from
from fleet.errors import ConfigurationError, MissedError
from fleet.plan.specs import JobSpec
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.dense_state import Piece
from fleet.ps.worker.lease import once, withdrawn_if_it_fails
from fleet.ps.worker.object_states import Shares
from fleet.ps.worker.runtime import WorkerRuntime
from fleet.ps.worker.state_reader import exported

_log = logging.getLogger("fleet.checkpoint")

#: Everything, or what has changed since the last checkpoint.
FULL, DELTA = "full", "delta"


@dataclass(frozen=True)
class Moment:
    """Says what a worker is at the step that is saved: it may go on while the rest is done."""

    steps: int
    version: int
    spec: JobSpec
    #: what this worker adds: in GEO the state of the dense parameters, on the worker whose state is the job's; where
    #: dense parameters are on the workers, these and their state
    state: Sequence[Piece]


#: Does the rest of a save, on any thread. It calls what it is given as soon as the worker may train on; None: it waits.
Rest = Callable[[Callable[[], None] | None], None]


def begin(worker: WorkerRuntime, dirname: object, mode: object, own: Bytes | None, wanted: str, or_full: bool) -> Rest:
    """Let the servers apply everything that this worker has computed, give the state of its ``own`` objects, and return
    a function that does the rest. ``wanted`` is the name under which others give their states; empty: that of this
    call. With ``or_full`` a delta that has nothing to go on from any more becomes a full checkpoint."""
    if mode not in (FULL, DELTA):
        raise ConfigurationError(
            "a checkpoint cannot be saved in this mode", expected="'full' or 'delta'", got=repr(mode)
        )
    where = place_at(dirname).url
    worker.in_turn("save_persistables()", worker.flush)
    progress = worker.progress
    replica = worker.replica if worker.assignment.index == 0 else None
    state = [] if replica is None else [split(replica.state())]
    if worker.dense is not None:
        state = worker.dense.pieces()
    moment = Moment(progress.steps, progress.completed, worker.trained.plan.spec, state)
    name = progress.name_of_call(f"save_persistables({where!r})")
    shares = Shares(wanted or name, everyone=not wanted) if own is not None or wanted else None
    if own is not None:
        worker.following(lambda: worker.own_states.give(wanted or name, own))

    def base_of(last: dict[str, Any]) -> Saved | None:
        after = Saved(last["id"], last["url"]) if mode == DELTA and last["id"] else None  # without one: everything
        if after is None or not or_full or can_go_on_from(after):
            return after
        _log.warning("%s, or what it goes on from, is not there any more: a full checkpoint is saved", after.url)
        return None

    def rest(go_on: Callable[[], None] | None) -> None:
        if go_on is not None and not worker.policy.shares_steps:
            go_on()
        once(worker, name, lambda last: _write(worker, dirname, base_of(last), moment, shares, go_on), by_anyone=False)

    return rest


def _write(
    worker: WorkerRuntime,
    dirname: object,
    after: Saved | None,
    moment: Moment,
    shares: Shares | None,
    go_on: Callable[[], None] | None,
) -> None:
    own, lockstep = worker.own_states, worker.policy.shares_steps
    collected = own.collect(shares) if shares is not None and lockstep else None  # before anybody goes on
    try:
        _write_after(worker, dirname, after, moment, shares, collected, go_on)
    except MissedError:
        if after is None:
            raise
        # A server does not know any more which rows have left since then: of a job that has moved, say.
        _write_after(worker, dirname, None, moment, shares, collected, go_on)


def _write_after(
    worker: WorkerRuntime,
    dirname: object,
    after: Saved | None,
    moment: Moment,
    shares: Shares | None,
    collected: dict[str, Any] | None,
    go_on: Callable[[], None] | None,
) -> None:
    own = worker.own_states
    with CheckpointWriter(dirname, after) as writer, withdrawn_if_it_fails(worker, writer.id):
        files: dict[int, list[PieceFile]] = {}
        if go_on is not None:
            _ask(worker, writer, after, moment, files, begin=True)
            go_on()
        _ask(worker, writer, after, moment, files, begin=False)
        for server in sorted(files):
            _check(worker, server, files[server], moment.spec)
            writer.add(files[server])
        seed = files[0][0].about["seed"]
        if moment.state:
            with writer.pieces(f"worker-{worker.assignment.index}") as pieces:
                for entries, state in moment.state:
                    pieces.add({"dense": entries}, dict(zip(names(entries), state, strict=True)))
            writer.add(pieces.files)
        if shares is not None:
            collected = collected or own.collect(shares)
            with writer.pieces("workers") as pieces:
                write_states(pieces, own.collected(shares, collected))
            writer.add(pieces.files)
        saved = writer.commit(moment.steps, seed, moment.spec)
    settle = pb.Settle(id=saved.id, url=saved.url)
    worker.connections.ask("end of a checkpoint", settle=settle)


def _ask(
    worker: WorkerRuntime,
    writer: CheckpointWriter,
    after: Saved | None,
    moment: Moment,
    files: dict[int, list[PieceFile]],
    *,
    begin: bool,
) -> None:
    """Ask every server to begin its share, or to finish it: then ``files`` has what it wrote. A server that cannot
    write sends its share when it should begin, as nobody else keeps that as it is."""
    save = pb.Save(
        id=writer.id,
        after="" if after is None else after.id,
        folder=writer.folder.url,
        proof=writer.proof,
        version=moment.version,
        begin=begin,
    )
    replies = worker.connections.ask_all(
        lambda _, client: Frame(client.request(moment.version, save=save)), f"a checkpoint at {save.folder}"
    )
    for server, reply in enumerate(replies):
        if not reply.message.granted and server not in files:
            with writer.pieces(f"server-{server}") as pieces:
                _fetch(worker, moment.version, server, writer.id, pieces)
            files[server] = pieces.files
        elif reply.message.granted and not begin:
            files[server] = [PieceFile.from_json(each) for each in json.loads(reply.message.about)]


def _check(worker: WorkerRuntime, server: int, files: Sequence[PieceFile], spec: JobSpec) -> None:
    """Refuse a share of a server that was killed, and has written it once more with what has joined the job since."""
    known = {*(param.name for param in spec.params), *(table.name for table in spec.tables)}
    told = [file.about for file in files]
    named = {entry["param"] for about in told for entry in about.get("dense", ())}
    named |= {about[kind] for about in told for kind in ("table", "counts") if kind in about}
    if not named <= known:
        where = str(worker.connections.by_server[server].endpoint)
        raise MissedError("a server was killed while it wrote its share", where=where)


def _fetch(worker: WorkerRuntime, version: int, server: int, checkpoint: str, pieces: PieceWriter) -> None:
    for piece in exported(worker.connections.by_server[server], version, checkpoint):
        pieces.add(piece.about, piece.tensors)


class CheckpointStates:
    """Brings the states of all workers into the checkpoints that worker 0 saves from time to time."""

    def __init__(self, worker: WorkerRuntime, *, gives: bool) -> None:
        self._worker = worker
        self._own_states = worker.own_states
        self._progress = worker.progress
        self._shares_steps = worker.policy.shares_steps
        self._is_alone = worker.assignment.worker_num == 1
        self._own_states.gives = gives

    @property
    def needs_notice(self) -> bool:
        """Say whether others have to hear of a checkpoint before its step: their states right after it are saved."""
        return self._is_any_given and self._shares_steps and not self._is_alone

    def ask(self, step: int) -> None:
        """Tell all workers that a checkpoint is to follow a step."""
        # In lockstep the job's steps may have other numbers than the user's, who goes on from a checkpoint.
        self._own_states.ask(step - self._progress.taken + self._progress.completed)

    @property
    def asked(self) -> str:
        """Return the name under which all workers have been asked after this step; empty if they have not."""
        return self._own_states.asked

    @property
    def wanted(self) -> str | None:
        """Return the name under which this worker's state is wanted now; None if it is not. Without rounds nobody can
        know when it is, so it is wanted after every step."""
        return (self._progress.wanted or None) if self._shares_steps else ""

    def name_of_call(self, call: str) -> str:
        """Return the name of the states that are wanted in a call that every worker makes; empty where nobody gives
        any."""
        return self._progress.name_of_call(call) if self._is_any_given else ""

    @property
    def _is_any_given(self) -> bool:
        return self._own_states.gives or self._progress.others_give

    def give(self, name: str, state: Bytes, *, last: bool = False) -> None:
        """Hand over this worker's state; after the ``last`` one nobody waits for another."""
        if self._worker.stopped:
            return
        own = self._own_states
        self._worker.in_turn("Checkpoints", lambda: own.give(name, state, last=last) if name else own.pass_on(state))

    def end(self) -> None:
        self._own_states.gives = False
