"""Describes what is trained, as values: parameters, tables, and the optimizer groups they belong to.

A ``JobSpec`` is everything that every process of a job must agree on. It is made from the user's model and
optimizer by the worker, travels as JSON in the first hello, and is all a server ever learns about the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from fleet.errors import ConfigurationError, ProtocolError
from fleet.plan.dispatch import DISPATCHERS
from fleet.plan.life import KINDS, Admission, Eviction, MaxRows, Unused, goes_by_weight, named_twice

#: Element types that travel, with their size in bytes.
DTYPES: Mapping[str, int] = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}

#: Element types a sparse table may have: those the row kernels compute in.
TABLE_DTYPES = ("float32", "float64")

#: What gradients may travel in, if not in the element type of their parameter.
WIRE_DTYPES = ("bf16", "fp16", "int8")

#: Where dense parameters are trained: on the servers, or on every worker, on gradients that these average.
DENSE = SERVERS, ALL_REDUCE = "servers", "all_reduce"

#: Initializers, with how many numbers each takes.
INITIALIZERS: Mapping[str, int] = {"zeros": 0, "constant": 1, "uniform": 2, "normal": 2}

#: Beyond these a description is a mistake or an attack, and memory for it is not even tried.
MOST_PROCESSES, _MOST_COLUMNS, _MOST_ELEMENTS = 1 << 16, 1 << 16, 1 << 48
_MOST_VALUES, _MOST_TABLES, _MOST_BLOCKS, _MOST_DIMENSIONS = 1 << 20, 1 << 14, 1 << 20, 64
#: JSON has whole numbers that no float can hold.
_MOST_FLOAT = math.nextafter(math.inf, 0)


@dataclass(frozen=True)
class ParamSpec:
    """Describes one dense parameter. ``group`` indexes ``JobSpec.groups``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Initializer:
    """Says how the first value of a row is made: ``kind`` and its two numbers.

    zeros; constant(a); uniform(a, b) on [a, b); normal(a = mean, b = standard deviation).
    """

    kind: str
    a: float = 0.0
    b: float = 0.0

    @property
    def mean(self) -> float:
        """Return what an id that was never trained reads in evaluation."""
        return (self.a + self.b) / 2 if self.kind == "uniform" else self.a

    @classmethod
    def parse(cls, text: str | None) -> Initializer:
        """Read ``"zeros"``, ``"constant(1.0)"``, ``"uniform(-0.01, 0.01)"``, ``"normal(0, 0.01)"``; None is torch's."""
        if text is None:
            return cls("normal", 0.0, 1.0)
        kind, paren, rest = str(text).strip().partition("(")
        kind = kind.strip()
        try:
            if paren and not rest.rstrip().endswith(")"):
                raise ValueError
            inside = rest.rstrip()[:-1].strip()
            numbers = [float(part) for part in inside.split(",")] if inside else []
            if INITIALIZERS[kind] != len(numbers) or not all(math.isfinite(x) for x in numbers):
                raise ValueError
            if kind == "uniform" and numbers[0] > numbers[1]:
                raise ValueError
            if kind == "normal" and numbers[1] < 0:
                raise ValueError
        except (KeyError, ValueError):
            raise ConfigurationError(
                "initializer is not usable",
                expected='"zeros", "constant(c)", "uniform(low, high)", "normal(mean, std)" or None',
                got=repr(text),
            ) from None
        return cls(kind, *numbers)


@dataclass(frozen=True)
class TableSpec:
    """Describes one sparse table. ``num_embeddings=None`` takes any int64 id; ``uploaded`` rows start from worker 0's
    values. ``admit`` says which ids get a row, and ``evict`` which rows leave."""

    name: str
    dim: int
    dtype: str
    group: int
    num_embeddings: int | None
    initializer: Initializer
    uploaded: bool = False
    admit: Admission | None = None
    evict: tuple[Eviction, ...] = ()

    @property
    def has_rules(self) -> bool:
        """Say whether rows come and leave by rules."""
        return self.admit is not None or bool(self.evict)

    @property
    def goes_by_weight(self) -> bool:
        """Say whether the weights of look-ups travel with gradients of the rows."""
        return goes_by_weight(self.admit, self.evict)

    @property
    def most_rows(self) -> MaxRows | None:
        """Return the rule that says how many rows there are at most, if there is one."""
        return next((rule for rule in self.evict if isinstance(rule, MaxRows)), None)

    @property
    def goes_by_time(self) -> bool:
        """Say whether a worker's clock travels with its steps."""
        return any(isinstance(rule, Unused) and rule.seconds is not None for rule in self.evict)


@dataclass(frozen=True)
class GroupSpec:
    """Describes one param group: the rule that updates it and the names of the options that travel with every push."""

    rule: str
    optimizer: int
    options: tuple[str, ...]
    sliceable: bool = True


