"""Trains a GEO worker: the user's own optimizers step on its own parameters, and on its own rows of the tables; from
time to time it agrees with the servers on both.

Every so many steps a worker tells the servers how far it has come since they last agreed, ``d = (x - old) / N``, and
takes in what the others have done meanwhile: ``x += p - old``, where ``p`` is what the servers have then. ``old`` is
what servers and worker agreed on, for every parameter and every row that the worker holds. With one worker ``p - old``
is zero to the bit, and ``x`` what plain torch computes.

A row is fetched when it is first trained here, and is held from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fleet.base.interruption import uninterrupted
from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.entries import Entry, refuse_loose_state, set_state, state_entries
from fleet.errors import UnsupportedError
from fleet.kernels import RULES
from fleet.numeric.bits import changed
from fleet.numeric.differences import difference, not_addable
from fleet.numeric.ids import partition, unique
from fleet.numeric.jit import Array, Ids
from fleet.optimizer import hooks_before
from fleet.plan.layout import DenseLayout
from fleet.plan.specs import TableSpec
from fleet.ps.table.memory_store import MemoryStore
from fleet.ps.table.shard import Piece
from fleet.ps.table.table import WEIGHT, Table
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.describe import Description
from fleet.ps.worker.lookups import RowReader
from fleet.ps.worker.progress import Progress, ReadAt
from fleet.ps.worker.push import Change, Clocks, Push, Pusher, Rows, pack
from fleet.ps.worker.step import UserGradients
from fleet.ps.worker.trained_model import DenseValues, Flat, ParameterWriter, TrainedModel, laid_out


class TableReplica:
    """Holds rows of one table with their optimizer state, and the values that were agreed on."""

    def __init__(self, spec: TableSpec, rule: str) -> None:
        kernel = RULES[rule].rows
        assert kernel is not None, "describe() refuses such a table"
        self._mine = Table(spec, kernel, seed=0)
        self._agreed = Table(spec, kernel, seed=0)
        self._touched: list[Ids] = []
        #: the ids that are known to have a row: others that are held were looked up, and not trained
        self._with_rows = MemoryStore()

    def read(self, ids: Ids, training: bool, fetch: Callable[[Ids], Array]) -> Array:
        """Return the rows of distinct ids. What is not held is fetched, and held if it is to be trained. Outside
        training the servers are asked which of those that were not trained here have a row."""
        if training:
            self.hold(ids, fetch)
            return self._mine.read(ids, training)
        known, rows = self._mine.known(ids), self._mine.read(ids, training)
        for touched in self._touched:
            self._with_rows.insert(touched)
        known &= self._with_rows.has(ids)
        if not known.all():
            rows[~known] = fetch(ids[~known])
        return rows

    def hold(self, ids: Ids, fetch: Callable[[Ids], Array]) -> None:
        missing = self.missing(ids)
        if len(missing):
            fetched = fetch(missing)
            with uninterrupted():  # or ids would have a place here, and no row in it
                self._agreed.load(missing, {WEIGHT: fetched})
                self._mine.load(missing, {WEIGHT: fetched})

    def missing(self, ids: Ids) -> Ids:
        """Return those of the ids that are not held."""
        missing: Ids = ids[~self._mine.known(ids)]
        return missing

    def train(self, ids: Ids, grads: Array, options: Mapping[str, Any]) -> None:
        self._mine.step += 1
        if len(ids):
            self._touched.append(ids)
            self._mine.apply(ids, grads, options, self._mine.step)

    def edit(self, ids: Ids, rows: Array, fetch: Callable[[Ids], Array]) -> None:
        """Take over rows that the script has changed by itself: they have come so far."""
        self.hold(ids, fetch)
        self._mine.load(ids, {WEIGHT: rows})
        self._touched.append(ids)

    def change(self, divisor: int) -> Rows | None:
        if not self._touched:
            return None
        ids, _ = unique(np.concatenate(self._touched))
        self._with_rows.insert(ids)
        now, agreed = (torch.from_numpy(table.read(ids, True)) for table in (self._mine, self._agreed))
        change = difference(now, agreed)
        lost = not_addable(now, agreed, change)
        if lost is not None:
            row, number = lost.nonzero()[0].tolist()
            name = f"{self._mine.spec.name!r}, id {ids[row]}"
            raise _not_addable(name, now[row, number].item(), agreed[row, number].item())
        return ids, change.div_(divisor).numpy()

    def agree(self, ids: Ids, change: Array) -> None:
        """Note that the servers have added this change."""
        self._agreed.add(ids, change)
        self._touched.clear()

    def undo(self, servers: Sequence[int], server_num: int) -> None:
        """Go back to what was agreed on with these servers."""
        if self._touched:
            ids, _ = unique(np.concatenate(self._touched))
            parts = partition(ids, server_num)
            undone = ids[np.concatenate([parts[server] for server in servers])]
            self._mine.load(undone, {WEIGHT: self._agreed.read(undone, True)})
            self._touched = [ids[part] for server, part in enumerate(parts) if server not in servers]

    def take(self, ids: Ids, values: Array) -> None:
        """Take over rows that others have changed, as they are now. Rows that are not held after all (fetched ahead and
        never used) need nothing."""
        held = self._agreed.known(ids)
        ids, values = ids[held], values[held]
        self._with_rows.insert(ids)
        agreed = self._agreed.read(ids, True)
        self._mine.add(ids, difference(torch.as_tensor(values, device="cpu"), torch.from_numpy(agreed)).numpy())
        self._agreed.load(ids, {WEIGHT: values})

    @property
    def is_touched(self) -> bool:
        """Say whether a row has changed here since this agreed with the servers."""
        return bool(self._touched)

    def warm(self, options: Mapping[str, Any]) -> None:
        self._mine.warm(options)


def _not_addable(name: str, now: float, agreed: float) -> UnsupportedError:
    return UnsupportedError(
        f"a value of {name} was changed from {agreed} to {now}, and in GEO servers add changes up",
        expected="a change that leads there when it is added",
        todo="Change it before fleet.init_worker(), or go on in a new job from a checkpoint in which it is finite.",
    )


class Replica:
    """Holds what the worker trains: parameters and rows, and the values that were agreed on."""

    def __init__(
        self,
        described: Description,
        layouts: Sequence[DenseLayout],
        writer: ParameterWriter,
        workers: int,
        agreed: Sequence[Flat],
    ) -> None:
        """``agreed`` holds the values of every server's blocks, which the parameters have too."""
        self._described = described
        self._layouts = layouts
        self._writer = writer
        self._workers = workers
        self._agreed = self._written = agreed
        groups = described.spec.groups
        self._tables = [TableReplica(spec, groups[spec.group].rule) for spec in described.spec.tables]
        for spec, table in zip(described.spec.tables, self._tables, strict=True):
            table.warm(described.option_values(spec.group))

    # ---------------------------------------------------------------- training

    def lookup(self, index: int, ids: Ids, training: bool, fetch: Callable[[Ids], Array]) -> Array:
        return self._tables[index].read(ids, training, fetch)

    def missing(self, index: int, ids: Ids) -> Ids:
        return self._tables[index].missing(ids)

    def train_dense(self, update: Callable[[], None]) -> None:
        """Take the parameters' part of a step: ``update`` runs the user's optimizers."""
        with self._described.steps_without_tables():
            update()

    def train_rows(self, rows: Mapping[int, Rows], options: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the rows' part, on rows that are all held; ``options`` are those of groups."""
        for index, (ids, grads) in rows.items():
            self._tables[index].train(ids, grads, options[self._described.spec.tables[index].group])

    def options(self) -> dict[int, Mapping[str, Any]]:
        """Return the options by which rows are trained now."""
        return {
            spec.group: self._described.option_values(spec.group, of_step=True) for spec in self._described.spec.tables
        }

    def hold(self, rows: Mapping[int, Rows], fetch: Callable[[int, Ids], Array]) -> None:
        """Have what was read in evaluation mode here too."""
        for index, (ids, _) in rows.items():
            self._tables[index].hold(ids, partial(fetch, index))

    def edit(self, index: int, ids: Ids, rows: Array, fetch: Callable[[Ids], Array]) -> None:
        self._tables[index].edit(ids, rows, fetch)

    @property
    def is_edited(self) -> bool:
        """Say whether anything has changed here since this agreed with the servers: without a step since, the script
        has done so by itself."""
        dense = any(
            bool(changed(value, written[dtype]).any())
            for now, written in zip(self._values(), self._written, strict=True)
            for dtype, value in now.items()
        )
        return dense or any(table.is_touched for table in self._tables)

    # ---------------------------------------------------------------- agreeing with the servers

    def change(self) -> Change:
        """Return this worker's share of what it has changed. Nothing is altered."""
        dense = [
            {
                dtype: self._difference(layout, dtype, value, agreed[dtype]).div_(self._workers)
                for dtype, value in now.items()
            }
            for layout, now, agreed in zip(self._layouts, self._values(), self._agreed, strict=True)
        ]
        rows = {index: table.change(self._workers) for index, table in enumerate(self._tables)}
        return Change(dense, {index: change for index, change in rows.items() if change is not None})

    def agree(self, change: Change, values: Sequence[Flat], others: Iterable[tuple[int, Ids, Array]]) -> None:
        """Take in what the servers have: these values, with ``change`` added, and the rows that ``others`` changed."""
        fresh = []
        for now, agreed, mine, theirs in zip(self._values(), self._agreed, change.dense, values, strict=True):
            fresh.append({d: now[d] + difference(theirs[d], agreed[d] + mine[d]) for d in now})
        self._writer.write(fresh)
        self._agreed, self._written = values, fresh
        for index, (ids, rows) in change.rows.items():
            self._tables[index].agree(ids, rows)
        for index, ids, rows in others:
            self._tables[index].take(ids, rows)

    def _difference(self, layout: DenseLayout, dtype: str, now: torch.Tensor, agreed: torch.Tensor) -> torch.Tensor:
        change = difference(now, agreed)
        lost = not_addable(now, agreed, change)
        if lost is None:
            return change
        for slot in layout.slots:
            here = slice(slot.start, slot.stop)
            if slot.dtype == dtype and lost[here].any():
                at = slot.start + int(lost[here].nonzero()[0])
                name = repr(self._described.spec.params[slot.block.param].name)
                raise _not_addable(name, now[at].item(), agreed[at].item())
        return change

    def undo(self, servers: Sequence[int]) -> None:
        """Go back to what was agreed on with these servers."""
        now = self._values()
        for server in servers:
            now[server] = self._agreed[server]
        self._writer.write(now)
        self._written = now
        for table in self._tables:
            table.undo(servers, len(self._layouts))

    def _values(self) -> list[Flat]:
        flat = [param.detach().reshape(-1).to("cpu") for param in self._described.params]
        return [pack(layout, flat) for layout in self._layouts]

    def move(self, trained: TrainedModel) -> None:
        """Go on with other servers, which have what the former ones had, in other blocks."""
        former, self._layouts, self._writer = self._layouts, trained.layouts, trained.writer
        self._agreed, self._written = (
            laid_out(self._described.params, former, flats, self._layouts) for flats in (self._agreed, self._written)
        )

    # ---------------------------------------------------------------- checkpoints

    def state(self) -> Iterator[Entry]:
        """Yield the state of the user's optimizers for the dense parameters, as it stands in a checkpoint."""
        refuse_loose_state(self._described.optimizers)
        for spec, param in zip(self._described.spec.params, self._described.params, strict=True):
            yield from state_entries(spec.name, 0, param, self._owner(spec.group).state.get(param, {}))

    def restore(self, name: str, pieces: Mapping[str, Any], flat: set[str]) -> None:
        """Give one parameter's optimizer the state that a checkpoint has for it."""
        (position,) = [index for index, spec in enumerate(self._described.spec.params) if spec.name == name]
        owner = self._owner(self._described.spec.params[position].group)
        set_state(owner, self._described.params[position], pieces, flat)

    def _owner(self, group: int) -> torch.optim.Optimizer:
        return self._described.optimizers[self._described.spec.groups[group].optimizer]


class GeoTraining:
    """Takes the worker's steps on its replica, and brings that to agree with the servers."""

    def __init__(
        self,
        steps_per_push: int,
        workers: int,
        gradients: UserGradients,
        pusher: Pusher,
        progress: Progress,
        trained: TrainedModel,
        values: DenseValues,
        rows: RowReader,
        fetch_rows: Callable[[int, Ids], Array],
    ) -> None:
        """``fetch_rows`` brings rows of a table from the servers, to be trained."""
        self._steps_per_push = steps_per_push
        self._workers = workers
        self._gradients = gradients
        self._pusher = pusher
        self._progress = progress
        self._trained = trained
        self._values = values
        self._rows = rows
        self._fetch_rows = fetch_rows
        self._unsent = 0  #: steps since the replica last agreed with the servers
        self._state: np.ndarray[Any, Any] | None = None  #: of the worker's own objects, to be kept with these
        #: the gradients of rows of a step that the parameters have taken, and the options for them
        self._untrained: tuple[Mapping[int, Rows], Mapping[int, Mapping[str, Any]]] | None = None
        #: from the first values on
        self.replica: Replica | None = None

    def begin_from(self, values: list[Flat], state: Iterable[Piece] | None) -> None:
        """Train on these values of the servers from now on. ``state`` is what they have of a checkpoint, if of any."""
        trained = self._trained
        self.replica = Replica(trained.description, trained.layouts, trained.writer, self._workers, values)
        if state is not None:
            self._restore(self.replica, state)

    def _restore(self, replica: Replica, state: Iterable[Piece]) -> None:
        """Take over the optimizer state that the job's checkpoint has for the dense parameters."""
        params = self._trained.plan.spec.params
        assembly = Assembly({spec.name: spec.numel for spec in params}, "what the servers restored")
        for piece in state:
            assembly.add(piece.about["dense"], [torch.as_tensor(each, device="cpu") for each in piece.tensors.values()])
        found = {spec.name: assembly.whole(spec.name) for spec in params}
        # Without a step there is no state. Later, servers that have none were given values alone.
        if self._progress.steps == 0 or any(len(pieces) > 1 for pieces, _ in found.values()):
            for name, (pieces, flat) in found.items():
                replica.restore(name, pieces, flat)

    def step(self, update: Callable[[], None]) -> None:
        """Take one step, in which ``update`` runs the user's optimizers."""
        assert self.replica is not None
        if self._gradients.check_finite:
            self._gradients.dense()
        if self._progress.repeated_steps == 0:
            self._agree(self.replica)
        # Before anything changes, as this may fail.
        self.replica.options()
        rows = self._gradients.rows()
        self.replica.hold(rows, self._fetch_rows)
        has_hooks = any(map(hooks_before, self._trained.description.optimizers))
        with uninterrupted():  # or dense parameters would have taken the step, and nobody would count it
            self.replica.train_dense(update)
            self._untrained = self._gradients.rows() if has_hooks else rows, self.replica.options()
            state = self._gradients.end_step()
            self._unsent += 1
            self._state = self._state if state is None else state
        self.finish_rows()
        if self._unsent >= (self._progress.repeated_steps or self._steps_per_push):
            self._agree(self.replica)

    def finish_rows(self) -> None:
        """Let rows take the step that the parameters have taken. Hooks may have added some, which are fetched first: if
        that fails, or is interrupted, the next call does it again."""
        if self._untrained is not None:
            assert self.replica is not None
            rows, options = self._untrained
            self.replica.hold(rows, self._fetch_rows)
            with uninterrupted():
                self.replica.train_rows(rows, options)
                self._untrained = None

    def flush(self, *, edits: bool) -> None:
        """Tell the servers of everything that this worker has trained, and with ``edits`` of what its script alone has
        changed since."""
        if self.replica is None:
            return
        self._check_params()
        if self._unsent or (edits and self.replica.is_edited):
            self._agree(self.replica)

    def _check_params(self) -> None:
        """Refuse parameters that are not what was agreed on, and cannot be compared with it."""
        self._trained.description.check_types()
        self._trained.writer.check_shapes()

    def move(self) -> None:
        """Go on with other servers."""
        if self.replica is not None:
            self.replica.move(self._trained)

    def edit(self, index: int, ids: Ids, rows: Array) -> None:
        """Take over rows of a table that the script has changed by itself."""
        assert self.replica is not None
        self.replica.edit(index, ids, rows, partial(self._fetch_rows, index))

    def _agree(self, replica: Replica) -> None:
        """Send the servers what this worker has changed, and take in what the others have."""
        self._check_params()
        if has_it := self._progress.repeats_at:  # of a process that was killed
            replica.undo(has_it)
        frames, as_sent = self._pusher.encode_change(replica.change(), self._clocks, self._unsent, self._state)
        self._pusher.deliver(self._push(replica, frames, as_sent))

    @property
    def _clocks(self) -> Clocks:
        return Clocks(self._values.read_at, self._rows.read_at)

    def _push(self, replica: Replica, frames: Sequence[Frame], as_sent: Change) -> Push:
        """Return what brings a change to the servers there are, and to others should the job move meanwhile. Those have
        it or not, so it stays to the bit what it was."""
        trained, steps, state = self._trained, self._unsent, self._state
        layouts, params = trained.layouts, trained.description.params

        def take(replies: Sequence[Frame]) -> None:
            replica.agree(as_sent, self._values.read(replies), list(self._changed_rows(replies)))
            self._unsent, self._state = 0, None

        def anew() -> Push:
            moved = replace(as_sent, dense=laid_out(params, layouts, as_sent.dense, trained.layouts))
            others, _ = self._pusher.encode_change(moved, self._clocks, steps, state, plain=True)
            others[0].message.push.keeping.CopyFrom(frames[0].message.push.keeping)
            return self._push(replica, others, moved)

        return Push(steps, frames, take, trained.plan, anew)

    def _changed_rows(self, replies: Sequence[Frame]) -> Iterator[tuple[int, Array, Array]]:
        """Yield table, ids and values of the rows that others have changed."""
        for server, (layout, reply) in enumerate(zip(self._trained.layouts, replies, strict=True)):
            tensors = iter(reply.tensors[len(layout.dtypes) :])
            for index in reply.message.changed:
                yield index, next(tensors).numpy(), next(tensors).numpy()
            self._rows.read_at.update(
                {(server, index): ReadAt(clock) for index, clock in enumerate(reply.message.table_clocks)}
            )
