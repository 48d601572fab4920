"""What processes tell of themselves, and what others see of a job by it."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import io
import itertools
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import PATIENT, Job, run_job, until
from patience import PATIENCE_S
from small_job import STRATEGIES, join, train

import fleet.nn
from fleet import Fleet
from fleet.base.cluster import Endpoint
from fleet.base.settings import ObservingSettings, ProcessSettings, SecuritySettings
from fleet.errors import (
    ArgumentTypeError,
    ConfigurationError,
    NotInitializedError,
    PortInUseError,
    ProtocolError,
    UnsupportedError,
)
from fleet.launch import cli, top
from fleet.launch.live_view import LiveView
from fleet.launch.sources import Recorded
from fleet.ps.server.asked_ids import AskedIds, hottest
from fleet.ps.server.status import in_brief
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.wire_errors import raise_if_error
from fleet.telemetry.cause import Cause, claim
from fleet.telemetry.diagnosis import diagnose
from fleet.telemetry.figures import SERVER, TABLE, WORKER, Figure, rate, time_in_words
from fleet.telemetry.live_table import HEADS, TABLE_HEADS, cells, plain, rich_table, rich_tables, title, with_heads
from fleet.telemetry.observer import Observer
from fleet.telemetry.prometheus import BESIDE
from fleet.telemetry.record import (
    Chronicle,
    Record,
    evenly_spread,
    has_broken_off,
    newest,
    read_records,
    training_of,
    view_of,
)
from fleet.telemetry.tensorboard import scalars
from fleet.telemetry.view import (
    History,
    HotId,
    Row,
    Speed,
    View,
    WorkerView,
    held_up,
    hot_ids,
    rows,
    seen,
    table_rows,
    total_speed,
)
from fleet.telemetry.worker_figures import MOST_REPORTED

BEATING = {**PATIENT, "FLEET_HEARTBEAT_S": "0.02"}


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
        assert (figures["step"], figures["steps"], figures["lockstep"]) == (5, 5, 1)
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


@pytest.mark.parametrize("mode", STRATEGIES)
def test_what_no_device_has_is_no_copy(mode: str) -> None:
    """Else every job that waits for nobody would be told of copies that nobody made."""

    def body(fleet_: Fleet, index: int) -> dict[str, float]:
        model, optimizer = join(fleet_, mode)
        train(model, optimizer, range(3))
        fleet_.barrier_worker()
        return dict(fleet_.summary()["figures"])

    (figures,) = run_job(body)
    assert figures["copy_seconds"] == 0
    assert time_in_words([figures]) == ""


@pytest.mark.parametrize("mode", STRATEGIES)
def test_steps_of_before_are_no_speed(mode: str, tmp_path: Path) -> None:
    """A job that goes on from a checkpoint is at its step, and has not taken it."""
    network = LoopbackNetwork()

    def body(fleet_: Fleet, index: int) -> tuple[dict[str, float], dict[str, float]]:
        model, optimizer = join(fleet_, mode)
        train(model, optimizer, range(4))
        fleet_.save_persistables(tmp_path / "checkpoint")
        return fleet_.summary()["figures"], status_of(network, "server0:1")["figures"]

    ((first, _),) = run_job(body, network=network)
    ((worker, server),) = run_job(body, network=network, model_dir=str(tmp_path / "checkpoint"))
    assert (first["step"], first["steps"]) == (4, 4)
    assert (worker["step"], worker["steps"]) == (8, 4)
    assert worker["lockstep"] == (mode == "sync")
    assert 0 < server["updates"] <= 4, "and the versions before are none of this server's"
    assert server["version"] == 4 + server["updates"] or mode != "sync"


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"examples": 1.5}, ArgumentTypeError, "examples must be an int"),
        ({"examples": -1}, ConfigurationError, "negative"),
        ({"loss": torch.zeros(2)}, ArgumentTypeError, "loss must be a number or a tensor of one element"),
        ({"auc": "high"}, ArgumentTypeError, "auc must be"),
        ({"loss": 10**400}, ConfigurationError, "loss is out of range"),
        ({"examples": 10**400}, ConfigurationError, "examples is out of range"),
        ({"steps": 3}, ConfigurationError, "counts itself"),
        ({"lockstep": 3}, ConfigurationError, "counts itself"),
        ({"a b": 3}, ConfigurationError, "no name of a figure"),
        ({"examples": 10**305}, ConfigurationError, "examples is out of range; expected at least 0 and below 1e\\+15"),
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


def test_a_loss_is_none_of_the_names_of_ones_own() -> None:
    def body(fleet_: Fleet, index: int) -> dict[str, float]:
        join(fleet_)
        fleet_.report(loss=1.0, **{f"f{i}": float(i) for i in range(MOST_REPORTED)})
        return dict(fleet_.summary()["figures"])

    (figures,) = run_job(body)
    assert (figures["loss"], figures["f63"]) == (1.0, 63.0)


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
            beaten = [worker["figures"] for worker in told if "auc" in worker.get("figures", {})]
            return bool(told[0].get("waits")) and len(beaten) == 2 and beaten[0]["steps"] == 2

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
    told_of = seen["tables"]["closed.weight"]
    assert (told_of["rows"], told_of["in_memory"], told_of["on_disk"]) == (30, 30, 0)


@pytest.mark.parametrize(
    ("call", "what"),
    [("minimize", "push of step 2"), ("barrier_worker", "barrier 1"), ("all_reduce_worker", "sum 1")],
)
def test_a_wait_without_an_end_is_not_the_script_s_own_time(
    call: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 keeps worker 0 waiting: seen twice meanwhile, only one of them is in code of its own."""
    # Whatever else this machine, and this process, does meanwhile.
    monkeypatch.setattr("fleet.telemetry.worker_figures.delay", dict)
    monkeypatch.setattr("fleet.telemetry.process.time.process_time", lambda: 0.0)
    network = LoopbackNetwork()
    is_away, has_looked = threading.Event(), threading.Event()

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        optimizer.minimize(model.loss(0))
        loss = model.loss(1)
        if index == 1:
            is_away.set()
            assert has_looked.wait(PATIENCE_S)
        {
            "minimize": lambda: optimizer.minimize(loss),
            "barrier_worker": fleet_.barrier_worker,
            "all_reduce_worker": lambda: fleet_.all_reduce_worker(1.0),
        }[call]()

    job = Job(body, workers=2, network=network, environ=BEATING)
    threads = job.start()
    try:
        views: list[View] = []

        def has_waited() -> bool:
            """Three views, each with later figures of both: the first one's may be from before the wait."""
            if not is_away.is_set():
                return False
            view = seen(time.monotonic(), {"server 0": status_of(network, job.endpoints[0])}, {})
            wait, tells = view.workers[0].wait, all(worker.figures for worker in view.workers.values())
            if tells and wait is not None and wait.what == what and (not views or is_later(view, views[-1])):
                views.append(view)
            return len(views) == 3

        def is_later(view: View, than: View) -> bool:
            """By what both workers have told, whose clocks are their own."""
            return all(
                view.workers[index].figures["uptime_seconds"] > than.workers[index].figures["uptime_seconds"] + 0.2
                for index in (0, 1)
            )

        until(has_waited)
    finally:
        has_looked.set()
        job.join(threads)
    assert not job.errors
    text = " ".join(diagnose(views[1], views[2]))
    assert "Worker 1" in text
    assert "Of the time of worker 1" in text, "which waits for something that Fleet does not see"
    assert "of worker 0" not in text
    assert "though none is slower" not in text


def test_a_server_counts_what_it_does() -> None:
    """What its only worker sends it receives, and the other way round."""
    network = LoopbackNetwork()

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        for step in range(5):
            optimizer.minimize(model.loss(step))
        figures, mine = status_of(network, "server0:1")["figures"], fleet_.summary()["figures"]
        assert figures["version"] == 5 < figures["requests"]
        assert figures["sent_bytes"] == mine["received_bytes"] > 0
        assert figures["received_bytes"] == mine["sent_bytes"] > 0
        assert 0 < figures["busy_seconds"] < figures["uptime_seconds"]

    run_job(body, network=network)


