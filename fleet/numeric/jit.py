"""Compiles plain Python loops over numpy arrays with numba when they are first called; no other file imports numba.

Importing numba takes half a second and compiling a function a few tenths, so neither happens before a function is
called: a process without sparse tables and hundreds of dense parameters pays for nothing. Compiled code runs without
the GIL and is kept on disk; numba picks the user's cache directory when the package's own is read-only.

The disk cache knows a function by its own file only. A compiled function may therefore call another one of the same
file, or one of another file whose meaning is fixed for ever (``mix``, ``fnv1a``, ``row``, ``prefetch``, ``copy_bytes``,
``touch``, ``read_file``, ``read_cached``, ``announce_read``, ``lying_at``, ``byte``, ``eight_bytes``,
``trailing_zeros``, ``ones``).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from fleet.base.interruption import start_uninterrupted

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


class Segments(NamedTuple):
    """Holds rows that lie in segments of 2 to the power of ``bits``; the maker of this keeps the segments alive."""

    addresses: npt.NDArray[np.uint64]  #: where each segment begins
    like: Array  #: one of them, for its type and width
    bits: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.like.dtype


#: What compiled functions take rows from with ``row``: a matrix, or segments.
Rows: TypeAlias = Array | Segments

P = ParamSpec("P")
R = TypeVar("R")

#: The advice that a part of a file will be read, where the system takes it.
_WILL_NEED: int | None = getattr(os, "POSIX_FADV_WILLNEED", None)

#: How a read says that it must not wait, where the system has such reads.
_NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None)

#: One lock for all: builds are rare and nest, and numba compiles one function at a time anyway.
_building = threading.RLock()


def _numba() -> Any:
    """Return the whole module: after an import that failed half-way, the next call begins anew."""
    try:
        import numba
    except BaseException:
        for name in [name for name in sys.modules if name.split(".")[0] == "numba"]:
            del sys.modules[name]
        raise
    return numba


def _undisturbed(work: Callable[[], R]) -> R:
    """Return what ``work`` returns; it comes to its end even if the caller is interrupted while waiting."""
    return start_uninterrupted(work, "fleet-compiling").result()


class Compiled(Generic[P, R]):
    """Holds a function that becomes machine code on its first call with each combination of argument types."""

    def __init__(self, function: Callable[P, R]) -> None:
        assert isinstance(function, FunctionType)
        self._function = function
        self._dispatcher: Callable[P, R] | None = None
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return (self._dispatcher or _undisturbed(self.native))(*args, **kwargs)
        except SystemError as error:
            # What a handler of a signal raised while numba looked at the arguments, such as a KeyboardInterrupt.
            raise error if error.__cause__ is None else error.__cause__ from None

    def native(self) -> Callable[P, R]:
        with _building:
            if self._dispatcher is None:
                self._dispatcher = self._build()
            return self._dispatcher

    def _build(self) -> Callable[P, R]:
        numba = _numba()
        source = self._function
        named = {name: source.__globals__.get(name) for name in source.__code__.co_names}
        called = {name: value.native() for name, value in named.items() if isinstance(value, Compiled | Intrinsic)}
        function = update_wrapper(FunctionType(source.__code__, {**source.__globals__, **called}), source)
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
        dispatcher: Any
        try:
            dispatcher = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # "cannot cache function": no directory on this machine can be written
            dispatcher = numba.njit(**options)(function)
        # What numba calls for argument types that it has not compiled yet.
        dispatcher._compile_for_args = _compiling(dispatcher._compile_for_args)
        return cast(Callable[P, R], dispatcher)


def _compiling(compile_for: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: _undisturbed(partial(compile_for, *args, **kwargs))


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Decorate a function over numpy arrays and numbers; see the module's text for what it may call."""
    return Compiled(function)


class Intrinsic(Generic[P, R]):
    """Names machine code for what Python cannot say. It exists inside compiled functions only."""

    def __init__(self, signed: Callable[..., Any], meaning: Callable[P, R]) -> None:
        self._signed = signed
        self._intrinsic: Any = None
        update_wrapper(self, meaning)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        raise NotImplementedError("only compiled functions can call this")

    def native(self) -> Any:
        with _building:
            if self._intrinsic is None:
                from numba.extending import intrinsic

                self._intrinsic = intrinsic(self._signed)
            return self._intrinsic


def _code(signed: Callable[..., Any]) -> Callable[[Callable[P, R]], Intrinsic[P, R]]:
    """Decorate a stub: ``signed`` gives numba its signature for the types of a call, and what emits its code."""
    return lambda meaning: Intrinsic(signed, meaning)


def _matrix(rows: Any) -> Any:
    """Return the type of ``rows``, or of the segment in it."""
    from numba import types

    return rows if isinstance(rows, types.Array) else rows.types[1]


