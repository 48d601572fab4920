"""Whatever a peer sends ends in an error for that peer, takes little memory, and disturbs nobody's training.

What a frame may be is tested in test_frame.py, who is let in at all in test_security.py.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
import struct
import tempfile
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz
import grpc
import numpy as np
import pytest
import torch
from harness import PATIENT, Job, run_job, until, values
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import job_of
from patience import PATIENCE_S

from fleet import Fleet
from fleet.base.clock import SystemClock
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings, SecuritySettings
from fleet.checkpoint.assembly import Assembly
from fleet.checkpoint.manifest import Checkpoint, Manifest
from fleet.errors import CheckpointError, ConfigurationError, FleetError, IdentityError, ProtocolError
from fleet.numeric import buffers
from fleet.numeric.tensors import WireTensor
from fleet.plan.plan import make_plan
from fleet.plan.specs import JobSpec
from fleet.ps.server import job as served
from fleet.ps.server.admission import check_share
from fleet.ps.server.service import Service
from fleet.ps.table.shard import Shard
from fleet.ps.wire import direct_connections, grpc_server
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.direct_client import WELCOME
from fleet.ps.wire.direct_connections import Connection
from fleet.ps.wire.direct_server import DirectListener
from fleet.ps.wire.frame import MAX_HEADER_BYTES, Frame, read_frame
from fleet.ps.wire.grpc_client import EXCHANGE, UPLOAD, URGENT
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.line import Line
from fleet.ps.wire.move_names import GIVEN
from fleet.ps.wire.real_network import real_network
from fleet.ps.wire.security import Security
from fleet.ps.wire.transport import TransportError
from fleet.ps.wire.wire_errors import error_reply, raise_if_error
from fleet.role_maker import Role, UserDefinedRoleMaker

MEBI = 1 << 20
SPEC = fuzz.SPECS["sync"]
PLAN = make_plan(SPEC)


@contextlib.contextmanager
def taking_at_most(nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------------- decoders, anything in

texts = st.one_of(st.text(max_size=200), st.binary(max_size=200).map(lambda data: data.decode("latin1")))
values_of_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


def places(raw: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inside = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in inside:
        yield from places(value, (*path, key))


def replaced(raw: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    raw = copy.deepcopy(raw)
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return raw


def read_or_refused(read: Callable[[], object], *refusals: type[Exception]) -> None:
    with contextlib.suppress(*refusals), taking_at_most(4 * MEBI):
        read()


@settings(max_examples=100, deadline=None)
@given(texts)
def test_any_text_as_a_job(text: str) -> None:
    read_or_refused(lambda: JobSpec.from_json(text), ProtocolError)


odd = st.one_of(values_of_json, st.sampled_from([-1, 0, 1 << 31, 1 << 62, 1 << 64, 10**400, 1e308, "", "w" * 1000, []]))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_value_in_a_job(data: st.DataObject) -> None:
    """What is read all the same can be planned, and a server can tell whether it could hold it."""
    raw = json.loads(SPEC.to_json())
    path = data.draw(st.sampled_from(list(places(raw))))
    text = json.dumps(replaced(raw, path, data.draw(odd)))

    def plan() -> None:
        spec = JobSpec.from_json(text)
        check_share(fuzz.ENDPOINT, make_plan(spec), 0, [fuzz.OPTIONS], 64 * MEBI)

    read_or_refused(plan, ProtocolError, ConfigurationError)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"params":' * 50_000,
        "[[],[],[]," * (1 << 20),
        "9" * 1_000_000,
        json.dumps([0] * (1 << 21)),
    ],
    ids=["deep", "deep objects", "many lists", "a long number", "many numbers"],
)
def test_large_texts_that_are_no_job(text: str) -> None:
    with pytest.raises(ProtocolError), taking_at_most(4 * MEBI):
        JobSpec.from_json(text)


def test_a_job_of_a_billion_blocks_is_not_planned() -> None:
    raw = json.loads(SPEC.to_json())
    raw["settings"] |= {"server_num": 1 << 16, "min_block_size": 1}
    raw["params"] = [{**raw["params"][0], "name": str(n), "shape": [1 << 30]} for n in range(17)]
    with pytest.raises(ProtocolError, match=r"more than 2\^20 blocks"), taking_at_most(4 * MEBI):
        JobSpec.from_json(json.dumps(raw))


@settings(max_examples=60, deadline=None)
@given(st.one_of(texts, values_of_json.map(json.dumps), st.sampled_from(["[" * 10_000, "9" * 5000, '{"lr": 1e999}'])))
def test_any_text_as_options(text: str) -> None:
    read_or_refused(lambda: Shard.check_options(PLAN, [text]), ProtocolError)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_value_in_a_manifest(data: st.DataObject) -> None:
    raw = json.loads(Manifest("1f", 3, 1, SPEC, ()).to_json())
    raw["pieces"] = [{"file": "p/0", "bytes": 1, "crc32": 1, "tensors": ["a"], "about": {"dense": []}}]
    del raw["crc32"]
    raw = replaced(raw, data.draw(st.sampled_from(list(places(raw)))), data.draw(odd))
    if isinstance(raw, dict):  # one that was not damaged by accident
        raw["crc32"] = zlib.crc32(json.dumps(raw, sort_keys=True).encode())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "manifest.json").write_text(json.dumps(raw))
        read_or_refused(lambda: Checkpoint.open(folder), CheckpointError)


def test_a_header_takes_a_bounded_multiple_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the smallest things that a header can be full of; a shape that is a header long is not even copied."""
    monkeypatch.setattr("fleet.ps.wire.frame.MAX_HEADER_BYTES", MEBI)
    tiny = b"\xf2\x01\x00" * (MEBI // 3)
    shape = pb.Request(tensors=[pb.Tensor(dtype="float32", shape=[1] * (MEBI - 100))]).SerializeToString()
    for header in (tiny, shape):
        data = struct.pack("<4sIQ", b"FLT1", len(header), 0) + header + bytes(-len(header) % 16)
        with pytest.raises(ProtocolError, match="too many"), taking_at_most(4 * MEBI):
            read_frame(pb.Request, [data])
    assert MAX_HEADER_BYTES <= 16 * MEBI


# ---------------------------------------------------------------------------------------------- requests of a member


@pytest.mark.parametrize("path", sorted(fuzz.CORPUS.glob("*.bin")), ids=lambda path: path.stem)
def test_requests_that_once_were_new(path: Path) -> None:
    """Each in the midst of a job; fuzz.py looks for new ones."""
    target = fuzz.Target(path.name.partition(".")[0])
    target.feed(path.read_bytes())
    if not target.over:
        target.check()


def misfits(name: str, about: str, tensors: list[WireTensor]) -> Iterator[tuple[str, str, list[WireTensor]]]:
    """What looks like a piece of a job that moves, and is none."""
    for place, tensor in enumerate(tensors):
        array = tensor.array
        others = {
            "shorter": array[:-1],
            "longer": np.concatenate([array, array[:1]]),
            "deeper": array[:, None],
            "of another type": array.astype(np.int64 if array.dtype == np.uint8 else np.uint8),
        }
        for what, other in others.items():
            yield f"{name}, {place} {what}", about, [*tensors[:place], WireTensor.of(other), *tensors[place + 1 :]]
    yield f"{name}, one lost", about, tensors[:-1]
    yield f"{name}, one twice", about, [*tensors, tensors[-1]]
    told = json.loads(about)
    for key in (None, 1, [], [0], ["x", 0], [True, 0], [-1, 0], [0.0, 0], [0, 0.5], [0, -1], [0, 99]):
        yield f"{name} of {key}", json.dumps({**told, GIVEN: key}), tensors
    if told.get("dtypes"):
        for types in (None, 1, [], told["dtypes"][::-1], ["float32"] * 2, ["float16"] * 2):
            yield f"{name} of {types}", json.dumps({**told, "dtypes": types}), tensors


@pytest.mark.parametrize("job", ["dc_asgd", "geo"])
def test_pieces_of_a_job_that_moves_have_to_fit(job: str) -> None:
    """Compiled functions read and write where they are told, so nothing reaches them that is not as it should be."""
    kinds, taken = fuzz.moves(job), []
    pieces = {name: kind["fill"] for name, (kind, _) in kinds.items() if name.startswith("piece")}
    pieces = {name: fill for name, fill in pieces.items() if GIVEN in fill.about}
    assert len(pieces) == (5 if job == "dc_asgd" else 1)
    target = fuzz.Target(job)
    for name in ("copy", "stage"):
        target.ask(0, 1, *kinds[name])
    for name, fill in pieces.items():
        for what, about, tensors in misfits(name, fill.about, kinds[name][1]):
            try:
                target.ask(0, 1, {"fill": pb.Fill(attempt=fuzz.MOVE, number=1, about=about)}, tensors)
            except ProtocolError:
                continue
            taken.append(what)
            target.ask(0, 1, *kinds["given up"])
            for again in ("copy", "stage"):
                target.ask(0, 1, *kinds[again])
    assert not taken


@pytest.mark.parametrize("width", [0, 5])
def test_columns_of_rows_have_the_width_that_they_have_here(width: int) -> None:
    kinds = fuzz.moves("dc_asgd")
    target = fuzz.Target("dc_asgd")
    for name in ("copy", "stage"):
        target.ask(0, 1, *kinds[name])
    about = json.dumps({"table": "rare", "step": 1, "columns": ["weight", "life.used"]})
    values = [np.arange(3), np.ones((3, 1), np.float32), np.ones((3, width), np.int64)]
    fill = pb.Fill(attempt=fuzz.MOVE, number=1, about=about)
    with pytest.raises(ProtocolError, match="does not fit"):
        target.ask(0, 1, {"fill": fill}, [WireTensor.of(each) for each in values])


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 3, 3), (0, 3, 3)],
        [(0, 6, 1)] * 6,
        [(-3, 3, 3), (3, 3, 3)],
        [(0, 3, 3), (4, 3, 3)],
        [(0, 2, 2), (3, 3, 3)],
        [],
    ],
)
def test_pieces_of_a_parameter_are_all_of_it_once(pieces: list[tuple[int, int, int]]) -> None:
    """What no piece has is no number."""

    def put_together(given: list[tuple[int, int, int]]) -> torch.Tensor:
        assembly = Assembly({"w": 6}, "here")
        for offset, numel, sent in given:
            entry = {"param": "w", "key": "value", "elementwise": True, "offset": offset, "numel": numel}
            assembly.add([entry], [torch.arange(float(sent)) + offset])
        whole: torch.Tensor = assembly.whole("w")[0]["value"]
        return whole

    with pytest.raises(CheckpointError, match="lacks values of 'w'"):
        put_together(pieces)
    assert put_together([(4, 2, 2), (0, 3, 3), (3, 1, 1), (4, 0, 0)]).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["GIVEN", "HANDED", "BEFORE", "LOST", "NONE"])
