"""Names what the worker that moves a job to other servers and these have to call alike."""

from __future__ import annotations

from fleet.errors import ProtocolError

#: What the names of moves begin with.
ATTEMPT = "move "
#: What the state of a server that stands still has: of pushes that wait there, and of what each worker was given, what
#: tells them apart. A cursor that begins so asks for one of them.
PUSHED, GIVEN = "pushed:", "given:"
#: Whether such a server may have lost what it had acknowledged.
LACKS = "lacks"

#: No number of a worker, table or row has so many.
_DIGITS = 19


def given_cursor(worker: int | None, table: int | None, start: int = 0) -> str:
    """Return the cursor that asks for what a worker was given of a table, from so many rows on; or all workers, of
    dense values."""
    return f"{GIVEN}{'' if worker is None else worker}:{'' if table is None else table}:{start}"


def read_given_cursor(cursor: str) -> tuple[int | None, int | None, int]:
    parts = cursor.removeprefix(GIVEN).split(":")
    are_numbers = all(part.isascii() and (part or "0").isdigit() and len(part) < _DIGITS for part in parts)
    if len(parts) != 3 or not are_numbers or not parts[2]:
        raise ProtocolError("an export's cursor is unknown", got=repr(cursor)[:60])
    worker, table, start = (int(part) if part else None for part in parts)
    return worker, table, start or 0
