"""Makes a push of the gradients of a step, or of several: frames for the servers, and their way there.

Gradients, or the changes of a GEO worker, are cut for the servers and travel in as many bits as the strategy gives
them. Where these are few, dense gradients are rounded to the nearest, and what rounding leaves of each block stays here
and joins its next gradient, so that nothing is lost in the long run (error feedback). A GEO worker needs no such thing:
whatever the servers were not told remains in the difference between its values and those agreed on.

Rows have no such memory; it would grow with the ids. bf16 and fp16 round each element by a small part of itself, which
leaves none behind. int8 would round the small elements of a row to nothing, always; so it rounds up or down by chance,
in proportion, and the mean over steps is right. Chance is a hash of id, column, worker and step: it is the same in
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from fleet.base.clock import Clock, wall_time
from fleet.base.interruption import uninterrupted
from fleet.errors import DeadlineError, FleetError, ServersMovedError
from fleet.numeric import buffers
from fleet.numeric.ids import noise, packed_ids, partition
from fleet.numeric.jit import Array
from fleet.numeric.tensors import EndToEnd, WireTensor
from fleet.plan.layout import DenseLayout
from fleet.plan.plan import Plan
from fleet.plan.specs import TableSpec
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.low_precision import Narrow
from fleet.ps.wire.row_tensors import order_of, runs_of
from fleet.ps.worker.connection import Connection, Connections
from fleet.ps.worker.handshake import check_delivered
from fleet.ps.worker.object_states import OwnStates
from fleet.ps.worker.progress import Progress, ReadAt, moved
from fleet.ps.worker.row_cuts import RowCuts
from fleet.ps.worker.trained_model import Flat, TrainedModel, laid_out
from fleet.telemetry.worker_figures import WorkerFigures

#: Blocks that are smaller on the average leave in a copy.
COPIED = 32 << 10

Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
K = TypeVar("K")


@dataclass(frozen=True)
class Clocks:
    """Counts, by server, the updates that the dense values and each table had had when they were read there."""

    dense: Mapping[int, ReadAt] = field(default_factory=dict)
    rows: Mapping[tuple[int, int], ReadAt] = field(default_factory=dict)  #: (server, table)

    def token(self, used: Collection[tuple[int, int]]) -> int:
        """Return the oldest version of the values that were read, of rows on these servers, of these tables, and of the
        dense ones. What was read of others is older, and has no part in the gradients."""
        of_rows = (read.version for where, read in self.rows.items() if where in used)
        return min((*(read.version for read in self.dense.values()), *of_rows))

    def of_dense(self, server: int) -> ReadAt:
        """Return when the dense values of a server were read; of one that the job had not yet, as of the others."""
        return self.dense.get(server) or max(self.dense.values())

    def of_rows(self, server: int, table: int) -> ReadAt:
        """Return the same of the rows of a table; of one that was never looked up, whose gradient is a
        script's own, as of the dense values."""
        found = self.rows.get((server, table))
        if found is None:
            found = max((read for (_, index), read in self.rows.items() if index == table), default=None)
        return found or self.of_dense(server)

    def moved(self, servers: int) -> Clocks:
        """Return the same, as so many servers have it that have what others had."""
        return Clocks(dict.fromkeys(range(servers), max(self.dense.values())), moved(self.rows, servers))

    def or_earlier(self, other: Clocks) -> Clocks:
        """Return the earlier of both, for gradients that become one."""
        return Clocks(_earlier(self.dense, other.dense), _earlier(self.rows, other.rows))


def _earlier(one: Mapping[K, ReadAt], other: Mapping[K, ReadAt]) -> dict[K, ReadAt]:
    return {**other, **{key: min(value, other.get(key, value)) for key, value in one.items()}}


