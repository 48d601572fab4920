"""Holds what is trained, as the job has it, and writes the servers' dense values into the user's parameters.

What was written stays, beside the parameters, so that what a script changes in them by itself can be seen (edits.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import torch

from fleet.base.interruption import uninterrupted
from fleet.errors import ProtocolError, UnsupportedError
from fleet.nn.handle import RowSource
from fleet.numeric.bits import changed, same_bytes
from fleet.numeric.scatter import LARGEST, Scattered
from fleet.plan.layout import DenseLayout, dense_layout
from fleet.plan.plan import make_plan
from fleet.plan.specs import ParamSpec, TableSpec
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Connections
from fleet.ps.worker.describe import Description
from fleet.ps.worker.progress import Progress, ReadAt

#: From so many small blocks on they are written by compiled code: to load it takes what it gains in a thousand steps.
MANY = 256

#: A server's blocks end to end, by element type.
Flat = Mapping[str, torch.Tensor]

#: Which elements of a flat parameter, and the values of all of them.
Elements = tuple[torch.Tensor, torch.Tensor]


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
        spec, params = description.spec, description.params
        written = () if spec.settings.has_dense_on_workers else params
        self.writer = ParameterWriter(written, self.layouts, [each.name for each in spec.params[: len(written)]])

    def move(self, server_num: int) -> None:
        """Go on with another number of servers."""
        self._server_num = server_num
        self.adopt(replace(self.description, spec=self.description.spec.on_servers(server_num)))

    def attach(self, source: RowSource, first_table: int = 0) -> None:
        """Let tables, from the given one on, get their rows from ``source``."""
        for handle in self.description.handles[first_table:]:
            handle.attach(source)

    def outdate_whole_tables(self) -> None:
        """Note that what was fetched of whole tables holds no longer, whatever interrupts the step that comes."""
        for handle in self.description.handles:
            handle.outdate_values()

    def forget_whole_tables(self) -> None:
        """Forget what was fetched of whole tables: the servers have other values now."""
        for handle in self.description.handles:
            handle.forget_values()

    @property
    def most_values_bytes(self) -> int:
        """Return the most bytes that the dense values of a server have."""
        return max(
            sum(numel * int(getattr(torch, dtype).itemsize) for dtype, numel in layout.sizes.items())
            for layout in self.layouts
        )

    def parts(self) -> tuple[dict[int, ParamSpec], dict[int, TableSpec]]:
        """Return the job's dense parameters, by their identities, and its tables, by those of their handles."""
        described = self.description
        return (
            {id(param): spec for param, spec in zip(described.params, described.spec.params, strict=True)},
            {id(handle): spec for handle, spec in zip(described.handles, described.spec.tables, strict=True)},
        )


