"""Tells what a call of one of torch's functions is, and what it writes into, before it is made.

Torch says so in the schemas of its operators. A function of Python's has none: what it may write, by ``inplace=`` or
any other way, is found afterwards, by comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket

_NATIVE = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
_OPERATORS = (OpOverload, OpOverloadPacket)
_OF_TORCH = "aten::"
_AUGMENTED = {
    *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
}
#: They write into more than their schemas tell: running means, and noise.
_UNTOLD = {
    *("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm"),
    *("_batch_norm_impl_index", "rrelu_with_noise", "rrelu_with_noise_"),
}


class Written(NamedTuple):
    """Holds the arguments that a call writes into, and whether these are known to be all."""

    into: list[Any]
    is_all: bool

    def has(self, argument: Any) -> bool:
        return any(argument is each for each in self.into)


def name_of(func: Callable[..., Any]) -> str:
    """Return torch's name of a function; a property's own name, with ``=`` behind it if it is set. An operator that is
    not torch's has its namespace before it."""
    if isinstance(func, _OPERATORS):
        return _operator(func).removeprefix(_OF_TORCH)
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner: Any = func.__self__  # type: ignore[attr-defined]
        return str(owner.__name__) + ("" if name == "__get__" else "=")
    return name


def is_in_place(name: str) -> bool:
    """Say whether it is the name of a function that writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name[3:-2] in _AUGMENTED)
    return name.endswith("=") or (name.endswith("_") and not name.endswith("__"))


def written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Written:
    """Return what a call will write into."""
    name = name_of(func)
    places, is_told = _told(func, name)
    into = [*args[:1], *list(kwargs.values())[: not args]] if is_in_place(name) else []
    into += [args[each] for each in places if isinstance(each, int) and each < len(args)]
    into += [kwargs[each] for each in (*places, "out") if isinstance(each, str) and each in kwargs]
    return Written(list(_flat(into)), is_told)


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments or results with each of their parts changed, in lists, tuples and dicts too."""
    if type(value) is dict:
        return {key: changed(each, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(changed(each, change) for each in value)
    return change(value)


def _told(func: Callable[..., Any], name: str) -> tuple[frozenset[int | str], bool]:
    """Return the places and names of the arguments that are written into, as schemas tell it, and whether they do."""
    if isinstance(func, OpOverload):
        return _places((func._schema,)), func.namespace == "aten" and name not in _UNTOLD
    if isinstance(func, OpOverloadPacket):
        operator = _operator(func)
        return _of_operator(operator)[0], operator.startswith(_OF_TORCH) and name not in _UNTOLD
    if name.startswith("__") or getattr(func, "__name__", "").startswith("__"):
        return frozenset(), True  # Python's own operators, and properties
    if not isinstance(func, _NATIVE):
        return frozenset(), False
    places, is_there = _of_operator(_OF_TORCH + name)
    return places, is_there and name not in _UNTOLD


@lru_cache(maxsize=1024)
def _of_operator(operator: str) -> tuple[frozenset[int | str], bool]:
    """Return what all overloads of an operator write into, and whether there are any."""
    schemas = tuple(
        each
        for each in torch._C._jit_get_schemas_for_operator(operator)
        # Others of its name are TorchScript's own, for lists.
        if torch._C._dispatch_has_kernel(f"{each.name}.{each.overload_name}".removesuffix("."))
    )
    return _places(schemas), bool(schemas)


def _places(schemas: tuple[Any, ...]) -> frozenset[int | str]:
    found: set[int | str] = set()
    for schema in schemas:
        for place, each in enumerate(schema.arguments):
            if each.alias_info is not None and each.alias_info.is_write:
                found |= {each.name} if each.kwarg_only else {each.name, place}
    return frozenset(found | {"input"} if "self" in found else found)  # its name in Python


def _operator(func: OpOverload | OpOverloadPacket) -> str:
    return str(func._schema.name if isinstance(func, OpOverload) else func._qualified_op_name)


def _flat(values: list[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list | tuple):
            yield from each
        else:
            yield each
