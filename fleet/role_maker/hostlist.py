"""Parses lists as Slurm abbreviates them: ``node[01-03,7],gpu1`` for hosts, ``2(x3),1`` for tasks on each."""

from __future__ import annotations

import re
from itertools import product
from math import prod

from fleet.base.cluster import parse_address

#: More hosts, or tasks, are no job but a mistake, found before memory is taken for them.
MOST = 1 << 15

_NUMBER = r"\d{1,12}"
_RANGES = rf"\[{_NUMBER}(?:-{_NUMBER})?(?:,{_NUMBER}(?:-{_NUMBER})?)*\]"
_PIECE = rf"[\w.-]+|{_RANGES}"
_NAME = rf"(?:{_PIECE})+"


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names of a host list in its order; raise ``ValueError`` if it is none. Leading zeros stay: ``[08-10]``
    is 08, 09, 10. A name may have several brackets, of which the last one counts up first."""
    if not re.fullmatch(rf"{_NAME}(?:,{_NAME})*", text, re.ASCII):
        raise ValueError(text)
    hosts: list[str] = []
    for name in re.finditer(_NAME, text, re.ASCII):
        pieces = [_choices(piece) for piece in re.findall(_PIECE, name[0], re.ASCII)]
        _refuse_more_than_most(len(hosts) + prod(map(len, pieces)))
        hosts.extend(parse_address("".join(name))[0] for name in product(*pieces))
    return tuple(hosts)


def _choices(piece: str) -> list[str]:
    if not piece.startswith("["):
        return [piece]
    found: list[str] = []
    for span in piece[1:-1].split(","):
        first, _, last = span.partition("-")
        low, high = int(first), int(last or first)
        if low > high:
            raise ValueError(span)
        _refuse_more_than_most(len(found) + high - low + 1)
        found.extend(f"{number:0{len(first)}}" for number in range(low, high + 1))
    return found


def expand_counts(text: str) -> tuple[int, ...]:
    """Return how many tasks each node has, from ``2(x3),1``; raise ``ValueError`` if it is no such list."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(rf"({_NUMBER})(?:\(x({_NUMBER})\))?", part.strip(), re.ASCII)
        if found is None:
            raise ValueError(text)
        count, times = int(found[1]), int(found[2] or 1)
        if not count or not times:
            raise ValueError(text)
        _refuse_more_than_most(sum(counts) + count * times)
        counts.extend([count] * times)
    return tuple(counts)


def _refuse_more_than_most(number: int) -> None:
    if number > MOST:
        raise ValueError(f"more than {MOST}")
