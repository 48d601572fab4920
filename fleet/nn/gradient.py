"""Lets the gradient of a table be read and changed as if it were dense, though it holds the rows that were touched.

Autograd leaves a sparse tensor in ``weight.grad``: ids and a row of gradient for each, an id once for every look-up
that had it. What a script asks of it has the answer that a dense gradient has, zeros in all other rows: duplicates are
added up first, and what depends on the zeros counts them. What cannot be answered from the rows alone is answered from
the dense gradient, where the table is small enough for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from fleet.errors import UnsupportedError
from fleet.nn.calls import changed, is_in_place, name_of


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
    *("clone", "coalesce", "neg", "negative", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"),
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
    *("fill", "exp", "cos", "sigmoid", "log", "reciprocal", "rsqrt", "logical_not"),
}
_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "linalg_norm"}
#: Clipping takes these, by which all workers scale what they have in common.
_AGREED = {"vector_norm", "linalg_vector_norm"}
#: They ask for the extreme number, or for one or all of them, and the zeros count once.
_EXTREMES = {"max", "min", "amax", "amin", "any", "all", "count_nonzero", "sum", "nansum", "aminmax"}
_LISTS = "_foreach_"


class RowGradient(torch.Tensor):
    """Is the gradient of a table: torch's own sparse tensor, which answers as a dense one does."""

    _table: Table

    @staticmethod
    def of(gradient: torch.Tensor, table: Table) -> RowGradient:
        """Make this sparse tensor one, in place."""
        rows = by_rows(gradient)
        if rows is not gradient:
            gradient.data = rows
        gradient.__class__ = RowGradient
        gradient._table = table  # type: ignore[attr-defined]
        return gradient  # type: ignore[return-value]

    @classmethod
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
            if torch.is_grad_enabled() and not is_in_place(name) and name not in _ITSELF and _has_graph(args):
                return _on_dense(func, name, args, kwargs)  # a gradient of it is wanted: rows have none
            if name.startswith(_LISTS):
                return _each(func, name, args, kwargs)
            return _answer(func, name, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"RowGradient({self._table.name!r}, size={tuple(self.shape)}, rows={self._nnz()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGradient:
        memo[id(self)] = copied = self.clone()
        return copied  # type: ignore[return-value]


class RowMarks:
    """Marks the numbers of a gradient that have some property: one mark for every number of its rows, and one for all
    zeros."""

    def __init__(self, gradient: RowGradient, marks: torch.Tensor, of_zero: torch.Tensor) -> None:
        self._gradient = gradient
        self._marks = marks
        self._of_zero = of_zero

    def all(self, *of: Any, **more: Any) -> torch.Tensor:
        return self.to_dense().all(*of, **more) if of or more else self._counted().all()

    def any(self, *of: Any, **more: Any) -> torch.Tensor:
        return self.to_dense().any(*of, **more) if of or more else self._counted().any()

    def logical_not(self) -> RowMarks:
        return RowMarks(self._gradient, ~self._marks, ~self._of_zero)

    __invert__ = logical_not

    def _counted(self) -> torch.Tensor:
        if not _has_zeros(self._gradient):
            return self._marks
        return torch.cat([self._marks.flatten(), self._of_zero.flatten()])

    def to_dense(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            dense = _dense(self._gradient, "its numbers one by one").to(torch.bool)
            dense.copy_(self._of_zero.expand_as(dense))
            dense[self._gradient._indices()[0]] = self._marks
            return dense

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.to_dense(), name)

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.to_dense()[place]

    def __bool__(self) -> bool:
        return bool(self.to_dense())

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = name_of(func)
        if name in ("all", "any", "logical_not", "bitwise_not") and len(args) == 1 and not kwargs:
            return getattr(args[0], name.replace("bitwise", "logical"))()
        change = lambda value: value.to_dense() if isinstance(value, RowMarks) else value  # noqa: E731
        return func(*changed(args, change), **changed(kwargs or {}, change))


def coalesce(gradient: torch.Tensor) -> torch.Tensor:
    """Add up what belongs to one row, in place."""
    if not gradient.is_coalesced():
        gradient.data = gradient.coalesce()
    return gradient


def by_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as one of whole rows, if a script has made one of single numbers: ``to_sparse()``."""
    if gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1:
        return gradient
    single = gradient.to_sparse().coalesce()
    (rows, columns), numbers = single.indices(), single.values()
    ids, place = rows.unique(return_inverse=True)
    values = numbers.new_zeros(len(ids), gradient.shape[1])
    values[place, columns] = numbers
    return torch.sparse_coo_tensor(ids[None], values, gradient.shape, check_invariants=False, is_coalesced=True)


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
        source._indices(), values, source.shape, check_invariants=False, is_coalesced=source.is_coalesced()
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
    if isinstance(first, RowGradient):
        in_place = is_in_place(name)
        plain = _plain_name(name)
        if name in _ITSELF and not first.requires_grad:
            return first
        if name in _ROWS:
            return RowGradient.of(func(first, *rest, **kwargs), first._table)
        if name == "to_dense":
            return _dense(first, "all its rows")
        if plain in _ELEMENTWISE and not any(_has_dimensions(each) for each in (*rest, *kwargs.values())):
            return _elementwise(func, plain, in_place, first, rest, kwargs)
        if name == "data=":
            return _in_place(torch.Tensor.copy_, "data", first, rest, kwargs)
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
            return first if in_place else RowGradient.of(summed, first._table)
        if in_place:
            return _in_place(func, name, first, rest, kwargs)
    if name in ("numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__"):
        raise UnsupportedError(
            f"{name}() was called on the gradient of the table {_first(args)._table.name!r}, whose rows lie apart",
            todo="Call it on weight.grad.to_dense(), or on its values: weight.grad.coalesce().values().",
        )
    return _on_dense(func, name, args, kwargs)


def _on_dense(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made: list[torch.Tensor] = []
    out = kwargs.get("out")
    if isinstance(out, RowGradient):
        return _in_place(
            torch.Tensor.copy_, name, out, (func(*changed(args, _as_dense(name)), **{**kwargs, "out": None}),), {}
        )
    if any(isinstance(each, RowGradient) for each in _listed(out)):
        raise UnsupportedError(
            f"{name}() was to write into the gradient of a table", todo="Assign the result: weight.grad = …."
        )

    def dense(value: Any) -> Any:
        if not isinstance(value, RowGradient):
            return value
        made.append(_dense(value, f"{name}()"))
        return made[-1]

    given, named = changed(args, dense), changed(kwargs, dense)
    result = func(*given, **named)
    memory = {each.untyped_storage().data_ptr() for each in made}
    if not is_in_place(name) and any(each.untyped_storage().data_ptr() in memory for each in _tensors(result)):
        # A part of the gradient: what is written into it would not reach the gradient, and torch refuses to.
        with nullcontext() if any(each.requires_grad for each in made) else torch.inference_mode():
            return changed(result, lambda each: each.clone() if isinstance(each, torch.Tensor) else each)
    return result


def _elementwise(
    func: Callable[..., Any],
    plain: str,
    in_place: bool,
    gradient: RowGradient,
    rest: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    of_zero = func(gradient._values().new_zeros(1), *rest, **kwargs)
    if bool(of_zero != 0) and of_zero.dtype is not torch.bool:  # NaN is not zero either
        return (
            _in_place(func, plain, gradient, rest, kwargs)
            if in_place
            else _on_dense(func, plain, (gradient, *rest), kwargs)
        )
    if plain not in _LINEAR:
        gradient = coalesce(gradient)  # type: ignore[assignment]
    found = func(gradient._values(), *rest, **kwargs)
    if in_place:
        return gradient
    return RowMarks(gradient, found, of_zero) if of_zero.dtype is torch.bool else _rows(gradient, found)


def _in_place(
    func: Callable[..., Any], name: str, gradient: RowGradient, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> RowGradient:
    """Do it to the dense gradient; it keeps the rows that it has then."""
    dense = _dense(gradient, f"{name}()")
    func(dense, *changed(rest, _as_dense(name)), **changed(kwargs, _as_dense(name)))
    held = (dense != 0).any(1)
    held[gradient._indices()[0]] = True
    ids = held.nonzero().view(1, -1)
    gradient.data = torch.sparse_coo_tensor(ids, dense[ids[0]], dense.shape, check_invariants=False, is_coalesced=True)
    return gradient


def _counted(gradient: RowGradient) -> torch.Tensor:
    """Return all numbers of the gradient, and one zero for those that are not there."""
    values = coalesce(gradient)._values()
    return torch.cat([values.flatten(), values.new_zeros(1)]) if _has_zeros(gradient) else values


def _counted_by_all(gradient: RowGradient) -> torch.Tensor:
    """Return what ``_counted`` does, of the mean gradient of all workers where these have to agree."""
    averaged = gradient._table.averaged(coalesce(gradient))
    return _counted(gradient) if averaged is None else torch.cat([averaged.flatten(), averaged.new_zeros(1)])


def _as_dense(name: str) -> Callable[[Any], Any]:
    return lambda value: _dense(value, f"{name}()") if isinstance(value, RowGradient) else value


def _has_graph(value: Any) -> bool:
    """Say whether a gradient of a table among these is itself to be differentiated."""
    if isinstance(value, list | tuple):
        return any(map(_has_graph, value))
    return isinstance(value, RowGradient) and value.requires_grad


def _plain_name(name: str) -> str:
    return name[:-1] if is_in_place(name) and not name.startswith("__") else name


def _has_dimensions(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


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


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _first(args: tuple[Any, ...]) -> RowGradient:
    return next(each for each in args if isinstance(each, RowGradient))
