"""Keeps torch's compiler out of a process until something is compiled there.

Its import takes longer than torch's own and as much memory again. torch imports it with the first call of any
function that it is to leave alone, such as ``zero_grad``, for what to call instead, which it remembers with the
function. As long as there is no compiler, that is the function itself: so it is put there, and taken away when the
import begins. From then on all is as torch has it.

Where torch remembers it is its own affair: a release that does so elsewhere imports the compiler, as if this were not
here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of the compiler

_COMPILER = "torch._dynamo"
_REMEMBERED = "__dynamo_disable"
#: What every optimizer calls, and torch leaves uncompiled.
_OF_OPTIMIZERS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Import(MetaPathFinder):
    """Sees the import of the compiler begin; what is found is up to others."""

    def __init__(self) -> None:
        self._called_plainly: list[Callable[..., Any]] = []
        self._begun = False

    def call_plainly(self, function: Callable[..., Any]) -> None:
        """Let a function be called as it is, up to the import."""
        if self._begun or _COMPILER in sys.modules or _REMEMBERED in function.__dict__:
            return
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        function.__dict__[_REMEMBERED] = function
        self._called_plainly.append(function)
        if self._begun:  # on another thread, and it may have looked before this function was there
            self._leave_to_torch()

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == _COMPILER:
            self._begun = True
            self._leave_to_torch()

    def _leave_to_torch(self) -> None:
        for function in self._called_plainly:
            function.__dict__.pop(_REMEMBERED, None)


_import = _Import()


def uncompiled(function: _Function) -> _Function:
    """Have the compiler leave a function alone, and all that it calls."""
    left_alone = cast(_Function, _disable_dynamo(function))
    _import.call_plainly(function)  # second, as a wrapper begins with a copy of what is remembered
    return left_alone


def put_off_compiler() -> None:
    """Let the first optimizer of this process do without the compiler."""
    for name in _OF_OPTIMIZERS:
        method = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if method is not None:
            _import.call_plainly(method)
