"""Python processes that begin at once: each is a fork of one that has imported torch and Fleet and done nothing else.

Such a process is a real one in all that tests look at: arguments, environment, folder, signals, streams, and the end of
an interpreter with its exit code. What it saves is two seconds of a core for imports. Tests of the start itself begin
with a new Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: More than any request is long.
LONGEST = 1 << 20


class Process:
    """One of them, with those methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, args: list[str], pid: int, ended: int, out: int, err: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = open(out, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.stderr = open(err, encoding="utf-8", errors="replace")  # noqa: SIM115
        self._ended = ended

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(int(os.read(self._ended, 32)))
            os.close(self._ended)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it says from now on."""
        said = {}

        def read(name: str) -> None:
            stream = getattr(self, name)
            said[name] = "" if stream.closed else stream.read()
            stream.close()

        readers = [threading.Thread(target=read, args=(name,), daemon=True) for name in ("stdout", "stderr")]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said["stdout"], said["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Prepared:
    """The process that the others are forks of. It is no child of this one, as tests look for children that they have
    left; it ends with this one, and so do the forks."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            # Libraries read some variables when they are imported.
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, pass_fds=[theirs.fileno()], env=environ, check=True)

    def start(self, command: list[str], environ: Mapping[str, str], cwd: Path | None = None) -> Process:
        """Begin with a script and its arguments."""
        (out, their_out), (err, their_err), (ended, end) = os.pipe(), os.pipe(), os.pipe()
        request = json.dumps([command, dict(environ), str(cwd or Path.cwd())]).encode()
        socket.send_fds(self._line, [request], [their_out, their_err, end])
        for each in (their_out, their_err, end):
            os.close(each)
        return Process(command, int(self._line.recv(32)), ended, out, err)

    def close(self) -> None:
        self._line.close()


def serve(line: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Fork for each request, and tell of each end. Returns in a fork, with what it is to do, and never elsewhere."""
    ends: dict[int, int] = {}
    heard, hears = socket.socketpair()
    heard.setblocking(False)
    hears.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(hears.fileno())
    while True:
        readable, _, _ = select.select([line, heard], [], [])
        if heard in readable:
            heard.recv(4096)
            while ends and (found := os.waitpid(-1, os.WNOHANG))[0]:
                end = ends.pop(found[0])
                with contextlib.suppress(BrokenPipeError):
                    os.write(end, str(found[1]).encode())
                os.close(end)
        if line in readable:
            request, passed, _, _ = socket.recv_fds(line, LONGEST, 3)
            if not request:
                for each in ends:
                    os.kill(each, signal.SIGKILL)
                os._exit(0)
            out, err, end = passed
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
                    os.dup2(source, number)
                    os.close(source)
                for each in (end, *ends.values()):
                    os.close(each)
                for each in (line, heard, hears):
                    each.close()
                return tuple(json.loads(request))  # type: ignore[return-value]
            ends[pid] = end
            for each in (out, err):
                os.close(each)
            line.send(str(pid).encode())


def become(command: list[str], environ: dict[str, str], cwd: str) -> dict[str, Any]:
    """Make of this process what a new Python would be; the names that its script begins with."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    at_once = bool(environ.get("PYTHONUNBUFFERED"))
    for number, name in ((1, "stdout"), (2, "stderr")):
        buffering = 1 if at_once or number == 2 else -1
        setattr(sys, name, os.fdopen(number, "w", buffering, closefd=False))
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.argv = command
    added = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.path.dirname(os.path.abspath(command[0])), *filter(None, added)]
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(command[0])
    sys.modules["__main__"] = main
    return main.__dict__


if __name__ == "__main__":
    import torch  # noqa: F401

    import fleet.nn
    import fleet.ps.backend  # noqa: F401
    from fleet.kernels import RULES
    from fleet.plan.specs import Initializer, TableSpec
    from fleet.ps.table.table import Table

    # numba takes a second to get ready, and a kernel to load.
    Table(TableSpec("", 2, "float32", 0, None, Initializer("zeros")), RULES["SGD"].rows, 0).warm()  # type: ignore[arg-type]

    if os.fork():
        os._exit(0)  # whoever has started this waits until it is ready
    os.setsid()
    names = become(*serve(socket.socket(fileno=int(sys.argv[1]))))
    exec(compile(Path(names["__file__"]).read_bytes(), names["__file__"], "exec"), names)
