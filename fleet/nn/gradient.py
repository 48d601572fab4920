"""Lets the gradient of a table be read and changed as if it were dense, though it holds the rows that were touched.

Autograd leaves a sparse tensor in ``weight.grad``: ids and a row of gradient for each, an id once for every look-up
that had it. What a script asks of it has the answer that a dense gradient has, zeros in all other rows: duplicates are
added up first, and what depends on the zeros counts them. What cannot be answered from the rows alone is answered from
the dense gradient, where the table is small enough for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch

from fleet.errors import UnsupportedError
from fleet.nn.calls import changed, is_in_place, name_of, written
from fleet.numeric.bits import alike
from fleet.numeric.compiler import uncompiled
from fleet.numeric.modes import outside_inference


class Table(Protocol):
    """Says what a gradient has to know of its table."""

    name: str
    num_embeddings: int | None

    def check_whole(self, what: str) -> None:
        """Refuse what needs a value for every row, where a worker cannot hold so many."""
        ...

    def averaged(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers of the mean gradient of all workers, where they have to agree on what they do by it."""
        ...


#: What torch answers by itself: metadata, autograd's own bookkeeping, and what a sparse tensor is asked.
_NATIVE = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "__hash__", "dtype", "device"),
    *("layout", "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xla", "is_sparse_csr", "is_quantized"),
    *("is_nested", "is_mkldnn", "itemsize", "element_size", "get_device", "is_floating_point", "is_complex"),
    *("is_signed", "is_conj", "is_neg", "is_inference", "is_leaf", "requires_grad", "requires_grad_", "grad_fn"),
    *("retains_grad", "grad", "_version", "_values", "_indices", "_nnz", "values", "indices", "is_coalesced"),
    *("requires_grad=", "grad=", "sparse_dim", "dense_dim", "_dimI", "_dimV", "register_hook", "zero_", "detach_"),
    *("is_same_size", "name"),
    *("_backward_hooks", "_is_view", "_base", "output_nr", "is_shared", "is_pinned", "is_distributed"),
}
#: The same, with a gradient of rows for an answer.
_ROWS = {
    *("clone", "neg", "negative", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"),
    *("positive", "__neg__", "__pos__", "contiguous", "detach", "data"),
}
_ITSELF = {"detach", "data", "contiguous"}
#: They do the same to a sum as to all its parts, so duplicates may stay.
_LINEAR = {
    *("mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__", "neg", "negative"),
    *("__imul__", "__itruediv__", "__idiv__", "__div__"),
}
#: They do the same to every number: an answer for each row, and one for the zeros.
_ELEMENTWISE = _LINEAR | {
    *("abs", "absolute", "__abs__", "square", "sqrt", "sign", "sgn", "pow", "__pow__", "__ipow__", "clamp", "clip"),
    *("clamp_min", "clamp_max", "nan_to_num", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "add", "sub"),
    *("subtract", "__add__", "__radd__", "__sub__", "__rsub__", "__iadd__", "__isub__", "round", "floor", "ceil"),
    *("trunc", "frac", "tanh", "sin", "sinh", "asinh", "atan", "erf", "expm1", "log1p", "relu", "hardshrink"),
    *("softshrink", "threshold", "maximum", "minimum", "gt", "lt", "ge", "le", "eq", "ne", "__gt__", "__lt__"),
    *("__ge__", "__le__", "__eq__", "__ne__", "greater", "less", "greater_equal", "less_equal", "not_equal"),
    *("fill", "exp", "cos", "sigmoid", "log", "reciprocal", "rsqrt", "logical_not", "where", "masked_fill"),
}
_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "linalg_norm"}
#: Clipping takes these, by which all workers scale what they have in common.
_AGREED = {"vector_norm", "linalg_vector_norm"}
#: They ask for the extreme number, or for one or all of them, and the zeros count once.
_EXTREMES = {"max", "min", "amax", "amin", "any", "all", "count_nonzero", "sum", "nansum", "aminmax"}
_LISTS = "_foreach_"
#: What a mask itself answers, and what is answered for each row.
_OF_MARKS = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "__hash__", "dtype", "device"),
    *("layout", "is_sparse", "is_cuda", "is_cpu", "is_floating_point", "is_complex", "is_leaf", "requires_grad"),
    *("grad_fn", "element_size", "itemsize", "nbytes"),
}
_LOGICAL = {
    *("logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or"),
    *("bitwise_xor", "__and__", "__or__", "__xor__", "__invert__", "eq", "ne", "__eq__", "__ne__"),
}


