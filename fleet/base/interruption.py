"""Lets work come to its end where a Ctrl-C, a notebook's stop button, or another signal whose handler raises would
leave half of it done."""

from __future__ import annotations

# What ``signal`` itself calls: it makes an enum of each handler, which takes ten times as long, several times a step.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")

#: The signals for which scripts have handlers of their own, or libraries do: timeouts, notices of preemption, the end
#: of a DataLoader's process.
_NAMES = "SIGINT SIGTERM SIGHUP SIGQUIT SIGALRM SIGVTALRM SIGPROF SIGUSR1 SIGUSR2 SIGCHLD"
_SIGNALS = [getattr(signal, name) for name in _NAMES.split() if hasattr(signal, name)]


class _Later:
    """Remembers that a signal came."""

    def __init__(self) -> None:
        self.heard: tuple[Any, ...] | None = None

    def __call__(self, *told: Any) -> None:
        self.heard = told


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Surround what takes no time, or would be left half done: a Ctrl-C, or another signal, is heard when it is over.
    Only the main thread hears of one, so on others there is nothing to be done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = [(number, handler, _Later()) for number in _SIGNALS if _is_held_back(handler := _signal.getsignal(number))]
    if not held:
        yield
        return
    raised: BaseException | None = None
    try:
        for number, _, later in held:
            _signal.signal(number, later)
        yield
    finally:
        rest, is_over = [*held], False
        while not is_over:
            try:
                while rest:
                    number, handler, later = rest[-1]
                    if _signal.getsignal(number) is later:  # else another one was set inside
                        _signal.signal(number, handler)
                    rest.pop()
                for _, handler, later in held:
                    told, later.heard = later.heard, None
                    if told is not None:
                        handler(*told)
                is_over = True
            except BaseException as error:  # of one of them, or of another signal that comes only now
                raised = error
        if raised is not None:
            raise raised


def _is_held_back(handler: object) -> TypeGuard[Callable[..., object]]:
    """Say whether a handler is one of Python's, and none by which this surrounds itself."""
    return callable(handler) and not isinstance(handler, _Later)


def start_uninterrupted(work: Callable[[], T], name: str) -> Future[T]:
    """Start ``work`` where no Ctrl-C interrupts it: on a thread of this name, unless this is not the main one. Its
    result comes later."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    if threading.current_thread() is threading.main_thread():
        threading.Thread(target=run, name=name).start()
    else:
        run()
    return done