@dataclass(frozen=True)
class Gradients:
    """Holds what one step, or several, left behind: the flat gradient of every parameter, and ids with gradients of
    the tables used; and when the values were read that they were computed on."""

    dense: Sequence[torch.Tensor | None]
    rows: Mapping[int, Rows]
    read: Clocks
    options: Sequence[str]  #: of every group, as they were set for the last of the steps
    steps: int = 1
    ahead: int = 0  #: the attempt under which servers have further gradients of the step; 0 for none
    state: np.ndarray[Any, Any] | None = None  #: of the worker's own objects, to be kept with the last of the steps
    #: how much the look-ups of each id in ``rows`` count, for tables whose rules ask for it
    weights: Mapping[int, Array] = field(default_factory=dict)
    #: the flat gradient of every parameter, those included that have left ahead; None where none has
    whole: Sequence[torch.Tensor | None] | None = None

    @torch.no_grad()  # .grad may have a graph of its own
    def copied(self) -> Gradients:
        """Return the same gradients, independent of any .grad from now on."""
        rows = {index: kept(pair) for index, pair in self.rows.items()}
        whole = None if self.whole is None else _cloned(self.whole)
        return replace(self, dense=_cloned(self.dense), rows=rows, whole=whole)


def _cloned(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if grad is None else grad.clone() for grad in grads]


def kept(rows: Rows) -> Rows:
    """Return the same rows in memory of their own. What was read of a ``weight.grad`` lies in it until then, and a
    script may go on to change it."""
    ids, grads = (part if part.flags.owndata else part.copy() for part in rows)
    return ids, grads


@dataclass(frozen=True)
class Change:
    """Says how far a GEO worker has come: for every server all its blocks, and the touched rows of every table."""

    dense: Sequence[Flat]
    rows: Mapping[int, Rows]


@dataclass(frozen=True)
class Push:
    """Is sent to all servers as one step of the worker. It has the number of the user's steps in it, a frame for each
    server, and what to do with the answers. It is for the servers of a ``plan``; for others it is made anew from its
    ``origin``: of gradients, or by a function."""

    steps: int
    frames: Sequence[Frame]
    take: Callable[[Sequence[Frame]], object]
    plan: Plan
    origin: Gradients | Callable[[], Push]

    def copied(self) -> Push:
        """Return the same push, independent of the user's gradients from now on."""
        origin = self.origin.copied() if isinstance(self.origin, Gradients) else self.origin
        return replace(self, frames=[frame.kept() for frame in self.frames], origin=origin)


@dataclass(frozen=True)
class MadePush:
    """Is a push from a thread beside the user's: what it is made of, and the frames for the servers of a ``plan``."""

    gradients: Gradients
    brings_values: bool
    plan: Plan
    frames: Sequence[Frame]
    arrived: Callable[[], None]


def cut(layout: DenseLayout, tensors: Sequence[torch.Tensor | None]) -> tuple[bytes, dict[str, list[torch.Tensor]]]:
    """Cut out a server's blocks: return which are there, and the blocks, by element type in their order. ``tensors``
    has a flat tensor, or None, for each parameter."""
    present = bytes([tensors[param] is not None for param in layout.params])
    pieces = {
        dtype: [
            tensor if part is None else tensor[part]
            for _, param, part in cuts
            if (tensor := tensors[param]) is not None
        ]
        for dtype, cuts in layout.cuts.items()
    }
    return present, {dtype: blocks for dtype, blocks in pieces.items() if blocks}


def pack(layout: DenseLayout, tensors: Sequence[torch.Tensor]) -> Flat:
    """Join all blocks of a server."""
    return {dtype: joined(blocks, layout.sizes[dtype]) for dtype, blocks in cut(layout, tensors)[1].items()}


def without_zeros(layout: DenseLayout, flat: Flat) -> tuple[bytes, Flat]:
    """Return those of all blocks that have any element but zero."""
    present = bytearray(len(layout.slots))
    pieces: dict[str, list[torch.Tensor]] = {}
    for slot in layout.slots:
        piece = flat[slot.dtype][slot.start : slot.stop]
        if bool(piece.any()):
            present[slot.position] = 1
            pieces.setdefault(slot.dtype, []).append(piece)
    marks = bytes(present)
    if all(marks):
        return marks, flat
    return marks, {dtype: joined(pieces[dtype], size) for dtype, size in layout.sizes_of(marks).items()}


@torch.no_grad()
def joined(pieces: list[torch.Tensor], size: int) -> torch.Tensor:
    """Join flat tensors, ``size`` elements together, in memory of their own."""
    return torch.cat(pieces, out=buffers.take_flat(size, pieces[0].dtype))


