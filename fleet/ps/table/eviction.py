"""Says which rows of a table leave, as pure functions of what stands beside the rows at one moment.

A rule that takes rows away needs columns: in which step a row was trained last, how often, or the sum of the weights
that came with it. At the moment of an eviction all rules of a table together make a ``Cut``: a few numbers that say
which of the rows that were there then have to leave. Rows that are trained later are no longer concerned, so that it
does not matter when the others are taken out.

A score is a whole number from 0, the greater the better: a step, a count, or the bits of a sum of weights, which are in
the order of the sums. Rows of one score stand in the order of their ids, the smaller ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleet.numeric.jit import Array, Ids, compiled
from fleet.plan.life import PREFIX, MaxRows, SmallNorm, Unused
from fleet.plan.specs import TableSpec

#: The step in which a row was trained last, when that was in seconds, how often it was, and the sum of its weights.
USED, TIME, SEEN, WEIGHTS = (f"{PREFIX}{name}" for name in ("used", "time", "seen", "weights"))

_DTYPES: Mapping[str, npt.DTypeLike] = {USED: np.int64, TIME: np.float64, SEEN: np.int64, WEIGHTS: np.float64}
#: What ``MaxRows`` goes by.
_SCORES: Mapping[str, str] = {"recent": USED, "often": SEEN, "weight": WEIGHTS}

_LEAST_ID, _GREATEST_ID = np.iinfo(np.int64).min, np.iinfo(np.int64).max

#: The last row that stays: its score and its id.
Last = tuple[int, int]


def columns_of(spec: TableSpec) -> dict[str, npt.DTypeLike]:
    """Return the columns that a table's rules need beside its rows, with their types."""
    names = {USED} if spec.evict else set()
    for rule in spec.evict:
        if isinstance(rule, Unused) and rule.seconds is not None:
            names.add(TIME)
        if isinstance(rule, MaxRows):
            names.add(_SCORES[rule.by])
    return {name: dtype for name, dtype in _DTYPES.items() if name in names}


