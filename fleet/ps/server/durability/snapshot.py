"""A durable server writes down the state of its job, and a new job takes up what was written.

A snapshot is the shard, in pieces as for a checkpoint, and beside it the state: a JSON object with everything else that
is complete. What is not finished, or is large, is carried over into the journal that begins with the snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any

from fleet.errors import FleetError
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import PROTOCOL, make_plan
from fleet.plan.specs import JobSpec
from fleet.ps.consistency.membership import MemberRecord
from fleet.ps.consistency.staleness import total
from fleet.ps.server.checkpoint_reader import Origin, fill_own
from fleet.ps.server.durability.state_directory import Draft, Kind
from fleet.ps.server.job import Job, Moves
from fleet.ps.table.frozen_view import FrozenView
from fleet.ps.table.previous_round import PreviousRound
from fleet.ps.table.shard import FIRST, MakeShard, Piece, Shard, is_of_rows
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.wire_errors import raise_if_error

#: Pushes and gatherings that may not be finished, by what tells them apart: kind, worker, and step or number.
Unfinished = Mapping[tuple[str, int, int], Frame]

#: A record: what it is, and its bytes.
Record = tuple[Kind, list[bytes | memoryview]]


@dataclass(frozen=True)
class Shot:
    """Holds a snapshot as it is begun: what its pieces are made of, while the job goes on."""

    draft: Draft
    shard: Shard
    #: the epoch that began with it
    epoch: int
    #: all parameters, and where the rows begin, if there are tables
    parameters: list[Piece]
    rows: str
    frozen: FrozenView

    def export(self, cursor: str) -> Piece:
        return self.shard.export(cursor, self.frozen.since, frozen=self.frozen)


# ---------------------------------------------------------------- out of a job


def is_unfinished(job: Job, kind: str, worker: int, number: int) -> bool:
    """Say whether a push or a gathering has not come to its end."""
    return (worker, number) in job.rounds.pushed if kind == "push" else job.reductions.is_open(number)


def signed(unfinished: Unfinished, members: Sequence[MemberRecord]) -> dict[tuple[str, int, int], Frame]:
    """Return the same in the names of those who are members: what somebody brought who has been replaced since would be
    refused when it is done over."""
    incarnations = {worker: incarnation for worker, _, incarnation, _ in members}
    made: dict[tuple[str, int, int], Frame] = {}
    for key, frame in unfinished.items():
        incarnation = incarnations.get(frame.message.worker, frame.message.incarnation)
        if frame.message.incarnation != incarnation:
            message = pb.Request()
            message.CopyFrom(frame.message)
            message.incarnation = incarnation
            frame = Frame(message, frame.tensors)
        made[key] = frame
    return made


def state_of(
    job: Job, shard: Shard, members: Sequence[MemberRecord], unfinished: Unfinished, *, anew: bool = False
) -> dict[str, Any]:
    """Return the state of a job as it was before everything unfinished, which is done over, or may come ``anew``."""
    pending: dict[int, int] = {}
    steps = dict(job.progress.steps)
    for (kind, worker, number), frame in unfinished.items():
        if kind == "push":
            pending[worker] = min(number, pending.get(worker, number))
            steps[worker] -= frame.message.push.steps
    plans, rounds, progress = job.plans, job.rounds, job.progress
    clocks = {worker: pending.get(worker, clock + 1) - 1 for worker, clock in rounds.gate.clocks.items()}
    return {
        "spec": plans.current.spec.to_json(),
        "placement": plans.current.placement,
        "protocol": PROTOCOL,
        "job_id": job.job_id,
        "server": shard.server,
        "seed": shard.seed,
        "options": shard.options,
        "clock": shard.dense.clock,
        "table_steps": [table.step for table in shard.tables],
        "past": shard.past,
        "now": shard.now,
        "staleness": total([shard.staleness.counts]),
        "late": shard.staleness.late,
        "norms": rounds.norms,
        "agreed": job.rounds.agreed,
        "clocks": clocks,
        "gate": rounds.gate.memory(clocks, anew=anew),
        "gone": rounds.gate.gone,
        "version": rounds.gate.version,
        "came": job.reductions.dump(),
        "steps_before": progress.before,
        "workers_then": progress.workers_then,
        "steps_then": progress.steps_then,
        "steps": steps,
        "loads": progress.loads,
        "taken": job.background.taken,
        "last": job.background.last,
        "began": astuple(job.began),
        "record": astuple(job.record),
        "former": [plan.spec.to_json() for plan in plans.former],
        "outgrown": {worker: plan.spec.to_json() for worker, plan in plans.outgrown.items()},
        "claims": job.claims.dump(),
        "moved": {
            "servers": job.moves.servers,
            "past": [*job.moves.past],
            "former": {worker: [*each] for worker, each in job.moves.former.items()},
        },
        "members": members,
    }


def carried_over(job: Job, shard: Shard, unfinished: Unfinished) -> Iterator[Record]:
    """Yield the records that a new journal begins with."""
    previous = job.rounds.previous
    small: list[Record] = [
        *((Kind.OUTCOME, _numbered(number, reply)) for number, reply in job.reductions.outcomes()),
        *((Kind.BEFORE, _previous_frame(each).buffers()) for each in [previous] if each is not None),
        *((Kind.STATE, frame.buffers()) for frame in job.states.dump()),
        *((Kind.REQUEST, frame.buffers()) for frame in unfinished.values()),
    ]
    return chain(small, _given(shard))


def parameters_of(shard: Shard, since: int) -> tuple[list[Piece], str]:
    """Return copies of all parameters, and the cursor at which the rows begin that were changed ``since``."""
    pieces, cursor = [], FIRST
    while cursor and not is_of_rows(cursor):
        pieces.append(shard.export(cursor, since))
        cursor = pieces[-1].next_cursor
    return pieces, cursor


def _given(shard: Shard) -> Iterator[Record]:
    """Yield the values that workers were given, as far as they are remembered, in parts: one at a time, as they may be
    large."""
    for about, tensors in [] if shard.readers is None else shard.readers.dump():
        yield Kind.GIVEN, Frame(pb.Reply(about=json.dumps(about)), [*map(WireTensor.of, tensors)]).buffers()


def _numbered(number: int, reply: Frame) -> list[bytes | memoryview]:
    reply.message.version = number
    return reply.buffers()


def _previous_frame(previous: PreviousRound) -> Frame:
    rows = [WireTensor.of(each) for pair in previous.rows.values() for each in pair]
    dense = map(WireTensor.of, previous.dense)
    return Frame(pb.Reply(version=previous.version, changed=previous.rows), [*dense, *rows])


# ---------------------------------------------------------------- into a job


def restore(
    job: Job,
    state: Mapping[str, Any],
    pieces: Iterable[tuple[dict[str, Any], list[Any]]],
    now: float,
    make_shard: MakeShard,
) -> Shard:
    """Make a new job the one that this was written of, and return its shard."""
    shard = make_shard(job.plans.current, state["server"], state["seed"], state["options"])
    fill_own(shard, pieces)
    shard.resume_past(state.get("past", {}), state.get("now", 0.0))
    shard.staleness.resume(state["staleness"], state.get("late", {}))
    take_up(job, shard, state, now)
    return shard


def take_up(job: Job, shard: Shard, state: Mapping[str, Any], now: float) -> None:
    """Let a new job, whose values are in ``shard``, be as far as the one that this state was written of."""
    shard.dense.clock = state["clock"]
    for table, step in zip(shard.tables, state["table_steps"], strict=True):
        table.step = step
    shard.warm()
    job.shard, job.initialized = shard, True
    clocks, gone = _by_worker(state["clocks"]), _by_worker(state["gone"])
    job.rounds.gate.resume(clocks, gone, state["version"], state.get("gate", {}))
    job.rounds.agreed = {int(index): tuple(each) for index, each in state.get("agreed", {}).items()}
    job.rounds.norms = {int(version): tuple(each) for version, each in state.get("norms", {}).items()}
    job.reductions.restore(_by_worker(state["came"]))
    job.claims.restore(state["claims"], now)
    progress, plans = job.progress, job.plans
    progress.before, progress.steps, progress.loads = state["steps_before"], _by_worker(state["steps"]), state["loads"]
    job.background.taken, job.background.last = state["taken"], (state["last"][0], state["last"][1])
    # What is not in the snapshots of earlier releases.
    job.began, job.record = Origin(*state.get("began", ())), Origin(*state.get("record", ()))
    progress.workers_then, progress.steps_then = state.get("workers_then", 0), _by_worker(state.get("steps_then", {}))
    plans.former = [make_plan(JobSpec.from_json(each)) for each in state.get("former", ())]
    plans.outgrown = {
        int(worker): make_plan(JobSpec.from_json(each)) for worker, each in state.get("outgrown", {}).items()
    }
    moved = state.get("moved", {"servers": (), "past": [], "former": {}})
    if "past" not in moved:  # which does not say where earlier moves have led
        named = [*moved["earlier"], *filter(None, [moved["made"]])]
        moved["past"] = [(each, moved["servers"] if each == moved["made"] else ()) for each in named]
    past = [(made, tuple(servers)) for made, servers in moved["past"]]
    former = {int(worker): {*each} for worker, each in moved["former"].items()}
    job.moves = Moves(tuple(moved["servers"]), past, former=former)


def recall(job: Job, kind: Kind, frame: Frame) -> None:
    """Take up a record that was carried over from the journal before."""
    if kind is Kind.OUTCOME:
        job.reductions.know(frame.message.version, _outcome_of(frame))
    elif kind is Kind.BEFORE:
        job.rounds.previous = _previous_round(frame)
    elif kind is Kind.STATE:
        job.states.restore(frame)
    elif job.shard is not None and job.shard.readers is not None:
        job.shard.readers.restore(json.loads(frame.message.about), [tensor.torch() for tensor in frame.tensors])


def _previous_round(frame: Frame) -> PreviousRound:
    message, first = frame.message, len(frame.tensors) - 2 * len(frame.message.changed)
    pairs = [each.numpy() for each in frame.tensors[first:]]
    rows = dict(zip(message.changed, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
    return PreviousRound(message.version, [each.torch() for each in frame.tensors[:first]], rows)


def _by_worker(raw: Mapping[str, int]) -> dict[int, int]:
    return {int(worker): number for worker, number in raw.items()}


def _outcome_of(reply: Frame) -> Any:
    """Return the outcome of a gathering, out of the reply that told it."""
    try:
        raise_if_error(reply)
    except FleetError as error:
        return error
    return reply.tensors[0] if reply.tensors else None
