"""Writes what servers were at some step as a checkpoint: all servers of a job together, or one of them alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleet.base.clock import Clock
from fleet.checkpoint.entries import names
from fleet.checkpoint.manifest import DENSE, Saved
from fleet.checkpoint.pieces import PieceFile
from fleet.checkpoint.state import Bytes, write_states
from fleet.checkpoint.writer import CheckpointWriter
from fleet.errors import CheckpointError
from fleet.plan.specs import JobSpec
from fleet.ps.server.checkpoint_share import write_pieces
from fleet.ps.server.job import Job
from fleet.ps.server.replay import Replay, steps_of
from fleet.ps.table.shard import FIRST, Piece, Shard


@dataclass(frozen=True)
class _Share:
    """Holds what one server has of a checkpoint: after how many updates, and what it is of."""

    updates: int
    step: int
    seed: int
    spec: JobSpec
    files: list[PieceFile]


def write_job(replays: Sequence[Replay], step: int | None, out: object, clock: Clock) -> tuple[Saved, int]:
    """Write the state of a whole job after so many steps, or after the last that all servers have; return after how
    many."""
    with CheckpointWriter(out) as writer:
        shares = [_write(replay, step, writer, clock, alone=False) for replay in replays]
        last = min(share.updates for share in shares)
        shares = [
            share if share.updates == last else _write(replay, last, writer, clock, alone=False)
            for replay, share in zip(replays, shares, strict=True)
        ]
        first = shares[0]
        for replay, share in zip(replays, shares, strict=True):
            if (share.seed, share.step, share.spec) != (first.seed, first.step, first.spec):
                raise CheckpointError(
                    "the servers were not at the same point of one job",
                    where=f"step {last}",
                    expected=f"what {replays[0].kept.directory} has",
                    got=f"another state in {replay.kept.directory}",
                    todo="Name an earlier step, or one job (--job).",
                )
            writer.add(share.files)
        saved = writer.commit(first.step, first.seed, first.spec)
    return saved, last


def write_server(replay: Replay, step: int | None, out: object, clock: Clock) -> tuple[Saved, int]:
    """Write the state of one server after so many updates, or as it was last; return after how many. A parameter of
    which the server had blocks only is not there, but each of these blocks is, by its name."""
    with CheckpointWriter(out) as writer:
        share = _write(replay, step, writer, clock, alone=True)
        writer.add(share.files)
        saved = writer.commit(share.step, share.seed, share.spec)
    return saved, share.updates


def _write(replay: Replay, step: int | None, writer: CheckpointWriter, clock: Clock, *, alone: bool) -> _Share:
    """Write one server's share; one that has been written before gives way."""
    prefix = f"server-{replay.kept.server}"
    for name in writer.folder.names():
        if name.startswith(f"{prefix}-"):
            writer.folder.remove(name)
    found: list[_Share] = []

    def act(job: Job, updates: int) -> None:
        shard = job.held()
        shard.prepare()
        dense_state = job.policy.has_dense_state_on_servers

        def export(cursor: str) -> Piece:
            piece = shard.export(cursor, dense_state=dense_state)
            return _of_blocks(piece, shard) if alone and DENSE in piece.about else piece

        with writer.pieces(prefix) as pieces:
            write_pieces(pieces, FIRST, export, clock, behind=False)
            write_states(pieces, _states_of(job, updates))
        spec = _spec_of_share(job, shard) if alone else _spec_of_job(job)
        found.append(_Share(updates, steps_of(job, updates), shard.seed, spec, pieces.files))

    replay.to(step, act)
    return found[0]


def _states_of(job: Job, updates: int) -> Iterator[tuple[int, int, Bytes]]:
    """Yield the states that workers gave to be kept up to a step, where steps are shared."""
    for worker in sorted(job.rounds.gate.clocks) if job.policy.shares_steps else ():
        state = job.states.of(worker, updates)
        if state is not None:
            yield worker, state.steps, state.data


def _spec_of_job(job: Job) -> JobSpec:
    """Return what servers have of a job: not the parameters that its workers train."""
    spec = job.plans.current.spec
    return replace(spec, params=()) if spec.settings.has_dense_on_workers else spec


def _spec_of_share(job: Job, shard: Shard) -> JobSpec:
    """Return the spec of a job that has what one server has of it."""
    plan = job.plans.current
    params = []
    for slot in shard.dense.layout.slots:
        param = plan.param_of(slot.block)
        shape = param.shape if slot.is_whole else (slot.block.numel,)
        params.append(replace(param, name=plan.block_name(slot.block), shape=shape))
    return replace(plan.spec, params=tuple(params))


def _of_blocks(piece: Piece, shard: Shard) -> Piece:
    """Return a piece in which each block is a parameter of its own."""
    plan = shard.plan
    blocks = {
        (plan.param_of(slot.block).name, slot.block.offset): slot.block
        for slot in shard.dense.layout.slots
        if not slot.is_whole
    }

    def renamed(entry: dict[str, Any]) -> dict[str, Any]:
        name, offset = entry["param"], entry["offset"]
        begins = [start for of, start in blocks if of == name and start <= offset]
        if not begins:
            return entry
        block = blocks[name, max(begins)]
        return {**entry, "param": plan.block_name(block), "offset": offset - block.offset}

    about = [renamed(entry) for entry in piece.about[DENSE]]
    tensors = dict(zip(names(about), piece.tensors.values(), strict=True))
    return Piece({**piece.about, DENSE: about}, tensors, piece.next_cursor)
