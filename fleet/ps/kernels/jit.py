"""Plain Python loops over numpy arrays, compiled by numba when they are first called; the only file that imports it.

Importing numba takes half a second and compiling a function a few tenths, so neither happens before a function is
called: a process that touches no sparse table pays for nothing. Compiled code runs without the GIL and is kept on
disk; numba picks the user's cache directory when the package's own is read-only.

The disk cache knows a function by its own file only. A compiled function may therefore call another one of the same
file, or one of another file whose meaning is fixed for ever (``mix``, ``prefetch``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]

P = ParamSpec("P")
R = TypeVar("R")

#: One lock for all: builds are rare and nest, and numba compiles one function at a time anyway.
_building = threading.RLock()


class Compiled(Generic[P, R]):
    """A function that turns into machine code on its first call with each combination of argument types."""

    def __init__(self, function: Callable[P, R]) -> None:
        assert isinstance(function, FunctionType)
        self._function = function
        self._dispatcher: Callable[P, R] | None = None
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self._dispatcher or self.native())(*args, **kwargs)

    def native(self) -> Callable[P, R]:
        with _building:
            if self._dispatcher is None:
                self._dispatcher = self._build()
            return self._dispatcher

    def _build(self) -> Callable[P, R]:
        import numba

        source = self._function
        named = {name: source.__globals__.get(name) for name in source.__code__.co_names}
        called = {name: value.native() for name, value in named.items() if isinstance(value, Compiled | Prefetch)}
        function = update_wrapper(FunctionType(source.__code__, {**source.__globals__, **called}), source)
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
        dispatcher: Any
        try:
            dispatcher = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # "cannot cache function": no directory on this machine can be written
            dispatcher = numba.njit(**options)(function)
        return cast(Callable[P, R], dispatcher)


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Decorate a function over numpy arrays and numbers; see the module's text for what it may call."""
    return Compiled(function)


class Prefetch:
    """``prefetch(array, row)``: ask for the first cache line of a row some iterations before it is needed.

    Rows of a large table lie anywhere in memory, and waiting for them is most of the time of every row loop. Only a
    hint: any row number is allowed, and nothing changes but the speed. It exists inside compiled functions only.
    """

    def __init__(self) -> None:
        self._intrinsic: Any = None

    def __call__(self, array: Array, row: Any) -> None: ...

    def native(self) -> Any:
        with _building:
            if self._intrinsic is None:
                self._intrinsic = self._build()
            return self._intrinsic

    def _build(self) -> Any:
        from llvmlite import ir
        from numba import types
        from numba.extending import intrinsic

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            base = builder.bitcast(array.data, ir.IntType(8).as_pointer())
            address = builder.gep(base, [builder.mul(args[1], builder.extract_value(array.strides, 0))])
            flag = ir.IntType(32)
            shape = ir.FunctionType(ir.VoidType(), [address.type, flag, flag, flag])
            hint = builder.module.declare_intrinsic("llvm.prefetch", [address.type], shape)
            builder.call(hint, [address, flag(0), flag(3), flag(1)])  # for reading, into the nearest cache, data
            return context.get_dummy_value()

        def typed(_context: Any, array: Any, _row: Any) -> Any:
            return types.void(array, types.int64), emit

        return intrinsic(typed)


prefetch = Prefetch()

#: Rows between the one a loop works on and the one it asks for.
AHEAD = 8
