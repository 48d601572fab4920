"""Lets work come to its end where a Ctrl-C, or a notebook's stop button, would leave half of it done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _Later:
    """Remembers that a signal came."""

    def __init__(self) -> None:
        self.heard: tuple[Any, ...] | None = None

    def __call__(self, *told: Any) -> None:
        self.heard = told


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Surround what takes no time, or would be left half done: a Ctrl-C is heard when it is over. Only the main thread
    hears of one, so on others there is nothing to be done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, later = signal.getsignal(signal.SIGINT), _Later()
    if not callable(handler) or isinstance(handler, _Later):  # nothing of Python's, or this surrounds itself
        yield
        return
    raised: BaseException | None = None
    try:
        signal.signal(signal.SIGINT, later)
        yield
    finally:
        while signal.getsignal(signal.SIGINT) is later:  # else another one was set inside
            try:
                signal.signal(signal.SIGINT, handler)
            except BaseException as error:  # that of another signal's handler, which is run first
                raised = error
        if later.heard is not None:
            handler(*later.heard)
        if raised is not None:
            raise raised


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