@dataclass(frozen=True)
class Cut:
    """Says which of the rows that were last trained in ``step`` or before leave."""

    step: int
    used_before: int | None = None
    #: those that were not trained since; who was never told the time counts as trained at ``began``
    time_until: float | None = None
    began: float = 0.0
    norm_below: float | None = None
    #: by what ``MaxRows`` goes by: the last row that stays
    last: tuple[tuple[str, Last], ...] = ()

    @property
    def columns(self) -> list[str]:
        """Return the columns by which it goes."""
        names = [USED, *(_SCORES[by] for by, _ in self.last)]
        names += [] if self.time_until is None else [TIME]
        return list(dict.fromkeys(names)) + ([] if self.norm_below is None else ["weight"])

    def takes(self, ids: Ids, columns: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
        """Return for every row whether it leaves."""
        used = columns[USED][:, 0]
        out = np.zeros(ids.size, bool)
        if self.used_before is not None:
            out |= used < self.used_before
        if self.time_until is not None:
            times = columns[TIME][:, 0]
            out |= np.where(times == 0, self.began, times) <= self.time_until
        for by, last in self.last:
            out |= ~stays(ids, scores(by, columns), last)
        if self.norm_below is not None:
            small = np.empty(ids.size, bool)
            _small(columns["weight"], float(self.norm_below), small)
            out |= small
        return out & (used <= self.step)


def cut_of(spec: TableSpec, step: int, now: float, began: float, last: Mapping[str, Last]) -> Cut:
    """Return what a table's rules say after a step, at a time in seconds. ``began`` is the first time that was told;
    ``last`` has, by what ``MaxRows`` goes by, the last row that stays."""
    used = [step - rule.steps for rule in spec.evict if isinstance(rule, Unused) and rule.steps is not None]
    times = [now - rule.seconds for rule in spec.evict if isinstance(rule, Unused) and rule.seconds is not None]
    norms = [float(rule.below) for rule in spec.evict if isinstance(rule, SmallNorm)]
    return Cut(
        step,
        max(used) + 1 if used else None,  # not trained for so many steps: last in that many before this one
        max(times) if times else None,
        began,
        max(norms) if norms else None,
        tuple(sorted(last.items())),
    )


def budgets(spec: TableSpec) -> dict[str, int]:
    """Return how many rows may stay, by what ``MaxRows`` goes by."""
    out: dict[str, int] = {}
    for rule in spec.evict:
        if isinstance(rule, MaxRows):
            out[rule.by] = min(rule.n, out.get(rule.by, rule.n))
    return out


def score_column(by: str) -> str:
    """Return the column of the scores."""
    return _SCORES[by]


def scores(by: str, columns: Mapping[str, Array]) -> npt.NDArray[np.int64]:
    """Return the score of every row."""
    return columns[_SCORES[by]][:, 0].view(np.int64)


def stays(ids: Ids, scored: npt.NDArray[np.int64], last: Last) -> npt.NDArray[np.bool_]:
    """Return for every row whether it stays, if that one is the last."""
    score, id = last
    out: npt.NDArray[np.bool_] = scored > score
    equal = np.flatnonzero(scored == score)
    out[equal] = ids[equal] <= id
    return out


_NOTHING = np.empty(0, np.int64), np.empty(0, np.int64)


class Ranking:
    """Holds the scores of rows at one moment, and says how many come before a place.

    Each question cuts the part in which its place lies in two, so those that go on from one another get cheaper."""

    def __init__(self, ids: Ids, scored: npt.NDArray[np.int64]) -> None:
        #: what was asked, the worst first, and the rows between: those of ``parts[k]`` come before ``asked[k - 1]``
        self._asked: list[tuple[int, int]] = []
        self._parts: list[tuple[Ids, npt.NDArray[np.int64]]] = [(ids, scored)]
        self.bounds = (int(scored.min()), int(scored.max())) if ids.size else (0, 0)

    def rank(self, last: Last) -> int:
        """Return how many rows stay if that one is the last."""
        key = (last[0], -last[1])
        at = sum(each < key for each in self._asked)
        if at == len(self._asked) or self._asked[at] != key:
            ids, scored = self._parts[at]
            kept = stays(ids, scored, last)
            if kept.all() or not kept.any():  # nothing need be copied
                parts = [_NOTHING, self._parts[at]] if kept.any() else [self._parts[at], _NOTHING]
            else:
                parts = [(ids[~kept], scored[~kept]), (ids[kept], scored[kept])]
            self._parts[at : at + 1] = parts
            self._asked.insert(at, key)
        return sum(ids.size for ids, _ in self._parts[at + 1 :])


#: Ids of rows, and their scores.
Scored = tuple[Ids, npt.NDArray[np.int64]]


def last_here(batches: Callable[[], Iterable[Scored]], sample: Scored, rows: int, most: int) -> Last:
    """Return the last row that stays if ``most`` may, where all rows are here. ``batches`` goes through all of them, of
    which there are more, ``rows``; some, from anywhere, say about where to look.

    What is kept is as little as the sample allows, and as a rule one pass is enough."""
    order = np.lexsort((sample[0], -sample[1]))
    likely = order.size * most / rows
    margin = 4 * np.sqrt(likely * (1 - most / rows)) + 4
    while True:
        # Rows that come before the one at ``low`` are counted, and those up to the one at ``high`` are kept.
        low, high = int(likely - margin), int(likely + margin)
        better = _FIRST if low < 0 else _at(sample, order[low])
        worse = _LAST if high >= order.size else _at(sample, order[high])
        before, kept = 0, [_NOTHING]
        for ids, scored in batches():
            more, chosen = _sift(ids, scored, *better, *worse, np.empty(ids.size, np.int64))
            before += more
            kept.append((ids[chosen], scored[chosen]))
        ids, scored = (np.concatenate(each) for each in zip(*kept, strict=True))
        has_all = low < 0 and high >= order.size
        if has_all or before < most <= before + ids.size:
            return _last_of(ids, scored, most - before)
        margin *= 8  # the sample was not like the rows


def _at(sample: Scored, place: int) -> Last:
    return int(sample[1][place]), int(sample[0][place])


def _last_of(ids: Ids, scored: npt.NDArray[np.int64], most: int) -> Last:
    """Return the row that is number ``most``."""
    score = int(np.partition(scored, ids.size - most)[ids.size - most])
    left = most - int(np.count_nonzero(scored > score))
    return score, int(np.partition(ids[scored == score], left - 1)[left - 1])


#: All rows come after the one, and before the other.
_FIRST, _LAST = (np.iinfo(np.int64).max, _LEAST_ID), (-1, _GREATEST_ID)

#: Rows are sifted by so many.
_BLOCK = 32


@compiled
def _sift(
    ids: Ids, scored: npt.NDArray[np.int64], high: int, first: int, low: int, last: int, out: Ids
) -> tuple[int, Ids]:
    """Return how many rows come before the first, and which do not but come no later than the last."""
    before, found = 0, 0
    # As a rule no row of a block is in between. To see that takes no branches, as the processor cannot guess them, and
    # where the scores tell, no ids.
    for start in range(0, ids.size, _BLOCK):
        these, block = ids[start : start + _BLOCK], scored[start : start + _BLOCK]
        above, up_to = np.int64(0), np.int64(0)
        for k in range(block.size):
            above += np.int64(block[k] > high)
            up_to += np.int64(block[k] >= low)
        if above < up_to:
            above, up_to = np.int64(0), np.int64(0)
            for k in range(block.size):
                above += np.int64(block[k] > high) | (np.int64(block[k] == high) & np.int64(these[k] < first))
                up_to += np.int64(block[k] > low) | (np.int64(block[k] == low) & np.int64(these[k] <= last))
        before += int(above)
        for k in range(start, start + block.size if above < up_to else start):
            if scored[k] > high or (scored[k] == high and ids[k] < first):
                continue
            if scored[k] > low or (scored[k] == low and ids[k] <= last):
                out[found] = k
                found += 1
    return before, out[:found]


@compiled
def _small(weights: Array, below: float, out: npt.NDArray[np.bool_]) -> None:
    for k in range(len(weights)):
        total = 0.0
        for j in range(weights.shape[1]):
            total += np.float64(weights[k, j]) * np.float64(weights[k, j])
        out[k] = np.sqrt(total) < below
