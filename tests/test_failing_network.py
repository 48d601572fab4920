"""Two machines, as network namespaces, and between them a network that can be made to swallow everything in silence, or
to lose, delay, repeat, damage and mix up what it carries."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import network_namespaces
import pytest
from harness import run_job, until
from patience import PROCESSES_S
from prepared import Prepared
from scripts import exact

SCRIPTS = Path(__file__).parent / "scripts"

SERVER, WORKER = "10.213.0.1", "10.213.0.2"
ENDPOINT = f"{SERVER}:6174"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


class Machines:
    """A server's and a worker's, on one bridge."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self.deadline_s = 4.0  #: of silence; short enough to wait for it
        self.variables: dict[str, str] = {}  #: of all processes, beside those that they need
        self._names = [f"fleet-{os.getpid()}-{what}" for what in ("bridge", "server", "worker")]
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Machines:
        bridge, *machines = self._names
        for name in self._names:
            ip("netns", "add", name)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(machines, (SERVER, WORKER), strict=True)):
            ip("-n", bridge, "link", "add", f"port{number}", "type", "veth", "peer", "name", "net", "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "net")
            for where, link in ((bridge, f"port{number}"), (name, "net"), (name, "lo")):
                ip("-n", where, "link", "set", link, "up")
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        for name in self._names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)

    def cut(self) -> None:
        """Whatever is sent from now on vanishes; both ends are still up, and hear of nothing."""
        ip("-n", self._names[0], "link", "set", "port1", "nomaster")

    def heal(self) -> None:
        for port in ("port0", "port1"):
            ip("-n", self._names[0], "link", "set", port, "master", "bridge")

    def treat_badly(self, **faults: float) -> subprocess.Popen[str]:
        """Have a bad switch instead of the bridge, with faults as it knows them."""
        bridge, *machines = self._names
        for name in machines:
            code, _, err = ended(self._run(name, "plain_frames.py", "net"))
            assert code == 0, err
        for port in ("port0", "port1"):
            ip("-n", bridge, "link", "set", port, "nomaster")
        switch = self._run(bridge, "bad_switch.py", "port0", "port1", json.dumps(faults))
        line(switch, "forwards")
        return switch

    def server(self, *script: str, workers: int = 1) -> subprocess.Popen[str]:
        return self._start(1, script, workers, TRAINING_ROLE="PSERVER", PADDLE_CURRENT_ENDPOINT=ENDPOINT)

    def worker(self, *script: str, index: int = 0, workers: int = 1) -> subprocess.Popen[str]:
        return self._start(2, script, workers, TRAINING_ROLE="TRAINER", PADDLE_TRAINER_ID=str(index))

    def no_worker_is_left(self) -> bool:
        found = subprocess.run(["ip", "netns", "pids", self._names[2]], check=True, capture_output=True, timeout=30)
        return not found.stdout

    def _start(self, machine: int, script: tuple[str, ...], workers: int, **variables: str) -> subprocess.Popen[str]:
        return self._run(
            self._names[machine],
            *script,
            OMP_NUM_THREADS="1",
            PADDLE_PSERVERS_IP_PORT_LIST=ENDPOINT,
            PADDLE_TRAINERS_NUM=str(workers),
            FLAGS_rpc_deadline=str(int(1000 * self.deadline_s)),
            FLEET_HEARTBEAT_S="0.2",
            **self.variables,
            **variables,
        )

    def _run(self, namespace: str, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, str(self._python), str(SCRIPTS / script), *arguments],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process


@pytest.fixture
def machines(prepared: Prepared) -> Iterator[Machines]:
    try:
        with Machines(prepared.commands(bare=True) / "python") as made:
            yield made
    except FileNotFoundError:
        pytest.skip("iproute2 is not installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this needs network namespaces: {error.stderr.strip()}")


def line(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        if text == f"{wanted}\n":
            return
    pytest.fail(f"it ended before {wanted!r}: {process.communicate()[1]}")


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PROCESSES_S)
    return process.returncode, out, err


