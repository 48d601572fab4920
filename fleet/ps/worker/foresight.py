"""What a forward will look up, known when it begins: a model that asks table by table then sends one request for all.

Most models take the ids of each table straight out of their input: ``batch["user"]``, ``ids[:, 3]``. A forward shows
which: each tensor it looks up is compared with those it was called with. The next one asks for all of them before it
begins, and its look-ups find the rows there. Nothing depends on the guess: a look-up uses what was fetched for exactly
its ids, and asks by itself otherwise. A model whose look-ups turn out to be others is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo

from fleet.errors import UnsupportedError
from fleet.nn.handle import TableHandle, Wanted

#: So often the look-ups of a model may have been others than expected.
PATIENCE = 3

#: Arguments are searched so deep, and collections of so many entries.
DEPTH, WIDTH = 6, 1000


@dataclass(frozen=True)
class View:
    """Part of an input: all of it, or of one dimension an index (no ``length``) or a range."""

    path: tuple[Any, ...]
    dim: int | None = None
    start: int = 0
    length: int | None = None

    def of(self, inputs: Inputs) -> torch.Tensor | None:
        """The part of these inputs; None if they have no such part."""
        whole = inputs.get(self.path)
        if whole is None or self.dim is None:
            return whole
        if self.dim >= whole.dim() or self.start + (self.length or 1) > whole.size(self.dim):
            return None
        if self.length is None:
            return whole.select(self.dim, self.start)
        return whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class Expected:
    handle: TableHandle
    training: bool
    view: View


class Foresight:
    """Hangs on a model while its job runs. ``fetch`` asks for what a forward will look up; ``forget`` is for when
    that has ended."""

    def __init__(
        self,
        model: torch.nn.Module,
        fetch: Callable[[Sequence[Wanted]], None],
        forget: Callable[[], None],
    ) -> None:
        self._fetch = fetch
        self._forget = forget
        self._plans: dict[bool, list[Expected]] = {}  #: for training, and for evaluation
        self._surprises = 0
        self._inputs: Inputs | None = None  #: of the forward that runs
        self._expected: list[Wanted] = []
        self._seen: list[Sequence[Wanted]] = []
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Foresight:
        return self  # a copy of the model reads the same tables

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a model cannot be pickled while it trains in a job: its tables live on the servers",
            todo="Save the job with fleet.save_persistables(dirname), or the model's state_dict for its dense part.",
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def saw(self, wanted: Sequence[Wanted]) -> None:
        """Something looks these up, with one request."""
        if self._inputs is not None:
            self._seen.append([each for each in wanted if _is_plain(each.ids)])

    @_disable_dynamo
    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._inputs is not None:  # a forward inside of this one's, or one that Ctrl-C ended
            self._surprises += 1
            self._clear()
        if self._surprises >= PATIENCE:
            return
        self._inputs = dict(_tensors((args, kwargs)))
        for expected in self._plans.get(module.training, ()):
            ids = expected.view.of(self._inputs)
            if ids is not None:
                self._expected.append(expected.handle.wanted(ids, expected.training))
        if self._expected:
            self._fetch(self._expected)

    @_disable_dynamo
    def _end(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._inputs is None:
            return
        inputs, expected, requests = self._inputs, self._expected, self._seen
        self._clear()
        if output is None:  # it failed on its way, and shows nothing
            return
        seen = [each for request in requests for each in request]
        known = self._plans.get(module.training)
        if known is not None and list(map(_identity, seen)) == list(map(_identity, expected)):
            return
        plan = []
        if len(requests) > 1:
            plan = [Expected(each.handle, each.training, view) for each in seen if (view := _view(each.ids, inputs))]
        if known is not None and plan != known:
            self._surprises += 1
        self._plans[module.training] = plan

    def _clear(self) -> None:
        """Keep nothing of a forward that is over, least of all its inputs."""
        self._inputs, self._expected, self._seen = None, [], []
        self._forget()


Inputs = Mapping[tuple[Any, ...], torch.Tensor]


def _identity(wanted: Wanted) -> tuple[Any, ...]:
    ids = wanted.ids
    return id(wanted.handle), wanted.training, ids.data_ptr(), ids.shape, ids.stride()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in memory as its shape and strides say: others cannot be compared."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def _tensors(inputs: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors of ids among a model's arguments, with the way to each."""
    if isinstance(inputs, torch.Tensor):
        if inputs.dtype in (torch.int64, torch.int32) and _is_plain(inputs):
            yield path, inputs
    elif len(path) > DEPTH or not isinstance(inputs, Mapping | list | tuple) or len(inputs) > WIDTH:
        return
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from _tensors(value, (*path, key))
    else:
        for position, value in enumerate(inputs):
            yield from _tensors(value, (*path, position))


def _view(ids: torch.Tensor, inputs: Inputs) -> View | None:
    """Which part of which input ``ids`` is, judged by where they lie in memory."""
    for path, whole in inputs.items():
        if ids.dtype != whole.dtype or ids.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            continue
        apart = int(ids.storage_offset()) - int(whole.storage_offset())
        shape, stride = list(whole.shape), whole.stride()
        if apart == 0 and list(ids.shape) == shape and ids.stride() == stride:
            return View(path)
        for dim in range(whole.dim()):
            start, rest = divmod(apart, stride[dim] or 1)
            if rest or not 0 <= start < shape[dim]:
                continue
            without = [size for at, size in enumerate(shape) if at != dim]
            if list(ids.shape) == without and ids.stride() == stride[:dim] + stride[dim + 1 :]:
                return View(path, dim, start)
            if ids.dim() == whole.dim() and ids.stride() == stride:
                length = ids.size(dim)
                others = [size for at, size in enumerate(ids.shape) if at != dim]
                if others == without and start + length <= shape[dim]:
                    return View(path, dim, start, length)
    return None
