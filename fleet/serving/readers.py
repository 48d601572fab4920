"""Knows which threads read a model now, so that it changes when none does.

A thread reads for as long as its outermost forward runs. Hooks of the modules say when that begins and ends; each
thread keeps the modules it is in, so that one whose end nobody saw is left with the one around it. Whoever changes the
model shuts the door: forwards that would begin wait, those that run end, the change is made. It is short, since
everything has been prepared before.

Forwards may wait for each other: one may leave a part of its work to another thread, which would wait at the door for
ever. So the door is shut for a moment only, and for twice as long the next time, in which forwards begin as ever. The
change is made whenever no thread reads, be the door shut or not.

torch does not tell hooks of an end by Ctrl-C. So with the outermost forward stands the frame of its call: if that is on
the thread's stack no more, the forward is over.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

#: How long the door is shut at first, and at most.
_FIRST_S, _LONGEST_S = 0.05, 5.0
#: Where the frame of a module's call is, which lasts until its end.
_CALLS = torch.nn.Module.__call__.__code__.co_filename

_live: weakref.WeakSet[Readers] = weakref.WeakSet()


class Readers:
    def __init__(self) -> None:
        self._condition = threading.Condition()
        #: by thread, the call that reads; None if it says by itself when it ends
        self._inside: dict[int, FrameType | None] = {}
        self._is_shut = self._is_changing = self._is_closed = False
        #: whether this process is a fork of the one in which the model is kept fresh
        self.is_fork = False
        self._own = threading.local()
        _live.add(self)

    # ---------------------------------------------------------------- those who read

    def enter(self, module: object) -> None:
        """Note that this thread is in a module; the first one waits while the model changes."""
        modules: list[int] = self._own.__dict__.setdefault("modules", [])
        if modules and self._has_left():
            modules.clear()
        if not modules:
            self._begin(_frame_of_call())
        modules.append(id(module))

    def leave(self, module: object) -> None:
        """Note that this thread is in this module no more, nor in those inside of it. One that it was not in is none of
        our affair: somebody's hook kept ours from being called."""
        modules: list[int] = self._own.__dict__.get("modules", [])
        if id(module) not in modules:
            return
        while modules.pop() != id(module):
            pass
        if not modules:
            self._own.call = None
            self._end(threading.get_ident())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read in this thread until the end of the context. Those of one thread may overlap, as the tasks of a loop do
        that wait in one: it reads until all have ended."""
        mine, own = threading.get_ident(), self._own.__dict__  # it may be ended by another thread
        modules: list[int] = own.setdefault("modules", [])
        if modules and own["call"] is not None and not self._has_left():
            yield  # the forward that runs lasts longer
            return
        contexts = own["contexts"] = own.get("contexts", 0) + 1
        try:
            if contexts == 1:
                modules.clear()
                self._begin(None)
                modules.append(id(self))
            yield
        finally:
            own["contexts"] -= 1
            if not own["contexts"]:
                modules.clear()
                self._end(mine)

    @property
    def is_inside(self) -> bool:
        """Say whether this thread reads."""
        return bool(self._own.__dict__.get("modules")) and not self._has_left()

    def _begin(self, call: FrameType | None) -> None:
        mine = threading.get_ident()
        with self._condition:
            self._inside.pop(mine, None)  # a forward that has ended unseen, here or in a thread that was called so
            self._condition.notify_all()
            while self._is_shut or self._is_changing:
                self._condition.wait()
            self._inside[mine] = self._own.call = call

    def _end(self, thread: int) -> None:
        with self._condition:
            self._inside.pop(thread, None)
            if not self._inside:
                self._condition.notify_all()

    def _has_left(self) -> bool:
        """Say whether the forward that this thread began has ended unseen."""
        call: FrameType | None = self._own.call
        return call is not None and not _is_on_stack(call, sys._getframe())

    # ---------------------------------------------------------------- who changes the model

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Give the model to this thread when no other reads it; False if this was closed meanwhile."""
        with self._condition:
            shut_s = _FIRST_S
            while self._inside and not self._is_closed:
                self._is_shut = not self._is_shut
                self._condition.notify_all()
                if not self._is_shut:
                    self._forget_those_who_left()
                    shut_s = min(2 * shut_s, _LONGEST_S)
                self._condition.wait_for(lambda: not self._inside or self._is_closed, shut_s)
            self._is_shut = False
            self._is_changing = not self._is_closed
            self._condition.notify_all()
            may = self._is_changing
        try:
            yield may
        finally:
            with self._condition:
                self._is_changing = False
                self._condition.notify_all()

    def _forget_those_who_left(self) -> None:
        stacks = sys._current_frames()
        for thread, call in list(self._inside.items()):
            stack = stacks.get(thread)
            if stack is None or (call is not None and not _is_on_stack(call, stack)):
                del self._inside[thread]

    def close(self) -> None:
        """Let nobody wait any more: the model changes no more."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    # ---------------------------------------------------------------- forks

    def before_fork(self) -> None:
        """Keep the model from changing until the fork is over: a child is not to get half of a change."""
        self._condition.acquire()
        while self._is_changing:
            self._condition.wait()

    def after_fork(self) -> None:
        self._condition.release()

    def after_fork_in_child(self) -> None:
        """Begin anew in a child, which has one thread, and nobody who changes the model."""
        self._condition = threading.Condition()
        self._inside.clear()
        self._is_shut = self._is_changing = False
        self.is_fork, self._is_closed = True, True


def _frame_of_call() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _CALLS:
        frame = frame.f_back
    return frame


def _is_on_stack(call: FrameType, stack: FrameType | None) -> bool:
    while stack is not None and stack is not call:
        stack = stack.f_back
    return stack is call


#: Threads may fork at once: each in its turn.
_forks = threading.Lock()
_held: list[Readers] = []


def _before_fork() -> None:
    _forks.acquire()
    for readers in list(_live):
        readers.before_fork()
        _held.append(readers)


def _after_fork(in_child: bool) -> None:
    while _held:
        readers = _held.pop()
        readers.after_fork_in_child() if in_child else readers.after_fork()
    _forks.release()


def _register(**when: Any) -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**when)


_register(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(in_child=False),
    after_in_child=lambda: _after_fork(in_child=True),
)
