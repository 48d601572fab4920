"""Exports a model as a ``torch.export`` program that takes batches of any size."""

from __future__ import annotations

import inspect
import io
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.fx.experimental import _config
from torch.fx.experimental.sym_node import SymNode
from torch.utils._pytree import tree_map

from fleet.errors import ArgumentTypeError, UnsupportedError


def check_examples(example_inputs: object) -> None:
    """Refuse anything but a tuple of positional arguments, each a tensor or dicts and lists of tensors."""
    if not isinstance(example_inputs, tuple):
        raise ArgumentTypeError(
            "example_inputs must be a tuple of the positional arguments of forward",
            got=type(example_inputs).__name__,
            todo="One argument is written (x,).",
        )
    for where, leaf in _leaves(example_inputs, "example_inputs"):
        if not isinstance(leaf, torch.Tensor):
            raise ArgumentTypeError(
                "example_inputs must hold tensors, and dicts, lists and tuples of them",
                where=where,
                got=type(leaf).__name__,
                todo="Leave arguments that have defaults out, and write constants into forward.",
            )


def _leaves(value: object, where: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{where}[{index}]")
    else:
        yield where, value


def export_program(model: torch.nn.Module, example_inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """Export ``model``, which is on the CPU and in evaluation mode. The first dimension of every tensor may have any
    size."""
    dynamic = getattr(torch.export.Dim, "DYNAMIC", None)
    if dynamic is None or not hasattr(_config, "backed_size_oblivious"):
        raise UnsupportedError(
            "this torch cannot export a model for batches of any size",
            expected="torch 2.8 or later",
            got=torch.__version__,
            todo="Leave example_inputs out, or upgrade torch.",
        )
    example = tree_map(lambda tensor: tensor.detach().to("cpu", copy=True), example_inputs)
    try:
        arguments = dict(inspect.signature(model.forward).bind(*example).arguments)
    except TypeError as error:
        raise ArgumentTypeError(
            "example_inputs do not fit forward", where=type(model).__name__, got=str(error)
        ) from None
    sizes = tree_map(lambda tensor: {0: dynamic} if tensor.dim() else {}, arguments)
    try:
        # Else torch takes a first dimension of 1 for a constant, and excludes a batch of 1 where the example has more.
        with torch.no_grad(), _any_layout(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            program = torch.export.export(model, example, dynamic_shapes=sizes, strict=False)
    except Exception as error:
        got = f"{type(error).__name__}: {_beginning(str(error))}"
        raise _unsupported(f"{type(model).__name__}{_line(error)}", got) from error
    limits = _limits(program)
    if limits:
        raise _unsupported(type(model).__name__, f"a program for {' and '.join(limits)} only")
    return program


def _unsupported(where: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        "torch.export cannot export the model for batches of any size",
        where=where,
        got=got,
        todo="Keep Python from deciding by the values or the batch size of tensors in forward, write x.shape[0] for "
        "len(x), or leave example_inputs out: the tensors are saved without a program.",
    )


@contextmanager
def _any_layout() -> Iterator[None]:
    """Keep torch's operators from asking whether a batch has one sample, as columns of such a batch are contiguous.

    They take the way then that is right for every layout. What Python asks of a size is still known by its answer.
    """
    asked = SymNode.guard_bool

    def guard_bool(node: SymNode, file: str, line: int) -> bool:
        return node.guard_size_oblivious(file, line) if file else asked(node, file, line)  # Python names no file

    SymNode.guard_bool = guard_bool  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SymNode.guard_bool = asked  # type: ignore[method-assign]


_SIZE = re.compile(r"L\[.+?\]\.size\(\)\[\d+\]")


def _limits(program: torch.export.ExportedProgram) -> list[str]:
    """Return the conditions by which the program would refuse inputs, except sizes that have to fit each other."""
    guards: list[str] = getattr(program, "_guards_code", [])
    limits = [guard for guard in guards if "!=" in guard or len(set(_SIZE.findall(guard))) < 2]
    return [re.sub(r"L\['(\w+)'\]", r"\1", limit) for limit in limits]


def _line(error: Exception) -> str:
    """Return where in the user's code it happened, if it did."""
    others = (str(Path(torch.__path__[0])), str(Path(__file__).parents[1]))
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(others)]
    return f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _beginning(text: str) -> str:
    """Return what torch says first; its hints for its own developers follow."""
    lines = [line.strip(" -") for line in text.splitlines()]
    return " ".join([line for line in lines if line][:2])[:400].rstrip(".")


class _Taken(io.RawIOBase):
    """Takes all that torch writes and remembers if the system did not: told of it, torch would end the process."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.refused: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while self.refused is None and len(rest):  # a write may end early
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.refused = error
        return size


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        taken = _Taken(file)
        torch.export.save(program, cast("IO[bytes]", taken))
    if taken.refused is not None:
        raise taken.refused