def test_waits_are_put_down_to_whoever_came_last() -> None:
    network = LoopbackNetwork()
    seen: dict[str, Any] = {}

    def waits_s() -> float:
        """How long worker 0 has waited so far for what it asked last."""
        waits = status_of(network, "server0:1")["workers"][0]["waits"]
        return waits["seconds"] if waits else 0.0

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        for step in range(3):
            if index == 1:
                until(lambda: waits_s() > 0.05)
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
    from fleet.base.clock import SystemClock
    from fleet.ps.server.statistics import Statistics

    statistics_ = Statistics(SystemClock())
    statistics_.heard(0, {"loss": math.nan})
    statistics_.heard(0, {f"{i:064}": 0.0 for i in range(128)})
    for figures in ({f"f{i}": 0.0 for i in range(129)}, {"x" * 65: 0.0}):
        with pytest.raises(ProtocolError, match="tells too much"):
            statistics_.heard(0, figures)


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
    names = ("version", "updates", "parked", "uptime_seconds", "sent_bytes", "received_bytes")
    figures = dict.fromkeys(names, 0.0)
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
            "step": 1000 + 10 * uptime,
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
        server = status(one, other, gone, uptime_seconds=uptime, updates=20 * uptime, busy_seconds=0.9 * uptime)
        return seen(uptime, {"server 0": server, "server 1": "does not answer"}, {})

    waits = {"what": "push of step 41", "seconds": 3.0, "for": [1]}
    first, second, third, server, away = rows(view(2.0, None), view(4.0, waits))
    assert first.note == "waits 3.0 s for worker 1: push of step 41"
    assert (first.step, first.steps_a_second, first.examples_a_second) == (1040, 10.0, 640.0)
    assert (first.loss, first.staleness, first.queue, first.sent_a_second) == (0.25, 1.5, 2, 2e6)
    assert second.note == "others wait 100% for it", "the wait that goes on counts"
    assert (first.weight, second.weight, server.weight) == pytest.approx((0.4, 1.0, 0.9))
    assert (third.note, third.is_well, third.steps_a_second) == ("given up on", False, None)
    assert (server.process, server.note, server.steps_a_second) == ("server 0", "busy 90%", 20.0)
    assert (away.note, away.is_well) == ("does not answer", False)
    assert cells(first)[1:-1] == (*("1040", "10", "640", "0.25", "1.5", "2", "2 MB", "1 MB", "300 MB"),)
    table = plain([first, away]).splitlines()
    assert len({line.index("memory") for line in table if "memory" in line}) == 1
    assert [line.split()[:2] for line in table[1:]] == [["worker", "0"], ["server", "1"]]


def table(asked: int = 0, read: int = 0, **of: int) -> dict[str, int]:
    """What a server tells of a table, of which a fifth is in memory if it has files."""
    rows = {"rows": 1000, "in_memory": 200, "on_disk": 800, "bytes": 20_000, "disk_bytes": 100_000}
    return {**rows, "asked_rows": asked, "read_rows": read, "read_bytes": 100 * read, "written_bytes": 10 * read, **of}


def holding(at: float, *tables: dict[str, int]) -> View:
    """Servers that have been up for so long, at ten updates a second, and their parts of a table."""
    return seen(
        at,
        {
            f"server {index}": {**status(uptime_seconds=at, updates=10 * at), "tables": {"t": part}}
            for index, part in enumerate(tables)
        },
        {},
    )


def test_a_table_is_summed_over_its_servers() -> None:
    before, now = holding(1.0, table(100, 50), table(0, 0)), holding(3.0, table(400, 150), table(100, 0))
    (shown,) = table_rows(before, now)
    assert (shown.figures["rows"], shown.figures["on_disk"], shown.figures["disk_bytes"]) == (2000, 1600, 200_000)
    assert shown.hit_rate == 0.75, "100 of 400, whichever server they lie on"
    assert (shown.a_step("asked_rows"), shown.a_step("read_bytes")) == (20, 500)
    lines = plain([], [shown]).splitlines()
    assert lines[-2].split() == " ".join(TABLE_HEADS).split()
    shown_row = ["t", "2,000", "400", "1,600", "40", "kB", "200", "kB", "75.0%", "500", "B", "50", "B", "0", "0", "0"]
    assert lines[-1].split() == shown_row


def test_a_table_counts_anew_when_its_server_has_started_again() -> None:
    (shown,) = table_rows(holding(9.0, table(1000, 900)), holding(2.0, table(100, 20)))
    assert shown.hit_rate == 0.8
    assert shown.a_step("asked_rows") == 5


def test_a_table_in_memory_has_all_hits() -> None:
    (shown,) = table_rows(View(0.0), holding(2.0, {"rows": 7, "bytes": 700, "in_memory": 7, "on_disk": 0}))
    assert (shown.hit_rate, shown.figures["read_bytes"]) == (1.0, 0)


def test_tables_are_shown_below_processes_where_there_is_room() -> None:
    from rich.console import Console

    shown = table_rows(View(0.0), holding(2.0, table(100, 20)))

    def text(height: int) -> str:
        console = Console(width=120, height=height, file=io.StringIO())
        console.print(rich_tables([Row("worker 0")], shown, 120, height))
        drawn: str = console.file.getvalue()
        assert len(drawn.splitlines()) <= height
        return drawn

    assert "80.0%" in text(10)
    assert "80.0%" not in text(6)


def test_a_job_with_a_memory_budget_tells_where_its_rows_are(tmp_path: Path) -> None:
    rows_in_all = 20_000

    def body(fleet_: Fleet, index: int) -> dict[str, Any]:
        model = torch.nn.ModuleDict({"emb": fleet.nn.Embedding(None, 32)})
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        for ids in (*torch.arange(rows_in_all).split(2000), torch.arange(100)):
            optimizer.minimize(model["emb"](ids).sum())
        return fleet_.summary()["tables"]["emb.weight"]

    tiered = {"FLEET_TABLE_MEMORY_MB": "1", "FLEET_TABLE_DIR": str(tmp_path)}
    (share,) = run_job(body, 1, 2, environ={**PATIENT, **tiered})
    assert {*TABLE, "hit_rate"} == {*share}
    assert share["rows"] == rows_in_all == share["in_memory"] + share["on_disk"]
    assert share["on_disk"] > 0
    assert share["written_bytes"] > 0
    assert 100 <= share["read_rows"] < share["asked_rows"]
    assert share["hit_rate"] == 1 - share["read_rows"] / share["asked_rows"]


# Ids that are asked for again and again


def asked(requests: int, size: int) -> AskedIds:
    """Requests of two tables: of the second all name the id -5, and every other one the greatest there is."""
    found, draw = AskedIds(), np.random.default_rng(0)
    for number in range(requests):
        others = draw.integers(0, 2**62, (2, size))
        ids = [others[0], [-5, *([2**63 - 1] if number % 2 else []), *others[1]]]
        found.note((3, 1), np.concatenate(ids), np.cumsum([len(each) for each in ids]))
    return found


def test_ids_that_most_requests_name_are_hot() -> None:
    found = asked(2000, 40)
    first, second = hottest(found.kept())
    assert first == (1, -5, 1.0)
    assert second[:2] == (1, 2**63 - 1)
    assert 0.3 < second.share < 0.7
    assert found.rows == 2000 * (2 * 40 + 1) + 1000


