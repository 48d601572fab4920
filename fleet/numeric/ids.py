"""Does to ids and rows what every optimizer needs: counts them, sends them to their server, sums, moves, invents them.

Arrays from outside go through ``packed`` before they reach a compiled function: one memory layout means one
compilation, so that nothing is left to compile once a server has said that it is ready. Compiled functions check no
bounds; their callers do.

``mix`` and what is made of it (``owner``, ``initial_rows``) are fixed for ever: processes of one job, and a job and its
checkpoints, must agree on them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fleet.numeric.jit import AHEAD, Array, Ids, Rows, Segments, byte, compiled, prefetch, row, touch

#: Step of the splitmix64 sequence: 2^64 divided by the golden ratio, made odd.
GAMMA = np.uint64(0x9E3779B97F4A7C15)

#: Where the hash of a string begins, and what it is multiplied by: those of its authors.
_FNV_BEGIN, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)

#: Codes of the initializers in ``initial_rows``.
CONSTANT, UNIFORM, NORMAL = 0, 1, 2


def packed(array: npt.ArrayLike, dtype: npt.DTypeLike) -> Array:
    """Return the array contiguous, aligned and writable, copied only if it is not: to the compiler, read-only is
    another type."""
    if isinstance(array, np.ndarray) and array.flags.carray and array.dtype == dtype:
        return array
    return np.require(array, np.dtype(dtype), ["C", "A", "W"])


def packed_ids(ids: npt.ArrayLike) -> Ids:
    return packed(ids, np.int64)


@compiled
def mix(x: np.uint64) -> np.uint64:
    """Apply the finalizer of splitmix64: a bijection of 64 bits in which every output bit depends on every input
    bit."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled
def fnv1a(text: Any, begin: int, end: int) -> Any:
    """Return the 64-bit FNV-1a hash of some bytes, as an int64."""
    state = _FNV_BEGIN
    for at in range(begin, end):
        state = (state ^ np.uint64(byte(text, at))) * _FNV_PRIME
    return np.int64(state)


@compiled
def bounds(ids: Ids) -> tuple[int, int]:
    """Return the least and the greatest of some ids, of which there is one: numpy looks twice, and takes longer to
    begin."""
    low = high = ids[0]
    for k in range(1, ids.size):
        low, high = min(low, ids[k]), max(high, ids[k])
    return low, high


@compiled
def first_outside(ids: Ids, stops: Ids, bounds: Ids) -> int:
    """Return the first of several tables that has an id outside of its bounds, the least and the greatest that it may
    be; -1 if none has. The ids of each table end at its stop."""
    start = 0
    for t in range(stops.size):
        low, high = bounds[t, 0], bounds[t, 1]
        for k in range(start, stops[t]):
            if ids[k] < low or ids[k] > high:
                return t
        start = stops[t]
    return -1


@compiled
def find_ordered(known: Ids, ends: Ids, places: Ids, ids: Ids, stops: Ids, numbers: Ids) -> int:
    """Find the number of each id among the known ones of its table, -1 if it is none; return how many are known. The
    ids of several tables end at their stops, and ``places`` says which tables these are; what is known of each table
    ends at its end, in ascending order."""
    start = count = 0
    for t in range(stops.size):
        place = places[t]
        first = last = 0
        if place < ends.size:
            first, last = ends[place - 1] if place else 0, ends[place]
        for k in range(start, stops[t]):
            low, high = first, last
            while low < high:
                middle = (low + high) >> 1
                if known[middle] < ids[k]:
                    low = middle + 1
                else:
                    high = middle
            numbers[k] = -1
            if low < last and known[low] == ids[k]:
                numbers[k] = low
                count += 1
        start = stops[t]
    return count


# ---------------------------------------------------------------------------------------------- de-duplication


def unique(ids: npt.ArrayLike) -> tuple[Ids, Ids]:
    """Return the distinct ids in the order they first appear, and for every id its place among them."""
    return _unique(packed_ids(ids))


