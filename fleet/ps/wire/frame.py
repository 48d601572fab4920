"""The envelope of every message: a protobuf header and raw tensors behind it.

    "FLT1" | header bytes: u32 | payload bytes: u64 | header | padding to 16 | tensors, each padded to 16

A large frame travels in several pieces. Reading one allocates a single buffer for the payload, after every size in
the header was checked against what was announced and against the limits below.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from fleet.errors import ProtocolError
from fleet.ps import memory
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.tensors import WireTensor, checked_size, padded, view

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"FLT1"

#: Pieces of this size move fastest through Python's gRPC (measured: docs/design.md).
PIECE_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 8 << 30
MAX_TENSORS = 1 << 20

M = TypeVar("M", pb.Request, pb.Reply)


@dataclass
class Frame:
    """A control message and the tensors it speaks of."""

    message: Any
    tensors: list[WireTensor] = field(default_factory=list)

    def pieces(self) -> Iterator[bytes]:
        """The frame's bytes, in pieces of at most ``PIECE_BYTES`` (and at least one)."""
        buffers = self._buffers()
        total = sum(len(buffer) for buffer in buffers)
        if total <= PIECE_BYTES:
            yield b"".join(buffers)
            return
        pending: list[bytes | memoryview] = []
        room = PIECE_BYTES
        for buffer in buffers:
            rest = memoryview(buffer)
            while len(rest):
                part, rest = rest[:room], rest[room:]
                pending.append(part)
                room -= len(part)
                if not room:
                    yield b"".join(pending)
                    pending, room = [], PIECE_BYTES
        if pending:
            yield b"".join(pending)

    def _buffers(self) -> list[bytes | memoryview]:
        message: Message = self.message
        del message.tensors[:]  # type: ignore[attr-defined]
        payload: list[bytes | memoryview] = []
        size = 0
        for tensor in self.tensors:
            message.tensors.add(dtype=tensor.dtype, shape=tensor.shape)  # type: ignore[attr-defined]
            nbytes = tensor.array.nbytes
            payload += [tensor.bytes, bytes(padded(nbytes) - nbytes)]
            size += padded(nbytes)
        header = message.SerializeToString()
        prefix = _PREFIX.pack(_MAGIC, len(header), size)
        gap = bytes(padded(len(prefix) + len(header)) - len(prefix) - len(header))
        return [prefix, header, gap, *payload]


def read_frame(kind: type[M], pieces: Iterable[bytes]) -> Frame:
    """Read one frame whose header is of ``kind``; anything else is a ``ProtocolError``."""
    arriving = iter(pieces)
    head = bytearray()

    def need(nbytes: int) -> None:
        while len(head) < nbytes:
            piece = next(arriving, None)
            if piece is None:
                raise ProtocolError("a frame is cut short", expected=f"{nbytes} bytes", got=f"{len(head)} bytes")
            head.extend(piece)

    need(_PREFIX.size)
    magic, header_size, payload_size = _PREFIX.unpack_from(head)
    if magic != _MAGIC:
        raise ProtocolError("a message is not a frame of this protocol", expected=_MAGIC, got=bytes(head[:4]))
    if header_size > MAX_HEADER_BYTES or payload_size > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            "a frame is too large",
            expected=f"header up to {MAX_HEADER_BYTES} and payload up to {MAX_PAYLOAD_BYTES} bytes",
            got=f"{header_size} and {payload_size}",
        )
    start = padded(_PREFIX.size + header_size)
    need(start)
    try:
        message = kind.FromString(bytes(head[_PREFIX.size : _PREFIX.size + header_size]))
    except (DecodeError, ValueError) as error:  # protobuf in pure Python lets bad UTF-8 through as it is
        raise ProtocolError("a frame's header cannot be read", got=str(error)) from None
    offsets = _layout(message, payload_size)
    try:
        payload = memory.take(payload_size)
    except MemoryError:
        raise ProtocolError("there is no memory for a frame", got=f"{payload_size} bytes of payload") from None
    filled = 0
    rest: bytes | bytearray | memoryview | None = memoryview(head)[start:]
    while rest is not None:
        part = np.frombuffer(rest, dtype=np.uint8)
        if filled + len(part) > payload_size:
            raise ProtocolError("a frame is longer than it says", expected=f"{payload_size} bytes of payload")
        payload[filled : filled + len(part)] = part
        filled += len(part)
        rest = next(arriving, None)
    if filled != payload_size:
        raise ProtocolError("a frame is cut short", expected=f"{payload_size} bytes of payload", got=filled)
    tensors = [view(payload, at, t.dtype, t.shape) for at, t in zip(offsets, message.tensors, strict=True)]
    return Frame(message, tensors)


def _layout(message: Any, payload_size: int) -> list[int]:
    """Where each tensor starts; the announced tensors must fill the announced payload exactly."""
    if len(message.tensors) > MAX_TENSORS:
        raise ProtocolError("a frame has too many tensors", expected=MAX_TENSORS, got=len(message.tensors))
    offsets, offset = [], 0
    for tensor in message.tensors:
        offsets.append(offset)
        offset += padded(checked_size(tensor.dtype, tensor.shape))
        if offset > payload_size:
            break
    if offset != payload_size:
        raise ProtocolError("a frame's tensors do not fill its payload", expected=offset, got=payload_size)
    return offsets
