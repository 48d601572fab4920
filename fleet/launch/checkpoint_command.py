"""Carries out ``fleet checkpoint``: lists, verifies, compares, exports and imports checkpoints."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

import numpy as np
import torch

from fleet.base.clock import SystemClock
from fleet.checkpoint.comparison import Difference, RowDifference, Told, compare
from fleet.checkpoint.inspection import WEIGHT, Problem, Rows, buffers, parameters, states, verify
from fleet.checkpoint.manifest import FORMAT, FORMAT_VERSION, MANIFEST, Checkpoint, is_checkpoint
from fleet.checkpoint.places import Directory, Place, place_at
from fleet.checkpoint.plain_files import export
from fleet.checkpoint.series import name_of, steps_in
from fleet.errors import CheckpointError, ConfigurationError
from fleet.plan.specs import INITIALIZERS


def carry_out(command: str, options: argparse.Namespace) -> int:
    """Carry out a command that ``checkpoint_options`` has read, and return the exit code."""
    return {"ls": _list, "verify": _verify, "diff": _diff, "export": _export, "import": _import}[command](options)


# ---------------------------------------------------------------------------------------------- ls


@dataclass(frozen=True)
class _Summary:
    """Holds what a manifest says."""

    url: str
    format: str
    id: str
    step: int
    kind: str
    goes_on_from: list[str]
    saved_at: str | None
    files: int
    bytes: int


@dataclass(frozen=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]
    dtype: str
    optimizer: str
    state: list[str]
    norm: float | None


@dataclass(frozen=True)
class _Table:
    name: str
    rows: int
    #: of those that were saved, how many are gone
    removed: int
    dim: int
    dtype: str
    ids: str
    initializer: str
    mean: float
    optimizer: str
    state: list[str]
    bytes: int
    norm: float | None


@dataclass(frozen=True)
class _State:
    """Describes the state of one worker's own objects."""

    worker: int
    step: int
    bytes: int
    state: list[str]


def _list(options: argparse.Namespace) -> int:
    failed = False
    for position, dirname in enumerate(options.dirs):
        if position and not options.json:
            print()
        place = place_at(dirname)
        inside = [] if place.has(MANIFEST) else sorted(place.names())
        steps = [name_of(step) for step in steps_in(place)] if inside else []
        inside = [name for name in inside if _is_to_be_listed(place.within(name), name in steps)]
        if inside:
            failed = not _list_several([place.within(name) for name in inside], options.json) or failed
        else:
            _list_one(Checkpoint.open(dirname), options.json)
    return 2 if failed else 0


def _is_to_be_listed(place: Place, is_called_so: bool) -> bool:
    """Say whether there is a checkpoint, or what is called as one and cannot be read."""
    try:
        return is_checkpoint(place)
    except CheckpointError:
        return is_called_so


def _list_several(places: Sequence[Place], as_json: bool) -> bool:
    """List those that can be gone back to, and say whether these are all of them."""
    found, broken = [], []
    for place in places:
        try:
            checkpoint = Checkpoint.open(place.url)
            checkpoint.check_present()
            found.append(_summary(checkpoint))
        except CheckpointError as error:
            broken.append((place.url, str(error)))
    if as_json:
        for each in found:
            print(json.dumps(asdict(each)))
    elif found:
        header = ("checkpoint", "step", "kind", "saved", "files", "size", "id")
        rows = [(_name(s.url), s.step, s.kind, s.saved_at or "-", s.files, _size(s.bytes), s.id) for s in found]
        _print_aligned([header, *rows])
    for url, why in broken:
        print(f"{url}: {why}", file=sys.stderr)
    return not broken


