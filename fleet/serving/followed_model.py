"""Keeps the values of a user's model: its dense parameters in place, and rows by their ids beside it.

What is to become the next version is prepared apart, while forwards go on, and put in place at a moment when none runs.
An embedding of ``fleet.nn`` asks this for its rows, as it asks a job that it trains in; what is a plain parameter, one
of ``torch.nn`` for example, is written to.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.jit._script import RecursiveScriptModule

from fleet.errors import (
    ArgumentTypeError,
    IdOutOfRangeError,
    PlanMismatchError,
    StateError,
    UnsupportedError,
)
from fleet.nn.embedding import BAGS, EMBEDDINGS
from fleet.nn.handle import Lookup, TableHandle, Wanted, handle_of
from fleet.numeric.compiler import uncompiled
from fleet.numeric.ids import bounds, packed_ids, unique
from fleet.numeric.jit import Ids
from fleet.numeric.tensors import dtype_name, kind_of
from fleet.optimizer import is_trained
from fleet.serving.export import table_kind_of
from fleet.serving.kept_rows import KeptRows
from fleet.serving.readers import Readers
from fleet.serving.source import Piece, RowChanges, SourceDescription, TableDescription

_log = logging.getLogger("fleet.serving")

#: Of some ids, which of them a follower keeps.
Share = Callable[[torch.Tensor], Any]


#: Those that have been given values, as long as somebody holds them.
_filled: weakref.WeakSet[FollowedModel] = weakref.WeakSet()


def refuse_followed(params: Iterable[torch.Tensor]) -> None:
    """Refuse to train what is followed: each would write over what the other one has made of it, and rows that a
    follower holds are no table's of a job."""
    wanted = {id(param) for param in params}
    for each in list(_filled):
        if any(id(param) in wanted for param in each.kept()):
            raise StateError(
                "the model is followed: its follower holds its rows, or would write over what training makes of it",
                todo="Call close() of its Follower first, or train a model of its own.",
            )