def end_to_end(pieces: list[torch.Tensor], size: int) -> WireTensor:
    """Make one tensor that travels of several: large ones leave from where they are, small ones in a copy, which costs
    less than to send each."""
    if size * pieces[0].itemsize < len(pieces) * COPIED:
        return WireTensor.of(joined(pieces, size))
    return EndToEnd(pieces)


def rows_joined(tensors: Sequence[WireTensor]) -> WireTensor:
    """Make one tensor that travels of those of several tables: large ones leave from where they are."""
    if len(tensors) == 1:
        return tensors[0]
    if sum(tensor.nbytes for tensor in tensors) < len(tensors) * COPIED:
        return WireTensor(tensors[0].dtype, np.concatenate([tensor.array for tensor in tensors]))
    return EndToEnd(tensors)


def by_server(tensors: Sequence[WireTensor], servers: int) -> list[Sequence[WireTensor]]:
    """Split what travels of some rows by server; ids come first."""
    if servers == 1:
        return [tensors]
    parts = partition(tensors[0].array, servers)
    return [[WireTensor(tensor.dtype, tensor.array[part]) for tensor in tensors] for part in parts]


def tables_joined(
    here: Mapping[int, Sequence[WireTensor]], tables: Sequence[TableSpec], narrow: Narrow
) -> list[WireTensor]:
    """Return what travels of all tables that have rows for a server: the ids, the gradients, and weights if there are
    any."""
    if not here:
        return []
    specs, parts = [tables[index] for index in here], [*here.values()]
    tensors = [rows_joined([ids for ids, *_ in parts])]
    for run in runs_of(specs):
        for place in range(narrow.parts(specs[run.start].dtype)):
            tensors.append(rows_joined([each[1 + place] for each in parts[run]]))
    weights = [each[-1] for each, spec in zip(parts, specs, strict=True) if spec.goes_by_weight]
    return [*tensors, rows_joined(weights)] if weights else tensors


#: For one server: which blocks are there, and the tensors that travel for them.
Sent = tuple[bytes, Sequence[WireTensor]]


class ErrorFeedback:
    """Encodes dense gradients in few bits, and adds what rounding left of each block to its next gradient."""

    def __init__(self, narrow: Narrow, layouts: Sequence[DenseLayout]) -> None:
        self._narrow = narrow
        self._layouts = layouts
        self._left: Sequence[Flat] = [
            {
                dtype: torch.zeros(size, dtype=getattr(torch, dtype), device="cpu")
                for dtype, size in layout.sizes.items()
                if narrow.of(dtype) is not None
            }
            for layout in layouts
        ]

    def grown(self, layouts: Sequence[DenseLayout]) -> ErrorFeedback:
        """Return the same for layouts that continue these."""
        fresh = ErrorFeedback(self._narrow, layouts)
        for left, before in zip(fresh._left, self._left, strict=True):
            for dtype, tensor in before.items():
                left[dtype][: len(tensor)] = tensor
        return fresh

    def moved(
        self, params: Sequence[torch.Tensor], former: Sequence[DenseLayout], layouts: Sequence[DenseLayout]
    ) -> ErrorFeedback:
        """Return the same for other servers, which have these parameters in other blocks than the ``former`` ones."""
        moved = ErrorFeedback(self._narrow, layouts)
        moved._left = laid_out(params, former, self._left, layouts)
        return moved

    def encode(
        self, blocks: Sequence[tuple[bytes, Mapping[str, list[torch.Tensor]]]]
    ) -> tuple[list[Sent], Callable[[], None]]:
        """Return the gradients of every server's ``blocks`` as they travel, with what rounding left of earlier ones,
        and a function to call when they have arrived. Gradients that travel as they are may leave from where they are.
        """
        sent: list[Sent] = []
        left: list[Flat] = []
        for layout, before, (present, by_dtype) in zip(self._layouts, self._left, blocks, strict=True):
            sizes = layout.sizes_of(present)
            flat = {dtype: joined(by_dtype[dtype], sizes[dtype]) for dtype in before if dtype in by_dtype}
            for piece, place in places(layout, present, flat, before):
                piece.add_(place)
            tensors: list[WireTensor] = []
            for dtype, pieces in by_dtype.items():
                if dtype in flat:
                    tensors += self._narrow.encode(flat[dtype], keep=True)
                else:
                    tensors.append(end_to_end(pieces, sizes[dtype]))
            sent.append((present, tensors))
            if all(present):
                left.append(flat)
            else:
                after = {dtype: tensor.clone() for dtype, tensor in before.items()}
                for piece, place in places(layout, present, flat, after):
                    place.copy_(piece)
                left.append(after)

        def arrived() -> None:
            self._left = left

        return sent, arrived