@torch.no_grad()
def put_back(param: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> None:
    """Give some elements of a parameter these values, both flat."""
    there, kept = (each.view(param.shape).to(param.device) for each in (mask, values))
    param.copy_(torch.where(there, kept, param))


def laid_out(
    params: Sequence[torch.Tensor], former: Sequence[DenseLayout], flats: Sequence[Flat], layouts: Sequence[DenseLayout]
) -> list[Flat]:
    """Return what there is of all parameters of some element types, which ``former`` servers had as ``flats``, as
    others have it."""
    dtypes = {dtype for flat in flats for dtype in flat}
    wholes = [torch.empty(param.numel(), dtype=param.dtype, device="cpu") for param in params]
    for layout, flat in zip(former, flats, strict=True):
        for slot in (each for each in layout.slots if each.dtype in dtypes):
            wholes[slot.block.param][slot.part or slice(None)] = flat[slot.dtype][slot.start : slot.stop]
    found: list[Flat] = []
    for layout in layouts:
        sizes = {dtype: size for dtype, size in layout.sizes.items() if dtype in dtypes}
        flat = {dtype: torch.empty(size, dtype=getattr(torch, dtype), device="cpu") for dtype, size in sizes.items()}
        for slot in (each for each in layout.slots if each.dtype in dtypes):
            flat[slot.dtype][slot.start : slot.stop] = wholes[slot.block.param][slot.part or slice(None)]
        found.append(flat)
    return found


class DenseValues:
    """Fetches the servers' dense values and writes them into the user's parameters."""

    def __init__(self, connections: Connections, progress: Progress, trained: TrainedModel, *, remembers: bool) -> None:
        """``remembers``: what is written is kept, to be compared with."""
        self._connections = connections
        self._progress = progress
        self._trained = trained
        self._remembers = remembers
        #: server -> how many updates its values had had that came last
        self.read_at: Mapping[int, ReadAt] = {}
        #: elements that stay as they are in the parameters, whatever the servers have: by parameter, which and what
        self.kept: dict[int, Elements] = {}
        self._written: list[Flat] | None = None

    def fetch(self, what: str, at_once: int | None = None, *, more_steps: int = 0) -> list[Frame]:
        """Ask for the values after what this worker has pushed, or so many ``more_steps``."""
        pull = pb.Pull(version=max(0, self._progress.version_needed(more_steps)), dense=True)
        return self._connections.ask(what, at_once, pull=pull)

    def fetch_behind(self, at_once: int) -> list[Frame]:
        """Fetch from a thread beside the user's, from so many servers at once."""
        return self.fetch(f"parameters after step {self._progress.completed}", at_once)

    def move(self, former: Sequence[DenseLayout]) -> None:
        """Go on with other servers, which have what the ``former`` ones had."""
        layouts = self._trained.layouts
        self.read_at = dict.fromkeys(range(len(layouts)), max(self.read_at.values()))
        if self._written is not None:
            params = self._trained.description.params
            self._written = laid_out(params, former, self._written, layouts)

    def read(self, replies: Sequence[Frame]) -> list[Flat]:
        """Return the values of every server's blocks, as it sent them."""
        self._progress.notice(replies)
        self.read_at = {
            server: ReadAt(reply.message.clock, reply.message.version) for server, reply in enumerate(replies)
        }
        return [
            # In GEO rows follow the dense values.
            dict(zip(layout.dtypes, (tensor.torch() for tensor in reply.tensors), strict=False))
            for layout, reply in zip(self._trained.layouts, replies, strict=True)
        ]

    def write(self, replies: Sequence[Frame]) -> list[Flat]:
        """Write the servers' values into the user's parameters, in place."""
        with uninterrupted():  # half of them would look like values that the script has set
            values = self.read(replies)
            self._trained.writer.write(values)
            self._written = values if self._remembers else None
            for index, (mask, kept) in self.kept.items():
                put_back(self._trained.description.params[index], mask, kept)
        return values

    def find_changed(self) -> dict[int, Elements]:
        """Find what is not in the parameters any more as it was written there last: by parameter, which elements are
        others, and the values of all."""
        written, trained = self._written, self._trained
        if written is None:
            return {}
        trained.description.check_types()
        found = {}
        for index in trained.writer.differing(written):
            now = trained.description.params[index].detach().reshape(-1).to("cpu", copy=True)
            before = torch.empty_like(now)
            for layout, flat in zip(trained.layouts, written, strict=True):
                for slot in layout.slots:
                    if slot.block.param == index:
                        before[slot.part or slice(None)] = flat[slot.dtype][slot.start : slot.stop]
            mask = changed(now, before)
            if mask.any():  # else its memory alone has become another
                found[index] = mask, now
        return found


class ParameterWriter:
    """Writes the values of all blocks of every server into the parameters, in place, and says where they are not there
    any more.

    The places to write to are looked up once, and again when a parameter's memory has become another.
    """

    def __init__(self, params: Sequence[torch.Tensor], layouts: Sequence[DenseLayout], names: Sequence[str]) -> None:
        self._params = params
        self._names = names
        self._shapes = [param.shape for param in params]
        self._layouts = layouts
        self._memory: tuple[list[int], list[object]] | None = None
        self._stands_still = False
        #: for each server and element type, where its blocks go
        self._places: list[dict[str, _Places]] = []
        #: parameters whose memory does not lie as blocks do, or not here, with what is written into them as a whole
        self._detours: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Surround what follows a comparison at once: the script does not run meanwhile, and no memory moves."""
        self._stands_still = True
        try:
            yield
        finally:
            self._stands_still = False

    @torch.no_grad()
    def write(self, flats: Sequence[Flat]) -> None:
        self._follow()
        for places, flat in zip(self._places, flats, strict=True):
            for dtype, each in places.items():
                each.write(flat[dtype])
        for _, param, detour in self._detours:
            param.copy_(detour)

    @torch.no_grad()
    def differing(self, flats: Sequence[Flat]) -> list[int]:
        """Return the parameters that do not hold, to the bit, these values, which were written last."""
        detours = {} if self._memory is None else {index: detour for index, _, detour in self._detours}
        self._follow()
        found = {
            param
            for places, flat in zip(self._places, flats, strict=True)
            for dtype, each in places.items()
            for param in each.differing(flat[dtype])
        }
        compared: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for index, param, _ in self._detours:
            found.discard(index)
            known = detours.get(index)  # the new one holds nothing if the parameter's memory has become another
            if known is None or known.device != param.device:
                found.add(index)
            else:
                compared.setdefault(param.device, []).append((index, changed(param.contiguous(), known).any()))
        for each in compared.values():  # one at a time would wait for a device as often
            differ = torch.stack([any_ for _, any_ in each]).tolist()
            found.update(index for (index, _), differs in zip(each, differ, strict=True) if differs)
        return sorted(found)

    def _follow(self) -> None:
        """Look places up if the parameters' memory is not where it was."""
        if self._stands_still and self._memory is not None:
            return
        memory_now: tuple[list[int], list[object]] = (
            [param.data_ptr() for param in self._params],
            [param.is_contiguous() or param.stride() for param in self._params],
        )
        if memory_now != self._memory:
            self.check_shapes()
            self._memory = memory_now
            self._look_up()

    def check_shapes(self) -> None:
        """Refuse parameters that were given another shape since this was made."""
        for name, known, param in zip(self._names, self._shapes, self._params, strict=True):
            if param.shape != known:
                raise UnsupportedError(
                    f"{name!r} was given another shape in a running job",
                    expected=tuple(known),
                    got=tuple(param.shape),
                    todo="Change its values in place; a model of other shapes is another job.",
                )

    def _look_up(self) -> None:
        # What is detached shares the version counter: a stale graph is an error, as in torch.
        detached = [param.detach() for param in self._params]
        # Blocks are ranges of the parameter read row by row; memory laid out otherwise needs a detour. So does memory
        # of a device, where it can be compared with the detour.
        dense = [
            data
            if data.is_cpu and data.is_contiguous()
            else torch.empty_like(data, memory_format=torch.contiguous_format)
            for data in detached
        ]
        self._detours = [
            (index, data, detour)
            for index, (data, detour) in enumerate(zip(detached, dense, strict=True))
            if data is not detour
        ]
        flat = [data.view(-1) for data in dense]
        self._places = [
            {
                dtype: _Places([(param, flat[param][part or ...]) for _, param, part in cuts])
                for dtype, cuts in layout.cuts.items()
            }
            for layout in self._layouts
        ]


class _Places:
    """Says where the blocks of a flat tensor go, one after the other; each with the parameter that it is a part of."""

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        targets = [target for _, target in parts]
        stops = list(accumulate(target.numel() for target in targets))
        placed = list(zip([0, *stops], stops, parts, strict=False))
        small = [each for each in placed if _is_small(each[2][1])]
        if len(small) < MANY:
            small, large = [], placed
        else:
            large = [each for each in placed if not _is_small(each[2][1])]
        self._form = targets[0].dtype, (stops[-1],)
        self._small = Scattered([(start * target.itemsize, target) for start, _, (_, target) in small])
        self._small_params = [param for _, _, (param, _) in small]
        self._large = [target for _, _, (_, target) in large]
        self._ranges = [slice(start, stop) for start, stop, _ in large]
        self._sizes = [target.numel() for target in targets]
        self._addresses = [
            (param, target.data_ptr(), start * target.itemsize, target.nbytes)
            for start, _, (param, target) in large
            if target.is_cpu
        ]

    def write(self, flat: torch.Tensor) -> None:
        self._check(flat)
        self._small.fill(flat)
        if len(self._large) == len(self._sizes):
            torch._foreach_copy_(self._large, torch.split_with_sizes(flat, self._sizes))
        elif self._large:
            torch._foreach_copy_(self._large, [flat[each] for each in self._ranges])

    def differing(self, flat: torch.Tensor) -> set[int]:
        """Return the parameters that do not hold, to the bit, what stands in ``flat``."""
        self._check(flat)
        base = flat.data_ptr()
        found = {
            param for param, address, start, nbytes in self._addresses if not same_bytes(address, base + start, nbytes)
        }
        return found.union(self._small_params[place] for place in self._small.differing(flat))

    def _check(self, flat: torch.Tensor) -> None:
        if (flat.dtype, flat.shape) != self._form:  # compiled code would read on behind its end
            got = flat.dtype, tuple(flat.shape)
            raise ProtocolError("a server's dense values do not fit", expected=self._form, got=got)


def _is_small(target: torch.Tensor) -> bool:
    return target.is_cpu and target.nbytes <= LARGEST
