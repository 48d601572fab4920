"""Turns the state of a worker's own objects (schedulers, datasets) into bytes, and back.

It is a line of JSON, and behind it the bytes of the tensors in it, end to end. JSON's lists are lists; anything that
JSON does not know, dicts with other keys included, is an object with one key, which says what it is. Nothing is
pickled: a value for which there is no form is refused, by its name.
"""

from __future__ import annotations

import base64
import json
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fleet.checkpoint.manifest import STATES, Checkpoint
from fleet.checkpoint.pieces import PIECE_BYTES, PieceWriter
from fleet.errors import ArgumentTypeError, CheckpointError, FleetError, UnsupportedError
from fleet.numeric.bits import as_bytes
from fleet.numeric.tensors import dtype_name

_log = logging.getLogger("fleet.checkpoint")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: Deeper than anything that is meant.
_MOST_LEVELS = 50
_CONTAINERS: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    dict: "dict",
    OrderedDict: "OrderedDict",
    Counter: "Counter",
}
_PAIRED = (dict, OrderedDict, Counter)
_BY_NAME = {name: kind for kind, name in _CONTAINERS.items()}
#: An int of more bits is kept in hexadecimal: Python refuses to read or write so many decimal digits.
_MOST_BITS = 4096
#: Others have more than numbers, such as the mask of a masked array.
_ARRAYS = (np.ndarray, np.memmap)
#: Kinds of numpy's element types that are numbers.
_NUMBERS = "biufc"

#: An entry is the state of an object, or a value itself; with the first the options that a schedule sets.
_OBJECT, _OPTIONS, _VALUE = "object", "options", "value"
#: The options of an optimizer's groups that schedules set, beside those that they add.
_SCHEDULED = ("lr", "momentum", "betas")


def check_state(state: object) -> dict[str, Any]:
    """Check the dict that a user gives: names, with objects that have a state or values that are one."""
    checked = _named(state)
    for name, value in checked.items():
        if not _is_object(value):
            _Encoder().encode(value, _path(name))
    return checked


def _named(state: object) -> dict[str, Any]:
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        odd = type(state).__name__ if not isinstance(state, dict) else "a dict with other keys"
        raise ArgumentTypeError("state must be a dict of objects by name", expected="keys that are str", got=odd)
    return state


def encoded(state: object) -> Bytes:
    """Return the present states of the objects in a dict, and its plain values, as bytes."""
    encoder = _Encoder()
    entries: dict[str, Any] = {}
    for name, value in _named(state).items():
        if not _is_object(value):
            entries[name] = {_VALUE: encoder.encode(value, _path(name))}
            continue
        entries[name] = {_OBJECT: encoder.encode(value.state_dict(), _path(name))}
        if groups := _groups(value):
            options = [{key: group[key] for key in group if _is_scheduled(key, value)} for group in groups]
            entries[name][_OPTIONS] = encoder.encode(options, f"{_path(name)}.optimizer.param_groups")
    line = json.dumps(entries, separators=(",", ":")).encode() + b"\n"
    return np.frombuffer(b"".join([line, *encoder.bodies]), np.uint8)


def restore(state: object, data: Bytes, where: str) -> None:
    """Give the objects of a dict their states out of ``data``, and the dict its plain values. Everything is checked to
    be there and readable before anything is given; errors name ``where`` it came from."""
    wanted, entries = _named(state), decoded(data, where)
    problems = [f"{name!r} is not in it" for name in wanted if name not in entries]
    for name, entry in entries.items():
        if name in wanted and (_OBJECT in entry) != _is_object(wanted[name]):
            then, now = ("an object", "a value") if _OBJECT in entry else ("a value", "an object")
            problems.append(f"{name!r} is {then} there, and {now} here")
        elif name in wanted and (groups := _groups(wanted[name])) and len(groups) != len(entry.get(_OPTIONS, groups)):
            then_groups, now_groups = len(entry[_OPTIONS]), len(groups)
            problems.append(f"{name!r} is of {then_groups} param groups there, and of {now_groups} here")
    if problems:
        raise CheckpointError(
            "the state that was saved is not what is asked for",
            where=where,
            expected=", ".join(map(repr, entries)) or "nothing",
            got="; ".join(problems),
            todo="Ask for what there is: load_state({name: …}) takes some of the names, too.",
        )
    for name, value in wanted.items():
        if _is_object(value):
            _give(value, entries[name], name, where)
    for name in wanted:
        if _VALUE in entries[name]:
            wanted[name] = entries[name][_VALUE]


