"""One worker moves its job to other servers: rows are copied while it trains, then all servers stand still for what has
changed meanwhile, and the first of them decides. Other workers wait at their next request that long, and go over with
it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from fleet.base.cluster import Endpoint
from fleet.base.interruption import uninterrupted
from fleet.checkpoint.manifest import COUNTS
from fleet.errors import (
    ArgumentTypeError,
    ConfigurationError,
    FleetError,
    MissedError,
    ServerBusyError,
    ServersMovedError,
    StateError,
    UnsupportedError,
)
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import make_plan
from fleet.ps.consistency.staleness import total
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.move_names import ATTEMPT, GIVEN, LACKS, PUSHED, given_cursor
from fleet.ps.worker.connection import RETRY_PAUSE_S, Connection, inquire_all
from fleet.ps.worker.lease import once
from fleet.ps.worker.moved_pushes import Part, dealt
from fleet.ps.worker.moved_readings import given_anew
from fleet.ps.worker.new_servers import Move, end_others, refuse_if_moved
from fleet.ps.worker.push import by_server
from fleet.ps.worker.runtime import WorkerRuntime

_log = logging.getLogger("fleet.worker")

#: So much is told of what keeps a job from moving.
_MOST_REASON = 2000
#: Where an export begins.
_FIRST = "dense:0:0"
#: Rows that have changed while the last ones were copied are copied in a further round, so often, as long as they are
#: more than so many and become fewer.
_MOST_ROUNDS, _FEW = 8, 1 << 14
#: So often a move within one call begins anew.
_MOST_ATTEMPTS = 5
#: A move that has to begin anew rests, each time longer, up to so long.
_LONGEST_PAUSE_S = 2.0
#: What tells the moves that this process begins from each other.
_numbers = itertools.count(1)
#: A copy beside the training leaves it alone for so many times as long as a piece has taken.
_REST = 14.0


def resize(worker: WorkerRuntime, endpoints: object) -> None:
    servers = _checked(endpoints)
    _refuse_unmovable(worker)
    _once(worker, servers, lambda: _move(worker, servers))


def _move(worker: WorkerRuntime, servers: tuple[Endpoint, ...]) -> None:
    """Move the job; begin anew, after a while, where a durable server was killed meanwhile and goes on, or a worker
    that has started again has a step to take first."""
    first = worker.connections.by_server[0]
    began, pause, left = first.clock.now(), RETRY_PAUSE_S, _MOST_ATTEMPTS
    while True:
        try:
            Copy(worker, servers).move()
            return
        except _TakenAgainError:  # which takes as long as the worker's script
            if first.clock.now() - began > first.deadline_s:
                raise
        except MissedError:
            left -= 1
            if not left:
                raise
        first.clock.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


class _TakenAgainError(MissedError):
    """Says that a worker was killed when some servers had its push, and the next process has not come as far."""


class AskedMove:
    """Moves a job to the servers that somebody outside wants it to have: it is copied on a thread beside the training,
    and moves after a step."""

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker
        self._copy: Copy | None = None

    def go_on(self) -> None:
        """Do what there is to do after a step. What keeps the job from moving is told outside, and the training goes
        on."""
        worker = self._worker
        try:
            servers = _checked(list(worker.connections.wanted_servers))
            _refuse_unmovable(worker)
            if self._copy is None or self._copy.servers != servers:
                self.give_up()
                self._copy = Copy(worker, servers)
                self._copy.begin_beside()
            elif not self._copy.is_under_way:
                copy, self._copy = self._copy, None
                _once(worker, servers, copy.move)
                copy.give_up()  # if another one has moved the job
        except MissedError:
            self.give_up()  # it begins anew after the next step
        except FleetError as error:
            self.give_up()
            if not worker.connections.is_healthy:
                raise
            self._refuse(error)

    def give_up(self) -> None:
        """Have the job stay where it is."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.give_up()

    def _refuse(self, error: FleetError) -> None:
        worker = self._worker
        _log.warning("the job stays with its servers: %s", error)
        refusal = pb.Rearrange(failure=str(error)[:_MOST_REASON])
        for connection in worker.connections.by_server:
            connection.wanted_servers = ()
            connection.call(
                Frame(connection.request(worker.progress.completed, rearrange=refusal)), "a refusal to move"
            )