@pytest.mark.slow
def test_a_network_that_swallows_everything(machines: Machines) -> None:
    """A job outlives it for less than the deadline; for longer, both ends say whom they miss."""
    server, worker = machines.server("train.py"), machines.worker("train.py", "again")
    line(worker, "step 3")
    machines.cut()
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(machines.deadline_s / 4)
    machines.heal()
    line(worker, "step 8")
    machines.cut()
    code, _, err = ended(worker)
    assert code == 1
    assert re.search(rf"DeadlineError: the server at {re.escape(ENDPOINT)} is silent", err)
    code, _, err = ended(server)
    assert code == 0, err
    assert re.search(r"worker 0 was silent for [\d.]+ s and is given up on", err)


@pytest.mark.slow
def test_a_connection_of_which_only_one_end_is_left(machines: Machines) -> None:
    """A worker's machine dies without a word: the server still holds its connections when the next worker comes."""
    machines.deadline_s = 60.0
    server, worker = machines.server("train.py"), machines.worker("train.py", "again")
    line(worker, "step 3")
    machines.cut()
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    until(machines.no_worker_is_left)
    machines.heal()
    worker = machines.worker("train.py", "again")
    code, out, err = ended(worker)
    assert code == 0, err
    assert out.endswith(f"weight {-sum(range(1, 41))}.0 row -14.0\n")
    code, _, err = ended(server)
    assert code == 0, err
    assert "worker 0 has started again" in err


@pytest.mark.netns
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_network_that_loses_delays_repeats_and_damages(machines: Machines, mode: str) -> None:
    """What arrives nevertheless is what was sent, once: to the bit what there is on a network without faults."""
    machines.deadline_s = PROCESSES_S
    expected = run_job(lambda made, index: exact.train(made, mode), 2, 1)
    switch = machines.treat_badly(loss=0.01, duplicate=0.01, corrupt=0.01, delay_s=0.02)
    server = machines.server("exact.py", mode, workers=2)
    workers = [machines.worker("exact.py", mode, index=index, workers=2) for index in range(2)]
    for worker, digest in zip(workers, expected, strict=True):
        assert ended(worker) == (0, f"{digest}\n", "")
    code, _, err = ended(server)
    assert code == 0, err
    switch.terminate()
    told = json.loads(ended(switch)[1])
    assert told["frames"] > 1000, told
    assert all(told[what] > 0 for what in ("lost", "duplicate", "corrupt", "overtaken")), told


@pytest.mark.netns
@pytest.mark.parametrize("direct", ["0", "off"])
def test_a_firewall_that_forgets_the_connections_there_are(machines: Machines, direct: str) -> None:
    """Nobody is told that they are gone, but new ones come about: what was under way is sent again over those."""
    machines.deadline_s, machines.variables = 180.0, {"FLEET_DIRECT_PORT": direct}
    switch = machines.treat_badly()
    server, worker = machines.server("train.py"), machines.worker("train.py", "again")
    line(worker, "step 3")
    switch.send_signal(signal.SIGUSR1)
    code, out, err = ended(worker)
    assert code == 0, err
    assert out.endswith(f"weight {-sum(range(1, 41))}.0 row -14.0\n")
    code, _, err = ended(server)
    assert code == 0, err
    switch.terminate()
    assert json.loads(ended(switch)[1])["forgotten"] > 0


#: One that answers when all of so many bytes are there, and one that sends them and tells how long that took.
ANSWERS = """
import socket
with socket.create_server(("10.213.7.1", 6174)) as listener:
    print("listens", flush=True)
    with listener.accept()[0] as line:
        assert len(line.recv(100_000, socket.MSG_WAITALL)) == 100_000
        line.sendall(b"!")
"""
ASKS = """
import socket, time
began = time.monotonic()
with socket.create_connection(("10.213.7.1", 6174)) as line:
    line.sendall(bytes(100_000))
    assert line.recv(1) == b"!"
print(time.monotonic() - began)
"""


@pytest.mark.netns
def test_a_cable_is_as_long_and_as_narrow_as_it_is_said_to_be() -> None:
    """Benchmarks go by it."""
    with network_namespaces.Machines() as machines:
        near, far = machines.machine("near"), machines.machine("far")
        machines.join("lan", {near: "10.213.7.1/24", far: "10.213.7.2/24"}, latency_s=0.02, bits_per_s=4e6)
        line(near.start(sys.executable, "-c", ANSWERS), "listens")
        took_s, _ = far.start(sys.executable, "-c", ASKS).communicate(timeout=PROCESSES_S)
        assert float(took_s) >= 4 * 0.02 + 8 * 100_000 / 4e6, "a round trip to connect, one to send, and the bytes"
