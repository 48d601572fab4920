"""Damaged requests for a server: good ones of every kind, with bytes flipped, cut, inserted and numbers made huge.

    python tests/fuzz.py --minutes 5 [--seed 1] [--corpus tests/corpus]

One member of a running job sends them, so that most get past the door; some go through the doors themselves, gRPC,
direct connections and health checks. Whatever they are, they have to end in a ``FleetError`` for their sender, and the
job has to go on. So do replies that are damaged on their way back, for whoever asked. An input that ends in a way not
seen before is kept in the corpus, which test_hostile.py sends again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import random
import re
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import torch
from google.protobuf.descriptor import FieldDescriptor
from harness import until
from inside import filled_of, task_of

from fleet.base.clock import SystemClock
from fleet.base.cluster import Binding, Endpoint
from fleet.base.settings import ProcessSettings, SecuritySettings
from fleet.errors import FleetError, ProtocolError
from fleet.kernels import RULES
from fleet.nn import CountFilter, Unused
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import make_plan
from fleet.plan.specs import GroupSpec, Initializer, JobSpec, ParamSpec, PlanSettings, TableSpec
from fleet.ps.server.service import Service
from fleet.ps.table.shard import FIRST
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.direct_client import WELCOME
from fleet.ps.wire.direct_server import DirectListener
from fleet.ps.wire.frame import Frame, read_frame
from fleet.ps.wire.grpc_client import EXCHANGE, UPLOAD, URGENT
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.health import HealthNetwork
from fleet.ps.wire.line import Line
from fleet.ps.wire.low_precision import Narrow
from fleet.ps.wire.move_names import ATTEMPT, GIVEN, given_cursor
from fleet.ps.wire.security import Security
from fleet.ps.wire.transport import Respond
from fleet.ps.wire.wire_errors import raise_if_error

CORPUS = Path(__file__).parent / "corpus"

#: What the process may take beyond what it has at the beginning.
MOST_BYTES = 1 << 30
MOST_MESSAGE_BYTES = 16 << 20
#: Where there is no checkpoint, and nobody may write one.
NOWHERE = "/proc/none/of/these"
#: A server answers so many, then there is a new one.
_LIFE = 2000
#: One of so many goes through a door, which takes longer.
_PER_DOOR = 40

SGD = RULES["SGD"].rows
assert SGD is not None
OPTIONS = json.dumps(dict(SGD.options))

#: What the workers of a job have agreed on, by its name.
JOBS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness": 2},
    "geo": {"mode": "geo"},
    "sync-int8": {"wire_dtype": "int8"},
    "async-fp16": {"mode": "async", "wire_dtype": "fp16"},
    "geo-bf16": {"mode": "geo", "wire_dtype": "bf16"},
    "dc_asgd": {"mode": "async", "dc_lambda": 0.5, "dc_adaptive": True},
}
#: Rows that come and leave by rules.
COUNTED = TableSpec("rare", 1, "float32", 0, None, Initializer("zeros"), admit=CountFilter(2), evict=(Unused(steps=9),))
SPECS = {
    name: JobSpec(
        params=(ParamSpec("weight", (3, 2), "float32", 0), ParamSpec("bias", (3,), "float64", 0)),
        tables=(
            TableSpec("user", 2, "float32", 0, 100, Initializer("normal", 0.0, 1.0)),
            TableSpec("item", 3, "float64", 0, None, Initializer("zeros")),
            *([COUNTED] if "dc_lambda" in agreed else []),
        ),
        groups=(GroupSpec("SGD", 0, tuple(SGD.options)),),
        settings=PlanSettings(server_num=1, worker_num=2, **agreed),
    )
    for name, agreed in JOBS.items()
}
ENDPOINT = Endpoint("server", 1)


def _tensors(*arrays: np.ndarray) -> list[WireTensor]:
    return [WireTensor.of(array) for array in arrays]


def _ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


Asked = tuple[dict[str, object], list[WireTensor]]


def requests(job: str, step: int) -> dict[str, Asked]:
    """A good request of every kind but those that end a worker's part, and those of moves."""
    weight, bias = np.ones(6, np.float32), np.ones(3)
    told = {"spec": SPECS[job].to_json(), "fingerprint": make_plan(SPECS[job]).fingerprint, "options": [OPTIONS]}
    rows = {"row_tables": [0, 1], "used_tables": [0, 1], "row_counts": [2, 2], "rows_read_at": [0, 0]}
    push = pb.Push(options=[OPTIONS], present=b"\1\1", steps=1, **rows)  # type: ignore[arg-type]
    behind = pb.Push(options=[OPTIONS], present=b"\0\1", steps=1, attempt=7)
    keeping = pb.Keeping(kept=True, gives=True, asks="ckpt@1")
    kept = pb.Push(options=[OPTIONS], present=b"\0\1", steps=1, keeping=keeping)
    own = np.frombuffer(b"{}\n", np.uint8)

    def gradients(*arrays: np.ndarray) -> list[WireTensor]:
        narrow = Narrow(SPECS[job].settings.wire_dtype)
        return [each for array in arrays for each in narrow.encode(torch.from_numpy(array))]

    return {
        "hello": ({"hello": pb.Hello(endpoints=[str(ENDPOINT)], label="host:1", **told)}, []),
        "upload": ({"upload": pb.Upload(blocks=[0, 1])}, _tensors(weight, bias)),
        "rows": ({"upload": pb.Upload(rows=True, table=0)}, _tensors(_ids(3, 4), np.ones((2, 2), np.float32))),
        "ready": ({"ready": pb.Ready()}, []),
        "edit": ({"upload": pb.Upload(blocks=[0], edit=True)}, _tensors(np.array([128], np.uint8), weight[:1])),
        "part": ({"part": pb.Part(attempt=7, blocks=[0])}, _tensors(weight)),
        "behind": ({"push": behind}, gradients(bias)),
        "push": (
            {"push": push},
            [
                *gradients(weight, bias),
                *_tensors(_ids(1, 2, -7, 2**62)),
                *gradients(np.ones((2, 2), np.float32)),
                *gradients(np.ones((2, 3))),
            ],
        ),
        "pull": (
            {"pull": pb.Pull(dense=True, tables=[0, 1], training=[1, 0], counts=[3, 1])},
            _tensors(_ids(1, 1, 9, -1)),
        ),
        "later": (
            {"pull": pb.Pull(version=step + 1, ahead=True, tables=[1], training=[1], counts=[1])},
            _tensors(_ids(5)),
        ),
        "changed": (
            {"pull": pb.Pull(version=step, tables=[1, 0], training=[1, 1], counts=[1, 2], since=[step, 0])},
            _tensors(_ids(5, 6, 7)),
        ),
        "beat": ({"beat": pb.Beat(figures={"steps": step, "loss": 0.5})}, []),
        "status": ({"status": pb.Status()}, []),
        "follow": ({"follow": pb.Follow(server=0, servers=1)}, []),
        "changes": ({"changes": pb.Changes(fingerprint=make_plan(SPECS[job]).fingerprint)}, []),
        "later changes": (
            {"changes": pb.Changes(since=1, version=step + 1, wait_s=1, fingerprint=make_plan(SPECS[job]).fingerprint)},
            [],
        ),
        "fetch": ({"fetch": pb.Fetch(number=1, cursor="rows:1:0")}, []),
        "unfollow": ({"unfollow": pb.Unfollow()}, []),
        "look": ({"look": pb.Look(root=NOWHERE, job_id="")}, []),
        "choose": ({"choose": pb.Choose(step=3, id="a", strict=True, root=NOWHERE)}, []),
        "export": ({"export": pb.Export(cursor="table:0:0", version=step - 1)}, []),
        "save": ({"save": pb.Save(id="a", folder=NOWHERE, proof="b", version=step - 1)}, []),
        "load": ({"load": pb.Load(id="a", url=NOWHERE, attempt="c")}, []),
        "anew": ({"ready": pb.Ready(anew=True, attempt="c")}, []),
        "settle": ({"settle": pb.Settle(id="a", url=NOWHERE)}, []),
        "claim": ({"claim": pb.Claim(name="ckpt@1")}, []),
        "release": ({"release": pb.Release(name="ckpt@1", failure="no room")}, []),
        "gather": ({"gather": pb.Gather(number=1, op="sum", dtype="float32")}, _tensors(weight)),
        "kept": ({"push": kept}, [*gradients(bias), *_tensors(own)]),
        "give": ({"give": pb.Give(name="ckpt@1", steps=step)}, _tensors(own)),
        "recall": ({"recall": pb.Recall()}, []),
        "collect": ({"recall": pb.Recall(collection="ckpt@1")}, []),
        "collected": ({"recall": pb.Recall(collection="ckpt@1", workers=[0])}, []),
        "survey": ({"survey": pb.Survey()}, []),
        "shrink": ({"shrink": pb.Shrink(now=5.0, version=step - 1)}, []),
        "rank": ({"rank": pb.Rank(tables=[0])}, _tensors(_ids(0, 9), _ids(-7, 2**62))),
        "cut": ({"cut": pb.Cut(tables=[0], scores=[9], ids=[-7], version=step - 1)}, []),
        "extend": ({"extend": pb.Extend(**told)}, []),
    }