def _refuse_unmovable(worker: WorkerRuntime) -> None:
    if worker.assignment.embedded:
        raise UnsupportedError("a job of one process has its server in it", todo="Start servers of their own.")


def _once(worker: WorkerRuntime, servers: tuple[Endpoint, ...], move: Callable[[], None]) -> None:
    """Have one worker move the job, after all that this one has computed is applied."""
    with worker.turns.take():
        worker.in_turn("resize_servers()", worker.flush)
        worker.following(lambda: refuse_if_moved(worker.connections))  # there and back, it may be
        if servers == worker.assignment.servers:
            return
        # A job may come to the same list more than once.
        call = f"resize_servers({','.join(map(str, servers))}), move {worker.connections.moves + 1}"

        def act(_: dict[str, Any]) -> None:
            if servers != worker.assignment.servers:  # else one was lost when it had moved the job
                move()

        once(worker, worker.progress.name_of_call(call), act, by_anyone=True)


def _checked(endpoints: object) -> tuple[Endpoint, ...]:
    if isinstance(endpoints, str) or not isinstance(endpoints, Sequence):
        raise ArgumentTypeError("endpoints must be a list of 'host:port'", got=repr(endpoints)[:200])
    servers = tuple(Endpoint.parse(str(each)) for each in endpoints)
    if not servers or len({*servers}) != len(servers):
        raise ConfigurationError("a job needs servers, each once", got=", ".join(map(str, servers)))
    return servers


