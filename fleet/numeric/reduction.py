"""Decides what workers do all together beside training: barriers and reductions over all of them, one after the other.

Each worker numbers its gatherings 1, 2, 3, … by itself. Gathering ``n`` closes when every live worker has come to it,
and all workers that wait for it are answered. A worker that leaves stops being waited for, and what it brought to a
gathering that is still open stays in it, as a gradient does in a synchronous round. Workers that ask for different
things under one number are all refused, those that come later too; the gatherings after it go on.

The result of a gathering is kept for as long as one of its workers could ask again: until all have come to the next.

Pure: no thread, no clock, no tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from fleet.errors import PlanMismatchError, ProtocolError

BARRIER = "barrier"
OPS = ("sum", "mean", "max", "min")

#: The element types that can be reduced, and as what they travel: sums of integers are exact as int64.
CARRIED = {
    **{name: name for name in ("float64", "float32", "float16", "bfloat16")},
    **dict.fromkeys(("int64", "int32", "int16", "int8", "uint8", "bool"), "int64"),
}

#: How much one worker may bring to one gathering; the server holds that much for all of them at once.
MAX_BYTES = 1 << 30


def result_dtype(op: str, dtype: str) -> str:
    """Return the element type of a reduction: the input's, but for sums (int64) and means (float64) of integers and
    bools."""
    if CARRIED[dtype] != "int64" or op in ("max", "min"):
        return dtype
    return "int64" if op == "sum" else "float64"


@dataclass(frozen=True)
class Asked:
    """Says what a worker wants of a gathering; all of its workers must want the same."""

    op: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    #: in another thread than the one that trains: the calls of two threads have no order between them
    beside: bool = False

    def __str__(self) -> str:
        told = self.op if self.op == BARRIER else f"all_reduce {self.op} of {self.dtype} {self.shape}"
        return f"{told} in a thread beside the training" if self.beside else told


def disagreement(number: int, one: tuple[int, Asked], other: tuple[int, Asked]) -> PlanMismatchError:
    """Return the error for workers that came to one gathering for different things."""
    return PlanMismatchError(
        "workers asked for different things at the same time",
        where=f"gathering {number} of each",
        expected="the same call, op, element type and shape on every worker, from the same of its threads",
        got="; ".join(f"worker {worker}: {asked}" for worker, asked in sorted([one, other], key=lambda told: told[0])),
        todo="Let every worker make its calls of barrier_worker, all_reduce_worker and metrics in the same order, and "
        "from the thread that calls step(): of a pool, any thread may be another one.",
    )


@dataclass(frozen=True)
class Close:
    """Asks to reduce what these workers brought to gathering ``number``, in this order, and to keep the result."""

    number: int
    contributors: tuple[int, ...]


@dataclass(frozen=True)
class Refuse:
    """Asks to fail gathering ``number``, as these two workers want different things, and to keep that as its result."""

    number: int
    one: tuple[int, Asked]
    other: tuple[int, Asked]


@dataclass(frozen=True)
class Tell:
    """Asks to answer the request that waits under ``ticket`` with the result of gathering ``number``."""

    ticket: Hashable
    number: int


@dataclass(frozen=True)
class Forget:
    """Asks to drop what is kept of gathering ``number``: nobody can ask for it again."""

    number: int


Effect = Close | Refuse | Tell | Forget


class Gatherings:
    def __init__(self, workers: Iterable[int]) -> None:
        self._came = dict.fromkeys(workers, 0)
        self._open: dict[int, dict[int, Asked]] = {}
        self._decided: set[int] = set()
        self._waiting: dict[Hashable, tuple[int, int]] = {}

    def come(self, worker: int, number: int, asked: Asked) -> list[Effect]:
        """Note that ``worker`` came to its gathering ``number``; a repetition changes nothing."""
        came = self._came[worker]
        if number <= came:
            return []
        if number != came + 1:
            raise ProtocolError(
                f"worker {worker} skipped a gathering", expected=f"number {came + 1}", got=f"number {number}"
            )
        if came in self._open:
            raise ProtocolError(
                f"worker {worker} did not wait for its gathering", expected=f"number {came}", got=f"number {number}"
            )
        self._came[worker] = number
        refused: list[Effect] = []
        if number not in self._decided:  # decided already, with this worker still to come: it was refused
            here = self._open.setdefault(number, {})
            others = [(each, theirs) for each, theirs in sorted(here.items()) if theirs != asked]
            here[worker] = asked
            if others:
                self._decide(number)
                refused = [Refuse(number, others[0], (worker, asked))]
        return refused + self._effects()

    def wait(self, ticket: Hashable, worker: int, number: int) -> list[Effect]:
        """Take a request of ``worker`` that can be answered once the result of gathering ``number`` is decided."""
        self._waiting[ticket] = (worker, number)
        return self._effects()

    def leave(self, worker: int) -> list[Effect]:
        """Take out ``worker``, which said goodbye or was given up on; its waiting requests are dropped."""
        self._came.pop(worker, None)
        self._waiting = {ticket: need for ticket, need in self._waiting.items() if need[0] != worker}
        return self._effects()

    @property
    def came(self) -> dict[int, int]:
        """Return the newest gathering of every worker that still takes part."""
        return dict(self._came)

    @property
    def open(self) -> frozenset[int]:
        """Return the gatherings that are not decided yet."""
        return frozenset(self._open)

    def resume(self, came: Mapping[int, int], decided: Iterable[int]) -> None:
        """Go on where others were that had these, with no gathering open."""
        self._came, self._decided = dict(came), set(decided)

    def join(self, worker: int) -> None:
        """Let ``worker``, which had left or was never there, take part in the gatherings after those that are
        decided."""
        self._came[worker] = max(self._decided, default=0)

    def reached(self, worker: int) -> int:
        """Return the newest gathering ``worker`` has come to."""
        return self._came[worker]

    def lacking(self) -> list[tuple[int, Asked, tuple[int, ...]]]:
        """Return every gathering that somebody waits in, what it is and whom it waits for, to explain a wait."""
        return [
            (number, next(iter(here.values())), self._absent(number))
            for number, here in sorted(self._open.items())
            if not self._came.keys().isdisjoint(here)
        ]

    def _absent(self, number: int) -> tuple[int, ...]:
        return tuple(sorted(worker for worker, came in self._came.items() if came < number))

    def _decide(self, number: int) -> None:
        del self._open[number]
        self._decided.add(number)

    def _effects(self) -> list[Effect]:
        effects: list[Effect] = []
        for number, here in sorted(self._open.items()):
            if self._came and not self._absent(number):
                self._decide(number)
                effects.append(Close(number, tuple(sorted(here))))
        for ticket, (_, number) in list(self._waiting.items()):
            # Neither open nor decided, so forgotten: the request is so late that its sender has gone on.
            if number not in self._open:
                del self._waiting[ticket]
                effects.append(Tell(ticket, number))
        over = [n for n in (*self._open, *self._decided) if all(came > n for came in self._came.values())]
        for number in sorted(over):
            self._open.pop(number, None)
            self._decided.discard(number)
            effects.append(Forget(number))
        return effects