def test_nothing_else_comes_beside_the_state_of_a_job(kind: str) -> None:
    kinds = fuzz.moves("dc_asgd")
    target = fuzz.Target("dc_asgd")
    for name in ("copy", "stage"):
        target.ask(0, 1, *kinds[name])
    record = Frame(pb.Reply(about=json.dumps({"worker": 0, "table": 0})), [WireTensor.of(np.arange(9))])
    records = [WireTensor.of(np.frombuffer(b"".join(record.buffers()), np.uint8))]
    for name, (asked, tensors) in kinds.items():
        if name.startswith("piece"):
            fill, beside = pb.Fill(), tensors
            fill.CopyFrom(asked["fill"])  # type: ignore[arg-type]
            if fill.state:  # the last one
                fill.state, beside = json.dumps(json.loads(fill.state) | {"records": [kind]}), records
            ended = "ProtocolError: the state of a job cannot be read" if fill.state else "answered"
            assert target.feed(fuzz.written(0, 1, {"fill": fill}, beside)) == f"fill: {ended}"


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", fuzz.JOBS)
def test_fuzz(job: str) -> None:
    chance = random.Random(job)
    target = fuzz.Target(job)
    for number in range(10_000):
        if target.over or number % 1000 == 0:
            target = fuzz.Target(job)
            seeds = list(fuzz.good(job, target.step).values())
        target.feed(chance.choice((fuzz.damaged, fuzz.twisted))(chance.choice(seeds), chance))