def among(ids: Ids, others: Sequence[Ids]) -> npt.NDArray[np.bool_]:
    """Say of each id whether it is one of the others."""
    known = sum(map(len, others))
    if not known:
        return np.zeros(len(ids), np.bool_)
    # Distinct ids are numbered as they come first, so the others have the lowest numbers.
    _, numbers = unique(np.concatenate([*others, ids]))
    found: npt.NDArray[np.bool_] = numbers[known:] <= numbers[:known].max()
    return found


@compiled
def _unique(ids: Ids) -> tuple[Ids, Ids]:
    distinct, inverse = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    count = _enter_distinct(ids, distinct, inverse)
    return distinct[:count], inverse


class Distinct(NamedTuple):
    """Holds the distinct ids of several tables, one table after the other."""

    ids: Ids
    inverse: Ids  #: for every id its place among the distinct ones of its table
    stops: Ids  #: where each table's distinct ids end
    low: Ids  #: the least id of each table; 0 if it has none
    high: Ids  #: the greatest


def unique_each(ids: Ids, stops: Ids) -> Distinct:
    """Do for several tables what ``unique`` does for one; ``ids`` has those of one after those of the other, and each
    ends at its stop."""
    return Distinct(*_unique_each(packed_ids(ids), packed_ids(stops)))


@compiled
def _unique_each(ids: Ids, stops: Ids) -> tuple[Ids, Ids, Ids, Ids, Ids]:
    distinct, inverse = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    ends = np.empty(stops.size, np.int64)
    low, high = np.zeros(stops.size, np.int64), np.zeros(stops.size, np.int64)
    start = count = 0
    for t in range(stops.size):
        begin = count
        count += _enter_distinct(ids[start : stops[t]], distinct[begin:], inverse[start : stops[t]])
        for k in range(begin, count):
            if k == begin:
                low[t] = high[t] = distinct[k]
            low[t], high[t] = min(low[t], distinct[k]), max(high[t], distinct[k])
        start, ends[t] = stops[t], count
    return distinct[:count], inverse, ends, low, high


@compiled
def _enter_distinct(ids: Ids, distinct: Ids, inverse: Ids) -> int:
    """Put the distinct ones of some ids into ``distinct``, and the place of each among them into ``inverse``. Return
    how many they are. All begin at 0, as loops that begin elsewhere take twice as long."""
    bits = 4
    while (1 << bits) < 2 * ids.size:
        bits += 1
    shift, mask = np.uint64(64 - bits), (1 << bits) - 1
    index = np.zeros(1 << bits, np.uint32)  # place + 1, so that no id has to stand for "empty"
    for k in range(ids.size):  # by itself, as the processor computes several at once
        inverse[k] = np.int64(mix(np.uint64(ids[k])) >> shift)
    count = 0
    for k in range(ids.size):
        key, at = ids[k], inverse[k]
        place = np.int64(index[at])
        while place != 0 and distinct[place - 1] != key:
            at = (at + 1) & mask
            place = np.int64(index[at])
        if place == 0:
            distinct[count] = key
            count += 1
            place = np.int64(count)
            index[at] = place
        inverse[k] = place - 1
    return count


@compiled
def accumulate(places: Ids, grads: Array, total: Rows) -> None:
    """Add every row of ``grads`` to the row of ``total`` at its place, in the order they come, since the order decides
    the bits."""
    for k in range(places.size):
        if k + AHEAD < places.size:
            prefetch(total, places[k + AHEAD])
        into = row(total, places[k])
        for j in range(into.size):
            into[j] += grads[k, j]


@compiled
def accumulate_apart(places: Ids, grads: Array, together: int, apart: int, total: Rows) -> None:
    """Do what ``accumulate`` does for rows in groups: ``together`` rows lie side by side, and each group begins
    ``apart`` numbers after the one before; ``grads`` is all of that memory. Where all rows lie together, the other loop
    is a sixth faster."""
    begin = np.uint64(0)  # compiled code asks of every signed index whether it counts from the end
    for first in range(0, places.size, together):
        start = begin
        for k in range(first, first + together):
            if k + AHEAD < places.size:
                prefetch(total, places[k + AHEAD])
            into = row(total, places[k])
            for j in range(into.size):
                into[j] += grads[start + np.uint64(j)]
            start += np.uint64(into.size)
        begin += np.uint64(apart)


