"""Expands the distinct rows of a look-up to a row for every id, or a sum for every bag, and takes the gradient back.

These are ``embedding`` and ``embedding_bag`` of ``torch.nn.functional``, except that torch adds up the gradient of
many rows ten times slower than a plain loop (benchmarks/RESULTS.md). The loops add in the order of the ids, as torch
does.

Where many small tables are looked up, what Python does for each costs more than the rows. So those that are looked up
together, or were foreseen to be in one forward, share a function of autograd and a loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from fleet.errors import ConfigurationError
from fleet.nn.handle import Found, Lookup, Wanted, handle_of, look_up
from fleet.numeric.compiler import uncompiled
from fleet.numeric.ids import Summed, accumulate, accumulate_apart, accumulate_bags, accumulate_each

#: From so many ids on a table is added up by itself.
LARGE = 4096

#: What compiled loops can add.
_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


class Bags(NamedTuple):
    """Says which ids belong together, and what becomes of them: the arguments of ``embedding_bag``."""

    offsets: torch.Tensor | None
    mode: str
    per_sample_weights: torch.Tensor | None
    include_last_offset: bool
    padding_idx: int | None

    def check_offsets(self, inverse: torch.Tensor) -> None:
        """Refuse offsets with which torch reads and writes beyond its memory. It says itself what else is wrong."""
        given = self.offsets
        if given is None or not given.is_cpu or given.dim() != 1 or inverse.dim() != 1:
            return
        offsets = given.numpy()  # whose comparisons take half the time of torch's
        if len(offsets) <= self.include_last_offset:
            fits = not len(inverse)
        else:
            fits = bool(offsets[-1] <= len(inverse) and (offsets[1:] >= offsets[:-1]).all())
        if not fits:
            raise ConfigurationError(
                "offsets do not divide the ids of an EmbeddingBag into bags",
                expected=f"0, then numbers that do not fall, up to {len(inverse)}",
                got=given,
            )

    def pooled(self, rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(inverse, rows, **self._asdict())

    def sizes(self, inverse: torch.Tensor) -> torch.Tensor:
        if self.offsets is None:
            return torch.full((len(inverse),), inverse.shape[1], device=inverse.device)
        # The last bag ends with the ids, whatever a last offset says.
        starts = self.offsets.long()[: -1 if self.include_last_offset else None]
        return torch.cat([starts, starts.new_tensor([len(inverse)])]).diff()

    def members(self, rows: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for every id its bag, and the factor of its row there."""
        counts = self.sizes(inverse)
        bags = torch.repeat_interleave(counts)
        weights = self.per_sample_weights
        scales = rows.new_ones(len(bags)) if weights is None else weights.reshape(-1).clone()
        if self.padding_idx is not None:
            padding = inverse.reshape(-1) == self.padding_idx
            scales[padding] = 0
            counts = counts - torch.zeros_like(counts).index_add(0, bags, padding.long())
        if self.mode == "mean":
            scales /= counts.clamp(min=1)[bags]
        return bags, scales


@uncompiled
def embedded(wanted: Sequence[Wanted]) -> list[torch.Tensor]:
    """Look up rows of several tables of one job; return a row for each of their ids, with gradients for the weights."""
    lookups = look_up(wanted)
    if len(wanted) == 1 and (foreseen := lookups[0].foreseen) is not None:
        taken = foreseen.take(wanted[0])
        if taken is not None:
            return [taken]
    return expand([each.handle.found(lookup, each) for each, lookup in zip(wanted, lookups, strict=True)])


@uncompiled
def found_for(wanted: Wanted) -> Found:
    """Look up rows of one table, of which bags are made."""
    (lookup,) = look_up([wanted])
    return wanted.handle.found(lookup, wanted)


class ForeseenLookups:
    """Expands what the look-ups of a forward will ask for, when the first of them comes."""

    def __init__(self, wanted: Sequence[Wanted], lookup_of: Callable[[Wanted], Lookup]) -> None:
        """``wanted`` names each table once."""
        self._wanted = wanted
        self._lookup_of = lookup_of
        self._ready: dict[int, tuple[Wanted, torch.Tensor]] | None = None

    def take(self, wanted: Wanted) -> torch.Tensor | None:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return None
        if self._ready is None:
            self._ready = self._expanded()
        weight = wanted.handle.weight
        foreseen, expanded = self._ready.pop(id(wanted.handle), (None, None))
        with torch._C.DisableTorchFunctionSubclass():
            is_as_foreseen = (
                foreseen is not None
                and expanded is not None
                and foreseen.ids.shape == wanted.ids.shape
                and foreseen.padding_idx == wanted.padding_idx
                and wanted.expands
                and wanted.ids.device == expanded.device
                and weight.requires_grad
                and weight.dtype is expanded.dtype
            )
        return expanded if is_as_foreseen else None

    def _expanded(self) -> dict[int, tuple[Wanted, torch.Tensor]]:
        found = [(each, each.handle.found(self._lookup_of(each), each)) for each in self._wanted]
        ready: dict[int, tuple[Wanted, torch.Tensor]] = {}
        ours = [(each, here) for each, here in found if _is_ours(here)]
        theirs = [(each, here) for each, here in found if _is_for_torch(here)]
        for those, how in ((ours, expand), (theirs, expand_by_torch)):
            made = how([here for _, here in those])
            ready |= {id(each.handle): (each, rows) for (each, _), rows in zip(those, made, strict=True)}
        return ready