@pytest.mark.pairs(1)
@pytest.mark.parametrize(("requests", "size"), [(700, 1), (400, 10_000), (35, 100_000)])
def test_little_is_kept_of_what_was_asked_for(requests: int, size: int) -> None:
    found = asked(requests, size)
    assert requests * 2 * size < found.rows
    kept = sum(each.ids.size for each in found.kept())
    assert kept <= 1 << 17
    assert bool(kept) == bool(hottest(found.kept())) == (size < 100_000), "of a request as large nothing is hot"


def test_nothing_is_said_of_few_requests() -> None:
    assert not hottest(asked(3, 40).kept())
    assert not hottest(asked(0, 40).kept())


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_job_shows_which_ids_are_hot(mode: str) -> None:
    network = LoopbackNetwork()

    def body(fleet_: Fleet, index: int) -> list[HotId]:
        model = torch.nn.ModuleDict({name: fleet.nn.Embedding(None, 2) for name in ("user", "item")})
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet_.distributed_optimizer(sgd, STRATEGIES[mode](), model=model)
        fleet_.init_worker()
        for step in range(100):
            others = torch.arange(10) + 100 * (2 * step + index)
            optimizer.minimize(
                model["user"](torch.cat([others, torch.tensor([7])])).sum() + model["item"](others).sum()
            )
        fleet_.barrier_worker()
        told = {f"server {each}": status_of(network, f"server{each}:1") for each in range(2)}
        view = seen(0.0, told, {})
        rows_asked = [server.figures["asked_rows"] for server in view.servers.values()]
        assert sum(rows_asked) >= 2 * 100 * 21, "of look-ups, and of gradients"
        return hot_ids(view)

    for hot in run_job(body, 2, 2, network=network):
        assert [each[:2] for each in hot] == [("user.weight", 7)]
        assert hot[0].share == 1.0
        assert plain([Row("worker 0")], hot=hot).splitlines()[-1] == "asked for most: user.weight 7 (100%)"


def test_hot_ids_are_shown_where_there_is_room() -> None:
    from rich.console import Console

    shown, hot = table_rows(View(0.0), holding(2.0, table(100, 20))), [HotId("t", 7, 0.5)]

    def text(height: int) -> str:
        console = Console(width=120, height=height, file=io.StringIO())
        console.print(rich_tables([Row("worker 0")], shown, 120, height, hot))
        drawn: str = console.file.getvalue()
        assert len(drawn.splitlines()) <= height
        return drawn

    assert ["80.0%" in text(height) for height in (5, 6, 9)] == [False, False, True]
    assert ["t 7 (50%)" in text(height) for height in (5, 6, 9)] == [False, True, True]


def test_what_is_old_is_said_to_be() -> None:
    (row,) = rows(View(0.0), View(1.0, workers={0: WorkerView(heard_seconds=61.0)}))
    assert row.note == "silent for 61 s"


def test_a_history_keeps_what_rates_need() -> None:
    history = History()
    for at in range(100):
        history.add(View(float(at)))
    before, now = history.ends
    assert (before.at, now.at) == (94.0, 99.0)
    for at in range(20):  # the clock was set back
        history.add(View(float(at)))
    before, now = history.ends
    assert (before.at, now.at) == (14.0, 19.0)


def test_who_waits_and_for_whom_is_told_of_both() -> None:
    def view(uptime: float) -> View:
        figures = {"uptime_seconds": uptime}
        waiting = [told(figures=figures, waited={"2": 0.3 * uptime}), told(figures=figures, waited={"2": 0.5 * uptime})]
        last = told(figures=figures, waited={"1": 0.06 * uptime, "0": 0.1 * uptime})
        return seen(uptime, {"server 0": status(*waiting, last)}, {})

    notes = [row.note for row in rows(view(2.0), view(4.0))][:3]
    assert notes == ["waits 30% for worker 2", "waits 50% for worker 2", "others wait 40% for it"]
    alone = {0: WorkerView(figures={"uptime_seconds": 1.0})}
    assert held_up(View(0.0), View(1.0, workers=alone)) == {0: 0.0}


def on_screen(shown: list[Row], width: int, height: int) -> list[str]:
    from rich.console import Console

    console = Console(width=width, height=height, file=io.StringIO())
    console.print(rich_table(shown, width, height))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "left_out"), [(200, set()), (80, {"received/s", "sent/s", "memory", "queue"})])
def test_the_table_of_rich_fits_the_terminal(width: int, left_out: set[str]) -> None:
    note = "waits 12.3 s for worker 1: push of step 1234567"
    lines = on_screen([Row("worker 0", 1234567, 300.0, 2e4, math.nan, 1.5, 2, 2e6, 2e6, 3e8, note)], width, 24)
    text = "\n".join(lines)
    assert {head for head in HEADS if head not in text} == left_out
    assert all(word in text for word in ("worker 0", "1234567", "nan", note[:20]))
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(("lockstep", "steps", "unit"), [(1, 50.0, "steps"), (0, 100.0, "workers' steps")])
def test_a_step_of_all_workers_counts_once(lockstep: int, steps: float, unit: str) -> None:
    """Two workers, a hundred rounds in two seconds: a hundred steps of the job, or two hundred of its workers."""

    def view(at: float) -> View:
        figures = {"uptime_seconds": at, "steps": 50 * at, "examples": 640 * at, "lockstep": lockstep}
        return seen(at, {}, {0: (figures, 0.0), 1: (figures, 0.0)})

    shown = rows(view(1.0), view(3.0))
    assert total_speed(shown) == Speed(steps, 1280.0, bool(lockstep))
    assert title(shown) == f"{steps:.3g} {unit}/s, 1,280 examples/s"
    assert diagnose(view(1.0), view(3.0))[0].endswith(f": {steps:.3g} {unit} a second, 1,280 examples a second.")


def test_what_scripts_report_has_columns() -> None:
    shown = [Row("worker 0", loss=0.5, reported={"auc": 0.75, "copc": math.nan}), Row("worker 1"), Row("server 0")]
    heads, *lines = with_heads(shown)
    assert heads[4:8] == ("loss", "auc", "copc", "stale")
    assert [line[5:7] for line in lines] == [("0.75", "nan"), ("·", "·"), ("·", "·")]
    assert plain(shown).splitlines()[1].split()[:8] == [*("worker", "0", "·", "·", "·", "0.5", "0.75", "nan")]
    wide, narrow = (on_screen(shown, width, 24)[1] for width in (120, 54))
    assert all(head in wide for head in heads)
    assert ("auc" in narrow, "copc" in narrow, "examples/s" in narrow) == (True, False, True), "the last goes first"


def test_a_low_terminal_shows_the_processes_that_matter() -> None:
    shown = [Row(f"worker {index}", weight=0.9 if index == 15 else 0.0, is_well=index != 18) for index in range(20)]
    lines = on_screen([*shown, Row("server 0", weight=0.2)], 80, 8)
    assert "5 of 21 processes" in lines[0]
    assert len(lines) == 8
    named = [" ".join(line.split()[:2]) for line in lines[3:]]
    assert named == ["worker 0", "worker 1", "worker 15", "worker 18", "server 0"]
    assert "processes" not in on_screen(shown, 80, 30)[0], "there is room for all"
    assert len(on_screen(shown, 80, 1)) == 4, "one line is the least"


# fleet top


@pytest.fixture
def served(free_endpoints: Callable[[int], list[str]]) -> Iterator[str]:
    """A job over gRPC, with a token, that goes on as long as the test looks at it."""
    from fleet.ps.wire.real_network import real_network

    settings = replace(ProcessSettings(heartbeat_s=0.05), security=SecuritySettings(token="sesame"))
    (endpoint,) = free_endpoints(1)
    enough = threading.Event()

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        while not enough.is_set():
            optimizer.minimize(model.loss(0))
            time.sleep(0.005)

    job = Job(
        body, network=real_network(settings), endpoints=[endpoint], environ={**BEATING, "FLEET_AUTH_TOKEN": "sesame"}
    )
    threads = job.start()
    yield endpoint
    enough.set()
    job.join(threads)
    assert not job.errors


