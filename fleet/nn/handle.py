"""Connects an embedding module to the servers: ids go out, and rows come in.

A handle hangs on the module's ``weight`` (``handle_of``) and stands for the table on the servers. Gradients of rows are
autograd's, in ``weight.grad`` (see gradient.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Protocol

import torch

from fleet.base import checks
from fleet.errors import (
    ArgumentTypeError,
    ConfigurationError,
    IdOutOfRangeError,
    NotInitializedError,
    UnsupportedError,
)
from fleet.nn.gradient import by_rows
from fleet.nn.lookup_weights import LookupWeights, WeighedLookup
from fleet.nn.table_weight import TableWeight, hollow
from fleet.nn.trainables import check_type
from fleet.nn.whole_values import WholeValues
from fleet.numeric.jit import Array, Ids
from fleet.numeric.merge import merge
from fleet.numeric.modes import outside_inference, outside_transforms
from fleet.plan.life import Admission, Eviction, goes_by_weight
from fleet.plan.specs import Initializer

_log = logging.getLogger("fleet.worker")

_ATTRIBUTE = "_fleet_handle"

_INSTEAD = (
    "Look rows up by their ids; for all of them use fleet.state_dict(model), fleet.save_persistables(dirname) or "
    "fleet.save_inference_model(dirname, model), or raise FLEET_WHOLE_TABLE_MB."
)

#: What a table is called until a job gives it its name.
_UNNAMED = "an embedding"


class Lookup(NamedTuple):
    """Holds the distinct ids of one forward, their rows, which others may look at too, and for every id asked for its
    place among them. Rows and places may be on a device."""

    ids: torch.Tensor
    rows: torch.Tensor
    inverse: torch.Tensor
    #: what was foreseen beside it, if it was
    foreseen: Foreseen | None = None
    #: the ids on the device of the rows, where these were brought there
    ids_there: torch.Tensor | None = None


class Wanted(NamedTuple):
    """Describes a forward that asks for rows of one table: a row for each id, if it ``expands``, or a sum for each
    bag; and how much each of its look-ups counts, if that is said."""

    handle: TableHandle
    ids: torch.Tensor
    training: bool
    padding_idx: int | None
    expands: bool
    weights: torch.Tensor | None = None


class Foreseen(Protocol):
    """Expands together what several look-ups will ask for."""

    def take(self, wanted: Wanted) -> torch.Tensor | None:
        """Return the rows for a look-up's ids, once; None if it was not foreseen like this."""
        ...


