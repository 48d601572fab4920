"""A network, as the rest of the package knows it, listens and connects: one request, one reply.

A reply may come late and from any thread: a handler is given ``respond`` and may keep it. That is how a pull that
cannot be answered yet waits on a server without holding one of its threads. What a handler returns, if anything, is
work that no answer waits for: it is done when one that was given at once is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fleet.base.cluster import Endpoint
from fleet.ps.wire.frame import Frame

Respond = Callable[[Frame], None]
Handler = Callable[[Frame, Respond], Callable[[], None] | None]


class TransportError(Exception):
    """Says that the request got no reply: the peer is not there, went away, or the call was cancelled or timed out."""


class Call(Protocol):
    """Follows a request under way."""

    def send(self) -> None:
        """Hand over what the network did not take at once, waiting for the peer to read; ``result`` does so as well."""
        ...

    def result(self) -> Frame:
        """Wait for the reply; raise ``TransportError`` if none will come."""
        ...

    def cancel(self) -> None:
        """Let the thread that waits in ``result`` go on with a ``TransportError``."""
        ...


class BrokenCall:
    """Stands for a request that could not even leave."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def send(self) -> None:
        pass

    def result(self) -> Frame:
        raise TransportError(self._reason)

    def cancel(self) -> None:
        pass


class BrokenChannel:
    """Stands for a channel over which nothing can leave."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def start(
        self,
        request: Frame,  # noqa: ARG002
        timeout_s: float | None = None,  # noqa: ARG002
        *,
        urgent: bool = False,  # noqa: ARG002
        ahead: bool = False,  # noqa: ARG002
    ) -> Call:
        return BrokenCall(self._reason)

    def forked(self) -> Channel:
        return self

    def close(self) -> None:
        pass


class Channel(Protocol):
    """Sends requests to one endpoint. It is made without a connection, which comes with the first request."""

    def start(
        self, request: Frame, timeout_s: float | None = None, *, urgent: bool = False, ahead: bool = False
    ) -> Call:
        """Send a request. An ``urgent`` one is small, and never waits behind others at the server. Nobody reads the
        reply soon to one that is ``ahead``, and this reply must hold up no other."""
        ...

    def forked(self) -> Channel:
        """Return the same channel for a forked child of this process, with connections of its own, and without a lock
        of this one."""
        ...

    def close(self) -> None:
        """End the calls under way, and every later one, with a ``TransportError``."""
        ...


class Listener(Protocol):
    def close(self, grace_s: float = 0.0) -> None:
        """Stop taking requests; give replies under way ``grace_s`` to leave, then break the calls that are left."""
        ...


class Network(Protocol):
    def listen(self, endpoint: Endpoint, handler: Handler) -> Listener: ...

    def connect(self, endpoint: Endpoint) -> Channel: ...

    def own_address(self, towards: Endpoint) -> str:
        """Return the address under which this machine talks to that endpoint, and others find this machine."""
        ...