def until_it_trains(served: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``fleet top`` shows as soon as the worker has told of steps: a server answers before one has."""

    def looks() -> str:
        assert cli.main(["top", served, "--once", "--interval", "0.2"]) in (0, 1)
        return capsys.readouterr().out

    shown: list[str] = []
    until(lambda: shown.append(looks()) or re.search(r"^worker 0 +[1-9]", shown[-1], re.MULTILINE))
    return shown[-1]


def test_top_shows_a_running_job(
    served: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEET_AUTH_TOKEN", "sesame")

    shown = until_it_trains(served, capsys)
    assert re.search(r"^server 0 +\d+", shown, re.MULTILINE)
    assert re.match(r"\S+ steps/s.*\nprocess +step", shown), "how fast it is stands above the table, as on a terminal"

    monkeypatch.setenv("FLEET_AUTH_TOKEN", "guess")
    assert cli.main(["top", served, "--once"]) == 1
    assert "the token is not the server's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["nowhere"], 2, "neither servers nor a directory"),
        (["127.0.0.1:1", "--once"], 1, "no server answers"),
        ([",".join(f"127.0.0.1:{port}" for port in range(1, 31)), "--once"], 1, "no server answers"),
        (["127.0.0.1:1", "--interval", "0"], 2, "--interval is not usable"),
        ([], 2, "required"),
    ],
)
def test_top_says_what_is_wrong(
    argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["top", *argv]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("term", ["", "dumb", "unknown"])
def test_top_shows_tables_where_the_cursor_cannot_move(
    term: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with top._display(live=True) as show:
        show([Row("worker 0")], [], [])
        assert "worker 0" in capsys.readouterr().out


def test_top_of_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(tmp_path)]) == 2
    assert "no job has left a record" in capsys.readouterr().err


# What is left on disk


def test_a_record_is_read_back(tmp_path: Path) -> None:
    record = Record(tmp_path, "worker 3")
    record.write(10.0, "worker", {"steps": 1, "loss": math.nan})
    record.write(11.0, "worker", {"steps": 2, "loss": 0.5})
    record.close()
    of_server = json.dumps({"at": 10.5, "process": "server 0", "kind": "server", "told": status()})
    (tmp_path / "server.0.record.jsonl").write_text(f'{of_server}\n{{"at')
    lines = read_records(tmp_path)
    assert [(line.at, line.process) for line in lines] == [(10.0, "worker 3"), (10.5, "server 0"), (11.0, "worker 3")]
    assert [line.at for line in newest(tmp_path)] == [10.5, 11.0], "what is only half written is not there yet"
    assert newest(tmp_path, ["worker 3", "worker 4"])[0].told == {"steps": 2, "loss": 0.5}


def test_a_clock_that_is_set_back_hides_no_end(tmp_path: Path) -> None:
    """Both processes' clocks are set back by an hour in the middle, one of them starts again, and both end well."""
    for process in ("worker 0", "worker 1"):
        with contextlib.closing(Record(tmp_path, process, most_bytes=20_000)) as record:
            for second in range(1000):
                again = process == "worker 1" and second >= 800
                told = {"steps": second, "uptime_seconds": float(second - 800 * again)}
                at = 10_000.0 + second - 3600 * (second >= 500)
                record.write(at, "worker", told, is_last=second == 999)
    lines = read_records(tmp_path)
    assert view_of(lines[-1].at, {line.process: line for line in lines}.values()).is_over
    for process, tolerated in (("worker 0", 0.0), ("worker 1", 40.0)):  # nobody knows how long a start took
        own = [line for line in lines if line.process == process]
        assert all(abs(line.at - 10_000 - line.told["steps"]) <= tolerated for line in own)
        assert max(after.at - before.at for before, after in itertools.pairwise(own)) <= 40.0, "thinned out evenly"


def test_events_stay_in_order_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10_000.0, 50.0]
    monkeypatch.setattr("fleet.telemetry.record.wall_time", lambda: now[0])
    monkeypatch.setattr("fleet.telemetry.record.SystemClock.now", lambda _: now[1])
    with Chronicle(tmp_path, ["worker 0"], is_whole=True) as chronicle:
        chronicle.write("worker 0", "started")
        now[:] = [10_000.0 + 60 - 3600, 50.0 + 60]
        chronicle.write("worker 0", "exit code 0")
    assert [(line.at, line.told["what"]) for line in read_records(tmp_path)] == [
        (10_000.0, "started"),
        (10_060.0, "exit code 0"),
        (10_060.0, "ended"),
    ]


def test_a_process_that_starts_again_goes_on_with_its_record(tmp_path: Path) -> None:
    for at in (1.0, 2.0):
        record = Record(tmp_path, "worker 0")
        record.write(at, "worker", {})
        record._append(b'{"at": 1.5, "proc')  # killed in the midst of a line
        record.close()
    assert [line.at for line in read_records(tmp_path)] == [1.0, 2.0]


def test_a_record_never_grows_beyond_its_size_and_tells_of_all_times(tmp_path: Path) -> None:
    record = Record(tmp_path, "worker 0", most_bytes=10_000)
    for second in range(2000):
        record.write(float(second), "worker", {"steps": second})
        assert record._path.stat().st_size <= 10_000 + 100
    record.close()
    instants = [line.at for line in read_records(tmp_path)]
    assert (instants[0], instants[-1]) == (0.0, 1999.0)
    gaps = [after - before for before, after in itertools.pairwise(instants)]
    assert max(gaps) <= 2000 / 20, "there is no hole in it"


@pytest.mark.parametrize("instants", [[], [1.0], [2.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0, 100.0]])
def test_thinning_keeps_both_ends(instants: list[float]) -> None:
    kept = evenly_spread(instants)
    assert kept == sorted(set(kept))
    assert len(kept) <= len(instants) // 2 + 1 or len(instants) <= 1
    assert not instants or {instants[0], instants[-1]} <= {instants[place] for place in kept}


def test_a_new_job_leaves_nothing_of_an_old_one(tmp_path: Path) -> None:
    for process in ("worker 0", "worker 7"):
        Record(tmp_path, process).close()
    with Chronicle(tmp_path, ["worker 0"], is_whole=False):
        pass
    assert not (tmp_path / "worker.0.record.jsonl").exists()
    assert (tmp_path / "worker.7.record.jsonl").exists()
    with Chronicle(tmp_path, ["worker 0"], is_whole=True) as chronicle:
        chronicle.write("worker 0", "started")
    told = [(line.kind, line.told["what"], line.is_last) for line in read_records(tmp_path)]
    assert told == [("event", "started", False), ("event", "ended", True)]


def test_who_has_joined_and_not_left_has_broken_off(tmp_path: Path) -> None:
    assert not has_broken_off(tmp_path, "worker 0", time.time()), "it has joined no job"
    with contextlib.closing(Record(tmp_path, "worker 0")) as record:
        assert has_broken_off(tmp_path, "worker 0", time.time()), "in its first second there is no line yet"
        record.write(1000.0, "worker", {"steps": 3})
        assert has_broken_off(tmp_path, "worker 0", 1001.0)
        assert not has_broken_off(tmp_path, "worker 0", 1100.0), "it kept no record any more, for a full disk say"
        record.write(1101.0, "worker", {"steps": 4}, is_last=True)
        assert not has_broken_off(tmp_path, "worker 0", 1102.0)