class RowSource(Protocol):
    """Offers what embeddings need of a running job."""

    @property
    def most_whole_bytes(self) -> int:
        """Return how large a table may be for a worker to hold all of it."""
        ...

    def lookup(self, wanted: Sequence[Wanted]) -> list[Lookup]: ...

    def whole(self, handle: TableHandle) -> torch.Tensor:
        """Return all rows of a table as a look-up of training sees them."""
        ...

    def averaged(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        """Return the mean over all workers of gradients of rows, where workers have to agree on it."""
        ...


class Found(NamedTuple):
    """Holds what an embedding goes on with: rows of distinct ids, the place of every id among them in the shape of the
    ids, the padding row's place, and the weight to which gradients of the rows go; None if there will be none. A
    backward notes what was ``weighed``."""

    rows: torch.Tensor
    inverse: torch.Tensor
    padding: int | None
    ids: torch.Tensor
    weight: torch.Tensor | None
    weighed: WeighedLookup | None = None
    #: the ids on the device of the rows, if they are known there
    ids_there: torch.Tensor | None = None


class GradientRows(NamedTuple):
    """Holds what stands in a table's ``weight.grad``: ids and a row for each, on any device. They are distinct if they
    are there ``once``."""

    ids: torch.Tensor
    rows: torch.Tensor
    once: bool

    def merged(self) -> tuple[Ids, Array]:
        """Return distinct ids and the gradients of their rows, from what is on the CPU."""
        ids, rows = self.ids, self.rows
        if not ids.numel():
            # What numpy has seen torch cannot resize, as it does when rows are added to a gradient of none.
            ids, rows = torch.empty_like(ids), torch.empty_like(rows)
        pair = ids.numpy(), rows.numpy()
        return pair if self.once else merge([pair], 1)


def kind_of(value: object) -> object:
    """Return what to call a value that should be another tensor: by its element type, or by its type if it is none."""
    return value.dtype if isinstance(value, torch.Tensor) else type(value).__name__


class TableHandle:
    def __init__(
        self,
        weight: torch.nn.Parameter,
        num_embeddings: int | None,
        dim: int,
        initializer: Initializer,
        *,
        padding_idx: int | None = None,
        zero_padding: bool = True,
        uploaded: bool = False,
        admit: Admission | None = None,
        evict: tuple[Eviction, ...] = (),
    ) -> None:
        """``zero_padding`` says that the padding row reads as zeros, ``uploaded`` that the rows start from ``weight``'s
        values; ``admit`` and ``evict`` say which ids have a row."""
        self.weight = weight
        self.num_embeddings = num_embeddings
        self.dim = dim
        self.initializer = initializer
        self.padding_idx = padding_idx
        self.zero_padding = zero_padding
        self.uploaded = uploaded
        self.admit = admit
        self.evict = evict
        #: where rows come or leave by the weights of look-ups
        self._weights = LookupWeights() if goes_by_weight(admit, evict) else None
        self.source: RowSource | None = None
        self.name = _UNNAMED
        self._whole: WholeValues | None = None
        #: the servers have, or will have, other values: an interrupted step may have been applied
        self._is_outdated = False
        self._has_told = False
        #: the distinct ids of the last gradient that a backward made: as they stand in it, and on the CPU
        self._given = (
            torch.empty(1, 0, dtype=torch.int64, device="cpu"),
            torch.empty(0, dtype=torch.int64, device="cpu"),
        )
        setattr(weight, _ATTRIBUTE, self)
        if not uploaded:
            self.release()

    def attach(self, source: RowSource) -> None:
        """Have the rows from ``source`` from now on; no worker keeps a whole table."""
        self.source = source
        self._whole = None
        self.release()

    def release(self) -> None:
        """Let the weight hold nothing but a table's shape."""
        self.convert(lambda values: values)

    def convert(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do to the weight what a module does to all of its parameters, which changes their device or element type."""
        with torch._C.DisableTorchFunctionSubclass():
            like, grad = how(self.weight.new_empty(1, 1)), self.weight.grad
            hollow(self.weight, self.num_embeddings, like.dtype, like.device)
            if grad is not None:
                self.weight.grad = how(grad)

    def unattached_twin(self) -> torch.nn.Parameter:
        """Return the weight of a table of its own, made like this one."""
        with torch._C.DisableTorchFunctionSubclass():
            empty = torch.empty(0, self.dim, dtype=self.weight.dtype, device=self.weight.device)
            weight = torch.nn.Parameter(empty, self.weight.requires_grad)
        TableHandle(
            weight,
            self.num_embeddings,
            self.dim,
            self.initializer,
            padding_idx=self.padding_idx,
            zero_padding=self.zero_padding,
            admit=self.admit,
            evict=self.evict,
        )
        return weight

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.name} cannot be pickled: its rows live on the servers",
            todo="Pickle copy.deepcopy(model), which holds the values, or save model.state_dict(), or the job with "
            "fleet.save_persistables(dirname).",
        )

    # ---------------------------------------------------------------- all rows

    @property
    def is_running(self) -> bool:
        return self.source is not None

    def whole(self) -> WholeValues:
        """Return the values of all rows, as they are until the next step."""
        if self._is_outdated:
            self.forget_values()
        if self._whole is None:
            source = self.running()
            self.check_whole("its weight was used as a whole")
            with outside_transforms(), outside_inference():
                self._whole = WholeValues(self._fetch(source))
        return self._whole

    def _fetch(self, source: RowSource) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            rows = source.whole(self)
            check_type(self.name, self.weight, rows.dtype)
            if self.zero_padding and self.padding_idx is not None:
                rows[self.padding_idx] = 0
            return rows.to(self.weight.device)

    def check_whole(self, what: str) -> None:
        """Refuse what needs a value for every row, where a worker cannot hold so many."""
        if self.num_embeddings is None:
            raise UnsupportedError(
                f"{what}, and {self.name!r} has no num_embeddings, so there is no end of its rows",
                todo=_INSTEAD,
            )
        size = self.num_embeddings * self.dim * self.weight.element_size()
        if size > self.running().most_whole_bytes:
            raise UnsupportedError(
                f"{what}, and all rows of {self.name!r} are too much for one worker",
                expected=f"at most {self.running().most_whole_bytes >> 20} MiB (FLEET_WHOLE_TABLE_MB)",
                got=f"{size / (1 << 20):.0f} MiB",
                todo=_INSTEAD,
            )

    def averaged(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers of the mean gradient of all workers, where they have to agree on what they do by it."""
        return None if self.source is None else self.source.averaged(gradient._indices()[0], gradient._values())

    @property
    def may_be_edited(self) -> bool:
        """Say whether the script has been given all rows."""
        return self._whole is not None

    @property
    def given(self) -> torch.Tensor | None:
        """Return the memory of all rows, if the script has been given it, or has given it."""
        return None if self._whole is None else self._whole.given

    def take_edit(self) -> tuple[Ids, torch.Tensor] | None:
        """Return ids and new values of the rows that the script has changed through ``weight``, once."""
        return None if self._whole is None else self._whole.take_edit()

    def outdate_values(self) -> None:
        """Note that the rows on the servers are about to change."""
        self._is_outdated = self._whole is not None

    def forget_values(self) -> None:
        """Forget them, as the rows on the servers have changed. What a script still holds of them is fetched anew."""
        if self._whole is not None:
            self._is_outdated = True  # as long as this is interrupted
            self._renew_or_drop(self._whole)
        self._is_outdated = False

    def _renew_or_drop(self, whole: WholeValues) -> None:
        if not whole.renew(lambda: self._fetch(self.running())):
            self._whole = None
        elif not self._has_told:
            self._has_told = True
            _log.warning(
                "all rows of %r are fetched after every step, as long as something holds the tensor that its weight or "
                "a state_dict gave: keep a copy (clone(), copy.deepcopy) if it need not show later steps",
                self.name,
            )

    def end(self) -> None:
        """Note that the job is over, and there are no rows any more."""
        self._whole = None

    # ---------------------------------------------------------------- some rows

    def running(self) -> RowSource:
        """Return the job that this table belongs to."""
        if self.source is None:
            raise NotInitializedError(
                f"{self.name} was asked for rows before its job was there",
                todo="Hand its weight to an optimizer, that to fleet.distributed_optimizer, then fleet.init_worker().",
            )
        return self.source

    def check_ids(self, ids: object) -> None:
        """Refuse what cannot be ids. The job checks whether they are in range, as it looks at each of them once."""
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            todo = "Give it ids.long()." if isinstance(ids, torch.Tensor) else "Give it torch.as_tensor(ids)."
            raise ArgumentTypeError(f"{self.name} needs a tensor of int64 or int32 ids", got=kind_of(ids), todo=todo)
        if ids.layout is not torch.strided or ids.is_nested or ids.is_meta:
            kind = "nested, of the layout torch.strided" if ids.is_nested else f"{ids.layout} on {ids.device}"
            raise ArgumentTypeError(
                f"{self.name} needs a tensor whose ids lie in memory one by one",
                got=kind,
                todo="Give it ids.to_dense() for a sparse tensor, and one of the layout torch.jagged for parts of "
                "different lengths.",
            )

    def found(self, lookup: Lookup, wanted: Wanted) -> Found:
        """Return a lookup as the asking module needs it."""
        weight, ids, padding_idx = self.weight, wanted.ids, wanted.padding_idx
        with torch._C.DisableTorchFunctionSubclass():
            check_type(self.name, weight, lookup.rows.dtype)
            trained = torch.is_grad_enabled() and weight.requires_grad
        rows, inverse = lookup.rows, lookup.inverse
        if rows.device != ids.device:
            rows, inverse = rows.to(ids.device), inverse.to(ids.device)
        padding: int | None = None
        if padding_idx is not None:
            found = (lookup.ids == padding_idx).nonzero()
            if found.numel():
                padding = int(found[0])
                if self.zero_padding and padding_idx == self.padding_idx:  # or it is a row like others, now frozen
                    rows = rows.clone()
                    rows[padding].zero_()
        weighed = None
        if trained and self._weights is not None:
            weighed = self._weights.look_up(lookup.ids, lookup.inverse, wanted.weights)
        shaped, there = inverse if ids.dim() == 1 else inverse.view(ids.shape), lookup.ids_there
        return Found(rows, shaped, padding, lookup.ids, weight if trained else None, weighed, there)

    @property
    def goes_by_weight(self) -> bool:
        """Say whether rows come or leave by how much look-ups count."""
        return self._weights is not None

    def weights_of(self, ids: Ids) -> Array | None:
        """Return how much the look-ups of these ids count whose gradients stand in ``weight.grad``; None where no rule
        of the table asks for it."""
        return None if self._weights is None else self._weights.of(ids)

    def has(self, low: int, high: int) -> bool:
        """Say whether ids from ``low`` to ``high`` are in range."""
        return self.num_embeddings is None or (low >= 0 and high < self.num_embeddings)

    def check_range(self, low: int, high: int) -> None:
        if not self.has(low, high):
            raise IdOutOfRangeError(
                f"an id is out of range for {self.name}",
                expected=f"0 <= id < {self.num_embeddings}",
                got=low if low < 0 else high,
            )

    def gave(self, gradient: torch.Tensor, ids: torch.Tensor) -> None:
        """Note that a backward has made a gradient of rows of these ids, which are distinct and on the CPU."""
        self._given = gradient._indices(), ids

    def gradient(self) -> GradientRows | None:
        """Return the rows that stand in ``weight.grad``; None if nothing does.

        No ids: a backward came to this table, and touched no row.
        """
        if not isinstance(self.weight, TableWeight):
            raise UnsupportedError(
                f"the weight of the table {self.name!r} was swapped for another tensor in a running job",
                todo="Change its values in place: weight.copy_(…) under torch.no_grad(), or load_state_dict.",
            )
        with torch._C.DisableTorchFunctionSubclass():
            grad = self.weight.grad
            if grad is None:
                return None
            grad = grad.detach()
            if grad.layout is torch.strided:
                ids = (grad != 0).any(1).nonzero().flatten()
                return GradientRows(ids, grad[ids], True)
            grad = by_rows(grad)
            ids, (given, known) = grad._indices(), self._given
            if ids.data_ptr() == given.data_ptr() and ids.shape == given.shape and ids.device == given.device:
                return GradientRows(known, grad._values(), True)
            return GradientRows(ids[0], grad._values(), grad.is_coalesced())


def look_up(wanted: Sequence[Wanted]) -> list[Lookup]:
    """Look up the rows that several tables of one job are asked for, with as few requests as for one."""
    if not wanted:
        return []
    source = wanted[0].handle.running()
    for each in wanted:
        if each.handle.running() is not source:
            raise ConfigurationError(f"{each.handle.name} and {wanted[0].handle.name} belong to different jobs")
        each.handle.check_ids(each.ids)
    return source.lookup(wanted)


def handle_of(parameter: torch.Tensor) -> TableHandle | None:
    """Return the handle of a remote table's ``weight``; None for an ordinary parameter."""
    return getattr(parameter, _ATTRIBUTE, None)


def handle_in(weight: TableWeight) -> TableHandle:
    found: TableHandle = getattr(weight, _ATTRIBUTE)
    return found


def padding_index(padding_idx: int | None, num_embeddings: int | None) -> int | None:
    """Return ``padding_idx`` as torch reads it: a negative one counts from the end, if there is one."""
    if padding_idx is None:
        return None
    checks.integer("padding_idx", padding_idx, "an int or None")
    low, high = (-(2**63), 2**63) if num_embeddings is None else (-num_embeddings, num_embeddings)
    if not low <= padding_idx < high:
        raise ConfigurationError("padding_idx is out of range", expected=f"from {low} to {high - 1}", got=padding_idx)
    return padding_idx if num_embeddings is None else padding_idx % num_embeddings
