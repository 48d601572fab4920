"""Every message is a frame: a protobuf header and raw tensors behind it.

    "FLT1" | header bytes: u32 | payload bytes: u64 | header | padding to 16 | tensors, each padded to 16

Through a socket a frame goes without a copy (see line.py); elsewhere a large one travels in several pieces. Reading a
frame allocates a single buffer for the payload, after every size in the header was checked against what was announced
and against the limits below.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from fleet.base.settings import SecuritySettings
from fleet.errors import ProtocolError
from fleet.numeric import buffers as memory
from fleet.numeric.tensors import ALIGNMENT, WireTensor, checked_size, padded, view
from fleet.ps.wire import fleet_pb2 as pb

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"FLT1"
PREFIX_BYTES = _PREFIX.size

#: Pieces of this size move fastest through Python's gRPC (measured: docs/decisions/0002-frames.md).
PIECE_BYTES = 1 << 20
#: Enough to describe a hundred thousand parameters. A header may take sixteen times its size when it is read.
MAX_HEADER_BYTES = 16 << 20
_HEADER_PART_BYTES = 64 << 10
_PADDING = bytes(ALIGNMENT)
#: Unless somebody says otherwise (FLEET_MAX_MESSAGE_MB).
MAX_PAYLOAD_BYTES = SecuritySettings.max_message_bytes
MAX_TENSORS = 1 << 16
#: Of a tensor's description. An element type and sixteen dimensions have fewer.
_MOST_KEPT_BYTES = 256

M = TypeVar("M", pb.Request, pb.Reply)


@dataclass
class Frame:
    """Holds a control message and the tensors that it speaks of."""

    message: Any
    tensors: list[WireTensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Return how many bytes its tensors have."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def kept(self) -> Frame:
        """Return the same frame in a form that stays as it is now, whatever happens to its sources."""
        return Frame(self.message, [tensor.kept() for tensor in self.tensors])

    def pieces(self) -> Iterator[bytes]:
        """Yield the frame's bytes, in pieces of at most ``PIECE_BYTES`` (and at least one)."""
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
        """Return the frame's bytes where they are; tensors are not copied."""
        message: Message = self.message
        del message.tensors[:]  # type: ignore[attr-defined]
        descriptions = [message.SerializeToString()]
        payload: list[bytes | memoryview] = []
        size = 0
        for tensor in self.tensors:  # hundreds of them where tables are many and small
            descriptions.append(_described(tensor.dtype, tensor.shape))
            nbytes = tensor.nbytes
            whole = padded(nbytes)
            size += whole
            payload += tensor.buffers
            if whole > nbytes:
                payload.append(_PADDING[: whole - nbytes])
        header = b"".join(descriptions)
        gap = bytes(padded(_PREFIX.size + len(header)) - _PREFIX.size - len(header))
        return [_PREFIX.pack(_MAGIC, len(header), size) + header + gap, *payload]


@lru_cache(1 << 14)
def _described(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return a tensor's description as it stands in a header: of all fields it has the highest number, so descriptions
    come last."""
    return pb.Request(tensors=[pb.Tensor(dtype=dtype, shape=shape)]).SerializeToString()


def _read_description(description: bytes) -> tuple[str, tuple[int, ...], int]:
    """Return a tensor's element type and shape, and how many bytes it takes in a payload."""
    tensor = pb.Tensor.FromString(description)
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    return dtype, shape, padded(checked_size(dtype, shape))


#: Most are the same from step to step.
_read_again = lru_cache(1 << 14)(_read_description)


#: Writes the next bytes that arrive over all of the memory it is given.
Fill = Callable[[memoryview], None]


def read_frame(kind: type[M], pieces: Iterable[bytes | memoryview], limit: int = MAX_PAYLOAD_BYTES) -> Frame:
    """Read the one frame that some pieces hold, with a header of ``kind``; anything else is a ``ProtocolError``."""
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
    """Return how large the frame that begins like this says it is; 0 where it does not say yet."""
    if len(begun) < PREFIX_BYTES:
        return 0
    _, header_size, payload_size = _PREFIX.unpack_from(begun)
    return int(header_size + payload_size)


def _header(nbytes: int, fill: Fill) -> bytearray:
    """Read so many bytes, which take memory as they come: nothing has confirmed their number yet."""
    header = bytearray()
    while len(header) < nbytes:
        part = bytearray(min(nbytes - len(header), _HEADER_PART_BYTES))
        fill(memoryview(part))
        header += part
    return header


class _Pieces:
    """Reads a stream that arrives in pieces."""

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


def _layout(message: Any, payload_size: int) -> list[tuple[int, str, tuple[int, ...]]]:
    """Offset, element type and shape of each tensor; together they must fill the announced payload exactly."""
    if len(message.tensors) > MAX_TENSORS:
        raise ProtocolError("a frame has too many tensors", expected=MAX_TENSORS, got=len(message.tensors))
    announced, offset = [], 0
    for tensor in message.tensors:
        description = tensor.SerializeToString()
        # A long one has fields that mean nothing here, and is not kept: the header may have been full of it.
        read = _read_again if len(description) <= _MOST_KEPT_BYTES else _read_description
        dtype, shape, size = read(description)
        announced.append((offset, dtype, shape))
        offset += size
        if offset > payload_size:
            break
    if offset != payload_size:
        raise ProtocolError("a frame's tensors do not fill its payload", expected=offset, got=payload_size)
    return announced