@pytest.mark.parametrize("lines", [0, 1])
def test_who_could_record_no_more_has_not_broken_off(
    lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ends well on a disk that is full, or is filled by its last checkpoint, has not failed."""
    taken = itertools.count()
    append = Record._append

    def on_a_full_disk(record: Record, data: bytes) -> None:
        if next(taken) >= lines:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(record, data)

    monkeypatch.setattr(Record, "_append", on_a_full_disk)
    monkeypatch.setattr("fleet.telemetry.observer.PERIOD_S", 0.01)
    settings = ProcessSettings(observing=ObservingSettings(record_dir=str(tmp_path)))
    observer = Observer("worker 0", "worker", dict, settings)
    if lines:
        until(lambda: len(newest(tmp_path)) == 1)
    observer.close()
    assert not any(line.is_last for line in newest(tmp_path))
    assert not has_broken_off(tmp_path, "worker 0", time.time())


def test_a_line_that_a_disk_takes_in_parts_is_whole(tmp_path: Path) -> None:
    with contextlib.closing(Record(tmp_path, "worker 0")) as record:
        file = record._file

        class Slow:
            def write(self, data: memoryview) -> int | None:
                return file.write(data[:7])

            def close(self) -> None:
                file.close()

        record._file = Slow()  # type: ignore[assignment]
        record.write(1.0, "worker", {"steps": 3}, is_last=True)
    (line,) = read_records(tmp_path)
    assert line.told == {"steps": 3}


def test_lines_that_are_not_ours_are_passed_over(tmp_path: Path) -> None:
    ours = {"at": 10.0, "process": "worker 1", "kind": "worker", "told": {"steps": 1}}
    event = {"at": 10.0, "process": "fleetrun", "kind": "event", "told": {"process": "worker 1", "what": "started"}}
    odd = [
        *(ours | {"at": at} for at in (math.nan, math.inf, 10**400)),
        *(ours | {"process": process} for process in ("worker", "worker x", "worker ²", "", 3, f"worker {'9' * 5000}")),
        *(event | {"told": told} for told in ({}, {"process": "worker 1"}, {"process": 1, "what": "started"})),
        *(ours | {"at": at} for at in (-1.0, 1e18)),  # no date
    ]
    text = "".join(f"{json.dumps(each)}\n" for each in [ours, *odd, event])
    (tmp_path / "worker.1.record.jsonl").write_text(f"{text}{'[' * 100_000}\n")
    assert [line.kind for line in read_records(tmp_path)] == ["worker", "event"]


def places_in(value: object) -> Iterator[tuple[Any, Any]]:
    """Every place in nested JSON, as what holds it and its key or index there."""
    held = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in held:
        yield value, key
        yield from places_in(inner)


@pytest.mark.parametrize(
    "odd", [None, -1, 10**400, -1e305, math.nan, math.inf, "x", "\ud800", [], {}, [[1]], "removed"]
)
@pytest.mark.parametrize("kind", ["worker", "server", "event"])
@pytest.mark.pairs(2)
def test_no_odd_value_anywhere_in_a_record_ends_those_who_read_it(
    kind: str, odd: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that is JSON and not as ours are is passed over, as half a line is, and the others are read."""
    monkeypatch.setattr("fleet.telemetry.story.MOST_MOMENTS", 3)
    figures = {"uptime_seconds": 1.0, "steps": 3, "queue": 0, "loss": 0.5, "push_seconds": 0.1, "auc": 0.7}
    waits = {"what": "push", "seconds": 2.0, "for": [0]}
    workers = [told(waited={"0": 1.0}, waits=waits, figures=dict(figures))]
    beside = {"tables": {"t": table(rows=3)}, "hot": [["t", 3, 0.5]], "errand": "", "pace": "", "mode": "sync"}
    lines = {
        "worker": figures,
        "server": status(*workers) | beside,
        "event": {"process": "worker 0", "what": "started", "uptime_seconds": 0.0},
    }
    for place in range(len([*places_in(lines[kind])])):
        for each, of in lines.items():
            changed = copy.deepcopy(of)
            if each == kind:
                holder, key = [*places_in(changed)][place]
                if odd == "removed":
                    del holder[key]
                else:
                    holder[key] = odd
            record = [{"at": at, "process": f"{each} 0", "kind": each, "told": changed} for at in (1.0, 2.0)]
            good = {"at": 3.0, "process": f"{each} 0", "kind": each, "told": of, "last": True}
            text = "".join(f"{json.dumps(line)}\n" for line in [*record, good])
            (tmp_path / f"{each}.0.record.jsonl").write_text(text)
        assert cli.main(["report", str(tmp_path)]) == 0, (place, capsys.readouterr().err)
        assert cli.main(["doctor", str(tmp_path)]) == 0, (place, capsys.readouterr().err)


def test_a_job_leaves_records(tmp_path: Path) -> None:
    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        optimizer.minimize(model.loss(0))

    run_job(body, 2, environ={**BEATING, "FLEET_RECORD_DIR": str(tmp_path / "records")})
    view = view_of(0.0, newest(tmp_path / "records"))
    assert {worker: seen.figures["steps"] for worker, seen in view.workers.items()} == {0: 1, 1: 1}
    assert view.is_over
    assert view.servers["server 0"].figures["version"] == 1


def test_a_record_that_cannot_be_written_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = iter([OSError("the disk is full")])

    def read() -> dict[str, float]:
        raise next(told)

    observer = Observer(
        "worker 0", "worker", read, ProcessSettings(observing=ObservingSettings(record_dir=str(tmp_path)))
    )
    observer.close()
    assert "no longer recorded: the disk is full" in caplog.text


def test_a_directory_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="FLEET_RECORD_DIR"):
        Observer(
            "worker 0",
            "worker",
            dict,
            ProcessSettings(observing=ObservingSettings(record_dir=str(tmp_path / "file" / "in"))),
        )


# The live view of fleetrun


def test_the_view_is_taken_off_before_it_is_drawn_again(tmp_path: Path) -> None:
    record = Record(tmp_path, "worker 0")
    ours, theirs = os.openpty()
    try:
        view = LiveView(theirs, tmp_path, ["worker 0", "worker 1"])
        record.write(0.0, "worker", {"step": 7, "uptime_seconds": 1.0})
        drawn = view.draw(100.0).decode()
        assert "worker 0" in drawn
        assert "starting" in drawn, "worker 1 has told nothing yet"
        assert view.draw(100.5) == b"", "it is there, and new enough"
        assert view.clear() == f"\x1b[{drawn.count(chr(10))}A\r\x1b[J".encode()
        assert view.clear() == b""
        assert "worker 0" in view.draw(100.6).decode()
        view.ended("worker 1", "exit code 3")
        assert "exit code 3" in view.draw(100.7).decode()
    finally:
        record.close()
        os.close(ours)
        os.close(theirs)


def test_the_view_has_tables_whose_rows_lie_in_files_or_leave(tmp_path: Path) -> None:
    record = Record(tmp_path, "server 0")
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    try:
        none = {"on_disk": 0, "in_memory": 1000}
        tables = {"plain": table(**none), "in files": table(9, 3), "with rules": table(**none, pending=5)}
        told = {**status(uptime_seconds=1.0, updates=3), "tables": tables}
        record.write(0.0, "server", told)
        drawn = LiveView(theirs, tmp_path, ["server 0"]).draw(100.0).decode()
        assert "in files" in drawn
        assert "with rules" in drawn
        assert "plain" not in drawn
    finally:
        record.close()
        os.close(ours)
        os.close(theirs)