def _give(taker: Any, entry: Mapping[str, Any], name: str, where: str) -> None:
    try:
        taker.load_state_dict(entry[_OBJECT])
    except FleetError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{_path(name)} does not take the state that was saved", where=where, got=f"{type(error).__name__}: {error}"
        ) from error
    # A schedule goes on from the learning rate that stands in its optimizer's groups, and does not keep it itself.
    for group, options in zip(_groups(taker), entry.get(_OPTIONS, ()), strict=False):
        for key, value in options.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def decoded(data: Bytes, where: str) -> dict[str, dict[str, Any]]:
    """Return what ``encoded`` put into some bytes, by name; refuse anything else."""
    line, _, body = bytes(data).partition(b"\n")
    decoder = _Decoder(body)
    try:
        entries = {
            str(name): {kind: decoder.decode(value) for kind, value in entry.items()}
            for name, entry in json.loads(line).items()
        }
        if not all({_OBJECT, _VALUE} & entry.keys() for entry in entries.values()):
            raise ValueError("an entry has no content")
    except (AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError("a worker's state cannot be read", where=where, got=repr(error)) from None
    return entries


def values(data: Bytes, where: str) -> dict[str, Any]:
    """Return what is in some bytes, for people: by the path of each value, such as `schedule.last_epoch`."""
    found: dict[str, Any] = {}

    def enter(value: Any, path: str) -> None:
        if isinstance(value, dict) and value:
            for key, each in value.items():
                enter(each, f"{path}.{key}")
        else:
            found[path] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    for name, entry in decoded(data, where).items():
        for kind, value in entry.items():
            enter(value, f"{name}.{kind}" if kind == _OPTIONS else name)
    return found


# ---------------------------------------------------------------------------------------------- in a checkpoint


def write_states(pieces: PieceWriter, shares: Iterable[tuple[int, int, Bytes]]) -> None:
    """Add the states of some workers, each with how many of its steps it had taken."""
    some: list[tuple[int, int, Bytes]] = []
    for share in shares:
        some.append(share)
        if sum(data.nbytes for *_, data in some) >= PIECE_BYTES:
            _add(pieces, some)
            some = []
    if some:
        _add(pieces, some)


def _add(pieces: PieceWriter, shares: list[tuple[int, int, Bytes]]) -> None:
    about = {STATES: [worker for worker, *_ in shares], "steps": [steps for _, steps, _ in shares]}
    pieces.add(about, {f"worker-{worker}": data.copy() for worker, _, data in shares})


def states_in(checkpoint: Checkpoint) -> Iterator[tuple[int, int, Bytes]]:
    """Yield the states that a checkpoint has, as ``write_states`` was given them."""
    for about, tensors in checkpoint.pieces(STATES):
        try:
            found = shares_of(about, tensors)
        except (LookupError, TypeError, ValueError) as error:
            what = "the workers' states in the checkpoint cannot be read"
            raise CheckpointError(what, where=checkpoint.where, got=repr(error)) from None
        yield from found


def steps_in(checkpoint: Checkpoint) -> dict[int, int]:
    """Return from the manifest the workers whose states a checkpoint has, each with how many of its steps it had
    taken."""
    abouts = [piece.about for _, piece in checkpoint.files(STATES)]
    return {worker: steps for about in abouts for worker, steps in zip(about[STATES], about["steps"], strict=True)}


def whose(worker: int, workers_then: int, there: Container[int]) -> int:
    """Return whose state a worker gets from a checkpoint that has the states of those who are ``there``: its own, or
    worker 0's if it was not among the workers of then."""
    return worker if worker < workers_then or worker in there else 0


def warn_of_none(worker: int, step: int) -> None:
    """Warn that a worker goes on after some steps and is given no state."""
    told = (
        "worker %d goes on after step %d without a state: the job has none of it, as of one that gave none or had left "
        "before the checkpoint was saved; its schedules and places in data begin anew"
    )
    _log.warning(told, worker, step)


def shares_of(about: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, Bytes]]:
    """Return the states in one piece; raise a ``ValueError`` or a similar error if it makes no sense."""
    if any(tensor.dtype is not torch.uint8 or tensor.dim() != 1 for tensor in tensors):
        raise ValueError("a state is not a row of bytes")
    shares = zip(about[STATES], about["steps"], tensors, strict=True)
    return [(int(worker), int(steps), tensor.numpy().copy()) for worker, steps, tensor in shares]


