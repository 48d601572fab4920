"""Holds what is trained, as the job has it, and writes the servers' dense values into the user's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from fleet.errors import ProtocolError
from fleet.nn.handle import RowSource
from fleet.numeric.scatter import LARGEST, Scattered
from fleet.plan.layout import DenseLayout, dense_layout
from fleet.plan.plan import make_plan
from fleet.plan.specs import ParamSpec, TableSpec
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connections
from fleet.ps.worker.describe import Description
from fleet.ps.worker.progress import Progress

#: From so many small blocks on they are written by compiled code: to load it takes what it gains in a thousand steps.
MANY = 256

#: A server's blocks end to end, by element type.
Flat = Mapping[str, torch.Tensor]


class TrainedModel:
    """Holds the user's parameters and tables as they are described, and their plan."""

    def __init__(self, description: Description, server_num: int) -> None:
        self._server_num = server_num
        self.adopt(description)

    def adopt(self, description: Description) -> None:
        """Train this from now on; it begins with what was trained before."""
        self.description = description
        self.plan = make_plan(description.spec)
        self.layouts = [dense_layout(self.plan, server) for server in range(self._server_num)]
        self.writer = ParameterWriter(description.params, self.layouts)

    def attach(self, source: RowSource, first_table: int = 0) -> None:
        """Let tables, from the given one on, have their rows from ``source``."""
        for handle in self.description.handles[first_table:]:
            handle.attach(source)

    def forget_whole_tables(self) -> None:
        """What was fetched of whole tables is no longer what the servers have."""
        for handle in self.description.handles:
            handle.forget_values()

    @property
    def most_values_bytes(self) -> int:
        """What the dense values of a server weigh, at most."""
        return max(
            sum(numel * int(getattr(torch, dtype).itemsize) for dtype, numel in layout.sizes.items())
            for layout in self.layouts
        )

    def parts(self) -> tuple[dict[int, ParamSpec], dict[int, TableSpec]]:
        """The job's dense parameters, by their identities, and its tables, by those of their handles."""
        described = self.description
        return (
            {id(param): spec for param, spec in zip(described.params, described.spec.params, strict=True)},
            {id(handle): spec for handle, spec in zip(described.handles, described.spec.tables, strict=True)},
        )


class DenseValues:
    """Fetches the servers' dense values and writes them into the user's parameters."""

    def __init__(self, connections: Connections, progress: Progress, trained: TrainedModel) -> None:
        self._connections = connections
        self._progress = progress
        self._trained = trained
        #: server -> how many updates its values had had that came last
        self.read_at: Mapping[int, int] = {}

    def fetch(self, what: str, at_once: int | None = None) -> list[Frame]:
        pull = pb.Pull(version=self._progress.version_needed(), dense=True)
        return self._connections.ask(what, at_once, pull=pull)

    def fetch_behind(self, at_once: int) -> list[Frame]:
        """Fetch from a thread beside the user's, from so many servers at once."""
        return self.fetch(f"parameters after step {self._progress.completed}", at_once)

    def read(self, replies: Sequence[Frame]) -> list[Flat]:
        """Return the values of every server's blocks, as it sent them."""
        self._progress.notice(replies)
        self.read_at = {server: reply.message.clock for server, reply in enumerate(replies)}
        return [
            # In GEO rows follow the dense values.
            dict(zip(layout.dtypes, (tensor.torch() for tensor in reply.tensors), strict=False))
            for layout, reply in zip(self._trained.layouts, replies, strict=True)
        ]

    def write(self, replies: Sequence[Frame]) -> list[Flat]:
        """Write the servers' values into the user's parameters, in place."""
        values = self.read(replies)
        self._trained.writer.write(values)
        return values


class ParameterWriter:
    """Writes the values of all blocks of every server into the parameters, in place.

    The places to write to are looked up once, and again when a parameter's memory has become another.
    """

    def __init__(self, params: Sequence[torch.Tensor], layouts: Sequence[DenseLayout]) -> None:
        self._params = params
        self._layouts = layouts
        self._memory: tuple[list[int], list[object]] | None = None
        #: for each server and element type, where its blocks go
        self._places: list[dict[str, _Places]] = []
        self._detours: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def write(self, flats: Sequence[Flat]) -> None:
        memory_now: tuple[list[int], list[object]] = (
            [param.data_ptr() for param in self._params],
            [param.is_contiguous() or param.stride() for param in self._params],
        )
        if memory_now != self._memory:
            self._memory = memory_now
            self._look_up()
        for places, flat in zip(self._places, flats, strict=True):
            for dtype, each in places.items():
                each.write(flat[dtype])
        for param, detour in self._detours:
            param.copy_(detour)

    def _look_up(self) -> None:
        # What is detached shares the version counter: a stale graph is an error, as in torch.
        detached = [param.detach() for param in self._params]
        # Blocks are ranges of the parameter read row by row; memory laid out otherwise needs a detour.
        dense = [data.contiguous() for data in detached]
        self._detours = [pair for pair in zip(detached, dense, strict=True) if not pair[0].is_contiguous()]
        flat = [data.view(-1) for data in dense]
        self._places = [
            {
                dtype: _Places([flat[param][part or ...] for _, param, part in cuts])
                for dtype, cuts in layout.cuts.items()
            }
            for layout in self._layouts
        ]


class _Places:
    """Where the blocks of a flat tensor go, one after the other."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        stops = list(accumulate(target.numel() for target in targets))
        placed = list(zip([0, *stops], stops, targets, strict=False))
        small = [each for each in placed if _is_small(each[2])]
        if len(small) < MANY:
            small, large = [], placed
        else:
            large = [each for each in placed if not _is_small(each[2])]
        self._form = targets[0].dtype, (stops[-1],)
        self._small = Scattered([(start * target.itemsize, target) for start, _, target in small])
        self._large = [target for _, _, target in large]
        self._ranges = [slice(start, stop) for start, stop, _ in large]
        self._sizes = [target.numel() for target in targets]

    def write(self, flat: torch.Tensor) -> None:
        if (flat.dtype, flat.shape) != self._form:  # compiled code would read on behind its end
            got = flat.dtype, tuple(flat.shape)
            raise ProtocolError("a server's dense values do not fit", expected=self._form, got=got)
        self._small.fill(flat)
        if len(self._large) == len(self._sizes):
            torch._foreach_copy_(self._large, torch.split_with_sizes(flat, self._sizes))
        elif self._large:
            torch._foreach_copy_(self._large, [flat[each] for each in self._ranges])


def _is_small(target: torch.Tensor) -> bool:
    return target.is_cpu and target.nbytes <= LARGEST