def on_terminal(command: list[str], directory: Path) -> tuple[int, str]:
    """Run a command on a terminal of its own: its exit code and all it wrote there."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen(command, cwd=directory, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    try:
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # how Linux says that nobody has it open any more
                break
            if not data:
                break
            written += data
        return process.wait(30), written.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_fleetrun_shows_a_table_below_the_lines(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print('hello from', os.environ['PADDLE_TRAINER_ID'])\n")
    command = [sys.executable, "-m", "fleet.launch", "--worker_num", "2", "script.py"]
    code, text = on_terminal(command, tmp_path)
    assert code == 0
    assert "[worker 0] hello from 0" in text
    last = text.rpartition("\x1b[J")[2]
    assert all(word in last for word in ("worker 0", "worker 1", "exit code 0", "steps/s")), "the end stays"
    code, text = on_terminal([*command[:-1], "--view", "plain", "script.py"], tmp_path)
    assert code == 0
    assert "\x1b" not in text


def test_a_view_that_is_asked_for_and_impossible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.fleetrun(["--worker_num", "1", "--view", "live", "--log_dir", str(tmp_path), __file__]) == 2
    assert "--view live is not possible here" in capsys.readouterr().err
    assert cli.fleetrun(["--worker_num", "1", "--metrics_port", "70000", "--log_dir", str(tmp_path), __file__]) == 2
    assert "--metrics_port is not usable" in capsys.readouterr().err


# Prometheus


def page_of(url: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """What a page tells, by name and values of labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return {
        (s.name, tuple(value for _, value in sorted(s.labels.items()))): s.value for f in families for s in f.samples
    }


def test_pages_for_prometheus(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fleet.observing")
    pages: dict[str, dict[tuple[str, tuple[str, ...]], float]] = {}

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        for step in range(3):
            optimizer.minimize(model.loss(step))
        fleet_.report(examples=7, auc=0.5)
        fleet_.barrier_worker()
        if index == 0:
            urls = {
                match[1]: match[2]
                for match in map(re.compile(r"of (.*) for Prometheus: (.*)").search, caplog.messages)
                if match
            }
            pages.update({process: page_of(url) for process, url in urls.items()})
        fleet_.barrier_worker()

    run_job(body, 2, environ={**BEATING, "FLEET_METRICS_PORT": "0"})
    assert set(pages) == {"server 0", "worker 0", "worker 1"}
    worker, server = pages["worker 1"], pages["server 0"]
    assert worker["fleet_worker_steps_total", ("1",)] == 3
    assert worker["fleet_worker_examples_total", ("1",)] == 7
    assert worker["fleet_worker_reported", ("auc", "1")] == 0.5
    assert worker["fleet_worker_loss", ("1",)] > 0
    assert {name for name, _ in worker} == {*names_of("worker", WORKER), "fleet_worker_reported"}
    assert server["fleet_server_version", ("0",)] == 3
    assert server["fleet_server_table_rows", ("0", "closed.weight")] == 30
    assert server["fleet_server_worker_up", ("0", "1")] == 1
    assert {name for name, _ in server} == {*names_of("server", SERVER), *names_of("server", BESIDE_FIGURES)}


BESIDE_FIGURES = {name: figure for name, (_, figure) in BESIDE.items()}


def names_of(kind: str, figures: Mapping[str, Figure]) -> set[str]:
    return {f"fleet_{kind}_{name}{'_total' if figure.counts else ''}" for name, figure in figures.items()}


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parent.parent / "docs" / "observing.md").read_text()
    names = names_of("worker", WORKER) | names_of("server", SERVER) | names_of("server", BESIDE_FIGURES)
    assert sorted(name for name in names if f"`{name}`" not in page) == []
    assert sorted(set(re.findall(r"`(fleet_(?:worker|server)_\w+)`", page)) - names - {"fleet_worker_reported"}) == []


def test_the_dashboard_asks_for_names_that_there_are() -> None:
    dashboard = (Path(__file__).parent.parent / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"fleet_\w+", json.dumps(json.loads(dashboard)["panels"])))
    names = names_of("worker", WORKER) | names_of("server", SERVER) | names_of("server", BESIDE_FIGURES)
    assert len(asked) > 8
    assert sorted(asked - names - {"fleet_worker_reported"}) == []


def observing(**settings: Any) -> ProcessSettings:
    return ProcessSettings(observing=ObservingSettings(**settings))


def test_a_page_shows_itself_to_the_public_only_if_told_to() -> None:
    with pytest.raises(ConfigurationError, match=r"FLEET_METRICS_HOST=0\.0\.0\.0"):
        Observer("worker 0", "worker", dict, observing(metrics_port=0, metrics_host="0.0.0.0"))
    insecure = replace(observing(metrics_port=0, metrics_host="0.0.0.0"), security=SecuritySettings(insecure=True))
    Observer("worker 0", "worker", dict, insecure).close()


