"""Runs the processes of a plan on this machine: starts them, passes their output on, ends them.

Three kinds of thread, each with one job. The main thread takes events from one queue, asks ``Watch`` what they mean and
sends signals; it never waits for the console. A waiter for each process reports its exit, so that the first
failure is the first in time. The pump reads every pipe and is the only writer of console and logs, so
lines cannot interleave; what the launcher itself says reaches it through a pipe as well.

When a job fails, what its processes write on stderr is held back until all have ended. Then everything that the failed
process said is shown last, and one line of each of the others, which follow with tracebacks of their own. A traceback
is always held back for a moment, since it may be what ends the job. The logs have everything.

Each process leads a session of its own: one signal reaches everything it has started, and Ctrl-C reaches only the
launcher. Its exit is observed but not collected until the end, because an uncollected process keeps its id: a signal to
its group cannot hit a stranger.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import queue
import re
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, TypeAlias

from fleet.base.clock import wall_time
from fleet.base.cluster import Endpoint, Role
from fleet.base.system_errors import reason
from fleet.errors import ConfigurationError
from fleet.launch.guard import end_groups, is_there
from fleet.launch.live_view import PERIOD_S, LiveView
from fleet.launch.process_plan import LaunchPlan, ProcessSpec, child_environment
from fleet.launch.watch import Effect, Restart, Say, Send, Watch, good_end, how_ended, named, state_stays
from fleet.telemetry.cause import LAUNCHER, claim, claimed
from fleet.telemetry.figures import Figures, time_in_words
from fleet.telemetry.record import Chronicle, has_broken_off, newest

#: A progress bar redraws its line many times a second; on the console it becomes a line this often.
_REDRAW_S = 5.0
#: A line longer than this is passed on in pieces, so that output without newlines cannot fill the memory.
_LONGEST_LINE = 1 << 16
#: How long the last words of a failed process may take to come through before the launcher speaks.
_LAST_WORDS_S = 0.5
#: For so long a traceback waits for the end that it may bring about, which is looked for so often.
_HELD_S, _LOOK_S = 2.0, 0.2
#: So many of the last lines that wait stay.
_MOST_HELD = 5000
#: torch puts the rank before each line where workers have a group of processes.
_TRACEBACK = re.compile(rb"(\[rank\d+\]: )?Traceback \(most recent call last\):")
#: What helps against a limit of the system that a process to start meets.
_LIMITS = {
    errno.E2BIG: "Give the script shorter arguments, or fewer; variables count as well.",
    errno.EAGAIN: "Start fewer processes, or raise the limit on them (ulimit -u).",
    errno.EMFILE: "Start fewer processes, or raise the limit on open files (ulimit -n): each process takes three.",
    errno.ENOMEM: "Start fewer processes, or use a machine with more memory.",
}
#: Helpers of a process, such as multiprocessing's resource tracker, notice its end and follow it within this time.
_HELPERS_S = 0.5


@dataclass(frozen=True)
class _Exited:
    process: ProcessSpec
    returncode: int


@dataclass(frozen=True)
class _Signalled:
    signum: signal.Signals


_Event: TypeAlias = _Exited | _Signalled


@dataclass
class _Child:
    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    open_streams: int = 2
    drained: threading.Event = field(default_factory=threading.Event)


def run(
    plan: LaunchPlan,
    *,
    log_dir: Path,
    record_dir: Path,
    grace_s: float,
    inherited: Mapping[str, str],
    max_restarts: int = 0,
    live: bool = False,
    stdout: int = 1,
    stderr: int = 2,
    is_enough: Callable[[], bool] | None = None,
) -> int:
    """Run the plan to its end and return the exit code; when this returns or raises, nothing is left running. With
    ``live`` the terminal at ``stdout`` shows how the job does below what its processes write. Once ``is_enough``, all
    are ended by SIGTERM, and that is a good end."""
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    began = time.monotonic()
    watch = Watch(plan, grace_s=grace_s, log_dir=str(log_dir), max_restarts=max_restarts)
    children: dict[str, _Child] = {}
    names = [spec.name for spec in plan.processes]
    view = LiveView(stdout, record_dir, names) if live else None
    # Found now: a relative path says nothing any more once the working directory has been removed.
    records = log_dir if record_dir == log_dir.resolve() else record_dir
    folders = _state_folders(plan, inherited)
    with (
        Chronicle(record_dir, names, plan.is_whole) as chronicle,
        _Pump(stdout, stderr, view, lambda: watch.failing or claimed(record_dir, plan.job_id) is not None) as pump,
        _signals_to(events),
        _Guard(grace_s, inherited) as guard,
    ):

        def start(spec: ProcessSpec) -> None:
            child = children[spec.name] = _start(spec, inherited)
            chronicle.write(spec.name, "started")
            if view is not None:
                view.started(spec.name)
            guard.watch(child.popen.pid)
            pump.follow(child)
            threading.Thread(target=_report_exit, args=(child, events), daemon=True).start()

        def restart(spec: ProcessSpec) -> None:
            before = children[spec.name]
            children[f"{spec.name}, process {before.popen.pid}"] = before
            with contextlib.suppress(ProcessLookupError, PermissionError):  # what it has started dies with it
                os.killpg(before.popen.pid, signal.SIGKILL)
            start(spec)

        try:
            for spec in plan.processes:
                pump.open_log(spec, log_dir)
            for note in plan.notes:
                pump.say(note)
            for spec in plan.processes:
                start(spec)
            while not watch.done:
                event, effects = _next_effects(watch, events, children, record_dir, plan.job_id, is_enough)
                if isinstance(event, _Exited):
                    chronicle.write(event.process.name, how_ended(event.returncode))
                    if view is not None:
                        view.ended(event.process.name, how_ended(event.returncode))
                if watch.verdict is not None:  # whom the launcher ends is not to be the first to tell why
                    claim(str(record_dir), plan.job_id, watch.verdict.process, watch.verdict.why)
                for effect in effects:
                    if isinstance(effect, Restart):
                        restart(effect.process)
                    else:
                        _act(effect, pump, children)
                    if isinstance(effect, Say):
                        chronicle.write(LAUNCHER, effect.text)
            if watch.culprit is not None:
                pump.blame(watch.culprit.name, f"{log_dir}/")
            if kept := [folder for folder in folders if os.path.isdir(folder)]:
                pump.say(state_stays(kept, plan.job_id))
            if watch.exit_code == 0:
                told = _told(record_dir, plan)
                steps = [int(each["steps"]) for each in told]
                took, logs = time.monotonic() - began, f"{log_dir}/"
                pump.say(good_end(plan, took, steps, logs, f"{records}/", time_in_words(told)))
        finally:
            _sweep(children, pump, grace_s, events)
    return watch.exit_code


class Lines:
    """Cuts one stream of bytes into lines, whatever pieces it comes in; bytes stay bytes, so none can be wrong."""

    def __init__(self) -> None:
        self._rest = b""
        self._redrawn_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [_as_drawn(line) for line in complete]
        text = self._rest.rstrip(b"\r")  # a return at the very end may be half of a "\r\n"
        if b"\r" in text:
            # A bar: keep its latest state only, and show it now and then.
            state = _as_drawn(text)
            self._rest = b"\r" + state + self._rest[len(text) :]
            if now - self._redrawn_at >= _REDRAW_S and state.strip():
                self._redrawn_at = now
                lines.append(state)
        while len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest[:_LONGEST_LINE])
            self._rest = self._rest[_LONGEST_LINE:]
        return lines

    def close(self) -> list[bytes]:
        """Return the last line, if it was left without a newline."""
        rest, self._rest = _as_drawn(self._rest), b""
        return [rest] if rest else []


def _as_drawn(line: bytes) -> bytes:
    """Return what a terminal would show of a line with carriage returns in it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


