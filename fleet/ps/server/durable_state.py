"""What a server has to remember of its job, and how it becomes what it was: the job's side of ``durable.py``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fleet.errors import FleetError
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import make_plan
from fleet.plan.specs import JobSpec
from fleet.ps.consistency.membership import Told
from fleet.ps.consistency.staleness import total
from fleet.ps.server.checkpoint_reader import fill_own
from fleet.ps.server.job import Job, Origin
from fleet.ps.server.state_directory import Draft, Kind, Snapshot, StateDirectory
from fleet.ps.table.frozen_view import FrozenView
from fleet.ps.table.previous_round import PreviousRound
from fleet.ps.table.shard import FIRST, Piece, Shard, is_of_rows
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame, read_frame
from fleet.ps.wire.wire_errors import raise_if_error

#: Requests that change what a server would do next.
NOTED = frozenset(
    ("hello", "upload", "ready", "extend", "push", "gather", "claim", "release", "settle", "give", "bye", "abort")
)


@dataclass(frozen=True)
class Shot:
    """A snapshot as it is begun: what its pieces are made of, while the job goes on."""

    draft: Draft
    shard: Shard
    #: the epoch that began with it
    epoch: int
    #: all parameters, and where the rows begin, if there are tables
    parameters: list[Piece]
    rows: str
    frozen: FrozenView

    def export(self, cursor: str) -> Piece:
        return self.shard.export(cursor, frozen=self.frozen)


class Memory:
    def __init__(self, durable: StateDirectory) -> None:
        self._durable = durable
        #: pushes and gatherings that may not be finished, by what tells them apart
        self._open: dict[tuple[str, int, int], Frame] = {}
        self.replaying = False
        #: the shard that the last snapshot is of, and the epoch that began with it
        self._kept: tuple[Shard | None, int] = (None, 0)
        #: whether there is anything from before
        self.goes_on = False

    @property
    def directory(self) -> Path:
        return self._durable.directory

    # ---------------------------------------------------------------- becoming what was

    def known(self) -> dict[str, Any] | None:
        """What the last snapshot tells apart from the shard."""
        return None if self._durable.snapshot is None else self._durable.snapshot.state

    def resume(self, job: Job, state: dict[str, Any], now: float) -> None:
        """Make a new job the one that the last snapshot is of."""
        shard = Shard(job.plan, state["server"], state["seed"], state["options"])
        fill_own(shard, self._durable.pieces())
        shard.dense.clock = state["clock"]
        for table, step in zip(shard.tables, state["table_steps"], strict=True):
            table.step = step
        shard.staleness.resume(state["staleness"])
        shard.warm()
        self._kept = shard, shard.history.next_epoch()
        job.shard, job.initialized = shard, True
        job.gate.resume(_by_worker(state["clocks"]), _by_worker(state["gone"]), state["version"])
        job.hall.resume(_by_worker(state["came"]))
        job.steps_before, job.steps = state["steps_before"], _by_worker(state["steps"])
        job.loads, job.taken = state["loads"], state["taken"]
        job.last = (state["last"][0], state["last"][1])
        job.claims.resume(state["claims"], now)
        # What is not in the snapshots of earlier releases.
        job.began = Origin(*state.get("began", ()))
        job.workers_then, job.steps_then = state.get("workers_then", 0), _by_worker(state.get("steps_then", {}))
        job.former = [make_plan(JobSpec.from_json(each)) for each in state.get("former", ())]
        job.outgrown = {
            int(worker): make_plan(JobSpec.from_json(each)) for worker, each in state.get("outgrown", {}).items()
        }

    def replay(
        self,
        running: Callable[[], Job],
        begin_with: Callable[[Origin], None],
        ask: Callable[[Frame], None],
        hand_out: Callable[[Frame], None],
        lose: Callable[[int], None],
    ) -> None:
        """Do over what happened since."""
        self.replaying = True
        try:
            for kind, data in self._durable.records():
                self.goes_on = True
                if kind is Kind.ORIGIN:
                    begin_with(Origin(*json.loads(bytes(data))))
                elif kind is Kind.LOST:
                    lose(int.from_bytes(data, "little"))
                elif kind in (Kind.REQUEST, Kind.HANDED):
                    (ask if kind is Kind.REQUEST else hand_out)(read_frame(pb.Request, [data]))
                else:
                    _recall(running(), kind, read_frame(pb.Reply, [data], limit=len(data)))
        finally:
            self.replaying = False
        self.goes_on = self.goes_on or self._durable.snapshot is not None

    # ---------------------------------------------------------------- remembering

    def begun(self, origin: Origin) -> None:
        """A job is about to begin with this checkpoint, or with none."""
        if not self.replaying:
            self._durable.record(Kind.ORIGIN, [json.dumps(astuple(origin)).encode()])

    def note(self, kind: str, frame: Frame) -> None:
        """A request that is about to be carried out."""
        if kind not in NOTED:
            return
        if not self.replaying:
            self._durable.record(Kind.REQUEST, frame.buffers())
        message = frame.message
        if kind == "push":
            self._open[kind, message.worker, message.step] = frame
        elif kind == "gather":
            self._open[kind, message.worker, message.gather.number] = frame

    def lost(self, worker: int) -> None:
        """A worker is given up on."""
        if not self.replaying:
            self._durable.record(Kind.LOST, [worker.to_bytes(4, "little")])

    def hand_out(self, told: Frame) -> None:
        """What is about to be answered, and remembered, says ``told``."""
        self._durable.record(Kind.HANDED, told.buffers())

    def settle(self, job: Job) -> None:
        """Let go of what is finished."""
        self._open = {key: frame for key, frame in self._open.items() if _is_open(job, *key)}

    def is_due(self, job: Job) -> bool:
        """Whether to take a snapshot now. None can be while somebody who has left has a part in something open: what
        it brought would be refused when it is done over."""
        if self.replaying or not self._durable.is_due:
            return False
        self.settle(job)
        return all(worker in job.gate.clocks for _, worker, _ in self._open)

    def secure(self) -> None:
        """What was noted by now may be heard of when this returns. Not under the server's lock: it may take long."""
        self._durable.secure()

    def sync_if_due(self, now: float) -> None:
        """Not under the server's lock either."""
        self._durable.sync_if_due(now)

    def sync(self) -> None:
        """Nor is this."""
        self._durable.sync()

    def begin(self, job: Job, members: Sequence[Told], *, behind: bool) -> Shot:
        """A snapshot of a job whose parameters all are there, as they are now."""
        shard = job.shard
        assert shard is not None
        self.settle(job)
        pending: dict[int, int] = {}
        for kind, worker, number in self._open:
            if kind == "push":
                pending[worker] = min(number, pending.get(worker, number))
        state = {
            "spec": job.plan.spec.to_json(),
            "placement": job.plan.placement,
            "job_id": job.job_id,
            "server": shard.server,
            "seed": shard.seed,
            "options": shard.options,
            "clock": shard.dense.clock,
            "table_steps": [table.step for table in shard.tables],
            "staleness": total([shard.staleness.counts]),
            "clocks": {worker: pending.get(worker, clock + 1) - 1 for worker, clock in job.gate.clocks.items()},
            "gone": job.gate.gone,
            "version": job.gate.version,
            "came": job.hall.told(),
            "steps_before": job.steps_before,
            "workers_then": job.workers_then,
            "steps_then": job.steps_then,
            "steps": {worker: steps - self._steps_pending(worker) for worker, steps in job.steps.items()},
            "loads": job.loads,
            "taken": job.taken,
            "last": job.last,
            "began": astuple(job.began),
            "former": [plan.spec.to_json() for plan in job.former],
            "outgrown": {worker: plan.spec.to_json() for worker, plan in job.outgrown.items()},
            "claims": job.claims.told(),
            "members": members,
        }
        (before, since), whole = self._kept, sum(table.nbytes for table in shard.tables)
        on_top = before is shard and self._durable.table_bytes < 2 * whole
        epoch = shard.history.next_epoch()
        carried = [
            *((Kind.OUTCOME, _numbered(number, reply)) for number, reply in job.hall.outcomes()),
            *((Kind.BEFORE, _told(before).buffers()) for before in [job.before] if before is not None),
            *((Kind.STATE, frame.buffers()) for frame in job.states.told()),
            *((Kind.REQUEST, frame.buffers()) for frame in self._open.values()),
        ]
        given = ((Kind.GIVEN, part.buffers()) for part in _given(shard))  # one at a time: they may be large
        parameters, rows = _parameters(shard)
        draft = self._durable.begin(state, chain(carried, given), on_top=on_top, behind=behind)
        frozen = shard.freeze(since if on_top else 0, draft.pieces.add)
        return Shot(draft, shard, epoch, parameters, rows, frozen)

    def publish(self, shot: Shot) -> Snapshot:
        """All of it is written. Not under the server's lock."""
        return self._durable.publish(shot.draft)

    def adopt(self, shot: Shot, snapshot: Snapshot) -> None:
        """It is the last one now."""
        self._durable.adopt(shot.draft, snapshot)
        self._kept = shot.shard, shot.epoch

    def clean(self) -> None:
        """Remove what is superfluous since. Not under the server's lock."""
        self._durable.clean()

    def discard(self, shot: Shot) -> None:
        """It has come to nothing. Not under the server's lock."""
        self._durable.discard(shot.draft)

    def _steps_pending(self, worker: int) -> int:
        return sum(
            frame.message.push.steps for (kind, who, _), frame in self._open.items() if (kind, who) == ("push", worker)
        )

    def end(self, *, over: bool) -> None:
        """This process ends, and the job with it or not."""
        if over:
            self._durable.forget()
        else:
            self._durable.close()


