"""Counts how old the values were on which gradients were computed, which is the price of a mode without rounds.

The staleness of an update is how many updates the values had had, when it was applied, since its worker read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

#: Counted one by one below this; from here on in ranges that double, so that a histogram stays small.
EXACT = 64

#: What the dense parameters are called where each table has its name.
DENSE = "dense"

#: worker -> "dense" or a table's name -> lower end of a range -> how many updates fell into it
Counts = Mapping[int, Mapping[str, Mapping[int, int]]]


class Staleness:
    """Keeps one histogram for each worker and table, and for each worker's dense parameters."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, Counter[int]]] = {}
        #: worker -> how many of its gradients came too late to be used
        self.late: Counter[int] = Counter()

    def add(self, worker: int, name: str, staleness: int) -> None:
        by_name = self._counts.setdefault(worker, {})
        if name not in by_name:
            by_name[name] = Counter()
        by_name[name][bucket(staleness)] += 1

    def count_late(self, worker: int) -> None:
        """Count a gradient that came too late to be used."""
        self.late[worker] += 1

    def resume(self, counts: Mapping[str, Mapping[str, Mapping[str, int]]], late: Mapping[str, int]) -> None:
        """Go on from earlier counts, which have come through JSON."""
        self.late.update({int(worker): count for worker, count in late.items()})
        for worker, by_name in counts.items():
            for name, of in by_name.items():
                for lower, count in of.items():
                    self._counts.setdefault(int(worker), {}).setdefault(name, Counter())[int(lower)] += count

    @property
    def counts(self) -> Counts:
        return self._counts


def bucket(staleness: int) -> int:
    """Return the lower end of the range that a staleness falls into."""
    return staleness if staleness < EXACT else 1 << (staleness.bit_length() - 1)


def total(parts: Iterable[Counts]) -> dict[int, dict[str, dict[int, int]]]:
    """Return the histograms of several servers as one, with workers, names and ranges in order."""
    sums: dict[int, dict[str, Counter[int]]] = {}
    for part in parts:
        for worker, by_name in part.items():
            for name, counts in by_name.items():
                sums.setdefault(worker, {}).setdefault(name, Counter()).update(counts)
    return {
        worker: {name: dict(sorted(counts.items())) for name, counts in sorted(by_name.items())}
        for worker, by_name in sorted(sums.items())
    }