def encoded(narrow: Narrow, flat: Flat) -> list[WireTensor]:
    return [part for tensor in flat.values() for part in narrow.encode(tensor)]


def places(layout: DenseLayout, present: bytes, flat: Flat, whole: Flat) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the blocks that are present, as they lie in ``flat``, with their places in ``whole``, which has all
    blocks of some element types."""
    if all(present):
        yield from ((flat[dtype], tensor) for dtype, tensor in whole.items())
        return
    for dtype, here, place in layout.places(present):
        if dtype in whole:
            yield flat[dtype][here], whole[dtype][place]


def as_read(
    narrow: Narrow,
    layouts: Sequence[DenseLayout],
    change: Change,
    dense: Sequence[Sent],
    rows: Mapping[int, Sequence[WireTensor]],
) -> Change:
    """Return a GEO worker's change as the servers will read it."""
    if narrow.is_plain:
        return change
    wholes = []
    for layout, (present, tensors), mine in zip(layouts, dense, change.dense, strict=True):
        whole = {dtype: torch.zeros_like(tensor) for dtype, tensor in mine.items()}
        read = narrow.decode_flats(tensors, layout.sizes_of(present))
        for piece, place in places(layout, present, read, whole):
            place.copy_(piece)
        wholes.append(whole)
    return Change(
        wholes,
        {
            index: (ids, narrow.decode(rows[index][1:], grads.dtype.name, grads.shape).numpy())
            for index, (ids, grads) in change.rows.items()
        },
    )