def expand(found: Sequence[Found]) -> list[torch.Tensor]:
    """``rows[inverse]`` of several tables, with gradients of rows for their weights."""
    expanded: dict[int, torch.Tensor] = {}
    together: list[int] = []
    for place, each in enumerate(found):
        if not _is_ours(each):
            expanded[place] = F.embedding(each.inverse, _differentiable(each))
        elif each.weighed is not None or _has_hooks(each):
            # The backward of a function for several tables is not told of which of them a gradient is asked for, and a
            # look-up counts with its own alone.
            (expanded[place],) = _expanded([each])
        else:
            together.append(place)
    if together:
        expanded.update(zip(together, _expanded([found[place] for place in together]), strict=True))
    return [expanded[place] for place in range(len(found))]


def _expanded(found: Sequence[Found]) -> tuple[torch.Tensor, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        made: tuple[torch.Tensor, ...] = _Expand.apply(found, *(each.weight for each in found))  # type: ignore[no-untyped-call]
    return made


def expand_by_torch(found: Sequence[Found]) -> list[torch.Tensor]:
    """Do the same by torch's own functions, one for all tables that have rows of one kind."""
    kinds: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for place, each in enumerate(found):
        kinds.setdefault((each.rows.shape[1], each.rows.dtype, each.rows.device), []).append(place)
    expanded: dict[int, torch.Tensor] = {}
    for places in kinds.values():
        these = [found[place] for place in places]
        with torch._C.DisableTorchFunctionSubclass():
            made = _Gather.apply(these, *(each.weight for each in these))  # type: ignore[no-untyped-call]
        expanded.update(zip(places, made, strict=True))
    return [expanded[place] for place in range(len(found))]


def _has_hooks(found: Found) -> bool:
    """Say whether hooks see the gradient: of a table beside which others have one they would be given None."""
    with torch._C.DisableTorchFunctionSubclass():
        weight = found.weight
        return weight is not None and bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


@uncompiled
def pool(found: Found, bags: Bags) -> torch.Tensor:
    """Return the sum or mean of each bag's rows."""
    if found.rows.is_cpu:
        bags.check_offsets(found.inverse)
    weights = bags.per_sample_weights
    if not _is_ours(found) or (weights is not None and weights.requires_grad):
        return bags.pooled(_differentiable(found), found.inverse)
    with torch._C.DisableTorchFunctionSubclass():
        pooled: torch.Tensor = _Pool.apply(found.weight, found.rows, found, bags)  # type: ignore[no-untyped-call]
    return pooled


def _is_ours(found: Found) -> bool:
    return found.weight is not None and found.rows.is_cpu and found.rows.dtype in _NUMPY


def _is_for_torch(found: Found) -> bool:
    return not _is_ours(found) and found.weight is not None and found.weighed is None and not _has_hooks(found)


def _differentiable(found: Found) -> torch.Tensor:
    """Return the rows, through which torch's own functions have a gradient."""
    if found.weight is None:
        return found.rows
    with torch._C.DisableTorchFunctionSubclass():
        rows: torch.Tensor = _Rows.apply(found.weight, found.rows, found)  # type: ignore[no-untyped-call]
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: torch.Tensor, found: Found) -> torch.Tensor:
        ctx.found, ctx.like = found, (weight.shape, weight.device)
        return rows.view_as(rows)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gradient(ctx.found, ctx.like, grad), None, None


