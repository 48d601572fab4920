"""The requests of a step: gradients that are pushed, values that are pulled, and the answers, made when their version
is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fleet.errors import ConfigurationError, FleetError, PlanMismatchError, ProtocolError
from fleet.numeric.tensors import WireTensor
from fleet.plan.specs import DTYPES
from fleet.ps.consistency.gate import Effect
from fleet.ps.server.context import Floor
from fleet.ps.server.job import Job
from fleet.ps.server.pending import Arrival, Waiting
from fleet.ps.server.push_decoder import contribution_of
from fleet.ps.server.state_requests import check_name, share_of
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.low_precision import Narrow
from fleet.ps.wire.wire_errors import error_reply

_MOST_TEXT = 1000


class StepRequests:
    def __init__(self, floor: Floor) -> None:
        self._floor = floor

    def part(self, arrival: Arrival) -> None:
        """Gradients ahead of their push."""
        job, request = self._floor.running(), arrival.request
        if not job.initialized or job.growing or request.step != job.gate.delivered(request.worker) + 1:
            raise ProtocolError("a part came before its push was due", where=str(self._floor.endpoint))
        # A journal has pushes that are whole.
        may = self._floor.memory is None and job.policy.takes_gradients_early
        granted = may and Narrow(job.plan.spec.settings.wire_dtype).is_plain
        if granted:
            job.parts.add(request, arrival.tensors, self._floor.shard().dense)
        arrival.answer(pb.Reply(granted=granted))

    def push(self, arrival: Arrival) -> None:
        floor, job, request = self._floor, self._floor.running(), arrival.request
        worker, step = request.worker, request.step
        is_repeated = step <= job.gate.delivered(worker) and worker in job.outgrown
        if worker in job.outgrown and not is_repeated:
            raise _lacking(job, worker, f"{floor.endpoint}, step {step}")
        # The answer to one may have been lost, and others may add parameters since.
        if not job.initialized or (job.growing and not is_repeated):
            raise ProtocolError("a push came before the initial values", where=str(floor.endpoint))
        quiet = request.push.quiet
        told = None
        if job.policy.remembers_push(brings_values=not quiet):
            told = Frame(pb.Request(worker=worker, step=step, push=pb.Push(quiet=quiet)))
        waiting = Waiting(
            worker,
            f"push of step {step}",
            floor.clock.now(),
            arrival.respond,
            lambda: self._values_after(job, worker, step, quiet),
            handing_out=told,
        )
        floor.check_patience(waiting)
        tensors, kept = arrival.tensors, None
        check_name(request.push.keeping.asks)
        if request.push.keeping.kept:
            tensors, kept = tensors[:-1], share_of(tensors[-1:], 0)
        effects: list[Effect] = []
        if step > job.gate.delivered(worker):
            if any(other == worker for other, _ in job.pushed):
                raise ProtocolError(f"worker {worker} pushed before its last round was over", got=f"step {step}")
            job.pushed[worker, step] = contribution_of(
                request, tensors, floor.shard(), job.parts, floor.endpoint, floor.most_bytes
            )
            try:
                effects = job.gate.push(worker, step)
            except ProtocolError:
                del job.pushed[worker, step]
                raise
            job.steps[worker] = job.steps.get(worker, 0) + request.push.steps
        job.states.pushed(worker, step, request.push.keeping)
        if kept is not None:
            job.states.keep(worker, step, replace(kept, steps=job.steps_of(worker)))
        needed = job.policy.version_needed(step)
        floor.park(needed, waiting, effects, arrival.outbox)

    def pull(self, arrival: Arrival) -> None:
        floor, job, request = self._floor, self._floor.running(), arrival.request
        pull, ids = request.pull, arrival.tensors
        if not (len(pull.tables) == len(pull.training) == len(ids)):
            raise ProtocolError("a pull's tables and ids differ in number")
        wanted = _wanted(pull, ids)
        self._check_reply(job, pull, ids)
        is_remembered = job.policy.remembers_read(dense=pull.dense, training=any(pull.training))
        waiting = Waiting(
            request.worker,
            f"values at step {request.step}",
            floor.clock.now(),
            arrival.respond,
            lambda: self._values(job, request.worker, pull.version, pull.dense, wanted),
            ahead=pull.ahead,
            has_rows=bool(wanted),
            nbytes=arrival.frame.nbytes,
            handing_out=arrival.frame if is_remembered else None,
        )
        floor.check_patience(waiting)
        # While the job grows, workers that are not there yet still need rows to get there.
        if job.initialized and not (job.growing and pull.dense and request.worker not in job.outgrown):
            floor.park(pull.version, waiting, [], arrival.outbox)
        else:
            job.early.append((pull.version, waiting))

    def hand_out_again(self, told: Frame) -> None:
        """Remember of a worker what it was given once, with an answer that nobody reads now."""
        job, request = self._floor.running(), told.message
        if request.WhichOneof("kind") == "push":
            self._values_after(job, request.worker, request.step, request.push.quiet)
        else:
            pull = request.pull
            self._values(job, request.worker, pull.version, pull.dense, _wanted(pull, told.tensors))

    def _check_reply(self, job: Job, pull: Any, ids: Sequence[WireTensor]) -> None:
        """Repeated ids make a large reply of a small request, for which memory would be taken here."""
        tables, most_bytes = job.plan.spec.tables, self._floor.most_bytes
        nbytes = 0
        for index, tensor in zip(pull.tables, ids, strict=True):
            if index >= len(tables):
                raise ProtocolError("a message names a table this job does not have", got=index)
            nbytes += tensor.array.size * tables[index].dim * DTYPES[tables[index].dtype]
        if nbytes > most_bytes:
            raise ConfigurationError(
                "a reply would be larger than a message may be",
                where=str(self._floor.endpoint),
                expected=f"at most {most_bytes >> 20} MiB (FLEET_MAX_MESSAGE_MB)",
                got=f"{nbytes / (1 << 20):.1f} MiB of rows",
                todo="Ask for fewer rows at once, or raise FLEET_MAX_MESSAGE_MB for every process.",
            )

    def _values(
        self, job: Job, worker: int, needed: int, dense: bool, wanted: Sequence[tuple[int, Any, bool]]
    ) -> Frame:
        """Values that a worker needs at a version at least: the current ones, but for one that goes back a step. Rows
        are copied now, under the lock, dense values when they change; encoding and sending come after it."""
        shard, before = self._floor.shard(), job.before_for(worker, needed)
        version = job.gate.version if before is None else before.version
        reply = pb.Reply(version=version, clock=shard.dense.clock, loads=job.loads, steps=job.steps_of(worker))
        tensors: list[WireTensor] = []
        if dense:
            flats = job.dense_for(worker, job.dense_at(version) if before is None else before.dense)
            tensors += [WireTensor.of(tensor) for tensor in flats]
            if shard.compensation is not None:
                handed = dict(zip(shard.dense.layout.dtypes, flats, strict=True))
                shard.compensation.handed_dense(worker, handed)
        try:
            for table, ids, training in wanted:
                rows = shard.read(table, ids, training)
                if before is not None:
                    before.restore(table, ids, rows)
                tensors.append(WireTensor.of(rows))
                reply.table_clocks.append(shard.tables[table].step)
                if shard.compensation is not None and training:
                    shard.compensation.handed_rows(worker, table, ids, rows)
                if shard.changes is not None and training:
                    shard.changes.hold(worker, table, ids)
        except FleetError as error:
            return error_reply(error)
        return Frame(reply, tensors)

    def _values_after(self, job: Job, worker: int, step: int, quiet: bool) -> Frame:
        """The answer to a push."""
        values = self._values(job, worker, step, not quiet, ())
        values.message.delivered = job.gate.delivered(worker)
        values.message.wanted = job.states.wanted(step)
        values.message.others_give = job.states.others_give(worker)
        return values if self._floor.shard().changes is None else self._with_changes(values, worker, step)

    def _with_changes(self, values: Frame, worker: int, step: int) -> Frame:
        """The answer to a GEO worker's push: also the rows it holds that others have changed; all tables' clocks."""
        shard = self._floor.shard()
        assert shard.changes is not None
        for table, ids in shard.changes.take(worker, step).items():
            values.message.changed.append(table)
            values.tensors += [WireTensor.of(ids), WireTensor.of(shard.read(table, ids, training=True))]
        values.message.table_clocks.extend(table.step for table in shard.tables)
        return values


def _lacking(job: Job, worker: int, where: str) -> PlanMismatchError:
    known, there = job.outgrown[worker].spec, job.plan.spec
    names = [param.name for param in there.params[len(known.params) :]]
    names += [table.name for table in there.tables[len(known.tables) :]]
    return PlanMismatchError(
        f"worker {worker} lacks parameters that have joined the job",
        where=where,
        got=f"gradients without {', '.join(map(repr, names))}"[:_MOST_TEXT],
        todo="Call add_param_group on every worker, after the same step; on one that starts again later, at once.",
    )


def _wanted(pull: Any, ids: Sequence[WireTensor]) -> list[tuple[int, Any, bool]]:
    """The tables that a pull asks, each for which rows, and whether to train them."""
    rows = [tensor.numpy() for tensor in ids]
    return list(zip(pull.tables, rows, pull.training, strict=True))
