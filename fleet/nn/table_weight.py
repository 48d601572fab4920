"""Stands for a table in a script's hands: a parameter of the table's shape, and a leaf of autograd, without memory.

What it holds is one NaN, spread over the shape: whatever computes with its memory behind our back shows it. What goes
through torch's functions gets the values of all rows, fetched together, where the table is small enough for a worker
(``FLEET_WHOLE_TABLE_MB``); metadata, gradients and hooks are the leaf's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor

from fleet.errors import UnsupportedError
from fleet.nn.calls import changed, name_of, written
from fleet.nn.gradient import RowGradient, Table
from fleet.nn.whole_values import WholeValues
from fleet.numeric.compiler import uncompiled

_ATTRIBUTE = "_fleet_handle"

#: What the leaf itself answers.
_OF_LEAF = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "__hash__", "dtype", "device"),
    *("layout", "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xla", "is_xpu", "is_mtia", "is_hpu"),
    *("is_maia", "is_ipu", "is_vulkan", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "itemsize"),
    *("nbytes", "element_size", "get_device", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg"),
    *("is_inference", "is_leaf", "requires_grad", "requires_grad=", "requires_grad_", "grad_fn", "_grad_fn"),
    *("retains_grad", "retain_grad", "grad=", "_grad=", "_version", "_base", "_is_view", "output_nr", "name", "names"),
    *("has_names", "is_shared", "share_memory_", "is_pinned", "register_post_accumulate_grad_hook", "grad_dtype"),
    *("grad_dtype=", "_backward_hooks", "_backward_hooks=", "_post_accumulate_grad_hooks", "is_same_size"),
    *("_post_accumulate_grad_hooks=", "detach_", "is_distributed", "volatile", "new_empty", "new_zeros", "new_ones"),
    *("new_full", "new_tensor", "new_empty_strided", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("rand_like", "randn_like", "randint_like", "result_type", "can_cast", "untyped_storage", "data_ptr"),
    *("stride", "storage_offset", "is_contiguous", "is_set_to"),
    *("backward", "_clear_non_serializable_cached_data", "requires_grad_for_backward", "is_tensor"),
}
#: Done to itself, they are how scripts find the node that accumulates its gradient.
_OF_ITSELF = {"view_as", "expand_as"}
#: What makes another parameter of it, or the same if it is so already.
_CONVERSIONS = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous"}
_LIKE = {"zeros_like", "ones_like", "full_like", "empty_like"}


class WholeTable(Table, Protocol):
    """Says what the weight has to know of its table."""

    @property
    def is_running(self) -> bool: ...

    def whole(self) -> WholeValues:
        """Return the values of all rows; raise where they cannot be had."""
        ...

    def unattached_twin(self) -> torch.nn.Parameter:
        """Return another weight, for a table of its own, made like this one."""
        ...


class TableWeight(torch.nn.Parameter):
    """Is the ``weight`` of an embedding whose rows live on the servers."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in _OF_LEAF:
            return _of_leaf(func, name, args, kwargs)
        if name in _OF_ITSELF and len(args) == 2 and args[0] is args[1]:
            return _of_leaf(func, name, args, kwargs)
        if func is torch.autograd.grad:
            return _grad(func, *args, **kwargs)
        if name in ("grad", "_grad"):
            return gradient_of(args[0])
        special = _SPECIAL.get(name)
        if special is not None:
            return special(func, *args, **kwargs)
        return _of_values(func, name, args, kwargs)

    # Two that torch does not hand to ``__torch_function__``.

    def set_(self, *source: Any, **_: Any) -> Any:
        if source and source[0] is self:
            return self
        raise _refused(table_of(self), "set_() would give it another memory")

    def as_subclass(self, kind: Any) -> Any:
        return _of_values(torch.Tensor.as_subclass, "as_subclass", (self, kind), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Copy the weight. Before the job the table has no values, and a copy is for a job of its own; in the job a
        copy holds the values."""
        if id(self) not in memo:
            table = table_of(self)
            if table.is_running:
                memo[id(self)] = torch.nn.Parameter(table.whole().tensor.clone(), self.requires_grad)
            else:
                memo[id(self)] = table.unattached_twin()
        copied: torch.nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = torch.nn.Parameter(table_of(self).whole().tensor.clone(), self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Parameter of the table {table_of(self).name!r}, whose rows are on the servers: {tuple(self.shape)}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _not_shared(weight: TableWeight) -> NoReturn:
    """Refuse to share with another process what would be memory of this one, and lies on the servers."""
    table = table_of(weight)
    if not table.is_running:
        table.whole()  # which says that the job has not begun, or is over
    raise UnsupportedError(
        f"the rows of {table.name!r} cannot be shared with another process: they live on the servers",
        todo="Start that process with fork, or send it model.state_dict() or what it looks up.",
    )


def _sent(gradient: RowGradient) -> Any:
    """Send a gradient to another process as torch sends the sparse tensor that it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return reduce_tensor(gradient)  # type: ignore[no-untyped-call]


ForkingPickler.register(TableWeight, _not_shared)
ForkingPickler.register(RowGradient, _sent)


def hollow(weight: torch.nn.Parameter, rows: int | None, dtype: torch.dtype, device: torch.device) -> None:
    """Turn a parameter into one that holds nothing, in place."""
    with torch._C.DisableTorchFunctionSubclass():
        dim = weight.shape[-1]
        nothing = torch.full((1, 1), math.nan, dtype=dtype, device=device)
        weight.data = nothing.new_empty(0, dim) if rows is None else nothing.expand(rows, dim)
        hooks = weight._backward_hooks
        if type(weight) is not TableWeight and hooks:
            for key, hook in list(hooks.items()):
                hooks[key] = _seeing_rows(weight, hook)
    weight.__class__ = TableWeight


def table_of(weight: torch.Tensor) -> WholeTable:
    found: WholeTable = getattr(weight, _ATTRIBUTE)
    return found


@uncompiled
def gradient_of(weight: torch.Tensor) -> torch.Tensor | None:
    """``weight.grad``, which answers as a dense gradient does where it is one of rows."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = weight.grad
        if gradient is not None and gradient.layout is torch.sparse_coo and type(gradient) is not RowGradient:
            RowGradient.of(gradient, table_of(weight))
        return gradient


class _Values(torch.autograd.Function):
    """Holds all values of a table, with a gradient for its weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return values.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: it is there because ``torch.func`` asks for it."""

    @staticmethod
    def jvp(ctx: Any, of_weight: Any, of_values: Any) -> Any:  # noqa: ARG004
        return of_weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


def of_wrapped(weight: torch.Tensor) -> torch.Tensor:
    """Return the values for a table's weight that a transformation of ``torch.func`` has wrapped, with a gradient for
    what it has made of it; any other tensor as it is. Torch wraps without asking, and all that is wrapped is NaN."""
    functorch, inner = torch._C._functorch, weight
    while functorch.is_functorch_wrapped_tensor(inner):
        inner = functorch.get_unwrapped(inner)
    # A row that ``vmap`` has dealt out is no matrix, which torch's functions refuse.
    if inner is weight or not isinstance(inner, TableWeight) or weight.shape != inner.shape:
        return weight
    values: torch.Tensor = _Values.apply(weight, table_of(inner).whole().tensor)  # type: ignore[no-untyped-call]
    return values


def _of_leaf(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if name in _LIKE and args and isinstance(args[0], TableWeight) and not table_of(args[0]).is_running:
            # Optimizers make such state when they are constructed, of which the rows' part is the servers'.
            return func(args[0][:1, :1], *args[1:], **kwargs).expand(args[0].shape)
        return func(*args, **kwargs)


@uncompiled
def _of_values(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what torch makes of the values; what is written into them is an edit of the table."""
    writes = written(func, args, kwargs)
    given: list[_Given] = []

    def value(each: Any) -> Any:
        if not isinstance(each, TableWeight):
            return each
        whole = table_of(each).whole()
        is_written = writes.has(each)
        before = None if is_written or writes.is_all else whole.copied()
        with torch._C.DisableTorchFunctionSubclass():
            if is_written:
                whole.expose()
                shown = whole.tensor.detach().requires_grad_(each.requires_grad)  # which torch refuses to change
            elif torch.is_grad_enabled() and each.requires_grad:
                shown = _Values.apply(each, whole.tensor)  # type: ignore[no-untyped-call]
            else:
                shown = whole.tensor.detach()
        given.append(_Given(each, whole, shown, shown.grad_fn, before))
        return shown

    def back(each: Any) -> Any:
        return next((one.weight for one in given if one.shown is each), each)

    result = func(*changed(args, value), **changed(kwargs, value))
    for one in given:
        is_written = writes.has(one.weight) or _was_written(one)
        if is_written and (one.shown.shape != one.whole.tensor.shape or not one.whole.shares_memory(one.shown)):
            raise _refused(table_of(one.weight), f"{name}() would give it another shape or memory")
    result = changed(result, back)
    for one in given:
        if one.whole.shares_memory(result):
            one.whole.expose()
    return result


class _Given(NamedTuple):
    """Holds what a function is given for a weight, and what the values were if it may change them unseen."""

    weight: TableWeight
    whole: WholeValues
    shown: torch.Tensor
    node: Any
    before: torch.Tensor | None


def _was_written(one: _Given) -> bool:
    """Say whether a function has written into values of which that was not known; it is an edit then."""
    if one.before is None or not one.whole.differs(one.before):
        return False
    if one.shown.grad_fn is not one.node:
        one.whole.put_back(one.before)
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    one.whole.expose(one.before)
    return True


def _refused(table: WholeTable, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the weight of the table {table.name!r} stays as it is for its job: {what}",
        todo="Change its values in place, or work on a copy: weight.detach().clone().",
    )


# ---------------------------------------------------------------- what is neither


def _shown(_func: Callable[..., Any], weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the values, which the caller may change."""
    whole = table_of(weight).whole()
    whole.expose()
    return whole.tensor.detach()


def _assign(func: Callable[..., Any], weight: torch.Tensor, values: Any) -> None:
    if values is weight:
        return
    table = table_of(weight)
    if isinstance(values, TableWeight):
        values = _shown(func, values)
    with torch._C.DisableTorchFunctionSubclass():
        if values.shape != weight.shape or values.dtype is not weight.dtype or values.layout is not torch.strided:
            raise _refused(table, f"it was given {values.dtype} {tuple(values.shape)} for its data")
        if values.device != weight.device:
            hollow(weight, table.num_embeddings, values.dtype, values.device)  # type: ignore[arg-type]
    table.whole().assign(values.detach())


def _converted(func: Callable[..., Any], weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(weight, TableWeight):  # x.to(weight)
        with torch._C.DisableTorchFunctionSubclass():
            return func(weight, *args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        probe = weight.new_empty(1, 1)
        is_so = func(probe, *args, **kwargs)
    if is_so is probe:
        return weight
    return is_so if isinstance(is_so, str) else _of_values(func, func.__name__, (weight, *args), kwargs)


def _register_hook(func: Callable[..., Any], weight: torch.Tensor, hook: Callable[..., Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(weight, _seeing_rows(weight, hook))


def _seeing_rows(weight: torch.Tensor, hook: Callable[..., Any]) -> Callable[..., Any]:
    table = table_of(weight)
    counts = getattr(hook, "__module__", None) == torch.autograd.graph.__name__  # those of register_multi_grad_hook

    def seeing(gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            # A function for several tables ran for others of them. In torch this one has its own, which would not
            # have run; but hooks that wait for all gradients have counted this one.
            return hook(None) if counts else None
        if gradient.layout is not torch.sparse_coo:
            return hook(gradient)
        other = hook(RowGradient.of(gradient, table))
        # Autograd goes on with the layout that it began with.
        is_dense = isinstance(other, torch.Tensor) and other.layout is torch.strided
        return other.to_sparse(1) if is_dense else other

    return seeing


def _grad(func: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad``."""
    if any(isinstance(each, TableWeight) for each in _listed(outputs)):
        return _of_values(func, "grad", (outputs, inputs, *args), kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        found = func(outputs, inputs, *args, **kwargs)
    return tuple(
        RowGradient.of(each, table_of(of))
        if isinstance(of, TableWeight) and each is not None and each.layout is torch.sparse_coo
        else each
        for of, each in zip(_listed(inputs), found, strict=True)
    )


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "data": _shown,
    "data=": _assign,
    "detach": _shown,
    "register_hook": _register_hook,
    **dict.fromkeys(_CONVERSIONS, _converted),
}