@dataclass
class _Stream:
    source: IO[bytes]
    prefix: bytes
    console: int
    log: IO[bytes] | None = None
    child: _Child | None = None
    lines: Lines = field(default_factory=Lines)
    #: what waits to be shown, and since when; None where nothing ever waits
    held: deque[bytes] | None = None
    held_since: float = 0.0


class _Pump:
    """Writes everything that is written, by one thread."""

    def __init__(self, stdout: int, stderr: int, view: LiveView | None, fails: Callable[[], bool]) -> None:
        """``fails`` tells whether the job is failing."""
        self._stdout, self._stderr = stdout, stderr
        self._fails = fails
        self._errors: list[tuple[ProcessSpec, _Stream]] = []
        self._blamed: tuple[str, str] | None = None
        self._view = view
        self._selector = selectors.DefaultSelector()
        self._logs: dict[str, IO[bytes]] = {}
        self._mute: set[int] = set()
        self._closing = False
        heard, self._voice = os.pipe()
        # The launcher must go on whatever becomes of the console: rather lose one of its lines than wait.
        os.set_blocking(self._voice, False)
        self._own = _Stream(os.fdopen(heard, "rb", buffering=0), b"[fleetrun] ", stderr)
        self._selector.register(self._own.source, selectors.EVENT_READ, self._own)
        self._thread = threading.Thread(target=self._loop, name="fleetrun-pump", daemon=True)

    def __enter__(self) -> _Pump:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._voice)
        self._thread.join()  # as long as it takes to write it all: a pager may be reading

    def say(self, text: str) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._voice, f"{text}\n".encode(errors="replace"))

    def blame(self, process: str, logs: str) -> None:
        """Show at the end why ``process`` failed; ``logs`` has what the others wrote."""
        self._blamed = process, logs

    def open_log(self, spec: ProcessSpec, log_dir: Path) -> None:
        """Open what one process, and whatever takes its place, has as its log: the folder may be gone by then."""
        path = log_dir / spec.log_name
        try:
            self._logs[spec.name] = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigurationError(
                f"the log of {spec.name} cannot be written",
                where=str(path),
                got=reason(error),
                todo=_LIMITS.get(error.errno or 0, "Remove it, or give --log_dir another folder."),
            ) from None

    def follow(self, child: _Child) -> None:
        """Read a process's output from now on; a selector may be added to while its thread waits in it."""
        log = self._logs[child.spec.name]
        prefix = f"[{child.spec.name}] ".encode()
        assert child.popen.stdout is not None
        assert child.popen.stderr is not None
        output = _Stream(child.popen.stdout, prefix, self._stdout, log, child)
        errors = _Stream(child.popen.stderr, prefix, self._stderr, log, child, held=deque(maxlen=_MOST_HELD))
        self._errors.append((child.spec, errors))
        for stream in (output, errors):
            self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def _loop(self) -> None:
        # Once the launcher is closing, every process is dead and what it wrote is in the pipes: read until they are
        # empty, not until they are closed, as a process that left its group may hold one open for ever.
        while (ready := self._selector.select(0 if self._closing else self._pause_s)) or not self._closing:
            for key, _ in ready:
                self._read(key.data)
            self._show_late()
            self._draw()
        open_still: list[_Stream] = [key.data for key in self._selector.get_map().values()]
        for stream in open_still:
            self._close(stream)
        self._show_last()
        if strays := dict.fromkeys(stream.prefix[1:-2].decode() for stream in open_still):
            text = f"processes that {', '.join(strays)} started in sessions of their own go on: end them yourself"
            self._show(self._own, [text.encode()])
        self._draw()
        for log in self._logs.values():
            log.close()
        self._selector.close()

    @property
    def _pause_s(self) -> float | None:
        if any(stream.held for _, stream in self._errors):
            return _LOOK_S
        return None if self._view is None else PERIOD_S

    def _draw(self) -> None:
        if self._view is not None:
            self._write(self._stdout, self._view.draw(time.monotonic()))

    def _read(self, stream: _Stream) -> None:
        data = stream.source.read(1 << 16)
        if data:
            self._put(stream, stream.lines.feed(data, time.monotonic()))
        else:
            self._closing |= stream is self._own
            self._close(stream)

    def _close(self, stream: _Stream) -> None:
        self._put(stream, stream.lines.close())
        self._selector.unregister(stream.source)
        stream.source.close()
        if stream.child is not None:
            stream.child.open_streams -= 1
            if stream.child.open_streams == 0:
                stream.child.drained.set()

    def _put(self, stream: _Stream, lines: list[bytes]) -> None:
        if stream.log is not None:
            self._write(stream.log.fileno(), b"".join(line + b"\n" for line in lines))
        self._show(stream, self._not_held(stream, lines))

    def _show(self, stream: _Stream, lines: Iterable[bytes]) -> None:
        text = b"".join(stream.prefix + line + b"\n" for line in lines)
        if self._view is not None and text and os.isatty(stream.console):
            self._write(self._stdout, self._view.clear())
        self._write(stream.console, text)

    def _not_held(self, stream: _Stream, lines: list[bytes]) -> list[bytes]:
        """Return those lines that are shown now."""
        if stream.held is None or not lines:
            return lines
        begins = 0
        if not stream.held and not self._fails():
            begins = next((i for i, line in enumerate(lines) if _TRACEBACK.match(line)), len(lines))
        if not stream.held:
            stream.held_since = time.monotonic()
        stream.held.extend(lines[begins:])
        return lines[:begins]

    def _show_late(self) -> None:
        """Show the lines that waited for an end that did not come."""
        for _, stream in self._errors:
            if stream.held and time.monotonic() - stream.held_since > _HELD_S and not self._fails():
                self._show(stream, stream.held)
                stream.held.clear()

    def _show_last(self) -> None:
        waiting = [(spec, stream) for spec, stream in self._errors if stream.held]
        if self._blamed is not None:
            process, logs = self._blamed
            others = [spec for spec, _ in waiting if spec.name != process]
            if others:
                self._show(self._own, [f"what {named(others)} said of it is in {logs}".encode()])
            waiting = [(spec, stream) for spec, stream in waiting if spec.name == process]
        for _, stream in waiting:
            self._show(stream, stream.held or ())

    def _write(self, fd: int, data: bytes) -> None:
        """Write all of it, past Python's buffers; a reader that went away or a full disk must not stop the job."""
        while data and fd not in self._mute:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # a terminal somebody else made non-blocking
                select.select([], [fd], [])
            except OSError as error:
                self._mute.add(fd)
                for log in self._logs.values():
                    if not log.closed and log.fileno() == fd:
                        self._write(self._stderr, self._own.prefix + f"{log.name} ends here: {error}\n".encode())


