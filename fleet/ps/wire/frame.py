"""The envelope of every message: a protobuf header and raw tensors behind it.

    "FLT1" | header bytes: u32 | payload bytes: u64 | header | padding to 16 | tensors, each padded to 16

A large frame travels in several pieces. Reading one allocates a single buffer for the payload, after every size in
the header was checked against what was announced and against the limits below.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from fleet.base.settings import SecurityKnobs
from fleet.errors import ProtocolError
from fleet.numeric import buffers as memory
from fleet.numeric.tensors import WireTensor, checked_size, padded, view
from fleet.ps.wire import fleet_pb2 as pb

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"FLT1"
PREFIX_BYTES = _PREFIX.size

#: Pieces of this size move fastest through Python's gRPC (measured: docs/design.md).
PIECE_BYTES = 1 << 20
#: Enough to describe a hundred thousand parameters. A header may take sixteen times its size when it is read.
MAX_HEADER_BYTES = 16 << 20
_HEADER_PART_BYTES = 64 << 10
#: Unless somebody says otherwise (FLEET_MAX_MESSAGE_MB).
MAX_PAYLOAD_BYTES = SecurityKnobs.max_message_bytes
MAX_TENSORS = 1 << 16

M = TypeVar("M", pb.Request, pb.Reply)


@dataclass
class Frame:
    """A control message and the tensors it speaks of."""

    message: Any
    tensors: list[WireTensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """What its tensors weigh."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def kept(self) -> Frame:
        """The same, whatever becomes of what its tensors are made of."""
        return Frame(self.message, [tensor.kept() for tensor in self.tensors])

    def pieces(self) -> Iterator[bytes]:
        """The frame's bytes, in pieces of at most ``PIECE_BYTES`` (and at least one)."""
        buffers = self.buffers()
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

    def buffers(self) -> list[bytes | memoryview]:
        """The frame's bytes where they are; tensors are not copied."""
        message: Message = self.message
        del message.tensors[:]  # type: ignore[attr-defined]
        payload: list[bytes | memoryview] = []
        size = 0
        for tensor in self.tensors:
            message.tensors.add(dtype=tensor.dtype, shape=tensor.shape)  # type: ignore[attr-defined]
            nbytes = tensor.nbytes
            size += padded(nbytes)
            payload += tensor.buffers
            if padded(nbytes) > nbytes:
                payload.append(bytes(padded(nbytes) - nbytes))
        header = message.SerializeToString()
        gap = bytes(padded(_PREFIX.size + len(header)) - _PREFIX.size - len(header))
        return [_PREFIX.pack(_MAGIC, len(header), size) + header + gap, *payload]


#: Writes the next bytes that arrive over all of the memory it is given.
Fill = Callable[[memoryview], None]


def read_frame(kind: type[M], pieces: Iterable[bytes | memoryview], limit: int = MAX_PAYLOAD_BYTES) -> Frame:
    """Read the one frame that some pieces hold, its header of ``kind``; anything else is a ``ProtocolError``."""
    arriving = _Pieces(pieces)
    frame = receive_frame(kind, arriving.fill, limit)
    arriving.end()
    return frame


def receive_frame(kind: type[M], fill: Fill, limit: int = MAX_PAYLOAD_BYTES) -> Frame:
    """Read the next frame of a stream of bytes, with at most ``limit`` of them behind its header."""
    prefix = memoryview(bytearray(_PREFIX.size))
    fill(prefix)
    magic, header_size, payload_size = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise ProtocolError("a message is not a frame of this protocol", expected=_MAGIC, got=bytes(prefix[:4]))
    if header_size > MAX_HEADER_BYTES or payload_size > limit:
        raise ProtocolError(
            "a frame is too large",
            expected=f"header up to {MAX_HEADER_BYTES} and payload up to {limit} bytes",
            got=f"{header_size} and {payload_size}",
            todo="Where it is an honest one, raise FLEET_MAX_MESSAGE_MB.",
        )
    header = _header(padded(_PREFIX.size + header_size) - _PREFIX.size, fill)
    try:
        message = kind.FromString(bytes(memoryview(header)[:header_size]))
    except (DecodeError, ValueError) as error:  # protobuf in pure Python lets bad UTF-8 through as it is
        raise ProtocolError("a frame's header cannot be read", got=str(error)) from None
    announced = _layout(message, payload_size)
    try:
        payload = memory.take(payload_size)
    except MemoryError:
        raise ProtocolError("there is no memory for a frame", got=f"{payload_size} bytes of payload") from None
    fill(payload.data)
    return Frame(message, [view(payload, *each) for each in announced])


def announced_bytes(begun: bytes) -> int:
    """How large a frame says it is that begins like this; 0 where it does not say yet."""
    if len(begun) < PREFIX_BYTES:
        return 0
    _, header_size, payload_size = _PREFIX.unpack_from(begun)
    return int(header_size + payload_size)


def _header(nbytes: int, fill: Fill) -> bytearray:
    """So many bytes, which take memory as they come: nothing has confirmed their number yet."""
    header = bytearray()
    while len(header) < nbytes:
        part = bytearray(min(nbytes - len(header), _HEADER_PART_BYTES))
        fill(memoryview(part))
        header += part
    return header


class _Pieces:
    """A stream that arrives in pieces."""

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._arriving = iter(pieces)
        self._piece = memoryview(b"")

    def fill(self, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            if not self._piece:
                piece = next(self._arriving, None)
                if piece is None:
                    raise ProtocolError("a frame is cut short", expected=f"{len(target)} more bytes", got=filled)
                self._piece = memoryview(piece)
            part, self._piece = self._piece[: len(target) - filled], self._piece[len(target) - filled :]
            target[filled : filled + len(part)] = part
            filled += len(part)

    def end(self) -> None:
        if self._piece or any(self._arriving):
            raise ProtocolError("a frame is longer than it says")


def _layout(message: Any, payload_size: int) -> list[tuple[int, int, str, tuple[int, ...]]]:
    """Offset, bytes, element type and shape of each tensor; together they must fill the announced payload exactly."""
    if len(message.tensors) > MAX_TENSORS:
        raise ProtocolError("a frame has too many tensors", expected=MAX_TENSORS, got=len(message.tensors))
    announced, offset = [], 0
    for tensor in message.tensors:
        nbytes = checked_size(tensor.dtype, tensor.shape)
        announced.append((offset, nbytes, tensor.dtype, tuple(tensor.shape)))
        offset += padded(nbytes)
        if offset > payload_size:
            break
    if offset != payload_size:
        raise ProtocolError("a frame's tensors do not fill its payload", expected=offset, got=payload_size)
    return announced