class Copy:
    """Is what one worker copies from the servers that there are to those that are to be."""

    def __init__(self, worker: WorkerRuntime, servers: tuple[Endpoint, ...]) -> None:
        self.servers = servers
        self._worker = worker
        self._attempt = f"{ATTEMPT}{next(_numbers)} by {worker.incarnation}"
        self._former = [*worker.connections.by_server]
        self._plan = make_plan(worker.trained.plan.spec.on_servers(len(servers)))
        self._new = worker.connect(servers, worker.incarnation)
        self._number = 0
        self._has_rows = self._is_over = False
        self._beside: threading.Thread | None = None
        self._failure: BaseException | None = None

    # ---------------------------------------------------------------- beside the training

    def begin_beside(self) -> None:
        """Begin to copy rows, on a thread of its own."""
        self._beside = threading.Thread(target=self._copy_beside, name="fleet-move-copy", daemon=True)
        self._beside.start()

    @property
    def is_under_way(self) -> bool:
        return self._beside is not None and self._beside.is_alive()

    def _copy_beside(self) -> None:
        try:
            self._copy_rows(rest=_REST)
        except BaseException as error:
            self._failure = error
            self.give_up()

    # ---------------------------------------------------------------- the whole of it

    def move(self) -> None:
        """Copy what is not copied yet, and move the job."""
        try:
            if self._failure is not None:
                raise self._failure
            if self._is_over:  # asked again: the job has moved meanwhile, or stayed, and what was copied is of no use
                what = "a server was started again, or has given up, while the job moved"
                raise MissedError(what, where=f"worker {self._worker.assignment.index}")
            if not self._has_rows:
                self._copy_rows()
            state, records = self._stand_still()
            for about, tensors in self._exported(_FIRST for _ in self._former):
                self._fill(about, tensors)
            self._move_given(state)
            self._move_pushes(state)
            self._complete(state, records)
        except BaseException:
            self.give_up()
            raise
        self._close()
        worker = self._worker
        move = Move(self._attempt, self.servers, worker.connections.moves + 1)
        told = pb.Switch(attempt=self._attempt, endpoints=map(str, self.servers))
        first = self._former[0]

        with uninterrupted():
            with contextlib.suppress(ServersMovedError):  # a heartbeat has heard of it, and the answer was lost
                first.call(Frame(first.request(0, switch=told)), "the move to other servers")
            worker.go_over(move)

    def give_up(self) -> None:
        """Have the job stay where it is."""
        if self._is_over:
            return
        over = pb.Switch(attempt=self._attempt, given_up=True)
        asked = [(each, Frame(each.request(0, switch=over))) for each in (*self._former, *self._new)]
        answers = inquire_all(asked)
        unheard = [
            each for each, answer in zip(asked, answers, strict=True) if answer is None and each[0] in self._former
        ]
        if unheard:  # one that is killed just now stands still again when it is there again
            threading.Thread(target=_insist, args=(unheard,), name="fleet-move-over", daemon=True).start()
        self._close()

    def _close(self) -> None:
        self._is_over = True
        for connection in self._new:
            connection.close()

    # ---------------------------------------------------------------- its parts

    def _copy_rows(self, rest: float = 0.0) -> None:
        """Copy the rows of all servers, and again those that have changed meanwhile, until they are few; leave the
        training alone for ``rest`` times as long as it takes."""
        for connection in self._new:
            connection.hello(Frame(connection.request(0, where=pb.Where())), wait=True, watch=self._refuse_if_over)
        before: float = math.inf
        for number in range(1, _MOST_ROUNDS + 1):
            begun = [self._let_go(connection, number) for connection in self._former]
            if number == 1:
                self._stage(begun[0].message.about)
            rows = 0
            for about, tensors in self._exported((reply.message.cursor for reply in begun), rest):
                rows += about["rows"]
                self._fill(about, tensors)
            if rows <= _FEW or rows > before / 2:
                break
            before = rows
        self._has_rows = True

    def _refuse_if_over(self) -> None:
        if self._worker.stopped or self._is_over:
            raise StateError("the move to other servers was given up")

    def _stand_still(self) -> tuple[dict[str, Any], Sequence[WireTensor]]:
        """Let the servers stand still, the first one first, where all have the same pushes; return the state of the
        job, and the records beside it."""
        replies = [self._let_go(connection, 0) for connection in self._former]
        states = [json.loads(reply.message.about) for reply in replies]
        clocks = [state["clocks"] for state in states]
        furthest = {worker: max(each.get(worker, 0) for each in clocks) for worker in {*chain(*clocks)}}
        # Who waits at the first server for the answer to a push may not know that another one lacks it.
        furthest |= {str(worker): step - 1 for worker, step in states[0]["again"]}
        renewed = [state["renewed"] for state in states]
        _refuse_again(worker for worker, step in furthest.items() if _is_taken_again(worker, step, clocks, renewed))
        if any(each != furthest for each in clocks):
            delivered = {int(worker): step for worker, step in furthest.items()}
            first, *others = self._former
            replies = [self._let_go(first, 0, delivered)]

            def look() -> None:  # for workers that start again, which say so to the first server alone
                told = first.inquire(Frame(first.request(0, where=pb.Where())))
                starting = () if told is None else map(str, json.loads(told.message.about)["starting"])
                _refuse_again(
                    each for each in starting if any(clock.get(each) != furthest.get(each) for clock in clocks)
                )

            replies += [self._let_go(each, 0, delivered, meanwhile=look) for each in others]
        states = [json.loads(reply.message.about) for reply in replies]
        buffers = [_buffer_of(*each) for each in states[0]["buffers"]]
        gone = {int(worker): step for worker, step in states[0]["gone"].items()}
        if self._worker.policy.fills_buffers and (buffers or gone):
            replies[1:] = [self._let_go(each, 0, buffers=buffers, gone=gone) for each in self._former[1:]]
            states[1:] = [json.loads(reply.message.about) for reply in replies[1:]]
        if any(state["due"] for state in states):
            self._worker.agree_on_norms()
            replies = [self._let_go(connection, 0) for connection in self._former]
            states = [json.loads(reply.message.about) for reply in replies]
        state = states[0]
        state[LACKS] = any(each[LACKS] for each in states)
        state["past"] = _joined([each["past"] for each in states])
        state["staleness"] = total(each["staleness"] for each in states)
        state[GIVEN] = dict.fromkeys((worker, table) for each in states for worker, table in each.pop(GIVEN))
        return state, replies[0].tensors

    def _let_go(
        self,
        connection: Connection,
        number: int,
        delivered: Mapping[int, int] | None = None,
        buffers: Sequence[pb.Buffer] = (),
        gone: Mapping[int, int] | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Frame:
        completed = self._worker.progress.completed
        endpoints = [*(str(each.endpoint) for each in self._former), *map(str, self.servers)]
        halt = pb.Halt(
            attempt=self._attempt,
            version=completed,
            round=number,
            delivered=delivered,
            endpoints=endpoints,
            buffers=buffers,
            gone=gone,
        )
        frame = Frame(connection.request(completed, halt=halt))
        return self._when_free(connection, partial(connection.call, frame, "a move to other servers"), meanwhile)

    def _when_free(
        self, connection: Connection, ask: Callable[[], Frame], meanwhile: Callable[[], object] = lambda: None
    ) -> Frame:
        """Return what a server answers when it has ended what it does, within its deadline."""
        clock = connection.clock
        began = clock.now()
        while True:
            try:
                return ask()
            except ServerBusyError:
                if clock.now() - began > connection.deadline_s:
                    raise
                self._refuse_if_over()
                end_others(self._worker.connections, self._attempt)
                meanwhile()
                clock.sleep(RETRY_PAUSE_S)

    def _stage(self, about: str) -> None:
        """Let every new server get ready to take over its part."""
        for server, connection in enumerate(self._new):
            stage = pb.Stage(
                attempt=self._attempt,
                spec=self._plan.spec.to_json(),
                fingerprint=self._plan.fingerprint,
                server=server,
                endpoints=map(str, self.servers),
                about=about,
            )
            frame = Frame(connection.request(0, stage=stage))
            self._when_free(connection, partial(connection.insist, frame, "a move to other servers"))

    def _exported(
        self, cursors: Iterable[str], rest: float = 0.0
    ) -> Iterator[tuple[dict[str, Any], Sequence[WireTensor]]]:
        """Yield what the servers have, from a cursor of each on."""
        completed = self._worker.progress.completed
        for connection, first in zip(self._former, cursors, strict=True):
            cursor, clock = first, connection.clock
            while cursor:
                self._refuse_if_over()
                began = clock.now()
                export = pb.Export(cursor=cursor, version=completed, checkpoint=self._attempt)
                reply = connection.call(Frame(connection.request(completed, export=export)), f"export of {cursor}")
                took = clock.now() - began
                yield json.loads(reply.message.about), reply.tensors
                cursor = reply.message.cursor
                if rest:
                    clock.sleep(rest * took)

    def _fill(self, about: dict[str, Any], tensors: Sequence[WireTensor]) -> None:
        """Give the new servers their parts of a piece."""
        self._fill_each([(about, part) for part in _parts(about, tensors, len(self._new))])

    def _fill_each(self, pieces: Iterable[tuple[dict[str, Any], Sequence[WireTensor]]]) -> None:
        """Give each of the new servers what is meant for it."""
        self._number += 1
        for connection, (about, tensors) in zip(self._new, pieces, strict=True):
            fill = pb.Fill(attempt=self._attempt, number=self._number, about=json.dumps(about))
            connection.insist(Frame(connection.request(0, fill=fill), [*tensors]), f"piece {self._number} of a move")

    def _move_given(self, state: dict[str, Any]) -> None:
        """Give the new servers what the former ones remember of what each worker was given."""
        for worker, table in state.pop(GIVEN):
            pieces = self._exported(given_cursor(worker, table) for _ in self._former)
            if table is None:
                dealt = given_anew(worker, [*pieces], self._worker.trained, self._plan)
                if dealt is not None:
                    self._fill_each(dealt)
                continue
            for about, tensors in pieces:
                if tensors:
                    self._fill(about, tensors)

    def _move_pushes(self, state: Mapping[str, Any]) -> None:
        """Give the new servers their parts of what waits to become part of an update."""
        tokens = {(worker, step): token for _, _, pushes, _ in state["buffers"] for token, worker, step in pushes}
        completed = self._worker.progress.completed
        for worker, step in state[PUSHED] if tokens else ():
            parts = []
            for connection in self._former:
                export = pb.Export(cursor=f"{PUSHED}{worker}:{step}", version=completed, checkpoint=self._attempt)
                frame = Frame(connection.request(completed, export=export))
                reply = connection.call(frame, f"export of the push of step {step} of worker {worker}")
                parts.append(Part(json.loads(reply.message.about), reply.tensors))
            self._number += 1
            former = self._worker.trained.plan
            pushes = dealt(parts, former, self._plan, tokens[worker, step])
            for connection, (push, tensors) in zip(self._new, pushes, strict=True):
                fill = pb.Fill(attempt=self._attempt, number=self._number, pushed=push, by=worker, at=step)
                connection.insist(Frame(connection.request(0, fill=fill), tensors), "a push that moves")

    def _complete(self, state: dict[str, Any], records: Sequence[WireTensor]) -> None:
        self._number += 1
        past = {table: {**each, "evicted": 0, "dropped": 0} for table, each in state["past"].items()}
        # Who has claimed what is the first server's affair alone: nobody tells the others when it is done.
        counted = {"past": past, "staleness": {}, "late": {}, "claims": {"begun": {}, "done": {}}}
        beside = {**state, "records": [], "meetings": {}, **counted}
        for server, connection in enumerate(self._new):
            told = beside if server else state
            fill = pb.Fill(attempt=self._attempt, number=self._number, state=json.dumps(told))
            frame = Frame(connection.request(0, fill=fill), [] if server else [*records])
            connection.insist(frame, "the end of a move")


def _buffer_of(version: int, divisor: int, pushes: Sequence[tuple[int, int, int]], together: bool) -> pb.Buffer:
    tokens, workers, steps = zip(*pushes, strict=True)
    return pb.Buffer(version=version, divisor=divisor, tokens=tokens, workers=workers, steps=steps, together=together)


def _insist(asked: Sequence[tuple[Connection, Frame]]) -> None:
    for connection, frame in asked:
        with contextlib.suppress(FleetError):
            connection.insist(frame, "a move that was given up")


def _joined(pasts: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return by table what all servers together remember beside its rows."""
    return {
        table: {
            "evicted": sum(past[table]["evicted"] for past in pasts),
            "dropped": sum(past[table]["dropped"] for past in pasts),
            "began": min((past[table]["began"] for past in pasts if past[table]["began"]), default=0.0),
            # Rows may have left already where this was agreed on: those that stay are the same if it is done once more.
            "awaits": any(past[table]["awaits"] for past in pasts),
        }
        for table in pasts[0]
    }


def _parts(about: dict[str, Any], tensors: Sequence[WireTensor], servers: int) -> list[Sequence[WireTensor]]:
    """Return what every server gets of a piece: its rows, or all of what is exported of parameters."""
    if "dense" in about or (len(tensors) == 1 and COUNTS in about):  # cells of a sketch say something of all ids
        return [tensors] * servers
    return by_server(tensors, servers)


def _refuse_again(workers: Iterable[str]) -> None:
    """Have a move tried again later if these workers take a step once more first."""
    if again := [*workers]:
        raise _TakenAgainError(f"workers that have started again take a step once more before the job moves: {again}")


def _is_taken_again(
    worker: str, step: int, clocks: Sequence[Mapping[str, int]], renewed: Sequence[Mapping[str, int]]
) -> bool:
    """Say whether some servers lack a step that others have of a process of this worker that is no more."""
    have = [each.get(worker, 0) >= step for each in clocks]
    former = [each.get(worker, -1) >= step for each in renewed]
    return not all(have) and all(was for has, was in zip(have, former, strict=True) if has)
