"""Defines ``Embedding`` and ``EmbeddingBag`` whose rows live on the servers, and turns torch's own into such.

They follow ``torch.nn``; what is different is that rows come into being when their id is first trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex, cast

import torch
import torch.nn.functional as F

from fleet.base import checks
from fleet.errors import ArgumentTypeError, ConfigurationError, UnsupportedError
from fleet.nn.expand import Bags, embedded, found_for, pool
from fleet.nn.handle import Found, TableHandle, Wanted, handle_in, handle_of, kind_of, padding_index
from fleet.nn.jagged import are_alike, bag_parts, flat, like
from fleet.nn.table_weight import TableWeight, of_wrapped
from fleet.plan.life import Admission, Eviction, goes_by_weight, rules_of
from fleet.plan.specs import Initializer

#: What may be given as ``evict=``.
Evictions = Eviction | Sequence[Eviction] | None


def _remote_weight(
    num_embeddings: int | None,
    embedding_dim: int,
    initializer: str | None,
    padding_idx: int | None,
    admit: Admission | None,
    evict: tuple[Eviction, ...],
) -> torch.nn.Parameter:
    for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
        optional = name == "num_embeddings" and value is None
        if not optional and checks.integer(name, value) < 1:
            raise ConfigurationError(f"{name} must be positive", got=value)
    padding = padding_index(padding_idx, num_embeddings)
    weight = torch.nn.Parameter(torch.empty(0, embedding_dim))
    TableHandle(
        weight,
        num_embeddings,
        embedding_dim,
        Initializer.parse(initializer),
        padding_idx=padding,
        admit=admit,
        evict=evict,
    )
    return weight


def asking(module: Any, ids: torch.Tensor, weights: torch.Tensor | None = None) -> Wanted | None:
    """Return what the forward of a remote embedding asks for; None if its weight is a plain one, for which torch's
    forward is meant."""
    if weights is not None:
        _check_weights(module, ids, weights)
    weight, ids, weights = module.weight, flat(ids), flat(weights)
    if not isinstance(weight, TableWeight):
        return None
    handle = handle_in(weight)
    if isinstance(module, Embedding | EmbeddingBag) and (module.admit, module.evict) != (handle.admit, handle.evict):
        raise ConfigurationError(
            f"a module that uses the table {handle.name!r} has other rules for its rows than the table",
            where=f"{type(module).__name__}({module.extra_repr()})",
            expected=_said(handle.admit, handle.evict) or "none",
            got=_said(module.admit, module.evict) or "none",
            todo="Give the same admit= and evict= to all modules that share a weight.",
        )
    padding = module.padding_idx
    if padding is not None and padding < 0:  # set later: what is given to embeddings is a place already
        padding = padding_index(padding, module.num_embeddings)
    return Wanted(handle, ids, module.training, padding, isinstance(module, EMBEDDINGS), weights)


def _check_weights(module: Any, ids: torch.Tensor, weights: object) -> None:
    """Refuse weights of look-ups that do not fit, or that nothing would go by."""
    if not isinstance(weights, torch.Tensor) or weights.dtype is torch.bool or weights.is_complex():
        raise ArgumentTypeError("weights= needs a tensor of numbers, one for each id", got=kind_of(weights))
    if not are_alike(ids, weights) or flat(weights).shape != flat(ids).shape:
        raise ConfigurationError(
            "weights= does not fit the ids", expected=f"shape {tuple(ids.shape)}", got=f"shape {tuple(weights.shape)}"
        )
    if not goes_by_weight(getattr(module, "admit", None), getattr(module, "evict", ())):
        raise ConfigurationError(
            "weights= was given to an embedding whose rules do not go by weights",
            where=f"{type(module).__name__}({module.extra_repr()})",
            expected='admit=fleet.nn.CountFilter(n, of="weight") or evict=fleet.nn.MaxRows(n, by="weight")',
            todo="Leave weights= out, or give the embedding such a rule. What scales rows in a sum is "
            "per_sample_weights= of an EmbeddingBag.",
        )


def _said(admit: Admission | None, evict: tuple[Eviction, ...]) -> str:
    """Return rules as arguments."""
    said = [] if admit is None else [f"admit={admit}"]
    if evict:
        said.append(f"evict={list(evict) if len(evict) > 1 else evict[0]}")
    return ", ".join(said)


def _asked(module: Any, ids: torch.Tensor, weights: torch.Tensor | None = None) -> Wanted | None:
    """Return the same, unless torch's own functions are to see all the values; refuse what a table cannot do."""
    asked = asking(module, ids, weights)
    if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        _refuse_hollow(module, "traced or exported")
    if asked is None:
        return None
    check_options(module, asked.handle.name)
    if torch._C._are_functorch_transforms_active():
        if weights is not None:
            raise UnsupportedError(
                f"weights= of the table {asked.handle.name!r} cannot be counted inside a transform of torch.func",
                todo="Look the rows up outside of it.",
            )
        return None  # they follow what torch's own functions do with all the values
    return asked


