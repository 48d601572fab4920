"""Workers push gradients and pull values: pushes close rounds, and answers are made when their version is there.

A push is read and checked against the plan before it becomes part of a round. The gate says what follows from it: a
round to apply, requests to answer. A request that cannot be answered yet is parked under a ticket and holds no thread.

The caller holds the server's lock.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fleet.base.clock import Clock
from fleet.errors import (
    ConfigurationError,
    FleetError,
    JobAbortedError,
    PlanMismatchError,
    ProtocolError,
    StateError,
)
from fleet.numeric.jit import Array
from fleet.numeric.tensors import WireTensor
from fleet.plan.layout import dense_layout
from fleet.plan.specs import DTYPES
from fleet.ps.consistency.gate import Answer, Apply, ApplyBuffer, Buffer, Changed, Discard, Effect
from fleet.ps.server.durability.durability import Durability
from fleet.ps.server.job import Due, Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.pending import Arrival, Outbox, Waiting, cannot_answer, way_out
from fleet.ps.server.state_requests import check_name, state_of
from fleet.ps.server.statistics import Statistics
from fleet.ps.table.bundle import parts
from fleet.ps.table.previous_round import PreviousRound
from fleet.ps.table.shard import Contribution, JoinedRows
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.low_precision import Narrow
from fleet.ps.wire.row_tensors import ids_of
from fleet.ps.wire.wire_errors import error_reply

_log = logging.getLogger("fleet.server")

_MOST_TEXT = 1000
#: So many norms are remembered when they have been applied, for a server that has not heard of them; and so many of the
#: last ones are told unasked.
_NORMS_KEPT, _NORMS_TOLD = 1024, 16


#: Told of the job, and of what it is about to be updated with.
BeforeUpdate = Callable[[Job, Due], None]


class StepRequests:
    def __init__(
        self,
        clock: Clock,
        end: JobEnd,
        statistics: Statistics,
        durability: Durability | None,
        before_update: BeforeUpdate | None = None,
    ) -> None:
        self._clock = clock
        self._end = end
        self._statistics = statistics
        self._durability = durability
        self._before_update = before_update
        self._tickets = itertools.count()

    # ---------------------------------------------------------------- requests

    def part(self, job: Job, arrival: Arrival) -> None:
        """Take gradients ahead of their push."""
        request, rounds = arrival.request, job.rounds
        if not job.initialized or job.plans.growing or request.step != rounds.gate.delivered(request.worker) + 1:
            raise ProtocolError("a part came before its push was due", where=job.where)
        # A journal has pushes that are whole.
        may = self._durability is None and job.policy.takes_gradients_early
        granted = may and Narrow(job.plans.current.spec.settings.wire_dtype).is_plain
        if granted:
            rounds.ahead.add(request, arrival.tensors, job.held().dense)
        arrival.answer(pb.Reply(granted=granted))

    def push(self, job: Job, arrival: Arrival) -> None:
        """Take the gradients of a step, and answer when their round is applied."""
        request, rounds, plans = arrival.request, job.rounds, job.plans
        worker, step, gate = request.worker, request.step, rounds.gate
        is_repeated = step <= gate.delivered(worker) and worker in plans.outgrown
        if worker in plans.outgrown and not is_repeated:
            raise _lacking(job, worker, step)
        # The answer to one may have been lost, and others may add parameters since.
        if not job.initialized or (plans.growing and not is_repeated):
            raise ProtocolError("a push came before the initial values", where=job.where)
        quiet = request.push.quiet
        handing_out = None
        if job.policy.remembers_push(brings_values=not quiet):
            handing_out = Frame(pb.Request(worker=worker, step=step, push=pb.Push(quiet=quiet)))
        waiting = Waiting(
            worker,
            push_of(step),
            self._clock.now(),
            arrival.respond,
            lambda: self._values_after(
                job, worker, step, quiet, is_push=True, since=None if request.push.unplaced else request.push.token
            ),
            told=arrival.told,
            handing_out=handing_out,
        )
        job.check_room(waiting)
        tensors, kept = arrival.tensors, None
        check_name(request.push.keeping.asks)
        if request.push.keeping.kept:
            tensors, kept = tensors[:-1], state_of(tensors[-1:], 0)
        effects: list[Effect] = []
        if step > gate.delivered(worker):
            if not job.policy.fills_buffers and (worker, gate.delivered(worker)) in rounds.pushed:
                raise ProtocolError(f"worker {worker} pushed before its last round was over", got=f"step {step}")
            rounds.pushed[worker, step] = contribution = contribution_of(job, request, tensors)
            if contribution.joined is not None:
                self._statistics.asked.note(*contribution.joined[:3])
            gate.note(worker, step, request.push.own_seconds, request.push.now)
            try:
                effects = gate.push(worker, step, None if request.push.unplaced else request.push.token)
            except ProtocolError:
                del rounds.pushed[worker, step]
                raise
            steps = job.progress.steps
            steps[worker] = steps.get(worker, 0) + request.push.steps
            job.claims.went_on(worker, arrival.outbox)
        job.states.pushed(worker, step, request.push.keeping)
        if kept is not None:
            job.states.keep(worker, step, replace(kept, steps=job.steps_of(worker)))
        needed = max(job.policy.version_needed(step), gate.holds(worker, step))
        self._park(job, needed, waiting, effects, arrival.outbox)

    def place(self, job: Job, arrival: Arrival) -> None:
        """Take in which pushes become one update, as server 0 says, and answer with the values after those that do."""
        request = arrival.request
        worker, step, quiet = request.worker, request.step, request.place.quiet
        waiting = Waiting(
            worker,
            f"place of step {step}",
            self._clock.now(),
            arrival.respond,
            lambda: self._values_after(job, worker, step, quiet),
            told=arrival.told,
        )
        job.check_room(waiting)
        buffers, gate = _buffers_of(request.place.buffers), job.rounds.gate
        effects = gate.place(worker, step, buffers, request.place.gone)
        together = (buffer.version + 1 for buffer in buffers if buffer.together and not gate.is_held_up)
        needed = max((*together, gate.holds(worker, step)))
        self._park(job, needed, waiting, effects, arrival.outbox)

    def place_all(self, job: Job, told: Any, worker: int, outbox: Outbox) -> bool:
        """Take in which pushes become one update where nobody waits for it, if any are told, and return whether all of
        these updates are there."""
        if not (told.buffers or told.gone):
            return True
        buffers = _buffers_of(told.buffers)
        self.carry_out(job, job.rounds.gate.place(worker, 0, buffers, told.gone), worker, outbox)
        return all(buffer.version < job.rounds.gate.version for buffer in buffers if buffer.divisor)

    def clip(self, job: Job, arrival: Arrival) -> None:
        """Take in the norms of whole gradients, and answer with the values after what they let be applied."""
        request, rounds = arrival.request, job.rounds
        worker, step, told = request.worker, request.step, request.clip
        if len(told.versions) != len(told.totals) or any(not total >= 0 for total in told.totals if total == total):
            raise ProtocolError("the norms of gradients do not fit their versions", got=len(told.totals))
        waiting = Waiting(
            worker,
            f"norm of step {step}",
            self._clock.now(),
            arrival.respond,
            lambda: self._values_after(
                job, worker, step, quiet=told.parting, awaited={*told.awaited}, since=0 if told.parting else None
            ),
            told=arrival.told,
        )
        job.check_room(waiting)
        effects = rounds.gate.parts(worker) if told.parting else []
        totals = dict(zip(told.versions, told.totals, strict=True))
        for due in rounds.due:
            due.total = totals.get(due.version) if due.total is None else due.total
        try:
            self._apply_due(job)
        except Exception as error:
            self._fail_halfway(job, error, arrival.outbox)
            return
        self._park(job, job.policy.version_needed(step), waiting, effects, arrival.outbox)
        self.answer_held_back(job, worker, arrival.outbox)

    def pull(self, job: Job, arrival: Arrival) -> None:
        """Answer with values, when those of the wanted version are there."""
        request, rounds = arrival.request, job.rounds
        pull = request.pull
        is_counted = len(pull.tables) == len(pull.training) == len(pull.counts)
        is_counted = is_counted and len(pull.since) in (0, len(pull.tables))
        if not is_counted or len(arrival.tensors) != bool(pull.tables):
            raise ProtocolError("a pull's tables and ids differ in number")
        wanted = _wanted(pull, arrival.tensors)
        _check_reply(job, pull)
        if pull.since and not job.policy.shares_steps:
            raise ProtocolError("rows that have changed since a version were asked for where steps are not shared")
        if pull.since:
            rounds.recent.begin(rounds.gate.version)
        is_remembered = job.policy.remembers_read(dense=pull.dense, training=any(pull.training))
        waiting = Waiting(
            request.worker,
            f"values at step {request.step}",
            self._clock.now(),
            arrival.respond,
            lambda: self._values(job, request.worker, pull.version, pull.dense, wanted),
            ahead=pull.ahead,
            has_rows=bool(pull.tables),
            version=pull.version,
            nbytes=arrival.frame.nbytes,
            told=arrival.told,
            handing_out=arrival.frame if is_remembered else None,
        )
        job.check_room(waiting)
        # While the job grows, workers that are not there yet still need rows to get there.
        if job.initialized and not (job.plans.growing and pull.dense and request.worker not in job.plans.outgrown):
            self._park(job, pull.version, waiting, [], arrival.outbox)
        else:
            rounds.early.append((pull.version, waiting))

    def hand_out_again(self, job: Job, handed_out: Frame) -> None:
        """Remember what a worker was given once, with an answer that nobody reads now."""
        request = handed_out.message
        if request.WhichOneof("kind") == "push":
            self._values_after(job, request.worker, request.step, request.push.quiet)
        else:
            pull = request.pull
            self._values(job, request.worker, pull.version, pull.dense, _wanted(pull, handed_out.tensors))

    # ---------------------------------------------------------------- requests that wait

    def ticket(self) -> Hashable:
        """Return a new ticket."""
        return next(self._tickets)

    def hold_back(self, job: Job, ticket: Hashable, waiting: Waiting) -> None:
        """Park a request until its ticket is among those to answer."""
        job.rounds.parked[ticket] = waiting

    def _park(self, job: Job, version: int, waiting: Waiting, effects: list[Effect], outbox: Outbox) -> None:
        """Carry out what a request caused and let it wait for its version, which may be there at once."""
        ticket = next(self._tickets)
        job.rounds.parked[ticket] = waiting
        self.carry_out(job, effects + job.rounds.gate.wait(ticket, waiting.worker, version), waiting.worker, outbox)

    def release_early(self, job: Job, outbox: Outbox) -> None:
        """Let requests that came before the initial values wait for their version."""
        early, job.rounds.early = job.rounds.early, []
        for version, waiting in early:
            self._park(job, version, waiting, [], outbox)

    def answer(self, job: Job, tickets: Sequence[Hashable], by: int, outbox: Outbox) -> None:
        """Answer the requests that worker ``by`` has let be answered. A request is gone if the job has failed, or if
        the process that sent it has started again."""
        parked, durability = job.rounds.parked, self._durability
        there = [ticket for ticket in tickets if ticket in parked]
        if job.cuts and job.policy.shares_steps:
            held_back = [ticket for ticket in there if _reads_on(job, parked[ticket])]
            job.rounds.held_back += held_back
            there = [ticket for ticket in there if ticket not in held_back]
        if job.rounds.due:
            early = [ticket for ticket in there if parked[ticket].version > job.version]
            job.rounds.held_back += early
            there = [ticket for ticket in there if ticket not in early]
        if job.shard is not None and job.shard.has_pending:
            awaiting = [ticket for ticket in there if parked[ticket].has_rows]
            job.rounds.awaiting_rows += [(ticket, by) for ticket in awaiting]
            there = [ticket for ticket in there if ticket not in awaiting]
        for waiting in map(parked.take, there):
            self._statistics.released(waiting, by)
            if waiting.gathering and not any(each.gathering for each in parked.of(waiting.worker)):
                job.rounds.gate.goes_on(waiting.worker)
            if durability is None:
                outbox.append((waiting.respond, _answer_of(waiting)))
            elif not durability.replaying:  # else nobody would read it
                outbox.append((waiting.respond, self._kept_answer(job, durability, waiting, outbox)))

    def answer_held_back(self, job: Job, by: int, outbox: Outbox) -> None:
        """Answer the requests that waited until the servers had agreed on something, if worker ``by`` has let them."""
        if not job.cuts:
            tickets, job.rounds.held_back = job.rounds.held_back, []
            self.answer(job, tickets, by, outbox)

    def _kept_answer(self, job: Job, durability: Durability, waiting: Waiting, outbox: Outbox) -> Frame:
        if waiting.handing_out is not None:
            try:
                durability.note_handed(job, waiting.handing_out, outbox)
            except FleetError as error:
                return error_reply(error)
        return _answer_of(waiting)

    # ---------------------------------------------------------------- rounds

    def make_up(self, job: Job, kind: str, request: Any, outbox: Outbox) -> None:
        """Go on without the lost steps that a request takes for granted, or refuse it and end the job."""
        if self._durability is not None and (effects := self._durability.compare(job, kind, request, outbox)):
            self.carry_out(job, effects, request.worker, outbox)

    def make_up_by_heartbeats(self, job: Job, outbox: Outbox) -> None:
        """Do the same where workers send nothing else: who waits for another server, which waits in turn for who waits
        here, would wait for ever."""
        with suppress(FleetError):  # it has ended the job, of which all hear
            for beat in () if self._durability is None else self._durability.heard():
                self.make_up(job, "beat", beat, outbox)

    def carry_out(self, job: Job, effects: Sequence[Effect], by: int, outbox: Outbox) -> None:
        """Apply and answer what worker ``by`` has brought about."""
        try:
            for effect in effects:
                if isinstance(effect, Answer):
                    self.answer(job, [effect.ticket], by, outbox)
                elif isinstance(effect, Changed):
                    _log.warning("%s: %s", job.where, told_change(effect))
                elif isinstance(effect, Discard):
                    for push in effect.pushes:
                        job.rounds.pushed.pop(push, None)
                else:
                    self._apply(job, effect)
                    self._statistics.updated()
            self._apply_due(job)  # which the last to leave need not have heard of
        except Exception as error:
            self._fail_halfway(job, error, outbox)

    def _apply(self, job: Job, effect: Apply | ApplyBuffer) -> None:
        """Close a round, or a buffer, with what was pushed for it."""
        shard, rounds = job.shard, job.rounds
        assert shard is not None
        contributions = [rounds.pushed.pop(push) for push in effect.pushes]
        for worker, step in effect.dropped:
            rounds.pushed.pop((worker, step))
            shard.staleness.count_late(worker)
        due = Due(effect.version, contributions, effect.divisor)
        if self._is_clipped(job):
            due.squares = shard.squares(contributions, effect.divisor) if contributions else 0.0
        rounds.due.append(due)
        self._apply_due(job)

    @staticmethod
    def _is_clipped(job: Job) -> bool:
        settings = job.plans.current.spec.settings
        return settings.max_grad_norm > 0 and not settings.has_dense_on_workers

    def _apply_due(self, job: Job) -> None:
        """Apply what is complete, up to the first whose norm the servers have not agreed on."""
        rounds, settings = job.rounds, job.plans.current.spec.settings
        while rounds.due:
            due = rounds.due[0]
            scale = 1.0
            if self._is_clipped(job):
                if settings.server_num == 1 or not rounds.gate.clocks:  # there is nobody to agree with, or to ask
                    due.total = due.squares
                if due.total is None and len(rounds.due) > _NORMS_KEPT:
                    raise StateError(
                        "the norm of a gradient is known to no server any more", where=push_of(due.version)
                    )
                if due.total is None:
                    return
                rounds.norms[due.version] = due.squares, due.total
                rounds.norms.pop(due.version - _NORMS_KEPT, None)
                scale = clipped(due.total, settings.max_grad_norm)
            self._close(job, due, scale)

    def _close(self, job: Job, due: Due, scale: float) -> None:
        shard, rounds = job.shard, job.rounds
        assert shard is not None
        if self._before_update is not None:
            self._before_update(job, due)
        contributions = due.contributions
        if job.feed.is_awaited(due.version - 1) and not job.cuts:
            shard.apply_pending()
            job.feed.give(shard, due.version - 1, job.progress.loads, self._clock.now)
        # All of a worker's push is here or nothing, where there is no second server; without rounds no step has values.
        keep = job.policy.shares_steps and shard.plan.spec.settings.server_num > 1
        rounds.write_edits()
        rounds.previous = None
        rounds.recent.note(due.version, contributions)
        dense = _dense_at(job, due.version - 1) if keep else []
        rounds.snapshot = None
        shard.now = _time_at(job, contributions) or shard.now
        cut_is_due = _is_cut_due(job, frozenset().union(*(each.used for each in contributions)))
        divisor = due.divisor if scale == 1 else due.divisor / scale if scale else math.inf
        rows = shard.apply(contributions, divisor, keep=keep)
        rounds.due.popleft()
        if cut_is_due:
            rounds.cuts = None  # the answer says which
        if not job.policy.awaits_answers or cut_is_due:  # no answer would be there any sooner for who needs it
            shard.apply_pending()
        rounds.previous = PreviousRound(due.version - 1, dense, rows) if keep else None

    def apply_pending(self, job: Job, outbox: Outbox) -> None:
        """Finish a round whose first answers did not wait for the rest of it, and answer those that did."""
        try:
            with self._statistics.busy():
                job.held().apply_pending()  # while all are still there to hear of it, should it fail
                awaiting, job.rounds.awaiting_rows = job.rounds.awaiting_rows, []
                for ticket, by in awaiting:
                    self.answer(job, [ticket], by, outbox)
        except Exception as error:
            self._fail_halfway(job, error, outbox)

    def _fail_halfway(self, job: Job, error: Exception, outbox: Outbox) -> None:
        # Half a round is applied: nobody may go on from here as if nothing had happened.
        _log.exception("%s: the server failed", job.where)
        failure = JobAbortedError(f"server {job.where} failed", got=repr(error), todo=way_out(error))
        self._end.fail(failure, job, outbox)

    # ---------------------------------------------------------------- answers

    def _values(self, job: Job, worker: int, needed: int, dense: bool, wanted: Wanted | None = None) -> Frame:
        """Return the values that a worker needs, at a version at least: the current ones, but for a worker that goes
        back a step. Rows are copied now, under the lock, dense values when they change; encoding and sending come after
        it."""
        shard, previous = job.held(), job.rounds.previous_for(worker, needed)
        version = job.version if previous is None else previous.version
        steps = job.steps_of(worker)
        reply = pb.Reply(version=version, clock=shard.dense.clock, loads=job.progress.loads, steps=steps)
        tensors: list[WireTensor] = []
        if dense:
            flats = _known_to(job, worker, _dense_at(job, version) if previous is None else previous.dense)
            tensors += [WireTensor.of(tensor) for tensor in flats]
            if shard.compensation is not None:
                handed = dict(zip(shard.dense.layout.dtypes, flats, strict=True))
                shard.compensation.handed_dense(worker, handed)
        if wanted is not None and wanted.since:
            wanted, positions = self._changed(job, wanted, everything=previous is not None)
            reply.row_counts.extend(map(len, positions))
            tensors.append(WireTensor.of(np.concatenate(positions)))
        if wanted is not None:
            try:
                tensors += [WireTensor.of(rows) for rows in self._rows(job, worker, wanted, previous)]
            except FleetError as error:
                return error_reply(error)
            reply.table_clocks.extend([shard.tables[index].step for index in wanted.tables])
        return Frame(reply, tensors)

    @staticmethod
    def _changed(job: Job, wanted: Wanted, *, everything: bool) -> tuple[Wanted, list[Array]]:
        """Return what is left of what a pull asks for without the rows that have not changed, and the positions of
        their ids in each table. Rows that come and go change by themselves."""
        recent, specs = job.rounds.recent, job.plans.current.spec.tables
        positions = []
        for index, since, part in zip(wanted.tables, wanted.since, parts(wanted.stops), strict=True):
            ids = wanted.ids[part]
            is_known = since > 0 and not specs[index].has_rules and not everything
            positions.append(recent.changed(index, ids, since - 1) if is_known else np.arange(len(ids)))
        starts = [part.start for part in parts(wanted.stops)]
        places = np.concatenate([start + each for start, each in zip(starts, positions, strict=True)])
        stops = np.cumsum([len(each) for each in positions])
        return wanted._replace(ids=wanted.ids[places], stops=stops), positions

    def _rows(self, job: Job, worker: int, wanted: Wanted, previous: PreviousRound | None) -> list[Array]:
        """Return the rows of a pull, and note that the worker has them where that has to be known."""
        shard = job.held()
        asked = wanted.tables, wanted.training, wanted.ids, wanted.stops
        found = shard.read_joined(*asked, before_cut=previous is not None)
        self._statistics.asked.note(wanted.tables, wanted.ids, wanted.stops)  # now, as it refuses what is not there
        if previous is None and shard.readers is None:
            return found
        runs = [run.places for run in shard.request(wanted.tables, wanted.training).runs]
        joined = JoinedRows(wanted.tables, wanted.ids, wanted.stops, runs, found)
        for (index, ids, rows), is_trained in zip(joined.each(), wanted.training, strict=True):
            if previous is not None:
                previous.restore(index, ids, rows)
            if shard.compensation is not None and is_trained:
                shard.compensation.handed_rows(worker, index, ids, rows)
            if shard.changes is not None and is_trained:
                shard.changes.hold(worker, index, ids)
        return found

    def _values_after(
        self,
        job: Job,
        worker: int,
        step: int,
        quiet: bool,
        *,
        is_push: bool = False,
        awaited: Collection[int] = (),
        since: int | None = None,
    ) -> Frame:
        """Return the answer to a push; in a GEO job also the rows that the worker holds and others have changed, and
        the clocks of all tables; where this server fills buffers for others, what these have to know ``since`` the
        version of the values that the push read."""
        is_due = bool(job.rounds.due)
        values = self._values(job, worker, step, not quiet and not (is_due and is_push))
        if self._is_clipped(job) and job.plans.current.spec.settings.server_num > 1:
            last = max(job.rounds.norms, default=0) - _NORMS_TOLD
            for known, (squares, total) in job.rounds.norms.items():
                if known <= last and known not in awaited:
                    continue
                values.message.norms.append(pb.Norm(version=known, squares=squares, told=True, total=total))
            for due in job.rounds.due:
                values.message.norms.append(pb.Norm(version=due.version, squares=due.squares))
        values.message.delivered = job.rounds.gate.delivered(worker)
        values.message.wanted = job.states.wanted(step)
        values.message.others_give = job.states.others_give(worker)
        shard = job.held()
        values.message.cuts.extend(job.cuts)
        if since is not None and job.plans.current.spec.settings.server_num > 1 and job.policy.fills_buffers:
            for version, divisor, pushes, together in job.rounds.gate.buffers(since):
                tokens, workers, steps = zip(*pushes, strict=True)
                each = pb.Buffer(
                    version=version, divisor=divisor, tokens=tokens, workers=workers, steps=steps, together=together
                )
                values.message.buffers.append(each)
            values.message.gone.update(job.rounds.gate.gone)
        if shard.changes is not None:
            for table, ids in shard.changes.take(worker, step).items():
                values.message.changed.append(table)
                values.tensors += [WireTensor.of(ids), WireTensor.of(shard.read(table, ids, training=True))]
            values.message.table_clocks.extend(table.step for table in shard.tables)
        return values


def clipped(squares: float, most: float) -> float:
    """Return what a gradient of this squared norm is multiplied by, as ``torch.nn.utils.clip_grad_norm_`` has it."""
    if squares != squares:
        return math.nan
    return min(1.0, most / (math.sqrt(squares) + 1e-6))


def told_change(change: Changed) -> str:
    """Return in words what has changed about who waits for whom, when and why."""
    what = f"{'synchronous' if change.together else 'GBA'} from update {change.version} on"
    if change.gain is None:
        return f"{what}: as the strategy's changes say"
    if change.together:
        return (
            f"{what}: without waiting for each other the workers were {change.gain:.2f} times as fast, which is too "
            "little"
        )
    return f"{what}: without waiting for each other the workers are {change.gain:.2f} times as fast"


def push_of(step: int) -> str:
    """Return what a request is called that waits for the round of a step."""
    return f"push of step {step}"


def _buffers_of(told: Iterable[Any]) -> list[Buffer]:
    """Return the buffers that a worker tells of."""
    found = []
    for each in told:
        if not len(each.tokens) == len(each.workers) == len(each.steps):
            raise ProtocolError("a buffer's tokens, workers and steps differ in number", got=len(each.tokens))
        pushes = tuple(zip(each.tokens, each.workers, each.steps, strict=True))
        found.append(Buffer(each.version, each.divisor, pushes, each.together))
    return found


def contribution_of(job: Job, request: Any, tensors: Sequence[WireTensor]) -> Contribution:
    """Return what a worker pushed, out of its request. Every size is checked before it becomes part of a round, and
    before memory is taken for gradients that travelled in fewer bits."""
    shard = job.held()
    push, present = request.push, bytes(request.push.present)
    if len(present) != len(shard.dense.layout.slots):
        raise PlanMismatchError(
            f"worker {request.worker} pushes gradients of other parameters than the job has",
            where=job.where,
            expected=f"{len(shard.dense.layout.slots)} blocks",
            got=f"{len(present)}",
            todo="If a param group was added, add it on every worker, after the same step.",
        )
    narrow = Narrow(None if push.plain else shard.plan.spec.settings.wire_dtype)
    sizes = shard.dense.layout_of(present).sizes
    of_dense = sum(map(narrow.parts, sizes))
    tables = tuple(push.row_tables)
    if len({*tables}) != len(tables):
        raise ProtocolError("a push names a table twice", got=tables[:20])
    if not len(tables) == len(push.row_counts) == len(push.rows_read_at):
        raise ProtocolError("a push does not say how many rows a table has, or when they were read", got=len(tables))
    known = shard.request(tables)
    specs = [table.spec for table in known.tables]
    of_rows = sum(narrow.parts(specs[run.places.start].dtype) for run in known.runs)
    weighed = [place for place, spec in enumerate(specs) if spec.goes_by_weight]
    if len(tensors) != of_dense + bool(tables) + of_rows + bool(weighed):
        raise ProtocolError("a push has the wrong number of tensors", got=len(tensors))
    ids, stops = ids_of(tensors[of_dense:], push.row_counts)
    rest = iter(tensors[of_dense + bool(tables) :])
    gradients, nbytes, begin = [], 0, 0
    for places, _ in known.runs:
        spec, count = specs[places.start], int(stops[places.stop - 1]) - begin
        encoded = list(itertools.islice(rest, narrow.parts(spec.dtype)))
        nbytes += count * spec.dim * DTYPES[spec.dtype]
        if not narrow.is_plain and nbytes > job.most_bytes:
            raise ProtocolError(
                "a push has more rows than a message may hold",
                expected=f"at most {job.most_bytes >> 20} MiB, in {spec.dtype} (FLEET_MAX_MESSAGE_MB)",
                got=f"{nbytes / (1 << 20):.1f} MiB",
            )
        gradients.append(narrow.decode_rows(encoded, spec.dtype, (count, spec.dim)))
        begin += count
    joined = JoinedRows(tables, ids, stops, [run.places for run in known.runs], gradients)
    dense = present, narrow.decode_flats(tensors[:of_dense], sizes)
    contribution = Contribution(
        worker=request.worker,
        options=tuple(push.options),
        dense=job.rounds.ahead.joined(request, dense, shard.dense) if push.attempt else dense,
        rows=joined.by_table(),
        used=frozenset(push.used_tables) | frozenset(push.row_tables),
        read_at=push.read_at,
        rows_read_at=dict(zip(push.row_tables, push.rows_read_at, strict=True)),
        weights=_weights_of(joined, weighed, next(rest)) if weighed else None,
        now=_time_of(push) if any(table.goes_by_time for table in shard.plan.spec.tables) else None,
        joined=joined,
        own_s=push.own_seconds,
        sent_at=push.now,
    )
    shard.check(contribution)
    return contribution


def _weights_of(joined: JoinedRows, places: Sequence[int], tensor: WireTensor) -> dict[int, Array]:
    """Return the weights of look-ups for the tables that go by them, which stand at these places."""
    each = parts(joined.stops)
    stops = np.cumsum([each[place].stop - each[place].start for place in places])
    weights = tensor.numpy()
    if weights.shape != (stops[-1],):
        raise ProtocolError("weights of look-ups do not fit", expected=f"{stops[-1]}", got=f"{weights.shape}")
    return {joined.tables[place]: weights[part] for place, part in zip(places, parts(stops), strict=True)}


def _time_of(push: Any) -> float:
    """Return the time by the worker's clock."""
    now: float = push.now
    if not 0 < now < math.inf:
        raise ProtocolError("a push does not say what time it is", got=now)
    return now


