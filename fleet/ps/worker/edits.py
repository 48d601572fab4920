"""What a script changes in parameters and tables by itself, between two steps, reaches the servers: ``clamp_``,
``.data``, ``nn.init``, ``model.load_state_dict`` and whatever else writes into their memory.

It is found by comparing the parameters with what was written into them last, before the job does anything with them.
What has changed, element by element, holds for all if it is worker 0's; other workers go on with what the servers
have, and are told so once. Where the servers are ahead of what this worker has, what the script did not change stays as
it is there. Gradients of steps before an edit are applied before it.

Until the servers have an edit it stays where the script put it, whatever values come in between. One that was
interrupted on its way is found again and sent again, which changes nothing.

In GEO, where parameters and rows are trained on the worker, an edit is a part of how far it has come.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from fleet.base.interruption import uninterrupted
from fleet.nn.handle import TableHandle
from fleet.numeric.jit import Array
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
        worker: int,
    ) -> None:
        self._connections = connections
        self._trained = trained
        self._values = values
        self._rows = rows
        self._training = training
        self._geo = geo
        self._progress = progress
        self._counts = worker == 0
        self._where = f"worker {worker}"
        #: table, ids and values that the servers do not have yet
        self._unsent_rows: list[tuple[int, Array, torch.Tensor]] = []
        self._told: set[str] = set()

    def find(self) -> bool:
        """Find what has changed in the parameters, and let it stay there; whether there is anything to send."""
        found = self._values.find_changed()
        if not self._counts:
            self._tell(self._trained.plan.spec.params[index].name for index in found)
            return False
        self._values.kept = found
        return bool(found)

    def find_rows(self, handles: Iterable[TableHandle]) -> bool:
        """Find what has changed in the rows of these tables; whether there is anything to send."""
        for handle in handles:
            if handle.may_be_edited:
                # What is taken is the handle's no more, so nothing may come in between.
                with uninterrupted():
                    self._take_rows(handle)
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
        if edit is not None:
            self._unsent_rows.append((self._trained.description.handles.index(handle), *edit))

    def send(self) -> None:
        """Have what was found hold for all."""
        self._training.flush()
        dense, rows = self._values.kept, self._unsent_rows
        send_edits(self._connections, self._trained, self._progress.completed, dense, rows)
        if rows:
            self._rows.discard_fetched()
        self._unsent_rows = []
        if dense:
            self._training.drop_fetched()  # now: what is asked for from here on has the edits
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
