"""GEO: steps are taken on this worker's own values, which from time to time are brought to agree with the servers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fleet.checkpoint.assembly import Assembly
from fleet.numeric.jit import Array
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.context import Floor
from fleet.ps.worker.delivery import Delivering, Push
from fleet.ps.worker.dense_buffers import Flat
from fleet.ps.worker.geo_training import Replica
from fleet.ps.worker.gradient_merge import Clocks
from fleet.ps.worker.gradients import UserGradients
from fleet.ps.worker.push import Pushing
from fleet.ps.worker.state_reader import exported


class Agreeing:
    def __init__(self, floor: Floor, gradients: UserGradients, pushing: Pushing, delivering: Delivering) -> None:
        self._floor = floor
        self._gradients = gradients
        self._pushing = pushing
        self._delivering = delivering
        self._unsent = 0  #: steps since the replica last agreed with the servers
        self._state: np.ndarray[Any, Any] | None = None  #: of the worker's own objects, to be kept with these
        #: what is trained here, in the mode in which anything is
        self.replica: Replica | None = None

    def begin_from(self, values: list[Flat]) -> None:
        """Train on these values of the servers from now on."""
        floor = self._floor
        if not floor.policy.trains_on_workers:
            return
        trained, workers = floor.trained, floor.assignment.worker_num
        self.replica = Replica(trained.description, trained.layouts, trained.writer, workers, values)
        if floor.progress.steps:
            self._restore(self.replica)

    def _restore(self, replica: Replica) -> None:
        """Take over the optimizer state that the job's checkpoint has for the dense parameters."""
        params = self._floor.trained.plan.spec.params
        assembly = Assembly({spec.name: spec.numel for spec in params}, "what the servers restored")
        for client in self._floor.lines.clients:
            for piece in exported(client, self._floor.progress.completed):
                if "dense" not in piece.about:
                    break
                assembly.add(piece.about["dense"], [torch.as_tensor(each) for each in piece.tensors.values()])
        for spec in params:
            replica.restore(spec.name, *assembly.whole(spec.name))

    def step(self, update: Callable[[], None]) -> None:
        assert self.replica is not None
        if self._gradients.check_finite:
            self._gradients.dense()
        self.replica.train(update, self._gradients.rows(), self._fetch)
        self._floor.progress.take_step()
        self._unsent += 1
        state = self._floor.own.take()
        self._state = self._state if state is None else state
        if self._unsent >= self._floor.policy.steps_per_push(1):
            self._agree(self.replica)

    def _fetch(self, index: int, ids: Array) -> Array:
        with self._floor.figures.pull:
            return self._floor.rows.fetch(index, ids, self._floor.progress.completed, training=True)

    def flush(self) -> None:
        """Have the servers know of everything that this worker has trained."""
        if self.replica is not None and self._unsent:
            self._agree(self.replica)

    def _agree(self, replica: Replica) -> None:
        """Tell the servers how far this worker has come, and take in what the others have done."""
        floor = self._floor
        floor.trained.description.check_types()
        clocks = Clocks(floor.fetching.read_at, floor.rows.read_at)
        frames, told = self._pushing.of_change(replica.change(), clocks, self._unsent, self._state)

        def take(replies: Sequence[Frame]) -> None:
            replica.agree(told, floor.fetching.values(replies), list(self._changed_rows(replies)))
            self._unsent, self._state = 0, None

        self._delivering.deliver(Push(self._unsent, frames, take))

    def _changed_rows(self, replies: Sequence[Frame]) -> Iterator[tuple[int, Array, Array]]:
        """Table, ids and values of the rows that the servers say others have changed."""
        for server, (layout, reply) in enumerate(zip(self._floor.trained.layouts, replies, strict=True)):
            tensors = iter(reply.tensors[len(layout.dtypes) :])
            for index in reply.message.changed:
                yield index, next(tensors).numpy(), next(tensors).numpy()
            self._floor.rows.read_at.update(
                {(server, index): clock for index, clock in enumerate(reply.message.table_clocks)}
            )