def _time_at(job: Job, contributions: Sequence[Contribution]) -> float | None:
    """Return the time by the clock of the first worker that there is, if a rule asks for it and that one has pushed."""
    first = min(job.rounds.gate.clocks, default=0)
    return next((each.now for each in contributions if each.worker == first), None)


def _is_cut_due(job: Job, used: Iterable[int]) -> bool:
    """Say whether the round that uses these tables is one after which rows leave that all servers have to agree on."""
    shard = job.held()
    tables = [shard.tables[index] for index in used] if job.is_limited else []
    return any(table.spec.most_rows is not None and (table.step + 1) % shard.evict_every == 0 for table in tables)


def _reads_on(job: Job, waiting: Waiting) -> bool:
    """Say whether a request asks for rows as they are after the step at which some leave."""
    is_before = job.rounds.previous_for(waiting.worker, waiting.version) is not None
    return waiting.has_rows and not is_before


def _dense_at(job: Job, version: int) -> list[torch.Tensor]:
    """Return all dense values, which are at this version now, and stay as they are."""
    rounds = job.rounds
    if rounds.snapshot is None or rounds.snapshot[0] != version:
        assert job.shard is not None
        rounds.snapshot = (version, job.shard.dense.snapshot())
    return rounds.snapshot[1]


def _known_to(job: Job, worker: int, flats: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return those of all dense values that a worker knows of: parameters that join a job come after the others."""
    outgrown = job.plans.outgrown
    if worker not in outgrown:
        return flats
    assert job.shard is not None
    by_dtype = dict(zip(job.shard.dense.layout.dtypes, flats, strict=True))
    known = dense_layout(outgrown[worker], job.shard.server)
    return [by_dtype[dtype][:size] for dtype, size in known.sizes.items()]


def _check_reply(job: Job, pull: Any) -> None:
    """Refuse a pull whose reply would be too large: repeated ids let a small request take much memory here."""
    tables = job.plans.current.spec.tables
    nbytes = 0
    for index, count in zip(pull.tables, pull.counts, strict=True):
        if index >= len(tables):
            raise ProtocolError("a message names a table this job does not have", got=index)
        nbytes += count * tables[index].dim * DTYPES[tables[index].dtype]
    if nbytes > job.most_bytes:
        raise ConfigurationError(
            "a reply would be larger than a message may be",
            where=job.where,
            expected=f"at most {job.most_bytes >> 20} MiB (FLEET_MAX_MESSAGE_MB)",
            got=f"{nbytes / (1 << 20):.1f} MiB of rows",
            todo="Ask for fewer rows at once, or raise FLEET_MAX_MESSAGE_MB for every process.",
        )


def _lacking(job: Job, worker: int, step: int) -> PlanMismatchError:
    known, there = job.plans.outgrown[worker].spec, job.plans.current.spec
    names = [param.name for param in there.params[len(known.params) :]]
    names += [table.name for table in there.tables[len(known.tables) :]]
    return PlanMismatchError(
        f"worker {worker} lacks parameters that have joined the job",
        where=f"{job.where}, step {step}",
        got=f"gradients without {', '.join(map(repr, names))}"[:_MOST_TEXT],
        todo="Call add_param_group on every worker, after the same step; on one that starts again later, at once.",
    )


class Wanted(NamedTuple):
    """Names tables whose rows a worker asks for, says of each whether to train them, and holds the ids of all and where
    those of each end. ``since`` is the pull's, if it leaves out what the worker has."""

    tables: tuple[int, ...]
    training: tuple[bool, ...]
    ids: Array
    stops: Array
    since: tuple[int, ...] = ()


def _wanted(pull: Any, tensors: Sequence[WireTensor]) -> Wanted | None:
    """Return what a pull asks for of tables; None if of none."""
    if not pull.tables:
        return None
    return Wanted(tuple(pull.tables), tuple(pull.training), *ids_of(tensors, pull.counts), tuple(pull.since))


def _answer_of(waiting: Waiting) -> Frame:
    """Return the answer to a request. One that cannot be made, for lack of memory perhaps, becomes an error for the
    worker that asked, and for nobody else."""
    try:
        return waiting.answer()
    except Exception as error:
        _log.exception("an answer for worker %d could not be made", waiting.worker)
        return error_reply(cannot_answer(error))
