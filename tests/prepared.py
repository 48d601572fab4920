"""Python processes that begin at once: each is a fork of one that has imported torch and Fleet and done nothing else.

Such a process is a real one in all that tests look at: arguments, environment, folder, signals, streams, its threads'
and functions' turn at the end, and its exit code. What it saves is two seconds of a core for imports, another two for
torch's compiler, which comes with most scripts, and one to take apart at the end what it was begun with. What it starts
as ``sys.executable`` begins in the same way. Tests of the start and the end themselves begin with a new Python.

One process serves all that the tests are spread over. It listens in two folders: what begins in ``bare`` has no
compiler.
In each there is a ``python`` to start, and the commands of Fleet and torch, for a launcher or a shell. What begins
as such a command on a machine that is a namespace is there too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path

#: More than any request is long.
LONGEST = 1 << 20
#: Whoever starts the process that serves is there by then.
ALONE_S = 60.0

KINDS = ("bare", "compiler")
#: Of Linux, in which a machine of its own is.
NAMESPACES = ("net", "uts", "mnt")
COMMANDS = {"fleetrun": "fleet.launch", "fleet": "fleet", "torchrun": "torch.distributed.run"}

#: In the place of Python: has a fork begin, hands signals on to it, and ends as it does. What is no script or module
#: begins as ever.
PYTHON = """#!{python} -IS
import json, os, signal, socket, sys
words = [word for word in sys.argv[1:2] if word != "-u"] + sys.argv[2:]
if not words or (words[0].startswith("-") and words[0] != "-m"):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
handed_on = {{signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}}
signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect({socket!r})
where = [os.open("/proc/self/ns/" + kind, os.O_RDONLY) for kind in {namespaces!r} if os.path.exists("/proc/self/ns")]
socket.send_fds(line, [json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()], [0, 1, 2, *where])
pid = int(line.recv(32))
for number in handed_on:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
code = os.waitstatus_to_exitcode(int(line.recv(32)))
if code < 0:
    if -code in handed_on:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Process:
    """One of them, with those methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, args: list[str], line: socket.socket, out: int, err: int) -> None:
        self.args = args
        self.pid = int(line.recv(32))
        self.returncode: int | None = None
        self.stdout = open(out, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.stderr = open(err, encoding="utf-8", errors="replace")  # noqa: SIM115
        self._line = line
        self._said: dict[str, str] = {}
        self._readers: list[threading.Thread] = []

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(int(self._line.recv(32)))
            self._line.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it says from now on, also where an earlier call has waited in vain."""

        def read(name: str) -> None:
            with getattr(self, name) as stream:
                self._said[name] = stream.read()

        if not self._readers:
            self._readers = [threading.Thread(target=read, args=(name,), daemon=True) for name in ("stdout", "stderr")]
            for reader in self._readers:
                reader.start()
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return self._said["stdout"], self._said["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Prepared:
    """The process that the others are forks of, in a folder of its own; started unless it is there already. It is no
    child of this one, as tests look for children that they have left; it ends with the last one that it serves, and so
    do the forks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._line = _connected(folder / KINDS[0])
        except OSError:
            # Libraries read some variables when they are imported.
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, __file__, str(folder)], env=environ, check=True)
            self._line = _connected(folder / KINDS[0])

    def start(
        self, command: list[str], environ: Mapping[str, str], cwd: Path | None = None, *, bare: bool = False
    ) -> Process:
        """Begin with a script, or ``-m`` and a module, and its arguments."""
        line = _connected(self.commands(bare=bare))
        (out, their_out), (err, their_err), nothing = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDONLY)
        request = json.dumps([command, dict(environ), str(cwd or Path.cwd())]).encode()
        socket.send_fds(line, [request], [nothing, their_out, their_err])
        for each in (nothing, their_out, their_err):
            os.close(each)
        return Process(command, line, out, err)

    def commands(self, *, bare: bool = False) -> Path:
        """The folder with ``python``."""
        return self._folder / KINDS[not bare]

    def close(self) -> None:
        self._line.close()


def _connected(folder: Path) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(str(folder / "socket"))
    except OSError:
        line.close()
        raise
    return line


Request = tuple[list[str], dict[str, str], str]


class Server:
    """Forks for each request, and tells of each end."""

    def __init__(self, door: socket.socket, *others: socket.socket) -> None:
        self._door = door
        self._lines: dict[socket.socket, int | None] = {}
        self._others = others  # ours to close in forks
        self._heard, self._hears = socket.socketpair()
        for each in (self._heard, self._hears):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._hears.fileno())

    def serve(self, wanted: socket.socket | None = None, over: socket.socket | None = None) -> Request | None:
        """Returns in a fork with what it is to do; None where somebody is at the door that is ``wanted``. Ends with the
        last line, or when it is ``over``."""
        also = [each for each in (wanted, over) if each is not None]
        while True:
            readable, _, _ = select.select([self._door, self._heard, *also, *self._lines], [], [], ALONE_S)
            if over in readable or (over is None and not readable and not self._lines):
                self._end()
            if wanted in readable:
                return None
            if self._heard in readable:
                self._tell_of_ends()
            if self._door in readable:
                self._lines[self._door.accept()[0]] = None
            for line in [line for line in self._lines if line in readable]:
                request = self._read(line)
                if request is not None:
                    return request
            if over is None and not self._lines:
                self._end()

    def _read(self, line: socket.socket) -> Request | None:
        request, given, _, _ = socket.recv_fds(line, LONGEST, 3 + len(NAMESPACES))
        streams, where = given[:3], given[3:]
        if not request:  # whoever waits for this fork is gone
            pid = self._lines.pop(line)
            line.close()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            return None
        pid = os.fork()
        if pid:
            self._lines[line] = pid
            line.send(str(pid).encode())
        else:
            self.leave()
            for number, source in enumerate(streams):
                os.dup2(source, number)
            for kind, entered in zip(NAMESPACES, where, strict=False):
                enter(f"/proc/self/ns/{kind}", entered)
        for each in given:
            os.close(each)
        return None if pid else tuple(json.loads(request))

    def leave(self) -> None:
        """Let go, in a fork, of all that is this process's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._door, self._heard, self._hears, *self._others, *self._lines):
            each.close()

    def _tell_of_ends(self) -> None:
        self._heard.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                for line in [line for line, pid in self._lines.items() if pid == found[0]]:
                    with contextlib.suppress(BrokenPipeError):
                        line.send(str(found[1]).encode())
                    line.close()
                    del self._lines[line]

    def _end(self) -> None:
        for pid in filter(None, self._lines.values()):
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def enter(own: str, other: int) -> None:
    """Go over to another namespace, unless it is this process's."""
    if os.stat(own).st_ino != os.fstat(other).st_ino and ctypes.CDLL(None, use_errno=True).setns(other, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter {own}")


def become(command: list[str], environ: dict[str, str], cwd: str, python: str) -> None:
    """Make of this process what a new Python would be, and do what it would do."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    if "RAY_RAYLET_PID" in environ:  # Ray ends its processes with their groups
        os.setpgid(0, 0)
    at_once = bool(environ.get("PYTHONUNBUFFERED")) or command[0] == "-u"
    for number, name in ((1, "stdout"), (2, "stderr")):
        buffering = 1 if at_once or number == 2 else -1
        setattr(sys, name, os.fdopen(number, "w", buffering, closefd=False))
        setattr(sys, f"__{name}__", getattr(sys, name))
    if command[0] == "-u":
        command = command[1:]
    sys.executable = python
    added = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if command[0] == "-m":
        sys.path[:1] = [cwd, *added]
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    main.__file__ = os.path.abspath(command[0])
    sys.path[:1] = [os.path.dirname(main.__file__), *added]
    sys.argv = command
    exec(compile(Path(main.__file__).read_bytes(), main.__file__, "exec"), main.__dict__)


def open_door(folder: Path) -> socket.socket:
    """Listen in a folder, with what is to be started there."""
    folder.mkdir(exist_ok=True)
    (folder / "socket").unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(str(folder / "socket"))
    door.listen(128)
    scripts = {"python": PYTHON.format(python=sys.executable, socket=str(folder / "socket"), namespaces=NAMESPACES)}
    scripts |= {name: f'#!/bin/sh\nexec "{folder}/python" -m {module} "$@"\n' for name, module in COMMANDS.items()}
    for name, script in scripts.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return door


def serve(folder: Path) -> None:
    """Serve both folders; whom the second one needs is made when somebody comes to it."""
    gc.freeze()
    bare, compiler = (open_door(folder / kind) for kind in KINDS)
    if os.fork():
        os._exit(0)  # whoever has started this waits until it is ready
    os.setsid()
    over, lives = socket.socketpair()
    server, kind = Server(bare, compiler, over, lives), KINDS[0]
    request = server.serve(wanted=compiler)
    if request is None and os.fork():
        request = server.serve()
    elif request is None:
        door, over = compiler.dup(), over.dup()
        server.leave()
        import torch._dynamo  # noqa: F401

        with contextlib.suppress(ImportError):
            import sklearn.datasets  # noqa: F401  where most examples have their data from

        gc.freeze()
        kind = KINDS[1]
        request = Server(door, over).serve(over=over)
    assert request is not None
    code = 0
    try:
        become(*request, python=str(folder / kind / "python"))
    except SystemExit as error:
        if not isinstance(error.code, int | None):  # a message, for Python to print
            raise
        code = error.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    import torch  # noqa: F401

    import fleet.nn
    import fleet.ps.backend  # noqa: F401
    from fleet.kernels import RULES
    from fleet.plan.specs import Initializer, TableSpec
    from fleet.ps.table.table import Table

    # numba takes a second to get ready, and a kernel to load.
    Table(TableSpec("", 2, "float32", 0, None, Initializer("zeros")), RULES["SGD"].rows, 0).warm()  # type: ignore[arg-type]
    serve(Path(sys.argv[1]))