@pytest.mark.chaos
def test_fuzz_at_the_doors() -> None:
    chance = random.Random(1)
    target = fuzz.Target("sync")
    seeds = list(fuzz.good("sync").values())
    with contextlib.closing(fuzz.Doors(target)) as doors:
        ends = {doors.send(fuzz.changed(chance.choice(seeds), chance), chance).partition(":")[0] for _ in range(300)}
        target.check_running()
        if not target.over:
            target.check()
    assert len(ends) == 9


def evil() -> dict[str, tuple[dict[str, Any], list[np.ndarray], str]]:
    """Requests of a worker that has its place in the job, each alone in what is wrong with it."""
    ids, rows = np.arange(2), np.ones((2, 2), np.float32)
    good, tensors = fuzz.requests("sync", 1)["push"]
    arrays = [tensor.array for tensor in tensors]

    def push(**other: Any) -> dict[str, Any]:
        message = copy.deepcopy(good["push"])
        for name, value in other.items():
            if isinstance(value, list):
                del getattr(message, name)[:]
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        return {"push": message}

    def option(text: str) -> dict[str, Any]:
        return push(options=[fuzz.OPTIONS.replace('"lr": 0.001', f'"lr": {text}')])

    def pull(*counts: int) -> dict[str, Any]:
        return {"pull": pb.Pull(tables=[1], training=[True], counts=counts)}

    return {
        "ids out of range": (push(), [*arrays[:2], arrays[2] + 99, *arrays[3:]], "out of the table's range"),
        "negative ids": (push(), [*arrays[:2], arrays[2] - 2, *arrays[3:]], "out of the table's range"),
        "more ids than rows": (push(row_counts=[3, 2]), [*arrays[:2], np.arange(5), *arrays[3:]], "do not fit"),
        "more ids than are counted": (push(), [*arrays[:2], np.arange(5), *arrays[3:]], "flat int64"),
        "counts beyond numbers": (push(row_counts=[2**64 - 1, 5]), arrays, "flat int64"),
        "no ids but a number": (push(), [*arrays[:2], np.array(1), *arrays[3:]], "flat int64"),
        "rows of another width": (push(), [*arrays[:3], rows[:, :1], *arrays[4:]], "do not fit"),
        "a table without a count": (push(row_counts=[4]), arrays, "how many rows"),
        "a table too many": (push(row_tables=[0, 2**32 - 1]), arrays, "names a table this job does not have"),
        "a used table too many": (push(used_tables=[7]), arrays, "names a table this job does not have"),
        "gradients that are not flat": (push(), [arrays[0].reshape(2, 3), *arrays[1:]], "do not fit"),
        "blocks too many": (push(present=b"\1" * 1000), arrays, "other parameters than the job has"),
        "a learning rate of words": (option('"fast"'), arrays, "has become something else"),
        "a learning rate of nothing": (option("null"), arrays, "has become something else"),
        "a learning rate of lists": (option("[[1]]"), arrays, "no plain value"),
        "a learning rate beyond floats": (option("1" + "0" * 400), arrays, "no plain value"),
        "options of somebody else": (push(options=["{}"]), arrays, "other options"),
        "options without end": (push(options=["[" * 60_000]), arrays, "cannot be read"),
        "a step of the far future": ({**push(), "step": 2**64 - 1}, arrays, "skipped a step"),
        "a reply beyond memory": (pull(3 * MEBI), [np.zeros(3 * MEBI, np.int64)], "larger than a message may be"),
        "ids that are none": (pull(3), [np.ones(3)], "flat int64"),
        "ids that are too few": (pull(3), [ids], "flat int64"),
        "ids that nobody counts": (pull(), [ids], "differ in number"),
        "a table that is none": ({"pull": pb.Pull(tables=[9], training=[True], counts=[2])}, [ids], "names a table"),
        "a cursor of other digits": ({"export": pb.Export(cursor="dense:²")}, [], "cursor is unknown"),
        "a cursor beyond numbers": ({"export": pb.Export(cursor="dense:" + "9" * 5000)}, [], "cursor is unknown"),
        "a path for a name": ({"claim": pb.Claim(name="/" * 10_000)}, [], "cannot be claimed"),
        "a gathering of no kind": ({"gather": pb.Gather(number=1, op="__import__")}, [], "unknown kind"),
        "a gathering too far": ({"gather": pb.Gather(number=2**63, op="barrier")}, [], "skipped a gathering"),
        "a job of another shape": ({"extend": pb.Extend(spec="[" * 100_000)}, [], "cannot be read"),
        "other rows of another width": ({"upload": pb.Upload(anew=True, rows=True)}, [ids, rows[:, :1]], "do not fit"),
        "other rows out of range": ({"upload": pb.Upload(anew=True, rows=True)}, [ids + 99, rows], "out of the table"),
        "other blocks than there are": ({"upload": pb.Upload(anew=True, blocks=[7])}, [np.ones(6)], "does not have"),
        "initial values of a guest": ({"upload": pb.Upload(blocks=[0])}, [np.ones(6)], "come from worker 0"),
        "no kind at all": ({}, [], "unknown kind"),
    }


