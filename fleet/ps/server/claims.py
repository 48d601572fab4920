"""One worker does what only one does, such as writing a checkpoint or a model to serve, and the others wait until it is
done. For each such thing that is the first worker that asks, and one at a time; if it is lost amid that, the next of
those that wait does it anew. Where worker 0's own state belongs into a checkpoint, worker 0 does it, and the others
wait for it, and for its next process.

Not thread-safe: the caller holds the server's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.errors import DeadlineError, FleetError, ProtocolError
from fleet.ps.server.pending import Outbox, Waiting
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Respond
from fleet.ps.wire.wire_errors import error_reply

_LONGEST_NAME, _MOST_OPEN, _MOST_CLOSED = 8192, 64, 4096


@dataclass
class _Claim:
    """Holds one claim; ``begun`` once its writer has been let in. ``asking`` is the writer that waits to be let in. Of
    one that ``is_kept``, begun before this server was started again, the end may have been lost. ``since`` when nobody
    has begun it; None: since the next look at it."""

    writer: int
    since: float | None
    is_first_s: bool = False  #: nobody but worker 0 may be its writer
    begun: bool = False
    is_kept: bool = False
    asking: Waiting | None = None
    queue: list[Waiting] = field(default_factory=list)
    #: whose processes have come since it was begun, and count their calls from one
    missed: set[int] = field(default_factory=set)


@dataclass
class _Closed:
    """Holds a claim that is over: why it failed, if it did, who has heard of it, and whose processes were not there
    yet."""

    failure: FleetError | None
    informed: set[int]
    missed: set[int] = field(default_factory=set)

    def answers(self, worker: int) -> bool:
        return worker not in self.missed and (self.failure is None or worker in self.informed)


class Claims:
    def __init__(self, where: str, deadline_s: float, grant: Callable[[], Frame], *, only_first: bool) -> None:
        """``grant`` makes the answer that lets a worker in. With ``only_first``, worker 0 does what not everybody may
        do. ``where`` names this server in errors."""
        self._where = where
        self._deadline_s = deadline_s
        self._grant = grant
        self._only_first = only_first
        self._open: dict[str, _Claim] = {}
        #: what was done and what failed, by name: other workers may ask for it much later, and requests arrive twice
        self._closed: dict[str, _Closed] = {}

    def claim(
        self, name: str, by_anyone: bool, waiting: Waiting, now: float, first_is_gone: bool, outbox: Outbox
    ) -> None:
        """Grant the writing, or let the request wait until somebody else has done it."""
        worker, only_first = waiting.worker, self._only_first and not by_anyone
        if len(name) > _LONGEST_NAME or (name not in self._open and len(self._open) >= _MOST_OPEN):
            raise ProtocolError(
                "this cannot be claimed",
                expected=f"a name of up to {_LONGEST_NAME} characters, and {_MOST_OPEN} at once",
                got=repr(name)[:80],
            )
        closed = self._closed.get(name)
        if closed is not None and name not in self._open and closed.answers(worker):
            outbox.append(self._outcome(waiting, closed.failure))
            return
        if only_first and worker != 0 and first_is_gone:
            outbox.append((waiting.respond, error_reply(self._not_written("it has left"))))
            return
        self.went_on(worker, outbox, to=name)
        claim = self._open.setdefault(name, _Claim(0 if only_first else worker, now))
        claim.is_first_s = only_first
        if claim.writer != worker:
            claim.queue.append(waiting)
            return
        claim.asking = waiting.repeating(claim.asking)
        if claim.begun or not any(each.begun for each in self._open.values()):
            self._let_in(claim, outbox)

    def _let_in(self, claim: _Claim, outbox: Outbox) -> None:
        assert claim.asking is not None
        claim.begun = True
        outbox.append((claim.asking.respond, self._grant()))
        claim.asking = None

    def release(self, name: str, worker: int, failure: str, outbox: Outbox) -> None:
        """Close a claim: its writer is done, or has failed. A late repetition closes nobody else's; one that was
        interrupted while it waited is let in no more."""
        claim = self._open.get(name)
        if claim is None:
            return
        if claim.writer != worker:
            claim.queue = [each for each in claim.queue if each.worker != worker]
            return
        reason = failure[:_LONGEST_NAME]
        self._close(name, FleetError(f"worker {worker} failed in {name}", got=reason) if reason else None, outbox)

    def went_on(self, worker: int, outbox: Outbox, to: str = "") -> None:
        """Close what a worker had begun before this server was started again, and has left behind, for its next step or
        ``to`` begin another thing: it has heard that its end was known here, and that was lost."""
        for name in [name for name, claim in self._open.items() if claim.is_kept and claim.writer == worker]:
            if name != to:
                self._close(name, None, outbox)

    def joined(self, worker: int) -> None:
        """Let in a process that counts its calls from one: none of them is among those that others have made before."""
        for missed in [each.missed for each in self._closed.values()] + [each.missed for each in self._open.values()]:
            missed.add(worker)

    def left(self, worker: int, gone: FleetError, outbox: Outbox) -> None:
        """Answer what a process asked that is ``gone``. What it had begun, another one does anew."""
        for name, claim in list(self._open.items()):
            asked = [*claim.queue, *([] if claim.asking is None else [claim.asking])]
            outbox += [(each.respond, error_reply(gone)) for each in asked if each.worker == worker]
            claim.queue = [each for each in claim.queue if each.worker != worker]
            if claim.writer != worker:
                continue
            claim.begun, claim.is_kept, claim.since, claim.asking = False, False, None, None
            if not claim.queue:
                del self._open[name]
            elif not claim.is_first_s:
                claim.writer = claim.queue[0].worker
                for waiting in [each for each in claim.queue if each.worker == claim.writer]:
                    claim.queue.remove(waiting)
                    claim.asking = waiting.repeating(claim.asking)
        self._let_in_next(outbox)

    def tick(self, now: float, outbox: Outbox) -> None:
        """Answer requests that wait for something that nobody begins."""
        for name, claim in list(self._open.items()):
            claim.since = now if claim.since is None else claim.since
            if not claim.begun and claim.asking is None and now - claim.since > self._deadline_s:
                self._close(name, self._not_written(f"none in {now - claim.since:.1f} s"), outbox)

    def waiting(self) -> list[Waiting]:
        return [
            waiting
            for claim in self._open.values()
            for waiting in (*claim.queue, *([] if claim.asking is None else [claim.asking]))
        ]

    def dump(self) -> dict[str, Any]:
        """Return who has begun what, and who has done what; those who wait will ask again."""
        begun = {name: claim.writer for name, claim in self._open.items() if claim.begun}
        kept = [name for name, claim in self._open.items() if claim.is_kept]  # their ends stay lost where the job moves
        done = {name: sorted(closed.missed) for name, closed in self._closed.items() if closed.failure is None}
        missed = {name: sorted(self._open[name].missed) for name in begun}
        return {"begun": begun, "kept": kept, "missed": missed, "done": done}

    def restore(self, dumped: Mapping[str, Any], now: float) -> None:
        """Become the claims that were dumped."""
        kept, missed = dumped.get("kept", ()), dumped.get("missed", {})  # earlier releases lack the second
        self._open = {
            name: _Claim(writer, now, begun=True, is_kept=name in kept, missed=set(missed.get(name, ())))
            for name, writer in dumped["begun"].items()
        }
        self._closed = {name: _Closed(None, set(), set(missed)) for name, missed in dumped["done"].items()}

    def restarted(self) -> None:
        """Note that what is open is what this server had kept of its claims."""
        for claim in self._open.values():
            claim.is_kept = claim.begun

    def clear(self) -> None:
        self._open.clear()

    def _close(self, name: str, failure: FleetError | None, outbox: Outbox) -> None:
        claim = self._open.pop(name)
        came = {claim.writer} if claim.begun or claim.asking is not None else set()
        came |= {waiting.worker for waiting in claim.queue}
        before = self._closed.pop(name, None)
        missed = claim.missed if before is None else claim.missed | before.missed
        self._closed[name] = _Closed(failure, came, missed - came)
        if len(self._closed) > _MOST_CLOSED:
            del self._closed[next(iter(self._closed))]
        outbox += [self._outcome(waiting, failure) for waiting in claim.queue]
        self._let_in_next(outbox)

    def _let_in_next(self, outbox: Outbox) -> None:
        following = next((claim for claim in self._open.values() if claim.asking is not None), None)
        if following is not None and not any(claim.begun for claim in self._open.values()):
            self._let_in(following, outbox)

    @staticmethod
    def _outcome(waiting: Waiting, failure: FleetError | None) -> tuple[Respond, Frame]:
        return waiting.respond, waiting.answer() if failure is None else error_reply(failure)

    def _not_written(self, got: str) -> DeadlineError:
        return DeadlineError(
            "worker 0 did not write the checkpoint",
            where=self._where,
            expected="its call of save_persistables: its optimizer's state belongs into the checkpoint",
            got=got,
            todo="Call save_persistables on the first worker, alone or with the others.",
        )