class _Gone:
    """Stands for a table that nobody holds any more, of which there is still a gradient."""

    def __init__(self, name: str, num_embeddings: int | None) -> None:
        self.name, self.num_embeddings = name, num_embeddings

    def check_whole(self, what: str) -> None:
        raise UnsupportedError(
            f"{what}, and the model of the table {self.name!r} is gone",
            todo="Keep the model as long as its gradients, or take their values: weight.grad.coalesce().values().",
        )

    def averaged(self, gradient: torch.Tensor) -> None:
        """Return nothing: no job goes on with it."""


class RowGradient(torch.Tensor):
    """Is the gradient of a table: torch's own sparse tensor, which answers as a dense one does."""

    # A weight holds its gradient where Python does not look for rings, so what holds the weight is not held here.
    _to_table: ref[Table]
    _gone: _Gone

    @property
    def _table(self) -> Table:
        return self._to_table() or self._gone

    @staticmethod
    def of(gradient: torch.Tensor, table: Table) -> RowGradient:
        """Make this sparse tensor one, in place."""
        rows = by_rows(gradient)
        if rows is not gradient:
            gradient.data = rows
        gradient.__class__ = RowGradient
        made: RowGradient = gradient  # type: ignore[assignment]
        made._gone = table if isinstance(table, _Gone) else _Gone(table.name, table.num_embeddings)
        made._to_table = ref(table)
        return made

    @classmethod
    @uncompiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(each, torch.nn.Parameter) for each in types):
            return NotImplemented  # a table's weight puts its values in its place first
        kwargs = kwargs or {}
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _NATIVE:
                return func(*args, **kwargs)
            if torch.is_grad_enabled() and name != "data=" and name not in _ITSELF and _has_graph(args):
                return _on_dense(func, name, args, kwargs)  # a gradient of it is wanted: rows have none
            if name.startswith(_LISTS) and args and isinstance(args[0], list | tuple):
                return _each(func, name, args, kwargs)
            return _answer(func, name, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"RowGradient({self._table.name!r}, size={tuple(self.shape)}, rows={self._nnz()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGradient:
        memo[id(self)] = copied = self.clone()
        return copied  # type: ignore[return-value]


class _Rows(NamedTuple):
    """Holds which rows a gradient had when it was asked about them."""

    table: Table
    shape: torch.Size
    ids: torch.Tensor
    has_zeros: bool

    @staticmethod
    def of(gradient: RowGradient) -> _Rows:
        return _Rows(gradient._table, gradient.shape, gradient._indices()[0], _has_zeros(gradient))


class RowMarks(torch.Tensor):
    """Marks the numbers of a gradient that have some property: one mark for every number of its rows, and one for all
    zeros. It is torch's mask in a script's hands, and becomes one with the first that the rows alone cannot answer."""

    _rows: _Rows
    _marks: torch.Tensor
    _of_zero: torch.Tensor
    _dense: torch.Tensor | None

    @staticmethod
    def of(rows: _Rows, marks: torch.Tensor, of_zero: torch.Tensor) -> RowMarks:
        """Return a mask without memory of its own: whatever asks for that behind our back is told so."""
        made: RowMarks = torch.Tensor._make_wrapper_subclass(
            RowMarks, rows.shape, dtype=torch.bool, device=marks.device
        )
        made._rows, made._marks, made._of_zero, made._dense = rows, marks, of_zero, None
        return made

    def to_dense(self) -> torch.Tensor:  # type: ignore[override]
        """Return torch's mask, the same each time: what a script writes into it stays."""
        if self._dense is None:
            self._rows.table.check_whole("its gradient was asked for its numbers one by one")
            with torch._C.DisableTorchFunctionSubclass(), outside_inference():
                dense = self._of_zero.expand(self._rows.shape).clone()
                dense[self._rows.ids] = self._marks
            self._dense = dense
        return self._dense

    def is_of(self, ids: torch.Tensor) -> bool:
        """Say whether it marks the numbers of the rows with these ids, and no script has changed it."""
        own = self._rows.ids
        return self._dense is None and own.data_ptr() == ids.data_ptr() and len(own) == len(ids)

    def _counted(self) -> torch.Tensor:
        return torch.cat([self._marks.flatten(), self._of_zero.flatten()]) if self._rows.has_zeros else self._marks

    @classmethod
    @uncompiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(each, RowGradient | torch.nn.Parameter) for each in types):
            return NotImplemented  # a gradient of the same rows needs no other numbers
        name, kwargs = name_of(func), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name in _OF_MARKS:
                return func(*args, **kwargs)
            first = args[0] if args else None
            if isinstance(first, RowMarks) and not kwargs:
                if name in ("any", "all") and len(args) == 1 and first._dense is None:
                    return func(first._counted())
                ids = first._rows.ids
                if name in _LOGICAL and all(isinstance(each, RowMarks) and each.is_of(ids) for each in args):
                    marks, zeros = (each._marks for each in args), (each._of_zero for each in args)
                    return RowMarks.of(first._rows, func(*marks), func(*zeros))
        return _of_masks(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _of_masks(func, args, kwargs or {})


def _of_masks(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what torch makes of the masks that marks stand for."""
    given: list[RowMarks] = []

    def mask(value: Any) -> Any:
        if not isinstance(value, RowMarks):
            return value
        given.append(value)
        return value.to_dense()

    result = func(*changed(args, mask), **changed(kwargs, mask))
    return changed(result, lambda value: next((each for each in given if each._dense is value), value))


def coalesce(gradient: torch.Tensor) -> torch.Tensor:
    """Add up what belongs to one row, in place."""
    if not gradient.is_coalesced():
        gradient.data = _summed(gradient)
    return gradient


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    """Return what ``gradient.coalesce()`` is to be: torch takes an id of -1, if no other is smaller, for no id at all,
    and writes its row before the memory of all rows."""
    ids = gradient._indices()[0]
    if gradient.is_coalesced() or not len(ids) or int(ids.min()) != -1:
        return gradient.coalesce()
    distinct, places = torch.unique(ids, return_inverse=True)
    of_places = torch.sparse_coo_tensor(
        places[None], gradient._values(), gradient.shape, check_invariants=False, device=ids.device
    )
    return torch.sparse_coo_tensor(
        distinct[None],
        of_places.coalesce()._values(),
        gradient.shape,
        check_invariants=False,
        is_coalesced=True,
        device=ids.device,
    )


def by_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as one of whole rows, if a script has made one of single numbers: ``to_sparse()``."""
    if gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1:
        return gradient
    single = gradient.to_sparse().coalesce()
    (rows, columns), numbers = single.indices(), single.values()
    ids, place = rows.unique(return_inverse=True)
    values = numbers.new_zeros(len(ids), gradient.shape[1])
    values[place, columns] = numbers
    return torch.sparse_coo_tensor(
        ids[None], values, gradient.shape, check_invariants=False, is_coalesced=True, device=values.device
    )


def _has_zeros(gradient: RowGradient) -> bool:
    """Say whether there is a row that the gradient does not hold. It has been coalesced."""
    count = gradient._table.num_embeddings
    return count is None or gradient._nnz() < count


def _dense(gradient: RowGradient, what: str) -> torch.Tensor:
    gradient._table.check_whole(f"its gradient was asked for {what}")
    return gradient.to_dense()


def _rows(source: RowGradient, values: torch.Tensor) -> RowGradient:
    """Return the same rows with other numbers."""
    made = torch.sparse_coo_tensor(
        source._indices(),
        values,
        source.shape,
        check_invariants=False,
        is_coalesced=source.is_coalesced(),
        device=values.device,
    )
    return RowGradient.of(made, source._table)


def _each(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do to every tensor of a list what a function for lists does to all of them."""
    tensors, *rest = args
    if not any(isinstance(each, RowGradient) for each in tensors):
        return func(tensors, *changed(tuple(rest), _as_dense(name)), **changed(kwargs, _as_dense(name)))
    results = []
    for place, tensor in enumerate(tensors):
        own = tuple(each[place] if isinstance(each, list | tuple) else each for each in rest)
        if not isinstance(tensor, RowGradient):
            found = func(
                [tensor], *([each] if isinstance(each, torch.Tensor) and each.dim() else each for each in own), **kwargs
            )
            results.append(found[0] if found is not None else None)
            continue
        single = name.removeprefix(_LISTS)
        results.append(
            _answer(getattr(torch, single, None) or getattr(torch.Tensor, single), single, (tensor, *own), kwargs)
        )
    return list(tensors) if is_in_place(name) else tuple(results)


def _answer(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, rest = args[0] if args else None, args[1:]
    plain = _plain_name(name)
    if (plain in _ELEMENTWISE and len(args) > (plain == "where")) or _is_masked(name, rest):
        gradient, is_alone = _only(args, kwargs)
        if gradient is not None:
            return _elementwise(func, name, gradient, plain in _LINEAR and is_alone, args, kwargs)
    if isinstance(first, RowGradient):
        if name in _ITSELF and not first.requires_grad:
            return first
        if name == "coalesce":
            return RowGradient.of(_summed(first), first._table)
        if name in _ROWS:
            return RowGradient.of(func(first, *rest, **kwargs), first._table)
        if name == "to_dense":
            return _dense(first, "all its rows")
        if name == "data=":
            return _replace(first, rest[0].to_dense().to(first.dtype), "data=")
        if (
            name in _NORMS
            and not _is_of_matrix(name, rest, kwargs)
            and _is_of_all((*rest[1:], kwargs.get("dim"), kwargs.get("keepdim")))
        ):
            return func(_counted_by_all(first) if name in _AGREED else _counted(first), *rest, **kwargs)
        if name in _EXTREMES and not rest and not kwargs:
            return func(_counted(first))
        if name == "mean" and not rest and not set(kwargs) - {"dtype"} and first.numel():
            return func(first._values().sum() / first.numel(), **kwargs)
        if plain in ("add", "sub", "__add__", "__sub__", "__iadd__", "__isub__") and rest and _fits(first, rest[0]):
            summed = func(first, *rest, **kwargs)
            return first if summed is first else RowGradient.of(summed, first._table)
    if name in ("numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__"):
        raise UnsupportedError(
            f"{name}() was called on the gradient of the table {_first(args)._table.name!r}, whose rows lie apart",
            todo="Call it on weight.grad.to_dense(), or on its values: weight.grad.coalesce().values().",
        )
    return _on_dense(func, name, args, kwargs)


def _on_dense(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what torch makes of the dense gradients; what is written into one changes the gradient."""
    writes = written(func, args, kwargs)
    made: list[tuple[RowGradient, torch.Tensor, torch.Tensor | None]] = []

    def dense(value: Any) -> Any:
        if isinstance(value, RowMarks):
            return value.to_dense()
        if not isinstance(value, RowGradient):
            return value
        for gradient, other, _ in made:
            if gradient is value:
                return other
        with outside_inference():
            whole = _dense(value, f"{name}()")
            before = None if writes.is_all or writes.has(value) else whole.detach().clone()
        made.append((value, whole, before))
        return whole

    given, named = changed(args, dense), changed(kwargs, dense)
    result = func(*given, **named)
    changes = [
        (gradient, whole)
        for gradient, whole, before in made
        if writes.has(gradient) or (before is not None and not alike(whole, before))
    ]
    for gradient, whole in changes:
        if gradient.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name}() would write into the gradient of the table {gradient._table.name!r}, which has a graph",
                todo="Assign a result instead, weight.grad = weight.grad * 2, or write under torch.no_grad().",
            )
        _replace(gradient, whole, f"{name}()")
    result = changed(result, lambda value: next((each for each, whole in changes if whole is value), value))
    memory = {whole.untyped_storage().data_ptr() for _, whole, _ in made}
    if any(each.untyped_storage().data_ptr() in memory for each in _tensors(result)):
        # A part of the gradient: what is written into it would not reach the gradient, and torch refuses to.
        with nullcontext() if any(whole.requires_grad for _, whole, _ in made) else torch.inference_mode():
            return changed(result, lambda each: each.clone() if isinstance(each, torch.Tensor) else each)
    return result


def _elementwise(
    func: Callable[..., Any],
    name: str,
    gradient: RowGradient,
    is_linear: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Do to the numbers of the rows what is to be done to all, if zeros stay zeros by it or it tells marks of them."""

    def on(numbers: torch.Tensor, marks: str) -> Any:
        def part(value: Any) -> Any:
            return numbers if value is gradient else getattr(value, marks) if isinstance(value, RowMarks) else value

        return func(*map(part, args), **{key: part(each) for key, each in kwargs.items()})

    zero = gradient._values().new_zeros(1)
    of_zero = on(zero, "_of_zero")
    of_zero = zero if of_zero is None else of_zero
    if bool(of_zero != 0) and of_zero.dtype is not torch.bool:  # NaN is not zero either
        return _on_dense(func, name, args, kwargs)
    if not is_linear:
        coalesce(gradient)
    values = gradient._values()
    found = on(values, "_marks")
    if found is None:
        return None
    if found is values:
        return gradient
    return RowMarks.of(_Rows.of(gradient), found, of_zero) if of_zero.dtype is torch.bool else _rows(gradient, found)


def _replace(gradient: RowGradient, dense: torch.Tensor, what: str) -> None:
    """Let the gradient hold these numbers; it keeps the rows that it has."""
    if dense.shape != gradient.shape:
        raise UnsupportedError(
            f"{what} would give the gradient of the table {gradient._table.name!r} another shape",
            expected=tuple(gradient.shape),
            got=tuple(dense.shape),
            todo="Work on a copy: weight.grad.to_dense().",
        )
    with outside_inference(), torch.no_grad():
        held = (dense != 0).any(1)
        held[gradient._indices()[0]] = True
        ids = held.nonzero().view(1, -1)
        gradient.data = torch.sparse_coo_tensor(
            ids, dense[ids[0]], dense.shape, check_invariants=False, is_coalesced=True, device=dense.device
        )
        torch.autograd.graph.increment_version(gradient)


def _counted(gradient: RowGradient) -> torch.Tensor:
    """Return all numbers of the gradient, and one zero for those that are not there."""
    values = coalesce(gradient)._values()
    return torch.cat([values.flatten(), values.new_zeros(1)]) if _has_zeros(gradient) else values


def _counted_by_all(gradient: RowGradient) -> torch.Tensor:
    """Return what ``_counted`` does, of the mean gradient of all workers where these have to agree."""
    averaged = gradient._table.averaged(coalesce(gradient))
    return _counted(gradient) if averaged is None else torch.cat([averaged.flatten(), averaged.new_zeros(1)])


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[RowGradient | None, bool]:
    """Return the gradient among these if nothing else has a number for each of its places but it again, or marks of
    its rows; and whether there are none of those."""
    gradient, others = None, []
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            if gradient is None and isinstance(each, RowGradient):
                gradient = each
            elif each.dim():
                others.append(each)
    if gradient is None or "out" in kwargs:
        return None, False
    for each in others:
        if each is not gradient and not (isinstance(each, RowMarks) and each.is_of(gradient._indices()[0])):
            return None, False
    return gradient, not others


def _is_masked(name: str, rest: tuple[Any, ...]) -> bool:
    return name == "__setitem__" and isinstance(rest[0], RowMarks)


def _as_dense(name: str) -> Callable[[Any], Any]:
    return lambda value: _dense(value, f"{name}()") if isinstance(value, RowGradient) else value


def _has_graph(value: Any) -> bool:
    """Say whether a gradient of a table among these is itself to be differentiated."""
    if isinstance(value, list | tuple):
        return any(map(_has_graph, value))
    return isinstance(value, RowGradient) and value.requires_grad


def _plain_name(name: str) -> str:
    return name[:-1] if is_in_place(name) and not name.startswith("__") else name


def _is_of_matrix(name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether it is a norm that a list of the numbers does not have."""
    order = rest[0] if rest else kwargs.get("ord", kwargs.get("p"))
    return order is not None and (name == "linalg_norm" or order == "nuc")


def _is_of_all(given: tuple[Any, ...]) -> bool:
    """Say whether no dimension is named for whose parts there was to be an answer each."""
    return all(each is None or each is False for each in given)


def _fits(gradient: RowGradient, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and other.is_sparse and other.shape == gradient.shape


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _first(args: tuple[Any, ...]) -> RowGradient:
    return next(each for each in args if isinstance(each, RowGradient))
