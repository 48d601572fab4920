"""A worker's lines to all servers, which it asks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleet.errors import FleetError
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.connection import Pending, ServerClient
from fleet.ps.worker.progress import Progress
from fleet.telemetry.worker_figures import ProfilerRange


class Lines:
    def __init__(self, clients: Sequence[ServerClient], progress: Progress) -> None:
        self.clients = clients
        self._progress = progress

    def ask(self, what: str, at_once: int | None = None, **kind: object) -> list[Frame]:
        """The same request to every server, as ``ServerClient.request`` has it."""
        step = self._progress.completed
        return self.ask_all(lambda _, client: Frame(client.request(step, **kind)), what, at_once)

    def ask_all(self, make: Callable[[int, ServerClient], Frame], what: str, at_once: int | None = None) -> list[Frame]:
        """One request to every server, all under way at once, or so many."""
        failure: FleetError | None = None
        replies = []
        numbered = list(enumerate(self.clients))
        for start in range(0, len(numbered), at_once or len(numbered)):
            some = numbered[start : start + (at_once or len(numbered))]
            pendings: list[Pending] = []
            try:
                for server, client in some:
                    pendings.append(client.start(make(server, client), what))
                for pending in pendings:
                    pending.send()
                with ProfilerRange("fleet.wait"):
                    for pending in pendings:
                        try:
                            replies.append(pending.result())
                        except FleetError as error:  # the others still get their answer
                            failure = failure or error
            except BaseException:  # interrupted: what nobody reads any more must hold nothing up
                for pending in pendings:
                    pending.abandon()
                raise
        if failure is not None:
            raise failure
        return replies

    def farewell(self, **word: object) -> None:
        """A last word to every server, whether it arrives or not."""
        for client in self.clients:
            client.farewell(Frame(client.request(self._progress.completed, **word)))

    def fail(self, error: FleetError) -> None:
        """End all of them, for whichever thread asks."""
        for client in self.clients:
            client.fail(error)

    @property
    def reported(self) -> bool:
        """Whether the user has been told what ended one of them."""
        return any(client.reported for client in self.clients)

    @property
    def sound(self) -> bool:
        """Whether this worker is in the job, and has heard of no end of it."""
        return any(client.let_in for client in self.clients) and all(client.failure is None for client in self.clients)

    @property
    def sent_bytes(self) -> int:
        return sum(client.sent_bytes for client in self.clients)

    @property
    def received_bytes(self) -> int:
        return sum(client.received_bytes for client in self.clients)

    def close(self) -> None:
        for client in self.clients:
            client.close()