def _located(context: Any, builder: Any, kind: Any, rows: Any, number: Any) -> tuple[Any, Any]:
    """Return a pointer to the first byte of a row, and the matrix or segment whose rows are like it."""
    from llvmlite import ir
    from numba import types

    word = ir.IntType(64)
    if isinstance(kind, types.Array):
        like = context.make_array(kind)(context, builder, rows)
        start, within = builder.ptrtoint(like.data, word), number
    else:
        addresses, like, bits = (builder.extract_value(rows, position) for position in range(3))
        starts = context.make_array(kind.types[0])(context, builder, addresses).data
        like = context.make_array(kind.types[1])(context, builder, like)
        segment = builder.lshr(number, bits)
        start, within = builder.load(builder.gep(starts, [segment])), builder.sub(number, builder.shl(segment, bits))
    offset = builder.mul(within, builder.extract_value(like.strides, 0))
    return builder.inttoptr(builder.add(start, offset), ir.IntType(8).as_pointer()), like


def _row(_context: Any, rows: Any, _number: Any) -> Any:
    from numba import types
    from numba.np import arrayobj

    filled: Any = arrayobj.populate_array
    row = types.Array(_matrix(rows).dtype, 1, "C")

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, like = _located(context, builder, rows, *args)
        made = context.make_array(row)(context, builder)
        shape, strides = (builder.extract_value(each, 1) for each in (like.shape, like.strides))
        filled(made, builder.bitcast(address, made.data.type), [shape], [strides], like.itemsize, None)
        return made._getvalue()

    return row(rows, types.int64), emit


def _lying_at(_context: Any, like: Any, _address: Any, _size: Any) -> Any:
    from numba import types
    from numba.core import cgutils
    from numba.np import arrayobj

    filled: Any = arrayobj.populate_array
    array = types.Array(like.dtype, 1, "C")

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        itemsize = context.make_array(like)(context, builder, args[0]).itemsize
        made = context.make_array(array)(context, builder)
        data = builder.inttoptr(args[1], made.data.type)
        packed: Any = cgutils.pack_array
        shape, strides = (packed(builder, [each]) for each in (args[2], itemsize))
        filled(made, data, shape, strides, itemsize, None)
        return made._getvalue()

    return array(like, types.int64, types.int64), emit


def _prefetch(_context: Any, rows: Any, _number: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        none = args[1].type(0)
        number = builder.select(builder.icmp_signed("<", args[1], none), none, args[1])
        (address, _), flag = _located(context, builder, rows, args[0], number), ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [address.type, flag, flag, flag])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [address.type], shape)
        builder.call(hint, [address, flag(0), flag(3), flag(1)])  # for reading, into the nearest cache, data
        return context.get_dummy_value()

    return types.void(rows, types.int64), emit


def _copy_bytes(_context: Any, rows: Any, _number: Any, source: Any, _start: Any, _size: Any) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    copied: Any = cgutils.raw_memcpy

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number, given, start, size = args[1:]
        address, _ = _located(context, builder, rows, args[0], number)
        data = context.make_array(source)(context, builder, given).data
        copied(builder, address, builder.gep(data, [start]), size, ir.IntType(64)(1))
        return context.get_dummy_value()

    return types.void(rows, types.int64, source, types.int64, types.int64), emit