def member_and_other(limit_mb: int = 64, mode: str = "sync") -> tuple[Callable[..., list[Frame]], Service]:
    """A server of a job in its midst, and how its workers ask it: what they are answered at once."""
    settings = ProcessSettings(security=SecuritySettings(max_message_bytes=limit_mb * MEBI))
    service = Service(fuzz.ENDPOINT, settings, SystemClock())

    def ask(worker: int, kind: dict[str, Any], tensors: list[WireTensor] | None = None) -> list[Frame]:
        replies: list[Frame] = []
        frame = Frame(pb.Request(**{"worker": worker, "incarnation": worker + 1, "step": 1, **kind}), tensors or [])
        service.handle(frame, replies.append)
        return [raise_if_error(reply) for reply in replies]

    start = fuzz.requests(mode, 1)
    for worker, name in ((0, "hello"), (1, "hello"), (0, "upload"), (0, "ready")):
        ask(worker, *start[name])
    return ask, service


@pytest.mark.parametrize("case", evil())
def test_a_bad_request_concerns_its_sender_alone(case: str) -> None:
    kind, arrays, words = evil()[case]
    ask, service = member_and_other()
    with pytest.raises(FleetError, match=words):
        ask(1, kind, [WireTensor.of(array) for array in arrays])
    # The round goes on with both: the one that erred may do better.
    good = fuzz.requests("sync", 1)["push"]
    assert ask(0, *good) == []
    (reply,) = ask(1, *good)
    assert reply.message.version == 1
    assert service.failure is None


