"""Workers that average dense gradients among themselves find each other here, at the first server.

They meet to make a group: at the beginning, when one of them has left or is lost, and when another one has come. A
meeting is over once everybody has come who is in the job, and all hear who is in the group. Gradients pass between
workers, and never through here.

Not thread-safe: the caller holds the server's lock, but for ``told`` and ``hear``, which heartbeats use.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fleet.ps.server.pending import Outbox, Waiting
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame


@dataclass(frozen=True)
class _Come:
    """Holds what a worker's process has said that has come to the meeting."""

    incarnation: int
    step: int
    meet: Any
    waiting: Waiting


class Told(NamedTuple):
    """Holds what a worker tells with its heartbeat: the group that it is in, how much all of it have done together, and
    what it waits for that they do next, if it does."""

    group: int
    place: int
    awaits: str


class Meetings:
    """Holds who is in the group of a job's workers, and who has come to make the next one."""

    def __init__(self) -> None:
        #: of the group that there is
        self._number = 0
        #: who was in it from the beginning, with its incarnation, and what they were told
        self._members: dict[int, int] = {}
        self._outcome = ""
        self._come: dict[int, _Come] = {}
        #: who has come without values, and comes again after a push: others that hear of it late are to wait for it
        self._returning: set[int] = set()
        #: who meets nobody any more, and has not said goodbye yet
        self._leaving: set[int] = set()
        self._broken = 0
        self._heard: dict[int, Told] = {}
        #: the number of the group that somebody waits for, and of the last one that broke
        self.told = (0, 0)

    @property
    def heard(self) -> dict[int, Told]:
        """Return what each worker of a group has told last."""
        return dict(self._heard)

    @property
    def _newest(self) -> int:
        """Return the number of the newest group, as far as this process knows, which may have been started again."""
        return max(self._number, *(told.group for told in self.heard.values()), 0)

    def hear(self, worker: int, told: Told) -> None:
        """Note what a worker tells of itself."""
        if told.group:
            self._heard[worker] = told

    def come(self, request: Any, waiting: Waiting, outbox: Outbox) -> None:
        worker, incarnation, meet = request.worker, request.incarnation, request.meet
        if meet.group < self._number and self._members.get(worker) == incarnation:
            outbox.append((waiting.respond, self._answer()))  # the first one was lost on its way
            return
        self._number = max(self._number, meet.group)
        if meet.broken:
            self.broke(meet.group)
        before = self._come.get(worker)
        if before is not None and before.incarnation == incarnation:
            waiting = waiting.repeating(before.waiting)
        self._come[worker] = _Come(incarnation, request.step, meet, waiting)
        self._returning.discard(worker)
        self._tell()

    def broke(self, group: int) -> None:
        """Note that nobody in a group gets any further."""
        self._broken = max(self._broken, group)
        self._tell()

    def leave(self, worker: int) -> None:
        """Note that a worker will meet nobody any more."""
        self._leaving.add(worker)

    def left(self, worker: int) -> None:
        """Note that a worker's process is gone. Those who have not agreed to go on without it cannot go on."""
        self._come.pop(worker, None)
        self._returning.discard(worker)
        # One that has been started again does not know who is in the group that there is.
        is_in_it = worker in self._members or (self._newest > 0 and not self._members)
        if is_in_it and worker not in self._leaving:
            self._broken = self._newest
        self._heard.pop(worker, None)
        self._leaving.discard(worker)
        self._tell()

    def late(self, step: int, lacking: Collection[int], pushing: Collection[int]) -> list[int]:
        """Return who has come whose push of a step is ``lacking`` where others that have not come are ``pushing``
        theirs, and wait: for these the round of that step is over, and they come when the step is."""
        if not set(pushing) - self._come.keys():
            return []
        return [worker for worker in set(lacking) & self._come.keys() if self._come[worker].step == step - 1]

    def overtaken(self, clocks: Mapping[int, int]) -> list[int]:
        """Return who has come without any values, and lacks a step that another one has pushed who may have some, as
        ``clocks`` tell: it can take that no more."""
        without = {worker: come.step for worker, come in self._come.items() if not come.meet.has_values}
        furthest = max((clock for worker, clock in clocks.items() if worker not in without), default=0)
        return [worker for worker, step in without.items() if step < furthest]

    def send_on(self, workers: Collection[int], outbox: Outbox) -> None:
        """Send these on to their next push, after which they come again."""
        self._returning.update(worker for worker in workers if not self._come[worker].meet.has_values)
        for come in map(self._come.pop, workers):
            outbox.append((come.waiting.respond, Frame(pb.Reply(about=json.dumps({"number": 0, "members": []})))))
        self._tell()

    def answer_ready(self, awaited: Collection[int], outbox: Outbox, *, is_trained: bool) -> None:
        """Let the meeting end once everybody has come. All hear whether the job ``is_trained`` already."""
        self._doubt()
        come, rest = dict(sorted(self._come.items())), {}
        if any(each.meet.in_a_step for each in come.values()):  # of which those who have just come know nothing
            rest = {worker: each for worker, each in come.items() if not each.meet.has_values}
            come = {worker: each for worker, each in come.items() if worker not in rest}
        if not come or not come.keys() >= set(awaited) - self._leaving - rest.keys():
            return
        self._come = rest
        self._number = 1 + max(self._number, *(each.meet.group for each in come.values()))
        self._members = {worker: each.incarnation for worker, each in come.items()}
        said = [
            {
                "worker": worker,
                "address": each.meet.address,
                "step": each.step,
                "rounds": each.meet.rounds,
                "place": each.waiting.told[1],
                "steps": each.meet.steps,
                "has_values": each.meet.has_values,
            }
            for worker, each in come.items()
        ]
        self._outcome = json.dumps({"number": self._number, "members": said, "trained": is_trained})
        outbox += [(each.waiting.respond, self._answer()) for each in come.values()]
        self._tell()

    def _doubt(self) -> None:
        """Take a group for broken if one comes that may belong to it and never heard so: nobody knows who is in it if
        this process has been started again."""
        newest = 0 if self._members else self._newest
        if newest > self._broken and any(each.meet.group < newest for each in self._come.values()):
            self.broke(newest)

    def dump(self) -> dict[str, Any]:
        """Return the group that there is, to be told to other servers."""
        return {
            "number": self._newest,
            "members": self._members,
            "outcome": self._outcome,
            "leaving": [*self._leaving],
            "broken": self._broken,
        }

    def restore(self, dumped: Mapping[str, Any], went_over: Collection[int]) -> None:
        """Know the group that others have known; the processes that ``went_over`` from there have the next
        incarnation."""
        members = {int(worker): incarnation for worker, incarnation in dumped["members"].items()}
        self._members = {worker: each + (worker in went_over) for worker, each in members.items()}
        self._number, self._outcome, self._broken = dumped["number"], dumped["outcome"], dumped["broken"]
        self._leaving = {*dumped["leaving"]}
        self._tell()

    def _answer(self) -> Frame:
        return Frame(pb.Reply(about=self._outcome))

    def _tell(self) -> None:
        self.told = (self._number + 1 if self._come or self._returning else 0, self._broken)

    def waiting(self) -> list[Waiting]:
        return [each.waiting for each in self._come.values()]

    def clear(self) -> None:
        self._come.clear()
        self._returning.clear()
