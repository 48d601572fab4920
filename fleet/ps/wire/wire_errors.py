"""Errors travel: a ``FleetError`` becomes an ``Error`` message, and the same error again at the other end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from fleet import errors
from fleet.errors import FleetError
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import MAX_PAYLOAD_BYTES, Frame, read_frame
from fleet.ps.wire.transport import Handler, Respond, TransportError

_log = logging.getLogger("fleet.wire")

#: Room for a long traceback; what is more was not written for a reader.
_MOST_TEXT = 64 << 10

#: By every name, older ones included, so that a peer of any release is understood.
_KINDS = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, FleetError)}
#: Two classes have other names than they have on the wire, where peers of older releases know them by these.
_SENT_AS: dict[type[FleetError], str] = {
    errors.DuplicateWorkerError: "PlaceTakenError",
    errors.ServerBusyError: "StillBusyError",
}


def error_reply(error: FleetError) -> Frame:
    def text(value: object) -> str:
        # A file name may hold bytes that are no text; they must not keep the error from its reader.
        return "" if value is None else str(value)[:_MOST_TEXT].encode(errors="backslashreplace").decode()

    return Frame(
        pb.Reply(
            error=pb.Error(
                kind=_SENT_AS.get(type(error), type(error).__name__),
                what=text(error.what),
                where=text(error.where),
                expected=text(error.expected),
                got=text(error.got),
                todo=text(error.todo),
                ends_job=error.ends_job,
            )
        )
    )


def raise_if_error(reply: Frame) -> Frame:
    """Return a good reply as it is; raise the error in a bad one."""
    if reply.message.HasField("error"):
        sent = reply.message.error
        error = _KINDS.get(sent.kind, FleetError)(
            sent.what,
            where=sent.where or None,
            expected=sent.expected or None,
            got=sent.got or None,
            todo=sent.todo or None,
        )
        error.ends_job = sent.ends_job
        raise error
    return reply


def serve(
    handler: Handler, pieces: Iterable[bytes], respond: Respond, limit: int = MAX_PAYLOAD_BYTES
) -> Callable[[], None]:
    """Read a request and let ``handler`` answer it; return what is to be done after that."""
    try:
        request = read_frame(pb.Request, pieces, limit)
    except TransportError as error:  # there is nobody to answer
        _log.debug("a request did not arrive whole: %s", error)
    except FleetError as error:
        respond(error_reply(error))
    else:
        try:
            return handler(request, respond) or _nothing
        except Exception as error:
            respond(failure_reply(error))
    return _nothing


def failure_reply(error: Exception) -> Frame:
    """Return the reply to a request whose handler has failed: this peer hears why, and nobody else."""
    if isinstance(error, FleetError):
        return error_reply(error)
    _log.error("a request failed inside the server", exc_info=error)
    return error_reply(FleetError("the server failed on this request", got=repr(error)))


def _nothing() -> None:
    pass
