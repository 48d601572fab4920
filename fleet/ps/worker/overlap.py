"""Gradients leave while the backward of a ``minimize`` still runs, as nothing can come between it and its step.

A hook sees each large gradient when it is complete, and a thread sends it, from where it is. The step then sends the
rest, and names the attempt under which servers have what was sent. If a gradient is not as it was when it was sent (a
backward that came to it twice, a hook that changed it), or could not be sent, the step sends everything. If hooks of
the user's see complete gradients too, nothing is sent early. Other code that runs in a backward may change a gradient
without a trace (``grad.data``, ``grad.numpy()``), so its bytes are summed up before it is sent, and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

from fleet.base.checksum import crc32
from fleet.errors import FleetError
from fleet.numeric.compiler import uncompiled

#: A request of its own does not pay for smaller ones.
SMALLEST_BYTES = 1 << 20


def worthwhile(params: Sequence[torch.Tensor]) -> bool:
    """Say whether any gradient of these is large enough to leave by itself."""
    return any(map(_is_large, params))


def _is_large(param: torch.Tensor) -> bool:
    return param.nbytes >= SMALLEST_BYTES


def _checksum(grad: torch.Tensor) -> int:
    return crc32(grad.detach().view(-1).view(torch.uint8).numpy().data)


#: Sends the gradient of a parameter under an attempt; whether the servers took it.
Send = Callable[[int, int, torch.Tensor], bool]


class EarlyGradients:
    """Sends large gradients of a backward that a step follows at once."""

    def __init__(self, params: Sequence[torch.Tensor], send: Send, name: str) -> None:
        self._send = send
        self._attempt = 0
        self._armed = self._spoiled = self._refused = False
        #: parameter -> its gradient and the version that was sent
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}
        #: parameter -> whether the servers took it, and the checksum of what was sent
        self._under_way: dict[int, Future[tuple[bool, int]]] = {}
        self._sender = ThreadPoolExecutor(1, f"fleet-early-{name}")
        self._params = params
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._complete, index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(params)
            if _is_large(param) and param.requires_grad
        ]

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Surround a backward whose gradients are those of the next step."""
        self._attempt += 1
        self._sent, self._under_way, self._spoiled = {}, {}, False
        self._armed = not self._refused and not self._are_seen()
        try:
            yield
        finally:
            self._armed = False

    def _are_seen(self) -> bool:
        """Say whether a gradient has a hook beside the one of this object."""
        return sum(len(param._post_accumulate_grad_hooks or ()) for param in self._params) > len(self._hooks)

    @uncompiled
    def _complete(self, index: int, param: torch.Tensor) -> None:
        grad = param.grad
        if not self._armed or grad is None or grad.is_sparse or not (grad.is_cpu and grad.is_contiguous()):
            return
        self._spoiled = self._spoiled or index in self._sent
        self._sent[index] = grad, grad._version
        self._under_way[index] = self._sender.submit(self._leave, self._attempt, index, grad.detach().view(-1))

    def _leave(self, attempt: int, index: int, flat: torch.Tensor) -> tuple[bool, int]:
        before = _checksum(flat)
        return self._send(attempt, index, flat), before

    def sent(self, grads: Sequence[torch.Tensor | None]) -> tuple[int, frozenset[int]]:
        """Return the attempt under which servers have gradients of this step, and of which parameters; 0 for none."""
        sent, under_way, self._sent, self._under_way = self._sent, self._under_way, {}, {}
        try:
            left = {index: each.result() for index, each in under_way.items()}
        except FleetError:  # the push will meet it again
            return 0, frozenset()
        self._refused = self._refused or not all(taken for taken, _ in left.values())
        same = all(
            grads[index] is grad and grad._version == version and _checksum(grad) == left[index][1]
            for index, (grad, version) in sent.items()
        )
        if not sent or self._spoiled or self._refused or not same or self._are_seen():
            return 0, frozenset()
        return self._attempt, frozenset(sent)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._sender.shutdown(wait=True, cancel_futures=True)