def test_nobody_fills_the_memory_with_rounds_to_come() -> None:
    ask, _ = member_and_other()
    push, tensors = fuzz.requests("sync", 1)["push"]
    ask(1, push, tensors)
    with pytest.raises(ProtocolError, match="pushed before its last round was over"):
        ask(1, {**push, "step": 2}, tensors)
    value = [WireTensor.of(np.ones(3))]
    ask(1, {"gather": pb.Gather(number=1, op="sum", dtype="float64")}, value)
    with pytest.raises(ProtocolError, match="did not wait for its gathering"):
        ask(1, {"gather": pb.Gather(number=2, op="sum", dtype="float64")}, value)


def test_nobody_fills_the_memory_with_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MAX_WAITING", 5)
    ask, _ = member_and_other(limit_mb=1)

    def later(worker: int, ids: int) -> None:
        pull = pb.Pull(version=9, tables=[0], training=[True], counts=[ids])
        ask(worker, {"pull": pull}, [WireTensor.of(np.zeros(ids, np.int64))])

    few, many = 1, 70_000
    later(0, many)
    with pytest.raises(ProtocolError, match="too many requests waiting"):
        later(0, many)
    for _ in range(4):
        later(0, few)
    with pytest.raises(ProtocolError, match=r"worker 0 has too many.*at most 5.*got 5 with"):
        later(0, few)
    later(1, few)


