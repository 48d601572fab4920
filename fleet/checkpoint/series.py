"""A directory of checkpoints, each named after its step: which is the newest, and which are too old."""

from __future__ import annotations

import logging
import re

from fleet.checkpoint.manifest import MANIFEST, Checkpoint, is_checkpoint
from fleet.checkpoint.places import Place
from fleet.errors import CheckpointError

_log = logging.getLogger("fleet.checkpoint")

_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def steps_in(root: Place) -> list[int]:
    """The steps that have a directory of their own, whatever is in it, in their order."""
    found = (_NAME.fullmatch(name) for name in root.names())
    return sorted(int(match[1]) for match in found if match is not None and match[0] == name_of(int(match[1])))


def latest(root: Place) -> Checkpoint | None:
    """The one of the latest step that is complete, with all that it goes on from."""
    for step in reversed(steps_in(root)):
        place = root.within(name_of(step))
        if place.has(MANIFEST):
            try:
                return Checkpoint.open(place.url)
            except CheckpointError as error:
                _log.warning("passing by what is no complete checkpoint: %s", error)
    return None


def remove_old(root: Place, keep: int, newest: int) -> None:
    """Keep so many, up to the step ``newest``, and what they go on from. Of later steps there may be some that an
    earlier run has left; they are not of this series."""
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
