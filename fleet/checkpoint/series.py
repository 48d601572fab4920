"""Lists a directory of checkpoints named after their steps: which is the newest, and which are too old."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from itertools import islice

from fleet.checkpoint.manifest import MANIFEST, Checkpoint, is_checkpoint
from fleet.checkpoint.places import Directory, Place, place_at
from fleet.checkpoint.resume_choice import MOST_TOLD, Mark
from fleet.checkpoint.writer import is_debris
from fleet.errors import CheckpointError

_log = logging.getLogger("fleet.checkpoint")

_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def steps_in(root: Place) -> list[int]:
    """Return the steps that have a directory of their own, whatever is in it, in their order."""
    found = (_NAME.fullmatch(name) for name in root.names())
    return sorted(int(match[1]) for match in found if match is not None and match[0] == name_of(int(match[1])))


def root_at(given: object) -> Place:
    """Return the place of a series that a user names, which need not be there yet."""
    root = place_at(given)
    try:
        got = "a checkpoint" if root.has(MANIFEST) else "a file" if root.is_file() else _file_above(root)
    except CheckpointError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise CheckpointError("this place cannot be read", where=root.url, got=repr(error)) from None
    if got is not None:
        raise CheckpointError(
            "this is no directory of checkpoints",
            where=root.url,
            expected="one that holds step-00000100 and so on, as fleet.Checkpoints makes them, or none yet",
            got=got,
            todo="Name the directory; fleet.init_server(model_dir) begins with one checkpoint.",
        )
    return root


def _file_above(root: Place) -> str | None:
    """Return in words the file that keeps a directory from being made here, if there is one. Stores have no such
    thing."""
    if not isinstance(root, Directory):
        return None
    nearest = next((path for path in root.path.parents if path.exists()), root.path)
    return None if nearest.is_dir() or nearest == root.path else f"a path below a file, {nearest}"


def complete(root: Place) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints whose lineage is complete as well, the latest step first; each lies where its step
    says."""
    for step in reversed(steps_in(root)):
        place = root.within(name_of(step))
        try:
            found = opened(place)
        except CheckpointError as error:
            _log.warning("passing by what is no complete checkpoint: %s", error)
            continue
        if found is not None and found.manifest.version != step:
            told = "passing by %s, which is called after another step than that of the checkpoint in it, step %d"
            _log.warning(told, place.url, found.manifest.version)
        elif found is not None:
            yield found


def opened(place: Place) -> Checkpoint | None:
    """Open the checkpoint that is here; None if one is being written, or was never finished."""
    if not place.has(MANIFEST):
        got = "a file" if place.is_file() else f"a directory called {MANIFEST}" if MANIFEST in place.names() else None
        if got is None:
            return None
        if not place.has(MANIFEST):  # else it has just been finished
            raise CheckpointError(
                "there is no checkpoint here", where=place.url, expected=f"a directory with a file {MANIFEST}", got=got
            )
    found = Checkpoint.open(place.url)
    found.check_present()
    return found


def marks(root: Place) -> list[Mark]:
    """Return the newest complete checkpoints."""
    try:
        return [Mark(each.manifest.version, each.manifest.id) for each in islice(complete(root), MOST_TOLD)]
    except CheckpointError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise CheckpointError("this place cannot be read", where=root.url, got=repr(error)) from None


def latest(root: Place) -> Checkpoint | None:
    return next(complete(root), None)


def remove_old(root: Place, keep: int, newest: int) -> None:
    """Keep so many checkpoints, up to the step ``newest``, and what they go on from. Later steps are left alone: an
    earlier run may have left them, and they are not of this series. What is left of a removal that was interrupted goes
    as well."""
    steps = [step for step in steps_in(root) if step <= newest]
    places = {step: place for step in steps if is_checkpoint(place := root.within(name_of(step)))}
    kept = sorted(places)[-keep:]
    needed = {each.place.url for step in kept for each in Checkpoint.open(places[step].url).lineage()}
    # The later ones first, so that nothing is there at any moment that lacks what it goes on from; and the manifest
    # first, so that what is left of a removal that is interrupted is no checkpoint.
    for step in sorted(places, reverse=True):
        if places[step].url not in needed:
            places[step].remove(MANIFEST)
            root.remove(name_of(step))
    for name in map(name_of, steps):
        if is_debris(root.within(name)):
            root.remove(name)
