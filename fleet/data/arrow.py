"""Turns Arrow's arrays into rows, for the formats that pyarrow reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fleet.data.batches import Rows, interleaved
from fleet.data.columns import Column, Floats, Ids, Layout
from fleet.errors import UnsupportedError
from fleet.numeric.ids import fnv1a
from fleet.numeric.jit import compiled

#: Told of a malformed row: its number, the column, what was expected and what was found.
Report = Callable[[int, str, str, str], None]


def pyarrow(what: str) -> Any:
    """Import pyarrow, or say how to get it."""
    try:
        import pyarrow as arrow
    except ImportError:
        raise UnsupportedError(f"{what} needs pyarrow", todo="pip install 'torch-fleet[arrow]'") from None
    return arrow


def is_list(kind: Any) -> bool:
    types = pyarrow("Arrow").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def fits(kind: Any, column: Ids | Floats) -> bool:
    """Say whether a column of this type can be read as it was declared."""
    types = pyarrow("Arrow").types
    if is_list(kind):
        kind = kind.value_type
    elif column.width not in (None, 1):
        return False
    if isinstance(column, Floats):
        return bool(
            types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind)
        )
    if column.hash:
        if types.is_dictionary(kind):
            kind = kind.value_type
        return any(
            is_a(kind) for is_a in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
        )
    return bool(types.is_integer(kind) or types.is_boolean(kind))


class _Taken(NamedTuple):
    """Holds one column: its values one after the other, and how many each row has, unless that is its width."""

    values: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64] | None
    bad: dict[int, tuple[str, str]]


def rows_of(
    arrays: Mapping[str, Any], number: int, columns: Mapping[str, Column], layout: Layout, report: Report
) -> Rows:
    """Return those of so many rows that are not malformed; report the others, in their order."""
    taken = {name: _taken(array, columns[name]) for name, array in arrays.items()}
    bad = {row: (name, *told) for name, each in reversed(taken.items()) for row, told in each.bad.items()}
    for row in sorted(bad):
        report(row, *bad[row])
    if bad:
        keep = np.ones(number, np.bool_)
        keep[list(bad)] = False
        number -= len(bad)
        taken = {name: _kept(each, keep, columns[name]) for name, each in taken.items()}
    parts = [(taken[name], columns[name].width) for name in layout.names]  # type: ignore[union-attr]
    flat = [(each.values, None if width else _offsets(each.lengths)) for each, width in parts]
    return interleaved(flat, number, layout)


def _offsets(lengths: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
    assert lengths is not None
    return np.append(0, np.cumsum(lengths))


def _kept(taken: _Taken, keep: npt.NDArray[np.bool_], column: Column) -> _Taken:
    assert isinstance(column, Ids | Floats)
    if taken.lengths is None:
        return _Taken(taken.values[np.repeat(keep, column.width or 1)], None, {})
    return _Taken(taken.values[np.repeat(keep, taken.lengths)], taken.lengths[keep], {})


def _taken(array: Any, column: Column) -> _Taken:
    assert isinstance(column, Ids | Floats)
    arrow = pyarrow("Arrow")
    is_whole = False
    if is_list(array.type):
        array = array.cast(arrow.large_list(array.type.value_type))
        lengths = arrow.compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        array = array.flatten()
        if arrow.types.is_dictionary(array.type):
            array = array.cast(array.type.value_type)
        empty = array.is_null().to_numpy(zero_copy_only=False)
        owners = np.repeat(np.arange(len(lengths)), lengths)[empty]
        bad = {int(row): ("values", "a null in the list") for row in owners}
        array = array.fill_null(_neutral(array.type)) if len(owners) else array
    elif array.null_count:
        lengths = array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
        array = array.drop_null()
        bad = {}
    else:
        is_whole, lengths, bad = column.width is not None, np.ones(len(array), np.int64), {}
    values = _numbers(array, column)
    if isinstance(column, Floats) and values.dtype != np.float32:
        given = values
        with np.errstate(over="ignore"):
            values = given.astype(np.float32)
        if np.isinf(values).any():
            lost = np.isinf(values) & np.isfinite(given)
            owners = np.repeat(np.arange(len(lengths)), lengths)[lost]
            for row, value in zip(owners.tolist(), given[lost], strict=True):
                bad[row] = ("a number that a float32 can hold", str(value))
    if is_whole:
        return _Taken(values, None, bad)
    if column.width is None:
        return _Taken(values, lengths, bad)
    missing = (lengths == 0) if column.missing is not None else np.zeros(len(lengths), np.bool_)
    for row in np.flatnonzero((lengths != column.width) & ~missing).tolist():
        got = "nothing" if lengths[row] == 0 else f"{lengths[row]}"
        bad[row] = ("a value" if column.width == 1 else f"{column.width} values", got)
    if not missing.any():
        return _Taken(values, lengths, bad)
    sizes = np.where(missing, column.width, lengths)
    filled = np.full(sizes.sum(), column.missing, values.dtype)
    filled[np.repeat(~missing, sizes)] = values
    return _Taken(filled, sizes, bad)


def _neutral(kind: Any) -> Any:
    """Return what can stand where a null was, in a row that is dropped."""
    types = pyarrow("Arrow").types
    if types.is_string(kind) or types.is_large_string(kind):
        return ""
    if types.is_binary(kind) or types.is_large_binary(kind):
        return b""
    return False if types.is_boolean(kind) else 0


def _numbers(array: Any, column: Ids | Floats) -> npt.NDArray[Any]:
    arrow = pyarrow("Arrow")
    if isinstance(column, Floats):
        if arrow.types.is_decimal(array.type):
            array = array.cast(arrow.float64())
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if column.hash:
        array = array.cast(arrow.large_binary())
        ids = np.empty(len(array), np.int64)
        _, offsets, text = array.buffers()
        bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        _hash(np.frombuffer(text, np.uint8) if text else np.empty(0, np.uint8), bounds, ids)
        return ids
    numbers = np.asarray(array.to_numpy(zero_copy_only=False))
    return numbers.view(np.int64) if numbers.dtype == np.uint64 else numbers.astype(np.int64, copy=False)


@compiled
def _hash(text: Any, bounds: Any, ids: Any) -> None:
    """Write the hash of each string's bytes into ``ids``."""
    for k in range(len(ids)):
        ids[k] = fnv1a(text, bounds[k], bounds[k + 1])
