"""One worker does something for the whole job: server 0 grants it to the first that asks, and answers the others when
it is done."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fleet.base.outcome import telling
from fleet.errors import FleetError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.worker.runtime import WorkerRuntime

_log = logging.getLogger("fleet.worker")

_INTERRUPTED = "it was interrupted"


def once(worker: WorkerRuntime, name: str, act: Callable[[dict[str, Any]], None], *, by_anyone: bool) -> None:
    """Return when the call of this name has been carried out, by this worker's ``act`` or by another's; a failure is
    raised on all workers. If one is lost amid it, another one acts, from the beginning.

    ``name`` is the worker's ``name_of_call``; ``act`` is given it, and what the server says with its grant. Where modes
    let only worker 0 write checkpoints, ``by_anyone`` is for acts that need nothing of worker 0's own.
    """
    step, asked = worker.progress.completed, pb.Claim(name=name, by_anyone=by_anyone)

    def ask() -> Frame:
        arbiter = worker.connections.by_server[0]
        return arbiter.call(Frame(arbiter.request(step, claim=asked)), f"claim of {name}")

    def tell(failure: str, of: str = name) -> Frame:
        arbiter = worker.connections.by_server[0]  # another one than before, if it was this that moved the job
        return arbiter.call(
            Frame(arbiter.request(step, release=pb.Release(name=of, failure=failure))), f"release of {of}"
        )

    def release(failure: str) -> None:
        worker.claimed[thread] = name, failure
        if not failure:
            worker.following(lambda: tell(""))  # the job may have moved since the server heard of it
        else:
            try:
                tell(failure)
            except FleetError as error:
                _log.warning("the failure of %s could not be reported: %s", name, error)
        del worker.claimed[thread]

    thread = threading.get_ident()
    if thread in worker.claimed:  # it was interrupted once more, before it could say so
        of, outcome = worker.claimed[thread]
        worker.following(lambda: tell(outcome, of))
    worker.claimed[thread] = name, _INTERRUPTED
    try:
        with worker.figures.meet:
            claim = worker.following(ask)
    except Exception:
        del worker.claimed[thread]
        raise
    except BaseException:
        release(_INTERRUPTED)  # which it may have been when it was let in
        raise
    if not claim.message.granted:
        del worker.claimed[thread]
        return

    with telling(release):
        # Where the job moves amid it, as where this worker is lost, it is done again from the beginning.
        worker.following(lambda: act({"name": name, **json.loads(claim.message.about)}))


@contextlib.contextmanager
def withdrawn_if_it_fails(worker: WorkerRuntime, begun: str) -> Iterator[None]:
    """Surround what servers begin under this name, a checkpoint or other values, so that they forget it if it fails."""
    try:
        yield
    except BaseException:
        settle = pb.Settle(id=begun)
        with contextlib.suppress(FleetError):
            worker.connections.ask(f"end of {begun}", settle=settle)
        raise