class _Sparse(torch.autograd.Function):
    """Makes the gradient of a weight of gradients of rows: a gradient of it is, for these, its rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ids: torch.Tensor, like: tuple[torch.Size, torch.device]) -> torch.Tensor:
        ctx.ids = ids
        return _sparse(rows, ids, like)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if grad.layout is torch.strided:
            return grad[ctx.ids.to(grad.device)], None, None
        if not grad._nnz():
            return grad.new_zeros(len(ctx.ids), grad.shape[1], layout=torch.strided), None, None
        held, rows = grad._indices()[0], grad._values()
        distinct, places = torch.unique(torch.cat([ctx.ids, held]), return_inverse=True)
        total = rows.new_zeros(len(distinct), rows.shape[1]).index_add(0, places[len(ctx.ids) :], rows)
        return total[places[: len(ctx.ids)]], None, None


def _gradient(found: Found, like: tuple[torch.Size, torch.device], rows: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a weight, of which the padding row has none."""
    if found.weighed is not None:
        assert found.weight is not None, "only look-ups that are trained are weighed"
        found.weighed.note(adds=_is_there(found.weight))
    ids, there, padding = found.ids, found.ids_there, found.padding
    if rows.shape[0] > ids.numel():  # a bag may have had one more
        rows = rows[: ids.numel()]
    if padding is not None:
        ids, there = torch.cat([ids[:padding], ids[padding + 1 :]]), None
        rows = torch.cat([rows[:padding], rows[padding + 1 :]])
    if torch.is_grad_enabled():  # somebody differentiates the gradient
        made: torch.Tensor = _Sparse.apply(rows, ids, like)  # type: ignore[no-untyped-call]
        return made
    made = _sparse(rows, ids if there is None else there, like)
    handle = None if found.weight is None else handle_of(found.weight)
    if handle is not None:
        handle.gave(made, ids)
    return made


def _is_there(weight: torch.Tensor) -> bool:
    """Say whether a weight has a gradient, to which another one is added."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = weight.grad
        return grad is not None and (grad.layout is not torch.sparse_coo or grad._nnz() > 0)


def _sparse(rows: torch.Tensor, ids: torch.Tensor, like: tuple[torch.Size, torch.device]) -> torch.Tensor:
    shape, device = like
    if ids.device != device or rows.device != device:
        ids, rows = ids.to(device), rows.to(device)
    if not ids.numel():
        # Torch resizes a gradient without rows when another one is added to it, and numpy's memory cannot be.
        ids, rows = torch.empty_like(ids), torch.empty_like(rows)
    # That every id is there once is not said: torch would take it for granted of sums of these, too.
    return torch.sparse_coo_tensor(ids[None], rows, shape, check_invariants=False, device=device)


class _Expand(torch.autograd.Function):
    """Expands rows of several tables: what a function costs is then paid once."""

    @staticmethod
    def forward(ctx: Any, found: Sequence[Found], *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.found, ctx.like = found, [(weight.shape, weight.device) for weight in weights]
        return tuple(torch.embedding(each.rows, each.inverse) for each in found)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = [grad if needs else None for grad, needs in zip(grads, ctx.needs_input_grad[1:], strict=True)]
        totals = _added(ctx.found, needed)
        return None, *(
            None if total is None else _gradient(found, like, total)
            for found, like, total in zip(ctx.found, ctx.like, totals, strict=True)
        )


class _Gather(torch.autograd.Function):
    """Expands rows of several tables that are of one kind, as if these were one table: a device does little at once."""

    @staticmethod
    def forward(ctx: Any, found: Sequence[Found], *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.found, ctx.like = found, [(weight.shape, weight.device) for weight in weights]
        starts = [0, *itertools.accumulate(len(each.rows) for each in found)]
        flat = [each.inverse.reshape(-1) for each in found]
        ctx.places = torch._foreach_add(flat, starts[:-1])
        gathered = torch.embedding(torch.cat([each.rows for each in found]), torch.cat(ctx.places))
        return tuple(_apart(gathered, [len(each) for each in flat], [each.inverse.shape for each in found]))

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        counts = [len(each.rows) for each in ctx.found]
        there = [
            place
            for place, (grad, needs) in enumerate(zip(grads, ctx.needs_input_grad[1:], strict=True))
            if grad is not None and needs
        ]
        totals: list[torch.Tensor | None] = [None] * len(grads)
        if torch.is_grad_enabled():
            for place in there:
                totals[place] = _added_by_torch(ctx.found[place], grads[place])  # type: ignore[arg-type]
        elif there:
            flat = torch.cat([grads[place].reshape(-1, grads[place].shape[-1]) for place in there])  # type: ignore[union-attr]
            places = torch.cat([ctx.places[place] for place in there])
            summed = torch.ops.aten.embedding_dense_backward(flat, places, sum(counts), -1, False)
            parts = summed.split_with_sizes(counts)
            for place in there:
                totals[place] = parts[place]
        return None, *(
            None if total is None else _gradient(found, like, total)
            for found, like, total in zip(ctx.found, ctx.like, totals, strict=True)
        )


def _apart(gathered: torch.Tensor, counts: Sequence[int], shapes: Sequence[torch.Size]) -> Iterator[torch.Tensor]:
    """Yield parts of rows as tensors of their own, which a script may write into like into every result of torch's: to
    autograd they are no views, though they lie in one piece of memory."""
    dim, start = gathered.shape[1], 0
    for count, shape in zip(counts, shapes, strict=True):
        whole, strides = (*shape, dim), torch.empty(*shape, dim, device="meta").stride()
        yield gathered.new_empty(0).set_(gathered.untyped_storage(), start * dim, whole, strides)
        start += count


def _added(found: Sequence[Found], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return for every table the sums of the gradients of each row; None where there are none."""
    if torch.is_grad_enabled():
        return [None if grad is None else _added_by_torch(each, grad) for each, grad in zip(found, grads, strict=True)]
    totals = _zeros(found, grads)
    kept: list[torch.Tensor] = []
    alike: dict[tuple[int, torch.dtype], list[Summed]] = {}
    for each, grad, total in zip(found, grads, totals, strict=True):
        if grad is None or total is None:
            continue
        dim = grad.shape[-1]
        places = each.inverse
        count = places.numel()
        if not count or not dim:
            continue
        together, apart = count, 0
        if not places.is_contiguous():
            places = places.contiguous()
        if not grad.is_contiguous():
            if _lies_in_blocks(grad):
                together, apart = count // grad.shape[0], grad.stride(0)
            else:
                grad = grad.contiguous()
        if count >= LARGE:
            _add_large(places, grad, together, apart, total)
            continue
        kept += (places, grad)
        gap = apart * grad.element_size()
        where = Summed(count, places.data_ptr(), grad.data_ptr(), together, gap, total.data_ptr())
        alike.setdefault((dim, grad.dtype), []).append(where)
    for (dim, dtype), tables in alike.items():
        accumulate_each(tables, dim, _NUMPY[dtype])
    return totals


