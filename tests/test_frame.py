"""The envelope: what goes in comes out, however it is cut; whatever else comes in is refused by name."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.errors import FleetError, ProtocolError
from fleet.numeric.tensors import ALIGNMENT, EndToEnd, WireTensor
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire import frame as frame_module
from fleet.ps.wire.frame import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, PIECE_BYTES, Frame, read_frame

DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "uint8"]
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3), (5, 1, 2, 2), (1,) * 16]
PREFIX = struct.Struct("<4sIQ")


def tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 100).to(getattr(torch, dtype))


def written(frame: Frame) -> bytes:
    return b"".join(frame.pieces())


def every_kind() -> list[torch.Tensor]:
    return [tensor(dtype, shape, seed) for seed, dtype in enumerate(DTYPES) for shape in SHAPES]


def check_same(read: Frame, sent: list[torch.Tensor]) -> None:
    assert len(read.tensors) == len(sent)
    for got, want in zip(read.tensors, sent, strict=True):
        value = got.torch()
        assert value.dtype == want.dtype
        assert value.shape == want.shape
        assert torch.equal(value, want)


def raw(header: bytes, payload: bytes = b"", *, magic: bytes = b"FLT1", **lies: int) -> bytes:
    """A frame written by hand, with sizes that may be lies."""
    prefix = PREFIX.pack(magic, lies.get("header_size", len(header)), lies.get("payload_size", len(payload)))
    gap = bytes(-(PREFIX.size + len(header)) % ALIGNMENT)
    return prefix + header + gap + payload


def announcing(*tensors: tuple[str, tuple[int, ...]]) -> bytes:
    header: bytes = pb.Reply(
        tensors=[pb.Tensor(dtype=dtype, shape=shape) for dtype, shape in tensors]
    ).SerializeToString()
    return header


# ---------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    sent = tensor(dtype, shape)
    read = read_frame(pb.Reply, Frame(pb.Reply(version=3), [WireTensor.of(sent)]).pieces())
    assert read.message.version == 3
    check_same(read, [sent])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_numpy_array_comes_back(shape: tuple[int, ...]) -> None:
    sent = np.random.default_rng(0).random(shape).astype("float32")
    (got,) = read_frame(pb.Reply, Frame(pb.Reply(), [WireTensor.of(sent)]).pieces()).tensors
    assert got.shape == shape
    np.testing.assert_array_equal(got.numpy(), sent)


def test_what_is_not_contiguous_or_needs_a_gradient() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    sent = [base.t(), base[:, 1::2], base.clone().requires_grad_(), torch.nn.Parameter(base[::2])]
    read = read_frame(pb.Reply, Frame(pb.Reply(), [WireTensor.of(value) for value in sent]).pieces())
    check_same(read, [value.detach() for value in sent])
    columns = np.arange(12.0).reshape(3, 4).T
    (got,) = read_frame(pb.Reply, Frame(pb.Reply(), [WireTensor.of(columns)]).pieces()).tensors
    np.testing.assert_array_equal(got.numpy(), columns)


def test_every_kind_of_tensor_in_one_request() -> None:
    sent = every_kind()
    request = pb.Request(worker=3, incarnation=2**63 + 1, step=7, push=pb.Push(present=b"\1\0", row_tables=[4]))
    read = read_frame(pb.Request, Frame(request, [WireTensor.of(value) for value in sent]).pieces())
    assert read.message.WhichOneof("kind") == "push"
    assert (read.message.worker, read.message.incarnation, read.message.step) == (3, 2**63 + 1, 7)
    assert read.message.push.present == b"\1\0"
    check_same(read, sent)


def test_a_frame_can_be_sent_again() -> None:
    frame = Frame(pb.Reply(version=1), [WireTensor.of(tensor("float32", (5,)))])
    assert written(frame) == written(frame)


def test_what_was_read_can_be_written_and_is_aligned() -> None:
    sent = every_kind()
    read = read_frame(pb.Reply, Frame(pb.Reply(), [WireTensor.of(value) for value in sent]).pieces())
    for got in read.tensors:
        assert got.array.flags.writeable
        if got.array.size:
            assert got.array.ctypes.data % ALIGNMENT == 0
    for got, value in zip(read.tensors, sent, strict=True):
        got.torch().fill_(1)
        assert torch.equal(got.torch(), torch.ones_like(value))


@pytest.mark.parametrize("extra", [-17, -16, -1, 0, 1, 15, 16, PIECE_BYTES])
def test_pieces_have_a_limit(extra: int) -> None:
    sent = tensor("uint8", (2 * PIECE_BYTES + extra,))
    frame = Frame(pb.Reply(), [WireTensor.of(sent), WireTensor.of(tensor("float32", (3,)))])
    pieces = list(frame.pieces())
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert all(pieces)
    check_same(read_frame(pb.Reply, pieces), [sent, tensor("float32", (3,))])


def test_the_smallest_frame_is_one_piece() -> None:
    assert len(list(Frame(pb.Reply()).pieces())) == 1


@pytest.mark.parametrize("with_tensors", [False, True])
def test_a_header_larger_than_a_piece(with_tensors: bool) -> None:
    sent = [tensor("float32", (9,))] if with_tensors else []
    for size in range(PIECE_BYTES - 40, PIECE_BYTES + 8):
        frame = Frame(pb.Reply(about="x" * size), [WireTensor.of(value) for value in sent])
        pieces = list(frame.pieces())
        assert max(map(len, pieces)) <= PIECE_BYTES
        read = read_frame(pb.Reply, pieces)
        assert len(read.message.about) == size
        check_same(read, sent)


chunkings = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


@settings(max_examples=60, deadline=None)
@given(chunkings, st.integers(0, 33), st.booleans())
@example([1], 0, True)
@example([23], 5, False)
def test_any_cutting_reads_the_same(sizes: list[int], text: int, with_tensors: bool) -> None:
    sent = every_kind()[:13] if with_tensors else []
    data = written(Frame(pb.Reply(version=9, about="y" * text), [WireTensor.of(value) for value in sent]))
    pieces, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        pieces.append(data[at : at + size])
        at, turn = at + size, turn + 1
    read = read_frame(pb.Reply, [*pieces, b""])
    assert (read.message.version, read.message.about) == (9, "y" * text)
    check_same(read, sent)


# ---------------------------------------------------------------------------------------------- what is refused


def refused(data: bytes, kind: Any = pb.Reply) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        read_frame(kind, [data])
    assert isinstance(caught.value, FleetError)
    return caught.value


def read_or_refused(data: bytes, piece: int = 1 << 20) -> None:
    """Garbage may happen to be a frame; it may never be any other failure than a ``ProtocolError``."""
    kinds: list[Any] = [pb.Request, pb.Reply]
    for kind in kinds:
        try:
            read = read_frame(kind, (data[at : at + piece] for at in range(0, max(1, len(data)), piece)))
        except ProtocolError:
            continue
        assert isinstance(read.message, kind)
        written(read)
        for value in read.tensors:
            assert value.torch().shape == value.shape


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31])
def test_too_short(size: int) -> None:
    assert "cut short" in str(refused(written(Frame(pb.Reply(version=300)))[: min(size, 31)]))


def test_no_pieces_at_all() -> None:
    with pytest.raises(ProtocolError, match="cut short"):
        read_frame(pb.Reply, [])


def test_every_truncation_is_refused() -> None:
    data = written(Frame(pb.Reply(version=1), [WireTensor.of(tensor("float32", (3,))), WireTensor.of(np.ones(2))]))
    for size in range(len(data)):
        assert "cut short" in str(refused(data[:size]))


def test_more_than_announced() -> None:
    data = written(Frame(pb.Reply(), [WireTensor.of(tensor("float32", (3,)))]))
    assert "longer than it says" in str(refused(data + b"\0"))
    with pytest.raises(ProtocolError, match="longer than it says"):
        read_frame(pb.Reply, [data, data])


@pytest.mark.parametrize("magic", [b"FLT0", b"\0\0\0\0", b"GET "])
def test_another_magic(magic: bytes) -> None:
    assert "not a frame" in str(refused(raw(b"", magic=magic)))


@pytest.mark.parametrize(
    "header",
    [b"\xff\xff\xff", b"\x3a\x02\xff\xfe", b"\x12\x7f", b"\xf2\x01" + b"\xff" * 9 + b"\x7f", b"\x0b" * 200],
    ids=["tag", "not utf-8", "longer than it is", "huge length", "nested"],
)
def test_a_header_that_is_no_message(header: bytes) -> None:
    assert "cannot be read" in str(refused(raw(header)))


@pytest.mark.parametrize("failure", [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ValueError("bad")])
def test_protobuf_in_pure_python_fails_otherwise(failure: Exception) -> None:
    class Reply:
        @staticmethod
        def FromString(_: bytes) -> Any:
            raise failure

    assert "cannot be read" in str(refused(raw(b"x"), Reply))


@pytest.mark.parametrize("dtype", ["", "float8", "complex64", "object", "int32", ">f4", "O" * 5000])
def test_unknown_element_types(dtype: str) -> None:
    error = refused(raw(announcing((dtype, (2,))), bytes(16)))
    assert "element type" in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    "shape",
    [
        (2**63, 0),
        (0, 2**64 - 1),
        (2**62, 2**62, 0),
        (2**40, 2**40, 2**40, 0),
        (0, 2**41),
        (2**64 - 1,) * 16,
        (2**32, 2**32),
        (1,) * 17,
        (0,) * 5000,
    ],
    ids=lambda shape: f"{len(shape)}-{shape[0]}",
)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16"])
def test_impossible_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    refused(raw(announcing((dtype, shape))))
    refused(raw(announcing((dtype, shape)), bytes(16)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_do_not_fill_the_payload(dtype: str) -> None:
    for shape, payload in [((3,), 64), ((9,), 0), ((100,), 16), ((), 32)]:
        assert "do not fill" in str(refused(raw(announcing((dtype, shape)), bytes(payload))))
    assert "do not fill" in str(refused(raw(announcing(), bytes(16))))


def test_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_module, "MAX_TENSORS", 3)
    read_frame(pb.Reply, [raw(announcing(*[("float32", (0,))] * 3))])
    assert "too many" in str(refused(raw(announcing(*[("float32", (0,))] * 4))))


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(b"FLT1", 0, 2**64 - 1),
        PREFIX.pack(b"FLT1", 0, MAX_PAYLOAD_BYTES + 1),
        PREFIX.pack(b"FLT1", 2**32 - 1, 0),
        PREFIX.pack(b"FLT1", MAX_HEADER_BYTES + 1, 0),
        PREFIX.pack(b"FLT1", MAX_HEADER_BYTES, 0) + bytes(100),
        raw(b"", payload_size=MAX_PAYLOAD_BYTES),
        raw(announcing(("float32", (4,))), payload_size=MAX_PAYLOAD_BYTES),
        raw(announcing(("float32", (2**60,))), payload_size=MAX_PAYLOAD_BYTES),
        raw(announcing(("float64", (2**30, 2**30, 2**30))), bytes(64)),
    ],
    ids=["endless", "payload", "largest header", "header", "absent header", "nothing", "little", "more", "volume"],
)
def test_lying_sizes_cost_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        refused(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_kept_of_descriptions_has_a_bound() -> None:
    """A description may have fields that mean nothing here, as large as a header."""
    described = pb.Tensor(dtype="float32", shape=[0]).SerializeToString()
    size = 1 << 20
    unknown = b"\x7a" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
    tracemalloc.start()
    try:
        for number in range(8):
            tensor = pb.Tensor.FromString(described + unknown + number.to_bytes(4, "little") + bytes(size - 4))
            read = read_frame(pb.Reply, [raw(pb.Reply(tensors=[tensor]).SerializeToString())])
            assert [each.shape for each in read.tensors] == [(0,)]
        del read, tensor
        assert tracemalloc.get_traced_memory()[0] < size
    finally:
        tracemalloc.stop()


def test_no_memory_for_an_honest_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_args: object, **_options: object) -> None:
        raise MemoryError

    data = written(Frame(pb.Reply(), [WireTensor.of(tensor("float32", (3,)))]))
    monkeypatch.setattr(np, "empty", empty)
    assert "no memory" in str(refused(data))


# ---------------------------------------------------------------------------------------------- fuzzing


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 200))
def test_random_bytes(data: bytes, piece: int) -> None:
    read_or_refused(data, piece)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=120), st.binary(max_size=64), st.integers(1, 64))
def test_a_random_header(header: bytes, payload: bytes, piece: int) -> None:
    read_or_refused(raw(header, payload), piece)


sizes = st.one_of(st.integers(0, 200), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32 - 1, 2**40, 2**63]))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), sizes, st.binary(max_size=100))
def test_random_sizes(header_size: int, payload_size: int, rest: bytes) -> None:
    read_or_refused(PREFIX.pack(b"FLT1", header_size, payload_size) + rest)


dims = st.one_of(st.integers(0, 5), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))
announcements = st.lists(
    st.tuples(st.sampled_from([*DTYPES, "int32", "", "object"]), st.lists(dims, max_size=5).map(tuple)), max_size=4
)


@settings(max_examples=100, deadline=None)
@given(announcements, st.integers(0, 12))
def test_random_tensors(tensors: list[tuple[str, tuple[int, ...]]], sixteens: int) -> None:
    read_or_refused(raw(announcing(*tensors), bytes(16 * sixteens)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_frames(data: st.DataObject) -> None:
    """Flipped, cut, inserted and repeated bytes of a good frame."""
    values = [tensor("float32", (3, 2)), tensor("bfloat16", ()), tensor("int64", (0, 4)), tensor("uint8", (17,))]
    push = pb.Push(options=['{"lr": 0.1}'], present=b"\1", row_tables=[0, 1])
    frames = [
        Frame(pb.Request(worker=1, step=2, push=push), [WireTensor.of(value) for value in values]),
        Frame(pb.Reply(version=5, about="{}", error=pb.Error(kind="StateError", what="x")), [WireTensor.of(values[0])]),
    ]
    damaged = bytearray(written(data.draw(st.sampled_from(frames))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
        if kind == "flip" and damaged:
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del damaged[at:]
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            damaged[at:at] = damaged[at : at + 20]
    read_or_refused(bytes(damaged), data.draw(st.integers(1, 300)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_end_to_end_travel_as_one(dtype: str) -> None:
    parts = [tensor(dtype, (size,), size) for size in (3, 0, PIECE_BYTES // 3, 1)]
    one = EndToEnd(parts)
    sent = Frame(pb.Reply(), [one, WireTensor.of(tensor("float32", (5,)))])
    joined = Frame(pb.Reply(), [WireTensor.of(torch.cat(parts)), WireTensor.of(tensor("float32", (5,)))])
    assert (sent.nbytes, written(sent)) == (joined.nbytes, written(joined))
    check_same(read_frame(pb.Reply, sent.pieces()), [torch.cat(parts), tensor("float32", (5,))])
    kept, before = sent.kept(), torch.cat(parts)
    parts[0].zero_()
    check_same(read_frame(pb.Reply, sent.pieces()), [torch.cat(parts), tensor("float32", (5,))])
    check_same(read_frame(pb.Reply, kept.pieces()), [before, tensor("float32", (5,))])
