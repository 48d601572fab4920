"""Reads and writes manifests, which name the pieces of a checkpoint. Reading one trusts nothing it has not checked.

A delta has the rows that changed since the checkpoint it goes on from. Either the pieces of that checkpoint come before
its own in one manifest, or it names that checkpoint as its parent, by place and id.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import torch

from fleet.base.checksum import content_crc32
from fleet.checkpoint.pieces import PieceFile, decoded, rows_in_order
from fleet.checkpoint.places import Place, place_at, referred
from fleet.errors import CheckpointError, ProtocolError
from fleet.plan.specs import JobSpec

MANIFEST = "manifest.json"
FORMAT = "fleet-checkpoint"
FORMAT_VERSION = 2
#: A manifest has a few hundred bytes for every 16 MiB of state.
_MOST_BYTES = 1 << 30
#: No job takes as many steps, and nothing has as many bytes; servers count on in 64 bits.
_MOST_STEPS, _MOST_SEED = 1 << 62, (1 << 64) - 1
_IMPOSSIBLE = "the manifest says what cannot be"
_MISSING = "a piece of the checkpoint is missing"
_GO_BACK = (
    "fleet checkpoint verify tells all that is wrong. To go on from the one before it, remove this checkpoint's "
    "directory, and those of later ones that go on from it."
)
#: So many pieces are read and verified while one is worked on: one waits for the disk while another is summed up.
_READERS = 2

#: Kinds of pieces: parameters with their optimizer's state, rows of a table, what is counted of ids that have no row,
#: buffers of a model, and the states of workers' own objects.
DENSE, TABLE, COUNTS, BUFFERS, STATES = "dense", "table", "counts", "buffers", "states"


@dataclass(frozen=True)
class Saved:
    """Names a checkpoint that was written, by its id and its place."""

    id: str
    url: str


@dataclass(frozen=True)
class Parent:
    """Names the checkpoint that a delta goes on from."""

    place: str
    id: str


@dataclass(frozen=True)
class Manifest:
    """Describes a whole job at one step: the spec it had, the rows' seed, and where everything is."""

    id: str
    version: int
    seed: int
    spec: JobSpec
    pieces: tuple[PieceFile, ...]
    parent: Parent | None = None

    def to_json(self) -> str:
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "id": self.id,
            "version": self.version,
            "seed": self.seed,
            "parent": None if self.parent is None else asdict(self.parent),
            "spec": json.loads(self.spec.to_json()),
            "pieces": [asdict(piece) for piece in self.pieces],
        }
        return json.dumps({**content, "crc32": content_crc32(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what ``to_json`` wrote; raise a ``ValueError`` or a similar error for anything else."""
        raw = json.loads(text)
        if (raw["format"], raw["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                "the checkpoint has another format",
                expected=f"{FORMAT} {FORMAT_VERSION}",
                got=f"{raw['format']} {raw['format_version']}",
                todo="Read it with the release of this package that wrote it.",
            )
        told, computed = raw.pop("crc32"), content_crc32(raw)
        if told != computed:
            raise CheckpointError("the manifest is damaged", expected=f"crc32 {told}", got=f"crc32 {computed}")
        parent = raw["parent"]
        if parent is not None:
            parent = Parent(_text(parent, "place"), _text(parent, "id"))
        spec = JobSpec.from_json(json.dumps(raw["spec"]))
        pieces = tuple(_piece(each) for each in raw["pieces"])
        version, seed = _number(raw, "version", _MOST_STEPS), _number(raw, "seed", _MOST_SEED)
        return cls(_text(raw, "id"), version, seed, spec, pieces, parent)


def _number(raw: Mapping[str, Any], name: str, most: int) -> int:
    value = raw[name]
    if type(value) is not int or not 0 <= value <= most:
        raise CheckpointError(_IMPOSSIBLE, expected=f"{name} from 0 to {most}", got=repr(value)[:80])
    return value


def _text(raw: Mapping[str, Any], name: str) -> str:
    value = raw[name]
    if not isinstance(value, str) or not value:
        raise CheckpointError(_IMPOSSIBLE, expected=f"{name} as text", got=repr(value)[:80])
    return value


def _names(raw: Mapping[str, Any], name: str) -> Sequence[str]:
    value = raw[name]
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise CheckpointError(_IMPOSSIBLE, expected=f"{name} as a list of names", got=repr(value)[:80])
    return value


def _check_rows(about: Mapping[str, Any], tensors: int) -> None:
    _text(about, TABLE)
    _number(about, "step", _MOST_STEPS)
    _number(about, "rows", _MOST_STEPS)
    columns = len(_names(about, "columns"))
    if tensors != 1 + columns:
        raise CheckpointError(_IMPOSSIBLE, expected=f"ids and {columns} columns", got=f"{tensors} tensors")


def _check_entries(entries: object) -> None:
    if not isinstance(entries, list):
        raise CheckpointError(_IMPOSSIBLE, expected="a list of parameters", got=repr(entries)[:80])
    for entry in entries:
        _text(entry, "param")
        _text(entry, "key")
        _number(entry, "offset", _MOST_STEPS)
        _number(entry, "numel", _MOST_STEPS)
        if "plain" not in entry and not isinstance(entry["elementwise"], bool):
            raise CheckpointError(_IMPOSSIBLE, expected="elementwise or not", got=repr(entry["elementwise"])[:80])


def _check_counts(about: Mapping[str, Any]) -> None:
    _text(about, COUNTS)
    _text(about, "of")
    for name in ("start", "server", "servers", *(("bits", "blocks", "counted") if "bits" in about else ())):
        _number(about, name, _MOST_STEPS)


def _check_states(about: Mapping[str, Any], tensors: int) -> None:
    workers, steps = about[STATES], about["steps"]
    if not isinstance(workers, list) or not isinstance(steps, list) or not len(workers) == len(steps) == tensors:
        raise CheckpointError(_IMPOSSIBLE, expected="a worker and its steps for each tensor", got=repr(about)[:80])
    for worker, taken in zip(workers, steps, strict=True):
        _number({"worker": worker}, "worker", _MOST_STEPS)
        _number({"steps": taken}, "steps", _MOST_STEPS)


def _piece(raw: dict[str, Any]) -> PieceFile:
    _text(raw, "file")
    _number(raw, "bytes", _MOST_STEPS)
    _number(raw, "crc32", (1 << 32) - 1)
    _names(raw, "tensors")
    piece = PieceFile.from_json(raw)
    path = PurePosixPath(piece.file)
    if path.is_absolute() or ".." in path.parts or "\0" in piece.file:
        raise CheckpointError("the manifest points out of its directory", got=repr(piece.file))
    if not isinstance(piece.about, dict):
        raise ValueError(f"a piece does not say what it is: {piece.about!r}")
    if TABLE in piece.about:
        _check_rows(piece.about, len(piece.tensors))
    if DENSE in piece.about:
        _check_entries(piece.about[DENSE])
    if COUNTS in piece.about:
        _check_counts(piece.about)
    if STATES in piece.about:
        _check_states(piece.about, len(piece.tensors))
    return piece


def is_checkpoint(place: Place) -> bool:
    """Say whether there is a checkpoint of ours, of any version and in any condition; others have manifests too."""
    try:
        raw = json.loads(_content(place))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def _content(place: Place) -> bytes:
    data = bytes(place.read(MANIFEST, _MOST_BYTES + 1))
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return data


@dataclass(frozen=True)
class Fit:
    """Says what a checkpoint has of a job, by the names of parameters and tables."""

    #: of the same kind and under the same optimizer
    whole: frozenset[str]
    #: of the same kind, under another optimizer
    values: frozenset[str]
    #: in the job, and not or of another kind in the checkpoint
    lacking: frozenset[str]
    #: everything that differs, in words
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """Holds a manifest, the place where it was found, and the checkpoint before it if it is a delta."""

    place: Place
    manifest: Manifest
    before: Checkpoint | None = None

    @classmethod
    def open(cls, dirname: object) -> Checkpoint:
        """Open the checkpoint that a user names, with all that it goes on from."""
        found: Checkpoint | None = None
        for place, manifest in reversed(list(chain(dirname))):
            found = cls(place, manifest, found)
        assert found is not None
        lacking = lacking_tables(found.manifest.spec, (each.manifest for each in found.lineage()))
        if lacking:
            raise CheckpointError(
                "the checkpoint lacks a table",
                where=found.where,
                expected="at least one piece of each, if only to say that it has no rows",
                got=f"none of {', '.join(map(repr, lacking))}",
            )
        return found

    @staticmethod
    def open_manifest(place: Place) -> tuple[Place, Manifest]:
        where = f"{place.url.rstrip('/')}/{MANIFEST}"
        try:
            is_there = place.has(MANIFEST)
            content = _content(place) if is_there else b""
        except CheckpointError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise CheckpointError("the manifest cannot be read", where=where, got=repr(error)) from None
        if not is_there:
            raise CheckpointError(
                "there is no checkpoint here",
                where=place.url,
                expected=f"a directory with a {MANIFEST}",
                got="a directory without one" if place.exists() else "no such directory",
            )
        try:
            return place, Manifest.from_json(content.decode())
        except CheckpointError as error:
            raise CheckpointError(
                error.what, where=where, expected=error.expected, got=error.got, todo=error.todo
            ) from None
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError, ProtocolError) as error:
            raise CheckpointError("the manifest cannot be read", where=where, got=repr(error)) from None

    @property
    def where(self) -> str:
        return self.place.url

    def check_fits(self, spec: JobSpec) -> None:
        """Refuse a job with other parameters, tables or optimizers than the one this was saved from."""
        problems = self.fit(spec).problems
        if problems:
            raise CheckpointError(
                "the checkpoint does not fit the model and its optimizer",
                where=self.where,
                got="; ".join(problems),
                todo="Build model and optimizer as they were when it was saved, or name another checkpoint; what else "
                "can be used of it, fleet checkpoint export writes as plain tensors.",
            )

    def fit(self, spec: JobSpec) -> Fit:
        """Compare this checkpoint with the spec of a job, and return what it has of it."""
        saved, wanted = _outline(self.manifest.spec), _outline(spec)
        whole = frozenset(name for name in wanted if saved.get(name) == wanted[name])
        values = frozenset(name for name in wanted if name in saved and saved[name][0] == wanted[name][0]) - whole
        problems = [
            f"{name!r}: {_told(saved.get(name))} in the checkpoint, {_told(wanted.get(name))} in the job"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        return Fit(whole, values, frozenset(wanted) - whole - values, tuple(problems))

    def check_present(self) -> None:
        """Refuse a checkpoint whose files, or those it goes on from, are not all there in their sizes. No file is read
        for that."""
        for each in self.lineage():
            sizes: dict[str, dict[str, int | None]] = {}
            for piece in each.manifest.pieces:
                path = PurePosixPath(piece.file)
                folder = str(path.parent)
                if folder not in sizes:
                    sizes[folder] = each.place.sizes(folder)
                where = f"{each.place.url.rstrip('/')}/{piece.file}"
                if path.name not in sizes[folder]:
                    raise CheckpointError(_MISSING, where=where, todo=_GO_BACK)
                found = sizes[folder][path.name]
                if found is not None and found != piece.bytes:
                    raise CheckpointError(
                        "a piece of the checkpoint has another size than it was written with",
                        where=where,
                        expected=f"{piece.bytes} bytes",
                        got=f"{found} bytes",
                        todo=_GO_BACK,
                    )

    def lineage(self) -> list[Checkpoint]:
        """Return the checkpoints that this one consists of, the first one first."""
        lineage, before = [self], self.before
        while before is not None:
            lineage.append(before)
            before = before.before
        return lineage[::-1]

    def files(self, kind: str) -> list[tuple[Place, PieceFile]]:
        """Return the pieces of a kind, in the order in which they are to be taken. Rows come from all checkpoints of
        the lineage, later ones over earlier ones; the rest is whole in the last one."""
        sources = self.lineage() if kind == TABLE else [self]
        found = [(each.place, [piece for piece in each.manifest.pieces if kind in piece.about]) for each in sources]
        return [(place, piece) for place, pieces in found for piece in rows_in_order(pieces)]

    def pieces(self, kind: str, *, once: bool = False) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Yield what the pieces of a kind are, and their tensors, each read and verified; use them before asking for
        the next piece, since the next ones are read meanwhile. ``once`` says that nobody else on this machine reads
        them."""
        files = deque(self.files(kind))
        with ThreadPoolExecutor(_READERS, thread_name_prefix="fleet-checkpoint") as reader:
            ahead: deque[tuple[dict[str, Any], Future[list[torch.Tensor]]]] = deque()
            while files or ahead:
                if files:
                    place, piece = files.popleft()
                    ahead.append((piece.about, reader.submit(self._read, place, piece, once)))
                    if len(ahead) <= _READERS:
                        continue
                about, coming = ahead.popleft()
                tensors = coming.result()
                yield about, tensors
                tensors.clear()  # before the next one takes its place: a loop over these holds the list until then
                del coming

    def piece(self, kind: str, number: int) -> tuple[dict[str, Any], list[torch.Tensor], bool]:
        """Return what the piece of a kind with this number is, its tensors, and whether another one follows."""
        files = list(self.files(kind))
        if not 0 <= number < len(files):
            return {}, [], False
        place, piece = files[number]
        return piece.about, self._read(place, piece, False), number + 1 < len(files)

    def _read(self, place: Place, piece: PieceFile, once: bool) -> list[torch.Tensor]:
        try:
            return read(place, piece, once=once)
        except CheckpointError:
            self._refuse_replaced()
            raise

    def _refuse_replaced(self) -> None:
        """Raise if another checkpoint has come to the place of one of these: its pieces are gone, and not damaged."""
        for each in self.lineage():
            present = self.open_manifest(each.place)[1]
            if present.id != each.manifest.id:
                raise CheckpointError(
                    "the checkpoint was replaced while it was read",
                    where=each.where,
                    expected=f"checkpoint {each.manifest.id}",
                    got=f"checkpoint {present.id}",
                    todo="Load again.",
                )


def lacking_tables(spec: JobSpec, manifests: Iterable[Manifest]) -> list[str]:
    """Return the tables of which nothing was saved; a table that was saved without rows is not among them."""
    there = {piece.about.get(TABLE) for manifest in manifests for piece in manifest.pieces}
    return [table.name for table in spec.tables if table.name not in there]


def chain(dirname: object) -> Iterator[tuple[Place, Manifest]]:
    """Yield the manifest that a user names, then one after the other those that it goes on from."""
    place, manifest = Checkpoint.open_manifest(place_at(dirname))
    known = {manifest.id}
    yield place, manifest
    while (parent := manifest.parent) is not None:
        seen_from = place
        place, manifest = Checkpoint.open_manifest(referred(parent.place, seen_from))
        if manifest.id != parent.id:
            raise CheckpointError(
                "a delta goes on from a checkpoint that is not there any more",
                where=seen_from.url,
                expected=f"checkpoint {parent.id} at {place.url}",
                got=f"checkpoint {manifest.id}, which was saved there later",
            )
        if manifest.id in known:
            raise CheckpointError("a delta goes on from itself", where=place.url)
        known.add(manifest.id)
        yield place, manifest


def read(place: Place, piece: PieceFile, *, once: bool = False) -> list[torch.Tensor]:
    """Read and verify the tensors of a piece."""
    where = f"{place.url.rstrip('/')}/{piece.file}"
    try:
        data = place.read(piece.file, piece.bytes + 1, once=once)
    except CheckpointError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise CheckpointError(_MISSING, where=where, got=str(error), todo=_GO_BACK) from None
    try:
        return decoded(piece, data, where)
    except CheckpointError as error:
        raise CheckpointError(
            error.what, where=error.where, expected=error.expected, got=error.got, todo=_GO_BACK
        ) from None


def _outline(spec: JobSpec) -> dict[str, tuple[str, str]]:
    """Return by name what must be the same for values to be taken over, and what for the optimizer's state."""
    rules = [group.rule for group in spec.groups]
    params = {p.name: (f"{p.dtype} {p.shape}", rules[p.group]) for p in spec.params}
    return params | {t.name: (f"table of {t.dtype} x {t.dim}", rules[t.group]) for t in spec.tables}


def _told(outline: tuple[str, str] | None) -> str:
    return "absent" if outline is None else ", ".join(outline)