def _refuse_hollow(module: Any, what: str) -> None:
    """Refuse to make a program of a weight that holds nothing, or of what the compiler has put in its place."""
    if 0 in module.weight.stride():
        raise UnsupportedError(
            f"a model with tables cannot be {what} while it trains in a job: their rows are on the servers",
            where=f"{type(module).__name__}({module.extra_repr()})",
            todo="fleet.save_inference_model(dirname, model, example_inputs) writes a program that has them; or take a "
            "copy.deepcopy(model), which holds the values.",
        )


@contextmanager
def _with_values(module: torch.nn.Module) -> Iterator[None]:
    """Let a module whose weight stands for no table compute with the values of one that ``torch.func`` has wrapped."""
    given = module._parameters.get("weight")
    if given is None or not torch._C._are_functorch_transforms_active():
        yield
        return
    module._parameters["weight"] = of_wrapped(given)  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters["weight"] = given


def _sizes(module: Any) -> str:
    size = "any id" if module.num_embeddings is None else module.num_embeddings
    padding = "" if module.padding_idx is None else f", padding_idx={module.padding_idx}"
    rules = _said(module.admit, module.evict)
    return f"{size}, {module.embedding_dim}{padding}{rules and ', '}{rules}"


class _Remote(torch.nn.Module):
    """Holds what all embeddings have in common whose ``weight`` may stand for a table. Where it is an ordinary
    parameter (a copy of the model has one, and so has ``functional_call``), they do what torch's do with it."""

    def __prepare_scriptable__(self) -> Any:
        _refuse_hollow(self, "scripted")
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Follow the model to another device: the weight does, of which there is nothing to be moved."""
        weight, apply = self._parameters["weight"], cast(Any, super())._apply
        if not isinstance(weight, TableWeight):
            return apply(fn, recurse)
        self._parameters["weight"] = None
        try:
            apply(fn, recurse)
        finally:
            self._parameters["weight"] = weight
        handle_in(weight).convert(fn)
        return self


class Embedding(_Remote):
    """Rows for ids, as ``torch.nn.Embedding``.

    ``weight`` has its shape, or ``(0, embedding_dim)`` where there is no end of rows, and holds none of them: what
    needs all of them fetches them.

    ``num_embeddings=None`` takes any int64 id. ``initializer`` is ``"zeros"``, ``"constant(1.0)"``,
    ``"uniform(-0.01, 0.01)"``, ``"normal(0, 0.01)"``, or None for torch's own, ``normal(0, 1)``.

    ``admit`` says which ids get a row (``fleet.nn.CountFilter``, ``Probability``), ``evict`` which rows leave again
    (``Unused``, ``MaxRows``, ``SmallNorm``, or a list of them). Where a rule goes by weights, a forward takes them as
    ``weights=``, one for each id; they say how much each look-up counts, and are 1 each unless given.

    Examples:
        >>> users = fleet.nn.Embedding(None, 8, initializer="uniform(-0.01, 0.01)")
        >>> users.weight.shape  # rows are on the servers
        torch.Size([0, 8])
        >>> fleet.nn.Embedding(None, 8, admit=fleet.nn.CountFilter(3), evict=fleet.nn.Unused(steps=10_000))
        Embedding(any id, 8, admit=CountFilter(3), evict=Unused(steps=10000))
        >>> model[0](torch.tensor([[2**40, -7]])).shape  # of a running job
        torch.Size([1, 2, 4])
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        initializer: str | None = None,
        admit: Admission | None = None,
        evict: Evictions = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.admit, self.evict = rules = rules_of(admit, evict)
        self.weight = _remote_weight(num_embeddings, embedding_dim, initializer, padding_idx, *rules)
        self.padding_idx = padding_index(padding_idx, num_embeddings)

    def forward(self, ids: torch.Tensor, *, weights: torch.Tensor | None = None) -> torch.Tensor:
        asked = _asked(self, ids, weights)
        if asked is None:
            with _with_values(self):
                return F.embedding(ids, self.weight, self.padding_idx)
        return like(ids, embedded([asked])[0])

    def extra_repr(self) -> str:
        return _sizes(self)