class Summed(NamedTuple):
    """Says where in memory the gradients of a table lie, and what they are added to."""

    ids: int  #: how many
    places: int  #: the address of their places
    grads: int  #: the address of the first row of gradient
    together: int  #: so many rows lie side by side, and then comes the next group
    apart: int  #: so many bytes after a group the next one begins
    into: int  #: the address of the sums


def accumulate_each(tables: Sequence[Summed], dim: int, dtype: npt.DTypeLike) -> None:
    """Do what ``accumulate_apart`` does for several tables whose rows have ``dim`` numbers of one type. The caller
    keeps what lies at the addresses."""
    places, grads, total = (
        Segments(np.zeros(1, np.uint64), np.empty((1, width), kind), _ONE_SEGMENT)
        for width, kind in ((1, np.int64), (dim, dtype), (dim, dtype))
    )
    _accumulate_each(np.array(tables, np.int64), places, grads, total)


#: More bits than a row's number has: all rows are of the first segment.
_ONE_SEGMENT = 62


@compiled
def _accumulate_each(tables: Ids, places: Segments, grads: Segments, total: Segments) -> None:
    for t in range(len(tables)):
        count, at, grad, together, apart, into = tables[t]
        places.addresses[0], total.addresses[0] = np.uint64(at), np.uint64(into)
        for first in range(0, count, max(1, together)):
            grads.addresses[0] = np.uint64(grad)
            for k in range(together):
                here, there = row(total, row(places, first + k)[0]), row(grads, k)
                for j in range(here.size):
                    here[j] += there[j]
            grad += apart


@compiled
def accumulate_bags(places: Ids, bags: Ids, scales: Array, grads: Array, total: Rows) -> None:
    """Add to the row of ``total`` at each place its bag's row of ``grads``, scaled, in the order they come."""
    for k in range(places.size):
        if k + AHEAD < places.size:
            prefetch(total, places[k + AHEAD])
        into, grad = row(total, places[k]), grads[bags[k]]
        for j in range(into.size):
            into[j] += scales[k] * grad[j]


# ---------------------------------------------------------------------------------------------- placement


def owner(ids: npt.ArrayLike, servers: int) -> Ids:
    """Return the server that each id lives on."""
    return _owner(packed_ids(ids), servers)


@compiled
def _owner(ids: Ids, servers: int) -> Ids:
    out = np.empty(ids.size, np.int64)
    for k in range(ids.size):
        out[k] = np.int64(mix(np.uint64(ids[k])) % np.uint64(servers))
    return out