class _Guard:
    """Starts the program that ends the job if the launcher is killed."""

    def __init__(self, grace_s: float, inherited: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(grace_s)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(inherited),
            cwd="/",
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(b"%d\n" % group)

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Before its pipe closes, or it would signal groups that are no longer ours.
        self._popen.kill()
        self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()


def _start(spec: ProcessSpec, inherited: Mapping[str, str]) -> _Child:
    try:
        popen = subprocess.Popen(
            spec.command,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(inherited, spec),
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigurationError(
            f"{spec.name} cannot be started", got=reason(error), todo=_LIMITS.get(error.errno or 0, "")
        ) from None
    return _Child(spec, popen)


def _report_exit(child: _Child, events: queue.SimpleQueue[_Event]) -> None:
    if hasattr(os, "waitid"):
        try:
            info = os.waitid(os.P_PID, child.popen.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the launcher gave up starting the job and has collected it already
            return
        assert info is not None
        returncode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
    else:
        returncode = child.popen.wait()
    events.put(_Exited(child.spec, returncode))


def _next_effects(
    watch: Watch,
    events: queue.SimpleQueue[_Event],
    children: Mapping[str, _Child],
    record_dir: Path,
    job_id: str,
    is_enough: Callable[[], bool] | None,
) -> tuple[_Event | None, list[Effect]]:
    """Wait for the next event, if any comes in time, and return what is to be done about it."""
    until_deadline = math.inf if watch.deadline is None else max(0.0, watch.deadline - time.monotonic())
    timeout = min(until_deadline, math.inf if is_enough is None else _LOOK_S)
    try:
        event = events.get(timeout=None if timeout == math.inf else timeout)
    except queue.Empty:
        if is_enough is not None and watch.deadline is None and is_enough():
            return None, watch.enough(time.monotonic())
        return None, watch.elapsed(time.monotonic())
    if isinstance(event, _Signalled):
        return event, watch.interrupted(event.signum, time.monotonic())
    if event.returncode != 0:
        children[event.process.name].drained.wait(_LAST_WORDS_S)
    process = event.process
    broke_off = process.role is Role.WORKER and has_broken_off(record_dir, process.name, wall_time())
    cause = claimed(record_dir, job_id)
    return event, watch.exited(process, event.returncode, time.monotonic(), cause, broke_off=broke_off)


def _told(record_dir: Path, plan: LaunchPlan) -> list[Figures]:
    """Return the last figures of each worker that has reported steps."""
    workers = [spec.name for spec in plan.processes if spec.role is Role.WORKER]
    told = (line.told for line in newest(record_dir, workers) if line.kind == "worker")
    return [each for each in told if each.get("steps", 0)]


def _state_folders(plan: LaunchPlan, inherited: Mapping[str, str]) -> list[Path]:
    """Return the folders of durable servers here. A server that is killed does not remove its own."""
    root = inherited.get("FLEET_DURABLE_DIR", "").strip()
    servers = [spec for spec in plan.processes if root and spec.role is Role.SERVER]
    endpoints = (Endpoint.parse(spec.environment["PADDLE_CURRENT_ENDPOINT"]) for spec in servers)
    return [Path(root).resolve() / endpoint.folder_name for endpoint in endpoints]


def _act(effect: Say | Send, pump: _Pump, children: Mapping[str, _Child]) -> None:
    if isinstance(effect, Say):
        pump.say(effect.text)
        return
    for child in children.values():
        # Also where the process itself has ended: what it started may still be there.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.popen.pid, effect.signal)


def _sweep(children: Mapping[str, _Child], pump: _Pump, grace_s: float, events: queue.SimpleQueue[_Event]) -> None:
    """Collect the processes, and end those that they have left behind in their groups; at Ctrl-C at once."""

    def is_interrupted() -> bool:
        with contextlib.suppress(queue.Empty):
            while True:
                event = events.get_nowait()
                if isinstance(event, _Signalled) and event.signum == signal.SIGINT:
                    return True
        return False

    deadline = time.monotonic() + _HELPERS_S
    while (left := [child for child in children.values() if is_there(child.popen.pid)]) and time.monotonic() < deadline:
        time.sleep(_HELPERS_S / 10)
    if left:
        pump.say(
            f"{', '.join(child.spec.name for child in left)} left processes behind: ending them; Ctrl-C kills at once"
        )
        end_groups([child.popen.pid for child in left], grace_s, is_interrupted)
    for child in children.values():
        child.popen.poll()  # it was collected behind the back of subprocess, which would complain later


@contextlib.contextmanager
def _signals_to(events: queue.SimpleQueue[_Event]) -> Iterator[None]:
    """Turn interruptions into events while the job runs."""

    def handle(signum: int, _frame: FrameType | None) -> None:
        events.put(_Signalled(signal.Signals(signum)))

    if threading.current_thread() is not threading.main_thread():  # Python has signal handlers in the main thread only
        yield
        return
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
        wanted.append(signal.SIGHUP)
    earlier = {number: signal.signal(number, handle) for number in wanted}
    # A caller that ignores its children would make their exit codes vanish.
    earlier[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
