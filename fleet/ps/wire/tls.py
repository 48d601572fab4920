"""A process's TLS files are read and checked before anything depends on them; a failed handshake is explained.

gRPC takes the files as they are, and says late, and in words of its own library, what is wrong with them. So they are
tried out here first, in memory; and where gRPC cannot reach a server that is up, a handshake of our own finds out why.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_connection

from fleet.base.cluster import Endpoint
from fleet.base.settings import SecuritySettings
from fleet.errors import AuthenticationError, ConfigurationError

#: Without it gRPC's servers speak to nobody; ours do not ask.
_ALPN = ["h2"]

#: A handshake to find out why gRPC's failed may take so long.
PROBE_S = 5.0


@dataclass(frozen=True)
class Tls:
    """Holds a certificate with its key, an authority, or both, as PEM."""

    settings: SecuritySettings
    certificate: bytes | None
    key: bytes | None = field(repr=False)
    authority: bytes | None
    #: what a worker demands and shows, and what a server does where its peers are of its own kind; the files may be
    #: others, or none, by the time of a later connection
    of_worker: ssl.SSLContext | None = field(repr=False)
    of_server: ssl.SSLContext | None = field(repr=False)

    @classmethod
    def read(cls, settings: SecuritySettings) -> Tls | None:
        """Read the files that are named; return None where none is."""
        if not (settings.cert or settings.ca):
            return None
        certificate, key, authority = (
            _read("FLEET_TLS_CERT", settings.cert),
            _read("FLEET_TLS_KEY", settings.key),
            _read("FLEET_TLS_CA", settings.ca),
        )
        of_worker = None if authority is None else _of_worker(settings, authority)
        of_server = None if certificate is None else _of_server(settings, certificate, authority)
        return cls(settings, certificate, key, authority, of_worker, of_server)

    @property
    def mutual(self) -> bool:
        """Say whether a server with these asks its clients for certificates."""
        return self.authority is not None

    def check_for_server(self) -> None:
        if self.certificate is None:
            raise ConfigurationError(
                "FLEET_TLS_CA alone makes no server: it has no certificate to show",
                got=f"FLEET_TLS_CA={self.settings.ca}",
                todo="Set FLEET_TLS_CERT and FLEET_TLS_KEY to those of this server.",
            )

    def check_for_worker(self) -> None:
        if self.authority is None:
            raise ConfigurationError(
                "a worker cannot tell its servers from strangers without FLEET_TLS_CA",
                got=f"FLEET_TLS_CERT={self.settings.cert} alone",
                todo="Set FLEET_TLS_CA to the authority that signed the servers' certificates.",
            )

    def context(self) -> ssl.SSLContext:
        """Return the context with what a worker demands and shows."""
        assert self.of_worker is not None, "check_for_worker has passed"
        return self.of_worker

    def server_context(self) -> ssl.SSLContext:
        """Return the context with what a server demands and shows where its peers are of its own kind."""
        assert self.of_server is not None, "check_for_server has passed"
        return self.of_server

    def name_of(self, endpoint: Endpoint) -> str:
        """Return the name that the certificate of a server has to have; the interface to an address of one link, which
        differs from machine to machine, is no part of it."""
        return self.settings.server_name or endpoint.host.strip("[]").partition("%")[0]


def why_no_handshake(endpoint: Endpoint, tls: Tls | None) -> AuthenticationError | None:
    """Return what keeps a worker from a server that is up; None if the server is not up, or may yet answer.

    Only what the other side makes known counts: a connection that just ends may be a server on its way up.
    """
    host = endpoint.host.strip("[]")
    name = host if tls is None else tls.name_of(endpoint)
    context = _curious() if tls is None else tls.context()
    try:
        with create_connection((host, endpoint.port), PROBE_S) as plain:
            try:
                line = context.wrap_socket(plain, server_hostname=name)
            except ssl.SSLEOFError:
                return None
            except ssl.SSLError as error:
                return _refused(endpoint, tls, error)
            with line:
                if tls is None:
                    return _needs_tls(endpoint)
                return None if _is_greeted(line) else _certificate_refused(endpoint, tls.settings)
    except OSError:
        return None


def _is_greeted(line: ssl.SSLSocket) -> bool:
    """Say whether the server speaks first. It looks at its client's certificate after the client's part of the
    handshake is over, and hangs up on one that it does not take, gRPC's without a word; to any other client it speaks
    first."""
    try:
        return bool(line.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def _refused(endpoint: Endpoint, tls: Tls | None, error: ssl.SSLError) -> AuthenticationError | None:
    alerted = "ALERT" in (error.reason or "")
    if tls is None:
        return _needs_tls(endpoint) if alerted else None
    settings = tls.settings
    if isinstance(error, ssl.SSLCertVerificationError):
        name = settings.server_name or endpoint.host
        return AuthenticationError(
            "the server's certificate is not to be trusted",
            where=str(endpoint),
            expected=f"one for {name}, valid now, signed by FLEET_TLS_CA={settings.ca}",
            got=error.verify_message,
            todo="Give the server such a certificate, or this worker the authority that signed it.",
        )
    if alerted:
        return _certificate_refused(endpoint, settings)
    return AuthenticationError(
        "the server does not speak TLS",
        where=str(endpoint),
        got=error.reason,
        todo="Set FLEET_TLS_CERT and FLEET_TLS_KEY on the server, or unset FLEET_TLS_* here.",
    )


def _certificate_refused(endpoint: Endpoint, settings: SecuritySettings) -> AuthenticationError:
    return AuthenticationError(
        "the server does not take this worker's certificate",
        where=str(endpoint),
        expected="one signed by the server's FLEET_TLS_CA",
        got=f"FLEET_TLS_CERT={settings.cert}" if settings.cert else "none",
        todo="Set FLEET_TLS_CERT and FLEET_TLS_KEY to a certificate that the server's authority has signed.",
    )


def _needs_tls(endpoint: Endpoint) -> AuthenticationError:
    return AuthenticationError(
        "the server speaks TLS only",
        where=str(endpoint),
        todo="Set FLEET_TLS_CA to the authority that signed its certificate.",
    )


def _read(variable: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError(f"{variable} cannot be read", where=path, got=why) from None


def _trusting(authority: bytes, variable: str, path: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=_text(authority))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"{variable} holds no certificate", where=path, expected="PEM", got=_reason(error)
        ) from None
    return context


def _text(certificates: bytes) -> str:
    """Return certificates as ``ssl`` takes them. What is written beside them may be in any encoding."""
    return certificates.decode("ascii", "replace").replace("\N{REPLACEMENT CHARACTER}", "?")


def _curious() -> ssl.SSLContext:
    """Return a context that talks to any server, only to learn whether it speaks TLS; nothing is said over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(_ALPN)
    return context