#: The move by which worker 0 copies a job, to the server where it is.
MOVE = f"{ATTEMPT}1 by 1"


@cache
def copied(job: str) -> tuple[str, list[Asked]]:
    """What a server says of a job when rows begin to be copied, and all that another one is filled with, in order."""
    source = Target(job)
    source.ask(0, 0, *requests(job, 1)["pull"])
    for worker in (0, 1):
        source.feed(written(worker, 1, *requests(job, 1)["push"]))
    halt = pb.Halt(attempt=MOVE, version=1, round=1)
    begun = source.ask(0, 1, {"halt": halt}, []).message
    pieces = [*_exported(source, begun.cursor)]
    halt.round = 0
    still = source.ask(0, 1, {"halt": halt}, [])
    for cursor in (FIRST, *(given_cursor(*key) for key in json.loads(still.message.about)[GIVEN])):
        pieces += _exported(source, cursor)
    return begun.about, [*pieces, ({"state": still.message.about}, still.tensors)]


def _exported(source: Target, cursor: str) -> Iterator[Asked]:
    while cursor:
        reply = source.ask(0, 1, {"export": pb.Export(cursor=cursor, version=1, checkpoint=MOVE)}, [])
        yield {"about": reply.message.about}, reply.tensors
        cursor = reply.message.cursor


