"""An asynchronous worker sends gradients and fetches parameters behind the user's back.

The user's thread puts each step's gradients into a short queue and goes on; a full queue holds it up, and nothing is
ever dropped. One thread takes the steps that wait there, merges them, lets the next look-up go first and pushes. While
a push is under way it makes the next one, if steps are not merged and another one waits already. When enough gradients
have gone, parameters are fetched: by another thread, or with the answer to the push if a thread is not wanted, or not
worth it. Fetched values lie ready until the user's thread takes them between two steps: parameters never change under a
forward or backward.

The first failure on either thread ends both; the user's next call raises it. When the servers say that the job has
moved, both rest until the user's thread has gone over to others, and then send again what was not acknowledged.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from fleet.base.settings import CommunicatorSettings
from fleet.errors import FleetError, ServersMovedError
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.gradient_merge import GradientMerge
from fleet.ps.worker.push import Gradients, MadePush

#: The unit of ``send_wait_times``.
SEND_WAIT_S = 0.01

#: So long gradients may wait for the look-up of the next forward, which servers answer at once as long as they are not
#: busy with gradients. Longer than it takes from the end of a step, and short beside a forward and backward.
COURTESY_S = 0.003

#: A thread of its own lets the sender go on while parameters are on their way. For fewer bytes of every server it costs
#: more, as one more request and one more thread that wants the interpreter: they come with the answer.
WORTH_BYTES = 256 << 10

#: Returns the gradients of a step, once they have come from where they were computed.
Arriving = Callable[[], Gradients]

#: Makes a push: of merged gradients, of which the reply is to bring the parameters along or not, so many pushes ahead.
Prepare = Callable[[Gradients, bool, int], MadePush]
Fetch = Callable[[], "list[Frame]"]


class Send(Protocol):
    """Sends a push, does something ``meanwhile``, and returns the answers."""

    def __call__(self, push: MadePush, *, meanwhile: Callable[[], object]) -> list[Frame]: ...


class IdleCommunicator:
    """Stands where each step waits for its answer: nothing is under way behind the user's thread."""

    def looked_up(self) -> None:
        """Note that the rows of a forward are there."""

    def flush(self) -> None:
        """Wait until the servers have acknowledged everything."""

    def drop_fetched(self) -> None:
        """Drop what has been fetched, or is being: the servers have other values now."""

    def refuse_if_moved(self) -> None:
        """Raise if a thread has met servers that the job has left, and rests."""

    def rest(self) -> None:
        """Ask nothing of the servers, until the job goes on with others; return when nothing is under way."""

    def go_on(self) -> None:
        """Go on, with other servers or the same ones; what was fetched and is not taken is theirs no more."""

    @property
    def queued(self) -> int:
        """Return how many steps wait to be sent."""
        return 0

    def end(self) -> None:
        """Tell the threads to stop; a request under way ends with its connection."""

    def join(self) -> None:
        """Wait for the threads to stop."""