def test_a_page_at_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUseError, match="FLEET_METRICS_PORT"):
            Observer("worker 0", "worker", dict, observing(metrics_port=taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("module", "settings", "extra"),
    [
        ("prometheus_client", {"metrics_port": 0}, "prometheus"),
        ("torch.utils.tensorboard", {"tensorboard_dir": "runs"}, "tensorboard"),
    ],
)
def test_what_is_not_installed_is_named(
    module: str, settings: dict[str, Any], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=re.escape(f"torch-fleet[{extra}]")):
        Observer("worker 0", "worker", dict, observing(**settings))


# TensorBoard


def test_scalars_of_two_readings() -> None:
    before = {"uptime_seconds": 1.0, "step": 110, "steps": 10, "examples": 100, "loss": 0.5, "memory_bytes": 5.0}
    now = {
        "uptime_seconds": 3.0,
        "step": 130,
        "steps": 30,
        "examples": 300,
        "loss": 0.25,
        "memory_bytes": 6.0,
        "auc": 0.75,
    }
    assert scalars("worker", before, now) == {
        "loss": 0.25,
        "memory_bytes": 6.0,
        "auc": 0.75,
        "steps_per_second": 10.0,
        "examples_per_second": 100.0,
    }
    served = scalars("server", {**before, "version": 0, "updates": 0}, {**now, "version": 1704, "updates": 4})
    assert served["updates_per_second"] == 2.0
    assert "version_per_second" not in served, "it leaps to where a job goes on from"


def test_scalars_of_a_job(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        for step in range(3):
            optimizer.minimize(model.loss(step))
        fleet_.report(auc=0.5)

    run_job(body, environ={**BEATING, "FLEET_TENSORBOARD_DIR": str(tmp_path)})
    events = EventAccumulator(str(tmp_path / "worker.0")).Reload()
    assert {"fleet/loss", "fleet/auc", "fleet/memory_bytes"} <= set(events.Tags()["scalars"])
    last = events.Scalars("fleet/auc")[-1]
    assert (last.step, last.value) == (3, 0.5)
    assert (tmp_path / "server.0").is_dir()


# fleet doctor


def test_it_tells_what_a_step_waits_for() -> None:
    parts = {"pull_seconds": 0.2, "reduce_seconds": 0.45, "copy_seconds": 0.12, "push_seconds": 0.05}
    before, now = views([{"spends": parts}, {"spends": parts}])
    first, *rest = diagnose(before, now)
    assert first.endswith("A step: all-reduce 45%, rows 20%, computing 18%, copies 12%, gradients 5%.")
    assert any("45% goes into averaging dense gradients" in each for each in rest)
    assert any("12% goes into copies between the host and its device" in each for each in rest)
    assert rows(before, now)[0].note == "all-reduce 45%, rows 20%, computing 18%, copies 12%, gradients 5%"
    plain = views([{"spends": {"pull_seconds": 0.2}}])
    assert "A step" not in diagnose(*plain)[0], "as ever"
    assert rows(*plain)[0].note == ""
    told = {"uptime_seconds": 10.0, "pull_seconds": 2.0, "reduce_seconds": 1.0, "copy_seconds": 0.0}
    assert time_in_words([told, told]) == "computing 70%, rows 20%, all-reduce 10%"
    assert time_in_words([]) == time_in_words([{"uptime_seconds": 3.0, "pull_seconds": 1.0}]) == ""


def views(
    workers: list[dict[str, Any]], busy: tuple[float, ...] = (0.1,), phase: str = "training", errand: str = ""
) -> tuple[View, View]:
    """Two views ten seconds apart, of workers that spend parts of each second as told, and servers that are so busy."""

    def view(at: float) -> View:
        def worker(of: dict[str, Any]) -> dict[str, Any]:
            figures: dict[str, float] = {
                "push_seconds": 0,
                "pull_seconds": 0,
                "meet_seconds": 0,
                "steps": 10,
                "cpu_seconds": 1,
                "lockstep": 0,
            }
            figures |= of.get("spends", {})
            grown = {name: each * at for name, each in figures.items()} | {"uptime_seconds": at} | of.get("says", {})
            waited = {other: share * at for other, share in of.get("waits_for", {}).items()}
            stale = [of.get("stale", 0) * 10 * at, 10 * at]
            return told(figures=grown, waited=waited, staleness=stale, **of.get("is", {}))

        servers = {
            f"server {index}": {
                **status(*map(worker, workers), uptime_seconds=at, busy_seconds=share * at),
                "phase": phase,
                "errand": errand,
            }
            for index, share in enumerate(busy)
        }
        own = {} if busy else {index: (worker(of)["figures"], 0.0) for index, of in enumerate(workers)}
        return seen(at, {**servers}, own)

    return view(10.0), view(20.0)


def test_the_doctor_says_that_memory_is_too_small_for_a_table() -> None:
    text = " ".join(diagnose(holding(10.0, table(1000, 0)), holding(20.0, table(2000, 430))))
    assert "'t' has 200 of its 1,000 rows in memory, and 43% of the 10 it is asked for a step" in text
    assert "FLEET_TABLE_MEMORY_MB" in text


@pytest.mark.parametrize("read", [0, 100])
def test_the_doctor_does_not_mind_a_few_rows_that_are_read(read: int) -> None:
    text = " ".join(diagnose(holding(10.0, table(1000, 900)), holding(20.0, table(2000, 900 + read))))
    assert "FLEET_TABLE_MEMORY_MB" not in text, "what was read before does not count"


@pytest.mark.parametrize(
    ("asked_s", "hot", "says"),
    [
        ((100.0, 300.0), [], "it is asked for 300 rows a second. Larger batches"),
        ((100.0, 300.0), [["t", 7, 0.98]], "it is asked for 300 rows a second, and in most requests for t 7 (98%)."),
        ((200.0, 300.0), [["t", 7, 0.98]], "what it holds is asked for more than the rest. Another split_method"),
        (None, [], "what it holds is asked for more than the rest. Another split_method"),
    ],
)
def test_the_doctor_says_what_a_busy_server_is_asked_for(
    asked_s: tuple[float, float] | None, hot: list[Any], says: str
) -> None:
    def view(at: float) -> View:
        told = {}
        for index, busy in enumerate((0.2, 0.9)):
            rows_asked = {} if asked_s is None else {"asked_rows": asked_s[index] * at}
            told[f"server {index}"] = {**status(uptime_seconds=at, busy_seconds=busy * at, **rows_asked), "hot": hot}
        return seen(at, told, {})

    text = " ".join(diagnose(view(10.0), view(20.0)))
    assert "Server 1 is busy 90% of the time and the others 20% at most: " in text
    assert says in text


SLOW = {"waits_for": {}, "spends": {"push_seconds": 0.1, "cpu_seconds": 0.9}}
HELD = {"waits_for": {"1": 0.5}, "spends": {"push_seconds": 0.6, "cpu_seconds": 0.4}}


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        (views([HELD, SLOW]), ["Worker 1 (host:1) holds", "they wait 50%", "90 ms, and the others 40 ms"]),
        (
            views([{"waits_for": {"1": 0.2}}, {"waits_for": {"0": 0.2}}]),
            ["wait 20% of their time for each other", "a mode that does not wait"],
        ),
        (views([{}], busy=(0.95, 0.9)), ["Server 0 is busy 95% of the time: more servers"]),
        (views([{}], busy=(0.2, 0.9)), ["Server 1 is busy 90% of the time and the others 20% at most"]),
        (
            views([{"spends": {"push_seconds": 0.2, "pull_seconds": 0.5, "sent_bytes": 1e6, "received_bytes": 4e6}}]),
            ["(host:1), 70% goes into exchanges (push 20%, pull 50%)", "5 MB a second (500 kB a step): fleet.prefetch"],
        ),
        (
            views([{"spends": {"push_seconds": 0.1, "pull_seconds": 0.9, "received_bytes": 4e6}}]),
            ["4 MB a second (400 kB a step): larger batches"],
        ),
        (
            views([{"spends": {"push_seconds": 0.6, "sent_bytes": 4e3}}]),
            ["It moves little (0.4 kB a step)", "larger batches need fewer"],
        ),
        (
            views([{"spends": {"push_seconds": 0.3, "pull_seconds": 0.3}, "says": {"round_trip_seconds": 0.02}}]),
            ["A request takes 20 ms there and back, and a step waits for about 3 such ways: fleet.prefetch has rows"],
        ),
        (
            views([{"spends": {"push_seconds": 0.6, "sent_bytes": 4e6}, "says": {"round_trip_seconds": 0.03}}]),
            ["waits for about 2 such ways: the asynchronous mode with fleet.prefetch waits for no answer"],
        ),
        (
            views([{"spends": {"push_seconds": 0.9, "sent_bytes": 4e6, "cpu_seconds": 0.2}}], busy=(0.1,)),
            ["400 kB a step): larger batches", "The network carries 32 Mbit/s of it", "wire_dtype='bf16'"],
        ),
        (views([{"spends": {"cpu_seconds": 0.05}}]), ["100% is spent in the script's own code, with 5% of"]),
        (
            views([{"spends": {"cpu_seconds": 0.4, "delay_seconds": 0.58}}]),
            ["For 58% of the time the training of worker 0 (host:1) is ready to run and has no processor"],
        ),
        (views([{"stale": 9}]), ["is 9 updates old", "1 worker"]),
        (views([{}]), ["own code (data, forward, backward) 100% of the time, and the servers busy 10%: more"]),
        (views([{"spends": {"push_seconds": 0.3}}]), ["Nothing stands out."]),
        (views([{"says": {"auc": math.nan}}]), ["The auc of worker 0 (host:1) is nan: so its script says."]),
        (views([{"says": {"loss": math.nan}}]), ["The loss of worker 0 (host:1) is nan", "FLEET_CHECK_FINITE=1"]),
        (views([{}, {"is": {"standing": "expected"}}]), ["waits for a first hello of worker 1 (host:1)."]),
        (views([{}, {"is": {"standing": "lost"}}]), ["given up on worker 1 (host:1);"]),
        (views([{}, {"is": {"heard_seconds": 42.0}}]), ["Nothing has been heard of worker 1 (host:1) for 42 s"]),
        (
            views([{"is": {"waits": {"what": "barrier 3", "seconds": 75.2, "for": [1, 2]}}}]),
            ["Worker 0 (host:1): for 75 s waiting for workers 1 and 2 (barrier 3)"],
        ),
        (views([], phase="waiting for the first worker"), ["Server 0 is not training: waiting for the first worker"]),
        ((View(0.0), seen(1.0, {"server 1": "does not answer"}, {})), ["Server 1 does not answer"]),
        (views([{}], errand="writing its share"), ["Server 0 is writing its share."]),
        (views([], phase="waiting for the first worker"), ["0 workers and 1 server: how fast is not known."]),
        (
            views([{"spends": {"push_seconds": 1.0, "steps": 0}, "waits_for": {"1": 1.0}}, {"spends": {"steps": 0}}]),
            ["Worker 1 (host:1) holds the others back: they wait 100%", "not come to the end of a step."],
        ),
        (
            views([{"spends": {"push_seconds": 1.0, "steps": 0}}]),
            ["100% goes into exchanges", "No step came to its end in that time."],
        ),
        (
            views([{"spends": {"push_seconds": 0.6, "sent_bytes": 4e6}}], busy=()),
            ["60% goes into exchanging gradients, waits for each other among it (400 kB a step)"],
        ),
        (views([{}], busy=()), ["100% of the time: more or faster workers make the job faster."]),
    ],
)  # fmt: skip
def test_what_the_doctor_says(given: tuple[View, View], sentences: list[str]) -> None:
    text = " ".join(diagnose(*given))
    assert [sentence for sentence in sentences if sentence not in text] == [], text


