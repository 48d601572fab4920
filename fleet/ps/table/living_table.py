"""A table whose rows come and go: an id gets a row when it is admitted, and rows leave by rules.

What an eviction decides is a ``Cut``, a few numbers. From that moment on every row that it takes counts as gone: it is
neither read nor saved, and if it is trained again it begins anew. A sweep takes the rows out, some of them after each
round, so that no step waits for it. Nobody can tell a row that has been swept from one that is due.

Not thread-safe: the caller holds a lock around every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.errors import MissedError
from fleet.kernels.rule import RowKernel
from fleet.numeric.ids import scatter, unique
from fleet.numeric.jit import Array, Ids, compiled
from fleet.numeric.merge import merge
from fleet.plan.life import PREFIX
from fleet.plan.specs import TableSpec
from fleet.ps.table.admittance import CountsView, admission_of
from fleet.ps.table.eviction import (
    SEEN,
    TIME,
    USED,
    WEIGHTS,
    Cut,
    Last,
    Ranking,
    Scored,
    budgets,
    columns_of,
    cut_of,
    last_here,
    score_column,
    scores,
)
from fleet.ps.table.store import Batch, Store
from fleet.ps.table.table import Table
from fleet.ps.table.tombstones import Tombstones

#: Rows are looked at by so many at once.
_AT_ONCE = 1 << 16
#: So many rows say about where a cut will be.
_SAMPLE = 1 << 16
#: So many rows that are due are counted where somebody asks for the number of rows.
_COUNTED = 1 << 20


@dataclass(frozen=True)
class Life:
    """Says how a table's rows come and go: how many there are, how many ids are counted that have none, how many were
    evicted, and how many gradients were dropped. While a large table is swept, ``rows`` has those that are due."""

    rows: int
    pending: int
    evicted: int
    dropped_gradients: int


class LivingTable(Table):
    def __init__(
        self, spec: TableSpec, kernel: RowKernel, seed: int, store: Store | None = None, *, is_whole: bool = True
    ) -> None:
        """``is_whole`` says that no other server has rows of the table."""
        super().__init__(spec, kernel, seed, store)
        self._is_whole = is_whole
        self._columns = columns_of(spec)
        for name, dtype in self._columns.items():
            self._store.ensure_column(name, 1, 0, dtype)
        self._admission = admission_of(spec, seed)
        #: what ``MaxRows`` goes by, and how many rows may stay on all servers
        self.budgets = budgets(spec)
        #: the time in seconds, and the first one that was told
        self._now = self._began = 0.0
        #: where the sweep goes on, and how many rows it may look at
        self._swept = 0
        #: whether the cut was made after the last round
        self._is_cut_new = False
        #: what ``MaxRows`` goes by -> the rows to be ranked, while servers have to agree on a cut
        self._rankings: dict[str, Ranking] = {}
        self._agreed: dict[str, Last] = {}
        self._awaits: tuple[str, ...] = ()
        self._tombstones = Tombstones()
        self._evicted = self._dropped = 0

    @property
    def nbytes(self) -> int:
        counted = 0 if self._admission is None else self._admission.nbytes
        return super().nbytes + counted + self._tombstones.nbytes

    def figures(self) -> dict[str, int]:
        found = {**super().figures(), **asdict(self.life)}
        if not found["on_disk"]:  # else nobody knows, without looking for each of them, where rows lie that are due
            found["in_memory"] = found["rows"]
        return found

    @property
    def life(self) -> Life:
        """Return how the rows come and go."""
        left = len(self) - self._due_left() if self.cut is not None and len(self) <= _COUNTED else len(self)
        due = len(self) - left
        pending = 0 if self._admission is None else len(self._admission)
        return Life(left, pending, self._evicted + due, self._dropped)

    # ---------------------------------------------------------------- rows

    @property
    def layout(self) -> None:
        """Return nothing: which rows there are is looked up in ways of its own."""

    def read(self, ids: Ids, training: bool, out: Array | None = None, *, before_cut: bool = False) -> Array:
        """Return the rows of ids; with ``before_cut`` also those that left after the last round."""
        if not (before_cut and self._is_cut_new):
            return super().read(ids, training, out)
        cut, self.cut = self.cut, None
        try:
            return super().read(ids, training, out)
        finally:
            self.cut = cut

    def known(self, ids: Ids) -> npt.NDArray[np.bool_]:
        ids = self._checked(ids)
        found = [self._find(ids[part]) >= 0 for part in self._parts(ids)]
        return np.concatenate(found)

    def train(
        self,
        contributions: Sequence[tuple[Ids, Array]],
        weights: Sequence[Array | None],
        divisor: float,
        options: Mapping[str, Any],
        now: float,
        *,
        keep: bool = False,
    ) -> tuple[Ids, Array | None]:
        """Count what workers have looked up, let ids in, and update the rows with the mean of the gradients, as step
        number ``step``. Return the ids of the rows that have changed, and with ``keep`` their weights before."""
        self._tell(now)
        ids, grads = merge(contributions, divisor) if len(contributions) > 1 or divisor != 1 else contributions[0]
        counts, weighed = _counted(contributions, weights)
        self._begin_anew(ids)
        if self._admission is not None:
            ids, grads, counts, weighed = self._admitted(ids, grads, counts, weighed)
        before = self.apply(ids, grads, options, self.step, keep=keep)
        self._note(ids, counts, weighed)
        return ids, before

    def _admitted(self, ids: Ids, grads: Array, counts: Array, weighed: Array) -> tuple[Ids, Array, Array, Array]:
        """Return what of these belongs to rows, those that come now included; the counts of new rows are those of their
        ids."""
        assert self._admission is not None
        new = np.flatnonzero(~self._store.has(ids))
        if not new.size:
            return ids, grads, counts, weighed
        admitted, totals, sums = self._admission.admit(ids[new], counts[new], weighed[new], self.step)
        self._dropped += int(counts[new[~admitted]].sum())
        counts[new], weighed[new] = totals, sums
        if admitted.all():
            return ids, grads, counts, weighed
        left = np.ones(ids.size, bool)
        left[new[~admitted]] = False
        return ids[left], grads[left], counts[left], weighed[left]

    def _note(self, ids: Ids, counts: Array, weighed: Array) -> None:
        """Note that rows were trained."""
        for part in self._parts(ids) if self._columns else ():
            slots = self._store.find(ids[part])
            self._store.write(slots)
            for name in self._columns:
                column = self._store.column(name)
                if name == USED:
                    values = np.full((slots.size, 1), self.step, np.int64)
                elif name == TIME:
                    values = np.full((slots.size, 1), self._now, np.float64)
                else:
                    values = self._copied(name, slots)
                    values[:, 0] += (counts if name == SEEN else weighed)[part]
                scatter(column, slots, values)

    def load(self, ids: Ids, columns: Mapping[str, Array]) -> None:
        """Set columns of ids. New rows of which it is not known count as seen once, and now."""
        self.take_out_due()
        ids = self._checked(ids)
        defaults = {USED: self.step, TIME: self._now, SEEN: 1, WEIGHTS: 1.0}
        lacking = [name for name in self._columns if name not in columns]
        new = ids[~self._store.has(ids)] if lacking else _NONE
        super().load(ids, columns)
        if new.size:
            super().load(new, {name: np.full((new.size, 1), defaults[name], self._columns[name]) for name in lacking})
        if self._admission is not None:
            self._admission.forget(ids)

    def remove(self, ids: Ids) -> None:
        """Take away the rows of ids, which are distinct, as the rows that were loaded before did not last."""
        self.take_out_due()
        super().remove(ids)

    def _find(self, ids: Ids) -> Ids:
        slots = self._store.find(ids)
        if self.cut is not None:
            slots[self._due(ids, slots)] = -1
        return slots

    def _due(self, ids: Ids, slots: Ids) -> npt.NDArray[np.bool_]:
        """Return for ids, of which some may have no row, whether they have one that is gone."""
        out = np.zeros(ids.size, bool)
        there = np.flatnonzero(slots >= 0)
        if self.cut is not None and there.size:
            columns = {name: self._copied(name, slots[there]) for name in self.cut.columns}
            out[there] = self.cut.takes(ids[there], columns)
        return out

    def _keeps(self, column: str) -> bool:
        return column in self._columns or not column.startswith(PREFIX)

    def _type_of(self, column: str) -> np.dtype[Any]:
        return np.dtype(self._columns[column]) if column in self._columns else self._dtype

    def export(self) -> Batch:
        self.take_out_due()
        return super().export()

    # ---------------------------------------------------------------- eviction

    @property
    def awaits(self) -> tuple[str, ...]:
        """Return by what servers have to agree on a cut before the table may change."""
        return self._awaits

    def evict(self, now: float) -> None:
        """Let rows leave that have to at this moment."""
        if not self.spec.evict:
            return
        self.take_out_due()
        self._tell(now)
        self._rankings, self._agreed, self._awaits = {}, {}, tuple(self.budgets)
        if not self._awaits:
            self._decide()
        elif self._is_whole:
            for by, most in self.budgets.items():
                self.agree(by, self._last_of(by, most))

    def _last_of(self, by: str, most: int) -> Last | None:
        if len(self) <= most:
            return None
        ids, columns = self._store.sample(_SAMPLE, [score_column(by)])
        return last_here(partial(self._scored, by), (ids, scores(by, columns)), len(self), most)

    def _tell(self, now: float) -> None:
        self._now, self._began = now, self._began or now

    def ranking(self, by: str) -> Ranking:
        """Return the rows as they are ranked now, while a cut is awaited."""
        if by not in self._rankings:
            every, scored = (np.concatenate(each) for each in zip((_NONE, _NONE), *self._scored(by), strict=True))
            self._rankings[by] = Ranking(every, scored)
        return self._rankings[by]

    def _scored(self, by: str) -> Iterator[Scored]:
        """Yield the ids and the scores of all rows, some at a time; they hold until something is written."""
        place: int | None = 0
        while place is not None:
            (ids, columns), place = self._store.scan(place, _AT_ONCE, [score_column(by)], briefly=True)
            yield ids, scores(by, columns)

    def agree(self, by: str, last: Last | None) -> None:
        """Take the last row that stays, by one thing that ``MaxRows`` goes by; None if all do."""
        self._rankings.pop(by, None)
        self._awaits = tuple(each for each in self._awaits if each != by)
        if last is not None:
            self._agreed[by] = last
        if not self._awaits:
            self._decide()

    def _decide(self) -> None:
        cut = cut_of(self.spec, self.step, self._now, self._began, self._agreed)
        self._agreed = {}
        if cut.last or (cut.used_before or 0) > 0 or cut.time_until is not None or cut.norm_below is not None:
            self.cut, self._swept, self._is_cut_new = cut, 0, True

    def sweep(self, most: int) -> None:
        """Take out rows that are due, of so many that are looked at."""
        self._is_cut_new = False
        while self.cut is not None and most > 0:
            ids, place = self._due_from(self._swept, min(most, _AT_ONCE))
            self._take_out(ids)
            most -= _AT_ONCE
            if place is None:
                self.cut, self._swept = None, 0
            else:
                self._swept = place

    def take_out_due(self) -> None:
        """Take out all rows that are due."""
        while self.cut is not None:
            self.sweep(_AT_ONCE)

    def _begin_anew(self, ids: Ids) -> None:
        """Take out those of the rows that are due, as they are trained again."""
        for part in self._parts(ids) if self.cut is not None else ():
            self._take_out(ids[part][self._due(ids[part], self._store.find(ids[part]))])

    def _due_from(self, place: int, most: int) -> tuple[Ids, int | None]:
        assert self.cut is not None
        (ids, columns), following = self._store.scan(place, most, self.cut.columns)
        return ids[self.cut.takes(ids, columns)], following

    def due(self) -> Iterator[Ids]:
        """Yield the ids of rows that are gone and still there."""
        place: int | None = 0  # the sweep's own is no other reader's: rows may have moved since it came there
        while self.cut is not None and place is not None:
            ids, place = self._due_from(place, _AT_ONCE)
            yield ids

    def _due_left(self) -> int:
        """Return how many rows are due."""
        return sum(ids.size for ids in self.due())

    def _take_out(self, ids: Ids) -> None:
        for part in self._parts(ids) if ids.size else ():
            if self._watchers:
                slots = self._store.find(ids[part])
                for watcher in self._watchers:
                    watcher(slots)
            self._store.remove(ids[part])
        self._evicted += ids.size
        if self._epoch:
            self._tombstones.add(self._epoch, ids, len(self))

    # ---------------------------------------------------------------- for checkpoints

    def removed_since(self, epoch: int) -> list[Ids]:
        """Return the rows that were removed in an epoch or later, without those that are due."""
        if epoch and not self._tombstones.reaches(epoch):
            raise MissedError(
                "this server does not know which rows have left since the last checkpoint",
                where=f"table {self.spec.name!r}",
            )
        return self._tombstones.since(epoch)

    def knows_removed(self, since: int) -> bool:
        """Say whether all rows are known that were removed in an epoch or later, once all are out that are due."""
        self.take_out_due()  # first: they may be more than are remembered
        return self._tombstones.reaches(since)

    def forget_removed(self, before: int) -> None:
        """Forget the rows that were removed before an epoch."""
        self._tombstones.forget(before)

    def counts(self, *, frozen: bool) -> CountsView | None:
        """Return what is counted of ids without a row, as it is now; ``frozen``, it stays so. None if nothing is."""
        return None if self._admission is None else self._admission.view(frozen=frozen)

    def about_counts(self, view: CountsView) -> dict[str, Any]:
        assert self._admission is not None
        return self._admission.about(view)

    def load_counts(self, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> bool:
        """Take over a piece of what was counted; False if that says nothing here."""
        if "ids" in arrays:  # while a checkpoint was written beside the training, some may have got a row
            left = ~self._store.has(arrays["ids"])
            arrays = {name: values[left] for name, values in arrays.items()}
        return self._admission is not None and self._admission.load(about, arrays)

    @property
    def past(self) -> dict[str, Any]:
        """Return what else there is to remember, as JSON has it."""
        due = self._due_left() if self.cut is not None else 0
        return {
            "evicted": self._evicted + due,
            "dropped": self._dropped,
            "began": self._began,
            "awaits": bool(self._awaits),
        }

    def resume(self, past: Mapping[str, Any], now: float) -> None:
        """Go on from ``past``."""
        self._evicted, self._dropped, self._began = past["evicted"], past["dropped"], past["began"]
        self._now = now
        if past["awaits"]:
            self.evict(now)

    def warm(self, options: Mapping[str, Any] | None = None) -> None:
        super().warm(options)
        options = self.kernel.options if options is None else options
        trial = LivingTable(replace(self.spec, num_embeddings=None), self.kernel, self._seed)
        ids, grads = np.arange(1024), np.zeros((1024, self.spec.dim), self._dtype)
        for trial.step in range(1, 3):
            trial.train([(ids, grads)], [None], 1, options, 0.0)
        trial.load(ids, {"weight": grads})
        trial.evict(0.0)
        if self._columns:  # else no row ever leaves
            time_until = -1.0 if TIME in self._columns else None
            trial.cut = Cut(trial.step, 0, time_until, 0.0, 0.0, tuple((by, (0, 0)) for by in self.budgets))
        trial.read(ids, training=True)
        trial.sweep(1)
        trial._take_out(ids)
        trial.load(ids, {"weight": grads})
        trial._take_out(ids[:10])
        if (view := trial.counts(frozen=True)) is not None:
            trial.train([(ids, grads)], [None], 1, options, 0.0)
            view.export(0, 1)
            view.leave()


_NONE = np.empty(0, np.int64)


def _counted(
    contributions: Sequence[tuple[Ids, Array]], weights: Sequence[Array | None]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return for each of the ids, distinct and in the order in which they come, how many workers have looked it up, and
    the sum of the weights; who gives none gives each of one."""
    distinct, places = unique(np.concatenate([ids for ids, _ in contributions]))
    given = [
        np.ones(ids.size) if weight is None else weight for (ids, _), weight in zip(contributions, weights, strict=True)
    ]
    counts, sums = np.zeros(distinct.size, np.int64), np.zeros(distinct.size, np.float64)
    _tally(places, np.concatenate(given).astype(np.float64), counts, sums)
    return counts, sums


@compiled
def _tally(places: Ids, weights: Array, counts: Ids, sums: Array) -> None:
    for k in range(places.size):
        counts[places[k]] += 1
        sums[places[k]] += weights[k]