class Communicator(IdleCommunicator):
    """Pushes and fetches on threads of its own."""

    def __init__(
        self,
        settings: CommunicatorSettings,
        merge: GradientMerge,
        prepare: Prepare,
        send: Send,
        fetch: Fetch,
        name: str,
        *,
        values_bytes: int,
        gives_way: bool,
        prepares_ahead: bool = False,
    ) -> None:
        """``values_bytes`` is the most that the parameters of a server weigh. With ``gives_way`` each step's gradients
        let the next look-up go first, which ``looked_up`` reports. ``prepares_ahead``: a push may be made while the one
        before is under way."""
        self._settings = settings
        self._merge = merge
        self._prepare = prepare
        self._send = send
        self._prepares_ahead = prepares_ahead and settings.max_merge_var_num == 1
        #: a push that was made while the one before was under way, of the first step in the queue
        self._ahead: MadePush | None = None
        self._fetch = fetch
        self._changed = threading.Condition()
        self._queue: deque[Arriving] = deque()
        self._sending = self._fetching = False
        #: how many requests are under way; whether none may be; and whether one has met servers that the job has left
        self._under_way = 0
        self._is_resting = self._has_moved = False
        self._sent_since_fetch = 0
        self._fresh: list[Frame] | None = None
        self._ending = False
        self._failure: BaseException | None = None
        self._gives_way = gives_way
        self._look_up_due = False
        loops = {"send": self._send_until_ended}
        self._fetches_apart = settings.independent_recv_thread and values_bytes >= WORTH_BYTES
        if self._fetches_apart:
            loops["recv"] = self._fetch_until_ended
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"fleet-{kind}-{name}", daemon=True)
            for kind, loop in loops.items()
        ]
        for thread in self._threads:
            thread.start()

    # ---------------------------------------------------------------- the user's thread

    def await_room(self) -> None:
        """Wait while the queue is full."""
        with self._changed:
            self._await_room()

    def _await_room(self) -> None:
        size = self._settings.send_queue_size
        self._changed.wait_for(lambda: self._over or self._has_moved or len(self._queue) < size)
        self._raise_failure()

    def put(self, gradients: Arriving) -> None:
        """Queue one step's gradients, when there is room."""
        with self._changed:
            self._await_room()
            self._queue.append(gradients)
            self._look_up_due = self._gives_way
            self._changed.notify_all()

    def fresh(self) -> list[Frame] | None:
        """Return what was fetched since the last call, if anything was."""
        with self._changed:
            self._raise_failure()
            fresh, self._fresh = self._fresh, None
            return fresh

    def looked_up(self) -> None:
        if self._look_up_due:
            with self._changed:
                self._look_up_due = False
                self._changed.notify_all()

    def flush(self) -> None:
        self.looked_up()  # none will come meanwhile
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._has_moved or not (self._queue or self._sending))
            self._raise_failure()
            self._refuse_if_moved()

    def drop_fetched(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._has_moved or not self._fetching)
            self._raise_failure()
            self._refuse_if_moved()
            self._fresh = None

    def refuse_if_moved(self) -> None:
        if self._has_moved:
            with self._changed:
                self._refuse_if_moved()

    def _refuse_if_moved(self) -> None:
        if self._has_moved:
            raise ServersMovedError("the job has moved to other servers")

    def rest(self) -> None:
        with self._changed:
            self._is_resting = True
            self._changed.wait_for(lambda: self._over or not self._under_way)

    def go_on(self) -> None:
        with self._changed:
            self._is_resting = self._has_moved = False
            self._fresh = None
            self._changed.notify_all()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    @property
    def _over(self) -> bool:
        return self._ending or self._failure is not None

    def _raise_failure(self) -> None:
        if isinstance(self._failure, FleetError):
            raise self._failure.again()
        if self._failure is not None:
            raise FleetError("a background thread of this worker failed", got=repr(self._failure)) from self._failure

    # ---------------------------------------------------------------- the threads

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _send_until_ended(self) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                return
            ahead, self._ahead = self._ahead, None
            merged = self._merged([arriving() for arriving in batch]) if ahead is None else ahead.gradients
            sent = self._sent_since_fetch + len(batch)
            brings = self._brings(sent)
            self._give_way()
            replies = self._insist(partial(self._push, ahead, merged, brings, 0 if brings else sent))
            if replies is None:
                return
            with self._changed:
                self._sending = False
                self._sent_since_fetch += len(batch)
                if brings:
                    self._sent_since_fetch, self._fresh = 0, replies
                self._changed.notify_all()

    def _push(self, ahead: MadePush | None, gradients: Gradients, brings: bool, sent: int) -> list[Frame]:
        """Push gradients, and make the next push meanwhile if its step waits already; that stays in the queue. After
        this one so many steps are ``sent`` since parameters came."""

        def prepare_next() -> None:
            if self._ahead is None and self._prepares_ahead and self._queue:
                arriving = self._queue[0]  # which nobody else takes
                self._ahead = self._prepare(arriving(), self._brings(sent + 1), 1)

        push = ahead or self._prepare(gradients, brings, 0)
        return self._send(push, meanwhile=prepare_next)

    def _brings(self, sent: int) -> bool:
        """Say whether the answer to a push is to bring the parameters, after which so many steps are sent."""
        return not self._fetches_apart and self._is_enough(sent)

    def _insist(self, ask: Callable[[], list[Frame]]) -> list[Frame] | None:
        """Return what the servers answer; if the job moves to others, what those do. None at the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or not (self._is_resting or self._has_moved))
                if self._over:
                    return None
                self._under_way += 1
            try:
                return ask()
            except ServersMovedError:
                with self._changed:
                    self._has_moved = True
            finally:
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify_all()

    def _next_batch(self) -> Sequence[Arriving]:
        """Return what to merge: up to so many steps, after some short waits for more; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._queue)
            batch: list[Arriving] = []
            waits_left = self._settings.send_wait_times
            while not self._over and len(batch) < self._settings.max_merge_var_num:
                if self._queue:
                    batch.append(self._queue.popleft())
                    self._sending = True
                    self._changed.notify_all()
                elif waits_left:
                    waits_left -= 1
                    self._changed.wait_for(lambda: self._over or self._queue, SEND_WAIT_S)
                else:
                    break
            return () if self._over else batch

    def _give_way(self) -> None:
        with self._changed:
            full = self._settings.send_queue_size
            self._changed.wait_for(lambda: self._over or not self._look_up_due or len(self._queue) >= full, COURTESY_S)

    def _merged(self, batch: Sequence[Gradients]) -> Gradients:
        if len(batch) == 1:
            return batch[0]
        for gradients in batch:
            self._merge.add(gradients)
        merged = self._merge.merged()
        self._merge.clear()
        return merged

    def _fetch_until_ended(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._is_enough(self._sent_since_fetch))
                if self._over:
                    return
                self._sent_since_fetch, self._fetching = 0, True
            replies = self._insist(self._fetch)
            if replies is None:
                return
            with self._changed:
                self._fetching, self._fresh = False, replies
                self._changed.notify_all()

    def _is_enough(self, sent: int) -> bool:
        return sent >= self._settings.min_send_grad_num_before_recv
