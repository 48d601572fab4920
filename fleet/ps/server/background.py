"""A server does some things for one worker beside the training, on a thread of their own: it writes its share of a
checkpoint, or gets other values ready to take the place of those it has.

Workers that ask again, because their connection broke meanwhile, get the answer to their first request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fleet.errors import CheckpointError, FleetError, TableFileError
from fleet.numeric.tensors import WireTensor
from fleet.ps.server.checkpoint_reader import Restore
from fleet.ps.server.object_states import ObjectState
from fleet.ps.table.frozen_view import FrozenView
from fleet.ps.table.reader import Reader
from fleet.ps.table.shard import Shard
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Respond
from fleet.ps.wire.wire_errors import error_reply

_log = logging.getLogger("fleet.server")


class BackgroundTask:
    """Does one piece of work that was asked for by a name, and answers those who wait for it."""

    def __init__(self, name: str, work: Callable[[], Frame], what: str, *, is_kept: bool) -> None:
        """``what`` names the work in errors; ``is_kept`` says that a server that loses rows is started again with all
        of them."""
        self.name = name
        self.what = what
        self._is_kept = is_kept
        self._work: Callable[[], Frame] | None = work
        self._lock = threading.Lock()
        self._asking: list[Respond] = []
        self._held_up: list[Respond] = []
        self._reply: Frame | None = None
        self._may_go_on = False

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"fleet-{self.name}", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._reply is not None

    def answer(self, respond: Respond) -> None:
        """Send the outcome, now or when it is there."""
        with self._lock:
            if self._reply is None:
                self._asking.append(respond)
                return
        respond(self._reply)

    def answer_early(self, respond: Respond) -> None:
        """Say, now or when it is so, that the job may go on while the rest is done; or send the outcome."""
        with self._lock:
            if self._reply is None and not self._may_go_on:
                self._held_up.append(respond)
                return
        respond(self._reply or Frame(pb.Reply(granted=True)))

    def let_go_on(self) -> None:
        """Stop holding the job up: what is left to do is done beside it."""
        with self._lock:
            self._may_go_on, held_up, self._held_up = True, self._held_up, []
        for respond in held_up:
            respond(Frame(pb.Reply(granted=True)))

    def _run(self) -> None:
        work, self._work = self._work, None  # it knows this task, and may hold values as large as all others together
        assert work is not None, "it is started once"
        try:
            reply = work()
        except FleetError as error:
            if self._is_kept and isinstance(error, TableFileError):
                return  # unanswered, it is asked again when the server is there again
            reply = error_reply(error)
        except Exception as error:
            _log.warning("%s failed", self.what, exc_info=error)
            reply = error_reply(CheckpointError(f"{self.what} failed", got=f"{type(error).__name__}: {error}"))
        with self._lock:
            self._reply, asking = reply, self._asking + self._held_up
        for respond in asking:
            respond(reply)


@dataclass(frozen=True)
class Loaded:
    """Holds a checkpoint that has been read, and the attempt it was read for."""

    attempt: str
    restore: Restore
    shard: Shard
    states: Mapping[int, ObjectState]


@dataclass
class Background:
    """Holds what is under way: a checkpoint, or other values; one at a time. Its methods alone write it."""

    #: what is being done, or was last, and the worker that asked for it
    task: BackgroundTask | None = None
    asked_by: int | None = None
    #: the checkpoint that was begun last, and from which epoch on rows belong into it
    checkpoint: str = ""
    since: int = 0
    #: the rows that belong into it, where they have to be as they were when it began
    frozen: FrozenView | None = None
    #: goes through rows that nobody keeps as they were, for that
    reader: Reader = field(default_factory=Reader)
    #: by worker, who goes through what it keeps itself
    readers: dict[int, Reader] = field(default_factory=dict)
    #: the newest checkpoint that exists: its id and where it is
    last: tuple[str, str] = ("", "")
    #: a checkpoint that has been read, until it is taken over
    loaded: Loaded | None = None
    #: other values that have been uploaded, likewise, by worker: one may come late that was lost amid it
    uploads: dict[int, list[tuple[pb.Upload, Sequence[WireTensor]]]] = field(default_factory=dict)
    #: the attempt that was taken over last
    taken: str = ""

    def is_at(self, name: str) -> bool:
        """Say whether the work of this name is under way, or was last."""
        return self.task is not None and self.task.name == name

    def begin_checkpoint(self, checkpoint: str, since: int, worker: int) -> None:
        self.checkpoint, self.since, self.asked_by = checkpoint, since, worker

    def freeze(self, view: FrozenView) -> None:
        """Keep the rows of the checkpoint as they are now."""
        self.frozen = view

    def finish_checkpoint(self, checkpoint: str, url: str) -> None:
        """Note the newest checkpoint: this one is written, or was loaded, and nobody reads its view any more."""
        self.last = (checkpoint, url)
        self._leave_view()

    def begin(self, task: BackgroundTask, worker: int) -> BackgroundTask:
        self.task, self.asked_by = task, worker
        return task

    def upload(self, worker: int, upload: pb.Upload, tensors: Sequence[WireTensor]) -> None:
        if self.asked_by != worker and worker not in self.uploads:
            self._give_up()  # what one had begun that was lost amid it
        self.uploads.setdefault(worker, []).append((upload, tensors))

    def load(self, loaded: Loaded) -> None:
        self.loaded = loaded

    def take(self, attempt: str) -> None:
        """Remember the attempt whose values were taken over; what was read or uploaded is not needed any more."""
        self.stop()
        for worker in list(self.readers):
            self._read_no_further(worker)
        self.taken = attempt

    def stop(self) -> None:
        """Abandon whatever was begun, a checkpoint or other values."""
        self.uploads = {}
        self._give_up()

    def begin_anew(self, worker: int) -> None:
        """Abandon whatever was begun, but for what others upload."""
        self.uploads.pop(worker, None)
        self._give_up()

    def withdraw(self, worker: int, name: str) -> None:
        """Give up what this worker has begun under this name, or uploaded."""
        self.uploads.pop(worker, None)
        if self.asked_by == worker and self.is_at(name):
            self._give_up()

    def left(self, worker: int) -> None:
        """Give up what this worker asked for."""
        self._read_no_further(worker)
        self.uploads.pop(worker, None)
        if self.asked_by == worker:
            self._give_up()

    def reader_of(self, worker: int, *, begins: bool) -> Reader:
        """Return who goes through the state for a worker, which may begin anew."""
        reader = self.readers.setdefault(worker, Reader())
        if begins:
            reader.leave()
        return reader

    def _give_up(self) -> None:
        self.checkpoint, self.since, self.task, self.loaded = "", 0, None, None
        self._leave_view()

    def _leave_view(self) -> None:
        self.reader.leave()
        if self.frozen is not None:
            self.frozen.leave()
            self.frozen = None

    def _read_no_further(self, worker: int) -> None:
        if (reader := self.readers.pop(worker, None)) is not None:
            reader.leave()