def moves(job: str) -> dict[str, Asked]:
    """Good requests by which a job moves to where it is, up to the decision, and is given up."""
    about, pieces = copied(job)
    push, tensors = requests(job, 1)["push"]
    told = {"spec": SPECS[job].to_json(), "fingerprint": make_plan(SPECS[job]).fingerprint}
    stage = pb.Stage(attempt=MOVE, server=0, endpoints=[str(ENDPOINT)], about=about, **told)  # type: ignore[arg-type]
    kinds: dict[str, Asked] = {
        "where": ({"where": pb.Where()}, []),
        "rearrange": ({"rearrange": pb.Rearrange(endpoints=["other:1"])}, []),
        "copy": ({"halt": pb.Halt(attempt=MOVE, round=1)}, []),
        "copied": ({"export": pb.Export(cursor="removed:0:0", checkpoint=MOVE)}, []),
        "given": ({"export": pb.Export(cursor=given_cursor(0, 1), checkpoint=MOVE)}, []),
        "stage": ({"stage": stage}, []),
        "push that moves": ({"fill": pb.Fill(attempt=MOVE, number=1, pushed=push["push"], by=1, at=2)}, tensors),  # type: ignore[arg-type]
        "given up": ({"switch": pb.Switch(attempt=MOVE, given_up=True)}, []),
    }
    for number, (piece, tensors) in enumerate(pieces):
        fill = pb.Fill(attempt=MOVE, number=1, **piece)  # type: ignore[arg-type]
        kinds[f"piece {number}"] = ({"fill": fill}, tensors)
    return kinds


