"""Decides who is let in at the doors of a process, and with how much."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet.base.cluster import Endpoint
from fleet.base.exposure import public_addresses, refuse_public
from fleet.base.settings import SecuritySettings
from fleet.errors import AuthenticationError
from fleet.ps.wire.tls import Tls

_log = logging.getLogger("fleet.wire")


@dataclass(frozen=True)
class Security:
    token: bytes = field(default=b"", repr=False)
    tls: Tls | None = None
    #: let everybody in, wherever that is
    insecure: bool = False
    max_message_bytes: int = SecuritySettings.max_message_bytes

    @classmethod
    def of(cls, settings: SecuritySettings) -> Security:
        # A token from the environment may hold bytes that are no text.
        token = settings.token.encode(errors="surrogateescape")
        return cls(token, Tls.read(settings), settings.insecure, settings.max_message_bytes)

    def refusal(self, presented: Sequence[bytes], endpoint: Endpoint) -> AuthenticationError | None:
        """Return why the server at ``endpoint`` does not take a request that came with these tokens; None if it
        does."""
        where = f"the server at {endpoint}"
        if not self.token:
            if not presented:
                return None
            return AuthenticationError(
                "a worker has a token, and the server has none",
                where=where,
                todo="Give the server the same FLEET_AUTH_TOKEN, or unset it on the workers.",
            )
        if not presented:
            return AuthenticationError(
                "the server asks for a token, and there is none",
                where=where,
                todo="Give this process the server's FLEET_AUTH_TOKEN.",
            )
        if len(presented) == 1 and hmac.compare_digest(presented[0], self.token):
            return None
        return AuthenticationError(
            "the token is not the server's",
            where=where,
            todo="Give every process of the job the same FLEET_AUTH_TOKEN.",
        )

    def check_listening(self, endpoint: Endpoint) -> None:
        """Check before a server opens a door that it can show a certificate where it should, and does not let in all
        the world unless it was told to."""
        if self.tls is not None:
            self.tls.check_for_server()
        keeps_out = bool(self.token) or (self.tls is not None and self.tls.mutual)
        if not (keeps_out or self.insecure):
            refuse_public(endpoint)

    def check_connecting(self, endpoint: Endpoint) -> None:
        if self.tls is not None:
            self.tls.check_for_worker()
        elif self.token and (public := public_addresses(endpoint)):
            _log.warning(
                "the token travels in the clear to %s (%s), which is no private address: set FLEET_TLS_CA here, and "
                "FLEET_TLS_CERT and FLEET_TLS_KEY on the servers",
                endpoint,
                ", ".join(public),
            )
