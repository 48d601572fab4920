"""Tells the job at once, and not after a deadline, when a worker's process ends without ``stop_worker``.

An exception that ends the user's script is sent to the servers with its traceback before the interpreter shuts down. So
is SIGTERM, after which some jobs go on. A script that just stops is reported by ``atexit``.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Guarded(Protocol):
    @property
    def stopped(self) -> bool: ...

    def abort(self, reason: str) -> None: ...

    def end(self, reason: str) -> None: ...


_log = logging.getLogger("fleet.worker")

#: How long a process that was told to end waits for its last word to leave.
TELLING_S = 3.0

_lock = threading.RLock()
_guarded: list[Guarded] = []
_installed = False
_owner = 0
_is_dismissed = False


def guard(worker: Guarded) -> None:
    global _installed, _owner
    with _lock:
        _owner = os.getpid()
        _guarded.append(worker)
        if not _installed:
            _installed = True
            atexit.register(_at_exit)
            _chain_excepthook()
            _chain_sigterm()


def release(worker: Guarded) -> None:
    with _lock:
        if worker in _guarded:
            _guarded.remove(worker)


def dismiss() -> None:
    """Let this process end without a word, also in ``stop_worker``, as if it was killed: somebody else sees to it that
    its job goes on. A handler of signals may call this."""
    global _is_dismissed
    _is_dismissed = True


def is_dismissed() -> bool:
    """Say whether this process ends without a word."""
    return _is_dismissed


def die_of(number: int) -> None:
    """End this process by a signal for which it had a handler, as if it had none."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    if os.getpid() == 1:  # the first process of a container is spared those signals for which it has no handler
        os._exit(128 + number)


def _let_all(say: Callable[[Guarded], None]) -> None:
    with _lock:
        # A forked child (a DataLoader's, say) ends without a word: the job is its parent's.
        workers = list(_guarded) if os.getpid() == _owner and not _is_dismissed else []
        _guarded.clear()
    for worker in workers:
        say(worker)


def _tell(say: Callable[[Guarded], None]) -> None:
    """Call ``say`` on a thread of its own, and do not wait for it for ever: what ended the main thread (Ctrl-C, a
    signal) may have come between two instructions, with a lock held that ``say`` needs."""
    telling = threading.Thread(target=_let_all, args=(say,), daemon=True)
    telling.start()
    telling.join(TELLING_S)


def _chain_excepthook() -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        reason = "".join(traceback.format_exception(kind, error, trace))
        _tell(lambda worker: worker.abort(reason))

    sys.excepthook = hook


def _chain_sigterm() -> None:
    """Let a worker that gets SIGTERM say so before it ends. A handler of the user's is left alone; one of ours, which
    spoke for a process that was no worker yet, gives way."""
    present = signal.getsignal(signal.SIGTERM)
    is_ours = (getattr(present, "__module__", None) or "").startswith("fleet.")
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not (present is signal.SIG_DFL or is_ours):
        return

    def on_sigterm(number: int, _frame: object) -> None:
        if os.getpid() == _owner:
            _log.error("this worker is ended by SIGTERM: launchers send it to every process when one has ended badly")
        _tell(lambda worker: worker.end("it was ended by SIGTERM"))
        die_of(number)

    signal.signal(signal.SIGTERM, on_sigterm)


def _at_exit() -> None:
    def say(worker: Guarded) -> None:
        if worker.stopped:
            return
        _log.warning("the script ended without fleet.stop_worker(), so its job has failed: call it after the training")
        worker.abort("its script ended without fleet.stop_worker(), which has to be called after the training")

    _let_all(say)