class EmbeddingBag(_Remote):
    """Sums up rows or takes their mean, as ``torch.nn.EmbeddingBag`` does: 2-D input, or 1-D input with ``offsets``.
    ``admit``, ``evict`` and ``weights=`` are those of ``fleet.nn.Embedding``; ``weights`` change no sum, which is what
    ``per_sample_weights`` does.

    Examples:
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> bag = fleet.nn.EmbeddingBag(None, 4, mode="sum", initializer="constant(0.5)")
        >>> optimizer = fleet.distributed_optimizer(torch.optim.SGD(bag.parameters(), lr=0.1), model=bag)
        >>> fleet.init_worker()
        >>> bag(torch.tensor([[7, 8, 9]]))
        tensor([[1.5000, 1.5000, 1.5000, 1.5000]], ...)
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        mode: str = "mean",
        padding_idx: int | None = None,
        initializer: str | None = None,
        include_last_offset: bool = False,
        admit: Admission | None = None,
        evict: Evictions = None,
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise UnsupportedError(f"EmbeddingBag's mode {mode!r} cannot be honoured", expected="'sum' or 'mean'")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.admit, self.evict = rules = rules_of(admit, evict)
        self.weight = _remote_weight(num_embeddings, embedding_dim, initializer, padding_idx, *rules)
        self.padding_idx = padding_index(padding_idx, num_embeddings)

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        *,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        asked = _asked(self, ids, weights)
        if asked is None:
            options = {"mode": self.mode, "include_last_offset": self.include_last_offset}
            with _with_values(self):
                return F.embedding_bag(
                    ids,
                    self.weight,
                    offsets,
                    per_sample_weights=per_sample_weights,
                    padding_idx=self.padding_idx,
                    **options,  # type: ignore[arg-type]
                )
        return _bag(self, ids, found_for(asked), offsets, per_sample_weights)

    def extra_repr(self) -> str:
        return f"{_sizes(self)}, mode={self.mode!r}"


def _bag(
    module: Any,
    ids: torch.Tensor,
    found: Found,
    offsets: torch.Tensor | None,
    per_sample_weights: torch.Tensor | None,
) -> torch.Tensor:
    padding = found.padding
    offsets, per_sample_weights, has_last_offset = bag_parts(module, ids, offsets, per_sample_weights)
    if not len(found.rows):
        found = found._replace(rows=F.pad(found.rows, (0, 0, 0, 1)))  # torch wants a row even where no bag has one
    elif padding is None and module.padding_idx is not None and per_sample_weights is not None:
        # Weighted sums are rounded otherwise by torch where there is a padding index, be it in a bag or not.
        padding = len(found.rows)
        found = found._replace(rows=F.pad(found.rows, (0, 0, 0, 1)))
    return pool(found, Bags(offsets, module.mode, per_sample_weights, has_last_offset, padding))


class _WentRemote(_Remote):
    """Is what has the class of torch's, or of a user's, that it had before it went remote, but for what is here."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Copy the module. A copy that holds its values is of the class that it was: torch's quantization and others go
        by ``type(module)``, and what is saved of the copy names no class of this package."""
        kind = type(self)
        copied: torch.nn.Module = kind.__new__(kind)
        memo[id(self)] = copied
        for name, value in list(vars(self).items()):
            copied.__dict__[name] = copy.deepcopy(value, memo)
        was = next((each for each, remote in _REMOTE.items() if remote is kind), None)
        if was is not None and not isinstance(copied.weight, TableWeight):
            del copied.__dict__["__module__"]  # see make_remote
            copied.__class__ = was
        return copied


class _RemoteEmbedding(_WentRemote, torch.nn.Embedding):
    """Is a ``torch.nn.Embedding`` that went remote. Until its job is there it works on its own values.
    Scripts may name what they give ``forward`` as torch does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        asked = _asked(self, input)
        if asked is None:
            with _with_values(self):
                return super().forward(input)
        return like(input, embedded([asked])[0])


class _RemoteEmbeddingBag(_WentRemote, torch.nn.EmbeddingBag):
    """Is a ``torch.nn.EmbeddingBag`` that went remote."""

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        asked = _asked(self, input)
        if asked is None:
            with _with_values(self):
                return super().forward(input, offsets, per_sample_weights)
        return _bag(self, input, found_for(asked), offsets, per_sample_weights)


#: What torch's classes become, and others that begin in their own way and look rows up as torch's do.
_REMOTE: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.Embedding: _RemoteEmbedding,
    torch.nn.EmbeddingBag: _RemoteEmbeddingBag,
}

#: Every class that can stand in front of a table, before it went remote and after.
EMBEDDINGS = (Embedding, _RemoteEmbedding, torch.nn.Embedding)
BAGS = (EmbeddingBag, _RemoteEmbeddingBag, torch.nn.EmbeddingBag)

