"""Replicas answer look-ups of one edition, and a model that asks them goes on as long as one of them lives."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from harness import Job, until
from patience import PATIENCE_S
from prepared import Prepared
from test_follower import CLOSED, DESCRIBED, DIM, IDS, MEAN, FakeSource, Net, rows_of
from test_security import Files, files  # noqa: F401 (a fixture)

import fleet.nn
from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.base.settings import ProcessSettings
from fleet.errors import (
    AuthenticationError,
    ConfigurationError,
    IdOutOfRangeError,
    NotInitializedError,
    PlanMismatchError,
    ServerBusyError,
    ServerLostError,
    StateError,
    TableFileError,
    UnsupportedError,
)
from fleet.launch.cli import main
from fleet.ps.wire.grpc_server import GrpcNetwork
from fleet.ps.wire.plain_service import PlainChannel
from fleet.ps.wire.small_calls import SmallCallChannel
from fleet.ps.wire.transport import TransportError
from fleet.serving import RemoteModel, editions
from fleet.serving import lookup_pb2 as pb
from fleet.serving.editions import Editions
from fleet.serving.replica import Replica
from fleet.serving.server_source import ServerSource
from fleet.serving.source import Piece, RowChanges, Source, SourceDescription, TableDescription

TABLES = list(DESCRIBED.tables)
SECRET = "a token that nobody guesses"


class Served:
    """Replicas of this process by their endpoints, each with a fake source."""

    def __init__(self, free: Callable[[int], list[str]]) -> None:
        self._free = free
        #: Who ends or starts replicas beside a thread that gives them versions holds it.
        self.lock = threading.RLock()
        self.running: dict[str, tuple[Replica, Any]] = {}

    def start(self, endpoint: str | None = None, source: Source | None = None, **environ: str) -> str:
        endpoint = endpoint or self._free(1)[0]
        found: Any = FakeSource() if source is None else source
        replica = Replica(found, "a source", Endpoint.parse(endpoint), ProcessSettings.read(environ))
        self.running[endpoint] = replica, found
        replica.begin()
        return endpoint

    def give(self, version: int) -> None:
        with self.lock:
            for replica, source in self.running.values():
                source.give(version)
                replica.follower.wait(version, PATIENCE_S)

    def end(self, endpoint: str) -> None:
        self.running.pop(endpoint)[0].close()


@pytest.fixture
def served(free_endpoints: Callable[[int], list[str]]) -> Iterator[Served]:
    made = Served(free_endpoints)
    yield made
    for endpoint in list(made.running):
        made.end(endpoint)


class Caller:
    """Calls the service as a client in another language would."""

    def __init__(self, endpoint: str, token: str = "") -> None:
        self._channel = grpc.insecure_channel(endpoint, options=[("grpc.max_receive_message_length", -1)])
        self._beside = (("fleet-token-bin", token.encode()),) if token else None

    def __call__(self, name: str, request: Any) -> Any:
        kind = {"Describe": pb.Description, "Look": pb.State, "LookUp": pb.Rows}[name]
        call = self._channel.unary_unary(
            f"/fleet.serving.Lookup/{name}", type(request).SerializeToString, kind.FromString
        )
        return call(request, timeout=PATIENCE_S, metadata=self._beside)

    def dense(self) -> list[Any]:
        call = self._channel.unary_stream("/fleet.serving.Lookup/Dense", None, pb.DensePiece.FromString)
        return list(call(b"", timeout=PATIENCE_S, metadata=self._beside))

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def asking(*tables: tuple[int, list[int]], **at: int) -> Any:
    ids = [each for _, ids in tables for each in ids]
    return pb.LookUpRequest(
        tables=[place for place, _ in tables],
        counts=[len(ids) for _, ids in tables],
        ids=struct.pack(f"<{len(ids)}q", *ids),
        **at,
    )


def numbers(rows: Any) -> list[float]:
    return [row[0] for row in np.frombuffer(rows.values, "<f4").reshape(-1, DIM).tolist()]


# ---------------------------------------------------------------------------------------------- the service


def test_any_client_reads_what_the_service_documents(served: Served) -> None:
    with Caller(served.start()) as call:
        told = call("Describe", pb.DescribeRequest())
        assert [(each.name, each.embedding_dim, each.num_embeddings, each.mean) for each in told.tables] == [
            ("open.weight", DIM, 0, MEAN),
            ("plain.weight", DIM, CLOSED, MEAN),
            ("bag.weight", DIM, CLOSED, 0.0),
        ]
        assert [(each.name, list(each.shape), each.dtype) for each in told.dense] == [
            ("dense.weight", [1, DIM], "float32"),
            ("dense.bias", [1], "float32"),
        ]
        rows = call("LookUp", asking((0, [2**40, -1, -7]), (2, [5]), (0, [])))
        assert numbers(rows) == [1.0, MEAN, 1.0, 1.0]
        assert (rows.state.instance, rows.state.edition, rows.state.version) == (told.state.instance, 1, 1)
        assert 0 <= rows.state.age_s < PATIENCE_S
        first, *pieces = call.dense()
        assert (first.state.instance, first.state.edition) == (told.state.instance, 1)
        assert [(each.parameter, np.frombuffer(each.values, "<f4").tolist()) for each in pieces] == [
            (0, [1.0] * DIM),
            (1, [1.0]),
        ]
        assert call("Look", pb.LookRequest()).version == 1


def test_rows_of_an_earlier_edition_can_be_read_until_it_is_long_ago(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(editions, "MOST_EDITIONS", 2)
    endpoint = served.start()
    replica, source = served.running[endpoint]
    with Caller(endpoint) as call:
        instance = call("Look", pb.LookRequest()).instance

        def read(edition: int) -> Any:
            return call("LookUp", asking((0, [0, 3, 5]), (1, [2]), instance=instance, edition=edition))

        source.give(7, [Piece(rows={"open.weight": rows_of([5], 7, (3,))})])
        source.give(9, [Piece(rows={"open.weight": rows_of([3, 5], 9), "plain.weight": rows_of([2], 9)})])
        replica.follower.wait(9, PATIENCE_S)
        assert [numbers(read(edition)) for edition in (1, 2, 3)] == [
            [1.0, 1.0, MEAN, 1.0],
            [1.0, MEAN, 7.0, 1.0],
            [1.0, 9.0, 9.0, 9.0],
        ]
        assert [read(edition).state.version for edition in (1, 2, 3)] == [1, 7, 9]
        served.give(11)
        assert read(1).gone
        assert read(1).state.version == 11
        assert not read(2).gone
        assert read(5).gone
        assert call("LookUp", asking((0, [0]), instance=instance + 1, edition=4)).gone
        source.give(12, whole=True)
        replica.follower.wait(12, PATIENCE_S)
        assert read(4).gone, "a whole version replaces everything"


def test_tables_of_several_kinds_are_read_in_one_request(served: Served) -> None:
    tables = {
        "a": TableDescription(3, None, 0.5),
        "b": TableDescription(2, None, 0.0, torch.float64),
        "c": TableDescription(3, 4, 0.5),
    }
    source = FakeSource(SourceDescription({}, tables))
    source.coming.get()

    def rows(name: str, ids: list[int], value: float) -> Any:
        changes = rows_of(ids, value)
        values = torch.full((len(ids), tables[name].embedding_dim), value, dtype=tables[name].dtype)
        return {name: type(changes)(changes.ids, values)}

    source.give(1, [Piece(rows=rows(name, [1, 2], 1.0)) for name in tables], whole=True)
    endpoint = served.start(source=source)
    source.give(2, [Piece(rows=rows("b", [2], 2.0))])
    served.running[endpoint][0].follower.wait(2, PATIENCE_S)
    with Caller(endpoint) as call:
        instance = call("Look", pb.LookRequest()).instance
        for edition, second in ((1, 1.0), (2, 2.0)):
            found = call("LookUp", asking((1, [2, 9]), (0, [1, 9]), instance=instance, edition=edition))
            assert found.values == struct.pack("<4d6f", second, second, 0, 0, 1, 1, 1, 0.5, 0.5, 0.5)


@pytest.mark.parametrize("seed", range(4))
def test_every_edition_that_is_kept_reads_as_it_was(seed: int) -> None:
    """Rows of tables of two kinds are changed, taken away and given again; then everything is read in every edition."""
    draw = np.random.default_rng(seed)
    tables = {
        name: TableDescription(dim, None, mean)
        for name, dim, mean in (("a", 3, 0.5), ("b", 2, 0.0), ("c", 3, -1.0), ("d", 3, 0.5))
    }
    kept = Editions()
    kept.fit(SourceDescription({}, tables))
    every = np.arange(-3, 20)
    now = {name: {} for name in tables}
    were: list[dict[str, dict[int, float]]] = []
    for version in range(1, 8):
        draft = kept.begin(version == 1, version)
        for name in draw.choice(list(tables), draw.integers(0, 5)).tolist():  # one may come twice
            ids, gone = draw.choice(every, 5, replace=False), draw.choice(every, 3, replace=False)
            values = torch.full((5, tables[name].embedding_dim), float(version))
            draft.add(Piece(rows={name: RowChanges(ids, values, gone)}))
            now[name] = {id: value for id, value in now[name].items() if id not in gone} | dict.fromkeys(ids, version)
        assert draft.publish()
        were.append({name: dict(rows) for name, rows in now.items()})
    asked = [(0, 2, 3), (3, 0), (2,), (1,), (1, 3, 1), (0, 1, 2, 3), ()]
    for number, was in enumerate(were, 1):
        for places in asked:
            ids = np.concatenate([np.empty(0, np.int64), *[draw.permutation(every) for _ in places]])
            stops = np.arange(1, len(places) + 1) * every.size
            found = np.concatenate(
                [np.empty(0), *[part.ravel() for part in kept.look_up(number, places, ids, stops).parts]]
            )
            wanted = (
                [
                    was[name].get(id, tables[name].mean)
                    for name, some in zip(
                        [kept.names[place] for place in places], np.split(ids, stops[:-1]), strict=True
                    )
                    for id in some.tolist()
                    for _ in range(tables[name].embedding_dim)
                ]
                if places
                else []
            )
            assert found.tolist() == wanted


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (pb.LookUpRequest(tables=[0], counts=[1 << 60], ids=b"x" * 8), "ids are not as many as it says"),
        (pb.LookUpRequest(tables=[0], counts=[(1 << 64) - 1], ids=b""), "ids are not as many as it says"),
        (pb.LookUpRequest(tables=[0], counts=[1], ids=b"x" * 7), "ids are not as many as it says"),
        (pb.LookUpRequest(tables=[0, 1], counts=[1], ids=b"x" * 8), "as many counts as tables"),
        (pb.LookUpRequest(tables=[0] * 2000, counts=[0] * 2000), "as many counts as tables; expected up to 1024"),
        (pb.LookUpRequest(tables=[3], counts=[1], ids=b"x" * 8), "there is no such table"),
        (asking((0, [0] * 70_000)), "asks for too much at once"),
        (asking((0, [-1]), (1, [CLOSED])), "an id is out of range for 'plain.weight'"),
        (asking((1, [-1])), "an id is out of range for 'plain.weight'"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused_and_others_go_on(
    served: Served, request_: Any, told: str
) -> None:
    with Caller(served.start(FLEET_MAX_MESSAGE_MB="1")) as call:
        with pytest.raises(grpc.RpcError) as caught:
            call("LookUp", request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert told in caught.value.details()
        assert numbers(call("LookUp", asking((0, [0])))) == [1.0]


def test_what_is_no_message_is_refused(served: Served) -> None:
    endpoint = served.start()
    with grpc.insecure_channel(endpoint) as channel:
        for name in ("Describe", "Look", "LookUp"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/fleet.serving.Lookup/{name}")(b"\xff\xff\xff", timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/fleet.serving.Lookup/Nothing")(b"", timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_replica_without_a_version_answers_that_it_has_none(free_endpoints: Callable[[int], list[str]]) -> None:
    (endpoint,) = free_endpoints(1)
    source: Any = FakeSource()
    with Replica(source, "a source", Endpoint.parse(endpoint), ProcessSettings.read({})), Caller(endpoint) as call:
        with pytest.raises(grpc.RpcError) as caught:
            call("LookUp", asking((0, [0])))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(NotInitializedError):
        Editions().dense()


def test_health_and_figures_tell_of_it(served: Served, free_endpoints: Callable[[int], list[str]]) -> None:
    pytest.importorskip("grpc_health")
    from grpc_health.v1 import health_pb2

    (endpoint, health) = free_endpoints(2)
    source: Any = FakeSource()
    environ = {"FLEET_HEALTH_PORT": health.rpartition(":")[2]}
    replica = Replica(source, "a source", Endpoint.parse(endpoint), ProcessSettings.read(environ))
    served.running[endpoint] = replica, source
    with grpc.insecure_channel(health) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        asked = health_pb2.HealthCheckRequest()
        assert check(asked, timeout=PATIENCE_S).status == health_pb2.HealthCheckResponse.NOT_SERVING
        replica.begin()
        assert check(asked, timeout=PATIENCE_S).status == health_pb2.HealthCheckResponse.SERVING
    with Caller(endpoint) as call:
        call("LookUp", asking((0, [0, 8]), (1, [1])))
    figures = replica.told()["figures"]
    assert {name: figures[name] for name in ("version", "lookups", "asked_rows", "misses", "rows")} == {
        "version": 1,
        "lookups": 1,
        "asked_rows": 3,
        "misses": 1,
        "rows": 4 + 2 * CLOSED,
    }


def test_prometheus_shows_the_figures(served: Served, free_endpoints: Callable[[int], list[str]]) -> None:
    pytest.importorskip("prometheus_client")
    from urllib.request import urlopen

    (page,) = free_endpoints(1)
    endpoint = served.start(FLEET_METRICS_PORT=page.rpartition(":")[2])
    with urlopen(f"http://{page}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    assert f'fleet_replica_version{{replica="{endpoint}"}} 1.0' in text
    assert "fleet_replica_age_seconds" in text
    assert "fleet_replica_lookups_total" in text


def test_a_token_is_asked_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = served.start(FLEET_AUTH_TOKEN=SECRET)
    for token in ("", SECRET[:-1]):
        with Caller(endpoint, token) as call:
            for ask in (lambda call=call: call("Look", pb.LookRequest()), call.dense):
                with pytest.raises(grpc.RpcError) as caught:
                    ask()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert SECRET not in caught.value.details()
    with pytest.raises(AuthenticationError, match="the server asks for a token"):
        RemoteModel(Net(), [endpoint])
    monkeypatch.setenv("FLEET_AUTH_TOKEN", SECRET)
    with RemoteModel(Net(), [endpoint]) as remote:
        assert is_of(remote, 1)


def test_certificates_are_asked_for(
    served: Served,
    files: Files,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = served.start(**files.issued("127.0.0.1"), **files.trusting())
    with pytest.raises(AuthenticationError, match="speaks TLS only"):
        RemoteModel(Net(), [endpoint])
    for name, value in {**files.issued("predictor"), **files.trusting()}.items():
        monkeypatch.setenv(name, value)
    with RemoteModel(Net(), [endpoint]) as remote:
        assert is_of(remote, 1)


def test_a_public_address_needs_protection(free_endpoints: Callable[[int], list[str]]) -> None:
    port = free_endpoints(1)[0].rpartition(":")[2]
    source: Any = FakeSource()
    with pytest.raises(ConfigurationError):
        Replica(source, "a source", Endpoint("0.0.0.0", int(port)), ProcessSettings.read({}))
    assert source.closed.is_set()


def test_rows_beyond_a_budget_lie_in_files_and_are_answered_like_others(served: Served, tmp_path: Path) -> None:
    many, dim = 150_000, 16
    source = FakeSource(SourceDescription({}, {"t": TableDescription(dim, None, 0.5)}))
    source.coming.get()

    def all_rows(version: float) -> list[Piece]:
        for start in range(0, many, 10_000):
            ids = np.arange(start, start + 10_000)
            values = torch.from_numpy(ids[:, None] + np.full(dim, version))
            yield Piece(rows={"t": RowChanges(ids, values.float(), np.empty(0, np.int64))})

    source.give(1, list(all_rows(1.0)), whole=True)
    endpoint = served.start(source=source, FLEET_TABLE_MEMORY_MB="8", FLEET_TABLE_DIR=str(tmp_path))
    replica = served.running[endpoint][0]
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) > 4 << 20
    draw = np.random.default_rng(0)
    with Caller(endpoint) as call:
        instance = call("Look", pb.LookRequest()).instance

        def read(ids: Any, edition: int) -> Any:
            found = call("LookUp", asking((0, ids.tolist()), instance=instance, edition=edition))
            return np.frombuffer(found.values, "<f4").reshape(-1, dim)[:, 3]

        for _ in range(20):
            ids = draw.integers(0, many, 500)
            assert (read(ids, 1) == ids + 1).all()
        changed, gone = np.arange(0, many, 5), np.arange(1, many, 5)
        rows = RowChanges(changed, torch.zeros(changed.size, dim), gone)
        source.give(2, [Piece(rows={"t": rows})])
        replica.follower.wait(2, PATIENCE_S)
        ids = draw.integers(0, many, 5000)
        assert (read(ids, 1) == ids + 1).all(), "as before"
        assert (read(ids, 2) == np.choose(ids % 5, [0 * ids, 0 * ids + 0.5, ids + 1, ids + 1, ids + 1])).all()
        source.give(3, list(all_rows(3.0)), whole=True)
        replica.follower.wait(3, PATIENCE_S)
        assert (read(ids, 3) == ids + 3).all()
    assert replica.told()["figures"]["rows"] == many
    served.end(endpoint)
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"


def test_a_replica_whose_disk_fails_answers_nothing_wrong_and_ends(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleet.ps.table import row_file

    many, dim = 150_000, 16
    source = FakeSource(SourceDescription({}, {"t": TableDescription(dim, None, 0.5)}))
    source.coming.get()

    def rows(ids: Any, version: float) -> Piece:
        return Piece(rows={"t": RowChanges(ids, torch.full((ids.size, dim), version), np.empty(0, np.int64))})

    source.give(1, [rows(each, 1.0) for each in np.split(np.arange(many), 15)], whole=True)
    endpoint = served.start(source=source, FLEET_TABLE_MEMORY_MB="8", FLEET_TABLE_DIR=str(tmp_path))
    replica = served.running[endpoint][0]

    def is_full(*_: object) -> None:
        raise TableFileError("cannot write the rows that memory has no room for", got="ENOSPC")

    monkeypatch.setattr(row_file, "_write", is_full)
    with Caller(endpoint) as call:
        source.give(2, [rows(each, 2.0) for each in np.split(np.arange(many), 15)])
        with pytest.raises(TableFileError, match="ENOSPC"):
            replica.serve()
        for asked in (pb.LookRequest(), asking((0, [0, many - 1]))):
            with pytest.raises(grpc.RpcError) as refused:
                call("Look" if isinstance(asked, pb.LookRequest) else "LookUp", asked)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the replica has lost rows, and ends" in str(refused.value.details())
    assert replica.follower.version == 1
    assert replica.told()["figures"]["version"] == 0


def test_half_of_an_edition_is_read_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Editions()
    held.fit(DESCRIBED)
    for version in (1, 2):
        draft = held.begin(version == 1, version)
        draft.add(
            Piece(
                {"dense.weight": torch.zeros(1, DIM), "dense.bias": torch.zeros(1)},
                {name: rows_of([0], version) for name in TABLES},
            )
        )
        if version == 2:
            monkeypatch.setattr(held._kept[-1], "change", None)
            with pytest.raises(TypeError):
                draft.publish()
        else:
            assert draft.publish()
    with pytest.raises(NotInitializedError, match="the replica has lost rows, and ends"):
        held.look_up(None, (0,), np.array([0]), np.array([1]))


# ---------------------------------------------------------------------------------------------- a model that asks


def is_of(remote: Any, version: float) -> bool:
    with torch.no_grad():
        return set(remote(IDS).tolist()) == {float(version)}


def test_a_remote_model_computes_what_a_model_that_follows_does(served: Served) -> None:
    endpoint = served.start()
    model = Net()
    with RemoteModel(model, [endpoint]) as remote:
        assert remote.version == 1
        assert is_of(remote, 1)
        assert model.open(torch.tensor([-1, 99]))[:, 0].tolist() == [MEAN, 0.0]
        assert isinstance(model.plain, torch.nn.Embedding)
        served.give(2)
        assert remote.wait(2, PATIENCE_S) == 2
        assert is_of(remote, 2)
        assert remote.age_s < PATIENCE_S
        with pytest.raises(IdOutOfRangeError):
            model.bag(torch.tensor([[CLOSED]]))
        assert set(model.bag.weight.detach().flatten().tolist()) == {2.0}
    with pytest.raises(StateError, match="the RemoteModel was closed"):
        model.open(IDS)


def test_all_tables_of_a_group_are_one_request(served: Served) -> None:
    tables = {f"{name}.weight": TableDescription(DIM, None, 0.0) for name in ("user", "item")}
    source = FakeSource(SourceDescription({}, tables))
    source.coming.get()
    source.give(1, [Piece(rows={name: rows_of([1], 4) for name in tables})], whole=True)
    endpoint = served.start(source=source)
    group = fleet.nn.EmbeddingGroup({"user": (None, DIM), "item": (None, DIM)})
    with RemoteModel(group, [endpoint]) as remote:
        found = remote({"user": torch.tensor([1, 2]), "item": torch.tensor([1])})
    assert found["user"][:, 0].tolist() == [4.0, 0.0]
    assert served.running[endpoint][0].told()["figures"]["lookups"] == 1


@pytest.mark.parametrize("bounded", ["the replica", "the predictor"])
def test_what_is_too_much_for_one_request_is_divided(
    bounded: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = {"FLEET_MAX_MESSAGE_MB": "1"}
    endpoint = served.start(**(bound if bounded == "the replica" else {}))
    if bounded == "the predictor":
        monkeypatch.setenv(*bound.popitem())
    ids = torch.arange(150_000)
    with RemoteModel(Net(), [endpoint]) as remote:
        found = remote.model.open(ids)
        assert found[[0, 3, 149_999], 0].tolist() == [1.0, 1.0, MEAN]
    assert served.running[endpoint][0].told()["figures"]["lookups"] == 3


def test_each_replica_is_asked_for_as_much_as_it_gives(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.serving.replica_pool.secrets.randbelow", lambda _: 0)  # it begins with the first
    endpoints = [served.start(), served.start(FLEET_MAX_MESSAGE_MB="1")]
    ids = torch.arange(150_000)
    with RemoteModel(Net(), endpoints) as remote:
        while served.running:
            assert is_of(remote, 1)
            assert remote.model.open(ids)[[0, 149_999], 0].tolist() == [1.0, MEAN]
            served.end(str(remote._source.bound.replica.endpoint))


def test_a_replica_that_is_overrun_is_left_for_another(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a proxy before it may say."""
    monkeypatch.setenv("FLEET_DIRECT_PORT", "off")
    with RemoteModel(Net(), [served.start(), served.start()], poll_s=0.01) as remote:
        overrun, ask = remote._source.bound.replica.endpoint, PlainChannel.ask

        def asked(channel: PlainChannel, name: str, *given: Any) -> bytes:
            if name == "LookUp" and channel.endpoint == overrun:
                raise ServerBusyError(f"{overrun} has no time now: too many requests")
            return ask(channel, name, *given)

        monkeypatch.setattr(PlainChannel, "ask", asked)
        for _ in range(5):
            assert is_of(remote, 1)


