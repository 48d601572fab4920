"""Writes something once for the whole job: the first worker that asks does it, and the others wait in the store."""

from __future__ import annotations

from collections.abc import Callable

from fleet.base.outcome import telling
from fleet.collective.worker import CollectiveWorker
from fleet.errors import FleetError


def write_once(worker: CollectiveWorker, what: str, write: Callable[[], None]) -> None:
    """Return when ``what`` has been written after this step, by this worker's ``write`` or by another's; a failure is
    raised on all. Who calls it again has it written again."""
    monitor, key = worker.group.monitor, f"write/{worker.name_of_call(what)}"
    writer = monitor.ask(lambda store: store.compare_set(f"{key}/writer", "", str(monitor.rank)))
    if int(writer) != monitor.rank:
        monitor.until(lambda store: store.check([f"{key}/outcome"]) or None)
        failure = monitor.ask(lambda store: store.get(f"{key}/outcome")).decode()
        if failure:
            raise FleetError(f"worker {int(writer)} could not write {what}", got=failure)
        return
    with telling(lambda failure: monitor.ask(lambda store: store.set(f"{key}/outcome", failure))):
        write()
