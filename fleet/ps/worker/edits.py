"""What a script changes in parameters and tables by itself, between two steps, reaches the servers: ``clamp_``,
``.data``, ``nn.init``, ``model.load_state_dict`` and whatever else writes into their memory.

It is found by comparing the parameters with what was written into them last, before the job does anything with them.
What has changed, element by element, holds for all if it is worker 0's; other workers go on with what the servers
have, and are told so once. Where the servers are ahead of what this worker has, what the script did not change stays as
it is there. Gradients of steps before an edit are applied before it.

Until the servers have an edit it stays where the script put it, whatever values come in between. One that was
interrupted on its way is found again and sent again, which changes nothing.

Where several workers share steps, rows that a script has changed are its own worker's until its next step: look-ups
there find them, and nobody else's do. So all workers may do the same, one after the other, as in plain torch. With the
step worker 0's come to the servers, and those of the others are dropped, as what they have changed of dense values is.

In GEO, where parameters and rows are trained on the worker, an edit is a part of how far it has come.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from fleet.base.interruption import uninterrupted
from fleet.base.turns import Turns
from fleet.nn.handle import Lookup, TableHandle, Wanted
from fleet.numeric.jit import Array, Ids
from fleet.ps.worker.connection import Connections
from fleet.ps.worker.geo_replica import GeoTraining
from fleet.ps.worker.lookups import RowReader
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.step import RemoteTraining
from fleet.ps.worker.trained_model import DenseValues, TrainedModel
from fleet.ps.worker.upload import send_edits

_log = logging.getLogger("fleet.worker")


class Edits:
    """Finds what the script has changed, and brings it to the servers."""

    def __init__(
        self,
        connections: Connections,
        trained: TrainedModel,
        values: DenseValues,
        rows: RowReader,
        training: RemoteTraining,
        geo: GeoTraining | None,
        progress: Progress,
        turns: Turns,
        worker: int,
        *,
        waits_for_step: bool,
    ) -> None:
        """``waits_for_step``: rows that the script has changed are this worker's own until its next step."""
        self._connections = connections
        self._trained = trained
        self._values = values
        self._rows = rows
        self._training = training
        self._geo = geo
        self._progress = progress
        self._turns = turns
        self._counts = worker == 0
        self._where = f"worker {worker}"
        #: table, ids and values that the servers do not have yet
        self._unsent_rows: list[tuple[int, Array, torch.Tensor]] = []
        self._waits_for_step = waits_for_step and geo is None
        #: the step that unsent rows have left with, which may not be over
        self._leave_with: int | None = None
        #: by table, sorted ids and values of rows that are this worker's own until its next step
        self._own_rows: dict[int, tuple[Ids, torch.Tensor]] = {}
        self._told: set[str] = set()

    def send_found(self, *, in_step: bool = False) -> None:
        """Have what the script has changed by itself hold for all. Another thread does not know whether the one that
        trains is in the middle of it."""
        if not self._turns.is_other_thread:
            has_rows = self._find_rows(self._trained.description.handles, keeps=in_step)
            if self.find() or has_rows:
                self._send()

    def send_rows_of(self, handles: Iterable[TableHandle]) -> None:
        """Have the rows that the script has changed in these tables hold, before they are read."""
        if not self._turns.is_other_thread and self._find_rows(handles, keeps=True):
            self.find()
            self._send()

    def find(self) -> bool:
        """Find what has changed in the parameters, and let it stay there; whether there is anything to send."""
        found = self._values.find_changed()
        if not self._counts:
            self._tell(self._trained.plan.spec.params[index].name for index in found)
            return False
        self._values.kept = found
        return bool(found)

    def _find_rows(self, handles: Iterable[TableHandle], *, keeps: bool) -> bool:
        """Find what has changed in the rows of these tables; whether there is anything to send now. What waits for the
        next step is sent as well, unless it ``keeps`` that."""
        self._forget_sent()
        for handle in handles:
            if handle.may_be_edited:
                # What is taken is the handle's no more, so nothing may come in between.
                with uninterrupted():
                    self._take_rows(handle)
        if self._waits_for_step:
            if not keeps and self._counts:
                self._release_own()
            return bool(self._unsent_rows)  # perhaps of a step that was interrupted
        if self._counts and self._geo is None:
            return bool(self._unsent_rows)
        while self._unsent_rows:
            index, ids, rows = self._unsent_rows[0]
            if self._geo is not None:
                self._geo.edit(index, ids, rows.numpy())
            else:
                # As an edit of dense values, it stays in the weight until the next step brings the servers' values.
                self._tell([self._trained.description.handles[index].name])
            del self._unsent_rows[0]
        return False

    def _take_rows(self, handle: TableHandle) -> None:
        edit = handle.take_edit()
        if edit is None:
            return
        index = self._trained.description.handles.index(handle)
        if self._waits_for_step:
            self._own_rows[index] = _joined(self._own_rows.get(index), edit)
        else:
            self._unsent_rows.append((index, *edit))

    def begin_step(self) -> None:
        """Have no rows of this worker's own any more: those that count leave with the step, and the others are
        dropped."""
        if self._counts:
            self._release_own()
        else:
            self._tell(self._trained.description.handles[index].name for index in self._own_rows)
            self._own_rows = {}

    def _release_own(self) -> None:
        self._forget_sent()
        with uninterrupted():
            self._unsent_rows += [(index, *own) for index, own in self._own_rows.items()]
            self._own_rows = {}

    def send_with_step(self) -> None:
        """Have the rows that wait for the step that is about to be pushed hold for all from then on."""
        if self._unsent_rows and self._waits_for_step:
            completed, rows = self._progress.completed, self._unsent_rows
            send_edits(self._connections, self._trained, completed, {}, rows, with_step=True)
            self._leave_with = completed + 1  # until then servers may move, and others need them

    def _forget_sent(self) -> None:
        """Forget the rows that have left with a step, if that is over."""
        if self._leave_with is not None and self._leave_with <= self._progress.completed:
            self._unsent_rows, self._leave_with = [], None

    def drop(self) -> None:
        """Drop what rows were changed to, as the servers have other values."""
        self._own_rows, self._unsent_rows, self._leave_with = {}, [], None

    def laid_over(self, wanted: Sequence[Wanted], found: Sequence[Lookup]) -> list[Lookup]:
        """Return what look-ups have found, with the rows in it that are this worker's own."""
        if not self._own_rows or self._turns.is_other_thread:
            return [*found]
        handles = self._trained.description.handles
        return [self._with_own(handles.index(each.handle), lookup) for each, lookup in zip(wanted, found, strict=True)]

    def _with_own(self, index: int, lookup: Lookup) -> Lookup:
        if index not in self._own_rows:
            return lookup
        ids, values = self._own_rows[index]
        is_own = np.isin(lookup.ids.numpy(), ids)
        if not is_own.any():
            return lookup
        places = torch.from_numpy(np.searchsorted(ids, lookup.ids.numpy()[is_own]))
        rows = lookup.rows.clone()
        rows[torch.from_numpy(is_own).to(rows.device)] = values[places].to(rows.device, rows.dtype)
        return lookup._replace(rows=rows, foreseen=None)

    def lay_over_whole(self, handle: TableHandle, rows: torch.Tensor) -> torch.Tensor:
        """Return all rows of a table, with those in it that are this worker's own."""
        own = self._own_rows.get(self._trained.description.handles.index(handle))
        if own is not None and not self._turns.is_other_thread:
            rows[torch.from_numpy(own[0])] = own[1]
        return rows

    def _send(self) -> None:
        """Have what was found hold for all."""
        self._training.flush()
        dense, rows = self._values.kept, self._unsent_rows
        send_edits(self._connections, self._trained, self._progress.completed, dense, rows)
        if rows:
            self._rows.discard_fetched()
        self._unsent_rows, self._leave_with = [], None
        if dense:
            self._training.communicator.drop_fetched()  # now: what is asked for from here on has the edits
            fresh = self._values.fetch("values beside those that the script has changed")
            self._values.kept = {}
            self._values.write(fresh)

    def _tell(self, names: Iterable[str]) -> None:
        fresh = [name for name in names if name not in self._told]
        self._told.update(fresh)
        if fresh:
            _log.warning(
                "%s: the script has changed %s by itself; what worker 0's script gives them counts for all, and this "
                "worker goes on with the values of the servers",
                self._where,
                ", ".join(map(repr, fresh)),
            )


def _joined(before: tuple[Ids, torch.Tensor] | None, edit: tuple[Ids, torch.Tensor]) -> tuple[Ids, torch.Tensor]:
    """Return rows that were changed once more, or others, in the order of their ids."""
    if before is None:
        return edit
    stays = ~np.isin(before[0], edit[0])
    ids = np.concatenate([before[0][stays], edit[0]])
    order = np.argsort(ids)
    return ids[order], torch.cat([before[1][torch.from_numpy(stays)], edit[1]])[torch.from_numpy(order)]
