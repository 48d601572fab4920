"""Finds what a collective job goes on from: the newest checkpoint its workers see, which worker 0 reads for all.

Every worker writes down in the job's store what it sees, and all come to the same choice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fleet.checkpoint.places import Place
from fleet.checkpoint.resume_choice import BEGINNING, Mark, marks_from_json, marks_to_json, newest_of_all
from fleet.checkpoint.series import marks, name_of
from fleet.collective.process_group import Group
from fleet.errors import ConfigurationError

_log = logging.getLogger("fleet.checkpoint")


@dataclass(frozen=True)
class Resumption:
    """Says what the job goes on from; without a ``url`` it begins."""

    step: int
    url: str
    strict: bool


def resume(group: Group, root: Place, *, strict: bool) -> Resumption:
    if len(set(group.gather_texts("strict", str(strict)))) > 1:
        raise ConfigurationError(
            "resume_from was called with different values of strict",
            got=f"strict={strict} here",
            todo="Call it with the same arguments on every worker, and start the whole job again.",
        )
    seen = [marks_from_json(told) for told in group.gather_texts("sees", marks_to_json(marks(root)))]
    chosen = choose(seen)
    newest = max((each for some in seen for each in some), default=BEGINNING)
    if newest > chosen and group.rank == 0:
        _log.warning("resume_from goes on from %s: not all workers who see checkpoints see %s", chosen, newest)
    return Resumption(chosen.step, root.within(name_of(chosen.step)).url if chosen.id else "", strict)


def choose(seen: list[list[Mark]]) -> Mark:
    """Choose the newest checkpoint that is seen by all who see any. The others need to see none: worker 0 reads for
    them."""
    return newest_of_all([some for some in seen if some]) if seen[0] else BEGINNING
