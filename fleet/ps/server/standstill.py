"""Finds workers that wait for each other, each in another place: nobody would ever go on, so the job ends.

Some wait at the first server: in a barrier or a reduction, or with the push of a step. What they wait for among
themselves, with ``dense="all_reduce"``, their heartbeats tell, and these may be late: a worker may have gone on since.
It has not if another one that has done no more things together with it waits somewhere else: it cannot without that
one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleet.errors import JobAbortedError
from fleet.ps.server.job import Job
from fleet.ps.server.job_end import JobEnd
from fleet.ps.server.members import Members
from fleet.ps.server.pending import Outbox, Waiting


@dataclass(frozen=True)
class Wait:
    """Says what a worker waits for. ``told`` is the group that it is in and how much all of that have done together."""

    what: str
    told: tuple[int, int]
    #: in a barrier or a reduction; for another group; or for what the workers of its group do among themselves
    gathers: bool = False
    meets: bool = False
    among: bool = False


def is_standstill(waits: Mapping[int, Wait], awaited: Collection[int]) -> bool:
    """Say whether everybody who is ``awaited`` waits, and they wait for each other in different places."""
    if not waits or not waits.keys() >= set(awaited):
        return False
    here = [wait for wait in waits.values() if not wait.among]
    among = [wait for wait in waits.values() if wait.among]
    if not among or any(wait.meets for wait in here):  # those among themselves hear of another group, and come too
        return any(wait.gathers for wait in here) and not all(wait.gathers for wait in waits.values())
    if len({wait.told for wait in among}) > 1:
        return False
    if not here:
        return len({wait.what for wait in among}) > 1
    group, place = among[0].told
    return all(wait.told[0] == group and wait.told[1] <= place for wait in here)


class Standstill:
    def __init__(self, end: JobEnd, members: Members) -> None:
        self._end = end
        self._members = members

    def refuse(self, job: Job, outbox: Outbox) -> None:
        """End the job if its workers wait for each other."""
        awaited = self._members.awaited()
        rounds, meetings = job.rounds, job.meetings
        if len(rounds.parked) + len(rounds.early) + len(meetings.waiting()) + len(meetings.heard) < len(awaited):
            return  # somebody waits for nothing: so it is after nearly every request, and there may be many workers
        waits = {worker: wait for worker, wait in _waits_of(job).items() if worker in awaited}
        if not is_standstill(waits, awaited):
            return
        todo = "Call barrier_worker, all_reduce_worker and metrics on every worker after the same step."
        if any(wait.among for wait in waits.values()):
            todo += " Let all go backward, clip and step as often; one that has no more data calls stop_worker()."
        error = JobAbortedError("the workers wait for each other", where=job.where, got=_named(waits), todo=todo)
        self._end.fail(error, job, outbox)


def _waits_of(job: Job) -> dict[int, Wait]:
    """Return what each worker waits for that another one is to do."""
    waits: dict[int, Wait] = {}
    for worker, told in job.meetings.heard.items():
        if told.awaits:
            waits[worker] = Wait(told.awaits, (told.group, told.place), among=True)
    step = job.rounds.gate.lacking()[0]
    gathered = job.reductions.lacking()
    early = [waiting for _, waiting in job.rounds.early] if job.plans.growing else []
    parked = [*job.rounds.parked.values(), *early]
    for waiting in _foreground(parked, gathers=False):
        waits[waiting.worker] = Wait(f"step {step}", waiting.told)
    for waiting in _foreground(job.meetings.waiting(), gathers=False):
        waits[waiting.worker] = Wait(f"step {step}", waiting.told, meets=True)
    for waiting in _foreground(parked, gathers=True) if gathered else ():
        waits[waiting.worker] = Wait(gathered[0][0], waiting.told, gathers=True)
    return waits


def _foreground(waiting: Sequence[Waiting], *, gathers: bool) -> list[Waiting]:
    """Return those requests for which a worker's training waits."""
    return [each for each in waiting if each.gathering is gathers and not (each.ahead or each.beside)]


def _named(waits: Mapping[int, Wait]) -> str:
    places: dict[str, list[int]] = {}
    for worker, wait in sorted(waits.items(), key=lambda item: (not item[1].gathers, item[1].among, item[0])):
        places.setdefault(wait.what, []).append(worker)
    return ", ".join(f"workers {workers} in {what}" for what, workers in places.items())
