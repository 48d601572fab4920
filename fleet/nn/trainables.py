"""Names what the user's optimizers train: the same names in the same order on every worker and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fleet.errors import ConfigurationError, UnsupportedError
from fleet.nn.table_weight import TableWeight


@dataclass(frozen=True)
class Member:
    """Holds one parameter with its place: its optimizer, the number of its param group, counted over all optimizers,
    and that group itself."""

    name: str
    param: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    group: int
    options: dict[str, Any]


def members(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None) -> list[Member]:
    """Return all parameters of the optimizers; named by the model, by torch's optimizer where it was given names, or
    else by their positions."""
    by_model = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    found: dict[int, Member] = {}
    for index, (position, number, optimizer, group) in enumerate(groups(optimizers)):
        given = group.get("param_names")
        for place, param in enumerate(group["params"]):
            if id(param) in found:
                raise ConfigurationError(
                    f"the parameter {found[id(param)].name!r} stands in two groups",
                    todo="Give each parameter to one group of one optimizer.",
                )
            name = by_model.get(id(param), given[place] if given else f"group{number}.param{place}")
            if id(param) not in by_model and (not given or len(optimizers) > 1):
                name = f"optimizer{position}.{name}"  # each optimizer has names of its own
            refuse_uninitialized(name, param)
            found[id(param)] = Member(name, param, optimizer, index, group)
    names = [member.name for member in found.values()]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigurationError(
            f"parameters share a name: {', '.join(twice)}",
            todo="Pass model= to distributed_optimizer, which names them, or give the optimizer other names.",
        )
    return list(found.values())


def refuse_uninitialized(name: str, value: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(value):
        raise UnsupportedError(
            f"{name!r} has no shape yet: it is of a lazy module",
            todo="Call the model once on a batch before fleet.distributed_optimizer().",
        )


def groups(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[int, int, torch.optim.Optimizer, dict[str, Any]]]:
    """Yield every group with the position of its optimizer and its own number there."""
    for position, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            yield position, number, optimizer, group


class ElementTypes:
    """Remembers the element types of a job's parameters, which do not change while it runs."""

    def __init__(
        self, params: Sequence[torch.nn.Parameter], names: Sequence[str], known: Sequence[torch.dtype]
    ) -> None:
        self._params = tuple(params)
        self._names = names
        self._known = list(known)

    def check(self) -> None:
        """Refuse a parameter that was converted, as by ``model.double()``."""
        if [param.dtype for param in self._params] != self._known:
            for param, name, known in zip(self._params, self._names, self._known, strict=True):
                check_type(name, param, known)


def check_type(name: str, param: torch.Tensor, known: torch.dtype) -> None:
    if param.dtype is not known:
        raise UnsupportedError(
            f"{name!r} was given another element type in a running job",
            expected=known,
            got=param.dtype,
            todo="Convert the model before fleet.distributed_optimizer(); in the job convert a copy "
            "(copy.deepcopy(model).half()), or compute under torch.autocast.",
        )


class Memory:
    """Remembers where a job's parameters lie, of which no two come to share memory while it runs."""

    def __init__(self, params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self._params = [*zip(names, params, strict=True)]
        self._seen: list[int] = []

    def check(self, tables: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse what overlaps, rows of ``tables`` included, if anything lies elsewhere than at the last look."""
        held = [*self._params, *tables]
        seen = [each.data_ptr() for _, each in held]
        if seen != self._seen:
            refuse_overlap(held)
            self._seen = seen


def refuse_overlap(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters that share elements in memory: each is updated by itself, from its own gradient, and the last
    one written would win. Disjoint parts of one storage are parameters like any others."""
    held = [(name, param) for name, param in named if param.numel() and not isinstance(param, TableWeight)]
    placed = sorted(held, key=lambda each: _extent(each[1]))
    for place, (name, param) in enumerate(placed):
        *_, stop = _extent(param)
        for other_name, other in placed[place + 1 :]:
            device, start, _ = _extent(other)
            if device != str(param.device) or start >= stop:
                break
            if _share(param, other):
                raise UnsupportedError(
                    f"{name!r} and {other_name!r} share memory and are two parameters",
                    todo="Use one parameter in both places (model.b = model.a), or give each its own memory (clone()).",
                )


def _extent(param: torch.Tensor) -> tuple[str, int, int]:
    """Return where a parameter lies, from its first byte to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return str(param.device), param.data_ptr(), param.data_ptr() + (last + 1) * param.itemsize


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether any byte belongs to both, whose extents overlap: columns of a matrix are interleaved."""
    first = min(one.data_ptr(), other.data_ptr())
    stop = max(_extent(one)[2], _extent(other)[2])
    marks = torch.zeros(stop - first, dtype=torch.bool, device="cpu")

    def bytes_of(param: torch.Tensor) -> torch.Tensor:
        strides = [stride * param.itemsize for stride in param.stride()]
        return marks.as_strided((*param.shape, param.itemsize), (*strides, 1), param.data_ptr() - first)

    bytes_of(one).fill_(True)
    return bool(bytes_of(other).any())