def _of_worker(settings: SecuritySettings, authority: bytes) -> ssl.SSLContext:
    context = _trusting(authority, "FLEET_TLS_CA", settings.ca)
    context.set_alpn_protocols(_ALPN)
    if settings.cert:
        _show(context, settings)
    return context


def _of_server(settings: SecuritySettings, certificate: bytes, authority: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # after the handshake a server says nothing by itself
    _show(context, settings)
    _try_out(context, settings, certificate)
    if authority is not None:
        context.load_verify_locations(cadata=_text(authority))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _show(context: ssl.SSLContext, settings: SecuritySettings) -> None:
    """Have a context show the certificate, which has to have this key."""
    try:
        context.load_cert_chain(settings.cert, settings.key, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(
            "FLEET_TLS_CERT and FLEET_TLS_KEY are not a certificate and its key",
            where=f"{settings.cert}, {settings.key}",
            expected="PEM, the key without a password",
            got=_reason(error),
        ) from None


def _try_out(server: ssl.SSLContext, settings: SecuritySettings, certificate: bytes) -> None:
    """Shake hands in memory with a peer that trusts exactly this certificate: what fails then is the certificate's own
    fault."""
    client = _trusting(certificate, "FLEET_TLS_CERT", settings.cert)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (ours, theirs, ours):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            "FLEET_TLS_CERT cannot be used",
            where=settings.cert,
            expected="a certificate valid now",
            got=error.verify_message,
        ) from None


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or str(error)