@pytest.mark.parametrize("change", ["another width", "a parameter more", "no embedding"])
def test_a_model_that_does_not_fit_is_refused_and_left_alone(served: Served, change: str) -> None:
    endpoint = served.start()
    model: Any = Net()
    if change == "another width":
        model.dense = torch.nn.Linear(DIM + 1, 1)
    elif change == "a parameter more":
        model.more = torch.nn.Linear(1, 1)
    else:
        model.plain = torch.nn.Linear(DIM, CLOSED, bias=False)
    error = UnsupportedError if change == "no embedding" else PlanMismatchError
    with pytest.raises(error, match="table, and in the model" if change == "no embedding" else "does not fit"):
        RemoteModel(model, [endpoint])
    assert type(model.bag) is fleet.nn.EmbeddingBag
    assert change == "no embedding" or type(model.plain) is torch.nn.Embedding


@pytest.mark.parametrize("replicas", [[], ["a"], ["a:1", "a:1"]])
def test_replicas_that_cannot_be(replicas: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        RemoteModel(Net(), replicas)


# ---------------------------------------------------------------------------------------------- versions and failures


class Reading:
    """Threads that call a model for as long as this lasts, and what they saw."""

    def __init__(self, remote: RemoteModel, threads: int = 2) -> None:
        self._done = threading.Event()
        self._remote = remote
        self.mixed: list[Any] = []
        self.errors: list[BaseException] = []
        self.seen: set[float] = set()
        self.count = 0
        self._threads = [threading.Thread(target=self._read) for _ in range(threads)]

    def _read(self) -> None:
        while not self._done.is_set():
            try:
                with torch.no_grad():
                    found = set(self._remote(IDS).tolist())
            except BaseException as error:
                self.errors.append(error)
                return
            self.seen |= found
            self.count += 1
            if len(found) > 1:
                self.mixed.append(found)

    def more(self, count: int = 5) -> None:
        """Wait until so many forwards more have been."""
        wanted = self.count + count
        until(lambda: self.count >= wanted or self.errors)

    def __enter__(self) -> Reading:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
        assert self.errors == []
        assert self.mixed == []


def test_no_forward_sees_a_mixture_while_versions_come(served: Served) -> None:
    endpoint = served.start()
    with RemoteModel(Net(), [endpoint], poll_s=0.01) as remote:
        remote.model.between = lambda: time.sleep(0.001)
        with Reading(remote) as reading:
            for version in range(2, 30):
                served.give(version)
                if version % 3 == 0:
                    remote.wait(version, PATIENCE_S)
        assert len(reading.seen) > 5


def test_a_forward_whose_edition_is_gone_is_begun_anew(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = served.start()
    source = served.running[endpoint][1]
    begun: list[int] = []

    def between() -> None:
        begun.append(1)
        if len(begun) == 1:
            source.give(2, whole=True)
            served.running[endpoint][0].follower.wait(2, PATIENCE_S)

    with RemoteModel(Net(), [endpoint]) as remote:
        remote.model.between = between
        assert is_of(remote, 2)
        assert len(begun) == 2
        remote.model.between = lambda: None
        with remote.pinned():
            source.give(3, whole=True)
            served.running[endpoint][0].follower.wait(3, PATIENCE_S)
            with pytest.raises(ServerLostError, match="the rows of version 2 are not to be had any more"):
                remote(IDS)
        assert is_of(remote, 3)


def test_forwards_go_on_when_a_replica_is_lost_and_come_back_to_it(served: Served) -> None:
    first, second = served.start(), served.start()
    with RemoteModel(Net(), [first, second], poll_s=0.01) as remote, Reading(remote) as reading:
        reading.more()
        bound = str(remote._source.bound.replica.endpoint)
        other = second if bound == first else first
        served.end(bound)
        reading.more()
        served.start(bound)
        served.give(5)
        remote.wait(5, PATIENCE_S)
        until(lambda: all(not each.trouble for each in remote._source._replicas))
        served.end(other)
        reading.more()
        assert str(remote._source.bound.replica.endpoint) == bound


@pytest.mark.parametrize("beside", [True, False], ids=["beside gRPC", "by gRPC"])
@pytest.mark.parametrize("happens", ["it is lost", "both replicas are started anew", "one has gone"])
@pytest.mark.pairs(1)
def test_whatever_happens_at_a_message_a_forward_is_right(
    happens: str, beside: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each message that a predictor says to two replicas until it has predicted, a version coming meanwhile."""
    left, version, gone = [0], 1, list[str]()

    def strike() -> None:
        if happens == "it is lost":
            raise TransportError("it was lost")
        with served.lock:
            for endpoint in endpoints if happens == "both replicas are started anew" else endpoints[:1]:
                served.end(endpoint)
                if happens == "one has gone":
                    gone.append(endpoint)
                else:
                    served.start(endpoint, FakeSource(version=version))

    def losing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                strike()
            return call(*given)

        return called

    monkeypatch.setattr(PlainChannel, "ask", losing(PlainChannel.ask))
    monkeypatch.setattr(PlainChannel, "start", losing(PlainChannel.start))
    monkeypatch.setattr(PlainChannel, "stream", losing(PlainChannel.stream))
    monkeypatch.setattr(SmallCallChannel, "ask", losing(SmallCallChannel.ask))
    monkeypatch.setenv("FLEET_DIRECT_PORT", "0" if beside else "off")
    endpoints = [served.start(), served.start()]
    version = 1
    for number in range(1, 13):
        for endpoint in gone:
            served.start(endpoint)
        gone.clear()
        served.give(version)
        left[0] = number
        with RemoteModel(Net(), endpoints, poll_s=0.01, deadline_s=20.0) as remote:
            assert is_of(remote, version)
            version += 1
            served.give(version)
            remote.wait(version, PATIENCE_S)
            assert is_of(remote, version)
    assert left[0] <= 0, "each of them was said"


def test_a_replica_that_says_where_it_is_and_gives_no_rows_is_left(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = [served.start(), served.start()]
    with RemoteModel(Net(), endpoints, deadline_s=15.0) as remote:
        monkeypatch.setattr(remote._source, "_attempt_s", 1.0)
        bound = str(remote._source.bound.replica.endpoint)
        with served.running[bound][0]._editions._lock:
            assert is_of(remote, 1)
        assert str(remote._source.bound.replica.endpoint) != bound


def test_one_that_hangs_keeps_nothing_back_that_another_has(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.serving.replica_pool._LOOK_AROUND_S", 0.01)
    endpoints = [served.start(), served.start()]
    with RemoteModel(Net(), endpoints, poll_s=0.01, deadline_s=9 * PATIENCE_S) as remote:
        bound = str(remote._source.bound.replica.endpoint)
        (other,) = {*endpoints} - {bound}
        hung = served.running[other][0]
        with hung._editions._lock, monkeypatch.context() as patched:
            patched.setattr(Editions, "newest", property(_Hangs(hung._editions, Editions.newest.fget)))
            for version in range(2, 12):
                served.running[bound][1].give(version)
                remote.wait(version, PATIENCE_S)
                served.running[bound][1].heard_at += 3600  # which it hears, however slow this machine is
                until(lambda heard=version - 1: remote.age_s < -3000 * heard)
                assert is_of(remote, version)
        assert str(remote._source.bound.replica.endpoint) == bound


class _Hangs:
    """Stands for a property of one object that cannot be had while the object is locked."""

    def __init__(self, hung: Editions, of: Callable[[Editions], Any]) -> None:
        self._hung, self._of = hung, of

    def __call__(self, editions: Editions) -> Any:
        if editions is self._hung:
            until(lambda: not editions._lock.locked())
        return self._of(editions)


def test_a_replica_that_is_left_behind_is_left(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.serving.replica_pool._LOOK_AROUND_S", 0.01)
    endpoints = [served.start(), served.start()]
    with RemoteModel(Net(), endpoints, poll_s=0.01) as remote:
        bound = str(remote._source.bound.replica.endpoint)
        (other,) = {*endpoints} - {bound}
        served.running[bound][1].heard_at -= 60
        served.running[other][1].give(3)
        remote.wait(3, PATIENCE_S)
        assert str(remote._source.bound.replica.endpoint) == other
        assert is_of(remote, 3)


def test_a_replica_that_is_left_behind_is_left_for_a_job_that_began_anew(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose version is an earlier one."""
    monkeypatch.setattr("fleet.serving.replica_pool._LOOK_AROUND_S", 0.01)
    stale = served.start(source=FakeSource(version=9))
    with RemoteModel(Net(), [stale], poll_s=0.01) as before:
        assert is_of(before, 9)
    fresh = served.start(source=FakeSource(version=3))
    with RemoteModel(Net(), [stale, fresh], poll_s=0.01) as remote:
        served.running[stale][1].heard_at -= 60
        until(lambda: remote.version == 3)
        assert is_of(remote, 3)
        assert remote.age_s < 5


def test_predictors_that_come_at_once_wait_for_each_other(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica that has no time for one of them has not failed."""
    endpoint = served.start()
    replica = served.running[endpoint][0]
    with RemoteModel(Net(), [endpoint], poll_s=0.01) as remote:
        taken = 0
        while replica._streams.acquire(blocking=False):
            taken += 1
        served.give(2)
        time.sleep(0.2)
        assert is_of(remote, 1)
        for _ in range(taken):
            replica._streams.release()
        remote.wait(2, PATIENCE_S)
        assert is_of(remote, 2)
    assert "does not answer" not in caplog.text


def test_when_all_are_lost_the_error_names_them_and_how_long_it_was_tried(served: Served) -> None:
    endpoints = [served.start(), served.start()]
    with RemoteModel(Net(), endpoints, deadline_s=0.5) as remote:
        assert is_of(remote, 1)
        for endpoint in endpoints:
            served.end(endpoint)
        with pytest.raises(ServerLostError, match=r"no replica has the rows of this forward.*within 0.5 s") as caught:
            remote(IDS)
        assert all(endpoint in str(caught.value) for endpoint in endpoints)
        served.start(endpoints[0])
        until(lambda: _answers(remote))
        assert is_of(remote, 1)


def _answers(remote: RemoteModel) -> bool:
    try:
        remote(IDS)
    except ServerLostError:
        return False
    return True


# ---------------------------------------------------------------------------------------------- whole jobs


class Trained(torch.nn.Module):
    """Every number is 0 at first, and in each step falls by as much as every other that the step has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.Embedding(None, DIM, initializer="zeros")
        self.dense = torch.nn.Parameter(torch.zeros(DIM))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.rows(ids).flatten(), self.dense, self.rows(ids).flatten()])


def test_a_job_its_replica_and_a_predictor(served: Served, free_endpoints: Callable[[int], list[str]]) -> None:
    ids = torch.tensor([3, -5])
    steps, joined, go_on = 30, threading.Event(), threading.Event()

    def body(made: Fleet, index: int) -> None:
        model = Trained()
        optimizer = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        made.init_worker()
        for step in range(steps):
            (-(model.rows(ids).sum() + model.dense.sum())).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 5:
                joined.set()
                assert go_on.wait(PATIENCE_S)

    endpoints = free_endpoints(2)
    job = Job(body, servers=2, endpoints=endpoints, network=GrpcNetwork(8))
    threads = job.start()
    try:
        assert joined.wait(PATIENCE_S)
        source = ServerSource([Endpoint.parse(each) for each in endpoints], GrpcNetwork(8), poll_s=0.005)
        starting = threading.Thread(target=go_on.set)
        starting.start()
        endpoint = served.start(source=source)
        starting.join()
        with RemoteModel(Trained(), [endpoint], poll_s=0.005) as remote:
            seen = set()
            while remote.version < steps:
                with torch.no_grad():
                    found = set(remote(ids).tolist())
                assert len(found) == 1
                seen |= found
            job.join(threads)
            until(lambda: served.running[endpoint][0].follower._source.ended)
            with torch.no_grad():
                assert set(remote(ids).tolist()) == {float(steps)}, "it goes on with the last version"
    finally:
        go_on.set()
        job.join(threads)
    assert job.errors == {}


def test_the_first_signal_ends_a_replica_and_others_do_not_disturb_it() -> None:
    from fleet.launch.replica_command import _Ended, _Signals

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with _Signals() as signals:
            signals.check()
            with pytest.raises(_Ended, match="SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(_Ended, match="SIGTERM"):
                signals.check()  # the exception may have been lost where it was raised
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("--endpoint", "127.0.0.1:0", "malformed endpoint; at --endpoint; expected host:port with a port from 1"),
        ("--at", "-1", "--at is out of range; expected at least 0; got -1"),
        ("--poll_s", "0", "--poll_s is out of range; expected above 0"),
        ("--poll_s", "nan", "--poll_s is out of range; expected above 0"),
    ],
)
def test_a_mistake_in_the_options_of_a_replica_starts_nothing(
    option: str, value: str, match: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """``--endpoint`` has to have a port, since nobody would know where to ask."""
    assert main(["replica", "--checkpoints", str(tmp_path), "--endpoint", "127.0.0.1:1", option, value]) == 2
    told = capsys.readouterr().err
    assert match in told
    assert "See fleet replica --help." in told


def test_a_replica_stays_at_the_version_that_it_is_told(
    prepared: Prepared, tmp_path: Path, free_endpoints: Callable[[int], list[str]]
) -> None:
    def body(made: Fleet, index: int) -> None:
        model = Trained()
        optimizer = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        made.init_worker()
        for step in (1, 2, 3):
            (-(model.rows(torch.tensor([7])).sum() + model.dense.sum())).backward()
            optimizer.step()
            optimizer.zero_grad()
            made.save_persistables(str(tmp_path / "run" / f"step-{step:08d}"))

    Job(body).run()
    endpoints = free_endpoints(2)
    processes = [
        prepared.start(
            ["-m", "fleet", "replica", "--checkpoints", str(tmp_path / "run"), "--endpoint", endpoint, "--at", at],
            dict(os.environ),
            tmp_path,
        )
        for endpoint, at in zip(endpoints, ("2", "9"), strict=True)
    ]
    with contextlib.ExitStack() as running:
        for process in processes:
            running.callback(process.kill)
        with RemoteModel(Trained(), endpoints[:1]) as remote:
            assert remote.version == 2
            assert set(remote(torch.tensor([7])).tolist()) == {2.0}
        _, told = processes[1].communicate(timeout=PATIENCE_S)
        assert processes[1].returncode == 1
        assert "there is no complete checkpoint of version 9" in told
        assert "expected one of 3, 2, 1" in told
        processes[0].send_signal(signal.SIGTERM)
        assert processes[0].wait(PATIENCE_S) == 0


def test_the_command_answers_until_it_is_told_to_end(
    prepared: Prepared, tmp_path: Any, free_endpoints: Callable[[int], list[str]]
) -> None:
    def body(made: Fleet, index: int) -> None:
        model = Trained()
        optimizer = made.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        made.init_worker()
        (-(model.rows(torch.tensor([7])).sum() + model.dense.sum())).backward()
        optimizer.step()
        made.save_persistables(str(tmp_path / "run" / "step-00000001"))

    Job(body).run()
    endpoints = free_endpoints(2)
    processes = [
        prepared.start(
            ["-m", "fleet", "replica", "--checkpoints", str(tmp_path / "run"), "--endpoint", endpoint],
            dict(os.environ),
            tmp_path,
        )
        for endpoint in endpoints
    ]
    with contextlib.ExitStack() as running:
        for process in processes:
            running.callback(process.kill)
        with RemoteModel(Trained(), endpoints, poll_s=0.02) as remote:
            assert remote(torch.tensor([7, 8]))[::DIM].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
            bound = remote._source.bound.replica.endpoint
            seen, ends = [0] * 4, threading.Event()
            failed: list[BaseException] = []

            def predict(index: int) -> None:
                try:
                    while not ends.is_set():
                        assert remote(torch.tensor([7, 8]))[::DIM].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
                        seen[index] += 1
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=predict, args=(index,)) for index in range(4)]
            for thread in threads:
                thread.start()
            try:
                until(lambda: min(seen) > 20)
                processes[endpoints.index(str(bound))].kill()
                before = list(seen)
                until(lambda: failed or all(now > then + 20 for now, then in zip(seen, before, strict=True)))
            finally:
                ends.set()
                for thread in threads:
                    thread.join(PATIENCE_S)
            assert failed == [], "each had requests under way"
        (alive,) = [p for p, e in zip(processes, endpoints, strict=True) if e != str(bound)]
        alive.send_signal(signal.SIGTERM)
        assert alive.wait(PATIENCE_S) == 0
