"""Machines of a test, made of this one: network namespaces with addresses, names and cables of their own.

Nothing of it shows outside: cables run between namespaces, the switches too have one, and all goes with ``close``.
It takes Linux, root and iproute2; ``missing()`` says what there is not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_SCRIPTS = Path(__file__).parent / "scripts"
_numbers = itertools.count()


@functools.cache
def missing() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    for command in ("ip", "unshare", "hostname"):
        if shutil.which(command) is None:
            return f"there is no {command}"
    if os.geteuid() != 0:
        return "network namespaces take root"
    name = f"fleet-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return tried.stderr.strip()
    _ip("netns", "del", name)
    return None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class Machine:
    """A namespace with a host name, and processes in it."""

    def __init__(self, name: str, path: str | None = None) -> None:
        self.name = name
        #: where its processes look for commands, if not where their environment says
        self.path = path
        self.namespace = f"fleet-{os.getpid()}-{next(_numbers)}-{name}"
        self._started: list[subprocess.Popen[str]] = []
        self._folder = Path("/etc/netns") / self.namespace
        _ip("netns", "add", self.namespace)
        self.ip("link", "set", "lo", "up")

    def ip(self, *words: str) -> None:
        """``ip`` as this machine's administrator would say it: ``ip("link", "set", "lan", "down")``."""
        _ip("-n", self.namespace, *words)

    def set_congestion_control(self, algorithm: str) -> None:
        """Choose how its TCP finds out how much a network carries, for connections to come."""
        write = ["sh", "-c", f"echo {algorithm} > /proc/sys/net/ipv4/tcp_congestion_control"]
        _ip("netns", "exec", self.namespace, *write)

    def knows(self, hosts: Mapping[str, str]) -> None:
        """Its /etc/hosts, by name."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{address} {name}\n" for name, address in hosts.items()]
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))

    def start(
        self, *command: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A process on this machine; ``environ`` is all that it has."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        process = subprocess.Popen(
            [*enter, "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command],
            cwd=cwd,
            env=None if environ is None else {**environ, **({} if self.path is None else {"PATH": self.path})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for process in self._started:
            process.communicate()
        _ip("netns", "del", self.namespace)
        shutil.rmtree(self._folder, ignore_errors=True)


class Machines:
    """Machines, and the networks that they are connected to."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._made: list[Machine] = []
        self._switches: dict[str, Machine] = {}
        self._ports = itertools.count()

    def machine(self, name: str) -> Machine:
        made = Machine(name, self._path)
        self._made.append(made)
        return made

    def connect(self, machine: Machine, network: str, *addresses: str) -> None:
        """A cable from the machine, where it is called like the network, to the network's switch; addresses with
        their prefix, ``10.0.0.1/24`` or ``fd00::1/64``."""
        switch = self._switches.get(network)
        if switch is None:
            switch = self._switches[network] = self.machine(f"switch-{network}")
            switch.ip("link", "add", "switch", "type", "bridge")
            switch.ip("link", "set", "switch", "up")
        port = f"port{next(self._ports)}"
        there = ("peer", "name", port, "netns", switch.namespace)
        machine.ip("link", "add", network, "type", "veth", *there)
        switch.ip("link", "set", port, "master", "switch", "up")
        machine.ip("link", "set", network, "up")
        for address in addresses:
            # Without asking first whether anybody else has it, which takes IPv6 a second or two.
            machine.ip("addr", "add", address, "dev", network, *(["nodad"] if ":" in address else []))

    def join(self, network: str, addresses: Mapping[Machine, str], **cable: float) -> None:
        """Two machines, each with its address, on one cable: what ``bad_switch.py`` knows of it."""
        switch = self.machine(f"switch-{network}")
        ports = []
        for machine, address in addresses.items():
            ports.append(port := f"port{next(self._ports)}")
            machine.ip("link", "add", network, "type", "veth", "peer", "name", port, "netns", switch.namespace)
            switch.ip("link", "set", port, "up")
            machine.ip("link", "set", network, "up")
            machine.ip("addr", "add", address, "dev", network)
        forwarding = switch.start(sys.executable, str(_SCRIPTS / "bad_switch.py"), *ports, json.dumps(cable))
        assert forwarding.stdout is not None
        said = forwarding.stdout.readline()
        assert said == "forwards\n", said

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for machine in self._made:
            machine.close()