class Target:
    """A server in the midst of a job of two workers."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.over = False
        self.step = 1  #: the next one of the member that behaves
        self.answers: deque[bytes] = deque(maxlen=8)  #: the last ones
        settings = ProcessSettings(security=SecuritySettings(max_message_bytes=MOST_MESSAGE_BYTES))
        self._service = Service(ENDPOINT, settings, SystemClock())
        for worker in (0, 1):
            self.ask(worker, 0, *requests(job, 1)["hello"])
        self.ask(0, 0, *requests(job, 1)["upload"])
        self.ask(0, 0, *requests(job, 1)["ready"])

    def ask(self, worker: int, step: int, kind: dict[str, object], tensors: list[WireTensor]) -> Frame:
        frame = Frame(pb.Request(worker=worker, incarnation=worker + 1, step=step, **kind), tensors)  # type: ignore[arg-type]
        replies: list[Frame] = []
        self._service.handle(frame, replies.append)
        (reply,) = replies
        return raise_if_error(reply)

    def handle(self, frame: Frame, respond: Respond) -> Callable[[], None] | None:
        """As the server does it, but for what members may do to a job: to leave it, to end it and to move it."""
        message, kind = frame.message, frame.message.WhichOneof("kind")
        is_halt, is_made = kind == "halt" and not message.halt.round, kind == "switch" and not message.switch.given_up
        if kind in ("bye", "abort") or is_halt or is_made:
            raise ProtocolError(f"{kind} is not sent")
        return self._service.handle(frame, respond)

    def feed(self, data: bytes) -> str:
        """What becomes of some bytes, in a word. Everything that must not happen is raised."""
        try:
            frame = read_frame(pb.Request, [data], MOST_MESSAGE_BYTES)
        except FleetError as error:
            return f"unread: {_outline(error)}"
        kind = frame.message.WhichOneof("kind")
        if kind == "fill" and frame.message.fill.number == 1:  # whichever comes is the next piece
            frame.message.fill.number = filled_of(self._service) + 1
        replies: list[Frame] = []
        try:
            self.handle(frame, replies.append)
            task = task_of(self._service)
            until(lambda: task is None or task.is_done)
            for reply in replies:
                read_frame(pb.Reply, reply.pieces())
                raise_if_error(reply)
        except FleetError as error:
            return f"{kind}: {_outline(error)}"
        finally:
            self.check_running()
        self.answers.extend(b"".join(reply.pieces()) for reply in replies)
        return f"{kind}: {'answered' if replies else 'waits'}"

    def check_running(self) -> None:
        failure = self._service.failure
        # A gathering of one worker and a step of the other is honest, and the end of any job.
        self.over = failure is not None and failure.what == "the workers wait for each other"
        assert failure is None or self.over, f"the job ended: {failure}"

    def check(self) -> None:
        """The other worker is served as ever, and its steps close the rounds that are open."""
        reply = self.ask(1, 0, {"pull": pb.Pull(tables=[0], training=[True], counts=[1])}, _tensors(_ids(50)))
        assert reply.tensors[0].shape == (1, 2)
        self.ask(1, 0, {"beat": pb.Beat()}, [])
        kind, tensors = requests(self.job, self.step)["push"]
        data = written(1, self.step, kind, tensors)
        if self.feed(data) in ("push: answered", "push: waits"):
            self.step += 1


class Doors:
    """The ways by which bytes come to a server: as calls of gRPC, over direct connections, as checks of its health."""

    #: A request that waits for others is given up after this time.
    PATIENCE_S = 0.1

    def __init__(self, target: Target) -> None:
        with socket.socket() as first, socket.socket() as second:
            for each in (first, second):
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in (first, second)]
        at, health = (Endpoint("127.0.0.1", port) for port in ports)
        self._stack = contextlib.ExitStack()
        security = Security(max_message_bytes=MOST_MESSAGE_BYTES)
        network = HealthNetwork(GrpcNetwork(4, security), health.port, Binding())
        self._stack.callback(network.listen(at, target.handle).close)
        direct = DirectListener(at, 0, target.handle, security)
        self._stack.callback(direct.close)
        self._address = direct.address
        channel, checks = (self._stack.enter_context(grpc.insecure_channel(str(each))) for each in (at, health))
        self._ways: dict[str, Callable[[bytes], object]] = {
            "exchange": lambda data: self._called(channel.unary_stream(EXCHANGE)(data, timeout=self.PATIENCE_S)),
            "upload": lambda data: self._called(
                channel.stream_stream(UPLOAD)(iter([data[:100], data[100:]]), timeout=self.PATIENCE_S)
            ),
            "urgent": lambda data: self._called(channel.unary_stream(URGENT)(data, timeout=self.PATIENCE_S)),
            "another method": lambda data: channel.unary_unary("/fleet.ParameterServer/Other")(data, timeout=5.0),
            "health": lambda data: checks.unary_unary("/grpc.health.v1.Health/Check")(data, timeout=5.0),
            "health of": lambda data: checks.unary_unary("/grpc.health.v1.Health/Check")(
                b"\n" + bytes([len(data[-8:])]) + data[-8:], timeout=5.0
            ),
            "watch": lambda data: list(checks.unary_stream("/grpc.health.v1.Health/Watch")(data, timeout=5.0)),
            "direct": self._direct,
            "no key": self._without_key,
        }

    def send(self, data: bytes, chance: random.Random) -> str:
        """What becomes of some bytes at a door."""
        way = chance.choice(list(self._ways))
        if chance.random() < 0.2:
            data = data[: chance.randrange(len(data) + 1)]
        try:
            self._ways[way](data)
        except FleetError as error:
            return f"{way}: {_outline(error)}"
        except grpc.RpcError as error:
            return f"{way}: {error.code().name}"  # type: ignore[attr-defined]
        except TimeoutError:
            return f"{way}: waits"
        except OSError:
            return f"{way}: hung up"
        return f"{way}: answered"

    @staticmethod
    def _called(pieces: Iterable[bytes]) -> None:
        raise_if_error(read_frame(pb.Reply, pieces))

    def _direct(self, data: bytes) -> None:
        with self._connected() as peer:
            peer.sendall(self._address.key)
            assert peer.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME
            peer.settimeout(self.PATIENCE_S)
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            raise_if_error(Line(peer).receive(pb.Reply))

    def _without_key(self, data: bytes) -> None:
        with self._connected() as peer:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            assert not peer.recv(1), "somebody was let in without the key"
            raise ConnectionRefusedError

    def _connected(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(5.0)
        peer.connect("\0" + self._address.local)
        return peer

    def close(self) -> None:
        self._stack.close()


def read_reply(data: bytes) -> str:
    """What becomes of a reply at whoever asked."""
    try:
        raise_if_error(read_frame(pb.Reply, [data], MOST_MESSAGE_BYTES))
    except FleetError as error:
        return f"reply: {type(error).__name__}"
    return "reply: taken"


def _outline(error: FleetError) -> str:
    return f"{type(error).__name__}: {re.sub('[0-9]+', '#', error.what)[:80]}"


def written(worker: int, step: int, kind: dict[str, object], tensors: list[WireTensor]) -> bytes:
    message = pb.Request(worker=worker, incarnation=worker + 1, step=step, **kind)  # type: ignore[arg-type]
    return b"".join(Frame(message, tensors).pieces())


def good(job: str, step: int = 1) -> dict[str, bytes]:
    """Good requests of worker 0, as bytes."""
    every = requests(job, step) | moves(job)
    return {name: written(0, step, kind, tensors) for name, (kind, tensors) in every.items()}


_NUMBERS = (0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Some bytes with a few things wrong; often with a prefix that fits again, so that the rest is looked at."""
    header_size = int.from_bytes(data[4:8], "little")
    header, rest = bytearray(data[16 : 16 + header_size]), bytearray(data[16 + -(-header_size // 16) * 16 :])
    for _ in range(chance.randint(1, 4)):
        part = header if chance.random() < 0.8 else rest
        at = chance.randrange(len(part) + 1)
        match chance.randrange(6):
            case 0 if at < len(part):
                part[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(part):
                part[at] = chance.randrange(256)
            case 2:
                del part[at : at + chance.randint(1, 8)]
            case 3:
                part[at:at] = chance.randbytes(chance.randint(1, 8))
            case 4:
                part[at:at] = part[at : at + chance.randint(1, 32)]
            case _:
                part[at : at + 8] = chance.choice(_NUMBERS).to_bytes(8, chance.choice(("little", "big")))
    payload_size = len(rest)
    if chance.random() < 0.05:
        payload_size = chance.choice(_NUMBERS)
    prefix = b"FLT1" + len(header).to_bytes(4, "little") + payload_size.to_bytes(8, "little")
    return prefix + bytes(header) + bytes(-len(header) % 16) + bytes(rest)


def twisted(data: bytes, chance: random.Random) -> bytes:
    """A good request with other values in its fields and other tensors, well-formed."""
    frame = read_frame(pb.Request, [data])
    message = frame.message
    inner = getattr(message, message.WhichOneof("kind"))
    for _ in range(chance.randint(1, 3)):
        if isinstance(inner, pb.Beat):
            odd = chance.choice(("loss", "x" * 65, "\x00", "ids per second"))
            inner.figures[odd] = chance.choice((float("nan"), float("inf"), -1.0, 1e308))
        place = inner if _plain_fields(inner) and chance.random() < 0.8 else message
        field = chance.choice(_plain_fields(place))
        if field.name in ("worker", "incarnation"):
            continue
        value = getattr(place, field.name)
        if isinstance(value, int | float | str | bytes):
            setattr(place, field.name, _other(value, field.type, chance))
        elif len(value) and chance.random() < 0.7:
            at = chance.randrange(len(value))
            value[at] = _other(value[at], field.type, chance)
        elif len(value):
            value.extend([value[0]] * chance.choice((1, 100))) if chance.random() < 0.5 else value.pop()
    if frame.tensors and chance.random() < 0.4:
        at = chance.randrange(len(frame.tensors))
        shape = chance.choice(((), (0,), (1,), (2,), (5,), (2, 2), (2, 3), (0, 2), (1, 1, 1)))
        dtype = chance.choice((np.int64, np.float32, np.float64, np.uint8, np.float16))
        numbers = [chance.choice((0, 1, -1, 99, 100, 2**62, -(2**63))) for _ in range(int(np.prod(shape)))]
        with np.errstate(all="ignore"):
            frame.tensors[at] = WireTensor.of(np.array(numbers, np.int64).astype(dtype).reshape(shape))
    return b"".join(frame.pieces())


def _plain_fields(message: Any) -> list[Any]:
    """Those that hold no messages."""
    return [each for each in message.DESCRIPTOR.fields if each.message_type is None]


def _other(value: object, kind: int, chance: random.Random) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        bits = 32 if kind == FieldDescriptor.TYPE_UINT32 else 64
        other = chance.choice((0, 1, value + 1, 2, 1000, 2**31, 2**63, 2**bits - 1)) % 2**bits
        return other - 2**64 if kind == FieldDescriptor.TYPE_SINT64 and other >= 2**63 else other
    if isinstance(value, float):
        return chance.choice((0.0, -1.0, 1e308, float("inf"), float("nan")))
    if isinstance(value, bytes):
        return bytes(chance.choice((0, 1, 255)) for _ in range(len(value) + chance.choice((-1, 0, 0, 0, 1))))
    assert isinstance(value, str)
    numbers = [match.span() for match in re.finditer(r"[0-9][0-9.e-]*|true|false|null", value)]
    if not numbers or chance.random() < 0.2:
        return chance.choice(
            ("", "\x00", "dense:0", "dense:99999", "table:1:0", "table:0:7", "barrier", "max", value * 50)
        )
    start, stop = chance.choice(numbers)
    odd = ("-1", "0", "1e999", "NaN", "1" + "0" * 400, "null", "true", '"x"', "[1]", "{}", str(2**62), "[" * 5000)
    return value[:start] + chance.choice(odd) + value[stop:]


def changed(data: bytes, chance: random.Random) -> bytes:
    """A good request, mostly with something wrong."""
    change = chance.choices((None, damaged, twisted), (2, 29, 69))[0]
    return data if change is None else change(data, chance)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, default=None, help="keep here what ends in a new way")
    options = parser.parse_args()
    logging.disable()
    seen: Counter[str] = Counter()
    began = psutil.Process().memory_info().rss
    end = time.monotonic() + options.minutes * 60
    chance = random.Random(options.seed)
    for life in itertools.count():
        target = Target(list(JOBS)[life % len(JOBS)])
        with contextlib.closing(Doors(target)) as doors:
            for number in range(_LIFE):
                if number % 50 == 0:
                    seeds = list(good(target.job, target.step).values())
                data = changed(chance.choice(seeds), chance)
                through_door = number % _PER_DOOR == 0
                try:
                    outcome = doors.send(data, chance) if through_door else target.feed(data)
                    target.check_running()
                    if target.answers:
                        seen[read_reply(damaged(chance.choice(target.answers), chance))] += 1
                    if number % 50 == 49 and not target.over:
                        target.check()
                except Exception:
                    print(f"input {number} of life {life}, seed {options.seed}, {target.job}: {data.hex()}")
                    raise
                if not seen[outcome] and options.corpus is not None and not through_door:
                    options.corpus.mkdir(parents=True, exist_ok=True)
                    name = re.sub("[^a-z0-9]+", "-", outcome.lower()).strip("-")[:60]
                    (options.corpus / f"{target.job}.{name}.bin").write_bytes(data)
                seen[outcome] += 1
                if target.over or time.monotonic() > end:
                    break
        taken = psutil.Process().memory_info().rss - began
        assert taken < MOST_BYTES, f"{taken >> 20} MiB were taken"
        if time.monotonic() > end:
            break
    for outcome, times in sorted(seen.items()):
        print(f"{times:9d}  {outcome}")
    print(f"{sum(seen.values())} requests, {len(seen)} ways to end, {taken >> 20} MiB taken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