def partition(ids: npt.ArrayLike, servers: int) -> list[Ids]:
    """Return for every server the places of its ids, in their order."""
    if servers == 1:
        return [np.arange(np.size(ids))]
    order, ends = _partition(packed_ids(ids), servers)
    return [order[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@compiled
def _partition(ids: Ids, servers: int) -> tuple[Ids, Ids]:
    owners = _owner(ids, servers)
    ends = np.zeros(servers, np.int64)  # begins as counts, becomes starts, and each advances to its end
    for k in range(owners.size):
        ends[owners[k]] += 1
    start = 0
    for s in range(servers):
        start, ends[s] = start + ends[s], start
    order = np.empty(owners.size, np.int64)
    for k in range(owners.size):
        order[ends[owners[k]]] = k
        ends[owners[k]] += 1
    return order, ends


# ---------------------------------------------------------------------------------------------- moving rows


@compiled
def gather(rows: Rows, slots: Ids, out: Array) -> int:
    """Copy rows out; a negative slot leaves its row of ``out`` as it is. Return how many of these there are."""
    absent = 0
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(rows, slots[k + AHEAD])
        if slots[k] >= 0:
            here = row(rows, slots[k])
            for j in range(here.size):
                out[k, j] = here[j]
        else:
            absent += 1
    return absent


@compiled
def lift(slots: Ids, stops: Ids, offsets: Ids, out: Ids) -> int:
    """Add to the slots of each of several tables, which end at its stop, the table's offset; a negative one stays as it
    is. Return how many of these there are."""
    start = absent = 0
    for t in range(stops.size):
        for k in range(start, stops[t]):
            if slots[k] >= 0:
                out[k] = slots[k] + offsets[t]
            else:
                out[k] = slots[k]
                absent += 1
        start = stops[t]
    return absent


@compiled
def scatter(rows: Rows, slots: Ids, values: Array) -> None:
    """Copy rows in."""
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(rows, slots[k + AHEAD])
        here = row(rows, slots[k])
        for j in range(here.size):
            here[j] = values[k, j]


@compiled
def stamp(rows: Rows, slots: Ids, number: int) -> None:
    """Set the rows at slots, which are of one element, to a number."""
    for k in range(slots.size):
        if k + AHEAD < slots.size:
            prefetch(rows, slots[k + AHEAD])
        row(rows, slots[k])[0] = number


#: Systems hand out memory by no less than this.
_PAGE_BYTES = 4096


def touch_pages(array: Array) -> None:
    """Make the system provide the memory of an array that is in one piece; other threads may write to it meanwhile."""
    if array.size:
        _touch_pages(array.reshape(-1).view(np.uint8).reshape(-1, 1), _PAGE_BYTES)


@compiled
def _touch_pages(memory: Array, apart: int) -> None:
    for k in range(0, len(memory), apart):
        touch(memory, k)
    touch(memory, len(memory) - 1)


# ---------------------------------------------------------------------------------------------- initial values


def table_key(name: str) -> np.uint64:
    """Return a table's name as 64 bits, the same in every process."""
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


@compiled
def initial_rows(kind: int, a: float, b: float, seed: np.uint64, key: np.uint64, ids: Ids, out: Array) -> None:
    """Fill ``out`` with values that depend on the seed, the table, the id and the column, and on nothing else.

    Each row is a splitmix64 sequence of its own. Uniform values use as many bits as the mantissa holds; normal ones
    are made two at a time (Box and Muller) in double precision.
    """
    table = mix(mix(seed + GAMMA) ^ key)
    single = out.itemsize == 4
    drop = np.uint64(40) if single else np.uint64(11)
    unit = 2.0**-24 if single else 2.0**-53
    low, high = np.empty(1, out.dtype), np.empty(1, out.dtype)
    low[0], high[0] = a, b
    for k in range(ids.size):
        state = mix(table ^ mix(np.uint64(ids[k]) + GAMMA))
        row = out[k]
        if kind == UNIFORM:
            for j in range(row.size):
                state += GAMMA
                row[j] = a + (b - a) * (np.float64(mix(state) >> drop) * unit)
                if row[j] >= high[0]:  # rounding may reach the end of the half-open interval
                    row[j] = low[0]
        elif kind == NORMAL:
            for j in range(0, row.size, 2):
                state += GAMMA
                radius = np.float64((mix(state) >> np.uint64(11)) + np.uint64(1)) * 2.0**-53  # never zero
                state += GAMMA
                angle = np.float64(mix(state) >> np.uint64(11)) * 2.0**-53
                scale = b * math.sqrt(-2.0 * math.log(radius))
                row[j] = a + scale * math.cos(2.0 * math.pi * angle)
                if j + 1 < row.size:
                    row[j + 1] = a + scale * math.sin(2.0 * math.pi * angle)
        else:
            for j in range(row.size):
                row[j] = a


# ---------------------------------------------------------------------------------------------- rounding by chance


@compiled
def noise(ids: Ids, width: int, worker: int, step: int) -> Array:
    """Return numbers on [0, 1), a row for each id, that depend on id, column, worker and step, and on nothing else."""
    out = np.empty((ids.size, width), np.float32)
    key = mix(mix(np.uint64(worker) + GAMMA) ^ np.uint64(step))
    for k in range(ids.size):
        state = mix(key ^ mix(np.uint64(ids[k]) + GAMMA))
        for j in range(width):
            state += GAMMA
            out[k, j] = np.float64(mix(state) >> np.uint64(40)) * 2.0**-24
    return out