def _list_one(checkpoint: Checkpoint, as_json: bool) -> None:
    summary = _summary(checkpoint)
    dense = list(_parameters(checkpoint))
    tables = list(_tables(checkpoint))
    beside = {name: list(value.shape) for name, value in buffers(checkpoint).items()}
    own = list(_states(checkpoint))
    if as_json:
        contents = {"parameters": [asdict(p) for p in dense], "tables": [asdict(t) for t in tables], "buffers": beside}
        print(json.dumps({**asdict(summary), **contents, "states": [asdict(s) for s in own]}))
        return
    print(summary.url)
    print(f"  {summary.format}, id {summary.id}, step {summary.step}, {summary.kind}", end="")
    print(f", saved {summary.saved_at}" if summary.saved_at else "")
    print(f"  {summary.files} files, {_size(summary.bytes)}", end="")
    print(f"; goes on from {', then '.join(summary.goes_on_from)}" if summary.goes_on_from else "")
    if dense:
        print()
        _print_aligned([_PARAMETER_HEADER, *map(_parameter_line, dense)])
    if tables:
        print()
        lines = [_TABLE_HEADER, *map(_table_line, tables)]
        has_removed = any(each.removed for each in tables)
        _print_aligned([line if has_removed else (*line[:2], *line[3:]) for line in lines])
    if beside:
        print()
        _print_aligned([("buffer", "shape"), *((name, _shape(shape)) for name, shape in beside.items())])
    if own:
        print()
        _print_aligned(
            [_STATE_HEADER, *((each.worker, each.step, _size(each.bytes), _listed(each.state)) for each in own)]
        )


_STATE_HEADER = ("worker", "step", "size", "state")
_PARAMETER_HEADER = ("parameter", "shape", "type", "norm", "optimizer", "state")


def _parameter_line(told: _Parameter) -> tuple[object, ...]:
    return told.name, _shape(told.shape), told.dtype, _number(told.norm), told.optimizer, _listed(told.state)


_ABOUT_TABLE = ("dim", "type", "size", "norm", "ids", "initializer", "mean", "optimizer", "state")
#: ``removed`` is shown where rows are
_TABLE_HEADER = ("table", "rows", "removed", *_ABOUT_TABLE)


def _table_line(told: _Table) -> tuple[object, ...]:
    size, length, state = _size(told.bytes), _number(told.norm), _listed(told.state)
    start = (told.initializer, f"{told.mean:g}")
    rows = told.rows, told.removed
    return told.name, *rows, told.dim, told.dtype, size, length, told.ids, *start, told.optimizer, state


def _summary(checkpoint: Checkpoint) -> _Summary:
    lineage = checkpoint.lineage()
    files = [piece for each in lineage for piece in each.manifest.pieces]
    return _Summary(
        url=checkpoint.where,
        format=f"{FORMAT} {FORMAT_VERSION}",
        id=checkpoint.manifest.id,
        step=checkpoint.manifest.version,
        kind=_kind(checkpoint),
        goes_on_from=[each.where for each in reversed(lineage[:-1])],
        saved_at=_saved_at(checkpoint.place),
        files=len(files),
        bytes=sum(piece.bytes for piece in files),
    )


def _kind(checkpoint: Checkpoint) -> str:
    """Return the kind of a checkpoint. A delta saved into the directory of the checkpoint that it goes on from has a
    folder of its own there."""
    folders = {piece.file.partition("/")[0] for piece in checkpoint.manifest.pieces}
    kind, more = "full" if checkpoint.before is None else "delta", len(folders) - 1
    return kind if more < 1 else f"{kind}, with {more} more delta{'s' if more > 1 else ''} inside"


def _saved_at(place: Place) -> str | None:
    if not isinstance(place, Directory):
        return None
    return datetime.fromtimestamp((place.path / MANIFEST).stat().st_mtime).astimezone().isoformat(" ", "seconds")


def _parameters(checkpoint: Checkpoint) -> Iterator[_Parameter]:
    groups = checkpoint.manifest.spec.groups
    for each in parameters(checkpoint):
        spec = each.spec
        length = _finite(float(each.value.double().norm()))
        yield _Parameter(spec.name, spec.shape, spec.dtype, groups[spec.group].rule, list(each.state), length)


def _states(checkpoint: Checkpoint) -> Iterator[_State]:
    for own in states(checkpoint):
        names = dict.fromkeys(path.partition(".")[0] for path in own.values)
        yield _State(own.worker, own.steps, own.bytes, list(names))


def _tables(checkpoint: Checkpoint) -> Iterator[_Table]:
    for spec in checkpoint.manifest.spec.tables:
        rows = Rows(checkpoint, spec)
        squares = sum(float(np.square(part[WEIGHT], dtype=np.float64).sum()) for _, part in rows.parts())
        width = sum(rows.widths.values()) * getattr(torch, spec.dtype).itemsize
        start = spec.initializer
        numbers = (start.a, start.b)[: INITIALIZERS[start.kind]]
        yield _Table(
            name=spec.name,
            rows=len(rows.ids),
            removed=rows.removed,
            dim=spec.dim,
            dtype=spec.dtype,
            ids="any" if spec.num_embeddings is None else f"< {spec.num_embeddings}",
            initializer=start.kind + (f"({', '.join(map('{:g}'.format, numbers))})" if numbers else ""),
            mean=start.mean,
            optimizer=checkpoint.manifest.spec.groups[spec.group].rule,
            state=[name for name in rows.widths if name != WEIGHT],
            bytes=len(rows.ids) * (rows.ids.itemsize + width),
            norm=_finite(math.sqrt(squares)),
        )


