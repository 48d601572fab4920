"""Counts how far a worker has come: the steps that it has taken, and those that the servers have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from fleet.checkpoint.resume_choice import Resumed
from fleet.ps.consistency.policy import Policy
from fleet.ps.wire.frame import Frame


class ReadAt(NamedTuple):
    """Says of values how many updates they had had when a server gave them, and which version all values there were."""

    clock: int
    version: int = 0


#: Of rows, by server and table.
Readings: TypeAlias = dict[tuple[int, int], ReadAt]


def moved(readings: Mapping[tuple[int, int], ReadAt], servers: int) -> Readings:
    """Return when rows were read, as so many servers have it that have what others had."""
    latest: dict[int, ReadAt] = {}
    for (_, table), read in readings.items():
        latest[table] = max(read, latest.get(table, read))
    return {(server, table): read for table, read in latest.items() for server in range(servers)}


class Progress:
    """Counts steps, calls, and how often the servers' values were replaced."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        #: pushes that the servers have
        self.completed = 0
        #: how many of this worker's steps are in them
        self.steps = 0
        #: how many it has taken; the difference is on its way, or still to be sent
        self.taken = 0
        #: how many this process has taken, wherever it began
        self.own = 0
        #: gatherings of all workers that this one has come to
        self.gathered = 0
        #: how often the values of each server had been replaced when this worker took them over
        self.loads: list[int] = []
        #: whether a server says that they have been since
        self.replaced = False
        #: how many each server had when this process came to it
        self._delivered: list[int] = []
        #: how many steps are in the push that only some of them have
        self._repeated_steps = 0
        #: the step at which this process, or the values it has, went on
        self.went_on_at = 0
        #: the name of a checkpoint that wants this worker's state; empty if none does
        self.wanted = ""
        #: whether other workers give theirs for checkpoints
        self.others_give = False
        self._calls: Counter[str] = Counter()
        self._calls_after = 0

    def resume(self, hellos: Sequence[Any]) -> None:
        """Go on where the servers say that this worker is. If it starts again, some servers may have its last step and
        some not: it is taken once more. A server that is further behind has lost what the others have, and goes on with
        them."""
        self._delivered = [reply.delivered for reply in hellos]
        whole = [reply for reply in hellos if reply.delivered >= max(self._delivered) - 1]
        self.completed = min(reply.delivered for reply in whole)
        # One that has gone on without lost pushes knows how many, and not of how many steps each was.
        here = [reply.steps for reply in whole if reply.delivered == self.completed]
        self.steps = self.taken = self.went_on_at = max(here)
        self._repeated_steps = max(reply.steps for reply in whole) - self.steps
        self.gathered = hellos[0].gathered
        self.loads = [reply.loads for reply in hellos]

    def take_step(self) -> None:
        self.taken += 1
        self.own += 1

    def move(self, hellos: Sequence[Any]) -> None:
        """Go on with other servers, which have what the former ones had."""
        self.loads = [reply.loads for reply in hellos]
        self._delivered = [reply.delivered for reply in hellos]

    @property
    def repeats_at(self) -> list[int]:
        """Return the servers that have had the next push from an earlier process, and count that."""
        return [server for server, step in enumerate(self._delivered) if step > self.completed]

    @property
    def repeated_steps(self) -> int | None:
        """Return how many steps the next push has, if a server has had it: none where that was of an edit alone."""
        return self._repeated_steps if self.repeats_at else None

    def go_back(self, resumed: Resumed) -> None:
        """Take a step once more whose round was not over when this worker resumed, as all others begin with it. The
        servers, which have it, count it once."""
        if self._policy.shares_steps and resumed.ahead and self.steps == resumed.step + resumed.ahead:
            self.completed -= resumed.ahead
            self.steps = self.taken = self.went_on_at = resumed.step

    def join_in(self, others: Sequence[int]) -> None:
        """Take a step once more that the ``others``, of whom the servers have so many pushes, are yet to take. The
        servers, which have this worker's, count it once."""
        ahead = self.completed - max(others, default=self.completed)
        if self._policy.waits_for_others and ahead > 0:
            self.completed -= ahead
            self.steps = self.taken = self.went_on_at = max(0, self.steps - ahead)

    def miss_step(self) -> None:
        """Go on after the next step, in which this process has no part."""
        self.taken += 1
        self.went_on_at = self.taken

    def version_needed(self, more_steps: int = 0) -> int:
        """Return the version that this worker needs to go on, now or when it has completed some more steps."""
        return self._policy.version_needed(self.completed + more_steps)

    def notice(self, replies: Sequence[Frame]) -> None:
        """Read from the replies of the first servers whether values have been replaced, and states are wanted."""
        self.wanted = replies[0].message.wanted or self.wanted
        self.others_give = self.others_give or replies[0].message.others_give
        loads = [reply.message.loads for reply in replies]
        self.replaced = self.replaced or loads != self.loads[: len(loads)]

    def reload(self, replies: Sequence[Frame]) -> None:
        """Go on from the values in these replies, which have replaced all others."""
        self.steps = self.taken = self.went_on_at = replies[0].message.steps
        self.loads, self.replaced = [reply.message.loads for reply in replies], False

    def name_of_call(self, call: str) -> str:
        """Name a call that is carried out once for the job: every worker that makes it gets the same name."""
        if self._policy.shares_steps and self._calls_after != self.completed:
            self._calls.clear()
            self._calls_after = self.completed
        self._calls[call] += 1
        after = f" after step {self.completed}" if self._policy.shares_steps else ""
        return f"{call}{after}, call {self._calls[call]}"
