"""What is trained, as values: parameters, tables, and the optimizer groups they belong to.

A ``JobSpec`` is everything that every process of a job must agree on. It is made from the user's model and
optimizer by the worker, travels as JSON in the first hello, and is all a server ever learns about the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fleet.errors import ConfigurationError, ProtocolError

#: Element types that travel, with their size in bytes.
DTYPES: Mapping[str, int] = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}

#: Element types a sparse table may have: those the row kernels compute in.
TABLE_DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class ParamSpec:
    """One dense parameter. ``group`` indexes ``JobSpec.groups``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Initializer:
    """How the first value of a row comes about: ``kind`` and its two numbers.

    zeros; constant(a); uniform(a, b) on [a, b); normal(a = mean, b = standard deviation).
    """

    kind: str
    a: float = 0.0
    b: float = 0.0

    @property
    def mean(self) -> float:
        """What an id that was never trained reads in evaluation."""
        return (self.a + self.b) / 2 if self.kind == "uniform" else self.a

    @classmethod
    def parse(cls, text: str | None) -> Initializer:
        """Read ``"zeros"``, ``"constant(1.0)"``, ``"uniform(-0.01, 0.01)"``, ``"normal(0, 0.01)"``; None is torch's."""
        if text is None:
            return cls("normal", 0.0, 1.0)
        arity = {"zeros": 0, "constant": 1, "uniform": 2, "normal": 2}
        kind, paren, rest = str(text).strip().partition("(")
        kind = kind.strip()
        try:
            if paren and not rest.rstrip().endswith(")"):
                raise ValueError
            inside = rest.rstrip()[:-1].strip()
            numbers = [float(part) for part in inside.split(",")] if inside else []
            if arity[kind] != len(numbers) or not all(math.isfinite(x) for x in numbers):
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
    """One sparse table. ``num_embeddings=None`` takes any int64 id; ``uploaded`` rows start from worker 0's values."""

    name: str
    dim: int
    dtype: str
    group: int
    num_embeddings: int | None
    initializer: Initializer
    uploaded: bool = False


@dataclass(frozen=True)
class GroupSpec:
    """One param group: the rule that updates it and the names of the options that travel with every push."""

    rule: str
    optimizer: int
    options: tuple[str, ...]
    sliceable: bool = True


@dataclass(frozen=True)
class PlanSettings:
    """What decides the placement of blocks, and how many processes there are."""

    server_num: int
    worker_num: int
    mode: str = "sync"
    slice_var_up: bool = True
    split_method: str = "RoundRobin"
    min_block_size: int = 8192


@dataclass(frozen=True)
class JobSpec:
    """Everything the processes of one job agree on."""

    params: tuple[ParamSpec, ...]
    tables: tuple[TableSpec, ...]
    groups: tuple[GroupSpec, ...]
    settings: PlanSettings

    def to_json(self) -> str:
        """Canonical text: equal specs give equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """Read what a peer sent; anything that is not exactly a spec is a ``ProtocolError``."""
        try:
            raw = json.loads(text)
            spec = cls(
                params=tuple(_build(ParamSpec, item, shape=tuple(item["shape"])) for item in raw["params"]),
                tables=tuple(
                    _build(TableSpec, item, initializer=_build(Initializer, item["initializer"]))
                    for item in raw["tables"]
                ),
                groups=tuple(_build(GroupSpec, item, options=tuple(item["options"])) for item in raw["groups"]),
                settings=_build(PlanSettings, raw["settings"]),
            )
            spec.check()
        except ProtocolError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ProtocolError("a peer sent a job description that cannot be read", got=repr(error)) from None
        return spec

    def check(self) -> None:
        """Refuse impossible numbers before any memory is taken for them."""
        names = [p.name for p in self.params] + [t.name for t in self.tables]
        whole = [p.group for p in self.params] + [t.group for t in self.tables] + [t.dim for t in self.tables]
        whole += [n for p in self.params for n in p.shape]
        whole += [self.settings.server_num, self.settings.worker_num, self.settings.min_block_size]
        problems = [
            "a name is not text" if not all(isinstance(n, str) for n in names) else "",
            "two parameters share a name" if len(set(names)) != len(names) else "",
            "a number is not whole or is negative"
            if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in whole)
            else "",
        ]
        if not any(problems):
            groups = len(self.groups)
            problems += [
                "a group is out of range" if any(x.group >= groups for x in (*self.params, *self.tables)) else "",
                "an element type is unknown" if any(p.dtype not in DTYPES for p in self.params) else "",
                "a table's element type is unknown" if any(t.dtype not in TABLE_DTYPES for t in self.tables) else "",
                "a table has no columns" if any(t.dim < 1 for t in self.tables) else "",
                "there is no server or no worker"
                if self.settings.server_num < 1 or self.settings.worker_num < 1 or self.settings.min_block_size < 1
                else "",
                "a parameter is larger than 2^48 elements" if any(p.numel > 1 << 48 for p in self.params) else "",
            ]
        found = [p for p in problems if p]
        if found:
            raise ProtocolError("a job description is impossible", got=", ".join(found))


def _build(kind: type[Any], item: Mapping[str, Any], **replaced: Any) -> Any:
    names = {f.name for f in fields(kind)}
    if set(item) != names:
        raise ProtocolError(f"a {kind.__name__} has the wrong fields", expected=sorted(names), got=sorted(item))
    return kind(**{**item, **replaced})


def differences(ours: JobSpec, theirs: JobSpec) -> list[str]:
    """Say in words where two specs differ; empty when they are equal."""
    found: list[str] = []
    for title, mine, other in (("parameter", ours.params, theirs.params), ("table", ours.tables, theirs.tables)):
        left = {item.name: item for item in mine}  # type: ignore[attr-defined]
        right = {item.name: item for item in other}  # type: ignore[attr-defined]
        found += [f"{title} {n!r} is only in the job's model" for n in left if n not in right]
        found += [f"{title} {n!r} is only in the newcomer's model" for n in right if n not in left]
        for name in left:
            if name in right and left[name] != right[name]:
                found += [f"{title} {name!r}: " + _field_differences(left[name], right[name])]
        if not found and [i.name for i in mine] != [i.name for i in other]:  # type: ignore[attr-defined]
            found.append(f"{title}s come in another order")
    for index, (group, other_group) in enumerate(zip(ours.groups, theirs.groups, strict=False)):
        if group != other_group:
            found.append(f"param group {index}: " + _field_differences(group, other_group))
    if len(ours.groups) != len(theirs.groups):
        found.append(f"{len(ours.groups)} param groups in the job, {len(theirs.groups)} in the newcomer's")
    if ours.settings != theirs.settings:
        found.append("settings: " + _field_differences(ours.settings, theirs.settings))
    return found


def _field_differences(ours: object, theirs: object) -> str:
    left, right = asdict(ours), asdict(theirs)  # type: ignore[call-overload]
    return ", ".join(
        f"{key} {tuple(left[key]) if isinstance(left[key], tuple | list) else left[key]!r} in the job, "
        f"{tuple(right[key]) if isinstance(right[key], tuple | list) else right[key]!r} in the newcomer's"
        for key in left
        if left[key] != right[key]
    )