def _touch(_context: Any, rows: Any, _number: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, _ = _located(context, builder, rows, *args)
        nothing = ir.IntType(8)(0)
        builder.cmpxchg(address, nothing, nothing, "monotonic", "monotonic")
        return context.get_dummy_value()

    return types.void(rows, types.int64), emit


def _read_file(_context: Any, rows: Any, _number: Any, _file: Any, _offset: Any, _size: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number, file, offset, size = args[1:]
        address, _ = _located(context, builder, rows, args[0], number)
        short, word = ir.IntType(32), ir.IntType(64)
        shape = ir.FunctionType(word, [short, address.type, word, word])
        read = _declared(builder.module, "pread", shape)
        return builder.call(read, [builder.trunc(file, short), address, size, offset])

    return types.int64(rows, types.int64, types.int64, types.int64, types.int64), emit


def _read_cached(_context: Any, rows: Any, _number: Any, _file: Any, _offset: Any, _size: Any) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    allocated: Any = cgutils.alloca_once

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        short, word = ir.IntType(32), ir.IntType(64)
        if _NO_WAIT is None:
            return word(-1)
        number, file, offset, size = args[1:]
        address, _ = _located(context, builder, rows, args[0], number)
        whither = allocated(builder, ir.LiteralStructType([address.type, word]))
        builder.store(address, builder.gep(whither, [short(0), short(0)]))
        builder.store(size, builder.gep(whither, [short(0), short(1)]))
        shape = ir.FunctionType(word, [short, whither.type, short, word, short])
        read = _declared(builder.module, "preadv2", shape)
        return builder.call(read, [builder.trunc(file, short), whither, short(1), offset, short(_NO_WAIT)])

    return types.int64(rows, types.int64, types.int64, types.int64, types.int64), emit


def _announce_read(_context: Any, _file: Any, _offset: Any, _size: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if _WILL_NEED is not None:
            file, offset, size = args
            short, word = ir.IntType(32), ir.IntType(64)
            advise = _declared(builder.module, "posix_fadvise", ir.FunctionType(short, [short, word, word, short]))
            builder.call(advise, [builder.trunc(file, short), offset, size, short(_WILL_NEED)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _byte(_context: Any, text: Any, _at: Any) -> Any:
    from numba import types

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        data = context.make_array(text)(context, builder, args[0]).data
        return builder.zext(builder.load(builder.gep(data, [args[1]])), context.get_value_type(types.int64))

    return types.int64(text, types.int64), emit


def _eight_bytes(_context: Any, text: Any, _at: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        data = context.make_array(text)(context, builder, args[0]).data
        word = builder.load(builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer()))
        word.align = 1
        if sys.byteorder == "big":
            word = builder.bswap(word)
        return word

    return types.uint64(text, types.int64), emit


def _trailing_zeros(_context: Any, _word: Any) -> Any:
    from llvmlite import ir
    from numba import types

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(0))

    return types.int64(types.uint64), emit


def _ones(_context: Any, _word: Any) -> Any:
    from numba import types

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), emit


def _declared(module: Any, name: str, shape: Any) -> Any:
    """Return a function of the C library, which every process has."""
    from llvmlite import ir

    return module.globals[name] if name in module.globals else ir.Function(module, shape, name)


@_code(_row)
def row(rows: Rows, number: Any) -> Array:  # type: ignore[empty-body]
    """Return one row, to read and to write in place. Nobody checks whether there is one."""


@_code(_lying_at)
def lying_at(like: Array, address: Any, size: Any) -> Array:  # type: ignore[empty-body]
    """Return the flat array of so many elements, of the type of another one, that lies at an address. The caller keeps
    what is there."""


@_code(_copy_bytes)
def copy_bytes(rows: Rows, number: Any, source: Array, start: Any, size: Any) -> None:
    """Copy so many bytes of ``source``, which is of bytes, to the beginning of a row. Nobody checks whether they
    fit."""


@_code(_read_file)
def read_file(rows: Rows, number: Any, file: Any, offset: Any, size: Any) -> int:  # type: ignore[empty-body]
    """Read so many bytes of a file into the beginning of a row, and return how many came; less than none is an error.
    Nobody checks whether they fit."""


@_code(_read_cached)
def read_cached(rows: Rows, number: Any, file: Any, offset: Any, size: Any) -> int:  # type: ignore[empty-body]
    """Do as ``read_file`` if the system has all of it in memory; else less comes, or none."""


@_code(_announce_read)
def announce_read(file: Any, offset: Any, size: Any) -> None:
    """Tell the system that these bytes of a file will be read soon, so that it fetches many places at once."""


@_code(_prefetch)
def prefetch(rows: Rows, number: Any) -> None:
    """Ask for the first cache line of a row some iterations before it is needed.

    Rows of a large table lie anywhere in memory, and waiting for them takes most of the time of every row loop. This is
    only a hint, so nothing changes but the speed; a negative number, which stands for "no row", asks for the first one.
    """


@_code(_byte)
def byte(text: Array, at: Any) -> int:  # type: ignore[empty-body]
    """Return a byte of ``text``, which is of bytes. Nobody checks whether there is one."""


@_code(_eight_bytes)
def eight_bytes(text: Array, at: Any) -> Any:
    """Return as a uint64 the eight bytes of ``text`` that begin there, the first one lowest. Nobody checks whether
    there are as many."""


@_code(_trailing_zeros)
def trailing_zeros(word: Any) -> int:  # type: ignore[empty-body]
    """Return how many bits of a uint64 are 0 below the lowest that is 1; 64 if there is none."""


@_code(_ones)
def ones(word: Any) -> int:  # type: ignore[empty-body]
    """Return how many bits of a uint64 are 1."""


@_code(_touch)
def touch(rows: Rows, number: Any) -> None:
    """Write to a row's first byte what is there already; other threads may write to the row meanwhile.

    A system hands out memory when it is first written to, and takes its time. Touching gets it before it is needed.
    """


#: Rows between the one a loop works on and the one it asks for.
AHEAD = 16
