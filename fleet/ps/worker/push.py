"""What travels of a step: gradients or changes, cut for the servers, in as many bits as the strategy gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from fleet.numeric.ids import noise, packed_ids, partition
from fleet.numeric.jit import Array
from fleet.numeric.tensors import WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.low_precision import Narrow
from fleet.ps.worker.connection import ServerClient
from fleet.ps.worker.context import Floor
from fleet.ps.worker.dense_buffers import cut, without_zeros
from fleet.ps.worker.error_feedback import ErrorFeedback, Sent, as_read, encoded
from fleet.ps.worker.geo_training import Change
from fleet.ps.worker.gradient_merge import Clocks, Gradients, Rows


class Pushing:
    """Makes the frames of the next push, one for each server."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._narrow = Narrow(floor.strategy.wire_dtype)
        self.forget_rounding()

    @property
    def is_plain(self) -> bool:
        """Whether gradients travel as they are."""
        return self._narrow.is_plain

    def forget_rounding(self) -> None:
        """What rounding has left so far is no part of what comes."""
        self._feedback = ErrorFeedback(self._narrow, self._floor.trained.layouts)

    def grow(self) -> None:
        """Further parameters have joined the job."""
        self._feedback = self._feedback.grown(self._floor.trained.layouts)

    def of_gradients(self, gradients: Gradients, *, quiet: bool = False) -> tuple[list[Frame], Callable[[], None]]:
        """The frames, and what to call when they have arrived."""
        layouts = self._floor.trained.layouts
        dense, arrived = self._feedback.narrowed([cut(layout, gradients.dense) for layout in layouts])
        return self._frames(gradients, dense, self._encoded_rows(gradients.rows), quiet=quiet), arrived

    def of_change(self, change: Change, clocks: Clocks, steps: int, state: Array | None) -> tuple[list[Frame], Change]:
        """The frames, and the change as servers will read it."""
        layouts = self._floor.trained.layouts
        packed = [without_zeros(layout, flat) for layout, flat in zip(layouts, change.dense, strict=True)]
        dense = [(present, encoded(self._narrow, flat)) for present, flat in packed]
        rows = self._encoded_rows(change.rows)
        told = as_read(self._narrow, layouts, change, dense, rows)
        what = Gradients((), change.rows, clocks, self._floor.trained.description.options(), steps, state=state)
        return self._frames(what, dense, rows), told

    def send_part(self, attempt: int, param: int, grad: torch.Tensor) -> bool:
        """Send the gradient of one parameter ahead of its push; whether the servers took it."""
        floor, step = self._floor, self._floor.progress.completed + 1
        asked = []
        for client, layout in zip(floor.lines.clients, floor.trained.layouts, strict=True):
            cuts = [cut for each in layout.cuts.values() for cut in each if cut[1] == param]
            ahead = pb.Part(attempt=attempt, blocks=[position for position, *_ in cuts])
            tensors = [WireTensor.of(grad if part is None else grad[part]) for *_, part in cuts]
            if cuts:
                asked.append(client.start(Frame(client.request(step, part=ahead), tensors), f"a part of step {step}"))
        for pending in asked:
            pending.send()
        replies = [pending.result() for pending in asked]
        return all(reply.message.granted for reply in replies)

    def _frames(
        self,
        gradients: Gradients,
        dense: Sequence[Sent],
        rows: Mapping[int, Sequence[WireTensor]],
        *,
        quiet: bool = False,
    ) -> list[Frame]:
        """With what travels of the blocks of every server and of the rows of every table."""
        step = self._floor.progress.completed + 1
        by_table = {index: self._by_server(tensors) for index, tensors in rows.items()}

        def push(server: int, client: ServerClient) -> Frame:
            here = {index: parts[server] for index, parts in by_table.items() if parts[server][0].array.size}
            present, tensors = dense[server]
            message = pb.Push(
                options=gradients.options,
                present=present,
                row_tables=list(here),
                used_tables=sorted(rows),
                quiet=quiet,
                steps=gradients.steps,
                read_at=gradients.read.dense[server],
                attempt=gradients.ahead,
                rows_read_at=[gradients.read.rows[server, index] for index in here],
            )
            own = self._floor.own.note(message, gradients.state) if server == 0 else []
            return Frame(client.request(step, push=message), [*tensors, *chain(*here.values()), *own])

        return [push(server, client) for server, client in enumerate(self._floor.lines.clients)]

    def _encoded_rows(self, rows: Mapping[int, Rows]) -> dict[int, list[WireTensor]]:
        """Of every table its ids, and what travels of their gradients."""
        worker, step = self._floor.assignment.index, self._floor.progress.completed + 1
        sent = {}
        for index, (ids, grads) in rows.items():
            chance = None
            if self._narrow.is_whole:
                chance = torch.from_numpy(noise(packed_ids(ids), grads.shape[1], worker, step))
            sent[index] = [WireTensor.of(ids), *self._narrow.encode(torch.from_numpy(grads), chance)]
        return sent

    def _by_server(self, tensors: Sequence[WireTensor]) -> list[Sequence[WireTensor]]:
        """For every server its part of what travels of some rows; ids come first."""
        servers = len(self._floor.lines.clients)
        if servers == 1:
            return [tensors]
        parts = partition(tensors[0].array, servers)
        return [[replace(tensor, array=tensor.array[part]) for tensor in tensors] for part in parts]