class Hand:
    """A clock that goes on when it is told to."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.mark.parametrize("how", ["says goodbye", "starts again", "falls silent"])
def test_what_a_process_that_is_gone_asked_for_before_the_values_is_nobody_s(how: str) -> None:
    clock = Hand()
    settings = ProcessSettings.read({**PATIENT, "FLEET_HEARTBEAT_S": "1", "FLAGS_rpc_deadline": "10000"})
    service = Service(fuzz.ENDPOINT, settings, clock)

    def ask(kind: str, worker: int, incarnation: int = 0, **own: Any) -> list[Frame]:
        told, tensors = (own, []) if own else fuzz.requests("geo", 1)[kind]
        message = pb.Request(worker=worker, incarnation=incarnation or worker + 1, **told)
        replies: list[Frame] = []
        service.handle(Frame(message, [*tensors]), replies.append)
        return replies

    for worker in (0, 1):
        ask("hello", worker)
    early = ask("pull", 1)
    assert not early, "there are no values yet"
    if how == "says goodbye":
        ask("bye", 1, bye=pb.Bye())
    elif how == "starts again":
        clock.time += 5
        ask("hello", 1, incarnation=9)
    else:
        clock.time += 6
        ask("beat", 0)
        clock.time += 6
        service.tick()
    assert early
    with pytest.raises(IdentityError, match="no longer part"):
        raise_if_error(early[0])
    for kind in ("upload", "ready"):
        ask(kind, 0)
    assert job_of(service).shard.changes.keys == []
    service.close()


def test_an_answer_that_cannot_be_made_concerns_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, service = member_and_other()
    pull = {"pull": pb.Pull(tables=[0], training=[True], counts=[3])}
    with monkeypatch.context() as patch:
        patch.setattr(Shard, "read_joined", lambda *_, **__: (_ for _ in ()).throw(MemoryError("none left")))
        with pytest.raises(FleetError, match=r"could not make an answer.*none left"):
            ask(1, pull, [WireTensor.of(np.arange(3))])
    assert service.failure is None
    assert len(ask(0, pull, [WireTensor.of(np.arange(3))])) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"params": 0, "shape": [1 << 24, 1 << 20]}, "has not the memory|do not fit into one message"),
        ({"groups": 0, "rule": "Magic"}, "'Magic' cannot update"),
        ({"groups": 0, "rule": "Lamb"}, "'Lamb' cannot update the rows"),
    ],
)
@pytest.mark.parametrize("limit_mb", [64, 1 << 30])
def test_a_hello_that_no_server_could_serve_leaves_no_trace(change: dict[str, Any], words: str, limit_mb: int) -> None:
    settings = ProcessSettings(security=SecuritySettings(max_message_bytes=limit_mb * MEBI))
    service = Service(fuzz.ENDPOINT, settings, SystemClock())
    raw = json.loads(SPEC.to_json())
    (owner, index), (field, value) = change.items()
    raw[owner][index][field] = value
    spec = JobSpec.from_json(json.dumps(raw))
    hello = copy.deepcopy(fuzz.requests("sync", 1)["hello"][0]["hello"])
    assert isinstance(hello, pb.Hello)
    hello.spec, hello.fingerprint = spec.to_json(), make_plan(spec).fingerprint
    with pytest.raises(FleetError, match=words):
        service.handle(Frame(pb.Request(worker=0, incarnation=1, hello=hello)), lambda _: None)
    assert service.failure is None
    replies: list[Frame] = []
    service.handle(Frame(pb.Request(worker=0, incarnation=1, **fuzz.requests("sync", 1)["hello"][0])), replies.append)  # type: ignore[arg-type]
    assert len(replies) == 1


def test_a_place_beyond_the_job_is_nobodys() -> None:
    ask, _ = member_and_other()
    with pytest.raises(IdentityError, match="worker 4294967295 is not part of this job"):
        ask(0, {**fuzz.requests("sync", 1)["hello"][0], "worker": 2**32 - 1})


def test_what_a_stranger_says_is_quoted_in_bounds(caplog: pytest.LogCaptureFixture) -> None:
    ask, _ = member_and_other()
    hello = copy.deepcopy(fuzz.requests("sync", 1)["hello"][0]["hello"])
    assert isinstance(hello, pb.Hello)
    hello.label = "host\nCRITICAL all is lost\x1b[2J"
    hello.endpoints.extend(["x" * 1000] * 2000)
    with pytest.raises(ProtocolError, match="contradicts itself"):
        ask(1, {"hello": hello})
    (line,) = caplog.messages
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 10_000
    assert len(error_reply(ProtocolError("x" * MEBI, got="y" * MEBI)).message.SerializeToString()) < 200_000


def test_the_memory_there_is_is_known() -> None:
    there = buffers.installed()
    assert there is None or there > MEBI


# ---------------------------------------------------------------------------------------------- a job under attack

torch.manual_seed(4)
TEMPLATE = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(8, 1))
STEPS = 30


def training(fleet: Fleet, index: int) -> list[torch.Tensor]:
    model = copy.deepcopy(TEMPLATE)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    for step in range(STEPS):
        ids = (torch.arange(6).reshape(3, 2) * (index + 2) + step) % 20
        optimizer.minimize(model(ids).square().mean())
    return values(model)


class OverSockets(Job):
    def fleet(self, role: Role, index: int) -> Fleet:
        fleet = Fleet(environ=self.environ)
        fleet.init(UserDefinedRoleMaker(index, role, self.workers, self.endpoints))
        return fleet


class Attack:
    """Strangers without end, each kind on a thread of its own; ``done`` counts what each has managed."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._over = threading.Event()
        self.done: dict[str, int] = {}
        kinds = (self.no_http, self.half_open, self.over_grpc, self.never_ending, self.at_the_door, self.with_the_key)
        self._threads = [threading.Thread(target=self._go_on, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Attack:
        for thread in self._threads:
            thread.start()
        until(lambda: len(self.done) == len(self._threads))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _go_on(self, kind: Callable[[random.Random], None]) -> None:
        chance = random.Random(kind.__name__)
        while not self._over.is_set():
            # Being refused is what strangers are here for.
            with contextlib.suppress(OSError, grpc.RpcError, FleetError, TransportError):
                kind(chance)
            self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1
            self._over.wait(0.005)

    def _connected(self, address: Any = None) -> socket.socket:
        if isinstance(address, str):
            near = socket.socket(socket.AF_UNIX)
            near.settimeout(PATIENCE_S)
            near.connect("\0" + address)
            return near
        return socket.create_connection((self._endpoint.host, self._endpoint.port), PATIENCE_S)

    def _door(self) -> pb.DirectAddress:
        """Where direct connections are taken; a server without a token tells anybody."""
        channel = GrpcNetwork(1).connect(self._endpoint)
        try:
            request = Frame(pb.Request(direct=pb.Direct()))
            address: pb.DirectAddress = raise_if_error(channel.start(request, PATIENCE_S).result()).message.direct
            return address
        finally:
            channel.close()

    # ------------------------------------------------------------ what they do

    def no_http(self, chance: random.Random) -> None:
        with self._connected() as peer:
            peer.sendall(chance.randbytes(chance.randint(1, 5000)))

    def half_open(self, chance: random.Random) -> None:
        with self._connected() as peer:
            peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM"[: chance.randint(0, 20)])
            self._over.wait(0.05)

    def over_grpc(self, chance: random.Random) -> None:
        data = chance.choice((fuzz.damaged, fuzz.twisted))(chance.choice(list(fuzz.good("sync").values())), chance)
        if chance.random() < 0.3:
            data = chance.randbytes(chance.randint(0, 2000))
        with grpc.insecure_channel(str(self._endpoint), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            method = channel.stream_stream(chance.choice((EXCHANGE, UPLOAD, URGENT)))
            raise_if_error(read_frame(pb.Reply, method(iter([data]), timeout=1.0)))

    def never_ending(self, chance: random.Random) -> None:
        """Many requests that begin and bring nothing more, over one connection."""
        with grpc.insecure_channel(str(self._endpoint), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            upload = channel.stream_stream(UPLOAD)
            calls = [upload(self._slowly(), timeout=0.3) for _ in range(20)]
            for call in calls:
                call.code()

    def _slowly(self) -> Iterator[bytes]:
        yield b"FLT1"
        self._over.wait(0.3)

    def at_the_door(self, chance: random.Random) -> None:
        with self._connected(self._door().local) as peer:
            peer.sendall(chance.randbytes(chance.randint(0, 40)))

    def with_the_key(self, chance: random.Random) -> None:
        door = self._door()
        with self._connected(door.local) as peer:
            peer.sendall(door.key)
            peer.recv(len(WELCOME), socket.MSG_WAITALL)
            good = chance.choice(list(fuzz.good("sync").values()))
            data = chance.choice((fuzz.damaged, fuzz.twisted))(good, chance)
            peer.sendall(data[: chance.choice((8, len(data)))])
            peer.settimeout(0.05)
            Line(peer).receive(pb.Reply)


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="the doors are looked for under their names")
def test_a_job_under_attack_ends_where_it_ends_in_peace(free_endpoints: Callable[[int], list[str]]) -> None:
    in_peace = run_job(training, 2, 1)
    started = threading.Event()

    def body(fleet: Fleet, index: int) -> list[torch.Tensor]:
        assert started.wait(PATIENCE_S)
        return training(fleet, index)

    job = OverSockets(body, 2, endpoints=free_endpoints(1))
    threads = job.start()
    endpoint = Endpoint.parse(job.endpoints[0])
    until(lambda: _listens(endpoint))
    with Attack(endpoint) as attack:
        started.set()
        job.join(threads)
        assert len(attack.done) == 6
    assert job.errors == {}
    for index in range(2):
        assert all(map(torch.equal, job.results[index], in_peace[index]))


def _listens(endpoint: Endpoint) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((endpoint.host, endpoint.port), 1.0):
        return True
    return False


# ---------------------------------------------------------------------------------------------- the doors


@pytest.fixture
def endpoint(free_endpoints: Callable[[int], list[str]]) -> Endpoint:
    return Endpoint.parse(free_endpoints(1)[0])


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _echo(frame: Frame, respond: Callable[[Frame], None]) -> None:
    respond(Frame(pb.Reply(version=frame.message.step), frame.tensors))


def _tcp(listener: DirectListener, stack: contextlib.ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", listener.address.port), PATIENCE_S))


def _direct(endpoint: Endpoint, stack: contextlib.ExitStack, **limits: int) -> DirectListener:
    listener = DirectListener(Endpoint("127.0.0.1", 0), endpoint.port, _echo, Security(**limits))
    stack.callback(listener.close)
    return listener


def _is_welcome(sock: socket.socket, key: bytes) -> bool:
    try:
        sock.sendall(key)
        return sock.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME
    except OSError:
        return False


def test_strangers_do_not_take_up_the_places_of_the_others(
    endpoint: Endpoint, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "MAX_STRANGERS", 3)
    listener = _direct(endpoint, stack)
    known = _tcp(listener, stack)
    assert _is_welcome(known, listener.address.key)
    silent = [_tcp(listener, stack) for _ in range(3)]
    until(lambda: len(listener.connections) == 4)
    assert not _is_welcome(_tcp(listener, stack), listener.address.key)
    silent.pop().close()
    until(lambda: len(listener.connections) == 3)
    assert _is_welcome(_tcp(listener, stack), listener.address.key)


def test_one_address_does_not_take_up_all_places(
    endpoint: Endpoint, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "MAX_OF_ONE", 2)
    listener = _direct(endpoint, stack)
    assert [_is_welcome(_tcp(listener, stack), listener.address.key) for _ in range(3)] == [True, True, False]
    if listener.address.local:  # another peer, as it is a process and no address
        near = stack.enter_context(socket.socket(socket.AF_UNIX))
        near.connect("\0" + listener.address.local)
        assert _is_welcome(near, listener.address.key)


def test_a_key_in_small_parts_is_none(
    endpoint: Endpoint, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a stranger would have the time of a handshake for every byte."""
    monkeypatch.setattr(direct_connections, "HANDSHAKE_S", 1)
    listener = _direct(endpoint, stack)
    slow = _tcp(listener, stack)
    slow.sendall(listener.address.key[:1])
    until(lambda: listener.connections)
    until(lambda: not listener.connections)
    assert not _is_welcome(slow, listener.address.key[1:])


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40))
def test_any_preamble(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        connection = Connection(Line(ours), "peer")
        with pytest.raises(OSError):
            connection.greet(bytes(16) if data[:16] != bytes(16) else b"\1" * 16)
        assert not connection.known


@pytest.mark.parametrize("direct", ["off", ""])
def test_messages_have_a_limit_both_ways(direct: str, endpoint: Endpoint, stack: contextlib.ExitStack) -> None:
    def network(limit_mb: int) -> Any:
        return real_network(ProcessSettings.read({"FLEET_MAX_MESSAGE_MB": str(limit_mb), "FLEET_DIRECT_PORT": direct}))

    stack.callback(network(3).listen(endpoint, _echo).close)
    sent = torch.ones(MEBI // 2)
    for limit, mebi, fits in ((3, 2, True), (3, 4, False), (1, 2, False)):
        channel = network(limit).connect(endpoint)
        stack.callback(channel.close)
        request = Frame(pb.Request(step=7, pull=pb.Pull()), [WireTensor.of(sent)] * (mebi // 2))
        if fits:
            assert raise_if_error(channel.start(request, PATIENCE_S).result()).message.version == 7
        else:
            with pytest.raises(Exception, match=r"too large.*FLEET_MAX_MESSAGE_MB|Broken pipe|reset by peer"):
                raise_if_error(channel.start(request, PATIENCE_S).result())


def test_a_worker_is_told_before_it_sends_too_much() -> None:
    def body(fleet: Fleet, index: int) -> None:
        embedding = torch.nn.Embedding(200_000, 1, sparse=True)
        fleet.distributed_optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), model=embedding)
        fleet.init_worker()
        embedding(torch.arange(200_000))

    job = Job(body, environ={**PATIENT, "FLEET_MAX_MESSAGE_MB": "1"})
    job.join(job.start())
    error = job.errors["worker 0"]
    assert isinstance(error, ConfigurationError)
    assert "a request is larger than a message may be" in str(error)
    assert "FLEET_MAX_MESSAGE_MB" in str(error)


def test_a_request_that_brings_nothing_more_loses_its_thread(
    endpoint: Endpoint, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "STALL_S", 0.2)
    network = GrpcNetwork(3)
    stack.callback(network.listen(endpoint, _echo).close)
    over = threading.Event()
    stack.callback(over.set)

    def slowly() -> Iterator[bytes]:
        yield b"FLT1"
        over.wait(PATIENCE_S)

    peers = [stack.enter_context(_lone_channel(endpoint)) for _ in range(3)]
    calls = [peer.stream_stream(UPLOAD)(slowly()) for peer in peers]
    channel = network.connect(endpoint)
    stack.callback(channel.close)
    # All threads of the pool are held; heartbeats come on others, and with them the end of what stalls.
    beat = Frame(pb.Request(beat=pb.Beat()))

    def one_ended() -> bool:
        channel.start(beat, PATIENCE_S, urgent=True).result()
        return all(not call.is_active() for call in calls)

    until(one_ended)
    request = Frame(pb.Request(step=3, pull=pb.Pull()))
    assert channel.start(request, PATIENCE_S).result().message.version == 3


def test_one_peer_does_not_hold_all_threads_with_requests_that_do_not_end(
    endpoint: Endpoint, stack: contextlib.ExitStack
) -> None:
    network = GrpcNetwork(5)
    stack.callback(network.listen(endpoint, _echo).close)
    over = threading.Event()

    def slowly() -> Iterator[bytes]:
        yield b"FLT1"
        over.wait(PATIENCE_S)

    peer = stack.enter_context(_lone_channel(endpoint))
    stack.callback(over.set)
    calls = [peer.stream_stream(UPLOAD)(slowly()) for _ in range(30)]
    channel = network.connect(endpoint)
    stack.callback(channel.close)
    request = Frame(pb.Request(step=3, pull=pb.Pull()))
    assert channel.start(request, PATIENCE_S).result().message.version == 3
    for call in calls:
        call.cancel()


def test_who_does_not_read_is_sent_nothing_more(
    endpoint: Endpoint,
    stack: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_UNREAD", 4)
    network = GrpcNetwork(4)
    large = [WireTensor.of(torch.ones(2 * MEBI))]
    stack.callback(network.listen(endpoint, lambda _, respond: respond(Frame(pb.Reply(), large))).close)
    peer = stack.enter_context(_lone_channel(endpoint))
    request = b"".join(Frame(pb.Request(pull=pb.Pull())).pieces())
    unread = [peer.unary_stream(EXCHANGE)(request) for _ in range(20)]
    until(lambda: "does not read its replies" in caplog.text)
    until(lambda: any(not call.is_active() for call in unread))
    channel = network.connect(endpoint)
    stack.callback(channel.close)
    assert channel.start(Frame(pb.Request(pull=pb.Pull())), PATIENCE_S).result().tensors[0].shape == (2 * MEBI,)
    for call in unread:
        call.cancel()


@contextlib.contextmanager
def _lone_channel(endpoint: Endpoint) -> Iterator[grpc.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(str(endpoint), options=options) as channel:
        yield channel
