"""examples/online.py: its stream, its predictor, and all of it together, with its page in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import test_processes
import torch
from harness import until
from patience import PROCESSES_S
from test_processes import ROOT, Processes
from test_report import CHROMIUM

sys.path.insert(0, str(ROOT / "examples" / "online"))

import serve
import stream
import train
import visitors

processes = test_processes.processes  # the fixture

EXAMPLE = str(ROOT / "examples" / "online.py")
REDIS = shutil.which("redis-server")


def all_of(reader: Iterator[list[str]]) -> list[str]:
    return [line for lines in reader for line in lines]


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--redis", "localhost:6379", "begins with one of redis://.* not 'localhost:6379'"),
        ("--seconds", "-5", "a number above zero, and not -5"),
        ("--port", "99999", r"cannot be at port 99999: .*[^.]\. Choose another"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    option: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no address of Redis was the name of a file, in the working directory."""
    monkeypatch.setattr(sys, "argv", [EXAMPLE, option, value])
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(EXAMPLE, run_name="__main__")
    assert re.search(told, f"{caught.value.code} {capsys.readouterr().err}")


def test_readers_of_a_file_have_each_line_once_as_it_comes(tmp_path: Path) -> None:
    clicks = stream.FileStream(str(tmp_path / "clicks"))
    readers = [clicks.read("training", part, 2) for part in range(2)]
    assert [next(each) for each in readers] == [[], []]
    clicks.add([f"{n} 0 0.5 1" for n in range(5)])
    assert [next(each) for each in readers] == [["0 0 0.5 1", "2 0 0.5 1", "4 0 0.5 1"], ["1 0 0.5 1", "3 0 0.5 1"]]
    with open(tmp_path / "clicks", "a") as file:
        file.write("5 0 0.5")  # by a writer that is not through yet
    assert [next(each) for each in readers] == [[], []]
    with open(tmp_path / "clicks", "a") as file:
        file.write(" 1\n")
    clicks.add([f"{n} 0 0.5 1" for n in range(6, 1000)])
    clicks.end()
    parts = [all_of(each) for each in readers]
    assert [int(line.split()[0]) for line in parts[1]] == [*range(5, 1000, 2)]
    assert len(parts[0]) == 497


def test_auc_is_that_of_scikit_learn() -> None:
    import sklearn.metrics  # which takes two seconds, of every process that collects tests

    draw = torch.Generator().manual_seed(0)
    score = torch.randint(0, 20, (500,), generator=draw) / 20  # many are the same
    clicked = (torch.rand(500, generator=draw) < score).float()
    assert serve.auc(score, clicked) == pytest.approx(sklearn.metrics.roc_auc_score(clicked, score))
    assert serve.auc(score, torch.zeros(500)) == 0.5


@pytest.fixture
def predictor(tmp_path: Path) -> Iterator[serve.Server]:
    """A predictor whose model nobody trains."""
    server = serve.Server(str(tmp_path / "clicks"), 0)
    server.model = train.ClickModel()
    server.follower = SimpleNamespace(pinned=contextlib.nullcontext, version=7, age_s=0.5)
    server.predict = lambda user, item: {"score": [0.5] * len(user + item[:0]), "version": 7}
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def asked(server: serve.Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    with contextlib.closing(http.client.HTTPConnection(*server.server_address, timeout=20)) as line:
        line.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
        answer = line.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if "json" in answer.headers["Content-Type"] else content


def test_a_predictor_answers(predictor: serve.Server) -> None:
    assert asked(predictor, "POST", "/predict", {"user": [1, 2], "item": [3, -4]}) == (
        200,
        {"score": [0.5, 0.5], "version": 7},
    )
    status, page = asked(predictor, "GET", "/")
    assert (status, page) == (200, serve.PAGE)
    assert asked(predictor, "GET", "/state")[1]["age_s"] == 0.5
    assert asked(predictor, "GET", "/etc/passwd") == (404, {"error": "there is nothing at /etc/passwd"})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "JSONDecodeError"),
        ({"user": [1]}, "KeyError"),
        ([1], "TypeError"),
        ({"user": [1, 2], "item": [3]}, "2 users, and 1 items"),
        ({"user": ["1"], "item": [3]}, "a list of up to 1000 ids"),
        ({"user": [True], "item": [3]}, "a list of up to 1000 ids"),
        ({"user": [1.0], "item": [3]}, "a list of up to 1000 ids"),
        ({"user": [1] * 1001, "item": [1] * 1001}, "a list of up to 1000 ids"),
        ({"user": [1 << 63], "item": [3]}, "an id has 64 bits"),
        (b" " * (1 << 17), "up to 65536 bytes"),
        (None, "up to 65536 bytes"),
    ],
    ids=range(11),
)
def test_what_a_predictor_is_asked_is_checked(predictor: serve.Server, body: Any, why: str) -> None:
    headers = {"Content-Length": "-1"} if body is None else {}
    status, told = asked(predictor, "POST", "/predict", body, **headers)
    assert status == 400
    assert why in told["error"]
    assert asked(predictor, "GET", "/state")[0] == 200, "and it goes on"