def _zeros(found: Sequence[Found], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return for every table a row of zeros for each id; small ones of one width lie in one piece of memory."""
    totals: list[torch.Tensor | None] = [None] * len(found)
    small: dict[tuple[int, torch.dtype], list[int]] = {}
    for place, (each, grad) in enumerate(zip(found, grads, strict=True)):
        if grad is not None and each.inverse.numel() < LARGE:
            small.setdefault((grad.shape[-1], grad.dtype), []).append(place)
        elif grad is not None:
            totals[place] = grad.new_zeros(each.ids.numel(), grad.shape[-1])
    for (dim, _), places in small.items():
        counts = [found[place].ids.numel() for place in places]
        zeros = grads[places[0]].new_zeros(sum(counts), dim)  # type: ignore[union-attr]
        for place, total in zip(places, zeros.split_with_sizes(counts), strict=True):
            totals[place] = total
    return totals


def _add_large(places: torch.Tensor, grad: torch.Tensor, together: int, apart: int, total: torch.Tensor) -> None:
    """Add up the gradients of many ids by the loops for one table, which take two thirds of the time an id."""
    flat = places.reshape(-1).numpy()
    if apart:
        memory = grad.as_strided(((len(grad) - 1) * apart + together * total.shape[1],), (1,))
        accumulate_apart(flat, memory.numpy(), together, apart, total.numpy())
    else:
        accumulate(flat, grad.reshape(len(flat), -1).numpy(), total.numpy())


def _added_by_torch(found: Found, grad: torch.Tensor) -> torch.Tensor:
    places, dim = found.inverse.reshape(-1), grad.shape[-1]
    return grad.new_zeros(len(found.ids), dim).index_add(0, places, grad.reshape(-1, dim))


def _lies_in_blocks(grad: torch.Tensor) -> bool:
    """Say whether something lies between one part of it and the next, as when a model puts rows beside other features.

    A copy without would take as long as adding it up does.
    """
    if grad.dim() == 2:
        return grad.stride(1) == 1 and grad.stride(0) > 0
    return grad.dim() > 2 and grad.stride(0) > 0 and grad[0].is_contiguous()


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: torch.Tensor, found: Found, bags: Bags) -> torch.Tensor:
        ctx.found, ctx.like = found, (weight.shape, weight.device)
        pooled = bags.pooled(rows, found.inverse)  # first: torch says what is wrong with arguments
        ctx.save_for_backward(*bags.members(rows, found.inverse))
        return pooled

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        bags, scales = ctx.saved_tensors
        places, count = ctx.found.inverse.reshape(-1), len(ctx.found.ids)
        if torch.is_grad_enabled():
            parts = grad[bags] * scales[:, None]
            total = grad.new_zeros(count, grad.shape[1]).index_add(0, places, parts)
            return _gradient(ctx.found, ctx.like, total), None, None, None
        total = grad.new_zeros(count, grad.shape[1])
        accumulate_bags(places.numpy(), bags.numpy(), scales.numpy(), grad.contiguous().numpy(), total.numpy())
        return _gradient(ctx.found, ctx.like, total), None, None, None
