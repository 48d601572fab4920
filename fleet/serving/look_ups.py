"""Answers requests for rows (lookup.proto), one, or many that have come together.

Most requests are alike: from predictors of one model, for the same tables, of the same edition. Those are one look-up
of all their ids, which costs little more than that of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from google.protobuf.message import DecodeError, Message

from fleet.errors import IdOutOfRangeError, NotInitializedError, ProtocolError
from fleet.numeric.jit import Array, Ids
from fleet.serving import lookup_pb2 as pb
from fleet.serving.editions import Edition, Editions, Found
from fleet.serving.source import Piece, RowChanges, SourceDescription, TableDescription

#: A request names no more tables, or as many as there are.
_MOST_TABLES = 1024
#: So many bytes of rows are looked up together.
_MOST_TOGETHER = 4 << 20
#: The orders of ids of so many kinds of requests are kept, if they are no more ids than this.
_KEPT, _MOST_KEPT = 256, 1 << 13

M = TypeVar("M", bound=Message)


class _Asked(NamedTuple):
    """Holds what requests that are alike have in common."""

    instance: int
    edition: int
    tables: tuple[int, ...]
    counts: tuple[int, ...]


class LookUps:
    def __init__(self, editions: Editions, instance: int, age_s: Callable[[], float]) -> None:
        """``instance`` is the replica's number; ``age_s`` tells how old its newest edition is."""
        self._editions = editions
        self._instance = instance
        self._age_s = age_s
        self._orders: dict[tuple[tuple[int, ...], int], Ids] = {}

    def state(self, edition: Edition) -> pb.State:
        return pb.State(instance=self._instance, edition=edition.number, version=edition.version, age_s=self._age_s())

    def one(self, request: bytes, most_bytes: int) -> bytes:
        """Answer a request for up to so many bytes of ids, and of rows; raise what is wrong with it."""
        message = read(pb.LookUpRequest, request)
        asked = _Asked(message.instance, message.edition, tuple(message.tables), tuple(message.counts))
        self._check(asked, len(message.ids), most_bytes)
        found = self._found(asked, _ids_of(message.ids), 1)
        if found.parts is None:
            return self._gone(found)
        values = b"".join([part.tobytes() for part in found.parts])
        return written(pb.Rows(state=self.state(found.edition), values=values))

    def together(self, requests: Sequence[bytes], most_bytes: int) -> list[bytes | None]:
        """Answer requests, those that are alike at once; None stands for one that is in error."""
        answers: list[bytes | None] = [None] * len(requests)
        alike: dict[_Asked, list[tuple[int, bytes]]] = {}
        for number, request in enumerate(requests):
            with contextlib.suppress(DecodeError, ValueError):
                message = pb.LookUpRequest.FromString(request)
                asked = _Asked(message.instance, message.edition, tuple(message.tables), tuple(message.counts))
                alike.setdefault(asked, []).append((number, message.ids))
        for asked, each in alike.items():
            with contextlib.suppress(ProtocolError, NotInitializedError):
                row_bytes = self._check(asked, len(each[0][1]), most_bytes)
                most = max(1, _MOST_TOGETHER // max(1, row_bytes))
                for start in range(0, len(each), most):
                    self._answer_alike(asked, each[start : start + most], answers)
        return answers

    def _answer_alike(self, asked: _Asked, requests: Sequence[tuple[int, bytes]], answers: list[bytes | None]) -> None:
        nbytes = len(requests[0][1])
        requests = [each for each in requests if len(each[1]) == nbytes]
        ids, count = _ids_of(b"".join([each for _, each in requests])), len(requests)
        try:
            found = self._found(asked, ids, count)
        except IdOutOfRangeError:
            if count > 1:  # it is not known in which of them
                for each in requests:
                    self._answer_alike(asked, [each], answers)
            return
        if found.parts is None:
            answers_alike = [self._gone(found)] * count
        else:
            answers_alike = self._written(found.edition, asked, found.parts, count)
        for (number, _), answer in zip(requests, answers_alike, strict=True):
            answers[number] = answer

    def _written(self, edition: Edition, asked: _Asked, parts: list[Array], count: int) -> list[bytes]:
        """Return the answers to requests that are alike. The bytes of their rows lie at the end of a message: they are
        put there as they are."""
        head = written(pb.Rows(state=self.state(edition)))
        if count == 1:
            rows = [b"".join([part.tobytes() for part in parts])]
        elif len(parts) == 1 and len(asked.tables) > 1:
            (found,) = parts
            of_requests = np.empty_like(found)
            of_requests[self._order(asked.counts, count)] = found
            whole = of_requests.tobytes()
            size = len(whole) // count
            rows = [whole[start : start + size] for start in range(0, len(whole), size or 1)] or [b""] * count
        else:
            divided = [part.reshape(count, -1) for part in parts]
            rows = [b"".join([part[number].tobytes() for part in divided]) for number in range(count)]
        head += b"\x1a" + _varint(len(rows[0]))
        return [head + each for each in rows]

    def _found(self, asked: _Asked, ids: Ids, count: int) -> Found:
        """Return the rows of requests that are alike, table by table."""
        if asked.instance not in (0, self._instance):
            return Found(self._editions.newest, None)
        if count > 1 and len(asked.tables) > 1:
            ids = ids[self._order(asked.counts, count)]
        stops = np.array(asked.counts, np.int64).cumsum() * count
        return self._editions.look_up(asked.edition if asked.instance else None, asked.tables, ids, stops, count)

    def _order(self, counts: tuple[int, ...], count: int) -> Ids:
        """Return where the ids of requests lie, one request behind the other, in the order of their tables."""
        order = self._orders.get((counts, count))
        if order is None:
            order = np.tile(np.repeat(np.arange(len(counts)), counts), count).argsort(kind="stable")
            if order.size <= _MOST_KEPT:
                if len(self._orders) >= _KEPT:
                    self._orders.clear()
                self._orders[counts, count] = order
        return order

    def _gone(self, found: Found) -> bytes:
        return written(pb.Rows(state=self.state(found.edition), gone=True))

    def _check(self, asked: _Asked, id_bytes: int, most_bytes: int) -> int:
        """Return how many bytes of rows a request asks for, once it is known that it can be had, before any memory is
        taken for it."""
        widths = self._editions.widths
        places, counts = asked.tables, asked.counts
        most = max(_MOST_TABLES, len(widths))
        if len(places) != len(counts) or len(places) > most:
            raise ProtocolError(
                "a look-up has as many counts as tables",
                expected=f"up to {most} of each",
                got=f"{len(places)} and {len(counts)}",
            )
        if places and max(places) >= len(widths):
            raise ProtocolError("there is no such table", expected=f"from 0 to {len(widths) - 1}", got=max(places))
        if 8 * sum(counts) != id_bytes:  # counts may be as large as they like, and Python's sum is exact
            raise ProtocolError(
                "a look-up's ids are not as many as it says",
                expected=f"{8 * sum(counts)} bytes",
                got=f"{id_bytes} bytes",
            )
        nbytes = int(np.array(counts, np.int64) @ widths[list(places)])
        if max(nbytes, id_bytes) > most_bytes:
            raise ProtocolError(
                "a look-up asks for too much at once",
                expected=f"up to {most_bytes} bytes of ids, and of rows",
                got=f"{id_bytes} and {nbytes}",
                todo="Divide it.",
            )
        return nbytes


def compile_all() -> None:
    """Compile, or load, everything that a look-up runs, on a few rows that are thrown away."""
    for dtype in (torch.float32, torch.float64):
        editions = Editions()
        editions.fit(SourceDescription({}, {name: TableDescription(1, None, 0.0, dtype) for name in "ab"}))
        ids, none = np.arange(2), np.empty(0, np.int64)
        for version in (1, 2):
            draft = editions.begin(version == 1, version)
            draft.add(
                Piece(rows={name: RowChanges(ids, torch.zeros(2, 1, dtype=dtype, device="cpu"), none) for name in "ab"})
            )
            draft.publish()
        look_ups = LookUps(editions, 1, lambda: 0.0)
        for tables in ([0], [0, 1]):
            counts, ids_of_each = [1] * len(tables), bytes(8) * len(tables)
            asked = pb.LookUpRequest(instance=1, edition=1, tables=tables, counts=counts, ids=ids_of_each)
            look_ups.together([asked.SerializeToString()] * 2, _MOST_TOGETHER)


def read(kind: type[M], request: bytes) -> M:
    try:
        return kind.FromString(request)
    except (DecodeError, ValueError) as error:
        raise ProtocolError("a request cannot be read", expected=kind.__name__, got=str(error)) from None


def written(message: Message) -> bytes:
    return message.SerializeToString()


def _ids_of(raw: bytes) -> Ids:
    return np.frombuffer(raw, "<i8").astype(np.int64)  # a copy: what lies in a message is read-only, another type


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])