def _path(name: str) -> str:
    return f"state[{name!r}]"


def _is_object(value: object) -> bool:
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def _groups(value: object) -> list[dict[str, Any]]:
    """Return the groups of options that a learning-rate scheduler sets."""
    groups = getattr(getattr(value, "optimizer", None), "param_groups", None)
    return groups if isinstance(groups, list) else []


def _is_scheduled(key: str, scheduler: Any) -> bool:
    known = getattr(scheduler.optimizer, "defaults", {})
    return key in _SCHEDULED or (key not in known and key not in ("params", "param_names"))


class _Encoder:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._size = 0

    def encode(self, value: Any, path: str, level: int = 0) -> Any:
        kind = type(value)
        if level > _MOST_LEVELS:
            raise UnsupportedError(f"{path} is nested too deeply to be kept", expected=f"at most {_MOST_LEVELS} levels")
        if kind is int and value.bit_length() > _MOST_BITS:
            return {"int": hex(value)}
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind is float:
            return {"float": repr(value)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is list:
            return [self.encode(each, f"{path}[{at}]", level + 1) for at, each in enumerate(value)]
        if kind in _PAIRED:
            pairs = [
                [self.encode(key, f"a key of {path}", level + 1), self.encode(each, f"{path}[{key!r}]", level + 1)]
                for key, each in value.items()
            ]
            return {_CONTAINERS[kind]: pairs}
        if kind in _CONTAINERS:
            return {_CONTAINERS[kind]: [self.encode(each, f"{path}[{at}]", level + 1) for at, each in enumerate(value)]}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        is_numbers = kind in _ARRAYS or isinstance(value, np.generic)
        if is_numbers and value.dtype.kind in _NUMBERS and value.dtype.names is None:
            told = self._body(value.tobytes())
            tag = "numpy" if isinstance(value, np.generic) else "array"
            return {tag: [value.dtype.str, list(value.shape), *told]}
        raise UnsupportedError(
            f"{path} is {_called(value)}, which cannot be kept",
            expected="None, numbers, text, bytes, tensors, numpy's numbers and arrays, and lists, tuples, sets, dicts",
            todo="Give an object with state_dict() and load_state_dict() that says it in these, or leave it out.",
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> list[Any]:
        plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
        if not plain or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedError(f"{path} is {_called(tensor)}, which cannot be kept", expected="a plain tensor")
        dtype = dtype_name(tensor.dtype)
        return [dtype, list(tensor.shape), *self._body(as_bytes(tensor.cpu()).numpy().tobytes())]

    def _body(self, body: bytes) -> tuple[int, int]:
        start, self._size = self._size, self._size + len(body)
        self.bodies.append(body)
        return start, self._size


class _Decoder:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self._readers: dict[str, Callable[[Any], Any]] = {
            "float": float,
            "int": lambda told: int(told, 16),
            "bytes": base64.b64decode,
            "tensor": self._tensor,
            "array": self._array,
            "numpy": lambda told: self._array(told)[()],
        }

    def decode(self, told: Any) -> Any:
        if isinstance(told, list):
            return [self.decode(each) for each in told]
        if not isinstance(told, dict):
            return told
        ((tag, content),) = told.items()
        if tag in self._readers:
            return self._readers[tag](content)
        kind: Any = _BY_NAME[tag]
        if kind in _PAIRED:
            return kind({self.decode(key): self.decode(value) for key, value in content})
        return kind(self.decode(each) for each in content)

    def _tensor(self, told: list[Any]) -> torch.Tensor:
        name, shape, start, stop = told
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is no element type")
        bits = torch.from_numpy(np.frombuffer(self._part(start, stop), np.uint8).copy())
        return bits.view(dtype).reshape(shape) if len(bits) else torch.empty(shape, dtype=dtype, device="cpu")

    def _array(self, told: list[Any]) -> np.ndarray[Any, Any]:
        name, shape, start, stop = told
        dtype = np.dtype(name)
        if dtype.kind not in _NUMBERS or dtype.names is not None:
            raise ValueError(f"{name} is no type of numbers")
        return np.frombuffer(self._part(start, stop), dtype).reshape(shape).copy()

    def _part(self, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop <= len(self._body):
            raise ValueError("a tensor lies outside of the state")
        return self._body[start:stop]


def _called(value: object) -> str:
    """Return what a value is, in words."""
    if callable(value) and hasattr(value, "__qualname__"):
        return "a class" if isinstance(value, type) else f"a {type(value).__name__}"
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"
