"""What processes tell of themselves, and what others see of a job by it."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PATIENT, Job, run_job, until
from small_job import join

from fleet import Fleet
from fleet.cluster import Endpoint
from fleet.environ import Knobs, SecurityKnobs
from fleet.errors import ArgumentTypeError, ConfigurationError, NotInitializedError, ProtocolError
from fleet.launch import cli
from fleet.observing.names import WORKER, rate
from fleet.observing.picture import History, Row, View, WorkerView, rows, seen
from fleet.observing.table import HEADS, cells, plain, rich_table
from fleet.observing.worker import MOST_REPORTED
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.errors import raise_if_error
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork

BEATING = {**PATIENT, "FLEET_BEAT": "0.02"}


def status_of(network: LoopbackNetwork, endpoint: str) -> dict[str, Any]:
    """What a server answers somebody who is no member of its job."""
    channel = network.connect(Endpoint.parse(endpoint))
    try:
        reply = raise_if_error(channel.start(Frame(pb.Request(status=pb.Status())), 10.0).result())
    finally:
        channel.close()
    status: dict[str, Any] = json.loads(reply.message.about)
    return status


# What a worker tells of itself


def test_a_worker_counts_what_it_does() -> None:
    def body(fleet_: Fleet, index: int) -> tuple[dict[str, float], float]:
        model, optimizer = join(fleet_)
        for step in range(5):
            loss = model.loss(step)
            optimizer.minimize(loss)
            fleet_.report(examples=6, auc=torch.tensor(0.75), seen=step)
        fleet_.barrier_worker()
        return fleet_.summary()["figures"], loss.item()

    for figures, loss in run_job(body, workers=2, servers=2):
        assert figures["steps"] == 5
        assert figures["examples"] == 30
        assert figures["loss"] == pytest.approx(loss)
        assert (figures["auc"], figures["seen"]) == (0.75, 4)
        assert figures["sent_bytes"] > 5 * 15 * 4  # at least the dense gradients of every step
        assert figures["received_bytes"] > 5 * 15 * 4
        spent = [figures[name] for name in ("push_seconds", "pull_seconds", "meet_seconds")]
        assert min(spent) > 0
        assert sum(spent) < figures["uptime_seconds"]
        assert figures["memory_bytes"] > 1 << 20
        assert set(figures) - {"auc", "seen"} == set(WORKER)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"examples": 1.5}, ArgumentTypeError, "examples must be an int"),
        ({"examples": -1}, ConfigurationError, "negative"),
        ({"loss": torch.zeros(2)}, ArgumentTypeError, "loss must be a number or a tensor of one element"),
        ({"auc": "high"}, ArgumentTypeError, "auc must be"),
        ({"steps": 3}, ConfigurationError, "counts itself"),
        ({"a b": 3}, ConfigurationError, "no name of a figure"),
        ({f"f{i}": i for i in range(MOST_REPORTED + 1)}, ConfigurationError, "too many"),
    ],
)
def test_what_cannot_be_reported_is_refused(given: dict[str, Any], error: type[Exception], match: str) -> None:
    def body(fleet_: Fleet, index: int) -> dict[str, float]:
        join(fleet_)
        with pytest.raises(error, match=match):
            fleet_.report(**{"examples": 3, **given})
        return dict(fleet_.summary()["figures"])

    (figures,) = run_job(body)
    assert figures["examples"] == 0, "what is refused counts in no part"


def test_report_needs_a_running_job() -> None:
    with pytest.raises(NotInitializedError, match=r"fleet\.init"):
        Fleet(environ={}).report(loss=1.0)


def test_time_that_is_waited_is_a_range_in_a_profile() -> None:
    def body(fleet_: Fleet, index: int) -> set[str]:
        model, optimizer = join(fleet_)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.minimize(model.loss(0))
            fleet_.barrier_worker()
        return {event.key for event in profile.key_averages()}

    (names,) = run_job(body)
    assert {"fleet.push", "fleet.pull", "fleet.wait", "fleet.meet"} <= names


# What a server tells


def test_a_server_tells_a_stranger_who_waits_for_whom() -> None:
    """Worker 0 is at its second step, worker 1 keeps it waiting until the server has said so."""
    network = LoopbackNetwork()
    has_looked = threading.Event()

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        optimizer.minimize(model.loss(0))
        fleet_.report(auc=0.5)
        if index == 1:
            assert has_looked.wait(30)
        optimizer.minimize(model.loss(1))

    job = Job(body, workers=2, network=network, environ=BEATING)
    threads = job.start()
    try:
        seen: dict[str, Any] = {}

        def is_waiting() -> bool:
            if network.listener(Endpoint.parse(job.endpoints[0])) is not None:
                seen.update(status_of(network, job.endpoints[0]))
            told = seen.get("workers", [{}])
            return bool(told[0].get("waits") and all(worker["figures"].get("auc") for worker in told))

        until(is_waiting)
    finally:
        has_looked.set()
        job.join(threads)
    assert not job.errors
    first, second = seen["workers"]
    assert first["waits"]["for"] == [1]
    assert first["waits"]["what"] == "push of step 2"
    assert second["waits"] is None
    assert (first["standing"], first["steps"], first["figures"]["steps"]) == ("live", 2, 2)
    assert seen["phase"] == "training"
    assert seen["mode"] == "sync"
    assert seen["figures"]["version"] == 1
    assert seen["figures"]["parked"] == 1
    assert seen["tables"]["closed.weight"][0] == 30


def test_waits_are_put_down_to_whoever_came_last() -> None:
    network = LoopbackNetwork()
    seen: dict[str, Any] = {}

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        for step in range(3):
            if index == 1:
                time.sleep(0.05)
            optimizer.minimize(model.loss(step))
        fleet_.barrier_worker()
        if index == 0:
            seen.update(status_of(network, "server0:1"))
        fleet_.barrier_worker()

    run_job(body, 2, network=network)
    first, second = seen["workers"]
    assert first["waited"]["1"] > 0.1
    assert second["waited"].get("0", 0.0) < first["waited"]["1"]


def test_a_status_changes_nothing_and_needs_no_job() -> None:
    network = LoopbackNetwork()
    job = Job(lambda fleet_, index: join(fleet_) and None, network=network, endpoints=["server0:1"])
    thread = threading.Thread(target=job.serve, args=(0,), name="job-serve", daemon=True)
    thread.start()
    until(lambda: network.listener(Endpoint("server0", 1)))
    assert [status_of(network, "server0:1")["phase"] for _ in range(3)] == ["waiting for the first worker"] * 3
    job.work(0)
    thread.join(30)
    assert not job.errors


def test_a_heartbeat_that_tells_too_much_is_refused() -> None:
    from fleet.clock import SystemClock
    from fleet.ps.server.ledger import Ledger

    ledger = Ledger(SystemClock())
    ledger.heard(0, {"loss": math.nan})
    for figures in ({f"f{i}": 0.0 for i in range(1000)}, {"x" * 65: 0.0}):
        with pytest.raises(ProtocolError, match="tells too much"):
            ledger.heard(0, figures)


# What is seen of both


def test_a_rate_is_of_the_process_own_time() -> None:
    assert rate("steps", {"steps": 10, "uptime_seconds": 1.0}, {"steps": 30, "uptime_seconds": 5.0}) == 5.0
    assert rate("steps", None, {"steps": 30, "uptime_seconds": 5.0}) is None
    same = {"steps": 10, "uptime_seconds": 1.0}
    assert rate("steps", same, same) is None
    assert rate("steps", {"steps": 30, "uptime_seconds": 50.0}, same) is None, "it has started again"


def told(**of: Any) -> dict[str, Any]:
    """A worker as a server tells of it."""
    return {
        "standing": "live",
        "label": "host:1",
        "heard_seconds": 0.1,
        "steps": 10,
        "staleness": [0, 0],
        "waits": None,
        "waited": {},
        "figures": {},
        **of,
    }


def status(*workers: dict[str, Any], **of: Any) -> dict[str, Any]:
    figures = dict.fromkeys(("version", "parked", "uptime_seconds", "sent_bytes", "received_bytes"), 0.0)
    return {"phase": "training", "figures": {**figures, **of}, "workers": list(workers)}


def test_two_servers_know_one_worker_together() -> None:
    at_one = told(staleness=[3, 2], waited={"1": 2.0, "2": 0.5}, figures={"uptime_seconds": 1.0}, steps=9)
    at_other = told(staleness=[1, 2], waited={"1": 1.5}, figures={"uptime_seconds": 2.0}, heard_seconds=0.3)
    view = seen(0.0, {"server 0": status(at_one), "server 1": status(at_other)}, {})
    worker = view.workers[0]
    assert worker.staleness == (4, 4)
    assert worker.waited == {1: 2.0, 2: 0.5}, "it waits at both servers at once"
    assert (worker.figures["uptime_seconds"], worker.heard_seconds, worker.steps) == (2.0, 0.1, 10)


def test_rows_of_a_picture() -> None:
    def figures(uptime: float) -> dict[str, float]:
        return {
            "uptime_seconds": uptime,
            "steps": 10 * uptime,
            "examples": 640 * uptime,
            "sent_bytes": 2e6 * uptime,
            "received_bytes": 1e6 * uptime,
            "loss": 0.25,
            "queue": 2,
            "memory_bytes": 3e8,
        }

    def view(uptime: float, waits: dict[str, Any] | None) -> View:
        one = told(figures=figures(uptime), staleness=[3 * uptime, 2 * uptime], waits=waits)
        other = told(figures=figures(uptime), waited={"0": 0.4 * uptime})
        gone = told(standing="lost", steps=7)
        server = status(one, other, gone, uptime_seconds=uptime, version=20 * uptime, busy_seconds=0.9 * uptime)
        return seen(uptime, {"server 0": server, "server 1": "does not answer"}, {})

    waits = {"what": "push of step 41", "seconds": 3.0, "for": [1]}
    first, second, third, server, away = rows(view(2.0, None), view(4.0, waits))
    assert first.note == "waits 3.0 s for worker 1: push of step 41"
    assert (first.step, first.steps_a_second, first.examples_a_second) == (40, 10.0, 640.0)
    assert (first.loss, first.staleness, first.queue, first.sent_a_second) == (0.25, 1.5, 2, 2e6)
    assert second.note == "waits 40%, mostly for worker 0"
    assert (third.note, third.is_well, third.steps_a_second) == ("given up on", False, None)
    assert (server.process, server.note, server.steps_a_second) == ("server 0", "busy 90%", 20.0)
    assert (away.note, away.is_well) == ("does not answer", False)
    assert cells(first)[1:-1] == (*("40", "10", "640", "0.25", "1.5", "2", "2 MB", "1 MB", "300 MB"),)
    table = plain([first, away]).splitlines()
    assert len({line.index("memory") for line in table if "memory" in line}) == 1
    assert [line.split()[:2] for line in table[1:]] == [["worker", "0"], ["server", "1"]]


def test_what_is_old_is_said_to_be() -> None:
    (row,) = rows(View(0.0), View(1.0, workers={0: WorkerView(heard_seconds=61.0)}))
    assert row.note == "silent for 61 s"


def test_a_history_keeps_what_rates_need() -> None:
    history = History()
    for at in range(100):
        history.add(View(float(at)))
    before, now = history.ends
    assert (before.at, now.at) == (94.0, 99.0)


def test_the_table_of_rich_has_the_same_columns() -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - it lives as long
    console.print(rich_table([Row("worker 0", 3, loss=math.nan, note="waits")], "2 steps/s"))
    text = console.export_text()
    assert all(head in text for head in HEADS)
    assert "worker 0" in text
    assert "nan" in text


# fleet top


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A job over gRPC, with a token, that goes on as long as the test looks at it."""
    from fleet.ps.backend import real_network

    knobs = replace(Knobs(beat_s=0.05), security=SecurityKnobs(token="sesame"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    enough = threading.Event()

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        while not enough.is_set():
            optimizer.minimize(model.loss(0))
            time.sleep(0.005)

    job = Job(
        body, network=real_network(knobs), endpoints=[endpoint], environ={**BEATING, "FLEET_AUTH_TOKEN": "sesame"}
    )
    threads = job.start()
    yield endpoint
    enough.set()
    job.join(threads)
    assert not job.errors


def test_top_shows_a_running_job(
    served: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEET_AUTH_TOKEN", "sesame")

    def looks() -> str:
        assert cli.main(["top", served, "--once", "--interval", "0.2"]) in (0, 1)
        return capsys.readouterr().out

    shown: list[str] = []
    until(lambda: shown.append(looks()) or "worker 0" in shown[-1])
    worker = next(line for line in shown[-1].splitlines() if line.startswith("worker 0"))
    assert int(worker.split()[2]) > 0
    assert any(line.startswith("server 0") for line in shown[-1].splitlines())

    monkeypatch.setenv("FLEET_AUTH_TOKEN", "guess")
    assert cli.main(["top", served, "--once"]) == 1
    assert "the token is not the server's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["nowhere"], 2, "neither servers nor a directory"),
        (["127.0.0.1:1", "--once"], 1, "no server answers"),
        (["127.0.0.1:1", "--interval", "0"], 2, "--interval is not usable"),
        ([], 2, "required"),
    ],
)
def test_top_says_what_is_wrong(
    argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["top", *argv]) == code
    assert says in capsys.readouterr().err


def test_top_of_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(tmp_path)]) == 2
    assert "no job has left a record" in capsys.readouterr().err
