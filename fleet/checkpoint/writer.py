"""Writes a checkpoint so that it exists whole or not at all.

The pieces go into a folder of their own, which several processes may fill; the manifest that names them comes last. A
new directory is filled beside its place and renamed into it. Where a directory is already (a volume may be mounted
there, so it stays), or where nothing can be renamed, the manifest appears from one moment to the next, and only then do
the pieces go that nobody names any more.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import PurePosixPath
from types import TracebackType

from fleet.checkpoint.files import sync_directory
from fleet.checkpoint.manifest import MANIFEST, TABLE, Checkpoint, Manifest, Parent, Saved, is_checkpoint
from fleet.checkpoint.pieces import PieceFile, PieceWriter
from fleet.checkpoint.places import (
    Claimed,
    Directory,
    Place,
    is_abandoned,
    place_at,
    reference,
    refuse_unwritable,
    writing,
)
from fleet.errors import CheckpointError
from fleet.plan.specs import JobSpec

_TOKEN = "[0-9a-f]{8}"
_FOLDER = "fleet-pieces-"
#: What checkpoints of a series are called.
_STEP = r"step-\d{8,}"
#: What errors call it.
_WHAT = "a checkpoint"
#: Names of what a checkpoint is made of, or was to be: nobody else's things look like that.
_OURS = re.compile(rf"\.?{_FOLDER}{_TOKEN}|\.{re.escape(MANIFEST)}-{_TOKEN}")


class CheckpointWriter:
    """Writes a checkpoint. Leaving it as a context without ``commit`` removes what was written."""

    def __init__(self, dirname: object, after: Saved | None = None) -> None:
        """``after`` is the checkpoint that this one goes on from, as a delta."""
        self.id = secrets.token_hex(8)
        self._final = place_at(dirname)
        self._inside = not isinstance(self._final, Directory) or self._final.exists()
        self._refuse_others()
        token = secrets.token_hex(4)
        self._folder_name = f"{_FOLDER}{token}"
        #: where the manifest and its folder are made, and what is locked while others might meddle with that
        self._root = self._ground = self._final
        if isinstance(self._final, Directory) and not self._inside:
            self._ground = Directory(self._final.path.parent)
            self._root = self._ground.within(f".{self._final.path.name}.{token}")
        self._publishing = False
        self._after = after
        self._kept: tuple[PieceFile, ...] = ()
        self._parent: Parent | None = None
        if after is not None:
            self._go_on_from(after)
        self._files: list[PieceFile] = []

    def _refuse_others(self) -> None:
        names = self._final.names()
        may = is_checkpoint(self._final) or all(_OURS.fullmatch(name) for name in names)
        if isinstance(self._final, Directory) and self._final.exists() and not self._final.path.is_dir():
            may = False
        if not may:
            raise CheckpointError(
                "will not write a checkpoint over something else",
                where=self._final.url,
                expected="a new or empty directory, or a checkpoint to replace",
                todo="Choose another directory.",
            )

    def _go_on_from(self, after: Saved) -> None:
        before = Checkpoint.open(after.url)
        _check_present(after, before.manifest)
        if before.place.url == self._final.url:
            self._kept = tuple(piece for piece in before.manifest.pieces if TABLE in piece.about)
            self._parent = before.manifest.parent
            return
        if any(each.place.url == self._final.url for each in before.lineage()):
            raise CheckpointError(
                "a delta would replace a checkpoint that it needs",
                where=self._final.url,
                expected=f"a new directory, or the last checkpoint's, {after.url}",
            )
        self._parent = Parent(reference(before.place, self._final), after.id)

    def __enter__(self) -> CheckpointWriter:
        with writing(_WHAT, self._final.url):
            self._begin()
        return self

    def _begin(self) -> None:
        self._ground.make()
        with self._ground.alone():  # a folder that is just being made looks abandoned
            self._remove_dead_drafts()
            try:
                self._root.make()
                self._claimed = Claimed(self._root.within(self._folder_name))
            except BaseException:
                self._drop()
                raise

    def _remove_dead_drafts(self) -> None:
        """Remove what writers that were killed left beside this place: of the same name, or of any other step, which a
        series may never come to again."""
        if not isinstance(self._final, Directory) or self._inside:
            return
        own = self._final.path.name
        draft = re.compile(rf"\.{_STEP if re.fullmatch(_STEP, own) else re.escape(own)}\.{_TOKEN}")
        for name in self._ground.names():
            place = self._ground.within(name)
            if draft.fullmatch(name) and all(is_abandoned(place.within(inner)) for inner in place.names()):
                self._ground.remove(name)

    @property
    def folder(self) -> Place:
        """Return where the pieces go."""
        return self._claimed.folder

    @property
    def proof(self) -> str:
        """Return what another process finds in the folder if it looks at the same one."""
        return self._claimed.proof

    def pieces(self, prefix: str) -> PieceWriter:
        """Return a writer for pieces of this process; give their files to ``add``."""
        return PieceWriter(self.folder, self._folder_name, prefix)

    @property
    def folder_name(self) -> str:
        return self._folder_name

    def add(self, files: Iterable[PieceFile]) -> None:
        """Take pieces that have been written, by this process or another."""
        for each in files:
            name = PurePosixPath(each.file).name
            found = self.folder.size(name) if self.folder.has(name) else None
            if each.file != f"{self._folder_name}/{name}" or found != each.bytes:
                raise CheckpointError(
                    "a piece is not there as it was written",
                    where=f"{self.folder.url}/{name}",
                    expected=f"{each.bytes} bytes",
                    got="nothing" if found is None else f"{found} bytes",
                    todo="Every process has to see one and the same directory.",
                )
            self._files.append(each)

    def commit(self, version: int, seed: int, spec: JobSpec) -> Saved:
        """Make the checkpoint appear."""
        manifest = Manifest(self.id, version, seed, spec, (*self._kept, *self._files), self._parent)
        if isinstance(self.folder, Directory):
            sync_directory(self.folder.path)
        data = manifest.to_json().encode()
        with self._ground.alone():
            if self._after is not None:
                _check_present(self._after, Checkpoint.open_manifest(place_at(self._after.url))[1])
            if self._inside:
                before = _manifest_of(self._final)
                self._publishing = True
                self._final.publish(MANIFEST, data)
                self._clean(manifest, before)
                self._claimed.done()
            else:
                self._root.publish(MANIFEST, data)
                self._claimed.done()
                self._publishing = True
                self._rename()
        return Saved(self.id, self._final.url)

    def _rename(self) -> None:
        assert isinstance(self._root, Directory)
        assert isinstance(self._final, Directory)
        try:
            os.rename(self._root.path, self._final.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise CheckpointError(
                "something else has come to where a checkpoint was to be",
                where=self._final.url,
                got=str(error),
                todo="Let every job save to a directory of its own.",
            ) from None
        sync_directory(self._final.path.parent)

    def _clean(self, manifest: Manifest, before: Manifest | None) -> None:
        """Remove the pieces that the manifest before this one named, and those that dead writers have left."""
        named = {piece.file for piece in manifest.pieces}
        superseded = set() if before is None else {piece.file for piece in before.pieces} - named
        for file in superseded:
            self._final.remove(file)
        empty = {_folder(file) for file in superseded} - {_folder(file) for file in named}
        for name in self._final.names():
            dead = _OURS.fullmatch(name) and is_abandoned(self._final.within(name))
            if name in empty or (dead and name not in {_folder(file) for file in named}):
                self._final.remove(name)

    def _drop(self) -> None:
        if self._inside:
            self._final.remove(self._folder_name)
        elif isinstance(self._root, Directory):
            self._ground.remove(self._root.path.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._claimed.close()
        if not (self._publishing and self._may_be_there()):
            self._drop()
        refuse_unwritable(_WHAT, self._final.url, error)

    def _may_be_there(self) -> bool:
        """Say whether the manifest that names the pieces is there, or may be: then they must stay."""
        try:
            present = Checkpoint.open_manifest(self._final)[1].id
        except CheckpointError:
            present = self.id if self._final.has(MANIFEST) else ""
        return present == self.id


def is_debris(place: Place) -> bool:
    """Say whether there is nothing here but what a removal that was interrupted, or a writer that was killed, left."""
    names = place.names()
    return bool(names) and all(_OURS.fullmatch(name) and is_abandoned(place.within(name)) for name in names)


def can_go_on_from(saved: Saved) -> bool:
    """Say whether a checkpoint, and all that it goes on from itself, is still where it was saved."""
    try:
        before = Checkpoint.open(saved.url)
        _check_present(saved, before.manifest)
    except CheckpointError:
        return False
    return True


def _check_present(saved: Saved, present: Manifest) -> None:
    """Say whether the checkpoint that a delta goes on from is still where it was saved."""
    if present.id != saved.id:
        raise CheckpointError(
            "the checkpoint that a delta would go on from has been replaced",
            where=saved.url,
            expected=f"checkpoint {saved.id}",
            got=f"checkpoint {present.id}",
            todo="Save a full checkpoint.",
        )


def _folder(file: str) -> str:
    return PurePosixPath(file).parts[0]


def _manifest_of(place: Place) -> Manifest | None:
    """Return what is at a place, if it can be read."""
    try:
        return Checkpoint.open_manifest(place)[1]
    except CheckpointError:
        return None
