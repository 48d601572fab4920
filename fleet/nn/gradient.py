"""Holds the gradient of a table's rows in an object that torch's own tools treat like any gradient.

It stands in ``weight.grad``, shaped ``(0, dim)`` like ``weight``, and carries what was collected. So it shares the fate
of ``.grad`` whoever decides it: ``zero_grad`` of an optimizer or a module, with or without ``set_to_none``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fleet.errors import UnsupportedError

Entry = tuple[torch.Tensor, torch.Tensor]

_ZEROING = {"zero_", "_foreach_zero_"}
_UNSCALING = {"_amp_foreach_non_finite_check_and_unscale_"}


class RowGradient(torch.Tensor):
    """``entries`` holds one pair for each backward: ids, distinct in themselves, and a row of gradient for each."""

    entries: list[Entry]

    @classmethod
    def of(cls, weight: torch.Tensor) -> RowGradient:
        made = weight.new_empty(0, weight.shape[-1]).detach().as_subclass(cls)
        made.entries = []
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ZEROING:
            for gradient in _found_in(args):
                gradient.entries.clear()
        elif name in _UNSCALING:
            raise UnsupportedError(
                "a GradScaler cannot unscale the gradients of rows of a remote table",
                todo="Train without one (bfloat16 needs none), or keep tables out of the scaled loss.",
            )
        # Nothing else looks into it: what torch computes with it is computed with an empty tensor.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _found_in(args: tuple[Any, ...]) -> Iterator[RowGradient]:
    for arg in args:
        for item in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(item, RowGradient):
                yield item