# ---------------------------------------------------------------------------------------------- verify


def _verify(options: argparse.Namespace) -> int:
    clock, failed = SystemClock(), False
    for dirname in options.dirs:
        place = place_at(dirname)
        if not place.has(MANIFEST):
            Checkpoint.open(dirname)  # says what is there instead
        began, files, size, bad = clock.now(), 0, 0, 0
        for found in verify(dirname):
            if isinstance(found, Problem):
                bad += 1
                print(f"{found.where}: {found.what}")
            else:
                files, size = files + 1, size + found.bytes
        outcome = "ok" if not bad else f"{bad} problem{'s' if bad > 1 else ''}"
        print(f"{place.url}: {outcome}; {files} files whole, {_size(size)}, in {clock.now() - began:.1f} s")
        failed = failed or bad > 0
    return 1 if failed else 0


# ---------------------------------------------------------------------------------------------- diff


def _diff(options: argparse.Namespace) -> int:
    left, right = Checkpoint.open(options.left), Checkpoint.open(options.right)
    print(f"A  {left.where}, step {left.manifest.version}\nB  {right.where}, step {right.manifest.version}\n")
    findings = list(compare(left, right))
    apart = [(name, _told(finding)) for name, finding in findings if not finding.same]
    if not apart:
        print("the same, bit by bit")
        return 0
    _print_aligned([*apart, ("the rest", f"the same, bit by bit ({len(findings) - len(apart)} of {len(findings)})")])
    return 1


def _told(finding: Difference | RowDifference | Told) -> str:
    if isinstance(finding, Told):
        return f"{finding.left} in A, {finding.right} in B"
    if isinstance(finding, Difference):
        return f"largest difference {finding.most:.4g}, norm of the difference {finding.relative:.3g} of A's"
    most = ", ".join(f"{value:.4g} ({column})" for column, value in finding.most.items())
    rows = f"{finding.added:,} rows added, {finding.removed:,} removed, {finding.changed:,} changed"
    return f"{rows}; largest differences {most}"


# ---------------------------------------------------------------------------------------------- export


def _export(options: argparse.Namespace) -> int:
    checkpoint = Checkpoint.open(options.dir)
    if options.format == "dcp":
        if options.table:
            raise ConfigurationError(
                "an export for DCP has everything", got=f"--table {options.table[0]}", todo="Leave --table out."
            )
        from fleet.checkpoint.dcp import export_to_dcp  # loads torch.distributed, which no other command needs

        written = export_to_dcp(checkpoint, options.out, state=options.state, force=options.force)
        print(f"{options.out}  {len(written)} files, {_size(sum(path.stat().st_size for path in written))}")
        return 0
    written = export(checkpoint, options.out, tables=options.table, state=options.state, force=options.force)
    for path in written:
        print(f"{path}  {_size(path.stat().st_size)}")
    return 0


def _import(options: argparse.Namespace) -> int:
    from fleet.checkpoint.dcp import Meaning, import_from_dcp

    meaning = Meaning(options.optimizer, options.prefix, tuple(options.table), tuple(options.skip))
    left = import_from_dcp(options.source, options.out, meaning)
    _list_one(Checkpoint.open(options.out), as_json=False)
    if left:
        print(f"\nleft out: {', '.join(left)}")
    return 0


# ---------------------------------------------------------------------------------------------- lines


def _print_aligned(rows: Sequence[Sequence[object]]) -> None:
    """Print rows in columns, numbers to the right."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    to_the_right = [isinstance(cell, int) for cell in rows[-1]]
    for row in texts:
        cells = zip(row, widths, to_the_right, strict=True)
        print("  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in cells).rstrip())


def _name(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "-"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _finite(number: float) -> float | None:
    """Return a number if it is finite: JSON knows no others."""
    return number if math.isfinite(number) else None


def _number(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.4g}"