@pytest.mark.parametrize(
    ("given", "not_said"),
    [
        (views([{"spends": {"cpu_seconds": 0.05}}]), "more or faster workers"),
        (views([{"spends": {"cpu_seconds": 0.1, "delay_seconds": 0.9}}]), "does not see"),
        (views([{"waits_for": {"1": 0.2}}, {"waits_for": {"0": 0.2}}], busy=(0.95,)), "a mode that does not wait"),
    ],
)
def test_the_doctor_does_not_take_one_cause_for_another(given: tuple[View, View], not_said: str) -> None:
    assert not_said not in " ".join(diagnose(*given))


@pytest.mark.parametrize(
    ("count", "named"), [(2, "of workers 0 and 1,"), (4, "of workers 0, 1, 2 and 3,"), (20, "of all 20 workers,")]
)
def test_what_holds_for_many_workers_is_said_once(count: int, named: str) -> None:
    sentences = diagnose(*views([{"spends": {"push_seconds": 0.6}}] * count))
    assert [named in sentence for sentence in sentences] == [False, True]


def test_the_doctor_of_a_job_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [Record(tmp_path, f"worker {index}") for index in range(2)]
    for second in range(10):
        for record in records:
            steps = 0 if second == 0 else 10 * second
            times = {"push_seconds": 0.2 * second, "pull_seconds": 0.0, "meet_seconds": 0.0, "cpu_seconds": second}
            counted = {"steps": steps, "lockstep": 1, "examples": 64 * steps}
            record.write(1000.0 + second, "worker", {"uptime_seconds": float(second), **counted, **times})
    for record in records:
        record.close()
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("2 workers and 0 servers: 10 steps a second, 1,280 examples a second.")


def test_a_job_that_has_just_ended_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody has to wait until its records are old, with servers or without."""

    def body(fleet_: Fleet, index: int) -> None:
        model, optimizer = join(fleet_)
        train(model, optimizer, range(3))
        fleet_.save_persistables(tmp_path / "checkpoint")

    run_job(body, workers=2, servers=2, environ={**BEATING, "FLEET_RECORD_DIR": str(tmp_path)})
    assert {line.process: line.is_last for line in newest(tmp_path)} == dict.fromkeys(
        ("server 0", "server 1", "worker 0", "worker 1"), True
    )
    assert cli.main(["doctor", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("2 workers and 2 servers, mode sync: ")
    assert "not training" not in told
    for process in ("server 0", "server 1"):
        (tmp_path / f"{process.replace(' ', '.')}.record.jsonl").unlink()
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("2 workers and 0 servers: ")
    assert cli.main(["top", str(tmp_path), "--interval", "0.1"]) == 0, "it ends"
    assert "The job is over." in capsys.readouterr().out


def test_what_was_broken_at_the_end_is_told_of_the_end() -> None:
    """How the training went and how the job ended are two views; what passed in between, a checkpoint, is neither."""
    before, now = views([{}, {}], errand="writing its share")
    ended = seen(30.0, {"server 0": {**status(told(standing="left"), told(standing="left")), "phase": "over"}}, {})
    assert not [each for each in diagnose(before, now, ended) if "erver 0 is" in each]
    waits = {"what": "barrier 3", "seconds": 75.2, "for": [1]}
    killed = seen(30.0, {"server 0": status(told(waits=waits), told())}, {})
    assert (
        "At the end of the record: Worker 0 (host:1): for 75 s waiting for worker 1" in diagnose(before, now, killed)[1]
    )
    failed = seen(30.0, {"server 0": {**status(told()), "phase": "failed: no disk"}}, {})
    assert diagnose(before, now, failed)[1] == "At the end of the record: Server 0 is not training: failed: no disk."


def test_who_ended_the_job_comes_first_and_what_follows_from_it_is_left_out() -> None:
    failed = seen(30.0, {"server 0": {**status(told(heard_seconds=42.0)), "phase": "failed: worker 1 failed"}}, {})
    before, now = views([{}, {}])
    assert len(diagnose(before, now, failed)) > 2
    first, overview, *others = diagnose(before, now, failed, Cause("worker 1", "ValueError: boom"))
    assert first == "Worker 1 ended the job: ValueError: boom."
    assert overview.startswith("2 workers and 1 server")
    assert not [each for each in others if "failed" in each or "heard" in each]
    first, *others = diagnose(before, now, failed, Cause("fleetrun", "SIGINT (Ctrl-C)"))
    assert first == "The job was ended by SIGINT (Ctrl-C)."
    assert not [each for each in others if "failed" in each]


def test_the_doctor_says_who_ended_the_job_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No process has told that it left, and no record is old."""
    claim(str(tmp_path), "j", "worker 9", "an earlier job's")
    with (
        Chronicle(tmp_path, ["server 0"], is_whole=True) as chronicle,
        contextlib.closing(Record(tmp_path, "server 0")) as record,
    ):
        chronicle.write("server 0", "started")
        record.write(time.time(), "server", status(told()))
        assert Recorded(tmp_path).whole() is None
        claim(str(tmp_path), "j", "worker 1", "ValueError: boom")
        assert cli.main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("Worker 1 ended the job: ValueError: boom.\n1 worker and 1 server")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "Worker 1 ended the job: ValueError: boom." in (tmp_path / "report.html").read_text()
    (tmp_path / "cause.json").unlink()
    assert Recorded(tmp_path).whole() is not None, "the launcher has seen the end of a job that went well"


def test_a_server_tells_of_a_traceback_the_last_line() -> None:
    traceback = "Traceback (most recent call last):\n  File x, line 1\nValueError: boom\n"
    assert in_brief(f"worker 1 failed; got {traceback}") == "worker 1 failed; got ValueError: boom"
    assert (
        in_brief("Traceback (most recent call last): of one line") == "Traceback (most recent call last): of one line"
    )
    assert in_brief("\n") == ""


def test_a_job_that_is_over_is_seen_while_all_of_it_trained(tmp_path: Path) -> None:
    server, worker = Record(tmp_path, "server 0"), Record(tmp_path, "worker 0")
    for second in range(5):
        over = {"phase": "over", "workers": [told(standing="left")]} if second == 4 else {}
        server.write(1000.0 + second, "server", {**status(told()), **over})
        worker.write(1000.0 + second, "worker", {"steps": 10 * second, "uptime_seconds": float(second)})
    server.close()
    worker.close()
    began, ended, last = training_of(read_records(tmp_path))
    assert (began.at, ended.at, last.at) == (1001.0, 1003.0, 1004.0)
    assert ended.workers[0].standing == "live", "the last line of a worker is of its leaving"


def test_the_doctor_looks_at_a_running_job(
    served: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEET_AUTH_TOKEN", "sesame")
    until_it_trains(served, capsys)

    def looks() -> str:
        assert cli.main(["doctor", served, "--seconds", "1"]) == 0
        return capsys.readouterr().out

    # On a busy machine no heartbeat may come through within a second.
    until(lambda: re.match(r"1 worker and 1 server, mode sync: \S+ steps a second\.", looks()))
    assert cli.main(["doctor", served, "--seconds", "0"]) == 2


def test_a_job_alone_whose_page_cannot_be_shown_fails_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        fleet_ = Fleet(environ={"FLEET_METRICS_PORT": str(taken.getsockname()[1])})
        fleet_.init()
        with pytest.raises(PortInUseError):
            join(fleet_)
    assert [thread.name for thread in threading.enumerate() if thread.name == "fleet-server"] == []