#: What a class may have of its own and do nothing but look up.
_BEGINNING = {"__init__", "reset_parameters", "extra_repr", "__constants__"}
#: What Python gives a class.
_OF_PYTHON = {*vars(type("", (), {"__annotations__": {}})), "__firstlineno__", "__static_attributes__", "__annotate__"}


def is_remote(module: object) -> bool:
    return isinstance(module, Embedding | EmbeddingBag | _RemoteEmbedding | _RemoteEmbeddingBag)


def looks_up_as(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """Return the class of torch's or Fleet's as which an embedding looks rows up, if it does nothing else: that is its
    own, or one that it differs from in how it begins alone."""
    for kind in type(module).__mro__:
        if kind in EMBEDDINGS or kind in BAGS:
            return kind
        if kind not in _REMOTE.values() and not vars(kind).keys() <= _BEGINNING | _OF_PYTHON:
            return None
    return None


def _remote_kind(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return what a class becomes that looks up as one of torch's does."""
    if kind not in _REMOTE:
        (of_torch,) = {base for base in (torch.nn.Embedding, torch.nn.EmbeddingBag) if issubclass(kind, base)}
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduced}
        _REMOTE[kind] = type(kind.__name__, (_REMOTE[of_torch], kind), named)
    return _REMOTE[kind]


def _reduced(module: torch.nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
    """Say how a copy is made: its class is found by the one that it was made of."""
    made = object.__reduce_ex__(module, protocol)
    return (_blank, (type(module).__bases__[1],), *made[2:])


def _blank(kind: type[torch.nn.Module]) -> torch.nn.Module:
    remote = _remote_kind(kind)
    return remote.__new__(remote)


#: How an embedding is kept on the workers.
_STAYS = "let it stay: sparse=False without remote=, or a function as remote= that says False for it"


def check_remote(module: torch.nn.Module, name: str) -> None:
    """Refuse a ``torch.nn`` embedding that a remote table could not stand in for."""
    kind = type(module)
    if issubclass(kind, Embedding | EmbeddingBag):
        return
    if looks_up_as(module) is None:
        raise UnsupportedError(
            f"{name!r} is a {kind.__name__}, which may do more than look up, and cannot go remote",
            expected="torch.nn.Embedding or torch.nn.EmbeddingBag, or a class that has no more than another __init__",
            todo=f"Use those or fleet.nn.Embedding, or {_STAYS}.",
        )
    check_options(module, name)


def refuse_idle_rules(module: torch.nn.Module, name: str) -> None:
    """Refuse to train a copy that was made in a running job, and holds all rows as an ordinary parameter does, where it
    has rules for which rows there are."""
    if not isinstance(module, Embedding | EmbeddingBag) or isinstance(module.weight, TableWeight):
        return
    if module.admit is not None or module.evict:
        raise UnsupportedError(
            f"{name!r} is a copy that holds all its rows, and has rules for which rows there are",
            got=_said(module.admit, module.evict),
            todo="Make a new module; fleet.load_persistables(dirname) gives it the rows of a checkpoint.",
        )


def check_options(module: Any, name: str) -> None:
    """Refuse what a remote table could not do, whenever it was asked for."""
    options = vars(module)
    if options.get("max_norm") is not None:
        option = "max_norm"
    elif options.get("scale_grad_by_freq"):
        option = "scale_grad_by_freq"
    elif options.get("mode") == "max":
        option = "mode='max'"
    else:
        return
    raise UnsupportedError(f"{option} of {name!r} cannot be honoured by a remote table", todo=f"Unset it, or {_STAYS}.")


def make_remote(module: torch.nn.Module) -> None:
    """Turn a ``torch.nn`` embedding into a remote one, in place: the module and its ``weight``
    keep their identity, and the class stays a subclass of what it was."""
    source: Any = module
    if not is_remote(module):
        module.__class__ = _remote_kind(type(module))
        # Of the module alone, since a class is pickled by its own: torch.fx takes as a whole what says that it is
        # torch's, with the hooks of a user, which would see no values while it is traced.
        module.__module__ = torch.nn.Embedding.__module__
    # Two modules that share a weight share its table.
    if handle_of(source.weight) is None:
        TableHandle(
            source.weight,
            int(source.num_embeddings),  # torch takes numpy's integers too
            int(source.embedding_dim),
            Initializer("normal", 0.0, 1.0),
            padding_idx=source.padding_idx,
            zero_padding=isinstance(module, Embedding | EmbeddingBag),
            uploaded=True,
        )
