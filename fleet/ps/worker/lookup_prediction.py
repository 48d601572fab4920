"""Predicts what a forward will look up: a model that asks table by table then sends one request for all.

Most models take the ids of each table straight out of their input: ``batch["user"]``, ``ids[:, 3]``. A forward shows
which: each tensor it looks up is compared with those it was called with. The next one asks for all of them before it
begins, and its look-ups find the rows there. Every part of a model is watched that has tables in it, as it need not be
called as a whole, and what it makes of its input may be what a part of it is called with. Nothing depends on the guess:
a look-up uses what was fetched for exactly its ids, and asks by itself otherwise. A part of which nothing can be
predicted, or too often what does not come, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from fleet.base.turns import PerThread, Turns
from fleet.errors import UnsupportedError
from fleet.nn import EmbeddingGroup
from fleet.nn.embedding import is_remote, looks_up_as
from fleet.nn.handle import Wanted
from fleet.numeric.compiler import uncompiled
from fleet.ps.worker.lookups import Prefetched

#: So many guesses may be wrong, and one more for each ``1 / RECOVERY`` that are right.
PATIENCE, RECOVERY = 3, 0.01

#: After so many forwards in a row of which nothing could be predicted, nobody looks at further ones.
HOPE = 20

#: What is seen of a forward is kept as long as it weighs no more than this, in ids; a look-up weighs some by itself.
MOST_IDS, IDS_OF_ONE = 1 << 24, 1 << 8

#: Stands for ids that are not kept.
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")

#: Arguments are searched so deep, and collections of so many entries.
DEPTH, WIDTH = 6, 1000


#: What tells a look-up from others.
Identity: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class View:
    """Names part of an input: all of it, or of one dimension an index (no ``length``) or a range."""

    path: tuple[Any, ...]
    dim: int | None = None
    start: int = 0
    length: int | None = None

    def of(self, inputs: Inputs) -> torch.Tensor | None:
        """Return the part of these inputs; None if they have no such part."""
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
    """Describes a look-up that is expected of a forward."""

    wanted: Wanted  #: but for the ids, of which it has none, and their weights
    view: View


@dataclass
class Known:
    """Records what is known of a part of a model, in training or in evaluation."""

    plan: list[Expected] = field(default_factory=list)
    credit: float = PATIENCE
    in_vain: int = 0

    @property
    def is_hopeless(self) -> bool:
        return self.credit <= 0 or self.in_vain >= HOPE

    def judge(self, *, was_right: bool) -> None:
        self.credit = min(PATIENCE, self.credit + RECOVERY) if was_right else self.credit - 1


@dataclass
class Forward:
    """Follows a forward that runs."""

    module: torch.nn.Module
    known: Known
    inputs: Inputs
    expected: list[Wanted] = field(default_factory=list)
    fetched: Mapping[int, Prefetched] = field(default_factory=dict)
    #: the look-ups of every request, each with what tells it from others
    seen: list[Sequence[tuple[Wanted, Identity]]] = field(default_factory=list)
    weight: int = 0


class LookupPrediction:
    """Hangs on a model while its job runs. ``fetch`` asks for what a forward will look up; ``forget`` is called when
    the forward has ended, or with None for everything that was ever fetched."""

    def __init__(
        self,
        model: torch.nn.Module,
        turns: Turns,
        fetch: Callable[[Sequence[Wanted]], Mapping[int, Prefetched]],
        forget: Callable[[Mapping[int, Prefetched] | None], None],
    ) -> None:
        self._turns = turns
        self._fetch = fetch
        self._forget = forget
        self._known: WeakKeyDictionary[torch.nn.Module, dict[bool, Known]] = WeakKeyDictionary()
        self._forwards = PerThread[Forward]()
        self._hooks: WeakKeyDictionary[torch.nn.Module, Sequence[RemovableHandle]] = WeakKeyDictionary()
        for module in _parts(model):
            self._hooks[module] = (
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._end, always_call=True),
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> LookupPrediction:
        return _blind()  # a copy of the model has its rows for itself

    def __reduce__(self) -> Any:
        if self._is_blind:
            return _blind, ()
        raise UnsupportedError(
            "a model cannot be pickled while it trains in a job: its tables live on the servers",
            todo="Pickle copy.deepcopy(model), which holds the values, or save model.state_dict(), or the job with "
            "fleet.save_persistables(dirname).",
        )

    @property
    def _is_blind(self) -> bool:
        return self._fetch is _fetch_nothing

    @property
    def _running(self) -> list[Forward]:
        """Return this thread's forwards, each inside the one before."""
        return self._forwards.list

    def remove(self) -> None:
        for module in list(self._hooks):
            self._leave_alone(module)

    def observe(self, wanted: Sequence[Wanted]) -> None:
        """Note a request that looks these up."""
        if not self._running:
            return
        plain = [(each, _identity(each)) for each in wanted if _is_plain(each.ids)]
        for forward in self._running:
            forward.seen.append(plain)
        outermost = self._running[0]
        outermost.weight += IDS_OF_ONE + sum([each.ids.numel() for each, _ in plain])
        if outermost.weight > MOST_IDS:
            self._stop(0)

    def clear(self) -> None:
        """Forget all forwards: none runs. Hooks do not see each way in which a forward can end, so one may be thought
        to run."""
        self._running.clear()
        self._forget(None)

    @uncompiled
    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._watches():
            with self._turns.take():
                self._predict(module, args, kwargs)

    def _predict(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not self._running:
            self._forget(None)
        known_of = self._known.setdefault(module, {})
        known = known_of.setdefault(module.training, Known())
        place = self._place(module)
        if place is not None:  # a forward inside of this one's, or one that was interrupted
            known.judge(was_right=False)
            self._stop(place)
        if known.is_hopeless:
            if all(each.is_hopeless for each in known_of.values()):
                self._leave_alone(module)
            return
        forward = Forward(module, known, dict(_tensors((args, kwargs))))
        self._running.append(forward)
        for each in known.plan:
            ids = each.view.of(forward.inputs)
            if ids is not None:
                forward.expected.append(each.wanted._replace(ids=ids))
        if forward.expected:
            forward.fetched = self._fetch(forward.expected)

    @uncompiled
    def _end(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._watches():
            with self._turns.take():
                self._look_back(module, output)

    def _watches(self) -> bool:
        """Say whether this forward looks rows up: a forked child asks for each table by itself, and what torch.func
        transforms is given all values of a table, while ids may stand for others there."""
        return not self._turns.is_fork and not torch._C._are_functorch_transforms_active()

    def _look_back(self, module: torch.nn.Module, output: Any) -> None:
        place = self._place(module)
        if place is None:
            return
        forward = self._running[place]
        self._stop(place)
        if output is None:  # it failed on its way, and shows nothing
            return
        known, seen = forward.known, [each for request in forward.seen for each in request]
        found, expected = [identity for _, identity in seen], list(map(_identity, forward.expected))
        is_as_expected = found == expected
        if expected:
            known.judge(was_right=is_as_expected or {*expected} <= {*found})
        if is_as_expected:
            return
        known.plan = []
        if len(forward.seen) > 1:
            views = [(each, _view(each.ids, forward.inputs)) for each, _ in seen]
            known.plan = [Expected(each._replace(ids=_NO_IDS, weights=None), view) for each, view in views if view]
        known.in_vain = 0 if known.plan else known.in_vain + 1

    def _place(self, module: torch.nn.Module) -> int | None:
        """Return the place of the module's forward among those that run."""
        return next((place for place, forward in enumerate(self._running) if forward.module is module), None)

    def _stop(self, place: int) -> None:
        """Keep nothing of a forward that is over, nor of what ran inside it, least of all inputs."""
        over = self._running[place:]
        del self._running[place:]
        for forward in over:
            self._forget(forward.fetched)

    def _leave_alone(self, module: torch.nn.Module) -> None:
        for hook in self._hooks.pop(module, ()):
            hook.remove()


def _blind() -> LookupPrediction:
    """Stand in its place in a model that is in no job."""
    return LookupPrediction(torch.nn.Module(), Turns(), _fetch_nothing, lambda _: None)


def _fetch_nothing(_: Sequence[Wanted]) -> Mapping[int, Prefetched]:
    return {}


def _parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model itself, and the parts of it that have tables, except those that send one request in any case."""
    return [
        module
        for module in model.modules()
        if looks_up_as(module) is None
        and type(module) is not EmbeddingGroup
        and (module is model or any(map(is_remote, module.modules())))
    ]


Inputs = Mapping[tuple[Any, ...], torch.Tensor]


def _identity(wanted: Wanted) -> Identity:
    ids = wanted.ids
    return id(wanted.handle), wanted.training, ids.data_ptr(), ids.shape, ids.stride()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor lies in memory as its shape and strides say: others cannot be compared."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _tensors(inputs: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield the tensors of ids among a model's arguments, with the way to each."""
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
    """Return which part of which input ``ids`` is, judged by where they lie in memory."""
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