class FollowedModel:
    """Implements ``Holder`` for a model, and ``RowSource`` for its embeddings."""

    def __init__(self, model: torch.nn.Module, share: Share | None, most_whole_bytes: int) -> None:
        self.most_whole_bytes = most_whole_bytes
        self._model = model
        self._share = share
        self._readers = Readers()
        self._is_closed = False
        #: whether no other version comes
        self.is_final = False
        #: whether the last change was left in the middle, by an error
        self._is_torn = False
        self._is_told_of_fork = False
        self._hooks: list[Any] = []
        self._description = SourceDescription({}, {})
        self._tables: Mapping[str, TableDescription] = {}
        #: what is written to, by its name in the job
        self._dense: dict[str, torch.Tensor] = {}
        self._plain: dict[str, _PlainTable] = {}
        #: whose rows are kept beside the model
        self._handles: dict[str, TableHandle] = {}
        self._kept: dict[str, KeptRows] = {}
        self._names: dict[int, str] = {}

    # ---------------------------------------------------------------- what fits

    def fit(self, source: SourceDescription) -> None:
        named = self._checked_names(source)
        self._description, self._tables = source, source.tables
        self._dense = {name: named[name] for name in source.dense}
        for name, table in source.tables.items():
            handle = handle_of(named[name])
            if handle is not None:
                self._handles[name] = handle
                self._names[id(handle)] = name
            elif self._share is not None:
                raise UnsupportedError(
                    f"rows= cannot be honoured for {name!r}, whose weight has room for all rows",
                    expected="embeddings of fleet.nn, which hold the rows that they are given",
                    todo="Use fleet.nn.Embedding in the model that follows, or leave rows= out.",
                )
            else:
                self._plain[name] = _PlainTable(named[name], table, _padding_of(self._model, named[name]))

    def _checked_names(self, source: SourceDescription) -> dict[str, torch.Tensor]:
        """Return what the model has, by its names; refuse a model that does not fit or is somebody else's."""
        if isinstance(_plain(self._model), RecursiveScriptModule):
            raise UnsupportedError(
                "a scripted model does not tell when its forwards begin and end",
                where=type(self._model).__name__,
                got="what torch.jit.script(model) returned",
                todo="Give follow() the model itself, which shares its parameters; call the scripted one in pinned().",
            )
        named = dict(_plainly_named(self._model))
        self._refuse_taken(named)
        problems = list(_problems(source, named))
        if problems:
            raise PlanMismatchError(
                "the model does not fit what it is to follow",
                where=type(self._model).__name__,
                got="; ".join(problems),
                todo="Build it as in the training, where distributed_optimizer(…, model=model) names what it has.",
            )
        return named

    def _refuse_taken(self, named: Mapping[str, torch.Tensor]) -> None:
        taken = [handle.source for value in named.values() if (handle := handle_of(value)) is not None]
        taken += [
            hook.holder
            for module in self._model.modules()
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, _Begin)
        ]
        for by in taken:
            if isinstance(by, FollowedModel) and not by._is_closed:
                raise StateError("the model is followed already", todo="Call close() of its Follower first.")
        if is_trained(named.values()) or any(by is not None and not isinstance(by, FollowedModel) for by in taken):
            raise StateError(
                "the model belongs to a running job, which keeps it",
                todo="Give follow() a model of its own, built in the same way.",
            )

    # ---------------------------------------------------------------- one version after the other

    def begin(self, whole: bool, version: int) -> Draft:
        """Return what collects the next version."""
        del version
        return Draft(self, self._new_rows() if whole else {}, whole)

    def _new_rows(self) -> dict[str, KeptRows]:
        """Return room for all rows that are kept beside the model."""
        return {name: KeptRows(name, self._tables[name]) for name in self._handles}

    def _refuse_replaced(self) -> None:
        """Raise if the model has other parameters than those that are written to, which would stay as they are. One may
        have another name now, as torch's parametrizations give it."""
        named = dict(_plainly_named(self._model))
        there = {id(value) for value in named.values()}
        written = {**self._dense, **{name: plain.weight for name, plain in self._plain.items()}}
        tables = self._description.tables
        for name, value in written.items():
            shape, dtype = self._description.dense.get(name) or (_shape_of(tables[name]), tables[name].dtype)
            if name in named and named[name] is not value:
                raise _replaced(name, dtype, "another in its place")
            if id(value) not in there:
                raise _replaced(name, dtype, "a model without it")
            if value.dtype != dtype:
                raise _replaced(name, dtype, dtype_name(value.dtype))
            if tuple(value.shape) != shape or value.is_meta or value.layout is not torch.strided:
                raise _replaced(name, dtype, f"one of {tuple(value.shape)} on {value.device}, not of {shape}")
        for name, handle in self._handles.items():
            if name in named and handle_of(named[name]) is not handle:
                raise _replaced(name, tables[name].dtype, "another in its place")

    def _publish(self, draft: Draft) -> bool:
        with self._readers.alone() as may:
            if not may:
                return False
            self._refuse_replaced()  # while nobody has others in their places, as torch.func does
            devices = {value.device for value in self._written() if value.device.type != "cpu"}
            _finish(devices)  # forwards that have ended may not have been computed
            self._is_torn = True
            _filled.add(self)
            self._put(draft)
            _finish(devices)
            self._kept |= draft.kept
            for name, handle in self._handles.items():
                for changes in draft.rows[name]:
                    self._kept[name].change(changes)
                if handle.source is self:
                    handle.forget_values()
                else:
                    handle.name = name
                    handle.attach(self)
            self._is_torn = False
            if not self._hooks:
                self._watch()
        return True

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that are written to, and those whose rows are here: none once it is closed."""
        if not self._is_closed:
            yield from () if self.is_final else self._written()
            yield from (handle.weight for handle in self._handles.values())

    def _put(self, draft: Draft) -> None:
        """Write what is to be read from now on. Nobody reads meanwhile."""
        # So values can be written that were made in inference mode, and others.
        with torch.inference_mode():
            for name, values in draft.dense.items():
                self._dense[name].copy_(values)
            for name, plain in self._plain.items():
                plain.change(draft.rows[name], draft.whole)

    def _written(self) -> Iterator[torch.Tensor]:
        yield from self._dense.values()
        for plain in self._plain.values():
            yield plain.weight

    # ---------------------------------------------------------------- forwards

    def enter(self, module: object) -> None:
        """Let a forward begin, if there is a version to read."""
        self._readers.enter(module)
        if self._readers.is_fork and not (self.is_final or self._is_told_of_fork):
            self._is_told_of_fork = True
            _log.warning(
                "%s is used in a fork of the process that follows its source: it stays at the version of then. Call "
                "fleet.serving.follow() in each process",
                type(self._model).__name__,
            )
        if self._is_torn:
            self._readers.leave(module)
            self._refuse_torn()

    def _refuse_torn(self) -> None:
        if self._is_torn:
            raise StateError(
                "a version could be put in place in part only",
                where=type(self._model).__name__,
                todo="The log says why. It is tried again; a model that stays so has to be made anew.",
            )

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which this thread reads one version."""
        return self._readers.reading()

    @property
    def is_reading(self) -> bool:
        """Say whether this thread is in such a context, or in a forward."""
        return self._readers.is_inside

    def _watch(self) -> None:
        """See forwards begin and end. Hooks of a compiled model are its wrapper's, which is not compiled."""
        plain = _plain(self._model)
        for module in self._model.modules():
            for hook in [*module._forward_pre_hooks.values()]:
                if isinstance(hook, _Begin):
                    hook.holder.unwatch()  # a former one, which left a version in part
            if isinstance(module, RecursiveScriptModule):
                continue  # it has no hooks, and runs inside of the model's forwards
            is_first = module is self._model or module is plain
            begin, end = (_FirstBegin, _FirstEnd) if is_first else (_Begin, _End)
            self._hooks += [
                module.register_forward_pre_hook(begin(self), prepend=True),
                module.register_forward_hook(end(self), always_call=True),
            ]

    def close(self) -> None:
        """Change nothing any more. The model goes on with what it has."""
        self._is_closed = True
        self._readers.close()
        if not self._is_torn:  # else nobody is to read it unawares
            self.unwatch()

    def unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def lookup(self, wanted: Sequence[Wanted]) -> list[Lookup]:
        with self._readers.reading():
            self._refuse_torn()
            return [self._look_up(each) for each in wanted]

    def _look_up(self, wanted: Wanted) -> Lookup:
        ids, places = unique(packed_ids(wanted.ids.detach().reshape(-1).cpu().numpy()))
        if ids.size:
            wanted.handle.check_range(*bounds(ids))
            self._check_share(wanted, ids)
        rows = self._kept[self._names[id(wanted.handle)]].rows(ids)
        return Lookup(torch.from_numpy(ids), rows, torch.from_numpy(places))

    def _check_share(self, wanted: Wanted, ids: Ids) -> None:
        if self._share is None:
            return
        others = ids[~kept_of(self._share, ids)]
        others = others[others != wanted.padding_idx] if wanted.padding_idx is not None else others
        if others.size:
            raise IdOutOfRangeError(
                f"an id is not in the share of {wanted.handle.name!r} that is kept here",
                expected="ids for which rows= says True",
                got=int(others[0]),
            )

    def whole(self, handle: TableHandle) -> torch.Tensor:
        if self._share is not None:
            raise UnsupportedError(f"all rows of {handle.name!r} were asked for, and with rows= only some are here")
        with self._readers.reading():
            return self._kept[self._names[id(handle)]].all()

    def averaged(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        """Return nothing: nobody trains here."""
        del ids, values
        return None


def kept_of(share: Share, ids: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each id whether it is kept. The function has a copy of them, which it may change."""
    kept = share(torch.from_numpy(ids.copy()))
    found: np.ndarray[Any, Any] | None = None
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # what is no array
        found = kept.detach().cpu().numpy() if isinstance(kept, torch.Tensor) else np.asarray(kept)
    if found is None or found.dtype != np.bool_ or found.shape != ids.shape:
        raise ArgumentTypeError(
            "rows= must return for each id whether it is kept",
            expected=f"a tensor of bool of shape {ids.shape}",
            got=type(kept).__name__ if found is None else f"{found.dtype} {found.shape}",
        )
    return found


def _finish(devices: set[torch.device]) -> None:
    """Wait for what these devices have been given to do."""
    for device in devices:
        getattr(torch, device.type).synchronize(device)


class Draft:
    """Collects what leads to the next version, where it will be needed."""

    def __init__(self, holder: FollowedModel, kept: dict[str, KeptRows], whole: bool) -> None:
        self.whole = whole
        self.dense: dict[str, torch.Tensor] = {}
        self.rows: defaultdict[str, list[RowChanges]] = defaultdict(list)
        self.kept = kept
        self._holder = holder

    def add(self, piece: Piece) -> None:
        for name, values in piece.dense.items():
            place = self._holder._dense.get(name)
            if place is None or (tuple(values.shape), values.dtype) != self._holder._description.dense[name]:
                raise _misfit(name)
            self.dense[name] = values.to(place.device)
        for name, changes in piece.rows.items():
            changes = self._checked(name, changes)
            if name in self.kept:
                self.kept[name].change(changes)
            else:
                self.rows[name].append(changes)

    def _checked(self, name: str, changes: RowChanges) -> RowChanges:
        table = self._holder._tables.get(name)
        if table is None or not table.fits(changes):
            raise _misfit(name)
        if self._holder._share is not None and changes.ids.size:
            kept = kept_of(self._holder._share, packed_ids(changes.ids))
            changes = RowChanges(changes.ids[kept], changes.values[torch.from_numpy(kept)], changes.gone)
        plain = self._holder._plain.get(name)
        return changes if plain is None else plain.placed(changes)

    def publish(self) -> bool:
        """Make all of it what is read, at one moment; return whether that was still wanted."""
        if self.whole and (lacking := self._holder._dense.keys() - self.dense.keys()):
            raise _misfit(min(lacking))
        return self._holder._publish(self)


def _shape_of(table: TableDescription) -> tuple[int, ...]:
    """Return the shape of a weight that has room for all rows."""
    assert table.num_embeddings is not None
    return table.num_embeddings, table.embedding_dim


def _replaced(name: str, dtype: torch.dtype, got: str) -> StateError:
    return StateError(
        f"{name!r} of the model is not what was followed",
        expected=f"the same parameter, of {dtype_name(dtype)}",
        got=got,
        todo="Change a model before follow() is called; or close() its Follower, and follow it anew.",
    )


def _misfit(name: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"the source gives something for {name!r} that it has not described", todo="Follow it anew, with its model."
    )


class _PlainTable:
    """Writes rows to a weight that has room for all of them."""

    def __init__(self, weight: torch.Tensor, table: TableDescription, padding: Sequence[int]) -> None:
        self.weight = weight
        self._mean = table.mean
        self._padding = padding

    def placed(self, changes: RowChanges) -> RowChanges:
        """Return the changes with the rows where the weight is."""
        return RowChanges(changes.ids, changes.values.to(self.weight.device), changes.gone)

    def change(self, changes: Sequence[RowChanges], whole: bool) -> None:
        if whole:
            self.weight.fill_(self._mean)
            self._clear(self._padding)
        for each in changes:
            if each.gone.size:
                self.weight.index_fill_(0, torch.from_numpy(each.gone).to(self.weight.device), self._mean)
                self._clear([idx for idx in self._padding if idx in each.gone])
            if each.ids.size:
                place = self.weight.device  # another one maybe than when the rows came
                self.weight.index_copy_(0, torch.from_numpy(each.ids).to(place), each.values.to(place))

    def _clear(self, padding: Sequence[int]) -> None:
        """Have padding without a row read as zeros."""
        for idx in padding:
            self.weight[idx].zero_()


def _padding_of(model: torch.nn.Module, weight: torch.Tensor) -> list[int]:
    users: list[Any] = [each for each in model.modules() if isinstance(each, EMBEDDINGS + BAGS)]
    return [each.padding_idx for each in users if each.weight is weight and each.padding_idx is not None]


# ---------------------------------------------------------------------------------------------- what fits


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that was compiled, or the model itself."""
    plain: torch.nn.Module = getattr(model, "_orig_mod", model)
    return plain


def _plainly_named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by the names that they have in a model that is not compiled."""
    plain = _plain(model)
    yield from plain.named_parameters(remove_duplicate=False)
    yield from plain.named_buffers(remove_duplicate=False)


def _problems(source: SourceDescription, named: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield what keeps a model from following, in words."""
    there = {name: f"{dtype_name(dtype)} {tuple(shape)}" for name, (shape, dtype) in source.dense.items()}
    for name, table in source.tables.items():
        there[name] = table_kind_of(table.dtype, table.num_embeddings, table.embedding_dim)
    found: dict[int, str] = {}
    own = []
    for name in sorted(there.keys() & named.keys()):
        first = found.setdefault(id(named[name]), name)
        if first != name:
            yield f"{name!r}: a parameter of its own in the source, the same as {first!r} in the model"
    for name in sorted(there.keys() | named.keys()):
        value = named.get(name)
        here = "absent" if value is None else _kind_here(value, name in source.tables)
        if name in there and here != there[name]:
            yield f"{name!r}: {there[name]} in the source, {here} in the model"
        elif value is not None and name in there and (value.is_meta or value.layout is not torch.strided):
            yield f"{name!r}: on the meta device, or not dense, in the model"
        elif value is not None and name not in there and id(value) not in found:
            if value.requires_grad or handle_of(value) is not None:
                yield f"{name!r}: absent in the source, {here} in the model"
            elif isinstance(value, torch.nn.Parameter):
                own.append(name)
    if own:
        _log.info("not in the source, and not to be trained, so they stay the model's own: %s", ", ".join(own))


def _kind_here(value: torch.Tensor, takes_rows: bool) -> str:
    handle = handle_of(value)
    if handle is not None:
        return table_kind_of(value.dtype, handle.num_embeddings, handle.dim)
    if takes_rows and value.dim() == 2:
        return table_kind_of(value.dtype, len(value), value.shape[1])
    return kind_of(value)


# ---------------------------------------------------------------------------------------------- hooks


def _nothing(*_: Any) -> None:
    """Stand for a hook in a copy of the model, which nobody keeps fresh."""


class _Hook:
    """Is called when a module is. A compiled forward goes without, since it runs inside of the model's."""

    def __init__(self, holder: FollowedModel) -> None:
        self.holder = holder
        self._readers = holder._readers

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _hook_of_copy, ()


def _hook_of_copy() -> Any:
    return _nothing


class _Begin(_Hook):
    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            self.holder.enter(module)


class _End(_Hook):
    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._readers.leave(module)


class _FirstBegin(_Begin):
    """Is called when the model is, compiled or not."""

    @uncompiled
    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        self.holder.enter(module)


class _FirstEnd(_End):
    @uncompiled
    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        self._readers.leave(module)