def test_visitors_come_for_so_long_from_the_first_answer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A predictor listens before its model is there, and the first of them waits for it longer than all come."""
    came: list[str] = []
    now = [5.0]

    def visit(shop: http.client.HTTPConnection, now_s: float, draw: Any) -> list[str]:
        now[0] += 0 if came else 100
        return ["1 2 0.5 1"]

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(visitors, "time", clock)
    monkeypatch.setattr(visitors, "visit", visit)
    monkeypatch.setattr(visitors, "stream_at", lambda place: SimpleNamespace(add=came.extend, end=lambda: None))
    visitors.main("clicks", 1, seconds=10 * visitors.EVERY_S)
    assert 10 <= len(came) <= 11


def test_fashion_changes_who_clicks() -> None:
    first, later = (visitors.chance(1, 0, now) for now in (visitors.PERIOD_S / 4, 3 * visitors.PERIOD_S / 4))
    assert first > 0.5 > later


def _takes_connections(place: str) -> bool:
    """Say whether a server listens at a socket, whose file is there a moment before."""
    with socket.socket(socket.AF_UNIX) as line:
        return not line.connect_ex(place)


@pytest.fixture
def redis_at(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("redis", reason="the client of Redis comes with the extra 'test'")
    place = str(tmp_path / "socket")
    command = [str(REDIS), "--port", "0", "--unixsocket", place, "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            until(lambda: _takes_connections(place))
            yield f"unix://{place}"
        finally:
            server.terminate()


@pytest.mark.redis
@pytest.mark.skipif(REDIS is None, reason="there is no redis-server here")
def test_what_a_reader_of_redis_was_at_when_it_was_killed_is_read_again(redis_at: str) -> None:
    clicks = stream.stream_at(f"{redis_at}#some")
    clicks.add([f"{n} 0 0.5 1" for n in range(600)])
    first, other = clicks.read("training", 0), clicks.read("training", 1)
    assert (next(first), next(other)) == ([], []), "nothing was left unread"
    had, lost = next(first), next(other)
    assert (len(had), len(lost)) == (256, 256)
    other.close()  # it asked for no more, so these do not count as done
    again = clicks.read("training", 1)
    assert next(again) == lost
    rest = [next(again), next(again), next(first), next(first)]
    clicks.end()
    assert sorted(map(len, rest)) == [0, 0, 0, 88]
    assert all_of(again) == all_of(first) == []
    assert len(all_of(clicks.read("page"))) == 600, "another group has all of it"


@pytest.mark.redis
@pytest.mark.skipif(REDIS is None, reason="there is no redis-server here")
@pytest.mark.timeout(2 * PROCESSES_S)
def test_all_of_it_with_redis(redis_at: str, processes: Processes, tmp_path: Path) -> None:
    check_whole_run(processes, tmp_path, "--redis", redis_at)


@pytest.mark.slow
@pytest.mark.timeout(2 * PROCESSES_S)
def test_all_of_it(processes: Processes, tmp_path: Path) -> None:
    check_whole_run(processes, tmp_path)


def check_whole_run(processes: Processes, folder: Path, *options: str) -> None:
    """Predictions become good and stay fresh, and Ctrl-C leaves nothing behind."""
    running = processes.start(EXAMPLE, "--port", "0", *options, cwd=folder)
    state = seen_state(page_of(running), has_learnt)
    assert state["version"] > 0
    assert min(state["age"]) < 2
    assert state["auc"][-1] > state["auc"][0] + 0.2, "it has learnt from the stream"
    here = [part for part in psutil.process_iter(["cwd", "name"]) if part.info["cwd"] == str(folder)]
    parts = [part for part in here if "redis" not in part.info["name"]]
    assert len(parts) >= 15, "predictor, visitors, fleetrun, two servers and two workers, twice each, and itself"
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PROCESSES_S)
    assert running.returncode == 0
    (logs,) = (folder / "logs").iterdir()
    assert (logs / "worker.1.log").exists(), "what the job's processes said outlasts them"
    until(lambda: not any(part.is_running() for part in parts))  # what stands for a process ends after it


@pytest.mark.slow
@pytest.mark.timeout(2 * PROCESSES_S)
def test_sigterm_ends_all_of_it_as_a_ctrl_c_does(processes: Processes, tmp_path: Path) -> None:
    """It left the predictor, the visitors and the job behind."""
    running = processes.start(EXAMPLE, "--port", "0", cwd=tmp_path)
    page_of(running)
    parts = [part for part in psutil.process_iter(["cwd"]) if part.info["cwd"] == str(tmp_path)]
    assert len(parts) >= 4
    running.send_signal(signal.SIGTERM)
    out, _ = running.communicate(timeout=PROCESSES_S)
    assert (running.returncode, out) == (0, "ended\n")
    until(lambda: not any(part.is_running() for part in parts))


def page_of(running: Any) -> str:
    found = re.search(r"http://([\d.]+:\d+)", running.stdout.readline())
    assert found is not None
    return found[1]


def has_learnt(state: dict[str, Any]) -> bool:
    return len(state["auc"]) > 4 and state["auc"][-1] > 0.8


def seen_state(address: str, enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + PROCESSES_S
    while True:
        assert time.monotonic() < deadline, "it does not get so far"
        with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection(host, int(port), 5)) as line:
            line.request("GET", "/state")
            state: dict[str, Any] = json.loads(line.getresponse().read())
            if enough(state):
                return state
        time.sleep(0.2)


def test_a_port_that_is_taken_is_named(predictor: serve.Server) -> None:
    port = predictor.server_address[1]
    done = subprocess.run([sys.executable, EXAMPLE, "--port", str(port)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"the page cannot be at port {port}" in done.stderr
    assert "Choose another with --port." in done.stderr


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_the_page(scheme: str, processes: Processes, tmp_path: Path) -> None:
    running = processes.start(EXAMPLE, "--port", "0", cwd=tmp_path)
    address = page_of(running)
    seen_state(address, has_learnt)
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,900", "--virtual-time-budget=4000"),
        *(["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []),
        *(f"--screenshot={tmp_path / 'picture.png'}", "--dump-dom", f"http://{address}/"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PROCESSES_S)
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line and "favicon" not in line] == []
    shown = {name: re.search(rf'id="{name}">([^<]*)<', done.stdout) for name in ("auc", "age", "version", "clicks")}
    assert 0.7 < float(shown["auc"][1]) < 1, "as the page draws it"
    assert float(shown["age"][1].removesuffix(" s")) < 5
    assert int(shown["version"][1].replace(",", "")) > 0
    curves = re.findall(r'<polyline points="([\d., ]+)"', done.stdout)
    assert len(curves) == 2
    heights = [float(point.partition(",")[2]) for point in curves[0].split()]
    assert heights[-1] < heights[0], "the AUC has risen"
    assert (tmp_path / "picture.png").stat().st_size > 10_000
