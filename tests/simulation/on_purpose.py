"""Puts faults into the product on purpose, to see after how many seeds the simulation finds each.

Every fault is one that the product has had, or might have: a line that is missing, a condition that is off by one, two
things in the wrong order. While its context is entered the product has it. Jobs that nothing befalls do not
notice, if their rows all lie in memory.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fleet.base import clock
from fleet.ps.consistency import ssp
from fleet.ps.consistency.arrival_gate import ArrivalGate
from fleet.ps.consistency.gate import Apply, Effect
from fleet.ps.consistency.membership import Membership, Standing
from fleet.ps.consistency.sync import SyncGate
from fleet.ps.server import members
from fleet.ps.server.durability import durability, snapshot, state_directory
from fleet.ps.server.durability.state_directory import Draft, Journal, Snapshot, StateDirectory
from fleet.ps.server.handshake import Handshake
from fleet.ps.server.job import Job, Rounds
from fleet.ps.server.pending import Arrival, Waiting
from fleet.ps.server.step_requests import StepRequests
from fleet.ps.table.tiered_store import TieredStore
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import TransportError
from fleet.ps.worker import dense_training
from fleet.ps.worker.communicator import Communicator
from fleet.ps.worker.connection import Connections, PendingRequest
from fleet.ps.worker.dense_group import DenseGroup
from fleet.ps.worker.progress import Progress

from .exploration import begin
from .invariants import broken
from .job import run
from .scenario import Scenario, drawn
from .threads import import_all

Fault = Callable[[], AbstractContextManager[None]]

import_all()  # a module that came later would keep what it has imported of a fault

#: What can be wrong, and how it comes to be.
FAULTS: dict[str, Fault] = {}


@contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have something else under a name of a module or a class."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def fault(name: str) -> Callable[[Callable[[], Iterator[None]]], Fault]:
    def added(puts: Callable[[], Iterator[None]]) -> Fault:
        FAULTS[name] = contextmanager(puts)
        return FAULTS[name]

    return added


def kept_except(*kinds: str) -> AbstractContextManager[None]:
    """Have servers that write no requests of these kinds into their journals."""
    return put(durability, "NOTED", durability.NOTED - {*kinds})


# ---------------------------------------------------------------- workers that average


@fault("a worker that has missed the end of its step keeps the values that it has")
def _() -> Iterator[None]:
    with put(dense_training, "hand_over", lambda group, described, options, source, loads, **_: loads):
        yield


@fault("a worker that starts again goes on after a step that the others are yet to take")
def _() -> Iterator[None]:
    with put(Progress, "join_in", lambda self, others: None):
        yield


@fault("workers that wait for an average do not ask whether one of them is lost")
def _() -> Iterator[None]:
    with put(DenseGroup, "is_broken", property(lambda self: self._is_broken)):
        yield


# ---------------------------------------------------------------- what a server keeps


@fault("a push is not written into the journal")
def _() -> Iterator[None]:
    with kept_except("push"):
        yield


@fault("answers leave before the journal is on the disk")
def _() -> Iterator[None]:
    with put(StateDirectory, "secure", lambda self, *, surely=False: None):
        yield


@fault("the name of a server's folder is not on the disk")
def _() -> Iterator[None]:
    with put(state_directory, "make_directory", lambda path: path.mkdir(parents=True, exist_ok=True)):
        yield


@fault("the last record of a journal stays in the process's memory")
def _() -> Iterator[None]:
    append, sync, close = Journal.append, Journal.sync, Journal.close
    held: dict[Journal, list[bytes]] = {}

    def flush(journal: Journal) -> None:
        if journal in held:
            append(journal, held.pop(journal))

    def hold(self: Journal, buffers: Any) -> None:
        flush(self)
        held[self] = [bytes(each) for each in buffers]

    def sync_all(self: Journal) -> None:
        flush(self)
        sync(self)

    def close_all(self: Journal) -> None:
        flush(self)
        close(self)

    with put(Journal, "append", hold), put(Journal, "sync", sync_all), put(Journal, "close", close_all):
        yield


@fault("the torn end of a journal is not cut off")
def _() -> Iterator[None]:
    read = Journal.read

    def leave_it(self: Journal, *, is_last: bool) -> Iterator[bytearray]:
        with put(self, "_read_only", True):
            yield from read(self, is_last=is_last)

    with put(Journal, "read", leave_it):
        yield


@fault("older journals are removed when a snapshot begins")
def _() -> Iterator[None]:
    begin = StateDirectory.begin

    def begin_and_clean(self: StateDirectory, *args: Any, **kwargs: Any) -> Draft:
        draft = begin(self, *args, **kwargs)
        for number in self._journal_numbers():
            if number < draft.number:
                self._path(state_directory.JOURNAL, number).unlink()
        return draft

    with put(StateDirectory, "begin", begin_and_clean):
        yield


@fault("a snapshot lacks its last piece")
def _() -> Iterator[None]:
    publish = StateDirectory.publish

    class Fewer:
        def __init__(self, files: Any) -> None:
            self.files = files[:-1]

    def publish_less(self: StateDirectory, draft: Draft) -> Snapshot:
        fewer: Any = Fewer(draft.pieces.files)
        return publish(self, replace(draft, pieces=fewer))

    with put(StateDirectory, "publish", publish_less):
        yield


@fault("a snapshot has rows as they became while it was written")
def _() -> Iterator[None]:
    with put(snapshot.Shot, "export", lambda self, cursor: self.shard.export(cursor, self.frozen.since)):
        yield


@fault("pushes that no update has yet are not carried into a new journal")
def _() -> Iterator[None]:
    carried_over = snapshot.carried_over
    with put(durability, "carried_over", lambda job, shard, unfinished: carried_over(job, shard, {})):
        yield


@fault("a snapshot forgets how many steps the optimizer of a table has taken")
def _() -> Iterator[None]:
    take_up = snapshot.take_up

    def take_up_less(job: Job, shard: Any, state: Any, now: float) -> None:
        take_up(job, shard, {**state, "table_steps": [0 for _ in state["table_steps"]]}, now)

    with put(snapshot, "take_up", take_up_less):
        yield


@fault("only worker 0 is told that a server has lost the initial values")
def _() -> Iterator[None]:
    lacks = durability._lacks_values
    with put(durability, "_lacks_values", lambda job, kind, it, known: it.worker == 0 and lacks(job, kind, it, known)):
        yield


@fault("a server that goes on takes the next push for one that it has acknowledged")
def _() -> Iterator[None]:
    compare = durability.Durability.compare

    def compare_later(self: Any, job: Job, kind: str, request: Any, outbox: Any) -> list[Effect]:
        later = type(request)()
        later.CopyFrom(request)
        later.step += kind == "push"
        return compare(self, job, kind, later, outbox)

    with put(durability.Durability, "compare", compare_later):
        yield


@fault("a journal is synced with its lock and the server's taken in the other order")
def _() -> Iterator[None]:
    secure = durability.Durability.secure

    def secure_with_both(self: Any, *, surely: bool) -> Any:
        with self._directory._journals[-1]._syncing, self._lock:
            pass
        return secure(self, surely=surely)

    with put(durability.Durability, "secure", secure_with_both):
        yield


@fault("a goodbye is not written into the journal")
def _() -> Iterator[None]:
    with kept_except("bye"):
        yield


# ---------------------------------------------------------------- what a server does


@fault("a repeated push is applied again")
def _() -> Iterator[None]:
    push = StepRequests.push

    def push_again(self: StepRequests, job: Job, arrival: Arrival) -> None:
        gate, request = job.rounds.gate, arrival.request
        if isinstance(gate, ArrivalGate) and request.step == gate.delivered(request.worker):
            gate._clock[request.worker] -= 1
        push(self, job, arrival)

    with put(StepRequests, "push", push_again):
        yield


@fault("a repeated push is answered before its round is over")
def _() -> Iterator[None]:
    push, park = StepRequests.push, StepRequests._park
    repeated = []

    def push_hastily(self: StepRequests, job: Job, arrival: Arrival) -> None:
        request = arrival.request
        repeated.append(request.step <= job.rounds.gate.delivered(request.worker))
        try:
            push(self, job, arrival)
        finally:
            repeated.pop()

    def park_no_push(self: StepRequests, job: Job, version: int, waiting: Waiting, effects: Any, outbox: Any) -> None:
        park(self, job, 0 if repeated[-1:] == [True] else version, waiting, effects, outbox)

    with put(StepRequests, "push", push_hastily), put(StepRequests, "_park", park_no_push):
        yield


@fault("a round closes without a worker that starts again")
def _() -> Iterator[None]:
    take_place = Handshake._take_place

    def close_first(self: Handshake, job: Job, before: Standing, label: str, arrival: Arrival) -> None:
        take_place(self, job, before, label, arrival)
        if before is Standing.LIVE and isinstance(job.rounds.gate, SyncGate):
            effects = job.rounds.gate.leave(arrival.worker)
            job.rounds.gate.join(arrival.worker)
            self._steps.carry_out(job, effects, arrival.worker, arrival.outbox)

    with put(Handshake, "_take_place", close_first):
        yield


@fault("gradients are added in the order in which they come")
def _() -> Iterator[None]:
    def deliver(self: Any, worker: int, step: int, token: int | None) -> list[Effect]:
        self._pending.setdefault(step, {})[worker] = None
        return []

    def effects(self: Any) -> list[Effect]:
        found: list[Effect] = []
        while self._applied + 1 in self._pending and not self.lacking()[1]:
            self._applied += 1
            found.append(Apply(self._applied, tuple(self._pending.pop(self._applied))))
        return [*found, *self._answer(self._applied)]

    with put(SyncGate, "_deliver", deliver), put(SyncGate, "_effects", effects):
        yield


@fault("a step that is taken once more is taken with the newest values")
def _() -> Iterator[None]:
    with put(Rounds, "previous_for", lambda self, worker, version: None):
        yield


@fault("a worker may be a step further ahead than its bound")
def _() -> Iterator[None]:
    needed = ssp.BoundedPolicy.version_needed
    with put(ssp.BoundedPolicy, "version_needed", lambda self, step: needed(self, max(0, step - 1))):
        yield


@fault("a worker is given up on after three heartbeats")
def _() -> Iterator[None]:
    def impatient(*args: Any, silence_s: float, quiet_s: float, **kwargs: Any) -> Any:
        return membership(*args, silence_s=quiet_s, quiet_s=quiet_s, **kwargs)

    membership = members.Membership
    with put(members, "Membership", impatient):
        yield


@fault("a server that starts again does not know who has joined")
def _() -> Iterator[None]:
    restore = Membership.restore

    def forget(self: Membership, records: Any, now: float) -> None:
        restore(self, [each for each in records if self.standing(each[0]) is not None], now)

    with put(Membership, "restore", forget):
        yield


@fault("silence is measured by the time of day")
def _() -> Iterator[None]:
    with put(clock.SystemClock, "now", lambda self: clock.wall_time()):
        yield


# ---------------------------------------------------------------- rows in files


@fault("a row that has changed since it was read leaves memory as it was")
def _() -> Iterator[None]:
    with put(TieredStore, "write", lambda self, slots: None):
        yield


# ---------------------------------------------------------------- what a worker does


@fault("a request whose line broke is not repeated")
def _() -> Iterator[None]:
    def result(self: PendingRequest) -> Frame:
        connection, call = self._connection, self._call
        try:
            return connection.answered(call.result())
        except TransportError as error:
            raise connection.broken_error(self._what, 1, error) from None
        finally:
            connection.end(call)

    with put(PendingRequest, "result", result):
        yield


@fault("a worker that starts again asks the first server alone how far it is")
def _() -> Iterator[None]:
    resume = Progress.resume
    with put(Progress, "resume", lambda self, hellos: resume(self, [hellos[0] for _ in hellos])):
        yield


@fault("a gradient for which a queue has no room is dropped")
def _() -> Iterator[None]:
    put_in = Communicator.put

    def put_or_drop(self: Communicator, gradients: Any) -> None:
        if len(self._queue) < self._settings.send_queue_size:
            put_in(self, gradients)

    with put(Communicator, "await_room", lambda self: None), put(Communicator, "put", put_or_drop):
        yield


@fault("a worker leaves without an answer to its goodbye")
def _() -> Iterator[None]:
    ask = Connections.ask

    def ask_or_leave(self: Connections, what: str, *args: Any, **word: Any) -> Any:
        return self.farewell(**word) if what == "goodbye" else ask(self, what, *args, **word)

    with put(Connections, "ask", ask_or_leave):
        yield


# ---------------------------------------------------------------- whether it is found


#: So much of what is said of a run is printed.
_MOST_SAID = 100


@dataclass(frozen=True)
class Found:
    """Says after how many seeds a fault was found, and what was said of that run; of one that was not, how many there
    were."""

    name: str
    seeds: int
    said: str

    def __str__(self) -> str:
        number, said = (str(self.seeds), self.said) if self.said else (f"> {self.seeds}", "nothing")
        return f"{number:>6}  {self.name}: {said if len(said) <= _MOST_SAID else said[:_MOST_SAID] + ' …'}"


def seeds_until_found(name: str, most: int) -> Found:
    """Run the seeds from 0 on with a fault in place until something is wrong."""
    with tempfile.TemporaryDirectory(prefix="fleet-simulation-") as folder:
        for seed in range(most):
            said = said_with(name, drawn(seed), Path(folder) / "job")
            if said:
                return Found(name, seed + 1, said[0])
    return Found(name, most, "")


def said_with(name: str, scenario: Scenario, folder: Path) -> list[str]:
    """Return what is wrong with a run in which the product has a fault, or without one if no name is given."""
    with ExitStack() as stack:
        if name:
            stack.enter_context(FAULTS[name]())
        try:
            outcome = run(scenario, folder)
        except Exception as error:
            return [f"the run failed: {error!r}"]
    return broken(outcome)


def tell_all(most: int, jobs: int) -> int:
    """Print after how many seeds each fault is found; return how many are not."""
    lost = 0
    print(f"{'seeds':>6}  fault, and what is said of the run")
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=begin) as pool:
        for found in pool.imap(partial(seeds_until_found, most=most), FAULTS):
            print(found, flush=True)
            lost += not found.said
    return lost
