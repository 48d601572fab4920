"""Finds the rows that leave a table which is to have ``MaxRows`` on all servers together.

Rows have an order: higher scores come first, and of equal ones smaller ids. Those stay that come no later than some
last one, a score and an id, which need not be a row's. The servers say how many of their rows would stay with which
last one; so it is found as in a search by halves, of which a question tries several at once, for all tables together.
Every worker that searches finds the same, and servers that another worker has told meanwhile say what that was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connections
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.trained_model import TrainedModel

#: So many places are tried at once, which halves the number of questions.
TRIED = 3

LOWEST_ID, HIGHEST_ID = -(2**63), 2**63 - 1

#: What a server's answer begins with: its counts follow; it has been told, and the last row that stays follows.
AWAITED, AGREED = 1, 2

#: The last row that stays: its score and its id.
Last = tuple[int, int]
#: Asks how many rows stay with each of some last ones, and is told.
Search = Generator[list[Last], list[int], Last]

#: With this one all stay; scores begin with 0.
ALL: Last = (-1, HIGHEST_ID)


@dataclass(frozen=True)
class Span:
    """Says how many rows a table has on all servers, and between which scores."""

    rows: int
    low: int
    high: int


@dataclass(frozen=True)
class Told:
    """Holds what all servers say together: what there is, and how many rows stay with each last one of a question."""

    span: Span
    counts: list[int]


def search(span: Span, most: int) -> Search:
    """Find the last row that stays if ``most`` may."""
    if span.rows <= most:
        return ALL
    # The lowest score of which all rows may stay, with those of higher ones; of the one below that not all may.
    score = yield from _first(lambda score: (score, HIGHEST_ID), span.low, span.high + 1, lambda rows: rows <= most)
    # The first id of those with which too many would stay.
    id_ = yield from _first(lambda id_: (score - 1, id_), LOWEST_ID - 1, HIGHEST_ID, lambda rows: rows > most)
    return (score - 1, id_ - 1) if id_ > LOWEST_ID else (score, HIGHEST_ID)


def _first(
    last: Callable[[int], Last], low: int, high: int, holds: Callable[[int], bool]
) -> Generator[list[Last], list[int], int]:
    """Return the first number for which something holds of the number of rows that stay. It does not hold for ``low``,
    and does for ``high``; neither is asked for."""
    while high - low > 1:
        step = max(1, (high - low) // (TRIED + 1))
        tried = [low + step * (each + 1) for each in range(TRIED) if low + step * (each + 1) < high]
        counts = yield [last(each) for each in tried]
        for each, count in zip(tried, counts, strict=True):
            if holds(count):
                high = each
                break
            low = each
    return high


class RowCuts:
    """Agrees with the servers on the rows that leave, where they say that this is due."""

    def __init__(
        self, connections: Connections, trained: TrainedModel, progress: Progress, *, shares_steps: bool
    ) -> None:
        self._connections = connections
        self._shares_steps = shares_steps
        self._trained = trained
        self._progress = progress
        self._due: set[int] = set()

    def notice(self, replies: Sequence[pb.Reply]) -> None:
        """Read from replies of all servers for which tables it is due."""
        self._due |= self._named(replies)

    def move(self, answers: Sequence[pb.Reply]) -> None:
        """Go on with other servers, which say what is due there."""
        self._due.clear()
        self.notice(answers)

    def tell_due(self) -> None:
        """Find and tell what is due, on the thread that trains. If it is interrupted, it is still due."""
        if self._due:
            self._find_and_tell(sorted(self._due))
            self._due.clear()

    def tell_due_behind(self, replies: Sequence[pb.Reply]) -> None:
        """Find and tell what is due by these replies, on a thread beside the user's."""
        tables = self._named(replies)
        if tables:
            self._find_and_tell(sorted(tables))

    def _named(self, replies: Sequence[pb.Reply]) -> set[int]:
        """Return the tables that servers name. Where steps are shared, one that does not has been told by another
        worker; elsewhere it may not have come so far, and does later."""
        named = [set(reply.cuts) for reply in replies]
        return set.union(*named) if self._shares_steps else set.intersection(*named)

    def _find_and_tell(self, tables: Sequence[int]) -> None:
        found = self._find(tables)
        cut = pb.Cut(
            tables=list(found),
            scores=[score for score, _ in found.values()],
            ids=[id_ for _, id_ in found.values()],
            version=self._progress.version_needed(),
        )
        if found:
            self._connections.ask(f"rows that leave at step {self._progress.completed}", cut=cut)

    def _find(self, tables: Sequence[int]) -> dict[int, Last]:
        """Return the last row that stays of each table, where that can be found."""
        found: dict[int, Last] = {}
        searches: dict[int, Search] = {}
        asked: dict[int, list[Last]] = {index: [] for index in tables}
        while asked:
            told = self._ask(asked)
            asked = {}
            for index, answer in told.items():
                try:
                    if isinstance(answer, Told):
                        if index not in searches:
                            searches[index] = search(answer.span, self._most(index))
                            asked[index] = next(searches[index])
                        else:
                            asked[index] = searches[index].send(answer.counts)
                    elif answer is not None:
                        found[index] = answer
                except StopIteration as end:
                    found[index] = end.value
        return found

    def _most(self, index: int) -> int:
        rule = self._trained.plan.spec.tables[index].most_rows
        assert rule is not None, "servers name tables that have one"
        return rule.n

    def _ask(self, asked: Mapping[int, Sequence[Last]]) -> dict[int, Told | Last | None]:
        """Return for each table what there is, and how many rows of all servers stay with each of these; the last one
        that stays if a server has been told; None if a server has nothing to agree on."""
        tensors = [
            WireTensor.of(np.array([last[part] for last in lasts], np.int64))
            for lasts in asked.values()
            for part in (0, 1)
        ]
        step, rank = self._progress.completed, pb.Rank(tables=list(asked))
        replies = self._connections.ask_all(
            lambda _, connection: Frame(connection.request(step, rank=rank), tensors), f"rows to leave at step {step}"
        )
        by_server = [[tensor.numpy().tolist() for tensor in reply.tensors] for reply in replies]
        return dict(zip(asked, map(_joined, zip(*by_server, strict=True)), strict=True))


def _joined(answers: Sequence[list[int]]) -> Told | Last | None:
    """Return what the answers of all servers say together."""
    for state, *told in answers:
        if state == AGREED:
            return told[0], told[1]
    if any(state != AWAITED for state, *_ in answers):
        return None
    filled = [told for _, *told in answers if told[0]] or [answers[0][1:]]
    span = Span(sum(told[0] for told in filled), min(told[1] for told in filled), max(told[2] for told in filled))
    return Told(span, [sum(counts) for counts in zip(*(told[3:] for _, *told in answers), strict=True)])