def _is_open(job: Job, kind: str, worker: int, number: int) -> bool:
    return (worker, number) in job.pushed if kind == "push" else job.hall.is_open(number)


def _parameters(shard: Shard) -> tuple[list[Piece], str]:
    """Copies of all parameters, and the cursor at which the rows begin."""
    pieces, cursor = [], FIRST
    while cursor and not is_of_rows(cursor):
        pieces.append(shard.export(cursor))
        cursor = pieces[-1].next_cursor
    return pieces, cursor


def _numbered(number: int, reply: Frame) -> list[bytes | memoryview]:
    reply.message.version = number
    return reply.buffers()


def _told(before: PreviousRound) -> Frame:
    rows = [WireTensor.of(each) for pair in before.rows.values() for each in pair]
    return Frame(pb.Reply(version=before.version, changed=before.rows), [*map(WireTensor.of, before.dense), *rows])


def _given(shard: Shard) -> Iterator[Frame]:
    """What is remembered of what workers were given, in parts."""
    for about, tensors in [] if shard.readers is None else shard.readers.kept():
        yield Frame(pb.Reply(about=json.dumps(about)), [*map(WireTensor.of, tensors)])


def _recall(job: Job, kind: Kind, frame: Frame) -> None:
    """What was carried over from the journal before."""
    if kind is Kind.OUTCOME:
        job.hall.know(frame.message.version, _outcome_of(frame))
    elif kind is Kind.BEFORE:
        job.before = _before_of(frame)
    elif kind is Kind.STATE:
        job.states.recall(frame)
    elif job.shard is not None and job.shard.readers is not None:
        job.shard.readers.recall(json.loads(frame.message.about), [tensor.torch() for tensor in frame.tensors])


def _before_of(frame: Frame) -> PreviousRound:
    told, first = frame.message, len(frame.tensors) - 2 * len(frame.message.changed)
    pairs = [each.numpy() for each in frame.tensors[first:]]
    rows = dict(zip(told.changed, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
    return PreviousRound(told.version, [each.torch() for each in frame.tensors[:first]], rows)


def _by_worker(raw: dict[str, int]) -> dict[int, int]:
    return {int(worker): number for worker, number in raw.items()}


def _outcome_of(reply: Frame) -> Any:
    """What came of a gathering, out of the reply that told it."""
    try:
        raise_if_error(reply)
    except FleetError as error:
        return error
    return reply.tensors[0] if reply.tensors else None