class Pusher:
    """Makes the frames of a push, one for each server, and brings them there, whatever happens in between."""

    def __init__(
        self,
        connections: Connections,
        trained: TrainedModel,
        progress: Progress,
        own_states: OwnStates,
        figures: WorkerFigures,
        worker: int,
        wire_dtype: str | None,
        cuts: RowCuts,
        reload: Callable[[], None],
        clock: Clock,
        before_push: Callable[[], None],
        *,
        places: bool,
    ) -> None:
        """``cuts`` agrees on the rows that leave after a push; ``reload`` is called when a server says that its values
        have been replaced, and ``before_push`` before a push that the user's thread waits for. ``places``: the first
        server says what a push becomes part of, and the others are told."""
        self._connections = connections
        self._trained = trained
        self._progress = progress
        self._own_states = own_states
        self._figures = figures
        self._worker = worker
        self._cuts = cuts
        self._reload = reload
        self._before_push = before_push
        self._places = places
        #: whether the others have no values to send before they are told, as workers wait for each other
        self._is_in_rounds = False
        self._clock = clock
        #: when the last step was over; None before the first, which takes long for other reasons
        self._answered_at: float | None = None
        #: tells the time of day, which travels where rows leave by it
        self._now = wall_time
        self._narrow = Narrow(wire_dtype)
        self._in_doubt: Push | None = None
        self.drop_residues()

    @property
    def is_plain(self) -> bool:
        """Say whether gradients travel as they are."""
        return self._narrow.is_plain

    def drop_residues(self) -> None:
        """Forget what rounding has left so far: it belongs to nothing that follows."""
        self._feedback = ErrorFeedback(self._narrow, self._trained.layouts)

    def move(self, former: Sequence[DenseLayout]) -> None:
        """Go on with other servers, which have other blocks than the ``former`` ones."""
        trained = self._trained
        self._answered_at = None  # what this took is no part of a step
        self._feedback = self._feedback.moved(trained.description.params, former, trained.layouts)

    def grow(self) -> None:
        """Make room for further parameters, which have joined the job."""
        self._feedback = self._feedback.grown(self._trained.layouts)

    # ---------------------------------------------------------------- delivery

    def hold(self, begin: Callable[[], Push | None]) -> Push | None:
        """Return the push that ``begin`` makes, if any, which is not interrupted. From then on it is in doubt."""
        try:
            with uninterrupted():
                self._in_doubt = begin()
                return self._in_doubt
        except BaseException:
            if self._in_doubt is not None:  # heard of behind it
                self._in_doubt = self._in_doubt.copied()
            raise

    def deliver(self, push: Push) -> None:
        """Bring one push to its end. If it is interrupted (Ctrl-C in a notebook) it stays in doubt: some servers may
        have it."""
        self._in_doubt = push
        progress, frames = self._progress, push.frames
        step = progress.completed + 1
        try:
            self._before_push()
            with self._figures.push:
                replies = self._connections.ask_all(lambda server, _: frames[server], f"push of step {step}")
                if self._places and len(replies) > 1 and _lacks_place(frames, replies):
                    replies = self._placed(step, replies[0])
                replies = self._clipped(step, replies)
            check_delivered(self._connections, step, replies)
        except BaseException as error:
            self._in_doubt = push.copied() if _is_unanswered(error) else None
            raise
        with uninterrupted():  # or half of the values would be new, or half of an exchange be made once more
            self._finish(push, step, replies)
        self._cuts.tell_due()
        self.reload_if_replaced()

    def _placed(self, step: int, first: Frame) -> list[Frame]:
        """Tell all servers but the first what that one has answered to a push; return the answers of all."""
        self._is_in_rounds = bool(first.message.buffers) and first.message.buffers[-1].together
        place = pb.Place(buffers=first.message.buffers, gone=first.message.gone)
        others = self._connections.ask_all(
            lambda _, connection: Frame(connection.request(step, place=place)), f"place of step {step}", first=1
        )
        return [first, *others]

    def agree_on_norms(self) -> None:
        """Find the norms with the servers for which updates wait, where a worker that is silent, or gone, has not."""
        replies = self._clipped(self._progress.completed, self._connections.ask("norms", clip=pb.Clip()))
        self._cuts.notice([reply.message for reply in replies])

    def part(self) -> None:
        """Say that no push comes any more: what waits for others may be due then. The first server says whether it is,
        as always, and hears of it alone."""
        step, first = self._progress.completed, self._connections.by_server[0]
        reply = first.call(Frame(first.request(step, clip=pb.Clip(parting=True))), "the last push")
        self._clipped(step, self._placed(step, reply))

    def _clipped(self, step: int, replies: list[Frame]) -> list[Frame]:
        """Agree with the servers on the norms by which they clip, as far as all know theirs; return the replies that
        have the values."""
        known_before: Set[int] | None = None
        while True:
            known = [{norm.version: norm for norm in reply.message.norms} for reply in replies]
            awaited = sorted({version for here in known for version, norm in here.items() if not norm.told})
            if not awaited:
                return replies
            totals = {version: norm_of_all([here.get(version) for here in known]) for version in awaited}
            found = {version: total for version, total in totals.items() if total is not None}
            if known_before is not None and found.keys() <= known_before:  # who lets the last know its own finds it
                return replies
            known_before = found.keys()
            clip = pb.Clip(versions=list(found), totals=list(found.values()), awaited=awaited)
            replies = self._connections.ask(f"norm of step {step}", clip=clip, step=step)

    def reload_if_replaced(self) -> None:
        """Take over the servers' values, if they say that others have replaced them."""
        if self._progress.replaced:
            self._reload()

    @property
    def is_in_doubt(self) -> bool:
        """Say whether a push was interrupted: some servers may have it."""
        return self._in_doubt is not None

    def finish_interrupted(self) -> None:
        """Send the frames of a push in doubt again, which no server applies twice."""
        if self._in_doubt is not None:
            self.deliver(self._cut_anew(self._in_doubt))

    def _cut_anew(self, push: Push) -> Push:
        """Return a push for the servers that there are now. Gradients that had left ahead are in it."""
        if push.plan is self._trained.plan:
            return push
        gradients = push.origin
        if not isinstance(gradients, Gradients):
            return gradients()
        read = gradients.read.moved(len(self._connections.by_server))
        dense = gradients.dense if gradients.whole is None else gradients.whole
        whole = replace(gradients, dense=dense, whole=None, ahead=0, read=read)
        frames, arrived = self.encode(whole)
        frames[0].message.push.keeping.CopyFrom(push.frames[0].message.push.keeping)

        def take(replies: Sequence[Frame]) -> None:
            push.take(replies)
            arrived()

        return replace(push, frames=frames, take=take, plan=self._trained.plan, origin=whole)

    def _finish(self, push: Push, step: int, replies: Sequence[Frame]) -> None:
        progress = self._progress
        progress.completed, progress.steps, self._in_doubt = step, progress.steps + push.steps, None
        self._answered_at = self._clock.now()
        self._cuts.notice([reply.message for reply in replies])
        push.take(replies)

    def prepare(self, gradients: Gradients, brings_values: bool, ahead: int = 0) -> MadePush:
        """Make a push that is to be delivered from a thread beside the user's, after so many others. Only one that
        ``is_plain`` can be made ahead."""
        step, plan = self._progress.completed + 1 + ahead, self._trained.plan
        frames, arrived = self.encode(gradients, brings_values=brings_values, step=step)
        return MadePush(gradients, brings_values, plan, frames, arrived)

    def deliver_behind(
        self, push: MadePush, *, at_once: int, meanwhile: Callable[[], object] | None = None
    ) -> list[Frame]:
        """Push from a thread beside the user's, which does something else ``meanwhile``; the caller takes the values,
        if the answer brings any."""
        progress = self._progress
        step = progress.completed + 1
        if push.plan is not self._trained.plan:  # it was made before the job moved
            push = self.prepare(push.gradients, push.brings_values)
        what = f"push of step {step}"
        replies = self._connections.ask_all(lambda server, _: push.frames[server], what, at_once, meanwhile=meanwhile)
        check_delivered(self._connections, step, replies)
        push.arrived()
        progress.notice(replies)  # long before values are fetched again, perhaps
        progress.completed, progress.steps = step, progress.steps + push.gradients.steps
        with suppress(ServersMovedError):  # the push is over, and not made once more: others say what is due there
            self._cuts.tell_due_behind([reply.message for reply in replies])
        return replies

    def send_early(self, attempt: int, param: int, grad: torch.Tensor) -> bool:
        """Send the gradient of one parameter ahead of its push; return whether the servers took it."""
        step = self._progress.completed + 1
        asked = []
        for connection, layout in zip(self._connections.by_server, self._trained.layouts, strict=True):
            cuts = [cut for each in layout.cuts.values() for cut in each if cut[1] == param]
            ahead = pb.Part(attempt=attempt, blocks=[position for position, *_ in cuts])
            tensors = [WireTensor.of(grad if part is None else grad[part]) for *_, part in cuts]
            if cuts:
                frame = Frame(connection.request(step, part=ahead), tensors)
                asked.append(connection.start(frame, f"a part of step {step}"))
        for pending in asked:
            pending.send()
        try:
            replies = [pending.result() for pending in asked]
        except ServersMovedError:
            return False  # the push will meet it again
        return all(reply.message.granted for reply in replies)

    # ---------------------------------------------------------------- frames

    def encode(
        self, gradients: Gradients, *, brings_values: bool = True, step: int | None = None
    ) -> tuple[list[Frame], Callable[[], None]]:
        """Return the frames of a step, the next one unless it is given, and what to call when they have arrived. Their
        answer ``brings_values``, or does not."""
        layouts, step = self._trained.layouts, step or self._progress.completed + 1
        dense, arrived = self._feedback.encode([cut(layout, gradients.dense) for layout in layouts])
        rows = self._encoded_rows(gradients.rows, self._narrow, step)
        return self._frames(gradients, dense, rows, self._narrow, step, brings_values=brings_values), arrived

    def encode_change(
        self, change: Change, clocks: Clocks, steps: int, state: Array | None, *, plain: bool = False
    ) -> tuple[list[Frame], Change]:
        """Return the frames, and the change as servers will read it: ``plain`` as it is, whatever others travel in."""
        layouts, narrow = self._trained.layouts, Narrow(None) if plain else self._narrow
        packed = [without_zeros(layout, flat) for layout, flat in zip(layouts, change.dense, strict=True)]
        dense = [(present, encoded(narrow, flat)) for present, flat in packed]
        step = self._progress.completed + 1
        rows = self._encoded_rows(change.rows, narrow, step)
        as_sent = as_read(narrow, layouts, change, dense, rows)
        what = Gradients((), change.rows, clocks, self._trained.description.options(), steps, state=state)
        return self._frames(what, dense, rows, narrow, step), as_sent

    def _frames(
        self,
        gradients: Gradients,
        dense: Sequence[Sent],
        rows: Mapping[int, Sequence[WireTensor]],
        narrow: Narrow,
        step: int,
        *,
        brings_values: bool = True,
    ) -> list[Frame]:
        """Make frames of every server's blocks and of every table's rows, as they travel."""
        specs = self._trained.plan.spec.tables
        by_table = {
            index: by_server([*rows[index], *_weighed(gradients.weights.get(index))], len(self._connections.by_server))
            for index in sorted(rows, key=lambda index: order_of(specs[index]))
        }
        own_s = -1.0 if self._answered_at is None else self._clock.now() - self._answered_at
        goes_by_time = self._places or any(table.goes_by_time for table in specs)
        now = self._now() if goes_by_time else 0.0

        used = {(server, index) for index, parts in by_table.items() for server in _servers_of(parts)}
        token = gradients.read.token(used) if self._places else 0

        def push(server: int, connection: Connection) -> Frame:
            here = {index: parts[server] for index, parts in by_table.items() if (server, index) in used}
            present, tensors = dense[server]
            message = pb.Push(
                options=gradients.options,
                present=present,
                row_tables=list(here),
                used_tables=sorted(rows),
                quiet=not brings_values or (self._is_in_rounds and server > 0),
                steps=gradients.steps,
                read_at=gradients.read.of_dense(server).clock,
                attempt=gradients.ahead,
                rows_read_at=[gradients.read.of_rows(server, index).clock for index in here],
                row_counts=[len(ids.array) for ids, *_ in here.values()],
                now=now,
                token=token,
                unplaced=self._places and server > 0,
                own_seconds=own_s,
                plain=narrow is not self._narrow,
            )
            own = self._own_states.attach_to(message, gradients.state) if server == 0 else []
            return Frame(connection.request(step, push=message), [*tensors, *tables_joined(here, specs, narrow), *own])

        return [push(server, connection) for server, connection in enumerate(self._connections.by_server)]

    def _encoded_rows(self, rows: Mapping[int, Rows], narrow: Narrow, step: int) -> dict[int, list[WireTensor]]:
        """Return of every table the ids, and what travels of their gradients."""
        worker = self._worker
        sent = {}
        for index, (ids, grads) in rows.items():
            chance = None
            if narrow.is_whole:
                chance = torch.from_numpy(noise(packed_ids(ids), grads.shape[1], worker, step))
            if narrow.is_plain:
                sent[index] = [WireTensor.of(ids), WireTensor.of(grads)]
            else:
                sent[index] = [WireTensor.of(ids), *narrow.encode(torch.from_numpy(grads), chance)]
        return sent


def _servers_of(parts: Sequence[Sequence[WireTensor]]) -> list[int]:
    """Return the servers that have any of some rows."""
    return [server for server, (ids, *_) in enumerate(parts) if len(ids.array)]


def norm_of_all(parts: Sequence[pb.Norm | None]) -> float | None:
    """Return the squared norm of a gradient of which each server holds a part, or None if one does not know its own."""
    for part in parts:
        if part is not None and part.told:
            return part.total
    known = [part.squares for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _weighed(weights: Array | None) -> list[WireTensor]:
    return [] if weights is None else [WireTensor.of(weights)]


def _lacks_place(frames: Sequence[Frame], replies: Sequence[Frame]) -> bool:
    """Say whether some server has not made an update that the first one has, or has not sent its values."""
    first, *others = [reply.message for reply in replies]
    closed = max((buffer.version for buffer in first.buffers if buffer.divisor), default=-1)
    return frames[-1].message.push.quiet or any(reply.version <= closed for reply in others)


def _is_unanswered(error: BaseException) -> bool:
    """Say whether an error leaves open what has become of a push: no answer came, or it was interrupted."""
    return isinstance(error, DeadlineError | ServersMovedError) or not isinstance(error, FleetError)
