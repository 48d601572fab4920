"""Keeps what Fleet computes for itself apart from the modes in which a script computes: they are of a thread, and Fleet
works on the script's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch


def outside_inference() -> AbstractContextManager[Any]:
    """Surround what makes tensors that outlast ``torch.inference_mode()``, which autograd would leave out."""
    return torch.inference_mode(False)


def outside_transforms() -> AbstractContextManager[Any]:
    """Surround what makes tensors of its own, which a transformation of ``torch.func`` would take for its."""
    if not torch._C._are_functorch_transforms_active():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


@contextmanager
def outside_all() -> Iterator[None]:
    """Surround what belongs to another process as a rule: no mode of the script's changes or sees it, not the device
    where it wants new tensors, nor what counts or records its operations."""
    with ExitStack() as entered:
        entered.enter_context(outside_inference())
        entered.enter_context(outside_transforms())
        entered.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            from torch.utils._python_dispatch import _disable_current_modes

            entered.enter_context(_disable_current_modes())
        if torch.is_autocast_enabled("cpu"):
            entered.enter_context(torch.autocast("cpu", enabled=False))
        yield