@dataclass(frozen=True)
class PlanSettings:
    """Holds the placement of blocks, the number of processes, and how they talk to each other."""

    server_num: int
    worker_num: int
    mode: str = "sync"
    slice_var_up: bool = True
    split_method: str = "RoundRobin"
    min_block_size: int = 8192
    staleness: int = 0
    dc_lambda: float = 0.0
    dc_adaptive: bool = False
    elastic: bool = False
    wire_dtype: str | None = None
    needs_all_workers: bool = False
    evict_every: int = 1000
    dense: str = SERVERS
    gradients: int = 0
    max_grad_norm: float = 0.0
    changes: tuple[int, ...] = ()

    @property
    def has_dense_on_workers(self) -> bool:
        """Say whether dense parameters and their optimizers' state stay on the workers."""
        return self.dense == ALL_REDUCE


@dataclass(frozen=True)
class JobSpec:
    """Holds everything that the processes of one job agree on."""

    params: tuple[ParamSpec, ...]
    tables: tuple[TableSpec, ...]
    groups: tuple[GroupSpec, ...]
    settings: PlanSettings

    @property
    def common(self) -> JobSpec:
        """Return what all processes say alike: in an elastic job they may have been told different numbers of
        workers."""
        return self.among(0) if self.settings.elastic else self

    def among(self, worker_num: int) -> JobSpec:
        """Return the same job with another number of workers."""
        return replace(self, settings=replace(self.settings, worker_num=worker_num))

    def on_servers(self, server_num: int) -> JobSpec:
        """Return the same job with another number of servers."""
        return replace(self, settings=replace(self.settings, server_num=server_num))

    def continues(self, earlier: JobSpec) -> bool:
        """Say whether this is ``earlier`` with further parameters, tables or groups at the end."""
        return (
            self.settings == earlier.settings
            and self.params[: len(earlier.params)] == earlier.params
            and self.tables[: len(earlier.tables)] == earlier.tables
            and self.groups[: len(earlier.groups)] == earlier.groups
        )

    def to_json(self) -> str:
        """Return the canonical text: equal specs give equal text."""
        return self._text

    @cached_property
    def _text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=1)  # every worker of a job sends the same
    def from_json(text: str) -> JobSpec:
        """Read what a peer sent; anything that is not exactly a spec is a ``ProtocolError``."""
        # Every value is followed by one of these, but the last: what they would take is known before they are read.
        if sum(text.count(mark) for mark in ",[{") > _MOST_VALUES:
            raise ProtocolError("a job description is impossible", got="more than 2^20 values")
        try:
            raw = json.loads(text)
            spec: JobSpec = _build(
                JobSpec,
                raw,
                params=tuple(_build(ParamSpec, item, shape=_tuple(item["shape"])) for item in _tuple(raw["params"])),
                tables=tuple(
                    _build(
                        TableSpec,
                        item,
                        initializer=_build(Initializer, item["initializer"]),
                        admit=_life(item.get("admit")),
                        evict=tuple(map(_life, item.get("evict", ()))),
                    )
                    for item in _tuple(raw["tables"])
                ),
                groups=tuple(
                    _build(GroupSpec, item, options=_tuple(item["options"])) for item in _tuple(raw["groups"])
                ),
                settings=_settings(raw["settings"]),
            )
            spec.check()
        except ProtocolError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ProtocolError("a peer sent a job description that cannot be read", got=repr(error)) from None
        return spec

    def check(self) -> None:
        """Refuse impossible numbers before any memory is taken for them."""
        if any(len(p.shape) > _MOST_DIMENSIONS or max(p.shape, default=0) > _MOST_ELEMENTS for p in self.params):
            # Not even to be multiplied with each other.
            raise ProtocolError("a job description is impossible", got="a parameter is larger than 2^48 elements")
        settings, groups = self.settings, len(self.groups)
        names = [p.name for p in self.params] + [t.name for t in self.tables]
        whole = [p.group for p in self.params] + [t.group for t in self.tables] + [t.dim for t in self.tables]
        whole += [n for p in self.params for n in p.shape] + [g.optimizer for g in self.groups]
        whole += [settings.staleness, settings.gradients, *settings.changes]
        whole += [t.num_embeddings for t in self.tables if t.num_embeddings is not None]
        processes = (settings.server_num, settings.worker_num)
        starts = [t.initializer for t in self.tables]
        problems = {
            "a name is not text": not all(_is_text(name) for name in names),
            "two parameters share a name": len(set(names)) != len(names),
            "a number is negative": any(n < 0 for n in whole),
            "a group is out of range": max((p.group for p in self.params), default=-1) >= groups
            or max((t.group for t in self.tables), default=-1) >= groups,
            "an element type is unknown": any(p.dtype not in DTYPES for p in self.params),
            "a table's element type is unknown": any(t.dtype not in TABLE_DTYPES for t in self.tables),
            "a table has no columns": any(t.dim < 1 for t in self.tables),
            "there are more than 2^14 tables": len(self.tables) > _MOST_TABLES,
            "a table has more than 2^16 columns": any(t.dim > _MOST_COLUMNS for t in self.tables),
            "a table has two rules of one kind": any(named_twice(t.evict) for t in self.tables),
            "a table has rules for rows that are uploaded": any(t.uploaded and t.has_rules for t in self.tables),
            "rows leave at no step": settings.evict_every < 1,
            "an initializer is unknown or not finite": any(
                i.kind not in INITIALIZERS or not all(abs(x) <= _MOST_FLOAT for x in (i.a, i.b)) for i in starts
            ),
            "there is no server or no worker": min(*processes, settings.min_block_size) < 1,
            "there are more than 2^16 processes": max(processes) > MOST_PROCESSES,
            "the strength of delay compensation is impossible": not 0 <= settings.dc_lambda <= _MOST_FLOAT,
            "the norm to clip by is impossible": not 0 <= settings.max_grad_norm <= _MOST_FLOAT,
            "an update is of more than 2^16 gradients": settings.gradients > MOST_PROCESSES,
            "it is unknown where dense parameters are": settings.dense not in DENSE,
            "wire_dtype is unknown": settings.wire_dtype not in (None, *WIRE_DTYPES),
            "split_method is unknown": settings.split_method not in DISPATCHERS,
            "a parameter is larger than 2^48 elements": any(p.numel > _MOST_ELEMENTS for p in self.params),
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        if not found and self._most_blocks() > _MOST_BLOCKS:
            found = ["there are more than 2^20 blocks"]
        if found:
            raise ProtocolError("a job description is impossible", got=", ".join(found))

    def _most_blocks(self) -> int:
        """Return a number of blocks that no plan of this spec exceeds."""
        servers, least = self.settings.server_num, self.settings.min_block_size
        return sum(min(servers, 1 + param.numel // least) for param in self.params)


def _settings(item: Mapping[str, Any]) -> PlanSettings:
    """Build what the processes agree on beside the model."""
    changes = {"changes": _tuple(item["changes"])} if "changes" in item else {}
    settings: PlanSettings = _build(PlanSettings, item, **changes)
    return settings


def _life(item: Mapping[str, Any] | None) -> Any:
    """Build what says which rows come or leave."""
    if item is None:
        return None
    kind, given = KINDS.get(str(item["kind"])), {name: value for name, value in item.items() if name != "kind"}
    try:
        return _build(kind, given)
    except ConfigurationError as error:
        raise ProtocolError("a job description is impossible", got=str(error)) from None


def _is_text(name: str) -> bool:
    """Say whether a name can be written as UTF-8; JSON can smuggle in half a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tuple(value: object) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ProtocolError("a list is missing in a job description", got=repr(value)[:80])
    return tuple(value)


def _build(kind: Any, item: Mapping[str, Any], **replaced: Any) -> Any:
    """Build an item from its JSON. One that was written before a field was added, as in an old checkpoint, gets the
    field's default."""
    hints = _hints(kind)
    if not _required(kind) <= set(item) <= set(hints):
        raise ProtocolError(
            f"a {kind.__name__} has the wrong fields",
            expected=sorted(hints),
            got=sorted(item),
            todo="Another version of this package wrote it: install the same one everywhere.",
        )
    values = {**item, **replaced}
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ProtocolError(f"{name} of a {kind.__name__} has the wrong type", got=repr(value)[:80])
    return kind(**values)


@cache
def _required(kind: Any) -> set[str]:
    return {field.name for field in fields(kind) if field.init and field.default is MISSING}


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    """Say whether a value is exactly of an annotated type: no bool for an int, no int for a float."""
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    return type(value) in (get_args(hint) or (hint,))


def differences(ours: JobSpec, theirs: JobSpec) -> list[str]:
    """Say in words where two specs differ; empty when they are equal."""
    found: list[str] = []
    for title, mine, other in (("parameter", ours.params, theirs.params), ("table", ours.tables, theirs.tables)):
        left = {item.name: item for item in mine}
        right = {item.name: item for item in other}
        found += [f"{title} {n!r} is only in the job's model" for n in left if n not in right]
        found += [f"{title} {n!r} is only in the newcomer's model" for n in right if n not in left]
        for name in left:
            if name in right and left[name] != right[name]:
                found += [f"{title} {name!r}: " + _field_differences(left[name], right[name])]
        if not found and [i.name for i in mine] != [i.name for i in other]:
            found.append(f"{title}s come in another order")
    for index, (group, other_group) in enumerate(zip(ours.groups, theirs.groups, strict=False)):
        if group != other_group:
            found.append(f"param group {index}: " + _field_differences(group, other_group))
    if len(ours.groups) != len(theirs.groups):
        found.append(f"{len(ours.groups)} param groups in the job, {len(theirs.groups)} in the newcomer's")
    if ours.settings != theirs.settings:
        is_other = ours.settings.elastic != theirs.settings.elastic  # then one of both says nothing of its workers
        settings = replace(theirs.settings, worker_num=ours.settings.worker_num) if is_other else theirs.settings
        found.append("settings: " + _field_differences(ours.settings, settings))
    return found


def _field_differences(ours: object, theirs: object) -> str:
    left, right = asdict(ours), asdict(theirs)  # type: ignore[call-overload]
    return ", ".join(
        f"{key} {tuple(left[key]) if isinstance(left[key], tuple | list) else left[key]!r} in the job, "
        f"{tuple(right[key]) if isinstance(right[key], tuple | list) else right[key]!r} in the newcomer's"
        for key in left
        if left[key] != right[key]
    )
