"""A reader goes through tables part by part, and may stop before their end: whoever has one says when that is, so that
nothing is kept any longer for what would come next."""

from __future__ import annotations

from fleet.ps.table.store import Store


class Reader:
    def __init__(self) -> None:
        #: where scans go on that have not come to their end; whoever asks twice for a part may begin one twice
        self._open: set[tuple[Store, int]] = set()

    def went_on(self, store: Store, start: int, place: int | None) -> None:
        """Note that a scan has come from one place to another, or to its end."""
        self._open.discard((store, start))
        if place is not None:
            self._open.add((store, place))

    def leave(self) -> None:
        """Read no further."""
        for store, place in self._open:
            store.leave(place)
        self._open.clear()
